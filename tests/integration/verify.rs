//! `verify`: the table compared with the topics.

use std::fs;
use std::time::Duration;

use rdkafka::admin::{AdminClient, AdminOptions};
use rdkafka::client::DefaultClientContext;
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{BaseProducer, BaseRecord, Producer};
use rdkafka::{Offset, TopicPartitionList};
use serde_json::Value;

use crate::support::event::Outbox;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, Server};
use crate::support::reaper;
use crate::support::records::Record;
use crate::support::scene::Scene;
use crate::support::wait::{PATIENCE, wait_until};
use crate::support::walpost::{Finished, Invocation};

/// What `verify --json` says of its only pipeline.
struct Verdict {
    ok: bool,
    pipeline: Value,
}

impl Verdict {
    fn of(finished: &Finished) -> Self {
        let document: Value = serde_json::from_str(&finished.stdout).expect("one JSON document");
        let pipeline = document["pipelines"][0].clone();
        assert_eq!(document["ok"], pipeline["ok"], "{document}");
        Self {
            ok: pipeline["ok"].as_bool().expect("a truth value"),
            pipeline,
        }
    }

    /// Everything that was counted, but for zeros: `rows 3, delivered 2, missing 1`.
    fn counts(&self) -> String {
        let counts = self.pipeline["counts"].as_object().expect("counts");
        let told = counts.iter().filter(|(_, count)| **count != 0);
        let told = told.map(|(what, count)| format!("{what} {count}"));
        told.collect::<Vec<_>>().join(", ")
    }

    fn findings(&self) -> Vec<Value> {
        self.pipeline["findings"]
            .as_array()
            .expect("a list")
            .clone()
    }

    fn notes(&self) -> String {
        self.pipeline["notes"].to_string()
    }
}

/// Verifies, and holds the exit code against what was found.
fn verify_with(scene: &Scene<'_>, arguments: &[&str]) -> Verdict {
    let finished = scene.verify().arg("--json").args(arguments).finish();
    let verdict = Verdict::of(&finished);
    finished.expect_code(i32::from(!verdict.ok));
    verdict
}

fn verify(scene: &Scene<'_>) -> Verdict {
    verify_with(scene, &[])
}

/// A record made by hand.
#[derive(Clone)]
struct Forged<'f> {
    topic: String,
    key: &'f str,
    headers: Vec<(&'f str, String)>,
    /// Milliseconds since 1970.
    timestamp: Option<i64>,
}

impl<'f> Forged<'f> {
    fn new(aggregate: &str, key: &'f str, id: &str) -> Self {
        Self {
            topic: format!("outbox.event.{aggregate}"),
            key,
            headers: vec![("id", id.to_owned())],
            timestamp: None,
        }
    }

    /// Of the event with that number in the transaction with that commit LSN.
    fn at(mut self, commit: u64, index: u32) -> Self {
        let (high, low) = (commit >> 32, commit & u64::from(u32::MAX));
        let position = format!("{high:08X}/{low:08X}:{index:010}");
        self.headers.push(("walpost-position", position));
        self
    }

    fn with(mut self, header: &'f str, value: &str) -> Self {
        self.headers.push((header, value.to_owned()));
        self
    }

    /// Hands it to the producer, for the first partition.
    fn send(&self, producer: &BaseProducer) {
        let headers = self
            .headers
            .iter()
            .fold(OwnedHeaders::new(), |all, (key, value)| {
                all.insert(Header {
                    key,
                    value: Some(value),
                })
            });
        let mut record = BaseRecord::to(&self.topic)
            .partition(0)
            .key(self.key)
            .payload("{}")
            .headers(headers);
        record.timestamp = self.timestamp;
        producer.send(record).map_err(|(error, _)| error).unwrap();
    }

    fn produce(&self, broker: &Broker) {
        let producer: BaseProducer = broker.client().create().unwrap();
        self.send(&producer);
        producer.flush(PATIENCE).expect("the broker takes it");
    }
}

/// The record once more.
fn produce_again(scene: &Scene<'_>, record: &Record) {
    let aggregate = record.topic.strip_prefix("outbox.event.").unwrap();
    let mut again = Forged::new(aggregate, record.key(), record.header("id"));
    let position = record.header("walpost-position").to_owned();
    again.headers.push(("walpost-position", position));
    again.produce(scene.broker);
}

