//! Creates dead letters: records that preserve as much as possible of an event that can't be
//! delivered.

use std::collections::BTreeMap;
use std::ops::Range;

use super::Record;
use super::bound::{Appended, Row, append};
use super::columns::Mapping;
use super::expand::Expander;
use super::headers::{self, HeaderSpan, Headers};
use super::route::{self, Payload, append_topic};
use super::timestamp;

/// The header that contains the kind of failure.
pub const ERROR: &str = "walpost-error";
/// The header that contains the error message.
pub const ERROR_MESSAGE: &str = "walpost-error-message";
/// The header that contains the name of the table to which the row belongs.
pub const SOURCE_TABLE: &str = "walpost-source-table";
/// The header that contains the prefix of the event's logical decoding message.
pub const SOURCE_PREFIX: &str = "walpost-source-prefix";
/// The header that contains the expanded topic template, which may not be a valid topic name.
pub const SOURCE_TOPIC: &str = "walpost-source-topic";
/// The header that contains the value of the headers column, unchanged, if it could not be parsed.
pub const SOURCE_HEADERS: &str = "walpost-source-headers";
/// The header that contains the length of an omitted payload.
pub const PAYLOAD_BYTES: &str = "walpost-payload-bytes";
/// The header that contains the value of the column `id`.
pub const EVENT_ID: &str = "walpost-event-id";
/// The header that contains the name of the pipeline.
pub const PIPELINE: &str = "walpost-pipeline";

/// The header that lists the truncated and omitted parts, with their original lengths.
pub const TRUNCATED: &str = "walpost-truncated";

/// Maximum length of the key and of each header value in a truncated dead letter.
const PART_BYTES_MAX: usize = 1024;
/// Maximum length of a header's name in a truncated dead letter. Headers with longer names are
/// omitted.
const NAME_BYTES_MAX: usize = 256;
/// Maximum total size of the event's headers in a truncated dead letter. Once this limit is
/// reached, the remaining headers are omitted.
const EVENT_HEADERS_BYTES_MAX: usize = 16 << 10;
/// Maximum length of each header value in [`Extent::Reference`]. Short enough for the record to be
/// smaller than 1,000 bytes, the smallest limit on record size that Kafka clients accept.
const REFERENCE_BYTES_MAX: usize = 96;

/// How much of the event a dead letter contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// The whole event.
    Whole,
    /// The event with a truncated key and truncated headers, and without a timestamp.
    Cut,
    /// Everything except the payload, whose length is in a header.
    NoPayload,
    /// Like [`Extent::NoPayload`], but with a truncated key and truncated headers, and without a
    /// timestamp.
    CutWithoutPayload,
    /// Only the data that identifies the event, so that the record is small enough for any topic.
    Reference,
}

impl Extent {
    fn has_payload(self) -> bool {
        matches!(self, Self::Whole | Self::Cut)
    }
}

