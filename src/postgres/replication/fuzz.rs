//! Fuzz target for the frames of a replication stream. The input simulates a server that sends
//! arbitrary bytes.

use tokio::io::{AsyncWriteExt, DuplexStream};

use bytes::BytesMut;

use super::buffer::READ_BYTES;
use super::*;
use crate::postgres::connect::dial::Socket;

/// Maximum size of a row. The limit is low so that the fuzzer can easily exceed it.
pub(crate) const ROW_MAX: usize = 10_000;

/// Returns a connection in `CopyBoth` mode over a pipe with the given capacity, and the server's
/// end of the pipe.
pub(crate) fn streaming(room: usize) -> (Connection, DuplexStream) {
    let (client, server) = tokio::io::duplex(room);
    (copy_both_over(Socket::Memory(client)), server)
}

/// Returns a connection in `CopyBoth` mode over this socket.
pub(crate) fn copy_both_over(socket: Socket) -> Connection {
    let session = dial::Session {
        socket,
        buffer: BytesMut::new(),
        parameters: std::collections::HashMap::default(),
        backend_pid: 1,
        secret: 1,
        host: "here".to_owned(),
    };
    Connection::from_session(session, ROW_MAX)
}

/// Passes every frame of the stream to `visit` until an error occurs, and returns the error.
///
/// # Panics
/// Panics if the connection allocates far more memory than one message requires.
pub(crate) async fn read_all(
    connection: &mut Connection,
    mut visit: impl FnMut(&Frame<'_>),
) -> ConnectionError {
    loop {
        match connection.peek() {
            Ok(Some(frame)) => {
                visit(&frame);
                connection.consume();
            }
            Ok(None) => {
                if let Err(error) = connection.receive().await {
                    return error;
                }
            }
            Err(error) => return error,
        }
        let room = connection.buffer.capacity();
        let max = 4 * (READ_BYTES + connection.row_bytes_max);
        assert!(room <= max, "{room} bytes are allocated");
    }
}

/// Returns the frames that a client receives from a server that sends the bytes in `sent` through a
/// pipe with the given capacity, and the error that ends the stream.
fn received(sent: &[u8], room: usize) -> (Vec<Vec<u8>>, ConnectionError) {
    let (mut connection, mut server) = streaming(room);
    let sending = async move {
        // The client may close the connection before everything is sent.
        let _ = server.write_all(sent).await;
    };
    let receiving = async move {
        let mut frames = Vec::new();
        let error = read_all(&mut connection, |frame| frames.push(encoded(frame))).await;
        (frames, error)
    };
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    let both = async { tokio::join!(sending, receiving) };
    runtime.expect("a runtime").block_on(both).1
}

/// Returns a frame's bytes, with zeros in place of the time at which the frame was sent.
fn encoded(frame: &Frame<'_>) -> Vec<u8> {
    match frame {
        Frame::XLogData {
            start,
            wal_end,
            data,
        } => [
            &b"w"[..],
            &start.0.to_be_bytes(),
            &wal_end.0.to_be_bytes(),
            &[0; 8],
            data,
        ]
        .concat(),
        Frame::LargeMessage { head, .. } => head.to_vec(),
        Frame::Keepalive {
            wal_end,
            reply_requested,
        } => [
            &b"k"[..],
            &wal_end.0.to_be_bytes(),
            &[0; 8],
            &[u8::from(*reply_requested)],
        ]
        .concat(),
    }
}

/// Returns the bytes that [`encoded`] should return for a frame with the given body. Uses only the
/// offsets that the protocol defines, so that the test does not depend on the decoder.
fn plain(body: &[u8]) -> Option<Vec<u8>> {
    let mut out = body.to_vec();
    match (body.first()?, body.len()) {
        (b'w', 25..) => out[17..25].fill(0),
        (b'k', 18) => {
            out[9..17].fill(0);
            out[17] = u8::from(out[17] != 0);
        }
        _ => return None,
    }
    Some(out)
}

/// The expected contents of a stream, determined only from the lengths of its messages.
#[derive(Default)]
struct Plain {
    frames: Vec<Vec<u8>>,
    /// Whether the stream must cause an error before it ends.
    has_error: bool,
    /// Whether the stream contains messages other than frames. This model does not check whether
    /// those messages are valid.
    has_others: bool,
}

impl Plain {
    fn parse_plain(mut rest: &[u8]) -> Self {
        let mut plain = Self::default();
        while let [tag, a, b, c, d, after @ ..] = rest {
            let len = i32::from_be_bytes([*a, *b, *c, *d]);
            let len = usize::try_from(len).ok().and_then(|len| len.checked_sub(4));
            let Some(len) = len else {
                plain.has_error = true;
                break;
            };
            if len + 5 > ROW_MAX {
                let wanted = BEGINNING_BYTES.min(ROW_MAX - 5);
                let beginning = &after[..after.len().min(wanted)];
                plain.has_error = *tag != b'd' || !Frame::may_be_large(beginning);
                if plain.has_error || beginning.len() < wanted {
                    break;
                }
                // Only the data is compared, without the 25-byte header of a `w` frame.
                plain.frames.push(beginning[25..].to_vec());
                let Some(after) = after.get(len..) else { break };
                rest = after;
                continue;
            }
            let Some((body, after)) = after.split_at_checked(len) else {
                break;
            };
            rest = after;
            match (tag, self::plain(body)) {
                (b'd', Some(frame)) => plain.frames.push(frame),
                (b'N' | b'S', _) => plain.has_others = true,
                // A valid CopyDone or CommandComplete message ends the stream.
                (b'c' | b'C', _) => {
                    plain.has_others = true;
                    break;
                }
                _ => {
                    plain.has_error = true;
                    break;
                }
            }
        }
        plain
    }
}

/// Runs a connection in `CopyBoth` mode. The first byte of `data` determines how many bytes the
/// server sends at a time, and the other bytes are the data that it sends.
///
/// # Panics
/// Panics if the result depends on how the bytes are split, if the frames differ from the expected
/// frames, or if an excessive length causes memory to be allocated.
pub fn frame(data: &[u8]) {
    let Some((&room, sent)) = data.split_first() else {
        return;
    };
    let (frames, error) = received(sent, sent.len() + 1);
    let in_pieces = received(sent, usize::from(room) + 1);
    assert_eq!(
        (&frames, error.to_string()),
        (&in_pieces.0, in_pieces.1.to_string()),
    );

    let plain = Plain::parse_plain(sent);
    if plain.has_others {
        assert!(plain.frames.starts_with(&frames));
    } else {
        assert_eq!(frames, plain.frames);
        let has_error = !matches!(error, ConnectionError::Closed);
        assert_eq!(has_error, plain.has_error, "{error:?}");
    }
}
