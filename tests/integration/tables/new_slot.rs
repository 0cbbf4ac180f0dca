//! A slot is made in the place of one that is gone, and what that had not delivered is sent again.

use super::{scene, writer};
use crate::support::event::Event;

const TABLES: [&str; 2] = ["tenant_1.outbox", "tenant_2.outbox"];

#[test]
fn events_of_each_table_that_no_slot_has_are_named_until_they_are_sent_again() {
    let scene = scene(&TABLES);
    let aggregates = [scene.aggregate(1), scene.aggregate(1)];
    let insert = |table: usize, key: &str| {
        let event = Event::new(&aggregates[table], key, "{}");
        scene.db.run(&writer(&TABLES[table..=table]).one(event));
    };
    let walpost = scene.start();
    insert(0, "before");
    insert(1, "before");
    scene.wait_until_confirmed();
    walpost.terminate().expect_code(0);
    scene.drop_slot();
    insert(0, "between");
    insert(1, "between");

    let init = scene.init().finish().expect_code(0);
    let commands = TABLES.map(|table| {
        format!(
            "walpost replay --dropped-slots --table {table} --pipeline {}",
            scene.name
        )
    });
    init.expect_says(&["may be missing", &commands[0], &commands[1]]);
    let mut walpost = scene.run().start();
    for command in &commands {
        let line = walpost.wait_for_log(command);
        assert!(line.contains("were not sent again yet"), "{line}");
    }
    walpost.wait_for_log("streaming");
    for (table, command) in TABLES.iter().zip(&commands) {
        let check = scene.check().finish().expect_code(3);
        assert!(check.stdout.contains(command), "{}", check.stdout);
        scene
            .replay(&["--dropped-slots", "--table", table, "--yes"])
            .finish()
            .expect_code(0);
        let check = scene.check().finish();
        assert!(!check.stdout.contains(command), "{}", check.stdout);
    }
    for aggregate in &aggregates {
        let records = scene.records();
        let topic = format!("outbox.event.{aggregate}");
        let of_topic = records.iter().filter(|record| record.topic == topic);
        let keys: Vec<_> = of_topic.map(|record| record.key()).collect();
        assert!(keys.contains(&"between"), "{keys:?}");
    }
    walpost.terminate().expect_code(0);
}

#[test]
fn tables_that_match_are_named_if_the_publication_has_none() {
    let scene = scene(&TABLES);
    let walpost = scene.start();
    walpost.terminate().expect_code(0);
    scene.drop_slot();
    for table in TABLES {
        scene.db.run(&format!(
            "ALTER PUBLICATION {} DROP TABLE {table}",
            scene.slot()
        ));
    }
    let init = scene.init().finish().expect_code(0);
    let command = |table| format!("walpost replay --dropped-slots --table {table} --pipeline");
    let commands = TABLES.map(command);
    init.expect_says(&["may be missing", &commands[0], &commands[1]]);
}

/// Found by a walk of `./dev soak --shapes`: `init` was killed between the slot and its record, and nothing had been read before.
#[test]
fn slot_that_was_never_read_and_is_made_by_hand_halts() {
    let scene = scene(&TABLES);
    let aggregate = scene.aggregate(1);
    let event = Event::new(&aggregate, "between", "{}");
    scene.db.run(&writer(&TABLES[..1]).one(event));
    scene.drop_slot();
    scene.db.run(&format!(
        "SELECT pg_create_logical_replication_slot('{}', 'pgoutput')",
        scene.slot()
    ));
    let halted = scene.run().finish().expect_code(3);
    halted.expect_says(&["was moved or dropped and re-created", "walpost replay"]);
}
