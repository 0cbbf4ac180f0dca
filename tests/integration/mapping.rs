//! The mapping of columns to a record's topic, key, headers, timestamp and partition.

use crate::support::fixture::Fixture;
use crate::support::records::Record;
use crate::support::walpost::Invocation;

fn only_record(records: Vec<Record>) -> Record {
    assert_eq!(records.len(), 1, "{records:?}");
    records.into_iter().next().unwrap()
}

#[test]
fn delivers_rows_of_an_unmodified_debezium_outbox_table() {
    let fixture = Fixture::with_table(
        "CREATE TABLE outbox (id uuid NOT NULL PRIMARY KEY, aggregatetype varchar(255) NOT NULL,
             aggregateid varchar(255) NOT NULL, type varchar(255) NOT NULL, payload jsonb)",
    );
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start();
    fixture.db.run(&format!(
        "INSERT INTO outbox VALUES
         ('406c07f3-26f0-4eea-a50c-109940064b8f', '{aggregate}', '1', 'OrderCreated', '{{\"id\": 1}}')"
    ));
    let record = only_record(fixture.wait_for_records(1));
    assert_eq!(record.key(), "1");
    assert_eq!(record.text(), "{\"id\": 1}");
    assert_eq!(record.header_names(), ["id", "walpost-position"]);
    assert_eq!(record.header("id"), "406c07f3-26f0-4eea-a50c-109940064b8f");
    walpost.terminate().expect_code(0);
}

#[test]
fn reports_a_column_of_an_unsupported_type() {
    let fixture = Fixture::with_table(
        "CREATE TYPE order_status AS ENUM ('placed');
         CREATE TABLE outbox (id int PRIMARY KEY, aggregatetype text, aggregateid text, payload order_status,
             shard numeric(3, 0))",
    );
    for (settings, found) in [
        (
            "",
            "column \"payload\" of table public.outbox has type public.order_status, but payload requires",
        ),
        (
            "payload = \"aggregateid\"\npartition = \"shard\"\n",
            "column \"shard\" of table public.outbox has type numeric(3,0), but partition requires",
        ),
    ] {
        let file = fixture.file(settings);
        for subcommand in ["run", "check"] {
            let walpost = Invocation::new([subcommand, "--config"])
                .arg(&file)
                .finish();
            walpost.expect_code(3).expect_mentions(&[found]);
        }
    }
}

#[test]
fn adds_trace_context_columns_as_headers_by_default() {
    const TRACE: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let fixture = Fixture::with_table(
        "CREATE TABLE outbox (id int PRIMARY KEY, aggregatetype text, aggregateid text, payload text,
             traceparent text, tracestate varchar(512))",
    );
    let aggregate = fixture.aggregate(1);
    let insert = |id: u32, trace: &str| {
        fixture.db.run(&format!(
            "INSERT INTO outbox VALUES ({id}, '{aggregate}', 'k', 'p', {trace})"
        ));
    };
    let walpost = fixture.start();
    insert(1, &format!("'{TRACE}', 'vendor=1'"));
    insert(2, &format!("'{TRACE}', NULL"));
    insert(3, "NULL, NULL");
    let records = fixture.wait_for_records(3);
    let names = ["id", "traceparent", "tracestate", "walpost-position"];
    assert_eq!(records[0].header_names(), names);
    assert_eq!(records[0].header("traceparent"), TRACE);
    assert_eq!(records[0].header("tracestate"), "vendor=1");
    let names = ["id", "traceparent", "walpost-position"];
    assert_eq!(records[1].header_names(), names);
    assert_eq!(records[2].header_names(), ["id", "walpost-position"]);
    walpost.terminate().expect_code(0);
    // If any headers are configured, they replace the default headers such as `id` and
    // `traceparent`.
    let walpost = fixture.start_with(&["--header", "about={aggregateid}"]);
    insert(4, &format!("'{TRACE}', 'vendor=1'"));
    let records = fixture.wait_for_records(4);
    assert_eq!(records[3].header_names(), ["about", "walpost-position"]);
    walpost.terminate().expect_code(0);
}

