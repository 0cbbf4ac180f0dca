//! Writers that commit events in concurrent sessions and roll some of them back.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::event::{Event, EventWriter};
use super::secrets::PAYLOAD_MARK;
use super::session::Session;

/// The parameters of a load.
#[derive(Clone, Debug)]
pub(crate) struct LoadProfile {
    pub(crate) conninfo: String,
    pub(crate) events: EventWriter,
    pub(crate) aggregates: Vec<String>,
    /// Number of different keys.
    pub(crate) keys: u32,
    /// Number of sessions.
    pub(crate) writers: u64,
    /// How long a session pauses between two transactions.
    pub(crate) pause: Duration,
}

/// Running writers. They continue across server restarts, until [`Load::stop`] is called or this
/// value is dropped.
pub(crate) struct Load {
    stop: Arc<AtomicBool>,
    committed: Arc<AtomicUsize>,
    writers: Vec<JoinHandle<()>>,
}

impl Load {
    pub(crate) fn start(profile: &LoadProfile) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let committed = Arc::new(AtomicUsize::new(0));
        let writers = (0..profile.writers)
            .map(|writer| {
                let (profile, stop, committed) =
                    (profile.clone(), Arc::clone(&stop), Arc::clone(&committed));
                let rng = fastrand::Rng::with_seed(seed().wrapping_add(writer));
                thread::spawn(move || write(&profile, rng, &stop, &committed))
            })
            .collect();
        Self {
            stop,
            committed,
            writers,
        }
    }

    /// Returns the number of transactions known to have been committed so far.
    pub(crate) fn transactions(&self) -> usize {
        self.committed.load(Ordering::Relaxed)
    }

    /// Waits until this many more transactions are committed.
    pub(crate) fn wait_for_transactions(&self, more: usize) {
        let goal = self.transactions() + more;
        super::wait::wait_until("the writers to commit", || self.transactions() >= goal);
    }

    /// Stops the writers.
    pub(crate) fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for writer in self.writers.drain(..) {
            let ended = writer.join();
            assert!(ended.is_ok() || thread::panicking(), "a writer failed");
        }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.end();
    }
}

/// Returns the seed of this run's random numbers: `WALPOST_TEST_SEED` if set, otherwise a random
/// seed. It is printed to standard error.
pub(crate) fn seed() -> u64 {
    static SEED: std::sync::LazyLock<u64> = std::sync::LazyLock::new(|| {
        let given = std::env::var("WALPOST_TEST_SEED")
            .ok()
            .and_then(|seed| seed.parse().ok());
        given.unwrap_or_else(|| fastrand::u64(..))
    });
    eprintln!("replay: WALPOST_TEST_SEED={}", *SEED);
    *SEED
}

fn write(
    profile: &LoadProfile,
    mut rng: fastrand::Rng,
    stop: &AtomicBool,
    committed: &AtomicUsize,
) {
    let mut session = None;
    while !stop.load(Ordering::Relaxed) {
        if session.is_none() {
            session = Session::connect(&profile.conninfo).ok();
        }
        if let Some(open) = &session {
            let (sql, commits) = transaction(profile, &mut rng);
            match open.try_run(&sql) {
                Ok(()) if commits => _ = committed.fetch_add(1, Ordering::Relaxed),
                Ok(()) => {}
                Err(error) => {
                    let refused = error
                        .as_db_error()
                        .is_some_and(|db| !is_expected_error(db.code().code()));
                    assert!(!refused, "{error}: {:?}\n{sql}", error.as_db_error());
                    session = None;
                }
            }
        }
        thread::sleep(profile.pause);
    }
}

/// Returns whether an error with this code can occur during the test. Class 53: the disk is full.
/// Class 57: the server is shutting down, starting or has crashed. Class 58: the server can't
/// write. 25006: the server is a standby.
fn is_expected_error(code: &str) -> bool {
    ["53", "57", "58", "25006"]
        .iter()
        .any(|class| code.starts_with(class))
}

/// Returns a transaction with one to five events, and whether it commits.
fn transaction(profile: &LoadProfile, rng: &mut fastrand::Rng) -> (String, bool) {
    let mut sql = String::from("BEGIN;");
    for _ in 0..rng.u32(1..=5) {
        let event = event(profile, rng);
        if rng.u32(..10) == 0 {
            let discarded = event.clone();
            sql.push_str(&format!("SAVEPOINT s; {discarded} ROLLBACK TO s;"));
        }
        sql.push_str(&event);
    }
    let commits = rng.u32(..10) != 0;
    sql.push_str(if commits { "COMMIT" } else { "ROLLBACK" });
    (sql, commits)
}

fn event(profile: &LoadProfile, rng: &mut fastrand::Rng) -> String {
    let aggregate = rng.choice(&profile.aggregates).expect("an aggregate");
    let key = format!("key-{}", rng.u32(..profile.keys));
    let number = rng.u32(..);
    let payload = format!("{{\"mark\": \"{PAYLOAD_MARK}\", \"number\": {number}}}");
    profile
        .events
        .insert_one(Event::new(aggregate, &key, &payload))
}
