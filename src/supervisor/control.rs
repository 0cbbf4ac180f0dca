//! The control socket, through which `walpost pipeline` sends requests to the running process.
//!
//! The control socket is a Unix-domain socket that only root and the user running Walpost may use,
//! because requests can stop pipelines. (By contrast, the HTTP endpoint is read-only.) Each
//! connection carries one request and one response, each a single line of JSON.

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
/// Maximum length of a response, in bytes. Allows for a response that lists every pipeline.
const RESPONSE_BYTES_MAX: u64 = 64 << 20;
/// How long a client may take to send its request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a client may take to read its response. A client that is suspended, for example, would
/// otherwise keep other clients from connecting.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of clients served concurrently. Further clients have to wait.
const CLIENTS_MAX: usize = 16;
/// Delay before the next attempt to accept a connection after an error, for example when the
/// process has run out of file descriptors.
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
    /// Reloads the configuration. If `accept` is true, the reload may remove most of a source's
    /// pipelines.
    Reload {
        accept: bool,
    },
}

/// The outcome of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Answer {
    pub done: Vec<String>,
    /// The parts of the request that were not carried out, with the reasons.
    pub refused: Vec<String>,
}

/// A request, and the channel to which to send the response.
pub(super) type ControlRequest = (Request, oneshot::Sender<Answer>);

/// The reason the control socket can't be created.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ControlError {
    /// Another process is listening on the socket.
    #[error(
        "control socket {}: another process is using it. Set another path with --control PATH (or WALPOST_CONTROL, or control at \
         the top of walpost.toml); \"off\" disables the socket", .0.display()
    )]
    InUse(PathBuf),
    /// The folder's permissions allow other users to create the socket's file first, which would
    /// keep the process from starting.
    #[error(
        "control socket {}: the socket's folder can't be used: {error}. Alternatively, set another path with --control",
        path.display()
    )]
    Folder { path: PathBuf, error: PathError },
    /// The file at this path is not a socket.
    #[error("control socket {}: the existing file is not a socket. Set another path with --control", .0.display())]
    Occupied(PathBuf),
    #[error("control socket {}: {error}. The folder must exist and be writable by the user that runs walpost. To create a folder: {}", path.display(), make_folder(.path))]
    Other { path: PathBuf, error: io::Error },
}

/// Returns a command, to be run as root, that creates a folder for the socket. If the folder in
/// `path` already exists, the command creates a subfolder instead.
fn make_folder(path: &Path) -> String {
    let folder = path.parent().unwrap_or(Path::new("/"));
    let folder = match folder.exists() {
        true => folder.join("walpost"),
        false => folder.to_owned(),
    };
    let user = rustix::process::geteuid().as_raw();
    let word = |path: &Path| shell_word(&path.display().to_string());
    let (folder_word, socket_word) = (word(&folder), word(&folder.join("control.sock")));
    format!(
        "install -d -m 0700 -o {user} {folder_word}; then start Walpost with --control {socket_word}"
    )
}

/// The control socket. Dropping this value removes the socket's file.
#[derive(Debug)]
pub(crate) struct Control {
    listener: std::os::unix::net::UnixListener,
    path: PathBuf,
    /// The device and inode of the socket's file. They are compared with the current file before
    /// the file is removed, because another process may have replaced the file after this process
    /// stopped listening.
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

/// Creates the socket. Replaces a socket left behind by a process that is no longer running.
///
/// Other users must not be able to create files in the folder: if another user's process listened
/// at the path first, this process could not start.
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
    #[expect(clippy::disallowed_methods, reason = "the folder was checked")]
    let listener = std::os::unix::net::UnixListener::bind(path).map_err(other)?;
    let control = Control {
        listener,
        path: path.to_owned(),
        file: identity(path).map_err(other)?,
    };
    // Another user may connect before the mode is set, but is rejected later, when the client's
    // user ID is checked.
    fs::set_permissions(path, Permissions::from_mode(0o600)).map_err(other)?;
    control.listener.set_nonblocking(true).map_err(other)?;
    Ok(control)
}

impl Control {
    /// Starts accepting requests and forwarding them to `request_tx`.
    ///
    /// # Errors
    /// Returns an error if the socket can't be registered with the runtime.
    pub(super) fn serve(&self, request_tx: mpsc::Sender<ControlRequest>) -> io::Result<()> {
        let listener = UnixListener::from_std(self.listener.try_clone()?)?;
        info!(
            "listening for walpost pipeline commands at {}",
            self.path.display()
        );
        tokio::spawn(accept(listener, request_tx));
        Ok(())
    }
}

