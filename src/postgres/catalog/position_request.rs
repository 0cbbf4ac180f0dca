//! Requests to the process that reads a slot to confirm the position that it has reached.
//!
//! Before a position is confirmed, it is recorded in `walpost.slot_state`, which writes WAL. Therefore,
//! on an idle server, `walpost run` stops recording positions after a while, and the slot stays a few
//! hundred bytes before the end of WAL. A command that must know whether everything up to a position
//! was delivered requests that it is confirmed. The channel requires no privilege, so any role can
//! send requests. A request only makes `run` confirm what is already durable, and no more often than
//! while events arrive.

use std::sync::Arc;

use super::{Catalog, CatalogError};
use crate::postgres::connect::dial::Notifications;

impl Catalog {
    /// Listens for requests to confirm the position of `slot`.
    ///
    /// # Errors
    /// The server rejects the statement, as a standby does.
    pub(crate) async fn position_requests(
        &self,
        slot: &str,
    ) -> Result<Arc<Notifications>, CatalogError> {
        self.notifications.expect(slot);
        self.client().batch_execute("LISTEN walpost").await?;
        Ok(Arc::clone(&self.notifications))
    }

    /// Requests that the process that reads `slot`, if there is one, confirms its position.
    ///
    /// # Errors
    /// The server rejects the statement, as a standby does.
    pub(crate) async fn request_position(&self, slot: &str) -> Result<(), CatalogError> {
        let sql = "SELECT pg_notify('walpost', $1::text)";
        self.client().query_one(sql, &[&slot]).await?;
        Ok(())
    }
}
