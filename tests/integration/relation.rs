//! The table's columns change while events are written.

use crate::support::checker::Resends;
use crate::support::records::keys;
use crate::support::scene::Scene;

const TABLE: &str =
    "CREATE TABLE outbox (first int, id uuid, aggregatetype text, aggregateid text, type text,
    payload jsonb, unused text)";

#[test]
fn columns_come_and_go_under_load_and_the_mapping_follows() {
    let scene = Scene::with_table(TABLE);
    let aggregate = scene.aggregate(3);
    let walpost = scene.start();
    let load = scene.load(&[&aggregate]);
    for change in [
        "ADD COLUMN note text DEFAULT 'not the payload'",
        "DROP COLUMN first",
        "DROP COLUMN unused",
        "ALTER COLUMN payload TYPE text",
        "ALTER COLUMN aggregateid TYPE varchar(99)",
        "ADD COLUMN headers jsonb DEFAULT '{\"late\": \"header\"}'",
        "DROP COLUMN note",
    ] {
        scene.db.run(&format!("ALTER TABLE outbox {change}"));
        load.wait_for_transactions(30);
        assert_eq!(walpost.logged("halted"), 0, "{}", walpost.log());
    }
    load.stop();
    scene.settle(walpost, &[], Resends::Never);
    let records = scene.records();
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
    let scene = Scene::with_table(TABLE);
    let aggregate = scene.aggregate(1);
    let walpost = scene.start();
    scene.insert(&aggregate, "before");
    scene.db.run(
        "ALTER TABLE outbox DROP COLUMN aggregateid;
         ALTER TABLE outbox ADD COLUMN aggregateid text DEFAULT 'filled'",
    );
    scene.insert(&aggregate, "after");
    assert_eq!(keys(&scene.wait_for_records(2)), ["before", "after"]);
    walpost.terminate().expect_code(0);
}

#[test]
fn continues_with_a_table_dropped_and_re_created_in_the_publication() {
    let scene = Scene::with_table(TABLE);
    let aggregate = scene.aggregate(1);
    let walpost = scene.start();
    scene.insert(&aggregate, "old table");
    let publication = format!("walpost_{}", scene.name);
    scene.db.run(&format!(
        "BEGIN; DROP TABLE outbox;
         CREATE TABLE outbox (payload text, id uuid, aggregateid text, aggregatetype text, type text);
         ALTER PUBLICATION {publication} ADD TABLE outbox; COMMIT"
    ));
    scene.insert(&aggregate, "new table");
    scene.settle(walpost, &[], Resends::Never);
    assert_eq!(keys(&scene.records()), ["old table", "new table"]);
}

#[test]
fn column_that_the_settings_name_and_that_is_dropped_halts() {
    let scene = Scene::with_table(TABLE);
    let aggregate = scene.aggregate(1);
    let walpost = scene.start();
    scene.insert(&aggregate, "before");
    scene.wait_for_records(1);
    scene.wait_until_confirmed();
    scene
        .db
        .run("ALTER TABLE outbox RENAME COLUMN aggregateid TO renamed");
    let before = scene.confirmed();
    scene.db.run(&format!(
        "INSERT INTO outbox (id, aggregatetype, renamed, type, payload)
         VALUES (gen_random_uuid(), '{aggregate}', 'after', 't', '{{}}')"
    ));
    let finished = walpost.finish().expect_code(3);
    finished.expect_mentions(&["halted", "outbox", "aggregateid", "key"]);
    let last = scene.history().pop().unwrap();
    assert!(
        before <= scene.confirmed() && scene.confirmed() < last.end,
        "nothing is skipped"
    );

    let walpost = scene.start_with(&["--key", "{renamed}"]);
    assert_eq!(scene.wait_for_records(2)[1].key(), "after");
    walpost.terminate().expect_code(0);
}
