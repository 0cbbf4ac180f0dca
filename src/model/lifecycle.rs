//! The states of a pipeline and the kinds of errors, with their names in metrics and JSON.

use serde::{Deserialize, Serialize};

/// The remedy that is shown while no broker is available. The text also describes the effect of the
/// outage on PostgreSQL.
pub(crate) const KAFKA_DOWN_REMEDY: &str = "Start the brokers, or fix the network between Walpost and the brokers; Walpost then continues without \
     intervention. Until then, PostgreSQL retains WAL for the events: monitor its disk space";

/// The state of a pipeline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// The pipeline has not streamed yet.
    #[default]
    Starting,
    /// The pipeline is streaming.
    Streaming,
    /// Another instance is using the slot.
    StandingBy,
    /// The pipeline lost its connection and is reconnecting.
    Reconnecting,
    /// The pipeline is stopping on request, and delivers the events that it has already read.
    Draining,
    /// The pipeline stopped on an error that an operator has to fix.
    Halted,
    /// The pipeline stopped on request.
    Stopped,
}

impl State {
    /// All states.
    pub const ALL: [Self; 7] = [
        Self::Starting,
        Self::Streaming,
        Self::StandingBy,
        Self::Reconnecting,
        Self::Draining,
        Self::Halted,
        Self::Stopped,
    ];

    /// Returns the name used in metrics and JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Streaming => "streaming",
            Self::StandingBy => "standing_by",
            Self::Reconnecting => "reconnecting",
            Self::Draining => "draining",
            Self::Halted => "halted",
            Self::Stopped => "stopped",
        }
    }
}

/// The phase of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SnapshotPhase {
    /// The snapshot is being created. PostgreSQL waits for open transactions to end.
    Making,
    /// The snapshot's rows are being read and sent.
    Copying,
    /// All rows have been read, but not all are durable yet.
    Delivering,
    /// All rows are durable.
    Done,
}

impl SnapshotPhase {
    /// All phases.
    pub const ALL: [Self; 4] = [Self::Making, Self::Copying, Self::Delivering, Self::Done];

    /// Returns the name used in metrics and JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Making => "making",
            Self::Copying => "copying",
            Self::Delivering => "delivering",
            Self::Done => "done",
        }
    }
}

/// The progress of a snapshot of the outbox table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SnapshotStage {
    pub phase: SnapshotPhase,
    /// When the current phase began, in microseconds since 1970.
    pub since_micros: u64,
    /// The number of rows to copy, as estimated by the planner.
    pub expected: Option<u64>,
    /// The number of rows copied by earlier attempts.
    pub rows_before: u64,
}

/// The subsystem in which an error occurred.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorKind {
    /// PostgreSQL can't be reached, the connection broke, or the server rejected a request.
    Postgres,
    /// The outbox table, publication, slot or settings do not meet the requirements.
    Setup,
    /// The server's WAL has diverged from the WAL from which Walpost delivered events.
    History,
    /// The replication stream can't be decoded.
    Protocol,
    /// A row can't be delivered.
    Row,
    /// The producer failed with an error from which it can't recover.
    Kafka,
    /// A connection to a broker failed.
    KafkaBroker,
    /// Walpost has a bug.
    Defect,
}

impl ErrorKind {
    /// All kinds.
    pub const ALL: [Self; 8] = [
        Self::Postgres,
        Self::Setup,
        Self::History,
        Self::Protocol,
        Self::Row,
        Self::Kafka,
        Self::KafkaBroker,
        Self::Defect,
    ];

    /// Returns the name used in metrics and JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Postgres => "postgres",
            Self::Setup => "setup",
            Self::History => "history",
            Self::Protocol => "protocol",
            Self::Row => "row",
            Self::Kafka => "kafka",
            Self::KafkaBroker => "kafka_broker",
            Self::Defect => "defect",
        }
    }
}

/// An error to show to the operator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// When the error occurred, in microseconds since 1970.
    pub at_micros: u64,
    pub kind: ErrorKind,
    /// The text of the error, as it appears in the log.
    pub message: String,
    /// The consequence of the error, and what the operator can do about it.
    pub remedy: String,
}

/// Events that are no longer published because the publication was changed while the pipeline ran.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Omission {
    /// When the change was detected, in microseconds since 1970.
    pub since_micros: u64,
    /// A description of the events that are not delivered, with the reason.
    pub what: String,
    /// The command that restores the delivery of these events.
    pub remedy: String,
}

/// A period during which PostgreSQL, the producer or Kafka was unavailable.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outage {
    /// The subsystem that is unavailable.
    pub kind: ErrorKind,
    /// The last error.
    pub reason: String,
    /// When the outage began, in microseconds since 1970.
    pub began_micros: u64,
    /// When the outage ended, or `None` if it is ongoing.
    pub ended_micros: Option<u64>,
    /// The number of retries.
    pub attempts: u64,
}
