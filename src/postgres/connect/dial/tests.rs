//! Tests against scripted servers on loopback ports.

#![allow(clippy::unwrap_used)]

use std::net::IpAddr;
use std::sync::Mutex;
use std::time::Duration;

use openssl::asn1::Asn1Time;
use openssl::ec::{EcGroup, EcKey};
use openssl::hash::MessageDigest;
use openssl::nid::Nid;
use openssl::pkey::PKey;
use openssl::ssl::{Ssl, SslAcceptor, SslMethod};
use openssl::x509::{X509, X509NameBuilder};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use super::*;

mod authentication;
mod certificates;
mod client;
mod hosts;
mod network;
mod responses;

/// A step in a server's script. The server closes the connection at the end of the script.
enum Step {
    /// Reads a message without a type byte: SSLRequest or StartupMessage.
    Untagged,
    /// Reads a message with a type byte.
    Tagged,
    /// Reads the available bytes without interpreting them.
    Anything,
    Send(Vec<u8>),
    /// Accepts the client without further authentication, and replies to its query for search_path.
    Accept,
    /// Accepts TLS.
    Tls,
    /// Waits until the client closes the connection.
    Wait,
}
use Step::{Accept, Anything, Send, Tagged, Tls as AcceptTls, Untagged, Wait};

trait Stream: AsyncRead + AsyncWrite + Unpin + std::marker::Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + std::marker::Send> Stream for T {}

/// The bodies of the messages that a scripted server has read: one list for each connection.
type Received = Vec<Vec<Vec<u8>>>;

/// Returns an address of this machine that other hosts on the network can reach, or `None` if this
/// machine is not connected to a network.
fn external_address() -> Option<IpAddr> {
    // Connecting a UDP socket sends nothing. It only selects the source address.
    let socket = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
    socket.connect("192.0.2.1:9").ok()?;
    let address = socket.local_addr().unwrap().ip();
    (!address.is_loopback() && !address.is_unspecified()).then_some(address)
}

/// Starts a server that accepts one connection per script.
async fn server(scripts: Vec<Vec<Step>>) -> (u16, JoinHandle<Received>) {
    server_at([127, 0, 0, 1].into(), scripts).await
}

