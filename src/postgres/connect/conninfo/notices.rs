//! Limits how many notices are logged: a server can send any number of them.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tracing::warn;

/// Maximum number of notices logged per [`NOTICES_PERIOD`].
const NOTICES_MAX: u32 = 20;
/// Maximum number of notices logged per [`NOTICES_PERIOD`] by `walpost init`. This limit is higher
/// because the files in sql/ raise notices about each table and partition.
const INIT_NOTICES_MAX: u32 = 1000;
const NOTICES_PERIOD: Duration = Duration::from_secs(60);

/// Counts the notices received on all connections that were opened with one connection string.
#[derive(Debug)]
pub(crate) struct NoticeLimit {
    max: u32,
    counts: Mutex<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    /// When the current period began.
    since: Option<Instant>,
    logged: u32,
    /// Number of notices that were suppressed and have not been reported yet.
    suppressed: u64,
}

impl Default for NoticeLimit {
    fn default() -> Self {
        Self {
            max: NOTICES_MAX,
            counts: Mutex::default(),
        }
    }
}

impl NoticeLimit {
    /// Creates the limit for connections that `walpost init` opens.
    #[must_use]
    pub(crate) fn for_init() -> Self {
        Self {
            max: INIT_NOTICES_MAX,
            counts: Mutex::default(),
        }
    }

    /// Counts a notice, and returns whether it should be logged. If it should be logged and earlier
    /// notices were suppressed, first logs their number.
    pub(in crate::postgres) fn admits(&self, now: Instant) -> bool {
        let suppressed = self.admit(now);
        if let Some(suppressed @ 1..) = suppressed {
            warn!(
                suppressed,
                "PostgreSQL sent too many notices, so some were not logged"
            );
        }
        suppressed.is_some()
    }

    /// Counts a notice. Returns how many notices were suppressed before it, or `None` if this
    /// notice is suppressed as well.
    fn admit(&self, now: Instant) -> Option<u64> {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let is_over = |since: Instant| now.saturating_duration_since(since) >= NOTICES_PERIOD;
        if counts.since.is_none_or(is_over) {
            (counts.since, counts.logged) = (Some(now), 0);
        }
        if counts.logged == self.max {
            counts.suppressed += 1;
            return None;
        }
        counts.logged += 1;
        Some(std::mem::take(&mut counts.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_a_limited_number_of_notices_per_minute_and_counts_the_rest() {
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

    #[test]
    fn logs_more_server_notices_during_init() {
        let limit = NoticeLimit::for_init();
        let now = Instant::now();
        let logged = (0..2000).filter(|_| limit.admit(now).is_some()).count();
        assert_eq!(logged, 1000);
    }
}
