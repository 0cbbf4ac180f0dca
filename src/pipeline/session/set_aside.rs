//! Sets tables aside and resumes their delivery. Each such change is written to the journal before
//! the stream continues.

use std::pin::Pin;

use tokio::sync::watch;
use tokio::time::Instant;
use tracing::{info, warn};

use super::error::SlotError;
use crate::model::outage::{Outage, OutageMessage};
use crate::model::set_aside::SetAside;
use crate::pipeline::database::{CatalogQueries, Database, open_catalog_of_owner};
use crate::pipeline::decode::Core;
use crate::pipeline::error::{NotRecorded, PipelineError};
use crate::pipeline::settings::PipelineSettings;
use crate::postgres::catalog::set_aside::TableNote;
use crate::postgres::table::TableName;
use crate::sink::SinkError;

/// A future that records in the journal that a table was set aside, or that its omitted rows were
/// replayed. If the table is now set aside, the future returns the new journal entry.
pub(super) type Recording =
    Pin<Box<dyn Future<Output = Result<Option<SetAside>, PipelineError>> + Send>>;

/// Tracks changes to the journal entries about set-aside tables during a session.
pub(super) struct TableWatch {
    /// The journal entries about set-aside tables, as last read by the slot monitor.
    read: watch::Receiver<Vec<SetAside>>,
    /// Journal entries about set-aside tables for which the session has not checked yet whether a
    /// replay is complete. After a replay is complete, a new journal entry must be written, which
    /// closes the entries that the replay covers.
    pending: Vec<SetAside>,
    reminder: Outage,
    /// Number of rows skipped since the last log message about them.
    rows: u64,
}

impl TableWatch {
    /// Creates the tracker for a session that starts with the journal entries in `entries`.
    pub(super) fn new(entries: Vec<SetAside>, read: watch::Receiver<Vec<SetAside>>) -> Self {
        Self {
            read,
            pending: entries,
            reminder: Outage::default(),
            rows: 0,
        }
    }

    /// Waits until the slot monitor reads journal entries that differ from the previous ones.
    /// Cancel safe.
    pub(super) async fn wait_for_change(&mut self) {
        match self.read.changed().await {
            Ok(()) => self.pending.clone_from(&self.read.borrow_and_update()),
            Err(_) => std::future::pending().await,
        }
    }

    /// Returns the next change that must be recorded in the journal, if any.
    pub(super) fn next_note(&mut self, core: &Core) -> Option<TableNote> {
        if self.pending.is_empty() {
            return None;
        }
        let note = core.replay_note(&self.pending);
        if note.is_none() {
            self.pending.clear();
        }
        note
    }

    /// Counts skipped rows, and logs their number at intervals.
    pub(super) fn count_omitted_rows(&mut self, settings: &PipelineSettings, core: &Core) {
        let rows = core.take_omitted_row_count();
        if rows == 0 {
            return;
        }
        core.delivery.watermark.stats().count_omitted_rows(rows);
        self.rows += rows;
        match self.reminder.failed(Instant::now().into_std()) {
            OutageMessage::Suppressed => {}
            OutageMessage::Started | OutageMessage::Ongoing(..) => {
                let rows = std::mem::take(&mut self.rows);
                warn!(
                    pipeline = settings.name,
                    rows,
                    "rows of tables that are set aside were not delivered. walpost status lists the tables"
                );
            }
        }
    }
}

/// Records in the journal that a table was set aside, or that its omitted rows were replayed.
pub(super) fn record(
    settings: &PipelineSettings,
    database: &impl Database,
    note: TableNote,
) -> Recording {
    let (settings, database) = (settings.clone(), database.clone());
    Box::pin(async move {
        let written = async {
            let catalog = open_catalog_of_owner(&settings, &database).await?;
            catalog
                .write_set_aside(&settings.name, &settings.target, &note)
                .await
        };
        written.await.map_err(|error| match note {
            TableNote::Begun { table, reason, .. } => NotRecorded {
                table,
                reason,
                error,
            }
            .into(),
            TableNote::Resumed { .. } | TableNote::Missed { .. } => error.into(),
        })
    })
}

/// Logs that a table was set aside, or that its omitted rows were replayed. Called after the change
/// has been recorded in the journal.
pub(super) fn log_note(settings: &PipelineSettings, note: &TableNote, opened: Option<&SetAside>) {
    let pipeline = &settings.name;
    let entry = opened.map(|entry| entry.id);
    let table_in = |entries: &[SetAside]| entries.first().map(|entry| entry.table.clone());
    match note {
        TableNote::Begun {
            table,
            position,
            reason,
            ..
        } => {
            let replay = settings.target.replay_set_aside(table);
            warn!(
                pipeline, table, %position, entry, reason,
                "table set aside: its events from this position on are not delivered, while the other tables continue. Fix the \
                 cause, then send the rows of the table: {replay}"
            );
        }
        TableNote::Resumed { entries, before } => {
            let table = table_in(entries);
            info!(pipeline, table, from = %before, "the stream has resumed delivering the table's events");
        }
        TableNote::Missed {
            entries, reason, ..
        } => {
            let table = table_in(entries);
            let name = table.as_deref().unwrap_or("TABLE");
            let replay = settings.target.replay_set_aside(name);
            warn!(
                pipeline,
                table, entry, reason, "the table remains set aside. Send its rows again: {replay}"
            );
        }
    }
}

/// Checks that the outbox's only table is not set aside. It may have been set aside while the
/// outbox still consisted of several tables.
///
/// # Errors
/// Returns an error if the table was set aside and has not been replayed.
pub(super) fn check_single(
    settings: &PipelineSettings,
    entries: &[SetAside],
) -> Result<(), SlotError> {
    let table = settings.target.outbox.table().map(TableName::to_string);
    let mut open = entries.iter().filter(|entry| entry.until.is_none());
    match open.find(|entry| Some(&entry.table) == table.as_ref()) {
        None => Ok(()),
        Some(entry) => Err(SlotError::TableSetAside {
            missing: format!(
                "the table's events from position {} on (journal entry {}, written at {})",
                entry.position, entry.id, entry.at
            ),
            table: entry.table.clone(),
            replay: settings.target.replay_set_aside(&entry.table),
        }),
    }
}

/// Logs which tables are set aside. Called once when a pipeline starts.
pub(super) fn log_set_aside_tables(settings: &PipelineSettings, entries: &[SetAside]) {
    let pipeline = &settings.name;
    for entry in entries.iter().filter(|entry| entry.until.is_none()) {
        warn!(
            pipeline,
            reason = entry.reason,
            "{}. Fix the cause, then send the rows of the table: {}",
            entry.describe(),
            settings.target.replay_set_aside(&entry.table)
        );
    }
}

/// Returns whether an error about `topic` concerns only the table of the current row. Returns false
/// if the topic's name is fixed in the configuration, because other tables then use the same topic.
pub(super) fn is_topic_of_row(settings: &PipelineSettings, topic: &str, error: &SinkError) -> bool {
    let is_shared = settings.outbox.topic.constant() == Some(topic)
        || settings.dead_letters.is_enabled() && settings.dead_letters.topic == topic;
    settings.sets_tables_aside()
        && !is_shared
        && matches!(
            error,
            SinkError::TopicMissing { .. }
                | SinkError::TopicNotCreated { .. }
                | SinkError::TopicDenied { .. }
        )
}
