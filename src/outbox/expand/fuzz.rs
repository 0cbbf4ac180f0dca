//! Payloads that anyone may have written, expanded.

use serde_json::{Map, Value};

use super::super::connect::Form;
use super::{Expander, Keep, WORK_LEAST, WORK_PER_BYTE};

/// A byte of settings, and a payload.
///
/// # Panics
/// What is written is no JSON, is not what its schema says, or is longer than was promised.
pub fn expand(data: &[u8]) {
    let Some((settings, text)) = data.split_first() else {
        return;
    };
    let Ok(text) = std::str::from_utf8(text) else {
        return;
    };
    let keep = Keep {
        nulls: settings & 1 != 0,
        empty_arrays: settings & 2 != 0,
    };
    let mut expander = Expander::default();
    let Some(expanded) = expander.read(text, keep, true) else {
        return;
    };
    let (mut value, mut schema, mut java) = (Vec::new(), Vec::new(), Vec::new());
    expanded.push(&mut value, Form::Json);
    expanded.push(&mut java, Form::Java);
    expanded.push_schema(&mut schema, b"Value");
    schema.push(b'}');
    let most = text.len() * WORK_PER_BYTE + WORK_LEAST;
    for written in [&value, &schema, &java] {
        assert!(written.len() <= most, "{} of {}", written.len(), text.len());
    }
    // serde_json reads no surrogate without the other and not so many brackets, which Jackson does.
    let (Ok(value), Ok(schema)) = (read(&value), read(&schema)) else {
        return;
    };
    hold(&value, &schema);
}

fn read(json: &[u8]) -> Result<Value, ()> {
    serde_json::from_slice(json).map_err(|error| {
        let reason = error.to_string();
        let is_known = [
            "surrogate",
            "hex escape",
            "recursion limit",
            "number out of range",
        ]
        .iter()
        .any(|known| reason.contains(known));
        assert!(is_known, "{reason}: {}", String::from_utf8_lossy(json));
    })
}

/// The value is of the schema, as Connect's JsonConverter writes both.
fn hold(value: &Value, schema: &Value) {
    let kind = schema["type"].as_str().expect("a type");
    match (kind, value) {
        (_, Value::Null) | ("boolean", Value::Bool(_)) | ("string", Value::String(_)) => {}
        ("int32", Value::Number(number)) => {
            let number = number.as_i64().expect("a whole number");
            assert!(i32::try_from(number).is_ok(), "{number}");
        }
        ("int64", Value::Number(number)) => assert!(number.is_i64(), "{number}"),
        // Connect writes the whole number of an array of doubles as it is.
        ("double", Value::Number(_)) => {}
        ("array", Value::Array(items)) => {
            items.iter().for_each(|item| hold(item, &schema["items"]));
        }
        ("struct", Value::Object(members)) => hold_members(members, schema),
        _ => panic!("{value} is no {kind}"),
    }
}

/// There is each field, and nothing else; a name that came twice is once in both.
fn hold_members(members: &Map<String, Value>, schema: &Value) {
    let fields = schema["fields"].as_array().expect("fields");
    let name = |field: &Value| field["field"].as_str().expect("a name").to_owned();
    for field in fields {
        let value = members.get(&name(field));
        hold(value.unwrap_or_else(|| panic!("no {field}")), field);
    }
    let known: Vec<_> = fields.iter().map(name).collect();
    for member in members.keys() {
        assert!(known.contains(member), "{member:?} is not in the schema");
    }
}
