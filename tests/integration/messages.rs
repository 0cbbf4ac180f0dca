//! The outbox without a table: what it has that a table has not. Delivery, order, crashes and
//! outages are tested for both kinds of outbox where they are tested for tables.

use std::fs;

use crate::init::psql;
use crate::support::checker::Resends;
use crate::support::event::{Event, Outbox, Writer};
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, MAJORS, Server};
use crate::support::reaper;
use crate::support::records::Record;
use crate::support::scene::{Scene, parse_position};
use crate::support::session::Session;

const ID: &str = "406c07f3-26f0-4eea-a50c-109940064b8f";

for_each_outbox! {
    database_in_another_encoding_is_delivered_in_utf8
}
in_both_modes! { message_that_is_no_event_becomes_a_dead_letter }

fn as_messages() -> Scene<'static> {
    Scene::of(Outbox::Messages)
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
        let scene = Scene::of_on(Outbox::Messages, Server::shared(major), Broker::shared());
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
    let scene = Scene::bare_of(
        Outbox::Messages,
        Server::shared(MAJOR),
        Broker::shared(),
        "",
    );
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
fn roles_of_init_are_enough_to_run_and_to_publish() {
    let server = Server::private(MAJOR, "");
    let scene = Scene::bare_of(Outbox::Messages, &server, Broker::shared(), "");
    scene.db.run("CREATE ROLE shop LOGIN");
    for _ in 0..2 {
        let init = scene.invoke("init").args(["--role", "connector"]);
        init.args(["--writer", "shop"]).finish().expect_code(0);
    }
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
    let shop = Session::connect(&as_role("shop")).unwrap();
    let event = publish(&scene, &format!("'{aggregate}', 'k', 't', '{{}}'"));
    shop.run(&event);
    scene.wait_for_records(1);

    // What is taken away, as sql/publish.sql describes it, stays so, and the writer keeps what it needs.
    scene.db.run(
        "REVOKE EXECUTE ON FUNCTION pg_catalog.pg_logical_emit_message(boolean, text, text),
             pg_catalog.pg_logical_emit_message(boolean, text, bytea) FROM PUBLIC",
    );
    let init = scene.invoke("init").arg("--no-role").finish();
    init.expect_code(0);
    shop.run(&event);
    scene.wait_for_records(2);
    scene.db.run(
        "REVOKE ALL ON FUNCTION walpost.publish(text, text, text, jsonb, jsonb, uuid, text) FROM shop",
    );
    is_denied(shop.try_run(&event), "what was revoked");
    walpost.terminate().expect_code(0);
}

#[test]
fn writer_that_is_not_there_and_rights_that_can_not_be_given_are_named() {
    let scene = as_messages();
    let missing = scene.init().args(["--writer", "no one"]).finish();
    missing.expect_code(3).expect_says(&[
        "role \"no one\" does not exist",
        "CREATE ROLE \"no one\" LOGIN",
    ]);
    let (roles, [owner, _]) = Roles::new(&scene, ["owner", "shop"]);
    let emit = "pg_logical_emit_message(boolean, text, bytea)";
    scene.db.run(&format!(
        "REVOKE EXECUTE ON FUNCTION {emit} FROM PUBLIC;
         ALTER SCHEMA walpost OWNER TO {0}; ALTER TABLE walpost.journal OWNER TO {0};
         ALTER FUNCTION walpost.publish(text, text, text, jsonb, jsonb, uuid, text) OWNER TO {0};
         ALTER FUNCTION walpost.publish_bytes(text, text, text, bytea, jsonb, uuid, text) OWNER TO {0};
         ALTER PUBLICATION {1} OWNER TO {0}; GRANT CREATE ON DATABASE {2} TO {0}; ALTER ROLE {0} REPLICATION",
        roles.1[0],
        scene.slot(),
        scene.name
    ));
    drop(owner);
    let as_owner = scene
        .conninfo()
        .replace("user=postgres", &format!("user={}", roles.1[0]));
    let init = || {
        let init = scene.invoke_as("init", &as_owner).arg("--no-role");
        init.args(["--writer", &roles.1[1]]).finish()
    };
    let emit = emit.replace(' ', "");
    let grant = format!("GRANT EXECUTE ON FUNCTION {emit} TO {}", roles.1[1]);
    init().expect_code(3).expect_says(&[&grant]);
    scene.db.run(&grant);
    init().expect_code(0);
    scene
        .db
        .run(&format!("GRANT EXECUTE ON FUNCTION {emit} TO PUBLIC"));
}

