//! Decides how the pipeline recovers from each error, and how long it waits before the next
//! attempt.

use std::time::Duration;

use super::decode::error::CoreError;
use super::error::PipelineError;
use super::exactly_once::error::ExactlyOnceError;
use super::session::error::{SlotError, StreamError};
use super::snapshot::error::SnapshotError;
use super::wal_budget::error::WalBudgetError;
use crate::model::lifecycle::ErrorKind;
use crate::model::time::REFUSED_LOGIN_TIMEOUT;
use crate::postgres::catalog::{CatalogError, Problem};
use crate::postgres::connect::dial::{DialError, ServerError};
use crate::postgres::replication::ConnectionError;
use crate::sink::SinkError;

/// How a pipeline reacts to an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remedy {
    /// Reconnect, because the error may be temporary.
    Reconnect,
    /// Create a new producer, which may resolve the error, and reconnect.
    RebuildSink,
    /// Wait until the slot is free, because another instance is using it.
    StandBy,
    /// Halt until an operator resolves the error.
    Halt,
}

impl Remedy {
    /// Returns a sentence that tells operators how Walpost reacts to the error.
    #[must_use]
    pub fn describe(self) -> &'static str {
        match self {
            Self::Reconnect => "Walpost reconnects automatically",
            Self::RebuildSink => "Walpost creates a new producer and continues automatically",
            Self::StandBy => "Walpost takes over when the slot is free",
            Self::Halt => {
                "Walpost has halted. Follow the instructions in the message, then restart Walpost. See also \
                 docs/troubleshooting.md"
            }
        }
    }
}

/// Returns the kind of `error`, for monitoring.
#[must_use]
pub(crate) fn kind(error: &PipelineError) -> ErrorKind {
    classify(error).0
}

/// Returns the remedy for `error`.
#[must_use]
pub(crate) fn remedy(error: &PipelineError) -> Remedy {
    classify(error).1
}

/// The kind of an error, and how the pipeline reacts to it.
type Classification = (ErrorKind, Remedy);

fn classify(error: &PipelineError) -> Classification {
    match error {
        PipelineError::Connection(error) => (ErrorKind::Postgres, connection_remedy(error)),
        PipelineError::Catalog(CatalogError::ForeignSlot { .. }) => {
            (ErrorKind::Setup, Remedy::Halt)
        }
        PipelineError::Catalog(error) => (ErrorKind::Postgres, catalog_remedy(error)),
        PipelineError::Problem(error) => (ErrorKind::Setup, problem_remedy(error)),
        PipelineError::Refused(refused) if refused.lasts < REFUSED_LOGIN_TIMEOUT => {
            (ErrorKind::Postgres, Remedy::Reconnect)
        }
        PipelineError::Refused(_) => (ErrorKind::Postgres, Remedy::Halt),
        PipelineError::NotTheServer(_) => (ErrorKind::Postgres, Remedy::Reconnect),
        PipelineError::SlotInUse(_) => (ErrorKind::Postgres, Remedy::StandBy),
        PipelineError::Slot(error) => classify_slot(error),
        PipelineError::Stream(error) => classify_stream(error),
        PipelineError::WalBudget(error) => classify_wal_budget(error),
        PipelineError::Mapping(_) => (ErrorKind::Setup, Remedy::Halt),
        PipelineError::ExactlyOnce(error) => (ErrorKind::History, exactly_once_remedy(error)),
        PipelineError::Core(error) => classify_core(error),
        PipelineError::NotRecorded(failed) => (ErrorKind::Row, catalog_remedy(&failed.error)),
        PipelineError::Snapshot(error) => classify_snapshot(error),
        PipelineError::Sink(error) => (ErrorKind::Kafka, sink_remedy(error)),
    }
}

