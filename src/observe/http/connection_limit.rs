//! Limits the number of connections without making new clients wait.
//!
//! Every new connection is accepted. If the limit is reached, another connection is evicted: the
//! least recently active connection from the address with the most connections. A flood from one
//! address therefore evicts its own connections. If legitimate clients share the address (because
//! of a proxy, or because all of them run on this machine), the flood evicts idle connections, but
//! a client that has sent a request receives a response within one iteration of the event loop.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// Maximum number of connections.
const CONNECTIONS_MAX: usize = 128;
/// Maximum number of connections from one address.
const CONNECTIONS_PER_ADDRESS_MAX: usize = 64;
/// Maximum total size of responses that clients have not received yet, across all connections.
const UNREAD_BYTES_MAX: usize = 8 << 20;

/// All open connections.
#[derive(Debug, Default)]
pub(super) struct ConnectionLimit(Mutex<OpenConnections<oneshot::Sender<()>>>);

/// A connection's slot in the [`ConnectionLimit`], which is released when this value is dropped.
#[derive(Debug)]
pub(super) struct ConnectionSlot {
    limit: Arc<ConnectionLimit>,
    number: u64,
}

impl ConnectionLimit {
    /// Adds a connection. The returned receiver completes when the connection must be closed.
    pub(super) fn add(
        self: &Arc<Self>,
        from: IpAddr,
    ) -> (Arc<ConnectionSlot>, oneshot::Receiver<()>) {
        let (eviction_tx, eviction_rx) = oneshot::channel();
        let number = self.connections().add(network(from), eviction_tx);
        let limit = Arc::clone(self);
        (Arc::new(ConnectionSlot { limit, number }), eviction_rx)
    }

    /// Evicts a connection to release its resources. Returns false if no connection is open.
    pub(super) fn evict_one(&self) -> bool {
        self.connections().evict_from_largest()
    }

    fn connections(&self) -> MutexGuard<'_, OpenConnections<oneshot::Sender<()>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ConnectionSlot {
    /// Adds a response of `bytes` bytes to this connection's unread responses.
    pub(super) fn add_response(&self, bytes: usize) {
        self.limit.connections().add_response(self.number, bytes);
    }

    /// Marks all responses of this connection as received by the client.
    pub(super) fn mark_responses_received(&self) {
        self.limit
            .connections()
            .mark_responses_received(self.number);
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.limit.connections().by_number.remove(&self.number);
    }
}

/// Returns the network of a client. An IPv6 client usually controls at least a network with a
/// 64-bit prefix.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)).into()
        }
        v4 => v4,
    }
}

/// The eviction rules, independent of sockets. A connection is evicted by dropping its value of
/// type `E`.
#[derive(Debug)]
struct OpenConnections<E> {
    by_number: BTreeMap<u64, OpenConnection<E>>,
    /// A counter that is incremented for each new connection and each response.
    next: u64,
}

#[derive(Debug)]
struct OpenConnection<E> {
    network: IpAddr,
    /// The counter value that was assigned when the connection was opened or the last response was
    /// queued. Connections are ordered by a counter so that the order does not depend on the system
    /// clock.
    since: u64,
    /// Total size of the responses that the client has not received yet.
    unread: usize,
    _eviction: E,
}

impl<E> Default for OpenConnections<E> {
    fn default() -> Self {
        Self {
            by_number: BTreeMap::new(),
            next: 0,
        }
    }
}

impl<E> OpenConnections<E> {
    fn add(&mut self, network: IpAddr, eviction: E) -> u64 {
        let is_same = |open: &&OpenConnection<E>| open.network == network;
        if self.by_number.values().filter(is_same).count() >= CONNECTIONS_PER_ADDRESS_MAX {
            self.evict_oldest(|open| open.network == network);
        } else if self.by_number.len() >= CONNECTIONS_MAX {
            self.evict_from_largest();
        }
        let number = self.tick();
        let connection = OpenConnection {
            network,
            since: number,
            unread: 0,
            _eviction: eviction,
        };
        self.by_number.insert(number, connection);
        number
    }

