//! Tests for authentication, and for the conditions under which a password is sent.

use super::*;

#[tokio::test]
async fn sends_passwords_using_the_requested_method() {
    // The hash is md5(md5("secret" "walpost") salt), computed with md5sum.
    for (request, expected) in [
        (authentication(3, b""), "secret\0"),
        (
            authentication(5, b"salt"),
            "md51e8407dfb59787c442d61f29237e2c80\0",
        ),
    ] {
        let script = vec![Untagged, Send(request.clone()), Tagged, Accept];
        let (session, received) = dial("sslmode=disable password=secret", script).await;
        session.unwrap();
        assert_eq!(String::from_utf8_lossy(&received[0][1]), expected);

        let (session, _) = dial("sslmode=disable", vec![Untagged, Send(request)]).await;
        let error = session.unwrap_err();
        assert!(matches!(error, DialError::NoPassword { .. }), "{error}");
        assert!(error.to_string().contains("PGPASSWORD"), "{error}");
    }
}

#[tokio::test]
async fn rejects_an_invalid_scram_exchange() {
    let bad_nonce = authentication(11, b"r=another,s=c2FsdA==,i=4096");
    for (script, expected) in [
        (
            vec![Untagged, Send(sasl_offer()), Tagged, Send(bad_nonce)],
            "invalid nonce",
        ),
        (
            vec![Untagged, Send(sasl_offer()), Tagged, Accept],
            "SASLContinue",
        ),
        (
            vec![Untagged, Send(authentication(10, b"X\0\0"))],
            "requests SASL X",
        ),
        (
            vec![Untagged, Send(authentication(10, b"SCRAM"))],
            "not follow PostgreSQL's protocol",
        ),
        (vec![Untagged, Send(authentication(7, b""))], "requests gss"),
        (
            vec![Untagged, Send(authentication(99, b""))],
            "not follow PostgreSQL's protocol",
        ),
    ] {
        let (session, _) = dial("sslmode=disable password=x", script).await;
        let error = session.unwrap_err().to_string();
        assert!(error.contains(expected), "{expected}: {error}");
    }
}

#[tokio::test]
async fn rejects_servers_without_channel_binding_if_it_is_required() {
    for request in [
        ready(),
        authentication(3, b""),
        authentication(5, b"salt"),
        sasl_offer(),
        authentication(10, b"SCRAM-SHA-256-PLUS\0SCRAM-SHA-256\0\0"),
    ] {
        let script = vec![Untagged, Send(request), Wait];
        let parameters = "sslmode=disable channel_binding=require password=x";
        let (session, received) = dial(parameters, script).await;
        let error = session.unwrap_err();
        assert!(matches!(error, DialError::ChannelBinding { .. }), "{error}");
        assert_eq!(received[0].len(), 1, "only the startup message is sent");
    }
}

#[tokio::test]
async fn sends_nothing_if_require_auth_forbids_the_requested_method() {
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
        let (session, received) = dial(&parameters, script).await;
        let error = session.unwrap_err();
        assert!(matches!(error, DialError::RequireAuth { .. }), "{error}");
        let expected = format!("require_auth={required} does not allow");
        assert!(error.to_string().contains(&expected), "{error}");
        assert_eq!(received[0].len(), 1, "only the startup message is sent");
    }
    for required in ["none", "!md5", "none,scram-sha-256"] {
        let script = vec![Untagged, Accept];
        let parameters = format!("sslmode=disable require_auth={required}");
        dial(&parameters, script).await.0.unwrap();
    }
}

/// Returns the client's error if `first` is the server's first SCRAM message. In `first`, `{}`
/// stands for the client's nonce.
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
        // `read` returns zero if the client closes the connection instead of sending a proof.
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
async fn rejects_scram_parameters_that_are_expensive_or_insecure() {
    let loopback = IpAddr::from([127, 0, 0, 1]);
    for (first, expected) in [
        (
            "r={}x,s=c2FsdA==,i=4294967295",
            "the server requests 4294967295 iterations, expected 1 to 100000",
        ),
        ("r={}x,s=c2FsdA==,i=100001", "expected 1 to 100000"),
        ("r={}x,s=c2FsdA==,i=99999999999", "expected 1 to 100000"),
        ("r={}x,s=c2FsdA==,i=0", "requests 0 iterations"),
        ("r={}x,s=,i=4096", "salt is empty"),
        ("r={},s=c2FsdA==,i=4096", "same as the client's"),
        ("r=,s=c2FsdA==,i=4096", "invalid nonce"),
    ] {
        let error = scram_with(loopback, first).await;
        assert!(matches!(error, DialError::Scram { .. }), "{first}: {error}");
        assert!(error.to_string().contains(expected), "{first}: {error}");
    }
    // On loopback, a single iteration is accepted: the client sends a proof, and then the server
    // closes the connection.
    let error = scram_with(loopback, "r={}x,s=c2FsdA==,i=1").await;
    assert!(matches!(error, DialError::Io { .. }), "{error}");
    let Some(external) = external_address() else {
        return;
    };
    let error = scram_with(external, "r={}x,s=c2FsdA==,i=4095").await;
    assert!(error.to_string().contains("at least 4096"), "{error}");
    let error = scram_with(external, "r={}x,s=c2FsdA==,i=4096").await;
    assert!(matches!(error, DialError::Io { .. }), "{error}");
}
