//! Starts the servers that all measurements use.

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

/// PostgreSQL's settings: as durable as in production, but without checkpoints during a measurement.
pub(crate) const POSTGRES_SETTINGS: &str = "fsync = on
shared_buffers = 256MB
max_wal_size = 16GB
checkpoint_timeout = 1h
max_connections = 1200
max_replication_slots = 520
max_wal_senders = 520
";

/// Options that set the heap size of the broker's JVM.
pub(crate) const BROKER_JVM: [&str; 2] = ["-Xms512m", "-Xmx512m"];

/// Number of rows in each drain of the warm-up.
pub(crate) const WARM_UP_ROWS: usize = 500_000;

/// The minimum and maximum number of drains in the warm-up.
pub(crate) const WARM_UPS: RangeInclusive<usize> = 8..=12;

/// A PostgreSQL server and a Kafka broker that only the benchmark uses.
pub(crate) struct TestBed {
    pub(crate) server: Server,
    pub(crate) broker: Broker,
    pub(crate) db: Session,
    /// A consumer that queries offsets.
    pub(crate) observer: BaseConsumer,
}

impl TestBed {
    /// Starts the servers, and warms up the broker.
    pub(crate) fn new(args: &Args) -> Self {
        let server = Server::private(MAJOR, POSTGRES_SETTINGS);
        let broker = Broker::with_jvm(&BROKER_JVM);
        let db = server.session(DATABASE);
        // Speeds up writing a backlog. The rows are on disk before they are read.
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

    /// Returns a superuser's connection string, as key=value pairs.
    pub(crate) fn conninfo(&self, link: Link) -> String {
        match link {
            Link::Unix => self.server.conninfo(DATABASE),
            Link::Tcp => self.server.tcp_conninfo(DATABASE),
        }
    }

    /// Runs drains whose results are discarded, until the broker's JVM has compiled the code that a
    /// drain executes. Before that, the broker uses several times as much CPU time, which slows down
    /// other processes on the same cores.
    fn warm_up(&self, args: &Args) {
        eprintln!("warming up:");
        let backlog = backlog::fill(&self.db, Shape::with_rows(args.scaled(WARM_UP_ROWS)));
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

/// A measurement fails if it makes no progress for this long. The time is long because PostgreSQL
/// decodes a transaction of millions of rows completely before it sends the first row.
pub(crate) const STALL_TIMEOUT: Duration = Duration::from_secs(180);
