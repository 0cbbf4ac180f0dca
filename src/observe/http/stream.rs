//! A client's socket, with a timeout for receiving a response.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Sleep, sleep};

use super::connection_limit::ConnectionSlot;

/// How long a client may take to receive a response; equal to Prometheus' default scrape timeout.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(super) struct Stream {
    tcp: TcpStream,
    slot: Arc<ConnectionSlot>,
    /// The time by which the client must have received the response. Set when a write blocks, and
    /// cleared when all data has been written.
    deadline: Option<Pin<Box<Sleep>>>,
}

impl Stream {
    pub(super) fn new(tcp: TcpStream, slot: Arc<ConnectionSlot>) -> Self {
        Self {
            tcp,
            slot,
            deadline: None,
        }
    }

    /// Returns the result of a write, or an error if the client took too long.
    fn poll_deadline(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        if written.is_ready() {
            return written;
        }
        let deadline = self
            .deadline
            .get_or_insert_with(|| Box::pin(sleep(RESPONSE_TIMEOUT)));
        ready!(deadline.as_mut().poll(context));
        let reason = format!("the client did not receive the response within {RESPONSE_TIMEOUT:?}");
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, reason)))
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_read(context, buffer)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.tcp).poll_write(context, bytes);
        self.poll_deadline(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.tcp).poll_write_vectored(context, slices);
        self.poll_deadline(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.tcp.is_write_vectored()
    }

    /// Clears the deadline and marks all responses as received. hyper calls this method when all
    /// data has been written.
    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.deadline = None;
        self.slot.mark_responses_received();
        Pin::new(&mut self.tcp).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_shutdown(context)
    }
}
