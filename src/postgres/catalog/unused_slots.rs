//! Finds slots that Walpost created or read, and that still retain WAL although no configured
//! pipeline uses them.

use std::fmt;

use bytesize::ByteSize;
use postgres_protocol::escape::escape_literal;

use super::slot_state::SlotIdentity;
use super::{Catalog, CatalogError};
use crate::postgres::target::Target;

/// The prefix that all default slot names share.
const DEFAULT_PREFIX: &str = "walpost_";

/// An inactive slot that no configured pipeline uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct UnusedSlot {
    name: String,
    /// How much WAL the server retains for the slot; `None` if the slot is lost.
    retained_bytes: Option<u64>,
}

impl fmt::Display for UnusedSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            name,
            retained_bytes,
        } = self;
        let retained = match retained_bytes {
            Some(bytes) => format!("retains {} of WAL", ByteSize::b(*bytes)),
            None => "is lost".to_owned(),
        };
        write!(
            f,
            "slot {name:?} {retained}, is inactive, and is not used by any configured pipeline. If the slot is not \
             needed: SELECT pg_catalog.pg_drop_replication_slot({}); after that, its undelivered events exist only in \
             the outbox table",
            escape_literal(name).trim_start()
        )
    }
}

impl Catalog {
    /// Returns the inactive slots of this database that Walpost created or has read. Excludes the
    /// slots in `used`. `target` can be the target of any pipeline that is configured for this
    /// database.
    ///
    /// # Errors
    /// Returns an error if a query fails, or if `sql/examine.sql` rejects `walpost.slot_state`.
    pub(crate) async fn unused_slots(
        &self,
        target: &Target,
        used: &[String],
    ) -> Result<Vec<UnusedSlot>, CatalogError> {
        const SQL: &str = "SELECT slot_name::text, greatest(pg_wal_lsn_diff(CASE WHEN pg_is_in_recovery() \
             THEN pg_last_wal_receive_lsn() ELSE pg_current_wal_lsn() END, restart_lsn), 0)::int8 \
             FROM pg_replication_slots WHERE database = current_database() AND plugin = 'pgoutput' \
             AND NOT temporary AND NOT active AND slot_name::text <> ALL ($1) ORDER BY 1";
        let rows = self.client().query(SQL, &[&used]).await?;
        let own_slot = self.slot_identity("", target).await?;
        let mut unused = Vec::new();
        for row in rows {
            let name: String = row.try_get(0)?;
            let retained: Option<i64> = row.try_get(1)?;
            if !name.starts_with(DEFAULT_PREFIX) {
                let identity = SlotIdentity {
                    target: Target {
                        slot: name.clone(),
                        ..target.clone()
                    },
                    ..own_slot.clone()
                };
                if !self.has_slot_state(&identity).await? {
                    continue;
                }
            }
            unused.push(UnusedSlot {
                name,
                retained_bytes: retained.and_then(|bytes| u64::try_from(bytes).ok()),
            });
        }
        Ok(unused)
    }
}
