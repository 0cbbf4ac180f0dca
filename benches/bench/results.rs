//! The measurements of all rounds, as stored in docs/benchmarks.json.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::backlog::Backlog;
use crate::bed::TestBed;
use crate::machine::{Machine, Versions};
use crate::profile::Profile;
use crate::program::Link;
use crate::topic::TopicSettings;

/// The last measurement of each part.
#[derive(Default, Serialize, Deserialize)]
pub(crate) struct Results {
    pub(crate) drain: Option<Part<Comparison>>,
    pub(crate) latency: Option<Part<Latency>>,
    pub(crate) growth: Option<Part<Vec<Drain>>>,
    pub(crate) forms: Option<Part<Vec<Drain>>>,
    pub(crate) tuned: Option<Part<Vec<Drain>>>,
    pub(crate) database: Option<Part<Vec<Cost>>>,
    pub(crate) tables: Option<Part<Tables>>,
    pub(crate) shards: Option<Part<Vec<Shards>>>,
    pub(crate) profile: Option<Part<Profile>>,
}

/// The result of measuring one part, and its environment.
#[derive(Serialize, Deserialize)]
pub(crate) struct Part<T> {
    /// The time at which the measurement began, in UTC.
    pub(crate) date: String,
    pub(crate) minutes: f64,
    /// The arguments of `./dev bench`.
    pub(crate) arguments: Vec<String>,
    pub(crate) machine: Machine,
    pub(crate) versions: Versions,
    pub(crate) data: T,
}

/// The part `drain`.
#[derive(Serialize, Deserialize)]
pub(crate) struct Comparison {
    pub(crate) drains: Vec<Drain>,
    pub(crate) outage: Outage,
}

/// One drain of one backlog.
#[derive(Serialize, Deserialize)]
pub(crate) struct Drain {
    /// The series. Drains of one series were measured in turn.
    pub(crate) series: String,
    /// The value of the parameter that varies in the series. Empty for a limit that applies to all
    /// values.
    pub(crate) point: String,
    pub(crate) round: usize,
    pub(crate) program: String,
    pub(crate) link: Link,
    pub(crate) topic: TopicSettings,
    pub(crate) backlog: Backlog,
    pub(crate) measured: Measured,
}

/// The measurements of one drain. Costs cover the time from the program's start until its last
/// record.
#[derive(Serialize, Deserialize)]
pub(crate) struct Measured {
    /// The number of records in the topic after the program has stopped.
    pub(crate) records: usize,
    /// Time from the program's start until the first record.
    pub(crate) first_seconds: f64,
    /// Time from the program's start until the last record.
    pub(crate) last_seconds: f64,
    /// The rate from the first record to the last, or `None` if most records arrived at once.
    pub(crate) rows_per_second: Option<f64>,
    /// User and system CPU time in seconds.
    pub(crate) cpu: ByProcess,
    /// Time that threads spent waiting for a processor, in seconds. For the broker, only threads
    /// that exist at the end are counted.
    pub(crate) waiting: ByProcess,
    pub(crate) peak_rss_bytes: u64,
    /// The topic's size on the broker's disk, or 0 for the limit.
    pub(crate) topic_bytes: u64,
}

/// Seconds for each process of a drain.
#[derive(Serialize, Deserialize)]
pub(crate) struct ByProcess {
    pub(crate) program: f64,
    pub(crate) walsender: f64,
    pub(crate) broker: f64,
}

/// Walpost's memory while the broker does not respond, in the middle of a drain.
#[derive(Serialize, Deserialize)]
pub(crate) struct Outage {
    pub(crate) frozen_at_seconds: f64,
    pub(crate) thawed_at_seconds: f64,
    /// Samples of the resident memory: seconds since startup, and bytes.
    pub(crate) rss: Vec<(f64, u64)>,
    pub(crate) rows: usize,
    pub(crate) records: usize,
}

/// The part `latency`.
#[derive(Default, Serialize, Deserialize)]
pub(crate) struct Latency {
    /// The latency from a producer to the consumer, without a database or connector.
    pub(crate) floor: Vec<Percentiles>,
    pub(crate) idle: Vec<Idle>,
    pub(crate) steady: Vec<Steady>,
}

/// An idle program.
#[derive(Serialize, Deserialize)]
pub(crate) struct Idle {
    pub(crate) program: String,
    pub(crate) link: Link,
    pub(crate) seconds: f64,
    pub(crate) cpu_seconds: f64,
}

/// A program at a steady rate of single-row transactions.
#[derive(Serialize, Deserialize)]
pub(crate) struct Steady {
    pub(crate) program: String,
    pub(crate) link: Link,
    pub(crate) round: usize,
    pub(crate) per_second: u32,
    pub(crate) seconds: f64,
    pub(crate) records: usize,
    /// Latency from `clock_timestamp()` in the INSERT.
    pub(crate) from_insert: Percentiles,
    /// Latency from the time at which the transaction was due.
    pub(crate) from_schedule: Percentiles,
    /// Time from the start of the INSERT until the session received the result of the commit.
    pub(crate) commit: Percentiles,
    /// The program's CPU time over `seconds`.
    pub(crate) cpu_seconds: f64,
    pub(crate) rss_bytes: u64,
}

