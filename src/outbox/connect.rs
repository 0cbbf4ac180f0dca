//! Maps columns to Kafka Connect types in the same way as Debezium's connector with default
//! settings: the type, the schema that `JsonConverter` writes, and the value as written by each
//! converter. This module performs no I/O.

use std::io::Write as _;

use super::timestamp::{micros_of_day, micros_utc};
use super::{bound, json};

/// The OIDs of built-in types: PostgreSQL 18, `src/include/catalog/pg_type.dat`.
mod oid {
    pub(super) const BOOL: u32 = 16;
    pub(super) const BYTEA: u32 = 17;
    pub(super) const INT8: u32 = 20;
    pub(super) const INT2: u32 = 21;
    pub(super) const INT4: u32 = 23;
    pub(super) const OID: u32 = 26;
    pub(super) const JSON: u32 = 114;
    pub(super) const XML: u32 = 142;
    pub(super) const FLOAT4: u32 = 700;
    pub(super) const FLOAT8: u32 = 701;
    pub(super) const MONEY: u32 = 790;
    pub(super) const DATE: u32 = 1082;
    pub(super) const TIME: u32 = 1083;
    pub(super) const TIMESTAMP: u32 = 1114;
    pub(super) const TIMESTAMPTZ: u32 = 1184;
    pub(super) const INTERVAL: u32 = 1186;
    pub(super) const TIMETZ: u32 = 1266;
    pub(super) const BIT: u32 = 1560;
    pub(super) const VARBIT: u32 = 1562;
    pub(super) const NUMERIC: u32 = 1700;
    pub(super) const UUID: u32 = 2950;
    pub(super) const JSONB: u32 = 3802;
}

/// Properties of a column that are read from the catalog.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ColumnFacts {
    pub(crate) name: String,
    /// The column's domain, if its type is a domain.
    pub(crate) domain: Option<Domain>,
    /// `pg_attribute.atttypmod`, or the domain's type modifier.
    pub(crate) type_modifier: i32,
    pub(crate) not_null: bool,
    /// The column's DEFAULT expression, as printed by `pg_get_expr`.
    pub(crate) default: Option<String>,
}

impl ColumnFacts {
    /// Returns the memory that the value uses.
    pub(crate) fn memory_bytes(&self) -> usize {
        let default = self.default.as_ref().map_or(0, String::capacity);
        size_of::<Self>() + self.name.capacity() + default
    }
}

/// A domain. Its values are encoded like those of its base type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Domain {
    pub(crate) oid: u32,
    /// The OID of the base type, which is never itself a domain.
    pub(crate) base_oid: u32,
}

/// The Connect type of a column.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A string, or another type whose values are represented as strings.
    Text,
    Boolean,
    /// An integer, written with the same digits as in PostgreSQL's output.
    Integer,
    Float,
    Double,
    /// A decimal number with this many digits after the decimal point.
    Decimal(u32),
    /// A decimal number with a scale that can differ between values.
    AnyDecimal,
    /// A monetary amount, with two digits after the decimal point.
    Money,
    Bytes,
    /// Days since 1970-01-01.
    Date,
    /// Time of day, in milliseconds or microseconds.
    Time {
        is_millis: bool,
    },
    /// Time of day in UTC, as text.
    ZonedTime,
    /// Time since 1970-01-01, in milliseconds or microseconds.
    Timestamp {
        is_millis: bool,
    },
    /// Time in UTC, as text with this many fractional-second digits.
    ZonedTimestamp(u8),
    /// A duration in microseconds.
    Interval,
    /// A bit string of exactly one bit.
    Bit,
    /// A bit string that can have more than one bit.
    Bits,
    Array(Box<Kind>),
}

/// The Kafka Connect converter whose output format is used for a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// `JsonConverter`.
    Json,
    /// `SimpleHeaderConverter`: text, in which strings within a list are quoted.
    Simple,
    /// `StringConverter`: the text that Java's `toString` returns.
    Java,
}