    fn add_response(&mut self, number: u64, bytes: usize) {
        let since = self.tick();
        let Some(connection) = self.by_number.get_mut(&number) else {
            return;
        };
        connection.since = since;
        // Add the size to `unread`, because a client that pipelines requests can have several
        // unread responses.
        connection.unread = connection.unread.saturating_add(bytes);
        while self.unread_bytes() > UNREAD_BYTES_MAX {
            let others = self.by_number.iter().filter(|(other, _)| **other != number);
            let largest = largest_network(others.map(|(_, open)| (open, open.unread)));
            // If no other connection has unread responses, this connection's unread responses are
            // allowed to exceed the limit.
            let Some((network, _)) = largest.filter(|(_, bytes)| *bytes > 0) else {
                return;
            };
            self.evict_oldest(|open| {
                open.network == network && open.unread > 0 && open.since != since
            });
        }
    }

    fn unread_bytes(&self) -> usize {
        let each = self.by_number.values().map(|open| open.unread);
        each.fold(0, usize::saturating_add)
    }

    fn mark_responses_received(&mut self, number: u64) {
        if let Some(connection) = self.by_number.get_mut(&number) {
            connection.unread = 0;
        }
    }

    /// Evicts the least recently active connection of the network with the most connections.
    /// Returns false if no connection is open.
    fn evict_from_largest(&mut self) -> bool {
        let largest = largest_network(self.by_number.values().map(|open| (open, 1)));
        let evicted = largest.map(|(network, _)| self.evict_oldest(|open| open.network == network));
        evicted.is_some()
    }

    /// Evicts the least recently active connection for which `matches` returns true.
    fn evict_oldest(&mut self, matches: impl Fn(&OpenConnection<E>) -> bool) {
        let matching = self.by_number.iter().filter(|(_, open)| matches(open));
        let oldest = matching.min_by_key(|(_, open)| open.since);
        if let Some(number) = oldest.map(|(number, _)| *number) {
            self.by_number.remove(&number);
        }
    }

