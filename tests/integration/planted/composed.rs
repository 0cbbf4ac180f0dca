//! A role changes its objects while Walpost waits for a lock on the table. A statement composed
//! from the results of earlier catalog queries could then run that role's code. The same applies to
//! conditions passed with `--where`, which are SQL.

use std::collections::HashSet;

use super::PlantedFixture;
use crate::support::event::Outbox;
use crate::support::wait::wait_until;
use crate::support::walpost::{Finished, Invocation};

on_each_version! {
    replay_calls_no_cast_for_a_key_column_that_is_replaced_during_a_lock_wait
    verify_calls_no_cast_for_a_time_column_that_is_replaced_during_a_lock_wait
    does_not_call_an_operator_in_a_schema_owned_by_another_role
    literals_in_a_replay_condition_run_no_code_owned_by_other_roles
    replay_condition_calls_no_cast_defined_by_the_table_owner
    maintenance_does_not_evaluate_a_partition_key_that_changes_during_a_lock_wait
    maintenance_runs_no_planted_code_after_the_time_column_is_renamed
    maintenance_does_not_fire_a_delete_trigger_created_while_it_waits_for_slots
    maintenance_does_not_fire_a_trigger_of_an_open_transaction
    maintenance_runs_no_code_created_before_it_detaches_a_partition
    snapshot_evaluates_no_indexes_or_statistics_created_during_a_lock_wait
}

/// A composite type with casts written by the attacker. Adding a column of this type with a
/// constant default does not rewrite the table, so older snapshots still see the rows.
const CASTS: &str = "CREATE TYPE plot.pair AS (a text);
    CREATE FUNCTION plot.as_text(plot.pair) RETURNS text LANGUAGE plpgsql IMMUTABLE AS
        $$ BEGIN RETURN plot.note('cast'); END $$;
    CREATE FUNCTION plot.as_time(plot.pair) RETURNS timestamptz LANGUAGE plpgsql IMMUTABLE AS
        $$ BEGIN PERFORM plot.note('cast'); RETURN '2030-01-01'; END $$;
    CREATE CAST (plot.pair AS text) WITH FUNCTION plot.as_text(plot.pair) AS IMPLICIT;
    CREATE CAST (plot.pair AS timestamptz) WITH FUNCTION plot.as_time(plot.pair) AS IMPLICIT;";

/// A domain with a CHECK constraint written by the attacker.
const DOMAIN: &str = "CREATE DOMAIN plot.checked AS text CHECK (plot.note('domain'));";

/// A query that returns whether a session waits for a lock on the outbox.
const WAITS: &str =
    "SELECT EXISTS (SELECT FROM pg_locks WHERE relation = 'public.outbox'::regclass AND NOT granted
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))";

/// A table with the same name as the column that stores the creation time of rows.
const NAMESAKE_TABLE: &str = "public.created_at";

impl PlantedFixture {
    /// Starts a command and, while it waits for the lock on the table, commits `change` as the
    /// attacker.
    fn change_while_waiting(&self, command: Invocation, change: &str) -> Finished {
        let holder = self
            .fixture
            .server
            .session_as(&self.mallory, &self.fixture.name);
        holder.run("BEGIN; LOCK TABLE ONLY public.outbox IN SHARE UPDATE EXCLUSIVE MODE");
        let command = command.start();
        wait_until("Walpost to wait for the table", || holder.is_true(WAITS));
        holder.run(change);
        holder.run("COMMIT");
        command.finish()
    }

    /// Waits until `maintain` has begun to wait for a lock on the table a second time. `maintain`
    /// first waits because it examines the table before it does anything else. That wait ends with
    /// a timeout, which `maintain` does not treat as an error.
    fn wait_until_second_lock_wait(&self, table: &str) {
        let begin = format!(
            "SELECT waitstart::text FROM pg_locks WHERE relation = '{table}'::regclass AND NOT granted"
        );
        let mut waits = HashSet::new();
        wait_until("maintain to wait for the table a second time", || {
            waits.extend(self.fixture.db.value(&begin));
            waits.len() > 1
        });
    }

