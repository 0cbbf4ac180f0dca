//! The `database` part measures how much load each method of delivering events puts on the
//! database.

pub(crate) mod poller;

use std::thread;
use std::time::Instant;

use poller::{Poller, Settlement};

use crate::args::Args;
use crate::backlog::{Kind, Slot, position};
use crate::bed::{DATABASE, TestBed};
use crate::program::{Link, Running, Task, start_walpost};
use crate::results::Cost;
use crate::support::session::Session;
use crate::support::wait::wait_until;
use crate::topic::{Topic, TopicSettings};
use crate::usage::{Walsender, cpu_seconds, family_cpu_seconds};

const TABLE: &str = "public.events";
const PUBLICATION: &str = "events";

/// The number of concurrent sessions that write events.
pub(crate) const WRITERS: usize = 4;

const SCHEMA: &str = "
CREATE TABLE events (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, aggregatetype text NOT NULL,
    aggregateid text NOT NULL, type text NOT NULL, payload jsonb NOT NULL);
CREATE PUBLICATION events FOR TABLE events WITH (publish = 'insert')";

/// Writes one event to the table.
const INSERT: &str = "INSERT INTO events (aggregatetype, aggregateid, type, payload)
    VALUES ('order', 'ord-' || (n % 10000), 'OrderCreated', payload(n, NULL))";
/// Writes one event as a logical decoding message.
const PUBLISH: &str = "published :=
    walpost.publish('order', 'ord-' || (n % 10000), 'OrderCreated', payload(n, NULL))";

/// A method of delivering events.
#[derive(Clone, Copy)]
enum DeliveryMethod {
    /// Nothing reads the events. The other methods are compared with this baseline.
    None,
    Walpost(Kind),
    Polling(Settlement),
}

pub(crate) fn measure(bed: &TestBed, args: &Args) -> Vec<Cost> {
    let methods = [
        DeliveryMethod::None,
        DeliveryMethod::Walpost(Kind::Table),
        DeliveryMethod::Walpost(Kind::Messages),
        DeliveryMethod::Polling(Settlement::Delete),
        DeliveryMethod::Polling(Settlement::Update),
    ];
    let events = args.scaled(200_000);
    let mut costs = Vec::new();
    for round in 0..args.rounds() {
        for index in 0..methods.len() {
            let method = methods[(index + round) % methods.len()];
            let cost = run(bed, args, method, events, round);
            eprintln!(
                "  round {round}: {}: written in {:.1} s; CPU s: writers {:.2}, reader {:.2}, rest {:.2}",
                cost.way, cost.write_seconds, cost.writers_cpu, cost.reader_cpu, cost.rest_cpu
            );
            costs.push(cost);
        }
    }
    costs
}

/// Measures one delivery method. Events are delivered while more are being written.
fn run(bed: &TestBed, args: &Args, method: DeliveryMethod, events: usize, round: usize) -> Cost {
    prepare(bed, method);
    let topic = Topic::new(bed, &TopicSettings::default());
    let mut deliverer = Deliverer::start(bed, args, method, &topic);

    let server = || family_cpu_seconds(bed.server.process_id());
    let (cpu_before, wal_before) = (server(), position(&bed.db));
    let reader_before = deliverer.reader_cpu_seconds();
    let began = Instant::now();
    let writers = write(bed, events / WRITERS);
    let write_seconds = began.elapsed().as_secs_f64();
    let carry_seconds = deliverer.delivers().then(|| {
        wait_until("all events to be in Kafka", || {
            deliverer.sample();
            topic.records() == events
        });
        began.elapsed().as_secs_f64()
    });
    deliverer.settle(events);
    let reader_cpu = deliverer.reader_cpu_seconds() - reader_before;
    // The sessions must stay open until their CPU usage has been read, because a server process's
    // CPU usage can't be read after the process exits.
    let writers_cpu: f64 = writers.iter().map(session_cpu_seconds).sum();
    let rest_cpu = server() - cpu_before - writers_cpu - reader_cpu;
    drop(writers);
    let wal_bytes = position(&bed.db) - wal_before;
    deliverer.stop();

    let table = match method.kind() {
        Kind::Table | Kind::Tables => TableState::measure_and_drop(bed),
        Kind::Messages => TableState::default(),
    };
    bed.db.run("DROP PROCEDURE add");
    Cost {
        way: method.name().to_owned(),
        round,
        events,
        write_seconds,
        carry_seconds,
        writers_cpu,
        reader_cpu,
        rest_cpu,
        wal_bytes,
        table_bytes: table.table_bytes,
        dead_tuples: table.dead_tuples,
        vacuum_cpu: table.vacuum_cpu,
    }
}

/// Creates the procedure `add`, which commits each event in its own transaction, as a service
/// would. Also creates the table, unless the method uses messages.
fn prepare(bed: &TestBed, method: DeliveryMethod) {
    let write = match method.kind() {
        Kind::Table | Kind::Tables => {
            bed.db.run(SCHEMA);
            INSERT
        }
        Kind::Messages => PUBLISH,
    };
    if let DeliveryMethod::Polling(settlement) = method {
        bed.db.run(settlement.schema());
    }
    bed.db.run(&format!(
        "CREATE PROCEDURE add(total bigint) LANGUAGE plpgsql AS $$ DECLARE published uuid; BEGIN
           FOR n IN 1..total LOOP {write}; COMMIT; END LOOP; END $$"
    ));
    bed.db.run("CHECKPOINT");
}

