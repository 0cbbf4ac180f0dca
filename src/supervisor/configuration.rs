//! Reads the configuration again where it has changed, or somebody asks for that. On a thread of its own: a file system or a server
//! that does not answer holds up nobody else.

use std::io;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;

use tokio::sync::{mpsc as to_async, oneshot};

use super::control::Answer;
use super::definitions::{Definitions, Reading};
use super::places::{LOOK, Places};

/// To read it.
pub(super) struct Ask {
    /// What it is because of, for the log.
    pub why: &'static str,
    /// A person has said that most pipelines may go.
    pub is_accepted: bool,
    /// Where they are told what has changed.
    pub answer: Option<oneshot::Sender<Answer>>,
}

/// What came of it.
pub(super) struct Reread<D> {
    pub ask: Ask,
    pub result: Result<Reading<D>, String>,
}

/// Looks after the definitions from here on, and reads them as is sent to what is returned; each time is told at `reread`. `places`
/// are as they were before the definitions were read first.
///
/// # Errors
/// There is no thread.
pub(super) fn watch<D: Definitions>(
    mut definitions: D,
    mut places: Places,
    reread: to_async::Sender<Reread<D::Definition>>,
) -> io::Result<mpsc::Sender<Ask>> {
    let (asks, asked) = mpsc::channel();
    thread::Builder::new()
        .name("configuration".to_owned())
        .spawn(move || {
            loop {
                let by_itself = |why| Ask {
                    why,
                    is_accepted: false,
                    answer: None,
                };
                let ask = match asked.recv_timeout(LOOK) {
                    Ok(ask) => ask,
                    Err(RecvTimeoutError::Disconnected) => return,
                    Err(RecvTimeoutError::Timeout) if places.have_changed() => {
                        by_itself("a changed file")
                    }
                    Err(RecvTimeoutError::Timeout) if definitions.have_changed() => {
                        by_itself("another answer of a database")
                    }
                    Err(RecvTimeoutError::Timeout) => continue,
                };
                // Before they are read: so no change is missed.
                places = Places::of(definitions.places());
                let result = definitions.read();
                if reread.blocking_send(Reread { ask, result }).is_err() {
                    return;
                }
            }
        })?;
    Ok(asks)
}
