//! Which columns mean what: the part of a pipeline's configuration that makes records.

use std::borrow::Cow;
use std::fmt;

use regex::Regex;

use super::reserved_topics::{ReservedTopics, collision_key};
use super::template::{Part, Template, TemplateError};

/// How records are made of rows. The defaults take a Debezium outbox table as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutboxSettings {
    /// The topic. A null column in it is an error.
    pub topic: Topic,
    /// The key. Where all its columns are null, the record has no key.
    pub key: Template,
    pub key_format: Format,
    /// The column with the value.
    pub payload: String,
    pub value_format: Format,
    /// A payload that is a JSON object becomes that object, and no string of it.
    pub expand_payload: Option<Expansion>,
    /// Columns that stand beside the payload in an object that is the value, with their names there.
    pub envelope: Vec<(String, String)>,
    /// What a null payload becomes.
    pub null_payload: NullPayload,
    /// A payload that is empty or blank becomes no value.
    pub empty_payload: EmptyPayload,
    /// Null in a column that has a DEFAULT is that.
    pub null_default: bool,
    /// Names and values of headers, in order. Where all columns of a value are null, the header
    /// has no value.
    pub headers: Vec<(String, Template)>,
    pub header_format: HeaderFormat,
    /// Debezium's headers about itself, before all others.
    pub debezium_headers: Option<DebeziumHeaders>,
    /// The column with the trace context as the text of Java properties.
    pub tracing_span_context: Option<String>,
    /// The column with more headers.
    pub headers_column: HeadersColumn,
    /// The column with the record's timestamp.
    pub timestamp: Option<String>,
    /// The column with the record's partition.
    pub partition: Option<String>,
    /// Topics that no record may be written to.
    pub reserved_topics: ReservedTopics,
}

/// Where a record goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Topic {
    Template(Template),
    Route(Route),
}

impl Topic {
    /// The one topic of all records, where there is one.
    #[must_use]
    pub fn constant(&self) -> Option<&str> {
        match self {
            Self::Template(template) => template.constant(),
            Self::Route(_) => None,
        }
    }

    /// The reserved topics that some row could have. A template that begins with a text of its own mostly leaves none, so
    /// that rows are compared with nothing.
    #[must_use]
    pub(crate) fn reachable(&self, reserved: &ReservedTopics) -> ReservedTopics {
        reserved.filter(
            |name| self.can_be(name),
            |prefix| self.can_begin_with(prefix),
        )
    }

    /// Whether some row could have a topic with this [`collision_key`], as far as the text at both ends tells.
    #[must_use]
    fn can_be(&self, name: &str) -> bool {
        let Self::Template(template) = self else {
            return true;
        };
        let begins = match template.parts().first() {
            Some(Part::Literal(text)) => name.starts_with(&collision_key(text)),
            _ => true,
        };
        let ends = match template.parts().last() {
            Some(Part::Literal(text)) => name.ends_with(&collision_key(text)),
            _ => true,
        };
        begins && ends
    }

    /// Whether some row could have a topic whose [`collision_key`] begins with `prefix`.
    #[must_use]
    fn can_begin_with(&self, prefix: &str) -> bool {
        let Self::Template(template) = self else {
            return true;
        };
        match template.parts().first() {
            Some(Part::Literal(text)) => {
                let text = collision_key(text);
                text.starts_with(prefix) || prefix.starts_with(&text)
            }
            _ => true,
        }
    }

    /// The columns that it is made of.
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

    /// A template.
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

/// A topic that follows from one column by a regular expression: the column's text where that does not match.
#[derive(Clone, Debug)]
pub struct Route {
    pub(crate) column: String,
    regex: String,
    pub(crate) replacement: String,
    /// Matches the whole text.
    whole: Regex,
    /// The part that is replaced: the first that matches.
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
    /// What is wrong with the regular expression or the replacement.
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
                    "replacement {replacement:?} names group {group:?}, which regex {regex:?} has not. Name a group of it; \
                     ${{1}} ends the name where letters follow, and $$ is the character itself"
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
    /// The topic for the column's text, be it the name of one or not.
    pub(crate) fn topic<'t>(&self, text: &'t str) -> Cow<'t, str> {
        let captures = match self.whole.is_match(text) {
            true => self.first.captures(text),
            false => None,
        };
        let Some(captures) = captures else {
            return Cow::Borrowed(text);
        };
        // As Java's replaceFirst: what is beside the first match stays.
        let place = captures.get(0).map_or(0..0, |found| found.range());
        let mut topic = text[..place.start].to_owned();
        captures.expand(&self.replacement, &mut topic);
        topic.push_str(&text[place.end..]);
        Cow::Owned(topic)
    }
}

