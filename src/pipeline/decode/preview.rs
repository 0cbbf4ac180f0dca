//! Predicts how the messages in a range of WAL would be handled, so that an operator can decide
//! whether to skip the range. This module performs no I/O and uses no sink.

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
use crate::postgres::replication::ConnectionError;
use crate::postgres::target::Outbox;
use crate::postgres::wire::pgoutput::{Message, Relation};

/// Maximum number of events that are listed individually.
const SHOWN_MAX: usize = 20;
/// Maximum number of topics for which events are counted separately.
const TOPICS_MAX: usize = 1000;
/// Maximum length, in characters, of the text that explains why an event can't be converted to a
/// record.
const REASON_CHARS_MAX: usize = 300;

/// The end of a range of WAL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Until {
    /// The range includes every transaction whose commit record is before this LSN.
    Before(Lsn),
    /// The last transaction in the range is the one whose commit record is at this LSN.
    Commit(Lsn),
}

/// Processes messages in order, and reports the events among them.
pub(crate) struct Preview {
    source: Source,
    others: OtherTables,
    /// The reason why the outbox table does not match the settings; `None` if it matches.
    unmapped: Option<String>,
    router: Router,
    position: Option<Position>,
    until: Until,
    /// The events that the pipeline has already processed, according to its checkpoint.
    delivered: Option<Delivered>,
    /// The result of the preview.
    pub found: PreviewReport,
}

/// A summary of the events in a range of WAL.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct PreviewReport {
    /// Number of transactions that contain events.
    pub transactions: u64,
    pub events: u64,
    /// Number of events that have already been delivered or skipped, according to the checkpoint.
    pub dealt_with: u64,
    /// Number of events that can't be converted to records.
    pub unroutable: u64,
    /// Number of events for each topic; unroutable events are not included. After [`TOPICS_MAX`]
    /// topics, the events of all further topics are counted under "".
    pub topics: BTreeMap<String, u64>,
    /// Number of rows and messages that are not events of this outbox, such as rows of other tables
    /// and messages with a different prefix.
    pub foreign: u64,
    /// The first events, at most [`SHOWN_MAX`].
    pub first: Vec<PreviewedEvent>,
    /// Position of the last event.
    pub last: Option<Position>,
    /// For [`Until::Commit`]: the end LSN of the last transaction in the range, and the number of
    /// messages in this transaction that are assigned an index. If the server can't send one of the
    /// transaction's rows, the LSN is instead one byte after the start of the transaction's commit
    /// record, and messages after that row are not counted.
    pub end: Option<(Lsn, u64)>,
    /// The row that the server can't send, if any. The transaction may contain events after it.
    pub unsendable: Option<Position>,
}

/// One event, without its payload.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PreviewedEvent {
    at: Position,
    row: String,
    /// The event's topic, or why the event can't be converted to a record.
    outcome: Result<String, String>,
    dealt_with: bool,
}

impl PreviewedEvent {
    #[must_use]
    pub(crate) fn position(&self) -> Position {
        self.at
    }
}

impl fmt::Display for PreviewedEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            at, row, outcome, ..
        } = self;
        match outcome {
            Ok(topic) => write!(f, "{at} {row}, for topic {topic}")?,
            Err(reason) => write!(
                f,
                "{at} {row}, which can't be converted to a record: {reason}"
            )?,
        }
        f.write_str(if self.dealt_with {
            " (already processed)"
        } else {
            ""
        })
    }
}

