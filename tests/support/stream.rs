//! A replication stream of any length, and a sink that discards records. Together, they run all the
//! code that turns frames into records, without servers and identically in every run.
//!
//! The bytes come from a real server: `./dev golden` captures one transaction of 100 events per
//! outbox (`tests/golden/outbox_*.bin`). [`Stream`] repeats its rows in the requested number of
//! transactions, and sets the LSNs in each Begin and Commit message. Nothing else in the messages
//! depends on the position in WAL.
#![allow(
    dead_code,
    reason = "each binary that includes this file uses its own part of it"
)]

use std::sync::Arc;

use walpost::facade::Frame;
use walpost::facade::Lsn;
use walpost::facade::Outbox;
use walpost::facade::OutboxSettings;
use walpost::facade::Record;
use walpost::facade::Window;
use walpost::facade::unix_micros;
use walpost::facade::{Core, Step};
use walpost::facade::{Deliveries, Tag, Watermark};
use walpost::facade::{Produced, Sink, SinkError};

/// The LSN at which the stream begins.
pub(crate) const BEGIN: Lsn = Lsn(0x1_0000_0000);
/// The number of bytes of WAL that each row takes up in a stream, and the number that each
/// transaction takes up in addition.
const ROW_LSN: u64 = 0x200;
const TRANSACTION_LSN: u64 = 0x100;
/// Number of frames per read from the socket, and number of records whose delivery is reported
/// together. Both are prime, so that over time, reads and delivery reports end at every possible
/// offset from each other.
const FRAMES_PER_READ: usize = 307;
const RECORDS_PER_BATCH: usize = 1009;
/// The default limits on the number and the size of records in flight.
const WINDOW: Window = Window {
    records: 100_000,
    bytes: 8 << 20,
};

/// The kinds of outbox for which a transaction was captured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A table with the columns `id`, `aggregatetype`, `aggregateid`, `type` and `payload` (jsonb).
    Plain,
    /// Like `Plain`, but with the additional columns `headers` (jsonb) and `created_at`.
    Headers,
    /// Like `Plain`, but `payload` has type bytea.
    Bytea,
    /// Logical decoding messages with headers instead of a table.
    Messages,
}

impl Kind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Plain => "outbox_plain",
            Self::Headers => "outbox_headers",
            Self::Bytea => "outbox_bytea",
            Self::Messages => "outbox_log",
        }
    }

    fn outbox(self) -> Outbox {
        match self {
            Self::Messages => Outbox::Messages {
                prefix: self.name().to_owned(),
            },
            _ => Outbox::Table(self.name().parse().expect("a table's name")),
        }
    }

    /// Returns the tag of the pgoutput message type that contains an event.
    fn tag(self) -> u8 {
        match self {
            Self::Messages => b'M',
            _ => b'I',
        }
    }

    fn captured(self) -> &'static [u8] {
        match self {
            Self::Plain => include_bytes!("../golden/outbox_plain.bin"),
            Self::Headers => include_bytes!("../golden/outbox_headers.bin"),
            Self::Bytea => include_bytes!("../golden/outbox_bytea.bin"),
            Self::Messages => include_bytes!("../golden/outbox_log.bin"),
        }
    }
}

/// A sequence of CopyData messages, as they appear in the read buffer.
pub(crate) struct Stream {
    bytes: Vec<u8>,
    end: Lsn,
    frames: usize,
}

impl Stream {
    /// Creates a stream of `rows` events of `kind`, in transactions of `per_transaction` events
    /// each. For a table, a Relation message precedes the first event.
    pub(crate) fn rows(kind: Kind, rows: usize, per_transaction: usize) -> Self {
        let messages: Vec<_> = split(kind.captured()).collect();
        let the_one = |tag: u8| {
            let mut found = messages.iter().filter(|message| message[0] == tag);
            let message = found.next().expect("a captured transaction");
            assert!(found.next().is_none(), "one transaction of one outbox");
            message.to_vec()
        };
        let (mut begin, mut commit) = (the_one(b'B'), the_one(b'C'));
        let is_table = kind != Kind::Messages;
        let relation = is_table.then(|| the_one(b'R'));
        let events: Vec<_> = messages
            .into_iter()
            .filter(|message| message[0] == kind.tag())
            .collect();

        let mut stream = Self::nothing();
        let mut relation = relation.as_deref();
        let mut sent = 0;
        while sent < rows {
            let rows = per_transaction.min(rows - sent);
            let at = stream.end.0 + rows as u64 * ROW_LSN;
            let end = at + TRANSACTION_LSN;
            begin[1..9].copy_from_slice(&at.to_be_bytes());
            commit[2..10].copy_from_slice(&at.to_be_bytes());
            commit[10..18].copy_from_slice(&end.to_be_bytes());
            stream.xlog(&begin);
            if let Some(relation) = relation.take() {
                stream.xlog(relation);
            }
            (sent..sent + rows).for_each(|n| stream.xlog(events[n % events.len()]));
            stream.xlog(&commit);
            stream.end = Lsn(end);
            sent += rows;
        }
        stream
    }

    /// Creates a stream of keepalives, like those that a walsender sends in a busy database while
    /// the outbox is idle.
    pub(crate) fn keepalives(count: usize) -> Self {
        let mut stream = Self::nothing();
        for _ in 0..count {
            stream.end.0 += TRANSACTION_LSN;
            let end = stream.end.0.to_be_bytes();
            stream.copy_data(&[b"k", &end, &[0; 8], &[0]]);
        }
        stream
    }

