//! Tests the findings for given rows and records.

use super::context::{Place, Topic};
use super::entry::{Entry, Record, Row, What};
use super::*;
use crate::model::lsn::Position;

/// The numbers of topics in rows.
const ORDERS: u32 = 0;
const BILLS: u32 = 1;
/// The numbers of partitions in records.
const ORDERS_0: u32 = 0;
const ORDERS_1: u32 = 1;
const BILLS_0: u32 = 2;

/// Rows and records to be compared.
struct Scene {
    context: VerifyContext,
    tells_unexpected: bool,
    rows: Vec<(String, Row)>,
    records: Vec<(String, Record)>,
}

/// The result of a comparison.
#[derive(Debug, PartialEq, Eq)]
struct Verified {
    /// Sorted, because findings for different events have no defined order.
    findings: Vec<String>,
    counts: Counts,
    /// The records that have to be in order.
    firsts: Vec<u64>,
}

fn at(commit: u64, index: u64) -> Position {
    Position {
        commit: Lsn(commit),
        index,
    }
}

impl Scene {
    /// Creates a scene in which everything is delivered and every transaction is completely in the
    /// topics.
    fn new() -> Self {
        let topic = |name: &str| Topic {
            name: name.to_owned(),
            is_hidden: false,
            gone_before: None,
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
                whole: Whole {
                    after: Lsn::ZERO,
                    before: Lsn(u64::MAX),
                },
                copies: Vec::new(),
            },
            tells_unexpected: true,
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

    /// Adds the next record.
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
        let record = self.record(id, place, at(0, 0));
        record.position = None;
        record.is_replay = true;
    }

    /// Adds a row for each event, and a record in the first partition.
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
        let mut tell = |finding: &Finding| {
            findings.push(finding.to_string());
            Ok(())
        };
        let mut reporter = Reporter {
            counts: Counts::default(),
            notes: Vec::new(),
            tells_unexpected: self.tells_unexpected,
            tell: &mut tell,
        };
        let (mut entries, mut journal) = (Spill::new(memory), Journal::new(memory));
        let mut bytes = Vec::new();
        for (id, record) in &self.records {
            let (what, id) = (What::Record(*record), id.as_bytes());
            Entry { what, id }.encode(&mut bytes);
            if record.position.is_some() {
                journal.push(&bytes).expect("room");
            }
        }
        let rows = self.rows.iter().map(|(id, row)| (id, What::Row(*row)));
        let records = self.records.iter();
        let records = records.map(|(id, record)| (id, What::Record(*record)));
        // The order of entries doesn't matter.
        for (id, what) in rows.chain(records).rev() {
            let id = id.as_bytes();
            Entry { what, id }.encode(&mut bytes);
            entries.push(spill::hash(id), &bytes).expect("room");
        }
        let count = self.records.len() as u64;
        let marks = matching::bring_together(entries, count, &self.context, &mut reporter);
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

    /// Checks that exactly these findings and counts result.
    #[track_caller]
    fn assert_report(&self, findings: &[&str], counts: Counts) {
        let verified = self.verified();
        assert_eq!(verified.findings, findings);
        assert_eq!(verified.counts, counts);
    }
}

#[test]
fn nothing_is_found_where_each_row_has_its_record_and_all_are_in_order() {
    let mut scene = Scene::new();
    scene.delivered(&[("a", at(100, 0)), ("b", at(100, 1)), ("c", at(200, 0))]);
    scene.row("d", BILLS);
    scene.record("d", BILLS_0, at(200, 1));
    let counts = Counts {
        delivered: 4,
        ..Counts::default()
    };
    scene.assert_report(&[], counts);
}

