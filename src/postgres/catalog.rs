//! SQL queries that find the outbox table, the publication and the slot, and detect problems with
//! them.
//!
//! [`Catalog::observe`] runs the queries; [`Observed::problems`] evaluates the results without I/O.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, Row};
use tracing::debug;

use super::connect::conninfo::Conninfo;
use super::connect::dial;
use super::connect::dial::{DialError, Notifications, Peer, ServerError, SqlLimits};
use super::sql_file::{self, SessionKind};
use super::table::{TableName, identifier};
use super::table_pattern::TablePatterns;
use super::target::{OUTBOX_ROW, Outbox, Target};
use crate::model::commands::Commands;
use crate::model::lsn::Lsn;
use crate::outbox::connect::{ColumnFacts, Domain};

pub(crate) use self::copy_scope::CopyScope;
pub(crate) use self::event_limits::EventLimit;
pub(crate) use self::guard_function::GuardFunction;
pub(crate) use self::hidden_rows::{HiddenRows, hidden_rows_warning};
pub(crate) use self::limits::Limit;
use self::observed::Provider;
pub(crate) use self::observed::{
    Observed, ObservedPublication, ObservedSlot, ObservedTable, ServerStarts, format_some,
    left_publication_error, unpublished_warning,
};
pub(crate) use self::problem::{AdvisoryLockHolder, Holder, Problem, SlotInUse};
pub(crate) use self::public_privileges::PublicPrivileges;
pub(crate) use self::published::UnsafeFilter;
use self::published::{RowFilter, UNTRUSTED_OWNER};
pub(crate) use self::snapshot_history::{SnapshotHistory, SnapshotRecord, TableSnapshot};
use self::synchronous::IS_SYNCHRONOUS;
pub(crate) use self::table::{CreatedAt, OrderColumn, RowOrder, Rows};
use self::table_guard::TABLE_VERSION;
pub(crate) use self::table_guard::{
    LockedTable, SelectedRows, Statement, TableVersion, examine_sql,
};
use self::text_limits::{EXPRESSION_BYTES_MAX, TABLES_PER_QUERY};

mod advisory_lock;
pub(crate) mod copy;
mod copy_scope;
pub(crate) mod drop_slot;
mod encoding;
mod event_limits;
pub(crate) mod failover;
mod former_slots;
mod guard_function;
mod hidden_rows;
mod init_lock;
pub(crate) mod journal;
mod last_halt;
mod left_tables;
mod limits;
mod move_slot;
mod observed;
mod own_table;
mod partition_owners;
mod position_request;
mod problem;
mod public_privileges;
mod published;
mod refusal;
pub(crate) mod set_aside;
pub(crate) mod slot_owner;
pub(crate) mod slot_state;
pub(crate) mod snapshot;
mod snapshot_history;
mod synchronous;
mod table;
mod table_guard;
pub(crate) mod table_state;
mod text_limits;
mod unused_slots;
mod vitals;
mod writers;

/// A connection for catalog queries.
pub(crate) struct Catalog {
    client: Client,
    /// The settings used to open the connection.
    conninfo: Conninfo,
    /// The task that drives the connection. It finishes when the connection closes.
    driver: JoinHandle<()>,
    notifications: Arc<Notifications>,
    /// See [`SqlConnection::signal`](dial::SqlConnection::signal).
    signal: Arc<Notify>,
    /// The server to which cancel requests are sent.
    peer: Option<Peer>,
}

