//! An OAuth 2.0 token endpoint, queried with the client credentials grant (RFC 6749, section 4.4).
//!
//! The endpoint is configured with the same properties as in librdkafka 2.12
//! (`sasl.oauthbearer.method = oidc`). The properties are not passed to librdkafka, because
//! librdkafka's implementation requires libcurl, always uses the secret with which the client was
//! created, and only accepts tokens that are JWTs.

use std::fmt;
use std::io;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1;
use hyper::rt::{Read, Write};
use hyper::{Method, Request, StatusCode, Uri, header};
use hyper_util::rt::TokioIo;
use openssl::x509::X509VerifyResult;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Deserialize;
use tokio::net::TcpStream;
use tokio::runtime;
use tokio::time::timeout;
use tokio_openssl::SslStream;

use super::properties::{Properties, is_loopback};
use super::tls::Authorities;

/// The property that selects the authentication method. The value `oidc` selects a token endpoint.
pub(crate) const METHOD: &str = "sasl.oauthbearer.method";
const URL: &str = "sasl.oauthbearer.token.endpoint.url";
const CLIENT_IDS: [&str; 2] = [
    "sasl.oauthbearer.client.id",
    "sasl.oauthbearer.client.credentials.client.id",
];
/// The two alternative names of the client secret property.
pub(crate) const SECRETS: [&str; 2] = [
    "sasl.oauthbearer.client.secret",
    "sasl.oauthbearer.client.credentials.client.secret",
];
const SCOPE: &str = "sasl.oauthbearer.scope";
const EXTENSIONS: &str = "sasl.oauthbearer.extensions";
/// The property that specifies whether the client ID and secret are form-encoded. Kafka's Java
/// clients have the same property.
const URLENCODE: &str = "sasl.oauthbearer.header.urlencode";
const GRANT: &str = "sasl.oauthbearer.grant.type";
const AUTHORITIES_FILE: &str = "https.ca.location";
const AUTHORITIES_PEM: &str = "https.ca.pem";

/// Timeout for a request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum size of a response, in bytes.
const RESPONSE_BYTES_MAX: usize = 256 << 10;
/// Error codes that a token endpoint may return: RFC 6749, sections 5.2 and 4.1.2.1, and RFC 8707,
/// section 2.
const ERROR_CODES: [&str; 10] = [
    "access_denied",
    "invalid_client",
    "invalid_grant",
    "invalid_request",
    "invalid_scope",
    "invalid_target",
    "server_error",
    "temporarily_unavailable",
    "unauthorized_client",
    "unsupported_grant_type",
];
/// Characters that are not escaped in `application/x-www-form-urlencoded`.
const FORM: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'*')
    .remove(b'-')
    .remove(b'.')
    .remove(b'_');

type ReadSecret = dyn Fn() -> Result<Option<String>, String> + Send + Sync;

/// A token endpoint and the credentials for it.
pub(crate) struct Endpoint {
    url: String,
    uri: Uri,
    is_tls: bool,
    client_id: String,
    read_secret: Box<ReadSecret>,
    is_urlencoded: bool,
    scope: Option<String>,
    /// Names and values of the SASL extensions that are sent to brokers with each token.
    extensions: Vec<(String, String)>,
    authorities: Authorities,
}

/// The reason why the endpoint returned no token. The secret does not appear in any variant.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum EndpointError {
    #[error(
        "the token endpoint was not queried, because the client secret is missing. Set \"{secret}\" in [kafka], or \
         WALPOST_KAFKA_SASL_OAUTHBEARER_CLIENT_SECRET",
        secret = SECRETS[0]
    )]
    NoSecret,
    #[error("the token endpoint was not queried: failed to reread {name}: {0}", name = SECRETS[0])]
    Secret(String),
    #[error("the token endpoint was not queried: {AUTHORITIES_FILE}: {0}")]
    Authorities(String),
    #[error("the token endpoint is unreachable: {0}")]
    Io(String),
    #[error(
        "the TLS handshake with the token endpoint failed: {0}. If the endpoint's certificate was issued by a private CA, set \
         {AUTHORITIES_FILE} in [kafka] to the certificate of that CA"
    )]
    Tls(String),
    #[error("the token endpoint did not respond within {} s", REQUEST_TIMEOUT.as_secs())]
    Slow,
    #[error("the token endpoint did not return a valid HTTP response: {0}")]
    Http(String),
    #[error(
        "the token endpoint returned {status}{}",
        .code.map_or_else(String::new, |code| format!(": {code}"))
    )]
    Refused {
        status: StatusCode,
        /// One of [`ERROR_CODES`].
        code: Option<&'static str>,
    },
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.url)
    }
}

