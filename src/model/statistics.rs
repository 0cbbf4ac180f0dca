//! What librdkafka says of itself now and then.

use serde::{Deserialize, Serialize};

/// The part of librdkafka's statistics that a person wants to see.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Statistics {
    /// Records that the producer has.
    pub queued_records: u64,
    /// Requests that were sent again.
    pub retries: u64,
    /// Bytes that were sent to the brokers.
    pub sent_bytes: u64,
    /// The slowest broker's round trip, which 99 % of the last interval's were within, in
    /// microseconds.
    pub round_trip_p99_micros: Option<u64>,
}
