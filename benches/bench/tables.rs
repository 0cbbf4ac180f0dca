//! The `tables` part compares many outbox tables that share one slot with a single table and with
//! one slot per table. The part also measures many idle pipelines.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::args::Args;
use crate::backlog::{self, Kind, Shape, Slot, TABLES_PUBLICATION};
use crate::bed::TestBed;
use crate::drain::{self, Lap};
use crate::program::{Link, Program, Running, Task};
use crate::results::{Drain, Fleet, Tables};
use crate::support::walpost::{Invocation, config_file};
use crate::topic::{Topic, TopicSettings};
use crate::usage::{MEBIBYTE, cpu_seconds, family_cpu_seconds, family_resident_bytes, threads};

pub(crate) const SERIES: &str = "tables";

/// Number of rows written to a table that is not an outbox. No slot delivers these rows, but every
/// walsender has to read past them.
const UNRELATED: usize = 300_000;
/// The number of tables that are added to the publication while Walpost is running.
const ADDED: usize = 10;
/// How long the resource usage of idle pipelines is measured.
const IDLE: Duration = Duration::from_secs(30);

/// The pipeline settings that select all outbox tables of the benchmark.
const SETTINGS: &str = "tables = [\"bench_*.outbox\"]";

pub(crate) fn measure(bed: &TestBed, args: &Args) -> Tables {
    let (some, many) = match args.quick {
        true => (5, 20),
        false => (50, 1_000),
    };
    install(bed, many);
    let walpost = args.walpost(Link::Unix).with_settings(SETTINGS);
    let mut drains: Vec<Drain> = Vec::new();
    // Each round writes its own backlogs. If a backlog were kept for all rounds, the measurements
    // to be compared with each other would be much further apart in time.
    for round in 0..args.rounds() {
        for tables in [1, some, many] {
            let shape = Shape {
                kind: Kind::Tables,
                types: tables,
                ..Shape::with_rows(args.rows())
            };
            let backlog = backlog::fill(&bed.db, shape);
            let point = tables.to_string();
            let laps = Lap::with_limit(walpost.clone(), TopicSettings::default(), &point);
            drains.extend(drain::rounds(
                bed,
                SERIES,
                &backlog,
                &laps,
                round..round + 1,
            ));
        }
    }
    backlog::empty(&bed.db);
    let added_seconds = measure_added_tables(bed, &walpost, many);
    let mut fleets = Vec::new();
    for round in 0..args.rounds() {
        for slots in [1, some] {
            let fleet = measure_unrelated_writes(bed, args, slots, some, round);
            print_fleet(&fleet);
            fleets.push(fleet);
        }
    }
    let pipelines = if args.quick { 10 } else { 500 };
    let idle = measure_idle(bed, pipelines);
    print_fleet(&idle);
    remove(bed, many + ADDED);
    Tables {
        drains,
        added_seconds,
        fleets,
        idle,
    }
}

fn print_fleet(fleet: &Fleet) {
    eprintln!(
        "  {} slots for {} tables: walsenders {:.2} s of CPU, Walpost {:.2} s, after {:.2} s; {} threads, {:.1} MiB",
        fleet.slots,
        fleet.tables,
        fleet.walsenders_cpu,
        fleet.program_cpu,
        fleet.seconds,
        fleet.threads,
        fleet.rss_bytes as f64 / MEBIBYTE
    );
}

