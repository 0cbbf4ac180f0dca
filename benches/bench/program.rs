//! Starts and stops the measured programs.

use std::fmt::{self, Display};
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::backlog::{Kind, PUBLICATION, Slot, TABLE};
use crate::bed::{DATABASE, STALL_TIMEOUT, TestBed};
use crate::support::postgres::dependencies;
use crate::support::process::{try_signal, wait_for_exit};
use crate::support::reaper::{self, Ending};
use crate::support::wait::WAIT_TIMEOUT;
use crate::support::walpost::{Invocation, Walpost, config_file};
use crate::topic::Topic;
use crate::usage::family;

/// How a program connects to the database.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Link {
    /// The Unix-domain socket.
    Unix,
    /// TCP over the loopback interface, without TLS.
    Tcp,
}

/// A program to measure.
#[derive(Clone, Debug)]
pub(crate) enum Program {
    /// `pg_recvlogical` writing to /dev/null. `pg_recvlogical` receives decoded events without
    /// processing them, so no program that delivers the events can be faster.
    Limit {
        link: Link,
    },
    Walpost {
        link: Link,
        properties: Vec<String>,
        /// Additional pipeline settings, in the syntax of walpost.toml.
        settings: String,
        exactly_once: bool,
    },
    Peer {
        name: String,
        command: String,
    },
}

/// The name under which [`Program::Limit`] appears in results.
pub(crate) const LIMIT: &str = "pg_recvlogical";
/// Walpost's name in results when it delivers at least once.
pub(crate) const WALPOST: &str = "Walpost";
/// Walpost's name in results when it delivers exactly once.
pub(crate) const EXACTLY_ONCE: &str = "Walpost, exactly-once";
/// Debezium's name in results.
pub(crate) const DEBEZIUM: &str = "Debezium";

/// The parameters of one run of a program.
pub(crate) struct Task<'a> {
    /// The kind of outbox whose events are delivered. A [`Program::Peer`] supports only a single
    /// table.
    pub(crate) kind: Kind,
    pub(crate) slot: &'a str,
    /// The topic's name, or a template from which each row's topic is derived.
    pub(crate) topic: &'a str,
    pub(crate) compression: Option<&'a str>,
}

impl<'a> Task<'a> {
    /// Creates a task with the program's default compression.
    pub(crate) fn new(kind: Kind, slot: &'a Slot<'_>, topic: &'a Topic<'_>) -> Self {
        Self {
            kind,
            slot: &slot.name,
            topic: &topic.name,
            compression: None,
        }
    }
}

impl Program {
    /// Returns the program that runs Debezium on Kafka Connect. `./dev bench --peers` downloads
    /// Debezium and Kafka Connect.
    pub(crate) fn debezium() -> Self {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/debezium");
        Self::Peer {
            name: DEBEZIUM.to_owned(),
            command: format!("'{}' '{}'", script.display(), dependencies().display()),
        }
    }

    /// Sets additional pipeline settings, in the syntax of walpost.toml. Ignored by programs other
    /// than Walpost.
    pub(crate) fn with_settings(mut self, text: &str) -> Self {
        if let Self::Walpost { settings, .. } = &mut self {
            text.clone_into(settings);
        }
        self
    }

    /// Adds a librdkafka property, given as `NAME=VALUE`. Ignored by programs other than Walpost.
    pub(crate) fn with_property(mut self, property: &str) -> Self {
        if let Self::Walpost { properties, .. } = &mut self {
            properties.push(property.to_owned());
        }
        self
    }

    /// Enables exactly-once delivery. Ignored by programs other than Walpost.
    pub(crate) fn exactly_once(mut self) -> Self {
        if let Self::Walpost { exactly_once, .. } = &mut self {
            *exactly_once = true;
        }
        self
    }

    pub(crate) fn is_walpost(&self) -> bool {
        matches!(self, Self::Walpost { .. })
    }