/// The size and bloat of the table after all events have been delivered. All values are 0 if there
/// is no table.
#[derive(Default)]
struct TableState {
    table_bytes: u64,
    dead_tuples: u64,
    vacuum_cpu: f64,
}

impl TableState {
    /// Measures the table and drops it.
    fn measure_and_drop(bed: &TestBed) -> Self {
        let number = |sql: &str| u64::try_from(bed.db.number(sql)).unwrap();
        let dead_tuples =
            number("SELECT n_dead_tup FROM pg_stat_user_tables WHERE relname = 'events'");
        let table_bytes = number("SELECT pg_total_relation_size('events')");
        let before = session_cpu_seconds(&bed.db);
        bed.db.run("VACUUM events");
        let vacuum_cpu = session_cpu_seconds(&bed.db) - before;
        bed.db.run("DROP PUBLICATION events; DROP TABLE events");
        Self {
            table_bytes,
            dead_tuples,
            vacuum_cpu,
        }
    }
}

/// Writes `each` events in each session and returns the sessions. Commits are asynchronous, because
/// only CPU time is compared, and a session that waits for the disk uses no CPU time.
fn write(bed: &TestBed, each: usize) -> Vec<Session> {
    let sessions = (0..WRITERS).map(|_| {
        let db = bed.server.session(DATABASE);
        thread::spawn(move || {
            db.run("SET synchronous_commit = off");
            db.run(&format!("CALL add({each})"));
            db
        })
    });
    let sessions: Vec<_> = sessions.collect();
    let written = sessions.into_iter().map(|session| session.join().unwrap());
    written.collect()
}

/// Returns the CPU time used so far by a session's server process, in seconds.
fn session_cpu_seconds(session: &Session) -> f64 {
    let pid = u32::try_from(session.number("SELECT pg_backend_pid()")).unwrap();
    cpu_seconds(pid).expect("an open session")
}

/// The program that delivers events to Kafka.
enum Deliverer<'a> {
    None,
    Walpost {
        running: Running,
        walsender: Walsender<'a>,
        _slot: Slot<'a>,
    },
    Poller(Poller),
}

impl DeliveryMethod {
    /// Returns the kind of outbox to which events are written.
    fn kind(self) -> Kind {
        match self {
            Self::Walpost(kind) => kind,
            Self::None | Self::Polling(_) => Kind::Table,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::None => "nothing reads",
            Self::Walpost(Kind::Table | Kind::Tables) => "Walpost",
            Self::Walpost(Kind::Messages) => "Walpost, no table",
            Self::Polling(Settlement::Delete) => "polling, DELETE",
            Self::Polling(Settlement::Update) => "polling, UPDATE",
        }
    }
}

impl<'a> Deliverer<'a> {
    /// Starts the program and waits until it is ready for the first event.
    fn start(bed: &'a TestBed, args: &Args, method: DeliveryMethod, topic: &Topic<'_>) -> Self {
        match method {
            DeliveryMethod::None => Self::None,
            DeliveryMethod::Polling(settlement) => {
                Self::Poller(Poller::start(bed, settlement, &topic.name))
            }
            DeliveryMethod::Walpost(kind) => {
                let slot = Slot::at_end(&bed.db);
                let task = Task::new(kind, &slot, topic);
                let outbox = match kind {
                    Kind::Table => &["--publication", PUBLICATION, "--table", TABLE],
                    Kind::Tables | Kind::Messages => kind.arguments(),
                };
                let running = start_walpost(bed, Link::Unix, &task, outbox, &args.property);
                let mut walsender = Walsender::new(&bed.db, &slot.name);
                wait_until("walpost to stream", || {
                    walsender.sample();
                    walsender.is_running()
                });
                Self::Walpost {
                    running,
                    walsender,
                    _slot: slot,
                }
            }
        }
    }

    fn delivers(&self) -> bool {
        !matches!(self, Self::None)
    }

    fn sample(&mut self) {
        if let Self::Walpost { walsender, .. } = self {
            walsender.sample();
        }
    }

    /// Returns the CPU time, in seconds, of the server process from which the program reads events.
    fn reader_cpu_seconds(&self) -> f64 {
        match self {
            Self::None => 0.0,
            Self::Walpost { walsender, .. } => walsender.cpu_seconds(),
            Self::Poller(poller) => poller.cpu_seconds(),
        }
    }

    /// If the program polls the table, waits until all rows have been deleted or marked as sent.
    fn settle(&mut self, events: usize) {
        self.sample();
        if let Self::Poller(poller) = self {
            wait_until("the last rows to be deleted or marked", || {
                poller.settled() == events
            });
        }
    }

    fn stop(self) {
        match self {
            Self::None => {}
            Self::Walpost { running, .. } => running.stop(),
            Self::Poller(poller) => poller.stop(),
        }
    }
}
