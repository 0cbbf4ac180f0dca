//! A missing slot is replaced by a new one, and the events that the former slot had not delivered
//! are replayed.

use super::{fixture, writer};
use crate::support::event::Event;
use crate::support::fixture::Fixture;
use crate::support::walpost::Invocation;

const TABLES: [&str; 2] = ["tenant_1.outbox", "tenant_2.outbox"];

#[test]
fn reports_events_missed_by_both_slots_until_each_table_is_replayed() {
    let fixture = fixture(&TABLES);
    let aggregates = [fixture.aggregate(1), fixture.aggregate(1)];
    let insert = |table: usize, key: &str| {
        let event = Event::new(&aggregates[table], key, "{}");
        fixture
            .db
            .run(&writer(&TABLES[table..=table]).insert_one(event));
    };
    let walpost = fixture.start();
    insert(0, "before");
    insert(1, "before");
    fixture.wait_until_confirmed();
    walpost.terminate().expect_code(0);
    fixture.drop_slot();
    insert(0, "between");
    insert(1, "between");

    let init = fixture.init().finish().expect_code(0);
    let commands = TABLES.map(|table| {
        format!(
            "walpost replay --dropped-slots --table {table} --pipeline {}",
            fixture.name
        )
    });
    init.expect_mentions(&["may be missing", &commands[0], &commands[1]]);
    let mut walpost = fixture.run().start();
    for command in &commands {
        let line = walpost.wait_for_log(command);
        assert!(line.contains("have not been sent again yet"), "{line}");
    }
    walpost.wait_for_log("streaming");
    for (table, command) in TABLES.iter().zip(&commands) {
        let check = fixture.check().finish().expect_code(3);
        assert!(check.stdout.contains(command), "{}", check.stdout);
        fixture
            .replay(&["--dropped-slots", "--table", table, "--yes"])
            .finish()
            .expect_code(0);
        let check = fixture.check().finish();
        assert!(!check.stdout.contains(command), "{}", check.stdout);
    }
    for aggregate in &aggregates {
        let records = fixture.records();
        let topic = format!("outbox.event.{aggregate}");
        let of_topic = records.iter().filter(|record| record.topic == topic);
        let keys: Vec<_> = of_topic.map(|record| record.key()).collect();
        assert!(keys.contains(&"between"), "{keys:?}");
    }
    walpost.terminate().expect_code(0);
}

#[test]
fn reports_matching_tables_if_the_publication_is_empty() {
    let fixture = fixture(&TABLES);
    let walpost = fixture.start();
    walpost.terminate().expect_code(0);
    fixture.drop_slot();
    for table in TABLES {
        fixture.db.run(&format!(
            "ALTER PUBLICATION {} DROP TABLE {table}",
            fixture.slot()
        ));
    }
    let init = fixture.init().finish().expect_code(0);
    let command = |table| format!("walpost replay --dropped-slots --table {table} --pipeline");
    let commands = TABLES.map(command);
    init.expect_mentions(&["may be missing", &commands[0], &commands[1]]);
}

/// Found by a random walk of `./dev soak --shapes`: `init` was killed after creating the slot but
/// before recording it, and nothing had been read from the former slot.
#[test]
fn halts_on_a_manually_created_slot_if_the_previous_slot_was_never_read() {
    let fixture = fixture(&TABLES);
    let aggregate = fixture.aggregate(1);
    let event = Event::new(&aggregate, "between", "{}");
    fixture.db.run(&writer(&TABLES[..1]).insert_one(event));
    fixture.drop_slot();
    fixture.db.run(&format!(
        "SELECT pg_create_logical_replication_slot('{}', 'pgoutput')",
        fixture.slot()
    ));
    let halted = fixture.run().finish().expect_code(3);
    halted.expect_mentions(&[
        "something else moved it, or dropped and re-created it",
        "walpost replay",
    ]);
}

