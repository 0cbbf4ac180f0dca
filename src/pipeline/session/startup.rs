//! Starts a session in several phases, from checking the requirements to streaming. Each phase is
//! represented by a type that owns the results so far, and has a method that returns the next
//! phase.
//!
//! ```text
//! Checked ──▶ Connected ──▶ Planned ──▶ SlotTaken ──▶ Session
//! ```

use tokio::sync::watch;

use self::checked::Checked;
use super::Session;
use super::link::{Abort, Link};
use super::state::SessionState;
use crate::model::lsn::Lsn;
use crate::pipeline::database::{CatalogQueries, Database};
use crate::pipeline::decode::Core;
use crate::pipeline::error::PipelineError;
use crate::pipeline::order::{Order, drain_ordered};
use crate::pipeline::settings::PipelineSettings;
use crate::pipeline::snapshot::{Settlement, Snapshot};
use crate::pipeline::unsendable;
use crate::postgres::catalog::CatalogError;
use crate::postgres::catalog::slot_owner::UnknownOwner;
use crate::postgres::catalog::slot_state::{FoundState, SlotIdentity, SlotState};
use crate::sink::Sink;

mod checked;
mod connected;
mod planned;
mod slot_taken;

/// Checks the pipeline's requirements, connects, and starts replication. Returns `None` if the
/// pipeline is asked to drain in the meantime.
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
        let checked = Checked::check(&mut start).await?;
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

/// What to do about rows that are older than the slot.
enum OlderRows {
    /// Nothing: no rows have to be copied, and no journal entry has to be written.
    Nothing,
    /// No rows have to be copied, but a journal entry that states this must be written.
    Settled(Settlement),
    /// The older rows must be copied before the stream starts.
    Copy(Box<Snapshot>),
}

/// The state that all phases share.
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

    /// Starts replication, and returns the connection as a [`Link`] together with the slot's
    /// position. If older rows are copied first, `copy_end` is the position at which the stream
    /// must start.
    async fn take_slot(
        &mut self,
        mut link: Link,
        catalog: &D::Catalog,
        copy_end: Option<Lsn>,
    ) -> Result<(Link, Lsn), PipelineError> {
        self.session_state.crashes.begin_reading();
        let from = copy_end.unwrap_or(Lsn::ZERO);
        let taken = link.take_slot(self.settings, catalog, from, Abort::Unexpected);
        let resume = match taken.await {
            // The server aborted the stream at a row that it can't send, before Walpost could check
            // that the slot was in use. Start the stream again to deliver the events that precede
            // the row. If older rows are copied first, return the error instead, because the slot
            // must remain in use during the copy.
            Err(error) if unsendable::is_unsendable(&error) && copy_end.is_none() => {
                // Close this connection first, because the server may not have a free walsender for
                // another one.
                drop(link);
                link = self.link(catalog).await?;
                link.take_slot(self.settings, catalog, from, Abort::Expected)
                    .await?
            }
            taken => taken?,
        };
        self.core.delivery.checks_texts = link.connection.has_unchecked_texts();
        self.core.reconnected(resume);
        // Another pipeline may have used the slot since the last check. Check again now: this
        // connection holds the slot, so no other pipeline can use it.
        self.check_slot_owner(catalog, UnknownOwner::Rejected)
            .await?;
        Ok((link, resume))
    }

    /// If the pipeline is defined by a row, checks that the slot belongs to the pipeline.
    async fn check_slot_owner(
        &self,
        catalog: &D::Catalog,
        unknown: UnknownOwner,
    ) -> Result<(), CatalogError> {
        let settings = self.settings;
        catalog
            .check_slot_owner(
                &settings.name,
                settings.defined_by,
                &settings.target,
                unknown,
            )
            .await
    }

    /// Returns the state of the slot that is recorded in `walpost.slot_state`. Returns `Some(None)`
    /// if no state has been recorded yet. Returns `None` if positions can't be recorded there; in
    /// this case, a warning is logged once.
    async fn slot_state(
        &mut self,
        catalog: &D::Catalog,
        of: &SlotIdentity,
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
