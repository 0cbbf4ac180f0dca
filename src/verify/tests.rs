//! Tests the findings for given rows and records.

use super::context::{Place, Topic};
use super::entry::{Entry, EntryKind, Record, Row};
use super::*;
use crate::model::lsn::Position;

/// Topic numbers, which are indices into the list of topics.
const ORDERS: u32 = 0;
const BILLS: u32 = 1;
/// Partition numbers, which are indices into the list of partitions.
const ORDERS_0: u32 = 0;
const ORDERS_1: u32 = 1;
const BILLS_0: u32 = 2;

/// The rows and records of a test.
struct Fixture {
    context: VerifyContext,
    reports_unexpected: bool,
    rows: Vec<(String, Row)>,
    records: Vec<(String, Record)>,
}

/// The result of a comparison.
#[derive(Debug, PartialEq, Eq)]
struct Verified {
    /// The findings, sorted because findings for different events have no defined order.
    findings: Vec<String>,
    counts: Counts,
    /// The records that must be in order.
    firsts: Vec<u64>,
}

fn position(commit: u64, index: u64) -> Position {
    Position {
        commit: Lsn(commit),
        index,
    }
}

impl Fixture {
    /// Creates a fixture without rows or records, in which all rows are expected to have been
    /// delivered. A row without a record is therefore missing.
    fn new() -> Self {
        let topic = |name: &str| Topic {
            name: name.to_owned(),
            is_hidden: false,
            expired_before: None,
        };
        let place = |(topic, partition)| Place { topic, partition };
        Self {
            context: VerifyContext {
                dead_letters: DeadLetters::default(),
                topics: ["orders", "bills"].map(topic).to_vec(),
                places: [(ORDERS, 0), (ORDERS, 1), (BILLS, 0)].map(place).to_vec(),
                is_range: false,
                snapshot_before: Lsn(1000),
                delivered: End::Reached,
                complete_range: CompleteRange {
                    after: Lsn::ZERO,
                    before: Lsn(u64::MAX),
                },
                copies: Vec::new(),
            },
            reports_unexpected: true,
            rows: Vec::new(),
            records: Vec::new(),
        }
    }

    fn row(&mut self, id: &str, topic: u32) -> &mut Row {
        let row = Row {
            topic,
            partition: None,
            key: 7,
            created: None,
        };
        self.rows.push((id.to_owned(), row));
        &mut self.rows.last_mut().expect("one").1
    }

    /// Adds a record at the end of the partition `place`.
    fn record(&mut self, id: &str, place: u32, position: Position) -> &mut Record {
        let before = self.records.iter();
        let before = before.filter(|(_, record)| record.place == place);
        let record = Record {
            place,
            offset: i64::try_from(before.count()).expect("few"),
            key: 7,
            position: Some(position),
            is_replay: false,
            number: self.records.len() as u64,
        };
        self.records.push((id.to_owned(), record));
        &mut self.records.last_mut().expect("one").1
    }

    /// Adds a record that was sent by a replay.
    fn replay(&mut self, id: &str, place: u32) {
        let record = self.record(id, place, position(0, 0));
        record.position = None;
        record.is_replay = true;
    }

    /// Adds a row for each event, and adds the event's record to the first partition.
    fn delivered(&mut self, events: &[(&str, Position)]) {
        for (id, position) in events {
            self.row(id, ORDERS);
            self.record(id, ORDERS_0, *position);
        }
    }

    fn verified(&self) -> Verified {
        let on_disk = self.verified_with(0);
        assert_eq!(on_disk, self.verified_with(1 << 20));
        on_disk
    }

