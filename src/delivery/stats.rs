//! Statistics of one pipeline, written by its threads and read by monitoring.
//!
//! To keep the overhead low, nothing is written for individual rows. The session writes totals
//! after each read and at regular intervals, and the sink's threads write totals after each batch
//! of delivery reports. Values that change rarely are protected by a lock.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::histogram::Histogram;
use super::lifecycle::Lifecycle;
use crate::model::commands::Commands;
use crate::model::dead_letters::{DeadLetterCounts, LastDeadLetter};
use crate::model::lsn::Lsn;
use crate::model::statistics::Statistics;
use crate::model::vitals::Vitals;
use crate::model::window::Window;

pub(crate) use super::lifecycle::LifecycleSnapshot;
use crate::model::lifecycle::{
    ErrorKind, Failure, KAFKA_DOWN_REMEDY, Omission, SnapshotPhase, SnapshotStage, State,
};
use crate::model::time::unix_micros;

/// Properties of a pipeline that don't change while it runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct About {
    /// Name of the pipeline.
    pub name: String,
    /// Description of the database connection, without the password.
    pub database: String,
    /// The outbox table, or the prefix of logical decoding messages.
    pub outbox: String,
    pub slot: String,
    /// The destination of the records.
    pub sink: String,
    /// Delivery guarantee.
    pub delivery: String,
    /// The value of `wal_budget.warn`, if it is set.
    pub wal_budget_warn_bytes: Option<u64>,
    /// The value of `wal_budget.max`, if it is set.
    pub wal_budget_max_bytes: Option<u64>,
    /// The commands that log and error messages suggest for this pipeline.
    #[serde(skip)]
    pub(crate) commands: Commands,
}

/// Progress of one session, as tracked by its watermark.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Number and total size of the records that the sink has accepted since it was created.
    pub taken: Window,
    /// Number of complete transactions that contain records.
    pub transactions: u64,
    /// The highest LSN received.
    pub received: Lsn,
    /// The LSN that may be confirmed to PostgreSQL.
    pub confirmed: Lsn,
    /// Commit time of the oldest transaction whose records are not all durable, in microseconds
    /// since 1970; zero if all records are durable.
    pub oldest_micros: u64,
    /// Commit time of the last transaction with events, in microseconds since 1970.
    pub last_micros: u64,
    /// Whether the session is waiting for the sink.
    pub waits: bool,
}

/// Statistics of one pipeline.
#[derive(Debug)]
pub struct PipelineStats {
    /// Description of the pipeline.
    pub about: About,
    epoch: Instant,
    /// When the pipeline started, in microseconds since 1970.
    pub started_micros: u64,
    session: Session,
    sink: SinkSide,
    /// Time from when a transaction is read until its records are durable in the sink.
    pub delivery: Histogram,
    /// Time from a transaction's commit until its records are durable in the sink.
    pub commit_to_delivery: Histogram,
    /// With exactly-once delivery, the durations of commits of Kafka transactions.
    pub kafka_commit: Histogram,
    reconnects: AtomicU64,
    errors: [AtomicU64; ErrorKind::ALL.len()],
    oversize_dead_letters: AtomicU64,
    unroutable_dead_letters: AtomicU64,
    malformed_dead_letters: AtomicU64,
    last_dead_letter: Mutex<Option<LastDeadLetter>>,
    /// Number of rows omitted because their tables were set aside after an error.
    left_out_rows: AtomicU64,
    /// Number of rows read by snapshots.
    snapshot_rows: AtomicU64,
    /// When the last checkpoint was committed, in microseconds since 1970.
    checkpointed_micros: AtomicU64,
    lifecycle: Mutex<Lifecycle>,
    /// Number of rows received from each table, if the outbox has several tables.
    tables: Mutex<BTreeMap<String, u64>>,
}

/// Maximum number of tables that are counted individually. Without a limit, memory use would grow
/// as tenants are added and removed while the process runs.
const TABLES_MAX: usize = 10_000;
/// Name under which rows are counted together for all tables after the first [`TABLES_MAX`]. No
/// table has this name, because table names include a schema.
const OTHER_TABLES: &str = "others";

