//! Writes walpost.toml. A comment above each line names the property from which the line was
//! derived.

use std::fmt::Write;

use toml_writer::{ToTomlKey, ToTomlValue, TomlKeyBuilder, TomlStringBuilder};

use crate::escape::{Escaped, is_control};

/// A key and its value in TOML syntax, with preceding comments. An entry without a key consists of
/// comments only.
#[derive(Clone, Debug)]
struct Entry {
    comments: Vec<String>,
    line: Option<(String, String)>,
}

/// A TOML table in the file.
#[derive(Debug, Default)]
pub(super) struct Section(Vec<Entry>);

impl Section {
    /// Adds a key and its value. `value` must be in TOML syntax: a number, a boolean, or the result
    /// of [`text`], [`list`] or [`table`].
    pub(super) fn set(&mut self, name: &str, value: String, comment: impl Into<String>) {
        self.0.push(Entry {
            comments: vec![comment.into()],
            line: Some((key(name), value)),
        });
    }

    pub(super) fn add_comment(&mut self, comment: impl Into<String>) {
        self.0.push(Entry {
            comments: vec![comment.into()],
            line: None,
        });
    }

    /// Appends the lines of `other` to this section.
    #[must_use]
    pub(super) fn append(mut self, other: &Self) -> Self {
        self.0.extend(other.0.iter().cloned());
        self
    }

    pub(super) fn contains(&self, name: &str) -> bool {
        let name = key(name);
        self.0
            .iter()
            .any(|entry| entry.line.as_ref().is_some_and(|(key, _)| *key == name))
    }

    fn write(&self, text: &mut String) {
        for entry in &self.0 {
            for comment in &entry.comments {
                write_comment(comment, text);
            }
            if let Some((key, value)) = &entry.line {
                let _ = writeln!(text, "{key} = {value}");
            }
        }
    }
}

/// The contents of walpost.toml.
#[derive(Debug, Default)]
pub(super) struct Document {
    /// Comments at the top of the file.
    pub(super) head: Vec<String>,
    pub(super) kafka: Section,
    pub(super) pipelines: Vec<Section>,
    /// Comments at the end of the file. An indented comment is never wrapped.
    pub(super) tail: Vec<String>,
}

impl Document {
    /// Returns whether any pipeline sets the key `name` to `value`, which must be in TOML syntax.
    #[must_use]
    pub(super) fn has_line(&self, name: &str, value: &str) -> bool {
        let name = key(name);
        let mut lines = self
            .pipelines
            .iter()
            .flat_map(|pipeline| &pipeline.0)
            .filter_map(|entry| entry.line.as_ref());
        lines.any(|line| (line.0.as_str(), line.1.as_str()) == (name.as_str(), value))
    }

    #[must_use]
    pub(super) fn write(&self) -> String {
        let mut text = String::new();
        for comment in &self.head {
            write_comment(comment, &mut text);
        }
        text.push_str("\n[kafka]\n");
        self.kafka.write(&mut text);
        for pipeline in &self.pipelines {
            text.push_str("\n[[pipeline]]\n");
            pipeline.write(&mut text);
        }
        text.push('\n');
        for comment in &self.tail {
            write_comment(comment, &mut text);
        }
        text
    }
}

/// Maximum width of a comment line in characters.
const LINE_CHARS_MAX: usize = 118;

/// Writes a comment, wrapped to as many lines as necessary. Indented comments contain commands,
/// which stay on one line so that users can copy them.
fn write_comment(comment: &str, text: &mut String) {
    let comment = Escaped(comment).to_string();
    if comment.is_empty() {
        text.push_str("#\n");
        return;
    }
    if comment.starts_with(' ') {
        let _ = writeln!(text, "# {comment}");
        return;
    }
    let mut line = String::new();
    for word in comment.split(' ') {
        if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > LINE_CHARS_MAX {
            let _ = writeln!(text, "# {line}");
            line.clear();
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
    }
    let _ = writeln!(text, "# {line}");
}

fn key(name: &str) -> String {
    let key = TomlKeyBuilder::new(name);
    let unquoted = key.as_unquoted().map(|key| key.to_toml_key());
    unquoted.unwrap_or_else(|| escape_controls(&key.as_basic().to_toml_key()))
}

#[must_use]
pub(super) fn text(value: &str) -> String {
    escape_controls(&TomlStringBuilder::new(value).as_basic().to_toml_value())
}

/// Escapes terminal control characters in a TOML string. `TomlStringBuilder` escapes only ASCII
/// control characters.
fn escape_controls(basic: &str) -> String {
    let mut text = String::with_capacity(basic.len());
    for c in basic.chars() {
        match is_control(c) {
            true => {
                let _ = write!(text, "\\U{:08X}", u32::from(c));
            }
            false => text.push(c),
        }
    }
    text
}

#[must_use]
pub(super) fn list<'v>(values: impl IntoIterator<Item = &'v str>) -> String {
    let values: Vec<_> = values.into_iter().map(text).collect();
    format!("[{}]", values.join(", "))
}

/// Formats names and values as a TOML inline table, in the given order.
#[must_use]
pub(super) fn table<'v>(entries: impl IntoIterator<Item = (&'v str, String)>) -> String {
    let entries = entries
        .into_iter()
        .map(|(name, value)| format!("{} = {value}", key(name)));
    let entries: Vec<_> = entries.collect();
    format!("{{ {} }}", entries.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parsing_a_written_document_returns_the_original_values() {
        let odd = "a\"b\\c\n\u{1b}'é\u{7f}\u{9b}\u{202e}#";
        let mut document = Document {
            head: vec![odd.to_owned()],
            tail: vec![format!("  {odd}")],
            ..Document::default()
        };
        document.kafka.set(odd, text(odd), odd);
        let mut pipeline = Section::default();
        pipeline.set("list", list([odd, ""]), "");
        pipeline.set(
            "table",
            table([(odd, text(odd)), ("b", "3".to_owned())]),
            "x ".repeat(200),
        );
        document.pipelines.push(pipeline);
        let written = document.write();
        let read: toml::Table = written
            .parse()
            .unwrap_or_else(|error| panic!("{error}: {written}"));
        assert_eq!(read["kafka"][odd].as_str(), Some(odd));
        let pipeline = &read["pipeline"][0];
        assert_eq!(pipeline["list"][0].as_str(), Some(odd));
        assert_eq!(pipeline["table"][odd].as_str(), Some(odd));
        assert_eq!(pipeline["table"]["b"].as_integer(), Some(3));
        assert!(
            !written.contains(|c| c != '\n' && is_control(c)),
            "{written}"
        );
        assert!(
            written
                .lines()
                .all(|line| line.chars().count() <= 120 || !line.starts_with('#'))
        );
    }
}
