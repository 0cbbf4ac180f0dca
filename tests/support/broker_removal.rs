//! Simulates a Kafka cluster that is shutting down: the last broker still responds, but its
//! metadata no longer contains any brokers.

use std::collections::HashMap;
use std::io;
use std::net::TcpStream;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::lag::{receive, send, varint};

/// The API key of Metadata requests.
const METADATA: u8 = 3;
/// The first version of Metadata requests whose responses have the format that [`without_brokers`]
/// parses.
const FLEXIBLE_VERSION: i16 = 9;
/// The first version of Metadata requests in which topics have IDs.
const TOPIC_ID_VERSION: i16 = 10;
/// The offset of the broker array, which follows the correlation ID, the tags and the throttle
/// time.
const BROKERS_OFFSET: usize = 9;
/// The encoded length of an empty compact array.
const EMPTY_ARRAY: u8 = 1;
/// Number of nonexistent topics to add to a response. librdkafka permanently loses all brokers only
/// if its connections close while it is still parsing the response, so the response must be long.
const UNKNOWN_TOPICS: usize = 20_000;
/// The error code for a topic that does not exist.
const UNKNOWN_TOPIC_OR_PARTITION: i16 = 3;

/// While enabled, removes all brokers from metadata responses.
#[derive(Default)]
pub(crate) struct BrokerRemoval {
    is_enabled: AtomicBool,
    changed: AtomicUsize,
    /// The version of each pending metadata request, by correlation ID.
    pending_versions: Mutex<HashMap<[u8; 4], i16>>,
}

impl BrokerRemoval {
    /// Enables or disables the removal of brokers.
    pub(crate) fn set_enabled(&self, is_enabled: bool) {
        self.is_enabled.store(is_enabled, Ordering::SeqCst);
    }

    /// Returns the number of responses from which brokers were removed.
    pub(crate) fn changed_responses(&self) -> usize {
        self.changed.load(Ordering::SeqCst)
    }

    /// Forwards requests, and records the versions of metadata requests.
    pub(super) fn forward_requests(&self, from: &TcpStream, to: &TcpStream) -> io::Result<()> {
        loop {
            let request = receive(from)?;
            if let Some([0, METADATA, major, minor, id @ ..]) = request.first_chunk::<8>()
                && let version = i16::from_be_bytes([*major, *minor])
                && version >= FLEXIBLE_VERSION
            {
                self.pending_versions.lock().unwrap().insert(*id, version);
            }
            send(to, &request)?;
        }
    }

    /// Forwards responses. While enabled, removes the brokers from metadata responses.
    pub(super) fn forward_responses(&self, from: &TcpStream, to: &TcpStream) -> io::Result<()> {
        loop {
            let mut response = receive(from)?;
            let id = response.first_chunk();
            if let Some(version) =
                id.and_then(|id| self.pending_versions.lock().unwrap().remove(id))
                && self.is_enabled.load(Ordering::SeqCst)
                && let Some(emptied) = without_brokers(&response, version)
            {
                self.changed.fetch_add(1, Ordering::SeqCst);
                response = emptied;
            }
            send(to, &response)?;
        }
    }
}

/// Returns the response without its brokers, but with many additional topics that do not exist.
fn without_brokers(response: &[u8], version: i16) -> Option<Vec<u8>> {
    let (head, mut rest) = response.split_at_checked(BROKERS_OFFSET)?;
    for _ in 1..varint(&mut rest)? {
        // Skip the broker's ID, host, port and rack.
        rest = rest.get(4..)?;
        let host = varint(&mut rest)?.saturating_sub(1);
        rest = rest.get(host + 4..)?;
        let rack = varint(&mut rest)?.saturating_sub(1);
        rest = rest.get(rack..)?;
        // Skip the broker's tags, which are empty.
        rest = rest.get(1..)?;
    }
    let cluster = rest;
    let id = varint(&mut rest)?.saturating_sub(1);
    let controller = id + 4;
    let cluster = cluster.get(..cluster.len() - rest.len() + controller)?;
    rest = rest.get(controller..)?;
    let topics = varint(&mut rest)? + UNKNOWN_TOPICS;
    let mut emptied = [head, &[EMPTY_ARRAY], cluster].concat();
    write_varint(&mut emptied, topics);
    for number in 0..UNKNOWN_TOPICS {
        let name = format!("that_does_not_exist_{number}");
        emptied.extend(UNKNOWN_TOPIC_OR_PARTITION.to_be_bytes());
        write_varint(&mut emptied, name.len() + 1);
        emptied.extend(name.bytes());
        if version >= TOPIC_ID_VERSION {
            emptied.extend([0; 16]);
        }
        // The remaining fields of a nonexistent topic: not internal, no partitions, authorized
        // operations not requested, empty tags.
        emptied.extend([0, EMPTY_ARRAY, 0x80, 0, 0, 0, 0]);
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
