//! The replication connection. It runs commands, and then receives a stream and sends status
//! updates in `CopyBoth` mode.
//!
//! Spec: PostgreSQL 18, 54.4 "Streaming Replication Protocol". The released tokio-postgres does not
//! support `CopyBoth`, so this module implements it on top of the codecs of postgres-protocol.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::BytesMut;
use postgres_protocol::escape::escape_literal;
use postgres_protocol::message::backend::{Header, Message};
use postgres_protocol::message::frontend;
use tokio::time::{Instant, timeout};
use tokio_postgres::fallible_iterator::FallibleIterator;
use tracing::{debug, info, warn};

use super::connect::conninfo::Conninfo;
use super::connect::conninfo::notices::NoticeLimit;
use super::connect::dial;
use super::connect::dial::{DialError, ServerError};
use super::wire::frame::{BEGINNING_BYTES, Frame, FrameError, status_update};
use crate::delivery::checkpoint::Switch;
use crate::delivery::watermark::Confirmed;
use crate::model::lsn::Lsn;
use buffer::Buffer;
use reader::Reader;
use transport::Transport;

mod buffer;
mod preview;
mod reader;
mod transport;

/// Required size of a Unix-domain socket's buffer. With a smaller buffer, the walsender stalls
/// while Walpost decodes rows and sends them to Kafka.
pub(crate) const WANTED_BUFFER_BYTES: usize = 4 << 20;
/// Size of the receive buffer for a TCP connection to a server on the same host. The buffer is
/// smaller than one read (`READ_BYTES`), but large enough for the rows that arrive in about a
/// millisecond.
const RECEIVE_BUFFER_BYTES: usize = 96 << 10;
/// Maximum length of a reply to a command. PostgreSQL's replies are far shorter.
const ANSWER_BYTES_MAX: usize = 1 << 20;
/// Maximum length of a logged notice.
const NOTICE_CHARS_MAX: usize = 1000;
/// How long to wait for a server to end `CopyBoth`. The server may be in the middle of sending a
/// large transaction.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// SQLSTATE of the warning `skipped loading publication` in PostgreSQL 18.
const PUBLICATION_SKIPPED: &str = "55000";
/// SQLSTATE of the error that the server reports for a replication command in a session that is not
/// in replication mode.
const SYNTAX_ERROR: &str = "42601";
/// A query that returns the values of [`ServerProcess`].
pub(crate) const SERVER_PROCESS_QUERY: &str =
    "SELECT pg_catalog.pg_backend_pid(), extract(epoch FROM pg_catalog.pg_postmaster_start_time())";
const NO_REPLICATION_HINT: &str = "This is not a replication session: a connection pooler such as PgCat or Supavisor is between Walpost and PostgreSQL, and does not \
     forward the replication parameter. Connect directly to PostgreSQL's address and port";

/// A failure of a replication connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectionError {
    /// The connection could not be established.
    #[error(transparent)]
    Dial(#[from] DialError),
    /// The server ended the connection with an error, or rejected a command.
    #[error("PostgreSQL: {0}")]
    Server(Box<ServerError>),
    /// The publication did not exist when the rows were committed. PostgreSQL 18 skips such rows
    /// instead of reporting an error.
    #[error("PostgreSQL skips rows: {0}")]
    PublicationSkipped(Box<ServerError>),
    /// The connection was lost.
    #[error("connection to PostgreSQL lost: {0}")]
    Io(#[from] std::io::Error),
    /// The server closed the connection.
    #[error("PostgreSQL closed the connection")]
    Closed,
    /// Nothing was received within the time limit although a reply had been requested.
    #[error("no response from PostgreSQL for {0:?} (link_timeout), although a reply was requested")]
    Silent(Duration),
    /// A message from the server exceeds the size limit.
    #[error("PostgreSQL sent a message of {bytes} bytes; at most {max} are accepted")]
    TooLarge {
        /// The length of the message.
        bytes: usize,
        /// The limit.
        max: usize,
    },
    /// The server sent data that is not a valid streaming replication frame.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The server sent a message that the protocol does not allow at this point.
    #[error("PostgreSQL protocol: {0}")]
    Protocol(String),
}

/// Why the server can't send a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnsendableCause {
    /// A value has no equivalent in UTF-8.
    Encoding,
    /// The row exceeds the size that PostgreSQL can allocate for a message (1 GB).
    Size,
    /// A value can't be converted to text, or the publication's row filter fails for the row.
    Value,
}

