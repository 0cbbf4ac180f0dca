//! A fuzz target for templates, and for the routing of rows with arbitrary values.

use super::columns::{COLUMNS_MAX, Mapping, TableColumn};
use super::headers::{self, POSITION_HEADER};
use super::route::{RouteError, Router};
use super::settings::OutboxSettings;
use super::template::{Part, Template};
use super::timestamp::{self, TimestampType};

const COLUMNS: [(&str, u32); 8] = [
    ("id", 2950),
    ("aggregatetype", 25),
    ("aggregateid", 25),
    ("payload", 3802),
    ("raw", 17),
    ("headers", 3802),
    ("at", 1184),
    ("shard", 23),
];
const HEADERS: usize = 5;
const AT: usize = 6;
const SHARD: usize = 7;

type Values<'a> = [Option<&'a [u8]>; COLUMNS.len()];

/// Parses templates, routes a row, and checks the results. `data` consists of parts separated by
/// zero bytes: the templates of the topic, the key and a header, then the values of the row.
/// Missing or empty values are null.
///
/// # Panics
/// Panics if a template is parsed or printed incorrectly, or if a record does not match the
/// templates and the row.
pub fn template(data: &[u8]) {
    let mut parts = data.split(|&byte| byte == 0);
    let mut template = || {
        let text = std::str::from_utf8(parts.next()?).ok()?;
        let template = text.parse::<Template>().ok()?;
        assert_eq!(template.to_string(), text);
        assert_eq!(template.parts(), parts_of(text));
        Some(template)
    };
    let (Some(topic), Some(key), Some(header)) = (template(), template(), template()) else {
        return;
    };
    let mut values: Values<'_> = [None; COLUMNS.len()];
    for (value, part) in values.iter_mut().zip(parts) {
        *value = (!part.is_empty()).then_some(part);
    }
    let settings = OutboxSettings {
        topic: topic.clone().into(),
        key,
        payload: "raw".to_owned(),
        headers: vec![("header".to_owned(), header)],
        timestamp: Some("at".to_owned()),
        partition: Some("shard".to_owned()),
        ..OutboxSettings::default()
    };
    route(&settings, &topic, &values);
}

/// Parses a template independently of [`Template`], for comparison.
fn parts_of(template: &str) -> Vec<Part> {
    let mut parts = Vec::new();
    let mut chars = template.chars().peekable();
    while let Some(char) = chars.next() {
        let is_column = char == '{' && chars.peek() != Some(&'{');
        if is_column {
            let name = chars.by_ref().take_while(|&char| char != '}');
            let name: String = name.collect();
            parts.push(match name.strip_suffix(":rfc3339") {
                Some(column) if !column.is_empty() => Part::Time(column.to_owned()),
                _ if name == "table.schema" => Part::TableSchema,
                _ if name == "table.name" => Part::TableName,
                _ => Part::Column(name),
            });
            continue;
        }
        if matches!(char, '{' | '}') {
            chars.next();
        }
        match parts.last_mut() {
            Some(Part::Literal(text)) => text.push(char),
            _ => parts.push(Part::Literal(char.to_string())),
        }
    }
    parts
}

fn route(settings: &OutboxSettings, topic: &Template, values: &Values<'_>) {
    let columns = COLUMNS.map(|(name, type_oid)| TableColumn { name, type_oid });
    let Ok(mapping) = Mapping::bind(settings, "public.outbox", &columns) else {
        return;
    };
    let mut row = [None; COLUMNS_MAX];
    for (index, value) in values.iter().enumerate() {
        if let Some(slot) = mapping.slot(index) {
            row[slot] = *value;
        }
    }
    let mut router = Router::default();
    let record = match router.route(&mapping, &row, b"POSITION") {
        Ok(record) => record,
        Err(error) => return check_error(&error, topic, values),
    };

    let topic = expand(topic, values).expect("legal").unwrap_or_default();
    assert_eq!(record.topic.as_bytes(), topic);
    assert!(is_topic(&topic) && !is_reserved(&topic));
    assert_eq!(
        Ok(record.key),
        expand(&settings.key, values).as_ref().map(Option::as_deref)
    );
    assert_eq!(
        record.payload,
        value("raw", values).expect("legal").as_deref()
    );
    assert_eq!(record.partition, partition(values));
    assert_eq!(record.timestamp_millis, values[AT].and_then(millis));
    let mut headers = record.headers.iter();
    let header = expand(&settings.headers[0].1, values).expect("legal");
    assert_eq!(headers.next(), Some(("header", header.as_deref())));
    assert_eq!(
        headers.next(),
        Some((POSITION_HEADER, Some(&b"POSITION"[..])))
    );
    check_headers(headers.collect(), values[HEADERS]);
}

