//! Streaming over one connection: from the checks before it to the last confirm.

use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout, timeout_at};
use tracing::{debug, error, info, warn};

use super::checkpoint::{Checkpoint, HistoryError, Phantom, Standing};
use super::core::{Core, Step};
use super::ledger::Ledger;
use super::pace::Pace;
use super::settings::{Delivery, PipelineSettings};
use super::sink::{Preparation, Sink, SinkError};
use super::watermark::Confirmed;
use super::{Order, PipelineError, drain_ordered, recovery};
use crate::postgres::catalog::{Catalog, CatalogError, Observed, Problem};
use crate::postgres::connection::{Connection, ConnectionError};
use crate::postgres::conninfo::Conninfo;
use crate::postgres::lsn::Lsn;
use crate::postgres::target::{Outbox, Target};

/// A confirmed LSN that has risen is told at most this often: it bounds what a crash repeats.
const CONFIRM: Duration = Duration::from_millis(100);
/// The server hears from us at least this often.
const STATUS_MAX: Duration = Duration::from_secs(10);
/// How often the publication is looked at while streaming.
const PUBLICATION: Duration = Duration::from_secs(30);
/// With more records in flight than this, others have company anyway: times are busy.
const COMPANY: u64 = 100;
const REOPEN: Duration = Duration::from_secs(1);
/// How long the last status update may take to be sent.
const LAST_WORD: Duration = Duration::from_secs(2);
/// While a Kafka transaction is committed nothing can be produced, but the log is read on: this much
/// is kept meanwhile.
const READ_AHEAD: usize = 4 << 20;
/// A server that shuts down waits for what it has sent to be confirmed. This long it may wait.
const LAST_CONFIRM: Duration = Duration::from_secs(2);

/// The database, as a session needs it.
pub(super) trait Database: Clone + Send + 'static {
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
pub(super) trait Look: Send + 'static {
    /// Asks for everything that `target` names.
    fn look(&self, target: &Target) -> impl Future<Output = Result<Observed, CatalogError>> + Send;

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

    async fn closed(&mut self) {
        Catalog::closed(self).await;
    }
}

/// What a pipeline remembers from one connection to the next, to notice another history.
#[derive(Debug, Default)]
pub(super) struct Memory {
    system_id: Option<String>,
    timeline: u32,
    confirmed: Option<Confirmed>,
    another_owner: bool,
    /// A checkpoint that did not fit the slot.
    doubted: Option<Checkpoint>,
}

impl Memory {
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

