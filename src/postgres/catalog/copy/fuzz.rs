//! Fuzz target for the COPY parser. The input simulates lines from a server that is faulty or is
//! not PostgreSQL.

use crate::postgres::wire::copy_text::Lines;

/// Parses a line. The first byte of `data` is the number of values to expect, and the other bytes
/// are the line.
///
/// # Panics
/// Panics if encoding the parsed values does not produce the same line.
pub fn copy(data: &[u8]) {
    let [width, line @ ..] = data else {
        return;
    };
    let width = usize::from(*width);
    let mut lines = Lines::default();
    let Ok(values) = lines.read(line, width) else {
        return;
    };
    let values: Vec<_> = (0..width)
        .map(|index| values.get(index).map(<[u8]>::to_vec))
        .collect();
    let written = encode_line(&values);
    // The parser also accepts some control characters unescaped, although the server always escapes
    // them.
    let raw = |byte: &u8| matches!(byte, 0x08 | 0x0b | 0x0c | b'\r');
    if !line.iter().any(raw) {
        assert_eq!(written, line);
    }
    let again = lines.read(&written, width).expect("a line");
    for (index, value) in values.iter().enumerate() {
        assert_eq!(again.get(index), value.as_deref());
    }
}

/// Encodes the values as the server would in a COPY line.
fn encode_line(values: &[Option<Vec<u8>>]) -> Vec<u8> {
    let mut line = Vec::new();
    for (index, value) in values.iter().enumerate() {
        if index > 0 {
            line.push(b'\t');
        }
        let Some(value) = value else {
            line.extend_from_slice(b"\\N");
            continue;
        };
        for byte in value {
            let escape = match byte {
                0x08 => b'b',
                0x0b => b'v',
                0x0c => b'f',
                b'\n' => b'n',
                b'\r' => b'r',
                b'\t' => b't',
                b'\\' => b'\\',
                byte => {
                    line.push(*byte);
                    continue;
                }
            };
            line.extend_from_slice(&[b'\\', escape]);
        }
    }
    line.push(b'\n');
    line
}
