//! Statistics that librdkafka reports periodically.

use serde::{Deserialize, Serialize};

/// The subset of librdkafka's statistics that is relevant to operators.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Statistics {
    /// Records in the producer's queues.
    pub queued_records: u64,
    /// Requests that were retried.
    pub retries: u64,
    /// Bytes sent to the brokers.
    pub sent_bytes: u64,
    /// The 99th percentile of the round-trip time to the slowest broker in the last interval, in microseconds.
    pub round_trip_p99_micros: Option<u64>,
}
