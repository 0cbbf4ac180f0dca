//! Walpost is killed with SIGKILL at arbitrary times. No event is lost, the order is preserved, and
//! only records in flight are resent.

use std::ops::Range;
use std::thread;
use std::time::Duration;

use crate::support::checker::{DeliverySummary, Resends};
use crate::support::event::Outbox;
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::load::seed;
use crate::support::postgres::{MAJOR, Server};
use crate::support::wait::{assert_stays, wait_until};

const ROUNDS: usize = 25;

for_each_outbox! {
    loses_no_event_and_repeats_only_unconfirmed_ones_when_killed_under_load
    loses_no_event_when_killed_during_startup
    confirms_no_event_before_the_broker_acknowledges_it
    does_not_redeliver_events_confirmed_before_a_kill
}

fn loses_no_event_and_repeats_only_unconfirmed_ones_when_killed_under_load(outbox: Outbox) {
    let fixture = Fixture::with_outbox(outbox);
    let summary = kill_at_random_points(&fixture, ROUNDS, Resends::AtMost(ROUNDS));
    assert!(summary.committed > 1000, "{summary:?}");
}

/// Kills Walpost the given number of times under load, then checks the delivered records.
pub(crate) fn kill_at_random_points(
    fixture: &Fixture,
    rounds: usize,
    resends: Resends,
) -> DeliverySummary {
    let mut rng = fastrand::Rng::with_seed(seed());
    let aggregates = [fixture.aggregate(4), fixture.aggregate(1)];
    let load = fixture.load(&[&aggregates[0], &aggregates[1]]);
    let mut deaths = Vec::new();
    for round in 0..rounds {
        let walpost = fixture.start();
        if round % 2 == 0 {
            let before = fixture.confirmed();
            wait_until("the slot to move", || fixture.confirmed() > before);
        }
        // Sleep instead of waiting for a condition, because the time of the kill must be random.
        thread::sleep(Duration::from_millis(rng.u64(0..400)));
        deaths.push(fixture.kill(walpost));
    }
    let walpost = fixture.start();
    load.stop();
    fixture.settle(walpost, &deaths, resends)
}

fn loses_no_event_when_killed_during_startup(outbox: Outbox) {
    kill_while_it_starts(&Fixture::with_outbox(outbox), 0..150, Resends::AtMost(10));
}

/// Kills Walpost ten times, each time a random number of milliseconds after it was started. Then
/// checks the delivered records.
pub(crate) fn kill_while_it_starts(
    fixture: &Fixture,
    millis: Range<u64>,
    resends: Resends,
) -> DeliverySummary {
    let mut rng = fastrand::Rng::with_seed(seed());
    let aggregate = fixture.aggregate(2);
    let load = fixture.load(&[&aggregate]);
    let mut deaths = Vec::new();
    for _ in 0..10 {
        let walpost = fixture.run().start();
        thread::sleep(Duration::from_millis(rng.u64(millis.clone())));
        deaths.push(fixture.kill(walpost));
    }
    load.stop();
    let walpost = fixture.start();
    fixture.settle(walpost, &deaths, resends)
}

fn confirms_no_event_before_the_broker_acknowledges_it(outbox: Outbox) {
    let broker = Broker::borrowed();
    let fixture = Fixture::with_outbox_on(outbox, Server::shared(MAJOR), &broker);
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_and_confirm_one(&aggregate, "k");

    broker.freeze();
    for _ in 0..100 {
        fixture.insert(&aggregate, "k");
    }
    let first_open = fixture.history()[1].end;
    let last = fixture.history().pop().unwrap().end;
    wait_until("all to be sent", || fixture.has_sent(last));
    assert_stays(
        "unconfirmed while the broker is silent",
        Duration::from_secs(2),
        || fixture.confirmed() < first_open,
    );
    walpost.kill();
    broker.thaw();
    let death = fixture.record_killed();
    assert!(death.confirmed < first_open);
    let walpost = fixture.start();
    fixture.settle(walpost, &[death], Resends::AtMost(1));
}

fn does_not_redeliver_events_confirmed_before_a_kill(outbox: Outbox) {
    let fixture = Fixture::with_outbox(outbox);
    let aggregate = fixture.aggregate(1);
    let mut deaths = Vec::new();
    for round in 1..=5 {
        let walpost = fixture.start();
        for _ in 0..10 {
            fixture.insert(&aggregate, "k");
        }
        fixture.wait_for_records(round * 10);
        fixture.wait_until_confirmed();
        deaths.push(fixture.kill(walpost));
    }
    let walpost = fixture.start();
    assert_eq!(fixture.settle(walpost, &deaths, Resends::Never).repeated, 0);
}