/// The available content of an event that can't be delivered.
#[derive(Clone, Copy)]
pub enum EventContent<'r> {
    /// The event's columns.
    Row(&'r Mapping, &'r Row<'r>),
    /// Bytes that can't be decoded.
    Bytes(&'r [u8]),
    /// An event that was not read; only its size in bytes is known.
    Unread(usize),
}

/// Creates dead letters. Owns the scratch space from which they borrow.
#[derive(Debug, Default)]
pub struct Writer {
    scratch: Vec<u8>,
    headers: Vec<HeaderSpan>,
    /// The index in `headers` of the header that identifies the event.
    identifier_index: usize,
    /// The index in `headers` of the first header about the failure. All preceding headers belong
    /// to the event, including the one at `identifier_index`.
    event_end: usize,
}

impl Writer {
    /// Creates a dead letter for `topic` from `content`. Preserves as much of the event's key,
    /// payload, timestamp and headers as `extent` allows. The event's headers include `identifier`,
    /// and are followed by the headers in `about`, which describe the failure. The key determines
    /// the partition.
    #[must_use]
    pub fn write<'w>(
        &'w mut self,
        topic: &'w str,
        content: EventContent<'w>,
        identifier: (&str, &[u8]),
        about: &[(&str, &[u8])],
        extent: Extent,
    ) -> Record<'w> {
        // Dead letters are rare, so don't keep a large buffer for the next one.
        self.scratch = Vec::new();
        self.headers.clear();
        (self.identifier_index, self.event_end) = (0, 1);
        let with_payload = extent.has_payload();
        let (mut key, mut payload, mut timestamp_millis) = match content {
            EventContent::Row(mapping, row) => self.row(mapping, row, identifier, with_payload),
            EventContent::Bytes(bytes) => {
                self.add(identifier.0, identifier.1);
                let payload = self.payload_or_length(bytes, bytes.len(), with_payload);
                (None, payload, None)
            }
            EventContent::Unread(bytes) => {
                self.add(identifier.0, identifier.1);
                (None, self.payload_or_length(&[], bytes, false), None)
            }
        };
        for (name, value) in about {
            self.add(name, value);
        }
        match extent {
            Extent::Whole | Extent::NoPayload => {}
            Extent::Cut | Extent::CutWithoutPayload => {
                self.truncate(&mut key, &mut timestamp_millis)
            }
            Extent::Reference => {
                payload = self.reduce_to_reference(identifier, key.take(), timestamp_millis.take());
            }
        }
        let scratch = &self.scratch;
        Record {
            topic,
            partition: None,
            timestamp_millis,
            key: key.map(|span| &scratch[span]),
            payload: match payload {
                Payload::None => None,
                Payload::InRow(bytes) => Some(bytes),
                Payload::InScratch(span) => Some(&scratch[span]),
            },
            headers: Headers::new(&self.headers, scratch),
        }
    }

    /// Truncates the key and the headers, and omits the timestamp, which may be the reason why a
    /// broker rejected the record. If anything was truncated or omitted, adds a header that lists
    /// it.
    fn truncate(&mut self, key: &mut Option<Range<usize>>, timestamp: &mut Option<i64>) {
        let mut truncations = Truncations {
            timestamp: timestamp.take(),
            ..Truncations::default()
        };
        if let Some(key) = key {
            truncations.key = truncate_span(&self.scratch, key, PART_BYTES_MAX);
        }
        let mut left = EVENT_HEADERS_BYTES_MAX;
        let scratch = &self.scratch;
        let (identifier_index, event_end) = (self.identifier_index, self.event_end);
        let mut at = 0;
        self.headers.retain_mut(|header| {
            let is_event_s = at < event_end && at != identifier_index;
            at += 1;
            let name = &scratch[header.name.clone()];
            let before = match &mut header.value {
                Some(value) => truncate_span(scratch, value, PART_BYTES_MAX),
                None => None,
            };
            if is_event_s {
                let bytes = name.len() + header.value.as_ref().map_or(0, Range::len);
                left = left.saturating_sub(bytes + 1);
                if name.len() > NAME_BYTES_MAX || left == 0 {
                    truncations.dropped_headers += 1;
                    return false;
                }
            }
            if let Some(before) = before {
                let name = String::from_utf8_lossy(name).into_owned();
                truncations.headers.insert(name, before);
            }
            true
        });
        if truncations.is_any() {
            self.add(TRUNCATED, truncations.text().as_bytes());
        }
    }

    /// Removes the event's headers, except the one that identifies the event, and adds a header
    /// that lists what was omitted. Returns a payload that contains only the identifier.
    fn reduce_to_reference<'r>(
        &mut self,
        identifier: (&str, &[u8]),
        key: Option<Range<usize>>,
        timestamp: Option<i64>,
    ) -> Payload<'r> {
        let (identifier_index, event_end) = (self.identifier_index, self.event_end);
        let scratch = &self.scratch;
        let mut at = 0;
        let before = self.headers.len();
        self.headers.retain_mut(|header| {
            let is_event_s = at < event_end && at != identifier_index;
            at += 1;
            if let Some(value) = &mut header.value {
                truncate_span(scratch, value, REFERENCE_BYTES_MAX);
            }
            !is_event_s
        });
        let truncations = Truncations {
            key: key.map(|key| key.len()),
            timestamp,
            headers: BTreeMap::new(),
            dropped_headers: before - self.headers.len(),
        };
        self.add(TRUNCATED, truncations.text().as_bytes());
        let value = String::from_utf8_lossy(identifier.1);
        let reference = serde_json::json!({ identifier.0: value }).to_string();
        Payload::InScratch(self.push(reference.as_bytes()))
    }

    /// Appends the headers of a row's event to the dead letter's headers, and returns the row's
    /// key, payload and timestamp.
    fn row<'r>(
        &mut self,
        mapping: &'r Mapping,
        row: &Row<'r>,
        identifier: (&str, &[u8]),
        with_payload: bool,
    ) -> (Option<Range<usize>>, Payload<'r>, Option<i64>) {
        let (raw, row) = (row, &mapping.filled(row));
        let key = mapping
            .key_form
            .append(&mapping.key, row, &mut self.scratch);
        let key = key.ok().flatten();
        headers::append_context(mapping, raw, &mut self.headers, &mut self.scratch);
        for (index, (name, template)) in mapping.headers.iter().enumerate() {
            let value = match mapping.header_forms.get(index) {
                None => append(template, row, &mut self.scratch).map(Appended::or_null),
                Some(form) => form.append(row, &mut self.scratch),
            };
            if let Ok(value) = value {
                let name = self.push(name.as_bytes());
                self.headers.push(HeaderSpan { name, value });
            }
        }
        headers::append_trace_context(mapping, raw, &mut self.headers, &mut self.scratch);
        self.identifier_index = self.headers.len();
        self.add(identifier.0, identifier.1);
        if let Some(json) = mapping
            .headers_column
            .and_then(|source| source.value_in(raw))
        {
            let before = self.headers.len();
            if headers::append_json(json, &mut self.headers, &mut self.scratch).is_err() {
                self.headers.truncate(before);
                self.add(SOURCE_HEADERS, json);
            }
        }
        self.event_end = self.headers.len();
        if let Ok(Some(topic)) = append_topic(&mapping.topic, raw, &mut self.scratch) {
            let (name, value) = (self.push(SOURCE_TOPIC.as_bytes()), Some(topic));
            self.headers.push(HeaderSpan { name, value });
        }
        if let Some(id) = mapping.id(raw) {
            self.add(EVENT_ID, id);
        }
        let payload = match mapping.payload.value_in(row) {
            Some(text) if !with_payload => {
                // The text of a bytea consists of `\x` and two digits per byte.
                let bytes = match mapping.payload.bytea {
                    true => text.len().saturating_sub(2) / 2,
                    false => text.len(),
                };
                self.payload_or_length(text, bytes, false)
            }
            text => {
                let mut expander = Expander::default();
                let written = route::payload(mapping, row, &mut expander, &mut self.scratch);
                // A value that can't be converted is preserved unchanged.
                written.unwrap_or_else(|_| text.map_or(Payload::None, Payload::InRow))
            }
        };
        let timestamp_millis = mapping.timestamp.and_then(|(source, kind)| {
            timestamp::millis(source.value_in(raw)?, kind).filter(|&millis| millis >= 0)
        });
        (key, payload, timestamp_millis)
    }

    /// Returns the payload if the dead letter may contain it. Otherwise, adds a header with the
    /// payload's length.
    fn payload_or_length<'r>(
        &mut self,
        bytes: &'r [u8],
        len: usize,
        with_payload: bool,
    ) -> Payload<'r> {
        if with_payload {
            return Payload::InRow(bytes);
        }
        self.add(PAYLOAD_BYTES, len.to_string().as_bytes());
        Payload::None
    }

    fn add(&mut self, name: &str, value: &[u8]) {
        let (name, value) = (self.push(name.as_bytes()), Some(self.push(value)));
        self.headers.push(HeaderSpan { name, value });
    }

    fn push(&mut self, bytes: &[u8]) -> Range<usize> {
        headers::push(&mut self.scratch, bytes)
    }
}

