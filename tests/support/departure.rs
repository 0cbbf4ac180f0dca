//! Kafka's brokers while they stop: the last one answers still, and names none that is there.

use std::collections::HashMap;
use std::io;
use std::net::TcpStream;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::lag::{receive, send, varint};

/// Metadata requests have this API key.
const METADATA: u8 = 3;
/// From this version on, answers are written as [`emptied`] reads them.
const FLEXIBLE: i16 = 9;
/// From this version on, topics have ids.
const TOPIC_IDS: i16 = 10;
/// Behind correlation id, tags and throttle time.
const BROKERS: usize = 9;
/// No elements, as arrays that may be null count.
const NONE: u8 = 1;
/// So many topics that do not exist are in an answer, so that librdkafka is still reading it when its connections have
/// ended: only in this order does it forget all brokers for good.
const UNKNOWN_TOPICS: usize = 20_000;
/// `UNKNOWN_TOPIC_OR_PARTITION`.
const UNKNOWN: i16 = 3;

/// Says that there are no brokers, while it is told to.
#[derive(Default)]
pub(crate) struct Departure {
    is_now: AtomicBool,
    answers: AtomicUsize,
    /// The requests for metadata: correlation id, version.
    asked: Mutex<HashMap<[u8; 4], i16>>,
}

impl Departure {
    /// Whether there seem to be none from now on.
    pub(crate) fn set(&self, is_now: bool) {
        self.is_now.store(is_now, Ordering::SeqCst);
    }

    /// How many answers have named no broker.
    pub(crate) fn answers(&self) -> usize {
        self.answers.load(Ordering::SeqCst)
    }

    /// Passes requests on, and notes which ones are for metadata.
    pub(super) fn ask(&self, from: &TcpStream, to: &TcpStream) -> io::Result<()> {
        loop {
            let request = receive(from)?;
            if let Some([0, METADATA, major, minor, id @ ..]) = request.first_chunk::<8>()
                && let version = i16::from_be_bytes([*major, *minor])
                && version >= FLEXIBLE
            {
                self.asked.lock().unwrap().insert(*id, version);
            }
            send(to, &request)?;
        }
    }

    /// Passes answers on.
    pub(super) fn answer(&self, from: &TcpStream, to: &TcpStream) -> io::Result<()> {
        loop {
            let mut answer = receive(from)?;
            let id = answer.first_chunk();
            if let Some(version) = id.and_then(|id| self.asked.lock().unwrap().remove(id))
                && self.is_now.load(Ordering::SeqCst)
                && let Some(emptied) = emptied(&answer, version)
            {
                self.answers.fetch_add(1, Ordering::SeqCst);
                answer = emptied;
            }
            send(to, &answer)?;
        }
    }
}

/// An answer without its brokers, and with topics that do not exist.
fn emptied(answer: &[u8], version: i16) -> Option<Vec<u8>> {
    let (head, mut rest) = answer.split_at_checked(BROKERS)?;
    for _ in 1..varint(&mut rest)? {
        // Its id; host; port; rack.
        rest = rest.get(4..)?;
        let host = varint(&mut rest)?.saturating_sub(1);
        rest = rest.get(host + 4..)?;
        let rack = varint(&mut rest)?.saturating_sub(1);
        rest = rest.get(rack..)?;
        // No tags.
        rest = rest.get(1..)?;
    }
    let cluster = rest;
    let id = varint(&mut rest)?.saturating_sub(1);
    let controller = id + 4;
    let cluster = cluster.get(..cluster.len() - rest.len() + controller)?;
    rest = rest.get(controller..)?;
    let topics = varint(&mut rest)? + UNKNOWN_TOPICS;
    let mut emptied = [head, &[NONE], cluster].concat();
    write_varint(&mut emptied, topics);
    for number in 0..UNKNOWN_TOPICS {
        let name = format!("that_does_not_exist_{number}");
        emptied.extend(UNKNOWN.to_be_bytes());
        write_varint(&mut emptied, name.len() + 1);
        emptied.extend(name.bytes());
        if version >= TOPIC_IDS {
            emptied.extend([0; 16]);
        }
        // Not internal; no partitions; no rights asked for; no tags.
        emptied.extend([0, NONE, 0x80, 0, 0, 0, 0]);
    }
    emptied.extend(rest);
    Some(emptied)
}

fn write_varint(to: &mut Vec<u8>, mut value: usize) {
    while value >= 0x80 {
        to.push(value.to_le_bytes()[0] | 0x80);
        value >>= 7;
    }
    to.push(value.to_le_bytes()[0]);
}
