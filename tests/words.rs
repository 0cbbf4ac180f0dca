//! Checks that retired words and phrases occur in no file except CHANGELOG.md. The terms in use are
//! those of the PostgreSQL, Kafka and Debezium manuals.
//!
//! Covers sources, SQL files, documentation and the files in `deploy/`, including comments and
//! strings. Words are matched case-insensitively, even across line ends. In Rust, names are covered
//! too.

use std::fs;
use std::path::{Path, PathBuf};

/// Retired words, in lower case.
const RETIRED: &[&str] = &[
    "let go",
    "let-go",
    "let_go",
    "lets go of",
    "letting go of",
    "lag budget",
    "at_max",
    "--lag-max",
    "--lag-warn",
    "lag.max",
    "lag.warn",
    "walpost_lag_budget",
    "walpostlagbudget",
    "walpostletgo",
    "kept_bytes",
    "session_hung",
    "sessionhung",
    "no word from",
    "stands at",
    "stood at",
    "made anew",
    "makes anew",
    "gone on with",
    "mends",
    "contradicts itself",
    "has not turned",
    "outbox in the log",
    "outbox is in the log",
    "postgresql's log",
    "keeps log",
    "keeps more of the log",
    "held against",
    "whoever watches",
];

/// Phrases that readers stumble over, in lower case, and their replacements.
///
/// Up to 12 occurrences of each phrase in commit e37a5d4 were judged by a reader. The comments give
/// the number of occurrences that the reader rejected.
const PHRASES: &[(&str, &str)] = &[
    // The reader rejected 12 of 12 occurrences.
    ("for ever", "indefinitely, or permanently"),
    // The reader rejected 12 of 12 occurrences.
    ("anew", "again"),
    // The reader rejected the only occurrence.
    ("in vain", "without success"),
    // The reader rejected all 12 occurrences of each of these phrases.
    ("amid", "during, or in the middle of"),
    ("beside", "next to, besides, or in addition to"),
    // The reader rejected 10 of 12 occurrences of `somebody`, 11 of 12 of `whoever`, and 7 of 7 of
    // the other two words.
    ("somebody", "the process, role or person"),
    ("whoever", "anyone who, or the caller"),
    ("stranger", "another user"),
    ("strangers", "other users"),
    // The reader rejected 12 of 12 occurrences.
    ("goes on", "continues"),
    ("go on with", "continue with"),
    ("gone on", "continued"),
    // The reader rejected 6 of 6 occurrences.
    ("so often", "how often"),
    ("so long a", "how long"),
    // The reader rejected 12 of 12 occurrences.
    ("told of", "reported about"),
    ("says of", "reports about"),
    ("said of", "reported about"),
    ("say of", "report about"),
    // The reader rejected 12 of 12 occurrences.
    ("comes of", "results from"),
    ("came of", "resulted from"),
    ("come of", "result from"),
    // The reader rejected 9 of 12 occurrences.
    ("says so", "reports it, naming what is reported"),
    ("say so", "report it, naming what is reported"),
    ("said so", "reported it, naming what was reported"),
    // The reader rejected 11 of 12 occurrences.
    ("is told", "is notified, or receives"),
    ("are told", "are notified, or receive"),
    ("was told", "was notified, or received"),
    ("were told", "were notified, or received"),
    // The reader rejected 12 of 12 occurrences.
    ("it is no", "it is not a"),
    ("that is no", "that is not a"),
    ("that are no", "that are not"),
    ("which is no", "which is not a"),
    // The reader rejected 10 of 12 occurrences.
    ("what is there", "what exists"),
    ("that is there", "that exists"),
    ("that are there", "that exist"),
    ("is there already", "already exists"),
];

/// Words, in lower case, that are too vague to be part of a name.
const NAME_PARTS: &[&str] = &[
    "amid",
    "anew",
    "beside",
    "nobody",
    "somebody",
    "stranger",
    "strangers",
    "whoever",
];

/// Names of functions that don't describe what the function does.
const FUNCTION_NAMES: &[&str] = &[
    "ask", "heard", "look", "note", "of", "said", "say", "tell", "told",
];

/// Names of constants that don't indicate what is limited, or in which unit.
const CONSTANT_NAMES: &[&str] = &[
    "AWAY", "COMPANY", "MUCH", "NEWS", "OTHERS", "REST", "SOME", "TELL",
];

/// Files to skip: benchmark results, which are not reworded, and this file.
const EXCLUDED: &[&str] = &["docs/benchmarks", "tests/words.rs"];

/// Text in lower case in which each sequence of spaces, line ends, and prefixes of continued
/// comments or strings is replaced by one space. Also contains the line number of each byte.
struct Flat {
    text: String,
    lines: Vec<usize>,
}

fn flat(text: &str) -> Flat {
    let (mut flat, mut lines) = (String::new(), Vec::new());
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        let markers = ["///", "//!", "//", "--", "#"];
        let line = markers
            .iter()
            .find_map(|marker| line.strip_prefix(&format!("{marker} ")))
            .unwrap_or(line);
        let line = line.strip_suffix('\\').unwrap_or(line);
        for word in line.split_whitespace() {
            flat.push_str(&word.to_lowercase());
            flat.push(' ');
            lines.resize(flat.len(), number);
        }
    }
    Flat { text: flat, lines }
}

