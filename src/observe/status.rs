//! The status of the process at one point in time, as returned by `/status`. Metrics, readiness and
//! the status page are derived from this status.

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

/// The status of the whole process. Times are in seconds since 1970, durations in seconds, sizes in
/// bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Status {
    pub version: String,
    /// When the process started.
    pub started_at: f64,
    pub now: f64,
    /// Whether all pipelines are ready, as `/readyz` reports.
    pub ready: bool,
    /// Number of log lines that have been dropped since the process started.
    #[serde(default)]
    pub log_lines_dropped: u64,
    /// The most recent configuration reload since startup, if any.
    #[serde(default)]
    pub reload: Option<Reload>,
    /// The pipelines, in the order in which they are configured.
    pub pipelines: Vec<PipelineStatus>,
}

/// The outcome of an attempt to reload the configuration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reload {
    pub at: f64,
    /// The error that prevented the reload, or `None` if it succeeded.
    pub error: Option<String>,
}

/// The status of one pipeline.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PipelineStatus {
    /// The pipeline's names.
    #[serde(flatten)]
    pub about: About,
    /// The summary that `walpost status` and the status page display.
    pub summary: Summary,
    pub state: State,
    /// When the pipeline entered its current state.
    pub since: f64,
    /// Whether the pipeline is ready; see [`health`].
    pub ready: bool,
    /// Why the pipeline is not ready.
    pub not_ready: Option<String>,
    /// When the pipeline became unready.
    pub not_ready_since: Option<f64>,
    /// The problems found by the watchdog, regardless of whether the pipeline is ready.
    pub problems: Vec<Lasting>,
    /// Counts of events and bytes.
    pub events: Events,
    /// The throughput and latency over the last ten seconds.
    pub recent: Recent,
    /// The pipeline's lag.
    pub lag: Lag,
    /// The pipeline's positions in the WAL.
    pub positions: Positions,
    /// The state of the slot, or `None` until the database has been queried.
    pub slot_health: Option<SlotHealth>,
    /// The progress of the snapshot, which contains the rows that were committed before the slot
    /// was created. `None` if no snapshot has been started since startup.
    pub snapshot: Option<Snapshot>,
    /// Number of snapshot rows read since startup.
    pub snapshot_rows: u64,
    /// Dropped slots whose events have not been replayed. `None` if the journal does not exist or
    /// cannot be read.
    pub dropped_slots: Option<Vec<DroppedSlot>>,
    /// Tables that are set aside after an error, so that their rows are not delivered. `None` if
    /// the journal does not exist or cannot be read.
    #[serde(default)]
    pub set_aside: Option<Vec<SetAside>>,
    /// Number of rows omitted since startup because their tables are set aside after an error. A
    /// row that is received twice is counted twice.
    #[serde(default)]
    pub left_out_rows: u64,
    /// Number of partitions of the outbox table, if it is partitioned.
    pub partitions: Option<u64>,
    /// The end of the period that the partitions cover, if the table is partitioned by ranges of
    /// time.
    pub partitions_end: Option<Partitions>,
    /// Number of rows received from each table since startup, if the outbox consists of several
    /// tables. Rows that a table already contained when it was added are not counted. A row that is
    /// received twice is counted twice.
    #[serde(default)]
    pub tables: BTreeMap<String, u64>,
    /// The state of Kafka, as reported by the producer.
    pub kafka: Kafka,
    /// When the last checkpoint was committed; set only with exactly-once delivery.
    pub checkpoint_at: Option<f64>,
    pub last_error: Option<LastError>,
    /// Number of errors since startup, by kind.
    pub errors: BTreeMap<String, u64>,
    /// Number of dead letters since startup, by reason.
    pub dead_letters: DeadLetterCounts,
    /// The most recent dead letter.
    #[serde(default)]
    pub last_dead_letter: Option<LastDeadLetter>,
    /// Number of attempts to start a new session since startup.
    pub reconnects: u64,
    /// The most recent outages, latest first.
    pub outages: Vec<OutageStatus>,
    /// The distribution of the time from reading the end of a transaction until its events are
    /// durable in Kafka.
    #[serde(skip)]
    pub delivery: Counts,
    /// The distribution of the time from a transaction's commit until its events are durable in
    /// Kafka.
    #[serde(skip)]
    pub commit_to_delivery: Counts,
    /// The distribution of the time that Kafka transactions take to commit.
    #[serde(skip)]
    pub kafka_commit: Counts,
}

/// Counts of events and bytes since startup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Events {
    /// Number of events passed to the sink.
    pub sent: u64,
    /// Number of durable events.
    pub delivered: u64,
    /// Number of events that were passed to the sink but are not durable yet.
    pub in_flight: u64,
    /// The total size of the events in flight, in bytes, as counted for `window_bytes`.
    pub in_flight_bytes: u64,
    /// The current limit on events in flight.
    pub window_events: u64,
    /// The current limit on bytes in flight.
    pub window_bytes: u64,
    /// Number of transactions that contained events.
    pub transactions: u64,
    /// Number of bytes received from PostgreSQL.
    pub received_bytes: u64,
}

