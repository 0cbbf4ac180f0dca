//! Decides when to commit a Kafka transaction: immediately while few records arrive, and less often
//! under high load. This module performs no I/O, and takes the current time as an argument.
//!
//! A commit costs the brokers a few milliseconds, however many records it contains, and consumers
//! can't read the records before the commit. Therefore, records are committed immediately under low
//! load to minimize latency, and in batches under high load.

use std::time::Duration;

use tokio::time::Instant;

use crate::model::window::Window;

/// Minimum interval between the starts of two commits. Once it has passed, the next record is
/// committed immediately, unless the load is high.
const COMMIT_INTERVAL_MIN: Duration = Duration::from_millis(5);
/// How long a transaction stays open under high load.
const BUSY_COMMIT_INTERVAL: Duration = Duration::from_millis(250);
/// How often a checkpoint is written if the position advances without new records.
const IDLE_CHECKPOINT_INTERVAL: Duration = Duration::from_secs(10);
/// The shorter interval that is used instead of [`IDLE_CHECKPOINT_INTERVAL`] if the server has
/// requested a status update.
const REQUESTED_CHECKPOINT_DELAY: Duration = Duration::from_millis(100);
/// A transaction that reaches this size is committed immediately.
const TRANSACTION_MAX: Window = Window {
    records: 200_000,
    bytes: 64 << 20,
};

/// Tracks the records that have been sent since the last commit, and determines when to commit
/// next.
#[derive(Debug)]
pub(crate) struct CommitSchedule {
    /// When the last commit started.
    committed_at: Instant,
    /// Total number and size of the records that had been sent when the last commit started.
    committed: Window,
    /// When the first record since the last commit was sent.
    first_at: Option<Instant>,
    /// Whether the server has requested a status update.
    is_requested: bool,
}

impl CommitSchedule {
    /// Creates a schedule. `sent` is the total number and size of the records sent so far.
    pub(crate) fn new(now: Instant, sent: Window) -> Self {
        Self {
            committed_at: now,
            committed: sent,
            first_at: None,
            is_requested: false,
        }
    }

    /// Records that the server has requested a status update, which makes the next checkpoint due
    /// sooner.
    pub(crate) fn request_checkpoint(&mut self) {
        self.is_requested = true;
    }

    /// Returns whether records have been sent since the last commit.
    pub(crate) fn has_records(&self, sent: Window) -> bool {
        sent.records > self.committed.records
    }

    /// Returns when to commit next, or `None` if there is nothing to commit. `sent` is the total
    /// number and size of the records sent so far, `has_advanced` indicates whether the WAL
    /// position has advanced since the last commit, and `busy` indicates whether the load is high.
    pub(crate) fn due(
        &mut self,
        now: Instant,
        sent: Window,
        has_advanced: bool,
        busy: bool,
    ) -> Option<Instant> {
        let records = sent.records - self.committed.records;
        if records == 0 {
            let pause = if self.is_requested {
                REQUESTED_CHECKPOINT_DELAY
            } else {
                IDLE_CHECKPOINT_INTERVAL
            };
            return has_advanced.then(|| self.committed_at + pause);
        }
        let first_at = *self.first_at.get_or_insert(now);
        let bytes = sent.bytes - self.committed.bytes;
        if records >= TRANSACTION_MAX.records || bytes >= TRANSACTION_MAX.bytes {
            return Some(now);
        }
        Some(match busy {
            true => first_at + BUSY_COMMIT_INTERVAL,
            false => first_at.max(self.committed_at + COMMIT_INTERVAL_MIN),
        })
    }

    /// Records that a commit is starting. The commit covers all records sent so far; `sent` is
    /// their total number and size.
    pub(crate) fn begin(&mut self, now: Instant, sent: Window) {
        *self = Self::new(now, sent);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE_RECORD: Window = Window {
        records: 1,
        bytes: 500,
    };

    fn times(window: Window, n: u64) -> Window {
        window.map(|part| part * n)
    }

    fn schedule() -> (CommitSchedule, Instant) {
        let now = Instant::now();
        (CommitSchedule::new(now, Window::default()), now)
    }

    #[test]
    fn commits_immediately_in_quiet_periods_and_groups_records_in_busy_periods() {
        let (mut schedule, now) = schedule();
        assert_eq!(
            schedule.due(now, ONE_RECORD, true, false),
            Some(now + COMMIT_INTERVAL_MIN)
        );
        // Under high load, the next commit is due a fixed time after the first uncommitted record
        // was sent; later records do not postpone the commit.
        let later = now + Duration::from_millis(3);
        let due = schedule.due(later, times(ONE_RECORD, 2), true, true);
        assert_eq!(due, Some(now + BUSY_COMMIT_INTERVAL));
        schedule.begin(later, times(ONE_RECORD, 2));
        assert_eq!(
            schedule.due(later, times(ONE_RECORD, 2), false, false),
            None
        );
        // A record that is sent shortly after a commit has to wait until the minimum interval has
        // passed.
        let soon = later + Duration::from_millis(1);
        let due = schedule.due(soon, times(ONE_RECORD, 3), true, false);
        assert_eq!(due, Some(later + COMMIT_INTERVAL_MIN));
        // A record that is sent long after a commit is committed immediately.
        schedule.begin(soon, times(ONE_RECORD, 3));
        let late = soon + COMMIT_INTERVAL_MIN;
        let due = schedule.due(late, times(ONE_RECORD, 4), true, false);
        assert_eq!(due, Some(late));
    }

    #[test]
    fn commits_a_large_transaction_immediately() {
        let (mut schedule, now) = schedule();
        let many = times(ONE_RECORD, TRANSACTION_MAX.records);
        assert_eq!(schedule.due(now, many, true, true), Some(now));
        let (mut schedule, now) = self::schedule();
        let big = Window {
            records: 1,
            bytes: TRANSACTION_MAX.bytes,
        };
        assert_eq!(schedule.due(now, big, true, true), Some(now));
    }

    #[test]
    fn delays_idle_checkpoints_unless_one_is_requested() {
        let (mut schedule, now) = schedule();
        let nothing = Window::default();
        assert_eq!(schedule.due(now, nothing, false, false), None);
        assert_eq!(
            schedule.due(now, nothing, true, false),
            Some(now + IDLE_CHECKPOINT_INTERVAL)
        );
        schedule.request_checkpoint();
        assert_eq!(
            schedule.due(now, nothing, true, false),
            Some(now + REQUESTED_CHECKPOINT_DELAY)
        );
        schedule.begin(now, nothing);
        assert_eq!(
            schedule.due(now, nothing, true, false),
            Some(now + IDLE_CHECKPOINT_INTERVAL)
        );
    }

    #[test]
    fn ignores_records_sent_in_earlier_kafka_transactions() {
        let (mut schedule, now) = schedule();
        assert!(!schedule.has_records(Window::default()));
        assert!(schedule.has_records(ONE_RECORD));
        let big = Window {
            records: TRANSACTION_MAX.records - 1,
            bytes: TRANSACTION_MAX.bytes - 1,
        };
        schedule.begin(now, big);
        assert!(!schedule.has_records(big));
        let more = Window {
            records: big.records + 1,
            bytes: big.bytes + 1,
        };
        assert!(schedule.has_records(more));
        assert_eq!(
            schedule.due(now, more, true, false),
            Some(now + COMMIT_INTERVAL_MIN)
        );
    }
}
