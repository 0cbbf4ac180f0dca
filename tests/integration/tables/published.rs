//! A table is removed from a publication that contains several tables, and is added again later.

use super::{SETTINGS, add, fixture, fixture_on, writer};
use crate::published::gaps;
use crate::support::event::Event;
use crate::support::fixture::Fixture;
use crate::support::postgres::MAJOR;

const TABLES: [&str; 2] = ["tenant_1.outbox", "tenant_2.outbox"];
const GAP: &str = "table tenant_1.outbox was temporarily missing from publication";

in_both_modes! {
    init_does_not_resend_rows_of_a_republished_table
    reports_a_table_recreated_manually
    add_outbox_leaves_no_gap_for_a_recreated_table
}

fn insert(fixture: &Fixture, aggregate: &str, table: &str, key: &str) {
    let event = Event::new(aggregate, key, "{}");
    fixture.db.run(&writer(&[table]).insert_one(event));
}

fn count(fixture: &Fixture, key: &str) -> usize {
    let records = fixture.records();
    records.iter().filter(|record| record.key() == key).count()
}

fn alter(fixture: &Fixture, what: &str) {
    fixture
        .db
        .run(&format!("ALTER PUBLICATION {} {what}", fixture.slot()));
}

fn replay(fixture: &Fixture) {
    let command = format!(
        "walpost replay --dropped-slots --table tenant_1.outbox --pipeline {}",
        fixture.name
    );
    let check = fixture.check().finish().expect_code(3);
    assert!(check.stdout.contains(&command), "{}", check.stdout);
    let replay = ["--dropped-slots", "--table", "tenant_1.outbox", "--yes"];
    fixture.replay(&replay).finish().expect_code(0);
    fixture.check().finish().expect_code(0);
}

/// `init` must not resend the ten rows that were already delivered. It must report the row that was
/// committed while the table was not published.
fn init_does_not_resend_rows_of_a_republished_table(exactly_once: bool) {
    for arguments in [&["--table", "tenant_1.outbox"][..], &[]] {
        let fixture = fixture(&TABLES).in_mode(exactly_once);
        let aggregate = fixture.aggregate(1);
        let walpost = fixture.start();
        for _ in 0..10 {
            insert(&fixture, &aggregate, TABLES[0], "delivered");
        }
        fixture.wait_until_confirmed();
        walpost.terminate().expect_code(0);
        let walpost = fixture.start();
        alter(&fixture, "DROP TABLE tenant_1.outbox");
        insert(&fixture, &aggregate, TABLES[0], "between");
        let init = fixture.init().args(arguments).finish().expect_code(0);
        init.expect_mentions(&[
            GAP,
            "walpost replay --dropped-slots --table tenant_1.outbox",
        ]);
        insert(&fixture, &aggregate, TABLES[0], "after");
        fixture.wait_for_records(11);
        fixture.wait_until_confirmed();
        assert_eq!(count(&fixture, "delivered"), 10);
        assert_eq!(count(&fixture, "between"), 0);
        replay(&fixture);
        assert_eq!(count(&fixture, "between"), 1);
        assert_eq!(gaps(&fixture), 1);
        walpost.terminate().expect_code(0);
    }
}

fn reports_a_table_recreated_manually(exactly_once: bool) {
    let fixture = fixture(&TABLES).in_mode(exactly_once);
    let aggregate = fixture.aggregate(1);
    let mut walpost = fixture.start();
    for table in TABLES {
        insert(&fixture, &aggregate, table, "before");
    }
    fixture.wait_until_confirmed();
    fixture.db.run(
        "CREATE TABLE tenant_1.copy (LIKE tenant_1.outbox INCLUDING ALL); DROP TABLE tenant_1.outbox;
         ALTER TABLE tenant_1.copy RENAME TO outbox",
    );
    insert(&fixture, &aggregate, TABLES[0], "between");
    alter(&fixture, "ADD TABLE tenant_1.outbox");
    walpost.wait_for_log(GAP);
    replay(&fixture);
    assert_eq!(count(&fixture, "between"), 1);
    assert_eq!(gaps(&fixture), 1);
    walpost.terminate().expect_code(0);
}