/// Commits rows in one transaction; returns their ids in order.
fn insert_rows(scene: &Scene<'_>, aggregate: &str, keys: &[&str]) -> Vec<String> {
    let rows: String = keys
        .iter()
        .map(|key| scene.insert_sql(aggregate, key))
        .collect();
    scene.db.run(&format!("BEGIN; {rows} COMMIT"));
    let ids = keys.iter().map(|key| {
        let query = format!("SELECT id FROM outbox WHERE aggregateid = '{key}'");
        scene.db.value(&query).expect("a row")
    });
    ids.collect()
}

/// Moves the slot over everything that was committed, as nobody should.
fn advance_slot(scene: &Scene<'_>) {
    let slot = scene.slot();
    wait_until("the slot to be free", || !scene.slot_is_active());
    scene.db.run(&format!(
        "SELECT pg_replication_slot_advance('{slot}', pg_current_wal_lsn())"
    ));
    // Else Walpost notices it itself.
    scene.db.run("DELETE FROM walpost.slot_state");
}

in_both_modes! { what_was_delivered_under_load_is_found_clean }

fn what_was_delivered_under_load_is_found_clean(exactly_once: bool) {
    let scene = Scene::new().in_mode(exactly_once);
    let aggregates = [scene.aggregate(3), scene.aggregate(1)];
    let walpost = scene.start();
    let load = scene.load(&[&aggregates[0], &aggregates[1]]);
    load.wait_for_transactions(200);
    // Others go on: their events are newer than what the table had.
    let verdict = verify(&scene);
    assert!(verdict.ok, "{}", verdict.counts());
    load.stop();
    let history = scene.history();
    let verdict = verify(&scene);
    let all = history.len();
    assert_eq!(
        verdict.counts(),
        format!("rows {all}, records {all}, delivered {all}")
    );
    assert_eq!(verdict.notes(), "[]");
    scene.verify().finish().expect_code(0).expect_says(&[
        "public.outbox",
        "delivered",
        "ok",
        "rows read",
        "records read",
    ]);
    walpost.terminate().expect_code(0);
}

#[test]
fn leader_that_lags_hides_no_records() {
    let broker = Broker::private();
    let scene = Scene::on(Server::shared(MAJOR), &broker);
    let aggregate = scene.aggregate(1);
    let walpost = scene.start_and_confirm_one(&aggregate, "first");
    scene.insert(&aggregate, "second");
    scene.wait_until_confirmed();
    walpost.terminate().expect_code(0);
    let proxy = broker.proxy();
    let lag = proxy.lag_behind(1);
    let far = format!("bootstrap.servers=127.0.0.1:{}", proxy.port());
    let verdict = verify_with(&scene, &["-X", &far]);
    assert_eq!(verdict.counts(), "rows 2, records 2, delivered 2");
    assert!(lag.is_over(), "it was not read until the leader caught up");
}

#[test]
fn rows_that_nobody_delivered_are_missing() {
    let scene = Scene::new();
    let aggregate = scene.aggregate(2);
    scene
        .start_and_confirm_one(&aggregate, "first")
        .terminate()
        .expect_code(0);
    let lost = insert_rows(&scene, &aggregate, &["a", "b", "c"]);
    advance_slot(&scene);
    let walpost = scene.start();
    scene.insert(&aggregate, "last");
    let verdict = verify(&scene);
    assert!(!verdict.ok);
    assert_eq!(
        verdict.counts(),
        "rows 5, records 2, delivered 2, missing 3"
    );
    let mut missing: Vec<_> = verdict
        .findings()
        .iter()
        .map(|finding| {
            assert_eq!(finding["finding"], "missing");
            assert_eq!(finding["topic"], format!("outbox.event.{aggregate}"));
            finding["id"].as_str().unwrap().to_owned()
        })
        .collect();
    missing.sort();
    let mut lost = lost;
    lost.sort();
    assert_eq!(missing, lost);

    // In text, and as many as were asked for; all of them in a file.
    let file = reaper::folder("verify").join("findings");
    let finished = scene
        .verify()
        .args(["--limit", "1", "--output"])
        .arg(&file)
        .finish()
        .expect_code(1)
        .expect_says(&["NOT OK", "and 2 more"]);
    assert_eq!(finished.stdout.matches("MISSING").count(), 1);
    let mut written: Vec<_> = fs::read_to_string(&file)
        .unwrap()
        .lines()
        .map(|line| {
            let finding: Value = serde_json::from_str(line).unwrap();
            finding["id"].as_str().unwrap().to_owned()
        })
        .collect();
    written.sort();
    assert_eq!(written, lost);
    walpost.terminate().expect_code(0);
}

