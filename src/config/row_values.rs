//! Inserts the values of a query's row into a template that defines a pipeline.
//!
//! A user who can write rows can choose a host or a name, for example, but can't change the
//! surrounding text. Different places in a template accept different values; a row with an
//! unacceptable value is rejected.

use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use toml::{Table, Value};

use crate::outbox::columns::list_names;
use crate::outbox::reserved_topics::TopicUse;
use crate::outbox::route::is_topic_name;
use crate::outbox::template::{Template, TemplateError};
use crate::postgres::connect::conninfo::{Conninfo, is_host, is_port};
use crate::postgres::table::TableName;
use crate::postgres::text_rows::TextRow;

/// The prefix that distinguishes columns of the query's result from columns of the outbox, in
/// templates that can contain both.
const SOURCE_PREFIX: &str = "source.";

/// Maximum length of a value that a template uses. Errors quote values and escape their characters,
/// which can make a value six times as long.
const VALUE_BYTES_MAX: usize = 64 << 10;

/// The Kafka properties for which a row may supply a value.
const PLAIN_KAFKA_PROPERTIES: [&str; 6] = [
    "bootstrap.servers",
    "client.id",
    "client.rack",
    "metadata.broker.list",
    "sasl.password",
    "sasl.username",
];

/// A place in the template of a `[[fleet.source]]`, which determines what row values may be
/// inserted there.
#[derive(Clone, Copy)]
pub(super) enum Place<'k> {
    /// A PostgreSQL connection string.
    Postgres,
    /// A table name, or a pattern for table names.
    Table,
    /// A template for topics. Names in braces without the prefix `source.` are outbox columns.
    Topic,
    /// A template for keys or headers. Names in braces without the prefix `source.` are outbox
    /// columns.
    Record,
    /// A topic name.
    TopicName,
    /// The value of the Kafka property with this name.
    Kafka(&'k str),
    /// Any other value. Its syntax is checked when the pipeline is defined.
    Other,
}

impl<'k> Place<'k> {
    /// Returns the place in a template that corresponds to a key of a pipeline.
    pub(super) fn new(key: &'k str) -> Self {
        match key {
            "postgres" => Self::Postgres,
            "table" | "tables" => Self::Table,
            "topic" => Self::Topic,
            "headers" | "key" => Self::Record,
            "dead_letter_topic" => Self::TopicName,
            _ => Self::Other,
        }
    }

    /// Returns the place in a template that corresponds to the key `inner` of the TOML table `key`.
    fn within(self, key: &str, inner: &'k str) -> Self {
        match (key, inner) {
            ("kafka", property) => Self::Kafka(property),
            ("checkpoint", "topic") => Self::TopicName,
            _ => self,
        }
    }
}

/// Inserts the row's values into the template's value for a key.
///
/// # Errors
/// Returns an error that names the column if the row lacks the column, or if this place in the
/// template does not accept the column's value.
pub(super) fn fill_value(key: &str, value: &mut Value, row: &TextRow) -> Result<(), String> {
    fill_at(Place::new(key), key, value, row)
}

fn fill_at(place: Place<'_>, key: &str, value: &mut Value, row: &TextRow) -> Result<(), String> {
    match value {
        Value::String(text) => {
            *text = place
                .filled(text, row)
                .map_err(|reason| format!("template: {key}: {reason}"))?;
        }
        Value::Array(values) => {
            for value in values {
                fill_at(place, key, value, row)?;
            }
        }
        Value::Table(table) => {
            for (inner, value) in table.iter_mut() {
                fill_at(place.within(key, inner), key, value, row)?;
            }
        }
        Value::Integer(_) | Value::Float(_) | Value::Boolean(_) | Value::Datetime(_) => {}
    }
    Ok(())
}

/// Checks that the template inserts row values only in places that allow row values. The values
/// themselves are not checked.
///
/// # Errors
/// Returns an error that names the first place that does not allow row values.
pub(super) fn check(template: &Table) -> Result<(), String> {
    if let Some(text) = template.get("postgres").and_then(Value::as_str)
        && sole_column(text).is_none()
        && let Ok(segments) = segments(text)
    {
        parameters(&segments).map_err(|reason| format!("template: postgres: {reason}"))?;
    }
    for (key, _, text) in own_topics(template) {
        if has_values(text) && !has_text(text) {
            return Err(format!(
                "template: {key}: with {text:?}, a row could choose a topic to which another pipeline writes its events; \
                 add literal text with a letter or digit, like '{text}.walpost'"
            ));
        }
    }
    let kafka = template.get("kafka").and_then(Value::as_table);
    for (property, value) in kafka.into_iter().flatten() {
        if value.as_str().is_some_and(has_values) {
            check_property(property).map_err(|reason| format!("template: kafka: {reason}"))?;
        }
    }
    Ok(())
}

