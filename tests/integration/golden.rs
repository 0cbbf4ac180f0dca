//! Captures pgoutput messages from real servers for the decoder's tests.
//!
//! `tests/golden/pg<major>.bin` is a sequence of messages, each preceded by its length (u32,
//! big-endian). It contains a scripted session twice: first with values as text, then with binary
//! values. `tests/golden/outbox_<kind>.bin` has the same format and contains one transaction of 100
//! events, which `tests/support/stream.rs` repeats.

use std::fs;
use std::path::Path;

use crate::support::postgres::{MAJOR, MAJORS, Server};
use crate::support::session::Session;

/// A session whose messages cover every type of message, tuple and column value.
const SCRIPT: &str = "
CREATE TYPE mood AS ENUM ('calm', 'grüße');
CREATE TABLE keyed (id bigint PRIMARY KEY, mood mood, note text, big text, raw bytea);
ALTER TABLE keyed ALTER COLUMN big SET STORAGE EXTERNAL;
CREATE TABLE whole (id int, note text);
ALTER TABLE whole REPLICA IDENTITY FULL;
CREATE TABLE outbox (id uuid, aggregatetype text, payload jsonb, at timestamptz) PARTITION BY HASH (id);
CREATE TABLE outbox_0 PARTITION OF outbox FOR VALUES WITH (MODULUS 2, REMAINDER 0);
CREATE TABLE outbox_1 PARTITION OF outbox FOR VALUES WITH (MODULUS 2, REMAINDER 1);
CREATE PUBLICATION golden FOR TABLE keyed, whole, outbox WITH (publish_via_partition_root = true);
SELECT pg_replication_origin_create('elsewhere');
";

const SESSION: [&str; 9] = [
    "INSERT INTO keyed VALUES (1, 'grüße', 'first', repeat('0123456789', 250), '\\x00ff7f'),
                              (2, NULL, NULL, NULL, NULL), (3, 'calm', '', '', '')",
    "UPDATE keyed SET note = 'toast unchanged' WHERE id = 1",
    "UPDATE keyed SET id = 20 WHERE id = 2",
    "DELETE FROM keyed WHERE id = 3",
    "BEGIN; INSERT INTO whole VALUES (1, NULL); UPDATE whole SET note = 'new'; DELETE FROM whole; COMMIT",
    "INSERT INTO outbox VALUES
        ('00000000-0000-0000-0000-000000000001', 'order', '{\"a\": [1, null, \"ü\"]}', '2026-01-01 00:00:00+00'),
        ('00000000-0000-0000-0000-000000000002', 'order', NULL, NULL)",
    "BEGIN; SELECT pg_logical_emit_message(true, 'prefix', 'transactional'); COMMIT;
     SELECT pg_logical_emit_message(false, 'prefix', 'not transactional')",
    "TRUNCATE keyed, whole RESTART IDENTITY CASCADE",
    "SELECT pg_replication_origin_session_setup('elsewhere');
     BEGIN; SELECT pg_replication_origin_xact_setup('0/ABCDEF', '2026-01-01 00:00:00+00');
     INSERT INTO whole VALUES (2, 'from elsewhere'); COMMIT;
     SELECT pg_replication_origin_session_reset()",
];

/// SQL that writes the same events to three outbox tables: one with a jsonb payload of about 190
/// bytes, one that also has a headers column, as in sql/outbox.sql, and one with a bytea payload.
const OUTBOXES: &str = "
CREATE TABLE outbox_plain (id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload jsonb);
CREATE TABLE outbox_headers (LIKE outbox_plain, headers jsonb, created_at timestamptz);
CREATE TABLE outbox_bytea (id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload bytea);
CREATE PUBLICATION golden FOR TABLE outbox_plain, outbox_headers, outbox_bytea;
CREATE VIEW event AS
SELECT n, md5(n::text)::uuid AS id, 'order' AS aggregatetype, 'ord-' || n * 7919 % 10000 AS aggregateid,
    'OrderCreated' AS type,
    jsonb_build_object('n', n, 'customer', 'customer-' || n * 104729 % 5000, 'amount', n * 7919 % 100000 / 100.0,
        'currency', 'EUR', 'status', 'created',
        'note', substr(md5(n::text) || md5((n + 1)::text) || md5((n + 2)::text), 1, 70)) AS payload
