//! What was measured, as docs/benchmarks.json keeps it: every round of everything.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::backlog::Backlog;
use crate::bed::Bed;
use crate::machine::{Machine, Versions};
use crate::profile::Profile;
use crate::program::Link;
use crate::topic::TopicSettings;

/// The parts, each as it was last measured.
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

/// What was measured in one go, and where.
#[derive(Serialize, Deserialize)]
pub(crate) struct Part<T> {
    /// When it began, in UTC.
    pub(crate) date: String,
    pub(crate) minutes: f64,
    /// What followed `./dev bench`.
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
    /// Drains of one series were measured in turn.
    pub(crate) series: String,
    /// What differs within the series; empty for the limit where that is the same for all.
    pub(crate) point: String,
    pub(crate) round: usize,
    pub(crate) program: String,
    pub(crate) link: Link,
    pub(crate) topic: TopicSettings,
    pub(crate) backlog: Backlog,
    pub(crate) measured: Measured,
}

/// What one drain took. Costs are those from the program's start to its last record.
#[derive(Serialize, Deserialize)]
pub(crate) struct Measured {
    /// Records in the topic after the program has stopped.
    pub(crate) records: usize,
    /// From the program's start to the first record.
    pub(crate) first_seconds: f64,
    /// From the program's start to the last record.
    pub(crate) last_seconds: f64,
    /// From the first record to the last; `None` where most came at once.
    pub(crate) rows_per_second: Option<f64>,
    /// User and system seconds.
    pub(crate) cpu: ByProcess,
    /// Seconds in which a thread could run and had no processor; of the broker's, those threads that
    /// are there at the end.
    pub(crate) waiting: ByProcess,
    pub(crate) peak_rss_bytes: u64,
    /// The topic on the broker's disk; 0 for the limit.
    pub(crate) topic_bytes: u64,
}

/// Seconds of the processes of a drain.
#[derive(Serialize, Deserialize)]
pub(crate) struct ByProcess {
    pub(crate) program: f64,
    pub(crate) walsender: f64,
    pub(crate) broker: f64,
}

/// Walpost's memory while the broker does not answer, amid a drain.
#[derive(Serialize, Deserialize)]
pub(crate) struct Outage {
    pub(crate) frozen_at_seconds: f64,
    pub(crate) thawed_at_seconds: f64,
    /// Seconds since the start, resident bytes.
    pub(crate) rss: Vec<(f64, u64)>,
    pub(crate) rows: usize,
    pub(crate) records: usize,
}

/// The part `latency`.
#[derive(Default, Serialize, Deserialize)]
pub(crate) struct Latency {
    /// From a producer to the consumer, without database and connector.
    pub(crate) floor: Vec<Percentiles>,
    pub(crate) idle: Vec<Idle>,
    pub(crate) steady: Vec<Steady>,
}

/// A program that has nothing to do.
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
    /// From `clock_timestamp()` in the INSERT.
    pub(crate) from_insert: Percentiles,
    /// From when the transaction was due.
    pub(crate) from_schedule: Percentiles,
    /// From when the session began with the INSERT until it knew of the commit.
    pub(crate) commit: Percentiles,
    /// The program's, over `seconds`.
    pub(crate) cpu_seconds: f64,
    pub(crate) rss_bytes: u64,
}

/// In milliseconds.
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
    /// From before an empty table is added until its first event is in Kafka.
    pub(crate) added_seconds: Vec<f64>,
    /// While others write, with one slot and with many.
    pub(crate) fleets: Vec<Fleet>,
    /// While nothing is written.
    pub(crate) idle: Fleet,
}

/// Pipelines without an event.
#[derive(Serialize, Deserialize)]
pub(crate) struct Fleet {
    pub(crate) round: usize,
    /// Each with a pipeline.
    pub(crate) slots: usize,
    pub(crate) tables: usize,
    /// Rows that were written into a table that is no outbox.
    pub(crate) rows: usize,
    pub(crate) walsenders_cpu: f64,
    /// Walpost's, as that of the walsenders: from before the first row until all of them are at the end, or over `seconds`.
    pub(crate) program_cpu: f64,
    /// After the last row, until all walsenders were at the end; without rows, how long it was looked at.
    pub(crate) seconds: f64,
    pub(crate) threads: usize,
    pub(crate) rss_bytes: u64,
}

/// Backlogs of several databases, carried by one process.
#[derive(Serialize, Deserialize)]
pub(crate) struct Shards {
    pub(crate) round: usize,
    pub(crate) pipelines: usize,
    /// Of all of them.
    pub(crate) rows: usize,
    /// From the first record of any to the last of all.
    pub(crate) rows_per_second: f64,
    pub(crate) program_cpu: f64,
    pub(crate) broker_cpu: f64,
    pub(crate) threads: usize,
    pub(crate) peak_rss_bytes: u64,
    /// When half of all records were there: what the last and the first of the pipelines had, of the average.
    pub(crate) least_at_half: f64,
    pub(crate) most_at_half: f64,
}

/// What one way of carrying events cost the database.
#[derive(Serialize, Deserialize)]
pub(crate) struct Cost {
    pub(crate) way: String,
    pub(crate) round: usize,
    pub(crate) events: usize,
    /// Until all events were committed.
    pub(crate) write_seconds: f64,
    /// Until all were in Kafka; `None` where nothing carried them.
    pub(crate) carry_seconds: Option<f64>,
    /// User and system seconds of the sessions that wrote.
    pub(crate) writers_cpu: f64,
    /// Of the walsender, or of the session that polled.
    pub(crate) reader_cpu: f64,
    /// Of every other process of the server.
    pub(crate) rest_cpu: f64,
    pub(crate) wal_bytes: u64,
    /// The table with its indexes, afterwards.
    pub(crate) table_bytes: u64,
    pub(crate) dead_tuples: u64,
    pub(crate) vacuum_cpu: f64,
}

impl<T> Part<T> {
    pub(crate) fn new(bed: &Bed, began: Instant, data: T) -> Self {
        let now = jiff::Timestamp::now();
        let elapsed = began.elapsed();
        Self {
            date: (now - elapsed).strftime("%Y-%m-%d %H:%M").to_string(),
            minutes: elapsed.as_secs_f64() / 60.0,
            arguments: std::env::args()
                .skip(1)
                .filter(|argument| argument != "--bench")
                .collect(),
            machine: Machine::this(),
            versions: Versions::of(bed),
            data,
        }
    }

    /// Where it was measured, and of what.
    pub(crate) fn setting(&self) -> (&Machine, &Versions) {
        (&self.machine, &self.versions)
    }
}

impl Results {
    /// What the file has, or nothing where it is not wanted or not there.
    pub(crate) fn load_if(wanted: bool) -> Self {
        if !wanted || !file().exists() {
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

/// Where results and what is made of them go.
pub(crate) fn docs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("docs")
}

fn file() -> PathBuf {
    docs().join("benchmarks.json")
}
