//! Writes JSON text in the same format as Jackson, the JSON library of Kafka Connect. Performs no
//! I/O, and allocates memory only for the output.

use std::io::Write as _;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

/// How each byte is escaped: 0 if the byte is written unchanged, `u` if it is written as `\u` and
/// digits, and otherwise the character to write after a backslash.
const ESCAPES: [u8; 256] = {
    let mut escapes = [0; 256];
    let mut control = 0;
    while control < 0x20 {
        escapes[control] = b'u';
        control += 1;
    }
    escapes[0x08] = b'b';
    escapes[0x09] = b't';
    escapes[0x0a] = b'n';
    escapes[0x0c] = b'f';
    escapes[0x0d] = b'r';
    escapes[0x22] = b'"';
    escapes[0x5c] = b'\\';
    // Lead bytes of characters outside the BMP, which are written as two surrogates.
    let mut astral = 0xf0;
    while astral < 0xf8 {
        escapes[astral] = b'u';
        astral += 1;
    }
    escapes
};

const HEX: &[u8; 16] = b"0123456789ABCDEF";

/// Appends text with the escapes of a JSON string, without quotes.
pub(super) fn push_escaped(out: &mut Vec<u8>, text: &str) {
    let bytes = text.as_bytes();
    let mut written = 0;
    let mut at = 0;
    while at < bytes.len() {
        let byte = bytes[at];
        let escape = ESCAPES[usize::from(byte)];
        if escape == 0 {
            at += 1;
            continue;
        }
        out.extend_from_slice(&bytes[written..at]);
        at += match (escape, byte) {
            (b'u', 0xf0..) => {
                let char = text.get(at..at + 4).and_then(|rest| rest.chars().next());
                let mut units = [0; 2];
                for unit in char.unwrap_or_default().encode_utf16(&mut units) {
                    push_unit(out, *unit);
                }
                4
            }
            (b'u', control) => {
                push_unit(out, u16::from(control));
                1
            }
            (escape, _) => {
                out.extend_from_slice(&[b'\\', escape]);
                1
            }
        };
        written = at;
    }
    out.extend_from_slice(&bytes[written..]);
}

/// Appends a UTF-16 code unit as an escape.
pub(super) fn push_unit(out: &mut Vec<u8>, unit: u16) {
    let digit = |shift: u16| HEX[usize::from(unit >> shift & 0xf)];
    out.extend_from_slice(&[b'\\', b'u', digit(12), digit(8), digit(4), digit(0)]);
}

/// Appends a JSON string.
pub(super) fn push_string(out: &mut Vec<u8>, text: &str) {
    out.push(b'"');
    push_escaped(out, text);
    out.push(b'"');
}

/// Appends bytes in base64, with padding.
pub(super) fn push_base64(out: &mut Vec<u8>, bytes: &[u8]) {
    let start = out.len();
    let Some(length) = base64::encoded_len(bytes.len(), true) else {
        return;
    };
    out.resize(start + length, 0);
    // The buffer has exactly the required size.
    let _ = STANDARD.encode_slice(bytes, &mut out[start..]);
}

/// Appends a number in the format of Java's `Double.toString` since version 19: with the fewest
/// digits that identify the number.
pub(super) fn push_double(out: &mut Vec<u8>, value: f64) {
    push_floating(out, value, value.is_nan(), value.is_infinite());
}

/// Like [`push_double`], but in the format of `Float.toString`.
pub(super) fn push_float(out: &mut Vec<u8>, value: f32) {
    push_floating(out, value, value.is_nan(), value.is_infinite());
}

