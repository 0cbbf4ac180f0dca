//! Timestamps in microseconds since 1970, and a timeout that PostgreSQL and Kafka connections share.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// How long to keep retrying a login after the server or broker starts rejecting it. The usual
/// cause of such rejections is a password rotation.
pub(crate) const REFUSED_LOGIN_TIMEOUT: Duration = Duration::from_secs(10 * 60);

/// Microseconds from 1970 to 2000, the epoch of PostgreSQL's timestamps.
const POSTGRES_EPOCH_MICROS: i64 = 946_684_800_000_000;

/// Returns the current time in microseconds since 1970.
#[must_use]
pub fn unix_micros() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    u64::try_from(since.unwrap_or_default().as_micros()).unwrap_or_default()
}

/// Converts a PostgreSQL timestamp to microseconds since 1970. Returns zero for times before 1970.
#[must_use]
pub(crate) fn from_postgres_micros(micros: i64) -> u64 {
    u64::try_from(micros.saturating_add(POSTGRES_EPOCH_MICROS)).unwrap_or_default()
}

/// Converts microseconds to seconds.
#[must_use]
#[expect(
    clippy::cast_precision_loss,
    reason = "f64 represents every number of microseconds below 2^53 (285 years) exactly"
)]
pub(crate) fn seconds(micros: u64) -> f64 {
    micros as f64 / 1e6
}