impl Kind {
    /// Returns the Connect type for a column type.
    pub(super) fn from_type(type_oid: u32, type_modifier: i32) -> Self {
        let digits = |modifier: i32| match modifier {
            0..=6 => modifier,
            _ => 6,
        };
        if let Some(element) = element_type(type_oid) {
            return Self::Array(Box::new(Self::from_type(element, type_modifier)));
        }
        match type_oid {
            oid::BOOL => Self::Boolean,
            oid::INT2 | oid::INT4 | oid::INT8 | oid::OID => Self::Integer,
            oid::FLOAT4 => Self::Float,
            oid::FLOAT8 => Self::Double,
            oid::NUMERIC => match precision(type_modifier) {
                Some((_, scale)) => Self::Decimal(scale),
                None => Self::AnyDecimal,
            },
            oid::MONEY => Self::Money,
            oid::BYTEA => Self::Bytes,
            oid::DATE => Self::Date,
            oid::TIME => Self::Time {
                is_millis: digits(type_modifier) <= 3,
            },
            oid::TIMETZ => Self::ZonedTime,
            oid::TIMESTAMP => Self::Timestamp {
                is_millis: digits(type_modifier) <= 3,
            },
            oid::TIMESTAMPTZ => {
                Self::ZonedTimestamp(u8::try_from(digits(type_modifier)).unwrap_or(6))
            }
            oid::INTERVAL => Self::Interval,
            oid::BIT if type_modifier == 1 => Self::Bit,
            oid::BIT | oid::VARBIT => Self::Bits,
            _ => Self::Text,
        }
    }

    /// Returns the schema that `JsonConverter` writes, without the closing brace.
    pub(super) fn schema(
        &self,
        type_oid: u32,
        type_modifier: i32,
        is_optional: bool,
        default: Option<&str>,
    ) -> Vec<u8> {
        let mut out = Vec::new();
        let (type_name, name) = self.type_names(type_oid);
        let _ = write!(out, "{{\"type\":\"{type_name}\"");
        match self {
            Self::Array(element) => {
                let element_oid = element_type(type_oid).unwrap_or_default();
                out.extend_from_slice(b",\"items\":");
                out.extend(element.schema(element_oid, type_modifier, true, None));
                out.push(b'}');
            }
            Self::AnyDecimal => out.extend_from_slice(
                b",\"fields\":[{\"type\":\"int32\",\"optional\":false,\"field\":\"scale\"},\
                  {\"type\":\"bytes\",\"optional\":false,\"field\":\"value\"}]",
            ),
            _ => {}
        }
        let _ = write!(out, ",\"optional\":{is_optional}");
        if let Some(name) = name {
            let _ = write!(out, ",\"name\":\"{name}\",\"version\":1");
        }
        match self {
            Self::AnyDecimal => out.extend_from_slice(b",\"doc\":\"Variable scaled decimal\""),
            Self::Decimal(scale) => {
                let precision = precision(type_modifier).map_or(0, |(precision, _)| precision);
                let _ = write!(
                    out,
                    ",\"parameters\":{{\"scale\":\"{scale}\",\"connect.decimal.precision\":\"{precision}\"}}"
                );
            }
            Self::Money => out.extend_from_slice(b",\"parameters\":{\"scale\":\"2\"}"),
            Self::Bits => {
                let _ = write!(out, ",\"parameters\":{{\"length\":\"{type_modifier}\"}}");
            }
            _ => {}
        }
        // Connect can't represent a struct as a default: KAFKA-12694.
        if let Some(default) = default.filter(|_| *self != Self::AnyDecimal) {
            out.extend_from_slice(b",\"default\":");
            self.push(&mut out, default, Form::Json, false);
        }
        out
    }

    /// Returns the name of the Connect type, and the name of the semantic type, if any.
    fn type_names(&self, type_oid: u32) -> (&'static str, Option<&'static str>) {
        match self {
            Self::Text => (
                "string",
                match type_oid {
                    oid::JSON | oid::JSONB => Some("io.debezium.data.Json"),
                    oid::UUID => Some("io.debezium.data.Uuid"),
                    oid::XML => Some("io.debezium.data.Xml"),
                    _ => None,
                },
            ),
            Self::Boolean | Self::Bit => ("boolean", None),
            Self::Integer => match type_oid {
                oid::INT2 => ("int16", None),
                oid::INT4 => ("int32", None),
                _ => ("int64", None),
            },
            Self::Float => ("float", None),
            Self::Double => ("double", None),
            Self::Decimal(_) | Self::Money => {
                ("bytes", Some("org.apache.kafka.connect.data.Decimal"))
            }
            Self::AnyDecimal => ("struct", Some("io.debezium.data.VariableScaleDecimal")),
            Self::Bytes => ("bytes", None),
            Self::Date => ("int32", Some("io.debezium.time.Date")),
            Self::Time { is_millis: true } => ("int32", Some("io.debezium.time.Time")),
            Self::Time { is_millis: false } => ("int64", Some("io.debezium.time.MicroTime")),
            Self::ZonedTime => ("string", Some("io.debezium.time.ZonedTime")),
            Self::Timestamp { is_millis: true } => ("int64", Some("io.debezium.time.Timestamp")),
            Self::Timestamp { is_millis: false } => {
                ("int64", Some("io.debezium.time.MicroTimestamp"))
            }
            Self::ZonedTimestamp(_) => ("string", Some("io.debezium.time.ZonedTimestamp")),
            Self::Interval => ("int64", Some("io.debezium.time.MicroDuration")),
            Self::Bits => ("bytes", Some("io.debezium.data.Bits")),
            Self::Array(_) => ("array", None),
        }
    }

