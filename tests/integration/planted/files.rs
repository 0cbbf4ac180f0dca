//! Attacks on the files in sql/ while psql runs them. psql commits each statement separately unless
//! the file starts a transaction.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use super::PlantedFixture;
use crate::init::try_psql;
use crate::support::event::Outbox;
use crate::support::postgres::{MAJOR, MAJORS, debian_binaries};
use crate::support::reaper;
use crate::support::wait::wait_until;
use crate::support::walpost::Invocation;

impl PlantedFixture {
    /// Runs a file with psql. As soon as psql has executed the line `place` of the file `attacked`,
    /// the attacker commits `attack`.
    fn psql_with_attack(&self, file: &str, attacked: &str, place: &str, attack: &str) -> Output {
        let sql = Path::new(env!("CARGO_MANIFEST_DIR")).join("sql");
        let folder = reaper::folder("planted");
        for entry in fs::read_dir(sql).unwrap() {
            let path = entry.unwrap().path();
            fs::copy(&path, folder.join(path.file_name().unwrap())).unwrap();
        }
        let command = attack_command(self, &folder, attack);
        let path = folder.join(attacked);
        let text = fs::read_to_string(&path).unwrap();
        let (before, after) = text.split_once(place).expect("the place");
        fs::write(&path, format!("{before}{place}{command}{after}")).unwrap();
        try_psql(&self.fixture, &folder.join(file))
    }

    fn expect_psql_refused(&self, output: &Output, what: &str) {
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        let (major, owner) = (
            self.fixture.server.major,
            format!("belongs to role {}", self.mallory),
        );
        assert!(
            !output.status.success() && text.contains(&owner),
            "PostgreSQL {major}, {what}: {text}"
        );
        self.expect_nothing_ran(what);
    }
}

/// Returns the path of the psql that a Debian package installed. If there is none, returns the name
/// `psql`, which the system looks up in PATH.
pub(super) fn psql_program() -> PathBuf {
    let installed = debian_binaries(MAJOR).join("psql");
    match installed.exists() {
        true => installed,
        false => PathBuf::from("psql"),
    }
}

/// Returns a psql meta-command that commits `attack` as the attacker, without waiting for locks
/// held by the transaction under attack.
pub(super) fn attack_command(shop: &PlantedFixture, folder: &Path, attack: &str) -> String {
    let theirs = folder.join("attack.sql");
    fs::write(&theirs, attack).unwrap();
    let conninfo = shop
        .fixture
        .server
        .conninfo_as(&shop.mallory, &shop.fixture.name);
    format!(
        "\\! PGOPTIONS='-c lock_timeout=1s' {} -q -X -d '{conninfo}' -f {} 2>/dev/null\n",
        psql_program().display(),
        theirs.display()
    )
}

const INSPECTION_LINE: &str = "\\ir examine.sql\n";

#[test]
fn rejects_a_function_created_after_the_security_check() {
    let uuidv7 = "CREATE FUNCTION public.walpost_uuidv7() RETURNS uuid LANGUAGE plpgsql AS 'BEGIN RETURN pg_catalog.gen_random_uuid(); END'";
    let no_update = "CREATE FUNCTION public.walpost_no_update() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'";
    for major in MAJORS {
        for (attacked, attack) in [("uuidv7.sql", uuidv7), ("no_update.sql", no_update)] {
            // In PostgreSQL 18, the default of the column `id` calls a built-in function.
            if major >= 18 && attacked == "uuidv7.sql" {
                continue;
            }
            let shop = PlantedFixture::bare(Outbox::Table, major);
            let output = shop.psql_with_attack("outbox.sql", attacked, INSPECTION_LINE, attack);
            shop.expect_psql_refused(&output, attacked);
            let table = shop.fixture.db.value("SELECT to_regclass('public.outbox')");
            assert_eq!(table, None, "PostgreSQL {major}, {attacked}");
        }
    }
}

