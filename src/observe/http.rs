//! The HTTP server, with the status page at `/`, `/metrics`, `/healthz`, `/readyz`, `/status` and
//! `/history`.
//!
//! The server runs on the supervisor's thread and only reads the pipelines' statistics, so a slow
//! client can't delay a pipeline. A client can't prevent other clients from connecting either: see
//! `connection_limit`. Requests from other sites' pages are rejected: see [`hosts`].

use std::convert::Infallible;
use std::fmt::Write as _;
use std::net::{SocketAddr, TcpListener};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{
    ALLOW, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderName, HeaderValue,
    X_CONTENT_TYPE_OPTIONS,
};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{HeaderMap, Method, Request, Response, StatusCode, Uri};
use hyper_util::rt::{TokioIo, TokioTimer};
use socket2::SockRef;
use tokio::sync::oneshot;
use tokio::task::yield_now;
use tokio::time::{sleep, timeout};
use tracing::{debug, warn};

use self::connection_limit::{ConnectionLimit, ConnectionSlot};
use self::hosts::{HostError, Hosts};
use self::stream::Stream;
use super::metrics;
use super::registry::Registry;
use super::status::Status;
use crate::escape::{self, Escaped};

mod connection_limit;
pub(crate) mod hosts;
mod stream;

/// The default address.
pub(crate) const DEFAULT: &str = "127.0.0.1:9464";
/// An address that lets the system choose a free port.
const FREE_PORT: &str = "127.0.0.1:0";
/// The value that disables the server.
pub(crate) const OFF: &str = "off";

/// How long a client may take to send the head of a request, and how long a connection may be idle.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of connections that are waiting to be accepted. The system may impose a lower
/// limit.
const BACKLOG: i32 = 1024;
/// Maximum lifetime of a connection, after which the connection is shut down gracefully or, if that
/// takes too long, closed.
const CONNECTION_LIFETIME_MAX: Duration = Duration::from_secs(120);
/// Maximum size of a request's head, in bytes.
const HEAD_BYTES_MAX: usize = 16 << 10;
/// Host names are truncated to this length in responses.
const HOST_CHARS_MAX: usize = 100;
/// Number of connections to accept before the open connections are served. This is lower than the
/// maximum number of connections from one address, so that a client that has sent its request is
/// served before its connection can be evicted.
const ACCEPTED_AT_ONCE: usize = 32;
/// Delay before the next attempt to accept a connection when the process has run out of file
/// descriptors.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

fn port_remedy(error: &std::io::Error) -> &'static str {
    match error.kind() {
        std::io::ErrorKind::PermissionDenied => {
            " Ports below 1024 are reserved for root: use another port."
        }
        _ => "",
    }
}

/// An error that prevents the server from listening.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ListenError {
    /// Another process is using the address.
    #[error(
        "--http {0}: the address is in use. Set another address with --http HOST:PORT (or WALPOST_HTTP, or http at the \
         top of walpost.toml). Port 0 selects a free port; \"off\" disables the server"
    )]
    InUse(String),
    /// The address is invalid or does not belong to this machine.
    #[error(
        "--http {address}: {error}.{} Expected HOST:PORT, like 127.0.0.1:9464 or 0.0.0.0:9464, or \"off\"", port_remedy(.error)
    )]
    Other {
        address: String,
        error: std::io::Error,
    },
    /// A configured host name is invalid.
    #[error("{0}")]
    Host(#[from] HostError),
}

/// The listening socket, and the host names that are accepted in requests.
#[derive(Debug)]
pub(crate) struct Listener {
    tcp: TcpListener,
    hosts: Hosts,
}

/// Listens at `address`. Returns `None` if `address` is `off`. The host names in `named` are
/// accepted in requests.
///
/// # Errors
/// Returns an error if the address can't be used or a host name is invalid.
pub(crate) fn listen(address: &str, named: &[String]) -> Result<Option<Listener>, ListenError> {
    let mut hosts = Hosts::new(named, true)?;
    if address == OFF {
        return Ok(None);
    }
    let bound = TcpListener::bind(address).and_then(|tcp| {
        tcp.set_nonblocking(true)?;
        // The standard library's default backlog is so short that a burst of connections overflows
        // it.
        SockRef::from(&tcp).listen(BACKLOG)?;
        let is_local = tcp.local_addr()?.ip().to_canonical().is_loopback();
        Ok((tcp, is_local))
    });
    match bound {
        Ok((tcp, is_local)) => {
            hosts.is_local = is_local;
            Ok(Some(Listener { tcp, hosts }))
        }
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {
            Err(ListenError::InUse(address.to_owned()))
        }
        Err(error) => Err(ListenError::Other {
            address: address.to_owned(),
            error,
        }),
    }
}

