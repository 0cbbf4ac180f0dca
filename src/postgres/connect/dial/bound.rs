//! Limits how much data an SQL client accepts from a server. tokio-postgres allocates as much
//! memory as a message header specifies, before the message has arrived, so this module checks the
//! length first. tokio-postgres also keeps the last value of every parameter that the server
//! reports, so this module removes these reports.
//!
//! Spec: PostgreSQL 18, 54.7 "Message Formats".

use std::ops::Range;

/// Size of a message header, which consists of a type and a length.
const HEADER_BYTES: usize = 5;

/// Estimated memory overhead of a message that is kept as a row, in addition to its bytes.
const MESSAGE_OVERHEAD_BYTES: usize = 128;

/// Limits on the amount of data that a client accepts from its server.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SqlLimits {
    message_bytes: usize,
    /// Limit on the total size of a response, which ends with ReadyForQuery. `None` for a client
    /// that reads rows one at a time.
    response_bytes: Option<usize>,
    remedy: &'static str,
}

impl SqlLimits {
    /// Limits for queries whose whole result is kept in memory. Results of catalog queries are
    /// normally far smaller.
    pub(crate) const CATALOG_QUERIES: SqlLimits = SqlLimits {
        message_bytes: 16 << 20,
        response_bytes: Some(64 << 20),
        remedy: "Find the object whose name, definition or comment is too long, and shorten it",
    };

    /// Returns the limits for a client that also reads large results, one row at a time. Each row
    /// may have at most `row_bytes_max` bytes. Rows that are slightly larger are also accepted, so
    /// that the reader can report which row is too large.
    #[must_use]
    pub(crate) fn rows(row_bytes_max: usize) -> SqlLimits {
        SqlLimits {
            message_bytes: (row_bytes_max.saturating_add(64 << 10))
                .max(Self::CATALOG_QUERIES.message_bytes),
            response_bytes: None,
            remedy: "Raise max_row_bytes",
        }
    }
}

/// A filter that enforces [`SqlLimits`] on the data from a server. It examines only message
/// headers.
#[derive(Debug)]
pub(crate) struct ResponseLimit {
    limits: SqlLimits,
    /// Number of bytes still missing from the message whose header was read last.
    body_bytes: usize,
    /// Whether to remove the message whose header was read last.
    is_removed: bool,
    /// The bytes of a header that has not arrived completely yet.
    cut: Vec<u8>,
    response_bytes: usize,
}

impl ResponseLimit {
    pub(crate) fn new(limits: SqlLimits) -> ResponseLimit {
        ResponseLimit {
            limits,
            body_bytes: 0,
            is_removed: false,
            cut: Vec::with_capacity(HEADER_BYTES),
            response_bytes: 0,
        }
    }

    /// Returns how many bytes are missing from an incomplete header, or `None` if no header is
    /// incomplete.
    pub(crate) fn missing_header_bytes(&self) -> Option<usize> {
        let has = self.cut.len();
        (has > 0).then(|| HEADER_BYTES - has)
    }

    /// Adds at most [`Self::missing_header_bytes`] bytes to an incomplete header. Returns the
    /// header once it is complete, or `None` if it is still incomplete or if its message must be
    /// removed.
    ///
    /// # Errors
    /// Returns the reason if the message is rejected.
    pub(crate) fn complete(&mut self, bytes: &[u8]) -> Result<Option<[u8; HEADER_BYTES]>, String> {
        self.cut.extend_from_slice(bytes);
        let Some(header) = self.cut.first_chunk().copied() else {
            return Ok(None);
        };
        self.cut.clear();
        self.begin_message(header)?;
        Ok((!self.is_removed).then_some(header))
    }

    /// Moves the bytes that the client is allowed to receive to the start of `bytes`, and returns
    /// their number. The remaining bytes belong to messages that must be removed, or are the
    /// beginning of a header, which is stored until the rest of the header arrives.
    ///
    /// Returns an error if a message is rejected. The error contains the number of bytes before
    /// that message, which the client may receive, and the reason for the rejection.
    pub(crate) fn accept(&mut self, bytes: &mut [u8]) -> Result<usize, (usize, String)> {
        let (mut at, mut passed) = (0, 0);
        loop {
            let body = self.body_bytes.min(bytes.len() - at);
            self.body_bytes -= body;
            passed = self.pass(bytes, at..at + body, passed);
            at += body;
            let Some(header) = bytes[at..].first_chunk().copied() else {
                self.cut.extend_from_slice(&bytes[at..]);
                return Ok(passed);
            };
            self.begin_message(header)
                .map_err(|reason| (passed, reason))?;
            passed = self.pass(bytes, at..at + HEADER_BYTES, passed);
            at += HEADER_BYTES;
        }
    }

    /// Moves a part of the current message to offset `passed`, unless the message must be removed.
    /// Returns the new number of bytes that the client may receive.
    fn pass(&self, bytes: &mut [u8], part: Range<usize>, passed: usize) -> usize {
        if self.is_removed {
            return passed;
        }
        let end = passed + part.len();
        if part.start > passed {
            bytes.copy_within(part, passed);
        }
        end
    }