/// A function of another role that ran earlier in the administrator's session could have prepared
/// statements under the names that `examine.sql` uses for its own prepared statements.
#[test]
fn security_check_does_not_use_statements_prepared_earlier_in_the_session() {
    let shop = PlantedFixture::bare(Outbox::Table, MAJOR);
    shop.attacker.run(
        "CREATE FUNCTION public.walpost_uuidv7() RETURNS uuid LANGUAGE plpgsql AS 'BEGIN RETURN pg_catalog.gen_random_uuid(); END'",
    );
    let outbox = Path::new(env!("CARGO_MANIFEST_DIR")).join("sql/outbox.sql");
    let file = reaper::folder("planted").join("prepared.sql");
    let text = format!(
        "\\set ON_ERROR_STOP on
         PREPARE walpost_trusted_roles (text) AS SELECT ARRAY(SELECT oid FROM pg_catalog.pg_roles);
         PREPARE walpost_objects (text[], text, text, name[]) AS SELECT ''::text AS object, 0::oid AS owner, \
         false AS serves_outbox, ''::text AS hint, NULL::name AS name, 0::oid AS outbox_owner WHERE false;
         PREPARE walpost_additions (name[]) AS SELECT NULL::name, NULL::text WHERE false;
         SET walpost.keep_prepared = 'on';
\\i {}
",
        outbox.display()
    );
    fs::write(&file, &text).unwrap();
    let output = try_psql(&shop.fixture, &file);
    shop.expect_psql_refused(&output, "prepared statements");
    // In Walpost's own connections, `examine.sql` keeps existing prepared statements if their text
    // matches.
    let examine = Path::new(env!("CARGO_MANIFEST_DIR")).join("sql/examine.sql");
    let (before, _) = text.split_once("\\i ").expect("a command");
    let text = format!(
        "{before}\\set examine 'owners'\n\\set keep_prepared on\n\\i {}\n",
        examine.display()
    );
    fs::write(&file, text).unwrap();
    let output = try_psql(&shop.fixture, &file);
    shop.expect_psql_refused(&output, "prepared statements that are kept");
}

/// Defaults and triggers reference functions by OID, so a renamed function is still called but
/// can't be found by name.
#[test]
fn detects_a_renamed_function_used_as_a_column_default() {
    let shop = PlantedFixture::new(Outbox::Table, 17);
    shop.attacker.run(
        "CREATE FUNCTION public.hidden() RETURNS uuid LANGUAGE sql AS 'SELECT pg_catalog.gen_random_uuid()';
         CREATE FUNCTION public.shown() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'",
    );
    let db = &shop.fixture.db;
    db.run("ALTER TABLE public.outbox ALTER id SET DEFAULT public.hidden()");
    let default =
        ["function public.hidden(), which the default of public.outbox.id calls, belongs to"];
    shop.init()
        .finish()
        .expect_code(3)
        .expect_mentions(&default);
    let check = shop.command(&["check"]).finish();
    check.expect_mentions(&default);
    db.run(
        "ALTER TABLE public.outbox ALTER id SET DEFAULT gen_random_uuid();
         DROP TRIGGER walpost_no_update ON public.outbox;
         CREATE TRIGGER walpost_no_update BEFORE UPDATE ON public.outbox FOR EACH ROW EXECUTE FUNCTION public.shown()",
    );
    let init = shop.init().finish().expect_code(3);
    init.expect_mentions(&["function public.shown(), which trigger walpost_no_update on public.outbox calls, belongs to"]);
    // Walpost accepts the trigger function if it belongs to the role that owns the outbox.
    db.run(&format!(
        "ALTER TABLE public.outbox OWNER TO {}",
        shop.mallory
    ));
    shop.init().finish().expect_code(0);
}