/// Returns whether a token endpoint is configured in `properties`.
#[must_use]
pub(crate) fn is_named(properties: &Properties) -> bool {
    let method = properties.get(METHOD);
    method.is_some_and(|method| method.trim().eq_ignore_ascii_case("oidc"))
}

impl Endpoint {
    /// Creates the endpoint that is configured in `properties`, and removes the endpoint's
    /// properties. `read_secret` returns the client's current secret.
    ///
    /// # Errors
    /// Returns an error if the properties do not describe a supported endpoint. The message names
    /// the property and what was expected.
    pub(crate) fn from_properties(
        properties: &mut Properties,
        read_secret: impl Fn() -> Result<Option<String>, String> + Send + Sync + 'static,
    ) -> Result<Self, String> {
        let mut take = |name: &str| {
            let value = properties.remove(name)?;
            let value = value.trim();
            (!value.is_empty()).then(|| value.to_owned())
        };
        take(METHOD);
        for name in SECRETS {
            take(name);
        }
        let url = take(URL).ok_or_else(|| {
            format!("{URL} is missing; expected the URL of the token endpoint, https://HOST/PATH")
        })?;
        let [first, second] = CLIENT_IDS.map(&mut take);
        let client_id = first
            .or(second)
            .ok_or_else(|| format!("{} is missing", CLIENT_IDS[0]))?;
        let scope = take(SCOPE);
        let extensions = match take(EXTENSIONS) {
            Some(list) => extensions(&list)?,
            None => Vec::new(),
        };
        let is_urlencoded = match take(URLENCODE).as_deref() {
            None | Some("false") => false,
            Some("true") => true,
            Some(other) => return Err(format!("{URLENCODE} is {other:?}; expected true or false")),
        };
        if let Some(grant) = take(GRANT).filter(|grant| grant != "client_credentials") {
            return Err(format!(
                "{GRANT} is {grant:?}; expected client_credentials. For other grant types, use a kafka_token_command that prints the tokens"
            ));
        }
        let authorities = match (take(AUTHORITIES_FILE), take(AUTHORITIES_PEM)) {
            (None, None) => Authorities::System,
            (Some(location), None) => Authorities::from_location(location),
            (None, Some(pem)) => Authorities::Pem(pem),
            (Some(_), Some(_)) => {
                return Err(format!(
                    "{AUTHORITIES_FILE} and {AUTHORITIES_PEM} are both set; expected at most one of them"
                ));
            }
        };
        let others = properties.keys();
        if let Some(other) = others.into_iter().find(|name| {
            name.starts_with("sasl.oauthbearer.") && *name != "sasl.oauthbearer.config"
        }) {
            return Err(format!(
                "{other} is not supported with {METHOD} = oidc; expected a client ID and a client secret. For other ways to obtain \
                 tokens, use a kafka_token_command that prints them"
            ));
        }
        let (uri, is_tls) = parse_url(&url)?;
        Ok(Self {
            url,
            uri,
            is_tls,
            client_id,
            read_secret: Box::new(read_secret),
            is_urlencoded,
            scope,
            extensions,
            authorities,
        })
    }

    pub(super) fn url(&self) -> &str {
        &self.url
    }

    pub(super) fn extensions(&self) -> &[(String, String)] {
        &self.extensions
    }

    /// Returns a warning, including the remedy, if the connection to the endpoint can be
    /// intercepted.
    #[must_use]
    pub(crate) fn warning(&self) -> Option<String> {
        let host = self.uri.authority()?.as_str();
        let is_local = is_loopback(host) || is_loopback(&format!("{host}:80"));
        (!self.is_tls && !is_local).then(|| {
            format!(
                "{URL} does not use https: anyone on the network between Walpost and {host} can read the client secret and every \
                 token. Use an https URL; if its certificate was issued by a private CA, set {AUTHORITIES_FILE} as well"
            )
        })
    }

