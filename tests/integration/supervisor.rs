//! Several pipelines in one process.

use std::fs;
use std::path::PathBuf;

use crate::support::checker::Resends;
use crate::support::event::{EventWriter, Outbox};
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::load::Load;
use crate::support::postgres::{MAJOR, Server, StopMode};
use crate::support::proxy::ProxyMode;
use crate::support::reaper;
use crate::support::wait::wait_until;
use crate::support::walpost::{Invocation, Walpost, config_file};

/// Creates a walpost.toml that defines one pipeline per fixture.
fn file(fixtures: &[&Fixture]) -> PathBuf {
    file_with(fixtures, "")
}

/// Like [`file`], but with additional settings for the first pipeline.
fn file_with(fixtures: &[&Fixture], mut settings: &str) -> PathBuf {
    let mut text = format!(
        "[kafka]\n'bootstrap.servers' = '{}'\n",
        Broker::shared().address()
    );
    for fixture in fixtures {
        text.push_str(&format!(
            "[[pipeline]]\nname = '{}'\ndelivery = '{}'\noutbox = '{}'\npostgres = \"{}\"\nkafka = {{ 'bootstrap.servers' = '{}' }}\n{settings}",
            fixture.name,
            match fixture.is_exactly_once() {
                true => "exactly-once",
                false => "at-least-once",
            },
            match fixture.events() {
                EventWriter::Table(_) | EventWriter::Tables { .. } => "table",
                EventWriter::Messages(_) => "messages",
            },
            fixture.conninfo(),
            fixture.kafka()
        ));
        settings = "";
    }
    config_file(text)
}

fn start(fixtures: &[&Fixture]) -> Walpost {
    let mut walpost = Invocation::new(["run", "--config"])
        .arg(file(fixtures))
        .start();
    walpost.wait_for_logs("streaming", fixtures.len());
    walpost
}

/// Starts sessions that write events, using one aggregate type per fixture.
fn loads(fixtures: &[Fixture], aggregates: &[String]) -> Vec<Load> {
    let both = fixtures.iter().zip(aggregates);
    both.map(|(fixture, aggregate)| fixture.load(&[aggregate]))
        .collect()
}

#[test]
fn each_pipeline_delivers_only_its_own_events() {
    let fixtures = [Outbox::Table, Outbox::Messages, Outbox::Table].map(Fixture::with_outbox);
    let walpost = start(&fixtures.each_ref());
    let aggregates = fixtures.each_ref().map(|fixture| fixture.aggregate(2));
    let loads = loads(&fixtures, &aggregates);
    for load in loads {
        load.wait_for_transactions(50);
        load.stop();
    }
    for fixture in &fixtures {
        fixture.wait_for_records(fixture.history().len());
        fixture.wait_until_confirmed();
    }
    walpost.terminate().expect_code(0);
    for fixture in &fixtures {
        assert_eq!(fixture.check_delivered(&[], Resends::Never).repeated, 0);
    }
}

#[test]
fn reports_a_halted_pipeline_and_keeps_the_others_running() {
    let fixtures = [Fixture::new(), Fixture::new()];
    let mut walpost = start(&fixtures.each_ref());
    let aggregate = fixtures[1].aggregate(1);
    fixtures[0].insert("nobody.made.this", "k");
    let line = walpost.wait_for_log("halted:");
    assert!(line.contains(&fixtures[0].name), "{line}");
    fixtures[1].insert(&aggregate, "k");
    fixtures[1].wait_for_records(1);
    fixtures[1].wait_until_confirmed();
    assert!(walpost.is_running());
    walpost.terminate().expect_code(3);
}

