//! What Walpost has left at rest, in the database and in Kafka, and another version resumes from.
//!
//! `tests/golden/at_rest.jsonl` is what this version leaves: checkpoints, entries of the journal and the headers of
//! records; `at_rest_0.1.jsonl` is what version 0.1.0 left. The rest is left by this binary and made to look as if that version had, or, where
//! `WALPOST_TEST_PREVIOUS` names one, by an earlier binary.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::budget;
use crate::snapshot::{self, expect_all, filled, start_and_copy_some};
use crate::support::checker::Resends;
use crate::support::scene::Scene;
use crate::support::wait::wait_until;
use crate::support::walpost::with_previous;
use crate::tables::set_aside::set_aside_and_delivered_again;

in_both_modes! {
    pipeline_of_a_version_without_slot_state_is_resumed
    half_copy_of_a_version_without_slot_state_is_resumed
    what_a_version_without_slot_state_has_dropped_is_sent_again
    slot_that_is_dropped_with_a_journal_of_the_first_version_is_recorded_in_its_words
}

/// The journal with its rows and the last checkpoint are as version 0.1 left them. Its words are those of
/// `tests/golden/at_rest_0.1.jsonl`.
fn as_of_the_first_version(scene: &Scene) {
    scene.db.run(
        "DROP TABLE IF EXISTS walpost.slot_state, walpost.table_state;
         ALTER TABLE walpost.journal DROP CONSTRAINT journal_action_check;
         UPDATE walpost.journal SET action = 'let go' WHERE action = 'drop slot';
         UPDATE walpost.journal SET detail = replace((detail - 'version')::text, '\"dropped_slots\"', '\"let_go\"')::jsonb;
         ALTER TABLE walpost.journal ADD CONSTRAINT journal_action_check
             CHECK (action IN ('snapshot', 'skip', 'let go', 'replay'))",
    );
    let checkpoints = scene.checkpoints();
    let Some(last) = checkpoints.last().map(|record| record.text()) else {
        return;
    };
    if last.contains("\"version\":2") {
        let first = last
            .replace("\"version\":2", "\"version\":1")
            .replace("\"chunks\"", "\"pieces\"")
            .replace("\"snapshot_lsn\"", "\"border\"");
        assert!(first.contains("\"pieces\":[{\"border\":"), "{first}");
        let topic = "walpost-checkpoints";
        scene.broker.produce(topic, &scene.name, &first);
    }
}

/// Another CHECK on the actions is its owner's business, however often `init` runs.
#[test]
fn check_that_is_not_of_the_first_version_stays() {
    let scene = Scene::new();
    as_of_the_first_version(&scene);
    scene.db.run("ALTER TABLE walpost.journal ADD CONSTRAINT others CHECK (action IN ('snapshot', 'skip', 'replay'))");
    for _ in 0..2 {
        scene.init().finish().expect_code(0);
    }
    let names = "SELECT array_agg(conname::text ORDER BY conname) = '{journal_action_check,others}' FROM pg_constraint
         WHERE conrelid = 'walpost.journal'::regclass AND contype = 'c'";
    assert!(scene.db.is_true(names));
}

/// The journal allows what this version writes.
fn is_widened(scene: &Scene) -> bool {
    scene.db.is_true(
        "SELECT bool_and(pg_get_constraintdef(oid) LIKE '%drop slot%let go%') FROM pg_constraint
         WHERE conrelid = 'walpost.journal'::regclass AND contype = 'c'",
    )
}

