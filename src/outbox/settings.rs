//! The part of a pipeline's configuration that determines how rows become records.

use std::borrow::Cow;
use std::fmt;

use regex::Regex;

use super::reserved_topics::{ReservedTopics, TopicPattern, collision_key};
use super::template::{Part, Template, TemplateError};

/// Settings that determine how rows become records. The defaults suit an outbox table with the
/// columns that Debezium expects by default.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutboxSettings {
    /// The topic. A row is rejected if a column that the topic depends on is null.
    pub topic: Topic,
    /// The template of the key. If all columns in the template are null, the record has no key.
    pub key: Template,
    pub key_format: Format,
    /// The name of the column that contains the value.
    pub payload: String,
    pub value_format: Format,
    /// How to expand a payload that is a JSON object, or `None` to write the payload as a string.
    pub expand_payload: Option<Expansion>,
    /// Columns that are combined with the payload to form an object, which becomes the value. Each
    /// column is listed with its member name in the object.
    pub envelope: Vec<(String, String)>,
    /// How a null payload is written.
    pub null_payload: NullPayload,
    /// How an empty or blank payload is written.
    pub empty_payload: EmptyPayload,
    /// Whether null in a column with a DEFAULT is replaced by the default.
    pub null_default: bool,
    /// Names and values of headers, in order. If all columns in a header's template are null, the
    /// header has no value.
    pub headers: Vec<(String, Template)>,
    pub header_format: HeaderFormat,
    /// The values of the `__debezium.context.*` headers, which identify Debezium's connector. These
    /// headers precede all other headers.
    pub debezium_headers: Option<DebeziumHeaders>,
    /// The column that contains the trace context in the format of Java properties.
    pub tracing_span_context: Option<String>,
    /// The column that contains additional headers.
    pub headers_column: HeadersColumn,
    /// The column that contains the record's timestamp.
    pub timestamp: Option<String>,
    /// The column that contains the record's partition.
    pub partition: Option<String>,
    /// Topics to which no event may be written.
    pub reserved_topics: ReservedTopics,
}

/// The topic of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Topic {
    Template(Template),
    Route(Route),
}

impl Topic {
    /// Returns the topic if it is the same for all records.
    #[must_use]
    pub fn constant(&self) -> Option<&str> {
        match self {
            Self::Template(template) => template.constant(),
            Self::Route(_) => None,
        }
    }

    /// Returns the reserved topics that a row's topic could match. If a template begins with
    /// literal text, the result is usually empty, in which case the topics of individual rows do
    /// not have to be checked.
    #[must_use]
    pub(crate) fn reachable(&self, reserved: &ReservedTopics) -> ReservedTopics {
        reserved.filter(
            |name| self.can_be(name),
            |pattern| self.can_match(pattern),
            |prefix| self.can_begin_with(prefix),
        )
    }

    /// Returns the topic template with NUL in place of all text that depends on a row or a table.
    /// NUL does not occur in topic names, so a reserved pattern that matches the result also
    /// matches the topics of all rows. Returns `None` if a regular expression produces the topic.
    #[must_use]
    pub(crate) fn outline(&self) -> Option<String> {
        let Self::Template(template) = self else {
            return None;
        };
        let parts = template.parts().iter().map(|part| match part {
            Part::Literal(text) => text.as_str(),
            Part::Column(_) | Part::Time(_) | Part::TableSchema | Part::TableName => "\0",
        });
        Some(parts.collect())
    }

    /// Returns the literal text at the beginning and the end of the template, as
    /// [`collision_key`]s.
    fn ends(template: &Template) -> [String; 2] {
        let (first, last) = (template.parts().first(), template.parts().last());
        [first, last].map(|part| match part {
            Some(Part::Literal(text)) => collision_key(text),
            _ => String::new(),
        })
    }

