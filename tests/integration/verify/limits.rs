//! Limits on which rows and records `verify` reads, and on its memory use.

use super::{ForgedRecord, VerifyResult, advance_slot, insert_rows, verify, verify_with};
use crate::support::fixture::Fixture;

#[test]
fn verify_selects_rows_by_time() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    let old = |key: &str, at: &str| {
        fixture.db.run(&format!(
            "INSERT INTO outbox (aggregatetype, aggregateid, type, payload, created_at)
             VALUES ('{aggregate}', '{key}', 't', '{{}}', {at})"
        ));
    };
    old("a", "'2020-01-01 12:00+00'");
    old("b", "now() - interval '2 days'");
    advance_slot(&fixture);
    let walpost = fixture.start_and_confirm_one(&aggregate, "c");
    assert_eq!(
        verify(&fixture).counts(),
        "rows 3, records 1, delivered 1, missing 2"
    );
    let verdict = verify_with(&fixture, &["--since", "1h"]);
    assert!(verdict.ok);
    assert_eq!(verdict.counts(), "rows 1, records 1, delivered 1");
    let verdict = verify_with(&fixture, &["--since", "72h", "--until", "1h"]);
    assert!(!verdict.ok);
    assert_eq!(verdict.counts(), "rows 1, records 1, missing 1, outside 1");
    for (arguments, rows) in [
        (&["--until", "2020-01-01"][..], 0),
        (&["--until", "2020-01-01T12:00:01Z"], 1),
        (&["--since", "2020-01-01 12:00", "--until", "2020-01-02"], 1),
        (&["--since", "2020-01-01", "--time-column", "created_at"], 3),
    ] {
        let counts = &verify_with(&fixture, arguments).pipeline["counts"];
        assert_eq!(counts["rows"], rows, "{arguments:?}");
    }
    walpost.terminate().expect_code(0);
}

#[test]
fn verify_reads_only_records_in_the_time_range() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(2);
    let ids = insert_rows(&fixture, &aggregate, &["a", "b"]);
    let mut old = ForgedRecord::new(&aggregate, "a", &ids[0]);
    old.timestamp = Some(1_577_880_000_000);
    old.produce(fixture.broker);
    ForgedRecord::new(&aggregate, "b", &ids[1]).produce(fixture.broker);
    assert_eq!(verify(&fixture).counts(), "rows 2, records 2, delivered 2");
    let verdict = verify_with(&fixture, &["--since", "1h"]);
    assert_eq!(
        verdict.counts(),
        "rows 2, records 1, delivered 1, pending 1"
    );
}

/// Runs `verify`, and returns its counts and its peak memory use in bytes.
fn peak_memory(fixture: &Fixture<'_>, arguments: &[&str]) -> (String, u64) {
    let mut walpost = fixture.verify().arg("--json").args(arguments).start();
    let peak = walpost.peak_memory_at_exit();
    let finished = walpost.finish();
    (VerifyResult::parse(&finished).counts(), peak)
}

#[test]
fn verify_reports_the_same_findings_with_limited_memory() {
    const ROWS: usize = 200_000;
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(3);
    let walpost = fixture.start();
    fixture
        .db
        .run(&fixture.events().insert_many(&aggregate, ROWS, "NULL"));
    fixture.wait_for_records(ROWS);
    fixture.wait_until_confirmed();
    ForgedRecord::new(&aggregate, "x", "foreign").produce(fixture.broker);
    let (in_memory, much) = peak_memory(&fixture, &["--memory", "1GiB"]);
    let (on_disk, little) = peak_memory(&fixture, &["--memory", "4MiB"]);
    let records = ROWS + 1;
    assert_eq!(
        on_disk,
        format!("rows {ROWS}, records {records}, delivered {ROWS}, unexpected 1")
    );
    assert_eq!(on_disk, in_memory);
    assert!(
        little + (20 << 20) < much,
        "{little} bytes with 4MiB, {much} without a limit"
    );
    walpost.terminate().expect_code(0);
}
