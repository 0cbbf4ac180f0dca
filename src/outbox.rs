//! What an event is. Pure: knows neither PostgreSQL's wire nor Kafka.
//!
//! [`settings`] says which columns mean what, [`columns`] holds them against the table that is
//! there, and [`route`] makes a record of a row, or where that can't be, [`dead_letter`] what can be
//! made of it. [`reserved_topics`] are those that no event may be written to. [`envelope`] reads an event that is in no table, and lays it out as a row.
//!
//! Bytes as Kafka Connect's converters write them of what Debezium makes of a row: [`connect`] has Debezium's types of
//! columns, `converted` lays keys, values and headers out, `expand` makes an object of a JSON payload, and `json` writes
//! texts and numbers.

mod bound;
pub(crate) mod columns;
pub(crate) mod connect;
mod converted;
pub mod dead_letter;
pub(crate) mod envelope;
pub(crate) mod expand;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
#[cfg(test)]
mod golden;
pub(crate) mod headers;
mod json;
pub(crate) mod properties;
pub(crate) mod reserved_topics;
pub(crate) mod route;
mod route_error;
pub(crate) mod settings;
pub(crate) mod template;
pub(crate) mod timestamp;

/// One record for Kafka, borrowed from the row it came from and the router's scratch space.
#[derive(Clone, Copy)]
pub struct Record<'r> {
    /// The topic; a legal name for one.
    pub topic: &'r str,
    /// The partition, where a column says it; otherwise the partitioner chooses by the key.
    pub partition: Option<i32>,
    /// Milliseconds since 1970-01-01 UTC, where a column says them.
    pub timestamp_millis: Option<i64>,
    pub key: Option<&'r [u8]>,
    /// The value; none is a tombstone.
    pub payload: Option<&'r [u8]>,
    pub headers: headers::Headers<'r>,
}

impl std::fmt::Debug for Record<'_> {
    // Lengths only: a payload must not reach a log.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Record")
            .field("topic", &self.topic)
            .field("partition", &self.partition)
            .field("key_bytes", &self.key.map(<[u8]>::len))
            .field("payload_bytes", &self.payload.map(<[u8]>::len))
            .finish_non_exhaustive()
    }
}
