//! Runs the output of `walpost init --print` with psql as a superuser.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use super::PlantedFixture;
use super::files::{attack_command, psql_program};
use crate::init::try_psql;
use crate::support::event::Outbox;
use crate::support::postgres::MAJORS;
use crate::support::reaper;

impl PlantedFixture {
    /// Pipes the printed statements into psql, without a terminal and without options.
    fn pipe_into_psql(&self, printed: &str) -> Output {
        let file = save(printed);
        Command::new(psql_program())
            .args(["--no-psqlrc", "--dbname", &self.fixture.conninfo()])
            .stdin(File::open(file).unwrap())
            .output()
            .expect("psql runs")
    }

    fn print(&self) -> String {
        let printed = self.init().arg("--print").finish().expect_code(0);
        let mut paths = printed.stdout.split("search_path = ").skip(1).peekable();
        assert!(paths.peek().is_some());
        // If search_path does not list pg_temp, PostgreSQL searches pg_temp first.
        assert!(
            paths.all(|path| path.starts_with("pg_catalog, pg_temp")),
            "{}",
            printed.stdout
        );
        printed.stdout
    }
}

fn save(printed: &str) -> PathBuf {
    let file = reaper::folder("printed").join("printed.sql");
    fs::write(&file, printed).unwrap();
    file
}

/// An error ends the script, so that no later statement uses an object that the script has
/// rejected.
#[test]
fn printed_statements_stop_at_the_first_error() {
    for major in MAJORS {
        let shop = PlantedFixture::bare(Outbox::Table, major);
        let (name, slot) = (&shop.fixture.name, shop.fixture.slot());
        shop.attacker.run(&format!(
            "CREATE SCHEMA walpost; GRANT USAGE ON SCHEMA walpost TO PUBLIC;
             CREATE VIEW walpost.journal AS SELECT CASE WHEN plot.note('journal') THEN '{name}' END AS pipeline,
                 '{slot}'::text AS slot, 'snapshot'::text AS action;
             GRANT SELECT ON walpost.journal TO PUBLIC"
        ));
        let output = shop.pipe_into_psql(&shop.print());
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        shop.expect_nothing_ran("init --print");
        let owner = format!("schema walpost belongs to role {}", shop.mallory);
        assert!(
            !output.status.success() && text.contains(&owner),
            "PostgreSQL {major}: {text}"
        );
        let slots = format!("SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{slot}'");
        assert_eq!(shop.fixture.db.number(&slots), 0, "PostgreSQL {major}");
    }
}

/// The table stays locked until every statement that names it has run, so that no index can be
/// created on it in the meantime.
#[test]
fn printed_statements_do_not_evaluate_expressions_of_an_index_created_meanwhile() {
    for major in MAJORS {
        let shop = PlantedFixture::owned_by_attacker(major);
        let folder = reaper::folder("planted");
        let attack = attack_command(
            &shop,
            &folder,
            "CREATE INDEX i ON public.outbox (id) WHERE plot.note('index')",
        );
        let printed = shop.print();
        // The attacker acts after the table is inspected but before the DO block reads it.
        let marker = "\nSET walpost.pipeline = ";
        let (before, after) = printed.rsplit_once(marker).expect("the place");
        let output = shop.pipe_into_psql(&format!("{before}\n{attack}{}{after}", &marker[1..]));
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        shop.expect_nothing_ran("init --print");
        assert!(output.status.success(), "PostgreSQL {major}: {text}");
        let index = shop.fixture.db.value("SELECT to_regclass('public.i')");
        assert_eq!(index, None, "PostgreSQL {major}: the table was not locked");
    }
}

