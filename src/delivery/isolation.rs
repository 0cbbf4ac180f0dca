//! Finds the record that causes brokers to reject a batch.
//!
//! A broker rejects a batch as a whole, either because of one record or because of the batch's
//! total size. librdkafka then raises a fatal error or, with exactly-once delivery, an error after
//! which the transaction must be aborted. In both cases, the records in the producer's queue are
//! not delivered. A new producer therefore sends the records again in batches of one record.
//! Starting with the first record of the rejected batch, each record is sent only after the
//! preceding one is durable. A record that is rejected alone is the cause. Once all preceding
//! records are durable, the next attempt halts immediately before this record, or delivers a dead
//! letter in its place. If no record is rejected alone, the batch was too large, and later batches
//! are smaller.
//!
//! Each attempt to copy existing rows starts over with a new consistent point, so a copied row is
//! identified by its number within the copy and its content, rather than by its position.

use std::ops::RangeInclusive;

use super::failure::{DeliveryFailure, RefusedRecord};
use crate::model::lsn::{Lsn, Position};
use crate::model::window::Window;

/// Factor by which the batch size is reduced after a batch is rejected because of its total size.
const BATCH_REDUCTION_FACTOR: u32 = 4;
/// Minimum batch size, in bytes.
const BATCH_BYTES_MIN: u32 = 1000;

/// How a sink batches records.
#[derive(Clone, Debug, Default)]
pub struct Batching {
    /// Whether each record is sent in its own batch.
    pub single: bool,
    /// Divisor for the configured batch size; zero is treated as one.
    pub divisor: u32,
    /// The records that the brokers are known to reject. The sink does not produce these records.
    pub refused: Vec<RefusedRecord>,
}

impl Batching {
    /// Returns the batch size to use, in bytes, given the configured size.
    #[must_use]
    pub fn batch_bytes(&self, configured: u32) -> u32 {
        (configured / self.divisor.max(1)).max(BATCH_BYTES_MIN.min(configured))
    }
}

/// The state of the search for a rejected record. This state is kept when the producer is replaced.
#[derive(Debug, Default)]
pub(crate) struct Isolation {
    batching: Batching,
    /// The range of rows in the rejected batch; `None` while no rejected record is being searched
    /// for.
    suspects: Option<RangeInclusive<Position>>,
}

impl Isolation {
    /// Returns how the next sink must batch records.
    pub(crate) fn batching(&self) -> &Batching {
        &self.batching
    }

    /// Returns the rows whose records must be produced one at a time, each only after the preceding
    /// record is durable.
    pub(crate) fn suspects(&self) -> Option<RangeInclusive<Position>> {
        self.suspects.clone()
    }

    /// Handles a delivery failure, given the number and size of the records that were in flight.
    /// Returns whether a new sink, created with [`Isolation::batching`], can make progress. If not,
    /// an operator must intervene.
    pub(crate) fn record_failure(&mut self, failure: &DeliveryFailure, in_flight: Window) -> bool {
        let Some(record) = &failure.refused else {
            return false;
        };
        // Compare the content too, because a smaller dead letter that replaces a rejected record
        // has the same position.
        let is_known = |known: &RefusedRecord| {
            let is_same = known.content == record.content && known.topic == record.topic;
            is_same && known.is_at(record.at)
        };
        if self.batching.refused.iter().any(is_known) {
            return false;
        }
        let until = failure.refused_until.unwrap_or(record.at).max(record.at);
        match &self.suspects {
            // If no other record was in flight, this record must be the cause of the rejection.
            Some(suspects) if suspects.start().in_copy_of(record.at) <= record.at => {
                if in_flight.records != 1 {
                    return false;
                }
                self.batching.refused.push(RefusedRecord::clone(record));
                self.batching.single = false;
                self.suspects = None;
            }
            // No rejected record is being searched for, or this one precedes the suspected records.
            // Start a search at this record.
            _ => {
                self.batching.single = true;
                self.suspects = Some(record.at..=until);
            }
        }
        true
    }

