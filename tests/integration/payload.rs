//! Payloads are delivered unchanged, whatever their type and size.

use openssl::sha::sha256;

use crate::support::fixture::Fixture;
use crate::support::records::Record;

/// Creates a table whose payload column has the given type, inserts a row whose payload is the
/// given SQL expression, and returns the resulting record.
fn deliver(payload_type: &str, expression: &str, arguments: &[&str]) -> Record {
    let fixture = Fixture::with_table(&format!(
        "CREATE TABLE outbox (id int, aggregatetype text, aggregateid text, payload {payload_type})"
    ));
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_with(arguments);
    fixture.db.run(&format!(
        "INSERT INTO outbox VALUES (1, '{aggregate}', 'k', {expression})"
    ));
    let mut records = fixture.wait_for_records(1);
    fixture.wait_until_confirmed();
    walpost.terminate().expect_code(0);
    records.remove(0)
}

#[test]
fn delivers_jsonb_as_postgresql_formats_it() {
    let record = deliver("jsonb", r#"'{"b":[1,null,"é"],  "a":1.0}'"#, &[]);
    assert_eq!(record.text(), r#"{"a": 1.0, "b": [1, null, "é"]}"#);
}

#[test]
fn delivers_json_unchanged() {
    let record = deliver("json", r#"'{ "b":1,"b" : 2}'"#, &[]);
    assert_eq!(record.text(), r#"{ "b":1,"b" : 2}"#);
}

#[test]
fn delivers_text_unchanged() {
    let record = deliver(
        "text",
        r#"E'"quoted" \\x41 line\nbreak\ttab 𝒳 \u0301'"#,
        &[],
    );
    assert_eq!(record.text(), "\"quoted\" \\x41 line\nbreak\ttab 𝒳 \u{301}");
}

#[test]
fn distinguishes_empty_text_from_null() {
    let record = deliver("text", "''", &["--null-payload", "tombstone"]);
    assert_eq!(record.payload.as_deref(), Some(&[][..]));
}

#[test]
fn delivers_bytea_as_raw_bytes() {
    let record = deliver("bytea", r"'\x00ff5c780a'", &[]);
    assert_eq!(
        record.payload.as_deref(),
        Some(&[0x00, 0xff, 0x5c, 0x78, 0x0a][..])
    );
}

#[test]
fn delivers_numbers_as_postgresql_formats_them() {
    let record = deliver("numeric", "12345678901234567890.123456789", &[]);
    assert_eq!(record.text(), "12345678901234567890.123456789");
}

#[test]
fn delivers_a_null_payload_as_empty_if_configured() {
    let flags = ["--null-payload", "empty"];
    assert_eq!(
        deliver("bytea", "NULL", &flags).payload.as_deref(),
        Some(&[][..])
    );
}

#[test]
fn delivers_a_null_payload_as_a_tombstone_by_default() {
    let record = deliver("jsonb", "NULL", &[]);
    assert_eq!(record.payload, None);
    assert_eq!(record.key(), "k");
}

#[test]
fn accepts_a_payload_column_with_a_different_name() {
    let fixture = Fixture::with_table(
        "CREATE TABLE outbox (id int, aggregatetype text, aggregateid text, body text, payload text)",
    );
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_with(&["--payload", "body"]);
    fixture.db.run(&format!(
        "INSERT INTO outbox VALUES (1, '{aggregate}', 'k', 'this', 'not this')"
    ));
    assert_eq!(fixture.wait_for_records(1)[0].text(), "this");
    walpost.terminate().expect_code(0);
}

#[test]
fn delivers_ten_megabyte_rows() {
    const LENGTH: usize = 10 << 20;
    let fixture = Fixture::with_table(
        "CREATE TABLE outbox (id int, aggregatetype text, aggregateid text, payload text);
         ALTER TABLE outbox ALTER COLUMN payload SET STORAGE EXTERNAL",
    );
    let topic = format!("outbox.event.{}", fixture.name);
    fixture.topic(&topic, 1, &[("max.message.bytes", "26214400")]);
    let walpost = fixture.start_with(&["-X", "message.max.bytes=26214400"]);
    for id in 1..=4 {
        fixture.db.run(&format!(
            "INSERT INTO outbox VALUES ({id}, '{}', 'k', repeat('{id}23456789ä', {LENGTH} / 11))",
            fixture.name
        ));
    }
    let records = fixture.wait_for_records(4);
    for (record, id) in records.iter().zip(1..) {
        let sent = format!("{id}23456789ä").repeat(LENGTH / 11);
        let payload = record.payload.as_deref().unwrap();
        assert_eq!(payload.len(), sent.len());
        assert_eq!(sha256(payload), sha256(sent.as_bytes()), "row {id}");
    }
    fixture.wait_until_confirmed();
    walpost.terminate().expect_code(0);
}
