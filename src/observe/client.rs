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
    #[error("no response within {RESPONSE_TIMEOUT:?}")]
    Silent,
    /// The response is not valid HTTP.
    #[error("the server at this address does not use HTTP: {0}")]
    Http(#[from] hyper::Error),
    /// The response is not from a Walpost process of this version.
    #[error("the server at this address is not Walpost, or runs a different version: {0}")]
    Foreign(String),
}

/// Queries `/status` of the Walpost process that listens at `address`.
///
/// # Errors
/// Returns an error if no Walpost process of this version responds at the address.
pub(crate) async fn status(address: &str) -> Result<Status, QueryError> {
    timeout(RESPONSE_TIMEOUT, query_status(address))
        .await
        .map_err(|_| QueryError::Silent)?
}

async fn query_status(address: &str) -> Result<Status, QueryError> {
    let mut last_error = None;
    let mut stream = None;
    for address in lookup_host(address).await? {
        match TcpStream::connect(reachable(address)).await {
            Ok(connected) => {
                stream = Some(connected);
                break;
            }
            Err(error) => last_error = Some(error),
        }
    }
    let Some(stream) = stream else {
        let no_address = || std::io::Error::other("the host name does not resolve to an address");
        return Err(last_error.unwrap_or_else(no_address).into());
    };
    let connected = stream.peer_addr()?;
    // Remove the scope ID, which a link-local address can have but a `Host` header must not
    // contain.
    let connected = SocketAddr::new(connected.ip(), connected.port());
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let request = Request::get("/status")
        // Send the address instead of the name. The server always accepts its own address as the
        // host, but may reject a name that is defined only on this machine.
        .header(header::HOST, connected.to_string())
        .header(header::CONNECTION, "close")
        .body(Empty::<Bytes>::new())
        .map_err(|error| QueryError::Foreign(error.to_string()))?;
    let response = async {
        let response = sender.send_request(request).await?;
        let code = response.status();
        let body = Limited::new(response.into_body(), RESPONSE_BYTES_MAX)
            .collect()
            .await;
        Ok::<_, hyper::Error>((code, body))
    };
    let (connection, response) = tokio::join!(connection, response);
    let (code, body) = match (response, connection) {
        // If the request was canceled, the connection's error contains the cause.
        (Err(canceled), Err(reason)) if canceled.is_canceled() => return Err(reason.into()),
        (response, _) => response?,
    };
    if code != StatusCode::OK {
        return Err(QueryError::Foreign(format!("/status returned {code}")));
    }
    let body = body.map_err(|error| QueryError::Foreign(error.to_string()))?;
    serde_json::from_slice(&body.to_bytes()).map_err(|error| QueryError::Foreign(error.to_string()))
}

/// Replaces an unspecified address with the loopback address.
fn reachable(mut address: SocketAddr) -> SocketAddr {
    if address.ip().is_unspecified() {
        address.set_ip(match address {
            SocketAddr::V4(_) => IpAddr::V4(Ipv4Addr::LOCALHOST),
            SocketAddr::V6(_) => IpAddr::V6(Ipv6Addr::LOCALHOST),
        });
    }
    address
}
