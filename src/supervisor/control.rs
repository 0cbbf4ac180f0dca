//! The control socket, through which `walpost pipeline` sends requests to the running process.
//!
//! The socket is a Unix-domain socket that only root and the user that Walpost runs as may use. The HTTP endpoint is
//! read-only. A connection carries one request and one answer, each a single line of JSON.

use std::fs::{self, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream as StdUnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::time::timeout;
use tracing::{debug, info, warn};

use crate::escape::shell_word;
use crate::trusted_path::{self, PathError};

/// Maximum length of a request, in bytes.
const REQUEST_BYTES_MAX: u64 = 64 << 10;
/// Maximum length of an answer, in bytes. An answer may list every pipeline.
const RESPONSE_BYTES_MAX: u64 = 64 << 20;
/// How long a client may take to send its request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of concurrent clients. Further clients wait.
const CLIENTS_MAX: usize = 16;
/// Delay before the next attempt to accept a connection, such as when the process has run out of file descriptors.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// A request from `walpost pipeline`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Request {
    /// Lists the pipelines.
    List,
    Stop(Vec<String>),
    Start(Vec<String>),
    Restart(Vec<String>),
    /// Reloads the configuration. With `accept`, even if that removes most pipelines.
    Reload {
        accept: bool,
    },
}

/// The outcome of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Answer {
    pub done: Vec<String>,
    /// What could not be done, and why.
    pub refused: Vec<String>,
}

/// A request, and the channel for its answer.
pub(super) type ControlRequest = (Request, oneshot::Sender<Answer>);

/// The control socket can't be created.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ControlError {
    /// Another process is listening on the socket.
    #[error(
        "control socket {}: another process has it. Give this one another with --control PATH (or WALPOST_CONTROL, or control at \
         the top of walpost.toml); \"off\" does without", .0.display()
    )]
    InUse(PathBuf),
    /// Other users could create the socket's file first, which would keep the process from starting.
    #[error("control socket {}: its folder is not used: {error}. Or name another path with --control", path.display())]
    Folder { path: PathBuf, error: PathError },
    /// A file of another type exists at this path.
    #[error("control socket {}: there is a file of another kind. Name another path with --control", .0.display())]
    Occupied(PathBuf),
    #[error("control socket {}: {error}. Its folder has to exist, and this user has to be allowed to write there, as in one of its own: {}", path.display(), make_folder(.path))]
    Other { path: PathBuf, error: io::Error },
}

/// Returns the command, to be run as root, that creates a directory for the socket. An existing directory is left to its owner.
fn make_folder(path: &Path) -> String {
    let folder = path.parent().unwrap_or(Path::new("/"));
    let folder = match folder.exists() {
        true => folder.join("walpost"),
        false => folder.to_owned(),
    };
    let user = rustix::process::geteuid().as_raw();
    let word = |path: &Path| shell_word(&path.display().to_string());
    let (folder_word, socket_word) = (word(&folder), word(&folder.join("control.sock")));
    format!("install -d -m 0700 -o {user} {folder_word}; then --control {socket_word}")
}

/// The control socket. Its file is removed when this value is dropped.
#[derive(Debug)]
pub(crate) struct Control {
    listener: std::os::unix::net::UnixListener,
    path: PathBuf,
    /// The device and inode of the socket's file. Once this process stops listening, the next process may replace the file with
    /// its own.
    file: (u64, u64),
}

impl Drop for Control {
    fn drop(&mut self) {
        if identity(&self.path).is_ok_and(|found| found == self.file) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    let found = fs::symlink_metadata(path)?;
    Ok((found.dev(), found.ino()))
}

/// Creates the socket, replacing one left behind by a process that no longer runs.
///
/// No other user may be able to create files in the folder: another user's process that listens at the path first would keep
/// this one from starting.
///
/// # Errors
/// Returns an error if the socket can't be created.
pub(crate) fn listen(path: &Path) -> Result<Control, ControlError> {
    let other = |error| ControlError::Other {
        path: path.to_owned(),
        error,
    };
    let folder = path.parent().filter(|folder| *folder != Path::new(""));
    match trusted_path::check_private_folder(folder.unwrap_or(Path::new("."))) {
        Err(PathError::Io { kind, reason }) => return Err(other(io::Error::new(kind, reason))),
        Err(error) => {
            return Err(ControlError::Folder {
                path: path.to_owned(),
                error,
            });
        }
        Ok(()) => {}
    }
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(other(error)),
        Ok(found) if !found.file_type().is_socket() => {
            return Err(ControlError::Occupied(path.to_owned()));
        }
        Ok(_) => match StdUnixStream::connect(path) {
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
                fs::remove_file(path).map_err(other)?;
            }
            Err(error) => return Err(other(error)),
            Ok(_) => return Err(ControlError::InUse(path.to_owned())),
        },
    }
    let listener = std::os::unix::net::UnixListener::bind(path).map_err(other)?;
    let control = Control {
        listener,
        path: path.to_owned(),
        file: identity(path).map_err(other)?,
    };
    // A client that connects before this line runs still has to pass the check of its uid.
    fs::set_permissions(path, Permissions::from_mode(0o600)).map_err(other)?;
    control.listener.set_nonblocking(true).map_err(other)?;
    Ok(control)
}

