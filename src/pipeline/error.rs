//! Why a pipeline can't go on.

use bytesize::ByteSize;

use super::access::Refused;
use super::decode::error::CoreError;
use super::exactly_once::error::ExactlyOnceError;
use super::session::error::{SlotError, StreamError};
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
    /// The slot retains more WAL than it may, and is to be dropped.
    #[error("slot {slot:?} retains more than wal_budget.max, {max}, and could not be dropped yet")]
    OverBudget {
        slot: String,
        /// `wal_budget.max`
        max: ByteSize,
    },
    /// The slot was dropped.
    #[error(transparent)]
    SlotDropped(Box<SlotDropped>),
    /// The slot may be dropped, and the rows could not be sent again.
    #[error(
        "table {table} has no primary key, and wal_budget.on_max is \"drop-slot\": the events of a dropped slot are sent again from the table, \
         which requires one. Add it, or set wal_budget.on_max = \"hold\""
    )]
    NoKey { table: TableName },
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
    Core(#[from] CoreError),
    /// Rows that are older than the slot can't be delivered.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// The sink can't go on.
    #[error(transparent)]
    Sink(#[from] SinkError),
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

/// A slot was dropped.
#[derive(Debug, thiserror::Error)]
#[error(
    "slot {slot:?} was dropped{why}. Still in {outbox} only: {what}, and what is committed until there is a new slot. Create \
     it: walpost init --pipeline {pipeline} --slot {slot}; {adopt}start walpost again; then send what is missing: \
     walpost replay --dropped-slots --pipeline {pipeline}"
)]
pub(crate) struct SlotDropped {
    pub(super) pipeline: String,
    pub(super) slot: String,
    /// For what reason, if it was just now.
    pub(super) why: String,
    /// What went with it.
    pub(super) what: String,
    /// Where the events are.
    pub(super) outbox: String,
    /// What exactly-once needs beside a new slot.
    pub(super) adopt: String,
}
