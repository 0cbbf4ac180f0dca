//! Turns frames into records, without sockets, time or tasks. Pure.

use std::collections::HashMap;
use std::ops::RangeInclusive;

use tracing::warn;

pub(crate) use self::copied_rows::CopyFrom;
use self::copied_rows::SnapshotRows;
use self::dead_letters::DeadLetters;
use self::delivery::Delivery;
use self::error::CoreError;
use self::other_tables::OtherTables;
use self::source::{Meaning, Source};
use self::table_names::TableNames;
use self::table_source::{TABLES_MAX, TableSource};
use super::exactly_once::duplicate_filter::DuplicateFilter;
use super::settings::DeadLetterSettings;
use crate::delivery::checkpoint::{Delivered, Last};
use crate::delivery::chunks::CopyProgress;
use crate::delivery::watermark::{OrderError, Watermark};
use crate::model::dead_letters::DeadLetterCounts;
use crate::model::lsn::{Lsn, Position};
use crate::model::time::from_postgres_micros;
use crate::outbox::columns::{COLUMNS_MAX, MappingError};
use crate::outbox::connect::ColumnFacts;
use crate::outbox::dead_letter::Remains;
use crate::outbox::envelope::{EnvelopeError, PUBLISHED_BYTES_MAX, Texts};
use crate::outbox::settings::OutboxSettings;
use crate::postgres::catalog::set_aside::TableNote;
use crate::postgres::replication::ConnectionError;
use crate::postgres::table::TableName;
use crate::postgres::target::Outbox;
use crate::postgres::wire::frame::Frame;
use crate::postgres::wire::pgoutput::{
    Begin, Change, Commit, LogicalHead, Message, Relation, RowHead, Tuple,
};
use crate::sink::{Sink, SinkError};

mod ahead;
pub(crate) mod copied_rows;
pub(crate) mod dead_letters;
pub(crate) mod delivery;
pub(crate) mod error;
pub(crate) mod hand_over;
pub(crate) mod message_source;
mod older_rows;
mod other_tables;
pub(crate) mod preview;
mod set_aside;
mod source;
mod table_errors;
pub(crate) mod table_names;
pub(crate) mod table_source;

/// Decodes frames, maps and routes their rows, and passes records to the sink, one frame at a time.
pub struct Core {
    source: Source,
    others: OtherTables,
    /// Position of the next row message; `None` outside a transaction.
    position: Option<Position>,
    warned_of_update: bool,
    /// The rows that are copied before the stream; `None` once they are complete.
    snapshot: Option<SnapshotRows>,
    /// See [`Core::isolate`].
    suspects: Option<RangeInclusive<Position>>,
    /// The last topic that the sink could not prepare, and the reason.
    refused_topic: Option<(String, SinkError)>,
    /// Processes every row.
    pub delivery: Delivery,
}

/// Counts of messages in the WAL that are not events of this outbox. A message that is sent again
/// is counted again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IgnoredCounts {
    /// Transactional messages with another prefix.
    pub foreign: u64,
    /// Non-transactional messages with any prefix.
    pub nontransactional: u64,
}

/// The result of processing a frame.
#[derive(Debug, PartialEq, Eq)]
pub enum Step {
    Done,
    /// The frame is processed, and the server requests a status update.
    Answer,
    /// The sink is full: pass the same frame again when there is space.
    Full,
    /// The sink has to prepare this topic: pass the same frame again afterwards.
    NewTopic(String),
    /// The catalog's description of the columns of the table with this OID is required: pass the
    /// same frame again after [`Core::describe_table`].
    NewTable(u32),
    /// The row's table must be set aside: pass the same frame again after [`Core::recorded`].
    SetAside(Box<TableNote>),
}

impl Core {
    /// Creates a core for the events of `outbox`.
    ///
    /// # Errors
    /// The settings name a column that an event in a message does not have. The columns of a table
    /// become known later.
    pub fn new(
        outbox: Outbox,
        settings: OutboxSettings,
        watermark: Watermark,
    ) -> Result<Self, MappingError> {
        Ok(Self {
            source: Source::new(outbox, settings)?,
            others: OtherTables::default(),
            position: None,
            warned_of_update: false,
            snapshot: None,
            suspects: None,
            refused_topic: None,
            delivery: Delivery::new(watermark),
        })
    }

