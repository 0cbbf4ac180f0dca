//! During a PostgreSQL shutdown, the walsender waits until everything it has sent is confirmed, and
//! the server waits for the walsender.

use std::time::Duration;

use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, Server, StopMode};
use crate::support::proxy::{Proxy, ProxyMode};
use crate::support::wait::wait_until;
use crate::support::walpost::Walpost;

/// How long a shutdown may take on a loaded machine if Walpost does not delay it.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(20);

in_both_modes! {
    server_shuts_down_while_an_idle_pipeline_waits_for_a_frozen_broker
    server_shuts_down_while_events_wait_for_a_frozen_broker
    server_shuts_down_while_the_broker_is_down
    server_shuts_down_while_the_broker_is_slow
    server_shuts_down_while_a_pipeline_drains
    does_not_log_a_kafka_problem_if_an_idle_postgresql_server_restarts
    loses_no_event_if_the_server_stops_before_the_drain_finishes
}

/// Runs the test with a private server, which the test may stop, and a broker behind a proxy.
fn with_servers(major: u32, test: impl FnOnce(&Server, &Broker, &Proxy)) {
    let server = Server::private(major, "");
    let broker = Broker::borrowed();
    let proxy = broker.proxy();
    test(&server, &broker, &proxy);
}

/// Starts a pipeline that delivers and confirms 20 events. Also returns their aggregate type.
fn idle<'a>(
    (server, broker, proxy): (&'a Server, &'a Broker, &Proxy),
    exactly_once: bool,
    arguments: &[&str],
) -> (Fixture<'a>, Walpost, String) {
    let fixture = Fixture::on_servers(server, broker)
        .behind_proxy(proxy)
        .in_mode(exactly_once);
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_with(arguments);
    for _ in 0..20 {
        fixture.insert(&aggregate, "k");
    }
    fixture.wait_for_records(20);
    fixture.wait_until_confirmed();
    (fixture, walpost, aggregate)
}

fn expect_stop(server: &Server, walpost: &Walpost) {
    server.begin_stop(StopMode::Fast);
    assert!(server.has_stopped(SHUTDOWN_TIMEOUT), "{}", walpost.log());
}

/// Asserts that everything is delivered once both servers are available again.
fn expect_all(mut fixture: Fixture, mut walpost: Walpost) {
    walpost.wait_for_logs("streaming", 2);
    fixture.reconnect();
    let resends = fixture.resends(1);
    fixture.settle(walpost, &[], resends);
}

fn server_shuts_down_while_an_idle_pipeline_waits_for_a_frozen_broker(exactly_once: bool) {
    for major in [MAJOR, 18] {
        with_servers(major, |server, broker, proxy| {
            let (fixture, walpost, _) = idle((server, broker, proxy), exactly_once, &[]);
            broker.freeze();
            expect_stop(server, &walpost);
            broker.thaw();
            server.start();
            expect_all(fixture, walpost);
        });
    }
}

fn server_shuts_down_while_events_wait_for_a_frozen_broker(exactly_once: bool) {
    with_servers(MAJOR, |server, broker, proxy| {
        let (fixture, walpost, aggregate) = idle((server, broker, proxy), exactly_once, &[]);
        broker.freeze();
        fixture.insert(&aggregate, "k");
        let event = fixture.history().pop().unwrap().end;
        wait_until("the event to be sent", || fixture.has_sent(event));
        expect_stop(server, &walpost);
        broker.thaw();
        server.start();
        expect_all(fixture, walpost);
    });
}

fn server_shuts_down_while_the_broker_is_down(exactly_once: bool) {
    stops_while_idle_behind(ProxyMode::Refuse, exactly_once);
}

fn server_shuts_down_while_the_broker_is_slow(exactly_once: bool) {
    stops_while_idle_behind(ProxyMode::Delay(Duration::from_secs(5)), exactly_once);
}

fn stops_while_idle_behind(manner: ProxyMode, exactly_once: bool) {
    with_servers(MAJOR, |server, broker, proxy| {
        let (fixture, walpost, _) = idle((server, broker, proxy), exactly_once, &[]);
        proxy.set_mode(manner);
        expect_stop(server, &walpost);
        proxy.set_mode(ProxyMode::Pass);
        server.start();
        expect_all(fixture, walpost);
    });
}

fn server_shuts_down_while_a_pipeline_drains(exactly_once: bool) {
    with_servers(MAJOR, |server, broker, proxy| {
        let arguments = ["--drain-timeout", "170s"];
        let (fixture, mut walpost, aggregate) =
            idle((server, broker, proxy), exactly_once, &arguments);
        broker.freeze();
        fixture.insert(&aggregate, "k");
        let event = fixture.history().pop().unwrap().end;
        wait_until("the event to be sent", || fixture.has_sent(event));
        walpost.signal("TERM");
        walpost.wait_for_log("draining");
        expect_stop(server, &walpost);
        walpost
            .finish()
            .expect_code(0)
            .expect_mentions(&["before PostgreSQL had to shut down"]);
        broker.thaw();
    });
}