fn classify_slot(error: &SlotError) -> Classification {
    match error {
        SlotError::TwoServers { .. } => (ErrorKind::Postgres, Remedy::Reconnect),
        SlotError::OtherCluster { .. } | SlotError::SlotMoved { .. } => {
            (ErrorKind::History, Remedy::Halt)
        }
        SlotError::TableSetAside { .. } => (ErrorKind::Setup, Remedy::Halt),
        SlotError::ServerCrashes { .. } => (ErrorKind::Postgres, Remedy::Halt),
    }
}

fn classify_wal_budget(error: &WalBudgetError) -> Classification {
    match error {
        WalBudgetError::Catalog(error) => (ErrorKind::Postgres, catalog_remedy(error)),
        WalBudgetError::SlotInUse(_) => (ErrorKind::Postgres, Remedy::StandBy),
        WalBudgetError::OverBudget { .. } => (ErrorKind::History, Remedy::Reconnect),
        WalBudgetError::SlotDropped(_) => (ErrorKind::History, Remedy::Halt),
        WalBudgetError::NoKey { .. } => (ErrorKind::Setup, Remedy::Halt),
    }
}

fn classify_stream(error: &StreamError) -> Classification {
    match error {
        StreamError::Unrecorded { .. }
        | StreamError::ServerStopping
        | StreamError::ServerStoppingUnacknowledged => (ErrorKind::Postgres, Remedy::Reconnect),
        StreamError::Delivery(failure) if failure.permanent => (ErrorKind::Kafka, Remedy::Halt),
        StreamError::Delivery(_) | StreamError::Passed { .. } => {
            (ErrorKind::Kafka, Remedy::RebuildSink)
        }
    }
}

/// Returns the remedy for a decoding error.
#[cfg(any(test, fuzzing))]
#[must_use]
pub(crate) fn core_remedy(error: &CoreError) -> Remedy {
    classify_core(error).1
}

fn classify_core(error: &CoreError) -> Classification {
    match error {
        CoreError::Decode { .. }
        | CoreError::Order(_)
        | CoreError::UnknownRelation { .. }
        | CoreError::BadTuple { .. } => (ErrorKind::Protocol, Remedy::Halt),
        // Reconnecting resolves the error: tables are counted per connection, and confirmed
        // transactions are not resent, so the stream makes progress.
        CoreError::TooManyTables { .. } => (ErrorKind::Protocol, Remedy::Reconnect),
        CoreError::Mapping { .. } => (ErrorKind::Setup, Remedy::Halt),
        CoreError::History(_) => (ErrorKind::History, Remedy::Halt),
        CoreError::ForeignTable { .. }
        | CoreError::UnexpectedRow { .. }
        | CoreError::Envelope { .. }
        | CoreError::RowTooLarge { .. }
        | CoreError::Unsendable { .. }
        | CoreError::BadLine { .. }
        | CoreError::Route { .. } => (ErrorKind::Row, Remedy::Halt),
        CoreError::Produce { error, .. } | CoreError::DeadLetter { error, .. } => {
            (ErrorKind::Kafka, sink_remedy(error))
        }
    }
}

/// Returns the remedy for an error from a replication connection.
#[must_use]
pub(crate) fn connection_remedy(error: &ConnectionError) -> Remedy {
    match error {
        ConnectionError::Dial(error) => dial_remedy(error),
        ConnectionError::Server(error) => server_remedy(error),
        ConnectionError::Io(_) | ConnectionError::Closed | ConnectionError::Silent(_) => {
            Remedy::Reconnect
        }
        ConnectionError::PublicationSkipped(_)
        | ConnectionError::TooLarge { .. }
        | ConnectionError::Frame(_)
        | ConnectionError::Protocol(_) => Remedy::Halt,
    }
}

