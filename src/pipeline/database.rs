//! Traits for the database queries of a session, so that tests can substitute a simulation.

use std::sync::Arc;
use std::time::Duration;

use crate::model::dropped_slot::DroppedSlot;
use crate::model::lsn::Lsn;
use crate::model::set_aside::SetAside;
use crate::model::vitals::Vitals;
use crate::outbox::connect::ColumnFacts;
use crate::pipeline::settings::PipelineSettings;
use crate::postgres::catalog::drop_slot::Outcome;
use crate::postgres::catalog::journal::Entry;
use crate::postgres::catalog::set_aside::TableNote;
use crate::postgres::catalog::slot_owner::{DefinedBy, UnknownOwner};
use crate::postgres::catalog::slot_state::{FirstStart, FoundState, SlotIdentity};
use crate::postgres::catalog::table_state::{AcceptedNames, Refresh, UncopiedTable};
use crate::postgres::catalog::{
    Catalog, CatalogError, CopyScope, CreatedAt, HiddenRows, LockedTable, Observed, ObservedTable,
    OrderColumn, RowOrder, SnapshotHistory, SnapshotRecord, Statement, TableSnapshot, TableVersion,
};
use crate::postgres::connect::conninfo::Conninfo;
use crate::postgres::connect::dial::{Notifications, ServerError};
use crate::postgres::replication::{Connection, ConnectionError, ServerProcess};
use crate::postgres::table::TableName;
use crate::postgres::table_pattern::TablePatterns;
use crate::postgres::target::Target;

/// Opens a connection for catalog queries that change the pipeline's slot, journal or outbox, or
/// that rely on the slot's position.
///
/// # Errors
/// Returns an error if no host accepts the connection. If the pipeline is defined by a row, also
/// returns an error if the slot does not belong to the pipeline, or if this can't be determined.
pub(crate) async fn open_catalog_of_owner<D: Database>(
    settings: &PipelineSettings,
    database: &D,
) -> Result<D::Catalog, CatalogError> {
    let catalog = database.catalog().await?;
    catalog
        .check_slot_owner(
            &settings.name,
            settings.defined_by,
            &settings.target,
            UnknownOwner::Rejected,
        )
        .await?;
    Ok(catalog)
}

/// Like [`open_catalog_of_owner`], but connects to the database in the settings.
///
/// # Errors
/// See [`open_catalog_of_owner`].
pub(crate) async fn open_as_owner(settings: &PipelineSettings) -> Result<Catalog, CatalogError> {
    open_catalog_of_owner(settings, &settings.postgres).await
}

/// The database that a session uses.
pub(crate) trait Database: Clone + Send + Sync + 'static {
    /// A connection for catalog queries.
    type Catalog: CatalogQueries;

    /// Opens a connection for catalog queries.
    fn catalog(&self) -> impl Future<Output = Result<Self::Catalog, CatalogError>> + Send;

    /// Opens a replication connection; see [`Connection::open`].
    fn connect(
        &self,
        link_timeout: Duration,
        row_bytes_max: usize,
    ) -> impl Future<Output = Result<Connection, ConnectionError>> + Send;
}