#[test]
fn templates_combine_columns_and_literal_text() {
    let fixture = Fixture::with_table(
        "CREATE TABLE outbox (id int, tenant text, aggregatetype text, aggregateid bigint, payload text)",
    );
    let topic = format!("{}-events.v1", fixture.name);
    fixture.topic(&topic, 1, &[]);
    let walpost = fixture.start_with_file(
        "topic = '{aggregatetype}-events.v1'
         key = '{{{tenant}}}:{aggregateid}'
         headers = { id = '{id}', source = 'shop', route = '{tenant}/{aggregatetype}' }",
    );
    fixture.db.run(&format!(
        "INSERT INTO outbox VALUES (7, 'Zürich', '{}', 42, 'p')",
        fixture.name
    ));
    let record = only_record(fixture.wait_for_records(1));
    assert_eq!(record.topic, topic);
    assert_eq!(record.key(), "{Zürich}:42");
    assert_eq!(record.header("id"), "7");
    assert_eq!(record.header("source"), "shop");
    assert_eq!(record.header("route"), format!("Zürich/{}", fixture.name));
    walpost.terminate().expect_code(0);
}

/// Covers a row that is older than the slot and a row from the stream. `verify` and `replay` must
/// recognize both rows.
#[test]
fn records_in_kafka_connect_formats_include_column_metadata_from_the_catalog() {
    let fixture = Fixture::with_table(
        "CREATE TABLE outbox (id uuid PRIMARY KEY, aggregatetype text NOT NULL, aggregateid bigint NOT NULL,
             payload jsonb NOT NULL, tenant varchar(10) DEFAULT 'acme')",
    );
    let topic = format!("{}-events", fixture.name);
    fixture.topic(&topic, 1, &[]);
    let insert = |n: u32| {
        fixture.db.run(&format!(
            "INSERT INTO outbox VALUES ('00000000-0000-4000-8000-00000000000{n}', '{}', {n}, '{{\"a\": 1.50}}', NULL)",
            fixture.name
        ));
    };
    insert(1);
    let settings = "route = { column = 'aggregatetype', regex = '(.*)', replacement = '$1-events' }
         key_format = 'json-schema'
         value_format = 'json-schema'
         expand_payload = true
         null_default = true
         header_format = 'json'
         headers = [['tenant', '{tenant}'], ['id', '{id}']]";
    let walpost = fixture.start_with_file(settings);
    insert(2);
    let records = fixture.wait_for_records(2);
    for (n, record) in (1..).zip(&records) {
        assert_eq!(record.topic, topic);
        let key = r#"{"schema":{"type":"int64","optional":false},"payload":"#;
        assert_eq!(record.key(), format!("{key}{n}}}"));
        assert_eq!(
            record.text(),
            r#"{"schema":{"type":"struct","fields":[{"type":"double","optional":true,"field":"a"}],"optional":true,"name":"payload"},"payload":{"a":1.5}}"#
        );
        assert_eq!(record.header_names(), ["tenant", "id", "walpost-position"]);
        assert_eq!(record.header("tenant"), "\"acme\"");
        let id = format!("\"00000000-0000-4000-8000-00000000000{n}\"");
        assert_eq!(record.header("id"), id);
    }
    walpost.terminate().expect_code(0);
    let file = fixture.file(settings);
    let verify = Invocation::new(["verify", "--config"]).arg(&file);
    verify.finish().expect_code(0);
    let position = records[1].header("walpost-position").to_owned();
    let replay = Invocation::new(["replay", "--yes", "--from", &position, "--config"]).arg(&file);
    replay.finish().expect_code(0);
    let again = fixture.wait_for_records(3);
    let (sent, first) = (&again[2], &records[1]);
    assert_eq!((sent.key(), sent.text()), (first.key(), first.text()));
}

