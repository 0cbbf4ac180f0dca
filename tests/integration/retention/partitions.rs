//! Walpost creates partitions in advance, and drops them once they are old and their rows are
//! delivered.

use std::time::Duration;

use super::{
    COLUMNS, DEFAULT, fixture_with_late_row_in_detached_partition, fixture_with_old_partition,
    insert_old, is, is_gone, maintain, maintain_until, maintain_until_delivered, tables,
};
use crate::support::checker::Resends;
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, MAJORS, Server};
use crate::support::wait::{assert_stays, avoid_utc_midnight, wait_until};

#[test]
fn creates_future_partitions_with_the_layout_of_existing_ones() {
    for major in MAJORS {
        avoid_utc_midnight();
        let fixture = Fixture::bare_on_servers(Server::shared(major), Broker::shared());
        fixture.init().arg("--partitioned").finish().expect_code(0);
        let partitions = "SELECT count(*) FROM pg_inherits WHERE inhparent = 'outbox'::regclass";
        assert_eq!(
            fixture.db.number(partitions),
            9,
            "today, seven more and the default"
        );
        maintain(&fixture, &[]).expect_code(0);
        assert_eq!(fixture.db.number(partitions), 9);
        let finished = maintain(&fixture, &["--partitions-ahead", "10"]).expect_code(0);
        assert_eq!(
            finished.stdout.matches(" created for ").count(),
            3,
            "{finished:?}"
        );
        assert_eq!(fixture.db.number(partitions), 12);
        // The new partitions must match the partitions that `init` creates: `init` finds nothing to
        // add, and all partitions have the same properties.
        fixture.init().arg("--partitioned").finish().expect_code(0);
        assert_eq!(fixture.db.number(partitions), 12);
        let kinds = "SELECT count(DISTINCT (SELECT string_agg(conname::text, ',' ORDER BY conname)
                 FROM pg_constraint WHERE conrelid = inhrelid AND contype = 'c')
                 || (SELECT count(*) FROM pg_index WHERE indrelid = inhrelid)
                 || (SELECT count(*) FROM pg_trigger WHERE tgrelid = inhrelid))
             FROM pg_inherits WHERE inhparent = 'outbox'::regclass";
        assert_eq!(fixture.db.number(kinds), 1, "{major}");
        let aggregate = fixture.aggregate(1);
        let walpost = fixture.start();
        fixture.db.run(
            "ALTER TABLE outbox ALTER COLUMN created_at SET DEFAULT now() + interval '10 days'",
        );
        fixture.insert(&aggregate, "k");
        fixture.settle(walpost, &[], Resends::Never);
        let ahead = "SELECT count(*) FROM outbox WHERE tableoid <> 'outbox_default'::regclass";
        assert_eq!(fixture.db.number(ahead), 1, "{major}");
    }
}

#[test]
fn drops_an_old_partition_after_its_rows_have_been_delivered() {
    for major in [14, 15, 18] {
        for default in ["", DEFAULT] {
            let fixture = fixture_with_old_partition(Server::shared(major), default);
            let aggregate = fixture.aggregate(1);
            let walpost = fixture.start();
            insert_old(&fixture, &aggregate, "old");
            fixture.insert(&aggregate, "new");
            fixture.wait_until_confirmed();
            maintain_until_delivered(&fixture);
            assert!(is(&fixture, "outbox_old", true));
            maintain_until(&fixture, "the old partition to go", || {
                is_gone(&fixture, "outbox_old")
            });
            assert_eq!(fixture.db.number("SELECT count(*) FROM outbox"), 1);
            fixture.settle(walpost, &[], Resends::Never);
        }
    }
}

