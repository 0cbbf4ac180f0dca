//! Why a record is not durable, and which record a broker has refused.

use std::hash::{DefaultHasher, Hash, Hasher};

use crate::model::lsn::Position;
use crate::outbox::Record;
use crate::outbox::headers::POSITION_HEADER;

/// A record that the sink could not make durable. The watermark stands still from here on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeliveryFailure {
    /// What the sink says, with the topic.
    pub reason: String,
    /// The same record would fail again.
    pub permanent: bool,
    /// The record, or the first of its batch, where a broker has refused it for what it is.
    pub refused: Option<Box<RefusedRecord>>,
    /// The last row of that batch.
    pub refused_until: Option<Position>,
}

/// What about a record a broker refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusalCause {
    /// It, or its batch, was too large.
    Size,
    /// Its timestamp.
    Timestamp,
    Other,
}

/// A record that a broker has refused for what it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RefusedRecord {
    /// Where its row is.
    pub at: Position,
    pub topic: String,
    /// Bytes of its key and its value.
    pub bytes: usize,
    /// See [`content`]. On another timeline, another record can be in the same place.
    pub content: u64,
    pub cause: RefusalCause,
    /// What the broker says, and what a person can do about it.
    pub reason: String,
}

/// What tells a record from another one in its place.
#[must_use]
pub(crate) fn content(key: Option<&[u8]>, payload: Option<&[u8]>) -> u64 {
    let mut hasher = DefaultHasher::new();
    (key.unwrap_or_default(), payload.unwrap_or_default()).hash(&mut hasher);
    hasher.finish()
}

/// Where a record's row is.
fn position(record: &Record<'_>) -> Option<Position> {
    let mut headers = record.headers.iter();
    let (_, value) = headers.find(|(name, _)| *name == POSITION_HEADER)?;
    std::str::from_utf8(value?).ok()?.parse().ok()
}

impl RefusedRecord {
    /// `record` is the one that was refused.
    #[must_use]
    pub fn is(&self, record: &Record<'_>) -> bool {
        self.topic == record.topic
            && position(record).is_some_and(|at| self.is_at(at))
            && self.content == content(record.key, record.payload)
    }

    /// A record of the same topic is in its place, or was copied as it was.
    pub(super) fn is_at(&self, at: Position) -> bool {
        self.at == at || self.at.is_copied() && at.is_copied()
    }
}
