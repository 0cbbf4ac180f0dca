//! What commands print. Everything goes through here, where text from outside is made fit to be
//! shown; the lints of the crate refuse `println!` and the handles of standard output elsewhere.

use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use serde::Serialize;
use tracing::error;

use crate::escape::{self, Escaped};
use crate::model::exit::Exit;

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

/// Prints several lines at once, each as [`say!`] does; on a terminal that is cleared before if
/// `clears`. False if nobody can read them.
pub(super) fn lines(lines: &[String], clears: bool) -> bool {
    let mut text = String::new();
    if clears && is_terminal() {
        text += "\x1b[H\x1b[2J";
    }
    for line in lines {
        text += &format!("{}\n", Escaped(line));
    }
    print(&text)
}

/// Prints a JSON document, on a line. False if nobody can read it.
pub(super) fn json(document: &impl Serialize) -> bool {
    match serde_json::to_string(document) {
        Ok(text) => json_text(&text),
        Err(reason) => {
            error!("no JSON can be made of it: {reason}");
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

/// Asks on the same line. False if nobody can read it.
pub(super) fn question(text: &str) -> bool {
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
                error!("standard output can't be written: {reason}");
            }
            false
        }
    }
}
