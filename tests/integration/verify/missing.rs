//! Tests how `verify` reports rows for which the topic has no record: an undelivered row is missing
//! or still pending, and the record of a delivered row may have expired.

use std::fs;
use std::time::Duration;

use rdkafka::admin::{AdminClient, AdminOptions};
use rdkafka::client::DefaultClientContext;
use rdkafka::producer::{BaseProducer, Producer};
use rdkafka::{Offset, TopicPartitionList};
use serde_json::Value;

use super::{ForgedRecord, advance_slot, insert_rows, verify, verify_with};
use crate::support::fixture::Fixture;
use crate::support::reaper;
use crate::support::wait::{WAIT_TIMEOUT, wait_until};

#[test]
fn verify_reports_undelivered_rows_as_missing() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(2);
    fixture
        .start_and_confirm_one(&aggregate, "first")
        .terminate()
        .expect_code(0);
    let lost = insert_rows(&fixture, &aggregate, &["a", "b", "c"]);
    advance_slot(&fixture);
    let walpost = fixture.start();
    fixture.insert(&aggregate, "last");
    let verdict = verify(&fixture);
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

    // Standard output contains only the requested number of findings, but the file named by
    // `--output` contains all of them.
    let file = reaper::folder("verify").join("findings");
    let finished = fixture
        .verify()
        .args(["--limit", "1", "--output"])
        .arg(&file)
        .finish()
        .expect_code(1)
        .expect_mentions(&["NOT OK", "and 2 more"]);
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
fn verify_reports_skipped_rows_as_missing_and_notes_that_they_were_skipped() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_and_confirm_one(&aggregate, "a");
    walpost.terminate().expect_code(0);
    wait_until("the slot to be free", || !fixture.slot_is_active());
    fixture.insert(&aggregate, "b");
    let end = fixture
        .db
        .value("SELECT pg_current_wal_flush_lsn()")
        .unwrap();
    fixture.skip(&end).arg("--yes").finish().expect_code(0);
    assert!(
        !verify(&fixture).notes().contains("were skipped"),
        "the event may still be delivered"
    );
    let walpost = fixture.start_and_confirm_one(&aggregate, "c");
    let verdict = verify(&fixture);
    assert_eq!(
        verdict.counts(),
        "rows 3, records 2, delivered 2, missing 1"
    );
    let note = format!("{end} were skipped at ");
    assert!(verdict.notes().contains(&note), "{}", verdict.notes());
    walpost.terminate().expect_code(0);
}

#[test]
fn verify_reports_rows_for_a_nonexistent_topic_as_missing_if_no_slot_remains() {
    let fixture = Fixture::new();
    let slot = fixture.slot();
    let nowhere = format!("{}.nowhere", fixture.name);
    insert_rows(&fixture, &nowhere, &["a"]);
    let verdict = verify(&fixture);
    assert_eq!(verdict.counts(), "rows 1, pending 1");
    fixture.db.run(&format!(
        "SELECT pg_catalog.pg_drop_replication_slot('{slot}')"
    ));
    let verdict = verify(&fixture);
    assert_eq!(verdict.counts(), "rows 1, missing 1");
    let notes = verdict.notes();
    for text in [&nowhere, &slot] {
        let message = format!("{text}\\\" does not exist");
        assert!(notes.contains(&message), "{message}: {notes}");
    }
}

in_both_modes! { verify_reports_unconfirmed_rows_as_pending }

fn verify_reports_unconfirmed_rows_as_pending(exactly_once: bool) {
    let fixture = Fixture::new().in_mode(exactly_once);
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_and_confirm_one(&aggregate, "a");
    walpost.freeze();
    fixture.insert(&aggregate, "b");
    let verdict = verify_with(&fixture, &["--wait", "1s"]);
    assert!(verdict.ok);
    assert_eq!(
        verdict.counts(),
        "rows 2, records 1, delivered 1, pending 1"
    );
    assert!(verdict.notes().contains("the --wait limit was reached"));
    walpost.thaw();
    // `verify` returns once the row has been delivered.
    assert_eq!(verify(&fixture).counts(), "rows 2, records 2, delivered 2");
    walpost.terminate().expect_code(0);
    fixture.insert(&aggregate, "c");
    wait_until("the slot to be free", || !fixture.slot_is_active());
    let verdict = verify(&fixture);
    assert!(verdict.ok);
    assert_eq!(verdict.pipeline["counts"]["pending"], 1);
    assert!(verdict.notes().contains("no process is reading the slot"));
}

#[test]
fn verify_ignores_records_of_aborted_and_open_transactions() {
    let fixture = Fixture::new().exactly_once();
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start();
    let ids = insert_rows(&fixture, &aggregate, &["a"]);
    fixture.wait_for_records(1);
    let mut config = fixture.broker.client();
    config.set("transactional.id", format!("{}-aborts", fixture.name));
    let producer: BaseProducer = config.create().unwrap();
    producer.init_transactions(WAIT_TIMEOUT).unwrap();
    producer.begin_transaction().unwrap();
    ForgedRecord::new(&aggregate, "a", &ids[0]).send(&producer);
    producer.flush(WAIT_TIMEOUT).unwrap();
    producer.abort_transaction(WAIT_TIMEOUT).unwrap();
    assert_eq!(verify(&fixture).counts(), "rows 1, records 1, delivered 1");

    producer.begin_transaction().unwrap();
    ForgedRecord::new(&aggregate, "a", &ids[0]).send(&producer);
    producer.flush(WAIT_TIMEOUT).unwrap();
    fixture.insert(&aggregate, "b");
    fixture.wait_until_confirmed();
    let verdict = verify_with(&fixture, &["--wait", "1s"]);
    assert!(verdict.ok);
    assert_eq!(
        verdict.counts(),
        "rows 2, records 1, delivered 1, pending 1"
    );
    assert!(verdict.notes().contains("open transaction"));
    producer.abort_transaction(WAIT_TIMEOUT).unwrap();
    assert_eq!(verify(&fixture).counts(), "rows 2, records 2, delivered 2");
    walpost.terminate().expect_code(0);
}

#[test]
fn verify_reports_rows_whose_records_have_expired() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    let topic = format!("outbox.event.{aggregate}");
    let walpost = fixture.start();
    insert_rows(&fixture, &aggregate, &["a", "b", "c"]);
    fixture.wait_for_records(3);
    std::thread::sleep(Duration::from_millis(20));
    fixture.insert(&aggregate, "d");
    fixture.wait_for_records(4);
    fixture.wait_until_confirmed();
    let remove = |before: i64| {
        let admin: AdminClient<DefaultClientContext> = fixture.broker.client().create().unwrap();
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
    // If the first records of a transaction were removed from the topic, the transaction must not
    // be reported as having a gap.
    remove(1);
    let verdict = verify(&fixture);
    assert!(verdict.ok, "{}", verdict.counts());
    assert_eq!(
        verdict.counts(),
        "rows 4, records 3, delivered 3, expired 1"
    );
    assert!(verdict.notes().contains("the first records of topic"));
    remove(3);
    let verdict = verify(&fixture);
    assert_eq!(
        verdict.counts(),
        "rows 4, records 1, delivered 1, expired 3"
    );
    remove(4);
    assert_eq!(verify(&fixture).counts(), "rows 4, expired 4");
    walpost.terminate().expect_code(0);
}
