//! The database, as a session asks it: a trait, so that a simulation can be in its place.

use std::sync::Arc;
use std::time::Duration;

use crate::model::dropped_slot::DroppedSlot;
use crate::model::lsn::Lsn;
use crate::model::set_aside::SetAside;
use crate::model::vitals::Vitals;
use crate::outbox::connect::ColumnFacts;
use crate::postgres::catalog::drop_slot::Outcome;
use crate::postgres::catalog::journal::Entry;
use crate::postgres::catalog::set_aside::TableNote;
use crate::postgres::catalog::slot_state::{FirstStart, FoundState, SlotOf};
use crate::postgres::catalog::table_state::{Refresh, UncopiedTable};
use crate::postgres::catalog::{
    Catalog, CatalogError, CreatedAt, HiddenRows, LockedTable, Observed, ObservedTable,
    OrderColumn, RowOrder, SnapshotHistory, SnapshotRecord, Statement, TableSnapshot, TableVersion,
};
use crate::postgres::connect::conninfo::Conninfo;
use crate::postgres::connect::dial::{Notifications, ServerError};
use crate::postgres::replication::{Connection, ConnectionError};
use crate::postgres::table::TableName;
use crate::postgres::table_pattern::TablePatterns;
use crate::postgres::target::Target;

/// The database, as a session needs it.
pub(crate) trait Database: Clone + Send + Sync + 'static {
    /// A connection for questions.
    type Catalog: CatalogQueries;

    /// Opens one.
    fn catalog(&self) -> impl Future<Output = Result<Self::Catalog, CatalogError>> + Send;

    /// Opens a connection for replication; see [`Connection::open`].
    fn connect(
        &self,
        link_timeout: Duration,
        row_bytes_max: usize,
    ) -> impl Future<Output = Result<Connection, ConnectionError>> + Send;
}

/// A connection for questions.
pub(crate) trait CatalogQueries: Send + Sync + 'static {
    type Locked: LockedQueries;

    /// Locks and examines a table that has not changed since, so that the next statement can name it. Drop the result when that
    /// statement is planned.
    fn lock_table(
        &self,
        version: &TableVersion,
    ) -> impl Future<Output = Result<Self::Locked, CatalogError>> + Send;

    /// Asks for everything that `target` names.
    fn look(&self, target: &Target) -> impl Future<Output = Result<Observed, CatalogError>> + Send;

    /// Those of the tables that exist, in no order, with the columns that this publication sends.
    fn tables(
        &self,
        tables: &[TableName],
        publication: &str,
    ) -> impl Future<Output = Result<Vec<(TableName, ObservedTable)>, CatalogError>> + Send;

    /// Tables that the patterns stand for and that are not `published`.
    fn unpublished(
        &self,
        patterns: &TablePatterns,
        published: &[TableName],
    ) -> impl Future<Output = Result<Vec<TableName>, CatalogError>> + Send;

    /// The tables below outbox tables whose rows are not sent as theirs.
    fn hidden_rows(
        &self,
        outboxes: &[TableName],
    ) -> impl Future<Output = Result<Vec<HiddenRows>, CatalogError>> + Send;

    /// What is known of the columns of the table with this OID; nothing where that is not there.
    fn facts(
        &self,
        oid: u32,
    ) -> impl Future<Output = Result<Vec<ColumnFacts>, CatalogError>> + Send;

    /// Asks how its slot is, and which slots the pipeline has dropped.
    fn vitals(
        &self,
        pipeline: &str,
        target: &Target,
    ) -> impl Future<Output = Result<Vitals, CatalogError>> + Send;

    /// Slots of the pipeline that were dropped and not replayed.
    fn dropped_slots(
        &self,
        pipeline: &str,
        target: &Target,
    ) -> impl Future<Output = Result<Vec<DroppedSlot>, CatalogError>> + Send;

    /// Drops its slot, if that retains more than `max_bytes` of WAL; `copies` says whether rows
    /// are delivered that are older.
    fn drop_slot_over_budget(
        &self,
        pipeline: &str,
        target: &Target,
        max_bytes: u64,
        copies: bool,
    ) -> impl Future<Output = Result<Outcome, CatalogError>> + Send;

    /// What is known of a pipeline's past.
    fn snapshot_history(
        &self,
        target: &Target,
        table: &TableName,
    ) -> impl Future<Output = Result<SnapshotHistory, CatalogError>> + Send;

    /// What the journal says of its snapshot.
    fn snapshot_record(
        &self,
        target: &Target,
    ) -> impl Future<Output = Result<SnapshotRecord, CatalogError>> + Send;

    /// What the journal says of the snapshots of each table that its slot was for.
    fn table_snapshots(
        &self,
        target: &Target,
    ) -> impl Future<Output = Result<Vec<TableSnapshot>, CatalogError>> + Send;

    /// The tables whose older rows no start has copied, and which are no longer the outbox.
    fn uncopied_tables(
        &self,
        target: &Target,
        snapshots: &[TableSnapshot],
    ) -> impl Future<Output = Result<Vec<UncopiedTable>, CatalogError>> + Send;

    /// The columns by which a table's rows are put in order.
    fn order_columns(
        &self,
        table: &TableName,
    ) -> impl Future<Output = Result<Vec<OrderColumn>, CatalogError>> + Send;

    /// Adds an entry to the journal.
    fn write_journal(
        &self,
        entry: &Entry<'_>,
    ) -> impl Future<Output = Result<(), CatalogError>> + Send;

    /// The entries about tables of its slot that were set aside.
    fn set_aside(
        &self,
        target: &Target,
    ) -> impl Future<Output = Result<Vec<SetAside>, CatalogError>> + Send;

    /// Records that a table is set aside or delivered again; the result is the entry that is opened by it.
    fn write_set_aside(
        &self,
        pipeline: &str,
        target: &Target,
        note: &TableNote,
    ) -> impl Future<Output = Result<Option<SetAside>, CatalogError>> + Send;

    /// What was written down of its slot.
    fn slot_state(
        &self,
        of: &SlotOf,
    ) -> impl Future<Output = Result<FoundState, CatalogError>> + Send;

    /// Writes down that nothing beyond `confirmed` is confirmed.
    fn write_slot_state(
        &self,
        of: &SlotOf,
        confirmed: Lsn,
    ) -> impl Future<Output = Result<(), CatalogError>> + Send;

    /// The journal says why the slot is at `found`, beyond `confirmed`.
    fn is_accounted_for(
        &self,
        of: &SlotOf,
        confirmed: Lsn,
        found: Lsn,
    ) -> impl Future<Output = Result<bool, CatalogError>> + Send;

    /// Adds to the journal what may be missing according to the state of a slot in another history.
    fn record_gap_of_other_history(
        &self,
        of: &SlotOf,
        found: Lsn,
        first_start: FirstStart,
    ) -> impl Future<Output = Result<(), CatalogError>> + Send;

    /// Compares the tables of the publication with what was recorded, and records what has changed and what may be missing. The
    /// result is why that is impossible, if it is.
    fn record_tables(
        &self,
        pipeline: &str,
        target: &Target,
        refresh: Refresh,
    ) -> impl Future<Output = Result<Option<String>, CatalogError>> + Send;

    /// Says of an error with which the server refuses a connection for replication what fixes it.
    fn explain_refusal(&self, error: &mut ServerError) -> impl Future<Output = ()> + Send;

    /// Listens for requests to confirm the position of `slot`.
    fn position_requests(
        &self,
        slot: &str,
    ) -> impl Future<Output = Result<Arc<Notifications>, CatalogError>> + Send;

    /// Resolves when the connection has ended.
    fn closed(&mut self) -> impl Future<Output = ()> + Send;
}

