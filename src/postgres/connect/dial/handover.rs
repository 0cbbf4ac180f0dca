//! Hands an established session over to tokio-postgres, which can use a session only if it performs
//! the startup itself.
//!
//! The startup message from tokio-postgres is discarded, and tokio-postgres is given a copy of the
//! server's reply to Walpost's own startup. In this way, SQL clients and replication connections
//! share the implementation of authentication, limits and errors. [`ResponseLimit`] limits the size
//! of everything that the server sends after the startup.
//!
//! If a result contains a type that is not built into PostgreSQL, tokio-postgres looks the type up.
//! The lookup's own result can again contain such a type, so a server could nest lookups until the
//! stack overflows. Walpost's statements use only built-in types, so lookups are rejected here.

use std::collections::HashMap;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, BufMut, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_postgres::config::SslMode;
use tokio_postgres::tls::NoTlsStream;
use tokio_postgres::{Client, Config, Connection, NoTls};

use super::bound::{ResponseLimit, SqlLimits};
use super::error::{DialError, ServerError};
use super::socket::Socket;
use super::{Session, SqlConnection};

/// A part of the statement with which tokio-postgres looks up a type.
const TYPE_LOOKUP: &[u8] =
    b"FROM pg_catalog.pg_type t\nLEFT OUTER JOIN pg_catalog.pg_range r ON r.rngtypid = t.oid\n";

pub(crate) async fn to_tokio_postgres(
    mut session: Session,
    user: &str,
    limits: SqlLimits,
) -> Result<(Client, SqlConnection), DialError> {
    let host = session.host;
    let mut stream = Handover {
        socket: session.socket,
        answer: startup_end(&session.parameters, session.backend_pid, session.secret),
        is_requested: false,
        bound: ResponseLimit::new(limits),
        is_finished: false,
    };
    stream.pass_on(&mut session.buffer);
    // tokio-postgres must not negotiate TLS, because the socket already uses TLS if required.
    let connected = Config::new()
        .user(user)
        .ssl_mode(SslMode::Disable)
        .connect_raw(stream, NoTls)
        .await;
    match connected {
        Ok((client, connection)) => Ok((client, SqlConnection::new(connection))),
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

/// The tokio-postgres connection inside [`SqlConnection`].
pub(crate) type Driver = Connection<Handover, NoTlsStream>;

/// A socket on which the startup has already been performed.
pub(crate) struct Handover {
    socket: Socket,
    /// Bytes to return to tokio-postgres before reading from the socket again.
    answer: BytesMut,
    /// Whether tokio-postgres has sent its complete startup message and is waiting for the reply.
    is_requested: bool,
    bound: ResponseLimit,
    /// Whether a message was rejected. If so, nothing more is read from the socket.
    is_finished: bool,
}

impl Handover {
    /// Passes bytes from the server to tokio-postgres, up to the first message that is rejected.
    fn pass_on(&mut self, bytes: &mut [u8]) {
        match self.bound.accept(bytes) {
            Ok(count) => self.answer.extend_from_slice(&bytes[..count]),
            Err((count, reason)) => {
                self.answer.extend_from_slice(&bytes[..count]);
                self.refuse(&reason);
            }
        }
    }

    /// Makes tokio-postgres read an ErrorResponse and then the end of the stream, so that the
    /// pending query fails with this error. A read error would reach only the task that polls the
    /// connection.
    fn refuse(&mut self, reason: &str) {
        // 54000 is program_limit_exceeded. The error is not temporary: a retry would fail in the
        // same way.
        let fields = format!("SFATAL\0VFATAL\0C54000\0M{reason}\0\0");
        write_message(&mut self.answer, b'E', fields.as_bytes());
        self.is_finished = true;
    }
}

fn write_message(messages: &mut BytesMut, tag: u8, body: &[u8]) {
    messages.put_u8(tag);
    // The length can't overflow: the body was either received during a startup, which limits its
    // size, or created by this module.
    messages.put_u32(u32::try_from(body.len() + 4).unwrap_or(u32::MAX));
    messages.put_slice(body);
}

/// Returns copies of the messages with which the server completed the startup: AuthenticationOk,
/// ParameterStatus, BackendKeyData, ReadyForQuery.
fn startup_end(parameters: &HashMap<String, String>, backend_pid: i32, secret: i32) -> BytesMut {
    let mut messages = BytesMut::new();
    write_message(&mut messages, b'R', &0_i32.to_be_bytes());
    for (name, value) in parameters {
        write_message(&mut messages, b'S', format!("{name}\0{value}\0").as_bytes());
    }
    let key = [backend_pid.to_be_bytes(), secret.to_be_bytes()].concat();
    write_message(&mut messages, b'K', &key);
    write_message(&mut messages, b'Z', b"I");
    messages
}

impl AsyncRead for Handover {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.is_requested = true;
        loop {
            if !self.answer.is_empty() {
                let count = self.answer.len().min(buf.remaining());
                buf.put_slice(&self.answer[..count]);
                self.answer.advance(count);
                return Poll::Ready(Ok(()));
            }
            if self.is_finished {
                return Poll::Ready(Ok(()));
            }
            if let Some(missing) = self.bound.missing_header_bytes() {
                let mut space = [0; 8];
                let mut header = ReadBuf::new(&mut space[..missing]);
                ready!(Pin::new(&mut self.socket).poll_read(cx, &mut header))?;
                if header.filled().is_empty() {
                    return Poll::Ready(Ok(()));
                }
                match self.bound.complete(header.filled()) {
                    Ok(Some(header)) => self.answer.extend_from_slice(&header),
                    Ok(None) => {}
                    Err(reason) => self.refuse(&reason),
                }
                continue;
            }
            let before = buf.filled().len();
            ready!(Pin::new(&mut self.socket).poll_read(cx, buf))?;
            if buf.filled().len() == before {
                return Poll::Ready(Ok(()));
            }
            let passed = match self.bound.accept(&mut buf.filled_mut()[before..]) {
                Ok(count) => count,
                Err((count, reason)) => {
                    self.refuse(&reason);
                    count
                }
            };
            buf.set_filled(before + passed);
            // Returning no bytes would signal the end of the stream.
            if passed > 0 {
                return Poll::Ready(Ok(()));
            }
        }
    }
}

impl AsyncWrite for Handover {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        if !self.is_requested {
            return Poll::Ready(Ok(buf.len()));
        }
        // tokio-postgres buffers each message as a whole, so the first write of a statement
        // contains the complete statement.
        if buf
            .windows(TYPE_LOOKUP.len())
            .any(|part| part == TYPE_LOOKUP)
        {
            self.refuse("the server's response contains a type that is not built into PostgreSQL");
            // Wake the task explicitly. It may be waiting for the socket, but nothing more is read
            // from the socket, so no I/O event would wake the task.
            cx.waker().wake_by_ref();
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
