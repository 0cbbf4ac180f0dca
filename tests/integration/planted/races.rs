//! Objects that are created after Walpost inspects a table and before it uses the table.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};

use super::PlantedFixture;
use crate::init::try_psql_as;
use crate::support::event::Outbox;
use crate::support::postgres::MAJOR;
use crate::support::session::Session;
use crate::support::wait::wait_until;

on_each_version! {
    never_evaluates_indexes_or_statistics_created_and_dropped_concurrently
    does_not_fire_a_delete_trigger_created_and_dropped_concurrently
    runs_no_planted_code_while_schemas_swap_names
    does_not_add_a_table_whose_schema_is_renamed_during_a_lock_wait
    add_outbox_does_not_read_a_table_that_takes_the_name_of_the_given_table
    runs_no_planted_code_while_the_table_is_repeatedly_renamed
    locks_partitions_that_the_lock_table_statement_omits
    inspects_and_locks_the_parent_while_a_table_is_being_detached
    rejects_a_table_that_is_replaced_by_its_parent_during_inspection
    rejects_a_table_that_is_handed_over_to_another_role_during_inspection
    plans_no_statement_without_the_lock_after_walpost_has_ended
}

/// Statements that a role executes repeatedly over a separate connection until this value is
/// dropped.
struct Repeated {
    stop: Arc<AtomicBool>,
    rounds: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Repeated {
    /// Runs each of `statements` separately. Failures are ignored, because the object may be locked
    /// or may already exist.
    fn start(shop: &PlantedFixture, statements: &[String]) -> Self {
        let session = shop
            .fixture
            .server
            .session_as(&shop.mallory, &shop.fixture.name);
        session.run("SET lock_timeout = '50ms'; SET client_min_messages = error");
        let statements = statements.to_vec();
        let (stop, rounds) = (
            Arc::new(AtomicBool::new(false)),
            Arc::new(AtomicU64::new(0)),
        );
        let (is_over, counted) = (Arc::clone(&stop), Arc::clone(&rounds));
        let thread = thread::spawn(move || {
            while !is_over.load(Ordering::Relaxed) {
                for statement in &statements {
                    let _ = session.try_run(statement);
                }
                counted.fetch_add(1, Ordering::Relaxed);
            }
        });
        let repeated = Self {
            stop,
            rounds,
            thread: Some(thread),
        };
        wait_until("the first rounds", || {
            repeated.rounds.load(Ordering::Relaxed) > 2
        });
        repeated
    }
}

impl Drop for Repeated {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // If the thread panicked, the test has already failed.
            let _ = thread.join();
        }
    }
}

fn never_evaluates_indexes_or_statistics_created_and_dropped_concurrently(major: u32) {
    for attack in [
        [
            "CREATE INDEX i ON public.outbox (id) WHERE plot.note('index')",
            "DROP INDEX public.i",
        ],
        [
            "CREATE STATISTICS public.s ON (plot.note('statistics')), id FROM public.outbox",
            "DROP STATISTICS public.s",
        ],
    ] {
        let shop = PlantedFixture::owned_by_attacker(major);
        let attack_goes_on = Repeated::start(&shop, &attack.map(str::to_owned));
        for _ in 0..4 {
            shop.init().finish();
            shop.expect_nothing_ran("init");
            for role in [&*shop.walpost, "postgres"] {
                for words in [
                    &["check"][..],
                    &["verify"],
                    &["replay", "--all", "--yes"],
                    &["maintain", "--retention=24h", "--delete-rows"],
                ] {
                    shop.command_as(role, words).finish();
                    shop.expect_nothing_ran(words[0]);
                }
            }
        }
        drop(attack_goes_on);
        shop.command(&["verify", "--kafka", &shop.fixture.broker.address()])
            .finish();
    }
}