/// The groups that a replacement names, as the crate `regex` reads them.
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

/// The bytes that a key or value has: those of Kafka Connect's converters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Format {
    /// The column's text, or the bytes of a bytea: `StringConverter`.
    #[default]
    String,
    /// `JsonConverter` without schemas.
    Json,
    /// `JsonConverter` with schemas.
    JsonSchema,
    /// The same bytes as `String`: `ByteArrayConverter`.
    Bytes,
}

/// The bytes that headers from templates have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HeaderFormat {
    /// The columns' text.
    #[default]
    String,
    /// `SimpleHeaderConverter`, with what Debezium makes of the column.
    Simple,
    /// `JsonConverter` without schemas.
    Json,
    /// `JsonConverter` with schemas.
    JsonSchema,
}

/// What becomes of members of a payload that say nothing of their type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Expansion {
    pub nulls: Untyped,
    pub empty_arrays: Untyped,
}

/// A member that says nothing of its type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Untyped {
    /// Is left out.
    #[default]
    Ignore,
    /// Has the type that Debezium gives it.
    Keep,
}

/// Debezium's headers about itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DebeziumHeaders {
    /// `topic.prefix`.
    pub logical_name: String,
    /// Another one for each run.
    pub run_id: String,
}

/// What a null payload becomes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum NullPayload {
    /// What the format makes of null: `null` in JSON; else no value, and a compacted topic then forgets the key.
    #[default]
    #[serde(skip)]
    #[value(skip)]
    Formatted,
    /// A value of no bytes.
    Empty,
    /// No value: a compacted topic then forgets the key.
    Tombstone,
}

/// What a payload of no or blank characters becomes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EmptyPayload {
    /// What it is.
    #[default]
    Value,
    /// No value, and a null one neither: `route.tombstone.on.empty.payload`.
    Tombstone,
}

/// The JSON column of which each member becomes a header.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum HeadersColumn {
    /// `headers`, if the table has such a column of type json or jsonb.
    #[default]
    IfPresent,
    /// The column of this name.
    Named(String),
    /// None.
    Off,
}

fn template(text: &str) -> Template {
    text.parse().expect("a default template is a template")
}

fn default_headers() -> Vec<(String, Template)> {
    vec![("id".to_owned(), template("{id}"))]
}

impl OutboxSettings {
    /// Nobody has said which headers there are to be.
    #[must_use]
    pub fn has_default_headers(&self) -> bool {
        self.headers == default_headers()
    }

    /// The setting, with its value, that puts the name of a row's table or schema into records; the topic first.
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

    /// What records are made of rows depends on more of the columns than their types.
    #[must_use]
    pub(crate) fn need_facts(&self) -> bool {
        let is_text = |format| matches!(format, Format::String | Format::Bytes);
        self.null_default
            || self.header_format != HeaderFormat::String
            || !(is_text(self.key_format) && is_text(self.value_format))
            || self.expand_payload.is_some()
            || !self.envelope.is_empty()
    }

    /// A null payload is a tombstone though nobody has said what it is to be.
    #[must_use]
    pub(crate) fn has_unasked_tombstones(&self) -> bool {
        let is_text = matches!(self.value_format, Format::String | Format::Bytes);
        self.null_payload == NullPayload::Formatted
            && self.empty_payload == EmptyPayload::Value
            && is_text
            && self.envelope.is_empty()
    }

    /// The text of a header from a template, read from what was written of it.
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

    /// The header that tells events apart, and its template: `id`, or else the first that is the column
    /// `id` and nothing more.
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
    fn header_with_the_id_is_found_by_its_name_or_by_its_column() {
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
    fn topics_are_compared_only_with_names_that_they_can_result_in() {
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
}
