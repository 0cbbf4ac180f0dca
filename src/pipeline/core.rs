//! Frames become records: the pure heart of a pipeline, without sockets, time or tasks.

use std::collections::HashMap;

use tracing::warn;

use self::books::Books;
use self::log::LogSource;
use self::table::TableSource;
use super::PipelineError;
use super::checkpoint::{Delivered, Last};
use super::sink::{Produced, Sink};
use super::watermark::{OrderError, Watermark};
use crate::outbox::Record;
use crate::outbox::columns::{Mapping, MappingError, Row};
use crate::outbox::envelope::Texts;
use crate::outbox::route::Router;
use crate::outbox::settings::OutboxSettings;
use crate::postgres::frame::Frame;
use crate::postgres::lsn::{Lsn, Position};
use crate::postgres::pgoutput::{Message, Relation, Tuple};
use crate::postgres::target::Outbox;

mod books;
mod log;
mod table;

/// Bytes of the window that a record takes beside its key, value and headers: what librdkafka
/// keeps for each message and for each header, and what the allocator has left over beside them.
const RECORD_OVERHEAD: usize = 384;
const HEADER_OVERHEAD: usize = 64;

/// Decodes, maps, routes and hands over, one frame at a time.
pub struct Core {
    source: Source,
    /// Names of relations that are not the outbox, by their OID: its partitions are described too,
    /// although their rows come under the root's OID.
    others: HashMap<u32, String>,
    router: Router,
    /// Where the next row message is; `None` outside a transaction.
    position: Option<Position>,
    warned_of_update: bool,
    /// Exactly-once: what is left out and what was dealt with.
    books: Option<Books>,
    /// Deliveries in any order to one confirmed LSN.
    pub watermark: Watermark,
}

/// Where events come from.
enum Source {
    Table(TableSource),
    Log(LogSource),
}

