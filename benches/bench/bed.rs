//! The servers that all measurements use, and their settings.

use std::ops::RangeInclusive;
use std::time::Duration;

use rdkafka::consumer::BaseConsumer;

use crate::args::Args;
use crate::backlog::{self, Shape};
use crate::drain::{self, Lap};
use crate::program::Link;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, Server};
use crate::support::session::Session;
use crate::topic::TopicSettings;

pub(crate) const DATABASE: &str = "postgres";

/// As durable as in production, but without checkpoints during a measurement.
pub(crate) const POSTGRES_SETTINGS: &str = "fsync = on
shared_buffers = 256MB
max_wal_size = 16GB
checkpoint_timeout = 1h
max_connections = 1200
max_replication_slots = 520
max_wal_senders = 520
";

/// The broker's heap.
pub(crate) const BROKER_JVM: [&str; 2] = ["-Xms512m", "-Xmx512m"];

/// Rows in each drain of the warm-up.
pub(crate) const WARM_UP_ROWS: usize = 500_000;

/// The minimum and maximum number of drains in the warm-up.
pub(crate) const WARM_UPS: RangeInclusive<usize> = 8..=12;

/// A PostgreSQL and a Kafka that only the benchmark uses.
pub(crate) struct Bed {
    pub(crate) server: Server,
    pub(crate) broker: Broker,
    pub(crate) db: Session,
    /// Queries offsets.
    pub(crate) observer: BaseConsumer,
}

impl Bed {
    /// Starts the servers, and warms up the broker.
    pub(crate) fn new(args: &Args) -> Self {
        let server = Server::private(MAJOR, POSTGRES_SETTINGS);
        let broker = Broker::with_jvm(&BROKER_JVM);
        let db = server.session(DATABASE);
        // For the rows of a backlog: no client waits for them, and they are on disk before they are
        // read.
        db.run("SET synchronous_commit = off");
        backlog::install(&db);
        let observer = broker.reader();
        let bed = Self {
            server,
            broker,
            db,
            observer,
        };
        bed.warm_up(args);
        bed
    }

    /// Returns the connection string of a superuser, as key=value pairs.
    pub(crate) fn conninfo(&self, link: Link) -> String {
        match link {
            Link::Unix => self.server.conninfo(DATABASE),
            Link::Tcp => self.server.tcp_conninfo(DATABASE),
        }
    }

    /// Runs drains that are not counted, until the broker's JVM has compiled the code that a drain
    /// uses. Until then, the broker needs several times the CPU, which slows down processes on the
    /// same cores.
    fn warm_up(&self, args: &Args) {
        eprintln!("warming up:");
        let backlog = backlog::fill(&self.db, Shape::of_rows(args.scaled(WARM_UP_ROWS)));
        let walpost = [Lap::new(args.walpost(Link::Unix), TopicSettings::default())];
        let (mut before, mut steady) = (f64::INFINITY, 0);
        for round in 0..*WARM_UPS.end() {
            let drains = drain::rounds(self, "warm-up", &backlog, &walpost, round..round + 1);
            let cpu = drains[0].measured.cpu.broker;
            eprintln!("  broker: {cpu:.2} s of CPU");
            steady = if cpu <= 0.9 * before { 0 } else { steady + 1 };
            before = cpu;
            if args.quick || (round + 1 >= *WARM_UPS.start() && steady >= 2) {
                break;
            }
        }
    }
}

/// How long a measurement may make no progress before it fails. PostgreSQL decodes a transaction of
/// millions of rows completely before it sends the first row.
pub(crate) const STALL: Duration = Duration::from_secs(180);