async fn server_at(address: IpAddr, scripts: Vec<Vec<Step>>) -> (u16, JoinHandle<Received>) {
    let listener = TcpListener::bind((address, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let accept = async move {
        let mut received = Vec::new();
        for script in scripts {
            let (stream, _) = listener.accept().await.unwrap();
            let mut messages = Vec::new();
            // Errors are ignored, because a client may close the connection before the script ends.
            let _ = follow(Box::new(stream), script, &mut messages).await;
            received.push(messages);
        }
        received
    };
    (port, tokio::spawn(accept))
}

async fn follow(
    mut stream: Box<dyn Stream>,
    script: Vec<Step>,
    received: &mut Vec<Vec<u8>>,
) -> io::Result<()> {
    for step in script {
        match step {
            Untagged => received.push(read_untagged(&mut stream).await?),
            Tagged => {
                stream.read_u8().await?;
                received.push(read_untagged(&mut stream).await?);
            }
            Anything => drop(stream.read(&mut [0; 1024]).await?),
            Send(bytes) => stream.write_all(&bytes).await?,
            Accept => {
                stream.write_all(&ready()).await?;
                stream.read_u8().await?;
                assert_eq!(read_untagged(&mut stream).await?, b"SHOW search_path\0");
                stream.write_all(&value(SEARCH_PATH.1)).await?;
            }
            AcceptTls => {
                let ssl = Ssl::new(self_signed().context()).unwrap();
                let mut encrypted = tokio_openssl::SslStream::new(ssl, stream).unwrap();
                Pin::new(&mut encrypted)
                    .accept()
                    .await
                    .map_err(io::Error::other)?;
                stream = Box::new(encrypted);
            }
            Wait => drop(stream.read_to_end(&mut Vec::new()).await?),
        }
    }
    stream.shutdown().await
}

async fn read_untagged(stream: &mut Box<dyn Stream>) -> io::Result<Vec<u8>> {
    let length = stream.read_u32().await?;
    let mut body = vec![0; usize::try_from(length).unwrap() - 4];
    stream.read_exact(&mut body).await?;
    Ok(body)
}

fn self_signed() -> SslAcceptor {
    let curve = EcGroup::from_curve_name(Nid::X9_62_PRIME256V1).unwrap();
    let key = PKey::from_ec_key(EcKey::generate(&curve).unwrap()).unwrap();
    let mut name = X509NameBuilder::new().unwrap();
    name.append_entry_by_text("CN", "localhost").unwrap();
    let name = name.build();
    let mut certificate = X509::builder().unwrap();
    certificate.set_subject_name(&name).unwrap();
    certificate.set_issuer_name(&name).unwrap();
    certificate.set_pubkey(&key).unwrap();
    certificate
        .set_not_before(&Asn1Time::days_from_now(0).unwrap())
        .unwrap();
    certificate
        .set_not_after(&Asn1Time::days_from_now(1).unwrap())
        .unwrap();
    certificate.sign(&key, MessageDigest::sha256()).unwrap();
    let mut acceptor = SslAcceptor::mozilla_intermediate_v5(SslMethod::tls_server()).unwrap();
    acceptor.set_certificate(&certificate.build()).unwrap();
    acceptor.set_private_key(&key).unwrap();
    acceptor.build()
}

fn conninfo(parameters: &str) -> Conninfo {
    let text = format!("user=walpost dbname=shop {parameters}");
    Conninfo::parse(&text, &|_| None).unwrap()
}

/// Connects to a server that follows `script`.
async fn dial(parameters: &str, script: Vec<Step>) -> (Result<Session, DialError>, Received) {
    dial_scripts(parameters, vec![script]).await
}

/// Connects to a server that follows one script per connection.
async fn dial_scripts(
    parameters: &str,
    scripts: Vec<Vec<Step>>,
) -> (Result<Session, DialError>, Received) {
    let (port, received) = server(scripts).await;
    let text = format!("host=localhost hostaddr=127.0.0.1 port={port} {parameters}");
    let session = replication(&conninfo(&text), &[]).await;
    let session = session.map(|mut session| {
        // Close the socket by replacing it. Otherwise, the server would keep waiting for the
        // client.
        session.socket = Socket::Unix(UnixStream::pair().unwrap().0);
        session
    });
    let received = tokio::time::timeout(Duration::from_secs(10), received).await;
    (
        session,
        received
            .expect("expected a connection for each script")
            .unwrap(),
    )
}

fn message(tag: u8, body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(body.len() + 4).unwrap();
    [&[tag][..], &length.to_be_bytes(), body].concat()
}

fn authentication(kind: i32, rest: &[u8]) -> Vec<u8> {
    message(b'R', &[&kind.to_be_bytes(), rest].concat())
}

fn error_response(fields: &str) -> Vec<u8> {
    message(b'E', format!("{fields}\0\0").as_bytes())
}

fn sasl_offer() -> Vec<u8> {
    authentication(10, b"SCRAM-SHA-256\0\0")
}

/// Returns AuthenticationOk and the startup messages that follow it. The reported server version is
/// too old for the query [`LATER_TIMEOUTS`], so the client does not send the query.
fn ready() -> Vec<u8> {
    let key = [7_i32.to_be_bytes(), 8_i32.to_be_bytes()].concat();
    [
        authentication(0, b""),
        message(b'S', b"server_version\x0013.3\0"),
        message(b'N', b"SNOTICE\0C00000\0Mhello\0\0"),
        message(b'K', &key),
        message(b'Z', b"I"),
    ]
    .concat()
}

/// Returns a script that accepts TLS and then accepts the client without authentication.
fn encrypted() -> Vec<Step> {
    vec![Untagged, Send(b"S".to_vec()), AcceptTls, Untagged, Accept]
}

/// Returns the reply to a query that selects a single value.
fn value(text: &str) -> Vec<u8> {
    let length = i32::try_from(text.len()).unwrap().to_be_bytes();
    let row = [&1_i16.to_be_bytes()[..], &length, text.as_bytes()].concat();
    let column = [
        &1_i16.to_be_bytes()[..],
        b"v\0",
        &[0; 6],
        &25_i32.to_be_bytes(),
        &[0; 8],
    ];
    [
        message(b'T', &column.concat()),
        message(b'D', &row),
        message(b'C', b"SHOW\0"),
        message(b'Z', b"I"),
    ]
    .concat()
}
