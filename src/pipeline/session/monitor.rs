//! Monitors the database while the pipeline streams: the slot, the publication, and whether the
//! server is shutting down.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};
use tracing::{debug, warn};

use super::error::SlotError;
use super::publication::WatchedPublication;
use super::{RECORDING_TIMEOUT, SLOT_QUERY_INTERVAL};
use crate::pipeline::confirmation_gate::SlotStateWriter;
use crate::pipeline::database::{CatalogQueries, Database};
use crate::pipeline::error::PipelineError;
use crate::pipeline::recovery;
use crate::pipeline::wal_budget::error::WalBudgetError;
use crate::pipeline::wal_budget::slot_monitor::Watched;
use crate::postgres::catalog::{CatalogError, Observed, Problem};
use crate::postgres::connect::dial::Notifications;
use crate::postgres::target::Target;

/// Number of slot queries after which the publication is queried once.
const SLOT_QUERIES_PER_PUBLICATION_QUERY: u32 = 6;

/// Delay before retrying to connect or to write a position.
const RECONNECT_INTERVAL: Duration = Duration::from_secs(1);

/// An event detected by the monitor.
pub(super) enum MonitorEvent {
    /// The publication no longer sends the outbox's rows.
    Problem(Problem),
    /// The server is shutting down: it has terminated the catalog connection, and does not accept
    /// new ones.
    Stopping,
    /// Positions can't be written to `walpost.slot_state`. Contains the reason.
    Unrecorded(String),
}

/// Queries the slot's state every few seconds, until the slot must be dropped or the connection is
/// lost.
pub(super) async fn monitor_until_lost(
    catalog: &mut impl CatalogQueries,
    watched: &Watched,
) -> WalBudgetError {
    loop {
        match watched.check_slot(&*catalog).await {
            Ok(true) => return watched.over_budget_error(),
            Ok(false) => {}
            Err(error @ CatalogError::Lost(_)) => return error.into(),
            Err(error) => debug!(%error, "catalog query failed"),
        }
        // Stop waiting as soon as the catalog connection is closed. A server that is shutting down
        // terminates this connection first, and then waits for the connections that use a slot.
        let _ = timeout(SLOT_QUERY_INTERVAL, catalog.closed()).await;
    }
}

/// Queries the slot's state every few seconds, and returns when it detects an event. In the
/// meantime, writes the positions that are about to be confirmed to `walpost.slot_state`.
///
/// On PostgreSQL 18, the stream itself also reports a missing publication, and this report alone
/// halts the pipeline, so querying the catalog is only an additional check. A shutdown of the
/// server, however, can't be detected from the stream, because the stream is not read while Kafka
/// is down.
pub(super) async fn monitor_slot<D: Database>(
    database: D,
    watched: Watched,
    publication: WatchedPublication,
    mut catalog: D::Catalog,
    walsender: i32,
    mut writer: Option<SlotStateWriter>,
) -> MonitorEvent {
    let target = &watched.target;
    let mut requests = listen_for_requests(&catalog, target).await;
    for turn in 1_u32.. {
        match watched.check_slot(&catalog).await {
            // Continue monitoring, because a session that is draining must still detect that the
            // server is shutting down.
            Ok(true) => watched.mark_over_budget(),
            Ok(false) => {}
            Err(error) => debug!(%error, "catalog query failed"),
        }
        let reopen = timeout(
            SLOT_QUERY_INTERVAL,
            write_until_closed(&mut catalog, &mut writer, &requests),
        )
        .await
        .is_ok();
        if !reopen && !turn.is_multiple_of(SLOT_QUERIES_PER_PUBLICATION_QUERY) {
            continue;
        }
        let since = Instant::now();
        let result = loop {
            if !reopen {
                break catalog.observe(target).await;
            }
            let reason = match reconnect(&database, target, walsender).await {
                Ok((open, observed)) => {
                    catalog = open;
                    requests = listen_for_requests(&catalog, target).await;
                    break Ok(observed);
                }
                Err(PipelineError::Catalog(CatalogError::Dial(error)))
                    if recovery::is_stopping(&error) =>
                {
                    return MonitorEvent::Stopping;
                }
                Err(error) => error.to_string(),
            };
            debug!(reason, "catalog query failed");
            if writer.is_some() && since.elapsed() > RECORDING_TIMEOUT {
                return MonitorEvent::Unrecorded(reason);
            }
            sleep(RECONNECT_INTERVAL).await;
        };
        match result {
            Ok(observed) => {
                // Record the tables even if the pipeline is about to halt. Rows that are committed
                // before it runs again will be missing from Kafka, and must be accounted for.
                publication.record(&catalog, &watched).await;
                if let Some(problem) = watched.publication_problem(&observed) {
                    return MonitorEvent::Problem(problem);
                }
                publication.compare(&catalog, &watched, &observed).await;
            }
            Err(error) => debug!(%error, "catalog query failed"),
        }
    }
    std::future::pending().await
}

/// Opens a new catalog connection, and checks that it reaches the server that is streaming, because
/// the address may point to a different server by now.
async fn reconnect<D: Database>(
    database: &D,
    target: &Target,
    walsender: i32,
) -> Result<(D::Catalog, Observed), PipelineError> {
    let catalog = database.catalog().await?;
    let observed = catalog.observe(target).await?;
    let pid = observed.slot.as_ref().and_then(|slot| slot.active_pid);
    match pid == Some(walsender) {
        true => Ok((catalog, observed)),
        false => Err(SlotError::two_servers(target, walsender, pid).into()),
    }
}

/// Listens for requests from `walpost verify` to confirm the current position. If listening fails,
/// such requests are ignored, and the position is confirmed at its regular time.
async fn listen_for_requests(catalog: &impl CatalogQueries, target: &Target) -> Arc<Notifications> {
    let listening = catalog.position_requests(&target.slot).await;
    listening.unwrap_or_else(|error| {
        debug!(%error, "failed to listen for requests to confirm the position");
        Arc::default()
    })
}

/// Writes the positions that are about to be confirmed, until the connection is closed.
async fn write_until_closed(
    catalog: &mut impl CatalogQueries,
    writer: &mut Option<SlotStateWriter>,
    requests: &Notifications,
) {
    let Some(writer) = writer else {
        return catalog.closed().await;
    };
    loop {
        let requested = tokio::select! {
            biased;
            () = catalog.closed() => return,
            requested = writer.next_request() => requested,
            () = requests.next() => {
                writer.request();
                continue;
            }
        };
        match catalog.write_slot_state(&writer.slot, requested).await {
            Ok(()) => writer.mark_written(requested),
            Err(CatalogError::Lost(_)) => return catalog.closed().await,
            Err(error) => {
                if writer.record_failure(Instant::now()) {
                    warn!(
                        pipeline = writer.slot.pipeline, %error,
                        "failed to record the delivered position in walpost.slot_state; nothing is confirmed until it is recorded"
                    );
                }
                sleep(RECONNECT_INTERVAL).await;
            }
        }
    }
}
