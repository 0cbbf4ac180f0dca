//! The socket of a connection, which can be left to somebody else for reading.

use std::io::{self, ErrorKind};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::postgres::connect::dial::Socket;

/// A socket that is full is tried again after this time.
const FULL: Duration = Duration::from_millis(5);

pub(super) enum Transport {
    Whole(Socket),
    /// Somebody reads from another handle. This one is unknown to the runtime, which would be woken by all that comes.
    Written(socket2::Socket),
}

impl Transport {
    /// Another handle to read from; nothing but for a unix-domain socket.
    ///
    /// # Errors
    /// The system has no more handles.
    pub(super) fn handle(&self) -> io::Result<Option<socket2::Socket>> {
        match self {
            Self::Whole(socket) => socket.unix_handle(),
            // Somebody has one.
            Self::Written(_) => Ok(None),
        }
    }

    /// See [`Socket::unix_buffer`].
    pub(super) fn unix_buffer(&self) -> Option<usize> {
        match self {
            Self::Whole(socket) => socket.unix_buffer(),
            Self::Written(_) => None,
        }
    }

    /// See [`Socket::shrink_receive_buffer`].
    pub(super) fn shrink_receive_buffer(&self, bytes: usize) -> bool {
        match self {
            Self::Whole(socket) => socket.shrink_receive_buffer(bytes),
            Self::Written(_) => false,
        }
    }

    /// Leaves reading to whoever has another handle.
    ///
    /// # Errors
    /// The system has no more handles, and reading goes on here.
    pub(super) fn leave_reading(&mut self) -> io::Result<()> {
        if let Some(handle) = self.handle()? {
            *self = Self::Written(handle);
        }
        Ok(())
    }

    /// Nobody else reads any more.
    ///
    /// # Errors
    /// The system has no more handles.
    pub(super) fn resume_reading(&mut self) -> io::Result<()> {
        if let Self::Written(socket) = self {
            *self = Self::Whole(Socket::of_unix_handle(socket.try_clone()?)?);
        }
        Ok(())
    }

    /// Reads what has come, at least one byte, or none at the end.
    pub(super) async fn read(&mut self, room: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Whole(socket) => socket.read(room).await,
            Self::Written(_) => Err(ErrorKind::Unsupported.into()),
        }
    }

    pub(super) async fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Whole(socket) => {
                socket.write_all(bytes).await?;
                socket.flush().await
            }
            Self::Written(socket) => {
                let mut rest = bytes;
                while !rest.is_empty() {
                    match socket.send(rest) {
                        Ok(sent) => rest = &rest[sent..],
                        Err(error) if error.kind() == ErrorKind::WouldBlock => {
                            tokio::time::sleep(FULL).await;
                        }
                        Err(error) if error.kind() == ErrorKind::Interrupted => {}
                        Err(error) => return Err(error),
                    }
                }
                Ok(())
            }
        }
    }
}
