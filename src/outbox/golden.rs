//! Compares the router's records with records that Debezium produced. The records from Debezium are
//! in `tests/golden/debezium/lab.jsonl` and `captured.jsonl`, which `./dev golden debezium`
//! re-creates. Each line contains a connector's configuration, a table, and rows with the resulting
//! record, or null if Debezium did not produce a record.

use serde::Deserialize;
use serde_json::Value;

use super::Record;
use super::columns::{COLUMNS_MAX, Mapping, SourceTable, TableColumn};
use super::connect::ColumnFacts;
use super::headers::POSITION_HEADER;
use super::route::Router;
use super::settings::{
    DebeziumHeaders, EmptyPayload, Expansion, Format, HeaderFormat, HeadersColumn, OutboxSettings,
    Route, Topic, Untyped,
};

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/debezium");

/// The number of partitions in each topic.
const PARTITIONS: u32 = 6;

#[derive(Deserialize)]
struct Case {
    case: String,
    table: String,
    config: std::collections::BTreeMap<String, String>,
    columns: Vec<(String, u32, i32, bool, Option<String>)>,
    rows: Vec<Row>,
}

#[derive(Deserialize)]
struct Row {
    row: String,
    values: Vec<Option<String>>,
    record: Option<Captured>,
}

#[derive(Deserialize)]
struct Captured {
    topic: String,
    partition: u32,
    timestamp: Option<i64>,
    key: Value,
    value: Value,
    headers: Vec<(String, Value)>,
}

/// The intended differences from Debezium: the case, the row, and the reason for the difference. An
/// empty string matches any case or row.
const DIFFERENCES: &[(&str, &str, &str)] = &[
    (
        "bytea string",
        "",
        "StringConverter prints a ByteBuffer's description instead of its bytes",
    ),
    (
        "envelope string",
        "values",
        "StringConverter prints a ByteBuffer's description for bytea",
    ),
    (
        "envelope string",
        "NULL payload",
        "StringConverter prints a ByteBuffer's description for bytea",
    ),
    (
        "headers string",
        "",
        "StringConverter prints descriptions of ByteBuffers, and uses Java's format for lists",
    ),
    (
        "key bool string",
        "",
        "a key with the format \"string\" is PostgreSQL's text representation of the value",
    ),
    (
        "key numeric string",
        "",
        "StringConverter prints an object's address",
    ),
    (
        "key date string",
        "",
        "a key with the format \"string\" is PostgreSQL's text representation of the value",
    ),
    (
        "key timestamptz string",
        "",
        "a key with the format \"string\" is PostgreSQL's text representation of the value",
    ),
    (
        "key float8 string",
        "",
        "a key with the format \"string\" is PostgreSQL's text representation of the value",
    ),
    (
        "typed partition",
        "",
        "Kafka rejects the partition, so Debezium's task fails",
    ),
    (
        "typed timestamp",
        "second values",
        "Kafka's producer rejects times before 1970, and treats -1 as no timestamp",
    ),
    (
        "expanded",
        "beyond double",
        "Debezium replaces numbers that are too large for a double with Infinity",
    ),
    (
        "expanded",
        "something behind",
        "Debezium drops the text after the JSON",
    ),
    (
        "traced",
        "only state",
        "without a parent, Debezium starts a new trace",
    ),
    (
        "traced",
        "capitals",
        "without a parent, Debezium starts a new trace",
    ),
    (
        "traced",
        "no trace",
        "if the parent is invalid, Debezium starts a new trace",
    ),
    (
        "traced",
        "too short",
        "if the parent is invalid, Debezium starts a new trace",
    ),
    (
        "traced",
        "later version",
        "Debezium writes traceparent version 00, and Walpost keeps the application's version",
    ),
    (
        "traced",
        "no properties",
        "without a parent, Debezium starts a new trace",
    ),
    (
        "traced",
        "empty",
        "without a parent, Debezium starts a new trace",
    ),
    (
        "traced",
        "baggage",
        "Debezium reads baggage but does not write it",
    ),
];

fn format_for(config: &Case, prefix: &str) -> Format {
    let class = config
        .config
        .get(&format!("{prefix}.converter"))
        .map_or("", String::as_str);
    let schemas = config
        .config
        .get(&format!("{prefix}.converter.schemas.enable"));
    match class.rsplit('.').next() {
        Some("JsonConverter") if schemas.is_some_and(|schemas| schemas == "false") => Format::Json,
        Some("JsonConverter") => Format::JsonSchema,
        Some("ByteArrayConverter" | "BinaryDataConverter") => Format::Bytes,
        _ => Format::String,
    }
}

impl Case {
    fn property(&self, key: &str) -> Option<&str> {
        self.config
            .get(&format!("transforms.outbox.{key}"))
            .map(String::as_str)
    }

