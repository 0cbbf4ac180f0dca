//! Fuzz target for a whole replication connection, driven by the server's bytes: startup, commands,
//! stream.
//!
//! The client's side of SCRAM is random, so fixed bytes would not get past authentication. Two
//! placeholders stand for values that a server can know only from the client's messages: [`NONCE`]
//! and [`PROOF`].

use std::cell::RefCell;

use openssl::hash::MessageDigest;
use openssl::pkcs5::pbkdf2_hmac;
use openssl::pkey::PKey;
use openssl::sign::Signer;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

use super::*;
use crate::postgres::replication::fuzz::read_all;
use crate::postgres::replication::{Connection, ConnectionError};

/// Placeholder for the client's nonce, of the same length.
const NONCE: &[u8] = b"nnnnnnnnnnnnnnnnnnnnnnnn";
/// Placeholder for the proof that the server knows the password.
const PROOF: &[u8] = b"pppppppppppppppppppppppppppppppppppppppppppp";

const PASSWORD: &str = "q7Zr0vT2mXw9";
const ROW_MAX: usize = 10_000;

/// Runs a client against a server that sends all bytes but the first; the first determines how many
/// of them are sent at a time.
///
/// # Panics
/// The result depends on how the bytes are split, the password is revealed, or a server without a
/// proof is trusted.
pub fn startup(data: &[u8]) {
    let Some((&room, sent)) = data.split_first() else {
        return;
    };
    let whole = Exchange::run(sent, sent.len() + 1);
    let in_pieces = Exchange::run(sent, usize::from(room) + 1);
    if !whole.is_random() {
        assert_eq!(whole.outcome, in_pieces.outcome);
    }

    let contains = |all: &[u8], part: &[u8]| all.windows(part.len()).any(|some| some == part);
    if !contains(sent, PASSWORD.as_bytes()) {
        assert!(!whole.outcome.join(" ").contains(PASSWORD));
        let is_asked = contains(sent, b"R\0\0\0\x08\0\0\0\x03");
        let is_told = contains(&whole.heard, PASSWORD.as_bytes());
        assert!(is_asked || !is_told, "the password is in {:?}", whole.heard);
    }
    let has_session = whole.outcome.len() > 1;
    let is_scram = contains(&whole.heard, b"SCRAM-SHA-256\0");
    assert!(!has_session || !is_scram || whole.learnt.proof);
}

/// The result of a conversation.
struct Exchange {
    /// The client's result for each step, up to the first failure.
    outcome: Vec<String>,
    /// The bytes that the server received.
    heard: Vec<u8>,
    learnt: Sent,
}

impl Exchange {
    /// Returns whether an error may quote the nonce.
    fn is_random(&self) -> bool {
        self.learnt.nonce && self.outcome.len() == 1
    }

    /// Runs the client against a server that sends these bytes over a pipe of the given capacity.
    fn run(sent: &[u8], room: usize) -> Self {
        let (client, server) = tokio::io::duplex(room);
        let heard = RefCell::new(Vec::new());
        let both = async { tokio::join!(self::client(client), serve(server, sent, &heard)) };
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        let (outcome, learnt) = runtime.expect("a runtime").block_on(both);
        Self {
            outcome,
            heard: heard.into_inner(),
            learnt,
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

/// What the server has used of the client's messages.
#[derive(Default)]
struct Sent {
    nonce: bool,
    proof: bool,
}

/// Sends the bytes, with the placeholders replaced.
async fn serve(server: DuplexStream, sent: &[u8], heard: &RefCell<Vec<u8>>) -> Sent {
    let (mut input, mut output) = tokio::io::split(server);
    let listen = async {
        let mut some = [0; 256];
        // Reads until the client closes the connection.
        while let Ok(len @ 1..) = input.read(&mut some).await {
            heard.borrow_mut().extend(&some[..len]);
        }
    };
    let speak = async {
        let mut learnt = Sent::default();
        let mut said = Vec::new();
        let mut rest = sent;
        while !rest.is_empty() {
            let (mark, after) = rest.split_at(until_mark(rest));
            rest = after;
            let known = match mark {
                // Only in AuthenticationSASLContinue and AuthenticationSASLFinal, so that little
                // else is random.
                NONCE if said.ends_with(b"\0\0\0\x0br=") && !learnt.nonce => {
                    silence(heard).await;
                    let nonce = nonce(&heard.borrow()).map(<[u8]>::to_vec);
                    learnt.nonce |= nonce.is_some();
                    nonce
                }
                PROOF if said.ends_with(b"\0\0\0\x0cv=") && !learnt.proof => {
                    silence(heard).await;
                    let proof = proof(&heard.borrow(), &said);
                    learnt.proof |= proof.is_some();
                    proof
                }
                _ => None,
            };
            let now = known.as_deref().unwrap_or(mark);
            said.extend(now);
            if output.write_all(now).await.is_err() {
                break;
            }
        }
        let _ = output.shutdown().await;
        learnt
    };
    tokio::join!(listen, speak).1
}

/// Returns the length of the placeholder at the start of the bytes, or of the text before the first
/// placeholder.
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

/// Waits until the client has nothing more to send.
async fn silence(heard: &RefCell<Vec<u8>>) {
    let mut before = usize::MAX;
    let mut rounds = 0;
    while rounds < 4 {
        tokio::task::yield_now().await;
        let now = heard.borrow().len();
        rounds = if now == before { rounds + 1 } else { 0 };
        before = now;
    }
}

/// Returns the nonce of the client's first message (RFC 5802).
fn nonce(heard: &[u8]) -> Option<&[u8]> {
    after(heard, b"n,,n=,r=")?.get(..NONCE.len())
}

/// Returns the proof of a server that knows the password (RFC 5802).
fn proof(heard: &[u8], said: &[u8]) -> Option<Vec<u8>> {
    let nonce = nonce(heard)?;
    let own_nonce = [b"r=", nonce].concat();
    let first = &said[said
        .windows(own_nonce.len())
        .position(|some| some == own_nonce)?..];
    let iterations = after(first, b",i=")?;
    let digits = iterations.iter().take_while(|b| b.is_ascii_digit()).count();
    let salt = after(first, b",s=")?.split(|&b| b == b',').next()?;
    let first = &first[..first.len() - iterations.len() + digits];
    let count: usize = std::str::from_utf8(&iterations[..digits])
        .ok()?
        .parse()
        .ok()?;
    let salt = openssl::base64::decode_block(std::str::from_utf8(salt).ok()?).ok()?;
    let last = after(heard, b"c=biws,")?;
    let last = &last[..last.windows(3).position(|some| some == b",p=")?];

    let message = [b"n=,r=", nonce, b",", first, b",c=biws,", last].concat();
    let mut salted = [0; 32];
    // The client accepts no more iterations than this.
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

/// Returns the bytes after the first `mark`.
fn after<'a>(all: &'a [u8], mark: &[u8]) -> Option<&'a [u8]> {
    let at = all.windows(mark.len()).position(|some| some == mark)?;
    Some(&all[at + mark.len()..])
}
