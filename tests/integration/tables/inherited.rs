//! Child tables of an outbox table that is renamed before Walpost has detected the children.

use super::{fixture, writer};
use crate::support::event::Event;
use crate::support::fixture::Fixture;

const TABLES: [&str; 2] = ["tenant_1.outbox", "tenant_2.outbox"];

const RENAME_SQL: &str = "ALTER TABLE tenant_1.outbox RENAME TO former";

/// Creates two tables and, as a child of the first, a table with one event.
fn fixture_with_child() -> Fixture<'static> {
    let fixture = fixture(&TABLES);
    let aggregate = fixture.aggregate(1);
    fixture
        .db
        .run("CREATE TABLE tenant_1.child () INHERITS (tenant_1.outbox)");
    let event = Event::new(&aggregate, "hidden", "{}");
    fixture
        .db
        .run(&writer(&["tenant_1.child"]).insert_one(event));
    fixture
}

fn unpublish_former(fixture: &Fixture<'_>) {
    fixture.db.run(&format!(
        "ALTER PUBLICATION {} DROP TABLE ONLY tenant_1.former",
        fixture.slot()
    ));
}

/// Asserts that `check` suggests the replay command until it has been run, and that the replay
/// sends the row.
fn expect_replay(fixture: &mut Fixture<'_>) {
    let command = format!(
        "walpost replay --dropped-slots --table tenant_1.child --pipeline {}",
        fixture.name
    );
    let check = fixture.check().finish().expect_code(3);
    check.expect_mentions(&["events of table tenant_1.child committed before", &command]);
    fixture.use_settings("tables = [\"tenant_*.outbox\", \"tenant_1.child\"]\n");
    fixture
        .db
        .run("ALTER TABLE tenant_1.child ADD PRIMARY KEY (id)");
    let replay = ["--dropped-slots", "--table", "tenant_1.child", "--yes"];
    fixture.replay(&replay).finish().expect_code(0);
    let records = fixture.records();
    let keys: Vec<_> = records.iter().map(|record| record.key()).collect();
    assert_eq!(keys, ["hidden"]);
    let check = fixture.check().finish();
    assert!(!check.stdout.contains(&command), "{}", check.stdout);
}

/// Regression test for problems found by random walks of `./dev soak --shapes` with seeds
/// 164992341767450 and 110022328567302.
#[test]
fn reports_rows_of_a_child_table_if_its_parent_is_replaced_before_the_first_check() {
    let mut fixture = fixture_with_child();
    fixture.db.run(&format!(
        "{RENAME_SQL}; CREATE TABLE tenant_1.outbox (LIKE tenant_1.former INCLUDING ALL);
         ALTER PUBLICATION {} ADD TABLE tenant_1.outbox",
        fixture.slot()
    ));
    let expected = [
        "table tenant_1.child inherits from tenant_1.former, which was previously named tenant_1.outbox",
    ];
    fixture
        .check()
        .finish()
        .expect_code(3)
        .expect_mentions(&expected);
    let halted = fixture
        .run()
        .finish()
        .expect_code(3)
        .expect_mentions(&expected);
    halted.expect_mentions(&[
        "No pattern in the tables setting matches tenant_1.child",
        "a primary key",
    ]);
    unpublish_former(&fixture);
    let mut walpost = fixture.start();
    walpost.wait_for_log("streaming");
    walpost.terminate().expect_code(0);
    assert_eq!(count_entries(&fixture), 1);
    expect_replay(&mut fixture);
}

#[test]
fn reports_rows_of_a_child_table_if_its_parent_is_renamed_before_the_first_check() {
    let mut fixture = fixture_with_child();
    fixture.db.run(RENAME_SQL);
    unpublish_former(&fixture);
    let mut walpost = fixture.start();
    walpost.wait_for_log("table tenant_1.child inherits from tenant_1.former");
    walpost.wait_for_log("streaming");
    walpost.terminate().expect_code(0);
    assert_eq!(count_entries(&fixture), 1);
    expect_replay(&mut fixture);
}

#[test]
fn reports_child_table_rows_if_the_parent_is_renamed_before_the_slot_is_recreated() {
    let mut fixture = fixture_with_child();
    fixture.db.run(RENAME_SQL);
    unpublish_former(&fixture);
    fixture.drop_slot();
    let init = fixture.init().finish();
    init.expect_mentions(&["table tenant_1.child inherits from tenant_1.former"]);
    expect_replay(&mut fixture);
}

/// Returns the number of journal entries about the child table.
fn count_entries(fixture: &Fixture<'_>) -> i64 {
    fixture
        .db
        .number("SELECT count(*) FROM walpost.journal WHERE detail ->> 'table' = 'tenant_1.child'")
}
