//! From the checks of what a pipeline needs to a connection that streams, in phases: each is a type that owns what is
//! known by then, and a method of it leads to the next.
//!
//! ```text
//! Checked ──▶ Connected ──▶ Planned ──▶ SlotTaken ──▶ Session
//! ```

use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tracing::{error, info};

use super::Session;
use super::link::{Link, hold, with_users};
use super::monitor::{monitor_slot, monitor_until_lost};
use super::state::SessionState;
use crate::delivery::checkpoint::{Checkpoint, Phantom, ServerState};
use crate::model::lifecycle::{SnapshotPhase, State};
use crate::model::lsn::Lsn;
use crate::pipeline::confirms::{Confirms, Writer};
use crate::pipeline::database::{CatalogQueries, Database};
use crate::pipeline::decode::Core;
use crate::pipeline::error::PipelineError;
use crate::pipeline::exactly_once::committer::TransactionCommitter;
use crate::pipeline::exactly_once::error::ExactlyOnceError;
use crate::pipeline::order::{Order, drain_ordered};
use crate::pipeline::recovery;
use crate::pipeline::settings::{Delivery, PipelineSettings};
use crate::pipeline::snapshot::error::SnapshotError;
use crate::pipeline::snapshot::pace::Pace;
use crate::pipeline::snapshot::{self, Known, Snapshot};
use crate::pipeline::wal_budget::slot_monitor;
use crate::postgres::catalog::slot_state::{FoundState, SlotOf, SlotState};
use crate::postgres::catalog::{Observed, SlotInUse};
use crate::postgres::replication::Identity;
use crate::sink::Sink;

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
        let resume = link.take_slot(self.settings, catalog, from).await?;
        self.core.reconnected(resume);
        Ok(resume)
    }
}

/// The database has what the pipeline needs, and nobody has the slot.
struct Checked<C> {
    catalog: C,
    observed: Observed,
}

impl<C: CatalogQueries> Checked<C> {
    async fn by<D: Database<Catalog = C>>(
        start: &mut Startup<'_, '_, D>,
    ) -> Result<Self, PipelineError> {
        let (settings, target) = (start.settings, &start.settings.target);
        let catalog = start.database.catalog().await?;
        start.session_state.access.accepted();
        let observed = catalog.look(target).await?;
        if let Some(problem) = observed.problems(target).into_iter().next() {
            let dropped = slot_monitor::dropped_before(settings, &catalog, &problem).await;
            return Err(dropped.map_or_else(|| problem.into(), Into::into));
        }
        settings.check_drop_slot(&observed)?;
        if !start.session_state.has_reminded {
            slot_monitor::remind(settings, &catalog).await?;
            start.session_state.has_reminded = true;
        }
        // As the table is now; rows say again what it was like when they were written.
        settings.check_columns(&observed)?;
        if let Some(pid) = observed.slot.as_ref().and_then(|slot| slot.active_pid) {
            start.session_state.access.granted();
            let slot = target.slot.clone();
            return Err(SlotInUse { slot, pid }.into());
        }
        Ok(Self { catalog, observed })
    }

    /// Opens the connection that will stream. Exactly-once first sees to it that nobody else produces, which takes
    /// Kafka, and finds out what is in it.
    async fn connect<D: Database<Catalog = C>>(
        mut self,
        start: &mut Startup<'_, '_, D>,
        sink: &mut impl Sink,
    ) -> Result<Connected<C>, PipelineError> {
        let settings = start.settings;
        let mut taken = None;
        let found = match &settings.delivery {
            Delivery::AtLeastOnce => None,
            Delivery::ExactlyOnce(checkpoint) => {
                // What the slot has sent says later that nothing is to be copied.
                if !start.session_state.copies
                    && snapshot::has_nothing_to_copy(settings, &self.catalog, &self.observed).await
                {
                    let mut link = start.link(&self.catalog).await?;
                    start.take_slot(&mut link, &self.catalog, Lsn::ZERO).await?;
                    taken = Some(link);
                }
                // Whoever had the slot before can't produce from here on; only then is it known what it has
                // produced.
                let confirmed = start.core.delivery.watermark.confirmed();
                let found = tokio::select! {
                    found = sink.take_over() => found?,
                    // It waits for Kafka, for as long as that is away.
                    error = monitor_until_lost(&mut self.catalog, &start.session_state.watched) => return Err(error.into()),
                    error = hold(&mut taken, confirmed, settings.link_timeout) => return Err(error.into()),
                };
                Some(found.ok_or_else(|| ExactlyOnceError::NoCheckpoint {
                    pipeline: settings.name.clone(),
                    topic: checkpoint.topic.clone(),
                    slot: settings.target.slot.clone(),
                }))
            }
        };
        let mut link = match taken {
            Some(link) => link,
            None => start.link(&self.catalog).await?,
        };
        link.connection.pause();
        let of = start.session_state.note_server(settings, &link.identity);
        let Self { catalog, observed } = self;
        let checkpoint = match found {
            Some(Err(missing)) => {
                let identity = &link.identity;
                let first =
                    first_checkpoint(&catalog, &of, &observed, identity, start.session_state);
                Some(first.await?.ok_or(missing)?)
            }
            found => found.transpose()?,
        };
        Ok(Connected {
            catalog,
            observed,
            link,
            of,
            checkpoint,
        })
    }
}

