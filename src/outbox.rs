//! Turns rows of the outbox table into records for Kafka. Performs no I/O, and is independent of
//! PostgreSQL's protocol and of Kafka's client library.
//!
//! [`settings`] defines the purpose of each column, and [`columns`] matches the configured columns
//! with those of the actual table. [`route`] creates a record from a row. If that is not possible,
//! [`dead_letter`] preserves as much of the event as possible. [`reserved_topics`] lists the topics
//! that events must not be written to. [`envelope`] decodes an event that was sent as a logical
//! decoding message, and presents it as a row.
//!
//! Four modules produce the same bytes as Debezium with Kafka Connect's converters: [`connect`]
//! maps columns to Debezium's types, `converted` encodes keys, values and headers, `expand` expands
//! a JSON payload into an object, and `json` writes strings and numbers.

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

/// A record for Kafka, which borrows its contents from the row and from the router's scratch space.
#[derive(Clone, Copy)]
pub struct Record<'r> {
    /// The topic's name, which has been validated.
    pub topic: &'r str,
    /// The partition, if a column contains it. Otherwise, the partitioner chooses one based on the
    /// key.
    pub partition: Option<i32>,
    /// The timestamp in milliseconds since 1970-01-01 UTC, if a column contains one.
    pub timestamp_millis: Option<i64>,
    pub key: Option<&'r [u8]>,
    /// The value. `None` is a tombstone.
    pub payload: Option<&'r [u8]>,
    pub headers: headers::Headers<'r>,
}

impl std::fmt::Debug for Record<'_> {
    // Shows only the lengths of the key and the payload, because payloads must not be logged.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Record")
            .field("topic", &self.topic)
            .field("partition", &self.partition)
            .field("key_bytes", &self.key.map(<[u8]>::len))
            .field("payload_bytes", &self.payload.map(<[u8]>::len))
            .finish_non_exhaustive()
    }
}
