//! A former owner's code can remain in objects that now belong to another role, or in objects that
//! other roles use.

use std::fs;
use std::path::Path;

use super::PlantedFixture;
use crate::init::try_psql;
use crate::support::event::Outbox;
use crate::support::reaper;

on_each_version! {
    rejects_a_type_with_casts_created_by_its_former_owner
    domain_checks_do_not_call_functions_owned_by_other_roles
    does_not_delete_rows_referenced_by_a_foreign_key
    does_not_fire_a_delete_trigger_created_by_a_former_owner
    schema_of_a_partition_cannot_be_renamed_during_maintenance
    reports_rules_and_statistics_created_by_a_former_owner
    inspects_types_returned_by_json_functions
    reports_casts_called_by_json_constructors
    inspection_does_not_depend_on_standard_conforming_strings
    code_owned_by_other_roles_cannot_reset_session_authorization
    escapes_control_characters_in_names_of_child_tables
    escapes_control_characters_in_role_names
    escapes_control_characters_in_notices_about_updates
}

const REPLAY: [&str; 4] = ["replay", "--aggregate", "order", "--dry-run"];

fn rejects_a_type_with_casts_created_by_its_former_owner(major: u32) {
    let shop = PlantedFixture::owned_by_attacker(major);
    shop.attacker.run(
        "CREATE TYPE plot.kind AS ENUM ('order', 'invoice');
         CREATE FUNCTION plot.kind_text(plot.kind) RETURNS text LANGUAGE plpgsql IMMUTABLE AS
             $$ BEGIN PERFORM plot.note('cast'); RETURN 'order'; END $$;
         CREATE CAST (plot.kind AS text) WITH FUNCTION plot.kind_text(plot.kind) AS IMPLICIT;
         ALTER TABLE public.outbox DROP aggregatetype; ALTER TABLE public.outbox ADD aggregatetype plot.kind DEFAULT 'order'",
    );
    let replay = || shop.command_as("postgres", &REPLAY).finish();
    replay().expect_mentions(&["column aggregatetype has type plot.kind, to which role"]);
    // Follow the advice that earlier versions of Walpost printed, which is not sufficient.
    shop.fixture
        .db
        .run("ALTER TYPE plot.kind OWNER TO postgres");
    let refused = replay();
    shop.expect_nothing_ran("replay of a table with a type that was taken over");
    assert_ne!(refused.code, Some(0), "{refused:?}");
    let function =
        "whose cast from plot.kind to text calls function plot.kind_text(plot.kind) of role";
    refused.expect_mentions(&[function]);
    shop.fixture.db.run("DROP CAST (plot.kind AS text)");
    replay().expect_code(0);
}

/// The DBA owns both the domain and the type that contains it, but the application owns the
/// function that the domain calls.
fn domain_checks_do_not_call_functions_owned_by_other_roles(major: u32) {
    let shop = PlantedFixture::owned_by_attacker(major);
    shop.attacker.run(
        "CREATE FUNCTION plot.is_valid(t text) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS
             $$ BEGIN RETURN plot.note('check of a domain'); END $$",
    );
    shop.attacker.run(
        "CREATE FUNCTION plot.differs(text, text) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS
             $$ BEGIN RETURN plot.note('negator of an operator'); END $$;
         CREATE OPERATOR plot.=== (FUNCTION = pg_catalog.texteq, LEFTARG = text, RIGHTARG = text, NEGATOR = OPERATOR(plot.!==));
         CREATE OPERATOR plot.!== (FUNCTION = plot.differs, LEFTARG = text, RIGHTARG = text, NEGATOR = OPERATOR(plot.===));
         CREATE TABLE plot.parts (a int) PARTITION BY HASH ((a + plot.note('partition key')::int));
         CREATE FUNCTION plot.query() RETURNS tsquery LANGUAGE plpgsql AS
             $$ BEGIN PERFORM plot.note('query'); RETURN 'a'; END $$",
    );
    let parts = shop
        .fixture
        .db
        .value("SELECT 'plot.parts'::regclass::oid::text")
        .expect("an OID");
    shop.fixture
        .db
        .run("CREATE SCHEMA kept; GRANT USAGE ON SCHEMA kept TO PUBLIC");
    for (check, expected) in [
        (
            "plot.is_valid(VALUE)",
            "calls function plot.is_valid(text) of role",
        ),
        (
            "NOT (VALUE OPERATOR(plot.===) 'x')",
            "uses operator plot.===(text,text) of role",
        ),
        (
            &format!("satisfies_hash_partition({parts}, 1, 0, length(VALUE))"),
            "calls function satisfies_hash_partition",
        ),
        (
            "ts_rewrite('a'::tsquery, 'SELECT plot.query(), plot.query()') IS NOT NULL",
            "calls function ts_rewrite(tsquery,text), which is not immutable",
        ),
    ] {
        shop.fixture.db.run(&format!(
            "CREATE DOMAIN kept.tag AS text CONSTRAINT looked CHECK ({check}); ALTER TABLE public.outbox ADD tags kept.tag[]"
        ));
        let condition = ["replay", "--where", "tags = '{a}'", "--dry-run"];
        let refused = shop.command(&condition).finish();
        shop.expect_nothing_ran(check);
        assert_ne!(refused.code, Some(0), "{refused:?}");
        refused.expect_mentions(&["constraint looked", expected]);
        shop.fixture
            .db
            .run("ALTER TABLE public.outbox DROP tags; DROP DOMAIN kept.tag");
    }
}

