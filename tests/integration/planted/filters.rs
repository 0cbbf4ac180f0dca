//! Row filters in the publication, which the server evaluates as the role that reads the slot.

use super::PlantedFixture;
use crate::support::event::Outbox;
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::lsn::lsn_text;
use crate::support::postgres::{MAJOR, MAJORS, Server};
use crate::support::wait::wait_until;

/// A function, and a table whose partition key calls it.
const PARTITIONED: &str = "CREATE FUNCTION plot.one() RETURNS int LANGUAGE plpgsql IMMUTABLE AS
         $$ BEGIN PERFORM plot.note('partition key'); RETURN 1; END $$;
     CREATE TABLE plot.parted (a int) PARTITION BY HASH ((a + plot.one()));";

/// The major versions that support row filters. PostgreSQL 14 does not.
const MAJORS_WITH_FILTERS: [u32; 4] = [15, 16, 17, 18];

impl PlantedFixture {
    /// Creates a table and a publication that belong to the attacker, and inserts a row while the
    /// publication has a filter. The server evaluates this filter when it decodes the row.
    fn filtered(major: u32) -> Self {
        let shop = Self::owned_by_attacker(major);
        let (fixture, mallory) = (&shop.fixture, &shop.mallory);
        let publication = fixture.slot();
        fixture.db.run(&format!(
            "ALTER PUBLICATION {publication} OWNER TO {mallory}"
        ));
        shop.attacker.run(PARTITIONED);
        shop.attacker
            .run(&filter(&publication, "public.outbox", "plot.parted"));
        fixture.insert(&fixture.aggregate(1), "k");
        shop
    }
}

/// Makes `table` the only table in the publication, with a row filter that evaluates the partition
/// key of `parted`.
fn filter(publication: &str, table: &str, parted: &str) -> String {
    format!(
        "DO $do$ BEGIN EXECUTE format('ALTER PUBLICATION {publication} SET TABLE {table}
             WHERE (satisfies_hash_partition(%s, 1, 0, 1))', '{parted}'::regclass::oid); END $do$"
    )
}

#[test]
fn rejects_a_row_filter_that_runs_code_owned_by_the_publication_owner() {
    for major in MAJORS_WITH_FILTERS {
        let shop = PlantedFixture::filtered(major);
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

/// The server decodes a row with the catalogs as of the time the row was written, so a filter that
/// has since been removed still applies. During decoding, the server can call C functions, which
/// can evaluate CHECK constraints.
#[test]
fn does_not_evaluate_a_removed_row_filter_if_the_publication_owner_is_untrusted() {
    for major in MAJORS_WITH_FILTERS {
        let shop = PlantedFixture::owned_by_attacker(major);
        let (fixture, mallory) = (&shop.fixture, &shop.mallory);
        let publication = fixture.slot();
        let victim = format!("victim_{}", fixture.name);
        fixture.db.run(&format!(
            "ALTER PUBLICATION {publication} OWNER TO {mallory}"
        ));
        fixture.db.run(&format!(
            "SELECT pg_create_logical_replication_slot('{victim}', 'pgoutput')"
        ));
        shop.attacker.run(&format!(
            "CREATE EXTENSION hstore SCHEMA plot;
             CREATE DOMAIN plot.evil AS text CHECK (CASE current_user WHEN '{mallory}' THEN true
                 ELSE pg_catalog.pg_drop_replication_slot('{victim}') IS NULL END);
             CREATE TYPE plot.composed AS (x plot.evil);
             CREATE TABLE plot.parted (a int)
                 PARTITION BY LIST ((a + octet_length((plot.populate_record(NULL::plot.composed, 'x=>1'::plot.hstore)).x)))"
        ));
        shop.attacker
            .run(&filter(&publication, "public.outbox", "plot.parted"));
        fixture.insert(&fixture.aggregate(1), "k");
        shop.attacker.run(&format!(
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
                wait_until("Walpost to exit or to evaluate the filter", || {
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

/// A role with the REPLICATION attribute can already read all WAL and drop the slot, so a filter
/// gives it no additional access.
#[test]
fn trusts_a_publication_owner_that_can_replicate_or_act_as_the_walpost_role() {
    for major in MAJORS {
        let shop = PlantedFixture::owned_by_attacker(major);
        let (db, mallory, walpost) = (&shop.fixture.db, &shop.mallory, &shop.walpost);
        let publication = shop.fixture.slot();
        let is_refused = |role: &str| {
            let check = shop.command_as(role, &["check"]).finish();
            check.stdout.contains("which could run code as role")
        };
        // The attack needs a row filter, which PostgreSQL 14 does not support.
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
fn halts_if_an_untrusted_role_becomes_the_publication_owner() {
    for major in [15, 18] {
        let shop = PlantedFixture::owned_by_attacker(major);
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

/// The publication also contains a table of another pipeline. The server evaluates the row filters
/// of all tables in the publication.
#[test]
fn inspects_row_filters_of_all_tables_in_the_publication() {
    let shop = PlantedFixture::owned_by_attacker(MAJOR);
    let (fixture, mallory) = (&shop.fixture, &shop.mallory);
    let publication = fixture.slot();
    fixture.db.run(&format!(
        "ALTER PUBLICATION {publication} OWNER TO {mallory}"
    ));
    let add = filter(&publication, "plot.other", "plot.parted").replace("SET TABLE", "ADD TABLE");
    shop.attacker.run(&format!(
        "{PARTITIONED} CREATE TABLE plot.other (a int); {add}"
    ));
    let refused = shop.command(&["run"]).finish().expect_code(3);
    refused
        .expect_mentions(&["row filter on table plot.other that calls satisfies_hash_partition"]);
}

#[test]
fn halts_if_a_row_filter_is_added_while_streaming() {
    let shop = PlantedFixture::owned_by_attacker(MAJOR);
    let (fixture, mallory) = (&shop.fixture, &shop.mallory);
    let publication = fixture.slot();
    fixture.db.run(&format!(
        "ALTER ROLE {mallory} REPLICATION; ALTER PUBLICATION {publication} OWNER TO {mallory}"
    ));
    shop.attacker.run(PARTITIONED);
    let walpost = shop.command(&["run", "--snapshot=never"]).start_streaming();
    shop.attacker
        .run(&filter(&publication, "public.outbox", "plot.parted"));
    let halted = walpost.finish().expect_code(3);
    halted.expect_mentions(&[
        "row filter on table public.outbox that calls satisfies_hash_partition",
    ]);
    shop.expect_nothing_ran("run");
}

/// Logical decoding runs without an active snapshot, so calling an SQL function crashes the server
/// process with a segmentation fault.
#[test]
fn does_not_evaluate_a_row_filter_that_would_crash_the_server() {
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
fn accepts_row_filters_that_use_only_built_in_objects() {
    for major in MAJORS.into_iter().filter(|major| *major >= 15) {
        let shop = PlantedFixture::new(Outbox::Table, major);
        let publication = shop.fixture.slot();
        shop.fixture.db.run(&format!(
            "ALTER PUBLICATION {publication} SET TABLE public.outbox WHERE (length(aggregatetype) > 1 AND lower(type) <> 'y'
                 AND created_at > '2025-01-01' AND payload IS NOT NULL AND aggregateid::text ~ 'k' AND type IN ('t', 'u'))"
        ));
        // Changing the filter removed the table from the publication and added it again. Delete the
        // stored state, so that Walpost does not report this change, which the test does not cover.
        shop.fixture.db.run("DELETE FROM walpost.table_state");
        shop.command(&["check"]).finish().expect_code(0);
        shop.init().finish().expect_code(0);
    }
}
