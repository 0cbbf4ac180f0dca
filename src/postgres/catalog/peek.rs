//! What a slot would send, without taking it: for looking ahead.
//!
//! Spec: PostgreSQL 18, 9.28.6 "Replication Management Functions".

use std::pin::Pin;

use futures_util::StreamExt;
use postgres_protocol::escape::escape_identifier;
use tokio_postgres::RowStream;

use super::{Catalog, CatalogError};
use crate::model::lsn::Lsn;
use crate::postgres::target::{Outbox, Target};

/// The messages of the plugin, one after the other.
pub(crate) struct Peek {
    rows: Pin<Box<RowStream>>,
}

impl Catalog {
    /// Decodes what the slot would send up to the first record that ends at or behind `upto`. The
    /// server keeps it on its disk meanwhile, and sends it as it is read.
    ///
    /// # Errors
    /// The server refuses: the slot is in use, or the role may not read it.
    pub(crate) async fn peek(&self, target: &Target, upto: Lsn) -> Result<Peek, CatalogError> {
        // The value is a list of identifiers.
        let publication = escape_identifier(&target.publication);
        let mut options = vec!["proto_version", "1", "publication_names", &publication];
        if let Outbox::Messages { .. } = target.outbox {
            options.extend(["messages", "true"]);
        }
        let rows = self
            .client()
            .query_raw(
                "SELECT data FROM pg_logical_slot_peek_binary_changes($1::text::name, $2, NULL, \
                 VARIADIC $3::text[])",
                [
                    &target.slot as &(dyn tokio_postgres::types::ToSql + Sync),
                    &upto,
                    &options,
                ],
            )
            .await?;
        Ok(Peek {
            rows: Box::pin(rows),
        })
    }

    /// The end of the WAL that is on the server's disk; of a standby, of what it has replayed.
    ///
    /// # Errors
    /// The query fails.
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

    /// Moves the slot forward, from where it is expected to be; false, and nothing is changed, where
    /// it is somewhere else.
    ///
    /// # Errors
    /// The server refuses: the slot is in use, or the role may not move it.
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
                 CROSS JOIN LATERAL pg_replication_slot_advance(s.slot_name, $3) AS moved \
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

impl Peek {
    /// Hands the next message to `take`; false behind the last.
    ///
    /// # Errors
    /// The server breaks off.
    pub(crate) async fn next(&mut self, take: impl FnOnce(&[u8])) -> Result<bool, CatalogError> {
        match self.rows.next().await {
            None => Ok(false),
            Some(row) => {
                take(row?.try_get(0)?);
                Ok(true)
            }
        }
    }
}
