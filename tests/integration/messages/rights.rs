//! Tests which roles may publish events and which may not.

use super::{TestRoles, message_fixture, publish};
use crate::support::event::Outbox;
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, Server};
use crate::support::records::Record;

#[test]
fn roles_set_up_by_init_can_run_and_publish() {
    let server = Server::private(MAJOR, "");
    let fixture = Fixture::bare_with(Outbox::Messages, &server, Broker::shared(), "");
    fixture.db.run("CREATE ROLE shop LOGIN");
    for _ in 0..2 {
        let init = fixture.invoke("init").args(["--role", "connector"]);
        init.args(["--writer", "shop"]).finish().expect_code(0);
    }
    let connector = fixture.with_conninfo(&fixture.conninfo_as("connector"));
    connector.check().finish().expect_code(0);
    let aggregate = fixture.aggregate(1);
    let walpost = connector.run().start_streaming();
    let shop = server.session_as("shop", &fixture.name);
    let event = publish(&fixture, &format!("'{aggregate}', 'k', 't', '{{}}'"));
    shop.run(&event);
    fixture.wait_for_records(1);

    // Running `init` again does not restore privileges that were revoked as described in
    // sql/publish.sql, and the writer role keeps the privileges that it needs to publish events.
    fixture.db.run(
        "REVOKE EXECUTE ON FUNCTION pg_catalog.pg_logical_emit_message(boolean, text, text),
             pg_catalog.pg_logical_emit_message(boolean, text, bytea) FROM PUBLIC",
    );
    let init = fixture.invoke("init").arg("--no-role").finish();
    init.expect_code(0);
    shop.run(&event);
    fixture.wait_for_records(2);
    fixture.db.run(
        "REVOKE ALL ON FUNCTION walpost.publish(text, text, text, jsonb, jsonb, uuid, text) FROM shop",
    );
    is_denied(shop.try_run(&event), "what was revoked");
    walpost.terminate().expect_code(0);
}

#[test]
fn init_reports_a_missing_writer_role_and_privileges_it_cannot_grant() {
    let fixture = message_fixture();
    let missing = fixture.init().args(["--writer", "no one"]).finish();
    missing.expect_code(3).expect_mentions(&[
        "role \"no one\" does not exist",
        "CREATE ROLE \"no one\" LOGIN",
    ]);
    let (roles, [owner, _]) = TestRoles::new(&fixture, ["owner", "shop"]);
    let emit = "pg_logical_emit_message(boolean, text, bytea)";
    fixture.db.run(&format!(
        "REVOKE EXECUTE ON FUNCTION {emit} FROM PUBLIC;
         ALTER SCHEMA walpost OWNER TO {0}; ALTER TABLE walpost.journal OWNER TO {0};
         ALTER FUNCTION walpost.publish(text, text, text, jsonb, jsonb, uuid, text) OWNER TO {0};
         ALTER FUNCTION walpost.publish_bytes(text, text, text, bytea, jsonb, uuid, text) OWNER TO {0};
         ALTER PUBLICATION {1} OWNER TO {0}; GRANT CREATE ON DATABASE {2} TO {0}; ALTER ROLE {0} REPLICATION",
        roles.1[0],
        fixture.slot(),
        fixture.name
    ));
    drop(owner);
    let as_owner = fixture.conninfo_as(&roles.1[0]);
    let init = || {
        let init = fixture.with_conninfo(&as_owner).init();
        init.args(["--writer", &roles.1[1]]).finish()
    };
    let emit = emit.replace(' ', "");
    let grant = format!("GRANT EXECUTE ON FUNCTION {emit} TO {}", roles.1[1]);
    init().expect_code(3).expect_mentions(&[&grant]);
    fixture.db.run(&grant);
    init().expect_code(0);
    fixture
        .db
        .run(&format!("GRANT EXECUTE ON FUNCTION {emit} TO PUBLIC"));
}

fn is_denied(result: Result<(), tokio_postgres::Error>, what: &str) {
    let error = result.expect_err(what);
    let code = error.code().map(|code| code.code().to_owned());
    assert_eq!(code.as_deref(), Some("42501"), "{what}: {error}");
}

