//! Who has what there is a fixed number of in the server.

use super::{Catalog, CatalogError};
use crate::postgres::connect::dial::ServerError;

/// Sessions that send the log, in the order in which they began.
const SENDERS: &str = "SELECT format('PID %s (application_name %I%s)', pid, application_name, \
     ', address ' || host(client_addr)) FROM pg_stat_replication ORDER BY backend_start, pid";
/// Slots; those that nobody reads, which may be nobody's, come first.
const SLOTS: &str = "SELECT format('%I (%s)', slot_name, CASE WHEN active THEN 'read by PID ' || active_pid \
     ELSE 'not read' END) FROM pg_replication_slots ORDER BY active, slot_name";
/// So many of them are named.
const NAMED: usize = 10;

/// Something that there is a fixed number of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Limit {
    /// `max_wal_senders`
    Senders,
    /// `max_replication_slots`
    Slots,
}

impl Limit {
    /// What an error with this SQLSTATE can be about. 53300, too_many_connections, is about ordinary
    /// connections too.
    fn of(code: &str) -> Option<Self> {
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
            Self::Senders => SENDERS,
            Self::Slots => SLOTS,
        }
    }

    fn remedy(self) -> &'static str {
        match self {
            Self::Senders => {
                "End one that is not needed: SELECT pg_catalog.pg_terminate_backend(...)"
            }
            Self::Slots => {
                "Drop one that nobody needs: SELECT pg_catalog.pg_drop_replication_slot(...)"
            }
        }
    }
}

impl Catalog {
    /// Says of an error that the server gives for want of walsenders or slots who has them, and what fixes
    /// it.
    pub(crate) async fn name_users(&self, error: &mut ServerError) {
        let Some(limit) = Limit::of(&error.code) else {
            return;
        };
        // Without an answer the error is what it was.
        if let Ok(Some(used_up)) = self.used_up(limit).await {
            error.hint = Some(used_up);
        }
    }

    /// Who has all there is of it, and what fixes that; nothing where there is more.
    ///
    /// # Errors
    /// The server can't be asked.
    pub(crate) async fn used_up(&self, limit: Limit) -> Result<Option<String>, CatalogError> {
        let setting = limit.setting();
        let sql = format!("SELECT current_setting('{setting}')::int8");
        let max: i64 = self.client.query_one(&sql, &[]).await?.try_get(0)?;
        let rows = self.client.query(limit.users(), &[]).await?;
        if i64::try_from(rows.len()).is_ok_and(|used| used < max) {
            return Ok(None);
        }
        let mut users = Vec::new();
        for row in rows.iter().take(NAMED) {
            users.push(row.try_get::<_, String>(0)?);
        }
        if rows.len() > NAMED {
            users.push(format!("and {} more", rows.len() - NAMED));
        }
        Ok(Some(format!(
            "{setting} is {max}, and all are in use: {}. {}. To have more: ALTER SYSTEM SET {setting} = {}, and restart \
             the server",
            users.join(", "),
            limit.remedy(),
            2 * max.max(5)
        )))
    }
}
