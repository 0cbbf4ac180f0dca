//! Events that can't be delivered.

use super::*;
use crate::delivery::failure::RefusalCause;
use crate::pipeline::recovery::{Remedy, core_remedy};
use crate::pipeline::settings::Undeliverable;

const TOPIC: &str = "walpost-dead-letters";

impl Scene {
    /// Starts a transaction in which events of these kinds become dead letters.
    fn with_dead_letters(mut self, oversize: bool, unroutable: bool) -> Self {
        let becomes = |letter| match letter {
            true => Undeliverable::DeadLetter,
            false => Undeliverable::Halt,
        };
        let settings = DeadLetterSettings {
            oversize: becomes(oversize),
            unroutable: becomes(unroutable),
            malformed: becomes(unroutable),
            topic: TOPIC.to_owned(),
        };
        self.core.send_dead_letters("orders", &settings);
        self.done(&begin(0x200));
        self.done(&outbox());
        self
    }

    fn counts(&self) -> (u64, u64) {
        let counts = self.core.dead_letters().expect("there can be some");
        (counts.oversize, counts.unroutable)
    }

    fn header(&self, name: &str) -> Option<&str> {
        let headers = self.sink.headers.iter();
        let mut values = headers.filter_map(|header| header.split_once('='));
        values
            .find(|(found, _)| *found == name)
            .map(|(_, value)| value)
    }
}

fn too_large() -> Result<Produced, SinkError> {
    Err(SinkError::TooLarge {
        topic: "t".to_owned(),
        bytes: 9,
        limit: 8,
        brokers: String::new(),
    })
}

/// Returns a row with an invalid topic.
fn lost(id: &str) -> Vec<u8> {
    let row = tuple(b'N', &[id, "no topic", "key", id]);
    [&b"I"[..], &OUTBOX.to_be_bytes(), &row].concat()
}

#[test]
fn an_event_that_is_too_large_leaves_its_payload_out() {
    let mut scene = Scene::new().with_dead_letters(true, false);
    scene.sink.answers = vec![too_large()];
    scene.done(&insert("a"));
    assert_eq!(
        scene.accepted(),
        ["walpost-dead-letters key - 00000000/00000200:0000000000"]
    );
    for (name, value) in [
        ("id", "a"),
        ("walpost-error", "oversize"),
        ("walpost-payload-bytes", "1"),
        ("walpost-source-table", "public.outbox"),
        ("walpost-source-topic", "outbox.event.order"),
        ("walpost-event-id", "a"),
        ("walpost-pipeline", "orders"),
    ] {
        assert_eq!(scene.header(name), Some(value), "{name}");
    }
    let message = scene.header("walpost-error-message").expect("a reason");
    assert!(message.contains("message.max.bytes"), "{message}");
    scene.done(&insert("b"));
    scene.done(&commit(0x200));
    assert_eq!(
        scene.accepted()[1],
        "outbox.event.order key b 00000000/00000200:0000000001"
    );
    assert_eq!(scene.counts(), (1, 0));
    assert_eq!(scene.deliveries.stats().dead_letters().oversize, 1);
    assert_eq!(scene.confirmed(), Lsn(0x100), "it is not delivered yet");
    scene.deliver_all();
    assert_eq!(scene.confirmed(), Lsn(0x210));
}

#[test]
fn an_event_that_no_record_can_be_made_of_keeps_its_payload() {
    let mut scene = Scene::new().with_dead_letters(false, true);
    scene.done(&lost("a"));
    let no_partition = SinkError::NoPartition {
        topic: "t".to_owned(),
        partition: 7,
    };
    scene.sink.answers = vec![Err(no_partition)];
    scene.done(&insert("b"));
    assert_eq!(
        scene.accepted(),
        [
            "walpost-dead-letters key a 00000000/00000200:0000000000",
            "walpost-dead-letters key b 00000000/00000200:0000000001",
        ]
    );
    assert_eq!(scene.header("walpost-error"), Some("unroutable"));
    let message = scene.header("walpost-error-message").expect("a reason");
    assert!(message.contains("no partition 7"), "{message}");
    assert_eq!(scene.header("walpost-payload-bytes"), None);
    assert_eq!(scene.counts(), (0, 2));
}

