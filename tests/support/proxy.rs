//! A TCP proxy that simulates network failures between Walpost and a server.

use std::collections::HashSet;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::Duration;

use super::broker_removal::BrokerRemoval;
use super::error_codes::ErrorCodes;
use super::lag::{Fetches, Lag};
use super::postgres::tcp_conninfo;
use super::wait::{WAIT_TIMEOUT, poll_until, wait_for, wait_until};

/// The network conditions that the proxy simulates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProxyMode {
    /// Forwards all bytes.
    Pass,
    /// Forwards bytes after this delay.
    Delay(Duration),
    /// Forwards this many bytes per second in each direction of each connection.
    Throttle(usize),
    /// Keeps connections open but forwards nothing, like a black hole.
    Swallow,
    /// Like [`ProxyMode::Swallow`], but also ignores connection attempts, like an unreachable host.
    Silence,
    /// Closes all connections and rejects new ones, as if the server were down.
    Refuse,
}

impl ProxyMode {
    fn forwards_nothing(self) -> bool {
        matches!(self, Self::Swallow | Self::Silence)
    }
}

/// How long a connection attempt over the loopback interface may take before the listener's queue
/// is considered full.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(300);

/// A proxy that listens on its own port and forwards connections to another.
pub(crate) struct Proxy {
    port: u16,
    shared: Arc<ProxyShared>,
}

struct ProxyShared {
    state: Mutex<ProxyState>,
    changed: Condvar,
}

struct ProxyState {
    mode: ProxyMode,
    /// The address to which connections are forwarded.
    target: SocketAddr,
    /// How many more connections to accept before the target changes, and the new target.
    next: Option<(usize, SocketAddr)>,
    /// Connections from the proxy to itself that fill the listener's queue, so that the kernel
    /// accepts no other connections.
    backlog_fillers: Vec<TcpStream>,
    /// The local addresses of the connections in `backlog_fillers` that the listener has not
    /// accepted yet.
    backlog_addresses: HashSet<SocketAddr>,
    is_listening: bool,
    /// Both ends of each connection. They are closed when the proxy is dropped. Otherwise, a server
    /// with unsent data would wait indefinitely for a client that neither reads nor disconnects.
    streams: Vec<Weak<TcpStream>>,
    /// How many more bytes to forward before all connections are cut.
    until_cut: Option<usize>,
    /// How often the limit in `until_cut` was reached and the connections were cut.
    cuts: usize,
    /// A topic to hide, by replacing its name in metadata requests.
    hidden: Option<String>,
    /// Makes partition leaders seem to lag.
    lag: Option<Arc<Lag>>,
    /// Makes brokers seem to have left the cluster.
    broker_removal: Option<Arc<BrokerRemoval>>,
    /// Replaces error codes in Kafka's responses.
    error_codes: Option<Arc<ErrorCodes>>,
    is_closed: bool,
}

impl Proxy {
    /// Starts a proxy that forwards from `port` to `target`, both on the loopback interface.
    pub(crate) fn start(port: u16, target: u16) -> Self {
        let shared = Arc::new(ProxyShared {
            state: Mutex::new(ProxyState {
                mode: ProxyMode::Pass,
                target: ([127, 0, 0, 1], target).into(),
                next: None,
                backlog_fillers: Vec::new(),
                backlog_addresses: HashSet::new(),
                is_listening: false,
                streams: Vec::new(),
                until_cut: None,
                cuts: 0,
                hidden: None,
                lag: None,
                broker_removal: None,
                error_codes: None,
                is_closed: false,
            }),
            changed: Condvar::new(),
        });
        let accepting = Arc::clone(&shared);
        thread::spawn(move || while accepting.accept(port) {});
        let proxy = Self { port, shared };
        proxy.wait_until_listening(true);
        proxy
    }

    /// Returns the port on which the proxy listens.
    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Like [`Server::tcp_conninfo`](super::postgres::Server::tcp_conninfo), but for a connection
    /// through this proxy.
    pub(crate) fn conninfo(&self, database: &str) -> String {
        tcp_conninfo(self.port, database)
    }

    /// Changes how the proxy handles bytes and connections.
    pub(crate) fn set_mode(&self, mode: ProxyMode) {
        let mut state = self.shared.lock();
        state.mode = mode;
        match mode {
            ProxyMode::Silence => state.fill_backlog(([127, 0, 0, 1], self.port).into()),
            _ => state.backlog_fillers.clear(),
        }
        drop(state);
        self.shared.changed.notify_all();
        if mode == ProxyMode::Refuse {
            self.wake();
        }
        self.wait_until_listening(mode != ProxyMode::Refuse);
    }

    fn wait_until_listening(&self, listening: bool) {
        wait_until("the proxy to start or stop listening", || {
            self.shared.lock().is_listening == listening
        });
    }