/// The lag of a pipeline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Lag {
    /// Bytes of WAL between the confirmed position and the end of the server's WAL.
    pub bytes: Option<u64>,
    /// The age of the oldest event that was read but is not durable. If the pipeline is not
    /// streaming, this is at least the time since it stopped streaming.
    pub seconds: Option<f64>,
    /// Bytes of WAL that the server retains for the slot.
    pub retained_bytes: Option<u64>,
}

/// A pipeline's positions in the WAL.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Positions {
    /// The position up to which WAL was received.
    pub received: Option<Lsn>,
    /// The position up to which events are durable in Kafka.
    pub confirmed: Option<Lsn>,
    /// The end of the server's WAL.
    pub server: Option<Lsn>,
    /// The start of the WAL that the server retains for the slot.
    pub restart: Option<Lsn>,
    /// When the most recently read event was committed.
    pub last_event_at: Option<f64>,
}

/// The state of the slot, according to the database.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SlotHealth {
    /// When the database was queried.
    pub asked_at: f64,
    /// Whether a walsender is using the slot.
    pub active: bool,
    /// `wal_status`, which is reserved, extended, unreserved or lost.
    pub wal_status: Option<String>,
    /// How many more bytes of WAL may be written before the slot is in danger of being lost, or
    /// `None` if there is no limit.
    pub safe_wal_bytes: Option<i64>,
    /// The age of the slot's `catalog_xmin`, in transactions.
    pub catalog_xmin_age: Option<i64>,
}

/// A snapshot of the rows that were committed before the slot was created.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    pub phase: SnapshotPhase,
    /// When the current phase began.
    pub since: f64,
    /// Number of rows read so far.
    pub rows: u64,
    /// The number of rows to copy, as estimated by the planner.
    pub expected: Option<u64>,
}

impl Snapshot {
    /// Returns whether the snapshot is still in progress.
    #[must_use]
    pub fn lasts(&self) -> bool {
        self.phase != SnapshotPhase::Done
    }
}

/// The end of the period that the partitions cover.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Partitions {
    /// When the time range of the last partition ends.
    pub at: f64,
    /// The number of partitions whose ranges begin in the future.
    pub ahead: u64,
    /// Whether a default partition exists, which accepts rows outside all ranges.
    pub has_default: bool,
}

/// The state of Kafka, as reported by the producer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Kafka {
    /// Why no broker is reachable, or `None` if a broker is reachable.
    pub unreachable: Option<String>,
    /// Number of records in the producer's queues.
    pub queued_events: Option<u64>,
    /// Number of retried requests.
    pub retries: Option<u64>,
    /// Number of bytes sent to the brokers.
    pub sent_bytes: Option<u64>,
    /// The 99th percentile of the round-trip time to the slowest broker.
    pub round_trip_p99_seconds: Option<f64>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LastError {
    /// When the error occurred.
    pub at: f64,
    /// The kind of error.
    pub kind: String,
    /// The text of the error, as it appears in the log.
    pub message: String,
    /// The consequence of the error, and what the operator can do about it.
    pub remedy: String,
}

/// A period during which PostgreSQL, the producer or Kafka was unavailable.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OutageStatus {
    /// The kind of error that started the outage.
    pub kind: String,
    /// The last error.
    pub reason: String,
    /// When the outage began.
    pub began_at: f64,
    /// When the outage ended, or `None` if it is ongoing.
    pub ended_at: Option<f64>,
    /// The number of retries.
    pub attempts: u64,
}

/// Converts microseconds since 1970 to seconds. Returns `None` for zero, which means that the time
/// is unknown.
fn known_seconds(micros: u64) -> Option<f64> {
    (micros > 0).then(|| seconds(micros))
}

fn known(lsn: Lsn) -> Option<Lsn> {
    (lsn > Lsn::ZERO).then_some(lsn)
}

impl PipelineStatus {
    /// Creates the status from the pipeline's counters, its `recent` throughput and latency, and
    /// the `problems` found by the watchdog.
    #[must_use]
    pub fn from_stats(
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
        let bytes_since = |from: Option<Lsn>| Some(server?.bytes_since(from?));
        let statistics = lifecycle.statistics.as_ref();
        let dropped_slots = vitals.and_then(|vitals| vitals.dropped_slots.clone());
        let set_aside = vitals.and_then(|vitals| vitals.set_aside.clone());
        Self {
            about: stats.about.clone(),
            summary: Summary::new(
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
                bytes: bytes_since(confirmed),
                seconds: health::lag_micros(&lifecycle, &totals, now_micros).map(seconds),
                retained_bytes: bytes_since(restart),
            },
            positions: Positions {
                received: known(totals.received),
                confirmed,
                server,
                restart,
                last_event_at: known_seconds(totals.last_micros),
            },
            slot_health: slot
                .zip(lifecycle.database.as_ref())
                .map(|(slot, (_, queried_at))| SlotHealth {
                    asked_at: seconds(*queried_at),
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
            checkpoint_at: known_seconds(totals.checkpointed_micros),
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
