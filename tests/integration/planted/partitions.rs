//! Partitions that a superuser creates for a table owned by another role.

use std::path::Path;
use std::thread;

use super::PlantedFixture;
use crate::init::psql;
use crate::support::event::Outbox;
use crate::support::wait::wait_until;

on_each_version! {
    new_partitions_belong_to_the_table_owner
    warning_about_partitions_owned_by_other_roles_links_to_the_documentation
    new_partition_does_not_belong_to_a_former_table_owner
    does_not_detach_partitions_from_a_self_referencing_table
    init_does_not_create_a_trigger_on_a_table_owned_by_another_role
    schema_cannot_be_renamed_while_create_trigger_waits_for_a_lock
    privileges_on_a_partition_do_not_allow_locking_its_parent
}

/// PostgreSQL evaluates the expressions of a partition's index as the partition's owner, so a new
/// partition must not belong to the superuser who creates it.
fn new_partitions_belong_to_the_table_owner(major: u32) {
    let daily = Path::new(env!("CARGO_MANIFEST_DIR")).join("sql/outbox_partitioned.sql");
    for again in ["outbox_partitioned.sql", "init --partitioned"] {
        let shop = PlantedFixture::bare(Outbox::Table, major);
        let (db, mallory) = (&shop.fixture.db, &shop.mallory);
        let init = || shop.init().arg("--partitioned");
        init().args(["--owner", mallory]).finish().expect_code(0);
        // Drop the last two partitions, as if two days had passed since the partitions were
        // created.
        db.run(
            "DO $$ DECLARE day text; BEGIN
                 FOR day IN SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'public.outbox'::regclass
                     AND inhrelid::regclass::text LIKE '%outbox_p2%' ORDER BY 1 DESC LIMIT 2 LOOP
                     EXECUTE 'DROP TABLE ' || day; END LOOP; END $$",
        );
        match again {
            "init --partitioned" => drop(init().finish().expect_code(0)),
            _ => psql(&shop.fixture, &daily),
        }
        let partitions =
            "SELECT count(*) FROM pg_inherits WHERE inhparent = 'public.outbox'::regclass";
        assert_eq!(db.number(partitions), 9, "PostgreSQL {major}, {again}");
        let of_others = format!(
            "SELECT count(*) FROM pg_inherits JOIN pg_class c ON c.oid = inhrelid WHERE inhparent = 'public.outbox'::regclass
                 AND relowner <> '{mallory}'::regrole"
        );
        let foreign = db.number(&of_others);
        shop.attacker.run(
            "INSERT INTO public.outbox (aggregatetype, aggregateid, type, created_at)
                 SELECT 'a', 'b', 'c', now() + n * interval '1 day' FROM generate_series(0, 7) AS n",
        );
        let _ = shop
            .attacker
            .try_run("CREATE INDEX ON public.outbox (id) WHERE plot.note('index')");
        shop.expect_nothing_ran(again);
        assert_eq!(foreign, 0, "PostgreSQL {major}, {again}");
    }
}

fn warning_about_partitions_owned_by_other_roles_links_to_the_documentation(major: u32) {
    let shop = PlantedFixture::bare(Outbox::Table, major);
    let (db, mallory) = (&shop.fixture.db, &shop.mallory);
    let init = shop.init().arg("--partitioned");
    init.args(["--owner", mallory]).finish().expect_code(0);
    let check = || shop.command(&["check"]).finish().expect_code(0).stdout;
    let what = "could call functions as that role";
    assert!(!check().contains(what));
    db.run(
        "CREATE TABLE public.by_hand PARTITION OF public.outbox FOR VALUES FROM ('2001-01-01') TO ('2001-01-02')",
    );
    let output = check();
    assert!(output.contains(what), "{output}");
    assert!(output.contains("public.by_hand"), "{output}");
    assert!(output.contains("docs/retention.md"), "{output}");
    db.run(&format!("ALTER TABLE public.by_hand OWNER TO {mallory}"));
    assert!(!check().contains(what));
}

