//! Reads rows of a table that another role owns, without running that role's code.
//!
//! The planner evaluates the functions of indexes, constraints and statistics as the role that reads the table, and the owner of
//! a table can add such objects at any time, or rename the schema so that the name leads to another table. So the table is
//! locked, examined, and only then named in a statement (`walpost.lock_and_examine` of `sql/guard.sql`). The lock keeps VACUUM
//! and partition maintenance out, so it belongs to a session of its own, which releases it once the statement is planned: the
//! server plans a statement once, before it answers with the description of its rows, and evaluates nothing of others after that.

use std::pin::Pin;

use futures_util::TryStreamExt;
use tokio_postgres::{SimpleQueryMessage, SimpleQueryRow, SimpleQueryStream};

use super::{Catalog, CatalogError};
use crate::postgres::sql_file;
use crate::postgres::table::{TableName, identifier};
use crate::postgres::target::{Outbox, Target};

/// How long to wait for the lock. It conflicts with VACUUM, which yields to it after `deadlock_timeout`.
const LOCK_TIMEOUT: &str = "10s";

/// A statement about a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Statement {
    /// Rows are read, with conditions on `created_at` and the primary key at most.
    Select,
    /// Rows are read, with a condition on any column.
    Compare,
    /// Rows are deleted.
    Delete,
    /// Partitions are attached, detached or dropped.
    Alter,
}

/// Keeps a table, and everything that inherits from it, as it was examined, until it is dropped.
#[must_use]
pub(crate) struct TableGuard {
    _session: Catalog,
}

/// Rows that are received one by one, so that a large table takes no memory.
pub(crate) struct SelectedRows {
    stream: Pin<Box<SimpleQueryStream>>,
}

impl Catalog {
    /// Locks and examines a table over a connection of its own, so that the next statement of this connection can name it. Drop
    /// the guard when that statement is planned.
    ///
    /// # Errors
    /// As [`Catalog::lock_and_examine`]; or no connection to the same server can be opened.
    pub(crate) async fn guard_table(
        &self,
        table: &TableName,
        statement: Statement,
    ) -> Result<TableGuard, CatalogError> {
        let session = Self::open(self.conninfo()).await?;
        // Several hosts can be configured, and another of them can have accepted this connection.
        if session.server().await? != self.server().await? {
            return Err(CatalogError::OtherServer);
        }
        let begin =
            format!("SET lock_timeout = '{LOCK_TIMEOUT}'; BEGIN ISOLATION LEVEL READ COMMITTED");
        session.client().batch_execute(&begin).await?;
        session.lock_and_examine(table, statement).await?;
        Ok(TableGuard { _session: session })
    }

    /// Locks a table until the current transaction ends, and makes sure that the statement runs no code of other roles. The
    /// transaction has to be READ COMMITTED.
    ///
    /// # Errors
    /// It would run some ([`CatalogError::CodeOfOthers`]); row-level security applies to this role; the lock is not available; or
    /// the query fails.
    pub(crate) async fn lock_and_examine(
        &self,
        table: &TableName,
        statement: Statement,
    ) -> Result<(), CatalogError> {
        let examine = examine_sql(table, statement);
        let examined = self.client().batch_execute(&examine).await;
        examined.map_err(|error| self.denied_select(error, table))?;
        let found = "SELECT current_setting('walpost.code_of_others'), current_user::text, \
             coalesce(row_security_active(to_regclass($1)), false)";
        let row = self.client().query_one(found, &[&table.quoted()]).await?;
        let (code, role) = (row.try_get::<_, String>(0)?, identifier(row.try_get(1)?));
        let table = table.clone();
        if row.try_get(2)? {
            return Err(CatalogError::RowSecurity { table, role });
        }
        match code.is_empty() {
            true => Ok(()),
            false => Err(CatalogError::CodeOfOthers { table, role, code }),
        }
    }

    /// Runs `SELECT columns FROM table rest`, which is of the kind `statement`. Values are in the text format that the types' output functions give them, as in the
    /// replication stream.
    ///
    /// # Errors
    /// As [`Catalog::guard_table`]; or the server rejects the statement.
    pub(crate) async fn select(
        &self,
        statement: Statement,
        columns: &str,
        table: &TableName,
        rest: &str,
    ) -> Result<SelectedRows, CatalogError> {
        let sql = format!("SELECT {columns} FROM {}{rest}", table.quoted());
        let guard = self.guard_table(table, statement).await?;
        let denied = |error| self.denied_select(error, table);
        let mut stream = Box::pin(self.client().simple_query_raw(&sql).await.map_err(denied)?);
        // The description of the rows, which the server sends after planning.
        stream.try_next().await.map_err(denied)?;
        drop(guard);
        Ok(SelectedRows { stream })
    }

    /// The first row of [`Catalog::select`].
    ///
    /// # Errors
    /// As [`Catalog::select`].
    pub(crate) async fn select_first(
        &self,
        statement: Statement,
        columns: &str,
        table: &TableName,
        rest: &str,
    ) -> Result<Option<SimpleQueryRow>, CatalogError> {
        let mut rows = self.select(statement, columns, table, rest).await?;
        let first = rows.next().await?;
        // The stream may not be polled again after its end.
        if first.is_some() {
            while rows.next().await?.is_some() {}
        }
        Ok(first)
    }

    /// What tells one server process from another.
    async fn server(&self) -> Result<(String, String), CatalogError> {
        let sql = "SELECT system_identifier::text, extract(epoch FROM pg_postmaster_start_time())::text \
                   FROM pg_control_system()";
        let row = self.client().query_one(sql, &[]).await?;
        Ok((row.try_get(0)?, row.try_get(1)?))
    }
}

impl SelectedRows {
    /// The next row, or `None` after the last.
    ///
    /// # Errors
    /// The server ends the query with an error, or the connection is lost.
    pub(crate) async fn next(&mut self) -> Result<Option<SimpleQueryRow>, CatalogError> {
        while let Some(message) = self.stream.try_next().await? {
            if let SimpleQueryMessage::Row(row) = message {
                return Ok(Some(row));
            }
        }
        Ok(None)
    }
}

/// Statements that lock and examine a table, to be run in a transaction before statements that name it. The setting
/// `walpost.code_of_others` has the result.
#[must_use]
pub(crate) fn examine_sql(table: &TableName, statement: Statement) -> String {
    let target = Target {
        outbox: Outbox::Table(table.clone()),
        publication: String::new(),
        slot: String::new(),
    };
    let word = match statement {
        Statement::Select => "read",
        Statement::Compare => "compare",
        Statement::Delete => "write",
        Statement::Alter => "alter",
    };
    sql_file::examine(&target, word)
}
