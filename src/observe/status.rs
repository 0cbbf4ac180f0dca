//! How the program is at one moment: what `/status` answers, and what metrics, readiness and the
//! page are made of.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::health;
use super::history::Recent;
use super::summary::Summary;
use super::watchdog::Lasting;
use crate::delivery::histogram::Counts;
use crate::delivery::stats::{About, PipelineStats};
use crate::model::dead_letters::{DeadLetterCounts, LastDeadLetter};
use crate::model::dropped_slot::DroppedSlot;
use crate::model::lifecycle::{Failure, Outage, SnapshotPhase, State};
use crate::model::lsn::Lsn;
use crate::model::set_aside::SetAside;
use crate::model::time::seconds;

/// The whole process. Times are seconds since 1970, durations seconds, sizes bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Walpost's version.
    pub version: String,
    /// When it was started.
    pub started_at: f64,
    pub now: f64,
    /// What `/readyz` says.
    pub ready: bool,
    /// Log lines that could not be written since the process started.
    #[serde(default)]
    pub log_lines_dropped: u64,
    /// The last time that the configuration was read again; nothing if it was not, since the start.
    #[serde(default)]
    pub reload: Option<Reload>,
    /// The pipelines, as configured.
    pub pipelines: Vec<PipelineStatus>,
}

/// What became of an attempt to read the configuration again.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reload {
    pub at: f64,
    /// Why nothing was changed; nothing where it was taken over.
    pub error: Option<String>,
}

/// One pipeline.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PipelineStatus {
    /// Its names.
    #[serde(flatten)]
    pub about: About,
    /// How it is, for people: `walpost status` and the page show this.
    pub summary: Summary,
    /// What it is at.
    pub state: State,
    /// Since when.
    pub since: f64,
    /// It is ready; see [`health`].
    pub ready: bool,
    /// Why it is not.
    pub not_ready: Option<String>,
    /// Since when it is not.
    pub not_ready_since: Option<f64>,
    /// What the watchdog finds wrong, ready or not.
    pub problems: Vec<Lasting>,
    /// What went through it.
    pub events: Events,
    /// How fast, over the last seconds.
    pub recent: Recent,
    /// How far behind it is.
    pub lag: Lag,
    /// Where it is in WAL.
    pub positions: Positions,
    /// The slot; unknown until the database was asked.
    pub slot_health: Option<SlotHealth>,
    /// The snapshot of older rows, where one was made since the start.
    pub snapshot: Option<Snapshot>,
    /// Rows of snapshots that were read since the start.
    pub snapshot_rows: u64,
    /// Slots that were dropped and whose events were not sent again; not known without a journal that may be read.
    pub dropped_slots: Option<Vec<DroppedSlot>>,
    /// Tables that are set aside; not known without a journal that may be read.
    #[serde(default)]
    pub set_aside: Option<Vec<SetAside>>,
    /// Rows of tables that are set aside that were left out since the start. What comes again counts again.
    #[serde(default)]
    pub left_out_rows: u64,
    /// Partitions of the outbox table, if it is partitioned.
    pub partitions: Option<u64>,
    /// How long those last, if they are ranges of a time.
    pub partitions_end: Option<Partitions>,
    /// Rows that have come of each table since the start, where the outbox is several; of those from before a table was added,
    /// none. What comes again counts again.
    #[serde(default)]
    pub tables: BTreeMap<String, u64>,
    /// Kafka, as the producer sees it.
    pub kafka: Kafka,
    /// When the last checkpoint was committed, with exactly-once.
    pub checkpoint_at: Option<f64>,
    pub last_error: Option<LastError>,
    /// Errors since the start, by what they are about.
    pub errors: BTreeMap<String, u64>,
    /// Dead letters since the start, by what kept the events from being delivered.
    pub dead_letters: DeadLetterCounts,
    /// The last of them.
    #[serde(default)]
    pub last_dead_letter: Option<LastDeadLetter>,
    /// Attempts to begin a session again, since the start.
    pub reconnects: u64,
    /// The last outages, the latest first.
    pub outages: Vec<OutageStatus>,
    /// From the end of a transaction's reading until it is durable.
    #[serde(skip)]
    pub delivery: Counts,
    /// From a transaction's commit until it is durable.
    #[serde(skip)]
    pub commit_to_delivery: Counts,
    /// Commits of Kafka transactions.
    #[serde(skip)]
    pub kafka_commit: Counts,
}

