//! The results of all rounds, as stored in docs/benchmarks.json.

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

/// The latest results of each part.
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

/// The results of one part and the environment in which it was measured.
#[derive(Serialize, Deserialize)]
pub(crate) struct Part<T> {
    /// When the measurement began, in UTC.
    pub(crate) date: String,
    pub(crate) minutes: f64,
    /// The arguments that were passed to `./dev bench`.
    pub(crate) arguments: Vec<String>,
    pub(crate) machine: Machine,
    pub(crate) versions: Versions,
    pub(crate) data: T,
}

/// The results of the part `drain`.
#[derive(Serialize, Deserialize)]
pub(crate) struct Comparison {
    pub(crate) drains: Vec<Drain>,
    pub(crate) outage: Outage,
}

/// One drain of one backlog.
#[derive(Serialize, Deserialize)]
pub(crate) struct Drain {
    /// The name of the series to which the drain belongs.
    pub(crate) series: String,
    /// The value of the parameter that varies in the series. Empty for pg_recvlogical if a single
    /// measurement is used for all values.
    pub(crate) point: String,
    pub(crate) round: usize,
    pub(crate) program: String,
    pub(crate) link: Link,
    pub(crate) topic: TopicSettings,
    pub(crate) backlog: Backlog,
    pub(crate) measured: Measured,
}

/// The results of one drain. CPU and waiting times are measured from program startup until the last
/// record.
#[derive(Serialize, Deserialize)]
pub(crate) struct Measured {
    /// The number of records in the topic after the program stopped. Exceeds the number of rows if
    /// a program other than Walpost delivered some rows twice.
    pub(crate) records: usize,
    /// Time from program startup until the first record arrived.
    pub(crate) first_seconds: f64,
    /// Time from program startup until the last record arrived.
    pub(crate) last_seconds: f64,
    /// The rate between the first record and the last, or `None` if most records arrived at once.
    pub(crate) rows_per_second: Option<f64>,
    /// User and system CPU time in seconds.
    pub(crate) cpu: ByProcess,
    /// How long runnable threads waited for a processor, in seconds. Threads that exited during
    /// the drain are not included.
    pub(crate) waiting: ByProcess,
    pub(crate) peak_rss_bytes: u64,
    /// The size of the topics on the broker's disk, or 0 for pg_recvlogical, which writes to no
    /// topic.
    pub(crate) topic_bytes: u64,
}

/// The CPU time that each process used during a drain, or the time that it spent waiting for a
/// processor, in seconds.
#[derive(Serialize, Deserialize)]
pub(crate) struct ByProcess {
    pub(crate) program: f64,
    pub(crate) walsender: f64,
    pub(crate) broker: f64,
}

/// Walpost's memory usage during a drain in which the broker is frozen for a while.
#[derive(Serialize, Deserialize)]
pub(crate) struct Outage {
    pub(crate) frozen_at_seconds: f64,
    pub(crate) thawed_at_seconds: f64,
    /// Samples of the resident memory: the time since startup in seconds, and the number of bytes.
    pub(crate) rss: Vec<(f64, u64)>,
    pub(crate) rows: usize,
    pub(crate) records: usize,
}

/// The results of the part `latency`.
#[derive(Default, Serialize, Deserialize)]
pub(crate) struct Latency {
    /// The latency of records that are sent by a producer without involving a database. No measured
    /// program can achieve a lower latency.
    pub(crate) floor: Vec<Percentiles>,
    pub(crate) idle: Vec<Idle>,
    pub(crate) steady: Vec<Steady>,
}

/// A program's CPU usage while no events are written.
#[derive(Serialize, Deserialize)]
pub(crate) struct Idle {
    pub(crate) program: String,
    pub(crate) link: Link,
    pub(crate) seconds: f64,
    pub(crate) cpu_seconds: f64,
}