/// Returns the remedy for a catalog error.
#[must_use]
pub(crate) fn catalog_remedy(error: &CatalogError) -> Remedy {
    match error {
        CatalogError::Dial(error) => dial_remedy(error),
        CatalogError::Server(error) => server_remedy(error),
        CatalogError::Lost(_)
        | CatalogError::OtherServer
        | CatalogError::LockSession(_)
        // A schema migration may have changed the table, for example. The next attempt reads the
        // catalogs again.
        | CatalogError::TableChanged(_) => Remedy::Reconnect,
        CatalogError::NoJournal { .. }
        | CatalogError::NewerJournal { .. }
        | CatalogError::ForeignCode { .. }
        | CatalogError::RowSecurity { .. }
        | CatalogError::Unfit(_)
        | CatalogError::ForeignSlot { .. }
        | CatalogError::InitRuns { .. }
        | CatalogError::Unexpected(_) => Remedy::Halt,
    }
}

/// Returns the remedy for a problem with the outbox, the publication, the slot or the server.
#[must_use]
pub(crate) fn problem_remedy(problem: &Problem) -> Remedy {
    match problem {
        Problem::InRecovery { .. } | Problem::HeldByOther { .. } => Remedy::Reconnect,
        Problem::Version { .. }
        | Problem::WalLevel { .. }
        | Problem::NoTable { .. }
        | Problem::NotATable { .. }
        | Problem::Unlogged { .. }
        | Problem::NoPublication { .. }
        | Problem::NotPublished { .. }
        | Problem::UnsafeFilter { .. }
        | Problem::UntrustedPublisher { .. }
        | Problem::NoInserts { .. }
        | Problem::NotViaRoot { .. }
        | Problem::OtherTables { .. }
        | Problem::NotEmpty { .. }
        | Problem::NoSlot { .. }
        | Problem::WrongPlugin { .. }
        | Problem::WrongDatabase { .. }
        | Problem::Temporary { .. }
        | Problem::TwoPhase { .. }
        | Problem::Lost { .. } => Remedy::Halt,
    }
}

fn dial_remedy(error: &DialError) -> Remedy {
    match error.decisive() {
        DialError::Resolve { .. }
        | DialError::Connect { .. }
        | DialError::Timeout { .. }
        | DialError::Io { .. }
        // The password command may depend on a service that is temporarily unavailable.
        | DialError::PasswordCommand { .. }
        // An administrator may change the permissions of a certificate or key file while Walpost
        // runs, which must not halt the pipeline.
        | DialError::UntrustedFile { .. }
        // The error may be temporary: while PostgreSQL is down, a process of another user may be
        // able to listen at PostgreSQL's socket path.
        | DialError::OtherPeer { .. }
        | DialError::NotReadWrite { .. } => Remedy::Reconnect,
        // protocol_violation while connecting: the server is a connection pooler rather than
        // PostgreSQL.
        DialError::Server { error, .. } if error.code == "08P01" => Remedy::Halt,
        DialError::Server { error, .. } if error.pooler().is_some() => Remedy::Halt,
        DialError::Server { error, .. } => server_remedy(error),
        DialError::Tls { .. }
        | DialError::TlsFile { .. }
        | DialError::TlsRefused { .. }
        | DialError::NoPassword { .. }
        | DialError::AuthMethod { .. }
        | DialError::RequireAuth { .. }
        | DialError::Exposed { .. }
        | DialError::UnknownPeer { .. }
        | DialError::Scram { .. }
        | DialError::ChannelBinding { .. }
        | DialError::Protocol { .. }
        | DialError::Pooler { .. }
        | DialError::AllHosts { .. } => Remedy::Halt,
    }
}

