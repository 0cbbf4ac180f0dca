//! Turns a row into a record: topic, key, headers and payload.

use std::ops::Range;

use super::Record;
use super::bound::{self, Row, Source};
use super::columns::{BoundTopic, Mapping};
use super::converted::ValueForm;
use super::expand::Expander;
use super::headers::{self, HeaderSpan, Headers, POSITION_HEADER};
use super::settings::{EmptyPayload, NullPayload};
use super::template::is_topic_char;
use super::timestamp;

pub(crate) use super::route_error::RouteError;

/// The capacity of the scratch space that is kept for the next row.
const SCRATCH_KEPT_BYTES: usize = 1 << 20;

/// Kafka's limit on the length of a topic name.
const TOPIC_BYTES_MAX: usize = 249;

/// Creates records. Owns the scratch space from which they borrow, so that routing a row does not
/// allocate.
#[derive(Debug, Default)]
pub struct Router {
    /// The last topic name that was found to be valid, or empty if there is none. The name is not
    /// checked again for the next row, which usually has the same topic.
    topic: String,
    /// The text from which a regular expression derived `topic`, or empty if `topic` comes from a
    /// template.
    routed: Vec<u8>,
    scratch: Vec<u8>,
    headers: Vec<HeaderSpan>,
    expander: Expander,
}

impl Router {
    /// Creates the record for `row`. `position` is the row's position as text.
    ///
    /// # Errors
    /// Returns an error if the row can't be converted to a record with `mapping`'s settings.
    pub fn route<'r>(
        &'r mut self,
        mapping: &'r Mapping,
        row: &Row<'r>,
        position: &[u8],
    ) -> Result<Record<'r>, RouteError> {
        self.route_with(mapping, row, POSITION_HEADER, position)
    }

    /// Like [`Router::route`], but adds a header called `name` instead of the position header.
    ///
    /// # Errors
    /// Returns an error if the row can't be converted to a record with `mapping`'s settings.
    pub fn route_with<'r>(
        &'r mut self,
        mapping: &'r Mapping,
        row: &Row<'r>,
        name: &str,
        value: &[u8],
    ) -> Result<Record<'r>, RouteError> {
        self.scratch.clear();
        self.scratch.shrink_to(SCRATCH_KEPT_BYTES);
        self.headers.clear();
        let scratch = &mut self.scratch;

        let topic = match &mapping.topic {
            BoundTopic::Template(template) => {
                let topic = bound::append(template, row, scratch)?;
                Some(topic.without_nulls().ok_or(RouteError::TopicNull)?)
            }
            BoundTopic::Route { source, .. } => {
                let text = source.value_in(row).ok_or(RouteError::TopicNull)?;
                // Skip the regular expression if the text is the same as in the previous row, which
                // is common.
                match !self.topic.is_empty() && self.routed == text {
                    true => None,
                    false => {
                        let topic = append_topic(&mapping.topic, row, scratch)?;
                        Some(topic.ok_or(RouteError::TopicNull)?)
                    }
                }
            }
        };
        // From here on, null columns in `row` are replaced by their defaults.
        let raw = row;
        let filled: Row<'r>;
        let row = match mapping.defaults.is_empty() {
            true => row,
            false => {
                filled = mapping.filled(row);
                &filled
            }
        };
        let key = match mapping.is_plain {
            true => {
                let key = bound::append(&mapping.key, row, scratch)?.or_null();
                for (name, value) in &mapping.headers {
                    let name = headers::push(scratch, name.as_bytes());
                    let value = bound::append(value, row, scratch)?.or_null();
                    self.headers.push(HeaderSpan { name, value });
                }
                key
            }
            false => formatted(mapping, raw, row, &mut self.headers, scratch)?,
        };
        headers::append_trace_context(mapping, raw, &mut self.headers, scratch);
        let name = headers::push(scratch, name.as_bytes());
        let value = Some(headers::push(scratch, value));
        self.headers.push(HeaderSpan { name, value });
        if let Some(json) = mapping
            .headers_column
            .and_then(|source| source.value_in(raw))
        {
            headers::append_json(json, &mut self.headers, scratch).map_err(RouteError::Headers)?;
        }
        let payload = match mapping.payload.value_in(row) {
            Some(text) if mapping.is_plain && !mapping.payload.bytea => Payload::InRow(text),
            _ => payload(mapping, row, &mut self.expander, scratch)?,
        };

        let partition = mapping
            .partition
            .map(|source| partition(source, raw))
            .transpose()?
            .flatten();
        let timestamp_millis = match mapping.timestamp {
            Some((source, kind)) => source
                .value_in(raw)
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
        if let Some(topic) = topic {
            let name = &scratch[topic];
            if name.is_empty() || self.topic.as_bytes() != name {
                self.topic.clear();
                self.topic.push_str(topic_name(name, mapping)?);
            }
            // `routed` is set only after the corresponding topic was found to be valid.
            if let BoundTopic::Route { source, .. } = &mapping.topic {
                self.routed.clear();
                self.routed
                    .extend_from_slice(source.value_in(raw).unwrap_or_default());
            }
        }
        Ok(Record {
            topic: &self.topic,
            partition,
            timestamp_millis,
            key: key.map(|span| &scratch[span]),
            payload: match payload {
                Payload::None => None,
                Payload::InRow(bytes) => Some(bytes),
                Payload::InScratch(span) => Some(&scratch[span]),
            },
            headers: Headers::new(&self.headers, scratch),
        })
    }
}

