//! The role created by `walpost init` has exactly the privileges that Walpost needs. If a privilege
//! is missing, the error contains the statement that grants it.

use super::budget;
use crate::init::WRITE;
use crate::support::event::Outbox;
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, MAJORS, Server};
use crate::support::walpost::Invocation;
use crate::support::walpost_role::WalpostRole;

/// Creates a role whose name contains characters that must be quoted in SQL.
fn walpost_role<'s>(fixture: &'s Fixture<'s>) -> WalpostRole<'s> {
    WalpostRole::new(fixture, format!("{}-Clerk", fixture.name))
}

fn fixture_on(outbox: Outbox, major: u32) -> Fixture<'static> {
    Fixture::with_outbox_on(outbox, Server::shared(major), Broker::shared())
}

fn checkpoint(walpost_role: &WalpostRole, word: &str) -> Invocation {
    walpost_role
        .commands()
        .checkpoint(word)
        .args((word == "adopt").then_some("--yes"))
}

fn expect_delivery(fixture: &Fixture, walpost_role: &WalpostRole, words: &[&str]) {
    let aggregate = fixture.aggregate(1);
    let walpost = walpost_role.command(words).start_streaming();
    fixture.insert(&aggregate, "k");
    fixture.wait_until_confirmed();
    walpost.terminate().expect_code(0);
    let topic = format!("outbox.event.{aggregate}");
    assert_eq!(fixture.broker.read(&[topic]).len(), 1);
}

for_each_outbox! { role_created_by_init_can_run_every_command }

fn role_created_by_init_can_run_every_command(outbox: Outbox) {
    let fixture = fixture_on(outbox, 15);
    let walpost_role = walpost_role(&fixture);
    walpost_role.command(&["check"]).finish().expect_code(0);
    expect_delivery(&fixture, &walpost_role, &["run"]);
    checkpoint(&walpost_role, "adopt").finish().expect_code(0);
    checkpoint(&walpost_role, "show").finish().expect_code(0);
    walpost_role
        .command(&["check", "--exactly-once"])
        .finish()
        .expect_code(0);
    expect_delivery(&fixture, &walpost_role, &["run", "--exactly-once"]);
    if outbox == Outbox::Table {
        walpost_role.command(&["verify"]).finish().expect_code(0);
        let replay = walpost_role.command(&["replay", "--all", "--yes"]).finish();
        replay.expect_code(0).expect_mentions(&["2 rows of table"]);
    }
    fixture.insert(&fixture.aggregate(1), "k");
    let end = fixture.db.value("SELECT pg_current_wal_flush_lsn()");
    let skip = ["skip", "--exactly-once", "--yes", "--to", &end.unwrap()];
    walpost_role
        .command(&skip)
        .finish()
        .expect_code(0)
        .expect_mentions(&["1 event would never be delivered"]);
    if outbox == Outbox::Table {
        // The role also has the privileges to drop the slot and to replay the table.
        fixture.insert(&fixture.aggregate(1), "k");
        let run = walpost_role.commands().invoke("run");
        let run = run.args(["--kafka", "127.0.0.1:9"]).args(budget::DROP_SLOT);
        run.finish()
            .expect_code(3)
            .expect_mentions(&["was dropped"]);
        budget::new_slot(&fixture);
        let replay = walpost_role
            .command(&["replay", "--dropped-slots", "--yes"])
            .finish();
        replay.expect_code(0).expect_mentions(&["replayed"]);
    }
}