/// Listens at [`DEFAULT`]. If that address is in use, for example by another instance on the same
/// machine, listens on a free port at the same IP address and logs a warning with the port. The
/// host names in `named` are accepted in requests.
///
/// # Errors
/// Returns an error if no address can be used or a host name is invalid.
pub(crate) fn listen_by_default(named: &[String]) -> Result<Option<Listener>, ListenError> {
    let refused = match listen(DEFAULT, named) {
        Err(refused @ ListenError::InUse(_)) => refused,
        result => return result,
    };
    let Some(listener) = listen(FREE_PORT, named)? else {
        return Err(refused);
    };
    let Ok(address) = listener.address() else {
        return Err(refused);
    };
    warn!(
        "{DEFAULT} is in use, perhaps by another Walpost process; until Walpost is restarted, metrics, health and status are at \
         http://{address}. To set a fixed address: --http HOST:PORT. To query the status now: walpost status --http {address}"
    );
    Ok(Some(listener))
}

impl Listener {
    /// Returns the local address, including the port that the system chose.
    ///
    /// # Errors
    /// Returns an error if the system can't determine the address.
    pub(crate) fn address(&self) -> std::io::Result<SocketAddr> {
        self.tcp.local_addr()
    }

    /// Serves connections indefinitely.
    ///
    /// # Errors
    /// Returns an error if the socket can't be registered with the runtime.
    pub(crate) fn serve(
        self,
        registry: Arc<Registry>,
    ) -> std::io::Result<impl Future<Output = ()> + Send + 'static> {
        let tcp = tokio::net::TcpListener::from_std(self.tcp)?;
        Ok(serve(tcp, Arc::new(self.hosts), registry))
    }
}

async fn serve(listener: tokio::net::TcpListener, hosts: Arc<Hosts>, registry: Arc<Registry>) {
    let limit = Arc::<ConnectionLimit>::default();
    let mut accepted = 0;
    loop {
        match listener.accept().await {
            Ok((stream, from)) => {
                let (slot, eviction) = limit.add(from.ip());
                let connection = HttpConnection {
                    from,
                    slot,
                    hosts: Arc::clone(&hosts),
                    registry: Arc::clone(&registry),
                };
                tokio::spawn(connection.serve(stream, eviction));
                // Do not yield after every connection. Otherwise, other clients would have to wait
                // in the backlog during a flood.
                accepted += 1;
                if accepted % ACCEPTED_AT_ONCE == 0 {
                    yield_now().await;
                }
            }
            Err(error) if is_client_error(&error) => {}
            Err(error) => {
                debug!(%error, "HTTP: failed to accept a connection");
                limit.evict_one();
                sleep(ACCEPT_RETRY_DELAY).await;
            }
        }
    }
}

/// Returns whether the client closed the connection before it was accepted.
fn is_client_error(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
    matches!(
        error.kind(),
        ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted
    )
}

/// The state needed to serve one connection.
struct HttpConnection {
    from: SocketAddr,
    slot: Arc<ConnectionSlot>,
    hosts: Arc<Hosts>,
    registry: Arc<Registry>,
}