/// Checks that the row's values actually have the problem that the error reports.
fn check_error(error: &RouteError, topic: &Template, values: &Values<'_>) {
    match error {
        RouteError::TopicNull => {
            assert!(topic.columns().any(|name| value(name, values) == Ok(None)));
        }
        RouteError::TopicInvalid(_) => {
            let topic = expand(topic, values).expect("legal");
            assert!(!is_topic(&topic.unwrap_or_default()));
        }
        RouteError::TopicReserved { .. } => {
            let topic = expand(topic, values).expect("legal");
            assert!(is_reserved(&topic.unwrap_or_default()));
        }
        RouteError::Partition(_) => {
            assert!(values[SHARD].is_some());
            assert_eq!(partition(values), None);
        }
        RouteError::Timestamp(_) => assert_eq!(values[AT].and_then(millis), None),
        RouteError::Headers(_) => {
            let json = values[HEADERS].expect("a null column does not cause this error");
            let object = serde_json::from_slice::<serde_json::Map<_, _>>(json);
            let is_reserved =
                |name: &String| headers::is_reserved(name.as_bytes()) || name.contains('\0');
            assert!(object.is_err() || object.is_ok_and(|object| object.keys().any(is_reserved)));
        }
        RouteError::Bytea => assert_eq!(value("raw", values), Err(())),
        RouteError::Time(text) => {
            let at = values[AT].expect("a null column does not cause this error");
            assert_eq!(*text, String::from_utf8_lossy(at));
            assert_eq!(time(at), Err(()));
        }
        RouteError::Encoding => panic!("invalid encoding is detected before a row is routed"),
        RouteError::NotText => panic!("the fuzz settings do not convert values to JSON"),
    }
}

/// Returns whether the topic is reserved regardless of the settings.
fn is_reserved(topic: &[u8]) -> bool {
    let own = [b"walpost-checkpoints".as_slice(), b"walpost-dead-letters"];
    // Kafka does not allow two topics whose names differ only in `.` and `_`.
    let prefix = topic.iter().take(2).map(|byte| matches!(byte, b'.' | b'_'));
    prefix.eq([true, true]) || own.contains(&topic)
}

/// Returns the value of the column with the given name. Returns an error if the column is a bytea
/// and its value is not valid.
fn value(name: &str, values: &Values<'_>) -> Result<Option<Vec<u8>>, ()> {
    let index = COLUMNS.iter().position(|(column, _)| *column == name);
    let Some(text) = index.and_then(|index| values[index]) else {
        return Ok(None);
    };
    if name != "raw" {
        return Ok(Some(text.to_vec()));
    }
    let digits = text.strip_prefix(b"\\x").ok_or(())?;
    let digits = std::str::from_utf8(digits).map_err(|_| ())?;
    let is_hex = digits.len() % 2 == 0 && digits.bytes().all(|b| b.is_ascii_hexdigit());
    is_hex.then_some(()).ok_or(())?;
    let byte = |at| u8::from_str_radix(&digits[at..at + 2], 16).map_err(|_| ());
    (0..digits.len())
        .step_by(2)
        .map(byte)
        .collect::<Result<_, _>>()
        .map(Some)
}

/// Expands a template for a row. Returns `None` if the template contains columns and all of them
/// are null.
fn expand(template: &Template, values: &Values<'_>) -> Result<Option<Vec<u8>>, ()> {
    let mut text = Vec::new();
    let mut is_null = true;
    for part in template.parts() {
        match part {
            Part::Literal(literal) => text.extend(literal.bytes()),
            Part::TableSchema => text.extend(b"public"),
            Part::TableName => text.extend(b"outbox"),
            Part::Column(name) => {
                let value = value(name, values)?;
                is_null &= value.is_none();
                text.extend(value.unwrap_or_default());
            }
            // The column `at` is the only column that `Mapping` accepts as a time.
            Part::Time(_) => {
                is_null &= values[AT].is_none();
                text.extend(values[AT].map(time).transpose()?.unwrap_or_default());
            }
        }
    }
    let has_columns = template.columns().next().is_some();
    Ok((!has_columns || !is_null).then_some(text))
}

fn time(text: &[u8]) -> Result<Vec<u8>, ()> {
    let text = std::str::from_utf8(text).map_err(|_| ())?;
    let at: jiff::Timestamp = text.parse().map_err(|_| ())?;
    Ok(at.to_string().into_bytes())
}

fn is_topic(name: &[u8]) -> bool {
    let legal = |b: &u8| matches!(b, b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'.' | b'_' | b'-');
    (1..=249).contains(&name.len()) && name.iter().all(legal) && name != b"." && name != b".."
}

fn partition(values: &Values<'_>) -> Option<i32> {
    let text = std::str::from_utf8(values[SHARD]?).ok()?;
    text.parse().ok().filter(|partition| *partition >= 0)
}

fn millis(text: &[u8]) -> Option<i64> {
    timestamp::millis(text, TimestampType::Zoned).filter(|&millis| millis >= 0)
}

/// Checks that the headers match the members of the JSON object.
fn check_headers(headers: Vec<(&str, Option<&[u8]>)>, json: Option<&[u8]>) {
    let is_reserved = |name: &str| headers::is_reserved(name.as_bytes()) || name.contains('\0');
    assert!(!headers.iter().any(|(name, _)| is_reserved(name)));
    let Some(json) = json else {
        return assert!(headers.is_empty());
    };
    // serde_json rejects out-of-range numbers, whereas Walpost copies their text into headers.
    let Ok(object) = serde_json::from_slice::<serde_json::Map<_, _>>(json) else {
        return;
    };
    // A name that is repeated in the object results in several headers.
    for (name, member) in &object {
        let header = headers.iter().rev().find(|(header, _)| header == name);
        let (_, value) = header.expect("every member becomes a header");
        match (member, value) {
            (serde_json::Value::Null, value) => assert_eq!(*value, None),
            (serde_json::Value::String(text), value) => {
                assert_eq!(*value, Some(text.as_bytes()));
            }
            (member, value) => {
                let value = serde_json::from_slice(value.expect("not null"));
                assert_eq!(value.as_ref().ok(), Some(member));
            }
        }
    }
    assert!(headers.iter().all(|(name, _)| object.contains_key(*name)));
}
