//! Checks that every page, heading, file, test and `./dev` subcommand that the documentation refers
//! to exists.

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use walpost::facade::Conninfo;

use super::markdown::{Page, documents, in_backticks, in_repository, manual, page};
use super::reference::sources;

/// Maximum number of lines in README.md.
const README_LINES: usize = 200;

/// Resolves a link from `page` to a path relative to the repository.
fn resolve(page: &Page, path: &str) -> PathBuf {
    let folder = Path::new(&page.path).parent().unwrap();
    let mut resolved = PathBuf::new();
    for part in folder.join(path).components() {
        match part {
            Component::ParentDir => assert!(resolved.pop(), "{}: {path}", page.path),
            part => resolved.push(part),
        }
    }
    resolved
}

fn has_anchor(path: &str, anchor: &str) -> bool {
    page(path).anchors().iter().any(|known| known == anchor)
}

#[test]
fn documentation_links_resolve() {
    let mut count = 0;
    for page in documents() {
        let anchors = page.anchors();
        let different: BTreeSet<_> = anchors.iter().collect();
        assert_eq!(different.len(), anchors.len(), "{}: {anchors:?}", page.path);
        for link in page.links().filter(|link| !link.starts_with("https://")) {
            let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = match path {
                "" => PathBuf::from(&page.path),
                path => resolve(page, path),
            };
            let is_there = in_repository(&target).exists();
            assert!(is_there, "{}: {link}", page.path);
            let target = target.to_str().unwrap();
            let leads = anchor.is_empty() || has_anchor(target, anchor);
            assert!(leads, "{}: {link}", page.path);
            count += 1;
        }
    }
    assert!(count > 100, "{count} links");
}

/// Checks that error messages, comments, manifests and scripts refer only to pages and headings
/// that exist. A reference has the form `docs/page.md` or `docs/page.md#heading`.
#[test]
fn documentation_pages_referenced_by_source_files_exist() {
    let text = sources(&["src", "sql", "deploy", "benches", "tests", "dev"]);
    let mut named = BTreeSet::new();
    for rest in text.split("docs/").skip(1) {
        let is_part = |c: char| c.is_ascii_alphanumeric() || "-_.#".contains(c);
        let name = rest.split(|c| !is_part(c)).next().unwrap();
        if let Some((name, anchor)) = name.split_once(".md") {
            let anchor = anchor.trim_end_matches('.').trim_start_matches('#');
            named.insert((format!("docs/{name}.md"), anchor.to_owned()));
        }
    }
    named.remove(&("docs/page.md".to_owned(), String::new()));
    named.remove(&("docs/page.md".to_owned(), "heading".to_owned()));
    assert!(named.len() > 20, "{named:?}");
    for (path, anchor) in named {
        assert!(in_repository(&path).exists(), "{path}");
        let leads = anchor.is_empty() || has_anchor(&path, &anchor);
        assert!(leads, "{path}#{anchor}");
    }
}

#[test]
fn readme_is_short_and_links_to_every_page() {
    let readme = page("README.md");
    let lines = readme.text.lines().count();
    assert!(lines <= README_LINES, "README.md has {lines} lines");
    let linked: BTreeSet<_> = readme
        .links()
        .map(|link| link.split('#').next().unwrap())
        .collect();
    for page in documents().iter().filter(|page| page.path != "README.md") {
        let path = page.path.as_str();
        assert!(linked.contains(path), "README.md has no link to {path}");
    }
}