/// A failure to query or change the database.
#[derive(Debug, thiserror::Error)]
pub enum CatalogError {
    /// The connection could not be established.
    #[error(transparent)]
    Dial(#[from] DialError),
    /// The server returned an error.
    #[error("PostgreSQL: {0}")]
    Server(Box<ServerError>),
    /// The connection was lost.
    #[error("connection to PostgreSQL lost: {0}")]
    Lost(tokio_postgres::Error),
    /// The journal does not exist.
    #[error(
        "table walpost.journal does not exist. Create it: {init}; or run sql/journal.sql and sql/role.sql in this database"
    )]
    NoJournal {
        /// The command that creates the journal.
        init: String,
    },
    /// A journal entry was written by a later version of Walpost.
    #[error(
        "entry {id} in table walpost.journal has version {version}, but this version of Walpost reads only versions up to \
         {newest}: a newer version of Walpost wrote the entry. Nothing was done. Run that version of Walpost, or a later one"
    )]
    NewerJournal {
        /// The ID of the journal entry.
        id: i64,
        version: String,
        /// The highest entry version that this version of Walpost can read.
        newest: u64,
    },
    /// A row-level security policy would hide rows and run functions as the current role.
    #[error(
        "row-level security on table {table} hides rows from role {role}. Allow the role to read all rows: ALTER ROLE \
         {role} BYPASSRLS"
    )]
    RowSecurity {
        table: TableName,
        /// The current role.
        role: String,
    },
    /// A statement would run code owned by another role as the current role.
    #[error(
        "statements on table {table} would run code owned by other roles as role {role}: {code}. The statements \
         were not run. Check who created the code, then drop the object that calls it"
    )]
    ForeignCode {
        table: TableName,
        /// The current role.
        role: String,
        /// The object, the function that it calls, and the function's owner.
        code: String,
    },
    /// The table was changed after Walpost composed the statement that reads it.
    #[error(
        "table {0} was changed before Walpost could read it; nothing was done. Run the same command again"
    )]
    TableChanged(TableName),
    /// A second connection reached a different server than the first one.
    #[error(
        "a second connection to PostgreSQL reached a different server than the first connection. Run the same command \
         again; if the error persists, specify only one host"
    )]
    OtherServer,
    /// The lock on a table was lost before a statement was planned, or could not be released.
    #[error("{0}. Run the same command again")]
    LockSession(String),
    /// A table that is about to be added to the pipeline is incompatible with the pipeline's
    /// settings.
    #[error("{0}")]
    Unfit(String),
    /// Another `walpost init` did not finish in time, or another program holds the lock that `init`
    /// requires.
    #[error(
        "{holder} holds the walpost init lock in this database. Run the same command again when the lock has been \
         released; to release the lock: {release}"
    )]
    InitRuns {
        /// Describes the session or the prepared transaction that holds the lock.
        holder: String,
        /// The statement that releases the lock.
        release: String,
    },
    /// A pipeline that is defined by a row is configured with a slot that does not belong to the
    /// pipeline.
    #[error(
        "{found}, but pipeline {pipeline:?} is defined by a row of a query, and such a pipeline can only use a slot that is \
         recorded as belonging to it. Correct the row; or, to let the pipeline continue from the slot's position, stop the pipeline \
         that uses the slot, if there is one, and run: {take}"
    )]
    ForeignSlot {
        /// A clause that states which pipeline the slot belongs to, or that the owner of the slot
        /// is unknown.
        found: String,
        pipeline: String,
        /// The command with which an operator assigns the slot to the pipeline.
        take: String,
    },
    /// The server returned a value that can't be interpreted.
    #[error("PostgreSQL's catalog has an unexpected value: {0}")]
    Unexpected(String),
}

impl CatalogError {
    /// Creates the error for a database without the journal.
    #[must_use]
    pub(crate) fn missing_journal(target: &Target) -> Self {
        let init = target.init(&[]);
        Self::NoJournal { init }
    }

    /// Adds this process's command-line options to the command that the error suggests. Commands
    /// that come from the files in sql/ do not include these options.
    #[must_use]
    pub(crate) fn with_commands(mut self, commands: &Commands) -> Self {
        if let Self::Server(server) = &mut self {
            server.complete_commands(commands);
        }
        self
    }
}

impl From<tokio_postgres::Error> for CatalogError {
    fn from(error: tokio_postgres::Error) -> Self {
        match error.as_db_error() {
            Some(db) => Self::Server(Box::new(ServerError::from(db))),
            None => Self::Lost(error),
        }
    }
}

impl Catalog {
    /// Connects to the server, and drives the connection in a background task until the `Catalog`
    /// is dropped.
    ///
    /// # Errors
    /// Returns an error if no host in `conninfo` accepts the connection.
    pub(crate) async fn open(conninfo: &Conninfo) -> Result<Self, CatalogError> {
        Self::open_within(conninfo, SqlLimits::CATALOG_QUERIES).await
    }

