//! Shows the progress of a long operation: as a progress bar on a terminal, otherwise as periodic
//! log messages.

use std::io::{self, IsTerminal, Write};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use tracing::info;

/// How often the progress is logged if standard error is not a terminal.
const LOG_INTERVAL: Duration = Duration::from_secs(10);
/// How often a progress bar is redrawn.
const REDRAW_INTERVAL: Duration = Duration::from_millis(200);

/// The progress bars currently shown on the terminal.
static BARS: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);

/// The progress of one operation. If this value is dropped before [`Progress::finish`] is called,
/// the progress bar is removed.
pub(crate) struct Progress {
    label: String,
    pace: PaceMeter,
    /// The progress bar, or `None` if standard error is not a terminal.
    bar: Option<ProgressBar>,
}

impl Progress {
    /// Starts showing progress. `label` describes the items, for example "rows read", and `total`
    /// is the expected number of items, if known.
    #[must_use]
    pub(crate) fn new(label: &str, total: Option<u64>) -> Self {
        let bar = is_terminal().then(|| {
            let bar = match total {
                Some(total) => ProgressBar::new(total),
                None => ProgressBar::new_spinner(),
            };
            bar.set_style(style(total.is_some()));
            bar.set_message(label.to_owned());
            bar.enable_steady_tick(REDRAW_INTERVAL);
            BARS.add(bar)
        });
        Self {
            label: label.to_owned(),
            pace: PaceMeter::new(total, Instant::now()),
            bar,
        }
    }

    /// Advances the progress by `count` items. Every call reads the clock, so call this function
    /// once per batch if processing an item is fast.
    pub(crate) fn advance(&mut self, count: u64) {
        match &self.bar {
            Some(bar) => {
                self.pace.done += count;
                bar.inc(count);
            }
            None => {
                if let Some(measurement) = self.pace.advance(count, Instant::now()) {
                    log_progress(&self.label, &measurement, false);
                }
            }
        }
    }

    /// Returns the number of completed items.
    #[must_use]
    pub(crate) fn done(&self) -> u64 {
        self.pace.done
    }

    /// Removes the progress bar, and logs the total number of completed items.
    pub(crate) fn finish(mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
            BARS.remove(&bar);
        }
        log_progress(&self.label, &self.pace.measure(Instant::now()), true);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
            BARS.remove(bar);
        }
    }
}

const WITH_TOTAL: &str =
    "{msg} {wide_bar} {human_pos}/{human_len}, {per_sec}, {elapsed} elapsed, {eta} left";
const WITHOUT_TOTAL: &str = "{msg} {spinner} {human_pos}, {per_sec}, {elapsed} elapsed";

fn style(has_total: bool) -> ProgressStyle {
    let template = match has_total {
        true => WITH_TOTAL,
        false => WITHOUT_TOTAL,
    };
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

fn log_progress(label: &str, measurement: &Measurement, is_over: bool) {
    let Measurement {
        done,
        total,
        per_second,
        left,
    } = measurement;
    if is_over {
        return info!(count = done, per_second, "{label}");
    }
    let left = left.map(tracing::field::debug);
    info!(count = done, total, per_second, left, "{label} so far");
}

/// Determines when to log the progress and which values to log. Performs no I/O.
struct PaceMeter {
    total: Option<u64>,
    done: u64,
    started_at: Instant,
    logged_at: Instant,
}

/// The progress values that are logged.
#[derive(Debug, PartialEq, Eq)]
struct Measurement {
    done: u64,
    total: Option<u64>,
    per_second: u64,
    /// The remaining time, if the total is known and at least one item has been completed.
    left: Option<Duration>,
}

impl PaceMeter {
    fn new(total: Option<u64>, now: Instant) -> Self {
        Self {
            total,
            done: 0,
            started_at: now,
            logged_at: now,
        }
    }

    fn advance(&mut self, count: u64, now: Instant) -> Option<Measurement> {
        self.done += count;
        if now.duration_since(self.logged_at) < LOG_INTERVAL {
            return None;
        }
        self.logged_at = now;
        Some(self.measure(now))
    }

    fn measure(&self, now: Instant) -> Measurement {
        // Use at least one millisecond, to avoid a division by zero if the operation ends
        // immediately.
        let millis = now.duration_since(self.started_at).as_millis().max(1);
        let per_second = u128::from(self.done) * 1000 / millis;
        let left = self.total.filter(|_| per_second > 0).map(|total| {
            let rows = u128::from(total.saturating_sub(self.done));
            Duration::from_secs(u64::try_from(rows / per_second).unwrap_or(u64::MAX))
        });
        Measurement {
            done: self.done,
            total: self.total,
            per_second: u64::try_from(per_second).unwrap_or(u64::MAX),
            left,
        }
    }
}

/// A writer for log lines that hides the progress bars while it writes to standard error. Blocks
/// while nothing reads from standard error.
pub(crate) struct BarSafeStderr;

#[expect(
    clippy::disallowed_methods,
    reason = "`logging` has already escaped the text"
)]
impl Write for BarSafeStderr {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        BARS.suspend(|| io::stderr().write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

/// Returns whether standard error is a terminal.
#[expect(
    clippy::disallowed_methods,
    reason = "nothing is written to standard error"
)]
pub(crate) fn is_terminal() -> bool {
    io::stderr().is_terminal()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pace(total: Option<u64>) -> (PaceMeter, impl Fn(u64) -> Instant) {
        let start = Instant::now();
        let at = move |seconds| start + Duration::from_secs(seconds);
        (PaceMeter::new(total, start), at)
    }

    #[test]
    fn logs_progress_every_ten_seconds() {
        let (mut pace, at) = pace(Some(1000));
        let measurement: Vec<_> = (1..=35)
            .filter_map(|second| Some((second, pace.advance(10, at(second))?)))
            .map(|(second, measurement)| {
                (
                    second,
                    measurement.done,
                    measurement.per_second,
                    measurement.left,
                )
            })
            .collect();
        let left = |seconds| Some(Duration::from_secs(seconds));
        assert_eq!(
            measurement,
            [
                (10, 100, 10, left(90)),
                (20, 200, 10, left(80)),
                (30, 300, 10, left(70)),
            ]
        );
    }

    #[test]
    fn omits_the_total_and_remaining_time_if_unknown() {
        let (mut pace, at) = pace(None);
        let measurement = pace.advance(5, at(10)).expect("a measurement");
        assert_eq!((measurement.total, measurement.left), (None, None));
        let (pace, at) = self::pace(Some(10));
        assert_eq!(pace.measure(at(0)).left, None, "nothing is done yet");
    }

    #[test]
    fn reports_no_remaining_time_if_the_total_is_exceeded() {
        let (mut pace, at) = pace(Some(10));
        pace.done = 20;
        let measurement = pace.advance(0, at(10)).expect("a measurement");
        assert_eq!(measurement.left, Some(Duration::ZERO));
    }

    #[test]
    fn progress_bar_templates_are_valid() {
        for template in [WITH_TOTAL, WITHOUT_TOTAL] {
            assert!(ProgressStyle::with_template(template).is_ok(), "{template}");
        }
    }
}