impl ConnectionError {
    /// Returns the cause if the server reported that it can't send a row. Meaningful only while the
    /// server is sending rows: at other times, the same error can have a different cause.
    #[must_use]
    pub(crate) fn unsendable_cause(&self) -> Option<UnsendableCause> {
        let Self::Server(error) = self else {
            return None;
        };
        let is_allocation = || {
            let allocators = ["palloc", "repalloc", "MemoryContext"];
            allocators
                .iter()
                .any(|name| error.routine.starts_with(name))
        };
        match error.code.as_str() {
            // untranslatable_character, character_not_in_repertoire
            "22P05" | "22021" => Some(UnsendableCause::Encoding),
            // program_limit_exceeded
            "54000" => Some(UnsendableCause::Size),
            // internal_error: "invalid memory alloc request size". When memory runs out, the code
            // is 53200 instead.
            "XX000" if is_allocation() => Some(UnsendableCause::Size),
            // Data exceptions, and limits that a single value can exceed, such as the stack depth.
            code if code.starts_with("22") || code.starts_with("54") => {
                Some(UnsendableCause::Value)
            }
            _ => None,
        }
    }

    /// Returns the error that the server reported, if any. If several connection attempts failed,
    /// considers only the failure that is most likely to be temporary.
    pub fn server_mut(&mut self) -> Option<&mut ServerError> {
        match self {
            Self::Server(error) => Some(error),
            Self::Dial(error) => error.server_mut(),
            _ => None,
        }
    }
}

/// The reply to `IDENTIFY_SYSTEM`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The cluster's system identifier. Standbys and restored copies have the same identifier.
    pub system_id: String,
    /// The current timeline ID, which increases with each promotion.
    pub timeline: u32,
    /// The end of the WAL that has been flushed to disk.
    pub flushed: Lsn,
}

/// The server process that serves a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerProcess {
    /// The process ID.
    pub pid: i32,
    /// `pg_postmaster_start_time()` of the process's server, in seconds since 1970.
    pub postmaster_start: String,
}

/// A message that the server sends during `COPY ... TO STDOUT`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyOut<'c> {
    /// A row in the format that the COPY command specifies.
    Row(&'c [u8]),
    /// The end of the copy.
    End,
}

/// A connection that uses the walsender protocol.
pub struct Connection {
    transport: Transport,
    ahead: Ahead,
    buffer: Buffer,
    /// The length of the most recently returned message, or of an incomplete message; 0 if there is
    /// no such message.
    wanted: usize,
    /// The total length of an oversized message if only the beginning of the message was returned;
    /// otherwise 0. Consuming the message skips its remaining bytes.
    large: usize,
    /// Number of bytes of an oversized message that remain to be skipped.
    skipped: usize,
    last_received_at: Instant,
    /// Number of bytes read since the last call to [`Connection::take_received_bytes`].
    received: usize,
    row_bytes_max: usize,
    /// Whether the server converts text to UTF-8.
    converts: bool,
    /// Whether the server has aborted the stream. Data that the server sent before it aborted the
    /// stream can still be received.
    is_aborted: bool,
    notices: Arc<NoticeLimit>,
    /// The host that accepted the connection, for logs.
    pub host: String,
}

/// The state of the thread that reads ahead.
enum Ahead {
    Untried,
    Never,
    Reader {
        reader: Reader,
        /// When reading ahead was last requested.
        wanted: Instant,
    },
}

/// How long the thread is kept after the last request to read ahead. The thread is then stopped to
/// free its memory.
const READER_IDLE_TIMEOUT: Duration = Duration::from_secs(5);

/// Session settings that determine how values are formatted as text.
pub(crate) const TEXT_FORMAT_SETTINGS: [(&str, &str); 5] = [
    ("datestyle", "ISO"),
    ("intervalstyle", "postgres"),
    ("extra_float_digits", "3"),
    ("bytea_output", "hex"),
    ("timezone", "UTC"),
];