/// Appends the key, and the headers that precede the position header, to the scratch space in the
/// configured formats. Returns the location of the key.
#[inline(never)]
fn formatted(
    mapping: &Mapping,
    raw: &Row<'_>,
    row: &Row<'_>,
    spans: &mut Vec<HeaderSpan>,
    scratch: &mut Vec<u8>,
) -> Result<Option<Range<usize>>, RouteError> {
    let key = mapping.key_form.append(&mapping.key, row, scratch)?;
    headers::append_context(mapping, raw, spans, scratch);
    for (index, (name, value)) in mapping.headers.iter().enumerate() {
        let name = headers::push(scratch, name.as_bytes());
        let value = match mapping.header_forms.get(index) {
            None => bound::append(value, row, scratch)?.or_null(),
            Some(form) => form.append(row, scratch)?,
        };
        spans.push(HeaderSpan { name, value });
    }
    Ok(key)
}

/// The location of a record's value.
pub(super) enum Payload<'r> {
    None,
    InRow(&'r [u8]),
    InScratch(Range<usize>),
}

/// Returns the record's value. Nulls in `row` must already have been replaced by defaults.
#[inline(never)]
pub(super) fn payload<'r>(
    mapping: &Mapping,
    row: &Row<'r>,
    expander: &mut Expander,
    scratch: &mut Vec<u8>,
) -> Result<Payload<'r>, RouteError> {
    let text = mapping.payload.value_in(row);
    let is_blank = |text: &[u8]| !mapping.payload.bytea && text.iter().all(|byte| *byte <= b' ');
    if mapping.empty_payload == EmptyPayload::Tombstone && text.is_none_or(is_blank) {
        return Ok(Payload::None);
    }
    let form = mapping.value_form.as_deref();
    // A null payload in an envelope becomes a JSON member that is null. The code below handles this
    // case.
    if text.is_none() && !form.is_some_and(ValueForm::has_envelope) {
        match mapping.null_payload {
            NullPayload::Tombstone => return Ok(Payload::None),
            NullPayload::Empty => return Ok(Payload::InRow(&[])),
            NullPayload::Formatted if !form.is_some_and(ValueForm::is_json) => {
                return Ok(Payload::None);
            }
            NullPayload::Formatted => {}
        }
    }
    if let Some(form) = form
        && let Some(span) = form.append(row, text, expander, scratch)?
    {
        return Ok(Payload::InScratch(span));
    }
    Ok(match text {
        None => Payload::None,
        Some(text) if mapping.payload.bytea => {
            Payload::InScratch(bound::append_bytea(text, scratch)?)
        }
        Some(text) => Payload::InRow(text),
    })
}

