//! A row becomes a record: topic, key, headers, payload.

use std::ops::Range;

use super::Record;
use super::columns::{Bound, Mapping, Piece, Row, Source};
use super::headers::{self, HeaderSpan, Headers, POSITION_HEADER};
use super::settings::NullPayload;
use super::timestamp;

/// Scratch space above this is given back before the next row.
const SCRATCH_KEPT_BYTES: usize = 1 << 20;

/// Kafka's limit for the name of a topic.
const TOPIC_BYTES_MAX: usize = 249;

/// Makes records. Holds the scratch space that they borrow, so that a row costs no allocation.
#[derive(Debug, Default)]
pub struct Router {
    /// The last name of a topic that was found to be one, or nothing; the next row's is mostly the
    /// same.
    topic: String,
    scratch: Vec<u8>,
    headers: Vec<HeaderSpan>,
}

/// A row that can't become a record. Never holds a payload.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum RouteError {
    /// A column of the topic's template is null.
    #[error(
        "a column that topic names is null, so the row has no topic. Fill the column (and forbid \
         NULL in it), or take it out of topic"
    )]
    TopicNull,
    /// The topic's template gave what can't be the name of a topic.
    #[error(
        "{0:?} can't be the name of a topic: expected 1 to 249 characters of a-z A-Z 0-9 . _ - \
         and not . or .. alone. Change topic so that it names another column"
    )]
    TopicInvalid(String),
    /// The partition column's value is null or out of range.
    #[error(
        "the partition column has {0}, expected a number from 0 to 2147483647. Correct what writes it, or take partition out of the configuration"
    )]
    Partition(String),
    /// The timestamp column's value has no place on the time line.
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
}

impl Router {
    /// Makes the record for `row`, whose position has the text `position`.
    ///
    /// # Errors
    /// The row can't become a record under `mapping`'s settings.
    pub fn route<'r>(
        &'r mut self,
        mapping: &Mapping,
        row: &Row<'r>,
        position: &[u8],
    ) -> Result<Record<'r>, RouteError> {
        self.route_with(mapping, row, POSITION_HEADER, position)
    }

    /// As [`Router::route`], with another header in the place of the position.
    ///
    /// # Errors
    /// The row can't become a record under `mapping`'s settings.
    pub fn route_with<'r>(
        &'r mut self,
        mapping: &Mapping,
        row: &Row<'r>,
        name: &str,
        value: &[u8],
    ) -> Result<Record<'r>, RouteError> {
        self.scratch.clear();
        self.scratch.shrink_to(SCRATCH_KEPT_BYTES);
        self.headers.clear();
        let scratch = &mut self.scratch;

        let topic = append(&mapping.topic, row, scratch)?;
        let topic = topic.without_nulls().ok_or(RouteError::TopicNull)?;
        let key = append(&mapping.key, row, scratch)?.or_null();
        for (name, value) in &mapping.headers {
            let name = headers::push(scratch, name.as_bytes());
            let value = append(value, row, scratch)?.or_null();
            self.headers.push(HeaderSpan { name, value });
        }
        headers::append_trace_context(mapping, row, &mut self.headers, scratch);
        let name = headers::push(scratch, name.as_bytes());
        let value = Some(headers::push(scratch, value));
        self.headers.push(HeaderSpan { name, value });
        if let Some(json) = mapping.headers_column.and_then(|source| source.of(row)) {
            headers::append_json(json, &mut self.headers, scratch).map_err(RouteError::Headers)?;
        }
        let decoded = match (mapping.payload.bytea, mapping.payload.of(row)) {
            (true, Some(text)) => Some(append_bytea(text, scratch)?),
            _ => None,
        };

        let partition = mapping
            .partition
            .map(|source| partition(source, row))
            .transpose()?;
        let timestamp_millis = match mapping.timestamp {
            Some((source, kind)) => source
                .of(row)
                .map(|text| {
                    timestamp::millis(text, kind)
                        .filter(|&millis| millis >= 0)
                        .ok_or_else(|| {
                            RouteError::Timestamp(String::from_utf8_lossy(text).into_owned())
                        })
                })
                .transpose()?,
            None => None,
        };

        let scratch = &self.scratch;
        let name = &scratch[topic];
        if name.is_empty() || self.topic.as_bytes() != name {
            let name = topic_name(name)?;
            self.topic.clear();
            self.topic.push_str(name);
        }
        let payload = match decoded {
            Some(span) => Some(&scratch[span]),
            None => match (mapping.payload.of(row), mapping.null_payload) {
                (None, NullPayload::Empty) => Some(&[][..]),
                (value, _) => value,
            },
        };
        Ok(Record {
            topic: &self.topic,
            partition,
            timestamp_millis,
            key: key.map(|span| &scratch[span]),
            payload,
            headers: Headers::new(&self.headers, scratch),
        })
    }
}

