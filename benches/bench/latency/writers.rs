//! Sessions that commit on a fixed schedule. A delayed commit does not postpone the commits that
//! are scheduled after it.

use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::{now, sleep_until};
use crate::bed::{DATABASE, TestBed};
use crate::support::session::Session;

/// The number of sessions. With several sessions, a slow commit delays only the transactions of its
/// own session.
const SESSIONS: u32 = 8;

/// Prepares an INSERT for events whose payload contains the scheduled time and the time of the
/// insert, in microseconds since the Unix epoch.
const PREPARE: &str = "PREPARE add(bigint, bigint) AS
INSERT INTO outbox SELECT gen_random_uuid(), 'order', 'ord-' || ($1 % 10000), 'OrderCreated',
  payload($1, NULL) || jsonb_build_object('due', $2,
    'inserted', (extract(epoch FROM clock_timestamp()) * 1000000)::bigint)";

/// A schedule of evenly spaced single-row transactions.
#[derive(Clone, Copy)]
pub(super) struct Schedule {
    /// The start time, in microseconds since the Unix epoch.
    pub(super) begin: i64,
    per_second: u32,
    duration: Duration,
}

impl Schedule {
    /// Creates a schedule that starts after a short delay, so that the sessions can be opened
    /// first.
    pub(super) fn starting_soon(per_second: u32, duration: Duration) -> Self {
        const START_DELAY_MICROS: i64 = 500_000;
        Self {
            begin: now() + START_DELAY_MICROS,
            per_second,
            duration,
        }
    }

    pub(super) fn transactions(&self) -> usize {
        usize::try_from(u64::from(self.per_second) * self.duration.as_secs()).unwrap()
    }

    fn due(&self, transaction: u64) -> i64 {
        let since_begin = transaction * 1_000_000 / u64::from(self.per_second);
        self.begin + i64::try_from(since_begin).unwrap()
    }

    pub(super) fn start(&self, bed: &TestBed) -> Writers {
        let session = |number: u32| {
            let (schedule, db) = (*self, bed.server.session(DATABASE));
            thread::spawn(move || schedule.write(number, &db))
        };
        Writers((0..SESSIONS).map(session).collect())
    }

    /// Commits one session's transactions and returns how long each commit took, in milliseconds.
    /// After a stall, the session commits overdue transactions without pausing. Overdue
    /// transactions keep their scheduled times, so the measured latency of every delayed
    /// transaction includes the stall.
    fn write(&self, session: u32, db: &Session) -> Vec<f64> {
        db.run(PREPARE);
        let mut commits = Vec::new();
        let all = u64::try_from(self.transactions()).unwrap();
        for transaction in (u64::from(session)..all).step_by(SESSIONS as usize) {
            let due = self.due(transaction);
            sleep_until(due);
            let began = Instant::now();
            db.run(&format!("EXECUTE add({transaction}, {due})"));
            commits.push(began.elapsed().as_secs_f64() * 1_000.0);
        }
        commits
    }
}

/// The threads of the running sessions.
pub(super) struct Writers(Vec<JoinHandle<Vec<f64>>>);

impl Writers {
    /// Waits until all transactions are committed. Returns how long each commit took, in
    /// milliseconds.
    pub(super) fn join(self) -> Vec<f64> {
        let sessions = self.0.into_iter();
        sessions
            .flat_map(|session| session.join().expect("a session commits"))
            .collect()
    }
}

/// Commits one event.
pub(super) fn write_one(bed: &TestBed) {
    let db = bed.server.session(DATABASE);
    db.run(PREPARE);
    db.run(&format!("EXECUTE add(0, {})", now()));
}