/// Returns the numbers of the lines that contain `word` as a whole word.
fn found(word: &str, Flat { text, lines }: &Flat) -> Vec<usize> {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    let at = text.match_indices(word).filter(|(at, word)| {
        let before = text[..*at].chars().next_back();
        let after = text[at + word.len()..].chars().next();
        // Accept any suffix after a name, as in `walpost_lag_budget_max_bytes`.
        let is_whole = word.starts_with("walpost") || !after.is_some_and(is_part);
        // Allow "is no longer" and comparisons such as "is no more than".
        let next = text[at + word.len()..].split_whitespace().next();
        let is_comparison = word.ends_with(" no")
            && next.is_some_and(|next| ["later", "less", "longer", "more"].contains(&next));
        !before.is_some_and(is_part) && is_whole && !is_comparison
    });
    at.map(|(at, _)| lines[at]).collect()
}

fn files(at: &Path, files_found: &mut Vec<PathBuf>) {
    if at.is_dir() {
        for entry in fs::read_dir(at).expect("a folder") {
            files(&entry.expect("an entry").path(), files_found);
        }
    } else {
        files_found.push(at.to_owned());
    }
}

/// Returns the name and the text of each file to check.
fn checked_files() -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut read = Vec::new();
    for place in [
        "src",
        "sql",
        "tests",
        "docs",
        "deploy",
        "benches",
        "dev",
        "docker-compose.yml",
        "README.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
    ] {
        files(&root.join(place), &mut read);
    }
    read.sort();
    let mut checked = Vec::new();
    for file in read {
        let name = file.strip_prefix(root).expect("below it");
        let name = name.to_str().expect("a name in UTF-8").to_owned();
        let is_excluded = EXCLUDED.iter().any(|excluded| name.starts_with(excluded));
        // Skip binary files, such as images.
        if let Ok(text) = fs::read_to_string(&file)
            && !is_excluded
        {
            checked.push((name, text));
        }
    }
    checked
}

#[test]
fn no_file_contains_a_retired_word() {
    let mut back = Vec::new();
    for (name, text) in checked_files() {
        let text = flat(&text);
        for word in RETIRED {
            let lines = found(word, &text);
            back.extend(lines.iter().map(|line| format!("{name}:{line}: {word:?}")));
        }
        for (phrase, instead) in PHRASES {
            let lines = found(phrase, &text);
            back.extend(
                lines
                    .iter()
                    .map(|line| format!("{name}:{line}: {phrase:?}; write {instead}")),
            );
        }
    }
    assert!(back.is_empty(), "retired words:\n{}", back.join("\n"));
}

/// Returns the names in Rust code that are too vague, with their line numbers.
fn vague_names(text: &str) -> Vec<(usize, String)> {
    let mut vague = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let code = line.split("//").next().unwrap_or_default();
        // Skip strings, whose text is checked as prose.
        let code = code.replace("\\\"", " ");
        let code: String = code.split('"').step_by(2).collect::<Vec<_>>().join(" ");
        let is_part = |c: char| c.is_alphanumeric() || c == '_';
        let mut previous = "";
        for name in code.split(|c| !is_part(c)).filter(|name| !name.is_empty()) {
            let has_part = parts(name)
                .iter()
                .any(|part| NAME_PARTS.contains(&part.as_str()));
            let is_vague = match previous {
                "fn" => FUNCTION_NAMES.contains(&name),
                "const" | "static" => CONSTANT_NAMES.contains(&name),
                _ => false,
            };
            if has_part || is_vague {
                vague.push((number, name.to_owned()));
            }
            previous = name;
        }
    }
    vague
}

/// Splits a name in snake case or camel case into its words, in lower case.
fn parts(name: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut was_lower = false;
    for c in name.chars() {
        if c == '_' || c.is_uppercase() && was_lower {
            parts.push(String::new());
        }
        if c != '_' {
            parts
                .last_mut()
                .expect("at least one part")
                .extend(c.to_lowercase());
        }
        was_lower = c.is_lowercase();
    }
    parts
}

#[test]
fn no_identifier_contains_a_vague_word() {
    let mut vague = Vec::new();
    for (file, text) in checked_files() {
        if file.ends_with(".rs") {
            let names = vague_names(&text);
            vague.extend(
                names
                    .iter()
                    .map(|(line, name)| format!("{file}:{line}: {name}")),
            );
        }
    }
    assert!(vague.is_empty(), "vague names:\n{}", vague.join("\n"));
}

#[test]
fn finds_vague_words_in_names_but_not_as_part_of_longer_words() {
    let names = |text| -> Vec<String> {
        let vague = vague_names(text).into_iter();
        vague.map(|(_, name)| name).collect()
    };
    assert_eq!(
        names("fn of(x: u8) { const MUCH: u8 = 1; }"),
        ["of", "MUCH"]
    );
    assert_eq!(
        names("let is_beside = BesideMax::new();"),
        ["is_beside", "BesideMax"]
    );
    assert!(names("fn offset(note: u8) { x.of() } // fn of, beside").is_empty());
    assert!(names("let key = \"beside\"; const SOMEWHERE: u8 = 2;").is_empty());
}

#[test]
fn finds_whole_words_regardless_of_case_and_line_breaks() {
    let lines = |word, text| found(word, &flat(text));
    for text in [
        "It let go.",
        "/// Let\n    /// go of it",
        "\"let \\\n    go\"",
        "-- let\n-- go",
    ] {
        assert_eq!(lines("let go", text), [1], "{text}");
    }
    assert!(lines("let go", "outlet go, let gone, let_go").is_empty());
    let metric = "a\nwalpost_lag_budget_max_bytes";
    assert_eq!(lines("walpost_lag_budget", metric), [2]);
}
