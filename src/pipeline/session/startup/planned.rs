//! The third phase: it is known where the stream must start. The next phase acquires the slot.

use super::slot_taken::{Recorded, SlotTaken};
use super::{OlderRows, Startup};
use crate::delivery::checkpoint::{Checkpoint, ServerState};
use crate::model::lsn::Lsn;
use crate::pipeline::database::{CatalogQueries, Database};
use crate::pipeline::error::PipelineError;
use crate::pipeline::session::link::Link;
use crate::postgres::catalog::slot_state::SlotOf;

/// It is known where the stream must start.
pub(super) struct Planned<C> {
    pub(super) catalog: C,
    pub(super) link: Link,
    pub(super) of: SlotOf,
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
        let state = start.slot_state(&self.catalog, &self.of).await?;
        if self.checkpoint.is_none() {
            // If there is a checkpoint, it is compared with the slot instead: it is more reliable
            // than the memory of this process, because another instance may have advanced the slot.
            // A slot can be replaced or moved without a gap only if this start copies the existing
            // rows.
            let is_copied = matches!(self.older, OlderRows::Copy(_));
            let recorded = state.flatten().filter(|_| !is_copied);
            let recorded = recorded.map(|state| state.confirmed);
            if let Err(moved) = start.session_state.check_slot(&self.of, recorded, resume) {
                match recorded {
                    Some(recorded)
                        if self
                            .catalog
                            .is_accounted_for(&self.of, recorded, resume)
                            .await? => {}
                    _ => return Err(moved.into()),
                }
            }
            if state.is_some_and(|state| state.is_none_or(|state| !state.begun)) {
                // The first write of the state replaces the row that shows the gap, or records that
                // the slot was read.
                self.catalog
                    .record_gap_of_other_history(&self.of, resume, start.settings.first_start())
                    .await?;
            }
        }
        Ok(SlotTaken {
            catalog: self.catalog,
            link: self.link,
            recorded: Recorded { of: self.of, state },
            checkpoint: self.checkpoint,
            server: ServerState {
                confirmed: resume,
                ..self.server
            },
            older: self.older,
        })
    }
}