#[test]
fn event_has_the_columns_of_the_table() {
    let scene = as_messages();
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
    let scene = as_messages();
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
    let scene = as_messages();
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
    let scene = as_messages();
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
    let scene = as_messages();
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
    let foreign = Writer::Messages("Other.1".to_owned()).one(event);
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
    let scene = as_messages();
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
    let scene = as_messages();
    let aggregate = scene.aggregate(1);
    scene.insert(&aggregate, "before");
    let before = scene.history().pop().unwrap().end;
    scene.db.run(&format!(
        "BEGIN; SELECT pg_logical_emit_message(true, 'x', 'first');
         SELECT pg_logical_emit_message(true, 'walpost_{}', {content}); COMMIT",
        scene.name
    ));
    scene.insert(&aggregate, "after");
    let run = scene.run().args(["--on-malformed", "halt"]);
    let finished = run.finish().expect_code(3);
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
    let scene = as_messages();
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
        "walpost init --outbox messages",
    ]);
    let finished = scene.init().finish().expect_code(3);
    finished.expect_says(&["contains tables"]);
}

#[test]
fn what_is_missing_is_named_with_the_command_that_makes_it() {
    let scene = Scene::bare_of(
        Outbox::Messages,
        Server::shared(MAJOR),
        Broker::shared(),
        "",
    );
    let finished = scene.check().finish().expect_code(3);
    finished.expect_says(&[
        "walpost init --outbox messages --publication",
        "walpost init --outbox messages --slot",
        "walpost.publish is not there",
    ]);
    let finished = scene.run().finish().expect_code(3);
    finished.expect_says(&["halted", "walpost init --outbox messages --publication"]);
}

#[test]
fn column_that_an_event_has_not_is_named_with_those_it_has() {
    let scene = as_messages();
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
    let scene = Scene::bare_of(
        Outbox::Messages,
        Server::shared(MAJOR),
        Broker::shared(),
        "",
    );
    let aggregate = scene.aggregate(1);
    let walpost = scene.start_with(&["--init"]);
    scene.insert(&aggregate, "k");
    scene.wait_for_records(1);
    walpost.terminate().expect_code(0);
}

#[test]
fn stdout_has_events_of_the_log_too() {
    let scene = as_messages();
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

/// Roles of a test's own, which go with it. Roles belong to the whole server.
struct Roles<'s>(&'s Scene<'static>, Vec<String>);

impl<'s> Roles<'s> {
    fn new<const N: usize>(scene: &'s Scene<'static>, names: [&str; N]) -> (Self, [Session; N]) {
        let roles = names.map(|name| format!("{}_{name}", scene.name));
        let sessions = roles.each_ref().map(|role| {
            scene.db.run(&format!("CREATE ROLE {role} LOGIN"));
            let user = format!("user={role}");
            Session::connect(&scene.conninfo().replace("user=postgres", &user)).unwrap()
        });
        (Self(scene, roles.to_vec()), sessions)
    }
}

impl Drop for Roles<'_> {
    fn drop(&mut self) {
        for role in &self.1 {
            let drop = format!("DROP OWNED BY {role}; DROP ROLE {role}");
            let _ = self.0.db.try_run(&drop);
        }
    }
}

fn is_denied(result: Result<(), tokio_postgres::Error>, what: &str) {
    let error = result.expect_err(what);
    let code = error.code().map(|code| code.code().to_owned());
    assert_eq!(code.as_deref(), Some("42501"), "{what}: {error}");
}

