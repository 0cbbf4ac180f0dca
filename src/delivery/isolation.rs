//! Finds the record that causes brokers to reject a batch.
//!
//! A broker rejects a batch as a whole, because of one record or because of its total size, and
//! librdkafka then fails the producer with everything that it has queued. Therefore, a new producer
//! produces the records again in batches of one record. From the first rejected record on, each is
//! produced only when the preceding one is durable. A record that is rejected alone is the cause.
//! The next attempt halts right before it, or delivers a dead letter instead, with everything
//! before it durable. If no record is rejected alone, the batch was too large, and later batches
//! are smaller.
//!
//! When rows are copied, each attempt is another copy with its own consistent point, so a row is
//! identified by its number and content.

use std::ops::RangeInclusive;

use super::failure::{DeliveryFailure, RefusedRecord};
use crate::model::lsn::{Lsn, Position};
use crate::model::window::Window;

/// Factor by which batches are reduced after one was too large only as a whole.
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
    /// Records that the brokers reject. They must not be produced.
    pub refused: Vec<RefusedRecord>,
}

impl Batching {
    /// Returns the batch size, in bytes, for a configured size.
    #[must_use]
    pub fn batch_bytes(&self, configured: u32) -> u32 {
        (configured / self.divisor.max(1)).max(BATCH_BYTES_MIN.min(configured))
    }
}

/// What is known about rejected batches. This state outlives individual producers.
#[derive(Debug, Default)]
pub(crate) struct Isolation {
    batching: Batching,
    /// The rows of the rejected batch.
    suspects: Option<RangeInclusive<Position>>,
}

impl Isolation {
    /// Returns how the next sink must batch records.
    pub(crate) fn batching(&self) -> &Batching {
        &self.batching
    }

    /// Returns the rows that must be produced one at a time, each only when the preceding one is
    /// durable.
    pub(crate) fn suspects(&self) -> Option<RangeInclusive<Position>> {
        self.suspects.clone()
    }

    /// Records a failed delivery, and the records and bytes that were in flight. Returns whether a
    /// new sink, created with [`Isolation::batching`], can make progress; otherwise, an operator is
    /// needed.
    pub(crate) fn failed(&mut self, failure: &DeliveryFailure, in_flight: Window) -> bool {
        let Some(record) = &failure.refused else {
            return false;
        };
        // A smaller dead letter that replaces a rejected record is a different record.
        let known = |known: &RefusedRecord| {
            let is_same = known.content == record.content && known.topic == record.topic;
            is_same && known.is_at(record.at)
        };
        if self.batching.refused.iter().any(known) {
            return false;
        }
        let until = failure.refused_until.unwrap_or(record.at).max(record.at);
        match &self.suspects {
            // The record was produced alone, so it must be the cause.
            Some(suspects) if suspects.start().in_copy_of(record.at) <= record.at => {
                if in_flight.records != 1 {
                    return false;
                }
                self.batching.refused.push(RefusedRecord::clone(record));
                self.batching.single = false;
                self.suspects = None;
            }
            // A record before the suspects was rejected.
            _ => {
                self.batching.single = true;
                self.suspects = Some(record.at..=until);
            }
        }
        true
    }

    /// Records that every suspect was accepted alone.
    pub(crate) fn passed(&mut self) {
        self.batching.single = false;
        self.batching.divisor = self
            .batching
            .divisor
            .max(1)
            .saturating_mul(BATCH_REDUCTION_FACTOR);
        self.suspects = None;
    }

