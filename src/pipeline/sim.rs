//! Runs the whole pipeline against simulated PostgreSQL and Kafka servers, in simulated time.
//!
//! Only PostgreSQL and Kafka are simulated. Everything else is production code: [`run`] with its
//! error handling, the session, the replication protocol, the core, the watermark and the
//! checkpoints. A seed determines which transactions are committed and which faults occur.
//! Connections are cut at arbitrary bytes. Walpost and PostgreSQL crash, failovers lose commits,
//! and Kafka has outages. Deliveries and commits fail, or their responses are lost. Some networks
//! are too slow to transfer all records in flight before the Kafka transaction times out. Instances
//! freeze for so long that they are considered dead, and then continue. The database is restored
//! from a backup, or the slot is re-created. The brokers reject batches because of a single record
//! or because of the batch's size. Some events can't be delivered and become dead letters, and some
//! outboxes have rows that are older than the slot. Invariants are checked during the run and at
//! its end.
//!
//! `./dev sim --seed 42` repeats the run with one seed, and `./dev sim --seeds 100000 --from 5000`
//! runs more seeds.

use std::num::NonZero;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

use bytes::BytesMut;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use self::broker::SimSink;
use self::world::{SYSTEM_ID, Shared, World};
use super::database::{CatalogQueries, Database, LockedQueries};
use super::decode::error::CoreError;
use super::error::PipelineError;
use super::exactly_once::error::ExactlyOnceError;
use super::order::Order;
use super::run;
use super::session::error::SlotError;
use super::settings::{
    DeadLetterSettings, Delivery, OnTableError, PipelineSettings, Retention, SinkSettings,
    SnapshotMode, Undeliverable,
};
use super::wal_budget::budget::WalBudget;
use crate::delivery::checkpoint::{Checkpoint, ServerState};
use crate::delivery::isolation::Batching;
use crate::kafka::settings::CheckpointSettings;
use crate::model::dropped_slot::DroppedSlot;
use crate::model::lsn::Lsn;
use crate::model::set_aside::SetAside;
use crate::model::time::REFUSED_LOGIN_TIMEOUT;
use crate::model::vitals::Vitals;
use crate::outbox::connect::ColumnFacts;
use crate::outbox::settings::OutboxSettings;
use crate::postgres::catalog::drop_slot::Outcome;
use crate::postgres::catalog::journal::Entry;
use crate::postgres::catalog::set_aside::TableNote;
use crate::postgres::catalog::slot_owner::{DefinedBy, UnknownOwner};
use crate::postgres::catalog::slot_state::{FirstStart, FoundState, SlotIdentity, SlotState};
use crate::postgres::catalog::table_state::{AcceptedNames, Refresh, UncopiedTable};
use crate::postgres::catalog::{
    CatalogError, CopyScope, HiddenRows, Observed, ObservedPublication, ObservedSlot,
    ObservedTable, OrderColumn, RowOrder, ServerStarts, SnapshotHistory, SnapshotRecord,
    TableSnapshot, TableVersion,
};
use crate::postgres::connect::conninfo::Conninfo;
use crate::postgres::connect::dial;
use crate::postgres::connect::dial::{DialError, Notifications, ServerError, Socket};
use crate::postgres::replication::{Connection, ConnectionError, ServerProcess};
use crate::postgres::table::TableName;
use crate::postgres::table_pattern::TablePatterns;
use crate::postgres::target::{Outbox, Target};

mod broker;
mod older;
mod record_checks;
mod walsender;
mod world;

/// Number of seeds that `cargo test` runs in each mode.
const SEEDS_PER_MODE: u64 = 5_000;
/// Maximum duration of a run in simulated time. Longer than all outages and delays combined.
const RUN_TIMEOUT: Duration = Duration::from_secs(3600);

#[derive(Clone)]
struct SimDatabase {
    shared: Shared,
    /// The server's incarnation when this connection was opened. If the incarnation has changed
    /// since then, the server has terminated the connection.
    incarnation: u64,
}

impl SimDatabase {
    fn new(shared: &Shared) -> Self {
        Self {
            shared: shared.clone(),
            incarnation: shared.lock().database.incarnation,
        }
    }

