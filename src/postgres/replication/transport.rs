//! A connection's socket. Reading from it can be handed over to another thread.

use std::io::{self, ErrorKind};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::postgres::connect::dial::Socket;

/// How long to wait before writing again if the socket's send buffer is full.
const SEND_RETRY_INTERVAL: Duration = Duration::from_millis(5);

pub(super) enum Transport {
    Whole(Socket),
    /// A handle that is used only for writing, while another thread reads from a second handle to
    /// the socket. The write handle is not registered with the runtime, because the runtime would
    /// then wake the task whenever data arrives.
    Written(socket2::Socket),
}

impl Transport {
    /// Returns a second handle to read from, or `None` if this is not a Unix-domain socket or a
    /// second handle already exists.
    ///
    /// # Errors
    /// Returns an error if the process or system is out of file descriptors.
    pub(super) fn handle(&self) -> io::Result<Option<socket2::Socket>> {
        match self {
            Self::Whole(socket) => socket.unix_handle(),
            Self::Written(_) => Ok(None),
        }
    }

    /// Calls [`Socket::unix_buffer`], or returns `None` while another thread reads from the socket.
    pub(super) fn unix_buffer(&self) -> Option<usize> {
        match self {
            Self::Whole(socket) => socket.unix_buffer(),
            Self::Written(_) => None,
        }
    }

    /// Calls [`Socket::shrink_receive_buffer`], unless another thread reads from the socket.
    pub(super) fn shrink_receive_buffer(&self, bytes: usize) -> bool {
        match self {
            Self::Whole(socket) => socket.shrink_receive_buffer(bytes),
            Self::Written(_) => false,
        }
    }

    /// Stops reading from this handle, so that another thread can read from a second handle.
    ///
    /// # Errors
    /// Returns an error if the process or system is out of file descriptors. In this case, reading
    /// must continue from this handle.
    pub(super) fn leave_reading(&mut self) -> io::Result<()> {
        if let Some(handle) = self.handle()? {
            *self = Self::Written(handle);
        }
        Ok(())
    }

    /// Resumes reading from this handle. The caller must ensure that no other handle is still used
    /// for reading.
    ///
    /// # Errors
    /// Returns an error if the process or system is out of file descriptors.
    pub(super) fn resume_reading(&mut self) -> io::Result<()> {
        if let Self::Written(socket) = self {
            *self = Self::Whole(Socket::from_unix_handle(socket.try_clone()?)?);
        }
        Ok(())
    }

    /// Waits until bytes are available, and reads them. Returns zero only at the end of the stream.
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
                            tokio::time::sleep(SEND_RETRY_INTERVAL).await;
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
