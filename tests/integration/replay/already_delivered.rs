//! Events are reported as possibly missing, and an operator records that they were delivered.

use crate::support::event::{Event, EventWriter};
use crate::support::fixture::Fixture;
use crate::support::walpost::Finished;

const TABLES: [&str; 2] = ["tenant_1.outbox", "tenant_2.outbox"];

fn writer(tables: &[&str]) -> EventWriter {
    EventWriter::Tables {
        name_pattern: "tenant%".to_owned(),
        tables: tables.iter().map(|&table| table.to_owned()).collect(),
    }
}

/// Creates two tables and delivers their events. Then makes the cluster look like a different one,
/// as `pg_upgrade` does.
fn fixture_after_cluster_change() -> Fixture<'static> {
    let mut fixture = Fixture::bare();
    fixture.use_settings("tables = [\"tenant_*.outbox\"]\n");
    fixture.write_to(writer(&TABLES));
    fixture
        .db
        .run("CREATE SCHEMA tenant_1; CREATE SCHEMA tenant_2");
    fixture.init().finish().expect_code(0);
    for table in TABLES {
        let init = fixture.init().args(["--table", table]).finish();
        init.expect_code(0);
    }
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start();
    for table in TABLES {
        let event = Event::new(&aggregate, "k", "{}");
        fixture.db.run(&writer(&[table]).insert_one(event));
    }
    fixture.wait_for_records(2);
    fixture.wait_until_confirmed();
    walpost.terminate().expect_code(0);
    fixture.drop_slot();
    fixture
        .db
        .run("UPDATE walpost.slot_state SET system_id = '1'");
    let init = fixture.init().finish().expect_code(0);
    let settle = format!(
        "walpost replay --dropped-slots --already-delivered --table {} --pipeline {} ",
        TABLES[0], fixture.name
    );
    init.expect_mentions(&["slot created on another cluster", &settle]);
    fixture
}

fn settle(fixture: &Fixture<'_>, more: &[&str]) -> Finished {
    let mut arguments = vec!["--dropped-slots", "--already-delivered"];
    arguments.extend(more);
    fixture.replay(&arguments).finish()
}

#[test]
fn operator_can_mark_missing_events_as_already_delivered() {
    let fixture = fixture_after_cluster_change();
    // The journal entry must remain open until the operator confirms.
    let listed = settle(&fixture, &["--dry-run"]).expect_code(0);
    listed.expect_mentions(&[
        "of table tenant_1.outbox",
        "of table tenant_2.outbox",
        "nothing was recorded",
    ]);
    settle(&fixture, &[]).expect_code(2);
    let check = fixture.check().finish().expect_code(3);
    assert!(
        check.stdout.contains("--table tenant_1.outbox"),
        "{}",
        check.stdout
    );
    // Close the gap of one table first, then the gaps of all remaining tables.
    settle(&fixture, &["--table", TABLES[0], "--yes"]).expect_code(0);
    let check = fixture.check().finish().expect_code(3);
    assert!(
        !check.stdout.contains("--table tenant_1.outbox"),
        "{}",
        check.stdout
    );
    assert!(
        check.stdout.contains("--table tenant_2.outbox"),
        "{}",
        check.stdout
    );
    settle(&fixture, &["--yes"]).expect_code(0);
    fixture.check().finish().expect_code(0);
    settle(&fixture, &["--yes"]).expect_code(2);
    assert_eq!(fixture.records().len(), 2);
    let settled = fixture.db.rows(
        "SELECT by_role = session_user AND detail ->> 'already_delivered' = 'true' FROM walpost.journal WHERE action = 'replay'",
    );
    assert_eq!(settled, vec![vec![Some("t".to_owned())]; 2]);
    let walpost = fixture.start();
    walpost.terminate().expect_code(0);
}

#[test]
fn operator_can_mark_missing_events_of_a_dropped_table_as_already_delivered() {
    let fixture = fixture_after_cluster_change();
    fixture.db.run("DROP TABLE tenant_1.outbox");
    let replay = fixture.replay(&["--dropped-slots", "--table", TABLES[0], "--yes"]);
    let replay = replay.finish().expect_code(3);
    replay.expect_mentions(&["does not exist", "--already-delivered"]);
    settle(&fixture, &["--table", TABLES[0], "--yes"]).expect_code(0);
    let check = fixture.check().finish();
    assert!(
        !check.stdout.contains("--table tenant_1.outbox"),
        "{}",
        check.stdout
    );
}

/// Creates a gap in each of two tables, and closes the gap of the first table. Then removes the
/// second table from the publication and starts Walpost.
pub(crate) fn settled() -> Fixture<'static> {
    let fixture = fixture_after_cluster_change();
    settle(&fixture, &["--table", TABLES[0], "--yes"]).expect_code(0);
    fixture.db.run(&format!(
        "ALTER PUBLICATION {} DROP TABLE {}",
        fixture.slot(),
        TABLES[1]
    ));
    let halted = fixture.start();
    halted.terminate().expect_code(0);
    fixture
}