    /// Simulates the time that a statement takes to read or write the journal. Sometimes returns an
    /// error, although the statement may have taken effect.
    async fn journal(&self) -> Result<(), CatalogError> {
        let (pause, fails) = {
            let mut world = self.shared.lock();
            (world.dice.u64(100..5000), world.chance(2))
        };
        sleep(Duration::from_micros(pause)).await;
        let is_cut = self.shared.lock().database.incarnation != self.incarnation;
        match is_cut || fails {
            false => Ok(()),
            true => Err(shutdown()),
        }
    }
}

/// Returns the error of a server that is shutting down (SQLSTATE admin_shutdown).
fn shutdown() -> CatalogError {
    CatalogError::Server(Box::new(ServerError {
        code: "57P01".to_owned(),
        ..ServerError::default()
    }))
}

impl Database for SimDatabase {
    type Catalog = Self;

    async fn catalog(&self) -> Result<Self, CatalogError> {
        if self.shared.lock().database.refuses {
            return Err(CatalogError::Dial(DialError::Server {
                host: "sim".to_owned(),
                error: Box::new(ServerError {
                    code: "28P01".to_owned(),
                    ..ServerError::default()
                }),
            }));
        }
        if self.shared.lock().database.is_up {
            return Ok(Self::new(&self.shared));
        }
        Err(CatalogError::Server(Box::new(ServerError {
            code: "57P03".to_owned(),
            ..ServerError::default()
        })))
    }

    async fn connect(&self, _: Duration, row_bytes: usize) -> Result<Connection, ConnectionError> {
        if !self.shared.lock().database.is_up {
            return Err(ConnectionError::Closed);
        }
        let session = dial::Session {
            socket: Socket::Memory(walsender::connect(&self.shared)),
            buffer: BytesMut::new(),
            parameters: std::collections::HashMap::default(),
            backend_pid: 1,
            secret: 1,
            host: "sim".to_owned(),
        };
        Ok(Connection::from_session(session, row_bytes))
    }
}

impl LockedQueries for () {
    async fn row_order(&self) -> Result<RowOrder<'_>, CatalogError> {
        Ok(RowOrder::from_columns(self, [("id".to_owned(), 20)]))
    }

    async fn until_planned_by<T: Send>(
        self,
        _: &ServerProcess,
        planned: impl Future<Output = Result<T, ConnectionError>> + Send,
    ) -> Result<Result<T, ConnectionError>, CatalogError> {
        Ok(planned.await)
    }
}

impl CatalogQueries for SimDatabase {
    type Locked = ();

    async fn lock_table(&self, _: &TableVersion) -> Result<(), CatalogError> {
        Ok(())
    }

    async fn tables(
        &self,
        _: &[TableName],
        _: &str,
    ) -> Result<Vec<(TableName, ObservedTable)>, CatalogError> {
        Ok(Vec::new())
    }

    async fn unpublished(
        &self,
        _: &TablePatterns,
        _: &[TableName],
    ) -> Result<Vec<TableName>, CatalogError> {
        Ok(Vec::new())
    }

    async fn hidden_rows(&self, _: &[TableName]) -> Result<Vec<HiddenRows>, CatalogError> {
        Ok(Vec::new())
    }

    async fn record_tables(
        &self,
        _: &str,
        _: &Target,
        _: Refresh,
    ) -> Result<Option<String>, CatalogError> {
        Ok(None)
    }

    async fn column_facts(&self, _: u32) -> Result<Vec<ColumnFacts>, CatalogError> {
        Ok(Vec::new())
    }

    async fn record_delivered_table(
        &self,
        _: &str,
        _: &Target,
        _: &AcceptedNames,
    ) -> Result<(), CatalogError> {
        Ok(())
    }

    async fn accepted_names(
        &self,
        _: &Target,
        _: &[u32],
    ) -> Result<Vec<AcceptedNames>, CatalogError> {
        Ok(Vec::new())
    }

    async fn advance(&self, _: &str, from: Lsn, to: Lsn) -> Result<bool, CatalogError> {
        let database = &mut self.shared.lock().database;
        let is_at = database.active.is_none() && database.confirmed == from;
        if is_at {
            database.confirmed = to;
        }
        Ok(is_at)
    }