    /// Returns whether a row's topic could match the pattern, based on the literal text at both ends
    /// of the template and of the pattern.
    #[must_use]
    fn can_match(&self, pattern: &TopicPattern) -> bool {
        let Self::Template(template) = self else {
            return true;
        };
        let [begin, end] = Self::ends(template);
        let (prefix, suffix) = (pattern.prefix(), pattern.suffix());
        let begins = begin.starts_with(prefix) || prefix.starts_with(&begin);
        let ends = end.ends_with(suffix) || suffix.ends_with(&end);
        begins && ends
    }

    /// Returns whether a row could have a topic with this [`collision_key`], based on the literal
    /// text at both ends of the template.
    #[must_use]
    fn can_be(&self, name: &str) -> bool {
        let Self::Template(template) = self else {
            return true;
        };
        let [begin, end] = Self::ends(template);
        name.starts_with(&begin) && name.ends_with(&end)
    }

    /// Returns whether a row could have a topic whose [`collision_key`] begins with `prefix`.
    #[must_use]
    fn can_begin_with(&self, prefix: &str) -> bool {
        let Self::Template(template) = self else {
            return true;
        };
        let [begin, _] = Self::ends(template);
        begin.starts_with(prefix) || prefix.starts_with(&begin)
    }

    /// Returns the columns that determine the topic.
    pub(crate) fn columns(&self) -> impl Iterator<Item = &str> {
        let (template, route) = match self {
            Self::Template(template) => (Some(template), None),
            Self::Route(route) => (None, Some(route.column.as_str())),
        };
        template
            .into_iter()
            .flat_map(Template::columns)
            .chain(route)
    }
}

impl std::str::FromStr for Topic {
    type Err = TemplateError;

    /// Parses a template.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse().map(Self::Template)
    }
}

impl From<Template> for Topic {
    fn from(template: Template) -> Self {
        Self::Template(template)
    }
}

impl fmt::Display for Topic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Template(template) => template.fmt(f),
            Self::Route(route) => write!(
                f,
                "{{{}}} =~ {} => {}",
                route.column, route.regex, route.replacement
            ),
        }
    }
}

/// A topic derived from one column with a regular expression. If the expression does not match, the
/// topic is the column's text.
#[derive(Clone, Debug)]
pub struct Route {
    pub(crate) column: String,
    regex: String,
    pub(crate) replacement: String,
    /// The expression, anchored so that it matches only the entire text.
    whole: Regex,
    /// The expression without anchors. Its first match is the part to replace.
    first: Regex,
}

impl PartialEq for Route {
    fn eq(&self, other: &Self) -> bool {
        let parts = |route: &Self| {
            (
                route.column.clone(),
                route.regex.clone(),
                route.replacement.clone(),
            )
        };
        parts(self) == parts(other)
    }
}

impl Eq for Route {}

impl Route {
    /// # Errors
    /// Returns an error if the regular expression or the replacement is invalid.
    pub(crate) fn new(column: &str, regex: &str, replacement: &str) -> Result<Self, String> {
        let first = Regex::new(regex).map_err(|error| format!("regex {regex:?}: {error}"))?;
        let whole = Regex::new(&format!("\\A(?:{regex})\\z"));
        let whole = whole.map_err(|error| format!("regex {regex:?}: {error}"))?;
        for group in groups(replacement) {
            let is_there = match group.parse::<usize>() {
                Ok(number) => number < first.captures_len(),
                Err(_) => first.capture_names().flatten().any(|name| name == group),
            };
            if !is_there {
                return Err(format!(
                    "replacement {replacement:?} refers to group {group:?}, which does not exist in regex {regex:?}. Use an existing group; \
                     write ${{1}} if letters follow the group, and $$ for a literal dollar sign"
                ));
            }
        }
        Ok(Self {
            column: column.to_owned(),
            regex: regex.to_owned(),
            replacement: replacement.to_owned(),
            whole,
            first,
        })
    }
}

impl Route {
    /// Returns the topic for the column's text. The result may not be a valid topic name.
    pub(crate) fn topic<'t>(&self, text: &'t str) -> Cow<'t, str> {
        let captures = match self.whole.is_match(text) {
            true => self.first.captures(text),
            false => None,
        };
        let Some(captures) = captures else {
            return Cow::Borrowed(text);
        };
        // Like Java's replaceFirst: the text around the first match is kept.
        let place = captures.get(0).map_or(0..0, |found| found.range());
        let mut topic = text[..place.start].to_owned();
        captures.expand(&self.replacement, &mut topic);
        topic.push_str(&text[place.end..]);
        Cow::Owned(topic)
    }
}

