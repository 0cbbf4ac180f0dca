//! The main loop of a pipeline: connects its stages and decides how to respond to errors.
//!
//! [`session`] streams over one connection, [`decode`] converts frames to records,
//! [`watermark`](crate::delivery::watermark) computes the LSN that may be confirmed, and
//! [`recovery`] chooses how to recover from an error.

pub(crate) mod access;
mod confirmation_gate;
mod crashes;
pub(crate) mod database;
pub(crate) mod decode;
pub(crate) mod error;
pub(crate) mod exactly_once;
pub(crate) mod halt;
pub(crate) mod order;
pub(crate) mod recovery;
pub(crate) mod session;
pub(crate) mod settings;
#[cfg(test)]
pub(crate) mod sim;
pub(crate) mod snapshot;
mod unpublished_wal;
mod unsendable;
pub(crate) mod wal_budget;

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tracing::field::display;
use tracing::{debug, info, warn};

use self::database::Database;
use self::decode::Core;
use self::error::{Cause, PipelineError};
use self::order::{Order, drain_ordered, is_drain_ordered};
use self::recovery::{Backoff, Remedy};
use self::session::error::StreamError;
use self::session::state::SessionState;
use self::settings::{Delivery, PipelineSettings};
use self::wal_budget::error::WalBudgetError;
use self::wal_budget::slot_monitor;
use self::wal_budget::slot_monitor::Watched;
use crate::delivery::isolation::{Batching, Isolation};
use crate::delivery::stats::PipelineStats;
use crate::delivery::watermark::{Deliveries, Watermark};
use crate::model::lifecycle::{ErrorKind, State};
use crate::model::lsn::Lsn;
use crate::model::outage::{Outage, OutageMessage};
use crate::model::rounded::Elapsed;
use crate::model::window::Window;
use crate::postgres::catalog::Problem;
use crate::sink::{Sink, SinkError};

/// How long to wait for a failed producer to report which delivery failed.
const PRODUCER_ERROR_TIMEOUT: Duration = Duration::from_secs(1);

/// Monitors the slot of a pipeline that has halted or been stopped, while the process still runs
/// other pipelines. Never returns. Never drops the slot, even if the slot exceeds the WAL budget:
/// an operator has to intervene anyway, and Walpost may be connected to the wrong server.
pub(crate) async fn monitor_slot_of_ended_pipeline(
    settings: &PipelineSettings,
    stats: Arc<PipelineStats>,
) {
    let watched = Watched::holding(settings, &stats);
    loop {
        let check = async {
            let catalog = settings.postgres.catalog().await?;
            watched.check_slot(&catalog).await
        };
        match timeout(settings.link_timeout, check).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => debug!(%error, "catalog query failed"),
            Err(_) => debug!("the database does not respond"),
        }
        sleep(session::SLOT_QUERY_INTERVAL).await;
    }
}

/// State that outlives a connection to PostgreSQL, so that records in flight survive a reconnect.
struct Carrier<S> {
    core: Core,
    sink: S,
}