/// Creates a publication with `many` tables, and [`ADDED`] more tables that are added to the
/// publication later.
fn install(bed: &TestBed, many: usize) {
    let all = many + ADDED;
    bed.db.run(&format!(
        "DO $$ BEGIN FOR i IN 1..{all} LOOP
           EXECUTE format('CREATE SCHEMA bench_%s', i);
           EXECUTE format('CREATE TABLE bench_%s.outbox (LIKE public.outbox INCLUDING ALL)', i);
           COMMIT;
         END LOOP; END $$"
    ));
    bed.db.run("CREATE TABLE unrelated (id bigint, note text)");
    // `init` also creates a slot, which is dropped below because the benchmark does not need it.
    let file = config_file(format!("[[pipeline]]\n{SETTINGS}\n"));
    Invocation::new(["init", "--no-role", "--slot", "bench_init"])
        .args(["--config", file.to_str().unwrap()])
        .args(["--publication", TABLES_PUBLICATION])
        .args(["--postgres", &bed.conninfo(Link::Unix)])
        .finish()
        .expect_code(0);
    bed.db.run("SELECT pg_drop_replication_slot('bench_init')");
    bed.db.run(&format!(
        "DO $$ BEGIN FOR i IN 1..{many} LOOP
           EXECUTE format('ALTER PUBLICATION {TABLES_PUBLICATION} ADD TABLE bench_%s.outbox', i);
         END LOOP; END $$"
    ));
}

fn remove(bed: &TestBed, all: usize) {
    bed.db.run(&format!(
        "DO $$ BEGIN FOR i IN 1..{all} LOOP
           EXECUTE format('DROP SCHEMA bench_%s CASCADE', i);
           COMMIT;
         END LOOP; END $$"
    ));
    bed.db
        .run("DROP TABLE unrelated; SET client_min_messages = warning");
    bed.db
        .run(&format!("DROP PUBLICATION {TABLES_PUBLICATION}"));
}

/// Adds several tables, one at a time. For each table, returns the time from the start of adding
/// the table until its first event was in Kafka, in seconds.
fn measure_added_tables(bed: &TestBed, walpost: &Program, many: usize) -> Vec<f64> {
    let slot = Slot::at_end(&bed.db);
    let topic = Topic::new(bed, &TopicSettings::default());
    let mut running = walpost.start(bed, &Task::new(Kind::Tables, &slot, &topic));
    let mut wait_for_records = |records: usize| {
        let every = Duration::from_millis(1);
        running.wait_until("records", every, || topic.records() >= records);
    };
    let insert = |table: usize| {
        bed.db.run(&format!(
            "INSERT INTO bench_{table}.outbox VALUES (gen_random_uuid(), 'order', '1', 'OrderCreated', '{{}}')"
        ));
    };
    // Waits until Walpost is streaming, so that its startup is not measured.
    insert(1);
    wait_for_records(1);
    let seconds = (1..=ADDED).map(|number| {
        let table = many + number;
        let began = Instant::now();
        bed.db.run(&format!(
            "SELECT walpost.add_outbox('bench_{table}.outbox', '{TABLES_PUBLICATION}')"
        ));
        insert(table);
        wait_for_records(1 + number);
        began.elapsed().as_secs_f64()
    });
    let seconds: Vec<_> = seconds.collect();
    running.stop();
    eprintln!("  first event of each newly added table: {seconds:.3?} s");
    seconds
}

/// Running pipelines and their slots.
struct Pipelines<'a> {
    bed: &'a TestBed,
    slots: Vec<Slot<'a>>,
    running: Running,
    pid: u32,
}

impl<'a> Pipelines<'a> {
    /// Starts one pipeline per slot. If there is only one pipeline, it reads all tables. If there
    /// are several pipelines, each of them reads one table.
    fn start(bed: &'a TestBed, slots: usize, tables: usize) -> Self {
        let slots: Vec<_> = (0..slots).map(|_| Slot::at_end(&bed.db)).collect();
        let mut text = String::new();
        for (index, slot) in slots.iter().enumerate() {
            let table = index + 1;
            let outbox = match slots.len() {
                // A pipeline with several tables never takes a snapshot, so `snapshot` must not be
                // set.
                1 => format!("{SETTINGS}\npublication = \"{TABLES_PUBLICATION}\""),
                _ => {
                    bed.db.run(&format!(
                        "CREATE PUBLICATION bench_{table} FOR TABLE bench_{table}.outbox WITH (publish = 'insert')"
                    ));
                    format!(
                        "table = \"bench_{table}.outbox\"\npublication = \"bench_{table}\"\nsnapshot = \"never\""
                    )
                }
            };
            write!(
                text,
                "[[pipeline]]\nname = \"p{table}\"\nslot = \"{}\"\npostgres = \"{}\"\ntopic = \"unused\"\n{outbox}\n",
                slot.name,
                bed.conninfo(Link::Unix)
            )
            .unwrap();
        }
        assert!(
            slots.len() == 1 || slots.len() == tables,
            "each slot needs a table"
        );
        let mut running = Running::start_pipelines(bed, &text);
        running.wait_until("all pipelines to stream", Duration::from_millis(50), || {
            walsenders(bed).len() >= slots.len()
        });
        let pid = running.process_id();
        Self {
            bed,
            slots,
            running,
            pid,
        }
    }

