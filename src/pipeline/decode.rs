//! Converts frames to records. This module uses no sockets, timers or tasks.

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
use crate::model::commands::Commands;
use crate::model::dead_letters::DeadLetterCounts;
use crate::model::lsn::{Lsn, Position};
use crate::model::time::from_postgres_micros;
use crate::outbox::columns::{COLUMNS_MAX, MappingError};
use crate::outbox::connect::ColumnFacts;
use crate::outbox::dead_letter::EventContent;
use crate::outbox::envelope::{EnvelopeError, PUBLISHED_BYTES_MAX, Texts};
use crate::outbox::settings::OutboxSettings;
use crate::postgres::catalog::set_aside::TableNote;
use crate::postgres::catalog::table_state::AcceptedNames;
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

/// Decodes frames one at a time, maps and routes their rows, and passes the resulting records to
/// the sink.
pub struct Core {
    source: Source,
    others: OtherTables,
    /// The position that the next row will have; `None` outside a transaction.
    position: Option<Position>,
    has_warned_about_update: bool,
    /// The rows of the snapshot being copied; `None` if no copy is in progress.
    snapshot: Option<SnapshotRows>,
    /// See [`Core::isolate`].
    suspects: Option<RangeInclusive<Position>>,
    /// The last topic that the sink could not prepare, and the reason.
    refused_topic: Option<(String, SinkError)>,
    /// Converts rows to records, and passes the records to the sink.
    pub delivery: Delivery,
}

/// Counts of logical decoding messages that are not events of this outbox. A message that the
/// server resends is counted again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IgnoredCounts {
    /// Transactional messages whose prefix is not the outbox's.
    pub foreign: u64,
    /// Non-transactional messages, regardless of their prefix.
    pub nontransactional: u64,
}

/// The result of processing a frame.
#[derive(Debug, PartialEq, Eq)]
pub enum Step {
    Done,
    /// The frame was processed, and the server requests a status update.
    Answer,
    /// The limit on records in flight has been reached, or the sink's queue is full. The caller
    /// must pass the same frame again once there is space.
    Full,
    /// The sink has to prepare this topic. The caller must pass the same frame again afterwards.
    NewTopic(String),
    /// The column descriptions of the table with this OID, and the names under which the table's
    /// rows may be published, have not been loaded yet. The caller must pass both to
    /// [`Core::describe_table`], and then pass the same frame again.
    NewTable(u32),
    /// The row's table must be set aside. The caller must pass the same frame again after
    /// [`Core::apply_note`].
    SetAside(Box<TableNote>),
}

impl Core {
    /// Creates a [`Core`] that processes the events of `outbox`.
    ///
    /// # Errors
    /// Returns an error if the outbox consists of logical decoding messages and the settings refer
    /// to a column that such events do not have. The columns of a table are checked when the server
    /// describes them.
    pub fn new(
        outbox: Outbox,
        settings: OutboxSettings,
        watermark: Watermark,
    ) -> Result<Self, MappingError> {
        Ok(Self {
            source: Source::new(outbox, settings)?,
            others: OtherTables::default(),
            position: None,
            has_warned_about_update: false,
            snapshot: None,
            suspects: None,
            refused_topic: None,
            delivery: Delivery::new(watermark),
        })
    }

    /// Enables dead letters for undeliverable events of this pipeline, if `settings` allow them.
    pub fn send_dead_letters(&mut self, pipeline: &str, settings: &DeadLetterSettings) {
        let prefix = match &self.source {
            Source::Table(_) => "",
            Source::Messages(source) => source.prefix(),
        };
        self.delivery.dead_letters = DeadLetters::new(pipeline, prefix, settings);
    }

    /// Enables delivery of the rows that a table already contained when it was added to
    /// `publication`. Applies only to an outbox of several tables.
    pub(crate) fn read_older_rows_of(&mut self, publication: &str) {
        self.source.read_older_rows_of(publication);
    }

    /// Returns the number of dead letters, or `None` if they are not enabled.
    #[must_use]
    pub fn dead_letters(&self) -> Option<DeadLetterCounts> {
        self.delivery.dead_letters.as_ref().map(DeadLetters::counts)
    }

    /// For exactly-once delivery: skips the events in `delivered` when the stream resumes at
    /// `confirmed`, and keeps track of the last event that is not skipped. All transactions that
    /// end at or before `safe` have been processed already. Must be called after
    /// [`Core::reconnected`].
    pub fn omit_delivered(&mut self, delivered: Option<Delivered>, safe: Lsn, confirmed: Lsn) {
        self.delivery.duplicate_filter = Some(DuplicateFilter::new(delivered, safe, confirmed));
    }