/// If a tenant's table is dropped and re-created, none of its rows have been sent yet, so all of
/// them are delivered.
fn add_outbox_leaves_no_gap_for_a_recreated_table(exactly_once: bool) {
    let fixture = fixture(&TABLES).in_mode(exactly_once);
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start();
    insert(&fixture, &aggregate, TABLES[0], "before");
    fixture.wait_until_confirmed();
    fixture.db.run(
        "CREATE TABLE tenant_1.copy (LIKE tenant_1.outbox INCLUDING ALL); DROP TABLE tenant_1.outbox;
         ALTER TABLE tenant_1.copy RENAME TO outbox",
    );
    insert(&fixture, &aggregate, TABLES[0], "between");
    add(&fixture, TABLES[0], "");
    insert(&fixture, &aggregate, TABLES[0], "after");
    fixture.wait_for_records(3);
    walpost.terminate().expect_code(0);
    let walpost = fixture.start();
    walpost.terminate().expect_code(0);
    assert_eq!(gaps(&fixture), 0);
    fixture.check().finish().expect_code(0);
    // Now leave a gap that Walpost can't observe: remove the table from the publication and add it
    // again while Walpost is stopped.
    alter(&fixture, "DROP TABLE tenant_1.outbox");
    insert(&fixture, &aggregate, TABLES[0], "missed");
    alter(&fixture, "ADD TABLE tenant_1.outbox");
    let walpost = fixture.start();
    replay(&fixture);
    assert_eq!(count(&fixture, "missed"), 1);
    walpost.terminate().expect_code(0);
}

/// Renaming the schema must not make Walpost copy the table's rows again. Walpost reports the
/// missing rows under the table's new name.
#[test]
fn reports_a_table_renamed_while_it_was_unpublished() {
    let fixture = fixture(&TABLES[..1]);
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start();
    insert(&fixture, &aggregate, TABLES[0], "before");
    fixture.wait_until_confirmed();
    walpost.terminate().expect_code(0);
    alter(&fixture, "DROP TABLE tenant_1.outbox");
    fixture.db.run("ALTER SCHEMA tenant_1 RENAME TO tenant_2");
    insert(&fixture, &aggregate, TABLES[1], "between");
    let init = fixture
        .init()
        .args(["--table", "tenant_2.outbox"])
        .finish()
        .expect_code(0);
    init.expect_mentions(&["table tenant_2.outbox was temporarily missing from publication"]);
    let walpost = fixture.start();
    let replay = ["--dropped-slots", "--table", "tenant_2.outbox", "--yes"];
    fixture.replay(&replay).finish().expect_code(0);
    assert_eq!(count(&fixture, "between"), 1);
    walpost.terminate().expect_code(0);
}

#[test]
fn add_outbox_requires_the_privilege_to_write_to_walpost_table_state() {
    let fixture = fixture_on(MAJOR, SETTINGS, &TABLES[..1]);
    let (role, slot) = (format!("migrator_{}", fixture.name), fixture.slot());
    fixture.db.run(&format!(
        "CREATE ROLE {role}; GRANT USAGE ON SCHEMA walpost TO {role};
         GRANT CREATE ON DATABASE {name} TO {role};
         GRANT SELECT, INSERT, DELETE ON walpost.outbox_row TO {role};
         GRANT EXECUTE ON FUNCTION walpost.add_outbox(regclass, name) TO {role};
         ALTER PUBLICATION {slot} OWNER TO {role};
         CREATE SCHEMA tenant_2 AUTHORIZATION {role};
         SET ROLE {role};
         CREATE TABLE tenant_2.outbox (id uuid, aggregatetype text, aggregateid text, type text, payload jsonb)",
        name = fixture.name
    ));
    let call = format!("SELECT walpost.add_outbox('tenant_2.outbox', '{slot}')");
    let error = fixture.db.try_run(&call).unwrap_err();
    let message = error.as_db_error().unwrap().message();
    assert_eq!(message, "permission denied for table walpost.table_state");
    fixture.db.run(&format!(
        "RESET ROLE; GRANT SELECT, INSERT, UPDATE ON walpost.table_state TO {role}; SET ROLE {role}; {call}; RESET ROLE"
    ));
    fixture.check().finish();
}
