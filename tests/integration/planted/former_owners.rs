//! Code that remains after its author lost ownership: in objects that now belong to another role,
//! and in objects that another role uses.

use std::fs;
use std::path::Path;

use super::Shop;
use crate::init::try_psql;
use crate::support::event::Outbox;
use crate::support::reaper;

on_each_version! {
    type_that_was_taken_over_keeps_no_code_of_its_former_owner
    checks_of_a_domain_call_no_functions_of_others
    triggers_of_tables_that_refer_to_the_outbox_call_no_functions_of_others
    partition_that_is_to_have_another_owner_is_reported_with_the_code_in_it
    role_that_has_logged_in_is_not_reached_through_the_session_authorization
    names_of_children_are_printed_without_control_characters
}

const REPLAY: [&str; 4] = ["replay", "--aggregate", "order", "--dry-run"];

fn type_that_was_taken_over_keeps_no_code_of_its_former_owner(major: u32) {
    let shop = Shop::theirs(major);
    shop.theirs.run(
        "CREATE TYPE plot.kind AS ENUM ('order', 'invoice');
         CREATE FUNCTION plot.kind_text(plot.kind) RETURNS text LANGUAGE plpgsql IMMUTABLE AS
             $$ BEGIN PERFORM plot.note('cast'); RETURN 'order'; END $$;
         CREATE CAST (plot.kind AS text) WITH FUNCTION plot.kind_text(plot.kind) AS IMPLICIT;
         ALTER TABLE public.outbox DROP aggregatetype; ALTER TABLE public.outbox ADD aggregatetype plot.kind DEFAULT 'order'",
    );
    let replay = || shop.command_as("postgres", &REPLAY).finish();
    replay().expect_says(&["column aggregatetype has type plot.kind, to which role"]);
    // As the message of earlier versions suggested.
    shop.scene.db.run("ALTER TYPE plot.kind OWNER TO postgres");
    let refused = replay();
    shop.expect_nothing_ran("replay of a table with a type that was taken over");
    assert_ne!(refused.code, Some(0), "{refused:?}");
    let function =
        "whose cast from plot.kind to text calls function plot.kind_text(plot.kind) of role";
    refused.expect_says(&[function]);
    shop.scene.db.run("DROP CAST (plot.kind AS text)");
    replay().expect_code(0);
}

/// The domain and the type that contains it belong to the DBA, and the function belongs to the
/// application.
fn checks_of_a_domain_call_no_functions_of_others(major: u32) {
    let shop = Shop::theirs(major);
    shop.theirs.run(
        "CREATE FUNCTION plot.is_valid(t text) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS
             $$ BEGIN RETURN plot.note('check of a domain'); END $$",
    );
    shop.scene.db.run(
        "CREATE SCHEMA kept; GRANT USAGE ON SCHEMA kept TO PUBLIC;
         CREATE DOMAIN kept.tag AS text CHECK (plot.is_valid(VALUE));
         ALTER TABLE public.outbox ADD tags kept.tag[]",
    );
    let condition = ["replay", "--where", "tags = '{a}'", "--dry-run"];
    let refused = shop.command(&condition).finish();
    shop.expect_nothing_ran("replay --where");
    assert_ne!(refused.code, Some(0), "{refused:?}");
    refused.expect_says(&[
        "column tags has type kept.tag, whose constraint",
        "calls function plot.is_valid(text) of role",
    ]);
}

/// Deleting a row of the outbox also deletes rows of the other table, as the owner of that table.
fn triggers_of_tables_that_refer_to_the_outbox_call_no_functions_of_others(major: u32) {
    let shop = Shop::new(Outbox::Table, major);
    let scene = &shop.scene;
    scene.insert(&scene.aggregate(1), "k");
    shop.theirs.run(
        "CREATE FUNCTION plot.audit() RETURNS trigger LANGUAGE plpgsql AS
             $$ BEGIN PERFORM plot.note('trigger'); RETURN coalesce(OLD, NEW); END $$;
         CREATE FUNCTION plot.zero() RETURNS uuid LANGUAGE plpgsql AS
             $$ BEGIN PERFORM plot.note('default'); RETURN NULL; END $$",
    );
    for (action, code, says) in [
        (
            "CASCADE",
            "CREATE TRIGGER audit BEFORE DELETE ON public.sent FOR EACH ROW EXECUTE FUNCTION plot.audit()",
            "trigger audit on table public.sent calls function plot.audit() of role",
        ),
        (
            "SET NULL",
            "CREATE TRIGGER audit AFTER UPDATE ON public.sent FOR EACH ROW EXECUTE FUNCTION plot.audit()",
            "trigger audit on table public.sent calls function plot.audit() of role",
        ),
        (
            "SET NULL",
            "CREATE INDEX ON public.sent (n) WHERE plot.note('index')",
            "index public.sent_n_idx calls function plot.note(text) of role",
        ),
        (
            "SET DEFAULT",
            "ALTER TABLE public.sent ALTER event SET DEFAULT plot.zero()",
            "calls function plot.zero() of role",
        ),
        (
            "CASCADE",
            "CREATE RULE audit AS ON DELETE TO public.sent DO ALSO SELECT plot.note('rule')",
            "calls function plot.note(text) of role",
        ),
    ] {
        let sent = format!(
            "DROP TABLE IF EXISTS public.sent;
             CREATE TABLE public.sent (n int, event uuid REFERENCES public.outbox ON DELETE {action});
             INSERT INTO public.sent SELECT 1, id FROM public.outbox; {code}"
        );
        scene.db.run(&sent);
        let log_length = scene.server.log_length();
        let maintain = ["maintain", "--retention=1s", "--delete-rows"];
        let refused = shop.command_as("postgres", &maintain).finish();
        let log = scene.server.log_after(log_length);
        assert!(
            !log.contains(&format!("in {} ran as", scene.name)),
            "{code}: {log}"
        );
        refused.expect_says(&[says]);
    }
}

