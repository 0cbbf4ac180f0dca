//! The owner of an outbox table gives it the name of another table, inserts rows, and restores the
//! original name. Walpost must not deliver these rows under the other table's name.

use super::{add, fixture_on, writer};
use crate::support::event::Event;
use crate::support::fixture::Fixture;
use crate::support::postgres::MAJOR;
use crate::support::wait::wait_until;
use crate::support::walpost::Walpost;

const SETTINGS: &str =
    "tables = [\"tenant_1.*\"]\nheaders = { id = \"{id}\", table = \"{table.name}\" }\n";
const TABLE: &str = "tenant_1.ob_a";

fn fixture(major: u32) -> Fixture<'static> {
    fixture_on(major, SETTINGS, &[TABLE])
}

fn event(fixture: &Fixture, table: &str, key: &str) -> String {
    writer(&[table]).insert_one(Event::new(&fixture.aggregate(1), key, "{}"))
}

fn insert(fixture: &Fixture, table: &str, key: &str) {
    fixture.db.run(&event(fixture, table, key));
}

/// Renames the table `from`, inserts a row, and restores the table's name.
fn forge(fixture: &Fixture, from: &str, to: &str, key: &str) {
    fixture
        .db
        .run(&format!("ALTER TABLE tenant_1.{from} RENAME TO {to}"));
    insert(fixture, &format!("tenant_1.{to}"), key);
    fixture
        .db
        .run(&format!("ALTER TABLE tenant_1.{to} RENAME TO {from}"));
}

/// Returns the table and the key of each record.
fn delivered(fixture: &Fixture) -> Vec<String> {
    let records = fixture.records();
    let texts = records
        .iter()
        .map(|record| format!("{} {}", record.header("table"), record.key()));
    let mut texts: Vec<_> = texts.collect();
    texts.dedup();
    texts
}

fn wait_for(fixture: &Fixture, text: &str) {
    wait_until("the event", || {
        delivered(fixture).iter().any(|found| found == text)
    });
}

fn start(fixture: &Fixture) -> Walpost {
    let mut walpost = fixture.run().start();
    walpost.wait_for_log("streaming");
    walpost
}

fn expect_halt(mut walpost: Walpost, fixture: &Fixture, (found, before): (&str, &str)) {
    wait_until("the pipeline to halt", || !walpost.is_running());
    walpost.finish().expect_code(3).expect_mentions(&[
        &format!("table tenant_1.{found} was named tenant_1.{before}"),
        "walpost init",
        &format!("--table tenant_1.{found}"),
    ]);
    let is_forged = |text: &String| text.starts_with(found);
    assert!(!delivered(fixture).iter().any(is_forged));
}

#[test]
fn never_delivers_rows_under_another_table_name_while_streaming() {
    for major in [14, 15, 17] {
        let fixture = fixture(major);
        let walpost = start(&fixture);
        // The server has not sent any row of the table yet.
        forge(&fixture, "ob_a", "ob_gone", "forged");
        expect_halt(walpost, &fixture, ("ob_gone", "ob_a"));
        // A restart does not make Walpost accept the forged name, even if the table really has that
        // name.
        expect_halt(fixture.run().start(), &fixture, ("ob_gone", "ob_a"));
        fixture
            .db
            .run("ALTER TABLE tenant_1.ob_a RENAME TO ob_gone");
        expect_halt(fixture.run().start(), &fixture, ("ob_gone", "ob_a"));
    }
}

#[test]
fn never_delivers_rows_under_another_table_name_after_delivering_some_under_the_right_one() {
    let fixture = fixture(MAJOR);
    let walpost = start(&fixture);
    insert(&fixture, TABLE, "own");
    wait_for(&fixture, "ob_a own");
    forge(&fixture, "ob_a", "ob_gone", "forged");
    expect_halt(walpost, &fixture, ("ob_gone", "ob_a"));
    assert_eq!(delivered(&fixture), ["ob_a own"]);
}

#[test]
fn never_delivers_rows_under_a_table_name_that_was_used_while_walpost_was_stopped() {
    for major in [15, 18] {
        let fixture = fixture(major);
        start(&fixture).terminate().expect_code(0);
        forge(&fixture, "ob_a", "ob_gone", "forged");
        expect_halt(fixture.run().start(), &fixture, ("ob_gone", "ob_a"));
        // The forged row is still in WAL after its table is dropped, so the pipeline must halt
        // again.
        fixture.db.run("DROP TABLE tenant_1.ob_a");
        expect_halt(fixture.run().start(), &fixture, ("ob_gone", "ob_a"));
    }
}

#[test]
fn never_delivers_rows_of_a_newly_added_table_under_another_table_name() {
    for major in [15, 18] {
        let fixture = fixture(major);
        let walpost = start(&fixture);
        add(&fixture, "tenant_1.ob_b", "");
        forge(&fixture, "ob_b", "ob_gone", "forged");
        expect_halt(walpost, &fixture, ("ob_gone", "ob_b"));
    }
}