fn does_not_fire_a_delete_trigger_created_and_dropped_concurrently(major: u32) {
    let shop = PlantedFixture::owned_by_attacker(major);
    let fixture = &shop.fixture;
    // Make inserted rows look two days old, so that maintenance passes delete them after they have
    // been delivered.
    fixture.db.run(&format!(
        "GRANT {} TO {}; ALTER TABLE public.outbox ALTER created_at SET DEFAULT now() - interval '2 days'",
        shop.mallory, shop.walpost
    ));
    let aggregate = fixture.aggregate(1);
    let walpost = shop.command(&["run", "--snapshot=never"]).start_streaming();
    let attack = [
        "CREATE TRIGGER t AFTER DELETE ON public.outbox FOR EACH STATEMENT EXECUTE FUNCTION plot.row()",
        "DROP TRIGGER t ON public.outbox",
    ];
    let attack_goes_on = Repeated::start(&shop, &attack.map(str::to_owned));
    let rows = "SELECT count(*) FROM public.outbox";
    for _ in 0..6 {
        fixture.insert(&aggregate, "k");
        fixture.wait_until_confirmed();
        for _ in 0..3 {
            shop.command_as("postgres", &["maintain", "--retention=1s", "--delete-rows"])
                .finish();
            shop.expect_nothing_ran("maintain");
        }
    }
    drop(attack_goes_on);
    let _ = shop.attacker.try_run(attack[1]);
    // Once the attacker no longer creates the trigger, `maintain` can delete the rows.
    wait_until("the rows to be deleted", || {
        shop.command_as("postgres", &["maintain", "--retention=1s", "--delete-rows"])
            .finish();
        fixture.db.number(rows) == 0
    });
    shop.expect_nothing_ran("maintain");
    walpost.terminate().expect_code(0);
}

/// Inspecting a nonexistent table is an error; the table must not be treated as free of other
/// roles' code.
fn runs_no_planted_code_while_the_table_is_repeatedly_renamed(major: u32) {
    let shop = PlantedFixture::owned_by_attacker(major);
    let absent = "SELECT walpost.lock_and_examine('public', 'absent', 'SELECT')";
    let refused = format!(
        "{:?}",
        shop.fixture.db.try_run(absent).expect_err("no table")
    );
    assert!(refused.contains("does not exist"), "{refused}");
    let publication = shop.fixture.slot();
    shop.attacker
        .run("CREATE INDEX i ON public.outbox (id) WHERE plot.note('index')");
    let attack = [
        "ALTER TABLE IF EXISTS public.outbox RENAME TO hidden",
        "ALTER TABLE IF EXISTS public.hidden RENAME TO outbox",
    ];
    let attack_goes_on = Repeated::start(&shop, &attack.map(str::to_owned));
    for _ in 0..10 {
        for words in [
            &["replay", "--all", "--dry-run"][..],
            &["verify"],
            &["check"],
            &["maintain", "--retention=24h", "--delete-rows"],
        ] {
            shop.command_as("postgres", words).finish();
            shop.expect_nothing_ran(words[0]);
        }
        shop.init().finish();
        shop.expect_nothing_ran("init");
        let add = format!("SELECT walpost.add_outbox('public.outbox', '{publication}')");
        let _ = shop.fixture.db.try_run(&add);
        shop.expect_nothing_ran("add_outbox");
    }
    drop(attack_goes_on);
}

fn runs_no_planted_code_while_schemas_swap_names(major: u32) {
    let mut shop = PlantedFixture::bare(Outbox::Table, major);
    shop.fixture
        .use_settings("tables = [\"tenant_*.outbox\"]\n");
    shop.init().finish().expect_code(0);
    let columns =
        "id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload jsonb";
    for _ in 0..4 {
        shop.attacker.run(&format!(
            "CREATE SCHEMA tenant_m; CREATE TABLE tenant_m.outbox ({columns});
             CREATE SCHEMA aside; CREATE TABLE aside.outbox ({columns});
             INSERT INTO tenant_m.outbox VALUES (gen_random_uuid(), 'order', 'k', 't', '{{}}');
             INSERT INTO aside.outbox VALUES (gen_random_uuid(), 'order', 'k', 't', '{{}}');
             CREATE INDEX i ON aside.outbox (id) WHERE plot.note('index')"
        ));
        let swap = "ALTER SCHEMA tenant_m RENAME TO between; ALTER SCHEMA aside RENAME TO tenant_m;
                    ALTER SCHEMA between RENAME TO aside";
        let attack_goes_on = Repeated::start(&shop, &[swap.to_owned()]);
        for round in 0..6 {
            let (db, publication) = (&shop.fixture.db, shop.fixture.slot());
            if round % 2 == 0 {
                shop.init().args(["--table", "tenant_m.outbox"]).finish();
                shop.expect_nothing_ran("init --table");
            }
            let add = format!("SELECT walpost.add_outbox('tenant_m.outbox', '{publication}')");
            let _ = db.try_run(&add);
            shop.expect_nothing_ran("add_outbox");
            // Remove the table from the publication, so that the next command reads the table's
            // rows again.
            for schema in ["tenant_m", "aside"] {
                let _ = db.try_run(&format!(
                    "ALTER PUBLICATION {publication} DROP TABLE {schema}.outbox"
                ));
            }
            db.run("DELETE FROM walpost.table_state WHERE table_name = 'outbox'");
        }
        drop(attack_goes_on);
        shop.attacker.run("DROP SCHEMA tenant_m, aside CASCADE");
    }
}

