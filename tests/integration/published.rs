//! A table that was temporarily not in the publication: rows committed in the meantime are never
//! sent by the slot, and are reported until they are replayed.

use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, MAJORS, Server};
use crate::support::records::keys;
use crate::support::scene::Scene;
use crate::support::wait::wait_until;
use crate::support::walpost::Walpost;

const GAP: &str = "was not in publication";

in_both_modes! {
    rows_from_between_are_named_after_a_restart_and_sent_again
    rows_from_between_two_looks_are_named_while_it_streams
    following_the_advice_of_the_halt_loses_no_rows
    rows_of_a_table_that_was_re_created_are_named
    rows_from_when_inserts_were_not_published_are_named
}

fn alter(scene: &Scene, what: &str) {
    scene
        .db
        .run(&format!("ALTER PUBLICATION {} {what}", scene.slot()));
}

/// Returns the number of journal entries about tables that were not published.
pub(crate) fn gaps(scene: &Scene) -> i64 {
    scene
        .db
        .number("SELECT count(*) FROM walpost.journal WHERE detail ? 'left_publication'")
}

/// Asserts that `check` fails until a replay sends the rows that may be missing, including the one
/// with this key.
fn expect_replay(scene: &Scene, key: &str) {
    let command = format!("walpost replay --dropped-slots --pipeline {}", scene.name);
    let check = scene.check().finish().expect_code(3);
    assert!(check.stdout.contains(&command), "{}", check.stdout);
    let replay = ["--dropped-slots", "--yes"];
    scene.replay(&replay).finish().expect_code(0);
    let records = scene.records();
    let keys = keys(&records);
    assert!(keys.iter().any(|found| found == key), "{keys:?}");
    scene.check().finish().expect_code(0);
    assert_eq!(gaps(scene), 1);
}

fn stop_after_one(scene: &Scene, aggregate: &str) {
    let walpost = scene.start_and_confirm_one(aggregate, "before");
    walpost.terminate().expect_code(0);
}

fn start_after_the_gap(scene: &Scene) -> Walpost {
    let mut walpost = scene.run().start();
    let line = walpost.wait_for_log(GAP);
    assert!(line.contains("walpost replay --dropped-slots"), "{line}");
    walpost.wait_for_log("streaming");
    walpost
}

fn rows_from_between_are_named_after_a_restart_and_sent_again(exactly_once: bool) {
    let scene = Scene::new().in_mode(exactly_once);
    let aggregate = scene.aggregate(1);
    stop_after_one(&scene, &aggregate);
    alter(&scene, "DROP TABLE outbox");
    scene.insert(&aggregate, "between");
    alter(&scene, "ADD TABLE outbox");
    // The gap is detected even before it has been recorded.
    let check = scene.check().finish().expect_code(3);
    assert!(check.stdout.contains(GAP), "{}", check.stdout);
    let walpost = start_after_the_gap(&scene);
    scene.insert(&aggregate, "after");
    scene.wait_for_records(2);
    expect_replay(&scene, "between");
    walpost.terminate().expect_code(0);
    let walpost = scene.start();
    walpost.terminate().expect_code(0);
    assert_eq!(gaps(&scene), 1);
}

fn rows_from_between_two_looks_are_named_while_it_streams(exactly_once: bool) {
    let scene = Scene::new().in_mode(exactly_once);
    let aggregate = scene.aggregate(1);
    let mut walpost = scene.start_and_confirm_one(&aggregate, "before");
    alter(&scene, "DROP TABLE outbox");
    scene.insert(&aggregate, "between");
    alter(&scene, "ADD TABLE outbox");
    scene.insert(&aggregate, "after");
    assert_eq!(keys(&scene.wait_for_records(2)), ["before", "after"]);
    walpost.wait_for_log(GAP);
    expect_replay(&scene, "between");
    assert_eq!(walpost.logged("reconnecting"), 0, "{}", walpost.log());
    walpost.terminate().expect_code(0);
}

fn following_the_advice_of_the_halt_loses_no_rows(exactly_once: bool) {
    let scene = Scene::new().in_mode(exactly_once);
    let aggregate = scene.aggregate(1);
    let walpost = scene.start_and_confirm_one(&aggregate, "before");
    alter(&scene, "DROP TABLE outbox");
    scene.insert(&aggregate, "between");
    walpost.finish().expect_code(3).expect_mentions(&[
        &format!("ALTER PUBLICATION {} ADD TABLE public.outbox", scene.slot()),
        "walpost replay --dropped-slots",
    ]);
    alter(&scene, "ADD TABLE outbox");
    let walpost = start_after_the_gap(&scene);
    expect_replay(&scene, "between");
    walpost.terminate().expect_code(0);
}

