//! Starts the PostgreSQL server and the Kafka broker that most measurements share.

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

/// PostgreSQL settings that provide the same durability as in production, but make checkpoints so
/// rare that they do not disturb the measurements.
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

/// Number of rows drained in each warm-up run.
pub(crate) const WARM_UP_ROWS: usize = 500_000;

/// Minimum and maximum number of warm-up runs.
pub(crate) const WARM_UPS: RangeInclusive<usize> = 8..=12;

/// A PostgreSQL server and a Kafka broker that are used only by the benchmark.
pub(crate) struct TestBed {
    pub(crate) server: Server,
    pub(crate) broker: Broker,
    pub(crate) db: Session,
    /// A consumer that counts the records that have arrived. It only queries offsets and reads no
    /// records.
    pub(crate) observer: BaseConsumer,
}

impl TestBed {
    /// Starts the servers and warms up the broker.
    pub(crate) fn new(args: &Args) -> Self {
        let server = Server::private(MAJOR, POSTGRES_SETTINGS);
        let broker = Broker::with_jvm(&BROKER_JVM);
        let db = server.session(DATABASE);
        // Asynchronous commits make writing a backlog faster. The results are unaffected, because
        // the rows are flushed to disk before they are read.
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

    /// Runs drains and discards their results until the broker's JVM has compiled its hot code.
    /// Until then, the broker uses several times as much CPU time, which slows down other processes
    /// on the same cores.
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

/// A measurement fails if it makes no progress for this long. The timeout is generous because
/// PostgreSQL decodes a whole transaction, even one with millions of rows, before it sends the
/// first row.
pub(crate) const STALL_TIMEOUT: Duration = Duration::from_secs(180);
