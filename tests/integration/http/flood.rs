//! Misbehaving clients must not prevent other clients from being served.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use socket2::{Domain, Socket, Type};

use super::{ANY_PORT, PROBE_TIMEOUT, probe};
use crate::support::fixture::Fixture;
use crate::support::http::Http;
use crate::support::wait::{WAIT_TIMEOUT, wait_until};

/// Opens more connections than Walpost accepts and sends an incomplete request on each. Walpost
/// must close them and respond to other clients.
#[test]
fn unfinished_requests_do_not_block_other_clients() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    let mut walpost = fixture.start_with(&ANY_PORT);
    let http = walpost.http();
    let mut slow: Vec<_> = (0..100).map(|_| http.connect()).collect();
    for stream in &mut slow {
        stream.write_all(b"GET /status HTTP/1.1\r\nHost: ").unwrap();
    }
    fixture.insert(&aggregate, "k");
    fixture.wait_for_records(1);
    let started = Instant::now();
    assert_eq!(http.get("/healthz").code, 200);
    assert!(started.elapsed() < Duration::from_secs(30));
    let mut rest = Vec::new();
    // Ignores the result, because it only matters that the connection has ended.
    let _ = slow[0].read_to_end(&mut rest);
    walpost.terminate().expect_code(0);
}

/// The behavior of the clients in a flood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FloodBehavior {
    /// The client sends nothing.
    Silent,
    /// The client starts a request, then sends one byte per second.
    SlowHead,
    /// The client sends one request, reads the response and keeps the connection open.
    IdleKeepAlive,
    /// The client requests far more data than the socket buffers can hold, and never reads.
    NeverReads,
    /// The client repeatedly sends many requests at once, and never reads a response.
    Pipelines,
}

/// A flood of 400 connections from one address. A connection that ends is replaced immediately.
struct Flood {
    is_over: Arc<AtomicBool>,
    /// The number of connections attempted so far, including replacements.
    made: Arc<AtomicUsize>,
    threads: Vec<JoinHandle<()>>,
}

impl Flood {
    const CONNECTIONS: usize = 400;