    /// Returns whether the WAL has been verified to contain the events that are already in Kafka.
    /// Always true without exactly-once delivery.
    #[must_use]
    pub fn is_verified(&self) -> bool {
        self.delivery
            .duplicate_filter
            .as_ref()
            .is_none_or(DuplicateFilter::is_verified)
    }

    /// Returns the last event that was delivered after [`Core::omit_delivered`] was called.
    #[must_use]
    pub fn last_delivered(&self) -> Option<Last> {
        self.delivery
            .duplicate_filter
            .as_ref()
            .and_then(DuplicateFilter::last_event)
    }

    /// Sets the catalog's description of each table's columns, by table OID, for the next
    /// connection.
    pub(crate) fn describe_columns(&mut self, facts: HashMap<u32, Vec<ColumnFacts>>) {
        if let Source::Table(source) = &mut self.source {
            source.describe(facts);
        }
    }

    /// Returns whether the accepted names of tables must be loaded from the catalog. If not,
    /// [`Core::accept_names`] has no effect.
    pub(crate) fn loads_table_names(&self) -> bool {
        match &self.source {
            Source::Table(source) => source.names().are_loaded(),
            Source::Messages(_) => false,
        }
    }

    /// Sets the names under which each table's rows may be published. `commands` formats the
    /// commands that error messages suggest.
    pub(crate) fn accept_names(&mut self, tables: Vec<AcceptedNames>, commands: &Commands) {
        if let Source::Table(source) = &mut self.source {
            source.accept_names(tables, commands);
        }
    }

    /// Sets the description of the columns of one table, and the names under which its rows may be
    /// published.
    pub(crate) fn describe_table(
        &mut self,
        oid: u32,
        facts: Vec<ColumnFacts>,
        names: Vec<AcceptedNames>,
    ) {
        if let Source::Table(source) = &mut self.source {
            source.describe_table(oid, facts, names);
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

    /// Prepares for the rows of a snapshot, which are read before the stream starts. Must be called
    /// after [`Core::reconnected`].
    ///
    /// # Errors
    /// Returns an error if the snapshot's consistent point precedes the position at which the
    /// stream resumes.
    pub fn begin_snapshot(&mut self, from: CopyFrom) -> Result<(), OrderError> {
        let rows = SnapshotRows::new(from);
        let position = rows.position();
        self.delivery
            .watermark
            .begin_copy(position.commit, rows.snapshot_lsn())?;
        self.position = Some(position);
        self.snapshot = Some(rows);
        self.apply_isolation();
        Ok(())
    }

    /// Processes one line of the snapshot's `COPY` output. Returns the same steps as
    /// [`Core::frame`].
    ///
    /// # Errors
    /// Returns an error if the row can't be mapped, routed or produced.
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
        self.advance_if_done(step)
    }

    /// Ends the snapshot. The stream starts at the snapshot's consistent point.
    ///
    /// # Errors
    /// Returns an error if no snapshot was started.
    pub fn end_snapshot(&mut self) -> Result<(), OrderError> {
        let snapshot = self.snapshot.take().ok_or(OrderError::Stray)?;
        let commit = snapshot.position().commit;
        self.delivery
            .watermark
            .commit(commit, snapshot.snapshot_lsn())?;
        self.position = None;
        self.omit_copied(snapshot.completed());
        Ok(())
    }

    /// For exactly-once delivery: skips rows in the stream that were already copied.
    pub fn omit_copied(&mut self, copied: CopyProgress) {
        if let Source::Table(source) = &mut self.source {
            source.copied = Some(Box::new(copied));
        }
    }

    /// Returns the progress of the copy of older rows, or `None` if no rows were copied.
    #[must_use]
    pub fn copied(&self) -> Option<CopyProgress> {
        match (&self.snapshot, &self.source) {
            (Some(snapshot), _) => snapshot.copied(),
            (None, Source::Table(source)) => source.copied.as_deref().cloned(),
            (None, Source::Messages(_)) => None,
        }
    }

    /// Returns the counts of messages that are not events of this outbox, or `None` if the outbox
    /// consists of tables.
    #[must_use]
    pub fn ignored_counts(&self) -> Option<IgnoredCounts> {
        match &self.source {
            Source::Table(_) => None,
            Source::Messages(source) => Some(source.ignored_counts),
        }
    }

    /// Sets the counters to the values that [`Core::ignored_counts`] and [`Core::dead_letters`]
    /// returned for the previous instance.
    pub fn resume_counts(
        &mut self,
        ignored_counts: Option<IgnoredCounts>,
        dead_letters: Option<DeadLetterCounts>,
    ) {
        if let (Source::Messages(source), Some(before)) = (&mut self.source, ignored_counts) {
            source.ignored_counts = before;
        }
        if let (Some(letters), Some(before)) = (&mut self.delivery.dead_letters, dead_letters) {
            letters.resume_counts(before);
        }
    }

    /// Removes the table names from this instance and returns them, so that they can be passed to
    /// the instance that replaces this one.
    pub(crate) fn take_table_names(&mut self) -> Option<TableNames> {
        match &mut self.source {
            Source::Table(source) => Some(source.replace_names(TableNames::default())),
            Source::Messages(_) => None,
        }
    }

    /// Restores the table names that [`take_table_names`](Self::take_table_names) removed from the
    /// instance that this one replaces.
    pub(crate) fn restore_table_names(&mut self, names: Option<TableNames>) {
        if let (Source::Table(source), Some(names)) = (&mut self.source, names) {
            source.replace_names(names);
        }
    }

    /// Returns whether a transaction is in progress.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.position.is_some()
    }