/// A connection for catalog queries.
pub(crate) trait CatalogQueries: Send + Sync + 'static {
    type Locked: LockedQueries;

    /// Locks a table, and checks that it has not changed since `version` was read, so that the next
    /// statement can refer to the table by name.
    fn lock_table(
        &self,
        version: &TableVersion,
    ) -> impl Future<Output = Result<Self::Locked, CatalogError>> + Send;

    /// Queries the catalog for the outbox, the publication and the slot of `target`.
    fn observe(
        &self,
        target: &Target,
    ) -> impl Future<Output = Result<Observed, CatalogError>> + Send;

    /// Returns the tables in `tables` that exist, in any order, with the columns that `publication`
    /// publishes.
    fn tables(
        &self,
        tables: &[TableName],
        publication: &str,
    ) -> impl Future<Output = Result<Vec<(TableName, ObservedTable)>, CatalogError>> + Send;

    /// Returns the tables that match `patterns` but are not listed in `published`.
    fn unpublished(
        &self,
        patterns: &TablePatterns,
        published: &[TableName],
    ) -> impl Future<Output = Result<Vec<TableName>, CatalogError>> + Send;

    /// Returns the child tables and partitions of `outboxes` whose rows PostgreSQL does not publish
    /// as rows of the outbox table itself.
    fn hidden_rows(
        &self,
        outboxes: &[TableName],
    ) -> impl Future<Output = Result<Vec<HiddenRows>, CatalogError>> + Send;

    /// Returns the catalog's description of each column of the table with this OID. The result is
    /// empty if the table does not exist.
    fn column_facts(
        &self,
        oid: u32,
    ) -> impl Future<Output = Result<Vec<ColumnFacts>, CatalogError>> + Send;

    /// See [`Catalog::record_delivered_table`].
    fn record_delivered_table(
        &self,
        pipeline: &str,
        target: &Target,
        table: &AcceptedNames,
    ) -> impl Future<Output = Result<(), CatalogError>> + Send;

    /// Returns the names under which the rows of the tables with these OIDs may be published.
    fn accepted_names(
        &self,
        target: &Target,
        oids: &[u32],
    ) -> impl Future<Output = Result<Vec<AcceptedNames>, CatalogError>> + Send;

    /// Queries the state of the slot, and lists the slots that the pipeline has dropped.
    fn vitals(
        &self,
        pipeline: &str,
        target: &Target,
    ) -> impl Future<Output = Result<Vitals, CatalogError>> + Send;

    /// Returns the pipeline's dropped slots whose events have not been replayed yet.
    fn dropped_slots(
        &self,
        pipeline: &str,
        target: &Target,
    ) -> impl Future<Output = Result<Vec<DroppedSlot>, CatalogError>> + Send;

    /// Advances the slot, which must be free, from `from` to `to`. Returns false without changing
    /// anything if the slot is not at `from`.
    fn advance(
        &self,
        slot: &str,
        from: Lsn,
        to: Lsn,
    ) -> impl Future<Output = Result<bool, CatalogError>> + Send;

    /// Drops the slot if it retains more than `max_bytes` of WAL. `copies` indicates whether rows
    /// older than the slot are also delivered.
    fn drop_slot_over_budget(
        &self,
        pipeline: &str,
        target: &Target,
        max_bytes: u64,
        copies: bool,
    ) -> impl Future<Output = Result<Outcome, CatalogError>> + Send;

    /// Returns an estimate of the number of rows in `table`, the journal's record of a snapshot of
    /// the target's table, and whether the target's slot has been read before.
    fn snapshot_history(
        &self,
        target: &Target,
        table: &TableName,
    ) -> impl Future<Output = Result<SnapshotHistory, CatalogError>> + Send;

    /// Returns the journal's record of a snapshot of the target's table.
    fn snapshot_record(
        &self,
        target: &Target,
    ) -> impl Future<Output = Result<SnapshotRecord, CatalogError>> + Send;

    /// Returns the journal entries about the snapshots of all tables that the slot has been used
    /// for.
    fn table_snapshots(
        &self,
        target: &Target,
    ) -> impl Future<Output = Result<Vec<TableSnapshot>, CatalogError>> + Send;

    /// Returns the former outbox tables whose rows older than the slot were never copied.
    fn uncopied_tables(
        &self,
        target: &Target,
        snapshots: &[TableSnapshot],
    ) -> impl Future<Output = Result<Vec<UncopiedTable>, CatalogError>> + Send;

    /// Returns the table and the partitions that a copy of `table` would read if it started now.
    fn copy_scope(
        &self,
        table: &TableName,
    ) -> impl Future<Output = Result<CopyScope, CatalogError>> + Send;

    /// Records partitions that were detached from `table` before their rows were copied.
    /// `confirmed` is the slot's current position.
    fn record_uncopied_partitions(
        &self,
        pipeline: &str,
        target: &Target,
        table: &TableName,
        confirmed: Lsn,
    ) -> impl Future<Output = Result<(), CatalogError>> + Send;

    /// Returns the columns that can be used to order a table's rows.
    fn order_columns(
        &self,
        table: &TableName,
    ) -> impl Future<Output = Result<Vec<OrderColumn>, CatalogError>> + Send;

    /// Adds `entry` to the journal.
    fn write_journal(
        &self,
        entry: &Entry<'_>,
    ) -> impl Future<Output = Result<(), CatalogError>> + Send;

    /// Returns the slot's journal entries about tables that are set aside (not delivered because of
    /// an error).
    fn set_aside(
        &self,
        target: &Target,
    ) -> impl Future<Output = Result<Vec<SetAside>, CatalogError>> + Send;

    /// Writes a journal entry stating that a table is set aside, remains set aside or is delivered
    /// again. In the first two cases, returns the new entry.
    fn write_set_aside(
        &self,
        pipeline: &str,
        target: &Target,
        note: &TableNote,
    ) -> impl Future<Output = Result<Option<SetAside>, CatalogError>> + Send;

    /// See [`Catalog::check_slot_owner`].
    fn check_slot_owner(
        &self,
        pipeline: &str,
        defined_by: DefinedBy,
        target: &Target,
        unknown: UnknownOwner,
    ) -> impl Future<Output = Result<(), CatalogError>> + Send;

    /// Returns the state of the slot that is recorded in `walpost.slot_state`.
    fn slot_state(
        &self,
        slot: &SlotIdentity,
    ) -> impl Future<Output = Result<FoundState, CatalogError>> + Send;

    /// Records `confirmed` in `walpost.slot_state` as the highest position that may have been
    /// confirmed so far.
    fn write_slot_state(
        &self,
        slot: &SlotIdentity,
        confirmed: Lsn,
    ) -> impl Future<Output = Result<(), CatalogError>> + Send;

    /// Returns whether the journal explains why the slot is at `found`, although the last recorded
    /// position, `confirmed`, is lower.
    fn is_accounted_for(
        &self,
        slot: &SlotIdentity,
        confirmed: Lsn,
        found: Lsn,
    ) -> impl Future<Output = Result<bool, CatalogError>> + Send;

    /// If the recorded state belongs to a different history of the database (a different timeline,
    /// or the time before a dump was restored), adds a journal entry about the events that may be
    /// missing.
    fn record_gap_of_other_history(
        &self,
        slot: &SlotIdentity,
        found: Lsn,
        first_start: FirstStart,
    ) -> impl Future<Output = Result<(), CatalogError>> + Send;

    /// Compares the publication's tables with the previously recorded tables, and records any
    /// changes and any events that may be missing because of these changes. If nothing can be
    /// recorded, returns the reason.
    fn record_tables(
        &self,
        pipeline: &str,
        target: &Target,
        refresh: Refresh,
    ) -> impl Future<Output = Result<Option<String>, CatalogError>> + Send;

    /// Adds a suggested fix to `error`, which the server returned when it refused a replication
    /// connection.
    fn explain_rejection(&self, error: &mut ServerError) -> impl Future<Output = ()> + Send;

    /// Listens for requests from `walpost verify` to confirm the current position of `slot`.
    fn position_requests(
        &self,
        slot: &str,
    ) -> impl Future<Output = Result<Arc<Notifications>, CatalogError>> + Send;

    /// Completes when the connection has been closed.
    fn closed(&mut self) -> impl Future<Output = ()> + Send;
}