/// What a template gave, at the end of the scratch space.
pub(super) struct Appended {
    span: Range<usize>,
    columns: usize,
    nulls: usize,
}

impl Appended {
    /// Nothing where one of its columns is null.
    pub(super) fn without_nulls(self) -> Option<Range<usize>> {
        (self.nulls == 0).then_some(self.span)
    }

    /// Nothing where there are columns and all of them are null.
    pub(super) fn or_null(self) -> Option<Range<usize>> {
        (self.columns == 0 || self.nulls < self.columns).then_some(self.span)
    }
}

/// Renders a template at the end of `scratch`; a null column adds nothing to the text.
pub(super) fn append(
    template: &Bound,
    row: &Row<'_>,
    scratch: &mut Vec<u8>,
) -> Result<Appended, RouteError> {
    let start = scratch.len();
    let (mut columns, mut nulls) = (0, 0);
    for piece in &template.pieces {
        match piece {
            Piece::Literal(bytes) => scratch.extend_from_slice(bytes),
            Piece::Column(source) => {
                columns += 1;
                match source.of(row) {
                    None => nulls += 1,
                    Some(text) if source.bytea => {
                        append_bytea(text, scratch)?;
                    }
                    Some(text) => scratch.extend_from_slice(text),
                }
            }
        }
    }
    Ok(Appended {
        span: start..scratch.len(),
        columns,
        nulls,
    })
}

/// The bytes that a bytea value's text form (`\x` and hexadecimal digits) stands for.
pub(super) fn append_bytea(text: &[u8], scratch: &mut Vec<u8>) -> Result<Range<usize>, RouteError> {
    let start = scratch.len();
    let (pairs, odd) = text
        .strip_prefix(b"\\x")
        .ok_or(RouteError::Bytea)?
        .as_chunks::<2>();
    if !odd.is_empty() {
        return Err(RouteError::Bytea);
    }
    scratch.reserve(pairs.len());
    for &[high, low] in pairs {
        let (Some(high), Some(low)) = (hex_digit(high), hex_digit(low)) else {
            return Err(RouteError::Bytea);
        };
        scratch.push(high << 4 | low);
    }
    Ok(start..scratch.len())
}

fn hex_digit(byte: u8) -> Option<u8> {
    match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        b'A'..=b'F' => Some(byte - b'A' + 10),
        _ => None,
    }
}

fn partition(source: Source, row: &Row<'_>) -> Result<i32, RouteError> {
    let Some(text) = source.of(row) else {
        return Err(RouteError::Partition("NULL".to_owned()));
    };
    let text = String::from_utf8_lossy(text);
    text.parse()
        .ok()
        .filter(|&partition: &i32| partition >= 0)
        .ok_or_else(|| RouteError::Partition(text.into_owned()))
}

fn topic_name(bytes: &[u8]) -> Result<&str, RouteError> {
    std::str::from_utf8(bytes)
        .ok()
        .filter(|name| is_topic_name(name))
        .ok_or_else(|| RouteError::TopicInvalid(String::from_utf8_lossy(bytes).into_owned()))
}

