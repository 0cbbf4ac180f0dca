//! Rows that do not match the settings. WAL already contains such a row, so the error must contain
//! the position with which an operator can skip the row.

use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, Server};
use crate::support::walpost::Invocation;

in_both_modes! {
    halts_on_a_row_truncated_by_a_column_list_and_allows_it_to_be_skipped
    halts_on_a_row_without_a_required_column_and_allows_it_to_be_skipped
    delivers_columns_of_domains_over_supported_types
}

const TABLE: &str =
    "CREATE TABLE outbox (id int, aggregatetype text, aggregateid text, payload text)";

/// Runs `walpost skip` with the position that the log suggests.
fn skip_from(fixture: &Fixture<'_>, log: &str) {
    let (_, at) = log.rsplit_once("walpost skip --to ").unwrap();
    let at = at.get(..28).expect("a position");
    fixture.skip(at).arg("--yes").finish().expect_code(0);
}

fn halts_on_a_row_truncated_by_a_column_list_and_allows_it_to_be_skipped(exactly_once: bool) {
    let fixture = Fixture::bare_on_servers(Server::shared(17), Broker::shared());
    fixture.db.run(TABLE);
    fixture.init().finish().expect_code(0);
    let fixture = fixture.in_mode(exactly_once);
    let aggregate = fixture.aggregate(1);
    let first = fixture.start();
    fixture.db.run(&format!(
        "INSERT INTO outbox VALUES (1, '{aggregate}', 'k', 'first')"
    ));
    fixture.wait_for_records(1);
    fixture.wait_until_confirmed();
    first.terminate().expect_code(0);
    let publication = fixture.slot();
    fixture.db.run(&format!(
        "ALTER PUBLICATION {publication} SET TABLE outbox (id, aggregatetype, aggregateid)"
    ));
    let check = fixture.check().finish().expect_code(3);
    check.expect_mentions(&["no column \"payload\"", "id, aggregatetype, aggregateid"]);
    for statement in [
        format!("INSERT INTO outbox VALUES (2, '{aggregate}', 'k', 'cut')"),
        format!("ALTER PUBLICATION {publication} SET TABLE outbox"),
        format!("INSERT INTO outbox VALUES (3, '{aggregate}', 'k', 'whole')"),
    ] {
        fixture.db.run(&statement);
    }
    // SET TABLE removes the table from the publication and adds it again. `check` reports a gap
    // between the two changes.
    let check = fixture.check().finish().expect_code(3);
    check.expect_mentions(&["was temporarily missing from publication"]);
    let halted = fixture.run().finish().expect_code(3);
    let halted = halted.expect_mentions(&["halted", "no column \"payload\"", "walpost skip --to"]);
    skip_from(&fixture, &halted.stderr);
    let walpost = fixture.start();
    let records = fixture.wait_for_records(2);
    let found: Vec<_> = records.iter().map(|record| record.text()).collect();
    assert_eq!(found, ["first", "whole"]);
    walpost.terminate().expect_code(0);
}

/// One of the pipeline's several tables was added without `walpost init`, which would have rejected
/// it.
fn halts_on_a_row_without_a_required_column_and_allows_it_to_be_skipped(exactly_once: bool) {
    let mut fixture = Fixture::bare();
    fixture.use_settings("tables = [\"tenant_*.outbox\"]\n");
    fixture.init().finish().expect_code(0);
    let fixture = fixture.in_mode(exactly_once);
    let aggregate = fixture.aggregate(1);
    let publication = fixture.slot();
    fixture.db.run(&format!(
        "CREATE SCHEMA tenant_1; CREATE SCHEMA tenant_2;
         CREATE TABLE tenant_1.outbox (id int, aggregatetype text, aggregateid text, payload text);
         SELECT walpost.add_outbox('tenant_1.outbox', '{publication}');
         CREATE TABLE tenant_2.outbox (id int, aggregatetype text, aggregateid text);
         INSERT INTO tenant_2.outbox VALUES (1, '{aggregate}', 'k');
         SELECT walpost.add_outbox('tenant_2.outbox', '{publication}')"
    ));
    fixture.db.run(&format!(
        "ALTER PUBLICATION {publication} DROP TABLE tenant_2.outbox"
    ));
    fixture.db.run(&format!(
        "INSERT INTO tenant_1.outbox VALUES (2, '{aggregate}', 'k', 'of another tenant')"
    ));
    let halted = fixture.run().finish().expect_code(3);
    let halted = halted.expect_mentions(&["halted", "tenant_2.outbox", "walpost skip --to"]);
    skip_from(&fixture, &halted.stderr);
    let walpost = fixture.start();
    let records = fixture.wait_for_records(1);
    assert_eq!(records[0].text(), "of another tenant");
    walpost.terminate().expect_code(0);
}

