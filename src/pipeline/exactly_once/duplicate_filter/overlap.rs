//! Omits events that are already in Kafka, and detects if the WAL contains another history. Pure.
//!
//! A database that is restored to an earlier state has the same identifier and timeline, and soon
//! contains different transactions at the positions of those that were published. The WAL is
//! therefore verified: the last published event must arrive again if it can, and up to the LSN that
//! the checkpoint covers, there must be no event that Kafka does not have. Until then, nothing may
//! be confirmed.

use crate::delivery::checkpoint::{Delivered, HistoryError, Last};
use crate::model::lsn::{Lsn, Position};
use crate::postgres::wire::pgoutput::Begin;

/// The events that a stream sends again and Kafka already has.
#[derive(Debug)]
pub(crate) struct Overlap {
    delivered: Option<Delivered>,
    /// Everything that ends at or before this LSN has been processed.
    safe: Lsn,
    /// The last published transaction must arrive again.
    awaited: bool,
}

impl Overlap {
    /// Omits `delivered` from a stream that resumes at `confirmed`, if everything that ends at or
    /// before `safe` has been processed. Returns `None` if none of this arrives again.
    pub(crate) fn new(delivered: Option<Delivered>, safe: Lsn, confirmed: Lsn) -> Option<Self> {
        let (awaited, leaves_out) = match &delivered {
            // PostgreSQL skips transactions whose commit record is before the confirmed position.
            Some(Delivered::UpTo(last)) => (last.commit_lsn >= confirmed, false),
            Some(Delivered::Before(lsn)) => (false, *lsn > confirmed),
            None => (false, false),
        };
        (awaited || leaves_out || safe > confirmed).then_some(Self {
            delivered,
            safe,
            awaited,
        })
    }

    /// Processes the start of a transaction.
    ///
    /// # Errors
    /// The transaction differs from the one that was published, or arrives in place of one that
    /// should have arrived.
    pub(crate) fn begin(&mut self, begin: &Begin) -> Result<(), HistoryError> {
        self.reached(begin.commit)?;
        if let Some(Delivered::UpTo(last)) = &self.delivered
            && begin.commit == last.commit_lsn
        {
            expect(last, "number", begin.xid, last.xid)?;
            expect(last, "commit time", begin.time_micros, last.commit_time)?;
        }
        Ok(())
    }

    /// Returns whether Kafka has the row at this position. `id` returns the event's ID.
    ///
    /// # Errors
    /// The row is the last published one and has a different ID than when it was published, or
    /// Kafka should have it but does not.
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
                    expect(last, "event id", shown(&id), shown(&last.event_id))?;
                    self.awaited = false;
                }
                return Ok(true);
            }
            _ => {}
        }
        // Both LSNs are record boundaries, so this commit record ends at or before `safe`.
        if at.commit < self.safe {
            return Err(HistoryError::NotPublished {
                commit: at.commit,
                safe: self.safe,
            });
        }
        Ok(false)
    }

    /// Processes the end of a transaction, at `end`, that had this many row messages. Returns
    /// whether the WAL has been verified and nothing else must be omitted.
    ///
    /// # Errors
    /// The transaction is the last published one, and has become shorter.
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
                expect(last, "row messages", rows.to_string(), expected)?;
            }
            self.awaited = false;
        }
        Ok(self.is_past(end))
    }

    /// Processes a message that the server has nothing to send before `lsn`. Returns the same as
    /// [`Overlap::commit`].
    ///
    /// # Errors
    /// A transaction that should have arrived before that did not.
    pub(crate) fn idle(&mut self, lsn: Lsn) -> Result<bool, HistoryError> {
        self.reached(lsn)?;
        Ok(self.is_past(lsn))
    }

    /// Checks that nothing is missing before `next`, the position that the WAL has reached.
    fn reached(&self, next: Lsn) -> Result<(), HistoryError> {
        match &self.delivered {
            Some(Delivered::UpTo(last)) if self.awaited && next > last.commit_lsn => {
                Err(HistoryError::TransactionMissing {
                    commit: last.commit_lsn,
                    next,
                })
            }
            _ => Ok(()),
        }
    }

    fn is_past(&self, reached: Lsn) -> bool {
        let leaves_out = match &self.delivered {
            Some(Delivered::Before(lsn)) => reached < *lsn,
            Some(Delivered::UpTo(_)) | None => self.awaited,
        };
        !leaves_out && reached >= self.safe
    }
}

fn expect<T: PartialEq + ToString>(
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
