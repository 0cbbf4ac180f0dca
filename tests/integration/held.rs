//! The slot is held while Kafka is away: PostgreSQL may give up one that nobody has.

use std::time::Duration;

use crate::support::checker::Resends;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, Server, Stop};
use crate::support::scene::Scene;
use crate::support::wait::{stays, wait_until};

/// The first version that has it.
const WITH_IDLE_TIMEOUT: u32 = 18;
const IDLE_TIMEOUT: &str = "idle_replication_slot_timeout = '2s'\n";

in_both_modes! {
    slot_that_nobody_streamed_from_for_too_long_is_named_as_such
}

/// PostgreSQL gives up idle slots at a checkpoint, that of the oracle too. Several times as long as the slot may be idle.
fn outlasts_checkpoints(scene: &Scene) {
    wait_until("the slot to be taken", || scene.slot_is_active());
    stays("held", Duration::from_secs(7), || {
        scene.db.run("CHECKPOINT");
        scene.slot_is_active()
    });
}

#[test]
fn slot_is_held_while_kafka_is_away_at_a_start() {
    let server = Server::private(WITH_IDLE_TIMEOUT, IDLE_TIMEOUT);
    let broker = Broker::private();
    let scene = Scene::on(&server, &broker);
    let aggregate = scene.aggregate(1);
    broker.kill();
    for _ in 0..20 {
        scene.insert(&aggregate, "k");
    }
    let walpost = scene.run().start();
    outlasts_checkpoints(&scene);
    broker.start();
    scene.wait_for_records(20);
    scene.wait_until_confirmed();
    walpost.terminate().expect_code(0);
    assert_eq!(scene.records().len(), 20);
}

#[test]
fn postgresql_stops_in_seconds_while_kafka_is_waited_for_at_a_start() {
    let server = Server::private(MAJOR, "");
    let broker = Broker::private();
    let mut scene = Scene::on(&server, &broker);
    let aggregate = scene.aggregate(1);
    broker.kill();
    for _ in 0..20 {
        scene.insert(&aggregate, "k");
    }
    let mut walpost = scene.run().start();
    wait_until("the slot to be taken", || scene.slot_is_active());
    server.begin_stop(Stop::Fast);
    assert!(
        server.has_stopped(Duration::from_secs(15)),
        "{}",
        walpost.log()
    );
    server.start();
    broker.start();
    walpost.wait_for_log("PostgreSQL is back");
    scene.reconnect();
    scene.settle(walpost, &[], Resends::AtMost(1));
}

fn slot_that_nobody_streamed_from_for_too_long_is_named_as_such(exactly_once: bool) {
    let server = Server::private(WITH_IDLE_TIMEOUT, IDLE_TIMEOUT);
    let scene = Scene::on(&server, Broker::shared()).in_mode(exactly_once);
    wait_until("the slot to be given up", || {
        scene.db.run("CHECKPOINT");
        scene.db.is_true(&format!(
            "SELECT invalidation_reason = 'idle_timeout' FROM pg_replication_slots WHERE slot_name = '{}'",
            scene.slot()
        ))
    });
    scene.run().finish().expect_code(3).expect_says(&[
        "halted",
        &scene.slot(),
        "is lost",
        "ALTER SYSTEM SET idle_replication_slot_timeout = 0",
        "pg_drop_replication_slot",
    ]);
}

/// Who takes over in Kafka fences whoever has produced before; only who has the slot may.
#[test]
fn stand_in_fences_nobody_while_another_has_the_slot() {
    let scene = Scene::new().exactly_once();
    let aggregate = scene.aggregate(1);
    let first = scene.start_and_confirm_one(&aggregate, "k");
    let mut second = scene.run().start();
    second.wait_for_log("standing by");
    for _ in 0..3 {
        scene.insert(&aggregate, "k");
        scene.wait_until_confirmed();
    }
    assert_eq!(first.logged("reconnecting"), 0, "{}", first.log());
    second.terminate().expect_code(0);
    assert_eq!(scene.settle(first, &[], Resends::Never).repeated, 0);
}