#[test]
fn monitors_the_slot_of_a_halted_pipeline_and_never_drops_it() {
    let server = Server::private(MAJOR, "");
    let fixtures = [
        Fixture::on_servers(&server, Broker::shared()),
        Fixture::new(),
    ];
    let settings = "wal_budget = { max = '32MiB', on_max = 'drop-slot' }\n";
    let mut walpost = Invocation::new(["run", "--http", "127.0.0.1:0", "--config"])
        .arg(file_with(&fixtures.each_ref(), settings))
        .start();
    let http = walpost.http();
    walpost.wait_for_logs("streaming", fixtures.len());
    fixtures[0].accept_any_name("outbox");
    fixtures[0].insert("not a topic", "k");
    walpost.wait_for_log("halted:");
    fixtures[0].write_other_wal(40);
    let line = walpost.wait_for_log("than wal_budget.max, but is not dropped");
    assert!(line.contains(&fixtures[0].name), "{line}");
    let kept = http.metric("walpost_slot_retained_bytes", &fixtures[0].name);
    assert!(kept > Some(f64::from(32 << 20)), "{kept:?}");
    assert_eq!(walpost.logged("was dropped"), 0);
    // The slot must still exist, and must not have passed the event that halted the pipeline.
    assert!(fixtures[0].confirmed() < fixtures[0].history()[0].end);
    walpost.terminate().expect_code(3);
}

#[test]
fn process_exits_when_the_last_pipeline_has_halted() {
    let fixtures = [Fixture::new(), Fixture::new()];
    let walpost = start(&fixtures.each_ref());
    for fixture in &fixtures {
        fixture.insert("nobody.made.this", "k");
    }
    let finished = walpost.finish().expect_code(3);
    finished.expect_mentions(&[&fixtures[0].name, &fixtures[1].name]);
}

#[test]
fn process_exits_with_the_halt_code_even_during_tls_handshakes() {
    let key = reaper::folder("key").join("client.key");
    fs::write(&key, "no key").unwrap();
    // Each pipeline halts because the private key configured for Kafka is invalid. From then on,
    // the pipeline only monitors its slot, and connects to PostgreSQL over TLS to do so.
    let mut text = format!(
        "[kafka]
        'bootstrap.servers' = 'localhost:9092'
        'security.protocol' = 'ssl'
        'ssl.key.location' = '{}'\n",
        key.display()
    );
    let port = Server::shared(MAJOR).port;
    for pipeline in 0..8 {
        text.push_str(&format!(
            "[[pipeline]]
            name = 'p{pipeline}'
            postgres = 'host=localhost port={port} user=u dbname=d sslmode=require'\n"
        ));
    }
    let file = config_file(&text);
    for _ in 0..25 {
        let run = Invocation::new(["run", "--config"]).arg(&file).finish();
        run.expect_code(3).expect_mentions(&["p7", "ssl.key"]);
    }
}

#[test]
fn pipeline_that_cannot_start_does_not_stop_the_others() {
    let fixtures = [Fixture::bare(), Fixture::new()];
    let mut walpost = Invocation::new(["run", "--config"])
        .arg(file(&fixtures.each_ref()))
        .start();
    let line = walpost.wait_for_log("halted");
    assert!(
        line.contains(&fixtures[0].name) && line.contains("public.outbox"),
        "{line}"
    );
    let aggregate = fixtures[1].aggregate(1);
    fixtures[1].insert(&aggregate, "k");
    fixtures[1].wait_for_records(1);
    walpost.terminate().expect_code(3);
}

/// The owner of one pipeline's database can make the pipeline's `init` fail each time the process
/// starts.
#[test]
fn failed_init_during_run_does_not_stop_other_pipelines() {
    let fixtures = [Fixture::bare(), Fixture::bare()];
    let allow = |is_allowed: bool| {
        format!(
            "ALTER DATABASE \"{}\" ALLOW_CONNECTIONS {is_allowed}",
            fixtures[0].name
        )
    };
    fixtures[1].db.run(&allow(false));
    let walpost = Invocation::new(["run", "--init", "--config"])
        .arg(file(&fixtures.each_ref()))
        .start();
    let aggregate = fixtures[1].aggregate(1);
    wait_until("the slot of the other pipeline", || {
        fixtures[1].slot_is_active()
    });
    fixtures[1].insert(&aggregate, "k");
    fixtures[1].wait_for_records(1);
    fixtures[1].db.run(&allow(true));
    walpost.terminate();
}