    fn verified_with(&self, memory: u64) -> Verified {
        let mut findings = Vec::new();
        let mut on_finding = |finding: &Finding| {
            findings.push(finding.to_string());
            Ok(())
        };
        let mut reporter = Reporter {
            counts: Counts::default(),
            notes: Vec::new(),
            reports_unexpected: self.reports_unexpected,
            on_finding: &mut on_finding,
        };
        let (mut entries, mut journal) =
            (Spill::new(memory, matching::EVENTS), Journal::new(memory));
        let mut bytes = Vec::new();
        for (id, record) in &self.records {
            let (kind, id) = (EntryKind::Record(*record), id.as_bytes());
            Entry { kind, id }.encode(&mut bytes);
            if record.position.is_some() {
                journal.push(&bytes).expect("room");
            }
        }
        let rows = self.rows.iter().map(|(id, row)| (id, EntryKind::Row(*row)));
        let records = self.records.iter();
        let records = records.map(|(id, record)| (id, EntryKind::Record(*record)));
        // The order of entries doesn't matter.
        for (id, kind) in rows.chain(records).rev() {
            let id = id.as_bytes();
            Entry { kind, id }.encode(&mut bytes);
            entries.push(spill::hash(id), &bytes).expect("room");
        }
        let count = self.records.len() as u64;
        let marks = matching::match_entries(entries, count, &self.context, &mut reporter);
        let marks = marks.expect("readable");
        order::check_order(journal, &marks, memory, &self.context, &mut reporter)
            .expect("readable");
        let counts = reporter.counts;
        findings.sort_unstable();
        Verified {
            findings,
            counts,
            firsts: (0..count)
                .filter(|number| marks.contains(*number))
                .collect(),
        }
    }

    /// Asserts that the comparison produces exactly these findings and counts.
    #[track_caller]
    fn assert_report(&self, findings: &[&str], counts: Counts) {
        let verified = self.verified();
        assert_eq!(verified.findings, findings);
        assert_eq!(verified.counts, counts);
    }
}

#[test]
fn reports_nothing_if_each_row_has_one_record_and_records_are_in_order() {
    let mut fixture = Fixture::new();
    fixture.delivered(&[
        ("a", position(100, 0)),
        ("b", position(100, 1)),
        ("c", position(200, 0)),
    ]);
    fixture.row("d", BILLS);
    fixture.record("d", BILLS_0, position(200, 1));
    let counts = Counts {
        delivered: 4,
        ..Counts::default()
    };
    fixture.assert_report(&[], counts);
}