    /// Requests a token and returns the response body. Blocks for at most ten seconds; must not be
    /// called from async code.
    ///
    /// # Errors
    /// Returns an error if the request fails, or if the status of the response is not 200.
    pub(super) fn request_token(&self) -> Result<Bytes, EndpointError> {
        let io = |error: io::Error| EndpointError::Io(error.to_string());
        let runtime = runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(io)?;
        let answer = runtime.block_on(async {
            timeout(REQUEST_TIMEOUT, self.exchange())
                .await
                .map_err(|_| EndpointError::Slow)?
        });
        // Shut the runtime down in the background: dropping it would block while a host name is
        // still being resolved.
        runtime.shutdown_background();
        answer
    }

    async fn exchange(&self) -> Result<Bytes, EndpointError> {
        let read = (self.read_secret)().map_err(EndpointError::Secret)?;
        let secret = read
            .filter(|secret| !secret.is_empty())
            .ok_or(EndpointError::NoSecret)?;
        let host = self.uri.host().unwrap_or_default();
        // An IPv6 address is enclosed in brackets in a URI, but not when it is passed to `connect`.
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let port = self.uri.port_u16();
        let port = port.unwrap_or(if self.is_tls { 443 } else { 80 });
        let connect = TcpStream::connect((host, port));
        let stream = connect
            .await
            .map_err(|error| EndpointError::Io(error.to_string()))?;
        match self.is_tls {
            true => {
                let stream = self.start_tls(stream, host).await?;
                self.send_request(TokioIo::new(stream), &secret).await
            }
            false => self.send_request(TokioIo::new(stream), &secret).await,
        }
    }

    async fn start_tls(
        &self,
        stream: TcpStream,
        host: &str,
    ) -> Result<SslStream<TcpStream>, EndpointError> {
        let connector = self.authorities.connector();
        let builder = connector.map_err(EndpointError::Authorities)?;
        let tls = |error: &dyn fmt::Display| EndpointError::Tls(error.to_string());
        let configured = builder.build().configure().map_err(|error| tls(&error))?;
        let ssl = configured.into_ssl(host).map_err(|error| tls(&error))?;
        let mut stream = SslStream::new(ssl, stream).map_err(|error| tls(&error))?;
        match std::pin::Pin::new(&mut stream).connect().await {
            Ok(()) => Ok(stream),
            Err(error) => {
                let verified = stream.ssl().verify_result();
                Err(match verified == X509VerifyResult::OK {
                    true => EndpointError::Tls(error.to_string()),
                    false => EndpointError::Tls(format!(
                        "the endpoint's certificate is not valid: {}",
                        verified.error_string()
                    )),
                })
            }
        }
    }

    async fn send_request(
        &self,
        stream: impl Read + Write + Unpin,
        secret: &str,
    ) -> Result<Bytes, EndpointError> {
        let http = |error: hyper::Error| EndpointError::Http(error.to_string());
        let (mut sender, connection) = http1::handshake(stream).await.map_err(http)?;
        let request = self
            .request(secret)
            .map_err(|error| EndpointError::Http(error.to_string()))?;
        let answer = async {
            let response = sender.send_request(request).await?;
            let status = response.status();
            let body = Limited::new(response.into_body(), RESPONSE_BYTES_MAX);
            Ok::<_, hyper::Error>((status, body.collect().await))
        };
        tokio::pin!(connection, answer);
        // Don't wait for the connection to close, because it may stay open after the response is
        // complete.
        let (status, body) = tokio::select! {
            answer = &mut answer => answer.map_err(http)?,
            ended = &mut connection => {
                ended.map_err(http)?;
                answer.await.map_err(http)?
            }
        };
        let body = body.map_err(|error| EndpointError::Http(error.to_string()))?;
        let body = body.to_bytes();
        match status {
            StatusCode::OK => Ok(body),
            status => Err(EndpointError::Refused {
                status,
                code: error_code(&body),
            }),
        }
    }