/// Returns the remedy for an SQLSTATE (listed in appendix A of the PostgreSQL 18 manual).
fn server_remedy(error: &ServerError) -> Remedy {
    match error.code.as_str() {
        // object_in_use: another walsender holds the slot.
        "55006" => Remedy::StandBy,
        // lock_not_available
        "55P03" => Remedy::Reconnect,
        // idle_in_transaction_session_timeout, transaction_timeout: Walpost disables both timeouts,
        // so something else must have re-enabled them.
        "25P03" | "25P04" => Remedy::Reconnect,
        // database_dropped
        "57P04" => Remedy::Halt,
        code => match code.get(..2) {
            // Connection exception, transaction rollback, insufficient resources, operator
            // intervention, system error, internal error: all of these may be temporary.
            Some("08" | "40" | "53" | "57" | "58" | "XX") => Remedy::Reconnect,
            // All other classes indicate a problem with objects or privileges, so a retry would
            // fail in the same way.
            _ => Remedy::Halt,
        },
    }
}

/// Returns the remedy for an error in exactly-once delivery.
#[must_use]
pub(crate) fn exactly_once_remedy(error: &ExactlyOnceError) -> Remedy {
    match error {
        ExactlyOnceError::NoCheckpoint { .. } | ExactlyOnceError::History(_) => Remedy::Halt,
        ExactlyOnceError::Outrun(_) => Remedy::RebuildSink,
    }
}

/// Returns the remedy for a snapshot error.
#[must_use]
pub(crate) fn snapshot_remedy(error: &SnapshotError) -> Remedy {
    classify_snapshot(error).1
}

fn classify_snapshot(error: &SnapshotError) -> Classification {
    match error {
        SnapshotError::Connection(error) => (ErrorKind::Postgres, connection_remedy(error)),
        SnapshotError::Catalog(error) => (ErrorKind::Postgres, catalog_remedy(error)),
        SnapshotError::Core(error) => classify_core(error),
        SnapshotError::Mapping(_)
        | SnapshotError::NoJournal { .. }
        | SnapshotError::Denied { .. }
        | SnapshotError::Interrupted { .. }
        | SnapshotError::Unfinished { .. } => (ErrorKind::Setup, Remedy::Halt),
        SnapshotError::Waits(_) | SnapshotError::OtherServer | SnapshotError::Outrun => {
            (ErrorKind::Setup, Remedy::Reconnect)
        }
    }
}

/// Returns the remedy for a sink error.
#[must_use]
pub(crate) fn sink_remedy(error: &SinkError) -> Remedy {
    match error {
        SinkError::Broken(_) | SinkError::Fenced(_) => Remedy::RebuildSink,
        SinkError::TopicMissing { .. }
        | SinkError::TopicNotCreated { .. }
        | SinkError::TopicDenied { .. }
        | SinkError::TooLarge { .. }
        | SinkError::RecordRejected { .. }
        | SinkError::NoPartition { .. }
        | SinkError::Refused { .. }
        | SinkError::Checkpoint { .. }
        | SinkError::CheckpointTopic { .. }
        | SinkError::TransactionDenied { .. }
        | SinkError::Configuration(_)
        | SinkError::Stdout(_)
        | SinkError::StdoutClosed => Remedy::Halt,
    }
}

/// Returns whether the server is shutting down or has shut down. If the address lists several
/// hosts, it is sufficient that one of them is shutting down, because connecting to each of the
/// other hosts has failed too.
#[must_use]
pub(crate) fn is_stopping(error: &DialError) -> bool {
    let attempts = error.attempts();
    let refuses = |error: &DialError| matches!(error, DialError::Server { error, .. } if error.code == "57P03");
    let is_gone = |error: &DialError| matches!(error, DialError::Connect { .. });
    attempts.iter().any(refuses) || attempts.iter().all(is_gone)
}

/// Computes the delays between connection attempts. The delay doubles with each attempt, and
/// includes jitter so that many pipelines do not reconnect at the same moment.
#[derive(Debug)]
pub(crate) struct Backoff {
    next: Duration,
}

const BACKOFF_MIN: Duration = Duration::from_millis(200);
const BACKOFF_MAX: Duration = Duration::from_secs(15);
/// Maximum delay after an attempt that got as far as streaming, which shows that the server is
/// neither down nor overloaded.
const BACKOFF_MAX_AFTER_STREAMING: Duration = Duration::from_secs(1);
/// How often a standby instance checks whether the slot is free.
const STANDBY_POLL_INTERVAL: Duration = Duration::from_secs(1);

