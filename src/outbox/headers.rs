//! The headers of a record, stored in the router's scratch space.

use std::ops::Range;

use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::bound::Row;
use super::columns::Mapping;
use super::settings::HeaderFormat;
use super::{json, properties};

/// The header that contains the row's position in the WAL.
pub(crate) const POSITION_HEADER: &str = "walpost-position";

/// The header that is present only in records that `walpost replay` has sent.
pub(crate) const REPLAY_HEADER: &str = "walpost-replay";

/// The prefix of header names that are reserved for Walpost's metadata.
const RESERVED_PREFIX: &str = "walpost-";

/// Returns whether a header name is reserved. Rows and the configuration must not set these
/// headers, because consumers and `walpost verify` rely on them.
pub(crate) fn is_reserved(name: &[u8]) -> bool {
    name.starts_with(RESERVED_PREFIX.as_bytes())
}

#[derive(Clone, Copy, Default)]
pub struct Headers<'r> {
    spans: &'r [HeaderSpan],
    scratch: &'r [u8],
}

/// The locations of a header's name and value in the scratch space.
#[derive(Clone, Debug)]
pub(super) struct HeaderSpan {
    pub(super) name: Range<usize>,
    pub(super) value: Option<Range<usize>>,
}

impl<'r> Headers<'r> {
    pub(super) fn new(spans: &'r [HeaderSpan], scratch: &'r [u8]) -> Self {
        Self { spans, scratch }
    }

    /// Returns the names and values.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&'r str, Option<&'r [u8]>)> + use<'r> {
        let scratch = self.scratch;
        self.spans.iter().map(move |span| {
            // All names were copied from `str`s, so they are valid UTF-8 and the default is never
            // used.
            let name = std::str::from_utf8(&scratch[span.name.clone()]).unwrap_or_default();
            (name, span.value.clone().map(|value| &scratch[value]))
        })
    }
}

/// The names of the headers that Debezium adds to identify its connector.
const CONTEXT: [&str; 4] = [
    "__debezium.context.connectorLogicalName",
    "__debezium.context.taskId",
    "__debezium.context.connectorName",
    "__debezium.context.runId",
];

/// Appends the headers that Debezium adds before the event's own headers: those that identify the
/// connector, and the trace context.
pub(super) fn append_context(
    mapping: &Mapping,
    row: &Row<'_>,
    spans: &mut Vec<HeaderSpan>,
    scratch: &mut Vec<u8>,
) {
    let mut add = |name: &str, value: &str| {
        let name = push(scratch, name.as_bytes());
        let start = scratch.len();
        push_text(mapping.header_format, value, scratch);
        let value = Some(start..scratch.len());
        spans.push(HeaderSpan { name, value });
    };
    if let Some(debezium) = &mapping.debezium_headers {
        let values = [&debezium.logical_name, "0", "postgresql", &debezium.run_id];
        for (name, value) in CONTEXT.iter().zip(values) {
            add(name, value);
        }
    }
    let text = mapping.tracing.and_then(|source| source.value_in(row));
    if let Some(text) = text.and_then(|text| str::from_utf8(text).ok()) {
        properties::trace_context(text, add);
    }
}

/// Appends text in the configured header format.
fn push_text(format: HeaderFormat, text: &str, scratch: &mut Vec<u8>) {
    match format {
        HeaderFormat::String | HeaderFormat::Simple => scratch.extend_from_slice(text.as_bytes()),
        HeaderFormat::Json => json::push_string(scratch, text),
        HeaderFormat::JsonSchema => {
            scratch.extend_from_slice(
                b"{\"schema\":{\"type\":\"string\",\"optional\":false},\"payload\":",
            );
            json::push_string(scratch, text);
            scratch.push(b'}');
        }
    }
}

/// Appends the headers of the row's trace context.
pub(super) fn append_trace_context(
    mapping: &Mapping,
    row: &Row<'_>,
    spans: &mut Vec<HeaderSpan>,
    scratch: &mut Vec<u8>,
) {
    for (name, source) in &mapping.trace_context {
        if let Some(value) = source.value_in(row) {
            let name = push(scratch, name.as_bytes());
            let value = Some(push(scratch, value));
            spans.push(HeaderSpan { name, value });
        }
    }
}

