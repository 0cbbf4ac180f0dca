//! An outbox table is replaced by a new table before all rows of the former table are copied.

use std::collections::HashSet;

use super::{TABLE, fill, fixture_before_init, fixture_with_older_rows, start_and_copy_some};
use crate::support::fixture::Fixture;

pub(super) fn command(fixture: &Fixture<'_>) -> String {
    format!(
        "walpost replay --dropped-slots --table public.former --pipeline {}",
        fixture.name
    )
}

/// Replaces the table as a migration would, leaving the former table in the publication.
pub(super) fn replace(fixture: &Fixture<'_>) {
    fixture.db.run(&format!(
        "BEGIN; ALTER TABLE outbox RENAME TO former; CREATE TABLE outbox (LIKE former INCLUDING ALL);
         ALTER PUBLICATION {} ADD TABLE outbox; COMMIT",
        fixture.slot()
    ));
}

pub(super) fn unpublish_former(fixture: &Fixture<'_>) {
    fixture.db.run(&format!(
        "ALTER PUBLICATION {} DROP TABLE ONLY former",
        fixture.slot()
    ));
}

/// Asserts that `check` suggests replaying the former table until the replay has sent all of its
/// rows.
pub(super) fn expect_replay(fixture: &Fixture<'_>) {
    let command = command(fixture);
    let mut walpost = fixture.start();
    walpost.wait_for_log("streaming");
    walpost.terminate().expect_code(0);
    let check = fixture.check().finish().expect_code(3);
    check.expect_mentions(&["events of table public.former committed", &command]);
    let replay = fixture.replay(&["--dropped-slots", "--table", "public.former", "--yes"]);
    replay.finish().expect_code(0);
    let records = fixture.records();
    let sent: HashSet<_> = records.iter().map(|record| record.header("id")).collect();
    let rows = fixture.db.rows("SELECT id FROM former");
    let id = |row: Vec<Option<String>>| row.into_iter().next().flatten();
    let missing = rows.into_iter().filter_map(id);
    let missing: Vec<_> = missing.filter(|id| !sent.contains(&**id)).collect();
    assert!(missing.is_empty(), "{missing:?}");
    let check = fixture.check().finish();
    assert!(!check.stdout.contains(&command), "{}", check.stdout);
}

/// Regression test for a problem found by a random walk of `./dev soak --shapes` with seed
/// 63464281601446.
#[test]
fn reports_uncopied_rows_of_a_table_replaced_before_the_first_run() {
    let fixture = fixture_before_init(TABLE);
    let aggregate = fixture.aggregate(1);
    fill(&fixture, &aggregate, 20);
    fixture.init().finish().expect_code(0);
    replace(&fixture);
    fixture.insert(&aggregate, "new");
    let check = fixture.check().finish().expect_code(3);
    check.expect_mentions(&["table public.outbox has replaced public.former"]);
    let halted = fixture.run().finish().expect_code(3);
    halted.expect_mentions(&[
        "public.former, whose older rows had not all been copied",
        &command(&fixture),
    ]);
    unpublish_former(&fixture);
    expect_replay(&fixture);
}

#[test]
fn reports_uncopied_rows_of_a_table_replaced_during_its_snapshot() {
    let (fixture, _) = fixture_with_older_rows(TABLE, 20_000, false);
    let walpost = start_and_copy_some(&fixture);
    fixture.kill(walpost);
    replace(&fixture);
    unpublish_former(&fixture);
    let mut walpost = fixture.run().start();
    walpost.wait_for_log(&command(&fixture));
    walpost.wait_for_log("streaming");
    walpost.terminate().expect_code(0);
    expect_replay(&fixture);
}

