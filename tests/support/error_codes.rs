//! Simulates Kafka brokers that respond with any error code that a test chooses, as a newer or
//! hostile broker might.

use std::collections::HashMap;
use std::io;
use std::net::TcpStream;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::lag::{receive, send, varint};

/// The kind of response in which an error code is replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ResponseKind {
    Produce,
    Fetch,
    ListOffsets,
    Metadata,
    CreateTopics,
    InitProducerId,
    EndTxn,
    DescribeConfigs,
}

impl ResponseKind {
    fn api_key(self) -> i16 {
        match self {
            Self::Produce => 0,
            Self::Fetch => 1,
            Self::ListOffsets => 2,
            Self::Metadata => 3,
            Self::CreateTopics => 19,
            Self::InitProducerId => 22,
            Self::EndTxn => 26,
            Self::DescribeConfigs => 32,
        }
    }

    /// Returns the offset of the first error code in a response of this version, or `None` if the
    /// array that would contain it is empty.
    fn error_code_offset(self, response: &[u8], version: i16) -> Option<usize> {
        let mut at = Cursor {
            rest: response,
            is_flexible: version >= self.flexible_since(),
        };
        at.skip(4)?;
        at.skip_tags()?;
        match self {
            Self::Produce => {
                at.elements()?;
                at.skip_text()?;
                at.elements()?;
                at.skip(4)?;
            }
            // Skip the throttle time, the response's error code and the session ID. The topic is
            // identified by name before version 13, and by ID in version 13 and later.
            Self::Fetch => {
                at.skip(10)?;
                at.elements()?;
                match version >= 13 {
                    true => at.skip(16)?,
                    false => at.skip_text()?,
                }
                at.elements()?;
                at.skip(4)?;
            }
            Self::ListOffsets => {
                at.skip(4)?;
                at.elements()?;
                at.skip_text()?;
                at.elements()?;
                at.skip(4)?;
            }
            Self::Metadata => {
                at.skip(4)?;
                for _ in 0..at.count()? {
                    at.skip(4)?;
                    at.skip_text()?;
                    at.skip(4)?;
                    at.skip_text()?;
                    at.skip_tags()?;
                }
                at.skip_text()?;
                at.skip(4)?;
                at.elements()?;
            }
            Self::CreateTopics => {
                at.skip(4)?;
                at.elements()?;
                at.skip_text()?;
                if version >= 7 {
                    at.skip(16)?;
                }
            }
            Self::InitProducerId | Self::EndTxn => at.skip(4)?,
            Self::DescribeConfigs => {
                at.skip(4)?;
                at.elements()?;
            }
        }
        Some(response.len() - at.rest.len())
    }

    fn flexible_since(self) -> i16 {
        match self {
            Self::Produce | Self::Metadata => 9,
            Self::Fetch => 12,
            Self::ListOffsets => 6,
            Self::CreateTopics => 5,
            Self::InitProducerId => 2,
            Self::EndTxn => 3,
            Self::DescribeConfigs => 4,
        }
    }
}

struct Cursor<'a> {
    rest: &'a [u8],
    is_flexible: bool,
}

impl Cursor<'_> {
    fn skip(&mut self, bytes: usize) -> Option<()> {
        self.rest = self.rest.get(bytes..)?;
        Some(())
    }

    fn skip_tags(&mut self) -> Option<()> {
        match self.is_flexible {
            true => self.skip(1),
            false => Some(()),
        }
    }

    fn count(&mut self) -> Option<usize> {
        if self.is_flexible {
            return Some(varint(&mut self.rest)?.saturating_sub(1));
        }
        let (count, rest) = self.rest.split_first_chunk()?;
        self.rest = rest;
        usize::try_from(i32::from_be_bytes(*count)).ok()
    }

    /// Reads the number of elements in an array. Returns `None` if the array is empty.
    fn elements(&mut self) -> Option<usize> {
        self.count().filter(|&count| count > 0)
    }

    fn skip_text(&mut self) -> Option<()> {
        if self.is_flexible {
            let bytes = varint(&mut self.rest)?.saturating_sub(1);
            return self.skip(bytes);
        }
        let (bytes, rest) = self.rest.split_first_chunk()?;
        self.rest = rest;
        self.skip(usize::try_from(i16::from_be_bytes(*bytes)).unwrap_or(0))
    }
}

/// Identifies a request by the client's port and the correlation ID.
type Request = (u16, [u8; 4]);
/// The API key and version of a request.
type RequestVersion = (i16, i16);

/// Replaces the first error code in each response of one kind.
#[derive(Default)]
pub(crate) struct ErrorCodes {
    replaced: Mutex<Option<(ResponseKind, i16)>>,
    changed: AtomicUsize,
    /// Pending requests on all connections. If two requests have the same key, the second
    /// overwrites the first, and the error code in one response may not be replaced.
    pending: Mutex<HashMap<Request, RequestVersion>>,
}

impl ErrorCodes {
    /// Starts replacing the error code in responses of this kind.
    pub(crate) fn replace(&self, response: ResponseKind, code: i16) {
        self.changed.store(0, Ordering::SeqCst);
        *self.replaced.lock().unwrap() = Some((response, code));
    }

    /// Stops replacing error codes.
    pub(crate) fn stop_replacing(&self) {
        *self.replaced.lock().unwrap() = None;
    }

    /// Returns how many responses were changed since the last call to [`ErrorCodes::replace`].
    pub(crate) fn changed_responses(&self) -> usize {
        self.changed.load(Ordering::SeqCst)
    }

    /// Forwards requests, and records their API keys and versions.
    pub(super) fn forward_requests(&self, from: &TcpStream, to: &TcpStream) -> io::Result<()> {
        let port = from.peer_addr()?.port();
        loop {
            let request = receive(from)?;
            if let Some([key, key2, major, minor, id @ ..]) = request.first_chunk::<8>() {
                let version_info = (
                    i16::from_be_bytes([*key, *key2]),
                    i16::from_be_bytes([*major, *minor]),
                );
                self.pending
                    .lock()
                    .unwrap()
                    .insert((port, *id), version_info);
            }
            send(to, &request)?;
        }
    }

    /// Forwards responses, and replaces error codes while replacement is enabled.
    pub(super) fn forward_responses(&self, from: &TcpStream, to: &TcpStream) -> io::Result<()> {
        let port = to.peer_addr()?.port();
        loop {
            let mut response = receive(from)?;
            let id = response.first_chunk().copied();
            let pending = id.and_then(|id| self.pending.lock().unwrap().remove(&(port, id)));
            let replaced = *self.replaced.lock().unwrap();
            if let (Some((key, version)), Some((kind, code))) = (pending, replaced)
                && key == kind.api_key()
                && let Some(at) = kind.error_code_offset(&response, version)
                && let Some(place) = response.get_mut(at..at + 2)
            {
                place.copy_from_slice(&code.to_be_bytes());
                self.changed.fetch_add(1, Ordering::SeqCst);
            }
            send(to, &response)?;
        }
    }
}
