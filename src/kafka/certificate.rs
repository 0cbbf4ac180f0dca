//! Why the certificate of a broker is rejected.
//!
//! librdkafka has the same words for every certificate that it rejects, whether it has expired or another authority signed it.
//! OpenSSL knows the difference, so the TLS handshake is repeated here. Nothing is sent over the connection.

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

/// How long the handshake may take.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(1);
/// How many names of a certificate are reported.
const NAMES_MAX: usize = 8;
/// RFC 1035, section 2.3.4.
const DNS_NAME_BYTES_MAX: usize = 255;
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
    match timeout(HANDSHAKE_TIMEOUT, rejection(config, address)).await {
        Ok(Some(found)) => format!("{} ({reason})", describe(&found, address, config)),
        Ok(None) | Err(_) => reason,
    }
}

/// The address in a reason such as `ssl://host:9093/bootstrap: SSL handshake failed: ...`.
fn rejected_address(reason: &str) -> Option<&str> {
    let address = reason.contains(REJECTED).then_some(reason)?;
    let (_, address) = address.split_once("ssl://")?;
    address.split_once('/').map(|(address, _)| address)
}

/// A certificate that OpenSSL does not accept.
struct Rejection {
    reason: X509VerifyResult,
    /// The DNS names and IP addresses that the certificate is for.
    names: Vec<String>,
}

/// Returns what OpenSSL finds wrong with the certificate of the broker at this address, or `None`
/// if it accepts the certificate or nothing answers.
async fn rejection(config: &ClientConfig, address: &str) -> Option<Rejection> {
    let (host, _) = address.rsplit_once(':')?;
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let mut builder = authorities_of(config).connector().ok()?;
    // OpenSSL still verifies the certificate. With PEER, it would end the handshake after a failure,
    // and not return the certificate.
    builder.set_verify(SslVerifyMode::NONE);
    let mut configured = builder.build().configure().ok()?;
    if config.get("ssl.endpoint.identification.algorithm") == Some("none") {
        configured.set_verify_hostname(false);
    }
    let stream = TcpStream::connect(address).await.ok()?;
    let mut stream = SslStream::new(configured.into_ssl(host).ok()?, stream).ok()?;
    // A broker that requires a client certificate ends the handshake, but only after its own
    // certificate has been verified.
    let _ended = std::pin::Pin::new(&mut stream).connect().await;
    let certificate = stream.ssl().peer_certificate()?;
    let reason = stream.ssl().verify_result();
    (reason != X509VerifyResult::OK).then(|| Rejection {
        reason,
        names: names(&certificate),
    })
}

/// Returns the authorities that the properties name.
fn authorities_of(config: &ClientConfig) -> Authorities {
    match (config.get("ssl.ca.pem"), config.get("ssl.ca.location")) {
        (Some(pem), _) => Authorities::Pem(pem.to_owned()),
        (None, location) => Authorities::at(location.unwrap_or_default().to_owned()),
    }
}

/// Returns the DNS names and IP addresses that the certificate is for, up to the limit. Names that
/// are longer than a DNS name can be are omitted.
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
    let of_the_system = authorities::system_bundle();
    let trusted = match config.get("ssl.ca.location") {
        Some(path) if of_the_system != Some(Path::new(path)) => {
            format!("ssl.ca.location {path} does not contain")
        }
        _ => "this machine does not trust".to_owned(),
    };
    let what = match found.reason.as_raw() {
        HAS_EXPIRED => "has expired: renew it on the broker, no setting here accepts it".to_owned(),
        NOT_YET_VALID => {
            "is not valid yet: compare the clocks of this machine and of the one that issued it"
                .to_owned()
        }
        code if OTHER_HOST.contains(&code) => {
            let names = match found.names.is_empty() {
                true => String::new(),
                false => format!(" ({})", found.names.join(", ")),
            };
            format!(
                "is for another name{names}: write the name that it has into bootstrap.servers \
                 and the broker's advertised.listeners"
            )
        }
        code if UNKNOWN_AUTHORITY.contains(&code) => format!(
            "is signed by an authority that {trusted}: set ssl.ca.location to the certificate of that authority"
        ),
        _ => format!("is not accepted: {}", found.reason.error_string()),
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
