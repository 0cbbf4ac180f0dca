//! The `shards` part compares a process that delivers the backlogs of many databases concurrently
//! with a process that delivers the same number of rows from a single database.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use crate::args::Args;
use crate::backlog::{self, PUBLICATION, Shape, Slot, TABLE};
use crate::bed::{DATABASE, TestBed};
use crate::program::Running;
use crate::results::Shards;
use crate::support::postgres::{MAJOR, Server};
use crate::support::session::Session;
use crate::topic::{self, Topic, TopicSettings};
use crate::usage::{MEBIBYTE, cpu_seconds, family_cpu_seconds, family_peak_bytes, threads};

const ROWS: usize = 1_000_000;
/// The settings of each database's server. Databases don't share a server, because each walsender
/// would then have to read the WAL of all databases.
const POSTGRES_SETTINGS: &str =
    "shared_buffers = 32MB\nmax_wal_size = 16GB\ncheckpoint_timeout = 1h\n";

pub(crate) fn measure(bed: &TestBed, args: &Args) -> Vec<Shards> {
    let many = if args.quick { 3 } else { 50 };
    let rows = args.scaled(ROWS);
    let fleets = [Fleet::new(bed, 1, rows), Fleet::new(bed, many, rows)];
    let mut measured = Vec::new();
    // The first round is discarded, because it includes the time that the broker takes to create
    // the partitions' files.
    for round in 0..=args.rounds() {
        for fleet in &fleets {
            let shards = fleet.drain(round);
            eprintln!(
                "  {} pipelines: {:.0} rows/s, {:.2} s of CPU, {} threads, {:.1} MiB",
                shards.pipelines,
                shards.rows_per_second,
                shards.program_cpu,
                shards.threads,
                shards.peak_rss_bytes as f64 / MEBIBYTE
            );
            if round > 0 {
                measured.push(shards);
            }
        }
    }
    measured
}

struct Fleet<'a> {
    bed: &'a TestBed,
    shards: Vec<Shard<'a>>,
    rows: usize,
}

struct Shard<'a> {
    server: Server,
    db: Session,
    topic: Topic<'a>,
}

impl<'a> Fleet<'a> {
    fn new(bed: &'a TestBed, count: usize, rows: usize) -> Self {
        let settings = TopicSettings {
            partitions: if count == 1 { 3 } else { 1 },
            ..TopicSettings::default()
        };
        let shards = (0..count).map(|_| {
            let server = Server::private(MAJOR, POSTGRES_SETTINGS);
            let db = server.session(DATABASE);
            db.run("SET synchronous_commit = off");
            backlog::install(&db);
            backlog::fill(&db, Shape::with_rows(rows / count));
            Shard {
                server,
                db,
                topic: Topic::new(bed, &settings),
            }
        });
        Self {
            bed,
            shards: shards.collect(),
            rows: rows / count * count,
        }
    }

    /// Drains all backlogs with a single Walpost process.
    fn drain(&self, round: usize) -> Shards {
        let mut text = String::new();
        let slots: Vec<_> = self
            .shards
            .iter()
            .map(|shard| Slot::at_backlog(&shard.db))
            .collect();
        for (shard, slot) in self.shards.iter().zip(&slots) {
            write!(
                text,
                "[[pipeline]]\nname = \"{0}\"\nslot = \"{0}\"\npostgres = \"{1}\"\ntopic = \"{2}\"\n\
                 table = \"{TABLE}\"\npublication = \"{PUBLICATION}\"\nsnapshot = \"never\"\n",
                slot.name,
                shard.server.conninfo(DATABASE),
                shard.topic.name
            )
            .unwrap();
        }
        let before = self.records();
        let broker = self.bed.broker.process_id();
        let broker_before = cpu_seconds(broker).unwrap();
        let mut running = Running::start_pipelines(self.bed, &text);
        let began = Instant::now();
        let mut samples = Vec::new();
        running.wait_until("the last record", Duration::from_millis(10), || {
            let now: Vec<_> = self
                .records()
                .iter()
                .zip(&before)
                .map(|(now, before)| now - before)
                .collect();
            let all: usize = now.iter().sum();
            if all > 0 {
                samples.push((began.elapsed().as_secs_f64(), all, now));
            }
            all >= self.rows
        });
        let pid = running.process_id();
        let program_cpu = family_cpu_seconds(pid);
        let broker_cpu = cpu_seconds(broker).unwrap() - broker_before;
        let (first, last) = (&samples[0], &samples[samples.len() - 1]);
        let half = samples
            .iter()
            .find(|(_, all, _)| *all >= self.rows / 2)
            .unwrap();
        let share = |records: usize| (records * self.shards.len()) as f64 / half.1 as f64;
        let shards = Shards {
            round,
            pipelines: self.shards.len(),
            rows: self.rows,
            rows_per_second: (last.1 - first.1) as f64 / (last.0 - first.0),
            program_cpu,
            broker_cpu,
            threads: threads(pid),
            peak_rss_bytes: family_peak_bytes(pid),
            least_at_half: share(*half.2.iter().min().unwrap()),
            most_at_half: share(*half.2.iter().max().unwrap()),
        };
        running.stop();
        let after: usize = self.records().iter().sum();
        assert_eq!(after - before.iter().sum::<usize>(), self.rows, "records");
        shards
    }

    /// Returns the number of records in each pipeline's topic.
    fn records(&self) -> Vec<usize> {
        let topics: Vec<_> = self.shards.iter().map(|shard| &shard.topic).collect();
        topic::records(&topics)
    }
}
