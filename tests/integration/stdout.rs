//! `run --sink stdout` writes each record as a JSON line, without Kafka.

use std::fs::File;
use std::os::fd::OwnedFd;

use serde_json::{Value, json};

use crate::support::fixture::Fixture;
use crate::support::wait::{wait_for, wait_until};
use crate::support::walpost::{Invocation, Walpost};

fn run(fixture: &Fixture) -> Invocation {
    fixture.invoke("run").args(["--sink", "stdout"])
}

/// Waits for `count` lines on standard output, and returns all lines.
fn lines(walpost: &Walpost, count: usize) -> Vec<String> {
    wait_for("lines on standard output", || {
        let lines: Vec<String> = walpost.output().lines().map(str::to_owned).collect();
        (lines.len() >= count).then_some(lines)
    })
}

#[test]
fn writes_each_record_as_a_json_line_and_confirms_it() {
    let fixture = Fixture::with_table(
        "CREATE TABLE outbox (id int, aggregatetype text, aggregateid text, payload text)",
    );
    let walpost = run(&fixture).start_streaming();
    fixture.db.run(
        "INSERT INTO outbox VALUES (1, 'order', 'ключ', E'line\\n\"quoted\"'), (2, 'order', NULL, NULL)",
    );
    let lines = lines(&walpost, 2);
    let start = r#"{"topic":"outbox.event.order","partition":null,"timestamp":null,"key":"ключ","headers":{"id":"1","#;
    assert!(lines[0].starts_with(start), "{}", lines[0]);
    let first: Value = serde_json::from_str(&lines[0]).unwrap();
    let second: Value = serde_json::from_str(&lines[1]).unwrap();
    assert_eq!(first["value"], "line\n\"quoted\"");
    assert_eq!(
        (&second["key"], &second["value"]),
        (&Value::Null, &Value::Null)
    );
    let positions =
        [&first, &second].map(|line| line["headers"]["walpost-position"].as_str().unwrap());
    assert!(positions[0] < positions[1], "{positions:?}");
    fixture.wait_until_confirmed();
    let finished = walpost.terminate().expect_code(0);
    assert_eq!(finished.stdout.lines().count(), 2);
    assert!(
        !finished.stderr.contains("ключ"),
        "no key or payload in the log"
    );

    let walpost = run(&fixture).start();
    fixture
        .db
        .run("INSERT INTO outbox VALUES (3, 'order', 'k', 'again')");
    let lines = self::lines(&walpost, 1);
    assert!(
        lines[0].contains("again"),
        "confirmed events are not written again: {lines:?}"
    );
    walpost.terminate().expect_code(0);
}

#[test]
fn encodes_binary_keys_and_values_in_base64() {
    let fixture = Fixture::with_table(
        "CREATE TABLE outbox (id int, aggregatetype text, aggregateid bytea, payload bytea)",
    );
    let walpost = run(&fixture).start();
    fixture
        .db
        .run("INSERT INTO outbox VALUES (1, 'order', '\\xfffe', '\\x00ff')");
    let line: Value = serde_json::from_str(&lines(&walpost, 1)[0]).unwrap();
    assert_eq!(
        (&line["key_base64"], &line["value_base64"]),
        (&json!("//4="), &json!("AP8="))
    );
    walpost.terminate().expect_code(0);
}

/// A drain timeout that is longer than any test. If a process does not exit before the timeout
/// expires, the test fails.
const DRAIN_TIMEOUT_FLAGS: [&str; 2] = ["--drain-timeout", "1h"];

#[test]
fn halts_immediately_when_the_reader_closes_the_pipe() {
    let fixture = Fixture::new();
    let aggregate = &fixture.name;
    for _ in 0..3 {
        fixture.insert(aggregate, "k");
    }
    let walpost = run(&fixture)
        .args(DRAIN_TIMEOUT_FLAGS)
        .close_output()
        .start();
    walpost
        .finish()
        .expect_code(3)
        .expect_mentions(&["halted: failed to write to standard output"]);
    assert!(fixture.confirmed() < fixture.history()[0].end);
}

#[test]
fn stops_on_request_even_if_its_output_is_not_read() {
    let fixture = Fixture::new();
    // Write more than a pipe can hold.
    let many = fixture
        .events()
        .insert_many(&fixture.aggregate(1), 2000, "'{}'");
    let (reader, writer) = std::io::pipe().unwrap();
    let output = File::from(OwnedFd::from(writer));
    let mut walpost = run(&fixture)
        .args(["--drain-timeout", "1s", "--http", "127.0.0.1:0"])
        .output_to(output)
        .start_streaming();
    let http = walpost.http();
    fixture.db.run(&many);
    let end = fixture.history().pop().unwrap().end;
    wait_until("the events to be sent", || fixture.has_sent(end));
    wait_until("events in flight", || {
        http.pipeline()["events"]["in_flight"].as_u64() > Some(0)
    });
    walpost
        .terminate()
        .expect_code(0)
        .expect_mentions(&["not all records were acknowledged in time"]);
    assert!(fixture.confirmed() < end);
    drop(reader);
}

#[test]
fn refuses_to_run_with_standard_output_closed() {
    let fixture = Fixture::new();
    fixture.insert(&fixture.name, "k");
    let closed = "standard output is closed";
    let finished = run(&fixture).redirected(">&-").finish();
    finished.expect_code(3).expect_mentions(&["halted", closed]);
    assert!(fixture.confirmed() < fixture.history()[0].end);
    let replay = fixture.replay(&["--all", "--yes", "--sink", "stdout"]);
    let finished = replay.redirected(">&-").finish();
    finished.expect_code(3).expect_mentions(&[closed]);
}

#[test]
fn halts_if_standard_output_is_open_for_reading_only() {
    let fixture = Fixture::new();
    fixture.insert(&fixture.name, "k");
    let finished = run(&fixture).redirected("1</dev/null").finish();
    finished
        .expect_code(3)
        .expect_mentions(&["failed to write to standard output: Bad file descriptor"]);
    assert!(fixture.confirmed() < fixture.history()[0].end);
}

#[test]
fn confirms_events_if_standard_output_is_redirected_to_dev_null() {
    let fixture = Fixture::new();
    let walpost = run(&fixture).redirected(">/dev/null").start_streaming();
    fixture.insert(&fixture.name, "k");
    fixture.wait_until_confirmed();
    walpost.terminate().expect_code(0);
}

/// When a row halts the pipeline, the rows before it are still in the sink's buffer.
#[test]
fn writes_the_rows_preceding_a_row_that_halts_the_snapshot() {
    let fixture = Fixture::bare();
    fixture.db.run(
        "CREATE TABLE outbox (id int PRIMARY KEY, aggregatetype text, aggregateid text, payload text);
         INSERT INTO outbox SELECT n, CASE WHEN n < 4 THEN 'order' END, 'k', 'v' FROM generate_series(1, 4) n",
    );
    fixture.init().finish().expect_code(0);
    let walpost = run(&fixture).args(DRAIN_TIMEOUT_FLAGS).start();
    let finished = walpost.finish().expect_code(3);
    assert_eq!(finished.stdout.lines().count(), 3, "{finished:?}");
}
