//! Against servers that follow a script, on loopback ports.

#![allow(clippy::unwrap_used)]

use std::net::IpAddr;
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

/// What a server does with a connection; at the end of its script it closes it.
enum Step {
    /// Reads a message without a tag: SSLRequest or StartupMessage.
    Untagged,
    /// Reads a message with a tag.
    Tagged,
    /// Reads a part of whatever comes.
    Anything,
    Send(Vec<u8>),
    /// Accepts TLS.
    Tls,
    /// Waits until the client closes the connection.
    Wait,
}
use Step::{Anything, Send, Tagged, Tls as AcceptTls, Untagged, Wait};

trait Stream: AsyncRead + AsyncWrite + Unpin + std::marker::Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + std::marker::Send> Stream for T {}

/// The bodies of the messages that a server has read, one list a connection.
type Heard = Vec<Vec<Vec<u8>>>;

/// An address of this machine that others on its network can reach; none on a machine without one.
fn outside() -> Option<IpAddr> {
    // Nothing is sent: this finds the address that would be the sender's.
    let socket = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
    socket.connect("192.0.2.1:9").ok()?;
    let address = socket.local_addr().unwrap().ip();
    (!address.is_loopback() && !address.is_unspecified()).then_some(address)
}

/// Accepts as many connections as there are scripts.
async fn server(scripts: Vec<Vec<Step>>) -> (u16, JoinHandle<Heard>) {
    server_at([127, 0, 0, 1].into(), scripts).await
}