#[test]
fn a_row_that_no_topic_has_is_missing_unless_it_may_still_come() {
    let mut scene = Scene::new();
    scene.delivered(&[("a", at(100, 0))]);
    scene.row("b", BILLS);
    let counts = Counts {
        delivered: 1,
        missing: 1,
        ..Counts::default()
    };
    let missing = [r#"MISSING      b: not in topic "bills""#];
    scene.assert_report(&missing, counts);
    // An open transaction in another topic doesn't hide the record of this row.
    scene.context.topics[0].is_hidden = true;
    scene.assert_report(&missing, counts);
    let counts = Counts {
        delivered: 1,
        pending: 1,
        ..Counts::default()
    };
    scene.context.topics[1].is_hidden = true;
    scene.assert_report(&[], counts);
    scene.context.topics[1].is_hidden = false;
    scene.context.delivered = End::NotReached;
    scene.assert_report(&[], counts);
}

#[test]
fn a_row_that_is_older_than_its_topic_goes_back_is_expired() {
    let check = |created, gone_before, is_expired: bool| {
        let mut scene = Scene::new();
        scene.context.topics[0].gone_before = gone_before;
        scene.row("a", ORDERS).created = created;
        let (expired, missing) = (u64::from(is_expired), u64::from(!is_expired));
        let counts = Counts {
            expired,
            missing,
            ..Counts::default()
        };
        assert_eq!(scene.verified().counts, counts, "{created:?}");
    };
    check(Some(4999), Some(5000), true);
    check(Some(5000), Some(5000), false);
    check(Some(5001), Some(5000), false);
    check(None, Some(5000), false);
    check(Some(4999), None, false);
}

#[test]
fn a_record_more_than_there_are_rows_is_repeated() {
    let mut scene = Scene::new();
    scene.delivered(&[("a", at(100, 0))]);
    scene.record("a", ORDERS_1, at(100, 0));
    let mut counts = Counts {
        delivered: 1,
        repeated: 1,
        ..Counts::default()
    };
    scene.assert_report(&["REPEATED     a: 2 times: orders/0@0, orders/1@0"], counts);
    // Only some of many locations are reported.
    for _ in 0..4 {
        scene.record("a", ORDERS_1, at(100, 0));
    }
    let text =
        "REPEATED     a: 6 times: orders/0@0, orders/1@0, orders/1@1, orders/1@2, orders/1@3 ...";
    scene.assert_report(&[text], counts);

    let mut scene = Scene::new();
    scene.row("a", ORDERS);
    scene.delivered(&[("a", at(100, 0))]);
    (counts.repeated, counts.missing) = (0, 1);
    scene.assert_report(&[r#"MISSING      a: not in topic "orders""#], counts);
    scene.record("a", ORDERS_0, at(100, 1));
    (counts.delivered, counts.missing) = (2, 0);
    scene.assert_report(&[], counts);
    scene.record("a", ORDERS_0, at(100, 2));
    counts.repeated = 1;
    let text = "REPEATED     a: 3 times: orders/0@0, orders/0@1, orders/0@2";
    scene.assert_report(&[text], counts);
}

#[test]
fn of_each_event_that_the_table_has_the_record_that_was_read_first_counts() {
    let mut scene = Scene::new();
    // The last 50 records repeat the first ones.
    for number in 0..200 {
        let id = (number % 150).to_string();
        scene.record(&id, ORDERS_0, at(100 + number, 0));
        if number < 150 && number % 2 == 0 {
            scene.row(&id, ORDERS);
        }
    }
    let verified = scene.verified();
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
fn a_replay_delivers_its_rows_wherever_it_is_and_repeats_nothing() {
    let mut scene = Scene::new();
    scene.row("a", ORDERS);
    scene.replay("a", BILLS_0);
    let mut counts = Counts {
        delivered: 1,
        replayed: 1,
        ..Counts::default()
    };
    scene.assert_report(&[], counts);
    // It is impossible to tell which of two rows was sent again.
    scene.row("a", ORDERS);
    counts.delivered = 2;
    scene.assert_report(&[], counts);

    let mut scene = Scene::new();
    scene.delivered(&[("a", at(100, 0))]);
    scene.replay("a", ORDERS_0);
    scene.replay("a", ORDERS_0);
    // The row of this event has been removed.
    scene.replay("b", ORDERS_0);
    (counts.delivered, counts.replayed) = (1, 3);
    scene.assert_report(&[], counts);
}

#[test]
fn an_event_that_is_not_in_the_table_is_unexpected_unless_it_is_newer() {
    let check = |commit: Option<u64>, is_unexpected: bool| {
        let mut scene = Scene::new();
        let position = commit.map(|commit| at(commit, 0));
        scene.record("a", ORDERS_1, at(0, 0)).position = position;
        let (unexpected, newer) = (u64::from(is_unexpected), u64::from(!is_unexpected));
        let counts = Counts {
            unexpected,
            newer,
            ..Counts::default()
        };
        let text: &[&str] = match is_unexpected {
            true => &["UNEXPECTED   a: at orders/1@0, and not in the table"],
            false => &[],
        };
        scene.assert_report(text, counts);
    };
    check(Some(999), true);
    check(Some(1000), false);
    check(Some(1001), false);
    check(None, true);
}

#[test]
fn what_is_unexpected_is_told_only_if_asked_for_and_nothing_is_in_a_range_of_rows() {
    let mut scene = Scene::new();
    scene.record("a", ORDERS_0, at(100, 0));
    scene.record("a", ORDERS_0, at(100, 0));
    scene.tells_unexpected = false;
    let counts = Counts {
        unexpected: 1,
        repeated: 1,
        ..Counts::default()
    };
    let repeated = "REPEATED     a: 2 times: orders/0@0, orders/0@1";
    scene.assert_report(&[repeated], counts);
    scene.tells_unexpected = true;
    let unexpected = "UNEXPECTED   a: at orders/0@0, and not in the table";
    scene.assert_report(&[repeated, unexpected], counts);
    scene.context.is_range = true;
    let counts = Counts {
        outside: 1,
        ..Counts::default()
    };
    scene.assert_report(&[], counts);
}

#[test]
fn a_record_with_another_topic_key_or_partition_than_its_row_is_misplaced() {
    let check = |change: fn(&mut Row), differs: Option<&str>| {
        let mut scene = Scene::new();
        change(scene.row("a", ORDERS));
        scene.record("a", ORDERS_1, at(100, 0));
        let verified = scene.verified();
        assert_eq!(verified.counts.delivered, 1);
        assert_eq!(verified.counts.misplaced, u64::from(differs.is_some()));
        let topic = match differs {
            Some("topic") => "bills",
            _ => "orders",
        };
        let text = differs.map(|differs| {
            format!(
                "MISPLACED    a: at orders/1@0, and belongs into topic {topic:?}; its {differs} differs"
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
fn a_record_that_is_right_for_one_of_two_rows_with_its_id_is_right() {
    let mut scene = Scene::new();
    scene.delivered(&[("a", at(100, 0))]);
    scene.row("a", BILLS);
    scene.record("a", BILLS_0, at(100, 1));
    let mut counts = Counts {
        delivered: 2,
        ..Counts::default()
    };
    scene.assert_report(&[], counts);
    // One record is correct, and the other matches neither row.
    scene.records[1].1.key = 8;
    counts.misplaced = 1;
    let verified = scene.verified();
    assert_eq!(verified.counts, counts);
    // The row with which the record is compared is unspecified, but topic and difference refer to
    // the same row.
    let texts = [("bills", "key"), ("orders", "topic")].map(|(topic, differs)| {
        format!(
            "MISPLACED    a: at bills/0@0, and belongs into topic {topic:?}; its {differs} differs"
        )
    });
    let findings = &verified.findings;
    assert!(
        findings.len() == 1 && texts.contains(&findings[0]),
        "{findings:?}"
    );
}

#[test]
fn a_record_behind_one_of_its_partition_that_was_committed_after_it_is_out_of_order() {
    let mut scene = Scene::new();
    scene.delivered(&[
        ("a", at(100, 0)),
        ("b", at(300, 1)),
        ("c", at(300, 0)),
        ("d", at(200, 0)),
        ("e", at(300, 1)),
        ("f", at(400, 0)),
    ]);
    scene.row("g", ORDERS);
    scene.record("g", ORDERS_1, at(150, 0));
    let counts = Counts {
        delivered: 7,
        out_of_order: 2,
        ..Counts::default()
    };
    let behind = "behind 00000000/0000012C:0000000001";
    let text = |id_at, position| {
        format!("OUT OF ORDER {id_at} with position 00000000/{position}, {behind}")
    };
    let texts = [
        text("c: at orders/0@2", "0000012C:0000000000"),
        text("d: at orders/0@3", "000000C8:0000000000"),
    ];
    scene.assert_report(&texts.each_ref().map(String::as_str), counts);
}

/// Their origin is unknown, and so is whether records after them were sent again intentionally.
#[test]
fn records_that_are_not_the_first_of_an_event_in_the_table_are_in_no_order() {
    let mut scene = Scene::new();
    scene.delivered(&[("a", at(200, 0))]);
    scene.record("stranger", ORDERS_0, at(100, 0));
    scene.record("another", ORDERS_0, at(900, 0));
    scene.delivered(&[("b", at(300, 0))]);
    scene.record("a", ORDERS_0, at(200, 0));
    let counts = scene.verified().counts;
    assert_eq!((counts.out_of_order, counts.delivered), (0, 2));
    assert_eq!((counts.unexpected, counts.repeated), (2, 1));
}

#[test]
fn a_transaction_without_some_of_its_events_has_a_gap() {
    let mut scene = Scene::new();
    scene.delivered(&[
        ("a", at(100, 0)),
        ("b", at(100, 2)),
        ("c", at(100, 5)),
        ("d", at(200, 0)),
        ("e", at(200, 1)),
        ("f", at(300, 1)),
    ]);
    let counts = Counts {
        delivered: 6,
        gaps: 2,
        ..Counts::default()
    };
    let gaps = [
        "GAP          transaction 0/12C: without event 0",
        "GAP          transaction 0/64: without event 1, 3 to 4",
    ];
    scene.assert_report(&gaps, counts);
    // An event counts regardless of its partition, and even if it is no longer in the table.
    scene.record("g", BILLS_0, at(300, 0));
    let counts = Counts {
        gaps: 1,
        unexpected: 1,
        ..counts
    };
    scene.tells_unexpected = false;
    scene.assert_report(&gaps[1..], counts);
    // A transaction without any event of the table may have another origin.
    scene.record("h", BILLS_0, at(400, 7));
    let counts = Counts {
        unexpected: 2,
        ..counts
    };
    scene.assert_report(&gaps[1..], counts);
}

#[test]
fn gaps_are_searched_for_where_transactions_are_whole_and_not_in_copied_rows() {
    let has_gap = |commit, copies: &[u64]| {
        let mut scene = Scene::new();
        scene.context.whole = Whole {
            after: Lsn(100),
            before: Lsn(200),
        };
        scene.context.copies = copies.iter().copied().map(Lsn).collect();
        scene.delivered(&[("a", at(commit, 1))]);
        let counts = scene.verified().counts;
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

/// Otherwise, all entries would be processed together, regardless of the memory limit.
#[test]
fn entries_of_an_event_are_spread_by_their_id() {
    let mut scene = Scene::new();
    let row = What::Row(*scene.row("a", ORDERS));
    let record = What::Record(*scene.record("a", ORDERS_0, at(100, 0)));
    let mut bytes = Vec::new();
    for id in [&b"a"[..], b"b"] {
        for what in [row, record] {
            Entry { what, id }.encode(&mut bytes);
            assert_eq!(matching::part_hash(&bytes), spill::hash(id));
        }
    }
}
