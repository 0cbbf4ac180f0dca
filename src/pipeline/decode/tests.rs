use std::io::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};

use super::*;
use crate::delivery::chunks::Chunk;
use crate::delivery::watermark::{Deliveries, Tag};
use crate::model::window::Window;
use crate::outbox::Record;
use crate::sink::{Produced, SinkError};

mod ahead;
mod copied_rows;
mod dead_letters;
mod preview;
mod tables;

const OUTBOX: u32 = 16_500;

/// A scripted sink, which returns predefined results for records.
#[derive(Default)]
struct Script {
    /// Results to return before it accepts every record.
    answers: Vec<Result<Produced, SinkError>>,
    taken: Vec<(String, Tag)>,
    /// Headers of the last accepted record.
    headers: Vec<String>,
}

impl Sink for Script {
    fn produce(&mut self, record: &Record<'_>, tag: Tag) -> Result<Produced, SinkError> {
        if !self.answers.is_empty() {
            return self.answers.remove(0);
        }
        let text = |bytes: Option<&[u8]>| {
            bytes.map_or("-".to_owned(), |bytes| {
                String::from_utf8_lossy(bytes).into_owned()
            })
        };
        let position = record
            .headers
            .iter()
            .find(|(name, _)| *name == "walpost-position");
        let position = text(position.and_then(|(_, value)| value));
        let shown = [
            record.topic,
            &text(record.key),
            &text(record.payload),
            &position,
        ]
        .join(" ");
        self.taken.push((shown, tag));
        let headers = record.headers.iter();
        self.headers = headers
            .map(|(name, value)| format!("{name}={}", text(value)))
            .collect();
        Ok(Produced::Taken)
    }

    fn flush(&mut self, _busy: bool) -> Result<(), SinkError> {
        Ok(())
    }
}

/// A core, its sink, and the server's side of the stream.
struct Scene {
    core: Core,
    sink: Script,
    deliveries: Arc<Deliveries>,
}

impl Scene {
    fn new() -> Self {
        Self::for_outbox(Outbox::Table("public.outbox".parse().expect("table")))
    }

    fn as_messages() -> Self {
        Self::for_outbox(Outbox::Messages {
            prefix: "ours".to_owned(),
        })
    }

    fn for_outbox(outbox: Outbox) -> Self {
        let window = Window {
            records: 100,
            bytes: 100_000,
        };
        let mut watermark = Watermark::new(window, Lsn::ZERO);
        watermark.reconnected(Lsn(0x100));
        let deliveries = watermark.deliveries();
        let core = Core::new(outbox, OutboxSettings::default(), watermark).expect("settings fit");
        Self {
            core,
            sink: Script::default(),
            deliveries,
        }
    }

    fn send(&mut self, message: &[u8]) -> Result<Step, CoreError> {
        let frame = Frame::XLogData {
            start: Lsn::ZERO,
            wal_end: Lsn::ZERO,
            data: message,
        };
        self.core.frame(&frame, &mut self.sink)
    }

    fn done(&mut self, message: &[u8]) {
        assert_eq!(self.send(message).expect("goes on"), Step::Done);
    }

    fn accepted(&self) -> Vec<&str> {
        self.sink
            .taken
            .iter()
            .map(|(shown, _)| shown.as_str())
            .collect()
    }

    fn deliver_all(&mut self) {
        let tags = self.sink.taken.drain(..).map(|(_, tag)| tag);
        self.deliveries.delivered(tags);
    }

    fn confirmed(&mut self) -> Lsn {
        self.core.delivery.watermark.confirmed().lsn()
    }
}

fn begin(commit: u64) -> Vec<u8> {
    [&b"B"[..], &commit.to_be_bytes(), &[0; 8], &[0, 0, 0, 7]].concat()
}

fn commit(commit: u64) -> Vec<u8> {
    [
        &b"C\0"[..],
        &commit.to_be_bytes(),
        &(commit + 0x10).to_be_bytes(),
        &[0; 8],
    ]
    .concat()
}