/// Messages in the log that are no events of this outbox. What comes again is counted again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeftAlone {
    /// Those of a transaction, with another prefix.
    pub foreign: u64,
    /// Those of no transaction, with any prefix.
    pub nontransactional: u64,
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
    /// For the events of `outbox`.
    ///
    /// # Errors
    /// The settings name what an event in the log has not. What a table has is known later.
    pub fn new(
        outbox: Outbox,
        settings: OutboxSettings,
        watermark: Watermark,
    ) -> Result<Self, MappingError> {
        let source = match outbox {
            Outbox::Table(table) => Source::Table(TableSource::new(table, settings)),
            Outbox::Log { prefix } => Source::Log(LogSource::new(prefix, &settings)?),
        };
        Ok(Self {
            source,
            others: HashMap::new(),
            router: Router::default(),
            position: None,
            warned_of_update: false,
            books: None,
            watermark,
        })
    }

    /// For exactly-once: leaves out what was `delivered` of a stream that resumes at `confirmed`,
    /// and keeps books of the rest. Comes after [`Core::reconnected`].
    pub fn leave_out(&mut self, delivered: Option<Delivered>, confirmed: Lsn) {
        self.books = Some(Books::new(delivered, confirmed));
    }

    /// The last event that was delivered since [`Core::leave_out`].
    #[must_use]
    pub fn last(&self) -> Option<Last> {
        self.books.as_ref().and_then(Books::last)
    }

    /// A new connection begins, and resumes at the slot's `confirmed_flush_lsn`.
    pub fn reconnected(&mut self, resume: Lsn) {
        if let Source::Table(source) = &mut self.source {
            source.reconnected();
        }
        self.others.clear();
        self.position = None;
        self.watermark.reconnected(resume);
    }

    /// Messages that came and were no events of this outbox; nothing for a table.
    #[must_use]
    pub fn left_alone(&self) -> Option<LeftAlone> {
        match &self.source {
            Source::Table(_) => None,
            Source::Log(source) => Some(source.left_alone),
        }
    }

    /// Counts on from what [`Core::left_alone`] said of the core before this one.
    pub fn go_on_counting(&mut self, before: Option<LeftAlone>) {
        if let (Source::Log(source), Some(before)) = (&mut self.source, before) {
            source.left_alone = before;
        }
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
                if let Some(books) = &mut self.books {
                    books.begin(begin)?;
                }
                self.position = Some(Position {
                    commit: begin.commit,
                    index: 0,
                });
            }
            Message::Commit(commit) => {
                self.watermark.commit(commit.commit, commit.end)?;
                if let (Some(books), Some(position)) = (&mut self.books, self.position) {
                    books.commit(position)?;
                }
                self.position = None;
            }
            Message::Relation(relation) => self.relation(relation)?,
            Message::Insert { relation, new } => return self.insert(*relation, new, sink),
            Message::Update { relation, .. } => return self.changed(*relation, true),
            Message::Delete { relation, .. } => return self.changed(*relation, false),
            Message::Logical {
                transactional,
                prefix,
                content,
                ..
            } => return self.logical(*transactional, prefix, content, sink),
            Message::Truncate { .. } | Message::Origin { .. } | Message::Type { .. } => {}
        }
        Ok(Step::Done)
    }

    fn relation(&mut self, relation: &Relation<'_>) -> Result<(), PipelineError> {
        let is_outbox = match &mut self.source {
            Source::Table(source) => source.relation(relation)?,
            Source::Log(_) => false,
        };
        if !is_outbox {
            let name = format!("{}.{}", relation.namespace, relation.name);
            self.others.insert(relation.oid, name);
        }
        Ok(())
    }

    fn insert(
        &mut self,
        relation: u32,
        tuple: &Tuple<'_>,
        sink: &mut impl Sink,
    ) -> Result<Step, PipelineError> {
        let at = self.position.ok_or(OrderError::Stray)?;
        let Source::Table(source) = &self.source else {
            return Err(self.beside_log(at, relation));
        };
        let (mapping, row) = source.row(at, relation, tuple, &self.others)?;
        let event = Event { at, mapping, row };
        let step = event.deliver(&mut self.books, &mut self.router, &mut self.watermark, sink)?;
        self.counted(step)
    }

    fn logical(
        &mut self,
        transactional: bool,
        prefix: &str,
        content: &[u8],
        sink: &mut impl Sink,
    ) -> Result<Step, PipelineError> {
        let Source::Log(source) = &mut self.source else {
            return Ok(Step::Done);
        };
        if !transactional {
            source.outside_of_transactions(prefix);
            return Ok(Step::Done);
        }
        let at = self.position.ok_or(OrderError::Stray)?;
        if !source.is_ours(prefix) {
            source.left_alone.foreign += 1;
            return self.counted(Step::Done);
        }
        let envelope = source.event(at, content)?;
        let mut texts = Texts::default();
        let mapping = source.mapping();
        let row = envelope.row(mapping, &mut texts);
        let event = Event { at, mapping, row };
        let step = event.deliver(&mut self.books, &mut self.router, &mut self.watermark, sink)?;
        self.counted(step)
    }

    /// A row that was updated or deleted: it was delivered when it was inserted.
    fn changed(&mut self, relation: u32, is_update: bool) -> Result<Step, PipelineError> {
        let at = self.position.ok_or(OrderError::Stray)?;
        let Source::Table(source) = &self.source else {
            return Err(self.beside_log(at, relation));
        };
        if is_update && !std::mem::replace(&mut self.warned_of_update, true) {
            warn!(table = %source.table(), %at, "an UPDATE of an outbox row is not an event, and is left out");
        }
        self.counted(Step::Done)
    }

    fn beside_log(&self, at: Position, relation: u32) -> PipelineError {
        match self.others.get(&relation) {
            Some(name) => PipelineError::RowBesideLog {
                at,
                found: name.clone(),
            },
            None => PipelineError::UnknownRelation { at, oid: relation },
        }
    }

    /// Every row message and every message of the transaction has an index, whatever becomes of it,
    /// so that a setting can't shift the positions of others.
    fn counted(&mut self, step: Step) -> Result<Step, PipelineError> {
        if step == Step::Done {
            self.position.as_mut().ok_or(OrderError::Stray)?.index += 1;
        }
        Ok(step)
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

/// A row with its meaning, from either source.
struct Event<'e> {
    at: Position,
    mapping: &'e Mapping,
    row: Row<'e>,
}

impl Event<'_> {
    /// Hands it over, unless the books say that Kafka has it.
    fn deliver(
        &self,
        books: &mut Option<Books>,
        router: &mut Router,
        watermark: &mut Watermark,
        sink: &mut impl Sink,
    ) -> Result<Step, PipelineError> {
        let Some(books) = books else {
            return self.hand_over(router, watermark, sink);
        };
        let id = || self.mapping.id(&self.row);
        if books.has(self.at, id)? {
            return Ok(Step::Done);
        }
        let step = self.hand_over(router, watermark, sink)?;
        if step == Step::Done {
            books.delivered(self.at, id());
        }
        Ok(step)
    }

    /// Makes a record of it, counts that and gives it to the sink.
    fn hand_over(
        &self,
        router: &mut Router,
        watermark: &mut Watermark,
        sink: &mut impl Sink,
    ) -> Result<Step, PipelineError> {
        let Self { at, mapping, row } = self;
        let record =
            router
                .route(mapping, row, &at.text())
                .map_err(|error| PipelineError::Route {
                    at: *at,
                    row: mapping.describe(row),
                    error,
                })?;
        let Some(tag) = watermark.reserve(cost(&record))? else {
            return Ok(Step::Full);
        };
        match sink.produce(&record, tag) {
            Ok(Produced::Taken) => Ok(Step::Done),
            Ok(Produced::Full) => {
                watermark.release(tag);
                Ok(Step::Full)
            }
            Ok(Produced::NewTopic) => {
                watermark.release(tag);
                Ok(Step::NewTopic(record.topic.to_owned()))
            }
            Err(error) => {
                watermark.release(tag);
                Err(PipelineError::Produce {
                    at: *at,
                    row: mapping.describe(row),
                    error,
                })
            }
        }
    }
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

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
#[cfg(test)]
mod tests;