    /// Returns the run ID of a replay that was interrupted.
    fn stopped_replay(&self) -> String {
        let words = ["replay", "--all", "--yes", "--rate", "1"];
        let replay = self.command_as("postgres", &words).start();
        let run = "SELECT detail ->> 'run' FROM walpost.journal WHERE action = 'replay' ORDER BY id LIMIT 1";
        wait_until("the replay in the journal", || {
            self.fixture.db.value(run).is_some()
        });
        replay.terminate().expect_code(1);
        self.fixture.db.value(run).expect("a replay")
    }
}

fn replay_calls_no_cast_for_a_key_column_that_is_replaced_during_a_lock_wait(major: u32) {
    let shop = PlantedFixture::owned_by_attacker(major);
    for _ in 0..3 {
        shop.fixture.insert(&shop.fixture.aggregate(1), "k");
    }
    shop.attacker.run(CASTS);
    let run = shop.stopped_replay();
    let resume = shop.command_as("postgres", &["replay", "--yes", "--resume", &run]);
    let resumed = shop.change_while_waiting(
        resume,
        "ALTER TABLE public.outbox DROP id; ALTER TABLE public.outbox ADD id plot.pair DEFAULT ROW('x')::plot.pair",
    );
    shop.expect_nothing_ran("replay --resume");
    assert_ne!(resumed.code, Some(0), "{resumed:?}");
}

fn verify_calls_no_cast_for_a_time_column_that_is_replaced_during_a_lock_wait(major: u32) {
    for role in ["postgres", ""] {
        let shop = PlantedFixture::owned_by_attacker(major);
        let role = if role.is_empty() { &shop.walpost } else { role };
        shop.attacker.run(CASTS);
        shop.attacker
            .run("ALTER TABLE public.outbox ADD at timestamptz DEFAULT now()");
        let verify = shop.command_as(role, &["verify", "--time-column=at", "--since=1h"]);
        let verified = shop.change_while_waiting(
            verify,
            "ALTER TABLE public.outbox DROP at; ALTER TABLE public.outbox ADD at plot.pair DEFAULT ROW('x')::plot.pair",
        );
        shop.expect_nothing_ran("verify --time-column");
        assert_ne!(verified.code, Some(0), "{verified:?}");
    }
}

/// The owner of a schema can rename it and then create another schema with the old name. Looking up
/// an operator by its schema's name may then find a different operator.
fn does_not_call_an_operator_in_a_schema_owned_by_another_role(major: u32) {
    let shop = PlantedFixture::bare(Outbox::Table, major);
    let db = &shop.fixture.db;
    db.run(
        "CREATE EXTENSION citext SCHEMA plot;
         CREATE TABLE public.outbox (id plot.citext PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload jsonb);
         INSERT INTO public.outbox SELECT id, 'order', 'k', 't', '{}' FROM unnest('{a1,B1,c1}'::text[]) AS id",
    );
    shop.init().finish().expect_code(0);
    db.run(&format!(
        "ALTER TABLE public.outbox OWNER TO {}; DELETE FROM walpost.journal",
        shop.mallory
    ));
    let words = ["replay", "--dry-run", "--from", "B1"];
    let replayed = shop.change_while_waiting(
        shop.command_as("postgres", &words),
        "ALTER SCHEMA plot RENAME TO aside; CREATE SCHEMA plot; GRANT USAGE ON SCHEMA plot, aside TO PUBLIC;
         CREATE FUNCTION plot.note(text) RETURNS boolean LANGUAGE sql AS $$ SELECT aside.note($1) $$;
         CREATE DOMAIN plot.citext AS text CHECK (plot.note('domain'));
         CREATE FUNCTION plot.compare(text, text) RETURNS boolean LANGUAGE plpgsql AS
             $$ BEGIN RETURN plot.note('operator'); END $$;
         CREATE OPERATOR plot.>= (LEFTARG = text, RIGHTARG = text, FUNCTION = plot.compare)",
    );
    shop.expect_nothing_ran("replay --from");
    assert_ne!(replayed.code, Some(0), "{replayed:?}");
}