/// Creates two schemas of the attacker, each with an outbox. An index on the second one runs
/// planted code.
fn two_schemas(major: u32) -> PlantedFixture {
    let mut shop = PlantedFixture::bare(Outbox::Table, major);
    shop.fixture
        .use_settings("tables = [\"tenant_*.outbox\"]\n");
    shop.init().finish().expect_code(0);
    for schema in ["tenant_m", "aside"] {
        shop.attacker.run(&format!(
            "CREATE SCHEMA {schema};
             CREATE TABLE {schema}.outbox (id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload jsonb);
             INSERT INTO {schema}.outbox VALUES (gen_random_uuid(), 'order', 'k', 't', '{{}}')"
        ));
    }
    shop.attacker
        .run("CREATE INDEX i ON aside.outbox (id) WHERE plot.note('index')");
    shop
}

const SWAP_SCHEMAS: &str =
    "ALTER SCHEMA tenant_m RENAME TO between; ALTER SCHEMA aside RENAME TO tenant_m;
    ALTER SCHEMA between RENAME TO aside";

/// The schemas are swapped before a command examines the table, but the swap is committed only
/// while the command waits for the lock on the schema.
fn does_not_add_a_table_whose_schema_is_renamed_during_a_lock_wait(major: u32) {
    let shop = two_schemas(major);
    let (fixture, db) = (&shop.fixture, &shop.fixture.db);
    let add = format!(
        "SELECT walpost.add_outbox('tenant_m.outbox', '{}')",
        fixture.slot()
    );
    let waits =
        "SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'transactionid' AND NOT granted
        AND pid IN (SELECT pid FROM pg_stat_activity WHERE datname = current_database()))";
    let wait = || wait_until("the command to wait for the schema", || db.is_true(waits));

    shop.attacker.run(&format!("BEGIN; {SWAP_SCHEMAS}"));
    let init = shop.init().args(["--table", "tenant_m.outbox"]).start();
    wait();
    shop.attacker.run("COMMIT");
    let refused = init.finish();
    shop.expect_nothing_ran("init --table");
    refused.expect_code(1).expect_mentions(&[
        "schema tenant_m was renamed while table tenant_m.outbox was being examined",
    ]);

    shop.attacker.run(SWAP_SCHEMAS);
    shop.attacker.run(&format!("BEGIN; {SWAP_SCHEMAS}"));
    let session = fixture.server.session_as("postgres", &fixture.name);
    let adding = thread::spawn(move || session.try_run(&add));
    wait();
    shop.attacker.run("COMMIT");
    let error = adding.join().expect("a thread").expect_err("refused");
    shop.expect_nothing_ran("add_outbox");
    let message = error.as_db_error().expect("an answer").message();
    assert!(message.contains("schema tenant_m was renamed"), "{message}");
    let published =
        "SELECT count(*) FROM pg_publication_rel WHERE prrelid::regclass::text ~ 'outbox$'";
    assert_eq!(db.number(published), 0);
}