/// A locked table; see [`LockedTable`].
pub(crate) trait LockedQueries: Send + Sync {
    /// Returns the columns that can be used to order the table's rows.
    fn row_order(&self) -> impl Future<Output = Result<RowOrder<'_>, CatalogError>> + Send;

    /// Runs `planned`, which completes once `process` has planned a statement, and then releases the
    /// lock.
    fn until_planned_by<T: Send>(
        self,
        process: &ServerProcess,
        planned: impl Future<Output = Result<T, ConnectionError>> + Send,
    ) -> impl Future<Output = Result<Result<T, ConnectionError>, CatalogError>> + Send;
}

impl LockedQueries for LockedTable {
    async fn row_order(&self) -> Result<RowOrder<'_>, CatalogError> {
        LockedTable::row_order(self, CreatedAt::UnlessKeyAscends).await
    }

    async fn until_planned_by<T: Send>(
        self,
        process: &ServerProcess,
        planned: impl Future<Output = Result<T, ConnectionError>> + Send,
    ) -> Result<Result<T, ConnectionError>, CatalogError> {
        LockedTable::until_planned_by(self, process, planned).await
    }
}

impl Database for Conninfo {
    type Catalog = Catalog;

    async fn catalog(&self) -> Result<Catalog, CatalogError> {
        Catalog::open(self).await
    }

