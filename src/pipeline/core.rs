//! Frames become records: the pure heart of a pipeline, without sockets, time or tasks.

use std::collections::HashMap;

use tracing::warn;

use super::PipelineError;
use super::sink::{Produced, Sink};
use super::watermark::{OrderError, Watermark};
use crate::outbox::Record;
use crate::outbox::columns::{COLUMNS_MAX, Mapping, Row, TableColumn};
use crate::outbox::route::Router;
use crate::outbox::settings::OutboxSettings;
use crate::postgres::frame::Frame;
use crate::postgres::lsn::{Lsn, Position};
use crate::postgres::pgoutput::{Message, Relation, Tuple, Value};
use crate::postgres::table::TableName;

/// Bytes of the window that a record takes beside its key, value and headers: what librdkafka
/// keeps for each message, and for each header.
const RECORD_OVERHEAD: usize = 256;
const HEADER_OVERHEAD: usize = 64;

/// Decodes, maps, routes and hands over, one frame at a time.
pub struct Core {
    table: TableName,
    settings: OutboxSettings,
    /// Mappings of the outbox by its OID. There is one, until the table is made anew.
    mappings: Vec<(u32, Mapping)>,
    /// Names of other relations by their OID: the outbox's partitions are described too, although
    /// their rows come under the root's OID.
    others: HashMap<u32, String>,
    router: Router,
    /// Where the next row message is; `None` outside a transaction.
    position: Option<Position>,
    warned_of_update: bool,
    /// Deliveries in any order to one confirmed LSN.
    pub watermark: Watermark,
}

/// What came of a frame.
#[derive(Debug, PartialEq, Eq)]
pub enum Step {
    /// It is done with.
    Done,
    /// It is done with, and the server wants to hear from us.
    Answer,
    /// The sink is full: hand in the same frame again when there is room.
    Full,
    /// The sink has to prepare this topic: hand in the same frame again when it has.
    NewTopic(String),
}

impl Core {
    /// For the rows of `table`.
    #[must_use]
    pub fn new(table: TableName, settings: OutboxSettings, watermark: Watermark) -> Self {
        Self {
            table,
            settings,
            mappings: Vec::new(),
            others: HashMap::new(),
            router: Router::default(),
            position: None,
            warned_of_update: false,
            watermark,
        }
    }

    /// A new connection begins, and resumes at the slot's `confirmed_flush_lsn`.
    pub fn reconnected(&mut self, resume: Lsn) {
        self.mappings.clear();
        self.others.clear();
        self.position = None;
        self.watermark.reconnected(resume);
    }

