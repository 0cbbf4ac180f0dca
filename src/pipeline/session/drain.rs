//! Ends a session gracefully: waits for the records in flight, and confirms the durable position.

use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout, timeout_at};
use tracing::warn;

use super::Session;
use super::keepalive::SHUTDOWN_GRACE;
use super::monitor::MonitorEvent;
use super::state::SessionState;
use crate::pipeline::decode::Core;
use crate::pipeline::exactly_once::committer::TransactionCommitter;
use crate::sink::{Sink, SinkError};

/// Timeout for each of two steps: recording the final confirmed position, and sending it to the
/// server.
const LAST_STATUS_TIMEOUT: Duration = Duration::from_secs(2);

impl Session<'_> {
    /// Waits until all records in flight are durable, the deadline `until` has passed, or the
    /// server shuts down. Then confirms the durable position and closes the connection.
    pub(in crate::pipeline) async fn drain(
        mut self,
        core: &mut Core,
        sink: &mut impl Sink,
        session_state: &mut SessionState,
        until: Instant,
    ) {
        let waiting = async {
            match timeout_at(
                until,
                wait_until_durable(self.committer.as_mut(), core, sink),
            )
            .await
            {
                Ok(result) => Settled::Ended(result),
                Err(_) => Settled::TimedOut,
            }
        };
        let settled = tokio::select! {
            biased;
            settled = waiting => settled,
            () = wait_for_shutdown(&mut self.slot_monitor, self.stopping_since) => Settled::ServerStopping,
        };
        self.log_unacknowledged(&settled, core);
        let durable = core.delivery.watermark.confirmed();
        let last = timeout(LAST_STATUS_TIMEOUT, self.confirmation_gate.flush(durable)).await;
        let confirmed = last.unwrap_or_else(|_| self.confirmation_gate.confirmable(durable));
        let stats = core.delivery.watermark.stats();
        stats.record_progress(&core.delivery.watermark.progress(confirmed, false));
        session_state.confirmed = Some(confirmed);
        let reported = self
            .connection
            .confirm(confirmed, false, LAST_STATUS_TIMEOUT)
            .await;
        let pipeline = &self.settings.name;
        let closed = match reported {
            Ok(()) => self.connection.close().await,
            Err(error) => Err(error),
        };
        if let Err(error) = closed {
            warn!(pipeline, %error, "the replication connection did not close cleanly; the last records may be sent again");
        }
    }

    /// If some records are not durable and will be resent, logs the reason.
    fn log_unacknowledged(&self, settled: &Settled, core: &Core) {
        let pipeline = &self.settings.name;
        let left = core.delivery.watermark.in_flight().records;
        if let Settled::Ended(Err(error)) = settled {
            warn!(pipeline, %error, "the last Kafka transaction was not committed");
        }
        if core.delivery.watermark.deliveries().failed() {
            warn!(
                pipeline,
                left,
                "not all records were delivered, because Kafka rejected one of them; they will be sent again after a restart"
            );
            return;
        }
        match settled {
            Settled::Ended(_) => {}
            Settled::TimedOut => {
                let limit = self.settings.drain_timeout;
                warn!(
                    pipeline,
                    left,
                    ?limit,
                    "not all records were acknowledged in time; they will be sent again after a restart"
                );
            }
            Settled::ServerStopping => warn!(
                pipeline,
                left,
                "not all records were acknowledged before PostgreSQL had to shut down; they will be sent again after a restart"
            ),
        }
    }
}

/// Why the wait for the records in flight ended.
enum Settled {
    /// Either all records are durable, or an error prevents some of them from becoming durable.
    Ended(Result<(), SinkError>),
    TimedOut,
    ServerStopping,
}

/// Waits until [`SHUTDOWN_GRACE`] has passed since the server started to shut down. `since` is when
/// the shutdown was detected, or `None` if it has not been detected yet.
async fn wait_for_shutdown(slot_monitor: &mut JoinSet<MonitorEvent>, since: Option<Instant>) {
    let mut since = since;
    while since.is_none() {
        match slot_monitor.join_next().await {
            Some(Ok(MonitorEvent::Stopping)) => since = Some(Instant::now()),
            Some(_) => {}
            None => return std::future::pending().await,
        }
    }
    if let Some(since) = since {
        sleep_until(since + SHUTDOWN_GRACE).await;
    }
}

/// Waits until all produced records are durable.
async fn wait_until_durable(
    committer: Option<&mut TransactionCommitter>,
    core: &mut Core,
    sink: &mut impl Sink,
) -> Result<(), SinkError> {
    // The sink may contain unflushed records if an error ended the session.
    sink.flush(false)?;
    core.delivery.watermark.empty().await;
    let Some(committer) = committer else {
        return Ok(());
    };
    if committer.is_committing() {
        core.delivery
            .watermark
            .record_checkpoint(committer.wait_for_commit().await?.safe);
    }
    if committer.has_uncommitted(core) && !core.delivery.watermark.deliveries().failed() {
        committer.begin(core, sink, Instant::now());
        core.delivery
            .watermark
            .record_checkpoint(committer.wait_for_commit().await?.safe);
    }
    Ok(())
}
