//! Checks SQL statements that operators paste from messages, SQL files and documentation. The
//! statements must call PostgreSQL's own functions, regardless of `search_path`.
//!
//! A database owner can put another schema before `pg_catalog` in `search_path`. A role that can
//! create objects in that schema can then create a function that matches the arguments better than
//! PostgreSQL's own (CVE-2018-1058). The administrator who pastes a statement would then run this
//! function.

use std::fs;
use std::path::{Path, PathBuf};

/// Functions called by statements that administrators are asked to run.
const FUNCTIONS: &[&str] = &[
    "pg_drop_replication_slot",
    "pg_replication_slot_advance",
    "pg_reload_conf",
    "pg_terminate_backend",
];

fn files(at: &Path, extensions: &[&str], found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(at).expect("a folder").flatten() {
        let path = entry.path();
        if path.is_dir() {
            files(&path, extensions, found);
        } else if path
            .extension()
            .and_then(|it| it.to_str())
            .is_some_and(|extension| extensions.contains(&extension))
        {
            found.push(path);
        }
    }
}

/// Returns the numbers of the lines that call one of the functions without its schema name.
fn unqualified_calls(text: &str) -> Vec<usize> {
    let is_unqualified = |line: &str| {
        FUNCTIONS.iter().any(|function| {
            line.match_indices(&format!("{function}(")).any(|(at, _)| {
                let before = &line[..at];
                !before.ends_with("pg_catalog.")
                    && !before.ends_with(|c: char| c.is_ascii_alphanumeric() || c == '_')
            })
        })
    };
    let lines = (1..).zip(text.lines());
    lines
        .filter(|(_, line)| is_unqualified(line))
        .map(|(number, _)| number)
        .collect()
}

/// Returns the first line of each SQL block that uses an unqualified name from pg_catalog but does
/// not set search_path.
fn blocks_without_a_path(page: &str) -> Vec<String> {
    let blocks = page.split("```sql\n").skip(1);
    let blocks = blocks.filter_map(|rest| rest.split("```").next());
    blocks
        .filter(|block| {
            block
                .replace("pg_catalog.pg_", "")
                .replace("pg_catalog.", "")
                .contains(" pg_")
                && !block.contains("search_path = pg_catalog")
        })
        .filter_map(|block| block.lines().next().map(str::to_owned))
        .collect()
}

#[test]
fn functions_in_printed_statements_are_schema_qualified() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found = vec![root.join("README.md"), root.join("SECURITY.md")];
    for folder in ["src", "sql", "docs", "deploy"] {
        let extensions = ["rs", "sql", "md", "yaml", "yml", "sh", "txt", "tpl"];
        files(&root.join(folder), &extensions, &mut found);
    }
    let mut unqualified = Vec::new();
    for file in found {
        let text = fs::read_to_string(&file).expect("a text");
        let name = file
            .strip_prefix(root)
            .expect("a file here")
            .display()
            .to_string();
        unqualified.extend(
            unqualified_calls(&text)
                .iter()
                .map(|line| format!("{name}:{line}")),
        );
    }
    assert!(
        unqualified.is_empty(),
        "write pg_catalog. before these functions:\n{}",
        unqualified.join("\n")
    );
}

#[test]
fn documented_queries_set_search_path_before_reading_catalogs() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs");
    let mut found = Vec::new();
    files(&docs, &["md"], &mut found);
    for file in found {
        let page = fs::read_to_string(&file).expect("a page");
        let blocks = blocks_without_a_path(&page);
        assert!(
            blocks.is_empty(),
            "begin with `SET search_path = pg_catalog;` in {}: {blocks:#?}",
            file.display()
        );
    }
}

#[test]
fn detects_unqualified_calls_and_sql_blocks_that_do_not_set_search_path() {
    let text = "SELECT pg_reload_conf()\nSELECT pg_catalog.pg_reload_conf()\n`pg_terminate_backend(7)`\nmy_pg_reload_conf()\n";
    assert_eq!(unqualified_calls(text), [1, 3]);
    let block = "```sql\nSELECT slot_name FROM pg_replication_slots WHERE active;\n```\n";
    assert_eq!(blocks_without_a_path(block).len(), 1);
    let safe = block.replace("SELECT", "SET search_path = pg_catalog;\nSELECT");
    assert!(blocks_without_a_path(&safe).is_empty());
}

