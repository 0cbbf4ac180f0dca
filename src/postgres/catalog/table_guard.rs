//! Reads a table that another role owns without running that role's code.
//!
//! The planner evaluates the functions that a table's indexes, constraints and statistics use, and
//! runs them as the role that reads the table. The table's owner can add such objects at any time,
//! or rename the schema so that the name refers to another table. Therefore,
//! `walpost.lock_and_examine` in `sql/guard.sql` locks and examines the table before a statement
//! refers to it. The lock blocks VACUUM and partition maintenance, so a separate session holds it
//! only until the statement has been planned. That is long enough: the server plans a statement
//! once, before it sends the row description, and does not run other roles' code after planning.
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
use tokio::task::AbortHandle;
use tokio::time::timeout;
use tokio_postgres::{SimpleQueryMessage, SimpleQueryRow, SimpleQueryStream};

use super::table::{CreatedAt, RowOrder, from_item};
use super::{Catalog, CatalogError};
use crate::postgres::connect::dial::{self, SIGNAL};
use crate::postgres::sql_file::{self, SessionKind};
use crate::postgres::table::{TableName, identifier};
use crate::postgres::target::{Outbox, Target};

/// How long to wait for the lock. Longer than the default `deadlock_timeout`, after which the
/// server cancels an autovacuum that blocks the lock.
const LOCK_TIMEOUT: &str = "10s";

/// How long to wait for the lock to be released after it is no longer needed.
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

/// A table that has been locked and examined. Until this value is dropped, no other session can
/// change the table or the tables that inherit from it. A statement that refers to the table must
/// run in [`LockedTable::until_planned`].
#[must_use]
pub(crate) struct LockedTable {
    session: Catalog,
    table: TableName,
    reader: Reader,
}

/// The session that reads a locked table.
struct Reader {
    backend_pid: i32,
    /// Aborting the task closes the connection.
    driver: AbortHandle,
}

/// Closes a connection when dropped. If a statement is abandoned before it has been planned, the
/// lock is released only when the session of the statement ends.
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
        let (identity, backend_pid) = self.server_identity().await?;
        if session.server_identity().await?.0 != identity {
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
                backend_pid,
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

    /// Returns values that identify the server, and the process ID of this session.
    async fn server_identity(&self) -> Result<((String, String), i32), CatalogError> {
        let sql = "SELECT system_identifier::text, extract(epoch FROM pg_postmaster_start_time())::text, \
                   pg_backend_pid() FROM pg_control_system()";
        let row = self.client().query_one(sql, &[]).await?;
        Ok(((row.try_get(0)?, row.try_get(1)?), row.try_get(2)?))
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
    /// that locked the table. Then, releases the lock. Not cancel safe: if the future is dropped,
    /// that connection is closed.
    ///
    /// # Errors
    /// Same as [`LockedTable::until_planned_by`].
    pub(crate) async fn until_planned<T>(
        self,
        planned: impl Future<Output = T>,
    ) -> Result<T, CatalogError> {
        let mut closed = CloseOnDrop(Some(self.reader.driver.clone()));
        let backend_pid = self.reader.backend_pid;
        let result = self.until_planned_by(backend_pid, planned).await?;
        closed.0 = None;
        Ok(result)
    }

    /// Like [`LockedTable::until_planned`], but `planned` uses a different connection, whose server
    /// process is `backend_pid`. If the future is dropped, the caller must close that connection.
    ///
    /// # Errors
    /// Returns an error if the session that holds the lock has ended, or if the lock can't be
    /// released. In the latter case, the server releases it when the other connection is closed.
    pub(crate) async fn until_planned_by<T>(
        self,
        backend_pid: i32,
        planned: impl Future<Output = T>,
    ) -> Result<T, CatalogError> {
        let Self { session, table, .. } = self;
        let (signal, sql) = (Arc::clone(&session.signal), hold_sql(backend_pid));
        let (conninfo, peer) = (session.conninfo.clone(), session.peer.clone());
        let token = session.client().cancel_token();
        let mut holding =
            tokio::spawn(async move { session.client().batch_execute(&sql).await.err() });
        tokio::select! {
            () = signal.notified() => {}
            ended = &mut holding => {
                return Err(match ended {
                    Ok(Some(error)) => error.into(),
                    Ok(None) | Err(_) => CatalogError::Unexpected(
                        "the session that reads the table has ended".to_owned(),
                    ),
                });
            }
        }
        let result = planned.await;
        if let Some(peer) = peer {
            dial::cancel(&conninfo, &peer, &token).await?;
        }
        match timeout(RELEASE_TIMEOUT, holding).await {
            Ok(_) => Ok(result),
            Err(_) => Err(CatalogError::Unexpected(format!(
                "the statement that holds the lock on table {table} was not canceled within {RELEASE_TIMEOUT:?}"
            ))),
        }
    }
}

/// Returns a statement that runs until the server process `backend_pid` has ended. It first sends
/// [`SIGNAL`]. While it runs, the server does not notice that the client has closed the connection.
fn hold_sql(backend_pid: i32) -> String {
    // backend_start distinguishes a later process with the same ID. It is NULL if this role may not
    // see it.
    format!(
        "SET client_connection_check_interval = 0; SET statement_timeout = 0;
         DO $$
         DECLARE
             began CONSTANT timestamptz := (SELECT backend_start FROM pg_stat_get_activity({backend_pid}));
         BEGIN
             RAISE INFO '{SIGNAL}';
             WHILE EXISTS (SELECT FROM pg_stat_get_activity({backend_pid}) WHERE backend_start IS NOT DISTINCT FROM began) LOOP
                 PERFORM pg_sleep(0.1), pg_stat_clear_snapshot();
             END LOOP;
         END $$"
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
