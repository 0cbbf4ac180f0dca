//! The second phase of startup: a replication connection is open. The next phase decides what to do
//! about rows that are older than the slot.

use super::planned::Planned;
use super::{OlderRows, Startup};
use crate::delivery::checkpoint::{Checkpoint, ServerState};
use crate::model::lifecycle::SnapshotPhase;
use crate::pipeline::database::{CatalogQueries, Database};
use crate::pipeline::error::PipelineError;
use crate::pipeline::exactly_once::error::ExactlyOnceError;
use crate::pipeline::session::link::{Link, explain_error};
use crate::pipeline::snapshot::error::SnapshotError;
use crate::pipeline::snapshot::{self, Known, Snapshot};
use crate::postgres::catalog::Observed;
use crate::postgres::catalog::slot_state::SlotIdentity;

/// The result of the second startup phase: a replication connection and, with exactly-once
/// delivery, the checkpoint.
pub(super) struct Connected<C> {
    pub(super) catalog: C,
    pub(super) observed: Observed,
    pub(super) link: Link,
    pub(super) slot_identity: SlotIdentity,
    pub(super) checkpoint: Option<Checkpoint>,
}

impl<C: CatalogQueries> Connected<C> {
    /// Decides what to do about rows that are older than the slot. If they must be copied, creates
    /// a snapshot.
    pub(super) async fn plan<D: Database<Catalog = C>>(
        self,
        start: &mut Startup<'_, '_, D>,
    ) -> Result<Planned<C>, PipelineError> {
        let settings = start.settings;
        let server = self.server_state(start).await?;
        let known = match &self.checkpoint {
            None => None,
            Some(checkpoint) => Some(Known {
                has_delivered: checkpoint.delivered.is_some(),
                copied: checkpoint
                    .copy_progress_on(&server)
                    .map_err(ExactlyOnceError::from)?,
            }),
        };
        let known = known.as_ref();
        let planned = match is_snapshot_done(start.session_state.snapshot_done, known) {
            true => snapshot::Planned::Nothing,
            false => {
                let recorded = start
                    .slot_state(&self.catalog, &self.slot_identity)
                    .await?
                    .flatten();
                let recorded = recorded.map(|state| state.confirmed);
                snapshot::plan(settings, &self.catalog, &self.observed, known, recorded).await?
            }
        };
        start.session_state.copies = matches!(planned, snapshot::Planned::Copy(_));
        if start.session_state.copies && self.link.resume.is_some() {
            // The slot was acquired on the assumption that no older rows have to be copied. A copy
            // is required after all, so the stream must start at a different position.
            return Err(SnapshotError::Outrun.into());
        }
        let older = match planned {
            snapshot::Planned::Nothing => OlderRows::Nothing,
            snapshot::Planned::Settled(settlement) => OlderRows::Settled(settlement),
            snapshot::Planned::Copy(plan) => {
                let stats = start.core.delivery.watermark.stats();
                stats.record_snapshot_phase(SnapshotPhase::Making, None);
                let catalog = &self.catalog;
                match Snapshot::make(settings, start.database, catalog, &self.link.identity, plan)
                    .await
                {
                    Ok(snapshot) => OlderRows::Copy(Box::new(snapshot)),
                    Err(SnapshotError::Connection(error)) => {
                        return Err(explain_error(error, catalog).await.into());
                    }
                    Err(error) => return Err(error.into()),
                }
            }
        };
        Ok(Planned {
            catalog: self.catalog,
            link: self.link,
            slot_identity: self.slot_identity,
            checkpoint: self.checkpoint,
            server,
            older,
        })
    }

    /// Returns the state of the server that will stream. Includes its timeline history if the
    /// checkpoint is from a different timeline.
    async fn server_state<D: Database<Catalog = C>>(
        &self,
        start: &mut Startup<'_, '_, D>,
    ) -> Result<ServerState, PipelineError> {
        let identity = &self.link.identity;
        let history = match &self.checkpoint {
            Some(checkpoint) if checkpoint.timeline != identity.timeline => {
                // Open a second connection, because the first one may already be streaming and then
                // can't run other commands.
                let mut second = start.link(&self.catalog).await?;
                let timeline = identity.timeline;
                second.connection.timeline_history(timeline).await?
            }
            _ => Vec::new(),
        };
        Ok(ServerState {
            system_id: identity.system_id.clone(),
            timeline: identity.timeline,
            history,
            slot: start.settings.target.slot.clone(),
            confirmed: self.link.resume.unwrap_or_default(),
            flushed: identity.flushed,
        })
    }
}

/// Returns whether an earlier session of this process has already copied the older rows, or
/// determined that they do not have to be copied. Always false if there is a checkpoint, because
/// another instance may have started a copy in the meantime.
fn is_snapshot_done(by_earlier_session: bool, checkpoint: Option<&Known>) -> bool {
    by_earlier_session && checkpoint.is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checks_again_for_rows_to_copy_in_later_sessions_if_a_checkpoint_exists() {
        let checkpoint = Known {
            has_delivered: true,
            copied: None,
        };
        assert!(is_snapshot_done(true, None));
        assert!(!is_snapshot_done(true, Some(&checkpoint)));
        assert!(!is_snapshot_done(false, None));
        assert!(!is_snapshot_done(false, Some(&checkpoint)));
    }
}
