//! Runs statements on Walpost's own tables. The table is examined before each statement, because
//! another role may have added code to it, such as a trigger, which would run with Walpost's
//! privileges.

use std::sync::atomic::{AtomicU64, Ordering};

use tokio_postgres::{SimpleQueryMessage, SimpleQueryRow};

use super::{Catalog, CatalogError};
use crate::postgres::sql::find_untyped_literal;
#[cfg(doc)]
use crate::postgres::sql::text_literal;
use crate::postgres::sql_file::{self, SessionKind};
use crate::postgres::target::Target;

/// How long to wait for a lock on one of Walpost's tables. The limit is low because Walpost
/// confirms no positions while it waits.
const LOCK_TIMEOUT: &str = "2s";

/// The SQLSTATEs of errors about the types of columns: undefined_function (which includes
/// operators) and datatype_mismatch.
const TYPE_ERRORS: [&str; 2] = ["42883", "42804"];

/// A table that `sql/journal.sql` creates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OwnTable {
    Journal,
    SlotState,
    /// `walpost.table_state` together with the journal. Both are examined because the same
    /// statement may write to both.
    TableState,
}

/// The kind of access to a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    Read,
    Write,
}

impl OwnTable {
    /// Returns the keywords that select this table in `sql/examine.sql`. With the keyword
    /// `present`, `sql/examine.sql` fails if the table is missing. The statement has already been
    /// prepared at this point, so the table can be missing only if its schema was renamed in the
    /// meantime.
    fn examine_keywords(self) -> &'static str {
        match self {
            Self::Journal => "journal present",
            Self::SlotState => "slot_state present",
            Self::TableState => "journal table_state present",
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Journal => "journal",
            Self::SlotState => "slot_state",
            Self::TableState => "table_state",
        }
    }
}

impl Catalog {
    /// Returns the reason why one of Walpost's tables can't be used: it does not exist, a privilege
    /// is missing, or the server is a standby. Returns `None` if the table can be used.
    pub(super) async fn unusable(
        &self,
        target: &Target,
        table: OwnTable,
        access: Use,
    ) -> Result<Option<String>, CatalogError> {
        let name = table.name();
        let found = self
            .client()
            .query_opt(
                "SELECT $1 OR has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT') \
                 AND has_table_privilege(c.oid, 'INSERT') AND has_table_privilege(c.oid, 'UPDATE'), \
                 quote_ident(current_user), pg_is_in_recovery() \
                 FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
                 WHERE n.nspname = 'walpost' AND c.relname = $2",
                &[&(access == Use::Read), &name],
            )
            .await?;
        let Some(found) = found else {
            return Ok(Some(format!(
                "table walpost.{name} does not exist. Create it: {}; or run sql/journal.sql and sql/role.sql in this database",
                target.init(&[])
            )));
        };
        if found.try_get(2)? {
            // Reading the table on a standby would not help, because its rows describe the
            // primary's slots.
            let reason = "the server is a standby in recovery, which does not accept writes";
            return Ok(Some(reason.to_owned()));
        }
        if found.try_get(0)? {
            return Ok(None);
        }
        let role: String = found.try_get(1)?;
        Ok(Some(format!(
            "permission denied for table walpost.{name}. Grant the privileges: GRANT USAGE ON SCHEMA walpost TO {role}; GRANT \
             SELECT, INSERT, UPDATE ON walpost.{name} TO {role}"
        )))
    }

    /// Runs a statement on one of Walpost's tables after `sql/examine.sql` has accepted the table.
    /// PREPARE locks the table without running the statement, so the table can't change between the
    /// time when it is examined and the time when the statement runs. `settings` contains
    /// statements to run first, such as SET LOCAL. Every string literal in `statement` must have a
    /// type (see [`text_literal`]): PREPARE parses the statement before the table is examined, and
    /// would call the input function of a column's type for a literal without a type. Cancel safe,
    /// because all statements are sent in one message and run in one transaction.
    pub(super) async fn run_on_own_table(
        &self,
        table: OwnTable,
        target: &Target,
        settings: &str,
        statement: &str,
    ) -> Result<Vec<SimpleQueryRow>, CatalogError> {
        debug_assert_eq!(find_untyped_literal(statement), None, "{statement}");
        // The name is unique, so that a prepared statement left behind by an error can't conflict
        // with the next statement.
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let name = format!("walpost_{}", NUMBER.fetch_add(1, Ordering::Relaxed));
        let examine = sql_file::examine(target, SessionKind::Own, table.examine_keywords());
        let sql = format!(
            "SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'; {settings}PREPARE {name} AS {statement};\n{examine}EXECUTE {name}; \
             DEALLOCATE {name}"
        );
        let messages = match self.client().simple_query(&sql).await {
            Ok(messages) => messages,
            Err(error) => {
                // If PREPARE itself failed, DEALLOCATE fails as well, and no prepared statement
                // remains.
                let deallocate = format!("DEALLOCATE {name}");
                let _ = self.client().batch_execute(&deallocate).await;
                let mut error = CatalogError::from(error);
                // If a column has an unexpected type, PREPARE fails before the table is examined,
                // with an error that does not name the table.
                if matches!(&error, CatalogError::Server(found) if TYPE_ERRORS.contains(&&*found.code))
                    && let Err(rejection) = self.client().simple_query(&examine).await
                {
                    error = rejection.into();
                }
                return Err(error.with_commands(&target.commands));
            }
        };
        let rows = messages.into_iter().filter_map(|message| match message {
            SimpleQueryMessage::Row(row) => Some(row),
            _ => None,
        });
        Ok(rows.collect())
    }
}
