//! Keeps batches within the topics' size limits, which are set with `max.message.bytes`.
//!
//! A broker rejects batches that exceed the topic's limit. librdkafka's `batch.size` limits the
//! uncompressed size of a batch that contains several records, including the headers of the batch
//! and of the request (2.12, `rd_kafka_msgset_writer_write_msgq`). A `batch.size` equal to the
//! topic's limit is therefore small enough. Because `batch.size` is a property of the producer, the
//! smallest limit of the producer's topics applies to all of them.

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

/// Name of the topic setting that limits the size of a batch.
const TOPIC_LIMIT_SETTING: &str = "max.message.bytes";
/// Name of the producer property that limits the size of a record. The producer rejects records
/// above this limit, and never creates larger batches.
const PRODUCER_LIMIT_PROPERTY: &str = "message.max.bytes";
const PRODUCER_LIMIT_DEFAULT_BYTES: u32 = 1_000_000;
/// Size of a batch's header (Kafka's `RECORD_BATCH_OVERHEAD`).
const BATCH_HEADER_BYTES: u32 = 61;
/// Assumed maximum combined size, in bytes, of a record's key, the headers that are not stored in
/// the row's headers column, and Kafka's own fields.
const RECORD_OVERHEAD_BYTES: u64 = 10_000;
/// Timeout for the brokers' response; short because records have to wait for the response.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);
/// How long to wait after a timeout before limits are queried again. Without this pause, a pipeline
/// with many topics would wait for one timeout per topic.
const TIMEOUT_BACKOFF: Duration = Duration::from_secs(60);

/// The smallest batch size limit (`max.message.bytes`) of the topics queried so far. Clones share
/// their state.
#[derive(Clone, Default)]
pub struct BatchLimit(Arc<Mutex<KnownLimit>>);

#[derive(Default)]
struct KnownLimit {
    /// Whether to log a warning for compacted topics; false if the user has configured tombstones.
    warns_of_compaction: bool,
    smallest: Option<Smallest>,
    /// When a query last timed out.
    unanswered: Option<Instant>,
}

/// The smallest batch size limit, and the topic to which it applies.
#[derive(Clone)]
pub(super) struct Smallest {
    pub(super) topic: String,
    pub(super) bytes: u32,
}

impl BatchLimit {
    /// Sets whether a warning is logged for each compacted topic that is queried.
    pub(super) fn warn_of_compaction(&self, warns: bool) {
        self.known().warns_of_compaction = warns;
    }

    /// Returns the smallest limit if it is less than `bytes`.
    pub(super) fn below(&self, bytes: u32) -> Option<Smallest> {
        let smallest = self.known().smallest.clone();
        smallest.filter(|smallest| smallest.bytes < bytes)
    }

    /// Returns the error for a record that was rejected earlier. If the record was too large and
    /// its topic has the smallest known limit, the error contains the limit.
    pub(super) fn refusal(&self, refused: &RefusedRecord) -> SinkError {
        let mut refused = refused.clone();
        let known = self
            .below(u32::MAX)
            .filter(|limit| limit.topic == refused.topic);
        if let (RefusalCause::Size, Some(Smallest { bytes, .. })) = (refused.cause, known) {
            refused.reason = format!(
                "the topic accepts batches of at most {bytes} bytes ({TOPIC_LIMIT_SETTING}). {}",
                refused.reason
            );
        }
        SinkError::from(&refused)
    }

    /// Queries the limit of a topic from brokers that have just responded to another request. If
    /// the limit can't be determined, a batch may be rejected; its records are then resent in
    /// smaller batches.
    pub(super) async fn query_limit(&self, producer: Arc<BaseProducer<Context>>, topic: String) {
        let unanswered = self.known().unanswered;
        if unanswered.is_some_and(|at| at.elapsed() < TIMEOUT_BACKOFF) {
            return;
        }
        let limit = self.clone();
        let query = tokio::task::spawn_blocking(move || limit.learn(&producer, &topic));
        if let Ok(Err(Code::OperationTimedOut)) = query.await {
            self.known().unanswered = Some(Instant::now());
        }
    }

