//! What can't be undone needs the word of a person.

use std::io::BufRead;

use super::out;

/// Has a person typed the pipeline's name.
pub(super) fn is_given(name: &str) -> bool {
    let mut line = String::new();
    // Without anybody there to ask, nobody has agreed.
    out::question("Type the pipeline's name to continue: ")
        && std::io::stdin().lock().read_line(&mut line).is_ok()
        && line.trim() == name
}