    /// Appends a value, given as `text` in PostgreSQL's format. Values that Connect can't represent
    /// (dates BC, infinity) are appended as text. `is_embedded` is true for array elements.
    pub(super) fn push(&self, out: &mut Vec<u8>, text: &str, form: Form, is_embedded: bool) {
        let start = out.len();
        let is_written = match self {
            Self::Text => push_text(out, text, form, is_embedded),
            Self::Integer => {
                is_integer(text) && {
                    out.extend_from_slice(text.as_bytes());
                    true
                }
            }
            Self::Boolean | Self::Bit => match text {
                "t" | "true" | "1" => push_plain(out, "true"),
                "f" | "false" | "0" => push_plain(out, "false"),
                _ => false,
            },
            Self::Float => text.parse().is_ok_and(|value: f32| {
                push_number(out, form, value.is_finite(), |out| {
                    json::push_float(out, value)
                })
            }),
            Self::Double => text.parse().is_ok_and(|value: f64| {
                push_number(out, form, value.is_finite(), |out| {
                    json::push_double(out, value)
                })
            }),
            Self::Decimal(_) => push_decimal(out, text, form),
            Self::AnyDecimal => push_any_decimal(out, text, form),
            Self::Money => amount(text).is_some_and(|text| push_decimal(out, &text, form)),
            Self::Bytes => {
                decoded(text).is_some_and(|bytes| push_bytes(out, &bytes, form, is_embedded))
            }
            Self::Date => days(text).is_some_and(|days| push_display(out, days)),
            Self::Time { is_millis } => micros_of_day(text).is_some_and(|micros| {
                push_display(out, if *is_millis { micros / 1000 } else { micros })
            }),
            Self::Timestamp { is_millis } => micros_utc(text).is_some_and(|micros| {
                let millis = micros.div_euclid(1000);
                push_display(out, if *is_millis { millis } else { micros })
            }),
            Self::ZonedTime => {
                zoned_time(text).is_some_and(|text| push_text(out, &text, form, is_embedded))
            }
            Self::ZonedTimestamp(digits) => zoned_timestamp(text, *digits)
                .is_some_and(|text| push_text(out, &text, form, is_embedded)),
            Self::Interval => interval(text).is_some_and(|micros| push_display(out, micros)),
            Self::Bits => {
                bits(text).is_some_and(|bytes| push_bytes(out, &bytes, form, is_embedded))
            }
            Self::Array(element) => push_array(out, text, element, form),
        };
        if !is_written {
            out.truncate(start);
            push_text(out, text, form, is_embedded);
        }
    }
}

fn push_text(out: &mut Vec<u8>, text: &str, form: Form, is_embedded: bool) -> bool {
    match form {
        Form::Json => json::push_string(out, text),
        Form::Simple if is_embedded => {
            out.push(b'"');
            for byte in text.bytes() {
                if matches!(byte, b'"' | b'\\') {
                    out.push(b'\\');
                }
                out.push(byte);
            }
            out.push(b'"');
        }
        Form::Simple | Form::Java => out.extend_from_slice(text.as_bytes()),
    }
    true
}

fn push_plain(out: &mut Vec<u8>, text: &str) -> bool {
    out.extend_from_slice(text.as_bytes());
    true
}

fn push_display(out: &mut Vec<u8>, value: impl std::fmt::Display) -> bool {
    write!(out, "{value}").is_ok()
}

