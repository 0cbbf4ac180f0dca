//! After SIGTERM, Walpost delivers and confirms the events that it has already received, and then
//! exits.

use std::time::{Duration, Instant};

use crate::support::checker::{KilledState, Resends};
use crate::support::event::Outbox;
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, Server};
use crate::support::wait::wait_until;

for_each_outbox! {
    repeats_no_event_when_stopped_and_restarted_under_load
    drain_continues_to_the_end_of_a_large_transaction
    resends_a_whole_transaction_that_exceeds_the_drain_timeout
    drain_waits_for_broker_acknowledgements
    second_signal_stops_the_process_immediately
}

fn repeats_no_event_when_stopped_and_restarted_under_load(outbox: Outbox) {
    let fixture = Fixture::with_outbox(outbox);
    let aggregates = [fixture.aggregate(3), fixture.aggregate(1)];
    let load = fixture.load(&[&aggregates[0], &aggregates[1]]);
    let mut stops = Vec::new();
    for signal in ["TERM", "INT", "TERM", "INT", "TERM"] {
        let walpost = fixture.start();
        load.wait_for_transactions(40);
        walpost.signal(signal);
        walpost
            .finish()
            .expect_code(0)
            .expect_mentions(&["draining", "stopped"]);
        stops.push(fixture.record_killed());
    }
    load.stop();
    let walpost = fixture.start();
    assert_eq!(fixture.settle(walpost, &stops, Resends::Never).repeated, 0);
}

/// Stops Walpost after it has sent only part of a large transaction.
fn stop_in_transaction(outbox: Outbox, drain_timeout: &str) -> (Fixture<'static>, KilledState) {
    const EVENTS: usize = 100_000;
    let fixture = Fixture::with_outbox(outbox);
    let aggregate = fixture.aggregate(2);
    fixture
        .db
        .run(&fixture.events().insert_many(&aggregate, EVENTS, "'{}'"));
    let settings = ["--window-records", "200", "--drain-timeout", drain_timeout];
    let walpost = fixture.start_with(&settings);
    let count = fixture.wait_for_records(1).len();
    assert!(
        count < EVENTS / 2,
        "only part of the transaction must have been sent"
    );
    walpost.terminate().expect_code(0);
    let death = fixture.record_killed();
    (fixture, death)
}

fn drain_continues_to_the_end_of_a_large_transaction(outbox: Outbox) {
    let (fixture, death) = stop_in_transaction(outbox, "170s");
    let walpost = fixture.start();
    fixture.settle(walpost, &[death], Resends::Never);
}

fn resends_a_whole_transaction_that_exceeds_the_drain_timeout(outbox: Outbox) {
    let (fixture, death) = stop_in_transaction(outbox, "0s");
    assert!(death.confirmed < fixture.history()[0].end);
    let walpost = fixture.start();
    fixture.settle(walpost, &[death], Resends::AtMost(1));
}

/// Starts Walpost, inserts an event that a frozen broker does not acknowledge, and asks Walpost to
/// stop.
fn stop_while_broker_is_frozen(
    fixture: &Fixture,
    arguments: &[&str],
) -> crate::support::walpost::Walpost {
    let aggregate = fixture.aggregate(1);
    let mut walpost = fixture.start_with(arguments);
    fixture.insert(&aggregate, "k");
    fixture.wait_for_records(1);
    fixture.wait_until_confirmed();
    fixture.broker.freeze();
    fixture.insert(&aggregate, "k");
    let event = fixture.history().pop().unwrap().end;
    wait_until("the event to be sent", || fixture.has_sent(event));
    walpost.signal("TERM");
    walpost.wait_for_log("draining");
    walpost
}

fn drain_waits_for_broker_acknowledgements(outbox: Outbox) {
    let broker = Broker::borrowed();
    let fixture = Fixture::with_outbox_on(outbox, Server::shared(MAJOR), &broker);
    let mut walpost = stop_while_broker_is_frozen(&fixture, &[]);
    assert!(walpost.is_running());
    broker.thaw();
    walpost.finish().expect_code(0);
    assert!(fixture.confirmed() >= fixture.history().pop().unwrap().end);
    assert_eq!(fixture.check_delivered(&[], Resends::Never).repeated, 0);
}

#[test]
fn stops_when_the_drain_timeout_expires() {
    let broker = Broker::borrowed();
    let fixture = Fixture::on_servers(Server::shared(MAJOR), &broker);
    let walpost = stop_while_broker_is_frozen(&fixture, &["--drain-timeout", "1s"]);
    let started = Instant::now();
    let finished = walpost.finish();
    assert!(
        started.elapsed() < Duration::from_secs(20),
        "{:?}",
        started.elapsed()
    );
    assert!(finished.code.is_some(), "the process exits by itself");
    assert!(fixture.confirmed() < fixture.history().pop().unwrap().end);
    broker.thaw();
    let death = fixture.record_killed();
    let walpost = fixture.start();
    fixture.settle(walpost, &[death], Resends::AtMost(1));
}

fn second_signal_stops_the_process_immediately(outbox: Outbox) {
    let broker = Broker::borrowed();
    let fixture = Fixture::with_outbox_on(outbox, Server::shared(MAJOR), &broker);
    let walpost = stop_while_broker_is_frozen(&fixture, &["--drain-timeout", "60s"]);
    let started = Instant::now();
    walpost.signal("TERM");
    walpost.finish();
    assert!(
        started.elapsed() < Duration::from_secs(5),
        "{:?}",
        started.elapsed()
    );
    assert!(fixture.confirmed() < fixture.history().pop().unwrap().end);
    broker.thaw();
    let death = fixture.record_killed();
    let walpost = fixture.start();
    fixture.settle(walpost, &[death], Resends::AtMost(1));
}

#[test]
fn stops_on_request_while_postgresql_and_kafka_are_down() {
    let walpost = crate::support::walpost::Invocation::new([
        "run",
        "--kafka",
        "127.0.0.1:9",
        "--postgres",
        "host=/nowhere user=postgres dbname=postgres",
    ]);
    let mut walpost = walpost.start();
    walpost.wait_for_log("reconnecting");
    walpost.terminate().expect_code(0);
}

/// A terminal sends SIGHUP when it is closed. An operator sends it after changing the
/// configuration.
#[test]
fn sighup_reloads_the_configuration_without_stopping_pipelines() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    let mut walpost = fixture.start();
    walpost.signal("HUP");
    let line = walpost.wait_for_log("SIGHUP");
    assert!(line.contains(": 1 unchanged"), "{line}");
    fixture.insert(&aggregate, "k");
    fixture.wait_for_records(1);
    assert!(walpost.is_running());
    assert_eq!(fixture.settle(walpost, &[], Resends::Never).repeated, 0);
}
