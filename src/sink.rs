//! The interface between a pipeline and the destination of its records, which is usually Kafka.

pub(crate) mod on_demand;
pub(crate) mod stdout;

use std::pin::Pin;

use crate::delivery::checkpoint::{Checkpoint, CheckpointError};
use crate::delivery::failure::{RefusalCause, RefusedRecord};
use crate::delivery::watermark::Tag;
use crate::escape::shell_word_on_one_line;
use crate::model::lsn::Position;
use crate::outbox::Record;

/// A destination for records. A sink reports each delivery, identified by the record's tag, to the
/// [`Deliveries`](crate::delivery::watermark::Deliveries) with which the sink was created.
pub trait Sink {
    /// Passes one record to the sink. Never blocks. A record is accepted completely or not at all,
    /// and accepted records keep their order within a partition.
    ///
    /// # Errors
    /// Returns an error if the sink can't accept the record and a retry would not help.
    fn produce(&mut self, record: &Record<'_>, tag: Tag) -> Result<Produced, SinkError>;

    /// Called when no more records are available at the moment. The sink should send its records
    /// without lingering, unless `busy` is true, which means that more records are about to follow.
    ///
    /// # Errors
    /// Returns an error if the sink can't accept any more records.
    fn flush(&mut self, busy: bool) -> Result<(), SinkError>;

    /// Prepares `topic` for its first record. Called only if the sink returned
    /// [`Produced::NewTopic`]. `ahead` returns the topics of records that are likely to follow, so
    /// that a sink can prepare several topics at once.
    fn prepare(&mut self, _topic: &str, _ahead: impl FnOnce() -> Vec<String>) -> Preparation {
        Box::pin(std::future::ready(Ok(Prepared::Usable { partitions: 1 })))
    }

    /// Completes the preparation of `topic`. If the topic is unusable, [`Sink::produce`] returns an
    /// error for its records until the sink looks up the topic again.
    ///
    /// # Errors
    /// Returns an error if the sink can't use the topic.
    fn prepared(&mut self, _topic: &str, _prepared: Prepared) -> Result<(), SinkError> {
        Ok(())
    }

    /// Called when more rows have been read from the stream. Brokers' earlier responses about a
    /// topic's partitions may be out of date for these rows, because partitions may have been added
    /// since.
    fn read_more(&mut self) {}

    /// For exactly-once delivery: fences all earlier producers of the pipeline, aborts any
    /// transaction that they left open, and returns the last checkpoint, if any. After this call,
    /// consumers that read only committed records don't see new records until [`Sink::commit`] is
    /// called.
    fn take_over(&mut self) -> TakeOver<'_> {
        Box::pin(std::future::ready(Err(transactions_unsupported())))
    }

    /// For exactly-once delivery: in a single transaction, commits `checkpoint` and the records
    /// produced since the last commit. The sink adds the partition counts of its topics to the
    /// checkpoint. No record may be produced until the returned future resolves.
    fn commit(&mut self, _checkpoint: &mut Checkpoint) -> Commit {
        Box::pin(std::future::ready(Err(transactions_unsupported())))
    }

    /// Waits until the destination responds. A rejected connection also counts as a response.
    fn wait_for_response(&mut self) -> Answer {
        Box::pin(std::future::ready(()))
    }

    /// Performs periodic work, such as checks during an outage. Called at least every ten seconds,
    /// even if there are no records. Never blocks.
    fn tend(&mut self) {}

    /// Returns whether the sink can be dropped without losing state or interrupting work in
    /// progress.
    fn is_at_rest(&self) -> bool {
        false
    }
}

/// A future that resolves to the last checkpoint, if any.
pub(crate) type TakeOver<'s> =
    Pin<Box<dyn Future<Output = Result<Option<Checkpoint>, SinkError>> + Send + 's>>;

/// A future that resolves when the transaction is committed.
pub(crate) type Commit = Pin<Box<dyn Future<Output = Result<(), SinkError>> + Send>>;