#[test]
fn does_not_detach_or_drop_partitions_with_undelivered_rows() {
    let fixture = fixture_with_old_partition(Server::shared(MAJOR), DEFAULT);
    let aggregate = fixture.aggregate(1);
    // Insert the row before Walpost starts, so that no maintenance pass finds the partition empty.
    insert_old(&fixture, &aggregate, "old");
    // No broker listens on this port, so nothing is delivered.
    let stuck = fixture
        .invoke("run")
        .args([
            "--kafka",
            "127.0.0.1:9",
            "--retention",
            "1s",
            "--drain-timeout",
            "1s",
        ])
        .start_streaming();
    let is_kept = || is(&fixture, "outbox_old", true);
    assert_stays("the partition", Duration::from_secs(3), is_kept);
    let finished = maintain(&fixture, &["--retention", "1s"]);
    if finished.code == Some(0) {
        finished.expect_mentions(&["outbox_old is kept until slot", &fixture.slot()]);
    }
    stuck.terminate().expect_code(0);
    let walpost = fixture.start_with(&["--retention", "1s"]);
    wait_until("the partition to be dropped", || {
        is_gone(&fixture, "outbox_old")
    });
    fixture.settle(walpost, &[], Resends::Never);
}

#[test]
fn delivers_a_late_row_in_a_detached_partition_before_dropping_it() {
    let fixture = fixture_with_late_row_in_detached_partition();
    let finished = maintain(&fixture, &["--retention", "1s"]).expect_code(0);
    finished.expect_mentions(&["outbox_old is kept until slot", &fixture.slot()]);
    assert_eq!(fixture.db.number("SELECT count(*) FROM outbox_old"), 1);
    let walpost = fixture.start();
    fixture.wait_until_confirmed();
    maintain_until(&fixture, "the old partition to go", || {
        is_gone(&fixture, "outbox_old")
    });
    fixture.settle(walpost, &[], Resends::Never);
}

#[test]
fn does_not_drop_a_partition_while_a_transaction_can_insert_into_it() {
    let fixture = Fixture::bare();
    let slow = fixture.server.session(&fixture.name);
    fixture.db.run(&format!(
        "CREATE TABLE outbox ({COLUMNS}) PARTITION BY RANGE (created_at);
         DO $$ BEGIN
             EXECUTE format('CREATE TABLE outbox_old PARTITION OF outbox FOR VALUES FROM (%L) TO (%L)',
                 now() - interval '1 hour', now() + interval '1 second');
             EXECUTE format('CREATE TABLE outbox_new PARTITION OF outbox FOR VALUES FROM (%L) TO (%L)',
                 now() + interval '1 second', now() + interval '2 days');
         END $$"
    ));
    slow.run("BEGIN; SELECT 1");
    fixture.init().finish().expect_code(0);
    let aggregate = fixture.aggregate(1);
    let started = "SELECT now() < upper FROM (SELECT substring(pg_get_expr(relpartbound, oid)
         FROM 'TO .''([^'']*)')::timestamptz AS upper FROM pg_class WHERE relname = 'outbox_old') AS old";
    assert!(slow.is_true(started), "the test was too slow");
    let walpost = fixture.start();
    let pid = slow.value("SELECT pg_backend_pid()").unwrap();
    let mut output = String::new();
    maintain_until(&fixture, "the partition to be old", || {
        output = maintain(&fixture, &["--retention", "1s"]).stdout;
        output.contains("is kept until the transaction")
    });
    assert!(
        output.contains(&format!("pg_catalog.pg_terminate_backend({pid})")),
        "{output}"
    );
    slow.run(&fixture.insert_sql(&aggregate, "slow"));
    slow.run("COMMIT");
    maintain_until(&fixture, "the partition to be dropped", || {
        is_gone(&fixture, "outbox_old")
    });
    fixture.settle(walpost, &[], Resends::Never);
    assert_eq!(fixture.db.number("SELECT count(*) FROM outbox"), 0);
}

#[test]
fn dry_run_reports_the_steps_and_changes_nothing() {
    let fixture = fixture_with_old_partition(Server::shared(MAJOR), DEFAULT);
    let before = tables(&fixture);
    let finished = maintain(&fixture, &["--retention", "1s", "--dry-run"]).expect_code(0);
    finished.expect_mentions(&[
        "would create partition",
        "that its time range has ended",
        "outbox_old",
    ]);
    assert_eq!(tables(&fixture), before);
}

