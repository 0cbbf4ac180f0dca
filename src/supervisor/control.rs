//! The control socket: what `walpost pipeline` asks of the process that runs.
//!
//! A unix-domain socket that only root and the user that Walpost runs as may use. HTTP changes nothing. A request and its answer
//! are one line of JSON each, and a connection has one of each.

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

/// What a request may have, in bytes.
const REQUEST_BYTES: u64 = 64 << 10;
/// The longest answer, in bytes: it lists every pipeline.
const ANSWER_BYTES: u64 = 64 << 20;
/// How long a client may take for its request.
const PATIENCE: Duration = Duration::from_secs(5);
/// Clients at a time; the others wait.
const CLIENTS: usize = 16;
/// Until the next try, where the process has no file descriptor left.
const PAUSE: Duration = Duration::from_millis(100);

/// What is asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Request {
    /// Which pipelines there are.
    List,
    Stop(Vec<String>),
    Start(Vec<String>),
    Restart(Vec<String>),
    /// To read the configuration again; also where most pipelines would go.
    Reload {
        accept: bool,
    },
}

/// What was done, or is so.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Answer {
    pub done: Vec<String>,
    /// What was not done, and why.
    pub refused: Vec<String>,
}

/// A request, and where its answer goes.
pub(super) type Asked = (Request, oneshot::Sender<Answer>);

/// The socket can't be made.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ControlError {
    /// Another process answers there.
    #[error(
        "control socket {}: another process has it. Give this one another with --control PATH (or WALPOST_CONTROL, or control at \
         the top of walpost.toml); \"off\" does without", .0.display()
    )]
    InUse(PathBuf),
    /// Others could create the socket's file first, and the process would not start.
    #[error("control socket {}: its folder is not used: {error}. Or name another path with --control", path.display())]
    Folder { path: PathBuf, error: PathError },
    /// There is something else.
    #[error("control socket {}: there is a file of another kind. Name another path with --control", .0.display())]
    Occupied(PathBuf),
    #[error("control socket {}: {error}. Its folder has to exist, and this user has to be allowed to write there, as in one of its own: {}", path.display(), make_folder(.path))]
    Other { path: PathBuf, error: io::Error },
}

/// The command, run as root, that creates a folder for the socket. An existing one is left to its owner.
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

/// The socket, whose file goes when this is dropped.
#[derive(Debug)]
pub(crate) struct Control {
    listener: std::os::unix::net::UnixListener,
    path: PathBuf,
    /// Device and inode. When this process answers no more, the next one may have put its own there.
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

/// Makes the socket. One that a process has left which is gone is replaced. Its folder must be one in which no other user can
/// create files: a process of another user that listens at the path first would keep this one from starting.
///
/// # Errors
/// It can't be made.
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
    // Who connects before that is asked who they are all the same.
    fs::set_permissions(path, Permissions::from_mode(0o600)).map_err(other)?;
    control.listener.set_nonblocking(true).map_err(other)?;
    Ok(control)
}

impl Control {
    /// Passes requests on, from here on.
    ///
    /// # Errors
    /// The runtime takes no socket.
    pub(super) fn serve(&self, asked: mpsc::Sender<Asked>) -> io::Result<()> {
        let listener = UnixListener::from_std(self.listener.try_clone()?)?;
        info!("walpost pipeline is answered at {}", self.path.display());
        tokio::spawn(accept(listener, asked));
        Ok(())
    }
}

async fn accept(listener: UnixListener, asked: mpsc::Sender<Asked>) {
    let room = Arc::new(Semaphore::new(CLIENTS));
    loop {
        let Ok(seat) = Arc::clone(&room).acquire_owned().await else {
            return;
        };
        match listener.accept().await {
            Ok((stream, _)) => {
                let asked = asked.clone();
                tokio::spawn(async move {
                    if let Err(error) = answer(stream, &asked).await {
                        debug!(%error, "control socket");
                    }
                    drop(seat);
                });
            }
            Err(error) => {
                debug!(%error, "control socket");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

async fn answer(mut stream: UnixStream, asked: &mpsc::Sender<Asked>) -> io::Result<()> {
    let client = stream.peer_cred()?.uid();
    if !may_ask(client) {
        warn!(
            "control socket: uid {client} was refused: only root and the user of walpost may ask"
        );
        return Ok(());
    }
    let mut line = String::new();
    let request = async {
        let mut from = BufReader::new(&mut stream).take(REQUEST_BYTES);
        from.read_line(&mut line).await?;
        serde_json::from_str(&line).map_err(io::Error::from)
    };
    let request = timeout(PATIENCE, request).await??;
    let (answer, answered) = oneshot::channel();
    // Nobody takes it only when the process ends.
    let _ = asked.send((request, answer)).await;
    if let Ok(answer) = answered.await {
        let mut line = serde_json::to_vec(&answer)?;
        line.push(b'\n');
        stream.write_all(&line).await?;
    }
    Ok(())
}

/// Only root and the user that this process runs as.
fn may_ask(uid: u32) -> bool {
    uid == 0 || uid == rustix::process::geteuid().as_raw()
}

/// Asks the process that has the socket, and waits for its answer.
///
/// # Errors
/// Nobody answers there.
pub(crate) fn ask(path: &Path, request: &Request) -> io::Result<Answer> {
    use std::io::{BufRead, BufReader, Read, Write};

    let mut stream = StdUnixStream::connect(path)?;
    let mut line = serde_json::to_vec(request)?;
    line.push(b'\n');
    stream.write_all(&line)?;
    let mut answer = String::new();
    BufReader::new(stream.take(ANSWER_BYTES)).read_line(&mut answer)?;
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
            // As another user who was first.
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
