//! The one loop that joins the stages, and what happens when it can't go on.
//!
//! [`session`] streams over one connection, [`decode`] turns its frames into records, [`watermark`](crate::delivery::watermark)
//! turns deliveries into confirmed LSNs, [`recovery`] decides what an error calls for.

pub(crate) mod access;
mod confirms;
pub mod decode;
pub mod exactly_once;
pub mod recovery;
pub mod session;
pub mod settings;
#[cfg(test)]
pub(crate) mod sim;
pub mod snapshot;
pub mod wal_budget;

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytesize::ByteSize;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tracing::field::display;
use tracing::{debug, info, warn};

use self::decode::{Core, LineError};
use self::recovery::{Backoff, Remedy};
use self::session::{Database, Memory};
use self::settings::{Delivery, PipelineSettings};
use self::snapshot::SnapshotError;
use self::wal_budget::slot_monitor;
use self::wal_budget::slot_monitor::{Gone, Watched};
use crate::delivery::checkpoint::HistoryError;
use crate::delivery::isolation::{Batching, Isolation};
use crate::delivery::stats::PipelineStats;
use crate::delivery::watermark::{Deliveries, DeliveryFailure, OrderError, Watermark};
use crate::model::lifecycle::{ErrorKind, State};
use crate::model::lsn::{Lsn, Position};
use crate::model::outage::{Outage, Say};
use crate::model::rounded::Elapsed;
use crate::model::window::Window;
use crate::outbox::columns::MappingError;
use crate::outbox::envelope::EnvelopeError;
use crate::outbox::route::RouteError;
use crate::postgres::catalog::{CatalogError, Problem};
use crate::postgres::replication::ConnectionError;
use crate::postgres::table::TableName;
use crate::postgres::target::Target;
use crate::postgres::wire::pgoutput::DecodeError;
use crate::sink::{Sink, SinkError};

