//! Streaming over one connection: from the checks before it to the last confirm.

use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};
use tracing::{debug, error, info, warn};

use super::access::Access;
use super::confirms::{Confirms, Writer};
use super::decode::{Core, Step};
use super::exactly_once::adaptive_window::Allowance;
use super::exactly_once::committer::{Committed, Ledger};
use super::settings::{Delivery, PipelineSettings};
use super::snapshot::pace::Pace;
use super::snapshot::{self, Copying, Known, Planned, Read, Snapshot, SnapshotError};
use super::wal_budget::slot_monitor;
use super::wal_budget::slot_monitor::Watched;
use super::{Order, PipelineError, drain_ordered, recovery};
use crate::delivery::checkpoint::{Checkpoint, HistoryError, Phantom, Standing};
use crate::delivery::watermark::Confirmed;
use crate::model::let_go::LetGo;
use crate::model::lifecycle::{SnapshotPhase, State};
use crate::model::lsn::Lsn;
use crate::model::time::unix_micros;
use crate::model::vitals::Vitals;
use crate::model::window::Window;
use crate::postgres::catalog::journal::Entry;
use crate::postgres::catalog::let_go::Outcome;
use crate::postgres::catalog::slot_state::{FoundState, SlotOf, SlotState};
use crate::postgres::catalog::{Catalog, CatalogError, KeyColumn, Observed, Past, Problem, Said};
use crate::postgres::connect::conninfo::Conninfo;
use crate::postgres::connect::dial::ServerError;
use crate::postgres::replication::{Connection, ConnectionError, Identity};
use crate::postgres::table::TableName;
use crate::postgres::target::{Outbox, Target};
use crate::sink::{Preparation, Sink, SinkError};

/// A confirmed LSN that has risen is told at most this often: it bounds what a crash repeats.
const CONFIRM: Duration = Duration::from_millis(100);
/// The server hears from us at least this often.
const STATUS_MAX: Duration = Duration::from_secs(10);
/// How often the database is asked how the slot is, for whoever watches.
pub(super) const VITALS: Duration = Duration::from_secs(5);
/// The publication is looked at while streaming every so many times.
const PUBLICATION: u32 = 6;
/// With more records in flight than this, others have company anyway: times are busy.
const COMPANY: u64 = 100;
const REOPEN: Duration = Duration::from_secs(1);
/// So long the connection that confirmed LSNs are written down with may be away.
const UNWRITTEN: Duration = Duration::from_secs(10);
/// How long the last status update may take to be sent.
const LAST_WORD: Duration = Duration::from_secs(2);
/// While a Kafka transaction is committed, or a topic is created, nothing can be produced, but the log is read on:
/// this much is kept meanwhile.
const READ_AHEAD: usize = 4 << 20;
/// A server that shuts down waits for what it has sent to be confirmed. This long it may wait.
const LAST_CONFIRM: Duration = Duration::from_secs(2);

/// The database, as a session needs it.
pub(crate) trait Database: Clone + Send + Sync + 'static {
    /// A connection for questions.
    type Catalog: Look;

    /// Opens one.
    fn catalog(&self) -> impl Future<Output = Result<Self::Catalog, CatalogError>> + Send;

    /// Opens a connection for replication; see [`Connection::open`].
    fn connect(
        &self,
        link_timeout: Duration,
        row_bytes_max: usize,
    ) -> impl Future<Output = Result<Connection, ConnectionError>> + Send;
}

/// A connection for questions.
pub(crate) trait Look: Send + Sync + 'static {
    /// Asks for everything that `target` names.
    fn look(&self, target: &Target) -> impl Future<Output = Result<Observed, CatalogError>> + Send;

    /// Asks how its slot is, and what the pipeline has let go.
    fn vitals(
        &self,
        pipeline: &str,
        target: &Target,
    ) -> impl Future<Output = Result<Vitals, CatalogError>> + Send;

    /// What was let go of the pipeline and not replayed.
    fn let_go(
        &self,
        pipeline: &str,
        target: &Target,
    ) -> impl Future<Output = Result<Vec<LetGo>, CatalogError>> + Send;

    /// Lets go of its slot, if that keeps more than `max_bytes` of the log; `copies` says whether rows
    /// are delivered that are older.
    fn let_slot_go(
        &self,
        pipeline: &str,
        target: &Target,
        max_bytes: u64,
        copies: bool,
    ) -> impl Future<Output = Result<Outcome, CatalogError>> + Send;

    /// What is known of a pipeline's past.
    fn past(
        &self,
        pipeline: &str,
        target: &Target,
        table: &TableName,
    ) -> impl Future<Output = Result<Past, CatalogError>> + Send;

    /// What the journal says of its snapshot.
    fn said_of_snapshot(
        &self,
        pipeline: &str,
        target: &Target,
    ) -> impl Future<Output = Result<Said, CatalogError>> + Send;

    /// The columns by which a table's rows are put in order.
    fn order(
        &self,
        table: &TableName,
    ) -> impl Future<Output = Result<Vec<KeyColumn>, CatalogError>> + Send;

    /// Adds an entry to the journal.
    fn write_journal(
        &self,
        entry: &Entry<'_>,
    ) -> impl Future<Output = Result<(), CatalogError>> + Send;

    /// What was written down of its slot.
    fn slot_state(
        &self,
        of: &SlotOf,
    ) -> impl Future<Output = Result<FoundState, CatalogError>> + Send;

    /// Writes down that nothing beyond `confirmed` is confirmed.
    fn write_slot_state(
        &self,
        of: &SlotOf,
        confirmed: Lsn,
    ) -> impl Future<Output = Result<(), CatalogError>> + Send;

    /// The journal says why the slot is at `found`, beyond `confirmed`.
    fn is_accounted_for(
        &self,
        target: &Target,
        confirmed: Lsn,
        found: Lsn,
    ) -> impl Future<Output = Result<bool, CatalogError>> + Send;

    /// Says of an error that the server gives for want of walsenders or slots who has them.
    fn name_users(&self, error: &mut ServerError) -> impl Future<Output = ()> + Send;

    /// Resolves when the connection has ended.
    fn closed(&mut self) -> impl Future<Output = ()> + Send;
}

