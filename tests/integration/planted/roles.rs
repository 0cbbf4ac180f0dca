//! Roles that the database owner sets with ALTER DATABASE, and roles that other roles can act as.

use std::fs;
use std::path::Path;

use super::PlantedFixture;
use crate::init::try_psql;
use crate::support::event::Outbox;
use crate::support::postgres::{MAJOR, MAJORS};
use crate::support::reaper;

#[test]
fn init_ignores_a_role_set_by_the_database_owner() {
    for major in MAJORS {
        let shop = PlantedFixture::bare(Outbox::Table, major);
        let (db, mallory, name) = (&shop.fixture.db, &shop.mallory, &shop.fixture.name);
        db.run(&format!("ALTER DATABASE {name} OWNER TO {mallory}"));
        shop.attacker
            .run(&format!("ALTER DATABASE {name} SET role = '{mallory}'"));
        shop.init().finish().expect_code(0);
        let owners = "SELECT DISTINCT pg_get_userbyid(relowner) FROM pg_class
            WHERE oid IN ('public.outbox'::regclass, 'walpost.journal'::regclass)
            UNION SELECT pg_get_userbyid(pubowner) FROM pg_publication
            UNION SELECT pg_get_userbyid(nspowner) FROM pg_namespace WHERE nspname = 'walpost'";
        assert_eq!(
            db.rows(owners),
            [vec![Some("postgres".to_owned())]],
            "PostgreSQL {major}"
        );
        shop.command(&["check"]).finish().expect_code(0);
    }
}

/// The database owner resets the role setting after the DBA connects but before the first statement
/// of the SQL file runs. Walpost must still not treat the role of the session as trusted.
#[test]
fn does_not_trust_a_session_role_set_by_alter_database() {
    for major in MAJORS {
        let shop = PlantedFixture::bare(Outbox::Table, major);
        let (fixture, mallory) = (&shop.fixture, &shop.mallory);
        fixture.db.run(&format!(
            "ALTER DATABASE {} OWNER TO {mallory}; CREATE TABLE public.outbox ()",
            fixture.name
        ));
        shop.attacker.run(
            "CREATE SCHEMA walpost;
             CREATE FUNCTION walpost.add_outbox(regclass, name) RETURNS int8 LANGUAGE plpgsql AS $$ BEGIN
                 PERFORM set_config('role', 'none', false); PERFORM plot.note('role'); RETURN NULL; END $$",
        );
        let set = format!("ALTER DATABASE {} SET role = '{mallory}'", fixture.name);
        shop.attacker.run(&set);
        let sql = Path::new(env!("CARGO_MANIFEST_DIR")).join("sql");
        let file = reaper::folder("planted").join("reset.sql");
        let reset = format!(
            "ALTER DATABASE {} RESET role;\n\\ir {}\n",
            fixture.name,
            sql.join("add_outbox.sql").display()
        );
        fs::write(&file, reset).unwrap();
        let output = try_psql(fixture, &file);
        shop.expect_nothing_ran("add_outbox.sql");
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        let expected = format!(
            "schema walpost belongs to role {mallory}, expected a superuser, or role postgres"
        );
        assert!(text.contains(&expected), "PostgreSQL {major}: {text}");
    }
}

/// The server truncates a role setting that is longer than an identifier, so the setting may name a
/// different role than it seems to.
#[test]
fn session_sql_ignores_a_role_set_for_the_database_even_if_its_name_is_truncated() {
    for major in MAJORS {
        let shop = PlantedFixture::bare(Outbox::Table, major);
        let fixture = &shop.fixture;
        let long = format!("{:_<63}", shop.mallory);
        fixture.db.run(&format!(
            "CREATE ROLE {long}; ALTER DATABASE {} SET role = '{long}more'",
            fixture.name
        ));
        let sql = Path::new(env!("CARGO_MANIFEST_DIR")).join("sql");
        let file = reaper::folder("planted").join("user.sql");
        let script = format!(
            "SELECT 'before: ' || current_user;\n\\ir {}\nSELECT 'after: ' || current_user;\n",
            sql.join("session.sql").display()
        );
        fs::write(&file, script).unwrap();
        let output = try_psql(fixture, &file);
        fixture.db.run(&format!(
            "ALTER DATABASE {} RESET role; DROP ROLE {long}",
            fixture.name
        ));
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(printed.contains(&format!("before: {long}")), "{printed}");
        assert!(printed.contains("after: postgres"), "{printed}");
    }
}