/// Returns the session settings for a replication connection: the text format of values, which
/// notices the server sends, and the timeout after which the server closes a dead connection.
fn startup(link_timeout: Duration) -> Vec<(&'static str, String)> {
    TEXT_FORMAT_SETTINGS
        .into_iter()
        // At the level `warning`, the server sends the warning about a skipped publication but not
        // notices.
        .chain([("client_min_messages", "warning")])
        .map(|(name, value)| (name, value.to_owned()))
        .chain([("wal_sender_timeout", link_timeout.as_millis().to_string())])
        .collect()
}

impl Connection {
    /// Opens a connection for logical replication. The server closes the connection if it receives
    /// nothing for `link_timeout`. Messages larger than `row_bytes_max` are rejected.
    ///
    /// # Errors
    /// Returns an error if no host in `conninfo` accepts the connection.
    pub async fn open(
        conninfo: &Conninfo,
        link_timeout: Duration,
        row_bytes_max: usize,
    ) -> Result<Self, ConnectionError> {
        let startup = startup(link_timeout);
        let startup: Vec<_> = startup
            .iter()
            .map(|(name, value)| (*name, value.as_str()))
            .collect();
        let session = dial::replication(conninfo, &startup).await?;
        // A database with the encoding SQL_ASCII can contain invalid text. Unless conversion is
        // disabled, the server validates the text against client_encoding, and aborts the stream if
        // a row contains invalid text.
        let is_unchecked = session
            .parameters
            .get("server_encoding")
            .is_some_and(|encoding| encoding == "SQL_ASCII");
        let mut connection = Self::from_session(session, row_bytes_max);
        connection.notices = Arc::clone(&conninfo.notices);
        if is_unchecked {
            connection.disable_conversion().await?;
        }
        Ok(connection)
    }

    /// Makes the server send text in the database encoding, without validating it.
    ///
    /// # Errors
    /// Returns an error if the connection fails.
    pub(crate) async fn disable_conversion(&mut self) -> Result<(), ConnectionError> {
        // With the client encoding SQL_ASCII, the server does not convert text (PostgreSQL 18,
        // 23.3.3).
        self.command("SELECT pg_catalog.set_config('client_encoding', 'SQL_ASCII', false)")
            .await?;
        self.converts = false;
        Ok(())
    }

    /// Returns whether text from the server may be invalid UTF-8.
    #[must_use]
    pub fn has_unchecked_texts(&self) -> bool {
        !self.converts
    }

    /// Creates a connection that uses an established session.
    #[must_use]
    pub fn from_session(session: dial::Session, row_bytes_max: usize) -> Self {
        Self {
            transport: Transport::Whole(session.socket),
            ahead: Ahead::Untried,
            buffer: Buffer::from_unread(&session.buffer),
            wanted: 0,
            large: 0,
            skipped: 0,
            last_received_at: Instant::now(),
            received: 0,
            row_bytes_max,
            converts: true,
            is_aborted: false,
            notices: Arc::default(),
            host: session.host,
        }
    }

    /// Returns the size of a Unix-domain socket's buffer in bytes. Returns `None` for TCP, or while
    /// another thread reads from the socket.
    #[must_use]
    pub fn unix_buffer(&self) -> Option<usize> {
        self.transport.unix_buffer()
    }

    /// Shrinks the receive buffer of a TCP connection to a server on the same host, unless the
    /// connection uses TLS. Returns whether the buffer was shrunk.
    ///
    /// The walsender calls `send` once per row. While the receive buffer has space, every call
    /// transfers a separate segment through the kernel, which takes twice as long as decoding a
    /// row. While the receive buffer is full, rows accumulate in the walsender's send buffer, and
    /// many are transferred at once when Walpost reads.
    pub fn shrink_receive_buffer(&self) -> bool {
        self.transport.shrink_receive_buffer(RECEIVE_BUFFER_BYTES)
    }

