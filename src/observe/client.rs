//! Queries the status of a running Walpost process.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Empty, Limited};
use hyper::client::conn::http1;
use hyper::{Request, StatusCode, header};
use hyper_util::rt::TokioIo;
use tokio::net::{TcpStream, lookup_host};
use tokio::time::timeout;

use super::status::Status;

/// Timeout for the response.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum length of a response, in bytes.
const RESPONSE_BYTES_MAX: usize = 16 << 20;

/// An error while querying the status.
#[derive(Debug, thiserror::Error)]
pub(crate) enum QueryError {
    /// The connection failed.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// No response arrived in time.
    #[error("no answer within {RESPONSE_TIMEOUT:?}")]
    Silent,
    /// The response is not valid HTTP.
    #[error("the server there does not speak HTTP: {0}")]
    Http(#[from] hyper::Error),
    /// The response is not from a Walpost process of this version.
    #[error("the server there is not Walpost of this version: {0}")]
    Foreign(String),
}

/// Returns the `/status` of the Walpost process that listens at `address`.
///
/// # Errors
/// Returns an error if no Walpost process of this version answers there.
pub(crate) async fn status(address: &str) -> Result<Status, QueryError> {
    timeout(RESPONSE_TIMEOUT, query_status(address))
        .await
        .map_err(|_| QueryError::Silent)?
}

async fn query_status(address: &str) -> Result<Status, QueryError> {
    let mut last = None;
    let mut stream = None;
    for address in lookup_host(address).await? {
        match TcpStream::connect(reachable(address)).await {
            Ok(connected) => {
                stream = Some(connected);
                break;
            }
            Err(error) => last = Some(error),
        }
    }
    let Some(stream) = stream else {
        let nothing = || std::io::Error::other("the name has no address");
        return Err(last.unwrap_or_else(nothing).into());
    };
    let connected = stream.peer_addr()?;
    // Without the scope ID of a link-local address, which is not valid in a `Host` header.
    let connected = SocketAddr::new(connected.ip(), connected.port());
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let request = Request::get("/status")
        // Uses the address instead of the name, which might be defined only on this machine. The
        // server always accepts addresses.
        .header(header::HOST, connected.to_string())
        .header(header::CONNECTION, "close")
        .body(Empty::<Bytes>::new())
        .map_err(|error| QueryError::Foreign(error.to_string()))?;
    let answer = async {
        let response = sender.send_request(request).await?;
        let code = response.status();
        let body = Limited::new(response.into_body(), RESPONSE_BYTES_MAX)
            .collect()
            .await;
        Ok::<_, hyper::Error>((code, body))
    };
    let (connection, answer) = tokio::join!(connection, answer);
    let (code, body) = match (answer, connection) {
        // If the request was canceled, the connection's error contains the cause.
        (Err(canceled), Err(reason)) if canceled.is_canceled() => return Err(reason.into()),
        (answer, _) => answer?,
    };
    if code != StatusCode::OK {
        return Err(QueryError::Foreign(format!("/status answers {code}")));
    }
    let body = body.map_err(|error| QueryError::Foreign(error.to_string()))?;
    serde_json::from_slice(&body.to_bytes()).map_err(|error| QueryError::Foreign(error.to_string()))
}

/// Replaces an unspecified address by the loopback address.
fn reachable(mut address: SocketAddr) -> SocketAddr {
    if address.ip().is_unspecified() {
        address.set_ip(match address {
            SocketAddr::V4(_) => IpAddr::V4(Ipv4Addr::LOCALHOST),
            SocketAddr::V6(_) => IpAddr::V6(Ipv6Addr::LOCALHOST),
        });
    }
    address
}
