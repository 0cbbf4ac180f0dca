//! The third phase of startup: determines the position at which the stream must start. The next
//! phase acquires the slot.

use super::slot_taken::{Recorded, SlotTaken};
use super::{OlderRows, Startup};
use crate::delivery::checkpoint::{Checkpoint, ServerState};
use crate::model::lsn::Lsn;
use crate::pipeline::database::{CatalogQueries, Database};
use crate::pipeline::error::PipelineError;
use crate::pipeline::session::link::Link;
use crate::postgres::catalog::slot_state::SlotIdentity;

/// The result of the third phase, which determines the position at which the stream must start.
pub(super) struct Planned<C> {
    pub(super) catalog: C,
    pub(super) link: Link,
    pub(super) slot_identity: SlotIdentity,
    pub(super) checkpoint: Option<Checkpoint>,
    pub(super) server: ServerState,
    pub(super) older: OlderRows,
}

impl<C: CatalogQueries> Planned<C> {
    /// Starts replication if it has not started yet, and compares the position of the slot with the
    /// recorded one.
    pub(super) async fn take_slot<D: Database<Catalog = C>>(
        mut self,
        start: &mut Startup<'_, '_, D>,
    ) -> Result<SlotTaken<C>, PipelineError> {
        let resume = match self.link.resume {
            Some(resume) => resume,
            None => {
                // The server omits transactions that the snapshot contains.
                let from = match &self.older {
                    OlderRows::Copy(snapshot) => snapshot.stream_from(),
                    OlderRows::Nothing | OlderRows::Settled(_) => Lsn::ZERO,
                };
                start.take_slot(&mut self.link, &self.catalog, from).await?
            }
        };
        let state = start.slot_state(&self.catalog, &self.slot_identity).await?;
        if self.checkpoint.is_none() {
            // A checkpoint is compared with the slot instead, because it is more reliable than the
            // state of this process: another instance may have advanced the slot. If this run
            // copies the existing rows, the slot may have been replaced or moved without a gap.
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
                // The next write of the state replaces the row that shows the gap, or records that
                // the slot has been read.
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
            link: self.link,
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
