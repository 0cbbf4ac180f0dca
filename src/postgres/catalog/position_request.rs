//! Requests confirmation of the current position of a slot from the process that reads the slot.
//!
//! Before a position is confirmed, it is recorded in `walpost.slot_state`, which generates WAL.
//! Therefore, on an idle server, `walpost run` stops recording positions after a while, and the
//! slot stays a few hundred bytes before the end of WAL. A command that depends on whether
//! everything up to a position was delivered first requests that the position is confirmed. NOTIFY
//! requires no privilege, so any role can send requests. A request only causes `run` to confirm a
//! position that is already durable, and at most as often as while events arrive.

use std::sync::Arc;

use super::{Catalog, CatalogError};
use crate::postgres::connect::dial::Notifications;

impl Catalog {
    /// Listens for requests to confirm the position of `slot`.
    ///
    /// # Errors
    /// Returns an error if the server rejects the statement, as a standby does.
    pub(crate) async fn position_requests(
        &self,
        slot: &str,
    ) -> Result<Arc<Notifications>, CatalogError> {
        self.notifications.expect(slot);
        self.client().batch_execute("LISTEN walpost").await?;
        Ok(Arc::clone(&self.notifications))
    }

    /// Requests confirmation of the current position of `slot` from the process that reads the
    /// slot, if any.
    ///
    /// # Errors
    /// Returns an error if the server rejects the statement, as a standby does.
    pub(crate) async fn request_position(&self, slot: &str) -> Result<(), CatalogError> {
        let sql = "SELECT pg_notify('walpost', $1::text)";
        self.client().query_one(sql, &[&slot]).await?;
        Ok(())
    }
}
