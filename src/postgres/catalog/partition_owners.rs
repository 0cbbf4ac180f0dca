//! Finds partitions whose owner differs from the owner of the partitioned table.

use super::{Catalog, CatalogError, format_some};
use crate::postgres::table::{TableName, identifier};

/// A partitioned table, and the partitions that its owner does not own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PartitionsWithOtherOwners {
    pub(crate) table: String,
    pub(crate) owner: String,
    /// Names of the partitions.
    pub(crate) partitions: Vec<String>,
    /// The owners of the partitions.
    pub(crate) owners: Vec<String>,
}

impl Catalog {
    /// Returns the partitions of these tables, at any level, whose owner differs from the table's
    /// owner.
    ///
    /// # Errors
    /// Returns an error if the query fails.
    pub(crate) async fn partitions_with_other_owners(
        &self,
        tables: &[TableName],
    ) -> Result<Vec<PartitionsWithOtherOwners>, CatalogError> {
        let sql = "WITH RECURSIVE tree (root, owner, oid) AS ( \
                 SELECT c.oid, c.relowner, c.oid FROM unnest($1::text[], $2::text[]) AS t (schema, name) \
                 JOIN pg_namespace n ON n.nspname = t.schema \
                 JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = t.name AND c.relkind = 'p' \
                 UNION SELECT root, owner, inhrelid FROM tree JOIN pg_inherits ON inhparent = tree.oid) \
             SELECT root::regclass::text, pg_get_userbyid(owner)::text, \
                 array_agg(c.oid::regclass::text ORDER BY c.relname), \
                 array_agg(DISTINCT pg_get_userbyid(c.relowner)::text) \
             FROM tree JOIN pg_class c ON c.oid = tree.oid AND c.relowner <> owner GROUP BY root, owner ORDER BY 1";
        let schemas: Vec<_> = tables.iter().map(|table| table.schema.as_str()).collect();
        let names: Vec<_> = tables.iter().map(|table| table.name.as_str()).collect();
        let rows = self.client().query(sql, &[&schemas, &names]).await?;
        let found = |row: &tokio_postgres::Row| {
            Ok(PartitionsWithOtherOwners {
                table: row.try_get(0)?,
                owner: row.try_get(1)?,
                partitions: row.try_get(2)?,
                owners: row.try_get(3)?,
            })
        };
        rows.iter().map(found).collect()
    }
}

impl PartitionsWithOtherOwners {
    /// Describes the problem, with the statement that fixes it.
    pub(crate) fn warning(&self) -> String {
        let owners: Vec<_> = self.owners.iter().map(|owner| identifier(owner)).collect();
        let owner = identifier(&self.owner);
        format!(
            "table {} belongs to role {owner}, but its partitions {} belong to {}: an index that the table's owner \
             creates is built with the privileges of each partition's owner, and could call functions as that role. \
             Change the owner of each partition to the owner of the table as described in docs/retention.md, \"Change \
             the owner\": objects that the current owner has attached to a partition remain attached",
            self.table,
            format_some(&self.partitions),
            format_some(&owners),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warning_names_the_partitions_and_the_documentation_page() {
        let found = PartitionsWithOtherOwners {
            table: "app.outbox".to_owned(),
            owner: "My shop".to_owned(),
            partitions: vec!["app.outbox_p1".to_owned(), "app.outbox_p2".to_owned()],
            owners: vec!["postgres".to_owned()],
        };
        let warning = found.warning();
        assert!(
            warning.contains("app.outbox belongs to role \"My shop\""),
            "{warning}"
        );
        assert!(
            warning.contains("app.outbox_p2 belong to postgres"),
            "{warning}"
        );
        assert!(warning.contains("docs/retention.md"), "{warning}");
    }
}