/// Walpost compares the publication with walpost.table_state every 30 seconds and at each start. If
/// a table has a different name at that time, Walpost records the name. Recording the name must not
/// make Walpost accept rows that were sent under that name.
#[test]
fn never_accepts_a_table_name_merely_because_it_was_recorded() {
    let fixture = fixture(MAJOR);
    fixture
        .db
        .run("ALTER TABLE tenant_1.ob_a RENAME TO ob_gone");
    start(&fixture).terminate().expect_code(0);
    let recorded = "SELECT count(*) FROM walpost.table_state WHERE table_name = 'ob_gone'";
    assert_eq!(fixture.db.number(recorded), 1);
    fixture
        .db
        .run("ALTER TABLE tenant_1.ob_gone RENAME TO ob_a");
    forge(&fixture, "ob_a", "ob_gone", "forged");
    expect_halt(fixture.run().start(), &fixture, ("ob_gone", "ob_a"));
}

#[test]
fn delivers_rows_of_a_renamed_table_once_init_has_accepted_its_new_name() {
    let fixture = fixture(MAJOR);
    start(&fixture).terminate().expect_code(0);
    insert(&fixture, TABLE, "before");
    fixture.db.run("ALTER TABLE tenant_1.ob_a RENAME TO ob_new");
    insert(&fixture, "tenant_1.ob_new", "after");
    let mut walpost = fixture.run().start();
    wait_until("the pipeline to halt", || !walpost.is_running());
    walpost.finish().expect_code(3);
    assert_eq!(delivered(&fixture), ["ob_a before"]);
    let init = fixture.init().args(["--table", "tenant_1.ob_new"]);
    init.finish().expect_code(0);
    let walpost = start(&fixture);
    wait_for(&fixture, "ob_new after");
    walpost.terminate().expect_code(0);
}

/// A migration replaces the table. WAL still contains rows of the former table under its old name,
/// which is now recorded for the new table.
#[test]
fn delivers_rows_of_a_replaced_table_under_its_former_name() {
    let fixture = fixture(MAJOR);
    insert(&fixture, TABLE, "former");
    fixture.db.run(
        "ALTER TABLE tenant_1.ob_a RENAME TO ob_old;
         CREATE TABLE tenant_1.ob_a (LIKE tenant_1.ob_old INCLUDING ALL)",
    );
    add(&fixture, TABLE, "");
    insert(&fixture, TABLE, "new");
    let walpost = start(&fixture);
    wait_for(&fixture, "ob_a new");
    assert_eq!(delivered(&fixture), ["ob_a former", "ob_a new"]);
    walpost.terminate().expect_code(0);
}

/// If no name was recorded, Walpost can't check the names in older WAL, but it must check the names
/// used after it starts.
#[test]
fn checks_table_names_used_after_startup_even_if_no_names_were_recorded() {
    let fixture = fixture(MAJOR);
    insert(&fixture, TABLE, "before");
    fixture.db.run(
        "ALTER TABLE tenant_1.ob_a RENAME TO ob_new; ALTER TABLE walpost.table_state RENAME TO moved",
    );
    insert(&fixture, "tenant_1.ob_new", "after");
    let walpost = start(&fixture);
    wait_for(&fixture, "ob_new after");
    assert_eq!(delivered(&fixture), ["ob_a before", "ob_new after"]);
    forge(&fixture, "ob_new", "ob_gone", "forged");
    expect_halt(walpost, &fixture, ("ob_gone", "ob_new"));
}

/// The owner of a table gives it the name of a future table, and inserts a row that causes an
/// error, so that the future table is set aside.
#[test]
fn delivers_a_new_table_even_if_an_earlier_table_with_its_name_was_set_aside() {
    let settings = format!("{SETTINGS}on_table_error = \"set-aside\"\n");
    // If records do not contain the table's name, Walpost accepts any table name.
    let settings = settings.replace(", table = \"{table.name}\"", ", table = \"any\"");
    for major in [15, 18] {
        let fixture = fixture_on(major, &settings, &[TABLE]);
        fixture.accept_any_name(TABLE);
        let mut walpost = start(&fixture);
        fixture
            .db
            .run("ALTER TABLE tenant_1.ob_a RENAME TO ob_future");
        let bad = writer(&["tenant_1.ob_future"]).insert_one(Event::new("no topic", "bad", "{}"));
        fixture.db.run(&bad);
        walpost.wait_for_log("table set aside");
        fixture.db.run("DROP TABLE tenant_1.ob_future");
        add(&fixture, "tenant_1.ob_future", "");
        insert(&fixture, "tenant_1.ob_future", "first");
        wait_for(&fixture, "any first");
        walpost.terminate().expect_code(0);
        let walpost = start(&fixture);
        insert(&fixture, "tenant_1.ob_future", "second");
        wait_for(&fixture, "any second");
        walpost.terminate().expect_code(0);
    }
}

/// If a forged name causes the error, the table is set aside under its own name.
#[test]
fn sets_aside_a_temporarily_renamed_table_under_its_original_name() {
    let settings = format!("{SETTINGS}on_table_error = \"set-aside\"\n");
    let fixture = fixture_on(MAJOR, &settings, &[TABLE]);
    let mut walpost = start(&fixture);
    forge(&fixture, "ob_a", "ob_future", "forged");
    let line = walpost.wait_for_log("table set aside");
    assert!(line.contains("tenant_1.ob_a"), "{line}");
    let replay = fixture.replay(&["--set-aside", "--yes", "--table", TABLE]);
    replay.finish().expect_code(0);
    wait_for(&fixture, "ob_a forged");
    walpost.terminate().expect_code(0);
    assert_eq!(delivered(&fixture), ["ob_a forged"]);
}
