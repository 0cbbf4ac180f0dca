//! What outlasts a connection.

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

/// What a pipeline remembers from one connection to the next, to notice another history.
pub(crate) struct SessionState {
    pub(super) system_id: Option<String>,
    pub(super) timeline: u32,
    pub(super) confirmed: Option<Confirmed>,
    pub(super) another_owner: bool,
    /// A checkpoint that did not fit the slot.
    pub(super) doubted: Option<Checkpoint>,
    /// Rows that are older than the slot are dealt with.
    pub(super) snapshot_done: bool,
    /// Some were to be copied at the last start.
    pub(super) copies: bool,
    /// Dropped slots were reported.
    pub(super) has_reminded: bool,
    /// Tables that are set aside were logged.
    pub(super) has_listed_tables: bool,
    /// It was said that what is confirmed is not written down.
    pub(super) has_warned_unrecorded: bool,
    /// Exactly-once: what may be in flight.
    pub(super) adaptive_window: AdaptiveWindow,
    /// Whether PostgreSQL accepts who we are.
    pub(in crate::pipeline) access: Access,
    /// Crashes of the server.
    pub(in crate::pipeline) crashes: Crashes,
    pub(super) watched: Watched,
    pub(super) publication: WatchedPublication,
}

impl SessionState {
    /// Of a pipeline that has just begun.
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

    /// What the slot monitor watches.
    pub(crate) fn watched(&self) -> &Watched {
        &self.watched
    }

    /// Records how the tables are published.
    pub(super) async fn record_tables(&self, catalog: &impl CatalogQueries) {
        self.publication.record(catalog, &self.watched).await;
    }

    /// What may be in flight.
    pub(crate) fn window(&self) -> Window {
        self.adaptive_window.window()
    }

    /// Exactly-once: a transaction was given up with that much in flight.
    pub(crate) fn gave_up(&mut self, in_flight: Window) {
        self.adaptive_window.gave_up(in_flight);
    }

    /// Records how far the stream has come when a connection has ended.
    pub(crate) fn reached(&mut self, core: &Core) {
        let open = core
            .position()
            .map_or(Lsn::ZERO, |position| position.commit);
        self.crashes
            .reached(core.delivery.watermark.received().max(open));
    }

    /// What was confirmed to PostgreSQL last.
    pub(crate) fn confirmed(&self) -> Option<Confirmed> {
        self.confirmed
    }

    /// Another process had the slot, and may rightly have moved it.
    pub(crate) fn note_another_owner(&mut self) {
        self.another_owner = true;
    }

    /// `checkpoint` does not fit the slot. It was read before the slot was ours, and another
    /// instance may have moved both since: only if it is the same still, that is how it is.
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

    /// A server of another cluster has not what was read so far, and its LSNs mean something else.
    pub(super) fn check_cluster(&self, found: &Identity) -> Result<(), SlotError> {
        match &self.system_id {
            Some(expected) if *expected != found.system_id => Err(SlotError::OtherCluster {
                found: found.system_id.clone(),
                expected: expected.clone(),
            }),
            _ => Ok(()),
        }
    }

    /// The server that will stream: whose slot that is from here on.
    pub(super) fn note_server(&mut self, settings: &PipelineSettings, found: &Identity) -> SlotOf {
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

    /// `written` is what was written down of the slot. Whoever has had it meanwhile has written that too;
    /// without it, another owner may rightly have moved it.
    pub(super) fn check_slot(
        &mut self,
        of: &SlotOf,
        written: Option<Lsn>,
        found: Lsn,
    ) -> Result<(), SlotError> {
        let another_owner = std::mem::take(&mut self.another_owner);
        let ours = self.confirmed.map(Confirmed::lsn);
        // What was confirmed while the table could not be written is in our memory alone.
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
