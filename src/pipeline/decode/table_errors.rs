//! Errors that concern one of several tables, which is set aside.

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

/// A reason can quote a column's value, which can be long.
const REASON_CHARS_MAX: usize = 1000;

impl Core {
    /// An error that concerns one of several tables sets that aside, and is not returned by [`Core::frame`].
    pub(crate) fn set_tables_aside(&mut self, is_enabled: bool) {
        if let Source::Table(source) = &mut self.source {
            source.set_aside.is_enabled = is_enabled;
        }
    }

    /// Leaves out rows of tables that are set aside, as the journal's `entries` of this cluster have them. The stream has every
    /// row whose commit LSN is at or after `known_from`. Comes after [`Core::reconnected`].
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

    /// What to record about tables whose rows were sent again, as the journal has their entries by now.
    pub(crate) fn hand_over(&self, found: &[SetAside]) -> Option<TableNote> {
        match &self.source {
            Source::Table(source) => source.set_aside.hand_over(found),
            Source::Messages(_) => None,
        }
    }

    /// The note is recorded, and has opened this entry, if it has opened one.
    pub(crate) fn recorded(&mut self, note: &TableNote, opened: Option<SetAside>) {
        if let Source::Table(source) = &mut self.source {
            source.set_aside.apply(note, opened);
            source.mark_set_aside();
        }
    }

    /// How many rows of tables that are set aside were left out since the last call.
    pub(crate) fn take_rows_left_out(&self) -> u64 {
        match &self.source {
            Source::Table(source) => source.set_aside.take_rows(),
            Source::Messages(_) => 0,
        }
    }

    /// The sink can't prepare this topic: a record for it is an error from now on.
    pub(crate) fn refuse_topic(&mut self, topic: String, error: SinkError) {
        self.refused_topic = Some((topic, error));
    }

    /// The error of a row whose topic was refused.
    pub(super) fn refused(&mut self, topic: &str) -> Option<CoreError> {
        let (_, error) = self
            .refused_topic
            .take_if(|(refused, _)| refused == topic)?;
        Some(CoreError::Produce {
            at: self.position.unwrap_or_default(),
            row: "row".to_owned(),
            error: Box::new(error),
        })
    }

    /// What to record about the table whose row is in `frame` and has led to `error`.
    ///
    /// # Errors
    /// The error, if it concerns more than one table.
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
        // It would be set aside again and again.
        if source.set_aside.covers_table(relation, &table, position) {
            return Err(error);
        }
        let reason = match error {
            // Nothing has to be skipped: the table's rows are left out, and can be replayed.
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

    /// OID and name of the table whose row is in the frame.
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
                    Meaning::Older { source, tuple } => {
                        let (relation, table) = source.older_table(&source.texts_of(tuple))?;
                        Some((relation, table.to_string()))
                    }
                    _ => None,
                }
            }
        }
    }
}

/// The error concerns the table of one row, and neither the stream nor Kafka as a whole.
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
        // The server ends the stream at such a row, also if it would be left out.
        CoreError::Unconvertible { .. }
        | CoreError::Decode { .. }
        | CoreError::Order(_)
        | CoreError::History(_)
        | CoreError::RowBesideMessages { .. }
        | CoreError::Envelope { .. }
        | CoreError::UnknownRelation { .. }
        | CoreError::TooManyTables { .. }
        | CoreError::BadLine { .. } => false,
    }
}

/// The sink does not accept the record because of what is in it.
fn concerns_one_record(error: &SinkError) -> bool {
    match error {
        SinkError::TopicMissing { .. }
        | SinkError::TopicNotCreated { .. }
        | SinkError::TopicDenied { .. }
        | SinkError::TooLarge { .. }
        | SinkError::RecordRefused { .. }
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
