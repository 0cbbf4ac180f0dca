//! Notifications to systemd over a datagram socket, as described in `sd_notify(3)`.

use std::fs;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, Server, StopMode};
use crate::support::reaper;
use crate::support::wait::WAIT_TIMEOUT;

/// A stand-in for systemd that receives notifications.
struct FakeSystemd {
    socket: UnixDatagram,
    path: PathBuf,
    notifications: Vec<String>,
}

impl FakeSystemd {
    fn new() -> Self {
        let path = reaper::folder("notify").join("socket");
        let socket = UnixDatagram::bind(&path).unwrap();
        socket.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
        Self {
            socket,
            path,
            notifications: Vec::new(),
        }
    }

    fn path(&self) -> &Path {
        &self.path
    }

    /// Waits for the next notification that starts with the given prefix.
    fn wait_for(&mut self, prefix: &str) -> String {
        let mut bytes = [0; 4096];
        loop {
            let length = self.socket.recv(&mut bytes);
            let length = length
                .unwrap_or_else(|error| panic!("{prefix}: {error}: {:?}", self.notifications));
            let message = String::from_utf8_lossy(&bytes[..length]).into_owned();
            let found = message.lines().find(|line| line.starts_with(prefix));
            let found = found.map(str::to_owned);
            self.notifications
                .extend(message.lines().map(str::to_owned));
            if let Some(found) = found {
                return found;
            }
        }
    }

    fn count_notifications(&self, line: &str) -> usize {
        self.notifications
            .iter()
            .filter(|notifications| *notifications == line)
            .count()
    }
}

#[test]
fn sends_ready_status_watchdog_and_stopping_notifications_to_systemd() {
    let fixture = Fixture::new();
    let mut systemd = FakeSystemd::new();
    let mut walpost = fixture
        .run()
        .env("NOTIFY_SOCKET", systemd.path())
        .env("WATCHDOG_USEC", "1000000")
        .start();
    systemd.wait_for("READY=1");
    walpost.wait_for_log(" streaming ");
    if systemd.count_notifications("STATUS=1 of 1 pipelines streaming") == 0 {
        systemd.wait_for("STATUS=1 of 1 pipelines streaming");
    }
    for _ in 0..3 {
        systemd.wait_for("WATCHDOG=1");
    }
    walpost.signal("TERM");
    systemd.wait_for("STOPPING=1");
    walpost.finish().expect_code(0);
    assert_eq!(systemd.count_notifications("READY=1"), 1);
}

#[test]
fn notifies_systemd_of_readiness_and_of_the_reason_for_not_streaming() {
    let server = Server::private(MAJOR, "");
    let fixture = Fixture::on_servers(&server, Broker::shared());
    server.stop(StopMode::Fast);
    let mut systemd = FakeSystemd::new();
    let walpost = fixture.run().env("NOTIFY_SOCKET", systemd.path()).start();
    systemd.wait_for("READY=1");
    let line = systemd
        .notifications
        .iter()
        .rfind(|line| line.starts_with("STATUS="));
    let line = line.expect("a line").clone();
    for text in ["0 of 1 pipelines streaming", &fixture.name, "reconnecting"] {
        assert!(line.contains(text), "{text} in {line}");
    }
    server.start();
    systemd.wait_for("STATUS=1 of 1 pipelines streaming");
    // Without WATCHDOG_USEC, Walpost must not send keep-alive messages.
    assert_eq!(systemd.count_notifications("WATCHDOG=1"), 0);
    walpost.terminate().expect_code(0);
}

#[test]
fn pipeline_that_halts_immediately_never_reports_ready() {
    let fixture = Fixture::bare();
    let mut systemd = FakeSystemd::new();
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
        systemd
            .notifications
            .extend(message.lines().map(str::to_owned));
    }
    assert_eq!(
        systemd.count_notifications("READY=1"),
        0,
        "{:?}",
        systemd.notifications
    );
}

#[test]
fn continues_if_the_systemd_notification_socket_is_removed() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    let mut systemd = FakeSystemd::new();
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
    // Create the socket again, as systemd does after a restart.
    systemd.socket = UnixDatagram::bind(&path).unwrap();
    systemd.socket.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
    systemd.wait_for("WATCHDOG=1");
    walpost.terminate().expect_code(0);
}
