//! Finds tables with rows that are older than the slot and still have to be copied.
//!
//! For an outbox with a single table, `walpost init` runs `sql/snapshot.sql`. If the table has
//! rows, the script records in the journal that a copy is due. If the outbox is configured
//! differently before the first run, no run copies these rows.

use super::{DATABASE_OID, SYSTEM_ID, TableGap, TableObservation, VERSION};
use crate::model::lsn::Lsn;
use crate::postgres::catalog::journal::Action;
use crate::postgres::catalog::own_table::{OwnTable, Use};
use crate::postgres::catalog::snapshot_history::TableSnapshot;
use crate::postgres::catalog::{Catalog, CatalogError, Rows, SnapshotRecord};
use crate::postgres::sql::text_literal;
use crate::postgres::table::TableName;
use crate::postgres::target::Target;

/// A table with rows that are older than the slot and that no run has started to copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct UncopiedTable {
    pub(crate) table: TableName,
    /// The slot's position when `sql/snapshot.sql` found the rows.
    pub(crate) slot_at: Lsn,
}

/// A copy of a table's existing rows that is due according to the journal.
pub(super) struct DueCopy {
    /// The table's name in the journal.
    recorded: TableName,
    /// The table's current name; `None` if the table no longer exists.
    current: Option<TableName>,
    /// Whether another table now has the recorded name.
    is_name_taken: bool,
    /// The slot's position when `sql/snapshot.sql` found the rows.
    slot_at: Lsn,
}

impl DueCopy {
    /// Returns the table's current name, or its recorded name if the table was dropped.
    pub(super) fn name(&self) -> &TableName {
        self.current.as_ref().unwrap_or(&self.recorded)
    }

    /// Returns whether another table of the outbox has replaced the table. In this case,
    /// [`super::replaced`] adds an entry to the journal.
    fn is_replaced(&self, target: &Target) -> bool {
        let TableName { schema, name } = &self.recorded;
        self.is_name_taken && target.outbox.includes(schema, name)
    }
}

impl Catalog {
    /// Returns the tables for which a copy is due but which the pipeline will not copy, because
    /// none of them is the configured outbox table.
    ///
    /// # Errors
    /// Returns an error if a query fails, or if `sql/examine.sql` rejects one of Walpost's tables.
    pub(crate) async fn uncopied_tables(
        &self,
        target: &Target,
        snapshots: &[TableSnapshot],
    ) -> Result<Vec<UncopiedTable>, CatalogError> {
        let mut found = Vec::new();
        for due in self.due_copies(target, snapshots).await? {
            let is_replaced = due.is_replaced(target);
            let Some(table) = due.current.filter(|_| !is_replaced) else {
                continue;
            };
            let is_own = target.outbox.table() == Some(&table);
            if !is_own && self.rows(&table).await? != Rows::None {
                let slot_at = due.slot_at;
                found.push(UncopiedTable { table, slot_at });
            }
        }
        Ok(found)
    }

