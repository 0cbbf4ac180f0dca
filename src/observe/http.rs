//! The process over HTTP: a page at `/`, `/metrics`, `/healthz`, `/readyz`, `/status`, `/history`.
//!
//! It runs on the supervisor's thread and only reads what the pipelines write down, so no client,
//! however slow, keeps a pipeline waiting. Nor does it keep others waiting: see `room`. To a page
//! of a stranger nothing is told: see [`hosts`].

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

use self::hosts::{HostError, Hosts};
use self::room::{Room, Seat};
use self::stream::Stream;
use super::metrics;
use super::registry::Registry;
use super::status::Status;
use crate::escape::{self, Escaped};

pub(crate) mod hosts;
mod room;
mod stream;

/// Where it listens, unless told otherwise.
pub(crate) const DEFAULT: &str = "127.0.0.1:9464";
/// Where there is always a place.
const FREE: &str = "127.0.0.1:0";
/// What says that it shall not.
pub(crate) const OFF: &str = "off";

/// How long a client may take to send a request's head, and how long a connection may be idle.
const HEAD: Duration = Duration::from_secs(5);
/// Connections that the system keeps until they are accepted, if it keeps as many.
const BACKLOG: i32 = 1024;
/// How long one connection lives, whatever the client does; then it is ended in order, or else cut.
const LIFE: Duration = Duration::from_secs(120);
/// What a request's head may have, in bytes.
const HEAD_BYTES: usize = 16 << 10;
/// A host's name is cut there, where it is told.
const HOST_CHARS: usize = 100;
/// Connections that are accepted before those that are open have their turn. Fewer than one address may have, so that one that
/// has sent its request is answered before it would have to give way.
const ACCEPTED_AT_ONCE: usize = 32;
/// Until the next try, where the process has no file descriptor left.
const PAUSE: Duration = Duration::from_millis(100);

fn port_remedy(error: &std::io::Error) -> &'static str {
    match error.kind() {
        std::io::ErrorKind::PermissionDenied => ". Ports below 1024 are for root: use another port",
        _ => "",
    }
}

/// The address can't be listened at.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ListenError {
    /// Somebody else has it.
    #[error(
        "--http {0}: the address is in use. Give another one with --http HOST:PORT (or WALPOST_HTTP, or http at the \
         top of walpost.toml); port 0 takes a free one, \"off\" does without"
    )]
    InUse(String),
    /// It is none of this machine's.
    #[error(
        "--http {address}: {error}. Expected HOST:PORT, like 127.0.0.1:9464 or 0.0.0.0:9464, or \"off\"{}", port_remedy(.error)
    )]
    Other {
        address: String,
        /// Why.
        error: std::io::Error,
    },
    /// It is to have a name that can't be one.
    #[error("{0}")]
    Host(#[from] HostError),
}

/// Where it listens, and the names that it has there.
#[derive(Debug)]
pub(crate) struct Listener {
    tcp: TcpListener,
    hosts: Hosts,
}

