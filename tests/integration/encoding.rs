//! Databases whose encoding is not UTF8.

use crate::support::event::Outbox;
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, Server};
use crate::support::records::{Record, keys};
use crate::support::wait::wait_until;
use crate::support::walpost::word_after;

const TABLE: &str =
    "CREATE TABLE outbox (id int, aggregatetype text, aggregateid text, payload text)";

fn fixture(encoding: &str) -> Fixture<'static> {
    let options = format!("ENCODING '{encoding}' LC_COLLATE 'C' LC_CTYPE 'C'");
    Fixture::bare_with(
        Outbox::Table,
        Server::shared(MAJOR),
        Broker::shared(),
        &options,
    )
}

/// Inserts an event whose payload is the given bytes, interpreted in the given encoding.
fn insert(fixture: &Fixture, table: &str, aggregate: &str, key: &str, encoding: &str, bytes: &str) {
    fixture.db.run(&format!(
        "INSERT INTO {table} (id, aggregatetype, aggregateid, payload)
             VALUES (1, '{aggregate}', '{key}', convert_from('\\x{bytes}', '{encoding}'))"
    ));
}

#[test]
fn reports_and_skips_a_row_that_cannot_be_converted_to_utf8() {
    for (encoding, text, good, bad) in [
        ("WIN1252", "\u{20ac}", "80", "6181"),
        ("EUC_JP", "\u{65e5}", "c6fc", "61f4fe"),
        ("SQL_ASCII", "\u{e9}", "c3a9", "61ff"),
    ] {
        let fixture = fixture(encoding);
        fixture.db.run(TABLE);
        let init = fixture.init().finish().expect_code(0);
        init.expect_mentions(&["WARN", encoding, "UTF8"]);
        let check = fixture.check().finish().expect_code(0);
        check.expect_mentions(&["encoding", encoding]);
        let aggregate = fixture.aggregate(1);
        let insert = |key, bytes| insert(&fixture, "outbox", &aggregate, key, encoding, bytes);
        insert("before", good);
        fixture.db.run("BEGIN");
        insert("same transaction", good);
        insert("bad", bad);
        fixture.db.run("COMMIT");
        insert("after", good);
        let halted = fixture.run().finish().expect_code(3);
        let halted =
            halted.expect_mentions(&["halted", encoding_of_row(encoding), "walpost skip --to"]);
        if encoding != "SQL_ASCII" {
            halted.expect_mentions(&["The row belongs to table public.outbox"]);
        }
        let halted = fixture.run().finish().expect_code(3);
        // Searches only after the last "halted", because the earlier warning about the encoding
        // contains the same command without a position.
        let (_, halted) = halted.stderr.rsplit_once("halted").expect("a halt");
        let position = word_after(halted, "walpost skip --to ");
        let position = position.trim_matches(|c: char| !c.is_ascii_hexdigit());
        assert!(position.ends_with(":0000000001"), "{position}");
        let skipped = fixture
            .skip(position)
            .answer(&format!("{}\n", fixture.name));
        skipped
            .finish()
            .expect_code(0)
            .expect_mentions(&["skipped"]);
        let walpost = fixture.start();
        wait_until("the event after the skipped transaction", || {
            keys(&fixture.records()).iter().any(|key| key == "after")
        });
        walpost.terminate().expect_code(0);
        let records = fixture.records();
        assert!(
            records.iter().all(|record| record.text() == text),
            "{encoding}"
        );
        assert!(keys(&records).iter().all(|key| key != "bad"), "{encoding}");
    }
}

fn encoding_of_row(encoding: &str) -> &'static str {
    match encoding {
        "SQL_ASCII" => "a value is not UTF-8",
        _ => "has no equivalent in UTF-8",
    }
}

#[test]
fn writes_an_invalid_utf8_row_from_a_sql_ascii_database_as_a_dead_letter() {
    let fixture = fixture("SQL_ASCII");
    fixture.db.run(TABLE);
    fixture.init().finish().expect_code(0);
    let aggregate = fixture.aggregate(1);
    let topic = format!("{}.dead", fixture.name);
    fixture.topic(&topic, 1, &[]);
    let flags = [
        "--dead-letter-topic",
        &topic,
        "--on-unroutable",
        "dead-letter",
    ];
    let walpost = fixture.start_with(&flags);
    let insert = |key, bytes| insert(&fixture, "outbox", &aggregate, key, "SQL_ASCII", bytes);
    insert("bad", "61ff");
    insert("good", "61");
    let records = fixture.wait_for_records(2);
    let letters: Vec<_> = records
        .iter()
        .filter(|record| record.topic == topic)
        .collect();
    assert_eq!(letters.len(), 1);
    assert_eq!(letters[0].header("walpost-error"), "unroutable");
    assert_eq!(letters[0].payload.as_deref(), Some(&b"a\xff"[..]));
    walpost.terminate().expect_code(0);
}

#[test]
fn stops_delivery_of_only_the_table_with_an_invalid_utf8_row_in_a_sql_ascii_database() {
    let mut fixture = fixture("SQL_ASCII");
    fixture.use_settings(
        "tables = [\"tenant_*.outbox\"]\non_table_error = \"set-aside\"\nheaders = { tenant = \"{table.schema}\" }\n",
    );
    fixture.init().finish().expect_code(0);
    for tenant in ["tenant_1", "tenant_2"] {
        let table = format!("{tenant}.outbox");
        fixture.db.run(&format!(
            "CREATE SCHEMA {tenant}; {}",
            TABLE.replace("outbox", &table)
        ));
        let init = fixture.init().args(["--table", &table]);
        init.finish().expect_code(0);
    }
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start();
    let insert = |tenant: &str, bytes| {
        let table = format!("{tenant}.outbox");
        insert(&fixture, &table, &aggregate, "k", "SQL_ASCII", bytes);
    };
    insert("tenant_1", "61ff");
    insert("tenant_2", "61");
    let records = fixture.wait_for_records(1);
    let tenants: Vec<_> = records
        .iter()
        .map(|record: &Record| record.header("tenant"))
        .collect();
    assert_eq!(tenants, ["tenant_2"]);
    let stopped = walpost.terminate().expect_code(0);
    stopped.expect_mentions(&["tenant_1.outbox", "set aside"]);
}

#[test]
fn ignores_messages_whose_prefix_is_not_valid_utf8() {
    let options = "ENCODING 'SQL_ASCII' LC_COLLATE 'C' LC_CTYPE 'C'";
    let fixture = Fixture::bare_with(
        Outbox::Messages,
        Server::shared(MAJOR),
        Broker::shared(),
        options,
    );
    fixture.init().finish().expect_code(0);
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start();
    for transactional in [true, false] {
        fixture.db.run(&format!(
            "SELECT pg_logical_emit_message({transactional}, convert_from('\\xff', 'SQL_ASCII'), 'x')"
        ));
    }
    fixture.insert(&aggregate, "k");
    fixture.wait_for_records(1);
    walpost.terminate().expect_code(0);
}
