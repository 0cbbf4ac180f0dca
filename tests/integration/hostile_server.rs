//! A hostile server sends data that PostgreSQL would never send. The server must not be able to
//! exhaust the memory or disk space that other pipelines share.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use crate::support::fixture::Fixture;
use crate::support::reaper;
use crate::support::wait::wait_until;

/// A proxy to a real server that inserts `count` additional messages at the start of the first
/// replication stream.
struct FloodingServer {
    port: u16,
    is_over: Arc<AtomicBool>,
}

impl FloodingServer {
    fn start(server: u16, count: u32, message: fn(u32) -> Vec<u8>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (has_begun, is_over) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
        let over = Arc::clone(&is_over);
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let server = TcpStream::connect(("127.0.0.1", server)).unwrap();
                let (mut from, mut to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                thread::spawn(move || {
                    let _ = io::copy(&mut from, &mut to);
                    let _ = to.shutdown(Shutdown::Write);
                });
                let (has_begun, over) = (Arc::clone(&has_begun), Arc::clone(&over));
                thread::spawn(move || {
                    let flood = |client: &mut TcpStream| {
                        if has_begun.swap(true, Ordering::Relaxed) {
                            return Ok(());
                        }
                        let sent = send(client, count, message);
                        over.store(true, Ordering::Relaxed);
                        sent
                    };
                    let _ = forward_responses(server, &client, flood);
                    let _ = client.shutdown(Shutdown::Both);
                });
            }
        });
        Self { port, is_over }
    }

    fn conninfo(&self, fixture: &Fixture<'_>) -> String {
        let (port, database) = (self.port, &fixture.name);
        format!("host=127.0.0.1 port={port} user=postgres dbname={database} sslmode=disable")
    }

    fn wait_until_sent(&self) {
        wait_until("the flood to end", || self.is_over.load(Ordering::Relaxed));
    }
}

/// Forwards the server's messages to the client, and calls `flood` after each `CopyBothResponse`.
fn forward_responses(
    mut server: TcpStream,
    mut client: &TcpStream,
    flood: impl Fn(&mut TcpStream) -> io::Result<()>,
) -> io::Result<()> {
    let mut message = vec![0; 5];
    loop {
        message.resize(5, 0);
        server.read_exact(&mut message)?;
        let length = u32::from_be_bytes(message[1..].try_into().unwrap());
        message.resize(usize::try_from(length).unwrap() + 1, 0);
        server.read_exact(&mut message[5..])?;
        client.write_all(&message)?;
        if message[0] == b'W' {
            flood(&mut client.try_clone()?)?;
        }
    }
}

fn send(client: &mut TcpStream, count: u32, message: fn(u32) -> Vec<u8>) -> io::Result<()> {
    let mut bytes = Vec::new();
    for number in 0..count {
        bytes.extend(message(number));
        if bytes.len() > 1 << 16 {
            client.write_all(&bytes)?;
            bytes.clear();
        }
    }
    client.write_all(&bytes)
}

fn framed(tag: u8, parts: &[&[u8]]) -> Vec<u8> {
    let body = parts.concat();
    let length = u32::try_from(body.len() + 4).unwrap().to_be_bytes();
    [&[tag][..], &length, &body].concat()
}

/// Returns a Relation message for a table `public.<name>` that has the columns of an outbox.
fn relation(oid: u32, name: &str) -> Vec<u8> {
    let columns: [(&str, u32); 7] = [
        ("id", 2950),
        ("aggregatetype", 25),
        ("aggregateid", 25),
        ("type", 25),
        ("payload", 3802),
        ("headers", 3802),
        ("created_at", 1184),
    ];
    let mut described = Vec::new();
    for (name, type_oid) in columns {
        described.extend(
            [
                &[0][..],
                name.as_bytes(),
                &[0],
                &type_oid.to_be_bytes(),
                &[0xff; 4],
            ]
            .concat(),
        );
    }
    let position = [0; 24];
    let oid = oid.to_be_bytes();
    let head = [&b"R"[..], &oid, b"public\0", name.as_bytes(), b"\0d\0\x07"].concat();
    framed(b'd', &[b"w", &position, &head, &described])
}

/// Delivers an event after a flood of messages. Returns Walpost's peak memory usage.
fn peak_memory_after_flood(count: u32, message: fn(u32) -> Vec<u8>) -> u64 {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    let flood = FloodingServer::start(fixture.server.port, count, message);
    let walpost = fixture
        .with_conninfo(&flood.conninfo(&fixture))
        .run()
        .start();
    flood.wait_until_sent();
    fixture.insert(&aggregate, "k");
    fixture.wait_for_records(1);
    let peak = walpost.peak_memory();
    walpost.terminate().expect_code(0);
    peak
}

#[test]
fn memory_stays_bounded_if_the_server_sends_endless_relation_messages_for_the_outbox() {
    let peak = peak_memory_after_flood(250_000, |number| relation(1_000_000 + number, "outbox"));
    assert!(peak < 150 << 20, "Walpost used {peak} bytes");
}

#[test]
fn memory_stays_bounded_if_the_server_sends_endless_relation_messages_for_other_tables() {
    let peak = peak_memory_after_flood(300_000, |number| {
        relation(1_000_000 + number, &format!("{number:01000}"))
    });
    assert!(peak < 150 << 20, "Walpost used {peak} bytes");
}

#[test]
fn log_stays_bounded_if_the_server_sends_endless_notices() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    let flood = FloodingServer::start(fixture.server.port, 100_000, |_| {
        framed(b'N', &[b"SNOTICE\0C00000\0M", &[b'x'; 2000], b"\0\0"])
    });
    let log = reaper::folder("log").join("log");
    let run = fixture.with_conninfo(&flood.conninfo(&fixture)).run();
    let walpost = run.log_to(File::create(&log).unwrap()).start();
    flood.wait_until_sent();
    fixture.insert(&aggregate, "k");
    fixture.wait_for_records(1);
    walpost.terminate().expect_code(0);
    let text = fs::read_to_string(&log).unwrap();
    assert!(text.contains("notice from PostgreSQL"), "{text:.1000}");
    assert!(text.len() < 1 << 20, "the log has {} bytes", text.len());
}