impl Default for Backoff {
    fn default() -> Self {
        Self { next: BACKOFF_MIN }
    }
}

impl Backoff {
    /// Returns how long to wait before the next attempt.
    pub(crate) fn next_delay(&mut self) -> Duration {
        let delay = self.next;
        self.next = (delay * 2).min(BACKOFF_MAX);
        jittered(delay)
    }

    /// Limits the next delay to [`BACKOFF_MAX_AFTER_STREAMING`], for use after an attempt that
    /// failed while streaming.
    pub(crate) fn shorten(&mut self) {
        self.next = self.next.min(BACKOFF_MAX_AFTER_STREAMING);
    }
}

/// Returns how long a standby instance waits before it checks the slot again.
#[must_use]
pub(crate) fn stand_by_delay() -> Duration {
    jittered(STANDBY_POLL_INTERVAL)
}

/// Returns a random duration between half of `delay` and the full `delay`.
fn jittered(delay: Duration) -> Duration {
    delay.mul_f64(0.5 + fastrand::f64() / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::postgres::connect::conninfo::Conninfo;

    #[test]
    fn doubles_delays_up_to_a_maximum_and_adds_jitter() {
        let mut backoff = Backoff::default();
        let mut expected = BACKOFF_MIN;
        for _ in 0..20 {
            let delay = backoff.next_delay();
            assert!(
                delay >= expected / 2 && delay <= expected,
                "{delay:?} for {expected:?}"
            );
            expected = (expected * 2).min(BACKOFF_MAX);
        }
        assert_eq!(expected, BACKOFF_MAX);
        backoff.shorten();
        assert!(backoff.next_delay() <= BACKOFF_MAX_AFTER_STREAMING);
    }

    #[test]
    fn retries_temporary_errors_and_halts_on_others() {
        let server = |code: &str| ServerError {
            code: code.to_owned(),
            ..ServerError::default()
        };
        let check = |code, expected| assert_eq!(server_remedy(&server(code)), expected, "{code}");
        check("57P01", Remedy::Reconnect); // admin_shutdown
        check("57P03", Remedy::Reconnect); // cannot_connect_now
        check("53300", Remedy::Reconnect); // too_many_connections
        check("25P03", Remedy::Reconnect); // idle_in_transaction_session_timeout
        check("25P04", Remedy::Reconnect); // transaction_timeout
        check("25006", Remedy::Halt); // read_only_sql_transaction
        check("55006", Remedy::StandBy); // object_in_use
        check("42704", Remedy::Halt); // undefined_object
        check("55000", Remedy::Halt); // object_not_in_prerequisite_state
        check("28P01", Remedy::Halt); // invalid_password
        check("3D000", Remedy::Halt); // invalid_catalog_name
        check("", Remedy::Halt);
    }

    #[test]
    fn halts_when_the_server_is_a_connection_pooler() {
        for (code, message) in [
            ("08P01", "unsupported startup parameter: replication"),
            (
                "0A000",
                "Feature not supported: RDS Proxy currently doesn't support the option replication.",
            ),
            ("XX000", "Tenant or user not found"),
            (
                "58000",
                "No pool configured for database: \"shop\", user: \"walpost\"",
            ),
        ] {
            let error = Box::new(ServerError {
                code: code.to_owned(),
                message: message.to_owned(),
                ..ServerError::default()
            });
            let host = "db:6432".to_owned();
            let conninfo = Conninfo::parse("host=db user=walpost", &|_| None).expect("conninfo");
            let error = DialError::Server { host, error }.with_remedy(&conninfo);
            assert_eq!(dial_remedy(&error), Remedy::Halt, "{message}");
            let text = error.to_string();
            assert!(text.contains("a connection pooler ("), "{text}");
        }
    }
}
