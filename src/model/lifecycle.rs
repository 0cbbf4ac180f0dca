//! What a pipeline is at, what an error is about, and what becomes of both: as metrics and JSON say it.

use serde::{Deserialize, Serialize};

/// What a person can do while no broker can be reached, and what comes of it.
pub(crate) const KAFKA_DOWN_REMEDY: &str = "Walpost continues by itself when they answer: start the brokers, or fix the network to \
     them. Meanwhile PostgreSQL retains WAL for the events: watch its disk";

/// What a pipeline is at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// It has not streamed yet.
    #[default]
    Starting,
    /// It streams.
    Streaming,
    /// Another instance has the slot.
    StandingBy,
    /// It was cut off, and tries again.
    Reconnecting,
    /// It was told to stop, and delivers what it has read.
    Draining,
    /// A person has to do something.
    Halted,
    /// It was told to stop, and has.
    Stopped,
}

impl State {
    /// Every one.
    pub const ALL: [Self; 7] = [
        Self::Starting,
        Self::Streaming,
        Self::StandingBy,
        Self::Reconnecting,
        Self::Draining,
        Self::Halted,
        Self::Stopped,
    ];

    /// As metrics and JSON call it.
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

/// How far a snapshot is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SnapshotPhase {
    /// It is made, which waits for the transactions that are open.
    Making,
    /// Its rows are read and sent.
    Copying,
    /// All rows were read, and not all are durable.
    Delivering,
    /// All rows are durable.
    Done,
}

impl SnapshotPhase {
    /// Every one.
    pub const ALL: [Self; 4] = [Self::Making, Self::Copying, Self::Delivering, Self::Done];

    /// As metrics and JSON call it.
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

/// A snapshot of the outbox table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SnapshotStage {
    /// How far it is.
    pub phase: SnapshotPhase,
    /// Since when, in microseconds since 1970.
    pub since_micros: u64,
    /// Rows that are to be expected, by the planner's estimate.
    pub expected: Option<u64>,
    /// Rows that were copied in all when it began: of attempts before this one.
    pub rows_before: u64,
}

/// What an error is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorKind {
    /// No connection to PostgreSQL, or it broke, or the server refused something.
    Postgres,
    /// Outbox, publication, slot or settings are not as they have to be.
    Setup,
    /// The log does not go on from what was delivered.
    History,
    /// The stream can't be understood.
    Protocol,
    /// A row can't be delivered.
    Row,
    /// The producer can't go on.
    Kafka,
    /// Connections to brokers.
    KafkaBroker,
    /// Walpost itself.
    Defect,
}

impl ErrorKind {
    /// Every one.
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

    /// As metrics and JSON call it.
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

/// An error that a person may want to see.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// When, in microseconds since 1970.
    pub at_micros: u64,
    /// What it is about.
    pub kind: ErrorKind,
    /// What the log says.
    pub message: String,
    /// What comes of it, and what a person can do.
    pub remedy: String,
}

/// What the publication leaves out since it was changed while the pipeline ran.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeftOut {
    /// When that was noticed, in microseconds since 1970.
    pub since_micros: u64,
    /// What is not delivered, and why.
    pub what: String,
    /// The command that has it delivered again.
    pub remedy: String,
}

/// A time without PostgreSQL, a producer or Kafka.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outage {
    /// What it is about.
    pub kind: ErrorKind,
    /// The last error.
    pub reason: String,
    /// When it began, in microseconds since 1970.
    pub began_micros: u64,
    /// When it ended, if it has.
    pub ended_micros: Option<u64>,
    /// How often it was tried again.
    pub attempts: u64,
}