/// Appends a number. Infinity and NaN are quoted, because JSON does not have literals for them.
fn push_number(
    out: &mut Vec<u8>,
    form: Form,
    is_finite: bool,
    push: impl Fn(&mut Vec<u8>),
) -> bool {
    let in_quotes = form == Form::Json && !is_finite;
    if in_quotes {
        out.push(b'"');
    }
    push(out);
    if in_quotes {
        out.push(b'"');
    }
    true
}

fn push_bytes(out: &mut Vec<u8>, bytes: &[u8], form: Form, is_embedded: bool) -> bool {
    let in_quotes = form == Form::Json || form == Form::Simple && is_embedded;
    if in_quotes {
        out.push(b'"');
    }
    json::push_base64(out, bytes);
    if in_quotes {
        out.push(b'"');
    }
    true
}

fn is_integer(text: &str) -> bool {
    let digits = text.strip_prefix('-').unwrap_or(text);
    !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit())
}

fn decoded(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    bound::append_bytea(text.as_bytes(), &mut bytes).ok()?;
    Some(bytes)
}

/// Returns the precision and scale of a numeric type, or `None` if the type does not specify them.
fn precision(type_modifier: i32) -> Option<(u32, u32)> {
    let packed = u32::try_from(type_modifier).ok()?.checked_sub(4)?;
    // The scale is stored as an 11-bit number in two's complement. If PostgreSQL's scale is
    // negative, Connect's scale is 0.
    let scale = packed & 0x7ff;
    Some((packed >> 16, if scale > 0x3ff { 0 } else { scale }))
}

/// Parses a number printed by PostgreSQL. Returns whether it is negative, its digits without the
/// decimal point, and the number of digits after the decimal point.
fn parts_of_decimal(text: &str) -> Option<(bool, String, usize)> {
    let (is_negative, rest) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    let (whole, fraction) = rest.split_once('.').unwrap_or((rest, ""));
    let digits = format!("{whole}{fraction}");
    let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then_some((is_negative, digits, fraction.len()))
}

fn push_decimal(out: &mut Vec<u8>, text: &str, form: Form) -> bool {
    let Some((is_negative, digits, scale)) = parts_of_decimal(text) else {
        return false;
    };
    match form {
        Form::Json => push_bytes(out, &two_s_complement(is_negative, &digits), form, false),
        Form::Simple | Form::Java => push_big_decimal(out, text, &digits, scale),
    }
}

/// Appends a number in the format of Java's `BigDecimal.toString`, which uses an exponent instead
/// of many leading zeros.
fn push_big_decimal(out: &mut Vec<u8>, text: &str, digits: &str, scale: usize) -> bool {
    let significant = digits.trim_start_matches('0');
    let significant = if significant.is_empty() {
        "0"
    } else {
        significant
    };
    let exponent = i64::try_from(significant.len()).unwrap_or_default()
        - 1
        - i64::try_from(scale).unwrap_or_default();
    if exponent >= -6 {
        return push_plain(out, text);
    }
    if text.starts_with('-') {
        out.push(b'-');
    }
    let (first, rest) = significant.split_at(1);
    let point = if rest.is_empty() { "" } else { "." };
    write!(out, "{first}{point}{rest}E{exponent}").is_ok()
}

fn push_any_decimal(out: &mut Vec<u8>, text: &str, form: Form) -> bool {
    // Omit trailing zeros from the fraction, because they must not count toward the scale.
    let text = match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.'),
        false => text,
    };
    let Some((is_negative, digits, scale)) = parts_of_decimal(text) else {
        return false;
    };
    if form == Form::Java {
        // Debezium would write the identity hash code of a Java byte array, which is useless to
        // consumers.
        return push_plain(out, text);
    }
    let _ = write!(out, "{{\"scale\":{scale},\"value\":");
    push_bytes(
        out,
        &two_s_complement(is_negative, &digits),
        Form::Json,
        false,
    );
    out.push(b'}');
    true
}

/// Extracts the number from the text of a money value such as `-$1,234.50`, in which a dot precedes
/// the last two digits. Returns `None` for any other format.
fn amount(text: &str) -> Option<String> {
    let number: String = text
        .chars()
        .filter(|char| !matches!(char, '$' | ','))
        .collect();
    let (_, fraction) = number.split_once('.')?;
    (fraction.len() == 2).then_some(number)
}

