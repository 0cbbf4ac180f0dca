//! What commands print. Everything goes through here, where text from outside is made fit to be
//! shown; the lints of the crate refuse `println!` and the handles of standard output elsewhere.

use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use serde::Serialize;
use tracing::error;

use crate::escape::{self, Escaped};
use crate::file_error;
use crate::model::exit::Exit;
use crate::observe::logging;

/// Prints a line, as `println!` does. Control characters of what is filled in are shown as their
/// codes: it is one line, whatever it holds.
macro_rules! say {
    ($($text:tt)*) => { $crate::cli::out::line(format_args!($($text)*)) };
}
pub(super) use say;

/// Something could not be printed.
static HAS_FAILED: AtomicBool = AtomicBool::new(false);

/// See [`say!`].
pub(super) fn line(text: fmt::Arguments<'_>) {
    print(&format!("{}\n", Escaped(text)));
}

/// How the mark at the start of a line is coloured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tone {
    Good,
    Warning,
    Bad,
}

impl Tone {
    /// Its SGR parameter (ECMA-48, 8.3.117).
    fn sgr(self) -> &'static str {
        match self {
            Self::Good => "32",
            Self::Warning => "33",
            Self::Bad => "1;31",
        }
    }
}

/// Prints a line as [`say!`] does. On a terminal its first word is coloured, unless NO_COLOR is set (no-color.org).
pub(super) fn marked(tone: Tone, mark: &str, text: &str) {
    let is_coloured =
        is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let (mark, text) = (Escaped(mark), Escaped(text));
    print(&match is_coloured {
        true => format!("\x1b[{}m{mark}\x1b[0m {text}\n", tone.sgr()),
        false => format!("{mark} {text}\n"),
    });
}

/// A table, and what is to be said of it.
pub(super) struct Screen {
    /// A line that is too long is cut: the first columns say most.
    pub(super) table: Vec<String>,
    /// A line that is too long goes on in the next.
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

    /// As it fits into a terminal.
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
        // The last row is the cursor's.
        let room = size.rows.saturating_sub(1).max(1);
        if lines.len() > room {
            let more = lines.len() + 1 - room;
            lines.truncate(room - 1);
            let told = format!("... and {more} more lines");
            lines.push(told.chars().take(size.columns).collect());
        }
        lines
    }
}

/// Of a terminal, in characters.
#[derive(Clone, Copy)]
struct Size {
    columns: usize,
    rows: usize,
}

impl Size {
    /// Of this one, if it knows; else as a terminal was made at first.
    fn of_terminal() -> Self {
        let known = terminal_size::terminal_size();
        let (columns, rows) = known.map_or((80, 24), |(columns, rows)| (columns.0, rows.0));
        Self {
            columns: usize::from(columns).max(1),
            rows: usize::from(rows).max(1),
        }
    }
}

