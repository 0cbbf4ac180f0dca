//! Shows the progress of a long operation: as a bar on a terminal, and otherwise as occasional log
//! lines.

use std::io::{self, IsTerminal, Write};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use tracing::info;

/// How often the progress is logged if there is no terminal.
const LOG_INTERVAL: Duration = Duration::from_secs(10);
/// How often the bar is redrawn.
const REDRAW_INTERVAL: Duration = Duration::from_millis(200);

/// The bars currently shown on the terminal.
static BARS: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);

/// The progress of one operation. If dropped before [`Progress::finish`], its bar disappears.
pub(crate) struct Progress {
    what: String,
    pace: PaceMeter,
    /// `None` if there is no terminal.
    bar: Option<ProgressBar>,
}

impl Progress {
    /// Starts showing progress. `what` is a description such as "rows read", and `total` is the
    /// expected number, if known.
    #[must_use]
    pub(crate) fn new(what: &str, total: Option<u64>) -> Self {
        let bar = is_terminal().then(|| {
            let bar = match total {
                Some(total) => ProgressBar::new(total),
                None => ProgressBar::new_spinner(),
            };
            bar.set_style(style(total.is_some()));
            bar.set_message(what.to_owned());
            bar.enable_steady_tick(REDRAW_INTERVAL);
            BARS.add(bar)
        });
        Self {
            what: what.to_owned(),
            pace: PaceMeter::new(total, Instant::now()),
            bar,
        }
    }

    /// Advances by `count`. This reads the clock, so call it for batches if individual items are
    /// quick.
    pub(crate) fn advance(&mut self, count: u64) {
        match &self.bar {
            Some(bar) => {
                self.pace.done += count;
                bar.inc(count);
            }
            None => {
                if let Some(told) = self.pace.advance(count, Instant::now()) {
                    log_progress(&self.what, &told, false);
                }
            }
        }
    }

    /// Returns how many items are done.
    #[must_use]
    pub(crate) fn done(&self) -> u64 {
        self.pace.done
    }

    /// Ends the operation, and logs the total.
    pub(crate) fn finish(mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
            BARS.remove(&bar);
        }
        log_progress(&self.what, &self.pace.measure(Instant::now()), true);
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
    "{msg} {wide_bar} {human_pos}/{human_len}, {per_sec}, {elapsed} gone, {eta} to go";
const WITHOUT_TOTAL: &str = "{msg} {spinner} {human_pos}, {per_sec}, {elapsed} gone";

fn style(has_total: bool) -> ProgressStyle {
    let template = match has_total {
        true => WITH_TOTAL,
        false => WITHOUT_TOTAL,
    };
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

fn log_progress(what: &str, told: &Measurement, is_over: bool) {
    let Measurement {
        done,
        total,
        per_second,
        left,
    } = told;
    if is_over {
        return info!(count = done, per_second, "{what}");
    }
    let left = left.map(tracing::field::debug);
    info!(count = done, total, per_second, left, "{what} so far");
}

/// The pure part: determines when to log the progress, and with which values.
struct PaceMeter {
    total: Option<u64>,
    done: u64,
    began: Instant,
    logged_at: Instant,
}

/// The values to log.
#[derive(Debug, PartialEq, Eq)]
struct Measurement {
    done: u64,
    total: Option<u64>,
    per_second: u64,
    /// The remaining time, if the total is known and some items are done.
    left: Option<Duration>,
}

impl PaceMeter {
    fn new(total: Option<u64>, now: Instant) -> Self {
        Self {
            total,
            done: 0,
            began: now,
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
        // Avoids a division by zero if the operation ends immediately.
        let millis = now.duration_since(self.began).as_millis().max(1);
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

/// Writes log lines to standard error, and hides the bars meanwhile. Blocks while the reader of
/// standard error does not read.
pub(crate) struct BarSafeStderr;

#[expect(
    clippy::disallowed_methods,
    reason = "what comes here was made fit to be shown by `logging`"
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
#[expect(clippy::disallowed_methods, reason = "nothing is written")]
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
        let told: Vec<_> = (1..=35)
            .filter_map(|second| Some((second, pace.advance(10, at(second))?)))
            .map(|(second, told)| (second, told.done, told.per_second, told.left))
            .collect();
        let left = |seconds| Some(Duration::from_secs(seconds));
        assert_eq!(
            told,
            [
                (10, 100, 10, left(90)),
                (20, 200, 10, left(80)),
                (30, 300, 10, left(70)),
            ]
        );
    }

    #[test]
    fn what_is_not_known_is_not_told() {
        let (mut pace, at) = pace(None);
        let told = pace.advance(5, at(10)).expect("something to tell");
        assert_eq!((told.total, told.left), (None, None));
        let (pace, at) = self::pace(Some(10));
        assert_eq!(pace.measure(at(0)).left, None, "nothing is done yet");
    }

    #[test]
    fn more_than_was_expected_leaves_no_time() {
        let (mut pace, at) = pace(Some(10));
        pace.done = 20;
        let told = pace.advance(0, at(10)).expect("something to tell");
        assert_eq!(told.left, Some(Duration::ZERO));
    }

    #[test]
    fn templates_of_bars_are_templates() {
        for template in [WITH_TOTAL, WITHOUT_TOTAL] {
            assert!(ProgressStyle::with_template(template).is_ok(), "{template}");
        }
    }
}
