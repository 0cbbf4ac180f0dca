//! Fuzz target for a whole replication connection: startup, commands and stream. The input consists
//! of the bytes that the server sends.
//!
//! The client's SCRAM messages contain random data, so fixed server messages would fail
//! authentication. The input can contain two placeholders for values that a server can compute only
//! from the client's messages: [`NONCE`] and [`PROOF`].

use std::cell::RefCell;

use openssl::hash::MessageDigest;
use openssl::pkcs5::pbkdf2_hmac;
use openssl::pkey::PKey;
use openssl::sign::Signer;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

use super::*;
use crate::postgres::replication::fuzz::read_all;
use crate::postgres::replication::{Connection, ConnectionError};

/// Placeholder for the client's nonce. The placeholder and the nonce have the same length.
const NONCE: &[u8] = b"nnnnnnnnnnnnnnnnnnnnnnnn";
/// Placeholder for the proof that the server knows the password.
const PROOF: &[u8] = b"pppppppppppppppppppppppppppppppppppppppppppp";

const PASSWORD: &str = "q7Zr0vT2mXw9";
const ROW_MAX: usize = 10_000;

/// Runs a client against a simulated server. The first byte of `data` determines how many bytes the
/// server sends at a time, and the remaining bytes are the data to send.
///
/// # Panics
/// Panics if the result depends on how the bytes are split, if the password is revealed, or if the
/// client accepts a server that has not proven that it knows the password.
pub fn startup(data: &[u8]) {
    let Some((&room, sent)) = data.split_first() else {
        return;
    };
    let whole = Exchange::run(sent, sent.len() + 1);
    let in_pieces = Exchange::run(sent, usize::from(room) + 1);
    if !whole.is_random() {
        assert_eq!(whole.outcome, in_pieces.outcome);
    }

    let contains = |all: &[u8], part: &[u8]| all.windows(part.len()).any(|window| window == part);
    if !contains(sent, PASSWORD.as_bytes()) {
        assert!(!whole.outcome.join(" ").contains(PASSWORD));
        let is_requested = contains(sent, b"R\0\0\0\x08\0\0\0\x03");
        let is_sent = contains(&whole.received, PASSWORD.as_bytes());
        assert!(
            is_requested || !is_sent,
            "the client sent the password without being asked for it: {:?}",
            whole.received
        );
    }
    let has_session = whole.outcome.len() > 1;
    let is_scram = contains(&whole.received, b"SCRAM-SHA-256\0");
    assert!(!has_session || !is_scram || whole.used.proof);
}

/// The outcome of one connection attempt and the data exchanged.
struct Exchange {
    /// The result of each step that the client performed, up to the first failure.
    outcome: Vec<String>,
    /// The bytes that the server received.
    received: Vec<u8>,
    used: Sent,
}

impl Exchange {
    /// Returns whether the outcome may contain the random nonce, which an error message can quote.
    fn is_random(&self) -> bool {
        self.used.nonce && self.outcome.len() == 1
    }

    /// Runs the client against a server that sends these bytes through a pipe with the given
    /// capacity.
    fn run(sent: &[u8], room: usize) -> Self {
        let (client, server) = tokio::io::duplex(room);
        let received = RefCell::new(Vec::new());
        let both = async { tokio::join!(self::client(client), serve(server, sent, &received)) };
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        let (outcome, used) = runtime.expect("a runtime").block_on(both);
        Self {
            outcome,
            received: received.into_inner(),
            used,
        }
    }
}

async fn client(stream: DuplexStream) -> Vec<String> {
    let text = format!("user=walpost dbname=shop host=here password={PASSWORD}");
    let conninfo = Conninfo::parse(&text, &|_| None).expect("a connection string");
    let wire = Wire::new(Socket::Memory(stream), Exposure::Local, "here");
    let started = wire.start(&conninfo, &conninfo.hosts[0], &[]).await;
    let session = match started {
        Ok((wire, started)) => wire.into_session(started),
        Err(error) => return vec![format!("{error} {error:?}")],
    };
    let mut parameters: Vec<_> = session.parameters.iter().collect();
    parameters.sort();
    let mut outcome = vec![format!(
        "{parameters:?} {} {}",
        session.backend_pid, session.secret
    )];
    let error = replicate(session, &mut outcome).await;
    outcome.push(format!("{error} {error:?}"));
    outcome
}

async fn replicate(session: Session, outcome: &mut Vec<String>) -> ConnectionError {
    let mut connection = Connection::from_session(session, ROW_MAX);
    let identity = match connection.identify().await {
        Ok(identity) => identity,
        Err(error) => return error,
    };
    outcome.push(format!("{identity:?}"));
    match connection.timeline_history(identity.timeline).await {
        Ok(history) => outcome.push(format!("{history:?}")),
        Err(error) => return error,
    }
    if let Err(error) = connection
        .start("slot", crate::model::lsn::Lsn::ZERO, "publication", true)
        .await
    {
        return error;
    }
    read_all(&mut connection, |frame| outcome.push(format!("{frame:?}"))).await
}