impl Mapping {
    /// Returns the row, with each null replaced by the default value of its column.
    pub(super) fn filled<'r>(&'r self, row: &Row<'r>) -> Row<'r> {
        let mut filled = *row;
        for (slot, text) in &self.defaults {
            let value = &mut filled[usize::from(*slot)];
            *value = value.or(Some(text));
        }
        filled
    }
}

/// Appends the topic's name, which may be invalid. Returns `None` if a column is null.
pub(super) fn append_topic(
    topic: &BoundTopic,
    row: &Row<'_>,
    scratch: &mut Vec<u8>,
) -> Result<Option<Range<usize>>, RouteError> {
    let (source, route) = match topic {
        BoundTopic::Template(template) => {
            return Ok(bound::append(template, row, scratch)?.without_nulls());
        }
        BoundTopic::Route { source, route } => (source, route),
    };
    let Some(text) = source.value_in(row) else {
        return Ok(None);
    };
    let topic = str::from_utf8(text).map(|text| route.topic(text));
    let topic = topic.as_deref().map_or(text, str::as_bytes);
    Ok(Some(headers::push(scratch, topic)))
}

/// Returns the partition, or `None` if the column is null and the partitioner should choose.
fn partition(source: Source, row: &Row<'_>) -> Result<Option<i32>, RouteError> {
    let Some(text) = source.value_in(row) else {
        return Ok(None);
    };
    let text = String::from_utf8_lossy(text);
    match text.parse() {
        Ok(partition) if partition >= 0 => Ok(Some(partition)),
        _ => Err(RouteError::Partition(text.into_owned())),
    }
}

fn topic_name<'b>(bytes: &'b [u8], mapping: &Mapping) -> Result<&'b str, RouteError> {
    let name = std::str::from_utf8(bytes)
        .ok()
        .filter(|name| is_topic_name(name))
        .ok_or_else(|| RouteError::TopicInvalid(String::from_utf8_lossy(bytes).into_owned()))?;
    let reserved = &mapping.topic_rule.reserved;
    match reserved.find(name) {
        None => Ok(name),
        Some(usage) => Err(RouteError::TopicReserved {
            topic: name.to_owned(),
            usage,
            template: reserved
                .find_pattern(name)
                .filter(|pattern| pattern.usage() == usage)
                .map(|pattern| pattern.text().to_owned()),
            setting: mapping.topic_rule.setting.clone(),
        }),
    }
}

/// Returns whether Kafka accepts this topic name.
#[must_use]
pub(crate) fn is_topic_name(name: &str) -> bool {
    (1..=TOPIC_BYTES_MAX).contains(&name.len())
        && name.chars().all(is_topic_char)
        && !matches!(name, "." | "..")
}

#[cfg(test)]
mod tests {
    use super::super::columns::{COLUMNS_MAX, TableColumn};
    use super::super::reserved_topics::{ReservedTopics, TopicPattern, TopicUse};
    use super::super::settings::{
        DebeziumHeaders, Format, HeadersColumn, OutboxSettings, Route, Topic,
    };
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

