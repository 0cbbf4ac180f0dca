//! Where records go: the boundary between the pipeline and Kafka.

pub(crate) mod on_demand;
pub(crate) mod stdout;

use std::pin::Pin;

use crate::delivery::checkpoint::{Checkpoint, CheckpointError};
use crate::delivery::failure::{RefusalCause, RefusedRecord};
use crate::delivery::watermark::Tag;
use crate::escape::shell_word_on_one_line;
use crate::model::lsn::Position;
use crate::outbox::Record;

/// A place for records that reports their delivery by tag, to the
/// [`Deliveries`](crate::delivery::watermark::Deliveries) it was made with.
pub trait Sink {
    /// Hands over one record. Never blocks. A record is taken as a whole or not at all; taken
    /// records keep their order within a partition.
    ///
    /// # Errors
    /// The record can't be taken, now or ever.
    fn produce(&mut self, record: &Record<'_>, tag: Tag) -> Result<Produced, SinkError>;

    /// Nothing more is at hand: what was taken should not wait for company, unless times are `busy`
    /// and more is about to come.
    ///
    /// # Errors
    /// The sink can't take any more.
    fn flush(&mut self, busy: bool) -> Result<(), SinkError>;

    /// Sees to it that `topic` exists, before its first record. A sink that never asks for that
    /// with [`Produced::NewTopic`] needs none. `ahead` tells which topics records are likely to come for next, for a sink
    /// that can prepare many at once.
    fn prepare(&mut self, _topic: &str, _ahead: impl FnOnce() -> Vec<String>) -> Preparation {
        Box::pin(std::future::ready(Ok(Prepared::Usable { partitions: 1 })))
    }

    /// The preparation of `topic` has ended. For a topic that is unusable, [`Sink::produce`] returns the error from now
    /// on, until the sink looks the topic up again.
    ///
    /// # Errors
    /// The sink can't use it all the same.
    fn prepared(&mut self, _topic: &str, _prepared: Prepared) -> Result<(), SinkError> {
        Ok(())
    }

    /// More was read from the stream: what the brokers have said before of its rows' partitions says nothing of
    /// what is written after that.
    fn read_more(&mut self) {}

    /// For exactly-once: keeps every earlier producer of the same pipeline from producing any more,
    /// ends what it left open, and resolves with how far the records in Kafka reach, if that is
    /// known. From then on what is produced stays invisible until it is committed.
    fn take_over(&mut self) -> TakeOver<'_> {
        Box::pin(std::future::ready(Err(no_transactions())))
    }

    /// For exactly-once: what was produced since the last commit and `checkpoint` become durable
    /// and visible together, or not at all. Until this resolves, nothing can be produced. The sink
    /// notes in the checkpoint what it knows of its topics.
    fn commit(&mut self, _checkpoint: &mut Checkpoint) -> Commit {
        Box::pin(std::future::ready(Err(no_transactions())))
    }

    /// Resolves when somebody answers at the other end, be it with a refusal.
    fn answers(&mut self) -> Answer {
        Box::pin(std::future::ready(()))
    }

    /// Called now and then, at least every ten seconds: the place for what the sink has to do when
    /// there are no records. Never blocks.
    fn tend(&mut self) {}

    /// Nothing is under way, and nothing is known that would be lost with the sink.
    fn is_at_rest(&self) -> bool {
        false
    }
}

/// Resolves with the checkpoint, if there is one.
pub(crate) type TakeOver<'s> =
    Pin<Box<dyn Future<Output = Result<Option<Checkpoint>, SinkError>> + Send + 's>>;

/// Resolves when the transaction is committed.
pub(crate) type Commit = Pin<Box<dyn Future<Output = Result<(), SinkError>> + Send>>;

/// What a sink says that was made without transactions.
pub(crate) fn no_transactions() -> SinkError {
    SinkError::Configuration("the sink has no transactions".to_owned())
}

/// Resolves when somebody answers.
pub(crate) type Answer = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Resolves when it is certain whether the topic can be used.
pub(crate) type Preparation = Pin<Box<dyn Future<Output = Result<Prepared, SinkError>> + Send>>;

/// The result of [`Sink::prepare`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prepared {
    /// The topic exists.
    Usable { partitions: usize },
    /// Records cannot be sent to the topic, and the settings turn such events into dead letters. Where they do not, the
    /// preparation ends with an error instead.
    Unusable,
}