    /// Wakes up the listener's thread by connecting to the listener. The thread blocks until a
    /// connection arrives.
    fn wake(&self) {
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }

    /// Cuts every open connection.
    pub(crate) fn cut(&self) {
        self.shared.lock().cut();
    }

    /// Cuts every connection once this many more bytes have been forwarded.
    pub(crate) fn cut_after(&self, bytes: usize) {
        self.shared.lock().until_cut = Some(bytes);
    }

    /// Hides a topic from Kafka's metadata, or makes it visible again if `topic` is `None`.
    pub(crate) fn hide_topic(&self, topic: Option<&str>) {
        self.shared.lock().hidden = topic.map(str::to_owned);
    }

    /// Makes Kafka's partitions temporarily seem to end at `end`. Affects only new connections, for
    /// which all other faults are disabled.
    pub(crate) fn lag_behind(&self, end: i64) -> Arc<Lag> {
        let lag = Arc::new(Lag::ending_at(end));
        self.shared.lock().lag = Some(Arc::clone(&lag));
        lag
    }

    /// Returns a handle that can make Kafka's brokers seem to have left the cluster. Affects only
    /// new connections, for which all other faults are disabled.
    pub(crate) fn remove_brokers(&self) -> Arc<BrokerRemoval> {
        let broker_removal = Arc::new(BrokerRemoval::default());
        self.shared.lock().broker_removal = Some(Arc::clone(&broker_removal));
        broker_removal
    }

    /// Returns a handle that can replace error codes in Kafka's responses. Affects only new
    /// connections, for which all other faults are disabled.
    pub(crate) fn error_codes(&self) -> Arc<ErrorCodes> {
        let codes = Arc::new(ErrorCodes::default());
        self.shared.lock().error_codes = Some(Arc::clone(&codes));
        codes
    }

    /// After this many more connections, forwards new connections to the port `target` instead.
    pub(crate) fn move_after(&self, connections: usize, target: u16) {
        self.shared.lock().next = Some((connections, ([127, 0, 0, 1], target).into()));
    }

    /// Returns how often a limit set with [`Proxy::cut_after`] was reached and the connections were
    /// cut.
    pub(crate) fn cuts(&self) -> usize {
        self.shared.lock().cuts
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        {
            let mut state = self.shared.lock();
            state.is_closed = true;
            state.backlog_fillers.clear();
            state.cut();
        }
        self.shared.changed.notify_all();
        self.wake();
        // Wait until the port is free, because another proxy may use it next. Don't panic in `drop`
        // if that takes too long.
        poll_until(WAIT_TIMEOUT, || {
            (!self.shared.lock().is_listening).then_some(())
        });
    }
}

impl ProxyState {
    /// Opens connections until the listener's queue is full, so that the kernel drops further
    /// connection attempts.
    fn fill_backlog(&mut self, listener: SocketAddr) {
        while let Ok(stream) = TcpStream::connect_timeout(&listener, CONNECT_TIMEOUT) {
            self.backlog_addresses.extend(stream.local_addr());
            self.backlog_fillers.push(stream);
        }
    }