/// Percentiles in milliseconds.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Percentiles {
    pub(crate) p50: f64,
    pub(crate) p90: f64,
    pub(crate) p99: f64,
    pub(crate) p99_9: f64,
    pub(crate) max: f64,
}

/// The part `tables`.
#[derive(Serialize, Deserialize)]
pub(crate) struct Tables {
    pub(crate) drains: Vec<Drain>,
    /// Time from before adding an empty table until its first event is in Kafka.
    pub(crate) added_seconds: Vec<f64>,
    /// Measurements with one slot and with many slots, while rows are written to another table.
    pub(crate) fleets: Vec<Fleet>,
    /// The measurement while nothing is written.
    pub(crate) idle: Fleet,
}

/// Pipelines without events.
#[derive(Serialize, Deserialize)]
pub(crate) struct Fleet {
    pub(crate) round: usize,
    /// The number of slots, each with a pipeline.
    pub(crate) slots: usize,
    pub(crate) tables: usize,
    /// The number of rows written to a table that is not an outbox.
    pub(crate) rows: usize,
    pub(crate) walsenders_cpu: f64,
    /// CPU time of Walpost. Like the CPU time of the walsenders, it covers the time from before the
    /// first row until all walsenders have reached the end of the WAL, or without rows, `seconds`.
    pub(crate) program_cpu: f64,
    /// Time from the last row until all walsenders have reached the end of the WAL, or without
    /// rows, the duration of the measurement.
    pub(crate) seconds: f64,
    pub(crate) threads: usize,
    pub(crate) rss_bytes: u64,
}

/// Backlogs of several databases, delivered by one process.
#[derive(Serialize, Deserialize)]
pub(crate) struct Shards {
    pub(crate) round: usize,
    pub(crate) pipelines: usize,
    /// The total number of rows of all pipelines.
    pub(crate) rows: usize,
    /// The rate from the first record of any pipeline to the last record of all.
    pub(crate) rows_per_second: f64,
    pub(crate) program_cpu: f64,
    pub(crate) broker_cpu: f64,
    pub(crate) threads: usize,
    pub(crate) peak_rss_bytes: u64,
    /// The number of records of the slowest pipeline relative to the average, when half of all
    /// records had arrived.
    pub(crate) least_at_half: f64,
    /// The same ratio for the fastest pipeline.
    pub(crate) most_at_half: f64,
}

/// The cost of one delivery method for the database.
#[derive(Serialize, Deserialize)]
pub(crate) struct Cost {
    pub(crate) way: String,
    pub(crate) round: usize,
    pub(crate) events: usize,
    /// Time until all events were committed.
    pub(crate) write_seconds: f64,
    /// Time until all events were in Kafka, or `None` if they were not delivered.
    pub(crate) carry_seconds: Option<f64>,
    /// User and system CPU time of the sessions that write events, in seconds.
    pub(crate) writers_cpu: f64,
    /// CPU time of the walsender, or of the session that polls.
    pub(crate) reader_cpu: f64,
    /// CPU time of all other processes of the server.
    pub(crate) rest_cpu: f64,
    pub(crate) wal_bytes: u64,
    /// The size of the table and its indexes after all events were delivered.
    pub(crate) table_bytes: u64,
    pub(crate) dead_tuples: u64,
    pub(crate) vacuum_cpu: f64,
}

impl<T> Part<T> {
    pub(crate) fn new(bed: &TestBed, began: Instant, data: T) -> Self {
        let now = jiff::Timestamp::now();
        let elapsed = began.elapsed();
        Self {
            date: (now - elapsed).strftime("%Y-%m-%d %H:%M").to_string(),
            minutes: elapsed.as_secs_f64() / 60.0,
            arguments: std::env::args()
                .skip(1)
                .filter(|argument| argument != "--bench")
                .collect(),
            machine: Machine::current(),
            versions: Versions::query(bed),
            data,
        }
    }

    /// Returns the machine and the versions of the programs.
    pub(crate) fn setting(&self) -> (&Machine, &Versions) {
        (&self.machine, &self.versions)
    }
}

impl Results {
    /// Loads the file if `is_needed` is true. Otherwise, or if the file does not exist, returns
    /// empty results.
    pub(crate) fn load_if(is_needed: bool) -> Self {
        if !is_needed || !file().exists() {
            return Self::default();
        }
        serde_json::from_slice(&fs::read(file()).unwrap())
            .unwrap_or_else(|error| panic!("{}: {error}", file().display()))
    }

    pub(crate) fn save(&self) {
        fs::create_dir_all(docs()).unwrap();
        let mut json = serde_json::to_vec_pretty(self).unwrap();
        json.push(b'\n');
        fs::write(file(), json).unwrap();
    }
}

/// Returns the directory of the results and the generated files.
pub(crate) fn docs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("docs")
}

fn file() -> PathBuf {
    docs().join("benchmarks.json")
}
