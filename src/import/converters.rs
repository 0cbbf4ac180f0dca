//! Translates Kafka Connect converters to Walpost's formats for keys, values and headers.

use super::document::{Section, text};
use super::report::Report;
use super::source::{Kind, Source, Taken};

/// The format of a key, value or header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    String,
    Json,
    JsonSchema,
    Bytes,
    /// The output format of `SimpleHeaderConverter`.
    Simple,
}

impl Format {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::String => "string",
            Self::Json => "json",
            Self::JsonSchema => "json-schema",
            Self::Bytes => "bytes",
            Self::Simple => "simple",
        }
    }

    pub(super) fn is_json(self) -> bool {
        matches!(self, Self::Json | Self::JsonSchema)
    }
}

/// The formats of keys, values and headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Formats {
    pub(super) key: Format,
    pub(super) value: Format,
    pub(super) header: Format,
    /// Whether a NULL in a column with a DEFAULT is delivered as the column's default value.
    pub(super) null_default: bool,
}

pub(super) fn read(source: &mut Source, section: &mut Section, report: &mut Report) -> Formats {
    let mut null_default = true;
    let mut read_converter = |role: &str| {
        let found = converter(role, source, report);
        null_default &= found.null_default;
        found
    };
    let (key, value, header) = (
        read_converter("key"),
        read_converter("value"),
        read_converter("header"),
    );
    if header.format == Format::String {
        let message = "this converter writes header values as Java formats them: times as numbers, and bytea as the name of an \
         object. Walpost writes the column's text: if a header comes from a column of such a type, compare the values before the \
         switch-over";
        report.different(&header.from, message);
    }
    if key.format != Format::String {
        section.set("key_format", text(key.format.name()), key.from);
    }
    if value.format != Format::String {
        section.set("value_format", text(value.format.name()), value.from);
    }
    Formats {
        key: key.format,
        value: value.format,
        header: header.format,
        null_default,
    }
}

struct FoundFormat {
    format: Format,
    /// The property that determines the format.
    from: String,
    null_default: bool,
}

fn converter(role: &str, source: &mut Source, report: &mut Report) -> FoundFormat {
    let class = class(role, source, report);
    let setting = |source: &mut Source, name: &str, report: &mut Report| {
        let own = source.take_property(&format!("{role}.converter.{name}"), report);
        // In Debezium Server, the name of a converter setting may lack the prefix `key`, `value` or
        // `header`. Such a setting applies to all converters.
        let shared = source.take_property(&format!("converter.{name}"), report);
        own.or(shared)
    };
    let schemas = setting(source, "schemas.enable", report);
    let nulls = setting(source, "replace.null.with.default", report);
    let decimals = setting(source, "decimal.format", report);
    let mut found = FoundFormat {
        format: Format::String,
        from: class.written.clone(),
        null_default: !nulls.as_ref().is_some_and(|nulls| nulls.is("false")),
    };
    let short = class.value.rsplit('.').next().unwrap_or_default();
    let mut is_supported = true;
    found.format = match short {
        "StringConverter" => Format::String,
        "JsonConverter" => {
            let has_no_schemas = schemas.as_ref().is_some_and(|schemas| schemas.is("false"));
            if let Some(schemas) = &schemas {
                found.from = format!("{}, {}", found.from, schemas.written);
            }
            match has_no_schemas {
                true => Format::Json,
                false => Format::JsonSchema,
            }
        }
        "ByteArrayConverter" | "BinaryDataConverter" | "ByteBufferConverter"
            if role != "header" =>
        {
            Format::Bytes
        }
        "SimpleHeaderConverter" if role == "header" => Format::Simple,
        _ => {
            is_supported = false;
            report.unsupported(&class.written, unsupported_message(role, &class.value));
            if role == "header" {
                Format::Simple
            } else {
                Format::String
            }
        }
    };
    if let Some(decimals) = decimals.filter(|decimals| !decimals.is("BASE64")) {
        let message = "with this setting, values of type numeric are written differently than with the default, BASE64, which \
         Walpost uses: compare such columns before the switch-over";
        report.task(&decimals.written, message);
    }
    while let Some(name) = source.next_with_prefix(&format!("{role}.converter.")) {
        let Some(taken) = source.raw(&format!("{role}.converter.{name}")) else {
            break;
        };
        match name.as_str() {
            // The converter itself has already been reported as unsupported, so don't report its
            // settings.
            _ if !is_supported => report.without_effect(&taken.written),
            "schemas.cache.size" => report.without_effect(&taken.written),
            "encoding" | "converter.encoding" if taken.is("UTF-8") || taken.is("UTF8") => {
                report.without_effect(&taken.written);
            }
            "delegate.converter.type" => report.task(&taken.written, DELEGATE_HINT),
            name if name.starts_with("delegate.converter.type.") => {
                report.task(&taken.written, DELEGATE_HINT);
            }
            _ => {
                let message = "this is an unknown setting of the converter: make sure that no consumer depends on it";
                report.unknown(&taken.written, message);
            }
        }
    }
    if is_supported && !class.written.is_empty() && !DEFAULTS.contains(&class.written.as_str()) {
        let message = match role {
            "header" => format!("header_format = {:?}", found.format.name()),
            role => format!("{role}_format = {:?}", found.format.name()),
        };
        report.carried(&found.from, message);
    }
    found
}