/// The parts of an event, other than the payload, that were truncated or omitted in its dead
/// letter.
#[derive(Default, serde::Serialize)]
struct Truncations {
    /// The original length of the key.
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<usize>,
    /// The timestamp, in milliseconds since 1970.
    #[serde(skip_serializing_if = "Option::is_none")]
    timestamp: Option<i64>,
    /// The original lengths of headers.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    headers: BTreeMap<String, usize>,
    #[serde(skip_serializing_if = "is_zero")]
    dropped_headers: usize,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_zero(number: &usize) -> bool {
    *number == 0
}

impl Truncations {
    fn is_any(&self) -> bool {
        self.key.is_some()
            || self.timestamp.is_some()
            || !self.headers.is_empty()
            || self.dropped_headers > 0
    }

    fn text(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }
}

/// Truncates the text in `scratch` to `max` bytes, but not within a UTF-8 character. Returns the
/// original length if the text was truncated.
fn truncate_span(scratch: &[u8], span: &mut Range<usize>, max: usize) -> Option<usize> {
    const CHAR_BYTES_MAX: usize = 4;
    let before = span.len();
    if before <= max {
        return None;
    }
    let end = span.start + max;
    let is_start = |at: &usize| scratch[*at] & 0xc0 != 0x80;
    let mut ends = (end.saturating_sub(CHAR_BYTES_MAX)..=end).rev();
    // Bytes that are not valid UTF-8 can be truncated at any point.
    span.end = ends.find(is_start).unwrap_or(end).max(span.start);
    Some(before)
}

#[cfg(test)]
mod tests {
    use super::super::columns::{COLUMNS_MAX, TableColumn};
    use super::super::settings::{NullPayload, OutboxSettings};
    use super::*;

