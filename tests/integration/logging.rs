//! Delivery continues if nothing reads standard error, or if its reader has exited.

use std::fs::File;
use std::io::{BufRead, BufReader, PipeReader};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use crate::support::fixture::Fixture;
use crate::support::http::Http;
use crate::support::process::free_port;
use crate::support::wait::wait_until;
use crate::support::walpost::Walpost;

const DROPPED_METRIC: &str = "walpost_log_lines_dropped_total";
/// Flags that make librdkafka log many lines for each request.
const VERBOSE_FLAGS: [&str; 4] = ["--log-level", "trace", "-X", "debug=all"];

/// Starts Walpost with a pipe as its standard error.
fn start(fixture: &Fixture, arguments: &[&str]) -> (Walpost, Http, PipeReader) {
    let (reader, writer) = std::io::pipe().unwrap();
    let address = format!("127.0.0.1:{}", free_port());
    let run = fixture.run().args(["--http", &address]).args(arguments);
    let walpost = run.log_to(File::from(OwnedFd::from(writer))).start();
    wait_until("the HTTP server", || TcpStream::connect(&address).is_ok());
    (walpost, Http::at(&address), reader)
}

fn deliver_and_stop(fixture: &Fixture, walpost: Walpost) {
    let aggregate = fixture.aggregate(1);
    for _ in 0..43 {
        fixture.insert(&aggregate, "k");
    }
    fixture.wait_until_confirmed();
    assert!(fixture.records().len() >= 43);
    let started = Instant::now();
    walpost.terminate().expect_code(0);
    let duration = started.elapsed();
    assert!(duration < Duration::from_secs(30), "{duration:?}");
}

#[test]
fn delivers_events_after_the_log_reader_has_exited() {
    let fixture = Fixture::new();
    let (walpost, http, reader) = start(&fixture, &[]);
    let mut lines = BufReader::new(reader).lines();
    assert!(lines.any(|line| line.unwrap().contains("streaming")));
    drop(lines);
    walpost.signal("HUP");
    wait_until("a dropped line", || http.metrics()[DROPPED_METRIC] > 0.0);
    deliver_and_stop(&fixture, walpost);
}

#[test]
fn delivers_events_and_stops_on_request_while_the_log_is_not_read() {
    let fixture = Fixture::new();
    let (walpost, http, reader) = start(&fixture, &VERBOSE_FLAGS);
    deliver_and_stop(&fixture, walpost);
    drop((http, reader));
}

#[test]
fn reports_how_many_log_lines_were_dropped() {
    let fixture = Fixture::new();
    let (walpost, http, reader) = start(&fixture, &VERBOSE_FLAGS);
    let aggregate = fixture.aggregate(1);
    wait_until("dropped lines", || {
        fixture.insert(&aggregate, "k");
        http.metrics()[DROPPED_METRIC] > 0.0
    });
    let mut lines = BufReader::new(reader).lines();
    assert!(lines.any(|line| line.unwrap().contains("log lines were dropped")));
    // Keeps reading the log, so that Walpost is not blocked when it writes more.
    let rest = std::thread::spawn(move || lines.map_while(Result::ok).count());
    deliver_and_stop(&fixture, walpost);
    rest.join().unwrap();
}
