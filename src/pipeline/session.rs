//! Streams events over a single replication connection.
//!
//! [`startup`] checks the pipeline's requirements and starts the stream, [`monitor`] queries the
//! database in the background, [`keepalive`] confirms durable positions, [`drain`] shuts the
//! session down gracefully, and [`state`] contains the state that must outlive the session.
//! [`Session::stream`] is the loop that connects these modules.

use std::pin::Pin;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};
use tracing::{info, warn};

use self::error::StreamError;
use self::monitor::MonitorEvent;
use self::set_aside::{Recording, TableWatch};
use self::state::SessionState;
use super::confirmation_gate::ConfirmationGate;
use super::database::{CatalogQueries, Database};
use super::decode::{Core, Step};
use super::error::PipelineError;
use super::exactly_once::committer::{Committed, TransactionCommitter};
use super::order::{Order, drain_ordered, drain_ordered_at_once};
use super::settings::PipelineSettings;
use super::snapshot::pace::Pace;
use super::snapshot::{self, Copying, Read};
use crate::delivery::watermark::Confirmed;
use crate::model::lifecycle::{SnapshotPhase, State};
use crate::model::lsn::Lsn;
use crate::model::set_aside::SetAside;
use crate::model::time::unix_micros;
use crate::outbox::connect::ColumnFacts;
use crate::postgres::catalog::CatalogError;
use crate::postgres::catalog::set_aside::TableNote;
use crate::postgres::catalog::table_state::AcceptedNames;
use crate::postgres::replication::Connection;
use crate::sink::{Preparation, Prepared, Sink, SinkError};

pub(super) use self::startup::open;

mod drain;
pub(crate) mod error;
mod keepalive;
mod link;
mod monitor;
mod publication;
mod set_aside;
mod startup;
pub(super) mod state;

/// How often the state of the slot is queried for monitoring.
pub(super) const SLOT_QUERY_INTERVAL: Duration = Duration::from_secs(5);
/// How often the number of rows from each table is recorded for monitoring.
const TABLE_COUNTS_INTERVAL: Duration = Duration::from_secs(1);
/// The pipeline counts as busy if more records than this are in flight. Under such a load, records
/// are sent in batches anyway, so waiting for more of them adds little latency.
const BUSY_RECORDS_IN_FLIGHT: u64 = 100;
/// How long the connection that writes positions to `walpost.slot_state` may be down before the
/// session ends.
const RECORDING_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum amount of data to read ahead from the stream while no records can be produced, because a
/// Kafka transaction is being committed or a topic is being created.
const BLOCKED_READ_AHEAD_BYTES: usize = 1536 << 10;

/// While rows arrive quickly, a separate thread reads ahead at most `window_bytes` divided by this
/// number.
const THREAD_READ_AHEAD_WINDOW_PARTS: u64 = 8;
/// Maximum number of bytes that a separate thread reads ahead. A very fast walsender sends about
/// this much in 10 ms.
const THREAD_READ_AHEAD_BYTES_MAX: usize = 1 << 20;

/// A streaming connection.
pub(super) struct Session<'s> {
    settings: &'s PipelineSettings,
    connection: Connection,
    resume: Lsn,
    /// The task that monitors the slot and the publication, which is aborted when the session is
    /// dropped.
    slot_monitor: JoinSet<MonitorEvent>,
    confirmation_gate: ConfirmationGate,
    reported: Option<Confirmed>,
    reported_at: Instant,
    status_due: Instant,
    /// The time at which the number of rows from each table must next be reported.
    tables_due: Instant,
    stopping_since: Option<Instant>,
    pace: Pace,
    /// The copy of older rows that precedes the stream; `None` once all of its rows are durable.
    copying: Option<Copying>,
    /// Whether a message has been logged stating that a restart has to wait until the copy is
    /// complete.
    has_announced_restart: bool,
    /// Tracks the tables that are set aside (not delivered because of an error).
    tables: TableWatch,
    /// Commits Kafka transactions; `None` without exactly-once delivery.
    committer: Option<TransactionCommitter>,
}