    /// Connects like [`Self::open`], but sets the limits on query results so that rows of up to
    /// `row_bytes_max` bytes are accepted.
    ///
    /// # Errors
    /// Returns an error if no host in `conninfo` accepts the connection.
    pub(crate) async fn open_for_rows(
        conninfo: &Conninfo,
        row_bytes_max: usize,
    ) -> Result<Self, CatalogError> {
        Self::open_within(conninfo, SqlLimits::rows(row_bytes_max)).await
    }

    async fn open_within(conninfo: &Conninfo, limits: SqlLimits) -> Result<Self, CatalogError> {
        let (client, connection) = dial::sql(conninfo, limits).await?;
        let (notifications, signal) = (connection.notifications(), connection.signal());
        let peer = connection.peer();
        let driver = tokio::spawn(async move {
            if let Err(error) = connection.await {
                debug!(%error, "catalog connection ended");
            }
        });
        Ok(Self {
            client,
            conninfo: conninfo.clone(),
            driver,
            notifications,
            signal,
            peer,
        })
    }

    /// Waits for the connection to close.
    pub(crate) async fn closed(&mut self) {
        if !self.driver.is_finished() {
            // Awaiting the task fails only if the task panicked, which also closes the connection.
            let _ = (&mut self.driver).await;
        }
    }

    pub(super) fn conninfo(&self) -> &Conninfo {
        &self.conninfo
    }

    /// Returns the underlying client, for running other SQL statements.
    #[must_use]
    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    /// Converts `error` to a [`CatalogError`]. If the error reports a missing privilege and has no
    /// hint, adds a hint with the statement that `grant` returns for the current role.
    pub(super) fn with_grant(
        &self,
        error: impl Into<CatalogError>,
        grant: impl FnOnce(&str) -> String,
    ) -> CatalogError {
        let mut error = error.into();
        if let CatalogError::Server(server) = &mut error
            && server.code == "42501"
            && !server.message.contains("row-level security")
            && server.hint.is_none()
        {
            server.hint = Some(grant(&identifier(self.conninfo.user())));
        }
        error
    }

    /// Verifies that the owners of Walpost's functions and of the publication are trusted to run
    /// code as the current role. Objects that are used only for this outbox may also be owned by
    /// the outbox's owner. If `journal_only` is true, checks the journal instead.
    ///
    /// # Errors
    /// Returns an error if one of the objects is owned by a role that is not trusted, or if the
    /// query fails. In the former case, the error names the object.
    pub(crate) async fn examine_owners(
        &self,
        target: &Target,
        journal_only: bool,
    ) -> Result<(), CatalogError> {
        let scope = match journal_only {
            true => "journal",
            false => "owners",
        };
        let sql = sql_file::examine(target, SessionKind::Own, scope);
        let examined = self.client.batch_execute(&sql).await;
        examined.map_err(|error| CatalogError::from(error).with_commands(&target.commands))
    }

