//! Statistics that librdkafka reports periodically.

use serde::{Deserialize, Serialize};

/// The subset of librdkafka's statistics that is relevant to operators.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Statistics {
    /// Number of records in the producer's queues.
    pub queued_records: u64,
    /// Number of retried requests.
    pub retries: u64,
    /// Number of bytes sent to the brokers.
    pub sent_bytes: u64,
    /// The 99th percentile of the round-trip time to the slowest broker during the last reporting
    /// interval, in microseconds.
    pub round_trip_p99_micros: Option<u64>,
}