    /// Enables dead letters of this pipeline for events that can't be delivered, if `settings`
    /// allow them.
    pub fn send_dead_letters(&mut self, pipeline: &str, settings: &DeadLetterSettings) {
        let prefix = match &self.source {
            Source::Table(_) => "",
            Source::Messages(source) => source.prefix(),
        };
        self.delivery.dead_letters = DeadLetters::new(pipeline, prefix, settings);
    }

    /// For an outbox of several tables: treats the rows that a table contained when it was added to
    /// this publication as events, too.
    pub(crate) fn read_older_rows_of(&mut self, publication: &str) {
        self.source.read_older_rows_of(publication);
    }

    /// Returns the number of dead letters, or `None` if they are not enabled.
    #[must_use]
    pub fn dead_letters(&self) -> Option<DeadLetterCounts> {
        self.delivery.dead_letters.as_ref().map(DeadLetters::counts)
    }

    /// For exactly-once delivery: omits `delivered` from a stream that resumes at `confirmed`, if
    /// everything that ends at or before `safe` has been processed, and remembers the last of the
    /// other events. Must be called after [`Core::reconnected`].
    pub fn leave_out(&mut self, delivered: Option<Delivered>, safe: Lsn, confirmed: Lsn) {
        self.delivery.duplicate_filter = Some(DuplicateFilter::new(delivered, safe, confirmed));
    }

    /// Returns whether the WAL has been verified to be the one that was published. Always true
    /// without exactly-once delivery.
    #[must_use]
    pub fn is_proved(&self) -> bool {
        self.delivery
            .duplicate_filter
            .as_ref()
            .is_none_or(DuplicateFilter::is_proved)
    }

    /// Returns the last event that was delivered since [`Core::leave_out`].
    #[must_use]
    pub fn last_delivered(&self) -> Option<Last> {
        self.delivery
            .duplicate_filter
            .as_ref()
            .and_then(DuplicateFilter::last_event)
    }

    /// Sets the catalog's descriptions of the columns of each table, by OID, for the next
    /// connection.
    pub(crate) fn describe_columns(&mut self, facts: HashMap<u32, Vec<ColumnFacts>>) {
        if let Source::Table(source) = &mut self.source {
            source.describe(facts);
        }
    }

    /// Sets the names that tables have in the catalog when a connection starts, by OID.
    pub(crate) fn name_tables(&mut self, tables: Vec<(u32, TableName)>) {
        if let Source::Table(source) = &mut self.source {
            source.name_tables(tables);
        }
    }

    /// Sets the catalog's description of the columns of the table with this OID.
    pub(crate) fn describe_table(&mut self, oid: u32, facts: Vec<ColumnFacts>) {
        if let Source::Table(source) = &mut self.source {
            source.describe_table(oid, facts);
        }
    }

    /// Prepares for a new connection, which resumes at the slot's `confirmed_flush_lsn`.
    pub fn reconnected(&mut self, resume: Lsn) {
        self.report_rows();
        if let Source::Table(source) = &mut self.source {
            source.reconnected();
        }
        self.others.clear();
        self.position = None;
        self.snapshot = None;
        self.delivery.watermark.reconnected(resume);
    }

    /// Prepares for rows of a snapshot, which precede the stream. Must be called after
    /// [`Core::reconnected`].
    ///
    /// # Errors
    /// The snapshot's consistent point is before the position at which the stream resumes.
    pub fn begin_snapshot(&mut self, from: CopyFrom) -> Result<(), OrderError> {
        let rows = SnapshotRows::new(from);
        let position = rows.position();
        self.delivery
            .watermark
            .begin_copy(position.commit, rows.snapshot_lsn())?;
        self.position = Some(position);
        self.snapshot = Some(rows);
        self.suspect();
        Ok(())
    }

    /// Processes one line of `COPY`, like [`Core::frame`] does with a frame.
    ///
    /// # Errors
    /// The row can't be mapped, routed or produced.
    pub fn snapshot_row(&mut self, line: &[u8], sink: &mut impl Sink) -> Result<Step, CoreError> {
        let at = self.position.ok_or(OrderError::Stray)?;
        let (Some(snapshot), Source::Table(source)) = (&mut self.snapshot, &self.source) else {
            return Err(OrderError::Stray.into());
        };
        let (mapping, row) = snapshot.row(line).map_err(|error| CoreError::BadLine {
            at,
            table: source
                .outbox()
                .table()
                .map_or_else(String::new, TableName::to_string),
            error,
        })?;
        let step = self.delivery.row(at, mapping, &row, sink)?;
        if matches!(step, Step::Done) {
            snapshot.mark_accepted(line);
        }
        self.counted(step)
    }

