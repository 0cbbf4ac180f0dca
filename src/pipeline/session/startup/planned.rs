//! The third phase of startup: the position at which the stream must start is known. The next phase
//! acquires the slot.

use super::slot_taken::{Recorded, SlotTaken};
use super::{OlderRows, Startup};
use crate::delivery::checkpoint::{Checkpoint, ServerState};
use crate::pipeline::database::{CatalogQueries, Database};
use crate::pipeline::error::PipelineError;
use crate::pipeline::session::link::Link;
use crate::postgres::catalog::slot_state::SlotIdentity;

/// The result of the third startup phase: what to do about older rows, which determines where the
/// stream must start.
pub(super) struct Planned<C> {
    pub(super) catalog: C,
    pub(super) link: Link,
    pub(super) slot_identity: SlotIdentity,
    pub(super) checkpoint: Option<Checkpoint>,
    pub(super) server: ServerState,
    pub(super) older: OlderRows,
}

impl<C: CatalogQueries> Planned<C> {
    /// Starts replication unless it has started already, and compares the slot's position with the
    /// recorded position.
    pub(super) async fn take_slot<D: Database<Catalog = C>>(
        self,
        start: &mut Startup<'_, '_, D>,
    ) -> Result<SlotTaken<C>, PipelineError> {
        let (link, resume) = match self.link.resume {
            Some(resume) => (self.link, resume),
            None => {
                // Starting the stream at the consistent point of the copy's first snapshot makes
                // the server skip the transactions that this snapshot contains.
                let copy_end = match &self.older {
                    OlderRows::Copy(snapshot) => Some(snapshot.stream_from()),
                    OlderRows::Nothing | OlderRows::Settled(_) => None,
                };
                start.take_slot(self.link, &self.catalog, copy_end).await?
            }
        };
        let state = start.slot_state(&self.catalog, &self.slot_identity).await?;
        if self.checkpoint.is_none() {
            // Without a checkpoint, compare the slot's position with the recorded position. A
            // checkpoint would be more reliable, because it also reflects deliveries by other
            // instances. Ignore the recorded position if older rows are copied, because no events
            // are lost in that case, even if the slot was moved or replaced.
            let is_copied = matches!(self.older, OlderRows::Copy(_));
            let recorded = state.flatten().filter(|_| !is_copied);
            let recorded = recorded.map(|state| state.confirmed);
            if let Err(moved) =
                start
                    .session_state
                    .check_slot(&self.slot_identity, recorded, resume)
            {
                match recorded {
                    Some(recorded)
                        if self
                            .catalog
                            .is_accounted_for(&self.slot_identity, recorded, resume)
                            .await? => {}
                    _ => return Err(moved.into()),
                }
            }
            if state.is_some_and(|state| state.is_none_or(|state| !state.begun)) {
                // Record now which events may be missing, because the next write to
                // `walpost.slot_state` overwrites the information needed to determine this.
                self.catalog
                    .record_gap_of_other_history(
                        &self.slot_identity,
                        resume,
                        start.settings.first_start(),
                    )
                    .await?;
            }
        }
        Ok(SlotTaken {
            catalog: self.catalog,
            link,
            recorded: Recorded {
                slot_identity: self.slot_identity,
                state,
            },
            checkpoint: self.checkpoint,
            server: ServerState {
                confirmed: resume,
                ..self.server
            },
            older: self.older,
        })
    }
}
