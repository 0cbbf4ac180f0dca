//! For exactly-once delivery: limits the records in flight, so that Kafka transactions are
//! committed before they time out.
//!
//! A commit waits for all records in flight, and the brokers abort a transaction that stays open
//! longer than `transaction.timeout.ms`. With a slow connection or a quota, delivering a full
//! window can take longer than this timeout, so every attempt would fail. Therefore the window
//! shrinks after a transaction that failed or was slow to commit, and grows after one that
//! committed quickly.
//!
//! This module performs no I/O, and takes the current time as an argument.

use std::time::Duration;

use crate::model::window::Window;

/// If a commit takes longer than this, the window shrinks.
const SLOW_COMMIT: Duration = Duration::from_secs(5);
/// If a commit of at least half a window takes less time than this, the size of the window is
/// quadrupled. Even then, a commit should not take longer than [`SLOW_COMMIT`].
const FAST_COMMIT: Duration = Duration::from_secs(1);
/// Minimum size of the window. If a broker can't accept even this much within the transaction
/// timeout, it is effectively unavailable. The minimum also prevents failures that have other
/// causes from shrinking the window to nothing.
const MIN_WINDOW: Window = Window {
    records: 100,
    bytes: 64 << 10,
};

/// A limit on the records in flight that adapts to how fast the brokers commit.
#[derive(Debug)]
pub(crate) struct AdaptiveWindow {
    max: Window,
    current: Window,
}

impl AdaptiveWindow {
    /// Creates a window that initially has its maximum size, `max`.
    pub(crate) fn new(max: Window) -> Self {
        Self { max, current: max }
    }

    /// Returns the window's current size.
    pub(crate) fn window(&self) -> Window {
        self.current
    }

    /// Records how long a commit took. `in_flight` is the number and size of the records that were
    /// in flight when the commit started.
    pub(crate) fn record_commit(&mut self, in_flight: Window, took: Duration) {
        let was_full = |part: u64, whole: u64| part >= whole / 2;
        if took > SLOW_COMMIT {
            self.set(in_flight.map(|part| part / 2));
        } else if took < FAST_COMMIT
            && (was_full(in_flight.records, self.current.records)
                || was_full(in_flight.bytes, self.current.bytes))
        {
            self.set(self.current.map(|part| part.saturating_mul(4)));
        }
    }

    /// Records that a transaction was abandoned. `in_flight` is the number and size of the records
    /// that were in flight at that time.
    pub(crate) fn record_abandoned_transaction(&mut self, in_flight: Window) {
        if in_flight != Window::default() {
            self.set(in_flight.map(|part| part / 4));
        }
    }

    /// Sets the window's size, clamped to the minimum and maximum.
    fn set(&mut self, window: Window) {
        let bound = |part: u64, min: u64, max: u64| part.clamp(min.min(max), max);
        self.current = Window {
            records: bound(window.records, MIN_WINDOW.records, self.max.records),
            bytes: bound(window.bytes, MIN_WINDOW.bytes, self.max.bytes),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX_WINDOW: Window = Window {
        records: 100_000,
        bytes: 16 << 20,
    };
    const COMMIT_TIME: Duration = Duration::from_millis(20);

    fn window(records: u64, bytes: u64) -> Window {
        Window { records, bytes }
    }

    #[test]
    fn keeps_the_window_at_its_maximum_while_the_broker_is_fast() {
        let mut adaptive_window = AdaptiveWindow::new(MAX_WINDOW);
        for in_flight in [window(1, 500), MAX_WINDOW] {
            adaptive_window.record_commit(in_flight, COMMIT_TIME);
            assert_eq!(adaptive_window.window(), MAX_WINDOW);
        }
        adaptive_window.record_abandoned_transaction(Window::default());
        assert_eq!(adaptive_window.window(), MAX_WINDOW);
    }

    /// Whatever the broker's throughput, the window converges to a size for which commits finish
    /// before the timeout.
    #[test]
    fn adapts_the_window_to_any_broker_throughput() {
        const TIMEOUT: Duration = Duration::from_secs(30);
        for bytes_a_second in [4 << 10, 100 << 10, 2 << 20, 200 << 20] {
            let mut adaptive_window = AdaptiveWindow::new(MAX_WINDOW);
            let mut abandoned = 0;
            for round in 0..30 {
                let in_flight = window(
                    adaptive_window.window().bytes / 1000,
                    adaptive_window.window().bytes,
                );
                let took = Duration::from_millis(in_flight.bytes * 1000 / bytes_a_second);
                if took < TIMEOUT {
                    adaptive_window.record_commit(in_flight, took);
                } else {
                    adaptive_window.record_abandoned_transaction(in_flight);
                    abandoned = round + 1;
                }
            }
            assert!(
                abandoned <= 5,
                "{bytes_a_second} bytes/s: {abandoned} transactions"
            );
        }
    }

    #[test]
    fn restores_the_maximum_window_within_a_few_commits_after_an_outage() {
        let mut adaptive_window = AdaptiveWindow::new(MAX_WINDOW);
        adaptive_window.record_abandoned_transaction(window(3, 1500));
        assert_eq!(adaptive_window.window(), MIN_WINDOW);
        let mut commits = 0;
        while adaptive_window.window() != MAX_WINDOW {
            // A quick commit of only a few records does not prove that the broker is fast, so the
            // window does not grow.
            adaptive_window.record_commit(window(3, 1500), COMMIT_TIME);
            adaptive_window.record_commit(adaptive_window.window(), COMMIT_TIME);
            commits += 1;
        }
        assert!(commits < 10, "{commits}");
        let small = window(10, 1000);
        let mut adaptive_window = AdaptiveWindow::new(small);
        adaptive_window.record_abandoned_transaction(small);
        assert_eq!(adaptive_window.window(), small);
    }

    #[test]
    fn halves_the_window_after_a_slow_commit_and_quarters_it_after_a_failure() {
        let in_flight = window(4000, 4 << 20);
        let after = |took| {
            let mut adaptive_window = AdaptiveWindow::new(MAX_WINDOW);
            adaptive_window.record_commit(in_flight, took);
            adaptive_window.window()
        };
        assert_eq!(after(SLOW_COMMIT), MAX_WINDOW);
        assert_eq!(after(SLOW_COMMIT + COMMIT_TIME), window(2000, 2 << 20));
        let mut adaptive_window = AdaptiveWindow::new(MAX_WINDOW);
        adaptive_window.record_abandoned_transaction(in_flight);
        assert_eq!(adaptive_window.window(), window(1000, 1 << 20));
    }

    #[test]
    fn quadruples_the_window_after_a_fast_commit_of_at_least_half_the_window() {
        let narrow = window(1000, 1 << 20);
        let after = |in_flight, took| {
            let mut adaptive_window = AdaptiveWindow::new(MAX_WINDOW);
            adaptive_window.record_abandoned_transaction(window(4000, 4 << 20));
            assert_eq!(adaptive_window.window(), narrow);
            adaptive_window.record_commit(in_flight, took);
            adaptive_window.window()
        };
        let wide = window(4000, 4 << 20);
        assert_eq!(after(window(500, 1), COMMIT_TIME), wide);
        assert_eq!(after(window(1, 1 << 19), COMMIT_TIME), wide);
        assert_eq!(after(narrow, COMMIT_TIME), wide);
        assert_eq!(after(window(499, (1 << 19) - 1), COMMIT_TIME), narrow);
        assert_eq!(
            after(narrow, FAST_COMMIT),
            narrow,
            "with a larger window, a transaction may take too long"
        );
    }
}
