//! Runs every fuzz target on its corpus.

use std::collections::BTreeSet;
use std::fs;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};

use super::*;

type Target = fn(&[u8]);

const TARGETS: [(&str, Target); 12] = [
    ("checkpoint", checkpoint),
    ("config", config),
    ("conninfo", conninfo),
    ("copy", copy),
    ("core", core),
    ("envelope", envelope),
    ("expand", expand),
    ("frame", frame),
    ("import", import),
    ("pgoutput", pgoutput),
    ("startup", startup),
    ("template", template),
];

fn files(folder: &str) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
    let entries = fs::read_dir(&folder).unwrap_or_else(|error| panic!("{folder:?}: {error}"));
    entries
        .map(|entry| entry.expect("an entry").path())
        .collect()
}

#[test]
fn every_fuzz_target_passes_on_its_corpus() {
    let mut failed = Vec::new();
    for (name, target) in TARGETS {
        let corpus = files(&format!("fuzz/corpus/{name}"));
        assert!(!corpus.is_empty(), "{name} has no corpus");
        for path in corpus {
            let bytes = fs::read(&path).expect("a file");
            if catch_unwind(|| target(&bytes)).is_err() {
                failed.push(path);
            }
        }
    }
    assert!(
        failed.is_empty(),
        "these inputs failed, with the errors above: {failed:#?}"
    );
}

#[test]
fn lists_the_same_targets_as_cargo_fuzz() {
    let programs: BTreeSet<_> = files("fuzz/fuzz_targets")
        .into_iter()
        .map(|path| fs::read_to_string(path).expect("a program"))
        .collect();
    let expected = TARGETS.map(|(name, _)| {
        format!(
            "#![no_main]\nlibfuzzer_sys::fuzz_target!(|data: &[u8]| walpost::fuzz::{name}(data));\n"
        )
    });
    assert_eq!(programs, expected.into());
}
