//! Confirmation of actions that can't be undone.

use std::io::BufRead;

use super::out;

/// Returns whether the user has typed the pipeline's name.
pub(super) fn is_given(name: &str) -> bool {
    let mut line = String::new();
    // If the question can't be printed or answered, the user has not agreed.
    out::question("Type the pipeline's name to continue: ")
        && std::io::stdin().lock().read_line(&mut line).is_ok()
        && line.trim() == name
}
