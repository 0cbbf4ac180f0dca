//! Functions, operators and a publication planted by another role.

use std::fs;
use std::path::Path;

use super::PlantedFixture;
use crate::init::try_psql;
use crate::support::event::Outbox;
use crate::support::fixture::Fixture;
use crate::support::walpost::Invocation;

/// Returns the functions in pg_catalog whose names occur in sql/ and src/.
fn names_in_our_statements(fixture: &Fixture) -> Vec<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut text = String::new();
    let mut folders = vec![root.join("sql"), root.join("src")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => folders.push(path),
                false => text.push_str(&fs::read_to_string(path).unwrap()),
            }
        }
    }
    let known = fixture.db.rows(
        "SELECT DISTINCT proname FROM pg_proc WHERE pronamespace = 'pg_catalog'::regnamespace AND prokind = 'f'
         AND pronargs > 0 AND proname !~ '(in|out|recv|send)$' ORDER BY 1",
    );
    let known = known.into_iter().flatten().flatten();
    // Finds function calls without a schema name, which the server would resolve through
    // search_path.
    let called = |name: &String| {
        let call = format!("{name}(");
        text.match_indices(&call).any(|(at, _)| {
            let before = text[..at].chars().next_back();
            before.is_none_or(|c| !(c.is_alphanumeric() || c == '_' || c == '.'))
        })
    };
    let names: Vec<_> = known.filter(called).collect();
    for expected in [
        "format",
        "current_setting",
        "substring",
        "to_char",
        "pg_has_role",
    ] {
        assert!(
            names.iter().any(|name| name == expected),
            "{expected}: {names:?}"
        );
    }
    names
}

on_each_version! {
    never_calls_function_overloads_owned_by_another_role
    rejects_functions_and_publications_owned_by_another_role
    checks_the_inspection_function_before_calling_it
}

/// Creates overloads of every function and operator in pg_catalog whose name appears in Walpost's
/// statements, for all combinations of argument types that Walpost uses. This includes every
/// overload that the server could prefer to the function or operator in pg_catalog.
fn plant_overloads(shop: &PlantedFixture) {
    let names = names_in_our_statements(&shop.fixture);
    shop.attacker.run(&format!(
            "SET search_path = pg_catalog;
             DO $plant$ DECLARE
                 types text[] := '{{text,name,varchar,integer,bigint,numeric,oid,boolean,timestamptz,date,pg_lsn,regclass}}';
                 body text := 'LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN PERFORM plot.note(%L); RETURN NULL; END $$';
                 a text; b text; f text; result text;
             BEGIN
                 FOREACH f IN ARRAY '{{{}}}'::text[] LOOP
                     result := CASE WHEN f ~ '^(has_|pg_has_|isfinite|pg_is)' THEN 'boolean' ELSE 'text' END;
                     FOREACH a IN ARRAY types LOOP
                         EXECUTE format('CREATE FUNCTION public.%I(%s) RETURNS %s ' || body, f, a, result, f);
                         FOREACH b IN ARRAY types LOOP
                             EXECUTE format('CREATE FUNCTION public.%I(%s, %s) RETURNS %s ' || body, f, a, b, result, f);
                         END LOOP;
                     END LOOP;
                     EXECUTE format('CREATE FUNCTION public.%I(text, text, text) RETURNS %s ' || body, f, result, f);
                     EXECUTE format('CREATE FUNCTION public.%I(text, name, name) RETURNS %s ' || body, f, result, f);
                     EXECUTE format('CREATE FUNCTION public.%I(text, text, boolean) RETURNS %s ' || body, f, result, f);
                     EXECUTE format('CREATE FUNCTION public.%I(text, text, text, text) RETURNS %s ' || body, f, result, f);
                     EXECUTE format('CREATE FUNCTION public.%I(text, text, text, text, text) RETURNS %s ' || body, f, result, f);
                 END LOOP;
                 FOREACH f IN ARRAY '{{=,<>,<,>,<=,>=,||,+,-,*,/,%,~,->>,->,@>,&&,&,<<,|}}'::text[] LOOP
                     result := CASE WHEN f IN ('=', '<>', '<', '>', '<=', '>=', '~', '@>', '&&') THEN 'boolean' ELSE NULL END;
                     FOREACH a IN ARRAY types LOOP FOREACH b IN ARRAY types LOOP
                         EXECUTE format('CREATE FUNCTION plot.%I(%s, %s) RETURNS %s ' || body, 'op' || f, a, b,
                             coalesce(result, a), 'operator ' || f);
                         EXECUTE format('CREATE OPERATOR public.%s (FUNCTION = plot.%I, LEFTARG = %s, RIGHTARG = %s)', f,
                             'op' || f, a, b);
                     END LOOP; END LOOP;
                 END LOOP;
             END $plant$",
            names.join(",")
        ));
}

