//! The reasons why a row can't be converted to a record.

use super::reserved_topics::TopicUse;

/// Maximum number of characters that an error quotes from a row's value. A value can be as large as
/// the row, and becomes up to six times as long when its characters are escaped.
const QUOTED_CHARS_MAX: usize = 1000;

/// The error returned if a row can't be converted to a record. The error never contains a payload.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum RouteError {
    /// A column of the topic's template is null.
    #[error(
        "a column that the topic setting refers to is null, so the row has no topic. Set a value in the column (and make the \
         column NOT NULL), or remove the column from the topic setting"
    )]
    TopicNull,
    /// The expanded topic template is not a valid topic name.
    #[error(
        "{:?} is not a valid topic name: expected 1 to 249 characters from [a-zA-Z0-9._-], other than \".\" and \"..\". Use \
         another column in the topic setting",
        beginning(.0)
    )]
    TopicInvalid(String),
    /// The topic is reserved for Walpost or Kafka.
    #[error(
        "topic {topic:?} is reserved for {usage}{}: events must not be written to it. Names that differ only in . and _ are treated as equal, \
         because Kafka creates only one of them. The topic comes from {setting}. Correct the program that writes the column, or begin \
         the topic with literal text, as in topic = \"outbox.event.{{aggregatetype}}\"",
        matched(template.as_deref())
    )]
    TopicReserved {
        topic: String,
        usage: TopicUse,
        /// The template in a `fleet.source` that matches the topic, or `None` if the topic is
        /// reserved under its own name.
        template: Option<String>,
        /// The name and value of the setting that determines the topic.
        setting: String,
    },
    /// The partition column's value is out of range.
    #[error(
        "the partition column contains {}; expected a number from 0 to 2147483647. Correct the program that writes it, or remove \
         the partition setting",
        beginning(.0)
    )]
    Partition(String),
    /// The timestamp column's value can't be represented as a Kafka timestamp.
    #[error(
        "the timestamp column contains {:?}; expected a time after 1970-01-01. Correct the program that writes it, or remove the \
         timestamp setting",
        beginning(.0)
    )]
    Timestamp(String),
    /// The value of the headers column isn't a JSON object.
    #[error(
        "headers column: {0}. Correct the program that writes it, or set headers_column = \"\""
    )]
    Headers(String),
    /// A bytea value is not in hexadecimal form.
    #[error("a bytea value is not in the form \\x..., although bytea_output=hex was requested")]
    Bytea,
    /// A time can't be represented in RFC 3339 format.
    #[error(
        "a column contains {:?}; expected a time in the years 0 to 9999, because the template formats it as RFC 3339. Correct the \
         program that writes it, or remove :rfc3339 from the template",
        beginning(.0)
    )]
    Time(String),
    /// A value is not valid UTF-8. This can happen if the database has the encoding SQL_ASCII, for
    /// which PostgreSQL does not validate text.
    #[error(
        "a value is not UTF-8. The database has the encoding SQL_ASCII, for which PostgreSQL does not validate text. Correct the program \
         that writes the value, or use a database with the encoding UTF8 for the outbox"
    )]
    Encoding,
    /// A value that should become a JSON string is not valid UTF-8.
    #[error(
        "a value is not UTF-8, so it can't become a JSON string. Correct the program that writes it, or set value_format to \"bytes\""
    )]
    NotText,
}

impl RouteError {
    pub(super) fn time(text: &[u8]) -> Self {
        Self::Time(String::from_utf8_lossy(text).into_owned())
    }
}

/// Returns the part of the error message that quotes the template, or an empty string if there is
/// no template.
fn matched(template: Option<&str>) -> String {
    template.map_or_else(String::new, |template| {
        format!(" (the topic name matches {template:?} in the template of a fleet.source)")
    })
}

/// Returns the part of a row's value that an error quotes.
fn beginning(value: &str) -> &str {
    let end = value.char_indices().nth(QUOTED_CHARS_MAX);
    end.map_or(value, |(end, _)| &value[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_quote_only_the_beginning_of_a_long_value() {
        let long = "\u{7f}".repeat(1 << 20);
        for error in [
            RouteError::TopicInvalid(long.clone()),
            RouteError::Partition(long.clone()),
            RouteError::Timestamp(long.clone()),
            RouteError::Time(long),
        ] {
            let length = error.to_string().len();
            assert!((1000..7000).contains(&length), "{length}");
        }
        let short = RouteError::Partition("x".to_owned()).to_string();
        assert!(short.contains("partition column contains x;"), "{short}");
    }
}
