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

/// A sink that returns predefined results for the first records.
#[derive(Default)]
struct Script {
    /// Results for the first records, in order. All later records are accepted.
    results: Vec<Result<Produced, SinkError>>,
    accepted: Vec<(String, Tag)>,
    /// Headers of the most recently accepted record.
    headers: Vec<String>,
}

impl Sink for Script {
    fn produce(&mut self, record: &Record<'_>, tag: Tag) -> Result<Produced, SinkError> {
        if !self.results.is_empty() {
            return self.results.remove(0);
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
        self.accepted.push((shown, tag));
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

/// A core connected to a scripted sink.
struct Fixture {
    core: Core,
    sink: Script,
    deliveries: Arc<Deliveries>,
}

impl Fixture {
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

    fn process(&mut self, message: &[u8]) {
        assert_eq!(self.send(message).expect("success"), Step::Done);
    }

    fn accepted(&self) -> Vec<&str> {
        self.sink
            .accepted
            .iter()
            .map(|(shown, _)| shown.as_str())
            .collect()
    }

    fn deliver_all(&mut self) {
        let tags = self.sink.accepted.drain(..).map(|(_, tag)| tag);
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

/// Calls `run`, and returns the lines that it logs.
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

/// Returns a logical decoding message that contains an event with this payload.
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
fn creates_records_from_messages_and_numbers_every_transactional_message() {
    let mut fixture = Fixture::as_messages();
    for message in [
        logical(false, "ours", b"before"),
        begin(0x200),
        published("a"),
        logical(true, "theirs", b"anything"),
        logical(false, "theirs", b"between"),
        published("b"),
        commit(0x200),
    ] {
        fixture.process(&message);
    }
    assert_eq!(
        fixture.accepted(),
        [
            "outbox.event.order key a 00000000/00000200:0000000000",
            "outbox.event.order key b 00000000/00000200:0000000002",
        ]
    );
    let ignored_counts = IgnoredCounts {
        foreign: 1,
        nontransactional: 2,
    };
    assert_eq!(fixture.core.ignored_counts(), Some(ignored_counts));
    fixture.deliver_all();
    assert_eq!(fixture.confirmed(), Lsn(0x210));
    assert_eq!(Fixture::new().core.ignored_counts(), None);
}

#[test]
fn ignores_messages_if_the_outbox_is_a_table() {
    let mut fixture = Fixture::new();
    for message in [
        begin(0x200),
        published("a"),
        outbox(),
        insert("b"),
        commit(0x200),
    ] {
        fixture.process(&message);
    }
    assert_eq!(
        fixture.accepted(),
        ["outbox.event.order key b 00000000/00000200:0000000000"]
    );
}

#[test]
fn accepts_a_message_that_is_retried_after_the_sink_was_not_ready() {
    let mut fixture = Fixture::as_messages();
    fixture.process(&begin(0x200));
    fixture.sink.results = vec![Ok(Produced::Full), Ok(Produced::NewTopic)];
    assert_eq!(fixture.send(&published("a")).expect("success"), Step::Full);
    let step = fixture.send(&published("a")).expect("success");
    assert_eq!(step, Step::NewTopic("outbox.event.order".to_owned()));
    fixture.process(&published("a"));
    assert_eq!(
        fixture.accepted(),
        ["outbox.event.order key a 00000000/00000200:0000000000"]
    );
}

#[test]
fn reports_the_position_of_an_invalid_message() {
    let check = |prelude: &[Vec<u8>], message: &[u8], words: &[&str]| {
        let mut fixture = Fixture::as_messages();
        prelude.iter().for_each(|message| fixture.process(message));
        let text = fixture.send(message).expect_err("an error").to_string();
        words
            .iter()
            .for_each(|word| assert!(text.contains(word), "{word:?} in {text:?}"));
        assert_eq!(
            fixture.confirmed(),
            Lsn(0x100),
            "no later position is confirmed"
        );
    };
    let open = [begin(0x200), outbox()];
    check(
        &open,
        &logical(true, "ours", b"\x02"),
        &["\"ours\"", "00000200:0000000000", "0x02", "0x01"],
    );
    check(
        &open,
        &logical(true, "ours", b"\x01ab"),
        &["within field id"],
    );
    check(&[], &published("a"), &["outside a transaction"]);
    let words = [
        "public.outbox",
        "00000200:0000000000",
        "outbox uses logical decoding messages",
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
fn assigns_positions_to_records_and_confirms_the_commit_after_delivery() {
    let mut fixture = Fixture::new();
    for message in [
        begin(0x200),
        outbox(),
        insert("a"),
        insert("b"),
        commit(0x200),
    ] {
        fixture.process(&message);
    }
    assert_eq!(
        fixture.accepted(),
        [
            "outbox.event.order key a 00000000/00000200:0000000000",
            "outbox.event.order key b 00000000/00000200:0000000001",
        ]
    );
    assert_eq!(fixture.confirmed(), Lsn(0x100));
    fixture.deliver_all();
    assert_eq!(
        fixture.confirmed(),
        Lsn(0x210),
        "the LSN after the commit record is confirmed, not the record's own LSN"
    );
}

#[test]
fn numbers_every_row_message_including_updates_and_deletes() {
    let mut fixture = Fixture::new();
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
        fixture.process(&message);
    }
    assert_eq!(
        fixture.accepted(),
        ["outbox.event.order key c 00000000/00000200:0000000002"]
    );
}

#[test]
fn accepts_a_frame_that_is_retried_after_the_sink_was_not_ready() {
    let mut fixture = Fixture::new();
    fixture.process(&begin(0x200));
    fixture.process(&outbox());
    fixture.sink.results = vec![Ok(Produced::Full), Ok(Produced::NewTopic)];
    assert_eq!(fixture.send(&insert("a")).expect("success"), Step::Full);
    let topic = "outbox.event.order".to_owned();
    assert_eq!(
        fixture.send(&insert("a")).expect("success"),
        Step::NewTopic(topic)
    );
    fixture.process(&insert("a"));
    assert_eq!(
        fixture.accepted(),
        ["outbox.event.order key a 00000000/00000200:0000000000"]
    );
    assert_eq!(fixture.core.delivery.watermark.in_flight().records, 1);
    fixture.process(&commit(0x200));
    fixture.deliver_all();
    assert_eq!(fixture.confirmed(), Lsn(0x210));
}

#[test]
fn does_not_accept_a_frame_while_the_window_is_full() {
    let mut fixture = Fixture::new();
    fixture.process(&begin(0x200));
    fixture.process(&outbox());
    for n in 0..100 {
        fixture.process(&insert(&n.to_string()));
    }
    assert_eq!(fixture.send(&insert("more")).expect("success"), Step::Full);
    fixture.deliver_all();
    fixture.process(&insert("more"));
}

#[test]
fn confirms_the_position_of_a_keepalive_and_replies_on_request() {
    let mut fixture = Fixture::new();
    let mut keepalive = |wal_end, reply_requested| {
        let frame = Frame::Keepalive {
            wal_end: Lsn(wal_end),
            reply_requested,
        };
        let step = fixture
            .core
            .frame(&frame, &mut fixture.sink)
            .expect("success");
        (step, fixture.core.delivery.watermark.confirmed().lsn())
    };
    assert_eq!(keepalive(0x900, false), (Step::Done, Lsn(0x900)));
    assert_eq!(keepalive(0x900, true), (Step::Answer, Lsn(0x900)));
}

#[test]
fn updates_the_mapping_when_the_columns_of_the_table_change() {
    let mut fixture = Fixture::new();
    fixture.process(&begin(0x200));
    fixture.process(&outbox());
    fixture.process(&insert("a"));
    let columns = [
        ("payload", 25),
        ("aggregateid", 25),
        ("id", 2950),
        ("aggregatetype", 25),
    ];
    fixture.process(&relation("outbox", &columns));
    let row = tuple(b'N', &["value", "key2", "id2", "invoice"]);
    fixture.process(&[&b"I"[..], &OUTBOX.to_be_bytes(), &row].concat());
    assert_eq!(
        fixture.accepted()[1],
        "outbox.event.invoice key2 value 00000000/00000200:0000000001"
    );
}

#[test]
fn accepts_relation_messages_for_both_a_partition_and_its_root() {
    let mut fixture = Fixture::new();
    fixture.process(&begin(0x200));
    fixture.process(&outbox());
    let mut leaf = relation("outbox_2026", &[("id", 2950)]);
    leaf[1..5].copy_from_slice(&(OUTBOX + 1).to_be_bytes());
    fixture.process(&leaf);
    fixture.process(&insert("a"));
    assert_eq!(fixture.accepted().len(), 1);
}

#[test]
fn reports_the_position_of_an_unsupported_value() {
    let check = |prelude: &[Vec<u8>], message: &[u8], words: &[&str]| {
        let mut fixture = Fixture::new();
        prelude.iter().for_each(|message| fixture.process(message));
        let text = fixture.send(message).expect_err("an error").to_string();
        words
            .iter()
            .for_each(|word| assert!(text.contains(word), "{word:?} in {text:?}"));
        fixture.deliver_all();
        assert_eq!(
            fixture.confirmed(),
            Lsn(0x100),
            "no later position is confirmed"
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
    check(&open, &commit(0x300), &["match the open transaction"]);
}

#[test]
fn identifies_a_record_that_the_sink_rejects_permanently() {
    let mut fixture = Fixture::new();
    fixture.process(&begin(0x200));
    fixture.process(&outbox());
    let refusal = SinkError::TooLarge {
        topic: "t".to_owned(),
        bytes: 9,
        limit: 8,
        brokers: "kafka1:9092".to_owned(),
    };
    fixture.sink.results = vec![Err(refusal)];
    let error = fixture.send(&insert("a")).expect_err("an error");
    let position = "00000000/00000200:0000000000";
    assert_eq!(error.skip_to().as_deref(), Some(position));
    let text = error.to_string();
    for word in [
        "row with id a",
        "00000200:0000000000",
        "9 bytes",
        "message.max.bytes is 8",
        "--bootstrap-server kafka1:9092",
        "on_oversize = \"dead-letter\"",
    ] {
        assert!(text.contains(word), "{word:?} in {text:?}");
    }
    assert_eq!(fixture.core.delivery.watermark.in_flight().records, 0);
}

#[test]
fn omits_events_already_in_kafka_and_tracks_the_last_delivered_one() {
    let mut fixture = Fixture::new();
    fixture.core.omit_delivered(None, Lsn(0x100), Lsn(0x100));
    fixture.process(&begin(0x200));
    fixture.process(&outbox());
    fixture.process(&insert("a"));
    fixture.process(&insert("b"));
    let last = fixture.core.last_delivered().expect("an event");
    let position = Position {
        commit: Lsn(0x200),
        index: 1,
    };
    assert_eq!((last.position(), last.xid), (position, 7));
    assert_eq!(last.event_id.as_deref(), Some("b"));

    // The connection breaks, and the server resends the transaction from its first row.
    let mut fixture = Fixture::new();
    fixture
        .core
        .omit_delivered(Some(Delivered::UpTo(last.clone())), Lsn(0x100), Lsn(0x100));
    fixture.process(&begin(0x200));
    fixture.process(&outbox());
    for id in ["a", "b"] {
        fixture.process(&insert(id));
    }
    assert_eq!(fixture.core.last_delivered(), None, "no new event");
    fixture.process(&insert("c"));
    fixture.process(&commit(0x200));
    let accepted = fixture.accepted();
    assert_eq!(accepted.len(), 1);
    assert!(
        accepted[0].contains("00000000/00000200:0000000002"),
        "{accepted:?}"
    );

    // A different event arrives at the position of the last delivered event.
    let mut fixture = Fixture::new();
    fixture
        .core
        .omit_delivered(Some(Delivered::UpTo(last)), Lsn(0x100), Lsn(0x100));
    fixture.process(&begin(0x200));
    fixture.process(&outbox());
    fixture.process(&insert("a"));
    let error = fixture.send(&insert("x")).expect_err("a different history");
    assert!(matches!(error, CoreError::History(_)), "{error}");
}

/// Some rows of a transaction between two snapshots were copied. These rows are still assigned an
/// index when they arrive in the stream. Otherwise, the positions of the other rows would depend on
/// how often the copy was interrupted.
#[test]
fn assigns_indexes_to_copied_rows_within_their_transaction() {
    let chunk = |snapshot_lsn, upto: Option<&str>| Chunk {
        snapshot_lsn: Lsn(snapshot_lsn),
        upto: upto.map(|key| vec![key.to_owned()]),
    };
    let mut fixture = Fixture::new();
    fixture.core.omit_delivered(None, Lsn(0x100), Lsn(0x100));
    fixture.core.omit_copied(CopyProgress {
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
        fixture.process(&message);
    }
    assert_eq!(
        fixture.accepted(),
        [
            "outbox.event.order key a 00000000/00000200:0000000001",
            "outbox.event.order key b 00000000/00000200:0000000003",
        ]
    );
    let last = fixture.core.last_delivered().expect("an event");
    assert_eq!(last.position().index, 3);
}

#[test]
fn processes_an_incomplete_transaction_from_its_first_row_after_a_reconnect() {
    let mut fixture = Fixture::new();
    for message in [begin(0x200), outbox(), insert("a")] {
        fixture.process(&message);
    }
    fixture.core.reconnected(Lsn(0x100));
    for message in [begin(0x200), outbox(), insert("a"), commit(0x200)] {
        fixture.process(&message);
    }
    let positions: Vec<_> = fixture
        .accepted()
        .iter()
        .map(|shown| &shown[shown.len() - 10..])
        .collect();
    assert_eq!(positions, ["0000000000", "0000000000"]);
    fixture.deliver_all();
    assert_eq!(fixture.confirmed(), Lsn(0x210));
}

#[test]
fn reports_an_open_transaction_from_begin_to_commit() {
    let mut fixture = Fixture::new();
    assert!(!fixture.core.is_open());
    fixture.process(&begin(0x200));
    assert!(fixture.core.is_open());
    fixture.process(&outbox());
    fixture.process(&insert("a"));
    assert!(fixture.core.is_open());
    fixture.process(&commit(0x200));
    assert!(!fixture.core.is_open());
    fixture.process(&begin(0x300));
    fixture.core.reconnected(Lsn(0x100));
    assert!(
        !fixture.core.is_open(),
        "the server sends the transaction again"
    );
}

/// Keepalives that the server sends in the middle of a transaction contain a position after that
/// transaction, although the transaction's remaining rows have yet to arrive.
#[test]
fn keepalive_within_a_resent_transaction_does_not_finish_wal_verification() {
    let delivered = |fixture: &mut Fixture, last: Option<Last>| {
        let last = last.map(Delivered::UpTo);
        fixture.core.omit_delivered(last, Lsn(0x100), Lsn(0x100));
        fixture.process(&begin(0x200));
        fixture.process(&outbox());
        fixture.process(&insert("a"));
        let frame = Frame::Keepalive {
            wal_end: Lsn(0x900),
            reply_requested: false,
        };
        let step = fixture.core.frame(&frame, &mut fixture.sink);
        assert_eq!(step.expect("success"), Step::Done);
        fixture.process(&insert("b"));
        fixture.core.last_delivered()
    };
    let last = delivered(&mut Fixture::new(), None);
    assert!(last.is_some());
    let mut fixture = Fixture::new();
    assert_eq!(delivered(&mut fixture, last), None, "no new event");
    assert!(!fixture.core.is_verified());
    fixture.process(&commit(0x200));
    assert!(fixture.core.is_verified());
    assert!(fixture.accepted().is_empty());
}

#[test]
fn requires_a_new_relation_message_for_each_table_after_a_reconnect() {
    let mut fixture = Fixture::new();
    fixture.process(&begin(0x200));
    fixture.process(&outbox());
    fixture.process(&insert("a"));
    fixture.core.reconnected(Lsn(0x100));
    fixture.process(&begin(0x200));
    let error = fixture
        .send(&insert("a"))
        .expect_err("an error")
        .to_string();
    assert!(error.contains("unknown relation 16500"), "{error}");
}

#[test]
fn recognizes_copied_rows_by_key_after_the_column_order_has_changed() {
    let mut fixture = Fixture::new();
    fixture.core.omit_copied(CopyProgress {
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
    fixture.process(&begin(0x200));
    fixture.process(&outbox());
    fixture.process(&insert("a"));
    fixture.process(&insert("z"));
    let columns = [
        ("payload", 25),
        ("aggregatetype", 25),
        ("aggregateid", 25),
        ("id", 2950),
    ];
    fixture.process(&relation("outbox", &columns));
    let row = |id, payload| {
        let row = tuple(b'N', &[payload, "order", "key", id]);
        [&b"I"[..], &OUTBOX.to_be_bytes(), &row].concat()
    };
    fixture.process(&row("y", "a"));
    fixture.process(&row("b", "z"));
    assert_eq!(
        fixture.accepted(),
        [
            "outbox.event.order key z 00000000/00000200:0000000001",
            "outbox.event.order key a 00000000/00000200:0000000002",
        ]
    );
}

/// The overhead accounts for the memory that librdkafka and the allocator use for each record.
#[test]
fn counts_the_size_and_overhead_of_a_record_toward_the_window() {
    let mut fixture = Fixture::new();
    fixture.process(&begin(0x200));
    fixture.process(&outbox());
    fixture.process(&insert("event"));
    let headers = fixture.sink.headers.iter();
    let headers = headers.map(|header| header.len() - "=".len() + 64);
    let expected = headers.sum::<usize>() + "key".len() + "event".len() + 384;
    let in_flight = fixture.core.delivery.watermark.in_flight();
    assert_eq!(fixture.sink.headers.len(), 2);
    assert_eq!((in_flight.records, in_flight.bytes), (1, expected as u64));
}

#[test]
fn warns_once_about_updates_and_nontransactional_messages() {
    let mut fixture = Fixture::new();
    fixture.process(&begin(0x200));
    fixture.process(&outbox());
    let key = tuple(b'K', &["a"]);
    let delete = [&b"D"[..], &OUTBOX.to_be_bytes(), &key].concat();
    let new = tuple(b'N', &["a", "x", "y", "z"]);
    let update = [&b"U"[..], &OUTBOX.to_be_bytes(), &new].concat();
    let mut lines = |message: &[u8]| logged(|| fixture.process(message));
    assert!(lines(&delete).is_empty());
    let warned = lines(&update);
    assert!(
        warned.len() == 1 && warned[0].contains("UPDATE"),
        "{warned:?}"
    );
    assert!(lines(&update).is_empty());

    let mut fixture = Fixture::as_messages();
    let mut lines = |prefix| logged(|| fixture.process(&logical(false, prefix, b"text")));
    assert!(lines("theirs").is_empty());
    let warned = lines("ours");
    assert!(
        warned.len() == 1 && warned[0].contains("walpost.publish"),
        "{warned:?}"
    );
    assert!(lines("ours").is_empty());
}