fn literals_in_a_replay_condition_run_no_code_owned_by_other_roles(major: u32) {
    let shop = PlantedFixture::owned_by_attacker(major);
    shop.attacker.run(DOMAIN);
    shop.attacker
        .run("GRANT USAGE ON TYPE plot.checked TO PUBLIC");
    shop.fixture.db.run(
        "CREATE TYPE public.pair AS (a plot.checked); GRANT USAGE ON TYPE public.pair TO PUBLIC",
    );
    for (column, condition) in [
        ("plot.checked[]", "planted = '{x}'"),
        ("public.pair", "planted = '(x)'"),
        ("public.pair[]", "planted = '{(x)}'"),
        ("plot.checked", "array_position(ARRAY[planted], 'x') = 1"),
    ] {
        shop.attacker
            .run(&format!("ALTER TABLE public.outbox ADD planted {column}"));
        for role in [&*shop.walpost, "postgres"] {
            let words = ["replay", "--dry-run", "--where", condition];
            let refused = shop.command_as(role, &words).finish();
            shop.expect_nothing_ran(condition);
            assert_ne!(refused.code, Some(0), "{refused:?}");
        }
        shop.attacker.run("ALTER TABLE public.outbox DROP planted");
    }
}

fn replay_condition_calls_no_cast_defined_by_the_table_owner(major: u32) {
    let shop = PlantedFixture::owned_by_attacker(major);
    shop.attacker.run(
        "CREATE FUNCTION plot.as_text(public.outbox) RETURNS text LANGUAGE plpgsql IMMUTABLE AS
             $$ BEGIN RETURN plot.note('cast'); END $$;
         CREATE CAST (public.outbox AS text) WITH FUNCTION plot.as_text(public.outbox) AS IMPLICIT",
    );
    for condition in [
        "outbox::text <> ''",
        "outbox = 'x'",
        "(SELECT o FROM (SELECT outbox) AS o)::text <> ''",
    ] {
        shop.command(&["replay", "--dry-run", "--where", condition])
            .finish();
        shop.expect_nothing_ran(condition);
    }
}

/// PostgreSQL converts the bounds of a partition to the type of the partition key. If that type is
/// a domain, this evaluates its CHECK constraint.
fn maintenance_does_not_evaluate_a_partition_key_that_changes_during_a_lock_wait(major: u32) {
    let shop = PlantedFixture::bare(Outbox::Table, major);
    shop.init().arg("--partitioned").finish().expect_code(0);
    shop.fixture.db.run(&format!(
        "ALTER TABLE public.outbox OWNER TO {}",
        shop.mallory
    ));
    shop.attacker
        .run("CREATE DOMAIN plot.moment AS timestamptz CHECK (plot.note('bound'))");
    let maintained = shop.change_while_waiting(
        shop.command_as("postgres", &["maintain", "--partitions-ahead", "20"]),
        "ALTER TABLE public.outbox RENAME TO aside;
         CREATE TABLE public.outbox (LIKE public.aside, at plot.moment NOT NULL) PARTITION BY RANGE (at)",
    );
    shop.expect_nothing_ran("maintain");
    assert_ne!(maintained.code, Some(0), "{maintained:?}");
}

