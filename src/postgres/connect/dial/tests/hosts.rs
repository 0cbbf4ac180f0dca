//! Several hosts, and unreachable hosts.

use super::*;

#[tokio::test]
async fn a_host_that_is_read_only_is_passed_over() {
    let standby = |shown| vec![Untagged, Accept, Tagged, Send(value(shown)), Tagged];
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
        vec![Untagged, Accept, Tagged, Send(value("on")), Tagged],
    )
    .await
    .0
    .unwrap_err();
    assert!(matches!(error, DialError::NotReadWrite { .. }), "{error}");
}

/// Returns a port of 127.0.0.1 on which nothing listens.
async fn closed_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    listener.local_addr().unwrap().port()
}

#[tokio::test]
async fn temporary_failure_determines_the_result_and_all_are_reported() {
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
        // In the second round the script is exhausted, so the connection is closed at once.
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
async fn distinguishes_no_listener_from_no_response() {
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