/// Whether the server replaced the placeholders [`NONCE`] and [`PROOF`] in the bytes that it sent.
#[derive(Default)]
struct Sent {
    nonce: bool,
    proof: bool,
}

/// Sends the bytes, with the placeholders replaced.
async fn serve(server: DuplexStream, sent: &[u8], received: &RefCell<Vec<u8>>) -> Sent {
    let (mut input, mut output) = tokio::io::split(server);
    let receive = async {
        let mut chunk = [0; 256];
        // Read until the client closes the connection.
        while let Ok(len @ 1..) = input.read(&mut chunk).await {
            received.borrow_mut().extend(&chunk[..len]);
        }
    };
    let send = async {
        let mut used = Sent::default();
        let mut sent_bytes = Vec::new();
        let mut rest = sent;
        while !rest.is_empty() {
            let (mark, after) = rest.split_at(until_mark(rest));
            rest = after;
            let known = match mark {
                // A placeholder is replaced only in AuthenticationSASLContinue and
                // AuthenticationSASLFinal. In other messages, the random values would make the
                // result unpredictable.
                NONCE if sent_bytes.ends_with(b"\0\0\0\x0br=") && !used.nonce => {
                    wait_until_idle(received).await;
                    let nonce = nonce(&received.borrow()).map(<[u8]>::to_vec);
                    used.nonce |= nonce.is_some();
                    nonce
                }
                PROOF if sent_bytes.ends_with(b"\0\0\0\x0cv=") && !used.proof => {
                    wait_until_idle(received).await;
                    let proof = proof(&received.borrow(), &sent_bytes);
                    used.proof |= proof.is_some();
                    proof
                }
                _ => None,
            };
            let now = known.as_deref().unwrap_or(mark);
            sent_bytes.extend(now);
            if output.write_all(now).await.is_err() {
                break;
            }
        }
        let _ = output.shutdown().await;
        used
    };
    tokio::join!(receive, send).1
}

/// Returns the length of the placeholder at the start of the bytes. If the bytes don't start with a
/// placeholder, returns the number of bytes before the first placeholder.
fn until_mark(bytes: &[u8]) -> usize {
    let mark = |at: usize| {
        [NONCE, PROOF]
            .into_iter()
            .find(|mark| bytes[at..].starts_with(mark))
    };
    match mark(0) {
        Some(mark) => mark.len(),
        None => (0..bytes.len())
            .find(|&at| mark(at).is_some())
            .unwrap_or(bytes.len()),
    }
}

/// Waits until the client stops sending.
async fn wait_until_idle(received: &RefCell<Vec<u8>>) {
    let mut before = usize::MAX;
    let mut rounds = 0;
    while rounds < 4 {
        tokio::task::yield_now().await;
        let now = received.borrow().len();
        rounds = if now == before { rounds + 1 } else { 0 };
        before = now;
    }
}

/// Returns the nonce in the client's first message (RFC 5802).
fn nonce(received: &[u8]) -> Option<&[u8]> {
    after(received, b"n,,n=,r=")?.get(..NONCE.len())
}

/// Returns the proof that a server would compute from the password (RFC 5802).
fn proof(received: &[u8], sent_bytes: &[u8]) -> Option<Vec<u8>> {
    let nonce = nonce(received)?;
    let own_nonce = [b"r=", nonce].concat();
    let first = &sent_bytes[sent_bytes
        .windows(own_nonce.len())
        .position(|window| window == own_nonce)?..];
    let iterations = after(first, b",i=")?;
    let digits = iterations.iter().take_while(|b| b.is_ascii_digit()).count();
    let salt = after(first, b",s=")?.split(|&b| b == b',').next()?;
    let first = &first[..first.len() - iterations.len() + digits];
    let count: usize = std::str::from_utf8(&iterations[..digits])
        .ok()?
        .parse()
        .ok()?;
    let salt = openssl::base64::decode_block(std::str::from_utf8(salt).ok()?).ok()?;
    let last = after(received, b"c=biws,")?;
    let last = &last[..last.windows(3).position(|window| window == b",p=")?];

    let message = [b"n=,r=", nonce, b",", first, b",c=biws,", last].concat();
    let mut salted = [0; 32];
    // The client rejects a higher iteration count.
    let count = count.clamp(1, 100_000);
    pbkdf2_hmac(
        PASSWORD.as_bytes(),
        &salt,
        count,
        MessageDigest::sha256(),
        &mut salted,
    )
    .ok()?;
    let signature = hmac(&hmac(&salted, b"Server Key")?, &message)?;
    Some(openssl::base64::encode_block(&signature).into_bytes())
}

fn hmac(key: &[u8], message: &[u8]) -> Option<Vec<u8>> {
    let key = PKey::hmac(key).ok()?;
    let mut signer = Signer::new(MessageDigest::sha256(), &key).ok()?;
    signer.sign_oneshot_to_vec(message).ok()
}

/// Returns the bytes after the first occurrence of `mark`.
fn after<'a>(all: &'a [u8], mark: &[u8]) -> Option<&'a [u8]> {
    let at = all.windows(mark.len()).position(|window| window == mark)?;
    Some(&all[at + mark.len()..])
}