/// If the table has no column `created_at`, the name refers to the whole row of a table named
/// created_at, and the table's owner can define casts for its row type. Reading the column by name
/// would call such a cast.
fn maintenance_runs_no_planted_code_after_the_time_column_is_renamed(major: u32) {
    let shop = PlantedFixture::bare(Outbox::Table, major);
    let (fixture, mallory) = (&shop.fixture, &shop.mallory);
    let of_table = |words: &[&str]| {
        let command = shop.command_as("postgres", words);
        command.args(["--table", NAMESAKE_TABLE])
    };
    let init = shop.init().args(["--table", NAMESAKE_TABLE]);
    init.finish().expect_code(0);
    fixture.db.run(&format!(
        "ALTER TABLE {NAMESAKE_TABLE} OWNER TO {mallory}; ALTER TABLE {NAMESAKE_TABLE} DISABLE TRIGGER USER"
    ));
    shop.attacker.run(&format!(
        "INSERT INTO {NAMESAKE_TABLE} (aggregatetype, aggregateid, type, created_at) VALUES ('a', 'b', 'c', now() - interval '2 days');
         CREATE FUNCTION plot.as_time({NAMESAKE_TABLE}) RETURNS timestamptz LANGUAGE plpgsql IMMUTABLE AS
             $$ BEGIN PERFORM plot.note('cast'); RETURN '2000-01-01'; END $$;
         CREATE CAST ({NAMESAKE_TABLE} AS timestamptz) WITH FUNCTION plot.as_time({NAMESAKE_TABLE}) AS IMPLICIT"
    ));
    let maintain = |more: &[&str]| {
        let command = of_table(&["maintain", "--retention=1s", "--delete-rows"]);
        command.args(more)
    };
    shop.maintain_until_due(maintain, "would delete rows");
    let holder = fixture.server.session_as(mallory, &fixture.name);
    // Other sessions still see the column `created_at` until this transaction commits.
    holder.run(&format!(
        "BEGIN; ALTER TABLE {NAMESAKE_TABLE} RENAME created_at TO aside"
    ));
    let command = maintain(&[]).start();
    // `maintain` waits for the lock on the table twice: before it looks for the column
    // `created_at`, and in the transaction that reads the rows.
    shop.wait_until_second_lock_wait(NAMESAKE_TABLE);
    holder.run("COMMIT");
    let maintained = command.finish();
    shop.expect_nothing_ran("maintain");
    maintained.expect_mentions(&["table public.created_at was changed"]);
}

/// `maintain` reads a batch of rows, waits until every slot that delivers the table has advanced
/// past the rows, and deletes the rows in another transaction. While waiting, `maintain` holds no
/// lock on the table.
fn maintenance_does_not_fire_a_delete_trigger_created_while_it_waits_for_slots(major: u32) {
    let shop = PlantedFixture::new(Outbox::Table, major);
    let fixture = &shop.fixture;
    fixture.db.run(&format!(
        "ALTER TABLE public.outbox OWNER TO {}; ALTER TABLE public.outbox DISABLE TRIGGER USER",
        shop.mallory
    ));
    shop.attacker.run(
        "INSERT INTO public.outbox (aggregatetype, aggregateid, type, created_at) VALUES ('a', 'b', 'c', now() - interval '2 days')",
    );
    let maintain = |more: &[&str]| {
        let words = ["maintain", "--retention=1s", "--delete-rows"];
        shop.command_as("postgres", &words).args(more)
    };
    shop.maintain_until_due(maintain, "would delete rows");
    // Log every statement, so that the server's log shows when `maintain` has read the batch and
    // waits for the slot. Creating a table generates WAL that the slot has not passed yet, so
    // `maintain` has to wait.
    fixture.db.run(&format!(
        "ALTER DATABASE {} SET log_statement = 'all'",
        fixture.name
    ));
    shop.attacker.run("CREATE TABLE plot.more_wal ()");
    let log_length = fixture.server.log_length();
    let command = maintain(&[]).start();
    wait_until("maintain to wait for the slot", || {
        let log = fixture.server.log_after(log_length);
        log.contains("SELECT pg_current_wal_insert_lsn()")
    });
    shop.attacker.run(
        "CREATE TRIGGER t AFTER DELETE ON public.outbox FOR EACH STATEMENT EXECUTE FUNCTION plot.row()",
    );
    shop.confirm_all_events();
    let maintained = command.finish();
    shop.expect_nothing_ran("maintain");
    let refused = maintained.expect_code(3);
    refused.expect_mentions(&["code owned by other roles", "trigger t on table"]);
    assert_eq!(fixture.db.number("SELECT count(*) FROM public.outbox"), 1);
}