fn rows_of_a_table_that_was_re_created_are_named(exactly_once: bool) {
    let scene = Scene::new().in_mode(exactly_once);
    let aggregate = scene.aggregate(1);
    let mut walpost = scene.start_and_confirm_one(&aggregate, "before");
    scene.db.run(&format!(
        "CREATE TABLE copy (LIKE outbox INCLUDING ALL);
         DROP TABLE outbox;
         ALTER TABLE copy RENAME TO outbox;
         {}
         ALTER PUBLICATION {} ADD TABLE outbox;",
        scene.insert_sql(&aggregate, "between"),
        scene.slot()
    ));
    walpost.wait_for_log(GAP);
    expect_replay(&scene, "between");
    walpost.terminate().expect_code(0);
}

fn rows_from_when_inserts_were_not_published_are_named(exactly_once: bool) {
    let scene = Scene::new().in_mode(exactly_once);
    let aggregate = scene.aggregate(1);
    stop_after_one(&scene, &aggregate);
    alter(&scene, "SET (publish = 'update')");
    scene.insert(&aggregate, "between");
    let halted = scene.run().finish().expect_code(3);
    halted.expect_mentions(&["does not publish inserts", "walpost replay --dropped-slots"]);
    alter(&scene, "SET (publish = 'insert')");
    let walpost = start_after_the_gap(&scene);
    expect_replay(&scene, "between");
    walpost.terminate().expect_code(0);
}

