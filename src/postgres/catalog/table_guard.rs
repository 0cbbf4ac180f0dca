//! Reads a table that another role owns without running that role's code.
//!
//! The planner evaluates the functions that a table's indexes, constraints and statistics use, and
//! runs them as the role that reads the table. The table's owner can add such objects at any time,
//! or rename the schema so that the name refers to another table. Therefore,
//! `walpost.lock_and_examine` in `sql/guard.sql` locks and examines the table before a statement
//! refers to it. The lock blocks VACUUM and partition maintenance, so a separate session holds it
//! only until the first message of the result arrives. That is long enough: the server plans a
//! statement once, before it sends this message, and does not run other roles' code after planning.
//! (If the statement sorts or aggregates rows, the message arrives only after that.)
//!
//! The table's owner can delay the planning with a lock of their own. If Walpost ended in the
//! meantime, the server would notice at once that the idle session was closed, and would release
//! the lock before the delayed statement is planned. Therefore, while a statement is being planned,
//! the session that holds the lock runs a statement too: one that waits, on the server, until the
//! session that reads the table has ended. Walpost cancels it once the statement has been planned.
//!
//! The text of a statement also depends on the catalogs: on the names and types of the table's
//! columns, on its key, and on the key's operators. The owner can change these definitions while
//! Walpost waits for the lock. Therefore, the [`TableVersion`] is read before these definitions,
//! and again once the lock is held. If the version has changed, the table is rejected. Operators
//! are read only while the lock is held ([`LockedTable::row_order`]).

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::TryStreamExt;
use postgres_protocol::escape::escape_literal;
use tokio::task::{AbortHandle, JoinHandle};
use tokio::time::timeout;
use tokio_postgres::error::Severity;
use tokio_postgres::{CancelToken, SimpleQueryMessage, SimpleQueryRow, SimpleQueryStream};

use super::table::{CreatedAt, RowOrder, from_item};
use super::{Catalog, CatalogError};
use crate::postgres::connect::conninfo::Conninfo;
use crate::postgres::connect::dial::{self, Peer, SIGNAL};
use crate::postgres::replication::{ConnectionError, ServerProcess};
use crate::postgres::sql_file::{self, SessionKind};
use crate::postgres::table::{TableName, identifier};
use crate::postgres::target::{Outbox, Target};

/// How long to wait for the lock on a table. The limit is longer than the default
/// `deadlock_timeout`, after which the server cancels an autovacuum that blocks the lock.
const LOCK_TIMEOUT: &str = "10s";

/// How long to wait for the release of a table lock that is no longer needed.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(30);

/// The kind of statement to run on a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Statement {
    /// Reads rows. Conditions refer only to `created_at` and the primary key.
    Select,
    /// Reads rows. Walpost composes the condition, which may refer to any column.
    Compare,
    /// Reads rows. The operator writes the condition.
    Condition,
    /// Deletes rows.
    Delete,
    /// Attaches, detaches or drops partitions.
    Alter,
}

/// The state of a table's definition and storage at one point in time. The version must be read
/// before the catalog data from which a statement is composed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TableVersion {
    table: TableName,
    state: String,
}

/// The SQL expression that computes a [`TableVersion`] from `c`, a row of `pg_class`. The `xmin` of
/// a row in `pg_attribute` identifies the last transaction that changed the column, so changes that
/// were reverted are detected as well. File nodes are included because a statement that rewrites a
/// table hides its rows from older snapshots.
pub(super) const TABLE_VERSION: &str = "concat_ws('; ', c.oid, pg_relation_filenode(c.oid), \
     (SELECT string_agg(format('%s %s', a.attnum, a.xmin), ',' ORDER BY a.attnum) FROM pg_attribute a \
     WHERE a.attrelid = c.oid AND a.attnum > 0), \
     (SELECT format('%s %s', i.indexrelid, i.indkey) FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary), \
     (SELECT string_agg(format('%s %s', h.inhrelid, pg_relation_filenode(h.inhrelid)), ',' ORDER BY h.inhrelid) \
     FROM pg_inherits h WHERE h.inhparent = c.oid))";

/// A table that has been locked and examined. Until this value is dropped or
/// [`LockedTable::until_planned`] has completed, no other session can change the table or the tables
/// that inherit from it. A statement that refers to the table must run in `until_planned`.
#[must_use]
pub(crate) struct LockedTable {
    session: Catalog,
    table: TableName,
    reader: Reader,
}

