//! Errors that prevent a session from starting or continuing.

use std::time::Duration;

use crate::delivery::failure::DeliveryFailure;
use crate::model::lsn::{Lsn, Position};
use crate::model::rounded::Elapsed;
use crate::postgres::target::Target;

/// The slot or its server is not the one that was used before, or the slot can't be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SlotError {
    /// The replication connection and the catalog connection reach different slots.
    #[error(
        "slot {slot:?} is streamed by PID {walsender}, and the catalog has {found} for it: the two connections have reached \
         two servers, of which one may have been left, or the walsender has just ended. Where this goes on, have the \
         address lead to one server only"
    )]
    TwoServers {
        slot: String,
        /// PID of the server process that streams to Walpost.
        walsender: i32,
        /// PID that the catalog contains, as text.
        found: String,
    },
    /// The server belongs to another cluster than before.
    #[error(
        "the server's system identifier is {found}, but it was {expected} before: this is another PostgreSQL \
         cluster, and what it has delivered is not known. If it is the right one, restart walpost"
    )]
    OtherCluster {
        /// The current system identifier.
        found: String,
        /// The previous system identifier.
        expected: String,
    },
    /// Something else moved or re-created the slot.
    #[error(
        "slot {slot:?} is at {found}, but was confirmed up to {confirmed} only: it was moved or dropped and \
         re-created by someone else. Events committed between {confirmed} and {found} may be missing in Kafka. \
         {resend}; {then}"
    )]
    SlotMoved {
        slot: String,
        /// The current position of the slot.
        found: Lsn,
        /// The last confirmed position.
        confirmed: Lsn,
        /// How to deliver the events in between.
        resend: String,
        /// The step that the operator has to take afterwards.
        then: String,
    },
    /// Reading the slot crashes the server.
    #[error(
        "a process of PostgreSQL has crashed {times} times while slot {slot:?} was being read, and the stream did not get past {at} in \
         between. Each crash ends the sessions of everybody, so the slot is not read again. The server's log names the process and the \
         signal: 11 is a defect of PostgreSQL or of an extension, 9 most often the kernel's, for want of memory. When that is fixed, \
         start walpost. If it can't be fixed, move the slot over that part of WAL: SELECT pg_catalog.pg_replication_slot_advance('{slot}', \
         pg_catalog.pg_current_wal_lsn()); and start walpost, which says how the events in between are delivered"
    )]
    ServerCrashes {
        slot: String,
        times: u32,
        /// The highest position that was received.
        at: Lsn,
    },
    /// The table was set aside while it was one of several. Now that it is the only table, its rows
    /// can't be left out.
    #[error(
        "table {table} is set aside, and only an outbox of several tables can leave its rows out: {missing} are not delivered, and \
         would come after those that are inserted now. Put the former definition back (tables = [...]), send the rows: \
         {replay}; and then change the definition"
    )]
    TableSetAside {
        /// The events that are not delivered.
        missing: String,
        table: String,
        /// The command that sends them.
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

/// A stream that had started can't continue.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StreamError {
    /// Delivered events can't be confirmed.
    #[error(
        "what is delivered of slot {slot:?} can't be recorded, and so not be confirmed: for {elapsed} there was no \
         second connection to the server that streams it: {reason}",
        elapsed = Elapsed(*lasts)
    )]
    Unrecorded {
        slot: String,
        /// How long positions could not be written.
        lasts: Duration,
        /// The error from the last attempt.
        reason: String,
    },
    /// The server is shutting down, and an open connection would delay it.
    #[error("PostgreSQL is shutting down; closing the connection")]
    ServerStopping,
    /// Like [`StreamError::ServerStopping`], but with records in flight.
    #[error(
        "PostgreSQL is shutting down before Kafka has acknowledged everything; closing the connection"
    )]
    ServerStoppingUnacknowledged,
    /// The sink accepted a record but could not make it durable.
    #[error("{}", .0.reason)]
    Delivery(DeliveryFailure),
    /// The rows of a rejected batch were accepted one by one.
    #[error(
        "Kafka has refused the rows from {from} to {until} in one batch, and accepted each of them alone: batches are \
         smaller from here on. To spare the search: a larger max.message.bytes of the topic, or a smaller batch.size in [kafka]"
    )]
    Passed {
        /// The first row of the batch.
        from: Position,
        /// The last row of the batch.
        until: Position,
    },
}

impl StreamError {
    /// Returns whether the connection is closed because the server is shutting down.
    pub(super) fn is_server_stopping(&self) -> bool {
        matches!(
            self,
            Self::ServerStopping | Self::ServerStoppingUnacknowledged
        )
    }
}