/// A foreign key's trigger runs queries as the owner of the referencing table. These queries look
/// up that table and its operators by name.
fn does_not_delete_rows_referenced_by_a_foreign_key(major: u32) {
    let shop = PlantedFixture::new(Outbox::Table, major);
    let fixture = &shop.fixture;
    fixture.insert(&fixture.aggregate(1), "k");
    shop.attacker.run(
        "CREATE FUNCTION plot.audit() RETURNS trigger LANGUAGE plpgsql AS
             $$ BEGIN PERFORM plot.note('trigger'); RETURN OLD; END $$",
    );
    fixture.db.run(
        "CREATE TABLE public.sent (event uuid REFERENCES public.outbox ON DELETE CASCADE);
         INSERT INTO public.sent SELECT id FROM public.outbox;
         CREATE TRIGGER audit BEFORE DELETE ON public.sent FOR EACH ROW EXECUTE FUNCTION plot.audit()",
    );
    let maintain = ["maintain", "--retention=1s", "--delete-rows"];
    let refused = shop.command_as("postgres", &maintain).finish();
    shop.expect_nothing_ran("maintain");
    refused.expect_mentions(&["foreign key sent_event_fkey connects it to table public.sent"]);
}

/// Some of PostgreSQL's built-in functions run SQL that they receive as text, or evaluate the
/// partition key of a table whose OID they receive. Such calls don't appear as dependencies.
fn does_not_fire_a_delete_trigger_created_by_a_former_owner(major: u32) {
    let shop = PlantedFixture::owned_by_attacker(major);
    shop.attacker.run(
        "CREATE FUNCTION plot.query() RETURNS tsquery LANGUAGE plpgsql AS
             $$ BEGIN PERFORM plot.note('query'); RETURN 'a'; END $$;
         CREATE TABLE plot.parts (a int) PARTITION BY HASH ((a + plot.note('partition key')::int))",
    );
    shop.attacker.run(
        "DO $$ BEGIN EXECUTE format('CREATE TRIGGER parts BEFORE DELETE ON public.outbox FOR EACH ROW
             WHEN (NOT satisfies_hash_partition(%s, 1, 0, length(OLD.type))) EXECUTE FUNCTION suppress_redundant_updates_trigger()',
             'plot.parts'::regclass::oid); END $$;
         CREATE TRIGGER rewrite BEFORE DELETE ON public.outbox FOR EACH ROW
             WHEN (ts_rewrite('a'::tsquery, 'SELECT plot.query(), plot.query()') IS NULL)
             EXECUTE FUNCTION suppress_redundant_updates_trigger()",
    );
    shop.fixture.db.run(
        "ALTER TABLE public.outbox OWNER TO postgres; REVOKE ALL ON public.outbox FROM PUBLIC",
    );
    let maintain = ["maintain", "--retention=24h", "--delete-rows"];
    for trigger in ["rewrite", "parts"] {
        let refused = shop.command_as("postgres", &maintain).finish();
        shop.expect_nothing_ran("maintain");
        refused.expect_mentions(&[&format!(
            "trigger {trigger} on table public.outbox would run with each DELETE"
        )]);
        shop.fixture
            .db
            .run(&format!("DROP TRIGGER {trigger} ON public.outbox"));
    }
    let finished = shop.command_as("postgres", &maintain).finish();
    finished.expect_code(0);
}