    /// Returns whether the program uses Kafka transactions. With transactions, records can't be
    /// counted by their offsets, because transaction markers have offsets too.
    pub(crate) fn has_transactions(&self) -> bool {
        matches!(
            self,
            Self::Walpost {
                exactly_once: true,
                ..
            }
        )
    }

    pub(crate) fn name(&self) -> &str {
        match self {
            Self::Limit { .. } => LIMIT,
            Self::Walpost {
                exactly_once: true, ..
            } => EXACTLY_ONCE,
            Self::Walpost { .. } => WALPOST,
            Self::Peer { name, .. } => name,
        }
    }

    /// Returns how the program connects to the database. A [`Program::Peer`] uses TCP, because some
    /// drivers don't support Unix-domain sockets.
    pub(crate) fn link(&self) -> Link {
        match self {
            Self::Limit { link } | Self::Walpost { link, .. } => *link,
            Self::Peer { .. } => Link::Tcp,
        }
    }

    /// Starts a program that delivers to Kafka.
    pub(crate) fn start(&self, bed: &TestBed, task: &Task<'_>) -> Running {
        match self {
            Self::Limit { .. } => unreachable!("pg_recvlogical does not deliver to Kafka"),
            Self::Walpost {
                link,
                properties,
                settings,
                exactly_once,
            } => {
                let mut arguments: Vec<_> = task.kind.arguments().to_vec();
                let file = config_file(format!("[[pipeline]]\n{settings}\n"));
                if !settings.is_empty() {
                    arguments.extend(["--config", file.to_str().unwrap()]);
                }
                if *exactly_once {
                    // Checkpoints are stored per pipeline, so each measurement needs its own
                    // pipeline.
                    arguments.extend(["--pipeline", task.slot]);
                    adopt_checkpoint(bed, *link, task, &arguments);
                    arguments.extend(["--delivery", "exactly-once"]);
                }
                start_walpost(bed, *link, task, &arguments, properties)
            }
            Self::Peer { name, command } => {
                assert_eq!(task.kind, Kind::Table, "{name} supports only tables");
                Running::Peer(Peer::start(bed, name, command, task))
            }
        }
    }
}

/// Writes a pipeline's first checkpoint, without which exactly-once delivery does not start.
fn adopt_checkpoint(bed: &TestBed, link: Link, task: &Task<'_>, arguments: &[&str]) {
    Invocation::new(["checkpoint", "adopt", "--yes", "--slot", task.slot])
        .args(["--postgres", &bed.conninfo(link)])
        .args(["--kafka", &bed.broker.address()])
        .args(arguments)
        .finish()
        .expect_code(0);
}

/// Starts `walpost run`. `arguments` must select the outbox, and may contain other options.
pub(crate) fn start_walpost(
    bed: &TestBed,
    link: Link,
    task: &Task<'_>,
    arguments: &[&str],
    properties: &[String],
) -> Running {
    let compression = task
        .compression
        .map(|codec| format!("compression.type={codec}"));
    let walpost = Invocation::new(["run", "--slot", task.slot, "--topic", task.topic])
        // Disables the snapshot, because only streaming is measured. With several tables, Walpost
        // never takes a snapshot, so it rejects the `snapshot` setting.
        .args(match task.kind {
            Kind::Tables => &[][..],
            _ => &["--snapshot", "never"],
        })
        .args(["--postgres", &bed.conninfo(link)])
        .args(["--kafka", &bed.broker.address()])
        .args(arguments)
        .args(
            properties
                .iter()
                .chain(&compression)
                .flat_map(|property| ["-X", property]),
        );
    Running::Walpost(Box::new(walpost.start()))
}

/// A running program.
pub(crate) enum Running {
    Walpost(Box<Walpost>),
    Peer(Peer),
}

