//! Keeps a connection alive, and reports up to which position its stream is durable.

use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::Session;
use super::error::StreamError;
use super::state::SessionState;
use crate::delivery::watermark::Confirmed;
use crate::pipeline::decode::Core;
use crate::pipeline::error::PipelineError;
use crate::pipeline::wal_budget::slot_monitor::Watched;
use crate::postgres::replication::ConnectionError;

/// Minimum interval between reports of a higher confirmed LSN. Limits how much is delivered again
/// after a crash.
const CONFIRM_INTERVAL: Duration = Duration::from_millis(100);
/// Maximum interval between status updates to the server.
const STATUS_INTERVAL: Duration = Duration::from_secs(10);
/// How long a server that is shutting down may wait for its walsender. It waits until everything
/// that was sent is confirmed, including WAL without events, which the server writes while it shuts
/// down.
pub(super) const SHUTDOWN_GRACE: Duration = Duration::from_secs(2);

/// Returns the interval between status updates to the server.
pub(super) fn status_pause(link_timeout: Duration) -> Duration {
    STATUS_INTERVAL.min(link_timeout / 3)
}

impl Session<'_> {
    /// Confirms what is due, and returns the confirmed position and when to call again. Detects a
    /// dead connection, and ends the session if the server is shutting down. `has_more` states
    /// whether anything besides the records in flight waits for Kafka.
    pub(super) async fn keep_in_touch(
        &mut self,
        core: &mut Core,
        session_state: &mut SessionState,
        now: Instant,
        has_more: bool,
    ) -> Result<(Confirmed, Instant), PipelineError> {
        let limit = self.settings.link_timeout;
        if now.duration_since(self.connection.last_heard()) > limit {
            return Err(ConnectionError::Silent(limit).into());
        }
        let durable = core.delivery.watermark.confirmed();
        let in_flight = core.delivery.watermark.in_flight().records > 0;
        let (carried, copies) = (core.delivery.watermark.carried(), self.copying.is_some());
        let events = |written| copies || carried > written;
        let (confirmed, worth) = self.confirms.advance(durable, events, now);
        if let Some(since) = self.stopping_since {
            // The server accepts no more writes, so a position that is not in `walpost.slot_state`
            // yet can never be confirmed.
            let cannot_confirm = self.confirms.is_writer_closed() && confirmed < durable;
            if cannot_confirm || now >= since + SHUTDOWN_GRACE {
                return Err(match in_flight || has_more || self.is_committing() {
                    true => StreamError::ServerStoppingUnacknowledged,
                    false => StreamError::ServerStopping,
                }
                .into());
            }
        }
        let risen = self.reported != Some(confirmed);
        if now >= self.status_due || (risen && now >= self.reported_at + CONFIRM_INTERVAL) {
            let status = status_pause(limit);
            // The server does not request replies while it receives frequent status updates, so a
            // reply is requested from the server.
            let ask = now.duration_since(self.connection.last_heard()) >= status;
            self.connection.confirm(confirmed, ask, limit).await?;
            session_state.confirmed = Some(confirmed);
            self.reported = Some(confirmed);
            self.reported_at = now;
            self.status_due = now + status;
        }
        let next = if self.reported != Some(confirmed) {
            self.reported_at + CONFIRM_INTERVAL
        } else if in_flight {
            now + CONFIRM_INTERVAL
        } else {
            self.status_due
        };
        let next = worth.map_or(next, |worth| next.min(worth));
        let leave = self.stopping_since.map(|since| since + SHUTDOWN_GRACE);
        let next = leave.map_or(next, |leave| next.min(leave));
        Ok((confirmed, next.min(self.status_due)))
    }

    /// Keeps the connection, and thereby the slot, until `ready` resolves or the connection has to
    /// be closed because it has failed or the slot monitor has ended. Reads no frames and confirms
    /// no higher position.
    pub(in crate::pipeline) async fn keep_alive_until(
        &mut self,
        watched: &Watched,
        ready: impl Future<Output = ()>,
    ) {
        let Some(reported) = self.reported else {
            return;
        };
        if self.slot_monitor.is_empty() {
            return;
        }
        let limit = self.settings.link_timeout;
        let held = async {
            loop {
                sleep_until(self.status_due).await;
                if self
                    .connection
                    .confirm(reported, false, limit)
                    .await
                    .is_err()
                {
                    return;
                }
                self.status_due = Instant::now() + status_pause(limit);
            }
        };
        tokio::select! {
            () = ready => {}
            () = held => {}
            // Any event of the monitor ends the wait. In particular, nothing else detects that the
            // server is shutting down.
            _ = self.slot_monitor.join_next() => {}
            () = watched.until_over() => {}
        }
    }
}