/// A table that is locked; see [`LockedTable`].
pub(crate) trait LockedQueries: Send + Sync {
    /// The order of its rows, in SQL.
    fn row_order(&self) -> impl Future<Output = Result<RowOrder<'_>, CatalogError>> + Send;
}

impl LockedQueries for LockedTable {
    async fn row_order(&self) -> Result<RowOrder<'_>, CatalogError> {
        LockedTable::row_order(self, CreatedAt::UnlessKeyRises).await
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

    async fn look(&self, target: &Target) -> Result<Observed, CatalogError> {
        Catalog::look(self, target).await
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

    async fn facts(&self, oid: u32) -> Result<Vec<ColumnFacts>, CatalogError> {
        Catalog::facts(self, oid).await
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

    async fn order_columns(&self, table: &TableName) -> Result<Vec<OrderColumn>, CatalogError> {
        Catalog::order_columns(self, table, CreatedAt::UnlessKeyRises).await
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

    async fn slot_state(&self, of: &SlotOf) -> Result<FoundState, CatalogError> {
        Catalog::slot_state(self, of).await
    }

    async fn write_slot_state(&self, of: &SlotOf, confirmed: Lsn) -> Result<(), CatalogError> {
        Catalog::write_slot_state(self, of, confirmed).await
    }

    async fn is_accounted_for(
        &self,
        of: &SlotOf,
        confirmed: Lsn,
        found: Lsn,
    ) -> Result<bool, CatalogError> {
        Catalog::is_accounted_for(self, of, confirmed, found).await
    }

    async fn record_gap_of_other_history(
        &self,
        of: &SlotOf,
        found: Lsn,
        first_start: FirstStart,
    ) -> Result<(), CatalogError> {
        Catalog::record_gap_of_other_history(self, of, found, first_start).await
    }

    async fn record_tables(
        &self,
        pipeline: &str,
        target: &Target,
        refresh: Refresh,
    ) -> Result<Option<String>, CatalogError> {
        Catalog::record_tables(self, pipeline, target, refresh).await
    }

    async fn explain_refusal(&self, error: &mut ServerError) {
        Catalog::explain_refusal(self, error).await;
    }

    async fn position_requests(&self, slot: &str) -> Result<Arc<Notifications>, CatalogError> {
        Catalog::position_requests(self, slot).await
    }

    async fn closed(&mut self) {
        Catalog::closed(self).await;
    }
}