/// `add_outbox` looks up the name of the given table, and then examines the table that has this
/// name. Between the two steps, another table can receive the name. `add_outbox` must not read the
/// columns of the given table from the other table: if a column does not exist there, its name
/// could refer to a function such as `row_to_json`, which calls casts. The interval between the two
/// steps is very short, so the test makes the function wait there by locking a catalog.
fn add_outbox_does_not_read_a_table_that_takes_the_name_of_the_given_table(major: u32) {
    let shop = two_schemas(major);
    let (fixture, db) = (&shop.fixture, &shop.fixture.db);
    shop.attacker.run(
        "DROP INDEX aside.i; ALTER TABLE tenant_m.outbox ADD row_to_json text;
         CREATE TYPE plot.kind AS ENUM ('a');
         CREATE FUNCTION plot.as_json(plot.kind) RETURNS json LANGUAGE plpgsql AS
             $$ BEGIN PERFORM plot.note('cast'); RETURN '1'; END $$;
         CREATE CAST (plot.kind AS json) WITH FUNCTION plot.as_json(plot.kind);
         ALTER TABLE aside.outbox ADD planted plot.kind DEFAULT 'a'",
    );
    let session = fixture.server.session_as("postgres", &fixture.name);
    let pid = session.number("SELECT pg_backend_pid()");
    let add = format!(
        "SELECT walpost.add_outbox('tenant_m.outbox', '{}')",
        fixture.slot()
    );
    db.run("BEGIN; LOCK TABLE pg_catalog.pg_publication IN ACCESS EXCLUSIVE MODE");
    let adding = thread::spawn(move || session.try_run(&add));
    wait_until("add_outbox to read the publication", || {
        shop.attacker.is_true(&format!(
            "SELECT EXISTS (SELECT FROM pg_locks WHERE pid = {pid} AND NOT granted)"
        ))
    });
    shop.attacker.run(SWAP_SCHEMAS);
    db.run("COMMIT");
    let added = adding.join().expect("a thread");
    shop.expect_nothing_ran("add_outbox");
    let error = added.expect_err("refused");
    let message = error.as_db_error().expect("an answer").message();
    assert!(
        message.contains("was replaced by another one while it was being added"),
        "{message}"
    );
    let published =
        "SELECT count(*) FROM pg_publication_rel WHERE prrelid::regclass::text ~ 'outbox$'";
    assert_eq!(db.number(published), 0);
}

/// The schema `walpost` does not exist when Walpost inspects the objects in it. The attacker then
/// renames another schema to `walpost` before Walpost uses one of these objects.
#[test]
fn never_uses_a_walpost_schema_created_while_a_command_runs() {
    for major in [14, 17] {
        let shop = PlantedFixture::bare(Outbox::Table, major);
        shop.fixture.db.run(
            "CREATE TABLE public.outbox (id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload jsonb)",
        );
        shop.attacker.run(
            "CREATE SCHEMA w; GRANT USAGE ON SCHEMA w TO PUBLIC;
             CREATE FUNCTION w.lock_and_examine(text, text, text) RETURNS text LANGUAGE plpgsql AS $$ BEGIN
                 PERFORM plot.note('examination'); RETURN ''; END $$;
             CREATE VIEW w.journal AS SELECT plot.note('journal') AS pipeline",
        );
        // Run the attack inside the server, because a client would be too slow to hit the right
        // moment.
        let rename = |from: &str, to: &str| {
            format!(
                "BEGIN ALTER SCHEMA {from} RENAME TO {to}; EXCEPTION WHEN OTHERS THEN NULL; END; COMMIT;"
            )
        };
        let attack = format!(
            "DO $$ BEGIN FOR i IN 1..200 LOOP {} {} END LOOP; END $$",
            rename("w", "walpost"),
            rename("walpost", "w")
        );
        let attack_goes_on = Repeated::start(&shop, &[attack]);
        for _ in 0..20 {
            shop.command_as("postgres", &["check"]).finish();
            shop.expect_nothing_ran("check");
        }
        for _ in 0..3 {
            shop.command_as("postgres", &["replay", "--all", "--dry-run"])
                .finish();
            shop.expect_nothing_ran("replay");
        }
        drop(attack_goes_on);
    }
}

/// The owner of the outbox is not trusted with Walpost's own tables.
#[test]
fn does_not_run_a_trigger_created_on_the_slot_state_table_while_streaming() {
    let shop = PlantedFixture::owned_by_attacker(MAJOR);
    let (fixture, mallory) = (&shop.fixture, &shop.mallory);
    let mut walpost = shop.command(&["run", "--snapshot=never"]).start_streaming();
    fixture.insert(&fixture.aggregate(1), "k");
    fixture.wait_until_confirmed();
    fixture.db.run(&format!(
        "GRANT USAGE, CREATE ON SCHEMA walpost TO {mallory}; ALTER TABLE walpost.slot_state OWNER TO {mallory};
         REVOKE CREATE ON SCHEMA walpost FROM {mallory}"
    ));
    shop.attacker.run(
        "CREATE TRIGGER t AFTER INSERT OR UPDATE ON walpost.slot_state FOR EACH ROW EXECUTE FUNCTION plot.row()",
    );
    fixture.insert(&fixture.aggregate(1), "k");
    walpost.wait_for_log(&format!(
        "table walpost.slot_state belongs to role {mallory}"
    ));
    shop.expect_nothing_ran("run");
}

