//! Why a pipeline can't go on.

use super::access::Refused;
use super::decode::error::CoreError;
use super::exactly_once::error::ExactlyOnceError;
use super::session::error::{SlotError, StreamError};
use super::wal_budget::error::WalBudgetError;
use crate::outbox::columns::MappingError;
use crate::postgres::catalog::CatalogError;
use crate::postgres::catalog::{Problem, SlotInUse};
use crate::postgres::replication::ConnectionError;
use crate::postgres::table::TableName;
use crate::sink::SinkError;

/// Why a pipeline can't go on. [`recovery::remedy`](super::recovery::remedy) says what each calls for.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PipelineError {
    /// The replication connection failed.
    #[error(transparent)]
    Connection(#[from] ConnectionError),
    /// The catalog can't be asked.
    #[error(transparent)]
    Catalog(#[from] CatalogError),
    /// Outbox, publication or slot are not as they have to be.
    #[error(transparent)]
    Problem(#[from] Problem),
    #[error(transparent)]
    SlotInUse(#[from] SlotInUse),
    #[error(transparent)]
    Refused(#[from] Refused),
    #[error(transparent)]
    Slot(#[from] SlotError),
    #[error(transparent)]
    Stream(#[from] StreamError),
    #[error(transparent)]
    ExactlyOnce(#[from] ExactlyOnceError),
    /// The outbox has not the columns that the settings expect.
    #[error(transparent)]
    Mapping(#[from] MappingError),
    #[error(transparent)]
    WalBudget(#[from] WalBudgetError),
    #[error(transparent)]
    Core(#[from] CoreError),
    /// Rows that are older than the slot can't be delivered.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// The sink can't go on.
    #[error(transparent)]
    Sink(#[from] SinkError),
}

/// Who has refused or failed, whichever stage it was met in.
pub(super) enum Cause<'e> {
    Connection(&'e ConnectionError),
    Catalog(&'e CatalogError),
    Sink(&'e SinkError),
    /// Nobody else: the stages have found it themselves.
    Found,
}

impl PipelineError {
    pub(super) fn cause(&self) -> Cause<'_> {
        match self {
            Self::Connection(error) => Cause::Connection(error),
            Self::Catalog(error) => Cause::Catalog(error),
            Self::Sink(error) => Cause::Sink(error),
            Self::WalBudget(error) => of_wal_budget(error),
            Self::Core(error) => of_core(error),
            Self::Snapshot(_) => Cause::Found,
            Self::Problem(_)
            | Self::SlotInUse(_)
            | Self::Refused(_)
            | Self::Slot(_)
            | Self::Stream(_)
            | Self::ExactlyOnce(_)
            | Self::Mapping(_) => Cause::Found,
        }
    }
}

fn of_wal_budget(error: &WalBudgetError) -> Cause<'_> {
    match error {
        WalBudgetError::Catalog(error) => Cause::Catalog(error),
        WalBudgetError::SlotInUse(_)
        | WalBudgetError::OverBudget { .. }
        | WalBudgetError::SlotDropped(_)
        | WalBudgetError::NoKey { .. } => Cause::Found,
    }
}

fn of_core(error: &CoreError) -> Cause<'_> {
    match error {
        CoreError::Produce { error, .. } => Cause::Sink(error),
        CoreError::DeadLetter { error, .. } => Cause::Sink(error),
        CoreError::Decode { .. }
        | CoreError::Order(_)
        | CoreError::Mapping(_)
        | CoreError::History(_)
        | CoreError::ForeignTable { .. }
        | CoreError::RowBesideMessages { .. }
        | CoreError::Envelope { .. }
        | CoreError::RowTooLarge { .. }
        | CoreError::UnknownRelation { .. }
        | CoreError::BadTuple { .. }
        | CoreError::BadLine { .. }
        | CoreError::Route { .. } => Cause::Found,
    }
}

/// Rows that are older than the slot can't be delivered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SnapshotError {
    /// Nobody knows whether they are already.
    #[error(
        "table {table} has rows, and whether those that are older than slot {slot:?} were delivered is not known: table \
         walpost.journal, which would say it, does not exist. To have them delivered before the stream: walpost init, \
         which makes it. If they were, or are not to be: snapshot = \"never\""
    )]
    NoJournal {
        /// The outbox.
        table: TableName,
        slot: String,
    },
    /// The role may not read them.
    #[error(
        "table {table} has rows that may be older than slot {slot:?}, and to deliver them before the stream the role has \
         to read the table. Let it: {grant}. If they were delivered, or are not to be: snapshot = \"never\""
    )]
    Denied {
        /// The outbox.
        table: TableName,
        slot: String,
        /// The statement that lets it.
        grant: String,
    },
    /// A transaction was open for too long.
    #[error(
        "a snapshot of the table waits for every transaction that is open when it begins, and one lasts: see xact_start \
         in pg_stat_activity ({0})"
    )]
    Waits(String),
    /// Exactly-once can't go on with a copy.
    #[error(
        "the snapshot of table {table} was interrupted after {rows} rows, which are in Kafka, and its rows have no order \
         in which it could be resumed: that requires a primary key of integers, uuid, text, bytea or times. To have all \
         rows delivered again: walpost checkpoint adopt --pipeline {pipeline}. To leave the rest out: the same, and then \
         snapshot = \"never\""
    )]
    Interrupted {
        /// The outbox.
        table: TableName,
        /// How many rows.
        rows: u64,
        pipeline: String,
    },
    /// The second connection has reached another server than the first.
    #[error("the snapshot's connection was answered by another server than the stream's")]
    OtherServer,
    /// Another instance has begun or ended a snapshot since the journal was read.
    #[error("another instance has written about the snapshot since the journal was read")]
    Outrun,
}
