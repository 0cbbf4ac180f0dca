//! Why the certificate of a broker is rejected.
//!
//! librdkafka has the same words for every certificate that it rejects, whether it has expired or another authority signed it.
//! OpenSSL knows the difference, so the TLS handshake is repeated here. Nothing is sent over the connection.

use std::path::Path;
use std::time::Duration;

use openssl::error::ErrorStack;
use openssl::ssl::{SslConnector, SslMethod};
use openssl::x509::{X509, X509VerifyResult};
use rdkafka::config::ClientConfig;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_openssl::SslStream;

use super::properties::is_probe;
use crate::authorities;

/// How long the handshake may take.
const LIMIT: Duration = Duration::from_secs(1);
/// Part of librdkafka's reason if it rejects a certificate (`rdkafka_transport.c`).
const REJECTED: &str = "certificate verify failed";

// Codes of x509_vfy.h.
const NOT_YET_VALID: i32 = 9;
const HAS_EXPIRED: i32 = 10;
const UNKNOWN_AUTHORITY: [i32; 4] = [18, 19, 20, 21];
const OTHER_HOST: [i32; 2] = [62, 64];

/// Puts what is wrong with the certificate before librdkafka's reason for a failed connection, if it was the certificate.
pub(super) async fn explain(config: &ClientConfig, reason: String) -> String {
    let Some(address) = rejected_address(&reason) else {
        return reason;
    };
    match timeout(LIMIT, rejection(config, address)).await {
        Ok(Some(found)) => format!("{} ({reason})", describe(found, address, config)),
        Ok(None) | Err(_) => reason,
    }
}

/// The address in a reason such as `ssl://host:9093/bootstrap: SSL handshake failed: ...`.
fn rejected_address(reason: &str) -> Option<&str> {
    let address = reason.contains(REJECTED).then_some(reason)?;
    let (_, address) = address.split_once("ssl://")?;
    address.split_once('/').map(|(address, _)| address)
}

/// What OpenSSL finds wrong with the certificate of the broker at this address; none if it accepts it or nothing answers.
async fn rejection(config: &ClientConfig, address: &str) -> Option<X509VerifyResult> {
    let (host, _) = address.rsplit_once(':')?;
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let connector = connector(config).ok()?;
    let mut configured = connector.configure().ok()?;
    if config.get("ssl.endpoint.identification.algorithm") == Some("none") {
        configured.set_verify_hostname(false);
    }
    let stream = TcpStream::connect(address).await.ok()?;
    let mut stream = SslStream::new(configured.into_ssl(host).ok()?, stream).ok()?;
    let connected = std::pin::Pin::new(&mut stream).connect().await;
    let found = stream.ssl().verify_result();
    (connected.is_err() && found != X509VerifyResult::OK).then_some(found)
}

/// Trusts the authorities that the properties name. Their files were checked when the producer was created.
fn connector(config: &ClientConfig) -> Result<SslConnector, ErrorStack> {
    let mut builder = SslConnector::builder(SslMethod::tls_client())?;
    if let Some(pem) = config.get("ssl.ca.pem") {
        for certificate in X509::stack_from_pem(pem.as_bytes())? {
            builder.cert_store_mut().add_cert(certificate)?;
        }
        return Ok(builder.build());
    }
    let named = config.get("ssl.ca.location").map(Path::new);
    let named = named.filter(|path| !path.as_os_str().is_empty() && !is_probe(path));
    let location: Option<&Path> = match named {
        Some(path) => Some(path),
        None => authorities::of_the_system(),
    };
    match location {
        Some(path) if path.is_dir() => builder.load_verify_locations(None, Some(path))?,
        Some(path) => builder.load_verify_locations(Some(path), None)?,
        None => {}
    }
    Ok(builder.build())
}

fn describe(found: X509VerifyResult, address: &str, config: &ClientConfig) -> String {
    let of_the_system = authorities::of_the_system();
    let trusted = match config.get("ssl.ca.location") {
        Some(path) if of_the_system != Some(Path::new(path)) => {
            format!("ssl.ca.location {path} does not contain")
        }
        _ => "this machine does not trust".to_owned(),
    };
    let what = match found.as_raw() {
        HAS_EXPIRED => "has expired: renew it on the broker, no setting here accepts it".to_owned(),
        NOT_YET_VALID => {
            "is not valid yet: compare the clocks of this machine and of the one that issued it"
                .to_owned()
        }
        code if OTHER_HOST.contains(&code) => {
            "is for another name: write the name that it has into bootstrap.servers".to_owned()
        }
        code if UNKNOWN_AUTHORITY.contains(&code) => format!(
            "is signed by an authority that {trusted}: set ssl.ca.location to the certificate of that authority"
        ),
        _ => format!("is not accepted: {}", found.error_string()),
    };
    format!("the certificate of broker {address} {what}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_is_read_from_the_reason_of_a_rejected_certificate() {
        let reason = |protocol: &str, why: &str| {
            format!("{protocol}://kafka1:9093/bootstrap: SSL handshake failed: {why}")
        };
        for protocol in ["ssl", "sasl_ssl"] {
            let rejected = reason(
                protocol,
                "error:0A000086:SSL routines::certificate verify failed",
            );
            assert_eq!(rejected_address(&rejected), Some("kafka1:9093"));
        }
        let other = reason(
            "ssl",
            "Disconnected: connecting to a PLAINTEXT broker listener?",
        );
        assert_eq!(rejected_address(&other), None);
    }
}