    fn stop(self) {
        self.running.stop();
        if self.slots.len() > 1 {
            for table in 1..=self.slots.len() {
                self.bed.db.run(&format!("DROP PUBLICATION bench_{table}"));
            }
        }
    }
}

/// Returns the position up to which each walsender has sent the WAL, by PID.
fn walsenders(bed: &TestBed) -> BTreeMap<u32, u64> {
    let rows = bed.db.rows(
        "SELECT pid, (sent_lsn - '0/0')::bigint FROM pg_stat_replication WHERE state = 'streaming'",
    );
    let number = |text: &Option<String>| text.as_ref().and_then(|text| text.parse().ok());
    rows.iter()
        .filter_map(|row| Some((u32::try_from(number(&row[0])?).ok()?, number(&row[1])?)))
        .collect()
}

/// Measures how much CPU time pipelines use while many rows are written to a table that is not an
/// outbox.
fn measure_unrelated_writes(
    bed: &TestBed,
    args: &Args,
    slots: usize,
    tables: usize,
    round: usize,
) -> Fleet {
    let mut pipelines = Pipelines::start(bed, slots, tables);
    let pid = pipelines.pid;
    let cpu = || {
        let walsenders = walsenders(bed);
        let seconds = walsenders.keys().filter_map(|pid| cpu_seconds(*pid));
        (seconds.sum::<f64>(), family_cpu_seconds(pid))
    };
    let (walsenders_before, program_before) = cpu();
    let rows = args.scaled(UNRELATED);
    bed.db.run(&format!(
        "DO $$ BEGIN FOR i IN 1..{rows} / 100 LOOP
           INSERT INTO unrelated SELECT n, 'note-' || n FROM generate_series(1, 100) n;
           COMMIT;
         END LOOP; END $$"
    ));
    let began = Instant::now();
    let end = backlog::position(&bed.db);
    let running = &mut pipelines.running;
    running.wait_until(
        "the walsenders to reach the end of the WAL",
        Duration::from_millis(10),
        || walsenders(bed).values().all(|sent| *sent >= end),
    );
    let seconds = began.elapsed().as_secs_f64();
    let (walsenders_after, program_after) = cpu();
    let fleet = Fleet {
        round,
        slots,
        tables,
        rows,
        walsenders_cpu: walsenders_after - walsenders_before,
        program_cpu: program_after - program_before,
        seconds,
        threads: threads(pid),
        rss_bytes: family_resident_bytes(pid),
    };
    pipelines.stop();
    bed.db.run("TRUNCATE unrelated");
    fleet
}

/// Measures how much CPU time and memory idle pipelines use.
fn measure_idle(bed: &TestBed, count: usize) -> Fleet {
    let pipelines = Pipelines::start(bed, count, count);
    sleep(IDLE / 2);
    let cpu = || family_cpu_seconds(pipelines.pid);
    let before = cpu();
    sleep(IDLE);
    let program_cpu = cpu() - before;
    let fleet = Fleet {
        round: 0,
        slots: count,
        tables: count,
        rows: 0,
        walsenders_cpu: 0.0,
        program_cpu,
        seconds: IDLE.as_secs_f64(),
        threads: threads(pipelines.pid),
        rss_bytes: family_resident_bytes(pipelines.pid),
    };
    pipelines.stop();
    fleet
}
