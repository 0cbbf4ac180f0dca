//! Parser for COPY's text format, which has one line per row. Does not perform I/O. The parser
//! never panics: it returns an error for a line that is not in this format.
//!
//! Spec: PostgreSQL 18, "COPY", "File Formats", "Text Format".

use std::ops::Range;

use memchr::memchr3;

/// A parser for lines. It owns the memory for unescaped values, which is reused for each line.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    /// The unescaped text of all values that contained escapes, concatenated.
    unescaped: Vec<u8>,
    fields: Vec<Field>,
}

/// Maximum amount of memory for unescaped values that is kept for the next line.
const UNESCAPED_KEPT_BYTES: usize = 1 << 20;

#[derive(Debug)]
enum Field {
    Null,
    /// A value without escapes, as a range of the line.
    Plain(Range<usize>),
    /// A value with escapes, as a range of [`Lines::unescaped`].
    Unescaped(Range<usize>),
}

/// The values in a line.
#[derive(Clone, Copy)]
pub(crate) struct Values<'l> {
    line: &'l [u8],
    lines: &'l Lines,
}

/// The reason why a line is not in COPY's text format. Does not contain any data from the line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TextError {
    /// The line does not end with a newline.
    #[error("the line is truncated")]
    Truncated,
    /// There are extra bytes after the end of the line.
    #[error("unexpected bytes after the end of the line")]
    TrailingBytes,
    /// The line has too few or too many values.
    #[error("the line has {found} values, expected {expected}")]
    Width {
        /// The number of values found.
        found: usize,
        /// The number of values expected.
        expected: usize,
    },
    /// A backslash is followed by a character that does not form a known escape.
    #[error("field {field} contains an unknown escape sequence")]
    Escape {
        /// The position of the value in the line, starting at one.
        field: usize,
    },
}

impl Lines {
    /// Parses `line`, which must have `width` values.
    ///
    /// # Errors
    /// Returns an error if the line is malformed or does not have `width` values.
    pub(crate) fn read<'l>(
        &'l mut self,
        line: &'l [u8],
        width: usize,
    ) -> Result<Values<'l>, TextError> {
        self.unescaped.clear();
        self.unescaped.shrink_to(UNESCAPED_KEPT_BYTES);
        self.fields.clear();
        let mut at = 0;
        loop {
            let end = self.field(line, at)?;
            match line[end] {
                b'\t' => at = end + 1,
                _ if end + 1 == line.len() => break,
                _ => return Err(TextError::TrailingBytes),
            }
        }
        let found = self.fields.len();
        if found != width {
            return Err(TextError::Width {
                found,
                expected: width,
            });
        }
        Ok(Values { line, lines: self })
    }

    /// Parses the value that starts at `start`, and returns the offset of the tab or newline that
    /// ends it.
    fn field(&mut self, line: &[u8], start: usize) -> Result<usize, TextError> {
        let rest = &line[start..];
        let found = memchr3(b'\t', b'\\', b'\n', rest).ok_or(TextError::Truncated)?;
        if rest[found] != b'\\' {
            self.fields.push(Field::Plain(start..start + found));
            return Ok(start + found);
        }
        if let [b'\\', b'N', b'\t' | b'\n', ..] = rest {
            self.fields.push(Field::Null);
            return Ok(start + 2);
        }
        let field = self.fields.len() + 1;
        let (from, mut at) = (self.unescaped.len(), start);
        loop {
            let rest = &line[at..];
            let plain = memchr3(b'\t', b'\\', b'\n', rest).ok_or(TextError::Truncated)?;
            self.unescaped.extend_from_slice(&rest[..plain]);
            at += plain;
            if line[at] != b'\\' {
                break;
            }
            let meant = match line.get(at + 1).ok_or(TextError::Truncated)? {
                b'b' => 0x08,
                b'f' => 0x0c,
                b'n' => b'\n',
                b'r' => b'\r',
                b't' => b'\t',
                b'v' => 0x0b,
                b'\\' => b'\\',
                _ => return Err(TextError::Escape { field }),
            };
            self.unescaped.push(meant);
            at += 2;
        }
        let range = from..self.unescaped.len();
        self.fields.push(Field::Unescaped(range));
        Ok(at)
    }
}

impl<'l> Values<'l> {
    /// Returns the value at `index`, or `None` if it is null.
    ///
    /// # Panics
    /// Panics if `index` is out of range.
    #[must_use]
    pub(crate) fn get(self, index: usize) -> Option<&'l [u8]> {
        match &self.lines.fields[index] {
            Field::Null => None,
            Field::Plain(range) => Some(&self.line[range.clone()]),
            Field::Unescaped(range) => Some(&self.lines.unescaped[range.clone()]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &str, width: usize) -> Result<Vec<Option<String>>, TextError> {
        let mut lines = Lines::default();
        // Parse a different line first, to check that its values do not appear in the result for
        // `line`.
        lines.read(b"left\\nover\n", 1).expect("a line");
        let values = lines.read(line.as_bytes(), width)?;
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("UTF-8");
        Ok((0..width).map(|i| values.get(i).map(text)).collect())
    }

    fn check(line: &str, expected: &[Option<&str>]) {
        let expected: Vec<_> = expected.iter().map(|v| v.map(str::to_owned)).collect();
        assert_eq!(read(line, expected.len()), Ok(expected), "{line:?}");
    }

    #[test]
    fn parses_values_as_stored_in_the_table() {
        check("a\tb\n", &[Some("a"), Some("b")]);
        check("\n", &[Some("")]);
        check("\t\n", &[Some(""), Some("")]);
        check("\\N\t\\N\n", &[None, None]);
        check("\\\\N\t\\\\\n", &[Some("\\N"), Some("\\")]);
        check(
            "{\"a\": \"\\\\n\"}\tx\n",
            &[Some("{\"a\": \"\\n\"}"), Some("x")],
        );
        check(
            "\\b\\f\\n\\r\\t\\v\tplain\té\\té\n",
            &[Some("\u{8}\u{c}\n\r\t\u{b}"), Some("plain"), Some("é\té")],
        );
        check("\\x\n".replace("\\x", "\\\\x").as_str(), &[Some("\\x")]);
    }

    #[test]
    fn rejects_malformed_lines() {
        for (line, width, error) in [
            ("", 1, TextError::Truncated),
            ("a", 1, TextError::Truncated),
            ("a\t", 2, TextError::Truncated),
            ("a\\", 1, TextError::Truncated),
            ("a\\n", 1, TextError::Truncated),
            ("\\N", 1, TextError::Escape { field: 1 }),
            ("a\nb\n", 1, TextError::TrailingBytes),
            ("a\\\\b\nc\td\n", 2, TextError::TrailingBytes),
            ("\\N\nb\n", 1, TextError::TrailingBytes),
            (
                "a\n",
                2,
                TextError::Width {
                    found: 1,
                    expected: 2,
                },
            ),
            (
                "a\tb\n",
                1,
                TextError::Width {
                    found: 2,
                    expected: 1,
                },
            ),
            ("a\t\\q\n", 2, TextError::Escape { field: 2 }),
            ("\\Na\n", 1, TextError::Escape { field: 1 }),
            ("a\\N\n", 1, TextError::Escape { field: 1 }),
            ("\\.\n", 1, TextError::Escape { field: 1 }),
            ("\\\n", 1, TextError::Escape { field: 1 }),
        ] {
            assert_eq!(read(line, width), Err(error), "{line:?}");
        }
    }
}
