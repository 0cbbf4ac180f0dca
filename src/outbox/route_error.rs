//! The reasons why a row can't become a record.

use super::reserved_topics::TopicUse;

/// An error for a row that can't become a record. Never contains a payload.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum RouteError {
    /// A column of the topic's template is null.
    #[error(
        "a column that topic names is null, so the row has no topic. Fill the column (and forbid \
         NULL in it), or take it out of topic"
    )]
    TopicNull,
    /// The expanded topic template is not a valid topic name.
    #[error(
        "{0:?} can't be the name of a topic: expected 1 to 249 characters of a-z A-Z 0-9 . _ - \
         and not . or .. alone. Change topic so that it names another column"
    )]
    TopicInvalid(String),
    /// The topic is reserved for Walpost or Kafka.
    #[error(
        "topic {topic:?} is reserved for {usage}: events must not be written to it. Names that differ in . and _ alone count as one, \
         as Kafka creates only one of them. It results from {setting}. Correct what writes the column, or begin the name with a text of \
         its own, as topic = \"outbox.event.{{aggregatetype}}\" does"
    )]
    TopicReserved {
        topic: String,
        usage: TopicUse,
        /// The setting and its value.
        setting: String,
    },
    /// The partition column's value is out of range.
    #[error(
        "the partition column has {0}, expected a number from 0 to 2147483647. Correct what writes it, or take partition out of the configuration"
    )]
    Partition(String),
    /// The timestamp column's value can't be represented as a Kafka timestamp.
    #[error(
        "the timestamp column has {0:?}, expected a time after 1970-01-01. Correct what writes it, or take timestamp out of the configuration"
    )]
    Timestamp(String),
    /// The headers column isn't an object.
    #[error("headers column: {0}. Correct what writes it, or set headers_column = \"\"")]
    Headers(String),
    /// A bytea value is not in hexadecimal form.
    #[error("a bytea value is not in the form \\x..., although bytea_output=hex was requested")]
    Bytea,
    /// A time can't be represented in RFC 3339 format.
    #[error(
        "a column has {0:?}, expected a time of the years 0 to 9999, as the template writes it as RFC 3339. Correct what \
         writes it, or take :rfc3339 out of the template"
    )]
    Time(String),
    /// A value is not valid UTF-8, which PostgreSQL does not check if the encoding is SQL_ASCII.
    #[error(
        "a value is not UTF-8, and the database has the encoding SQL_ASCII, with which PostgreSQL does not check texts. Correct what \
         writes it, or have the outbox in a database with the encoding UTF8"
    )]
    Encoding,
    /// Bytes that should become a JSON string are not valid text.
    #[error(
        "a value is not UTF-8, so it can't become a JSON string. Correct what writes it, or set value_format to \"bytes\""
    )]
    NotText,
}

impl RouteError {
    pub(super) fn time(text: &[u8]) -> Self {
        Self::Time(String::from_utf8_lossy(text).into_owned())
    }
}
