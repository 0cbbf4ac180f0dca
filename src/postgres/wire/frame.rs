//! Codec for the streaming replication frames inside `CopyData`. Does not perform I/O.
//!
//! PostgreSQL 18, "54.4. Streaming Replication Protocol", `START_REPLICATION`.

use crate::model::lsn::Lsn;

/// A frame that the walsender sends inside a `CopyData` message.
#[derive(Debug, PartialEq, Eq)]
pub enum Frame<'a> {
    /// `w`: WAL data. For a logical slot, this is one message from the output plugin.
    XLogData {
        /// The WAL position of the data, or zero for some messages, such as those that describe a
        /// table.
        start: Lsn,
        /// The server's current end of WAL.
        wal_end: Lsn,
        /// The plugin's message.
        data: &'a [u8],
    },
    /// The beginning of a `w` frame that exceeds the size limit. The frame contains a logical
    /// decoding message or a row. The rest of the frame is skipped.
    LargeMessage {
        /// The beginning of the plugin's message, which is at most [`HEAD_BYTES`] long.
        head: &'a [u8],
        /// The total length of the message.
        bytes: usize,
        /// The size limit.
        max: usize,
    },
    /// `k`: a keepalive, which means that the server has sent everything up to `wal_end`.
    Keepalive {
        /// The position up to which WAL has been decoded and sent.
        wal_end: Lsn,
        /// Whether the server will close the connection unless it receives a reply soon.
        reply_requested: bool,
    },
}

/// Maximum length of `head` in [`Frame::LargeMessage`]. This is enough for the longest message
/// prefix that a pipeline can use, and for a row of `walpost.outbox_row` up to the column
/// `table_name`.
pub(crate) const HEAD_BYTES: usize = 384;

/// The types of plugin messages that may exceed the size limit without an error: logical decoding
/// messages, because any session can write them, and inserts, updates and deletes, because they
/// affect only one table.
const LARGE_TAGS: &[u8] = b"MIUD";

/// The length of the header that precedes the plugin's message in a `w` frame.
const XLOG_HEADER: usize = 25;

/// The reason why the body of a `CopyData` message is not a replication frame.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The body ends before the end of the frame.
    #[error("replication frame {0:?} is too short: {1} bytes")]
    Short(char, usize),
    /// The body continues after the end of the frame.
    #[error("replication frame {0:?} has {1} unexpected bytes at the end")]
    Long(char, usize),
    /// No frame starts with this byte.
    #[error("replication frame begins with byte {0:#04x}, expected 'w' or 'k'")]
    UnknownTag(u8),
    /// The body is empty.
    #[error("replication frame is empty")]
    Empty,
}

impl<'a> Frame<'a> {
    /// Decodes the body of one `CopyData` message.
    ///
    /// # Errors
    /// Returns an error if the body is not exactly one frame.
    pub fn decode(body: &'a [u8]) -> Result<Self, FrameError> {
        let (&tag, rest) = body.split_first().ok_or(FrameError::Empty)?;
        match tag {
            b'w' => {
                let (start, rest) = take_u64(rest).ok_or(FrameError::Short('w', body.len()))?;
                let (wal_end, rest) = take_u64(rest).ok_or(FrameError::Short('w', body.len()))?;
                let (_sent_at, data) = take_u64(rest).ok_or(FrameError::Short('w', body.len()))?;
                Ok(Self::XLogData {
                    start: Lsn(start),
                    wal_end: Lsn(wal_end),
                    data,
                })
            }
            b'k' => {
                let (wal_end, rest) = take_u64(rest).ok_or(FrameError::Short('k', body.len()))?;
                let (_sent_at, rest) = take_u64(rest).ok_or(FrameError::Short('k', body.len()))?;
                match rest {
                    [] => Err(FrameError::Short('k', body.len())),
                    [reply] => Ok(Self::Keepalive {
                        wal_end: Lsn(wal_end),
                        reply_requested: *reply != 0,
                    }),
                    more => Err(FrameError::Long('k', more.len() - 1)),
                }
            }
            other => Err(FrameError::UnknownTag(other)),
        }
    }

