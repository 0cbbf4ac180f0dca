//! A failing network between Walpost and its servers: no event is lost, whichever connection is
//! cut.

use std::time::Duration;

use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::load::seed;
use crate::support::postgres::{MAJOR, Server};
use crate::support::process::free_port;
use crate::support::proxy::{Proxy, ProxyMode};
use crate::support::wait::wait_until;
use crate::support::walpost::Walpost;

/// How often a connection is cut in a test.
const CUTS: usize = 8;

in_both_modes! {
    connection_to_postgresql_that_is_cut_at_any_byte_costs_nothing
    connection_to_kafka_that_is_cut_at_any_byte_costs_nothing
    black_hole_before_postgresql_is_found_in_time
    black_hole_before_kafka_costs_nothing
    host_of_postgresql_that_answers_nothing_is_left_for_the_next
    host_of_kafka_that_answers_nothing_costs_nothing
    slow_and_late_network_costs_nothing
}

fn fixture(exactly_once: bool) -> Fixture<'static> {
    fixture_on(Broker::shared(), exactly_once)
}

fn fixture_on(broker: &Broker, exactly_once: bool) -> Fixture<'_> {
    Fixture::on_servers(Server::shared(MAJOR), broker).in_mode(exactly_once)
}

/// Starts Walpost with a proxy in front of PostgreSQL.
fn start_far_from_postgresql(fixture: &Fixture, arguments: &[&str]) -> (Walpost, Proxy) {
    let proxy = Proxy::start(free_port(), fixture.server.port);
    let walpost = fixture
        .with_conninfo(&proxy.conninfo(&fixture.name))
        .run()
        .args(arguments)
        .start_streaming();
    (walpost, proxy)
}

/// The connection is cut while it streams, and again during or soon after reconnecting.
fn connection_to_postgresql_that_is_cut_at_any_byte_costs_nothing(exactly_once: bool) {
    let mut dice = fastrand::Rng::with_seed(seed());
    let fixture = fixture(exactly_once);
    let aggregates = [fixture.aggregate(3), fixture.aggregate(1)];
    let load = fixture.load(&[&aggregates[0], &aggregates[1]]);
    let (walpost, proxy) = start_far_from_postgresql(&fixture, &[]);
    for round in 1..=CUTS {
        proxy.cut_after(dice.usize(1..10_000));
        wait_until("the connection to be cut", || proxy.cuts() == 2 * round - 1);
        proxy.cut_after(dice.usize(1..20_000));
        wait_until("the next one to be cut", || proxy.cuts() == 2 * round);
        let before = fixture.confirmed();
        wait_until("the slot to move", || fixture.confirmed() > before);
    }
    load.stop();
    let summary = fixture.settle(walpost, &[], fixture.resends(2 * CUTS));
    assert!(summary.committed > 100, "{summary:?}");
}

fn connection_to_kafka_that_is_cut_at_any_byte_costs_nothing(exactly_once: bool) {
    let mut dice = fastrand::Rng::with_seed(seed());
    let broker = Broker::borrowed();
    let fixture = fixture_on(&broker, exactly_once);
    let aggregates = [fixture.aggregate(3), fixture.aggregate(1)];
    let (walpost, proxy) = start_far_from_kafka(&fixture);
    let load = fixture.load(&[&aggregates[0], &aggregates[1]]);
    for round in 1..=CUTS {
        proxy.cut_after(dice.usize(1..30_000));
        wait_until("the connection to be cut", || proxy.cuts() == round);
        let before = fixture.confirmed();
        wait_until("the slot to move", || fixture.confirmed() > before);
    }
    load.stop();
    let summary = fixture.settle(walpost, &[], fixture.resends(0));
    assert!(summary.committed > 100, "{summary:?}");
}

/// Starts Walpost with a proxy in front of Kafka.
fn start_far_from_kafka(fixture: &Fixture) -> (Walpost, Proxy) {
    let proxy = fixture.broker.proxy();
    (start_behind(&proxy, fixture, &[]), proxy)
}

fn start_behind(proxy: &Proxy, fixture: &Fixture, flags: &[&str]) -> Walpost {
    let far = format!("bootstrap.servers=127.0.0.1:{}", proxy.port());
    fixture.start_with(&[&["-X", &far], flags].concat())
}

fn black_hole_before_postgresql_is_found_in_time(exactly_once: bool) {
    let fixture = fixture(exactly_once);
    let aggregate = fixture.aggregate(2);
    let (mut walpost, proxy) = start_far_from_postgresql(&fixture, &["--link-timeout", "2s"]);
    fixture.insert(&aggregate, "k");
    fixture.wait_for_records(1);
    proxy.set_mode(ProxyMode::Swallow);
    fixture.insert(&aggregate, "k");
    walpost.wait_for_log("no response from PostgreSQL for 2s");
    proxy.cut();
    proxy.set_mode(ProxyMode::Pass);
    walpost.wait_for_logs("streaming", 2);
    fixture.settle(walpost, &[], fixture.resends(1));
}

