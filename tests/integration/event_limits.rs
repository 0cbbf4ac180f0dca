//! Limits on events. The outbox rejects an INSERT if Kafka would later reject the event.

use crate::support::event::Outbox;
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, Server};

/// Returns a CHECK constraint's definition as printed by the server.
fn check_constraint(fixture: &Fixture, name: &str) -> String {
    let sql = format!(
        "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conrelid = 'outbox'::regclass AND conname = '{name}'"
    );
    fixture.db.value(&sql).unwrap()
}

#[test]
fn delivers_the_largest_event_that_a_new_outbox_table_accepts() {
    for arguments in [&[][..], &["--partitioned"]] {
        let fixture = Fixture::bare();
        fixture.init().args(arguments).finish().expect_code(0);
        let kind = format!("{:-<236}", fixture.name);
        fixture.topic(&format!("outbox.event.{kind}"), 1, &[]);
        let walpost = fixture.start();
        // In the headers, the JSON syntax and the header's name take up 13 bytes. In the payload,
        // the quotes take up 2 bytes.
        let insert = |bytes: usize| {
            fixture.db.try_run(&format!(
                "INSERT INTO outbox (aggregatetype, aggregateid, type, headers, payload) VALUES ('{kind}', repeat('k', 1024),
                 repeat('t', 1024), jsonb_build_object('trace', repeat('h', 1000)), to_jsonb(repeat('p', {bytes})))"
            ))
        };
        let bytes = 990_000 - 1_013 - 2;
        insert(bytes).unwrap();
        fixture.wait_until_confirmed();
        let refused = insert(bytes + 1).unwrap_err();
        let refused = refused.as_db_error().unwrap().constraint();
        assert_eq!(refused, Some("walpost_event_size"));
        walpost.terminate().expect_code(0);
    }
}

#[test]
fn delivers_the_largest_event_that_the_publish_function_accepts() {
    let fixture =
        Fixture::with_outbox_on(Outbox::Messages, Server::shared(MAJOR), Broker::shared());
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start();
    let publish = |bytes: usize| {
        fixture.db.try_run(&format!(
            "SELECT walpost.publish_bytes('{aggregate}', repeat('k', 1024), repeat('t', 1024),
             convert_to(repeat('p', {bytes}), 'UTF8'), prefix => 'walpost_{}')",
            fixture.name
        ))
    };
    // The envelope's fixed-size fields take up 42 bytes.
    let bytes = 990_000 - 42 - aggregate.len() - 2 * 1024;
    publish(bytes).unwrap();
    fixture.wait_for_records(1);
    let refused = publish(bytes + 1).unwrap_err();
    let message = refused.as_db_error().unwrap().message();
    assert!(
        message.contains("event has 990001 bytes: at most 990000"),
        "{message}"
    );
    walpost.terminate().expect_code(0);
}

#[test]
fn outbox_table_rejects_an_invalid_topic_name_on_insert() {
    let fixture = Fixture::new();
    for name in ["no topic", "a/b", "", "ä", "line\n"] {
        let refused = fixture
            .db
            .try_run(&fixture.insert_sql(name, "k"))
            .unwrap_err();
        let refused = refused.as_db_error().unwrap().constraint();
        assert_eq!(
            refused,
            Some("walpost_aggregatetype_fits_topic_name"),
            "{name:?}"
        );
    }
}

#[test]
fn init_sets_the_event_size_limit_and_check_compares_it_with_the_kafka_limit() {
    for arguments in [&[][..], &["--partitioned"]] {
        let fixture = Fixture::bare();
        let init = |limit: &str| {
            let init = fixture.init().args(arguments);
            init.args(["--max-event-bytes", limit]).finish()
        };
        init("0").expect_code(2);
        init("2MB").expect_code(0);
        assert!(check_constraint(&fixture, "walpost_event_size").contains("2000000"));
        let check = |more: &[&str]| fixture.check().args(more).finish().expect_code(0).stdout;
        let found = check(&[]);
        let warning = found.lines().find(|line| line.contains("event size"));
        let warning = warning.expect("a warning").to_owned();
        for text in [
            "up to 2000000 bytes",
            "up to 1000000 bytes (message.max.bytes in [kafka])",
            "halts the pipeline",
        ] {
            assert!(warning.contains(text), "{text:?} in {warning}");
        }
        let found = check(&["-X", "message.max.bytes=3000000"]);
        assert!(!found.contains("event size"), "{found}");

        let kept = init("1MB").expect_code(0);
        kept.expect_mentions(&["still limits events to 2000000 bytes"]);
        let (_, change) = warning
            .split_once("make the table reject larger events: ")
            .unwrap();
        fixture.db.run(change);
        fixture.db.run("RESET search_path");
        assert!(check_constraint(&fixture, "walpost_event_size").contains("990000"));
        let found = check(&[]);
        assert!(!found.contains("event size"), "{found}");
    }
}

#[test]
fn check_compares_the_event_size_limit_with_the_topic_limit() {
    let fixture = Fixture::new();
    let topic = fixture.name.clone();
    fixture.topic(&topic, 1, &[("max.message.bytes", "500000")]);
    let found = fixture
        .check()
        .args(["--topic", &topic])
        .finish()
        .expect_code(0);
    for text in [
        "event size",
        &format!("topic \"{topic}\" accepts records of up to 499939 bytes (max.message.bytes)"),
        "<= 489939) NOT VALID",
    ] {
        assert!(found.stdout.contains(text), "{text:?} in {}", found.stdout);
    }
}

#[test]
fn running_init_again_keeps_the_publish_size_limit_unless_a_new_one_is_given() {
    let fixture = Fixture::bare_with(
        Outbox::Messages,
        Server::shared(MAJOR),
        Broker::shared(),
        "",
    );
    let init = |arguments: &[&str]| fixture.init().args(arguments).finish().expect_code(0);
    let limit = || fixture.db.number("SELECT walpost.max_event_bytes()");
    init(&[]);
    assert_eq!(limit(), 990_000);
    init(&["--max-event-bytes", "2MB"]);
    assert_eq!(limit(), 2_000_000);
    init(&[]);
    assert_eq!(limit(), 2_000_000);
}
