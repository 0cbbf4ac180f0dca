//! The database is moved by dump and restore before the rows of the outbox are copied, or while
//! events are recorded as missing. The OIDs of its tables change, so a table that was renamed is no
//! longer recognized by its OID.

use super::replaced::{command, expect_replay, replace, take_former_out};
use super::{TABLE, cold, fill};
use crate::slot_state::{Copied, copy_database};
use crate::support::postgres::{MAJOR, Server};
use crate::support::scene::Scene;

/// Returns a scene with rows that the first start has to copy.
fn due() -> Scene<'static> {
    let scene = cold(TABLE);
    let aggregate = scene.aggregate(1);
    fill(&scene, &aggregate, 20);
    scene.init().finish().expect_code(0);
    scene
}

/// Starts the server that the database is moved to.
fn next_server() -> Server {
    let next = Server::with_new_cluster(MAJOR, "");
    next.session("postgres")
        .run("CREATE ROLE walpost LOGIN REPLICATION");
    next
}

fn move_database<'s>(scene: &mut Scene<'s>, next: &'s Server) {
    copy_database(scene, next, Copied::Everything);
    scene.fail_over(next, []);
}

fn create_slot(scene: &Scene<'_>) {
    scene.db.run(&format!(
        "SELECT pg_create_logical_replication_slot('{}', 'pgoutput')",
        scene.slot()
    ));
}

/// Found by a walk of `./dev soak --shapes` with seed 214938665290757.
#[test]
fn older_rows_of_a_table_that_was_replaced_before_the_database_was_moved_are_named() {
    let next = next_server();
    let mut scene = due();
    replace(&scene);
    move_database(&mut scene, &next);
    let init = scene.init().finish().expect_code(0);
    init.expect_mentions(&[
        "slot created on another cluster",
        "if they are in another table than the one that is copied",
        &command(&scene),
    ]);
    take_former_out(&scene);
    expect_replay(&scene);
}

/// Nothing in the restored database distinguishes the former table from any other.
#[test]
fn copy_that_was_due_before_the_database_was_moved_is_made_of_the_table_of_that_name() {
    let next = next_server();
    let mut scene = due();
    replace(&scene);
    take_former_out(&scene);
    let aggregate = scene.aggregate(1);
    scene.insert(&aggregate, "new");
    move_database(&mut scene, &next);
    let init = scene.init().finish().expect_code(0);
    init.expect_mentions(&["The first start copies the table that is now public.outbox"]);
    let walpost = scene.start();
    scene.wait_for_records(1);
    walpost.terminate().expect_code(0);
    scene.check().finish().expect_code(0);
}

/// `init` finds the slot, and records the gap before it.
#[test]
fn older_rows_of_a_replaced_table_are_named_if_the_slot_was_created_by_hand() {
    let next = next_server();
    let mut scene = due();
    replace(&scene);
    move_database(&mut scene, &next);
    create_slot(&scene);
    let check = scene.check().finish().expect_code(3);
    check.expect_mentions(&["events committed before", "may be missing"]);
    let init = scene.init().finish().expect_code(0);
    init.expect_mentions(&[&command(&scene)]);
    take_former_out(&scene);
    expect_replay(&scene);
}

#[test]
fn first_start_with_a_slot_that_was_created_by_hand_says_which_table_it_copies() {
    let next = next_server();
    let mut scene = due();
    replace(&scene);
    take_former_out(&scene);
    move_database(&mut scene, &next);
    create_slot(&scene);
    let mut walpost = scene.run().start();
    walpost.wait_for_log("The first start copies the table that is now public.outbox");
    walpost.wait_for_log("streaming");
    walpost.terminate().expect_code(0);
}

/// While the former table is in the publication, it has not left the outbox, although its rows are
/// in no stream between the two slots.
#[test]
fn replaced_table_in_the_publication_is_among_those_that_a_new_slot_may_lack_events_of() {
    let scene = Scene::with_table(TABLE);
    let aggregate = scene.aggregate(1);
    let walpost = scene.start_and_confirm_one(&aggregate, "before");
    walpost.terminate().expect_code(0);
    scene.insert(&aggregate, "between");
    replace(&scene);
    scene.drop_slot();
    let init = scene.init().finish().expect_code(0);
    init.expect_mentions(&["slot re-created", &command(&scene)]);
    take_former_out(&scene);
    expect_replay(&scene);
}

/// A replay of the events that are recorded as missing reads the table that has the name by then.
#[test]
fn table_that_is_replaced_before_its_missing_events_are_sent_again_is_named() {
    let scene = Scene::with_table(TABLE);
    let aggregate = scene.aggregate(1);
    let walpost = scene.start_and_confirm_one(&aggregate, "before");
    walpost.terminate().expect_code(0);
    scene.insert(&aggregate, "between");
    scene.drop_slot();
    let init = scene.init().finish().expect_code(0);
    init.expect_mentions(&["slot re-created"]);
    replace(&scene);
    take_former_out(&scene);
    let mut walpost = scene.run().start();
    walpost.wait_for_log(&command(&scene));
    walpost.wait_for_log("streaming");
    walpost.terminate().expect_code(0);
    let replay = scene.replay(&["--dropped-slots", "--yes"]);
    replay.finish();
    expect_replay(&scene);
    let records = scene.records();
    assert!(records.iter().any(|record| record.key() == "between"));
}