/// Returns the shortest big-endian two's complement representation of a number, like Java's
/// `BigInteger.toByteArray`.
fn two_s_complement(is_negative: bool, digits: &str) -> Vec<u8> {
    // Process nine digits at a time. The least significant word comes first.
    let mut words: Vec<u32> = Vec::new();
    let first = digits.len() % 9;
    let (head, tail) = digits.split_at(first);
    let groups = tail.as_bytes().chunks(9);
    for group in std::iter::once(head.as_bytes()).chain(groups) {
        let number = group
            .iter()
            .fold(0, |sum, digit| sum * 10 + u64::from(digit - b'0'));
        let mut carry = number;
        for word in &mut words {
            let product = u64::from(*word) * 1_000_000_000 + carry;
            #[expect(clippy::cast_possible_truncation, reason = "the low half")]
            let low = product as u32;
            *word = low;
            carry = product >> 32;
        }
        if carry > 0 {
            words.push(u32::try_from(carry).unwrap_or(u32::MAX));
        }
    }
    let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    bytes.push(0);
    if is_negative {
        let mut carry = true;
        for byte in &mut bytes {
            let (sum, overflows) = (!*byte).overflowing_add(u8::from(carry));
            *byte = sum;
            carry = overflows;
        }
    }
    let sign = bytes.last().copied().unwrap_or_default();
    while let [.., before, last] = bytes[..]
        && last == sign
        && before >> 7 == sign >> 7
        && (last == 0 || last == 0xff)
    {
        bytes.pop();
    }
    bytes.reverse();
    bytes
}

fn days(text: &str) -> Option<i64> {
    let date: jiff::civil::Date = text.parse().ok()?;
    let midnight = date.to_zoned(jiff::tz::TimeZone::UTC).ok()?;
    Some(midnight.timestamp().as_second().div_euclid(86_400))
}

fn zoned_time(text: &str) -> Option<String> {
    let at = text.rfind(['+', '-'])?;
    let (time, offset) = text.split_at(at);
    let mut parts = offset[1..].split(':').map(str::parse::<i64>);
    let hours = parts.next()?.ok()?;
    let minutes = parts.next().unwrap_or(Ok(0)).ok()?;
    let seconds = parts.next().unwrap_or(Ok(0)).ok()?;
    let ahead = (hours * 60 + minutes) * 60 + seconds;
    let ahead = if offset.starts_with('-') {
        -ahead
    } else {
        ahead
    };
    let micros = micros_of_day(time)? - ahead * 1_000_000;
    let micros = micros.rem_euclid(86_400_000_000);
    let seconds = micros / 1_000_000;
    let mut text = format!(
        "{:02}:{:02}:{:02}",
        seconds / 3600,
        seconds / 60 % 60,
        seconds % 60
    );
    let fraction = format!("{:06}", micros % 1_000_000);
    let fraction = fraction.trim_end_matches('0');
    if !fraction.is_empty() {
        text.push('.');
        text.push_str(fraction);
    }
    text.push('Z');
    Some(text)
}

/// Returns the timestamp with the number of fractional digits that the type specifies. If that
/// number is zero, the fraction is omitted.
fn zoned_timestamp(text: &str, digits: u8) -> Option<String> {
    let at: jiff::Timestamp = text.parse().ok()?;
    Some(match digits {
        0 => format!("{at}"),
        digits => format!("{at:.*}", usize::from(digits)),
    })
}

/// Converts an interval in PostgreSQL's format (`1 year 2 mons -3 days 04:05:06.7`) to
/// microseconds. Like Debezium, counts a month as a twelfth of 365.25 days.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "Debezium performs the same conversion"
)]
fn interval(text: &str) -> Option<i64> {
    let (mut months, mut days, mut micros) = (0i64, 0i64, 0i64);
    let mut words = text.split(' ');
    while let Some(word) = words.next() {
        if word.contains(':') {
            let (sign, time) = match word.strip_prefix('-') {
                Some(time) => (-1, time),
                None => (1, word.trim_start_matches('+')),
            };
            micros = sign * micros_of_day(time)?;
            continue;
        }
        let count: i64 = word.parse().ok()?;
        match words.next()? {
            "year" | "years" => months = months.checked_add(count.checked_mul(12)?)?,
            "mon" | "mons" => months = months.checked_add(count)?,
            "day" | "days" => days = count,
            _ => return None,
        }
    }
    let days = months as f64 * (365.25 / 12.0) + days as f64;
    Some((days * 86_400.0 * 1e6 + micros as f64) as i64)
}

