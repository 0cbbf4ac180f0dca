//! Kafka's brokers that answer with an error code of the test's choice, as a newer broker or a hostile one does.

use std::collections::HashMap;
use std::io;
use std::net::TcpStream;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::lag::{receive, send, varint};

/// What is answered with an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    Produce,
    Fetch,
    ListOffsets,
    Metadata,
    CreateTopics,
    InitProducerId,
    EndTxn,
    DescribeConfigs,
}

impl Answer {
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

    /// Where an answer of this version has its first error code; none where it names no topic.
    fn place(self, answer: &[u8], version: i16) -> Option<usize> {
        let mut at = Cursor {
            rest: answer,
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
            // The throttle time, the answer's own code and the session; the topic is named, or has an id since version 13.
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
        Some(answer.len() - at.rest.len())
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

    /// The number of elements of an array, if there are any.
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

/// The client's port and the correlation id.
type Request = (u16, [u8; 4]);
/// Its API key and version.
type Asked = (i16, i16);

/// Replaces the first error code in answers of one kind.
#[derive(Default)]
pub(crate) struct ErrorCodes {
    replaced: Mutex<Option<(Answer, i16)>>,
    answers: AtomicUsize,
    /// Of all connections, as a mistake only spares an answer.
    asked: Mutex<HashMap<Request, Asked>>,
}

impl ErrorCodes {
    /// Answers of this kind have the code from now on.
    pub(crate) fn replace(&self, answer: Answer, code: i16) {
        self.answers.store(0, Ordering::SeqCst);
        *self.replaced.lock().unwrap() = Some((answer, code));
    }

    /// Answers are passed on again as they are.
    pub(crate) fn pass(&self) {
        *self.replaced.lock().unwrap() = None;
    }

    /// The number of answers that were changed since the last call of [`ErrorCodes::replace`].
    pub(crate) fn answers(&self) -> usize {
        self.answers.load(Ordering::SeqCst)
    }

    /// Passes requests on.
    pub(super) fn ask(&self, from: &TcpStream, to: &TcpStream) -> io::Result<()> {
        let port = from.peer_addr()?.port();
        loop {
            let request = receive(from)?;
            if let Some([key, key2, major, minor, id @ ..]) = request.first_chunk::<8>() {
                let about = (
                    i16::from_be_bytes([*key, *key2]),
                    i16::from_be_bytes([*major, *minor]),
                );
                self.asked.lock().unwrap().insert((port, *id), about);
            }
            send(to, &request)?;
        }
    }

    /// Passes answers on.
    pub(super) fn answer(&self, from: &TcpStream, to: &TcpStream) -> io::Result<()> {
        let port = to.peer_addr()?.port();
        loop {
            let mut answer = receive(from)?;
            let id = answer.first_chunk().copied();
            let asked = id.and_then(|id| self.asked.lock().unwrap().remove(&(port, id)));
            let replaced = *self.replaced.lock().unwrap();
            if let (Some((key, version)), Some((kind, code))) = (asked, replaced)
                && key == kind.api_key()
                && let Some(at) = kind.place(&answer, version)
                && let Some(place) = answer.get_mut(at..at + 2)
            {
                place.copy_from_slice(&code.to_be_bytes());
                self.answers.fetch_add(1, Ordering::SeqCst);
            }
            send(to, &answer)?;
        }
    }
}
