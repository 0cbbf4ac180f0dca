//! Handling of errors that concern one of several tables: the table is set aside.

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

/// Maximum length of a reason, in characters. A reason can quote a column's value, which can be
/// long.
const REASON_CHARS_MAX: usize = 1000;

impl Core {
    /// Sets whether an error that concerns one of several tables sets that table aside. Otherwise,
    /// the error is returned.
    pub(crate) fn set_tables_aside(&mut self, is_enabled: bool) {
        if let Source::Table(source) = &mut self.source {
            source.set_aside.is_enabled = is_enabled;
        }
    }

    /// Omits rows of tables that are set aside according to `entries`, the journal's entries about
    /// this cluster. The stream contains every row whose commit LSN is at or above `known_from`.
    /// Must be called after [`Core::reconnected`].
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

    /// Returns the note to record about tables that were replayed, given the entries found in the
    /// journal.
    pub(crate) fn replay_note(&self, found: &[SetAside]) -> Option<TableNote> {
        match &self.source {
            Source::Table(source) => source.set_aside.replay_note(found),
            Source::Messages(_) => None,
        }
    }

    /// Applies a note that was written to the journal. `opened` is the entry that the note opened,
    /// if any.
    pub(crate) fn apply_note(&mut self, note: &TableNote, opened: Option<SetAside>) {
        if let Source::Table(source) = &mut self.source {
            source.set_aside.apply(note, opened);
            source.mark_set_aside();
        }
    }

    /// Returns the number of rows that have been omitted since the last call because their table is
    /// set aside.
    pub(crate) fn take_omitted_row_count(&self) -> u64 {
        match &self.source {
            Source::Table(source) => source.set_aside.take_row_count(),
            Source::Messages(_) => 0,
        }
    }

    /// Records that the sink can't prepare this topic, so that the row that requires the topic
    /// results in an error.
    pub(crate) fn refuse_topic(&mut self, topic: String, error: SinkError) {
        self.refused_topic = Some((topic, error));
    }

    /// Returns the error for a row if its topic was passed to [`Core::refuse_topic`].
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

    /// Returns the step that sets aside the table whose row is in `frame` and has caused `error`.
    ///
    /// # Errors
    /// Returns `error` if it does not concern a single table.
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
        // The table is already set aside; setting it aside again would not prevent the error.
        if source.set_aside.covers_table(relation, &table, position) {
            return Err(error);
        }
        let reason = match error {
            // The hint about rows in the WAL does not apply, because the table's rows are omitted
            // and can be replayed.
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

    /// Returns the OID and name of the table whose row is in the frame.
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

/// Returns whether the error concerns the table of one row, and neither the stream nor Kafka as a
/// whole.
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
        // The server ends the stream at such a row, even if the row would be omitted.
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

/// Returns whether the sink rejects the record because of its contents.
fn concerns_one_record(error: &SinkError) -> bool {
    match error {
        SinkError::TopicMissing { .. }
        | SinkError::TopicNotCreated { .. }
        | SinkError::TopicDenied { .. }
        | SinkError::TooLarge { .. }
        | SinkError::RecordRejected { .. }
        | SinkError::NoPartition { .. } => true,
        SinkError::Refused { .. }
        | SinkError::Configuration(_)
        | SinkError::Checkpoint { .. }
        | SinkError::CheckpointTopic { .. }
        | SinkError::Fenced(_)
        | SinkError::TransactionDenied { .. }
        | SinkError::Broken(_)
        | SinkError::Stdout(_)
        | SinkError::StdoutClosed => false,
    }
}