    async fn connect(
        &self,
        link_timeout: Duration,
        row_bytes_max: usize,
    ) -> Result<Connection, ConnectionError> {
        Connection::open(self, link_timeout, row_bytes_max).await
    }
}

impl CatalogQueries for Catalog {
    type Locked = LockedTable;

    async fn lock_table(&self, version: &TableVersion) -> Result<LockedTable, CatalogError> {
        Catalog::lock_table(self, version, Statement::Select).await
    }

    async fn observe(&self, target: &Target) -> Result<Observed, CatalogError> {
        Catalog::observe(self, target).await
    }

    async fn tables(
        &self,
        tables: &[TableName],
        publication: &str,
    ) -> Result<Vec<(TableName, ObservedTable)>, CatalogError> {
        Catalog::tables(self, tables, publication).await
    }

    async fn unpublished(
        &self,
        patterns: &TablePatterns,
        published: &[TableName],
    ) -> Result<Vec<TableName>, CatalogError> {
        Catalog::unpublished(self, patterns, published).await
    }

    async fn hidden_rows(&self, outboxes: &[TableName]) -> Result<Vec<HiddenRows>, CatalogError> {
        Catalog::hidden_rows(self, outboxes).await
    }

    async fn advance(&self, slot: &str, from: Lsn, to: Lsn) -> Result<bool, CatalogError> {
        Catalog::advance(self, slot, from, to).await
    }

    async fn column_facts(&self, oid: u32) -> Result<Vec<ColumnFacts>, CatalogError> {
        Catalog::column_facts(self, oid).await
    }

    async fn record_delivered_table(
        &self,
        pipeline: &str,
        target: &Target,
        table: &AcceptedNames,
    ) -> Result<(), CatalogError> {
        Catalog::record_delivered_table(self, pipeline, target, table).await
    }

    async fn accepted_names(
        &self,
        target: &Target,
        oids: &[u32],
    ) -> Result<Vec<AcceptedNames>, CatalogError> {
        Catalog::accepted_names(self, target, oids).await
    }

    async fn vitals(&self, pipeline: &str, target: &Target) -> Result<Vitals, CatalogError> {
        Catalog::vitals(self, pipeline, target).await
    }

    async fn dropped_slots(
        &self,
        pipeline: &str,
        target: &Target,
    ) -> Result<Vec<DroppedSlot>, CatalogError> {
        Catalog::dropped_slots(self, pipeline, target).await
    }

    async fn drop_slot_over_budget(
        &self,
        pipeline: &str,
        target: &Target,
        max_bytes: u64,
        copies: bool,
    ) -> Result<Outcome, CatalogError> {
        Catalog::drop_slot_over_budget(self, pipeline, target, max_bytes, copies).await
    }