    /// Routes one row, given as names and values, and formats the record.
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
    fn routes_an_event_like_debezium() {
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
    fn writes_a_null_payload_as_a_tombstone_unless_an_empty_value_is_configured() {
        let row = &EVENT[..3];
        assert_eq!(route(|_| {}, row).expect("routes").4, None);
        let empty = |s: &mut OutboxSettings| s.null_payload = NullPayload::Empty;
        assert_eq!(route(empty, row).expect("routes").4, Some(String::new()));
    }

    #[test]
    fn writes_a_null_payload_as_json_null_unless_configured_otherwise() {
        let payload = |null_payload, values: &[(&str, &str)]| {
            let change = |s: &mut OutboxSettings| {
                s.value_format = Format::Json;
                s.null_payload = null_payload;
            };
            route(change, values).expect("routes").4
        };
        let null = &EVENT[..3];
        assert_eq!(
            payload(NullPayload::Formatted, null).as_deref(),
            Some("null")
        );
        assert_eq!(payload(NullPayload::Tombstone, null), None);
        assert_eq!(payload(NullPayload::Empty, null).as_deref(), Some(""));
        assert_eq!(
            payload(NullPayload::Tombstone, &EVENT).as_deref(),
            Some("\"{}\"")
        );
    }

    #[test]
    fn writes_an_envelope_around_a_null_payload_unless_empty_payloads_are_tombstones() {
        let payload = |empty_payload| {
            let change = |s: &mut OutboxSettings| {
                s.value_format = Format::Json;
                s.envelope = vec![("aggregateid".to_owned(), "order".to_owned())];
                s.null_payload = NullPayload::Tombstone;
                s.empty_payload = empty_payload;
            };
            route(change, &EVENT[..3]).expect("routes").4
        };
        let object = "{\"payload\":null,\"order\":\"o-1\"}";
        assert_eq!(payload(EmptyPayload::Value).as_deref(), Some(object));
        assert_eq!(payload(EmptyPayload::Tombstone), None);
    }

    #[test]
    fn writes_a_blank_payload_as_a_tombstone_if_configured() {
        let payload = |empty_payload, text| {
            let change = |s: &mut OutboxSettings| s.empty_payload = empty_payload;
            let values = [EVENT[0], EVENT[1], EVENT[2], ("payload", text)];
            route(change, &values).expect("routes").4
        };
        assert_eq!(payload(EmptyPayload::Value, " ").as_deref(), Some(" "));
        assert_eq!(payload(EmptyPayload::Tombstone, " \n"), None);
        assert_eq!(payload(EmptyPayload::Tombstone, "").as_deref(), None);
        assert_eq!(
            payload(EmptyPayload::Tombstone, " 1").as_deref(),
            Some(" 1")
        );
    }

    #[test]
    fn applies_a_regular_expression_only_if_it_matches_the_entire_value() {
        let topic = |regex: &str, replacement: &str, value: &str| {
            let column = Route::new("aggregatetype", regex, replacement).expect("a route");
            let values = [EVENT[0], ("aggregatetype", value), EVENT[2], EVENT[3]];
            route(|s| s.topic = Topic::Route(column), &values).map(|record| record.0)
        };
        let ok = |name: &str| Ok(name.to_owned());
        assert_eq!(
            topic("(.*)", "outbox.event.$1", "order"),
            ok("outbox.event.order")
        );
        assert_eq!(
            topic("(.*)-v([0-9]+)", "${1}_$2", "order-v7"),
            ok("order_7")
        );
        assert_eq!(topic("o", "x", "order"), ok("order"), "matches only a part");
        // Text around the first match is kept, even if the expression could also match the entire
        // value.
        assert_eq!(topic("a|ab", "x", "ab"), ok("xb"));
        assert_eq!(topic("(?<all>.*)", "e.${all}", ""), ok("e."));
        assert!(matches!(
            topic("(.*)", "$1/", "order"),
            Err(RouteError::TopicInvalid(_))
        ));
        let null = route(
            |s| s.topic = Topic::Route(Route::new("tenant", "(.*)", "$1").expect("a route")),
            &EVENT,
        );
        assert_eq!(null, Err(RouteError::TopicNull));
    }

    #[test]
    fn recomputes_the_topic_when_the_value_used_for_routing_changes() {
        let settings = OutboxSettings {
            topic: Topic::Route(Route::new("aggregatetype", "(.*)", "t.$1").expect("a route")),
            ..OutboxSettings::default()
        };
        let columns = COLUMNS.map(|(name, type_oid)| TableColumn { name, type_oid });
        let mapping = Mapping::bind(&settings, "public.outbox", &columns).expect("binds");
        let mut router = Router::default();
        let mut topic = |value: &[u8]| {
            let mut row = [None; COLUMNS_MAX];
            row[mapping.slot(1).expect("a slot")] = Some(value);
            let record = router.route(&mapping, &row, b"")?;
            Ok(record.topic.to_owned())
        };
        for value in ["a", "a", "b", "a"] {
            assert_eq!(topic(value.as_bytes()), Ok(format!("t.{value}")));
        }
        // An invalid topic must not be replaced by the previous topic, even if the same row is
        // routed twice.
        for _ in 0..2 {
            assert!(matches!(topic(b"/"), Err(RouteError::TopicInvalid(_))));
        }
        assert_eq!(topic(b"a"), Ok("t.a".to_owned()));
        // A row that is rejected because of its headers must not affect the topic of the next row.
        let mut row = [None; COLUMNS_MAX];
        row[mapping.slot(1).expect("a slot")] = Some(&b"b"[..]);
        row[mapping.slot(5).expect("a slot")] = Some(b"[]");
        assert!(matches!(
            router.route(&mapping, &row, b""),
            Err(RouteError::Headers(_))
        ));
        row[mapping.slot(5).expect("a slot")] = None;
        let topic = router
            .route(&mapping, &row, b"")
            .map(|record| record.topic.to_owned());
        assert_eq!(topic, Ok("t.b".to_owned()));
    }

    #[test]
    fn formats_times_as_rfc_3339() {
        let header = |value: &'static str| {
            let change = |s: &mut OutboxSettings| {
                s.headers = vec![("ce_time".to_owned(), template("{at:rfc3339}"))];
            };
            route(change, &with(&[("at", value)])).map(|record| record.5[0].clone())
        };
        let time = "2026-11-21 09:05:00.123456+00";
        assert_eq!(
            header(time),
            Ok("ce_time=2026-11-21T09:05:00.123456Z".to_owned())
        );
        assert_eq!(
            header("1969-12-31 23:00:00-01"),
            Ok("ce_time=1970-01-01T00:00:00Z".to_owned())
        );
        assert_eq!(
            header("infinity"),
            Err(RouteError::Time("infinity".to_owned()))
        );
    }

