//! Retention for tables without partitions: Walpost deletes old rows.

use std::collections::HashSet;

use super::maintain;
use crate::support::checker::Resends;
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, Server};
use crate::support::wait::wait_until;
use crate::support::walpost::Finished;

/// Runs `maintain` repeatedly on a table without partitions until `until` returns true.
fn delete_until(fixture: &Fixture, what: &str, mut until: impl FnMut(&Finished) -> bool) {
    wait_until(what, || {
        // Generate some WAL, because Walpost otherwise takes a long time to confirm the WAL that
        // `maintain` generates.
        fixture.write_other_wal(1);
        let arguments = ["--retention", "1s", "--delete-rows"];
        until(&maintain(fixture, &arguments).expect_code(0))
    });
}

#[test]
fn deletes_delivered_rows_of_a_table_without_partitions() {
    for major in [14, MAJOR, 18] {
        let fixture = Fixture::on_servers(Server::shared(major), Broker::shared());
        let aggregate = fixture.aggregate(1);
        let rows = || fixture.db.number("SELECT count(*) FROM outbox");
        // Insert enough rows for more than two batches.
        fixture
            .db
            .run(&fixture.events().insert_many(&aggregate, 12_000, "'{}'"));
        delete_until(&fixture, "a slot that is behind", |finished| {
            finished.stdout.contains("is kept until slot")
        });
        assert_eq!(rows(), 12_000, "nothing has been delivered yet");
        let walpost = fixture.start();
        fixture.wait_until_confirmed();
        delete_until(&fixture, "the rows to be delivered", |finished| {
            finished
                .stdout
                .contains("has been delivered and is kept until")
        });
        walpost.terminate().expect_code(0);
        // Insert a new row, and a row with an old timestamp, like one whose transaction committed
        // late.
        let late = fixture.insert_sql(&aggregate, "late");
        let late = late.replace("payload)", "payload, created_at)");
        let late = late.replace("\"}')", "\"}', now() - interval '1 day')");
        assert!(late.contains("interval"), "{late}");
        fixture.db.run(&late);
        fixture.insert(&aggregate, "new");
        delete_until(&fixture, "the wait for the late row", |finished| {
            finished.stdout.contains("is kept until slot")
        });
        assert!(rows() >= 2, "the late row is not delivered");
        let walpost = fixture.start();
        fixture.wait_until_confirmed();
        let late = "SELECT count(*) FROM outbox WHERE aggregateid = 'late'";
        delete_until(&fixture, "all old rows to go", |_| {
            fixture.db.number(late) == 0
        });
        fixture.write_other_wal(1);
        fixture.settle(walpost, &[], Resends::Never);
        let kept = "SELECT count(*) FROM outbox WHERE aggregateid = 'new'";
        assert_eq!((rows(), fixture.db.number(kept)), (1, 1), "{major}");
    }
}

/// Commits an event that is older than the retention period.
fn insert_old(fixture: &Fixture, key: &str) {
    let old = fixture.insert_sql(&fixture.aggregate(1), key);
    let old = old.replace("payload)", "payload, created_at)");
    let old = old.replace("\"}')", "\"}', now() - interval '1 day')");
    assert!(old.contains("interval"), "{old}");
    fixture.db.run(&old);
}

/// Moves a slot to the end of WAL, as if Walpost had delivered everything before it.
fn advance(fixture: &Fixture, slot: &str) {
    let end = fixture.db.value("SELECT pg_current_wal_lsn()").unwrap();
    for statement in [
        format!("UPDATE walpost.slot_state SET confirmed_lsn = '{end}' WHERE slot = '{slot}'"),
        format!("SELECT pg_catalog.pg_replication_slot_advance('{slot}', '{end}')"),
    ] {
        fixture.db.run(&statement);
    }
}

/// The slot moves past rows that were not published, so these rows exist only in the table.
#[test]
fn keeps_rows_of_an_unpublished_table_after_the_slot_has_passed_them() {
    let fixture = Fixture::new();
    let slot = fixture.slot();
    fixture
        .db
        .run(&format!("ALTER PUBLICATION {slot} DROP TABLE outbox"));
    insert_old(&fixture, "old");
    advance(&fixture, &slot);
    let comment = "SELECT obj_description('outbox'::regclass, 'pg_class')";
    let before = fixture.db.value(comment);
    let arguments = ["--retention", "1s", "--delete-rows"];
    maintain(&fixture, &arguments)
        .expect_code(3)
        .expect_mentions(&["publication"]);
    assert_eq!(fixture.db.number("SELECT count(*) FROM outbox"), 1);
    // The maintenance pass must not record in the table's comment that the rows are delivered,
    // because a later pass would then delete them.
    assert_eq!(fixture.db.value(comment), before);
}

/// A maintenance pass determines which rows are old, waits until the slot has passed their commits,
/// and then deletes them. Meanwhile, a new row may be stored at the ctid of an old row.
#[test]
fn keeps_a_new_row_that_reuses_the_ctid_of_an_old_one() {
    const ARGUMENTS: [&str; 3] = ["--retention", "1s", "--delete-rows"];
    let fixture = Fixture::new();
    let slot = fixture.slot();
    let ctid = |key: &str| {
        let query = format!("SELECT ctid FROM outbox WHERE aggregateid = '{key}'");
        fixture.db.value(&query)
    };
    insert_old(&fixture, "old");
    let old = ctid("old");
    wait_until("the rows to be old", || {
        advance(&fixture, &slot);
        let finished = maintain(
            &fixture,
            &["--dry-run", ARGUMENTS[0], ARGUMENTS[1], ARGUMENTS[2]],
        );
        let finished = finished.expect_code(0);
        if finished.stdout.contains("would delete rows") {
            return true;
        }
        maintain(&fixture, &ARGUMENTS).expect_code(0);
        false
    });
    fixture.write_other_wal(1);
    let pass = fixture.invoke("maintain").args(ARGUMENTS).start();
    // A maintenance pass sleeps repeatedly only while it waits for the slot. Otherwise, it sleeps
    // at most once. Several sleeps therefore show that the pass is waiting for the slot.
    let mut sleeps = HashSet::new();
    wait_until("the pass to wait for the slot", || {
        sleeps.extend(fixture.db.value(
            "SELECT state_change FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() \
             AND backend_type = 'client backend' AND state = 'idle' AND clock_timestamp() - state_change > '150 ms'",
        ));
        sleeps.len() > 2
    });
    fixture.db.run("DELETE FROM outbox");
    // Retry, because VACUUM can't remove the old row while a query of the maintenance pass can
    // still see the row.
    wait_until("the old row to be removed", || {
        fixture.db.run("VACUUM outbox");
        fixture.db.number("SELECT pg_relation_size('outbox')") == 0
    });
    advance(&fixture, &slot);
    fixture.insert(&fixture.aggregate(1), "new");
    assert_eq!(ctid("new"), old);
    pass.finish().expect_code(0);
    assert_eq!(ctid("new"), old);
}

#[test]
fn does_not_delete_rows_without_a_timestamp() {
    let fixture = Fixture::with_table(
        "CREATE TABLE outbox (id uuid, aggregatetype text, aggregateid text, type text, payload jsonb, created_at text)",
    );
    let arguments = ["--retention", "1s", "--delete-rows"];
    let finished = maintain(&fixture, &arguments).expect_code(3);
    finished.expect_mentions(&["public.outbox has no column created_at", "manually"]);
}
