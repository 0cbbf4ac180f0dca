//! `/metrics`, the endpoint that Prometheus scrapes.

use std::io::Write;
use std::process::{Command, Stdio};

use crate::support::event::Outbox;
use crate::support::fixture::Fixture;
use crate::support::http::Http;
use crate::support::wait::wait_until;
use crate::support::walpost::Walpost;

for_each_fixture! {
    counters_match_the_delivered_records
}

fn start(fixture: &Fixture<'_>) -> (Walpost, Http) {
    let mut walpost = fixture.start_with(&["--http", "127.0.0.1:0"]);
    let http = walpost.http();
    (walpost, http)
}

fn counters_match_the_delivered_records(fixture: Fixture<'_>) {
    const EVENTS: usize = 500;
    let aggregate = fixture.aggregate(2);
    let (walpost, http) = start(&fixture);
    let name = fixture.name.as_str();
    let metric = |metric: &str| http.metric(metric, name);
    assert_eq!(metric("walpost_events_delivered_total"), Some(0.0));
    fixture.insert(&aggregate, "k");
    let payload = "jsonb_build_object('n', n)";
    let many = EVENTS - 1;
    fixture
        .db
        .run(&fixture.events().insert_many(&aggregate, many, payload));
    fixture.wait_for_records(EVENTS);
    fixture.wait_until_confirmed();
    let confirmed = fixture.confirmed() as f64;
    wait_until("the last row to be counted", || {
        metric("walpost_events_delivered_total") == Some(EVENTS as f64)
            && metric("walpost_commit_to_delivery_seconds_count") == Some(2.0)
            && metric("walpost_confirmed_lsn") >= Some(confirmed)
    });
    for (metric, expected) in [
        ("walpost_events_sent_total", EVENTS as f64),
        ("walpost_events_delivered_total", EVENTS as f64),
        ("walpost_in_flight_events", 0.0),
        ("walpost_in_flight_bytes", 0.0),
        ("walpost_transactions_total", 2.0),
        ("walpost_delivery_seconds_count", 2.0),
        ("walpost_reconnects_total", 0.0),
        ("walpost_kafka_up", 1.0),
        ("walpost_pipeline_ready", 1.0),
        ("walpost_lag_seconds", 0.0),
    ] {
        assert_eq!(http.metric(metric, name), Some(expected), "{metric}");
    }
    let latency = metric("walpost_commit_to_delivery_seconds_sum").unwrap();
    assert!(latency > 0.0 && latency < 60.0, "{latency}");
    assert!(metric("walpost_received_bytes_total") > Some(EVENTS as f64));
    // Walpost queries the values of the following metrics from the database or receives them from
    // librdkafka, so wait until they are up to date.
    wait_until("facts of the slot and of the producer", || {
        metric("walpost_slot_active") == Some(1.0)
            && metric("walpost_server_lsn") >= Some(confirmed)
            && metric("walpost_kafka_sent_bytes_total") > Some(0.0)
    });
    let samples = http.metrics();
    let sample = |name: &str, label: &str| {
        samples[&format!("{name}{{pipeline=\"{}\",{label}}}", fixture.name)]
    };
    assert!((sample("walpost_pipeline_state", "state=\"streaming\"") - 1.0).abs() < f64::EPSILON);
    assert!((sample("walpost_slot_wal_status", "status=\"reserved\"") - 1.0).abs() < f64::EPSILON);
    let kafka_commits = metric("walpost_kafka_commit_seconds_count").unwrap();
    let checkpoint = metric("walpost_checkpoint_timestamp_seconds");
    assert_eq!(kafka_commits > 0.0, fixture.is_exactly_once());
    assert_eq!(checkpoint.is_some(), fixture.is_exactly_once());
    walpost.terminate().expect_code(0);
}

#[test]
fn promtool_reports_no_problems_in_metrics() {
    let fixture = Fixture::with_outbox(Outbox::Table).exactly_once();
    let aggregate = fixture.aggregate(1);
    let (walpost, http) = start(&fixture);
    fixture.insert(&aggregate, "k");
    fixture.wait_for_records(1);
    wait_until("all metrics", || {
        let metrics = http.get("/metrics").body;
        metrics.contains("walpost_lag_bytes") && metrics.contains("walpost_kafka_retries_total")
    });
    let mut promtool = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("promtool: ./dev setup");
    let text = http.get("/metrics").body;
    promtool
        .stdin
        .take()
        .unwrap()
        .write_all(text.as_bytes())
        .unwrap();
    let output = promtool.wait_with_output().unwrap();
    let complaints = [output.stdout, output.stderr].concat();
    let complaints = String::from_utf8_lossy(&complaints);
    assert!(
        output.status.success() && complaints.is_empty(),
        "{complaints}\n{text}"
    );
    walpost.terminate().expect_code(0);
}

#[test]
fn counts_the_partitions_of_the_outbox() {
    let fixture = Fixture::bare();
    fixture.init().arg("--partitioned").finish().expect_code(0);
    let (walpost, http) = start(&fixture);
    let expected = fixture
        .db
        .number("SELECT count(*) FROM pg_partition_tree('outbox') WHERE isleaf");
    assert!(expected > 1);
    wait_until("the partitions", || {
        http.metric("walpost_outbox_partitions", &fixture.name) == Some(expected as f64)
    });
    walpost.terminate().expect_code(0);
}

#[test]
fn in_flight_metrics_exclude_records_of_a_replaced_producer() {
    let fixture = Fixture::new().exactly_once();
    let aggregate = fixture.aggregate(1);
    let (mut walpost, http) = start(&fixture);
    fixture.insert(&aggregate, "k");
    fixture.wait_for_records(1);
    // End the session, which makes exactly-once mode create a new producer.
    wait_until("the walsender to be ended", || fixture.end_walsender());
    walpost.wait_for_logs("streaming", 2);
    fixture.insert(&aggregate, "k");
    fixture.wait_for_records(2);
    wait_until("nothing in flight", || {
        http.metric("walpost_in_flight_events", &fixture.name) == Some(0.0)
            && http.metric("walpost_events_delivered_total", &fixture.name) >= Some(2.0)
    });
    assert_eq!(
        http.metric("walpost_in_flight_bytes", &fixture.name),
        Some(0.0)
    );
    assert_eq!(
        http.metric("walpost_reconnects_total", &fixture.name),
        Some(1.0)
    );
    walpost.terminate().expect_code(0);
}
