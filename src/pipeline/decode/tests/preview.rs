//! Tests for the preview, which shows an operator how a range of WAL would be handled.

use std::collections::BTreeMap;

use super::*;
use crate::pipeline::decode::preview::{Preview, PreviewReport, Until};
use crate::postgres::connect::dial::ServerError;
use crate::postgres::replication::ConnectionError;

fn preview(outbox: Outbox, until: Until, delivered: Option<Delivered>) -> Preview {
    Preview::new(outbox, OutboxSettings::default(), until, delivered).expect("settings fit")
}

fn table_preview(until: Until, delivered: Option<Delivered>) -> Preview {
    let table = Outbox::Table("public.outbox".parse().expect("table"));
    preview(table, until, delivered)
}

const ALL: Until = Until::Before(Lsn(u64::MAX));

/// Returns the report for `messages`. Panics if one of them is past the end of the range.
fn report(mut preview: Preview, messages: &[Vec<u8>]) -> PreviewReport {
    for message in messages {
        assert!(preview.message(message), "the range has ended");
    }
    preview.found
}

/// Splits a report into the text of its first events and everything else.
fn first_events(mut found: PreviewReport) -> (Vec<String>, PreviewReport) {
    let first = std::mem::take(&mut found.first);
    for event in &first {
        let at = event.position().to_string();
        assert!(event.to_string().starts_with(&at), "{event}");
    }
    (first.iter().map(ToString::to_string).collect(), found)
}

fn topics(counts: &[(&str, u64)]) -> BTreeMap<String, u64> {
    let counts = counts.iter();
    counts
        .map(|(topic, count)| ((*topic).to_owned(), *count))
        .collect()
}

fn position(commit: u64, index: u64) -> Position {
    Position {
        commit: Lsn(commit),
        index,
    }
}

fn insert_row(id: &str, aggregate: &str) -> Vec<u8> {
    let row = tuple(b'N', &[id, aggregate, "key", "text"]);
    [&b"I"[..], &OUTBOX.to_be_bytes(), &row].concat()
}

/// Returns a relation message for a table that is not the outbox, and an inserted row of that
/// table.
fn other() -> [Vec<u8>; 2] {
    [relation("other", &[("id", 2950)]), insert("o")].map(|mut message| {
        message[1..5].copy_from_slice(&(OUTBOX + 1).to_be_bytes());
        message
    })
}

fn delete() -> Vec<u8> {
    [&b"D"[..], &OUTBOX.to_be_bytes(), &tuple(b'K', &["a"])].concat()
}

#[test]
fn counts_events_by_topic_and_lists_them_with_their_positions() {
    let [other, row_of_other] = other();
    let messages = [
        begin(0x200),
        outbox(),
        other,
        insert_row("a", "order"),
        row_of_other,
        delete(),
        insert_row("b", "no topic"),
        insert_row("c", "order"),
        commit(0x200),
        begin(0x300),
        published("ignored"),
        insert_row("d", "bill"),
        commit(0x300),
        begin(0x400),
        commit(0x400),
    ];
    let (events, found) = first_events(report(table_preview(ALL, None), &messages));
    let [a, b, c, d] = &events[..] else {
        panic!("{events:?}");
    };
    assert_eq!(
        a,
        "00000000/00000200:0000000000 row with id a, for topic outbox.event.order"
    );
    let start =
        "00000000/00000200:0000000003 row with id b, which can't be converted to a record: ";
    assert!(b.starts_with(start) && b.contains("no topic"), "{b}");
    assert_eq!(
        c,
        "00000000/00000200:0000000004 row with id c, for topic outbox.event.order"
    );
    assert_eq!(
        d,
        "00000000/00000300:0000000000 row with id d, for topic outbox.event.bill"
    );
    let expected = PreviewReport {
        transactions: 2,
        events: 4,
        unroutable: 1,
        topics: topics(&[("outbox.event.bill", 1), ("outbox.event.order", 2)]),
        foreign: 1,
        last: Some(position(0x300, 0)),
        ..PreviewReport::default()
    };
    assert_eq!(found, expected);
}