    /// Returns the settings that the importer creates from the connector's configuration.
    fn settings(&self) -> OutboxSettings {
        let template = |column: &str| format!("{{{column}}}").parse().expect("a template");
        let mut settings = OutboxSettings {
            key_format: format_for(self, "key"),
            value_format: format_for(self, "value"),
            header_format: match (
                self.config.get("header.converter"),
                format_for(self, "header"),
            ) {
                (None, _) => HeaderFormat::Simple,
                (_, Format::Json) => HeaderFormat::Json,
                (_, Format::JsonSchema) => HeaderFormat::JsonSchema,
                // Debezium writes dates and booleans in Java's format. The output of the header
                // format "simple" is closer to Java's format than the output of "string".
                _ => HeaderFormat::Simple,
            },
            headers_column: HeadersColumn::Off,
            debezium_headers: Some(DebeziumHeaders {
                logical_name: "lab".to_owned(),
                run_id: "run".to_owned(),
            }),
            null_default: true,
            key: template(
                self.property("table.field.event.key")
                    .unwrap_or("aggregateid"),
            ),
            timestamp: self
                .property("table.field.event.timestamp")
                .map(str::to_owned),
            tracing_span_context: self
                .property("tracing.span.context.field")
                .map(str::to_owned),
            ..OutboxSettings::default()
        };
        if self.property("table.expand.json.payload") == Some("true") {
            let keeps = |key| match self.property(key) {
                None | Some("ignore") => Untyped::Ignore,
                Some(_) => Untyped::Keep,
            };
            settings.expand_payload = Some(Expansion {
                nulls: keeps("table.json.payload.null.behavior"),
                empty_arrays: keeps("table.json.payload.empty.array.behavior"),
            });
        }
        if self.property("route.tombstone.on.empty.payload") == Some("true") {
            settings.empty_payload = EmptyPayload::Tombstone;
        }
        let column = self.property("route.by.field").unwrap_or("aggregatetype");
        // No conversion of the regex is needed, because Java and Rust use the same syntax for named
        // groups, (?<name>). In a replacement in Java's syntax, a reference such as $1 ends after
        // the digits.
        let regex = self
            .property("route.topic.regex")
            .unwrap_or("(?<routedByValue>.*)");
        // The topics in captured.jsonl are recorded without a prefix.
        let is_lab = self.table == "public.outbox";
        let default = if is_lab {
            "outbox.event.${routedByValue}"
        } else {
            "${routedByValue}"
        };
        let replacement = self.property("route.topic.replacement").unwrap_or(default);
        settings.topic = Topic::Route(Route::new(column, regex, replacement).expect("a route"));
        for placed in self
            .property("table.fields.additional.placement")
            .iter()
            .flat_map(|all| all.split(','))
        {
            let mut parts = placed.split(':');
            let column = parts.next().expect("a column");
            let location = parts.next().expect("a location");
            let alias = parts.next().unwrap_or(column).to_owned();
            match location {
                "header" => settings.headers.push((alias, template(column))),
                "envelope" => settings.envelope.push((column.to_owned(), alias)),
                _ => settings.partition = Some(column.to_owned()),
            }
        }
        settings
    }

    fn mapping(&self) -> Result<Mapping, String> {
        let columns = self.columns.iter().map(|(name, type_oid, ..)| TableColumn {
            name,
            type_oid: *type_oid,
        });
        let facts: Vec<_> = self
            .columns
            .iter()
            .map(|(name, _, type_modifier, not_null, default)| ColumnFacts {
                name: name.clone(),
                domain: None,
                type_modifier: *type_modifier,
                not_null: *not_null,
                default: default.clone(),
            })
            .collect();
        let columns: Vec<_> = columns.collect();
        let table = SourceTable {
            schema: "",
            name: "",
            sql_name: &self.table,
        };
        Mapping::bind_with(&self.settings(), table, &columns, &facts)
            .map_err(|error| error.to_string())
    }
}

/// Kafka's hash function, as used by librdkafka's partitioner `murmur2_random` and by the
/// Java client.
fn murmur2(bytes: &[u8]) -> u32 {
    const M: u32 = 0x5bd1_e995;
    let mut hash = 0x9747_b28c ^ u32::try_from(bytes.len()).expect("a key");
    let (words, rest) = bytes.as_chunks::<4>();
    for word in words {
        let mut k = u32::from_le_bytes(*word).wrapping_mul(M);
        k ^= k >> 24;
        hash = hash.wrapping_mul(M) ^ k.wrapping_mul(M);
    }
    for (at, byte) in rest.iter().enumerate().rev() {
        hash ^= u32::from(*byte) << (8 * at);
        if at == 0 {
            hash = hash.wrapping_mul(M);
        }
    }
    hash ^= hash >> 13;
    hash = hash.wrapping_mul(M);
    hash ^ hash >> 15
}

fn bytes(value: &Value) -> Option<Vec<u8>> {
    match value {
        Value::Null => None,
        Value::String(text) => Some(text.clone().into_bytes()),
        value => {
            let digits = value["hex"].as_str().expect("digits").as_bytes();
            let pairs = digits
                .chunks(2)
                .map(|pair| str::from_utf8(pair).expect("digits"));
            Some(
                pairs
                    .map(|pair| u8::from_str_radix(pair, 16).expect("digits"))
                    .collect(),
            )
        }
    }
}

fn format_bytes(bytes: Option<&[u8]>) -> String {
    bytes.map_or("none".to_owned(), |bytes| {
        format!("{:?}", String::from_utf8_lossy(bytes))
    })
}

