//! Notifications to systemd over a datagram socket, as described in `sd_notify(3)`.

use std::fs;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, Server, Stop};
use crate::support::reaper;
use crate::support::wait::WAIT_TIMEOUT;

/// A stand-in for systemd.
struct Manager {
    socket: UnixDatagram,
    path: PathBuf,
    told: Vec<String>,
}

impl Manager {
    fn new() -> Self {
        let path = reaper::folder("notify").join("socket");
        let socket = UnixDatagram::bind(&path).unwrap();
        socket.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
        Self {
            socket,
            path,
            told: Vec::new(),
        }
    }

    fn path(&self) -> &Path {
        &self.path
    }

    /// Waits for the next line with this prefix.
    fn wait_for(&mut self, begins: &str) -> String {
        let mut bytes = [0; 4096];
        loop {
            let length = self.socket.recv(&mut bytes);
            let length =
                length.unwrap_or_else(|error| panic!("{begins}: {error}: {:?}", self.told));
            let message = String::from_utf8_lossy(&bytes[..length]).into_owned();
            let found = message.lines().find(|line| line.starts_with(begins));
            let found = found.map(str::to_owned);
            self.told.extend(message.lines().map(str::to_owned));
            if let Some(found) = found {
                return found;
            }
        }
    }

    fn was_told(&self, line: &str) -> usize {
        self.told.iter().filter(|told| *told == line).count()
    }
}

#[test]
fn notifies_systemd_of_readiness_state_watchdog_and_stop() {
    let fixture = Fixture::new();
    let mut systemd = Manager::new();
    let mut walpost = fixture
        .run()
        .env("NOTIFY_SOCKET", systemd.path())
        .env("WATCHDOG_USEC", "1000000")
        .start();
    systemd.wait_for("READY=1");
    walpost.wait_for_log(" streaming ");
    if systemd.was_told("STATUS=1 of 1 pipelines streaming") == 0 {
        systemd.wait_for("STATUS=1 of 1 pipelines streaming");
    }
    for _ in 0..3 {
        systemd.wait_for("WATCHDOG=1");
    }
    walpost.signal("TERM");
    systemd.wait_for("STOPPING=1");
    walpost.finish().expect_code(0);
    assert_eq!(systemd.was_told("READY=1"), 1);
}

#[test]
fn startup_completes_while_postgresql_is_down_and_the_status_line_shows_the_reason() {
    let server = Server::private(MAJOR, "");
    let fixture = Fixture::on_servers(&server, Broker::shared());
    server.stop(Stop::Fast);
    let mut systemd = Manager::new();
    let walpost = fixture.run().env("NOTIFY_SOCKET", systemd.path()).start();
    systemd.wait_for("READY=1");
    let line = systemd
        .told
        .iter()
        .rfind(|line| line.starts_with("STATUS="));
    let line = line.expect("a line").clone();
    for text in ["0 of 1 pipelines streaming", &fixture.name, "reconnecting"] {
        assert!(line.contains(text), "{text} in {line}");
    }
    server.start();
    systemd.wait_for("STATUS=1 of 1 pipelines streaming");
    // Without WATCHDOG_USEC, no keep-alive messages are expected.
    assert_eq!(systemd.was_told("WATCHDOG=1"), 0);
    walpost.terminate().expect_code(0);
}

#[test]
fn pipeline_that_halts_at_once_is_never_ready() {
    let fixture = Fixture::bare();
    let mut systemd = Manager::new();
    fixture
        .run()
        .env("NOTIFY_SOCKET", systemd.path())
        .finish()
        .expect_code(3);
    systemd
        .socket
        .set_read_timeout(Some(Duration::from_millis(1)))
        .unwrap();
    let mut bytes = [0; 4096];
    while let Ok(length) = systemd.socket.recv(&mut bytes) {
        let message = String::from_utf8_lossy(&bytes[..length]);
        systemd.told.extend(message.lines().map(str::to_owned));
    }
    assert_eq!(systemd.was_told("READY=1"), 0, "{:?}", systemd.told);
}

#[test]
fn removed_socket_stops_nothing() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    let mut systemd = Manager::new();
    let walpost = fixture
        .run()
        .env("NOTIFY_SOCKET", systemd.path())
        .env("WATCHDOG_USEC", "200000")
        .start();
    systemd.wait_for("READY=1");
    let path = systemd.path().to_owned();
    drop(systemd.socket);
    fs::remove_file(&path).unwrap();
    fixture.insert(&aggregate, "k");
    fixture.wait_for_records(1);
    // As after a restart of systemd.
    systemd.socket = UnixDatagram::bind(&path).unwrap();
    systemd.socket.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
    systemd.wait_for("WATCHDOG=1");
    walpost.terminate().expect_code(0);
}
