//! A replication connection that is not streaming yet.

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
use crate::postgres::replication::{Connection, ConnectionError, Identity, ServerProcess};
use crate::postgres::target::Outbox;

/// A replication connection that becomes part of a [`Session`](super::Session) once it streams.
pub(super) struct Link {
    pub(super) connection: Connection,
    pub(super) identity: Identity,
    /// The walsender that serves the connection.
    pub(super) walsender: ServerProcess,
    /// The slot's position; `None` until the slot is acquired.
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
        let walsender = connection.server_process().await?;
        session_state
            .postmaster_start
            .clone_from(&walsender.postmaster_start);
        Ok(Self {
            connection,
            identity,
            walsender,
            resume: None,
        })
    }

    /// Starts replication, which acquires the slot, and returns the slot's position. The position
    /// is read after the slot is acquired, because other processes can no longer move the slot
    /// then. With [`Abort::Expected`], the server may have aborted the stream and released the slot
    /// by the time the position is read.
    pub(super) async fn take_slot(
        &mut self,
        settings: &PipelineSettings,
        catalog: &impl CatalogQueries,
        from: Lsn,
        abort: Abort,
    ) -> Result<Lsn, PipelineError> {
        let target = &settings.target;
        let messages = matches!(target.outbox, Outbox::Messages { .. });
        self.connection
            .start(&target.slot, from, &target.publication, messages)
            .await?;
        let observed = catalog.observe(target).await?;
        let slot = observed.slot.ok_or_else(|| Problem::NoSlot {
            slot: target.slot.clone(),
            init: target.init_slot(),
        })?;
        let is_same_server = observed.starts.postmaster == self.walsender.postmaster_start;
        match slot.active_pid {
            Some(pid) if pid == self.walsender.pid => {}
            None if abort == Abort::Expected && is_same_server => self.connection.record_abort(),
            // The address may now point to a different server than before. In that case, the
            // replication and catalog connections have reached different servers, whose slot
            // positions are unrelated.
            found => {
                // First check whether the server has aborted the stream at its first row, because
                // aborting the stream also releases the slot.
                if let Some(error) = unsendable::stream_end_error(&mut self.connection).await {
                    return Err(error);
                }
                return Err(SlotError::two_servers(target, self.walsender.pid, found).into());
            }
        }
        self.resume = Some(slot.confirmed);
        Ok(slot.confirmed)
    }
}

/// Whether the server is known to abort the stream at a row that it can't send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Abort {
    Unexpected,
    Expected,
}

/// Keeps the slot in use without reading from the stream, and returns an error when the connection
/// is lost. Never returns if `link` has not acquired the slot. `confirmed` is the slot's position.
pub(super) async fn hold_slot(
    link: &mut Option<Link>,
    confirmed: Confirmed,
    link_timeout: Duration,
) -> ConnectionError {
    let Some(link) = link.as_mut().filter(|link| link.resume.is_some()) else {
        return std::future::pending().await;
    };
    loop {
        // The connection resumes reading when the caller uses the link again.
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

/// If the catalog shows why the server refused the connection, adds the cause to the error: the
/// processes that use up the server's walsenders or slots, or the privilege that the role lacks.
pub(super) async fn explain_error(
    mut error: ConnectionError,
    catalog: &impl CatalogQueries,
) -> ConnectionError {
    if let Some(error) = error.server_mut() {
        catalog.explain_rejection(error).await;
    }
    error
}