    /// Runs `IDENTIFY_SYSTEM`.
    ///
    /// # Errors
    /// Returns an error if the connection fails or the reply can't be parsed.
    pub async fn identify(&mut self) -> Result<Identity, ConnectionError> {
        let mut row = self.command("IDENTIFY_SYSTEM").await;
        if let Err(ConnectionError::Server(error)) = &mut row
            && error.code == SYNTAX_ERROR
        {
            // A connection pooler removed the replication parameter from the startup message.
            error.hint = Some(NO_REPLICATION_HINT.to_owned());
        }
        let row = row?;
        let field = |at: usize| row.get(at).cloned().flatten();
        let identity = || {
            Some(Identity {
                system_id: field(0)?,
                timeline: field(1)?.parse().ok()?,
                flushed: field(2)?.parse().ok()?,
            })
        };
        identity().ok_or_else(|| {
            ConnectionError::Protocol(format!("unexpected reply to IDENTIFY_SYSTEM: {row:?}"))
        })
    }

    /// Queries which server process serves this connection. The PID differs from the one received
    /// during startup if a connection pooler sent its own PID.
    ///
    /// # Errors
    /// Returns an error if the connection fails or the reply can't be parsed.
    pub async fn server_process(&mut self) -> Result<ServerProcess, ConnectionError> {
        let query = SERVER_PROCESS_QUERY;
        let row = self.command(query).await?;
        let field = |at: usize| row.get(at).cloned().flatten();
        let process = || {
            Some(ServerProcess {
                pid: field(0)?.parse().ok()?,
                postmaster_start: field(1)?,
            })
        };
        process().ok_or_else(|| {
            ConnectionError::Protocol(format!("unexpected reply to {query}: {row:?}"))
        })
    }

    /// Runs `TIMELINE_HISTORY`, and returns the ancestors of `timeline`, each with the LSN at which
    /// it ended.
    ///
    /// # Errors
    /// Returns an error if the connection fails or the reply can't be parsed.
    pub async fn timeline_history(
        &mut self,
        timeline: u32,
    ) -> Result<Vec<Switch>, ConnectionError> {
        let command = format!("TIMELINE_HISTORY {timeline}");
        let row = self.command(&command).await?;
        let text = row.get(1).cloned().flatten().unwrap_or_default();
        text.lines()
            .map(|line| line.split('#').next().unwrap_or_default().trim())
            .filter(|line| !line.is_empty())
            .map(|line| {
                let mut fields = line.split_whitespace();
                let switch = Switch {
                    timeline: fields.next()?.parse().ok()?,
                    at: fields.next()?.parse().ok()?,
                };
                Some(switch)
            })
            .collect::<Option<_>>()
            .ok_or_else(|| {
                ConnectionError::Protocol(format!("unexpected reply to {command}: {row:?}"))
            })
    }

    /// Runs `START_REPLICATION`. The stream starts at `from` or at the slot's confirmed position,
    /// whichever is later, and contains the transactions whose commit record is at or after the
    /// start. Callers can set `from` to 0/0 to start at the confirmed position, unless events after
    /// the confirmed position are known to have been delivered. If `messages` is true, the stream
    /// includes logical decoding messages.
    ///
    /// # Errors
    /// Returns an error if the server rejects the command or the connection fails.
    pub async fn start(
        &mut self,
        slot: &str,
        from: Lsn,
        publication: &str,
        messages: bool,
    ) -> Result<(), ConnectionError> {
        // The value of `publication_names` is a literal that contains a list of identifiers.
        let publication = postgres_protocol::escape::escape_identifier(publication);
        let command = format!(
            "START_REPLICATION SLOT \"{slot}\" LOGICAL {from} (proto_version '1', publication_names {}{})",
            escape_literal(&publication).trim_start(),
            if messages { ", messages 'true'" } else { "" },
        );
        self.send_query(&command).await?;
        loop {
            self.await_message(ANSWER_BYTES_MAX).await?;
            if self.buffer.unread()[0] == b'W' {
                // The message is a CopyBothResponse, whose column formats don't apply to pgoutput.
                self.buffer.consume(self.wanted);
                return Ok(());
            }
            match self.parse_message()? {
                Message::ErrorResponse(body) => return Err(server_error(body.fields())),
                Message::NoticeResponse(body) => self.notice(body.fields())?,
                Message::ParameterStatus(_) => {}
                _ => return Err(unexpected("START_REPLICATION")),
            }
        }
    }

    /// Runs a statement and returns the first row of its result.
    ///
    /// # Errors
    /// Returns an error if the server rejects the statement or the connection fails.
    pub async fn query(&mut self, statement: &str) -> Result<Vec<Option<String>>, ConnectionError> {
        self.command(statement).await
    }

