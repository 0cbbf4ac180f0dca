//! The maximum event size that each outbox table accepts.

use super::{Catalog, CatalogError};
use crate::postgres::table::TableName;

/// The CHECK constraint `walpost_event_size` of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EventLimit {
    pub table: TableName,
    /// Maximum combined size of an event's payload and headers.
    pub bytes: u64,
}

impl EventLimit {
    /// Returns the statements that change the table's limit. Existing rows are not checked against
    /// the new limit.
    ///
    /// PostgreSQL resolves the functions in the constraint's expression when it creates the
    /// constraint, so the statements set `search_path` first.
    #[must_use]
    pub(crate) fn change_to(&self, bytes: u64) -> String {
        format!(
            "SET search_path = pg_catalog; ALTER TABLE {} DROP CONSTRAINT IF EXISTS walpost_event_size, ADD CONSTRAINT walpost_event_size CHECK \
             (coalesce(octet_length(payload::text), 0) + coalesce(octet_length(headers::text), 0) <= {bytes}) NOT VALID",
            self.table
        )
    }
}

impl Catalog {
    /// Returns the limits of the given tables that have a CHECK constraint in the form that
    /// sql/outbox.sql creates.
    ///
    /// # Errors
    /// Returns an error if the query fails.
    pub(crate) async fn event_limits(
        &self,
        tables: &[TableName],
    ) -> Result<Vec<EventLimit>, CatalogError> {
        let schemas: Vec<_> = tables.iter().map(|table| &*table.schema).collect();
        let names: Vec<_> = tables.iter().map(|table| &*table.name).collect();
        let rows = self
            .client()
            .query(
                "SELECT n.nspname::text, c.relname::text, substring(pg_get_constraintdef(k.oid) FROM \
                 '<= ''?([0-9]{1,18})[^0-9]') FROM pg_constraint k JOIN pg_class c ON c.oid = k.conrelid \
                 JOIN pg_namespace n ON n.oid = c.relnamespace JOIN unnest($1::text[], $2::text[]) AS wanted (schema, name) \
                 ON n.nspname = wanted.schema AND c.relname = wanted.name WHERE k.conname = 'walpost_event_size' \
                 AND k.contype = 'c'",
                &[&schemas, &names],
            )
            .await?;
        let mut limits = Vec::new();
        for row in rows {
            let digits: Option<String> = row.try_get(2)?;
            if let Some(bytes) = digits.and_then(|digits| digits.parse().ok()) {
                let table = TableName {
                    schema: row.try_get(0)?,
                    name: row.try_get(1)?,
                };
                limits.push(EventLimit { table, bytes });
            }
        }
        Ok(limits)
    }
}
