//! Waiting for a condition, with a deadline; never for time to pass.

use std::ops::RangeInclusive;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

/// Long enough for anything that works, on two cores that a dozen servers share.
pub(crate) const PATIENCE: Duration = Duration::from_secs(180);

/// Between two questions: what lasts is asked about less often, for the answers cost the processor that it waits for.
const POLL: RangeInclusive<Duration> = Duration::from_millis(10)..=Duration::from_millis(100);

/// Asks until the answer is `Some`, and returns it.
///
/// # Panics
/// After [`PATIENCE`], naming `what`.
pub(crate) fn wait_for<T>(what: &str, ask: impl FnMut() -> Option<T>) -> T {
    match poll_until(PATIENCE, ask) {
        Some(answer) => answer,
        None => panic!("waited {PATIENCE:?} in vain for {what}"),
    }
}

/// Asks until the answer is true.
///
/// # Panics
/// After [`PATIENCE`], naming `what`.
pub(crate) fn wait_until(what: &str, mut ask: impl FnMut() -> bool) {
    wait_for(what, || ask().then_some(()));
}

/// Asks until the answer is `Some` or `within` has passed; asks at least once.
pub(crate) fn poll_until<T>(within: Duration, mut ask: impl FnMut() -> Option<T>) -> Option<T> {
    let began = Instant::now();
    loop {
        if let Some(answer) = ask() {
            return Some(answer);
        }
        let waited = began.elapsed();
        if waited >= within {
            return None;
        }
        thread::sleep((waited / 20).clamp(*POLL.start(), *POLL.end()));
    }
}

/// For what has partitions by the day: if this one, by UTC, has less left than [`PATIENCE`], waits for
/// the next.
pub(crate) fn within_a_day() {
    const DAY: u64 = 24 * 60 * 60;
    let now = SystemTime::UNIX_EPOCH.elapsed().unwrap();
    let left = Duration::from_secs(DAY) - Duration::from_secs(now.as_secs() % DAY);
    if left < PATIENCE {
        thread::sleep(left);
    }
}

/// Watches that `holds` stays true for the whole of `during`; for what must *not* happen.
///
/// # Panics
/// As soon as it is false, naming `what`.
pub(crate) fn stays(what: &str, during: Duration, mut holds: impl FnMut() -> bool) {
    let broken = poll_until(during, || (!holds()).then_some(()));
    assert!(broken.is_none(), "did not stay: {what}");
}