fn never_calls_function_overloads_owned_by_another_role(major: u32) {
    let shop = PlantedFixture::bare(Outbox::Table, major);
    let fixture = &shop.fixture;
    plant_overloads(&shop);
    shop.init().finish().expect_code(0);
    shop.expect_nothing_ran("init");
    let owner = format!("--owner={}", shop.walpost);
    for (number, arguments) in [
        ["--partitioned", "--table=public.parts"],
        ["--no-role", "--outbox=messages"],
        [&owner, "--table=public.owned"],
        [&owner, "--table=public.owned"],
    ]
    .iter()
    .enumerate()
    {
        let name = format!("{}_{number}", fixture.name);
        let init = Invocation::new([
            "init",
            "--postgres",
            &fixture.conninfo(),
            "--pipeline=other",
        ])
        .args(arguments)
        .args(["--role", &shop.walpost, "--writer", &shop.mallory])
        .args(["--publication", &name, "--slot", &name]);
        init.finish().expect_code(0);
        shop.expect_nothing_ran(arguments[1]);
    }
    shop.command(&["check"]).finish().expect_code(0);
    shop.expect_nothing_ran("check");
    let aggregate = fixture.aggregate(1);
    let mut walpost = shop
        .command(&["run", "--http=127.0.0.1:0"])
        .start_streaming();
    let id = "INSERT INTO public.outbox (aggregatetype, aggregateid, type) VALUES";
    // The application's search_path includes public, whereas Walpost's does not.
    fixture
        .server
        .session(&fixture.name)
        .run(&format!("{id} ('{aggregate}', 'k', 't')"));
    shop.expect_nothing_ran("INSERT");
    fixture.wait_for_records(1);
    fixture.wait_until_confirmed();
    let http = walpost.http();
    crate::support::wait::wait_until("the slot to be queried", || {
        http.get("/metrics")
            .body
            .contains("walpost_slot_retained_bytes{")
    });
    shop.expect_nothing_ran("run");
    walpost.terminate().expect_code(0);
    for words in [
        &["status"][..],
        &["verify"],
        &[
            "replay",
            "--yes",
            "--from=2025-01-01",
            "--aggregate=a/b",
            "--id=0198c1a2-7b3e-7000-8000-000000000000",
        ],
        &["skip", "--dry-run", "--to=0/1"],
        &["maintain", "--dry-run", "--retention=24h", "--delete-rows"],
    ] {
        let finished = shop.command(words).finish();
        assert!(
            matches!(finished.code, Some(0 | 2 | 3)),
            "{words:?}: {finished:?}"
        );
        assert!(
            !finished.stderr.contains("does not exist"),
            "{words:?}: {finished:?}"
        );
        shop.expect_nothing_ran(words[0]);
    }
    let checkpoint = |word| {
        fixture
            .with_conninfo(&fixture.conninfo_as(&shop.walpost))
            .checkpoint(word)
    };
    checkpoint("adopt").arg("--yes").finish().expect_code(0);
    checkpoint("show").finish().expect_code(0);
    shop.expect_nothing_ran("checkpoint");
    let files = fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("sql")).unwrap();
    let mut files: Vec<_> = files.map(|file| file.unwrap().path()).collect();
    // Run add_outbox.sql last, because it requires objects that the other files create.
    files.sort_by_key(|file| file.ends_with("add_outbox.sql"));
    for file in files {
        if file.ends_with("teardown.sql") {
            continue;
        }
        let output = try_psql(fixture, &file);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        // Some files fail here for legitimate reasons: they expect a partitioned table, or a
        // publication for another kind of outbox.
        assert!(
            output.status.success()
                || text.contains("not partitioned")
                || text.contains("does not contain table walpost.outbox_row"),
            "{}: {text}",
            file.display()
        );
        shop.expect_nothing_ran(&file.display().to_string());
    }
}