#[test]
fn nobody_may_publish_whom_init_was_not_told_of() {
    for major in [14, 18] {
        let scene = Scene::of_on(Outbox::Messages, Server::shared(major), Broker::shared());
        let (roles, [shop, stranger]) = Roles::new(&scene, ["shop", "stranger"]);
        let event = publish(&scene, "'a', 'k', 't', '{}'");
        is_denied(stranger.try_run(&event), "before there is a writer");
        is_denied(shop.try_run(&event), "before there is a writer");
        let init = || scene.init().args(["--writer", &roles.1[0]]);
        init().finish().expect_code(0);
        init().finish().expect_code(0);
        shop.run(&event);
        is_denied(stranger.try_run(&event), "a role that is no writer");
        is_denied(stranger.try_run("SELECT * FROM walpost.journal"), "journal");
        is_denied(shop.try_run("SELECT * FROM walpost.journal"), "journal");

        // As the check says it.
        let said = scene.check().finish().expect_code(0);
        let taken =
            "REVOKE EXECUTE ON FUNCTION pg_catalog.pg_logical_emit_message(boolean, text, text";
        let (_, rest) = said.stdout.split_once(taken).expect("the statement");
        let revoke = format!("{taken}{}", rest.lines().next().unwrap());
        let forged = format!(
            "SELECT pg_logical_emit_message(true, 'walpost_{}', 'x')",
            scene.name
        );
        stranger.run(&forged.replace("walpost_", "elsewhere_"));
        scene.db.run(&revoke);
        is_denied(stranger.try_run(&forged), "a message");
        shop.run(&event);
        let said = scene.check().finish().expect_code(0).stdout;
        assert!(!said.contains("pg_logical_emit_message"), "{said}");
    }
}

#[test]
fn rights_that_were_given_before_stay_and_are_told_by_the_check() {
    let scene = as_messages();
    let (_roles, [shop]) = Roles::new(&scene, ["shop"]);
    // As earlier versions of publish.sql left it.
    scene.db.run(
        "GRANT USAGE ON SCHEMA walpost TO PUBLIC;
         GRANT EXECUTE ON FUNCTION walpost.publish(text, text, text, jsonb, jsonb, uuid, text),
             walpost.publish_bytes(text, text, text, bytea, jsonb, uuid, text) TO PUBLIC",
    );
    scene.init().finish().expect_code(0);
    let event = publish(&scene, "'a', 'k', 't', '{}'");
    shop.run(&event);
    let said = scene
        .check()
        .finish()
        .expect_code(0)
        .expect_says(&["every role", "init --outbox messages --writer"]);
    let (_, rest) = said
        .stdout
        .split_once("REVOKE EXECUTE ON FUNCTION walpost.")
        .unwrap();
    let statements = format!("REVOKE EXECUTE ON FUNCTION walpost.{rest}");
    let (first, rest) = statements.split_once("; ").unwrap();
    let second = rest.split(['.', '\n']).next().unwrap();
    scene.db.run(first);
    scene.db.run(second);
    is_denied(shop.try_run(&event), "after what the check says");
}

#[test]
fn functions_that_somebody_planted_in_the_search_path_are_not_called() {
    for major in [14, 18] {
        let scene = Scene::of_on(Outbox::Messages, Server::shared(major), Broker::shared());
        let aggregate = scene.aggregate(1);
        let plant = |name: &str, arguments: &str, returns: &str| {
            let null = format!("NULL::{returns}");
            format!(
                "CREATE FUNCTION public.{name}({arguments}) RETURNS {returns} LANGUAGE plpgsql AS
                 $$ BEGIN INSERT INTO public.called VALUES ('{name}'); RETURN {null}; END $$;"
            )
        };
        let mut planted =
            "CREATE TABLE called (name text); GRANT INSERT ON called TO PUBLIC;".to_owned();
        for (name, arguments, returns) in [
            ("convert_to", "text, text", "bytea"),
            ("convert_to", "text, name", "bytea"),
            ("octet_length", "bytea", "int"),
            ("int4send", "int", "bytea"),
            ("uuid_send", "uuid", "bytea"),
            ("timestamptz_send", "timestamptz", "bytea"),
            ("now", "", "timestamptz"),
            ("jsonb_typeof", "jsonb", "text"),
            ("pg_logical_emit_message", "boolean, text, bytea", "pg_lsn"),
            ("pg_logical_emit_message", "boolean, text, text", "pg_lsn"),
            ("joined", "bytea, bytea", "bytea"),
            ("differ", "text, text", "boolean"),
            ("more", "int, int", "boolean"),
        ] {
            planted.push_str(&plant(name, arguments, returns));
        }
        planted.push_str(
            "CREATE OPERATOR public.|| (FUNCTION = public.joined, LEFTARG = bytea, RIGHTARG = bytea);
             CREATE OPERATOR public.<> (FUNCTION = public.differ, LEFTARG = text, RIGHTARG = text);
             CREATE OPERATOR public.> (FUNCTION = public.more, LEFTARG = int, RIGHTARG = int);
             CREATE DOMAIN public.bytea AS pg_catalog.bytea CHECK (false);
             CREATE DOMAIN public.text AS pg_catalog.text CHECK (false);",
        );
        scene.db.run(&planted);
        let walpost = scene.start();
        let prefix = format!("walpost_{}", scene.name);
        for path in ["public", "public, pg_catalog"] {
            scene.db.run(&format!("SET search_path = {path}"));
            scene.db.run(&publish(
                &scene,
                &format!("'{aggregate}', 'k', 't', '{{\"n\": 1}}', '{{\"h\": \"v\"}}'"),
            ));
            scene.db.run(&format!(
                "SELECT walpost.publish_bytes('{aggregate}', 'k', 't', '\\x6869', prefix => '{prefix}')"
            ));
        }
        scene.db.run("RESET search_path");
        let called = scene
            .db
            .rows("SELECT DISTINCT name::pg_catalog.text FROM called");
        assert!(called.is_empty(), "PostgreSQL {major}: {called:?}");
        let records = scene.wait_for_records(4);
        let values: Vec<_> = records.iter().map(Record::text).collect();
        assert_eq!(values, ["{\"n\": 1}", "hi", "{\"n\": 1}", "hi"]);
        assert_eq!(records[0].header("h"), "v");
        walpost.terminate().expect_code(0);
    }
}

