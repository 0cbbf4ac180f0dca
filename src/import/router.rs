//! Translates the outbox event router's properties to settings that determine the contents of
//! records.

use super::chain::Chain;
use super::converters::{Format, Formats};
use super::document::{Section, list, table, text};
use super::java_regex::{self, Part};
use super::known::nearest;
use super::report::Report;
use super::source::{Source, Taken, reference, unescaped};
use crate::outbox::headers::is_reserved;
use crate::outbox::route::is_topic_name;
use crate::outbox::template::{self, Template};

/// The names of the outbox event router's properties.
const KEYS: &[&str] = &[
    "table.field.event.id",
    "table.field.event.key",
    "table.field.event.type",
    "table.field.event.payload",
    "table.field.event.timestamp",
    "table.field.event.schema.version",
    "table.fields.additional.placement",
    "table.field.additional.missing",
    "table.expand.json.payload",
    "table.json.payload.null.behavior",
    "table.json.payload.empty.array.behavior",
    "table.op.invalid.behavior",
    "route.by.field",
    "route.topic.regex",
    "route.topic.replacement",
    "route.tombstone.on.empty.payload",
    "tracing.span.context.field",
    "tracing.operation.name",
    "tracing.with.context.field.only",
];

/// Property names that users commonly write by mistake, and names from earlier versions, each with
/// the correct name.
const OBSOLETE: &[(&str, &str)] = &[
    ("debezium.expand.json.payload", "table.expand.json.payload"),
    ("expand.json.payload", "table.expand.json.payload"),
    ("table.expand.payload", "table.expand.json.payload"),
    ("debezium.op.invalid.behavior", "table.op.invalid.behavior"),
    ("route.by.id", "route.by.field"),
    ("route.by", "route.by.field"),
    ("route.topic.regexp", "route.topic.regex"),
    ("table.field.payload", "table.field.event.payload"),
    ("table.field.payload.id", "table.field.event.key"),
    ("table.field.event.aggregateid", "table.field.event.key"),
    (
        "table.field.schema.version",
        "table.field.event.schema.version",
    ),
    (
        "table.field.schema_version",
        "table.field.event.schema.version",
    ),
    (
        "table.fields.additional.error.on.missing",
        "table.field.additional.missing",
    ),
];

/// A reader for the outbox event router's properties.
struct Router<'s> {
    prefix: &'s str,
    source: &'s mut Source,
    report: &'s mut Report,
}

/// A property's value, or its default if the property is not set.
struct Given {
    /// The property that the value comes from, for use in comments and in the report.
    from: String,
    value: String,
    taken: Option<Taken>,
}

impl Router<'_> {
    fn take_property(&mut self, name: &str) -> Option<Taken> {
        self.source
            .take_property(&format!("{}{name}", self.prefix), self.report)
    }

    /// Returns the property, or `None` if it is not set or its value is empty.
    fn named(&mut self, name: &str) -> Option<Taken> {
        self.take_property(name)
            .filter(|taken| !taken.value.trim().is_empty())
    }

    fn given(&mut self, name: &str, default: &str) -> Given {
        let taken = self.named(name);
        match taken {
            Some(taken) => Given {
                from: taken.written.clone(),
                value: taken.value.trim().to_owned(),
                taken: Some(taken),
            },
            None => Given {
                from: format!("the default of {name}"),
                value: default.to_owned(),
                taken: None,
            },
        }
    }

    /// Like [`given`](Self::given), but for a property whose value is a regular expression, or
    /// refers to the groups of a regular expression.
    fn given_regex(&mut self, name: &str, default: &str) -> Given {
        let taken = self.source.raw(&format!("{}{name}", self.prefix));
        let kind = self.source.kind;
        let taken = taken
            .filter(|taken| !taken.value.is_empty())
            .map(|taken| Taken {
                value: unescaped(kind, &taken.value),
                ..taken
            });
        Given {
            from: taken.as_ref().map_or_else(
                || format!("the default of {name}"),
                |taken| taken.written.clone(),
            ),
            value: taken
                .as_ref()
                .map_or_else(|| default.to_owned(), |taken| taken.value.clone()),
            taken,
        }
    }

    fn carried(&mut self, given: &Given, message: &str) {
        if let Some(taken) = &given.taken {
            self.report.carried(&taken.written, message);
        }
    }

    /// Returns a template that consists solely of the column that `given` names. If the column's
    /// name can't be used in a template, reports the problem and returns `None`.
    fn column(&mut self, given: &Given) -> Option<String> {
        let template = column(&given.value);
        if template.is_none() {
            let message = "this property names a column whose name contains braces, which a template can't contain: rename the \
             column";
            self.report.unsupported(&given.from, message);
        }
        template
    }
}