    const COLUMNS: [(&str, u32); 7] = [
        ("id", 20),
        ("aggregatetype", 25),
        ("aggregateid", 25),
        ("payload", 25),
        ("headers", 3802),
        ("raw", 17),
        ("at", 1184),
    ];
    const EVENT: [(&str, &str); 4] = [
        ("id", "7"),
        ("aggregatetype", "order"),
        ("aggregateid", "o-1"),
        ("payload", "hello"),
    ];
    const IDENTIFIER: (&str, &[u8]) = ("walpost-position", b"POSITION");
    const ABOUT: [(&str, &[u8]); 1] = [(ERROR, b"oversize")];

    /// The key, payload, timestamp and headers of a dead letter.
    type Letter = (Option<String>, Option<String>, Option<i64>, Vec<String>);

    fn describe(record: &Record<'_>) -> Letter {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let header = |(name, value): (&str, Option<&[u8]>)| {
            let value = value.map_or("-".to_owned(), text);
            format!("{name}={value}")
        };
        assert_eq!((record.topic, record.partition), ("dead", None));
        (
            record.key.map(text),
            record.payload.map(text),
            record.timestamp_millis,
            record.headers.iter().map(header).collect(),
        )
    }

    fn letter(
        change: impl Fn(&mut OutboxSettings),
        values: &[(&str, &str)],
        extent: Extent,
    ) -> Letter {
        let columns = COLUMNS.map(|(name, type_oid)| TableColumn { name, type_oid });
        let mut settings = OutboxSettings::default();
        change(&mut settings);
        let mapping = Mapping::bind(&settings, "public.outbox", &columns).expect("fits");
        let mut row = [None; COLUMNS_MAX];
        for (name, value) in values {
            let index = COLUMNS.iter().position(|(known, _)| known == name);
            if let Some(slot) = mapping.slot(index.expect("a column")) {
                row[slot] = Some(value.as_bytes());
            }
        }
        let content = EventContent::Row(&mapping, &row);
        describe(&Writer::default().write("dead", content, IDENTIFIER, &ABOUT, extent))
    }

    fn text(text: &str) -> Option<String> {
        Some(text.to_owned())
    }

