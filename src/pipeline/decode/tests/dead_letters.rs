//! Tests for undeliverable events.

use super::*;
use crate::delivery::failure::RefusalCause;
use crate::pipeline::recovery::{Remedy, core_remedy};
use crate::pipeline::settings::Undeliverable;

const TOPIC: &str = "walpost-dead-letters";

impl Fixture {
    /// Enables dead letters for the given kinds of events, and starts a transaction. `unroutable`
    /// also applies to malformed events.
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
        self.process(&begin(0x200));
        self.process(&outbox());
        self
    }

    fn counts(&self) -> (u64, u64) {
        let counts = self.core.dead_letters().expect("dead letters are enabled");
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

/// Returns an inserted row that maps to an invalid topic name.
fn unroutable(id: &str) -> Vec<u8> {
    let row = tuple(b'N', &[id, "no topic", "key", id]);
    [&b"I"[..], &OUTBOX.to_be_bytes(), &row].concat()
}

#[test]
fn omits_the_payload_from_the_dead_letter_of_an_oversize_event() {
    let mut fixture = Fixture::new().with_dead_letters(true, false);
    fixture.sink.results = vec![too_large()];
    fixture.process(&insert("a"));
    assert_eq!(
        fixture.accepted(),
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
        assert_eq!(fixture.header(name), Some(value), "{name}");
    }
    let message = fixture.header("walpost-error-message").expect("a reason");
    assert!(message.contains("message.max.bytes"), "{message}");
    fixture.process(&insert("b"));
    fixture.process(&commit(0x200));
    assert_eq!(
        fixture.accepted()[1],
        "outbox.event.order key b 00000000/00000200:0000000001"
    );
    assert_eq!(fixture.counts(), (1, 0));
    assert_eq!(fixture.deliveries.stats().dead_letters().oversize, 1);
    assert_eq!(
        fixture.confirmed(),
        Lsn(0x100),
        "the dead letter has not been delivered"
    );
    fixture.deliver_all();
    assert_eq!(fixture.confirmed(), Lsn(0x210));
}

#[test]
fn keeps_the_payload_in_the_dead_letter_of_an_unroutable_event() {
    let mut fixture = Fixture::new().with_dead_letters(false, true);
    fixture.process(&unroutable("a"));
    let no_partition = SinkError::NoPartition {
        topic: "t".to_owned(),
        partition: 7,
    };
    fixture.sink.results = vec![Err(no_partition)];
    fixture.process(&insert("b"));
    assert_eq!(
        fixture.accepted(),
        [
            "walpost-dead-letters key a 00000000/00000200:0000000000",
            "walpost-dead-letters key b 00000000/00000200:0000000001",
        ]
    );
    assert_eq!(fixture.header("walpost-error"), Some("unroutable"));
    let message = fixture.header("walpost-error-message").expect("a reason");
    assert!(
        message.contains("topic \"t\" does not have partition 7"),
        "{message}"
    );
    assert_eq!(fixture.header("walpost-payload-bytes"), None);
    assert_eq!(fixture.counts(), (0, 2));
}

#[test]
fn keeps_the_payload_in_the_dead_letter_of_an_event_with_an_unusable_topic() {
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
    let refused = SinkError::RecordRejected {
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
        let mut fixture = Fixture::new().with_dead_letters(false, true);
        fixture.sink.results = vec![Err(error)];
        fixture.process(&insert("a"));
        fixture.process(&insert("b"));
        assert_eq!(
            fixture.accepted(),
            [
                "walpost-dead-letters key a 00000000/00000200:0000000000",
                "outbox.event.order key b 00000000/00000200:0000000001",
            ]
        );
        assert_eq!(fixture.counts(), (0, 1), "{words}");
    }
}

#[test]
fn halts_unless_dead_letters_are_enabled_for_the_kind_of_failure() {
    let halts = |mut fixture: Fixture, row: &[u8], answer: Option<Result<Produced, SinkError>>| {
        fixture.sink.results = answer.into_iter().collect();
        let error = fixture.send(row).expect_err("an error");
        assert_eq!(core_remedy(&error), Remedy::Halt, "{error}");
        assert!(fixture.accepted().is_empty());
    };
    let only = |oversize, unroutable| Fixture::new().with_dead_letters(oversize, unroutable);
    halts(only(true, false), &unroutable("a"), None);
    halts(only(false, true), &insert("a"), Some(too_large()));
    halts(only(false, false), &unroutable("a"), None);
    halts(only(false, false), &insert("a"), Some(too_large()));
    assert_eq!(only(false, false).core.dead_letters(), None);
    // No dead letter is sent if the row is not an event, or if the sink fails for a reason other
    // than the record.
    let other = insert("a");
    let other = [&b"I"[..], &7_u32.to_be_bytes(), &other[5..]].concat();
    halts(only(true, true), &other, None);
    let broken = SinkError::Broken("no thread".to_owned());
    let mut fixture = only(true, true);
    fixture.sink.results = vec![Err(broken)];
    fixture.send(&insert("a")).expect_err("an error");
    assert!(fixture.accepted().is_empty());
}

#[test]
fn shrinks_a_dead_letter_until_the_sink_accepts_it() {
    let after = |refusals: usize, oversize: bool| {
        let mut fixture = Fixture::new().with_dead_letters(oversize, true);
        fixture.sink.results = (0..refusals).map(|_| too_large()).collect();
        fixture
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
        let mut fixture = after(refusals, true);
        fixture.process(&unroutable("a"));
        assert_eq!(fixture.accepted(), [format!("walpost-dead-letters {rest}")]);
        assert_eq!(fixture.header("walpost-error"), Some("unroutable"));
        let payload_bytes = (refusals >= 2).then_some("1");
        assert_eq!(fixture.header("walpost-payload-bytes"), payload_bytes);
    }

    // The pipeline halts if the sink rejects the dead letter at every size, or if the payload must
    // not be omitted.
    for (refusals, oversize) in [(5, true), (2, false)] {
        let mut fixture = after(refusals, oversize);
        let error = fixture.send(&unroutable("a")).expect_err("an error");
        assert_eq!(core_remedy(&error), Remedy::Halt);
        let text = error.to_string();
        for word in [
            "row with id a",
            "00000200:0000000000",
            "message.max.bytes",
            "not a valid topic",
        ] {
            assert!(text.contains(word), "{word:?} in {text:?}");
        }
        assert_eq!(fixture.core.delivery.watermark.in_flight().records, 0);
        assert_eq!(fixture.counts(), (0, 0));
        assert!(fixture.accepted().is_empty(), "{:?}", fixture.accepted());
    }
}

#[test]
fn counts_a_retried_dead_letter_once() {
    let mut fixture = Fixture::new().with_dead_letters(true, true);
    fixture.sink.results = vec![Ok(Produced::Full), Ok(Produced::NewTopic)];
    assert_eq!(fixture.send(&unroutable("a")).expect("success"), Step::Full);
    let step = fixture.send(&unroutable("a")).expect("success");
    assert_eq!(step, Step::NewTopic(TOPIC.to_owned()));
    assert_eq!(fixture.counts(), (0, 0));
    fixture.process(&unroutable("a"));
    assert_eq!(fixture.counts(), (0, 1));
    assert_eq!(fixture.core.delivery.watermark.in_flight().records, 1);

    // A new `Core` starts with the counts of the previous `Core`.
    let mut next = Fixture::new().with_dead_letters(true, true);
    next.core.resume_counts(None, fixture.core.dead_letters());
    assert_eq!(next.counts(), (0, 1));
}

#[test]
fn uses_an_invalid_message_as_the_dead_letter_payload_unless_it_is_too_large() {
    let mut fixture = Fixture::as_messages().with_dead_letters(false, true);
    fixture.process(&logical(true, "ours", b"\x02?"));
    fixture.process(&published("b"));
    assert_eq!(
        fixture.accepted(),
        [
            "walpost-dead-letters - \u{2}? 00000000/00000200:0000000000",
            "outbox.event.order key b 00000000/00000200:0000000001",
        ]
    );
    fixture.process(&logical(true, "ours", b""));
    assert_eq!(fixture.header("walpost-source-prefix"), Some("ours"));
    let message = fixture.header("walpost-error-message").expect("a reason");
    assert!(message.contains("the content is empty"), "{message}");
    assert_eq!(fixture.header("walpost-event-id"), None);
    assert_eq!(fixture.header("walpost-error"), Some("malformed"));
    // The pipeline continues without operator intervention, even if the malformed message does not
    // fit into the dead letter.
    fixture.sink.results = vec![too_large(), too_large()];
    fixture.process(&logical(true, "ours", b"\x03?"));
    let letter = fixture.accepted().pop().expect("a letter");
    assert_eq!(
        letter,
        "walpost-dead-letters - - 00000000/00000200:0000000003"
    );
    assert_eq!(fixture.header("walpost-payload-bytes"), Some("2"));
    assert_eq!(fixture.counts(), (0, 0));
    let counts = fixture
        .core
        .dead_letters()
        .expect("dead letters are enabled");
    assert_eq!(counts.malformed, 3);
}

#[test]
fn writes_a_dead_letter_or_halts_only_for_oversized_messages_that_are_events() {
    let large = |transactional, prefix: &str, content_bytes: u32| {
        let mut head = logical(transactional, prefix, b"");
        head.truncate(head.len() - 4);
        [head, content_bytes.to_be_bytes().to_vec(), vec![b'x'; 9]].concat()
    };
    let mut fixture = Fixture::as_messages().with_dead_letters(false, true);
    let send = |fixture: &mut Fixture, head: &[u8]| {
        let (bytes, max) = (1 << 28, 1 << 26);
        let frame = Frame::LargeMessage { head, bytes, max };
        fixture.core.frame(&frame, &mut fixture.sink)
    };
    let prefix = "p".repeat(500);
    for head in [
        large(true, "theirs", 1 << 28),
        logical(true, &prefix, b"")[..128].to_vec(),
        large(false, "ours", 1 << 28),
        large(true, "ours", 1 << 28),
    ] {
        assert_eq!(send(&mut fixture, &head).expect("success"), Step::Done);
    }
    fixture.process(&published("b"));
    assert_eq!(
        fixture.accepted(),
        [
            "walpost-dead-letters - - 00000000/00000200:0000000002",
            "outbox.event.order key b 00000000/00000200:0000000003",
        ]
    );
    let left = fixture
        .core
        .ignored_counts()
        .expect("an outbox with messages");
    assert_eq!((left.foreign, left.nontransactional), (2, 1));
    let halts = |mut fixture: Fixture, head: &[u8], text: &str| {
        let error = send(&mut fixture, head).expect_err("an error");
        assert_eq!(core_remedy(&error), Remedy::Halt);
        assert!(error.to_string().contains(text), "{error}");
    };
    let as_messages = |letters| Fixture::as_messages().with_dead_letters(false, letters);
    // walpost.publish may have written a message of this size before max_row_bytes was lowered, so
    // it counts as an event.
    halts(
        as_messages(true),
        &large(true, "ours", 1 << 24),
        "max_row_bytes allows",
    );
    let text = "the content is 268435456 bytes long";
    halts(as_messages(false), &large(true, "ours", 1 << 28), text);
}

#[test]
fn omits_dead_letters_that_are_already_in_kafka() {
    let check = |new: fn() -> Fixture, bad: &[u8], other: &[u8]| {
        let mut fixture = new();
        fixture.core.omit_delivered(None, Lsn(0x100), Lsn(0x100));
        let mut fixture = fixture.with_dead_letters(true, true);
        fixture.process(bad);
        let last = fixture
            .core
            .last_delivered()
            .expect("the dead letter counts as delivered");
        assert_eq!(last.position().index, 0);

        // An event that has already been delivered is skipped, even if it would halt the pipeline
        // under the current settings.
        for is_enabled in [true, false] {
            let mut fixture = new();
            let last = Delivered::UpTo(last.clone());
            fixture
                .core
                .omit_delivered(Some(last), Lsn(0x100), Lsn(0x100));
            let mut fixture = fixture.with_dead_letters(is_enabled, is_enabled);
            fixture.process(bad);
            fixture.process(other);
            let accepted = fixture.accepted();
            assert_eq!(accepted.len(), 1, "{accepted:?}");
            assert!(accepted[0].contains(":0000000001"), "{accepted:?}");
        }
    };
    check(Fixture::new, &unroutable("a"), &insert("b"));
    let unreadable = logical(true, "ours", b"?");
    check(Fixture::as_messages, &unreadable, &published("b"));
}

#[test]
fn truncates_a_dead_letter_reason_that_quotes_a_long_value() {
    let mut fixture = Fixture::new().with_dead_letters(false, true);
    let long = "é".repeat(5000);
    let row = tuple(b'N', &["a", &long, "key", "a"]);
    fixture.process(&[&b"I"[..], &OUTBOX.to_be_bytes(), &row].concat());
    let message = fixture.header("walpost-error-message").expect("a reason");
    assert!((900..=1000).contains(&message.len()), "{}", message.len());
    let topic = fixture
        .header("walpost-source-topic")
        .expect("the invalid topic");
    assert_eq!(
        topic,
        format!("outbox.event.{long}"),
        "the topic is not truncated"
    );
}

#[test]
fn logs_which_event_became_a_dead_letter_and_why() {
    let check = |fixture: Fixture, bad: &[u8], words: &[&str]| {
        let mut fixture = fixture.with_dead_letters(true, true);
        let lines = logged(|| fixture.process(bad));
        assert_eq!(lines.len(), 1, "{lines:?}");
        for word in words
            .iter()
            .chain(&["orders", TOPIC, "00000200:0000000000"])
        {
            assert!(lines[0].contains(word), "{word:?} in {lines:?}");
        }
    };
    let words = ["row with id a: ", "no topic", "unroutable"];
    check(Fixture::new(), &unroutable("a"), &words);
    let words = ["dead letter for message: ", "0x02", "malformed"];
    check(
        Fixture::as_messages(),
        &logical(true, "ours", b"\x02"),
        &words,
    );
}
