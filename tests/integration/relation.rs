//! The table's columns change while events are being written.

use crate::support::checker::Resends;
use crate::support::fixture::Fixture;
use crate::support::records::keys;

const TABLE: &str =
    "CREATE TABLE outbox (first int, id uuid, aggregatetype text, aggregateid text, type text,
    payload jsonb, unused text)";

#[test]
fn keeps_mapping_columns_correctly_while_columns_are_added_and_dropped_under_load() {
    let fixture = Fixture::with_table(TABLE);
    let aggregate = fixture.aggregate(3);
    let walpost = fixture.start();
    let load = fixture.load(&[&aggregate]);
    for change in [
        "ADD COLUMN note text DEFAULT 'not the payload'",
        "DROP COLUMN first",
        "DROP COLUMN unused",
        "ALTER COLUMN payload TYPE text",
        "ALTER COLUMN aggregateid TYPE varchar(99)",
        "ADD COLUMN headers jsonb DEFAULT '{\"late\": \"header\"}'",
        "DROP COLUMN note",
    ] {
        fixture.db.run(&format!("ALTER TABLE outbox {change}"));
        load.wait_for_transactions(30);
        assert_eq!(walpost.logged("halted"), 0, "{}", walpost.log());
    }
    load.stop();
    fixture.settle(walpost, &[], Resends::Never);
    let records = fixture.records();
    assert!(
        records
            .iter()
            .all(|record| record.key().starts_with("key-") && record.text().starts_with('{'))
    );
    let late = records
        .iter()
        .filter(|record| record.header_names().contains(&"late"))
        .count();
    assert!(
        0 < late && late < records.len(),
        "{late} of {}",
        records.len()
    );
}

#[test]
fn finds_a_column_that_was_dropped_and_added_again() {
    let fixture = Fixture::with_table(TABLE);
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start();
    fixture.insert(&aggregate, "before");
    fixture.db.run(
        "ALTER TABLE outbox DROP COLUMN aggregateid;
         ALTER TABLE outbox ADD COLUMN aggregateid text DEFAULT 'filled'",
    );
    fixture.insert(&aggregate, "after");
    assert_eq!(keys(&fixture.wait_for_records(2)), ["before", "after"]);
    walpost.terminate().expect_code(0);
}

#[test]
fn continues_after_the_table_is_dropped_and_recreated() {
    let fixture = Fixture::with_table(TABLE);
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start();
    fixture.insert(&aggregate, "old table");
    let publication = format!("walpost_{}", fixture.name);
    fixture.db.run(&format!(
        "BEGIN; DROP TABLE outbox;
         CREATE TABLE outbox (payload text, id uuid, aggregateid text, aggregatetype text, type text);
         ALTER PUBLICATION {publication} ADD TABLE outbox; COMMIT"
    ));
    fixture.insert(&aggregate, "new table");
    fixture.settle(walpost, &[], Resends::Never);
    assert_eq!(keys(&fixture.records()), ["old table", "new table"]);
}

#[test]
fn halts_if_a_configured_column_is_dropped() {
    let fixture = Fixture::with_table(TABLE);
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start();
    fixture.insert(&aggregate, "before");
    fixture.wait_for_records(1);
    fixture.wait_until_confirmed();
    fixture
        .db
        .run("ALTER TABLE outbox RENAME COLUMN aggregateid TO renamed");
    let before = fixture.confirmed();
    fixture.db.run(&format!(
        "INSERT INTO outbox (id, aggregatetype, renamed, type, payload)
         VALUES (gen_random_uuid(), '{aggregate}', 'after', 't', '{{}}')"
    ));
    let finished = walpost.finish().expect_code(3);
    finished.expect_mentions(&["halted", "outbox", "aggregateid", "key"]);
    let last = fixture.history().pop().unwrap();
    assert!(
        before <= fixture.confirmed() && fixture.confirmed() < last.end,
        "no event is skipped"
    );

    let walpost = fixture.start_with(&["--key", "{renamed}"]);
    assert_eq!(fixture.wait_for_records(2)[1].key(), "after");
    walpost.terminate().expect_code(0);
}
