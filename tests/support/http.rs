//! HTTP requests to a running Walpost process. Every response is searched for secrets.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpStream;

use serde_json::Value;

use super::secrets::{self, OutputStream};
use super::wait::WAIT_TIMEOUT;

/// An HTTP response.
#[derive(Debug)]
pub(crate) struct HttpResponse {
    pub(crate) code: u16,
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) body: String,
}

/// The HTTP server of a Walpost process.
#[derive(Clone, Debug)]
pub(crate) struct Http {
    address: String,
}

impl Http {
    /// Creates a client for the server at `HOST:PORT`.
    pub(crate) fn at(address: &str) -> Self {
        Self {
            address: address.to_owned(),
        }
    }

    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    pub(crate) fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
        stream
    }

    pub(crate) fn get(&self, path: &str) -> HttpResponse {
        self.request("GET", path)
    }

    pub(crate) fn request(&self, method: &str, path: &str) -> HttpResponse {
        self.request_with(method, path, &format!("Host: {}\r\n", self.address))
    }

    /// Like [`Http::request`], but with the given header lines instead of a Host header that
    /// contains the server's address.
    pub(crate) fn request_with(&self, method: &str, path: &str, headers: &str) -> HttpResponse {
        let mut stream = self.connect();
        let head = format!("{method} {path} HTTP/1.1\r\n{headers}Connection: close\r\n\r\n");
        stream.write_all(head.as_bytes()).unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        secrets::expect_none(OutputStream::Error, &text);
        let (head, body) = text.split_once("\r\n\r\n").expect("a head");
        let mut lines = head.lines();
        let code = lines.next().and_then(|line| line.split(' ').nth(1));
        let headers = lines.filter_map(|line| line.split_once(": "));
        HttpResponse {
            code: code.unwrap().parse().unwrap(),
            headers: headers
                .map(|(name, value)| (name.to_lowercase(), value.to_owned()))
                .collect(),
            body: body.to_owned(),
        }
    }

    /// Returns the JSON document at `/status`.
    pub(crate) fn status(&self) -> Value {
        serde_json::from_str(&self.get("/status").body).unwrap()
    }

    /// Returns the first pipeline in `/status`.
    pub(crate) fn pipeline(&self) -> Value {
        self.status()["pipelines"][0].clone()
    }

    /// Returns the samples in `/metrics`. Each key consists of a metric's name and labels, exactly
    /// as printed.
    pub(crate) fn metrics(&self) -> BTreeMap<String, f64> {
        let text = self.get("/metrics").body;
        let samples = text.lines().filter(|line| !line.starts_with('#'));
        samples
            .map(|line| {
                let (name, value) = line.rsplit_once(' ').unwrap();
                (name.to_owned(), value.parse().unwrap())
            })
            .collect()
    }

    /// Returns the value of a pipeline's metric, or `None` if there is no such sample.
    pub(crate) fn metric(&self, name: &str, pipeline: &str) -> Option<f64> {
        let name = format!("{name}{{pipeline=\"{pipeline}\"}}");
        self.metrics().get(&name).copied()
    }
}