    #[test]
    fn dead_letter_preserves_every_field_that_can_be_derived_from_the_row() {
        let plain = letter(|_| {}, &EVENT, Extent::Whole);
        let headers = [
            "id=7",
            "walpost-position=POSITION",
            "walpost-source-topic=outbox.event.order",
            "walpost-event-id=7",
            "walpost-error=oversize",
        ];
        let expected = (
            text("o-1"),
            text("hello"),
            None,
            headers.map(String::from).to_vec(),
        );
        assert_eq!(plain, expected);

        let no_topic = letter(|_| {}, &[EVENT[0], EVENT[2], EVENT[3]], Extent::Whole);
        assert_eq!((&no_topic.0, &no_topic.1), (&text("o-1"), &text("hello")));
        assert!(
            !no_topic.3.iter().any(|h| h.starts_with(SOURCE_TOPIC)),
            "{no_topic:?}"
        );

        let illegal = letter(|_| {}, &[EVENT[0], ("aggregatetype", "a b")], Extent::Whole);
        let topic = "walpost-source-topic=outbox.event.a b".to_owned();
        assert!(illegal.3.contains(&topic), "{illegal:?}");
    }

    #[test]
    fn records_the_length_of_an_omitted_payload() {
        let cut = letter(|_| {}, &EVENT, Extent::NoPayload);
        assert_eq!(cut.1, None);
        assert!(
            cut.3.contains(&"walpost-payload-bytes=5".to_owned()),
            "{cut:?}"
        );
        let bytea = |extent| {
            letter(
                |s| s.payload = "raw".to_owned(),
                &[("raw", "\\x686921")],
                extent,
            )
        };
        assert_eq!(bytea(Extent::Whole).1, text("hi!"));
        assert!(
            bytea(Extent::NoPayload)
                .3
                .contains(&"walpost-payload-bytes=3".to_owned())
        );
        let bad = letter(
            |s| s.payload = "raw".to_owned(),
            &[("raw", "hi")],
            Extent::Whole,
        );
        assert_eq!(bad.1, text("hi"), "unchanged");
        // If the payload is null, nothing is omitted, so the header with the payload's length is
        // absent.
        let null = letter(|_| {}, &EVENT[..3], Extent::NoPayload);
        assert_eq!(null.1, None);
        assert!(
            !null.3.iter().any(|h| h.starts_with(PAYLOAD_BYTES)),
            "{null:?}"
        );
        let empty = |s: &mut OutboxSettings| s.null_payload = NullPayload::Empty;
        assert_eq!(letter(empty, &EVENT[..3], Extent::Whole).1, text(""));
    }

    #[test]
    fn preserves_an_invalid_headers_column_unchanged() {
        let with = |json: &'static str| {
            let values: Vec<_> = EVENT.into_iter().chain([("headers", json)]).collect();
            letter(|_| {}, &values, Extent::Whole).3
        };
        assert!(with(r#"{"a": "b"}"#).contains(&"a=b".to_owned()));
        let bad = with(r#"{"a": "b", 1}"#);
        assert!(
            bad.contains(&r#"walpost-source-headers={"a": "b", 1}"#.to_owned()),
            "{bad:?}"
        );
        assert!(
            !bad.contains(&"a=b".to_owned()),
            "an invalid headers column was partially converted: {bad:?}"
        );
    }

    #[test]
    fn keeps_the_timestamp_if_it_is_valid() {
        let at = |text: &'static str| {
            let values: Vec<_> = EVENT.into_iter().chain([("at", text)]).collect();
            letter(
                |s| s.timestamp = Some("at".to_owned()),
                &values,
                Extent::Whole,
            )
            .2
        };
        assert_eq!(at("1970-01-01 00:00:02+00"), Some(2000));
        assert_eq!(at("infinity"), None);
        assert_eq!(at("1969-12-31 23:59:59+00"), None);
    }

    #[test]
    fn uses_undecodable_bytes_as_the_payload_of_a_dead_letter() {
        let mut writer = Writer::default();
        let content = EventContent::Bytes(b"?!");
        let whole = describe(&writer.write("dead", content, IDENTIFIER, &ABOUT, Extent::Whole));
        let headers = ["walpost-position=POSITION", "walpost-error=oversize"];
        assert_eq!(
            whole,
            (None, text("?!"), None, headers.map(String::from).to_vec())
        );
        let cut = describe(&writer.write("dead", content, IDENTIFIER, &ABOUT, Extent::NoPayload));
        assert_eq!((&cut.1, &*cut.3[1]), (&None, "walpost-payload-bytes=2"));
    }

    /// Returns the total size of the key, the value and the headers in bytes.
    fn bytes(letter: &Letter) -> usize {
        let len = |text: &Option<String>| text.as_ref().map_or(0, String::len);
        len(&letter.0) + len(&letter.1) + letter.3.iter().map(String::len).sum::<usize>()
    }

    fn header<'l>(letter: &'l Letter, name: &str) -> Option<&'l str> {
        let mut headers = letter.3.iter().filter_map(|header| header.split_once('='));
        headers
            .find(|(found, _)| *found == name)
            .map(|(_, value)| value)
    }

