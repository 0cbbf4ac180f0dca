//! State that Walpost leaves in the database and in Kafka, and that another version of Walpost must
//! be able to resume from.
//!
//! `tests/golden/at_rest.jsonl` contains the state left by version 0.1.0: checkpoints, journal
//! entries, states of slots and tables, and record headers.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::budget;
use crate::replay::already_delivered::settled;
use crate::snapshot::detached::detached_before_first_start;
use crate::snapshot::{self, fixture_with_older_rows, start_and_copy_some};
use crate::support::checker::Resends;
use crate::support::fixture::Fixture;
use crate::tables::set_aside::fixture_with_resumed_table;

/// Tests at-least-once mode, because exactly-once mode relies on the checkpoint rather than the
/// journal.
#[test]
fn halts_on_a_journal_written_by_a_newer_version() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_and_confirm_one(&aggregate, "k");
    walpost.terminate().expect_code(0);
    fixture.insert(&aggregate, "k");
    let set = |version: u32| {
        fixture.db.run(&format!(
            "UPDATE walpost.journal SET detail = detail || '{{\"version\": {version}}}'"
        ));
    };
    set(2);
    let before = fixture.confirmed();
    fixture.run().finish().expect_code(3).expect_mentions(&[
        "has version 2",
        "a newer version of Walpost wrote the entry",
    ]);
    assert_eq!(fixture.confirmed(), before);
    set(1);
    let walpost = fixture.start();
    fixture.settle(walpost, &[], Resends::Never);
}

/// Returns the structure of a JSON value: the names of all members, including nested ones, with the
/// types of their values.
fn form(value: &Value) -> Value {
    match value {
        Value::Object(members) => {
            let members = members.iter();
            let forms = members.map(|(name, value)| (name.clone(), form(value)));
            Value::Object(forms.collect())
        }
        // Equal structures are combined, so that the result does not depend on the number of
        // elements.
        Value::Array(items) => {
            let forms: BTreeSet<_> = items.iter().map(|item| form(item).to_string()).collect();
            forms.into_iter().collect()
        }
        Value::String(_) => "text".into(),
        Value::Number(_) => "number".into(),
        Value::Bool(_) => "bool".into(),
        Value::Null => Value::Null,
    }
}

/// The distinct structures of each kind of persistent state.
type Forms = BTreeMap<String, BTreeSet<String>>;

/// Returns persistent state of every kind that a pipeline can write.
fn persistent_state() -> Vec<(String, Value)> {
    // Copy older rows in exactly-once mode, and interrupt the copy once.
    let (fixture, aggregate) = fixture_with_older_rows(snapshot::TABLE, 20_000, true);
    fixture.kill(start_and_copy_some(&fixture));
    snapshot::settle(&fixture, fixture.start());
    fixture.insert(&aggregate, "k");
    snapshot::settle(&fixture, fixture.start());
    let mut persistent_state = kafka_state(&fixture);
    persistent_state.extend(journal_rows(&fixture));

    // Detach a partition before its rows are copied.
    persistent_state.extend(journal_rows(&detached_before_first_start()));

    // Skip an event, then drop the slot and replay the events that the slot had not delivered.
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_and_confirm_one(&aggregate, "k");
    walpost.terminate().expect_code(0);
    fixture.insert(&aggregate, "skipped");
    let to = fixture
        .db
        .value("SELECT pg_current_wal_flush_lsn()")
        .unwrap();
    fixture.skip(&to).arg("--yes").finish().expect_code(0);
    fixture.insert(&aggregate, "dropped");
    budget::drop_slot(&fixture);
    fixture.init().finish().expect_code(0);
    fixture
        .replay(&["--dropped-slots", "--yes"])
        .finish()
        .expect_code(0);
    fixture.replay(&["--all", "--yes"]).finish().expect_code(0);
    persistent_state.extend(kafka_state(&fixture));
    persistent_state.extend(journal_rows(&fixture));
    // Set a table aside, and then resume its delivery.
    persistent_state.extend(journal_rows(&fixture_with_resumed_table()));
    // Replace the slot of several tables, remove one of the tables from the publication, and close
    // a gap without delivering the events in the gap.
    let fixture = settled();
    persistent_state.extend(journal_rows(&fixture));
    persistent_state.extend(state_rows(&fixture));
    persistent_state
}

