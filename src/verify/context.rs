//! What was known when rows and records were read: topics, partitions, how far the slot was.

use super::dead_letters::DeadLetters;
use super::entry::Record;
use super::report::RecordLocation;
use crate::model::lsn::Lsn;

/// What rows and records are compared with.
#[derive(Debug)]
pub(super) struct VerifyContext {
    pub(super) dead_letters: DeadLetters,
    /// By the number that rows have.
    pub(super) topics: Vec<Topic>,
    /// By the number that records have.
    pub(super) places: Vec<Place>,
    /// Rows were chosen by their time.
    pub(super) is_range: bool,
    /// What was committed before it was visible when the table was read.
    pub(super) snapshot_before: Lsn,
    /// Whether all that was visible has been delivered.
    pub(super) delivered: End,
    /// Transactions that committed between the two are in the topics as a whole.
    pub(super) whole: Whole,
    /// Commits of rows that were copied from the table: no transactions of their own.
    pub(super) copies: Vec<Lsn>,
}

/// Whether everything that the table had was confirmed before the topics were read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// It was, or there is no slot that could deliver it any more.
    Reached,
    /// It was not: what isn't there may still come.
    NotReached,
}

/// Which transactions' records must all be there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Whole {
    /// Commits after this one.
    pub(super) after: Lsn,
    /// Commits before this one.
    pub(super) before: Lsn,
}

#[derive(Clone, Debug)]
pub(super) struct Topic {
    pub(super) name: String,
    /// An open transaction hides what is at its end.
    pub(super) is_hidden: bool,
    /// What was produced before, in milliseconds since 1970, may have been removed for its age.
    pub(super) gone_before: Option<i64>,
}

/// A partition.
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

    /// Where a record is, for people.
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
