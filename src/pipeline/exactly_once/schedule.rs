//! When a Kafka transaction is committed: soon when little comes, seldom when much does. Pure: time
//! comes in as an argument.
//!
//! A commit costs the brokers some milliseconds, whatever is in it, and what was produced can be
//! read only after it. So in quiet times it follows at once, and in busy ones many records share it.

use std::time::Duration;

use tokio::time::Instant;

use crate::model::window::Window;

/// How long after one commit the next begins, at the least. Records that come later than that wait for nothing.
const QUIET: Duration = Duration::from_millis(5);
/// How long a transaction is open in busy times.
const BUSY: Duration = Duration::from_millis(250);
/// How often a checkpoint is written that only says that nothing has come.
const IDLE: Duration = Duration::from_secs(10);
/// How soon, where the server waits for it.
const ASKED: Duration = Duration::from_millis(100);
/// What a transaction may have at most.
const MOST: Window = Window {
    records: 200_000,
    bytes: 64 << 20,
};

/// What has come since the last commit.
#[derive(Debug)]
pub(crate) struct CommitSchedule {
    /// When that commit began.
    committed_at: Instant,
    /// Totals of what was sent, as of the last commit.
    committed: Window,
    /// When the first record since then was sent.
    first_at: Option<Instant>,
    /// The server waits for what it sent to be confirmed.
    asked: bool,
}

impl CommitSchedule {
    /// Nothing has come.
    pub(crate) fn new(now: Instant, sent: Window) -> Self {
        Self {
            committed_at: now,
            committed: sent,
            first_at: None,
            asked: false,
        }
    }

    /// The server wants to hear how far we are.
    pub(crate) fn ask(&mut self) {
        self.asked = true;
    }

    /// Records were sent since the last commit.
    pub(crate) fn has_records(&self, sent: Window) -> bool {
        sent.records > self.committed.records
    }

    /// When to commit next, given the totals of what was `sent`, whether the log has `moved` on
    /// since the last commit, and whether times are `busy`; `None` where there is nothing to commit.
    pub(crate) fn due(
        &mut self,
        now: Instant,
        sent: Window,
        moved: bool,
        busy: bool,
    ) -> Option<Instant> {
        let records = sent.records - self.committed.records;
        if records == 0 {
            let pause = if self.asked { ASKED } else { IDLE };
            return moved.then(|| self.committed_at + pause);
        }
        let first_at = *self.first_at.get_or_insert(now);
        let bytes = sent.bytes - self.committed.bytes;
        if records >= MOST.records || bytes >= MOST.bytes {
            return Some(now);
        }
        Some(match busy {
            true => first_at + BUSY,
            false => first_at.max(self.committed_at + QUIET),
        })
    }

    /// A commit of what was `sent` begins.
    pub(crate) fn begin(&mut self, now: Instant, sent: Window) {
        *self = Self::new(now, sent);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RECORD: Window = Window {
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
    fn quiet_records_are_committed_soon_and_busy_ones_together() {
        let (mut schedule, now) = schedule();
        assert_eq!(schedule.due(now, RECORD, true, false), Some(now + QUIET));
        // The first record counts, whatever comes after it.
        let later = now + Duration::from_millis(3);
        let due = schedule.due(later, times(RECORD, 2), true, true);
        assert_eq!(due, Some(now + BUSY));
        schedule.begin(later, times(RECORD, 2));
        assert_eq!(schedule.due(later, times(RECORD, 2), false, false), None);
        // Soon after a commit ...
        let soon = later + Duration::from_millis(1);
        let due = schedule.due(soon, times(RECORD, 3), true, false);
        assert_eq!(due, Some(later + QUIET));
        // ... and long after one.
        schedule.begin(soon, times(RECORD, 3));
        let late = soon + QUIET;
        let due = schedule.due(late, times(RECORD, 4), true, false);
        assert_eq!(due, Some(late));
    }

    #[test]
    fn a_large_transaction_is_committed_at_once() {
        let (mut schedule, now) = schedule();
        let many = times(RECORD, MOST.records);
        assert_eq!(schedule.due(now, many, true, true), Some(now));
        let (mut schedule, now) = self::schedule();
        let big = Window {
            records: 1,
            bytes: MOST.bytes,
        };
        assert_eq!(schedule.due(now, big, true, true), Some(now));
    }

    #[test]
    fn an_idle_move_is_noted_seldom_and_sooner_when_the_server_asks() {
        let (mut schedule, now) = schedule();
        let nothing = Window::default();
        assert_eq!(schedule.due(now, nothing, false, false), None);
        assert_eq!(schedule.due(now, nothing, true, false), Some(now + IDLE));
        schedule.ask();
        assert_eq!(schedule.due(now, nothing, true, false), Some(now + ASKED));
        schedule.begin(now, nothing);
        assert_eq!(schedule.due(now, nothing, true, false), Some(now + IDLE));
    }

    #[test]
    fn what_was_committed_before_does_not_count() {
        let (mut schedule, now) = schedule();
        assert!(!schedule.has_records(Window::default()));
        assert!(schedule.has_records(RECORD));
        let big = Window {
            records: MOST.records - 1,
            bytes: MOST.bytes - 1,
        };
        schedule.begin(now, big);
        assert!(!schedule.has_records(big));
        let more = Window {
            records: big.records + 1,
            bytes: big.bytes + 1,
        };
        assert!(schedule.has_records(more));
        assert_eq!(schedule.due(now, more, true, false), Some(now + QUIET));
    }
}