    #[test]
    fn writes_debezium_headers_and_trace_context_before_other_headers() {
        let values = with(&[("tenant", "traceparent=00-1-2-01\n#x")]);
        let record = route(
            |s| {
                s.debezium_headers = Some(DebeziumHeaders {
                    logical_name: "lab".to_owned(),
                    run_id: "run".to_owned(),
                });
                s.tracing_span_context = Some("tenant".to_owned());
            },
            &values,
        );
        assert_eq!(
            record.expect("routes").5,
            [
                "__debezium.context.connectorLogicalName=lab",
                "__debezium.context.taskId=0",
                "__debezium.context.connectorName=postgresql",
                "__debezium.context.runId=run",
                "traceparent=00-1-2-01",
                "id=7",
                "walpost-position=POSITION"
            ]
        );
    }

    #[test]
    fn writes_a_null_key_only_if_all_its_columns_are_null() {
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
    fn decodes_bytea_columns() {
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
    fn creates_headers_from_templates_and_from_the_headers_column() {
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
    fn sets_partition_and_timestamp_from_their_columns() {
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
        assert_eq!(
            both(&[]).expect("routes").1,
            None,
            "the partitioner chooses"
        );
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
    fn rejects_reserved_topics_from_templates_and_regular_expressions() {
        let refused = |topic: Topic, values: &[(&str, &str)], name: &str, usage| {
            let setting = match &topic {
                Topic::Template(template) => format!("topic = \"{template}\""),
                Topic::Route(route) => {
                    format!("route = \"{}\"", Topic::Route(route.clone()))
                }
            };
            let error = route(|s| s.topic = topic, &with(values));
            let expected = RouteError::TopicReserved {
                topic: name.to_owned(),
                usage,
                template: None,
                setting,
            };
            assert_eq!(error, Err(expected));
        };
        let checkpoints = "walpost-checkpoints";
        let regex = Route::new("tenant", "(.*)", "wal$1").expect("a route");
        let unmatched = Route::new("tenant", "[0-9]+", "x").expect("a route");
        for (topic, tenant) in [
            (template("{tenant}").into(), checkpoints),
            (template("wal{tenant}").into(), "post-checkpoints"),
            (template("walpost{local}-{tenant}").into(), "checkpoints"),
            (Topic::Route(regex), "post-checkpoints"),
            (Topic::Route(unmatched), checkpoints),
        ] {
            let values = [("tenant", tenant), ("local", "")];
            refused(topic, &values, checkpoints, TopicUse::Checkpoints);
        }
        let tenant = |value| [("tenant", value)];
        let letters = "walpost-dead-letters";
        let topic = || template("{tenant}").into();
        refused(topic(), &tenant(letters), letters, TopicUse::DeadLetters);
        let offsets = "__consumer_offsets";
        refused(topic(), &tenant(offsets), offsets, TopicUse::KafkaInternal);
        let split = template("_{tenant}").into();
        refused(split, &tenant("_x"), "__x", TopicUse::KafkaInternal);
    }

    #[test]
    fn rejects_topics_that_match_a_reserved_pattern() {
        let literals = ["shard_".to_owned(), ".cp".to_owned()];
        let text = "shard_{name}.cp";
        let pattern = TopicPattern::new(text, TopicUse::Checkpoints, &literals);
        for (topic, tenant) in [("{tenant}", "shard_a.cp"), ("{tenant}_cp", "shard.b")] {
            let settings = |s: &mut OutboxSettings| {
                s.topic = template(topic).into();
                s.reserved_topics = ReservedTopics::default().with_patterns([pattern.clone()]);
            };
            let error = route(settings, &with(&[("tenant", tenant)])).expect_err("reserved");
            let error = error.to_string();
            for part in ["checkpoints (the topic name", "matches \"shard_{name}.cp\""] {
                assert!(error.contains(part), "{error}");
            }
            let other = route(settings, &with(&[("tenant", "a.events")]));
            assert!(other.is_ok(), "{other:?}");
        }
    }

    #[test]
    fn rejects_a_reserved_topic_after_a_row_with_a_different_topic() {
        let settings = OutboxSettings {
            topic: template("{aggregatetype}").into(),
            ..OutboxSettings::default()
        };
        let columns = COLUMNS.map(|(name, type_oid)| TableColumn { name, type_oid });
        let mapping = Mapping::bind(&settings, "public.outbox", &columns).expect("binds");
        let mut router = Router::default();
        let mut topic = |value: &'static str| {
            let mut row = [None; COLUMNS_MAX];
            row[mapping.slot(0).expect("id")] = Some(&b"1"[..]);
            row[mapping.slot(1).expect("aggregatetype")] = Some(value.as_bytes());
            let routed = router.route(&mapping, &row, b"");
            routed.map(|record| record.topic.to_owned())
        };
        for _ in 0..2 {
            assert_eq!(topic("orders").as_deref(), Ok("orders"));
            for _ in 0..2 {
                let reserved = topic("walpost-checkpoints");
                assert!(matches!(reserved, Err(RouteError::TopicReserved { .. })));
            }
        }
    }

    #[test]
    fn rejects_rows_without_a_valid_topic() {
        let topic = |value: &str| {
            route(
                |s| s.topic = template("{tenant}").into(),
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
        let null = route(|s| s.topic = template("x.{tenant}").into(), &EVENT);
        assert_eq!(null, Err(RouteError::TopicNull));
    }
}