/// Locking a view also locks the tables in its query. While `lock_and_examine` waits for the lock
/// on a table, the table's owner replaces the table with a view. The last table in the view's query
/// stays locked, so that the test can observe which tables were locked before it.
fn does_not_lock_tables_in_the_query_of_a_view(major: u32, replace: &str) {
    let shop = PlantedFixture::new(Outbox::Table, major);
    let fixture = &shop.fixture;
    let session = || fixture.server.session_as(&shop.mallory, &fixture.name);
    fixture.db.run(&format!(
        "GRANT USAGE ON SCHEMA walpost TO {}",
        shop.mallory
    ));
    shop.attacker.run(
        "CREATE TABLE plot.bare (a int); GRANT TRIGGER ON plot.bare TO PUBLIC; CREATE TABLE plot.blocker ();
         CREATE VIEW plot.replacement WITH (security_invoker) AS SELECT 1 AS a FROM public.outbox, plot.blocker",
    );
    let (holder, examiner) = (session(), session());
    holder.run("BEGIN; LOCK TABLE plot.bare IN ACCESS EXCLUSIVE MODE");
    shop.attacker
        .run("BEGIN; LOCK TABLE plot.blocker IN SHARE UPDATE EXCLUSIVE MODE");
    let examining = thread::spawn(move || {
        examiner.try_run("SELECT walpost.lock_and_examine('plot', 'bare', 'SELECT')")
    });
    let waits_for = |table: &str| {
        fixture.db.is_true(&format!(
            "SELECT EXISTS (SELECT FROM pg_locks WHERE relation = '{table}'::regclass AND NOT granted)"
        ))
    };
    wait_until("the inspection to wait for the table", || {
        waits_for("plot.bare")
    });
    let _ = holder.try_run(&format!("{replace}; COMMIT"));
    wait_until("the inspection to end, or to wait again", || {
        examining.is_finished() || waits_for("plot.blocker")
    });
    let locks = "SELECT count(*) FROM pg_locks WHERE relation = 'public.outbox'::regclass AND mode = 'ShareUpdateExclusiveLock'";
    let count = fixture.db.number(locks);
    shop.attacker.run("ROLLBACK");
    let _ = examining.join().expect("a thread");
    assert_eq!(count, 0, "{major}");
}

#[test]
fn does_not_lock_tables_referenced_by_a_view_that_replaces_a_table() {
    for major in [15, 16, 17, 18] {
        does_not_lock_tables_in_the_query_of_a_view(
            major,
            "ALTER TABLE plot.bare RENAME TO former; ALTER VIEW plot.replacement RENAME TO bare",
        );
    }
}

/// Up to PostgreSQL 15, creating a rule named `_RETURN` turns an empty table into a view with the
/// same OID.
#[test]
fn does_not_lock_tables_referenced_by_a_rule_that_turns_the_table_into_a_view() {
    does_not_lock_tables_in_the_query_of_a_view(
        15,
        "CREATE RULE \"_RETURN\" AS ON SELECT TO plot.bare
             DO INSTEAD SELECT 1 AS a FROM public.outbox, plot.blocker;
         ALTER VIEW plot.bare SET (security_invoker)",
    );
}

/// The owner of the schema can drop a superuser's table and put a view in its place.
#[test]
fn init_does_not_lock_tables_referenced_by_a_view_that_replaces_the_outbox() {
    for major in [15, 16, 17, 18] {
        let shop = PlantedFixture::new(Outbox::Table, major);
        let fixture = &shop.fixture;
        fixture.db.run(&format!(
            "CREATE TABLE public.orders (id int); ALTER SCHEMA public OWNER TO {}",
            shop.mallory
        ));
        shop.attacker
            .run("DROP FUNCTION public.walpost_no_update() CASCADE; CREATE TABLE plot.blocker ()");
        let holder = fixture.server.session_as(&shop.mallory, &fixture.name);
        shop.attacker.run(
            "CREATE VIEW plot.replacement WITH (security_invoker) AS SELECT 1 AS a FROM public.orders, plot.blocker",
        );
        holder.run("BEGIN; LOCK TABLE plot.blocker IN ACCESS EXCLUSIVE MODE");
        shop.attacker.run(
            "BEGIN; DROP TABLE public.outbox; ALTER VIEW plot.replacement RENAME TO outbox;
             ALTER VIEW plot.outbox SET SCHEMA public",
        );
        let mut init = shop.init().start();
        let waits =
            "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND pid <> pg_backend_pid()
             AND pid IN (SELECT pid FROM pg_stat_activity WHERE datname = current_database()))";
        wait_until("init to wait for the table", || fixture.db.is_true(waits));
        shop.attacker.run("COMMIT");
        let blocked = "SELECT EXISTS (SELECT FROM pg_locks WHERE relation = 'plot.blocker'::regclass AND NOT granted)";
        wait_until("init to end, or to wait again", || {
            !init.is_running() || fixture.db.is_true(blocked)
        });
        let locks = "SELECT count(*) FROM pg_locks WHERE relation = 'public.orders'::regclass AND mode = 'ShareRowExclusiveLock'";
        let count = fixture.db.number(locks);
        holder.run("ROLLBACK");
        init.finish();
        assert_eq!(count, 0, "{major}");
    }
}

