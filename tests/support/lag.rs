//! Kafka's leader of a partition soon after its election, as consumers see it: it gives them nothing beyond what it
//! knows the followers to have, which can be less than its predecessor gave away.

use std::collections::HashSet;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

/// Answers to a consumer until the leader knows better.
const ANSWERS: usize = 30;
/// A leader that has nothing to give waits so long for more.
const WAIT: Duration = Duration::from_millis(10);

/// Fetch requests have this API key.
const FETCH: u8 = 1;
/// From this version on, topics have an id in them, and no name.
const TOPIC_ID: i16 = 13;
/// Where an answer of one topic says how many there are, and how many partitions of that one.
const COUNTS: [usize; 2] = [15, 32];
/// One, as arrays that may be null count.
const ONE: u8 = 2;
/// The high watermark and the last stable offset of the partition.
const MARKS: Range<usize> = 39..55;
/// Behind these and the start of the log: the aborted transactions.
const ABORTED: usize = 63;
/// Id of a producer, first offset, no tags.
const ABORTED_BYTES: usize = 17;

/// Answers to Fetch requests end where this says.
pub(crate) struct Lag {
    end: i64,
    left: AtomicUsize,
}

/// The correlation ids of a connection's Fetch requests.
pub(super) type Fetches = Mutex<HashSet<[u8; 4]>>;

impl Lag {
    /// Partitions seem to end at `end`, which is where a batch does.
    pub(super) fn behind(end: i64) -> Self {
        let left = AtomicUsize::new(ANSWERS);
        Self { end, left }
    }

    /// It has answered often enough to know better.
    pub(crate) fn is_over(&self) -> bool {
        self.left.load(Ordering::Relaxed) == 0
    }

    /// Whether it is so for one more answer.
    fn is_still(&self) -> bool {
        let fewer = |left: usize| left.checked_sub(1);
        self.left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, fewer)
            .is_ok()
    }

    /// Passes requests on, and notes which ones fetch.
    pub(super) fn ask(
        &self,
        from: &TcpStream,
        to: &TcpStream,
        fetches: &Fetches,
    ) -> io::Result<()> {
        loop {
            let request = receive(from)?;
            if let Some([0, FETCH, major, minor, id @ ..]) = request.first_chunk::<8>()
                && i16::from_be_bytes([*major, *minor]) >= TOPIC_ID
            {
                fetches.lock().unwrap().insert(*id);
            }
            send(to, &request)?;
        }
    }

    /// Passes answers on.
    pub(super) fn answer(
        &self,
        from: &TcpStream,
        to: &TcpStream,
        fetches: &Fetches,
    ) -> io::Result<()> {
        loop {
            let mut answer = receive(from)?;
            let id = answer.first_chunk();
            if id.is_some_and(|id| fetches.lock().unwrap().remove(id))
                && let Some(short) = self.shortened(&answer)
                && self.is_still()
            {
                answer = short;
                thread::sleep(WAIT);
            }
            send(to, &answer)?;
        }
    }

    /// An answer about one partition, without what is behind the end.
    fn shortened(&self, answer: &[u8]) -> Option<Vec<u8>> {
        if COUNTS.iter().any(|&at| answer.get(at) != Some(&ONE)) {
            return None;
        }
        let mut rest = answer.get(ABORTED..)?;
        let aborted = varint(&mut rest)?.saturating_sub(1);
        // And the preferred replica.
        rest = rest.get(aborted * ABORTED_BYTES + 4..)?;
        let mut short = answer[..answer.len() - rest.len()].to_vec();
        short[MARKS].copy_from_slice(&[self.end.to_be_bytes(); 2].concat());

        let records = varint(&mut rest)?.saturating_sub(1);
        let records = rest.get(..records)?;
        let mut kept = 0;
        while let Some((head, _)) = records.get(kept..)?.split_first_chunk::<12>()
            && let Some((offset, length)) = head.split_first_chunk()
            && i64::from_be_bytes(*offset) < self.end
        {
            kept += head.len() + u32::from_be_bytes(length.try_into().ok()?) as usize;
        }
        let records = records.get(..kept)?;
        let mut count = kept + 1;
        while count > 0x7f {
            short.push(count.to_le_bytes()[0] | 0x80);
            count >>= 7;
        }
        short.push(count.to_le_bytes()[0]);
        short.extend(records);
        // No tags: of the partition, of the topic, of the answer.
        short.extend([0; 3]);
        Some(short)
    }
}

/// A message without its length.
pub(super) fn receive(mut from: &TcpStream) -> io::Result<Vec<u8>> {
    let mut length = [0; 4];
    from.read_exact(&mut length)?;
    let mut message = vec![0; u32::from_be_bytes(length) as usize];
    from.read_exact(&mut message)?;
    Ok(message)
}

pub(super) fn send(mut to: &TcpStream, message: &[u8]) -> io::Result<()> {
    let length = u32::try_from(message.len()).unwrap().to_be_bytes();
    to.write_all(&[&length, message].concat())
}

pub(super) fn varint(from: &mut &[u8]) -> Option<usize> {
    let last = from.iter().take(4).position(|byte| byte & 0x80 == 0)?;
    let (bytes, rest) = from.split_at(last + 1);
    *from = rest;
    let value = bytes.iter().rev();
    Some(value.fold(0, |value, byte| value << 7 | usize::from(byte & 0x7f)))
}