/// What went through a pipeline since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Events {
    /// Handed to the sink.
    pub sent: u64,
    /// Durable.
    pub delivered: u64,
    /// Between the two.
    pub in_flight: u64,
    /// The same in bytes, as `window_bytes` counts them.
    pub in_flight_bytes: u64,
    /// What may be between the two by now.
    pub window_events: u64,
    /// The same in bytes.
    pub window_bytes: u64,
    /// Transactions with events.
    pub transactions: u64,
    /// Bytes from PostgreSQL.
    pub received_bytes: u64,
}

/// How far behind a pipeline is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Lag {
    /// Log between what is confirmed and the server's end of it.
    pub bytes: Option<u64>,
    /// The age of the oldest event that was read and is not durable; while there is no stream, at
    /// least how long there is none.
    pub seconds: Option<f64>,
    /// Log that the server keeps for the slot.
    pub retained_bytes: Option<u64>,
}

/// Where a pipeline is in WAL.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Positions {
    /// What was received.
    pub received: Option<Lsn>,
    /// What is durable in Kafka.
    pub confirmed: Option<Lsn>,
    /// The end of the server's WAL.
    pub server: Option<Lsn>,
    /// Where the WAL begins that the server retains for the slot.
    pub restart: Option<Lsn>,
    /// When the last event was committed that was read.
    pub last_event_at: Option<f64>,
}

/// What the database says of the slot.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SlotHealth {
    /// When it said so.
    pub asked_at: f64,
    /// A walsender has it.
    pub active: bool,
    /// `wal_status`: reserved, extended, unreserved or lost.
    pub wal_status: Option<String>,
    /// How much more WAL may be written before the slot is in danger; none where that has no bound.
    pub safe_wal_bytes: Option<i64>,
    /// Transactions since the oldest one whose deleted rows of the catalog it keeps.
    pub catalog_xmin_age: Option<i64>,
}

/// A snapshot of the rows that are older than the slot.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    /// How far it is.
    pub phase: SnapshotPhase,
    /// Since when.
    pub since: f64,
    /// Rows that were read.
    pub rows: u64,
    /// Rows that are to be expected, by the planner's estimate.
    pub expected: Option<u64>,
}

impl Snapshot {
    /// It is not over.
    #[must_use]
    pub fn lasts(&self) -> bool {
        self.phase != SnapshotPhase::Done
    }
}

/// How long partitions last.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Partitions {
    /// Where the last one ends.
    pub at: f64,
    /// How many begin later than now.
    pub ahead: u64,
    /// There is a default partition for what comes after them.
    pub has_default: bool,
}

/// Kafka, as the producer sees it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Kafka {
    /// Why no broker can be reached.
    pub unreachable: Option<String>,
    /// Records that the producer has.
    pub queued_events: Option<u64>,
    /// Requests that were sent again.
    pub retries: Option<u64>,
    /// Bytes that were sent.
    pub sent_bytes: Option<u64>,
    /// The slowest broker's round trip, which 99 % were within.
    pub round_trip_p99_seconds: Option<f64>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LastError {
    /// When.
    pub at: f64,
    /// What it is about.
    pub kind: String,
    /// What the log says.
    pub message: String,
    /// What comes of it, and what a person can do.
    pub remedy: String,
}

/// A time without PostgreSQL, a producer or Kafka.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OutageStatus {
    /// What it is about.
    pub kind: String,
    /// The last error.
    pub reason: String,
    /// When it began.
    pub began_at: f64,
    /// When it ended, if it has.
    pub ended_at: Option<f64>,
    /// How often it was tried again.
    pub attempts: u64,
}

fn some_seconds(micros: u64) -> Option<f64> {
    (micros > 0).then(|| seconds(micros))
}

fn known(lsn: Lsn) -> Option<Lsn> {
    (lsn > Lsn::ZERO).then_some(lsn)
}