/// Kafka lets a topic have this name.
#[must_use]
pub(crate) fn is_topic_name(name: &str) -> bool {
    let is_legal = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
    (1..=TOPIC_BYTES_MAX).contains(&name.len())
        && name.bytes().all(is_legal)
        && !matches!(name, "." | "..")
}

#[cfg(test)]
mod tests {
    use super::super::columns::{COLUMNS_MAX, TableColumn};
    use super::super::settings::{HeadersColumn, OutboxSettings};
    use super::*;

    const COLUMNS: [(&str, u32); 12] = [
        ("id", 2950),
        ("aggregatetype", 25),
        ("aggregateid", 25),
        ("payload", 3802),
        ("raw", 17),
        ("headers", 3802),
        ("at", 1184),
        ("shard", 23),
        ("tenant", 25),
        ("traceparent", 25),
        ("local", 1114),
        ("millis", 20),
    ];

    type Plain = (
        String,
        Option<i32>,
        Option<i64>,
        Option<String>,
        Option<String>,
        Vec<String>,
    );

    /// Routes one row, given as names and values, and shows the record.
    fn route(
        change: impl FnOnce(&mut OutboxSettings),
        values: &[(&str, &str)],
    ) -> Result<Plain, RouteError> {
        let mut settings = OutboxSettings::default();
        change(&mut settings);
        let columns = COLUMNS.map(|(name, type_oid)| TableColumn { name, type_oid });
        let mapping = Mapping::bind(&settings, "public.outbox", &columns).expect("binds");
        let mut row = [None; COLUMNS_MAX];
        for (name, value) in values {
            let index = COLUMNS
                .iter()
                .position(|(column, _)| column == name)
                .expect("column");
            if let Some(slot) = mapping.slot(index) {
                row[slot] = Some(value.as_bytes());
            }
        }
        let mut router = Router::default();
        let record = router.route(&mapping, &row, b"POSITION")?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let header = |(name, value): (&str, Option<&[u8]>)| {
            value.map_or_else(
                || name.to_owned(),
                |value| format!("{name}={}", text(value)),
            )
        };
        Ok((
            record.topic.to_owned(),
            record.partition,
            record.timestamp_millis,
            record.key.map(text),
            record.payload.map(text),
            record.headers.iter().map(header).collect(),
        ))
    }

    const EVENT: [(&str, &str); 4] = [
        ("id", "7"),
        ("aggregatetype", "order"),
        ("aggregateid", "o-1"),
        ("payload", "{}"),
    ];

