//! Re-created slots and a wrong clock never cause undelivered rows to be removed.

use super::{
    DEFAULT, aged, insert_old, is, is_gone, maintain, maintain_until, maintain_until_delivered,
    tables,
};
use crate::slot_state::make_anew;
use crate::support::checker::Resends;
use crate::support::postgres::{MAJOR, Server};
use crate::support::wait::wait_until;

#[test]
fn re_created_slot_restarts_the_retention() {
    let scene = aged(Server::shared(MAJOR), DEFAULT);
    let aggregate = scene.aggregate(1);
    insert_old(&scene, &aggregate, "lost with the slot");
    maintain(&scene, &["--retention", "1h"]).expect_code(0);
    scene.db.run(&format!(
        "SELECT pg_catalog.pg_drop_replication_slot('{}')",
        scene.slot()
    ));
    // Without a slot nothing is removed, but partitions are still created.
    let before = tables(&scene).len();
    let finished =
        maintain(&scene, &["--retention", "1s", "--partitions-ahead", "9"]).expect_code(3);
    finished.expect_mentions(&[
        "nothing is removed",
        &scene.slot(),
        "walpost init",
        "made for",
    ]);
    assert!(is(&scene, "outbox_old", true));
    assert!(tables(&scene).len() >= before);
    scene.init().finish().expect_code(0);
    let mut walpost = scene.run().start();
    walpost.wait_for_log("events of a dropped slot were not sent again yet");
    let finished = maintain(&scene, &["--retention", "1h"]).expect_code(3);
    finished.expect_mentions(&["a slot was dropped", "walpost replay --dropped-slots"]);
    scene
        .replay(&["--dropped-slots", "--yes"])
        .finish()
        .expect_code(0);
    scene.insert(&aggregate, "k");
    scene.wait_for_ids(&scene.history());
    maintain_until_delivered(&scene);
    assert!(is(&scene, "outbox_old", true));
    walpost.terminate().expect_code(0);
}

/// Something other than Walpost re-creates the slot, so the position of the new slot does not show
/// what was delivered.
#[test]
fn retention_keeps_rows_lost_with_a_slot_re_created_elsewhere() {
    let scene = aged(Server::shared(MAJOR), DEFAULT);
    let aggregate = scene.aggregate(1);
    let walpost = scene.start_and_confirm_one(&aggregate, "k");
    walpost.terminate().expect_code(0);
    insert_old(&scene, &aggregate, "lost with the slot");
    let slot = scene.slot();
    scene.db.run(&format!(
        "SELECT pg_catalog.pg_drop_replication_slot('{slot}')"
    ));
    scene.db.run(&format!(
        "SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')"
    ));
    let moved = "moved or dropped and re-created by someone else";
    for _ in 0..3 {
        let finished = maintain(&scene, &["--retention", "1s"]).expect_code(3);
        let finished = finished.expect_mentions(&[
            "what may not be delivered is kept",
            moved,
            "walpost skip --to",
        ]);
        // The partition is not even marked, since a later pass would rely on the mark.
        assert!(!finished.stdout.contains("is delivered"), "{finished:?}");
        scene.insert(&aggregate, "k");
        // The slot moves again, past everything that a pass may have marked.
        make_anew(&scene, &aggregate);
    }
    assert!(is(&scene, "outbox_old", true));
    scene
        .check()
        .finish()
        .expect_code(3)
        .expect_mentions(&[moved]);
}

/// The row of walpost.slot_state is from before a dump was restored, and the slot was created by
/// hand since.
#[test]
fn slot_whose_state_is_of_another_history_removes_nothing() {
    for history in ["system_id = '1'", "timeline = timeline + 1"] {
        let scene = aged(Server::shared(MAJOR), DEFAULT);
        let aggregate = scene.aggregate(1);
        let walpost = scene.start_and_confirm_one(&aggregate, "k");
        walpost.terminate().expect_code(0);
        insert_old(&scene, &aggregate, "lost with the slot");
        scene
            .db
            .run(&format!("UPDATE walpost.slot_state SET {history}"));
        for _ in 0..3 {
            make_anew(&scene, &aggregate);
            let finished = maintain(&scene, &["--retention", "1s"]).expect_code(3);
            finished.expect_mentions(&["nothing is removed", "may be missing", "walpost init"]);
        }
        assert!(is(&scene, "outbox_old", true), "{history}");
    }
}

