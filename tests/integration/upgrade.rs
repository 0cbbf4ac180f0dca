//! What Walpost has left at rest, in the database and in Kafka, and another version goes on with.

use crate::support::checker::Resends;
use crate::support::scene::Scene;

in_both_modes! {
    pipeline_of_a_version_without_slot_state_is_gone_on_with
}

/// The journal and its rows are as before there were versions and a table of slots.
fn as_of_the_first_version(scene: &Scene) {
    scene.db.run(
        "DROP TABLE walpost.slot_state; UPDATE walpost.journal SET detail = detail - 'version'",
    );
}

fn pipeline_of_a_version_without_slot_state_is_gone_on_with(exactly_once: bool) {
    let scene = Scene::new().in_mode(exactly_once);
    let aggregate = scene.aggregate(2);
    let load = scene.load(&[&aggregate]);
    let walpost = scene.start();
    load.wait_for_transactions(50);
    let death = scene.kill(walpost);
    as_of_the_first_version(&scene);
    let walpost = scene.start();
    load.wait_for_transactions(50);
    walpost.terminate().expect_code(0);
    scene
        .check()
        .finish()
        .expect_code(0)
        .expect_says(&["walpost.slot_state is not there", "walpost init"]);
    scene.init().finish().expect_code(0);
    let walpost = scene.start();
    load.wait_for_transactions(50);
    load.stop();
    scene.settle(walpost, &[death], scene.resends(1));
    assert!(
        scene
            .db
            .is_true("SELECT count(*) = 1 FROM walpost.slot_state WHERE begun")
    );
}

/// The slot was let go by a version that did not know versions.
#[test]
fn what_a_version_without_slot_state_has_let_go_is_sent_again() {
    let scene = Scene::new();
    let aggregate = scene.aggregate(1);
    let walpost = scene.start_and_confirm_one(&aggregate, "k");
    walpost.terminate().expect_code(0);
    let slot = scene.slot();
    for _ in 0..5 {
        scene.insert(&aggregate, "k");
    }
    scene.db.run(&format!(
        "INSERT INTO walpost.journal (pipeline, slot, action, from_lsn, to_lsn, detail)
         SELECT '{}', slot_name, 'let go', confirmed_flush_lsn, pg_current_wal_lsn(), jsonb_build_object(
             'reason', 'lag.max', 'table', 'public.outbox', 'catalog_xmin', catalog_xmin::text, 'restart', restart_lsn,
             'kept_bytes', 1000, 'max_bytes', 500, 'system_id', (SELECT system_identifier::text FROM pg_control_system()))
         FROM pg_replication_slots WHERE slot_name = '{slot}'",
        scene.name
    ));
    scene
        .db
        .run(&format!("SELECT pg_drop_replication_slot('{slot}')"));
    as_of_the_first_version(&scene);
    scene.init().finish().expect_code(0);
    let mut walpost = scene.run().start();
    walpost.wait_for_log("let go and not sent again yet");
    scene.replay(&["--let-go", "--yes"]).finish().expect_code(0);
    scene.insert(&aggregate, "k");
    scene.wait_for_ids(&scene.history());
    walpost.terminate().expect_code(0);
}

/// Exactly-once goes by its checkpoint.
#[test]
fn journal_that_a_newer_version_has_written_halts() {
    let scene = Scene::new();
    let aggregate = scene.aggregate(1);
    let walpost = scene.start_and_confirm_one(&aggregate, "k");
    walpost.terminate().expect_code(0);
    scene.insert(&aggregate, "k");
    let set = |version: u32| {
        scene.db.run(&format!(
            "UPDATE walpost.journal SET detail = detail || '{{\"version\": {version}}}'"
        ));
    };
    set(2);
    let before = scene.confirmed();
    scene
        .run()
        .finish()
        .expect_code(3)
        .expect_says(&["is of version 2", "a newer one has written it"]);
    assert_eq!(scene.confirmed(), before);
    set(1);
    let walpost = scene.start();
    scene.settle(walpost, &[], Resends::Never);
}