/// Returns the error for a sink that does not support transactions.
pub(crate) fn transactions_unsupported() -> SinkError {
    SinkError::Configuration("the sink does not support transactions".to_owned())
}

/// A future that resolves when the destination responds.
pub(crate) type Answer = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A future that resolves once it is known whether the topic can be used.
pub(crate) type Preparation = Pin<Box<dyn Future<Output = Result<Prepared, SinkError>> + Send>>;

/// The result of [`Sink::prepare`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prepared {
    /// The topic exists.
    Usable { partitions: usize },
    /// The topic can't be used, and the pipeline is configured to turn the topic's events into dead
    /// letters. Without this setting, the preparation would fail with an error.
    Unusable,
}

/// The result of [`Sink::produce`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Produced {
    /// The sink has accepted the record.
    Taken,
    /// The sink is full. The caller should try the same record again later.
    Full,
    /// The topic must be prepared first.
    NewTopic,
}

/// Returns advice about a topic that the brokers refused to create.
fn creation_remedy(reason: &str) -> &'static str {
    // Kafka 4.0, `Topic.hasCollision`.
    match reason.contains("collides with existing topic") {
        true => {
            "Kafka does not allow two topics whose names differ only in . and _. Delete the existing topic if it is not needed, or use \
             another name"
        }
        false => "Create the topic manually, or correct create_topics",
    }
}

/// An error from which a sink can't recover.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum SinkError {
    /// The topic does not exist and was not created automatically.
    #[error(
        "topic {topic:?} does not exist at {brokers}, and was not created automatically. Create it: \
         kafka-topics.sh --bootstrap-server {servers} --create --topic {topic} --partitions 12 \
         --replication-factor 3; or set create_topics = {{ partitions = 12, replication = 3 }}",
        servers = shell_word_on_one_line(brokers)
    )]
    TopicMissing {
        topic: String,
        /// `bootstrap.servers`.
        brokers: String,
    },
    /// The topic could not be created as configured.
    #[error(
        "topic {topic:?} could not be created at {brokers}: {reason}. {}",
        creation_remedy(reason)
    )]
    TopicNotCreated {
        topic: String,
        /// `bootstrap.servers`.
        brokers: String,
        /// The broker's message.
        reason: String,
    },
    /// The broker denies access to the topic.
    #[error(
        "access to topic {topic:?} is denied: {reason}. Grant the principal the required permission: {grant}"
    )]
    TopicDenied {
        topic: String,
        /// The broker's message.
        reason: String,
        /// The command that grants access.
        grant: String,
    },
    /// The record is larger than the producer's limit.
    #[error(
        "the record for topic {topic:?} is {bytes} bytes long, but message.max.bytes is {limit}. Set \
         \"message.max.bytes\" = \"{needed}\" in [kafka], and raise the topic's limit: kafka-configs.sh \
         --bootstrap-server {servers} --alter --entity-type topics --entity-name {topic} --add-config \
         max.message.bytes={needed}",
        needed = needed_limit(*bytes),
        servers = shell_word_on_one_line(brokers)
    )]
    TooLarge {
        topic: String,
        /// Combined size of the key, value and headers, in bytes.
        bytes: usize,
        /// `message.max.bytes`.
        limit: u32,
        /// `bootstrap.servers`.
        brokers: String,
    },
    /// A broker rejected the record even though the record was sent separately from all other
    /// records.
    #[error(
        "Kafka rejected the record for topic {topic:?} (key and value: {bytes} bytes): {reason}"
    )]
    RecordRejected {
        topic: String,
        /// Combined size of the key and value, in bytes.
        bytes: usize,
        /// The broker's message, and how to fix the problem.
        reason: String,
        /// Position of the row from which the record was created.
        at: Position,
        cause: RefusalCause,
    },
    /// The topic does not have the partition that the row specifies.
    #[error(
        "topic {topic:?} does not have partition {partition}, which is the value of the partition column. Add \
         partitions to the topic, or correct the program that writes the column"
    )]
    NoPartition { topic: String, partition: i32 },
    /// Authentication failed.
    #[error(
        "Kafka at {brokers} rejects the connection: {reason}. {}", refusal_remedy(.reason)
    )]
    Refused {
        /// `bootstrap.servers`.
        brokers: String,
        /// librdkafka's message.
        reason: String,
    },
    /// The producer can't be created from its properties.
    #[error("Kafka producer: {0}. Correct [kafka] in the configuration")]
    Configuration(String),
    /// The pipeline's last record in the checkpoint topic is not a valid checkpoint.
    #[error("can't read the checkpoint of pipeline {pipeline:?} at {place}: {error}")]
    Checkpoint {
        pipeline: String,
        /// The topic and offset of the record.
        place: String,
        /// The reason why the record is not valid.
        error: CheckpointError,
    },
    /// The checkpoint topic's settings could cause a checkpoint to be lost.
    #[error("topic {topic:?} can't store checkpoints: {found}. To fix this: {remedy}")]
    CheckpointTopic {
        topic: String,
        /// The setting that is wrong.
        found: String,
        /// The command that corrects the setting.
        remedy: String,
    },
    /// Another producer for the same pipeline has fenced this producer.
    #[error("another instance of this pipeline has taken over (its producer fenced this one): {0}")]
    Fenced(String),
    /// The principal is not authorized to use transactions.
    #[error("Kafka transactions: {reason}. Grant the principal the required permission: {grant}")]
    TransactionDenied {
        /// The broker's message.
        reason: String,
        /// The command that grants access.
        grant: String,
    },
    /// The producer can't accept any more records and must be re-created.
    #[error("Kafka producer: {0}")]
    Broken(String),
    /// Writing to standard output failed.
    #[error("failed to write to standard output: {0}")]
    Stdout(String),
    /// Standard output was closed when Walpost started.
    #[error(
        "standard output is closed, so with sink = \"stdout\" every event would be lost. Redirect it to a file or a pipe; to \
         discard events, redirect it explicitly: > /dev/null"
    )]
    StdoutClosed,
}