    fn nothing() -> Self {
        Self {
            bytes: Vec::new(),
            end: BEGIN,
            frames: 0,
        }
    }

    /// Adds an XLogData message. Its LSN is 0, because the walsender sets the LSN only in the last
    /// message of a change.
    fn xlog(&mut self, message: &[u8]) {
        self.copy_data(&[b"w", &[0; 8], &[0; 8], &[0; 8], message]);
    }

    fn copy_data(&mut self, body: &[&[u8]]) {
        let len = 4 + body.iter().map(|part| part.len()).sum::<usize>();
        self.bytes.push(b'd');
        self.bytes
            .extend(u32::try_from(len).expect("a short message").to_be_bytes());
        body.iter().for_each(|part| self.bytes.extend(*part));
        self.frames += 1;
    }

    /// Returns the bytes of the whole stream, as received from the socket.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns the bodies of the messages.
    pub(crate) fn bodies(&self) -> impl Iterator<Item = &[u8]> {
        copy_data_bodies(&self.bytes)
    }

    /// Returns the number of messages.
    pub(crate) fn len(&self) -> usize {
        self.frames
    }

    /// Returns the LSN that may be confirmed once the whole stream is delivered.
    pub(crate) fn end(&self) -> Lsn {
        self.end
    }
}

/// Splits length-prefixed messages.
fn split(mut rest: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let (len, after) = rest.split_first_chunk::<4>()?;
        let (message, after) = after.split_at(u32::from_be_bytes(*len) as usize);
        rest = after;
        Some(message)
    })
}

fn copy_data_bodies(mut rest: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let (_tag, after) = rest.split_first()?;
        let (len, _) = after.split_first_chunk::<4>()?;
        // The length field counts its own 4 bytes.
        let (body, after) = after.split_at(u32::from_be_bytes(*len) as usize);
        rest = after;
        Some(&body[4..])
    })
}

/// A sink that accepts every record and reports deliveries in batches, as a producer's thread does.
pub(crate) struct NullSink {
    deliveries: Arc<Deliveries>,
    taken: Vec<Tag>,
}

impl NullSink {
    fn new(deliveries: Arc<Deliveries>) -> Self {
        Self {
            deliveries,
            taken: Vec::with_capacity(RECORDS_PER_BATCH),
        }
    }

    /// Reports as delivered all accepted records that have not been reported yet.
    pub(crate) fn deliver(&mut self) {
        self.deliveries.delivered(self.taken.drain(..));
    }
}

impl Sink for NullSink {
    fn produce(&mut self, record: &Record<'_>, tag: Tag) -> Result<Produced, SinkError> {
        std::hint::black_box(record);
        self.taken.push(tag);
        if self.taken.len() == RECORDS_PER_BATCH {
            self.deliver();
        }
        Ok(Produced::Taken)
    }

    fn flush(&mut self, _busy: bool) -> Result<(), SinkError> {
        Ok(())
    }
}

/// Creates a [`Core`] that expects events of `kind` at the beginning of a [`Stream`]. Also returns
/// the handle that a sink uses to report deliveries.
pub(crate) fn core(kind: Kind, settings: OutboxSettings) -> (Core, Arc<Deliveries>) {
    let mut watermark = Watermark::new(WINDOW, BEGIN);
    watermark.reconnected(BEGIN);
    let deliveries = watermark.deliveries();
    let core = Core::new(kind.outbox(), settings, watermark).expect("settings that fit");
    (core, deliveries)
}

/// Creates a [`Core`], and a [`NullSink`] that is connected to it.
pub(crate) fn null_pipeline(kind: Kind, settings: OutboxSettings) -> (Core, NullSink) {
    let (core, deliveries) = core(kind, settings);
    (core, NullSink::new(deliveries))
}

/// Processes received frames as a session does. After each read, determines which position may be
/// confirmed.
pub(crate) fn play<'s>(
    core: &mut Core,
    sink: &mut NullSink,
    bodies: impl Iterator<Item = &'s [u8]>,
) {
    for (n, body) in bodies.enumerate() {
        let frame = Frame::decode(body).expect("a frame");
        let step = core.frame(&frame, sink).expect("a valid frame");
        assert!(matches!(step, Step::Done), "{step:?}");
        if n % FRAMES_PER_READ == 0 {
            core.delivery.watermark.tick(unix_micros());
            sink.flush(true).expect("flushes");
            std::hint::black_box(core.delivery.watermark.confirmed());
        }
    }
}

/// Returns settings that use templates wherever possible, with three columns in the key and four
/// headers.
pub(crate) fn templates() -> OutboxSettings {
    let template = |text: &str| text.parse().expect("a template");
    OutboxSettings {
        topic: "shop.{aggregatetype}.{type}".parse().expect("a template"),
        key: template("{type}:{aggregatetype}:{aggregateid}"),
        headers: vec![
            ("id".to_owned(), template("{id}")),
            ("type".to_owned(), template("{type}")),
            ("source".to_owned(), template("shop/{aggregatetype}")),
            ("content-type".to_owned(), template("application/json")),
        ],
        ..OutboxSettings::default()
    }
}
