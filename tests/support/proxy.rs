//! A TCP proxy between Walpost and a server, which fails as networks do.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

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
}

/// Listens on a port of its own and passes on to another.
pub(crate) struct Proxy {
    port: u16,
    shared: Arc<Shared>,
}

struct Shared {
    target: SocketAddr,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    manner: Manner,
    /// Both ends of each connection.
    streams: Vec<TcpStream>,
    /// Bytes that may pass until all connections are cut.
    until_cut: Option<usize>,
    /// How often that came true.
    cuts: usize,
    is_over: bool,
}

impl Proxy {
    /// Passes on what comes to `port` to `target`, both on the loopback.
    pub(crate) fn start(port: u16, target: u16) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", port)).expect("a free port");
        let shared = Arc::new(Shared {
            target: ([127, 0, 0, 1], target).into(),
            state: Mutex::new(State {
                manner: Manner::Pass,
                streams: Vec::new(),
                until_cut: None,
                cuts: 0,
                is_over: false,
            }),
            changed: Condvar::new(),
        });
        let accepting = Arc::clone(&shared);
        thread::spawn(move || {
            for client in listener.incoming() {
                if accepting.lock().is_over {
                    return;
                }
                let Ok(client) = client else { continue };
                // A server that is away refuses, and so does its proxy.
                if let Ok(server) = TcpStream::connect(accepting.target) {
                    let _ = accepting.join(client, server);
                }
            }
        });
        Self { port, shared }
    }

    /// The port it listens on.
    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Treats all bytes so from now on.
    pub(crate) fn set(&self, manner: Manner) {
        self.shared.lock().manner = manner;
        self.shared.changed.notify_all();
    }

    /// Cuts every connection that is open.
    pub(crate) fn cut(&self) {
        self.shared.lock().cut();
    }

    /// Cuts every connection when so many bytes more have passed.
    pub(crate) fn cut_after(&self, bytes: usize) {
        self.shared.lock().until_cut = Some(bytes);
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
            state.cut();
        }
        self.shared.changed.notify_all();
        // The listener waits for a connection; here is the last one.
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}

impl State {
    fn cut(&mut self) {
        for stream in self.streams.drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn join(self: &Arc<Self>, client: TcpStream, server: TcpStream) -> io::Result<()> {
        for stream in [&client, &server] {
            stream.set_nodelay(true)?;
            self.lock().streams.push(stream.try_clone()?);
        }
        let ways = [(client.try_clone()?, server.try_clone()?), (server, client)];
        for (from, to) in ways {
            let shared = Arc::clone(self);
            thread::spawn(move || {
                let _ = shared.carry(&from, &to);
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
            let mut rest = &buffer[..count];
            while !rest.is_empty() {
                let part = self.admit(rest.len())?;
                to.write_all(&rest[..part])?;
                rest = &rest[part..];
            }
        }
    }

    /// How many of `count` bytes may pass now.
    fn admit(&self, count: usize) -> io::Result<usize> {
        let mut state = self.lock();
        while state.manner == Manner::Swallow && !state.is_over {
            state = self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
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
            Manner::Pass | Manner::Swallow => {}
        }
        Ok(count)
    }
}