fn relation(name: &str, columns: &[(&str, u32)]) -> Vec<u8> {
    let count = u16::try_from(columns.len()).expect("few");
    let mut out = [
        &b"R"[..],
        &OUTBOX.to_be_bytes(),
        b"public\0",
        name.as_bytes(),
        b"\0d",
    ]
    .concat();
    out.extend(count.to_be_bytes());
    for (name, oid) in columns {
        out.extend(
            [
                &b"\0"[..],
                name.as_bytes(),
                b"\0",
                &oid.to_be_bytes(),
                &[255; 4],
            ]
            .concat(),
        );
    }
    out
}

fn outbox() -> Vec<u8> {
    relation(
        "outbox",
        &[
            ("id", 2950),
            ("aggregatetype", 25),
            ("aggregateid", 25),
            ("payload", 25),
        ],
    )
}

/// Returns the lines that are logged while `run` executes.
fn logged(run: impl FnOnce()) -> Vec<String> {
    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);
    impl Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            lines.write(bytes)
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let lines = Lines::default();
    let to = lines.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_ansi(false)
        .with_writer(move || to.clone())
        .finish();
    tracing::subscriber::with_default(subscriber, run);
    let lines = lines.0.lock().unwrap_or_else(PoisonError::into_inner);
    let text = String::from_utf8_lossy(&lines);
    text.lines().map(str::to_owned).collect()
}

fn tuple(kind: u8, values: &[&str]) -> Vec<u8> {
    let mut out = vec![kind];
    out.extend(u16::try_from(values.len()).expect("few").to_be_bytes());
    for value in values {
        out.push(b't');
        out.extend(u32::try_from(value.len()).expect("short").to_be_bytes());
        out.extend(value.as_bytes());
    }
    out
}

fn insert(id: &str) -> Vec<u8> {
    [
        &b"I"[..],
        &OUTBOX.to_be_bytes(),
        &tuple(b'N', &[id, "order", "key", id]),
    ]
    .concat()
}

fn logical(transactional: bool, prefix: &str, content: &[u8]) -> Vec<u8> {
    let len = u32::try_from(content.len()).expect("short");
    [
        &[b'M', u8::from(transactional)][..],
        &[0; 8],
        prefix.as_bytes(),
        b"\0",
        &len.to_be_bytes(),
        content,
    ]
    .concat()
}

/// Returns a message with an event that has this payload.
fn published(payload: &str) -> Vec<u8> {
    let mut out = [&[1][..], &[0xab; 16], &[0; 8]].concat();
    for text in ["order", "key", "Placed"] {
        out.extend(u32::try_from(text.len()).expect("short").to_be_bytes());
        out.extend(text.as_bytes());
    }
    out.extend([255; 4]);
    out.push(1);
    out.extend(payload.as_bytes());
    logical(true, "ours", &out)
}

#[test]
fn messages_become_records_and_each_of_the_transaction_has_an_index() {
    let mut scene = Scene::as_messages();
    for message in [
        logical(false, "ours", b"before"),
        begin(0x200),
        published("a"),
        logical(true, "theirs", b"anything"),
        logical(false, "theirs", b"between"),
        published("b"),
        commit(0x200),
    ] {
        scene.done(&message);
    }
    assert_eq!(
        scene.accepted(),
        [
            "outbox.event.order key a 00000000/00000200:0000000000",
            "outbox.event.order key b 00000000/00000200:0000000002",
        ]
    );
    let left_alone = IgnoredCounts {
        foreign: 1,
        nontransactional: 2,
    };
    assert_eq!(scene.core.left_alone(), Some(left_alone));
    scene.deliver_all();
    assert_eq!(scene.confirmed(), Lsn(0x210));
    assert_eq!(Scene::new().core.left_alone(), None);
}