    async fn observe(&self, _: &Target) -> Result<Observed, CatalogError> {
        let world = self.shared.lock();
        let column = |(name, oid): (&str, u32)| (name.to_owned(), oid);
        Ok(Observed {
            version: 150_000,
            starts: ServerStarts {
                postmaster: self.incarnation.to_string(),
                ..ServerStarts::default()
            },
            database: "sim".to_owned(),
            encoding: "UTF8".to_owned(),
            user: "sim".to_owned(),
            application_name: "walpost".to_owned(),
            wal_level: "logical".to_owned(),
            effective_wal_level: None,
            synchronous_standby_names: None,
            provider: None,
            in_recovery: false,
            slot_wal_keep: None,
            table: Some(ObservedTable {
                oid: 1,
                kind: "r".to_owned(),
                persistence: "p".to_owned(),
                columns: [
                    ("id", 20),
                    ("aggregatetype", 25),
                    ("aggregateid", 25),
                    ("payload", 25),
                ]
                .map(column)
                .to_vec(),
                types: Vec::new(),
                facts: Vec::new(),
                rejects_update: true,
                has_key: true,
                version: TableVersion::default(),
            }),
            has_publish: false,
            has_journal: false,
            has_slot_state: true,
            has_table_state: true,
            publication: Some(ObservedPublication {
                inserts: true,
                has_table: true,
                via_root: true,
                ..ObservedPublication::default()
            }),
            slot: Some(ObservedSlot {
                plugin: Some("pgoutput".to_owned()),
                database: Some("sim".to_owned()),
                active_pid: world.database.active.map(|_| 1),
                holder: None,
                confirmed: world.database.confirmed,
                wal_status: Some("reserved".to_owned()),
                invalidation_reason: None,
                synced: false,
                temporary: false,
                two_phase: false,
            }),
        })
    }

    async fn vitals(&self, _: &str, _: &Target) -> Result<Vitals, CatalogError> {
        Ok(Vitals::default())
    }

    async fn dropped_slots(&self, _: &str, _: &Target) -> Result<Vec<DroppedSlot>, CatalogError> {
        Ok(Vec::new())
    }

    async fn drop_slot_over_budget(
        &self,
        _: &str,
        _: &Target,
        _: u64,
        _: bool,
    ) -> Result<Outcome, CatalogError> {
        Ok(Outcome::Changed)
    }

    async fn snapshot_history(
        &self,
        _: &Target,
        _: &TableName,
    ) -> Result<SnapshotHistory, CatalogError> {
        self.journal().await?;
        let world = self.shared.lock();
        Ok(SnapshotHistory {
            record: world.record(),
            has_streamed: world.database.has_sent || world.database.begun.is_some(),
            rows: world.rows(),
        })
    }

    async fn snapshot_record(&self, _: &Target) -> Result<SnapshotRecord, CatalogError> {
        self.journal().await?;
        Ok(self.shared.lock().record())
    }

    async fn table_snapshots(&self, target: &Target) -> Result<Vec<TableSnapshot>, CatalogError> {
        let record = self.snapshot_record(target).await?;
        let table = target.outbox.table().map(ToString::to_string);
        Ok(match record {
            SnapshotRecord::NoJournal | SnapshotRecord::Nothing => Vec::new(),
            SnapshotRecord::Due { .. } | SnapshotRecord::Begun(_) | SnapshotRecord::Done => {
                vec![TableSnapshot { table, record }]
            }
        })
    }

    async fn uncopied_tables(
        &self,
        _: &Target,
        _: &[TableSnapshot],
    ) -> Result<Vec<UncopiedTable>, CatalogError> {
        Ok(Vec::new())
    }

    async fn copy_scope(&self, _: &TableName) -> Result<CopyScope, CatalogError> {
        Ok(CopyScope::default())
    }

    async fn record_uncopied_partitions(
        &self,
        _: &str,
        _: &Target,
        _: &TableName,
        _: Lsn,
    ) -> Result<(), CatalogError> {
        Ok(())
    }

    async fn order_columns(&self, _: &TableName) -> Result<Vec<OrderColumn>, CatalogError> {
        Ok(vec![OrderColumn::built_in("id".to_owned(), 20)])
    }

