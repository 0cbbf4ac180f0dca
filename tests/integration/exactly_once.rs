//! `--exactly-once`: whatever fails, a consumer that reads only committed records receives each
//! event once.

use std::time::{Duration, Instant};

use crate::crash::{kill_at_random_points, kill_while_it_starts};
use crate::standby::take_over_from_frozen_instance;
use crate::support::checker::Resends;
use crate::support::event::Outbox;
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, Server, StopMode};
use crate::support::proxy::ProxyMode;
use crate::support::wait::{assert_stays, wait_until};
use crate::support::walpost::Invocation;

for_each_outbox! {
    delivers_each_event_once_when_killed_at_random_points_under_load
    delivers_each_event_once_when_killed_during_startup
    resumes_within_a_large_transaction_after_a_kill
    delivers_each_event_once_when_stopped_and_restarted_under_load
    fences_a_frozen_instance_when_another_takes_over
    reconnects_after_the_walsender_is_terminated
}

fn delivers_each_event_once_when_killed_at_random_points_under_load(outbox: Outbox) {
    let fixture = Fixture::with_outbox(outbox).exactly_once();
    let summary = kill_at_random_points(&fixture, 12, Resends::Never);
    assert!(summary.committed > 500, "{summary:?}");
    assert_eq!(summary.repeated, 0);
}

fn delivers_each_event_once_when_killed_during_startup(outbox: Outbox) {
    let fixture = Fixture::with_outbox(outbox).exactly_once();
    let summary = kill_while_it_starts(&fixture, 0..400, Resends::Never);
    assert_eq!(summary.repeated, 0);
}

/// A PostgreSQL transaction that does not fit into one Kafka transaction is delivered in several.
fn resumes_within_a_large_transaction_after_a_kill(outbox: Outbox) {
    const EVENTS: usize = 100_000;
    let fixture = Fixture::with_outbox(outbox).exactly_once();
    let aggregate = fixture.aggregate(2);
    let large = fixture.events().insert_many(&aggregate, EVENTS, "'{}'");
    fixture.db.run(&large);
    // The small window slows delivery, so that Walpost can be killed in the middle of the
    // transaction.
    let walpost = fixture.start_with(&["--window-records", "100"]);
    let first = fixture.wait_for_records(1).len();
    assert!(
        first < EVENTS,
        "only part of the transaction must have been committed"
    );
    let death = fixture.kill(walpost);
    let before = fixture.records().len();
    assert!(
        before < EVENTS,
        "only part of the transaction must have been committed"
    );
    assert!(death.confirmed < fixture.history()[0].end);
    let walpost = fixture.start();
    let summary = fixture.settle(walpost, &[death], Resends::Never);
    assert_eq!(summary.repeated, 0);
}

fn delivers_each_event_once_when_stopped_and_restarted_under_load(outbox: Outbox) {
    let fixture = Fixture::with_outbox(outbox).exactly_once();
    let aggregate = fixture.aggregate(3);
    let load = fixture.load(&[&aggregate]);
    let mut stops = Vec::new();
    for signal in ["TERM", "INT", "TERM"] {
        let walpost = fixture.start();
        load.wait_for_transactions(40);
        walpost.signal(signal);
        let finished = walpost.finish().expect_code(0);
        assert!(!finished.stderr.contains("ERROR"), "{}", finished.stderr);
        stops.push(fixture.record_killed());
    }
    load.stop();
    let walpost = fixture.start();
    assert_eq!(fixture.settle(walpost, &stops, Resends::Never).repeated, 0);
}

fn fences_a_frozen_instance_when_another_takes_over(outbox: Outbox) {
    let fixture = Fixture::with_outbox(outbox).exactly_once();
    take_over_from_frozen_instance(&fixture, Resends::Never);
}

fn reconnects_after_the_walsender_is_terminated(outbox: Outbox) {
    let fixture = Fixture::with_outbox(outbox).exactly_once();
    let aggregate = fixture.aggregate(2);
    let load = fixture.load(&[&aggregate]);
    let mut walpost = fixture.start();
    for count in 2..=4 {
        load.wait_for_transactions(30);
        assert!(fixture.end_walsender());
        walpost.wait_for_logs("streaming", count);
    }
    load.stop();
    assert_eq!(fixture.settle(walpost, &[], Resends::Never).repeated, 0);
}