#[test]
fn reports_an_undelivered_row_as_missing_unless_it_may_still_be_delivered() {
    let mut fixture = Fixture::new();
    fixture.delivered(&[("a", position(100, 0))]);
    fixture.row("b", BILLS);
    let counts = Counts {
        delivered: 1,
        missing: 1,
        ..Counts::default()
    };
    let missing = [r#"MISSING      b: not in topic "bills""#];
    fixture.assert_report(&missing, counts);
    // An open transaction in another topic doesn't hide the record of this row.
    fixture.context.topics[0].is_hidden = true;
    fixture.assert_report(&missing, counts);
    let counts = Counts {
        delivered: 1,
        pending: 1,
        ..Counts::default()
    };
    fixture.context.topics[1].is_hidden = true;
    fixture.assert_report(&[], counts);
    fixture.context.topics[1].is_hidden = false;
    fixture.context.delivered = End::NotReached;
    fixture.assert_report(&[], counts);
}

#[test]
fn counts_a_row_older_than_the_oldest_record_as_expired() {
    let check = |created, expired_before, is_expired: bool| {
        let mut fixture = Fixture::new();
        fixture.context.topics[0].expired_before = expired_before;
        fixture.row("a", ORDERS).created = created;
        let (expired, missing) = (u64::from(is_expired), u64::from(!is_expired));
        let counts = Counts {
            expired,
            missing,
            ..Counts::default()
        };
        assert_eq!(fixture.verified().counts, counts, "{created:?}");
    };
    check(Some(4999), Some(5000), true);
    check(Some(5000), Some(5000), false);
    check(Some(5001), Some(5000), false);
    check(None, Some(5000), false);
    check(Some(4999), None, false);
}

#[test]
fn reports_an_event_as_repeated_if_it_has_more_records_than_rows() {
    let mut fixture = Fixture::new();
    fixture.delivered(&[("a", position(100, 0))]);
    fixture.record("a", ORDERS_1, position(100, 0));
    let mut counts = Counts {
        delivered: 1,
        repeated: 1,
        ..Counts::default()
    };
    fixture.assert_report(&["REPEATED     a: 2 times: orders/0@0, orders/1@0"], counts);
    // If there are many locations, only the first few are reported.
    for _ in 0..4 {
        fixture.record("a", ORDERS_1, position(100, 0));
    }
    let text =
        "REPEATED     a: 6 times: orders/0@0, orders/1@0, orders/1@1, orders/1@2, orders/1@3 ...";
    fixture.assert_report(&[text], counts);

    let mut fixture = Fixture::new();
    fixture.row("a", ORDERS);
    fixture.delivered(&[("a", position(100, 0))]);
    (counts.repeated, counts.missing) = (0, 1);
    fixture.assert_report(&[r#"MISSING      a: not in topic "orders""#], counts);
    fixture.record("a", ORDERS_0, position(100, 1));
    (counts.delivered, counts.missing) = (2, 0);
    fixture.assert_report(&[], counts);
    fixture.record("a", ORDERS_0, position(100, 2));
    counts.repeated = 1;
    let text = "REPEATED     a: 3 times: orders/0@0, orders/0@1, orders/0@2";
    fixture.assert_report(&[text], counts);
}

#[test]
fn marks_the_first_record_of_every_event_that_has_a_row_in_the_table() {
    let mut fixture = Fixture::new();
    // The last 50 records repeat the first 50 events.
    for number in 0..200 {
        let id = (number % 150).to_string();
        fixture.record(&id, ORDERS_0, position(100 + number, 0));
        if number < 150 && number % 2 == 0 {
            fixture.row(&id, ORDERS);
        }
    }
    let verified = fixture.verified();
    let expected: Vec<_> = (0..150).step_by(2).collect();
    assert_eq!(verified.firsts, expected);
    let counts = Counts {
        delivered: 75,
        unexpected: 75,
        repeated: 50,
        ..Counts::default()
    };
    assert_eq!(verified.counts, counts);
}

#[test]
fn counts_replayed_rows_as_delivered_and_not_as_repeated() {
    let mut fixture = Fixture::new();
    fixture.row("a", ORDERS);
    fixture.replay("a", BILLS_0);
    let mut counts = Counts {
        delivered: 1,
        replayed: 1,
        ..Counts::default()
    };
    fixture.assert_report(&[], counts);
    // It is impossible to tell which of two rows with the same ID was replayed, so both count as
    // delivered.
    fixture.row("a", ORDERS);
    counts.delivered = 2;
    fixture.assert_report(&[], counts);

    let mut fixture = Fixture::new();
    fixture.delivered(&[("a", position(100, 0))]);
    fixture.replay("a", ORDERS_0);
    fixture.replay("a", ORDERS_0);
    // This event's row has been removed.
    fixture.replay("b", ORDERS_0);
    (counts.delivered, counts.replayed) = (1, 3);
    fixture.assert_report(&[], counts);
}

#[test]
fn reports_a_record_without_a_row_as_unexpected_unless_it_is_newer_than_the_scan() {
    let check = |commit: Option<u64>, is_unexpected: bool| {
        let mut fixture = Fixture::new();
        let first_position = commit.map(|commit| position(commit, 0));
        fixture.record("a", ORDERS_1, position(0, 0)).position = first_position;
        let (unexpected, newer) = (u64::from(is_unexpected), u64::from(!is_unexpected));
        let counts = Counts {
            unexpected,
            newer,
            ..Counts::default()
        };
        let text: &[&str] = match is_unexpected {
            true => &["UNEXPECTED   a: at orders/1@0, but not in the table"],
            false => &[],
        };
        fixture.assert_report(text, counts);
    };
    check(Some(999), true);
    check(Some(1000), false);
    check(Some(1001), false);
    check(None, true);
}

#[test]
fn reports_unexpected_events_only_on_request_and_never_for_a_time_range() {
    let mut fixture = Fixture::new();
    fixture.record("a", ORDERS_0, position(100, 0));
    fixture.record("a", ORDERS_0, position(100, 0));
    fixture.reports_unexpected = false;
    let counts = Counts {
        unexpected: 1,
        repeated: 1,
        ..Counts::default()
    };
    let repeated = "REPEATED     a: 2 times: orders/0@0, orders/0@1";
    fixture.assert_report(&[repeated], counts);
    fixture.reports_unexpected = true;
    let unexpected = "UNEXPECTED   a: at orders/0@0, but not in the table";
    fixture.assert_report(&[repeated, unexpected], counts);
    fixture.context.is_range = true;
    let counts = Counts {
        outside: 1,
        ..Counts::default()
    };
    fixture.assert_report(&[], counts);
}

#[test]
fn reports_a_record_as_misplaced_if_its_topic_or_key_or_partition_is_wrong() {
    let check = |change: fn(&mut Row), differs: Option<&str>| {
        let mut fixture = Fixture::new();
        change(fixture.row("a", ORDERS));
        fixture.record("a", ORDERS_1, position(100, 0));
        let verified = fixture.verified();
        assert_eq!(verified.counts.delivered, 1);
        assert_eq!(verified.counts.misplaced, u64::from(differs.is_some()));
        let topic = match differs {
            Some("topic") => "bills",
            _ => "orders",
        };
        let text = differs.map(|differs| {
            format!(
                "MISPLACED    a: at orders/1@0, but belongs in topic {topic:?}; its {differs} does not match the row"
            )
        });
        assert_eq!(verified.findings, Vec::from_iter(text));
    };
    check(|_| (), None);
    check(|row| row.partition = Some(1), None);
    check(|row| row.partition = Some(0), Some("partition"));
    check(|row| row.key = 8, Some("key"));
    check(|row| row.topic = BILLS, Some("topic"));
}

#[test]
fn accepts_a_record_that_matches_one_of_two_rows_with_the_same_id() {
    let mut fixture = Fixture::new();
    fixture.delivered(&[("a", position(100, 0))]);
    fixture.row("a", BILLS);
    fixture.record("a", BILLS_0, position(100, 1));
    let mut counts = Counts {
        delivered: 2,
        ..Counts::default()
    };
    fixture.assert_report(&[], counts);
    // One record matches a row, and the other matches neither row.
    fixture.records[1].1.key = 8;
    counts.misplaced = 1;
    let verified = fixture.verified();
    assert_eq!(verified.counts, counts);
    // It is unspecified which row the record is compared with, but the topic and the difference
    // refer to the same row.
    let texts = [("bills", "key"), ("orders", "topic")].map(|(topic, differs)| {
        format!(
            "MISPLACED    a: at bills/0@0, but belongs in topic {topic:?}; its {differs} does not match the row"
        )
    });
    let findings = &verified.findings;
    assert!(
        findings.len() == 1 && texts.contains(&findings[0]),
        "{findings:?}"
    );
}

#[test]
fn reports_out_of_order_records_within_a_partition() {
    let mut fixture = Fixture::new();
    fixture.delivered(&[
        ("a", position(100, 0)),
        ("b", position(300, 1)),
        ("c", position(300, 0)),
        ("d", position(200, 0)),
        ("e", position(300, 1)),
        ("f", position(400, 0)),
    ]);
    fixture.row("g", ORDERS);
    fixture.record("g", ORDERS_1, position(150, 0));
    let counts = Counts {
        delivered: 7,
        out_of_order: 2,
        ..Counts::default()
    };
    let after = "after 00000000/0000012C:0000000001";
    let text = |id_at, position| {
        format!("OUT OF ORDER {id_at} with position 00000000/{position}, {after}")
    };
    let texts = [
        text("c: at orders/0@2", "0000012C:0000000000"),
        text("d: at orders/0@3", "000000C8:0000000000"),
    ];
    fixture.assert_report(&texts.each_ref().map(String::as_str), counts);
}

/// The origin of unexpected records is unknown, and a repeated record may have been resent
/// intentionally.
#[test]
fn ignores_the_order_of_repeated_and_unexpected_records() {
    let mut fixture = Fixture::new();
    fixture.delivered(&[("a", position(200, 0))]);
    fixture.record("unexpected", ORDERS_0, position(100, 0));
    fixture.record("another", ORDERS_0, position(900, 0));
    fixture.delivered(&[("b", position(300, 0))]);
    fixture.record("a", ORDERS_0, position(200, 0));
    let counts = fixture.verified().counts;
    assert_eq!((counts.out_of_order, counts.delivered), (0, 2));
    assert_eq!((counts.unexpected, counts.repeated), (2, 1));
}

#[test]
fn reports_events_missing_from_within_a_transaction() {
    let mut fixture = Fixture::new();
    fixture.delivered(&[
        ("a", position(100, 0)),
        ("b", position(100, 2)),
        ("c", position(100, 5)),
        ("d", position(200, 0)),
        ("e", position(200, 1)),
        ("f", position(300, 1)),
    ]);
    let counts = Counts {
        delivered: 6,
        gaps: 2,
        ..Counts::default()
    };
    let gaps = [
        "GAP          transaction 0/12C: missing event 0",
        "GAP          transaction 0/64: missing event 1, 3 to 4",
    ];
    fixture.assert_report(&gaps, counts);
    // An event closes a gap regardless of its partition, and even if its row is no longer in the
    // table.
    fixture.record("g", BILLS_0, position(300, 0));
    let counts = Counts {
        gaps: 1,
        unexpected: 1,
        ..counts
    };
    fixture.reports_unexpected = false;
    fixture.assert_report(&gaps[1..], counts);
    // If no event of a transaction is in the table, the records may come from elsewhere, so gaps
    // are not reported.
    fixture.record("h", BILLS_0, position(400, 7));
    let counts = Counts {
        unexpected: 2,
        ..counts
    };
    fixture.assert_report(&gaps[1..], counts);
}

#[test]
fn looks_for_missing_events_only_in_completely_read_streamed_transactions() {
    let has_gap = |commit, copies: &[u64]| {
        let mut fixture = Fixture::new();
        fixture.context.complete_range = CompleteRange {
            after: Lsn(100),
            before: Lsn(200),
        };
        fixture.context.copies = copies.iter().copied().map(Lsn).collect();
        fixture.delivered(&[("a", position(commit, 1))]);
        let counts = fixture.verified().counts;
        assert_eq!(counts.delivered, 1);
        counts.gaps == 1
    };
    for (commit, is_searched) in [
        (99, false),
        (100, false),
        (101, true),
        (199, true),
        (200, false),
        (201, false),
    ] {
        assert_eq!(has_gap(commit, &[150]), is_searched, "{commit}");
    }
    assert!(!has_gap(150, &[120, 150]));
}

/// If the hash did not depend on the event ID, all entries would be processed together, regardless
/// of the memory limit.
#[test]
fn groups_spilled_entries_by_the_hash_of_the_event_id() {
    let mut fixture = Fixture::new();
    let row = EntryKind::Row(*fixture.row("a", ORDERS));
    let record = EntryKind::Record(*fixture.record("a", ORDERS_0, position(100, 0)));
    let mut bytes = Vec::new();
    for id in [&b"a"[..], b"b"] {
        for kind in [row, record] {
            Entry { kind, id }.encode(&mut bytes);
            assert_eq!(matching::part_hash(&bytes), spill::hash(id));
        }
    }
}