fn black_hole_before_kafka_costs_nothing(exactly_once: bool) {
    kafka_is_away_for_a_while(exactly_once, |proxy| proxy.set_mode(ProxyMode::Swallow));
}

/// Asserts that nothing is confirmed from the call of `breaks` until the proxy forwards data again,
/// and that nothing is lost.
fn kafka_is_away_for_a_while(exactly_once: bool, breaks: impl FnOnce(&Proxy)) {
    let broker = Broker::borrowed();
    let fixture = fixture_on(&broker, exactly_once);
    let aggregate = fixture.aggregate(2);
    let (walpost, proxy) = start_far_from_kafka(&fixture);
    let load = fixture.load(&[&aggregate]);
    load.wait_for_transactions(30);
    breaks(&proxy);
    load.wait_for_transactions(200);
    load.stop();
    let event = fixture.history().pop().unwrap().end;
    assert!(fixture.confirmed() < event);
    proxy.set_mode(ProxyMode::Pass);
    fixture.settle(walpost, &[], fixture.resends(0));
}

/// Transactions with a full window would be aborted again and again, so less is sent per
/// transaction until they finish in time.
#[test]
fn link_that_takes_longer_for_a_window_than_a_transaction_may_last_carries_all() {
    const TIMEOUT_MILLIS: usize = 3000;
    const BYTES_A_SECOND: usize = 200_000;
    let broker = Broker::borrowed();
    let fixture = fixture_on(&broker, true);
    let aggregate = fixture.aggregate(1);
    // The payload is incompressible and differs for each row, and there are more rows than can be
    // sent during one transaction's timeout.
    let payload = "(SELECT jsonb_build_object('x', string_agg(md5(random()::text), '')) FROM generate_series(1, 30) \
                   WHERE n > 0)";
    let rows = 2 * TIMEOUT_MILLIS * BYTES_A_SECOND / 1_000_000;
    fixture
        .db
        .run(&fixture.events().insert_many(&aggregate, rows, payload));
    let proxy = broker.proxy();
    proxy.set_mode(ProxyMode::Throttle(BYTES_A_SECOND));
    let timeout = format!("transaction.timeout.ms={TIMEOUT_MILLIS}");
    let flags = ["-X", &timeout, "--http", "127.0.0.1:0"];
    let mut walpost = start_behind(&proxy, &fixture, &flags);
    let http = walpost.http();
    wait_until("less to be in flight", || {
        let window = http.metric("walpost_window_bytes", &fixture.name);
        window.is_some_and(|bytes| bytes < 1e6)
    });
    fixture.settle(walpost, &[], fixture.resends(0));
}

fn host_of_postgresql_that_answers_nothing_is_left_for_the_next(exactly_once: bool) {
    let fixture = fixture(exactly_once);
    let aggregate = fixture.aggregate(2);
    let [near, far] = [(); 2].map(|()| Proxy::start(free_port(), fixture.server.port));
    let conninfo = format!(
        "host=127.0.0.1,127.0.0.1 port={},{} user=postgres dbname={} sslmode=disable connect_timeout=2",
        near.port(),
        far.port(),
        fixture.name
    );
    let arguments = ["--link-timeout", "2s"];
    let mut walpost = fixture
        .with_conninfo(&conninfo)
        .run()
        .args(arguments)
        .start_streaming();
    fixture.insert(&aggregate, "k");
    fixture.wait_for_records(1);
    near.set_mode(ProxyMode::Silence);
    fixture.insert(&aggregate, "k");
    walpost.wait_for_log("no response from PostgreSQL for 2s");
    // The server keeps the slot active for a walsender whose client is gone, until its own timeout.
    near.cut();
    walpost.wait_for_logs("streaming", 2);
    fixture.settle(walpost, &[], fixture.resends(1));
}

fn host_of_kafka_that_answers_nothing_costs_nothing(exactly_once: bool) {
    kafka_is_away_for_a_while(exactly_once, |proxy| {
        proxy.set_mode(ProxyMode::Silence);
        // New connections are not answered.
        proxy.cut();
    });
}

fn slow_and_late_network_costs_nothing(exactly_once: bool) {
    let broker = Broker::borrowed();
    let fixture = fixture_on(&broker, exactly_once);
    let aggregate = fixture.aggregate(2);
    let (walpost, proxy) = start_far_from_kafka(&fixture);
    let load = fixture.load(&[&aggregate]);
    for manner in [
        ProxyMode::Delay(Duration::from_millis(30)),
        ProxyMode::Throttle(20_000),
        ProxyMode::Pass,
    ] {
        proxy.set_mode(manner);
        load.wait_for_transactions(60);
    }
    load.stop();
    fixture.settle(walpost, &[], fixture.resends(0));
}
