//! The facts that were known when rows and records were read: topics, partitions, and the state of
//! the slot.

use super::dead_letters::DeadLetters;
use super::entry::Record;
use super::report::RecordLocation;
use crate::model::lsn::Lsn;

/// The facts that rows and records are compared with.
#[derive(Debug)]
pub(super) struct VerifyContext {
    pub(super) dead_letters: DeadLetters,
    /// The topics, indexed by the numbers in rows.
    pub(super) topics: Vec<Topic>,
    /// The partitions, indexed by the numbers in records.
    pub(super) places: Vec<Place>,
    /// Whether rows were selected by their time.
    pub(super) is_range: bool,
    /// Everything that committed before this LSN was visible when the table was read.
    pub(super) snapshot_before: Lsn,
    /// Whether everything that was visible has been delivered.
    pub(super) delivered: End,
    /// The range of transactions that are completely in the topics.
    pub(super) whole: Whole,
    /// The commit positions of copied rows, which are not transactions of their own.
    pub(super) copies: Vec<Lsn>,
}

/// Whether the contents of the table were confirmed before the topics were read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// The contents were confirmed, or no slot exists that could still deliver them.
    Reached,
    /// The contents were not confirmed: events that are not in the topics may still be delivered.
    NotReached,
}

/// The range of transactions whose records must all be in the topics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Whole {
    /// The range starts after this commit.
    pub(super) after: Lsn,
    /// The range ends before this commit.
    pub(super) before: Lsn,
}

#[derive(Clone, Debug)]
pub(super) struct Topic {
    pub(super) name: String,
    /// Whether an open transaction hides records at the end of the topic.
    pub(super) is_hidden: bool,
    /// Records produced before this time, in milliseconds since 1970, may have been removed because
    /// of their age.
    pub(super) gone_before: Option<i64>,
}

/// A partition of a topic.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) topic: u32,
    pub(super) partition: i32,
}

impl VerifyContext {
    pub(super) fn topic(&self, number: u32) -> &Topic {
        &self.topics[number as usize]
    }

    pub(super) fn place(&self, number: u32) -> Place {
        self.places[number as usize]
    }

    /// Returns the location of a record, for messages.
    pub(super) fn location(&self, record: &Record) -> RecordLocation {
        self.location_at(record.place, record.offset)
    }

    pub(super) fn location_at(&self, place: u32, offset: i64) -> RecordLocation {
        let place = self.place(place);
        RecordLocation {
            topic: self.topic(place.topic).name.clone(),
            partition: place.partition,
            offset,
        }
    }
}
