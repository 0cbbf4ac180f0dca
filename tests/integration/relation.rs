//! The table's columns change while events are written.

use crate::support::checker::Resends;
use crate::support::fixture::Fixture;
use crate::support::records::keys;

const TABLE: &str =
    "CREATE TABLE outbox (first int, id uuid, aggregatetype text, aggregateid text, type text,
    payload jsonb, unused text)";

#[test]
fn columns_come_and_go_under_load_and_the_mapping_follows() {
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
fn column_that_is_dropped_and_added_again_is_found_at_its_new_place() {
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
fn continues_with_a_table_dropped_and_re_created_in_the_publication() {
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
fn column_that_the_settings_name_and_that_is_dropped_halts() {
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
        "nothing is skipped"
    );

    let walpost = fixture.start_with(&["--key", "{renamed}"]);
    assert_eq!(fixture.wait_for_records(2)[1].key(), "after");
    walpost.terminate().expect_code(0);
}