#[test]
fn an_event_whose_topic_can_not_be_used_keeps_its_payload() {
    let denied = SinkError::TopicDenied {
        topic: "t".to_owned(),
        reason: "not authorized".to_owned(),
        grant: String::new(),
    };
    let missing = SinkError::TopicMissing {
        topic: "t".to_owned(),
        brokers: String::new(),
    };
    let not_created = SinkError::TopicNotCreated {
        topic: "t".to_owned(),
        brokers: String::new(),
        reason: "policy violation".to_owned(),
    };
    let refused = SinkError::RecordRefused {
        topic: "t".to_owned(),
        bytes: 1,
        reason: "invalid timestamp".to_owned(),
        at: Position {
            commit: Lsn(0x200),
            index: 0,
        },
        cause: RefusalCause::Other,
    };
    for (error, words) in [
        (denied, "not authorized"),
        (missing, "does not exist"),
        (not_created, "policy violation"),
        (refused, "invalid timestamp"),
    ] {
        let mut scene = Scene::new().with_dead_letters(false, true);
        scene.sink.answers = vec![Err(error)];
        scene.done(&insert("a"));
        scene.done(&insert("b"));
        assert_eq!(
            scene.accepted(),
            [
                "walpost-dead-letters key a 00000000/00000200:0000000000",
                "outbox.event.order key b 00000000/00000200:0000000001",
            ]
        );
        assert_eq!(scene.counts(), (0, 1), "{words}");
    }
}

#[test]
fn each_setting_is_for_its_own_kind_and_without_one_all_halt() {
    let halts = |mut scene: Scene, row: &[u8], answer: Option<Result<Produced, SinkError>>| {
        scene.sink.answers = answer.into_iter().collect();
        let error = scene.send(row).expect_err("halts");
        assert_eq!(core_remedy(&error), Remedy::Halt, "{error}");
        assert!(scene.accepted().is_empty());
    };
    let only = |oversize, unroutable| Scene::new().with_dead_letters(oversize, unroutable);
    halts(only(true, false), &lost("a"), None);
    halts(only(false, true), &insert("a"), Some(too_large()));
    halts(only(false, false), &lost("a"), None);
    halts(only(false, false), &insert("a"), Some(too_large()));
    assert_eq!(only(false, false).core.dead_letters(), None);
    // There is no dead letter if the row is not an event, or the event is not the cause of the
    // error.
    let other = insert("a");
    let other = [&b"I"[..], &7_u32.to_be_bytes(), &other[5..]].concat();
    halts(only(true, true), &other, None);
    let broken = SinkError::Broken("no thread".to_owned());
    let mut scene = only(true, true);
    scene.sink.answers = vec![Err(broken)];
    scene
        .send(&insert("a"))
        .expect_err("it is not about the event");
    assert!(scene.accepted().is_empty());
}