/// Why a pipeline can't go on. [`recovery::remedy`] says what each calls for.
#[derive(Debug, thiserror::Error)]
pub enum PipelineError {
    /// The replication connection failed.
    #[error(transparent)]
    Connection(#[from] ConnectionError),
    /// The catalog can't be asked.
    #[error(transparent)]
    Catalog(#[from] CatalogError),
    /// The server refuses the role that it had accepted.
    #[error(
        "{error}. PostgreSQL had accepted role {role:?} since Walpost started, and has refused it for {} s: its \
         password or pg_hba.conf was changed. The password comes from {origin}",
        .lasts.as_secs()
    )]
    Refused {
        /// What the server says.
        error: Box<PipelineError>,
        /// The role.
        role: String,
        /// Where its password comes from, for a person.
        origin: String,
        /// For how long.
        lasts: Duration,
    },
    /// Outbox, publication or slot are not as they have to be.
    #[error(transparent)]
    Problem(#[from] Problem),
    /// The slot is in use.
    #[error("slot {slot:?} is active for PID {pid}")]
    SlotInUse {
        /// The slot.
        slot: String,
        /// The server process that has it.
        pid: i32,
    },
    /// The replication connection and the one for questions don't see the same slot.
    #[error(
        "slot {slot:?} is streamed by PID {walsender}, and the catalog has {found} for it: the two connections have reached \
         two servers, of which one may have been left, or the walsender has just ended. Where this goes on, have the \
         address lead to one server only"
    )]
    TwoServers {
        /// The slot.
        slot: String,
        /// The server process that streams to us.
        walsender: i32,
        /// What the catalog says, for a person.
        found: String,
    },
    /// The server that answers is another one than before.
    #[error(
        "the server's system identifier is {found}, but it was {expected} before: this is another PostgreSQL \
         cluster, and what it has delivered is not known. If it is the right one, restart walpost"
    )]
    OtherCluster {
        /// Now.
        found: String,
        /// Before.
        expected: String,
    },
    /// Somebody else moved or re-created the slot.
    #[error(
        "slot {slot:?} is at {found}, but was confirmed up to {confirmed} only: it was moved or dropped and \
         re-created by someone else. Events committed between {confirmed} and {found} may be missing in Kafka. \
         {resend}; {then}"
    )]
    SlotMoved {
        /// The slot.
        slot: String,
        /// Where it stands.
        found: Lsn,
        /// What was confirmed last.
        confirmed: Lsn,
        /// How the events between are delivered.
        resend: &'static str,
        /// What a person does then.
        then: String,
    },
    /// The slot keeps more of the log than it may, and is to be let go.
    #[error("slot {slot:?} retains more than wal_budget.max, {max}, and could not be dropped yet")]
    OverBudget {
        /// The slot.
        slot: String,
        /// `wal_budget.max`
        max: ByteSize,
    },
    /// The slot was dropped.
    #[error(transparent)]
    LetGo(Box<Gone>),
    /// The slot may be let go, and the rows could not be sent again.
    #[error(
        "table {table} has no primary key, and wal_budget.on_max is \"drop-slot\": the events of a dropped slot are sent again from the table, \
         which requires one. Add it, or set wal_budget.on_max = \"hold\""
    )]
    NoKey {
        /// The table.
        table: TableName,
    },
    /// Exactly-once, and nobody knows what is in Kafka.
    #[error(
        "pipeline {pipeline:?} has no checkpoint in topic {topic:?}, so what of slot {slot:?} is in Kafka is not known. If \
         nothing is (a first start), or if it may be delivered again: walpost checkpoint adopt --pipeline {pipeline}"
    )]
    NoCheckpoint {
        /// The pipeline.
        pipeline: String,
        /// The topic of checkpoints.
        topic: String,
        /// The slot.
        slot: String,
    },
    /// Exactly-once, and the log does not go on from what is in Kafka.
    #[error(
        "{0}. Since Walpost connected, nothing was delivered or confirmed. Find out which events Kafka has, send again what it lacks, \
         and accept the slot as it is now: walpost checkpoint adopt"
    )]
    History(#[from] HistoryError),
    /// The same may be, or another instance had the slot after the checkpoint was read.
    #[error("the checkpoint was read before this instance had the slot, and is read again: {0}")]
    Outrun(HistoryError),
    /// What is delivered can't be confirmed.
    #[error(
        "what is delivered of slot {slot:?} can't be recorded, and so not be confirmed: for {elapsed} there was no \
         second connection to the server that streams it: {reason}",
        elapsed = Elapsed(*lasts)
    )]
    Unwritten {
        /// The slot.
        slot: String,
        /// For so long.
        lasts: Duration,
        /// Why.
        reason: String,
    },
    /// The server is stopping and waits for what can't be delivered now.
    #[error(
        "PostgreSQL is shutting down and waits for events that Kafka has not acknowledged; closing the connection"
    )]
    ServerStopping,
    /// A message of the plugin can't be decoded.
    #[error("{error}, at {at}")]
    Decode {
        /// Position of the message.
        at: String,
        /// What is wrong with it.
        error: DecodeError,
    },
    /// The stream contradicts itself.
    #[error("replication protocol violation: {0}")]
    Order(#[from] OrderError),
    /// The outbox has not the columns that the settings expect.
    #[error(transparent)]
    Mapping(#[from] MappingError),
    /// The publication has another table's rows.
    #[error(
        "the publication sends a row of table {found} at {at}, but the outbox is {expected}. Let it contain {expected} alone, \
         with publish_via_partition_root = true if that is partitioned"
    )]
    ForeignTable {
        /// Position of the row.
        at: Position,
        /// The table of the row.
        found: String,
        /// The table of the settings.
        expected: TableName,
    },
    /// The publication has a table's rows, and the outbox is no table.
    #[error(
        "the publication sends a change to table {found} at {at}, but the outbox is of messages. Take its tables out \
         of the publication: ALTER PUBLICATION ... DROP TABLE {found}"
    )]
    RowBesideLog {
        /// Position of the row.
        at: Position,
        /// The table of the row.
        found: String,
    },
    /// A message with the outbox's prefix is no event.
    #[error(
        "the message with prefix {prefix:?} at {at} can't be read: {error}. Events have to be written with \
         walpost.publish, and everything else with another prefix. on_malformed = \"dead-letter\" sends such messages to the \
         topic for dead letters. To leave out the transaction that has it: walpost skip --to {at}"
    )]
    Envelope {
        /// Position of the message.
        at: Position,
        /// Its prefix.
        prefix: String,
        /// What is wrong with it.
        error: EnvelopeError,
    },
    /// A row is larger than the configuration allows.
    #[error(
        "the row at {at} comes in a message of {bytes} bytes, and max_row_bytes allows {max}. Raise \
         max_row_bytes, and message.max.bytes in [kafka] with it; keep such events out as \
         sql/outbox.sql and sql/publish.sql do"
    )]
    RowTooLarge {
        /// Position of the row.
        at: String,
        /// Length of the message.
        bytes: usize,
        /// `max_row_bytes`
        max: usize,
    },
    /// A row of a table that was not described before.
    #[error("the row at {at} is of the unknown relation {oid}")]
    UnknownRelation {
        /// Position of the row.
        at: Position,
        /// OID of its table.
        oid: u32,
    },
    /// A row that the protocol doesn't allow.
    #[error("{table}: the stream has {found} at {at}")]
    BadTuple {
        /// Position of the row.
        at: Position,
        /// The table.
        table: TableName,
        /// What is there.
        found: &'static str,
    },
    /// A row that can't be copied, or not be told from one that was.
    #[error("{table}: the row at {at} can't be copied, or told from those that were: {error}")]
    BadLine {
        /// Position of the row.
        at: Position,
        /// The table.
        table: TableName,
        /// What is wrong with it.
        error: LineError,
    },
    /// Rows that are older than the slot can't be delivered.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// A row that can't become a record.
    #[error("{row} at {at} can't become a record: {error}")]
    Route {
        /// Position of the row.
        at: Position,
        /// The row, for a person.
        row: String,
        /// Why.
        error: RouteError,
    },
    /// A record that the sink doesn't take.
    #[error("{row} at {at}: {error}")]
    Produce {
        /// Position of the row.
        at: Position,
        /// The row, for a person.
        row: String,
        /// Why.
        error: SinkError,
    },
    /// A dead letter that the sink doesn't take.
    #[error(
        "the dead letter of {row} at {at} can't be delivered either: {error}. It was to be one because: {reason}"
    )]
    DeadLetter {
        /// Position of the row.
        at: Position,
        /// The row, for a person.
        row: String,
        /// Why.
        error: Box<SinkError>,
        /// Why the row can't become a record.
        reason: String,
    },
    /// The sink can't go on.
    #[error(transparent)]
    Sink(#[from] SinkError),
    /// The sink took a record and could not make it durable.
    #[error("{}", .0.reason)]
    Delivery(DeliveryFailure),
    /// Rows of a refused batch were accepted one by one.
    #[error(
        "Kafka has refused the rows from {from} to {until} in one batch, and accepted each of them alone: batches are \
         smaller from here on. To spare the search: a larger max.message.bytes of the topic, or a smaller batch.size in [kafka]"
    )]
    Passed {
        /// The first of the batch.
        from: Position,
        /// The last.
        until: Position,
    },
}