    fn request(&self, secret: &str) -> Result<Request<Full<Bytes>>, hyper::http::Error> {
        let form = |text: &str| utf8_percent_encode(text, FORM).to_string();
        let mut body = "grant_type=client_credentials".to_owned();
        if let Some(scope) = &self.scope {
            body.push_str("&scope=");
            body.push_str(&form(scope));
        }
        // RFC 6749, section 2.3.1 requires that the client ID and secret be form-encoded, but
        // Kafka's clients encode them only if configured to.
        let login = match self.is_urlencoded {
            true => format!("{}:{}", form(&self.client_id), form(secret)),
            false => format!("{}:{secret}", self.client_id),
        };
        let authority = self
            .uri
            .authority()
            .map_or("", |authority| authority.as_str());
        let path = self.uri.path_and_query().map_or("/", |path| path.as_str());
        Request::builder()
            .method(Method::POST)
            .uri(path)
            .header(header::HOST, authority)
            .header(
                header::AUTHORIZATION,
                format!("Basic {}", STANDARD.encode(login)),
            )
            .header(header::CONTENT_TYPE, "application/x-www-form-urlencoded")
            .header(header::ACCEPT, "application/json")
            .header(header::CONNECTION, "close")
            .header(
                header::USER_AGENT,
                concat!("walpost/", env!("CARGO_PKG_VERSION")),
            )
            .body(Full::from(body))
    }
}

/// Parses the endpoint's URL, and returns whether it uses TLS.
fn parse_url(url: &str) -> Result<(Uri, bool), String> {
    let error = |found: &str| format!("{URL}: {found}; expected https://HOST[:PORT]/PATH");
    let uri: Uri = url
        .parse()
        .map_err(|_| error("the value is not a valid URL"))?;
    let is_tls = match uri.scheme_str() {
        Some("https") => true,
        Some("http") => false,
        _ => return Err(error("the value is not an HTTP URL")),
    };
    match uri.authority() {
        Some(authority) if authority.as_str().contains('@') => {
            Err(error("the URL contains credentials, which might be logged"))
        }
        Some(_) => Ok((uri, is_tls)),
        None => Err(error("the URL does not contain a host")),
    }
}

/// Parses `NAME=VALUE,...`.
fn extensions(list: &str) -> Result<Vec<(String, String)>, String> {
    let parts = list.split(',').map(str::trim);
    let read = parts.filter(|part| !part.is_empty()).map(|part| {
        let (name, value) = part.split_once('=')?;
        Some((name.trim().to_owned(), value.trim().to_owned()))
    });
    let read: Option<_> = read.collect();
    read.ok_or_else(|| format!("{EXTENSIONS} is {list:?}; expected NAME=VALUE,..."))
}

