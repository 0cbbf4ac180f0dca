//! Handles an error that concerns only one of several outbox tables, by setting that table aside.

use super::dead_letters::concerns_one_record;
use super::error::CoreError;
use super::source::{Meaning, Source};
use super::table_source::TableSource;
use super::{Core, Step};
use crate::model::lsn::Lsn;
use crate::model::set_aside::SetAside;
use crate::postgres::catalog::set_aside::TableNote;
use crate::postgres::table::TableName;
use crate::postgres::wire::frame::Frame;
use crate::postgres::wire::pgoutput::{Message, RowHead};
use crate::sink::SinkError;

/// Maximum length, in characters, of the recorded reason for setting a table aside. Needed because
/// a reason can quote a column's value, which can be long.
const REASON_CHARS_MAX: usize = 1000;

impl Core {
    /// Sets whether a table is set aside when an error concerns only that table. If this is
    /// disabled, the error is returned instead.
    pub(crate) fn set_tables_aside(&mut self, is_enabled: bool) {
        if let Source::Table(source) = &mut self.source {
            source.set_aside.is_enabled = is_enabled;
        }
    }

    /// Skips the rows of set-aside tables. `entries` are the journal entries about set-aside tables
    /// in this cluster. The stream must contain every row whose commit LSN is at or above
    /// `known_from`. Must be called after [`Core::reconnected`].
    pub(crate) fn load_set_aside(
        &mut self,
        entries: Vec<SetAside>,
        cluster: String,
        known_from: Lsn,
    ) {
        if let Source::Table(source) = &mut self.source {
            source.set_aside.load(entries, cluster, known_from);
        }
    }

    /// Returns the change to write to the journal if tables have been replayed since they were set
    /// aside. `found` contains the entries that are now in the journal.
    pub(crate) fn replay_note(&self, found: &[SetAside]) -> Option<TableNote> {
        match &self.source {
            Source::Table(source) => source.set_aside.replay_note(found),
            Source::Messages(_) => None,
        }
    }

    /// Applies a change that has been written to the journal. If the table is set aside after this
    /// change, `opened` is the new journal entry.
    pub(crate) fn apply_note(&mut self, note: &TableNote, opened: Option<SetAside>) {
        if let Source::Table(source) = &mut self.source {
            source.set_aside.apply(note, opened);
            source.mark_set_aside();
        }
    }

    /// Returns the number of rows that were skipped since the last call because their table is set
    /// aside.
    pub(crate) fn take_omitted_row_count(&self) -> u64 {
        match &self.source {
            Source::Table(source) => source.set_aside.take_row_count(),
            Source::Messages(_) => 0,
        }
    }

    /// Makes the next row for `topic` fail with `error`, because the sink can't produce to that
    /// topic.
    pub(crate) fn refuse_topic(&mut self, topic: String, error: SinkError) {
        self.refused_topic = Some((topic, error));
    }

    /// If `topic` was passed to [`Core::refuse_topic`], removes the recorded error and returns it
    /// for the current row.
    pub(super) fn refused_topic_error(&mut self, topic: &str) -> Option<CoreError> {
        let (_, error) = self
            .refused_topic
            .take_if(|(refused, _)| refused == topic)?;
        Some(CoreError::Produce {
            at: self.position.unwrap_or_default(),
            row: "row".to_owned(),
            error: Box::new(error),
        })
    }

    /// Returns the step that sets a table aside, if `error` concerns only the table whose row is in
    /// `frame`.
    ///
    /// # Errors
    /// Returns `error` if it does not cause a table to be set aside.
    #[cold]
    pub(super) fn set_aside(&self, frame: &Frame<'_>, error: CoreError) -> Result<Step, CoreError> {
        let (Source::Table(source), Some(position)) = (&self.source, self.position) else {
            return Err(error);
        };
        if !source.set_aside.is_enabled || !concerns_one_table(&error) {
            return Err(error);
        }
        let Some((relation, table)) = self.table_of(source, frame) else {
            return Err(error);
        };
        // The table is already set aside, so setting it aside again would not prevent the error.
        if source.set_aside.covers_table(relation, &table, position) {
            return Err(error);
        }
        let reason = match error {
            // Leave out the hint of `CoreError::Mapping`, which says that altering the table won't
            // help. Altering a table that is set aside does help: its rows in the WAL are skipped,
            // and can be replayed from the altered table.
            CoreError::Mapping { error, .. } => error.to_string(),
            error => error.to_string(),
        };
        let reason = reason.chars().take(REASON_CHARS_MAX).collect();
        Ok(Step::SetAside(Box::new(TableNote::Begun {
            table,
            relation,
            position,
            reason,
        })))
    }

    /// Returns the OID and name of the table that the row in `frame` belongs to.
    fn table_of(&self, source: &TableSource, frame: &Frame<'_>) -> Option<(u32, String)> {
        let named = |relation: u32| {
            let name = source.name(relation);
            let name = name.or_else(|| source.set_aside.unmapped_name(relation));
            let name = name.map(TableName::to_string);
            let name = name.or_else(|| self.others.name(relation).cloned());
            Some((relation, name?))
        };
        match *frame {
            Frame::Keepalive { .. } => None,
            Frame::LargeMessage { head, .. } => {
                let head = RowHead::decode(head).ok()??;
                match source.has_older_rows(head.relation) {
                    true => {
                        let (relation, table) = source.older_table(&head.texts())?;
                        Some((relation, table.to_string()))
                    }
                    false => named(head.relation),
                }
            }
            Frame::XLogData { data, .. } => {
                let message = Message::decode(data).ok()?;
                match self.source.meaning(&message) {
                    Meaning::Row { relation, .. } => named(relation),
                    Meaning::OlderRow { source, tuple } => {
                        let (relation, table) = source.older_table(&source.leading_texts(tuple))?;
                        Some((relation, table.to_string()))
                    }
                    _ => None,
                }
            }
        }
    }
}

/// Returns whether the error concerns only the table of the current row, rather than the whole
/// stream or Kafka cluster.
fn concerns_one_table(error: &CoreError) -> bool {
    match error {
        CoreError::Mapping { .. }
        | CoreError::ForeignTable { .. }
        | CoreError::RowTooLarge { .. }
        | CoreError::BadTuple { .. }
        | CoreError::Route { .. } => true,
        CoreError::Produce { error, .. } | CoreError::DeadLetter { error, .. } => {
            concerns_one_record(error)
        }
        // The server aborts the stream at a row that it can't send, so setting the table aside
        // would not get the stream past the row.
        CoreError::Unsendable { .. }
        | CoreError::Decode { .. }
        | CoreError::Order(_)
        | CoreError::History(_)
        | CoreError::UnexpectedRow { .. }
        | CoreError::Envelope { .. }
        | CoreError::UnknownRelation { .. }
        | CoreError::TooManyTables { .. }
        | CoreError::BadLine { .. } => false,
    }
}
