//! Limits how many notices are logged: a server can send any number of them.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Number of notices logged in each [`PERIOD`].
const NOTICES_MAX: u32 = 20;
const PERIOD: Duration = Duration::from_secs(60);

/// Counts the notices on all connections of one connection string.
#[derive(Debug, Default)]
pub(crate) struct NoticeLimit(Mutex<Counts>);

#[derive(Debug, Default)]
struct Counts {
    /// When the current period began.
    since: Option<Instant>,
    logged: u32,
    /// Notices that were suppressed and not yet reported.
    left_out: u64,
}

impl NoticeLimit {
    /// Counts a notice. Returns how many were suppressed before it, or `None` if this one is
    /// suppressed as well.
    pub(in crate::postgres) fn admit(&self, now: Instant) -> Option<u64> {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_over = |since: Instant| now.saturating_duration_since(since) >= PERIOD;
        if counts.since.is_none_or(is_over) {
            (counts.since, counts.logged) = (Some(now), 0);
        }
        if counts.logged == NOTICES_MAX {
            counts.left_out += 1;
            return None;
        }
        counts.logged += 1;
        Some(std::mem::take(&mut counts.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_some_notices_a_minute_and_counts_the_others() {
        let limit = NoticeLimit::default();
        let start = Instant::now();
        for second in 0..120 {
            let now = start + Duration::from_secs(second);
            for n in 0..1000 {
                let expected = match (second, n) {
                    (60, 0) => Some(60_000 - u64::from(NOTICES_MAX)),
                    (0 | 60, n) if n < NOTICES_MAX => Some(0),
                    _ => None,
                };
                assert_eq!(limit.admit(now), expected, "{n} in second {second}");
            }
        }
    }
}