/// Runs a pipeline until it is asked to drain or encounters an error that requires operator
/// intervention. Progress is recorded in `stats`. `make_sink` creates the initial sink and any
/// replacement for a failed sink.
///
/// # Errors
/// Returns an error only if it requires operator intervention. After any other error, the pipeline
/// recovers on its own.
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
        core.read_older_rows_of(&settings.target.publication);
        core.set_tables_aside(settings.sets_tables_aside());
        core.send_dead_letters(&settings.name, &settings.dead_letters);
        core.isolate(isolation.suspects());
        Ok(Carrier { core, sink })
    };
    let pipeline = &settings.name;
    let mut isolation = Isolation::default();
    let mut carrier = make(window, &isolation)?;
    let mut session_state = SessionState::new(window, Watched::new(settings, &stats));
    let mut outage = Outage::default();
    let mut standby = Outage::default();
    let mut backoff = Backoff::default();
    // PID in the last log message about a process other than Walpost that is using the slot.
    let mut logged_holder = None;
    loop {
        let mut held_session = None;
        let mut is_isolating = false;
        let Carrier { core, sink } = &mut carrier;
        let opened = session::open(
            settings,
            database,
            core,
            sink,
            &mut session_state,
            &mut orders,
        )
        .await;
        let error = match opened {
            Ok(None) => return stopped(pipeline, &session_state, &carrier.core),
            Ok(Some(session)) => {
                if let Some(lasted) = outage.end(Instant::now()) {
                    info!(pipeline, elapsed = %Elapsed(lasted), "connected to PostgreSQL again");
                }
                if let Some(lasted) = standby.end(Instant::now()) {
                    info!(pipeline, elapsed = %Elapsed(lasted), "slot acquired; taking over");
                }
                let mut session = session;
                match session
                    .stream(database, core, sink, &mut session_state, &mut orders)
                    .await
                {
                    Ok(until) => {
                        session.drain(core, sink, &mut session_state, until).await;
                        return stopped(pipeline, &session_state, &carrier.core);
                    }
                    Err(error) => {
                        let error = with_rejection(error, core).await;
                        let error =
                            unsendable::with_table(error, settings, database, &stats, &mut orders)
                                .await;
                        let error = unpublished_wal::with_remedy(error, settings);
                        session_state.record_position(core);
                        is_isolating = match &error {
                            PipelineError::Stream(StreamError::Delivery(failure)) => isolation
                                .record_failure(failure, core.delivery.watermark.in_flight()),
                            PipelineError::Stream(StreamError::Passed { .. }) => {
                                isolation.record_accepted_suspects();
                                true
                            }
                            _ => false,
                        };
                        if !is_isolating && recovery::remedy(&error) == Remedy::Halt {
                            // Before halting, deliver the events that precede the undeliverable
                            // event, because an operator may advance the slot past all of them.
                            record_error(&stats, &error, Remedy::Halt);
                            let until = tokio::time::Instant::now() + settings.drain_timeout;
                            session.drain(core, sink, &mut session_state, until).await;
                            unsendable::confirm_preceding_events(
                                &error,
                                settings,
                                database,
                                &session_state,
                            )
                            .await;
                            return Err(error);
                        }
                        if session.has_progressed() {
                            backoff = Backoff::default();
                        } else if recovery::kind(&error) == ErrorKind::Postgres {
                            backoff.shorten();
                        }
                        if exactly_once
                            && (is_isolating || recovery::remedy(&error) == Remedy::RebuildSink)
                        {
                            held_session = Some(session);
                        }
                        error
                    }
                }
            }
            Err(error) => {
                let error =
                    unsendable::with_table(error, settings, database, &stats, &mut orders).await;
                unpublished_wal::with_remedy(error, settings)
            }
        };
        let error = match error {
            PipelineError::WalBudget(WalBudgetError::OverBudget { .. }) => {
                tokio::select! {
                    biased;
                    () = drain_ordered(&mut orders) => return stopped(pipeline, &session_state, &carrier.core),
                    error = slot_monitor::drop_slot(settings, database, session_state.watched()) => error.into(),
                }
            }
            error => error,
        };
        let now = tokio::time::Instant::now();
        let error = session_state
            .access
            .classify(error, &settings.postgres, now);
        let remedy = match recovery::remedy(&error) {
            // After a reconnect, the records in the open Kafka transaction are produced again, so
            // that transaction must be abandoned.
            Remedy::Reconnect if exactly_once => Remedy::RebuildSink,
            _ if is_isolating => Remedy::RebuildSink,
            remedy => remedy,
        };
        if remedy != Remedy::Halt && is_drain_ordered(&orders) {
            info!(pipeline, %error, "stopping without reconnecting");
            return stopped(pipeline, &session_state, &carrier.core);
        }
        record_error(&stats, &error, remedy);
        let delay = match remedy {
            Remedy::Halt => return Err(error),
            Remedy::StandBy => {
                session_state.record_other_owner();
                match standby.failed(Instant::now()) {
                    OutageMessage::Started => info!(
                        pipeline,
                        "standing by: {error}; will take over when the slot is free"
                    ),
                    OutageMessage::Ongoing(lasts, _) => {
                        info!(pipeline, elapsed = %Elapsed(lasts), "standing by: {error}")
                    }
                    OutageMessage::Suppressed => debug!(pipeline, "standing by: {error}"),
                }
                recovery::stand_by_delay()
            }
            remedy @ (Remedy::Reconnect | Remedy::RebuildSink) => {
                let delay = backoff.next_delay();
                let holder = match &error {
                    PipelineError::Problem(Problem::HeldByOther { pid, .. }) => Some(*pid),
                    _ => None,
                };
                // If PostgreSQL keeps refusing the role, the pipeline eventually halts unless an
                // operator intervenes, so every refusal is logged.
                let must_log = matches!(error, PipelineError::Refused(_))
                    || holder.is_some() && holder != logged_holder;
                logged_holder = holder.or(logged_holder);
                match outage.failed(Instant::now()) {
                    OutageMessage::Started => {
                        warn!(pipeline, %error, delay = %Elapsed(delay), "reconnecting")
                    }
                    OutageMessage::Ongoing(lasts, attempt) => {
                        warn!(pipeline, attempt, elapsed = %Elapsed(lasts), %error, "reconnecting");
                    }
                    OutageMessage::Suppressed if must_log => {
                        warn!(pipeline, %error, delay = %Elapsed(delay), "reconnecting")
                    }
                    OutageMessage::Suppressed => {
                        debug!(pipeline, %error, delay = %Elapsed(delay), "reconnecting")
                    }
                }
                if remedy == Remedy::RebuildSink {
                    let ignored_counts = carrier.core.ignored_counts();
                    let table_names = carrier.core.take_table_names();
                    let watermark = &carrier.core.delivery.watermark;
                    let (sent, transactions) = (watermark.sent(), watermark.transactions());
                    let dead_letters = carrier.core.dead_letters();
                    if exactly_once && !is_isolating && recovery::kind(&error) == ErrorKind::Kafka {
                        session_state.record_abandoned_transaction(watermark.in_flight());
                    }
                    drop(carrier);
                    stats.record_abandoned_records(sent, transactions);
                    if let Some(confirmed) = session_state.confirmed() {
                        isolation.remove_confirmed(confirmed.lsn());
                    }
                    carrier = make(session_state.window(), &isolation)?;
                    carrier.core.resume_counts(ignored_counts, dead_letters);
                    carrier.core.restore_table_names(table_names);
                    if let Some(mut session) = held_session {
                        // The next session acquires the slot only once Kafka responds. Until then,
                        // keep this session's connection alive: PostgreSQL may invalidate a slot
                        // that is inactive (idle_replication_slot_timeout).
                        tokio::select! {
                            biased;
                            () = drain_ordered(&mut orders) => {}
                            () = session.keep_alive_until(session_state.watched(), carrier.sink.wait_for_response()) => {}
                        }
                    }
                }
                delay
            }
        };
        tokio::select! {
            biased;
            () = drain_ordered(&mut orders) => return stopped(pipeline, &session_state, &carrier.core),
            () = tokio::time::sleep(delay) => {}
        }
    }
}