fn rejects_functions_and_publications_owned_by_another_role(major: u32) {
    let shop = PlantedFixture::bare(Outbox::Table, major);
    let publication = shop.fixture.slot();
    for (plant, drop, expected) in [
        (
            "CREATE FUNCTION public.walpost_uuidv7() RETURNS uuid LANGUAGE sql AS $$ SELECT gen_random_uuid() FROM plot.note('id') $$".to_owned(),
            "DROP FUNCTION public.walpost_uuidv7()".to_owned(),
            "function public.walpost_uuidv7() belongs to",
        ),
        (
            "CREATE FUNCTION public.walpost_no_update() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NEW; END $$".to_owned(),
            "DROP FUNCTION public.walpost_no_update()".to_owned(),
            "function public.walpost_no_update() belongs to",
        ),
        (
            format!("CREATE PUBLICATION {publication}"),
            format!("DROP PUBLICATION {publication}"),
            "belongs to",
        ),
    ] {
        // Since PostgreSQL 18, the built-in function uuidv7() is used instead.
        if major >= 18 && expected.contains("uuidv7") {
            continue;
        }
        shop.attacker.run(&plant);
        let init = shop.init().finish().expect_code(3);
        init.expect_mentions(&[expected, &shop.mallory]);
        shop.attacker.run(&drop);
    }
    shop.attacker.run(
        "CREATE SCHEMA walpost; GRANT USAGE ON SCHEMA walpost TO PUBLIC;
         CREATE FUNCTION walpost.publish(text) RETURNS text LANGUAGE sql AS 'SELECT $1'",
    );
    let init = shop.init().arg("--outbox=messages").finish().expect_code(3);
    init.expect_mentions(&["schema walpost belongs to", &shop.mallory]);
    shop.fixture
        .db
        .run("ALTER SCHEMA walpost OWNER TO postgres");
    let init = shop.init().arg("--outbox=messages").finish().expect_code(3);
    init.expect_mentions(&["function walpost.publish(text) belongs to", &shop.mallory]);
    shop.attacker.run("DROP FUNCTION walpost.publish(text)");
    // A role with the CREATE privilege on the schema walpost could create a function in it later.
    let (db, mallory) = (&shop.fixture.db, &shop.mallory);
    db.run(&format!("GRANT CREATE ON SCHEMA walpost TO {mallory}"));
    let init = shop.init().finish().expect_code(3);
    init.expect_mentions(&[
        "privilege to create objects in schema walpost",
        &format!("REVOKE CREATE ON SCHEMA walpost FROM {mallory}"),
    ]);
    db.run(&format!("REVOKE CREATE ON SCHEMA walpost FROM {mallory}"));
    shop.init().finish().expect_code(0);
    shop.command(&["check"]).finish().expect_code(0);
}