impl Running {
    /// Starts Walpost with the pipelines defined in `text`, in the syntax of walpost.toml. All
    /// pipelines use the test bed's broker.
    pub(crate) fn start_pipelines(bed: &TestBed, text: &str) -> Self {
        let file = config_file(format!(
            "[kafka]\n\"bootstrap.servers\" = \"{}\"\n{text}",
            bed.broker.address()
        ));
        let run = Invocation::new(["run", "--config", file.to_str().unwrap()]);
        Self::Walpost(Box::new(run.start()))
    }

    pub(crate) fn process_id(&self) -> u32 {
        match self {
            Self::Walpost(walpost) => walpost.process_id(),
            Self::Peer(peer) => peer.child.id(),
        }
    }

    /// Polls at the given interval until the condition is true.
    ///
    /// # Panics
    /// Panics if the program has exited, or if the condition is not true within [`STALL_TIMEOUT`].
    pub(crate) fn wait_until(
        &mut self,
        what: &str,
        every: Duration,
        mut condition: impl FnMut() -> bool,
    ) {
        let began = Instant::now();
        while !condition() {
            self.assert_running();
            assert!(
                began.elapsed() < STALL_TIMEOUT,
                "timed out waiting for {what}"
            );
            sleep(every);
        }
    }

    /// Checks that the program is running.
    ///
    /// # Panics
    /// Panics if the program has exited.
    pub(crate) fn assert_running(&mut self) {
        match self {
            Self::Walpost(walpost) => assert!(walpost.is_running(), "walpost has exited"),
            Self::Peer(peer) => {
                let status = peer.child.try_wait().unwrap();
                assert!(
                    status.is_none(),
                    "{} has exited:\n{}",
                    peer.name,
                    peer.log()
                );
            }
        }
    }

    /// Asks the program to stop and waits for it to exit.
    pub(crate) fn stop(self) {
        match self {
            Self::Walpost(walpost) => assert_eq!(walpost.terminate().code, Some(0)),
            Self::Peer(peer) => drop(peer),
        }
    }
}

/// The process of a program other than Walpost. The process is stopped when this value is dropped.
pub(crate) struct Peer {
    name: String,
    folder: PathBuf,
    child: Child,
}

impl Peer {
    fn start(bed: &TestBed, name: &str, command: &str, task: &Task<'_>) -> Self {
        let folder = reaper::folder("peer");
        let log = File::create(folder.join("log")).unwrap();
        let own = folder.join("own");
        fs::create_dir(&own).unwrap();
        let environment = [
            ("CONNINFO", bed.conninfo(Link::Tcp)),
            ("HOST", "127.0.0.1".to_owned()),
            ("PORT", bed.server.port.to_string()),
            ("USER", "postgres".to_owned()),
            ("DATABASE", DATABASE.to_owned()),
            ("SLOT", task.slot.to_owned()),
            ("PUBLICATION", PUBLICATION.to_owned()),
            ("TABLE", TABLE.to_owned()),
            ("TOPIC", task.topic.to_owned()),
            ("BOOTSTRAP", bed.broker.address()),
            ("FOLDER", own.display().to_string()),
        ];
        let child = Command::new("sh")
            .args(["-c", &format!("exec {command}")])
            .envs(environment.map(|(name, value)| (format!("WALPOST_BENCH_{name}"), value)))
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .expect("a shell");
        reaper::register(child.id(), Ending::Kill);
        Self {
            name: name.to_owned(),
            folder,
            child,
        }
    }

    fn log(&self) -> String {
        fs::read_to_string(self.folder.join("log")).unwrap_or_default()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let family = family(self.child.id());
        for signal in ["TERM", "KILL"] {
            for &pid in &family {
                try_signal(pid, signal);
            }
            if wait_for_exit(&mut self.child, WAIT_TIMEOUT).is_some() {
                break;
            }
        }
        if std::thread::panicking() {
            eprintln!("--- {} ---\n{}", self.name, self.log());
        }
        let _ = fs::remove_dir_all(&self.folder);
    }
}

impl Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unix => "unix",
            Self::Tcp => "TCP",
        })
    }
}