    /// Sets the range of rows that are produced one at a time, each only after all preceding rows
    /// are durable. See [`isolation`](crate::delivery::isolation).
    pub(crate) fn isolate(&mut self, suspects: Option<RangeInclusive<Position>>) {
        self.suspects = suspects;
    }

    /// Returns the range of the rows that are being sent one by one, once the stream has passed the
    /// range and all of its rows are delivered.
    pub(crate) fn passed_suspects(&self) -> Option<&RangeInclusive<Position>> {
        let suspects = self.suspects.as_ref()?;
        let is_past = match self.position {
            Some(position) => position > suspects.end().in_copy_of(position),
            None => self.delivery.watermark.received() > suspects.end().commit,
        };
        (is_past && self.delivery.watermark.in_flight().records == 0).then_some(suspects)
    }

    /// Limits the number of records in flight to one if the next row is in the range of rows to
    /// isolate. Must be called whenever `position` advances.
    #[inline]
    fn apply_isolation(&mut self) {
        if let (Some(suspects), Some(position)) = (&self.suspects, &self.position) {
            let start = suspects.start().in_copy_of(*position);
            self.delivery
                .watermark
                .set_one_at_a_time(start <= *position);
        }
    }

    /// Processes one frame completely, or leaves the state unchanged and returns what the caller
    /// must wait for. Unless the result is [`Step::Done`], the caller must pass it to
    /// [`Core::or_set_aside`] and act on the step that `or_set_aside` returns.
    ///
    /// # Errors
    /// Returns an error if the frame can't be decoded, mapped, routed or produced.
    pub fn frame(&mut self, frame: &Frame<'_>, sink: &mut impl Sink) -> Result<Step, CoreError> {
        match *frame {
            Frame::Keepalive {
                wal_end,
                reply_requested,
            } => {
                self.delivery.watermark.record_keepalive(wal_end);
                let open = self.position.map(|position| position.commit);
                if let Some(duplicate_filter) = &mut self.delivery.duplicate_filter
                    && open.is_none_or(|commit| wal_end <= commit)
                    && let Some(safe) = duplicate_filter.process_keepalive(wal_end)?
                {
                    self.delivery.watermark.raise_checkpoint(safe);
                }
                Ok(if reply_requested {
                    Step::Answer
                } else {
                    Step::Done
                })
            }
            Frame::LargeMessage { head, bytes, max } => {
                self.process_large_message(head, bytes, max, sink)
            }
            Frame::XLogData { data, .. } => {
                let message = Message::decode(data).map_err(|error| CoreError::Decode {
                    at: self.describe_position(),
                    error,
                })?;
                self.message(&message, sink)
            }
        }
    }