#[test]
fn rejects_a_schema_created_after_the_security_check() {
    let attack = "CREATE SCHEMA walpost; GRANT USAGE ON SCHEMA walpost TO PUBLIC;
        CREATE FUNCTION walpost.add_outbox(regclass, name) RETURNS int8 LANGUAGE plpgsql AS $$ BEGIN
            PERFORM plot.note('add_outbox'); RETURN NULL; END $$;
        CREATE FUNCTION walpost.lock_and_examine(text, text, text) RETURNS text LANGUAGE plpgsql AS $$ BEGIN
            PERFORM plot.note('examination'); RETURN ''; END $$;
        CREATE TABLE walpost.slot_state (slot text);
        CREATE TRIGGER t AFTER DELETE ON walpost.slot_state FOR EACH STATEMENT EXECUTE FUNCTION plot.row();
        GRANT SELECT, DELETE ON walpost.slot_state TO PUBLIC";
    for major in [14, 17] {
        for file in ["guard.sql", "publish.sql", "journal.sql"] {
            let shop = PlantedFixture::bare(Outbox::Table, major);
            let output = shop.psql_with_attack(file, file, INSPECTION_LINE, attack);
            shop.expect_psql_refused(&output, file);
            let made = "SELECT count(*) FROM pg_proc WHERE pronamespace = 'walpost'::regnamespace AND proname = 'publish'";
            assert_eq!(shop.fixture.db.number(made), 0, "{file}");
        }
        for (file, attacked, expected) in [
            (
                "add_outbox.sql",
                "add_outbox.sql",
                Some("function walpost.add_outbox does not exist"),
            ),
            (
                "outbox_partitioned.sql",
                "uuidv7.sql",
                Some("schema walpost belongs to role"),
            ),
            ("teardown.sql", "teardown.sql", None),
        ] {
            let shop = PlantedFixture::bare(Outbox::Table, major);
            if file == "add_outbox.sql" {
                shop.fixture.db.run("CREATE TABLE public.outbox ()");
            }
            let output = shop.psql_with_attack(file, attacked, INSPECTION_LINE, attack);
            shop.expect_nothing_ran(file);
            let text = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(
                output.status.success(),
                expected.is_none(),
                "{file}: {text}"
            );
            assert!(text.contains(expected.unwrap_or("")), "{file}: {text}");
        }
    }
}

/// When teardown.sql examines walpost.slot_state for the first time, it does not find a trigger
/// that another transaction has added but not yet committed. The trigger would fire once that
/// transaction has committed and released its lock.
#[test]
fn teardown_sql_does_not_fire_a_trigger_created_by_a_concurrent_transaction() {
    for major in [14, 18] {
        let shop = PlantedFixture::new(Outbox::Table, major);
        let (db, mallory) = (&shop.fixture.db, &shop.mallory);
        db.run(&format!(
            "GRANT USAGE ON SCHEMA walpost TO {mallory}; GRANT REFERENCES (slot) ON walpost.slot_state TO {mallory}"
        ));
        let teardown = Path::new(env!("CARGO_MANIFEST_DIR")).join("sql/teardown.sql");
        let output = try_psql(&shop.fixture, &teardown);
        shop.expect_psql_refused(&output, "a column privilege");
        shop.attacker.run(
            "CREATE TABLE plot.child (slot text);
             BEGIN; ALTER TABLE plot.child ADD FOREIGN KEY (slot) REFERENCES walpost.slot_state (slot) ON DELETE CASCADE",
        );
        db.run(&format!(
            "REVOKE REFERENCES (slot) ON walpost.slot_state FROM {mallory}"
        ));
        let output = std::thread::scope(|scope| {
            let psql = scope.spawn(|| try_psql(&shop.fixture, &teardown));
            let waits = "SELECT EXISTS (SELECT FROM pg_locks WHERE relation = 'walpost.slot_state'::regclass AND NOT granted)";
            wait_until("psql to wait for the lock", || db.is_true(waits));
            shop.attacker.run("COMMIT");
            psql.join().expect("an output")
        });
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(text.contains("RI_ConstraintTrigger"), "{text}");
        assert_eq!(db.number("SELECT count(*) FROM walpost.slot_state"), 1);
    }
}

