//! The destination of records: the boundary between the pipeline and Kafka.

pub(crate) mod on_demand;
pub(crate) mod stdout;

use std::pin::Pin;

use crate::delivery::checkpoint::{Checkpoint, CheckpointError};
use crate::delivery::failure::{RefusalCause, RefusedRecord};
use crate::delivery::watermark::Tag;
use crate::escape::shell_word_on_one_line;
use crate::model::lsn::Position;
use crate::outbox::Record;

/// A destination for records, which reports their delivery by tag to the
/// [`Deliveries`](crate::delivery::watermark::Deliveries) it was created with.
pub trait Sink {
    /// Passes one record to the sink. Never blocks. A record is accepted completely or not at all,
    /// and accepted records keep their order within a partition.
    ///
    /// # Errors
    /// The sink can't accept the record, and would not accept it later.
    fn produce(&mut self, record: &Record<'_>, tag: Tag) -> Result<Produced, SinkError>;

    /// Tells the sink that no more records are available at the moment. The sink should send what
    /// it has without lingering, unless traffic is `busy` and more records are about to follow.
    ///
    /// # Errors
    /// The sink can't accept any more records.
    fn flush(&mut self, busy: bool) -> Result<(), SinkError>;

    /// Prepares `topic` before its first record. Only called if the sink returned
    /// [`Produced::NewTopic`]. `ahead` returns the topics of records that are likely to follow, for
    /// a sink that can prepare several at once.
    fn prepare(&mut self, _topic: &str, _ahead: impl FnOnce() -> Vec<String>) -> Preparation {
        Box::pin(std::future::ready(Ok(Prepared::Usable { partitions: 1 })))
    }

    /// Completes the preparation of `topic`. If the topic is unusable, [`Sink::produce`] returns
    /// the error from now on, until the sink looks the topic up again.
    ///
    /// # Errors
    /// The sink can't use the topic after all.
    fn prepared(&mut self, _topic: &str, _prepared: Prepared) -> Result<(), SinkError> {
        Ok(())
    }

    /// Tells the sink that more rows were read from the stream. What the brokers returned earlier
    /// about partitions may not apply to these rows.
    fn read_more(&mut self) {}

    /// For exactly-once delivery: fences every earlier producer of the pipeline, aborts its open
    /// transaction, and returns the last checkpoint, if there is one. From then on, records are
    /// invisible to consumers until they are committed.
    fn take_over(&mut self) -> TakeOver<'_> {
        Box::pin(std::future::ready(Err(transactions_unsupported())))
    }

    /// For exactly-once delivery: makes the records produced since the last commit and `checkpoint`
    /// durable and visible together, or not at all. Until this resolves, nothing may be produced.
    /// The sink adds what it knows about its topics to the checkpoint.
    fn commit(&mut self, _checkpoint: &mut Checkpoint) -> Commit {
        Box::pin(std::future::ready(Err(transactions_unsupported())))
    }

    /// Waits until the destination responds, even if it rejects the connection.
    fn wait_for_response(&mut self) -> Answer {
        Box::pin(std::future::ready(()))
    }

    /// Performs work that the sink must do while there are no records. Called at least every ten
    /// seconds. Never blocks.
    fn tend(&mut self) {}

    /// Returns whether nothing is in progress, and the sink has no state that would be lost with
    /// it.
    fn is_at_rest(&self) -> bool {
        false
    }
}

/// Resolves to the checkpoint, if there is one.
pub(crate) type TakeOver<'s> =
    Pin<Box<dyn Future<Output = Result<Option<Checkpoint>, SinkError>> + Send + 's>>;

/// Resolves when the transaction is committed.
pub(crate) type Commit = Pin<Box<dyn Future<Output = Result<(), SinkError>> + Send>>;

/// Returns the error of a sink that was created without transactions.
pub(crate) fn transactions_unsupported() -> SinkError {
    SinkError::Configuration("the sink has no transactions".to_owned())
}

/// Resolves when the destination responds.
pub(crate) type Answer = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Resolves when it is certain whether the topic can be used.
pub(crate) type Preparation = Pin<Box<dyn Future<Output = Result<Prepared, SinkError>> + Send>>;

/// The result of [`Sink::prepare`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prepared {
    /// The topic exists.
    Usable { partitions: usize },
    /// Records can't be sent to the topic, and the configuration turns such events into dead
    /// letters. Without that configuration, the preparation returns an error instead.
    Unusable,
}

/// The result of [`Sink::produce`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Produced {
    /// The sink has accepted the record.
    Taken,
    /// The sink is full; try the same record again later.
    Full,
    /// The topic must be prepared first.
    NewTopic,
}

/// What to do about a topic that the brokers refuse to create.
fn creation_remedy(reason: &str) -> &'static str {
    // Kafka 4.0, `Topic.hasCollision`.
    match reason.contains("collides with existing topic") {
        true => {
            "Kafka lets only one topic exist of those whose names differ in . and _ alone: delete the other one if nobody needs it, or \
             name another topic"
        }
        false => "Create it by hand, or correct create_topics",
    }
}

