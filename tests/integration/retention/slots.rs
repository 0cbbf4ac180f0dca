//! Re-created slots and a wrong clock never cause undelivered rows to be removed.

use super::{
    DEFAULT, fixture_with_old_partition, insert_old, is, is_gone, maintain, maintain_until,
    maintain_until_delivered, tables,
};
use crate::slot_state::re_create_slot;
use crate::support::checker::Resends;
use crate::support::postgres::{MAJOR, Server};
use crate::support::wait::wait_until;

#[test]
fn retention_period_restarts_when_the_slot_is_recreated() {
    let fixture = fixture_with_old_partition(Server::shared(MAJOR), DEFAULT);
    let aggregate = fixture.aggregate(1);
    insert_old(&fixture, &aggregate, "lost with the slot");
    maintain(&fixture, &["--retention", "1h"]).expect_code(0);
    fixture.db.run(&format!(
        "SELECT pg_catalog.pg_drop_replication_slot('{}')",
        fixture.slot()
    ));
    // Without a slot, no rows are removed, but partitions are still created.
    let before = tables(&fixture).len();
    let finished =
        maintain(&fixture, &["--retention", "1s", "--partitions-ahead", "9"]).expect_code(3);
    finished.expect_mentions(&[
        "nothing is removed",
        &fixture.slot(),
        "walpost init",
        "created for",
    ]);
    assert!(is(&fixture, "outbox_old", true));
    assert!(tables(&fixture).len() >= before);
    fixture.init().finish().expect_code(0);
    let mut walpost = fixture.run().start();
    walpost.wait_for_log("events of a dropped slot have not been sent again yet");
    let finished = maintain(&fixture, &["--retention", "1h"]).expect_code(3);
    finished.expect_mentions(&["a slot was dropped", "walpost replay --dropped-slots"]);
    fixture
        .replay(&["--dropped-slots", "--yes"])
        .finish()
        .expect_code(0);
    fixture.insert(&aggregate, "k");
    fixture.wait_for_ids(&fixture.history());
    maintain_until_delivered(&fixture);
    assert!(is(&fixture, "outbox_old", true));
    walpost.terminate().expect_code(0);
}

/// Another program re-creates the slot, so its new position does not show which events were
/// delivered.
#[test]
fn retention_keeps_undelivered_rows_if_another_program_recreates_the_slot() {
    let fixture = fixture_with_old_partition(Server::shared(MAJOR), DEFAULT);
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_and_confirm_one(&aggregate, "k");
    walpost.terminate().expect_code(0);
    insert_old(&fixture, &aggregate, "lost with the slot");
    let slot = fixture.slot();
    fixture.db.run(&format!(
        "SELECT pg_catalog.pg_drop_replication_slot('{slot}')"
    ));
    fixture.db.run(&format!(
        "SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')"
    ));
    let moved = "something else moved it, or dropped and re-created it";
    for _ in 0..3 {
        let finished = maintain(&fixture, &["--retention", "1s"]).expect_code(3);
        let finished = finished.expect_mentions(&[
            "rows that might not have been delivered are kept",
            moved,
            "walpost skip --to",
        ]);
        // The maintenance pass must not record in the partition's comment that its rows have been
        // delivered, because a later pass would then remove the partition.
        assert!(!finished.stdout.contains("is delivered"), "{finished:?}");
        fixture.insert(&aggregate, "k");
        // Move the slot past any position that a maintenance pass may have recorded.
        re_create_slot(&fixture, &aggregate);
    }
    assert!(is(&fixture, "outbox_old", true));
    fixture
        .check()
        .finish()
        .expect_code(3)
        .expect_mentions(&[moved]);
}

/// The row in walpost.slot_state comes from a restored dump, and the slot was created by hand
/// afterwards.
#[test]
fn retention_removes_nothing_if_slot_state_is_from_a_different_timeline_or_cluster() {
    for history in ["system_id = '1'", "timeline = timeline + 1"] {
        let fixture = fixture_with_old_partition(Server::shared(MAJOR), DEFAULT);
        let aggregate = fixture.aggregate(1);
        let walpost = fixture.start_and_confirm_one(&aggregate, "k");
        walpost.terminate().expect_code(0);
        insert_old(&fixture, &aggregate, "lost with the slot");
        fixture
            .db
            .run(&format!("UPDATE walpost.slot_state SET {history}"));
        for _ in 0..3 {
            re_create_slot(&fixture, &aggregate);
            let finished = maintain(&fixture, &["--retention", "1s"]).expect_code(3);
            finished.expect_mentions(&[
                "might not have delivered are kept",
                "may be missing",
                "walpost init",
            ]);
        }
        assert!(is(&fixture, "outbox_old", true), "{history}");
    }
}