#[test]
fn messages_are_nothing_to_a_table() {
    let mut scene = Scene::new();
    for message in [
        begin(0x200),
        published("a"),
        outbox(),
        insert("b"),
        commit(0x200),
    ] {
        scene.done(&message);
    }
    assert_eq!(
        scene.accepted(),
        ["outbox.event.order key b 00000000/00000200:0000000000"]
    );
}

#[test]
fn a_message_that_the_sink_refuses_is_taken_unchanged_the_next_time() {
    let mut scene = Scene::as_messages();
    scene.done(&begin(0x200));
    scene.sink.answers = vec![Ok(Produced::Full), Ok(Produced::NewTopic)];
    assert_eq!(scene.send(&published("a")).expect("waits"), Step::Full);
    let step = scene.send(&published("a")).expect("waits");
    assert_eq!(step, Step::NewTopic("outbox.event.order".to_owned()));
    scene.done(&published("a"));
    assert_eq!(
        scene.accepted(),
        ["outbox.event.order key a 00000000/00000200:0000000000"]
    );
}

#[test]
fn invalid_event_stops_a_message_outbox_with_its_position() {
    let check = |prelude: &[Vec<u8>], message: &[u8], words: &[&str]| {
        let mut scene = Scene::as_messages();
        prelude.iter().for_each(|message| scene.done(message));
        let text = scene.send(message).expect_err("stops").to_string();
        words
            .iter()
            .for_each(|word| assert!(text.contains(word), "{word:?} in {text:?}"));
        assert_eq!(
            scene.confirmed(),
            Lsn(0x100),
            "nothing after it is confirmed"
        );
    };
    let open = [begin(0x200), outbox()];
    check(
        &open,
        &logical(true, "ours", b"\x02"),
        &["\"ours\"", "00000200:0000000000", "0x02", "0x01"],
    );
    check(&open, &logical(true, "ours", b"\x01ab"), &["inside id"]);
    check(&[], &published("a"), &["outside a transaction"]);
    let words = [
        "public.outbox",
        "00000200:0000000000",
        "outbox is of messages",
    ];
    check(&open, &insert("a"), &words);
    let delete = [&b"D"[..], &OUTBOX.to_be_bytes(), &tuple(b'K', &["a"])].concat();
    check(&open, &delete, &words);
    check(&open[..1], &insert("a"), &["unknown relation 16500"]);
    let bad_topic = {
        let mut message = published("a");
        let at = message
            .windows(5)
            .position(|w| w == b"order")
            .expect("there");
        message[at] = b'/';
        message
    };
    check(&open, &bad_topic, &["row with id abababab-abab", "/rder"]);
}

#[test]
fn rows_become_records_with_their_positions_and_the_end_is_confirmed_once_delivered() {
    let mut scene = Scene::new();
    for message in [
        begin(0x200),
        outbox(),
        insert("a"),
        insert("b"),
        commit(0x200),
    ] {
        scene.done(&message);
    }
    assert_eq!(
        scene.accepted(),
        [
            "outbox.event.order key a 00000000/00000200:0000000000",
            "outbox.event.order key b 00000000/00000200:0000000001",
        ]
    );
    assert_eq!(scene.confirmed(), Lsn(0x100));
    scene.deliver_all();
    assert_eq!(
        scene.confirmed(),
        Lsn(0x210),
        "the commit's end, not its start"
    );
}

#[test]
fn every_row_message_has_an_index_whatever_becomes_of_it() {
    let mut scene = Scene::new();
    let delete = [&b"D"[..], &OUTBOX.to_be_bytes(), &tuple(b'K', &["a"])].concat();
    let update = [
        &b"U"[..],
        &OUTBOX.to_be_bytes(),
        &tuple(b'N', &["a", "x", "y", "z"]),
    ]
    .concat();
    for message in [
        begin(0x200),
        outbox(),
        delete,
        update,
        insert("c"),
        commit(0x200),
    ] {
        scene.done(&message);
    }
    assert_eq!(
        scene.accepted(),
        ["outbox.event.order key c 00000000/00000200:0000000002"]
    );
}

