//! Leaves out what Kafka has already, and notices when the log tells another history. Pure.
//!
//! A database that is put back to an earlier state has the same identifier and timeline, and soon other
//! transactions in the places of those that were published. So the log has to prove itself: the last
//! event that was published comes again where it can, and up to the LSN that the checkpoint covers there
//! is none that Kafka has not. Until then nothing may be confirmed.

use crate::delivery::checkpoint::{Delivered, HistoryError, Last};
use crate::model::lsn::{Lsn, Position};
use crate::postgres::wire::pgoutput::Begin;

/// What a stream sends again and Kafka has.
#[derive(Debug)]
pub(crate) struct Overlap {
    delivered: Option<Delivered>,
    /// All that ends at or before this was dealt with.
    safe: Lsn,
    /// The last transaction that was published has to come again.
    awaited: bool,
}

impl Overlap {
    /// Leaves out `delivered` of a stream that resumes at `confirmed`, where everything that ends at or
    /// before `safe` was dealt with. None where nothing of that comes again.
    pub(crate) fn new(delivered: Option<Delivered>, safe: Lsn, confirmed: Lsn) -> Option<Self> {
        let (awaited, leaves_out) = match &delivered {
            // PostgreSQL skips a transaction whose commit record is before what is confirmed.
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

    /// A transaction begins.
    ///
    /// # Errors
    /// It is not the one it was, or comes in the place of one that should have come.
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

    /// Whether Kafka has the row at this position; `id` gives the event's id.
    ///
    /// # Errors
    /// It is the last that was published, and has another id than then; or Kafka should have it and has
    /// not.
    pub(crate) fn has<'r>(
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
        // Both are places of whole records: this commit record ends at or before `safe`.
        if at.commit < self.safe {
            return Err(HistoryError::NotPublished {
                commit: at.commit,
                safe: self.safe,
            });
        }
        Ok(false)
    }

    /// A transaction has ended, at `end`, that had so many row messages; whether WAL has proved
    /// itself and nothing more is to be left out.
    ///
    /// # Errors
    /// It is the last that was published, and has become shorter.
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
        Ok(self.is_over(end))
    }

    /// The server has nothing to send before `lsn`; the result is that of [`Overlap::commit`].
    ///
    /// # Errors
    /// A transaction that should have come before that did not.
    pub(crate) fn idle(&mut self, lsn: Lsn) -> Result<bool, HistoryError> {
        self.reached(lsn)?;
        Ok(self.is_over(lsn))
    }

    /// WAL is at `next`.
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

    fn is_over(&self, reached: Lsn) -> bool {
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