impl PipelineError {
    fn two_servers(target: &Target, walsender: i32, found: Option<i32>) -> Self {
        Self::TwoServers {
            slot: target.slot.clone(),
            walsender,
            found: found.map_or("none".to_owned(), |pid| pid.to_string()),
        }
    }
}

/// What a pipeline is asked to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Go on.
    Run,
    /// Stop reading, deliver what was read, confirm it, end.
    Drain,
}

/// How long a broken producer may take to tell which delivery has failed.
const REASON: Duration = Duration::from_secs(1);

/// Goes on looking at the slot of a pipeline that has halted, for as long as the
/// process runs for the sake of others. The slot is never let go: a person has been called, and
/// it may be the wrong server's. Does not end by itself.
pub async fn watch_halted(settings: &PipelineSettings, stats: Arc<PipelineStats>) {
    let watched = Watched::holding(settings, &stats);
    loop {
        let looked = async {
            let catalog = settings.postgres.catalog().await?;
            watched.ask(&catalog).await
        };
        match timeout(settings.link_timeout, looked).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => debug!(%error, "catalog query failed"),
            Err(_) => debug!("the database does not answer"),
        }
        sleep(session::VITALS).await;
    }
}

/// What goes on across connections to PostgreSQL: what is in flight stays in flight.
struct Carrier<S> {
    core: Core,
    sink: S,
}

