//! Whether reading the slot crashes the server. When one of its processes crashes, PostgreSQL ends all sessions and recovers, so a
//! position that cannot be decoded would stop the whole server again and again.
//!
//! A restart by an operator or by Patroni is not counted: it starts another postmaster. Pure.

use super::session::error::SlotError;
use crate::model::lsn::Lsn;
use crate::postgres::catalog::ServerStarts;

/// After this many crashes without progress, the slot is not read again.
const CRASHES_MAX: u32 = 3;

/// The crashes of a server since the stream last made progress.
#[derive(Debug, Default)]
pub(crate) struct Crashes {
    starts: Option<ServerStarts>,
    /// The slot was read, or was about to be.
    has_read: bool,
    count: u32,
    /// What the stream has reached.
    reached: Lsn,
    /// What it had reached at the last crash.
    reached_before: Lsn,
}

impl Crashes {
    /// The server is told to read the slot.
    pub(crate) fn begin_reading(&mut self) {
        self.has_read = true;
    }

    /// The stream has come to this position: a commit record, or the end of what the server has decoded.
    pub(crate) fn reached(&mut self, position: Lsn) {
        self.reached = self.reached.max(position);
    }

    /// Compares the starts of the server that is to stream with those seen before.
    ///
    /// # Errors
    /// It has crashed too often.
    pub(crate) fn check(&mut self, starts: &ServerStarts, slot: &str) -> Result<(), SlotError> {
        let before = self.starts.replace(starts.clone());
        let has_crashed = before.is_some_and(|before| {
            before.postmaster == starts.postmaster && before.statistics != starts.statistics
        });
        // Whatever crashes the server in between is not the slot.
        if !std::mem::take(&mut self.has_read) || !has_crashed {
            return Ok(());
        }
        if self.reached > self.reached_before {
            self.count = 0;
        }
        self.reached_before = self.reached;
        self.count += 1;
        match self.count >= CRASHES_MAX {
            true => Err(SlotError::ServerCrashes {
                slot: slot.to_owned(),
                times: self.count,
                at: self.reached,
            }),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn starts(postmaster: u32, statistics: u32) -> ServerStarts {
        ServerStarts {
            postmaster: postmaster.to_string(),
            statistics: statistics.to_string(),
        }
    }

    #[test]
    fn third_crash_without_progress_is_an_error() {
        let mut crashes = Crashes::default();
        crashes.reached(Lsn(100));
        let mut check = |statistics| {
            let is_allowed = crashes.check(&starts(1, statistics), "slot").is_ok();
            crashes.begin_reading();
            is_allowed
        };
        assert!(check(1));
        assert!(check(2));
        // Without a crash in between.
        assert!(check(2));
        assert!(check(3));
        assert!(!check(4));
    }

    #[test]
    fn progress_and_restarts_of_the_server_are_no_crash() {
        let mut crashes = Crashes::default();
        for round in 0..10 {
            crashes.reached(Lsn(100 + u64::from(round)));
            assert!(crashes.check(&starts(1, round), "slot").is_ok(), "{round}");
            crashes.begin_reading();
        }
        for round in 0..10 {
            let restarted = starts(100 + round, 100 + round);
            assert!(crashes.check(&restarted, "slot").is_ok(), "{round}");
            crashes.begin_reading();
        }
    }

    #[test]
    fn crashes_while_the_slot_is_not_read_are_not_counted() {
        let mut crashes = Crashes::default();
        for round in 0..10 {
            assert!(crashes.check(&starts(1, round), "slot").is_ok(), "{round}");
        }
    }
}
