//! Reloads the configuration when it changes or on request. Runs on its own thread, so that an
//! unresponsive file system or server does not block other tasks.

use std::io;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;

use tokio::sync::{mpsc as to_async, oneshot};

use super::control::Answer;
use super::definitions::{Definitions, Reading};
use super::watched_files::{POLL_INTERVAL, WatchedFiles};

/// A request to reload the configuration.
pub(super) struct ReloadRequest {
    /// The reason why the reload was requested, which is logged.
    pub cause: &'static str,
    /// Whether the operator has agreed to the removal of most of a source's pipelines.
    pub is_accepted: bool,
    /// The channel to which the result is sent, if a response is expected.
    pub answer: Option<oneshot::Sender<Answer>>,
}

/// A reload request and its result.
pub(super) struct ReloadResult<D> {
    pub request: ReloadRequest,
    pub result: Result<Reading<D>, String>,
}

/// Starts a thread that watches the definitions and reloads them when they change. Returns a
/// channel for requesting further reloads. Each result is sent to `result_tx`. `watched` is the
/// state of the files before the definitions were first read.
///
/// # Errors
/// Returns an error if the thread can't be started.
pub(super) fn watch<D: Definitions>(
    mut definitions: D,
    mut watched: WatchedFiles,
    result_tx: to_async::Sender<ReloadResult<D::Definition>>,
) -> io::Result<mpsc::Sender<ReloadRequest>> {
    let (request_tx, request_rx) = mpsc::channel();
    thread::Builder::new()
        .name("configuration".to_owned())
        .spawn(move || {
            loop {
                let automatic = |cause| ReloadRequest {
                    cause,
                    is_accepted: false,
                    answer: None,
                };
                let request = match request_rx.recv_timeout(POLL_INTERVAL) {
                    Ok(request) => request,
                    Err(RecvTimeoutError::Disconnected) => return,
                    Err(RecvTimeoutError::Timeout) if watched.have_changed() => {
                        automatic("a file change")
                    }
                    Err(RecvTimeoutError::Timeout) if definitions.have_changed() => {
                        automatic("a changed query result")
                    }
                    Err(RecvTimeoutError::Timeout) => continue,
                };
                // Capture the state before reading the files, so that no change is missed.
                watched = WatchedFiles::capture(definitions.places());
                let result = definitions.read();
                let sent = result_tx.blocking_send(ReloadResult { request, result });
                if sent.is_err() {
                    return;
                }
            }
        })?;
    Ok(request_tx)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;
    use std::time::{Duration, Instant};

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(60);

    /// A source of definitions that simulates a file being changed while Walpost reads it for the
    /// first time.
    struct ChangingFile {
        file: PathBuf,
        reads: u32,
    }

    impl Definitions for ChangingFile {
        type Definition = ();

        fn read(&mut self) -> Result<Reading<()>, String> {
            self.reads += 1;
            let found = fs::read_to_string(&self.file).expect("a file");
            if self.reads == 1 {
                fs::write(&self.file, "changed during the read").expect("a file");
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
    fn rereads_a_file_that_changes_while_being_read() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("walpost.toml");
        fs::write(&file, "before").expect("a file");
        let watched = WatchedFiles::capture(vec![file.clone()]);
        fs::write(&file, "changed").expect("a file");
        let (result_tx, mut result_rx) = to_async::channel(1);
        let definitions = ChangingFile { file, reads: 0 };
        let request_tx = watch(definitions, watched, result_tx).expect("a thread");
        let started_at = Instant::now();
        let mut next = || {
            loop {
                match result_rx.try_recv() {
                    Ok(ReloadResult { request, result }) => {
                        return (
                            request.cause,
                            result.expect_err("the source returns the text of the file"),
                        );
                    }
                    Err(_) => assert!(started_at.elapsed() < TIMEOUT, "the file was not read"),
                }
                thread::sleep(POLL_INTERVAL / 100);
            }
        };
        assert_eq!(next(), ("a file change", "changed".to_owned()));
        let text = "changed during the read".to_owned();
        assert_eq!(next(), ("a file change", text.clone()));
        let request = ReloadRequest {
            cause: "a request",
            is_accepted: false,
            answer: None,
        };
        request_tx.send(request).expect("a running thread");
        assert_eq!(next(), ("a request", text));
        drop(request_tx);
        assert!(result_rx.blocking_recv().is_none(), "the thread still runs");
    }
}