    fn cut(&mut self) {
        for stream in self.streams.drain(..).filter_map(|stream| stream.upgrade()) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl ProxyShared {
    fn lock(&self) -> MutexGuard<'_, ProxyState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the target for the connection that was just accepted.
    fn target(&self) -> SocketAddr {
        let mut state = self.lock();
        match &mut state.next {
            Some((0, target)) => {
                state.target = *target;
                state.next = None;
            }
            Some((left, _)) => *left -= 1,
            None => {}
        }
        state.target
    }

    fn wait<'a>(&self, state: MutexGuard<'a, ProxyState>) -> MutexGuard<'a, ProxyState> {
        let state = self.changed.wait(state);
        state.unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the proxy is allowed to listen, and then accepts connections until that is no
    /// longer allowed. Returns false once the proxy has been dropped.
    fn accept(self: &Arc<Self>, port: u16) -> bool {
        let mut state = self.lock();
        while state.mode == ProxyMode::Refuse && !state.is_closed {
            state = self.wait(state);
        }
        if state.is_closed {
            return false;
        }
        // Retry, because a process that another test has just forked may hold a copy of the
        // previous listener until it calls exec.
        let listener = wait_for("the port of a proxy", || {
            match TcpListener::bind(("127.0.0.1", port)) {
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => None,
                listener => Some(listener.expect("a port of its own")),
            }
        });
        state.is_listening = true;
        drop(state);
        while self.may_accept() {
            let Ok((client, address)) = listener.accept() else {
                continue;
            };
            if self.lock().backlog_addresses.remove(&address) || !self.may_accept() {
                continue;
            }
            // If the server refuses the connection, drop the client's connection, which closes it.
            if let Ok(server) = TcpStream::connect(self.target()) {
                let _ = self.join(client, server);
            }
        }
        drop(listener);
        let mut state = self.lock();
        // Cut all connections, including any that were accepted just before the listener was
        // closed.
        state.cut();
        state.is_listening = false;
        true
    }

    /// Waits until connections may be accepted. Returns false if the listener must be closed.
    fn may_accept(&self) -> bool {
        let mut state = self.lock();
        while state.mode == ProxyMode::Silence && !state.is_closed {
            state = self.wait(state);
        }
        !state.is_closed && state.mode != ProxyMode::Refuse
    }

    fn join(self: &Arc<Self>, client: TcpStream, server: TcpStream) -> io::Result<()> {
        let (client, server) = (Arc::new(client), Arc::new(server));
        for stream in [&client, &server] {
            stream.set_nodelay(true)?;
            self.lock().streams.push(Arc::downgrade(stream));
        }
        let (lag, broker_removal, codes) = {
            let state = self.lock();
            (
                state.lag.clone(),
                state.broker_removal.clone(),
                state.error_codes.clone(),
            )
        };
        let fetches = Arc::new(Fetches::default());
        let directions = [
            (true, Arc::clone(&client), Arc::clone(&server)),
            (false, server, client),
        ];
        for (is_request, from, to) in directions {
            let shared = Arc::clone(self);
            let (lag, fetches) = (lag.clone(), Arc::clone(&fetches));
            let (broker_removal, codes) = (broker_removal.clone(), codes.clone());
            thread::spawn(move || {
                let _ = match (lag, broker_removal, codes) {
                    (Some(lag), ..) if is_request => lag.forward_requests(&from, &to, &fetches),
                    (Some(lag), ..) => lag.forward_responses(&from, &to, &fetches),
                    (None, Some(broker_removal), _) if is_request => {
                        broker_removal.forward_requests(&from, &to)
                    }
                    (None, Some(broker_removal), _) => broker_removal.forward_responses(&from, &to),
                    (None, None, Some(codes)) if is_request => codes.forward_requests(&from, &to),
                    (None, None, Some(codes)) => codes.forward_responses(&from, &to),
                    (None, None, None) => shared.forward(&from, &to),
                };
                let _ = from.shutdown(Shutdown::Both);
                let _ = to.shutdown(Shutdown::Both);
            });
        }
        Ok(())
    }

    fn forward(&self, mut from: &TcpStream, mut to: &TcpStream) -> io::Result<()> {
        let mut buffer = [0; 16 << 10];
        loop {
            let count = from.read(&mut buffer)?;
            if count == 0 {
                return Ok(());
            }
            self.hide_topic_in(&mut buffer[..count]);
            let mut rest = &buffer[..count];
            while !rest.is_empty() {
                let part = self.forwardable_bytes(rest.len())?;
                to.write_all(&rest[..part])?;
                rest = &rest[part..];
            }
        }
    }

    /// Replaces the hidden topic in metadata requests with a topic that does not exist. A metadata
    /// request is small and sent with a single write, so `bytes` contains all of it.
    fn hide_topic_in(&self, mut bytes: &mut [u8]) {
        /// The API key, which follows the length prefix.
        const METADATA: [u8; 2] = [0, 3];
        let state = self.lock();
        let Some(hidden) = state.hidden.as_deref().map(str::as_bytes) else {
            return;
        };
        while let Some(length) = bytes.first_chunk() {
            let length = 4 + u32::from_be_bytes(*length) as usize;
            let Some((request, rest)) = bytes.split_at_mut_checked(length) else {
                return;
            };
            let mut windows = request.windows(hidden.len());
            if request.get(4..6) == Some(&METADATA)
                && let Some(at) = windows.position(|window| window == hidden)
            {
                request[at..at + hidden.len()].fill(b'_');
            }
            bytes = rest;
        }
    }

    /// Waits until the mode permits forwarding, and returns how many of the `count` bytes to
    /// forward now.
    fn forwardable_bytes(&self, count: usize) -> io::Result<usize> {
        let mut state = self.lock();
        while state.mode.forwards_nothing() && !state.is_closed {
            state = self.wait(state);
        }
        if state.is_closed {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        let mode = state.mode;
        if let Some(left) = &mut state.until_cut {
            if *left <= count {
                state.until_cut = None;
                state.cuts += 1;
                state.cut();
                return Err(io::ErrorKind::ConnectionReset.into());
            }
            *left -= count;
        }
        drop(state);
        match mode {
            ProxyMode::Delay(delay) => thread::sleep(delay),
            ProxyMode::Throttle(bytes) => {
                let part = count.min(bytes / 20 + 1);
                thread::sleep(Duration::from_millis(50));
                return Ok(part);
            }
            ProxyMode::Pass | ProxyMode::Swallow | ProxyMode::Silence | ProxyMode::Refuse => {}
        }
        Ok(count)
    }
}
