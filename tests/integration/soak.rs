//! Injects random faults, several at a time, for a configured time: `./dev soak`. The seed
//! determines the faults.

use std::collections::BTreeMap;
use std::env;
use std::fmt::{self, Write as _};
use std::fs::{self, File};
use std::io::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::slot_state;
use crate::support::checker::{CommittedEvent, DeliverySummary};
use crate::support::event::{EventWriter, Outbox};
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::load::seed;
use crate::support::postgres::{MAJORS, Server, StopMode, copy_owned};
use crate::support::process::free_port;
use crate::support::proxy::{Proxy, ProxyMode};
use crate::support::session::Session;
use crate::support::wait::poll_until;
use crate::support::walpost::{Finished, Walpost};

/// Duration of a round, in which faults are injected. All events committed during the round are
/// checked afterwards.
const ROUND_DURATION: Duration = Duration::from_secs(45);

/// How long Walpost may take to deliver and confirm the remaining events after the last fault. This
/// exceeds both the longest pause between two attempts and the timeout of an abandoned Kafka
/// transaction.
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(120);

/// Memory limit for a process. The window is only 8 MiB, so exceeding this limit indicates a leak.
const MEMORY_BYTES_MAX: u64 = 128 << 20;

/// A topic's `max.message.bytes` that is smaller than Walpost's usual batches.
const SMALL_TOPIC_BYTES: &str = "20000";
/// Maximum number of events per transaction in a topic whose limit is [`SMALL_TOPIC_BYTES`].
/// Walpost may have to send each record in a separate batch.
const SMALL_TOPIC_EVENTS_MAX: usize = 1_500;

#[test]
#[ignore = "runs for a configured time: ./dev soak --minutes N"]
fn random_faults_neither_lose_nor_reorder_events() {
    let minutes = env::var("WALPOST_SOAK_MINUTES").map_or(10, |text| text.parse().unwrap());
    let until = Instant::now() + Duration::from_secs(60 * minutes);
    let mut broker = Broker::private();
    let mut report = SoakReport::default();
    for round in 0.. {
        if Instant::now() >= until {
            break;
        }
        let seed = seed().wrapping_add(round);
        let round_log = RoundLog::new(seed);
        let mut rng = fastrand::Rng::with_seed(seed);
        let server = Server::private(*rng.choice(&MAJORS).unwrap(), "");
        let kafka = broker.proxy();
        let targets = RoundTargets {
            postgres: Proxy::start(free_port(), server.port),
            server: &server,
            broker: &broker,
            kafka: &kafka,
            in_flight: Mutex::default(),
            postgres_is_up: Mutex::default(),
            broker_is_up: Mutex::default(),
            round_log: &round_log,
        };
        let outcome = catch_unwind(AssertUnwindSafe(|| targets.round(&mut rng)));
        drop(targets);
        let lost_a_marker = broker.has_lost_a_marker();
        match outcome {
            Ok(summaries) => report.add(&summaries, round_log),
            // If the broker lost a transaction marker, the failure is the broker's fault. Don't
            // count this round.
            Err(_) if lost_a_marker => report.void += 1,
            Err(reason) => {
                round_log.keep(&server, &broker);
                eprintln!("{report}");
                resume_unwind(reason);
            }
        }
        if lost_a_marker {
            broker = Broker::private();
        }
    }
    eprintln!("{report}");
}

/// The servers and the proxies in front of them. A round injects faults into both.
struct RoundTargets<'a> {
    server: &'a Server,
    broker: &'a Broker,
    postgres: Proxy,
    kafka: &'a Proxy,
    /// Locked while a fault delays data that was sent to Kafka.
    in_flight: Mutex<()>,
    /// Locked while a fault prevents PostgreSQL or Kafka from responding normally.
    postgres_is_up: Mutex<()>,
    broker_is_up: Mutex<()>,
    round_log: &'a RoundLog,
}