#[test]
fn counts_only_transactional_messages_with_the_prefix_as_events() {
    let outbox_of_messages = Outbox::Messages {
        prefix: "ours".to_owned(),
    };
    let messages = [
        logical(false, "ours", b"before"),
        begin(0x200),
        outbox(),
        logical(true, "theirs", b"anything"),
        logical(false, "theirs", b"between"),
        insert("unexpected"),
        published("a"),
        logical(true, "ours", b"\x02"),
        commit(0x200),
    ];
    let preview = preview(outbox_of_messages, ALL, None);
    let (events, found) = first_events(report(preview, &messages));
    assert_eq!(events.len(), 2, "{events:?}");
    let start = "00000000/00000200:0000000002 row with id abababab-";
    let end = ", for topic outbox.event.order";
    assert!(events[0].starts_with(start), "{events:?}");
    assert!(events[0].ends_with(end), "{events:?}");
    let start = "00000000/00000200:0000000003 message, which can't be converted to a record: ";
    assert!(events[1].starts_with(start), "{events:?}");
    assert!(events[1].contains("0x02"), "{events:?}");
    let expected = PreviewReport {
        transactions: 1,
        events: 2,
        unroutable: 1,
        topics: topics(&[("outbox.event.order", 1)]),
        foreign: 2,
        last: Some(position(0x200, 3)),
        ..PreviewReport::default()
    };
    assert_eq!(found, expected);
}

#[test]
fn preview_ends_at_the_first_transaction_after_the_requested_range() {
    let check = |until, last: u64| {
        let mut preview = table_preview(until, None);
        assert!(preview.message(&outbox()));
        let [other, row_of_other] = other();
        assert!(preview.message(&other));
        for commit_lsn in [0x1ff, 0x200, 0x201] {
            let is_in = commit_lsn <= last;
            assert_eq!(preview.message(&begin(commit_lsn)), is_in, "{commit_lsn:x}");
            preview.message(&insert("a"));
            preview.message(&row_of_other);
            preview.message(&commit(commit_lsn));
        }
        let count = last - 0x1fe;
        let found = preview.found;
        assert_eq!((found.events, found.foreign), (count, count));
        assert_eq!(found.last, Some(position(last, 0)));
    };
    check(Until::Before(Lsn(0x200)), 0x1ff);
    check(Until::Before(Lsn(0x201)), 0x200);
    check(Until::Commit(Lsn(0x200)), 0x200);
}

#[test]
fn reports_the_end_and_row_count_of_the_requested_transaction() {
    let first = [begin(0x200), outbox(), insert("a"), commit(0x200)];
    let second = [
        begin(0x300),
        insert("b"),
        delete(),
        insert("c"),
        commit(0x300),
    ];
    let until = || table_preview(Until::Commit(Lsn(0x300)), None);
    assert_eq!(report(until(), &first).end, None);
    let all = [&first[..], &second].concat();
    assert_eq!(report(until(), &all).end, Some((Lsn(0x310), 3)));
    let before = table_preview(Until::Before(Lsn(0x310)), None);
    assert_eq!(report(before, &all).end, None);
}

#[test]
fn records_only_errors_that_concern_a_row_and_occur_within_a_transaction() {
    let error = |code: &str, routine: &str| {
        let error = ServerError {
            code: code.to_owned(),
            routine: routine.to_owned(),
            ..ServerError::default()
        };
        ConnectionError::Server(Box::new(error))
    };
    let until = Until::Commit(Lsn(0x200));
    let messages = [begin(0x200), outbox(), insert("a")];
    for (code, routine) in [
        ("22P05", ""),
        ("22021", ""),
        ("54000", "enlargeStringInfo"),
        ("XX000", "palloc"),
        ("54001", "check_stack_depth"),
        ("22008", "timestamp2tm"),
        ("XX000", "MemoryContextSizeFailure"),
    ] {
        let mut preview = table_preview(until, None);
        assert_eq!(preview.record_unsendable(&error(code, routine)), None);
        for message in &messages {
            assert!(preview.message(message));
        }
        let at = preview.record_unsendable(&error(code, routine));
        assert_eq!(at, Some(position(0x200, 1)), "{code}");
        assert_eq!(preview.found.end, Some((Lsn(0x201), 2)));
        assert_eq!((preview.found.events, preview.found.unroutable), (2, 1));
    }
    for (code, routine) in [
        ("XX000", "ReorderBufferRestoreChanges"),
        ("53200", "palloc"),
    ] {
        let mut preview = table_preview(until, None);
        for message in &messages {
            assert!(preview.message(message));
        }
        assert_eq!(
            preview.record_unsendable(&error(code, routine)),
            None,
            "{code}"
        );
        assert_eq!(preview.found.end, None);
    }
}