/// A role that was granted membership WITH SET FALSE can't act as the granted role, so it must not
/// be treated as equally trusted.
#[test]
fn does_not_trust_role_members_that_lack_the_set_option() {
    for major in MAJORS.into_iter().filter(|major| *major >= 16) {
        let shop = PlantedFixture::owned_by_attacker(major);
        let (db, mallory) = (&shop.fixture.db, &shop.mallory);
        db.run(&format!(
            "GRANT {} TO {mallory} WITH INHERIT FALSE, SET FALSE",
            shop.walpost
        ));
        shop.attacker
            .run("CREATE INDEX i ON public.outbox (id) WHERE plot.note('index')");
        let replay = ["replay", "--all", "--dry-run"];
        let finished = shop.command(&replay).finish();
        shop.expect_nothing_ran("replay");
        let index = ["i calls function plot.note(text)"];
        finished.expect_code(3).expect_mentions(&index);
        // A member that inherits from the role has its privileges but not its attributes, so it
        // can't use replication.
        db.run(&format!(
            "GRANT {} TO {mallory} WITH INHERIT TRUE",
            shop.walpost
        ));
        let finished = shop.command(&replay).finish();
        shop.expect_nothing_ran("replay");
        finished.expect_code(3).expect_mentions(&index);
        db.run(&format!("ALTER TABLE walpost.journal OWNER TO {mallory}"));
        let owner = format!("table walpost.journal belongs to role {mallory}");
        shop.command(&replay)
            .finish()
            .expect_code(3)
            .expect_mentions(&[&owner]);
        // Once the member can act as the role, it is as trusted as the role itself.
        db.run(&format!(
            "GRANT {} TO {mallory} WITH SET TRUE",
            shop.walpost
        ));
        shop.command(&replay).finish().expect_code(0);
    }
}

/// A role with ADMIN OPTION can usually grant itself membership, but only a superuser may grant the
/// role of a superuser.
#[test]
fn does_not_trust_a_role_with_admin_option_on_a_superuser() {
    for major in MAJORS.into_iter().filter(|major| *major >= 16) {
        let shop = PlantedFixture::owned_by_attacker(major);
        let (mallory, walpost) = (&shop.mallory, &shop.walpost);
        shop.fixture.db.run(&format!(
            "GRANT {walpost} TO {mallory} WITH ADMIN TRUE, INHERIT FALSE, SET FALSE; ALTER ROLE {walpost} SUPERUSER;
             ALTER PUBLICATION {} OWNER TO {mallory}",
            shop.fixture.slot()
        ));
        let grant = format!("GRANT {walpost} TO {mallory} WITH SET TRUE");
        shop.attacker.try_run(&grant).expect_err("an error");
        shop.attacker
            .run("CREATE INDEX i ON public.outbox (id) WHERE plot.note('index')");
        let replay = shop.command(&["replay", "--all", "--dry-run"]).finish();
        shop.expect_nothing_ran("replay");
        let index = ["i calls function plot.note(text)"];
        replay.expect_code(3).expect_mentions(&index);
        let publication = format!("belongs to role {mallory}");
        let check = shop.command(&["check"]).finish();
        check.expect_mentions(&[&publication]);
    }
}