/// Returns the rows in walpost.slot_state and walpost.table_state.
fn state_rows(fixture: &Fixture) -> Vec<(String, Value)> {
    let rows = |table: &str| {
        let rows = fixture.db.value(&format!(
            "SELECT jsonb_agg(row_to_json(s) ORDER BY s)::text FROM walpost.{table} s"
        ));
        let rows: Vec<Value> = serde_json::from_str(&named(fixture, &rows.unwrap())).unwrap();
        rows.into_iter()
            .map(move |row| (table.to_owned(), row))
            .collect::<Vec<_>>()
    };
    [rows("slot_state"), rows("table_state")].concat()
}

fn journal_rows(fixture: &Fixture) -> Vec<(String, Value)> {
    let entries = fixture.db.value(
        "SELECT jsonb_agg(jsonb_build_object('action', action, 'from', from_lsn, 'to', to_lsn,
             'detail', detail - 'version') ORDER BY id)::text FROM walpost.journal",
    );
    let entries: Vec<Value> = serde_json::from_str(&named(fixture, &entries.unwrap())).unwrap();
    let kind = |entry: &Value| format!("journal {}", entry["action"].as_str().unwrap());
    entries
        .into_iter()
        .map(|entry| (kind(&entry), entry))
        .collect()
}

fn kafka_state(fixture: &Fixture) -> Vec<(String, Value)> {
    let checkpoints = fixture.broker.read(&["walpost-checkpoints".to_owned()]);
    let ours = checkpoints
        .iter()
        .filter(|record| record.key() == fixture.name);
    let checkpoint = |text: &str| -> Value { serde_json::from_str(&named(fixture, text)).unwrap() };
    let checkpoints = ours.map(|record| checkpoint(record.text()));
    // Leave out checkpoints written after the last row of a copy but before the end of the copy,
    // because not every run writes such a checkpoint.
    let is_between = |checkpoint: &Value| {
        let chunks = checkpoint["snapshot"]["chunks"].as_array();
        chunks.is_some_and(|chunks| chunks.iter().any(|chunk| chunk["upto"].is_null()))
    };
    let checkpoints = checkpoints.filter(|checkpoint| !is_between(checkpoint));
    let checkpoints = checkpoints.map(|checkpoint| ("checkpoint".to_owned(), checkpoint));
    let records = fixture.records();
    let headers = records.iter().map(|record| {
        let headers = record.headers.iter().map(|(name, value)| {
            let value = value.as_ref().map(|value| String::from_utf8_lossy(value));
            (name.clone(), Value::from(value.as_deref()))
        });
        ("headers".to_owned(), Value::Object(headers.collect()))
    });
    checkpoints.chain(headers).collect()
}

/// Replaces the names of the topics and the fixture in the text with fixed names.
fn named(fixture: &Fixture, text: &str) -> String {
    let topics = fixture.topics().into_iter().enumerate();
    let text = topics.fold(text.to_owned(), |text, (n, topic)| {
        text.replace(&topic, &format!("topic-{n}"))
    });
    text.replace(&fixture.name, "orders")
}

fn forms(persistent_state: impl IntoIterator<Item = (String, Value)>) -> Forms {
    let mut forms = Forms::new();
    for (kind, value) in persistent_state {
        forms
            .entry(kind)
            .or_default()
            .insert(form(&value).to_string());
    }
    forms
}

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/at_rest.jsonl")
}

#[test]
#[ignore = "writes tests/golden/at_rest.jsonl: ./dev golden"]
fn captures_golden_files_with_the_stored_state() {
    let mut seen = BTreeSet::new();
    let mut text = String::new();
    for (kind, value) in persistent_state() {
        if seen.insert((kind.clone(), form(&value).to_string())) {
            text += &format!("{}\n", json!({"kind": kind, "value": value}));
        }
    }
    fs::write(golden(), text).unwrap();
}

/// If this test fails, the format of the stored state has changed. Changing the format requires a
/// new format version, and a test that resumes from state in the previous format.
#[test]
fn format_of_the_stored_state_is_unchanged() {
    let golden = fs::read_to_string(golden()).unwrap();
    let golden = golden.lines().map(|line| {
        let mut line: Value = serde_json::from_str(line).unwrap();
        let kind = line["kind"].as_str().unwrap().to_owned();
        (kind, line["value"].take())
    });
    assert_eq!(forms(persistent_state()), forms(golden));
}
