//! What would become of the messages of a stretch of WAL, without a sink: for a person who
//! decides whether to leave them out. Pure.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use super::message_source::MessageSource;
use super::other_tables::OtherTables;
use super::source::{Meaning, Source};
use crate::delivery::checkpoint::Delivered;
use crate::model::lsn::{Lsn, Position};
use crate::outbox::columns::{COLUMNS_MAX, Mapping, MappingError, Row};
use crate::outbox::connect::ColumnFacts;
use crate::outbox::envelope::Texts;
use crate::outbox::route::Router;
use crate::outbox::settings::OutboxSettings;
use crate::pipeline::decode::error::CoreError;
use crate::postgres::target::Outbox;
use crate::postgres::wire::pgoutput::{Message, Relation};

/// So many events are shown one by one.
const SHOWN_MAX: usize = 20;
/// So many topics are counted apart.
const TOPICS_MAX: usize = 1000;
/// So much is shown of why one can't become a record.
const REASON_CHARS_MAX: usize = 300;

/// Where the stretch ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Until {
    /// Transactions whose commit record is before this are in it.
    Before(Lsn),
    /// The transaction with the commit record here is the last.
    Commit(Lsn),
}

/// Takes the messages in their order, and counts.
pub(crate) struct Preview {
    source: Source,
    others: OtherTables,
    /// Why the table's rows mean nothing.
    unmapped: Option<String>,
    router: Router,
    position: Option<Position>,
    until: Until,
    /// What was dealt with before.
    delivered: Option<Delivered>,
    /// What was found.
    pub found: Found,
}

/// What is in a stretch of WAL.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Found {
    /// Transactions with events.
    pub transactions: u64,
    pub events: u64,
    /// so many were dealt with before, as the checkpoint says: delivered or left out; and
    pub dealt_with: u64,
    /// so many can't become a record.
    pub unroutable: u64,
    /// The others by topic; those of more topics than can be told apart are under "".
    pub topics: BTreeMap<String, u64>,
    /// Rows of other tables, and messages with another prefix.
    pub foreign: u64,
    /// The first events.
    pub first: Vec<Shown>,
    /// The last event.
    pub last: Option<Position>,
    /// Where the transaction with the sought commit record ends, and how many row messages it has.
    pub end: Option<(Lsn, u64)>,
}

/// One event, without its payload.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Shown {
    at: Position,
    row: String,
    /// Its topic, or why it can't become a record.
    fate: Result<String, String>,
    dealt_with: bool,
}

impl Shown {
    /// Where it is.
    #[must_use]
    pub(crate) fn at(&self) -> Position {
        self.at
    }
}

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { at, row, fate, .. } = self;
        match fate {
            Ok(topic) => write!(f, "{at} {row}, for topic {topic}")?,
            Err(reason) => write!(f, "{at} {row}, which can't become a record: {reason}")?,
        }
        f.write_str(if self.dealt_with {
            " (dealt with before)"
        } else {
            ""
        })
    }
}

impl Preview {
    /// Of the log up to there, for an outbox with these settings; `delivered` is what its checkpoint
    /// says.
    ///
    /// # Errors
    /// The settings name what an event in a message has not.
    pub(crate) fn new(
        outbox: Outbox,
        settings: OutboxSettings,
        until: Until,
        delivered: Option<Delivered>,
    ) -> Result<Self, MappingError> {
        Ok(Self {
            source: Source::new(outbox, settings)?,
            others: OtherTables::default(),
            unmapped: None,
            router: Router::default(),
            position: None,
            until,
            delivered,
            found: Found::default(),
        })
    }

    /// As [`Core::describe_columns`](super::Core::describe_columns).
    pub(crate) fn describe_columns(&mut self, facts: HashMap<u32, Vec<ColumnFacts>>) {
        if let Source::Table(source) = &mut self.source {
            source.describe(facts);
        }
    }

    /// As [`Core::read_older_rows_of`](super::Core::read_older_rows_of).
    pub(crate) fn read_older_rows_of(&mut self, publication: &str) {
        self.source.read_older_rows_of(publication);
    }

