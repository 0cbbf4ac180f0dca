//! Which record it is for that the brokers refuse a batch.
//!
//! A broker refuses a batch as a whole, for one record in it or for the size of all, and librdkafka
//! gives up the producer with everything that it has. So the records are produced again by a new
//! producer: in batches of one record, and from the first one that was refused on each only when
//! the one before it is durable. A record that is refused alone is the culprit. The next pass halts
//! right before it, or delivers a dead letter in its place, with everything before it durable. Where
//! none is refused alone, the batch was too large, and batches are smaller from then on.
//!
//! Where rows are copied, each pass is another copy with a consistent point of its own: what is known of a row is
//! known by its number and content.

use std::ops::RangeInclusive;

use super::failure::{DeliveryFailure, RefusedRecord};
use crate::model::lsn::{Lsn, Position};
use crate::model::window::Window;

/// Batches are that much smaller after one that was too large only as a whole.
const SMALLER: u32 = 4;
/// No smaller than that, in bytes.
const BATCH_BYTES_MIN: u32 = 1000;

/// How a sink is to produce.
#[derive(Clone, Debug, Default)]
pub struct Batching {
    /// Each record in a batch of its own.
    pub single: bool,
    /// Batches are smaller by this factor than the configuration says; zero is one.
    pub divisor: u32,
    /// Records that the brokers do not take. They must not be produced.
    pub refused: Vec<RefusedRecord>,
}

impl Batching {
    /// `configured` is the size of batches in bytes that the configuration asks for.
    #[must_use]
    pub fn batch_bytes(&self, configured: u32) -> u32 {
        (configured / self.divisor.max(1)).max(BATCH_BYTES_MIN.min(configured))
    }
}

/// What is known of refused batches, across producers.
#[derive(Debug, Default)]
pub(crate) struct Isolation {
    batching: Batching,
    /// The rows of the refused batch.
    suspects: Option<RangeInclusive<Position>>,
}

impl Isolation {
    /// How the next sink is to produce.
    pub(crate) fn batching(&self) -> &Batching {
        &self.batching
    }

    /// Rows of which each is to be produced only when the one before it is durable.
    pub(crate) fn suspects(&self) -> Option<RangeInclusive<Position>> {
        self.suspects.clone()
    }

    /// A delivery has failed with that much in flight. Says whether a new sink, made by
    /// [`Isolation::batching`], gets further: else a person has to be called.
    pub(crate) fn failed(&mut self, failure: &DeliveryFailure, in_flight: Window) -> bool {
        let Some(record) = &failure.refused else {
            return false;
        };
        // A smaller dead letter in the place of one that was refused is another record.
        let known = |known: &RefusedRecord| {
            let is_same = known.content == record.content && known.topic == record.topic;
            is_same && known.is_at(record.at)
        };
        if self.batching.refused.iter().any(known) {
            return false;
        }
        let until = failure.refused_until.unwrap_or(record.at).max(record.at);
        match &self.suspects {
            // It was alone: nothing but the record can be the reason.
            Some(suspects) if suspects.start().in_copy_of(record.at) <= record.at => {
                if in_flight.records != 1 {
                    return false;
                }
                self.batching.refused.push(RefusedRecord::clone(record));
                self.batching.single = false;
                self.suspects = None;
            }
            // Another one before those.
            _ => {
                self.batching.single = true;
                self.suspects = Some(record.at..=until);
            }
        }
        true
    }

    /// Every suspect was accepted alone.
    pub(crate) fn passed(&mut self) {
        self.batching.single = false;
        self.batching.divisor = self.batching.divisor.max(1).saturating_mul(SMALLER);
        self.suspects = None;
    }

    /// PostgreSQL does not send again what ends before `confirmed`. A copy ends at its consistent point, and the slot may
    /// stand there from the beginning.
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

    fn at(index: u64) -> Position {
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
                at: at(index),
                topic: "t".to_owned(),
                bytes: 1,
                content: 1,
                cause: RefusalCause::Size,
                reason: "too large".to_owned(),
            })),
            refused_until: Some(at(index + 10)),
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
        assert_eq!(isolation.suspects(), Some(at(5)..=at(15)));
        // One before them, amid others: it is looked for among those.
        assert!(isolation.failed(&failure(2), in_flight(40)));
        assert_eq!(isolation.suspects(), Some(at(2)..=at(12)));
        assert!(isolation.failed(&failure(7), in_flight(1)));
        assert_eq!(isolation.batching().refused[0].at, at(7));
        assert!(!isolation.batching().single);
        assert!(!isolation.failed(&failure(7), in_flight(1)));
        isolation.forget(Lsn(100));
        assert_eq!(isolation.batching().refused.len(), 1);
        isolation.forget(Lsn(101));
        assert!(isolation.batching().refused.is_empty());
    }

    /// Amid others a batch can be what was refused, and the record would be left out for nothing.
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
            let mark = (POSITION_HEADER, &at(index).text()[..]);
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

    /// Each pass copies the rows again, and so at other positions.
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
        // Before the suspects by its number, whatever the consistent point.
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
        // From the stream.
        assert!(!is(0x500, b"payload"));
        // A second time calls a person.
        assert!(!isolation.failed(&refused(0x500, 8), in_flight(1)));
    }

    #[test]
    fn what_is_no_matter_of_one_record_calls_a_person() {
        let mut failure = failure(5);
        failure.refused = None;
        assert!(!Isolation::default().failed(&failure, in_flight(1)));
    }
}