/// A role that inherits an owner's privileges can replace the owner's functions and publications.
#[test]
fn does_not_trust_an_owner_whose_privileges_an_untrusted_role_inherits() {
    for major in MAJORS.into_iter().filter(|major| *major >= 16) {
        let shop = PlantedFixture::new(Outbox::Table, major);
        let (db, mallory, walpost) = (&shop.fixture.db, &shop.mallory, &shop.walpost);
        let (ops, publication) = (format!("{mallory}_ops"), shop.fixture.slot());
        db.run(&format!(
            "CREATE ROLE {ops}; GRANT {walpost} TO {ops}; GRANT USAGE, CREATE ON SCHEMA plot TO {ops}; SET ROLE {ops};
             CREATE FUNCTION plot.kind(t text) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS 'BEGIN RETURN true; END';
             RESET ROLE; CREATE INDEX i ON public.outbox (id) WHERE plot.kind('a');
             ALTER PUBLICATION {publication} OWNER TO {ops}"
        ));
        let replay = ["replay", "--all", "--dry-run"];
        shop.command(&replay).finish().expect_code(0);
        let expected = [
            "calls function plot.kind(text) of role",
            &format!("belongs to role {ops}, which could run code as role {walpost}"),
        ];
        let check = shop.command(&["check"]).finish().stdout;
        assert!(
            expected.iter().all(|expected| !check.contains(expected)),
            "{check}"
        );
        db.run(&format!(
            "GRANT {ops} TO {mallory} WITH INHERIT TRUE, SET FALSE"
        ));
        shop.attacker.run(
            "CREATE OR REPLACE FUNCTION plot.kind(t text) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS
                 $$ BEGIN RETURN plot.note('index'); END $$",
        );
        let refused = shop.command(&replay).finish();
        shop.expect_nothing_ran("replay");
        refused.expect_code(3).expect_mentions(&expected[..1]);
        let check = shop.command(&["check"]).finish().stdout;
        assert!(check.contains(expected[1]), "{check}");
        // A member that can act as the owner is as trusted as the owner itself.
        db.run(&format!("GRANT {ops} TO {mallory} WITH SET TRUE"));
        let check = shop.command(&["check"]).finish().stdout;
        assert!(!check.contains(expected[1]), "{check}");
        db.run(&format!(
            "ALTER PUBLICATION {publication} OWNER TO postgres; DROP OWNED BY {ops} CASCADE; DROP ROLE {ops}"
        ));
    }
}

#[test]
fn warns_about_a_role_that_other_roles_can_assume() {
    let shop = PlantedFixture::new(Outbox::Table, MAJOR);
    let (walpost, mallory) = (&shop.walpost, &shop.mallory);
    shop.fixture
        .db
        .run(&format!("GRANT {walpost} TO {mallory}"));
    let init = shop.init().finish().expect_code(0);
    init.expect_mentions(&["WARN", &format!("REVOKE {walpost} FROM {mallory}")]);
}

/// Objects owned by a role with CREATEROLE must be accepted. On managed services, for example, the
/// DBA has this attribute but is not a superuser.
#[test]
fn accepts_objects_owned_by_a_role_that_has_the_createrole_attribute() {
    for major in MAJORS {
        let shop = PlantedFixture::bare(Outbox::Table, major);
        let (name, dba) = (&shop.fixture.name, format!("{}_dba", shop.fixture.name));
        shop.fixture.db.run(&format!(
            "CREATE ROLE {dba} LOGIN CREATEROLE REPLICATION; ALTER DATABASE {name} OWNER TO {dba};
             CREATE ROLE {0}_app; GRANT {0}_app TO {dba};
             GRANT CREATE ON SCHEMA public TO {dba}",
            shop.mallory
        ));
        let init = || {
            shop.command_as(&dba, &["init", "--role", &shop.walpost])
                .finish()
        };
        // Before version 16, only a superuser can grant the REPLICATION attribute.
        if major < 16 {
            let make = format!("CREATE ROLE {} LOGIN REPLICATION", shop.walpost);
            let description = format!("{make}, run by a superuser");
            init()
                .expect_code(3)
                .expect_mentions(&[&description, "Nothing was changed"]);
            shop.fixture.db.run(&make);
        }
        init().expect_code(0);
        shop.fixture.db.run(&format!(
            "ALTER TABLE public.outbox OWNER TO {}_app",
            shop.mallory
        ));
        shop.command(&["check"]).finish().expect_code(0);
        let aggregate = shop.fixture.aggregate(1);
        let walpost = shop.command(&["run"]).start_streaming();
        shop.fixture.insert(&aggregate, "k");
        shop.fixture.wait_for_records(1);
        walpost.terminate().expect_code(0);
        shop.fixture.db.run(&format!(
            "DROP OWNED BY {dba}, {0}_app CASCADE; DROP ROLE {0}_app",
            shop.mallory
        ));
        shop.fixture.db.run(&format!(
            "ALTER DATABASE {name} OWNER TO postgres; DROP OWNED BY {dba} CASCADE; DROP ROLE {dba}"
        ));
    }
}
