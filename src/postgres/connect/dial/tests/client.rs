//! Tests for SQL clients that use a session opened by this module.

use super::*;

#[tokio::test]
async fn sql_client_runs_queries_over_an_established_session() {
    let script = vec![Untagged, Accept, Tagged, Send(value("hello")), Tagged];
    let (port, received) = server(vec![script]).await;
    let text = format!("hostaddr=127.0.0.1 port={port} sslmode=disable");
    let (client, connection) = sql(&conninfo(&text), SqlLimits::CATALOG_QUERIES)
        .await
        .unwrap();
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
    let received = received.await.unwrap();
    let startup = String::from_utf8_lossy(&received[0][0]).into_owned();
    assert!(!startup.contains("replication"), "{startup}");
    assert!(
        startup.contains("search_path\0pg_catalog, pg_temp\0"),
        "{startup}"
    );
    assert_eq!(
        received[0][1], b"SHOW greeting\0",
        "the query follows the startup message"
    );
}

/// Runs a query against a scripted server. The server replies with the bytes in `sent` through a
/// pipe that holds `room` bytes.
async fn run_query(sent: Vec<u8>, room: usize) -> Result<Vec<String>, tokio_postgres::Error> {
    let (client, mut server) = tokio::io::duplex(room);
    let serve = async move {
        // Read up to the end of the query.
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
    let opened = handover::to_tokio_postgres(session, "walpost", SqlLimits::CATALOG_QUERIES).await;
    let (client, connection) = opened.unwrap();
    let connection = tokio::spawn(connection);
    let answer = tokio::time::timeout(Duration::from_secs(60), client.simple_query("SHOW x"))
        .await
        .expect("a response");
    drop(client);
    let _ = connection.await.unwrap();
    serve.abort();
    let text = |message: &tokio_postgres::SimpleQueryMessage| match message {
        tokio_postgres::SimpleQueryMessage::Row(row) => row.get(0).map(str::to_owned),
        _ => None,
    };
    Ok(answer?.iter().filter_map(text).collect())
}

/// Returns a notice that the server sent immediately after the startup messages, and the server's
/// parameters.
fn sent_with_startup() -> (Vec<u8>, HashMap<String, String>) {
    let notice = message(b'N', b"SNOTICE\0C00000\0Mhello\0\0");
    let parameters = [("server_version".to_owned(), "15.3".to_owned())];
    (notice, parameters.into())
}

#[tokio::test]
async fn returns_the_same_result_however_the_response_is_split() {
    let long = "x".repeat(100_000);
    for room in (1..12).chain([1000, 1_000_000]) {
        for text in ["", "hello", &long] {
            if room == 1 && text.len() > 1000 {
                continue;
            }
            let sent = [value(text), value("next")].concat();
            let rows = run_query(sent, room).await.unwrap();
            assert_eq!(rows, [text], "{room} at a time");
        }
    }
}

#[tokio::test]
async fn rejects_an_oversized_message_before_it_arrives() {
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
                "a message of 900000000 bytes, tag 0x44; at most 16777216 are accepted",
            ),
            (&endless, "more than 67108864 bytes"),
        ] {
            if room < 100 && sent.len() > 1000 {
                continue;
            }
            let error = run_query(sent.clone(), room).await.unwrap_err();
            let error = error.as_db_error().unwrap_or_else(|| panic!("{error}"));
            assert!(error.message().contains(expected), "{error}");
        }
    }
}

/// Simulates a server that sends far more notices than Walpost's limit allows.
#[tokio::test]
async fn logs_a_limited_number_of_notices_from_a_server() {
    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);
    impl io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let mut lines = self.0.lock().expect("no panic");
            lines.extend(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let lines = Lines::default();
    let to = lines.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_writer(move || to.clone())
        .finish();
    let guard = tracing::subscriber::set_default(subscriber);
    let notice = message(b'N', b"SNOTICE\0VNOTICE\0C00000\0Mflood\0\0");
    let sent = [notice.repeat(10_000), value("hello")].concat();
    let rows = run_query(sent, 1_000_000).await.unwrap();
    drop(guard);
    assert_eq!(rows, ["hello"]);
    let text = lines.0.lock().expect("no panic");
    let logged = String::from_utf8_lossy(&text).matches("flood").count();
    assert!((1..100).contains(&logged), "{logged}");
}