/// The trigger is created with a privilege that is revoked before the transaction commits, so that no
/// untrusted role can change the table when `maintain` examines it.
fn maintenance_does_not_fire_a_trigger_of_an_open_transaction(major: u32) {
    let shop = PlantedFixture::new(Outbox::Table, major);
    let fixture = &shop.fixture;
    let mallory = &shop.mallory;
    fixture.db.run(&format!(
        "GRANT INSERT, SELECT, TRIGGER ON public.outbox TO {mallory}"
    ));
    shop.attacker.run(
        "INSERT INTO public.outbox (aggregatetype, aggregateid, type, created_at) VALUES ('a', 'b', 'c', now() - interval '2 days')",
    );
    let maintain = |more: &[&str]| {
        let words = ["maintain", "--retention=1s", "--delete-rows"];
        shop.command_as("postgres", &words).args(more)
    };
    shop.maintain_until_due(maintain, "would delete rows");
    shop.attacker.run(
        "BEGIN; CREATE TRIGGER t AFTER DELETE ON public.outbox FOR EACH STATEMENT EXECUTE FUNCTION plot.row()",
    );
    fixture
        .db
        .run(&format!("REVOKE TRIGGER ON public.outbox FROM {mallory}"));
    let command = maintain(&[]).start();
    wait_until("maintain to wait for the table", || {
        shop.confirm_all_events();
        fixture.db.is_true(WAITS)
    });
    shop.attacker.run("COMMIT");
    let maintained = command.finish();
    shop.expect_nothing_ran("maintain");
    let refused = maintained.expect_code(3);
    refused.expect_mentions(&["code owned by other roles", "trigger t on table"]);
    assert_eq!(fixture.db.number("SELECT count(*) FROM public.outbox"), 1);
}

/// When a partition is detached, PostgreSQL checks the foreign keys that refer to it, and casts
/// their columns.
fn maintenance_runs_no_code_created_before_it_detaches_a_partition(major: u32) {
    let shop = PlantedFixture::bare(Outbox::Table, major);
    let fixture = &shop.fixture;
    let init = shop.init().arg("--partitioned");
    init.args(["--owner", &shop.mallory])
        .finish()
        .expect_code(0);
    fixture
        .db
        .run("ALTER TABLE public.outbox DISABLE TRIGGER USER");
    shop.attacker.run(
        "CREATE TYPE plot.kind AS ENUM ('a');
         CREATE FUNCTION plot.to_uuid(plot.kind) RETURNS uuid LANGUAGE plpgsql STABLE AS
             'BEGIN PERFORM plot.note(''cast''); RETURN ''00000000-0000-0000-0000-000000000001''; END';
         CREATE CAST (plot.kind AS uuid) WITH FUNCTION plot.to_uuid(plot.kind) AS IMPLICIT;
         CREATE TABLE public.outbox_old PARTITION OF public.outbox FOR VALUES FROM ('2001-01-01') TO ('2001-01-02');
         ALTER TABLE public.outbox ADD ref plot.kind, ADD ref_at timestamptz;
         INSERT INTO public.outbox (id, aggregatetype, aggregateid, type, created_at)
             VALUES ('00000000-0000-0000-0000-000000000001', 'a', 'b', 'c', now());
         INSERT INTO public.outbox (aggregatetype, aggregateid, type, created_at) VALUES ('a', 'b', 'c', '2001-01-01 12:00');
         INSERT INTO public.outbox (aggregatetype, aggregateid, type, created_at, ref, ref_at)
             SELECT 'a', 'b', 'c', now(), 'a', created_at FROM public.outbox WHERE created_at > '2002-01-01'",
    );
    let maintain = |more: &[&str]| {
        let command = shop.command_as("postgres", &["maintain", "--retention=1s"]);
        command.args(more)
    };
    shop.maintain_until_due(maintain, "would detach public.outbox_old");
    let holder = fixture.server.session_as(&shop.mallory, &fixture.name);
    // Other sessions do not see the foreign key until this transaction commits.
    holder.run(
        "BEGIN; ALTER TABLE public.outbox ADD FOREIGN KEY (ref, ref_at) REFERENCES public.outbox (id, created_at)",
    );
    let command = maintain(&[]).start();
    shop.wait_until_second_lock_wait("public.outbox");
    holder.run("COMMIT");
    let maintained = command.finish();
    shop.expect_nothing_ran("maintain");
    let refused = maintained.expect_code(3);
    refused.expect_mentions(&["foreign key outbox_ref_ref_at_fkey connects it to itself"]);
    let is_attached =
        "SELECT relispartition FROM pg_class WHERE oid = 'public.outbox_old'::regclass";
    assert!(fixture.db.is_true(is_attached));
}