    /// Returns whether a copy is due for any table that has rows.
    ///
    /// # Errors
    /// See [`Catalog::uncopied_tables`].
    pub(crate) async fn has_due_copy(
        &self,
        target: &Target,
        snapshots: &[TableSnapshot],
    ) -> Result<bool, CatalogError> {
        for due in self.due_copies(target, snapshots).await? {
            if let Some(table) = &due.current
                && self.rows(table).await? != Rows::None
            {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Returns the copies that are still due. A copy is no longer due if the slot will send the
    /// rows, or if the journal records all of them as missing.
    pub(super) async fn due_copies(
        &self,
        target: &Target,
        snapshots: &[TableSnapshot],
    ) -> Result<Vec<DueCopy>, CatalogError> {
        let mut due = Vec::new();
        for found in snapshots {
            let recorded = found.table.as_deref().and_then(|name| name.parse().ok());
            if let Some(recorded) = recorded
                && let SnapshotRecord::Due { slot_at, relation } =
                    SnapshotRecord::of_table(snapshots, Some(&recorded))
            {
                due.push((recorded, slot_at, relation));
            }
        }
        if due.is_empty() || self.has_streamed(target).await? {
            return Ok(Vec::new());
        }
        let created = self.created_position(target).await?;
        let mut copies = Vec::new();
        for (recorded, slot_at, relation) in due {
            // If a newer slot has replaced the slot for which the copy was due, the table's rows
            // were recorded as missing when the newer slot was created.
            if created.is_some_and(|created| created > slot_at)
                || self.is_sent_by_slot(target, relation).await?
            {
                continue;
            }
            let copy = self.due_copy(recorded, slot_at, relation).await?;
            if !self.is_recorded_as_missing(target, &copy).await? {
                copies.push(copy);
            }
        }
        Ok(copies)
    }

    /// Looks up the current name of a table for which a copy is due.
    async fn due_copy(
        &self,
        recorded: TableName,
        slot_at: Lsn,
        relation: u32,
    ) -> Result<DueCopy, CatalogError> {
        const SQL: &str = "SELECT n.nspname, c.relname, c.oid = $1 FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
             WHERE c.oid = $1 OR (n.nspname, c.relname) = ($2, $3)";
        let TableName { schema, name } = &recorded;
        let rows = self.client().query(SQL, &[&relation, schema, name]).await?;
        let (mut current, mut is_name_taken) = (None, false);
        for row in &rows {
            match row.try_get(2)? {
                true => current = Some(TableName::from_catalog(row.try_get(0)?, row.try_get(1)?)),
                false => is_name_taken = true,
            }
        }
        Ok(DueCopy {
            recorded,
            current,
            is_name_taken,
            slot_at,
        })
    }

    /// Returns the position at which the slot was created, according to `walpost.slot_state`.
    async fn created_position(&self, target: &Target) -> Result<Option<Lsn>, CatalogError> {
        if self
            .unusable(target, OwnTable::SlotState, Use::Read)
            .await?
            .is_some()
        {
            return Ok(None);
        }
        self.slot_state_position(target, "created_lsn").await
    }

    /// Returns whether the slot has yet to send the table's rows: `walpost.add_outbox` has written
    /// them to WAL, and the slot has not reached this WAL yet.
    async fn is_sent_by_slot(&self, target: &Target, relation: u32) -> Result<bool, CatalogError> {
        if self
            .unusable(target, OwnTable::TableState, Use::Read)
            .await?
            .is_some()
        {
            return Ok(false);
        }
        let sql = format!(
            "SELECT FROM walpost.table_state s JOIN pg_replication_slots r ON r.slot_name = s.slot::name WHERE s.slot = {} \
             AND s.version = {VERSION} AND s.system_id = {SYSTEM_ID} AND s.database_oid = {DATABASE_OID} AND s.relation = {relation} \
             AND NOT s.is_out AND s.seen_lsn > r.confirmed_flush_lsn",
            text_literal(&target.slot),
        );
        let rows = self.run_on_own_table(OwnTable::TableState, target, "", &sql);
        Ok(!rows.await?.is_empty())
    }

    /// Returns whether the journal records all of the table's rows as missing. In this case, a
    /// replay sends them, and `walpost run` does not need to copy them.
    async fn is_recorded_as_missing(
        &self,
        target: &Target,
        copy: &DueCopy,
    ) -> Result<bool, CatalogError> {
        let condition = format!(
            "j.slot = {} AND j.action = {} AND coalesce(j.from_lsn, '0/0'::pg_lsn) = '0/0'::pg_lsn AND j.to_lsn >= '{}'::pg_lsn \
             AND j.detail ->> 'table'::text IN ({}, {}) AND j.detail ->> 'system_id'::text = {SYSTEM_ID}",
            text_literal(&target.slot),
            text_literal(Action::DropSlot.name()),
            copy.slot_at,
            text_literal(&copy.recorded.to_string()),
            text_literal(&copy.name().to_string())
        );
        match self.entries(target, &condition).await {
            Err(CatalogError::NoJournal { .. }) => Ok(false),
            entries => Ok(!entries?.is_empty()),
        }
    }

    /// If the outbox has several tables and the existing rows of this table were not copied
    /// completely, extends `gap` to all rows of the table, because such a pipeline never completes
    /// the copy.
    pub(super) async fn widen_if_uncopied(
        &self,
        target: &Target,
        observed: &TableObservation,
        gap: TableGap,
    ) -> Result<TableGap, CatalogError> {
        if !target.outbox.is_several() {
            return Ok(gap);
        }
        let open = self
            .tables_with_open_copy(target, observed.slot.confirmed)
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
}