FROM generate_series(1, 100) n;
";

const EVENTS: [(&str, &str); 3] = [
    (
        "outbox_plain",
        "SELECT id, aggregatetype, aggregateid, type, payload FROM event",
    ),
    (
        "outbox_headers",
        "SELECT id, aggregatetype, aggregateid, type, payload,
             jsonb_build_object('tenant', 'tenant-' || n % 10, 'traceparent',
                 '00-' || md5(n::text) || '-' || substr(md5(n::text), 1, 16) || '-01', 'schema', 3, 'actor', NULL),
             timestamptz '2026-01-01 00:00:00+00' + n * interval '1.0001 s' FROM event",
    ),
    (
        "outbox_bytea",
        "SELECT id, aggregatetype, aggregateid, type, convert_to(payload::text, 'UTF8') FROM event",
    ),
];

/// SQL that writes the events of outbox_headers as logical decoding messages.
const LOG_EVENTS: &str = "
SELECT walpost.publish(aggregatetype, aggregateid, type, payload,
    jsonb_build_object('tenant', 'tenant-' || n % 10, 'traceparent',
        '00-' || md5(n::text) || '-' || substr(md5(n::text), 1, 16) || '-01', 'schema', 3, 'actor', NULL),
    id, 'outbox_log') FROM event";

/// The tags of all message types in protocol version 1, each of which must be captured.
const TAGS: &[u8] = b"BCDIMORTUY";

#[test]
#[ignore = "writes tests/golden; run it to capture a new version"]
fn captures_golden_files_with_replication_messages() {
    for major in MAJORS {
        let server = Server::private(major, "");
        let session = server.session("postgres");
        session.run(SCRIPT);
        session.run("SELECT pg_create_logical_replication_slot('golden', 'pgoutput')");
        SESSION
            .iter()
            .for_each(|statements| session.run(statements));
        let mut messages = captured(&session, "false");
        for tag in TAGS {
            assert!(
                messages.iter().any(|message| message[0] == *tag),
                "no {}",
                char::from(*tag)
            );
        }
        messages.extend(captured(&session, "true"));
        write(&format!("pg{major}.bin"), &messages);
    }
}

#[test]
#[ignore = "writes tests/golden; run it to capture other events"]
fn captures_golden_files_with_outbox_messages() {
    let server = Server::private(MAJOR, "");
    let session = server.session("postgres");
    session.run(OUTBOXES);
    session.run("SELECT pg_create_logical_replication_slot('golden', 'pgoutput')");
    for (table, events) in EVENTS {
        session.run(&format!("INSERT INTO {table} {events}"));
    }
    session.run(&publish_sql());
    session.run(LOG_EVENTS);
    let messages = captured(&session, "false");
    let mut transactions = messages.split_inclusive(|message| message[0] == b'C');
    for outbox in EVENTS
        .map(|(table, _)| table)
        .into_iter()
        .chain(["outbox_log"])
    {
        write(&format!("{outbox}.bin"), transactions.next().unwrap());
    }
    assert_eq!(transactions.next(), None);
}

/// Returns sql/publish.sql without psql's meta-commands.
fn publish_sql() -> String {
    let lines = include_str!("../../sql/publish.sql").lines();
    lines
        .filter(|line| !line.starts_with('\\'))
        .fold(String::new(), |sql, line| sql + line + "\n")
}

fn write(name: &str, messages: &[Vec<u8>]) {
    let mut file = Vec::new();
    for message in messages {
        file.extend(u32::try_from(message.len()).unwrap().to_be_bytes());
        file.extend(message);
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    fs::write(folder.join(name), file).unwrap();
}

fn captured(session: &Session, binary: &str) -> Vec<Vec<u8>> {
    let rows = session.rows(&format!(
        "SELECT encode(data, 'hex') FROM pg_logical_slot_peek_binary_changes('golden', NULL, NULL,
             'proto_version', '1', 'publication_names', 'golden', 'messages', 'true', 'binary', '{binary}')"
    ));
    rows.iter()
        .map(|row| from_hex(row[0].as_deref().unwrap()))
        .collect()
}

fn from_hex(text: &str) -> Vec<u8> {
    text.as_bytes()
        .chunks(2)
        .map(|pair| u8::from_str_radix(str::from_utf8(pair).unwrap(), 16).unwrap())
        .collect()
}