#[test]
fn rows_that_were_skipped_are_missing_with_a_note() {
    let scene = Scene::new();
    let aggregate = scene.aggregate(1);
    let walpost = scene.start_and_confirm_one(&aggregate, "a");
    walpost.terminate().expect_code(0);
    wait_until("the slot to be free", || !scene.slot_is_active());
    scene.insert(&aggregate, "b");
    let end = scene.db.value("SELECT pg_current_wal_flush_lsn()").unwrap();
    let skip = scene.invoke("skip").args(["--yes", "--to", &end]);
    skip.args(["--kafka", &scene.broker.address()])
        .finish()
        .expect_code(0);
    assert!(
        !verify(&scene).notes().contains("were skipped"),
        "it may come"
    );
    let walpost = scene.start_and_confirm_one(&aggregate, "c");
    let verdict = verify(&scene);
    assert_eq!(
        verdict.counts(),
        "rows 3, records 2, delivered 2, missing 1"
    );
    let note = format!("{end} were skipped at ");
    assert!(verdict.notes().contains(&note), "{}", verdict.notes());
    walpost.terminate().expect_code(0);
}

#[test]
fn rows_of_a_topic_that_is_not_there_are_missing_when_nothing_can_come() {
    let scene = Scene::new();
    let slot = scene.slot();
    let nowhere = format!("{}.nowhere", scene.name);
    insert_rows(&scene, &nowhere, &["a"]);
    let verdict = verify(&scene);
    assert_eq!(verdict.counts(), "rows 1, pending 1");
    scene
        .db
        .run(&format!("SELECT pg_drop_replication_slot('{slot}')"));
    let verdict = verify(&scene);
    assert_eq!(verdict.counts(), "rows 1, missing 1");
    let notes = verdict.notes();
    for text in [&nowhere, &slot] {
        let told = format!("{text}\\\" does not exist");
        assert!(notes.contains(&told), "{told}: {notes}");
    }
}

in_both_modes! { event_that_is_there_twice_is_told_with_its_places }

fn event_that_is_there_twice_is_told_with_its_places(exactly_once: bool) {
    let scene = Scene::new().in_mode(exactly_once);
    let aggregate = scene.aggregate(1);
    let walpost = scene.start();
    let ids = insert_rows(&scene, &aggregate, &["a", "b", "c"]);
    let records = scene.wait_for_records(3);
    produce_again(&scene, &records[1]);
    produce_again(&scene, &records[1]);
    produce_again(&scene, &records[2]);
    let verdict = verify_with(&scene, &["--forbid-repeats"]);
    assert!(!verdict.ok);
    // They are behind a later one, but they are no first ones.
    assert_eq!(
        verdict.counts(),
        "rows 3, records 6, delivered 3, repeated 2"
    );
    let findings = verdict.findings();
    let of = |id: &String| {
        let found = findings.iter().find(|finding| finding["id"] == **id);
        found.expect("a finding").clone()
    };
    let (twice, thrice) = (of(&ids[2]), of(&ids[1]));
    assert_eq!(twice["copies"], 2);
    assert_eq!(thrice["copies"], 3);
    assert_eq!(thrice["at"][0]["offset"], records[1].offset);
    assert_eq!(thrice["at"].as_array().unwrap().len(), 3);
    let verdict = verify(&scene);
    assert_eq!(
        verdict.ok, !exactly_once,
        "what the mode allows is no error"
    );
    assert_eq!(verdict.findings().len(), 2, "told all the same");
    let verdict = verify_with(&scene, &["--allow-repeats"]);
    assert!(verdict.ok);
    assert_eq!(verdict.findings().len(), 2, "told all the same");
    walpost.terminate().expect_code(0);
}