    async fn write_journal(&self, entry: &Entry<'_>) -> Result<(), CatalogError> {
        let snapshot_lsn = entry.to.expect("an LSN");
        let record = match entry.detail[SnapshotRecord::STATE] == SnapshotRecord::BEGUN {
            true => SnapshotRecord::Begun(snapshot_lsn),
            false => SnapshotRecord::Done,
        };
        self.journal().await?;
        self.shared.lock().write_journal(record, snapshot_lsn);
        self.journal().await
    }

    async fn set_aside(&self, _: &Target) -> Result<Vec<SetAside>, CatalogError> {
        Ok(Vec::new())
    }

    async fn write_set_aside(
        &self,
        _: &str,
        target: &Target,
        _: &TableNote,
    ) -> Result<Option<SetAside>, CatalogError> {
        Err(CatalogError::missing_journal(target))
    }

    /// Always succeeds, because only a pipeline that is defined by a row must own its slot.
    async fn check_slot_owner(
        &self,
        _: &str,
        _: DefinedBy,
        _: &Target,
        _: UnknownOwner,
    ) -> Result<(), CatalogError> {
        Ok(())
    }

    async fn slot_state(&self, slot: &SlotIdentity) -> Result<FoundState, CatalogError> {
        let world = self.shared.lock();
        let state = world
            .database
            .state
            .filter(|(timeline, _)| *timeline == slot.timeline);
        Ok(FoundState::State(state.map(|(_, confirmed)| SlotState {
            created: None,
            begun: true,
            confirmed,
        })))
    }

    async fn write_slot_state(
        &self,
        slot: &SlotIdentity,
        confirmed: Lsn,
    ) -> Result<(), CatalogError> {
        let pause = self.shared.lock().dice.u64(100..5000);
        sleep(Duration::from_micros(pause)).await;
        let mut world = self.shared.lock();
        if !world.database.is_up {
            return Err(shutdown());
        }
        let same = world
            .database
            .state
            .filter(|(timeline, _)| *timeline == slot.timeline);
        let confirmed = same.map_or(confirmed, |(_, before)| before.max(confirmed));
        world.database.state = Some((slot.timeline, confirmed));
        // If there was a failover in the meantime, this statement's connection has been cut.
        if world.database.timeline == slot.timeline {
            let end = world.database.end;
            world.database.begun.get_or_insert(end);
        }
        Ok(())
    }

    async fn is_accounted_for(
        &self,
        _: &SlotIdentity,
        _: Lsn,
        _: Lsn,
    ) -> Result<bool, CatalogError> {
        Ok(false)
    }

    async fn record_gap_of_other_history(
        &self,
        _: &SlotIdentity,
        _: Lsn,
        _: FirstStart,
    ) -> Result<(), CatalogError> {
        Ok(())
    }

    async fn explain_rejection(&self, _: &mut ServerError) {}

    async fn position_requests(&self, _: &str) -> Result<Arc<Notifications>, CatalogError> {
        Ok(Arc::default())
    }

    async fn closed(&mut self) {
        std::future::pending().await
    }
}

/// Returns the settings for a pipeline whose servers are simulated.
pub(crate) fn settings(
    exactly_once: bool,
    is_slow: bool,
    dice: &mut fastrand::Rng,
) -> PipelineSettings {
    PipelineSettings {
        name: "sim".to_owned(),
        defined_by: DefinedBy::Operator,
        postgres: Conninfo::parse("host=/nowhere user=sim dbname=sim", &|_| None)
            .expect("conninfo"),
        target: Target {
            outbox: Outbox::Table("public.outbox".parse().expect("table")),
            publication: "sim".to_owned(),
            slot: "sim".to_owned(),
            commands: Default::default(),
        },
        outbox: OutboxSettings::default(),
        sink: SinkSettings::Stdout,
        delivery: match exactly_once {
            false => Delivery::AtLeastOnce,
            true => Delivery::ExactlyOnce(CheckpointSettings {
                topic: "checkpoints".to_owned(),
                replication: 1,
            }),
        },
        dead_letters: DeadLetterSettings {
            oversize: Undeliverable::DeadLetter,
            unroutable: Undeliverable::DeadLetter,
            malformed: Undeliverable::DeadLetter,
            topic: world::DEAD_LETTER_TOPIC.to_owned(),
        },
        on_table_error: OnTableError::Halt,
        snapshot: SnapshotMode::Initial,
        // With a slow link, the window is large enough that transferring all of it can exceed the
        // transaction timeout.
        window_records: dice.u64(if is_slow { 100..1000 } else { 1..60 }),
        window_bytes: 1 << 20,
        row_bytes_max: 1 << 20,
        link_timeout: Duration::from_secs(60),
        drain_timeout: Duration::from_millis(dice.u64(0..3000)),
        retention: Retention {
            keep: None,
            ahead: 1,
            delete_rows: false,
        },
        wal_budget: WalBudget::default(),
    }
}

