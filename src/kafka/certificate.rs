//! Determines why a broker's certificate was rejected.
//!
//! librdkafka reports the same error for every certificate that it rejects, whether the certificate
//! has expired or its authority is unknown. OpenSSL reports the exact reason, so this module
//! repeats the TLS handshake with OpenSSL. No data is sent over the connection.

use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use openssl::ssl::SslVerifyMode;
use openssl::x509::{X509, X509VerifyResult};
use rdkafka::config::ClientConfig;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_openssl::SslStream;

use super::tls::Authorities;
use crate::authorities;
use crate::escape::Escaped;

/// Timeout for connecting and completing the TLS handshake, in total.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of DNS names and IP addresses reported for a certificate.
const NAMES_MAX: usize = 8;
/// Maximum length of a DNS name (RFC 1035, section 2.3.4).
const DNS_NAME_BYTES_MAX: usize = 255;
/// Part of librdkafka's error message for a rejected certificate (`rdkafka_transport.c`).
const REJECTED: &str = "certificate verify failed";

// Error codes from OpenSSL's x509_vfy.h.
const NOT_YET_VALID: i32 = 9;
const HAS_EXPIRED: i32 = 10;
const UNKNOWN_AUTHORITY: [i32; 4] = [18, 19, 20, 21];
const OTHER_HOST: [i32; 2] = [62, 64];

/// If librdkafka rejected the broker's certificate, prepends the exact reason to `reason`, which is
/// librdkafka's error for the failed connection.
pub(super) async fn explain(config: &ClientConfig, reason: String) -> String {
    let Some(address) = rejected_address(&reason) else {
        return reason;
    };
    match timeout(HANDSHAKE_TIMEOUT, rejection(config, address)).await {
        Ok(Some(found)) => format!("{} ({reason})", describe(&found, address, config)),
        Ok(None) | Err(_) => reason,
    }
}

/// Extracts the address from a certificate error such as `ssl://host:9093/bootstrap: SSL handshake
/// failed: ...`.
fn rejected_address(reason: &str) -> Option<&str> {
    let address = reason.contains(REJECTED).then_some(reason)?;
    let (_, address) = address.split_once("ssl://")?;
    address.split_once('/').map(|(address, _)| address)
}

/// A certificate that OpenSSL does not accept.
struct Rejection {
    reason: X509VerifyResult,
    /// The DNS names and IP addresses in the certificate.
    names: Vec<String>,
}

/// Returns why OpenSSL rejects the certificate of the broker at this address, or `None` if OpenSSL
/// accepts the certificate or no broker responds.
async fn rejection(config: &ClientConfig, address: &str) -> Option<Rejection> {
    let (host, _) = address.rsplit_once(':')?;
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let mut builder = configured_authorities(config).connector().ok()?;
    // OpenSSL verifies the certificate even in mode `SslVerifyMode::NONE`. In mode `PEER`, OpenSSL
    // would abort the handshake after a failed verification, without returning the certificate.
    builder.set_verify(SslVerifyMode::NONE);
    let mut configured = builder.build().configure().ok()?;
    if config.get("ssl.endpoint.identification.algorithm") == Some("none") {
        configured.set_verify_hostname(false);
    }
    let stream = TcpStream::connect(address).await.ok()?;
    let mut stream = SslStream::new(configured.into_ssl(host).ok()?, stream).ok()?;
    // A broker that requires a client certificate aborts the handshake, but only after OpenSSL has
    // verified the broker's certificate.
    let _ended = std::pin::Pin::new(&mut stream).connect().await;
    let certificate = stream.ssl().peer_certificate()?;
    let reason = stream.ssl().verify_result();
    (reason != X509VerifyResult::OK).then(|| Rejection {
        reason,
        names: names(&certificate),
    })
}

/// Returns the certificate authorities that the client's configuration specifies.
fn configured_authorities(config: &ClientConfig) -> Authorities {
    match (config.get("ssl.ca.pem"), config.get("ssl.ca.location")) {
        (Some(pem), _) => Authorities::Pem(pem.to_owned()),
        (None, location) => Authorities::from_location(location.unwrap_or_default().to_owned()),
    }
}

/// Returns up to [`NAMES_MAX`] DNS names and IP addresses from the certificate. Names longer than
/// [`DNS_NAME_BYTES_MAX`] are omitted.
fn names(certificate: &X509) -> Vec<String> {
    let alternatives = certificate.subject_alt_names().into_iter().flatten();
    let names = alternatives.filter_map(|name| {
        let address = || match name.ipaddress()? {
            &[a, b, c, d] => Some(IpAddr::from([a, b, c, d])),
            long => Some(IpAddr::from(<[u8; 16]>::try_from(long).ok()?)),
        };
        let dns = name
            .dnsname()
            .filter(|name| name.len() <= DNS_NAME_BYTES_MAX);
        let dns = dns.map(|name| Escaped(name).to_string());
        dns.or_else(|| address().map(|address| address.to_string()))
    });
    names.take(NAMES_MAX).collect()
}

fn describe(found: &Rejection, address: &str, config: &ClientConfig) -> String {
    let system_bundle = authorities::system_bundle();
    match found.reason.as_raw() {
        HAS_EXPIRED => {
            format!("the certificate of broker {address} has expired: renew the certificate")
        }
        NOT_YET_VALID => format!(
            "the certificate of broker {address} is not valid yet: compare this machine's clock with the clock of the \
             certificate's issuer"
        ),
        code if OTHER_HOST.contains(&code) => {
            let names = match found.names.is_empty() {
                true => String::new(),
                false => format!(" ({})", found.names.join(", ")),
            };
            format!(
                "the certificate of broker {address} is for a different name{names}: in bootstrap.servers and in the broker's \
                 advertised.listeners, use a name that the certificate contains"
            )
        }
        code if UNKNOWN_AUTHORITY.contains(&code) => match config.get("ssl.ca.location") {
            Some(path) if system_bundle != Some(Path::new(path)) => format!(
                "the certificate of broker {address} is signed by an authority that is not in ssl.ca.location {path}: set \
                     ssl.ca.location to the certificate of that authority"
            ),
            _ => format!(
                "the certificate of broker {address} is signed by an authority that this machine does not trust: set \
                     ssl.ca.location to the certificate of that authority"
            ),
        },
        _ => format!(
            "the certificate of broker {address} is not valid: {}",
            found.reason.error_string()
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_the_broker_address_from_a_certificate_error() {
        let reason = |protocol: &str, cause: &str| {
            format!("{protocol}://kafka1:9093/bootstrap: SSL handshake failed: {cause}")
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
