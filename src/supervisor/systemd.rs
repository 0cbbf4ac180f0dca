//! Reports the state of the process to systemd, if systemd requests it: `sd_notify(3)`.

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

/// How often the state is checked for news to report.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Minimum interval between changes of the status line.
const STATUS_INTERVAL_MIN: Duration = Duration::from_secs(5);
/// Startup counts as complete after this time even if servers are unavailable. Such outages end without intervention, and the
/// command that starts the service should not wait for them.
const STARTUP_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum length of the status line.
const STATUS_CHARS_MAX: usize = 200;

/// The connection to systemd.
#[derive(Debug)]
pub(super) struct Systemd {
    socket: UnixDatagram,
    address: SocketAddr,
    /// The watchdog timeout that systemd has set.
    watchdog: Option<Duration>,
}

impl Systemd {
    /// Creates a connection from the environment variables, or returns `None` if systemd did not request notifications.
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

    /// Reports the state until the process ends.
    pub(super) async fn report_state(
        self,
        registry: Arc<Registry>,
        mut orders: watch::Receiver<Order>,
    ) {
        let mut news = News::new(self.watchdog, Instant::now());
        let look = self
            .watchdog
            .map_or(POLL_INTERVAL, |every| POLL_INTERVAL.min(every / 2));
        let mut interval = tokio::time::interval(look.max(Duration::from_millis(10)));
        let mut stopping = false;
        loop {
            tokio::select! {
                _ = interval.tick() => {}
                () = is_to_drain(&mut orders), if !stopping => {
                    stopping = true;
                    self.send("STOPPING=1\nSTATUS=stopping\n");
                }
            }
            let message = news.message(&registry.status(), stopping, Instant::now());
            if !message.is_empty() {
                self.send(&message);
            }
        }
    }

    fn send(&self, message: &str) {
        // Failures are logged at debug level only. They affect nothing else, and would otherwise fill the log.
        let sent = self.socket.send_to_addr(message.as_bytes(), &self.address);
        if let Err(error) = sent {
            debug!(%error, "sd_notify failed");
        }
    }
}

async fn is_to_drain(orders: &mut watch::Receiver<Order>) {
    // An error means that the process is exiting.
    let _ = orders.wait_for(|order| *order == Order::Drain).await;
}

/// Opens the socket. A name that begins with `@` is in the abstract namespace and has no file.
fn open_socket(address: &OsStr) -> io::Result<(UnixDatagram, SocketAddr)> {
    let address = match address.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(address)?,
    };
    let socket = UnixDatagram::unbound()?;
    socket.set_nonblocking(true)?;
    Ok((socket, address))
}

/// What has been reported so far. Pure.
#[derive(Debug)]
struct News {
    began: Instant,
    is_ready: bool,
    status: Option<(String, Instant)>,
    /// The interval between watchdog notifications, and when the next one is due.
    alive: Option<(Duration, Instant)>,
}

impl News {
    fn new(watchdog: Option<Duration>, now: Instant) -> Self {
        Self {
            began: now,
            is_ready: false,
            status: None,
            alive: watchdog.map(|every| (every / 2, now)),
        }
    }

    /// Returns the next message to send, or an empty string if there is none.
    fn message(&mut self, status: &Status, stopping: bool, now: Instant) -> String {
        let mut message = String::new();
        if !self.is_ready && !stopping && is_started(status, now.duration_since(self.began)) {
            self.is_ready = true;
            self.status = None;
            message += "READY=1\n";
        }
        let is_due = self
            .status
            .as_ref()
            .is_none_or(|(_, at)| now.duration_since(*at) >= STATUS_INTERVAL_MIN);
        if is_due && !stopping {
            let line = line(status);
            if self.status.as_ref().is_none_or(|(last, _)| *last != line) {
                message += &format!("STATUS={line}\n");
            }
            self.status = Some((line, now));
        }
        if let Some((every, due)) = &mut self.alive
            && now >= *due
            && turns(status)
        {
            *due = now + *every;
            message += "WATCHDOG=1\n";
        }
        message
    }
}

/// Returns whether startup is complete: every pipeline has streamed, stands by, or is retrying. If all have halted, the
/// process exits, so startup never completes.
fn is_started(status: &Status, lasts: Duration) -> bool {
    let of = |state| move |pipeline: &PipelineStatus| pipeline.state == state;
    let pipelines = &status.pipelines;
    (pipelines.is_empty() || !pipelines.iter().all(of(State::Halted)))
        && (lasts >= STARTUP_TIMEOUT || !pipelines.iter().any(of(State::Starting)))
}

