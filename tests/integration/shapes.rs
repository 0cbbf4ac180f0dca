//! A seeded random walk over real servers whose objects change while events are written: `./dev
//! soak --shapes`.
//!
//! Each step creates, alters, drops or replaces something that Walpost depends on: tables,
//! publications, slots, definitions, topics, rights, or the server itself. In between, Walpost is
//! started, stopped and killed. At the end an operator follows the remedies in Walpost's messages
//! until it delivers. Then every committed event must have been delivered or be named by a finding,
//! and in exactly-once mode no event may have been delivered twice.
//!
//! `WALPOST_SHAPES_WITHOUT` lists groups of steps to leave out: slot, publication, definition,
//! topic, access, server.

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
fn random_walks_lose_no_event_silently() {
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

// The modes have separate tests, so that they run in parallel.
#[test]
fn short_walk_in_exactly_once_mode_loses_no_event_silently() {
    walk_once(1, 20);
}

#[test]
fn short_walk_in_at_least_once_mode_loses_no_event_silently() {
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
