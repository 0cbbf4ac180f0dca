//! Tests for TLS and certificate verification.

use super::*;

#[tokio::test]
async fn fails_on_a_server_without_tls_only_if_tls_is_required() {
    for mode in [
        "require",
        "verify-full sslrootcert=system",
        "verify-ca sslrootcert=CERT",
    ] {
        let root = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(root.path(), unrelated_certificate()).unwrap();
        let mode = mode.replace("CERT", root.path().to_str().unwrap());
        let script = vec![Untagged, Send(b"N".to_vec())];
        let session = dial(&format!("sslmode={mode}"), script).await.0;
        match session.unwrap_err() {
            DialError::TlsRefused { .. } => {}
            // The machine that runs the test may not have a bundle of certificate authorities.
            DialError::TlsFile {
                parameter: "sslrootcert=system",
                ..
            } => {}
            error => panic!("{mode}: {error}"),
        }
    }
    let script = vec![Untagged, Send(b"N".to_vec()), Untagged, Accept];
    dial("sslmode=prefer", script).await.0.unwrap();
}

fn unrelated_certificate() -> Vec<u8> {
    self_signed()
        .context()
        .certificate()
        .unwrap()
        .to_pem()
        .unwrap()
}

#[tokio::test]
async fn rejects_bytes_after_the_reply_to_ssl_request() {
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
async fn verifies_the_certificate_if_sslmode_or_a_root_certificate_requires_it() {
    let root = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(root.path(), unrelated_certificate()).unwrap();
    let root = root.path().to_str().unwrap();

    dial("sslmode=require", encrypted()).await.0.unwrap();
    for mode in ["require", "verify-ca", "verify-full"] {
        let parameters = format!("sslmode={mode} sslrootcert={root}");
        let error = dial(&parameters, encrypted()).await.0.unwrap_err();
        assert!(matches!(error, DialError::Tls { .. }), "{mode}: {error}");
        assert!(
            error.to_string().contains("certificate is not accepted"),
            "{mode}: {error}"
        );

        let parameters = format!("sslmode={mode} sslrootcert=/nonexistent/root.crt");
        // The file `sslrootcert` is opened before Walpost sends anything to the server.
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
async fn falls_back_to_no_encryption_with_sslmode_prefer_if_the_tls_handshake_or_login_fails() {
    let plain = || vec![Untagged, Accept];
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
    dial_scripts("sslmode=prefer", vec![no_handshake, plain()])
        .await
        .0
        .unwrap();
    dial_scripts("sslmode=prefer", vec![no_entry, plain()])
        .await
        .0
        .unwrap();
}
