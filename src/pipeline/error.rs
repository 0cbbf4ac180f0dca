//! Errors that interrupt or halt a pipeline.

use std::fmt;
use std::time::Duration;

use super::decode::error::CoreError;
use super::exactly_once::error::ExactlyOnceError;
use super::session::error::{SlotError, StreamError};
use super::snapshot::error::SnapshotError;
use super::wal_budget::error::WalBudgetError;
use crate::model::commands::Commands;
use crate::outbox::columns::MappingError;
use crate::postgres::catalog::{CatalogError, Problem, SlotInUse};
use crate::postgres::replication::ConnectionError;
use crate::sink::SinkError;

/// An error that interrupts or halts a pipeline. See [`recovery::remedy`](super::recovery::remedy)
/// for how the pipeline recovers from each error.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PipelineError {
    /// The replication connection failed.
    #[error(transparent)]
    Connection(#[from] ConnectionError),
    /// A catalog query failed.
    #[error(transparent)]
    Catalog(#[from] CatalogError),
    /// The outbox, the publication or the slot does not meet the requirements.
    #[error(transparent)]
    Problem(#[from] Problem),
    #[error(transparent)]
    SlotInUse(#[from] SlotInUse),
    #[error(transparent)]
    Refused(#[from] RoleRefused),
    #[error(transparent)]
    NotTheServer(#[from] NotTheServer),
    #[error(transparent)]
    Slot(#[from] SlotError),
    #[error(transparent)]
    Stream(#[from] StreamError),
    #[error(transparent)]
    ExactlyOnce(#[from] ExactlyOnceError),
    /// The outbox's columns don't match the settings.
    #[error(transparent)]
    Mapping(#[from] MappingError),
    #[error(transparent)]
    WalBudget(#[from] WalBudgetError),
    #[error(transparent)]
    Core(#[from] CoreError),
    #[error(transparent)]
    NotRecorded(#[from] Box<NotRecorded>),
    #[error(transparent)]
    Snapshot(#[from] Box<SnapshotError>),
    /// The sink failed.
    #[error(transparent)]
    Sink(#[from] SinkError),
}

/// A failed connection to a server that does not prove its identity, although Walpost was connected
/// to the same address before.
#[derive(Debug, thiserror::Error)]
#[error(
    "{error}. Walpost keeps trying to connect, because it was connected to this address before: the server's settings may have \
     changed, or another program may be responding in its place"
)]
pub(crate) struct NotTheServer {
    /// The error from the last connection attempt.
    pub(super) error: Box<PipelineError>,
}

/// The server is refusing connections from a role that it accepted before.
#[derive(Debug, thiserror::Error)]
#[error(
    "{error}. PostgreSQL accepted role {role:?} earlier, but has been rejecting it for {} s: {change}",
    .lasts.as_secs()
)]
pub(crate) struct RoleRefused {
    /// The error that the server returned for the last connection attempt.
    pub(super) error: Box<PipelineError>,
    pub(super) role: String,
    pub(super) change: Change,
    /// How long the server has been refusing the role's connections.
    pub(super) lasts: Duration,
}

/// Why a server refuses a role that it accepted before.
#[derive(Debug)]
pub(super) enum Change {
    /// The role can't authenticate.
    Login {
        /// A sentence that describes the source of the role's password, such as a file.
        origin: String,
    },
    /// The role lost a privilege that it needs to connect.
    Privilege,
    /// The database currently does not accept connections.
    Closed,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Login { origin } => {
                write!(
                    f,
                    "the role's password or pg_hba.conf has changed. {origin}"
                )
            }
            Self::Privilege => f.write_str("a privilege of the role has been revoked"),
            Self::Closed => f.write_str("the database does not currently accept connections"),
        }
    }
}

/// A table could not be set aside, because writing to the journal failed.
#[derive(Debug, thiserror::Error)]
#[error(
    "failed to set table {table} aside, because writing to walpost.journal failed: {error}. Walpost tried to set the table \
     aside because of this error: {reason}"
)]
pub(crate) struct NotRecorded {
    pub(super) table: String,
    /// Why the table was supposed to be set aside.
    pub(super) reason: String,
    /// The error that occurred while writing to the journal.
    pub(super) error: CatalogError,
}

impl From<NotRecorded> for PipelineError {
    fn from(error: NotRecorded) -> Self {
        Self::NotRecorded(Box::new(error))
    }
}

impl From<SnapshotError> for PipelineError {
    fn from(error: SnapshotError) -> Self {
        Self::Snapshot(Box::new(error))
    }
}

/// The component that caused an error, regardless of which stage returned the error.
pub(super) enum Cause<'e> {
    Connection(&'e ConnectionError),
    Catalog(&'e CatalogError),
    Sink(&'e SinkError),
    /// The error was detected by the stage that returned it, not by another component.
    Other,
}

impl PipelineError {
    /// Returns the error message. If a command resolves the error, the message includes that
    /// command.
    pub(crate) fn message(&self, commands: &Commands) -> String {
        match self.resolution(commands) {
            Some(remedy) => format!("{self}. {remedy}"),
            None => self.to_string(),
        }
    }

    /// Returns the command that resolves the error, introduced by its purpose. Returns `None` if no
    /// single command resolves the error.
    fn resolution(&self, commands: &Commands) -> Option<String> {
        let skip = |at: String| {
            let skip = commands.print(["skip", "--to", &at]);
            format!("To skip the transaction that contains the event: {skip}")
        };
        let adopt = || {
            let adopt = commands.print(["checkpoint", "adopt"]);
            format!("To accept the slot's position: {adopt}")
        };
        let core = match self {
            Self::Core(error) => error,
            Self::Snapshot(error) => match error.as_ref() {
                SnapshotError::Core(error) => error,
                SnapshotError::NoJournal { .. } => {
                    return Some(format!(
                        "To create the journal: {}",
                        commands.print(["init"])
                    ));
                }
                _ => return None,
            },
            Self::ExactlyOnce(ExactlyOnceError::History(_)) => return Some(adopt()),
            Self::Sink(error) => return error.skip_to().map(skip),
            _ => return None,
        };
        match core {
            CoreError::History(_) => Some(adopt()),
            _ => core.skip_to().map(skip),
        }
    }

    pub(super) fn cause(&self) -> Cause<'_> {
        match self {
            Self::Connection(error) => Cause::Connection(error),
            Self::Catalog(error) => Cause::Catalog(error),
            Self::Sink(error) => Cause::Sink(error),
            Self::WalBudget(error) => wal_budget_cause(error),
            Self::Core(error) => core_cause(error),
            Self::Snapshot(error) => snapshot_cause(error),
            Self::NotRecorded(failed) => Cause::Catalog(&failed.error),
            Self::Problem(_)
            | Self::SlotInUse(_)
            | Self::Refused(_)
            | Self::NotTheServer(_)
            | Self::Slot(_)
            | Self::Stream(_)
            | Self::ExactlyOnce(_)
            | Self::Mapping(_) => Cause::Other,
        }
    }
}

fn wal_budget_cause(error: &WalBudgetError) -> Cause<'_> {
    match error {
        WalBudgetError::Catalog(error) => Cause::Catalog(error),
        WalBudgetError::SlotInUse(_)
        | WalBudgetError::OverBudget { .. }
        | WalBudgetError::SlotDropped(_)
        | WalBudgetError::NoKey { .. } => Cause::Other,
    }
}

fn snapshot_cause(error: &SnapshotError) -> Cause<'_> {
    match error {
        SnapshotError::Connection(error) => Cause::Connection(error),
        SnapshotError::Catalog(error) => Cause::Catalog(error),
        SnapshotError::Core(error) => core_cause(error),
        SnapshotError::Mapping(_)
        | SnapshotError::NoJournal { .. }
        | SnapshotError::Denied { .. }
        | SnapshotError::Waits(_)
        | SnapshotError::Interrupted { .. }
        | SnapshotError::Unfinished { .. }
        | SnapshotError::OtherServer
        | SnapshotError::Outrun => Cause::Other,
    }
}

fn core_cause(error: &CoreError) -> Cause<'_> {
    match error {
        CoreError::Produce { error, .. } | CoreError::DeadLetter { error, .. } => {
            Cause::Sink(error)
        }
        CoreError::Decode { .. }
        | CoreError::Order(_)
        | CoreError::Mapping { .. }
        | CoreError::History(_)
        | CoreError::ForeignTable { .. }
        | CoreError::UnexpectedRow { .. }
        | CoreError::Envelope { .. }
        | CoreError::RowTooLarge { .. }
        | CoreError::Unsendable { .. }
        | CoreError::UnknownRelation { .. }
        | CoreError::BadTuple { .. }
        | CoreError::BadLine { .. }
        | CoreError::TooManyTables { .. }
        | CoreError::Route { .. } => Cause::Other,
    }
}