#[test]
fn what_is_sent_again_after_a_crash_is_repeated_and_in_order() {
    let scene = Scene::new();
    let aggregate = scene.aggregate(2);
    let mut walpost = scene.start();
    let load = scene.load(&[&aggregate]);
    for _ in 0..3 {
        load.wait_for_transactions(50);
        scene.kill(walpost);
        walpost = scene.start();
    }
    load.stop();
    let verdict = verify(&scene);
    let counts = &verdict.pipeline["counts"];
    assert_eq!(counts["delivered"], counts["rows"]);
    assert!(verdict.ok, "{}", verdict.counts());
    walpost.terminate().expect_code(0);
}

#[test]
fn record_that_is_behind_a_later_one_is_out_of_order() {
    let scene = Scene::new();
    let aggregate = scene.aggregate(2);
    let ids = insert_rows(&scene, &aggregate, &["a", "b", "c", "d", "e"]);
    let record = |number: usize, commit, index| {
        let key = ["a", "b", "c", "d", "e"][number];
        Forged::new(&aggregate, key, &ids[number]).at(commit, index)
    };
    for forged in [
        record(0, 0x10, 0),
        record(1, 0x20, 1),
        record(2, 0x20, 0),
        record(3, 0x30, 0),
        // Of another cluster, say: it is not in the table, and says nothing about the order.
        Forged::new(&aggregate, "x", "stranger").at(0x900, 0),
        record(4, 0x28, 0),
    ] {
        forged.produce(scene.broker);
    }
    let verdict = verify(&scene);
    assert!(!verdict.ok);
    assert_eq!(
        verdict.counts(),
        "rows 5, records 6, delivered 5, out_of_order 2, unexpected 1"
    );
    let findings = verdict.findings();
    assert_eq!(findings[0]["finding"], "out-of-order");
    assert_eq!(findings[0]["id"], ids[2]);
    assert_eq!(findings[0]["at"]["offset"], 2);
    assert_eq!(findings[0]["position"], "00000000/00000020:0000000000");
    assert_eq!(findings[0]["behind"], "00000000/00000020:0000000001");
    assert_eq!(findings[1]["id"], ids[4]);
}

#[test]
fn transaction_without_some_of_its_events_has_a_gap() {
    let scene = Scene::new();
    let aggregate = scene.aggregate(1);
    let ids = insert_rows(&scene, &aggregate, &["a", "b", "c", "d", "e"]);
    for (number, (commit, index)) in [(0x10, 0), (0x20, 1), (0x20, 4), (0x30, 0), (0x30, 1)]
        .into_iter()
        .enumerate()
    {
        let key = ["a", "b", "c", "d", "e"][number];
        let record = Forged::new(&aggregate, key, &ids[number]);
        record.at(commit, index).produce(scene.broker);
    }
    // Nobody knows what a transaction had of which the table has nothing.
    Forged::new(&aggregate, "x", "stranger")
        .at(0x15, 3)
        .produce(scene.broker);
    // Of rows that were copied at a start that began anew, a part is there twice.
    scene.db.run(&format!(
        "INSERT INTO walpost.journal (pipeline, slot, action, to_lsn, detail)
         VALUES ('{}', '{}', 'snapshot', '0/41', '{{}}')",
        scene.name,
        scene.slot()
    ));
    Forged::new(&aggregate, "a", &ids[0])
        .at(0x40, 7)
        .produce(scene.broker);
    let verdict = verify_with(&scene, &["--limit", "9"]);
    let gaps: Vec<_> = verdict
        .findings()
        .into_iter()
        .filter(|finding| finding["finding"] == "gap")
        .map(|finding| finding.to_string())
        .collect();
    let gap = r#"{"finding":"gap","commit":"0/20","missing":[[0,0],[2,3]]}"#;
    assert_eq!(gaps, [gap]);
    assert_eq!(verdict.pipeline["counts"]["gaps"], 1);
    assert!(!verdict.ok);
}