/// Walpost reads the table's owner before it locks the table, so the owner may change before the
/// table is locked.
fn new_partition_does_not_belong_to_a_former_table_owner(major: u32) {
    let shop = PlantedFixture::bare(Outbox::Table, major);
    let (fixture, mallory) = (&shop.fixture, &shop.mallory);
    shop.init().arg("--partitioned").finish().expect_code(0);
    let holder = fixture.server.session_as("postgres", &fixture.name);
    holder.run("BEGIN; LOCK TABLE ONLY public.outbox IN SHARE UPDATE EXCLUSIVE MODE");
    let maintain = shop.command_as("postgres", &["maintain", "--partitions-ahead", "20"]);
    let command = maintain.start();
    wait_until("maintain to wait for the table", || {
        holder.is_true(
            "SELECT EXISTS (SELECT FROM pg_locks WHERE relation = 'public.outbox'::regclass AND NOT granted)",
        )
    });
    holder.run(&format!(
        "ALTER TABLE public.outbox OWNER TO {mallory}; COMMIT"
    ));
    let maintained = command.finish();
    let partitions = "SELECT count(*) FROM pg_inherits WHERE inhparent = 'public.outbox'::regclass";
    assert_eq!(fixture.db.number(partitions), 9, "{maintained:?}");
    assert_ne!(maintained.code, Some(0), "{maintained:?}");
}

/// When a partition is detached, PostgreSQL queries the rows that reference it and casts their
/// values, as the role that runs the command.
fn does_not_detach_partitions_from_a_self_referencing_table(major: u32) {
    let shop = PlantedFixture::bare(Outbox::Table, major);
    let (db, mallory) = (&shop.fixture.db, &shop.mallory);
    let init = shop.init().arg("--partitioned");
    init.args(["--owner", mallory]).finish().expect_code(0);
    db.run("ALTER TABLE public.outbox DISABLE TRIGGER USER");
    shop.attacker.run(
        "CREATE TYPE plot.kind AS ENUM ('a');
         CREATE FUNCTION plot.to_uuid(plot.kind) RETURNS uuid LANGUAGE plpgsql STABLE AS
             'BEGIN PERFORM plot.note(''cast''); RETURN ''00000000-0000-0000-0000-000000000001''; END';
         CREATE CAST (plot.kind AS uuid) WITH FUNCTION plot.to_uuid(plot.kind) AS IMPLICIT;
         CREATE TABLE public.outbox_old PARTITION OF public.outbox FOR VALUES FROM ('2001-01-01') TO ('2001-01-02');
         ALTER TABLE public.outbox ADD ref plot.kind, ADD ref_at timestamptz,
             ADD FOREIGN KEY (ref, ref_at) REFERENCES public.outbox (id, created_at);
         INSERT INTO public.outbox (id, aggregatetype, aggregateid, type, created_at)
             VALUES ('00000000-0000-0000-0000-000000000001', 'a', 'b', 'c', now());
         INSERT INTO public.outbox (aggregatetype, aggregateid, type, created_at) VALUES ('a', 'b', 'c', '2001-01-01 12:00');
         INSERT INTO public.outbox (aggregatetype, aggregateid, type, created_at, ref, ref_at)
             SELECT 'a', 'b', 'c', now(), 'a', created_at FROM public.outbox WHERE created_at > '2002-01-01'",
    );
    let is_attached =
        "SELECT relispartition FROM pg_class WHERE oid = to_regclass('public.outbox_old')";
    let mut maintained = None;
    wait_until(
        "maintain to refuse the table, or to detach the partition",
        || {
            shop.confirm_all_events();
            let pass = shop.command_as("postgres", &["maintain", "--retention=1s"]);
            let pass = pass.finish();
            let is_over = pass.code == Some(3) || db.value(is_attached).as_deref() != Some("t");
            maintained = Some(pass);
            is_over
        },
    );
    shop.expect_nothing_ran("maintain");
    let refused = maintained.expect("a pass").expect_code(3);
    refused.expect_mentions(&[
        "code owned by other roles",
        "foreign key outbox_ref_ref_at_fkey connects it to itself",
    ]);
}

