//! Prints the output of commands. This module escapes untrusted text. Other modules can't bypass
//! it, because the crate's lints forbid `println!` and direct access to standard output.

use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use serde::Serialize;
use tracing::error;

use crate::escape::{self, Escaped};
use crate::file_error;
use crate::model::exit::Exit;
use crate::observe::logging;

/// Prints a line, like `println!`. Control characters in the arguments are printed as escape
/// sequences, so that the output is always a single line.
macro_rules! say {
    ($($text:tt)*) => { $crate::cli::out::line(format_args!($($text)*)) };
}
pub(super) use say;

/// Whether any attempt to print output has failed.
static HAS_FAILED: AtomicBool = AtomicBool::new(false);

/// Prints a line. Called only by the macro [`say!`].
pub(super) fn line(text: fmt::Arguments<'_>) {
    print(&format!("{}\n", Escaped(text)));
}

/// The color of the status mark that starts a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tone {
    Good,
    Warning,
    Bad,
}

impl Tone {
    /// Returns the color's SGR parameter (ECMA-48, 8.3.117).
    fn sgr(self) -> &'static str {
        match self {
            Self::Good => "32",
            Self::Warning => "33",
            Self::Bad => "1;31",
        }
    }
}

/// Prints a status mark and text on one line, escaped as in [`say!`]. On a terminal, the mark is
/// colored unless NO_COLOR is set (no-color.org).
pub(super) fn marked(tone: Tone, mark: &str, text: &str) {
    let is_coloured =
        is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let (mark, text) = (Escaped(mark), Escaped(text));
    print(&match is_coloured {
        true => format!("\x1b[{}m{mark}\x1b[0m {text}\n", tone.sgr()),
        false => format!("{mark} {text}\n"),
    });
}

/// The contents of a terminal screen: a table, followed by notes.
pub(super) struct Screen {
    /// Lines of the table. Long lines are truncated, because the first columns are the most
    /// important.
    pub(super) table: Vec<String>,
    /// Lines below the table. Long lines are wrapped.
    pub(super) notes: Vec<String>,
}

impl Screen {
    fn escaped(&self) -> Self {
        let escaped = |lines: &[String]| {
            let lines = lines.iter();
            lines.map(|line| Escaped(line).to_string()).collect()
        };
        Self {
            table: escaped(&self.table),
            notes: escaped(&self.notes),
        }
    }

    /// Returns the lines that fit on a terminal of this size.
    fn fitted(&self, size: Size) -> Vec<String> {
        let mut lines = Vec::new();
        let cut = |line: &String| {
            let line: String = line.chars().take(size.columns).collect();
            line.trim_end().to_owned()
        };
        lines.extend(self.table.iter().map(cut));
        for note in &self.notes {
            wrap(note, size.columns, &mut lines);
        }
        // The last row is reserved for the cursor.
        let max = size.rows.saturating_sub(1).max(1);
        if lines.len() > max {
            let more = lines.len() + 1 - max;
            lines.truncate(max - 1);
            let omitted = format!("... and {more} more lines");
            lines.push(omitted.chars().take(size.columns).collect());
        }
        lines
    }
}

/// The size of a terminal, in characters.
#[derive(Clone, Copy)]
struct Size {
    columns: usize,
    rows: usize,
}

impl Size {
    /// Returns the size of the current terminal, or 80 by 24 if the size is unknown.
    fn from_terminal() -> Self {
        let known = terminal_size::terminal_size();
        let (columns, rows) = known.map_or((80, 24), |(columns, rows)| (columns.0, rows.0));
        Self {
            columns: usize::from(columns).max(1),
            rows: usize::from(rows).max(1),
        }
    }
}

/// Adds `text` as lines of at most `columns` characters, broken between words. All lines except the
/// first are indented.
fn wrap(text: &str, columns: usize, lines: &mut Vec<String>) {
    const INDENT: &str = "    ";
    let mut rest = text;
    let mut indent = "";
    while !rest.is_empty() {
        let width = columns.saturating_sub(indent.len()).max(1);
        let end = rest.char_indices().nth(width).map(|(at, _)| at);
        let at = match end {
            None => rest.len(),
            // If a word is longer than a line, break within the word.
            Some(end) => match rest.get(..=end).and_then(|line| line.rfind(' ')) {
                Some(space) if space > 0 => space,
                _ => end,
            },
        };
        let (line, after) = rest.split_at(at);
        lines.push(format!("{indent}{line}"));
        rest = after.trim_start();
        indent = match columns > 4 * INDENT.len() {
            true => INDENT,
            false => "",
        };
    }
}