    /// Removes records that PostgreSQL will not send again, because they end before `confirmed`. A
    /// copied record is kept if its copy ends exactly at `confirmed`, because the slot may be there
    /// from the start.
    pub(crate) fn forget(&mut self, confirmed: Lsn) {
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
    use crate::outbox::dead_letter::{Extent, Remains, Writer};
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
    fn record_that_is_refused_alone_is_the_culprit_and_a_second_time_calls_a_person() {
        let mut isolation = Isolation::default();
        assert!(isolation.failed(&failure(5), in_flight(40)));
        assert!(isolation.batching().single);
        assert_eq!(isolation.suspects(), Some(position(5)..=position(15)));
        // A record before the suspects is rejected along with others, so it becomes the first
        // suspect.
        assert!(isolation.failed(&failure(2), in_flight(40)));
        assert_eq!(isolation.suspects(), Some(position(2)..=position(12)));
        assert!(isolation.failed(&failure(7), in_flight(1)));
        assert_eq!(isolation.batching().refused[0].at, position(7));
        assert!(!isolation.batching().single);
        assert!(!isolation.failed(&failure(7), in_flight(1)));
        isolation.forget(Lsn(100));
        assert_eq!(isolation.batching().refused.len(), 1);
        isolation.forget(Lsn(101));
        assert!(isolation.batching().refused.is_empty());
    }

    /// With others in flight, the cause may be the batch; the record would be left out for no
    /// reason.
    #[test]
    fn suspect_that_is_refused_amid_others_is_not_the_culprit() {
        for in_flight in [in_flight(0), in_flight(2)] {
            let mut isolation = Isolation::default();
            assert!(isolation.failed(&failure(5), in_flight));
            assert!(!isolation.failed(&failure(7), in_flight));
            assert!(isolation.batching().refused.is_empty());
        }
    }

    #[test]
    fn batch_whose_records_are_accepted_alone_was_too_large() {
        let mut isolation = Isolation::default();
        assert!(isolation.failed(&failure(5), in_flight(40)));
        isolation.passed();
        assert!(!isolation.batching().single);
        assert_eq!(isolation.batching().batch_bytes(1_000_000), 250_000);
        (0..100).for_each(|_| isolation.passed());
        assert_eq!(isolation.batching().batch_bytes(1_000_000), BATCH_BYTES_MIN);
        assert_eq!(isolation.batching().batch_bytes(10), 10);
    }

    #[test]
    fn record_is_the_refused_one_by_place_and_content() {
        let refused = RefusedRecord {
            content: content(Some(b"key"), Some(b"payload")),
            ..*failure(5).refused.expect("a record")
        };
        let mut writer = Writer::default();
        let mut is = |topic, index, payload: &[u8]| {
            let mark = (POSITION_HEADER, &position(index).text()[..]);
            let letter = writer.write(topic, Remains::Unread(0), mark, &[], Extent::Whole);
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
    fn copied_record_is_remembered_while_no_more_than_its_snapshot_lsn_is_confirmed() {
        let mut failure = failure(5);
        failure.refused.as_mut().expect("a record").at.commit = Lsn(0x1ff);
        let mut isolation = Isolation::default();
        assert!(isolation.failed(&failure, in_flight(40)));
        assert!(isolation.failed(&failure, in_flight(1)));
        isolation.forget(Lsn(0x200));
        assert_eq!(isolation.batching().refused.len(), 1);
        isolation.forget(Lsn(0x201));
        assert!(isolation.batching().refused.is_empty());
    }

    /// Each attempt copies the rows again, so they have other positions.
    #[test]
    fn copied_record_is_known_again_in_the_next_copy() {
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
        assert!(isolation.failed(&refused(0x200, 5), in_flight(40)));
        // By its number, this record is before the suspects, regardless of the consistent point.
        assert!(isolation.failed(&refused(0x300, 2), in_flight(40)));
        assert!(isolation.failed(&refused(0x400, 7), in_flight(1)));
        assert_eq!(isolation.suspects(), None);
        let mut writer = Writer::default();
        let mut is = |commit, payload: &[u8]| {
            let at = Position {
                commit: Lsn(commit),
                index: 8,
            };
            let mark = (POSITION_HEADER, &at.text()[..]);
            let letter = writer.write("t", Remains::Unread(0), mark, &[], Extent::Whole);
            isolation.batching().refused[0].is(&Record {
                key: Some(b"key"),
                payload: Some(payload),
                ..letter
            })
        };
        assert!(is(0x4ff, b"payload"));
        assert!(!is(0x4ff, b"another"));
        // This record is from the stream.
        assert!(!is(0x500, b"payload"));
        // A second rejection requires an operator.
        assert!(!isolation.failed(&refused(0x500, 8), in_flight(1)));
    }

    #[test]
    fn what_is_no_matter_of_one_record_calls_a_person() {
        let mut failure = failure(5);
        failure.refused = None;
        assert!(!Isolation::default().failed(&failure, in_flight(1)));
    }
}