/// `CREATE TRIGGER` on a partitioned table evaluates the partition key, which may call a function
/// of the table's owner.
fn init_does_not_create_a_trigger_on_a_table_owned_by_another_role(major: u32) {
    let shop = PlantedFixture::bare(Outbox::Table, major);
    shop.attacker.run(
        "CREATE FUNCTION plot.one(int) RETURNS int LANGUAGE plpgsql IMMUTABLE AS
             $$ BEGIN PERFORM plot.note('partition key'); RETURN 1; END $$;
         CREATE TABLE public.outbox (id uuid NOT NULL, aggregatetype text NOT NULL, aggregateid text NOT NULL, type text NOT NULL,
             payload jsonb, headers jsonb, created_at timestamptz NOT NULL DEFAULT now(),
             CONSTRAINT walpost_event_size CHECK (true)) PARTITION BY LIST ((CASE WHEN plot.one(1) > 0 THEN type ELSE '' END));
         CREATE TABLE public.rest PARTITION OF public.outbox DEFAULT",
    );
    let init = shop.init().finish();
    shop.expect_nothing_ran("init");
    let owner = format!(
        "To reject UPDATE, log in as its owner, role {}",
        shop.mallory
    );
    init.expect_mentions(&[&owner, "CREATE TRIGGER walpost_no_update"]);
    let by_hand = Path::new(env!("CARGO_MANIFEST_DIR")).join("sql/no_update.sql");
    psql(&shop.fixture, &by_hand);
    shop.expect_nothing_ran("sql/no_update.sql");
    let triggers = "SELECT count(*) FROM pg_trigger WHERE tgname = 'walpost_no_update'";
    assert_eq!(shop.fixture.db.number(triggers), 0);
}

/// The owner of a schema can rename it, and can drop other roles' tables in it. After waiting for a
/// lock, `CREATE TRIGGER` looks up the table by name, so it could then find a different table.
fn schema_cannot_be_renamed_while_create_trigger_waits_for_a_lock(major: u32) {
    let shop = PlantedFixture::new(Outbox::Table, major);
    let (fixture, db) = (&shop.fixture, &shop.fixture.db);
    db.run(&format!("ALTER SCHEMA public OWNER TO {}", shop.mallory));
    shop.attacker.run(
        "DROP FUNCTION public.walpost_no_update() CASCADE;
         CREATE FUNCTION plot.walpost_no_update() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';
         CREATE TABLE plot.outbox (id int, CONSTRAINT walpost_event_size CHECK (true)) PARTITION BY RANGE (id);
         SET lock_timeout = '1s'",
    );
    let holder = fixture.server.session_as(&shop.mallory, &fixture.name);
    holder.run("BEGIN; DROP TABLE public.outbox");
    let by_hand = Path::new(env!("CARGO_MANIFEST_DIR")).join("sql/no_update.sql");
    let renamed = thread::scope(|scope| {
        let adding = scope.spawn(|| psql(fixture, &by_hand));
        wait_until("psql to wait for the table", || {
            db.is_true(
                "SELECT EXISTS (SELECT FROM pg_locks JOIN pg_stat_activity USING (pid)
                 WHERE NOT granted AND datname = current_database())",
            )
        });
        let renamed = shop
            .attacker
            .try_run("ALTER SCHEMA public RENAME TO was_public");
        holder.run("ROLLBACK");
        adding.join().expect("the trigger is added");
        renamed
    });
    let refused = format!("{:?}", renamed.expect_err("the schema keeps its name"));
    assert!(refused.contains("lock timeout"), "{refused}");
    let triggers = "SELECT count(*) FROM pg_trigger WHERE tgname = 'walpost_no_update'";
    assert_eq!(db.number(triggers), 1);
}

/// `walpost.lock_and_examine` locks a table's ancestors with the privileges of a superuser, so the
/// function must first check that the caller is Walpost's role or could lock the ancestors itself.
fn privileges_on_a_partition_do_not_allow_locking_its_parent(major: u32) {
    let shop = PlantedFixture::bare(Outbox::Table, major);
    let (fixture, mallory) = (&shop.fixture, &shop.mallory);
    let init = shop.init().arg("--partitioned");
    init.args(["--owner", mallory]).finish().expect_code(0);
    let cleaner = format!("{mallory}_cleaner");
    fixture.db.run(&format!(
        "CREATE ROLE {cleaner} LOGIN; GRANT USAGE ON SCHEMA walpost TO {cleaner};
         GRANT DELETE ON public.outbox_default TO {cleaner}"
    ));
    let session = fixture.server.session_as(&cleaner, &fixture.name);
    let inspect = |table: &str| {
        let sql = format!("SELECT walpost.lock_and_examine('public', '{table}', 'DELETE')");
        session.try_run(&sql).map_err(|error| format!("{error:?}"))
    };
    let refused = inspect("outbox_default").expect_err("no privilege on the parent");
    let is_accepted = {
        fixture
            .db
            .run(&format!("GRANT DELETE ON public.outbox TO {cleaner}"));
        inspect("outbox_default").is_ok()
    };
    fixture
        .db
        .run(&format!("DROP OWNED BY {cleaner}; DROP ROLE {cleaner}"));
    assert!(refused.contains("permission denied"), "{refused}");
    assert!(is_accepted);
}