#[test]
fn loses_no_event_when_a_broker_is_killed_and_restarted_under_load() {
    Broker::with_markers(|broker| {
        let fixture = Fixture::on_servers(Server::shared(MAJOR), broker).exactly_once();
        let aggregate = fixture.aggregate(3);
        let load = fixture.load(&[&aggregate]);
        let walpost = fixture.start();
        for _ in 0..2 {
            load.wait_for_transactions(40);
            broker.kill();
            load.wait_for_transactions(40);
            broker.start();
        }
        load.stop();
        assert_eq!(fixture.settle(walpost, &[], Resends::Never).repeated, 0);
    });
}

#[test]
fn loses_no_event_when_postgresql_restarts_under_load() {
    let server = Server::private(MAJOR, "");
    let mut fixture = Fixture::on_servers(&server, Broker::shared()).exactly_once();
    let aggregate = fixture.aggregate(3);
    let mut walpost = fixture.start();
    for (count, mode) in [(2, StopMode::Fast), (3, StopMode::Immediate)] {
        let load = fixture.load(&[&aggregate]);
        load.wait_for_transactions(40);
        server.stop(mode);
        load.stop();
        server.start();
        fixture.reconnect();
        walpost.wait_for_logs("streaming", count);
    }
    assert_eq!(fixture.settle(walpost, &[], Resends::Never).repeated, 0);
}

/// Walpost must keep the connection open, because PostgreSQL can invalidate a slot that is not in
/// use. In this test, Kafka is unavailable for longer than a Kafka transaction may remain open.
#[test]
fn keeps_the_postgresql_connection_open_when_kafka_aborts_a_transaction_during_an_outage() {
    let broker = Broker::borrowed();
    let fixture = Fixture::on_servers(Server::shared(MAJOR), &broker).exactly_once();
    let aggregate = fixture.aggregate(1);
    let settings = ["-X", "transaction.timeout.ms=2000", "--link-timeout", "3s"];
    let mut walpost = fixture.start_with(&settings);
    fixture.insert(&aggregate, "k");
    fixture.wait_until_confirmed();
    broker.freeze();
    fixture.insert(&aggregate, "k");
    walpost.wait_for_log("reconnecting");
    assert_stays("connected", Duration::from_secs(8), || {
        fixture.slot_is_active()
    });
    broker.thaw();
    assert_eq!(fixture.settle(walpost, &[], Resends::Never).repeated, 0);
}

#[test]
fn confirms_positions_while_the_outbox_is_idle_and_the_database_is_busy() {
    let fixture = Fixture::with_outbox(Outbox::Table).exactly_once();
    let walpost = fixture.start();
    fixture
        .db
        .run("CREATE TABLE other AS SELECT generate_series(1, 10000)");
    fixture.wait_until_confirmed();
    walpost.terminate().expect_code(0);
}

#[test]
fn does_not_confirm_events_before_their_kafka_transaction_commits() {
    let broker = Broker::borrowed();
    let fixture = Fixture::on_servers(Server::shared(MAJOR), &broker).exactly_once();
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_and_confirm_one(&aggregate, "k");
    broker.freeze();
    fixture.insert(&aggregate, "k");
    let event = fixture.history().pop().unwrap().end;
    assert_stays(
        "unconfirmed while the broker is silent",
        Duration::from_secs(2),
        || fixture.confirmed() < event,
    );
    broker.thaw();
    assert_eq!(fixture.settle(walpost, &[], Resends::Never).repeated, 0);
}

/// Under heavy load, records are acknowledged long before the Kafka transaction that contains them
/// is committed.
#[test]
fn confirmed_position_is_never_ahead_of_the_checkpoint() {
    // Uses a separate broker, because on a shared broker, the open transactions of other pipelines
    // would hide checkpoints.
    let broker = Broker::borrowed();
    let fixture =
        Fixture::with_outbox_on(Outbox::Table, Server::shared(MAJOR), &broker).exactly_once();
    let aggregate = fixture.aggregate(3);
    let many = fixture.events().insert_many(&aggregate, 2000, "'{}'");
    for _ in 0..100 {
        fixture.db.run(&many);
    }
    let walpost = fixture.start();
    let mut end = u64::MAX;
    let mut looks = 0;
    loop {
        let confirmed = fixture.confirmed();
        let safe = fixture.safe_lsn();
        assert!(
            confirmed <= safe,
            "confirmed {confirmed:X}, checkpoint {safe:X}"
        );
        if confirmed >= end {
            break;
        }
        looks += 1;
        // On a busy machine, each iteration of this loop takes longer. Therefore, keep writing
        // events until the loop has compared the slot's position with the checkpoint often enough.
        if looks <= 6 {
            for _ in 0..10 {
                fixture.db.run(&many);
            }
            end = fixture.wal_position();
        }
    }
    walpost.terminate().expect_code(0);
}