impl Database for Conninfo {
    type Catalog = Catalog;

    async fn catalog(&self) -> Result<Catalog, CatalogError> {
        Catalog::open(self).await
    }

    async fn connect(
        &self,
        link_timeout: Duration,
        row_bytes_max: usize,
    ) -> Result<Connection, ConnectionError> {
        Connection::open(self, link_timeout, row_bytes_max).await
    }
}

impl Look for Catalog {
    async fn look(&self, target: &Target) -> Result<Observed, CatalogError> {
        Catalog::look(self, target).await
    }

    async fn vitals(&self, pipeline: &str, target: &Target) -> Result<Vitals, CatalogError> {
        Catalog::vitals(self, pipeline, target).await
    }

    async fn let_go(&self, pipeline: &str, target: &Target) -> Result<Vec<LetGo>, CatalogError> {
        Catalog::let_go(self, pipeline, target).await
    }

    async fn let_slot_go(
        &self,
        pipeline: &str,
        target: &Target,
        max_bytes: u64,
        copies: bool,
    ) -> Result<Outcome, CatalogError> {
        Catalog::let_slot_go(self, pipeline, target, max_bytes, copies).await
    }

    async fn past(
        &self,
        pipeline: &str,
        target: &Target,
        table: &TableName,
    ) -> Result<Past, CatalogError> {
        Catalog::past(self, pipeline, target, table).await
    }

    async fn said_of_snapshot(
        &self,
        pipeline: &str,
        target: &Target,
    ) -> Result<Said, CatalogError> {
        Catalog::said_of_snapshot(self, pipeline, target).await
    }

    async fn order(&self, table: &TableName) -> Result<Vec<KeyColumn>, CatalogError> {
        Catalog::order(self, table).await
    }

    async fn write_journal(&self, entry: &Entry<'_>) -> Result<(), CatalogError> {
        Catalog::write_journal(self, entry).await.map(drop)
    }

    async fn slot_state(&self, of: &SlotOf) -> Result<FoundState, CatalogError> {
        Catalog::slot_state(self, of).await
    }

    async fn write_slot_state(&self, of: &SlotOf, confirmed: Lsn) -> Result<(), CatalogError> {
        Catalog::write_slot_state(self, of, confirmed).await
    }

    async fn is_accounted_for(
        &self,
        target: &Target,
        confirmed: Lsn,
        found: Lsn,
    ) -> Result<bool, CatalogError> {
        Catalog::is_accounted_for(self, target, confirmed, found).await
    }

    async fn name_users(&self, error: &mut ServerError) {
        Catalog::name_users(self, error).await;
    }

    async fn closed(&mut self) {
        Catalog::closed(self).await;
    }
}

/// What a pipeline remembers from one connection to the next, to notice another history.
pub(super) struct Memory {
    system_id: Option<String>,
    timeline: u32,
    confirmed: Option<Confirmed>,
    another_owner: bool,
    /// A checkpoint that did not fit the slot.
    doubted: Option<Checkpoint>,
    /// Rows that are older than the slot are dealt with.
    snapshot_done: bool,
    /// Some were to be copied at the last start.
    copies: bool,
    /// What was let go was said.
    has_reminded: bool,
    /// It was said that what is confirmed is not written down.
    has_warned_unwritten: bool,
    /// Exactly-once: what may be in flight.
    allowance: Allowance,
    /// Whether PostgreSQL accepts who we are.
    pub(super) access: Access,
    watched: Watched,
}

impl Memory {
    /// Of a pipeline that has just begun.
    pub(super) fn new(window: Window, watched: Watched) -> Self {
        Self {
            system_id: None,
            timeline: 0,
            confirmed: None,
            another_owner: false,
            doubted: None,
            snapshot_done: false,
            copies: false,
            has_reminded: false,
            has_warned_unwritten: false,
            allowance: Allowance::new(window),
            access: Access::default(),
            watched,
        }
    }