fn pipeline_of_a_version_without_slot_state_is_resumed(exactly_once: bool) {
    let (scene, load, death) = with_previous(|| {
        let scene = Scene::new().in_mode(exactly_once);
        let aggregate = scene.aggregate(2);
        let load = scene.load(&[&aggregate]);
        let walpost = scene.start();
        load.wait_for_transactions(50);
        let death = scene.kill(walpost);
        (scene, load, death)
    });
    as_of_the_first_version(&scene);
    let walpost = scene.start();
    load.wait_for_transactions(50);
    walpost.terminate().expect_code(0);
    scene
        .check()
        .finish()
        .expect_code(0)
        .expect_says(&["walpost.slot_state does not exist", "walpost init"]);
    scene.init().finish().expect_code(0);
    let walpost = scene.start();
    load.wait_for_transactions(50);
    load.stop();
    scene.settle(walpost, &[death], scene.resends(1));
    assert!(
        scene
            .db
            .is_true("SELECT count(*) = 1 FROM walpost.slot_state WHERE begun")
    );
}

fn half_copy_of_a_version_without_slot_state_is_resumed(exactly_once: bool) {
    let scene = with_previous(|| {
        let (scene, _) = filled(snapshot::TABLE, 20_000, exactly_once);
        let walpost = start_and_copy_some(&scene);
        scene.kill(walpost);
        scene
    });
    as_of_the_first_version(&scene);
    assert!(scene.records().len() < 20_000);
    scene.init().finish().expect_code(0);
    let mut walpost = scene.start();
    walpost.wait_for_log(match exactly_once {
        true => "resuming interrupted snapshot",
        false => "not completed",
    });
    snapshot::settle(&scene, walpost);
    expect_all(&scene, 20_000, exactly_once);
}

fn what_a_version_without_slot_state_has_dropped_is_sent_again(exactly_once: bool) {
    let (scene, aggregate) = with_previous(|| {
        let scene = Scene::new().in_mode(exactly_once);
        let aggregate = scene.aggregate(1);
        let walpost = scene.start_and_confirm_one(&aggregate, "k");
        walpost.terminate().expect_code(0);
        for _ in 0..5 {
            scene.insert(&aggregate, "k");
        }
        budget::drop_slot(&scene);
        (scene, aggregate)
    });
    as_of_the_first_version(&scene);
    let lists = "were not sent again yet";
    budget::new_slot(&scene);
    assert!(is_widened(&scene));
    let mut walpost = scene.run().start();
    walpost.wait_for_log(lists);
    let replay = scene.replay(&["--dropped-slots", "--yes"]);
    replay.finish().expect_code(0);
    scene.insert(&aggregate, "k");
    scene.wait_for_ids(&scene.history());
    walpost.terminate().expect_code(0);
    let walpost = scene.start();
    scene.insert(&aggregate, "k");
    scene.wait_for_ids(&scene.history());
    assert_eq!(walpost.logged(lists), 0);
    walpost.terminate().expect_code(0);
}

/// A record of what is lost must not fail for the word that it has.
fn slot_that_is_dropped_with_a_journal_of_the_first_version_is_recorded_in_its_words(
    exactly_once: bool,
) {
    let scene = Scene::new().in_mode(exactly_once);
    let aggregate = scene.aggregate(1);
    let walpost = scene.start_and_confirm_one(&aggregate, "k");
    walpost.terminate().expect_code(0);
    as_of_the_first_version(&scene);
    let dropped = |action: &str| {
        scene.db.number(&format!(
            "SELECT count(*) FROM walpost.journal WHERE action = '{action}'"
        ))
    };
    scene.insert(&aggregate, "k");
    budget::drop_slot(&scene);
    assert_eq!((dropped("let go"), dropped("drop slot")), (1, 0));
    let versions =
        "SELECT bool_and(detail ->> 'version' = '1') FROM walpost.journal WHERE action = 'let go'";
    assert!(scene.db.is_true(versions), "an earlier one reads it");
    let mut walpost = {
        budget::new_slot(&scene);
        scene.start()
    };
    assert!(is_widened(&scene));
    walpost.wait_for_log("were not sent again yet");
    walpost.terminate().expect_code(0);
    scene.insert(&aggregate, "k");
    budget::drop_slot(&scene);
    assert_eq!((dropped("let go"), dropped("drop slot")), (1, 1));
    // One replay covers both.
    budget::new_slot(&scene);
    let walpost = scene.start();
    let replay = scene.replay(&["--dropped-slots", "--yes"]);
    replay.finish().expect_code(0);
    scene.wait_for_ids(&scene.history());
    let replay = scene.replay(&["--dropped-slots", "--yes"]);
    replay
        .finish()
        .expect_code(2)
        .expect_says(&["has no dropped slot"]);
    walpost.terminate().expect_code(0);
}

