//! From the checks of what a pipeline needs to a connection that streams.

use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use tracing::{error, info, warn};

use super::Session;
use super::keepalive::status_pause;
use super::monitor::{monitor_slot, monitor_until_lost};
use super::state::SessionState;
use crate::delivery::checkpoint::{Checkpoint, Phantom, ServerState};
use crate::delivery::watermark::Confirmed;
use crate::model::lifecycle::{SnapshotPhase, State};
use crate::model::lsn::Lsn;
use crate::pipeline::confirms::Confirms;
use crate::pipeline::database::{CatalogQueries, Database};
use crate::pipeline::decode::Core;
use crate::pipeline::error::PipelineError;
use crate::pipeline::error::SnapshotError;
use crate::pipeline::exactly_once::committer::TransactionCommitter;
use crate::pipeline::order::{Order, drain_ordered};
use crate::pipeline::recovery;
use crate::pipeline::settings::{Delivery, PipelineSettings};
use crate::pipeline::snapshot;
use crate::pipeline::snapshot::pace::Pace;
use crate::pipeline::snapshot::{Known, Planned, Snapshot};
use crate::pipeline::wal_budget::slot_monitor;
use crate::postgres::catalog::slot_state::{FoundState, SlotOf, SlotState};
use crate::postgres::catalog::{Observed, Problem};
use crate::postgres::replication::{Connection, ConnectionError, Identity};
use crate::postgres::target::Outbox;
use crate::sink::Sink;

/// A connection that is to stream, and then a session's.
struct Link {
    connection: Connection,
    identity: Identity,
    /// The server process on the other side.
    walsender: i32,
    /// Where the slot stands, once it is ours.
    resume: Option<Lsn>,
}

impl Link {
    async fn open(
        settings: &PipelineSettings,
        database: &impl Database,
        catalog: &impl CatalogQueries,
        session_state: &mut SessionState,
    ) -> Result<Self, PipelineError> {
        let (limit, row_bytes) = (settings.link_timeout, settings.row_bytes_max);
        let mut connection = match database.connect(limit, row_bytes).await {
            Ok(connection) => connection,
            Err(error) => return Err(with_users(error.into(), catalog).await),
        };
        session_state.access.granted();
        let identity = connection.identify().await?;
        session_state.check_cluster(&identity)?;
        let walsender = connection.process_id().await?;
        Ok(Self {
            connection,
            identity,
            walsender,
            resume: None,
        })
    }

    /// Starts replication, and gives where the slot stands: only once it is ours does nobody else move it.
    async fn take_slot(
        &mut self,
        settings: &PipelineSettings,
        catalog: &impl CatalogQueries,
        from: Lsn,
    ) -> Result<Lsn, PipelineError> {
        let target = &settings.target;
        let messages = matches!(target.outbox, Outbox::Messages { .. });
        self.connection
            .start(&target.slot, from, &target.publication, messages)
            .await?;
        let slot = catalog.look(target).await?.slot;
        let slot = slot.ok_or_else(|| Problem::NoSlot {
            slot: target.slot.clone(),
            init: target.outbox.init(),
        })?;
        // An address can go over to another server between two connections, and what that one's slot has
        // confirmed says nothing of this one's.
        if slot.active_pid != Some(self.walsender) {
            let (walsender, found) = (self.walsender, slot.active_pid);
            return Err(PipelineError::two_servers(target, walsender, found));
        }
        self.resume = Some(slot.confirmed);
        Ok(slot.confirmed)
    }
}

/// Keeps the slot of a link that has it, reading nothing, until the link is lost. `confirmed` is where the
/// slot stands.
async fn hold(
    link: &mut Option<Link>,
    confirmed: Confirmed,
    link_timeout: Duration,
) -> ConnectionError {
    let Some(link) = link.as_mut().filter(|link| link.resume.is_some()) else {
        return std::future::pending().await;
    };
    loop {
        // The link is read on when the slot is no longer only held.
        link.connection.pause();
        sleep(status_pause(link_timeout)).await;
        if let Err(error) = link
            .connection
            .confirm(confirmed, false, link_timeout)
            .await
        {
            return error;
        }
    }
}

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
    tokio::select! {
        biased;
        () = drain_ordered(orders) => Ok(None),
        session = start(settings, database, core, sink, session_state) => session.map(Some),
    }
}

