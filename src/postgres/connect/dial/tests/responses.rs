//! Tests for damaged and truncated replies before the session is ready.

use super::*;

#[tokio::test]
async fn returns_the_server_parameters_and_any_bytes_after_startup() {
    let answer = [&value(SEARCH_PATH.1)[..], b"more"].concat();
    let script = vec![Untagged, Send(ready()), Tagged, Send(answer)];
    let (port, received) = server(vec![script]).await;
    let text = format!("hostaddr=127.0.0.1 port={port} sslmode=disable options='-c geqo=off'");
    let session = replication(&conninfo(&text), &[("wal_sender_timeout", "20s")])
        .await
        .unwrap();
    assert_eq!((session.backend_pid, session.secret), (7, 8));
    assert_eq!(session.parameters["server_version"], "13.3");
    assert_eq!(&session.buffer[..], b"more");
    assert_eq!(session.host, format!("127.0.0.1:{port}"));
    let startup = String::from_utf8(received.await.unwrap()[0][0].split_off(4)).unwrap();
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
            "pg_catalog, pg_temp",
            "row_security",
            "off",
            "standard_conforming_strings",
            "on",
            "quote_all_identifiers",
            "off",
            "default_transaction_isolation",
            "read committed",
            "constraint_exclusion",
            "partition",
            "gin_fuzzy_search_limit",
            "0",
            "client_min_messages",
            "notice",
            "default_transaction_read_only",
            "off",
            "synchronous_commit",
            "local",
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
async fn reports_server_errors_verbatim() {
    let refusal = "SFATAL\0VFATAL\0C28P01\0Mlogin failed\0Dwrong password\0Htry again";
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
        "login failed (SQLSTATE 28P01) DETAIL: wrong password HINT: try again"
    );
}

#[tokio::test]
async fn reports_the_error_of_a_server_that_closes_the_connection_immediately() {
    for _ in 0..50 {
        let script = vec![Send(error_response("SFATAL\0C53300\0Mtoo many clients"))];
        let error = dial("sslmode=disable", script).await.0.unwrap_err();
        assert!(matches!(error, DialError::Server { .. }), "{error}");
    }
}

#[tokio::test]
async fn rejects_oversized_lengths_before_allocating_memory() {
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
async fn treats_a_failed_postmaster_fork_as_a_lost_connection() {
    let text = b"could not fork new process for connection: Out of memory\n\0";
    let text = [&b"E"[..], text].concat();
    let error = dial("sslmode=disable", vec![Untagged, Send(text)])
        .await
        .0
        .unwrap_err();
    assert!(matches!(error, DialError::Io { .. }), "{error}");
    assert!(error.to_string().contains("could not fork"), "{error}");
}

/// The check of the search path must not depend on the reported version: a pooler may report any
/// version, regardless of the actual server's version.
#[tokio::test]
async fn verifies_the_search_path_for_every_reported_server_version() {
    let others = value("plot, pg_catalog");
    let script = vec![Untagged, Send(ready()), Tagged, Send(others), Tagged];
    let (session, received) = dial("sslmode=disable", script).await;
    let error = session.unwrap_err();
    assert!(matches!(error, DialError::Pooler { .. }), "{error}");
    assert_eq!(received[0][1], b"SHOW search_path\0");
    assert_eq!(received[0].len(), 3, "no further query is sent");
}

#[tokio::test]
async fn treats_a_truncated_startup_response_as_a_lost_connection() {
    for end in 0..ready().len() {
        let script = vec![Untagged, Send(ready()[..end].to_vec())];
        let error = dial("sslmode=disable", script).await.0.unwrap_err();
        assert!(matches!(error, DialError::Io { .. }), "{end}: {error}");
    }
}

#[tokio::test]
async fn does_not_panic_on_a_corrupted_startup_response() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    for _ in 0..300 {
        let mut answer = [ready(), value(SEARCH_PATH.1), value("off")].concat();
        for _ in 0..random.usize(1..4) {
            let at = random.usize(..answer.len());
            answer[at] = random.u8(..);
        }
        let script = vec![Untagged, Send(answer)];
        let parameters = "sslmode=disable target_session_attrs=read-write password=x";
        // The result is ignored, because damage inside text is not detected. Any other damage
        // causes an error.
        let _ = dial(parameters, script).await;
    }
}

#[tokio::test]
async fn rejects_negotiation_of_a_different_protocol_version() {
    let offer = message(b'v', &[0, 3, 0, 0, 0, 0, 0, 0]);
    let script = vec![Untagged, Send(offer), Wait];
    let error = dial("sslmode=disable", script).await.0.unwrap_err();
    assert!(matches!(error, DialError::Protocol { .. }), "{error}");
    assert!(
        error.to_string().contains("NegotiateProtocolVersion"),
        "{error}"
    );
}