    /// Queries the state of the server and of `target`'s outbox, publication and slot.
    ///
    /// # Errors
    /// Returns an error if a query fails.
    pub(crate) async fn observe(&self, target: &Target) -> Result<Observed, CatalogError> {
        let server = self
            .client
            .query_one(
                &format!(
                    "SELECT current_setting('server_version_num')::int4, current_database()::text, \
                 current_user::text, current_setting('wal_level'), \
                 current_setting('max_slot_wal_keep_size', true), pg_is_in_recovery(), \
                 current_setting('application_name'), current_setting('effective_wal_level', true), \
                     CASE WHEN {IS_SYNCHRONOUS} THEN current_setting('synchronous_standby_names') END, \
                     getdatabaseencoding()::text, extract(epoch FROM pg_postmaster_start_time())::text, \
                     coalesce((SELECT stats_reset::text FROM pg_stat_bgwriter), '')"
                ),
                &[],
            )
            .await?;
        let mut observed = Observed {
            version: server.try_get(0)?,
            database: server.try_get(1)?,
            user: server.try_get(2)?,
            wal_level: server.try_get(3)?,
            slot_wal_keep: server.try_get(4)?,
            in_recovery: server.try_get(5)?,
            application_name: server.try_get(6)?,
            effective_wal_level: server.try_get(7)?,
            synchronous_standby_names: server.try_get(8)?,
            encoding: server.try_get(9)?,
            starts: ServerStarts {
                postmaster: server.try_get(10)?,
                statistics: server.try_get(11)?,
            },
            provider: None,
            table: match &target.outbox {
                Outbox::Table(table) | Outbox::OneOf { table, .. } => {
                    self.table(table, &target.publication).await?
                }
                Outbox::Tables(_) | Outbox::Messages { .. } => None,
            },
            has_publish: match &target.outbox {
                Outbox::Messages { .. } => self.has_publish().await?,
                _ => false,
            },
            has_journal: self.has_own_table("journal").await?,
            has_slot_state: self.has_own_table("slot_state").await?,
            has_table_state: self.has_own_table("table_state").await?,
            publication: self.publication(target, server.try_get(0)?).await?,
            slot: self.slot(&target.slot).await?,
        };
        if !observed.has_logical_decoding() {
            observed.provider = self.provider().await;
        }
        Ok(observed)
    }

    /// Returns whether a role with this name exists.
    ///
    /// # Errors
    /// Returns an error if the query fails.
    pub(crate) async fn has_role(&self, name: &str) -> Result<bool, CatalogError> {
        let sql = "SELECT EXISTS (SELECT FROM pg_roles WHERE rolname = $1::text)";
        Ok(self.client.query_one(sql, &[&name]).await?.try_get(0)?)
    }

    /// Returns `server_version_num`.
    ///
    /// # Errors
    /// Returns an error if the query fails.
    pub(super) async fn version(&self) -> Result<i32, CatalogError> {
        let sql = "SELECT current_setting('server_version_num')::int4";
        Ok(self.client.query_one(sql, &[]).await?.try_get(0)?)
    }

    /// Detects which managed service runs the server: each service defines a setting that no other
    /// server has. Returns `None` if no such setting is found, or if a query fails.
    async fn provider(&self) -> Option<Provider> {
        for (provider, setting) in Provider::SETTINGS {
            let sql = "SELECT current_setting($1, true) IS NOT NULL";
            let found = self.client.query_one(sql, &[&setting]).await.ok()?;
            if found.try_get(0).ok()? {
                return Some(provider);
            }
        }
        None
    }

    /// Returns a problem if a program other than Walpost is using the slot.
    ///
    /// # Errors
    /// Returns an error if a query fails.
    pub(crate) async fn held_by_other(&self, slot: &str) -> Result<Option<Problem>, CatalogError> {
        let name = "SELECT current_setting('application_name')";
        let name: String = self.client.query_one(name, &[]).await?.try_get(0)?;
        let found = self.slot(slot).await?;
        Ok(found.and_then(|found| found.held_by_other(slot, &name)))
    }

    async fn table(
        &self,
        table: &TableName,
        publication: &str,
    ) -> Result<Option<ObservedTable>, CatalogError> {
        let table = std::slice::from_ref(table);
        let mut found = self.tables(table, publication).await?;
        Ok(found.pop().map(|(_, table)| table))
    }