/// Prints all lines of the screen in one write, escaped as in [`say!`]. Returns false if printing
/// failed.
pub(super) fn lines(screen: &Screen) -> bool {
    let Screen { table, notes } = screen.escaped();
    let lines = table.iter().chain(&notes);
    print(&lines.map(|line| format!("{line}\n")).collect::<String>())
}

/// Like [`lines`], but on a terminal, replaces the previous output.
pub(super) fn frame(screen: &Screen, is_first: bool) -> bool {
    if !is_terminal() {
        return lines(screen);
    }
    let size = Size::from_terminal();
    let drawn = drawn(&screen.escaped().fitted(size), size.columns);
    // Before the first frame, move the screen's current contents into the scrollback buffer, where
    // the user can still read them.
    let scroll = "\n".repeat(if is_first { size.rows } else { 0 });
    print(&(scroll + &drawn))
}

/// Returns the control sequences that make a terminal display only these lines (ECMA-48: CUP, EL,
/// ED). The screen is not cleared first, because that would cause flicker.
fn drawn(lines: &[String], columns: usize) -> String {
    // After a resize, a line may be longer than the terminal is wide. Disable auto-wrap (DECAWM) so
    // that such a line does not continue on the next row.
    let mut text = "\x1b[?7l".to_owned();
    for (row, line) in (1..).zip(lines) {
        // After a line that fills the row, the cursor stays on the row's last character, which EL
        // would erase.
        let erase = match line.chars().count() < columns {
            true => "\x1b[K",
            false => "",
        };
        text += &format!("\x1b[{row};1H{line}{erase}");
    }
    text + &format!("\x1b[{};1H\x1b[J\x1b[?7h", lines.len() + 1)
}

/// Prints a JSON document on one line. Returns false if printing failed.
pub(super) fn json(document: &impl Serialize) -> bool {
    match serde_json::to_string(document) {
        Ok(text) => json_text(&text),
        Err(reason) => {
            error!("failed to write JSON: {reason}");
            HAS_FAILED.store(true, Ordering::Relaxed);
            false
        }
    }
}

/// Like [`json`], but for a document that is already serialized.
pub(super) fn json_text(text: &str) -> bool {
    print(&format!("{}\n", escape::in_json(text)))
}

/// Prints input for a shell, psql or another parser without escaping it. The caller must quote
/// untrusted text according to the rules of that language.
pub(super) fn script(text: &str) {
    print(text);
}

/// Prints a line to standard error, for text that must not be mixed with output that a program may
/// parse. Ignores errors.
#[expect(clippy::disallowed_methods, reason = "this module prints all output")]
pub(super) fn aside(text: &str) {
    let _ = writeln!(io::stderr().lock(), "{}", Escaped(text));
}

/// Prints a question without a trailing newline. Returns false if printing failed.
pub(super) fn question(text: &str) -> bool {
    // Flush the log first, because preceding log lines may explain the question.
    logging::flush();
    print(&Escaped(text).to_string())
}

/// Returns the program's exit code: `exit`, or a failure if the command succeeded but some of its
/// output could not be printed.
pub(super) fn checked(exit: Exit) -> Exit {
    match exit {
        Exit::Done if HAS_FAILED.load(Ordering::Relaxed) => Exit::Failed,
        exit => exit,
    }
}

#[expect(clippy::disallowed_methods, reason = "this module prints all output")]
fn is_terminal() -> bool {
    io::stdout().is_terminal()
}