impl Preview {
    /// Creates a preview of the WAL up to `until`. `delivered` contains the events that have
    /// already been processed, according to the pipeline's checkpoint.
    ///
    /// # Errors
    /// Returns an error if the outbox consists of logical decoding messages and the settings refer
    /// to a column that such events do not have.
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
            found: PreviewReport::default(),
        })
    }

    /// Same as [`Core::describe_columns`](super::Core::describe_columns).
    pub(crate) fn describe_columns(&mut self, facts: HashMap<u32, Vec<ColumnFacts>>) {
        if let Source::Table(source) = &mut self.source {
            source.describe(facts);
        }
    }

    /// Same as [`Core::read_older_rows_of`](super::Core::read_older_rows_of).
    pub(crate) fn read_older_rows_of(&mut self, publication: &str) {
        self.source.read_older_rows_of(publication);
    }

    /// Processes one message from the output plugin, and returns `false` once the message is past
    /// the end of the range.
    pub(crate) fn message(&mut self, data: &[u8]) -> bool {
        let message = match Message::decode(data) {
            Ok(message) => message,
            Err(error) => {
                self.count_event("message".to_owned(), Err(error.to_string()));
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
                    Ok(None) => self.count_skipped(),
                    Ok(Some(table)) => {
                        let (row, outcome) =
                            describe_row(&mut self.router, table.mapping(), &values, at);
                        self.count_event(row, outcome);
                    }
                    Err(CoreError::ForeignTable { .. }) => self.count_skipped(),
                    Err(error) => {
                        let reason = self.unmapped.clone().unwrap_or_else(|| error.to_string());
                        self.count_event("row".to_owned(), Err(reason));
                    }
                }
            }
            Meaning::OlderRow { source, tuple } => {
                let older = source.older(at, tuple);
                let found = older.map_err(|error| error.to_string());
                let found = found.and_then(|older| {
                    let bound = older.map(|older| Ok((source.mapping_for(&older)?, older)));
                    bound
                        .transpose()
                        .map_err(|error: MappingError| error.to_string())
                });
                match found {
                    Ok(None) => self.count_skipped(),
                    Ok(Some((mapping, older))) => {
                        let (row, outcome) =
                            describe_row(&mut self.router, &mapping, &older.to_row(&mapping), at);
                        self.count_event(row, outcome);
                    }
                    Err(reason) => self.count_event("row".to_owned(), Err(reason)),
                }
            }
            Meaning::Published {
                source, content, ..
            } => {
                let (row, outcome) = describe_message(&mut self.router, source, at, content);
                self.count_event(row, outcome);
            }
            Meaning::UnexpectedRow { .. } | Meaning::Foreign => self.count_skipped(),
            Meaning::Changed { .. } => self.advance(),
            Meaning::Nontransactional { .. } | Meaning::Ignored => {}
        }
        true
    }

    /// Counts the next row as an event that can't be converted to a record if `error` means that
    /// the server can't send this row. Returns the row's position if it was counted. No messages
    /// follow an error of this kind.
    pub(crate) fn record_unsendable(&mut self, error: &ConnectionError) -> Option<Position> {
        let at = self.position?;
        error.unsendable_cause()?;
        self.count_event("row".to_owned(), Err(error.to_string()));
        self.found.end = Some((Lsn(at.commit.0 + 1), at.index + 1));
        self.found.unsendable = Some(at);
        Some(at)
    }

    fn relation(&mut self, relation: &Relation<'_>) {
        let at = self.position.unwrap_or_default().to_string();
        let is_outbox = match &mut self.source {
            Source::Table(source) if !source.has_room_for(relation.oid) => {
                source.reconnected();
                source.relation(relation, self.position, &at)
            }
            Source::Table(source) => source.relation(relation, self.position, &at),
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

    fn count_event(&mut self, row: String, outcome: Result<String, String>) {
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
        match &outcome {
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
            let outcome = outcome.map_err(|reason| reason.chars().take(REASON_CHARS_MAX).collect());
            found.first.push(PreviewedEvent {
                at,
                row,
                outcome,
                dealt_with,
            });
        }
        self.advance();
    }

    /// Counts a row or a message that is not an event of this outbox.
    fn count_skipped(&mut self) {
        self.found.foreign += u64::from(self.position.is_some());
        self.advance();
    }

    fn advance(&mut self) {
        if let Some(position) = &mut self.position {
            position.index += 1;
        }
    }
}

/// Describes the row, and returns the topic it is routed to, or why it can't be converted to a
/// record.
fn describe_row(
    router: &mut Router,
    mapping: &Mapping,
    row: &Row<'_>,
    at: Position,
) -> (String, Result<String, String>) {
    let routed = router.route(mapping, row, &at.text());
    let outcome = match routed {
        Ok(record) => Ok(record.topic.to_owned()),
        Err(error) => Err(error.to_string()),
    };
    (mapping.describe(row), outcome)
}

fn describe_message(
    router: &mut Router,
    source: &MessageSource,
    at: Position,
    content: &[u8],
) -> (String, Result<String, String>) {
    match source.event(content) {
        Ok(envelope) => {
            let mut texts = Texts::default();
            let row = envelope.row(source.mapping(), &mut texts);
            describe_row(router, source.mapping(), &row, at)
        }
        Err(error) => ("message".to_owned(), Err(error.to_string())),
    }
}
