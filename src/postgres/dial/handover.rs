//! Hands a session that is ready over to tokio-postgres, which can only begin with a startup of its
//! own.
//!
//! The startup message it writes goes nowhere, and it reads the answer that our own startup had: so
//! there is one authentication, one set of limits and one kind of error for both clients.

use std::collections::HashMap;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Buf, BufMut, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_postgres::config::SslMode;
use tokio_postgres::tls::NoTlsStream;
use tokio_postgres::{Client, Config, Connection, NoTls};

use super::error::{DialError, ServerError};
use super::socket::Socket;
use super::{Session, SqlConnection};

pub(super) async fn to_tokio_postgres(
    session: Session,
    user: &str,
) -> Result<(Client, SqlConnection), DialError> {
    let host = session.host;
    let mut answer = ready(&session.parameters, session.backend_pid, session.secret);
    answer.unsplit(session.buffer);
    let stream = Handover {
        socket: session.socket,
        answer,
        asked: false,
    };
    // The transport has its TLS already.
    let connected = Config::new()
        .user(user)
        .ssl_mode(SslMode::Disable)
        .connect_raw(stream, NoTls)
        .await;
    match connected {
        Ok((client, connection)) => Ok((client, SqlConnection(connection))),
        Err(error) => Err(match error.as_db_error() {
            Some(error) => DialError::Server {
                host,
                error: Box::new(ServerError::from(error)),
            },
            None => DialError::Protocol {
                host,
                what: error.to_string(),
            },
        }),
    }
}

/// What [`SqlConnection`] drives.
pub(super) type Driver = Connection<Handover, NoTlsStream>;

/// A socket behind a startup that has been performed.
pub(super) struct Handover {
    socket: Socket,
    /// What is read before the socket is.
    answer: BytesMut,
    /// Whether the startup message is complete: its sender has begun to wait for the answer.
    asked: bool,
}

/// The messages that end a startup, as the server sent them: AuthenticationOk, ParameterStatus,
/// BackendKeyData, ReadyForQuery.
fn ready(parameters: &HashMap<String, String>, backend_pid: i32, secret: i32) -> BytesMut {
    let mut messages = BytesMut::new();
    let mut put = |tag: u8, body: &[u8]| {
        messages.put_u8(tag);
        // Each was under the startup's limit when it arrived.
        messages.put_u32(u32::try_from(body.len() + 4).unwrap_or(u32::MAX));
        messages.put_slice(body);
    };
    put(b'R', &0_i32.to_be_bytes());
    for (name, value) in parameters {
        put(b'S', format!("{name}\0{value}\0").as_bytes());
    }
    put(
        b'K',
        &[backend_pid.to_be_bytes(), secret.to_be_bytes()].concat(),
    );
    put(b'Z', b"I");
    messages
}

impl AsyncRead for Handover {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.asked = true;
        if self.answer.is_empty() {
            return Pin::new(&mut self.socket).poll_read(cx, buf);
        }
        let count = self.answer.len().min(buf.remaining());
        buf.put_slice(&self.answer[..count]);
        self.answer.advance(count);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Handover {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        if !self.asked {
            return Poll::Ready(Ok(buf.len()));
        }
        Pin::new(&mut self.socket).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(cx)
    }
}