/// A condition that must be met before the session processes the next frame.
enum Wait {
    Nothing,
    /// There must be space for another record in the window of unacknowledged records and in the
    /// sink's queue.
    Room,
    /// The sink must prepare the topic.
    Topic(String, Preparation),
    /// The descriptions of the columns of the table with this OID, and the names under which the
    /// table's rows may be published, must be read from the database.
    Table(u32, Description),
    /// A change must be recorded in the journal: a table was set aside, or its omitted rows were
    /// replayed.
    Journal(Box<TableNote>, Recording),
}

/// The result of waiting for the condition in a [`Wait`].
enum WaitResult<'w> {
    /// The sink has prepared the topic.
    Topic(&'w str, Prepared),
    /// The sink can't prepare the topic.
    Refused(&'w str, SinkError),
    Table(u32, Described),
    /// The change has been recorded in the journal. If the table is now set aside, also contains
    /// the new journal entry.
    Journal(&'w TableNote, Option<SetAside>),
}

type Description = Pin<Box<dyn Future<Output = Result<Described, CatalogError>> + Send>>;
/// The columns of a table, and the names under which its rows may be published.
type Described = (Vec<ColumnFacts>, Vec<AcceptedNames>);

impl Session<'_> {
    /// Streams until the pipeline is asked to drain. If a transaction is open at that time, streams
    /// to the end of that transaction, so that the transaction does not have to be resent. Stops
    /// earlier only if the server shuts down. Returns the deadline for the drain.
    ///
    /// # Errors
    /// Returns an error if the stream can't continue.
    pub(super) async fn stream(
        &mut self,
        database: &impl Database,
        core: &mut Core,
        sink: &mut impl Sink,
        session_state: &mut SessionState,
        orders: &mut watch::Receiver<Order>,
    ) -> Result<Instant, PipelineError> {
        let deliveries = core.delivery.watermark.deliveries();
        let mut wait = Wait::Nothing;
        let mut drain_until: Option<Instant> = None;
        loop {
            let can_produce = matches!(wait, Wait::Nothing) && !self.is_committing();
            if can_produce
                && drain_until.is_none()
                && let Some(suspects) = core.passed_suspects()
            {
                return Err(StreamError::Passed {
                    from: *suspects.start(),
                    until: *suspects.end(),
                }
                .into());
            }
            if can_produce {
                core.delivery.watermark.tick(unix_micros());
                wait = match (self.is_copying(), self.tables.next_note(core)) {
                    (true, _) => self.process_rows(core, sink)?,
                    (false, Some(note)) => self.record_note(database, note),
                    (false, None) => {
                        self.process_frames(database, core, sink, drain_until.is_some())?
                    }
                };
            }
            let many = core.delivery.watermark.in_flight().records > BUSY_RECORDS_IN_FLIGHT;
            let busy = many || self.pace.is_busy(Instant::now());
            if can_produce {
                sink.flush(busy)?;
            }
            let has_room = self.connection.unread() < BLOCKED_READ_AHEAD_BYTES;
            let reads = matches!(wait, Wait::Nothing) && (!self.is_committing() || has_room);
            // Even while frames can't be processed, continue reading in two cases. While older rows
            // are being copied, incoming data shows that the server is alive. While a topic is
            // being created, the frames that are read ahead may contain events for other missing
            // topics.
            let copies = self.is_copying();
            let receives = match copies || matches!(wait, Wait::Topic(..)) {
                true => has_room,
                false => reads,
            };
            // The server sends no more data after it has aborted the stream. Process all data that
            // precedes the error with which the stream was aborted, and only then the error itself.
            let is_blocked = !matches!(wait, Wait::Nothing) || self.is_committing();
            if !receives || self.connection.is_aborted() && is_blocked {
                self.connection.pause();
            }
            if deliveries.failed()
                && let Some(failure) = deliveries.failure()
            {
                return Err(StreamError::Delivery(failure).into());
            }
            let now = Instant::now();
            if let Some(until) = drain_until
                && (now >= until || copies || !core.is_open())
            {
                return Ok(until);
            }
            let has_more = !matches!(wait, Wait::Nothing);
            let (confirmed, mut next) =
                match self.update_status(core, session_state, now, has_more).await {
                    Err(PipelineError::Stream(error)) if error.is_server_stopping() => {
                        return drain_until.ok_or(error.into());
                    }
                    result => result?,
                };
            let is_waiting =
                has_more || self.is_committing() || core.delivery.watermark.in_flight().records > 0;
            let stats = core.delivery.watermark.stats();
            stats.record_progress(&core.delivery.watermark.progress(confirmed, is_waiting));
            if self.tables_due <= now {
                self.tables_due = now + TABLE_COUNTS_INTERVAL;
                core.report_rows();
                self.tables.count_omitted_rows(self.settings, core);
            }
            let received = self.connection.take_received_bytes();
            stats.add_received_bytes(received);
            self.pace.record_bytes(received);
            self.end_copy(core, database, session_state).await;
            sink.tend();
            // If a topic is being prepared, the rows that follow may need new topics as well, so
            // don't commit after each row.
            let more_to_come = busy || matches!(wait, Wait::Topic(..));
            if let Some(committer) = &mut self.committer
                && let Some(due) = committer.commit_if_due(core, sink, now, more_to_come)
            {
                next = next.min(due);
            }
            let wake_at = drain_until.unwrap_or(next).min(next);
            let completes_copy = self.completes_copy(orders, now);
            match self.pace.pause(now) {
                Some(_)
                    if !copies
                        && self
                            .connection
                            .read_ahead(self.thread_read_ahead_bytes(), now) => {}
                // Block instead of using the runtime's timer, whose resolution is only a
                // millisecond. Blocking is acceptable, because no other pipeline uses this thread.
                Some(pause) => std::thread::sleep(pause),
                None if busy => {}
                None => self.connection.read_directly(now),
            }
            tokio::select! {
                biased;
                () = drain_due(orders, completes_copy), if drain_until.is_none() => {
                    info!(pipeline = self.settings.name, in_flight = core.delivery.watermark.in_flight().records, "draining");
                    core.delivery.watermark.stats().entered(State::Draining);
                    drain_until = Some(Instant::now() + self.settings.drain_timeout);
                }
                Some(Ok(event)) = self.slot_monitor.join_next(), if !self.slot_monitor.is_empty() => {
                    match event {
                        MonitorEvent::Problem(problem) => return Err(problem.into()),
                        MonitorEvent::Stopping => self.stopping_since = Some(Instant::now()),
                        MonitorEvent::Unrecorded(reason) => {
                            return Err(StreamError::Unrecorded {
                                slot: self.settings.target.slot.clone(),
                                lasts: RECORDING_TIMEOUT,
                                reason,
                            }
                            .into());
                        }
                    }
                }
                // Don't drop the slot during a drain, because the records in flight may include the
                // last undelivered events.
                () = session_state.watched.wait_until_over_budget(), if drain_until.is_none() => {
                    return Err(session_state.watched.over_budget_error().into());
                }
                committed = commit_result(&mut self.committer) => {
                    let committed = committed?;
                    core.delivery.watermark.record_checkpoint(committed.safe);
                    session_state.adaptive_window.record_commit(committed.in_flight, committed.took);
                    core.delivery.watermark.set_window(session_state.adaptive_window.window());
                }
                () = core.delivery.watermark.wait_for_space(), if matches!(wait, Wait::Room) => wait = Wait::Nothing,
                ended = wait.wait() => {
                    match ended? {
                        WaitResult::Topic(topic, prepared) => sink.prepared(topic, prepared)?,
                        WaitResult::Refused(topic, error)
                            if set_aside::is_topic_of_row(self.settings, topic, &error) =>
                        {
                            core.refuse_topic(topic.to_owned(), error);
                        }
                        WaitResult::Refused(_, error) => return Err(error.into()),
                        WaitResult::Table(oid, (facts, names)) => core.describe_table(oid, facts, names),
                        WaitResult::Journal(note, opened) => {
                            set_aside::log_note(self.settings, note, opened.as_ref());
                            core.apply_note(note, opened);
                        }
                    }
                    wait = Wait::Nothing;
                }
                () = self.confirmation_gate.wait_for_change() => self.request_checkpoint(),
                () = self.tables.wait_for_change() => {}
                filled = snapshot::receive_copied(&mut self.copying), if copies && reads => filled?,
                filled = self.connection.receive(), if receives => {
                    filled?;
                    sink.read_more();
                }
                () = sleep_until(wake_at) => {}
            }
        }
    }

    /// Processes the received frames until none are left or the session has to wait.
    fn process_frames(
        &mut self,
        database: &impl Database,
        core: &mut Core,
        sink: &mut impl Sink,
        draining: bool,
    ) -> Result<Wait, PipelineError> {
        while !draining || core.is_open() {
            let frame = self
                .connection
                .peek()
                .map_err(|error| core.unread::<PipelineError>(error))?;
            let Some(frame) = frame else { break };
            let step = match core.frame(&frame, sink) {
                Ok(Step::Done) => Step::Done,
                step => core.or_set_aside(&frame, step)?,
            };
            match step {
                Step::Done => {}
                Step::Answer => {
                    self.status_due = Instant::now();
                    if let Some(committer) = &mut self.committer {
                        committer.request_checkpoint();
                    }
                }
                Step::Full => return Ok(Wait::Room),
                Step::NewTopic(topic) => {
                    let ahead = || core.topics_ahead(self.connection.buffered());
                    let preparation = sink.prepare(&topic, ahead);
                    return Ok(Wait::Topic(topic, preparation));
                }
                Step::NewTable(oid) => {
                    return Ok(self.describe_table(database, core, oid));
                }
                Step::SetAside(note) => return Ok(self.record_note(database, *note)),
            }
            self.connection.consume();
            self.pace.record_frame();
        }
        Ok(Wait::Nothing)
    }

    fn describe_table(&self, database: &impl Database, core: &Core, oid: u32) -> Wait {
        let database = database.clone();
        let target = core
            .loads_table_names()
            .then(|| self.settings.target.clone());
        let pipeline = self.settings.name.clone();
        let description = async move {
            let catalog = database.catalog().await?;
            let mut names = Vec::new();
            if let Some(target) = target {
                names = catalog.accepted_names(&target, &[oid]).await?;
                for table in &names {
                    let recorded = catalog.record_delivered_table(&pipeline, &target, table);
                    if let Err(error) = recorded.await {
                        warn!(pipeline, %error, "failed to record a table in walpost.table_state");
                    }
                }
            }
            Ok((catalog.column_facts(oid).await?, names))
        };
        Wait::Table(oid, Box::pin(description))
    }

    fn record_note(&self, database: &impl Database, note: TableNote) -> Wait {
        let recording = set_aside::record(self.settings, database, note.clone());
        Wait::Journal(Box::new(note), recording)
    }

    /// Requests a checkpoint if `walpost verify` is waiting for the durable position to be
    /// confirmed. With exactly-once delivery, a position is confirmed only after a checkpoint.
    fn request_checkpoint(&mut self) {
        if self.confirmation_gate.is_requested()
            && let Some(committer) = &mut self.committer
        {
            committer.request_checkpoint();
        }
    }

    /// Returns how many bytes a separate thread may read ahead.
    fn thread_read_ahead_bytes(&self) -> usize {
        let part = self.settings.window_bytes / THREAD_READ_AHEAD_WINDOW_PARTS;
        usize::try_from(part).map_or(THREAD_READ_AHEAD_BYTES_MAX, |part| {
            part.min(THREAD_READ_AHEAD_BYTES_MAX)
        })
    }

    /// Returns whether older rows are being copied, in which case the stream has to wait.
    fn is_copying(&self) -> bool {
        self.copying.as_ref().is_some_and(Copying::reads)
    }

    /// Processes the received rows of the copy until none are left or the session has to wait.
    fn process_rows(
        &mut self,
        core: &mut Core,
        sink: &mut impl Sink,
    ) -> Result<Wait, PipelineError> {
        let Some(copying) = &mut self.copying else {
            return Ok(Wait::Nothing);
        };
        loop {
            match copying.row(core, sink)? {
                Read::Row => self.pace.record_frame(),
                Read::Nothing => return Ok(Wait::Nothing),
                Read::End => {
                    let (slot, host) = (&self.settings.target.slot, &self.connection.host);
                    info!(pipeline = self.settings.name, slot, from = %core.delivery.watermark.received(), host, "streaming");
                    // Frames of the stream may already have been received during the copy.
                    sink.read_more();
                    return Ok(Wait::Nothing);
                }
                Read::Full => return Ok(Wait::Room),
                Read::NewTopic(topic) => {
                    let preparation = sink.prepare(&topic, || copying.topics_ahead(core));
                    return Ok(Wait::Topic(topic, preparation));
                }
            }
        }
    }

    /// Marks the copy as complete if all of its rows are durable.
    async fn end_copy(
        &mut self,
        core: &Core,
        database: &impl Database,
        session_state: &mut SessionState,
    ) {
        if let (Some(copying), Some(reported)) = (&self.copying, self.reported)
            && copying.is_durable(reported.lsn())
        {
            session_state.snapshot_done = true;
            let stats = core.delivery.watermark.stats();
            stats.record_snapshot_phase(SnapshotPhase::Done, None);
            copying.record_completion(self.settings, database).await;
            self.copying = None;
        }
    }

    /// Returns whether a copy of older rows is making progress, in which case a restart with a new
    /// definition has to wait until the copy is complete.
    fn completes_copy(&mut self, orders: &watch::Receiver<Order>, now: Instant) -> bool {
        let Some(copying) = &mut self.copying else {
            return false;
        };
        if !copying.progresses(now, self.settings.drain_timeout) {
            return false;
        }
        if !self.has_announced_restart && *orders.borrow() == Order::DrainAfterCopy {
            self.has_announced_restart = true;
            let commands = &self.settings.target.commands;
            let restart = commands.print(["pipeline", "restart", &self.settings.name]);
            info!(
                pipeline = self.settings.name,
                "the pipeline's definition has changed; the pipeline will restart with the new definition when the copy of \
                 older rows is complete. To restart the pipeline now: {restart}"
            );
        }
        true
    }

    /// Returns whether a Kafka transaction is being committed.
    fn is_committing(&self) -> bool {
        self.committer
            .as_ref()
            .is_some_and(TransactionCommitter::is_committing)
    }

    /// Returns whether the session has confirmed a position above the position at which its stream
    /// started.
    pub(super) fn has_progressed(&self) -> bool {
        self.reported
            .is_some_and(|reported| reported.lsn() > self.resume)
    }
}

async fn drain_due(orders: &mut watch::Receiver<Order>, completes_copy: bool) {
    match completes_copy {
        true => drain_ordered_at_once(orders).await,
        false => drain_ordered(orders).await,
    }
}

/// Waits until the commit in progress has succeeded. Never completes if no commit is in progress.
async fn commit_result(
    committer: &mut Option<TransactionCommitter>,
) -> Result<Committed, SinkError> {
    match committer {
        Some(committer) => committer.wait_for_commit().await,
        None => std::future::pending().await,
    }
}

impl Wait {
    /// Waits for the topic, the table description or the journal entry that the session requires in
    /// order to continue. Never completes for [`Wait::Nothing`] and [`Wait::Room`].
    async fn wait(&mut self) -> Result<WaitResult<'_>, PipelineError> {
        match self {
            Self::Topic(topic, preparation) => Ok(match preparation.await {
                Ok(prepared) => WaitResult::Topic(topic, prepared),
                Err(error) => WaitResult::Refused(topic, error),
            }),
            Self::Journal(note, recording) => Ok(WaitResult::Journal(note, recording.await?)),
            Self::Table(oid, description) => Ok(WaitResult::Table(*oid, description.await?)),
            Self::Nothing | Self::Room => std::future::pending().await,
        }
    }
}

#[cfg(test)]
mod tests;