/// Values that only the session's thread writes. They are on separate cache lines to avoid false
/// sharing with the sink's threads.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Session {
    /// Totals for sinks that have been dropped. `before_*` counts what the sinks accepted, and
    /// `lost_*` counts the records that were not durable when their sink was dropped.
    before_events: AtomicU64,
    before_bytes: AtomicU64,
    before_transactions: AtomicU64,
    lost_events: AtomicU64,
    lost_bytes: AtomicU64,
    events: AtomicU64,
    bytes: AtomicU64,
    transactions: AtomicU64,
    window_events: AtomicU64,
    window_bytes: AtomicU64,
    received_bytes: AtomicU64,
    received: AtomicU64,
    confirmed: AtomicU64,
    oldest_micros: AtomicU64,
    last_micros: AtomicU64,
    waits: AtomicBool,
    /// When the session last completed an iteration of its loop, and when it last made progress, in
    /// microseconds since `epoch`.
    last_iteration: AtomicU64,
    last_progress: AtomicU64,
}

/// Values written by the sink's threads.
#[derive(Debug, Default)]
#[repr(align(128))]
struct SinkSide {
    events: AtomicU64,
    bytes: AtomicU64,
    /// When a record or a checkpoint last became durable, in microseconds since `epoch`.
    last_progress: AtomicU64,
}

/// A pipeline's totals at one point in time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Number of records passed to the sink.
    pub sent: u64,
    /// Number of records that have become durable.
    pub delivered: u64,
    /// Number of records in flight.
    pub in_flight: u64,
    /// Total size of the records in flight, in bytes, as counted toward `window_bytes`.
    pub in_flight_bytes: u64,
    /// The current limits for records in flight.
    pub window: Window,
    /// Number of complete transactions that contain records.
    pub transactions: u64,
    /// Number of bytes received from PostgreSQL.
    pub received_bytes: u64,
    /// The highest LSN received; zero if no LSN has been received.
    pub received: Lsn,
    /// The LSN that may be confirmed to PostgreSQL; zero if no LSN may be confirmed.
    pub confirmed: Lsn,
    /// Commit time of the oldest transaction whose records are not all durable, in microseconds
    /// since 1970; zero if all records are durable.
    pub oldest_micros: u64,
    /// Commit time of the last transaction with events, in microseconds since 1970; zero if no
    /// transaction had events.
    pub last_micros: u64,
    /// Whether the session is waiting for the sink.
    pub waits: bool,
    /// Time since the session last completed an iteration of its loop.
    pub since_last_iteration: Duration,
    /// Time since the pipeline last made progress. The pipeline makes progress if a record or
    /// checkpoint becomes durable, if the confirmed LSN advances, or if the session does not have
    /// to wait for the sink.
    pub since_last_progress: Duration,
    /// Number of attempts to restart a session.
    pub reconnects: u64,
    /// When the last checkpoint was committed, in microseconds since 1970; zero if
    /// no checkpoint was committed.
    pub checkpointed_micros: u64,
}

fn store(to: &AtomicU64, value: u64) {
    to.store(value, Ordering::Relaxed);
}

fn load(from: &AtomicU64) -> u64 {
    from.load(Ordering::Relaxed)
}

fn add(to: &AtomicU64, value: u64) {
    to.fetch_add(value, Ordering::Relaxed);
}

impl Default for PipelineStats {
    fn default() -> Self {
        Self::new(About::default())
    }
}

impl PipelineStats {
    /// Creates statistics in which all counters are zero.
    #[must_use]
    pub fn new(about: About) -> Self {
        let now = unix_micros();
        Self {
            about,
            epoch: Instant::now(),
            started_micros: now,
            session: Session::default(),
            sink: SinkSide::default(),
            delivery: Histogram::default(),
            commit_to_delivery: Histogram::default(),
            kafka_commit: Histogram::default(),
            reconnects: AtomicU64::default(),
            errors: Default::default(),
            oversize_dead_letters: AtomicU64::default(),
            unroutable_dead_letters: AtomicU64::default(),
            malformed_dead_letters: AtomicU64::default(),
            last_dead_letter: Mutex::default(),
            left_out_rows: AtomicU64::default(),
            snapshot_rows: AtomicU64::default(),
            checkpointed_micros: AtomicU64::default(),
            lifecycle: Mutex::new(Lifecycle {
                since_micros: now,
                ..Lifecycle::default()
            }),
            tables: Mutex::default(),
        }
    }