async fn start<'s>(
    settings: &'s PipelineSettings,
    database: &impl Database,
    core: &mut Core,
    sink: &mut impl Sink,
    session_state: &mut SessionState,
) -> Result<Session<'s>, PipelineError> {
    let target = &settings.target;
    let mut catalog = database.catalog().await?;
    session_state.access.accepted();
    let observed = catalog.look(target).await?;
    if let Some(problem) = observed.problems(target).into_iter().next() {
        return Err(slot_monitor::explain(settings, &catalog, problem).await);
    }
    settings.check_drop_slot(&observed)?;
    if !session_state.has_reminded {
        slot_monitor::remind(settings, &catalog).await?;
        session_state.has_reminded = true;
    }
    // As the table is now; rows say again what it was like when they were written.
    settings.check_columns(&observed)?;
    if let Some(pid) = observed.slot.as_ref().and_then(|slot| slot.active_pid) {
        session_state.access.granted();
        return Err(PipelineError::SlotInUse {
            slot: target.slot.clone(),
            pid,
        });
    }

    let mut link = None;
    let checkpoint = match &settings.delivery {
        Delivery::AtLeastOnce => None,
        Delivery::ExactlyOnce(checkpoint) => {
            // What the slot has sent says later that nothing is to be copied.
            if !session_state.copies
                && snapshot::has_nothing_to_copy(settings, &catalog, &observed).await
            {
                let mut open = Link::open(settings, database, &catalog, session_state).await?;
                let resume = open.take_slot(settings, &catalog, Lsn::ZERO).await?;
                core.reconnected(resume);
                link = Some(open);
            }
            // Whoever had the slot before can't produce from here on; only then is it known what it has
            // produced.
            let found = tokio::select! {
                found = sink.take_over() => found?,
                // It waits for Kafka, for as long as that is away.
                error = monitor_until_lost(&mut catalog, &session_state.watched) => return Err(error),
                error = hold(&mut link, core.watermark.confirmed(), settings.link_timeout) => return Err(error.into()),
            };
            Some(found.ok_or_else(|| PipelineError::NoCheckpoint {
                pipeline: settings.name.clone(),
                topic: checkpoint.topic.clone(),
                slot: target.slot.clone(),
            }))
        }
    };

    let mut link = match link {
        Some(link) => link,
        None => Link::open(settings, database, &catalog, session_state).await?,
    };
    link.connection.pause();
    let identity = link.identity.clone();
    if session_state.system_id.is_some() && session_state.timeline != identity.timeline {
        let (from, to) = (session_state.timeline, identity.timeline);
        warn!(
            pipeline = settings.name,
            from, to, "PostgreSQL has a new timeline: a standby was promoted"
        );
    }
    session_state.system_id = Some(identity.system_id.clone());
    session_state.timeline = identity.timeline;
    let of = SlotOf {
        pipeline: settings.name.clone(),
        target: target.clone(),
        system_id: identity.system_id.clone(),
        timeline: identity.timeline,
    };
    let checkpoint = match checkpoint {
        Some(Err(missing)) => {
            let first =
                first_checkpoint(&catalog, &of, &observed, &identity, session_state).await?;
            Some(first.ok_or(missing)?)
        }
        found => found.transpose()?,
    };
    let history = match &checkpoint {
        Some(checkpoint) if checkpoint.timeline != identity.timeline => {
            // The first one may stream already.
            let mut beside = Link::open(settings, database, &catalog, session_state).await?;
            let timeline = identity.timeline;
            beside.connection.timeline_history(timeline).await?
        }
        _ => Vec::new(),
    };

    let server = ServerState {
        system_id: identity.system_id.clone(),
        timeline: identity.timeline,
        history,
        slot: target.slot.clone(),
        confirmed: Lsn::ZERO,
        flushed: identity.flushed,
    };
    let known = match &checkpoint {
        None => None,
        Some(checkpoint) => Some(Known {
            has_delivered: checkpoint.delivered.is_some(),
            copied: checkpoint.copied_on(&server)?,
        }),
    };
    // A checkpoint knows better, here too.
    let planned = match session_state.snapshot_done && known.is_none() {
        true => Planned::Nothing,
        false => snapshot::plan(settings, &catalog, &observed, known.as_ref()).await?,
    };
    let (plan, settled) = match planned {
        Planned::Nothing => (None, None),
        Planned::Settled(why) => (None, Some(why)),
        Planned::Copy(plan) => (Some(plan), None),
    };
    session_state.copies = plan.is_some();
    if session_state.copies && link.resume.is_some() {
        // The stream has to begin elsewhere.
        return Err(SnapshotError::Outrun.into());
    }
    let snapshot = match plan {
        Some(plan) => {
            let stats = core.watermark.stats();
            stats.snapshot_entered(SnapshotPhase::Making, None);
            match Snapshot::make(settings, database, &catalog, &identity, plan).await {
                Ok(snapshot) => Some(snapshot),
                Err(error) => return Err(with_users(error, &catalog).await),
            }
        }
        None => None,
    };
    let resume = match link.resume {
        Some(resume) => resume,
        None => {
            // The server itself leaves out what the snapshot has.
            let from = snapshot.as_ref().map_or(Lsn::ZERO, Snapshot::stream_from);
            let resume = link.take_slot(settings, &catalog, from).await?;
            core.reconnected(resume);
            resume
        }
    };
    let state = slot_state(&catalog, &of, session_state).await?;
    if checkpoint.is_none() {
        // A checkpoint knows better than our memory, which another instance may have outrun.
        let begun = state.flatten().filter(|state| state.begun);
        let written = begun.map(|state| state.confirmed);
        if let Err(moved) = session_state.check_slot(&of, written, resume) {
            match written {
                Some(written) if catalog.is_accounted_for(target, written, resume).await? => {}
                _ => return Err(moved),
            }
        }
    }
    let now = Instant::now();
    let committer = match checkpoint {
        None => None,
        Some(checkpoint) => {
            let server = ServerState {
                confirmed: resume,
                ..server
            };
            let resume = match checkpoint.resume(&server) {
                Ok(resume) => resume,
                Err(error) => return Err(session_state.doubt(checkpoint, error)),
            };
            if let Some(Phantom { from, to }) = resume.phantom {
                error!(
                    pipeline = settings.name, %from, %to, epoch = resume.epoch,
                    "PostgreSQL failed over to a standby that did not have the last transactions: events between these \
                     positions are in Kafka and never happened in the database"
                );
            }
            Some(TransactionCommitter::open(
                &checkpoint,
                &server,
                &resume,
                core,
                now,
            ))
        }
    };
    // A slot that was re-created stands beyond a consistent point that nothing was delivered up to.
    session_state.snapshot_done |= snapshot.is_none();
    if let Some(why) = settled {
        snapshot::settle(settings, &catalog, resume, why).await;
    }
    let copying = match snapshot {
        Some(snapshot) => Some(snapshot.copy(settings, &catalog, resume, core).await?),
        None => {
            info!(pipeline = settings.name, slot = target.slot, from = %resume, host = link.connection.host, "streaming");
            None
        }
    };

    let (confirms, writer) = match state {
        None => (Confirms::unwritten(), None),
        Some(before) => match catalog.write_slot_state(&of, resume).await {
            Ok(()) => {
                let (confirms, writer) = Confirms::written(of, core.watermark.confirmed(), now);
                (confirms, Some(writer))
            }
            // What is there would be taken for all that was confirmed.
            Err(error) if before.is_some() => return Err(error.into()),
            Err(error) if recovery::of_catalog(&error) == recovery::Remedy::Halt => {
                session_state.warn_unwritten(&of, &error.to_string());
                (Confirms::unwritten(), None)
            }
            Err(error) => return Err(error.into()),
        },
    };
    let mut slot_monitor = JoinSet::new();
    core.watermark.stats().entered(State::Streaming);
    slot_monitor.spawn(monitor_slot(
        database.clone(),
        session_state.watched.clone(),
        catalog,
        link.walsender,
        writer,
    ));
    Ok(Session {
        settings,
        connection: link.connection,
        resume,
        slot_monitor,
        committer,
        confirms,
        told: None,
        told_at: now,
        status_due: now,
        stopping_since: None,
        pace: Pace::new(now),
        copying,
    })
}