/// The owner of a table that matches the pattern chooses its name, so control characters in the
/// name must not reach the terminal. A line feed in the name must not end a comment or a statement.
#[test]
fn printed_statements_contain_no_control_characters_from_names() {
    let mut shop = PlantedFixture::bare(Outbox::Table, MAJORS[0]);
    shop.fixture
        .use_settings("tables = [\"tenant_*.outbox\"]\n");
    shop.init().finish().expect_code(0);
    let schema = "tenant_\u{1b}]0;x\u{7}\nSELECT plot.note(current_user);--'\\\u{9b}";
    shop.attacker.run(&format!(
        "CREATE SCHEMA \"{schema}\"; CREATE TABLE \"{schema}\".outbox (id uuid PRIMARY KEY, aggregatetype text,
             aggregateid text, type text, payload jsonb)"
    ));
    let printed = shop.print();
    assert!(printed.contains("plot.note"), "{printed}");
    let is_control = |c: char| c.is_control() && c != '\n';
    assert!(!printed.contains(is_control), "{printed:?}");
    for line in printed.lines() {
        assert!(!line.starts_with("SELECT plot"), "{line}");
    }
    let output = shop.pipe_into_psql(&printed);
    shop.expect_nothing_ran("init --print");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{text}");
    let published = format!(
        "SELECT count(*) FROM pg_publication_tables WHERE pubname = '{}' AND tablename = 'outbox'",
        shop.fixture.slot()
    );
    assert_eq!(shop.fixture.db.number(&published), 1);
    shop.init().finish().expect_code(0);
    shop.expect_nothing_ran("init");
}

/// When not attached to a terminal, psql uses the encoding that the database owner has set. In
/// SJIS, the second byte of a UTF-8 Á and the backslash after it form a single character, so this
/// backslash no longer escapes the next backslash.
#[test]
fn names_in_printed_statements_are_quoted_safely_in_any_encoding() {
    for major in MAJORS {
        let mut shop = PlantedFixture::bare(Outbox::Table, major);
        shop.fixture
            .use_settings("tables = [\"tenant_*.outbox\"]\n");
        shop.init().finish().expect_code(0);
        let (fixture, mallory) = (&shop.fixture, &shop.mallory);
        let name = &fixture.name;
        let schema = "tenant_Á\\';COMMIT;SELECT plot.note(current_user);--";
        shop.attacker.run(&format!(
            "CREATE SCHEMA \"{schema}\"; CREATE TABLE \"{schema}\".outbox (id uuid PRIMARY KEY, aggregatetype text,
                 aggregateid text, type text, payload jsonb)"
        ));
        fixture
            .db
            .run(&format!("ALTER DATABASE {name} OWNER TO {mallory}"));
        for setting in [
            "client_encoding = 'SJIS'",
            "backslash_quote = 'on'",
            "standard_conforming_strings = off",
        ] {
            shop.attacker
                .run(&format!("ALTER DATABASE {name} SET {setting}"));
        }
        let published = format!(
            "SELECT count(*) FROM pg_publication_tables WHERE pubname = '{}' AND tablename = 'outbox'",
            fixture.slot()
        );
        let printed = shop.print();
        assert!(printed.contains("SELECT plot.note"), "{printed}");
        // The script must apply its settings in every database that it connects to.
        for several in [false, true] {
            let printed = match several {
                true => format!("\\connect -reuse-previous=on \"dbname='{name}'\"\n{printed}"),
                false => printed.clone(),
            };
            let output = shop.pipe_into_psql(&printed);
            shop.expect_nothing_ran("init --print");
            let text = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success(), "PostgreSQL {major}: {text}");
            assert_eq!(fixture.db.number(&published), 1, "PostgreSQL {major}");
        }
        // `init` must not run planted code when it executes the statements itself.
        shop.init().finish().expect_code(0);
        shop.expect_nothing_ran("init");
        let words = ["--table", &format!("\"{schema}\".outbox")].map(str::to_owned);
        let printed = shop.init().args(words).arg("--print").finish();
        let output = shop.pipe_into_psql(&printed.expect_code(0).stdout);
        shop.expect_nothing_ran("init --table --print");
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "PostgreSQL {major}: {text}");
        // The SQL files must not run planted code when they receive the schema name in a psql
        // variable.
        let sql = Path::new(env!("CARGO_MANIFEST_DIR")).join("sql/add_outbox.sql");
        let set = reaper::folder("planted").join("set.sql");
        let quoted = schema.replace('\\', "\\\\").replace('\'', "\\'");
        fs::write(
            &set,
            format!("\\set schema '{quoted}'\n\\i {}\n", sql.display()),
        )
        .unwrap();
        let output = try_psql(fixture, &set);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "PostgreSQL {major}: {text}");
        shop.expect_nothing_ran("add_outbox.sql");
    }
}