/// Returns whether the text contains column names in braces, which are replaced with a row's
/// values.
fn has_values(text: &str) -> bool {
    let segments = segments(text).unwrap_or_default();
    segments
        .iter()
        .any(|segment| matches!(segment, Segment::Column(_)))
}

/// Returns whether two template strings can become equal when the column names in braces are
/// replaced by values.
pub(super) fn can_be_equal(first: &str, second: &str) -> bool {
    // Text with unmatched braces is rejected later, when a row's values are inserted. Until then,
    // assume that the text can become equal to any other text.
    let [first, second] = [first, second].map(|text| literals(text).unwrap_or_default());
    let ends = |literals: &[String]| -> [String; 2] {
        [literals.first(), literals.last()].map(|text| text.cloned().unwrap_or_default())
    };
    match (&first[..], &second[..]) {
        ([first], [second]) => first == second,
        ([whole], others) | (others, [whole]) => {
            let [prefix, suffix] = ends(others);
            let rest = whole.strip_prefix(&*prefix);
            rest.is_some_and(|rest| rest.ends_with(&suffix))
        }
        (first, second) => {
            let ([prefix, suffix], [other_prefix, other_suffix]) = (ends(first), ends(second));
            (prefix.starts_with(&other_prefix) || other_prefix.starts_with(&prefix))
                && (suffix.ends_with(&other_suffix) || other_suffix.ends_with(&suffix))
        }
    }
}

/// Returns whether the text outside columns contains a letter or a digit. A topic template with
/// only punctuation outside its columns would reserve most topics.
fn has_text(text: &str) -> bool {
    let literals = literals(text).unwrap_or_default();
    let mut literals = literals.iter();
    literals.any(|text| text.contains(char::is_alphanumeric))
}

/// Returns the template's checkpoint and dead-letter topics, each with its key. The topics may
/// contain column names in braces, which are replaced with a row's values.
pub(super) fn own_topics(template: &Table) -> Vec<(&'static str, TopicUse, &str)> {
    let checkpoint = template.get("checkpoint");
    let checkpoint = checkpoint.and_then(|checkpoint| checkpoint.get("topic"));
    let dead_letters = template.get("dead_letter_topic");
    [
        ("dead_letter_topic", TopicUse::DeadLetters, dead_letters),
        ("checkpoint.topic", TopicUse::Checkpoints, checkpoint),
    ]
    .into_iter()
    .filter_map(|(key, usage, value)| Some((key, usage, value?.as_str()?)))
    .collect()
}

/// Returns the literal text before the first column, between columns and after the last column.
///
/// # Errors
/// Returns an error if the text contains unmatched braces.
pub(super) fn literals(text: &str) -> Result<Vec<String>, String> {
    let segments = segments(text)?.into_iter();
    let literals = segments.filter_map(|segment| match segment {
        Segment::Text(text) => Some(text),
        Segment::Column(_) => None,
    });
    Ok(literals.collect())
}

impl Place<'_> {
    /// Returns the text with each column name in braces replaced by the row's value of that column.
    pub(super) fn filled(self, text: &str, row: &TextRow) -> Result<String, String> {
        match self {
            Self::Postgres => postgres(text, row),
            Self::Table => table(text, row),
            Self::Topic | Self::Record => fill_record_template(self, text, row),
            Self::TopicName => checked(text, row, check_topic),
            Self::Kafka(property) => kafka(property, text, row),
            Self::Other => checked(text, row, |_| Ok(())),
        }
    }
}

/// A part of a template's text, in which `{{` and `}}` represent literal braces.
enum Segment<'t> {
    Text(String),
    /// `{name}`, which is replaced by the value of a column.
    Column(&'t str),
}

fn segments(text: &str) -> Result<Vec<Segment<'_>>, String> {
    let mut segments = Vec::new();
    let mut plain = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(['{', '}']) {
        let (before, brace) = rest.split_at(at);
        plain.push_str(before);
        let doubled = ["{{", "}}"].iter().find(|two| brace.starts_with(**two));
        if let Some(two) = doubled {
            plain.push_str(&two[..1]);
            rest = &brace[2..];
            continue;
        }
        let (name, after) = brace[1..]
            .split_once('}')
            .filter(|(name, _)| brace.starts_with('{') && !name.contains('{'))
            .ok_or("unmatched brace; write {{ or }} for a literal brace")?;
        segments.push(Segment::Text(std::mem::take(&mut plain)));
        segments.push(Segment::Column(name));
        rest = after;
    }
    plain.push_str(rest);
    segments.push(Segment::Text(plain));
    Ok(segments)
}