/// The checkpoint of a first start, where it is certain that this is one: `walpost init` has made the
/// slot, and nothing was read from it.
async fn first_checkpoint(
    catalog: &impl CatalogQueries,
    of: &SlotOf,
    observed: &Observed,
    identity: &Identity,
    session_state: &mut SessionState,
) -> Result<Option<Checkpoint>, PipelineError> {
    let Some(slot) = &observed.slot else {
        return Ok(None);
    };
    let state = slot_state(catalog, of, session_state).await?.flatten();
    if !state.is_some_and(|state| state.is_untouched(slot.confirmed)) {
        return Ok(None);
    }
    info!(
        pipeline = of.pipeline,
        slot = of.target.slot,
        from = %slot.confirmed,
        "the first start since walpost init has made the slot: nothing of it is in Kafka"
    );
    let server = ServerState {
        system_id: of.system_id.clone(),
        timeline: of.timeline,
        history: Vec::new(),
        slot: of.target.slot.clone(),
        confirmed: slot.confirmed,
        flushed: identity.flushed,
    };
    Ok(Some(Checkpoint::first(1, &server)))
}

/// What was written down of the slot; nothing where that can't be done, which is said once.
async fn slot_state(
    catalog: &impl CatalogQueries,
    of: &SlotOf,
    session_state: &mut SessionState,
) -> Result<Option<Option<SlotState>>, PipelineError> {
    match catalog.slot_state(of).await? {
        FoundState::State(state) => Ok(Some(state)),
        FoundState::Unusable(why) => {
            session_state.warn_unwritten(of, &why);
            Ok(None)
        }
    }
}

/// The error, with who has the walsenders or slots if the server has no more.
async fn with_users(mut error: PipelineError, catalog: &impl CatalogQueries) -> PipelineError {
    if let PipelineError::Connection(error) = &mut error
        && let Some(error) = error.server_mut()
    {
        catalog.name_users(error).await;
    }
    error
}