/// Converts a bit string to bytes. The last bit is the least significant bit of the first byte.
fn bits(text: &str) -> Option<Vec<u8>> {
    let mut bytes = vec![0; text.len().div_ceil(8)];
    for (at, bit) in text.bytes().rev().enumerate() {
        match bit {
            b'0' => {}
            b'1' => bytes[at / 8] |= 1 << (at % 8),
            _ => return None,
        }
    }
    Some(bytes)
}

/// Returns the element type of an array type.
fn element_type(type_oid: u32) -> Option<u32> {
    Some(match type_oid {
        199 => oid::JSON,
        1000 => oid::BOOL,
        1001 => oid::BYTEA,
        1005 => oid::INT2,
        1007 => oid::INT4,
        1009 => 25,
        1014 => 1042,
        1015 => 1043,
        1016 => oid::INT8,
        1021 => oid::FLOAT4,
        1022 => oid::FLOAT8,
        1028 => oid::OID,
        1115 => oid::TIMESTAMP,
        1182 => oid::DATE,
        1183 => oid::TIME,
        1185 => oid::TIMESTAMPTZ,
        1231 => oid::NUMERIC,
        2951 => oid::UUID,
        3807 => oid::JSONB,
        _ => return None,
    })
}

/// Appends a one-dimensional array in PostgreSQL's format, `{a,"b c",NULL}`, as a list. Returns
/// false if the text has a different form.
fn push_array(out: &mut Vec<u8>, text: &str, element: &Kind, form: Form) -> bool {
    let Some(inner) = text
        .strip_prefix('{')
        .and_then(|text| text.strip_suffix('}'))
    else {
        return false;
    };
    let separator: &[u8] = if form == Form::Java { b", " } else { b"," };
    out.push(b'[');
    let mut chars = inner.chars().peekable();
    let mut is_first = true;
    while chars.peek().is_some() {
        if !std::mem::take(&mut is_first) {
            out.extend_from_slice(separator);
        }
        let mut item = String::new();
        let is_quoted = chars.next_if_eq(&'"').is_some();
        let mut is_closed = !is_quoted;
        while let Some(char) = chars.next_if(|&char| is_quoted || char != ',') {
            match char {
                '"' if is_quoted => {
                    is_closed = true;
                    break;
                }
                '{' | '}' if !is_quoted => return false,
                '\\' => item.extend(chars.next()),
                char => item.push(char),
            }
        }
        // An element must be followed by a comma or by the end of the array.
        if !is_closed || chars.next().is_some_and(|char| char != ',') {
            return false;
        }
        match !is_quoted && item == "NULL" {
            true => out.extend_from_slice(b"null"),
            false => element.push(out, &item, form, true),
        }
    }
    out.push(b']');
    true
}

/// Returns the text of the default value that Debezium derives from a DEFAULT expression: the value
/// of a literal, or a fixed value for the type if the expression calls a function. Returns `None`
/// if Debezium does not derive a default value.
pub(super) fn default_text(kind: &Kind, type_oid: u32, expression: &str) -> Option<String> {
    let called = match kind {
        Kind::Text => match type_oid {
            25 | 1042 | 1043 | oid::XML => "",
            oid::JSON | oid::JSONB => "{}",
            oid::UUID => "00000000-0000-0000-0000-000000000000",
            _ => return None,
        },
        Kind::Boolean => "f",
        Kind::Integer if type_oid != oid::OID => "0",
        Kind::Float | Kind::Double => "0.0",
        Kind::Decimal(_) => "0.0",
        Kind::Date => "1970-01-01",
        Kind::Time { .. } => "00:00:00",
        Kind::Timestamp { .. } => "1970-01-01 00:00:00",
        Kind::ZonedTimestamp(_) => "1970-01-01 00:00:00+00",
        Kind::Bit => "0",
        Kind::Bits => "00",
        _ => return None,
    };
    let text = match is_call(expression) {
        true => called.to_owned(),
        false => literal(expression)?,
    };
    Some(match kind {
        Kind::Decimal(scale) => with_scale(&text, *scale)?,
        Kind::ZonedTimestamp(_) if !text.contains('+') => format!("{text}+00"),
        _ => text,
    })
}

fn is_call(expression: &str) -> bool {
    const CLOCKS: [&str; 5] = [
        "current_timestamp",
        "current_time",
        "current_date",
        "localtime",
        "localtimestamp",
    ];
    let name = expression.strip_prefix('(').unwrap_or(expression);
    let is_part = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.');
    let length = name.bytes().take_while(|byte| is_part(byte)).count();
    let is_called = length > 0 && name[length..].starts_with('(') && name.contains(')');
    is_called || CLOCKS.contains(&expression.to_ascii_lowercase().as_str())
}

