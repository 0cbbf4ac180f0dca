//! Builds the settings that determine the topics, keys, values and headers of records.

use super::error::ConfigError;
use super::file::{FileEmptyArray, FileHeaders, FileNull, FilePipeline};
use super::reader::Reader;
use crate::outbox::headers::is_reserved;
use crate::outbox::reserved_topics::ReservedTopics;
use crate::outbox::route::is_topic_name;
use crate::outbox::settings::{
    DebeziumHeaders, Expansion, Format, HeadersColumn, OutboxSettings, Route, Topic, Untyped,
};
use crate::outbox::template::{Part, Template};

pub(super) fn outbox(reader: &Reader, file: &FilePipeline) -> Result<OutboxSettings, ConfigError> {
    let default = OutboxSettings::default();
    let headers = match &file.headers {
        None => default.headers,
        Some(FileHeaders(given)) => given
            .iter()
            .map(|(name, template)| {
                if name.is_empty() || name.contains('\0') || is_reserved(name.as_bytes()) {
                    let reason = format!(
                        "found the header name {name:?}, expected a name that is not empty, contains no NUL and is not \
                         reserved for Walpost"
                    );
                    return Err(reader.error("headers", reason));
                }
                let template = template
                    .parse()
                    .map_err(|error| reader.error("headers", error))?;
                Ok((name.clone(), template))
            })
            .collect::<Result<_, _>>()?,
    };
    let value_format = file.value_format.unwrap_or_default();
    let expand_payload = expansion(reader, file)?;
    let envelope = envelope(reader, file)?;
    if value_format == Format::Bytes && (expand_payload.is_some() || !envelope.is_empty()) {
        let reason = "with \"bytes\", the column's bytes are written unchanged, but expand_payload and envelope require an \
                      object. Set value_format to \"json\" or \"json-schema\", or remove expand_payload and envelope";
        return Err(reader.error("value_format", reason));
    }
    Ok(OutboxSettings {
        topic: topic(reader, file)?.unwrap_or(default.topic),
        key: reader
            .read("key", file.key.as_ref())?
            .unwrap_or(default.key),
        key_format: file.key_format.unwrap_or_default(),
        payload: file.payload.clone().unwrap_or(default.payload),
        value_format,
        expand_payload,
        envelope,
        null_payload: file.null_payload.unwrap_or_default(),
        empty_payload: file.empty_payload.unwrap_or_default(),
        null_default: file.null_default.unwrap_or_default(),
        headers,
        header_format: file.header_format.unwrap_or_default(),
        debezium_headers: file.debezium_headers.clone().map(|logical_name| {
            let run_id = uuid::Builder::from_random_bytes(fastrand::u128(..).to_be_bytes());
            DebeziumHeaders {
                logical_name,
                run_id: run_id.into_uuid().to_string(),
            }
        }),
        tracing_span_context: file.tracing_span_context.clone(),
        headers_column: match file.headers_column.as_deref() {
            None => HeadersColumn::IfPresent,
            Some("") => HeadersColumn::Off,
            Some(name) => HeadersColumn::Named(name.to_owned()),
        },
        timestamp: file.timestamp.clone(),
        partition: file.partition.clone(),
        // The reserved topics are added after all pipelines have been parsed, because they depend
        // on the settings of every pipeline.
        reserved_topics: ReservedTopics::default(),
    })
}

fn topic(reader: &Reader, file: &FilePipeline) -> Result<Option<Topic>, ConfigError> {
    let Some(route) = &file.route else {
        let template: Option<Template> = reader.read("topic", file.topic.as_ref())?;
        let has_time = |part: &Part| matches!(part, Part::Time(_));
        if template.iter().flat_map(Template::parts).any(has_time) {
            let reason = "a time formatted according to RFC 3339 contains colons, which topic names can't contain. \
                          Remove :rfc3339";
            return Err(reader.error("topic", reason));
        }
        if let Some(reason) = template.as_ref().and_then(invalid_topic_text) {
            return Err(reader.error("topic", reason));
        }
        return Ok(template.map(Topic::Template));
    };
    if file.topic.is_some() {
        let reason = "topic and route both determine the topic. Remove one of them";
        return Err(reader.error("route", reason));
    }
    let route = Route::new(&route.column, &route.regex, &route.replacement);
    let route = route.map_err(|reason| reader.error("route", reason))?;
    Ok(Some(Topic::Route(route)))
}

/// Returns an error message if the template's literal text makes every topic name invalid.
fn invalid_topic_text(template: &Template) -> Option<String> {
    if let Some(topic) = template.constant() {
        return check_topic_name(topic).err();
    }
    let found = template.invalid_topic_char()?;
    Some(format!(
        "topic names can't contain {found:?}, expected only a-z A-Z 0-9 . _ - outside the braces"
    ))
}

/// Checks the name of a topic.
///
/// # Errors
/// Returns an error if Kafka does not accept the name.
pub(super) fn check_topic_name(topic: &str) -> Result<(), String> {
    match is_topic_name(topic) {
        true => Ok(()),
        false => Err(format!(
            "topic {topic:?}: expected 1 to 249 characters of a-z A-Z 0-9 . _ -"
        )),
    }
}

fn expansion(reader: &Reader, file: &FilePipeline) -> Result<Option<Expansion>, ConfigError> {
    if file.expand_payload == Some(true) {
        let kept = |is_kept| {
            if is_kept {
                Untyped::Keep
            } else {
                Untyped::Ignore
            }
        };
        return Ok(Some(Expansion {
            nulls: kept(file.expand_null == Some(FileNull::OptionalBytes)),
            empty_arrays: kept(file.expand_empty_array == Some(FileEmptyArray::OptionalString)),
        }));
    }
    let given = [
        ("expand_null", file.expand_null.is_some()),
        ("expand_empty_array", file.expand_empty_array.is_some()),
    ];
    match given.into_iter().find(|(_, is_given)| *is_given) {
        Some((key, _)) => {
            let reason = "this key has no effect unless the payload is expanded. Set expand_payload = true, or remove this key";
            Err(reader.error(key, reason))
        }
        None => Ok(None),
    }
}

/// Returns the columns included in the envelope, each with the name of its JSON member.
fn envelope(reader: &Reader, file: &FilePipeline) -> Result<Vec<(String, String)>, ConfigError> {
    let mut members: Vec<(String, String)> = Vec::new();
    for given in file.envelope.iter().flatten() {
        let (column, name) = given.split_once(':').unwrap_or((given, given));
        if column.is_empty() || name.is_empty() {
            let reason = format!("{given:?}: expected \"COLUMN\" or \"COLUMN:NAME\"");
            return Err(reader.error("envelope", reason));
        }
        if name == "payload" || members.iter().any(|(_, other)| other == name) {
            let reason = format!(
                "{given:?}: the object already has a member {name:?}. Choose another name for this column: \"{column}:NAME\""
            );
            return Err(reader.error("envelope", reason));
        }
        members.push((column.to_owned(), name.to_owned()));
    }
    Ok(members)
}
