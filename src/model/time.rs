//! Times: microseconds since 1970, and how long what passes may take.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// How long a refusal of who we are is taken for one that passes, by a server or broker that had accepted us: most
/// often a password is being rotated.
pub(crate) const REFUSAL_PATIENCE: Duration = Duration::from_secs(10 * 60);

/// From 1970 to 2000, where PostgreSQL's time begins.
const POSTGRES_EPOCH_MICROS: i64 = 946_684_800_000_000;

/// Microseconds since 1970.
#[must_use]
pub fn unix_micros() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    u64::try_from(since.unwrap_or_default().as_micros()).unwrap_or_default()
}

/// Microseconds since 1970 of a time of PostgreSQL's; zero where it has none.
#[must_use]
pub(crate) fn of_postgres(micros: i64) -> u64 {
    u64::try_from(micros.saturating_add(POSTGRES_EPOCH_MICROS)).unwrap_or_default()
}

/// Microseconds as seconds.
#[must_use]
#[expect(
    clippy::cast_precision_loss,
    reason = "exact to the microsecond for two centuries"
)]
pub(crate) fn seconds(micros: u64) -> f64 {
    micros as f64 / 1e6
}