#[test]
fn accepts_templates_from_command_line_flags() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_with(&[
        "--key",
        "{type}-{aggregateid}",
        "--header",
        "kind={type}",
        "--header",
        "about={aggregateid}",
    ]);
    fixture.insert(&aggregate, "a");
    let record = only_record(fixture.wait_for_records(1));
    assert_eq!(record.key(), "Happened-a");
    assert_eq!(
        record.headers.len(),
        3,
        "the headers replace the default header id"
    );
    assert_eq!(
        (record.header("kind"), record.header("about")),
        ("Happened", "a")
    );
    walpost.terminate().expect_code(0);
}

#[test]
fn omits_the_key_if_all_its_columns_are_null() {
    let fixture = Fixture::with_table(
        "CREATE TABLE outbox (id int, aggregatetype text, a text, b text, payload text)",
    );
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_with(&["--key", "{a}.{b}"]);
    fixture.db.run(&format!(
        "INSERT INTO outbox VALUES (1, '{aggregate}', NULL, NULL, ''), (2, '{aggregate}', NULL, 'x', ''),
                                   (3, '{aggregate}', '', '', '')"
    ));
    let keys: Vec<_> = fixture
        .wait_for_records(3)
        .into_iter()
        .map(|record| record.key)
        .collect();
    assert_eq!(keys, [None, Some(b".x".to_vec()), Some(b".".to_vec())]);
    walpost.terminate().expect_code(0);
}

#[test]
fn delivers_unicode_and_binary_keys_unchanged() {
    let fixture = Fixture::with_table(
        "CREATE TABLE outbox (id int, aggregatetype text, aggregateid text, raw bytea, payload text)",
    );
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start();
    fixture.db.run(&format!(
        "INSERT INTO outbox VALUES (1, '{aggregate}', 'ключ-鍵-🔑', '', '')"
    ));
    assert_eq!(only_record(fixture.wait_for_records(1)).key(), "ключ-鍵-🔑");
    walpost.terminate().expect_code(0);

    let walpost = fixture.start_with(&["--key", "{raw}"]);
    fixture.db.run(&format!(
        "INSERT INTO outbox VALUES (2, '{aggregate}', '', '\\x00fffe', '')"
    ));
    let records = fixture.wait_for_records(2);
    assert_eq!(records[1].key.as_deref(), Some(&[0x00, 0xff, 0xfe][..]));
    walpost.terminate().expect_code(0);
}

#[test]
fn adds_each_member_of_the_headers_column_as_a_header() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start();
    fixture.db.run(&format!(
        "INSERT INTO outbox (aggregatetype, aggregateid, type, payload, headers) VALUES
         ('{aggregate}', 'k', 't', '{{}}', '{{\"trace\": \"ä\\\"b\", \"n\": 1.50, \"gone\": null, \"o\": {{\"x\": [true]}}}}'),
         ('{aggregate}', 'k', 't', '{{}}', NULL)"
    ));
    let records = fixture.wait_for_records(2);
    assert_eq!(records[0].header("trace"), "ä\"b");
    assert_eq!(records[0].header("n"), "1.50");
    assert_eq!(records[0].header("o"), "{\"x\": [true]}");
    assert!(
        records[0].headers.contains(&("gone".to_owned(), None)),
        "{:?}",
        records[0].headers
    );
    assert_eq!(records[1].header_names(), ["id", "walpost-position"]);
    walpost.terminate().expect_code(0);
}

#[test]
fn reads_trace_context_from_the_headers_column_or_a_separate_column() {
    let fixture = Fixture::with_table(
        "CREATE TABLE outbox (id int, aggregatetype text, aggregateid text, payload text, headers jsonb, traceparent text)",
    );
    let aggregate = fixture.aggregate(1);
    let context = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let insert = |headers: &str, traceparent: &str| {
        fixture.db.run(&format!(
            "INSERT INTO outbox VALUES (1, '{aggregate}', 'k', '', {headers}, {traceparent})"
        ));
    };
    let walpost = fixture.start();
    insert(&format!("'{{\"traceparent\": \"{context}\"}}'"), "NULL");
    assert_eq!(
        fixture.wait_for_records(1)[0].header("traceparent"),
        context
    );
    walpost.terminate().expect_code(0);

    let walpost =
        fixture.start_with_file("headers = { id = '{id}', traceparent = '{traceparent}' }");
    insert("NULL", &format!("'{context}'"));
    insert("NULL", "NULL");
    let records = fixture.wait_for_records(3);
    assert_eq!(records[1].header("traceparent"), context);
    let without = ("traceparent".to_owned(), None);
    assert!(
        records[2].headers.contains(&without),
        "{:?}",
        records[2].headers
    );
    walpost.terminate().expect_code(0);
}