fn delivers_columns_of_domains_over_supported_types(exactly_once: bool) {
    let fixture = Fixture::bare();
    fixture.db.run(
        "CREATE DOMAIN document AS jsonb; CREATE DOMAIN body AS document CHECK (VALUE <> '{}');
         CREATE DOMAIN headers_of_event AS json; CREATE DOMAIN moment AS timestamptz;
         CREATE TABLE outbox (id int PRIMARY KEY, aggregatetype text, aggregateid text, payload body,
             headers headers_of_event, at moment)",
    );
    let aggregate = fixture.aggregate(1);
    let row = |id: u32| {
        format!(
            "INSERT INTO outbox VALUES ({id}, '{aggregate}', 'k', '{{\"n\": {id}}}', '{{\"a\": \"b\"}}', '2026-01-02 03:04:05Z')"
        )
    };
    // Insert this row before the slot exists, so that Walpost delivers the row by copying it from
    // the table.
    fixture.db.run(&row(1));
    fixture.init().finish().expect_code(0);
    fixture.check().finish().expect_code(0);
    let fixture = fixture.in_mode(exactly_once);
    let mode = if exactly_once {
        "exactly-once"
    } else {
        "at-least-once"
    };
    let walpost = fixture.start_with_file(&format!("timestamp = 'at'\ndelivery = '{mode}'"));
    fixture.db.run(&row(2));
    let records = fixture.wait_for_records(2);
    for (record, id) in records.iter().zip(1..) {
        assert_eq!(record.text(), format!("{{\"n\": {id}}}"));
        assert_eq!(record.header("a"), "b");
    }
    walpost.terminate().expect_code(0);
}

#[test]
fn delivers_domain_columns_if_only_one_of_several_tables_has_them() {
    let mut fixture = Fixture::bare();
    fixture.use_settings("tables = [\"tenant_*.outbox\"]\n");
    fixture.init().finish().expect_code(0);
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start();
    fixture.db.run(&format!(
        "CREATE DOMAIN body AS jsonb; CREATE SCHEMA tenant_1;
         CREATE TABLE tenant_1.outbox (id int, aggregatetype text, aggregateid text, payload body);
         INSERT INTO tenant_1.outbox VALUES (1, '{aggregate}', 'k', '1')"
    ));
    let add = fixture.init().args(["--table", "tenant_1.outbox"]);
    add.finish().expect_code(0);
    fixture.db.run(&format!(
        "INSERT INTO tenant_1.outbox VALUES (2, '{aggregate}', 'k', '2')"
    ));
    let records = fixture.wait_for_records(2);
    let found: Vec<_> = records.iter().map(|record| record.text()).collect();
    assert_eq!(found, ["1", "2"]);
    walpost.terminate().expect_code(0);
}

#[test]
fn delivers_a_stored_generated_column_that_is_published() {
    let fixture = Fixture::bare_on_servers(Server::shared(18), Broker::shared());
    fixture.db.run(
        "CREATE TABLE outbox (id int PRIMARY KEY, aggregatetype text, aggregateid text, n int,
             payload text GENERATED ALWAYS AS ('event ' || n) STORED)",
    );
    fixture.init().finish().expect_code(0);
    let aggregate = fixture.aggregate(1);
    let check = fixture.check().finish().expect_code(3);
    check.expect_mentions(&["no column \"payload\""]);
    let publication = fixture.slot();
    fixture.db.run(&format!(
        "ALTER PUBLICATION {publication} SET (publish_generated_columns = stored)"
    ));
    fixture.check().finish().expect_code(0);
    let walpost = fixture.start();
    fixture.db.run(&format!(
        "INSERT INTO outbox (id, aggregatetype, aggregateid, n) VALUES (1, '{aggregate}', 'k', 7)"
    ));
    assert_eq!(fixture.wait_for_records(1)[0].text(), "event 7");
    walpost.terminate().expect_code(0);
}

#[test]
fn init_rejects_a_table_that_would_halt_the_pipeline() {
    let mut fixture = Fixture::bare_on_servers(Server::shared(MAJOR), Broker::shared());
    fixture.use_settings("tables = [\"tenant_*.outbox\"]\nmax_row_bytes = '1MiB'\n");
    fixture.init().finish().expect_code(0);
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start();
    fixture.db.run(&format!(
        "CREATE SCHEMA tenant_1; CREATE SCHEMA tenant_2; CREATE SCHEMA tenant_3;
         CREATE TABLE tenant_1.outbox (id int, aggregatetype text, aggregateid text);
         CREATE TABLE tenant_2.outbox (id int, aggregatetype text, aggregateid text, payload text);
         INSERT INTO tenant_2.outbox VALUES (1, '{aggregate}', 'k', repeat('\"', 720000));
         CREATE TABLE tenant_3.outbox (LIKE tenant_2.outbox);
         INSERT INTO tenant_3.outbox VALUES (1, '{aggregate}', 'k', 'fits')"
    ));
    let init = |table: &str| -> Invocation { fixture.init().args(["--table", table]) };
    let refused = init("tenant_1.outbox").finish().expect_code(3);
    refused.expect_mentions(&[
        "tenant_1.outbox",
        "no column \"payload\"",
        "Nothing was changed",
    ]);
    let refused = init("tenant_2.outbox").finish().expect_code(3);
    refused.expect_mentions(&[
        "tenant_2.outbox",
        "expected at most 1048576",
        "max_row_bytes",
    ]);
    let published = fixture.db.number(
        "SELECT count(*) FROM pg_publication_tables WHERE schemaname IN ('tenant_1', 'tenant_2')",
    );
    assert_eq!(published, 0);
    init("tenant_3.outbox").finish().expect_code(0);
    assert_eq!(fixture.wait_for_records(1)[0].text(), "fits");
    walpost.terminate().expect_code(0);
}
