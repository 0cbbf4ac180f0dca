//! `walpost init --owner` and `--writer`, for applications whose role is not a superuser.

use crate::init::objects;
use crate::support::event::Outbox;
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJORS, Server};
use crate::support::session::Session;
use crate::support::walpost::Invocation;

/// An empty database, and three roles whose names must be quoted in SQL.
struct OwnerFixture {
    fixture: Fixture<'static>,
    owner: String,
    writer: String,
    /// The role of a DBA who is not a superuser.
    dba: String,
}

impl OwnerFixture {
    fn new(major: u32) -> Self {
        Self::with_outbox(Outbox::Table, major)
    }

    fn with_outbox(outbox: Outbox, major: u32) -> Self {
        let fixture = Fixture::bare_with(outbox, Server::shared(major), Broker::shared(), "");
        let [owner, writer, dba] =
            ["Owner", "Writer", "Dba"].map(|what| format!("{}-{what}", fixture.name));
        fixture.db.run(&format!(
            "CREATE ROLE \"{owner}\" LOGIN; CREATE ROLE \"{writer}\" LOGIN; CREATE ROLE \"{dba}\" LOGIN REPLICATION;
             GRANT CREATE ON DATABASE {} TO \"{dba}\"; REVOKE ALL ON SCHEMA public FROM PUBLIC;
             GRANT ALL ON SCHEMA public TO \"{dba}\"",
            fixture.name
        ));
        Self {
            fixture,
            owner,
            writer,
            dba,
        }
    }

    fn session(&self, role: &str) -> Session {
        self.fixture.server.session_as(role, &self.fixture.name)
    }

    fn init(&self) -> Invocation {
        self.fixture.init().args(["--owner", &self.owner])
    }

    /// Returns a `walpost init` command that connects as the DBA.
    fn init_as_dba(&self) -> Invocation {
        let conninfo = self.fixture.conninfo_as(&self.dba);
        let init = self.fixture.with_conninfo(&conninfo).init();
        init.args(["--owner", &self.owner])
    }

    /// Returns the tables, functions and publications that belong to the owner's role.
    fn owned(&self) -> Vec<String> {
        let rows = self.fixture.db.rows(&format!(
            "SELECT c.oid::regclass::text FROM pg_class c WHERE relkind IN ('r', 'p')
                 AND relowner = (SELECT oid FROM pg_roles WHERE rolname = '{0}')
             UNION ALL SELECT p.oid::regprocedure::text FROM pg_proc p
                 WHERE proowner = (SELECT oid FROM pg_roles WHERE rolname = '{0}')
             UNION ALL SELECT pubname FROM pg_publication
                 WHERE pubowner = (SELECT oid FROM pg_roles WHERE rolname = '{0}')
             ORDER BY 1",
            self.owner
        ));
        rows.into_iter().flatten().flatten().collect()
    }
}

impl Drop for OwnerFixture {
    fn drop(&mut self) {
        for role in [&self.owner, &self.writer, &self.dba] {
            self.fixture.db.drop_role(role);
        }
    }
}

fn event(aggregate: &str) -> String {
    format!(
        "INSERT INTO public.outbox (aggregatetype, aggregateid, type, payload) VALUES ('{aggregate}', 'k', 't', '{{}}')"
    )
}

#[test]
fn init_transfers_the_table_to_the_owner_role_and_grants_insert_to_the_writer_role() {
    for major in MAJORS {
        for partitioned in [false, true] {
            let setup = OwnerFixture::new(major);
            let init = || {
                let arguments = partitioned.then_some("--partitioned");
                let init = setup.init().args(arguments);
                init.args(["--writer", &setup.writer]).finish()
            };
            let first = init().expect_code(0);
            first.expect_mentions(&["now belongs to role", &setup.owner]);
            let made = objects(&setup.fixture);
            let owned = setup.owned();
            match partitioned {
                // The partitioned table, its default partition and eight daily partitions.
                true => assert_eq!(owned.len(), 10, "{major}: {owned:?}"),
                false => assert_eq!(owned, ["outbox"], "{major}"),
            }
            assert!(
                owned.iter().all(|name| name.starts_with("outbox")),
                "{owned:?}"
            );

            let aggregate = setup.fixture.aggregate(1);
            let (owner, writer) = (setup.session(&setup.owner), setup.session(&setup.writer));
            let walpost = setup.fixture.start();
            owner.run(&event(&aggregate));
            writer.run(&event(&aggregate));
            setup.fixture.wait_for_records(2);
            walpost.terminate().expect_code(0);
            for refused in [
                "SELECT * FROM public.outbox",
                "DELETE FROM public.outbox",
                "UPDATE public.outbox SET type = 'x'",
                "TRUNCATE public.outbox",
                "SELECT * FROM walpost.journal",
                "CREATE TABLE public.other ()",
                "CREATE TRIGGER t AFTER INSERT ON public.outbox EXECUTE FUNCTION public.walpost_no_update()",
            ] {
                writer.try_run(refused).expect_err(refused);
            }
            owner
                .run("DELETE FROM public.outbox; ALTER TABLE public.outbox ADD COLUMN tenant text");
            owner
                .try_run("SELECT * FROM walpost.journal")
                .expect_err("the journal is Walpost's");

            if partitioned {
                setup.fixture.db.run("DROP TABLE outbox_default");
                let add = "CREATE TABLE outbox_default PARTITION OF outbox DEFAULT";
                setup.fixture.db.run(add);
            }
            let again = init().expect_code(0);
            assert_eq!(
                again.stderr.contains("now belongs to role"),
                partitioned,
                "{again:?}"
            );
            assert_eq!(objects(&setup.fixture), made, "{major}");
            assert_eq!(setup.owned(), owned, "{major}");
            setup.fixture.check().finish().expect_code(0);
        }
    }
}

