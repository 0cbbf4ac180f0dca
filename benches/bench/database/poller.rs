//! A reader that polls the outbox table, which is the usual alternative to logical decoding.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{BaseProducer, BaseRecord, Producer};

use crate::bed::{DATABASE, TestBed};
use crate::support::session::Session;
use crate::support::wait::wait_until;
use crate::usage::cpu_seconds;

/// Maximum number of rows in a batch.
pub(crate) const BATCH_ROWS: usize = 500;
/// How long the poller pauses if it finds no rows.
pub(crate) const EMPTY_POLL_PAUSE: Duration = Duration::from_millis(10);

/// How the poller marks rows as sent: by deleting or by updating them.
#[derive(Clone, Copy)]
pub(crate) enum Settlement {
    Delete,
    /// Marks the row as sent.
    Update,
}

impl Settlement {
    /// Returns SQL that prepares the table for this kind of settlement, or an empty string if no
    /// preparation is needed.
    pub(crate) fn schema(self) -> &'static str {
        match self {
            Self::Delete => "",
            Self::Update => {
                "ALTER TABLE events ADD sent_at timestamptz;
                 CREATE INDEX unsent ON events (id) WHERE sent_at IS NULL"
            }
        }
    }

    fn select(self) -> String {
        let condition = match self {
            Self::Delete => "",
            Self::Update => "WHERE sent_at IS NULL",
        };
        format!(
            "BEGIN; SELECT id, aggregateid, payload FROM events {condition}
             ORDER BY id LIMIT {BATCH_ROWS} FOR UPDATE SKIP LOCKED"
        )
    }

    fn settle(self, ids: &str) -> String {
        match self {
            Self::Delete => format!("DELETE FROM events WHERE id = ANY('{{{ids}}}'); COMMIT"),
            Self::Update => format!(
                "UPDATE events SET sent_at = clock_timestamp() WHERE id = ANY('{{{ids}}}'); COMMIT"
            ),
        }
    }
}

/// A reader that polls the table on its own thread.
pub(crate) struct Poller {
    /// The PID of the PostgreSQL process that serves the poller's session.
    pid: u32,
    settled: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Poller {
    pub(crate) fn start(bed: &TestBed, settlement: Settlement, topic: &str) -> Self {
        let db = bed.server.session(DATABASE);
        let pid = u32::try_from(db.number("SELECT pg_backend_pid()")).unwrap();
        let producer = bed
            .broker
            .client()
            .set("enable.idempotence", "true")
            .set("compression.type", "lz4")
            .create()
            .unwrap();
        let (settled, stop) = (
            Arc::new(AtomicUsize::new(0)),
            Arc::new(AtomicBool::new(false)),
        );
        let work = Work {
            db,
            producer,
            settlement,
            topic: topic.to_owned(),
        };
        let (count, end) = (Arc::clone(&settled), Arc::clone(&stop));
        let thread = thread::spawn(move || {
            while !end.load(Ordering::Relaxed) {
                match work.deliver_batch() {
                    0 => thread::sleep(EMPTY_POLL_PAUSE),
                    rows => _ = count.fetch_add(rows, Ordering::Relaxed),
                }
            }
        });
        Self {
            pid,
            settled,
            stop,
            thread,
        }
    }

    /// Returns the number of rows that the poller has deleted or updated in committed transactions.
    pub(crate) fn settled(&self) -> usize {
        self.settled.load(Ordering::Relaxed)
    }

    pub(crate) fn cpu_seconds(&self) -> f64 {
        cpu_seconds(self.pid).expect("an open session")
    }

    /// Stops the poller. Waits until its session has ended, because only then are the server's
    /// statistics complete.
    pub(crate) fn stop(self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("the poller must not panic");
        wait_until("the session to end", || cpu_seconds(self.pid).is_none());
    }
}

struct Work {
    db: Session,
    producer: BaseProducer,
    settlement: Settlement,
    topic: String,
}

impl Work {
    /// Sends a batch of rows to Kafka, then deletes or updates these rows. Returns the size of the
    /// batch.
    fn deliver_batch(&self) -> usize {
        let rows = self.db.rows(&self.settlement.select());
        if rows.is_empty() {
            self.db.run("COMMIT");
            return 0;
        }
        for row in &rows {
            let [Some(id), Some(key), Some(payload)] = row.as_slice() else {
                panic!("not a row of the table: {row:?}");
            };
            let headers = OwnedHeaders::new().insert(Header {
                key: "id",
                value: Some(id),
            });
            let record = BaseRecord::to(&self.topic)
                .key(key)
                .payload(payload)
                .headers(headers);
            if let Err((error, _)) = self.producer.send(record) {
                panic!("failed to send: {error}");
            }
        }
        while self.producer.in_flight_count() > 0 {
            self.producer.poll(Duration::from_millis(1));
        }
        let ids: Vec<&str> = rows.iter().filter_map(|row| row[0].as_deref()).collect();
        self.db.run(&self.settlement.settle(&ids.join(",")));
        rows.len()
    }
}