/// Returns a template that consists solely of the named column.
fn column(name: &str) -> Option<String> {
    let text = format!("{{{name}}}");
    let template: Template = text.parse().ok()?;
    matches!(template.parts(), [template::Part::Column(column)] if column == name).then_some(text)
}

/// Writes the settings that determine the contents of records.
pub(super) fn read(
    chain: &Chain,
    source: &mut Source,
    formats: Formats,
    section: &mut Section,
    report: &mut Report,
) {
    let mut router = Router {
        prefix: &chain.prefix,
        source,
        report,
    };
    router.route(section);
    let key = router.given("table.field.event.key", "aggregateid");
    if let Some(template) = router.column(&key) {
        section.set("key", text(&template), key.from.clone());
        router.carried(&key, "key");
    }
    let payload = router.given("table.field.event.payload", "payload");
    section.set("payload", text(&payload.value), payload.from.clone());
    router.carried(&payload, "payload");
    let placed = router.place_columns(section, formats);
    router.expand(section, formats);
    router.nulls(section, formats);
    if let Some(timestamp) = router.named("table.field.event.timestamp") {
        section.set(
            "timestamp",
            text(timestamp.value.trim()),
            timestamp.written.clone(),
        );
        router.report.carried(&timestamp.written, "timestamp");
    }
    if let Some(tracing) = router.named("tracing.span.context.field") {
        section.set(
            "tracing_span_context",
            text(tracing.value.trim()),
            tracing.written.clone(),
        );
        router
            .report
            .carried(&tracing.written, "tracing_span_context");
    }
    router.convert_rest(placed.has_envelope, formats);
    router.unknown();
}

/// The result of [`Router::place_columns`].
struct Placed {
    has_envelope: bool,
}

