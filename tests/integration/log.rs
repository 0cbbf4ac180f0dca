//! The outbox without a table: what it has that a table has not. Delivery, order, crashes and
//! outages are tested for both kinds of outbox where they are tested for tables.

use std::fs;

use crate::init::psql;
use crate::support::checker::Resends;
use crate::support::event::{Event, Outbox, Writer};
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, MAJORS, Server};
use crate::support::reaper;
use crate::support::scene::{Scene, parse_position};

const ID: &str = "406c07f3-26f0-4eea-a50c-109940064b8f";

for_each_outbox! {
    database_in_another_encoding_is_delivered_in_utf8
}

fn in_the_log() -> Scene<'static> {
    Scene::of(Outbox::Log)
}

/// `walpost.publish` with these arguments and the scene's prefix, of which the statement is `more`.
fn publish(scene: &Scene, arguments: &str) -> String {
    format!(
        "SELECT walpost.publish({arguments}, prefix => 'walpost_{}');",
        scene.name
    )
}

/// The number of a field of the log line `stopped`.
fn counted(log: &str, field: &str) -> u64 {
    let line = log.lines().find(|line| line.contains("stopped"));
    let line = line.expect("a line stopped");
    let (_, rest) = line.split_once(&format!("{field}=")).expect(line);
    let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().unwrap()
}

#[test]
fn init_makes_functions_and_an_empty_publication_on_every_version() {
    for major in MAJORS {
        let scene = Scene::of_on(Outbox::Log, Server::shared(major), Broker::shared());
        scene.init().finish().expect_code(0);
        let functions = "SELECT count(*) FROM pg_proc WHERE pronamespace = 'walpost'::regnamespace";
        assert_eq!(scene.db.number(functions), 2, "{major}");
        let tables = "SELECT count(*) FROM pg_publication_tables";
        assert_eq!(scene.db.number(tables), 0, "{major}");
        let relations = "SELECT count(*) FROM pg_class WHERE relnamespace = 'public'::regnamespace";
        assert_eq!(scene.db.number(relations), 0, "{major}: no table");
        scene
            .check()
            .finish()
            .expect_code(0)
            .expect_says(&["walpost.publish is there", "fit together"]);
        let aggregate = scene.aggregate(1);
        let walpost = scene.start();
        scene.insert(&aggregate, "k");
        scene.settle(walpost, &[], Resends::Never);
    }
}

#[test]
fn init_print_shows_sql_that_does_the_same_and_changes_nothing() {
    let scene = Scene::bare_of(Outbox::Log, Server::shared(MAJOR), Broker::shared(), "");
    let finished = scene.init().arg("--print").finish().expect_code(0);
    assert!(
        !scene
            .db
            .is_true("SELECT to_regnamespace('walpost') IS NOT NULL")
    );
    let file = reaper::folder("printed").join("init.sql");
    fs::write(&file, finished.stdout).unwrap();
    psql(&scene, &file);
    scene.check().finish().expect_code(0);
}

#[test]
fn role_of_init_is_enough_to_run_and_anybody_may_publish() {
    let server = Server::private(MAJOR, "");
    let scene = Scene::bare_of(Outbox::Log, &server, Broker::shared(), "");
    for _ in 0..2 {
        let init = scene.invoke("init").args(["--role", "connector"]);
        init.finish().expect_code(0);
    }
    scene.db.run("CREATE ROLE shop LOGIN");
    let as_role = |role: &str| {
        scene
            .conninfo()
            .replace("user=postgres", &format!("user={role}"))
    };
    let kafka = scene.broker.address();
    let check = scene.invoke_as("check", &as_role("connector"));
    check.args(["--kafka", &kafka]).finish().expect_code(0);
    let aggregate = scene.aggregate(1);
    let mut walpost = scene.run_as(&as_role("connector")).start();
    walpost.wait_for_log("streaming");
    let shop = crate::support::session::Session::connect(&as_role("shop")).unwrap();
    let event = publish(&scene, &format!("'{aggregate}', 'k', 't', '{{}}'"));
    shop.run(&event);
    scene.wait_for_records(1);

    // What is taken away, as sql/publish.sql describes it, stays so.
    scene.db.run(
        "REVOKE USAGE ON SCHEMA walpost FROM PUBLIC;
         REVOKE EXECUTE ON FUNCTION pg_logical_emit_message(boolean, text, text),
             pg_logical_emit_message(boolean, text, bytea) FROM PUBLIC",
    );
    scene
        .invoke("init")
        .arg("--no-role")
        .finish()
        .expect_code(0);
    shop.try_run(&event).unwrap_err();
    scene.db.run(
        "GRANT USAGE ON SCHEMA walpost TO shop;
         GRANT EXECUTE ON FUNCTION pg_logical_emit_message(boolean, text, bytea) TO shop",
    );
    shop.run(&event);
    scene.wait_for_records(2);
    scene.db.run(
        "REVOKE EXECUTE ON FUNCTION pg_logical_emit_message(boolean, text, bytea) FROM shop;
         ALTER FUNCTION walpost.publish_bytes(text, text, text, bytea, jsonb, uuid, text) SECURITY DEFINER
             SET search_path = pg_catalog, pg_temp",
    );
    shop.run(&event);
    scene.wait_for_records(3);
    walpost.terminate().expect_code(0);
}

