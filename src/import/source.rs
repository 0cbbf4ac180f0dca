//! Reads the file to import, in any supported format, and provides its properties under the names
//! that Kafka Connect uses.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::report::Report;
use crate::outbox::properties;

/// The reason a file can't be imported.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ImportError {
    #[error(
        "the file is empty; expected the JSON of a Kafka Connect connector, or Debezium Server's application.properties"
    )]
    Empty,
    #[error(
        "the file is neither the JSON of a Kafka Connect connector nor Debezium Server's application.properties: no property is \
         called connector.class or debezium.source.connector.class"
    )]
    Neither,
    #[error(
        "the file is not valid JSON: {0}. Expected a connector's configuration, as returned by Kafka Connect for GET \
         /connectors/NAME/config"
    )]
    Json(String),
    #[error("line {0}: \\u is not followed by four hexadecimal digits, which Java also rejects")]
    Escape(usize),
    #[error(
        "property {0} is an array or an object; Kafka Connect accepts only strings, numbers and Booleans"
    )]
    Nested(String),
    #[error(
        "the file contains a list of connectors ({found} found), but only a single connector can be imported. Extract the first with: \
         jq '{path}' FILE > connector.json"
    )]
    Bundle { found: usize, path: String },
    #[error(
        "the file is YAML, like a Strimzi KafkaConnector; expected JSON. Get the JSON with kubectl get kafkaconnector NAME -o \
         json, or from Kafka Connect: curl http://localhost:8083/connectors/NAME"
    )]
    Yaml,
    #[error(
        "the worker's file is YAML, like a Strimzi KafkaConnect; expected a properties file with NAME=VALUE lines"
    )]
    YamlWorker,
    #[error(
        "the connector is {0}, but Walpost reads PostgreSQL: expected io.debezium.connector.postgresql.PostgresConnector"
    )]
    OtherConnector(String),
    #[error(
        "Debezium Server delivers to {0}, but Walpost delivers to Apache Kafka: expected debezium.sink.type = kafka"
    )]
    OtherSink(String),
    #[error(
        "none of the transforms is io.debezium.transforms.outbox.EventRouter. Walpost delivers the inserts of an outbox \
         table as events and is not a general tool for change data capture: keep Debezium for changes to other tables"
    )]
    NoRouter,
}

/// The program that runs the connector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Connect,
    Server,
}

#[derive(Debug)]
struct Property {
    written: String,
    value: String,
    is_taken: bool,
}

/// A property that was taken from the source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Taken {
    /// The name as written in the file.
    pub(super) written: String,
    pub(super) value: String,
}

impl Taken {
    pub(super) fn is(&self, value: &str) -> bool {
        self.value.trim().eq_ignore_ascii_case(value)
    }

    /// Returns the members of a comma-separated list.
    pub(super) fn list(&self) -> Vec<String> {
        let members = self.value.split(',').map(str::trim);
        let members = members.filter(|member| !member.is_empty());
        members.map(str::to_owned).collect()
    }
}

/// The properties of the imported file. Records which of them have been requested, so that the
/// others can be reported at the end of the import.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) kind: Kind,
    /// The connector's name.
    pub(super) name: Option<String>,
    properties: BTreeMap<String, Property>,
}

impl Source {
    /// Reads the properties from the contents of a JSON or properties file.
    ///
    /// # Errors
    /// Returns an error if the text is in neither format.
    pub(super) fn read(text: &str, report: &mut Report) -> Result<Self, ImportError> {
        let text = text.strip_prefix('\u{feff}').unwrap_or(text).trim_start();
        if text.is_empty() {
            return Err(ImportError::Empty);
        }
        if text.starts_with(['{', '[']) {
            let json = serde_json::from_str(text).map_err(|error| {
                // Don't include the message from serde_json, which may quote a value.
                let (line, column) = (error.line(), error.column());
                ImportError::Json(format!("line {line}, column {column}"))
            })?;
            return from_json(json);
        }
        from_properties(text, report)
    }