/// The session that reads a locked table.
struct Reader {
    process: ServerProcess,
    /// Aborting the task closes the connection.
    driver: AbortHandle,
}

/// A session that holds the lock on a table with a statement that runs until the session that reads
/// the table has ended.
struct LockHolder {
    statement: JoinHandle<Option<tokio_postgres::Error>>,
    /// Where and how to cancel the statement.
    conninfo: Conninfo,
    peer: Peer,
    token: CancelToken,
    table: TableName,
}

/// An error from a statement that Walpost is waiting for the server to plan.
trait StatementError {
    /// Returns whether the server has reported the error, in which case the statement will not be
    /// planned.
    fn ends_statement(&self) -> bool;
}

/// Closes a connection when dropped, unless the handle has been removed. If a statement is abandoned
/// before it has been planned, the lock is released only when the session of the statement ends.
struct CloseOnDrop(Option<AbortHandle>);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        if let Some(driver) = &self.0 {
            driver.abort();
        }
    }
}

/// A stream that returns rows one at a time, so that a large table is not held in memory.
pub(crate) struct SelectedRows {
    stream: Pin<Box<SimpleQueryStream>>,
}

impl Catalog {
    /// Returns the current version of the table.
    ///
    /// # Errors
    /// Returns an error if the query fails.
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
            // The table does not exist. The caller reports this when its attempt to lock the table
            // fails.
            None => String::new(),
        };
        Ok(TableVersion::new(table.clone(), state))
    }

    /// Locks and examines a table on a separate connection, before the next statement on this
    /// connection refers to the table. All catalog data used to compose the statement must have
    /// been read after `version`.
    ///
    /// # Errors
    /// Same as [`Catalog::lock_and_examine`]. Also returns an error if the table has changed since
    /// `version` was read, or if no connection to the same server can be opened.
    pub(crate) async fn lock_table(
        &self,
        version: &TableVersion,
        statement: Statement,
    ) -> Result<LockedTable, CatalogError> {
        let table = &version.table;
        let session = Self::open(self.conninfo()).await?;
        // If several hosts are configured, the new connection may have reached a different server.
        let (system, process) = self.server_identity().await?;
        let (other_system, other_process) = session.server_identity().await?;
        if other_system != system || other_process.postmaster_start != process.postmaster_start {
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
            reader: Reader {
                process,
                driver: self.driver.abort_handle(),
            },
        })
    }

    /// Locks a table until the end of the current transaction, and verifies that the statement does
    /// not run other roles' code. The transaction must use isolation level READ COMMITTED.
    ///
    /// # Errors
    /// Returns an error if the statement would run other roles' code
    /// ([`CatalogError::ForeignCode`]), if row-level security applies to this role, if the lock is
    /// not available, or if the query fails.
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
            false => Err(CatalogError::ForeignCode { table, role, code }),
        }
    }

    /// Runs a SELECT on the table. `columns` is the SELECT list, and `rest` is the text after the
    /// FROM item. Values are in text format, as in the replication stream. Releases the lock as
    /// soon as the statement has been planned.
    ///
    /// # Errors
    /// Returns an error if the server rejects the statement.
    pub(crate) async fn select(
        &self,
        locked: LockedTable,
        columns: &str,
        rest: &str,
    ) -> Result<SelectedRows, CatalogError> {
        let sql = format!("SELECT {columns} FROM {}{rest}", locked.source());
        let table = locked.table.clone();
        let planned = async {
            let mut stream = Box::pin(self.client().simple_query_raw(&sql).await?);
            // The first message is the row description, which the server sends after planning.
            stream.try_next().await?;
            Ok(stream)
        };
        let stream = locked.until_planned(planned).await?;
        let stream = stream.map_err(|error| self.denied_select(error, &table))?;
        Ok(SelectedRows { stream })
    }

    /// Returns the first row that [`Catalog::select`] would return.
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
        // Read the remaining rows. If there was no first row, the stream has already ended and must
        // not be polled again.
        if first.is_some() {
            while rows.next().await?.is_some() {}
        }
        Ok(first)
    }

    /// Returns the identifier of the server's cluster, and the process that serves this session.
    async fn server_identity(&self) -> Result<(String, ServerProcess), CatalogError> {
        let sql = "SELECT system_identifier::text, pg_backend_pid(), extract(epoch FROM pg_postmaster_start_time())::text \
                   FROM pg_control_system()";
        let row = self.client().query_one(sql, &[]).await?;
        let process = ServerProcess {
            pid: row.try_get(1)?,
            postmaster_start: row.try_get(2)?,
        };
        Ok((row.try_get(0)?, process))
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

    /// Returns the table with an alias, for use in FROM.
    #[must_use]
    pub(crate) fn source(&self) -> String {
        from_item(&self.table)
    }

    /// Returns the order in which the table's rows can be read. The order is valid only while the
    /// table is locked, because its operators can be renamed once the lock has been released.
    ///
    /// # Errors
    /// Returns an error if the query fails.
    pub(crate) async fn row_order(
        &self,
        created_at: CreatedAt,
    ) -> Result<RowOrder<'_>, CatalogError> {
        let columns = self.session.order_columns(&self.table, created_at).await?;
        Ok(RowOrder::new(columns))
    }

    /// Runs `planned`, which completes once the server has planned a statement on the connection
    /// that locked the table, and then releases the lock. If the future is dropped, or if it is not
    /// certain that the statement has been planned, that connection is closed.
    ///
    /// # Errors
    /// Same as [`LockedTable::until_planned_by`].
    pub(crate) async fn until_planned<T>(
        self,
        planned: impl Future<Output = Result<T, tokio_postgres::Error>>,
    ) -> Result<Result<T, tokio_postgres::Error>, CatalogError> {
        let process = self.reader.process.clone();
        let mut reader = CloseOnDrop(Some(self.reader.driver.clone()));
        let holder = LockHolder::start(self, &process).await.inspect_err(|_| {
            // Keep the connection open, because no statement has been sent on it.
            reader.0 = None;
        })?;
        let (result, is_released) = holder.until_planned(planned).await?;
        if is_released {
            reader.0 = None;
        }
        Ok(result)
    }

    /// Like [`LockedTable::until_planned`], but `planned` uses a different connection, which
    /// `process` serves. The caller must close that connection if the future is dropped or returns
    /// an error, or if `planned` returns an error.
    ///
    /// # Errors
    /// Returns an error if the session that holds the lock ended before the statement was planned,
    /// or if the lock can't be released. The server releases it when the other connection has been
    /// closed.
    pub(crate) async fn until_planned_by<T>(
        self,
        process: &ServerProcess,
        planned: impl Future<Output = Result<T, ConnectionError>>,
    ) -> Result<Result<T, ConnectionError>, CatalogError> {
        let holder = LockHolder::start(self, process).await?;
        let (result, _) = holder.until_planned(planned).await?;
        Ok(result)
    }
}

