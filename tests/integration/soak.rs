//! Faults drawn from a seed, several at a time, for a given time: `./dev soak`.

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
use crate::support::checker::{Committed, Summary};
use crate::support::event::{Outbox, Writer};
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::load::seed;
use crate::support::postgres::{MAJORS, Server, Stop, copy_owned};
use crate::support::process::free_port;
use crate::support::proxy::{Proxy, ProxyMode};
use crate::support::session::Session;
use crate::support::wait::poll_until;
use crate::support::walpost::{Finished, Walpost};

/// Duration of a round: faults are injected, then everything committed meanwhile is judged.
const ROUND_DURATION: Duration = Duration::from_secs(45);

/// Time for Walpost to deliver and confirm the remaining events after the faults have ended. It is
/// longer than the longest pause between two attempts, and than the timeout of an abandoned Kafka
/// transaction.
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(120);

/// Memory use above this is a leak: the window is 8 MiB.
const MEMORY_BYTES_MAX: u64 = 128 << 20;

/// The limit in bytes of a topic that is smaller than a batch.
const SMALL_TOPIC_BYTES: &str = "20000";
/// The largest transaction for that topic: each of its records can become a separate batch.
const SMALL_TOPIC_EVENTS_MAX: usize = 1_500;

#[test]
#[ignore = "lasts as long as it is told: ./dev soak --minutes N"]
fn soak() {
    let minutes = env::var("WALPOST_SOAK_MINUTES").map_or(10, |text| text.parse().unwrap());
    let until = Instant::now() + Duration::from_secs(60 * minutes);
    let mut broker = Broker::private();
    let mut report = Report::default();
    for round in 0.. {
        if Instant::now() >= until {
            break;
        }
        let seed = seed().wrapping_add(round);
        let diary = RoundLog::new(seed);
        let mut dice = fastrand::Rng::with_seed(seed);
        let server = Server::private(*dice.choice(&MAJORS).unwrap(), "");
        let kafka = broker.proxy();
        let stage = RoundTargets {
            postgres: Proxy::start(free_port(), server.port),
            server: &server,
            broker: &broker,
            kafka: &kafka,
            in_flight: Mutex::default(),
            postgres_is_up: Mutex::default(),
            broker_is_up: Mutex::default(),
            diary: &diary,
        };
        let outcome = catch_unwind(AssertUnwindSafe(|| stage.round(&mut dice)));
        drop(stage);
        let lost_an_end = broker.has_lost_a_marker();
        match outcome {
            Ok(summaries) => report.add(&summaries, diary),
            // What happens to such a transaction is up to the broker, so the round does not count.
            Err(_) if lost_an_end => report.void += 1,
            Err(reason) => {
                diary.keep(&server, &broker);
                eprintln!("{report}");
                resume_unwind(reason);
            }
        }
        if lost_an_end {
            broker = Broker::private();
        }
    }
    eprintln!("{report}");
}

/// The components that a round's faults affect.
struct RoundTargets<'a> {
    server: &'a Server,
    broker: &'a Broker,
    postgres: Proxy,
    kafka: &'a Proxy,
    /// Held while a fault delays data that was sent to Kafka.
    in_flight: Mutex<()>,
    /// Held while a fault keeps PostgreSQL, or Kafka, from answering normally.
    postgres_is_up: Mutex<()>,
    broker_is_up: Mutex<()>,
    diary: &'a RoundLog,
}

/// One of the two pipelines of a round.
struct Pipeline<'a> {
    fixture: Fixture<'a>,
    /// The topic of the last aggregate only accepts small batches.
    aggregates: [String; 3],
    is_exactly_once: bool,
}

impl Pipeline<'_> {
    /// Returns the role that Walpost connects as.
    fn role(&self) -> String {
        format!("soak_{}", self.fixture.name)
    }
}

