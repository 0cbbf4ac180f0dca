//! Streams of frames, with deliveries in any order between them.

use std::sync::Arc;

use super::*;
use crate::delivery::watermark::{Deliveries, Tag};
use crate::model::window::Window;
use crate::outbox::Record;
use crate::pipeline::recovery::{Remedy, of_core};
use crate::pipeline::settings::Undeliverable;
use crate::sink::{Produced, SinkError};

const RESUME: Lsn = Lsn(0x100);
const WINDOW: Window = Window {
    records: 8,
    bytes: 8192,
};

/// Bytes as a stream: the first chooses the outbox, the mode and whether there are dead letters; then
/// come steps, each with a letter before it.
///
/// | Letter | Step |
/// |---|---|
/// | `w`, u16, message | a message of so many bytes |
/// | `k`, u64 | a keepalive with this LSN |
/// | `d`, u8 | the sink delivers one of its records |
/// | `a` | the sink delivers all of them |
/// | `f`, `t` | the sink is full, or has to make the topic, at the next record |
/// | `r` | a new connection, from what was confirmed |
///
/// # Panics
/// What is confirmed goes back, or ahead of what was delivered or received; records are out of
/// order; the window is exceeded.
pub fn core(data: &[u8]) {
    let Some((&kind, mut rest)) = data.split_first() else {
        return;
    };
    let mut stream = Stream::new(kind);
    while stream.step(&mut rest).is_some() {
        stream.hold();
    }
    stream.end();
}

/// A sink that counts.
#[derive(Default)]
struct Counter {
    /// The answer to the next record, if it is not taken.
    answer: Option<Produced>,
    /// The records that are not delivered yet: their tags, and where they are in WAL. Those of
    /// earlier connections are nowhere.
    held: Vec<(Tag, Option<Position>)>,
    last: Option<Position>,
    /// How many messages of the transaction have an index.
    counted: u64,
}

impl Sink for Counter {
    fn produce(&mut self, record: &Record<'_>, tag: Tag) -> Result<Produced, SinkError> {
        if let Some(answer) = self.answer.take() {
            return Ok(answer);
        }
        let (_, text) = record
            .headers
            .iter()
            .find(|(name, _)| *name == "walpost-position")
            .expect("every record has its position");
        let position = position(text.expect("a text"));
        assert!(
            self.last < Some(position),
            "{:?} before {position}",
            self.last
        );
        assert_eq!(position.index, self.counted);
        self.last = Some(position);
        self.held.push((tag, Some(position)));
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
            core.leave_out(None, RESUME, RESUME);
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

    /// Takes one step; nothing when the stream has ended, well or not.
    fn step(&mut self, rest: &mut &[u8]) -> Option<()> {
        let (&letter, after) = rest.split_first()?;
        *rest = after;
        match letter {
            b'w' => {
                let len = u16::from_be_bytes(take(rest)?);
                let (data, after) = rest.split_at_checked(usize::from(len))?;
                *rest = after;
                self.message(data)?;
            }
            b'k' => {
                let wal_end = Lsn(u64::from_be_bytes(take(rest)?));
                let frame = Frame::Keepalive {
                    wal_end,
                    reply_requested: true,
                };
                let step = self.core.frame(&frame, &mut self.sink);
                assert_eq!(step.expect("a keepalive is never wrong"), Step::Answer);
            }
            b'd' => {
                let [which] = take(rest)?;
                if let Some(which) = usize::from(which).checked_rem(self.sink.held.len()) {
                    let (tag, _) = self.sink.held.remove(which);
                    self.deliveries.delivered([tag]);
                }
            }
            b'a' => {
                let tags = self.sink.held.drain(..).map(|(tag, _)| tag);
                self.deliveries.delivered(tags);
            }
            b'f' => self.sink.answer = Some(Produced::Full),
            b't' => self.sink.answer = Some(Produced::NewTopic),
            b'r' => {
                self.core.reconnected(self.confirmed);
                self.sink.last = None;
                for (_, position) in &mut self.sink.held {
                    *position = None;
                }
            }
            _ => return None,
        }
        Some(())
    }

    /// Hands in a message, again and again until there is room for it.
    fn message(&mut self, data: &[u8]) -> Option<()> {
        let frame = Frame::XLogData {
            start: Lsn::ZERO,
            wal_end: Lsn::ZERO,
            data,
        };
        let place = self.core.place();
        loop {
            match self.core.frame(&frame, &mut self.sink) {
                Ok(Step::Done) => return self.count(data),
                Ok(Step::Answer) => panic!("a message is not answered"),
                Ok(Step::Full | Step::NewTopic(_)) => {
                    assert_eq!(self.core.place(), place, "it was left as it was");
                    self.hold();
                    self.step(&mut &b"d\0"[..])?;
                }
                Ok(Step::SetAside(_)) => panic!("no table may be set aside"),
                Ok(Step::NewTable(oid)) => self.core.describe_table(oid, Vec::new()),
                Err(error) => {
                    assert_eq!(of_core(&error), Remedy::Halt);
                    return None;
                }
            }
        }
    }

    /// Counts a message that was taken.
    fn count(&mut self, data: &[u8]) -> Option<()> {
        let is_log = matches!(self.core.source, Source::Messages(_));
        match Message::decode(data).expect("it was taken") {
            Message::Begin(_) => self.sink.counted = 0,
            Message::Insert { .. } | Message::Update { .. } | Message::Delete { .. } => {
                self.sink.counted += 1;
            }
            Message::Logical { transactional, .. } if is_log && transactional => {
                self.sink.counted += 1;
            }
            _ => {}
        }
        Some(())
    }

    /// What has to be so at any time.
    fn hold(&mut self) {
        let confirmed = self.core.delivery.watermark.confirmed().lsn();
        assert!(confirmed >= self.confirmed, "it never goes back");
        assert!(confirmed <= self.core.delivery.watermark.received());
        // A transaction ends after its commit record, and the one after it is beyond its end.
        let held = self.sink.held.iter().filter_map(|(_, position)| *position);
        let first = held.map(|position| position.commit).min();
        assert!(
            first.is_none_or(|first| confirmed <= first),
            "{confirmed} is ahead"
        );
        let in_flight = self.core.delivery.watermark.in_flight();
        assert_eq!(in_flight.records, self.sink.held.len() as u64);
        assert!(in_flight.records <= WINDOW.records);
        assert!(in_flight.bytes <= WINDOW.bytes || in_flight.records == 1);
        self.confirmed = confirmed;
    }

    /// When all is delivered, everything that was received is confirmed.
    fn end(&mut self) {
        self.step(&mut &b"a"[..]);
        self.hold();
        assert_eq!(self.confirmed, self.core.delivery.watermark.received());
    }
}

fn take<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (head, after) = rest.split_first_chunk()?;
    *rest = after;
    Some(*head)
}
