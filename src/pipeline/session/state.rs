//! The parts of a pipeline's state that outlive a connection.

use tracing::warn;

use super::error::SlotError;
use super::publication::WatchedPublication;
use crate::delivery::checkpoint::{Checkpoint, HistoryError};
use crate::delivery::watermark::Confirmed;
use crate::model::lsn::Lsn;
use crate::model::window::Window;
use crate::pipeline::access::Access;
use crate::pipeline::crashes::Crashes;
use crate::pipeline::database::CatalogQueries;
use crate::pipeline::decode::Core;
use crate::pipeline::exactly_once::adaptive_window::AdaptiveWindow;
use crate::pipeline::exactly_once::error::ExactlyOnceError;
use crate::pipeline::settings::PipelineSettings;
use crate::pipeline::wal_budget::slot_monitor::Watched;
use crate::postgres::catalog::slot_state::SlotIdentity;
use crate::postgres::replication::Identity;

/// State that a pipeline keeps from one connection to the next, for example to detect that it has
/// connected to a different cluster.
pub(crate) struct SessionState {
    pub(super) system_id: Option<String>,
    pub(super) timeline: u32,
    pub(super) confirmed: Option<Confirmed>,
    /// The start time of the server that serves the last replication connection; see
    /// [`ServerProcess`](crate::postgres::replication::ServerProcess).
    pub(super) postmaster_start: String,
    /// Whether another process may have used the slot since this process last checked the slot's
    /// position.
    pub(super) another_owner: bool,
    /// The last checkpoint that did not match the slot, if any.
    pub(super) doubted: Option<Checkpoint>,
    /// Whether the rows older than the slot have been copied or need not be copied.
    pub(super) snapshot_done: bool,
    /// Whether the last attempt to start found rows to copy.
    pub(super) copies: bool,
    /// Whether reminders and warnings about the pipeline's setup, such as those about dropped
    /// slots, have been logged.
    pub(super) has_reminded: bool,
    /// Whether the names of the set-aside tables have been logged.
    pub(super) has_listed_tables: bool,
    /// Whether a warning has been logged that confirmed positions can't be written to
    /// `walpost.slot_state`.
    pub(super) has_warned_unrecorded: bool,
    /// With exactly-once delivery, the current limit on records in flight.
    pub(super) adaptive_window: AdaptiveWindow,
    /// Tracks which kinds of connections (catalog or replication) PostgreSQL has accepted from the
    /// role.
    pub(in crate::pipeline) access: Access,
    /// Counts the server's crashes.
    pub(in crate::pipeline) crashes: Crashes,
    pub(super) watched: Watched,
    pub(super) publication: WatchedPublication,
}

impl SessionState {
    /// Creates the state for a pipeline that has just started.
    pub(crate) fn new(window: Window, watched: Watched) -> Self {
        Self {
            system_id: None,
            timeline: 0,
            confirmed: None,
            postmaster_start: String::new(),
            another_owner: false,
            doubted: None,
            snapshot_done: false,
            copies: false,
            has_reminded: false,
            has_listed_tables: false,
            has_warned_unrecorded: false,
            adaptive_window: AdaptiveWindow::new(window),
            access: Access::default(),
            crashes: Crashes::default(),
            watched,
            publication: WatchedPublication::default(),
        }
    }

    /// Returns the slot that is being monitored.
    pub(crate) fn watched(&self) -> &Watched {
        &self.watched
    }

    /// Records in the database how each table is published.
    pub(super) async fn record_tables(&self, catalog: &impl CatalogQueries) {
        self.publication.record(catalog, &self.watched).await;
    }

    /// Returns the current limit on records in flight.
    pub(crate) fn window(&self) -> Window {
        self.adaptive_window.window()
    }

    /// Records that a Kafka transaction was abandoned. `in_flight` is the number and size of the
    /// records that were in flight at that time.
    pub(crate) fn record_abandoned_transaction(&mut self, in_flight: Window) {
        self.adaptive_window.record_abandoned_transaction(in_flight);
    }

    /// Records the position that the stream reached before the connection ended.
    pub(crate) fn record_position(&mut self, core: &Core) {
        let open = core
            .position()
            .map_or(Lsn::ZERO, |position| position.commit);
        self.crashes
            .record_position(core.delivery.watermark.received().max(open));
    }