/// Returns the groups to which a replacement refers, as parsed by the `regex` crate.
fn groups(replacement: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut rest = replacement;
    while let Some((_, after)) = rest.split_once('$') {
        if let Some(after) = after.strip_prefix('$') {
            rest = after;
            continue;
        }
        let name = match after.strip_prefix('{') {
            Some(after) => after.split_once('}').map_or("", |(name, _)| name),
            None => {
                let is_part = |char: char| char.is_ascii_alphanumeric() || char == '_';
                &after[..after.find(|char| !is_part(char)).unwrap_or(after.len())]
            }
        };
        if !name.is_empty() {
            found.push(name);
        }
        rest = after;
    }
    found
}

/// The encoding of a key or value. Each encoding corresponds to one of Kafka Connect's converters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Format {
    /// The column's text, or the bytes of a bytea, as with `StringConverter`.
    #[default]
    String,
    /// `JsonConverter` without schemas.
    Json,
    /// `JsonConverter` with schemas.
    JsonSchema,
    /// The same bytes as with [`Format::String`]. Corresponds to `ByteArrayConverter`.
    Bytes,
}

/// The encoding of headers whose values come from templates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HeaderFormat {
    /// The text of the columns.
    #[default]
    String,
    /// The output of `SimpleHeaderConverter` for the value that Debezium reads from the column.
    Simple,
    /// `JsonConverter` without schemas.
    Json,
    /// `JsonConverter` with schemas.
    JsonSchema,
}

/// How to expand payload members whose values are null or empty arrays, which do not determine a
/// type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Expansion {
    pub nulls: Untyped,
    pub empty_arrays: Untyped,
}

/// What to do with a member whose value does not determine a type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Untyped {
    /// Omits the member.
    #[default]
    Ignore,
    /// Keeps the JSON member, and gives it the type that Debezium would use.
    Keep,
}

/// Values of the `__debezium.context.*` headers, which identify Debezium's connector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DebeziumHeaders {
    /// `topic.prefix`.
    pub logical_name: String,
    /// A random identifier that is generated when the settings are loaded.
    pub run_id: String,
}

/// How a null payload is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum NullPayload {
    /// Depends on the format: `null` in JSON. In other formats, the record has no value, so that
    /// Kafka deletes the key from a compacted topic.
    #[default]
    #[serde(skip)]
    #[value(skip)]
    Formatted,
    /// An empty value.
    Empty,
    /// No value, so that Kafka deletes the record's key from a compacted topic.
    Tombstone,
}

/// How an empty or blank payload is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EmptyPayload {
    /// The payload is written unchanged, as an empty or blank value.
    #[default]
    Value,
    /// An empty or blank payload becomes a tombstone, unless its column is a bytea. With this
    /// setting, a null payload also becomes a tombstone, as it does with Debezium's
    /// `route.tombstone.on.empty.payload`.
    Tombstone,
}

/// The JSON column whose members become headers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum HeadersColumn {
    /// The column `headers`, if it exists and its type is json or jsonb.
    #[default]
    IfPresent,
    /// The column with this name.
    Named(String),
    /// Headers are not read from a column.
    Off,
}

fn template(text: &str) -> Template {
    text.parse().expect("a valid default template")
}

fn default_headers() -> Vec<(String, Template)> {
    vec![("id".to_owned(), template("{id}"))]
}

impl OutboxSettings {
    /// Returns a warning if the key is the name of a column without braces, which gives all records
    /// the same key.
    #[must_use]
    pub(crate) fn key_without_braces(&self, is_column: impl Fn(&str) -> bool) -> Option<String> {
        let key = self.key.constant().filter(|key| is_column(key))?;
        Some(format!(
            "key = {key:?} is the same text for all events, so they all go to one partition. To use the value of column {key}, \
             write it in braces: key = \"{{{key}}}\""
        ))
    }