/// A running instance of Walpost.
struct Instance {
    run: Pin<Box<dyn Future<Output = Result<(), PipelineError>>>>,
    orders: watch::Sender<Order>,
    is_frozen: bool,
    ended: Option<Result<(), PipelineError>>,
}

impl Instance {
    fn start(shared: &Shared, settings: &PipelineSettings) -> Self {
        let (orders, receiver) = watch::channel(Order::Run);
        let (shared, settings) = (shared.clone(), settings.clone());
        let database = SimDatabase::new(&shared);
        let run = async move {
            let stats = Arc::default();
            let make_sink = |deliveries, batching: &Batching| {
                let window_records = settings.window_records;
                let shared = shared.clone();
                Ok(SimSink::new(shared, window_records, batching, deliveries))
            };
            run(&settings, &database, receiver, stats, make_sink).await
        };
        Self {
            run: Box::pin(run),
            orders,
            is_frozen: false,
            ended: None,
        }
    }
}

struct Simulation {
    shared: Shared,
    settings: PipelineSettings,
    instances: Vec<Instance>,
    /// Whether an instance has halted, which is correct after the database is restored or the slot
    /// is re-created.
    has_halted: bool,
}

impl Simulation {
    fn new(shared: &Shared, settings: PipelineSettings) -> Self {
        Self {
            shared: shared.clone(),
            settings,
            instances: Vec::new(),
            has_halted: false,
        }
    }

    /// Runs all instances that are not frozen, until all of them have ended or the duration
    /// `within` has elapsed.
    async fn run(&mut self, within: Duration) {
        let instances = &mut self.instances;
        let all = std::future::poll_fn(|context| {
            let mut left = false;
            for instance in instances.iter_mut().filter(|instance| !instance.is_frozen) {
                if instance.ended.is_none() {
                    match instance.run.as_mut().poll(context) {
                        Poll::Ready(ended) => instance.ended = Some(ended),
                        Poll::Pending => left = true,
                    }
                }
            }
            if left { Poll::Pending } else { Poll::Ready(()) }
        });
        let _ = timeout(within, all).await;
        for instance in &self.instances {
            if let Some(Err(error)) = &instance.ended {
                let is_expected = self.shared.lock().restored.is_some();
                let is_halt = matches!(
                    error,
                    PipelineError::ExactlyOnce(ExactlyOnceError::History(_))
                        | PipelineError::Core(CoreError::History(_))
                        | PipelineError::Slot(SlotError::SlotMoved { .. })
                );
                if is_expected && is_halt {
                    self.has_halted = true;
                    continue;
                }
                self.shared.lock().break_rule(format!("halted: {error}"));
            }
        }
    }

    async fn run_a_while(&mut self) {
        let millis = self.shared.lock().dice.u64(0..250);
        self.run(Duration::from_millis(millis)).await;
    }

    fn start(&mut self) {
        let instance = Instance::start(&self.shared, &self.settings);
        self.instances.push(instance);
    }

    async fn stop(&mut self) {
        for instance in &mut self.instances {
            instance.is_frozen = false;
            instance.orders.send_replace(Order::Drain);
        }
        self.run(RUN_TIMEOUT).await;
        if self
            .instances
            .iter()
            .any(|instance| instance.ended.is_none())
        {
            self.shared
                .lock()
                .break_rule("an instance did not stop".to_owned());
        }
        self.instances.clear();
    }

