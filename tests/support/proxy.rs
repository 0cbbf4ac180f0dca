//! A TCP proxy between Walpost and a server, which fails as networks do.

use std::collections::HashSet;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::Duration;

use super::departure::Departure;
use super::error_codes::ErrorCodes;
use super::lag::{Fetches, Lag};
use super::postgres::tcp_conninfo;
use super::wait::{PATIENCE, poll_until, wait_for, wait_until};

/// What the proxy does with the bytes of all its connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Manner {
    /// Passes them on.
    Pass,
    /// Passes them on so much later.
    Delay(Duration),
    /// Passes on so many bytes a second of each direction of each connection.
    Throttle(usize),
    /// Keeps connections open, and passes nothing on: a black hole.
    Swallow,
    /// As [`Manner::Swallow`], and answers no attempt to connect either: a host that is gone.
    Silence,
    /// Has no connection, and nobody listens: a server that is down.
    Refuse,
}

impl Manner {
    fn passes_nothing(self) -> bool {
        matches!(self, Self::Swallow | Self::Silence)
    }
}

/// How long a connection to the loopback may take until there is no room for it in the queue.
const ANSWER: Duration = Duration::from_millis(300);

/// Listens on a port of its own and passes on to another.
pub(crate) struct Proxy {
    port: u16,
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    manner: Manner,
    /// Where connections go.
    target: SocketAddr,
    /// After so many connections, where the next ones go.
    next: Option<(usize, SocketAddr)>,
    /// Connections of our own that fill the listener's queue, so that it answers no other.
    stuffing: Vec<TcpStream>,
    /// The addresses of those that have not been accepted yet.
    stuffed: HashSet<SocketAddr>,
    is_listening: bool,
    /// Both ends of each connection. They close when it has ended: a server that still has something to
    /// say would wait for ever for one who neither reads nor goes.
    streams: Vec<Weak<TcpStream>>,
    /// Bytes that may pass until all connections are cut.
    until_cut: Option<usize>,
    /// How often that came true.
    cuts: usize,
    /// A topic that Kafka is asked about under another name.
    hidden: Option<String>,
    /// What Kafka's leaders don't give yet.
    lag: Option<Arc<Lag>>,
    /// Kafka's brokers seem to be no more.
    departure: Option<Arc<Departure>>,
    /// Kafka's answers have other error codes.
    error_codes: Option<Arc<ErrorCodes>>,
    is_over: bool,
}

impl Proxy {
    /// Passes on what comes to `port` to `target`, both on the loopback.
    pub(crate) fn start(port: u16, target: u16) -> Self {
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                manner: Manner::Pass,
                target: ([127, 0, 0, 1], target).into(),
                next: None,
                stuffing: Vec::new(),
                stuffed: HashSet::new(),
                is_listening: false,
                streams: Vec::new(),
                until_cut: None,
                cuts: 0,
                hidden: None,
                lag: None,
                departure: None,
                error_codes: None,
                is_over: false,
            }),
            changed: Condvar::new(),
        });
        let accepting = Arc::clone(&shared);
        thread::spawn(move || while accepting.accept(port) {});
        let proxy = Self { port, shared };
        proxy.wait_until_listening(true);
        proxy
    }

    /// The port it listens on.
    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// As [`Server::tcp_conninfo`](super::postgres::Server::tcp_conninfo), through this proxy to the server.
    pub(crate) fn conninfo(&self, database: &str) -> String {
        tcp_conninfo(self.port, database)
    }

    /// Treats all bytes so from now on.
    pub(crate) fn set(&self, manner: Manner) {
        let mut state = self.shared.lock();
        state.manner = manner;
        match manner {
            Manner::Silence => state.stuff(([127, 0, 0, 1], self.port).into()),
            _ => state.stuffing.clear(),
        }
        drop(state);
        self.shared.changed.notify_all();
        if manner == Manner::Refuse {
            self.wake();
        }
        self.wait_until_listening(manner != Manner::Refuse);
    }

    fn wait_until_listening(&self, listening: bool) {
        wait_until("the proxy to listen, or not to", || {
            self.shared.lock().is_listening == listening
        });
    }

    /// The listener waits for a connection; here is one.
    fn wake(&self) {
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }

    /// Cuts every connection that is open.
    pub(crate) fn cut(&self) {
        self.shared.lock().cut();
    }

    /// Cuts every connection when so many bytes more have passed.
    pub(crate) fn cut_after(&self, bytes: usize) {
        self.shared.lock().until_cut = Some(bytes);
    }

    /// Kafka's metadata does not show the topic from now on, or again with `None`.
    pub(crate) fn hide_topic(&self, topic: Option<&str>) {
        self.shared.lock().hidden = topic.map(str::to_owned);
    }

    /// Kafka's partitions seem to end at `end` for a while, on connections that come from now on, which have no
    /// other troubles.
    pub(crate) fn lag_behind(&self, end: i64) -> Arc<Lag> {
        let lag = Arc::new(Lag::behind(end));
        self.shared.lock().lag = Some(Arc::clone(&lag));
        lag
    }

    /// Kafka's brokers can seem to be no more on connections that come from now on, which have no other troubles.
    pub(crate) fn departure(&self) -> Arc<Departure> {
        let departure = Arc::new(Departure::default());
        self.shared.lock().departure = Some(Arc::clone(&departure));
        departure
    }

    /// Kafka's answers can have other error codes on connections that come from now on, which have no other troubles.
    pub(crate) fn error_codes(&self) -> Arc<ErrorCodes> {
        let codes = Arc::new(ErrorCodes::default());
        self.shared.lock().error_codes = Some(Arc::clone(&codes));
        codes
    }

    /// Passes on to another port after so many connections more.
    pub(crate) fn move_after(&self, connections: usize, target: u16) {
        self.shared.lock().next = Some((connections, ([127, 0, 0, 1], target).into()));
    }

    /// How often [`Proxy::cut_after`] has cut.
    pub(crate) fn cuts(&self) -> usize {
        self.shared.lock().cuts
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        {
            let mut state = self.shared.lock();
            state.is_over = true;
            state.stuffing.clear();
            state.cut();
        }
        self.shared.changed.notify_all();
        self.wake();
        // Another proxy may take the port next. A drop does not panic.
        poll_until(PATIENCE, || {
            (!self.shared.lock().is_listening).then_some(())
        });
    }
}