    /// Ends the search for a rejected record after the brokers have accepted each record of the
    /// rejected batch individually. The batch as a whole must have been too large, so later batches
    /// are smaller.
    pub(crate) fn record_accepted_suspects(&mut self) {
        self.batching.single = false;
        self.batching.divisor = self
            .batching
            .divisor
            .max(1)
            .saturating_mul(BATCH_REDUCTION_FACTOR);
        self.suspects = None;
    }

    /// Removes the rejected records of transactions whose commit record precedes `confirmed`,
    /// because PostgreSQL won't resend these transactions. A record of a copied row is kept if the
    /// consistent point of the copy is exactly `confirmed`, because the slot may already have been
    /// at this LSN before any row was copied.
    pub(crate) fn remove_confirmed(&mut self, confirmed: Lsn) {
        self.batching.refused.retain(|record| {
            let Position { commit, .. } = record.at;
            commit >= confirmed || record.at.is_copied() && commit.0 + 1 == confirmed.0
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::delivery::failure::{RefusalCause, content};
    use crate::outbox::Record;
    use crate::outbox::dead_letter::{EventContent, Extent, Writer};
    use crate::outbox::headers::POSITION_HEADER;

    fn position(index: u64) -> Position {
        Position {
            commit: Lsn(100),
            index,
        }
    }

    fn failure(index: u64) -> DeliveryFailure {
        DeliveryFailure {
            reason: "too large".to_owned(),
            permanent: true,
            refused: Some(Box::new(RefusedRecord {
                at: position(index),
                topic: "t".to_owned(),
                bytes: 1,
                content: 1,
                cause: RefusalCause::Size,
                reason: "too large".to_owned(),
            })),
            refused_until: Some(position(index + 10)),
        }
    }

    fn in_flight(records: u64) -> Window {
        Window { records, bytes: 1 }
    }

    #[test]
    fn marks_a_record_rejected_on_its_own_and_halts_if_it_is_rejected_again() {
        let mut isolation = Isolation::default();
        assert!(isolation.record_failure(&failure(5), in_flight(40)));
        assert!(isolation.batching().single);
        assert_eq!(isolation.suspects(), Some(position(5)..=position(15)));
        // If a record that precedes the suspected records is rejected in a batch, it becomes the
        // first suspected record.
        assert!(isolation.record_failure(&failure(2), in_flight(40)));
        assert_eq!(isolation.suspects(), Some(position(2)..=position(12)));
        assert!(isolation.record_failure(&failure(7), in_flight(1)));
        assert_eq!(isolation.batching().refused[0].at, position(7));
        assert!(!isolation.batching().single);
        assert!(!isolation.record_failure(&failure(7), in_flight(1)));
        isolation.remove_confirmed(Lsn(100));
        assert_eq!(isolation.batching().refused.len(), 1);
        isolation.remove_confirmed(Lsn(101));
        assert!(isolation.batching().refused.is_empty());
    }

    /// If other records are in flight, the broker may have rejected the batch as a whole, so
    /// omitting only the reported record could be wrong.
    #[test]
    fn halts_if_a_suspect_record_is_rejected_while_other_records_are_in_flight() {
        for in_flight in [in_flight(0), in_flight(2)] {
            let mut isolation = Isolation::default();
            assert!(isolation.record_failure(&failure(5), in_flight));
            assert!(!isolation.record_failure(&failure(7), in_flight));
            assert!(isolation.batching().refused.is_empty());
        }
    }

    #[test]
    fn reduces_the_batch_size_if_all_records_are_accepted_individually() {
        let mut isolation = Isolation::default();
        assert!(isolation.record_failure(&failure(5), in_flight(40)));
        isolation.record_accepted_suspects();
        assert!(!isolation.batching().single);
        assert_eq!(isolation.batching().batch_bytes(1_000_000), 250_000);
        (0..100).for_each(|_| isolation.record_accepted_suspects());
        assert_eq!(isolation.batching().batch_bytes(1_000_000), BATCH_BYTES_MIN);
        assert_eq!(isolation.batching().batch_bytes(10), 10);
    }

    #[test]
    fn matches_rejected_records_by_position_and_content() {
        let refused = RefusedRecord {
            content: content(Some(b"key"), Some(b"payload")),
            ..*failure(5).refused.expect("a record")
        };
        let mut writer = Writer::default();
        let mut is = |topic, index, payload: &[u8]| {
            let mark = (POSITION_HEADER, &position(index).text()[..]);
            let letter = writer.write(topic, EventContent::Unread(0), mark, &[], Extent::Whole);
            refused.is(&Record {
                key: Some(b"key"),
                payload: Some(payload),
                ..letter
            })
        };
        assert!(is("t", 5, b"payload"));
        assert!(!is("t", 5, b"another"));
        assert!(!is("t", 6, b"payload"));
        assert!(!is("u", 5, b"payload"));
    }

    #[test]
    fn keeps_the_rejection_of_a_copied_row_until_a_later_lsn_is_confirmed() {
        let mut failure = failure(5);
        failure.refused.as_mut().expect("a record").at.commit = Lsn(0x1ff);
        let mut isolation = Isolation::default();
        assert!(isolation.record_failure(&failure, in_flight(40)));
        assert!(isolation.record_failure(&failure, in_flight(1)));
        isolation.remove_confirmed(Lsn(0x200));
        assert_eq!(isolation.batching().refused.len(), 1);
        isolation.remove_confirmed(Lsn(0x201));
        assert!(isolation.batching().refused.is_empty());
    }

    /// Each attempt to copy existing rows has a different consistent point, so the rows get new
    /// positions.
    #[test]
    fn recognizes_a_rejected_record_when_its_row_is_copied_again() {
        let refused = |snapshot_lsn: u64, index| {
            let mut failure = failure(index);
            let record = failure.refused.as_mut().expect("a record");
            record.at.commit = Lsn(snapshot_lsn - 1);
            record.content = content(Some(b"key"), Some(b"payload"));
            failure.refused_until = Some(Position {
                index: index + 10,
                ..record.at
            });
            failure
        };
        let mut isolation = Isolation::default();
        assert!(isolation.record_failure(&refused(0x200, 5), in_flight(40)));
        // The record that is rejected second has a lower row number than the suspected records, so
        // it becomes the first suspected record. The consistent points of the two copies differ,
        // but are not compared.
        assert!(isolation.record_failure(&refused(0x300, 2), in_flight(40)));
        assert!(isolation.record_failure(&refused(0x400, 7), in_flight(1)));
        assert_eq!(isolation.suspects(), None);
        let mut writer = Writer::default();
        let mut is = |commit, payload: &[u8]| {
            let at = Position {
                commit: Lsn(commit),
                index: 8,
            };
            let mark = (POSITION_HEADER, &at.text()[..]);
            let letter = writer.write("t", EventContent::Unread(0), mark, &[], Extent::Whole);
            isolation.batching().refused[0].is(&Record {
                key: Some(b"key"),
                payload: Some(payload),
                ..letter
            })
        };
        assert!(is(0x4ff, b"payload"));
        assert!(!is(0x4ff, b"another"));
        // This record comes from the stream, not from a copy.
        assert!(!is(0x500, b"payload"));
        // If the record is rejected again, an operator must intervene.
        assert!(!isolation.record_failure(&refused(0x500, 8), in_flight(1)));
    }

    #[test]
    fn halts_if_the_failure_does_not_identify_a_record() {
        let mut failure = failure(5);
        failure.refused = None;
        assert!(!Isolation::default().record_failure(&failure, in_flight(1)));
    }
}
