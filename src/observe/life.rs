//! What becomes of a pipeline: its state, its last error, its outages. It changes seldom, so it
//! stands behind a lock.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use super::stats::unix_micros;
use crate::kafka::statistics::Statistics;
use crate::postgres::catalog::Vitals;

/// So many outages are remembered.
const OUTAGES: usize = 20;

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

/// What happens seldom.
#[derive(Debug, Default)]
pub(super) struct Life {
    pub(super) state: State,
    pub(super) since_micros: u64,
    pub(super) last_error: Option<Failure>,
    pub(super) outages: VecDeque<Outage>,
    pub(super) database: Option<(Vitals, u64)>,
    pub(super) statistics: Option<Statistics>,
    pub(super) kafka_down: Option<String>,
    pub(super) snapshot: Option<SnapshotStage>,
}

/// What happens seldom, as it was at one moment.
#[derive(Clone, Debug, Default)]
pub struct Seldom {
    /// What the pipeline is at.
    pub state: State,
    /// Since when, in microseconds since 1970.
    pub since_micros: u64,
    /// The last error.
    pub last_error: Option<Failure>,
    /// The last outages, the latest first.
    pub outages: Vec<Outage>,
    /// What the database said last, and when.
    pub database: Option<(Vitals, u64)>,
    /// What librdkafka said last.
    pub statistics: Option<Statistics>,
    /// Why no broker can be reached.
    pub kafka_down: Option<String>,
    /// The snapshot, where one was made in this process's life.
    pub snapshot: Option<SnapshotStage>,
}

impl Life {
    /// Something is away, or still is: for PostgreSQL and the producer one at a time, for the brokers
    /// another.
    pub(super) fn note_outage(&mut self, kind: ErrorKind, reason: &str) {
        let open = |outage: &&mut Outage| {
            outage.ended_micros.is_none()
                && (outage.kind == ErrorKind::KafkaBroker) == (kind == ErrorKind::KafkaBroker)
        };
        if let Some(outage) = self.outages.iter_mut().rev().find(open) {
            outage.attempts += 1;
            outage.kind = kind;
            reason.clone_into(&mut outage.reason);
            return;
        }
        if self.outages.len() == OUTAGES {
            self.outages.pop_front();
        }
        self.outages.push_back(Outage {
            kind,
            reason: reason.to_owned(),
            began_micros: unix_micros(),
            ended_micros: None,
            attempts: 1,
        });
    }

    /// It is back.
    pub(super) fn end_outages(&mut self, now: u64, which: impl Fn(&&mut Outage) -> bool) {
        for outage in self.outages.iter_mut().filter(which) {
            outage.ended_micros.get_or_insert(now);
        }
    }
}
