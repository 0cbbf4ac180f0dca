//! Fuzzes the core with arbitrary streams of frames, and with deliveries that complete in any
//! order.

use std::sync::Arc;

use super::*;
use crate::delivery::watermark::{Deliveries, Tag};
use crate::model::window::Window;
use crate::outbox::Record;
use crate::pipeline::recovery::{Remedy, core_remedy};
use crate::pipeline::settings::Undeliverable;
use crate::sink::{Produced, SinkError};

const RESUME: Lsn = Lsn(0x100);
const WINDOW: Window = Window {
    records: 8,
    bytes: 8192,
};

/// Interprets `data` as a stream. The first byte selects the kind of outbox, the delivery
/// guarantee, and whether dead letters are enabled. The remaining bytes are a sequence of steps,
/// each of which starts with a letter.
///
/// | Letter | Step |
/// |---|---|
/// | `w`, u16, message | a message of this many bytes |
/// | `k`, u64 | a keepalive with this LSN |
/// | `d`, u8 | the sink delivers one of its records |
/// | `a` | the sink delivers all of its records |
/// | `f`, `t` | for the next record, the sink is full or has to create the topic |
/// | `r` | a new connection, which resumes at the confirmed position |
///
/// # Panics
/// Panics if the confirmed LSN decreases or is higher than the delivered or received LSN, if
/// records are out of order, or if the window is exceeded.
pub fn core(data: &[u8]) {
    let Some((&kind, mut rest)) = data.split_first() else {
        return;
    };
    let mut stream = Stream::new(kind);
    while stream.step(&mut rest).is_some() {
        stream.check_invariants();
    }
    stream.deliver_all();
}

/// A sink that checks the order and positions of its records.
#[derive(Default)]
struct Counter {
    /// The result to return for the next record instead of accepting it.
    next_result: Option<Produced>,
    /// The tag and position of each undelivered record. The position is `None` if the record was
    /// produced before the last reconnect.
    pending: Vec<(Tag, Option<Position>)>,
    last: Option<Position>,
    /// Number of messages in the current transaction that have been assigned an index.
    counted: u64,
}

impl Sink for Counter {
    fn produce(&mut self, record: &Record<'_>, tag: Tag) -> Result<Produced, SinkError> {
        if let Some(result) = self.next_result.take() {
            return Ok(result);
        }
        let (_, text) = record
            .headers
            .iter()
            .find(|(name, _)| *name == "walpost-position")
            .expect("every record has a position header");
        let position = position(text.expect("a text"));
        assert!(
            self.last < Some(position),
            "{:?} before {position}",
            self.last
        );
        assert_eq!(position.index, self.counted);
        self.last = Some(position);
        self.pending.push((tag, Some(position)));
        Ok(Produced::Taken)
    }

    fn flush(&mut self, _busy: bool) -> Result<(), SinkError> {
        Ok(())
    }
}

fn position(text: &[u8]) -> Position {
    let text = std::str::from_utf8(text).expect("ASCII");
    let (commit, index) = text.split_once(':').expect("a colon");
    Position {
        commit: commit.parse().expect("an LSN"),
        index: index.parse().expect("a number"),
    }
}

struct Stream {
    core: Core,
    sink: Counter,
    deliveries: Arc<Deliveries>,
    confirmed: Lsn,
}

impl Stream {
    fn new(kind: u8) -> Self {
        let outbox = match kind & 1 {
            0 => Outbox::Table("public.outbox".parse().expect("a table")),
            _ => Outbox::Messages {
                prefix: "ours".to_owned(),
            },
        };
        let mut watermark = Watermark::new(WINDOW, RESUME);
        watermark.reconnected(RESUME);
        let deliveries = watermark.deliveries();
        let core = Core::new(outbox, OutboxSettings::default(), watermark);
        let mut core = core.expect("the defaults fit");
        if kind & 2 != 0 {
            core.omit_delivered(None, RESUME, RESUME);
        }
        if kind & 4 != 0 {
            let settings = DeadLetterSettings {
                unroutable: Undeliverable::DeadLetter,
                malformed: Undeliverable::DeadLetter,
                ..DeadLetterSettings::default()
            };
            core.send_dead_letters("fuzz", &settings);
        }
        Self {
            core,
            sink: Counter::default(),
            deliveries,
            confirmed: RESUME,
        }
    }