fn push_floating(
    out: &mut Vec<u8>,
    value: impl std::fmt::LowerExp + std::fmt::Display,
    is_nan: bool,
    is_infinite: bool,
) {
    let start = out.len();
    // Writing to a `Vec` can't fail.
    let _ = write!(out, "{value:e}");
    if is_nan || is_infinite {
        let is_negative = out.get(start) == Some(&b'-');
        out.truncate(start);
        let text: &[u8] = match (is_nan, is_negative) {
            (true, _) => b"NaN",
            (false, true) => b"-Infinity",
            (false, false) => b"Infinity",
        };
        return out.extend_from_slice(text);
    }
    // The text has the form -d.ddde-n: one digit, an optional point with more digits, and the
    // exponent.
    let mut digits = [0u8; 32];
    let mut count = 0;
    let mut rest = out[start..].iter();
    let mut is_negative = false;
    for &byte in rest.by_ref() {
        match byte {
            b'-' => is_negative = true,
            b'.' => {}
            b'e' => break,
            digit => {
                digits[count] = digit;
                count += 1;
            }
        }
    }
    let exponent: i32 = std::str::from_utf8(rest.as_slice())
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or_default();
    let digits = &digits[..count];
    out.truncate(start);
    if is_negative {
        out.push(b'-');
    }
    let is_zero = digits == b"0";
    if is_zero || !(-3..7).contains(&exponent) {
        out.extend_from_slice(&digits[..1]);
        out.push(b'.');
        out.extend_from_slice(if count > 1 { &digits[1..] } else { b"0" });
        if !is_zero {
            let _ = write!(out, "E{exponent}");
        }
    } else if exponent < 0 {
        out.extend_from_slice(b"0.");
        out.extend(std::iter::repeat_n(
            b'0',
            exponent.unsigned_abs() as usize - 1,
        ));
        out.extend_from_slice(digits);
    } else {
        let whole = exponent.unsigned_abs() as usize + 1;
        out.extend_from_slice(&digits[..whole.min(count)]);
        out.extend(std::iter::repeat_n(b'0', whole.saturating_sub(count)));
        out.push(b'.');
        out.extend_from_slice(if count > whole {
            &digits[whole..]
        } else {
            b"0"
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(push: impl FnOnce(&mut Vec<u8>)) -> String {
        let mut out = Vec::new();
        push(&mut out);
        String::from_utf8(out).expect("UTF-8")
    }

    #[test]
    fn escapes_strings_like_jackson() {
        let check = |given: &str, expected: &str| {
            assert_eq!(
                text(|out| push_string(out, given)),
                format!("\"{expected}\"")
            );
        };
        check("", "");
        check(
            "plain /text ü€\u{7f}\u{2028}",
            "plain /text ü€\u{7f}\u{2028}",
        );
        check("\"\\\n\r\t\u{8}\u{c}", "\\\"\\\\\\n\\r\\t\\b\\f");
        check("\u{0}\u{1f}", "\\u0000\\u001F");
        check("a\u{1f418}b", "a\\uD83D\\uDC18b");
        check("\u{10ffff}", "\\uDBFF\\uDFFF");
    }

    #[test]
    fn writes_numbers_like_java() {
        let check = |value: f64, expected: &str| {
            assert_eq!(text(|out| push_double(out, value)), expected);
        };
        check(10.0, "10.0");
        check(0.0, "0.0");
        check(-0.0, "-0.0");
        check(1e-7, "1.0E-7");
        check(0.001, "0.001");
        check(0.000_99, "9.9E-4");
        check(-0.25, "-0.25");
        check(9_999_999.0, "9999999.0");
        check(10_000_000.0, "1.0E7");
        check(123_456_789.125, "1.23456789125E8");
        check(f64::MAX, "1.7976931348623157E308");
        check(1000.0, "1000.0");
        check(f64::NAN, "NaN");
        check(f64::NEG_INFINITY, "-Infinity");
        assert_eq!(text(|out| push_float(out, 0.1)), "0.1");
    }

    #[test]
    fn writes_bytes_as_base64_with_padding() {
        for (bytes, expected) in [(&b""[..], ""), (b"a", "YQ=="), (b"\x00\xff\x10", "AP8Q")] {
            assert_eq!(text(|out| push_base64(out, bytes)), expected);
        }
    }
}