    /// Adds the properties of the worker that apply to the connector, except those that the
    /// connector sets itself.
    ///
    /// # Errors
    /// Returns an error if the text is not a properties file.
    pub(super) fn add_worker(&mut self, text: &str) -> Result<(), ImportError> {
        if is_yaml(text) {
            return Err(ImportError::YamlWorker);
        }
        for (written, value) in parse(text)? {
            let name = match written.as_str() {
                "bootstrap.servers" => "producer.bootstrap.servers",
                name if name.starts_with("producer.")
                    || ["key.converter", "value.converter", "header.converter"]
                        .iter()
                        .any(|converter| belongs_to(name, converter)) =>
                {
                    name
                }
                _ => continue,
            };
            // If the connector specifies a converter, the worker's options for that converter do
            // not apply.
            let converter = name
                .split(".converter")
                .next()
                .filter(|_| name.contains(".converter."));
            let is_overridden = converter.is_some_and(|role| {
                let class = self.properties.get(&format!("{role}.converter"));
                class.is_some_and(|class| !class.written.starts_with(WORKER))
            });
            if is_overridden || self.properties.contains_key(name) {
                continue;
            }
            let written = format!("{WORKER}{written}");
            self.insert(name.to_owned(), written, value);
        }
        Ok(())
    }

    fn insert(&mut self, name: String, written: String, value: String) {
        let property = Property {
            written,
            value,
            is_taken: false,
        };
        self.properties.insert(name, property);
    }

    /// Returns the property, and records that it was requested. The value is returned unchanged,
    /// even if it refers to a value that is stored elsewhere.
    pub(super) fn raw(&mut self, name: &str) -> Option<Taken> {
        let property = self.properties.get_mut(name)?;
        property.is_taken = true;
        Some(Taken {
            written: property.written.clone(),
            value: property.value.clone(),
        })
    }

    /// Returns the property, and records that it was requested. If the value refers to a value that
    /// is stored elsewhere, returns `None` instead, and reports that the user has to specify the
    /// value.
    pub(super) fn take_property(&mut self, name: &str, report: &mut Report) -> Option<Taken> {
        let kind = self.kind;
        let mut taken = self.raw(name)?;
        if let Some(reference) = reference(kind, &taken.value) {
            let message = format!(
                "{reference}, which Walpost can't look up: specify the value itself in walpost.toml"
            );
            report.unsupported(&taken.written, message);
            return None;
        }
        taken.value = unescaped(kind, &taken.value);
        Some(taken)
    }

    /// Finds the first property that has this prefix and has not been requested. Returns its name
    /// without the prefix.
    pub(super) fn next_with_prefix(&self, prefix: &str) -> Option<String> {
        let mut found = self.properties.range(prefix.to_owned()..);
        let name = found
            .by_ref()
            .take_while(|(name, _)| name.starts_with(prefix))
            .find(|(_, property)| !property.is_taken)?;
        Some(name.0[prefix.len()..].to_owned())
    }

    /// Returns the properties that have not been requested.
    pub(super) fn unrequested(&self) -> impl Iterator<Item = (&str, Taken)> {
        let remaining = self
            .properties
            .iter()
            .filter(|(_, property)| !property.is_taken);
        remaining.map(|(name, property)| {
            let taken = Taken {
                written: property.written.clone(),
                value: property.value.clone(),
            };
            (name.as_str(), taken)
        })
    }

    /// Returns the value of the property without recording that the property was requested.
    pub(super) fn value(&self, name: &str) -> Option<&str> {
        let property = self.properties.get(name)?;
        Some(&property.value)
    }

    #[must_use]
    pub(super) fn contains(&self, name: &str) -> bool {
        self.properties.contains_key(name)
    }
}

/// Prefix that distinguishes the worker's properties from the connector's in messages.
const WORKER: &str = "the worker's ";

