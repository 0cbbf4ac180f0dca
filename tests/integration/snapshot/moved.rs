//! The database is moved by dump and restore, either before the outbox's rows are copied or while
//! events are recorded as missing. The tables' OIDs change, so Walpost can no longer recognize a
//! renamed table by its OID.

use super::replaced::{command, expect_replay, replace, unpublish_former};
use super::{TABLE, fill, fixture_before_init};
use crate::slot_state::{CopyScope, copy_database};
use crate::support::fixture::Fixture;
use crate::support::postgres::{MAJOR, Server};

/// Creates a fixture with rows that the first run has to copy.
fn fixture_with_due_snapshot() -> Fixture<'static> {
    let fixture = fixture_before_init(TABLE);
    let aggregate = fixture.aggregate(1);
    fill(&fixture, &aggregate, 20);
    fixture.init().finish().expect_code(0);
    fixture
}

/// Starts the server to which the database will be moved.
fn next_server() -> Server {
    let next = Server::with_new_cluster(MAJOR, "");
    next.session("postgres")
        .run("CREATE ROLE walpost LOGIN REPLICATION");
    next
}

fn move_database<'s>(fixture: &mut Fixture<'s>, next: &'s Server) {
    copy_database(fixture, next, CopyScope::Everything);
    fixture.fail_over(next, []);
}

fn create_slot(fixture: &Fixture<'_>) {
    fixture.db.run(&format!(
        "SELECT pg_create_logical_replication_slot('{}', 'pgoutput')",
        fixture.slot()
    ));
}

/// Regression test for a problem found by a random walk of `./dev soak --shapes` with seed
/// 214938665290757.
#[test]
fn reports_uncopied_rows_of_a_table_replaced_before_a_move_to_another_server() {
    let next = next_server();
    let mut fixture = fixture_with_due_snapshot();
    replace(&fixture);
    move_database(&mut fixture, &next);
    let init = fixture.init().finish().expect_code(0);
    init.expect_mentions(&[
        "slot created on another cluster",
        "if they are in a table other than the one that is copied",
        &command(&fixture),
    ]);
    unpublish_former(&fixture);
    expect_replay(&fixture);
}

/// In the restored database, nothing distinguishes the former outbox from any other table.
#[test]
fn copies_the_table_with_the_configured_name_after_a_move_to_another_server() {
    let next = next_server();
    let mut fixture = fixture_with_due_snapshot();
    replace(&fixture);
    unpublish_former(&fixture);
    let aggregate = fixture.aggregate(1);
    fixture.insert(&aggregate, "new");
    move_database(&mut fixture, &next);
    let init = fixture.init().finish().expect_code(0);
    init.expect_mentions(&["The first run copies the table that is now named public.outbox"]);
    let walpost = fixture.start();
    fixture.wait_for_records(1);
    walpost.terminate().expect_code(0);
    fixture.check().finish().expect_code(0);
}

/// `init` finds an existing slot, and must record the gap before that slot's position.
#[test]
fn reports_uncopied_rows_of_a_replaced_table_if_the_slot_is_created_manually() {
    let next = next_server();
    let mut fixture = fixture_with_due_snapshot();
    replace(&fixture);
    move_database(&mut fixture, &next);
    create_slot(&fixture);
    let check = fixture.check().finish().expect_code(3);
    check.expect_mentions(&["events committed before", "may be missing"]);
    let init = fixture.init().finish().expect_code(0);
    init.expect_mentions(&[&command(&fixture)]);
    unpublish_former(&fixture);
    expect_replay(&fixture);
}

#[test]
fn first_run_with_a_manually_created_slot_logs_which_table_it_copies() {
    let next = next_server();
    let mut fixture = fixture_with_due_snapshot();
    replace(&fixture);
    unpublish_former(&fixture);
    move_database(&mut fixture, &next);
    create_slot(&fixture);
    let mut walpost = fixture.run().start();
    walpost.wait_for_log("The first run copies the table that is now named public.outbox");
    walpost.wait_for_log("streaming");
    walpost.terminate().expect_code(0);
}

/// The former table is still published, so it counts as an outbox. Its last row was committed after
/// Walpost stopped, so neither the dropped slot nor the new one sends that row.
#[test]
fn reports_a_replaced_table_whose_events_the_new_slot_may_lack() {
    let fixture = Fixture::with_table(TABLE);
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_and_confirm_one(&aggregate, "before");
    walpost.terminate().expect_code(0);
    fixture.insert(&aggregate, "between");
    replace(&fixture);
    fixture.drop_slot();
    let init = fixture.init().finish().expect_code(0);
    init.expect_mentions(&["slot re-created", &command(&fixture)]);
    unpublish_former(&fixture);
    expect_replay(&fixture);
}

/// A replay of missing events reads the table that has the recorded name when the replay starts. By
/// then, another table may have that name.
#[test]
fn reports_a_table_replaced_before_its_missing_events_are_replayed() {
    let fixture = Fixture::with_table(TABLE);
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_and_confirm_one(&aggregate, "before");
    walpost.terminate().expect_code(0);
    fixture.insert(&aggregate, "between");
    fixture.drop_slot();
    let init = fixture.init().finish().expect_code(0);
    init.expect_mentions(&["slot re-created"]);
    replace(&fixture);
    unpublish_former(&fixture);
    let mut walpost = fixture.run().start();
    walpost.wait_for_log(&command(&fixture));
    walpost.wait_for_log("streaming");
    walpost.terminate().expect_code(0);
    let replay = fixture.replay(&["--dropped-slots", "--yes"]);
    replay.finish();
    expect_replay(&fixture);
    let records = fixture.records();
    assert!(records.iter().any(|record| record.key() == "between"));
}
