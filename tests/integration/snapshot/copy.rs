//! Tests which rows are copied and in which order, and that the stream continues meanwhile.

use super::{
    TABLE, check_copied, fill, fixture_before_init, fixture_before_init_on, open_transaction,
    settle, snapshot_lsn, wait_until_blocked,
};
use crate::support::browser;
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, MAJORS, Server};
use crate::support::records::Record;
use crate::support::wait::wait_until;

in_both_modes! { copies_each_row_once_while_writers_continue }

fn copies_each_row_once_while_writers_continue(exactly_once: bool) {
    for major in MAJORS {
        let fixture = fixture_before_init_on(TABLE, major);
        let aggregates = [fixture.aggregate(3), fixture.aggregate(1)];
        let load = fixture.load(&[&aggregates[0], &aggregates[1]]);
        load.wait_for_transactions(100);
        fixture.init().finish().expect_code(0);
        load.wait_for_transactions(30);
        let fixture = fixture.in_mode(exactly_once);
        // The server creates a snapshot in two steps. In each step, it waits for open transactions.
        let first = open_transaction(&fixture, &aggregates[0]);
        let mut walpost = fixture.run().start();
        wait_until_blocked(&fixture, &first);
        let second = open_transaction(&fixture, &aggregates[0]);
        first.run(&format!(
            "{} COMMIT",
            fixture.insert_sql(&aggregates[1], "open")
        ));
        wait_until_blocked(&fixture, &second);
        let third = open_transaction(&fixture, &aggregates[0]);
        second.run("COMMIT");
        walpost.wait_for_log("streaming");
        third.run(&format!(
            "{} COMMIT",
            fixture.insert_sql(&aggregates[0], "open")
        ));
        load.wait_for_transactions(100);
        load.stop();
        settle(&fixture, walpost);
        let snapshot_lsn = snapshot_lsn(&fixture);
        let copied = check_copied(&fixture, snapshot_lsn);
        assert!(
            copied >= 137,
            "{major}: only {copied} rows are from the snapshot"
        );
        // Walpost copies older rows only once per slot.
        let before = fixture.records().len();
        let mut walpost = fixture.start();
        fixture.insert(&aggregates[0], "later");
        fixture.wait_for_records(before + 1);
        assert_eq!(walpost.logged("snapshot"), 0, "{}", walpost.log());
        assert!(walpost.is_running());
        settle(&fixture, walpost);
        assert_eq!(check_copied(&fixture, snapshot_lsn), copied, "{major}");
    }
}

#[test]
fn delivers_commits_around_the_consistent_point_exactly_once() {
    for major in MAJORS {
        let fixture = fixture_before_init_on(TABLE, major);
        let aggregate = fixture.aggregate(1);
        fixture.insert(&aggregate, "older");
        fixture.init().finish().expect_code(0);
        let first = open_transaction(&fixture, &aggregate);
        let mut walpost = fixture.run().start();
        wait_until_blocked(&fixture, &first);
        // End the transaction that blocks the snapshot. Its commit is the last one before the
        // consistent point, and the next commit is the first one after that point.
        first.run("COMMIT");
        walpost.wait_for_log("streaming");
        fixture.insert(&aggregate, "newer");
        settle(&fixture, walpost);
        assert_eq!(check_copied(&fixture, snapshot_lsn(&fixture)), 4, "{major}");
    }
}

#[test]
fn copies_rows_ordered_by_time_or_by_an_increasing_key() {
    for (create, order) in [
        (TABLE, "created_at, id"),
        (
            "CREATE TABLE outbox (id uuid DEFAULT gen_random_uuid(), number bigserial PRIMARY KEY, aggregatetype text,
             aggregateid text, type text, payload jsonb, created_at timestamptz NOT NULL DEFAULT now() - random() * '1 day'::interval)",
            "number",
        ),
        (
            "CREATE TABLE outbox (id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload jsonb)",
            "id",
        ),
    ] {
        let fixture = fixture_before_init(create);
        let aggregate = fixture.aggregate(1);
        fill(&fixture, &aggregate, 300);
        fixture.init().finish().expect_code(0);
        settle(&fixture, fixture.start());
        assert_eq!(check_copied(&fixture, snapshot_lsn(&fixture)), 300);
        let expected = fixture.db.rows(&format!("SELECT id FROM outbox ORDER BY {order}"));
        let expected: Vec<_> = expected.into_iter().flatten().flatten().collect();
        let records = fixture.records();
        let found: Vec<_> = records.iter().map(|record| record.header("id")).collect();
        assert_eq!(found, expected, "{order}");
    }
}