    /// Ends the snapshot. The stream starts at its consistent point.
    ///
    /// # Errors
    /// There is no snapshot.
    pub fn end_snapshot(&mut self) -> Result<(), OrderError> {
        let snapshot = self.snapshot.take().ok_or(OrderError::Stray)?;
        let commit = snapshot.position().commit;
        self.delivery
            .watermark
            .commit(commit, snapshot.snapshot_lsn())?;
        self.position = None;
        self.leave_out_copied(snapshot.all());
        Ok(())
    }

    /// For exactly-once delivery: omits rows from the stream that were copied as older rows.
    pub fn leave_out_copied(&mut self, copied: CopyProgress) {
        if let Source::Table(source) = &mut self.source {
            source.copied = Some(Box::new(copied));
        }
    }

    /// Returns which older rows were copied, or `None` if none were.
    #[must_use]
    pub fn copied(&self) -> Option<CopyProgress> {
        match (&self.snapshot, &self.source) {
            (Some(snapshot), _) => snapshot.copied(),
            (None, Source::Table(source)) => source.copied.as_deref().cloned(),
            (None, Source::Messages(_)) => None,
        }
    }

    /// Returns the counts of messages that are not events of this outbox, or `None` for a table.
    #[must_use]
    pub fn left_alone(&self) -> Option<IgnoredCounts> {
        match &self.source {
            Source::Table(_) => None,
            Source::Messages(source) => Some(source.left_alone),
        }
    }

    /// Continues the counts that [`Core::left_alone`] and [`Core::dead_letters`] of the previous
    /// core returned.
    pub fn resume_counts(
        &mut self,
        left_alone: Option<IgnoredCounts>,
        dead_letters: Option<DeadLetterCounts>,
    ) {
        if let (Source::Messages(source), Some(before)) = (&mut self.source, left_alone) {
            source.left_alone = before;
        }
        if let (Some(letters), Some(before)) = (&mut self.delivery.dead_letters, dead_letters) {
            letters.resume_counts(before);
        }
    }

    /// Takes the table names out of a core that is being replaced, for the next one.
    pub(crate) fn take_table_names(&mut self) -> Option<TableNames> {
        match &mut self.source {
            Source::Table(source) => Some(source.replace_names(TableNames::default())),
            Source::Messages(_) => None,
        }
    }

    /// Sets the table names that the previous core knew.
    pub(crate) fn keep_table_names(&mut self, names: Option<TableNames>) {
        if let (Source::Table(source), Some(names)) = (&mut self.source, names) {
            source.replace_names(names);
        }
    }