/// Appends one header for each member of the JSON object `json`. A string is written as its
/// characters, null as a header without a value, and any other value as its JSON text.
///
/// # Errors
/// Returns an error if the text is not a JSON object. The message contains the location of the
/// error but not the content.
pub(super) fn append_json(
    json: &[u8],
    spans: &mut Vec<HeaderSpan>,
    scratch: &mut Vec<u8>,
) -> Result<(), String> {
    let mut deserializer = serde_json::Deserializer::from_slice(json);
    (&mut deserializer)
        .deserialize_map(Members { spans, scratch })
        .and_then(|()| deserializer.end())
        .map_err(|error| {
            format!(
                "the value is not a valid JSON object of headers (line {}, column {})",
                error.line(),
                error.column()
            )
        })
}

struct Members<'s> {
    spans: &'s mut Vec<HeaderSpan>,
    scratch: &'s mut Vec<u8>,
}

impl<'de> Visitor<'de> for Members<'_> {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(name) = map.next_key_seed(Text(self.scratch))? {
            let bytes = &self.scratch[name.clone()];
            // librdkafka stores a header's name as a C string, so a NUL character would truncate
            // it.
            if bytes.contains(&0) {
                return Err(A::Error::custom("a header name contains a NUL character"));
            }
            if is_reserved(bytes) {
                return Err(A::Error::custom(
                    "a header name begins with walpost-, which is reserved for Walpost's own headers",
                ));
            }
            let json = map.next_value::<&RawValue>()?.get();
            let value = match json.as_bytes().first() {
                Some(b'n') => None,
                Some(b'"') => {
                    let mut string = serde_json::Deserializer::from_str(json);
                    let text = Text(self.scratch).deserialize(&mut string);
                    Some(text.map_err(A::Error::custom)?)
                }
                _ => Some(push(self.scratch, json.as_bytes())),
            };
            self.spans.push(HeaderSpan { name, value });
        }
        Ok(())
    }
}

/// A [`DeserializeSeed`] that appends the characters of a JSON string to the scratch space.
/// Deserializing to a `String` or to a `Cow`, which serde always makes owned, would allocate memory
/// for every header. With this type, serde_json allocates only for strings that contain escapes.
struct Text<'s>(&'s mut Vec<u8>);

impl<'de> DeserializeSeed<'de> for Text<'_> {
    type Value = Range<usize>;

    fn deserialize<D: Deserializer<'de>>(self, string: D) -> Result<Self::Value, D::Error> {
        string.deserialize_str(self)
    }
}

impl Visitor<'_> for Text<'_> {
    type Value = Range<usize>;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a string")
    }

    fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
        Ok(push(self.0, text.as_bytes()))
    }
}

/// Appends `bytes` and returns their location.
pub(super) fn push(scratch: &mut Vec<u8>, bytes: &[u8]) -> Range<usize> {
    let start = scratch.len();
    scratch.extend_from_slice(bytes);
    start..scratch.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(json: &str) -> Result<Vec<(String, Option<String>)>, String> {
        let (mut spans, mut scratch) = (Vec::new(), Vec::new());
        append_json(json.as_bytes(), &mut spans, &mut scratch)?;
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("UTF-8");
        Ok(Headers::new(&spans, &scratch)
            .iter()
            .map(|(name, value)| (name.to_owned(), value.map(text)))
            .collect())
    }

    #[test]
    fn creates_a_header_for_each_member_of_the_json_object() {
        let pair = |name: &str, value: Option<&str>| (name.to_owned(), value.map(str::to_owned));
        assert_eq!(
            headers(
                r#" {"a": "x", "é\n": "q\"ü\u00e9", "n": null, "i": 12, "o": {"k": [1]}, "t": true} "#
            ),
            Ok(vec![
                pair("a", Some("x")),
                pair("é\n", Some("q\"üé")),
                pair("n", None),
                pair("i", Some("12")),
                pair("o", Some(r#"{"k": [1]}"#)),
                pair("t", Some("true")),
            ])
        );
        assert_eq!(headers("{}"), Ok(vec![]));
    }

    #[test]
    fn rejects_invalid_headers_without_quoting_their_content() {
        for json in [
            "[]",
            "\"secret\"",
            "{\"secret\"",
            "{} x",
            "",
            "nul",
            "{\"\\u0000\": 1}",
            "{\"walpost-position\": 1}",
            "{\"walpost-replay\": \"1\"}",
            "{\"a\": 1, \"walpost-\\u0065rror\": null}",
        ] {
            let error = headers(json).expect_err(json);
            assert!(
                error.contains("the value is not a valid JSON object of headers")
                    && !error.contains("secret"),
                "{error}"
            );
        }
    }
}