#[test]
fn copied_values_equal_streamed_values() {
    let columns =
        "id uuid DEFAULT gen_random_uuid(), aggregatetype text, aggregateid text, payload bytea,
        headers jsonb, note text, at timestamptz, many int8, part numeric";
    let fixture = fixture_before_init(&format!("CREATE TABLE outbox ({columns})"));
    let topic = fixture.name.clone();
    fixture.topic(&topic, 1, &[]);
    let insert = format!(
        "INSERT INTO outbox (aggregatetype, aggregateid, payload, headers, note, at, many, part) VALUES
         ('{topic}', E'k\\t1', '\\x00ff5c6e', '{{\"a\": \"b\\\\n\"}}', E'\\\\N \\\\ \\n\\r\\b\\f\\v é', '2020-02-29 12:00:00.5+02', 7, 1.50),
         ('{topic}', '', NULL, NULL, NULL, NULL, NULL, NULL)"
    );
    fixture.db.run(&insert);
    fixture.init().finish().expect_code(0);
    let flags = [
        "--topic",
        "{aggregatetype}",
        "--header",
        "note={note}",
        "--header",
        "at={at}",
        "--header",
        "many={many}{part}",
    ];
    let walpost = fixture.start_with(&flags);
    fixture.wait_for_records(2);
    fixture.db.run(&insert);
    let records = fixture.wait_for_records(4);
    settle(&fixture, walpost);
    let shown = |record: &Record| {
        let headers: Vec<_> = record
            .headers
            .iter()
            .filter(|(name, _)| name != "walpost-position")
            .cloned()
            .collect();
        (record.key.clone(), record.payload.clone(), headers)
    };
    for (copied, streamed) in records[..2].iter().zip(&records[2..]) {
        assert_eq!(shown(copied), shown(streamed));
    }
    assert_eq!(records[0].payload.as_deref(), Some(&b"\x00\xff\\n"[..]));
}

#[test]
fn copies_a_partitioned_table_through_its_root() {
    let fixture = Fixture::bare();
    let columns = TABLE
        .replace("id uuid PRIMARY KEY", "id uuid")
        .replace("CREATE TABLE outbox", "");
    fixture.db.run(&format!(
        "CREATE TABLE outbox {columns} PARTITION BY HASH (id);
         CREATE TABLE outbox_0 PARTITION OF outbox FOR VALUES WITH (MODULUS 2, REMAINDER 0);
         CREATE TABLE outbox_1 PARTITION OF outbox FOR VALUES WITH (MODULUS 2, REMAINDER 1)"
    ));
    let aggregate = fixture.aggregate(3);
    fill(&fixture, &aggregate, 200);
    fixture.init().finish().expect_code(0);
    let walpost = fixture.start();
    fill(&fixture, &aggregate, 50);
    settle(&fixture, walpost);
    assert_eq!(check_copied(&fixture, snapshot_lsn(&fixture)), 200);
}

#[test]
fn memory_stays_bounded_while_copying_a_large_table() {
    let fixture = fixture_before_init(TABLE);
    let aggregate = fixture.aggregate(1);
    let payload = "jsonb_build_object('text', repeat('x', 2000))";
    fixture
        .db
        .run(&fixture.events().insert_many(&aggregate, 60_000, payload));
    fixture.init().finish().expect_code(0);
    let mut walpost = fixture.run().args(["--window-bytes", "1MiB"]).start();
    walpost.wait_for_log("copying");
    let mut peak = 0;
    wait_until("the copy", || {
        peak = peak.max(walpost.resident_bytes());
        walpost.logged("streaming") > 0
    });
    settle(&fixture, walpost);
    assert!(peak < 64 << 20, "{peak} bytes for a table of 120 MB");
    assert_eq!(check_copied(&fixture, snapshot_lsn(&fixture)), 60_000);
}

#[test]
fn metrics_and_status_report_copy_progress() {
    const ROWS: usize = 40_000;
    let broker = Broker::borrowed();
    let fixture = Fixture::bare_on_servers(Server::shared(MAJOR), &broker);
    fixture.db.run(TABLE);
    let aggregate = fixture.aggregate(1);
    fill(&fixture, &aggregate, ROWS);
    fixture.db.run("ANALYZE outbox");
    fixture.init().finish().expect_code(0);
    // Copy only a few rows at a time, so that the copy takes several seconds.
    let few = ["--window-records", "20", "--http", "127.0.0.1:0"];
    let mut walpost = fixture.run().args(few).start();
    let http = walpost.http();
    let metric = |name: &str| http.metric(name, &fixture.name);
    let is_in = |phase: &str| {
        let series = format!(
            "walpost_snapshot_phase{{pipeline=\"{}\",phase=\"{phase}\"}}",
            fixture.name
        );
        http.metrics().get(&series).copied() == Some(1.0)
    };
    wait_until("some rows", || {
        metric("walpost_snapshot_rows_total") > Some(0.0)
    });
    broker.freeze();
    assert!(is_in("copying"), "{}", http.get("/metrics").body);
    assert_eq!(metric("walpost_snapshot_rows_expected"), Some(ROWS as f64));
    let rows = metric("walpost_snapshot_rows_total").unwrap();
    assert!(rows < ROWS as f64, "{rows}");
    let snapshot = &http.pipeline()["snapshot"];
    assert_eq!(snapshot["phase"], "copying", "{snapshot}");
    assert!(snapshot["rows"].as_f64() >= Some(rows), "{snapshot}");
    let shown = fixture
        .invoke("status")
        .args(["--http", http.address()])
        .finish();
    let line = format!("of about {ROWS} rows read");
    assert!(shown.stdout.contains(&line), "{shown:?}");
    let page = browser::document(&format!("http://{}/", http.address()));
    let line = "of about 40,000 rows read";
    assert!(page.contains(line), "{page}");
    broker.thaw();
    wait_until("the end", || is_in("done"));
    assert_eq!(metric("walpost_snapshot_rows_total"), Some(ROWS as f64));
    assert_eq!(http.pipeline()["snapshot"]["rows"], ROWS);
    let shown = fixture
        .invoke("status")
        .args(["--http", http.address()])
        .finish()
        .expect_code(0);
    assert!(!shown.stdout.contains("rows read"), "{shown:?}");
    walpost.terminate().expect_code(0);
}