    /// Waits until all events are delivered, without injecting any more faults, and checks the
    /// result.
    async fn settle(&mut self, is_written: impl Fn() -> bool) -> Result<(), String> {
        let began = tokio::time::Instant::now();
        while !self.has_halted && (!is_written() || !self.shared.lock().is_settled()) {
            self.run(Duration::from_millis(500)).await;
            let mut world = self.shared.lock();
            if world.broken.is_some() || began.elapsed() > RUN_TIMEOUT {
                let (confirmed, end) = (world.database.confirmed, world.database.end);
                world.break_rule(format!(
                    "the simulation did not finish: the WAL ends at {end}, but is confirmed only up to {confirmed}"
                ));
                break;
            }
        }
        self.stop().await;
        let mut world = self.shared.lock();
        match self.has_halted {
            true => world.check_halt(),
            false => world.check_records(),
        }
        world.broken.take().map_or(Ok(()), Err)
    }

    async fn fault(&mut self) {
        let kind = self.shared.lock().dice.u8(0..9);
        match kind {
            // Walpost crashes.
            0 | 1 => {
                self.instances.clear();
                self.start();
            }
            2 => {
                self.stop().await;
                self.start();
            }
            // The replication connection is lost, and the server releases the slot.
            3 => self.shared.lock().database.active = None,
            4 => {
                {
                    let mut world = self.shared.lock();
                    world.crash_database();
                    world.database.is_up = false;
                }
                self.run_a_while().await;
                self.shared.lock().database.is_up = true;
            }
            5 => {
                self.shared.lock().cluster.is_up = false;
                let seconds = self.shared.lock().dice.u64(0..90);
                self.run(Duration::from_secs(seconds)).await;
                self.shared.lock().cluster.is_up = true;
            }
            6 => self.shared.lock().fail_over(),
            // The instances freeze for so long that they are considered dead, and resume later.
            7 if self.settings.delivery != Delivery::AtLeastOnce => {
                self.instances
                    .iter_mut()
                    .for_each(|instance| instance.is_frozen = true);
                self.shared.lock().database.active = None;
                self.start();
                self.run_a_while().await;
                self.instances
                    .iter_mut()
                    .for_each(|instance| instance.is_frozen = false);
            }
            _ => {}
        }
    }
}

/// Decides whether and how the database is restored from a backup near the end of a run. Uses a
/// separate random number generator, so that this decision does not affect the other random choices
/// for the same seed.
struct Rewind {
    dice: fastrand::Rng,
    /// The number of the fault before which the backup is made.
    backed_up_before: usize,
    recreates_slot: bool,
    is_down: bool,
}

impl Rewind {
    fn draw(seed: u64, exactly_once: bool) -> Option<Self> {
        let mut dice = fastrand::Rng::with_seed(!seed);
        (dice.u8(0..4) == 0).then(|| {
            // With at-least-once delivery, Walpost may not have recorded the slot's previous
            // position, so it could not detect a re-created slot.
            let recreates_slot = exactly_once && dice.bool();
            Self {
                backed_up_before: dice.usize(0..7),
                recreates_slot,
                // Instances may keep running during the restore only with exactly-once delivery,
                // and only if the slot is not re-created.
                is_down: recreates_slot || !exactly_once || dice.bool(),
                dice,
            }
        })
    }
}

/// Decides whether the slot is re-created near the end of a run. Uses a separate random number
/// generator, so that this decision does not affect the other random choices for the same seed.
/// Always returns `None` with exactly-once delivery, because the checkpoint then reveals that the
/// slot was re-created.
fn draw_slot_recreation(seed: u64, exactly_once: bool) -> Option<fastrand::Rng> {
    let mut dice = fastrand::Rng::with_seed(seed.rotate_left(16));
    (!exactly_once && dice.u8(0..6) == 0).then_some(dice)
}

/// Commits transactions at random intervals.
async fn write(shared: Shared) {
    let count = {
        let mut world = shared.lock();
        match world.cluster.rate {
            Some(_) => world.dice.usize(5..20),
            None => world.dice.usize(5..60),
        }
    };
    for _ in 0..count {
        let pause = {
            let mut world = shared.lock();
            match world.chance(15) {
                true => world.write_other_wal(),
                false => world.commit(),
            }
            world.dice.u64(0..30_000)
        };
        shared.changed.notify_waiters();
        sleep(Duration::from_micros(pause)).await;
    }
}