    async fn snapshot_history(
        &self,
        target: &Target,
        table: &TableName,
    ) -> Result<SnapshotHistory, CatalogError> {
        Catalog::snapshot_history(self, target, table).await
    }

    async fn snapshot_record(&self, target: &Target) -> Result<SnapshotRecord, CatalogError> {
        Catalog::snapshot_record(self, target).await
    }

    async fn table_snapshots(&self, target: &Target) -> Result<Vec<TableSnapshot>, CatalogError> {
        Catalog::table_snapshots(self, target).await
    }

    async fn uncopied_tables(
        &self,
        target: &Target,
        snapshots: &[TableSnapshot],
    ) -> Result<Vec<UncopiedTable>, CatalogError> {
        Catalog::uncopied_tables(self, target, snapshots).await
    }

    async fn copy_scope(&self, table: &TableName) -> Result<CopyScope, CatalogError> {
        Catalog::copy_scope(self, table).await
    }

    async fn record_uncopied_partitions(
        &self,
        pipeline: &str,
        target: &Target,
        table: &TableName,
        confirmed: Lsn,
    ) -> Result<(), CatalogError> {
        Catalog::record_uncopied_partitions(self, pipeline, target, table, confirmed).await
    }

    async fn order_columns(&self, table: &TableName) -> Result<Vec<OrderColumn>, CatalogError> {
        Catalog::order_columns(self, table, CreatedAt::UnlessKeyAscends).await
    }

    async fn write_journal(&self, entry: &Entry<'_>) -> Result<(), CatalogError> {
        Catalog::write_journal(self, entry).await.map(drop)
    }

    async fn set_aside(&self, target: &Target) -> Result<Vec<SetAside>, CatalogError> {
        Catalog::set_aside(self, target).await
    }

    async fn write_set_aside(
        &self,
        pipeline: &str,
        target: &Target,
        note: &TableNote,
    ) -> Result<Option<SetAside>, CatalogError> {
        Catalog::write_set_aside(self, pipeline, target, note).await
    }

    async fn check_slot_owner(
        &self,
        pipeline: &str,
        defined_by: DefinedBy,
        target: &Target,
        unknown: UnknownOwner,
    ) -> Result<(), CatalogError> {
        Catalog::check_slot_owner(self, pipeline, defined_by, target, unknown).await
    }

    async fn slot_state(&self, slot: &SlotIdentity) -> Result<FoundState, CatalogError> {
        Catalog::slot_state(self, slot).await
    }

    async fn write_slot_state(
        &self,
        slot: &SlotIdentity,
        confirmed: Lsn,
    ) -> Result<(), CatalogError> {
        Catalog::write_slot_state(self, slot, confirmed).await
    }

    async fn is_accounted_for(
        &self,
        slot: &SlotIdentity,
        confirmed: Lsn,
        found: Lsn,
    ) -> Result<bool, CatalogError> {
        Catalog::is_accounted_for(self, slot, confirmed, found).await
    }

    async fn record_gap_of_other_history(
        &self,
        slot: &SlotIdentity,
        found: Lsn,
        first_start: FirstStart,
    ) -> Result<(), CatalogError> {
        Catalog::record_gap_of_other_history(self, slot, found, first_start).await
    }

    async fn record_tables(
        &self,
        pipeline: &str,
        target: &Target,
        refresh: Refresh,
    ) -> Result<Option<String>, CatalogError> {
        Catalog::record_tables(self, pipeline, target, refresh).await
    }

    async fn explain_rejection(&self, error: &mut ServerError) {
        Catalog::explain_rejection(self, error).await;
    }

    async fn position_requests(&self, slot: &str) -> Result<Arc<Notifications>, CatalogError> {
        Catalog::position_requests(self, slot).await
    }

    async fn closed(&mut self) {
        Catalog::closed(self).await;
    }
}
