//! Connections that others can intercept.

use super::*;

#[test]
fn only_tls_that_checks_a_certificate_makes_a_network_safe() {
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

/// Connects to a scripted server on the network, with either client.
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
        false => sql(&conninfo, SqlLimits::CATALOG_QUERIES).await.map(drop),
    };
    let heard = tokio::time::timeout(Duration::from_secs(10), heard).await;
    (done, heard.unwrap().unwrap())
}

#[tokio::test]
async fn sends_no_password_over_a_network_to_an_unauthenticated_server() {
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
            // A list of methods that are not allowed does not require the others.
            let parameters = "password=secret require_auth=!none";
            let (done, _) =
                dial_outside(address, is_replication, parameters, without(asks())).await;
            assert!(matches!(done, Err(DialError::Exposed { .. })), "{done:?}");

            let accepts = || vec![Send(request.clone()), Tagged, Accept];
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
async fn network_exposure_is_logged_once_per_kind() {
    let Some(address) = outside() else { return };
    let clear = || vec![Untagged, Send(b"N".to_vec()), Untagged, Accept];
    let scripts = vec![encrypted(), encrypted(), clear(), clear(), encrypted()];
    let (port, heard) = server_at(address, scripts).await;
    let conninfo = conninfo(&format!("hostaddr={address} port={port}"));
    for told in [1, 1, 2, 2, 2] {
        // Clones share the recorded exposures.
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