impl Router<'_> {
    /// Writes the `topic` template if the topic consists of the value of the `route.by.field`
    /// column and constant text. Otherwise, writes a `route`.
    fn route(&mut self, section: &mut Section) {
        let by = self.given("route.by.field", "aggregatetype");
        let regex = self.given_regex("route.topic.regex", "(?<routedByValue>.*)");
        let replacement =
            self.given_regex("route.topic.replacement", "outbox.event.${routedByValue}");
        let from = format!("{}, {}, {}", by.from, regex.from, replacement.from);
        let pattern = match java_regex::pattern(&regex.value) {
            Ok(pattern) => pattern,
            Err(reason) => {
                let message = format!(
                    "this regex can't be converted: {reason}. Until the topic or route setting is specified, all events go to \
                     the default topic"
                );
                self.report.unsupported(&regex.from, message);
                return self.default_topic(&by, section);
            }
        };
        let parts = match java_regex::replacement(&replacement.value, &pattern) {
            Ok(parts) => parts,
            Err(reason) => {
                let is_reference = reference(self.source.kind, &replacement.value).is_some();
                let message = match is_reference {
                    true => {
                        "this property refers to a value that Walpost can't look up: specify the actual topic in the topic \
                         setting"
                            .to_owned()
                    }
                    false => format!("this replacement is not valid in Java either: {reason}. Specify the topic or route \
                     setting"),
                };
                self.report.unsupported(&replacement.from, message);
                return self.default_topic(&by, section);
            }
        };
        let template = matches_all(&regex.value)
            .then(|| topic_template(&parts, &by.value))
            .flatten();
        for given in [&by, &regex, &replacement] {
            self.carried(given, if template.is_some() { "topic" } else { "route" });
        }
        if let Some(template) = template {
            return section.set("topic", text(&template), from);
        }
        let entries = [
            ("column", text(&by.value)),
            ("regex", text(&pattern.text)),
            ("replacement", text(&java_regex::in_rust(&parts, &pattern))),
        ];
        section.set("route", table(entries), from);
    }

    fn default_topic(&mut self, by: &Given, section: &mut Section) {
        let parts = [Part::Literal("outbox.event.".to_owned()), Part::Group(0)];
        let topic = topic_template(&parts, &by.value).unwrap_or_else(|| "outbox.event".to_owned());
        section.set(
            "topic",
            text(&topic),
            "CHANGE THIS: the rule for topics could not be converted",
        );
    }

    /// Writes the settings for headers, the envelope and the partition.
    fn place_columns(&mut self, section: &mut Section, formats: Formats) -> Placed {
        let id = self.given("table.field.event.id", "id");
        let placement = self.take_property("table.fields.additional.placement");
        let mut from = id.from.clone();
        let mut headers = Vec::new();
        if let Some(template) = self.column(&id) {
            headers.push(("id".to_owned(), template));
        }
        self.carried(&id, "headers");
        let (mut envelope, mut partition) = (Vec::new(), None);
        for placed in placement.iter().flat_map(Taken::list) {
            let written = placement
                .as_ref()
                .map(|taken| taken.written.clone())
                .unwrap_or_default();
            let parts: Vec<_> = placed.split(':').map(str::trim).collect();
            let (column_name, place, alias) = match parts[..] {
                [column, place] => (column, place, column),
                [column, place, alias] => (column, place, alias),
                _ => {
                    let message = format!(
                        "the list contains {placed:?}; expected COLUMN:PLACEMENT or COLUMN:PLACEMENT:ALIAS"
                    );
                    self.report.unsupported(&written, message);
                    continue;
                }
            };
            match place.to_ascii_lowercase().as_str() {
                "header" => self.header(&written, column_name, alias, &mut headers),
                "envelope" => {
                    let is_taken = envelope.iter().any(|(_, name)| *name == alias);
                    let is_fit = !column_name.is_empty() && !alias.is_empty() && alias != "payload";
                    match is_fit && !is_taken {
                        true => envelope.push((column_name.to_owned(), alias.to_owned())),
                        false => {
                            let message = format!(
                                "the list contains {placed:?}, which Debezium also rejects"
                            );
                            self.report.unsupported(&written, message);
                        }
                    }
                }
                "partition" if !column_name.is_empty() => {
                    partition = Some((column_name.to_owned(), written))
                }
                _ => {
                    let message = format!(
                        "the list contains {placed:?}; expected COLUMN:PLACEMENT or COLUMN:PLACEMENT:ALIAS, where the placement \
                         is header, envelope or partition"
                    );
                    self.report.unsupported(&written, message);
                }
            }
        }
        if let Some(placement) = &placement {
            from = format!("{from}, {}", placement.written);
            self.report
                .carried(&placement.written, "headers, envelope, partition");
        }
        let has_more = headers.len() > 1;
        // Write a TOML table only if the headers are sorted by name, because the order of the
        // table's keys is not preserved.
        let value =
            match headers.is_sorted() && headers.windows(2).all(|pair| pair[0].0 != pair[1].0) {
                true => {
                    let entries = headers
                        .iter()
                        .map(|(name, template)| (name.as_str(), text(template)));
                    table(entries)
                }
                false => {
                    let pairs = headers
                        .iter()
                        .map(|(name, template)| list([name.as_str(), template]));
                    format!("[{}]", pairs.collect::<Vec<_>>().join(", "))
                }
            };
        section.set("headers", value, from);
        // If `id` is the only header, all formats except JSON produce the same value.
        if formats.header.is_json() || has_more && formats.header != Format::String {
            section.set(
                "header_format",
                text(formats.header.name()),
                "header.converter",
            );
        }
        section.set(
            "headers_column",
            text(""),
            "Debezium does not read headers from a column",
        );
        if !has_more {
            let message = "the event ID becomes a header. If the table has columns traceparent and tracestate, they become \
             headers too";
            self.report.different("table.field.event.id", message);
        }
        let placement = placement.map(|taken| taken.written).unwrap_or_default();
        let has_envelope = !envelope.is_empty() && formats.value != Format::Bytes;
        if has_envelope {
            let members = envelope.iter().map(|(column, name)| match column == name {
                true => column.clone(),
                false => format!("{column}:{name}"),
            });
            let members: Vec<_> = members.collect();
            section.set(
                "envelope",
                list(members.iter().map(String::as_str)),
                placement,
            );
        } else if !envelope.is_empty() {
            let message = "this property places columns in the envelope, but a bytes converter can't write an object, so no \
                 envelope is written";
            self.report.unsupported(&placement, message);
        }
        if let Some((column, from)) = partition {
            section.set("partition", text(&column), from);
        }
        Placed { has_envelope }
    }

    fn header(
        &mut self,
        written: &str,
        column_name: &str,
        alias: &str,
        headers: &mut Vec<(String, String)>,
    ) {
        let is_fit = !alias.is_empty() && !is_reserved(alias.as_bytes()) && !alias.contains('\0');
        let Some(template) = column(column_name) else {
            let message = format!(
                "the name of column {column_name:?} can't be used in a template: rename the column"
            );
            return self.report.unsupported(written, message);
        };
        if !is_fit {
            let message = format!("the header name {alias:?} is reserved or not valid");
            return self.report.unsupported(written, message);
        }
        headers.push((alias.to_owned(), template));
    }

    fn expand(&mut self, section: &mut Section, formats: Formats) {
        let expand = self.take_property("table.expand.json.payload");
        let is_expanded = expand.as_ref().is_some_and(|expand| expand.is("true"));
        let is_bytes = formats.value == Format::Bytes;
        for (name, key, kept) in [
            (
                "table.json.payload.null.behavior",
                "expand_null",
                "optional_bytes",
            ),
            (
                "table.json.payload.empty.array.behavior",
                "expand_empty_array",
                "optional_string",
            ),
        ] {
            let Some(taken) = self.take_property(name) else {
                continue;
            };
            if !is_expanded || is_bytes || taken.is("ignore") {
                self.report.without_effect(&taken.written);
            } else if taken.is(kept) {
                section.set(key, text(&kept.replace('_', "-")), taken.written.clone());
                self.report.carried(&taken.written, key);
            } else {
                let message = format!("Debezium rejects this value; expected ignore or {kept}");
                self.report.unsupported(&taken.written, message);
            }
        }
        let Some(expand) = expand else { return };
        if !is_expanded {
            return self.report.without_effect(&expand.written);
        }
        if is_bytes {
            let message = "this setting turns the payload into an object, but a bytes converter can't write an object, so the \
             payload is delivered unchanged";
            return self.report.unsupported(&expand.written, message);
        }
        section.set("expand_payload", "true".to_owned(), expand.written.clone());
        self.report.carried(&expand.written, "expand_payload");
        let message = match formats.value.is_json() {
            true => {
                "Walpost delivers top-level arrays and integers of more than 64 bits, which make Debezium's task fail. Doubles \
                 are written with the fewest digits that identify them, as in Java 19 and later; in arrays whose objects have \
                 different members, the order of members can differ"
            }
            false => {
                "StringConverter writes an expanded payload as Java formats it (Struct{...}), which consumers can't parse as \
                 JSON. With value.converter = JsonConverter, the payload is JSON"
            }
        };
        self.report.different(&expand.written, message);
    }

    fn nulls(&mut self, section: &mut Section, formats: Formats) {
        const NAME: &str = "route.tombstone.on.empty.payload";
        let given = self.take_property(NAME);
        let creates_tombstones = given.as_ref().is_some_and(|given| given.is("true"));
        if let (Some(given), true) = (&given, creates_tombstones) {
            section.set("null_payload", text("tombstone"), given.written.clone());
            section.set("empty_payload", text("tombstone"), given.written.clone());
            self.report
                .carried(&given.written, "null_payload, empty_payload");
        } else {
            if let Some(given) = &given {
                self.report.without_effect(&given.written);
            }
            // With JsonConverter, Debezium writes a NULL payload as `null`. Walpost's JSON formats
            // do the same by default.
            if !formats.value.is_json() {
                let from = format!(
                    "even if {NAME} is false, Debezium sends a tombstone for a NULL payload with this converter"
                );
                section.set("null_payload", text("tombstone"), from);
            }
        }
        if formats.null_default {
            let from = "If a column has a DEFAULT, Debezium delivers that value instead of NULL. To deliver NULL, set \
                 null_default to false";
            section.set("null_default", "true".to_owned(), from);
        }
    }

    fn convert_rest(&mut self, has_envelope: bool, formats: Formats) {
        for name in [
            "table.field.event.type",
            "tracing.operation.name",
            "tracing.with.context.field.only",
        ] {
            if let Some(taken) = self.take_property(name) {
                self.report.without_effect(&taken.written);
            }
        }
        if let Some(taken) = self.take_property("table.field.event.schema.version") {
            // Debezium writes the event's schema version only into the schema of an envelope.
            match has_envelope && formats.value == Format::JsonSchema {
                true => {
                    let message = "this property makes the column the schema version of each value. The schema that Walpost \
                         writes has no version: place the column in a header or in the envelope";
                    self.report.unsupported(&taken.written, message);
                }
                false => self.report.without_effect(&taken.written),
            }
        }
        if let Some(taken) = self.take_property("table.field.additional.missing") {
            match taken.is("ignore") {
                true => {
                    let message = "this setting makes Debezium ignore columns that the table does not have. Walpost does not \
                     start if a configured column is missing: remove such columns from headers, envelope and partition; walpost \
                     check lists them";
                    self.report.different(&taken.written, message);
                }
                false => self.report.without_effect(&taken.written),
            }
        }
        if let Some(taken) = self.take_property("table.op.invalid.behavior") {
            match taken.is("fatal") {
                true => {
                    let message = "this setting stops Debezium at an UPDATE. Walpost reads only inserts: reject UPDATE with the \
                     trigger in sql/no_update.sql";
                    self.report.different(&taken.written, message);
                }
                false => self.report.without_effect(&taken.written),
            }
        }
    }

    fn unknown(&mut self) {
        while let Some(name) = self.source.next_with_prefix(self.prefix) {
            let Some(taken) = self.source.raw(&format!("{}{name}", self.prefix)) else {
                break;
            };
            let obsolete = OBSOLETE.iter().find(|(obsolete, _)| *obsolete == name);
            let meant = obsolete
                .map(|(_, meant)| *meant)
                .or_else(|| nearest(&name, KEYS.iter().copied()));
            let message = match meant {
                Some(meant) => format!(
                    "this is not a property of the outbox event router; did you mean {}{meant}? Debezium ignores it, and so does \
                     Walpost",
                    self.prefix
                ),
                None => "this is not a property of the outbox event router: Debezium ignores it, and so does Walpost".to_owned(),
            };
            self.report.unknown(&taken.written, message);
        }
    }
}