impl LockHolder {
    /// Starts the statement that holds the lock until `reader` has ended.
    async fn start(locked: LockedTable, reader: &ServerProcess) -> Result<Self, CatalogError> {
        let LockedTable { session, table, .. } = locked;
        let ended = |reason: String| {
            CatalogError::LockSession(format!(
                "failed to keep the lock on table {table}: {reason}"
            ))
        };
        let Some(peer) = session.peer.clone() else {
            return Err(ended("the server's address is unknown".to_owned()));
        };
        let (signal, sql) = (Arc::clone(&session.signal), hold_sql(reader));
        let (conninfo, token) = (session.conninfo.clone(), session.client().cancel_token());
        let mut statement =
            tokio::spawn(async move { session.client().batch_execute(&sql).await.err() });
        tokio::select! {
            biased;
            result = &mut statement => Err(match result {
                // Error codes that start with 42 include missing privileges.
                Ok(Some(error)) if error.code().is_some_and(|code| code.code().starts_with("42")) => error.into(),
                Ok(Some(error)) => ended(error.to_string()),
                Ok(None) | Err(_) => ended("the session that reads the table has ended".to_owned()),
            }),
            () = signal.notified() => Ok(Self { statement, conninfo, peer, token, table }),
        }
    }

    /// Runs `planned`, and then releases the lock. If `planned` returns an error that the server has
    /// not reported, the statement may still be waiting to be planned. In this case, keeps the lock
    /// until the reader's session has ended, and returns false.
    async fn until_planned<T, E: StatementError>(
        mut self,
        planned: impl Future<Output = Result<T, E>>,
    ) -> Result<(Result<T, E>, bool), CatalogError> {
        tokio::select! {
            result = planned => {
                let has_ended = result.as_ref().err().is_none_or(StatementError::ends_statement);
                if has_ended {
                    self.release().await?;
                }
                Ok((result, has_ended))
            }
            _ = &mut self.statement => Err(CatalogError::LockSession(format!(
                "the session that holds the lock on table {} was ended before a statement had been planned",
                self.table
            ))),
        }
    }

