//! Reports which sessions or slots have exhausted one of the server's limits.

use super::{Catalog, CatalogError};
use crate::postgres::connect::dial::ServerError;

/// A query for the sessions that send WAL, oldest first.
const WAL_SENDERS: &str = "SELECT format('PID %s (application_name %I%s)', pid, application_name, \
     ', address ' || host(client_addr)) FROM pg_stat_replication ORDER BY backend_start, pid";
/// A query for the slots. Inactive slots come first, because they may no longer be needed.
const SLOTS: &str = "SELECT format('%I (%s)', slot_name, CASE WHEN active THEN 'read by PID ' || active_pid \
     ELSE 'not read' END) FROM pg_replication_slots ORDER BY active, slot_name";
/// Maximum number of sessions or slots named in a message.
const LISTED_MAX: usize = 10;

/// A resource that the server limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Limit {
    /// `max_wal_senders`.
    Senders,
    /// `max_replication_slots`.
    Slots,
}

impl Limit {
    /// Returns the resource that may be exhausted if the server returns an error with this
    /// SQLSTATE. The error alone is not conclusive: the server also returns 53300
    /// (too_many_connections) if an ordinary connection exceeds a limit.
    fn from_sqlstate(code: &str) -> Option<Self> {
        match code {
            "53300" => Some(Self::Senders),
            "53400" => Some(Self::Slots),
            _ => None,
        }
    }

    fn setting(self) -> &'static str {
        match self {
            Self::Senders => "max_wal_senders",
            Self::Slots => "max_replication_slots",
        }
    }

    fn users(self) -> &'static str {
        match self {
            Self::Senders => WAL_SENDERS,
            Self::Slots => SLOTS,
        }
    }

    fn remedy(self) -> &'static str {
        match self {
            Self::Senders => {
                "Terminate a session that is not needed: SELECT pg_catalog.pg_terminate_backend(...)"
            }
            Self::Slots => {
                "Drop a slot that is not needed: SELECT pg_catalog.pg_drop_replication_slot(...)"
            }
        }
    }
}

impl Catalog {
    /// If an error occurred because no WAL sender or slot was available, adds a hint that lists the
    /// sessions or slots in use and explains the remedy.
    pub(crate) async fn add_limit_hint(&self, error: &mut ServerError) {
        let Some(limit) = Limit::from_sqlstate(&error.code) else {
            return;
        };
        // If the query fails, leave the original error unchanged.
        if let Ok(Some(exhausted_limit)) = self.exhausted_limit(limit).await {
            error.hint = Some(exhausted_limit);
        }
    }

    /// If the resource is exhausted, returns a message that lists the sessions or slots in use and
    /// explains the remedy.
    ///
    /// # Errors
    /// Returns an error if a query fails.
    pub(crate) async fn exhausted_limit(
        &self,
        limit: Limit,
    ) -> Result<Option<String>, CatalogError> {
        let setting = limit.setting();
        let sql = format!("SELECT current_setting('{setting}')::int8");
        let max: i64 = self.client.query_one(&sql, &[]).await?.try_get(0)?;
        let rows = self.client.query(limit.users(), &[]).await?;
        if i64::try_from(rows.len()).is_ok_and(|used| used < max) {
            return Ok(None);
        }
        let mut users = Vec::new();
        for row in rows.iter().take(LISTED_MAX) {
            users.push(row.try_get::<_, String>(0)?);
        }
        if rows.len() > LISTED_MAX {
            users.push(format!("and {} more", rows.len() - LISTED_MAX));
        }
        Ok(Some(format!(
            "{setting} is {max}, and all are in use: {}. {}. To raise the limit: ALTER SYSTEM SET {setting} = {}, then \
             restart the server",
            users.join(", "),
            limit.remedy(),
            2 * max.max(5)
        )))
    }
}
