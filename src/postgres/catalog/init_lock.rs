//! Ensures that only one `walpost init` runs at a time in a database: concurrent runs would try to
//! create the same objects, and one run would fail.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::{AdvisoryLockHolder, Catalog, CatalogError};

/// How often `walpost init` tries to acquire the lock.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The keys of the advisory lock. The first key is "walp" in ASCII. Retention locks a table with
/// the same first key and the table's OID as the second key.
const LOCK_KEY: &str = "x'77616c70'::int, 0";

/// A condition on `pg_locks` that selects the lock.
const IS_INIT_LOCK: &str = "classid = x'77616c70'::int::oid AND objid = 0 AND objsubid = 2";

impl Catalog {
    /// Acquires the lock that only one `walpost init` can hold at a time, and keeps the lock until
    /// this session ends. Waits at most `limit` for each session or prepared transaction that holds
    /// the lock.
    ///
    /// # Errors
    /// Returns an error if the lock is held for longer than `limit`, or if a query fails.
    pub(crate) async fn lock_init(&self, limit: Duration) -> Result<(), CatalogError> {
        let mut waiting_for: Option<(AdvisoryLockHolder, Instant)> = None;
        loop {
            let sql = format!("SELECT pg_try_advisory_lock({LOCK_KEY})");
            if self.client().query_one(&sql, &[]).await?.try_get(0)? {
                return Ok(());
            }
            if let Some(holder) = self.advisory_lock_holder(IS_INIT_LOCK, &[]).await? {
                let since = match &waiting_for {
                    // A session can change its application_name, but not its PID.
                    Some((last, since)) if last.release() == holder.release() => *since,
                    _ => {
                        tracing::info!(%holder, "waiting for another walpost init in this database to finish");
                        Instant::now()
                    }
                };
                if since.elapsed() >= limit {
                    return Err(CatalogError::InitRuns {
                        holder: holder.to_string(),
                        release: holder.release(),
                    });
                }
                waiting_for = Some((holder, since));
            }
            sleep(POLL_INTERVAL).await;
        }
    }

    /// Releases the lock that [`Catalog::lock_init`] acquires.
    pub(crate) async fn unlock_init(&self) {
        // If the connection is lost, the server releases the lock.
        let sql = format!("SELECT pg_advisory_unlock({LOCK_KEY})");
        let _ = self.client().query_one(&sql, &[]).await;
    }
}