#[test]
fn init_can_change_the_owner_of_a_table_it_created_earlier() {
    let setup = OwnerFixture::new(15);
    setup.fixture.init().finish().expect_code(0);
    assert!(setup.owned().is_empty());
    setup.init().finish().expect_code(0);
    assert_eq!(setup.owned(), ["outbox"]);
}

#[test]
fn init_rejects_an_owner_role_that_the_dba_cannot_assume() {
    for major in MAJORS {
        let setup = OwnerFixture::new(major);
        let (db, owner, dba) = (&setup.fixture.db, &setup.owner, &setup.dba);
        let refused = |expected: &[&str]| {
            let init = setup.init_as_dba().finish().expect_code(3);
            init.expect_mentions(expected)
                .expect_mentions(&["Nothing was changed"]);
            assert!(objects(&setup.fixture).is_empty(), "{major}: {expected:?}");
            let schemas = "SELECT count(*) FROM pg_namespace WHERE nspname = 'walpost'";
            assert_eq!(db.number(schemas), 0, "{major}: {expected:?}");
        };
        let act_as = format!("GRANT \"{owner}\" TO \"{dba}\"");
        let expected = [
            &*format!("role \"{dba}\" can't act as role \"{owner}\""),
            &act_as,
        ];
        refused(&expected);
        if major >= 16 {
            for option in ["SET", "INHERIT"] {
                db.run(&format!("{act_as} WITH {option} FALSE"));
                refused(&expected);
                db.run(&format!("REVOKE \"{owner}\" FROM \"{dba}\""));
            }
        }
        db.run(&act_as);
        let create = format!("GRANT CREATE ON SCHEMA public TO \"{owner}\"");
        refused(&[
            &format!("role \"{owner}\" may not create objects in schema public"),
            &create,
        ]);
        db.run(&create);
        // If the DBA lacks the grant option, GRANT merely issues a warning.
        let usage = |role: &str| format!("GRANT USAGE ON SCHEMA public TO \"{role}\"");
        refused(&[&usage(owner)]);
        db.run(&usage(owner));
        let init = || {
            let init = setup.init_as_dba().args(["--writer", &setup.writer]);
            init.finish()
        };
        init()
            .expect_code(3)
            .expect_mentions(&["privileges to send events", &usage(&setup.writer)]);
        assert!(objects(&setup.fixture).is_empty(), "{major}");
        db.run(&format!(
            "GRANT USAGE ON SCHEMA public TO \"{dba}\" WITH GRANT OPTION"
        ));
        init().expect_code(0);
        init().expect_code(0);
        assert_eq!(setup.owned(), ["outbox"], "{major}");
        for role in [owner, &setup.writer] {
            setup.session(role).run(&event("a"));
        }
    }
}

#[test]
fn init_reports_missing_owner_and_writer_roles_and_changes_nothing() {
    let setup = OwnerFixture::new(15);
    let init = |arguments: &[&str]| setup.fixture.init().args(arguments).finish().expect_code(3);
    for (flag, to) in [
        ("--owner", "should own table"),
        ("--writer", "should send events"),
    ] {
        init(&[flag, "it's nobody"]).expect_mentions(&[
            &format!("role \"it's nobody\" does not exist, but {to}"),
            "CREATE ROLE \"it's nobody\" LOGIN",
            "Nothing was changed",
        ]);
        assert!(objects(&setup.fixture).is_empty(), "{flag}");
    }
}

#[test]
fn init_does_not_change_the_owner_of_a_table_it_did_not_create() {
    let setup = OwnerFixture::new(15);
    let (db, writer) = (&setup.fixture.db, &setup.writer);
    db.run("CREATE TABLE outbox (id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload jsonb)");
    let refused = |expected: &str| {
        let init = setup.init().finish().expect_code(3);
        init.expect_mentions(&[expected, "docs/retention.md", "Nothing was changed"]);
        assert!(setup.owned().is_empty());
    };
    refused("was not created by Walpost");
    // Makes the table look as if Walpost had created it.
    db.run("ALTER TABLE outbox ADD CONSTRAINT walpost_event_size CHECK (true)");
    db.run(&format!("ALTER TABLE outbox OWNER TO \"{writer}\""));
    refused(&format!("table public.outbox belongs to role \"{writer}\""));
}

#[test]
fn init_rejects_the_owner_flag_if_the_outbox_has_no_table() {
    let setup = OwnerFixture::with_outbox(Outbox::Messages, 15);
    let init = setup.init().finish().expect_code(2);
    init.expect_mentions(&["--owner applies to a single table"]);
    assert!(objects(&setup.fixture).is_empty());
}