    /// Returns the tables in `tables` that exist, in no particular order. Each result lists only
    /// the columns that the publication sends.
    ///
    /// # Errors
    /// Returns an error if the query fails.
    pub(crate) async fn tables(
        &self,
        tables: &[TableName],
        publication: &str,
    ) -> Result<Vec<(TableName, ObservedTable)>, CatalogError> {
        let schemas: Vec<_> = tables.iter().map(|table| table.schema.as_str()).collect();
        let names: Vec<_> = tables.iter().map(|table| table.name.as_str()).collect();
        let found = self
            .client
            .query(
                &format!(
                    "SELECT c.oid, n.nspname::text, c.relname::text, c.relkind::text, c.relpersistence::text, \
                     EXISTS (SELECT FROM pg_trigger t \
                     WHERE t.tgrelid = c.oid AND t.tgname = 'walpost_no_update' AND t.tgenabled <> 'D'), \
                     EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary), {TABLE_VERSION} \
                     FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
                     JOIN unnest($1::text[], $2::text[]) AS wanted (schema, name) \
                     ON n.nspname = wanted.schema::name AND c.relname = wanted.name::name"
                ),
                &[&schemas, &names],
            )
            .await?;
        let mut tables = HashMap::with_capacity(found.len());
        for row in &found {
            let oid: u32 = row.try_get(0)?;
            let name = TableName {
                schema: row.try_get(1)?,
                name: row.try_get(2)?,
            };
            let table = ObservedTable {
                oid,
                kind: row.try_get(3)?,
                persistence: row.try_get(4)?,
                rejects_update: row.try_get(5)?,
                has_key: row.try_get(6)?,
                // The version is read before the columns, so that a later change to the columns is
                // detected.
                version: TableVersion::new(name.clone(), row.try_get(7)?),
                ..ObservedTable::default()
            };
            tables.insert(oid, (name, table));
        }
        let oids: Vec<_> = tables.keys().copied().collect();
        for row in &self.columns(&oids, Some(publication)).await? {
            let Some((_, table)) = tables.get_mut(&row.try_get(0)?) else {
                continue;
            };
            table.columns.push((row.try_get(1)?, row.try_get(2)?));
            table.types.push(row.try_get(3)?);
            table.facts.push(parse_column_facts(row)?);
        }
        Ok(tables.into_values().collect())
    }

    /// For the table with this OID, returns its columns with their types, defaults and constraints.
    /// The result is empty if the table does not exist.
    ///
    /// # Errors
    /// Returns an error if the query fails.
    pub(crate) async fn column_facts(&self, oid: u32) -> Result<Vec<ColumnFacts>, CatalogError> {
        let columns = self.columns(&[oid], None).await?;
        columns.iter().map(parse_column_facts).collect()
    }

    /// Returns the columns of these tables that the publication sends, or, if `publication` is
    /// `None`, every column that a publication could send. The columns of each table are in the
    /// order in which the table defines them.
    async fn columns(
        &self,
        oids: &[u32],
        publication: Option<&str>,
    ) -> Result<Vec<Row>, CatalogError> {
        let version = self.version().await?;
        let mut columns = Vec::new();
        for oids in oids.chunks(TABLES_PER_QUERY) {
            columns.extend(self.query_columns(oids, publication, version).await?);
        }
        Ok(columns)
    }

    async fn query_columns(
        &self,
        oids: &[u32],
        publication: Option<&str>,
        version: i32,
    ) -> Result<Vec<Row>, CatalogError> {
        // PostgreSQL 15 introduced column lists, and PostgreSQL 18 can publish generated columns.
        let listed = match version {
            150_000.. => {
                "(SELECT r.prattrs::int2[] FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid \
                 WHERE p.pubname = $2::text AND r.prrelid = a.attrelid)"
            }
            _ => "CASE WHEN $2::text IS NULL THEN NULL::int2[] END",
        };
        let generated = match version {
            180_000.. => {
                "a.attgenerated = 's' AND ($2::text IS NULL OR EXISTS (SELECT FROM pg_publication \
                 WHERE pubname = $2::text AND pubgencols = 's'))"
            }
            _ => "false",
        };
        // The combined size of a table's defaults is limited, because a table can have 1,600
        // columns, each with a default.
        let default = format!(
            "CASE WHEN a.attgenerated = '' AND sum(octet_length(adbin::text)) OVER (PARTITION BY a.attrelid) \
             <= {EXPRESSION_BYTES_MAX} THEN pg_get_expr(adbin, 0) END"
        );
        let columns = self
            .client
            .query(
                &format!(
                    "SELECT a.attrelid, a.attname::text, a.atttypid, format_type(a.atttypid, a.atttypmod), \
                     coalesce(d.modifier, a.atttypmod), a.attnotnull, {default}, d.base \
                     FROM pg_attribute a LEFT JOIN pg_attrdef ON adrelid = a.attrelid AND adnum = a.attnum \
                     LEFT JOIN LATERAL (WITH RECURSIVE domains AS (SELECT typbasetype AS base, typtypmod AS modifier \
                     FROM pg_type WHERE oid = a.atttypid AND typtype = 'd' UNION ALL \
                     SELECT t.typbasetype, CASE d.modifier WHEN -1 THEN t.typtypmod ELSE d.modifier END \
                     FROM domains d JOIN pg_type t ON t.oid = d.base AND t.typtype = 'd') \
                     SELECT d.base, d.modifier FROM domains d JOIN pg_type t ON t.oid = d.base AND t.typtype <> 'd') AS d ON true \
                     WHERE a.attrelid = ANY ($1) AND a.attnum > 0 AND NOT a.attisdropped \
                     AND coalesce(a.attnum = ANY (coalesce({listed}, NULL::int2[])), a.attgenerated = '' OR {generated}) ORDER BY a.attrelid, a.attnum"
                ),
                &[&oids, &publication],
            )
            .await?;
        Ok(columns)
    }

