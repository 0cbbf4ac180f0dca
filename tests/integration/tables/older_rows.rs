//! Rows that a table had when it was added. WAL contains them as rows of `walpost.outbox_row` for
//! one publication, and their transactions are older than the slot's position at that time.

use super::{SETTINGS, add, scene, writer};
use crate::support::event::Event;
use crate::support::scene::Scene;
use crate::support::wait::wait_until;

const TABLE: &str = "tenant_2.outbox";

fn event(table: &str, aggregate: &str, key: &str) -> String {
    writer(&[table]).insert_one(Event::new(aggregate, key, "{}"))
}

/// Adds a table with an older row, which the slot has not sent.
fn added() -> Scene<'static> {
    let scene = scene(&["tenant_1.outbox"]);
    let aggregate = scene.aggregate(1);
    // PostgreSQL sends nothing that was committed before a publication existed.
    scene.db.run(&format!(
        "CREATE SCHEMA tenant_2; CREATE TABLE tenant_2.outbox (LIKE tenant_1.outbox INCLUDING ALL);
         CREATE PUBLICATION {}_2 FOR TABLE walpost.outbox_row, tenant_1.outbox
             WITH (publish = 'insert', publish_via_partition_root)",
        scene.slot()
    ));
    scene.db.run(&event(TABLE, &aggregate, "older"));
    let walpost = scene.start();
    wait_until("catalog_xmin to pass the row", || {
        scene
            .db
            .run(&event("tenant_1.outbox", &aggregate, "before"));
        scene.db.run("CHECKPOINT");
        scene.db.is_true(&format!(
            "SELECT catalog_xmin::text::bigint > (SELECT max(xmin::text::bigint) FROM {TABLE})
             FROM pg_replication_slots WHERE slot_name = '{}'",
            scene.slot()
        ))
    });
    scene.wait_until_confirmed();
    walpost.terminate().expect_code(0);
    scene
}

fn command(scene: &Scene<'_>) -> String {
    format!(
        "walpost replay --dropped-slots --table {TABLE} --pipeline {}",
        scene.name
    )
}

fn expect_replay(scene: &Scene<'_>) {
    let check = scene.check().finish().expect_code(3);
    assert!(check.stdout.contains(&command(scene)), "{}", check.stdout);
    let has_delivered = || {
        let records = scene.records();
        records.iter().any(|record| record.key() == "older")
    };
    assert!(!has_delivered());
    let replay = scene.replay(&["--dropped-slots", "--table", TABLE, "--yes"]);
    replay.finish().expect_code(0);
    assert!(has_delivered());
}

/// Found by a walk of `./dev soak --shapes` with seed 211777191430145: the reported gap began where
/// the table was added.
#[test]
fn older_rows_are_named_if_the_definition_names_another_publication() {
    for has_table in [true, false] {
        let mut scene = added();
        let publication = scene.slot();
        add(&scene, TABLE, "");
        // A start that delivers nothing keeps the recorded position at which the table was added.
        let without_kafka = scene.invoke("run").args(["--kafka", "127.0.0.1:9"]);
        without_kafka.start_streaming().kill();
        if has_table {
            scene.db.run(&format!(
                "ALTER PUBLICATION {publication}_2 ADD TABLE {TABLE}"
            ));
        }
        scene.use_settings(&format!("{SETTINGS}publication = \"{publication}_2\"\n"));
        let check = scene.check().finish().expect_code(3);
        check.expect_mentions(&["tenant_2.outbox was not in publication"]);
        let mut walpost = scene.run().start();
        walpost.wait_for_log(&command(&scene));
        assert_eq!(walpost.logged("outbox_row"), 0, "{}", walpost.log());
        drop(walpost.kill());
        expect_replay(&scene);
    }
}
