//! Concurrent sessions that write events. They commit most of their transactions and roll back the
//! others.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::event::{Event, EventWriter};
use super::secrets::PAYLOAD_MARK;
use super::session::Session;

/// The parameters of [`Load`].
#[derive(Clone, Debug)]
pub(crate) struct LoadProfile {
    pub(crate) conninfo: String,
    pub(crate) events: EventWriter,
    pub(crate) aggregates: Vec<String>,
    /// How many different keys the events have.
    pub(crate) keys: u32,
    /// Number of sessions.
    pub(crate) writers: u64,
    /// How long a session pauses between two transactions.
    pub(crate) pause: Duration,
}

/// Sessions that keep writing, even across server restarts, until [`Load::stop`] is called or this
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

    /// Returns the number of transactions whose COMMIT the server has acknowledged.
    pub(crate) fn transactions(&self) -> usize {
        self.committed.load(Ordering::Relaxed)
    }

    /// Waits until this many more transactions have been committed.
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

/// Returns the seed for this run's random numbers, and prints it to standard error.
/// `WALPOST_TEST_SEED` sets the seed; otherwise it is random.
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

/// Returns whether a test may legitimately cause an error with this code: the disk is full (class
/// 53); the server is shutting down, starting up or has crashed (57); the server can't write (58);
/// or the server is a standby (25006).
fn is_expected_error(code: &str) -> bool {
    ["53", "57", "58", "25006"]
        .iter()
        .any(|class| code.starts_with(class))
}

/// Returns the SQL of a transaction with one to five events, and whether it commits.
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
