//! The end of a session that is to end: what is in flight is waited for, and what is durable confirmed.

use std::time::Duration;

use tokio::time::{Instant, timeout, timeout_at};
use tracing::warn;

use super::Session;
use super::state::SessionState;
use crate::pipeline::decode::Core;
use crate::pipeline::exactly_once::committer::TransactionCommitter;
use crate::sink::{Sink, SinkError};

/// How long the last status update may take to be sent.
const LAST_STATUS: Duration = Duration::from_secs(2);

impl Session<'_> {
    /// Waits for what is in flight, but not beyond `until`; confirms what is durable and closes.
    pub(in crate::pipeline) async fn end(
        mut self,
        core: &mut Core,
        sink: &mut impl Sink,
        session_state: &mut SessionState,
        until: Instant,
    ) {
        let pipeline = &self.settings.name;
        let settled = timeout_at(until, settle(self.committer.as_mut(), core, sink)).await;
        if let Ok(Err(error)) = &settled {
            warn!(pipeline, %error, "the last Kafka transaction was not committed");
        }
        let left = core.delivery.watermark.in_flight().records;
        if core.delivery.watermark.deliveries().failed() {
            warn!(
                pipeline,
                left,
                "not all records were delivered: Kafka has refused one. They will be sent again at the next start"
            );
        } else if settled.is_err() {
            let limit = self.settings.drain_timeout;
            warn!(
                pipeline,
                left,
                ?limit,
                "not all records were acknowledged in time; they will be sent again at the next start"
            );
        }
        let durable = core.delivery.watermark.confirmed();
        let last = timeout(LAST_STATUS, self.confirms.last(durable)).await;
        let confirmed = last.unwrap_or_else(|_| self.confirms.now(durable));
        let stats = core.delivery.watermark.stats();
        stats.progressed(&core.delivery.watermark.progress(confirmed, false));
        session_state.confirmed = Some(confirmed);
        let reported = self.connection.confirm(confirmed, false, LAST_STATUS).await;
        let closed = match reported {
            Ok(()) => self.connection.close().await,
            Err(error) => Err(error),
        };
        if let Err(error) = closed {
            warn!(pipeline, %error, "the replication connection did not close cleanly; the last records may be sent again");
        }
    }
}

/// Resolves when everything that was produced is durable.
async fn settle(
    committer: Option<&mut TransactionCommitter>,
    core: &mut Core,
    sink: &mut impl Sink,
) -> Result<(), SinkError> {
    core.delivery.watermark.empty().await;
    let Some(committer) = committer else {
        return Ok(());
    };
    if committer.is_committing() {
        core.delivery
            .watermark
            .checkpointed(committer.committed().await?.safe);
    }
    if committer.is_behind(core) && !core.delivery.watermark.deliveries().failed() {
        committer.begin(core, sink, Instant::now());
        core.delivery
            .watermark
            .checkpointed(committer.committed().await?.safe);
    }
    Ok(())
}
