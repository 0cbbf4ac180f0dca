//! A dead letter: what can be made of an event that can't be delivered as it is.

use std::ops::Range;

use super::Record;
use super::bound::{Appended, Row, append};
use super::columns::Mapping;
use super::expand::Expander;
use super::headers::{self, HeaderSpan, Headers};
use super::route::{self, Payload, append_topic};
use super::timestamp;

/// The header with what kind of failure it was.
pub const ERROR: &str = "walpost-error";
/// The header with what is wrong with the event.
pub const ERROR_MESSAGE: &str = "walpost-error-message";
/// The header with the table that the event is a row of.
pub const SOURCE_TABLE: &str = "walpost-source-table";
/// The header with the prefix that the event has in WAL.
pub const SOURCE_PREFIX: &str = "walpost-source-prefix";
/// The header with what the topic's template gave, be it the name of a topic or not.
pub const SOURCE_TOPIC: &str = "walpost-source-topic";
/// The header with the headers column as it is, where it could not be read.
pub const SOURCE_HEADERS: &str = "walpost-source-headers";
/// The header with the length of a payload that was left out.
pub const PAYLOAD_BYTES: &str = "walpost-payload-bytes";
/// The header with the column `id`.
pub const EVENT_ID: &str = "walpost-event-id";
/// The header with the name of the pipeline.
pub const PIPELINE: &str = "walpost-pipeline";