#[test]
fn halts_without_a_checkpoint_until_the_operator_adopts_one() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    fixture.insert(&aggregate, "k");
    // Without the row in walpost.slot_state, Walpost can't determine whether events have already
    // been read from the slot.
    fixture.db.run("DELETE FROM walpost.slot_state");
    let run = || fixture.run().arg("--exactly-once");
    run().finish().expect_code(3).expect_mentions(&[
        "has no checkpoint in topic \"walpost-checkpoints\"",
        &fixture.slot(),
        &format!("walpost checkpoint adopt --pipeline {}", fixture.name),
    ]);
    assert_eq!(fixture.records().len(), 0);
    let shown = fixture.checkpoint("show").finish().expect_code(0);
    assert!(shown.stdout.contains("no checkpoint"), "{}", shown.stdout);
    let check = || fixture.check().arg("--exactly-once").finish();
    let found = check().expect_code(3).stdout;
    assert!(found.contains("there is no checkpoint"), "{found}");
    // Without `--yes`, and without a terminal on which to ask for confirmation, nothing is changed.
    fixture
        .checkpoint("adopt")
        .finish()
        .expect_code(2)
        .expect_mentions(&["nothing was changed"]);
    run().finish().expect_code(3);
    let fixture = fixture.exactly_once();
    let found = fixture.check().arg("--exactly-once").finish();
    let found = found.expect_code(0).stdout;
    for part in [
        "a checkpoint exists",
        "settings are suitable for transactions",
    ] {
        assert!(found.contains(part), "{part} in {found}");
    }
    let walpost = fixture.start();
    fixture.settle(walpost, &[], Resends::Never);
    let shown = fixture.checkpoint("show").finish().expect_code(0);
    let id = &fixture.history()[0].id;
    for part in ["epoch 1,", id, &fixture.slot()] {
        assert!(shown.stdout.contains(part), "{part} in {}", shown.stdout);
    }
}

#[test]
fn halts_if_the_slot_was_recreated_while_walpost_was_stopped() {
    let fixture = Fixture::new().exactly_once();
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start();
    fixture.insert(&aggregate, "k");
    fixture.settle(walpost, &[], Resends::Never);
    let slot = fixture.slot();
    fixture.db.run(&format!(
        "SELECT pg_catalog.pg_drop_replication_slot('{slot}')"
    ));
    fixture.insert(&aggregate, "never seen");
    fixture.db.run(&format!(
        "SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')"
    ));
    let confirmed = fixture.confirmed();
    fixture.run().finish().expect_code(3).expect_mentions(&[
        &slot,
        "was confirmed up to",
        "may be missing from Kafka",
        "walpost checkpoint adopt",
    ]);
    assert_eq!(fixture.confirmed(), confirmed);
    assert_eq!(fixture.records().len(), 1);
    // The operator confirms that delivery should continue at the slot's position.
    fixture
        .checkpoint("adopt")
        .arg("--yes")
        .finish()
        .expect_code(0);
    let walpost = fixture.start();
    fixture.insert(&aggregate, "after");
    fixture.wait_for_records(2);
    walpost.terminate().expect_code(0);
}

#[test]
fn halts_if_the_cleanup_policy_of_the_checkpoint_topic_deletes_records() {
    let fixture = Fixture::new();
    // With the cleanup policy `delete` or `compact,delete`, the broker would eventually delete the
    // last checkpoint of an idle pipeline.
    for policy in ["delete", "compact,delete"] {
        let topic = format!("{}.{}", fixture.name, policy.len());
        let settings = [("cleanup.policy", policy)];
        fixture.broker.create_topic(&topic, 1, &settings);
        let file = fixture.file(&format!(
            "delivery = \"exactly-once\"\ncheckpoint = {{ topic = \"{topic}\" }}\n"
        ));
        let run = Invocation::new(["run", "--config"]).arg(&file);
        run.finish().expect_code(3).expect_mentions(&[
            &topic,
            &format!("cleanup.policy is {policy} instead of compact"),
            "kafka-configs.sh",
        ]);
    }
}

