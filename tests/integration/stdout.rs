//! `run --sink stdout`: one JSON line a record, without Kafka.

use serde_json::{Value, json};

use crate::support::scene::Scene;
use crate::support::wait::wait_for;
use crate::support::walpost::{Invocation, Walpost};

fn run(scene: &Scene) -> Invocation {
    scene.invoke("run").args(["--sink", "stdout"])
}

/// The text of the first `count` lines of standard output.
fn lines(walpost: &Walpost, count: usize) -> Vec<String> {
    wait_for("lines on standard output", || {
        let lines: Vec<String> = walpost.output().lines().map(str::to_owned).collect();
        (lines.len() >= count).then_some(lines)
    })
}

#[test]
fn each_record_is_a_json_line_and_is_confirmed() {
    let scene = Scene::with_table(
        "CREATE TABLE outbox (id int, aggregatetype text, aggregateid text, payload text)",
    );
    let walpost = run(&scene).start_streaming();
    scene.db.run(
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
    scene.wait_until_confirmed();
    let finished = walpost.terminate().expect_code(0);
    assert_eq!(finished.stdout.lines().count(), 2);
    assert!(
        !finished.stderr.contains("ключ"),
        "no key or payload in the log"
    );

    let walpost = run(&scene).start();
    scene
        .db
        .run("INSERT INTO outbox VALUES (3, 'order', 'k', 'again')");
    let lines = self::lines(&walpost, 1);
    assert!(
        lines[0].contains("again"),
        "what was confirmed is not written again: {lines:?}"
    );
    walpost.terminate().expect_code(0);
}

#[test]
fn bytes_that_are_no_text_are_in_base64() {
    let scene = Scene::with_table(
        "CREATE TABLE outbox (id int, aggregatetype text, aggregateid bytea, payload bytea)",
    );
    let walpost = run(&scene).start();
    scene
        .db
        .run("INSERT INTO outbox VALUES (1, 'order', '\\xfffe', '\\x00ff')");
    let line: Value = serde_json::from_str(&lines(&walpost, 1)[0]).unwrap();
    assert_eq!(
        (&line["key_base64"], &line["value_base64"]),
        (&json!("//4="), &json!("AP8="))
    );
    walpost.terminate().expect_code(0);
}

#[test]
fn closed_pipe_ends_it_without_confirming_what_was_not_read() {
    let scene = Scene::new();
    let aggregate = &scene.name;
    for _ in 0..3 {
        scene.insert(aggregate, "k");
    }
    let walpost = run(&scene).close_output().start();
    let finished = walpost.finish();
    assert_ne!(finished.code, Some(0), "{finished:?}");
    assert!(scene.confirmed() < scene.history()[0].end);
}