/// A pipeline that exceeds its WAL budget must still complete its drain. The monitor that detects
/// that the budget is exceeded must also continue to detect that the server is shutting down.
#[test]
fn server_shuts_down_while_a_pipeline_that_exceeds_its_wal_budget_drains() {
    with_servers(MAJOR, |server, broker, proxy| {
        let arguments = [
            "--drain-timeout",
            "170s",
            "--wal-budget-max",
            "16MiB",
            "--wal-budget-on-max",
            "drop-slot",
            "--http",
            "127.0.0.1:0",
        ];
        let (fixture, mut walpost, aggregate) = idle((server, broker, proxy), false, &arguments);
        let http = walpost.http();
        broker.freeze();
        fixture.insert(&aggregate, "k");
        let event = fixture.history().pop().unwrap().end;
        wait_until("the event to be sent", || fixture.has_sent(event));
        walpost.signal("TERM");
        walpost.wait_for_log("draining");
        fixture
            .db
            .run("CREATE TABLE filler AS SELECT repeat('x', 900) FROM generate_series(1, 60000)");
        wait_until("the slot monitor to detect the change", || {
            let metrics = http.metrics();
            let mut retained = metrics
                .iter()
                .filter(|(name, _)| name.starts_with("walpost_slot_retained_bytes"));
            retained.any(|(_, bytes)| *bytes > 32e6)
        });
        expect_stop(server, &walpost);
        walpost
            .finish()
            .expect_code(0)
            .expect_mentions(&["before PostgreSQL had to shut down"]);
        broker.thaw();
    });
}

/// The stream ends in the middle of a transaction. The process is stopping, so its log must not
/// claim that it will resume the stream.
#[test]
fn pipeline_does_not_log_a_reconnect_while_stopping() {
    with_servers(MAJOR, |server, broker, proxy| {
        let arguments = ["--drain-timeout", "170s", "--window-records", "100"];
        let (fixture, mut walpost, aggregate) = idle((server, broker, proxy), false, &arguments);
        broker.freeze();
        fixture.db.run(&format!(
            "INSERT INTO outbox (id, aggregatetype, aggregateid, type, payload)
                 SELECT gen_random_uuid(), '{aggregate}', 'k', 't', '{{}}' FROM generate_series(1, 300)"
        ));
        let event = fixture.history().pop().unwrap().end;
        wait_until("the events to be sent", || fixture.has_sent(event));
        walpost.signal("TERM");
        walpost.wait_for_log("draining");
        expect_stop(server, &walpost);
        let finished = walpost.finish().expect_code(0);
        assert!(
            !finished.stderr.contains("reconnecting"),
            "{}",
            finished.stderr
        );
        broker.thaw();
    });
}

/// Kafka has been unavailable for longer than the transaction timeout, so no producer exists.
/// Walpost holds the slot but has no session.
#[test]
fn server_shuts_down_while_walpost_holds_the_slot_without_a_producer() {
    with_servers(MAJOR, |server, broker, proxy| {
        let arguments = ["-X", "transaction.timeout.ms=2000"];
        let (fixture, mut walpost, aggregate) = idle((server, broker, proxy), true, &arguments);
        proxy.set_mode(ProxyMode::Refuse);
        fixture.insert(&aggregate, "k");
        walpost.wait_for_log("reconnecting");
        assert!(fixture.slot_is_active(), "{}", walpost.log());
        expect_stop(server, &walpost);
        proxy.set_mode(ProxyMode::Pass);
        server.start();
        expect_all(fixture, walpost);
    });
}

fn does_not_log_a_kafka_problem_if_an_idle_postgresql_server_restarts(exactly_once: bool) {
    with_servers(MAJOR, |server, broker, proxy| {
        let (mut fixture, mut walpost, _) = idle((server, broker, proxy), exactly_once, &[]);
        for round in 0..3 {
            server.stop(StopMode::Fast);
            server.start();
            walpost.wait_for_logs("streaming", round + 2);
            fixture.reconnect();
            fixture.wait_until_confirmed();
        }
        assert_eq!(walpost.logged("Kafka has"), 0, "{}", walpost.log());
        let resends = fixture.resends(3);
        fixture.settle(walpost, &[], resends);
    });
}

/// Walpost can't confirm records that Kafka acknowledges after the server has stopped. Walpost
/// resends these records later, except in exactly-once mode, in which the checkpoint shows that
/// they were delivered.
fn loses_no_event_if_the_server_stops_before_the_drain_finishes(exactly_once: bool) {
    with_servers(MAJOR, |server, broker, proxy| {
        let arguments = ["--drain-timeout", "170s"];
        let (mut fixture, mut walpost, aggregate) =
            idle((server, broker, proxy), exactly_once, &arguments);
        broker.freeze();
        fixture.insert(&aggregate, "k");
        let event = fixture.history().pop().unwrap().end;
        wait_until("the event to be sent", || fixture.has_sent(event));
        walpost.signal("TERM");
        walpost.wait_for_log("draining");
        server.stop(StopMode::Immediate);
        broker.thaw();
        walpost.finish().expect_code(0);
        server.start();
        fixture.reconnect();
        let walpost = fixture.start();
        let resends = fixture.resends(1);
        fixture.settle(walpost, &[], resends);
    });
}
