//! Tests for finding the topics of events that were received but not yet passed to the sink.

use super::*;

fn insert_row(aggregate: &str) -> Vec<u8> {
    let row = tuple(b'N', &["id", aggregate, "key", "text"]);
    [&b"I"[..], &OUTBOX.to_be_bytes(), &row].concat()
}

/// Returns the topics of the events in `messages`, which are the next messages of the stream.
fn topics_ahead(fixture: &Fixture, messages: &[Vec<u8>]) -> Vec<String> {
    let frame = |message: &Vec<u8>| [&b"w"[..], &[0; 24], message].concat();
    let frames: Vec<_> = messages.iter().map(frame).collect();
    fixture.core.topics_ahead(frames.iter().map(Vec::as_slice))
}

#[test]
fn lists_each_topic_of_the_buffered_rows_once() {
    let mut fixture = Fixture::new();
    fixture.process(&begin(0x200));
    fixture.process(&outbox());
    let ahead = [
        insert_row("a"),
        insert_row("b"),
        insert_row("no topic"),
        commit(0x200),
        begin(0x300),
        insert_row("a"),
        insert_row("c"),
        outbox(),
        insert_row("d"),
    ];
    let expected = ["outbox.event.a", "outbox.event.b", "outbox.event.c"];
    assert_eq!(
        topics_ahead(&fixture, &ahead),
        expected,
        "topics of rows after a possible table change must not be listed"
    );
    assert!(fixture.accepted().is_empty());
    fixture.process(&insert_row("a"));
    assert_eq!(
        fixture.accepted(),
        ["outbox.event.a key text 00000000/00000200:0000000000"],
        "listing topics must not change the decoder's state"
    );
}

#[test]
fn lists_no_topics_for_messages_without_the_prefix() {
    let mut fixture = Fixture::as_messages();
    fixture.process(&begin(0x200));
    let ahead = [
        logical(true, "ours", b"?"),
        logical(true, "theirs", b"anything"),
        logical(false, "ours", b"anything"),
    ];
    assert!(topics_ahead(&fixture, &ahead).is_empty());
    let ahead = [&ahead[..], &[published("a")]].concat();
    assert_eq!(topics_ahead(&fixture, &ahead), ["outbox.event.order"]);
}

/// A topic whose events are already in Kafka may have been deleted in the meantime, and must not be
/// created again.
#[test]
fn lists_no_topics_for_rows_that_may_already_be_in_kafka() {
    let delivered = {
        let mut fixture = Fixture::new();
        fixture.core.omit_delivered(None, Lsn(0x100), Lsn(0x100));
        fixture.process(&begin(0x200));
        fixture.process(&outbox());
        fixture.process(&insert("a"));
        Delivered::UpTo(fixture.core.last_delivered().expect("one was delivered"))
    };
    let mut fixture = Fixture::new();
    fixture
        .core
        .omit_delivered(Some(delivered), Lsn(0x100), Lsn(0x100));
    fixture.process(&begin(0x200));
    fixture.process(&outbox());
    assert!(topics_ahead(&fixture, &[insert_row("a")]).is_empty());
}

#[test]
fn lists_no_topics_for_rows_that_may_have_been_copied() {
    let ahead = |snapshot_lsn| {
        let mut fixture = Fixture::new();
        fixture.core.omit_copied(CopyProgress {
            key: vec!["id".to_owned()],
            rows: 1,
            chunks: vec![Chunk {
                snapshot_lsn: Lsn(snapshot_lsn),
                upto: None,
            }],
        });
        fixture.process(&begin(0x200));
        fixture.process(&outbox());
        topics_ahead(&fixture, &[insert_row("a")])
    };
    assert!(ahead(0x201).is_empty());
    assert_eq!(ahead(0x200), ["outbox.event.a"]);
    assert_eq!(ahead(0x1ff), ["outbox.event.a"]);
}

#[test]
fn lists_no_topics_for_malformed_messages() {
    let mut fixture = Fixture::new();
    fixture.process(&begin(0x200));
    fixture.process(&outbox());
    for bytes in [&b""[..], b"w", b"k", b"x", &[b'w'; 40]] {
        let bodies = [bytes].into_iter();
        assert!(fixture.core.topics_ahead(bodies).is_empty());
    }
}
