//! Kafka or PostgreSQL becomes unavailable and recovers. Walpost resumes without intervention.

use std::thread;
use std::time::Duration;

use crate::support::checker::Resends;
use crate::support::event::Outbox;
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, Server, StopMode};
use crate::support::process::{freeze, thaw};
use crate::support::proxy::ProxyMode;
use crate::support::wait::{assert_stays, wait_until};

const MEGABYTE: u64 = 1 << 20;

for_each_outbox! {
    loses_no_event_when_a_broker_restarts_under_load
    recovers_quickly_from_a_broker_outage_with_bounded_memory_and_one_log_line
    loses_no_event_when_postgresql_restarts_under_load
    reconnects_after_the_walsender_is_terminated
}

fn loses_no_event_when_a_broker_restarts_under_load(outbox: Outbox) {
    let broker = Broker::private();
    let fixture = Fixture::with_outbox_on(outbox, Server::shared(MAJOR), &broker);
    let aggregates = [fixture.aggregate(3), fixture.aggregate(1)];
    let walpost = fixture.start();
    let load = fixture.load(&[&aggregates[0], &aggregates[1]]);
    load.wait_for_transactions(100);
    broker.stop();
    load.wait_for_transactions(200);
    broker.start();
    load.wait_for_transactions(100);
    broker.kill();
    load.wait_for_transactions(200);
    broker.start();
    load.stop();
    fixture.settle(walpost, &[], Resends::AtMost(2));
}

fn recovers_quickly_from_a_broker_outage_with_bounded_memory_and_one_log_line(outbox: Outbox) {
    let broker = Broker::borrowed();
    let kafka = broker.proxy();
    let fixture =
        Fixture::with_outbox_on(outbox, Server::shared(MAJOR), &broker).behind_proxy(&kafka);
    let aggregate = fixture.aggregate(2);
    let walpost = fixture.start_with(&["--window-bytes", "8MiB"]);
    fixture.insert(&aggregate, "k");
    fixture.wait_for_records(1);
    let lines = walpost.log().lines().count();
    kafka.set_mode(ProxyMode::Refuse);
    let payload = "jsonb_build_object('n', repeat('x', 1000))";
    fixture
        .db
        .run(&fixture.events().insert_many(&aggregate, 60_000, payload));
    let cpu_before = walpost.cpu_seconds();
    assert_stays("below 100 MB", Duration::from_secs(10), || {
        walpost.resident_bytes() < 100 * MEGABYTE
    });
    let cpu = walpost.cpu_seconds() - cpu_before;
    assert!(cpu < 2.0, "{cpu} s of CPU in 10 s of outage");
    let new_lines = walpost.log().lines().count() - lines;
    assert!(
        (1..=6).contains(&new_lines),
        "{new_lines} lines about one outage:\n{}",
        walpost.log()
    );
    kafka.set_mode(ProxyMode::Pass);
    fixture.settle(walpost, &[], Resends::AtMost(1));
}

#[test]
fn waits_at_startup_if_the_broker_is_down() {
    let broker = Broker::borrowed();
    let kafka = broker.proxy();
    let fixture = Fixture::on_servers(Server::shared(MAJOR), &broker).behind_proxy(&kafka);
    let aggregate = fixture.aggregate(1);
    kafka.set_mode(ProxyMode::Refuse);
    fixture.insert(&aggregate, "k");
    let mut walpost = fixture.run().start();
    assert_stays("running", Duration::from_secs(3), || walpost.is_running());
    kafka.set_mode(ProxyMode::Pass);
    fixture.settle(walpost, &[], Resends::Never);
}

in_both_modes! { reconnects_to_brokers_that_returned_an_empty_broker_list }

/// When a cluster shuts down, the last broker still responds, but with an empty list of brokers.
/// librdkafka then permanently forgets all brokers.
fn reconnects_to_brokers_that_returned_an_empty_broker_list(exactly_once: bool) {
    let broker = Broker::borrowed();
    let kafka = broker.proxy();
    let fixture = Fixture::on_servers(Server::shared(MAJOR), &broker)
        .behind_proxy(&kafka)
        .in_mode(exactly_once);
    let aggregate = fixture.aggregate(2);
    let broker_removal = kafka.remove_brokers();
    let often = "topic.metadata.refresh.interval.ms=500";
    let walpost = fixture.start_with(&["-X", often]);
    fixture.insert(&aggregate, "k");
    fixture.wait_until_confirmed();
    broker_removal.set_enabled(true);
    wait_until("an answer that names no broker", || {
        broker_removal.changed_responses() > 0
    });
    fixture.insert(&aggregate, "k");
    kafka.cut();
    broker_removal.set_enabled(false);
    fixture.insert(&aggregate, "k");
    fixture.settle(walpost, &[], fixture.resends(1));
}

#[test]
fn waits_at_startup_if_postgresql_is_down() {
    let server = Server::private(MAJOR, "");
    let mut fixture = Fixture::on_servers(&server, Broker::shared());
    let aggregate = fixture.aggregate(1);
    fixture.insert(&aggregate, "k");
    server.stop(StopMode::Fast);
    let mut walpost = fixture.run().start();
    walpost.wait_for_log("reconnecting");
    assert_stays("told once", Duration::from_secs(4), || {
        walpost.log().lines().count() <= 2
    });
    server.start();
    walpost.wait_for_log("streaming");
    fixture.reconnect();
    fixture.settle(walpost, &[], Resends::Never);
}