    /// Performs one step. Returns `None` once the stream has ended, normally or with an error.
    fn step(&mut self, rest: &mut &[u8]) -> Option<()> {
        let (&letter, after) = rest.split_first()?;
        *rest = after;
        match letter {
            b'w' => {
                let len = u16::from_be_bytes(take_bytes(rest)?);
                let (data, after) = rest.split_at_checked(usize::from(len))?;
                *rest = after;
                self.message(data)?;
            }
            b'k' => {
                let wal_end = Lsn(u64::from_be_bytes(take_bytes(rest)?));
                let frame = Frame::Keepalive {
                    wal_end,
                    reply_requested: true,
                };
                let step = self.core.frame(&frame, &mut self.sink);
                assert_eq!(
                    step.expect("a keepalive never causes an error"),
                    Step::Answer
                );
            }
            b'd' => {
                let [which] = take_bytes(rest)?;
                if let Some(which) = usize::from(which).checked_rem(self.sink.pending.len()) {
                    let (tag, _) = self.sink.pending.remove(which);
                    self.deliveries.delivered([tag]);
                }
            }
            b'a' => {
                let tags = self.sink.pending.drain(..).map(|(tag, _)| tag);
                self.deliveries.delivered(tags);
            }
            b'f' => self.sink.next_result = Some(Produced::Full),
            b't' => self.sink.next_result = Some(Produced::NewTopic),
            b'r' => {
                self.core.reconnected(self.confirmed);
                self.sink.last = None;
                for (_, position) in &mut self.sink.pending {
                    *position = None;
                }
            }
            _ => return None,
        }
        Some(())
    }

    /// Passes a message to the core, and retries until there is space for it.
    fn message(&mut self, data: &[u8]) -> Option<()> {
        let frame = Frame::XLogData {
            start: Lsn::ZERO,
            wal_end: Lsn::ZERO,
            data,
        };
        let place = self.core.describe_position();
        loop {
            match self.core.frame(&frame, &mut self.sink) {
                Ok(Step::Done) => return self.count_message(data),
                Ok(Step::Answer) => panic!("unexpected status update request"),
                Ok(Step::Full | Step::NewTopic(_)) => {
                    assert_eq!(
                        self.core.describe_position(),
                        place,
                        "the position has changed"
                    );
                    self.check_invariants();
                    self.step(&mut &b"d\0"[..])?;
                }
                Ok(Step::SetAside(_)) => panic!("a table was set aside unexpectedly"),
                Ok(Step::NewTable(oid)) => self.core.describe_table(oid, Vec::new(), Vec::new()),
                Err(error) => {
                    assert_eq!(core_remedy(&error), Remedy::Halt);
                    return None;
                }
            }
        }
    }

    /// Updates `counted` for a message that was processed.
    fn count_message(&mut self, data: &[u8]) -> Option<()> {
        let uses_messages = matches!(self.core.source, Source::Messages(_));
        match Message::decode(data).expect("a valid message") {
            Message::Begin(_) => self.sink.counted = 0,
            Message::Insert { .. } | Message::Update { .. } | Message::Delete { .. } => {
                self.sink.counted += 1;
            }
            Message::Logical { transactional, .. } if uses_messages && transactional => {
                self.sink.counted += 1;
            }
            _ => {}
        }
        Some(())
    }

    /// Checks the conditions that must hold after every step.
    fn check_invariants(&mut self) {
        let confirmed = self.core.delivery.watermark.confirmed().lsn();
        assert!(
            confirmed >= self.confirmed,
            "the confirmed LSN has decreased"
        );
        assert!(confirmed <= self.core.delivery.watermark.received());
        // `confirmed` may equal `first`: a confirmed LSN is the end of a transaction, and the next
        // transaction's commit record can start exactly there.
        let pending = self
            .sink
            .pending
            .iter()
            .filter_map(|(_, position)| *position);
        let first = pending.map(|position| position.commit).min();
        assert!(
            first.is_none_or(|first| confirmed <= first),
            "positions up to {confirmed} were confirmed, but {first:?} has not been delivered"
        );
        let in_flight = self.core.delivery.watermark.in_flight();
        assert_eq!(in_flight.records, self.sink.pending.len() as u64);
        assert!(in_flight.records <= WINDOW.records);
        assert!(in_flight.bytes <= WINDOW.bytes || in_flight.records == 1);
        self.confirmed = confirmed;
    }

    /// Delivers all pending records, and checks that everything received may then be confirmed.
    fn deliver_all(&mut self) {
        self.step(&mut &b"a"[..]);
        self.check_invariants();
        assert_eq!(self.confirmed, self.core.delivery.watermark.received());
    }
}

fn take_bytes<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (head, after) = rest.split_first_chunk()?;
    *rest = after;
    Some(*head)
}