    fn check_slot(&mut self, target: &Target, found: Lsn) -> Result<(), PipelineError> {
        match self.confirmed.map(Confirmed::lsn) {
            Some(confirmed) if found > confirmed && !self.another_owner => {
                Err(PipelineError::SlotMoved {
                    slot: target.slot.clone(),
                    found,
                    confirmed,
                    resend: target.outbox.resend(),
                })
            }
            _ => {
                self.another_owner = false;
                Ok(())
            }
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
    told: Option<Confirmed>,
    told_at: Instant,
    status_due: Instant,
    stopping_since: Option<Instant>,
    pace: Pace,
    /// Exactly-once.
    ledger: Option<Ledger>,
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
    let catalog = database.catalog().await?;
    let observed = catalog.look(target).await?;
    if let Some(problem) = observed.problems(target).into_iter().next() {
        return Err(problem.into());
    }
    // As the table is now; rows say again what it was like when they were written.
    settings.check_columns(&observed)?;
    if let Some(pid) = observed.slot.and_then(|slot| slot.active_pid) {
        return Err(PipelineError::SlotInUse {
            slot: target.slot.clone(),
            pid,
        });
    }

    // Whoever had the slot before can't produce from here on; only then is it known what it has
    // produced.
    let checkpoint = match &settings.delivery {
        Delivery::AtLeastOnce => None,
        Delivery::ExactlyOnce(checkpoint) => {
            let found = sink.take_over().await?;
            Some(found.ok_or_else(|| PipelineError::NoCheckpoint {
                pipeline: settings.name.clone(),
                topic: checkpoint.topic.clone(),
                slot: target.slot.clone(),
            })?)
        }
    };

    let (limit, row_bytes) = (settings.link_timeout, settings.row_bytes_max);
    let mut connection = database.connect(limit, row_bytes).await?;
    let identity = connection.identify().await?;
    match &memory.system_id {
        Some(expected) if *expected != identity.system_id => {
            let (found, expected) = (identity.system_id, expected.clone());
            return Err(PipelineError::OtherCluster { found, expected });
        }
        Some(_) if memory.timeline != identity.timeline => {
            let (from, to) = (memory.timeline, identity.timeline);
            warn!(
                pipeline = settings.name,
                from, to, "PostgreSQL has a new timeline: a standby was promoted"
            );
        }
        _ => {}
    }
    let history = match &checkpoint {
        Some(checkpoint) if checkpoint.timeline != identity.timeline => {
            connection.timeline_history(identity.timeline).await?
        }
        _ => Vec::new(),
    };
    memory.system_id = Some(identity.system_id.clone());
    memory.timeline = identity.timeline;

    let messages = matches!(target.outbox, Outbox::Log { .. });
    connection
        .start(&target.slot, &target.publication, messages)
        .await?;
    // Only now that the slot is ours does nobody else move it.
    let slot = catalog.look(target).await?.slot;
    let resume = slot
        .ok_or_else(|| Problem::NoSlot {
            slot: target.slot.clone(),
            init: target.outbox.init(),
        })?
        .confirmed;
    if checkpoint.is_none() {
        // A checkpoint knows better than our memory, which another instance may have outrun.
        memory.check_slot(target, resume)?;
    }
    core.reconnected(resume);
    let now = Instant::now();
    let ledger = match checkpoint {
        None => None,
        Some(checkpoint) => {
            let standing = Standing {
                system_id: identity.system_id,
                timeline: identity.timeline,
                history,
                slot: target.slot.clone(),
                confirmed: resume,
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
            Some(Ledger::open(checkpoint, &standing, &resume, core, now))
        }
    };
    info!(pipeline = settings.name, slot = target.slot, from = %resume, host = connection.host, "streaming");

    let mut lookout = JoinSet::new();
    lookout.spawn(look_out(database.clone(), target.clone(), catalog));
    Ok(Session {
        settings,
        connection,
        resume,
        lookout,
        ledger,
        told: None,
        told_at: now,
        status_due: now,
        stopping_since: None,
        pace: Pace::new(now),
    })
}

/// What can be seen of the database from beside the stream.
enum Sighting {
    /// The publication would leave rows out.
    Problem(Problem),
    /// The server ends its sessions and takes no new ones.
    Stopping,
}

/// Resolves when there is something to be seen.
///
/// PostgreSQL 18 says in the stream that it leaves rows out for want of the publication, and that
/// halts the pipeline by itself; looking at the catalog is the second line. That a server is
/// shutting down can't be heard in the stream while nothing is read from it, with Kafka down.
async fn look_out<D: Database>(database: D, target: Target, mut catalog: D::Catalog) -> Sighting {
    loop {
        let mut reopen = timeout(PUBLICATION, catalog.closed()).await.is_ok();
        while reopen {
            match database.catalog().await {
                Ok(open) => {
                    catalog = open;
                    reopen = false;
                }
                Err(CatalogError::Dial(error)) if recovery::is_stopping(&error) => {
                    return Sighting::Stopping;
                }
                Err(error) => {
                    debug!(%error, "the catalog can't be looked at now");
                    tokio::time::sleep(REOPEN).await;
                }
            }
        }
        match catalog.look(&target).await {
            Ok(observed) => {
                if let Some(problem) = observed.publication_problem(&target) {
                    return Sighting::Problem(problem);
                }
            }
            Err(error) => debug!(%error, "the catalog can't be looked at now"),
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
            if takes {
                wait = self.frames(core, sink, drain_until.is_some())?;
            }
            let many = core.watermark.in_flight().records > COMPANY;
            let busy = many || self.pace.is_fast(Instant::now());
            if takes {
                sink.flush(busy)?;
            }
            let reads = matches!(wait, Wait::Nothing)
                && (!self.is_committing() || self.connection.unread() < READ_AHEAD);
            if !reads {
                self.connection.pause();
            }
            if deliveries.failed()
                && let Some(failure) = deliveries.failure()
            {
                return Err(PipelineError::Delivery(failure));
            }
            let now = Instant::now();
            if let Some(until) = drain_until
                && (now >= until || !core.is_open())
            {
                return Ok(until);
            }
            let mut next = self.keep_in_touch(core, memory, now).await?;
            sink.tend();
            if let Some(ledger) = &mut self.ledger
                && let Some(due) = ledger.tend(core, sink, now, busy)
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
                    drain_until = Some(Instant::now() + self.settings.drain_timeout);
                }
                Some(Ok(sighting)) = self.lookout.join_next(), if !self.lookout.is_empty() => {
                    match sighting {
                        Sighting::Problem(problem) => return Err(problem.into()),
                        Sighting::Stopping => self.stopping_since = Some(Instant::now()),
                    }
                }
                committed = committed(&mut self.ledger) => core.watermark.checkpointed(committed?),
                () = core.watermark.room(), if matches!(wait, Wait::Room) => wait = Wait::Nothing,
                prepared = wait.topic() => {
                    let (topic, partitions) = prepared?;
                    sink.prepared(topic, partitions)?;
                    wait = Wait::Nothing;
                }
                filled = self.connection.fill(), if reads => filled?,
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
            let frame = self.connection.peek().map_err(|error| match error {
                ConnectionError::TooLarge { bytes, max } => PipelineError::RowTooLarge {
                    at: core.place(),
                    bytes,
                    max,
                },
                error => error.into(),
            })?;
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
                    let preparation = sink.prepare(&topic);
                    return Ok(Wait::Topic(topic, preparation));
                }
            }
            self.connection.consume();
            self.pace.frame();
        }
        Ok(Wait::Nothing)
    }