/// Returns the error code in a response. The error description is not reported, because it may
/// quote the request, including the client secret, in any encoding.
fn error_code(body: &[u8]) -> Option<&'static str> {
    #[derive(Deserialize)]
    struct Answer {
        error: String,
    }
    let answer: Answer = serde_json::from_slice(body).ok()?;
    ERROR_CODES.into_iter().find(|code| *code == answer.error)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoint_from(given: &[(&str, &str)]) -> Result<(Endpoint, Properties), String> {
        let given = given
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let mut properties: Properties = given.collect();
        let endpoint =
            Endpoint::from_properties(&mut properties, || Ok(Some("secret".to_owned())))?;
        Ok((endpoint, properties))
    }

    const REQUIRED: [(&str, &str); 3] = [
        (METHOD, "OIDC"),
        (URL, "https://login.example.com/oauth2/token?tenant=1"),
        ("sasl.oauthbearer.client.id", "shop:1"),
    ];

    #[test]
    fn requests_a_token_with_the_client_credentials_grant() {
        let (endpoint, left) = endpoint_from(&[
            REQUIRED[0],
            REQUIRED[1],
            REQUIRED[2],
            (SCOPE, "events:write a&b"),
            (EXTENSIONS, "logicalCluster=lkc-1, identityPoolId = pool-1"),
            (AUTHORITIES_FILE, "/etc/ca.pem"),
            ("sasl.oauthbearer.client.secret", "old"),
            ("linger.ms", "5"),
        ])
        .expect("an endpoint");
        let left: Vec<_> = left.into_keys().collect();
        assert_eq!(left, ["linger.ms"]);
        assert_eq!(
            endpoint.extensions(),
            [("logicalCluster", "lkc-1"), ("identityPoolId", "pool-1")]
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
        );
        assert_eq!(
            endpoint.authorities,
            Authorities::Location("/etc/ca.pem".to_owned())
        );
        let request = endpoint.request("s/ä").expect("a request");
        assert_eq!(request.uri(), "/oauth2/token?tenant=1");
        let header = |name| request.headers()[name].to_str().expect("text");
        assert_eq!(header(header::HOST), "login.example.com");
        let login = header(header::AUTHORIZATION)
            .strip_prefix("Basic ")
            .expect("a login");
        assert_eq!(
            STANDARD.decode(login).expect("base64"),
            "shop:1:s/ä".as_bytes()
        );
        let body = request.into_body();
        let whole = runtime::Builder::new_current_thread()
            .build()
            .expect("a runtime")
            .block_on(body.collect())
            .expect("a body");
        assert_eq!(
            whole.to_bytes(),
            "grant_type=client_credentials&scope=events%3Awrite%20a%26b"
        );

        let encoded = endpoint_from(&[REQUIRED[0], REQUIRED[1], REQUIRED[2], (URLENCODE, "true")]);
        let (endpoint, _) = encoded.expect("an endpoint");
        let request = endpoint.request("s/ä").expect("a request");
        let login = STANDARD.encode("shop%3A1:s%2F%C3%A4");
        assert_eq!(
            request.headers()[header::AUTHORIZATION],
            format!("Basic {login}")
        );
    }

    #[test]
    fn rejects_invalid_token_endpoint_properties() {
        for (name, value, expected) in [
            (URL, "", "is missing"),
            (URL, "login.example.com", "the value is not an HTTP URL"),
            (
                URL,
                "ftp://login.example.com",
                "the value is not an HTTP URL",
            ),
            (URL, "https://a:b@login.example.com", "contains credentials"),
            (
                URL,
                "https://login example.com",
                "the value is not a valid URL",
            ),
            ("sasl.oauthbearer.client.id", " ", "is missing"),
            (EXTENSIONS, "a", "NAME=VALUE"),
            (URLENCODE, "yes", "true or false"),
            (
                GRANT,
                "urn:ietf:params:oauth:grant-type:jwt-bearer",
                "kafka_token_command",
            ),
            (
                "sasl.oauthbearer.assertion.file",
                "/a",
                "kafka_token_command",
            ),
            (AUTHORITIES_PEM, "x", "both set"),
        ] {
            let mut given = REQUIRED.to_vec();
            given.push((AUTHORITIES_FILE, "/etc/ca.pem"));
            given.push((name, value));
            let error = endpoint_from(&given).expect_err(value);
            assert!(error.contains(expected) && error.contains(name), "{error}");
        }
    }

    #[test]
    fn warns_about_a_remote_endpoint_without_tls() {
        for (url, host) in [
            ("https://login.example.com/token", None),
            ("http://localhost:8080/token", None),
            ("http://127.0.0.1/token", None),
            ("http://[::1]:8080/token", None),
            (
                "http://login.example.com",
                Some("and login.example.com can"),
            ),
        ] {
            let result = endpoint_from(&[REQUIRED[0], (URL, url), REQUIRED[2]]);
            let warning = result.expect("an endpoint").0.warning();
            match (host, warning) {
                (Some(host), Some(warning)) => assert!(warning.contains(host), "{warning}"),
                (None, None) => {}
                other => panic!("{url}: {other:?}"),
            }
        }
    }

    #[test]
    fn extracts_only_known_error_codes_from_a_response() {
        let code = |body: &str| error_code(body.as_bytes());
        assert_eq!(
            code(r#"{"error": "invalid_client", "error_description": "Basic c2hvcDpodW50ZXIy"}"#),
            Some("invalid_client")
        );
        for body in [
            r#"{"error": "Basic c2hvcDpodW50ZXIy"}"#,
            r#"{"error": ["invalid_client"]}"#,
            r#"{"error_description": "invalid_client"}"#,
            "<html>invalid_client",
            "",
        ] {
            assert_eq!(code(body), None, "{body}");
        }
    }
}