#[test]
fn replay_that_a_version_without_slot_state_has_begun_is_resumed() {
    const ROWS: usize = 400;
    let (scene, run) = with_previous(|| {
        let scene = Scene::new();
        let aggregate = scene.aggregate(1);
        scene
            .db
            .run(&scene.events().many(&aggregate, ROWS, "to_jsonb(n)"));
        let replay = scene.replay(&["--all", "--yes", "--rate", "100/s"]).start();
        let notes = "SELECT count(*) FROM walpost.journal WHERE action = 'replay'";
        wait_until("a note of the replay", || scene.db.number(notes) >= 3);
        replay.kill();
        let run = "SELECT detail ->> 'run' FROM walpost.journal WHERE action = 'replay' LIMIT 1";
        let run = scene.db.value(run).unwrap();
        (scene, run)
    });
    as_of_the_first_version(&scene);
    let before = scene.records().len();
    assert!(before < ROWS, "it was not cut short");
    scene.init().finish().expect_code(0);
    let resumed = scene.replay(&["--yes", "--resume", &run]).finish();
    resumed
        .expect_code(0)
        .expect_says(&["that were sent before", "replayed"]);
    let records = scene.records();
    let ids: BTreeSet<_> = records.iter().map(|record| record.header("id")).collect();
    assert_eq!(ids.len(), ROWS);
    assert!(records.len() < ROWS + before, "it began anew");
}

/// Exactly-once goes by its checkpoint.
#[test]
fn journal_that_a_newer_version_has_written_halts() {
    let scene = Scene::new();
    let aggregate = scene.aggregate(1);
    let walpost = scene.start_and_confirm_one(&aggregate, "k");
    walpost.terminate().expect_code(0);
    scene.insert(&aggregate, "k");
    let set = |version: u32| {
        scene.db.run(&format!(
            "UPDATE walpost.journal SET detail = detail || '{{\"version\": {version}}}'"
        ));
    };
    set(5);
    let before = scene.confirmed();
    scene
        .run()
        .finish()
        .expect_code(3)
        .expect_says(&["is of version 5", "a newer one has written it"]);
    assert_eq!(scene.confirmed(), before);
    set(1);
    let walpost = scene.start();
    scene.settle(walpost, &[], Resends::Never);
}

/// The names of the members of an object and of those in it, with what kind of value each has.
fn form(value: &Value) -> Value {
    match value {
        Value::Object(members) => {
            let members = members.iter();
            let forms = members.map(|(name, value)| (name.clone(), form(value)));
            Value::Object(forms.collect())
        }
        // However many there are.
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

/// What was left, by its kind.
type Forms = BTreeMap<String, BTreeSet<String>>;

/// Each kind of thing at rest that a pipeline leaves in the course of its life.
fn left() -> Vec<(String, Value)> {
    // Older rows that are copied, with exactly-once, and a copy that was cut short.
    let (scene, aggregate) = filled(snapshot::TABLE, 20_000, true);
    scene.kill(start_and_copy_some(&scene));
    snapshot::settle(&scene, scene.start());
    scene.insert(&aggregate, "k");
    snapshot::settle(&scene, scene.start());
    let mut left = left_in_kafka(&scene);
    left.extend(left_in_the_journal(&scene));

    // A skip, a slot that is dropped, and what it had is sent again.
    let scene = Scene::new();
    let aggregate = scene.aggregate(1);
    let walpost = scene.start_and_confirm_one(&aggregate, "k");
    walpost.terminate().expect_code(0);
    scene.insert(&aggregate, "skipped");
    let to = scene.db.value("SELECT pg_current_wal_flush_lsn()").unwrap();
    scene.skip(&to).arg("--yes").finish().expect_code(0);
    scene.insert(&aggregate, "dropped");
    budget::drop_slot(&scene);
    scene.init().finish().expect_code(0);
    scene
        .replay(&["--dropped-slots", "--yes"])
        .finish()
        .expect_code(0);
    scene.replay(&["--all", "--yes"]).finish().expect_code(0);
    left.extend(left_in_kafka(&scene));
    left.extend(left_in_the_journal(&scene));
    // A table that is set aside.
    left.extend(left_in_the_journal(&set_aside_and_delivered_again()));
    left
}

fn left_in_the_journal(scene: &Scene) -> Vec<(String, Value)> {
    let entries = scene.db.value(
        "SELECT jsonb_agg(jsonb_build_object('action', action, 'from', from_lsn, 'to', to_lsn,
             'detail', detail - 'version') ORDER BY id)::text FROM walpost.journal",
    );
    let entries: Vec<Value> = serde_json::from_str(&named(scene, &entries.unwrap())).unwrap();
    let kind = |entry: &Value| format!("journal {}", entry["action"].as_str().unwrap());
    entries
        .into_iter()
        .map(|entry| (kind(&entry), entry))
        .collect()
}