impl HttpConnection {
    /// Serves requests until the connection ends or is evicted.
    async fn serve(self, stream: tokio::net::TcpStream, eviction: oneshot::Receiver<()>) {
        let from = self.from;
        let stream = Stream::new(stream, Arc::clone(&self.slot));
        let state = Arc::new(self);
        let has_requested = AtomicBool::new(false);
        let service = service_fn(move |request: Request<Incoming>| {
            let state = Arc::clone(&state);
            let is_first = !has_requested.swap(true, Ordering::Relaxed);
            async move {
                // Yield between pipelined requests. Otherwise, hyper would process all of them
                // before other tasks could run.
                if !is_first {
                    yield_now().await;
                }
                Ok::<_, Infallible>(state.respond(&request))
            }
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_TIMEOUT)
            .max_buf_size(HEAD_BYTES_MAX)
            .serve_connection(TokioIo::new(stream), service);
        let mut connection = pin!(connection);
        let served = async {
            match timeout(CONNECTION_LIFETIME_MAX, connection.as_mut()).await {
                Ok(ended) => ended,
                Err(_) => {
                    connection.as_mut().graceful_shutdown();
                    timeout(HEAD_TIMEOUT, connection).await.unwrap_or(Ok(()))
                }
            }
        };
        tokio::select! {
            ended = served => {
                if let Err(error) = ended {
                    debug!(%error, %from, "HTTP: connection failed");
                }
            }
            // The connection was evicted to release resources: there were too many connections or
            // unread responses, or no file descriptors were left.
            _ = eviction => debug!(%from, "HTTP: connection closed because the connection limit was reached"),
        }
    }

    fn respond(&self, request: &Request<Incoming>) -> Response<Full<Bytes>> {
        let (method, uri) = (request.method(), request.uri());
        let response = route_request(method, uri, request.headers(), &self.hosts, &self.registry);
        let bytes = hyper::body::Body::size_hint(response.body()).lower();
        self.slot
            .add_response(usize::try_from(bytes).unwrap_or(usize::MAX));
        response
    }
}

const TEXT: &str = "text/plain; charset=utf-8";
const JSON: &str = "application/json";
const HTML: &str = "text/html; charset=utf-8";
const PAGE: &str = include_str!("page.html");

fn route_request(
    method: &Method,
    uri: &Uri,
    headers: &HeaderMap,
    hosts: &Hosts,
    registry: &Registry,
) -> Response<Full<Bytes>> {
    if !matches!(*method, Method::GET | Method::HEAD) {
        let mut response = respond(
            StatusCode::METHOD_NOT_ALLOWED,
            TEXT,
            "only GET and HEAD are supported\n",
        );
        let allowed = HeaderValue::from_static("GET, HEAD");
        response.headers_mut().insert(ALLOW, allowed);
        return response;
    }
    // Serve `/healthz` for any host name, because probes may use arbitrary names and the response
    // reveals only that the process is alive.
    if uri.path() == "/healthz" {
        return respond(StatusCode::OK, TEXT, "alive\n");
    }
    if let Err(unknown) = hosts.check(uri, headers) {
        return misdirected(&unknown);
    }
    match uri.path() {
        "/" => page(),
        "/metrics" => match metrics::text(&registry.status()) {
            Ok(text) => respond(StatusCode::OK, metrics::CONTENT_TYPE, text),
            Err(error) => respond(StatusCode::INTERNAL_SERVER_ERROR, TEXT, error.to_string()),
        },
        "/readyz" => readiness(&registry.status()),
        "/status" => json(&registry.status()),
        "/history" => json(&registry.history(since(uri))),
        _ => respond(
            StatusCode::NOT_FOUND,
            TEXT,
            "not found; available paths: /, /metrics, /healthz, /readyz, /status and /history\n",
        ),
    }
}

/// Creates the response to a request for an unknown host.
fn misdirected(host: &str) -> Response<Full<Bytes>> {
    let host: String = host.chars().take(HOST_CHARS_MAX).collect();
    let text = format!(
        "the request is for host {host:?}, which is not a name of this server; expected localhost or an IP address. To allow the \
         name, add http_hosts = [\"NAME\"] at the top of walpost.toml, or set --http-host or WALPOST_HTTP_HOST\n"
    );
    respond(StatusCode::MISDIRECTED_REQUEST, TEXT, text)
}

/// Returns the value of `since=SECONDS` in the query string, or zero.
fn since(uri: &Uri) -> f64 {
    let mut parameters = uri.query().unwrap_or_default().split('&');
    let since = parameters.find_map(|parameter| parameter.strip_prefix("since="));
    since
        .and_then(|seconds| seconds.parse().ok())
        .unwrap_or_default()
}

/// Returns the status page, which is self-contained and may fetch data only from this server.
fn page() -> Response<Full<Bytes>> {
    let mut response = respond(StatusCode::OK, HTML, PAGE);
    let headers = response.headers_mut();
    headers.insert(
        CONTENT_SECURITY_POLICY,
        HeaderValue::from_static(
            "default-src 'none'; connect-src 'self'; img-src data:; style-src 'unsafe-inline'; script-src \
             'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        ),
    );
    response
}

/// Returns a response that lists the readiness of each pipeline. The status code indicates whether
/// all pipelines are ready.
fn readiness(status: &Status) -> Response<Full<Bytes>> {
    let mut text = String::new();
    for pipeline in &status.pipelines {
        let state = pipeline.state.name();
        let reason = pipeline.not_ready.as_deref().unwrap_or(state);
        // Writing to a `String` can't fail.
        let _ = writeln!(text, "{}: {}", pipeline.about.name, Escaped(reason));
    }
    let code = match status.ready {
        true => StatusCode::OK,
        false => StatusCode::SERVICE_UNAVAILABLE,
    };
    respond(code, TEXT, text)
}

fn json(document: &impl serde::Serialize) -> Response<Full<Bytes>> {
    match serde_json::to_string(document) {
        Ok(text) => respond(StatusCode::OK, JSON, escape::in_json(&text).into_owned()),
        Err(error) => respond(StatusCode::INTERNAL_SERVER_ERROR, TEXT, error.to_string()),
    }
}

fn respond(code: StatusCode, kind: &'static str, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = code;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    // This header prevents other sites' pages from embedding the response. Without it, they could
    // embed the response, although they could not read it.
    headers.insert(
        HeaderName::from_static("cross-origin-resource-policy"),
        HeaderValue::from_static("same-origin"),
    );
    response
}