#[test]
fn keeps_the_existing_comment_on_a_partition_when_adding_to_it() {
    let fixture = fixture_with_old_partition(Server::shared(MAJOR), DEFAULT);
    fixture
        .db
        .run("COMMENT ON TABLE outbox_old IS 'For the auditor''s $walpost$ \\ eyes'");
    maintain(&fixture, &["--retention", "1h"]).expect_code(0);
    let comment = fixture
        .db
        .value("SELECT obj_description('outbox_old'::regclass, 'pg_class')");
    let comment = comment.unwrap();
    let lines: Vec<_> = comment.lines().collect();
    assert_eq!(lines[0], "For the auditor's $walpost$ \\ eyes");
    assert!(lines[1].starts_with("walpost: closed at "), "{comment}");
    assert_eq!(lines.len(), 2);
}

#[test]
fn maintains_tables_whose_names_must_be_quoted() {
    let fixture = Fixture::bare();
    fixture.db.run(&format!(
        "CREATE SCHEMA \"My 'Shop\"; CREATE TABLE \"My 'Shop\".\"order\" ({COLUMNS}) PARTITION BY RANGE (created_at);
         CREATE TABLE \"My 'Shop\".\"The \"\"old\" PARTITION OF \"My 'Shop\".\"order\"
             FOR VALUES FROM ('2020-01-01') TO ('2020-01-02')"
    ));
    let table = ["--table", "\"My 'Shop\".\"order\""];
    fixture.init().args(table).finish().expect_code(0);
    let walpost = fixture
        .run()
        .args(table)
        .args(["--retention", "1s"])
        .start_streaming();
    wait_until("the partition to be dropped", || {
        is_gone(&fixture, "The \"old")
    });
    let made = "SELECT count(*) FROM pg_class WHERE relname ~ '^order_p20' AND relkind = 'r' AND relispartition";
    assert_eq!(fixture.db.number(made), 8);
    walpost.terminate().expect_code(0);
}

/// Every transaction has to inspect the table with all its partitions, so one transaction per
/// partition would be slow.
#[test]
fn creates_several_partitions_in_one_transaction() {
    avoid_utc_midnight();
    let fixture = Fixture::bare();
    fixture.init().arg("--partitioned").finish().expect_code(0);
    // Create a table whose name is the one that `maintain` will choose for one of the last twenty
    // partitions.
    fixture.db.run("CREATE TABLE taken (LIKE outbox); DO $$ BEGIN EXECUTE format('ALTER TABLE taken RENAME TO %I',
        'outbox_p' || to_char((now() AT TIME ZONE 'UTC')::date + 60, 'YYYYMMDD')); END $$");
    let finished = maintain(&fixture, &["--partitions-ahead", "67"]).expect_code(3);
    let finished = finished.expect_mentions(&["another object has this name"]);
    let made = finished.stdout.matches(" created for ").count();
    assert_eq!(made, 59, "{finished:?}");
    let transactions =
        "SELECT count(DISTINCT xmin::text) FROM pg_class WHERE relispartition AND relkind = 'r'
        AND relname ~ '^outbox_p[0-9]+$'";
    // `init` creates its partitions in one transaction. Then, two transactions create twenty
    // partitions each. The last batch of partitions fails and is divided into five transactions. On
    // a busy machine, other batches may be divided as well.
    let transactions = fixture.db.number(transactions);
    assert!((8..30).contains(&transactions), "{transactions}");
}

#[test]
fn adds_comments_to_several_partitions_in_one_transaction() {
    avoid_utc_midnight();
    let fixture = Fixture::bare();
    fixture.db.run(&format!(
        "CREATE TABLE outbox ({COLUMNS}) PARTITION BY RANGE (created_at);
         DO $$ DECLARE day timestamptz := date_trunc('day', now(), 'UTC'); BEGIN FOR n IN 1..5 LOOP
             EXECUTE format('CREATE TABLE outbox_old%s PARTITION OF outbox FOR VALUES FROM (%L) TO (%L)',
                 n, day - make_interval(days => n), day - make_interval(days => n - 1));
         END LOOP; END $$"
    ));
    fixture.init().finish().expect_code(0);
    maintain(&fixture, &["--retention", "1h"]).expect_code(0);
    let counts = fixture.db.rows(
        "SELECT count(*), count(DISTINCT d.xmin::text) FROM pg_description d JOIN pg_class c ON c.oid = d.objoid
         WHERE d.classoid = 'pg_class'::regclass AND d.objsubid = 0 AND c.relname ~ '^outbox_old'",
    );
    assert_eq!(counts, [["5", "1"].map(|count| Some(count.to_owned()))]);
}