/// Returns `true` if the regular expression matches every valid topic name and captures the whole
/// name in a single group.
fn matches_all(java: &str) -> bool {
    let inner = java.strip_prefix('^').unwrap_or(java);
    let inner = inner.strip_suffix('$').unwrap_or(inner);
    let group = inner
        .strip_prefix('(')
        .and_then(|inner| inner.strip_suffix(')'));
    let Some(group) = group else {
        return inner == ".*";
    };
    let named = group
        .strip_prefix("?<")
        .and_then(|group| group.split_once('>'));
    named.map_or(group, |(_, rest)| rest) == ".*"
}

/// Returns a topic template in which each capture group is replaced by the column `by`, the value
/// of `route.by.field`.
fn topic_template(parts: &[Part], by: &str) -> Option<String> {
    let column = column(by)?;
    let parts = parts.iter().map(|part| match part {
        Part::Literal(text) => text.replace('{', "{{").replace('}', "}}"),
        Part::Group(_) => column.clone(),
    });
    let text: String = parts.collect();
    // Walpost rejects a configuration file if the template can never produce a valid topic name.
    let template: Template = text.parse().ok()?;
    let is_accepted = template.constant().is_none_or(is_topic_name);
    (is_accepted && template.invalid_topic_char().is_none()).then_some(text)
}
