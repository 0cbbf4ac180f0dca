//! Simulates how consumers see a Kafka partition leader shortly after its election. Until its high
//! watermark has caught up with the previous leader's high watermark, the new leader may return
//! fewer records than the previous leader did.

use std::collections::HashSet;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

/// Number of responses that consumers receive before the leader catches up.
const RESPONSES_BEFORE_CATCH_UP: usize = 30;
/// Delay before a shortened response is forwarded, as if the leader had waited for more records.
const EMPTY_FETCH_WAIT: Duration = Duration::from_millis(10);

/// The API key of Fetch requests.
const FETCH: u8 = 1;
/// The first version of Fetch requests in which topics have an ID instead of a name.
const TOPIC_ID_VERSION: i16 = 13;
/// Offsets within a response at which the topic count and the first topic's partition count are
/// stored.
const PARTITION_COUNTS: [usize; 2] = [15, 32];
/// The encoded length of a compact array with one element.
const ONE_ELEMENT: u8 = 2;
/// The bytes of a response that contain the partition's high watermark and last stable offset.
const WATERMARKS: Range<usize> = 39..55;
/// Offset of the list of aborted transactions, which follows the watermarks and the log start
/// offset.
const ABORTED_OFFSET: usize = 63;
/// Size of one aborted transaction: producer ID, first offset and empty tags.
const ABORTED_BYTES: usize = 17;

/// Changes Fetch responses so that partitions seem to end at a given offset.
pub(crate) struct Lag {
    end: i64,
    remaining_responses: AtomicUsize,
}

/// The correlation IDs of the pending Fetch requests on a connection.
pub(super) type Fetches = Mutex<HashSet<[u8; 4]>>;

impl Lag {
    /// Makes partitions seem to end at the offset `end`, which must be at the end of a batch.
    pub(super) fn ending_at(end: i64) -> Self {
        let remaining_responses = AtomicUsize::new(RESPONSES_BEFORE_CATCH_UP);
        Self {
            end,
            remaining_responses,
        }
    }

    /// Returns whether the leader has caught up, which it has after [`RESPONSES_BEFORE_CATCH_UP`]
    /// responses.
    pub(crate) fn has_caught_up(&self) -> bool {
        self.remaining_responses.load(Ordering::Relaxed) == 0
    }

    /// Counts a response, and returns whether the leader still lags.
    fn count_response(&self) -> bool {
        let fewer = |remaining_responses: usize| remaining_responses.checked_sub(1);
        self.remaining_responses
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, fewer)
            .is_ok()
    }

    /// Forwards requests, and records the correlation IDs of Fetch requests.
    pub(super) fn forward_requests(
        &self,
        from: &TcpStream,
        to: &TcpStream,
        fetches: &Fetches,
    ) -> io::Result<()> {
        loop {
            let request = receive(from)?;
            if let Some([0, FETCH, major, minor, id @ ..]) = request.first_chunk::<8>()
                && i16::from_be_bytes([*major, *minor]) >= TOPIC_ID_VERSION
            {
                fetches.lock().unwrap().insert(*id);
            }
            send(to, &request)?;
        }
    }

    /// Forwards responses. While the leader lags, shortens responses to Fetch requests.
    pub(super) fn forward_responses(
        &self,
        from: &TcpStream,
        to: &TcpStream,
        fetches: &Fetches,
    ) -> io::Result<()> {
        loop {
            let mut response = receive(from)?;
            let id = response.first_chunk();
            if id.is_some_and(|id| fetches.lock().unwrap().remove(id))
                && let Some(short) = self.shorten(&response)
                && self.count_response()
            {
                response = short;
                thread::sleep(EMPTY_FETCH_WAIT);
            }
            send(to, &response)?;
        }
    }

    /// Returns the response without the records that follow the apparent end of the partition.
    /// Supports only responses for a single partition.
    fn shorten(&self, response: &[u8]) -> Option<Vec<u8>> {
        if PARTITION_COUNTS
            .iter()
            .any(|&at| response.get(at) != Some(&ONE_ELEMENT))
        {
            return None;
        }
        let mut rest = response.get(ABORTED_OFFSET..)?;
        let aborted = varint(&mut rest)?.saturating_sub(1);
        // The preferred read replica takes 4 bytes.
        rest = rest.get(aborted * ABORTED_BYTES + 4..)?;
        let mut short = response[..response.len() - rest.len()].to_vec();
        short[WATERMARKS].copy_from_slice(&[self.end.to_be_bytes(); 2].concat());

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
        // Add empty tags for the partition, the topic and the response.
        short.extend([0; 3]);
        Some(short)
    }
}

/// Receives a length-prefixed message, and returns it without the prefix.
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
