//! Reports the process's state to systemd if systemd requests notifications; see `sd_notify(3)`.

use std::env;
use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tracing::{debug, warn};

use crate::escape::Escaped;
use crate::model::lifecycle::State;
use crate::observe::problem::Kind;
use crate::observe::registry::Registry;
use crate::observe::status::{PipelineStatus, Status};
use crate::pipeline::order::Order;

/// How often to check whether there is a change to report.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Minimum interval between changes of the status line.
const STATUS_INTERVAL_MIN: Duration = Duration::from_secs(5);
/// Startup counts as complete after this time even if servers are unavailable. Walpost recovers
/// from outages without intervention, so `systemctl start` should not wait for an outage to end.
const STARTUP_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum length of the status line.
const STATUS_CHARS_MAX: usize = 200;

/// A socket for notifications to systemd.
#[derive(Debug)]
pub(super) struct Systemd {
    socket: UnixDatagram,
    address: SocketAddr,
    /// The watchdog timeout set by systemd, if any.
    watchdog: Option<Duration>,
}

impl Systemd {
    /// Opens the socket named by the environment variables that systemd sets. Returns `None` if
    /// systemd did not request notifications.
    pub(super) fn from_env() -> Option<Self> {
        let address = env::var_os("NOTIFY_SOCKET")?;
        let number = |name| env::var(name).ok()?.parse::<u64>().ok();
        let is_ours = number("WATCHDOG_PID").is_none_or(|pid| pid == u64::from(std::process::id()));
        let watchdog = number("WATCHDOG_USEC").filter(|micros| *micros > 0 && is_ours);
        match open_socket(&address) {
            Ok((socket, address)) => Some(Self {
                socket,
                address,
                watchdog: watchdog.map(Duration::from_micros),
            }),
            Err(error) => {
                warn!(%error, socket = ?address, "sd_notify failed (NOTIFY_SOCKET)");
                None
            }
        }
    }

    /// Reports the process's state until the process ends.
    pub(super) async fn report_state(
        self,
        registry: Arc<Registry>,
        mut orders: watch::Receiver<Order>,
    ) {
        let mut reporter = Reporter::new(self.watchdog, Instant::now());
        let poll_interval = self
            .watchdog
            .map_or(POLL_INTERVAL, |timeout| POLL_INTERVAL.min(timeout / 2));
        let mut interval = tokio::time::interval(poll_interval.max(Duration::from_millis(10)));
        let mut stopping = false;
        loop {
            tokio::select! {
                _ = interval.tick() => {}
                () = wait_for_drain(&mut orders), if !stopping => {
                    stopping = true;
                    self.send("STOPPING=1\nSTATUS=stopping\n");
                }
            }
            let message = reporter.next_message(&registry.status(), stopping, Instant::now());
            if !message.is_empty() {
                self.send(&message);
            }
        }
    }

    fn send(&self, message: &str) {
        // A failed notification is harmless. Log the failure at debug level only, so that repeated
        // failures don't flood the log.
        let sent = self.socket.send_to_addr(message.as_bytes(), &self.address);
        if let Err(error) = sent {
            debug!(%error, "sd_notify failed");
        }
    }
}

async fn wait_for_drain(orders: &mut watch::Receiver<Order>) {
    // `wait_for` returns an error only while the process is exiting.
    let _ = orders.wait_for(|order| *order == Order::Drain).await;
}

/// Opens the socket. A name that starts with `@` refers to the abstract namespace, which has no
/// files.
fn open_socket(address: &OsStr) -> io::Result<(UnixDatagram, SocketAddr)> {
    let address = match address.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(address)?,
    };
    let socket = UnixDatagram::unbound()?;
    socket.set_nonblocking(true)?;
    Ok((socket, address))
}

/// A state machine that determines the next message to systemd. Does no I/O.
#[derive(Debug)]
struct Reporter {
    started_at: Instant,
    is_ready: bool,
    /// The last status line, and when it was last compared with the current state.
    status: Option<(String, Instant)>,
    /// The interval between watchdog notifications, and when the next one is due.
    watchdog: Option<(Duration, Instant)>,
}

