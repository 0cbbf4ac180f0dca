//! Checks that no file contains a retired word, except CHANGELOG.md. Terms follow the PostgreSQL,
//! Kafka and Debezium manuals.
//!
//! Reads sources, SQL files, documentation and the files in `deploy/`, including comments and
//! strings. Words are matched case-insensitively, also across line ends.

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

/// Files that are not read: measured figures, and this file.
const EXCLUDED: &[&str] = &["docs/benchmarks", "tests/words.rs"];

/// A text in lower case in which each sequence of spaces, line ends and prefixes of continued
/// comments or strings is one space, and the line of each byte.
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

/// Returns the lines that contain the word as a whole word.
fn found(word: &str, Flat { text, lines }: &Flat) -> Vec<usize> {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    let at = text.match_indices(word).filter(|(at, word)| {
        let before = text[..*at].chars().next_back();
        let after = text[at + word.len()..].chars().next();
        // A suffix may follow the name, as in `walpost_lag_budget_max_bytes`.
        let is_whole = word.starts_with("walpost") || !after.is_some_and(is_part);
        !before.is_some_and(is_part) && is_whole
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

#[test]
fn no_file_contains_a_retired_word() {
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
    let mut back = Vec::new();
    for file in read {
        let name = file.strip_prefix(root).expect("below it");
        let name = name.to_str().expect("a name in UTF-8");
        let Ok(text) = fs::read_to_string(&file) else {
            // The file is binary, such as an image.
            continue;
        };
        if EXCLUDED.iter().any(|left_out| name.starts_with(left_out)) {
            continue;
        }
        let text = flat(&text);
        for word in RETIRED {
            let lines = found(word, &text);
            back.extend(lines.iter().map(|line| format!("{name}:{line}: {word:?}")));
        }
    }
    assert!(back.is_empty(), "retired words:\n{}", back.join("\n"));
}

#[test]
fn finds_whole_words_in_any_case_and_across_line_ends() {
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
