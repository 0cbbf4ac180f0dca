//! Waits for a condition with a timeout, rather than for a fixed time.

use std::ops::RangeInclusive;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

/// A timeout that is long enough for any operation that succeeds, even on two cores that a dozen
/// servers share.
pub(crate) const WAIT_TIMEOUT: Duration = Duration::from_secs(180);

/// Minimum and maximum interval between polls. The interval grows over time, because polling takes
/// CPU time from the awaited operation.
const POLL_INTERVALS: RangeInclusive<Duration> =
    Duration::from_millis(10)..=Duration::from_millis(100);

/// Polls until the result is `Some`, and returns its value.
///
/// # Panics
/// Panics after [`WAIT_TIMEOUT`], with `what` in the message.
pub(crate) fn wait_for<T>(what: &str, poll: impl FnMut() -> Option<T>) -> T {
    match poll_until(WAIT_TIMEOUT, poll) {
        Some(result) => result,
        None => panic!("timed out after {WAIT_TIMEOUT:?} waiting for {what}"),
    }
}

/// Polls until the result is true.
///
/// # Panics
/// Panics after [`WAIT_TIMEOUT`], with `what` in the message.
pub(crate) fn wait_until(what: &str, mut poll: impl FnMut() -> bool) {
    wait_for(what, || poll().then_some(()));
}

/// Polls until the result is `Some` or `within` has passed. The condition is polled at least once.
pub(crate) fn poll_until<T>(within: Duration, mut poll: impl FnMut() -> Option<T>) -> Option<T> {
    let started = Instant::now();
    loop {
        if let Some(result) = poll() {
            return Some(result);
        }
        let waited = started.elapsed();
        if waited >= within {
            return None;
        }
        thread::sleep((waited / 20).clamp(*POLL_INTERVALS.start(), *POLL_INTERVALS.end()));
    }
}

/// Waits for the next UTC day if the current one ends within [`WAIT_TIMEOUT`], so that the day does
/// not change during a test with daily partitions.
pub(crate) fn avoid_utc_midnight() {
    const DAY: u64 = 24 * 60 * 60;
    let now = SystemTime::UNIX_EPOCH.elapsed().unwrap();
    let left = Duration::from_secs(DAY) - Duration::from_secs(now.as_secs() % DAY);
    if left < WAIT_TIMEOUT {
        thread::sleep(left);
    }
}

/// Asserts that `holds` keeps returning true for the duration `during`. Use this to test that
/// something does *not* happen.
///
/// # Panics
/// Panics as soon as `holds` returns false, with `what` in the message.
pub(crate) fn assert_stays(what: &str, during: Duration, mut holds: impl FnMut() -> bool) {
    let broken = poll_until(during, || (!holds()).then_some(()));
    assert!(broken.is_none(), "condition no longer holds: {what}");
}