    /// Returns whether a frame whose body starts with `beginning` can be returned as a
    /// [`Frame::LargeMessage`]. Bytes that are missing from `beginning` are not checked.
    #[must_use]
    pub fn may_be_large(beginning: &[u8]) -> bool {
        let is =
            |at: usize, tags: &[u8]| beginning.get(at).is_none_or(|found| tags.contains(found));
        is(0, b"w") && is(XLOG_HEADER, LARGE_TAGS)
    }

    /// Returns a [`Frame::LargeMessage`] for a frame whose body starts with `beginning`. The length
    /// of the message is `bytes`, which exceeds the limit `max`.
    ///
    /// # Errors
    /// Returns an error if the beginning is too short.
    pub fn large(beginning: &'a [u8], bytes: usize, max: usize) -> Result<Self, FrameError> {
        let head = beginning.get(XLOG_HEADER..);
        let head = head.ok_or(FrameError::Short('w', beginning.len()))?;
        let head = &head[..head.len().min(HEAD_BYTES)];
        Ok(Self::LargeMessage { head, bytes, max })
    }
}

/// The number of bytes that [`Frame::large`] needs from the beginning of a frame's body.
pub(crate) const BEGINNING_BYTES: usize = XLOG_HEADER + HEAD_BYTES;

fn take_u64(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let (head, rest) = bytes.split_first_chunk::<8>()?;
    Some((u64::from_be_bytes(*head), rest))
}

/// The length of a standby status update, including the header of its `CopyData` message.
pub(crate) const STATUS_UPDATE_LEN: usize = 39;

/// Returns a complete `CopyData` message that contains a standby status update (`r`).
///
/// All three positions (written, flushed and applied) are set to `confirmed`, so that data is never
/// reported as received before it is durable in Kafka. `clock_micros` is the time in microseconds
/// since 2000-01-01.
#[must_use]
pub(crate) fn status_update(
    confirmed: Lsn,
    clock_micros: i64,
    reply_requested: bool,
) -> [u8; STATUS_UPDATE_LEN] {
    let mut out = [0; STATUS_UPDATE_LEN];
    out[0] = b'd';
    out[1..5].copy_from_slice(&38_u32.to_be_bytes());
    out[5] = b'r';
    for at in [6, 14, 22] {
        out[at..at + 8].copy_from_slice(&confirmed.0.to_be_bytes());
    }
    out[30..38].copy_from_slice(&clock_micros.to_be_bytes());
    out[38] = u8::from(reply_requested);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn xlog(data: &[u8]) -> Vec<u8> {
        [
            &b"w"[..],
            &1_u64.to_be_bytes(),
            &2_u64.to_be_bytes(),
            &3_u64.to_be_bytes(),
            data,
        ]
        .concat()
    }

    fn keepalive(reply: u8) -> Vec<u8> {
        [
            &b"k"[..],
            &7_u64.to_be_bytes(),
            &3_u64.to_be_bytes(),
            &[reply],
        ]
        .concat()
    }

    #[test]
    fn decodes_frames() {
        assert_eq!(
            Frame::decode(&xlog(b"data")),
            Ok(Frame::XLogData {
                start: Lsn(1),
                wal_end: Lsn(2),
                data: b"data"
            })
        );
        assert_eq!(
            Frame::decode(&keepalive(1)),
            Ok(Frame::Keepalive {
                wal_end: Lsn(7),
                reply_requested: true
            })
        );
    }

    #[test]
    fn rejects_frames_with_missing_or_trailing_bytes() {
        for whole in [xlog(b""), keepalive(0)] {
            for end in 0..whole.len() {
                assert!(
                    Frame::decode(&whole[..end]).is_err(),
                    "{end} bytes of {whole:?}"
                );
            }
        }
        assert_eq!(
            Frame::decode(&[&keepalive(0)[..], b"x"].concat()),
            Err(FrameError::Long('k', 1))
        );
    }

    #[test]
    fn encodes_status_updates_as_the_protocol_defines() {
        let update = status_update(Lsn(0x0102_0304_0506_0708), -2, true);
        assert_eq!(update[..6], [b'd', 0, 0, 0, 38, b'r']);
        for at in [6, 14, 22] {
            assert_eq!(update[at..at + 8], [1, 2, 3, 4, 5, 6, 7, 8]);
        }
        assert_eq!(update[30..], [255, 255, 255, 255, 255, 255, 255, 254, 1]);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn decodes_or_rejects_arbitrary_frames(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            let _ = Frame::decode(&bytes);
        }
    }
}