    /// What the lookout looks at.
    pub(super) fn watched(&self) -> &Watched {
        &self.watched
    }

    /// What may be in flight.
    pub(super) fn window(&self) -> Window {
        self.allowance.window()
    }

    /// Exactly-once: a transaction was given up with that much in flight.
    pub(super) fn gave_up(&mut self, in_flight: Window) {
        self.allowance.gave_up(in_flight);
    }

    /// What was told to PostgreSQL last.
    pub(super) fn confirmed(&self) -> Option<Confirmed> {
        self.confirmed
    }

    /// Another process had the slot, and may rightly have moved it.
    pub(super) fn note_another_owner(&mut self) {
        self.another_owner = true;
    }

    /// `checkpoint` does not fit the slot. It was read before the slot was ours, and another
    /// instance may have moved both since: only if it is the same still, that is how it is.
    fn doubt(&mut self, checkpoint: Checkpoint, error: HistoryError) -> PipelineError {
        if self.doubted.as_ref() == Some(&checkpoint) {
            return PipelineError::History(error);
        }
        self.doubted = Some(checkpoint);
        PipelineError::Outrun(error)
    }

    /// A server of another cluster has not what was read so far, and its LSNs mean something else.
    fn check_cluster(&self, found: &Identity) -> Result<(), PipelineError> {
        match &self.system_id {
            Some(expected) if *expected != found.system_id => Err(PipelineError::OtherCluster {
                found: found.system_id.clone(),
                expected: expected.clone(),
            }),
            _ => Ok(()),
        }
    }

    fn warn_unwritten(&mut self, of: &SlotOf, why: &str) {
        if !std::mem::replace(&mut self.has_warned_unwritten, true) {
            warn!(
                pipeline = of.pipeline,
                slot = of.target.slot,
                "what is confirmed can't be recorded, so a slot that somebody moves or re-creates while another \
                 process has it, or none, goes unnoticed: {why}"
            );
        }
    }

    /// `written` is what was written down of the slot. Whoever has had it meanwhile has written that too;
    /// without it, another owner may rightly have moved it.
    fn check_slot(
        &mut self,
        of: &SlotOf,
        written: Option<Lsn>,
        found: Lsn,
    ) -> Result<(), PipelineError> {
        let another_owner = std::mem::take(&mut self.another_owner);
        let ours = self.confirmed.map(Confirmed::lsn);
        match written.or(ours.filter(|_| !another_owner)) {
            Some(confirmed) if found > confirmed => Err(PipelineError::SlotMoved {
                slot: of.target.slot.clone(),
                found,
                confirmed,
                resend: of.target.outbox.resend(),
                then: match written {
                    Some(_) => format!(
                        "then say that this is known: walpost skip --pipeline {} --to {found}; and start walpost",
                        of.pipeline
                    ),
                    None => "then restart walpost".to_owned(),
                },
            }),
            _ => Ok(()),
        }
    }
}

/// A connection that streams.
pub(super) struct Session<'s> {
    settings: &'s PipelineSettings,
    connection: Connection,
    resume: Lsn,
    /// Looks at the database from the side; ended with the session.
    lookout: JoinSet<Sighting>,
    confirms: Confirms,
    told: Option<Confirmed>,
    told_at: Instant,
    status_due: Instant,
    stopping_since: Option<Instant>,
    pace: Pace,
    /// Rows that come before the stream, until they are durable.
    copying: Option<Copying>,
    /// Exactly-once.
    ledger: Option<Ledger>,
}

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
        catalog: &impl Look,
        memory: &mut Memory,
    ) -> Result<Self, PipelineError> {
        let (limit, row_bytes) = (settings.link_timeout, settings.row_bytes_max);
        let mut connection = match database.connect(limit, row_bytes).await {
            Ok(connection) => connection,
            Err(error) => return Err(with_users(error.into(), catalog).await),
        };
        memory.access.granted();
        let identity = connection.identify().await?;
        memory.check_cluster(&identity)?;
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
        catalog: &impl Look,
        from: Lsn,
    ) -> Result<Lsn, PipelineError> {
        let target = &settings.target;
        let messages = matches!(target.outbox, Outbox::Log { .. });
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

/// The server hears from us that often.
fn status_pause(link_timeout: Duration) -> Duration {
    STATUS_MAX.min(link_timeout / 3)
}

/// What the stream waits for before it goes on with the next frame.
enum Wait {
    Nothing,
    Room,
    Topic(String, Preparation),
}

/// Checks what the pipeline needs, connects, and starts replication. Nothing if told to drain
/// meanwhile.
pub(super) async fn open<'s>(
    settings: &'s PipelineSettings,
    database: &impl Database,
    core: &mut Core,
    sink: &mut impl Sink,
    memory: &mut Memory,
    orders: &mut watch::Receiver<Order>,
) -> Result<Option<Session<'s>>, PipelineError> {
    tokio::select! {
        biased;
        () = drain_ordered(orders) => Ok(None),
        session = start(settings, database, core, sink, memory) => session.map(Some),
    }
}

