//! Delivery errors: why a record is not durable, and which record a broker has rejected.

use std::hash::{DefaultHasher, Hash, Hasher};

use crate::model::lsn::Position;
use crate::outbox::Record;
use crate::outbox::headers::POSITION_HEADER;

/// A record that the sink could not make durable. The watermark does not advance past it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeliveryFailure {
    /// The sink's description of the failure, which includes the name of the topic.
    pub reason: String,
    /// Whether further attempts to deliver the record would also fail.
    pub permanent: bool,
    /// The rejected record, or the first record of a rejected batch; `None` if the failure was not
    /// caused by the content of a record.
    pub refused: Option<Box<RefusedRecord>>,
    /// The last row of the rejected batch.
    pub refused_until: Option<Position>,
}

/// The reason why a broker rejected a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusalCause {
    /// The record or its batch is too large.
    Size,
    /// The record's timestamp is not acceptable to the broker.
    Timestamp,
    Other,
}

/// A record that a broker has rejected because of its content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RefusedRecord {
    /// Position of the record's row.
    pub at: Position,
    pub topic: String,
    /// Size of the key and the value, in bytes.
    pub bytes: usize,
    /// A hash of the record's content; see [`content`]. The hash is needed because a different
    /// record may have the same position on a different timeline.
    pub content: u64,
    pub cause: RefusalCause,
    /// The broker's message, and how to fix the problem.
    pub reason: String,
}

/// Returns a hash of a record's content, to distinguish the record from another record at the same
/// position.
#[must_use]
pub(crate) fn content(key: Option<&[u8]>, payload: Option<&[u8]>) -> u64 {
    let mut hasher = DefaultHasher::new();
    (key.unwrap_or_default(), payload.unwrap_or_default()).hash(&mut hasher);
    hasher.finish()
}

/// Returns the position of a record's row.
fn position(record: &Record<'_>) -> Option<Position> {
    let mut headers = record.headers.iter();
    let (_, value) = headers.find(|(name, _)| *name == POSITION_HEADER)?;
    std::str::from_utf8(value?).ok()?.parse().ok()
}

impl RefusedRecord {
    /// Returns whether `record` is the rejected record.
    #[must_use]
    pub fn is(&self, record: &Record<'_>) -> bool {
        self.topic == record.topic
            && position(record).is_some_and(|at| self.is_at(at))
            && self.content == content(record.key, record.payload)
    }

    /// Returns whether a record at position `at` could be the rejected record, provided that both
    /// have the same topic. This is the case if both have the same position, or if both were
    /// created from copied rows, because copied rows get new positions each time the copy is
    /// attempted.
    pub(super) fn is_at(&self, at: Position) -> bool {
        self.at == at || self.at.is_copied() && at.is_copied()
    }
}