#[test]
fn record_in_another_topic_or_with_another_key_is_misplaced() {
    let scene = Scene::new();
    let (aggregate, other) = (scene.aggregate(1), scene.aggregate(1));
    let ids = insert_rows(&scene, &aggregate, &["a", "b", "c"]);
    Forged::new(&aggregate, "a", &ids[0]).produce(scene.broker);
    Forged::new(&aggregate, "z", &ids[1]).produce(scene.broker);
    Forged::new(&other, "c", &ids[2]).produce(scene.broker);
    let verdict = verify(&scene);
    assert_eq!(
        verdict.counts(),
        "rows 3, records 2, delivered 2, pending 1, misplaced 1"
    );
    assert_eq!(verdict.findings()[0]["differs"], "key");
    let other = format!("outbox.event.{other}");
    let verdict = verify_with(&scene, &["--also-topic", &other]);
    assert_eq!(
        verdict.counts(),
        "rows 3, records 3, delivered 3, misplaced 2"
    );
    let findings = verdict.findings();
    let found = findings.iter().find(|finding| finding["id"] == ids[2]);
    let found = found.expect("a finding");
    assert_eq!(found["differs"], "topic");
    assert_eq!(found["at"]["topic"], other);
    assert_eq!(found["topic"], format!("outbox.event.{aggregate}"));
}

#[test]
fn stranger_is_counted_and_an_error_only_where_that_is_asked() {
    let scene = Scene::new();
    let aggregate = scene.aggregate(1);
    let walpost = scene.start_and_confirm_one(&aggregate, "a");
    Forged::new(&aggregate, "a", "not-in-the-table")
        .at(0x10, 0)
        .produce(scene.broker);
    // Committed later than the table was read.
    Forged::new(&aggregate, "a", "not-yet-in-the-table")
        .at(u64::MAX >> 1, 0)
        .produce(scene.broker);
    scene.broker.produce(
        &format!("outbox.event.{aggregate}"),
        "k",
        "no header at all",
    );
    let verdict = verify(&scene);
    assert!(verdict.ok);
    assert_eq!(
        verdict.counts(),
        "rows 1, records 4, delivered 1, unexpected 2, newer 1"
    );
    assert_eq!(verdict.findings(), Vec::<Value>::new());
    let verdict = verify_with(&scene, &["--strict"]);
    assert!(!verdict.ok);
    let mut ids: Vec<_> = verdict
        .findings()
        .iter()
        .map(|finding| finding["id"].to_string())
        .collect();
    ids.sort();
    assert_eq!(ids, ["\"not-in-the-table\"", "null"]);
    walpost.terminate().expect_code(0);
}

#[test]
fn what_is_sent_again_on_purpose_is_counted_apart() {
    let scene = Scene::new();
    let aggregate = scene.aggregate(1);
    let ids = insert_rows(&scene, &aggregate, &["a", "b"]);
    let record = |number: usize| Forged::new(&aggregate, ["a", "b"][number], &ids[number]);
    record(0).at(0x20, 0).produce(scene.broker);
    record(0)
        .at(0x10, 0)
        .with("walpost-replay", "run-1")
        .produce(scene.broker);
    record(1)
        .with("walpost-replay", "run-1")
        .produce(scene.broker);
    let verdict = verify(&scene);
    assert!(verdict.ok);
    assert_eq!(
        verdict.counts(),
        "rows 2, records 3, delivered 2, replayed 2"
    );
}

in_both_modes! { what_is_not_confirmed_yet_is_pending }

fn what_is_not_confirmed_yet_is_pending(exactly_once: bool) {
    let scene = Scene::new().in_mode(exactly_once);
    let aggregate = scene.aggregate(1);
    let walpost = scene.start_and_confirm_one(&aggregate, "a");
    walpost.freeze();
    scene.insert(&aggregate, "b");
    let verdict = verify_with(&scene, &["--wait", "1s"]);
    assert!(verdict.ok);
    assert_eq!(
        verdict.counts(),
        "rows 2, records 1, delivered 1, pending 1"
    );
    assert!(verdict.notes().contains("longer than --wait"));
    walpost.thaw();
    // It waits for as long as it takes.
    assert_eq!(verify(&scene).counts(), "rows 2, records 2, delivered 2");
    walpost.terminate().expect_code(0);
    scene.insert(&aggregate, "c");
    wait_until("the slot to be free", || !scene.slot_is_active());
    let verdict = verify(&scene);
    assert!(verdict.ok);
    assert_eq!(verdict.pipeline["counts"]["pending"], 1);
    assert!(verdict.notes().contains("nobody reads it"));
}