    async fn has_publish(&self) -> Result<bool, CatalogError> {
        self.has_rows(
            "FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace \
             WHERE n.nspname = 'walpost' AND p.proname = 'publish'",
            &[],
        )
        .await
    }

    async fn has_own_table(&self, name: &str) -> Result<bool, CatalogError> {
        self.has_rows(
            "FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
             WHERE n.nspname = 'walpost' AND c.relname = $1",
            &[&name],
        )
        .await
    }

    /// Returns whether a query returns any rows. `from` is the rest of the query, starting with the
    /// keyword FROM.
    pub(super) async fn has_rows(
        &self,
        from: &str,
        parameters: &[&(dyn ToSql + Sync)],
    ) -> Result<bool, CatalogError> {
        let sql = format!("SELECT EXISTS (SELECT {from})");
        let found = self.client.query_one(&sql, parameters).await?;
        Ok(found.try_get(0)?)
    }

    pub(super) async fn publication(
        &self,
        target: &Target,
        version: i32,
    ) -> Result<Option<ObservedPublication>, CatalogError> {
        let found = self
            .client
            .query_opt(
                &format!(
                    "SELECT pubinsert, pubupdate OR pubdelete OR pubtruncate, pubviaroot, ({UNTRUSTED_OWNER}) \
                     FROM pg_publication b WHERE pubname = $1"
                ),
                &[&target.publication],
            )
            .await?;
        let Some(found) = found else { return Ok(None) };
        let tables = self.published_tables(&target.publication, version).await?;
        let mut publication = ObservedPublication {
            inserts: found.try_get(0)?,
            more_than_inserts: found.try_get(1)?,
            via_root: found.try_get(2)?,
            untrusted_owner: found.try_get(3)?,
            unsafe_filter: self.unsafe_filter(&target.publication).await?,
            ..ObservedPublication::default()
        };
        for published in tables {
            let table = &published.name;
            let [schema, name] = OUTBOX_ROW;
            if target.outbox.is_several() && table.is(schema, name) {
                publication.has_outbox_row = true;
                continue;
            }
            if !target.outbox.includes(&table.schema, &table.name) {
                publication.other_tables.push(table.to_string());
                continue;
            }
            if target.outbox.table().is_none_or(|ours| ours == table)
                && publication.row_filter.is_none()
            {
                match self.row_filter(&target.publication, &published).await? {
                    RowFilter::None => {}
                    RowFilter::Condition(filter) => publication.row_filter = Some(filter),
                    RowFilter::Unsafe(filter) => publication.unsafe_filter = Some(filter),
                    RowFilter::Locked => publication.has_locked_filter = true,
                }
            }
            match &target.outbox {
                Outbox::Tables(_) => publication.tables.push(published.name),
                outbox if outbox.table() == Some(table) => publication.has_table = true,
                _ => {}
            }
        }
        if let Some(table) = target.outbox.table()
            && !publication.has_table
            && !publication.via_root
        {
            // Without `publish_via_partition_root`, the leaf partitions are listed instead of the
            // partitioned table.
            publication.has_table = self
                .has_rows(
                    "FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid \
                     JOIN pg_class c ON c.oid = r.prrelid \
                     JOIN pg_namespace n ON n.oid = c.relnamespace \
                     WHERE p.pubname = $1 AND n.nspname = $2 AND c.relname = $3",
                    &[&target.publication, &table.schema, &table.name],
                )
                .await?;
        }
        Ok(Some(publication))
    }

