//! Row filters of the publication, which the server evaluates as the role that reads the slot.

use super::Shop;
use crate::support::event::Outbox;
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::lsn::lsn_text;
use crate::support::postgres::{MAJOR, MAJORS, Server};
use crate::support::wait::wait_until;

/// A function that a partition key calls, and the table with that key.
const PARTITIONED: &str = "CREATE FUNCTION plot.one() RETURNS int LANGUAGE plpgsql IMMUTABLE AS
         $$ BEGIN PERFORM plot.note('partition key'); RETURN 1; END $$;
     CREATE TABLE plot.parted (a int) PARTITION BY HASH ((a + plot.one()));";

/// PostgreSQL 14 has no row filters.
const FILTERING: [u32; 4] = [15, 16, 17, 18];

impl Shop {
    /// Creates a table and a publication that belong to the attacker, and a row for which the
    /// filter was evaluated.
    fn filtered(major: u32) -> Self {
        let shop = Self::theirs(major);
        let (fixture, mallory) = (&shop.fixture, &shop.mallory);
        let publication = fixture.slot();
        fixture.db.run(&format!(
            "ALTER PUBLICATION {publication} OWNER TO {mallory}"
        ));
        shop.theirs.run(PARTITIONED);
        shop.theirs
            .run(&filter(&publication, "public.outbox", "plot.parted"));
        fixture.insert(&fixture.aggregate(1), "k");
        shop
    }
}

/// Replaces the tables of the publication with this one, with a filter that evaluates the partition
/// key of the other.
fn filter(publication: &str, table: &str, parted: &str) -> String {
    format!(
        "DO $do$ BEGIN EXECUTE format('ALTER PUBLICATION {publication} SET TABLE {table}
             WHERE (satisfies_hash_partition(%s, 1, 0, 1))', '{parted}'::regclass::oid); END $do$"
    )
}

#[test]
fn filter_that_runs_code_of_the_publications_owner_is_refused() {
    for major in FILTERING {
        let shop = Shop::filtered(major);
        let to = lsn_text(shop.fixture.wal_position());
        for role in [&*shop.walpost, "postgres"] {
            for words in [
                &["check"][..],
                &["run"],
                &["skip", "--yes", "--to", &to],
                &["skip", "--dry-run", "--to", &to],
            ] {
                let refused = shop.command_as(role, words).finish();
                shop.expect_nothing_ran(words[0]);
                assert_ne!(refused.code, Some(0), "{role} {words:?}: {refused:?}");
                refused.expect_mentions(&[
                    "row filter on table public.outbox that calls satisfies_hash_partition",
                ]);
            }
        }
        let init = shop.init().finish().expect_code(3);
        init.expect_mentions(&[
            "row filter on table public.outbox that calls satisfies_hash_partition",
        ]);
        shop.expect_nothing_ran("init");
    }
}

/// The server decodes with the catalogs as of when the row was written. Functions in C can run
/// there, also those in a CHECK.
#[test]
fn filter_that_was_removed_again_is_not_evaluated_if_the_publications_owner_is_not_trusted() {
    for major in FILTERING {
        let shop = Shop::theirs(major);
        let (fixture, mallory) = (&shop.fixture, &shop.mallory);
        let publication = fixture.slot();
        let victim = format!("victim_{}", fixture.name);
        fixture.db.run(&format!(
            "ALTER PUBLICATION {publication} OWNER TO {mallory}"
        ));
        fixture.db.run(&format!(
            "SELECT pg_create_logical_replication_slot('{victim}', 'pgoutput')"
        ));
        shop.theirs.run(&format!(
            "CREATE EXTENSION hstore SCHEMA plot;
             CREATE DOMAIN plot.evil AS text CHECK (CASE current_user WHEN '{mallory}' THEN true
                 ELSE pg_catalog.pg_drop_replication_slot('{victim}') IS NULL END);
             CREATE TYPE plot.composed AS (x plot.evil);
             CREATE TABLE plot.parted (a int)
                 PARTITION BY LIST ((a + octet_length((plot.populate_record(NULL::plot.composed, 'x=>1'::plot.hstore)).x)))"
        ));
        shop.theirs
            .run(&filter(&publication, "public.outbox", "plot.parted"));
        fixture.insert(&fixture.aggregate(1), "k");
        shop.theirs.run(&format!(
            "ALTER PUBLICATION {publication} SET TABLE public.outbox"
        ));
        let slots =
            format!("SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{victim}'");
        let to = lsn_text(fixture.wal_position());
        for role in [&*shop.walpost, "postgres"] {
            for words in [
                &["run", "--snapshot=never"][..],
                &["skip", "--dry-run", "--to", &to],
                &["check"],
            ] {
                let mut command = shop.command_as(role, words).start();
                wait_until("it to end, or to evaluate the filter", || {
                    !command.is_running() || fixture.db.number(&slots) == 0
                });
                assert_eq!(fixture.db.number(&slots), 1, "{role} {words:?}");
                let owner =
                    format!("belongs to role {mallory}, which could run code as role {role}");
                command.finish().expect_code(3).expect_mentions(&[&owner]);
            }
        }
    }
}