    /// Like [`BatchLimit::query_limit`], but can be called before any broker has responded. Blocks
    /// until the brokers respond or the request times out.
    pub(super) fn learn(&self, producer: &BaseProducer<Context>, topic: &str) -> Result<(), Code> {
        match query_topic(producer.client(), topic) {
            Ok(settings) => {
                match settings.batch_bytes {
                    Some(bytes) => self.record_limit(topic, bytes),
                    None => debug!(
                        topic,
                        "the brokers did not return the topic's {TOPIC_LIMIT_SETTING}"
                    ),
                }
                if settings.is_compacted && self.known().warns_of_compaction {
                    let pipeline = producer.context().pipeline();
                    warn!(pipeline, "{}", compaction_warning(topic));
                }
            }
            Err(code) => {
                debug!(topic, reason = %code, "failed to look up the topic's {TOPIC_LIMIT_SETTING}");
                return Err(code);
            }
        }
        Ok(())
    }

    fn record_limit(&self, topic: &str, bytes: u32) {
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

    fn known(&self) -> MutexGuard<'_, KnownLimit> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Topic settings, as returned by the brokers.
struct TopicSettings {
    /// Maximum size, in bytes, of a batch that the topic accepts.
    batch_bytes: Option<u32>,
    /// Whether the topic is compacted, that is, whether Kafka removes a record if a later record
    /// has the same key.
    is_compacted: bool,
}

/// Queries the settings of a topic. Blocks until the brokers respond or the request times out.
///
/// # Errors
/// Returns an error if no broker responds, or if the brokers deny the request.
fn query_topic<C: ClientContext>(client: &Client<C>, topic: &str) -> Result<TopicSettings, Code> {
    let [bytes, policy] = native::topic_settings(
        client,
        topic,
        [TOPIC_LIMIT_SETTING, "cleanup.policy"],
        REQUEST_TIMEOUT,
    )?;
    // Replace 0, which is not a valid `batch.size`. Nothing can be sent to a topic with a limit of
    // 0 anyway.
    let bytes = bytes.and_then(|bytes| bytes.parse().ok());
    Ok(TopicSettings {
        batch_bytes: bytes.map(|bytes: u32| bytes.max(1)),
        is_compacted: policy.is_some_and(|policy| policy.contains("compact")),
    })
}

/// Returns the warning to report for a compacted topic if the user has not set `null_payload`. By
/// default, NULL payloads become tombstones, which delete earlier records.
pub(crate) fn compaction_warning(topic: &str) -> String {
    format!(
        "topic {topic:?} is compacted, but null_payload is not set: an event whose payload is NULL becomes a tombstone, which deletes \
         the earlier records with its key. Set null_payload = \"tombstone\" if this is intended, or null_payload = \"empty\" to send \
         an empty value instead"
    )
}

/// The size limits of a topic, and of a producer that sends records to the topic.
#[derive(Debug)]
pub(crate) struct Limits {
    /// Maximum size, in bytes, of a batch that the topic accepts, or the reason why this limit is
    /// unknown.
    topic: Result<u32, String>,
    /// Maximum size of a batch of several records, in bytes. A single record may be larger.
    batches: u32,
    /// Maximum size, in bytes, of a record that the producer accepts.
    records: u32,
    brokers: String,
    /// Whether the topic is compacted.
    pub(crate) is_compacted: bool,
}

impl Limits {
    /// Queries the limits of a topic, for a producer with the configuration `config`. Blocks until
    /// the brokers respond or the request times out.
    pub(super) fn query<C: ClientContext>(
        client: &Client<C>,
        topic: &str,
        config: &ClientConfig,
    ) -> Self {
        let (topic, is_compacted) = match query_topic(client, topic) {
            Ok(settings) => {
                let no_value =
                    format!("the brokers returned no value for the topic's {TOPIC_LIMIT_SETTING}");
                (settings.batch_bytes.ok_or(no_value), settings.is_compacted)
            }
            Err(code) => (Err(code.to_string()), false),
        };
        Self {
            topic,
            batches: batch_bytes_max(config),
            records: record_bytes_max(config),
            brokers: brokers(config),
            is_compacted,
        }
    }

    /// Returns a warning, including the remedy, if rows of up to `row_bytes_max` bytes can result
    /// in records that the topic rejects.
    #[must_use]
    pub(crate) fn warning(&self, topic: &str, row_bytes_max: usize) -> Option<String> {
        let limit = *self.topic.as_ref().ok()?;
        let row = u32::try_from(row_bytes_max).unwrap_or(u32::MAX);
        let (largest, source) = match row < self.records {
            true => (row, "max_row_bytes"),
            false => (self.records, "\"message.max.bytes\" in [kafka]"),
        };
        let needed = largest.saturating_add(BATCH_HEADER_BYTES);
        (limit < needed).then(|| {
            format!(
                "topic {topic:?} accepts batches of at most {limit} bytes ({TOPIC_LIMIT_SETTING}), but records can be up to {largest} bytes \
                 ({source}): records above the topic's limit will be rejected. Raise the limit: kafka-configs.sh --bootstrap-server {} \
                 --alter --entity-type topics --entity-name {topic} --add-config {TOPIC_LIMIT_SETTING}={needed}",
                shell_word_on_one_line(&self.brokers)
            )
        })
    }
}

impl fmt::Display for Limits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.topic {
            Ok(limit) if *limit < self.batches => {
                write!(
                    f,
                    "; the topic's {TOPIC_LIMIT_SETTING} limits batches to {limit} bytes"
                )
            }
            Ok(_) => Ok(()),
            Err(reason) => write!(
                f,
                "; failed to look up the topic's {TOPIC_LIMIT_SETTING}: {reason}"
            ),
        }
    }
}