#[test]
fn a_frame_that_the_sink_refuses_is_taken_unchanged_the_next_time() {
    let mut scene = Scene::new();
    scene.done(&begin(0x200));
    scene.done(&outbox());
    scene.sink.answers = vec![Ok(Produced::Full), Ok(Produced::NewTopic)];
    assert_eq!(scene.send(&insert("a")).expect("waits"), Step::Full);
    let topic = "outbox.event.order".to_owned();
    assert_eq!(
        scene.send(&insert("a")).expect("waits"),
        Step::NewTopic(topic)
    );
    scene.done(&insert("a"));
    assert_eq!(
        scene.accepted(),
        ["outbox.event.order key a 00000000/00000200:0000000000"]
    );
    assert_eq!(scene.core.delivery.watermark.in_flight().records, 1);
    scene.done(&commit(0x200));
    scene.deliver_all();
    assert_eq!(scene.confirmed(), Lsn(0x210));
}

#[test]
fn a_full_window_holds_the_frame_back() {
    let mut scene = Scene::new();
    scene.done(&begin(0x200));
    scene.done(&outbox());
    for n in 0..100 {
        scene.done(&insert(&n.to_string()));
    }
    assert_eq!(scene.send(&insert("more")).expect("waits"), Step::Full);
    scene.deliver_all();
    scene.done(&insert("more"));
}

#[test]
fn a_keepalive_confirms_an_idle_outbox_and_is_answered_when_it_asks() {
    let mut scene = Scene::new();
    let mut keepalive = |wal_end, reply_requested| {
        let frame = Frame::Keepalive {
            wal_end: Lsn(wal_end),
            reply_requested,
        };
        let step = scene.core.frame(&frame, &mut scene.sink).expect("goes on");
        (step, scene.core.delivery.watermark.confirmed().lsn())
    };
    assert_eq!(keepalive(0x900, false), (Step::Done, Lsn(0x900)));
    assert_eq!(keepalive(0x900, true), (Step::Answer, Lsn(0x900)));
}

#[test]
fn the_mapping_follows_the_table() {
    let mut scene = Scene::new();
    scene.done(&begin(0x200));
    scene.done(&outbox());
    scene.done(&insert("a"));
    let columns = [
        ("payload", 25),
        ("aggregateid", 25),
        ("id", 2950),
        ("aggregatetype", 25),
    ];
    scene.done(&relation("outbox", &columns));
    let row = tuple(b'N', &["value", "key2", "id2", "invoice"]);
    scene.done(&[&b"I"[..], &OUTBOX.to_be_bytes(), &row].concat());
    assert_eq!(
        scene.accepted()[1],
        "outbox.event.invoice key2 value 00000000/00000200:0000000001"
    );
}

#[test]
fn partition_may_be_described_in_addition_to_its_root() {
    let mut scene = Scene::new();
    scene.done(&begin(0x200));
    scene.done(&outbox());
    let mut leaf = relation("outbox_2026", &[("id", 2950)]);
    leaf[1..5].copy_from_slice(&(OUTBOX + 1).to_be_bytes());
    scene.done(&leaf);
    scene.done(&insert("a"));
    assert_eq!(scene.accepted().len(), 1);
}