#[test]
fn waits_for_other_slots_if_another_publication_contains_the_table() {
    let fixture = fixture_with_old_partition(Server::shared(MAJOR), DEFAULT);
    let aggregate = fixture.aggregate(1);
    let other = format!("other_{}", fixture.name);
    fixture.db.run(&format!(
        "SELECT pg_create_logical_replication_slot('{other}', 'pgoutput')"
    ));
    let walpost = fixture.start_and_confirm_one(&aggregate, "k");
    fixture.db.run("CREATE PUBLICATION others FOR ALL TABLES");
    let finished = maintain(&fixture, &["--retention", "1s"]).expect_code(0);
    finished.expect_mentions(&["outbox_old is kept until slot", &other]);
    fixture.db.run(&format!(
        "SELECT pg_catalog.pg_drop_replication_slot('{other}')"
    ));
    maintain_until(&fixture, "the partition to be dropped", || {
        is_gone(&fixture, "outbox_old")
    });
    walpost.terminate().expect_code(0);
}

/// Only the pipeline's own slot determines which events are delivered, whatever the position of any
/// other slot.
#[test]
fn keeps_undelivered_rows_if_the_slot_is_dropped_during_a_maintenance_pass() {
    let fixture = fixture_with_old_partition(Server::shared(MAJOR), DEFAULT);
    let aggregate = fixture.aggregate(1);
    let other = format!("other_{}", fixture.name);
    fixture.db.run(&format!(
        "SELECT pg_create_logical_replication_slot('{other}', 'pgoutput')"
    ));
    fixture.db.run("CREATE PUBLICATION others FOR ALL TABLES");
    insert_old(&fixture, &aggregate, "not delivered");
    let pass = fixture
        .invoke("maintain")
        .args(["--retention", "1s"])
        .start();
    let comment = "SELECT obj_description('outbox_old'::regclass, 'pg_class')";
    wait_until("a comment on the partition", || {
        fixture.db.value(comment).is_some()
    });
    fixture.drop_slot();
    fixture.db.run(&format!(
        "SELECT pg_catalog.pg_replication_slot_advance('{other}', pg_current_wal_lsn())"
    ));
    let finished = pass.finish();
    assert!(!finished.stdout.contains("is delivered"), "{finished:?}");
    maintain(&fixture, &["--retention", "1s"]).expect_code(3);
    assert!(is(&fixture, "outbox_old", true));
    fixture.db.run(&format!(
        "SELECT pg_catalog.pg_drop_replication_slot('{other}')"
    ));
}

#[test]
fn keeps_undelivered_rows_after_the_clock_has_been_set_ahead() {
    let fixture = fixture_with_old_partition(Server::shared(MAJOR), DEFAULT);
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_and_confirm_one(&aggregate, "first");
    maintain_until_delivered(&fixture);
    // Change the delivery time in the partition's comment, as if Walpost had written it while the
    // clock was ten years ahead.
    let shift = |by: i32| {
        fixture.db.run(&format!(
            "DO $$ DECLARE year int := extract(year FROM now()); BEGIN EXECUTE format('COMMENT ON TABLE outbox_old IS %L',
                 replace(obj_description('outbox_old'::regclass, 'pg_class'), 'by ' || year, 'by ' || year + {by})); END $$"
        ));
    };
    shift(10);
    let finished = maintain(&fixture, &["--retention", "1h"]).expect_code(0);
    finished.expect_mentions(&["outbox_old has been delivered and is kept until"]);
    let year = fixture.db.number("SELECT extract(year FROM now())");
    let comment = "SELECT obj_description('outbox_old'::regclass, 'pg_class')";
    let comment = fixture.db.value(comment).unwrap();
    assert!(comment.contains(&format!("by {year}")), "{comment}");
    // Now make the delivery time ten years older, as if the clock had jumped ahead. Undelivered
    // rows must still be kept.
    walpost.terminate().expect_code(0);
    insert_old(&fixture, &aggregate, "late");
    shift(-10);
    maintain(&fixture, &["--retention", "1h"]).expect_code(0);
    assert!(is(&fixture, "outbox_old", false));
    assert_eq!(fixture.db.number("SELECT count(*) FROM outbox_old"), 1);
    let walpost = fixture.start();
    fixture.settle(walpost, &[], Resends::Never);
}
