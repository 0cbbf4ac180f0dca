//! From the checks of what a pipeline needs to a connection that streams, in phases: each is a type that owns what is
//! known by then, and a method of it leads to the next.
//!
//! ```text
//! Checked ──▶ Connected ──▶ Planned ──▶ SlotTaken ──▶ Session
//! ```

use tokio::sync::watch;

use self::checked::Checked;
use super::Session;
use super::link::Link;
use super::state::SessionState;
use crate::model::lsn::Lsn;
use crate::pipeline::database::{CatalogQueries, Database};
use crate::pipeline::decode::Core;
use crate::pipeline::error::PipelineError;
use crate::pipeline::order::{Order, drain_ordered};
use crate::pipeline::settings::PipelineSettings;
use crate::pipeline::snapshot::{Settlement, Snapshot};
use crate::postgres::catalog::CatalogError;
use crate::postgres::catalog::slot_state::{FoundState, SlotOf, SlotState};
use crate::sink::Sink;

mod checked;
mod connected;
mod planned;
mod slot_taken;

/// Checks what the pipeline needs, connects, and starts replication. Nothing if told to drain
/// meanwhile.
pub(in crate::pipeline) async fn open<'s>(
    settings: &'s PipelineSettings,
    database: &impl Database,
    core: &mut Core,
    sink: &mut impl Sink,
    session_state: &mut SessionState,
    orders: &mut watch::Receiver<Order>,
) -> Result<Option<Session<'s>>, PipelineError> {
    let start = async {
        let mut start = Startup {
            settings,
            database,
            core,
            session_state,
        };
        let checked = Checked::by(&mut start).await?;
        let connected = checked.connect(&mut start, sink).await?;
        let planned = connected.plan(&mut start).await?;
        let slot_taken = planned.take_slot(&mut start).await?;
        slot_taken.stream(start).await
    };
    tokio::select! {
        biased;
        () = drain_ordered(orders) => Ok(None),
        session = start => session.map(Some),
    }
}

/// What becomes of rows that are older than the slot.
enum OlderRows {
    /// They are dealt with, and that is known.
    Nothing,
    /// They are, and that is to be recorded.
    Settled(Settlement),
    /// They come first.
    Copy(Box<Snapshot>),
}

/// What every phase works with.
struct Startup<'a, 's, D> {
    settings: &'s PipelineSettings,
    database: &'a D,
    core: &'a mut Core,
    session_state: &'a mut SessionState,
}

impl<D: Database> Startup<'_, '_, D> {
    async fn link(&mut self, catalog: &D::Catalog) -> Result<Link, PipelineError> {
        Link::open(self.settings, self.database, catalog, self.session_state).await
    }

    async fn take_slot(
        &mut self,
        link: &mut Link,
        catalog: &D::Catalog,
        from: Lsn,
    ) -> Result<Lsn, PipelineError> {
        self.session_state.crashes.begin_reading();
        let resume = link.take_slot(self.settings, catalog, from).await?;
        self.core.delivery.checks_texts = link.connection.has_unchecked_texts();
        self.core.reconnected(resume);
        Ok(resume)
    }

    /// What was recorded of the slot; nothing where that can't be done, which is said once.
    async fn slot_state(
        &mut self,
        catalog: &D::Catalog,
        of: &SlotOf,
    ) -> Result<Option<Option<SlotState>>, CatalogError> {
        match catalog.slot_state(of).await? {
            FoundState::State(state) => Ok(Some(state)),
            FoundState::Unusable(why) => {
                self.session_state.warn_unrecorded(of, &why);
                Ok(None)
            }
        }
    }
}
