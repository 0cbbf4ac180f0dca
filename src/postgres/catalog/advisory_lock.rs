//! Finds the holder of an advisory lock that Walpost requires.

use tokio_postgres::types::ToSql;

use super::{AdvisoryLockHolder, Catalog, CatalogError, Holder};

/// A query for the holders of advisory locks in this database. The lock of a prepared transaction
/// has no PID, so the transaction is found through the lock on its own transaction ID. The role is
/// NULL if it was dropped.
const HOLDERS: &str = "SELECT l.classid, l.objid, l.objsubid, l.pid, x.gid, coalesce(a.usename, x.owner)::text AS role, \
    a.application_name, host(a.client_addr) AS address \
    FROM pg_locks l LEFT JOIN pg_stat_activity a ON a.pid = l.pid \
    LEFT JOIN (pg_locks t JOIN pg_prepared_xacts x ON x.transaction = t.transactionid) \
    ON l.pid IS NULL AND t.pid IS NULL AND t.virtualtransaction = l.virtualtransaction \
    WHERE l.locktype = 'advisory' AND l.granted AND (a.pid IS NOT NULL OR x.gid IS NOT NULL) \
    AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())";

impl Catalog {
    /// Returns a session or prepared transaction that holds an advisory lock in this database, or
    /// `None` if the lock has been released. `condition` is an SQL condition that selects the lock.
    /// It can refer to the columns of `pg_locks` and to the holder's role.
    ///
    /// # Errors
    /// Returns an error if the query fails.
    pub(crate) async fn advisory_lock_holder(
        &self,
        condition: &str,
        parameters: &[&(dyn ToSql + Sync)],
    ) -> Result<Option<AdvisoryLockHolder>, CatalogError> {
        let sql = format!(
            "SELECT pid, gid, role, coalesce(application_name, ''), address FROM ({HOLDERS}) AS holders \
             WHERE {condition} ORDER BY pid LIMIT 1"
        );
        let Some(row) = self.client().query_opt(&sql, parameters).await? else {
            return Ok(None);
        };
        let identity = Holder {
            role: row.try_get(2)?,
            application_name: row.try_get(3)?,
            address: row.try_get(4)?,
        };
        Ok(Some(match row.try_get(0)? {
            Some(pid) => AdvisoryLockHolder::Session { pid, identity },
            None => AdvisoryLockHolder::PreparedTransaction {
                name: row.try_get(1)?,
                role: identity.role,
            },
        }))
    }
}