    fn start(http: &Http, behavior: FloodBehavior) -> Self {
        const THREADS: usize = 4;
        let (is_over, made) = (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
        let threads = (0..THREADS).map(|_| {
            let (http, is_over, made) = (http.clone(), Arc::clone(&is_over), Arc::clone(&made));
            thread::spawn(move || {
                let connect = || {
                    made.fetch_add(1, Ordering::Relaxed);
                    flood_client(&http, behavior)
                };
                let mut clients: Vec<_> = (0..Self::CONNECTIONS / THREADS)
                    .map(|_| connect())
                    .collect();
                let mut spoke = Instant::now();
                while !is_over.load(Ordering::Relaxed) {
                    let sends_data = spoke.elapsed() >= Duration::from_secs(1);
                    if sends_data {
                        spoke = Instant::now();
                    }
                    for client in &mut clients {
                        if has_ended(client.as_mut(), behavior, sends_data) {
                            *client = connect();
                        }
                    }
                    // The pause leaves CPU time for tests that run concurrently.
                    thread::sleep(Duration::from_millis(20));
                }
            })
        });
        let flood = Self {
            is_over: Arc::clone(&is_over),
            made: Arc::clone(&made),
            threads: threads.collect(),
        };
        flood.wait_for(Self::CONNECTIONS);
        flood
    }

    fn wait_for(&self, made: usize) {
        wait_until("connections", || self.made.load(Ordering::Relaxed) >= made);
    }

    fn stop(self) {
        self.is_over.store(true, Ordering::Relaxed);
        for thread in self.threads {
            thread.join().unwrap();
        }
    }
}

/// Connects a misbehaving client. Returns `None` if the server does not accept another connection.
fn flood_client(http: &Http, behavior: FloodBehavior) -> Option<TcpStream> {
    let address: SocketAddr = http.address().parse().unwrap();
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    if matches!(
        behavior,
        FloodBehavior::NeverReads | FloodBehavior::Pipelines
    ) {
        socket.set_recv_buffer_size(4096).unwrap();
    }
    socket
        .connect_timeout(&address.into(), Duration::from_millis(500))
        .ok()?;
    let mut stream = TcpStream::from(socket);
    let host = http.address();
    let request = format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n");
    match behavior {
        FloodBehavior::Silent | FloodBehavior::Pipelines => {}
        FloodBehavior::SlowHead => stream.write_all(&request.as_bytes()[..10]).ok()?,
        FloodBehavior::IdleKeepAlive => stream.write_all(request.as_bytes()).ok()?,
        // Each response is 17 KiB, so together they exceed the default size of Linux's socket
        // buffers.
        FloodBehavior::NeverReads => stream.write_all(request.repeat(1000).as_bytes()).ok()?,
    }
    stream.set_nonblocking(true).unwrap();
    Some(stream)
}

/// Returns whether the connection has ended or could not be opened. Sends more data first if
/// `behavior` requires it.
fn has_ended(client: Option<&mut TcpStream>, behavior: FloodBehavior, sends_data: bool) -> bool {
    let Some(client) = client else { return true };
    match behavior {
        FloodBehavior::NeverReads => client.take_error().unwrap().is_some(),
        FloodBehavior::Pipelines => {
            let requests = "GET /history HTTP/1.1\r\nHost: localhost\r\n\r\n".repeat(400);
            let written = client.write(requests.as_bytes());
            written.is_err_and(|error| error.kind() != ErrorKind::WouldBlock)
        }
        _ => {
            if sends_data && behavior == FloodBehavior::SlowHead && client.write(b"x").is_err() {
                return true;
            }
            let mut bytes = [0; 32 << 10];
            match client.read(&mut bytes) {
                Ok(read) => read == 0,
                Err(error) => error.kind() != ErrorKind::WouldBlock,
            }
        }
    }
}

/// Asserts that health probes succeed during a flood from the same address, which may belong to a
/// proxy or to the local host. A limit on connections per address must not lock out well-behaved
/// clients that share the address.
fn expect_health_during_flood(behavior: FloodBehavior) {
    let fixture = Fixture::new();
    let mut walpost = fixture.start_with(&ANY_PORT);
    let http = walpost.http();
    walpost.wait_for_log("streaming");
    let flood = Flood::start(&http, behavior);
    for number in 0..4 {
        let (started, cpu) = (Instant::now(), walpost.cpu_seconds());
        loop {
            // Limits CPU time rather than elapsed time, because on a busy machine, Walpost may have
            // to wait for a processor.
            let answer = probe(&http, "/healthz");
            let used = walpost.cpu_seconds() - cpu;
            assert!(
                used < PROBE_TIMEOUT.as_secs_f64() && started.elapsed() < WAIT_TIMEOUT,
                "{behavior:?}: probe {number}, after {used} s of CPU: {answer:?}"
            );
            if answer.is_ok_and(|text| text.ends_with("alive\n")) {
                break;
            }
        }
    }
    flood.stop();
    walpost.terminate().expect_code(0);
}

#[test]
fn health_endpoint_responds_during_a_flood_of_silent_connections() {
    expect_health_during_flood(FloodBehavior::Silent);
}

#[test]
fn health_endpoint_responds_during_a_flood_of_requests_with_endless_headers() {
    expect_health_during_flood(FloodBehavior::SlowHead);
}

#[test]
fn health_endpoint_responds_during_a_flood_of_idle_connections() {
    expect_health_during_flood(FloodBehavior::IdleKeepAlive);
}

#[test]
fn health_endpoint_responds_during_a_flood_of_clients_that_never_read_responses() {
    expect_health_during_flood(FloodBehavior::NeverReads);
}

/// Walpost must alternate between the pipelined requests on one connection and the requests on
/// other connections.
#[test]
fn health_endpoint_responds_during_a_flood_of_pipelined_requests() {
    expect_health_during_flood(FloodBehavior::Pipelines);
}

/// A metrics scraper keeps its connection open. Walpost must not close that connection because of a
/// flood from another address.
#[test]
fn flood_from_one_client_address_does_not_close_connections_from_another() {
    let fixture = Fixture::new();
    let mut walpost = fixture.start_with(&ANY_PORT);
    let http = walpost.http();
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    let other: SocketAddr = "127.0.0.2:0".parse().unwrap();
    socket.bind(&other.into()).unwrap();
    let server_address: SocketAddr = http.address().parse().unwrap();
    socket.connect(&server_address.into()).unwrap();
    let mut scraper = TcpStream::from(socket);
    scraper.set_read_timeout(Some(PROBE_TIMEOUT)).unwrap();
    let mut scrape = || {
        let request = format!("GET /healthz HTTP/1.1\r\nHost: {server_address}\r\n\r\n");
        scraper.write_all(request.as_bytes())?;
        let mut answer = Vec::new();
        let mut bytes = [0; 1024];
        while !answer.ends_with(b"alive\n") {
            match scraper.read(&mut bytes)? {
                0 => return Err(std::io::Error::from(ErrorKind::UnexpectedEof)),
                read => answer.extend_from_slice(&bytes[..read]),
            }
        }
        Ok(())
    };
    scrape().unwrap();
    let flood = Flood::start(&http, FloodBehavior::Silent);
    // Continues until the flood has attempted three times as many connections as it keeps open.
    let started = Instant::now();
    while flood.made.load(Ordering::Relaxed) < 3 * Flood::CONNECTIONS {
        scrape().unwrap();
        assert!(
            started.elapsed() < 12 * PROBE_TIMEOUT,
            "the flood reconnects too slowly"
        );
        thread::sleep(Duration::from_millis(100));
    }
    scrape().unwrap();
    flood.stop();
    walpost.terminate().expect_code(0);
}

/// If a client sends a request but does not read the response, Walpost must close the connection
/// and free its memory, even if no other client connects.
#[test]
fn closes_a_connection_whose_response_is_not_read() {
    let fixture = Fixture::new();
    let mut walpost = fixture.start_with(&ANY_PORT);
    let http = walpost.http();
    let client = flood_client(&http, FloodBehavior::NeverReads).unwrap();
    let started = Instant::now();
    wait_until("the end", || client.take_error().unwrap().is_some());
    assert!(
        started.elapsed() < Duration::from_secs(60),
        "{:?}",
        started.elapsed()
    );
    walpost.terminate().expect_code(0);
}
