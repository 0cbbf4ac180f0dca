//! Limits the number of connections without making new clients wait.
//!
//! Every new connection is accepted. If the limit is reached, another connection is evicted: the
//! least recently active one of the address that has the most. A flood from one address therefore
//! evicts its own connections. If the address is shared with legitimate clients (because of a
//! proxy, or because all of them run on this machine), the flood evicts idle connections, while a
//! client that has sent a request is answered within one iteration of the event loop.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// Maximum number of connections.
const CONNECTIONS_MAX: usize = 128;
/// Maximum number of connections from one address.
const CONNECTIONS_PER_ADDRESS_MAX: usize = 64;
/// Maximum size of responses that clients have not received yet, over all connections.
const UNREAD_BYTES_MAX: usize = 8 << 20;

/// All open connections.
#[derive(Debug, Default)]
pub(super) struct ConnectionLimit(Mutex<OpenConnections<oneshot::Sender<()>>>);

/// A connection's slot, which is released when dropped.
#[derive(Debug)]
pub(super) struct ConnectionSlot {
    room: Arc<ConnectionLimit>,
    number: u64,
}

impl ConnectionLimit {
    /// Admits a connection. The returned receiver completes when the connection has to be closed.
    pub(super) fn enter(
        self: &Arc<Self>,
        from: IpAddr,
    ) -> (Arc<ConnectionSlot>, oneshot::Receiver<()>) {
        let (ends, end) = oneshot::channel();
        let number = self.guests().enter(network(from), ends);
        let room = Arc::clone(self);
        (Arc::new(ConnectionSlot { room, number }), end)
    }

    /// Evicts a connection when the process needs its resources. Returns false if there is none.
    pub(super) fn shrink(&self) -> bool {
        self.guests().evict_from_most()
    }

    fn guests(&self) -> MutexGuard<'_, OpenConnections<oneshot::Sender<()>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ConnectionSlot {
    /// Records that a response of `bytes` bytes was passed to this connection.
    pub(super) fn answered(&self, bytes: usize) {
        self.room.guests().answered(self.number, bytes);
    }

    pub(super) fn mark_request_received(&self) {
        self.room.guests().mark_request_received(self.number);
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.room.guests().by_number.remove(&self.number);
    }
}

/// Returns the network of a client. A client with IPv6 usually controls at least a network with a
/// prefix of 64 bits.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)).into()
        }
        v4 => v4,
    }
}

/// The eviction rules, without sockets. A connection is evicted by dropping its `E`.
#[derive(Debug)]
struct OpenConnections<E> {
    by_number: BTreeMap<u64, OpenConnection<E>>,
    /// The number of the next connection or response.
    next: u64,
}

#[derive(Debug)]
struct OpenConnection<E> {
    network: IpAddr,
    /// When the connection was opened or last answered, as an increasing number that is independent
    /// of the clock.
    since: u64,
    unread: usize,
    _end: E,
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
    fn enter(&mut self, network: IpAddr, end: E) -> u64 {
        let of_it = |guest: &&OpenConnection<E>| guest.network == network;
        if self.by_number.values().filter(of_it).count() >= CONNECTIONS_PER_ADDRESS_MAX {
            self.evict(|guest| guest.network == network);
        } else if self.by_number.len() >= CONNECTIONS_MAX {
            self.evict_from_most();
        }
        let number = self.tick();
        let guest = OpenConnection {
            network,
            since: number,
            unread: 0,
            _end: end,
        };
        self.by_number.insert(number, guest);
        number
    }

    fn answered(&mut self, number: u64, bytes: usize) {
        let since = self.tick();
        let Some(guest) = self.by_number.get_mut(&number) else {
            return;
        };
        guest.since = since;
        // A client that pipelines requests has several unread responses.
        guest.unread = guest.unread.saturating_add(bytes);
        let unread = |of: &Self| {
            let each = of.by_number.values().map(|guest| guest.unread);
            each.fold(0, usize::saturating_add)
        };
        while unread(self) > UNREAD_BYTES_MAX {
            let others = || self.by_number.iter().filter(|(of, _)| **of != number);
            let most = most(others().map(|(_, guest)| (guest, guest.unread)));
            // A single response may exceed the limit.
            let Some(most) = most.filter(|(_, bytes)| *bytes > 0) else {
                return;
            };
            self.evict(|guest| guest.network == most.0 && guest.unread > 0 && guest.since != since);
        }
    }

    fn mark_request_received(&mut self, number: u64) {
        if let Some(guest) = self.by_number.get_mut(&number) {
            guest.unread = 0;
        }
    }

    /// Evicts the oldest connection of the network that has the most.
    fn evict_from_most(&mut self) -> bool {
        let most = most(self.by_number.values().map(|guest| (guest, 1)));
        let evicted = most.map(|(network, _)| self.evict(|guest| guest.network == network));
        evicted.is_some()
    }

    /// Evicts the oldest connection that matches.
    fn evict(&mut self, of: impl Fn(&OpenConnection<E>) -> bool) {
        let those = self.by_number.iter().filter(|(_, guest)| of(guest));
        let oldest = those.min_by_key(|(_, guest)| guest.since);
        if let Some(number) = oldest.map(|(number, _)| *number) {
            self.by_number.remove(&number);
        }
    }