#[test]
fn package_contains_files_linked_from_the_readme_and_no_tests() {
    let output = Command::new(env!("CARGO"))
        .args(["package", "--list", "--allow-dirty", "--offline"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    let listed = String::from_utf8(output.stdout).unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    let files: BTreeSet<_> = listed.lines().collect();
    for path in ["src/main.rs", "sql/outbox.sql", "Cargo.lock"] {
        assert!(files.contains(path), "{path} is not in {files:?}");
    }
    let links = page("README.md").links();
    for link in links.filter(|link| !link.starts_with("https://")) {
        let path = link.split('#').next().unwrap();
        assert!(files.contains(path), "{path} is not in {files:?}");
    }
    let of_tests = |file: &&&str| {
        ["tests/", "benches/", "fuzz/"]
            .iter()
            .any(|folder| file.starts_with(folder))
    };
    assert_eq!(files.iter().find(of_tests), None);
}

#[test]
fn each_documentation_page_begins_with_its_purpose_and_links_back_to_the_readme() {
    for page in documents()
        .iter()
        .filter(|page| page.path.starts_with("docs/"))
    {
        let mut parts = page.text.split("\n\n");
        let path = &page.path;
        let title = parts.next().unwrap();
        assert!(title.starts_with("# "), "{path}: {title}");
        let opening = parts.next().unwrap();
        let is_sentence = opening.starts_with(|c: char| c.is_ascii_uppercase())
            && opening.ends_with('.')
            && opening.len() < 500;
        assert!(is_sentence, "{path}: {opening}");
        let start: Vec<_> = page.text.lines().take(15).collect();
        let links_back = start.join("\n").contains("](../README.md)");
        assert!(links_back, "{path} has no link to README.md at its start");
    }
}

#[test]
fn files_referenced_by_the_documentation_exist() {
    for page in documents() {
        // The changelog may mention files that no longer exist.
        if page.path == "CHANGELOG.md" {
            continue;
        }
        for path in in_backticks(&page.text) {
            let folder = ["sql/", "src/", "deploy/", "tests/", "benches/", "docs/"];
            let path = path.split([' ', '*']).next().unwrap();
            if folder.iter().any(|folder| path.starts_with(folder)) {
                assert!(in_repository(path).exists(), "{}: {path}", page.path);
            }
        }
    }
}

/// Test names have the form `module::name`; the suffix of a generated variant is omitted.
#[test]
fn tests_listed_on_the_guarantees_page_exist() {
    let guarantees = page("docs/guarantees.md");
    let is_test = |name: &String| name.contains("::") && !name.ends_with(':');
    let named: BTreeSet<_> = in_backticks(&guarantees.text)
        .into_iter()
        .filter(is_test)
        .collect();
    assert!(named.len() > 20, "{named:?}");
    let sources = sources(&["src", "tests"]);
    for name in named {
        let function = format!("fn {}(", name.rsplit("::").next().unwrap());
        assert!(sources.contains(&function), "no test {name}");
    }
    let rows = guarantees
        .text
        .lines()
        .filter(|line| line.starts_with("| "));
    for row in rows {
        let (promise, tests) = row.trim_matches('|').rsplit_once('|').unwrap();
        let has_test = in_backticks(tests)
            .iter()
            .any(|name| name.contains("::") || name.starts_with("./dev "));
        let is_heading = tests.trim() == "Tests";
        assert!(has_test || is_heading, "no test for: {promise}");
    }
}

/// Returns the names of the tests in a file. Macros such as `on_each_version` generate tests from the
/// functions that they list.
fn tests_in(text: &str) -> Vec<&str> {
    let mut names = Vec::new();
    let mut in_macro = false;
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        in_macro = match line {
            "on_each_version! {" | "in_both_modes! {" | "for_each_outbox! {" => true,
            "}" => false,
            "#[test]" => {
                let function = lines.find_map(|line| line.strip_prefix("fn "));
                names.push(function.unwrap().split('(').next().unwrap());
                false
            }
            name if in_macro => {
                names.push(name.trim());
                true
            }
            _ => false,
        }
    }
    names
}

#[test]
fn guarantees_page_refers_to_every_attack_test() {
    // These tests do not perform an attack.
    let exempt = [
        "halts_if_a_topic_from_the_configuration_is_missing",
        "warns_about_a_topic_with_a_very_small_message_limit",
    ];
    let guarantees = &page("docs/guarantees.md").text;
    let folder = in_repository("tests/integration");
    let mut files: Vec<_> = ["planted.rs", "reserved_topics.rs", "hostile_rows.rs"]
        .map(|name| folder.join(name))
        .into();
    let planted = std::fs::read_dir(folder.join("planted")).unwrap();
    files.extend(planted.map(|entry| entry.unwrap().path()));
    let mut missing = Vec::new();
    let mut count = 0;
    for path in files {
        let text = std::fs::read_to_string(&path).unwrap();
        for name in tests_in(&text) {
            count += 1;
            if !exempt.contains(&name) && !guarantees.contains(&format!("::{name}`")) {
                missing.push(format!("{}: {name}", path.display()));
            }
        }
    }
    assert!(count > 100, "{count} tests");
    assert!(
        missing.is_empty(),
        "not in docs/guarantees.md: {missing:#?}"
    );
}

#[test]
fn connection_strings_in_the_documentation_are_valid() {
    let mut count = 0;
    for page in manual() {
        let texts = page.text.split(['`', '\'', '"']);
        for string in texts.filter(|text| text.starts_with("postgresql://")) {
            let read = Conninfo::parse(string, &|_| None);
            assert!(read.is_ok(), "{string}: {:?}", read.err());
            count += 1;
        }
    }
    assert!(count > 10, "{count} connection strings");
}

#[test]
fn dev_subcommands_in_the_documentation_exist() {
    let help = Command::new("./dev")
        .arg("help")
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    let mut count = 0;
    for page in documents() {
        for rest in page.text.split("./dev ").skip(1) {
            let word = rest.split(|c: char| !c.is_ascii_alphanumeric()).next();
            let word = word.unwrap();
            let listed = |line: &str| line.trim_start().starts_with(&format!("{word} "));
            assert!(help.lines().any(listed), "{}: ./dev {word}", page.path);
            count += 1;
        }
    }
    assert!(count > 10, "{count} words");
}