/// `LOCK TABLE` lists the partitions before it locks the first one, so it does not lock a table
/// that is attached to a partition in the meantime. It also does not lock a table that is being
/// detached. Walpost must lock both tables.
fn locks_partitions_that_the_lock_table_statement_omits(major: u32) {
    let shop = PlantedFixture::new(Outbox::Table, major);
    let (fixture, db) = (&shop.fixture, &shop.fixture.db);
    let session = |role: &str| fixture.server.session_as(role, &fixture.name);
    shop.attacker.run(
        "CREATE TABLE plot.box (id int) PARTITION BY RANGE (id);
         CREATE TABLE plot.first PARTITION OF plot.box FOR VALUES FROM (0) TO (1);
         CREATE TABLE plot.second PARTITION OF plot.box FOR VALUES FROM (1) TO (2) PARTITION BY RANGE (id)",
    );
    let (holder, examiner) = (session(&shop.mallory), session("postgres"));
    let examine = "SELECT walpost.lock_and_examine('plot', 'box', 'SELECT')";
    let expect_locked = |table: &str| {
        let index = format!("CREATE INDEX ON {table} (id) WHERE plot.note('index')");
        shop.attacker.run("SET lock_timeout = '100ms'");
        let refused = format!("{:?}", shop.attacker.try_run(&index).expect_err(table));
        assert!(refused.contains("lock timeout"), "{table}: {refused}");
        shop.attacker.run("RESET lock_timeout");
    };
    holder.run("BEGIN; LOCK TABLE plot.first IN SHARE UPDATE EXCLUSIVE MODE");
    examiner.run("BEGIN");
    thread::scope(|scope| {
        let examined = scope.spawn(|| examiner.run(examine));
        wait_until("the examination to wait", || {
            db.is_true(
                "SELECT EXISTS (SELECT FROM pg_locks WHERE relation = 'plot.first'::regclass AND NOT granted)",
            )
        });
        shop.attacker
            .run("CREATE TABLE plot.late PARTITION OF plot.second FOR VALUES FROM (1) TO (2)");
        holder.run("COMMIT");
        examined.join().expect("the table is examined");
    });
    expect_locked("plot.late");
    examiner.run("COMMIT");

    detach_partially(&holder, db, "plot.box", "plot.first");
    examiner.run("BEGIN");
    examiner.run(examine);
    expect_locked("plot.first");
    examiner.run("COMMIT");
}

/// Leaves the partition partially detached, by canceling the DETACH statement while it waits for
/// another transaction.
fn detach_partially(session: &Session, other: &Session, parent: &str, partition: &str) {
    other.run(&format!(
        "BEGIN; LOCK TABLE ONLY {parent} IN ACCESS SHARE MODE"
    ));
    session.run("SET statement_timeout = '1s'");
    session
        .try_run(&format!(
            "ALTER TABLE {parent} DETACH PARTITION {partition} CONCURRENTLY"
        ))
        .expect_err("canceled");
    session.run("RESET statement_timeout");
    other.run("COMMIT");
}

