//! The database, as a session asks it: a trait, so that a simulation can be in its place.

use std::time::Duration;

use crate::model::let_go::LetGo;
use crate::model::lsn::Lsn;
use crate::model::vitals::Vitals;
use crate::postgres::catalog::journal::Entry;
use crate::postgres::catalog::let_go::Outcome;
use crate::postgres::catalog::slot_state::{FoundState, SlotOf};
use crate::postgres::catalog::{Catalog, CatalogError, KeyColumn, Observed, Past, Said};
use crate::postgres::connect::conninfo::Conninfo;
use crate::postgres::connect::dial::ServerError;
use crate::postgres::replication::{Connection, ConnectionError};
use crate::postgres::table::TableName;
use crate::postgres::target::Target;

/// The database, as a session needs it.
pub(crate) trait Database: Clone + Send + Sync + 'static {
    /// A connection for questions.
    type Catalog: Look;

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
pub(crate) trait Look: Send + Sync + 'static {
    /// Asks for everything that `target` names.
    fn look(&self, target: &Target) -> impl Future<Output = Result<Observed, CatalogError>> + Send;

    /// Asks how its slot is, and what the pipeline has let go.
    fn vitals(
        &self,
        pipeline: &str,
        target: &Target,
    ) -> impl Future<Output = Result<Vitals, CatalogError>> + Send;

    /// What was let go of the pipeline and not replayed.
    fn let_go(
        &self,
        pipeline: &str,
        target: &Target,
    ) -> impl Future<Output = Result<Vec<LetGo>, CatalogError>> + Send;

    /// Lets go of its slot, if that keeps more than `max_bytes` of the log; `copies` says whether rows
    /// are delivered that are older.
    fn let_slot_go(
        &self,
        pipeline: &str,
        target: &Target,
        max_bytes: u64,
        copies: bool,
    ) -> impl Future<Output = Result<Outcome, CatalogError>> + Send;

    /// What is known of a pipeline's past.
    fn past(
        &self,
        pipeline: &str,
        target: &Target,
        table: &TableName,
    ) -> impl Future<Output = Result<Past, CatalogError>> + Send;

    /// What the journal says of its snapshot.
    fn said_of_snapshot(
        &self,
        pipeline: &str,
        target: &Target,
    ) -> impl Future<Output = Result<Said, CatalogError>> + Send;

    /// The columns by which a table's rows are put in order.
    fn order(
        &self,
        table: &TableName,
    ) -> impl Future<Output = Result<Vec<KeyColumn>, CatalogError>> + Send;

    /// Adds an entry to the journal.
    fn write_journal(
        &self,
        entry: &Entry<'_>,
    ) -> impl Future<Output = Result<(), CatalogError>> + Send;

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

    /// The journal says why the slot stands at `found`, beyond `confirmed`.
    fn is_accounted_for(
        &self,
        target: &Target,
        confirmed: Lsn,
        found: Lsn,
    ) -> impl Future<Output = Result<bool, CatalogError>> + Send;

    /// Says of an error that the server gives for want of walsenders or slots who has them.
    fn name_users(&self, error: &mut ServerError) -> impl Future<Output = ()> + Send;

    /// Resolves when the connection has ended.
    fn closed(&mut self) -> impl Future<Output = ()> + Send;
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

impl Look for Catalog {
    async fn look(&self, target: &Target) -> Result<Observed, CatalogError> {
        Catalog::look(self, target).await
    }

    async fn vitals(&self, pipeline: &str, target: &Target) -> Result<Vitals, CatalogError> {
        Catalog::vitals(self, pipeline, target).await
    }

    async fn let_go(&self, pipeline: &str, target: &Target) -> Result<Vec<LetGo>, CatalogError> {
        Catalog::let_go(self, pipeline, target).await
    }

    async fn let_slot_go(
        &self,
        pipeline: &str,
        target: &Target,
        max_bytes: u64,
        copies: bool,
    ) -> Result<Outcome, CatalogError> {
        Catalog::let_slot_go(self, pipeline, target, max_bytes, copies).await
    }

    async fn past(
        &self,
        pipeline: &str,
        target: &Target,
        table: &TableName,
    ) -> Result<Past, CatalogError> {
        Catalog::past(self, pipeline, target, table).await
    }

    async fn said_of_snapshot(
        &self,
        pipeline: &str,
        target: &Target,
    ) -> Result<Said, CatalogError> {
        Catalog::said_of_snapshot(self, pipeline, target).await
    }

    async fn order(&self, table: &TableName) -> Result<Vec<KeyColumn>, CatalogError> {
        Catalog::order(self, table).await
    }

    async fn write_journal(&self, entry: &Entry<'_>) -> Result<(), CatalogError> {
        Catalog::write_journal(self, entry).await.map(drop)
    }

    async fn slot_state(&self, of: &SlotOf) -> Result<FoundState, CatalogError> {
        Catalog::slot_state(self, of).await
    }

    async fn write_slot_state(&self, of: &SlotOf, confirmed: Lsn) -> Result<(), CatalogError> {
        Catalog::write_slot_state(self, of, confirmed).await
    }

    async fn is_accounted_for(
        &self,
        target: &Target,
        confirmed: Lsn,
        found: Lsn,
    ) -> Result<bool, CatalogError> {
        Catalog::is_accounted_for(self, target, confirmed, found).await
    }

    async fn name_users(&self, error: &mut ServerError) {
        Catalog::name_users(self, error).await;
    }

    async fn closed(&mut self) {
        Catalog::closed(self).await;
    }
}
