//! The process over HTTP: a page at `/`, `/metrics`, `/healthz`, `/readyz`, `/status`, `/history`.
//!
//! It runs on the supervisor's thread and only reads what the pipelines write down, so no client,
//! however slow, keeps a pipeline waiting.

use std::convert::Infallible;
use std::fmt::Write as _;
use std::net::{SocketAddr, TcpListener};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{
    ALLOW, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderValue,
    X_CONTENT_TYPE_OPTIONS,
};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode, Uri};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};
use tracing::debug;

use super::metrics;
use super::registry::Registry;
use super::status::Status;

/// Where it listens, unless told otherwise.
pub const DEFAULT: &str = "127.0.0.1:9464";
/// What says that it shall not.
pub const OFF: &str = "off";

/// Connections at a time.
const CONNECTIONS: usize = 64;
/// How long a client may take to send a request's head, and how long a connection may be idle.
const HEAD: Duration = Duration::from_secs(10);
/// How long one connection lives, whatever the client does; then it is ended in order, or else cut.
const LIFE: Duration = Duration::from_secs(120);
/// What a request's head may have, in bytes.
const HEAD_BYTES: usize = 16 << 10;
/// Until the next try, where the process has no file descriptor left.
const PAUSE: Duration = Duration::from_millis(500);

/// The address can't be listened at. Exit code 2.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Somebody else has it.
    #[error(
        "--http {0}: the address is in use. Give another one with --http HOST:PORT (or WALPOST_HTTP, or http at the \
         top of walpost.toml); port 0 takes a free one, \"off\" does without"
    )]
    InUse(String),
    /// It is none of this machine's.
    #[error(
        "--http {address}: {error}. Expected HOST:PORT, like 127.0.0.1:9464 or 0.0.0.0:9464, or \"off\""
    )]
    Other {
        /// The address.
        address: String,
        /// Why.
        error: std::io::Error,
    },
}

/// Listens at `address`; at nothing where that is `off`.
///
/// # Errors
/// It can't be listened at.
pub fn listen(address: &str) -> Result<Option<TcpListener>, ListenError> {
    if address == OFF {
        return Ok(None);
    }
    let listener = TcpListener::bind(address).and_then(|listener| {
        listener.set_nonblocking(true)?;
        Ok(listener)
    });
    match listener {
        Ok(listener) => Ok(Some(listener)),
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {
            Err(ListenError::InUse(address.to_owned()))
        }
        Err(error) => Err(ListenError::Other {
            address: address.to_owned(),
            error,
        }),
    }
}

/// Answers whoever connects, for ever.
pub async fn serve(listener: tokio::net::TcpListener, registry: Arc<Registry>) {
    let room = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        // Nobody closes the semaphore.
        let Ok(permit) = Arc::clone(&room).acquire_owned().await else {
            return;
        };
        match listener.accept().await {
            Ok((stream, from)) => {
                let registry = Arc::clone(&registry);
                tokio::spawn(async move {
                    converse(stream, from, registry).await;
                    drop(permit);
                });
            }
            Err(error) => {
                debug!(%error, "HTTP: no connection can be accepted");
                sleep(PAUSE).await;
            }
        }
    }
}

/// Answers the requests of one connection.
async fn converse(stream: tokio::net::TcpStream, from: SocketAddr, registry: Arc<Registry>) {
    let service = service_fn(move |request: Request<Incoming>| {
        let response = answer(request.method(), request.uri(), &registry);
        async move { Ok::<_, Infallible>(response) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .max_buf_size(HEAD_BYTES)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = pin!(connection);
    let ended = match timeout(LIFE, connection.as_mut()).await {
        Ok(ended) => ended,
        Err(_) => {
            connection.as_mut().graceful_shutdown();
            timeout(HEAD, connection).await.unwrap_or(Ok(()))
        }
    };
    if let Err(error) = ended {
        debug!(%error, %from, "HTTP: the connection broke");
    }
}

const TEXT: &str = "text/plain; charset=utf-8";
const JSON: &str = "application/json";
const HTML: &str = "text/html; charset=utf-8";
const PAGE: &str = include_str!("page.html");

fn answer(method: &Method, uri: &Uri, registry: &Registry) -> Response<Full<Bytes>> {
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
    match uri.path() {
        "/" => page(),
        "/metrics" => match metrics::text(&registry.status()) {
            Ok(text) => respond(StatusCode::OK, metrics::CONTENT_TYPE, text),
            Err(error) => respond(StatusCode::INTERNAL_SERVER_ERROR, TEXT, error.to_string()),
        },
        // That there is an answer is the answer.
        "/healthz" => respond(StatusCode::OK, TEXT, "alive\n"),
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
        let _ = writeln!(text, "{}: {said}", pipeline.about.name);
    }
    let code = match status.ready {
        true => StatusCode::OK,
        false => StatusCode::SERVICE_UNAVAILABLE,
    };
    respond(code, TEXT, text)
}

fn json(document: &impl serde::Serialize) -> Response<Full<Bytes>> {
    match serde_json::to_string(document) {
        Ok(text) => respond(StatusCode::OK, JSON, text),
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
    response
}