    #[test]
    fn limits_the_size_of_truncated_dead_letters_for_any_row() {
        let long = "é".repeat(2 << 20);
        let many: Vec<_> = (0..50_000).map(|n| format!("\"h{n}\": \"x\"")).collect();
        let many = format!(
            "{{\"large\": \"{long}\", \"{long}\": 1, {}}}",
            many.join(", ")
        );
        let bad_headers = format!("[\"{long}\"]");
        for (name, value) in [
            ("id", &long),
            ("aggregatetype", &long),
            ("aggregateid", &long),
            ("payload", &long),
            ("headers", &many),
            ("headers", &bad_headers),
        ] {
            let values: Vec<_> = EVENT
                .into_iter()
                .filter(|(known, _)| *known != name)
                .chain([(name, value.as_str())])
                .collect();
            let cut = letter(|_| {}, &values, Extent::CutWithoutPayload);
            assert!(bytes(&cut) < 40 << 10, "{name}: {}", bytes(&cut));
            assert!(cut.3.contains(&"walpost-position=POSITION".to_owned()));
            let reference = letter(|_| {}, &values, Extent::Reference);
            assert!(bytes(&reference) < 800, "{name}: {}", bytes(&reference));
            assert_eq!(
                reference.1,
                text(r#"{"walpost-position":"POSITION"}"#),
                "{name}"
            );
            assert_eq!(header(&reference, ERROR), Some("oversize"));
        }
    }

    #[test]
    fn lists_truncated_parts_with_their_original_lengths() {
        let key = format!("x{}", "é".repeat(1000));
        let headers = format!(
            r#"{{"a": "{}", "b": "short", "{}": 1}}"#,
            key,
            "n".repeat(257)
        );
        let at = "2026-01-01 00:00:00+00";
        let values: Vec<_> = EVENT
            .into_iter()
            .filter(|(name, _)| *name != "aggregateid")
            .chain([("aggregateid", &*key), ("headers", &headers), ("at", at)])
            .collect();
        let with_timestamp = |s: &mut OutboxSettings| s.timestamp = Some("at".to_owned());
        let cut = letter(with_timestamp, &values, Extent::Cut);
        let kept = format!("x{}", "é".repeat(511));
        assert_eq!((cut.0.as_deref(), &cut.1), (Some(&*kept), &text("hello")));
        assert_eq!((cut.2, header(&cut, "a")), (None, Some(&*kept)));
        assert_eq!(header(&cut, "b"), Some("short"));
        assert_eq!(
            header(&cut, TRUNCATED),
            Some(
                r#"{"key":2001,"timestamp":1767225600000,"headers":{"a":2001},"dropped_headers":1}"#
            )
        );
        let whole = letter(with_timestamp, &values, Extent::Whole);
        assert_eq!(
            (whole.0, header(&cut, "walpost-payload-bytes")),
            (text(&key), None)
        );
    }

    #[test]
    fn does_not_truncate_the_dead_letter_of_a_small_event() {
        let plain = letter(|_| {}, &EVENT, Extent::Cut);
        assert_eq!(plain, letter(|_| {}, &EVENT, Extent::Whole));
    }
}