async fn accept(listener: UnixListener, request_tx: mpsc::Sender<ControlRequest>) {
    let clients = Arc::new(Semaphore::new(CLIENTS_MAX));
    loop {
        let Ok(permit) = Arc::clone(&clients).acquire_owned().await else {
            return;
        };
        match listener.accept().await {
            Ok((stream, _)) => {
                let request_tx = request_tx.clone();
                tokio::spawn(async move {
                    if let Err(error) = serve_client(stream, &request_tx).await {
                        debug!(%error, "control socket: request failed");
                    }
                    drop(permit);
                });
            }
            Err(error) => {
                debug!(%error, "control socket: failed to accept a connection");
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
    if !is_allowed(client) {
        warn!(
            "control socket: rejected a request from uid {client}; only root and the user that Walpost runs as are allowed"
        );
        return Ok(());
    }
    let mut line = String::new();
    let request = async {
        let mut reader = BufReader::new(&mut stream).take(REQUEST_BYTES_MAX);
        reader.read_line(&mut line).await?;
        serde_json::from_str(&line).map_err(io::Error::from)
    };
    let request = timeout(REQUEST_TIMEOUT, request).await??;
    let (answer_tx, answer_rx) = oneshot::channel();
    // Sending fails only while the process is exiting.
    let _ = request_tx.send((request, answer_tx)).await;
    if let Ok(answer) = answer_rx.await {
        let mut line = serde_json::to_vec(&answer)?;
        line.push(b'\n');
        timeout(RESPONSE_TIMEOUT, stream.write_all(&line)).await??;
    }
    Ok(())
}

/// Returns whether `uid` is root or the user running this process.
fn is_allowed(uid: u32) -> bool {
    uid == 0 || uid == rustix::process::geteuid().as_raw()
}

/// Sends a request to the process that is listening on the socket, and waits for the response.
///
/// # Errors
/// Returns an error if no process responds or the response is invalid.
pub(crate) fn send_request(path: &Path, request: &Request) -> io::Result<Answer> {
    use std::io::{BufRead, BufReader, Read, Write};

    let mut stream = StdUnixStream::connect(path)?;
    let mut line = serde_json::to_vec(request)?;
    line.push(b'\n');
    stream.write_all(&line)?;
    let mut answer = String::new();
    BufReader::new(stream.take(RESPONSE_BYTES_MAX)).read_line(&mut answer)?;
    if answer.is_empty() {
        return Err(io::Error::other(
            "the connection was closed without a response",
        ));
    }
    Ok(serde_json::from_str(&answer)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn restricts_the_socket_to_its_owner_and_removes_it_on_drop() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("control.sock");
        let control = listen(&path).expect("a socket");
        let mode = fs::metadata(&path).expect("a file").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let error = listen(&path).expect_err("the socket is in use");
        assert!(matches!(error, ControlError::InUse(_)), "{error}");
        drop(control);
        assert!(!path.exists());
    }

    #[test]
    fn replaces_a_stale_socket_but_no_other_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("control.sock");
        drop(std::os::unix::net::UnixListener::bind(&path).expect("a socket"));
        assert!(path.exists());
        drop(listen(&path).expect("a socket"));
        fs::write(&path, "text").expect("a file");
        let error = listen(&path).expect_err("a file");
        assert!(matches!(error, ControlError::Occupied(_)), "{error}");
        assert_eq!(fs::read(&path).expect("a file"), b"text");
        let error = listen(&folder.path().join("none/control.sock")).expect_err("no folder");
        assert!(error.to_string().contains("none/control.sock"), "{error}");
    }

    #[test]
    fn rejects_a_folder_in_which_other_users_can_create_files() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("control.sock");
        for mode in [0o1777, 0o777, 0o1775] {
            fs::set_permissions(folder.path(), Permissions::from_mode(mode)).expect("a mode");
            // Simulate a socket that another user created first.
            let first = std::os::unix::net::UnixListener::bind(&path).expect("a socket");
            let error = listen(&path).expect_err("other users can create the socket");
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
    fn keeps_a_socket_that_another_process_created() {
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

    #[tokio::test]
    async fn clients_that_do_not_read_their_response_do_not_block_others() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("control.sock");
        let control = listen(&path).expect("a socket");
        let (request_tx, mut request_rx) = mpsc::channel::<ControlRequest>(1);
        control.serve(request_tx).expect("a server");
        tokio::spawn(async move {
            while let Some((_, answer_tx)) = request_rx.recv().await {
                // The response is longer than the buffers of a socket.
                let done = vec!["x".repeat(4 << 20)];
                let answer = Answer {
                    done,
                    ..Answer::default()
                };
                let _ = answer_tx.send(answer);
            }
        });
        let request = async || {
            let mut stream = UnixStream::connect(&path).await.expect("a connection");
            stream.write_all(b"\"list\"\n").await.expect("a request");
            stream
        };
        let mut abandoned = Vec::new();
        for _ in 0..CLIENTS_MAX {
            let mut stream = request().await;
            stream.read_u8().await.expect("a response begins to arrive");
            abandoned.push(stream);
        }
        let mut response = Vec::new();
        let mut stream = request().await;
        let read = timeout(6 * RESPONSE_TIMEOUT, stream.read_to_end(&mut response));
        read.await.expect("a response").expect("a response");
        assert!(response.len() > 4 << 20);
        drop(abandoned);
    }

    #[test]
    fn control_socket_accepts_only_root_and_the_current_user() {
        let own = rustix::process::geteuid().as_raw();
        assert!(is_allowed(0) && is_allowed(own));
        assert!(!is_allowed(own + 1));
    }
}