impl Reporter {
    fn new(watchdog_timeout: Option<Duration>, now: Instant) -> Self {
        Self {
            started_at: now,
            is_ready: false,
            status: None,
            watchdog: watchdog_timeout.map(|timeout| (timeout / 2, now)),
        }
    }

    /// Returns the next message to send, or an empty string if no message is due.
    fn next_message(&mut self, status: &Status, stopping: bool, now: Instant) -> String {
        let mut message = String::new();
        let elapsed = now.duration_since(self.started_at);
        if !self.is_ready && !stopping && is_startup_complete(status, elapsed) {
            self.is_ready = true;
            self.status = None;
            message += "READY=1\n";
        }
        let is_due = self
            .status
            .as_ref()
            .is_none_or(|(_, at)| now.duration_since(*at) >= STATUS_INTERVAL_MIN);
        if is_due && !stopping {
            let line = status_line(status);
            if self.status.as_ref().is_none_or(|(last, _)| *last != line) {
                message += &format!("STATUS={line}\n");
            }
            self.status = Some((line, now));
        }
        if let Some((interval, due)) = &mut self.watchdog
            && now >= *due
            && !is_any_stalled(status)
        {
            *due = now + *interval;
            message += "WATCHDOG=1\n";
        }
        message
    }
}

/// Returns whether startup is complete: no pipeline is still starting, or the timeout has expired.
/// If all pipelines have halted, startup never completes, because the process exits.
fn is_startup_complete(status: &Status, elapsed: Duration) -> bool {
    let is_in = |state| move |pipeline: &PipelineStatus| pipeline.state == state;
    let pipelines = &status.pipelines;
    (pipelines.is_empty() || !pipelines.iter().all(is_in(State::Halted)))
        && (elapsed >= STARTUP_TIMEOUT || !pipelines.iter().any(is_in(State::Starting)))
}

/// Returns whether any pipeline's event loop is stalled.
fn is_any_stalled(status: &Status) -> bool {
    let is_stalled = |pipeline: &PipelineStatus| {
        let mut problems = pipeline.problems.iter();
        problems.any(|found| found.problem.kind == Kind::EventLoopStalled)
    };
    status.pipelines.iter().any(is_stalled)
}