fn message_that_is_no_event_becomes_a_dead_letter(exactly_once: bool) {
    let scene = as_messages().in_mode(exactly_once);
    let (_roles, [stranger]) = Roles::new(&scene, ["stranger"]);
    let aggregate = scene.aggregate(1);
    let topic = format!("{}.dead", scene.name);
    scene.topic(&topic, 1, &[]);
    let start = || scene.start_with(&["--dead-letter-topic", &topic]);
    let walpost = start();
    scene.insert(&aggregate, "before");
    let bad = |content: &str| {
        let prefix = format!("walpost_{}", scene.name);
        format!("SELECT pg_logical_emit_message(true, '{prefix}', {content});")
    };
    for content in [
        "'no envelope'",
        "''",
        "'\\x02'::bytea",
        "'\\x01ab'::bytea",
        "repeat('x', 2000000)",
    ] {
        stranger.run(&bad(content));
    }
    scene.db.run(&format!(
        "BEGIN; {} {} {} COMMIT",
        bad("'first'"),
        scene.insert_sql(&aggregate, "behind"),
        bad("'last'")
    ));
    let records = scene.wait_for_records(9);
    let of = |record: &&Record| record.topic != topic;
    let events: Vec<_> = records.iter().filter(of).map(Record::key).collect();
    assert_eq!(events, ["before", "behind"]);
    let behind = records
        .iter()
        .find(|r| r.topic != topic && r.key() == "behind");
    let position = behind.expect("the event").header("walpost-position");
    assert_eq!(
        parse_position(position).1,
        1,
        "what is no event has its index too"
    );
    let letters: Vec<_> = records.iter().filter(|r| r.topic == topic).collect();
    for letter in &letters {
        assert_eq!(letter.header("walpost-error"), "malformed");
        let prefix = format!("walpost_{}", scene.name);
        assert_eq!(letter.header("walpost-source-prefix"), prefix);
        assert!(letter.key.is_none());
    }
    let payloads: Vec<_> = letters.iter().map(|r| r.payload.as_deref()).collect();
    let expected: [Option<&[u8]>; 7] = [
        Some(b"no envelope"),
        Some(b""),
        Some(b"\x02"),
        Some(b"\x01\xab"),
        None,
        Some(b"first"),
        Some(b"last"),
    ];
    assert_eq!(payloads, expected);
    assert_eq!(letters[4].header("walpost-payload-bytes"), "2000000");
    scene.wait_until_confirmed();
    let finished = walpost.terminate().expect_code(0);
    assert_eq!(counted(&finished.stderr, "malformed_dead_letters"), 7);
    let walpost = start();
    scene.insert(&aggregate, "again");
    assert_eq!(scene.wait_for_records(10).len(), 10, "nothing twice");
    walpost.terminate().expect_code(0);
}

