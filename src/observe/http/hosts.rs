//! The host names that are accepted in requests to this server.
//!
//! A browser sends the name in its address bar as the `Host` header. A malicious site can make its
//! own name resolve to this server (DNS rebinding) and then read the responses, because the browser
//! treats the server as part of that site. But the site can only use its own name, not an address
//! or another name. Therefore, requests for unknown names are rejected.

use std::net::{Ipv4Addr, Ipv6Addr};

use hyper::{HeaderMap, Uri, header};

/// Suffixes of names that can't be registered on the internet. They are used for Kubernetes
/// services (`svc` and `cluster.local`), for private networks (`internal`, which ICANN has
/// reserved) and for multicast DNS (`local`, RFC 6762).
const PRIVATE_SUFFIXES: [&str; 3] = [".svc", ".internal", ".local"];
/// The value of `http_hosts` that allows any host name.
const ANY_HOST: &str = "*";

/// The host names that are accepted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Hosts {
    named: Vec<String>,
    /// Whether the listener is reachable only from this machine.
    pub(super) is_local: bool,
}

/// The error returned if text is not a valid host name.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "http_hosts: {0:?} is not a host name; expected a name without a scheme or port, like walpost.example.com, or \"*\" \
     for any name"
)]
pub(crate) struct HostError(String);

impl Hosts {
    /// Creates an instance that accepts `localhost`, IP addresses, and the names in `named`.
    /// `is_local` is true if the listener is reachable only from this machine. If `is_local` is
    /// false, names without a dot and names with a private suffix are accepted too: scrapers use
    /// such names for a service in a container, and a site on the internet can't have such a name.
    ///
    /// # Errors
    /// Returns an error if a name is invalid.
    pub(crate) fn new(named: &[String], is_local: bool) -> Result<Self, HostError> {
        let named: Result<_, _> = named.iter().map(|name| normalize(name)).collect();
        Ok(Self {
            named: named?,
            is_local,
        })
    }

    /// Checks whether the host named in a request is accepted.
    ///
    /// # Errors
    /// Returns the name of the host if it is not accepted.
    pub(crate) fn check(&self, uri: &Uri, headers: &HeaderMap) -> Result<(), String> {
        let mut hosts = headers.get_all(header::HOST).iter();
        let host = hosts.next();
        // A request without a host, as in HTTP/1.0, does not come from a browser.
        let in_header = host.map(|host| String::from_utf8_lossy(host.as_bytes()));
        if hosts.next().is_some() {
            return Err("(more than one)".to_owned());
        }
        let in_uri = uri.authority().map(|authority| authority.as_str().into());
        let requested = in_header.into_iter().chain(in_uri);
        match requested.into_iter().find(|host| !self.accepts(host)) {
            None => Ok(()),
            Some(unknown) => Err(unknown.into_owned()),
        }
    }

    fn accepts(&self, host: &str) -> bool {
        if self.named.iter().any(|name| name == ANY_HOST) {
            return true;
        }
        let Some(name) = without_port(host) else {
            return false;
        };
        let name = name.to_ascii_lowercase();
        if let Some(address) = name.strip_prefix('[') {
            let address = address.strip_suffix(']');
            return address.is_some_and(|address| address.parse::<Ipv6Addr>().is_ok());
        }
        if name.parse::<Ipv4Addr>().is_ok() {
            return true;
        }
        let name = name.strip_suffix('.').unwrap_or(&name);
        name == "localhost"
            || self.named.iter().any(|named| named == name)
            || !self.is_local && is_private_name(name)
    }
}

/// Returns `host` without the port, or `None` if the port is invalid.
fn without_port(host: &str) -> Option<&str> {
    match host.rsplit_once(':') {
        Some((name, port)) if !port.contains(']') => {
            let is_port = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
            is_port.then_some(name)
        }
        _ => Some(host),
    }
}

fn is_private_name(name: &str) -> bool {
    is_name(name) && (!name.contains('.') || PRIVATE_SUFFIXES.iter().any(|end| name.ends_with(end)))
}

fn is_name(name: &str) -> bool {
    let is_part = |part: &str| {
        let is_legal = |c: u8| c.is_ascii_alphanumeric() || matches!(c, b'-' | b'_');
        (1..=63).contains(&part.len()) && part.bytes().all(is_legal)
    };
    name.len() <= 253 && name.split('.').all(is_part)
}

/// Normalizes a configured host name.
fn normalize(name: &str) -> Result<String, HostError> {
    let normalized = name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase();
    match normalized == ANY_HOST || is_name(&normalized) {
        true => Ok(normalized),
        false => Err(HostError(name.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use hyper::header::HeaderValue;

    use super::*;

    fn accepts(named: &[&str], is_local: bool, host: &str) -> bool {
        let named: Vec<_> = named.iter().map(|&name| name.to_owned()).collect();
        let hosts = Hosts::new(&named, is_local).expect("names");
        let mut headers = HeaderMap::new();
        let host = HeaderValue::from_bytes(host.as_bytes()).expect("a header");
        headers.insert(header::HOST, host);
        hosts.check(&Uri::from_static("/status"), &headers).is_ok()
    }

    #[test]
    fn local_listener_accepts_only_localhost_and_ip_addresses() {
        for host in [
            "localhost",
            "LOCALHOST:9464",
            "localhost.",
            "127.0.0.1:1",
            "[::1]",
            "[::1]:9464",
            "10.1.2.3",
        ] {
            assert!(accepts(&[], true, host), "{host}");
        }
        for host in [
            "",
            ":9464",
            "walpost",
            "x.svc",
            "rebound.example",
            "localhost.rebound.example",
            "127.0.0.1.rebound.example",
            "rebound.example:localhost",
            "localhost:",
            "localhost@rebound.example",
            "[::1",
            "[::1]x",
            "[localhost]",
            "::1",
            "1",
            "é",
        ] {
            assert!(!accepts(&[], true, host), "{host}");
        }
    }

    #[test]
    fn public_listener_accepts_only_internal_host_names_by_default() {
        for host in [
            "walpost:9464",
            "a.shop.svc",
            "a.svc.cluster.local.",
            "db.internal",
        ] {
            assert!(accepts(&[], false, host), "{host}");
        }
        for host in [
            "a.example",
            "svc.example",
            "a.svc.example",
            ".svc",
            "",
            "a b",
        ] {
            assert!(!accepts(&[], false, host), "{host}");
        }
    }

    #[test]
    fn accepts_configured_names_with_any_case_and_port() {
        let named = ["Walpost.Example.Com."];
        assert!(accepts(&named, true, "walpost.example.com:443"));
        assert!(!accepts(&named, true, "x.walpost.example.com"));
        assert!(accepts(&["*"], true, "whatever.example"));
        for wrong in ["", ".", "a:1", "http://a", "*.a", "a/b", "a b"] {
            let refused = Hosts::new(&[wrong.to_owned()], true);
            assert_eq!(refused, Err(HostError(wrong.to_owned())));
        }
    }

    #[test]
    fn rejects_requests_that_specify_more_than_one_host() {
        let hosts = Hosts::new(&[], true).expect("names");
        let mut headers = HeaderMap::new();
        let plain = Uri::from_static("/status");
        assert_eq!(hosts.check(&plain, &headers), Ok(()));
        headers.append(header::HOST, HeaderValue::from_static("localhost"));
        let absolute = Uri::from_static("http://rebound.example/status");
        assert!(hosts.check(&absolute, &headers).is_err());
        headers.append(header::HOST, HeaderValue::from_static("localhost"));
        assert!(hosts.check(&plain, &headers).is_err());
    }
}
