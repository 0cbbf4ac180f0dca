//! Moves a slot that is not in use.
//!
//! Spec: PostgreSQL 18, 9.28.6 "Replication Management Functions".

use super::{Catalog, CatalogError};
use crate::model::lsn::Lsn;

impl Catalog {
    /// Returns the end of the WAL that the server has flushed to disk or, on a standby, has
    /// replayed.
    ///
    /// # Errors
    /// Returns an error if the query fails.
    pub(crate) async fn log_end(&self) -> Result<Lsn, CatalogError> {
        let row = self
            .client()
            .query_one(
                "SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_flush_lsn() END",
                &[],
            )
            .await?;
        Ok(row.try_get(0)?)
    }

    /// Advances the slot from `from` to `to`. Returns false without changing anything if the slot
    /// is not at `from`.
    ///
    /// # Errors
    /// Returns an error if the server rejects the command because the slot is in use or the role is
    /// not allowed to move it.
    pub(crate) async fn advance(
        &self,
        slot: &str,
        from: Lsn,
        to: Lsn,
    ) -> Result<bool, CatalogError> {
        let moved = self
            .client()
            .query_opt(
                "SELECT moved.end_lsn FROM pg_replication_slots s \
                 CROSS JOIN LATERAL pg_catalog.pg_replication_slot_advance(s.slot_name, $3) AS moved \
                 WHERE s.slot_name = $1::text::name AND s.confirmed_flush_lsn = $2",
                &[&slot, &from, &to],
            )
            .await?;
        match moved {
            None => Ok(false),
            Some(row) => Ok(row.try_get::<_, Lsn>(0)? >= to),
        }
    }
}
