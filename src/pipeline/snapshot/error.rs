//! Errors that prevent rows that are older than the slot from being delivered.

use crate::model::lsn::Lsn;
use crate::outbox::columns::MappingError;
use crate::pipeline::decode::error::CoreError;
use crate::postgres::catalog::CatalogError;
use crate::postgres::replication::ConnectionError;
use crate::postgres::table::TableName;

/// Rows that are older than the slot can't be delivered.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SnapshotError {
    #[error(transparent)]
    Connection(#[from] ConnectionError),
    #[error(transparent)]
    Catalog(#[from] CatalogError),
    #[error(transparent)]
    Mapping(#[from] MappingError),
    #[error(transparent)]
    Core(#[from] CoreError),
    /// It is unknown whether they were already delivered.
    #[error(
        "table {table} has rows, and whether those that are older than slot {slot:?} were delivered is not known: table \
         walpost.journal, which would say it, does not exist. To have them delivered before the stream, create \
         it with init. If they were, or are not to be: snapshot = \"never\""
    )]
    NoJournal {
        /// The outbox.
        table: TableName,
        slot: String,
    },
    /// The role lacks the privilege to read them.
    #[error(
        "table {table} has rows that may be older than slot {slot:?}, and to deliver them before the stream the role has \
         to read the table. Let it: {grant}. If they were delivered, or are not to be: snapshot = \"never\""
    )]
    Denied {
        /// The outbox.
        table: TableName,
        slot: String,
        /// The statement that grants the privilege.
        grant: String,
    },
    /// A transaction was open for too long.
    #[error(
        "a snapshot of the table waits for every transaction that is open when it begins, and one lasts: see xact_start \
         in pg_stat_activity ({0})"
    )]
    Waits(String),
    /// Exactly-once delivery can't continue a copy.
    #[error(
        "the snapshot of table {table} was interrupted after {rows} rows, which are in Kafka, and its rows have no order \
         in which it could be resumed: that requires a primary key of integers, uuid, text, bytea or times. To have all \
         rows delivered again: {adopt}. To leave the rest out: the same, and then \
         snapshot = \"never\""
    )]
    Interrupted {
        /// The outbox.
        table: TableName,
        /// Number of rows that were copied.
        rows: u64,
        /// The command that accepts the slot's current position.
        adopt: String,
    },
    /// A copy that was started under another definition of the pipeline can't continue under this
    /// one.
    #[error(
        "the copy of the older rows of table {table} is not complete, and the configuration has {outbox} in its place: rows of \
         {table} that were committed before {snapshot_lsn} may be missing in Kafka. Have it completed first: put table = \
         {table:?} back, wait until the log says \"snapshot delivered\", and then change the definition. To leave the rest out: \
         {adopt}{never}"
    )]
    Unfinished {
        table: String,
        outbox: String,
        snapshot_lsn: Lsn,
        /// The setting that leaves the remaining rows out. A definition with several tables has none.
        never: &'static str,
        /// With exactly-once delivery, the command to run first.
        adopt: String,
    },
    /// The second connection has reached a different server than the first.
    #[error("the snapshot's connection was answered by another server than the stream's")]
    OtherServer,
    /// Another instance has started or completed a snapshot since the journal was read.
    #[error("another instance has written about the snapshot since the journal was read")]
    Outrun,
}