    /// Returns whether a transaction has started and not ended.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.position.is_some()
    }

    /// From now on, produces each of these rows only when all rows before it are durable. See
    /// [`isolation`](crate::delivery::isolation).
    pub(crate) fn isolate(&mut self, suspects: Option<RangeInclusive<Position>>) {
        self.suspects = suspects;
    }

    /// Returns the suspects if the stream has passed them and all of them are durable.
    pub(crate) fn passed(&self) -> Option<&RangeInclusive<Position>> {
        let suspects = self.suspects.as_ref()?;
        let is_past = match self.position {
            Some(position) => position > suspects.end().in_copy_of(position),
            None => self.delivery.watermark.received() > suspects.end().commit,
        };
        (is_past && self.delivery.watermark.in_flight().records == 0).then_some(suspects)
    }

    /// Applies the isolation to the next row. Must be called whenever `position` is set to the next
    /// row.
    #[inline]
    fn suspect(&mut self) {
        if let (Some(suspects), Some(position)) = (&self.suspects, &self.position) {
            let start = suspects.start().in_copy_of(*position);
            self.delivery.watermark.one_at_a_time(start <= *position);
        }
    }

    /// Processes one frame completely, or leaves the state unchanged and returns what to wait for.
    /// Any result except [`Step::Done`] must be passed through [`Core::or_set_aside`] before the
    /// caller acts on it.
    ///
    /// # Errors
    /// The frame can't be decoded, mapped, routed or produced.
    pub fn frame(&mut self, frame: &Frame<'_>, sink: &mut impl Sink) -> Result<Step, CoreError> {
        match *frame {
            Frame::Keepalive {
                wal_end,
                reply_requested,
            } => {
                self.delivery.watermark.idle(wal_end);
                let open = self.position.map(|position| position.commit);
                if let Some(duplicate_filter) = &mut self.delivery.duplicate_filter
                    && open.is_none_or(|commit| wal_end <= commit)
                    && let Some(safe) = duplicate_filter.idle(wal_end)?
                {
                    self.delivery.watermark.checkpointed_at_least(safe);
                }
                Ok(if reply_requested {
                    Step::Answer
                } else {
                    Step::Done
                })
            }
            Frame::LargeMessage { head, bytes, max } => self.large(head, bytes, max, sink),
            Frame::XLogData { data, .. } => {
                let message = Message::decode(data).map_err(|error| CoreError::Decode {
                    at: self.place(),
                    error,
                })?;
                self.message(&message, sink)
            }
        }
    }

    /// Sets a table aside if `step`, which [`Core::frame`] has returned for this frame, is an error
    /// that concerns only that table, and the settings allow it.
    ///
    /// This is a separate function because moving a result costs more than processing a short
    /// frame.
    ///
    /// # Errors
    /// The error, if it does not set a table aside.
    #[cold]
    #[inline(never)]
    pub fn or_set_aside(
        &mut self,
        frame: &Frame<'_>,
        step: Result<Step, CoreError>,
    ) -> Result<Step, CoreError> {
        let step = match step {
            Ok(Step::NewTopic(topic)) => match self.refused(&topic) {
                Some(error) => Err(error),
                None => Ok(Step::NewTopic(topic)),
            },
            step => step,
        };
        step.or_else(|error| self.set_aside(frame, error))
    }

    fn message(&mut self, message: &Message<'_>, sink: &mut impl Sink) -> Result<Step, CoreError> {
        let step = match self.source.meaning(message) {
            Meaning::Begin(begin) => return self.begin(begin),
            Meaning::Commit(commit) => return self.commit(commit),
            Meaning::Relation(relation) => return self.relation(relation),
            Meaning::Row {
                source,
                relation,
                tuple,
            } => {
                let at = self.position.ok_or(OrderError::Stray)?;
                let mut row = [None; COLUMNS_MAX];
                let table = source.row(at, relation, tuple, &self.others, &mut row)?;
                match table {
                    None => {
                        source.set_aside.count_row(relation, at);
                        Step::Done
                    }
                    Some(_)
                        if source.copied.is_some() && source.has_copied(at, relation, tuple)? =>
                    {
                        Step::Done
                    }
                    Some(table) => {
                        let step = self.delivery.event(at, table.mapping(), &row, sink)?;
                        if matches!(step, Step::Done) {
                            table.count_row();
                        }
                        step
                    }
                }
            }
            Meaning::Older { source, tuple } => {
                let at = self.position.ok_or(OrderError::Stray)?;
                older_row(&mut self.delivery, source, at, tuple, sink)?
            }
            Meaning::Published {
                source,
                prefix,
                content,
            } => {
                let at = self.position.ok_or(OrderError::Stray)?;
                match source.event(content) {
                    Ok(envelope) => {
                        let mut texts = Texts::default();
                        let mapping = source.mapping();
                        let row = envelope.row(mapping, &mut texts);
                        self.delivery.event(at, mapping, &row, sink)?
                    }
                    Err(error) => {
                        let remains = Remains::Bytes(content);
                        self.delivery.malformed(at, prefix, error, remains, sink)?
                    }
                }
            }
            Meaning::RowBeside { relation } => {
                let at = self.position.ok_or(OrderError::Stray)?;
                return Err(self.rows_among_messages_error(at, relation));
            }
            Meaning::Changed {
                relation,
                is_update,
            } => return self.process_change(relation, is_update),
            Meaning::OutsideOfTransactions { prefix } => {
                if let Source::Messages(source) = &mut self.source {
                    source.outside_of_transactions(prefix);
                }
                return Ok(Step::Done);
            }
            Meaning::Foreign => {
                self.position.ok_or(OrderError::Stray)?;
                if let Source::Messages(source) = &mut self.source {
                    source.left_alone.foreign += 1;
                }
                Step::Done
            }
            Meaning::Nothing => return Ok(Step::Done),
        };
        self.counted(step)
    }

    #[inline]
    fn begin(&mut self, begin: &Begin) -> Result<Step, CoreError> {
        self.delivery.watermark.begin(begin.commit)?;
        let committed = from_postgres_micros(begin.time_micros);
        self.delivery.watermark.committed_at(committed);
        if let Some(duplicate_filter) = &mut self.delivery.duplicate_filter {
            duplicate_filter.begin(begin)?;
        }
        self.position = Some(Position {
            commit: begin.commit,
            index: 0,
        });
        self.suspect();
        Ok(Step::Done)
    }

    #[inline]
    fn commit(&mut self, commit: &Commit) -> Result<Step, CoreError> {
        self.delivery.watermark.commit(commit.commit, commit.end)?;
        if let (Some(duplicate_filter), Some(position)) =
            (&mut self.delivery.duplicate_filter, self.position)
            && let Some(safe) = duplicate_filter.commit(position, commit.end)?
        {
            self.delivery.watermark.checkpointed_at_least(safe);
        }
        self.position = None;
        Ok(Step::Done)
    }

    /// For an outbox of several tables: reports how many rows of each table have arrived since the
    /// last call.
    pub(crate) fn report_rows(&self) {
        if let Source::Table(source) = &self.source {
            source.report_rows(self.delivery.watermark.stats());
        }
    }

    fn relation(&mut self, relation: &Relation<'_>) -> Result<Step, CoreError> {
        // The table may have been dropped, or may have another name from now on.
        if let Source::Table(source) = &self.source {
            source.report_rows_of(relation.oid, self.delivery.watermark.stats());
        }
        let place = self.place();
        let is_outbox = match &mut self.source {
            Source::Table(source) => {
                if !source.has_room_for(relation.oid) {
                    return Err(CoreError::TooManyTables {
                        at: place,
                        max: TABLES_MAX,
                    });
                }
                if source.lacks_facts(relation) {
                    return Ok(Step::NewTable(relation.oid));
                }
                let bound = source.relation(relation, &place);
                bound.map_err(CoreError::mapping(place))?
            }
            Source::Messages(_) => false,
        };
        if !is_outbox {
            let name = TableName::from_catalog(relation.namespace, relation.name);
            self.others.insert(relation.oid, name.to_string());
        }
        Ok(Step::Done)
    }

    /// Processes a message that exceeds the size limit, of which only the beginning was read. Such
    /// a message must not block the stream, because any role may have written it. But one that
    /// `walpost.publish` may have written is an event.
    fn large(
        &mut self,
        head: &[u8],
        bytes: usize,
        max: usize,
        sink: &mut impl Sink,
    ) -> Result<Step, CoreError> {
        let at_place = self.place();
        let unreadable = |error| CoreError::Decode {
            at: at_place.clone(),
            error,
        };
        if let Some(row) = RowHead::decode(head).map_err(unreadable)? {
            return self.large_row(&row, bytes, max);
        }
        let head = LogicalHead::decode(head).map_err(unreadable)?;
        let Source::Messages(source) = &mut self.source else {
            return Ok(Step::Done);
        };
        let ours = head.prefix.filter(|(prefix, _)| source.is_ours(prefix));
        if !head.transactional {
            source.outside_of_transactions(head.prefix.map_or("", |(prefix, _)| prefix));
            return Ok(Step::Done);
        }
        let at = self.position.ok_or(OrderError::Stray)?;
        let Some((prefix, content_bytes)) = ours else {
            source.left_alone.foreign += 1;
            return self.counted(Step::Done);
        };
        if content_bytes <= PUBLISHED_BYTES_MAX {
            return Err(CoreError::RowTooLarge {
                at: at_place,
                bytes,
                max,
            });
        }
        let error = EnvelopeError::Large(content_bytes);
        let remains = Remains::Unread(content_bytes);
        let step = self.delivery.malformed(at, prefix, error, remains, sink)?;
        self.counted(step)
    }

    /// Processes a row that exceeds the size limit. This is an error, unless the row is not an
    /// event or its table is set aside.
    fn large_row(
        &mut self,
        row: &RowHead<'_>,
        bytes: usize,
        max: usize,
    ) -> Result<Step, CoreError> {
        let at = self.position.ok_or(OrderError::Stray)?;
        let too_large = CoreError::RowTooLarge {
            at: self.place(),
            bytes,
            max,
        };
        let Source::Table(source) = &self.source else {
            return Err(too_large);
        };
        match row.change {
            Change::Insert => {}
            Change::Update => return self.process_change(row.relation, true),
            Change::Delete => return self.process_change(row.relation, false),
        }
        let is_left_out = match source.has_older_rows(row.relation) {
            true => source.leaves_out_older(at, &row.texts()),
            false => {
                let is_left_out = source.set_aside.covers(row.relation, at);
                if is_left_out {
                    source.set_aside.count_row(row.relation, at);
                }
                is_left_out
            }
        };
        match is_left_out {
            true => self.counted(Step::Done),
            false => Err(too_large),
        }
    }

    /// Processes an updated or deleted row, which was delivered when it was inserted.
    fn process_change(&mut self, relation: u32, is_update: bool) -> Result<Step, CoreError> {
        let at = self.position.ok_or(OrderError::Stray)?;
        let Source::Table(source) = &self.source else {
            return Err(self.rows_among_messages_error(at, relation));
        };
        if is_update && !std::mem::replace(&mut self.warned_of_update, true) {
            let table = source.name(relation).map(TableName::to_string);
            let table = table.or_else(|| self.others.name(relation).cloned());
            warn!(table, %at, "skipped an UPDATE of an outbox row: it is not an event");
        }
        self.counted(Step::Done)
    }

    fn rows_among_messages_error(&self, at: Position, relation: u32) -> CoreError {
        match self.others.name(relation) {
            Some(name) => CoreError::RowBesideMessages {
                at,
                found: name.clone(),
            },
            None => CoreError::UnknownRelation { at, oid: relation },
        }
    }

    /// Advances the position after a processed row or message. Each row message and each message of
    /// a transaction has an index, regardless of how it is handled, so that a setting can't shift
    /// the positions of others.
    fn counted(&mut self, step: Step) -> Result<Step, CoreError> {
        if matches!(step, Step::Done) {
            self.position.as_mut().ok_or(OrderError::Stray)?.index += 1;
            self.suspect();
        }
        Ok(step)
    }

    /// Converts an error from reading the next message.
    #[must_use]
    pub(super) fn unread<E: From<CoreError> + From<ConnectionError>>(
        &self,
        error: ConnectionError,
    ) -> E {
        match error {
            ConnectionError::TooLarge { bytes, max } => CoreError::RowTooLarge {
                at: self.place(),
                bytes,
                max,
            }
            .into(),
            error if error.is_of_encoding() && self.snapshot.is_none() => {
                CoreError::Unconvertible {
                    at: self.place(),
                    table: None,
                    error: error.to_string(),
                }
                .into()
            }
            error => error.into(),
        }
    }

    /// Returns the position of the next row message; `None` outside a transaction.
    #[must_use]
    pub(crate) fn position(&self) -> Option<Position> {
        self.position
    }

    /// Describes the position of the next message in the WAL.
    #[must_use]
    pub fn place(&self) -> String {
        match self.position {
            Some(position) => position.to_string(),
            None => format!("after {}", self.delivery.watermark.received()),
        }
    }
}

/// Processes a row that its table contained when it was added to the publication.
#[cold]
fn older_row(
    delivery: &mut Delivery,
    source: &TableSource,
    at: Position,
    tuple: &Tuple<'_>,
    sink: &mut impl Sink,
) -> Result<Step, CoreError> {
    if source.leaves_out_older(at, &source.texts_of(tuple)) {
        return Ok(Step::Done);
    }
    let Some(older) = source.older(at, tuple)? else {
        return Ok(Step::Done);
    };
    if source.lacks_facts_for(&older) {
        return Ok(Step::NewTable(older.oid));
    }
    let mapping = source.mapping_for(&older);
    let mapping = mapping.map_err(CoreError::mapping(at))?;
    delivery.event(at, &mapping, &older.lay_out(&mapping), sink)
}

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
#[cfg(test)]
mod tests;
