//! A table contains rows when it is added. Because the slot has already passed the transactions
//! that inserted these rows, the rows are written to WAL again as rows of `walpost.outbox_row`.
//! Each of these copies is delivered only through the publication for which it was written.

use super::{SETTINGS, add, fixture, writer};
use crate::support::event::Event;
use crate::support::fixture::Fixture;
use crate::support::wait::wait_until;

const TABLE: &str = "tenant_2.outbox";

fn event(table: &str, aggregate: &str, key: &str) -> String {
    writer(&[table]).insert_one(Event::new(aggregate, key, "{}"))
}

/// Creates a table with an older row that the slot has passed, so that only adding the table can
/// deliver the row.
fn fixture_with_added_table() -> Fixture<'static> {
    let fixture = fixture(&["tenant_1.outbox"]);
    let aggregate = fixture.aggregate(1);
    // Create the second publication first, because PostgreSQL can't decode transactions that
    // precede a publication.
    fixture.db.run(&format!(
        "CREATE SCHEMA tenant_2; CREATE TABLE tenant_2.outbox (LIKE tenant_1.outbox INCLUDING ALL);
         CREATE PUBLICATION {}_2 FOR TABLE walpost.outbox_row, tenant_1.outbox
             WITH (publish = 'insert', publish_via_partition_root)",
        fixture.slot()
    ));
    fixture.db.run(&event(TABLE, &aggregate, "older"));
    let walpost = fixture.start();
    wait_until("catalog_xmin to pass the row", || {
        fixture
            .db
            .run(&event("tenant_1.outbox", &aggregate, "before"));
        fixture.db.run("CHECKPOINT");
        fixture.db.is_true(&format!(
            "SELECT catalog_xmin::text::bigint > (SELECT max(xmin::text::bigint) FROM {TABLE})
             FROM pg_replication_slots WHERE slot_name = '{}'",
            fixture.slot()
        ))
    });
    fixture.wait_until_confirmed();
    walpost.terminate().expect_code(0);
    fixture
}

fn command(fixture: &Fixture<'_>) -> String {
    format!(
        "walpost replay --dropped-slots --table {TABLE} --pipeline {}",
        fixture.name
    )
}

fn expect_replay(fixture: &Fixture<'_>) {
    let check = fixture.check().finish().expect_code(3);
    assert!(check.stdout.contains(&command(fixture)), "{}", check.stdout);
    let has_delivered = || {
        let records = fixture.records();
        records.iter().any(|record| record.key() == "older")
    };
    assert!(!has_delivered());
    let replay = fixture.replay(&["--dropped-slots", "--table", TABLE, "--yes"]);
    replay.finish().expect_code(0);
    assert!(has_delivered());
}

/// Found by a random walk of `./dev soak --shapes` with seed 211777191430145: the reported gap
/// began at the position at which the table was added, so it did not include older rows.
#[test]
fn reports_existing_rows_if_a_different_publication_is_configured() {
    for has_table in [true, false] {
        let mut fixture = fixture_with_added_table();
        let publication = fixture.slot();
        add(&fixture, TABLE, "");
        // A run that delivers nothing must keep the recorded position at which the table was added.
        let without_kafka = fixture.invoke("run").args(["--kafka", "127.0.0.1:9"]);
        without_kafka.start_streaming().kill();
        if has_table {
            fixture.db.run(&format!(
                "ALTER PUBLICATION {publication}_2 ADD TABLE {TABLE}"
            ));
        }
        fixture.use_settings(&format!("{SETTINGS}publication = \"{publication}_2\"\n"));
        let check = fixture.check().finish().expect_code(3);
        check.expect_mentions(&["tenant_2.outbox was temporarily missing from publication"]);
        let mut walpost = fixture.run().start();
        walpost.wait_for_log(&command(&fixture));
        assert_eq!(walpost.logged("outbox_row"), 0, "{}", walpost.log());
        drop(walpost.kill());
        expect_replay(&fixture);
    }
}