/// What came of [`Sink::produce`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Produced {
    /// The sink has it.
    Taken,
    /// The sink is full; the same record is to be tried again later.
    Full,
    /// The topic has to be prepared first.
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

/// A sink that can't go on.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum SinkError {
    /// The topic is not there, and nobody makes it.
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
    /// The topic could not be created as the configuration asks.
    #[error(
        "topic {topic:?} could not be created at {brokers}: {reason}. {}",
        creation_remedy(reason)
    )]
    TopicNotCreated {
        topic: String,
        /// `bootstrap.servers`.
        brokers: String,
        /// What the broker says.
        reason: String,
    },
    /// The broker lets us not use the topic.
    #[error(
        "access to topic {topic:?} is denied: {reason}. Grant the principal what it needs: {grant}"
    )]
    TopicDenied {
        topic: String,
        /// What the broker says.
        reason: String,
        /// The command.
        grant: String,
    },
    /// The record is larger than the producer may send.
    #[error(
        "the record for topic {topic:?} has {bytes} bytes, more than message.max.bytes allows, which is {limit}. Set \
         \"message.max.bytes\" = \"{needed}\" in [kafka], and have the topic accept it: kafka-configs.sh --bootstrap-server {servers} \
         --alter --entity-type topics --entity-name {topic} --add-config max.message.bytes={needed}",
        needed = needed_limit(*bytes),
        servers = shell_word_on_one_line(brokers)
    )]
    TooLarge {
        topic: String,
        /// Bytes of key, value and headers.
        bytes: usize,
        /// `message.max.bytes`.
        limit: u32,
        /// `bootstrap.servers`.
        brokers: String,
    },
    /// A broker has refused the record alone.
    #[error(
        "Kafka did not accept it as a record for topic {topic:?}, with {bytes} bytes of key and value: {reason}"
    )]
    RecordRefused {
        topic: String,
        /// Bytes of key and value.
        bytes: usize,
        /// What the broker says, and what a person can do.
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
    /// The broker does not accept who we are.
    #[error(
        "Kafka at {brokers} refuses the connection: {reason}. {}", refusal_remedy(.reason)
    )]
    Refused {
        /// `bootstrap.servers`.
        brokers: String,
        /// What librdkafka says.
        reason: String,
    },
    /// The producer can't be made from its properties.
    #[error("Kafka producer: {0}. Correct [kafka] in the configuration")]
    Configuration(String),
    /// What stands in the checkpoint's place is none.
    #[error("the checkpoint of pipeline {pipeline:?} at {place}: {error}")]
    Checkpoint {
        pipeline: String,
        /// Topic and offset.
        place: String,
        /// What is wrong with it.
        error: CheckpointError,
    },
    /// The topic for checkpoints could lose one.
    #[error("topic {topic:?} can't hold checkpoints: {found}. Correct it: {remedy}")]
    CheckpointTopic {
        topic: String,
        /// What is wrong with it.
        found: String,
        /// The command.
        remedy: String,
    },
    /// Another producer of the same pipeline is at work.
    #[error("another instance of this pipeline has taken over (its producer fenced ours): {0}")]
    Fenced(String),
    /// The broker lets us not use transactions.
    #[error("Kafka transactions: {reason}. Grant the principal what it needs: {grant}")]
    TransactionDenied {
        /// What the broker says.
        reason: String,
        /// The command.
        grant: String,
    },
    /// The producer can't take any more records, and has to be re-created.
    #[error("Kafka producer: {0}")]
    Broken(String),
    /// Standard output can't be written to.
    #[error("standard output can't be written to: {0}")]
    Stdout(String),
    /// Standard output was closed when Walpost started.
    #[error(
        "standard output is closed, and with sink = \"stdout\" every event would be lost. Redirect it to a file or a pipe; to \
         discard events, redirect it explicitly: > /dev/null"
    )]
    StdoutClosed,
}

/// A limit of Kafka's for records of this size, with room for what Kafka adds to a record and to its batch.
#[must_use]
pub(crate) fn needed_limit(bytes: usize) -> usize {
    const ADDED: usize = 10_000;
    bytes.saturating_add(ADDED)
}

impl SinkError {
    /// The position that `walpost skip` is given to leave out the transaction of a record that was refused.
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
    /// The error in the place of producing it again.
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
