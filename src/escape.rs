//! Escapes untrusted text so that the text can be displayed safely.
//!
//! A server's error message, an ID, a key or a table name can contain anything: escape sequences
//! for terminals, line feeds that start a forged log line, and characters that change the displayed
//! order of the text. All output is escaped where it is written, so that individual messages do not
//! have to be escaped.
//!
//! Control characters (C0, DEL, C1), line and paragraph separators, and the formatting characters
//! for bidirectional text (Unicode 16, UAX #9, table 4) are displayed as escapes. All other
//! characters remain unchanged, including backslashes, because the output is only displayed and
//! never parsed.

use std::borrow::Cow;
use std::fmt::{self, Write};

/// Returns whether displaying `c` may have an effect other than printing a character.
#[must_use]
pub(crate) fn is_control(c: char) -> bool {
    // A fast path for most text.
    if matches!(c, ' '..='~') {
        return false;
    }
    c.is_control()
        || matches!(
            c,
            '\u{61c}'
                | '\u{200e}'
                | '\u{200f}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2066}'..='\u{2069}'
        )
}

/// Displays the value on one line, with control characters escaped as in the output of `{:?}`: a
/// line feed as `\n`, and an escape character as `\u{1b}`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Escaped<T>(pub T);

impl<T: fmt::Display> fmt::Display for Escaped<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(Escaping(f), "{}", self.0)
    }
}

/// A writer that escapes text and passes the result to another writer.
pub(crate) struct Escaping<'w, W: ?Sized>(pub &'w mut W);

impl<W: Write + ?Sized> Write for Escaping<'_, W> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let mut rest = text;
        while let Some(at) = rest.find(is_control) {
            let (plain, from) = rest.split_at(at);
            self.0.write_str(plain)?;
            let mut chars = from.chars();
            if let Some(c) = chars.next() {
                write!(self.0, "{}", c.escape_default())?;
            }
            rest = chars.as_str();
        }
        self.0.write_str(rest)
    }
}

/// Quotes the text as a single shell word. Single quotes and backslashes are escaped outside of the
/// quotes, because fish, unlike POSIX shells, interprets `\'` and `\\` within single quotes.
#[must_use]
pub(crate) fn shell_quoted(text: &str) -> String {
    let mut word = "'".to_owned();
    for c in text.chars() {
        match c {
            '\'' => word.push_str(r"'\''"),
            '\\' => word.push_str(r"'\\'"),
            c => word.push(c),
        }
    }
    word.push('\'');
    word
}

/// Returns the text as a single shell word, quoted only if necessary. Operators paste the commands
/// in error messages into a shell, and these commands can contain file names that another user has
/// chosen.
#[must_use]
pub(crate) fn shell_word(text: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/._-+:@%,".contains(&byte);
    match !text.is_empty() && text.bytes().all(is_plain) {
        true => text.to_owned(),
        false => shell_quoted(text),
    }
}

/// Like [`shell_word`], but on a single line, for logs: control characters are written in the
/// `$'...'` format, which bash and zsh support.
#[must_use]
pub(crate) fn shell_word_on_one_line(text: &str) -> String {
    if !text.contains(char::is_control) {
        return shell_word(text);
    }
    let mut word = "$'".to_owned();
    for c in text.chars() {
        match c {
            '\'' => word.push_str("\\x27"),
            '\\' => word.push_str("\\x5c"),
            '\n' => word.push_str("\\n"),
            c if c.is_control() => {
                // Writing to a string can't fail.
                let _ = write!(word, "\\u{:04x}", u32::from(c));
            }
            c => word.push(c),
        }
    }
    word.push('\'');
    word
}

/// Escapes the control characters in JSON text without changing its meaning. Serializers escape
/// only C0 characters. Line feeds remain unchanged, because in JSON they only occur between values.
#[must_use]
pub(crate) fn in_json(json: &str) -> Cow<'_, str> {
    let is_meant = |c| c != '\n' && is_control(c);
    if !json.contains(is_meant) {
        return Cow::Borrowed(json);
    }
    let mut text = String::with_capacity(json.len() + 16);
    for c in json.chars() {
        if is_meant(c) {
            // All control characters have a code below 0x10000. Writing to a string can't fail.
            let _ = write!(text, "\\u{:04x}", u32::from(c));
        } else {
            text.push(c);
        }
    }
    Cow::Owned(text)
}