    /// Takes one message of the plugin, and says whether the stretch goes on behind it.
    pub(crate) fn message(&mut self, data: &[u8]) -> bool {
        let message = match Message::decode(data) {
            Ok(message) => message,
            Err(error) => {
                self.counted("message".to_owned(), Err(error.to_string()));
                return true;
            }
        };
        let at = self.position.unwrap_or_default();
        match self.source.meaning(&message) {
            Meaning::Begin(begin) => {
                let is_in = match self.until {
                    Until::Before(lsn) => begin.commit < lsn,
                    Until::Commit(lsn) => begin.commit <= lsn,
                };
                self.position = is_in.then_some(Position {
                    commit: begin.commit,
                    index: 0,
                });
                return is_in;
            }
            Meaning::Commit(commit) => {
                if let Some(position) = self.position.take()
                    && self.until == Until::Commit(commit.commit)
                {
                    self.found.end = Some((commit.end, position.index));
                }
            }
            Meaning::Relation(relation) => self.relation(relation),
            Meaning::Row {
                source,
                relation,
                tuple,
            } => {
                let mut values = [None; COLUMNS_MAX];
                match source.row(at, relation, tuple, &self.others, &mut values) {
                    Ok(None) => self.passed_over(),
                    Ok(Some(table)) => {
                        let (row, fate) = fate(&mut self.router, table.mapping(), &values, at);
                        self.counted(row, fate);
                    }
                    Err(CoreError::ForeignTable { .. }) => self.passed_over(),
                    Err(error) => {
                        let reason = self.unmapped.clone().unwrap_or_else(|| error.to_string());
                        self.counted("row".to_owned(), Err(reason));
                    }
                }
            }
            Meaning::Older { source, tuple } => {
                let older = source.older(at, tuple);
                let found = older.map_err(|error| error.to_string());
                let found = found.and_then(|older| {
                    let bound = older.map(|older| Ok((source.mapping_of(&older)?, older)));
                    bound
                        .transpose()
                        .map_err(|error: MappingError| error.to_string())
                });
                match found {
                    Ok(None) => self.passed_over(),
                    Ok(Some((mapping, older))) => {
                        let (row, fate) =
                            fate(&mut self.router, &mapping, &older.lay_out(&mapping), at);
                        self.counted(row, fate);
                    }
                    Err(reason) => self.counted("row".to_owned(), Err(reason)),
                }
            }
            Meaning::Published {
                source, content, ..
            } => {
                let (row, fate) = event(&mut self.router, source, at, content);
                self.counted(row, fate);
            }
            Meaning::RowBeside { .. } | Meaning::Foreign => self.passed_over(),
            Meaning::Changed { .. } => self.next(),
            Meaning::OutsideOfTransactions { .. } | Meaning::Nothing => {}
        }
        true
    }

    fn relation(&mut self, relation: &Relation<'_>) {
        let place = self.position.unwrap_or_default().to_string();
        let is_outbox = match &mut self.source {
            Source::Table(source) if !source.has_room_for(relation.oid) => {
                source.reconnected();
                source.relation(relation, &place)
            }
            Source::Table(source) => source.relation(relation, &place),
            Source::Messages(_) => Ok(false),
        };
        match is_outbox {
            Ok(true) => self.unmapped = None,
            Ok(false) => {
                let name = format!("{}.{}", relation.namespace, relation.name);
                self.others.insert(relation.oid, name);
            }
            Err(error) => self.unmapped = Some(error.to_string()),
        }
    }

    /// An event has been seen.
    fn counted(&mut self, row: String, fate: Result<String, String>) {
        let Some(at) = self.position else { return };
        let found = &mut self.found;
        if found.last.is_none_or(|last| last.commit != at.commit) {
            found.transactions += 1;
        }
        found.events += 1;
        found.last = Some(at);
        let dealt_with = match &self.delivered {
            None => false,
            Some(Delivered::UpTo(last)) => at <= last.position(),
            Some(Delivered::Before(lsn)) => at.commit < *lsn,
        };
        found.dealt_with += u64::from(dealt_with);
        match &fate {
            Err(_) => found.unroutable += 1,
            Ok(topic) => {
                let is_known = found.topics.contains_key(topic) || found.topics.len() < TOPICS_MAX;
                let topic = if is_known { topic.as_str() } else { "" };
                match found.topics.get_mut(topic) {
                    Some(count) => *count += 1,
                    None => drop(found.topics.insert(topic.to_owned(), 1)),
                }
            }
        }
        if found.first.len() < SHOWN_MAX {
            let fate = fate.map_err(|reason| reason.chars().take(REASON_CHARS_MAX).collect());
            found.first.push(Shown {
                at,
                row,
                fate,
                dealt_with,
            });
        }
        self.next();
    }

    /// A row or a message has been seen that is no event of this outbox.
    fn passed_over(&mut self) {
        self.found.foreign += u64::from(self.position.is_some());
        self.next();
    }

    fn next(&mut self) {
        if let Some(position) = &mut self.position {
            position.index += 1;
        }
    }
}

/// The row for a person, and its topic or why it has none.
fn fate(
    router: &mut Router,
    mapping: &Mapping,
    row: &Row<'_>,
    at: Position,
) -> (String, Result<String, String>) {
    let routed = router.route(mapping, row, &at.text());
    let fate = match routed {
        Ok(record) => Ok(record.topic.to_owned()),
        Err(error) => Err(error.to_string()),
    };
    (mapping.describe(row), fate)
}

fn event(
    router: &mut Router,
    source: &MessageSource,
    at: Position,
    content: &[u8],
) -> (String, Result<String, String>) {
    match source.event(content) {
        Ok(envelope) => {
            let mut texts = Texts::default();
            let row = envelope.row(source.mapping(), &mut texts);
            fate(router, source.mapping(), &row, at)
        }
        Err(error) => ("message".to_owned(), Err(error.to_string())),
    }
}