    fn tick(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
}

/// Returns the network with the largest sum, and that sum. Of several such networks, returns the
/// one with the oldest connection.
fn most<'g, E: 'g>(
    guests: impl Iterator<Item = (&'g OpenConnection<E>, usize)>,
) -> Option<(IpAddr, usize)> {
    let mut sums: HashMap<IpAddr, (usize, u64)> = HashMap::new();
    for (guest, amount) in guests {
        let (sum, since) = sums.entry(guest.network).or_insert((0, u64::MAX));
        *sum += amount;
        *since = guest.since.min(*since);
    }
    let most = sums
        .into_iter()
        .max_by_key(|(_, (sum, since))| (*sum, std::cmp::Reverse(*since)));
    most.map(|(network, (sum, _))| (network, sum))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    /// Creates connections: the given number for each address, in that order.
    fn guests(of: &[(u8, usize)]) -> (OpenConnections<()>, Vec<u64>) {
        let mut guests = OpenConnections::default();
        let one = |(last, count): &(u8, usize)| vec![*last; *count];
        let numbers = of.iter().flat_map(one);
        let numbers = numbers
            .map(|last| guests.enter(address(last), ()))
            .collect();
        (guests, numbers)
    }

    fn contains(guests: &OpenConnections<()>, number: u64) -> bool {
        guests.by_number.contains_key(&number)
    }

    #[test]
    fn new_connection_evicts_the_oldest_of_its_address() {
        let (mut guests, numbers) = guests(&[(1, CONNECTIONS_PER_ADDRESS_MAX)]);
        // The first connection has been active since.
        guests.answered(numbers[0], 10);
        guests.mark_request_received(numbers[0]);
        let new = guests.enter(address(1), ());
        assert_eq!(guests.by_number.len(), CONNECTIONS_PER_ADDRESS_MAX);
        assert!(contains(&guests, new) && contains(&guests, numbers[0]));
        assert!(!contains(&guests, numbers[1]));
    }

    #[test]
    fn flood_of_one_address_ends_no_connection_of_another() {
        let (mut guests, numbers) = guests(&[(1, 1), (2, 10 * CONNECTIONS_MAX)]);
        assert!(contains(&guests, numbers[0]));
        // Of many addresses, those with more connections are evicted first.
        for last in 3..=60 {
            for _ in 0..3 {
                guests.enter(address(last), ());
            }
        }
        assert_eq!(guests.by_number.len(), CONNECTIONS_MAX);
        assert!(contains(&guests, numbers[0]));
    }

    #[test]
    fn evicts_the_oldest_connection_if_all_addresses_have_equally_many() {
        let mut guests = OpenConnections::default();
        let enter = |guests: &mut OpenConnections<()>, last| guests.enter(address(last), ());
        let count = u8::try_from(CONNECTIONS_MAX).expect("few");
        let numbers: Vec<_> = (0..count).map(|last| enter(&mut guests, last)).collect();
        enter(&mut guests, count);
        assert!(!contains(&guests, numbers[0]) && contains(&guests, numbers[1]));
    }

    #[test]
    fn unread_responses_are_limited() {
        let (mut guests, numbers) = guests(&[(1, 1), (2, 10)]);
        guests.answered(numbers[0], 1000);
        for number in &numbers[1..] {
            guests.answered(*number, UNREAD_BYTES_MAX / 4);
        }
        let unread: usize = guests.by_number.values().map(|guest| guest.unread).sum();
        assert!(unread <= UNREAD_BYTES_MAX, "{unread}");
        assert!(contains(&guests, numbers[0]), "its answer is a small one");
        assert!(contains(&guests, numbers[10]), "it was answered last");
        assert!(!contains(&guests, numbers[1]));
        // A response that was received no longer counts, and a single response is not limited.
        let last = numbers[10];
        guests.mark_request_received(last);
        guests.answered(last, UNREAD_BYTES_MAX);
        guests.answered(last, UNREAD_BYTES_MAX);
        assert_eq!(guests.by_number[&last].unread, 2 * UNREAD_BYTES_MAX);
        assert!(contains(&guests, last));
        assert_eq!(
            guests.by_number.values().filter(|of| of.unread > 0).count(),
            1
        );
        guests.mark_request_received(last);
        assert_eq!(guests.by_number[&last].unread, 0);
        guests.answered(99, 1);
    }

    #[test]
    fn client_of_ipv6_has_its_network() {
        let of = |text: &str| network(text.parse().expect("an address"));
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:1"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("::ffff:10.0.0.1"), address(1));
        assert_ne!(of("10.0.0.1"), of("10.0.0.2"));
    }

    #[test]
    fn place_that_is_given_up_is_free() {
        let room = Arc::new(ConnectionLimit::default());
        let (seat, mut end) = room.enter(address(1));
        assert!(
            end.try_recv()
                .is_err_and(|e| e == oneshot::error::TryRecvError::Empty)
        );
        assert!(room.shrink() && !room.shrink());
        assert!(
            end.try_recv()
                .is_err_and(|e| e == oneshot::error::TryRecvError::Closed)
        );
        seat.answered(5);
        drop(seat);
        let (seat, _end) = room.enter(address(1));
        drop(seat);
        assert!(!room.shrink());
    }
}