/// Maximum number of nested type lookups that the simulated server answers.
const NESTED_TYPES: u32 = 100;

/// Returns the description of a statement that has one parameter of type oid or no parameters, and
/// result columns of the given types.
fn described(has_parameter: bool, columns: &[u32]) -> Vec<u8> {
    let parameters: &[u8] = match has_parameter {
        true => &[0, 1, 0, 0, 0, 26],
        false => &[0, 0],
    };
    let mut body = i16::try_from(columns.len()).unwrap().to_be_bytes().to_vec();
    for oid in columns {
        body.extend([&b"c\0"[..], &[0; 6], &oid.to_be_bytes(), &[0; 8]].concat());
    }
    [message(b't', parameters), message(b'T', &body)].concat()
}

/// Answers each type lookup with an array type whose element type is also unknown, up to
/// [`NESTED_TYPES`] times.
async fn nest_types(client: tokio::io::DuplexStream) -> io::Result<()> {
    let mut client: Box<dyn Stream> = Box::new(client);
    let (mut is_lookup, mut lookups) = (false, 0_u32);
    loop {
        let tag = client.read_u8().await?;
        let body = read_untagged(&mut client).await?;
        let reply = match tag {
            b'P' => {
                is_lookup = String::from_utf8_lossy(&body).contains("pg_type");
                message(b'1', b"")
            }
            b'D' if is_lookup => described(true, &[19, 18, 26, 26, 26, 19, 26]),
            b'D' => described(false, &[1_000_000]),
            b'B' => message(b'2', b""),
            b'E' if is_lookup && lookups < NESTED_TYPES => {
                lookups += 1;
                let element = match lookups {
                    NESTED_TYPES => 0,
                    _ => 1_000_000 + lookups,
                };
                let mut row = 7_i16.to_be_bytes().to_vec();
                for value in [
                    Some(&b"name"[..]),
                    Some(b"b"),
                    Some(&element.to_be_bytes()),
                    None,
                    Some(&[0; 4]),
                    Some(b"name"),
                    Some(&[0; 4]),
                ] {
                    let length = value.map_or(-1, |value| i32::try_from(value.len()).unwrap());
                    row.extend(length.to_be_bytes());
                    row.extend(value.unwrap_or_default());
                }
                [message(b'D', &row), message(b'C', b"SELECT 1\0")].concat()
            }
            b'E' => message(b'C', b"SELECT 0\0"),
            b'C' => message(b'3', b""),
            b'S' => message(b'Z', b"I"),
            _ => return Ok(()),
        };
        client.write_all(&reply).await?;
    }
}

/// With a sufficient number of nested lookups, the client would overflow the stack.
#[tokio::test]
async fn does_not_look_up_types_that_are_not_built_in() {
    let (client, server) = tokio::io::duplex(1 << 16);
    let serve = tokio::spawn(nest_types(server));
    let (_, parameters) = sent_with_startup();
    let session = Session {
        socket: Socket::Memory(client),
        buffer: BytesMut::new(),
        parameters,
        backend_pid: 7,
        secret: 8,
        host: "here".to_owned(),
    };
    let opened = handover::to_tokio_postgres(session, "walpost", SqlLimits::CATALOG_QUERIES).await;
    let (client, connection) = opened.unwrap();
    let connection = tokio::spawn(connection);
    let query = client.query("SELECT x", &[]);
    let result = tokio::time::timeout(Duration::from_secs(60), query).await;
    let error = result.expect("a response").expect_err("no lookup");
    let error = error.as_db_error().unwrap_or_else(|| panic!("{error}"));
    assert!(error.message().contains("not built into"), "{error}");
    drop(client);
    let _ = connection.await.unwrap();
    serve.abort();
}