fn first_checkpoint(world: &World) -> Checkpoint {
    let server = ServerState {
        system_id: SYSTEM_ID.to_owned(),
        timeline: 1,
        history: Vec::new(),
        slot: "sim".to_owned(),
        confirmed: world.database.confirmed,
        flushed: world.database.end,
    };
    Checkpoint::first(1, &server)
}

async fn scenario(seed: u64, exactly_once: bool) -> Result<(), String> {
    let shared = Shared::new(seed, exactly_once);
    let settings = {
        let mut world = shared.lock();
        if world.chance(10) {
            world.cluster.rate = Some(world.dice.u64(5..10));
            // Don't reject any records: after each rejection, all unconfirmed records are resent
            // twice, which takes too long on a slow link.
            world.cluster.batch_max = None;
        }
        if older::draw_older(seed) {
            world.write_older();
        }
        world.cluster.checkpoint = Some(first_checkpoint(&world));
        let is_slow = world.cluster.rate.is_some();
        settings(exactly_once, is_slow, &mut world.dice)
    };
    let mut simulation = Simulation::new(&shared, settings);
    let mut rewind = Rewind::draw(seed, exactly_once);
    let writer = tokio::spawn(write(shared.clone()));
    simulation.start();
    let faults = shared.lock().dice.usize(0..7);
    for number in 0..faults {
        simulation.run_a_while().await;
        if rewind
            .as_ref()
            .is_some_and(|rewind| rewind.backed_up_before == number)
        {
            shared.lock().back_up();
        }
        simulation.fault().await;
    }
    if let Some(rewind) = &mut rewind {
        simulation.run_a_while().await;
        // Stop all instances, because a running one could still write records to Kafka.
        if rewind.is_down {
            simulation.instances.clear();
        }
        let (recreates_slot, is_down) = (rewind.recreates_slot, rewind.is_down);
        shared
            .lock()
            .restore_earlier_state(&mut rewind.dice, recreates_slot, is_down);
        if rewind.is_down {
            simulation.start();
        }
    }
    if let (Some(mut dice), None) = (draw_slot_recreation(seed, exactly_once), &rewind) {
        simulation.run_a_while().await;
        match dice.bool() {
            true => simulation.instances.clear(),
            false => simulation
                .instances
                .iter_mut()
                .for_each(|instance| instance.is_frozen = true),
        }
        shared.lock().recreate_slot(&mut dice);
        match simulation.instances.is_empty() {
            true => simulation.start(),
            false => simulation
                .instances
                .iter_mut()
                .for_each(|instance| instance.is_frozen = false),
        }
    }
    simulation.settle(|| writer.is_finished()).await
}

fn simulated_time() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime")
}

fn simulate(seed: u64, exactly_once: bool) {
    // The delays between connection attempts are drawn from this thread's random number generator.
    fastrand::seed(seed);
    let outcome = simulated_time().block_on(scenario(seed, exactly_once));
    if let Err(broken) = outcome {
        let mode = if exactly_once { "exactly" } else { "at-least" };
        panic!("{broken}\nTo run this seed again: ./dev sim --seed {seed} ({mode}-once)");
    }
}

/// Lets a pipeline stream for a while, and then makes PostgreSQL reject its logins for the duration
/// `lasts`. Returns how long the instance kept running after the first rejection, and its result.
/// Returns `None` if the instance did not end.
fn refused_for(
    exactly_once: bool,
    lasts: Duration,
) -> Option<(Duration, Result<(), PipelineError>)> {
    simulated_time().block_on(async {
        let shared = Shared::new(1, exactly_once);
        let settings = {
            let mut world = shared.lock();
            world.cluster.checkpoint = Some(first_checkpoint(&world));
            settings(exactly_once, false, &mut world.dice)
        };
        let mut instance = Instance::start(&shared, &settings);
        let result = timeout(Duration::from_secs(60), &mut instance.run).await;
        assert!(result.is_err(), "the pipeline has ended: {result:?}");
        {
            let mut world = shared.lock();
            world.database.refuses = true;
            world.database.active = None;
        }
        let began = tokio::time::Instant::now();
        if let Ok(ended) = timeout(lasts, &mut instance.run).await {
            return Some((began.elapsed(), ended));
        }
        shared.lock().database.refuses = false;
        let ended = timeout(RUN_TIMEOUT, &mut instance.run).await.ok()?;
        Some((began.elapsed(), ended))
    })
}