    async fn release(self) -> Result<(), CatalogError> {
        let released = async {
            dial::cancel(&self.conninfo, &self.peer, &self.token).await?;
            // The task fails only if it panics, which also closes the connection.
            let _ = self.statement.await;
            Ok::<_, CatalogError>(())
        };
        timeout(RELEASE_TIMEOUT, released)
            .await
            .unwrap_or_else(|_| {
                Err(CatalogError::LockSession(format!(
                    "the statement that holds the lock on table {} did not end within {RELEASE_TIMEOUT:?}",
                    self.table
                )))
            })
    }
}

impl StatementError for tokio_postgres::Error {
    fn ends_statement(&self) -> bool {
        // Walpost itself generates errors with severity FATAL if the server has sent too much data,
        // so such an error does not show that the statement has ended.
        self.as_db_error()
            .is_some_and(|error| error.parsed_severity() == Some(Severity::Error))
    }
}

impl StatementError for ConnectionError {
    fn ends_statement(&self) -> bool {
        matches!(self, Self::Server(_))
    }
}

/// Returns statements that hold the lock of the current transaction until `reader` has ended. The
/// statements first send [`SIGNAL`]. While the statements run, the server does not notice that the
/// client has closed the connection. If the statements are canceled, the lock is released without
/// an error in the server's log.
fn hold_sql(reader: &ServerProcess) -> String {
    let (pid, started) = (reader.pid, escape_literal(&reader.postmaster_start));
    // backend_start distinguishes a later process with the same ID. It is NULL if this role is not
    // allowed to see the details of the process.
    format!(
        "SET client_connection_check_interval = 0; SET statement_timeout = 0;
         DO $$
         DECLARE
             started CONSTANT timestamptz := (SELECT backend_start FROM pg_stat_get_activity({pid}));
         BEGIN
             IF extract(epoch FROM pg_postmaster_start_time())::text <> {started}
                 OR NOT EXISTS (SELECT FROM pg_stat_get_activity({pid})) THEN
                 RAISE EXCEPTION 'process {pid} has ended, or belongs to a different server';
             END IF;
             RAISE INFO '{SIGNAL}';
             WHILE EXISTS (SELECT FROM pg_stat_get_activity({pid})
                 WHERE started IS NULL OR backend_start IS NULL OR backend_start = started)
             LOOP
                 PERFORM pg_sleep(0.1), pg_stat_clear_snapshot();
             END LOOP;
         EXCEPTION WHEN query_canceled THEN
             NULL;
         END $$;
         ROLLBACK"
    )
}

impl SelectedRows {
    /// Returns the next row, or `None` after the last.
    ///
    /// # Errors
    /// Returns an error if the server reports one, or if the connection is lost.
    pub(crate) async fn next(&mut self) -> Result<Option<SimpleQueryRow>, CatalogError> {
        while let Some(message) = self.stream.try_next().await? {
            if let SimpleQueryMessage::Row(row) = message {
                return Ok(Some(row));
            }
        }
        Ok(None)
    }
}

/// Returns SQL that locks and examines a table. Run it in a transaction before statements that
/// refer to the table. The result is stored in the setting `walpost.code_of_others`.
#[must_use]
pub(crate) fn examine_sql(table: &TableName, statement: Statement) -> String {
    let target = Target {
        outbox: Outbox::Table(table.clone()),
        publication: String::new(),
        slot: String::new(),
        commands: Default::default(),
    };
    let keyword = match statement {
        Statement::Select => "read",
        Statement::Compare => "compare",
        Statement::Condition => "condition",
        Statement::Delete => "write",
        Statement::Alter => "alter",
    };
    sql_file::examine(&target, SessionKind::Own, keyword)
}
