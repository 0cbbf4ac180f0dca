//! Queries which privileges PUBLIC has on an outbox that uses logical messages.

use super::{Catalog, CatalogError};

/// Privileges that are granted to PUBLIC.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PublicPrivileges {
    /// Whether PUBLIC is allowed to call `walpost.publish` or `walpost.publish_bytes`.
    pub publishes: bool,
    /// The functions with which PUBLIC is allowed to write arbitrary logical messages, formatted
    /// for GRANT and REVOKE; `None` if there are no such functions.
    pub emits: Option<String>,
}

impl Catalog {
    /// Queries the privileges that are granted to PUBLIC.
    ///
    /// # Errors
    /// Returns an error if the query fails.
    pub(crate) async fn public_privileges(&self) -> Result<PublicPrivileges, CatalogError> {
        const SQL: &str = "WITH f AS (SELECT n.nspname, p.proname, \
             format('%I.%I(%s)', n.nspname, p.proname, oidvectortypes(p.proargtypes)) AS named FROM pg_proc p \
             JOIN pg_namespace n ON n.oid = p.pronamespace \
             WHERE (n.nspname = 'walpost' AND p.proname IN ('publish', 'publish_bytes') \
                 OR n.nspname = 'pg_catalog' AND p.proname = 'pg_logical_emit_message') \
             AND EXISTS (SELECT FROM aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a \
                 WHERE a.grantee = 0 AND a.privilege_type = 'EXECUTE')) \
             SELECT EXISTS (SELECT FROM f WHERE nspname = 'walpost') AND EXISTS (SELECT FROM pg_namespace n, \
                 aclexplode(coalesce(n.nspacl, acldefault('n', n.nspowner))) a \
                 WHERE n.nspname = 'walpost' AND a.grantee = 0 AND a.privilege_type = 'USAGE'), \
             (SELECT string_agg(named, ', ' ORDER BY named DESC) FROM f WHERE nspname = 'pg_catalog')";
        let row = self.client.query_one(SQL, &[]).await?;
        Ok(PublicPrivileges {
            publishes: row.try_get(0)?,
            emits: row.try_get(1)?,
        })
    }
}
