//! Errors that prevent the delivery of rows that are older than the slot.

use crate::model::lsn::Lsn;
use crate::outbox::columns::MappingError;
use crate::pipeline::decode::error::CoreError;
use crate::postgres::catalog::CatalogError;
use crate::postgres::replication::ConnectionError;
use crate::postgres::table::TableName;

/// Why rows that are older than the slot can't be delivered.
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
    /// The journal does not exist, so Walpost can't determine whether the older rows have been
    /// delivered.
    #[error(
        "table {table} has rows, but Walpost can't tell whether the rows that are older than slot {slot:?} have been delivered, \
         because table walpost.journal does not exist. To deliver these rows before the stream, create the journal with walpost \
         init. If they have been delivered, or should not be delivered, set snapshot = \"never\""
    )]
    NoJournal {
        /// The outbox.
        table: TableName,
        slot: String,
    },
    /// The role lacks the privilege to read the older rows.
    #[error(
        "table {table} has rows that may be older than slot {slot:?}, but the role lacks the privilege to read the table, which is \
         required to deliver these rows before the stream. Grant the privilege: {grant}. If the rows have been delivered, or should \
         not be delivered, set snapshot = \"never\""
    )]
    Denied {
        /// The outbox.
        table: TableName,
        slot: String,
        /// The SQL statement that grants the privilege.
        grant: String,
    },
    /// The snapshot could not be created or copied, because a transaction stayed open or held a
    /// lock for too long.
    #[error(
        "the snapshot of the table has to wait for a transaction that has been open for a long time ({0}). To find the transaction, \
         see xact_start in pg_stat_activity"
    )]
    Waits(String),
    /// A copy was interrupted, and exactly-once delivery can't resume it.
    #[error(
        "the snapshot of table {table} was interrupted after {rows} rows, which are in Kafka, and can't be resumed, because this \
         requires a primary key whose columns have an integer type, uuid, text, bytea or a date/time type. To deliver all rows \
         again: {adopt}. To omit the remaining rows, run the same command, and then set snapshot = \"never\""
    )]
    Interrupted {
        /// The outbox.
        table: TableName,
        /// Number of rows that were copied before the interruption.
        rows: u64,
        /// The command that creates a checkpoint at the slot's current position.
        adopt: String,
    },
    /// A copy that was started with a different definition of the pipeline can't be resumed with
    /// the current definition.
    #[error(
        "the copy of the older rows of table {table} is not complete, but {outbox} has replaced it in the \
         configuration: rows of {table} that were committed before {snapshot_lsn} may be missing from Kafka. To \
         complete the copy first, set table = {table:?} again, wait until the log contains \"snapshot delivered\", and \
         then change the definition. To omit the remaining rows: {adopt}{never}"
    )]
    Unfinished {
        table: String,
        outbox: String,
        snapshot_lsn: Lsn,
        /// How to skip the remaining rows. The instructions differ for an outbox of several tables,
        /// because such an outbox has no setting that skips the rows.
        never: &'static str,
        /// With exactly-once delivery, the command to run before the remaining rows can be skipped;
        /// otherwise empty.
        adopt: String,
    },
    /// The snapshot's connection has reached a different server than the stream's connection.
    #[error("the snapshot's connection reached a different server than the stream's connection")]
    OtherServer,
    /// Another instance has started or completed a snapshot since the journal was read.
    #[error(
        "another instance has changed the journal's record of the snapshot since this instance read it"
    )]
    Outrun,
}