/// Returns the value of a literal, which may be followed by a cast: `'it''s'::text`, `7`,
/// `'-8'::integer`. Returns `None` for NULL.
fn literal(expression: &str) -> Option<String> {
    let Some((_, rest)) = expression.split_once('\'') else {
        return (!expression.starts_with("NULL")).then(|| expression.to_owned());
    };
    let mut text = String::new();
    let mut chars = rest.chars().peekable();
    while let Some(char) = chars.next() {
        if char == '\'' && chars.next_if_eq(&'\'').is_none() {
            return Some(text);
        }
        text.push(char);
    }
    None
}

/// Returns the number with at least `scale` digits after the decimal point.
fn with_scale(text: &str, scale: u32) -> Option<String> {
    let (_, _, has) = parts_of_decimal(text)?;
    let more = usize::try_from(scale).ok()?.saturating_sub(has);
    let point = if has == 0 && more > 0 { "." } else { "" };
    Some(format!("{text}{point}{}", "0".repeat(more)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn json(type_oid: u32, type_modifier: i32, text: &str) -> String {
        let mut out = Vec::new();
        Kind::from_type(type_oid, type_modifier).push(&mut out, text, Form::Json, false);
        String::from_utf8(out).expect("UTF-8")
    }

    #[test]
    fn encodes_integers_like_java_big_integer() {
        let check = |text: &str, expected: &[u8]| {
            let (is_negative, digits, _) = parts_of_decimal(text).expect("a number");
            assert_eq!(two_s_complement(is_negative, &digits), expected, "{text}");
        };
        check("0", &[0]);
        check("-0", &[0]);
        check("127", &[0x7f]);
        check("128", &[0, 0x80]);
        check("-1", &[0xff]);
        check("-128", &[0x80]);
        check("-129", &[0xff, 0x7f]);
        check("255.00", &[0x63, 0x9c]);
        check("4294967296", &[1, 0, 0, 0, 0]);
        check("18446744073709551616", &[1, 0, 0, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn writes_unrepresentable_values_as_text() {
        for (type_oid, type_modifier, text) in [
            (oid::DATE, -1, "infinity"),
            (oid::DATE, -1, "0044-03-15 BC"),
            (oid::TIMESTAMP, -1, "-infinity"),
            (oid::TIMESTAMPTZ, -1, "infinity"),
            (oid::NUMERIC, -1, "NaN"),
            (oid::NUMERIC, (10 << 16) + 2 + 4, "NaN"),
            (oid::INTERVAL, -1, "@ 1 day"),
            (oid::MONEY, -1, "12,50 €"),
            (1007, -1, "{{1,2},{3,4}}"),
            (1007, -1, "[0:1]={1,2}"),
            (1009, -1, "{\"a"),
            (oid::BOOL, -1, "?"),
            (oid::INT4, -1, "1x"),
            (oid::BIT, 4, "01x1"),
        ] {
            assert_eq!(
                json(type_oid, type_modifier, text),
                format!("{text:?}"),
                "{type_oid}"
            );
        }
        assert_eq!(json(oid::FLOAT8, -1, "NaN"), "\"NaN\"");
        assert_eq!(json(oid::FLOAT4, -1, "-Infinity"), "\"-Infinity\"");
        assert_eq!(json(oid::TIME, -1, "24:00:00"), "86400000000");
    }

    #[test]
    fn derives_column_defaults_from_literals_and_function_calls() {
        let check = |type_oid, expression: &str, expected: Option<&str>| {
            let found = default_text(&Kind::from_type(type_oid, -1), type_oid, expression);
            assert_eq!(found.as_deref(), expected, "{expression}");
        };
        check(25, "'it''s (not) a call'::text", Some("it's (not) a call"));
        check(25, "upper('x'::text)", Some(""));
        check(25, "NULL::text", None);
        check(oid::INT4, "'-7'::integer", Some("-7"));
        check(oid::INT8, "nextval('s'::regclass)", Some("0"));
        check(
            oid::TIMESTAMPTZ,
            "CURRENT_TIMESTAMP",
            Some("1970-01-01 00:00:00+00"),
        );
        check(oid::BYTEA, "'\\x61'::bytea", None);
        check(25, "'unclosed", None);
    }
}