#[test]
fn unsupported_values_stop_the_pipeline_with_their_position() {
    let check = |prelude: &[Vec<u8>], message: &[u8], words: &[&str]| {
        let mut scene = Scene::new();
        prelude.iter().for_each(|message| scene.done(message));
        let text = scene.send(message).expect_err("stops").to_string();
        words
            .iter()
            .for_each(|word| assert!(text.contains(word), "{word:?} in {text:?}"));
        scene.deliver_all();
        assert_eq!(
            scene.confirmed(),
            Lsn(0x100),
            "nothing after it is confirmed"
        );
    };
    let open = [begin(0x200), outbox()];
    check(&[], &insert("a"), &["outside a transaction"]);
    check(
        &[begin(0x200)],
        &insert("a"),
        &["unknown relation 16500", "00000200:0000000000"],
    );
    let foreign = [begin(0x200), relation("other", &[])];
    check(
        &foreign,
        &insert("a"),
        &["public.other", "public.outbox", "00000200:0000000000"],
    );
    check(
        &[begin(0x200)],
        &relation("outbox", &[("id", 25)]),
        &["aggregatetype"],
    );
    check(&open, b"?", &["0x3f", "00000200:0000000000"]);
    let short = [&b"I"[..], &OUTBOX.to_be_bytes(), &tuple(b'N', &["a"])].concat();
    check(&open, &short, &["number of columns"]);
    let row = tuple(b'N', &["a", "no topic", "key", "value"]);
    let bad_topic = [&b"I"[..], &OUTBOX.to_be_bytes(), &row].concat();
    check(
        &open,
        &bad_topic,
        &["row with id a", "no topic", "00000200:0000000000"],
    );
    for kind in [b'u', b'b'] {
        let mut toast = insert("a");
        let at = toast.len() - 6;
        toast.truncate(at);
        toast.push(kind);
        if kind == b'b' {
            toast.extend([0; 4]);
        }
        check(&open, &toast, &["public.outbox", "00000200:0000000000"]);
    }
    check(&open, &begin(0x300), &["begins inside"]);
    check(&open, &commit(0x300), &["doesn't end"]);
}

#[test]
fn a_record_that_the_sink_refuses_for_good_is_named() {
    let mut scene = Scene::new();
    scene.done(&begin(0x200));
    scene.done(&outbox());
    let refusal = SinkError::TooLarge {
        topic: "t".to_owned(),
        bytes: 9,
        limit: 8,
        brokers: "kafka1:9092".to_owned(),
    };
    scene.sink.answers = vec![Err(refusal)];
    let error = scene.send(&insert("a")).expect_err("stops");
    let position = "00000000/00000200:0000000000";
    assert_eq!(error.skip_to().as_deref(), Some(position));
    let text = error.to_string();
    for word in [
        "row with id a",
        "00000200:0000000000",
        "9 bytes",
        "message.max.bytes allows, which is 8",
        "--bootstrap-server kafka1:9092",
        "on_oversize = \"dead-letter\"",
    ] {
        assert!(text.contains(word), "{word:?} in {text:?}");
    }
    assert_eq!(scene.core.delivery.watermark.in_flight().records, 0);
}

#[test]
fn events_in_kafka_are_omitted_and_the_others_recorded() {
    let mut scene = Scene::new();
    scene.core.leave_out(None, Lsn(0x100), Lsn(0x100));
    scene.done(&begin(0x200));
    scene.done(&outbox());
    scene.done(&insert("a"));
    scene.done(&insert("b"));
    let last = scene.core.last_delivered().expect("an event");
    let position = Position {
        commit: Lsn(0x200),
        index: 1,
    };
    assert_eq!((last.position(), last.xid), (position, 7));
    assert_eq!(last.event_id.as_deref(), Some("b"));

    // The connection breaks, and the transaction is sent again from its first row.
    let mut scene = Scene::new();
    scene
        .core
        .leave_out(Some(Delivered::UpTo(last.clone())), Lsn(0x100), Lsn(0x100));
    scene.done(&begin(0x200));
    scene.done(&outbox());
    for id in ["a", "b"] {
        scene.done(&insert(id));
    }
    assert_eq!(scene.core.last_delivered(), None, "nothing new");
    scene.done(&insert("c"));
    scene.done(&commit(0x200));
    let taken = scene.accepted();
    assert_eq!(taken.len(), 1);
    assert!(
        taken[0].contains("00000000/00000200:0000000002"),
        "{taken:?}"
    );

    // Another event has the position of the last one.
    let mut scene = Scene::new();
    scene
        .core
        .leave_out(Some(Delivered::UpTo(last)), Lsn(0x100), Lsn(0x100));
    scene.done(&begin(0x200));
    scene.done(&outbox());
    scene.done(&insert("a"));
    let error = scene.send(&insert("x")).expect_err("another history");
    assert!(matches!(error, CoreError::History(_)), "{error}");
}