/// One of a round's two pipelines.
struct SoakPipeline<'a> {
    fixture: Fixture<'a>,
    /// The aggregate types of the events. The topic of the last aggregate type accepts only small
    /// batches.
    aggregates: [String; 3],
    is_exactly_once: bool,
}

impl SoakPipeline<'_> {
    /// Returns the name of the role that Walpost connects as.
    fn role(&self) -> String {
        format!("soak_{}", self.fixture.name)
    }
}

impl RoundTargets<'_> {
    /// Injects faults for a while, waits until everything is delivered, and returns one result for
    /// at-least-once mode and one for exactly-once mode.
    fn round(&self, rng: &mut fastrand::Rng) -> [DeliverySummary; 2] {
        let pipelines = [false, true].map(|is_exactly_once| {
            let outbox = *rng.choice(&[Outbox::Table, Outbox::Messages]).unwrap();
            let fixture = Fixture::with_outbox_on(outbox, self.server, self.broker);
            let aggregates = [fixture.aggregate(3), fixture.aggregate(1)];
            let narrow = format!("{}.narrow", fixture.name);
            let limit = [("max.message.bytes", SMALL_TOPIC_BYTES)];
            fixture.topic(&format!("outbox.event.{narrow}"), 1, &limit);
            let [first, second] = aggregates;
            let pipeline = SoakPipeline {
                fixture: fixture.in_mode(is_exactly_once),
                aggregates: [first, second, narrow],
                is_exactly_once,
            };
            let role = pipeline.role();
            pipeline.fixture.db.run(&format!(
                "CREATE ROLE {role} SUPERUSER LOGIN PASSWORD '{role}'"
            ));
            pipeline
        });
        let loads = pipelines.each_ref().map(|pipeline| {
            let [first, second, _] = &pipeline.aggregates;
            pipeline.fixture.load(&[first, second])
        });
        let writers = pipelines
            .each_ref()
            .map(|SoakPipeline { fixture, .. }| (fixture.name.clone(), fixture.events().clone()));
        let aggregates = pipelines.each_ref().map(|p| p.aggregates.clone());
        let until = Instant::now() + ROUND_DURATION;
        let mut seeded = || fastrand::Rng::with_seed(rng.u64(..));
        let (mut servers, mut network, mut kills) = (seeded(), seeded(), [seeded(), seeded()]);
        let [at_least_once, exactly_once] = pipelines;
        let ended = thread::scope(|scope| {
            scope.spawn(|| self.break_servers(&mut servers, until, &writers, &aggregates));
            scope.spawn(|| self.break_network(&mut network, until));
            let [first, second] = &mut kills;
            let tormented =
                [(at_least_once, first), (exactly_once, second)].map(|(pipeline, rng)| {
                    scope.spawn(move || self.inject_faults(pipeline, rng, until))
                });
            tormented.map(|thread| thread.join())
        });
        for load in loads {
            load.stop();
        }
        let ended = ended.map(|outcome| outcome.unwrap_or_else(|reason| resume_unwind(reason)));
        let judged = ended.map(|(mut pipeline, walpost)| {
            let summary = self.check_delivery(&mut pipeline, walpost);
            (pipeline, summary)
        });
        let [(first, at_least_once), (second, exactly_once)] = judged;
        self.change_history(rng, [first, second]);
        [at_least_once, exactly_once]
    }

    /// Starts a Walpost process that connects through both proxies.
    fn start(&self, pipeline: &SoakPipeline) -> Walpost {
        let user = format!("user={}", pipeline.role());
        let postgres = self.postgres.conninfo(&pipeline.fixture.name);
        let postgres = postgres.replace("user=postgres", &user);
        let kafka = format!("bootstrap.servers=127.0.0.1:{}", self.kafka.port());
        pipeline
            .fixture
            .with_conninfo(&postgres)
            .run()
            .env("PGPASSWORD", pipeline.role())
            .args(["-X", &kafka, "--window-bytes", "8MiB"])
            .args(["--link-timeout", "5s", "--drain-timeout", "5s"])
            .start()
    }

    /// Repeatedly kills, freezes or replaces the pipeline's process until the round ends. Returns
    /// the process that is running when the round ends.
    fn inject_faults<'s>(
        &self,
        pipeline: SoakPipeline<'s>,
        rng: &mut fastrand::Rng,
        until: Instant,
    ) -> (SoakPipeline<'s>, Walpost) {
        let name = &pipeline.fixture.name;
        let mut walpost = self.start(&pipeline);
        while sleep_randomly(rng, 100..5_000, until) {
            match rng.u32(..11) {
                0 | 1 => {
                    self.round_log.fault("Walpost killed", name);
                    self.kill(&pipeline, walpost);
                    self.wait_for_stragglers(&pipeline);
                    walpost = self.start(&pipeline);
                }
                2 => {
                    self.round_log.fault("Walpost stopped", name);
                    self.round_log
                        .log(name, &walpost.terminate().expect_code(0));
                    self.wait_for_stragglers(&pipeline);
                    walpost = self.start(&pipeline);
                }
                3 => {
                    self.round_log
                        .fault("Walpost killed, a standby takes over", name);
                    let held = (!pipeline.is_exactly_once).then(|| lock(&self.in_flight));
                    let second = self.start(&pipeline);
                    sleep_randomly(rng, 0..2_000, until);
                    self.kill(&pipeline, walpost);
                    drop(held);
                    walpost = second;
                }
                4 if pipeline.is_exactly_once => {
                    self.round_log
                        .fault("Walpost frozen, a standby takes over, both go on", name);
                    let second = self.start(&pipeline);
                    sleep_randomly(rng, 0..1_000, until);
                    walpost.freeze();
                    sleep_randomly(rng, 0..10_000, until);
                    walpost.thaw();
                    sleep_randomly(rng, 0..2_000, until);
                    let (stays, goes) = if rng.bool() {
                        (walpost, second)
                    } else {
                        (second, walpost)
                    };
                    self.kill(&pipeline, goes);
                    walpost = stays;
                }
                5 => {
                    self.round_log.fault("hangup of the terminal", name);
                    walpost.signal("HUP");
                }
                // Inject this fault only after the process has connected once, because a process
                // whose first connection is rejected halts immediately.
                6 if walpost.logged("streaming") > 0 => {
                    let _is_up = lock(&self.postgres_is_up);
                    self.round_log.fault("role that may not log in", name);
                    let role = pipeline.role();
                    let session = self.server.session("postgres");
                    session.run(&format!("ALTER ROLE {role} NOLOGIN"));
                    self.end_walsender(&session, name);
                    sleep_randomly(rng, 0..8_000, until);
                    session.run(&format!("ALTER ROLE {role} LOGIN"));
                }
                // Don't add partitions in at-least-once mode. Otherwise, events could be repeated
                // in other partitions, where the test could not distinguish repetitions from gaps.
                7 if pipeline.is_exactly_once => {
                    let _is_up = lock(&self.broker_is_up);
                    self.round_log.fault("partitions added", name);
                    let aggregate = &pipeline.aggregates[0];
                    let topic = format!("outbox.event.{aggregate}");
                    let total = self.broker.partitions(&topic) + rng.usize(1..4);
                    pipeline.fixture.add_partitions(aggregate, total);
                }
                8 => {
                    let _are_up = (lock(&self.postgres_is_up), lock(&self.broker_is_up));
                    self.round_log.fault("new topic", name);
                    let aggregate = pipeline.fixture.aggregate(2);
                    let many = pipeline
                        .fixture
                        .events()
                        .insert_many(&aggregate, 20, "'{}'");
                    self.server.session(name).run(&many);
                }
                _ => {
                    self.round_log.fault("Walpost frozen", name);
                    walpost.freeze();
                    sleep_randomly(rng, 0..8_000, until);
                    walpost.thaw();
                }
            }
        }
        (pipeline, walpost)
    }

    fn end_walsender(&self, session: &Session, database: &str) {
        session.run(&format!(
            "SELECT pg_catalog.pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE database = '{database}'"
        ));
    }

    fn kill(&self, pipeline: &SoakPipeline, mut walpost: Walpost) {
        self.round_log.check_memory(&mut walpost);
        self.round_log.log(&pipeline.fixture.name, &walpost.kill());
    }

    /// Waits until no data sent by a killed process can reach the broker. Without fencing, such
    /// data could arrive after the next process has written records, and Walpost can't prevent
    /// that.
    fn wait_for_stragglers(&self, pipeline: &SoakPipeline) {
        if !pipeline.is_exactly_once {
            self.kafka.cut();
            drop(lock(&self.in_flight));
        }
    }

    /// Stops, kills and freezes the servers, and makes them write large amounts of WAL at once.
    /// Both servers are available again once this function returns.
    fn break_servers(
        &self,
        rng: &mut fastrand::Rng,
        until: Instant,
        writers: &[(String, EventWriter); 2],
        aggregates: &[[String; 3]; 2],
    ) {
        while sleep_randomly(rng, 500..4_000, until) {
            let which = rng.usize(..2);
            let (database, events) = &writers[which];
            match rng.u32(..10) {
                0 => {
                    let _is_down = lock(&self.postgres_is_up);
                    self.round_log.fault("PostgreSQL stopped immediately", "");
                    self.server.stop(StopMode::Immediate);
                    sleep_randomly(rng, 0..3_000, until);
                    self.server.start();
                }
                1 => {
                    let _is_down = lock(&self.postgres_is_up);
                    self.round_log.fault("PostgreSQL stopped fast", "");
                    self.server.stop(StopMode::Fast);
                    sleep_randomly(rng, 0..3_000, until);
                    self.server.start();
                }
                2 | 3 => {
                    self.round_log.fault("walsender terminated", database);
                    self.end_walsender(&self.server.session("postgres"), database);
                }
                4 => {
                    let _is_down = lock(&self.broker_is_up);
                    if rng.bool() {
                        self.round_log.fault("broker killed", "");
                        self.broker.kill();
                    } else {
                        self.round_log.fault("broker stopped", "");
                        self.broker.stop();
                    }
                    sleep_randomly(rng, 0..5_000, until);
                    self.broker.start();
                }
                5 => {
                    let _is_down = lock(&self.broker_is_up);
                    self.round_log.fault("broker frozen", "");
                    let held = lock(&self.in_flight);
                    self.broker.freeze();
                    sleep_randomly(rng, 0..15_000, until);
                    self.broker.thaw();
                    drop(held);
                }
                6 => {
                    let (aggregate, max_events) = match rng.usize(..3) {
                        2 => (&aggregates[which][2], SMALL_TOPIC_EVENTS_MAX),
                        any => (&aggregates[which][any], 20_000),
                    };
                    self.round_log.fault("large transaction", aggregate);
                    let many = events.insert_many(aggregate, rng.usize(1..max_events), "'{}'");
                    let end = rng.choice(&["COMMIT", "ROLLBACK"]).unwrap();
                    self.server
                        .session(database)
                        .run(&format!("BEGIN; {many} {end}"));
                }
                7 => {
                    let _is_strict = lock(&self.postgres_is_up);
                    self.round_log
                        .fault("short timeouts of the database", database);
                    let session = self.server.session("postgres");
                    for name in ["statement_timeout", "lock_timeout", "idle_session_timeout"] {
                        session.run(&format!("ALTER DATABASE {database} SET {name} = '200ms'"));
                    }
                    // PostgreSQL versions before 17 do not have the setting `transaction_timeout`.
                    let _ = session.try_run(&format!(
                        "ALTER DATABASE {database} SET transaction_timeout = '200ms'"
                    ));
                    self.end_walsender(&session, database);
                    sleep_randomly(rng, 500..4_000, until);
                    session.run(&format!("ALTER DATABASE {database} RESET ALL"));
                }
                8 => {
                    self.round_log.fault("slot looked at by another", database);
                    self.acquire_slot_briefly(rng, database);
                }
                _ => {
                    self.round_log.fault("checkpoint of PostgreSQL", "");
                    self.server.session("postgres").run("CHECKPOINT");
                }
            }
        }
    }

    /// Acquires the slot repeatedly, each time only briefly and without moving it.
    fn acquire_slot_briefly(&self, rng: &mut fastrand::Rng, database: &str) {
        let session = self.server.session(database);
        self.end_walsender(&session, database);
        let until = Instant::now() + Duration::from_millis(rng.u64(100..3_000));
        while Instant::now() < until {
            // The statement fails if Walpost has acquired the slot first.
            let _ = session.try_run(&format!(
                "SELECT count(*) FROM pg_logical_slot_peek_binary_changes('walpost_{database}', NULL, NULL,
                     'proto_version', '1', 'publication_names', 'walpost_{database}', 'messages', 'true')"
            ));
        }
    }

    /// Cuts, delays and slows down the connections. Once this function returns, all data is
    /// forwarded normally again.
    fn break_network(&self, rng: &mut fastrand::Rng, until: Instant) {
        while sleep_randomly(rng, 500..4_000, until) {
            let is_kafka = rng.bool();
            let (proxy, what) = if is_kafka {
                (self.kafka, "to Kafka")
            } else {
                (&self.postgres, "to PostgreSQL")
            };
            let manner = match rng.u32(..6) {
                0 => {
                    self.round_log.fault("connections cut", what);
                    proxy.cut();
                    continue;
                }
                1 | 2 => {
                    self.round_log.fault("connections cut at a byte", what);
                    proxy.cut_after(rng.usize(1..50_000));
                    continue;
                }
                3 => ProxyMode::Swallow,
                4 => ProxyMode::Delay(Duration::from_millis(rng.u64(1..200))),
                _ => ProxyMode::Throttle(rng.usize(10_000..500_000)),
            };
            let held = is_kafka.then(|| lock(&self.in_flight));
            self.round_log.fault(
                match manner {
                    ProxyMode::Swallow => "connections swallowed",
                    ProxyMode::Delay(_) => "connections late",
                    _ => "connections slow",
                },
                what,
            );
            proxy.set_mode(manner);
            sleep_randomly(rng, 500..8_000, until);
            proxy.set_mode(ProxyMode::Pass);
            drop(held);
        }
    }

    /// Re-creates the slots, or restores an older copy of the database. The pipelines must then
    /// halt without confirming anything. The exception is a pipeline in at-least-once mode after a
    /// restore: it can't detect the restore and delivers events again.
    fn change_history(&self, rng: &mut fastrand::Rng, pipelines: [SoakPipeline<'_>; 2]) {
        if rng.bool() {
            for pipeline in &pipelines {
                self.round_log
                    .fault("slot re-created", &pipeline.fixture.name);
                slot_state::re_create_slot(&pipeline.fixture, &pipeline.aggregates[1]);
                self.expect_halt(pipeline);
            }
            return;
        }
        self.round_log.fault("database put back", "");
        self.server.stop(StopMode::Fast);
        let copy = self.server.copy_data();
        self.server.start();
        let mut pipelines = pipelines;
        for pipeline in &mut pipelines {
            pipeline.fixture.reconnect();
            let SoakPipeline {
                fixture,
                aggregates,
                ..
            } = &*pipeline;
            let walpost = self.start(pipeline);
            fixture
                .db
                .run(&fixture.events().insert_many(&aggregates[1], 200, "'{}'"));
            fixture.wait_until_confirmed();
            self.round_log
                .log(&fixture.name, &walpost.terminate().expect_code(0));
        }
        self.server.stop(StopMode::Fast);
        self.server.restore_data(&copy);
        self.server.start();
        for pipeline in &mut pipelines {
            pipeline.fixture.reconnect();
            let SoakPipeline {
                fixture,
                aggregates,
                ..
            } = &*pipeline;
            let before = fixture.records().len();
            fixture.insert(&aggregates[1], "new");
            if pipeline.is_exactly_once {
                self.expect_halt(pipeline);
            } else {
                let walpost = self.start(pipeline);
                fixture.wait_for_ids(&fixture.history());
                self.round_log
                    .log(&fixture.name, &walpost.terminate().expect_code(0));
                assert!(fixture.records().len() > before);
            }
        }
    }

    fn expect_halt(&self, pipeline: &SoakPipeline) {
        let fixture = &pipeline.fixture;
        let (confirmed, delivered) = (fixture.confirmed(), fixture.records().len());
        let finished = self.start(pipeline).finish();
        self.round_log.log(&fixture.name, &finished);
        finished.expect_code(3);
        assert_eq!(fixture.confirmed(), confirmed);
        assert_eq!(fixture.records().len(), delivered);
    }

    /// Waits until a pipeline has confirmed everything, and then checks the events that the
    /// pipeline delivered.
    fn check_delivery(&self, pipeline: &mut SoakPipeline, mut walpost: Walpost) -> DeliverySummary {
        let fixture = &mut pipeline.fixture;
        fixture.reconnect();
        let goal = fixture.wal_position();
        let mut wait = || {
            poll_until(RECOVERY_TIMEOUT, || {
                self.round_log.check_memory(&mut walpost);
                (fixture.confirmed() >= goal).then_some(())
            })
        };
        let confirmed = wait();
        assert!(
            confirmed.is_some(),
            "not confirmed {RECOVERY_TIMEOUT:?} after the last fault:\n{}",
            walpost.log()
        );
        let finished = walpost.terminate().expect_code(0);
        self.round_log.log(&fixture.name, &finished);
        self.round_log.list(fixture);
        let resends = fixture.resends(self.round_log.sessions(&fixture.name));
        fixture.check_delivered(&[], resends)
    }
}