/// A program's results at a steady rate of single-row transactions.
#[derive(Serialize, Deserialize)]
pub(crate) struct Steady {
    pub(crate) program: String,
    pub(crate) link: Link,
    pub(crate) round: usize,
    pub(crate) per_second: u32,
    pub(crate) seconds: f64,
    pub(crate) records: usize,
    /// Latency measured from the `clock_timestamp()` that the INSERT stores.
    pub(crate) from_insert: Percentiles,
    /// Latency measured from the time at which the transaction was scheduled to start.
    pub(crate) from_schedule: Percentiles,
    /// Time from sending the INSERT until the session received the result of the commit.
    pub(crate) commit: Percentiles,
    /// The CPU time that the program used during the measurement, which took `seconds`.
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

/// The results of the part `tables`.
#[derive(Serialize, Deserialize)]
pub(crate) struct Tables {
    pub(crate) drains: Vec<Drain>,
    /// For each added table, the time it took to add the empty table and deliver its first event to
    /// Kafka, in seconds.
    pub(crate) added_seconds: Vec<f64>,
    /// Results with one slot and with many slots, while rows are written to a table that is not an
    /// outbox.
    pub(crate) fleets: Vec<Fleet>,
    /// Results while nothing is written to the database.
    pub(crate) idle: Fleet,
}

/// The cost of pipelines that have no events to deliver.
#[derive(Serialize, Deserialize)]
pub(crate) struct Fleet {
    pub(crate) round: usize,
    /// The number of slots, each of which has its own pipeline.
    pub(crate) slots: usize,
    pub(crate) tables: usize,
    /// The number of rows written to a table that is not an outbox.
    pub(crate) rows: usize,
    pub(crate) walsenders_cpu: f64,
    /// Walpost's CPU time, measured over the same period as the walsenders' CPU time: from before
    /// the first row is written until all walsenders have reached the end of the WAL, or for
    /// `seconds` if no rows are written.
    pub(crate) program_cpu: f64,
    /// Time from the last row until all walsenders have reached the end of the WAL. If no rows are
    /// written, the duration of the measurement.
    pub(crate) seconds: f64,
    pub(crate) threads: usize,
    pub(crate) rss_bytes: u64,
}

/// The results of one process that delivers the backlogs of several databases.
#[derive(Serialize, Deserialize)]
pub(crate) struct Shards {
    pub(crate) round: usize,
    pub(crate) pipelines: usize,
    /// The total number of rows across all pipelines.
    pub(crate) rows: usize,
    /// The total rate, measured from the first record of any pipeline until the last record.
    pub(crate) rows_per_second: f64,
    pub(crate) program_cpu: f64,
    pub(crate) broker_cpu: f64,
    pub(crate) threads: usize,
    pub(crate) peak_rss_bytes: u64,
    /// The number of records delivered by the slowest pipeline, divided by the average of all
    /// pipelines, at the time when half of all records had arrived. A low value means that the
    /// pipeline was starved.
    pub(crate) least_at_half: f64,
    /// Like `least_at_half`, but for the fastest pipeline.
    pub(crate) most_at_half: f64,
}

/// The load that one delivery method puts on the database.
#[derive(Serialize, Deserialize)]
pub(crate) struct Cost {
    pub(crate) way: String,
    pub(crate) round: usize,
    pub(crate) events: usize,
    /// How long it took to commit all events.
    pub(crate) write_seconds: f64,
    /// How long it took until all events were in Kafka, or `None` if this delivery method does not
    /// deliver events.
    pub(crate) carry_seconds: Option<f64>,
    /// User and system CPU time of the sessions that write events, in seconds.
    pub(crate) writers_cpu: f64,
    /// CPU time of the walsender or of the polling session.
    pub(crate) reader_cpu: f64,
    /// CPU time of all other server processes.
    pub(crate) rest_cpu: f64,
    pub(crate) wal_bytes: u64,
    /// The size of the table and its indexes after all events have been delivered.
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

    /// Returns the machine and the program versions used to measure this part.
    pub(crate) fn setting(&self) -> (&Machine, &Versions) {
        (&self.machine, &self.versions)
    }
}

impl Results {
    /// Loads the stored results. Returns empty results if `is_needed` is false or nothing has been
    /// stored yet.
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

/// Returns the directory that contains the stored results and the generated page.
pub(crate) fn docs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("docs")
}

fn file() -> PathBuf {
    docs().join("benchmarks.json")
}
