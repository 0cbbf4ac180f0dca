//! Parses the text of walpost.toml. Every error contains a line number.

use std::ops::Range;

use serde::de::DeserializeOwned;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::values::variable_for;

/// A line number, starting at 1, and a description of the error on that line.
pub(super) type SyntaxError = (usize, String);

/// A key whose value may contain `${NAME}`, which refers to a named group in Java's replacement
/// syntax.
const ROUTE_KEY: &str = "route";

/// Parses the text of a configuration file.
///
/// # Errors
/// Returns an error if the text is not valid TOML or contains an unsupported key or value. The
/// message never quotes the line, because it may contain a password.
pub(super) fn parse<T: DeserializeOwned>(text: &str) -> Result<T, SyntaxError> {
    let document = DeTable::parse(text)
        .map_err(|error| (line_number(text, error.span()), explain(error.message())))?;
    reject_variables(text, document.get_ref())?;
    let document = toml::Deserializer::from(document);
    serde_path_to_error::deserialize(document).map_err(|error| {
        let path = error.path().to_string();
        let error = error.into_inner();
        (
            line_number(text, error.span()),
            describe(&path, error.message()),
        )
    })
}

fn line_number(text: &str, span: Option<Range<usize>>) -> usize {
    let before = span
        .and_then(|span| text.get(..span.start))
        .unwrap_or_default();
    before.matches('\n').count() + 1
}

/// Adds the most likely mistake to an error message from the TOML parser.
fn explain(message: &str) -> String {
    match message.starts_with("unexpected key or value")
        || message.starts_with("string values must be quoted")
    {
        true => format!("{message}. Strings must be quoted: key = \"text\""),
        false => message.to_owned(),
    }
}

/// Turns an error message from serde, such as "unknown field `a`, expected one of `b`, `c`", into a
/// message for users. `path` is the location of the value.
fn describe(path: &str, message: &str) -> String {
    let unknown = message.strip_prefix("unknown field `");
    if let Some((key, _)) = unknown.and_then(|rest| rest.split_once('`'))
        && path.starts_with("pipeline")
        && let Some(place) = setting_location(key)
    {
        return format!("unknown field `{key}`: {place}");
    }
    if let Some(nearest) = nearest_known(message) {
        let (unknown, expected) = message.split_once(", ").unwrap_or((message, ""));
        let place = match message.starts_with("unknown field") {
            true => String::new(),
            false => format!("{path}: "),
        };
        return format!("{place}{unknown}; did you mean `{nearest}`? {expected}");
    }
    match (path, message) {
        ("pipeline" | "fleet.source", "invalid type: map, expected a sequence") => {
            format!("[[{path}]] can occur several times: write [[{path}]] instead of [{path}]")
        }
        _ => match message.rsplit_once(", expected ") {
            Some((found, "a string")) => format!("{path}: {found}, expected a quoted string"),
            Some((found, "u32" | "u64" | "usize" | "i32")) => {
                format!("{path}: {found}, expected an integer without quotes")
            }
            Some((found, "a boolean")) => format!("{path}: {found}, expected true or false"),
            Some((found, "a sequence")) => {
                format!("{path}: {found}, expected an array in [brackets]")
            }
            Some((found, "a map")) => format!("{path}: {found}, expected a table"),
            Some((found, "a tuple of size 2")) => {
                format!(
                    "{path}: {found}, expected an array of two strings: [\"NAME\", \"TEMPLATE\"]"
                )
            }
            _ => format!("{path}: {message}"),
        },
    }
}

/// Returns a hint that describes where walpost.toml specifies a setting that other programs specify
/// with `key`.
fn setting_location(key: &str) -> Option<&'static str> {
    match key {
        "broker" | "brokers" | "bootstrap_servers" | "kafka_brokers" => {
            Some("set the brokers in [kafka]: \"bootstrap.servers\" = \"HOST:PORT\"")
        }
        "database" | "database_url" | "dbname" | "dsn" | "host" | "password" | "port" | "url"
        | "user" | "username" => Some(
            "specify the connection as a single string: postgres = \"postgresql://USER@HOST:PORT/DATABASE\". Put the \
             password in PGPASSWORD or ~/.pgpass",
        ),
        _ => None,
    }
}

/// Parses a message from serde that contains an unknown key or value, followed by the known keys or
/// values, in backticks. Returns the known key or value that is most similar to the unknown key or
/// value.
fn nearest_known(message: &str) -> Option<&str> {
    let is_unknown =
        message.starts_with("unknown field ") || message.starts_with("unknown variant ");
    let mut quoted = is_unknown.then_some(message)?.split('`').skip(1).step_by(2);
    let unknown = quoted.next()?;
    quoted
        .map(|known| (strsim::damerau_levenshtein(unknown, known), known))
        .filter(|(distance, _)| *distance <= unknown.len() / 3 + 1)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, known)| known)
}

/// Rejects values such as `"${KAFKA_PASSWORD}"`. Some tools expand variables, but Walpost would use
/// the text itself as the password.
fn reject_variables(text: &str, table: &DeTable<'_>) -> Result<(), SyntaxError> {
    for (key, value) in table {
        if key.get_ref() != ROUTE_KEY {
            reject_variables_in(text, key.get_ref(), value)?;
        }
    }
    Ok(())
}

fn reject_variables_in(
    text: &str,
    key: &str,
    value: &Spanned<DeValue<'_>>,
) -> Result<(), SyntaxError> {
    match value.get_ref() {
        DeValue::String(found) => {
            let Some(name) = variable_in(found) else {
                return Ok(());
            };
            let reason = format!(
                "{key}: environment variables are not expanded in this file: found \"${{{name}}}\", expected the value itself. \
                 {}",
                replacement_hint(key)
            );
            Err((line_number(text, Some(value.span())), reason))
        }
        DeValue::Array(values) => values
            .iter()
            .try_for_each(|value| reject_variables_in(text, key, value)),
        DeValue::Table(table) => reject_variables(text, table),
        _ => Ok(()),
    }
}

/// Returns the name in the first `${NAME}` in a value.
fn variable_in(value: &str) -> Option<&str> {
    value.split("${").skip(1).find_map(|rest| {
        let (name, _) = rest.split_once('}')?;
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        (!name.is_empty() && name.chars().all(is_name)).then_some(name)
    })
}

/// Returns a hint that names the environment variable to set instead of the key.
fn replacement_hint(key: &str) -> String {
    match key {
        "postgres" => {
            "Remove the key and set WALPOST_POSTGRES, or remove the password and set PGPASSWORD"
                .to_owned()
        }
        property if property.contains('.') => {
            format!("Remove the property and set {}", variable_for(property))
        }
        _ => {
            "docs/configuration.md lists the environment variables that can be set instead of keys"
                .to_owned()
        }
    }
}