#[test]
fn rows_are_chosen_by_their_time() {
    let scene = Scene::new();
    let aggregate = scene.aggregate(1);
    let old = |key: &str, at: &str| {
        scene.db.run(&format!(
            "INSERT INTO outbox (aggregatetype, aggregateid, type, payload, created_at)
             VALUES ('{aggregate}', '{key}', 't', '{{}}', {at})"
        ));
    };
    old("a", "'2020-01-01 12:00+00'");
    old("b", "now() - interval '2 days'");
    advance_slot(&scene);
    let walpost = scene.start_and_confirm_one(&aggregate, "c");
    assert_eq!(
        verify(&scene).counts(),
        "rows 3, records 1, delivered 1, missing 2"
    );
    let verdict = verify_with(&scene, &["--since", "1h"]);
    assert!(verdict.ok);
    assert_eq!(verdict.counts(), "rows 1, records 1, delivered 1");
    let verdict = verify_with(&scene, &["--since", "72h", "--until", "1h"]);
    assert!(!verdict.ok);
    assert_eq!(verdict.counts(), "rows 1, records 1, missing 1, outside 1");
    for (arguments, rows) in [
        (&["--until", "2020-01-01"][..], 0),
        (&["--until", "2020-01-01T12:00:01Z"], 1),
        (&["--since", "2020-01-01 12:00", "--until", "2020-01-02"], 1),
        (&["--since", "2020-01-01", "--time-column", "created_at"], 3),
    ] {
        let counts = &verify_with(&scene, arguments).pipeline["counts"];
        assert_eq!(counts["rows"], rows, "{arguments:?}");
    }
    walpost.terminate().expect_code(0);
}

#[test]
fn only_records_of_that_time_are_read() {
    let scene = Scene::new();
    let aggregate = scene.aggregate(2);
    let ids = insert_rows(&scene, &aggregate, &["a", "b"]);
    let mut old = Forged::new(&aggregate, "a", &ids[0]);
    old.timestamp = Some(1_577_880_000_000);
    old.produce(scene.broker);
    Forged::new(&aggregate, "b", &ids[1]).produce(scene.broker);
    assert_eq!(verify(&scene).counts(), "rows 2, records 2, delivered 2");
    let verdict = verify_with(&scene, &["--since", "1h"]);
    assert_eq!(
        verdict.counts(),
        "rows 2, records 1, delivered 1, pending 1"
    );
}

#[test]
fn records_of_transactions_that_were_aborted_or_are_open_are_not_seen() {
    let scene = Scene::new().exactly_once();
    let aggregate = scene.aggregate(1);
    let walpost = scene.start();
    let ids = insert_rows(&scene, &aggregate, &["a"]);
    scene.wait_for_records(1);
    let mut config = scene.broker.client();
    config.set("transactional.id", format!("{}-aborts", scene.name));
    let producer: BaseProducer = config.create().unwrap();
    producer.init_transactions(PATIENCE).unwrap();
    producer.begin_transaction().unwrap();
    Forged::new(&aggregate, "a", &ids[0]).send(&producer);
    producer.flush(PATIENCE).unwrap();
    producer.abort_transaction(PATIENCE).unwrap();
    assert_eq!(verify(&scene).counts(), "rows 1, records 1, delivered 1");

    producer.begin_transaction().unwrap();
    Forged::new(&aggregate, "a", &ids[0]).send(&producer);
    producer.flush(PATIENCE).unwrap();
    scene.insert(&aggregate, "b");
    scene.wait_until_confirmed();
    let verdict = verify_with(&scene, &["--wait", "1s"]);
    assert!(verdict.ok);
    assert_eq!(
        verdict.counts(),
        "rows 2, records 1, delivered 1, pending 1"
    );
    assert!(verdict.notes().contains("open transaction"));
    producer.abort_transaction(PATIENCE).unwrap();
    assert_eq!(verify(&scene).counts(), "rows 2, records 2, delivered 2");
    walpost.terminate().expect_code(0);
}

