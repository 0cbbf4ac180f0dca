//! Identifies events that are already in Kafka, and detects whether the WAL has diverged from the
//! WAL that these events came from. This module performs no I/O.
//!
//! After a database is restored to an earlier state, it may have the same system identifier and
//! timeline as before, and new transactions are soon written at the positions of transactions that
//! were already published. Skipping events by position alone would lose the new transactions, so
//! the WAL is verified first. If the server resends the last published event, it must be the same
//! event, and there must be no unpublished events up to the LSN that the checkpoint covers. Until
//! the WAL is verified, no position may be confirmed.

use crate::delivery::checkpoint::{Delivered, HistoryError, Last};
use crate::model::lsn::{Lsn, Position};
use crate::postgres::wire::pgoutput::Begin;

/// The events at the beginning of a stream that are already in Kafka.
#[derive(Debug)]
pub(crate) struct Overlap {
    delivered: Option<Delivered>,
    /// All transactions that end at or before this LSN have been processed.
    safe: Lsn,
    /// Whether the last published transaction is expected in the stream but has not arrived yet.
    is_awaiting_last: bool,
}

impl Overlap {
    /// Creates the overlap between the events in `delivered` and a stream that resumes at
    /// `confirmed`. All transactions that end at or before `safe` have been processed. Returns
    /// `None` if the stream does not repeat any processed transaction.
    pub(crate) fn new(delivered: Option<Delivered>, safe: Lsn, confirmed: Lsn) -> Option<Self> {
        let (is_awaiting_last, omits_events) = match &delivered {
            // PostgreSQL does not send transactions whose commit record precedes the confirmed
            // position.
            Some(Delivered::UpTo(last)) => (last.commit_lsn >= confirmed, false),
            Some(Delivered::Before(lsn)) => (false, *lsn > confirmed),
            None => (false, false),
        };
        (is_awaiting_last || omits_events || safe > confirmed).then_some(Self {
            delivered,
            safe,
            is_awaiting_last,
        })
    }

    /// Processes the beginning of a transaction.
    ///
    /// # Errors
    /// Returns an error if the transaction differs from the published transaction at the same
    /// position, or if the last published transaction should have arrived before this one.
    pub(crate) fn begin(&mut self, begin: &Begin) -> Result<(), HistoryError> {
        self.check_reached(begin.commit)?;
        if let Some(Delivered::UpTo(last)) = &self.delivered
            && begin.commit == last.commit_lsn
        {
            check_equal(last, "number", begin.xid, last.xid)?;
            check_equal(last, "commit time", begin.time_micros, last.commit_time)?;
        }
        Ok(())
    }

    /// Returns whether the event at position `at` is already in Kafka. `id` returns the event's ID.
    ///
    /// # Errors
    /// Returns an error if the event is the last published event but its ID has changed, or if the
    /// event should be in Kafka but is not.
    pub(crate) fn is_delivered<'r>(
        &mut self,
        at: Position,
        id: impl FnOnce() -> Option<&'r [u8]>,
    ) -> Result<bool, HistoryError> {
        match &self.delivered {
            Some(Delivered::Before(lsn)) if at.commit < *lsn => return Ok(true),
            Some(Delivered::UpTo(last)) if at <= last.position() => {
                if at == last.position() {
                    let id = id().map(|id| String::from_utf8_lossy(id).into_owned());
                    let shown =
                        |id: &Option<String>| id.clone().unwrap_or_else(|| "none".to_owned());
                    check_equal(last, "event id", shown(&id), shown(&last.event_id))?;
                    self.is_awaiting_last = false;
                }
                return Ok(true);
            }
            _ => {}
        }
        // `at.commit` and `safe` are boundaries between WAL records, so a commit record that starts
        // before `safe` also ends at or before it. The event should therefore have been published.
        if at.commit < self.safe {
            return Err(HistoryError::NotPublished {
                commit: at.commit,
                safe: self.safe,
            });
        }
        Ok(false)
    }

    /// Processes the end of a transaction with `rows` row messages. `end` is the LSN after its
    /// commit record. Returns whether the stream has passed the overlap, which means that the WAL
    /// has been verified and no later event needs to be skipped.
    ///
    /// # Errors
    /// Returns an error if this is the transaction that was published last, but it has fewer rows
    /// than were published.
    pub(crate) fn commit(
        &mut self,
        commit: Lsn,
        end: Lsn,
        rows: u64,
    ) -> Result<bool, HistoryError> {
        if let Some(Delivered::UpTo(last)) = &self.delivered
            && commit == last.commit_lsn
        {
            if rows <= last.index {
                let expected = format!("more than {}", last.index);
                check_equal(last, "row messages", rows.to_string(), expected)?;
            }
            self.is_awaiting_last = false;
        }
        Ok(self.is_past(end))
    }

    /// Processes a keepalive, which means that the server has no more events to send before `lsn`.
    /// Returns whether the WAL has been verified and no later event needs to be skipped.
    ///
    /// # Errors
    /// Returns an error if the last published transaction should have arrived before `lsn` but did
    /// not.
    pub(crate) fn process_keepalive(&mut self, lsn: Lsn) -> Result<bool, HistoryError> {
        self.check_reached(lsn)?;
        Ok(self.is_past(lsn))
    }

    /// Checks that the last published transaction has arrived if it precedes `next`, the position
    /// that the stream has reached.
    fn check_reached(&self, next: Lsn) -> Result<(), HistoryError> {
        match &self.delivered {
            Some(Delivered::UpTo(last)) if self.is_awaiting_last && next > last.commit_lsn => {
                Err(HistoryError::TransactionMissing {
                    commit: last.commit_lsn,
                    next,
                })
            }
            _ => Ok(()),
        }
    }

    fn is_past(&self, reached: Lsn) -> bool {
        let omits_events = match &self.delivered {
            Some(Delivered::Before(lsn)) => reached < *lsn,
            Some(Delivered::UpTo(_)) | None => self.is_awaiting_last,
        };
        !omits_events && reached >= self.safe
    }
}

fn check_equal<T: PartialEq + ToString>(
    last: &Last,
    what: &'static str,
    found: T,
    expected: T,
) -> Result<(), HistoryError> {
    if found == expected {
        return Ok(());
    }
    Err(HistoryError::OtherTransaction {
        commit: last.commit_lsn,
        what,
        found: found.to_string(),
        expected: expected.to_string(),
    })
}

#[cfg(test)]
mod tests;