/// Found by a random walk of `./dev soak --shapes`: the table was renamed, and no pattern in the
/// `tables` setting matched its new name.
#[test]
fn reports_a_renamed_table_whose_undelivered_rows_were_lost_with_the_slot() {
    let fixture = fixture(&TABLES);
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_and_confirm_one(&aggregate, "before");
    walpost.terminate().expect_code(0);
    let event = Event::new(&aggregate, "between", "{}");
    fixture.db.run(&writer(&TABLES[..1]).insert_one(event));
    fixture.db.run("ALTER TABLE tenant_1.outbox RENAME TO old");
    fixture.drop_slot();
    let init = fixture.init().finish().expect_code(0);
    let command = format!(
        "walpost replay --dropped-slots --table tenant_1.old --pipeline {}",
        fixture.name
    );
    init.expect_mentions(&[
        "No pattern in the tables setting matches tenant_1.old",
        &command,
    ]);
    let check = fixture.check().finish().expect_code(3);
    assert!(check.stdout.contains(&command), "{}", check.stdout);
    let settings = "tables = [\"tenant_*.outbox\", \"tenant_1.old\"]\n";
    let file = fixture.file(settings);
    let replay = Invocation::new(["replay", "--config"]).arg(file).args([
        "--dropped-slots",
        "--table",
        "tenant_1.old",
        "--yes",
    ]);
    replay.finish().expect_code(0);
    let records = fixture.records();
    assert!(records.iter().any(|record| record.key() == "between"));
}

/// Found by a random walk of `./dev soak --shapes`: the command that the error suggested failed,
/// because walpost.outbox_row had not been created.
#[test]
fn init_adapts_a_single_table_publication_to_several_tables() {
    let mut fixture = Fixture::bare();
    fixture
        .db
        .run("CREATE SCHEMA tenant_1; CREATE SCHEMA tenant_2");
    fixture.use_settings("table = \"tenant_1.outbox\"\n");
    fixture.write_to(writer(&TABLES));
    fixture.init().finish().expect_code(0);
    let aggregate = fixture.aggregate(1);
    let insert = |fixture: &Fixture<'_>, table: usize| {
        let event = Event::new(&aggregate, TABLES[table], "{}");
        fixture
            .db
            .run(&writer(&TABLES[table..=table]).insert_one(event));
    };
    insert(&fixture, 0);
    fixture.use_settings("tables = [\"tenant_*.outbox\"]\n");
    let init = fixture.init().finish().expect_code(0);
    init.expect_mentions(&["walpost.outbox_row was added to publication"]);
    let add = fixture.init().args(["--table", TABLES[1]]).finish();
    add.expect_code(0);
    insert(&fixture, 1);
    let walpost = fixture.start();
    fixture.wait_for_records(2);
    walpost.terminate().expect_code(0);
    fixture.check().finish().expect_code(0);
}

#[test]
fn reports_events_that_the_former_slot_had_not_delivered() {
    let mut fixture = fixture(&TABLES);
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_and_confirm_one(&aggregate, "before");
    walpost.terminate().expect_code(0);
    fixture.insert(&aggregate, "between");
    let settings = format!(
        "tables = [\"tenant_*.outbox\"]\nslot = \"{}_2\"\n",
        fixture.slot()
    );
    fixture.use_settings(&settings);
    fixture.init().finish().expect_code(0);
    let mut walpost = fixture.run().start();
    for table in TABLES {
        walpost.wait_for_log(&format!("--dropped-slots --table {table}"));
    }
    walpost.wait_for_log("streaming");
    fixture.check().finish().expect_code(3);
    for table in TABLES {
        let replay = fixture.replay(&["--dropped-slots", "--table", table, "--yes"]);
        replay.finish().expect_code(0);
    }
    let records = fixture.records();
    assert!(records.iter().any(|record| record.key() == "between"));
    walpost.terminate().expect_code(0);
    fixture.check().finish().expect_code(0);
}

/// An operator switches the pipeline to a new slot. Because the former slot delivers everything up
/// to the switch, there is no gap.
#[test]
fn reports_no_missing_events_if_the_new_slot_is_created_before_the_pipeline_switches_to_it() {
    let mut fixture = fixture(&TABLES);
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_and_confirm_one(&aggregate, "before");
    let settings = format!(
        "tables = [\"tenant_*.outbox\"]\nslot = \"{}_2\"\n",
        fixture.slot()
    );
    fixture.use_settings(&settings);
    fixture.init().finish().expect_code(0);
    fixture.insert(&aggregate, "between");
    fixture.wait_until_confirmed();
    walpost.terminate().expect_code(0);
    let mut walpost = fixture.run().start();
    walpost.wait_for_log("streaming");
    assert_eq!(walpost.logged("may be missing"), 0, "{}", walpost.log());
    walpost.terminate().expect_code(0);
    fixture.check().finish().expect_code(0);
}
