//! Tables are added before the pipeline's slot exists.

use super::{SETTINGS, writer};
use crate::init::{psql_file, try_psql};
use crate::support::event::Event;
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, Server};
use crate::support::records::{Record, keys};
use crate::support::wait::wait_until;

const TABLE: &str = "tenant_1.outbox";

/// Creates a publication for several outboxes and a table with one row, but no slot.
fn fixture_without_slot(server: &Server) -> Fixture<'_> {
    let mut fixture = Fixture::bare_on_servers(server, Broker::shared());
    fixture.use_settings(SETTINGS);
    fixture.write_to(writer(&[TABLE]));
    for file in ["guard.sql", "journal.sql", "tables.sql"] {
        psql_file(&fixture, file);
    }
    let aggregate = fixture.aggregate(1);
    let event = writer(&[TABLE]).insert_one(Event::new(&aggregate, "early", "{}"));
    fixture.db.run(&format!(
        "CREATE PUBLICATION {} FOR TABLE walpost.outbox_row WITH (publish = 'insert', publish_via_partition_root = true);
         CREATE SCHEMA tenant_1;
         CREATE TABLE {TABLE} (id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload jsonb);
         {event}",
        fixture.slot(),
    ));
    fixture
}

fn add(fixture: &Fixture) -> String {
    format!("SELECT walpost.add_outbox('{TABLE}', '{}')", fixture.slot())
}

/// Creates another pipeline's slot in the same database.
fn create_other_slot(fixture: &Fixture) -> String {
    let other = format!("other_{}", fixture.name);
    fixture.db.run(&format!(
        "SELECT pg_create_logical_replication_slot('{other}', 'pgoutput')"
    ));
    other
}

fn drop_slot(fixture: &Fixture, slot: &str) {
    fixture.db.run(&format!(
        "SELECT pg_catalog.pg_drop_replication_slot('{slot}')"
    ));
}

fn expect_early_row_once(fixture: &Fixture) {
    let walpost = fixture.start();
    let late = writer(&[TABLE]).insert_one(Event::new(&fixture.aggregate(1), "late", "{}"));
    fixture.db.run(&late);
    let is_last = |record: &Record| record.key() == "late";
    wait_until("the last event", || fixture.records().iter().any(is_last));
    let early = |record: &&Record| record.key() == "early";
    let records = fixture.records();
    assert_eq!(
        records.iter().filter(early).count(),
        1,
        "{:?}",
        keys(&records)
    );
    walpost.terminate().expect_code(0);
}

#[test]
fn rejects_adding_a_table_before_the_slot_exists() {
    for major in [14, MAJOR, 18] {
        let fixture = fixture_without_slot(Server::shared(major));
        let error = fixture
            .db
            .try_run(&add(&fixture))
            .expect_err("there is no slot");
        let message = error.as_db_error().expect("an answer").message();
        assert!(
            message.starts_with("no replication slot of database"),
            "{message}"
        );
        // Follow the remedy in the error by creating the slot first.
        fixture.init().finish().expect_code(0);
        expect_early_row_once(&fixture);
    }
}

#[test]
fn rejects_adding_a_table_while_the_slot_is_being_created() {
    let server = Server::private(MAJOR, "");
    let fixture = fixture_without_slot(&server);
    let open = fixture.server.session(&fixture.name);
    open.run("BEGIN; SELECT pg_current_xact_id()");
    let init = fixture.init().start();
    wait_for_slot_creation(&fixture);
    let error = fixture
        .db
        .try_run(&add(&fixture))
        .expect_err("there is no slot");
    let message = error.as_db_error().expect("an answer").message();
    assert!(
        message.starts_with("no replication slot of database"),
        "{message}"
    );
    open.run("COMMIT");
    init.finish().expect_code(0);
    expect_early_row_once(&fixture);
}

/// Waits until the creation of a slot is blocked by an open transaction. The server must be
/// private, because that transaction may be in any database.
fn wait_for_slot_creation(fixture: &Fixture) {
    wait_until("the slot to wait for the open transaction", || {
        fixture.db.is_true(
            "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND locktype = 'transactionid')",
        )
    });
}

/// The publication already contains a table, but the only existing slot belongs to another pipeline
/// and does not deliver that table.
#[test]
fn init_rejects_a_publication_that_already_contains_tables() {
    for major in [14, MAJOR, 18] {
        let fixture = fixture_without_slot(Server::shared(major));
        let other = create_other_slot(&fixture);
        assert_eq!(fixture.db.number(&add(&fixture)), 1);
        let publication = fixture.slot();
        let remedy = format!("ALTER PUBLICATION {publication} DROP TABLE ONLY {TABLE}");
        let slot_file = concat!(env!("CARGO_MANIFEST_DIR"), "/sql/slot.sql");
        let refused = try_psql(&fixture, slot_file.as_ref());
        let message = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(
            !refused.status.success() && message.contains(&remedy),
            "{message}"
        );
        let add_again = format!("-v publication='{publication}' -f sql/add_outbox.sql");
        assert!(message.contains(&add_again), "{message}");
        fixture
            .init()
            .finish()
            .expect_code(3)
            .expect_mentions(&[&format!("publication {publication} has tables"), &remedy]);
        fixture.db.run(&remedy);
        fixture.init().finish().expect_code(0);
        drop_slot(&fixture, &other);
        expect_early_row_once(&fixture);
        // After the slot is dropped, `init` must be able to create it again.
        fixture.drop_slot();
        fixture.init().finish().expect_code(0);
    }
}

#[test]
fn reports_and_replays_rows_of_a_table_added_while_the_slot_is_being_created() {
    let server = Server::private(MAJOR, "");
    let fixture = fixture_without_slot(&server);
    let other = create_other_slot(&fixture);
    let open = fixture.server.session(&fixture.name);
    open.run("BEGIN; SELECT pg_current_xact_id()");
    let init = fixture.init().start();
    wait_for_slot_creation(&fixture);
    assert_eq!(fixture.db.number(&add(&fixture)), 1);
    open.run("COMMIT");
    let remedy = format!("walpost replay --dropped-slots --table {TABLE}");
    init.finish().expect_code(0).expect_mentions(&[
        "tables were added before slot creation was complete",
        "may be missing",
        &remedy,
    ]);
    drop_slot(&fixture, &other);
    let walpost = fixture.start();
    fixture
        .check()
        .finish()
        .expect_code(3)
        .expect_mentions(&[&remedy]);
    fixture
        .replay(&["--dropped-slots", "--table", TABLE, "--yes"])
        .finish()
        .expect_code(0);
    assert_eq!(fixture.wait_for_records(1)[0].key(), "early");
    walpost.terminate().expect_code(0);
}