#[test]
fn init_replaces_old_walpost_functions_that_call_untrusted_functions() {
    let shop = PlantedFixture::bare(Outbox::Table, 14);
    // Imitate functions created by an old version of Walpost, which did not set search_path.
    shop.attacker.run(
        "CREATE FUNCTION public.int8send(numeric) RETURNS bytea LANGUAGE plpgsql AS $$ BEGIN
             PERFORM plot.note('int8send'); RETURN '\\x0198c1a27b3e7000'; END $$",
    );
    let db = shop.fixture.server.session(&shop.fixture.name);
    db.run(
        "CREATE FUNCTION public.walpost_uuidv7() RETURNS uuid LANGUAGE sql
         RETURN encode(int8send(1.5) || substring(uuid_send(gen_random_uuid()) FROM 9), 'hex')::uuid",
    );
    db.run("SELECT public.walpost_uuidv7()");
    assert_eq!(shop.planted_code_runs().len(), 1);
    shop.init().finish().expect_code(0);
    db.run("INSERT INTO public.outbox (aggregatetype, aggregateid, type) VALUES ('a', 'k', 't')");
    assert_eq!(shop.planted_code_runs().len(), 1);
}

/// With ALTER DATABASE ... SET role, the database owner can make psql start as a different role. If
/// Walpost treated the current role as trusted, it would also accept that role's objects.
#[test]
fn sql_files_refuse_to_run_if_the_database_sets_a_different_role() {
    for major in [14, 18] {
        let shop = PlantedFixture::bare(Outbox::Table, major);
        let (fixture, mallory) = (&shop.fixture, &shop.mallory);
        shop.attacker.run(
            "CREATE SCHEMA walpost;
             CREATE FUNCTION walpost.lock_and_examine(text, text, text) RETURNS text LANGUAGE plpgsql AS $$ BEGIN
                 PERFORM set_config('role', 'postgres', true); PERFORM plot.note('role'); RETURN ''; END $$",
        );
        fixture.db.run(&format!(
            "ALTER DATABASE {} SET role = {mallory}",
            fixture.name
        ));
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("sql");
        for file in ["guard.sql", "outbox_partitioned.sql", "journal.sql"] {
            let output = try_psql(fixture, &folder.join(file));
            let text = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(text.contains(&format!("role {mallory}")), "{file}: {text}");
            shop.expect_nothing_ran(file);
        }
    }
}

/// Covers every kind of statement for which Walpost inspects a table.
fn checks_the_inspection_function_before_calling_it(major: u32) {
    for layout in [&[][..], &["--partitioned"]] {
        let shop = PlantedFixture::bare(Outbox::Table, major);
        shop.init().args(layout).finish().expect_code(0);
        let (db, mallory) = (&shop.fixture.db, &shop.mallory);
        db.run(&format!(
            "GRANT USAGE, CREATE ON SCHEMA walpost TO {mallory};
             ALTER FUNCTION walpost.lock_and_examine(text, text, text) OWNER TO {mallory}"
        ));
        shop.attacker.run(
            "CREATE OR REPLACE FUNCTION walpost.lock_and_examine(schema_name text, table_name text, statement text)
                 RETURNS text LANGUAGE plpgsql AS $$ BEGIN PERFORM plot.note('examination'); RETURN ''; END $$",
        );
        db.run(&format!("REVOKE CREATE ON SCHEMA walpost FROM {mallory}"));
        for role in [&*shop.walpost, "postgres"] {
            for words in [
                &["verify"][..],
                &["replay", "--all", "--yes"],
                &["replay", "--yes", "--aggregate", "order"],
                &["maintain", "--retention=24h", "--delete-rows"],
            ] {
                let refused = shop.command_as(role, words).finish();
                assert_ne!(refused.code, Some(0), "{role} {words:?}: {refused:?}");
                shop.expect_nothing_ran(words[0]);
            }
        }
    }
}

/// Since PostgreSQL 18, Walpost uses the built-in function uuidv7() instead of its own.
#[test]
fn ignores_an_untrusted_function_that_walpost_does_not_use_on_this_server_version() {
    let shop = PlantedFixture::bare(Outbox::Table, 18);
    shop.attacker.run(
        "CREATE FUNCTION public.walpost_uuidv7() RETURNS uuid LANGUAGE plpgsql AS
             'BEGIN PERFORM plot.note(''uuidv7''); RETURN pg_catalog.gen_random_uuid(); END'",
    );
    shop.init().finish().expect_code(0);
    shop.fixture.insert(&shop.fixture.aggregate(1), "k");
    shop.expect_nothing_ran("init");
}
