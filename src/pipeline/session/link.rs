//! A replication connection that does not stream yet.

use std::time::Duration;

use tokio::time::sleep;

use super::error::SlotError;
use super::keepalive::status_pause;
use super::state::SessionState;
use crate::delivery::watermark::Confirmed;
use crate::model::lsn::Lsn;
use crate::pipeline::database::{CatalogQueries, Database};
use crate::pipeline::error::PipelineError;
use crate::pipeline::settings::PipelineSettings;
use crate::pipeline::unsendable;
use crate::postgres::catalog::Problem;
use crate::postgres::replication::{Connection, ConnectionError, Identity};
use crate::postgres::target::Outbox;

/// A replication connection. It becomes part of a session when it streams.
pub(super) struct Link {
    pub(super) connection: Connection,
    pub(super) identity: Identity,
    /// PID of the server process that serves the connection.
    pub(super) walsender: i32,
    /// The position of the slot; `None` until the slot is acquired.
    pub(super) resume: Option<Lsn>,
}

impl Link {
    pub(super) async fn open(
        settings: &PipelineSettings,
        database: &impl Database,
        catalog: &impl CatalogQueries,
        session_state: &mut SessionState,
    ) -> Result<Self, PipelineError> {
        let (limit, row_bytes) = (settings.link_timeout, settings.row_bytes_max);
        let mut connection = match database.connect(limit, row_bytes).await {
            Ok(connection) => connection,
            Err(error) => return Err(explain_error(error, catalog).await.into()),
        };
        session_state.access.record_full_access();
        let identity = connection.identify().await?;
        session_state.check_cluster(&identity)?;
        let walsender = connection.process_id().await?;
        Ok(Self {
            connection,
            identity,
            walsender,
            resume: None,
        })
    }

    /// Starts replication, and returns the position of the slot. The position is read after the
    /// slot is acquired, because other processes can no longer move the slot then.
    pub(super) async fn take_slot(
        &mut self,
        settings: &PipelineSettings,
        catalog: &impl CatalogQueries,
        from: Lsn,
    ) -> Result<Lsn, PipelineError> {
        let target = &settings.target;
        let messages = matches!(target.outbox, Outbox::Messages { .. });
        self.connection
            .start(&target.slot, from, &target.publication, messages)
            .await?;
        let slot = catalog.observe(target).await?.slot;
        let slot = slot.ok_or_else(|| Problem::NoSlot {
            slot: target.slot.clone(),
            init: target.init_slot(),
        })?;
        // The address may lead to another server since the first connection was opened. The
        // position of that server's slot is unrelated to the position of this server's slot.
        if slot.active_pid != Some(self.walsender) {
            // Another possible cause is that the server ended the stream at the first row.
            if let Some(error) = unsendable::stream_end_error(&mut self.connection).await {
                return Err(error);
            }
            let (walsender, found) = (self.walsender, slot.active_pid);
            return Err(SlotError::two_servers(target, walsender, found).into());
        }
        self.resume = Some(slot.confirmed);
        Ok(slot.confirmed)
    }
}

/// Keeps the slot in use without reading from the stream, and resolves when the connection is lost.
/// Never resolves if `link` has not acquired the slot. `confirmed` is the position of the slot.
pub(super) async fn hold_slot(
    link: &mut Option<Link>,
    confirmed: Confirmed,
    link_timeout: Duration,
) -> ConnectionError {
    let Some(link) = link.as_mut().filter(|link| link.resume.is_some()) else {
        return std::future::pending().await;
    };
    loop {
        // Reading resumes when the caller uses the link again.
        link.connection.pause();
        sleep(status_pause(link_timeout)).await;
        if let Err(error) = link
            .connection
            .confirm(confirmed, false, link_timeout)
            .await
        {
            return error;
        }
    }
}

/// Adds the cause to the error if the catalog shows it: the processes that use the walsenders or
/// slots if the server has reached its limit, or the privilege that the role lacks.
pub(super) async fn explain_error(
    mut error: ConnectionError,
    catalog: &impl CatalogQueries,
) -> ConnectionError {
    if let Some(error) = error.server_mut() {
        catalog.explain_rejection(error).await;
    }
    error
}