/// Returns the column's name if the text consists solely of a column in braces.
fn sole_column(text: &str) -> Option<&str> {
    let name = text.strip_prefix('{')?.strip_suffix('}')?;
    (!name.contains(['{', '}'])).then_some(name)
}

/// Returns the text with each column name in braces replaced by the row's value of that column.
/// Returns an error if `check` rejects a value.
fn checked(
    text: &str,
    row: &TextRow,
    check: impl Fn(&str) -> Result<(), String>,
) -> Result<String, String> {
    let mut filled = String::with_capacity(text.len());
    for segment in segments(text)? {
        match segment {
            Segment::Text(text) => filled.push_str(&text),
            Segment::Column(name) => filled.push_str(accepted(name, row, &check)?),
        }
    }
    Ok(filled)
}

/// Returns the value of a column if `check` accepts the value. Errors name the column.
fn accepted<'r>(
    name: &str,
    row: &'r TextRow,
    check: impl Fn(&str) -> Result<(), String>,
) -> Result<&'r str, String> {
    let value = value(name, row)?;
    check(value).map_err(|reason| format!("column {}: {reason}", column(name)))?;
    Ok(value)
}

/// Returns the name of a column without the optional prefix `source.`.
fn column(name: &str) -> &str {
    name.strip_prefix(SOURCE_PREFIX).unwrap_or(name)
}

fn value<'r>(name: &str, row: &'r TextRow) -> Result<&'r str, String> {
    let column = column(name);
    match row.get(column) {
        Some(Some(value)) if value.len() > VALUE_BYTES_MAX => Err(format!(
            "column {column} has {} bytes, expected at most {VALUE_BYTES_MAX}",
            value.len()
        )),
        Some(Some(value)) => Ok(value),
        Some(None) => Err(format!("column {column} is NULL")),
        None => Err(format!(
            "the query has no column {column}; its columns are {}",
            list_names(row.keys().map(String::as_str))
        )),
    }
}

/// Fills a connection string with a row's values, which may set only the server, database and user.
/// Values for other connection parameters are rejected.
fn postgres(text: &str, row: &TextRow) -> Result<String, String> {
    if let Some(name) = sole_column(text) {
        let url = accepted(name, row, Conninfo::check_row_url)?;
        return Ok(url.to_owned());
    }
    let segments = segments(text)?;
    let mut parameters = parameters(&segments)?.into_iter();
    let mut filled = String::with_capacity(text.len());
    for segment in segments {
        match segment {
            Segment::Text(text) => filled.push_str(&text),
            Segment::Column(name) => {
                let parameter = parameters.next().unwrap_or_default();
                let check = |value: &str| Conninfo::check_row_parameter(parameter, value);
                let value = accepted(name, row, check)?;
                filled.extend(utf8_percent_encode(value, NON_ALPHANUMERIC));
            }
        }
    }
    Ok(filled)
}

