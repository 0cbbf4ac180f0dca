//! A random walk with a given seed, which changes objects on real servers while events are written.
//! `./dev soak --shapes` runs it.
//!
//! Each step creates, alters, drops or replaces something that Walpost depends on: tables,
//! publications, slots, definitions, topics, privileges, or the server itself. Between steps,
//! Walpost is started, stopped and killed. At the end, the test follows the remedies in Walpost's
//! messages, as an operator would, until Walpost delivers again. Every committed event must then
//! have been delivered or reported as possibly missing. In exactly-once mode, it is an error if an
//! event has been delivered more than once.
//!
//! The environment variable `WALPOST_SHAPES_WITHOUT` lists groups of steps to omit: slot,
//! publication, definition, topic, access, server.

mod access;
mod definition;
mod events;
mod evidence;
mod outbox;
mod process;
mod remedy;
mod server;
mod slot;
mod topic;
mod verdict;
mod walk;

use std::env;
use std::time::{Duration, Instant};

use crate::support::load::seed;

use server::Servers;
use verdict::WalkVerdict;
use walk::Walk;

#[test]
#[ignore = "runs for a configured time: ./dev soak --shapes --minutes N"]
fn random_operations_never_lose_an_event_silently() {
    let minutes = env::var("WALPOST_SOAK_MINUTES").map_or(10, |text| text.parse().unwrap());
    let until = Instant::now() + Duration::from_secs(60 * minutes);
    let first = seed();
    let mut walks = 0;
    let mut total = WalkVerdict::default();
    while Instant::now() < until {
        total += walk_once(first.wrapping_add(walks), 60);
        walks += 1;
    }
    eprintln!("{walks} walks: {total}");
}

// Each mode has its own test, so that the tests of both modes run in parallel.
#[test]
fn short_random_run_in_exactly_once_mode_never_loses_an_event_silently() {
    walk_once(1, 20);
}

#[test]
fn short_random_run_in_at_least_once_mode_never_loses_an_event_silently() {
    walk_once(3, 20);
}

fn walk_once(seed: u64, steps: usize) -> WalkVerdict {
    let servers = Servers::default();
    let mut walk = Walk::start(&servers, seed);
    eprintln!("walk {seed}: {}", walk.describe());
    for _ in 0..steps {
        walk.step();
    }
    let verdict = walk.evaluate(seed);
    eprintln!("walk {seed}: {verdict}");
    verdict
}