impl PipelineStatus {
    /// Of what the pipeline has written down by now; `recent` is how fast it is, `problems` what is
    /// wrong with it.
    #[must_use]
    pub fn of(
        stats: &PipelineStats,
        recent: Recent,
        problems: Vec<Lasting>,
        now_micros: u64,
    ) -> Self {
        let (totals, lifecycle) = (stats.totals(), stats.lifecycle_snapshot());
        let not_ready = health::why_not_ready(&lifecycle, &totals);
        let not_ready_since = not_ready
            .as_ref()
            .map(|reason| seconds(health::not_ready_since(reason, &lifecycle, now_micros)));
        let vitals = lifecycle.database.as_ref().map(|(vitals, _)| vitals);
        let slot = vitals.and_then(|vitals| vitals.slot.as_ref());
        let confirmed = known(totals.confirmed).or_else(|| slot.and_then(|slot| slot.confirmed));
        let server = vitals.map(|vitals| vitals.end.max(totals.received));
        let restart = slot.and_then(|slot| slot.restart);
        let behind = |from: Option<Lsn>| Some(server?.bytes_since(from?));
        let statistics = lifecycle.statistics.as_ref();
        let dropped_slots = vitals.and_then(|vitals| vitals.dropped_slots.clone());
        let set_aside = vitals.and_then(|vitals| vitals.set_aside.clone());
        Self {
            about: stats.about.clone(),
            summary: Summary::of(
                &stats.about.commands,
                &lifecycle,
                seconds(lifecycle.since_micros),
                not_ready.as_ref().zip(not_ready_since),
                &problems,
                dropped_slots.as_deref().unwrap_or_default(),
                set_aside.as_deref().unwrap_or_default(),
            ),
            state: lifecycle.state,
            since: seconds(lifecycle.since_micros),
            ready: not_ready.is_none(),
            not_ready: not_ready.map(|reason| reason.to_string()),
            not_ready_since,
            problems,
            events: Events {
                sent: totals.sent,
                delivered: totals.delivered,
                in_flight: totals.in_flight,
                in_flight_bytes: totals.in_flight_bytes,
                window_events: totals.window.records,
                window_bytes: totals.window.bytes,
                transactions: totals.transactions,
                received_bytes: totals.received_bytes,
            },
            recent,
            lag: Lag {
                bytes: behind(confirmed),
                seconds: health::lag_micros(&lifecycle, &totals, now_micros).map(seconds),
                retained_bytes: behind(restart),
            },
            positions: Positions {
                received: known(totals.received),
                confirmed,
                server,
                restart,
                last_event_at: some_seconds(totals.last_micros),
            },
            slot_health: slot
                .zip(lifecycle.database.as_ref())
                .map(|(slot, (_, asked))| SlotHealth {
                    asked_at: seconds(*asked),
                    active: slot.active,
                    wal_status: slot.wal_status.clone(),
                    safe_wal_bytes: slot.safe_wal_bytes,
                    catalog_xmin_age: slot.catalog_xmin_age,
                }),
            snapshot: lifecycle.snapshot.map(|stage| Snapshot {
                phase: stage.phase,
                since: seconds(stage.since_micros),
                rows: stats.snapshot_rows().saturating_sub(stage.rows_before),
                expected: stage.expected,
            }),
            snapshot_rows: stats.snapshot_rows(),
            dropped_slots,
            set_aside,
            left_out_rows: stats.left_out_rows(),
            partitions: vitals.and_then(|vitals| vitals.partitions),
            partitions_end: vitals
                .and_then(|vitals| vitals.partitions_end)
                .map(|end| Partitions {
                    at: seconds(end.at_micros),
                    ahead: end.ahead,
                    has_default: end.has_default,
                }),
            tables: stats.tables(),
            kafka: Kafka {
                unreachable: lifecycle.kafka_down.clone(),
                queued_events: statistics.map(|statistics| statistics.queued_records),
                retries: statistics.map(|statistics| statistics.retries),
                sent_bytes: statistics.map(|statistics| statistics.sent_bytes),
                round_trip_p99_seconds: statistics
                    .and_then(|statistics| statistics.round_trip_p99_micros)
                    .map(seconds),
            },
            checkpoint_at: some_seconds(totals.checkpointed_micros),
            last_error: lifecycle.last_error.map(LastError::from),
            errors: stats
                .errors()
                .into_iter()
                .map(|(kind, count)| (kind.name().to_owned(), count))
                .collect(),
            dead_letters: stats.dead_letters(),
            last_dead_letter: stats.last_dead_letter(),
            reconnects: totals.reconnects,
            outages: lifecycle.outages.into_iter().map(Into::into).collect(),
            delivery: stats.delivery.counts(),
            commit_to_delivery: stats.commit_to_delivery.counts(),
            kafka_commit: stats.kafka_commit.counts(),
        }
    }
}

impl From<Failure> for LastError {
    fn from(failure: Failure) -> Self {
        Self {
            at: seconds(failure.at_micros),
            kind: failure.kind.name().to_owned(),
            message: failure.message,
            remedy: failure.remedy,
        }
    }
}

impl From<Outage> for OutageStatus {
    fn from(outage: Outage) -> Self {
        Self {
            kind: outage.kind.name().to_owned(),
            reason: outage.reason,
            began_at: seconds(outage.began_micros),
            ended_at: outage.ended_micros.map(seconds),
            attempts: outage.attempts,
        }
    }
}
