//! Partitions that do not belong to the owner of their table.

use super::{Catalog, CatalogError, some_of};
use crate::postgres::table::{TableName, identifier};

/// A partitioned table, and its partitions that belong to other roles.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PartitionsOfOthers {
    pub(crate) table: String,
    pub(crate) owner: String,
    /// Names of the partitions.
    pub(crate) partitions: Vec<String>,
    /// Their owners.
    pub(crate) owners: Vec<String>,
    /// What is attached to them and calls functions, or uses types, that are not part of PostgreSQL itself. It stays when a
    /// partition gets another owner, whom autovacuum, for one, evaluates it as.
    pub(crate) attached: Vec<String>,
}

impl Catalog {
    /// Returns the partitions of these tables, at any level, that do not belong to the owner of the
    /// table.
    ///
    /// # Errors
    /// The query fails.
    pub(crate) async fn partitions_of_others(
        &self,
        tables: &[TableName],
    ) -> Result<Vec<PartitionsOfOthers>, CatalogError> {
        let sql = "WITH RECURSIVE tree (root, owner, oid) AS ( \
                 SELECT c.oid, c.relowner, c.oid FROM unnest($1::text[], $2::text[]) AS t (schema, name) \
                 JOIN pg_namespace n ON n.nspname = t.schema \
                 JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = t.name AND c.relkind = 'p' \
                 UNION SELECT root, owner, inhrelid FROM tree JOIN pg_inherits ON inhparent = tree.oid), \
             of_others (root, oid) AS (SELECT root, c.oid FROM tree JOIN pg_class c ON c.oid = tree.oid AND c.relowner <> owner), \
             attached (root, class, object) AS ( \
                 SELECT root, 'pg_class'::regclass, indexrelid FROM of_others JOIN pg_index ON indrelid = oid \
                 UNION ALL SELECT root, 'pg_constraint'::regclass, k.oid FROM of_others o JOIN pg_constraint k ON conrelid = o.oid \
                 UNION ALL SELECT root, 'pg_statistic_ext'::regclass, s.oid FROM of_others o JOIN pg_statistic_ext s ON stxrelid = o.oid \
                 UNION ALL SELECT root, 'pg_attrdef'::regclass, d.oid FROM of_others o JOIN pg_attrdef d ON adrelid = o.oid \
                     JOIN pg_attribute ON attrelid = adrelid AND attnum = adnum AND attgenerated <> '' \
                 UNION ALL SELECT root, 'pg_rewrite'::regclass, r.oid FROM of_others o JOIN pg_rewrite r ON ev_class = o.oid \
                 UNION ALL SELECT root, 'pg_trigger'::regclass, g.oid FROM of_others o JOIN pg_trigger g ON tgrelid = o.oid \
                     WHERE NOT tgisinternal AND tgparentid = 0) \
             SELECT root::regclass::text, pg_get_userbyid(owner)::text, \
                 array_agg(c.oid::regclass::text ORDER BY c.relname), \
                 array_agg(DISTINCT pg_get_userbyid(c.relowner)::text), \
                 ARRAY(SELECT DISTINCT pg_describe_object(class, object, 0) FROM attached a \
                     JOIN pg_depend ON classid = class AND objid = object AND refclassid IN \
                         ('pg_proc'::regclass, 'pg_operator'::regclass, 'pg_type'::regclass) WHERE a.root = tree.root ORDER BY 1) \
             FROM tree JOIN pg_class c ON c.oid = tree.oid AND c.relowner <> owner GROUP BY root, owner ORDER BY 1";
        let schemas: Vec<_> = tables.iter().map(|table| table.schema.as_str()).collect();
        let names: Vec<_> = tables.iter().map(|table| table.name.as_str()).collect();
        let rows = self.client().query(sql, &[&schemas, &names]).await?;
        let found = |row: &tokio_postgres::Row| {
            Ok(PartitionsOfOthers {
                table: row.try_get(0)?,
                owner: row.try_get(1)?,
                partitions: row.try_get(2)?,
                owners: row.try_get(3)?,
                attached: row.try_get(4)?,
            })
        };
        rows.iter().map(found).collect()
    }
}

impl PartitionsOfOthers {
    /// Describes the problem, with the statement that fixes it.
    pub(crate) fn warning(&self) -> String {
        let owners: Vec<_> = self.owners.iter().map(|owner| identifier(owner)).collect();
        let first = self.partitions.first().map_or("...", String::as_str);
        let owner = identifier(&self.owner);
        let drop_first = match self.attached.is_empty() {
            true => String::new(),
            false => format!(
                "First drop {}, which would stay and run code as role {owner}. ",
                some_of(&self.attached)
            ),
        };
        format!(
            "table {} belongs to role {owner}, and its partitions {} to {}: an index that the owner of the table creates is built as \
             the owner of each partition, and could call functions as that role. {drop_first}Give each to the owner of the table: \
             ALTER TABLE {first} OWNER TO {owner}",
            self.table,
            some_of(&self.partitions),
            some_of(&owners),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warning_has_the_statement_that_gives_a_partition_to_the_owner_of_its_table() {
        let found = PartitionsOfOthers {
            table: "app.outbox".to_owned(),
            owner: "My shop".to_owned(),
            partitions: vec!["app.outbox_p1".to_owned(), "app.outbox_p2".to_owned()],
            owners: vec!["postgres".to_owned()],
            attached: vec!["index app.i".to_owned()],
        };
        let warning = found.warning();
        assert!(
            warning.contains("ALTER TABLE app.outbox_p1 OWNER TO \"My shop\""),
            "{warning}"
        );
        assert!(warning.contains("app.outbox_p2 to postgres"), "{warning}");
        assert!(warning.contains("First drop index app.i, "), "{warning}");
    }
}