    /// Returns the tables that match the patterns and are not in `published`.
    ///
    /// # Errors
    /// Returns an error if the query fails.
    pub(crate) async fn unpublished(
        &self,
        patterns: &TablePatterns,
        published: &[TableName],
    ) -> Result<Vec<TableName>, CatalogError> {
        let [schemas, names] = patterns.like();
        let found = self
            .client
            .query(
                "SELECT DISTINCT n.nspname::text, c.relname::text FROM pg_class c \
                 JOIN pg_namespace n ON n.oid = c.relnamespace \
                 JOIN unnest($1::text[], $2::text[]) AS wanted (schema, name) \
                 ON n.nspname::text LIKE wanted.schema AND c.relname::text LIKE wanted.name \
                 WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND c.relpersistence = 'p' \
                 AND n.nspname NOT IN ('pg_catalog', 'information_schema', 'walpost') ORDER BY 1, 2",
                &[&schemas, &names],
            )
            .await?;
        let published: HashSet<_> = published.iter().collect();
        let mut missing = Vec::new();
        for row in found {
            let table = TableName {
                schema: row.try_get(0)?,
                name: row.try_get(1)?,
            };
            if !published.contains(&table) {
                missing.push(table);
            }
        }
        Ok(missing)
    }

    /// Returns the state of a slot and the session that uses it, or `None` if the slot does not
    /// exist.
    ///
    /// # Errors
    /// Returns an error if the query fails.
    pub(crate) async fn slot(&self, slot: &str) -> Result<Option<ObservedSlot>, CatalogError> {
        let found = self
            .client
            .query_opt(
                "SELECT s.plugin::text, s.database::text, s.active_pid, s.confirmed_flush_lsn, \
                 s.wal_status, s.temporary, s.two_phase, \
                 pg_catalog.to_jsonb(s) OPERATOR(pg_catalog.->>) 'invalidation_reason', \
                 coalesce(pg_catalog.to_jsonb(s) OPERATOR(pg_catalog.->>) 'synced' = 'true', false), \
                 a.application_name, a.usename::text, host(a.client_addr) \
                 FROM pg_replication_slots s LEFT JOIN pg_stat_activity a ON a.pid = s.active_pid \
                 WHERE s.slot_name = $1",
                &[&slot],
            )
            .await?;
        let Some(row) = found else { return Ok(None) };
        Ok(Some(ObservedSlot {
            plugin: row.try_get(0)?,
            database: row.try_get(1)?,
            active_pid: row.try_get(2)?,
            holder: match row.try_get(9)? {
                Some(application_name) => Some(Holder {
                    application_name,
                    role: row.try_get(10)?,
                    address: row.try_get(11)?,
                }),
                None => None,
            },
            confirmed: row.try_get::<_, Option<Lsn>>(3)?.unwrap_or_default(),
            wal_status: row.try_get(4)?,
            temporary: row.try_get(5)?,
            two_phase: row.try_get(6)?,
            invalidation_reason: row.try_get(7)?,
            synced: row.try_get(8)?,
        }))
    }
}

/// Converts a row returned by [`Catalog::columns`] to a [`ColumnFacts`].
fn parse_column_facts(row: &Row) -> Result<ColumnFacts, CatalogError> {
    let (type_oid, base): (u32, Option<u32>) = (row.try_get(2)?, row.try_get(7)?);
    Ok(ColumnFacts {
        name: row.try_get(1)?,
        domain: base.map(|base_oid| Domain {
            oid: type_oid,
            base_oid,
        }),
        type_modifier: row.try_get(4)?,
        not_null: row.try_get(5)?,
        default: row.try_get(6)?,
    })
}
