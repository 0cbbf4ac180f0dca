//! A table is temporarily removed from the publication. The slot never sends rows committed during
//! that time, so Walpost reports them until they are replayed.

use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, MAJORS, Server};
use crate::support::records::keys;
use crate::support::wait::wait_until;
use crate::support::walpost::Walpost;

const GAP: &str = "was temporarily missing from publication";

in_both_modes! {
    reports_and_replays_rows_left_unpublished_while_walpost_was_stopped
    reports_rows_left_unpublished_between_two_checks_while_streaming
    following_the_remedy_in_the_halt_message_loses_no_rows
    reports_rows_of_a_recreated_table
    reports_rows_inserted_while_inserts_were_not_published
}

fn alter(fixture: &Fixture, what: &str) {
    fixture
        .db
        .run(&format!("ALTER PUBLICATION {} {what}", fixture.slot()));
}

/// Returns the number of journal entries about periods in which a table was not published.
pub(crate) fn gaps(fixture: &Fixture) -> i64 {
    fixture
        .db
        .number("SELECT count(*) FROM walpost.journal WHERE detail ? 'left_publication'")
}

/// Asserts that `check` fails until a replay sends the rows that may be missing, including the row
/// with the given key.
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

fn reports_and_replays_rows_left_unpublished_while_walpost_was_stopped(exactly_once: bool) {
    let fixture = Fixture::new().in_mode(exactly_once);
    let aggregate = fixture.aggregate(1);
    stop_after_one(&fixture, &aggregate);
    alter(&fixture, "DROP TABLE outbox");
    fixture.insert(&aggregate, "between");
    alter(&fixture, "ADD TABLE outbox");
    // `check` detects that the table was temporarily not published, even though Walpost has not
    // recorded the gap yet.
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

fn reports_rows_left_unpublished_between_two_checks_while_streaming(exactly_once: bool) {
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

fn following_the_remedy_in_the_halt_message_loses_no_rows(exactly_once: bool) {
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

fn reports_rows_of_a_recreated_table(exactly_once: bool) {
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

fn reports_rows_inserted_while_inserts_were_not_published(exactly_once: bool) {
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
fn records_no_missing_rows_after_harmless_changes_to_a_published_table() {
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

/// In a published schema, a table is published as soon as it exists.
#[test]
fn records_no_missing_rows_for_a_table_recreated_in_a_published_schema() {
    for major in [15, 18] {
        let mut fixture = Fixture::bare_on_servers(Server::shared(major), Broker::shared());
        fixture.use_settings("table = \"events.outbox\"\n");
        fixture.write_to(crate::support::event::EventWriter::Table(
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
        // Moving a table out of the published schema removes it from the publication.
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
fn unpublishing_a_partitioned_table_records_missing_rows_but_replacing_a_partition_does_not() {
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
fn ignores_recorded_table_state_from_a_different_database_or_cluster() {
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
        // If the row in walpost.table_state describes a different cluster or database, Walpost
        // replaces the row with a row for this database.
        let ours = "SELECT count(*) = 1 FROM walpost.table_state t JOIN pg_database d ON d.oid = t.database_oid
             WHERE d.datname = current_database() AND t.memberships <> '1'";
        assert!(fixture.db.is_true(ours), "{other}");
    }
}

#[test]
fn warns_if_walpost_table_state_is_missing_but_reports_no_missing_rows() {
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

/// Walpost records the state of the publication when `walpost init` runs, before the first `run`.
#[test]
fn reports_rows_inserted_before_the_first_run_while_the_table_was_unpublished() {
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
fn halts_on_a_moved_slot_even_if_missing_rows_of_a_table_were_already_recorded() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    stop_after_one(&fixture, &aggregate);
    alter(&fixture, "DROP TABLE outbox");
    alter(&fixture, "ADD TABLE outbox");
    let walpost = start_after_the_gap(&fixture);
    walpost.terminate().expect_code(0);
    crate::slot_state::re_create_slot(&fixture, &aggregate);
    let halted = fixture.run().finish().expect_code(3);
    halted.expect_mentions(&["something else moved it, or dropped and re-created it"]);
}

#[test]
fn init_records_rows_missed_while_the_publication_did_not_exist() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    stop_after_one(&fixture, &aggregate);
    fixture
        .db
        .run(&format!("DROP PUBLICATION {}", fixture.slot()));
    let init = fixture.init().finish().expect_code(0);
    init.expect_mentions(&[GAP, "walpost replay --dropped-slots"]);
    fixture.check().finish().expect_code(3);
    // If the slot is created after the publication is re-created, the slot misses no rows.
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

/// walpost.table_state must be updated regularly, because a replay starts at the last update and
/// would otherwise send many events that were already delivered.
#[test]
fn updates_the_recorded_table_state_while_events_are_delivered() {
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
