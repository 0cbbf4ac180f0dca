//! Limits how much may be in flight with exactly-once delivery, so that Kafka transactions end in
//! time.
//!
//! A commit waits for everything in flight, and the brokers abort a transaction that is open for
//! longer than `transaction.timeout.ms`. With a slow link or a quota, delivering a full window can
//! take longer than that, each time that it is produced. Therefore the window is reduced after a
//! transaction that failed or took long, and enlarged after one that was acknowledged quickly.
//! Pure: the time is passed as an argument.

use std::time::Duration;

use crate::model::window::Window;

/// A commit that takes longer than this had too many records to wait for.
const SLOW_COMMIT: Duration = Duration::from_secs(5);
/// After a commit that took less than this, four times as much should take no longer than [`SLOW_COMMIT`].
const FAST_COMMIT: Duration = Duration::from_secs(1);
/// Lower limit of the window. A broker that can't accept this much within the transaction timeout
/// is effectively unavailable, and a failure with another cause should not reduce the window any
/// further.
const MIN_WINDOW: Window = Window {
    records: 100,
    bytes: 64 << 10,
};

/// How much may be in flight at the moment.
#[derive(Debug)]
pub(crate) struct AdaptiveWindow {
    most: Window,
    now: Window,
}

impl AdaptiveWindow {
    /// Creates a window with the maximum size that the settings allow.
    pub(crate) fn new(most: Window) -> Self {
        Self { most, now: most }
    }

    /// Returns how much may be in flight.
    pub(crate) fn window(&self) -> Window {
        self.now
    }

    /// Records that a commit took this long, with this much `in_flight` when it started.
    pub(crate) fn committed(&mut self, in_flight: Window, took: Duration) {
        let was_full = |part: u64, whole: u64| part >= whole / 2;
        if took > SLOW_COMMIT {
            self.set(in_flight.map(|part| part / 2));
        } else if took < FAST_COMMIT
            && (was_full(in_flight.records, self.now.records)
                || was_full(in_flight.bytes, self.now.bytes))
        {
            self.set(self.now.map(|part| part.saturating_mul(4)));
        }
    }

    /// Records that a transaction was abandoned with this much `in_flight`.
    pub(crate) fn gave_up(&mut self, in_flight: Window) {
        if in_flight != Window::default() {
            self.set(in_flight.map(|part| part / 4));
        }
    }

    /// Sets the window, within its limits.
    fn set(&mut self, window: Window) {
        let bound = |part: u64, least: u64, most: u64| part.clamp(least.min(most), most);
        self.now = Window {
            records: bound(window.records, MIN_WINDOW.records, self.most.records),
            bytes: bound(window.bytes, MIN_WINDOW.bytes, self.most.bytes),
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
    fn broker_that_keeps_up_is_allowed_all() {
        let mut adaptive_window = AdaptiveWindow::new(MAX_WINDOW);
        for in_flight in [window(1, 500), MAX_WINDOW] {
            adaptive_window.committed(in_flight, COMMIT_TIME);
            assert_eq!(adaptive_window.window(), MAX_WINDOW);
        }
        adaptive_window.gave_up(Window::default());
        assert_eq!(adaptive_window.window(), MAX_WINDOW);
    }

    /// Regardless of the broker's rate, the window converges to one with which commits end in time.
    #[test]
    fn window_adapts_to_a_broker_of_any_rate() {
        const TIMEOUT: Duration = Duration::from_secs(30);
        for bytes_a_second in [4 << 10, 100 << 10, 2 << 20, 200 << 20] {
            let mut adaptive_window = AdaptiveWindow::new(MAX_WINDOW);
            let mut lost = 0;
            for round in 0..30 {
                let in_flight = window(
                    adaptive_window.window().bytes / 1000,
                    adaptive_window.window().bytes,
                );
                let took = Duration::from_millis(in_flight.bytes * 1000 / bytes_a_second);
                if took < TIMEOUT {
                    adaptive_window.committed(in_flight, took);
                } else {
                    adaptive_window.gave_up(in_flight);
                    lost = round + 1;
                }
            }
            assert!(lost <= 5, "{bytes_a_second} bytes/s: {lost} transactions");
        }
    }

    #[test]
    fn outage_costs_a_few_commits() {
        let mut adaptive_window = AdaptiveWindow::new(MAX_WINDOW);
        adaptive_window.gave_up(window(3, 1500));
        assert_eq!(adaptive_window.window(), MIN_WINDOW);
        let mut commits = 0;
        while adaptive_window.window() != MAX_WINDOW {
            // A commit of few records does not show that the broker is fast.
            adaptive_window.committed(window(3, 1500), COMMIT_TIME);
            adaptive_window.committed(adaptive_window.window(), COMMIT_TIME);
            commits += 1;
        }
        assert!(commits < 10, "{commits}");
        let small = window(10, 1000);
        let mut adaptive_window = AdaptiveWindow::new(small);
        adaptive_window.gave_up(small);
        assert_eq!(adaptive_window.window(), small);
    }

    #[test]
    fn commit_that_took_long_leaves_half_and_a_failure_a_quarter_of_what_it_waited_for() {
        let in_flight = window(4000, 4 << 20);
        let after = |took| {
            let mut adaptive_window = AdaptiveWindow::new(MAX_WINDOW);
            adaptive_window.committed(in_flight, took);
            adaptive_window.window()
        };
        assert_eq!(after(SLOW_COMMIT), MAX_WINDOW);
        assert_eq!(after(SLOW_COMMIT + COMMIT_TIME), window(2000, 2 << 20));
        let mut adaptive_window = AdaptiveWindow::new(MAX_WINDOW);
        adaptive_window.gave_up(in_flight);
        assert_eq!(adaptive_window.window(), window(1000, 1 << 20));
    }

    #[test]
    fn commit_that_was_soon_with_half_a_window_of_records_or_bytes_allows_four_times_as_much() {
        let narrow = window(1000, 1 << 20);
        let after = |in_flight, took| {
            let mut adaptive_window = AdaptiveWindow::new(MAX_WINDOW);
            adaptive_window.gave_up(window(4000, 4 << 20));
            assert_eq!(adaptive_window.window(), narrow);
            adaptive_window.committed(in_flight, took);
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
            "it may take too long then"
        );
    }
}