/// Returns a Kafka size limit that is high enough for a record of this size, with a margin for the
/// overhead that Kafka adds to a record and its batch.
#[must_use]
pub(crate) fn needed_limit(bytes: usize) -> usize {
    const ADDED: usize = 10_000;
    bytes.saturating_add(ADDED)
}

impl SinkError {
    /// Returns the position to pass to `walpost skip` in order to skip the rejected record's
    /// transaction, or `None` if no record was rejected.
    #[must_use]
    pub(crate) fn skip_to(&self) -> Option<String> {
        match self {
            Self::RecordRejected { at, .. } => Some(at.to_string()),
            _ => None,
        }
    }
}

/// Returns advice about a rejected connection, depending on the reason that librdkafka reports.
fn refusal_remedy(reason: &str) -> &'static str {
    match reason {
        // A listener without SASL responds to SASL requests with the error "not valid in current
        // SASL state".
        _ if reason.contains("not valid in current SASL state") => {
            "The listener on this port does not use SASL. Use the port of a SASL listener, or set security.protocol to plaintext or ssl"
        }
        _ if reason.contains("the certificate of broker") => "No data was sent to the broker",
        _ => "Correct security.protocol, sasl.* and ssl.* in [kafka]",
    }
}

impl From<&RefusedRecord> for SinkError {
    /// Creates the error for a record that was rejected earlier, without producing the record
    /// again.
    fn from(refused: &RefusedRecord) -> Self {
        Self::RecordRejected {
            topic: refused.topic.clone(),
            bytes: refused.bytes,
            reason: refused.reason.clone(),
            at: refused.at,
            cause: refused.cause,
        }
    }
}