/// Listens at `address`; at nothing where that is `off`. `named` are further names to be asked by.
///
/// # Errors
/// It can't be listened at, or a name is none.
pub(crate) fn listen(address: &str, named: &[String]) -> Result<Option<Listener>, ListenError> {
    let mut hosts = Hosts::new(named, true)?;
    if address == OFF {
        return Ok(None);
    }
    let bound = TcpListener::bind(address).and_then(|tcp| {
        tcp.set_nonblocking(true)?;
        // Until it is accepted a connection waits here, and std has few places for that.
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

/// Listens at [`DEFAULT`]; where somebody else has that, as another instance on the same machine, at a free port
/// of the same address, with a warning that names it. `named` are further names to be asked by.
///
/// # Errors
/// It can't be listened at, or a name is none.
pub(crate) fn listen_by_default(named: &[String]) -> Result<Option<Listener>, ListenError> {
    let refused = match listen(DEFAULT, named) {
        Err(refused @ ListenError::InUse(_)) => refused,
        result => return result,
    };
    let Some(listener) = listen(FREE, named)? else {
        return Err(refused);
    };
    let Ok(address) = listener.address() else {
        return Err(refused);
    };
    warn!(
        "{DEFAULT} is in use, perhaps by another Walpost: metrics, health and status are at http://{address} until the next \
         start. Give this instance a fixed address: --http HOST:PORT. To query it now: walpost status --http {address}"
    );
    Ok(Some(listener))
}

impl Listener {
    /// Where, with the port that was taken.
    ///
    /// # Errors
    /// The system does not know.
    pub(crate) fn address(&self) -> std::io::Result<SocketAddr> {
        self.tcp.local_addr()
    }

    /// Answers whoever connects, for ever.
    ///
    /// # Errors
    /// The runtime does not take the socket.
    pub(crate) fn serve(
        self,
        registry: Arc<Registry>,
    ) -> std::io::Result<impl Future<Output = ()> + Send + 'static> {
        let tcp = tokio::net::TcpListener::from_std(self.tcp)?;
        Ok(serve(tcp, Arc::new(self.hosts), registry))
    }
}

async fn serve(listener: tokio::net::TcpListener, hosts: Arc<Hosts>, registry: Arc<Registry>) {
    let room = Arc::<Room>::default();
    let mut accepted = 0;
    loop {
        match listener.accept().await {
            Ok((stream, from)) => {
                let (seat, end) = room.enter(from.ip());
                let conversation = Conversation {
                    from,
                    seat,
                    hosts: Arc::clone(&hosts),
                    registry: Arc::clone(&registry),
                };
                tokio::spawn(conversation.hold(stream, end));
                // A flood waits to be accepted too: one at a time, it would keep others in the queue behind it.
                accepted += 1;
                if accepted % ACCEPTED_AT_ONCE == 0 {
                    yield_now().await;
                }
            }
            Err(error) if is_of_the_client(&error) => {}
            Err(error) => {
                debug!(%error, "HTTP: no connection can be accepted");
                room.shrink();
                sleep(PAUSE).await;
            }
        }
    }
}

/// It had gone again before it was accepted.
fn is_of_the_client(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
    matches!(
        error.kind(),
        ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted
    )
}

/// What is needed to answer one connection.
struct Conversation {
    from: SocketAddr,
    seat: Arc<Seat>,
    hosts: Arc<Hosts>,
    registry: Arc<Registry>,
}

impl Conversation {
    /// Answers its requests, until it is over or has to give way.
    async fn hold(self, stream: tokio::net::TcpStream, end: oneshot::Receiver<()>) {
        let from = self.from;
        let stream = Stream::new(stream, Arc::clone(&self.seat));
        let conversation = Arc::new(self);
        let has_asked = AtomicBool::new(false);
        let service = service_fn(move |request: Request<Incoming>| {
            let conversation = Arc::clone(&conversation);
            let is_first = !has_asked.swap(true, Ordering::Relaxed);
            async move {
                // hyper would answer all requests that were sent without waiting for answers, while nobody else has a turn.
                if !is_first {
                    yield_now().await;
                }
                Ok::<_, Infallible>(conversation.answer(&request))
            }
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD)
            .max_buf_size(HEAD_BYTES)
            .serve_connection(TokioIo::new(stream), service);
        let mut connection = pin!(connection);
        let held = async {
            match timeout(LIFE, connection.as_mut()).await {
                Ok(ended) => ended,
                Err(_) => {
                    connection.as_mut().graceful_shutdown();
                    timeout(HEAD, connection).await.unwrap_or(Ok(()))
                }
            }
        };
        tokio::select! {
            ended = held => {
                if let Err(error) = ended {
                    debug!(%error, %from, "HTTP: the connection broke");
                }
            }
            // Nobody sends anything: it is closed when the place is somebody else's.
            _ = end => debug!(%from, "HTTP: the connection was closed to make room for another"),
        }
    }

    fn answer(&self, request: &Request<Incoming>) -> Response<Full<Bytes>> {
        let (method, uri) = (request.method(), request.uri());
        let response = answer(method, uri, request.headers(), &self.hosts, &self.registry);
        let bytes = hyper::body::Body::size_hint(response.body()).lower();
        self.seat
            .answered(usize::try_from(bytes).unwrap_or(usize::MAX));
        response
    }
}

const TEXT: &str = "text/plain; charset=utf-8";
const JSON: &str = "application/json";
const HTML: &str = "text/html; charset=utf-8";
const PAGE: &str = include_str!("page.html");

fn answer(
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
            "only GET and HEAD are answered\n",
        );
        let allowed = HeaderValue::from_static("GET, HEAD");
        response.headers_mut().insert(ALLOW, allowed);
        return response;
    }
    // It tells nothing but that it answers, and a probe may call it anything.
    if uri.path() == "/healthz" {
        return respond(StatusCode::OK, TEXT, "alive\n");
    }
    if let Err(foreign) = hosts.check(uri, headers) {
        return misdirected(&foreign);
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
            "there are /, /metrics, /healthz, /readyz, /status and /history\n",
        ),
    }
}

/// To whoever asks for another host than this.
fn misdirected(host: &str) -> Response<Full<Bytes>> {
    let host: String = host.chars().take(HOST_CHARS).collect();
    let text = format!(
        "the request is for host {host:?}, which is no name of this Walpost: expected localhost or an address. If it is \
         reached by that name, add it: http_hosts = [\"NAME\"] at the top of walpost.toml, --http-host or \
         WALPOST_HTTP_HOST\n"
    );
    respond(StatusCode::MISDIRECTED_REQUEST, TEXT, text)
}

/// `since=SECONDS` of the query, or all.
fn since(uri: &Uri) -> f64 {
    let mut parameters = uri.query().unwrap_or_default().split('&');
    let since = parameters.find_map(|parameter| parameter.strip_prefix("since="));
    since
        .and_then(|seconds| seconds.parse().ok())
        .unwrap_or_default()
}

/// The page: everything it needs is in it, and it may fetch from here alone.
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

/// A line for each pipeline, and the status code for all of them.
fn readiness(status: &Status) -> Response<Full<Bytes>> {
    let mut text = String::new();
    for pipeline in &status.pipelines {
        let state = pipeline.state.name();
        let said = pipeline.not_ready.as_deref().unwrap_or(state);
        // It can't fail: the text is in memory.
        let _ = writeln!(text, "{}: {}", pipeline.about.name, Escaped(said));
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
    // Pages of others can't embed it, not even where they can't read it.
    headers.insert(
        HeaderName::from_static("cross-origin-resource-policy"),
        HeaderValue::from_static("same-origin"),
    );
    response
}