/// A log of what happens during a round. Its directory is removed if the round succeeds.
struct RoundLog {
    started: Instant,
    folder: PathBuf,
    faults: Mutex<Vec<InjectedFault>>,
    memory: AtomicU64,
}

struct InjectedFault {
    at: Duration,
    what: &'static str,
    target: String,
}

impl RoundLog {
    fn new(seed: u64) -> Self {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("soak-{seed}"));
        fs::create_dir_all(&folder).unwrap();
        Self {
            started: Instant::now(),
            folder,
            faults: Mutex::default(),
            memory: AtomicU64::new(0),
        }
    }

    /// Adds the fault `what`, which is being injected into `target`, to the list of faults.
    fn fault(&self, what: &'static str, target: &str) {
        lock(&self.faults).push(InjectedFault {
            at: self.started.elapsed(),
            what,
            target: target.to_owned(),
        });
    }

    /// Asserts that the process is running and that its memory use is below the limit.
    fn check_memory(&self, walpost: &mut Walpost) {
        let log = walpost.log();
        assert!(walpost.is_running(), "the process exited by itself:\n{log}");
        let bytes = walpost.resident_bytes();
        assert!(bytes < MEMORY_BYTES_MAX, "{bytes} bytes resident:\n{log}");
        self.memory.fetch_max(bytes, Ordering::Relaxed);
    }

    /// Appends the process's log to the pipeline's log file.
    fn log(&self, pipeline: &str, finished: &Finished) {
        let path = self.log_of(pipeline);
        let mut log = File::options()
            .create(true)
            .append(true)
            .open(path)
            .unwrap();
        log.write_all(finished.stderr.as_bytes()).unwrap();
    }

    /// Returns how many times the pipeline's processes started streaming.
    fn sessions(&self, pipeline: &str) -> usize {
        let log = fs::read_to_string(self.log_of(pipeline)).unwrap();
        log.lines()
            .filter(|line| line.contains("streaming"))
            .count()
    }

    fn log_of(&self, pipeline: &str) -> PathBuf {
        self.folder.join(format!("{pipeline}.log"))
    }

    /// Writes the lists of committed and delivered events to files.
    fn list(&self, fixture: &Fixture) {
        let mut text = String::new();
        for CommittedEvent { id, end, index } in fixture.history() {
            writeln!(text, "{id} {end:X} {index}").unwrap();
        }
        let name = &fixture.name;
        fs::write(self.folder.join(format!("{name}.committed")), text).unwrap();
        let mut text = String::new();
        for record in fixture.records() {
            let (topic, partition) = record.topic_partition();
            let (id, position) = (record.header("id"), record.header("walpost-position"));
            writeln!(
                text,
                "{id} {position} {topic} {partition} {}",
                record.offset
            )
            .unwrap();
        }
        fs::write(self.folder.join(format!("{name}.delivered")), text).unwrap();
    }

    /// Adds the list of faults, the servers' logs and the broker's data to the directory, and keeps
    /// it for inspection.
    fn keep(&self, server: &Server, broker: &Broker) {
        let mut text = String::new();
        for InjectedFault { at, what, target } in &*lock(&self.faults) {
            writeln!(text, "{:7.3} {what} {target}", at.as_secs_f64()).unwrap();
        }
        fs::write(self.folder.join("faults"), text).unwrap();
        fs::write(self.folder.join("postgresql.log"), server.log()).unwrap();
        fs::write(self.folder.join("kafka.log"), broker.log()).unwrap();
        copy_owned(&broker.data(), &self.folder.join("kafka"));
        eprintln!("what happened is in {}", self.folder.display());
    }
}