/// Runs a pipeline until it is told to drain, or can't go on; writes down in `stats` how it gets
/// on. Each of its sinks comes from `make_sink`.
///
/// # Errors
/// What needs a person.
pub(crate) async fn run<S: Sink>(
    settings: &PipelineSettings,
    database: &impl Database,
    mut orders: watch::Receiver<Order>,
    stats: Arc<PipelineStats>,
    make_sink: impl Fn(Arc<Deliveries>, &Batching) -> Result<S, SinkError>,
) -> Result<(), PipelineError> {
    let window = Window {
        records: settings.window_records,
        bytes: settings.window_bytes,
    };
    let exactly_once = settings.delivery != Delivery::AtLeastOnce;
    let make = |window, isolation: &Isolation| -> Result<_, PipelineError> {
        let watermark = Watermark::observed(window, Lsn::ZERO, Arc::clone(&stats));
        let sink = make_sink(watermark.deliveries(), isolation.batching())?;
        let outbox = settings.target.outbox.clone();
        let mut core = Core::new(outbox, settings.outbox.clone(), watermark)?;
        core.send_dead_letters(&settings.name, &settings.dead_letters);
        core.isolate(isolation.suspects());
        Ok(Carrier { core, sink })
    };
    let pipeline = &settings.name;
    let mut isolation = Isolation::default();
    let mut carrier = make(window, &isolation)?;
    let mut memory = Memory::new(window, Watched::new(settings, &stats));
    let mut outage = Outage::default();
    let mut waiting = Outage::default();
    let mut backoff = Backoff::default();
    // What has the slot and is no Walpost, by what was said last.
    let mut said_holder = None;
    loop {
        let mut held = None;
        let mut isolates = false;
        let Carrier { core, sink } = &mut carrier;
        let opened = session::open(settings, database, core, sink, &mut memory, &mut orders).await;
        let error = match opened {
            Ok(None) => return stopped(pipeline, &memory, &carrier.core),
            Ok(Some(session)) => {
                if let Some(lasted) = outage.ended(Instant::now()) {
                    info!(pipeline, elapsed = %Elapsed(lasted), "PostgreSQL is back");
                }
                if let Some(lasted) = waiting.ended(Instant::now()) {
                    info!(pipeline, elapsed = %Elapsed(lasted), "taken over: the slot was free");
                }
                let mut session = session;
                match session
                    .stream(database, core, sink, &mut memory, &mut orders)
                    .await
                {
                    Ok(until) => {
                        session.end(core, sink, &mut memory, until).await;
                        return stopped(pipeline, &memory, &carrier.core);
                    }
                    Err(error) => {
                        let error = with_reason(error, core).await;
                        isolates = match &error {
                            PipelineError::Delivery(failure) => {
                                isolation.failed(failure, core.watermark.in_flight())
                            }
                            PipelineError::Passed { .. } => {
                                isolation.passed();
                                true
                            }
                            _ => false,
                        };
                        if !isolates && recovery::remedy(&error) == Remedy::Halt {
                            // A person may move the slot beyond what can't be delivered, and must
                            // not lose what was read before it.
                            note(&stats, &error, Remedy::Halt);
                            let until = tokio::time::Instant::now() + settings.drain_timeout;
                            session.end(core, sink, &mut memory, until).await;
                            return Err(error);
                        }
                        if session.has_progressed() {
                            backoff = Backoff::default();
                        } else if recovery::kind(&error) == ErrorKind::Postgres {
                            backoff.answered();
                        }
                        if exactly_once
                            && (isolates || recovery::remedy(&error) == Remedy::RebuildSink)
                        {
                            held = Some(session);
                        }
                        error
                    }
                }
            }
            Err(error) => error,
        };
        let error = match error {
            PipelineError::OverBudget { .. } => {
                tokio::select! {
                    biased;
                    () = drain_ordered(&mut orders) => return stopped(pipeline, &memory, &carrier.core),
                    error = slot_monitor::let_go(settings, database, memory.watched()) => error,
                }
            }
            error => error,
        };
        let now = tokio::time::Instant::now();
        let error = memory.access.judge(error, &settings.postgres, now);
        let remedy = match recovery::remedy(&error) {
            // What is in the open Kafka transaction would be produced once more: it is given up.
            Remedy::Reconnect if exactly_once => Remedy::RebuildSink,
            _ if isolates => Remedy::RebuildSink,
            remedy => remedy,
        };
        note(&stats, &error, remedy);
        let delay = match remedy {
            Remedy::Halt => return Err(error),
            Remedy::StandBy => {
                memory.note_another_owner();
                match waiting.failed(Instant::now()) {
                    Say::Begins => info!(
                        pipeline,
                        "standing by: {error}; taking over when it is free"
                    ),
                    Say::Lasts(lasts, _) => {
                        info!(pipeline, elapsed = %Elapsed(lasts), "standing by: {error}")
                    }
                    Say::Nothing => debug!(pipeline, "standing by: {error}"),
                }
                recovery::stand_by_delay()
            }
            remedy @ (Remedy::Reconnect | Remedy::RebuildSink) => {
                let delay = backoff.next_delay();
                let holder = match &error {
                    PipelineError::Problem(Problem::HeldByOther { pid, .. }) => Some(*pid),
                    _ => None,
                };
                // A refusal ends in a halt, unless a person sees it in time.
                let is_news = matches!(error, PipelineError::Refused { .. })
                    || holder.is_some() && holder != said_holder;
                said_holder = holder.or(said_holder);
                match outage.failed(Instant::now()) {
                    Say::Begins => warn!(pipeline, %error, delay = %Elapsed(delay), "reconnecting"),
                    Say::Lasts(lasts, attempt) => {
                        warn!(pipeline, attempt, elapsed = %Elapsed(lasts), %error, "reconnecting");
                    }
                    Say::Nothing if is_news => {
                        warn!(pipeline, %error, delay = %Elapsed(delay), "reconnecting")
                    }
                    Say::Nothing => {
                        debug!(pipeline, %error, delay = %Elapsed(delay), "reconnecting")
                    }
                }
                if remedy == Remedy::RebuildSink {
                    let left_alone = carrier.core.left_alone();
                    let watermark = &carrier.core.watermark;
                    let (taken, transactions) = (watermark.sent(), watermark.transactions());
                    let dead_letters = carrier.core.dead_letters();
                    if exactly_once && !isolates && recovery::kind(&error) == ErrorKind::Kafka {
                        memory.gave_up(watermark.in_flight());
                    }
                    drop(carrier);
                    stats.gave_up_in_flight(taken, transactions);
                    if let Some(confirmed) = memory.confirmed() {
                        isolation.forget(confirmed.lsn());
                    }
                    carrier = make(memory.window(), &isolation)?;
                    carrier.core.go_on_counting(left_alone, dead_letters);
                    if let Some(mut session) = held {
                        // The next one waits for Kafka before it takes the slot, and PostgreSQL may give
                        // up a slot that nobody has (idle_replication_slot_timeout).
                        tokio::select! {
                            biased;
                            () = drain_ordered(&mut orders) => {}
                            () = session.hold(carrier.sink.answers()) => {}
                        }
                    }
                }
                delay
            }
        };
        tokio::select! {
            biased;
            () = drain_ordered(&mut orders) => return stopped(pipeline, &memory, &carrier.core),
            () = tokio::time::sleep(delay) => {}
        }
    }
}