fn loses_no_event_when_postgresql_restarts_under_load(outbox: Outbox) {
    let server = Server::private(MAJOR, "");
    let mut fixture = Fixture::with_outbox_on(outbox, &server, Broker::shared());
    let aggregates = [fixture.aggregate(3), fixture.aggregate(1)];
    let mut walpost = fixture.start();
    let load = fixture.load(&[&aggregates[0], &aggregates[1]]);
    let stops = [
        StopMode::Fast,
        StopMode::Immediate,
        StopMode::Fast,
        StopMode::Immediate,
        StopMode::Immediate,
    ];
    for (round, how) in stops.into_iter().enumerate() {
        load.wait_for_transactions(100);
        server.stop(how);
        server.start();
        walpost.wait_for_logs("streaming", round + 2);
    }
    load.wait_for_transactions(100);
    load.stop();
    fixture.reconnect();
    fixture.settle(walpost, &[], Resends::AtMost(stops.len()));
}

#[test]
fn postgresql_shuts_down_within_seconds_during_a_kafka_outage() {
    let server = Server::private(MAJOR, "");
    let broker = Broker::borrowed();
    let kafka = broker.proxy();
    let mut fixture = Fixture::on_servers(&server, &broker).behind_proxy(&kafka);
    let aggregate = fixture.aggregate(1);
    let mut walpost = fixture.start();
    fixture.insert(&aggregate, "k");
    fixture.wait_for_records(1);
    kafka.set_mode(ProxyMode::Refuse);
    for _ in 0..100 {
        fixture.insert(&aggregate, "k");
    }
    server.begin_stop(StopMode::Fast);
    assert!(
        server.has_stopped(Duration::from_secs(15)),
        "{}",
        walpost.log()
    );
    server.start();
    kafka.set_mode(ProxyMode::Pass);
    walpost.wait_for_logs("streaming", 2);
    fixture.reconnect();
    fixture.settle(walpost, &[], Resends::AtMost(1));
}

fn reconnects_after_the_walsender_is_terminated(outbox: Outbox) {
    let fixture = Fixture::with_outbox(outbox);
    let aggregate = fixture.aggregate(2);
    let mut walpost = fixture.start();
    let load = fixture.load(&[&aggregate]);
    for round in 0..3 {
        load.wait_for_transactions(50);
        assert!(fixture.end_walsender());
        walpost.wait_for_logs("streaming", round + 2);
    }
    load.stop();
    fixture.settle(walpost, &[], Resends::AtMost(3));
}

#[test]
fn reconnects_after_the_link_timeout_if_the_walsender_freezes() {
    let server = Server::private(MAJOR, "");
    let fixture = Fixture::on_servers(&server, Broker::shared());
    let aggregate = fixture.aggregate(1);
    let mut walpost = fixture.start_with(&["--link-timeout", "2s"]);
    let walsender = fixture.db.number(&format!(
        "SELECT active_pid FROM pg_replication_slots WHERE slot_name = '{}'",
        fixture.slot()
    ));
    let walsender = u32::try_from(walsender).unwrap();
    freeze(walsender);
    walpost.wait_for_log("reconnecting");
    thaw(walsender);
    walpost.wait_for_logs("streaming", 2);
    fixture.insert(&aggregate, "k");
    fixture.settle(walpost, &[], Resends::Never);
}

#[test]
fn idle_pipeline_logs_one_line_when_a_kafka_outage_begins_and_one_when_it_ends() {
    let broker = Broker::borrowed();
    let kafka = broker.proxy();
    let fixture = Fixture::on_servers(Server::shared(MAJOR), &broker).behind_proxy(&kafka);
    let aggregate = fixture.aggregate(1);
    let mut walpost = fixture.start();
    fixture.insert(&aggregate, "k");
    fixture.wait_for_records(1);
    kafka.set_mode(ProxyMode::Refuse);
    walpost.wait_for_log("Kafka is unreachable");
    kafka.set_mode(ProxyMode::Pass);
    walpost.wait_for_log("Kafka is reachable again");
    assert_eq!(walpost.logged("Kafka is unreachable"), 1);
    assert_eq!(walpost.logged("Kafka is reachable again"), 1);
}

/// Without `wakeup` in src/main.rs, librdkafka's threads would poll without a pause while messages
/// are ready but can't be sent yet.
#[test]
fn uses_little_cpu_while_brokers_are_slow_to_respond() {
    let broker = Broker::borrowed();
    for exactly_once in [false, true] {
        let fixture = Fixture::on_servers(Server::shared(MAJOR), &broker).in_mode(exactly_once);
        let aggregate = fixture.aggregate(1);
        let walpost = fixture.start();
        fixture.insert(&aggregate, "k");
        fixture.wait_for_records(1);
        broker.freeze();
        // The first messages are sent in one request. The messages that follow have to wait longer
        // than linger.ms.
        for count in [10, 1_000] {
            fixture
                .db
                .run(&fixture.events().insert_many(&aggregate, count, "'{}'"));
        }
        let measure = Duration::from_secs(2);
        thread::sleep(measure / 4);
        let before = walpost.cpu_seconds();
        thread::sleep(measure);
        let busy = (walpost.cpu_seconds() - before) / measure.as_secs_f64();
        broker.thaw();
        assert!(busy < 0.3, "{busy} of a processor");
        fixture.settle(walpost, &[], fixture.resends(0));
    }
}

#[test]
fn keeps_the_connection_open_during_a_kafka_outage_longer_than_the_link_timeout() {
    let broker = Broker::borrowed();
    let fixture = Fixture::on_servers(Server::shared(MAJOR), &broker);
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_with(&["--link-timeout", "2s", "--window-records", "5"]);
    fixture.insert(&aggregate, "k");
    fixture.wait_until_confirmed();
    broker.freeze();
    for _ in 0..20 {
        fixture.insert(&aggregate, "k");
    }
    assert_stays("connected", Duration::from_secs(7), || {
        walpost.logged("reconnecting") == 0 && fixture.slot_is_active()
    });
    broker.thaw();
    fixture.settle(walpost, &[], Resends::Never);
}