/// Returns the names of the functions that contain a literal whose meaning changes if the caller
/// has turned standard_conforming_strings off.
fn functions_that_depend_on_string_syntax(sql: &str) -> Vec<String> {
    let functions = sql.split("CREATE OR REPLACE FUNCTION ").skip(1);
    let functions = functions.filter_map(|rest| {
        let name = rest.split('(').next()?;
        let (head, rest) = rest.split_once("$walpost$")?;
        let body = rest.split("$walpost$").next()?;
        let lines = body
            .lines()
            .map(|line| line.split("--").next().unwrap_or(line));
        let is_dependent = lines.flat_map(backslashes_outside_escapes).next().is_some();
        let is_set = head.contains("SET standard_conforming_strings = on");
        (is_dependent && !is_set).then(|| name.to_owned())
    });
    functions.collect()
}

/// Returns the literals in a line that contain a backslash but have no E prefix.
fn backslashes_outside_escapes(line: &str) -> Vec<&str> {
    let parts: Vec<_> = line.split('\'').collect();
    let literals = (1..parts.len()).step_by(2);
    literals
        .filter(|at| parts[*at].contains('\\') && !parts[at - 1].ends_with('E'))
        .map(|at| parts[at])
        .collect()
}

#[test]
fn sql_functions_parse_their_literals_identically_in_every_session() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found = Vec::new();
    files(&root.join("sql"), &["sql"], &mut found);
    let found = found.iter().flat_map(|file| {
        functions_that_depend_on_string_syntax(&fs::read_to_string(file).expect("a text"))
    });
    let found: Vec<_> = found.collect();
    assert!(
        found.is_empty(),
        "{found:?} have a backslash in a literal: write E'\\\\' or add SET standard_conforming_strings = on"
    );
}

#[test]
fn detects_literals_that_depend_on_standard_conforming_strings() {
    let function = |head: &str, literal: &str| {
        format!(
            "CREATE OR REPLACE FUNCTION walpost.f() RETURNS text {head} AS $walpost$\nSELECT {literal} -- '\\'\n$walpost$;"
        )
    };
    let dependent = function("", r"'(\d+)'");
    assert_eq!(
        functions_that_depend_on_string_syntax(&dependent),
        ["walpost.f"]
    );
    for fine in [
        function("SET standard_conforming_strings = on", r"'(\d+)'"),
        function("", r"E'\\x01'"),
        function("", "'a' || 'b'"),
    ] {
        assert_eq!(
            functions_that_depend_on_string_syntax(&fine),
            [""; 0],
            "{fine}"
        );
    }
}

/// Returns the DDL statements in a file that affect the outbox table.
fn ddl_on_the_outbox(sql: &str) -> Vec<&str> {
    let ddl = [
        "'ALTER TABLE %s ",
        "'ALTER TABLE %I.%I ALTER",
        "PARTITION OF",
        "CREATE TRIGGER",
        "CREATE INDEX",
        "EXECUTE create_trigger",
    ];
    let is_run = |line: &&str| line.trim_start().starts_with("EXECUTE ");
    let statements = sql.lines().filter(is_run);
    statements
        .filter(|line| ddl.iter().any(|text| line.contains(text)))
        .collect()
}

#[test]
fn ddl_on_the_outbox_is_preceded_by_an_owner_check() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found = Vec::new();
    files(&root.join("sql"), &["sql"], &mut found);
    let mut checked = 0;
    for file in found {
        let sql = fs::read_to_string(&file).expect("a text");
        for line in ddl_on_the_outbox(&sql) {
            let before = &sql[..sql.find(line).expect("a line of it")];
            let is_guarded = ["relowner", "walpost.lock_and_examine("]
                .iter()
                .any(|text| before.contains(text));
            assert!(is_guarded, "{}: {line}", file.display());
            checked += 1;
        }
    }
    assert!(checked >= 5, "only {checked} statements were found");
}