const DELEGATE_HINT: &str = "this converter writes values that are not bytea: if the payload column has another type, such as \
 jsonb, the converter determines the bytes, while value_format = \"bytes\" delivers the column's text. For JsonConverter, set \
 value_format to \"json\" or \"json-schema\"; for StringConverter, omit value_format. If the payload is bytea, no change is \
 necessary";

const DEFAULT_OF_HEADERS: &str = "the default of header.converter";
const DEFAULTS: [&str; 1] = [DEFAULT_OF_HEADERS];

/// Returns a converter's class, and the property that specifies it.
fn class(role: &str, source: &mut Source, report: &mut Report) -> Taken {
    let taken = |written: &str, value: &str| Taken {
        written: written.to_owned(),
        value: value.to_owned(),
    };
    const JSON: &str = "org.apache.kafka.connect.json.JsonConverter";
    if source.kind == Kind::Server {
        let own = source.take_property(&format!("{role}.converter"), report);
        let format = source.take_property(&format!("debezium.format.{role}"), report);
        let Some(format) = format else {
            let default = format!("the default of debezium.format.{role}");
            return own.unwrap_or_else(|| taken(&default, JSON));
        };
        let name = format.value.trim().to_ascii_lowercase();
        let class = match name.as_str() {
            "json" | "jsonbytearray" => JSON,
            "simplestring" => "org.apache.kafka.connect.storage.StringConverter",
            "binary" => "io.debezium.converters.BinaryDataConverter",
            "avro" => "io.confluent.connect.avro.AvroConverter",
            "protobuf" => "io.confluent.connect.protobuf.ProtobufConverter",
            "cloudevents" => "io.debezium.converters.CloudEventsConverter",
            other => other,
        };
        return taken(&format.written, class);
    }
    if let Some(class) = source.take_property(&format!("{role}.converter"), report) {
        return class;
    }
    if role == "header" {
        return taken(
            DEFAULT_OF_HEADERS,
            "org.apache.kafka.connect.storage.SimpleHeaderConverter",
        );
    }
    let property = format!("{role}.converter");
    let message = "this property is not in the file, so the Connect worker's setting applies. JsonConverter with schemas is \
     assumed, because it is the default in the worker files that Kafka ships. To use the actual setting, pass the worker's file \
     with --worker";
    report.task(&property, message);
    taken(&format!("the Connect worker's {property}"), JSON)
}

/// Explains why a converter is not supported, and suggests an alternative.
fn unsupported_message(role: &str, class: &str) -> String {
    let instead = match role {
        "header" => "Headers are written in the format of SimpleHeaderConverter",
        _ => {
            "Change the service so that it writes the bytes into a bytea column and set the format to \"bytes\", or change the \
             consumers so that they read text"
        }
    };
    let why = if class.contains("avro") || class.contains("Avro") {
        "this converter writes Avro with schema IDs from a schema registry, but Walpost does not register schemas"
    } else if class.contains("protobuf") || class.contains("Protobuf") {
        "this converter writes Protobuf with schema IDs from a schema registry, but Walpost does not register schemas"
    } else if class.contains("CloudEvents") {
        "this converter writes CloudEvents. For binary mode, use headers with templates (ce_id, ce_type and so on); structured \
         mode has no equivalent"
    } else if class.contains("JsonSchemaConverter") || class.contains("ExtJsonConverter") {
        "this converter writes JSON with schema IDs from a schema registry, but Walpost does not register schemas"
    } else {
        "Walpost has no equivalent for this converter: it supports StringConverter, JsonConverter and ByteArrayConverter"
    };
    format!("{why}. {instead}")
}