#[test]
fn only_writer_roles_passed_to_init_can_publish() {
    for major in [14, 18] {
        let fixture =
            Fixture::with_outbox_on(Outbox::Messages, Server::shared(major), Broker::shared());
        let (roles, [shop, other_role]) = TestRoles::new(&fixture, ["shop", "other"]);
        let event = publish(&fixture, "'a', 'k', 't', '{}'");
        is_denied(other_role.try_run(&event), "before there is a writer");
        is_denied(shop.try_run(&event), "before there is a writer");
        let init = || fixture.init().args(["--writer", &roles.1[0]]);
        init().finish().expect_code(0);
        init().finish().expect_code(0);
        shop.run(&event);
        is_denied(other_role.try_run(&event), "a role that is not a writer");
        is_denied(
            other_role.try_run("SELECT * FROM walpost.journal"),
            "journal",
        );
        is_denied(shop.try_run("SELECT * FROM walpost.journal"), "journal");

        // Runs the statement that `check` suggests.
        let output = fixture.check().finish().expect_code(0);
        let taken =
            "REVOKE EXECUTE ON FUNCTION pg_catalog.pg_logical_emit_message(boolean, text, text";
        let (_, rest) = output.stdout.split_once(taken).expect("the statement");
        let revoke = format!("{taken}{}", rest.lines().next().unwrap());
        let forged = format!(
            "SELECT pg_logical_emit_message(true, 'walpost_{}', 'x')",
            fixture.name
        );
        other_role.run(&forged.replace("walpost_", "elsewhere_"));
        fixture.db.run(&revoke);
        is_denied(other_role.try_run(&forged), "a message");
        shop.run(&event);
        let output = fixture.check().finish().expect_code(0).stdout;
        assert!(!output.contains("pg_logical_emit_message"), "{output}");
    }
}

#[test]
fn check_reports_privileges_on_publish_functions_that_init_did_not_grant() {
    let fixture = message_fixture();
    let (_roles, [shop]) = TestRoles::new(&fixture, ["shop"]);
    // Before `init` runs again, grant every role the privileges to publish events, as a role with
    // the grant option could.
    fixture.db.run(
        "GRANT USAGE ON SCHEMA walpost TO PUBLIC;
         GRANT EXECUTE ON FUNCTION walpost.publish(text, text, text, jsonb, jsonb, uuid, text),
             walpost.publish_bytes(text, text, text, bytea, jsonb, uuid, text) TO PUBLIC",
    );
    fixture.init().finish().expect_code(0);
    let event = publish(&fixture, "'a', 'k', 't', '{}'");
    shop.run(&event);
    let output = fixture
        .check()
        .finish()
        .expect_code(0)
        .expect_mentions(&["every role", "init --outbox messages --writer"]);
    let (_, rest) = output
        .stdout
        .split_once("REVOKE EXECUTE ON FUNCTION walpost.")
        .unwrap();
    let statements = format!("REVOKE EXECUTE ON FUNCTION walpost.{rest}");
    let (first, rest) = statements.split_once("; ").unwrap();
    let second = rest.split(['.', '\n']).next().unwrap();
    fixture.db.run(first);
    fixture.db.run(second);
    is_denied(shop.try_run(&event), "after what the check says");
}

#[test]
fn publish_does_not_call_functions_that_other_roles_put_in_its_search_path() {
    for major in [14, 18] {
        let fixture =
            Fixture::with_outbox_on(Outbox::Messages, Server::shared(major), Broker::shared());
        let aggregate = fixture.aggregate(1);
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
        fixture.db.run(&planted);
        let walpost = fixture.start();
        let prefix = format!("walpost_{}", fixture.name);
        for path in ["public", "public, pg_catalog"] {
            fixture.db.run(&format!("SET search_path = {path}"));
            fixture.db.run(&publish(
                &fixture,
                &format!("'{aggregate}', 'k', 't', '{{\"n\": 1}}', '{{\"h\": \"v\"}}'"),
            ));
            fixture.db.run(&format!(
                "SELECT walpost.publish_bytes('{aggregate}', 'k', 't', '\\x6869', prefix => '{prefix}')"
            ));
        }
        fixture.db.run("RESET search_path");
        let called = fixture
            .db
            .rows("SELECT DISTINCT name::pg_catalog.text FROM called");
        assert!(called.is_empty(), "PostgreSQL {major}: {called:?}");
        let records = fixture.wait_for_records(4);
        let values: Vec<_> = records.iter().map(Record::text).collect();
        assert_eq!(values, ["{\"n\": 1}", "hi", "{\"n\": 1}", "hi"]);
        assert_eq!(records[0].header("h"), "v");
        walpost.terminate().expect_code(0);
    }
}