/// Returns a metric label's value with control characters escaped. Line feeds remain unchanged,
/// because the encoder for Prometheus' text format escapes them, along with backslashes and quotes.
#[must_use]
pub(crate) fn in_label(value: &str) -> Cow<'_, str> {
    let is_meant = |c| c != '\n' && is_control(c);
    if !value.contains(is_meant) {
        return Cow::Borrowed(value);
    }
    let mut text = String::with_capacity(value.len() + 16);
    for c in value.chars() {
        match is_meant(c) {
            true => text.extend(c.escape_default()),
            false => text.push(c),
        }
    }
    Cow::Owned(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Operators paste the commands in messages into a shell, and other users can choose the names
    /// of tables, slots and publications. Pipeline names need no quoting.
    #[test]
    fn commands_in_messages_quote_names_for_the_shell() {
        let mut folders = vec![std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src")];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).expect("a folder") {
                let path = entry.expect("an entry").path();
                if path.is_dir() {
                    folders.push(path);
                } else {
                    let text = std::fs::read_to_string(&path).expect("a text");
                    let text = text.replace("\\\n", " ");
                    let words: Vec<_> = text.split_ascii_whitespace().collect();
                    for pair in words.windows(2) {
                        let is_named = ["--table", "--slot", "--publication"].contains(&pair[0]);
                        let is_word = !pair[1].starts_with('{') || pair[1].starts_with("{word}");
                        assert!(!is_named || is_word, "{}: {pair:?}", path.display());
                    }
                }
            }
        }
    }

    /// Characters to escape: at least one of each kind, including the first and the last of each
    /// range.
    const CONTROLS: [char; 26] = [
        '\0', '\x07', '\x08', '\t', '\n', '\r', '\x1b', '\x1f', '\x7f', '\u{80}', '\u{85}',
        '\u{9b}', '\u{9d}', '\u{9f}', '\u{61c}', '\u{200e}', '\u{200f}', '\u{2028}', '\u{2029}',
        '\u{202a}', '\u{202c}', '\u{202e}', '\u{2066}', '\u{2067}', '\u{2068}', '\u{2069}',
    ];

    #[test]
    fn escapes_control_characters() {
        for c in CONTROLS {
            let shown = Escaped(format!("a{c}b")).to_string();
            assert!(!shown.chars().any(is_control), "{shown:?}");
            assert!(shown.starts_with("a\\") && shown.ends_with('b'), "{shown}");
        }
        assert_eq!(
            Escaped("\x1b[2J\nERROR\r\u{9b}1m\u{202e}").to_string(),
            r"\u{1b}[2J\nERROR\r\u{9b}1m\u{202e}"
        );
    }

    #[test]
    fn keeps_text_in_any_language_unchanged() {
        for text in ["", "plain ~", "Zürich – 東京 – שלום – 👩‍💻", r"C:\new"] {
            assert_eq!(Escaped(text).to_string(), text);
            assert!(matches!(in_json(text), Cow::Borrowed(same) if same == text));
            assert!(matches!(in_label(text), Cow::Borrowed(same) if same == text));
        }
    }

    #[test]
    fn escapes_control_characters_except_line_feeds_in_labels() {
        let text: String = CONTROLS.iter().collect();
        let label = in_label(&text);
        let controls: String = label.chars().filter(|c| is_control(*c)).collect();
        assert_eq!(controls, "\n");
        assert_eq!(in_label("a\x1b[2J\n\u{202e}"), "a\\u{1b}[2J\n\\u{202e}");
    }

    #[test]
    fn escapes_control_characters_in_json_without_changing_its_meaning() {
        let text: String = CONTROLS.iter().chain(&['é', '"', '\\']).collect();
        let value = serde_json::json!({ "key": text, text.clone(): [text] });
        let json = format!("{value}\n{value}\n");
        let safe = in_json(&json);
        assert!(!safe.contains(|c| c != '\n' && is_control(c)), "{safe:?}");
        assert_eq!(safe.lines().count(), 2);
        for line in safe.lines() {
            let read: serde_json::Value = serde_json::from_str(line).expect("JSON");
            assert_eq!(read, value);
        }
    }

    #[test]
    fn quotes_text_as_a_single_shell_word() {
        for text in [
            "/etc/walpost/a.toml",
            "",
            "a b",
            "$(id)",
            "it's",
            "`id`;id",
            "a\nb",
            "~",
            "é",
        ] {
            let word = shell_word(text);
            let printed = std::process::Command::new("/bin/sh")
                .args(["-c", &format!("printf %s {word}")])
                .output()
                .expect("a shell");
            assert_eq!(String::from_utf8_lossy(&printed.stdout), text, "{word}");
        }
        assert_eq!(shell_word("/etc/walpost/a.toml"), "/etc/walpost/a.toml");
    }

    #[test]
    fn shell_quoting_produces_a_single_line() {
        assert_eq!(shell_word_on_one_line("a = 'b'"), r"'a = '\''b'\'''");
        assert_eq!(shell_word_on_one_line("a\\b"), r"'a'\\'b'");
        assert_eq!(
            shell_word_on_one_line("(a\n)'\\\u{1b}"),
            r"$'(a\n)\x27\x5c\u001b'"
        );
    }

    /// fish interprets backslashes within single quotes, and dash does not interpret `$'...'`.
    #[test]
    fn quoted_text_remains_a_single_word_in_every_shell() {
        for text in [
            "a\\'; touch hit; #",
            "a\n'; touch hit; #",
            "\\",
            "\\'\u{9b}",
        ] {
            let word = shell_word_on_one_line(text);
            let mut is_quoted = false;
            let mut is_escaped = false;
            for c in word.chars() {
                assert!(is_quoted || is_escaped || "$'\\".contains(c), "{word}");
                assert!(!is_quoted || !word.starts_with('\'') || c != '\\', "{word}");
                match c {
                    _ if is_escaped => is_escaped = false,
                    '\'' => is_quoted = !is_quoted,
                    '\\' if !is_quoted => is_escaped = true,
                    _ => {}
                }
            }
            assert!(!is_quoted && !is_escaped, "{word}");
            let count = std::process::Command::new("/bin/sh")
                .args(["-c", &format!("set -- {word}; printf %s $#")])
                .output()
                .expect("a shell");
            assert_eq!(String::from_utf8_lossy(&count.stdout), "1", "{word}");
        }
    }
}