/// The first run with the new slot copies only the current table.
#[test]
fn reports_uncopied_rows_of_a_table_replaced_before_the_slot_is_dropped() {
    let fixture = fixture_before_init(TABLE);
    let aggregate = fixture.aggregate(1);
    fill(&fixture, &aggregate, 20);
    fixture.init().finish().expect_code(0);
    replace(&fixture);
    unpublish_former(&fixture);
    fixture.drop_slot();
    let init = fixture.init().finish().expect_code(0);
    init.expect_mentions(&[&command(&fixture)]);
    expect_replay(&fixture);
}

#[test]
fn reports_uncopied_rows_of_a_table_dropped_before_its_snapshot() {
    let fixture = fixture_before_init(TABLE);
    let aggregate = fixture.aggregate(1);
    fill(&fixture, &aggregate, 20);
    fixture.init().finish().expect_code(0);
    replace(&fixture);
    fixture.db.run("DROP TABLE former");
    let mut walpost = fixture.run().start();
    walpost
        .wait_for_log("the dropped table public.outbox, whose older rows had not all been copied");
    // The table is recorded before streaming begins.
    walpost.wait_for_log("streaming");
    walpost.terminate().expect_code(0);
    let settle = ["--dropped-slots", "--already-delivered", "--yes"];
    fixture.replay(&settle).finish().expect_code(0);
    fixture.check().finish().expect_code(0);
}

/// The position of the former slot does not show which rows were copied.
#[test]
fn reports_uncopied_rows_if_the_slot_is_recreated_during_a_snapshot() {
    let (fixture, _) = fixture_with_older_rows(TABLE, 20_000, false);
    let walpost = start_and_copy_some(&fixture);
    fixture.kill(walpost);
    fixture.drop_slot();
    let init = fixture.init().finish().expect_code(0);
    init.expect_mentions(&["slot re-created: events committed before"]);
    let check = fixture.check().finish().expect_code(3);
    check.expect_mentions(&["dropped slots: events committed before"]);
    let replay = fixture.replay(&["--dropped-slots", "--yes"]);
    replay.finish().expect_code(0);
    fixture.check().finish().expect_code(0);
}

/// Regression test for a problem found by a random walk of `./dev soak --shapes` with seed
/// 229154967828336.
#[test]
fn reports_uncopied_rows_if_the_slot_is_recreated_after_switching_to_several_tables() {
    let mut fixture = fixture_before_init(TABLE);
    let aggregate = fixture.aggregate(1);
    fill(&fixture, &aggregate, 20);
    fixture.init().finish().expect_code(0);
    fixture.use_settings("tables = ['public.outbox']\n");
    fixture.drop_slot();
    let init = fixture.init().finish();
    init.expect_mentions(&["slot re-created: events committed before"]);
    let check = fixture.check().finish().expect_code(3);
    check.expect_mentions(&["events of table public.outbox committed before"]);
    let replay = ["--dropped-slots", "--table", "public.outbox", "--yes"];
    fixture.replay(&replay).finish().expect_code(0);
    assert_eq!(fixture.records().len(), 20);
}

/// If a table was published before, `walpost.add_outbox` does not write the table's existing rows
/// to WAL.
#[test]
fn reports_uncopied_rows_if_a_table_is_added_to_the_publication_again() {
    let mut fixture = fixture_before_init(TABLE);
    let aggregate = fixture.aggregate(1);
    fill(&fixture, &aggregate, 20);
    fixture.init().finish().expect_code(0);
    fixture.use_settings("tables = ['public.outbox']\n");
    fixture.db.run(&format!(
        "ALTER PUBLICATION {} DROP TABLE outbox",
        fixture.slot()
    ));
    let init = fixture.init().finish().expect_code(0);
    init.expect_mentions(&[
        "so its rows are not sent again",
        "events committed may be missing",
    ]);
    let mut walpost = fixture.start();
    walpost.wait_for_log("streaming");
    walpost.terminate().expect_code(0);
    let replay = ["--dropped-slots", "--table", "public.outbox", "--yes"];
    fixture.replay(&replay).finish().expect_code(0);
    assert_eq!(fixture.records().len(), 20);
    fixture.check().finish().expect_code(0);
}
