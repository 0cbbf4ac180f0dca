//! A table that was temporarily not in the publication: rows committed in the meantime are never
//! sent by the slot, and are reported until they are replayed.

use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, MAJORS, Server};
use crate::support::records::keys;
use crate::support::wait::wait_until;
use crate::support::walpost::Walpost;

const GAP: &str = "was temporarily missing from publication";

in_both_modes! {
    rows_from_between_are_named_after_a_restart_and_sent_again
    rows_from_between_two_looks_are_named_while_it_streams
    following_the_advice_of_the_halt_loses_no_rows
    rows_of_a_table_that_was_re_created_are_named
    rows_from_when_inserts_were_not_published_are_named
}

fn alter(fixture: &Fixture, what: &str) {
    fixture
        .db
        .run(&format!("ALTER PUBLICATION {} {what}", fixture.slot()));
}

/// Returns the number of journal entries about tables that were not published.
pub(crate) fn gaps(fixture: &Fixture) -> i64 {
    fixture
        .db
        .number("SELECT count(*) FROM walpost.journal WHERE detail ? 'left_publication'")
}

/// Asserts that `check` fails until a replay sends the rows that may be missing, including the one
/// with this key.
fn expect_replay(fixture: &Fixture, key: &str) {
    let command = format!("walpost replay --dropped-slots --pipeline {}", fixture.name);
    let check = fixture.check().finish().expect_code(3);
    assert!(check.stdout.contains(&command), "{}", check.stdout);
    let replay = ["--dropped-slots", "--yes"];
    fixture.replay(&replay).finish().expect_code(0);
    let records = fixture.records();
    let keys = keys(&records);
    assert!(keys.iter().any(|found| found == key), "{keys:?}");
    fixture.check().finish().expect_code(0);
    assert_eq!(gaps(fixture), 1);
}

fn stop_after_one(fixture: &Fixture, aggregate: &str) {
    let walpost = fixture.start_and_confirm_one(aggregate, "before");
    walpost.terminate().expect_code(0);
}

fn start_after_the_gap(fixture: &Fixture) -> Walpost {
    let mut walpost = fixture.run().start();
    let line = walpost.wait_for_log(GAP);
    assert!(line.contains("walpost replay --dropped-slots"), "{line}");
    walpost.wait_for_log("streaming");
    walpost
}

fn rows_from_between_are_named_after_a_restart_and_sent_again(exactly_once: bool) {
    let fixture = Fixture::new().in_mode(exactly_once);
    let aggregate = fixture.aggregate(1);
    stop_after_one(&fixture, &aggregate);
    alter(&fixture, "DROP TABLE outbox");
    fixture.insert(&aggregate, "between");
    alter(&fixture, "ADD TABLE outbox");
    // The gap is detected even before it has been recorded.
    let check = fixture.check().finish().expect_code(3);
    assert!(check.stdout.contains(GAP), "{}", check.stdout);
    let walpost = start_after_the_gap(&fixture);
    fixture.insert(&aggregate, "after");
    fixture.wait_for_records(2);
    expect_replay(&fixture, "between");
    walpost.terminate().expect_code(0);
    let walpost = fixture.start();
    walpost.terminate().expect_code(0);
    assert_eq!(gaps(&fixture), 1);
}

fn rows_from_between_two_looks_are_named_while_it_streams(exactly_once: bool) {
    let fixture = Fixture::new().in_mode(exactly_once);
    let aggregate = fixture.aggregate(1);
    let mut walpost = fixture.start_and_confirm_one(&aggregate, "before");
    alter(&fixture, "DROP TABLE outbox");
    fixture.insert(&aggregate, "between");
    alter(&fixture, "ADD TABLE outbox");
    fixture.insert(&aggregate, "after");
    assert_eq!(keys(&fixture.wait_for_records(2)), ["before", "after"]);
    walpost.wait_for_log(GAP);
    expect_replay(&fixture, "between");
    assert_eq!(walpost.logged("reconnecting"), 0, "{}", walpost.log());
    walpost.terminate().expect_code(0);
}

fn following_the_advice_of_the_halt_loses_no_rows(exactly_once: bool) {
    let fixture = Fixture::new().in_mode(exactly_once);
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_and_confirm_one(&aggregate, "before");
    alter(&fixture, "DROP TABLE outbox");
    fixture.insert(&aggregate, "between");
    walpost.finish().expect_code(3).expect_mentions(&[
        &format!(
            "ALTER PUBLICATION {} ADD TABLE public.outbox",
            fixture.slot()
        ),
        "walpost replay --dropped-slots",
    ]);
    alter(&fixture, "ADD TABLE outbox");
    let walpost = start_after_the_gap(&fixture);
    expect_replay(&fixture, "between");
    walpost.terminate().expect_code(0);
}

