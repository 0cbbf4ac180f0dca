//! For exactly-once delivery: skips events that are already in Kafka.

use self::overlap::Overlap;
use crate::delivery::checkpoint::{Delivered, HistoryError, Last};
use crate::model::lsn::{Lsn, Position};
use crate::postgres::wire::pgoutput::Begin;

/// Maximum length, in bytes, of the event ID in a checkpoint. Longer IDs are truncated.
const ID_BYTES_MAX: usize = 100;

/// Identifies the events in the stream that are already in Kafka, and remembers the last new event
/// for the next checkpoint.
pub(crate) struct DuplicateFilter {
    /// The events that are already in Kafka; `None` once the stream has passed them.
    overlap: Option<Overlap>,
    /// All transactions that end at or before this LSN had been processed when the filter was
    /// created.
    safe: Lsn,
    /// The current transaction, or the last one if no transaction is in progress.
    begin: Option<Begin>,
    /// The last delivered event's position and transaction.
    last: Option<(Position, Begin)>,
    /// ID of the last delivered event. Kept in its own buffer to avoid an allocation per event.
    last_id: Vec<u8>,
    /// Whether the last delivered event has an ID.
    last_has_id: bool,
}

impl DuplicateFilter {
    /// See [`Overlap::new`].
    pub(crate) fn new(delivered: Option<Delivered>, safe: Lsn, confirmed: Lsn) -> Self {
        Self {
            overlap: Overlap::new(delivered, safe, confirmed),
            safe,
            begin: None,
            last: None,
            last_id: Vec::new(),
            last_has_id: false,
        }
    }

    /// Processes the beginning of a transaction.
    pub(crate) fn begin(&mut self, begin: &Begin) -> Result<(), HistoryError> {
        self.begin = Some(*begin);
        match &mut self.overlap {
            Some(overlap) => overlap.begin(begin),
            None => Ok(()),
        }
    }

    /// Returns whether the event at position `at` is already in Kafka.
    pub(crate) fn is_delivered<'r>(
        &mut self,
        at: Position,
        id: impl FnOnce() -> Option<&'r [u8]>,
    ) -> Result<bool, HistoryError> {
        match &mut self.overlap {
            Some(overlap) => overlap.is_delivered(at, || id().map(truncate_id)),
            None => Ok(false),
        }
    }

    /// Records that the sink has accepted the event at position `at`.
    pub(crate) fn record_delivered(&mut self, at: Position, id: Option<&[u8]>) {
        self.last = self.begin.map(|begin| (at, begin));
        self.last_id.clear();
        self.last_id
            .extend_from_slice(truncate_id(id.unwrap_or_default()));
        self.last_has_id = id.is_some();
    }

    /// Processes the end of a transaction, at LSN `end`. `next` is the position that follows the
    /// transaction's last row. If this completes the verification of the WAL, returns the safe LSN:
    /// all transactions that end at or before the safe LSN had been processed when the filter was
    /// created.
    pub(crate) fn commit(&mut self, next: Position, end: Lsn) -> Result<Option<Lsn>, HistoryError> {
        let has_ended = match &mut self.overlap {
            Some(overlap) => overlap.commit(next.commit, end, next.index)?,
            None => false,
        };
        Ok(self.end_overlap(has_ended))
    }

    /// Processes a keepalive, which means that the server has no more events to send before `lsn`.
    /// The return value has the same meaning as that of [`DuplicateFilter::commit`].
    pub(crate) fn process_keepalive(&mut self, lsn: Lsn) -> Result<Option<Lsn>, HistoryError> {
        let has_ended = match &mut self.overlap {
            Some(overlap) => overlap.process_keepalive(lsn)?,
            None => false,
        };
        Ok(self.end_overlap(has_ended))
    }

    fn end_overlap(&mut self, has_ended: bool) -> Option<Lsn> {
        has_ended.then(|| {
            self.overlap = None;
            self.safe
        })
    }

    /// Returns whether the WAL has been verified to contain the events that are already in Kafka.
    pub(crate) fn is_verified(&self) -> bool {
        self.overlap.is_none()
    }

    pub(crate) fn last_event(&self) -> Option<Last> {
        let (position, begin) = self.last?;
        Some(Last {
            commit_lsn: position.commit,
            index: position.index,
            xid: begin.xid,
            commit_time: begin.time_micros,
            event_id: self
                .last_has_id
                .then(|| String::from_utf8_lossy(&self.last_id).into_owned()),
        })
    }
}

fn truncate_id(id: &[u8]) -> &[u8] {
    &id[..id.len().min(ID_BYTES_MAX)]
}

pub(crate) mod overlap;

#[cfg(test)]
mod tests {
    use super::*;

    /// Even the end of a transaction without events shows that the stream has reached the safe LSN.
    #[test]
    fn finishes_wal_verification_when_a_transaction_reaches_the_safe_lsn() {
        let mut filter = DuplicateFilter::new(None, Lsn(0x310), Lsn(0x100));
        let mut commit = |lsn| {
            let begin = Begin {
                commit: Lsn(lsn),
                xid: 7,
                time_micros: 0,
            };
            filter.begin(&begin).expect("the same history");
            let next = Position {
                commit: Lsn(lsn),
                index: 0,
            };
            let safe = filter.commit(next, Lsn(lsn + 0x10));
            (safe.expect("the same history"), filter.is_verified())
        };
        assert_eq!(commit(0x200), (None, false));
        assert_eq!(commit(0x300), (Some(Lsn(0x310)), true));
        assert_eq!(
            commit(0x400),
            (None, true),
            "the safe LSN must be returned only once"
        );
    }
}
