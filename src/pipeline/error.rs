//! Why a pipeline can't go on.

use std::time::Duration;

use bytesize::ByteSize;

use super::decode::error::CoreError;
use super::exactly_once::error::ExactlyOnceError;
use crate::delivery::watermark::DeliveryFailure;
use crate::model::lsn::Lsn;
use crate::model::lsn::Position;
use crate::model::rounded::Elapsed;
use crate::outbox::columns::MappingError;
use crate::postgres::catalog::CatalogError;
use crate::postgres::catalog::Problem;
use crate::postgres::replication::ConnectionError;
use crate::postgres::table::TableName;
use crate::postgres::target::Target;
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
    /// The server refuses the role that it had accepted.
    #[error(
        "{error}. PostgreSQL had accepted role {role:?} since Walpost started, and has refused it for {} s: its \
         password or pg_hba.conf was changed. The password comes from {origin}",
        .lasts.as_secs()
    )]
    Refused {
        /// What the server says.
        error: Box<PipelineError>,
        role: String,
        /// Where its password comes from, for a person.
        origin: String,
        /// For how long.
        lasts: Duration,
    },
    /// Outbox, publication or slot are not as they have to be.
    #[error(transparent)]
    Problem(#[from] Problem),
    #[error("slot {slot:?} is active for PID {pid}")]
    SlotInUse {
        slot: String,
        /// The server process that has it.
        pid: i32,
    },
    /// The replication connection and the one for questions don't see the same slot.
    #[error(
        "slot {slot:?} is streamed by PID {walsender}, and the catalog has {found} for it: the two connections have reached \
         two servers, of which one may have been left, or the walsender has just ended. Where this goes on, have the \
         address lead to one server only"
    )]
    TwoServers {
        slot: String,
        /// The server process that streams to us.
        walsender: i32,
        /// What the catalog says, for a person.
        found: String,
    },
    /// The server that answers is another one than before.
    #[error(
        "the server's system identifier is {found}, but it was {expected} before: this is another PostgreSQL \
         cluster, and what it has delivered is not known. If it is the right one, restart walpost"
    )]
    OtherCluster {
        /// Now.
        found: String,
        /// Before.
        expected: String,
    },
    /// Somebody else moved or re-created the slot.
    #[error(
        "slot {slot:?} is at {found}, but was confirmed up to {confirmed} only: it was moved or dropped and \
         re-created by someone else. Events committed between {confirmed} and {found} may be missing in Kafka. \
         {resend}; {then}"
    )]
    SlotMoved {
        slot: String,
        /// Where it stands.
        found: Lsn,
        /// What was confirmed last.
        confirmed: Lsn,
        /// How the events between are delivered.
        resend: &'static str,
        /// What a person does then.
        then: String,
    },
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
    ExactlyOnce(#[from] ExactlyOnceError),
    /// What is delivered can't be confirmed.
    #[error(
        "what is delivered of slot {slot:?} can't be recorded, and so not be confirmed: for {elapsed} there was no \
         second connection to the server that streams it: {reason}",
        elapsed = Elapsed(*lasts)
    )]
    Unrecorded {
        slot: String,
        /// For so long.
        lasts: Duration,
        /// Why.
        reason: String,
    },
    /// The server is stopping and waits for what can't be delivered now.
    #[error(
        "PostgreSQL is shutting down and waits for events that Kafka has not acknowledged; closing the connection"
    )]
    ServerStopping,
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
    /// The sink took a record and could not make it durable.
    #[error("{}", .0.reason)]
    Delivery(DeliveryFailure),
    /// Rows of a refused batch were accepted one by one.
    #[error(
        "Kafka has refused the rows from {from} to {until} in one batch, and accepted each of them alone: batches are \
         smaller from here on. To spare the search: a larger max.message.bytes of the topic, or a smaller batch.size in [kafka]"
    )]
    Passed {
        /// The first of the batch.
        from: Position,
        /// The last.
        until: Position,
    },
}

impl PipelineError {
    pub(super) fn two_servers(target: &Target, walsender: i32, found: Option<i32>) -> Self {
        Self::TwoServers {
            slot: target.slot.clone(),
            walsender,
            found: found.map_or("none".to_owned(), |pid| pid.to_string()),
        }
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