impl RoundTargets<'_> {
    /// Injects faults for a while, waits until everything is delivered, and returns the results for
    /// at-least-once and for exactly-once mode.
    fn round(&self, dice: &mut fastrand::Rng) -> [Summary; 2] {
        let pipelines = [false, true].map(|is_exactly_once| {
            let outbox = *dice.choice(&[Outbox::Table, Outbox::Messages]).unwrap();
            let fixture = Fixture::with_outbox_on(outbox, self.server, self.broker);
            let aggregates = [fixture.aggregate(3), fixture.aggregate(1)];
            let narrow = format!("{}.narrow", fixture.name);
            let limit = [("max.message.bytes", SMALL_TOPIC_BYTES)];
            fixture.topic(&format!("outbox.event.{narrow}"), 1, &limit);
            let [first, second] = aggregates;
            let pipeline = Pipeline {
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
            .map(|Pipeline { fixture, .. }| (fixture.name.clone(), fixture.events().clone()));
        let aggregates = pipelines.each_ref().map(|p| p.aggregates.clone());
        let until = Instant::now() + ROUND_DURATION;
        let mut seeded = || fastrand::Rng::with_seed(dice.u64(..));
        let (mut servers, mut network, mut kills) = (seeded(), seeded(), [seeded(), seeded()]);
        let [at_least_once, exactly_once] = pipelines;
        let ended = thread::scope(|scope| {
            scope.spawn(|| self.break_servers(&mut servers, until, &writers, &aggregates));
            scope.spawn(|| self.break_network(&mut network, until));
            let [first, second] = &mut kills;
            let tormented =
                [(at_least_once, first), (exactly_once, second)].map(|(pipeline, dice)| {
                    scope.spawn(move || self.inject_faults(pipeline, dice, until))
                });
            tormented.map(|thread| thread.join())
        });
        for load in loads {
            load.stop();
        }
        let ended = ended.map(|outcome| outcome.unwrap_or_else(|reason| resume_unwind(reason)));
        let judged = ended.map(|(mut pipeline, walpost)| {
            let summary = self.judge(&mut pipeline, walpost);
            (pipeline, summary)
        });
        let [(first, at_least_once), (second, exactly_once)] = judged;
        self.change_history(dice, [first, second]);
        [at_least_once, exactly_once]
    }

    /// Starts Walpost for a pipeline, behind both proxies.
    fn start(&self, pipeline: &Pipeline) -> Walpost {
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

    /// Kills, freezes and replaces a pipeline's process. The last one keeps running.
    fn inject_faults<'s>(
        &self,
        pipeline: Pipeline<'s>,
        dice: &mut fastrand::Rng,
        until: Instant,
    ) -> (Pipeline<'s>, Walpost) {
        let name = &pipeline.fixture.name;
        let mut walpost = self.start(&pipeline);
        while rest(dice, 100..5_000, until) {
            match dice.u32(..11) {
                0 | 1 => {
                    self.diary.fault("Walpost killed", name);
                    self.kill(&pipeline, walpost);
                    self.wait_for_stragglers(&pipeline);
                    walpost = self.start(&pipeline);
                }
                2 => {
                    self.diary.fault("Walpost stopped", name);
                    self.diary.log(name, &walpost.terminate().expect_code(0));
                    self.wait_for_stragglers(&pipeline);
                    walpost = self.start(&pipeline);
                }
                3 => {
                    self.diary
                        .fault("Walpost killed, a standby takes over", name);
                    let held = (!pipeline.is_exactly_once).then(|| lock(&self.in_flight));
                    let second = self.start(&pipeline);
                    rest(dice, 0..2_000, until);
                    self.kill(&pipeline, walpost);
                    drop(held);
                    walpost = second;
                }
                4 if pipeline.is_exactly_once => {
                    self.diary
                        .fault("Walpost frozen, a standby takes over, both go on", name);
                    let second = self.start(&pipeline);
                    rest(dice, 0..1_000, until);
                    walpost.freeze();
                    rest(dice, 0..10_000, until);
                    walpost.thaw();
                    rest(dice, 0..2_000, until);
                    let (stays, goes) = if dice.bool() {
                        (walpost, second)
                    } else {
                        (second, walpost)
                    };
                    self.kill(&pipeline, goes);
                    walpost = stays;
                }
                5 => {
                    self.diary.fault("hangup of the terminal", name);
                    walpost.signal("HUP");
                }
                // A process whose first connection is refused halts at once.
                6 if walpost.logged("streaming") > 0 => {
                    let _is_up = lock(&self.postgres_is_up);
                    self.diary.fault("role that may not log in", name);
                    let role = pipeline.role();
                    let session = self.server.session("postgres");
                    session.run(&format!("ALTER ROLE {role} NOLOGIN"));
                    self.end_walsender(&session, name);
                    rest(dice, 0..8_000, until);
                    session.run(&format!("ALTER ROLE {role} LOGIN"));
                }
                // In at-least-once mode, repeated events would go to another partition, which can't
                // be told apart from a gap.
                7 if pipeline.is_exactly_once => {
                    let _is_up = lock(&self.broker_is_up);
                    self.diary.fault("partitions added", name);
                    let aggregate = &pipeline.aggregates[0];
                    let topic = format!("outbox.event.{aggregate}");
                    let total = self.broker.partitions(&topic) + dice.usize(1..4);
                    pipeline.fixture.add_partitions(aggregate, total);
                }
                8 => {
                    let _are_up = (lock(&self.postgres_is_up), lock(&self.broker_is_up));
                    self.diary.fault("new topic", name);
                    let aggregate = pipeline.fixture.aggregate(2);
                    let many = pipeline
                        .fixture
                        .events()
                        .insert_many(&aggregate, 20, "'{}'");
                    self.server.session(name).run(&many);
                }
                _ => {
                    self.diary.fault("Walpost frozen", name);
                    walpost.freeze();
                    rest(dice, 0..8_000, until);
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

    fn kill(&self, pipeline: &Pipeline, mut walpost: Walpost) {
        self.diary.check_memory(&mut walpost);
        self.diary.log(&pipeline.fixture.name, &walpost.kill());
    }

    /// Returns when nothing that a dead process sent can reach the broker any longer. Without
    /// fencing it could arrive after records of its successor, which Walpost can't prevent.
    fn wait_for_stragglers(&self, pipeline: &Pipeline) {
        if !pipeline.is_exactly_once {
            self.kafka.cut();
            drop(lock(&self.in_flight));
        }
    }

    /// Stops, kills and freezes the servers, and makes them write a lot of WAL at once. Both are
    /// available again at the end.
    fn break_servers(
        &self,
        dice: &mut fastrand::Rng,
        until: Instant,
        writers: &[(String, Writer); 2],
        aggregates: &[[String; 3]; 2],
    ) {
        while rest(dice, 500..4_000, until) {
            let which = dice.usize(..2);
            let (database, events) = &writers[which];
            match dice.u32(..10) {
                0 => {
                    let _is_down = lock(&self.postgres_is_up);
                    self.diary.fault("PostgreSQL stopped immediately", "");
                    self.server.stop(Stop::Immediate);
                    rest(dice, 0..3_000, until);
                    self.server.start();
                }
                1 => {
                    let _is_down = lock(&self.postgres_is_up);
                    self.diary.fault("PostgreSQL stopped fast", "");
                    self.server.stop(Stop::Fast);
                    rest(dice, 0..3_000, until);
                    self.server.start();
                }
                2 | 3 => {
                    self.diary.fault("walsender terminated", database);
                    self.end_walsender(&self.server.session("postgres"), database);
                }
                4 => {
                    let _is_down = lock(&self.broker_is_up);
                    if dice.bool() {
                        self.diary.fault("broker killed", "");
                        self.broker.kill();
                    } else {
                        self.diary.fault("broker stopped", "");
                        self.broker.stop();
                    }
                    rest(dice, 0..5_000, until);
                    self.broker.start();
                }
                5 => {
                    let _is_down = lock(&self.broker_is_up);
                    self.diary.fault("broker frozen", "");
                    let held = lock(&self.in_flight);
                    self.broker.freeze();
                    rest(dice, 0..15_000, until);
                    self.broker.thaw();
                    drop(held);
                }
                6 => {
                    let (aggregate, most) = match dice.usize(..3) {
                        2 => (&aggregates[which][2], SMALL_TOPIC_EVENTS_MAX),
                        any => (&aggregates[which][any], 20_000),
                    };
                    self.diary.fault("large transaction", aggregate);
                    let many = events.insert_many(aggregate, dice.usize(1..most), "'{}'");
                    let end = dice.choice(&["COMMIT", "ROLLBACK"]).unwrap();
                    self.server
                        .session(database)
                        .run(&format!("BEGIN; {many} {end}"));
                }
                7 => {
                    let _is_strict = lock(&self.postgres_is_up);
                    self.diary.fault("short timeouts of the database", database);
                    let session = self.server.session("postgres");
                    for name in ["statement_timeout", "lock_timeout", "idle_session_timeout"] {
                        session.run(&format!("ALTER DATABASE {database} SET {name} = '200ms'"));
                    }
                    // The setting exists from version 17 on.
                    let _ = session.try_run(&format!(
                        "ALTER DATABASE {database} SET transaction_timeout = '200ms'"
                    ));
                    self.end_walsender(&session, database);
                    rest(dice, 500..4_000, until);
                    session.run(&format!("ALTER DATABASE {database} RESET ALL"));
                }
                8 => {
                    self.diary.fault("slot looked at by another", database);
                    self.acquire_slot_briefly(dice, database);
                }
                _ => {
                    self.diary.fault("checkpoint of PostgreSQL", "");
                    self.server.session("postgres").run("CHECKPOINT");
                }
            }
        }
    }

    /// Acquires the slot repeatedly for a short while without moving it.
    fn acquire_slot_briefly(&self, dice: &mut fastrand::Rng, database: &str) {
        let session = self.server.session(database);
        self.end_walsender(&session, database);
        let until = Instant::now() + Duration::from_millis(dice.u64(100..3_000));
        while Instant::now() < until {
            // This fails if Walpost acquires the slot first.
            let _ = session.try_run(&format!(
                "SELECT count(*) FROM pg_logical_slot_peek_binary_changes('walpost_{database}', NULL, NULL,
                     'proto_version', '1', 'publication_names', 'walpost_{database}', 'messages', 'true')"
            ));
        }
    }

    /// Cuts, holds up and slows down the connections. At the end, all data passes.
    fn break_network(&self, dice: &mut fastrand::Rng, until: Instant) {
        while rest(dice, 500..4_000, until) {
            let is_kafka = dice.bool();
            let (proxy, what) = if is_kafka {
                (self.kafka, "to Kafka")
            } else {
                (&self.postgres, "to PostgreSQL")
            };
            let manner = match dice.u32(..6) {
                0 => {
                    self.diary.fault("connections cut", what);
                    proxy.cut();
                    continue;
                }
                1 | 2 => {
                    self.diary.fault("connections cut at a byte", what);
                    proxy.cut_after(dice.usize(1..50_000));
                    continue;
                }
                3 => ProxyMode::Swallow,
                4 => ProxyMode::Delay(Duration::from_millis(dice.u64(1..200))),
                _ => ProxyMode::Throttle(dice.usize(10_000..500_000)),
            };
            let held = is_kafka.then(|| lock(&self.in_flight));
            self.diary.fault(
                match manner {
                    ProxyMode::Swallow => "connections swallowed",
                    ProxyMode::Delay(_) => "connections late",
                    _ => "connections slow",
                },
                what,
            );
            proxy.set_mode(manner);
            rest(dice, 500..8_000, until);
            proxy.set_mode(ProxyMode::Pass);
            drop(held);
        }
    }

    /// Gives the pipelines a history other than the one they have delivered, so that they halt and
    /// confirm nothing. In at-least-once mode, events are delivered again after the database is
    /// restored.
    fn change_history(&self, dice: &mut fastrand::Rng, pipelines: [Pipeline<'_>; 2]) {
        if dice.bool() {
            for pipeline in &pipelines {
                self.diary.fault("slot re-created", &pipeline.fixture.name);
                slot_state::make_anew(&pipeline.fixture, &pipeline.aggregates[1]);
                self.expect_halt(pipeline);
            }
            return;
        }
        self.diary.fault("database put back", "");
        self.server.stop(Stop::Fast);
        let copy = self.server.copy_data();
        self.server.start();
        let mut pipelines = pipelines;
        for pipeline in &mut pipelines {
            pipeline.fixture.reconnect();
            let Pipeline {
                fixture,
                aggregates,
                ..
            } = &*pipeline;
            let walpost = self.start(pipeline);
            fixture
                .db
                .run(&fixture.events().insert_many(&aggregates[1], 200, "'{}'"));
            fixture.wait_until_confirmed();
            self.diary
                .log(&fixture.name, &walpost.terminate().expect_code(0));
        }
        self.server.stop(Stop::Fast);
        self.server.restore_data(&copy);
        self.server.start();
        for pipeline in &mut pipelines {
            pipeline.fixture.reconnect();
            let Pipeline {
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
                self.diary
                    .log(&fixture.name, &walpost.terminate().expect_code(0));
                assert!(fixture.records().len() > before);
            }
        }
    }

    fn expect_halt(&self, pipeline: &Pipeline) {
        let fixture = &pipeline.fixture;
        let (confirmed, delivered) = (fixture.confirmed(), fixture.records().len());
        let finished = self.start(pipeline).finish();
        self.diary.log(&fixture.name, &finished);
        finished.expect_code(3);
        assert_eq!(fixture.confirmed(), confirmed);
        assert_eq!(fixture.records().len(), delivered);
    }

    /// Waits until a pipeline has delivered and confirmed everything, and judges it.
    fn judge(&self, pipeline: &mut Pipeline, mut walpost: Walpost) -> Summary {
        let fixture = &mut pipeline.fixture;
        fixture.reconnect();
        let goal = fixture.wal_position();
        let mut wait = || {
            poll_until(RECOVERY_TIMEOUT, || {
                self.diary.check_memory(&mut walpost);
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
        self.diary.log(&fixture.name, &finished);
        self.diary.list(fixture);
        let resends = fixture.resends(self.diary.sessions(&fixture.name));
        fixture.check_delivered(&[], resends)
    }
}

/// A record of the events in a round. Its folder is removed when the round succeeds.
struct RoundLog {
    began: Instant,
    folder: PathBuf,
    faults: Mutex<Vec<Fault>>,
    memory: AtomicU64,
}

struct Fault {
    at: Duration,
    what: &'static str,
    whom: String,
}

impl RoundLog {
    fn new(seed: u64) -> Self {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("soak-{seed}"));
        fs::create_dir_all(&folder).unwrap();
        Self {
            began: Instant::now(),
            folder,
            faults: Mutex::default(),
            memory: AtomicU64::new(0),
        }
    }

    /// Records that the fault `what` is being injected into `whom`.
    fn fault(&self, what: &'static str, whom: &str) {
        lock(&self.faults).push(Fault {
            at: self.began.elapsed(),
            what,
            whom: whom.to_owned(),
        });
    }

    /// Asserts that a process is running and uses no more memory than allowed.
    fn check_memory(&self, walpost: &mut Walpost) {
        let log = walpost.log();
        assert!(walpost.is_running(), "it ended by itself:\n{log}");
        let bytes = walpost.resident_bytes();
        assert!(bytes < MEMORY_BYTES_MAX, "{bytes} bytes resident:\n{log}");
        self.memory.fetch_max(bytes, Ordering::Relaxed);
    }

    /// Saves the log of a pipeline's process.
    fn log(&self, pipeline: &str, finished: &Finished) {
        let path = self.log_of(pipeline);
        let mut log = File::options()
            .create(true)
            .append(true)
            .open(path)
            .unwrap();
        log.write_all(finished.stderr.as_bytes()).unwrap();
    }

    /// Returns how often the processes of a pipeline started to stream.
    fn sessions(&self, pipeline: &str) -> usize {
        let log = fs::read_to_string(self.log_of(pipeline)).unwrap();
        log.lines()
            .filter(|line| line.contains("streaming"))
            .count()
    }

    fn log_of(&self, pipeline: &str) -> PathBuf {
        self.folder.join(format!("{pipeline}.log"))
    }

    /// Writes lists of the committed and the delivered events.
    fn list(&self, fixture: &Fixture) {
        let mut text = String::new();
        for Committed { id, end, index } in fixture.history() {
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

    /// Keeps the folder, and adds the faults, the servers' logs and the broker's data.
    fn keep(&self, server: &Server, broker: &Broker) {
        let mut text = String::new();
        for Fault { at, what, whom } in &*lock(&self.faults) {
            writeln!(text, "{:7.3} {what} {whom}", at.as_secs_f64()).unwrap();
        }
        fs::write(self.folder.join("faults"), text).unwrap();
        fs::write(self.folder.join("postgresql.log"), server.log()).unwrap();
        fs::write(self.folder.join("kafka.log"), broker.log()).unwrap();
        copy_owned(&broker.data(), &self.folder.join("kafka"));
        eprintln!("what happened is in {}", self.folder.display());
    }
}

/// Totals of all rounds.
#[derive(Default)]
struct Report {
    rounds: usize,
    /// Failed rounds in which the broker lost the end of a transaction.
    void: usize,
    time: Duration,
    faults: BTreeMap<String, usize>,
    /// For at-least-once and for exactly-once mode.
    committed: [usize; 2],
    repeated: [usize; 2],
    memory: u64,
}

impl Report {
    fn add(&mut self, summaries: &[Summary; 2], diary: RoundLog) {
        self.rounds += 1;
        self.time += diary.began.elapsed();
        for fault in diary.faults.into_inner().unwrap() {
            *self.faults.entry(fault.what.to_owned()).or_default() += 1;
        }
        for (mode, summary) in summaries.iter().enumerate() {
            self.committed[mode] += summary.committed;
            self.repeated[mode] += summary.repeated;
        }
        self.memory = self.memory.max(diary.memory.into_inner());
        eprintln!(
            "round {} in {:.0?}: {summaries:?}",
            self.rounds,
            diary.began.elapsed()
        );
        fs::remove_dir_all(diary.folder).unwrap();
    }
}

impl fmt::Display for Report {
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

/// Sleeps for a random time, but not past `until`; returns false if `until` was reached.
fn rest(dice: &mut fastrand::Rng, millis: std::ops::Range<u64>, until: Instant) -> bool {
    let wanted = Duration::from_millis(dice.u64(millis));
    let left = until.saturating_duration_since(Instant::now());
    thread::sleep(wanted.min(left));
    wanted < left
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