/// Returns an error about the rejected batch if the producer is broken because the broker rejected
/// a batch. Otherwise returns `error` unchanged. A producer stops accepting records as soon as it
/// fails, which may be before it reports the rejected batch. If the rejection were lost, each new
/// producer would resend the same batch indefinitely.
async fn with_rejection(error: PipelineError, core: &Core) -> PipelineError {
    if !matches!(error.cause(), Cause::Sink(SinkError::Broken(_))) {
        return error;
    }
    // If the producer failed only because a connection broke, this call times out: the records stay
    // in flight until they expire, which takes longer than [`PRODUCER_ERROR_TIMEOUT`].
    let _ = timeout(PRODUCER_ERROR_TIMEOUT, core.delivery.watermark.empty()).await;
    match core.delivery.watermark.deliveries().failure() {
        Some(failure) => StreamError::Delivery(failure).into(),
        None => error,
    }
}

/// Records the error that ended a session, and updates the pipeline's state.
fn record_error(stats: &PipelineStats, error: &PipelineError, remedy: Remedy) {
    let (kind, message) = (recovery::kind(error), error.message(&stats.about.commands));
    match remedy {
        Remedy::StandBy => return stats.entered(State::StandingBy),
        Remedy::Halt => stats.entered(State::Halted),
        Remedy::Reconnect | Remedy::RebuildSink => {
            stats.entered(State::Reconnecting);
            stats.record_reconnect(kind, &message);
        }
    }
    stats.failed(kind, message, remedy.describe());
}

fn stopped(pipeline: &str, session_state: &SessionState, core: &Core) -> Result<(), PipelineError> {
    let confirmed = session_state
        .confirmed()
        .map(|confirmed| display(confirmed.lsn()));
    let ignored_counts = core.ignored_counts();
    let dead_letters = core.dead_letters();
    info!(
        pipeline,
        confirmed,
        oversize_dead_letters = dead_letters.map(|letters| letters.oversize),
        unroutable_dead_letters = dead_letters.map(|letters| letters.unroutable),
        malformed_dead_letters = dead_letters.map(|letters| letters.malformed),
        foreign_messages = ignored_counts.map(|left| left.foreign),
        nontransactional_messages = ignored_counts.map(|left| left.nontransactional),
        "stopped"
    );
    Ok(())
}