/// What there is of the event.
#[derive(Clone, Copy)]
pub enum Remains<'r> {
    /// Its columns.
    Row(&'r Mapping, &'r Row<'r>),
    /// Bytes that can't be read.
    Bytes(&'r [u8]),
    /// So many bytes that were not read.
    Unread(usize),
}

/// Makes dead letters. Holds the scratch space that they borrow.
#[derive(Debug, Default)]
pub struct Writer {
    scratch: Vec<u8>,
    headers: Vec<HeaderSpan>,
}

impl Writer {
    /// A dead letter for `topic` with all that can be made of `remains`: key, payload, timestamp and
    /// headers, the header `mark` among them, and behind those the headers `about` it. Its partition
    /// follows from the key.
    ///
    /// Unless it is `whole`, the payload is left out, and a header has its length.
    #[must_use]
    pub fn write<'w>(
        &'w mut self,
        topic: &'w str,
        remains: Remains<'w>,
        mark: (&str, &[u8]),
        about: &[(&str, &[u8])],
        whole: bool,
    ) -> Record<'w> {
        // Letters are rare: their room is given back with the next one.
        self.scratch = Vec::new();
        self.headers.clear();
        let (key, payload, timestamp_millis) = match remains {
            Remains::Row(mapping, row) => self.row(mapping, row, mark, whole),
            Remains::Bytes(bytes) => {
                self.add(mark.0, mark.1);
                (None, self.left_in(bytes, bytes.len(), whole), None)
            }
            Remains::Unread(bytes) => {
                self.add(mark.0, mark.1);
                (None, self.left_in(&[], bytes, false), None)
            }
        };
        for (name, value) in about {
            self.add(name, value);
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

    /// Key, payload and timestamp of a row; its headers are added.
    fn row<'r>(
        &mut self,
        mapping: &'r Mapping,
        row: &Row<'r>,
        mark: (&str, &[u8]),
        whole: bool,
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
        self.add(mark.0, mark.1);
        if let Some(json) = mapping.headers_column.and_then(|source| source.of(raw)) {
            let before = self.headers.len();
            if headers::append_json(json, &mut self.headers, &mut self.scratch).is_err() {
                self.headers.truncate(before);
                self.add(SOURCE_HEADERS, json);
            }
        }
        if let Ok(Some(topic)) = append_topic(&mapping.topic, raw, &mut self.scratch) {
            let (name, value) = (self.push(SOURCE_TOPIC.as_bytes()), Some(topic));
            self.headers.push(HeaderSpan { name, value });
        }
        if let Some(id) = mapping.id(raw) {
            self.add(EVENT_ID, id);
        }
        let payload = match mapping.payload.of(row) {
            Some(text) if !whole => {
                // Two digits for each byte, after the two characters \x.
                let bytes = match mapping.payload.bytea {
                    true => text.len().saturating_sub(2) / 2,
                    false => text.len(),
                };
                self.left_in(text, bytes, false)
            }
            text => {
                let mut expander = Expander::default();
                let written = route::payload(mapping, row, &mut expander, &mut self.scratch);
                // What can't be written is kept as it is.
                written.unwrap_or_else(|_| text.map_or(Payload::None, Payload::InRow))
            }
        };
        let timestamp_millis = mapping.timestamp.and_then(|(source, kind)| {
            timestamp::millis(source.of(raw)?, kind).filter(|&millis| millis >= 0)
        });
        (key, payload, timestamp_millis)
    }

    /// The payload, where the letter is whole; otherwise a header with its length.
    fn left_in<'r>(&mut self, bytes: &'r [u8], len: usize, whole: bool) -> Payload<'r> {
        if whole {
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
    const MARK: (&str, &[u8]) = ("walpost-position", b"POSITION");
    const ABOUT: [(&str, &[u8]); 1] = [(ERROR, b"oversize")];

    /// Key, payload, timestamp and headers of the letter of a row.
    type Shown = (Option<String>, Option<String>, Option<i64>, Vec<String>);

    fn show(record: &Record<'_>) -> Shown {
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

    fn letter(change: impl Fn(&mut OutboxSettings), values: &[(&str, &str)], whole: bool) -> Shown {
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
        let remains = Remains::Row(&mapping, &row);
        show(&Writer::default().write("dead", remains, MARK, &ABOUT, whole))
    }

    fn text(text: &str) -> Option<String> {
        Some(text.to_owned())
    }

    #[test]
    fn a_letter_has_all_that_could_be_made_of_the_row() {
        let plain = letter(|_| {}, &EVENT, true);
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

        let no_topic = letter(|_| {}, &[EVENT[0], EVENT[2], EVENT[3]], true);
        assert_eq!((&no_topic.0, &no_topic.1), (&text("o-1"), &text("hello")));
        assert!(
            !no_topic.3.iter().any(|h| h.starts_with(SOURCE_TOPIC)),
            "{no_topic:?}"
        );

        let illegal = letter(|_| {}, &[EVENT[0], ("aggregatetype", "a b")], true);
        let topic = "walpost-source-topic=outbox.event.a b".to_owned();
        assert!(illegal.3.contains(&topic), "{illegal:?}");
    }

    #[test]
    fn a_payload_that_is_left_out_leaves_its_length() {
        let cut = letter(|_| {}, &EVENT, false);
        assert_eq!(cut.1, None);
        assert!(
            cut.3.contains(&"walpost-payload-bytes=5".to_owned()),
            "{cut:?}"
        );
        let bytea = |whole| {
            letter(
                |s| s.payload = "raw".to_owned(),
                &[("raw", "\\x686921")],
                whole,
            )
        };
        assert_eq!(bytea(true).1, text("hi!"));
        assert!(
            bytea(false)
                .3
                .contains(&"walpost-payload-bytes=3".to_owned())
        );
        let bad = letter(|s| s.payload = "raw".to_owned(), &[("raw", "hi")], true);
        assert_eq!(bad.1, text("hi"), "as it is");
        // Nothing is left out of nothing.
        let null = letter(|_| {}, &EVENT[..3], false);
        assert_eq!(null.1, None);
        assert!(
            !null.3.iter().any(|h| h.starts_with(PAYLOAD_BYTES)),
            "{null:?}"
        );
        let empty = |s: &mut OutboxSettings| s.null_payload = NullPayload::Empty;
        assert_eq!(letter(empty, &EVENT[..3], true).1, text(""));
    }

    #[test]
    fn headers_that_can_not_be_read_are_kept_as_they_are() {
        let with = |json: &'static str| {
            let values: Vec<_> = EVENT.into_iter().chain([("headers", json)]).collect();
            letter(|_| {}, &values, true).3
        };
        assert!(with(r#"{"a": "b"}"#).contains(&"a=b".to_owned()));
        let bad = with(r#"{"a": "b", 1}"#);
        assert!(
            bad.contains(&r#"walpost-source-headers={"a": "b", 1}"#.to_owned()),
            "{bad:?}"
        );
        assert!(!bad.contains(&"a=b".to_owned()), "a half of them: {bad:?}");
    }

    #[test]
    fn a_timestamp_is_kept_where_it_is_one() {
        let at = |text: &'static str| {
            let values: Vec<_> = EVENT.into_iter().chain([("at", text)]).collect();
            letter(|s| s.timestamp = Some("at".to_owned()), &values, true).2
        };
        assert_eq!(at("1970-01-01 00:00:02+00"), Some(2000));
        assert_eq!(at("infinity"), None);
        assert_eq!(at("1969-12-31 23:59:59+00"), None);
    }

    #[test]
    fn bytes_that_can_not_be_read_are_the_payload() {
        let mut writer = Writer::default();
        let remains = Remains::Bytes(b"?!");
        let whole = show(&writer.write("dead", remains, MARK, &ABOUT, true));
        let headers = ["walpost-position=POSITION", "walpost-error=oversize"];
        assert_eq!(
            whole,
            (None, text("?!"), None, headers.map(String::from).to_vec())
        );
        let cut = show(&writer.write("dead", remains, MARK, &ABOUT, false));
        assert_eq!((&cut.1, &*cut.3[1]), (&None, "walpost-payload-bytes=2"));
    }
}
