//! The data collected while reading rows and records: topics, partitions, and the state of the
//! slot.

use super::dead_letters::DeadLetters;
use super::entry::Record;
use super::report::RecordLocation;
use crate::model::lsn::Lsn;

/// The data that is needed to compare rows and records.
#[derive(Debug)]
pub(super) struct VerifyContext {
    pub(super) dead_letters: DeadLetters,
    /// The topics. `Row::topic` is an index into this list.
    pub(super) topics: Vec<Topic>,
    /// The partitions. `Record::place` is an index into this list.
    pub(super) places: Vec<Place>,
    /// Whether only rows in a range of times were selected.
    pub(super) is_range: bool,
    /// All transactions that committed before this LSN were visible when the table was read.
    pub(super) snapshot_before: Lsn,
    /// Whether all rows that were visible when the table was read have been delivered.
    pub(super) delivered: End,
    /// The range of transactions whose records must all be in the topics.
    pub(super) complete_range: CompleteRange,
    /// The commit positions in the records of copied rows. These positions do not belong to
    /// transactions.
    pub(super) copies: Vec<Lsn>,
}

/// Whether the slot's confirmed position covered the contents of the table before the topics were
/// read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// All compared rows were confirmed as delivered, or there is no usable slot that could deliver
    /// the remaining rows.
    Reached,
    /// Some rows were not confirmed as delivered, so events that are not in the topics may still be
    /// delivered.
    NotReached,
}

/// The range of transactions whose records must all be in the topics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CompleteRange {
    /// The range contains only transactions that committed after this LSN.
    pub(super) after: Lsn,
    /// The range contains only transactions that committed before this LSN.
    pub(super) before: Lsn,
}

#[derive(Clone, Debug)]
pub(super) struct Topic {
    pub(super) name: String,
    /// Whether an open transaction hides records at the end of the topic.
    pub(super) is_hidden: bool,
    /// Records produced before this time, in milliseconds since 1970, may have expired.
    pub(super) expired_before: Option<i64>,
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

    /// Returns the location of a record, for use in messages.
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
