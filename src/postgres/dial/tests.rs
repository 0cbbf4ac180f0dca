//! Against servers that follow a script, on loopback ports.

#![allow(clippy::unwrap_used)]

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

/// Accepts as many connections as there are scripts.
async fn server(scripts: Vec<Vec<Step>>) -> (u16, JoinHandle<Heard>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
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
    let (client, connection) = sql(&conninfo(&text)).await.unwrap();
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
