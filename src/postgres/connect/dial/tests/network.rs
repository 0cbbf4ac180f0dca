//! Tests for connections over a network on which an attacker can intercept them.

use super::*;

#[test]
fn trusts_a_network_connection_only_with_a_verified_certificate() {
    use crate::postgres::connect::conninfo::exposure::Exposure::{
        self, Clear, Local, Proven, Unproven,
    };
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

/// Connects to a scripted server at an external address, using a replication connection or an SQL
/// client.
async fn dial_external(
    address: IpAddr,
    is_replication: bool,
    parameters: &str,
    script: Vec<Step>,
) -> (Result<(), DialError>, Received) {
    let (port, received) = server_at(address, vec![script]).await;
    let conninfo = conninfo(&format!("hostaddr={address} port={port} {parameters}"));
    let done = match is_replication {
        true => replication(&conninfo, &[]).await.map(drop),
        false => sql(&conninfo, SqlLimits::CATALOG_QUERIES).await.map(drop),
    };
    let received = tokio::time::timeout(Duration::from_secs(10), received).await;
    (done, received.unwrap().unwrap())
}

#[tokio::test]
async fn sends_no_password_over_a_network_to_an_unauthenticated_server() {
    let Some(address) = external_address() else {
        return;
    };
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
            let requests = || vec![Send(request.clone()), Wait];
            for (script, fault) in [
                (without(requests()), "does not use TLS"),
                (
                    by_tls(requests()),
                    "without verifying the server's certificate",
                ),
            ] {
                let (done, received) =
                    dial_external(address, is_replication, "password=secret", script).await;
                let error = done.unwrap_err();
                assert!(matches!(error, DialError::Exposed { .. }), "{error}");
                let text = error.to_string();
                let opt_in = format!("require_auth={method}");
                assert!(text.contains(fault) && text.contains(&opt_in), "{text}");
                assert!(!format!("{received:?}").contains(&format!("{:?}", b"secret")));
                assert_eq!(received[0].len(), 2, "the password is not sent");
            }
            // Excluding `none` with `require_auth=!none` does not explicitly allow the other
            // methods.
            let parameters = "password=secret require_auth=!none";
            let (done, _) =
                dial_external(address, is_replication, parameters, without(requests())).await;
            assert!(matches!(done, Err(DialError::Exposed { .. })), "{done:?}");

            let accepts = || vec![Send(request.clone()), Tagged, Accept];
            for script in [without(accepts()), by_tls(accepts())] {
                let parameters = format!("password=secret require_auth={method},none");
                let (done, received) =
                    dial_external(address, is_replication, &parameters, script).await;
                done.unwrap();
                assert_eq!(received[0].len(), 3, "the password is sent");
            }
        }
    }
}

#[tokio::test]
async fn logs_each_kind_of_insecure_connection_once() {
    let Some(address) = external_address() else {
        return;
    };
    let clear = || vec![Untagged, Send(b"N".to_vec()), Untagged, Accept];
    let scripts = vec![encrypted(), encrypted(), clear(), clear(), encrypted()];
    let (port, received) = server_at(address, scripts).await;
    let conninfo = conninfo(&format!("hostaddr={address} port={port}"));
    for warnings in [1, 1, 2, 2, 2] {
        // Connect with a clone of `conninfo`, to check that clones share the list of warnings that
        // have already been logged.
        replication(&conninfo.clone(), &[]).await.unwrap();
        assert_eq!(conninfo.exposures().len(), warnings);
    }
    let warnings = conninfo.exposures();
    assert!(
        warnings[0].contains("server's certificate (sslmode=prefer)"),
        "{warnings:?}"
    );
    assert!(warnings[1].contains("does not use TLS"), "{warnings:?}");
    received.await.unwrap();

    let (port, received) = server(vec![clear(), encrypted()]).await;
    let conninfo = self::conninfo(&format!("hostaddr=127.0.0.1 port={port}"));
    for _ in 0..2 {
        replication(&conninfo, &[]).await.unwrap();
    }
    assert_eq!(conninfo.exposures(), Vec::<String>::new());
    received.await.unwrap();
}

#[tokio::test]
async fn sends_no_cleartext_password_after_a_failed_tls_handshake() {
    let Some(address) = external_address() else {
        return;
    };
    let broken_handshake = vec![
        Untagged,
        Send(b"S".to_vec()),
        Anything,
        Send(b"no TLS at all".to_vec()),
        Wait,
    ];
    let password_request = vec![Untagged, Send(authentication(3, b"")), Wait];
    let (port, received) = server_at(address, vec![broken_handshake, password_request]).await;
    let text = format!("hostaddr={address} port={port} password=secret sslmode=prefer");
    let error = replication(&conninfo(&text), &[]).await.unwrap_err();
    assert!(matches!(error, DialError::Exposed { .. }), "{error}");
    assert_eq!(received.await.unwrap()[1].len(), 1);
}