/// Removes the span ID from text that contains a `traceparent`, because Debezium inserts its
/// own span.
fn without_span(text: &str) -> String {
    let mut parts: Vec<_> = text.split('-').collect();
    if let Some(span) = parts.get_mut(2) {
        *span = "span";
    }
    parts.join("-")
}

/// Returns how the record differs from the captured record.
fn compare(captured: &Captured, record: &Record<'_>) -> Vec<String> {
    let mut differ = Vec::new();
    let mut check = |what: &str, found: String, expected: String| {
        if found != expected {
            differ.push(format!(
                "{what}\n    found    {found}\n    expected {expected}"
            ));
        }
    };
    check("topic", record.topic.to_owned(), captured.topic.clone());
    check(
        "key",
        format_bytes(record.key),
        format_bytes(bytes(&captured.key).as_deref()),
    );
    check(
        "value",
        format_bytes(record.payload),
        format_bytes(bytes(&captured.value).as_deref()),
    );
    let partition = match (record.partition, record.key) {
        (Some(partition), _) => u32::try_from(partition).ok(),
        (None, Some(key)) => Some((murmur2(key) & 0x7fff_ffff) % PARTITIONS),
        (None, None) => None,
    };
    if let Some(partition) = partition {
        check(
            "partition",
            partition.to_string(),
            captured.partition.to_string(),
        );
    }
    if let Some(timestamp) = captured.timestamp {
        check(
            "timestamp",
            format!("{:?}", record.timestamp_millis),
            format!("{:?}", Some(timestamp)),
        );
    }
    let found = record
        .headers
        .iter()
        .filter(|(name, _)| *name != POSITION_HEADER && !name.ends_with(".runId"));
    let header = |name: &str, value: Option<&[u8]>| {
        let value = format_bytes(value);
        match name {
            "traceparent" => format!("{name}={}", without_span(&value)),
            _ => format!("{name}={value}"),
        }
    };
    let found: Vec<_> = found.map(|(name, value)| header(name, value)).collect();
    let expected = captured.headers.iter();
    let expected: Vec<_> = expected
        .map(|(name, value)| header(name, bytes(value).as_deref()))
        .collect();
    for (found, expected) in found.iter().zip(&expected) {
        check("header", found.clone(), expected.clone());
    }
    check(
        "headers",
        found.len().to_string(),
        expected.len().to_string(),
    );
    differ
}

fn difference(case: &str, row: &str) -> Option<usize> {
    let mut known = DIFFERENCES.iter();
    known
        .position(|(known_case, known_row, _)| case.contains(known_case) && row.contains(known_row))
}

/// Routes the captured rows in a file, and compares the resulting records with Debezium's. If
/// `all_differ` is true, also checks that each known difference occurs in the file.
fn replay(file: &str, rows_expected: usize, all_differ: bool) {
    let file = std::fs::read_to_string(format!("{FOLDER}/{file}")).expect("a file");
    let (mut errors, mut rows, mut listed) = (Vec::new(), 0, 0);
    let mut used = [false; DIFFERENCES.len()];
    for line in file.lines() {
        let case: Case = serde_json::from_str(line).expect("a case");
        let mapping = match case.mapping() {
            Ok(mapping) => mapping,
            Err(error) => {
                errors.push(format!("{}: {error}", case.case));
                continue;
            }
        };
        let mut router = Router::default();
        for captured in &case.rows {
            rows += 1;
            let mut row = [None; COLUMNS_MAX];
            for (index, value) in captured.values.iter().enumerate() {
                if let Some(slot) = mapping.slot(index) {
                    row[slot] = value.as_deref().map(str::as_bytes);
                }
            }
            let location = format!("{}, row {:?}", case.case, captured.row);
            let record = router.route(&mapping, &row, b"position");
            let differ = match (&captured.record, record) {
                (_, Err(error)) => vec![error.to_string()],
                // Walpost also delivers rows for which Debezium produced no record.
                (None, Ok(_)) => continue,
                (Some(captured), Ok(record)) => compare(captured, &record),
            };
            match (difference(&case.case, &captured.row), differ.is_empty()) {
                (_, true) => {}
                (Some(at), false) => {
                    used[at] = true;
                    listed += 1;
                }
                (None, false) => errors.push(format!("{location}: {}", differ.join("\n  "))),
            }
        }
    }
    assert!(rows >= rows_expected, "{rows} rows");
    for (known, _) in DIFFERENCES
        .iter()
        .zip(used)
        .filter(|(_, used)| all_differ && !used)
    {
        errors.push(format!("{known:?}: no row has this difference"));
    }
    assert!(
        errors.is_empty(),
        "{} of {rows} rows differ, in addition to {listed} known differences:\n{}",
        errors.len(),
        errors.join("\n")
    );
}

#[test]
fn produces_the_same_bytes_as_debezium_for_records_captured_in_a_lab() {
    replay("lab.jsonl", 60, false);
}

#[test]
fn produces_the_same_bytes_as_debezium_for_records_captured_by_the_capture_script() {
    replay("captured.jsonl", 2500, true);
}