    fn tick(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
}

/// Adds up the amounts for each network. Returns the network with the largest sum, together with
/// the sum. If several networks have the same sum, returns the network with the least recently
/// active connection.
fn largest_network<'c, E: 'c>(
    amounts: impl Iterator<Item = (&'c OpenConnection<E>, usize)>,
) -> Option<(IpAddr, usize)> {
    let mut sums: HashMap<IpAddr, (usize, u64)> = HashMap::new();
    for (connection, amount) in amounts {
        let (sum, since) = sums.entry(connection.network).or_insert((0, u64::MAX));
        *sum += amount;
        *since = connection.since.min(*since);
    }
    let largest = sums
        .into_iter()
        .max_by_key(|(_, (sum, since))| (*sum, std::cmp::Reverse(*since)));
    largest.map(|(network, (sum, _))| (network, sum))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    /// Opens the given number of connections from each address, in the given order.
    fn open_connections(counts: &[(u8, usize)]) -> (OpenConnections<()>, Vec<u64>) {
        let mut open = OpenConnections::default();
        let repeat = |(last, count): &(u8, usize)| vec![*last; *count];
        let addresses = counts.iter().flat_map(repeat);
        let numbers = addresses.map(|last| open.add(address(last), ())).collect();
        (open, numbers)
    }

    fn contains(open: &OpenConnections<()>, number: u64) -> bool {
        open.by_number.contains_key(&number)
    }

    #[test]
    fn evicts_the_oldest_connection_from_the_same_address() {
        let (mut open, numbers) = open_connections(&[(1, CONNECTIONS_PER_ADDRESS_MAX)]);
        // Make the first connection the most recently active one.
        open.add_response(numbers[0], 10);
        open.mark_responses_received(numbers[0]);
        let new = open.add(address(1), ());
        assert_eq!(open.by_number.len(), CONNECTIONS_PER_ADDRESS_MAX);
        assert!(contains(&open, new) && contains(&open, numbers[0]));
        assert!(!contains(&open, numbers[1]));
    }

    #[test]
    fn keeps_connections_from_other_addresses_during_a_flood() {
        let (mut open, numbers) = open_connections(&[(1, 1), (2, 10 * CONNECTIONS_MAX)]);
        assert!(contains(&open, numbers[0]));
        // Connections from the addresses with the most connections are evicted first.
        for last in 3..=60 {
            for _ in 0..3 {
                open.add(address(last), ());
            }
        }
        assert_eq!(open.by_number.len(), CONNECTIONS_MAX);
        assert!(contains(&open, numbers[0]));
    }

    #[test]
    fn evicts_the_oldest_connection_if_all_addresses_have_the_same_number_of_connections() {
        let mut open = OpenConnections::default();
        let add = |open: &mut OpenConnections<()>, last| open.add(address(last), ());
        let count = u8::try_from(CONNECTIONS_MAX).expect("fewer than 256");
        let numbers: Vec<_> = (0..count).map(|last| add(&mut open, last)).collect();
        add(&mut open, count);
        assert!(!contains(&open, numbers[0]) && contains(&open, numbers[1]));
    }

    #[test]
    fn limits_the_size_of_unread_responses() {
        let (mut open, numbers) = open_connections(&[(1, 1), (2, 10)]);
        open.add_response(numbers[0], 1000);
        for number in &numbers[1..] {
            open.add_response(*number, UNREAD_BYTES_MAX / 4);
        }
        let unread = open.unread_bytes();
        assert!(unread <= UNREAD_BYTES_MAX, "{unread}");
        assert!(contains(&open, numbers[0]), "a small response");
        assert!(contains(&open, numbers[10]), "the last response");
        assert!(!contains(&open, numbers[1]));
        // A response no longer counts towards the limit after it has been received. If only one
        // connection has unread responses, their size is not limited.
        let last = numbers[10];
        open.mark_responses_received(last);
        open.add_response(last, UNREAD_BYTES_MAX);
        open.add_response(last, UNREAD_BYTES_MAX);
        assert_eq!(open.by_number[&last].unread, 2 * UNREAD_BYTES_MAX);
        assert!(contains(&open, last));
        let connections = open.by_number.values();
        assert_eq!(connections.filter(|each| each.unread > 0).count(), 1);
        open.mark_responses_received(last);
        assert_eq!(open.by_number[&last].unread, 0);
        open.add_response(99, 1);
    }

    #[test]
    fn groups_ipv6_clients_by_network() {
        let parsed = |text: &str| network(text.parse().expect("an address"));
        assert_eq!(parsed("2001:db8::1"), parsed("2001:db8::ffff:1"));
        assert_ne!(parsed("2001:db8::1"), parsed("2001:db8:0:1::1"));
        assert_eq!(parsed("::ffff:10.0.0.1"), address(1));
        assert_ne!(parsed("10.0.0.1"), parsed("10.0.0.2"));
    }

    #[test]
    fn frees_the_connection_slot_when_a_connection_closes() {
        let limit = Arc::new(ConnectionLimit::default());
        let (slot, mut eviction) = limit.add(address(1));
        assert!(
            eviction
                .try_recv()
                .is_err_and(|e| e == oneshot::error::TryRecvError::Empty)
        );
        assert!(limit.evict_one() && !limit.evict_one());
        assert!(
            eviction
                .try_recv()
                .is_err_and(|e| e == oneshot::error::TryRecvError::Closed)
        );
        slot.add_response(5);
        drop(slot);
        let (slot, _eviction) = limit.add(address(1));
        drop(slot);
        assert!(!limit.evict_one());
    }
}
