//! Records that should not exist, or that are in the wrong place.

use serde_json::Value;

use super::{ForgedRecord, insert_rows, produce_copy, verify, verify_with};
use crate::support::fixture::Fixture;

in_both_modes! { verify_reports_a_duplicate_event_with_its_locations }

fn verify_reports_a_duplicate_event_with_its_locations(exactly_once: bool) {
    let fixture = Fixture::new().in_mode(exactly_once);
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start();
    let ids = insert_rows(&fixture, &aggregate, &["a", "b", "c"]);
    let records = fixture.wait_for_records(3);
    produce_copy(&fixture, &records[1]);
    produce_copy(&fixture, &records[1]);
    produce_copy(&fixture, &records[2]);
    let verdict = verify_with(&fixture, &["--forbid-repeats"]);
    assert!(!verdict.ok);
    // The copies of the second event follow a record with a later position, but repetitions don't
    // count as out of order.
    assert_eq!(
        verdict.counts(),
        "rows 3, records 6, delivered 3, repeated 2"
    );
    let findings = verdict.findings();
    let findings_of = |id: &String| {
        let found = findings.iter().find(|finding| finding["id"] == **id);
        found.expect("a finding").clone()
    };
    let (twice, thrice) = (findings_of(&ids[2]), findings_of(&ids[1]));
    assert_eq!(twice["copies"], 2);
    assert_eq!(thrice["copies"], 3);
    assert_eq!(thrice["at"][0]["offset"], records[1].offset);
    assert_eq!(thrice["at"].as_array().unwrap().len(), 3);
    let verdict = verify(&fixture);
    assert_eq!(
        verdict.ok, !exactly_once,
        "repetitions that the mode allows are not an error"
    );
    assert_eq!(verdict.findings().len(), 2, "it is reported anyway");
    let verdict = verify_with(&fixture, &["--allow-repeats"]);
    assert!(verdict.ok);
    assert_eq!(verdict.findings().len(), 2, "it is reported anyway");
    walpost.terminate().expect_code(0);
}

#[test]
fn verify_reports_out_of_order_records() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(2);
    let ids = insert_rows(&fixture, &aggregate, &["a", "b", "c", "d", "e"]);
    let record = |number: usize, commit, index| {
        let key = ["a", "b", "c", "d", "e"][number];
        ForgedRecord::new(&aggregate, key, &ids[number]).at(commit, index)
    };
    for forged in [
        record(0, 0x10, 0),
        record(1, 0x20, 1),
        record(2, 0x20, 0),
        record(3, 0x30, 0),
        // A record without a row in the table, for example one from a different cluster, does not
        // affect the order.
        ForgedRecord::new(&aggregate, "x", "foreign").at(0x900, 0),
        record(4, 0x28, 0),
    ] {
        forged.produce(fixture.broker);
    }
    let verdict = verify(&fixture);
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
fn verify_reports_events_missing_from_the_middle_of_a_transaction() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    let ids = insert_rows(&fixture, &aggregate, &["a", "b", "c", "d", "e"]);
    for (number, (commit, index)) in [(0x10, 0), (0x20, 1), (0x20, 4), (0x30, 0), (0x30, 1)]
        .into_iter()
        .enumerate()
    {
        let key = ["a", "b", "c", "d", "e"][number];
        let record = ForgedRecord::new(&aggregate, key, &ids[number]);
        record.at(commit, index).produce(fixture.broker);
    }
    // The table contains no row from the transaction of the following record, so `verify` can't
    // tell how many events the transaction had.
    ForgedRecord::new(&aggregate, "x", "foreign")
        .at(0x15, 3)
        .produce(fixture.broker);
    // If a snapshot was restarted, some of the copied rows were sent twice.
    fixture.db.run(&format!(
        "INSERT INTO walpost.journal (pipeline, slot, action, to_lsn, detail)
         VALUES ('{}', '{}', 'snapshot', '0/41', '{{}}')",
        fixture.name,
        fixture.slot()
    ));
    ForgedRecord::new(&aggregate, "a", &ids[0])
        .at(0x40, 7)
        .produce(fixture.broker);
    let verdict = verify_with(&fixture, &["--limit", "9"]);
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
fn verify_reports_a_record_with_the_wrong_topic_or_key_as_misplaced() {
    let fixture = Fixture::new();
    let (aggregate, other) = (fixture.aggregate(1), fixture.aggregate(1));
    let ids = insert_rows(&fixture, &aggregate, &["a", "b", "c"]);
    ForgedRecord::new(&aggregate, "a", &ids[0]).produce(fixture.broker);
    ForgedRecord::new(&aggregate, "z", &ids[1]).produce(fixture.broker);
    ForgedRecord::new(&other, "c", &ids[2]).produce(fixture.broker);
    let verdict = verify(&fixture);
    assert_eq!(
        verdict.counts(),
        "rows 3, records 2, delivered 2, pending 1, misplaced 1"
    );
    assert_eq!(verdict.findings()[0]["differs"], "key");
    let other = format!("outbox.event.{other}");
    let verdict = verify_with(&fixture, &["--also-topic", &other]);
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
fn verify_counts_unexpected_records_as_errors_only_on_request() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_and_confirm_one(&aggregate, "a");
    ForgedRecord::new(&aggregate, "a", "not-in-the-table")
        .at(0x10, 0)
        .produce(fixture.broker);
    // Imitate the record of a row that was committed after `verify` read the table.
    ForgedRecord::new(&aggregate, "a", "not-yet-in-the-table")
        .at(u64::MAX >> 1, 0)
        .produce(fixture.broker);
    fixture.broker.produce(
        &format!("outbox.event.{aggregate}"),
        "k",
        "no header at all",
    );
    let verdict = verify(&fixture);
    assert!(verdict.ok);
    assert_eq!(
        verdict.counts(),
        "rows 1, records 4, delivered 1, unexpected 2, newer 1"
    );
    assert_eq!(verdict.findings(), Vec::<Value>::new());
    let verdict = verify_with(&fixture, &["--strict"]);
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

/// Any producer can send a record whose header names are not valid UTF-8.
#[test]
fn reads_records_whose_headers_have_names_that_are_not_utf8() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    let ids = insert_rows(&fixture, &aggregate, &["a"]);
    let position = "00000000/00000010:0000000000";
    fixture.broker.produce_with_headers(
        &format!("outbox.event.{aggregate}"),
        "a",
        &[
            (b"\xff\xfe", b"x"),
            (b"id", ids[0].as_bytes()),
            (b"walpost-position", position.as_bytes()),
        ],
    );
    let verdict = verify(&fixture);
    assert!(verdict.ok);
    assert_eq!(verdict.counts(), "rows 1, records 1, delivered 1");
    let replay = fixture.replay(&["--yes", "--from", position]).finish();
    replay.expect_code(0);
    let verdict = verify(&fixture);
    assert_eq!(
        verdict.counts(),
        "rows 1, records 2, delivered 1, replayed 1"
    );
}