fn rows_of_a_table_that_was_re_created_are_named(exactly_once: bool) {
    let fixture = Fixture::new().in_mode(exactly_once);
    let aggregate = fixture.aggregate(1);
    let mut walpost = fixture.start_and_confirm_one(&aggregate, "before");
    fixture.db.run(&format!(
        "CREATE TABLE copy (LIKE outbox INCLUDING ALL);
         DROP TABLE outbox;
         ALTER TABLE copy RENAME TO outbox;
         {}
         ALTER PUBLICATION {} ADD TABLE outbox;",
        fixture.insert_sql(&aggregate, "between"),
        fixture.slot()
    ));
    walpost.wait_for_log(GAP);
    expect_replay(&fixture, "between");
    walpost.terminate().expect_code(0);
}

fn rows_from_when_inserts_were_not_published_are_named(exactly_once: bool) {
    let fixture = Fixture::new().in_mode(exactly_once);
    let aggregate = fixture.aggregate(1);
    stop_after_one(&fixture, &aggregate);
    alter(&fixture, "SET (publish = 'update')");
    fixture.insert(&aggregate, "between");
    let halted = fixture.run().finish().expect_code(3);
    halted.expect_mentions(&["does not publish inserts", "walpost replay --dropped-slots"]);
    alter(&fixture, "SET (publish = 'insert')");
    let walpost = start_after_the_gap(&fixture);
    expect_replay(&fixture, "between");
    walpost.terminate().expect_code(0);
}

#[test]
fn changes_that_omit_no_row_record_no_gap() {
    for major in MAJORS {
        let fixture = Fixture::on_servers(Server::shared(major), Broker::shared());
        let aggregate = fixture.aggregate(1);
        stop_after_one(&fixture, &aggregate);
        let (name, slot) = (&fixture.name, fixture.slot());
        fixture.db.run(&format!(
            "TRUNCATE outbox;
             ALTER TABLE outbox ADD extra text DEFAULT clock_timestamp()::text;
             REINDEX TABLE outbox;
             ALTER TABLE outbox RENAME TO elsewhere;
             ALTER TABLE elsewhere RENAME TO outbox;
             CREATE ROLE \"owner_{name}\" SUPERUSER;
             ALTER TABLE outbox OWNER TO \"owner_{name}\";
             ALTER PUBLICATION {slot} OWNER TO \"owner_{name}\";
             ALTER PUBLICATION {slot} OWNER TO CURRENT_USER;
             ALTER TABLE outbox OWNER TO CURRENT_USER;
             DROP ROLE \"owner_{name}\";
             ALTER PUBLICATION {slot} SET TABLE outbox;
             ALTER PUBLICATION {slot} SET (publish = 'insert, update');
             ALTER PUBLICATION {slot} SET (publish = 'insert')"
        ));
        fixture.db.run("VACUUM FULL outbox");
        fixture.db.run("VACUUM FREEZE");
        fixture.check().finish().expect_code(0);
        let walpost = fixture.start();
        fixture.insert(&aggregate, "after");
        fixture.wait_for_records(2);
        walpost.terminate().expect_code(0);
        assert_eq!(gaps(&fixture), 0, "PostgreSQL {major}");
    }
}

/// A table in a published schema is published as soon as it exists.
#[test]
fn table_that_is_re_created_in_a_published_schema_has_no_gap() {
    for major in [15, 18] {
        let mut fixture = Fixture::bare_on_servers(Server::shared(major), Broker::shared());
        fixture.use_settings("table = \"events.outbox\"\n");
        fixture.write_to(crate::support::event::Writer::Table(
            "events.outbox".to_owned(),
        ));
        let create = "CREATE TABLE events.outbox (id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload jsonb)";
        fixture.db.run(&format!(
            "CREATE SCHEMA events; {create}; CREATE PUBLICATION {} FOR TABLES IN SCHEMA events WITH (publish = 'insert')",
            fixture.slot()
        ));
        fixture.init().finish().expect_code(0);
        let aggregate = fixture.aggregate(1);
        stop_after_one(&fixture, &aggregate);
        fixture
            .db
            .run(&format!("DROP TABLE events.outbox; {create}"));
        fixture.insert(&aggregate, "after");
        let walpost = fixture.start();
        assert_eq!(keys(&fixture.wait_for_records(2)), ["before", "after"]);
        walpost.terminate().expect_code(0);
        assert_eq!(gaps(&fixture), 0, "PostgreSQL {major}");
        // A table moved out of the schema is not published.
        fixture
            .db
            .run("ALTER TABLE events.outbox SET SCHEMA public");
        fixture.run().finish().expect_code(3);
        fixture.db.run(&format!(
            "INSERT INTO public.outbox VALUES (gen_random_uuid(), '{aggregate}', 'between', 't', '{{}}');
             ALTER TABLE public.outbox SET SCHEMA events"
        ));
        let walpost = start_after_the_gap(&fixture);
        expect_replay(&fixture, "between");
        walpost.terminate().expect_code(0);
    }
}

