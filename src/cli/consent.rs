//! Confirmation of actions that can't be undone.

use std::io::BufRead;

use tokio::task::spawn_blocking;

use super::out;

/// Returns whether the user has typed the pipeline's name. Connections are served meanwhile, so
/// that those that are no longer used end, with their locks.
pub(super) async fn is_given(name: &str) -> bool {
    let name = name.to_owned();
    let asked = spawn_blocking(move || {
        let mut line = String::new();
        // If the question can't be printed or answered, the user has not agreed.
        out::question("Type the pipeline's name to continue: ")
            && std::io::stdin().lock().read_line(&mut line).is_ok()
            && line.trim() == name
    });
    asked.await.unwrap_or(false)
}
