//! How large a batch may be for a topic: its `max.message.bytes`, which the brokers are asked for.
//!
//! A broker refuses a batch that is larger. librdkafka's `batch.size` bounds what a batch of several records has
//! before it is compressed, together with the headers of the batch and of the request (2.12,
//! `rd_kafka_msgset_writer_write_msgq`), so a batch within the topic's limit is accepted. It is a property of
//! the producer, so the smallest limit of its topics is that of all.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rdkafka::client::{Client, ClientContext};
use rdkafka::config::ClientConfig;
use rdkafka::error::RDKafkaErrorCode as Code;
use rdkafka::producer::{BaseProducer, Producer};
use tracing::{debug, warn};

use super::context::Context;
use super::native;
use super::properties::{BATCH_BYTES, Properties, brokers, client_config};
use crate::delivery::failure::{RefusalCause, RefusedRecord};
use crate::escape::shell_word_on_one_line;
use crate::sink::SinkError;

/// The topic's setting.
const SETTING: &str = "max.message.bytes";
/// A record that is larger is not taken by the producer, and a batch of several is within it too.
const RECORD_BYTES: &str = "message.max.bytes";
const RECORD_BYTES_DEFAULT: u32 = 1_000_000;
/// A batch has so many bytes beside its records (Kafka's `RECORD_BATCH_OVERHEAD`).
const BATCH_HEADER: u32 = 61;
/// A record's key, its other headers and Kafka's own fields are assumed to have at most so many bytes.
const BESIDE_EVENT: u64 = 10_000;
/// How long the brokers may take to answer: records wait for it.
const ANSWER: Duration = Duration::from_secs(2);
/// So long nothing is asked where that was not enough, so that many topics don't have to wait for it each.
const SILENCE: Duration = Duration::from_secs(60);

/// The smallest limit of the topics that were asked for. Clones are about the same topics.
#[derive(Clone, Default)]
pub struct BatchLimit(Arc<Mutex<Known>>);

#[derive(Default)]
struct Known {
    /// Who sees tombstones in a compacted topic has not asked for them.
    warns_of_compaction: bool,
    smallest: Option<Smallest>,
    /// When a question was not answered.
    unanswered: Option<Instant>,
}

/// A limit, and the topic that has it.
#[derive(Clone)]
pub(super) struct Smallest {
    pub(super) topic: String,
    pub(super) bytes: u32,
}

impl BatchLimit {
    /// Says so of topics that are asked for and are compacted.
    pub(super) fn warn_of_compaction(&self, warns: bool) {
        self.known().warns_of_compaction = warns;
    }

    /// The limit, if batches of that many bytes are beyond it.
    pub(super) fn below(&self, bytes: u32) -> Option<Smallest> {
        let smallest = self.known().smallest.clone();
        smallest.filter(|smallest| smallest.bytes < bytes)
    }

    /// The error for a record that was refused before, with the limit of its topic if that is known.
    pub(super) fn refusal(&self, refused: &RefusedRecord) -> SinkError {
        let mut refused = refused.clone();
        let known = self
            .below(u32::MAX)
            .filter(|limit| limit.topic == refused.topic);
        if let (RefusalCause::Size, Some(Smallest { bytes, .. })) = (refused.cause, known) {
            refused.reason = format!(
                "the topic accepts batches of at most {bytes} bytes ({SETTING}). {}",
                refused.reason
            );
        }
        SinkError::from(&refused)
    }

    /// Asks for the topic's, of brokers that have just answered something else. Where it can't be known, a batch may be
    /// refused, and is sent again in smaller ones.
    pub(super) async fn ask(&self, producer: Arc<BaseProducer<Context>>, topic: String) {
        let unanswered = self.known().unanswered;
        if unanswered.is_some_and(|at| at.elapsed() < SILENCE) {
            return;
        }
        let limit = self.clone();
        let asked = tokio::task::spawn_blocking(move || limit.learn(&producer, &topic));
        if let Ok(Err(Code::OperationTimedOut)) = asked.await {
            self.known().unanswered = Some(Instant::now());
        }
    }

    /// As [`BatchLimit::ask`], of brokers that nobody has heard of yet. Blocks.
    pub(super) fn learn(&self, producer: &BaseProducer<Context>, topic: &str) -> Result<(), Code> {
        match of_topic(producer.client(), topic) {
            Ok(shown) => {
                match shown.batch_bytes {
                    Some(bytes) => self.note(topic, bytes),
                    None => debug!(topic, "the brokers don't show {SETTING} of the topic"),
                }
                if shown.is_compacted && self.known().warns_of_compaction {
                    let pipeline = producer.context().pipeline();
                    warn!(pipeline, "{}", compaction_warning(topic));
                }
            }
            Err(code) => {
                debug!(topic, reason = %code, "{SETTING} of the topic can't be looked up");
                return Err(code);
            }
        }
        Ok(())
    }

