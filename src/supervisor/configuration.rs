//! Reloads the configuration when it changes or on request. Runs on its own thread, so that an unresponsive file system or
//! server blocks nothing else.

use std::io;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;

use tokio::sync::{mpsc as to_async, oneshot};

use super::control::Answer;
use super::definitions::{Definitions, Reading};
use super::watched_files::{POLL_INTERVAL, WatchedFiles};

/// A request to reload the configuration.
pub(super) struct ReloadRequest {
    /// The reason for the reload, for the log.
    pub why: &'static str,
    /// Whether the operator has agreed to the removal of most pipelines.
    pub is_accepted: bool,
    /// Receives the result.
    pub answer: Option<oneshot::Sender<Answer>>,
}

/// The result of a reload.
pub(super) struct ReloadResult<D> {
    pub ask: ReloadRequest,
    pub result: Result<Reading<D>, String>,
}

/// Starts a thread that watches the definitions, and returns a channel for requests to reload them. Each result is sent to
/// `reread`. `places` is the state of the files before the definitions were first read.
///
/// # Errors
/// Returns an error if the thread can't be started.
pub(super) fn watch<D: Definitions>(
    mut definitions: D,
    mut places: WatchedFiles,
    reread: to_async::Sender<ReloadResult<D::Definition>>,
) -> io::Result<mpsc::Sender<ReloadRequest>> {
    let (asks, asked) = mpsc::channel();
    thread::Builder::new()
        .name("configuration".to_owned())
        .spawn(move || {
            loop {
                let by_itself = |why| ReloadRequest {
                    why,
                    is_accepted: false,
                    answer: None,
                };
                let ask = match asked.recv_timeout(POLL_INTERVAL) {
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
                // Captured before the files are read, so that no change is missed.
                places = WatchedFiles::capture(definitions.places());
                let result = definitions.read();
                if reread.blocking_send(ReloadResult { ask, result }).is_err() {
                    return;
                }
            }
        })?;
    Ok(asks)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;
    use std::time::{Duration, Instant};

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(60);

    /// A file that is being written while it is read for the first time.
    struct Written {
        file: PathBuf,
        reads: u32,
    }

    impl Definitions for Written {
        type Definition = ();

        fn read(&mut self) -> Result<Reading<()>, String> {
            self.reads += 1;
            let found = fs::read_to_string(&self.file).expect("a file");
            if self.reads == 1 {
                fs::write(&self.file, "written while it is read").expect("a file");
            }
            Err(found)
        }

        fn have_changed(&mut self) -> bool {
            false
        }

        fn places(&self) -> Vec<PathBuf> {
            vec![self.file.clone()]
        }
    }

    #[test]
    fn file_that_is_written_while_it_is_read_is_read_again() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("walpost.toml");
        fs::write(&file, "before").expect("a file");
        let places = WatchedFiles::capture(vec![file.clone()]);
        fs::write(&file, "changed").expect("a file");
        let (reread, mut results) = to_async::channel(1);
        let asks = watch(Written { file, reads: 0 }, places, reread).expect("a thread");
        let began = Instant::now();
        let mut next = || {
            loop {
                match results.try_recv() {
                    Ok(ReloadResult { ask, result }) => {
                        return (ask.why, result.expect_err("the text of the file"));
                    }
                    Err(_) => assert!(began.elapsed() < TIMEOUT, "it was not read"),
                }
                thread::sleep(POLL_INTERVAL / 100);
            }
        };
        assert_eq!(next(), ("a changed file", "changed".to_owned()));
        let again = "written while it is read".to_owned();
        assert_eq!(next(), ("a changed file", again.clone()));
        let ask = ReloadRequest {
            why: "an order",
            is_accepted: false,
            answer: None,
        };
        asks.send(ask).expect("the thread");
        assert_eq!(next(), ("an order", again));
        drop(asks);
        assert!(results.blocking_recv().is_none(), "the thread goes on");
    }
}