/// The actions of a rule run with the privileges of the table's owner, who may have changed since
/// the rule was created.
fn reports_rules_and_statistics_created_by_a_former_owner(major: u32) {
    let shop = PlantedFixture::owned_by_attacker(major);
    shop.attacker.run(
        "CREATE RULE r AS ON INSERT TO public.outbox WHERE NEW.type = 'r'
             DO ALSO UPDATE pg_authid SET rolsuper = true WHERE rolname = NEW.aggregateid;
         CREATE STATISTICS plot.s ON (ts_rewrite('a'::tsquery, 'SELECT 1') IS NULL), (length(type)) FROM public.outbox",
    );
    let examined = shop.examined("DELETE");
    for expected in [
        "rule r on table public.outbox runs with the privileges of the owner",
        "statistics object plot.s calls function ts_rewrite(tsquery,text), which is not immutable",
    ] {
        assert!(examined.contains(expected), "{examined}");
    }
}

/// `pg_depend` does not record the return type of JSON functions, so Walpost must find the type in
/// another way.
fn inspects_types_returned_by_json_functions(major: u32) {
    if major < 17 {
        return;
    }
    let shop = PlantedFixture::owned_by_attacker(major);
    shop.attacker.run(
        "CREATE FUNCTION plot.is_valid(t text) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS
             $$ BEGIN RETURN plot.note('check of a domain'); END $$;
         CREATE DOMAIN plot.checked AS text CHECK (plot.is_valid(VALUE))",
    );
    shop.fixture.db.run(
        "CREATE SCHEMA kept; GRANT USAGE ON SCHEMA kept TO PUBLIC;
         CREATE DOMAIN kept.tag AS text CONSTRAINT looked
             CHECK (JSON_VALUE(jsonb '{\"a\": \"b\"}', '$.a' RETURNING plot.checked) IS NOT NULL);
         ALTER TABLE public.outbox ADD tags kept.tag[]",
    );
    let condition = ["replay", "--where", "tags = '{a}'", "--dry-run"];
    let refused = shop.command(&condition).finish();
    shop.expect_nothing_ran("replay");
    refused
        .expect_code(3)
        .expect_mentions(&["constraint looked uses type plot.checked"]);
    shop.fixture.db.run("ALTER TABLE public.outbox DROP tags");
    shop.attacker.run(
        "CREATE INDEX i ON public.outbox ((JSON_VALUE(payload, '$.a' RETURNING plot.checked)))",
    );
    let examined = shop.examined("SELECT");
    assert!(
        examined.contains("index public.i uses type plot.checked"),
        "{examined}"
    );
}

/// JSON constructors such as JSON_ARRAY can call a cast to json. `pg_depend` does not record this
/// cast, no matter whether the constructor's argument is a constant or a column.
fn reports_casts_called_by_json_constructors(major: u32) {
    // Versions before 16 do not support JSON constructors.
    if major < 16 {
        return;
    }
    let shop = PlantedFixture::owned_by_attacker(major);
    shop.attacker.run(
        "CREATE TYPE plot.size AS ENUM ('small');
         CREATE FUNCTION plot.to_json(plot.size) RETURNS json LANGUAGE plpgsql IMMUTABLE AS
             $$ BEGIN PERFORM plot.note('cast to json'); RETURN '1'; END $$;
         CREATE CAST (plot.size AS json) WITH FUNCTION plot.to_json(plot.size);
         ALTER TABLE public.outbox ADD size plot.size;
         CREATE INDEX of_a_constant ON public.outbox ((JSON_ARRAY('small'::plot.size RETURNING text)));
         CREATE INDEX of_a_column ON public.outbox ((JSON_OBJECT('size': size RETURNING text)));
         DROP CAST (plot.size AS json)",
    );
    for statement in ["SELECT", "DELETE", "ALTER"] {
        let examined = shop.examined(statement);
        for index in ["of_a_constant", "of_a_column"] {
            let text = format!(
                "index public.{index} constructs JSON of type plot.size, for which a cast to json can be created"
            );
            assert!(examined.contains(&text), "{statement}: {examined}");
        }
    }
}

/// With standard_conforming_strings = off, which the owner of a database can set, the string `'\d'`
/// means `d`. The regular expressions in `walpost.lock_and_examine` must not depend on that
/// setting.
fn inspection_does_not_depend_on_standard_conforming_strings(major: u32) {
    let shop = PlantedFixture::owned_by_attacker(major);
    shop.fixture.db.run(
        "CREATE STATISTICS public.s ON (ts_rewrite('a'::tsquery, 'SELECT plot.f()')), id FROM public.outbox",
    );
    let examined = shop.examined("ALTER");
    assert!(examined.contains("ts_rewrite"), "{examined}");
    let db = &shop.fixture.db;
    db.run("SET standard_conforming_strings = off; SET escape_string_warning = off");
    assert_eq!(shop.examined("ALTER"), examined);
}