#[test]
fn role_created_by_init_has_no_unnecessary_privileges() {
    for major in MAJORS {
        let fixture = fixture_on(Outbox::Table, major);
        let walpost_role = walpost_role(&fixture);
        let (db, role) = (&fixture.db, &walpost_role.role);
        let attributes = db.rows(&format!(
            "SELECT rolcanlogin, rolreplication, rolsuper, rolcreaterole, rolcreatedb, rolbypassrls
             FROM pg_roles WHERE rolname = '{role}'"
        ));
        let attributes: String = attributes[0].iter().flatten().cloned().collect();
        assert_eq!(attributes, "ttffff", "PostgreSQL {major}");
        let roles =
            format!("SELECT count(*) FROM pg_auth_members WHERE member = '\"{role}\"'::regrole");
        assert_eq!(db.number(&roles), 0, "member of a role");
        // Lists every object, in any database, that the role owns or has privileges on.
        let objects = db.rows(&format!(
            "SELECT DISTINCT classid::regclass::text, CASE WHEN classid = 'pg_database'::regclass THEN ''
                 ELSE pg_describe_object(classid, objid, 0) END
             FROM pg_shdepend WHERE refclassid = 'pg_authid'::regclass AND refobjid = '\"{role}\"'::regrole
             ORDER BY 1, 2"
        ));
        let expected = [
            ["pg_class", "table outbox"],
            ["pg_class", "table walpost.journal"],
            ["pg_class", "table walpost.slot_state"],
            ["pg_class", "table walpost.table_state"],
            ["pg_database", ""],
            ["pg_namespace", "schema walpost"],
        ];
        assert_eq!(
            objects,
            expected.map(|row| row.map(|text| Some(text.to_owned())).to_vec())
        );
        let rights = db.rows(&format!(
            "SELECT privilege_type FROM pg_database, aclexplode(datacl)
             WHERE datname = current_database() AND grantee = '\"{role}\"'::regrole"
        ));
        assert_eq!(rights, [vec![Some("CONNECT".to_owned())]]);
        let rights = db.rows(&format!(
            "SELECT relname || ' ' || privilege_type FROM pg_class, aclexplode(relacl)
             WHERE grantee = '\"{role}\"'::regrole ORDER BY 1"
        ));
        let on = [
            "journal SELECT",
            "outbox SELECT",
            "slot_state INSERT",
            "slot_state SELECT",
            "slot_state UPDATE",
            "table_state INSERT",
            "table_state SELECT",
            "table_state UPDATE",
        ];
        assert_eq!(rights, on.map(|right| vec![Some(right.to_owned())]));
        let as_role = |sql: &str| {
            db.try_run(&format!("SET ROLE \"{role}\"; {sql}"))
                .inspect_err(|_| db.run("RESET ROLE"))
                .map(|()| db.run("RESET ROLE"))
        };
        as_role("SELECT * FROM walpost.journal").unwrap();
        as_role(WRITE).unwrap();
        for refused in [
            "UPDATE walpost.journal SET pipeline = 'x'",
            "DELETE FROM walpost.journal",
            "TRUNCATE walpost.journal",
            "INSERT INTO walpost.journal (pipeline, slot, action, by_role) VALUES ('', '', 'skip', 'x')",
            "INSERT INTO walpost.journal (pipeline, slot, action, at) VALUES ('', '', 'skip', now())",
            "CREATE TABLE walpost.other ()",
        ] {
            as_role(refused).expect_err(refused);
        }
        walpost_role.command(&["check"]).finish().expect_code(0);
        expect_delivery(&fixture, &walpost_role, &["run"]);
        walpost_role.command(&["verify"]).finish().expect_code(0);
    }
}

#[test]
fn verify_suggests_the_grant_statement_if_the_select_privilege_is_missing() {
    let fixture = fixture_on(Outbox::Table, MAJOR);
    let walpost_role = walpost_role(&fixture);
    let (db, role) = (&fixture.db, &walpost_role.role);
    for taken in [
        format!("REVOKE SELECT ON outbox FROM \"{role}\""),
        format!(
            "REVOKE USAGE ON SCHEMA public FROM PUBLIC; REVOKE SELECT ON outbox FROM \"{role}\""
        ),
    ] {
        db.run(&taken);
        let finished = walpost_role.command(&["verify"]).finish().expect_code(3);
        let output = finished
            .stderr
            .lines()
            .find(|line| line.contains("GRANT USAGE"));
        let output = output.expect("a line with the statements");
        let start = output.find("GRANT USAGE").unwrap();
        let remedy = output[start..].split(" pipeline=").next().unwrap();
        db.run(remedy);
        walpost_role.command(&["verify"]).finish().expect_code(0);
    }
}

/// Returns the SQL statement that begins with `start`, without the text that follows it on the
/// line.
fn statement<'t>(output: &'t str, start: &str) -> &'t str {
    let at = output
        .find(start)
        .unwrap_or_else(|| panic!("no {start}: {output}"));
    let line = output[at..].lines().next().unwrap();
    line.split_once(". ")
        .map_or(line, |(statement, _)| statement)
}

#[test]
fn statement_suggested_by_the_error_restores_the_revoked_privilege() {
    // Test both error messages for missing privileges: the wording changed in PostgreSQL 16.
    for major in [15, 18] {
        let fixture = fixture_on(Outbox::Table, major);
        let walpost_role = walpost_role(&fixture);
        let (db, role, database) = (&fixture.db, &walpost_role.role, &fixture.name);
        for (taken, given) in [
            (format!("ALTER ROLE \"{role}\" NOLOGIN"), "ALTER ROLE"),
            (format!("ALTER ROLE \"{role}\" NOREPLICATION"), "ALTER ROLE"),
            (
                format!("REVOKE CONNECT ON DATABASE {database} FROM PUBLIC, \"{role}\""),
                "GRANT CONNECT",
            ),
        ] {
            db.run(&taken);
            let run = walpost_role.command(&["run"]).finish().expect_code(3);
            let check = walpost_role.command(&["check"]).finish().expect_code(3);
            let show = checkpoint(&walpost_role, "show").finish().expect_code(3);
            let init = walpost_role.commands().invoke("init");
            let remedy = statement(&check.stdout, given).to_owned();
            run.expect_mentions(&["halted", role, &remedy]);
            show.expect_mentions(&[role, &remedy]);
            if !taken.contains("REPLICATION") {
                init.arg("--no-role")
                    .finish()
                    .expect_code(3)
                    .expect_mentions(&[&remedy]);
            }
            db.run(&remedy);
            walpost_role.command(&["check"]).finish().expect_code(0);
        }
        expect_delivery(&fixture, &walpost_role, &["run"]);
    }
}
