//! Network failures between Walpost and its servers. No event is lost, no matter which connection
//! breaks.

use std::time::Duration;

use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::load::seed;
use crate::support::postgres::{MAJOR, Server};
use crate::support::process::free_port;
use crate::support::proxy::{Proxy, ProxyMode};
use crate::support::wait::wait_until;
use crate::support::walpost::Walpost;

/// How many times a test cuts the connection.
const CUTS_PER_TEST: usize = 8;

in_both_modes! {
    loses_no_event_if_the_postgresql_connection_breaks_at_any_byte
    loses_no_event_if_the_kafka_connection_breaks_at_any_byte
    detects_an_unresponsive_postgresql_link_within_its_timeout
    loses_no_event_if_packets_to_kafka_are_dropped
    tries_the_next_postgresql_host_if_one_does_not_respond
    loses_no_event_if_the_kafka_host_stops_responding
    loses_no_event_on_a_slow_high_latency_network
}

fn fixture(exactly_once: bool) -> Fixture<'static> {
    fixture_on(Broker::shared(), exactly_once)
}

fn fixture_on(broker: &Broker, exactly_once: bool) -> Fixture<'_> {
    Fixture::on_servers(Server::shared(MAJOR), broker).in_mode(exactly_once)
}

/// Starts Walpost with a proxy in front of PostgreSQL.
fn start_behind_postgresql_proxy(fixture: &Fixture, arguments: &[&str]) -> (Walpost, Proxy) {
    let proxy = Proxy::start(free_port(), fixture.server.port);
    let walpost = fixture
        .with_conninfo(&proxy.conninfo(&fixture.name))
        .run()
        .args(arguments)
        .start_streaming();
    (walpost, proxy)
}

/// The connection is cut while Walpost is streaming, and again during or soon after the reconnect.
fn loses_no_event_if_the_postgresql_connection_breaks_at_any_byte(exactly_once: bool) {
    let mut rng = fastrand::Rng::with_seed(seed());
    let fixture = fixture(exactly_once);
    let aggregates = [fixture.aggregate(3), fixture.aggregate(1)];
    let load = fixture.load(&[&aggregates[0], &aggregates[1]]);
    let (walpost, proxy) = start_behind_postgresql_proxy(&fixture, &[]);
    for round in 1..=CUTS_PER_TEST {
        proxy.cut_after(rng.usize(1..10_000));
        wait_until("the connection to be cut", || proxy.cuts() == 2 * round - 1);
        proxy.cut_after(rng.usize(1..20_000));
        wait_until("the next connection to be cut", || {
            proxy.cuts() == 2 * round
        });
        let before = fixture.confirmed();
        wait_until("the slot to move", || fixture.confirmed() > before);
    }
    load.stop();
    let summary = fixture.settle(walpost, &[], fixture.resends(2 * CUTS_PER_TEST));
    assert!(summary.committed > 100, "{summary:?}");
}

fn loses_no_event_if_the_kafka_connection_breaks_at_any_byte(exactly_once: bool) {
    let mut rng = fastrand::Rng::with_seed(seed());
    let broker = Broker::borrowed();
    let fixture = fixture_on(&broker, exactly_once);
    let aggregates = [fixture.aggregate(3), fixture.aggregate(1)];
    let (walpost, proxy) = start_behind_kafka_proxy(&fixture);
    let load = fixture.load(&[&aggregates[0], &aggregates[1]]);
    for round in 1..=CUTS_PER_TEST {
        proxy.cut_after(rng.usize(1..30_000));
        wait_until("the connection to be cut", || proxy.cuts() == round);
        let before = fixture.confirmed();
        wait_until("the slot to move", || fixture.confirmed() > before);
    }
    load.stop();
    let summary = fixture.settle(walpost, &[], fixture.resends(0));
    assert!(summary.committed > 100, "{summary:?}");
}

/// Starts Walpost with a proxy in front of Kafka.
fn start_behind_kafka_proxy(fixture: &Fixture) -> (Walpost, Proxy) {
    let proxy = fixture.broker.proxy();
    (start_behind_proxy(&proxy, fixture, &[]), proxy)
}