    fn note(&self, topic: &str, bytes: u32) {
        let mut known = self.known();
        if known
            .smallest
            .as_ref()
            .is_none_or(|smallest| bytes < smallest.bytes)
        {
            let topic = topic.to_owned();
            known.smallest = Some(Smallest { topic, bytes });
        }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What brokers show of a topic.
struct Shown {
    /// The largest batch that it takes.
    batch_bytes: Option<u32>,
    /// Records that have a later one with their key are removed.
    is_compacted: bool,
}

/// Blocks.
///
/// # Errors
/// No broker answers, or they refuse to.
fn of_topic<C: ClientContext>(client: &Client<C>, topic: &str) -> Result<Shown, Code> {
    let [bytes, policy] =
        native::topic_settings(client, topic, [SETTING, "cleanup.policy"], ANSWER)?;
    // Zero is no batch.size, and nothing could be sent anyway.
    let bytes = bytes.and_then(|bytes| bytes.parse().ok());
    Ok(Shown {
        batch_bytes: bytes.map(|bytes: u32| bytes.max(1)),
        is_compacted: policy.is_some_and(|policy| policy.contains("compact")),
    })
}

/// What to say of tombstones that nobody has asked for.
pub(crate) fn compaction_warning(topic: &str) -> String {
    format!(
        "topic {topic:?} is compacted, and null_payload is not set: an event whose payload is NULL is a tombstone, which deletes what \
         the topic has of its key. Set null_payload = \"tombstone\" if that is meant, or null_payload = \"empty\" for a value of \
         no bytes"
    )
}

/// What a topic takes, and what a producer may send to it.
#[derive(Debug)]
pub(crate) struct Limits {
    /// The largest batch that the topic takes, in bytes; or why that is not known.
    topic: Result<u32, String>,
    /// The largest batch of several records.
    batches: u32,
    /// The largest record.
    records: u32,
    brokers: String,
    /// It is compacted.
    pub(crate) is_compacted: bool,
}

impl Limits {
    /// A topic's, for a producer with the configuration `config`. Blocks.
    pub(super) fn look_up<C: ClientContext>(
        client: &Client<C>,
        topic: &str,
        config: &ClientConfig,
    ) -> Self {
        let (topic, is_compacted) = match of_topic(client, topic) {
            Ok(shown) => {
                let bytes = shown.batch_bytes.ok_or("it is not shown to us".to_owned());
                (bytes, shown.is_compacted)
            }
            Err(code) => (Err(code.to_string()), false),
        };
        Self {
            topic,
            batches: of_batches(config),
            records: of_records(config),
            brokers: brokers(config),
            is_compacted,
        }
    }

    /// Where the topic refuses records that come of rows of up to `row_bytes_max`: what fixes it.
    #[must_use]
    pub(crate) fn warning(&self, topic: &str, row_bytes_max: usize) -> Option<String> {
        let limit = *self.topic.as_ref().ok()?;
        let row = u32::try_from(row_bytes_max).unwrap_or(u32::MAX);
        let (largest, by) = match row < self.records {
            true => (row, "max_row_bytes"),
            false => (self.records, "\"message.max.bytes\" in [kafka]"),
        };
        let needed = largest.saturating_add(BATCH_HEADER);
        (limit < needed).then(|| {
            format!(
                "topic {topic:?} accepts batches of at most {limit} bytes ({SETTING}), and a record may have {largest} ({by}): a \
                 larger one is refused. Raise the limit: kafka-configs.sh --bootstrap-server {} --alter --entity-type topics \
                 --entity-name {topic} --add-config {SETTING}={needed}",
                shell_word_on_one_line(&self.brokers)
            )
        })
    }
}

impl fmt::Display for Limits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.topic {
            Ok(limit) if *limit < self.batches => {
                write!(f, "; batches are kept within its {SETTING}, {limit}")
            }
            Ok(_) => Ok(()),
            Err(reason) => write!(f, "; its {SETTING} can't be looked up: {reason}"),
        }
    }
}

/// The largest record that Kafka accepts from a pipeline, as far as that is known before there is one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RecordLimit {
    bytes: u32,
    /// The topic whose limit it is; `None` for the producer's.
    topic: Option<String>,
}

impl RecordLimit {
    /// The smaller one of the producer's limit and that of the topic, if the topic is known.
    #[must_use]
    pub(crate) fn new(properties: &Properties, topic: Option<(&str, &Limits)>) -> Self {
        let producer = of_records(&client_config(properties, "walpost-check"));
        let accepted = topic.and_then(|(name, limits)| {
            let limit = limits.topic.as_ref().ok()?;
            Some((name, limit.saturating_sub(BATCH_HEADER)))
        });
        match accepted {
            Some((name, bytes)) if bytes < producer => Self {
                bytes,
                topic: Some(name.to_owned()),
            },
            _ => Self {
                bytes: producer,
                topic: None,
            },
        }
    }

    /// The largest event that fits: the rest is for the key, the other headers and what Kafka adds.
    #[must_use]
    pub(crate) fn event_bytes(&self) -> u64 {
        u64::from(self.bytes).saturating_sub(BESIDE_EVENT).max(1)
    }
}

impl fmt::Display for RecordLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { bytes, topic } = self;
        match topic {
            Some(topic) => write!(
                f,
                "topic {topic:?} accepts records of up to {bytes} ({SETTING})"
            ),
            None => write!(
                f,
                "the producer sends records of up to {bytes} ({RECORD_BYTES} in [kafka])"
            ),
        }
    }
}

/// The largest batch of several records that a producer with this configuration makes.
pub(super) fn of_batches(config: &ClientConfig) -> u32 {
    let batch = number(config, BATCH_BYTES).unwrap_or(u32::MAX);
    batch.min(of_records(config))
}

/// The largest record that a producer with this configuration takes.
pub(super) fn of_records(config: &ClientConfig) -> u32 {
    number(config, RECORD_BYTES).unwrap_or(RECORD_BYTES_DEFAULT)
}

fn number(config: &ClientConfig, name: &str) -> Option<u32> {
    config.get(name)?.trim().parse().ok()
}
