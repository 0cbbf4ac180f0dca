//! State that outlives a connection.

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
use crate::postgres::catalog::slot_state::SlotOf;
use crate::postgres::replication::Identity;

/// The state that a pipeline keeps from one connection to the next, in order to detect another
/// history.
pub(crate) struct SessionState {
    pub(super) system_id: Option<String>,
    pub(super) timeline: u32,
    pub(super) confirmed: Option<Confirmed>,
    pub(super) another_owner: bool,
    /// A checkpoint that did not match the slot.
    pub(super) doubted: Option<Checkpoint>,
    /// Rows that are older than the slot have been copied, or will not be.
    pub(super) snapshot_done: bool,
    /// The last start had rows to copy.
    pub(super) copies: bool,
    /// Dropped slots have been logged.
    pub(super) has_reminded: bool,
    /// Tables that are set aside have been logged.
    pub(super) has_listed_tables: bool,
    /// A warning was logged that confirmed positions can't be written to `walpost.slot_state`.
    pub(super) has_warned_unrecorded: bool,
    /// With exactly-once delivery, how much may be in flight.
    pub(super) adaptive_window: AdaptiveWindow,
    /// Whether PostgreSQL accepts the role.
    pub(in crate::pipeline) access: Access,
    /// Crashes of the server.
    pub(in crate::pipeline) crashes: Crashes,
    pub(super) watched: Watched,
    pub(super) publication: WatchedPublication,
}

impl SessionState {
    /// Creates the state of a pipeline that has just started.
    pub(crate) fn new(window: Window, watched: Watched) -> Self {
        Self {
            system_id: None,
            timeline: 0,
            confirmed: None,
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

    /// Returns what the slot monitor watches.
    pub(crate) fn watched(&self) -> &Watched {
        &self.watched
    }

    /// Records how the tables are published.
    pub(super) async fn record_tables(&self, catalog: &impl CatalogQueries) {
        self.publication.record(catalog, &self.watched).await;
    }

    /// Returns how much may be in flight.
    pub(crate) fn window(&self) -> Window {
        self.adaptive_window.window()
    }

    /// Records that a Kafka transaction was abandoned with this much in flight.
    pub(crate) fn gave_up(&mut self, in_flight: Window) {
        self.adaptive_window.gave_up(in_flight);
    }

    /// Records how far the stream progressed before the connection ended.
    pub(crate) fn reached(&mut self, core: &Core) {
        let open = core
            .position()
            .map_or(Lsn::ZERO, |position| position.commit);
        self.crashes
            .reached(core.delivery.watermark.received().max(open));
    }

    /// Returns the last position that was confirmed to PostgreSQL.
    pub(crate) fn confirmed(&self) -> Option<Confirmed> {
        self.confirmed
    }

    /// Records that another process had the slot, and may have moved it legitimately.
    pub(crate) fn record_other_owner(&mut self) {
        self.another_owner = true;
    }

    /// Returns the error for a `checkpoint` that does not match the slot. The checkpoint was read
    /// before the slot was acquired, and another instance may have advanced both since then. The
    /// mismatch is therefore real only if the next attempt reads the same checkpoint.
    pub(super) fn doubt(
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

    /// Checks that the server belongs to the same cluster as before. Another cluster does not
    /// contain the events read so far, and its LSNs have a different meaning.
    pub(super) fn check_cluster(&self, found: &Identity) -> Result<(), SlotError> {
        match &self.system_id {
            Some(expected) if *expected != found.system_id => Err(SlotError::OtherCluster {
                found: found.system_id.clone(),
                expected: expected.clone(),
            }),
            _ => Ok(()),
        }
    }

    /// Records which server will stream, and returns the identity of the slot from now on.
    pub(super) fn record_server(
        &mut self,
        settings: &PipelineSettings,
        found: &Identity,
    ) -> SlotOf {
        if self.system_id.is_some() && self.timeline != found.timeline {
            let (from, to) = (self.timeline, found.timeline);
            warn!(
                pipeline = settings.name,
                from, to, "PostgreSQL has a new timeline: a standby was promoted"
            );
        }
        self.system_id = Some(found.system_id.clone());
        self.timeline = found.timeline;
        SlotOf {
            pipeline: settings.name.clone(),
            target: settings.target.clone(),
            system_id: found.system_id.clone(),
            timeline: found.timeline,
        }
    }

    pub(super) fn warn_unrecorded(&mut self, of: &SlotOf, why: &str) {
        if !std::mem::replace(&mut self.has_warned_unrecorded, true) {
            warn!(
                pipeline = of.pipeline,
                slot = of.target.slot,
                "failed to record the confirmed position in walpost.slot_state: if the slot is moved or re-created \
                 while this process does not have it, Walpost can't notice: {why}"
            );
        }
    }

    /// Checks that nothing else has moved the slot. `written` is the recorded position of the slot,
    /// which every other Walpost that had the slot has updated too. If nothing is recorded, another
    /// owner may have moved the slot legitimately.
    pub(super) fn check_slot(
        &mut self,
        of: &SlotOf,
        written: Option<Lsn>,
        found: Lsn,
    ) -> Result<(), SlotError> {
        let another_owner = std::mem::take(&mut self.another_owner);
        let ours = self.confirmed.map(Confirmed::lsn);
        // Positions that were confirmed while the table could not be written are known only to this
        // process.
        match written.max(ours.filter(|_| !another_owner)) {
            Some(confirmed) if found > confirmed => Err(SlotError::SlotMoved {
                slot: of.target.slot.clone(),
                found,
                confirmed,
                resend: of.target.resend(),
                then: match written {
                    Some(_) => format!(
                        "then say that this is known: {}; and start walpost",
                        of.target.skip(&found.to_string())
                    ),
                    None => "then restart walpost".to_owned(),
                },
            }),
            _ => Ok(()),
        }
    }
}
