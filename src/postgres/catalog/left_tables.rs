//! Finds tables that a former slot delivered but that its successor does not deliver, because they
//! were renamed, were dropped, were removed from the publication, or could not be added to it. If
//! the former slot had not delivered all rows of such a table, no slot sends the remaining rows.

use super::own_table::{OwnTable, Use};
use super::slot_state::FormerSlot;
use super::table_state::{DATABASE_OID, SYSTEM_ID, VERSION, grant, text_array};
use super::{Catalog, CatalogError};
use crate::model::lsn::Lsn;
use crate::postgres::sql::text_literal;
use crate::postgres::table::TableName;
use crate::postgres::target::{OUTBOX_ROW, Target};

/// Returns a query for a slot's rows in `walpost.table_state`. The query adds the current name of
/// each table, or the recorded name if the table does not exist in this database.
fn recorded(former: &FormerSlot) -> String {
    format!(
        "SELECT s.*, coalesce(n.nspname, s.table_schema) AS present_schema, coalesce(c.relname, s.table_name) AS present_name \
         FROM walpost.table_state s \
         LEFT JOIN pg_class c ON c.oid = s.relation AND s.system_id = {SYSTEM_ID} AND s.database_oid = {DATABASE_OID} \
         LEFT JOIN pg_namespace n ON n.oid = c.relnamespace WHERE s.slot = {} AND s.version = {VERSION}",
        text_literal(&former.slot)
    )
}

impl Catalog {
    /// Returns the tables that a former slot may not have delivered completely and that are not in
    /// `target`'s publication.
    ///
    /// # Errors
    /// Returns an error if a query fails, or if `walpost.table_state` is unreadable or is rejected
    /// by `sql/examine.sql`.
    pub(super) async fn left_tables(
        &self,
        target: &Target,
        former: &FormerSlot,
    ) -> Result<Vec<TableName>, CatalogError> {
        let unusable = self
            .unusable(target, OwnTable::TableState, Use::Read)
            .await?;
        if unusable.is_some() {
            return Ok(Vec::new());
        }
        let [schema, name] = OUTBOX_ROW;
        // Omit tables that were removed from the publication before the slot's last position: the
        // slot sent all rows that were committed before the removal.
        let sql = format!(
            "SELECT DISTINCT present_schema, present_name FROM ({}) AS recorded \
             WHERE (NOT is_out OR out_lsn IS NULL OR out_lsn > '{}'::pg_lsn) \
             AND (table_schema, table_name) <> ('{schema}'::text, '{name}'::text) ORDER BY 1, 2",
            recorded(former),
            former.confirmed
        );
        let rows = self
            .run_on_own_table(OwnTable::TableState, target, "", &sql)
            .await
            .map_err(|error| self.with_grant(error, |role| grant(role, "SELECT")))?;
        let version = self.version().await?;
        let published = self.published_tables(&target.publication, version).await?;
        let mut left = Vec::with_capacity(rows.len());
        for row in &rows {
            if let (Some(schema), Some(name)) = (row.get(0), row.get(1)) {
                left.push(TableName::from_catalog(schema, name));
            }
        }
        left.retain(|table| published.iter().all(|found| found.name != *table));
        Ok(left)
    }

    /// Records that the tables in `left`, which a former slot delivered, are not published for
    /// `target`'s slot. `found` is the position of that slot. If one of the tables is added to the
    /// publication later, the rows committed after `found` and before the table is added are
    /// recorded as missing.
    ///
    /// # Errors
    /// Returns an error if a query fails, or if `walpost.table_state` is not writable or is
    /// rejected by `sql/examine.sql`.
    pub(super) async fn record_left_tables(
        &self,
        target: &Target,
        former: &FormerSlot,
        left: &[TableName],
        found: Lsn,
    ) -> Result<(), CatalogError> {
        let unusable = self
            .unusable(target, OwnTable::TableState, Use::Write)
            .await?;
        if left.is_empty() || former.slot == target.slot || unusable.is_some() {
            return Ok(());
        }
        let sql = format!(
            "INSERT INTO walpost.table_state (slot, table_schema, table_name, version, system_id, database_oid, publication, relation, \
             memberships, is_out, seen_lsn, seen_xid, out_lsn, at) SELECT DISTINCT ON (present_schema, present_name) {}, \
             present_schema, present_name, version, system_id, database_oid, publication, relation, memberships, true, \
             '{found}'::pg_lsn, NULL::text, '{found}'::pg_lsn, now() FROM ({}) AS recorded \
             WHERE system_id = {SYSTEM_ID} AND database_oid = {DATABASE_OID} \
             AND (present_schema, present_name) IN (SELECT * FROM unnest({}, {})) \
             ON CONFLICT (slot, table_schema, table_name) DO NOTHING",
            text_literal(&target.slot),
            recorded(former),
            text_array(left.iter().map(|table| table.schema.as_str())),
            text_array(left.iter().map(|table| table.name.as_str())),
        );
        self.write_tables(target, &sql).await?;
        Ok(())
    }
}
