//! SIGTERM: events already received are delivered and confirmed before the process exits.

use std::time::{Duration, Instant};

use crate::support::checker::{KilledState, Resends};
use crate::support::event::Outbox;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, Server};
use crate::support::scene::Scene;
use crate::support::wait::wait_until;

for_each_outbox! {
    stopped_and_started_under_load_it_repeats_nothing
    stopped_in_a_large_transaction_it_goes_on_to_the_end_of_it
    transaction_that_does_not_end_in_time_is_sent_again_whole
    drain_waits_for_the_broker
    second_signal_stops_at_once
}

fn stopped_and_started_under_load_it_repeats_nothing(outbox: Outbox) {
    let scene = Scene::with_outbox(outbox);
    let aggregates = [scene.aggregate(3), scene.aggregate(1)];
    let load = scene.load(&[&aggregates[0], &aggregates[1]]);
    let mut stops = Vec::new();
    for signal in ["TERM", "INT", "TERM", "INT", "TERM"] {
        let walpost = scene.start();
        load.wait_for_transactions(40);
        walpost.signal(signal);
        walpost
            .finish()
            .expect_code(0)
            .expect_mentions(&["draining", "stopped"]);
        stops.push(scene.record_killed());
    }
    load.stop();
    let walpost = scene.start();
    assert_eq!(scene.settle(walpost, &stops, Resends::Never).repeated, 0);
}

/// Stops Walpost when it has sent only part of a large transaction.
fn stopped_in_a_transaction(outbox: Outbox, drain_timeout: &str) -> (Scene<'static>, KilledState) {
    const EVENTS: usize = 100_000;
    let scene = Scene::with_outbox(outbox);
    let aggregate = scene.aggregate(2);
    scene
        .db
        .run(&scene.events().insert_many(&aggregate, EVENTS, "'{}'"));
    let settings = ["--window-records", "200", "--drain-timeout", drain_timeout];
    let walpost = scene.start_with(&settings);
    let count = scene.wait_for_records(1).len();
    assert!(count < EVENTS / 2, "only a part must have been sent");
    walpost.terminate().expect_code(0);
    let death = scene.record_killed();
    (scene, death)
}

fn stopped_in_a_large_transaction_it_goes_on_to_the_end_of_it(outbox: Outbox) {
    let (scene, death) = stopped_in_a_transaction(outbox, "170s");
    let walpost = scene.start();
    scene.settle(walpost, &[death], Resends::Never);
}

fn transaction_that_does_not_end_in_time_is_sent_again_whole(outbox: Outbox) {
    let (scene, death) = stopped_in_a_transaction(outbox, "0s");
    assert!(death.confirmed < scene.history()[0].end);
    let walpost = scene.start();
    scene.settle(walpost, &[death], Resends::AtMost(1));
}

/// Starts Walpost with an event that a frozen broker does not acknowledge, and asks it to stop.
fn stopped_while_broker_is_silent(
    scene: &Scene,
    arguments: &[&str],
) -> crate::support::walpost::Walpost {
    let aggregate = scene.aggregate(1);
    let mut walpost = scene.start_with(arguments);
    scene.insert(&aggregate, "k");
    scene.wait_for_records(1);
    scene.wait_until_confirmed();
    scene.broker.freeze();
    scene.insert(&aggregate, "k");
    let event = scene.history().pop().unwrap().end;
    wait_until("the event to be sent", || scene.has_sent(event));
    walpost.signal("TERM");
    walpost.wait_for_log("draining");
    walpost
}

fn drain_waits_for_the_broker(outbox: Outbox) {
    let broker = Broker::borrowed();
    let scene = Scene::with_outbox_on(outbox, Server::shared(MAJOR), &broker);
    let mut walpost = stopped_while_broker_is_silent(&scene, &[]);
    assert!(walpost.is_running());
    broker.thaw();
    walpost.finish().expect_code(0);
    assert!(scene.confirmed() >= scene.history().pop().unwrap().end);
    assert_eq!(scene.check_delivered(&[], Resends::Never).repeated, 0);
}

#[test]
fn drain_is_bounded() {
    let broker = Broker::borrowed();
    let scene = Scene::on_servers(Server::shared(MAJOR), &broker);
    let walpost = stopped_while_broker_is_silent(&scene, &["--drain-timeout", "1s"]);
    let begun = Instant::now();
    let finished = walpost.finish();
    assert!(
        begun.elapsed() < Duration::from_secs(20),
        "{:?}",
        begun.elapsed()
    );
    assert!(finished.code.is_some(), "it ends by itself");
    assert!(scene.confirmed() < scene.history().pop().unwrap().end);
    broker.thaw();
    let death = scene.record_killed();
    let walpost = scene.start();
    scene.settle(walpost, &[death], Resends::AtMost(1));
}

fn second_signal_stops_at_once(outbox: Outbox) {
    let broker = Broker::borrowed();
    let scene = Scene::with_outbox_on(outbox, Server::shared(MAJOR), &broker);
    let walpost = stopped_while_broker_is_silent(&scene, &["--drain-timeout", "60s"]);
    let begun = Instant::now();
    walpost.signal("TERM");
    walpost.finish();
    assert!(
        begun.elapsed() < Duration::from_secs(5),
        "{:?}",
        begun.elapsed()
    );
    assert!(scene.confirmed() < scene.history().pop().unwrap().end);
    broker.thaw();
    let death = scene.record_killed();
    let walpost = scene.start();
    scene.settle(walpost, &[death], Resends::AtMost(1));
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

/// SIGHUP is sent when a terminal closes, or by an operator who has changed the configuration.
#[test]
fn hangup_has_the_configuration_read_again_and_ends_nothing() {
    let scene = Scene::new();
    let aggregate = scene.aggregate(1);
    let mut walpost = scene.start();
    walpost.signal("HUP");
    let line = walpost.wait_for_log("SIGHUP");
    assert!(line.contains(": 1 unchanged"), "{line}");
    scene.insert(&aggregate, "k");
    scene.wait_for_records(1);
    assert!(walpost.is_running());
    assert_eq!(scene.settle(walpost, &[], Resends::Never).repeated, 0);
}
