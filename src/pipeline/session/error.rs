//! Errors that prevent a session from starting or continuing.

use std::time::Duration;

use crate::delivery::failure::DeliveryFailure;
use crate::model::lsn::{Lsn, Position};
use crate::model::rounded::Elapsed;
use crate::postgres::target::Target;

/// The slot can't be read safely: the slot or its server has changed unexpectedly, reading the slot
/// crashes the server, or the outbox's only table is set aside.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SlotError {
    /// The replication connection and the catalog connection have reached different servers.
    #[error(
        "slot {slot:?} is streamed by PID {walsender}, but the catalog shows {found} for it: the two connections \
         reached different servers, one of which may be a former primary, or the walsender has just exited. If this error \
         persists, make sure that the address leads to only one server"
    )]
    TwoServers {
        slot: String,
        /// PID of the walsender that streams to Walpost.
        walsender: i32,
        /// PID of the process that uses the slot according to the catalog, or "none".
        found: String,
    },
    /// The server belongs to a different PostgreSQL cluster than before.
    #[error(
        "the server's system identifier is {found}, but it was {expected} before: this is a different PostgreSQL cluster, and \
         Walpost can't tell which of its events have been delivered. If this is the right cluster, restart walpost"
    )]
    OtherCluster {
        /// The current system identifier.
        found: String,
        /// The previous system identifier.
        expected: String,
    },
    /// Something other than Walpost moved the slot, or dropped and re-created it.
    #[error(
        "slot {slot:?} is at {found}, but Walpost confirmed it only up to {confirmed}: something else moved it, or dropped and \
         re-created it. Events committed between {confirmed} and {found} may be missing from Kafka. {resend}; then {then}"
    )]
    SlotMoved {
        slot: String,
        /// The current position of the slot.
        found: Lsn,
        /// The last confirmed position.
        confirmed: Lsn,
        /// How to deliver the events between `confirmed` and `found`.
        resend: String,
        /// What to do once the events between `confirmed` and `found` have been delivered.
        then: String,
    },
    /// Reading the slot crashes the server.
    #[error(
        "a PostgreSQL process has crashed {times} times while slot {slot:?} was being read, and the stream did not \
         progress past {at} in between. Each crash ends the sessions of all clients, so Walpost no longer reads the \
         slot. The server log names the process and the signal: 11 indicates a bug in PostgreSQL or in an extension; 9 \
         usually means that the kernel killed the process because memory was exhausted. Fix the cause, then start \
         walpost. If the cause can't be fixed, advance the slot past this part of the WAL: SELECT \
         pg_catalog.pg_replication_slot_advance('{slot}', pg_catalog.pg_current_wal_lsn()); then start walpost, which \
         prints how to deliver the events that were skipped"
    )]
    ServerCrashes {
        slot: String,
        times: u32,
        /// The highest position that the stream has reached.
        at: Lsn,
    },
    /// The outbox's only table was set aside when the outbox still consisted of several tables. A
    /// single-table outbox can't skip rows of its table.
    #[error(
        "table {table} is set aside, but its rows can be omitted only if the outbox has several tables: {missing} \
         have not been delivered. If the pipeline continued, they would be delivered after rows that are inserted now. \
         Restore the previous definition (tables = [...]) and send the rows: {replay}; then change the definition again"
    )]
    TableSetAside {
        /// A description of the events that have not been delivered.
        missing: String,
        table: String,
        /// The command that delivers the missing events.
        replay: String,
    },
}

impl SlotError {
    pub(super) fn two_servers(target: &Target, walsender: i32, found: Option<i32>) -> Self {
        Self::TwoServers {
            slot: target.slot.clone(),
            walsender,
            found: found.map_or("none".to_owned(), |pid| pid.to_string()),
        }
    }
}

/// An error that aborts the stream.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StreamError {
    /// Delivered events can't be confirmed, because their position can't be written to
    /// `walpost.slot_state`.
    #[error(
        "can't confirm positions of slot {slot:?}: the connection that writes them to walpost.slot_state has been down for \
         {elapsed}: {reason}",
        elapsed = Elapsed(*lasts)
    )]
    Unrecorded {
        slot: String,
        /// How long the attempts to write positions have been failing.
        lasts: Duration,
        /// The error from the last attempt to write a position.
        reason: String,
    },
    /// The server is shutting down, so the connection is closed to avoid delaying the shutdown.
    #[error("PostgreSQL is shutting down; closing the connection")]
    ServerStopping,
    /// Like [`StreamError::ServerStopping`], but some records have not been acknowledged.
    #[error(
        "PostgreSQL is shutting down before Kafka has acknowledged all records; closing the connection"
    )]
    ServerStoppingUnacknowledged,
    /// The sink accepted a record but failed to deliver it.
    #[error("{}", .0.reason)]
    Delivery(DeliveryFailure),
    /// Kafka rejected a batch, but accepted each of its rows individually.
    #[error(
        "Kafka rejected the rows from {from} to {until} in one batch, but accepted each of them individually; batches will be \
         smaller from now on. To avoid this, raise the topic's max.message.bytes, or lower batch.size in [kafka]"
    )]
    Passed {
        /// The first row of the batch.
        from: Position,
        /// The last row of the batch.
        until: Position,
    },
}

impl StreamError {
    /// Returns whether the stream was aborted because the server is shutting down.
    pub(super) fn is_server_stopping(&self) -> bool {
        matches!(
            self,
            Self::ServerStopping | Self::ServerStoppingUnacknowledged
        )
    }
}
