//! Ensures that only one `walpost init` runs at a time in a database: concurrent runs would try to
//! create the same objects, and one run would fail.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::{Catalog, CatalogError};
use crate::postgres::table::identifier;

/// How often Walpost tries to acquire the lock.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The keys of the advisory lock. The first key is "walp" in ASCII. Retention uses the same first
/// key to lock a table, but the table's OID as the second key.
const LOCK_KEY: &str = "x'77616c70'::int, 0";

impl Catalog {
    /// Acquires the lock and keeps it until this session ends. Waits at most `limit` for each
    /// session that holds the lock.
    ///
    /// # Errors
    /// Returns an error if another session holds the lock for longer than `limit`, or if a query
    /// fails.
    pub(crate) async fn lock_init(&self, limit: Duration) -> Result<(), CatalogError> {
        let mut waiting_for: Option<(i32, Instant)> = None;
        loop {
            let sql = format!("SELECT pg_try_advisory_lock({LOCK_KEY})");
            if self.client().query_one(&sql, &[]).await?.try_get(0)? {
                return Ok(());
            }
            let holder = self
                .client()
                .query_opt(
                    "SELECT l.pid, a.usename::text FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid \
                     WHERE l.locktype = 'advisory' AND l.granted AND l.classid = x'77616c70'::int::oid AND l.objid = 0 \
                     AND l.objsubid = 2 AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())",
                    &[],
                )
                .await?;
            if let Some(row) = holder {
                let pid = row.try_get(0)?;
                let since = match waiting_for {
                    Some((last_pid, since)) if last_pid == pid => since,
                    _ => {
                        tracing::info!(pid, "waiting for another walpost init in this database");
                        Instant::now()
                    }
                };
                waiting_for = Some((pid, since));
                if since.elapsed() >= limit {
                    let role = row.try_get::<_, Option<String>>(1)?.unwrap_or_default();
                    let role = identifier(&role);
                    return Err(CatalogError::InitRuns { pid, role });
                }
            }
            sleep(POLL_INTERVAL).await;
        }
    }

    /// Releases the lock.
    pub(crate) async fn unlock_init(&self) {
        // If the connection is lost, the server releases the lock.
        let sql = format!("SELECT pg_advisory_unlock({LOCK_KEY})");
        let _ = self.client().query_one(&sql, &[]).await;
    }
}