/// While a table is being detached, PostgreSQL still evaluates the partition keys of the parent and
/// the parent's ancestors, but `pg_partition_ancestors` omits them.
fn inspects_and_locks_the_parent_while_a_table_is_being_detached(major: u32) {
    let shop = PlantedFixture::new(Outbox::Table, major);
    let db = &shop.fixture.db;
    let examiner = shop
        .fixture
        .server
        .session_as("postgres", &shop.fixture.name);
    shop.attacker.run(
        "CREATE FUNCTION plot.one(int) RETURNS int LANGUAGE plpgsql IMMUTABLE AS
             $$ BEGIN PERFORM plot.note('partition key'); RETURN 1; END $$;
         CREATE TABLE plot.top (id int) PARTITION BY RANGE (id);
         CREATE TABLE plot.root (id int) PARTITION BY RANGE ((CASE WHEN plot.one(1) > 0 THEN id ELSE 0 END));
         CREATE TABLE plot.box PARTITION OF plot.root FOR VALUES FROM (0) TO (9) PARTITION BY RANGE (id)",
    );
    detach_partially(&shop.attacker, db, "plot.root", "plot.box");
    examiner.run("BEGIN");
    for statement in ["SELECT", "DELETE", "ALTER"] {
        let examine = format!("SELECT walpost.lock_and_examine('plot', 'box', '{statement}')");
        let examined = examiner.value(&examine).expect("a text");
        let text = "table plot.root calls function plot.one(integer)";
        assert!(examined.contains(text), "{statement}: {examined}");
    }
    shop.expect_nothing_ran("the examination");
    shop.attacker.run("SET lock_timeout = '100ms'");
    let attach = "ALTER TABLE plot.top ATTACH PARTITION plot.root FOR VALUES FROM (0) TO (9)";
    let refused = format!("{:?}", shop.attacker.try_run(attach).expect_err("locked"));
    assert!(refused.contains("lock timeout"), "{refused}");
    examiner.run("COMMIT");
    shop.attacker.run(attach);
}

/// If the owner of `lock_and_examine` is not a superuser, the table can be replaced until it is
/// locked. If the replacement is the parent of the original table, `LOCK TABLE` locks both.
fn rejects_a_table_that_is_replaced_by_its_parent_during_inspection(major: u32) {
    let shop = PlantedFixture::bare(Outbox::Table, major);
    let (fixture, mallory) = (&shop.fixture, &shop.mallory);
    let dba = format!("{mallory}_dba");
    fixture.db.run(&format!(
        "CREATE ROLE {dba} LOGIN; GRANT {mallory} TO {dba}; ALTER DATABASE {} OWNER TO {dba};
         CREATE SCHEMA app AUTHORIZATION {dba}; GRANT CREATE, USAGE ON SCHEMA app TO {mallory}",
        fixture.name
    ));
    let sql = Path::new(env!("CARGO_MANIFEST_DIR")).join("sql/guard.sql");
    let installed = try_psql_as(fixture, &fixture.conninfo_as(&dba), &sql);
    assert!(installed.status.success(), "{installed:?}");
    shop.attacker.run("CREATE TABLE app.outbox (a int)");
    let examiner = fixture.server.session_as(&dba, &fixture.name);
    shop.attacker
        .run("BEGIN; LOCK TABLE app.outbox IN ACCESS EXCLUSIVE MODE");
    let examining = thread::spawn(move || {
        examiner.try_run("SELECT walpost.lock_and_examine('app', 'outbox', 'SELECT')")
    });
    // If `lock_and_examine` returns without waiting, stop waiting too, so that the lock on the
    // table is released. Other tests would otherwise wait for the lock.
    wait_until("the inspection to wait for the table", || {
        examining.is_finished() || fixture.db.is_true(
            "SELECT EXISTS (SELECT FROM pg_locks WHERE relation = 'app.outbox'::regclass AND NOT granted)",
        )
    });
    shop.attacker.run(
        "ALTER TABLE app.outbox RENAME TO former; CREATE TABLE app.outbox (a int);
         ALTER TABLE app.former INHERIT app.outbox; COMMIT",
    );
    let error = examining
        .join()
        .expect("a thread")
        .expect_err("another table");
    let message = error.as_db_error().expect("an answer").message();
    assert!(message.contains("was replaced by another one"), "{message}");
}