#[test]
fn slot_of_another_publication_with_the_table_is_waited_for() {
    let scene = aged(Server::shared(MAJOR), DEFAULT);
    let aggregate = scene.aggregate(1);
    let other = format!("other_{}", scene.name);
    scene.db.run(&format!(
        "SELECT pg_create_logical_replication_slot('{other}', 'pgoutput')"
    ));
    let walpost = scene.start_and_confirm_one(&aggregate, "k");
    scene.db.run("CREATE PUBLICATION others FOR ALL TABLES");
    let finished = maintain(&scene, &["--retention", "1s"]).expect_code(0);
    finished.expect_mentions(&["outbox_old waits until slot", &other]);
    scene.db.run(&format!(
        "SELECT pg_catalog.pg_drop_replication_slot('{other}')"
    ));
    maintain_until(&scene, "the partition to go", || {
        is_gone(&scene, "outbox_old")
    });
    walpost.terminate().expect_code(0);
}

/// Only the pipeline's own slot determines what is delivered, however far another one is.
#[test]
fn slot_that_is_dropped_during_a_pass_has_its_rows_kept() {
    let scene = aged(Server::shared(MAJOR), DEFAULT);
    let aggregate = scene.aggregate(1);
    let other = format!("other_{}", scene.name);
    scene.db.run(&format!(
        "SELECT pg_create_logical_replication_slot('{other}', 'pgoutput')"
    ));
    scene.db.run("CREATE PUBLICATION others FOR ALL TABLES");
    insert_old(&scene, &aggregate, "not delivered");
    let pass = scene.invoke("maintain").args(["--retention", "1s"]).start();
    let comment = "SELECT obj_description('outbox_old'::regclass, 'pg_class')";
    wait_until("the partition to be marked", || {
        scene.db.value(comment).is_some()
    });
    scene.drop_slot();
    scene.db.run(&format!(
        "SELECT pg_catalog.pg_replication_slot_advance('{other}', pg_current_wal_lsn())"
    ));
    let finished = pass.finish();
    assert!(!finished.stdout.contains("is delivered"), "{finished:?}");
    maintain(&scene, &["--retention", "1s"]).expect_code(3);
    assert!(is(&scene, "outbox_old", true));
    scene.db.run(&format!(
        "SELECT pg_catalog.pg_drop_replication_slot('{other}')"
    ));
}

#[test]
fn clock_that_was_ahead_removes_nothing_that_is_not_delivered() {
    let scene = aged(Server::shared(MAJOR), DEFAULT);
    let aggregate = scene.aggregate(1);
    let walpost = scene.start_and_confirm_one(&aggregate, "first");
    maintain_until_delivered(&scene);
    // The mark was written when the clock was ten years ahead.
    let shift = |by: i32| {
        scene.db.run(&format!(
            "DO $$ DECLARE year int := extract(year FROM now()); BEGIN EXECUTE format('COMMENT ON TABLE outbox_old IS %L',
                 replace(obj_description('outbox_old'::regclass, 'pg_class'), 'by ' || year, 'by ' || year + {by})); END $$"
        ));
    };
    shift(10);
    let finished = maintain(&scene, &["--retention", "1h"]).expect_code(0);
    finished.expect_mentions(&["outbox_old is delivered and kept until"]);
    let year = scene.db.number("SELECT extract(year FROM now())");
    let comment = "SELECT obj_description('outbox_old'::regclass, 'pg_class')";
    let comment = scene.db.value(comment).unwrap();
    assert!(comment.contains(&format!("by {year}")), "{comment}");
    // The clock is moved ahead by years once more: unconfirmed rows are still kept.
    walpost.terminate().expect_code(0);
    insert_old(&scene, &aggregate, "late");
    shift(-10);
    maintain(&scene, &["--retention", "1h"]).expect_code(0);
    assert!(is(&scene, "outbox_old", false));
    assert_eq!(scene.db.number("SELECT count(*) FROM outbox_old"), 1);
    let walpost = scene.start();
    scene.settle(walpost, &[], Resends::Never);
}
