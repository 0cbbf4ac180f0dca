//! Objects planted by another database role must not run code as the DBA who runs a Walpost
//! command, or as Walpost's own role. Each test performs an attack. The planted code logs a warning
//! that names the role it ran as.

use crate::support::event::Outbox;
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::Server;
use crate::support::session::Session;
use crate::support::wait::wait_until;
use crate::support::walpost::Invocation;

/// Generates a test for each version of PostgreSQL.
macro_rules! on_each_version {
    ($($name:ident)*) => { $(
        mod $name {
            #[test]
            fn test_passes_on_postgresql_14() {
                super::$name(14);
            }

            #[test]
            fn test_passes_on_postgresql_15() {
                super::$name(15);
            }

            #[test]
            fn test_passes_on_postgresql_16() {
                super::$name(16);
            }

            #[test]
            fn test_passes_on_postgresql_17() {
                super::$name(17);
            }

            #[test]
            fn test_passes_on_postgresql_18() {
                super::$name(18);
            }
        }
    )* };
}

mod composed;
mod expressions;
mod files;
mod filters;
mod former_owners;
mod functions;
mod journal;
mod outbox;
mod partitions;
mod printed;
mod races;
mod roles;
mod tables;

/// A database with two roles: one for the attacker, and one for `walpost run`.
struct PlantedFixture {
    fixture: Fixture<'static>,
    /// The attacker's role. It may create objects in any schema, just as every role could in the
    /// schema public before PostgreSQL 15.
    mallory: String,
    /// The role that Walpost connects as.
    walpost: String,
    /// A session connected as the attacker.
    attacker: Session,
    /// The length of the server's log when the test started.
    log_length: u64,
}

impl PlantedFixture {
    /// Creates a database without any of Walpost's objects.
    fn bare(outbox: Outbox, major: u32) -> Self {
        let fixture = Fixture::bare_with(outbox, Server::shared(major), Broker::shared(), "");
        let (mallory, walpost) = (format!("{}_m", fixture.name), format!("{}_w", fixture.name));
        let log_length = fixture.server.log_length();
        fixture.db.run(&format!(
            "CREATE ROLE {mallory} LOGIN; GRANT CREATE ON SCHEMA public TO PUBLIC;
             GRANT CREATE ON DATABASE {} TO {mallory};
             SET search_path = pg_catalog",
            fixture.name
        ));
        let attacker = fixture.server.session_as(&mallory, &fixture.name);
        attacker.run(
            "CREATE SCHEMA plot; GRANT USAGE ON SCHEMA plot TO PUBLIC;
             CREATE FUNCTION plot.note(what text) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN
                 RAISE WARNING 'PLANTED % in % ran as %.', what, current_database(), current_user;
                 RETURN true; END $$;
             CREATE FUNCTION plot.row() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                 PERFORM plot.note('trigger'); RETURN NULL; END $$",
        );
        Self {
            fixture,
            mallory,
            walpost,
            attacker,
            log_length,
        }
    }

    /// Creates a database with the objects that `walpost init` creates.
    fn new(outbox: Outbox, major: u32) -> Self {
        let shop = Self::bare(outbox, major);
        shop.init().finish().expect_code(0);
        shop
    }

    /// Creates a database in which the attacker owns the table outbox, which contains one row.
    fn owned_by_attacker(major: u32) -> Self {
        let shop = Self::new(Outbox::Table, major);
        let fixture = &shop.fixture;
        fixture.insert(&fixture.aggregate(1), "k");
        fixture.db.run(&format!(
            "ALTER TABLE public.outbox OWNER TO {}; ALTER TABLE public.outbox DISABLE TRIGGER USER;
             DELETE FROM walpost.journal",
            shop.mallory
        ));
        shop
    }

    fn init(&self) -> Invocation {
        self.fixture.invoke("init").args(["--role", &self.walpost])
    }

    /// Returns a command that connects as Walpost's role.
    fn command(&self, words: &[&str]) -> Invocation {
        self.command_as(&self.walpost, words)
    }

    fn command_as(&self, role: &str, words: &[&str]) -> Invocation {
        let conninfo = self.fixture.conninfo_as(role);
        let command = self
            .fixture
            .with_conninfo(&conninfo)
            .invoke(words[0])
            .args(&words[1..]);
        match words[0] {
            "maintain" | "init" => command,
            _ => command.args(["--kafka", &self.fixture.broker.address()]),
        }
    }

    /// Makes Walpost treat every event as delivered, without running Walpost.
    fn confirm_all_events(&self) {
        let (db, slot) = (&self.fixture.db, self.fixture.slot());
        let end = db.value("SELECT pg_current_wal_lsn()").expect("an LSN");
        for statement in [
            format!("UPDATE walpost.slot_state SET confirmed_lsn = '{end}' WHERE slot = '{slot}'"),
            format!("SELECT pg_catalog.pg_replication_slot_advance('{slot}', '{end}')"),
        ] {
            db.run(&statement);
        }
    }

    /// Runs maintenance passes until a dry run reports that the next pass would perform `step`.
    fn maintain_until_due(&self, maintain: impl Fn(&[&str]) -> Invocation, step: &str) {
        wait_until(step, || {
            self.confirm_all_events();
            let dry_run = maintain(&["--dry-run"]).finish();
            // Perform steps that only record progress in a comment, so that `step` becomes due.
            if dry_run.stdout.contains("would record") {
                maintain(&[]).finish();
            }
            dry_run.stdout.contains(step)
        });
    }

    /// Returns every log line written by planted code that ran as a role other than the attacker's.
    fn planted_code_runs(&self) -> Vec<String> {
        let (ours, theirs) = (
            format!(" in {} ran as ", self.fixture.name),
            format!(" ran as {}.", self.mallory),
        );
        let log = self.fixture.server.log_after(self.log_length);
        let lines = log.lines().filter(|line| {
            line.contains("PLANTED") && line.contains(&ours) && !line.contains(&theirs)
        });
        lines.map(str::to_owned).collect()
    }

    fn expect_nothing_ran(&self, after: &str) {
        let (planted_code_runs, major) = (self.planted_code_runs(), self.fixture.server.major);
        assert!(
            planted_code_runs.is_empty(),
            "PostgreSQL {major}, after {after}: {planted_code_runs:#?}"
        );
    }
}

impl Drop for PlantedFixture {
    fn drop(&mut self) {
        for role in [&self.mallory, &self.walpost] {
            self.fixture.db.drop_role(role);
        }
    }
}