/// While one session transfers the table to a new owner, the new owner's session waits for the lock
/// on the table, and then the Walpost command does. The new owner therefore obtains the lock first,
/// and changes the table before the command can use it. The new owner runs `CREATE RULE`, which
/// locks the table before it checks who owns the table.
fn rejects_a_table_that_is_handed_over_to_another_role_during_inspection(major: u32) {
    let shop = PlantedFixture::new(Outbox::Table, major);
    let fixture = &shop.fixture;
    fixture.insert(&fixture.aggregate(1), "k");
    let holder = fixture.server.session_as("postgres", &fixture.name);
    holder.run(&format!(
        "BEGIN; ALTER TABLE public.outbox OWNER TO {}",
        shop.mallory
    ));
    let wait_for_waiters = |count| {
        wait_until("sessions to wait for the table", || {
            count
                == holder.number(
                    "SELECT count(*) FROM pg_locks WHERE relation = 'public.outbox'::regclass AND NOT granted
                     AND database = (SELECT oid FROM pg_database WHERE datname = current_database())",
                )
        });
    };
    let finished = thread::scope(|scope| {
        let attacker = fixture.server.session_as(&shop.mallory, &fixture.name);
        let attack = scope.spawn(move || {
            attacker.run(
                "BEGIN; CREATE RULE r AS ON INSERT TO public.outbox DO ALSO NOTHING; DROP RULE r ON public.outbox;
                 CREATE STATISTICS plot.s ON (plot.note('statistics')) FROM public.outbox; COMMIT",
            );
        });
        wait_for_waiters(1);
        let command = shop.command(&["replay", "--all", "--dry-run"]).start();
        wait_for_waiters(2);
        holder.run("COMMIT");
        attack.join().expect("the attack");
        command.finish()
    });
    shop.expect_nothing_ran("replay");
    finished.expect_mentions(&["was handed over to another role while it was being examined"]);
}

/// While the server plans a statement, another session of Walpost holds a lock on the table. The
/// table's owner delays the planning with a lock of their own. If Walpost ends in the meantime, the
/// lock must be kept until the statement has been canceled.
fn plans_no_statement_without_the_lock_after_walpost_has_ended(major: u32) {
    for (role, words, signal) in [
        ("walpost", &["run"][..], "TERM"),
        ("postgres", &["replay", "--all", "--dry-run"], "KILL"),
    ] {
        let shop = PlantedFixture::owned_by_attacker(major);
        let role = match role {
            "walpost" => &shop.walpost,
            _ => role,
        };
        let stalled = (0..20).any(|_| end_while_planning(&shop, role, words, signal));
        assert!(stalled, "the statement was never delayed");
        shop.expect_nothing_ran(words[0]);
    }
}

/// Runs a command, and ends it with a signal while one of its statements is waiting to be planned.
/// Then, waits until an index that runs planted code has been created and the statement has ended.
/// Returns false if no statement was delayed.
fn end_while_planning(shop: &PlantedFixture, role: &str, words: &[&str], signal: &str) -> bool {
    const LOCKS: &str = "FROM pg_locks WHERE relation = 'public.outbox'::regclass
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";
    let db = &shop.fixture.db;
    let attacker = shop
        .fixture
        .server
        .session_as(&shop.mallory, &shop.fixture.name);
    attacker.run("DROP INDEX IF EXISTS public.i");
    let is_ready = AtomicBool::new(false);
    thread::scope(|scope| {
        let attack = scope.spawn(|| {
            is_ready.store(true, Ordering::Relaxed);
            attacker.run(&format!(
                "DO $$ BEGIN
                     WHILE NOT EXISTS (SELECT {LOCKS} AND mode = 'ShareUpdateExclusiveLock' AND granted) LOOP
                         PERFORM pg_sleep(0.0005);
                     END LOOP;
                 END $$"
            ));
            attacker.run(
                "BEGIN; LOCK TABLE public.outbox IN ACCESS EXCLUSIVE MODE;
                 CREATE INDEX i ON public.outbox (id) WHERE plot.note('index'); COMMIT",
            );
        });
        wait_until("the attack", || is_ready.load(Ordering::Relaxed));
        let command = shop.command_as(role, words).start();
        let delayed =
            format!("SELECT pid::text {LOCKS} AND mode = 'AccessShareLock' AND NOT granted");
        let mut reader = None;
        wait_until("a delayed statement", || {
            reader = reader.take().or_else(|| db.value(&delayed));
            reader.is_some() || attack.is_finished()
        });
        command.signal(signal);
        command.finish();
        attack.join().expect("the attack");
        if let Some(pid) = &reader {
            let has_ended =
                format!("SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = {pid})");
            wait_until("the statement to end", || db.is_true(&has_ended));
        }
        reader.is_some()
    })
}
