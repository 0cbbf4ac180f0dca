//! Detects whether reading the slot crashes the server. If a single backend crashes, PostgreSQL
//! terminates all sessions and runs crash recovery. If decoding crashes at some position in the
//! WAL, every attempt to reconnect therefore takes down the whole server.
//!
//! A restart by an operator or by Patroni is not counted as a crash, because it starts a new
//! postmaster. This module performs no I/O.

use super::session::error::SlotError;
use crate::model::lsn::Lsn;
use crate::postgres::catalog::ServerStarts;

/// Number of crashes without progress after which Walpost stops reading the slot.
const CRASHES_MAX: u32 = 3;

/// Counts the server's crashes since the stream last made progress.
#[derive(Debug, Default)]
pub(crate) struct Crashes {
    starts: Option<ServerStarts>,
    /// Whether the slot may have been read since the last call to [`Crashes::check`].
    has_read: bool,
    count: u32,
    /// The highest position that the stream has reached.
    reached: Lsn,
    /// The position that the stream had reached at the last crash.
    reached_before: Lsn,
}

impl Crashes {
    /// Records that reading from the slot is about to start.
    pub(crate) fn begin_reading(&mut self) {
        self.has_read = true;
    }

    /// Records the position that the stream has reached: the LSN of a commit record, or the end of
    /// the WAL that the server has decoded.
    pub(crate) fn record_position(&mut self, position: Lsn) {
        self.reached = self.reached.max(position);
    }

    /// Compares the server's start times with those from the previous check.
    ///
    /// # Errors
    /// Returns an error if the server has crashed too often without progress.
    pub(crate) fn check(&mut self, starts: &ServerStarts, slot: &str) -> Result<(), SlotError> {
        let before = self.starts.replace(starts.clone());
        let has_crashed = before.is_some_and(|before| {
            before.postmaster == starts.postmaster && before.statistics != starts.statistics
        });
        // If the slot was not being read, something else must have caused the crash.
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
    fn fails_on_the_third_server_crash_without_progress() {
        let mut crashes = Crashes::default();
        crashes.record_position(Lsn(100));
        let mut check = |statistics| {
            let is_allowed = crashes.check(&starts(1, statistics), "slot").is_ok();
            crashes.begin_reading();
            is_allowed
        };
        assert!(check(1));
        assert!(check(2));
        // The start times are the same, so the server has not crashed since the last check.
        assert!(check(2));
        assert!(check(3));
        assert!(!check(4));
    }

    #[test]
    fn ignores_server_restarts_and_crashes_followed_by_progress() {
        let mut crashes = Crashes::default();
        for round in 0..10 {
            crashes.record_position(Lsn(100 + u64::from(round)));
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
    fn ignores_crashes_while_the_slot_is_not_being_read() {
        let mut crashes = Crashes::default();
        for round in 0..10 {
            assert!(crashes.check(&starts(1, round), "slot").is_ok(), "{round}");
        }
    }
}