/// A transaction between the consistent points of two chunks contains rows of which some were
/// copied. These also count: otherwise, a position would depend on how often the copy was
/// interrupted.
#[test]
fn a_row_that_was_copied_has_an_index_among_those_of_its_transaction() {
    let chunk = |snapshot_lsn, upto: Option<&str>| Chunk {
        snapshot_lsn: Lsn(snapshot_lsn),
        upto: upto.map(|key| vec![key.to_owned()]),
    };
    let mut scene = Scene::new();
    scene.core.leave_out(None, Lsn(0x100), Lsn(0x100));
    scene.core.leave_out_copied(CopyProgress {
        key: vec!["id".to_owned()],
        rows: 9,
        chunks: vec![chunk(0x180, Some("m")), chunk(0x300, None)],
    });
    for message in [
        begin(0x200),
        outbox(),
        insert("z"),
        insert("a"),
        insert("y"),
        insert("b"),
        commit(0x200),
    ] {
        scene.done(&message);
    }
    assert_eq!(
        scene.accepted(),
        [
            "outbox.event.order key a 00000000/00000200:0000000001",
            "outbox.event.order key b 00000000/00000200:0000000003",
        ]
    );
    let last = scene.core.last_delivered().expect("an event");
    assert_eq!(last.position().index, 3);
}

#[test]
fn after_a_reconnect_a_half_sent_transaction_comes_again_from_its_first_row() {
    let mut scene = Scene::new();
    for message in [begin(0x200), outbox(), insert("a")] {
        scene.done(&message);
    }
    scene.core.reconnected(Lsn(0x100));
    for message in [begin(0x200), outbox(), insert("a"), commit(0x200)] {
        scene.done(&message);
    }
    let positions: Vec<_> = scene
        .accepted()
        .iter()
        .map(|shown| &shown[shown.len() - 10..])
        .collect();
    assert_eq!(positions, ["0000000000", "0000000000"]);
    scene.deliver_all();
    assert_eq!(scene.confirmed(), Lsn(0x210));
}

#[test]
fn a_transaction_is_open_from_its_beginning_to_its_end() {
    let mut scene = Scene::new();
    assert!(!scene.core.is_open());
    scene.done(&begin(0x200));
    assert!(scene.core.is_open());
    scene.done(&outbox());
    scene.done(&insert("a"));
    assert!(scene.core.is_open());
    scene.done(&commit(0x200));
    assert!(!scene.core.is_open());
    scene.done(&begin(0x300));
    scene.core.reconnected(Lsn(0x100));
    assert!(!scene.core.is_open(), "it comes again");
}

/// The server's position is after a transaction while it sends that transaction.
#[test]
fn keepalive_within_a_repeated_transaction_proves_nothing() {
    let delivered = |scene: &mut Scene, last: Option<Last>| {
        let last = last.map(Delivered::UpTo);
        scene.core.leave_out(last, Lsn(0x100), Lsn(0x100));
        scene.done(&begin(0x200));
        scene.done(&outbox());
        scene.done(&insert("a"));
        let frame = Frame::Keepalive {
            wal_end: Lsn(0x900),
            reply_requested: false,
        };
        let step = scene.core.frame(&frame, &mut scene.sink);
        assert_eq!(step.expect("goes on"), Step::Done);
        scene.done(&insert("b"));
        scene.core.last_delivered()
    };
    let last = delivered(&mut Scene::new(), None);
    assert!(last.is_some());
    let mut scene = Scene::new();
    assert_eq!(delivered(&mut scene, last), None, "nothing new");
    assert!(!scene.core.is_proved());
    scene.done(&commit(0x200));
    assert!(scene.core.is_proved());
    assert!(scene.accepted().is_empty());
}

