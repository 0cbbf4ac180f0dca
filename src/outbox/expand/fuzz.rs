//! A fuzz target that expands arbitrary JSON payloads and checks the output.

use serde_json::{Map, Value};

use super::super::connect::Form;
use super::{Expander, Keep, WORK_EMPTY, WORK_PER_BYTE};

/// Expands a payload. The first byte of `data` contains the settings, and the rest is the payload.
///
/// # Panics
/// Panics if the output is not valid JSON, does not match its schema, or is longer than the limit.
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
    let most = text.len() * WORK_PER_BYTE + WORK_EMPTY;
    for written in [&value, &schema, &java] {
        assert!(written.len() <= most, "{} of {}", written.len(), text.len());
    }
    // Unlike Jackson, serde_json rejects unpaired surrogates and deep nesting.
    let (Ok(value), Ok(schema)) = (read(&value), read(&schema)) else {
        return;
    };
    check_schema(&value, &schema);
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

/// Checks that the value matches the schema. Both are in the format of Connect's JsonConverter.
fn check_schema(value: &Value, schema: &Value) {
    let kind = schema["type"].as_str().expect("a type");
    match (kind, value) {
        (_, Value::Null) | ("boolean", Value::Bool(_)) | ("string", Value::String(_)) => {}
        ("int32", Value::Number(number)) => {
            let number = number.as_i64().expect("a whole number");
            assert!(i32::try_from(number).is_ok(), "{number}");
        }
        ("int64", Value::Number(number)) => assert!(number.is_i64(), "{number}"),
        // An array of doubles can contain numbers that are integers in the payload. Connect writes
        // them without a decimal point.
        ("double", Value::Number(_)) => {}
        ("array", Value::Array(items)) => {
            items
                .iter()
                .for_each(|item| check_schema(item, &schema["items"]));
        }
        ("struct", Value::Object(members)) => check_members(members, schema),
        _ => panic!("{value} does not have type {kind}"),
    }
}

/// Checks that the object has exactly the members that the schema lists. A name that the payload
/// repeats occurs only once in the object and in the schema.
fn check_members(members: &Map<String, Value>, schema: &Value) {
    let fields = schema["fields"].as_array().expect("fields");
    let name = |field: &Value| field["field"].as_str().expect("a name").to_owned();
    for field in fields {
        let value = members.get(&name(field));
        check_schema(value.unwrap_or_else(|| panic!("no {field}")), field);
    }
    let known: Vec<_> = fields.iter().map(name).collect();
    for member in members.keys() {
        assert!(known.contains(member), "{member:?} is not in the schema");
    }
}