/// Prints and flushes text. Logs the first failure instead of panicking like `println!`.
#[expect(clippy::disallowed_methods, reason = "this module prints all output")]
fn print(text: &str) -> bool {
    let mut out = io::stdout().lock();
    let printed = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    match printed {
        Ok(()) => true,
        Err(reason) => {
            if !HAS_FAILED.swap(true, Ordering::Relaxed) {
                let reason = file_error::reason(&reason);
                error!("failed to write to standard output: {reason}");
            }
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size(columns: usize, rows: usize) -> Size {
        Size { columns, rows }
    }

    fn fitted(columns: usize, rows: usize) -> Vec<String> {
        let screen = Screen {
            table: vec!["NAME  STATE".to_owned(), "orders  halted".to_owned()],
            notes: vec!["orders: the row with id 17 has no key".to_owned()],
        };
        screen.fitted(size(columns, rows))
    }

    #[test]
    fn truncates_the_table_and_wraps_notes_to_fit_the_terminal() {
        assert_eq!(
            fitted(20, 24),
            [
                "NAME  STATE",
                "orders  halted",
                "orders: the row with",
                "    id 17 has no key"
            ]
        );
        assert_eq!(fitted(9, 24)[..2], ["NAME  STA", "orders  h"]);
        assert_eq!(
            fitted(80, 3),
            ["NAME  STATE", "... and 2 more lines"],
            "the last row is reserved for the cursor"
        );
        for columns in 1..50 {
            for rows in 1..8 {
                let lines = fitted(columns, rows);
                assert!(lines.len() < rows.max(2), "{columns}x{rows}: {lines:?}");
                let longest = lines.iter().map(|line| line.chars().count()).max();
                assert!(longest <= Some(columns), "{columns}x{rows}: {lines:?}");
            }
        }
        let mut lines = Vec::new();
        wrap("ÄÖÜäöüÄÖÜäöü ß", 5, &mut lines);
        assert_eq!(lines, ["ÄÖÜäö", "üÄÖÜä", "öü ß"]);
    }

    /// An emulated terminal that implements the control sequences used to draw a frame.
    struct Terminal {
        cells: Vec<Vec<char>>,
        cursor: (usize, usize),
        wraps: bool,
    }

    impl Terminal {
        fn filled(size: Size) -> Self {
            Self {
                cells: vec![vec!['#'; size.columns]; size.rows],
                cursor: (size.rows - 1, 0),
                wraps: true,
            }
        }

        fn display(&mut self, text: &str) {
            let mut rest = text;
            while let Some(c) = rest.chars().next() {
                rest = &rest[c.len_utf8()..];
                if c != '\x1b' {
                    self.put(c);
                    continue;
                }
                let end = rest
                    .find(|c: char| c.is_ascii_alphabetic())
                    .expect("an end");
                self.command(&rest[..=end]);
                rest = &rest[end + 1..];
            }
        }

        fn put(&mut self, c: char) {
            let (rows, columns) = (self.cells.len(), self.cells[0].len());
            assert_ne!(c, '\n', "a line feed may scroll the screen");
            assert!(!self.wraps, "a line may be wrapped");
            assert!(self.cursor.0 < rows);
            self.cells[self.cursor.0][self.cursor.1] = c;
            self.cursor.1 = (self.cursor.1 + 1).min(columns - 1);
        }

        fn command(&mut self, command: &str) {
            let (row, column) = self.cursor;
            match command {
                "[?7l" => self.wraps = false,
                "[?7h" => self.wraps = true,
                "[K" => self.cells[row]
                    .iter_mut()
                    .skip(column)
                    .for_each(|c| *c = ' '),
                "[J" => {
                    self.command("[K");
                    self.cells[row + 1..]
                        .iter_mut()
                        .for_each(|row| row.fill(' '));
                }
                move_to => {
                    let row = move_to
                        .strip_prefix('[')
                        .and_then(|p| p.strip_suffix(";1H"));
                    let row: usize = row.and_then(|row| row.parse().ok()).expect(command);
                    // Terminals clamp the requested row to their last row.
                    self.cursor = (row.min(self.cells.len()) - 1, 0);
                }
            }
        }

        fn visible_lines(&self) -> Vec<String> {
            let text = |row: &Vec<char>| row.iter().collect::<String>().trim_end().to_owned();
            let mut rows: Vec<_> = self.cells.iter().map(text).collect();
            while rows.last().is_some_and(String::is_empty) {
                rows.pop();
            }
            rows
        }
    }

    #[test]
    fn frame_replaces_the_previous_contents_of_the_screen() {
        for columns in [5, 20, 80] {
            for rows in [2, 4, 24] {
                let mut terminal = Terminal::filled(size(columns, rows));
                let lines = fitted(columns, rows);
                terminal.display(&drawn(&lines, columns));
                assert_eq!(terminal.visible_lines(), lines, "{columns}x{rows}");
                assert!(terminal.wraps);
            }
        }
    }

    /// The terminal shrinks after its size is queried but before the frame is drawn.
    #[test]
    fn frame_does_not_scroll_if_the_terminal_shrinks() {
        let mut terminal = Terminal::filled(size(10, 3));
        terminal.display(&drawn(&fitted(20, 24), 20));
        let shown = terminal.visible_lines();
        assert_eq!(shown.len(), 2, "{shown:?}");
        assert!(shown.iter().all(|row| !row.contains('#')), "{shown:?}");
    }
}