#[test]
fn after_a_reconnect_a_table_that_is_not_described_again_is_unknown() {
    let mut scene = Scene::new();
    scene.done(&begin(0x200));
    scene.done(&outbox());
    scene.done(&insert("a"));
    scene.core.reconnected(Lsn(0x100));
    scene.done(&begin(0x200));
    let error = scene.send(&insert("a")).expect_err("stops").to_string();
    assert!(error.contains("unknown relation 16500"), "{error}");
}

#[test]
fn a_copied_row_is_known_by_its_key_wherever_the_table_has_it_by_now() {
    let mut scene = Scene::new();
    scene.core.leave_out_copied(CopyProgress {
        key: vec!["id".to_owned()],
        rows: 9,
        chunks: vec![
            Chunk {
                snapshot_lsn: Lsn(0x300),
                upto: Some(vec!["m".to_owned()]),
            },
            Chunk {
                snapshot_lsn: Lsn(0x180),
                upto: None,
            },
        ],
    });
    scene.done(&begin(0x200));
    scene.done(&outbox());
    scene.done(&insert("a"));
    scene.done(&insert("z"));
    let columns = [
        ("payload", 25),
        ("aggregatetype", 25),
        ("aggregateid", 25),
        ("id", 2950),
    ];
    scene.done(&relation("outbox", &columns));
    let row = |id, payload| {
        let row = tuple(b'N', &[payload, "order", "key", id]);
        [&b"I"[..], &OUTBOX.to_be_bytes(), &row].concat()
    };
    scene.done(&row("y", "a"));
    scene.done(&row("b", "z"));
    assert_eq!(
        scene.accepted(),
        [
            "outbox.event.order key z 00000000/00000200:0000000001",
            "outbox.event.order key a 00000000/00000200:0000000002",
        ]
    );
}

/// librdkafka allocates a structure for each record, and the allocator has some overhead.
#[test]
fn record_uses_the_window_for_its_size_and_overhead() {
    let mut scene = Scene::new();
    scene.done(&begin(0x200));
    scene.done(&outbox());
    scene.done(&insert("event"));
    let headers = scene.sink.headers.iter();
    let headers = headers.map(|header| header.len() - "=".len() + 64);
    let expected = headers.sum::<usize>() + "key".len() + "event".len() + 384;
    let in_flight = scene.core.delivery.watermark.in_flight();
    assert_eq!(scene.sink.headers.len(), 2);
    assert_eq!((in_flight.records, in_flight.bytes), (1, expected as u64));
}

#[test]
fn updates_of_rows_and_events_outside_of_transactions_are_warned_of_once() {
    let mut scene = Scene::new();
    scene.done(&begin(0x200));
    scene.done(&outbox());
    let key = tuple(b'K', &["a"]);
    let delete = [&b"D"[..], &OUTBOX.to_be_bytes(), &key].concat();
    let new = tuple(b'N', &["a", "x", "y", "z"]);
    let update = [&b"U"[..], &OUTBOX.to_be_bytes(), &new].concat();
    let mut lines = |message: &[u8]| logged(|| scene.done(message));
    assert!(lines(&delete).is_empty());
    let warned = lines(&update);
    assert!(
        warned.len() == 1 && warned[0].contains("UPDATE"),
        "{warned:?}"
    );
    assert!(lines(&update).is_empty());

    let mut scene = Scene::as_messages();
    let mut lines = |prefix| logged(|| scene.done(&logical(false, prefix, b"text")));
    assert!(lines("theirs").is_empty());
    let warned = lines("ours");
    assert!(
        warned.len() == 1 && warned[0].contains("walpost.publish"),
        "{warned:?}"
    );
    assert!(lines("ours").is_empty());
}