#[test]
fn outage_of_a_broker_or_database_does_not_affect_other_pipelines() {
    let broker = Broker::borrowed();
    let server = Server::private(MAJOR, "");
    let healthy = Fixture::new();
    let kafka = broker.proxy();
    let without_broker = Fixture::on_servers(Server::shared(MAJOR), &broker).behind_proxy(&kafka);
    let mut without_server = Fixture::on_servers(&server, Broker::shared());
    let aggregates = [
        healthy.aggregate(1),
        without_broker.aggregate(1),
        without_server.aggregate(1),
    ];
    let mut walpost = start(&[&healthy, &without_broker, &without_server]);
    kafka.set_mode(ProxyMode::Refuse);
    server.stop(StopMode::Immediate);
    for _ in 0..20 {
        without_broker.insert(&aggregates[1], "k");
        healthy.insert(&aggregates[0], "k");
    }
    healthy.wait_for_records(20);
    healthy.wait_until_confirmed();
    kafka.set_mode(ProxyMode::Pass);
    server.start();
    walpost.wait_for_logs("streaming", 4);
    without_server.reconnect();
    without_server.insert(&aggregates[2], "k");
    without_server.wait_for_records(1);
    without_broker.wait_for_records(20);
    without_broker.wait_until_confirmed();
    walpost.terminate().expect_code(0);
    assert_eq!(healthy.check_delivered(&[], Resends::Never).committed, 20);
    assert_eq!(
        without_broker
            .check_delivered(&[], Resends::AtMost(1))
            .committed,
        20
    );
}

in_both_modes! {
    rejected_record_or_slow_broker_does_not_affect_other_pipelines
}

fn rejected_record_or_slow_broker_does_not_affect_other_pipelines(exactly_once: bool) {
    const ROWS: usize = 20_000;
    let broker = Broker::borrowed();
    let kafka = broker.proxy();
    let healthy = [(); 2].map(|()| Fixture::new().in_mode(exactly_once));
    let refused = Fixture::new().in_mode(exactly_once);
    let slow = Fixture::on_servers(Server::shared(MAJOR), &broker).behind_proxy(&kafka);
    let slow = slow.in_mode(exactly_once);
    let limited = format!("{}-limited", refused.name);
    let topic = format!("outbox.event.{limited}");
    refused.topic(&topic, 1, &[("max.message.bytes", "1000")]);
    let aggregates = healthy.each_ref().map(|fixture| fixture.aggregate(2));
    let of_slow = slow.aggregate(2);
    let mut walpost = start(&[&healthy[0], &refused, &slow, &healthy[1]]);

    kafka.set_mode(ProxyMode::Throttle(20_000));
    let payload = "jsonb_build_object('n', md5(n::text))";
    slow.db
        .run(&slow.events().insert_many(&of_slow, ROWS, payload));
    let loads = loads(&healthy, &aggregates);
    // The payload exceeds the topic's limit even when compressed.
    let payload = "(SELECT jsonb_agg(md5(i::text)) FROM generate_series(1, 200) i)";
    refused
        .db
        .run(&refused.events().insert_many(&limited, 1, payload));
    let line = walpost.wait_for_log("halted");
    assert!(line.contains(&refused.name), "{line}");
    for load in loads {
        load.wait_for_transactions(200);
        load.stop();
    }
    for fixture in &healthy {
        fixture.wait_for_records(fixture.history().len());
        fixture.wait_until_confirmed();
    }
    let end = slow.history()[0].end;
    assert!(slow.confirmed() < end, "the broker was not slow");
    kafka.set_mode(ProxyMode::Pass);
    slow.wait_until_confirmed();
    walpost.terminate().expect_code(3);
    for fixture in &healthy {
        assert_eq!(fixture.check_delivered(&[], Resends::Never).repeated, 0);
    }
    let resends = slow.resends(1);
    assert_eq!(slow.check_delivered(&[], resends).committed, ROWS);
}