/// Returns, for each column, the connection parameter in which it occurs.
fn parameters(segments: &[Segment<'_>]) -> Result<Vec<&'static str>, String> {
    let marker = |index: usize| format!("walpost{index}value");
    let mut marked = String::new();
    let mut columns = Vec::new();
    for segment in segments {
        match segment {
            Segment::Text(text) => marked.push_str(text),
            Segment::Column(name) => {
                marked.push_str(&marker(columns.len()));
                columns.push(*name);
            }
        }
    }
    let is_url = ["postgres://", "postgresql://"];
    if !columns.is_empty() && !is_url.iter().any(|scheme| marked.starts_with(scheme)) {
        return Err(
            "expected a URL with columns, like \"postgresql://walpost@{host}/{dbname}\", or a single column: \"{url}\""
                .to_owned(),
        );
    }
    let columns = columns.iter().enumerate();
    let parameter = |(index, name): (usize, &&str)| {
        Conninfo::parameter_with(&marked, &marker(index)).ok_or_else(|| {
            format!(
                "{{{name}}} is used for a part of the URL that must be the same for each row: a row may supply only the host, \
                 hostaddr, port, user, password, dbname or application_name. Write anything else in the template"
            )
        })
    };
    columns.map(parameter).collect()
}

/// Fills a table name or a pattern with a row's values, each of which must be a name or part of a
/// name. A value can't be a pattern or consist of several names.
fn table(text: &str, row: &TextRow) -> Result<String, String> {
    if let Some(name) = sole_column(text) {
        let table = value(name, row)?.parse::<TableName>();
        return table.map(|table| table.to_string()).map_err(|error| {
            format!(
                "column {}: {error}. Only the template may contain patterns",
                column(name)
            )
        });
    }
    let mut filled = String::with_capacity(text.len());
    let mut in_quotes = false;
    for segment in segments(text)? {
        match segment {
            Segment::Text(text) => {
                in_quotes ^= !text.matches('"').count().is_multiple_of(2);
                filled.push_str(&text);
            }
            Segment::Column(name) => {
                let check = |value: &str| check_identifier(in_quotes, value);
                filled.push_str(accepted(name, row, check)?);
            }
        }
    }
    Ok(filled)
}

fn check_identifier(in_quotes: bool, value: &str) -> Result<(), String> {
    let is_plain = |char: char| char.is_alphanumeric() || matches!(char, '_' | '$');
    let (fits, expected) = match in_quotes {
        true => (!value.contains(['"', '\0']), "a name without double quotes"),
        false => (
            value.chars().all(is_plain),
            "a name that consists of letters, digits, _ and $. If the name contains other characters, put the column in \
             double quotes in the template",
        ),
    };
    match fits && !value.is_empty() {
        true => Ok(()),
        false => Err(format!("found {value:?}, expected {expected}")),
    }
}

/// Replaces the names of columns of the query's result with the row's values. The names of outbox
/// columns remain in the text.
fn fill_record_template(place: Place<'_>, text: &str, row: &TextRow) -> Result<String, String> {
    if !text.contains("{source.") {
        return Ok(text.to_owned());
    }
    let template: Template = text
        .parse()
        .map_err(|error: TemplateError| error.to_string())?;
    template.with_texts(|index, name| {
        if !name.starts_with(SOURCE_PREFIX) {
            return Ok(None);
        }
        let check = |value: &str| match place {
            Place::Topic => check_topic_part(&template, index, value),
            _ => Ok(()),
        };
        accepted(name, row, check).map(|value| Some(value.to_owned()))
    })
}

fn check_topic_part(template: &Template, index: usize, value: &str) -> Result<(), String> {
    check_topic(value)?;
    match template.separator_in(index, value) {
        None => Ok(()),
        Some(separator) => Err(format!(
            "found {value:?}, expected a name without {separator:?}, which separates the name from the rest of the topic: \
             otherwise, events of different pipelines could be written to the same topic"
        )),
    }
}

/// Checks that a value can be part of a topic name.
fn check_topic(value: &str) -> Result<(), String> {
    // "." and ".." are not topic names, but can be part of one.
    match is_topic_name(&format!("{value}_")) && !value.is_empty() {
        true => Ok(()),
        false => Err(format!(
            "found {value:?}, expected a topic name with the characters a-z A-Z 0-9 . _ -"
        )),
    }
}

fn check_property(property: &str) -> Result<(), String> {
    match PLAIN_KAFKA_PROPERTIES.contains(&property) {
        true => Ok(()),
        false => Err(format!(
            "{property} must be the same for each row: write its value in the template. A row may supply values for {}",
            PLAIN_KAFKA_PROPERTIES.join(", ")
        )),
    }
}

fn kafka(property: &str, text: &str, row: &TextRow) -> Result<String, String> {
    let is_list = matches!(property, "bootstrap.servers" | "metadata.broker.list");
    let name = sole_column(text);
    checked(text, row, |value| {
        check_property(property)?;
        match is_list {
            true if name.is_some() => check_brokers(value),
            true => check_broker_part(value),
            false if value.is_empty() => Err("found an empty value".to_owned()),
            false => Ok(()),
        }
    })
}

/// Checks that a value is a host or a port number.
fn check_broker_part(value: &str) -> Result<(), String> {
    match is_host(value) || is_port(value) {
        true => Ok(()),
        false => Err(format!("found {value:?}, expected a broker's host or port")),
    }
}

/// Checks that a value is a list of brokers, none of them with a protocol prefix.
fn check_brokers(value: &str) -> Result<(), String> {
    let is_broker = |broker: &str| {
        let (host, port) = match broker.strip_prefix('[') {
            Some(rest) => rest.split_once(']').unwrap_or(("", "")),
            None => broker
                .find(':')
                .map_or((broker, ""), |colon| broker.split_at(colon)),
        };
        is_host(host) && (port.is_empty() || port.strip_prefix(':').is_some_and(is_port))
    };
    match value.split(',').all(is_broker) {
        true => Ok(()),
        false => Err(format!(
            "found {value:?}, expected HOST:PORT, or a comma-separated list of such addresses"
        )),
    }
}
