//! Tables that a pipeline's former slot delivered but its new slot does not.

use super::{fixture, writer};
use crate::support::event::Event;
use crate::support::fixture::Fixture;

const TABLES: [&str; 2] = ["tenant_1.outbox", "tenant_2.outbox"];

fn insert(fixture: &Fixture<'_>, table: &str, aggregate: &str, key: &str) {
    let event = Event::new(aggregate, key, "{}");
    fixture.db.run(&writer(&[table]).insert_one(event));
}

/// Creates two tables with one event each, and delivers both events.
fn fixture_with_delivered_tables(
    aggregates: impl FnOnce(&Fixture<'_>) -> String,
) -> (Fixture<'static>, String) {
    let fixture = fixture(&TABLES);
    let aggregate = aggregates(&fixture);
    let walpost = fixture.start();
    for table in TABLES {
        insert(&fixture, table, &aggregate, "before");
    }
    fixture.wait_until_confirmed();
    walpost.terminate().expect_code(0);
    (fixture, aggregate)
}

fn command(fixture: &Fixture<'_>, table: &str) -> String {
    format!(
        "walpost replay --dropped-slots --table {table} --pipeline {}",
        fixture.name
    )
}

/// Asserts that `run`, `check` and `status` suggest the replay command until it has been run, and
/// that the replay delivers the event.
fn expect_gap(fixture: &Fixture<'_>, table: &str, key: &str) {
    let command = command(fixture, table);
    let mut walpost = fixture.run().start();
    walpost.wait_for_log(&command);
    walpost.wait_for_log("streaming");
    walpost.terminate().expect_code(0);
    let check = fixture.check().finish().expect_code(3);
    assert!(check.stdout.contains(&command), "{}", check.stdout);
    let status = fixture.invoke("status").finish();
    assert!(status.stdout.contains(&command), "{}", status.stdout);
    let replay = fixture.replay(&["--dropped-slots", "--table", table, "--yes"]);
    replay.finish().expect_code(0);
    let records = fixture.records();
    assert!(records.iter().any(|record| record.key() == key));
    let check = fixture.check().finish();
    assert!(!check.stdout.contains(&command), "{}", check.stdout);
}

fn rename_publication(fixture: &mut Fixture<'_>) {
    let settings = format!(
        "tables = [\"tenant_*.outbox\"]\npublication = \"{}_2\"\n",
        fixture.slot()
    );
    fixture.use_settings(&settings);
}

/// Regression test for a problem found by a random walk of `./dev soak --shapes` with seed
/// 78103886014793.
#[test]
fn reports_a_table_rejected_by_init_if_the_slot_is_replaced() {
    let (mut fixture, aggregate) = fixture_with_delivered_tables(|fixture| fixture.aggregate(1));
    insert(&fixture, TABLES[0], &aggregate, "between");
    fixture
        .db
        .run("CREATE TABLE tenant_1.child () INHERITS (tenant_1.outbox)");
    rename_publication(&mut fixture);
    let init = fixture.init().finish();
    init.expect_mentions(&["inherits from table tenant_1.outbox"]);
    fixture.drop_slot();
    let init = fixture.init().finish();
    init.expect_mentions(&[
        "is no longer in the publication",
        &command(&fixture, TABLES[0]),
    ]);
    expect_gap(&fixture, TABLES[0], "between");
}

#[test]
fn reports_an_unpublished_table_with_undelivered_rows_if_the_slot_is_replaced() {
    let (fixture, aggregate) = fixture_with_delivered_tables(|fixture| fixture.aggregate(1));
    insert(&fixture, TABLES[0], &aggregate, "between");
    fixture.db.run(&format!(
        "ALTER PUBLICATION {} DROP TABLE {}",
        fixture.slot(),
        TABLES[0]
    ));
    fixture.drop_slot();
    fixture
        .db
        .run("ALTER TABLE tenant_1.outbox RENAME TO former");
    let init = fixture.init().finish().expect_code(0);
    init.expect_mentions(&[
        &command(&fixture, "tenant_1.former"),
        &command(&fixture, TABLES[1]),
    ]);
    let check = fixture.check().finish().expect_code(3);
    let line = command(&fixture, "tenant_1.former");
    assert!(check.stdout.contains(&line), "{}", check.stdout);
}

/// Walpost must not report a table whose rows were all delivered. Otherwise, it would report the
/// tables of all removed tenants whenever a slot is replaced.
#[test]
fn does_not_report_a_table_fully_delivered_before_it_was_unpublished() {
    let (fixture, _) = fixture_with_delivered_tables(|fixture| fixture.aggregate(1));
    let walpost = fixture.start();
    fixture.db.run(&format!(
        "ALTER PUBLICATION {} DROP TABLE {}",
        fixture.slot(),
        TABLES[0]
    ));
    fixture
        .db
        .run("ALTER TABLE tenant_1.outbox RENAME TO former");
    walpost.terminate().expect_code(0);
    let walpost = fixture.start();
    fixture.wait_until_confirmed();
    walpost.terminate().expect_code(0);
    fixture.drop_slot();
    let init = fixture.init().finish().expect_code(0);
    let init = init.expect_mentions(&[&command(&fixture, TABLES[1])]);
    assert!(!init.stderr.contains("tenant_1"), "{}", init.stderr);
}

#[test]
fn reports_a_table_missing_from_the_publication_when_a_new_slot_is_created() {
    let (mut fixture, aggregate) = fixture_with_delivered_tables(|fixture| fixture.aggregate(1));
    insert(&fixture, TABLES[0], &aggregate, "between");
    let former = fixture.slot();
    fixture.db.run(&format!(
        "ALTER PUBLICATION {former} DROP TABLE {}; ALTER TABLE {} SET SCHEMA public",
        TABLES[0], TABLES[0]
    ));
    let settings =
        format!("tables = [\"tenant_*.outbox\", \"public.outbox\"]\nslot = \"{former}_2\"\n");
    fixture.use_settings(&settings);
    fixture.init().finish().expect_code(0);
    fixture.db.run(&format!(
        "ALTER PUBLICATION {former} DROP TABLE public.outbox"
    ));
    expect_gap(&fixture, "public.outbox", "between");
    // The first gap ends at the position that was recorded for it, so an event that is committed
    // later belongs to a second gap.
    insert(&fixture, "public.outbox", &aggregate, "later");
    fixture.db.run(&format!(
        "ALTER PUBLICATION {former} ADD TABLE public.outbox"
    ));
    expect_gap(&fixture, "public.outbox", "later");
}

/// If a different publication is configured, PostgreSQL also applies it to older events that the
/// slot has not sent yet. The new publication determines which of these events are delivered.
#[test]
fn reports_a_table_missing_from_the_newly_configured_publication() {
    // Create the publication first, because PostgreSQL can't decode transactions that precede it.
    let (mut fixture, aggregate) = fixture_with_delivered_tables(|fixture| {
        fixture.db.run(&format!(
            "CREATE PUBLICATION {}_2 FOR TABLE walpost.outbox_row, {} WITH (publish = 'insert', publish_via_partition_root)",
            fixture.slot(),
            TABLES[1]
        ));
        fixture.aggregate(1)
    });
    insert(&fixture, TABLES[0], &aggregate, "between");
    rename_publication(&mut fixture);
    let check = fixture.check().finish().expect_code(3);
    assert!(
        check
            .stdout
            .contains("tenant_1.outbox was temporarily missing from publication"),
        "{}",
        check.stdout
    );
    expect_gap(&fixture, TABLES[0], "between");
}

fn expect_unpublished(fixture: &Fixture<'_>, also: &[&str]) {
    let check = fixture.check().finish().expect_code(3);
    let mut lines = check.stdout.lines();
    let line = lines.find(|line| line.contains("some tables were removed from the publication"));
    let line = line.unwrap_or_else(|| panic!("{}", check.stdout));
    assert!(line.starts_with("FAILED"), "{line}");
    assert!(
        line.contains("walpost init --table tenant_1.outbox"),
        "{line}"
    );
    assert!(!line.contains(TABLES[1]), "{line}");
    for text in also {
        assert!(check.stdout.contains(text), "{}", check.stdout);
    }
}

#[test]
fn check_fails_until_an_unpublished_table_is_added_again_or_renamed() {
    let (fixture, _) = fixture_with_delivered_tables(|fixture| fixture.aggregate(1));
    let publication = fixture.slot();
    fixture.db.run(&format!(
        "ALTER PUBLICATION {publication} DROP TABLE tenant_1.outbox"
    ));
    expect_unpublished(&fixture, &[]);
    // `check` must still fail after `run` has recorded the gap.
    let walpost = fixture.start();
    fixture.wait_until_confirmed();
    walpost.terminate().expect_code(0);
    expect_unpublished(&fixture, &[]);
    fixture
        .db
        .run("ALTER TABLE tenant_1.outbox RENAME TO former");
    fixture.check().finish().expect_code(0);
}

/// Regression test for a problem found by a random walk of `./dev soak --shapes` with seed
/// 143740483105104.
#[test]
fn check_fails_if_a_published_table_has_been_replaced() {
    let (fixture, _) = fixture_with_delivered_tables(|fixture| fixture.aggregate(1));
    let publication = fixture.slot();
    fixture.db.run(&format!(
        "ALTER TABLE tenant_1.outbox RENAME TO former;
         CREATE TABLE tenant_1.outbox (LIKE tenant_1.former INCLUDING ALL);
         ALTER PUBLICATION {publication} DROP TABLE tenant_1.former;
         CREATE TABLE tenant_1.child () INHERITS (tenant_1.outbox)"
    ));
    expect_unpublished(&fixture, &["table tenant_1.child"]);
}

/// The rows committed while the table was not published are in the former table. Replaying the
/// table that has taken over the name would not send those rows.
#[test]
fn reports_an_unpublished_table_that_was_replaced_by_another_table() {
    let (mut fixture, aggregate) = fixture_with_delivered_tables(|fixture| fixture.aggregate(1));
    let publication = fixture.slot();
    fixture.db.run(&format!(
        "ALTER PUBLICATION {publication} DROP TABLE {}",
        TABLES[0]
    ));
    insert(&fixture, TABLES[0], &aggregate, "between");
    fixture.db.run(&format!(
        "ALTER TABLE tenant_1.outbox RENAME TO former; CREATE TABLE tenant_1.outbox (LIKE tenant_1.former INCLUDING ALL);
         ALTER PUBLICATION {publication} ADD TABLE tenant_1.outbox"
    ));
    let former = command(&fixture, "tenant_1.former");
    let check = fixture.check().finish().expect_code(3);
    check.expect_mentions(&["has replaced tenant_1.former"]);
    let mut walpost = fixture.run().start();
    walpost.wait_for_log("No pattern in the tables setting matches tenant_1.former");
    walpost.wait_for_log(&former);
    walpost.wait_for_log("streaming");
    walpost.terminate().expect_code(0);
    fixture.use_settings("tables = [\"tenant_*.outbox\", \"tenant_1.former\"]\n");
    expect_gap(&fixture, "tenant_1.former", "between");
}

/// If a child table is not published, PostgreSQL does not remove its parent from the publication
/// unless the command contains ONLY.
#[test]
fn printed_command_removes_a_parent_table_without_its_child_from_the_publication() {
    let (fixture, _) = fixture_with_delivered_tables(|fixture| fixture.aggregate(1));
    let publication = fixture.slot();
    fixture.db.run(&format!(
        "CREATE TABLE public.other (n int PRIMARY KEY); ALTER PUBLICATION {publication} ADD TABLE public.other;
         CREATE TABLE public.child () INHERITS (public.other)"
    ));
    let halted = fixture.run().finish().expect_code(3);
    let command = format!("ALTER PUBLICATION {publication} DROP TABLE ONLY public.other");
    halted.expect_mentions(&[&command]);
    fixture.db.run(&command);
    fixture.check().finish().expect_code(0);
}

/// Asserts that `check` and `run` suggest the replay command for the renamed table, and that the
/// replay delivers the event. `run` halts because the events were committed before the publication
/// existed.
fn expect_gap_of_former(fixture: &mut Fixture<'_>) {
    const FORMER_TABLE: &str = "tenant_1.former";
    let command = command(fixture, FORMER_TABLE);
    let halted = fixture.run().finish().expect_code(3);
    halted.expect_mentions(&[&command, "these events can't be read with this publication"]);
    let check = fixture.check().finish().expect_code(3);
    check.expect_mentions(&[&command]);
    let settings = format!(
        "tables = [\"tenant_*.outbox\", \"{FORMER_TABLE}\"]\npublication = \"{}_2\"\n",
        fixture.slot()
    );
    fixture.use_settings(&settings);
    let replay = fixture.replay(&["--dropped-slots", "--table", FORMER_TABLE, "--yes"]);
    replay.finish().expect_code(0);
    let records = fixture.records();
    assert!(records.iter().any(|record| record.key() == "between"));
}

#[test]
fn reports_a_table_renamed_before_the_publication_setting_changed() {
    let (mut fixture, aggregate) = fixture_with_delivered_tables(|fixture| fixture.aggregate(1));
    insert(&fixture, TABLES[0], &aggregate, "between");
    fixture
        .db
        .run("ALTER TABLE tenant_1.outbox RENAME TO former");
    rename_publication(&mut fixture);
    fixture.init().finish().expect_code(0);
    expect_gap_of_former(&mut fixture);
}

#[test]
fn reports_a_table_replaced_before_the_publication_setting_changed() {
    let (mut fixture, aggregate) = fixture_with_delivered_tables(|fixture| fixture.aggregate(1));
    insert(&fixture, TABLES[0], &aggregate, "between");
    fixture.db.run(
        "ALTER TABLE tenant_1.outbox RENAME TO former;
         CREATE TABLE tenant_1.outbox (LIKE tenant_1.former INCLUDING ALL)",
    );
    rename_publication(&mut fixture);
    fixture.init().finish().expect_code(0);
    expect_gap_of_former(&mut fixture);
}