/// All pipelines share the checkpoint topic, so the last checkpoint of an idle pipeline can be
/// followed by many checkpoints of other pipelines.
#[test]
fn finds_a_checkpoint_followed_by_many_checkpoints_of_other_pipelines() {
    let broker = Broker::private();
    let fixture = Fixture::on_servers(Server::shared(MAJOR), &broker).exactly_once();
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start();
    fixture.insert(&aggregate, "k");
    fixture.settle(walpost, &[], Resends::Never);
    // Walpost searches the last 256 offsets for the checkpoint, then the last 4096, and so on. With
    // 300 records after the checkpoint, the second search finds it; with 5000, the third.
    for count in [300, 5000] {
        broker.produce_many("walpost-checkpoints", "another pipeline", count);
        let walpost = fixture.start();
        fixture.insert(&aggregate, "k");
        fixture.wait_until_confirmed();
        walpost.terminate().expect_code(0);
    }
    assert_eq!(fixture.records().len(), 3);
}

#[test]
fn halts_if_brokers_reject_the_transaction_timeout() {
    let fixture = Fixture::new().exactly_once();
    let run = |millis: &str| {
        fixture
            .run()
            .args(["-X", &format!("transaction.timeout.ms={millis}")])
    };
    run("3600000")
        .finish()
        .expect_code(3)
        .expect_mentions(&["Lower transaction.timeout.ms", "transaction.max.timeout.ms"]);
    let found = fixture
        .check()
        .args(["--exactly-once", "-X", "transaction.timeout.ms=3600000"])
        .finish()
        .expect_code(3);
    assert!(
        found.stdout.contains("the brokers allow at most 900000"),
        "{}",
        found.stdout
    );
}

/// All pipelines share the checkpoint topic, and records that follow an open transaction can't be
/// read until it ends.
#[test]
fn waits_until_the_open_transaction_of_another_producer_ends() {
    let broker = Broker::private();
    let fixture = Fixture::on_servers(Server::shared(MAJOR), &broker).exactly_once();
    let aggregate = fixture.aggregate(1);
    fixture.insert(&aggregate, "k");
    let lasts = Duration::from_secs(15);
    broker.open_transaction("walpost-checkpoints", "another pipeline", lasts);
    let mut walpost = fixture.run().start();
    walpost.wait_for_log("an open transaction in the topic");
    assert_eq!(walpost.logged("streaming"), 0);
    walpost.wait_for_log("streaming");
    assert_eq!(fixture.settle(walpost, &[], Resends::Never).repeated, 0);
}

/// Brokers can lose a transaction marker, which leaves the transaction open indefinitely. The error
/// message explains how to abort it.
#[test]
fn reports_the_command_that_aborts_a_hanging_transaction() {
    let broker = Broker::private();
    let fixture = Fixture::on_servers(Server::shared(MAJOR), &broker).exactly_once();
    let aggregate = fixture.aggregate(1);
    fixture.insert(&aggregate, "k");
    let topic = "walpost-checkpoints".to_owned();
    broker.open_transaction(&topic, "another pipeline", Duration::from_secs(600));
    let mut walpost = fixture.run().start();
    walpost.wait_for_log("an open transaction in the topic");
    broker.abort_open_transactions(&[topic]);
    walpost.wait_for_log("streaming");
    assert_eq!(fixture.settle(walpost, &[], Resends::Never).repeated, 0);
}

/// A checkpoint lists the topics that have been written to, but must fit into one record.
#[test]
fn commits_a_checkpoint_with_more_topics_than_fit_in_one_record() {
    const TOPICS: usize = 30;
    let fixture = Fixture::new().exactly_once();
    let long = "x".repeat(180);
    let aggregates: Vec<_> = (0..TOPICS)
        .map(|number| format!("{}.{long}.{number}", fixture.name))
        .collect();
    for aggregate in &aggregates {
        fixture.topic(&format!("outbox.event.{aggregate}"), 1, &[]);
    }
    let walpost = fixture.start_with(&["-X", "message.max.bytes=4000"]);
    for aggregate in &aggregates {
        fixture.insert(aggregate, "k");
    }
    assert_eq!(fixture.settle(walpost, &[], Resends::Never).repeated, 0);
    let shown = fixture.checkpoint("show").finish().expect_code(0);
    assert!(shown.stdout.len() < 4000, "{}", shown.stdout);
}

#[test]
fn halts_on_a_checkpoint_with_an_unknown_version() {
    let broker = Broker::private();
    let fixture = Fixture::on_servers(Server::shared(MAJOR), &broker).exactly_once();
    broker.produce("walpost-checkpoints", &fixture.name, "{\"version\": 3}");
    fixture.run().finish().expect_code(3).expect_mentions(&[
        "the checkpoint of pipeline",
        "version 3 is not supported (expected version 1)",
    ]);
}

