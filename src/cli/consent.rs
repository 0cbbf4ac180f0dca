//! Asks the user to confirm actions that can't be undone.

use std::io::BufRead;

use tokio::task::spawn_blocking;

use super::out;

/// Returns whether the user confirms by typing the pipeline's name. Other tasks run in the meantime,
/// so that unused connections are closed and their locks released.
pub(super) async fn is_given(name: &str) -> bool {
    let name = name.to_owned();
    let confirmed = spawn_blocking(move || {
        let mut line = String::new();
        // If the question can't be printed or the answer can't be read, the action is not confirmed.
        out::question("Type the pipeline's name to continue: ")
            && std::io::stdin().lock().read_line(&mut line).is_ok()
            && line.trim() == name
    });
    confirmed.await.unwrap_or(false)
}