impl State {
    /// Connects until the listener's queue is full: from then on the kernel drops what comes.
    fn stuff(&mut self, listener: SocketAddr) {
        while let Ok(stream) = TcpStream::connect_timeout(&listener, ANSWER) {
            self.stuffed.extend(stream.local_addr());
            self.stuffing.push(stream);
        }
    }

    fn cut(&mut self) {
        for stream in self.streams.drain(..).filter_map(|stream| stream.upgrade()) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where the connection goes that was accepted now.
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

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        let state = self.changed.wait(state);
        state.unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until there is a listener, and accepts what comes while there is; false when it is over.
    fn accept(self: &Arc<Self>, port: u16) -> bool {
        let mut state = self.lock();
        while state.manner == Manner::Refuse && !state.is_over {
            state = self.wait(state);
        }
        if state.is_over {
            return false;
        }
        // A process that another test is just starting has the last listener too, until it is another program.
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
            if self.lock().stuffed.remove(&address) || !self.may_accept() {
                continue;
            }
            // A server that is away refuses, and so does its proxy.
            if let Ok(server) = TcpStream::connect(self.target()) {
                let _ = self.join(client, server);
            }
        }
        drop(listener);
        let mut state = self.lock();
        // One that was accepted meanwhile too.
        state.cut();
        state.is_listening = false;
        true
    }

    /// Waits until connections are accepted; false when there are to be none.
    fn may_accept(&self) -> bool {
        let mut state = self.lock();
        while state.manner == Manner::Silence && !state.is_over {
            state = self.wait(state);
        }
        !state.is_over && state.manner != Manner::Refuse
    }

    fn join(self: &Arc<Self>, client: TcpStream, server: TcpStream) -> io::Result<()> {
        let (client, server) = (Arc::new(client), Arc::new(server));
        for stream in [&client, &server] {
            stream.set_nodelay(true)?;
            self.lock().streams.push(Arc::downgrade(stream));
        }
        let (lag, departure, codes) = {
            let state = self.lock();
            (
                state.lag.clone(),
                state.departure.clone(),
                state.error_codes.clone(),
            )
        };
        let fetches = Arc::new(Fetches::default());
        let ways = [
            (true, Arc::clone(&client), Arc::clone(&server)),
            (false, server, client),
        ];
        for (is_asking, from, to) in ways {
            let shared = Arc::clone(self);
            let (lag, fetches) = (lag.clone(), Arc::clone(&fetches));
            let (departure, codes) = (departure.clone(), codes.clone());
            thread::spawn(move || {
                let _ = match (lag, departure, codes) {
                    (Some(lag), ..) if is_asking => lag.ask(&from, &to, &fetches),
                    (Some(lag), ..) => lag.answer(&from, &to, &fetches),
                    (None, Some(departure), _) if is_asking => departure.ask(&from, &to),
                    (None, Some(departure), _) => departure.answer(&from, &to),
                    (None, None, Some(codes)) if is_asking => codes.ask(&from, &to),
                    (None, None, Some(codes)) => codes.answer(&from, &to),
                    (None, None, None) => shared.carry(&from, &to),
                };
                let _ = from.shutdown(Shutdown::Both);
                let _ = to.shutdown(Shutdown::Both);
            });
        }
        Ok(())
    }

    fn carry(&self, mut from: &TcpStream, mut to: &TcpStream) -> io::Result<()> {
        let mut buffer = [0; 16 << 10];
        loop {
            let count = from.read(&mut buffer)?;
            if count == 0 {
                return Ok(());
            }
            self.hide(&mut buffer[..count]);
            let mut rest = &buffer[..count];
            while !rest.is_empty() {
                let part = self.admit(rest.len())?;
                to.write_all(&rest[..part])?;
                rest = &rest[part..];
            }
        }
    }

    /// Has requests for metadata ask for a topic that is not there instead of the hidden one. Each such
    /// request is small and is written at once, so that it is here whole.
    fn hide(&self, mut bytes: &mut [u8]) {
        /// Behind the length.
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

    /// How many of `count` bytes may pass now.
    fn admit(&self, count: usize) -> io::Result<usize> {
        let mut state = self.lock();
        while state.manner.passes_nothing() && !state.is_over {
            state = self.wait(state);
        }
        if state.is_over {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        let manner = state.manner;
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
        match manner {
            Manner::Delay(by) => thread::sleep(by),
            Manner::Throttle(bytes) => {
                let part = count.min(bytes / 20 + 1);
                thread::sleep(Duration::from_millis(50));
                return Ok(part);
            }
            Manner::Pass | Manner::Swallow | Manner::Silence | Manner::Refuse => {}
        }
        Ok(count)
    }
}
