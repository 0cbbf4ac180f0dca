//! Tracks the events in the stream for exactly-once delivery.

use self::overlap::Overlap;
use crate::delivery::checkpoint::{Delivered, HistoryError, Last};
use crate::model::lsn::{Lsn, Position};
use crate::postgres::wire::pgoutput::Begin;

/// How much of an event's ID is kept, in bytes. Enough for any ID that distinguishes events.
const ID_BYTES_MAX: usize = 100;

/// Omits events from the stream that are already in Kafka, and remembers the last event for the
/// next checkpoint.
pub(crate) struct DuplicateFilter {
    /// The events that are already in Kafka, until the stream has passed them.
    overlap: Option<Overlap>,
    /// Everything that ends at or before this LSN had been processed when the filter was created.
    safe: Lsn,
    /// The transaction that is open, or was open last.
    begin: Option<Begin>,
    /// The last delivered event, and its transaction.
    last: Option<(Position, Begin)>,
    /// ID of that event. A separate buffer, so that its allocation is reused.
    last_id: Vec<u8>,
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

    /// Processes the start of a transaction.
    pub(crate) fn begin(&mut self, begin: &Begin) -> Result<(), HistoryError> {
        self.begin = Some(*begin);
        match &mut self.overlap {
            Some(overlap) => overlap.begin(begin),
            None => Ok(()),
        }
    }

    /// Returns whether Kafka has the event at this position.
    pub(crate) fn is_delivered<'r>(
        &mut self,
        at: Position,
        id: impl FnOnce() -> Option<&'r [u8]>,
    ) -> Result<bool, HistoryError> {
        match &mut self.overlap {
            Some(overlap) => overlap.is_delivered(at, || id().map(cut)),
            None => Ok(false),
        }
    }

    /// Records that the sink has accepted the event at this position.
    pub(crate) fn delivered(&mut self, at: Position, id: Option<&[u8]>) {
        self.last = self.begin.map(|begin| (at, begin));
        self.last_id.clear();
        self.last_id.extend_from_slice(cut(id.unwrap_or_default()));
        self.last_has_id = id.is_some();
    }

    /// Processes the end of a transaction, at `end`. `next` is the position that the transaction's
    /// next row message would have had. If this verifies the WAL, returns the LSN up to which
    /// everything had been processed before.
    pub(crate) fn commit(&mut self, next: Position, end: Lsn) -> Result<Option<Lsn>, HistoryError> {
        let is_over = match &mut self.overlap {
            Some(overlap) => overlap.commit(next.commit, end, next.index)?,
            None => false,
        };
        Ok(self.end_overlap(is_over))
    }

    /// Processes a message that the server has nothing to send before `lsn`. Returns the same as
    /// [`DuplicateFilter::commit`].
    pub(crate) fn idle(&mut self, lsn: Lsn) -> Result<Option<Lsn>, HistoryError> {
        let is_over = match &mut self.overlap {
            Some(overlap) => overlap.idle(lsn)?,
            None => false,
        };
        Ok(self.end_overlap(is_over))
    }

    fn end_overlap(&mut self, is_over: bool) -> Option<Lsn> {
        is_over.then(|| {
            self.overlap = None;
            self.safe
        })
    }

    /// Returns whether the WAL has been verified to be the one that was published.
    pub(crate) fn is_proved(&self) -> bool {
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

fn cut(id: &[u8]) -> &[u8] {
    &id[..id.len().min(ID_BYTES_MAX)]
}

pub(crate) mod overlap;

#[cfg(test)]
mod tests {
    use super::*;

    /// There is no event before the safe LSN, so only the end of a transaction shows that the WAL
    /// has reached it.
    #[test]
    fn the_end_of_a_transaction_proves_what_is_safe_once() {
        let mut filter = DuplicateFilter::new(None, Lsn(0x310), Lsn(0x100));
        let mut commit = |lsn| {
            let begin = Begin {
                commit: Lsn(lsn),
                xid: 7,
                time_micros: 0,
            };
            filter.begin(&begin).expect("nothing is awaited");
            let next = Position {
                commit: Lsn(lsn),
                index: 0,
            };
            let safe = filter.commit(next, Lsn(lsn + 0x10));
            (safe.expect("nothing is awaited"), filter.is_proved())
        };
        assert_eq!(commit(0x200), (None, false));
        assert_eq!(commit(0x300), (Some(Lsn(0x310)), true));
        assert_eq!(commit(0x400), (None, true), "it is said once");
    }
}