    /// Starts `COPY ... TO STDOUT`. To read the rows, call [`Connection::peek_row`].
    ///
    /// # Errors
    /// Returns an error if the server rejects the statement or the connection fails.
    pub async fn copy_out(&mut self, statement: &str) -> Result<(), ConnectionError> {
        self.send_query(statement).await?;
        loop {
            self.await_message(ANSWER_BYTES_MAX).await?;
            match self.parse_message()? {
                Message::CopyOutResponse(_) => return Ok(()),
                Message::ErrorResponse(body) => return Err(server_error(body.fields())),
                Message::NoticeResponse(body) => self.notice(body.fields())?,
                Message::ParameterStatus(_) => {}
                _ => return Err(unexpected("COPY")),
            }
        }
    }

    /// Returns the next row of a `COPY`, or [`CopyOut::End`] after the last row. Returns `None` if
    /// the buffer does not contain the complete message yet. Returns the same row again until
    /// [`Connection::consume`] is called.
    ///
    /// # Errors
    /// Returns an error if the server aborted the copy or sent an unexpected message.
    pub fn peek_row(&mut self) -> Result<Option<CopyOut<'_>>, ConnectionError> {
        loop {
            let Some(len) = self.complete(self.row_bytes_max)? else {
                return Ok(None);
            };
            self.wanted = len;
            if self.buffer.unread()[0] == b'd' {
                return Ok(Some(CopyOut::Row(&self.buffer.unread()[5..len])));
            }
            match self.parse_message()? {
                Message::ReadyForQuery(_) => {
                    self.wanted = 0;
                    return Ok(Some(CopyOut::End));
                }
                Message::CopyDone | Message::CommandComplete(_) | Message::ParameterStatus(_) => {}
                Message::NoticeResponse(body) => self.notice(body.fields())?,
                Message::ErrorResponse(body) => return Err(server_error(body.fields())),
                _ => return Err(unexpected("COPY")),
            }
        }
    }

    /// Returns the next frame, or `None` if the buffer does not contain the complete frame yet.
    /// Returns the same frame again until [`Connection::consume`] is called.
    ///
    /// # Errors
    /// Returns an error if the server ended the stream or sent an unexpected message.
    pub fn peek(&mut self) -> Result<Option<Frame<'_>>, ConnectionError> {
        loop {
            let complete = match self.complete(self.row_bytes_max) {
                Err(ConnectionError::TooLarge { bytes, max }) => return self.large(bytes, max),
                complete => complete?,
            };
            let Some(len) = complete else {
                return Ok(None);
            };
            self.wanted = len;
            if self.buffer.unread()[0] == b'd' {
                return Ok(Some(Frame::decode(&self.buffer.unread()[5..len])?));
            }
            match self.parse_message()? {
                Message::NoticeResponse(body) => self.notice(body.fields())?,
                Message::ParameterStatus(_) => {}
                Message::ErrorResponse(body) => return Err(server_error(body.fields())),
                // When the server shuts down, it ends the stream by completing the command.
                Message::CopyDone | Message::CommandComplete(_) => {
                    return Err(ConnectionError::Closed);
                }
                _ => return Err(unexpected("CopyBoth")),
            }
        }
    }

    /// Returns the beginning of a frame that exceeds the size limit, or an error if frames of this
    /// type must not be skipped.
    fn large(&mut self, bytes: usize, max: usize) -> Result<Option<Frame<'_>>, ConnectionError> {
        // Only the first `wanted` bytes of the message are read.
        let wanted = max.min(5 + BEGINNING_BYTES);
        let unread = self.buffer.unread();
        let beginning = &unread[..unread.len().min(wanted)];
        if beginning[0] != b'd' || !Frame::may_be_large(beginning.get(5..).unwrap_or_default()) {
            return Err(ConnectionError::TooLarge { bytes, max });
        }
        if beginning.len() < wanted {
            self.wanted = wanted;
            return Ok(None);
        }
        self.large = bytes;
        Ok(Some(Frame::large(&beginning[5..], bytes, max)?))
    }

    /// Removes the most recently returned frame or row from the buffer.
    pub fn consume(&mut self) {
        self.buffer.consume(std::mem::take(&mut self.wanted));
        self.skipped += std::mem::take(&mut self.large);
    }

    /// Returns the bodies of the complete `CopyData` messages in the buffer, starting with the
    /// message that was returned last and stopping at the first message of a different type.
    pub fn buffered(&self) -> impl Iterator<Item = &[u8]> {
        let mut rest = self.buffer.unread();
        std::iter::from_fn(move || {
            let header = Header::parse(rest).ok().flatten()?;
            let len = usize::try_from(header.len()).ok()? + 1;
            let (message, following) = rest.split_at_checked(len)?;
            rest = following;
            (header.tag() == b'd').then(|| &message[5..])
        })
    }

    /// Waits until data is available, and reads it into the buffer. Cancel safe.
    ///
    /// # Errors
    /// Returns an error if the connection is lost or closed.
    pub async fn receive(&mut self) -> Result<(), ConnectionError> {
        let missing = self.wanted.saturating_sub(self.unread());
        let read = match self.next_chunk().await? {
            Some(chunk) => {
                let read = chunk.unread().len();
                let done = self.buffer.append_chunk(chunk, missing);
                if let Ahead::Reader { reader, .. } = &self.ahead {
                    reader.reuse(done);
                }
                read
            }
            None => {
                let read = self.transport.read(self.buffer.space_for(missing)).await?;
                self.buffer.filled(read);
                read
            }
        };
        if read == 0 {
            return Err(ConnectionError::Closed);
        }
        self.received += read;
        self.last_received_at = Instant::now();
        Ok(())
    }

    /// Returns the next bytes that the thread has read ahead, or `None` if the thread is not
    /// reading.
    async fn next_chunk(&mut self) -> Result<Option<Buffer>, ConnectionError> {
        if let (Transport::Written(_), Ahead::Reader { reader, .. }) =
            (&self.transport, &self.ahead)
        {
            if let Some(chunk) = reader.next_chunk().await? {
                return Ok(Some(chunk));
            }
            self.transport.resume_reading()?;
        }
        Ok(None)
    }

    /// Starts a dedicated thread, if necessary, and makes it read from the socket, up to about
    /// `bytes_max` bytes ahead of [`Connection::receive`]. The thread stops reading when no data
    /// arrives for a moment or [`Connection::read_directly`] is called. Returns whether the thread
    /// is reading. Only Unix-domain sockets with a buffer smaller than [`WANTED_BUFFER_BYTES`]
    /// benefit from reading ahead, so the function returns false for all other sockets, and also if
    /// the thread can't be started.
    pub fn read_ahead(&mut self, bytes_max: usize, now: Instant) -> bool {
        if let Ahead::Untried = self.ahead {
            let is_small = self
                .unix_buffer()
                .is_some_and(|bytes| bytes < WANTED_BUFFER_BYTES);
            let handle = if is_small {
                self.transport.handle()
            } else {
                Ok(None)
            };
            let reader = handle.and_then(|handle| {
                let reader = handle.map(|handle| Reader::start(handle, bytes_max));
                reader.transpose()
            });
            self.ahead = match reader {
                Ok(reader) => reader.map_or(Ahead::Never, |reader| Ahead::Reader {
                    reader,
                    wanted: now,
                }),
                Err(error) => {
                    debug!(%error, "failed to start reading ahead");
                    Ahead::Never
                }
            };
        }
        let Ahead::Reader { reader, wanted } = &mut self.ahead else {
            return false;
        };
        *wanted = now;
        if matches!(self.transport, Transport::Written(_)) {
            reader.cancel_finish();
        } else if self.transport.leave_reading().is_ok() {
            reader.read();
        } else {
            return false;
        }
        true
    }

    /// Makes the thread stop reading ahead as soon as the socket is empty. Terminates the thread if
    /// reading ahead has not been requested for [`READER_IDLE_TIMEOUT`].
    pub fn read_directly(&mut self, now: Instant) {
        let Ahead::Reader { reader, wanted } = &self.ahead else {
            return;
        };
        if matches!(self.transport, Transport::Written(_)) {
            reader.finish();
        } else if now.saturating_duration_since(*wanted) > READER_IDLE_TIMEOUT {
            self.ahead = Ahead::Untried;
        }
    }

    /// Returns the number of bytes read since the last call.
    pub fn take_received_bytes(&mut self) -> u64 {
        std::mem::take(&mut self.received) as u64
    }

    /// Returns the number of bytes that were read but not yet consumed.
    #[must_use]
    pub fn unread(&self) -> usize {
        self.buffer.unread().len()
    }

    /// Resets [`Connection::last_received_at`] to the current time. Must be called while Walpost
    /// intentionally does not read, so that the connection is not considered broken.
    pub fn pause(&mut self) {
        self.last_received_at = Instant::now();
    }

    /// Returns when data was last received.
    #[must_use]
    pub fn last_received_at(&self) -> Instant {
        self.last_received_at
    }

    /// Records that the server has aborted the stream. From then on, no status updates are sent,
    /// because an error while sending would hide the data and the error that the server has sent.
    pub(crate) fn record_abort(&mut self) {
        self.is_aborted = true;
    }

    /// Returns whether [`Connection::record_abort`] was called.
    #[must_use]
    pub(crate) fn is_aborted(&self) -> bool {
        self.is_aborted
    }

    /// Reports the durable position to the server, and requests a reply if `reply_requested` is
    /// true. Does nothing if the server has aborted the stream.
    ///
    /// # Errors
    /// Returns an error if the connection was lost, or if the server does not read the message
    /// within `limit`.
    pub async fn confirm(
        &mut self,
        upto: Confirmed,
        reply_requested: bool,
        limit: Duration,
    ) -> Result<(), ConnectionError> {
        if self.is_aborted {
            return Ok(());
        }
        let update = status_update(upto.lsn(), clock_micros(), reply_requested);
        match timeout(limit, self.write(&update)).await {
            Ok(written) => written,
            Err(_) => Err(ConnectionError::Silent(limit)),
        }
    }

    /// Ends the stream and the session. The server processes all status updates before it replies,
    /// so the slot is at the last confirmed position when this function returns.
    ///
    /// # Errors
    /// Returns an error if the connection fails or the server takes too long. In that case, the
    /// server may not have processed the last status updates.
    pub async fn close(mut self) -> Result<(), ConnectionError> {
        let close = async {
            let mut message = BytesMut::new();
            if self.is_aborted {
                frontend::terminate(&mut message);
                return self.write(&message).await;
            }
            frontend::copy_done(&mut message);
            self.write(&message).await?;
            loop {
                match self.await_message(self.row_bytes_max).await {
                    // Rows that the server is still sending are discarded, even if they are too
                    // large.
                    Err(ConnectionError::TooLarge { bytes, .. })
                        if self.buffer.unread()[0] == b'd' =>
                    {
                        self.skipped = bytes;
                        continue;
                    }
                    awaited => awaited?,
                }
                if self.buffer.unread()[0] == b'd' {
                    self.buffer.consume(self.wanted);
                    continue;
                }
                match self.parse_message()? {
                    Message::CopyDone => {}
                    Message::CommandComplete(_) => break,
                    Message::ErrorResponse(body) => return Err(server_error(body.fields())),
                    _ => {}
                }
            }
            message.clear();
            frontend::terminate(&mut message);
            self.write(&message).await
        };
        timeout(CLOSE_TIMEOUT, close)
            .await
            .map_err(|_| ConnectionError::Silent(CLOSE_TIMEOUT))?
    }

    /// Runs a command and returns the first row of its reply.
    async fn command(&mut self, command: &str) -> Result<Vec<Option<String>>, ConnectionError> {
        self.send_query(command).await?;
        let mut row = Vec::new();
        let mut failure = None;
        loop {
            self.await_message(ANSWER_BYTES_MAX).await?;
            match self.parse_message()? {
                Message::DataRow(body) if row.is_empty() => {
                    let buffer = body.buffer();
                    row = body
                        .ranges()
                        .map(|range| {
                            let text = range.and_then(|range| buffer.get(range));
                            Ok(text.map(|text| String::from_utf8_lossy(text).into_owned()))
                        })
                        .collect()?;
                }
                Message::ErrorResponse(body) => failure = Some(server_error(body.fields())),
                Message::NoticeResponse(body) => self.notice(body.fields())?,
                Message::ReadyForQuery(_) => return failure.map_or(Ok(row), Err),
                Message::DataRow(_)
                | Message::RowDescription(_)
                | Message::CommandComplete(_)
                | Message::ParameterStatus(_) => {}
                _ => return failure.map_or_else(|| Err(unexpected(command)), Err),
            }
        }
    }

    async fn send_query(&mut self, query: &str) -> Result<(), ConnectionError> {
        debug!(query, "replication command");
        let mut message = BytesMut::new();
        frontend::query(query, &mut message)?;
        self.write(&message).await
    }

    async fn write(&mut self, bytes: &[u8]) -> Result<(), ConnectionError> {
        Ok(self.transport.write(bytes).await?)
    }

    /// Reads until the buffer contains one complete message.
    async fn await_message(&mut self, bytes_max: usize) -> Result<(), ConnectionError> {
        loop {
            if let Some(len) = self.complete(bytes_max)? {
                self.wanted = len;
                return Ok(());
            }
            self.receive().await?;
        }
    }

    /// Returns the total length of the next message if it is complete. Otherwise, stores the length
    /// of the message in `wanted`, if it is known, and returns `None`.
    fn complete(&mut self, bytes_max: usize) -> Result<Option<usize>, ConnectionError> {
        (self.wanted, self.large) = (0, 0);
        if self.skipped > 0 {
            let now = self.skipped.min(self.unread());
            self.buffer.consume(now);
            self.skipped -= now;
            if self.skipped > 0 {
                return Ok(None);
            }
        }
        let unread = self.buffer.unread();
        let Some(header) = Header::parse(unread)? else {
            return Ok(None);
        };
        // The length includes its own four bytes but not the type. `Header` rejects lengths below
        // 4.
        let len = usize::try_from(header.len())
            .map_err(|_| ConnectionError::Protocol("negative length".to_owned()))?
            + 1;
        if len > bytes_max {
            return Err(ConnectionError::TooLarge {
                bytes: len,
                max: bytes_max,
            });
        }
        if unread.len() < len {
            self.wanted = len;
            return Ok(None);
        }
        Ok(Some(len))
    }

    /// Logs a notice from the server, unless too many notices were logged recently.
    ///
    /// # Errors
    /// Returns an error if the notice says that the server is skipping rows.
    fn notice(&self, fields: Fields<'_>) -> Result<(), ConnectionError> {
        let notice = ServerError::parse(fields)?;
        let is_warning = notice.severity == "WARNING";
        if is_warning && notice.code == PUBLICATION_SKIPPED {
            return Err(ConnectionError::PublicationSkipped(Box::new(notice)));
        }
        if !self.notices.admits(Instant::now().into_std()) {
            return Ok(());
        }
        let text: String = notice.to_string().chars().take(NOTICE_CHARS_MAX).collect();
        match is_warning {
            true => warn!(notice = %text, "warning from PostgreSQL"),
            false => info!(notice = %text, "notice from PostgreSQL"),
        }
        Ok(())
    }

    /// Removes the next message from the buffer. The message must be complete, and `wanted` must be
    /// its length.
    fn parse_message(&mut self) -> Result<Message, ConnectionError> {
        let len = std::mem::take(&mut self.wanted);
        let mut message = BytesMut::from(&self.buffer.unread()[..len]);
        self.buffer.consume(len);
        Message::parse(&mut message)?
            .ok_or_else(|| ConnectionError::Protocol("incomplete message".to_owned()))
    }
}

fn unexpected(during: &str) -> ConnectionError {
    ConnectionError::Protocol(format!("unexpected message during {during}"))
}

type Fields<'a> = postgres_protocol::message::backend::ErrorFields<'a>;

fn server_error(fields: Fields<'_>) -> ConnectionError {
    match ServerError::parse(fields) {
        Ok(error) => ConnectionError::Server(Box::new(error)),
        Err(error) => ConnectionError::Protocol(error.to_string()),
    }
}

/// Returns the time in microseconds since 2000-01-01 00:00 UTC, PostgreSQL's epoch.
fn clock_micros() -> i64 {
    const POSTGRES_EPOCH_MICROS: i64 = 946_684_800_000_000;
    let since_1970 = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    i64::try_from(since_1970.as_micros()).unwrap_or(i64::MAX) - POSTGRES_EPOCH_MICROS
}

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
#[cfg(test)]
mod tests;