async fn server_at(address: IpAddr, scripts: Vec<Vec<Step>>) -> (u16, JoinHandle<Heard>) {
    let listener = TcpListener::bind((address, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let accept = async move {
        let mut heard = Vec::new();
        for script in scripts {
            let (stream, _) = listener.accept().await.unwrap();
            let mut messages = Vec::new();
            // A client that has seen enough closes early.
            let _ = follow(Box::new(stream), script, &mut messages).await;
            heard.push(messages);
        }
        heard
    };
    (port, tokio::spawn(accept))
}

async fn follow(
    mut stream: Box<dyn Stream>,
    script: Vec<Step>,
    heard: &mut Vec<Vec<u8>>,
) -> io::Result<()> {
    for step in script {
        match step {
            Untagged => heard.push(read_untagged(&mut stream).await?),
            Tagged => {
                stream.read_u8().await?;
                heard.push(read_untagged(&mut stream).await?);
            }
            Anything => drop(stream.read(&mut [0; 1024]).await?),
            Send(bytes) => stream.write_all(&bytes).await?,
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

/// Dials one server that follows `script`.
async fn dial(parameters: &str, script: Vec<Step>) -> (Result<Session, DialError>, Heard) {
    dial_again(parameters, vec![script]).await
}

/// Dials a server that follows one script after the other, a connection each.
async fn dial_again(
    parameters: &str,
    scripts: Vec<Vec<Step>>,
) -> (Result<Session, DialError>, Heard) {
    let (port, heard) = server(scripts).await;
    let text = format!("host=localhost hostaddr=127.0.0.1 port={port} {parameters}");
    let session = replication(&conninfo(&text), &[]).await;
    let session = session.map(|session| {
        let Session {
            socket,
            buffer,
            parameters,
            backend_pid,
            secret,
            host,
        } = session;
        drop(socket);
        // A socket of nothing in its place: the server waits for the end of the real one.
        let socket = Socket::Unix(UnixStream::pair().unwrap().0);
        Session {
            socket,
            buffer,
            parameters,
            backend_pid,
            secret,
            host,
        }
    });
    let heard = tokio::time::timeout(Duration::from_secs(10), heard).await;
    (
        session,
        heard.expect("a connection for each script").unwrap(),
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

/// AuthenticationOk and what follows it, of a version that is asked nothing more.
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

/// The answer to a query for one value.
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

#[test]
fn a_role_is_asked_for_in_each_way_that_options_have() {
    for (options, asks) in [
        ("-c role=shop", true),
        ("-crole=shop", true),
        ("--role=shop", true),
        ("-c geqo=off -c role=shop", true),
        ("-c geqo=off", false),
        ("-c parole=x", false),
    ] {
        let conninfo = conninfo(&format!("host=h options='{options}'"));
        assert_eq!(conninfo.asks_for_role(), asks, "{options}");
    }
    assert!(!conninfo("host=h").asks_for_role());
}

#[tokio::test]
async fn a_session_holds_what_the_server_said_and_all_that_followed() {
    let answer = [&ready()[..], b"more"].concat();
    let (port, heard) = server(vec![vec![Untagged, Send(answer)]]).await;
    let text = format!("hostaddr=127.0.0.1 port={port} sslmode=disable options='-c geqo=off'");
    let session = replication(&conninfo(&text), &[("wal_sender_timeout", "20s")])
        .await
        .unwrap();
    assert_eq!((session.backend_pid, session.secret), (7, 8));
    assert_eq!(session.parameters["server_version"], "13.3");
    assert_eq!(&session.buffer[..], b"more");
    assert_eq!(session.host, format!("127.0.0.1:{port}"));
    let startup = String::from_utf8(heard.await.unwrap()[0][0].split_off(4)).unwrap();
    assert_eq!(
        startup.split('\0').collect::<Vec<_>>(),
        [
            "user",
            "walpost",
            "database",
            "shop",
            "client_encoding",
            "UTF8",
            "application_name",
            "walpost",
            "options",
            "-c geqo=off",
            "search_path",
            "pg_catalog",
            "row_security",
            "off",
            "standard_conforming_strings",
            "on",
            "default_transaction_read_only",
            "off",
            "statement_timeout",
            "0",
            "idle_in_transaction_session_timeout",
            "0",
            "role",
            "none",
            "replication",
            "database",
            "wal_sender_timeout",
            "20s",
            "",
            ""
        ]
    );
}

#[tokio::test]
async fn passwords_are_sent_as_the_server_asks() {
    // The hash is md5(md5("secret" "walpost") salt), by md5sum.
    for (request, expected) in [
        (authentication(3, b""), "secret\0"),
        (
            authentication(5, b"salt"),
            "md51e8407dfb59787c442d61f29237e2c80\0",
        ),
    ] {
        let script = vec![Untagged, Send(request.clone()), Tagged, Send(ready())];
        let (session, heard) = dial("sslmode=disable password=secret", script).await;
        session.unwrap();
        assert_eq!(String::from_utf8_lossy(&heard[0][1]), expected);

        let (session, _) = dial("sslmode=disable", vec![Untagged, Send(request)]).await;
        let error = session.unwrap_err();
        assert!(matches!(error, DialError::NoPassword { .. }), "{error}");
        assert!(error.to_string().contains("PGPASSWORD"), "{error}");
    }
}

#[tokio::test]
async fn a_refusal_by_the_server_is_told_in_its_own_words() {
    let refusal = "SFATAL\0VFATAL\0C28P01\0Mno way\0Dbecause\0Hask nicely";
    let script = vec![Untagged, Send(error_response(refusal))];
    let error = dial("sslmode=disable", script).await.0.unwrap_err();
    let DialError::Server { host, error } = error else {
        panic!("{error}")
    };
    assert!(host.starts_with("localhost:"), "{host}");
    assert_eq!(
        (error.severity.as_str(), error.code.as_str()),
        ("FATAL", "28P01")
    );
    assert_eq!(
        error.to_string(),
        "no way (SQLSTATE 28P01) DETAIL: because HINT: ask nicely"
    );
}

#[tokio::test]
async fn a_server_that_refuses_and_closes_at_once_is_heard() {
    for _ in 0..50 {
        let script = vec![Send(error_response("SFATAL\0C53300\0Mtoo many clients"))];
        let error = dial("sslmode=disable", script).await.0.unwrap_err();
        assert!(matches!(error, DialError::Server { .. }), "{error}");
    }
}

#[tokio::test]
async fn tls_that_the_server_lacks_is_an_error_only_where_it_is_required() {
    for mode in [
        "require",
        "verify-full sslrootcert=system",
        "verify-ca sslrootcert=CERT",
    ] {
        let root = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(root.path(), certificate_of_someone()).unwrap();
        let mode = mode.replace("CERT", root.path().to_str().unwrap());
        let script = vec![Untagged, Send(b"N".to_vec())];
        let session = dial(&format!("sslmode={mode}"), script).await.0;
        match session.unwrap_err() {
            DialError::TlsRefused { .. } => {}
            // No bundle of authorities on this machine.
            DialError::TlsFile {
                parameter: "sslrootcert=system",
                ..
            } => {}
            error => panic!("{mode}: {error}"),
        }
    }
    let script = vec![Untagged, Send(b"N".to_vec()), Untagged, Send(ready())];
    dial("sslmode=prefer", script).await.0.unwrap();
}

fn certificate_of_someone() -> Vec<u8> {
    self_signed()
        .context()
        .certificate()
        .unwrap()
        .to_pem()
        .unwrap()
}

#[tokio::test]
async fn bytes_behind_the_answer_to_ssl_request_are_refused() {
    for mode in ["prefer", "require"] {
        for answer in ["S", "N"] {
            let injected = [answer.as_bytes(), &ready()].concat();
            let (session, _) =
                dial(&format!("sslmode={mode}"), vec![Untagged, Send(injected)]).await;
            let error = session.unwrap_err();
            assert!(
                matches!(error, DialError::Protocol { .. }),
                "{mode} {answer}: {error}"
            );
        }
    }
}

#[tokio::test]
async fn a_certificate_is_checked_where_the_mode_asks_for_it() {
    let root = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(root.path(), certificate_of_someone()).unwrap();
    let root = root.path().to_str().unwrap();
    let script = || {
        vec![
            Untagged,
            Send(b"S".to_vec()),
            AcceptTls,
            Untagged,
            Send(ready()),
        ]
    };

    dial("sslmode=require", script()).await.0.unwrap();
    for mode in ["require", "verify-ca", "verify-full"] {
        let parameters = format!("sslmode={mode} sslrootcert={root}");
        let error = dial(&parameters, script()).await.0.unwrap_err();
        assert!(matches!(error, DialError::Tls { .. }), "{mode}: {error}");
        assert!(
            error.to_string().contains("certificate is refused"),
            "{mode}: {error}"
        );

        let parameters = format!("sslmode={mode} sslrootcert=/nonexistent/root.crt");
        // The file is looked for before the server is asked.
        let error = dial(&parameters, vec![Wait]).await.0.unwrap_err();
        assert!(
            matches!(error, DialError::TlsFile { .. }),
            "{mode}: {error}"
        );
    }
    let error = dial("sslmode=verify-ca", vec![Wait]).await.0.unwrap_err();
    assert!(error.to_string().contains("sslrootcert=FILE"), "{error}");
}

#[tokio::test]
async fn prefer_goes_on_without_tls_where_the_handshake_or_pg_hba_fails() {
    let plain = || vec![Untagged, Send(ready())];
    let no_handshake = vec![
        Untagged,
        Send(b"S".to_vec()),
        Anything,
        Send(b"no TLS at all".to_vec()),
        Wait,
    ];
    let no_entry = vec![
        Untagged,
        Send(b"S".to_vec()),
        AcceptTls,
        Untagged,
        Send(error_response("SFATAL\0C28000\0Mno pg_hba.conf entry")),
    ];
    dial_again("sslmode=prefer", vec![no_handshake, plain()])
        .await
        .0
        .unwrap();
    dial_again("sslmode=prefer", vec![no_entry, plain()])
        .await
        .0
        .unwrap();
}

#[tokio::test]
async fn a_broken_scram_exchange_is_never_a_session() {
    let bad_nonce = authentication(11, b"r=another,s=c2FsdA==,i=4096");
    for (script, expected) in [
        (
            vec![Untagged, Send(sasl_offer()), Tagged, Send(bad_nonce)],
            "invalid nonce",
        ),
        (
            vec![Untagged, Send(sasl_offer()), Tagged, Send(ready())],
            "SASLContinue",
        ),
        (
            vec![Untagged, Send(authentication(10, b"X\0\0"))],
            "asks for SASL X",
        ),
        (
            vec![Untagged, Send(authentication(10, b"SCRAM"))],
            "not an answer",
        ),
        (vec![Untagged, Send(authentication(7, b""))], "asks for gss"),
        (
            vec![Untagged, Send(authentication(99, b""))],
            "not an answer",
        ),
    ] {
        let (session, _) = dial("sslmode=disable password=x", script).await;
        let error = session.unwrap_err().to_string();
        assert!(error.contains(expected), "{expected}: {error}");
    }
}

#[tokio::test]
async fn channel_binding_that_is_required_is_not_talked_away() {
    for request in [
        ready(),
        authentication(3, b""),
        authentication(5, b"salt"),
        sasl_offer(),
        authentication(10, b"SCRAM-SHA-256-PLUS\0SCRAM-SHA-256\0\0"),
    ] {
        let script = vec![Untagged, Send(request), Wait];
        let parameters = "sslmode=disable channel_binding=require password=x";
        let (session, heard) = dial(parameters, script).await;
        let error = session.unwrap_err();
        assert!(matches!(error, DialError::ChannelBinding { .. }), "{error}");
        assert_eq!(
            heard[0].len(),
            1,
            "nothing is sent behind the startup message"
        );
    }
}

#[tokio::test]
async fn lengths_are_capped_before_memory_is_reserved() {
    let long = |tag: u8, length: u32| [&[tag][..], &length.to_be_bytes()].concat();
    for answer in [
        long(b'R', u32::MAX),
        long(b'R', 0x7fff_ffff),
        long(b'S', 64 * 1024 + 1),
        long(b'R', 3),
        long(b'R', 0),
        long(b'E', u32::MAX),
        message(b'E', b"unterminated"),
        message(b'?', b""),
        b"HTTP/1.1 400 Bad Request\r\n".to_vec(),
    ] {
        let script = vec![Untagged, Send(answer.clone()), Wait];
        let error = dial("sslmode=disable", script).await.0.unwrap_err();
        assert!(
            matches!(error, DialError::Protocol { .. }),
            "{answer:?}: {error}"
        );
    }

    let status = message(b'S', &[&[b'x'; 60_000][..], b"\0\0"].concat());
    let flood = [authentication(0, b""), status.repeat(20)].concat();
    let error = dial("sslmode=disable", vec![Untagged, Send(flood), Wait])
        .await
        .0
        .unwrap_err();
    assert!(
        error.to_string().contains("before ReadyForQuery"),
        "{error}"
    );
}

#[tokio::test]
async fn a_postmaster_that_can_not_fork_is_a_lost_connection() {
    let text = b"Ecould not fork new process for connection: Out of memory\n\0".to_vec();
    let error = dial("sslmode=disable", vec![Untagged, Send(text)])
        .await
        .0
        .unwrap_err();
    assert!(matches!(error, DialError::Io { .. }), "{error}");
    assert!(error.to_string().contains("could not fork"), "{error}");
}

#[tokio::test]
async fn a_startup_that_is_cut_short_anywhere_is_a_lost_connection() {
    for end in 0..ready().len() {
        let script = vec![Untagged, Send(ready()[..end].to_vec())];
        let error = dial("sslmode=disable", script).await.0.unwrap_err();
        assert!(matches!(error, DialError::Io { .. }), "{end}: {error}");
    }
}

#[tokio::test]
async fn a_startup_with_damaged_bytes_never_panics() {
    let seed = fastrand::u64(..);
    println!("replay: seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    for _ in 0..300 {
        let mut answer = [ready(), value("off")].concat();
        for _ in 0..random.usize(1..4) {
            let at = random.usize(..answer.len());
            answer[at] = random.u8(..);
        }
        let script = vec![Untagged, Send(answer)];
        let parameters = "sslmode=disable target_session_attrs=read-write password=x";
        // Damage to a text goes unnoticed, any other is an error.
        let _ = dial(parameters, script).await;
    }
}

#[tokio::test]
async fn a_host_that_is_read_only_is_passed_over() {
    let standby = |shown| vec![Untagged, Send(ready()), Tagged, Send(value(shown)), Tagged];
    for (attribute, question) in [
        ("read-write", "SHOW transaction_read_only\0"),
        ("primary", "SHOW in_hot_standby\0"),
    ] {
        let (first, first_heard) = server(vec![standby("on")]).await;
        let (second, second_heard) = server(vec![standby("off")]).await;
        let text = format!(
            "host=localhost,localhost hostaddr=127.0.0.1,127.0.0.1 port={first},{second} \
             sslmode=disable target_session_attrs={attribute}"
        );
        let session = replication(&conninfo(&text), &[]).await.unwrap();
        assert_eq!(session.host, format!("localhost:{second}"));
        drop(session);
        let first_heard = first_heard.await.unwrap();
        assert_eq!(first_heard[0][1], question.as_bytes());
        assert_eq!(first_heard[0].len(), 3, "the first is told good-bye");
        assert_eq!(second_heard.await.unwrap()[0].len(), 2);
    }
    let parameters = "sslmode=disable target_session_attrs=read-write";
    let error = dial(
        parameters,
        vec![Untagged, Send(ready()), Tagged, Send(value("on")), Tagged],
    )
    .await
    .0
    .unwrap_err();
    assert!(matches!(error, DialError::NotReadWrite { .. }), "{error}");
}

/// A port of 127.0.0.1 where nothing listens.
async fn closed_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    listener.local_addr().unwrap().port()
}

#[tokio::test]
async fn of_several_failures_the_one_that_may_heal_decides_and_all_are_told() {
    let refusal = vec![
        Untagged,
        Send(error_response("SFATAL\0C28P01\0Mwrong password")),
    ];
    let (refusing, _heard) = server(vec![refusal]).await;
    let closed = closed_port().await;
    for ports in [
        format!("{closed},{refusing}"),
        format!("{refusing},{closed}"),
    ] {
        // The second round finds the script used up: a connection that is closed at once.
        let text = format!("hostaddr=127.0.0.1,127.0.0.1 port={ports} sslmode=disable");
        let error = replication(&conninfo(&text), &[]).await.unwrap_err();
        let decisive = error.decisive();
        assert!(
            matches!(decisive, DialError::Connect { .. } | DialError::Io { .. }),
            "{ports}: {error}"
        );
        let text = error.to_string();
        assert!(text.contains(&format!("127.0.0.1:{closed}")), "{text}");
        assert!(text.contains(&format!("127.0.0.1:{refusing}")), "{text}");
    }
}

#[tokio::test]
async fn nothing_there_or_no_answer_is_told_as_such() {
    let closed = closed_port().await;
    let error = replication(&conninfo(&format!("hostaddr=127.0.0.1 port={closed}")), &[]).await;
    assert!(matches!(error.unwrap_err(), DialError::Connect { .. }));

    let error = replication(&conninfo("host=/nonexistent/folder"), &[]).await;
    assert!(matches!(error.unwrap_err(), DialError::Connect { .. }));

    let error = replication(&conninfo("host=name.invalid"), &[]).await;
    assert!(matches!(error.unwrap_err(), DialError::Resolve { .. }));

    let script = vec![Untagged, Wait];
    let error = dial("sslmode=disable connect_timeout=1", script)
        .await
        .0
        .unwrap_err();
    assert!(matches!(error, DialError::Timeout { .. }), "{error}");
}

#[tokio::test]
async fn an_sql_client_works_on_the_session_that_was_dialed() {
    let script = vec![
        Untagged,
        Send(ready()),
        Tagged,
        Send(value("hello")),
        Tagged,
    ];
    let (port, heard) = server(vec![script]).await;
    let text = format!("hostaddr=127.0.0.1 port={port} sslmode=disable");
    let (client, connection) = sql(&conninfo(&text), SqlLimits::QUESTIONS).await.unwrap();
    let connection = tokio::spawn(connection);
    let answer = client.simple_query("SHOW greeting").await.unwrap();
    let rows: Vec<_> = answer
        .iter()
        .filter_map(|message| match message {
            tokio_postgres::SimpleQueryMessage::Row(row) => row.get(0),
            _ => None,
        })
        .collect();
    assert_eq!(rows, ["hello"]);
    drop(client);
    connection.await.unwrap().unwrap();
    let heard = heard.await.unwrap();
    let startup = String::from_utf8_lossy(&heard[0][0]).into_owned();
    assert!(!startup.contains("replication"), "{startup}");
    assert!(startup.contains("search_path\0pg_catalog\0"), "{startup}");
    assert_eq!(
        heard[0][1], b"SHOW greeting\0",
        "one startup message, then the query"
    );
}

#[test]
fn only_tls_that_checks_a_certificate_makes_a_network_safe() {
    use super::exposure::Exposure::{self, Clear, Local, Proven, Unproven};
    for (peer, tls, expected) in [
        ("127.0.0.1", None, Local),
        ("127.8.9.10", None, Local),
        ("::1", None, Local),
        ("::ffff:127.0.0.1", None, Local),
        ("127.0.0.1", Some(false), Local),
        ("127.0.0.1", Some(true), Proven),
        ("10.0.0.1", None, Clear),
        ("128.0.0.1", None, Clear),
        ("0.0.0.0", None, Clear),
        ("fe80::1", None, Clear),
        ("::ffff:10.0.0.1", None, Clear),
        ("10.0.0.1", Some(false), Unproven),
        ("10.0.0.1", Some(true), Proven),
    ] {
        let peer: IpAddr = peer.parse().unwrap();
        assert_eq!(
            Exposure::over_tcp(Some(peer), tls),
            expected,
            "{peer} {tls:?}"
        );
    }
    assert_eq!(Exposure::over_tcp(None, None), Clear);
    assert_eq!(Exposure::over_tcp(None, Some(false)), Unproven);
}

/// Dials a server on the network that follows `script`, with either client.
async fn dial_outside(
    address: IpAddr,
    is_replication: bool,
    parameters: &str,
    script: Vec<Step>,
) -> (Result<(), DialError>, Heard) {
    let (port, heard) = server_at(address, vec![script]).await;
    let conninfo = conninfo(&format!("hostaddr={address} port={port} {parameters}"));
    let done = match is_replication {
        true => replication(&conninfo, &[]).await.map(drop),
        false => sql(&conninfo, SqlLimits::QUESTIONS).await.map(drop),
    };
    let heard = tokio::time::timeout(Duration::from_secs(10), heard).await;
    (done, heard.unwrap().unwrap())
}

#[tokio::test]
async fn no_password_goes_over_a_network_to_a_server_that_has_proven_nothing() {
    let Some(address) = outside() else { return };
    let by_tls = |rest: Vec<Step>| {
        let start = vec![Untagged, Send(b"S".to_vec()), AcceptTls, Untagged];
        start.into_iter().chain(rest).collect::<Vec<_>>()
    };
    let without = |rest: Vec<Step>| {
        let start = vec![Untagged, Send(b"N".to_vec()), Untagged];
        start.into_iter().chain(rest).collect::<Vec<_>>()
    };
    for (method, request) in [
        ("password", authentication(3, b"")),
        ("md5", authentication(5, b"salt")),
    ] {
        for is_replication in [true, false] {
            let asks = || vec![Send(request.clone()), Wait];
            for (script, fault) in [
                (without(asks()), "has no TLS"),
                (by_tls(asks()), "checks no certificate"),
            ] {
                let (done, heard) =
                    dial_outside(address, is_replication, "password=secret", script).await;
                let error = done.unwrap_err();
                assert!(matches!(error, DialError::Exposed { .. }), "{error}");
                let text = error.to_string();
                let opt_in = format!("require_auth={method}");
                assert!(text.contains(fault) && text.contains(&opt_in), "{text}");
                assert!(!format!("{heard:?}").contains(&format!("{:?}", b"secret")));
                assert_eq!(heard[0].len(), 2, "nothing behind the startup message");
            }
            // A list of what is not allowed does not ask for the rest.
            let parameters = "password=secret require_auth=!none";
            let (done, _) =
                dial_outside(address, is_replication, parameters, without(asks())).await;
            assert!(matches!(done, Err(DialError::Exposed { .. })), "{done:?}");

            let accepts = || vec![Send(request.clone()), Tagged, Send(ready())];
            for script in [without(accepts()), by_tls(accepts())] {
                let parameters = format!("password=secret require_auth={method},none");
                let (done, heard) =
                    dial_outside(address, is_replication, &parameters, script).await;
                done.unwrap();
                assert_eq!(heard[0].len(), 3, "the password is sent");
            }
        }
    }
}

#[tokio::test]
async fn what_is_open_to_the_network_is_told_once_for_each_kind() {
    let Some(address) = outside() else { return };
    let clear = || vec![Untagged, Send(b"N".to_vec()), Untagged, Send(ready())];
    let encrypted = || {
        vec![
            Untagged,
            Send(b"S".to_vec()),
            AcceptTls,
            Untagged,
            Send(ready()),
        ]
    };
    let scripts = vec![encrypted(), encrypted(), clear(), clear(), encrypted()];
    let (port, heard) = server_at(address, scripts).await;
    let conninfo = conninfo(&format!("hostaddr={address} port={port}"));
    for told in [1, 1, 2, 2, 2] {
        // Clones share what was told.
        replication(&conninfo.clone(), &[]).await.unwrap();
        assert_eq!(conninfo.exposures().len(), told);
    }
    let told = conninfo.exposures();
    assert!(
        told[0].contains("TLS that checks no certificate (sslmode=prefer)"),
        "{told:?}"
    );
    assert!(told[1].contains("has no TLS"), "{told:?}");
    heard.await.unwrap();

    let (port, heard) = server(vec![clear(), encrypted()]).await;
    let conninfo = self::conninfo(&format!("hostaddr=127.0.0.1 port={port}"));
    for _ in 0..2 {
        replication(&conninfo, &[]).await.unwrap();
    }
    assert_eq!(conninfo.exposures(), Vec::<String>::new());
    heard.await.unwrap();
}

#[tokio::test]
async fn a_handshake_that_is_spoilt_does_not_get_the_password_in_clear() {
    let Some(address) = outside() else { return };
    let spoilt = vec![
        Untagged,
        Send(b"S".to_vec()),
        Anything,
        Send(b"no TLS at all".to_vec()),
        Wait,
    ];
    let asks = vec![Untagged, Send(authentication(3, b"")), Wait];
    let (port, heard) = server_at(address, vec![spoilt, asks]).await;
    let text = format!("hostaddr={address} port={port} password=secret sslmode=prefer");
    let error = replication(&conninfo(&text), &[]).await.unwrap_err();
    assert!(matches!(error, DialError::Exposed { .. }), "{error}");
    assert_eq!(heard.await.unwrap()[1].len(), 1);
}

#[tokio::test]
async fn a_server_that_asks_for_what_require_auth_does_not_allow_gets_nothing() {
    let sasl = sasl_offer();
    for (required, request) in [
        ("scram-sha-256", authentication(3, b"")),
        ("scram-sha-256", authentication(5, b"salt")),
        ("scram-sha-256", ready()),
        ("!none", ready()),
        ("!password", authentication(3, b"")),
        ("none", authentication(3, b"")),
        ("none", sasl.clone()),
        ("md5,password", sasl.clone()),
        ("!scram-sha-256", sasl.clone()),
        ("oauth", sasl),
        ("password", authentication(7, b"")),
    ] {
        let script = vec![Untagged, Send(request), Wait];
        let parameters = format!("sslmode=disable password=x require_auth={required}");
        let (session, heard) = dial(&parameters, script).await;
        let error = session.unwrap_err();
        assert!(matches!(error, DialError::RequireAuth { .. }), "{error}");
        let expected = format!("require_auth={required} does not allow");
        assert!(error.to_string().contains(&expected), "{error}");
        assert_eq!(heard[0].len(), 1, "nothing behind the startup message");
    }
    for required in ["none", "!md5", "none,scram-sha-256"] {
        let script = vec![Untagged, Send(ready())];
        let parameters = format!("sslmode=disable require_auth={required}");
        dial(&parameters, script).await.0.unwrap();
    }
}

/// What comes of a server's first message of SCRAM, with `{}` where the client's nonce is to stand.
async fn scram_with(address: IpAddr, first: &str) -> DialError {
    let listener = TcpListener::bind((address, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let first = first.to_owned();
    let serve = async move {
        let (stream, _) = listener.accept().await.unwrap();
        let mut stream: Box<dyn Stream> = Box::new(stream);
        read_untagged(&mut stream).await?;
        stream.write_all(&sasl_offer()).await?;
        stream.read_u8().await?;
        let initial = read_untagged(&mut stream).await?;
        let initial = String::from_utf8_lossy(&initial).into_owned();
        let nonce = initial.rsplit_once("r=").unwrap().1;
        let answer = authentication(11, first.replace("{}", nonce).as_bytes());
        stream.write_all(&answer).await?;
        // Nothing where the client closes the connection instead.
        let mut proof = [0; 1024];
        let count = stream.read(&mut proof).await?;
        Ok::<_, io::Error>(count)
    };
    let serve = tokio::spawn(serve);
    let text = format!("hostaddr={address} port={port} sslmode=disable password=x");
    let error = replication(&conninfo(&text), &[]).await.unwrap_err();
    let is_refused = matches!(error, DialError::Scram { .. });
    let proof_bytes = serve.await.unwrap().unwrap();
    assert_eq!(is_refused, proof_bytes == 0, "{proof_bytes} bytes of proof");
    error
}

#[tokio::test]
async fn a_scram_exchange_that_costs_much_or_proves_little_is_refused() {
    let loopback = IpAddr::from([127, 0, 0, 1]);
    for (first, expected) in [
        (
            "r={}x,s=c2FsdA==,i=4294967295",
            "asks for 4294967295 iterations, expected 1 to 100000",
        ),
        ("r={}x,s=c2FsdA==,i=100001", "expected 1 to 100000"),
        ("r={}x,s=c2FsdA==,i=99999999999", "expected 1 to 100000"),
        ("r={}x,s=c2FsdA==,i=0", "asks for 0 iterations"),
        ("r={}x,s=,i=4096", "salt is empty"),
        ("r={},s=c2FsdA==,i=4096", "adds nothing"),
        ("r=,s=c2FsdA==,i=4096", "invalid nonce"),
    ] {
        let error = scram_with(loopback, first).await;
        assert!(matches!(error, DialError::Scram { .. }), "{first}: {error}");
        assert!(error.to_string().contains(expected), "{first}: {error}");
    }
    // A proof is sent, and the server closes the connection.
    let error = scram_with(loopback, "r={}x,s=c2FsdA==,i=1").await;
    assert!(matches!(error, DialError::Io { .. }), "{error}");
    let Some(outside) = outside() else { return };
    let error = scram_with(outside, "r={}x,s=c2FsdA==,i=4095").await;
    assert!(error.to_string().contains("at least 4096"), "{error}");
    let error = scram_with(outside, "r={}x,s=c2FsdA==,i=4096").await;
    assert!(matches!(error, DialError::Io { .. }), "{error}");
}

#[tokio::test]
async fn another_version_of_the_protocol_is_not_negotiated() {
    let offer = message(b'v', &[0, 3, 0, 0, 0, 0, 0, 0]);
    let script = vec![Untagged, Send(offer), Wait];
    let error = dial("sslmode=disable", script).await.0.unwrap_err();
    assert!(matches!(error, DialError::Protocol { .. }), "{error}");
    assert!(
        error.to_string().contains("NegotiateProtocolVersion"),
        "{error}"
    );
}

/// Has an SQL client ask a server that answers with these bytes, so many of them at a time.
async fn ask_for(sent: Vec<u8>, room: usize) -> Result<Vec<String>, tokio_postgres::Error> {
    let (client, mut server) = tokio::io::duplex(room);
    let serve = async move {
        // To the end of the query.
        while server.read_u8().await? != 0 {}
        server.write_all(&sent).await?;
        server.read_to_end(&mut Vec::new()).await
    };
    let serve = tokio::spawn(serve);
    let (buffer, parameters) = sent_with_startup();
    let session = Session {
        socket: Socket::Memory(client),
        buffer: BytesMut::from(&buffer[..]),
        parameters,
        backend_pid: 7,
        secret: 8,
        host: "here".to_owned(),
    };
    let opened = handover::to_tokio_postgres(session, "walpost", SqlLimits::QUESTIONS).await;
    let (client, connection) = opened.unwrap();
    let connection = tokio::spawn(connection);
    let answer = tokio::time::timeout(Duration::from_secs(60), client.simple_query("SHOW x"))
        .await
        .expect("an answer, whatever it is");
    drop(client);
    let _ = connection.await.unwrap();
    serve.abort();
    let text = |message: &tokio_postgres::SimpleQueryMessage| match message {
        tokio_postgres::SimpleQueryMessage::Row(row) => row.get(0).map(str::to_owned),
        _ => None,
    };
    Ok(answer?.iter().filter_map(text).collect())
}

/// What came with the end of a startup, and the server's parameters.
fn sent_with_startup() -> (Vec<u8>, HashMap<String, String>) {
    let notice = message(b'N', b"SNOTICE\0C00000\0Mhello\0\0");
    let parameters = [("server_version".to_owned(), "15.3".to_owned())];
    (notice, parameters.into())
}

#[tokio::test]
async fn an_answer_is_the_same_in_whatever_pieces_it_comes() {
    let long = "x".repeat(100_000);
    for room in (1..12).chain([1000, 1_000_000]) {
        for text in ["", "hello", &long] {
            if room == 1 && text.len() > 1000 {
                continue;
            }
            let sent = [value(text), value("behind")].concat();
            let rows = ask_for(sent, room).await.unwrap();
            assert_eq!(rows, [text], "{room} at a time");
        }
    }
}

#[tokio::test]
async fn a_message_that_is_too_long_is_refused_before_it_comes_and_named() {
    let row = |text: &str| {
        let end = [message(b'C', b"SHOW\0"), message(b'Z', b"I")].concat();
        let mut row = value(text);
        row.truncate(row.len() - end.len());
        row
    };
    let mut long = row("hello");
    long.push(b'D');
    long.extend(900_000_000_u32.to_be_bytes());
    let text = "x".repeat(1 << 20);
    let endless = row(&text).repeat(65);
    for room in [1, 3, 100, 1_000_000] {
        for (sent, expected) in [
            (
                &long,
                "a message of 900000000 bytes, tag 0x44, and at most 16777216",
            ),
            (&endless, "more than 67108864 bytes"),
        ] {
            if room < 100 && sent.len() > 1000 {
                continue;
            }
            let error = ask_for(sent.clone(), room).await.unwrap_err();
            let error = error.as_db_error().unwrap_or_else(|| panic!("{error}"));
            assert!(error.message().contains(expected), "{error}");
        }
    }
}
