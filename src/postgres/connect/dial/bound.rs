//! Limits how much an SQL client accepts from a server. tokio-postgres reserves whatever length a
//! message header states, before the message has arrived; here the length is checked first.
//!
//! Spec: PostgreSQL 18, 54.7 "Message Formats".

/// Size of a message header: type and length.
const HEADER_BYTES: usize = 5;

/// Estimated memory per message in addition to its bytes, when kept as a row.
const MESSAGE_OVERHEAD_BYTES: usize = 128;

/// Limits on what a client accepts from its server.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SqlLimits {
    message_bytes: usize,
    /// Limit for all messages up to ReadyForQuery; `None` for a client that reads rows one by one.
    answer_bytes: Option<usize>,
    remedy: &'static str,
}

impl SqlLimits {
    /// Limits for queries whose whole result is kept. No value in the catalog is nearly that long.
    pub(crate) const CATALOG_QUERIES: SqlLimits = SqlLimits {
        message_bytes: 16 << 20,
        answer_bytes: Some(64 << 20),
        remedy: "Find the object whose name, definition or comment is that long, and shorten it",
    };

    /// Returns the limits for catalog queries and for queries whose rows are read one by one and are
    /// at most `row_bytes_max` long. A slightly longer row is let through, so that the reader can
    /// name it in its error.
    #[must_use]
    pub(crate) fn rows(row_bytes_max: usize) -> SqlLimits {
        SqlLimits {
            message_bytes: (row_bytes_max.saturating_add(64 << 10))
                .max(Self::CATALOG_QUERIES.message_bytes),
            answer_bytes: None,
            remedy: "Raise max_row_bytes",
        }
    }
}

/// Follows the messages from a server by reading only their headers.
#[derive(Debug)]
pub(crate) struct ResponseLimit {
    limits: SqlLimits,
    /// Remaining bytes of the message whose header was read last.
    body_bytes: usize,
    /// The first bytes of a header that has arrived incompletely.
    cut: Vec<u8>,
    answer_bytes: usize,
}

impl ResponseLimit {
    pub(crate) fn new(limits: SqlLimits) -> ResponseLimit {
        ResponseLimit {
            limits,
            body_bytes: 0,
            cut: Vec::with_capacity(HEADER_BYTES),
            answer_bytes: 0,
        }
    }

    /// Returns how many bytes are missing from an incomplete header, or `None` if there is none.
    pub(crate) fn missing_header_bytes(&self) -> Option<usize> {
        let has = self.cut.len();
        (has > 0).then(|| HEADER_BYTES - has)
    }

    /// Adds bytes, at most as many as are [missing](Self::missing_header_bytes), and returns the header once
    /// it is complete.
    ///
    /// # Errors
    /// Why the message is rejected.
    pub(crate) fn complete(&mut self, bytes: &[u8]) -> Result<Option<[u8; HEADER_BYTES]>, String> {
        self.cut.extend_from_slice(bytes);
        let Some(header) = self.cut.first_chunk().copied() else {
            return Ok(None);
        };
        self.cut.clear();
        self.begin_message(header)?;
        Ok(Some(header))
    }

    /// Returns how many of the bytes may be passed on. The rest, an incomplete header, is kept.
    ///
    /// # Errors
    /// The number of bytes that may be passed on, and why the message that begins after them is
    /// rejected.
    pub(crate) fn accept(&mut self, bytes: &[u8]) -> Result<usize, (usize, String)> {
        let mut at = 0;
        loop {
            let body = self.body_bytes.min(bytes.len() - at);
            self.body_bytes -= body;
            at += body;
            let rest = &bytes[at..];
            let Some(header) = rest.first_chunk() else {
                self.cut.extend_from_slice(rest);
                return Ok(at);
            };
            self.begin_message(*header).map_err(|reason| (at, reason))?;
            at += HEADER_BYTES;
        }
    }

    fn begin_message(&mut self, header: [u8; HEADER_BYTES]) -> Result<(), String> {
        let [tag, length @ ..] = header;
        // The length includes itself but not the type.
        let length = usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX);
        let Some(body_bytes) = length.checked_sub(4) else {
            return Err(format!(
                "the server sent a message of length {length}, tag {tag:#04x}: expected at least 4"
            ));
        };
        let SqlLimits {
            message_bytes,
            remedy,
            ..
        } = self.limits;
        if length > message_bytes {
            return Err(format!(
                "the server sent a message of {length} bytes, tag {tag:#04x}, and at most {message_bytes} are \
                 accepted. {remedy}"
            ));
        }
        if tag == b'Z' {
            self.answer_bytes = 0;
        } else if tag == b'A' {
            // A notification is not part of an answer and is not stored. Other roles can send any
            // number of them between two answers.
        } else if let Some(answer_bytes) = self.limits.answer_bytes {
            self.answer_bytes += length + MESSAGE_OVERHEAD_BYTES;
            if self.answer_bytes > answer_bytes {
                return Err(format!(
                    "the server's answer takes more than {answer_bytes} bytes, and no more are accepted. {remedy}"
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

    /// Returns the bytes passed on when the input arrives in pieces, and why no more were.
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
            match bound.accept(now) {
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
    fn all_up_to_a_message_that_is_too_long_is_passed_on_in_whatever_pieces_it_comes() {
        let limits = SqlLimits {
            message_bytes: 100,
            answer_bytes: None,
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
            for (bad, says) in [
                (message(b'D', 97), "of 101 bytes, tag 0x44"),
                (vec![b'D', 255, 255, 255, 255], "of 4294967295 bytes"),
                (vec![b'D', 0, 0, 0, 3], "of length 3"),
            ] {
                let mut bound = ResponseLimit::new(limits);
                assert_eq!(pass(&mut bound, &good, piece), (good.clone(), None));
                let bad = [good.clone(), bad, good.clone()].concat();
                let (passed, reason) = pass(&mut bound, &bad, piece);
                assert_eq!(passed, good, "in pieces of {piece}");
                let reason = reason.unwrap_or_default();
                assert!(reason.contains(says), "{reason}");
            }
        }
    }

    #[test]
    fn response_is_limited_and_the_next_starts_from_zero() {
        let limits = SqlLimits {
            message_bytes: 100,
            answer_bytes: Some(1000),
            remedy: "Why",
        };
        let mut bound = ResponseLimit::new(limits);
        let answer = |rows: usize| [message(b'D', 0).repeat(rows), message(b'Z', 1)].concat();
        for _ in 0..10 {
            assert_eq!(pass(&mut bound, &answer(7), 1000).1, None);
        }
        let reason = pass(&mut bound, &answer(8), 1000).1.unwrap_or_default();
        assert!(reason.contains("more than 1000 bytes"), "{reason}");
        assert!(reason.ends_with("Why"), "{reason}");
        let mut bound = ResponseLimit::new(limits);
        let notifications = message(b'A', 90).repeat(100);
        assert_eq!(pass(&mut bound, &notifications, 1000).1, None);
        let mut bound = ResponseLimit::new(SqlLimits::rows(0));
        let many = message(b'D', 0).repeat(2_000_000);
        assert_eq!(pass(&mut bound, &many, 1 << 20).1, None);
    }
}