/// There is a connection that can stream, and of exactly-once it is known what is in Kafka.
struct Connected<C> {
    catalog: C,
    observed: Observed,
    link: Link,
    of: SlotOf,
    checkpoint: Option<Checkpoint>,
}

impl<C: CatalogQueries> Connected<C> {
    /// Decides about rows that are older than the slot, and makes their snapshot.
    async fn plan<D: Database<Catalog = C>>(
        self,
        start: &mut Startup<'_, '_, D>,
    ) -> Result<Planned<C>, PipelineError> {
        let settings = start.settings;
        let identity = &self.link.identity;
        let history = match &self.checkpoint {
            Some(checkpoint) if checkpoint.timeline != identity.timeline => {
                // The first one may stream already.
                let mut beside = start.link(&self.catalog).await?;
                let timeline = identity.timeline;
                beside.connection.timeline_history(timeline).await?
            }
            _ => Vec::new(),
        };
        let server = ServerState {
            system_id: identity.system_id.clone(),
            timeline: identity.timeline,
            history,
            slot: settings.target.slot.clone(),
            confirmed: self.link.resume.unwrap_or_default(),
            flushed: identity.flushed,
        };
        let known = match &self.checkpoint {
            None => None,
            Some(checkpoint) => Some(Known {
                has_delivered: checkpoint.delivered.is_some(),
                copied: checkpoint
                    .copied_on(&server)
                    .map_err(ExactlyOnceError::from)?,
            }),
        };
        // A checkpoint knows better, here too.
        let planned = match start.session_state.snapshot_done && known.is_none() {
            true => snapshot::Planned::Nothing,
            false => {
                let known = known.as_ref();
                snapshot::plan(settings, &self.catalog, &self.observed, known).await?
            }
        };
        start.session_state.copies = matches!(planned, snapshot::Planned::Copy(_));
        if start.session_state.copies && self.link.resume.is_some() {
            // The stream has to begin elsewhere.
            return Err(SnapshotError::Outrun.into());
        }
        let older = match planned {
            snapshot::Planned::Nothing => OlderRows::Nothing,
            snapshot::Planned::Settled(why) => OlderRows::Settled(why),
            snapshot::Planned::Copy(plan) => {
                let stats = start.core.delivery.watermark.stats();
                stats.snapshot_entered(SnapshotPhase::Making, None);
                let catalog = &self.catalog;
                match Snapshot::make(settings, start.database, catalog, identity, plan).await {
                    Ok(snapshot) => OlderRows::Copy(snapshot),
                    Err(SnapshotError::Connection(error)) => {
                        return Err(with_users(error, catalog).await.into());
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
}

/// What becomes of rows that are older than the slot.
enum OlderRows {
    /// They are dealt with, and that is known.
    Nothing,
    /// They are, and that is to be recorded, for this reason.
    Settled(&'static str),
    /// They come first.
    Copy(Snapshot),
}

/// It is known where the stream has to begin.
struct Planned<C> {
    catalog: C,
    link: Link,
    of: SlotOf,
    checkpoint: Option<Checkpoint>,
    server: ServerState,
    older: OlderRows,
}

impl<C: CatalogQueries> Planned<C> {
    /// Starts replication where it has not begun yet, and compares where the slot is with what is known of it.
    async fn take_slot<D: Database<Catalog = C>>(
        mut self,
        start: &mut Startup<'_, '_, D>,
    ) -> Result<SlotTaken<C>, PipelineError> {
        let resume = match self.link.resume {
            Some(resume) => resume,
            None => {
                // The server itself leaves out what the snapshot has.
                let from = match &self.older {
                    OlderRows::Copy(snapshot) => snapshot.stream_from(),
                    OlderRows::Nothing | OlderRows::Settled(_) => Lsn::ZERO,
                };
                start.take_slot(&mut self.link, &self.catalog, from).await?
            }
        };
        let state = slot_state(&self.catalog, &self.of, start.session_state).await?;
        if self.checkpoint.is_none() {
            // A checkpoint knows better than our memory, which another instance may have outrun.
            let begun = state.flatten().filter(|state| state.begun);
            let recorded = begun.map(|state| state.confirmed);
            if let Err(moved) = start.session_state.check_slot(&self.of, recorded, resume) {
                let target = &start.settings.target;
                match recorded {
                    Some(recorded)
                        if self
                            .catalog
                            .is_accounted_for(target, recorded, resume)
                            .await? => {}
                    _ => return Err(moved.into()),
                }
            }
        }
        Ok(SlotTaken {
            catalog: self.catalog,
            link: self.link,
            of: self.of,
            checkpoint: self.checkpoint,
            server: ServerState {
                confirmed: resume,
                ..self.server
            },
            older: self.older,
            state,
        })
    }
}

/// The slot is ours, and nobody else moves it.
struct SlotTaken<C> {
    catalog: C,
    link: Link,
    of: SlotOf,
    checkpoint: Option<Checkpoint>,
    server: ServerState,
    older: OlderRows,
    /// What was recorded of the slot; nothing where that can't be done.
    state: Option<Option<SlotState>>,
}

impl<C: CatalogQueries> SlotTaken<C> {
    /// Begins the copy or the stream.
    async fn stream<'s, D: Database<Catalog = C>>(
        mut self,
        start: Startup<'_, 's, D>,
    ) -> Result<Session<'s>, PipelineError> {
        let Startup {
            settings,
            database,
            core,
            session_state,
        } = start;
        let resume = self.server.confirmed;
        let now = Instant::now();
        let committer = match self.checkpoint.take() {
            None => None,
            Some(checkpoint) => Some(resume_from(
                checkpoint,
                &self.server,
                settings,
                core,
                session_state,
                now,
            )?),
        };
        // A slot that was re-created is beyond a consistent point that nothing was delivered up to.
        session_state.snapshot_done |= !matches!(self.older, OlderRows::Copy(_));
        if let OlderRows::Settled(why) = self.older {
            snapshot::settle(settings, &self.catalog, resume, why).await;
        }
        let copying = match self.older {
            OlderRows::Copy(snapshot) => {
                Some(snapshot.copy(settings, &self.catalog, resume, core).await?)
            }
            OlderRows::Nothing | OlderRows::Settled(_) => {
                let (slot, host) = (&settings.target.slot, &self.link.connection.host);
                info!(pipeline = settings.name, slot, from = %resume, host, "streaming");
                None
            }
        };
        let (confirms, writer) = confirms(
            &self.catalog,
            self.of,
            self.state,
            core,
            session_state,
            resume,
            now,
        )
        .await?;
        let mut slot_monitor = JoinSet::new();
        core.delivery.watermark.stats().entered(State::Streaming);
        slot_monitor.spawn(monitor_slot(
            database.clone(),
            session_state.watched.clone(),
            self.catalog,
            self.link.walsender,
            writer,
        ));
        Ok(Session {
            settings,
            connection: self.link.connection,
            resume,
            slot_monitor,
            committer,
            confirms,
            reported: None,
            reported_at: now,
            status_due: now,
            stopping_since: None,
            pace: Pace::new(now),
            copying,
        })
    }
}

/// Exactly-once goes on from `checkpoint`, if the log of this server does.
fn resume_from(
    checkpoint: Checkpoint,
    server: &ServerState,
    settings: &PipelineSettings,
    core: &mut Core,
    session_state: &mut SessionState,
    now: Instant,
) -> Result<TransactionCommitter, ExactlyOnceError> {
    let resume = match checkpoint.resume(server) {
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
    Ok(TransactionCommitter::open(
        &checkpoint,
        server,
        &resume,
        core,
        now,
    ))
}

/// How what is durable becomes what may be confirmed, and who records it before.
async fn confirms(
    catalog: &impl CatalogQueries,
    of: SlotOf,
    state: Option<Option<SlotState>>,
    core: &mut Core,
    session_state: &mut SessionState,
    resume: Lsn,
    now: Instant,
) -> Result<(Confirms, Option<Writer>), PipelineError> {
    let Some(before) = state else {
        return Ok((Confirms::unrecorded(), None));
    };
    match catalog.write_slot_state(&of, resume).await {
        Ok(()) => {
            let confirmed = core.delivery.watermark.confirmed();
            let (confirms, writer) = Confirms::written(of, confirmed, now);
            Ok((confirms, Some(writer)))
        }
        // What is there would be taken for all that was confirmed.
        Err(error) if before.is_some() => Err(error.into()),
        Err(error) if recovery::of_catalog(&error) == recovery::Remedy::Halt => {
            session_state.warn_unrecorded(&of, &error.to_string());
            Ok((Confirms::unrecorded(), None))
        }
        Err(error) => Err(error.into()),
    }
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
            session_state.warn_unrecorded(of, &why);
            Ok(None)
        }
    }
}
