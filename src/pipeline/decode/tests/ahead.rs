//! The topics of events that were received but not yet passed to the sink.

use super::*;

fn insert_row(aggregate: &str) -> Vec<u8> {
    let row = tuple(b'N', &["id", aggregate, "key", "text"]);
    [&b"I"[..], &OUTBOX.to_be_bytes(), &row].concat()
}

/// Returns the topics ahead in the messages, which come next in the stream.
fn topics_ahead(scene: &Scene, messages: &[Vec<u8>]) -> Vec<String> {
    let frame = |message: &Vec<u8>| [&b"w"[..], &[0; 24], message].concat();
    let frames: Vec<_> = messages.iter().map(frame).collect();
    scene.core.topics_ahead(frames.iter().map(Vec::as_slice))
}

#[test]
fn topics_ahead_are_those_of_rows_that_have_one_each_once() {
    let mut scene = Scene::new();
    scene.done(&begin(0x200));
    scene.done(&outbox());
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
        topics_ahead(&scene, &ahead),
        expected,
        "none behind a table that may have changed"
    );
    assert!(scene.accepted().is_empty());
    scene.done(&insert_row("a"));
    assert_eq!(
        scene.accepted(),
        ["outbox.event.a key text 00000000/00000200:0000000000"],
        "what was looked at has not been taken"
    );
}

#[test]
fn topics_ahead_are_those_of_messages_with_the_prefix() {
    let mut scene = Scene::as_messages();
    scene.done(&begin(0x200));
    let ahead = [
        logical(true, "ours", b"?"),
        logical(true, "theirs", b"anything"),
        logical(false, "ours", b"anything"),
    ];
    assert!(topics_ahead(&scene, &ahead).is_empty());
    let ahead = [&ahead[..], &[published("a")]].concat();
    assert_eq!(topics_ahead(&scene, &ahead), ["outbox.event.order"]);
}

/// Their topics may have been deleted in the meantime.
#[test]
fn topics_of_rows_that_kafka_may_have_are_not_ahead() {
    let delivered = {
        let mut scene = Scene::new();
        scene.core.leave_out(None, Lsn(0x100), Lsn(0x100));
        scene.done(&begin(0x200));
        scene.done(&outbox());
        scene.done(&insert("a"));
        Delivered::UpTo(scene.core.last_delivered().expect("one was delivered"))
    };
    let mut scene = Scene::new();
    scene
        .core
        .leave_out(Some(delivered), Lsn(0x100), Lsn(0x100));
    scene.done(&begin(0x200));
    scene.done(&outbox());
    assert!(topics_ahead(&scene, &[insert_row("a")]).is_empty());
}

#[test]
fn topics_of_rows_that_the_copy_may_have_are_not_ahead() {
    let ahead = |snapshot_lsn| {
        let mut scene = Scene::new();
        scene.core.leave_out_copied(CopyProgress {
            key: vec!["id".to_owned()],
            rows: 1,
            chunks: vec![Chunk {
                snapshot_lsn: Lsn(snapshot_lsn),
                upto: None,
            }],
        });
        scene.done(&begin(0x200));
        scene.done(&outbox());
        topics_ahead(&scene, &[insert_row("a")])
    };
    assert!(ahead(0x201).is_empty());
    assert_eq!(ahead(0x200), ["outbox.event.a"]);
    assert_eq!(ahead(0x1ff), ["outbox.event.a"]);
}

#[test]
fn topics_ahead_of_anything_are_none() {
    let mut scene = Scene::new();
    scene.done(&begin(0x200));
    scene.done(&outbox());
    for bytes in [&b""[..], b"w", b"k", b"x", &[b'w'; 40]] {
        let bodies = [bytes].into_iter();
        assert!(scene.core.topics_ahead(bodies).is_empty());
    }
}