/// The refusal of a batch where that is why `error` says that the producer is broken. A producer takes
/// no more records as soon as it knows, which can be before it has told whose batch it was; without
/// that the next producer would meet the same refusal, and so on for ever.
async fn with_reason(error: PipelineError, core: &Core) -> PipelineError {
    let broken = match &error {
        PipelineError::Sink(error) | PipelineError::Produce { error, .. } => error,
        PipelineError::DeadLetter { error, .. } => error,
        _ => return error,
    };
    if !matches!(broken, SinkError::Broken(_)) {
        return error;
    }
    // In vain where nothing but the connection is broken: then all is in flight until it times out.
    let _ = timeout(REASON, core.watermark.empty()).await;
    match core.watermark.deliveries().failure() {
        Some(failure) => PipelineError::Delivery(failure),
        None => error,
    }
}

/// Writes down what has become of a session.
fn note(stats: &PipelineStats, error: &PipelineError, remedy: Remedy) {
    let (kind, message) = (recovery::kind(error), error.to_string());
    match remedy {
        Remedy::StandBy => return stats.entered(State::StandingBy),
        Remedy::Halt => stats.entered(State::Halted),
        Remedy::Reconnect | Remedy::RebuildSink => {
            stats.entered(State::Reconnecting);
            stats.reconnects(kind, &message);
        }
    }
    stats.failed(kind, message, remedy.describe());
}

fn stopped(pipeline: &str, memory: &Memory, core: &Core) -> Result<(), PipelineError> {
    let confirmed = memory.confirmed().map(|confirmed| display(confirmed.lsn()));
    let left_alone = core.left_alone();
    let dead_letters = core.dead_letters();
    info!(
        pipeline,
        confirmed,
        oversize_dead_letters = dead_letters.map(|letters| letters.oversize),
        unroutable_dead_letters = dead_letters.map(|letters| letters.unroutable),
        malformed_dead_letters = dead_letters.map(|letters| letters.malformed),
        foreign_messages = left_alone.map(|left| left.foreign),
        nontransactional_messages = left_alone.map(|left| left.nontransactional),
        "stopped"
    );
    Ok(())
}

/// Resolves when the pipeline is told to drain, or nobody is there to tell it anything.
async fn drain_ordered(orders: &mut watch::Receiver<Order>) {
    // An error means that the sender is gone, which is an order to end as well.
    let _ = orders.wait_for(|order| *order == Order::Drain).await;
}