#[test]
fn rows_whose_records_were_removed_for_their_age_are_expired() {
    let scene = Scene::new();
    let aggregate = scene.aggregate(1);
    let topic = format!("outbox.event.{aggregate}");
    let walpost = scene.start();
    insert_rows(&scene, &aggregate, &["a", "b", "c"]);
    scene.wait_for_records(3);
    std::thread::sleep(Duration::from_millis(20));
    scene.insert(&aggregate, "d");
    scene.wait_for_records(4);
    scene.wait_until_confirmed();
    let remove = |before: i64| {
        let admin: AdminClient<DefaultClientContext> = scene.broker.client().create().unwrap();
        let mut list = TopicPartitionList::new();
        list.add_partition_offset(&topic, 0, Offset::Offset(before))
            .unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime
            .block_on(admin.delete_records(&list, &AdminOptions::new()))
            .expect("the broker removes them");
    };
    // A transaction that was cut has no gap.
    remove(1);
    let verdict = verify(&scene);
    assert!(verdict.ok, "{}", verdict.counts());
    assert_eq!(
        verdict.counts(),
        "rows 4, records 3, delivered 3, expired 1"
    );
    assert!(verdict.notes().contains("has lost its first records"));
    remove(3);
    let verdict = verify(&scene);
    assert_eq!(
        verdict.counts(),
        "rows 4, records 1, delivered 1, expired 3"
    );
    remove(4);
    assert_eq!(verify(&scene).counts(), "rows 4, expired 4");
    walpost.terminate().expect_code(0);
}

#[test]
fn values_have_the_text_that_the_log_has() {
    let scene = Scene::with_table(
        "CREATE TYPE mood AS ENUM ('sad', 'glad');
         CREATE TABLE outbox (id int8 PRIMARY KEY, \"order\" bool, \"A\"\"b\" char(5), at timestamptz,
             raw bytea, mood mood, shard int, payload text)",
    );
    for setting in [
        "timezone = 'Asia/Kolkata'",
        "bytea_output = escape",
        "datestyle = 'German'",
    ] {
        let name = &scene.name;
        scene
            .db
            .run(&format!("ALTER DATABASE {name} SET {setting}"));
    }
    let topic = format!("{}-t", scene.name);
    scene.topic(&topic, 2, &[]);
    let walpost = scene.start_with_file(&format!(
        "topic = '{}-{{order}}'
         key = '{{A\"b}}|{{at}}|{{raw}}|{{mood}}'
         headers = {{ event = '{{id}}' }}
         partition = 'shard'",
        scene.name
    ));
    scene.db.run(
        "INSERT INTO outbox SELECT n, true, 'x', now(), '\\x00ff', 'glad', n % 2, repeat('p', 1000)
         FROM generate_series(1, 10) AS n",
    );
    scene.wait_for_records(10);
    scene.wait_until_confirmed();
    let config = format!(
        "[[pipeline]]\nname = '{0}'\ntopic = '{0}-{{order}}'\nkey = '{{A\"b}}|{{at}}|{{raw}}|{{mood}}'\n\
         headers = {{ event = '{{id}}' }}\npartition = 'shard'\n",
        scene.name
    );
    let file = reaper::folder("config").join("walpost.toml");
    fs::write(&file, &config).unwrap();
    let file = file.display().to_string();
    let verdict = verify_with(&scene, &["--config", &file]);
    assert_eq!(verdict.counts(), "rows 10, records 10, delivered 10");
    // Rows without a topic, and with another partition than their record's.
    scene.db.run("UPDATE outbox SET \"order\" = NULL WHERE id = 1; UPDATE outbox SET shard = 1 - shard WHERE id = 2");
    let verdict = verify_with(&scene, &["--config", &file]);
    assert_eq!(
        verdict.counts(),
        "rows 10, records 10, delivered 9, misplaced 1, unroutable 1, unexpected 1"
    );
    walpost.terminate().expect_code(0);
}

#[test]
fn rows_of_partitions_are_found_too() {
    let scene = Scene::bare();
    scene.init().arg("--partitioned").finish().expect_code(0);
    let aggregate = scene.aggregate(1);
    let walpost = scene.start();
    scene.insert(&aggregate, "a");
    scene.db.run(&format!(
        "INSERT INTO outbox (aggregatetype, aggregateid, type, created_at)
         VALUES ('{aggregate}', 'b', 't', now() + interval '1 day'), ('{aggregate}', 'c', 't', 'infinity')"
    ));
    scene.wait_for_records(3);
    assert_eq!(verify(&scene).counts(), "rows 3, records 3, delivered 3");
    walpost.terminate().expect_code(0);
}