    /// Confirms what is due, and says when to come back for it. Finds a dead link, and lets go of a
    /// server that shuts down.
    async fn keep_in_touch(
        &mut self,
        core: &mut Core,
        memory: &mut Memory,
        now: Instant,
    ) -> Result<Instant, PipelineError> {
        let limit = self.settings.link_timeout;
        if now.duration_since(self.connection.last_heard()) > limit {
            return Err(ConnectionError::Silent(limit).into());
        }
        let confirmed = core.watermark.confirmed();
        let in_flight = core.watermark.in_flight().records > 0;
        if in_flight
            && self
                .stopping_since
                .is_some_and(|since| now >= since + LAST_CONFIRM)
        {
            return Err(PipelineError::ServerStopping);
        }
        let risen = self.told != Some(confirmed);
        if now >= self.status_due || (risen && now >= self.told_at + CONFIRM) {
            let status = STATUS_MAX.min(limit / 3);
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
        Ok(next.min(self.status_due))
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
        if !matches!(settled, Ok(Ok(()))) || core.watermark.deliveries().failed() {
            let left = core.watermark.in_flight().records;
            let limit = self.settings.drain_timeout;
            warn!(
                pipeline,
                left,
                ?limit,
                "not all records were acknowledged in time; they will be sent again at the next start"
            );
        }
        let confirmed = core.watermark.confirmed();
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
                self.status_due = Instant::now() + STATUS_MAX.min(limit / 3);
            }
        };
        let released = async {
            while let Some(sighting) = self.lookout.join_next().await {
                if matches!(sighting, Ok(Sighting::Stopping)) {
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
async fn committed(ledger: &mut Option<Ledger>) -> Result<Lsn, SinkError> {
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
        core.watermark.checkpointed(ledger.committed().await?);
    }
    if ledger.is_behind(core) && !core.watermark.deliveries().failed() {
        ledger.begin(core, sink, Instant::now());
        core.watermark.checkpointed(ledger.committed().await?);
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
