//! Leaves out what Kafka has already, and notices when the log tells another history. Pure.

use super::checkpoint::{Delivered, HistoryError, Last};
use crate::postgres::lsn::{Lsn, Position};
use crate::postgres::pgoutput::Begin;

/// What a stream sends again and Kafka has.
#[derive(Debug)]
pub struct Dedup {
    delivered: Delivered,
    /// The last transaction that was published has to come again.
    awaited: bool,
}

impl Dedup {
    /// Leaves out `delivered` of a stream that resumes at `confirmed`.
    #[must_use]
    pub fn new(delivered: Delivered, confirmed: Lsn) -> Self {
        // PostgreSQL skips a transaction whose commit record is before what is confirmed.
        let awaited = matches!(&delivered, Delivered::UpTo(last) if last.commit_lsn >= confirmed);
        Self { delivered, awaited }
    }

    /// A transaction begins.
    ///
    /// # Errors
    /// It is not the one it was, or comes in the place of one that should have come.
    pub fn begin(&mut self, begin: &Begin) -> Result<(), HistoryError> {
        let Delivered::UpTo(last) = &self.delivered else {
            return Ok(());
        };
        if begin.commit > last.commit_lsn && self.awaited {
            return Err(HistoryError::TransactionMissing {
                commit: last.commit_lsn,
                next: begin.commit,
            });
        }
        if begin.commit == last.commit_lsn {
            self.awaited = false;
            expect(last, "number", begin.xid, last.xid)?;
            expect(last, "commit time", begin.time_micros, last.commit_time)?;
        }
        Ok(())
    }

    /// Whether Kafka has the row at this position; `id` gives the event's id.
    ///
    /// # Errors
    /// It is the last that was published, and has another id than then.
    pub fn has<'r>(
        &self,
        at: Position,
        id: impl FnOnce() -> Option<&'r [u8]>,
    ) -> Result<bool, HistoryError> {
        match &self.delivered {
            Delivered::Before(lsn) => Ok(at.commit < *lsn),
            Delivered::UpTo(last) => {
                if at == last.position() {
                    let id = id().map(|id| String::from_utf8_lossy(id).into_owned());
                    let shown =
                        |id: &Option<String>| id.clone().unwrap_or_else(|| "none".to_owned());
                    expect(last, "event id", shown(&id), shown(&last.event_id))?;
                }
                Ok(at <= last.position())
            }
        }
    }

    /// A transaction has ended that had so many row messages; whether nothing more is to be left
    /// out.
    ///
    /// # Errors
    /// It is the last that was published, and has become shorter.
    pub fn commit(&self, commit: Lsn, rows: u64) -> Result<bool, HistoryError> {
        match &self.delivered {
            Delivered::Before(lsn) => Ok(commit >= *lsn),
            Delivered::UpTo(last) => {
                if commit == last.commit_lsn && rows <= last.index {
                    let expected = format!("more than {}", last.index);
                    expect(last, "row messages", rows.to_string(), expected)?;
                }
                Ok(commit >= last.commit_lsn)
            }
        }
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