fn belongs_to(name: &str, converter: &str) -> bool {
    let rest = name.strip_prefix(converter);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

fn parse(text: &str) -> Result<Vec<(String, String)>, ImportError> {
    properties::parse(text).map_err(|error| ImportError::Escape(error.line))
}

/// If the value contains a reference to a Kafka Connect config provider, or to a Quarkus property
/// or environment variable, returns a description of the reference. The description quotes no part
/// of the value except the name of a property or variable: a default may be a secret, and text that
/// looks like the key of another provider may be part of a password.
pub(super) fn reference(kind: Kind, value: &str) -> Option<String> {
    let mut rest = value;
    let mut before = None;
    while let Some(at) = rest.find("${") {
        let escaped = rest[..at].chars().next_back().or(before);
        let (inner, after) = rest[at + 2..].split_once('}')?;
        let refers = match kind {
            // `${provider:key}`, `${provider:path:key}`.
            Kind::Connect => inner.contains(':'),
            Kind::Server => !matches!(escaped, Some('$' | '\\')),
        };
        if refers {
            let name = inner.split(':').next().unwrap_or_default();
            let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
            return Some(match (kind, name) {
                (Kind::Server, name) if name.chars().all(is_plain) => {
                    format!("the value refers to the Quarkus property {name}")
                }
                (Kind::Server, _) => "the value contains a Quarkus property expression".to_owned(),
                (_, "env") => {
                    let variable = inner.split_once(':').map_or("", |(_, variable)| variable);
                    match variable.chars().all(is_plain) {
                        true => format!(
                            "the value refers to an environment variable of the Connect worker, ${{env:{variable}}}"
                        ),
                        false => {
                            "the value refers to an environment variable of the Connect worker"
                                .to_owned()
                        }
                    }
                }
                (_, "file" | "dir" | "directory") => {
                    "the value refers to a file on the Connect worker".to_owned()
                }
                _ => {
                    "the value refers to a secret from one of the Connect worker's config providers"
                        .to_owned()
                }
            });
        }
        before = Some('}');
        rest = after;
    }
    None
}

/// Replaces the Quarkus escape sequences `$${` and `\${` with `${`.
pub(super) fn unescaped(kind: Kind, value: &str) -> String {
    match kind {
        Kind::Connect => value.to_owned(),
        Kind::Server => value.replace("$${", "${").replace("\\${", "${"),
    }
}

fn from_json(json: Value) -> Result<Source, ImportError> {
    let map = match json {
        Value::Object(map) => map,
        Value::Array(items) => {
            let (found, path) = (items.len(), ".[0]".to_owned());
            return Err(ImportError::Bundle { found, path });
        }
        _ => return Err(ImportError::Neither),
    };
    let text = |map: &Map<String, Value>, key: &str| {
        map.get(key).and_then(Value::as_str).map(str::to_owned)
    };
    if let Some(Value::Object(config)) = map.get("config") {
        return from_config(config, text(&map, "name"));
    }
    match map.get("connectors") {
        Some(Value::Array(items)) => {
            let (found, path) = (items.len(), ".connectors[0]".to_owned());
            return Err(ImportError::Bundle { found, path });
        }
        Some(Value::Object(items)) => {
            let path = ".connectors | to_entries[0].value".to_owned();
            let found = items.len();
            return Err(ImportError::Bundle { found, path });
        }
        _ => {}
    }
    // Strimzi's KafkaConnector resource in JSON.
    if let Some(Value::Object(spec)) = map.get("spec")
        && let Some(Value::Object(config)) = spec.get("config")
    {
        let mut config = config.clone();
        if let Some(class) = spec.get("class") {
            config.insert("connector.class".to_owned(), class.clone());
        }
        let name = map
            .get("metadata")
            .and_then(|metadata| metadata.get("name"))
            .and_then(Value::as_str);
        return from_config(&config, name.map(str::to_owned));
    }
    // The response to GET /connectors?expand=info.
    let is_expanded = |value: &Value| value.get("info").is_some_and(Value::is_object);
    if !map.is_empty() && map.values().all(is_expanded) {
        let (found, path) = (map.len(), "to_entries[0].value.info".to_owned());
        return Err(ImportError::Bundle { found, path });
    }
    from_config(&map, None)
}

fn from_config(config: &Map<String, Value>, name: Option<String>) -> Result<Source, ImportError> {
    let mut source = Source {
        kind: Kind::Connect,
        name,
        properties: BTreeMap::new(),
    };
    for (written, value) in config {
        let value = match value {
            Value::String(text) => text.clone(),
            Value::Number(number) => number.to_string(),
            Value::Bool(truth) => truth.to_string(),
            Value::Null => continue,
            Value::Array(_) | Value::Object(_) => return Err(ImportError::Nested(written.clone())),
        };
        source.insert(connect_name(written), written.clone(), value);
    }
    if !source.contains("connector.class") {
        return Err(ImportError::Neither);
    }
    let own = source.raw("name").map(|name| name.value);
    source.name = source.name.or(own);
    Ok(source)
}

/// Returns the name of a connector's property, with the prefix `producer.override.` replaced by
/// `producer.`, which Debezium Server and workers use for the same properties.
fn connect_name(written: &str) -> String {
    match written.strip_prefix("producer.override.") {
        Some(name) => format!("producer.{name}"),
        None => written.to_owned(),
    }
}

/// Returns whether the text is Strimzi's KafkaConnector or KafkaConnect resource in YAML, or part
/// of one. Without this check, YAML could be parsed as a properties file, because in that format, a
/// colon may follow a property's name. Quotes would then become part of the values.
fn is_yaml(text: &str) -> bool {
    const KEYS: [&str; 6] = ["apiVersion", "kind", "metadata", "spec", "config", "class"];
    text.lines().map(str::trim).any(|line| {
        let Some((name, value)) = line.split_once(':') else {
            return line == "---";
        };
        let value = value.trim_start();
        let is_quoted = value.starts_with(['"', '\'']);
        !name.contains(['=', ' ', '#', '!']) && (is_quoted || KEYS.contains(&name))
    })
}

fn from_properties(text: &str, report: &mut Report) -> Result<Source, ImportError> {
    if is_yaml(text) {
        return Err(ImportError::Yaml);
    }
    let mut source = Source {
        kind: Kind::Connect,
        name: None,
        properties: BTreeMap::new(),
    };
    let all = parse(text)?;
    let is_server = all
        .iter()
        .any(|(name, _)| without_profile(name).1.starts_with("debezium."));
    if !is_server {
        for (written, value) in all {
            source.insert(connect_name(&written), written, value);
        }
        if !source.contains("connector.class") {
            return Err(ImportError::Neither);
        }
        source.name = source.raw("name").map(|name| name.value);
        return Ok(source);
    }
    source.kind = Kind::Server;
    // Properties with a profile take precedence over properties without a profile, regardless of
    // their order.
    let (profiles, plain): (Vec<_>, Vec<_>) =
        all.into_iter().partition(|(name, _)| name.starts_with('%'));
    for (written, value) in plain.into_iter().chain(profiles) {
        let (profile, name) = without_profile(&written);
        if profile.is_some_and(|profile| profile.split(',').all(|one| one.trim() != "prod")) {
            let message = "this property is not imported, because it applies only if its Quarkus profile is selected, for \
             example with QUARKUS_PROFILE. Only properties without a profile, or for the default profile prod, are imported";
            report.different(&written, message);
            continue;
        }
        for name in server_names(name) {
            source.insert(name, written.clone(), value.clone());
        }
    }
    if !source.contains("connector.class") {
        return Err(ImportError::Neither);
    }
    let sink = source.raw("debezium.sink.type");
    match sink {
        Some(sink) if !sink.is("kafka") => return Err(ImportError::OtherSink(sink.value)),
        _ => {}
    }
    source.name = source.raw("name").map(|name| name.value);
    Ok(source)
}

/// Splits `%prod.name` or `%{dev,prod}.name` into the profile and the name.
fn without_profile(written: &str) -> (Option<&str>, &str) {
    let Some(rest) = written.strip_prefix('%') else {
        return (None, written);
    };
    match rest.split_once('.') {
        Some((profile, name)) => (Some(profile.trim_matches(['{', '}'])), name),
        None => (Some(rest), ""),
    }
}

/// Returns the names that a property of Debezium Server has in the connector, the converters or the
/// producer to which it applies.
fn server_names(name: &str) -> Vec<String> {
    let converters = ["key", "value", "header"];
    if let Some(rest) = name.strip_prefix("debezium.format.") {
        for role in converters {
            match rest.strip_prefix(role) {
                Some("") => return vec![format!("debezium.format.{role}")],
                Some(setting) if setting.starts_with('.') => {
                    return vec![format!("{role}.converter{setting}")];
                }
                _ => {}
            }
        }
        // A setting without `key`, `value` or `header` in its name applies to all converters that
        // don't have their own setting.
        return vec![format!("converter.{rest}")];
    }
    for (prefix, to) in [
        ("debezium.source.", ""),
        ("debezium.transforms", "transforms"),
        ("debezium.predicates", "predicates"),
        ("debezium.sink.kafka.producer.", "producer."),
    ] {
        if let Some(rest) = name.strip_prefix(prefix) {
            return vec![format!("{to}{rest}")];
        }
    }
    vec![name.to_owned()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Source, ImportError> {
        Source::read(text, &mut Report::default())
    }

    fn value(text: &str, name: &str) -> Option<String> {
        read(text).expect(text).raw(name).map(|taken| taken.value)
    }

    #[test]
    fn reads_connector_properties_in_every_supported_format() {
        for text in [
            r#"{"name": "shop", "config": {"connector.class": "C", "slot.name": "s", "tasks.max": 1}}"#,
            r#"{"connector.class": "C", "slot.name": "s", "name": "shop"}"#,
            r#"{"metadata": {"name": "shop"}, "spec": {"class": "C", "config": {"slot.name": "s"}}}"#,
            "name=shop\nconnector.class=C\nslot.name=s\n",
            "name: shop\nconnector.class: C\nslot.name: s\n",
            "debezium.source.connector.class=C\ndebezium.source.name=shop\ndebezium.source.slot.name=s",
            "\u{feff}debezium.source.connector.class: C\ndebezium.source.name shop\n%prod.debezium.source.slot.name=s\n\
             debezium.source.slot.name=other\n%dev.debezium.source.slot.name=dev",
        ] {
            assert_eq!(value(text, "slot.name").as_deref(), Some("s"), "{text}");
            assert_eq!(
                read(text).expect(text).name.as_deref(),
                Some("shop"),
                "{text}"
            );
        }
    }

    #[test]
    fn error_explains_why_text_cannot_be_imported() {
        for (text, expected) in [
            ("", "empty"),
            (" \n", "empty"),
            ("{", "valid JSON: line 1"),
            ("{\"a\": 1}", "neither"),
            ("a=b", "neither"),
            ("[{}, {}]", "a list of connectors (2 found)"),
            (r#"{"connectors": [{}]}"#, "jq '.connectors[0]'"),
            (
                r#"{"connectors": {"a": {}}}"#,
                "a list of connectors (1 found)",
            ),
            (
                r#"{"a": {"info": {}}, "b": {"info": {}}}"#,
                "jq 'to_entries[0].value.info'",
            ),
            (
                r#"{"connector.class": "C", "transforms": []}"#,
                "property transforms is an array",
            ),
            (
                "apiVersion: kafka.strimzi.io/v1\nkind: KafkaConnector",
                "YAML",
            ),
            ("a=\\u1", "line 1"),
            (
                "debezium.source.connector.class=C\ndebezium.sink.type=kinesis",
                "delivers to kinesis",
            ),
        ] {
            let error = read(text).expect_err(text).to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn error_does_not_quote_invalid_json() {
        let error = read(r#"{"database.password": hunter2}"#).expect_err("no JSON");
        assert!(!error.to_string().contains("hunter2"), "{error}");
    }

    #[test]
    fn distinguishes_config_provider_references_from_literal_values() {
        let connect = |value: &str| reference(Kind::Connect, value);
        for value in [
            "${file:/run/secrets:password}",
            "x${env:HOST}",
            "${secretsManager:a:b}",
        ] {
            assert!(connect(value).is_some(), "{value}");
        }
        for value in ["outbox.event.${routedByValue}", "a$b", "${", "x"] {
            assert_eq!(connect(value), None, "{value}");
        }
        let server = |value: &str| reference(Kind::Server, value);
        for value in ["${HOST}", "${HOST:localhost}", "$${a}${b}"] {
            assert!(server(value).is_some(), "{value}");
        }
        for value in ["$${routedByValue}", "\\${routedByValue}", "a"] {
            assert_eq!(server(value), None, "{value}");
        }
        assert_eq!(unescaped(Kind::Server, "a.$${b}"), "a.${b}");
    }

    #[test]
    fn descriptions_of_variable_references_omit_default_values() {
        for value in [
            "${DB_PASSWORD:hunter2}",
            "x ${KAFKA_PW:${OTHER:hunter2}}",
            "${a:hunter2}",
            "hunter2${a:b}",
            "pass${hunter2:x}",
            "${env:PW:-hunter2}",
            "${file:/run/secrets:hunter2}",
            "${pass hunter2}",
        ] {
            for kind in [Kind::Connect, Kind::Server] {
                let found = reference(kind, value).unwrap_or_default();
                let is_name = kind == Kind::Server && value.contains("${hunter2");
                assert!(!found.contains("hunter2") || is_name, "{value}: {found}");
            }
        }
        let found = reference(Kind::Server, "${DB_PASSWORD:hunter2}");
        assert!(found.is_some_and(|found| found.ends_with("property DB_PASSWORD")));
    }

    #[test]
    fn renames_debezium_server_properties_to_connect_names() {
        let text = "debezium.source.connector.class=C\ndebezium.transforms=o\ndebezium.transforms.o.type=T\n\
                    debezium.format.key=json\ndebezium.format.key.schemas.enable=false\ndebezium.format.decimal.format=NUMERIC\n\
                    debezium.sink.kafka.producer.bootstrap.servers=b:1\nquarkus.log.level=INFO";
        for (name, expected) in [
            ("connector.class", "C"),
            ("transforms", "o"),
            ("transforms.o.type", "T"),
            ("debezium.format.key", "json"),
            ("key.converter.schemas.enable", "false"),
            ("converter.decimal.format", "NUMERIC"),
            ("producer.bootstrap.servers", "b:1"),
            ("quarkus.log.level", "INFO"),
        ] {
            assert_eq!(value(text, name).as_deref(), Some(expected), "{name}");
        }
    }

    #[test]
    fn worker_file_supplies_properties_missing_from_the_connector() {
        let mut source = read(r#"{"connector.class": "C", "key.converter": "K"}"#).expect("JSON");
        let worker = "bootstrap.servers=b:1\nkey.converter=W\nkey.converter.schemas.enable=false\nvalue.converter=V\n\
                      value.converter.schemas.enable=false\nproducer.linger.ms=5\ngroup.id=g";
        source.add_worker(worker).expect("properties");
        let mut value = |name: &str| source.raw(name).map(|taken| taken.value);
        assert_eq!(value("key.converter").as_deref(), Some("K"));
        assert_eq!(value("key.converter.schemas.enable"), None);
        assert_eq!(value("value.converter").as_deref(), Some("V"));
        assert_eq!(
            value("value.converter.schemas.enable").as_deref(),
            Some("false")
        );
        assert_eq!(value("producer.bootstrap.servers").as_deref(), Some("b:1"));
        assert_eq!(value("producer.linger.ms").as_deref(), Some("5"));
        assert_eq!(value("group.id"), None);
    }
}
