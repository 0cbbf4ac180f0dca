//! An outbox table owned by another role.

use super::PlantedFixture;
use crate::support::event::Outbox;
use crate::support::postgres::MAJOR;

on_each_version! {
    code_planted_by_the_outbox_owner_never_runs_as_another_role
    does_not_compare_columns_whose_types_are_owned_by_other_roles
    locks_the_table_against_changes_by_roles_with_privileges_on_it
    locks_the_table_against_changes_by_owners_of_its_parent
    does_not_cascade_deletes_to_tables_with_code_owned_by_other_roles
    never_evaluates_row_security_policies_of_the_outbox
    creates_no_partitions_if_the_table_runs_code_owned_by_other_roles
    new_table_owner_cannot_run_code_as_the_role_that_transfers_ownership
}

/// Tries every kind of object through which the outbox table's owner, or a role with the TRIGGER
/// privilege, could run code as a role that reads or deletes rows.
fn code_planted_by_the_outbox_owner_never_runs_as_another_role(major: u32) {
    for (plant, calls) in [
        (
            "CREATE INDEX i ON public.outbox (id) WHERE plot.note('index')",
            "i calls function plot.note(text)",
        ),
        (
            "CREATE STATISTICS public.s ON (plot.note(type)), (plot.note(id::text)) FROM public.outbox",
            "statistics object",
        ),
        (
            "ALTER TABLE public.outbox ADD CONSTRAINT c CHECK (plot.note('constraint'))",
            "constraint c on table",
        ),
        (
            "CREATE FUNCTION plot.ne(date, timestamptz) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS
                 $$ BEGIN RETURN plot.note('negator'); END $$;
             CREATE OPERATOR plot.### (PROCEDURE = pg_catalog.date_eq_timestamptz, LEFTARG = date,
                 RIGHTARG = timestamptz, NEGATOR = OPERATOR(plot.##@));
             CREATE OPERATOR plot.##@ (PROCEDURE = plot.ne, LEFTARG = date, RIGHTARG = timestamptz,
                 NEGATOR = OPERATOR(plot.###));
             CREATE STATISTICS public.s ON (lpad((NOT ('2020-01-01'::date OPERATOR(plot.###)
                 '2020-01-01'::timestamptz))::text, 3)), type FROM public.outbox",
            "uses operator plot.###",
        ),
    ] {
        let shop = PlantedFixture::owned_by_attacker(major);
        shop.attacker.run(plant);
        for words in [&["verify"][..], &["replay", "--all", "--yes"], &["run"]] {
            let finished = shop.command(words).finish().expect_code(3);
            finished.expect_mentions(&[
                "statements on table public.outbox would run code owned by other roles",
                calls,
                &shop.mallory,
            ]);
            shop.expect_nothing_ran(words[0]);
        }
        for role in [&*shop.walpost, "postgres"] {
            let maintain = shop.command_as(role, &["maintain", "--retention=24h", "--delete-rows"]);
            assert_eq!(maintain.finish().code, Some(3), "{plant}");
            shop.command_as(role, &["check"]).finish();
            shop.expect_nothing_ran("maintain");
        }
        shop.init().finish().expect_code(0);
        shop.expect_nothing_ran("init");
    }
}

/// CREATE CAST takes no lock on tables that use the type, so a cast can be created after the table
/// has been inspected.
fn does_not_compare_columns_whose_types_are_owned_by_other_roles(major: u32) {
    let shop = PlantedFixture::owned_by_attacker(major);
    shop.attacker.run(
        "CREATE TYPE plot.pair AS (a text); CREATE DOMAIN plot.pairs AS plot.pair;
         CREATE FUNCTION plot.as_text(plot.pair) RETURNS text LANGUAGE plpgsql IMMUTABLE AS
             $$ BEGIN RETURN plot.note('cast'); END $$;
         CREATE FUNCTION plot.as_time(plot.pair) RETURNS timestamptz LANGUAGE plpgsql IMMUTABLE AS
             $$ BEGIN PERFORM plot.note('cast'); RETURN '2000-01-01'; END $$;
         CREATE CAST (plot.pair AS text) WITH FUNCTION plot.as_text(plot.pair) AS IMPLICIT;
         CREATE CAST (plot.pair AS timestamptz) WITH FUNCTION plot.as_time(plot.pair) AS IMPLICIT;
         ALTER TABLE public.outbox ADD note plot.pairs;
         UPDATE public.outbox SET note = ROW('x')::plot.pair",
    );
    // Merely reading the columns does not call a cast.
    for words in [&["replay", "--all", "--yes"][..], &["verify"]] {
        shop.command(words).finish();
        shop.expect_nothing_ran(words[0]);
    }
    for words in [
        ["replay", "--yes", "--where", "note LIKE 'x%'"],
        ["replay", "--yes", "--aggregate", "order"],
        [
            "replay",
            "--yes",
            "--id",
            "3f0b6fb4-5b3c-4b6e-9f0e-2b3f6a1c9d10",
        ],
    ] {
        let refused = shop.command(&words).finish().expect_code(3);
        refused.expect_mentions(&[
            "statements on table public.outbox would run code owned by other roles",
            "column note has type plot.pair, to which role",
            &shop.mallory,
        ]);
        shop.expect_nothing_ran(words[2]);
    }
    shop.attacker.run(
        "ALTER TABLE public.outbox DROP note, DROP created_at;
         ALTER TABLE public.outbox ADD created_at plot.pairs;
         UPDATE public.outbox SET created_at = ROW('x')::plot.pair",
    );
    for words in [
        &["maintain", "--retention=24h", "--delete-rows"][..],
        &["verify", "--since=1h"],
        &["replay", "--yes", "--from", "2020-01-01T00:00:00Z"],
    ] {
        for role in [&*shop.walpost, "postgres"] {
            shop.command_as(role, words).finish();
            shop.expect_nothing_ran(words[0]);
        }
    }
    let maintain = ["maintain", "--retention=24h", "--delete-rows"];
    let refused = shop.command_as("postgres", &maintain).finish();
    refused
        .expect_code(3)
        .expect_mentions(&["column created_at has type plot.pair"]);
}

/// After Walpost inspects the table, a role with a privilege on the table must not be able to add
/// objects to it until Walpost's transaction ends.
fn locks_the_table_against_changes_by_roles_with_privileges_on_it(major: u32) {
    let shop = PlantedFixture::new(Outbox::Table, major);
    let (db, mallory) = (&shop.fixture.db, &shop.mallory);
    shop.attacker.run("SET lock_timeout = '100ms'");
    let child = "CREATE TABLE plot.child (id uuid REFERENCES public.outbox (id) ON DELETE CASCADE)";
    let trigger = "CREATE TRIGGER t AFTER DELETE ON public.outbox FOR EACH STATEMENT EXECUTE FUNCTION plot.row()";
    for (right, change) in [
        ("REFERENCES", child),
        ("REFERENCES (id)", child),
        ("TRIGGER", trigger),
    ] {
        db.run(&format!("GRANT {right} ON public.outbox TO {mallory}"));
        db.run("BEGIN");
        let examined = db
            .value("SELECT walpost.lock_and_examine('public', 'outbox', 'DELETE')")
            .expect("a text");
        assert_eq!(examined, "", "{right}");
        let refused = format!("{:?}", shop.attacker.try_run(change).expect_err(right));
        assert!(refused.contains("lock timeout"), "{right}: {refused}");
        db.run("COMMIT");
        shop.attacker.run(change);
        let examined = db
            .value("SELECT walpost.lock_and_examine('public', 'outbox', 'DELETE')")
            .expect("a text");
        let is_found =
            examined.contains("trigger t on table") || examined.contains("table plot.child");
        assert!(is_found, "{right}: {examined}");
        db.run(&format!(
            "DROP TABLE IF EXISTS plot.child; DROP TRIGGER IF EXISTS t ON public.outbox;
             REVOKE {right} ON public.outbox FROM {mallory}"
        ));
    }
}

/// The owner of a partitioned table can create an index on its partitions, even on those that
/// another role owns.
fn locks_the_table_against_changes_by_owners_of_its_parent(major: u32) {
    let shop = PlantedFixture::new(Outbox::Table, major);
    let (db, mallory) = (&shop.fixture.db, &shop.mallory);
    db.run(&format!(
        "CREATE TABLE public.parent (LIKE public.outbox) PARTITION BY RANGE (id);
         ALTER TABLE public.parent ATTACH PARTITION public.outbox DEFAULT;
         ALTER TABLE public.parent OWNER TO {mallory}"
    ));
    let change = "CREATE INDEX i ON public.parent (id) WHERE plot.note('index')";
    shop.attacker.run("SET lock_timeout = '100ms'");
    db.run("BEGIN");
    let examine = "SELECT walpost.lock_and_examine('public', 'outbox', 'SELECT')";
    assert_eq!(db.value(examine).expect("a text"), "");
    let refused = format!("{:?}", shop.attacker.try_run(change).expect_err("it waits"));
    assert!(refused.contains("lock timeout"), "{refused}");
    db.run("COMMIT");
    // After the lock is released, the server may accept or reject the CREATE INDEX statement. If
    // the statement succeeds, Walpost must detect the index the next time that it examines the
    // table.
    if shop.attacker.try_run(change).is_ok() {
        let examined = db.value(examine).expect("a text");
        assert!(examined.contains("plot.note(text)"), "{examined}");
    }
}

fn never_evaluates_row_security_policies_of_the_outbox(major: u32) {
    let shop = PlantedFixture::owned_by_attacker(major);
    shop.attacker.run(
        "ALTER TABLE public.outbox ENABLE ROW LEVEL SECURITY; ALTER TABLE public.outbox FORCE ROW LEVEL SECURITY;
         CREATE POLICY p ON public.outbox USING (plot.note('policy'))",
    );
    for words in [&["verify"][..], &["replay", "--all", "--yes"], &["run"]] {
        let finished = shop.command(words).finish().expect_code(3);
        finished.expect_mentions(&["row-level security", "BYPASSRLS", &shop.walpost]);
        shop.expect_nothing_ran(words[0]);
    }
    shop.command(&["check"]).finish();
    shop.init().finish().expect_code(0);
    shop.expect_nothing_ran("init");
    shop.fixture
        .db
        .run(&format!("ALTER ROLE {} BYPASSRLS", shop.walpost));
    shop.command(&["verify", "--kafka", &shop.fixture.broker.address()]);
    let replay = shop
        .command(&["replay", "--all", "--yes"])
        .finish()
        .expect_code(0);
    replay.expect_mentions(&["1 row of table"]);
    shop.expect_nothing_ran("replay");
}

#[test]
fn does_not_delete_rows_if_triggers_owned_by_other_roles_would_fire() {
    for (plant, expected) in [
        (
            "CREATE TRIGGER t BEFORE DELETE ON public.outbox FOR EACH ROW EXECUTE FUNCTION plot.row()",
            "trigger t on table public.outbox would run with each DELETE",
        ),
        (
            "CREATE TRIGGER t AFTER DELETE ON public.outbox FOR EACH STATEMENT EXECUTE FUNCTION plot.row()",
            "trigger t on table public.outbox would run with each DELETE",
        ),
        (
            "CREATE RULE r AS ON DELETE TO public.outbox DO ALSO SELECT plot.note('rule')",
            "rule r on table public.outbox runs with the privileges of the owner",
        ),
        (
            "CREATE TABLE plot.child (id uuid REFERENCES public.outbox (id) ON DELETE CASCADE);
             CREATE TRIGGER t AFTER DELETE ON plot.child FOR EACH ROW EXECUTE FUNCTION plot.row();
             INSERT INTO plot.child SELECT id FROM public.outbox",
            "connects it to table plot.child",
        ),
    ] {
        let shop = PlantedFixture::owned_by_attacker(MAJOR);
        let (db, mallory) = (&shop.fixture.db, &shop.mallory);
        shop.attacker.run(plant);
        db.run(&format!("GRANT {mallory} TO {}", shop.walpost));
        for role in [&*shop.walpost, "postgres"] {
            let maintain = ["maintain", "--retention=24h", "--delete-rows"];
            let finished = shop.command_as(role, &maintain).finish().expect_code(3);
            finished.expect_mentions(&["code owned by other roles", expected]);
            shop.expect_nothing_ran(plant);
        }
    }
}

/// When a row is deleted, PostgreSQL queries and modifies the rows that reference it, and casts
/// their values. The queries and the casts can run code of other roles.
#[test]
fn does_not_delete_rows_from_a_self_referencing_table() {
    for plant in [
        "CREATE TYPE plot.kind AS ENUM ('a');
         CREATE FUNCTION plot.to_uuid(plot.kind) RETURNS uuid LANGUAGE plpgsql AS
             'BEGIN PERFORM plot.note(''cast''); RETURN pg_catalog.gen_random_uuid(); END';
         CREATE CAST (plot.kind AS uuid) WITH FUNCTION plot.to_uuid(plot.kind) AS IMPLICIT;
         ALTER TABLE public.outbox ADD ref plot.kind, ADD FOREIGN KEY (ref) REFERENCES public.outbox (id) NOT VALID",
        "ALTER TABLE public.outbox ADD ref uuid REFERENCES public.outbox (id) ON DELETE SET NULL;
         UPDATE public.outbox SET ref = id;
         CREATE CONSTRAINT TRIGGER t AFTER UPDATE ON public.outbox DEFERRABLE INITIALLY DEFERRED
             FOR EACH ROW EXECUTE FUNCTION plot.row()",
    ] {
        let shop = PlantedFixture::owned_by_attacker(MAJOR);
        shop.attacker.run(plant);
        let maintain = ["maintain", "--retention=24h", "--delete-rows"];
        let refused = shop.command_as("postgres", &maintain).finish();
        shop.expect_nothing_ran(plant);
        refused
            .expect_code(3)
            .expect_mentions(&["code owned by other roles", "foreign key outbox_ref_fkey connects it to itself"]);
    }
}

/// ON DELETE CASCADE can continue from one table to the next, so Walpost must follow such foreign
/// keys even through tables of trusted roles.
fn does_not_cascade_deletes_to_tables_with_code_owned_by_other_roles(major: u32) {
    let shop = PlantedFixture::new(Outbox::Table, major);
    let (fixture, mallory) = (&shop.fixture, &shop.mallory);
    fixture
        .db
        .run("ALTER TABLE public.outbox ALTER created_at SET DEFAULT now() - interval '2 days'");
    for parent in ["public.child", "public.parts"] {
        fixture.insert(&fixture.aggregate(1), "k");
        fixture.db.run(&format!(
            "CREATE TABLE public.parts (id uuid PRIMARY KEY REFERENCES public.outbox (id) ON DELETE CASCADE)
                 PARTITION BY RANGE (id);
             CREATE TABLE public.child PARTITION OF public.parts DEFAULT;
             INSERT INTO public.parts SELECT id FROM public.outbox;
             GRANT REFERENCES ON {parent} TO {mallory}; GRANT SELECT ON {parent} TO {mallory}"
        ));
        shop.attacker.run(&format!(
            "CREATE TABLE plot.further (id uuid REFERENCES {parent} (id) ON DELETE CASCADE);
             CREATE TRIGGER t AFTER DELETE ON plot.further FOR EACH ROW EXECUTE FUNCTION plot.row();
             INSERT INTO plot.further SELECT id FROM {parent}"
        ));
        let maintain = ["maintain", "--retention=24h", "--delete-rows"];
        let refused = shop.command_as("postgres", &maintain).finish();
        refused
            .expect_code(3)
            .expect_mentions(&["foreign key parts_id_fkey connects it to table public."]);
        shop.expect_nothing_ran(parent);
        shop.attacker.run("DROP TABLE plot.further");
        fixture.db.run("DROP TABLE public.parts");
    }
}

fn creates_no_partitions_if_the_table_runs_code_owned_by_other_roles(major: u32) {
    let shop = PlantedFixture::bare(Outbox::Table, major);
    let column = "id uuid, aggregatetype text, aggregateid text, type text, payload jsonb, headers jsonb, created_at";
    shop.attacker.run(
        "CREATE TABLE plot.kinds (kind text PRIMARY KEY); CREATE INDEX ON plot.kinds ((plot.note(kind)))",
    );
    for (table, expected) in [
        (
            format!(
                "({column} timestamptz, CONSTRAINT walpost_event_size CHECK (true),
                 FOREIGN KEY (aggregatetype) REFERENCES plot.kinds) PARTITION BY RANGE (created_at)"
            ),
            "code of other roles",
        ),
        (
            format!(
                "({column} timestamptz, CONSTRAINT walpost_event_size CHECK (plot.note('check'))) PARTITION BY RANGE (created_at)"
            ),
            "code of other roles",
        ),
        (
            format!(
                "({column} timestamptz, CONSTRAINT walpost_event_size CHECK (true)) PARTITION BY RANGE (plot.at(created_at))"
            ),
            "not partitioned by range of one column",
        ),
        (
            format!(
                "({column} plot.moment, CONSTRAINT walpost_event_size CHECK (true)) PARTITION BY RANGE (created_at)"
            ),
            "not partitioned by range of one column",
        ),
    ] {
        shop.attacker.run(&format!(
            "DROP TABLE IF EXISTS public.outbox;
             CREATE OR REPLACE FUNCTION plot.at(at timestamptz) RETURNS timestamptz LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN
                 PERFORM plot.note('partition key'); RETURN at; END $$;
             DROP DOMAIN IF EXISTS plot.moment; CREATE DOMAIN plot.moment AS timestamptz CHECK (plot.note('domain'));
             CREATE TABLE public.outbox {table}; CREATE TABLE public.rest PARTITION OF public.outbox DEFAULT"
        ));
        let init = shop.init().arg("--partitioned").finish().expect_code(3);
        init.expect_mentions(&[expected]);
        shop.expect_nothing_ran(&table);
    }
}

/// Becoming the owner of the table does not make the application's role more trusted.
fn new_table_owner_cannot_run_code_as_the_role_that_transfers_ownership(major: u32) {
    let shop = PlantedFixture::bare(Outbox::Table, major);
    let mallory = &shop.mallory;
    let init = |owner: &str| {
        let init = shop.init().args(["--owner", owner, "--writer", mallory]);
        init.finish()
    };
    // Plant a constraint named `walpost_event_size`, like the constraint in tables that Walpost
    // creates, so that Walpost could mistake the table for one of them.
    shop.attacker.run(
        "CREATE TABLE public.outbox (id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload jsonb,
             CONSTRAINT walpost_event_size CHECK (plot.note('check')))",
    );
    init("postgres").expect_code(3).expect_mentions(&[
        &format!("table public.outbox belongs to role {mallory}, expected role postgres"),
        "Nothing was changed",
    ]);
    shop.expect_nothing_ran("init for another owner");
    shop.attacker.run("DROP TABLE public.outbox");

    init(mallory).expect_code(0);
    // The owner must not be able to change functions that other outboxes in the schema also call.
    for function in [
        "walpost_uuidv7() RETURNS uuid",
        "walpost_no_update() RETURNS trigger",
    ] {
        let replace = format!(
            "CREATE OR REPLACE FUNCTION public.{function} LANGUAGE plpgsql AS $$ BEGIN PERFORM plot.note('mine'); RETURN NULL; END $$"
        );
        // In PostgreSQL 18 and later, a built-in function is used instead of `walpost_uuidv7`.
        if major < 18 || function.contains("update") {
            shop.attacker.try_run(&replace).expect_err(function);
        }
    }
    shop.attacker.run(
        "CREATE TRIGGER t AFTER INSERT ON public.outbox FOR EACH ROW EXECUTE FUNCTION plot.row();
         CREATE INDEX i ON public.outbox (id) WHERE plot.note('index');
         ALTER TABLE public.outbox ADD CONSTRAINT c CHECK (plot.note('constraint')) NOT VALID;
         ALTER TABLE public.outbox ALTER aggregateid SET DEFAULT plot.note('default')::text;
         INSERT INTO public.outbox (aggregatetype, aggregateid, type) VALUES ('a', 'k', 't')",
    );
    init(mallory).expect_code(0);
    shop.expect_nothing_ran("init for its owner again");
    shop.command(&["check"]).finish();
    shop.expect_nothing_ran("check");
}

/// Walpost recognizes a former partition by a comment with the OID of its parent and the system
/// identifier. Any role can read both numbers, and could therefore forge such a comment.
#[test]
fn a_forged_comment_does_not_make_a_table_count_as_a_former_partition() {
    let shop = PlantedFixture::new(Outbox::Table, MAJOR);
    let fixture = &shop.fixture;
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_and_confirm_one(&aggregate, "delivered");
    walpost.terminate().expect_code(0);
    fixture.insert(&aggregate, "not delivered");
    fixture.drop_slot();
    shop.init().finish().expect_code(0);
    let numbers = fixture
        .db
        .value(
            "SELECT format('table %s, cluster %s', 'public.outbox'::regclass::oid, system_identifier) FROM pg_control_system()",
        )
        .expect("both numbers");
    shop.attacker.run(&format!(
        "CREATE TABLE plot.former (id int); INSERT INTO plot.former VALUES (1);
         COMMENT ON TABLE plot.former IS 'walpost: detached at 0/0 ({numbers})'"
    ));
    let replay = fixture.replay(&["--dropped-slots", "--yes"]);
    replay.finish().expect_code(0);
    let records = fixture.records();
    assert!(records.iter().any(|record| record.key() == "not delivered"));
    fixture.check().finish().expect_code(0);
}
