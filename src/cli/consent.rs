//! Asks the user to confirm actions that can't be undone.

use std::io::BufRead;

use tokio::task::spawn_blocking;

use super::out;

/// Returns whether the user confirms by typing the pipeline's name. Reads the answer on a blocking
/// thread, so that other tasks can close unused connections, and thereby release locks, while the
/// user decides.
pub(super) async fn is_given(name: &str) -> bool {
    let name = name.to_owned();
    let confirmed = spawn_blocking(move || {
        let mut line = String::new();
        // Failing to print the question or read the answer counts as a refusal.
        out::question("Type the pipeline's name to continue: ")
            && std::io::stdin().lock().read_line(&mut line).is_ok()
            && line.trim() == name
    });
    confirmed.await.unwrap_or(false)
}
