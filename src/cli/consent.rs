//! What can't be undone needs the word of a person.

use std::io::{BufRead, Write};

/// Has a person typed the pipeline's name.
pub(super) fn is_given(name: &str) -> bool {
    print!("Type the pipeline's name to go on: ");
    let mut line = String::new();
    // Without anybody there to ask, nobody has agreed.
    std::io::stdout().flush().is_ok()
        && std::io::stdin().lock().read_line(&mut line).is_ok()
        && line.trim() == name
}