/// The size of the largest record that Kafka is expected to accept from a pipeline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RecordLimit {
    bytes: u32,
    /// The topic whose limit applies; `None` if the producer's limit is smaller.
    topic: Option<String>,
}

impl RecordLimit {
    /// Returns the smaller of the producer's limit and, if the topic is known, the topic's limit.
    #[must_use]
    pub(crate) fn new(properties: &Properties, topic: Option<(&str, &Limits)>) -> Self {
        let producer = record_bytes_max(&client_config(properties, "walpost-check"));
        let accepted = topic.and_then(|(name, limits)| {
            let limit = limits.topic.as_ref().ok()?;
            Some((name, limit.saturating_sub(BATCH_HEADER_BYTES)))
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

    /// Returns the size of the largest event that fits into a record, allowing for the key, the
    /// headers that are not stored in the row's headers column, and Kafka's own fields.
    #[must_use]
    pub(crate) fn event_bytes(&self) -> u64 {
        u64::from(self.bytes)
            .saturating_sub(RECORD_OVERHEAD_BYTES)
            .max(1)
    }
}

impl fmt::Display for RecordLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { bytes, topic } = self;
        match topic {
            Some(topic) => write!(
                f,
                "topic {topic:?} accepts records of up to {bytes} bytes ({TOPIC_LIMIT_SETTING})"
            ),
            None => write!(
                f,
                "the producer sends records of up to {bytes} bytes ({PRODUCER_LIMIT_PROPERTY} in [kafka])"
            ),
        }
    }
}

/// Returns the maximum size to which a producer with this configuration fills a batch of several
/// records.
pub(super) fn batch_bytes_max(config: &ClientConfig) -> u32 {
    let batch = number(config, BATCH_BYTES).unwrap_or(u32::MAX);
    batch.min(record_bytes_max(config))
}

/// Returns the size of the largest record that a producer with this configuration accepts.
pub(super) fn record_bytes_max(config: &ClientConfig) -> u32 {
    number(config, PRODUCER_LIMIT_PROPERTY).unwrap_or(PRODUCER_LIMIT_DEFAULT_BYTES)
}

fn number(config: &ClientConfig, name: &str) -> Option<u32> {
    config.get(name)?.trim().parse().ok()
}