fn start_behind_proxy(proxy: &Proxy, fixture: &Fixture, flags: &[&str]) -> Walpost {
    let far = format!("bootstrap.servers=127.0.0.1:{}", proxy.port());
    fixture.start_with(&[&["-X", &far], flags].concat())
}

fn detects_an_unresponsive_postgresql_link_within_its_timeout(exactly_once: bool) {
    let fixture = fixture(exactly_once);
    let aggregate = fixture.aggregate(2);
    let (mut walpost, proxy) = start_behind_postgresql_proxy(&fixture, &["--link-timeout", "2s"]);
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

fn loses_no_event_if_packets_to_kafka_are_dropped(exactly_once: bool) {
    interrupt_kafka(exactly_once, |proxy| proxy.set_mode(ProxyMode::Swallow));
}

/// Asserts that nothing is confirmed between the call to `breaks` and the time at which the proxy
/// forwards data again, and that no event is lost.
fn interrupt_kafka(exactly_once: bool, breaks: impl FnOnce(&Proxy)) {
    let broker = Broker::borrowed();
    let fixture = fixture_on(&broker, exactly_once);
    let aggregate = fixture.aggregate(2);
    let (walpost, proxy) = start_behind_kafka_proxy(&fixture);
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

/// If each Kafka transaction contained a full window, every transaction would time out. Therefore,
/// Walpost reduces the size of its transactions until they complete in time.
#[test]
fn delivers_all_events_over_a_link_too_slow_for_full_sized_kafka_transactions() {
    const TIMEOUT_MILLIS: usize = 3000;
    const BYTES_PER_SECOND: usize = 200_000;
    let broker = Broker::borrowed();
    let fixture = fixture_on(&broker, true);
    let aggregate = fixture.aggregate(1);
    // Each row has a different, incompressible payload, and there are more rows than the link can
    // transmit before a transaction times out.
    let payload = "(SELECT jsonb_build_object('x', string_agg(md5(random()::text), '')) FROM generate_series(1, 30) \
                   WHERE n > 0)";
    let rows = 2 * TIMEOUT_MILLIS * BYTES_PER_SECOND / 1_000_000;
    fixture
        .db
        .run(&fixture.events().insert_many(&aggregate, rows, payload));
    let proxy = broker.proxy();
    proxy.set_mode(ProxyMode::Throttle(BYTES_PER_SECOND));
    let timeout = format!("transaction.timeout.ms={TIMEOUT_MILLIS}");
    let flags = ["-X", &timeout, "--http", "127.0.0.1:0"];
    let mut walpost = start_behind_proxy(&proxy, &fixture, &flags);
    let http = walpost.http();
    wait_until("less to be in flight", || {
        let window = http.metric("walpost_window_bytes", &fixture.name);
        window.is_some_and(|bytes| bytes < 1e6)
    });
    fixture.settle(walpost, &[], fixture.resends(0));
}

fn tries_the_next_postgresql_host_if_one_does_not_respond(exactly_once: bool) {
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
    // The server keeps the slot active until it detects, after its own timeout, that the
    // walsender's client is gone.
    near.cut();
    walpost.wait_for_logs("streaming", 2);
    fixture.settle(walpost, &[], fixture.resends(1));
}

fn loses_no_event_if_the_kafka_host_stops_responding(exactly_once: bool) {
    interrupt_kafka(exactly_once, |proxy| {
        proxy.set_mode(ProxyMode::Silence);
        // Cuts the existing connection. In the mode `Silence`, the proxy does not respond to new
        // connections either.
        proxy.cut();
    });
}

fn loses_no_event_on_a_slow_high_latency_network(exactly_once: bool) {
    let broker = Broker::borrowed();
    let fixture = fixture_on(&broker, exactly_once);
    let aggregate = fixture.aggregate(2);
    let (walpost, proxy) = start_behind_kafka_proxy(&fixture);
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
