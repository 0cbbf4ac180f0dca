//! The servers under all measurements, and how they are set.

use std::time::Duration;

use rdkafka::consumer::BaseConsumer;

use crate::args::{Args, Word};
use crate::backlog::{self, Shape};
use crate::drain::{self, Lap};
use crate::program::Link;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, Server};
use crate::support::session::Session;
use crate::topic::TopicSettings;

pub(crate) const DATABASE: &str = "postgres";

/// Durable as in production; without checkpoints in the middle of a measurement.
pub(crate) const POSTGRES_SETTINGS: &str = "fsync = on
shared_buffers = 256MB
max_wal_size = 16GB
checkpoint_timeout = 1h
";

/// The broker's heap.
pub(crate) const BROKER_JVM: [&str; 2] = ["-Xms512m", "-Xmx512m"];

/// A PostgreSQL and a Kafka for the benchmark alone.
pub(crate) struct Bed {
    pub(crate) server: Server,
    pub(crate) broker: Broker,
    pub(crate) db: Session,
    /// Asks for offsets.
    pub(crate) observer: BaseConsumer,
}

impl Bed {
    /// Starts the servers, and lets the broker's JVM compile what it needs for a drain.
    pub(crate) fn new(args: &Args) -> Self {
        let server = Server::private(MAJOR, POSTGRES_SETTINGS);
        let broker = Broker::with_jvm(&BROKER_JVM);
        let db = server.session(DATABASE);
        // For the rows of a backlog: nobody waits for them, and they are on disk before they are
        // read.
        db.run("SET synchronous_commit = off");
        db.run(backlog::SCHEMA);
        let observer = broker.reader();
        let bed = Self {
            server,
            broker,
            db,
            observer,
        };
        if args.parts() != [Word::Latency] {
            bed.warm_up(args);
        }
        bed
    }

    /// key=value conninfo of a superuser.
    pub(crate) fn conninfo(&self, link: Link) -> String {
        match link {
            Link::Unix => self.server.conninfo(DATABASE),
            Link::Tcp => self.server.tcp_conninfo(DATABASE),
        }
    }

    /// A drain that is not counted.
    fn warm_up(&self, args: &Args) {
        let shape = Shape::of_rows(args.scaled(300_000));
        let backlog = backlog::fill(self, shape);
        let walpost = Lap::new(args.walpost(Link::Unix), TopicSettings::default());
        eprintln!("warming up:");
        drain::rounds(self, "warm-up", &backlog, &[walpost], 1);
    }
}

/// How long nothing may happen before a measurement has failed. A transaction of millions of rows
/// is decoded whole before its first row is sent.
pub(crate) const STALL: Duration = Duration::from_secs(180);