fn left_in_kafka(scene: &Scene) -> Vec<(String, Value)> {
    let checkpoints = scene.broker.read(&["walpost-checkpoints".to_owned()]);
    let ours = checkpoints
        .iter()
        .filter(|record| record.key() == scene.name);
    let checkpoint = |text: &str| -> Value { serde_json::from_str(&named(scene, text)).unwrap() };
    let checkpoints = ours.map(|record| checkpoint(record.text()));
    // Between the last row of a copy and its end some runs have a checkpoint, and some have none.
    let is_between = |checkpoint: &Value| {
        let chunks = checkpoint["snapshot"]["chunks"].as_array();
        chunks.is_some_and(|chunks| chunks.iter().any(|chunk| chunk["upto"].is_null()))
    };
    let checkpoints = checkpoints.filter(|checkpoint| !is_between(checkpoint));
    let checkpoints = checkpoints.map(|checkpoint| ("checkpoint".to_owned(), checkpoint));
    let records = scene.records();
    let headers = records.iter().map(|record| {
        let headers = record.headers.iter().map(|(name, value)| {
            let value = value.as_ref().map(|value| String::from_utf8_lossy(value));
            (name.clone(), Value::from(value.as_deref()))
        });
        ("headers".to_owned(), Value::Object(headers.collect()))
    });
    checkpoints.chain(headers).collect()
}

/// The text with the same name for every scene.
fn named(scene: &Scene, text: &str) -> String {
    let topics = scene.topics().into_iter().enumerate();
    let text = topics.fold(text.to_owned(), |text, (n, topic)| {
        text.replace(&topic, &format!("topic-{n}"))
    });
    text.replace(&scene.name, "orders")
}

fn forms(left: impl IntoIterator<Item = (String, Value)>) -> Forms {
    let mut forms = Forms::new();
    for (kind, value) in left {
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
#[ignore = "captures what is at rest: ./dev golden"]
fn capture_golden() {
    let mut seen = BTreeSet::new();
    let mut text = String::new();
    for (kind, value) in with_previous(left) {
        if seen.insert((kind.clone(), form(&value).to_string())) {
            text += &format!("{}\n", json!({"kind": kind, "value": value}));
        }
    }
    fs::write(golden(), text).unwrap();
}

/// Else the version goes up, and there is a test that what is of the last one is resumed.
#[test]
fn what_is_left_at_rest_has_the_form_that_it_had() {
    let golden = fs::read_to_string(golden()).unwrap();
    let golden = golden.lines().map(|line| {
        let mut line: Value = serde_json::from_str(line).unwrap();
        let kind = line["kind"].as_str().unwrap().to_owned();
        (kind, line["value"].take())
    });
    assert_eq!(forms(left()), forms(golden));
}
