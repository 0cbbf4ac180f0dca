//! `walpost.publish` and the events that it writes.

use super::{message_fixture, publish};
use crate::support::checker::Resends;
use crate::support::event::{Event, Outbox};
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, Server};

const ID: &str = "406c07f3-26f0-4eea-a50c-109940064b8f";

for_each_outbox! { delivers_events_from_a_non_utf8_database_in_utf8 }

#[test]
fn events_published_as_messages_provide_the_same_columns_as_the_outbox_table() {
    let fixture = message_fixture();
    let topic = format!("{}-events", fixture.name);
    fixture.topic(&topic, 1, &[]);
    let walpost = fixture.start_with_file(
        "topic = '{aggregatetype}-events'
         key = '{type}:{aggregateid}'
         timestamp = 'created_at'
         headers = { id = '{id}', at = '{created_at}' }",
    );
    fixture.db.run(&format!(
        "BEGIN; CREATE TABLE remembered AS SELECT now() AS at; {} COMMIT",
        publish(
            &fixture,
            &format!(
                "'{}', 'ключ-鍵', 'Größe', '{{\"b\": [1, null],  \"a\": \"é\"}}', headers => '{{\"n\": 1.50}}', id => '{ID}'",
                fixture.name
            )
        )
    ));
    let record = fixture.wait_for_records(1).remove(0);
    assert_eq!(
        (record.topic.as_str(), record.key()),
        (&*topic, "Größe:ключ-鍵")
    );
    assert_eq!(record.text(), r#"{"a": "é", "b": [1, null]}"#);
    assert_eq!(record.header_names(), ["at", "id", "walpost-position", "n"]);
    assert_eq!((record.header("id"), record.header("n")), (ID, "1.50"));
    fixture.db.run("SET TIME ZONE 'UTC'");
    let at = fixture.db.value("SELECT at::text FROM remembered");
    assert_eq!(record.header("at"), at.unwrap());
    let millis = fixture
        .db
        .number("SELECT floor(extract(epoch FROM at) * 1000)::bigint FROM remembered");
    assert_eq!(record.timestamp, millis);
    walpost.terminate().expect_code(0);
}

#[test]
fn delivers_binary_and_null_payloads() {
    let fixture = message_fixture();
    let aggregate = fixture.aggregate(1);
    let prefix = format!("walpost_{}", fixture.name);
    let walpost = fixture.start_with(&["--null-payload", "tombstone"]);
    for payload in ["'\\x00ff5c780a'", "''", "NULL"] {
        fixture.db.run(&format!(
            "SELECT walpost.publish_bytes('{aggregate}', 'k', 't', {payload}, prefix => '{prefix}')"
        ));
    }
    fixture.db.run(&publish(
        &fixture,
        &format!("'{aggregate}', 'k', 't', NULL"),
    ));
    let payloads: Vec<_> = fixture
        .wait_for_records(4)
        .into_iter()
        .map(|record| record.payload)
        .collect();
    let bytes = Some(vec![0x00, 0xff, 0x5c, 0x78, 0x0a]);
    assert_eq!(payloads, [bytes, Some(vec![]), None, None]);
    walpost.terminate().expect_code(0);
}

#[test]
fn publish_returns_the_id_of_the_event() {
    let fixture = message_fixture();
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start();
    let id = fixture.db.value(&publish(
        &fixture,
        &format!("'{aggregate}', 'k', 't', '{{}}'"),
    ));
    assert_eq!(fixture.wait_for_records(1)[0].header("id"), id.unwrap());
    walpost.terminate().expect_code(0);
}

#[test]
fn publish_rejects_events_that_the_outbox_table_rejects() {
    let fixture = message_fixture();
    let refused = |arguments: &str, text: &str| {
        let error = fixture
            .db
            .try_run(&publish(&fixture, arguments))
            .unwrap_err();
        let message = error.as_db_error().unwrap().message().to_owned();
        assert!(message.contains(text), "{text:?} in {message:?}");
    };
    for arguments in [
        "NULL, 'k', 't', '{}'",
        "'a', NULL, 't', '{}'",
        "'a', 'k', NULL, '{}'",
        "'a', 'k', 't', '{}', id => NULL",
    ] {
        refused(arguments, "null");
    }
    let no_prefix = "SELECT walpost.publish('a', 'k', 't', '{}', prefix => NULL)";
    fixture.db.try_run(no_prefix).unwrap_err();
    refused("'a', 'k', 't', '{}', '[1]'", "JSON object, not array");
    let large = |bytes: usize| format!("'a', 'k', 't', to_jsonb(repeat('x', {bytes}))");
    refused(&large(990_000), "at most 990000");
    refused("'no/topic', 'k', 't', '{}'", "no topic name can contain");
    fixture.db.run(&publish(&fixture, &large(980_000)));
    assert_eq!(fixture.history().len(), 1, "no other event was written");
}

fn delivers_events_from_a_non_utf8_database_in_utf8(outbox: Outbox) {
    let latin1 = "ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C'";
    let fixture = Fixture::bare_with(outbox, Server::shared(MAJOR), Broker::shared(), latin1);
    fixture.init().finish().expect_code(0);
    assert_eq!(fixture.db.value("SHOW server_encoding").unwrap(), "LATIN1");
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_with(&["--key", "{aggregateid}/{type}"]);
    let event = Event::new(&aggregate, "Größe", r#"{"note": "señor"}"#);
    fixture.db.run(&fixture.events().insert_one(event));
    let record = fixture.wait_for_records(1).remove(0);
    assert_eq!(
        (record.key(), record.text()),
        ("Größe/Happened", r#"{"note": "señor"}"#)
    );
    fixture.settle(walpost, &[], Resends::Never);
}

#[test]
fn error_for_an_unknown_event_column_lists_the_available_columns() {
    let fixture = message_fixture();
    let words = [
        "tenant",
        "id, aggregatetype, aggregateid, type, payload, headers, created_at",
    ];
    let key = ["--key", "{tenant}:{aggregateid}"];
    for invocation in [fixture.run(), fixture.check()] {
        invocation
            .args(key)
            .finish()
            .expect_code(3)
            .expect_mentions(&words);
    }
}

#[test]
fn writes_events_published_as_messages_to_standard_output() {
    let fixture = message_fixture();
    let walpost = fixture
        .invoke("run")
        .args(["--sink", "stdout"])
        .start_streaming();
    fixture
        .db
        .run(&publish(&fixture, "'order', 'k', 't', '{\"n\": 1}'"));
    fixture.wait_until_confirmed();
    let finished = walpost.terminate().expect_code(0);
    let line: serde_json::Value = serde_json::from_str(finished.stdout.trim()).unwrap();
    assert_eq!(line["topic"], "outbox.event.order");
    assert_eq!(line["value"], "{\"n\": 1}");
}
