//! The second phase: a connection can stream. The next phase decides how to handle rows that are
//! older than the slot.

use super::planned::Planned;
use super::{OlderRows, Startup};
use crate::delivery::checkpoint::{Checkpoint, ServerState};
use crate::model::lifecycle::SnapshotPhase;
use crate::pipeline::database::{CatalogQueries, Database};
use crate::pipeline::error::PipelineError;
use crate::pipeline::exactly_once::error::ExactlyOnceError;
use crate::pipeline::session::link::{Link, explained};
use crate::pipeline::snapshot::error::SnapshotError;
use crate::pipeline::snapshot::{self, Known, Snapshot};
use crate::postgres::catalog::Observed;
use crate::postgres::catalog::slot_state::SlotOf;

/// A connection can stream, and with exactly-once delivery it is known which events are in Kafka.
pub(super) struct Connected<C> {
    pub(super) catalog: C,
    pub(super) observed: Observed,
    pub(super) link: Link,
    pub(super) of: SlotOf,
    pub(super) checkpoint: Option<Checkpoint>,
}

impl<C: CatalogQueries> Connected<C> {
    /// Decides how to handle rows that are older than the slot, and creates their snapshot.
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
                    .copied_on(&server)
                    .map_err(ExactlyOnceError::from)?,
            }),
        };
        let known = known.as_ref();
        let planned = match is_snapshot_done(start.session_state.snapshot_done, known) {
            true => snapshot::Planned::Nothing,
            false => {
                let recorded = start.slot_state(&self.catalog, &self.of).await?.flatten();
                let recorded = recorded.map(|state| state.confirmed);
                snapshot::plan(settings, &self.catalog, &self.observed, known, recorded).await?
            }
        };
        start.session_state.copies = matches!(planned, snapshot::Planned::Copy(_));
        if start.session_state.copies && self.link.resume.is_some() {
            // The stream must start at another position.
            return Err(SnapshotError::Outrun.into());
        }
        let older = match planned {
            snapshot::Planned::Nothing => OlderRows::Nothing,
            snapshot::Planned::Settled(settlement) => OlderRows::Settled(settlement),
            snapshot::Planned::Copy(plan) => {
                let stats = start.core.delivery.watermark.stats();
                stats.snapshot_entered(SnapshotPhase::Making, None);
                let catalog = &self.catalog;
                match Snapshot::make(settings, start.database, catalog, &self.link.identity, plan)
                    .await
                {
                    Ok(snapshot) => OlderRows::Copy(Box::new(snapshot)),
                    Err(SnapshotError::Connection(error)) => {
                        return Err(explained(error, catalog).await.into());
                    }
                    Err(error) => return Err(error.into()),
                }
            }
        };
        Ok(Planned {
            catalog: self.catalog,
            link: self.link,
            of: self.of,
            checkpoint: self.checkpoint,
            server,
            older,
        })
    }

    /// Returns the state of the server that will stream, with the timeline history that is compared
    /// with the checkpoint.
    async fn server_state<D: Database<Catalog = C>>(
        &self,
        start: &mut Startup<'_, '_, D>,
    ) -> Result<ServerState, PipelineError> {
        let identity = &self.link.identity;
        let history = match &self.checkpoint {
            Some(checkpoint) if checkpoint.timeline != identity.timeline => {
                // The first connection may be streaming already.
                let mut beside = start.link(&self.catalog).await?;
                let timeline = identity.timeline;
                beside.connection.timeline_history(timeline).await?
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

/// Returns whether there is nothing to copy because an earlier session of this process has settled
/// that. If there is a checkpoint, it is compared again, because another instance may have started
/// a copy in the meantime.
fn is_snapshot_done(by_earlier_session: bool, checkpoint: Option<&Known>) -> bool {
    by_earlier_session && checkpoint.is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checkpoint_decides_about_older_rows_whatever_an_earlier_session_has_settled() {
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
