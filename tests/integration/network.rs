//! A network that fails between Walpost and its servers: nothing is lost, whatever is cut.

use std::time::Duration;

use crate::support::checker::Resends;
use crate::support::kafka::Broker;
use crate::support::load::seed;
use crate::support::postgres::{MAJOR, Server};
use crate::support::process::free_port;
use crate::support::proxy::{Manner, Proxy};
use crate::support::scene::Scene;
use crate::support::wait::wait_until;
use crate::support::walpost::Walpost;

/// How often a connection is broken in a test.
const CUTS: usize = 8;

in_both_modes! {
    connection_to_postgresql_that_is_cut_at_any_byte_costs_nothing
    connection_to_kafka_that_is_cut_at_any_byte_costs_nothing
    black_hole_before_postgresql_is_found_in_time
    black_hole_before_kafka_costs_nothing
    slow_and_late_network_costs_nothing
}

fn scene(exactly_once: bool) -> Scene<'static> {
    scene_on(Broker::shared(), exactly_once)
}

fn scene_on(broker: &Broker, exactly_once: bool) -> Scene<'_> {
    let scene = Scene::on(Server::shared(MAJOR), broker);
    if exactly_once {
        scene.exactly_once()
    } else {
        scene
    }
}

/// How often a partition may start again, with so many breaks.
fn resends(exactly_once: bool, breaks: usize) -> Resends {
    if exactly_once {
        Resends::Never
    } else {
        Resends::AtMost(breaks)
    }
}

/// Walpost with a proxy before PostgreSQL.
fn start_far_from_postgresql(scene: &Scene, arguments: &[&str]) -> (Walpost, Proxy) {
    let proxy = Proxy::start(free_port(), scene.server.port);
    let conninfo = format!(
        "host=127.0.0.1 port={} user=postgres dbname={} sslmode=disable",
        proxy.port(),
        scene.name
    );
    let mut walpost = scene.run_as(&conninfo).args(arguments).start();
    walpost.wait_for_log("streaming");
    (walpost, proxy)
}

/// Cut while it streams, and again while it connects or soon after.
fn connection_to_postgresql_that_is_cut_at_any_byte_costs_nothing(exactly_once: bool) {
    let mut dice = fastrand::Rng::with_seed(seed());
    let scene = scene(exactly_once);
    let aggregates = [scene.aggregate(3), scene.aggregate(1)];
    let load = scene.load(&[&aggregates[0], &aggregates[1]]);
    let (walpost, proxy) = start_far_from_postgresql(&scene, &[]);
    for round in 1..=CUTS {
        proxy.cut_after(dice.usize(1..10_000));
        wait_until("the connection to be cut", || proxy.cuts() == 2 * round - 1);
        proxy.cut_after(dice.usize(1..20_000));
        wait_until("the next one to be cut", || proxy.cuts() == 2 * round);
        let before = scene.confirmed();
        wait_until("the slot to move", || scene.confirmed() > before);
    }
    load.stop();
    let summary = scene.settle(walpost, &[], resends(exactly_once, 2 * CUTS));
    assert!(summary.committed > 100, "{summary:?}");
}

fn connection_to_kafka_that_is_cut_at_any_byte_costs_nothing(exactly_once: bool) {
    let mut dice = fastrand::Rng::with_seed(seed());
    let broker = Broker::private();
    let scene = scene_on(&broker, exactly_once);
    let aggregates = [scene.aggregate(3), scene.aggregate(1)];
    let (walpost, proxy) = start_far_from_kafka(&scene);
    let load = scene.load(&[&aggregates[0], &aggregates[1]]);
    for round in 1..=CUTS {
        proxy.cut_after(dice.usize(1..30_000));
        wait_until("the connection to be cut", || proxy.cuts() == round);
        let before = scene.confirmed();
        wait_until("the slot to move", || scene.confirmed() > before);
    }
    load.stop();
    let summary = scene.settle(walpost, &[], resends(exactly_once, 0));
    assert!(summary.committed > 100, "{summary:?}");
}

/// Walpost with a proxy before Kafka.
fn start_far_from_kafka(scene: &Scene) -> (Walpost, Proxy) {
    let proxy = scene.broker.proxy();
    let far = format!("127.0.0.1:{}", proxy.port());
    let far = format!("bootstrap.servers={far}");
    (scene.start_with(&["-X", &far]), proxy)
}

fn black_hole_before_postgresql_is_found_in_time(exactly_once: bool) {
    let scene = scene(exactly_once);
    let aggregate = scene.aggregate(2);
    let (mut walpost, proxy) = start_far_from_postgresql(&scene, &["--link-timeout", "2s"]);
    scene.insert(&aggregate, "k");
    scene.wait_for_records(1);
    proxy.set(Manner::Swallow);
    scene.insert(&aggregate, "k");
    walpost.wait_for_log("no word from PostgreSQL for 2s");
    proxy.cut();
    proxy.set(Manner::Pass);
    walpost.wait_for_logs("streaming", 2);
    scene.settle(walpost, &[], resends(exactly_once, 1));
}

fn black_hole_before_kafka_costs_nothing(exactly_once: bool) {
    let broker = Broker::private();
    let scene = scene_on(&broker, exactly_once);
    let aggregate = scene.aggregate(2);
    let (walpost, proxy) = start_far_from_kafka(&scene);
    let load = scene.load(&[&aggregate]);
    load.wait_for_transactions(30);
    proxy.set(Manner::Swallow);
    load.wait_for_transactions(200);
    load.stop();
    let event = scene.history().pop().unwrap().end;
    assert!(scene.confirmed() < event);
    proxy.set(Manner::Pass);
    scene.settle(walpost, &[], resends(exactly_once, 0));
}

fn slow_and_late_network_costs_nothing(exactly_once: bool) {
    let broker = Broker::private();
    let scene = scene_on(&broker, exactly_once);
    let aggregate = scene.aggregate(2);
    let (walpost, proxy) = start_far_from_kafka(&scene);
    let load = scene.load(&[&aggregate]);
    for manner in [
        Manner::Delay(Duration::from_millis(30)),
        Manner::Throttle(20_000),
        Manner::Pass,
    ] {
        proxy.set(manner);
        load.wait_for_transactions(60);
    }
    load.stop();
    scene.settle(walpost, &[], resends(exactly_once, 0));
}
