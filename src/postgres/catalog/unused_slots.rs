//! Slots of Walpost that retain WAL although no configured pipeline reads them.

use std::fmt;

use bytesize::ByteSize;
use postgres_protocol::escape::escape_literal;

use super::slot_state::SlotOf;
use super::{Catalog, CatalogError};
use crate::postgres::target::Target;

/// Prefix of slot names, unless the configuration names the slot.
const DEFAULT_PREFIX: &str = "walpost_";

/// A slot that nothing reads and no configured pipeline uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct UnusedSlot {
    name: String,
    /// How much WAL the server retains for it; `None` if the slot is lost.
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
            "slot {name:?} {retained}, nothing reads it, and no pipeline of the configuration has it. If it is not needed: SELECT \
             pg_catalog.pg_drop_replication_slot({}); events that it has not delivered are then in the outbox table only",
            escape_literal(name).trim_start()
        )
    }
}

impl Catalog {
    /// Returns the slots of this database that Walpost created or has read, that are not in `used`,
    /// and that nothing reads now. `target` is one of the configured pipelines in this database.
    ///
    /// # Errors
    /// A query fails, or `walpost.slot_state` is not trusted.
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
        let of_target = self.slot_of("", target).await?;
        let mut unused = Vec::new();
        for row in rows {
            let name: String = row.try_get(0)?;
            let retained: Option<i64> = row.try_get(1)?;
            if !name.starts_with(DEFAULT_PREFIX) {
                let of = SlotOf {
                    target: Target {
                        slot: name.clone(),
                        ..target.clone()
                    },
                    ..of_target.clone()
                };
                if !self.has_slot_state(&of).await? {
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
