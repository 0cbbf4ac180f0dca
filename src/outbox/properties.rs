//! Parses text in the format of Java's `java.util.Properties`, which is used for configuration
//! files and for the trace context that Debezium expects in a column. This module performs no I/O.
//!
//! Spec: Java 17, `Properties.load(Reader)`.

/// The names of the headers that make up a trace context: `traceparent` and `tracestate`, which W3C
/// Trace Context defines, and `baggage`.
const NAMES: [&str; 3] = ["traceparent", "tracestate", "baggage"];

/// An invalid escape, which Java rejects too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BadEscape {
    /// The line number, counted from 1.
    pub(crate) line: usize,
}

/// Returns the names and values in the order in which they appear in the text. A repeated name is
/// returned once for each occurrence.
///
/// # Errors
/// Returns an error if `\u` is not followed by four hexadecimal digits.
pub(crate) fn parse(text: &str) -> Result<Vec<(String, String)>, BadEscape> {
    let text = text.replace("\r\n", "\n").replace('\r', "\n");
    let mut lines = (1..).zip(text.split('\n'));
    let mut found = Vec::new();
    while let Some((number, first)) = lines.next() {
        let first = first.trim_start_matches(is_blank);
        if first.is_empty() || first.starts_with(['#', '!']) {
            continue;
        }
        let mut logical = first.to_owned();
        while continues(&logical) {
            logical.pop();
            match lines.next() {
                Some((_, next)) => logical.push_str(next.trim_start_matches(is_blank)),
                None => break,
            }
        }
        let (name, value) = split(&logical);
        let line = number;
        let decode = |text| unescape(text).ok_or(BadEscape { line });
        found.push((decode(name)?, decode(value)?));
    }
    Ok(found)
}

/// Calls `found` with the names and values of the trace context in the text, in the order of
/// [`NAMES`]. Does not call `found` if Java would reject the text.
pub(super) fn trace_context(text: &str, mut found: impl FnMut(&str, &str)) {
    let pairs = parse(text).unwrap_or_default();
    for known in NAMES {
        // If a name is repeated, its last value applies.
        if let Some((name, value)) = pairs.iter().rfind(|(name, _)| name == known) {
            found(name, value);
        }
    }
}

fn is_blank(c: char) -> bool {
    matches!(c, ' ' | '\t' | '\x0c')
}

/// Returns whether the line ends with a backslash that is not itself escaped.
fn continues(line: &str) -> bool {
    let trailing = line.bytes().rev().take_while(|byte| *byte == b'\\').count();
    trailing % 2 == 1
}

/// Splits a line at the first `=`, `:` or blank that is not escaped.
fn split(line: &str) -> (&str, &str) {
    let mut is_escaped = false;
    let end = line.char_indices().find(|(_, c)| {
        let ends = !is_escaped && (matches!(c, '=' | ':') || is_blank(*c));
        is_escaped = *c == '\\' && !is_escaped;
        ends
    });
    let Some((end, _)) = end else {
        return (line, "");
    };
    let (name, rest) = line.split_at(end);
    let rest = rest.trim_start_matches(is_blank);
    let rest = rest.strip_prefix(['=', ':']).unwrap_or(rest);
    (name, rest.trim_start_matches(is_blank))
}

fn unescape(text: &str) -> Option<String> {
    // A properties file represents a character outside the BMP as two escapes, one for each
    // surrogate.
    let mut units: Vec<u16> = Vec::with_capacity(text.len());
    let mut chars = text.chars();
    let push = |units: &mut Vec<u16>, c: char| {
        units.extend_from_slice(c.encode_utf16(&mut [0; 2]));
    };
    while let Some(c) = chars.next() {
        if c != '\\' {
            push(&mut units, c);
            continue;
        }
        match chars.next() {
            Some('t') => push(&mut units, '\t'),
            Some('n') => push(&mut units, '\n'),
            Some('r') => push(&mut units, '\r'),
            Some('f') => push(&mut units, '\x0c'),
            Some('u') => {
                let mut unit = 0;
                for _ in 0..4 {
                    let digit = chars.next()?.to_digit(16)?;
                    unit = unit << 4 | u16::try_from(digit).ok()?;
                }
                units.push(unit);
            }
            Some(other) => push(&mut units, other),
            None => {}
        }
    }
    Some(String::from_utf16_lossy(&units))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: &[(&str, &str)]) {
        let found = parse(text).expect(text);
        let found: Vec<_> = found
            .iter()
            .map(|(n, v)| (n.as_str(), v.as_str()))
            .collect();
        assert_eq!(found, expected, "{text:?}");
    }

    #[test]
    fn parses_names_and_values_like_java() {
        check("a=b", &[("a", "b")]);
        check("a = b ", &[("a", "b ")]);
        check("a:b", &[("a", "b")]);
        check("a b", &[("a", "b")]);
        check("a\tb=c", &[("a", "b=c")]);
        check("  a=", &[("a", "")]);
        check("a", &[("a", "")]);
        check("a==b", &[("a", "=b")]);
        check("# a=b\n! c=d\n\n e=f", &[("e", "f")]);
        check("a\\=b=c", &[("a=b", "c")]);
        check("a\\\\=b", &[("a\\", "b")]);
        check("a=b\\\n   c\\\r\n\td", &[("a", "bcd")]);
        check("a=b\\\\\nc=d", &[("a", "b\\"), ("c", "d")]);
        check("a=b\\", &[("a", "b")]);
        check("a=\\t\\n\\r\\f\\q\\u0041", &[("a", "\t\n\r\x0cqA")]);
        check("a=\\ud83d\\udc18", &[("a", "🐘")]);
        check("a=1\na=2", &[("a", "1"), ("a", "2")]);
        check("a=b # c", &[("a", "b # c")]);
    }

    #[test]
    fn reports_the_line_of_an_invalid_escape() {
        assert_eq!(parse("a=b\nc=\\u12"), Err(BadEscape { line: 2 }));
        assert_eq!(parse("c=\\u12x4"), Err(BadEscape { line: 1 }));
    }

    #[test]
    fn reads_the_trace_context_from_properties() {
        let check = |text: &str, expected: &[(&str, &str)]| {
            let mut found = Vec::new();
            trace_context(text, |name, value| {
                found.push((name.to_owned(), value.to_owned()));
            });
            let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
            let expected = expected.iter().map(owned);
            let expected: Vec<_> = expected.collect();
            assert_eq!(found, expected, "{text:?}");
        };
        check(
            "#Wed Nov 25 02:00:00 UTC 2026\ntraceparent=00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\n",
            &[(
                "traceparent",
                "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            )],
        );
        check(
            "tracestate : a\\=1\r\n other x\n!comment\ntraceparent b",
            &[("traceparent", "b"), ("tracestate", "a=1")],
        );
        check(
            "traceparent=1\\\n   2\ntraceparent=\\u0033",
            &[("traceparent", "3")],
        );
        check("trace\\\n parent=x\\ty", &[("traceparent", "x\ty")]);
        check("", &[]);
        check("traceparent", &[("traceparent", "")]);
        check("traceparent=\\u12", &[]);
    }
}