async fn start<'s>(
    settings: &'s PipelineSettings,
    database: &impl Database,
    core: &mut Core,
    sink: &mut impl Sink,
    memory: &mut Memory,
) -> Result<Session<'s>, PipelineError> {
    let target = &settings.target;
    let mut catalog = database.catalog().await?;
    memory.access.accepted();
    let observed = catalog.look(target).await?;
    if let Some(problem) = observed.problems(target).into_iter().next() {
        return Err(slot_monitor::explain(settings, &catalog, problem).await);
    }
    settings.check_let_go(&observed)?;
    if !memory.has_reminded {
        slot_monitor::remind(settings, &catalog).await?;
        memory.has_reminded = true;
    }
    // As the table is now; rows say again what it was like when they were written.
    settings.check_columns(&observed)?;
    if let Some(pid) = observed.slot.as_ref().and_then(|slot| slot.active_pid) {
        memory.access.granted();
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
            if !memory.copies && snapshot::has_nothing_to_copy(settings, &catalog, &observed).await
            {
                let mut open = Link::open(settings, database, &catalog, memory).await?;
                let resume = open.take_slot(settings, &catalog, Lsn::ZERO).await?;
                core.reconnected(resume);
                link = Some(open);
            }
            // Whoever had the slot before can't produce from here on; only then is it known what it has
            // produced.
            let found = tokio::select! {
                found = sink.take_over() => found?,
                // It waits for Kafka, for as long as that is away.
                error = ask_for_ever(&mut catalog, &memory.watched) => return Err(error),
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
        None => Link::open(settings, database, &catalog, memory).await?,
    };
    link.connection.pause();
    let identity = link.identity.clone();
    if memory.system_id.is_some() && memory.timeline != identity.timeline {
        let (from, to) = (memory.timeline, identity.timeline);
        warn!(
            pipeline = settings.name,
            from, to, "PostgreSQL has a new timeline: a standby was promoted"
        );
    }
    memory.system_id = Some(identity.system_id.clone());
    memory.timeline = identity.timeline;
    let of = SlotOf {
        pipeline: settings.name.clone(),
        target: target.clone(),
        system_id: identity.system_id.clone(),
        timeline: identity.timeline,
    };
    let checkpoint = match checkpoint {
        Some(Err(missing)) => {
            let first = first_checkpoint(&catalog, &of, &observed, &identity, memory).await?;
            Some(first.ok_or(missing)?)
        }
        found => found.transpose()?,
    };
    let history = match &checkpoint {
        Some(checkpoint) if checkpoint.timeline != identity.timeline => {
            // The first one may stream already.
            let mut beside = Link::open(settings, database, &catalog, memory).await?;
            let timeline = identity.timeline;
            beside.connection.timeline_history(timeline).await?
        }
        _ => Vec::new(),
    };

    let standing = Standing {
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
            copied: checkpoint.copied_on(&standing)?,
        }),
    };
    // A checkpoint knows better, here too.
    let planned = match memory.snapshot_done && known.is_none() {
        true => Planned::Nothing,
        false => snapshot::plan(settings, &catalog, &observed, known.as_ref()).await?,
    };
    let (plan, settled) = match planned {
        Planned::Nothing => (None, None),
        Planned::Settled(why) => (None, Some(why)),
        Planned::Copy(plan) => (Some(plan), None),
    };
    memory.copies = plan.is_some();
    if memory.copies && link.resume.is_some() {
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
    let state = slot_state(&catalog, &of, memory).await?;
    if checkpoint.is_none() {
        // A checkpoint knows better than our memory, which another instance may have outrun.
        let begun = state.flatten().filter(|state| state.begun);
        let written = begun.map(|state| state.confirmed);
        if let Err(moved) = memory.check_slot(&of, written, resume) {
            match written {
                Some(written) if catalog.is_accounted_for(target, written, resume).await? => {}
                _ => return Err(moved),
            }
        }
    }
    let now = Instant::now();
    let ledger = match checkpoint {
        None => None,
        Some(checkpoint) => {
            let standing = Standing {
                confirmed: resume,
                ..standing
            };
            let resume = match checkpoint.resume(&standing) {
                Ok(resume) => resume,
                Err(error) => return Err(memory.doubt(checkpoint, error)),
            };
            if let Some(Phantom { from, to }) = resume.phantom {
                error!(
                    pipeline = settings.name, %from, %to, epoch = resume.epoch,
                    "PostgreSQL failed over to a standby that did not have the last transactions: events between these \
                     positions are in Kafka and never happened in the database"
                );
            }
            Some(Ledger::open(&checkpoint, &standing, &resume, core, now))
        }
    };
    // A slot that was made anew stands beyond a border that nothing was delivered up to.
    memory.snapshot_done |= snapshot.is_none();
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
                memory.warn_unwritten(&of, &error.to_string());
                (Confirms::unwritten(), None)
            }
            Err(error) => return Err(error.into()),
        },
    };
    let mut lookout = JoinSet::new();
    core.watermark.stats().entered(State::Streaming);
    lookout.spawn(look_out(
        database.clone(),
        memory.watched.clone(),
        catalog,
        link.walsender,
        writer,
    ));
    Ok(Session {
        settings,
        connection: link.connection,
        resume,
        lookout,
        ledger,
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
    catalog: &impl Look,
    of: &SlotOf,
    observed: &Observed,
    identity: &Identity,
    memory: &mut Memory,
) -> Result<Option<Checkpoint>, PipelineError> {
    let Some(slot) = &observed.slot else {
        return Ok(None);
    };
    let state = slot_state(catalog, of, memory).await?.flatten();
    if !state.is_some_and(|state| state.is_untouched(slot.confirmed)) {
        return Ok(None);
    }
    info!(
        pipeline = of.pipeline,
        slot = of.target.slot,
        from = %slot.confirmed,
        "the first start since walpost init has made the slot: nothing of it is in Kafka"
    );
    let standing = Standing {
        system_id: of.system_id.clone(),
        timeline: of.timeline,
        history: Vec::new(),
        slot: of.target.slot.clone(),
        confirmed: slot.confirmed,
        flushed: identity.flushed,
    };
    Ok(Some(Checkpoint::first(1, &standing)))
}

/// What was written down of the slot; nothing where that can't be done, which is said once.
async fn slot_state(
    catalog: &impl Look,
    of: &SlotOf,
    memory: &mut Memory,
) -> Result<Option<Option<SlotState>>, PipelineError> {
    match catalog.slot_state(of).await? {
        FoundState::State(state) => Ok(Some(state)),
        FoundState::Unusable(why) => {
            memory.warn_unwritten(of, &why);
            Ok(None)
        }
    }
}

/// The error, with who has the walsenders or slots if the server has no more.
async fn with_users(mut error: PipelineError, catalog: &impl Look) -> PipelineError {
    if let PipelineError::Connection(error) = &mut error
        && let Some(error) = error.server_mut()
    {
        catalog.name_users(error).await;
    }
    error
}

/// What can be seen of the database from beside the stream.
enum Sighting {
    /// The publication would leave rows out.
    Problem(Problem),
    /// The server ends its sessions and takes no new ones.
    Stopping,
    /// Nothing can be written down, for this reason.
    Unwritten(String),
    /// The slot keeps more of the log than it may, and is to be let go.
    OverBudget,
}

/// Asks how the slot is every few seconds, until it is to be let go or nobody answers.
async fn ask_for_ever(catalog: &mut impl Look, watched: &Watched) -> PipelineError {
    loop {
        match watched.ask(&*catalog).await {
            Ok(true) => return watched.over(),
            Ok(false) => {}
            Err(error @ CatalogError::Lost(_)) => return error.into(),
            Err(error) => debug!(%error, "catalog query failed"),
        }
        // A server that stops waits for whoever has a slot, and ends this connection first.
        let _ = timeout(VITALS, catalog.closed()).await;
    }
}

/// Asks how the slot is, and resolves when there is something to be seen. Has what may be confirmed
/// written down beside that.
///
/// PostgreSQL 18 says in the stream that it leaves rows out for want of the publication, and that
/// halts the pipeline by itself; looking at the catalog is the second line. That a server is
/// shutting down can't be heard in the stream while nothing is read from it, with Kafka down.
async fn look_out<D: Database>(
    database: D,
    watched: Watched,
    mut catalog: D::Catalog,
    walsender: i32,
    mut writer: Option<Writer>,
) -> Sighting {
    let target = &watched.target;
    for turn in 1_u32.. {
        match watched.ask(&catalog).await {
            Ok(true) => return Sighting::OverBudget,
            Ok(false) => {}
            Err(error) => debug!(%error, "catalog query failed"),
        }
        let reopen = timeout(VITALS, closed(&mut catalog, &mut writer))
            .await
            .is_ok();
        if !reopen && !turn.is_multiple_of(PUBLICATION) {
            continue;
        }
        let since = Instant::now();
        let looked = loop {
            if !reopen {
                break catalog.look(target).await;
            }
            let reason = match reopened(&database, target, walsender).await {
                Ok((open, observed)) => {
                    catalog = open;
                    break Ok(observed);
                }
                Err(PipelineError::Catalog(CatalogError::Dial(error)))
                    if recovery::is_stopping(&error) =>
                {
                    return Sighting::Stopping;
                }
                Err(error) => error.to_string(),
            };
            debug!(reason, "catalog query failed");
            if writer.is_some() && since.elapsed() > UNWRITTEN {
                return Sighting::Unwritten(reason);
            }
            sleep(REOPEN).await;
        };
        match looked {
            Ok(observed) => {
                if let Some(problem) = observed.publication_problem(target) {
                    return Sighting::Problem(problem);
                }
            }
            Err(error) => debug!(%error, "catalog query failed"),
        }
    }
    std::future::pending().await
}

/// A new connection for questions, to the server that streams: its address can lead to another one by now.
async fn reopened<D: Database>(
    database: &D,
    target: &Target,
    walsender: i32,
) -> Result<(D::Catalog, Observed), PipelineError> {
    let catalog = database.catalog().await?;
    let observed = catalog.look(target).await?;
    let pid = observed.slot.as_ref().and_then(|slot| slot.active_pid);
    match pid == Some(walsender) {
        true => Ok((catalog, observed)),
        false => Err(PipelineError::two_servers(target, walsender, pid)),
    }
}

/// Resolves when the connection has ended; until then, writes down what may be confirmed.
async fn closed(catalog: &mut impl Look, writer: &mut Option<Writer>) {
    let Some(writer) = writer else {
        return catalog.closed().await;
    };
    loop {
        let wanted = tokio::select! {
            biased;
            () = catalog.closed() => return,
            wanted = writer.wanted() => wanted,
        };
        match catalog.write_slot_state(&writer.of, wanted).await {
            Ok(()) => writer.has_written(wanted),
            Err(CatalogError::Lost(_)) => return catalog.closed().await,
            Err(error) => {
                if writer.has_failed(Instant::now()) {
                    warn!(
                        pipeline = writer.of.pipeline, %error,
                        "what is delivered can't be recorded in walpost.slot_state, and is not confirmed before it is"
                    );
                }
                sleep(REOPEN).await;
            }
        }
    }
}

impl Session<'_> {
    /// Streams until told to drain: then goes on to the end of a transaction that is open, so that
    /// none is sent twice without need. Gives the time by which the drain has to be over.
    ///
    /// # Errors
    /// Whatever keeps the stream from going on.
    pub(super) async fn stream(
        &mut self,
        database: &impl Database,
        core: &mut Core,
        sink: &mut impl Sink,
        memory: &mut Memory,
        orders: &mut watch::Receiver<Order>,
    ) -> Result<Instant, PipelineError> {
        let deliveries = core.watermark.deliveries();
        let mut wait = Wait::Nothing;
        let mut drain_until: Option<Instant> = None;
        loop {
            let takes = matches!(wait, Wait::Nothing) && !self.is_committing();
            if takes
                && drain_until.is_none()
                && let Some(suspects) = core.passed()
            {
                return Err(PipelineError::Passed {
                    from: *suspects.start(),
                    until: *suspects.end(),
                });
            }
            if takes {
                core.watermark.tick(unix_micros());
                wait = match self.is_copying() {
                    true => self.rows(core, sink)?,
                    false => self.frames(core, sink, drain_until.is_some())?,
                };
            }
            let many = core.watermark.in_flight().records > COMPANY;
            let busy = many || self.pace.is_fast(Instant::now());
            if takes {
                sink.flush(busy)?;
            }
            let has_room = self.connection.unread() < READ_AHEAD;
            let reads = matches!(wait, Wait::Nothing) && (!self.is_committing() || has_room);
            // While rows are copied the stream is not gone on with, but heard, for it tells whether
            // the server is there. While a topic is created, the next ones that are missing may come.
            let copies = self.is_copying();
            let hears = match copies || matches!(wait, Wait::Topic(..)) {
                true => has_room,
                false => reads,
            };
            if !hears {
                self.connection.pause();
            }
            if deliveries.failed()
                && let Some(failure) = deliveries.failure()
            {
                return Err(PipelineError::Delivery(failure));
            }
            let now = Instant::now();
            if let Some(until) = drain_until
                && (now >= until || copies || !core.is_open())
            {
                return Ok(until);
            }
            let has_more = !matches!(wait, Wait::Nothing);
            let (confirmed, mut next) = self.keep_in_touch(core, memory, now, has_more).await?;
            let waits = has_more || self.is_committing() || core.watermark.in_flight().records > 0;
            let stats = core.watermark.stats();
            stats.progressed(&core.watermark.progress(confirmed, waits));
            stats.received_bytes(self.connection.take_received());
            self.end_copy(core, database, memory).await;
            sink.tend();
            // Behind a row that waits for its topic there are more, maybe with a topic each.
            let more_to_come = busy || matches!(wait, Wait::Topic(..));
            if let Some(ledger) = &mut self.ledger
                && let Some(due) = ledger.tend(core, sink, now, more_to_come)
            {
                next = next.min(due);
            }
            let drained = drain_until.unwrap_or(next).min(next);
            if let Some(pause) = self.pace.pause(now) {
                // The runtime's timer counts in milliseconds, and the thread is this pipeline's own.
                std::thread::sleep(pause);
            }
            tokio::select! {
                biased;
                () = drain_ordered(orders), if drain_until.is_none() => {
                    info!(pipeline = self.settings.name, in_flight = core.watermark.in_flight().records, "draining");
                    core.watermark.stats().entered(State::Draining);
                    drain_until = Some(Instant::now() + self.settings.drain_timeout);
                }
                Some(Ok(sighting)) = self.lookout.join_next(), if !self.lookout.is_empty() => {
                    match sighting {
                        Sighting::Problem(problem) => return Err(problem.into()),
                        Sighting::Stopping => self.stopping_since = Some(Instant::now()),
                        Sighting::Unwritten(reason) => {
                            return Err(PipelineError::Unwritten {
                                slot: self.settings.target.slot.clone(),
                                lasts: UNWRITTEN,
                                reason,
                            });
                        }
                        // Not while it drains: what is in flight may be all that there is.
                        Sighting::OverBudget if drain_until.is_none() => {
                            return Err(memory.watched.over());
                        }
                        Sighting::OverBudget => {}
                    }
                }
                committed = committed(&mut self.ledger) => {
                    let committed = committed?;
                    core.watermark.checkpointed(committed.safe);
                    memory.allowance.committed(committed.in_flight, committed.took);
                    core.watermark.allow(memory.allowance.window());
                }
                () = core.watermark.room(), if matches!(wait, Wait::Room) => wait = Wait::Nothing,
                prepared = wait.topic() => {
                    let (topic, partitions) = prepared?;
                    sink.prepared(topic, partitions)?;
                    wait = Wait::Nothing;
                }
                () = self.confirms.changed() => {}
                filled = snapshot::fill(&mut self.copying), if copies && reads => filled?,
                filled = self.connection.fill(), if hears => {
                    filled?;
                    sink.read_more();
                }
                () = sleep_until(drained) => {}
            }
        }
    }

    /// Takes the frames that have come, until there are no more or the sink wants to be waited for.
    fn frames(
        &mut self,
        core: &mut Core,
        sink: &mut impl Sink,
        draining: bool,
    ) -> Result<Wait, PipelineError> {
        while !draining || core.is_open() {
            let frame = self.connection.peek().map_err(|error| core.unread(error))?;
            let Some(frame) = frame else { break };
            match core.frame(&frame, sink)? {
                Step::Done => {}
                Step::Answer => {
                    self.status_due = Instant::now();
                    if let Some(ledger) = &mut self.ledger {
                        ledger.ask();
                    }
                }
                Step::Full => return Ok(Wait::Room),
                Step::NewTopic(topic) => {
                    let ahead = || core.topics_ahead(self.connection.buffered());
                    let preparation = sink.prepare(&topic, ahead);
                    return Ok(Wait::Topic(topic, preparation));
                }
            }
            self.connection.consume();
            self.pace.frame();
        }
        Ok(Wait::Nothing)
    }

    /// Rows are copied, and the stream waits for them.
    fn is_copying(&self) -> bool {
        self.copying.as_ref().is_some_and(Copying::reads)
    }

    /// Takes the rows that have come, as [`Session::frames`] takes frames.
    fn rows(&mut self, core: &mut Core, sink: &mut impl Sink) -> Result<Wait, PipelineError> {
        let Some(copying) = &mut self.copying else {
            return Ok(Wait::Nothing);
        };
        loop {
            match copying.row(core, sink)? {
                Read::Row => self.pace.frame(),
                Read::Nothing => return Ok(Wait::Nothing),
                Read::End => {
                    let (slot, host) = (&self.settings.target.slot, &self.connection.host);
                    info!(pipeline = self.settings.name, slot, from = %core.watermark.received(), host, "streaming");
                    // The stream was read meanwhile.
                    sink.read_more();
                    return Ok(Wait::Nothing);
                }
                Read::Full => return Ok(Wait::Room),
                Read::NewTopic(topic) => {
                    let preparation = sink.prepare(&topic, || copying.topics_ahead(core));
                    return Ok(Wait::Topic(topic, preparation));
                }
            }
        }
    }

    /// Notes that the copy is durable, once it is.
    async fn end_copy(&mut self, core: &Core, database: &impl Database, memory: &mut Memory) {
        if let (Some(copying), Some(told)) = (&self.copying, self.told)
            && copying.is_durable(told.lsn())
        {
            memory.snapshot_done = true;
            let stats = core.watermark.stats();
            stats.snapshot_entered(SnapshotPhase::Done, None);
            copying.note(self.settings, database).await;
            self.copying = None;
        }
    }

    /// Confirms what is due, and says what may be confirmed and when to come back for it. Finds a dead link, and lets go of a
    /// server that shuts down. There is more that waits for Kafka if it `has_more` than what is in flight.
    async fn keep_in_touch(
        &mut self,
        core: &mut Core,
        memory: &mut Memory,
        now: Instant,
        has_more: bool,
    ) -> Result<(Confirmed, Instant), PipelineError> {
        let limit = self.settings.link_timeout;
        if now.duration_since(self.connection.last_heard()) > limit {
            return Err(ConnectionError::Silent(limit).into());
        }
        let durable = core.watermark.confirmed();
        let in_flight = core.watermark.in_flight().records > 0;
        let (carried, copies) = (core.watermark.carried(), self.copying.is_some());
        let events = |written| copies || carried > written;
        let (confirmed, worth) = self.confirms.may(durable, events, now);
        if (in_flight || has_more || confirmed < durable)
            && self.stopping_since.is_some_and(|since| {
                // A server that stops takes nothing more to be written.
                now >= since + LAST_CONFIRM || self.confirms.are_over()
            })
        {
            return Err(PipelineError::ServerStopping);
        }
        let risen = self.told != Some(confirmed);
        if now >= self.status_due || (risen && now >= self.told_at + CONFIRM) {
            let status = status_pause(limit);
            // Frequent status updates keep the server from asking us, so we ask it.
            let ask = now.duration_since(self.connection.last_heard()) >= status;
            self.connection.confirm(confirmed, ask, limit).await?;
            memory.confirmed = Some(confirmed);
            self.told = Some(confirmed);
            self.told_at = now;
            self.status_due = now + status;
        }
        let next = if self.told != Some(confirmed) {
            self.told_at + CONFIRM
        } else if in_flight {
            now + CONFIRM
        } else {
            self.status_due
        };
        let next = worth.map_or(next, |worth| next.min(worth));
        Ok((confirmed, next.min(self.status_due)))
    }

    /// A Kafka transaction is being committed.
    fn is_committing(&self) -> bool {
        self.ledger.as_ref().is_some_and(Ledger::is_committing)
    }

    /// Waits for what is in flight, but not beyond `until`; confirms what is durable and closes.
    pub(super) async fn end(
        mut self,
        core: &mut Core,
        sink: &mut impl Sink,
        memory: &mut Memory,
        until: Instant,
    ) {
        let pipeline = &self.settings.name;
        let settled = timeout_at(until, settle(self.ledger.as_mut(), core, sink)).await;
        if let Ok(Err(error)) = &settled {
            warn!(pipeline, %error, "the last Kafka transaction was not committed");
        }
        let left = core.watermark.in_flight().records;
        if core.watermark.deliveries().failed() {
            warn!(
                pipeline,
                left,
                "not all records were delivered: Kafka has refused one. They will be sent again at the next start"
            );
        } else if settled.is_err() {
            let limit = self.settings.drain_timeout;
            warn!(
                pipeline,
                left,
                ?limit,
                "not all records were acknowledged in time; they will be sent again at the next start"
            );
        }
        let durable = core.watermark.confirmed();
        let last = timeout(LAST_WORD, self.confirms.last(durable)).await;
        let confirmed = last.unwrap_or_else(|_| self.confirms.now(durable));
        let stats = core.watermark.stats();
        stats.progressed(&core.watermark.progress(confirmed, false));
        memory.confirmed = Some(confirmed);
        let told = self.connection.confirm(confirmed, false, LAST_WORD).await;
        let closed = match told {
            Ok(()) => self.connection.close().await,
            Err(error) => Err(error),
        };
        if let Err(error) = closed {
            warn!(pipeline, %error, "the connection did not close in order; the last records may be sent again");
        }
    }

    /// Keeps the connection, and with it the slot, until `ready` resolves or the connection has to
    /// be let go. Reads and confirms nothing more.
    pub(super) async fn hold(&mut self, ready: impl Future<Output = ()>) {
        let Some(told) = self.told else { return };
        let limit = self.settings.link_timeout;
        let held = async {
            loop {
                sleep_until(self.status_due).await;
                if self.connection.confirm(told, false, limit).await.is_err() {
                    return;
                }
                self.status_due = Instant::now() + status_pause(limit);
            }
        };
        let released = async {
            while let Some(sighting) = self.lookout.join_next().await {
                if matches!(
                    sighting,
                    Ok(Sighting::Stopping | Sighting::Unwritten(_) | Sighting::OverBudget)
                ) {
                    return;
                }
            }
            std::future::pending().await
        };
        tokio::select! {
            () = ready => {}
            () = held => {}
            () = released => {}
        }
    }

    /// Something was confirmed beyond where the session began.
    pub(super) fn has_progressed(&self) -> bool {
        self.told.is_some_and(|told| told.lsn() > self.resume)
    }
}