    fn lifecycle(&self) -> MutexGuard<'_, Lifecycle> {
        self.lifecycle
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn elapsed_micros(&self) -> u64 {
        u64::try_from(self.epoch.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    /// Records the session's progress after an iteration of its loop. Must be called from a single
    /// thread.
    pub fn record_progress(&self, progress: &Progress) {
        let session = &self.session;
        let now = self.elapsed_micros();
        let events = load(&session.before_events) + progress.taken.records;
        let has_advanced = load(&session.confirmed) != progress.confirmed.0;
        store(&session.events, events);
        store(
            &session.bytes,
            load(&session.before_bytes) + progress.taken.bytes,
        );
        store(
            &session.transactions,
            load(&session.before_transactions) + progress.transactions,
        );
        store(&session.received, progress.received.0);
        store(&session.confirmed, progress.confirmed.0);
        store(&session.oldest_micros, progress.oldest_micros);
        if progress.last_micros > 0 {
            store(&session.last_micros, progress.last_micros);
        }
        session.waits.store(progress.waits, Ordering::Relaxed);
        store(&session.last_iteration, now);
        if has_advanced || !progress.waits {
            store(&session.last_progress, now);
        }
    }

    /// Stores the current limits for records in flight.
    pub fn record_window(&self, window: Window) {
        store(&self.session.window_events, window.records);
        store(&self.session.window_bytes, window.bytes);
    }

    /// Counts bytes received from PostgreSQL.
    pub fn add_received_bytes(&self, bytes: u64) {
        add(&self.session.received_bytes, bytes);
    }

    /// Counts records that became durable. Called once per batch of records.
    pub fn add_delivered(&self, events: u64, bytes: u64) {
        add(&self.sink.events, events);
        add(&self.sink.bytes, bytes);
        store(&self.sink.last_progress, self.elapsed_micros());
    }

    /// Updates the totals after a sink has been dropped, including the number of records that were
    /// still in flight. `taken` and `transactions` are the totals of that sink.
    pub fn record_abandoned_records(&self, taken: Window, transactions: u64) {
        let session = &self.session;
        let sum = |before: &AtomicU64, all: &AtomicU64, more: u64| {
            let sum = load(before) + more;
            store(before, sum);
            store(all, sum);
            sum
        };
        let events = sum(&session.before_events, &session.events, taken.records);
        let bytes = sum(&session.before_bytes, &session.bytes, taken.bytes);
        sum(
            &session.before_transactions,
            &session.transactions,
            transactions,
        );
        let lost = |all: u64, sink: &AtomicU64| all.saturating_sub(load(sink));
        store(&session.lost_events, lost(events, &self.sink.events));
        store(&session.lost_bytes, lost(bytes, &self.sink.bytes));
        store(&session.oldest_micros, 0);
    }

    /// Records a checkpoint that has just become durable, and how long its commit took.
    pub fn checkpointed(&self, took: Duration) {
        store(&self.checkpointed_micros, unix_micros());
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.kafka_commit.record(micros);
        store(&self.sink.last_progress, self.elapsed_micros());
    }

    /// Sets the pipeline's current state.
    pub fn entered(&self, state: State) {
        let mut lifecycle = self.lifecycle();
        let now = unix_micros();
        if lifecycle.state != state {
            lifecycle.state = state;
            lifecycle.since_micros = now;
        }
        if matches!(state, State::Streaming | State::StandingBy) {
            lifecycle.end_outages(now, |outage| outage.kind != ErrorKind::KafkaBroker);
        }
        if state == State::Streaming {
            store(&self.session.last_iteration, self.elapsed_micros());
            store(&self.session.last_progress, self.elapsed_micros());
        }
    }

    /// Records an error. `remedy` describes how Walpost recovers, or what an operator must do.
    pub fn failed(&self, kind: ErrorKind, message: String, remedy: &str) {
        self.count(kind);
        self.lifecycle().last_error = Some(Failure {
            at_micros: unix_micros(),
            kind,
            message,
            remedy: remedy.to_owned(),
        });
    }

    /// Records a restart of the session, and the reason for it.
    pub fn record_reconnect(&self, kind: ErrorKind, reason: &str) {
        add(&self.reconnects, 1);
        self.lifecycle().record_outage(kind, reason);
    }

    /// Counts an error of the given kind.
    pub fn count(&self, kind: ErrorKind) {
        let index = ErrorKind::ALL.iter().position(|known| *known == kind);
        if let Some(counter) = index.and_then(|index| self.errors.get(index)) {
            add(counter, 1);
        }
    }

    /// Marks Kafka as unreachable, and records the reason.
    pub fn record_kafka_outage(&self, reason: &str) {
        {
            let mut lifecycle = self.lifecycle();
            lifecycle.kafka_down = Some(reason.to_owned());
            lifecycle.record_outage(ErrorKind::KafkaBroker, reason);
        }
        self.failed(
            ErrorKind::KafkaBroker,
            format!("Kafka is unreachable: {reason}"),
            KAFKA_DOWN_REMEDY,
        );
    }

    /// Returns whether the brokers are currently marked as unreachable.
    #[must_use]
    pub fn is_kafka_down(&self) -> bool {
        self.lifecycle().kafka_down.is_some()
    }

    /// Marks Kafka as reachable, after a broker has responded.
    pub fn record_kafka_response(&self) {
        let mut lifecycle = self.lifecycle();
        lifecycle.kafka_down = None;
        let now = unix_micros();
        lifecycle.end_outages(now, |outage| outage.kind == ErrorKind::KafkaBroker);
    }

    /// Records which tables or rows the publication omits, and the command that fixes the
    /// publication. `None` means that nothing is omitted.
    pub fn record_omission(&self, found: Option<(String, String)>) {
        let mut lifecycle = self.lifecycle();
        let since = lifecycle.left_out.as_ref().map(|left| left.since_micros);
        lifecycle.left_out = found.map(|(what, remedy)| Omission {
            since_micros: since.unwrap_or_else(unix_micros),
            what,
            remedy,
        });
    }

    /// Stores the [`Vitals`] that were last queried from the database.
    pub fn record_database_state(&self, vitals: Vitals) {
        self.lifecycle().database = Some((vitals, unix_micros()));
    }

    /// Records librdkafka's statistics.
    pub fn record_kafka_statistics(&self, statistics: Statistics) {
        self.lifecycle().statistics = Some(statistics);
    }

    /// Returns the current totals.
    #[must_use]
    pub fn totals(&self) -> Totals {
        let session = &self.session;
        let now = self.elapsed_micros();
        let ago = |at: &AtomicU64| Duration::from_micros(now.saturating_sub(load(at)));
        // Load the delivered counts before the sent counts. If the sent counts were loaded first,
        // records that are sent and delivered between the two loads would count as delivered but
        // not as sent, so `in_flight` would be too low.
        let (delivered, delivered_bytes) = (load(&self.sink.events), load(&self.sink.bytes));
        let in_flight = |all: &AtomicU64, lost: &AtomicU64, delivered: u64| {
            load(all).saturating_sub(load(lost).saturating_add(delivered))
        };
        Totals {
            sent: load(&session.events),
            delivered,
            in_flight: in_flight(&session.events, &session.lost_events, delivered),
            in_flight_bytes: in_flight(&session.bytes, &session.lost_bytes, delivered_bytes),
            window: Window {
                records: load(&session.window_events),
                bytes: load(&session.window_bytes),
            },
            transactions: load(&session.transactions),
            received_bytes: load(&session.received_bytes),
            received: Lsn(load(&session.received)),
            confirmed: Lsn(load(&session.confirmed)),
            oldest_micros: load(&session.oldest_micros),
            last_micros: load(&session.last_micros),
            waits: session.waits.load(Ordering::Relaxed),
            since_last_iteration: ago(&session.last_iteration),
            since_last_progress: ago(&session.last_progress).min(ago(&self.sink.last_progress)),
            reconnects: load(&self.reconnects),
            checkpointed_micros: load(&self.checkpointed_micros),
        }
    }

    /// Records the phase of a snapshot. `expected` is the estimated number of rows, which is known
    /// when the copy starts.
    pub fn record_snapshot_phase(&self, phase: SnapshotPhase, expected: Option<u64>) {
        let mut lifecycle = self.lifecycle();
        let before = lifecycle
            .snapshot
            .filter(|_| phase != SnapshotPhase::Making);
        lifecycle.snapshot = Some(SnapshotStage {
            phase,
            since_micros: unix_micros(),
            expected: expected.or_else(|| before?.expected),
            rows_before: before.map_or_else(|| self.snapshot_rows(), |stage| stage.rows_before),
        });
    }

    /// Counts rows read by a snapshot. Called once per batch of rows.
    pub fn add_copied_rows(&self, rows: u64) {
        add(&self.snapshot_rows, rows);
    }

    /// Returns the number of rows read by snapshots.
    #[must_use]
    pub fn snapshot_rows(&self) -> u64 {
        load(&self.snapshot_rows)
    }

    /// Counts rows omitted because their tables were set aside after an error. Called once per
    /// batch of rows.
    pub fn count_omitted_rows(&self, rows: u64) {
        add(&self.left_out_rows, rows);
    }

    /// Returns the number of rows omitted because their tables were set aside after an error.
    #[must_use]
    pub fn left_out_rows(&self) -> u64 {
        load(&self.left_out_rows)
    }

    /// Adds to the number of rows received from each of these tables. Callers should add many rows
    /// at once.
    pub fn rows_of_tables(&self, more: impl IntoIterator<Item = (impl Display, u64)>) {
        let mut tables = self.tables.lock().unwrap_or_else(PoisonError::into_inner);
        for (table, rows) in more {
            let name = table.to_string();
            let is_counted = tables.len() < TABLES_MAX || tables.contains_key(&name);
            let name = if is_counted {
                name
            } else {
                OTHER_TABLES.to_owned()
            };
            *tables.entry(name).or_default() += rows;
        }
    }

    /// Returns the number of rows received from each table if the outbox has several tables. The
    /// entry `others` is the total for all tables after the first 10,000.
    #[must_use]
    pub fn tables(&self) -> BTreeMap<String, u64> {
        let tables = self.tables.lock();
        tables.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sets the total number of dead letters for each reason. Must be called from a single thread.
    pub fn set_dead_letter_counts(&self, counts: DeadLetterCounts) {
        store(&self.oversize_dead_letters, counts.oversize);
        store(&self.unroutable_dead_letters, counts.unroutable);
        store(&self.malformed_dead_letters, counts.malformed);
    }

    /// Records a dead letter that was passed to the sink.
    pub fn record_dead_letter(&self, letter: LastDeadLetter) {
        let mut last = self
            .last_dead_letter
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *last = Some(letter);
    }

    /// Returns the last dead letter that was passed to the sink.
    #[must_use]
    pub fn last_dead_letter(&self) -> Option<LastDeadLetter> {
        let last = self.last_dead_letter.lock();
        last.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the number of dead letters.
    #[must_use]
    pub fn dead_letters(&self) -> DeadLetterCounts {
        DeadLetterCounts {
            oversize: load(&self.oversize_dead_letters),
            unroutable: load(&self.unroutable_dead_letters),
            malformed: load(&self.malformed_dead_letters),
        }
    }

    /// Returns the number of errors of each kind.
    #[must_use]
    pub fn errors(&self) -> [(ErrorKind, u64); ErrorKind::ALL.len()] {
        let counts = self.errors.each_ref().map(load);
        let mut errors = ErrorKind::ALL.map(|kind| (kind, 0));
        for (error, count) in errors.iter_mut().zip(counts) {
            error.1 = count;
        }
        errors
    }

    /// Returns a copy of the lifecycle state.
    #[must_use]
    pub fn lifecycle_snapshot(&self) -> LifecycleSnapshot {
        let lifecycle = self.lifecycle();
        LifecycleSnapshot {
            state: lifecycle.state,
            since_micros: lifecycle.since_micros,
            last_error: lifecycle.last_error.clone(),
            outages: lifecycle.outages.iter().rev().cloned().collect(),
            database: lifecycle.database.clone(),
            statistics: lifecycle.statistics,
            kafka_down: lifecycle.kafka_down.clone(),
            left_out: lifecycle.left_out.clone(),
            snapshot: lifecycle.snapshot,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uses_one_shared_counter_for_all_tables_beyond_the_limit() {
        let stats = PipelineStats::default();
        stats.rows_of_tables((0..TABLES_MAX).map(|n| (format!("tenant_{n}.outbox"), 1)));
        stats.rows_of_tables([
            ("late.outbox", 2),
            ("later.outbox", 3),
            ("tenant_7.outbox", 4),
        ]);
        let tables = stats.tables();
        assert_eq!(tables.len(), TABLES_MAX + 1);
        assert_eq!((tables[OTHER_TABLES], tables["tenant_7.outbox"]), (5, 5));
    }
}
