//! `run --http`: the HTTP listener, its responses, and how clients are isolated from each other.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::support::http::Http;
use crate::support::wait::WAIT_TIMEOUT;

mod address;
mod flood;
mod names;
mod readiness;

const ANY_PORT: [&str; 2] = ["--http", "127.0.0.1:0"];

/// The probe timeout in the Kubernetes manifests.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);

/// Sends a probe on a new connection, as the kubelet does, but with a longer timeout. Returns the
/// response.
fn probe(http: &Http, path: &str) -> Result<String, std::io::Error> {
    let address = http.address().parse().unwrap();
    let started = Instant::now();
    let mut stream = TcpStream::connect_timeout(&address, WAIT_TIMEOUT)?;
    let head = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    stream.write_all(head.as_bytes())?;
    let mut answer = String::new();
    let mut bytes = [0; 1024];
    loop {
        let left = WAIT_TIMEOUT.checked_sub(started.elapsed());
        let left = left
            .filter(|left| !left.is_zero())
            .ok_or(ErrorKind::TimedOut)?;
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut bytes)? {
            0 => return Ok(answer),
            read => answer += &String::from_utf8_lossy(&bytes[..read]),
        }
    }
}