/// The most memory that a run took, in bytes.
fn most_memory(scene: &Scene<'_>, arguments: &[&str]) -> (String, u64) {
    let mut walpost = scene.verify().arg("--json").args(arguments).start();
    let status = format!("/proc/{}/status", walpost.process_id());
    let mut most = 0;
    while walpost.is_running() {
        let status = fs::read_to_string(&status).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kilobytes = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
        most = most.max(kilobytes.unwrap_or(0) * 1024);
    }
    let finished = walpost.finish();
    (Verdict::of(&finished).counts(), most)
}

#[test]
fn memory_is_bounded_and_the_findings_are_the_same() {
    const ROWS: usize = 200_000;
    let scene = Scene::new();
    let aggregate = scene.aggregate(3);
    let walpost = scene.start();
    scene.db.run(&scene.events().many(&aggregate, ROWS, "NULL"));
    scene.wait_for_records(ROWS);
    scene.wait_until_confirmed();
    Forged::new(&aggregate, "x", "stranger").produce(scene.broker);
    let (in_memory, much) = most_memory(&scene, &["--memory", "1GiB"]);
    let (on_disk, little) = most_memory(&scene, &["--memory", "4MiB"]);
    let records = ROWS + 1;
    assert_eq!(
        on_disk,
        format!("rows {ROWS}, records {records}, delivered {ROWS}, unexpected 1")
    );
    assert_eq!(on_disk, in_memory);
    assert!(
        little + (20 << 20) < much,
        "{little} bytes with 4MiB, {much} without a bound"
    );
    walpost.terminate().expect_code(0);
}

#[test]
fn what_can_not_be_done_is_said_and_no_server_is_asked() {
    let nowhere = [
        "verify",
        "--postgres",
        "host=/nowhere user=u dbname=d",
        "--kafka",
        "127.0.0.1:9",
    ];
    for (arguments, says) in [
        (&["--since", "soon"][..], &["--since", "soon"][..]),
        (&["--until", "12"], &["--until", "12"]),
        (
            &["--since", "2026-01-02", "--until", "2026-01-01"],
            &["--since", "--until", "earlier"],
        ),
        (&["--memory", "much"], &["--memory", "much"]),
        (&["--memory", "1MiB"], &["--memory", "4MiB"]),
        (&["--wait", "10"], &["--wait"]),
        (&["--limit", "few"], &["--limit"]),
        (&["--strict", "--since", "1h"], &["--strict", "--since"]),
        (&["--output", "/nowhere/file"], &["--output"]),
        (
            &["--outbox", "messages"],
            &["outbox is of messages", "table"],
        ),
    ] {
        Invocation::new(nowhere)
            .args(arguments)
            .finish()
            .expect_code(2)
            .expect_says(says);
    }
    Invocation::new(nowhere)
        .finish()
        .expect_code(1)
        .expect_says(&["/nowhere"]);
}

#[test]
fn what_the_table_has_not_is_said() {
    let scene = Scene::bare();
    scene.verify().finish().expect_code(3).expect_says(&[
        "public.outbox",
        "does not exist",
        "walpost init",
    ]);
    let scene = Scene::with_table(
        "CREATE TABLE outbox (id uuid, aggregatetype text, aggregateid text, type text, payload jsonb)",
    );
    scene
        .verify()
        .args(["--since", "1h"])
        .finish()
        .expect_code(2)
        .expect_says(&["created_at", "--time-column"]);
    scene
        .verify()
        .args(["--time-column", "type"])
        .finish()
        .expect_code(2)
        .expect_says(&["\"type\"", "neither timestamptz nor timestamp"]);
    scene
        .verify()
        .args(["--header", "type={type}"])
        .finish()
        .expect_code(2)
        .expect_says(&["no header has the event's id"]);
    scene
        .verify()
        .args(["--topic", "{tenant}"])
        .finish()
        .expect_code(3)
        .expect_says(&["tenant", "no column"]);
    // Without rows there is nothing to find.
    scene.verify().finish().expect_code(0);
}

#[test]
fn broker_that_does_not_answer_is_named() {
    let scene = Scene::new();
    scene.insert("a", "k");
    scene
        .invoke("verify")
        .args(["--kafka", "127.0.0.1:9"])
        .finish()
        .expect_code(1)
        .expect_says(&["127.0.0.1:9"]);
    let log = Scene::of(Outbox::Messages);
    log.verify()
        .finish()
        .expect_code(2)
        .expect_says(&["no table"]);
}