#[test]
fn adding_and_removing_partitions_is_no_gap_but_removing_the_root_is_one() {
    for major in [14, 18] {
        let mut fixture = Fixture::bare_on_servers(Server::shared(major), Broker::shared());
        fixture.use_settings("table = \"public.outbox\"\n");
        fixture.db.run(
            "CREATE TABLE outbox (id uuid, aggregatetype text, aggregateid text, type text, payload jsonb, PRIMARY KEY (id, type))
                 PARTITION BY LIST (type);
             CREATE TABLE a PARTITION OF outbox DEFAULT",
        );
        fixture.init().finish().expect_code(0);
        let aggregate = fixture.aggregate(1);
        stop_after_one(&fixture, &aggregate);
        fixture.db.run(
            "ALTER TABLE outbox DETACH PARTITION a; DROP TABLE a; CREATE TABLE a PARTITION OF outbox DEFAULT",
        );
        let walpost = fixture.start_and_confirm_one(&aggregate, "next");
        walpost.terminate().expect_code(0);
        assert_eq!(gaps(&fixture), 0, "PostgreSQL {major}");
        alter(&fixture, "DROP TABLE outbox");
        fixture.insert(&aggregate, "between");
        alter(&fixture, "ADD TABLE outbox");
        let walpost = start_after_the_gap(&fixture);
        expect_replay(&fixture, "between");
        walpost.terminate().expect_code(0);
    }
}

#[test]
fn ignores_records_of_another_database_or_cluster() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    stop_after_one(&fixture, &aggregate);
    for other in ["system_id = '1'", "database_oid = 1"] {
        fixture.db.run(&format!(
            "UPDATE walpost.table_state SET memberships = '1', {other}"
        ));
        fixture.check().finish().expect_code(0);
        let walpost = fixture.start();
        walpost.terminate().expect_code(0);
        assert_eq!(gaps(&fixture), 0, "{other}");
        // The record is replaced by the actual state of this database.
        let ours = "SELECT count(*) = 1 FROM walpost.table_state t JOIN pg_database d ON d.oid = t.database_oid
             WHERE d.datname = current_database() AND t.memberships <> '1'";
        assert!(fixture.db.is_true(ours), "{other}");
    }
}

#[test]
fn database_without_the_record_has_no_gap_and_is_warned_about() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    stop_after_one(&fixture, &aggregate);
    let create = "walpost.table_state does not exist";
    fixture.db.run("DROP TABLE walpost.table_state");
    let check = fixture.check().finish().expect_code(0);
    assert!(check.stdout.contains(create), "{}", check.stdout);
    let mut walpost = fixture.run().start();
    walpost.wait_for_log(create);
    fixture.insert(&aggregate, "without");
    fixture.wait_for_records(2);
    walpost.terminate().expect_code(0);
    fixture.init().finish().expect_code(0);
    let walpost = fixture.start();
    fixture.insert(&aggregate, "with");
    fixture.wait_for_records(3);
    walpost.terminate().expect_code(0);
    assert_eq!(gaps(&fixture), 0);
    let check = fixture.check().finish().expect_code(0);
    assert!(!check.stdout.contains(create), "{}", check.stdout);
}

/// The publication is observed from `walpost init` on, before the first `run`.
#[test]
fn rows_from_before_the_first_start_are_named() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    alter(&fixture, "DROP TABLE outbox");
    fixture.insert(&aggregate, "between");
    alter(&fixture, "ADD TABLE outbox");
    let walpost = start_after_the_gap(&fixture);
    expect_replay(&fixture, "between");
    walpost.terminate().expect_code(0);
}

#[test]
fn entry_about_a_table_does_not_excuse_a_slot_that_was_moved() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    stop_after_one(&fixture, &aggregate);
    alter(&fixture, "DROP TABLE outbox");
    alter(&fixture, "ADD TABLE outbox");
    let walpost = start_after_the_gap(&fixture);
    walpost.terminate().expect_code(0);
    crate::slot_state::make_anew(&fixture, &aggregate);
    let halted = fixture.run().finish().expect_code(3);
    halted.expect_mentions(&["something else moved it, or dropped and re-created it"]);
}

#[test]
fn init_records_a_gap_for_a_re_created_publication() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    stop_after_one(&fixture, &aggregate);
    fixture
        .db
        .run(&format!("DROP PUBLICATION {}", fixture.slot()));
    let init = fixture.init().finish().expect_code(0);
    init.expect_mentions(&[GAP, "walpost replay --dropped-slots"]);
    fixture.check().finish().expect_code(3);
    // A slot created along with the publication starts after it, so there is no gap.
    let fixture = Fixture::new();
    fixture.drop_slot();
    fixture
        .db
        .run(&format!("DROP PUBLICATION {}", fixture.slot()));
    fixture.init().finish().expect_code(0);
    let aggregate = fixture.aggregate(1);
    stop_after_one(&fixture, &aggregate);
    assert_eq!(gaps(&fixture), 0);
}

/// Events delivered before the last update of the record are not replayed.
#[test]
fn record_is_renewed_while_events_are_delivered() {
    let fixture = Fixture::on_servers(Server::shared(MAJOR), Broker::shared());
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start();
    let row = "SELECT t.xmin::text::bigint FROM walpost.table_state t";
    let written = fixture.db.number(row);
    fixture.insert(&aggregate, "k");
    wait_until("the row to be written", || {
        fixture.db.number(row) != written
    });
    walpost.terminate().expect_code(0);
}
