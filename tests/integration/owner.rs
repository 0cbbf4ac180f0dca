//! `walpost init --owner` and `--writer`, for applications whose role is not a superuser.

use crate::init::objects;
use crate::support::event::Outbox;
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJORS, Server};
use crate::support::session::Session;
use crate::support::walpost::Invocation;

/// An empty database with its own roles, whose names have to be quoted in SQL.
struct Place {
    fixture: Fixture<'static>,
    owner: String,
    writer: String,
    /// A DBA who is not a superuser.
    dba: String,
}

impl Place {
    fn new(major: u32) -> Self {
        Self::of(Outbox::Table, major)
    }

    fn of(outbox: Outbox, major: u32) -> Self {
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

    /// Returns `init` run by the DBA who is not a superuser.
    fn init_as_dba(&self) -> Invocation {
        let conninfo = self.fixture.conninfo_as(&self.dba);
        let init = self.fixture.with_conninfo(&conninfo).init();
        init.args(["--owner", &self.owner])
    }

    /// Returns the tables, functions and publications that belong to the owner.
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

impl Drop for Place {
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
fn owner_has_the_table_and_its_partitions_and_a_writer_may_insert() {
    for major in MAJORS {
        for partitioned in [false, true] {
            let place = Place::new(major);
            let init = || {
                let arguments = partitioned.then_some("--partitioned");
                let init = place.init().args(arguments);
                init.args(["--writer", &place.writer]).finish()
            };
            let first = init().expect_code(0);
            first.expect_mentions(&["now belongs to role", &place.owner]);
            let made = objects(&place.fixture);
            let owned = place.owned();
            match partitioned {
                // The partitioned table, its default partition and weekly partitions.
                true => assert_eq!(owned.len(), 10, "{major}: {owned:?}"),
                false => assert_eq!(owned, ["outbox"], "{major}"),
            }
            assert!(
                owned.iter().all(|name| name.starts_with("outbox")),
                "{owned:?}"
            );

            let aggregate = place.fixture.aggregate(1);
            let (owner, writer) = (place.session(&place.owner), place.session(&place.writer));
            let walpost = place.fixture.start();
            owner.run(&event(&aggregate));
            writer.run(&event(&aggregate));
            place.fixture.wait_for_records(2);
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
                place.fixture.db.run("DROP TABLE outbox_default");
                let add = "CREATE TABLE outbox_default PARTITION OF outbox DEFAULT";
                place.fixture.db.run(add);
            }
            let again = init().expect_code(0);
            assert_eq!(
                again.stderr.contains("now belongs to role"),
                partitioned,
                "{again:?}"
            );
            assert_eq!(objects(&place.fixture), made, "{major}");
            assert_eq!(place.owned(), owned, "{major}");
            place.fixture.check().finish().expect_code(0);
        }
    }
}

#[test]
fn table_that_an_earlier_init_has_made_can_be_given_to_its_owner() {
    let place = Place::new(15);
    place.fixture.init().finish().expect_code(0);
    assert!(place.owned().is_empty());
    place.init().finish().expect_code(0);
    assert_eq!(place.owned(), ["outbox"]);
}

#[test]
fn owner_that_the_dba_can_not_act_as_is_refused_and_nothing_is_changed() {
    for major in MAJORS {
        let place = Place::new(major);
        let (db, owner, dba) = (&place.fixture.db, &place.owner, &place.dba);
        let refused = |says: &[&str]| {
            let init = place.init_as_dba().finish().expect_code(3);
            init.expect_mentions(says)
                .expect_mentions(&["Nothing was changed"]);
            assert!(objects(&place.fixture).is_empty(), "{major}: {says:?}");
            let schemas = "SELECT count(*) FROM pg_namespace WHERE nspname = 'walpost'";
            assert_eq!(db.number(schemas), 0, "{major}: {says:?}");
        };
        let act_as = format!("GRANT \"{owner}\" TO \"{dba}\"");
        let says = [
            &*format!("role \"{dba}\" can't act as role \"{owner}\""),
            &act_as,
        ];
        refused(&says);
        if major >= 16 {
            for option in ["SET", "INHERIT"] {
                db.run(&format!("{act_as} WITH {option} FALSE"));
                refused(&says);
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
        // GRANT only warns if the DBA has no right to grant.
        let usage = |role: &str| format!("GRANT USAGE ON SCHEMA public TO \"{role}\"");
        refused(&[&usage(owner)]);
        db.run(&usage(owner));
        let init = || {
            let init = place.init_as_dba().args(["--writer", &place.writer]);
            init.finish()
        };
        init()
            .expect_code(3)
            .expect_mentions(&["privileges to send events", &usage(&place.writer)]);
        assert!(objects(&place.fixture).is_empty(), "{major}");
        db.run(&format!(
            "GRANT USAGE ON SCHEMA public TO \"{dba}\" WITH GRANT OPTION"
        ));
        init().expect_code(0);
        init().expect_code(0);
        assert_eq!(place.owned(), ["outbox"], "{major}");
        for role in [owner, &place.writer] {
            place.session(role).run(&event("a"));
        }
    }
}

#[test]
fn owner_and_writer_that_are_not_there_are_named_and_nothing_is_changed() {
    let place = Place::new(15);
    let init = |arguments: &[&str]| place.fixture.init().args(arguments).finish().expect_code(3);
    for (flag, to) in [
        ("--owner", "should own table"),
        ("--writer", "should send events"),
    ] {
        init(&[flag, "it's nobody"]).expect_mentions(&[
            &format!("role \"it's nobody\" does not exist, and {to}"),
            "CREATE ROLE \"it's nobody\" LOGIN",
            "Nothing was changed",
        ]);
        assert!(objects(&place.fixture).is_empty(), "{flag}");
    }
}

#[test]
fn table_of_another_role_or_make_is_not_given_away() {
    let place = Place::new(15);
    let (db, writer) = (&place.fixture.db, &place.writer);
    db.run("CREATE TABLE outbox (id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload jsonb)");
    let refused = |says: &str| {
        let init = place.init().finish().expect_code(3);
        init.expect_mentions(&[says, "docs/retention.md", "Nothing was changed"]);
        assert!(place.owned().is_empty());
    };
    refused("was not created by Walpost");
    // Makes the table look as if Walpost had created it.
    db.run("ALTER TABLE outbox ADD CONSTRAINT walpost_event_size CHECK (true)");
    db.run(&format!("ALTER TABLE outbox OWNER TO \"{writer}\""));
    refused(&format!("table public.outbox belongs to role \"{writer}\""));
}

#[test]
fn outbox_without_a_table_has_no_owner() {
    let place = Place::of(Outbox::Messages, 15);
    let init = place.init().finish().expect_code(2);
    init.expect_mentions(&["--owner is for a table"]);
    assert!(objects(&place.fixture).is_empty());
}
