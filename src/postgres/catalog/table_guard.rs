//! Reads rows of a table that another role owns, without running that role's code.
//!
//! The planner evaluates functions of indexes, constraints and statistics as the role that reads
//! the table. The owner of a table can add such objects at any time, or rename the schema so that
//! the name refers to another table. Therefore, the table is locked and examined before a statement
//! names it (`walpost.lock_and_examine` in `sql/guard.sql`). The lock blocks VACUUM and partition
//! maintenance, so a separate session holds it and releases it once the statement is planned: the
//! server plans a statement once, before it sends the description of its rows, and does not
//! evaluate code of other roles after that.
//!
//! The text of a statement also depends on the catalogs: on names and types of columns, and on the
//! key and its operators. The owner can change them while Walpost waits for the lock. Therefore,
//! the [`TableVersion`] is read before these facts, and the table is rejected if its version is
//! different once it is locked. Operators are read only while the lock is held
//! ([`LockedTable::row_order`]).

use std::pin::Pin;

use futures_util::TryStreamExt;
use tokio_postgres::{SimpleQueryMessage, SimpleQueryRow, SimpleQueryStream};

use super::table::{CreatedAt, RowOrder, from_item};
use super::{Catalog, CatalogError};
use crate::postgres::sql_file;
use crate::postgres::table::{TableName, identifier};
use crate::postgres::target::{Outbox, Target};

/// How long to wait for the lock. It conflicts with VACUUM, which yields to it after
/// `deadlock_timeout`.
const LOCK_TIMEOUT: &str = "10s";

/// The kind of statement about a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Statement {
    /// Reads rows, with conditions on at most `created_at` and the primary key.
    Select,
    /// Reads rows, with a condition composed by Walpost on any column.
    Compare,
    /// Reads rows, with a condition written by the operator.
    Condition,
    /// Deletes rows.
    Delete,
    /// Attaches, detaches or drops partitions.
    Alter,
}

/// The state of a table's definition and storage at one time. It is read before the catalogs from
/// which a statement is composed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TableVersion {
    table: TableName,
    state: String,
}

/// The SQL expression for a [`TableVersion`], given the row `c` of `pg_class`. The `xmin` of a row
/// of `pg_attribute` is the last transaction that changed the column, so changes that were reverted
/// are detected as well. The file nodes are included because statements that rewrite a table hide
/// its rows from older snapshots.
pub(super) const TABLE_VERSION: &str = "concat_ws('; ', c.oid, pg_relation_filenode(c.oid), \
     (SELECT string_agg(format('%s %s', a.attnum, a.xmin), ',' ORDER BY a.attnum) FROM pg_attribute a \
     WHERE a.attrelid = c.oid AND a.attnum > 0), \
     (SELECT format('%s %s', i.indexrelid, i.indkey) FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary), \
     (SELECT string_agg(format('%s %s', h.inhrelid, pg_relation_filenode(h.inhrelid)), ',' ORDER BY h.inhrelid) \
     FROM pg_inherits h WHERE h.inhparent = c.oid))";

/// A table that was locked and examined. Until this is dropped, no other session can change the
/// table or the tables that inherit from it.
#[must_use]
pub(crate) struct LockedTable {
    session: Catalog,
    table: TableName,
}

/// Rows that are received one at a time, so that a large table does not take much memory.
pub(crate) struct SelectedRows {
    stream: Pin<Box<SimpleQueryStream>>,
}

impl Catalog {
    /// Returns the present version of the table.
    ///
    /// # Errors
    /// The query fails.
    pub(crate) async fn table_version(
        &self,
        table: &TableName,
    ) -> Result<TableVersion, CatalogError> {
        let sql = format!(
            "SELECT {TABLE_VERSION} FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
             WHERE n.nspname = $1 AND c.relname = $2"
        );
        let found = self
            .client()
            .query_opt(&sql, &[&table.schema, &table.name])
            .await?;
        let state = match found {
            Some(row) => row.try_get(0)?,
            // Locking the table reports that it does not exist.
            None => String::new(),
        };
        Ok(TableVersion::new(table.clone(), state))
    }

