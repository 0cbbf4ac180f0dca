//! Asks the process that reads a slot to confirm its current position.
//!
//! Before a position is confirmed, it is recorded in `walpost.slot_state`, which generates WAL. To
//! avoid generating WAL indefinitely on an idle server, `walpost run` stops recording positions
//! after a while, which leaves the slot a few hundred bytes before the end of WAL. A command that
//! must determine whether everything up to a position was delivered therefore first requests that
//! the position be confirmed. NOTIFY requires no privilege, so any role can send requests. This is
//! harmless: a request only causes `run` to confirm a position whose events are already durable,
//! and no more often than it does while events arrive.

use std::sync::Arc;

use super::{Catalog, CatalogError};
use crate::postgres::connect::dial::Notifications;

impl Catalog {
    /// Starts listening for requests to confirm the position of `slot`. Each request arrives as a
    /// notification on the returned handle.
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

    /// Asks the process that reads `slot`, if any, to confirm its current position.
    ///
    /// # Errors
    /// Returns an error if the server rejects the statement, as a standby does.
    pub(crate) async fn request_position(&self, slot: &str) -> Result<(), CatalogError> {
        let sql = "SELECT pg_notify('walpost', $1::text)";
        self.client().query_one(sql, &[&slot]).await?;
        Ok(())
    }
}