/// The totals of all rounds.
#[derive(Default)]
struct SoakReport {
    rounds: usize,
    /// Number of failed rounds that were not counted because the broker had lost a transaction
    /// marker.
    void: usize,
    time: Duration,
    faults: BTreeMap<String, usize>,
    /// The first value is for at-least-once mode, the second for exactly-once mode.
    committed: [usize; 2],
    repeated: [usize; 2],
    memory: u64,
}

impl SoakReport {
    fn add(&mut self, summaries: &[DeliverySummary; 2], round_log: RoundLog) {
        self.rounds += 1;
        self.time += round_log.started.elapsed();
        for fault in round_log.faults.into_inner().unwrap() {
            *self.faults.entry(fault.what.to_owned()).or_default() += 1;
        }
        for (mode, summary) in summaries.iter().enumerate() {
            self.committed[mode] += summary.committed;
            self.repeated[mode] += summary.repeated;
        }
        self.memory = self.memory.max(round_log.memory.into_inner());
        eprintln!(
            "round {} in {:.0?}: {summaries:?}",
            self.rounds,
            round_log.started.elapsed()
        );
        fs::remove_dir_all(round_log.folder).unwrap();
    }
}

impl fmt::Display for SoakReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} rounds in {:.0?}", self.rounds, self.time)?;
        writeln!(
            f,
            "{} void: Kafka has lost the end of a transaction",
            self.void
        )?;
        for (mode, name) in ["at least once", "exactly once"].iter().enumerate() {
            let (committed, repeated) = (self.committed[mode], self.repeated[mode]);
            writeln!(f, "{name}: {committed} events, {repeated} repeated")?;
        }
        writeln!(f, "memory: at most {} MiB", self.memory >> 20)?;
        for (what, times) in &self.faults {
            writeln!(f, "{times:6} {what}")?;
        }
        Ok(())
    }
}

/// Sleeps for a random time, but not beyond `until`. Returns false if `until` was reached.
fn sleep_randomly(rng: &mut fastrand::Rng, millis: std::ops::Range<u64>, until: Instant) -> bool {
    let wanted = Duration::from_millis(rng.u64(millis));
    let left = until.saturating_duration_since(Instant::now());
    thread::sleep(wanted.min(left));
    wanted < left
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