/// `run` copies rows that are older than the slot. To plan the copy, the server would evaluate the
/// expressions of any index or statistics on the table.
fn snapshot_evaluates_no_indexes_or_statistics_created_during_a_lock_wait(major: u32) {
    for planted in [
        "CREATE INDEX i ON public.outbox (id) WHERE plot.note('index')",
        "CREATE STATISTICS public.s ON (plot.note('statistics')), id FROM public.outbox",
    ] {
        let shop = PlantedFixture::owned_by_attacker(major);
        let fixture = &shop.fixture;
        // Delay the snapshot by keeping a transaction open, so that another session can lock the
        // table first.
        shop.attacker.run("BEGIN; SELECT pg_current_xact_id()");
        let mut walpost = shop.command(&["run"]).start();
        walpost.wait_for_log("starting a snapshot of the table");
        let holder = fixture.server.session_as(&shop.mallory, &fixture.name);
        holder.run("BEGIN; LOCK TABLE public.outbox IN SHARE UPDATE EXCLUSIVE MODE");
        shop.attacker.run("COMMIT");
        wait_until("Walpost to wait for the table", || holder.is_true(WAITS));
        holder.run(planted);
        holder.run("COMMIT");
        wait_until("the copy, or an error", || {
            !walpost.is_running() || !fixture.records().is_empty()
        });
        shop.expect_nothing_ran("run");
        let halted = walpost.finish().expect_code(3);
        halted.expect_mentions(&["code owned by other roles", "plot.note"]);
    }
}

/// The attack needs a row filter, which PostgreSQL 14 does not support.
#[test]
fn snapshot_does_not_evaluate_a_row_filter_changed_while_it_waits_for_a_lock() {
    for major in [15, 16, 17, 18] {
        let shop = PlantedFixture::owned_by_attacker(major);
        let (fixture, mallory, publication) = (&shop.fixture, &shop.mallory, shop.fixture.slot());
        fixture.db.run(&format!(
            "ALTER ROLE {mallory} REPLICATION; ALTER PUBLICATION {publication} OWNER TO {mallory}"
        ));
        shop.attacker.run(CASTS);
        shop.attacker.run(&format!(
            "ALTER PUBLICATION {publication} SET TABLE public.outbox WHERE (type <> '')"
        ));
        // Delay the snapshot by keeping a transaction open, so that another session can lock the
        // table first.
        shop.attacker.run("BEGIN; SELECT pg_current_xact_id()");
        let mut walpost = shop.command(&["run"]).start();
        walpost.wait_for_log("starting a snapshot of the table");
        let holder = fixture.server.session_as(mallory, &fixture.name);
        holder.run("BEGIN; LOCK TABLE public.outbox IN SHARE UPDATE EXCLUSIVE MODE");
        shop.attacker.run("COMMIT");
        wait_until("Walpost to wait for the table", || holder.is_true(WAITS));
        holder.run(&format!(
            "ALTER PUBLICATION {publication} SET TABLE public.outbox;
             ALTER TABLE public.outbox DROP type;
             ALTER TABLE public.outbox ADD type plot.pair DEFAULT ROW('order')::plot.pair; COMMIT"
        ));
        wait_until("the copy, or an error", || {
            !walpost.is_running() || !fixture.records().is_empty()
        });
        shop.expect_nothing_ran("run");
    }
}
