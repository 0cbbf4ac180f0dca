//! The text of `java.util.Properties`, in which Debezium expects a trace context: lines of a name, `=`, `:` or blanks,
//! and a value, with comments and escapes. Pure.

/// What the headers of a trace context are named: W3C's, and its baggage.
const NAMES: [&str; 3] = ["traceparent", "tracestate", "baggage"];

/// Calls `found` with the names and values of the trace context in the text, in the order of [`NAMES`].
pub(super) fn trace_context(text: &str, mut found: impl FnMut(&str, &str)) {
    let mut values: [Option<String>; NAMES.len()] = Default::default();
    for line in lines(text) {
        let (name, value) = pair(&line);
        if let Some(at) = NAMES.iter().position(|known| **known == *name) {
            values[at] = Some(value);
        }
    }
    for (name, value) in NAMES.iter().zip(&values) {
        if let Some(value) = value {
            found(name, value);
        }
    }
}

/// Lines that are neither blank nor comments; a backslash at the end of one continues it on the next.
fn lines(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut natural = text.split(['\n', '\r']);
    while let Some(line) = natural.next() {
        let mut line = line.trim_start().to_owned();
        if line.is_empty() || line.starts_with(['#', '!']) {
            continue;
        }
        while line.bytes().rev().take_while(|byte| *byte == b'\\').count() % 2 == 1 {
            line.pop();
            let Some(next) = natural.next() else { break };
            line.push_str(next.trim_start());
        }
        found.push(line);
    }
    found
}

/// Name and value of a line.
fn pair(line: &str) -> (String, String) {
    let mut is_escaped = false;
    let is_end = |char: char| {
        let is_end = !is_escaped && (char.is_whitespace() || matches!(char, '=' | ':'));
        is_escaped = char == '\\' && !is_escaped;
        is_end
    };
    let (name, rest) = line.split_at(line.find(is_end).unwrap_or(line.len()));
    let rest = rest.trim_start();
    let value = rest.strip_prefix(['=', ':']).unwrap_or(rest).trim_start();
    (unescaped(name), unescaped(value))
}

fn unescaped(text: &str) -> String {
    let mut units = Vec::new();
    let mut chars = text.chars();
    while let Some(char) = chars.next() {
        let char = match char {
            '\\' => match chars.next() {
                Some('t') => '\t',
                Some('n') => '\n',
                Some('r') => '\r',
                Some('f') => '\u{c}',
                Some('u') => {
                    let digits: String = chars.by_ref().take(4).collect();
                    units.push(u16::from_str_radix(&digits, 16).unwrap_or_default());
                    continue;
                }
                Some(char) => char,
                None => break,
            },
            char => char,
        };
        units.extend(char.encode_utf16(&mut [0; 2]).iter());
    }
    String::from_utf16_lossy(&units)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trace_context_is_read_from_properties() {
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
            "tracestate : a\\=1\r\n other x\n!no\ntraceparent b",
            &[("traceparent", "b"), ("tracestate", "a=1")],
        );
        check(
            "traceparent=1\\\n   2\ntraceparent=\\u0033",
            &[("traceparent", "3")],
        );
        check("trace\\\n parent=x\\ty", &[("traceparent", "x\ty")]);
        check("", &[]);
        check("traceparent", &[("traceparent", "")]);
    }
}