#[test]
fn headers_column_can_be_renamed_or_disabled() {
    let fixture = Fixture::with_table(
        "CREATE TABLE outbox (id int, aggregatetype text, aggregateid text, payload text, headers json, meta json)",
    );
    let aggregate = fixture.aggregate(1);
    let insert = |id: u32| {
        fixture.db.run(&format!(
            "INSERT INTO outbox VALUES ({id}, '{aggregate}', 'k', '', '{{\"h\": \"1\"}}', '{{\"m\": \"2\"}}')"
        ));
    };
    let walpost = fixture.start_with_file("headers_column = ''");
    insert(1);
    assert_eq!(
        fixture.wait_for_records(1)[0].header_names(),
        ["id", "walpost-position"]
    );
    walpost.terminate().expect_code(0);

    let walpost = fixture.start_with_file("headers_column = 'meta'");
    insert(2);
    assert_eq!(
        fixture.wait_for_records(2)[1].header_names(),
        ["id", "walpost-position", "m"]
    );
    walpost.terminate().expect_code(0);
}

#[test]
fn adds_a_header_with_a_null_value_for_a_null_column() {
    let fixture = Fixture::with_table(
        "CREATE TABLE outbox (id int, aggregatetype text, aggregateid text, payload text, trace text)",
    );
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_with(&["--header", "id={id}", "--header", "trace={trace}"]);
    fixture.db.run(&format!(
        "INSERT INTO outbox VALUES (1, '{aggregate}', 'k', '', NULL)"
    ));
    let record = only_record(fixture.wait_for_records(1));
    assert!(
        record.headers.contains(&("trace".to_owned(), None)),
        "{:?}",
        record.headers
    );
    walpost.terminate().expect_code(0);
}

#[test]
fn reads_the_timestamp_and_partition_from_columns() {
    let fixture = Fixture::with_table(
        "CREATE TABLE outbox (id int, aggregatetype text, aggregateid text, payload text,
             zoned timestamptz, local timestamp, millis bigint, shard smallint)",
    );
    let aggregate = fixture.aggregate(4);
    for (delivered, column) in ["zoned", "local", "millis"].iter().enumerate() {
        let walpost =
            fixture.start_with_file(&format!("timestamp = '{column}'\npartition = 'shard'"));
        fixture.db.run(&format!(
            "SET TIME ZONE 'Asia/Kolkata';
             INSERT INTO outbox VALUES ({delivered}, '{aggregate}', 'k', '',
                 '2026-03-04 05:06:07.089123+00', '2026-03-04 05:06:07.089123', 1772600767089, {delivered})"
        ));
        let records = fixture.wait_for_records(delivered + 1);
        let record = &records[delivered];
        assert_eq!(record.timestamp, 1_772_600_767_089, "{column}");
        assert_eq!(usize::try_from(record.partition).unwrap(), delivered);
        walpost.terminate().expect_code(0);
    }
}

#[test]
fn record_timestamp_defaults_to_the_time_of_publishing() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start();
    let millis = "SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint";
    let before = fixture.db.number(millis);
    fixture.insert(&aggregate, "k");
    let record = only_record(fixture.wait_for_records(1));
    let now = fixture.db.number(millis);
    assert!(
        (before..=now).contains(&record.timestamp),
        "{before} <= {} <= {now}",
        record.timestamp
    );
    walpost.terminate().expect_code(0);
}
