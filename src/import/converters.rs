//! Translates Kafka Connect's converters to the formats of keys, values and headers.

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
    /// `SimpleHeaderConverter`.
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

/// The formats of the three converters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Formats {
    pub(super) key: Format,
    pub(super) value: Format,
    pub(super) header: Format,
    /// Whether NULL in a column with a DEFAULT is delivered as the default.
    pub(super) null_default: bool,
}

pub(super) fn read(source: &mut Source, section: &mut Section, report: &mut Report) -> Formats {
    let mut null_default = true;
    let mut read = |of: &str| {
        let found = converter(of, source, report);
        null_default &= found.null_default;
        found
    };
    let (key, value, header) = (read("key"), read("value"), read("header"));
    if header.format == Format::String {
        let says = "writes headers as Java formats their values: times as numbers, and bytea as the name of an object. Walpost \
         writes the text of the column: if a header has such a type, compare it before the switch-over";
        report.different(&header.from, says);
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

struct Found {
    format: Format,
    /// The property that determines the format.
    from: String,
    null_default: bool,
}

fn converter(of: &str, source: &mut Source, report: &mut Report) -> Found {
    let class = class(of, source, report);
    let setting = |source: &mut Source, name: &str, report: &mut Report| {
        let own = source.take_property(&format!("{of}.converter.{name}"), report);
        // Debezium Server also has settings for all converters.
        let shared = source.take_property(&format!("converter.{name}"), report);
        own.or(shared)
    };
    let schemas = setting(source, "schemas.enable", report);
    let nulls = setting(source, "replace.null.with.default", report);
    let decimals = setting(source, "decimal.format", report);
    let mut found = Found {
        format: Format::String,
        from: class.written.clone(),
        null_default: !nulls.as_ref().is_some_and(|nulls| nulls.is("false")),
    };
    let short = class.value.rsplit('.').next().unwrap_or_default();
    let mut is_supported = true;
    found.format = match short {
        "StringConverter" => Format::String,
        "JsonConverter" => {
            let is_without = schemas.as_ref().is_some_and(|schemas| schemas.is("false"));
            if let Some(schemas) = &schemas {
                found.from = format!("{}, {}", found.from, schemas.written);
            }
            match is_without {
                true => Format::Json,
                false => Format::JsonSchema,
            }
        }
        "ByteArrayConverter" | "BinaryDataConverter" | "ByteBufferConverter" if of != "header" => {
            Format::Bytes
        }
        "SimpleHeaderConverter" if of == "header" => Format::Simple,
        _ => {
            is_supported = false;
            report.unsupported(&class.written, reason(of, &class.value));
            if of == "header" {
                Format::Simple
            } else {
                Format::String
            }
        }
    };
    if let Some(decimals) = decimals.filter(|decimals| !decimals.is("BASE64")) {
        let says = "writes values of type numeric differently from the default, BASE64, which Walpost uses: compare such \
         columns before the switch-over";
        report.task(&decimals.written, says);
    }
    while let Some(name) = source.next_with_prefix(&format!("{of}.converter.")) {
        let Some(taken) = source.raw(&format!("{of}.converter.{name}")) else {
            break;
        };
        match name.as_str() {
            // The settings of an unsupported converter have no effect.
            _ if !is_supported => report.without_effect(&taken.written),
            "schemas.cache.size" => report.without_effect(&taken.written),
            "encoding" | "converter.encoding" if taken.is("UTF-8") || taken.is("UTF8") => {
                report.without_effect(&taken.written);
            }
            "delegate.converter.type" => report.task(&taken.written, DELEGATE_HINT),
            // Settings of the delegate.
            name if name.starts_with("delegate.converter.type.") => {
                report.task(&taken.written, DELEGATE_HINT);
            }
            _ => {
                let says = "is an unknown setting of the converter: make sure that no consumer depends on it";
                report.unknown(&taken.written, says);
            }
        }
    }
    if is_supported && !class.written.is_empty() && !DEFAULTS.contains(&class.written.as_str()) {
        let says = match of {
            "header" => format!("header_format = {:?}", found.format.name()),
            of => format!("{of}_format = {:?}", found.format.name()),
        };
        report.carried(&found.from, says);
    }
    found
}

const DELEGATE_HINT: &str = "writes values that are not bytea: if the payload column has another type, such as jsonb, this \
 converter determines the bytes, while value_format = \"bytes\" delivers the column's text. For JsonConverter, set value_format \
 to \"json\" or \"json-schema\"; for StringConverter, omit it. If the payload is bytea, nothing has to be changed";

const DEFAULT_OF_HEADERS: &str = "the default of header.converter";
const DEFAULTS: [&str; 1] = [DEFAULT_OF_HEADERS];

/// Returns the class of a converter, and the property that names it.
fn class(of: &str, source: &mut Source, report: &mut Report) -> Taken {
    let taken = |written: &str, value: &str| Taken {
        written: written.to_owned(),
        value: value.to_owned(),
    };
    const JSON: &str = "org.apache.kafka.connect.json.JsonConverter";
    if source.kind == Kind::Server {
        let own = source.take_property(&format!("{of}.converter"), report);
        let format = source.take_property(&format!("debezium.format.{of}"), report);
        let Some(format) = format else {
            let default = format!("the default of debezium.format.{of}");
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
    if let Some(class) = source.take_property(&format!("{of}.converter"), report) {
        return class;
    }
    if of == "header" {
        return taken(
            DEFAULT_OF_HEADERS,
            "org.apache.kafka.connect.storage.SimpleHeaderConverter",
        );
    }
    let property = format!("{of}.converter");
    let says = "is not in this file, so the Connect worker's setting applies. This assumes JsonConverter with schemas, the \
     default of the worker files that Kafka ships: pass the worker's file with --worker";
    report.task(&property, says);
    taken(&format!("{property}, which the worker sets"), JSON)
}

fn reason(of: &str, class: &str) -> String {
    let instead = match of {
        "header" => "Headers are written as SimpleHeaderConverter writes them",
        _ => {
            "Change the service so that it writes the bytes into a bytea column and set the format \"bytes\", or change the \
             consumers so that they read text"
        }
    };
    let why = if class.contains("avro") || class.contains("Avro") {
        "writes Avro with the ids of a schema registry, and Walpost does not register schemas"
    } else if class.contains("protobuf") || class.contains("Protobuf") {
        "writes Protobuf with the ids of a schema registry, and Walpost does not register schemas"
    } else if class.contains("CloudEvents") {
        "writes CloudEvents. For the binary mode, use headers with templates (ce_id, ce_type and so on); the structured mode \
         has no equivalent"
    } else if class.contains("JsonSchemaConverter") || class.contains("ExtJsonConverter") {
        "writes JSON with the ids of a schema registry, and Walpost does not register schemas"
    } else {
        "is a converter for which Walpost has no equivalent: it has StringConverter, JsonConverter and ByteArrayConverter"
    };
    format!("{why}. {instead}")
}