#[test]
fn topic_for_messages_that_are_no_events_is_looked_for_and_made() {
    let scene = as_messages();
    let aggregate = scene.aggregate(1);
    let topic = format!("{}.dead", scene.name);
    let dead = ["--dead-letter-topic", &topic];
    let said = scene.check().args(dead).finish().expect_code(0);
    let said = said.expect_says(&["warning", "halts the pipeline", "--create --topic"]);
    assert!(said.stdout.contains(&topic), "{}", said.stdout);
    let halting = scene
        .check()
        .args(dead)
        .args(["--on-unroutable", "dead-letter"]);
    halting.finish().expect_code(3).expect_says(&[&topic]);
    let said = scene.check().args(["--on-malformed", "halt"]).finish();
    assert!(!said.expect_code(0).stdout.contains("dead letters"));
    scene.db.run(&format!(
        "SELECT pg_logical_emit_message(true, 'walpost_{}', 'bad')",
        scene.name
    ));
    let halted = scene.run().args(dead).finish().expect_code(3);
    halted.expect_says(&["halted", &topic, "does not exist"]);
    let walpost = scene.start_with(&[&dead[..], &["--create-topics", "1:1"]].concat());
    scene.insert(&aggregate, "behind");
    scene.wait_for_records(1);
    scene.expect_topic(&topic);
    assert_eq!(scene.wait_for_records(2).len(), 2);
    walpost.terminate().expect_code(0);
}

#[test]
fn message_that_is_larger_than_what_is_read_holds_up_nothing() {
    let scene = as_messages();
    let (_roles, [stranger]) = Roles::new(&scene, ["stranger"]);
    let aggregate = scene.aggregate(1);
    let topic = format!("{}.dead", scene.name);
    scene.topic(&topic, 1, &[]);
    let walpost = scene.start_with(&["--dead-letter-topic", &topic, "--max-row-bytes", "1MB"]);
    let ours = format!("walpost_{}", scene.name);
    let emit = |transactional: bool, prefix: &str, megabytes: usize| {
        format!(
            "SELECT pg_logical_emit_message({transactional}, {prefix}, repeat('x', {megabytes} * 1048576));"
        )
    };
    stranger.run(&emit(true, "'elsewhere'", 3));
    stranger.run(&emit(true, "repeat('p', 2000000)", 0));
    stranger.run(&emit(false, "'elsewhere'", 2));
    stranger.run(&emit(false, &format!("'{ours}'"), 40));
    scene.db.run(&format!(
        "BEGIN; {} {} {} COMMIT",
        emit(true, "'elsewhere'", 70),
        emit(true, &format!("'{ours}'"), 70),
        scene.insert_sql(&aggregate, "behind")
    ));
    let records = scene.wait_for_records(2);
    let letter = records.iter().find(|r| r.topic == topic).expect("a letter");
    assert_eq!(letter.header("walpost-error"), "malformed");
    let bytes = (70 * 1_048_576).to_string();
    assert_eq!(letter.header("walpost-payload-bytes"), bytes);
    assert!(letter.payload.is_none());
    let event = records
        .iter()
        .find(|r| r.topic != topic)
        .expect("the event");
    assert_eq!(parse_position(event.header("walpost-position")).1, 2);
    let resident = walpost.resident_bytes();
    assert!(resident < 60_000_000, "{resident} bytes");
    scene.wait_until_confirmed();
    let stopped = walpost.terminate().expect_code(0).stderr;
    assert_eq!(counted(&stopped, "foreign_messages"), 3);
    assert_eq!(counted(&stopped, "nontransactional_messages"), 2);
    // What walpost.publish may have written is an event, and waits for the setting.
    scene.db.run(&publish(
        &scene,
        &format!("'{aggregate}', 'k', 't', to_jsonb(repeat('x', 2000000))"),
    ));
    let halted = scene.run().args(["--max-row-bytes", "1MB"]).finish();
    halted
        .expect_code(3)
        .expect_says(&["halted", "max_row_bytes allows"]);
}

#[test]
fn database_in_which_a_prefix_can_be_any_bytes_is_warned_of() {
    let ascii = "ENCODING 'SQL_ASCII' LC_COLLATE 'C' LC_CTYPE 'C'";
    let scene = Scene::bare_of(
        Outbox::Messages,
        Server::shared(MAJOR),
        Broker::shared(),
        ascii,
    );
    scene.init().finish().expect_code(0);
    let said = scene.check().finish().expect_code(0);
    said.expect_says(&["warning", "SQL_ASCII", "refuses to send"]);
    let said = as_messages().check().finish().expect_code(0).stdout;
    assert!(!said.contains("SQL_ASCII"), "{said}");
}