/// If the schema of a partition were not locked, the owner of the schema could replace the
/// partition with another table.
fn schema_of_a_partition_cannot_be_renamed_during_maintenance(major: u32) {
    let shop = PlantedFixture::bare(Outbox::Table, major);
    shop.init().arg("--partitioned").finish().expect_code(0);
    let db = &shop.fixture.db;
    db.run(&format!(
        "CREATE SCHEMA parts AUTHORIZATION {};
         CREATE TABLE parts.old PARTITION OF public.outbox FOR VALUES FROM ('2001-01-01') TO ('2001-01-02')",
        shop.mallory
    ));
    shop.attacker.run("SET lock_timeout = '100ms'");
    let rename = "ALTER SCHEMA parts RENAME TO renamed";
    db.run("BEGIN");
    let examined = db
        .value("SELECT walpost.lock_and_examine('public', 'outbox', 'DELETE')")
        .expect("a text");
    assert_eq!(examined, "");
    let refused = format!("{:?}", shop.attacker.try_run(rename).expect_err("locked"));
    assert!(refused.contains("lock timeout"), "{refused}");
    db.run("COMMIT");
    shop.attacker.run(rename);
}

/// A role with CREATEROLE can choose any name for a new role, even one with control characters that
/// would reach the DBA's terminal.
fn escapes_control_characters_in_role_names(major: u32) {
    let shop = PlantedFixture::bare(Outbox::Table, major);
    let name = format!("{}\u{1b}[2J\nHINT:  run this", shop.mallory);
    shop.fixture.db.run(&format!(
        "CREATE ROLE \"{name}\"; CREATE SCHEMA walpost AUTHORIZATION \"{name}\""
    ));
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("sql");
    let output = try_psql(&shop.fixture, &folder.join("journal.sql"));
    shop.fixture
        .db
        .run(&format!("DROP SCHEMA walpost; DROP ROLE \"{name}\""));
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(message.contains("?[2J?HINT"), "{message:?}");
    assert!(!message.contains('\u{1b}'), "{message:?}");
}

/// A superuser's session can reset its session authorization even after SET SESSION AUTHORIZATION,
/// and so can any code that the session runs.
fn code_owned_by_other_roles_cannot_reset_session_authorization(major: u32) {
    let mut shop = PlantedFixture::bare(Outbox::Table, major);
    shop.fixture
        .use_settings("tables = [\"tenant_*.outbox\"]\n");
    shop.init().finish().expect_code(0);
    let mallory = &shop.mallory;
    shop.fixture.db.run(&format!(
        "GRANT USAGE ON SCHEMA walpost TO {mallory}; GRANT EXECUTE ON FUNCTION walpost.add_outbox(regclass, name) TO {mallory};
         ALTER PUBLICATION {} OWNER TO {mallory};
         GRANT SELECT, INSERT, DELETE ON walpost.outbox_row TO {mallory};
         GRANT SELECT, INSERT, UPDATE ON walpost.table_state TO {mallory}",
        shop.fixture.slot()
    ));
    shop.attacker.run(
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
    let output = try_psql(&shop.fixture, &file);
    shop.expect_nothing_ran("add_outbox.sql");
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(message.contains("plot.reach(text)"), "{message}");
}

fn escapes_control_characters_in_names_of_child_tables(major: u32) {
    let shop = PlantedFixture::bare(Outbox::Table, major);
    shop.fixture.db.run(
        "CREATE TABLE public.outbox (id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload jsonb)",
    );
    shop.fixture
        .db
        .run("CREATE TABLE public.\"\u{1b}[2J\nHINT:  run this\" () INHERITS (public.outbox)");
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("sql");
    let output = try_psql(&shop.fixture, &folder.join("publication.sql"));
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(message.contains("?[2J?HINT"), "{message:?}");
    assert!(!message.contains('\u{1b}'), "{message:?}");
}

fn escapes_control_characters_in_notices_about_updates(major: u32) {
    let shop = PlantedFixture::bare(Outbox::Table, major);
    shop.fixture.db.run(
        "CREATE TABLE public.\"\u{1b}[2J\nHINT:  run this\" (id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload jsonb)",
    );
    let sql = Path::new(env!("CARGO_MANIFEST_DIR")).join("sql/no_update.sql");
    let file = reaper::folder("planted").join("control_characters.sql");
    let text = format!(
        "\\set table '\\033[2J\\nHINT:  run this'\n\\ir {}\n",
        sql.display()
    );
    fs::write(&file, text).unwrap();
    let output = try_psql(&shop.fixture, &file);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(message.contains("accepts UPDATE"), "{message:?}");
    assert_eq!(message.matches("?[2J?HINT").count(), 2, "{message:?}");
    assert!(!message.contains('\u{1b}'), "{message:?}");
}