/// Resolves when the commit that is under way has succeeded; never without one.
async fn committed(ledger: &mut Option<Ledger>) -> Result<Committed, SinkError> {
    match ledger {
        Some(ledger) => ledger.committed().await,
        None => std::future::pending().await,
    }
}

/// Resolves when everything that was produced is durable.
async fn settle(
    ledger: Option<&mut Ledger>,
    core: &mut Core,
    sink: &mut impl Sink,
) -> Result<(), SinkError> {
    core.watermark.empty().await;
    let Some(ledger) = ledger else { return Ok(()) };
    if ledger.is_committing() {
        core.watermark.checkpointed(ledger.committed().await?.safe);
    }
    if ledger.is_behind(core) && !core.watermark.deliveries().failed() {
        ledger.begin(core, sink, Instant::now());
        core.watermark.checkpointed(ledger.committed().await?.safe);
    }
    Ok(())
}

impl Wait {
    /// Resolves when the topic that is waited for is there; never without one.
    async fn topic(&mut self) -> Result<(&str, usize), SinkError> {
        match self {
            Self::Topic(topic, preparation) => {
                let partitions = preparation.await?;
                Ok((topic, partitions))
            }
            Self::Nothing | Self::Room => std::future::pending().await,
        }
    }
}

#[cfg(test)]
mod tests;