#[test]
fn runs_only_the_pipelines_selected_by_name() {
    let fixtures = [Fixture::new(), Fixture::bare()];
    let walpost = Invocation::new(["run", "--pipeline", &fixtures[0].name, "--config"])
        .arg(file(&fixtures.each_ref()))
        .start_streaming();
    walpost.terminate().expect_code(0);
}

#[test]
fn check_of_many_pipelines_lists_problems_first() {
    let fixtures = [(); 5].map(|()| Fixture::new());
    let file = file(&fixtures.each_ref());
    let run = |words: &[&str]| {
        let invocation = Invocation::new(words).arg("--config").arg(&file);
        let finished = invocation.finish();
        let lines: Vec<_> = finished.stdout.lines().map(str::to_owned).collect();
        (finished, lines)
    };
    let (_, lines) = run(&["check"]);
    assert!(lines[0].starts_with("5 pipelines: 5 "), "{lines:?}");
    let unreachable = &fixtures[3];
    unreachable.db.run(&format!(
        "SELECT pg_catalog.pg_drop_replication_slot('{}')",
        unreachable.slot()
    ));
    let (finished, lines) = run(&["check"]);
    finished.expect_code(3);
    assert!(
        lines[0].starts_with("5 pipelines: 1 FAILED, 4 "),
        "{lines:?}"
    );
    assert!(
        lines[1].starts_with("FAILED") && lines[1].contains(&unreachable.name),
        "{lines:?}"
    );
    assert!(
        !lines.iter().any(|line| line.starts_with("ok ")),
        "{lines:?}"
    );
    // If several pipelines have the same finding, it is printed only once.
    let alike = lines.iter().filter(|line| line.contains("encrypt"));
    assert!(alike.count() <= 2, "{lines:?}");
    let (_, lines) = run(&["check", "--pipeline", &fixtures[0].name]);
    assert!(
        lines.iter().any(|line| line.starts_with("ok ")),
        "{lines:?}"
    );
    let (_, lines) = run(&["check", "--json"]);
    for fixture in &fixtures {
        assert!(lines[0].contains(&fixture.name), "{lines:?}");
    }
    let (finished, lines) = run(&["status", "--http", "off"]);
    finished.expect_code(1);
    assert!(
        lines[0].starts_with("5 pipelines, 5 with problems: ") && lines[0].contains("4 not read"),
        "{lines:?}"
    );
}

/// Each Kafka client has several threads. If every pipeline created a client at startup, a process
/// with hundreds of idle pipelines would have thousands of threads.
#[test]
fn pipelines_after_the_tenth_create_a_kafka_client_on_demand() {
    let fixtures = [(); 12].map(|()| Fixture::new());
    let walpost = start(&fixtures.each_ref());
    let clients = || {
        let tasks = fs::read_dir(format!("/proc/{}/task", walpost.process_id())).unwrap();
        let names = tasks.map(|task| fs::read_to_string(task.unwrap().path().join("comm")));
        // Ignore threads that have exited in the meantime.
        names
            .flatten()
            .filter(|name| name == "kafka-poll\n")
            .count()
    };
    wait_until("the clients of ten pipelines", || clients() == 10);
    let last = &fixtures[11];
    let aggregate = last.aggregate(2);
    let load = last.load(&[&aggregate]);
    load.wait_for_transactions(10);
    load.stop();
    last.wait_until_confirmed();
    assert_eq!(clients(), 11);
    walpost.terminate().expect_code(0);
    assert_eq!(last.check_delivered(&[], Resends::Never).repeated, 0);
}