    /// Locks and examines a table over a separate connection, so that the next statement of this
    /// connection can name it. Drop the result when that statement is planned. Everything from
    /// which the statement is composed must have been read after `version`.
    ///
    /// # Errors
    /// Same as [`Catalog::lock_and_examine`]. Also, the table has changed since `version` was read,
    /// or no connection to the same server can be opened.
    pub(crate) async fn lock_table(
        &self,
        version: &TableVersion,
        statement: Statement,
    ) -> Result<LockedTable, CatalogError> {
        let table = &version.table;
        let session = Self::open(self.conninfo()).await?;
        // Several hosts may be configured, and a different one may have accepted this connection.
        if session.server().await? != self.server().await? {
            return Err(CatalogError::OtherServer);
        }
        let begin =
            format!("SET lock_timeout = '{LOCK_TIMEOUT}'; BEGIN ISOLATION LEVEL READ COMMITTED");
        session.client().batch_execute(&begin).await?;
        session.lock_and_examine(table, statement).await?;
        if session.table_version(table).await? != *version {
            return Err(CatalogError::TableChanged(table.clone()));
        }
        Ok(LockedTable {
            session,
            table: table.clone(),
        })
    }

    /// Locks a table until the current transaction ends, and verifies that the statement runs no
    /// code of other roles. The transaction must be READ COMMITTED.
    ///
    /// # Errors
    /// The statement would run code of other roles ([`CatalogError::CodeOfOthers`]), row-level
    /// security applies to this role, the lock is not available, or the query fails.
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

    /// Runs `SELECT columns FROM table rest`. Values are in the text format of the types' output
    /// functions, as in the replication stream. The lock is released when the statement is planned.
    ///
    /// # Errors
    /// The server rejects the statement.
    pub(crate) async fn select(
        &self,
        locked: LockedTable,
        columns: &str,
        rest: &str,
    ) -> Result<SelectedRows, CatalogError> {
        let sql = format!("SELECT {columns} FROM {}{rest}", locked.source());
        let denied = |error| self.denied_select(error, &locked.table);
        let mut stream = Box::pin(self.client().simple_query_raw(&sql).await.map_err(denied)?);
        // The description of the rows, which the server sends after planning.
        stream.try_next().await.map_err(denied)?;
        drop(locked);
        Ok(SelectedRows { stream })
    }

    /// Returns the first row of [`Catalog::select`].
    ///
    /// # Errors
    /// Same as [`Catalog::select`].
    pub(crate) async fn select_first(
        &self,
        locked: LockedTable,
        columns: &str,
        rest: &str,
    ) -> Result<Option<SimpleQueryRow>, CatalogError> {
        let mut rows = self.select(locked, columns, rest).await?;
        let first = rows.next().await?;
        // The stream must not be polled again after its end.
        if first.is_some() {
            while rows.next().await?.is_some() {}
        }
        Ok(first)
    }

    /// Returns values that distinguish one server from another.
    async fn server(&self) -> Result<(String, String), CatalogError> {
        let sql = "SELECT system_identifier::text, extract(epoch FROM pg_postmaster_start_time())::text \
                   FROM pg_control_system()";
        let row = self.client().query_one(sql, &[]).await?;
        Ok((row.try_get(0)?, row.try_get(1)?))
    }
}

impl TableVersion {
    pub(super) fn new(table: TableName, state: String) -> Self {
        Self { table, state }
    }
}

impl LockedTable {
    #[must_use]
    pub(super) fn name(&self) -> &TableName {
        &self.table
    }

    /// Returns the table as written in FROM.
    #[must_use]
    pub(crate) fn source(&self) -> String {
        from_item(&self.table)
    }

    /// Returns the order of the table's rows. It is valid only while the table is locked, because
    /// names of operators can change.
    ///
    /// # Errors
    /// The query fails.
    pub(crate) async fn row_order(
        &self,
        created_at: CreatedAt,
    ) -> Result<RowOrder<'_>, CatalogError> {
        let columns = self.session.order_columns(&self.table, created_at).await?;
        Ok(RowOrder::new(columns))
    }
}

impl SelectedRows {
    /// Returns the next row, or `None` after the last.
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

/// Returns statements that lock and examine a table, to be run in a transaction before statements
/// that name it. They store the result in the setting `walpost.code_of_others`.
#[must_use]
pub(crate) fn examine_sql(table: &TableName, statement: Statement) -> String {
    let target = Target {
        outbox: Outbox::Table(table.clone()),
        publication: String::new(),
        slot: String::new(),
        commands: Default::default(),
    };
    let word = match statement {
        Statement::Select => "read",
        Statement::Compare => "compare",
        Statement::Condition => "condition",
        Statement::Delete => "write",
        Statement::Alter => "alter",
    };
    sql_file::examine(&target, word)
}