    /// A transaction has begun and not ended.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.position.is_some()
    }

    /// Takes one frame to its end, or leaves everything as it was and says what to wait for.
    ///
    /// # Errors
    /// What can't be decoded, mapped, routed or produced.
    pub fn frame(
        &mut self,
        frame: &Frame<'_>,
        sink: &mut impl Sink,
    ) -> Result<Step, PipelineError> {
        match *frame {
            Frame::Keepalive {
                wal_end,
                reply_requested,
            } => {
                self.watermark.idle(wal_end);
                Ok(if reply_requested {
                    Step::Answer
                } else {
                    Step::Done
                })
            }
            Frame::XLogData { data, .. } => {
                let message = Message::decode(data).map_err(|error| PipelineError::Decode {
                    at: self.place(),
                    error,
                })?;
                self.message(&message, sink)
            }
        }
    }

    fn message(
        &mut self,
        message: &Message<'_>,
        sink: &mut impl Sink,
    ) -> Result<Step, PipelineError> {
        match message {
            Message::Begin(begin) => {
                self.watermark.begin(begin.commit)?;
                self.position = Some(Position {
                    commit: begin.commit,
                    index: 0,
                });
            }
            Message::Commit(commit) => {
                self.watermark.commit(commit.commit, commit.end)?;
                self.position = None;
            }
            Message::Relation(relation) => self.relation(relation)?,
            Message::Insert { relation, new } => return self.insert(*relation, new, sink),
            // A row that is deleted or updated later was delivered when it was inserted.
            Message::Update { .. } => {
                if !std::mem::replace(&mut self.warned_of_update, true) {
                    let at = self.place();
                    warn!(table = %self.table, at, "an UPDATE of an outbox row is not an event, and is left out");
                }
                self.count_row()?;
            }
            Message::Delete { .. } => {
                self.count_row()?;
            }
            Message::Truncate { .. }
            | Message::Origin { .. }
            | Message::Type { .. }
            | Message::Logical { .. } => {}
        }
        Ok(Step::Done)
    }

    fn relation(&mut self, relation: &Relation<'_>) -> Result<(), PipelineError> {
        if !self.table.is(relation.namespace, relation.name) {
            let name = format!("{}.{}", relation.namespace, relation.name);
            self.others.insert(relation.oid, name);
            return Ok(());
        }
        let columns: Vec<_> = relation
            .columns
            .iter()
            .map(|column| TableColumn {
                name: column.name,
                type_oid: column.type_oid,
            })
            .collect();
        let mapping = Mapping::bind(&self.settings, &self.table.to_string(), &columns)?;
        self.mappings.retain(|(oid, _)| *oid != relation.oid);
        self.mappings.push((relation.oid, mapping));
        Ok(())
    }

    fn insert(
        &mut self,
        relation: u32,
        tuple: &Tuple<'_>,
        sink: &mut impl Sink,
    ) -> Result<Step, PipelineError> {
        let position = self.position.ok_or(OrderError::Stray)?;
        let Some((_, mapping)) = self.mappings.iter().find(|(oid, _)| *oid == relation) else {
            return Err(match self.others.get(&relation) {
                Some(name) => PipelineError::ForeignTable {
                    at: position,
                    found: name.clone(),
                    expected: self.table.clone(),
                },
                None => PipelineError::UnknownRelation {
                    at: position,
                    oid: relation,
                },
            });
        };
        let row = lay_out(mapping, tuple).map_err(|found| PipelineError::BadTuple {
            at: position,
            table: self.table.clone(),
            found,
        })?;
        let record = self
            .router
            .route(mapping, &row, &position.text())
            .map_err(|error| PipelineError::Route {
                at: position,
                row: mapping.describe(&row),
                error,
            })?;
        let Some(tag) = self.watermark.reserve(cost(&record))? else {
            return Ok(Step::Full);
        };
        match sink.produce(&record, tag) {
            Ok(Produced::Taken) => {
                self.count_row()?;
                Ok(Step::Done)
            }
            Ok(Produced::Full) => {
                self.watermark.release(tag);
                Ok(Step::Full)
            }
            Ok(Produced::NewTopic) => {
                self.watermark.release(tag);
                Ok(Step::NewTopic(record.topic.to_owned()))
            }
            Err(error) => {
                self.watermark.release(tag);
                Err(PipelineError::Produce {
                    at: position,
                    row: mapping.describe(&row),
                    error,
                })
            }
        }
    }

    /// Every row message has an index, whatever becomes of it, so that a setting can't shift the
    /// positions of others.
    fn count_row(&mut self) -> Result<(), PipelineError> {
        self.position.as_mut().ok_or(OrderError::Stray)?.index += 1;
        Ok(())
    }

    /// Where the next message is in the log, for people.
    #[must_use]
    pub fn place(&self) -> String {
        match self.position {
            Some(position) => position.to_string(),
            None => format!("after {}", self.watermark.received()),
        }
    }
}

/// Puts the values that `mapping` needs into their slots.
fn lay_out<'a>(mapping: &Mapping, tuple: &Tuple<'a>) -> Result<Row<'a>, &'static str> {
    if tuple.len() != mapping.width() {
        return Err("a row with another number of columns than the table's");
    }
    let mut row = [None; COLUMNS_MAX];
    for (index, value) in tuple.values().enumerate() {
        let Some(slot) = mapping.slot(index) else {
            continue;
        };
        row[slot] = match value {
            Value::Null => None,
            Value::Text(text) => Some(text),
            Value::Binary(_) => return Err("a value in binary form, which was not asked for"),
            Value::UnchangedToast => return Err("an inserted row without its out-of-line value"),
        };
    }
    Ok(row)
}

fn cost(record: &Record<'_>) -> u64 {
    let of = |bytes: Option<&[u8]>| bytes.map_or(0, <[u8]>::len);
    let headers = record
        .headers
        .iter()
        .map(|(name, value)| name.len() + of(value) + HEADER_OVERHEAD)
        .sum::<usize>();
    (of(record.key) + of(record.payload) + headers + RECORD_OVERHEAD) as u64
}

#[cfg(test)]
mod tests;