    /// Handles `step`, the result of [`Core::frame`] for this frame. If `step` is an error that
    /// concerns only one table, and the settings allow tables to be set aside, returns the step
    /// that sets this table aside. Otherwise, returns `step` unchanged.
    ///
    /// This function is separate from [`Core::frame`] for speed: moving a `Result` takes longer
    /// than processing a short frame.
    ///
    /// # Errors
    /// Returns the error in `step` if the error does not cause a table to be set aside.
    #[cold]
    #[inline(never)]
    pub fn or_set_aside(
        &mut self,
        frame: &Frame<'_>,
        step: Result<Step, CoreError>,
    ) -> Result<Step, CoreError> {
        let step = match step {
            Ok(Step::NewTopic(topic)) => match self.refused_topic_error(&topic) {
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
            Meaning::OlderRow { source, tuple } => {
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
                        let content = EventContent::Bytes(content);
                        self.delivery.malformed(at, prefix, error, content, sink)?
                    }
                }
            }
            Meaning::UnexpectedRow { relation } => {
                let at = self.position.ok_or(OrderError::Stray)?;
                return Err(self.rows_among_messages_error(at, relation));
            }
            Meaning::Changed {
                relation,
                is_update,
            } => return self.process_change(relation, is_update),
            Meaning::Nontransactional { prefix } => {
                if let Source::Messages(source) = &mut self.source {
                    source.count_nontransactional(prefix);
                }
                return Ok(Step::Done);
            }
            Meaning::Foreign => {
                self.position.ok_or(OrderError::Stray)?;
                if let Source::Messages(source) = &mut self.source {
                    source.ignored_counts.foreign += 1;
                }
                Step::Done
            }
            Meaning::Ignored => return Ok(Step::Done),
        };
        self.advance_if_done(step)
    }

    #[inline]
    fn begin(&mut self, begin: &Begin) -> Result<Step, CoreError> {
        self.delivery.watermark.begin(begin.commit)?;
        let committed = from_postgres_micros(begin.time_micros);
        self.delivery.watermark.set_commit_time(committed);
        if let Some(duplicate_filter) = &mut self.delivery.duplicate_filter {
            duplicate_filter.begin(begin)?;
        }
        self.position = Some(Position {
            commit: begin.commit,
            index: 0,
        });
        self.apply_isolation();
        Ok(Step::Done)
    }

    #[inline]
    fn commit(&mut self, commit: &Commit) -> Result<Step, CoreError> {
        self.delivery.watermark.commit(commit.commit, commit.end)?;
        if let (Some(duplicate_filter), Some(position)) =
            (&mut self.delivery.duplicate_filter, self.position)
            && let Some(safe) = duplicate_filter.commit(position, commit.end)?
        {
            self.delivery.watermark.raise_checkpoint(safe);
        }
        self.position = None;
        Ok(Step::Done)
    }

    /// Reports how many rows of each table have arrived since the last call. Does nothing unless
    /// the outbox consists of several tables.
    pub(crate) fn report_rows(&self) {
        if let Source::Table(source) = &self.source {
            source.report_rows(self.delivery.watermark.stats());
        }
    }

    fn relation(&mut self, relation: &Relation<'_>) -> Result<Step, CoreError> {
        // The table may have been dropped or renamed, so report the rows counted under its old name
        // first.
        if let Source::Table(source) = &self.source {
            source.report_rows_of(relation.oid, self.delivery.watermark.stats());
        }
        let place = self.describe_position();
        let is_outbox = match &mut self.source {
            Source::Table(source) => {
                if !source.has_room_for(relation.oid) {
                    return Err(CoreError::TooManyTables {
                        at: place,
                        max: TABLES_MAX,
                    });
                }
                if source.lacks_facts(relation) || source.lacks_names(relation) {
                    return Ok(Step::NewTable(relation.oid));
                }
                let bound = source.relation(relation, self.position, &place);
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

    /// Processes a message that exceeds the size limit. Only the beginning of such a message is
    /// read. An oversized logical decoding message must not block the stream, because any role can
    /// write such a message. The exception is a message that `walpost.publish` could have written:
    /// this message is an event, so skipping it would lose the event.
    fn process_large_message(
        &mut self,
        head: &[u8],
        bytes: usize,
        max: usize,
        sink: &mut impl Sink,
    ) -> Result<Step, CoreError> {
        let at_text = self.describe_position();
        let unreadable = |error| CoreError::Decode {
            at: at_text.clone(),
            error,
        };
        if let Some(row) = RowHead::decode(head).map_err(unreadable)? {
            return self.large_row(&row, bytes, max);
        }
        let head = LogicalHead::decode(head).map_err(unreadable)?;
        let Source::Messages(source) = &mut self.source else {
            return Ok(Step::Done);
        };
        let ours = head.prefix.filter(|(prefix, _)| source.has_prefix(prefix));
        if !head.transactional {
            source.count_nontransactional(head.prefix.map_or("", |(prefix, _)| prefix));
            return Ok(Step::Done);
        }
        let at = self.position.ok_or(OrderError::Stray)?;
        let Some((prefix, content_bytes)) = ours else {
            source.ignored_counts.foreign += 1;
            return self.advance_if_done(Step::Done);
        };
        if content_bytes <= PUBLISHED_BYTES_MAX {
            return Err(CoreError::RowTooLarge {
                at: at_text,
                bytes,
                max,
            });
        }
        let error = EnvelopeError::Large(content_bytes);
        let content = EventContent::Unread(content_bytes);
        let step = self.delivery.malformed(at, prefix, error, content, sink)?;
        self.advance_if_done(step)
    }

    /// Processes a row that exceeds the size limit. Returns an error if the row is an event and its
    /// table is not set aside.
    fn large_row(
        &mut self,
        row: &RowHead<'_>,
        bytes: usize,
        max: usize,
    ) -> Result<Step, CoreError> {
        let at = self.position.ok_or(OrderError::Stray)?;
        let too_large = CoreError::RowTooLarge {
            at: self.describe_position(),
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
        let is_omitted = match source.has_older_rows(row.relation) {
            true => source.omits_older_row(at, &row.texts()),
            false => {
                let is_omitted = source.set_aside.covers(row.relation, at);
                if is_omitted {
                    source.set_aside.count_row(row.relation, at);
                }
                is_omitted
            }
        };
        match is_omitted {
            true => self.advance_if_done(Step::Done),
            false => Err(too_large),
        }
    }

    /// Skips an UPDATE or DELETE of a row. The row was already delivered when it was inserted.
    fn process_change(&mut self, relation: u32, is_update: bool) -> Result<Step, CoreError> {
        let at = self.position.ok_or(OrderError::Stray)?;
        let Source::Table(source) = &self.source else {
            return Err(self.rows_among_messages_error(at, relation));
        };
        if is_update && !std::mem::replace(&mut self.has_warned_about_update, true) {
            let table = source.name(relation).map(TableName::to_string);
            let table = table.or_else(|| self.others.name(relation).cloned());
            warn!(table, %at, "skipped an UPDATE of an outbox row, because updates are not events");
        }
        self.advance_if_done(Step::Done)
    }

    fn rows_among_messages_error(&self, at: Position, relation: u32) -> CoreError {
        match self.others.name(relation) {
            Some(name) => CoreError::UnexpectedRow {
                at,
                found: name.clone(),
            },
            None => CoreError::UnknownRelation { at, oid: relation },
        }
    }

    /// Advances the position if `step` is [`Step::Done`]. Every row and message of a transaction is
    /// assigned an index, even if it is skipped, so that changing a setting can't shift the
    /// positions of later events.
    fn advance_if_done(&mut self, step: Step) -> Result<Step, CoreError> {
        if matches!(step, Step::Done) {
            self.position.as_mut().ok_or(OrderError::Stray)?.index += 1;
            self.apply_isolation();
        }
        Ok(step)
    }

    /// Converts an error that occurred while the next message was being read, and adds the position
    /// of that message.
    #[must_use]
    pub(super) fn unread<E: From<CoreError> + From<ConnectionError>>(
        &self,
        error: ConnectionError,
    ) -> E {
        match error {
            ConnectionError::TooLarge { bytes, max } => CoreError::RowTooLarge {
                at: self.describe_position(),
                bytes,
                max,
            }
            .into(),
            error if self.snapshot.is_some() => error.into(),
            error => match CoreError::unsendable(&error, self.position) {
                Some(error) => error.into(),
                None => error.into(),
            },
        }
    }

    /// Returns the position that the next row will have; `None` outside a transaction.
    #[must_use]
    pub(crate) fn position(&self) -> Option<Position> {
        self.position
    }

    /// Describes the next message's position in the WAL.
    #[must_use]
    pub fn describe_position(&self) -> String {
        match self.position {
            Some(position) => position.to_string(),
            None => format!("after {}", self.delivery.watermark.received()),
        }
    }
}

/// Processes a row that was already in its table when the table was added to the publication.
#[cold]
fn older_row(
    delivery: &mut Delivery,
    source: &TableSource,
    at: Position,
    tuple: &Tuple<'_>,
    sink: &mut impl Sink,
) -> Result<Step, CoreError> {
    if source.omits_older_row(at, &source.leading_texts(tuple)) {
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
    delivery.event(at, &mapping, &older.to_row(&mapping), sink)
}

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
#[cfg(test)]
mod tests;