/// Returns whether no pipeline's event loop is stalled.
fn turns(status: &Status) -> bool {
    let hangs = |pipeline: &PipelineStatus| {
        let mut problems = pipeline.problems.iter();
        problems.any(|seen| seen.problem.kind == Kind::EventLoopStalled)
    };
    !status.pipelines.iter().any(hangs)
}

/// Formats the state of the process as one line.
fn line(status: &Status) -> String {
    let pipelines = &status.pipelines;
    let count = |state| pipelines.iter().filter(|of| of.state == state).count();
    let all = pipelines.len();
    let mut line = format!("{} of {all} pipelines stream", count(State::Streaming));
    match count(State::StandingBy) {
        0 => {}
        n => line += &format!(", {n} stand by"),
    }
    let behind = pipelines.iter().filter_map(|of| of.lag.seconds);
    let behind = behind.fold(0.0, f64::max);
    if behind >= 1.0 {
        line += &format!(", {behind:.0} s behind");
    }
    let wrong = pipelines.iter().find_map(|of| {
        let problem = of.problems.first().map(|seen| &seen.problem.what);
        Some((&of.about.name, problem.or(of.not_ready.as_ref())?))
    });
    if let Some((name, what)) = wrong {
        line += &format!("; {name}: {what}");
    }
    // A line feed would end the value, and the text after it could set another variable such as MAINPID.
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

    fn is_started_after(states: &[State], seconds: u64) -> bool {
        is_started(&status(states), Duration::from_secs(seconds))
    }

    #[test]
    fn startup_completes_when_every_pipeline_streams_stands_by_or_waits() {
        use State::{Halted, Reconnecting, StandingBy, Starting, Streaming};
        assert!(is_started_after(&[Streaming, StandingBy], 0));
        assert!(is_started_after(&[Streaming, Reconnecting, Halted], 0));
        assert!(!is_started_after(&[Streaming, Starting], 29));
        assert!(is_started_after(&[Streaming, Starting], 30));
        assert!(!is_started_after(&[Halted, Halted], 60));
    }

    #[test]
    fn ready_is_sent_once_and_the_status_line_when_it_changes() {
        let began = Instant::now();
        let at = |seconds| began + Duration::from_secs(seconds);
        let mut news = News::new(None, began);
        let starting = status(&[State::Starting]);
        assert_eq!(
            news.message(&starting, false, at(0)),
            "STATUS=0 of 1 pipelines stream; orders: starting: it has not streamed yet\n"
        );
        let streaming = status(&[State::Streaming]);
        assert_eq!(
            news.message(&streaming, false, at(1)),
            "READY=1\nSTATUS=1 of 1 pipelines stream\n"
        );
        assert_eq!(news.message(&streaming, false, at(7)), "");
        let stuck = with_problem(Kind::DeliveryStuck, "stuck\nREADY=1");
        assert_eq!(news.message(&stuck, false, at(8)), "", "not so often");
        assert_eq!(
            news.message(&stuck, false, at(12)),
            "STATUS=1 of 1 pipelines stream; orders: stuck\\nREADY=1\n"
        );
        assert_eq!(news.message(&streaming, true, at(60)), "", "it stops");
    }

    #[test]
    fn sign_of_life_comes_twice_in_its_time_and_not_from_a_session_that_hangs() {
        let began = Instant::now();
        let at = |seconds| began + Duration::from_secs(seconds);
        let mut news = News::new(Some(Duration::from_secs(60)), began);
        let well = status(&[State::Streaming]);
        let hung = with_problem(Kind::EventLoopStalled, "event loop stalled for 61 s");
        let mut is_alive = |status: &Status, second| {
            let message = news.message(status, false, at(second));
            message.contains("WATCHDOG=1\n")
        };
        assert!(is_alive(&well, 0));
        assert!(!is_alive(&well, 29));
        assert!(is_alive(&well, 30));
        assert!(!is_alive(&hung, 60));
        assert!(!is_alive(&hung, 120));
        assert!(is_alive(&well, 121));
        // A pipeline that is waiting for Kafka is still alive.
        let stuck = with_problem(Kind::DeliveryStuck, "stuck");
        assert!(is_alive(&stuck, 151));
    }

    #[test]
    fn abstract_name_is_an_address() {
        let name = format!("walpost-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).expect("an address");
        let there = UnixDatagram::bind_addr(&address).expect("a socket");
        let (here, address) = open_socket(OsStr::new(&format!("@{name}"))).expect("a socket");
        here.send_to_addr(b"READY=1\n", &address).expect("sent");
        let mut found = [0; 32];
        let length = there.recv(&mut found).expect("received");
        assert_eq!(&found[..length], b"READY=1\n");
        assert!(open_socket(OsStr::new(&format!("/{}", "x".repeat(200)))).is_err());
    }
}