/// psql does not escape the messages it prints, so the terminal would interpret control characters
/// in them.
#[test]
fn messages_escape_control_characters_in_names() {
    let name = "\u{1b}]0;owned\u{7}\u{202e}x";
    for major in [14, 18] {
        let shop = PlantedFixture::owned_by_attacker(major);
        shop.attacker.run(&format!(
            "CREATE FUNCTION plot.\"{name}\"(text) RETURNS text LANGUAGE sql IMMUTABLE AS 'SELECT $1';
             CREATE INDEX i ON public.outbox ((plot.\"{name}\"(type)))"
        ));
        let found = "SELECT walpost.lock_and_examine('public', 'outbox', 'SELECT')";
        let found = shop.fixture.db.value(found).expect("a text");
        assert!(found.contains("plot.\"?]0;owned??x\"(text)"), "{found:?}");
        shop.attacker.run("DROP INDEX public.i");
        shop.fixture.db.run(&format!(
            "CREATE TRIGGER \"{name}\" AFTER INSERT ON walpost.journal FOR EACH ROW EXECUTE FUNCTION plot.row()"
        ));
        let sql = Path::new(env!("CARGO_MANIFEST_DIR")).join("sql/journal.sql");
        let output = try_psql(&shop.fixture, &sql);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(text.contains("trigger \"?]0;owned??x\""), "{text:?}");
        assert!(!text.contains(['\u{1b}', '\u{7}', '\u{202e}']), "{text:?}");
    }
}

/// Another user could plant a symbolic link at the path of a man page, so that Walpost overwrites
/// the link's target.
#[test]
fn does_not_write_man_pages_to_a_directory_writable_by_other_users() {
    use std::os::unix::fs::PermissionsExt;
    let folder = reaper::folder("man");
    let set = |mode| fs::set_permissions(&folder, fs::Permissions::from_mode(mode)).unwrap();
    let write = || Invocation::new(["man"]).arg(&folder).finish();
    set(0o1777);
    write()
        .expect_code(1)
        .expect_mentions(&["other users can create files"]);
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
    set(0o755);
    write().expect_code(0);
    assert!(fs::read_dir(&folder).unwrap().count() > 0);
}

/// With a setting such as gin_fuzzy_search_limit, a scan of a GIN index returns only some of the
/// rows. The database owner must not be able to hide rows from a replay that way.
#[test]
fn database_settings_do_not_hide_rows_from_a_replay() {
    let shop = PlantedFixture::new(Outbox::Table, MAJOR);
    let (db, name) = (&shop.fixture.db, &shop.fixture.name);
    db.run(&format!(
        "INSERT INTO public.outbox (aggregatetype, aggregateid, type, payload)
             SELECT 'order', 'k', 't', '{{\"a\": 1}}' FROM generate_series(1, 5000);
         CREATE INDEX ON public.outbox USING gin (payload);
         ALTER DATABASE {name} SET gin_fuzzy_search_limit = 1; ALTER DATABASE {name} SET enable_seqscan = off"
    ));
    let condition = ["replay", "--dry-run", "--where", "payload @> '{\"a\": 1}'"];
    let replay = shop.command(&condition).finish().expect_code(0);
    replay.expect_mentions(&["5000 rows of table"]);
}

/// With ALTER DATABASE ... SET, the database owner can change settings for the DBA's sessions.
#[test]
fn database_settings_do_not_hide_warnings_or_change_the_result_of_a_check() {
    for major in MAJORS {
        let shop = PlantedFixture::bare(Outbox::Table, major);
        let (fixture, mallory, walpost) = (&shop.fixture, &shop.mallory, &shop.walpost);
        let name = &fixture.name;
        fixture
            .db
            .run(&format!("ALTER DATABASE {name} OWNER TO {mallory}"));
        for setting in [
            "client_min_messages = error",
            "quote_all_identifiers = on",
            "default_transaction_isolation = 'repeatable read'",
            "default_transaction_read_only = on",
            "standard_conforming_strings = off",
            "constraint_exclusion = on",
            "datestyle = 'SQL, DMY'",
        ] {
            let set = format!(
                "SET default_transaction_read_only = off; ALTER DATABASE {name} SET {setting}"
            );
            shop.attacker.run(&set);
        }
        shop.init().finish().expect_code(0);
        fixture.db.run(&format!("GRANT {walpost} TO {mallory}"));
        let init = shop.init().finish().expect_code(0);
        init.expect_mentions(&["WARN", &format!("REVOKE {walpost} FROM {mallory}")]);
        fixture.db.run(&format!("REVOKE {walpost} FROM {mallory}"));
        shop.command(&["check"]).finish().expect_code(0);
        let aggregate = fixture.aggregate(1);
        fixture.insert(&aggregate, "k");
        let running = shop.command(&["run"]).start_streaming();
        fixture.wait_for_records(1);
        running.terminate().expect_code(0);
        let sql = Path::new(env!("CARGO_MANIFEST_DIR")).join("sql");
        for file in [
            "guard.sql",
            "outbox.sql",
            "journal.sql",
            "publication.sql",
            "role.sql",
        ] {
            let output = try_psql(fixture, &sql.join(file));
            let text = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(
                output.status.success(),
                "PostgreSQL {major}, {file}: {text}"
            );
        }
    }
}

/// If an object does not exist when Walpost inspects the database, Walpost must not read it later,
/// because it was never inspected.
#[test]
fn does_not_read_a_slot_state_table_created_after_the_security_check() {
    for major in MAJORS {
        let shop = PlantedFixture::bare(Outbox::Table, major);
        let publication = shop.fixture.slot();
        shop.attacker.run(&format!(
            "CREATE TABLE public.outbox (id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload jsonb);
             CREATE PUBLICATION {publication} FOR TABLE public.outbox WITH (publish = 'insert')"
        ));
        let attack = format!(
            "CREATE SCHEMA walpost; GRANT USAGE ON SCHEMA walpost TO PUBLIC;
             CREATE TABLE walpost.outbox_row (id int); ALTER PUBLICATION {publication} ADD TABLE walpost.outbox_row;
             CREATE VIEW walpost.slot_state AS SELECT 'x'::text AS slot WHERE plot.note('slot_state');
             GRANT SELECT ON walpost.slot_state TO PUBLIC"
        );
        let output = shop.psql_with_attack("slot.sql", "slot.sql", INSPECTION_LINE, &attack);
        shop.expect_nothing_ran("slot.sql");
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            !output.status.success() && text.contains("does not exist: public.outbox"),
            "PostgreSQL {major}: {text}"
        );
    }
}

/// guard.sql does not refer to a particular table, so it must leave the psql variable `table`
/// unchanged for the files that follow it.
#[test]
fn sql_files_run_after_guard_sql_in_the_same_session_still_use_the_given_table() {
    let shop = PlantedFixture::bare(Outbox::Table, MAJOR);
    let sql = Path::new(env!("CARGO_MANIFEST_DIR")).join("sql");
    let all = reaper::folder("planted").join("all.sql");
    for table in ["outbox", "\"My 'own' table\""] {
        let name = table.trim_matches('"');
        let mut text = format!("\\set publication p{}\n", name.len());
        if table != "outbox" {
            text.push_str("\\set table 'My ''own'' table'\n");
        }
        for file in [
            "outbox.sql",
            "guard.sql",
            "tables.sql",
            "publish.sql",
            "publication.sql",
        ] {
            text.push_str(&format!("\\i {}\n", sql.join(file).display()));
            if file == "guard.sql" {
                text.push_str(&format!("\\i {}\n", sql.join("journal.sql").display()));
            }
        }
        fs::write(&all, text).unwrap();
        crate::init::psql(&shop.fixture, &all);
        let published = format!(
            "SELECT tablename FROM pg_publication_tables WHERE pubname = 'p{}'",
            name.len()
        );
        assert_eq!(shop.fixture.db.value(&published).as_deref(), Some(name));
    }
}