impl Control {
    /// Starts to accept requests, and sends them to `request_tx`.
    ///
    /// # Errors
    /// Returns an error if the socket can't be registered with the runtime.
    pub(super) fn serve(&self, request_tx: mpsc::Sender<ControlRequest>) -> io::Result<()> {
        let listener = UnixListener::from_std(self.listener.try_clone()?)?;
        info!("walpost pipeline is answered at {}", self.path.display());
        tokio::spawn(accept(listener, request_tx));
        Ok(())
    }
}

async fn accept(listener: UnixListener, request_tx: mpsc::Sender<ControlRequest>) {
    let room = Arc::new(Semaphore::new(CLIENTS_MAX));
    loop {
        let Ok(seat) = Arc::clone(&room).acquire_owned().await else {
            return;
        };
        match listener.accept().await {
            Ok((stream, _)) => {
                let request_tx = request_tx.clone();
                tokio::spawn(async move {
                    if let Err(error) = serve_client(stream, &request_tx).await {
                        debug!(%error, "control socket");
                    }
                    drop(seat);
                });
            }
            Err(error) => {
                debug!(%error, "control socket");
                tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
            }
        }
    }
}

async fn serve_client(
    mut stream: UnixStream,
    request_tx: &mpsc::Sender<ControlRequest>,
) -> io::Result<()> {
    let client = stream.peer_cred()?.uid();
    if !may_ask(client) {
        warn!(
            "control socket: uid {client} was refused: only root and the user of walpost may ask"
        );
        return Ok(());
    }
    let mut line = String::new();
    let request = async {
        let mut from = BufReader::new(&mut stream).take(REQUEST_BYTES_MAX);
        from.read_line(&mut line).await?;
        serde_json::from_str(&line).map_err(io::Error::from)
    };
    let request = timeout(REQUEST_TIMEOUT, request).await??;
    let (answer, answered) = oneshot::channel();
    // Sending fails only while the process is exiting.
    let _ = request_tx.send((request, answer)).await;
    if let Ok(answer) = answered.await {
        let mut line = serde_json::to_vec(&answer)?;
        line.push(b'\n');
        stream.write_all(&line).await?;
    }
    Ok(())
}

/// Returns whether `uid` is root or the user that this process runs as.
fn may_ask(uid: u32) -> bool {
    uid == 0 || uid == rustix::process::geteuid().as_raw()
}

/// Sends a request to the process that is listening on the socket, and waits for its answer.
///
/// # Errors
/// Returns an error if no process answers.
pub(crate) fn send_request(path: &Path, request: &Request) -> io::Result<Answer> {
    use std::io::{BufRead, BufReader, Read, Write};

    let mut stream = StdUnixStream::connect(path)?;
    let mut line = serde_json::to_vec(request)?;
    line.push(b'\n');
    stream.write_all(&line)?;
    let mut answer = String::new();
    BufReader::new(stream.take(RESPONSE_BYTES_MAX)).read_line(&mut answer)?;
    if answer.is_empty() {
        return Err(io::Error::other("it ended before it answered"));
    }
    Ok(serde_json::from_str(&answer)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn socket_is_for_its_user_alone_and_goes_with_the_process() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("control.sock");
        let control = listen(&path).expect("a socket");
        let mode = fs::metadata(&path).expect("a file").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let error = listen(&path).expect_err("another process has it");
        assert!(matches!(error, ControlError::InUse(_)), "{error}");
        drop(control);
        assert!(!path.exists());
    }

    #[test]
    fn socket_of_a_process_that_is_gone_is_replaced_and_nothing_else_is() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("control.sock");
        drop(std::os::unix::net::UnixListener::bind(&path).expect("a socket"));
        assert!(path.exists());
        drop(listen(&path).expect("a socket"));
        fs::write(&path, "mine").expect("a file");
        let error = listen(&path).expect_err("a file");
        assert!(matches!(error, ControlError::Occupied(_)), "{error}");
        assert_eq!(fs::read(&path).expect("a file"), b"mine");
        let error = listen(&folder.path().join("none/control.sock")).expect_err("no folder");
        assert!(error.to_string().contains("none/control.sock"), "{error}");
    }

    #[test]
    fn refuses_a_folder_in_which_others_can_create_files() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("control.sock");
        for mode in [0o1777, 0o777, 0o1775] {
            fs::set_permissions(folder.path(), Permissions::from_mode(mode)).expect("a mode");
            // As if another user had created the socket first.
            let first = std::os::unix::net::UnixListener::bind(&path).expect("a socket");
            let error = listen(&path).expect_err("others can create it");
            assert!(matches!(error, ControlError::Folder { .. }), "{error}");
            assert!(
                error.to_string().contains(&format!("{mode:04o}")),
                "{error}"
            );
            drop(first);
            fs::remove_file(&path).expect("removed");
        }
        fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).expect("a mode");
        drop(listen(&path).expect("a socket"));
    }

    #[test]
    fn socket_that_another_process_has_put_there_stays() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("control.sock");
        let ours = listen(&path).expect("a socket");
        fs::remove_file(&path).expect("removed");
        let theirs = listen(&path).expect("a socket");
        drop(ours);
        assert!(path.exists());
        drop(theirs);
        assert!(!path.exists());
    }

    #[test]
    fn only_root_and_our_own_user_may_ask() {
        let own = rustix::process::geteuid().as_raw();
        assert!(may_ask(0) && may_ask(own));
        assert!(!may_ask(own + 1));
    }
}