#[test]
fn oversize_dead_letter_is_reduced_until_the_sink_accepts_it() {
    let after = |refusals: usize, oversize: bool| {
        let mut scene = Scene::new().with_dead_letters(oversize, true);
        scene.sink.answers = (0..refusals).map(|_| too_large()).collect();
        scene
    };
    let position = "00000000/00000200:0000000000";
    for (refusals, rest) in [
        (0, format!("key a {position}")),
        (1, format!("key a {position}")),
        (2, format!("key - {position}")),
        (3, format!("key - {position}")),
        (
            4,
            format!(r#"- {{"walpost-position":"{position}"}} {position}"#),
        ),
    ] {
        let mut scene = after(refusals, true);
        scene.done(&lost("a"));
        assert_eq!(scene.accepted(), [format!("walpost-dead-letters {rest}")]);
        assert_eq!(scene.header("walpost-error"), Some("unroutable"));
        let payload_bytes = (refusals >= 2).then_some("1");
        assert_eq!(scene.header("walpost-payload-bytes"), payload_bytes);
    }

    // The sink accepts nothing, or the payload must not be omitted.
    for (refusals, oversize) in [(5, true), (2, false)] {
        let mut scene = after(refusals, oversize);
        let error = scene.send(&lost("a")).expect_err("halts");
        assert_eq!(core_remedy(&error), Remedy::Halt);
        let text = error.to_string();
        for word in [
            "dead letter of row with id a",
            "00000200:0000000000",
            "message.max.bytes",
            "is not a valid topic name",
        ] {
            assert!(text.contains(word), "{word:?} in {text:?}");
        }
        assert_eq!(scene.core.delivery.watermark.in_flight().records, 0);
        assert_eq!(scene.counts(), (0, 0));
        assert!(scene.accepted().is_empty(), "{:?}", scene.accepted());
    }
}

#[test]
fn a_dead_letter_that_has_to_wait_is_counted_once() {
    let mut scene = Scene::new().with_dead_letters(true, true);
    scene.sink.answers = vec![Ok(Produced::Full), Ok(Produced::NewTopic)];
    assert_eq!(scene.send(&lost("a")).expect("waits"), Step::Full);
    let step = scene.send(&lost("a")).expect("waits");
    assert_eq!(step, Step::NewTopic(TOPIC.to_owned()));
    assert_eq!(scene.counts(), (0, 0));
    scene.done(&lost("a"));
    assert_eq!(scene.counts(), (0, 1));
    assert_eq!(scene.core.delivery.watermark.in_flight().records, 1);

    // The core is re-created with its sink.
    let mut next = Scene::new().with_dead_letters(true, true);
    next.core.resume_counts(None, scene.core.dead_letters());
    assert_eq!(next.counts(), (0, 1));
}

#[test]
fn a_message_that_can_not_be_read_is_its_own_payload_or_leaves_it_out() {
    let mut scene = Scene::as_messages().with_dead_letters(false, true);
    scene.done(&logical(true, "ours", b"\x02?"));
    scene.done(&published("b"));
    assert_eq!(
        scene.accepted(),
        [
            "walpost-dead-letters - \u{2}? 00000000/00000200:0000000000",
            "outbox.event.order key b 00000000/00000200:0000000001",
        ]
    );
    scene.done(&logical(true, "ours", b""));
    assert_eq!(scene.header("walpost-source-prefix"), Some("ours"));
    let message = scene.header("walpost-error-message").expect("a reason");
    assert!(message.contains("it is empty"), "{message}");
    assert_eq!(scene.header("walpost-event-id"), None);
    assert_eq!(scene.header("walpost-error"), Some("malformed"));
    // Regardless of its size, the pipeline continues without an operator.
    scene.sink.answers = vec![too_large(), too_large()];
    scene.done(&logical(true, "ours", b"\x03?"));
    let letter = scene.accepted().pop().expect("a letter");
    assert_eq!(
        letter,
        "walpost-dead-letters - - 00000000/00000200:0000000003"
    );
    assert_eq!(scene.header("walpost-payload-bytes"), Some("2"));
    assert_eq!(scene.counts(), (0, 0));
    let counts = scene.core.dead_letters().expect("there are some");
    assert_eq!(counts.malformed, 3);
}

#[test]
fn unreadable_message_is_ignored_or_dead_lettered_or_halts() {
    let large = |transactional, prefix: &str, content_bytes: u32| {
        let mut head = logical(transactional, prefix, b"");
        head.truncate(head.len() - 4);
        [head, content_bytes.to_be_bytes().to_vec(), vec![b'x'; 9]].concat()
    };
    let mut scene = Scene::as_messages().with_dead_letters(false, true);
    let send = |scene: &mut Scene, head: &[u8]| {
        let (bytes, max) = (1 << 28, 1 << 26);
        let frame = Frame::LargeMessage { head, bytes, max };
        scene.core.frame(&frame, &mut scene.sink)
    };
    let prefix = "p".repeat(500);
    for head in [
        large(true, "theirs", 1 << 28),
        logical(true, &prefix, b"")[..128].to_vec(),
        large(false, "ours", 1 << 28),
        large(true, "ours", 1 << 28),
    ] {
        assert_eq!(send(&mut scene, &head).expect("goes on"), Step::Done);
    }
    scene.done(&published("b"));
    assert_eq!(
        scene.accepted(),
        [
            "walpost-dead-letters - - 00000000/00000200:0000000002",
            "outbox.event.order key b 00000000/00000200:0000000003",
        ]
    );
    let left = scene.core.left_alone().expect("of a log");
    assert_eq!((left.foreign, left.nontransactional), (2, 1));
    let halts = |mut scene: Scene, head: &[u8], text: &str| {
        let error = send(&mut scene, head).expect_err("halts");
        assert_eq!(core_remedy(&error), Remedy::Halt);
        assert!(error.to_string().contains(text), "{error}");
    };
    let as_messages = |letters| Scene::as_messages().with_dead_letters(false, letters);
    // walpost.publish may have written such a message, if max_row_bytes was lowered.
    halts(
        as_messages(true),
        &large(true, "ours", 1 << 24),
        "max_row_bytes allows",
    );
    let text = "it has 268435456 bytes";
    halts(as_messages(false), &large(true, "ours", 1 << 28), text);
}

#[test]
fn a_dead_letter_that_kafka_has_is_left_out() {
    let check = |new: fn() -> Scene, bad: &[u8], other: &[u8]| {
        let mut scene = new();
        scene.core.leave_out(None, Lsn(0x100), Lsn(0x100));
        let mut scene = scene.with_dead_letters(true, true);
        scene.done(bad);
        let last = scene.core.last_delivered().expect("it counts as delivered");
        assert_eq!(last.position().index, 0);

        // The event is omitted even if it would halt the pipeline now.
        for still in [true, false] {
            let mut scene = new();
            let last = Delivered::UpTo(last.clone());
            scene.core.leave_out(Some(last), Lsn(0x100), Lsn(0x100));
            let mut scene = scene.with_dead_letters(still, still);
            scene.done(bad);
            scene.done(other);
            let taken = scene.accepted();
            assert_eq!(taken.len(), 1, "{taken:?}");
            assert!(taken[0].contains(":0000000001"), "{taken:?}");
        }
    };
    check(Scene::new, &lost("a"), &insert("b"));
    let unreadable = logical(true, "ours", b"?");
    check(Scene::as_messages, &unreadable, &published("b"));
}

#[test]
fn a_reason_that_quotes_a_long_value_is_cut() {
    let mut scene = Scene::new().with_dead_letters(false, true);
    let long = "é".repeat(5000);
    let row = tuple(b'N', &["a", &long, "key", "a"]);
    scene.done(&[&b"I"[..], &OUTBOX.to_be_bytes(), &row].concat());
    let message = scene.header("walpost-error-message").expect("a reason");
    assert!((900..=1000).contains(&message.len()), "{}", message.len());
    let topic = scene.header("walpost-source-topic").expect("what it gave");
    assert_eq!(topic, format!("outbox.event.{long}"), "that is whole");
}

#[test]
fn logs_which_event_became_a_dead_letter_and_why() {
    let check = |scene: Scene, bad: &[u8], words: &[&str]| {
        let mut scene = scene.with_dead_letters(true, true);
        let lines = logged(|| scene.done(bad));
        assert_eq!(lines.len(), 1, "{lines:?}");
        for word in words
            .iter()
            .chain(&["orders", TOPIC, "00000200:0000000000"])
        {
            assert!(lines[0].contains(word), "{word:?} in {lines:?}");
        }
    };
    let words = ["dead letter of row with id a: ", "no topic", "unroutable"];
    check(Scene::new(), &lost("a"), &words);
    let words = ["dead letter of message: ", "0x02", "malformed"];
    check(
        Scene::as_messages(),
        &logical(true, "ours", b"\x02"),
        &words,
    );
}