/// Adds `text` as lines of so many characters, broken between words, all but the first indented.
fn wrap(text: &str, columns: usize, lines: &mut Vec<String>) {
    const INDENT: &str = "    ";
    let mut rest = text;
    let mut indent = "";
    while !rest.is_empty() {
        let width = columns.saturating_sub(indent.len()).max(1);
        let end = rest.char_indices().nth(width).map(|(at, _)| at);
        let at = match end {
            None => rest.len(),
            // A word that is longer than a line is broken.
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

/// Prints several lines at once, each as [`say!`] does. False if nobody can read them.
pub(super) fn lines(screen: &Screen) -> bool {
    let Screen { table, notes } = screen.escaped();
    let lines = table.iter().chain(&notes);
    print(&lines.map(|line| format!("{line}\n")).collect::<String>())
}

/// The same on a terminal in place of what was there; elsewhere it is [`lines`].
pub(super) fn frame(screen: &Screen, is_first: bool) -> bool {
    if !is_terminal() {
        return lines(screen);
    }
    let size = Size::of_terminal();
    let drawn = drawn(&screen.escaped().fitted(size), size.columns);
    // What the screen shows by now is scrolled out of it, so that it can be read later.
    let room = "\n".repeat(if is_first { size.rows } else { 0 });
    print(&(room + &drawn))
}

/// The commands that have a terminal show these lines and nothing else (ECMA-48: CUP, EL, ED).
/// Nothing is blank in between, as it would be if the screen were cleared first.
fn drawn(lines: &[String], columns: usize) -> String {
    // Between sizes a line may be longer than the terminal is wide: without DECAWM it stays one.
    let mut text = "\x1b[?7l".to_owned();
    for (row, line) in (1..).zip(lines) {
        // Where a line is full the cursor stays on its last character, which would be erased.
        let rest = match line.chars().count() < columns {
            true => "\x1b[K",
            false => "",
        };
        text += &format!("\x1b[{row};1H{line}{rest}");
    }
    text + &format!("\x1b[{};1H\x1b[J\x1b[?7h", lines.len() + 1)
}

/// Prints a JSON document, on a line. False if nobody can read it.
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

/// As [`json`], of a document that is text already.
pub(super) fn json_text(text: &str) -> bool {
    print(&format!("{}\n", escape::in_json(text)))
}

/// Prints what a shell or psql is to read: as it is. Nothing in it may be from outside but what is
/// quoted by that language's rules.
pub(super) fn script(text: &str) {
    print(text);
}

/// Prints a line for a person, beside what a program reads from standard output. That it can't be is nobody's loss.
#[expect(clippy::disallowed_methods, reason = "this is the place for it")]
pub(super) fn aside(text: &str) {
    let _ = writeln!(io::stderr().lock(), "{}", Escaped(text));
}

/// Asks on the same line. False if nobody can read it.
pub(super) fn question(text: &str) -> bool {
    // Log lines explain what is asked.
    logging::flush();
    print(&Escaped(text).to_string())
}

/// How the program ends that was going to end so: what nobody could read was not done.
pub(super) fn checked(exit: Exit) -> Exit {
    match exit {
        Exit::Done if HAS_FAILED.load(Ordering::Relaxed) => Exit::Failed,
        exit => exit,
    }
}

#[expect(clippy::disallowed_methods, reason = "this is the place for it")]
fn is_terminal() -> bool {
    io::stdout().is_terminal()
}

/// Prints it at once. That it can't be is logged the first time; `println!` would panic.
#[expect(clippy::disallowed_methods, reason = "this is the place for it")]
fn print(text: &str) -> bool {
    let mut out = io::stdout().lock();
    let printed = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    match printed {
        Ok(()) => true,
        Err(reason) => {
            if !HAS_FAILED.swap(true, Ordering::Relaxed) {
                let reason = file_error::reason(&reason);
                error!("standard output can't be written: {reason}");
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
    fn frame_fits_the_terminal_a_table_is_cut_and_a_note_goes_on_below() {
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
            "the last row is the cursor's"
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

    /// A terminal of that size, as far as a frame needs one.
    struct Terminal {
        cells: Vec<Vec<char>>,
        at: (usize, usize),
        wraps: bool,
    }

    impl Terminal {
        fn full_of_rubbish(size: Size) -> Self {
            Self {
                cells: vec![vec!['#'; size.columns]; size.rows],
                at: (size.rows - 1, 0),
                wraps: true,
            }
        }

        fn obey(&mut self, text: &str) {
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
            assert_ne!(c, '\n', "it may scroll");
            assert!(!self.wraps, "a line may go on in the next");
            assert!(self.at.0 < rows);
            self.cells[self.at.0][self.at.1] = c;
            self.at.1 = (self.at.1 + 1).min(columns - 1);
        }

        fn command(&mut self, command: &str) {
            let (row, column) = self.at;
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
                place => {
                    let place = place.strip_prefix('[').and_then(|p| p.strip_suffix(";1H"));
                    let row: usize = place.and_then(|row| row.parse().ok()).expect(command);
                    // Beyond the end is the end.
                    self.at = (row.min(self.cells.len()) - 1, 0);
                }
            }
        }

        fn shows(&self) -> Vec<String> {
            let text = |row: &Vec<char>| row.iter().collect::<String>().trim_end().to_owned();
            let mut rows: Vec<_> = self.cells.iter().map(text).collect();
            while rows.last().is_some_and(String::is_empty) {
                rows.pop();
            }
            rows
        }
    }

    #[test]
    fn frame_leaves_nothing_of_what_was_on_the_screen() {
        for columns in [5, 20, 80] {
            for rows in [2, 4, 24] {
                let mut terminal = Terminal::full_of_rubbish(size(columns, rows));
                let lines = fitted(columns, rows);
                terminal.obey(&drawn(&lines, columns));
                assert_eq!(terminal.shows(), lines, "{columns}x{rows}");
                assert!(terminal.wraps);
            }
        }
    }

    /// The terminal got smaller after it was asked.
    #[test]
    fn frame_that_is_too_large_by_now_is_cut_and_scrolls_nothing() {
        let mut terminal = Terminal::full_of_rubbish(size(10, 3));
        terminal.obey(&drawn(&fitted(20, 24), 20));
        let shown = terminal.shows();
        assert_eq!(shown.len(), 2, "{shown:?}");
        assert!(shown.iter().all(|row| !row.contains('#')), "{shown:?}");
    }
}