    /// Returns the last position that was confirmed to PostgreSQL.
    pub(crate) fn confirmed(&self) -> Option<Confirmed> {
        self.confirmed
    }

    /// Returns the start time of the server that serves the last replication connection.
    pub(crate) fn postmaster_start(&self) -> &str {
        &self.postmaster_start
    }

    /// Records that another process has used the slot, and may legitimately have moved it.
    pub(crate) fn record_other_owner(&mut self) {
        self.another_owner = true;
    }

    /// Returns the error for a `checkpoint` that does not match the slot. The checkpoint was read
    /// before the slot was acquired, so another instance may have advanced both in between. The
    /// mismatch is therefore treated as real only if the next attempt reads the same checkpoint.
    pub(super) fn checkpoint_mismatch(
        &mut self,
        checkpoint: Checkpoint,
        error: HistoryError,
    ) -> ExactlyOnceError {
        if self.doubted.as_ref() == Some(&checkpoint) {
            return error.into();
        }
        self.doubted = Some(checkpoint);
        ExactlyOnceError::Outrun(error)
    }

    /// Checks that the server belongs to the same cluster as before. On a different cluster, the
    /// events read so far may not exist, and LSNs can't be compared with those of the previous
    /// cluster.
    pub(super) fn check_cluster(&self, found: &Identity) -> Result<(), SlotError> {
        match &self.system_id {
            Some(expected) if *expected != found.system_id => Err(SlotError::OtherCluster {
                found: found.system_id.clone(),
                expected: expected.clone(),
            }),
            _ => Ok(()),
        }
    }

    /// Records the identity of the server that will stream, and returns the slot's identity on that
    /// server.
    pub(super) fn record_server(
        &mut self,
        settings: &PipelineSettings,
        found: &Identity,
    ) -> SlotIdentity {
        if self.system_id.is_some() && self.timeline != found.timeline {
            let (from, to) = (self.timeline, found.timeline);
            warn!(
                pipeline = settings.name,
                from, to, "PostgreSQL has a new timeline: a standby was promoted"
            );
        }
        self.system_id = Some(found.system_id.clone());
        self.timeline = found.timeline;
        SlotIdentity {
            pipeline: settings.name.clone(),
            defined_by: settings.defined_by,
            target: settings.target.clone(),
            system_id: found.system_id.clone(),
            timeline: found.timeline,
        }
    }

    pub(super) fn warn_unrecorded(&mut self, slot: &SlotIdentity, why: &str) {
        if !std::mem::replace(&mut self.has_warned_unrecorded, true) {
            warn!(
                pipeline = slot.pipeline,
                slot = slot.target.slot,
                "failed to record the confirmed position in walpost.slot_state, so Walpost can't detect a slot that is moved or \
                 re-created while this process is not using it: {why}"
            );
        }
    }

    /// Checks that nothing other than Walpost has moved the slot. `written` is the slot's position
    /// in `walpost.slot_state`, which every Walpost process that uses the slot updates. If
    /// `written` is `None`, a higher position is accepted once after another process has used the
    /// slot, because that process may have been another Walpost instance.
    pub(super) fn check_slot(
        &mut self,
        slot: &SlotIdentity,
        written: Option<Lsn>,
        found: Lsn,
    ) -> Result<(), SlotError> {
        let another_owner = std::mem::take(&mut self.another_owner);
        let ours = self.confirmed.map(Confirmed::lsn);
        // A position that was confirmed while `walpost.slot_state` was not writable is stored only
        // in this process's memory.
        match written.max(ours.filter(|_| !another_owner)) {
            Some(confirmed) if found > confirmed => Err(SlotError::SlotMoved {
                slot: slot.target.slot.clone(),
                found,
                confirmed,
                resend: slot.target.resend(),
                then: match written {
                    Some(_) => format!(
                        "accept the slot's new position: {}; then start walpost",
                        slot.target.skip(&found.to_string())
                    ),
                    None => "restart walpost".to_owned(),
                },
            }),
            _ => Ok(()),
        }
    }
}