/// A role with REPLICATION can already read all WAL and drop the slot, so it gains nothing from a
/// filter.
#[test]
fn owner_of_the_publication_is_trusted_if_it_may_replicate_or_act_as_walposts_role() {
    for major in MAJORS {
        let shop = Shop::theirs(major);
        let (db, mallory, walpost) = (&shop.fixture.db, &shop.mallory, &shop.walpost);
        let publication = shop.fixture.slot();
        let is_refused = |role: &str| {
            let check = shop.command_as(role, &["check"]).finish();
            check.stdout.contains("which could run code as role")
        };
        // PostgreSQL 14 has no row filters.
        let has_filters = major >= 15;
        assert!(!is_refused(walpost), "PostgreSQL {major}, a superuser");
        db.run(&format!(
            "ALTER PUBLICATION {publication} OWNER TO {mallory}"
        ));
        assert_eq!(is_refused(walpost), has_filters, "PostgreSQL {major}");
        db.run(&format!("ALTER ROLE {mallory} REPLICATION"));
        assert!(!is_refused(walpost), "PostgreSQL {major}, may replicate");
        assert_eq!(
            is_refused("postgres"),
            has_filters,
            "PostgreSQL {major}, as a superuser"
        );
        db.run(&format!(
            "ALTER ROLE {mallory} NOREPLICATION; GRANT {walpost} TO {mallory}"
        ));
        assert!(!is_refused(walpost), "PostgreSQL {major}, a member");
        db.run(&format!("REVOKE {walpost} FROM {mallory}"));
        assert_eq!(is_refused(walpost), has_filters, "PostgreSQL {major}");
        db.run(&format!(
            "ALTER PUBLICATION {publication} OWNER TO {walpost}"
        ));
        assert!(!is_refused(walpost), "PostgreSQL {major}, its own");
    }
}

#[test]
fn publication_that_gets_an_owner_who_is_not_trusted_halts_the_pipeline() {
    for major in [15, 18] {
        let shop = Shop::theirs(major);
        let (fixture, mallory) = (&shop.fixture, &shop.mallory);
        let walpost = shop.command(&["run", "--snapshot=never"]).start_streaming();
        fixture.db.run(&format!(
            "ALTER PUBLICATION {} OWNER TO {mallory}",
            fixture.slot()
        ));
        let halted = walpost.finish().expect_code(3);
        halted.expect_mentions(&[&format!("belongs to role {mallory}")]);
    }
}

/// The filter belongs to a table of another pipeline.
#[test]
fn filters_of_all_tables_of_the_publication_are_examined() {
    let shop = Shop::theirs(MAJOR);
    let (fixture, mallory) = (&shop.fixture, &shop.mallory);
    let publication = fixture.slot();
    fixture.db.run(&format!(
        "ALTER PUBLICATION {publication} OWNER TO {mallory}"
    ));
    let add = filter(&publication, "plot.other", "plot.parted").replace("SET TABLE", "ADD TABLE");
    shop.theirs.run(&format!(
        "{PARTITIONED} CREATE TABLE plot.other (a int); {add}"
    ));
    let refused = shop.command(&["run"]).finish().expect_code(3);
    refused
        .expect_mentions(&["row filter on table plot.other that calls satisfies_hash_partition"]);
}

#[test]
fn filter_that_is_added_while_streaming_halts_the_pipeline() {
    let shop = Shop::theirs(MAJOR);
    let (fixture, mallory) = (&shop.fixture, &shop.mallory);
    let publication = fixture.slot();
    fixture.db.run(&format!(
        "ALTER ROLE {mallory} REPLICATION; ALTER PUBLICATION {publication} OWNER TO {mallory}"
    ));
    shop.theirs.run(PARTITIONED);
    let walpost = shop.command(&["run", "--snapshot=never"]).start_streaming();
    shop.theirs
        .run(&filter(&publication, "public.outbox", "plot.parted"));
    let halted = walpost.finish().expect_code(3);
    halted.expect_mentions(&[
        "row filter on table public.outbox that calls satisfies_hash_partition",
    ]);
    shop.expect_nothing_ran("run");
}

/// Logical decoding has no snapshot, so an SQL function crashes the server process with a
/// segmentation fault.
#[test]
fn filter_that_would_crash_the_server_is_not_evaluated() {
    for major in [15, 18] {
        let server = Server::private(major, "");
        let fixture = Fixture::with_outbox_on(Outbox::Table, &server, Broker::shared());
        let publication = fixture.slot();
        fixture.db.run(
            "CREATE SCHEMA plot;
             CREATE FUNCTION plot.one() RETURNS int LANGUAGE sql IMMUTABLE SECURITY DEFINER AS 'SELECT 1';
             CREATE TABLE plot.parted (a int) PARTITION BY HASH ((a + plot.one()))",
        );
        fixture
            .db
            .run(&filter(&publication, "public.outbox", "plot.parted"));
        fixture.insert(&fixture.aggregate(1), "k");
        let halted = fixture.run().finish();
        assert!(!server.log().contains("terminated by signal"), "{halted:?}");
        halted
            .expect_code(3)
            .expect_mentions(&["row filter on table public.outbox"]);
    }
}

#[test]
fn accepts_filters_that_use_only_built_in_objects() {
    for major in MAJORS.into_iter().filter(|major| *major >= 15) {
        let shop = Shop::new(Outbox::Table, major);
        let publication = shop.fixture.slot();
        shop.fixture.db.run(&format!(
            "ALTER PUBLICATION {publication} SET TABLE public.outbox WHERE (length(aggregatetype) > 1 AND lower(type) <> 'y'
                 AND created_at > '2025-01-01' AND payload IS NOT NULL AND aggregateid::text ~ 'k' AND type IN ('t', 'u'))"
        ));
        // Changing the filter removed the table and added it again, which is not the subject of
        // this test.
        shop.fixture.db.run("DELETE FROM walpost.table_state");
        shop.command(&["check"]).finish().expect_code(0);
        shop.init().finish().expect_code(0);
    }
}