#[test]
fn retries_for_ten_minutes_if_the_server_rejects_a_previously_accepted_role() {
    for exactly_once in [false, true] {
        let ended = refused_for(exactly_once, REFUSED_LOGIN_TIMEOUT - Duration::from_secs(1));
        assert!(ended.is_none(), "the pipeline has ended: {ended:?}");
        let ended = refused_for(exactly_once, 2 * REFUSED_LOGIN_TIMEOUT);
        let (elapsed, ended) = ended.expect("an end");
        let most = REFUSED_LOGIN_TIMEOUT + Duration::from_secs(30);
        assert!(
            (REFUSED_LOGIN_TIMEOUT..most).contains(&elapsed),
            "{elapsed:?}"
        );
        let error = ended.expect_err("a halt");
        assert!(matches!(error, PipelineError::Refused(_)), "{error}");
        let text = error.to_string();
        for words in [
            "28P01",
            "accepted role \"sim\" earlier",
            "rejecting it for 6",
        ] {
            assert!(text.contains(words), "{words} in {text}");
        }
    }
}

/// The table is empty when the slot is acquired. By the time that Kafka is available again, the
/// table has rows, and the server's statistics do not show that the slot has sent any rows. Walpost
/// therefore treats the rows as older rows and copies them. The stream that has already started
/// must not be used, because it would deliver the rows a second time.
#[test]
fn restarts_the_stream_if_rows_to_copy_appear_after_the_slot_is_acquired() {
    simulated_time().block_on(async {
        let shared = Shared::new(1, true);
        let settings = {
            let mut world = shared.lock();
            world.cluster.checkpoint = Some(first_checkpoint(&world));
            world.cluster.is_up = false;
            settings(true, false, &mut world.dice)
        };
        let mut simulation = Simulation::new(&shared, settings);
        simulation.start();
        simulation.run(Duration::from_secs(1)).await;
        {
            let mut world = shared.lock();
            assert!(world.database.active.is_some(), "the slot is not in use");
            world.has_older = true;
            while world.database.log.len() < 20 {
                world.commit();
            }
        }
        shared.changed.notify_waiters();
        simulation.run(Duration::from_secs(1)).await;
        {
            let mut world = shared.lock();
            world.database.has_sent = false;
            world.cluster.is_up = true;
        }
        let settled = simulation.settle(|| true).await;
        assert_eq!(settled, Ok(()));
        let world = shared.lock();
        let (stream, snapshot_lsn) = world.streams_of_copies.first().expect("rows were copied");
        assert!(stream >= snapshot_lsn, "{stream} is before {snapshot_lsn}");
    });
}

/// Runs the seeds that the environment variables specify, or the default seeds.
fn simulate_all(exactly_once: bool) {
    let number = |name| {
        std::env::var(name)
            .ok()
            .map(|text| text.parse().expect(name))
    };
    if let Some(seed) = number("SIM_SEED") {
        // The log output is shown if the test fails, or with --nocapture.
        let _ = tracing_subscriber::fmt()
            .with_max_level(tracing::Level::DEBUG)
            .with_test_writer()
            .try_init();
        return simulate(seed, exactly_once);
    }
    let from = number("SIM_FROM").unwrap_or(0);
    let count = number("SIM_SEEDS").unwrap_or(SEEDS_PER_MODE);
    let next = AtomicU64::new(from);
    let threads = std::thread::available_parallelism().map_or(1, NonZero::get);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= from + count {
                        return;
                    }
                    simulate(seed, exactly_once);
                }
            });
        }
    });
}

#[test]
fn at_least_once_mode_delivers_every_event_in_order() {
    simulate_all(false);
}

#[test]
fn exactly_once_mode_delivers_each_event_once() {
    simulate_all(true);
}