    fn begin_message(&mut self, header: [u8; HEADER_BYTES]) -> Result<(), String> {
        let [tag, length @ ..] = header;
        // The length includes its own four bytes but not the type.
        let length = usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX);
        let Some(body_bytes) = length.checked_sub(4) else {
            return Err(format!(
                "the server sent a message of length {length}, tag {tag:#04x}; expected a length of at least 4"
            ));
        };
        let SqlLimits {
            message_bytes,
            remedy,
            ..
        } = self.limits;
        if length > message_bytes {
            return Err(format!(
                "the server sent a message of {length} bytes, tag {tag:#04x}; at most {message_bytes} are \
                 accepted. {remedy}"
            ));
        }
        // ParameterStatus. Walpost ignores values reported after startup.
        self.is_removed = tag == b'S';
        if tag == b'Z' {
            self.response_bytes = 0;
        } else if tag == b'A' || self.is_removed {
            // Notifications do not count toward the limit, because they are not part of a response
            // and are not stored. Other roles can send any number of them.
        } else if let Some(response_bytes) = self.limits.response_bytes {
            self.response_bytes += length + MESSAGE_OVERHEAD_BYTES;
            if self.response_bytes > response_bytes {
                return Err(format!(
                    "the server's response requires more than {response_bytes} bytes of memory, which is the limit. {remedy}"
                ));
            }
        }
        self.body_bytes = body_bytes;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(tag: u8, body_bytes: u32) -> Vec<u8> {
        let mut message = vec![tag];
        message.extend((body_bytes + 4).to_be_bytes());
        message.resize(message.len() + body_bytes as usize, b'x');
        message
    }

    /// Passes `bytes` to a [`ResponseLimit`] in pieces. Returns the bytes that the client may
    /// receive and, if the remaining bytes are rejected, the reason.
    fn pass(
        bound: &mut ResponseLimit,
        mut bytes: &[u8],
        piece: usize,
    ) -> (Vec<u8>, Option<String>) {
        let mut passed = Vec::new();
        while !bytes.is_empty() {
            let count = bound
                .missing_header_bytes()
                .unwrap_or(piece)
                .min(piece)
                .min(bytes.len());
            let (now, later) = bytes.split_at(count);
            bytes = later;
            if bound.missing_header_bytes().is_some() {
                match bound.complete(now) {
                    Ok(header) => passed.extend(header.into_iter().flatten()),
                    Err(reason) => return (passed, Some(reason)),
                }
                continue;
            }
            let mut now = now.to_vec();
            match bound.accept(&mut now) {
                Ok(count) => passed.extend_from_slice(&now[..count]),
                Err((count, reason)) => {
                    passed.extend_from_slice(&now[..count]);
                    return (passed, Some(reason));
                }
            }
        }
        (passed, None)
    }

    #[test]
    fn forwards_all_messages_before_an_oversized_one_however_the_data_is_split() {
        let limits = SqlLimits {
            message_bytes: 100,
            response_bytes: None,
            remedy: "",
        };
        let good = [
            message(b'T', 0),
            message(b'D', 96),
            message(b'D', 7),
            message(b'Z', 1),
        ]
        .concat();
        for piece in 1..good.len() + 10 {
            for (bad, expected) in [
                (
                    message(b'D', 97),
                    "the server sent a message of 101 bytes, tag 0x44",
                ),
                (vec![b'D', 255, 255, 255, 255], "of 4294967295 bytes"),
                (vec![b'D', 0, 0, 0, 3], "of length 3"),
            ] {
                let mut bound = ResponseLimit::new(limits);
                assert_eq!(pass(&mut bound, &good, piece), (good.clone(), None));
                let bad = [good.clone(), bad, good.clone()].concat();
                let (passed, reason) = pass(&mut bound, &bad, piece);
                assert_eq!(passed, good, "in pieces of {piece}");
                let reason = reason.unwrap_or_default();
                assert!(reason.contains(expected), "{reason}");
            }
        }
    }

    #[test]
    fn removes_parameter_status_messages_however_the_data_is_split() {
        let report = message(b'S', 50);
        let row = message(b'D', 7);
        let sent = [
            &report,
            &report,
            &row,
            &report,
            &row,
            &message(b'S', 0),
            &row,
        ];
        let sent: Vec<u8> = sent.into_iter().flatten().copied().collect();
        for piece in 1..=sent.len() {
            let mut bound = ResponseLimit::new(SqlLimits::CATALOG_QUERIES);
            assert_eq!(
                pass(&mut bound, &sent, piece),
                (row.repeat(3), None),
                "in pieces of {piece}"
            );
        }
    }

    #[test]
    fn limits_the_size_of_each_response_separately() {
        let limits = SqlLimits {
            message_bytes: 100,
            response_bytes: Some(1000),
            remedy: "Remedy",
        };
        let mut bound = ResponseLimit::new(limits);
        let answer = |rows: usize| [message(b'D', 0).repeat(rows), message(b'Z', 1)].concat();
        for _ in 0..10 {
            assert_eq!(pass(&mut bound, &answer(7), 1000).1, None);
        }
        let reason = pass(&mut bound, &answer(8), 1000).1.unwrap_or_default();
        assert!(reason.contains("more than 1000 bytes"), "{reason}");
        assert!(reason.ends_with("Remedy"), "{reason}");
        let mut bound = ResponseLimit::new(limits);
        let notifications = message(b'A', 90).repeat(100);
        assert_eq!(pass(&mut bound, &notifications, 1000).1, None);
        let mut bound = ResponseLimit::new(SqlLimits::rows(0));
        let many = message(b'D', 0).repeat(2_000_000);
        assert_eq!(pass(&mut bound, &many, 1 << 20).1, None);
    }
}