/// Why a sink can't continue.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum SinkError {
    /// The topic does not exist, and is not created automatically.
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
        "access to topic {topic:?} is denied: {reason}. Grant the principal what it needs: {grant}"
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
        "the record for topic {topic:?} has {bytes} bytes, more than message.max.bytes allows, which is {limit}. Set \
         \"message.max.bytes\" = \"{needed}\" in [kafka], and have the topic accept it: kafka-configs.sh --bootstrap-server {servers} \
         --alter --entity-type topics --entity-name {topic} --add-config max.message.bytes={needed}",
        needed = needed_limit(*bytes),
        servers = shell_word_on_one_line(brokers)
    )]
    TooLarge {
        topic: String,
        /// Size of key, value and headers, in bytes.
        bytes: usize,
        /// `message.max.bytes`.
        limit: u32,
        /// `bootstrap.servers`.
        brokers: String,
    },
    /// A broker has rejected the record when it was sent alone.
    #[error(
        "Kafka did not accept it as a record for topic {topic:?}, with {bytes} bytes of key and value: {reason}"
    )]
    RecordRefused {
        topic: String,
        /// Size of key and value, in bytes.
        bytes: usize,
        /// The broker's message, and how to fix the problem.
        reason: String,
        /// Position of the row.
        at: Position,
        cause: RefusalCause,
    },
    /// The topic has no such partition.
    #[error(
        "topic {topic:?} has no partition {partition}, which the partition column says. Add partitions to the topic, or correct what writes the column"
    )]
    NoPartition { topic: String, partition: i32 },
    /// Authentication failed.
    #[error(
        "Kafka at {brokers} refuses the connection: {reason}. {}", refusal_remedy(.reason)
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
    /// The last record for the pipeline in the checkpoint topic is not a valid checkpoint.
    #[error("the checkpoint of pipeline {pipeline:?} at {place}: {error}")]
    Checkpoint {
        pipeline: String,
        /// Topic and offset.
        place: String,
        /// Why the record is not valid.
        error: CheckpointError,
    },
    /// The checkpoint topic could lose a checkpoint.
    #[error("topic {topic:?} can't hold checkpoints: {found}. Correct it: {remedy}")]
    CheckpointTopic {
        topic: String,
        /// The setting that is wrong.
        found: String,
        /// The command that fixes it.
        remedy: String,
    },
    /// Another producer of the same pipeline is running.
    #[error("another instance of this pipeline has taken over (its producer fenced ours): {0}")]
    Fenced(String),
    /// The broker does not allow the principal to use transactions.
    #[error("Kafka transactions: {reason}. Grant the principal what it needs: {grant}")]
    TransactionDenied {
        /// The broker's message.
        reason: String,
        /// The command that grants access.
        grant: String,
    },
    /// The producer can't accept any more records, and must be re-created.
    #[error("Kafka producer: {0}")]
    Broken(String),
    /// Writing to standard output failed.
    #[error("standard output can't be written to: {0}")]
    Stdout(String),
    /// Standard output was closed when Walpost started.
    #[error(
        "standard output is closed, and with sink = \"stdout\" every event would be lost. Redirect it to a file or a pipe; to \
         discard events, redirect it explicitly: > /dev/null"
    )]
    StdoutClosed,
}

/// Returns a Kafka size limit that accepts records of this size, with some margin for the overhead
/// that Kafka adds to a record and its batch.
#[must_use]
pub(crate) fn needed_limit(bytes: usize) -> usize {
    const ADDED: usize = 10_000;
    bytes.saturating_add(ADDED)
}

impl SinkError {
    /// Returns the position to pass to `walpost skip` to leave out the transaction of a rejected
    /// record.
    #[must_use]
    pub(crate) fn skip_to(&self) -> Option<String> {
        match self {
            Self::RecordRefused { at, .. } => Some(at.to_string()),
            _ => None,
        }
    }
}

/// What fixes a refused connection, by librdkafka's reason.
fn refusal_remedy(reason: &str) -> &'static str {
    match reason {
        // The broker answers a SASL request that it did not expect.
        _ if reason.contains("not valid in current SASL state") => {
            "The listener at this port does not use SASL: name the port of the one that does, or set security.protocol to plaintext or ssl"
        }
        _ if reason.contains("the certificate of broker") => "Nothing was sent to the broker",
        _ => "Correct security.protocol, sasl.* and ssl.* in [kafka]",
    }
}

impl From<&RefusedRecord> for SinkError {
    /// Creates the error that is returned instead of producing the record again.
    fn from(refused: &RefusedRecord) -> Self {
        Self::RecordRefused {
            topic: refused.topic.clone(),
            bytes: refused.bytes,
            reason: refused.reason.clone(),
            at: refused.at,
            cause: refused.cause,
        }
    }
}
