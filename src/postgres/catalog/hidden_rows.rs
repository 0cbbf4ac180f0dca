//! Finds tables whose rows appear in a SELECT from an outbox table, although PostgreSQL does not
//! send them as rows of the outbox table.

use std::fmt;

use super::observed::format_some;
use super::{Catalog, CatalogError};
use crate::postgres::table::TableName;
use crate::postgres::target::Target;

/// A table whose rows appear to be rows of an outbox table but are not delivered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HiddenRows {
    table: TableName,
    /// The outbox table in which the rows appear.
    outbox: TableName,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A child table that inherits from the outbox and is not a partition. If PostgreSQL sends the
    /// child table's rows at all, it sends them under the child table's name.
    Child,
    /// An unlogged partition, whose rows are not written to WAL.
    UnloggedPartition,
    /// A foreign partition, whose rows are stored on another server.
    ForeignPartition,
}

impl HiddenRows {
    pub(super) fn into_table(self) -> TableName {
        self.table
    }
}

impl fmt::Display for HiddenRows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            table,
            outbox,
            kind,
        } = self;
        match kind {
            Kind::Child => write!(f, "{table}, which inherits from {outbox}"),
            Kind::UnloggedPartition => write!(f, "{table}, an unlogged partition of {outbox}"),
            Kind::ForeignPartition => write!(f, "{table}, a foreign partition of {outbox}"),
        }
    }
}

/// Returns a warning that lists the tables whose rows are not delivered, and the remedy for the
/// first table. Returns `None` if `hidden` is empty.
#[must_use]
pub(crate) fn hidden_rows_warning(
    target: &Target,
    hidden: &[HiddenRows],
) -> Option<(String, String)> {
    let first = hidden.first()?;
    let names: Vec<_> = hidden.iter().map(HiddenRows::to_string).collect();
    let HiddenRows {
        table,
        outbox,
        kind,
    } = first;
    let remedy = match kind {
        Kind::Child => format!(
            "As the owner of {outbox}, insert the rows of {table} into {outbox} and end the inheritance: ALTER TABLE \
             {table} NO INHERIT {outbox}"
        ),
        Kind::UnloggedPartition => {
            format!(
                "To deliver future rows, as the owner of {table}: ALTER TABLE {table} SET LOGGED. To deliver existing rows: {}",
                target.replay_from()
            )
        }
        Kind::ForeignPartition => format!(
            "As the owner of {outbox}, insert the rows of {table} into {outbox} and detach the partition: ALTER TABLE \
             {outbox} DETACH PARTITION {table}"
        ),
    };
    Some((
        format!(
            "a SELECT from the outbox also returns rows that are not delivered, because PostgreSQL does not publish \
             them as rows of the outbox: table {}",
            format_some(&names)
        ),
        remedy,
    ))
}

impl Catalog {
    /// Returns the tables that inherit from outbox tables, at any level, but whose rows are not
    /// sent as rows of the outbox. Does not lock any tables.
    ///
    /// # Errors
    /// Returns an error if the query fails.
    pub(crate) async fn hidden_rows(
        &self,
        outboxes: &[TableName],
    ) -> Result<Vec<HiddenRows>, CatalogError> {
        if outboxes.is_empty() {
            return Ok(Vec::new());
        }
        let schemas: Vec<_> = outboxes.iter().map(|table| &*table.schema).collect();
        let names: Vec<_> = outboxes.iter().map(|table| &*table.name).collect();
        let rows = self
            .client()
            .query(
                "WITH RECURSIVE below AS (SELECT c.oid AS root, c.oid FROM pg_class c \
                 JOIN pg_namespace n ON n.oid = c.relnamespace \
                 JOIN unnest($1::text[], $2::text[]) AS wanted (schema, name) \
                 ON n.nspname = wanted.schema AND c.relname = wanted.name \
                 UNION SELECT b.root, i.inhrelid FROM below b JOIN pg_inherits i ON i.inhparent = b.oid) \
                 SELECT n.nspname::text, c.relname::text, m.nspname::text, r.relname::text, c.relispartition, c.relkind = 'f' \
                 FROM below b JOIN pg_class c ON c.oid = b.oid JOIN pg_namespace n ON n.oid = c.relnamespace \
                 JOIN pg_class r ON r.oid = b.root JOIN pg_namespace m ON m.oid = r.relnamespace \
                 WHERE b.oid <> b.root AND (NOT c.relispartition OR c.relkind = 'f' OR c.relpersistence <> 'p') ORDER BY 1, 2",
                &[&schemas, &names],
            )
            .await?;
        let hidden = |row: &tokio_postgres::Row| {
            let (is_partition, is_foreign): (bool, bool) = (row.try_get(4)?, row.try_get(5)?);
            Ok(HiddenRows {
                table: TableName {
                    schema: row.try_get(0)?,
                    name: row.try_get(1)?,
                },
                outbox: TableName {
                    schema: row.try_get(2)?,
                    name: row.try_get(3)?,
                },
                kind: match (is_partition, is_foreign) {
                    (false, _) => Kind::Child,
                    (true, true) => Kind::ForeignPartition,
                    (true, false) => Kind::UnloggedPartition,
                },
            })
        };
        rows.iter().map(hidden).collect()
    }
}