#[test]
fn event_has_the_columns_of_the_table() {
    let scene = in_the_log();
    let topic = format!("{}-events", scene.name);
    scene.topic(&topic, 1, &[]);
    let walpost = scene.start_with_file(
        "topic = '{aggregatetype}-events'
         key = '{type}:{aggregateid}'
         timestamp = 'created_at'
         headers = { id = '{id}', at = '{created_at}' }",
    );
    scene.db.run(&format!(
        "BEGIN; CREATE TABLE remembered AS SELECT now() AS at; {} COMMIT",
        publish(
            &scene,
            &format!(
                "'{}', 'ключ-鍵', 'Größe', '{{\"b\": [1, null],  \"a\": \"é\"}}', headers => '{{\"n\": 1.50}}', id => '{ID}'",
                scene.name
            )
        )
    ));
    let record = scene.wait_for_records(1).remove(0);
    assert_eq!(
        (record.topic.as_str(), record.key()),
        (&*topic, "Größe:ключ-鍵")
    );
    assert_eq!(record.text(), r#"{"a": "é", "b": [1, null]}"#);
    assert_eq!(record.header_names(), ["at", "id", "walpost-position", "n"]);
    assert_eq!((record.header("id"), record.header("n")), (ID, "1.50"));
    scene.db.run("SET TIME ZONE 'UTC'");
    let at = scene.db.value("SELECT at::text FROM remembered");
    assert_eq!(record.header("at"), at.unwrap());
    let millis = scene
        .db
        .number("SELECT floor(extract(epoch FROM at) * 1000)::bigint FROM remembered");
    assert_eq!(record.timestamp, millis);
    walpost.terminate().expect_code(0);
}

#[test]
fn payload_of_bytes_and_null_are_delivered() {
    let scene = in_the_log();
    let aggregate = scene.aggregate(1);
    let prefix = format!("walpost_{}", scene.name);
    let walpost = scene.start_with(&["--null-payload", "tombstone"]);
    for payload in ["'\\x00ff5c780a'", "''", "NULL"] {
        scene.db.run(&format!(
            "SELECT walpost.publish_bytes('{aggregate}', 'k', 't', {payload}, prefix => '{prefix}')"
        ));
    }
    scene
        .db
        .run(&publish(&scene, &format!("'{aggregate}', 'k', 't', NULL")));
    let payloads: Vec<_> = scene
        .wait_for_records(4)
        .into_iter()
        .map(|record| record.payload)
        .collect();
    let bytes = Some(vec![0x00, 0xff, 0x5c, 0x78, 0x0a]);
    assert_eq!(payloads, [bytes, Some(vec![]), None, None]);
    walpost.terminate().expect_code(0);
}

#[test]
fn publish_returns_the_id_of_the_event() {
    let scene = in_the_log();
    let aggregate = scene.aggregate(1);
    let walpost = scene.start();
    let id = scene.db.value(&publish(
        &scene,
        &format!("'{aggregate}', 'k', 't', '{{}}'"),
    ));
    assert_eq!(scene.wait_for_records(1)[0].header("id"), id.unwrap());
    walpost.terminate().expect_code(0);
}

#[test]
fn publish_refuses_what_the_table_refuses() {
    let scene = in_the_log();
    let refused = |arguments: &str, text: &str| {
        let error = scene.db.try_run(&publish(&scene, arguments)).unwrap_err();
        let message = error.as_db_error().unwrap().message().to_owned();
        assert!(message.contains(text), "{text:?} in {message:?}");
    };
    for arguments in [
        "NULL, 'k', 't', '{}'",
        "'a', NULL, 't', '{}'",
        "'a', 'k', NULL, '{}'",
        "'a', 'k', 't', '{}', id => NULL",
    ] {
        refused(arguments, "null");
    }
    let no_prefix = "SELECT walpost.publish('a', 'k', 't', '{}', prefix => NULL)";
    scene.db.try_run(no_prefix).unwrap_err();
    refused("'a', 'k', 't', '{}', '[1]'", "JSON object, not array");
    let large =
        |megabytes: usize| format!("'a', 'k', 't', to_jsonb(repeat('x', {megabytes} * 1048576))");
    refused(&large(17), "at most 16777216");
    scene.db.run(&publish(&scene, &large(15)));
    assert_eq!(
        scene.history().len(),
        1,
        "nothing of the others was written"
    );
}

fn database_in_another_encoding_is_delivered_in_utf8(outbox: Outbox) {
    let latin1 = "ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C'";
    let scene = Scene::bare_of(outbox, Server::shared(MAJOR), Broker::shared(), latin1);
    scene.init().finish().expect_code(0);
    assert_eq!(scene.db.value("SHOW server_encoding").unwrap(), "LATIN1");
    let aggregate = scene.aggregate(1);
    let walpost = scene.start_with(&["--key", "{aggregateid}/{type}"]);
    let event = Event::new(&aggregate, "Größe", r#"{"note": "señor"}"#);
    scene.db.run(&scene.events().one(event));
    let record = scene.wait_for_records(1).remove(0);
    assert_eq!(
        (record.key(), record.text()),
        ("Größe/Happened", r#"{"note": "señor"}"#)
    );
    scene.settle(walpost, &[], Resends::Never);
}

#[test]
fn outboxes_in_one_database_are_told_apart_by_prefix() {
    let scene = in_the_log();
    let aggregate = scene.aggregate(1);
    let other = scene
        .invoke("init")
        .args(["--slot", &format!("{}_other", scene.slot())]);
    other.arg("--no-role").finish().expect_code(0);
    let topic = format!("other-{}", scene.name);
    scene.broker.create_topic(&topic, 1, &[]);
    let ours = scene.start();
    let other_slot = format!("{}_other", scene.slot());
    let theirs = scene.start_with(&[
        "--slot",
        &other_slot,
        "--prefix",
        "Other.1",
        "--topic",
        &topic,
    ]);
    let event = Event::new(&aggregate, "k", "{}");
    let foreign = Writer::Log("Other.1".to_owned()).one(event);
    for _ in 0..3 {
        scene.db.run(&format!(
            "BEGIN; {foreign} {} {foreign} COMMIT",
            scene.insert_sql(&aggregate, "k")
        ));
    }
    scene
        .db
        .run("SELECT pg_logical_emit_message(true, 'elsewhere', 'no envelope')");
    scene.wait_for_records(3);
    scene.wait_until_confirmed();
    let finished = ours.terminate().expect_code(0);
    assert_eq!(counted(&finished.stderr, "foreign_messages"), 7);
    assert_eq!(counted(&finished.stderr, "nontransactional_messages"), 0);
    assert_eq!(scene.judge(&[], Resends::Never).committed, 3);
    crate::support::wait::wait_until("the other topic", || {
        scene.broker.count(std::slice::from_ref(&topic)) == 6
    });
    let finished = theirs.terminate().expect_code(0);
    assert_eq!(counted(&finished.stderr, "foreign_messages"), 4);
}

#[test]
fn message_outside_of_transactions_is_left_out_and_told_once() {
    let scene = in_the_log();
    let aggregate = scene.aggregate(1);
    let mut walpost = scene.start();
    let message = |prefix: &str| {
        format!("SELECT pg_logical_emit_message(false, '{prefix}', 'never to be delivered')")
    };
    let ours = format!("walpost_{}", scene.name);
    scene.db.run(&message("elsewhere"));
    scene.db.run(&message(&ours));
    scene
        .db
        .run(&format!("BEGIN; {}; ROLLBACK", message(&ours)));
    scene.insert(&aggregate, "k");
    walpost.wait_for_log("a message outside of transactions is not an event");
    scene.wait_for_records(1);
    assert_eq!(walpost.logged("outside of transactions"), 1);
    scene.wait_until_confirmed();
    let finished = walpost.terminate().expect_code(0);
    assert_eq!(counted(&finished.stderr, "nontransactional_messages"), 3);
    assert_eq!(scene.judge(&[], Resends::Never).committed, 1);
}

/// Has Walpost meet this content in an event's place, and expects it to halt there; then leaves its
/// transaction out with the command of the error.
fn bad_content(content: &str, texts: &[&str]) {
    let scene = in_the_log();
    let aggregate = scene.aggregate(1);
    scene.insert(&aggregate, "before");
    let before = scene.history().pop().unwrap().end;
    scene.db.run(&format!(
        "BEGIN; SELECT pg_logical_emit_message(true, 'x', 'first');
         SELECT pg_logical_emit_message(true, 'walpost_{}', {content}); COMMIT",
        scene.name
    ));
    scene.insert(&aggregate, "after");
    let finished = scene.run().finish().expect_code(3);
    let prefix = format!("\"walpost_{}\"", scene.name);
    let finished = finished
        .expect_says(&["halted", &prefix])
        .expect_says(texts);
    assert_eq!(scene.records().len(), 1, "what comes before it, alone");
    assert!(
        scene.confirmed() >= before,
        "the command loses nothing of it"
    );
    let position = finished
        .stderr
        .split(|c: char| c.is_whitespace())
        .map(|word| word.trim_end_matches(':'))
        .find(|word| word.len() == 28 && word.contains('/'));
    let (_, index) = parse_position(position.expect("a position"));
    assert_eq!(index, 1);

    let (_, command) = finished.stderr.split_once("walpost skip --to ").unwrap();
    let to = command.split(' ').next().unwrap();
    scene.skip(to).arg("--yes").finish().expect_code(0);
    let walpost = scene.start();
    let keys: Vec<_> = scene
        .wait_for_records(2)
        .iter()
        .map(|r| r.key().to_owned())
        .collect();
    assert_eq!(keys, ["before", "after"]);
    walpost.terminate().expect_code(0);
}

#[test]
fn content_that_is_no_envelope_halts_and_its_transaction_can_be_left_out() {
    bad_content("'no envelope'", &["byte 0x6e", "walpost.publish"]);
    bad_content("'\\x01ab'::bytea", &["ends inside id"]);
}

#[test]
fn envelope_of_a_later_version_halts() {
    bad_content("'\\x02'::bytea", &["byte 0x02", "0x01", "newer Walpost"]);
}

#[test]
fn publication_with_tables_halts() {
    let scene = in_the_log();
    let publication = scene.slot();
    let walpost = scene.start();
    scene.db.run(&format!(
        "CREATE TABLE intruder (id int); ALTER PUBLICATION {publication} ADD TABLE intruder;
         INSERT INTO intruder VALUES (1)"
    ));
    walpost.finish().expect_code(3).expect_says(&[
        "halted",
        "public.intruder",
        "DROP TABLE public.intruder",
    ]);
    scene.run().finish().expect_code(3).expect_says(&[
        &publication,
        "public.intruder",
        "walpost init --outbox log",
    ]);
    let finished = scene.init().finish().expect_code(3);
    finished.expect_says(&["contains tables"]);
}

#[test]
fn what_is_missing_is_named_with_the_command_that_makes_it() {
    let scene = Scene::bare_of(Outbox::Log, Server::shared(MAJOR), Broker::shared(), "");
    let finished = scene.check().finish().expect_code(3);
    finished.expect_says(&[
        "walpost init --outbox log --publication",
        "walpost init --outbox log --slot",
        "walpost.publish is not there",
    ]);
    let finished = scene.run().finish().expect_code(3);
    finished.expect_says(&["halted", "walpost init --outbox log --publication"]);
}

#[test]
fn column_that_an_event_has_not_is_named_with_those_it_has() {
    let scene = in_the_log();
    let words = [
        "tenant",
        "id, aggregatetype, aggregateid, type, payload, headers, created_at",
    ];
    let key = ["--key", "{tenant}:{aggregateid}"];
    for invocation in [scene.run(), scene.check()] {
        invocation
            .args(key)
            .finish()
            .expect_code(3)
            .expect_says(&words);
    }
}

#[test]
fn run_init_makes_what_is_missing_first() {
    let scene = Scene::bare_of(Outbox::Log, Server::shared(MAJOR), Broker::shared(), "");
    let aggregate = scene.aggregate(1);
    let walpost = scene.start_with(&["--init"]);
    scene.insert(&aggregate, "k");
    scene.wait_for_records(1);
    walpost.terminate().expect_code(0);
}

#[test]
fn stdout_has_events_of_the_log_too() {
    let scene = in_the_log();
    let mut walpost = scene.invoke("run").args(["--sink", "stdout"]).start();
    walpost.wait_for_log("streaming");
    scene
        .db
        .run(&publish(&scene, "'order', 'k', 't', '{\"n\": 1}'"));
    scene.wait_until_confirmed();
    let finished = walpost.terminate().expect_code(0);
    let line: serde_json::Value = serde_json::from_str(finished.stdout.trim()).unwrap();
    assert_eq!(line["topic"], "outbox.event.order");
    assert_eq!(line["value"], "{\"n\": 1}");
}