#[test]
fn changes_that_omit_no_row_record_no_gap() {
    for major in MAJORS {
        let scene = Scene::on_servers(Server::shared(major), Broker::shared());
        let aggregate = scene.aggregate(1);
        stop_after_one(&scene, &aggregate);
        let (name, slot) = (&scene.name, scene.slot());
        scene.db.run(&format!(
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
        scene.db.run("VACUUM FULL outbox");
        scene.db.run("VACUUM FREEZE");
        scene.check().finish().expect_code(0);
        let walpost = scene.start();
        scene.insert(&aggregate, "after");
        scene.wait_for_records(2);
        walpost.terminate().expect_code(0);
        assert_eq!(gaps(&scene), 0, "PostgreSQL {major}");
    }
}

/// A table in a published schema is published as soon as it exists.
#[test]
fn table_that_is_re_created_in_a_published_schema_has_no_gap() {
    for major in [15, 18] {
        let mut scene = Scene::bare_on_servers(Server::shared(major), Broker::shared());
        scene.use_settings("table = \"events.outbox\"\n");
        scene.write_to(crate::support::event::Writer::Table(
            "events.outbox".to_owned(),
        ));
        let create = "CREATE TABLE events.outbox (id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload jsonb)";
        scene.db.run(&format!(
            "CREATE SCHEMA events; {create}; CREATE PUBLICATION {} FOR TABLES IN SCHEMA events WITH (publish = 'insert')",
            scene.slot()
        ));
        scene.init().finish().expect_code(0);
        let aggregate = scene.aggregate(1);
        stop_after_one(&scene, &aggregate);
        scene.db.run(&format!("DROP TABLE events.outbox; {create}"));
        scene.insert(&aggregate, "after");
        let walpost = scene.start();
        assert_eq!(keys(&scene.wait_for_records(2)), ["before", "after"]);
        walpost.terminate().expect_code(0);
        assert_eq!(gaps(&scene), 0, "PostgreSQL {major}");
        // A table moved out of the schema is not published.
        scene.db.run("ALTER TABLE events.outbox SET SCHEMA public");
        scene.run().finish().expect_code(3);
        scene.db.run(&format!(
            "INSERT INTO public.outbox VALUES (gen_random_uuid(), '{aggregate}', 'between', 't', '{{}}');
             ALTER TABLE public.outbox SET SCHEMA events"
        ));
        let walpost = start_after_the_gap(&scene);
        expect_replay(&scene, "between");
        walpost.terminate().expect_code(0);
    }
}

#[test]
fn adding_and_removing_partitions_is_no_gap_but_removing_the_root_is_one() {
    for major in [14, 18] {
        let mut scene = Scene::bare_on_servers(Server::shared(major), Broker::shared());
        scene.use_settings("table = \"public.outbox\"\n");
        scene.db.run(
            "CREATE TABLE outbox (id uuid, aggregatetype text, aggregateid text, type text, payload jsonb, PRIMARY KEY (id, type))
                 PARTITION BY LIST (type);
             CREATE TABLE a PARTITION OF outbox DEFAULT",
        );
        scene.init().finish().expect_code(0);
        let aggregate = scene.aggregate(1);
        stop_after_one(&scene, &aggregate);
        scene.db.run(
            "ALTER TABLE outbox DETACH PARTITION a; DROP TABLE a; CREATE TABLE a PARTITION OF outbox DEFAULT",
        );
        let walpost = scene.start_and_confirm_one(&aggregate, "next");
        walpost.terminate().expect_code(0);
        assert_eq!(gaps(&scene), 0, "PostgreSQL {major}");
        alter(&scene, "DROP TABLE outbox");
        scene.insert(&aggregate, "between");
        alter(&scene, "ADD TABLE outbox");
        let walpost = start_after_the_gap(&scene);
        expect_replay(&scene, "between");
        walpost.terminate().expect_code(0);
    }
}

#[test]
fn ignores_records_of_another_database_or_cluster() {
    let scene = Scene::new();
    let aggregate = scene.aggregate(1);
    stop_after_one(&scene, &aggregate);
    for other in ["system_id = '1'", "database_oid = 1"] {
        scene.db.run(&format!(
            "UPDATE walpost.table_state SET memberships = '1', {other}"
        ));
        scene.check().finish().expect_code(0);
        let walpost = scene.start();
        walpost.terminate().expect_code(0);
        assert_eq!(gaps(&scene), 0, "{other}");
        // The record is replaced by the actual state of this database.
        let ours = "SELECT count(*) = 1 FROM walpost.table_state t JOIN pg_database d ON d.oid = t.database_oid
             WHERE d.datname = current_database() AND t.memberships <> '1'";
        assert!(scene.db.is_true(ours), "{other}");
    }
}

#[test]
fn database_without_the_record_has_no_gap_and_is_warned_about() {
    let scene = Scene::new();
    let aggregate = scene.aggregate(1);
    stop_after_one(&scene, &aggregate);
    let create = "walpost.table_state does not exist";
    scene.db.run("DROP TABLE walpost.table_state");
    let check = scene.check().finish().expect_code(0);
    assert!(check.stdout.contains(create), "{}", check.stdout);
    let mut walpost = scene.run().start();
    walpost.wait_for_log(create);
    scene.insert(&aggregate, "without");
    scene.wait_for_records(2);
    walpost.terminate().expect_code(0);
    scene.init().finish().expect_code(0);
    let walpost = scene.start();
    scene.insert(&aggregate, "with");
    scene.wait_for_records(3);
    walpost.terminate().expect_code(0);
    assert_eq!(gaps(&scene), 0);
    let check = scene.check().finish().expect_code(0);
    assert!(!check.stdout.contains(create), "{}", check.stdout);
}

/// The publication is observed from `walpost init` on, before the first `run`.
#[test]
fn rows_from_before_the_first_start_are_named() {
    let scene = Scene::new();
    let aggregate = scene.aggregate(1);
    alter(&scene, "DROP TABLE outbox");
    scene.insert(&aggregate, "between");
    alter(&scene, "ADD TABLE outbox");
    let walpost = start_after_the_gap(&scene);
    expect_replay(&scene, "between");
    walpost.terminate().expect_code(0);
}

#[test]
fn entry_about_a_table_does_not_excuse_a_slot_that_was_moved() {
    let scene = Scene::new();
    let aggregate = scene.aggregate(1);
    stop_after_one(&scene, &aggregate);
    alter(&scene, "DROP TABLE outbox");
    alter(&scene, "ADD TABLE outbox");
    let walpost = start_after_the_gap(&scene);
    walpost.terminate().expect_code(0);
    crate::slot_state::make_anew(&scene, &aggregate);
    let halted = scene.run().finish().expect_code(3);
    halted.expect_mentions(&["moved or dropped and re-created by someone else"]);
}

#[test]
fn init_records_a_gap_for_a_re_created_publication() {
    let scene = Scene::new();
    let aggregate = scene.aggregate(1);
    stop_after_one(&scene, &aggregate);
    scene.db.run(&format!("DROP PUBLICATION {}", scene.slot()));
    let init = scene.init().finish().expect_code(0);
    init.expect_mentions(&[GAP, "walpost replay --dropped-slots"]);
    scene.check().finish().expect_code(3);
    // A slot created along with the publication starts after it, so there is no gap.
    let scene = Scene::new();
    scene.drop_slot();
    scene.db.run(&format!("DROP PUBLICATION {}", scene.slot()));
    scene.init().finish().expect_code(0);
    let aggregate = scene.aggregate(1);
    stop_after_one(&scene, &aggregate);
    assert_eq!(gaps(&scene), 0);
}

/// Events delivered before the last update of the record are not replayed.
#[test]
fn record_is_renewed_while_events_are_delivered() {
    let scene = Scene::on_servers(Server::shared(MAJOR), Broker::shared());
    let aggregate = scene.aggregate(1);
    let walpost = scene.start();
    let row = "SELECT t.xmin::text::bigint FROM walpost.table_state t";
    let written = scene.db.number(row);
    scene.insert(&aggregate, "k");
    wait_until("the row to be written", || scene.db.number(row) != written);
    walpost.terminate().expect_code(0);
}
