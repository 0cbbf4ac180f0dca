//! Tables whose older rows no start has copied yet: `walpost init` created the slot for a single
//! table that had rows, nothing has been read from the slot since, and the outbox is now configured
//! as another table or as messages. An outbox that is now configured as several tables is not
//! recognized, because such tables can also be published before their slot is created.

use postgres_protocol::escape::escape_literal;

use super::{DATABASE_OID, SYSTEM_ID, TableGap, TableLook, VERSION};
use crate::model::lsn::Lsn;
use crate::postgres::catalog::own_table::{OwnTable, Use};
use crate::postgres::catalog::snapshot_history::TableSnapshot;
use crate::postgres::catalog::{Catalog, CatalogError, Rows, SnapshotRecord, slot_state};
use crate::postgres::table::TableName;
use crate::postgres::target::{OUTBOX_ROW, Target};

/// A table with rows that are older than the slot, which no start has begun to copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct UncopiedTable {
    pub(crate) table: TableName,
    /// The position at which the slot was created.
    pub(crate) created: Lsn,
}

/// A slot from which nothing has been read.
struct UnreadSlot {
    /// The position at which it was created.
    created: Lsn,
    /// The transaction that recorded the slot.
    xid: u32,
}

impl Catalog {
    /// Returns the tables other than the outbox that were published when the slot was created, if
    /// nothing has been read from the slot since and the journal has no snapshot of them. Empty if
    /// this can't be determined.
    ///
    /// # Errors
    /// A query fails, or Walpost's tables are not trusted.
    pub(crate) async fn uncopied_tables(
        &self,
        target: &Target,
        snapshots: &[TableSnapshot],
    ) -> Result<Vec<UncopiedTable>, CatalogError> {
        // See the module's documentation.
        if target.outbox.is_several() {
            return Ok(Vec::new());
        }
        for own_table in [OwnTable::SlotState, OwnTable::TableState] {
            if self.unusable(own_table, Use::Write).await?.is_some() {
                return Ok(Vec::new());
            }
        }
        let Some(unread) = self.unread_slot(target).await? else {
            return Ok(Vec::new());
        };
        let mut found = Vec::new();
        for table in self.published_at_creation(target, &unread).await? {
            let is_own = target.outbox.table() == Some(&table);
            let record = SnapshotRecord::of_table(snapshots, Some(&table));
            if !is_own
                && record == SnapshotRecord::Nothing
                && self.rows(&table).await? != Rows::None
            {
                let created = unread.created;
                found.push(UncopiedTable { table, created });
            }
        }
        Ok(found)
    }

    /// Extends a gap to the whole table if rows of the table were still to be copied: no start
    /// copies it as one of several tables.
    pub(super) async fn widened(
        &self,
        target: &Target,
        look: &TableLook,
        gap: TableGap,
    ) -> Result<TableGap, CatalogError> {
        if !target.outbox.is_several() {
            return Ok(gap);
        }
        let open = self
            .tables_with_open_copy(target, look.slot.confirmed)
            .await?;
        Ok(match open.contains(&gap.table.to_string()) {
            true => TableGap {
                from: None,
                since: None,
                ..gap
            },
            false => gap,
        })
    }

    /// Returns the slot as recorded by `walpost init`, if nothing has been read from it since.
    async fn unread_slot(&self, target: &Target) -> Result<Option<UnreadSlot>, CatalogError> {
        let sql = format!(
            "SELECT created_lsn, xmin FROM walpost.slot_state WHERE slot = {} AND version = {} AND system_id = {SYSTEM_ID} \
             AND database_oid = {DATABASE_OID} AND NOT begun",
            escape_literal(&target.slot),
            slot_state::VERSION
        );
        let rows = self.run_on_own_table(OwnTable::SlotState, target, "", &sql);
        let rows = rows.await?;
        let unexpected = || CatalogError::Unexpected("walpost.slot_state".to_owned());
        let Some((created, xid)) = rows
            .first()
            .and_then(|row| Some((row.get(0)?, row.get(1)?)))
        else {
            return Ok(None);
        };
        Ok(Some(UnreadSlot {
            created: created.parse().map_err(|_| unexpected())?,
            xid: xid.parse().map_err(|_| unexpected())?,
        }))
    }

    /// Returns the present names of the tables that were in the slot's publication when it was
    /// created. Tables added later don't matter: `walpost.add_outbox` has written their rows to
    /// WAL. Nor do tables created later in a published schema, whose rows are all in WAL.
    async fn published_at_creation(
        &self,
        target: &Target,
        unread: &UnreadSlot,
    ) -> Result<Vec<TableName>, CatalogError> {
        let UnreadSlot { created, xid } = unread;
        let [schema, name] = OUTBOX_ROW;
        // Publications can contain schemas since PostgreSQL 15.
        let of_schemas = match self.version().await? >= 150_000 {
            true => "UNION ALL SELECT oid FROM pg_publication_namespace",
            false => "",
        };
        // The older of two transactions is further from the next ID.
        let sql = format!(
            "SELECT n.nspname AS schema, c.relname AS name FROM walpost.table_state s JOIN pg_class c ON c.oid = s.relation \
             JOIN pg_namespace n ON n.oid = c.relnamespace \
             CROSS JOIN (SELECT pg_snapshot_xmax(pg_current_snapshot())::text::int8 + 4294967296 AS next) x \
             WHERE s.slot = {slot} AND s.version = {VERSION} AND s.system_id = {SYSTEM_ID} AND s.database_oid = {DATABASE_OID} \
             AND s.seen_lsn <= '{created}' AND s.seen_xid IS NOT NULL AND (n.nspname, c.relname) <> ({schema}, {name}) \
             AND NOT EXISTS (SELECT FROM (SELECT oid FROM pg_publication {of_schemas}) AS wide \
             WHERE wide.oid::text = ANY (string_to_array(s.memberships, ','))) \
             AND (s.is_out OR NOT EXISTS (SELECT FROM pg_publication_rel r \
             WHERE r.oid::text = ANY (string_to_array(s.memberships, ',')) \
             AND (x.next - r.xmin::text::int8) % 4294967296 <= (x.next - {xid}) % 4294967296)) ORDER BY 1, 2",
            slot = escape_literal(&target.slot),
            schema = escape_literal(schema),
            name = escape_literal(name),
        );
        let rows = self.run_on_own_table(OwnTable::TableState, target, "", &sql);
        let rows = rows.await?;
        let names = rows
            .iter()
            .map(|row| Some(TableName::of(row.get("schema")?, row.get("name")?)));
        Ok(names.flatten().collect())
    }
}
