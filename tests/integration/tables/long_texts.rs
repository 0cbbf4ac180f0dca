//! Catalog entries of several megabytes, which a table's owner can create.

use super::*;

/// SQL for a text that is longer than any query result that Walpost accepts.
const LONG_TEXT_SQL: &str = "repeat('x', 20 << 20)";

#[test]
fn multi_megabyte_column_default_does_not_stop_delivery() {
    let fixture = fixture(&["tenant_1.outbox", "tenant_2.outbox"]);
    fixture.db.run(&format!(
        "DO $$ BEGIN EXECUTE format('ALTER TABLE tenant_1.outbox ALTER COLUMN type SET DEFAULT %L', {LONG_TEXT_SQL}); END $$"
    ));
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start();
    let insert = |table: &str, key: &str| {
        let event = Event::new(&aggregate, key, "{}");
        fixture.db.run(&writer(&[table]).insert_one(event));
    };
    insert("tenant_2.outbox", "k");
    insert("tenant_1.outbox", "l");
    assert_eq!(keys(&fixture.wait_for_records(2)), ["k", "l"]);
    walpost.terminate().expect_code(0);
    fixture.check().finish().expect_code(0);
    let verify = fixture
        .verify()
        .args(["--table", "tenant_1.outbox"])
        .finish();
    verify.expect_code(0);
    let replay = fixture.replay(&["--all", "--yes", "--table", "tenant_1.outbox"]);
    replay.finish().expect_code(0);
}

/// With its default `max_stack_depth`, PostgreSQL 18 fails to print this column default, because
/// the expression is nested too deeply.
#[test]
fn deeply_nested_column_default_does_not_stop_delivery() {
    let fixture = fixture_on(18, SETTINGS, &["tenant_1.outbox", "tenant_2.outbox"]);
    let calls = 3685;
    fixture.db.run(&format!(
        "ALTER TABLE tenant_1.outbox ALTER COLUMN type SET DEFAULT {}'t'{}",
        "COALESCE(".repeat(calls),
        ", NULL)".repeat(calls)
    ));
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start();
    let event = Event::new(&aggregate, "k", "{}");
    fixture
        .db
        .run(&writer(&["tenant_1.outbox"]).insert_one(event));
    assert_eq!(keys(&fixture.wait_for_records(1)), ["k"]);
    walpost.terminate().expect_code(0);
}

#[test]
fn reports_a_multi_megabyte_row_filter() {
    if MAJOR < 15 {
        return;
    }
    let fixture = Fixture::new();
    let publication = fixture.slot();
    fixture.db.run(&format!(
        "DO $$ BEGIN EXECUTE format('ALTER PUBLICATION {publication} SET TABLE outbox WHERE (aggregateid <> %L)', repeat('x', 1 << 20)); END $$"
    ));
    let halted = fixture.run().finish();
    halted.expect_code(3).expect_mentions(&[
        "the row filter of table public.outbox in publication",
        "ALTER PUBLICATION",
    ]);
}