#[test]
fn marks_events_that_have_already_been_processed() {
    let messages = [
        begin(0x200),
        outbox(),
        insert("a"),
        insert("b"),
        insert("c"),
        commit(0x200),
        begin(0x300),
        insert("d"),
        commit(0x300),
        begin(0x400),
        insert("e"),
        commit(0x400),
    ];
    let check = |delivered, count: usize| {
        let (events, found) = first_events(report(table_preview(ALL, delivered), &messages));
        assert_eq!((events.len(), found.events), (5, 5));
        assert_eq!(found.dealt_with, count as u64);
        for (number, event) in events.iter().enumerate() {
            let is_marked = event.ends_with("outbox.event.order (already processed)");
            assert_eq!(is_marked, number < count, "{event}");
        }
    };
    check(None, 0);
    check(Some(Delivered::Before(Lsn(0x200))), 0);
    check(Some(Delivered::Before(Lsn(0x300))), 3);
    let last = Last {
        commit_lsn: Lsn(0x200),
        index: 1,
        xid: 7,
        commit_time: 0,
        event_id: None,
    };
    check(Some(Delivered::UpTo(last)), 2);
}

#[test]
fn limits_the_listed_events_and_the_counted_topics() {
    let topic = |number: usize| insert_row("a", &number.to_string());
    let mut messages = vec![begin(0x200), outbox()];
    messages.extend((0..1002).map(topic));
    // A topic that was seen before the limit was reached is still counted separately.
    messages.push(topic(7));
    let found = report(table_preview(ALL, None), &messages);
    assert_eq!((found.transactions, found.events), (1, 1003));
    assert_eq!(found.topics.len(), 1001);
    assert_eq!(found.topics[""], 2);
    assert_eq!(found.topics["outbox.event.7"], 2);
    assert_eq!(found.topics["outbox.event.999"], 1);
    assert_eq!(found.first.len(), 20);
    assert_eq!(found.first[19].position(), position(0x200, 19));
    assert_eq!(found.last, Some(position(0x200, 1002)));
}

#[test]
fn lists_unroutable_events_with_the_reason_and_continues() {
    let messages = [
        begin(0x200),
        insert("a"),
        relation("outbox", &[("id", 25)]),
        insert("b"),
        b"?".to_vec(),
        outbox(),
        insert("c"),
        insert_row("d", &"é".repeat(5000)),
        commit(0x200),
    ];
    let (events, found) = first_events(report(table_preview(ALL, None), &messages));
    let starts = [
        "row, which can't be converted to a record: ",
        "row, which can't be converted to a record: ",
        "message, which can't be converted to a record: ",
        "row with id c, for topic outbox.event.order",
        "row with id d, which can't be converted to a record: ",
    ];
    let words = ["16500", "aggregatetype", "0x3f", "order", "outbox.event.éé"];
    assert_eq!(events.len(), starts.len(), "{events:?}");
    for (index, (event, (start, word))) in events.iter().zip(starts.iter().zip(words)).enumerate() {
        let start = format!("00000000/00000200:000000000{index} {start}");
        let rest = event.strip_prefix(&start).expect(event);
        assert!(event.contains(word), "{word:?} in {event:?}");
        assert!(rest.chars().count() <= 300, "{event}");
    }
    assert_eq!((found.events, found.unroutable), (5, 4));
}
