//! Tests for several hosts and for unreachable hosts.

use super::*;

#[tokio::test]
async fn skips_a_read_only_host() {
    let standby = |shown| vec![Untagged, Accept, Tagged, Send(value(shown)), Tagged];
    for (attribute, question) in [
        ("read-write", "SHOW transaction_read_only\0"),
        ("primary", "SHOW in_hot_standby\0"),
    ] {
        let (first, first_received) = server(vec![standby("on")]).await;
        let (second, second_received) = server(vec![standby("off")]).await;
        let text = format!(
            "host=localhost,localhost hostaddr=127.0.0.1,127.0.0.1 port={first},{second} \
             sslmode=disable target_session_attrs={attribute}"
        );
        let session = replication(&conninfo(&text), &[]).await.unwrap();
        assert_eq!(session.host, format!("localhost:{second}"));
        drop(session);
        let first_received = first_received.await.unwrap();
        assert_eq!(first_received[0][1], question.as_bytes());
        assert_eq!(
            first_received[0].len(),
            3,
            "Terminate is sent to the first server"
        );
        assert_eq!(second_received.await.unwrap()[0].len(), 2);
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

/// Returns a port on 127.0.0.1 on which nothing listens.
async fn closed_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    listener.local_addr().unwrap().port()
}

#[tokio::test]
async fn returns_a_temporary_failure_if_any_host_failed_temporarily() {
    let refusal = vec![
        Untagged,
        Send(error_response("SFATAL\0C28P01\0Mwrong password")),
    ];
    let (refusing, _received) = server(vec![refusal]).await;
    let closed = closed_port().await;
    for ports in [
        format!("{closed},{refusing}"),
        format!("{refusing},{closed}"),
    ] {
        // The server accepts only one connection. In the second iteration, the server's script has
        // already ended, so the connection fails immediately.
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
async fn distinguishes_a_refused_connection_from_a_missing_response() {
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