/// Formats the process's state as one line.
fn status_line(status: &Status) -> String {
    let pipelines = &status.pipelines;
    let count = |state| {
        let in_state = pipelines.iter().filter(|pipeline| pipeline.state == state);
        in_state.count()
    };
    let all = pipelines.len();
    let mut line = format!("{} of {all} pipelines streaming", count(State::Streaming));
    match count(State::StandingBy) {
        0 => {}
        n => line += &format!(", {n} standing by"),
    }
    let lags = pipelines.iter().filter_map(|pipeline| pipeline.lag.seconds);
    let lag = lags.fold(0.0, f64::max);
    if lag >= 1.0 {
        line += &format!(", lag {lag:.0} s");
    }
    let first_problem = pipelines.iter().find_map(|pipeline| {
        let problem = pipeline.problems.first().map(|found| &found.problem.what);
        Some((
            &pipeline.about.name,
            problem.or(pipeline.not_ready.as_ref())?,
        ))
    });
    if let Some((name, what)) = first_problem {
        line += &format!("; {name}: {what}");
    }
    // Escape line feeds. A line feed would end the value, and the text that follows could set
    // another variable, such as MAINPID.
    Escaped(line)
        .to_string()
        .chars()
        .take(STATUS_CHARS_MAX)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::delivery::stats::{About, PipelineStats};
    use crate::observe::problem::Problem;
    use crate::observe::watchdog::Lasting;

    fn status(states: &[State]) -> Status {
        let pipeline = |state: &State| {
            let stats = PipelineStats::new(About {
                name: "orders".to_owned(),
                ..About::default()
            });
            stats.entered(*state);
            stats
        };
        Registry::new(states.iter().map(pipeline).map(Arc::new)).status()
    }

    fn with_problem(kind: Kind, what: &str) -> Status {
        let mut status = status(&[State::Streaming]);
        status.pipelines[0].problems = vec![Lasting {
            problem: Problem::new(kind, what.to_owned(), ""),
            since: 0.0,
        }];
        status
    }

    fn is_complete_after(states: &[State], seconds: u64) -> bool {
        is_startup_complete(&status(states), Duration::from_secs(seconds))
    }

    #[test]
    fn reports_ready_when_no_pipeline_is_starting_unless_all_pipelines_have_halted() {
        use State::{Halted, Reconnecting, StandingBy, Starting, Streaming};
        assert!(is_complete_after(&[Streaming, StandingBy], 0));
        assert!(is_complete_after(&[Streaming, Reconnecting, Halted], 0));
        assert!(!is_complete_after(&[Streaming, Starting], 29));
        assert!(is_complete_after(&[Streaming, Starting], 30));
        assert!(!is_complete_after(&[Halted, Halted], 60));
    }

    #[test]
    fn sends_ready_once_and_the_status_line_when_it_changes() {
        let started_at = Instant::now();
        let at = |seconds| started_at + Duration::from_secs(seconds);
        let mut reporter = Reporter::new(None, started_at);
        let starting = status(&[State::Starting]);
        assert_eq!(
            reporter.next_message(&starting, false, at(0)),
            "STATUS=0 of 1 pipelines streaming; orders: starting: streaming has not begun yet\n"
        );
        let streaming = status(&[State::Streaming]);
        assert_eq!(
            reporter.next_message(&streaming, false, at(1)),
            "READY=1\nSTATUS=1 of 1 pipelines streaming\n"
        );
        assert_eq!(reporter.next_message(&streaming, false, at(7)), "");
        let stuck = with_problem(Kind::DeliveryStuck, "stuck\nREADY=1");
        assert_eq!(
            reporter.next_message(&stuck, false, at(8)),
            "",
            "within the minimum interval"
        );
        assert_eq!(
            reporter.next_message(&stuck, false, at(12)),
            "STATUS=1 of 1 pipelines streaming; orders: stuck\\nREADY=1\n"
        );
        assert_eq!(
            reporter.next_message(&streaming, true, at(60)),
            "",
            "stopping"
        );
    }

    #[test]
    fn sends_watchdog_messages_twice_per_timeout_unless_an_event_loop_is_stalled() {
        let started_at = Instant::now();
        let at = |seconds| started_at + Duration::from_secs(seconds);
        let mut reporter = Reporter::new(Some(Duration::from_secs(60)), started_at);
        let healthy = status(&[State::Streaming]);
        let stalled = with_problem(Kind::EventLoopStalled, "event loop stalled for 61 s");
        let mut sends_watchdog = |status: &Status, second| {
            let message = reporter.next_message(status, false, at(second));
            message.contains("WATCHDOG=1\n")
        };
        assert!(sends_watchdog(&healthy, 0));
        assert!(!sends_watchdog(&healthy, 29));
        assert!(sends_watchdog(&healthy, 30));
        assert!(!sends_watchdog(&stalled, 60));
        assert!(!sends_watchdog(&stalled, 120));
        assert!(sends_watchdog(&healthy, 121));
        // A pipeline that is waiting for Kafka does not count as stalled.
        let stuck = with_problem(Kind::DeliveryStuck, "stuck");
        assert!(sends_watchdog(&stuck, 151));
    }

    #[test]
    fn sends_to_a_notification_socket_with_an_abstract_name() {
        let name = format!("walpost-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).expect("an address");
        let receiver = UnixDatagram::bind_addr(&address).expect("a socket");
        let (sender, address) = open_socket(OsStr::new(&format!("@{name}"))).expect("a socket");
        sender.send_to_addr(b"READY=1\n", &address).expect("sent");
        let mut received = [0; 32];
        let length = receiver.recv(&mut received).expect("received");
        assert_eq!(&received[..length], b"READY=1\n");
        assert!(open_socket(OsStr::new(&format!("/{}", "x".repeat(200)))).is_err());
    }
}
