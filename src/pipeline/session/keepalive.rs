//! Keeps a replication connection alive, and reports the stream's durable position to the server.

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

/// Minimum interval between reports of a higher confirmed LSN. Kept short, because events that were
/// delivered since the last report are delivered again after a crash.
const CONFIRM_INTERVAL: Duration = Duration::from_millis(100);
/// Maximum interval between status updates to the server.
const STATUS_INTERVAL: Duration = Duration::from_secs(10);
/// How long the event loop may wait until the server accepts a status update. Together with
/// [`STATUS_INTERVAL`], this must be shorter than the time after which the watchdog considers the
/// event loop stalled.
const STATUS_WRITE_TIMEOUT: Duration = Duration::from_secs(30);
/// How long Walpost may delay a server's shutdown. During a shutdown, the server waits until the
/// client has confirmed all WAL that was sent. This includes the WAL that the server writes while
/// it shuts down.
pub(super) const SHUTDOWN_GRACE: Duration = Duration::from_secs(2);

/// Returns the interval between status updates to the server.
pub(super) fn status_pause(link_timeout: Duration) -> Duration {
    STATUS_INTERVAL.min(link_timeout / 3)
}

impl Session<'_> {
    /// Sends a status update if one is due. Returns the confirmed position, and the time at which
    /// to call again. Returns an error if the connection is dead or the server is shutting down.
    /// `has_more` indicates whether more data, in addition to the records in flight, is waiting to
    /// be sent to Kafka.
    pub(super) async fn update_status(
        &mut self,
        core: &mut Core,
        session_state: &mut SessionState,
        now: Instant,
        has_more: bool,
    ) -> Result<(Confirmed, Instant), PipelineError> {
        let limit = self.settings.link_timeout;
        if now.duration_since(self.connection.last_received_at()) > limit {
            return Err(ConnectionError::Silent(limit).into());
        }
        let durable = core.delivery.watermark.confirmed();
        let in_flight = core.delivery.watermark.in_flight().records > 0;
        let (carried, copies) = (
            core.delivery.watermark.last_records_end(),
            self.copying.is_some(),
        );
        let has_events_after = |written| copies || carried > written;
        let (confirmed, write_due) = self
            .confirmation_gate
            .advance(durable, has_events_after, now);
        if let Some(since) = self.stopping_since {
            // If the task that writes positions has ended, a position that has not been written to
            // `walpost.slot_state` yet can no longer be confirmed.
            let cannot_confirm = self.confirmation_gate.is_writer_closed() && confirmed < durable;
            if cannot_confirm || now >= since + SHUTDOWN_GRACE {
                return Err(match in_flight || has_more || self.is_committing() {
                    true => StreamError::ServerStoppingUnacknowledged,
                    false => StreamError::ServerStopping,
                }
                .into());
            }
        }
        let has_advanced = self.reported != Some(confirmed);
        if now >= self.status_due || (has_advanced && now >= self.reported_at + CONFIRM_INTERVAL) {
            let status = status_pause(limit);
            // A server that receives frequent status updates has no reason to request replies, so
            // it may be silent for a long time. Request a reply from it to find out whether it is
            // still alive.
            let request_reply = now.duration_since(self.connection.last_received_at()) >= status;
            let limit = limit.min(STATUS_WRITE_TIMEOUT);
            self.connection
                .confirm(confirmed, request_reply, limit)
                .await?;
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
        let next = write_due.map_or(next, |due| next.min(due));
        let close_at = self.stopping_since.map(|since| since + SHUTDOWN_GRACE);
        let next = close_at.map_or(next, |close_at| next.min(close_at));
        Ok((confirmed, next.min(self.status_due)))
    }

    /// Keeps the connection open, so that the slot stays in use, until `ready` completes. Returns
    /// early if the connection fails, the slot monitor ends, or the slot must be dropped. Does not
    /// read frames or confirm a higher position.
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
        let send_updates = async {
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
            () = send_updates => {}
            // Any event from the slot monitor ends the wait. In particular, only the monitor can
            // detect that the server is shutting down.
            _ = self.slot_monitor.join_next() => {}
            () = watched.wait_until_over_budget() => {}
        }
    }
}