/// The partition's leader initially lags, so it does not return the latest checkpoint yet. If
/// Walpost mistook an earlier checkpoint for the latest one, it would resume from an earlier
/// position.
#[test]
fn finds_the_last_checkpoint_even_if_the_leader_initially_reports_an_older_end_offset() {
    let topic = ["walpost-checkpoints".to_owned()];
    let broker = Broker::private();
    let fixture = Fixture::on_servers(Server::shared(MAJOR), &broker).exactly_once();
    let aggregate = fixture.aggregate(1);
    let deliver = |key| {
        let walpost = fixture.start();
        fixture.insert(&aggregate, key);
        fixture.wait_until_confirmed();
        walpost.terminate().expect_code(0);
        wait_until("the slot to be free", || !fixture.slot_is_active());
    };
    deliver("first");
    let known = broker.ends(&topic)[&(topic[0].clone(), 0)];
    let (slot, copy) = (fixture.slot(), format!("{}_copy", fixture.slot()));
    let copy_slot = |from: &str, to: &str| {
        fixture.db.run(&format!(
            "SELECT pg_copy_logical_replication_slot('{from}', '{to}')"
        ));
    };
    let drop_slot = |slot: &str| {
        let sql = format!("SELECT pg_catalog.pg_drop_replication_slot('{slot}')");
        fixture.db.run(&sql);
    };
    copy_slot(&slot, &copy);
    deliver("second");
    // If the server crashed before it saved that the second event was confirmed, the slot would
    // return to its earlier position. Imitate such a crash by moving the slot back.
    drop_slot(&slot);
    copy_slot(&copy, &slot);
    drop_slot(&copy);
    let proxy = broker.proxy();
    let lag = proxy.lag_behind(known);
    let far = format!("bootstrap.servers=127.0.0.1:{}", proxy.port());
    let walpost = fixture.start_with(&["-X", &far]);
    fixture.insert(&aggregate, "third");
    let summary = fixture.settle(walpost, &[], Resends::Never);
    assert_eq!((summary.committed, summary.repeated), (3, 0));
    assert!(
        lag.has_caught_up(),
        "Walpost did not read until the leader had caught up"
    );
}

/// With rdkafka, closing an admin client, or a consumer that has a group, takes 100 ms.
/// At-least-once mode uses neither kind of client, so its startup time serves as the baseline.
#[test]
fn startup_does_not_wait_for_kafka_clients_to_close() {
    let fixture = Fixture::new().exactly_once();
    let at_least_once = Fixture::new();
    let mut times = Vec::new();
    // Repeats the measurement, because other processes on a busy machine can delay a single run.
    for _ in 0..30 {
        let (least, elapsed) = (start_time(at_least_once.run()), start_time(fixture.run()));
        if elapsed < least + least.max(Duration::from_millis(200)) {
            return;
        }
        times.push((least, elapsed));
    }
    panic!("exactly-once mode always took longer to start than at-least-once mode: {times:?}");
}

/// Independent requests must be sent concurrently when a process takes over the slot.
#[test]
fn startup_with_a_distant_broker_takes_few_round_trips() {
    const ONE_WAY_DELAY: Duration = Duration::from_millis(100);
    let broker = Broker::borrowed();
    let fixture = Fixture::on_servers(Server::shared(MAJOR), &broker).exactly_once();
    let proxy = broker.proxy();
    proxy.set_mode(ProxyMode::Delay(ONE_WAY_DELAY));
    let address = format!("127.0.0.1:{}", proxy.port());
    let far = || {
        fixture
            .invoke("run")
            .args(["--exactly-once", "--kafka", &address])
    };
    let mut times = Vec::new();
    // Repeats the measurement, because other processes on a busy machine can delay a single run.
    for _ in 0..10 {
        let (near, far) = (start_time(fixture.run()), start_time(far()));
        if far < near + 34 * ONE_WAY_DELAY {
            return;
        }
        times.push((near, far));
    }
    panic!("every start took at least 17 round trips longer than with a nearby broker: {times:?}");
}

/// Returns how long Walpost takes to start streaming.
fn start_time(run: Invocation) -> Duration {
    let started = Instant::now();
    let walpost = run.start_streaming();
    let duration = started.elapsed();
    walpost.terminate().expect_code(0);
    duration
}