    /// Returns whether the configured headers are equal to the default headers.
    #[must_use]
    pub fn has_default_headers(&self) -> bool {
        self.headers == default_headers()
    }

    /// Returns the first setting whose template inserts the name of a row's table or schema into
    /// records, formatted as `name = "value"`. The topic is checked first, then the key, then the
    /// headers.
    #[must_use]
    pub(crate) fn setting_with_table_name(&self) -> Option<String> {
        let topic = match &self.topic {
            Topic::Template(template) => Some(("topic".to_owned(), template)),
            Topic::Route(_) => None,
        };
        let headers = self.headers.iter();
        let headers = headers.map(|(name, template)| (format!("header {name:?}"), template));
        let mut settings = topic
            .into_iter()
            .chain([("key".to_owned(), &self.key)])
            .chain(headers);
        settings
            .find(|(_, template)| template.names_table())
            .map(|(setting, template)| format!("{setting} = \"{template}\""))
    }

    /// Returns whether the contents of records depend on properties of the columns other than their
    /// types.
    #[must_use]
    pub(crate) fn needs_column_facts(&self) -> bool {
        let is_text = |format| matches!(format, Format::String | Format::Bytes);
        self.null_default
            || self.header_format != HeaderFormat::String
            || !(is_text(self.key_format) && is_text(self.value_format))
            || self.expand_payload.is_some()
            || !self.envelope.is_empty()
    }

    /// Returns whether null payloads become tombstones because of the defaults, rather than because
    /// of an explicit setting.
    #[must_use]
    pub(crate) fn has_implicit_tombstones(&self) -> bool {
        let is_text = matches!(self.value_format, Format::String | Format::Bytes);
        self.null_payload == NullPayload::Formatted
            && self.empty_payload == EmptyPayload::Value
            && is_text
            && self.envelope.is_empty()
    }

    /// Decodes the value of a header whose text came from a template, and returns the text.
    #[must_use]
    pub(crate) fn header_text(&self, value: &[u8]) -> Option<String> {
        let json = match self.header_format {
            HeaderFormat::String | HeaderFormat::Simple => {
                return str::from_utf8(value).ok().map(str::to_owned);
            }
            HeaderFormat::Json => serde_json::from_slice(value).ok()?,
            HeaderFormat::JsonSchema => {
                let mut json: serde_json::Value = serde_json::from_slice(value).ok()?;
                json.get_mut("payload")?.take()
            }
        };
        match json {
            serde_json::Value::Null => None,
            serde_json::Value::String(text) => Some(text),
            json => Some(json.to_string()),
        }
    }

    /// Returns the name and template of the header that identifies events. This is the header `id`
    /// or, if there is no such header, the first header whose template is `{id}`.
    #[must_use]
    pub fn id_header(&self) -> Option<(&str, &Template)> {
        let is_id =
            |template: &Template| matches!(template.parts(), [Part::Column(name)] if name == "id");
        let mut headers = self.headers.iter();
        let named = headers.clone().find(|(name, _)| name == "id");
        let (name, template) = named.or_else(|| headers.find(|(_, template)| is_id(template)))?;
        Some((name, template))
    }
}