    fn with<'a>(more: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
        EVENT.iter().copied().chain(more.iter().copied()).collect()
    }

    fn template(text: &str) -> super::super::template::Template {
        text.parse().expect("template")
    }

    #[test]
    fn an_event_is_routed_as_debezium_routes_it() {
        assert_eq!(
            route(|_| {}, &EVENT),
            Ok((
                "outbox.event.order".to_owned(),
                None,
                None,
                Some("o-1".to_owned()),
                Some("{}".to_owned()),
                vec!["id=7".to_owned(), "walpost-position=POSITION".to_owned()],
            ))
        );
    }

    #[test]
    fn a_null_payload_is_empty_unless_the_settings_say_tombstone() {
        let row = &EVENT[..3];
        assert_eq!(route(|_| {}, row).expect("routes").4, Some(String::new()));
        let tombstone = |s: &mut OutboxSettings| s.null_payload = NullPayload::Tombstone;
        assert_eq!(route(tombstone, row).expect("routes").4, None);
    }

    #[test]
    fn a_key_is_null_only_if_all_its_columns_are() {
        let key = |text: &'static str, values: &[(&str, &str)]| {
            route(|s| s.key = template(text), &with(values))
                .expect("routes")
                .3
        };
        assert_eq!(key("{tenant}", &[]), None);
        assert_eq!(key("{tenant}:{shard}", &[]), None);
        assert_eq!(key("{tenant}:{aggregateid}", &[]).as_deref(), Some(":o-1"));
        assert_eq!(
            key("{tenant}:{aggregateid}", &[("tenant", "t")]).as_deref(),
            Some("t:o-1")
        );
        assert_eq!(key("fixed", &[]).as_deref(), Some("fixed"));
    }

    #[test]
    fn bytea_becomes_its_bytes() {
        let raw = |value| {
            route(
                |s| {
                    s.payload = "raw".to_owned();
                    s.key = template("{raw}");
                },
                &with(&[("raw", value)]),
            )
        };
        let plain = raw("\\x6869").expect("routes");
        assert_eq!(
            (plain.3.as_deref(), plain.4.as_deref()),
            (Some("hi"), Some("hi"))
        );
        assert_eq!(raw("\\x").expect("routes").4.as_deref(), Some(""));
        for bad in ["6869", "\\x6", "\\x6g", ""] {
            assert_eq!(raw(bad), Err(RouteError::Bytea), "{bad}");
        }
    }

    #[test]
    fn headers_come_from_templates_and_from_the_column() {
        let values = with(&[("headers", r#"{"a": "b"}"#)]);
        let headers = route(
            |s| s.headers.push(("t".to_owned(), template("{tenant}"))),
            &values,
        );
        assert_eq!(
            headers.expect("routes").5,
            ["id=7", "t", "walpost-position=POSITION", "a=b"]
        );
        let off = route(|s| s.headers_column = HeadersColumn::Off, &values).expect("routes");
        assert_eq!(off.5, ["id=7", "walpost-position=POSITION"]);
        assert!(matches!(
            route(|_| {}, &with(&[("headers", "[]")])),
            Err(RouteError::Headers(_))
        ));
        let traced = route(|_| {}, &with(&[("traceparent", "00-1-2-01")])).expect("routes");
        assert_eq!(
            traced.5,
            ["id=7", "traceparent=00-1-2-01", "walpost-position=POSITION"]
        );
    }

    #[test]
    fn partition_and_timestamp_come_from_their_columns() {
        let both = |values: &[(&str, &str)]| {
            route(
                |s| {
                    s.partition = Some("shard".to_owned());
                    s.timestamp = Some("at".to_owned());
                },
                &with(values),
            )
        };
        let plain = both(&[("shard", "3"), ("at", "1970-01-01 00:00:02+00")]).expect("routes");
        assert_eq!((plain.1, plain.2), (Some(3), Some(2000)));
        assert_eq!(both(&[("shard", "0")]).expect("routes").2, None);
        assert_eq!(both(&[]), Err(RouteError::Partition("NULL".to_owned())));
        assert_eq!(
            both(&[("shard", "-1")]),
            Err(RouteError::Partition("-1".to_owned()))
        );
        for at in ["infinity", "1969-12-31 23:59:59+00"] {
            let error = both(&[("shard", "0"), ("at", at)]);
            assert_eq!(error, Err(RouteError::Timestamp(at.to_owned())));
        }
        for (column, value) in [("local", "1970-01-01 00:00:03"), ("millis", "3000")] {
            let record = route(
                |s| s.timestamp = Some(column.to_owned()),
                &with(&[(column, value)]),
            );
            assert_eq!(record.expect("routes").2, Some(3000), "{column}");
        }
    }

    #[test]
    fn a_row_without_a_legal_topic_is_refused() {
        let topic = |value: &str| {
            route(
                |s| s.topic = template("{tenant}"),
                &with(&[("tenant", value)]),
            )
        };
        for legal in ["a", "A.b_c-9", &"x".repeat(249)] {
            assert_eq!(topic(legal).expect("routes").0, legal);
        }
        for illegal in ["", ".", "..", "a b", "é", "a/b", &"x".repeat(250)] {
            assert_eq!(
                topic(illegal),
                Err(RouteError::TopicInvalid(illegal.to_owned()))
            );
        }
        let null = route(|s| s.topic = template("x.{tenant}"), &EVENT);
        assert_eq!(null, Err(RouteError::TopicNull));
    }
}
