//! Closes journal entries about events that may be missing. The events are not resent, because the
//! operator has confirmed that they were delivered.

use serde_json::json;
use uuid::Builder;

use super::dropped_slots::expect_dropped;
use super::run::lock_entries;
use super::{DROPPED_SLOTS_FLAG, ReplayError};
use crate::model::dropped_slot::DroppedSlot;
use crate::pipeline::database::open_as_owner;
use crate::pipeline::settings::PipelineSettings;
use crate::postgres::catalog::Catalog;
use crate::postgres::catalog::journal::{ALREADY_DELIVERED, Action, DROPPED_SLOTS, Entry};

/// The open journal entries of a pipeline, or of one of its tables. While this value exists, it
/// holds a lock that prevents other processes from resending the events that the entries describe.
pub(crate) struct OpenEntries<'s> {
    settings: &'s PipelineSettings,
    catalog: Catalog,
    entries: Vec<DroppedSlot>,
}

impl<'s> OpenEntries<'s> {
    /// Looks up the open entries. Does not change anything.
    ///
    /// # Errors
    /// Returns an error if no open entries exist, if a slot that was marked to be dropped still
    /// exists, if another process is sending the events, or if a catalog query failed.
    pub(crate) async fn find(settings: &'s PipelineSettings) -> Result<Self, ReplayError> {
        let target = &settings.target;
        let catalog = open_as_owner(settings).await?;
        lock_entries(&catalog, &target.slot, DROPPED_SLOTS_FLAG).await?;
        let entries = catalog.dropped_slots(&settings.name, target).await?;
        if entries.is_empty() {
            return Err(ReplayError::NoDroppedSlots {
                pipeline: settings.name.clone(),
                slot: target.slot.clone(),
            });
        }
        if let Some(slot) = catalog.slot(&target.slot).await? {
            let cluster = catalog.cluster().await?;
            expect_dropped(&entries, &target.slot, slot.confirmed, &cluster)?;
        }
        Ok(Self {
            settings,
            catalog,
            entries,
        })
    }

    /// Describes, for each journal entry, which events may be missing, and why.
    pub(crate) fn describe(&self) -> impl Iterator<Item = String> {
        let line = |entry: &DroppedSlot| format!("{}: {}", entry.describe(), entry.cause());
        self.entries.iter().map(line)
    }

    /// Adds a journal entry that closes these entries and records the session's role. Returns the
    /// ID of the new entry.
    ///
    /// # Errors
    /// Returns an error if the journal can't be written.
    pub(crate) async fn settle(&self) -> Result<i64, ReplayError> {
        let ids: Vec<_> = self.entries.iter().map(|entry| entry.id).collect();
        let run = Builder::from_random_bytes(fastrand::u128(..).to_ne_bytes()).into_uuid();
        let entry = Entry {
            pipeline: &self.settings.name,
            target: &self.settings.target,
            action: Action::Replay,
            from: None,
            to: None,
            detail: json!({
                "run": run,
                "state": "done",
                "sent": 0,
                ALREADY_DELIVERED: true,
                DROPPED_SLOTS: ids,
            }),
        };
        Ok(self.catalog.write_journal(&entry).await?)
    }
}