/// Autovacuum evaluates an index as the owner of its table, whichever role created the index.
fn partition_that_is_to_have_another_owner_is_reported_with_the_code_in_it(major: u32) {
    let shop = Shop::bare(Outbox::Table, major);
    let (db, mallory) = (&shop.scene.db, &shop.mallory);
    let init = shop.init().args(["--partitioned", "--owner", mallory]);
    init.finish().expect_code(0);
    shop.theirs.run(
        "CREATE INDEX planted ON public.outbox_default (aggregatetype) WHERE plot.note(type);
         CREATE INDEX harmless ON public.outbox_default (lower(aggregatetype))",
    );
    db.run("ALTER TABLE public.outbox OWNER TO postgres");
    let check = shop.command_as("postgres", &["check"]).finish();
    check.expect_says(&[
        "First drop index public.planted, which would stay and run code as role postgres. Give each to the owner of the table: ALTER TABLE",
    ]);
    db.run("DROP INDEX public.planted");
    let check = shop.command_as("postgres", &["check"]).finish();
    assert!(!check.stdout.contains("First drop"), "{}", check.stdout);
}

/// The DBA runs a file as the owner of the table, but a later statement of the session may run as
/// another role.
fn role_that_has_logged_in_is_not_reached_through_the_session_authorization(major: u32) {
    let mut shop = Shop::bare(Outbox::Table, major);
    shop.scene.use_settings("tables = [\"tenant_*.outbox\"]\n");
    shop.init().finish().expect_code(0);
    let mallory = &shop.mallory;
    shop.scene.db.run(&format!(
        "GRANT USAGE ON SCHEMA walpost TO {mallory}; GRANT EXECUTE ON FUNCTION walpost.add_outbox(regclass, name) TO {mallory};
         ALTER PUBLICATION {} OWNER TO {mallory};
         GRANT SELECT, INSERT, DELETE ON walpost.outbox_row TO {mallory};
         GRANT SELECT, INSERT, UPDATE ON walpost.table_state TO {mallory}",
        shop.scene.slot()
    ));
    shop.theirs.run(
        "CREATE SCHEMA tenant_m;
         CREATE TABLE tenant_m.outbox (id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload jsonb);
         CREATE FUNCTION plot.reach(t text) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN
             SET SESSION AUTHORIZATION DEFAULT; PERFORM plot.note('index'); RETURN true; END $$;
         CREATE INDEX ON tenant_m.outbox (type) WHERE plot.reach(type)",
    );
    let sql = Path::new(env!("CARGO_MANIFEST_DIR")).join("sql");
    let file = reaper::folder("planted").join("as_the_owner.sql");
    let text = format!(
        "SET SESSION AUTHORIZATION {mallory};\n\\set schema tenant_m\n\\ir {}\n",
        sql.join("add_outbox.sql").display()
    );
    fs::write(&file, text).unwrap();
    let output = try_psql(&shop.scene, &file);
    shop.expect_nothing_ran("add_outbox.sql");
    let says = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(says.contains("plot.reach(text)"), "{says}");
}

fn names_of_children_are_printed_without_control_characters(major: u32) {
    let shop = Shop::bare(Outbox::Table, major);
    shop.scene.db.run(
        "CREATE TABLE public.outbox (id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload jsonb)",
    );
    shop.scene
        .db
        .run("CREATE TABLE public.\"\u{1b}[2J\nHINT:  run this\" () INHERITS (public.outbox)");
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("sql");
    let output = try_psql(&shop.scene, &folder.join("publication.sql"));
    let says = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(says.contains("?[2J?HINT"), "{says:?}");
    assert!(!says.contains('\u{1b}'), "{says:?}");
}
