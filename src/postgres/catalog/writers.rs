//! Queries the roles that are allowed to insert into an outbox table.

use super::{Catalog, CatalogError};
use crate::postgres::table::TableName;

/// The roles that are allowed to insert into a table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Writers {
    /// The table's owner.
    pub owner: String,
    pub is_owner_superuser: bool,
    /// Roles other than the owner that have the INSERT privilege on the table or on any of its
    /// columns.
    pub granted: Vec<String>,
    /// Whether PUBLIC, and therefore every role, has the INSERT privilege.
    pub is_public: bool,
}

impl Catalog {
    /// Returns the roles that are allowed to insert into the table. Does not list roles that have
    /// the privilege only as members of these roles.
    ///
    /// # Errors
    /// Returns an error if a query fails.
    pub(crate) async fn writers(&self, table: &TableName) -> Result<Writers, CatalogError> {
        const SQL: &str = "WITH t AS (SELECT c.oid, c.relowner, c.relacl FROM pg_class c \
                 JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = $1 AND c.relname = $2), \
             g AS (SELECT a.grantee FROM t, aclexplode(t.relacl) a WHERE a.privilege_type = 'INSERT' \
                 UNION SELECT a.grantee FROM t JOIN pg_attribute k ON k.attrelid = t.oid, aclexplode(k.attacl) a \
                 WHERE a.privilege_type = 'INSERT') \
             SELECT r.rolname::text, r.rolsuper, \
                 (SELECT coalesce(array_agg(w.rolname::text ORDER BY w.rolname), '{}') FROM g JOIN pg_roles w ON w.oid = g.grantee \
                 WHERE w.oid <> t.relowner), \
                 EXISTS (SELECT FROM g WHERE grantee = 0) \
             FROM t JOIN pg_roles r ON r.oid = t.relowner";
        let row = self
            .client()
            .query_one(SQL, &[&table.schema, &table.name])
            .await?;
        Ok(Writers {
            owner: row.try_get(0)?,
            is_owner_superuser: row.try_get(1)?,
            granted: row.try_get(2)?,
            is_public: row.try_get(3)?,
        })
    }
}