impl Default for OutboxSettings {
    fn default() -> Self {
        Self {
            topic: Topic::Template(template("outbox.event.{aggregatetype}")),
            key: template("{aggregateid}"),
            key_format: Format::default(),
            payload: "payload".to_owned(),
            value_format: Format::default(),
            expand_payload: None,
            envelope: Vec::new(),
            null_payload: NullPayload::default(),
            empty_payload: EmptyPayload::default(),
            null_default: false,
            headers: default_headers(),
            header_format: HeaderFormat::default(),
            debezium_headers: None,
            tracing_span_context: None,
            headers_column: HeadersColumn::default(),
            timestamp: None,
            partition: None,
            reserved_topics: ReservedTopics::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::reserved_topics::TopicUse;
    use super::*;

    fn with(headers: &[(&str, &str)]) -> OutboxSettings {
        let headers = headers.iter().map(|(name, template)| {
            let template = template.parse().expect("a template");
            ((*name).to_owned(), template)
        });
        OutboxSettings {
            headers: headers.collect(),
            ..OutboxSettings::default()
        }
    }

    #[test]
    fn finds_the_id_header_by_its_name_or_its_column() {
        let check = |headers: &[(&str, &str)], expected: Option<&str>| {
            let settings = with(headers);
            let found = settings.id_header().map(|(name, _)| name);
            assert_eq!(found, expected, "{headers:?}");
        };
        check(&[("id", "{id}")], Some("id"));
        check(&[("event", "{id}"), ("id", "{tenant}-{id}")], Some("id"));
        check(&[("type", "{type}"), ("event", "{id}")], Some("event"));
        check(&[("type", "{type}"), ("event", "x{id}")], None);
        check(&[], None);
    }

    #[test]
    fn ignores_reserved_names_that_a_topic_template_cannot_produce() {
        let all = ReservedTopics::new([
            ("b.checkpoints".to_owned(), TopicUse::Checkpoints),
            ("b.dead".to_owned(), TopicUse::DeadLetters),
        ]);
        let check = |topic: Topic, name: &str, expected| {
            let found = topic.reachable(&all).find(name);
            assert_eq!(found, expected, "{topic} and {name}");
        };
        let template = |text: &str| -> Topic { text.parse().expect("a template") };
        let checkpoints = Some(TopicUse::Checkpoints);
        check(template("{a}"), "walpost-checkpoints", checkpoints);
        check(template("{a}{b}"), "walpost-checkpoints", checkpoints);
        check(template("wal{a}"), "walpost-checkpoints", checkpoints);
        check(template("{a}points"), "walpost-checkpoints", checkpoints);
        check(template("b.{a}"), "b.checkpoints", checkpoints);
        check(template("{table.name}"), "walpost-checkpoints", checkpoints);
        check(template("b_{a}"), "b_checkpoints", checkpoints);
        check(template("b.{a}"), "b_checkpoints", checkpoints);
        check(template("{a}_checkpoints"), "b_checkpoints", checkpoints);
        check(template("b.{a}"), "walpost-checkpoints", None);
        check(template("{a}.v1"), "walpost-checkpoints", None);
        let internal = Some(TopicUse::KafkaInternal);
        for open in ["{a}", "_{a}", "__{a}", "__x{a}", ".{a}", "_.x{a}"] {
            check(template(open), "__x", internal);
        }
        check(template("outbox.event.{a}"), "__x", None);
        let route = Route::new("a", "(.*)", "x.$1").expect("a route");
        check(
            Topic::Route(route.clone()),
            "b.dead",
            Some(TopicUse::DeadLetters),
        );
        check(Topic::Route(route), "__x", internal);
    }

    #[test]
    fn ignores_reserved_patterns_that_a_topic_template_cannot_produce() {
        let pattern = |literals: [&str; 2]| {
            let literals = literals.map(str::to_owned);
            TopicPattern::new(&literals.join("{x}"), TopicUse::DeadLetters, &literals)
        };
        let all = ReservedTopics::default();
        let all = all.with_patterns([pattern(["b.", ".dead"]), pattern(["", ".cp"])]);
        let check = |topic: &str, name: &str, expected| {
            let topic: Topic = topic.parse().expect("a template");
            let found = topic.reachable(&all).find(name);
            assert_eq!(found.is_some(), expected, "{topic} and {name}");
        };
        for topic in [
            "{a}",
            "b{a}",
            "b.{a}",
            "b_x{a}",
            "{a}.dead",
            "{a}d",
            "{a}x.dead",
        ] {
            check(topic, "b.x.dead", true);
        }
        for topic in ["c.{a}", "{a}.event", "b.{a}.cp", "x"] {
            check(topic, "b.x.dead", false);
        }
        check("{a}{b}", "x.cp", true);
        check("b.{a}.cp", "b.x.cp", true);
    }
}
