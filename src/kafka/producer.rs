//! The idempotent producer.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::error::RDKafkaErrorCode;
use rdkafka::producer::{BaseProducer, Producer};
use tokio::task::{JoinHandle, spawn_blocking};
use tracing::{info, warn};

use super::brokers::Brokers;
use super::context::Context;
use super::credentials::{Credentials, Login};
use super::flusher::Flusher;
use super::grants::Grants;
use super::limits::{self, BatchLimit, Smallest};
use super::native::{self, Topic};
use super::poller::Poller;
use super::properties::{
    BATCH_BYTES, Properties, check_files, client_config, create_with_context, describe,
    leaves_linger,
};
use super::seen_topics::{COMPARE_INTERVAL, LOOKUP_INTERVAL, NewTopics, SeenTopics};
use super::settings::ProducerSettings;
use super::topic_lookup::TopicLookup;
use super::topics::{CreateTopics, Topics, Wanted};
use super::transaction::{self, Checkpoints};
use super::unusable::UnusableTopics;
use crate::delivery::checkpoint::Checkpoint;
use crate::delivery::failure::RefusedRecord;
use crate::delivery::isolation::Batching;
use crate::delivery::watermark::{Deliveries, Tag, Watermark};
use crate::model::lsn::Lsn;
use crate::model::window::Window;
use crate::outbox::Record;
use crate::sink::{
    Answer, Commit, Preparation, Prepared, Produced, Sink, SinkError, TakeOver,
    transactions_unsupported,
};

/// A [`Sink`] that produces records to Kafka.
///
/// librdkafka copies the key, value and headers of each record it accepts, batches records on its
/// own threads, and reports each delivery to [`Context`].
pub struct KafkaSink {
    /// Processes delivery reports until the sink is dropped.
    _poller: Poller,
    /// Sends queued records without waiting for full batches; `None` if the user has configured how
    /// long a batch may linger.
    flusher: Option<Flusher>,
    /// Whether a record has been queued since the last flush.
    unflushed: bool,
    producer: Arc<BaseProducer<Context>>,
    /// Maximum size of the producer's batches, in bytes.
    batch_bytes: u32,
    limit: BatchLimit,
    /// The task that queries the batch size limit of the topic to which all records are sent;
    /// `None` if no query is in progress.
    limit_query: Option<JoinHandle<()>>,
    topics: Topics,
    /// The topics that are known to exist, keyed by name.
    known: HashMap<Box<str>, KnownTopic>,
    /// State for exactly-once delivery; `None` for at-least-once.
    transactions: Option<Transactions>,
    /// When [`Sink::tend`] last checked whether an outage is over.
    outage_checked_at: Instant,
    brokers: Arc<Brokers>,
    /// Number of calls to [`Sink::read_more`].
    reads: u64,
    /// The records that must not be produced, because the brokers reject them.
    refused: Vec<RefusedRecord>,
    /// Topics that can't be used. Events for these topics become dead letters; if `None`, such
    /// events cause an error instead.
    unusable: Option<Arc<UnusableTopics>>,
    comparison: Comparison,
}

/// Compares the current IDs of the topics in use with the recorded IDs, to detect topics that were
/// re-created.
struct Comparison {
    seen: SeenTopics,
    /// The most recently started comparison of topic IDs.
    task: Option<JoinHandle<()>>,
    /// When the IDs of all topics in use were last compared.
    compared: Instant,
    /// Whether a record has been produced since the last comparison.
    is_due: bool,
    new: NewTopics,
    /// When new topics were last looked up.
    looked_up: Instant,
}

impl Comparison {
    fn new(seen: SeenTopics) -> Self {
        let now = Instant::now();
        Self {
            seen,
            task: None,
            compared: now,
            is_due: false,
            new: NewTopics::default(),
            looked_up: now,
        }
    }

    /// Starts a task that compares topic IDs, if it is time for another comparison and none is in
    /// progress.
    fn start_if_due(
        &mut self,
        producer: &Arc<BaseProducer<Context>>,
        known: &HashMap<Box<str>, KnownTopic>,
    ) {
        if self.task.as_ref().is_some_and(|task| !task.is_finished()) {
            return;
        }
        let topics: Vec<_> = if self.is_due && self.compared.elapsed() >= COMPARE_INTERVAL {
            self.is_due = false;
            self.compared = Instant::now();
            known.keys().map(|topic| topic.to_string()).collect()
        } else if !self.new.is_empty() && self.looked_up.elapsed() >= LOOKUP_INTERVAL {
            self.looked_up = Instant::now();
            self.new.next_lookups(&self.seen)
        } else {
            return;
        };
        if !topics.is_empty() {
            let (seen, producer) = (self.seen.clone(), Arc::clone(producer));
            self.task = Some(spawn_blocking(move || seen.compare(&producer, &topics)));
        }
    }
}

/// Additional state for exactly-once delivery.
struct Transactions {
    checkpoints: Checkpoints,
    /// The checkpoint topic, once it has been opened.
    topic: Option<Topic>,
    /// Partition counts of topics that have not been added to a checkpoint yet.
    partitions: BTreeMap<String, usize>,
    /// Whether the producer has fenced its predecessors. A producer can do this only once.
    taken_over: bool,
}

/// A topic that is known to exist.
struct KnownTopic {
    topic: Topic,
    /// A partition that is missing from librdkafka's metadata and is being looked up, together with
    /// the value of [`KafkaSink::reads`] when the lookup was requested.
    doubted: Option<(i32, u64)>,
    absent: Option<AbsentPartition>,
}

/// The result of looking up a partition that was missing from librdkafka's metadata.
struct AbsentPartition {
    /// Number of the first partition that does not exist, which is the topic's partition count at
    /// the time of the lookup.
    first: usize,
    answered: Instant,
    /// The value of [`KafkaSink::reads`] when the lookup was requested. Rows that are read later
    /// may name partitions that were added after the lookup.
    reads: u64,
    /// Whether the result has not yet been applied to the row that caused the lookup.
    is_awaited: bool,
}

/// How long the result of a partition lookup is valid.
const LOOKUP_LIFETIME: Duration = Duration::from_secs(1);
/// How long a broker may take to receive the metadata of partitions that were added to a topic.
/// If a response reports a partition as missing, Walpost repeats the lookup until this time has
/// passed. However, a lookup within [`NEW_PARTITION_DELAY_INTERVAL`] of the previous one for the
/// same topic is not repeated, so that many rows with missing partitions don't delay all other
/// rows.
const NEW_PARTITION_DELAY: Duration = Duration::from_millis(250);
const NEW_PARTITION_DELAY_INTERVAL: Duration = Duration::from_secs(10);
/// How often the brokers are queried during an outage to detect its end.
const OUTAGE_QUERY_INTERVAL: Duration = Duration::from_secs(2);
/// How often a flush in progress checks whether the sink has been dropped.
const FLUSH_POLL_INTERVAL: Duration = Duration::from_millis(250);
/// librdkafka's property for the maximum number of records in a batch.
const BATCH_RECORDS: &str = "batch.num.messages";
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// A warning is logged if a topic's batch size limit is below this value, because the limit also
/// applies to batches for the producer's other topics.
const TOPIC_LIMIT_WARNING_BYTES: u32 = 64 << 10;

impl KafkaSink {
    /// Creates a sink that is used only to fence the pipeline's other producers and to write its
    /// checkpoint.
    ///
    /// # Errors
    /// Returns an error if the producer can't be created from the properties.
    pub fn for_checkpoint(settings: &ProducerSettings) -> Result<Self, SinkError> {
        let window = Window {
            records: 1,
            bytes: 1,
        };
        Self::with_deliveries(settings, Watermark::new(window, Lsn::ZERO).deliveries())
    }

    fn with_deliveries(
        settings: &ProducerSettings,
        deliveries: Arc<Deliveries>,
    ) -> Result<Self, SinkError> {
        Self::new(
            &settings.pipeline,
            &settings.properties,
            settings.create_topics,
            Checkpoints::for_producer(settings),
            &settings.credentials,
            deliveries,
        )
    }

    /// Creates a producer for the given pipeline. The producer connects in the background, and
    /// reports deliveries to `deliveries`. If `checkpoints` is given, delivery is exactly-once.
    ///
    /// # Errors
    /// Returns an error if librdkafka does not accept the properties.
    pub fn new(
        pipeline: &str,
        properties: &Properties,
        create_topics: Option<CreateTopics>,
        checkpoints: Option<Checkpoints>,
        credentials: &Credentials,
        deliveries: Arc<Deliveries>,
    ) -> Result<Self, SinkError> {
        let config = match &checkpoints {
            Some(checkpoints) => checkpoints.config.clone(),
            None => {
                let mut config = client_config(properties, &format!("walpost-{pipeline}"));
                credentials.renew(&mut config);
                config
            }
        };
        let context = Context::new(pipeline, Grants::for_config(&config), deliveries)
            .with_credentials(credentials.clone(), Login::for_config(&config));
        let flush = leaves_linger(properties);
        let mut topics = Topics::new(config, create_topics);
        topics.set_credentials(credentials.clone());
        let mut sink = Self::with_config(topics, flush, context)?;
        sink.transactions = checkpoints.map(|checkpoints| Transactions {
            checkpoints,
            topic: None,
            partitions: BTreeMap::new(),
            taken_over: false,
        });
        Ok(sink)
    }

    /// Creates a sink for a pipeline. The sink uses the batch settings in `batching`, keeps batches
    /// within `limit`, and compares topic IDs with the IDs that earlier sinks recorded in `seen`.
    ///
    /// # Errors
    /// See [`KafkaSink::new`].
    pub fn for_pipeline(
        settings: &ProducerSettings,
        batching: &Batching,
        limit: &BatchLimit,
        seen: &SeenTopics,
        deliveries: Arc<Deliveries>,
    ) -> Result<Self, SinkError> {
        let mut settings = settings.clone();
        let properties = &mut settings.properties;
        let configured = limits::batch_bytes_max(&client_config(properties, &settings.pipeline));
        if batching.single {
            properties.insert(BATCH_RECORDS.to_owned(), "1".to_owned());
        }
        let smallest = limit.below(configured);
        let bytes = batching.batch_bytes(smallest.map_or(configured, |limit| limit.bytes));
        if bytes < configured {
            properties.insert(BATCH_BYTES.to_owned(), bytes.to_string());
        }
        let mut sink = Self::with_deliveries(&settings, deliveries)?;
        sink.refused.clone_from(&batching.refused);
        sink.unusable = settings
            .dead_letter_topic
            .as_ref()
            .map(|topic| Arc::new(UnusableTopics::new(topic)));
        sink.comparison = Comparison::new(seen.clone());
        sink.limit = limit.clone();
        sink.limit.warn_of_compaction(settings.warns_of_compaction);
        // A transactional producer can't be replaced after it has fenced its predecessors, so query
        // the topic's batch size limit before fencing. Other producers query the limit when they
        // look up a topic.
        if sink.transactions.is_some()
            && let Some(topic) = settings.constant_topic
        {
            let (producer, limit) = (Arc::clone(&sink.producer), limit.clone());
            sink.limit_query = Some(spawn_blocking(move || {
                // If the query fails, the batch size limit is queried again when the topic is
                // looked up.
                let _ = limit.learn(&producer, &topic);
            }));
        }
        Ok(sink)
    }

    fn with_config(topics: Topics, flush: bool, context: Context) -> Result<Self, SinkError> {
        check_files(topics.config()).map_err(|error| match error.is_untrusted() {
            // Return an error that leads to a retry, because a running pipeline should not halt
            // when the permissions of a file change.
            true => SinkError::Broken(error.to_string()),
            false => SinkError::Configuration(error.to_string()),
        })?;
        let producer: BaseProducer<Context> = create_with_context(topics.config(), context)
            .map_err(|error| SinkError::Configuration(describe(&error)))?;
        let producer = Arc::new(producer);
        let brokers = Arc::new(Brokers::new(topics.brokers()));
        let no_thread =
            |error: std::io::Error| SinkError::Broken(format!("failed to start a thread: {error}"));
        let poller = Poller::start(Arc::clone(&producer)).map_err(no_thread)?;
        let flusher = flush
            .then(|| Flusher::start(Arc::clone(&producer)))
            .transpose()
            .map_err(no_thread)?;
        Ok(Self {
            _poller: poller,
            flusher,
            unflushed: false,
            producer,
            batch_bytes: limits::batch_bytes_max(topics.config()),
            limit: BatchLimit::default(),
            limit_query: None,
            topics,
            known: HashMap::new(),
            transactions: None,
            outage_checked_at: Instant::now(),
            brokers,
            reads: 0,
            refused: Vec::new(),
            unusable: None,
            comparison: Comparison::new(SeenTopics::default()),
        })
    }

    /// Replaces the producer if a topic does not accept batches as large as the producer's batches,
    /// and returns whether the producer was replaced. The new producer has no open topics.
    ///
    /// # Errors
    /// Returns an error if replacing the producer would lose records or a transaction.
    fn replace_if_limit_exceeded(&mut self) -> Result<bool, SinkError> {
        let Some(Smallest { topic, bytes }) = self.limit.below(self.batch_bytes) else {
            return Ok(false);
        };
        let has_taken_over = |transactions: &Transactions| transactions.taken_over;
        if self.transactions.as_ref().is_some_and(has_taken_over)
            || self.producer.in_flight_count() > 0
        {
            return Err(SinkError::Broken(format!(
                "topic {topic:?} accepts batches of at most {bytes} bytes (max.message.bytes), but uncommitted records \
                 were produced in batches of up to {} bytes; they will be produced again in smaller batches",
                self.batch_bytes
            )));
        }
        let topics = self.topics.with_property(BATCH_BYTES, bytes);
        let context = self.producer.context().successor(topics.config());
        let mut replacement = Self::with_config(topics, self.flusher.is_some(), context)?;
        replacement.limit = self.limit.clone();
        replacement.transactions = self.transactions.take();
        replacement.reads = self.reads;
        replacement.refused = std::mem::take(&mut self.refused);
        replacement.unusable = self.unusable.take();
        replacement.comparison = Comparison::new(self.comparison.seen.clone());
        *self = replacement;
        let pipeline = self.producer.context().pipeline();
        if bytes < TOPIC_LIMIT_WARNING_BYTES {
            warn!(
                pipeline,
                topic,
                bytes,
                "the topic's max.message.bytes is so small that it slows down delivery to all topics of the pipeline: raise it, \
                 and restart Walpost"
            );
        } else {
            info!(
                pipeline,
                topic, bytes, "limiting batches to the topic's max.message.bytes"
            );
        }
        Ok(true)
    }
}

impl Drop for KafkaSink {
    fn drop(&mut self) {
        self.producer.context().abandon();
    }
}

impl Sink for KafkaSink {
    fn produce(&mut self, record: &Record<'_>, tag: Tag) -> Result<Produced, SinkError> {
        let Some(known) = self.known.get_mut(record.topic) else {
            let unusable = self.unusable.as_ref();
            let reason = unusable.and_then(|topics| topics.reason(record.topic, Instant::now()));
            return match reason {
                Some(reason) => Err(self.topics.unusable_error(record.topic, reason)),
                None => Ok(Produced::NewTopic),
            };
        };
        if !self.refused.is_empty()
            && let Some(refused) = self.refused.iter().find(|refused| refused.is(record))
        {
            return Err(self.limit.refusal(refused));
        }
        let Err(code) = known.topic.produce(record, Some(tag)) else {
            self.unflushed = true;
            self.comparison.is_due = true;
            return Ok(Produced::Taken);
        };
        let topic = record.topic.to_owned();
        match (code, record.partition) {
            (RDKafkaErrorCode::QueueFull, _) => Ok(Produced::Full),
            (RDKafkaErrorCode::MessageSizeTooLarge, _) => Err(SinkError::TooLarge {
                topic,
                bytes: record.key.map_or(0, <[u8]>::len)
                    + record.payload.map_or(0, <[u8]>::len)
                    + record
                        .headers
                        .iter()
                        .map(|(name, value)| name.len() + value.map_or(0, <[u8]>::len))
                        .sum::<usize>(),
                limit: limits::record_bytes_max(self.topics.config()),
                brokers: self.topics.brokers(),
            }),
            (RDKafkaErrorCode::UnknownPartition, Some(partition)) => {
                if known.is_absent(partition, self.reads) {
                    return Err(SinkError::NoPartition { topic, partition });
                }
                // librdkafka refreshes metadata every five minutes, so the partition may have been
                // added after the last refresh.
                known.doubted = Some((partition, self.reads));
                Ok(Produced::NewTopic)
            }
            (RDKafkaErrorCode::UnknownTopic | RDKafkaErrorCode::UnknownTopicOrPartition, _) => {
                self.known.remove(record.topic);
                Ok(Produced::NewTopic)
            }
            _ => Err(SinkError::Broken(code.to_string())),
        }
    }

    fn flush(&mut self, busy: bool) -> Result<(), SinkError> {
        if !busy
            && std::mem::take(&mut self.unflushed)
            && let Some(flusher) = &self.flusher
        {
            flusher.flush();
        }
        Ok(())
    }

    fn prepare(&mut self, topic: &str, ahead: impl FnOnce() -> Vec<String>) -> Preparation {
        let wanted = self.known.get(topic).and_then(KnownTopic::wanted_partition);
        let unusable = self.unusable.as_ref();
        let unusable = unusable.filter(|unusable| wanted.is_none() && unusable.applies_to(topic));
        let unusable = unusable.map(Arc::clone);
        let mut others = Vec::new();
        if self.topics.creates() || unusable.is_some() {
            others = ahead();
            others.retain(|other| other != topic && !self.known.contains_key(other.as_str()));
        }
        let topic = topic.to_owned();
        let producer = Arc::clone(&self.producer);
        let (topics, limit, batch_bytes) =
            (self.topics.clone(), self.limit.clone(), self.batch_bytes);
        let seen = self.comparison.seen.clone();
        Box::pin(async move {
            let lookup_producer = Arc::clone(&producer);
            let prepared = match unusable {
                None => {
                    let name = topic.clone();
                    topics.prepare(lookup_producer, name, wanted, others).await
                }
                Some(unusable) => {
                    let lookup = TopicLookup::new(topics, lookup_producer, unusable);
                    lookup.prepare(topic.clone(), others).await
                }
            };
            if !matches!(prepared, Ok(Prepared::Usable { .. })) && seen.contains(&topic) {
                let (producer, topics) = (Arc::clone(&producer), [topic.clone()]);
                let _ = spawn_blocking(move || seen.compare(&producer, &topics)).await;
            }
            let prepared = prepared?;
            if prepared != Prepared::Unusable {
                limit.query_limit(Arc::clone(&producer), topic).await;
                if limit.below(batch_bytes).is_some() {
                    drain(producer).await;
                }
            }
            Ok(prepared)
        })
    }

    fn prepared(&mut self, topic: &str, prepared: Prepared) -> Result<(), SinkError> {
        let Prepared::Usable { partitions } = prepared else {
            return Ok(());
        };
        if self.replace_if_limit_exceeded()? {
            return Ok(());
        }
        let doubted = self.known.get(topic).and_then(|known| known.doubted);
        let known = KnownTopic {
            topic: open_topic(&self.producer, topic)?,
            doubted: None,
            absent: doubted.map(|(partition, reads)| AbsentPartition {
                first: partitions,
                answered: Instant::now(),
                reads,
                is_awaited: usize::try_from(partition).is_ok_and(|doubted| doubted >= partitions),
            }),
        };
        if self.known.insert(topic.into(), known).is_none() {
            self.comparison.new.add(topic);
        }
        if let Some(transactions) = &mut self.transactions {
            transactions.partitions.insert(topic.to_owned(), partitions);
        }
        Ok(())
    }

    fn read_more(&mut self) {
        self.reads += 1;
    }

    fn take_over(&mut self) -> TakeOver<'_> {
        Box::pin(async move {
            if let Some(limit_query) = &mut self.limit_query {
                // If the query failed, the batch size limit is queried again when the topic is
                // looked up.
                let _ = limit_query.await;
                self.limit_query = None;
                self.replace_if_limit_exceeded()?;
            }
            let Some(transactions) = &mut self.transactions else {
                return Err(transactions_unsupported());
            };
            if std::mem::replace(&mut transactions.taken_over, true) {
                let reason = "the producer has already initialized transactions".to_owned();
                return Err(SinkError::Broken(reason));
            }
            let checkpoints = transactions.checkpoints.clone();
            checkpoints.take_over(Arc::clone(&self.producer)).await
        })
    }

    fn commit(&mut self, checkpoint: &mut Checkpoint) -> Commit {
        let Some(transactions) = &mut self.transactions else {
            return Box::pin(std::future::ready(Err(transactions_unsupported())));
        };
        match transactions.produce(&self.producer, &self.known, checkpoint) {
            Ok(()) => Box::pin(transaction::commit(
                transactions.checkpoints.clone(),
                Arc::clone(&self.producer),
            )),
            Err(error) => Box::pin(std::future::ready(Err(error))),
        }
    }

    fn wait_for_response(&mut self) -> Answer {
        let (producer, brokers) = (Arc::clone(&self.producer), Arc::clone(&self.brokers));
        Box::pin(async move {
            loop {
                brokers.readd_if_due(&producer);
                let producer = Arc::clone(&producer);
                let query = spawn_blocking(move || {
                    query_metadata(&producer, None) || producer.context().refusal().is_some()
                });
                if query.await.unwrap_or(true) {
                    return;
                }
                tokio::time::sleep(OUTAGE_QUERY_INTERVAL).await;
            }
        })
    }

    /// Checks whether an ongoing outage has ended. If there are no records to deliver, nothing else
    /// detects the end of the outage.
    fn tend(&mut self) {
        if !self.producer.context().is_down() {
            self.comparison.start_if_due(&self.producer, &self.known);
        }
        if self.outage_checked_at.elapsed() < OUTAGE_QUERY_INTERVAL {
            return;
        }
        self.outage_checked_at = Instant::now();
        self.brokers.readd_if_due(&self.producer);
        if !self.producer.context().is_down() {
            return;
        }
        let producer = Arc::clone(&self.producer);
        let topic = self.known.keys().next().cloned();
        spawn_blocking(move || query_metadata(&producer, topic.as_deref()));
    }

    /// Returns false during an outage, because the sink is needed to detect the end of the outage.
    fn is_at_rest(&self) -> bool {
        self.producer.in_flight_count() == 0
            && self.transactions.is_none()
            && !self.producer.context().is_down()
    }
}

/// Waits until no record is in flight. The caller must not produce records in the meantime.
async fn drain(producer: Arc<BaseProducer<Context>>) {
    let drained = spawn_blocking(move || {
        while !native::flush(&producer, FLUSH_POLL_INTERVAL) && !producer.context().is_abandoned() {
        }
    });
    // Ignore an error: the caller checks whether records are still in flight.
    let _ = drained.await;
}

/// Requests metadata from the brokers, passes the outcome to the context, and returns whether a
/// broker responded.
fn query_metadata(producer: &BaseProducer<Context>, topic: Option<&str>) -> bool {
    let client = producer.client();
    match client.fetch_metadata(topic, REQUEST_TIMEOUT) {
        Ok(_) => client.context().record_response(),
        Err(error) => client.context().record_unreachable(&describe(&error)),
    }
    !client.context().is_down()
}

impl KnownTopic {
    /// Returns true if a lookup has shown that the topic lacks this partition, and the result is
    /// recent enough to apply to the current row.
    fn is_absent(&mut self, partition: i32, reads: u64) -> bool {
        self.absent.as_mut().is_some_and(|absent| {
            let is_awaited = std::mem::take(&mut absent.is_awaited);
            usize::try_from(partition).is_ok_and(|partition| partition >= absent.first)
                && (is_awaited || absent.reads == reads)
                && absent.answered.elapsed() < LOOKUP_LIFETIME
        })
    }

    /// Returns the partition to look up, if any.
    fn wanted_partition(&self) -> Option<Wanted> {
        let absent = self.absent.as_ref();
        let is_recent =
            absent.is_some_and(|absent| absent.answered.elapsed() < NEW_PARTITION_DELAY_INTERVAL);
        Some(Wanted {
            partition: usize::try_from(self.doubted?.0).ok()?,
            within: if is_recent {
                Duration::ZERO
            } else {
                NEW_PARTITION_DELAY
            },
        })
    }
}

impl Transactions {
    /// Produces the checkpoint as the last record of the open transaction.
    fn produce(
        &mut self,
        producer: &Arc<BaseProducer<Context>>,
        known: &HashMap<Box<str>, KnownTopic>,
        checkpoint: &mut Checkpoint,
    ) -> Result<(), SinkError> {
        let bytes_max = self.checkpoints.partitions_bytes_max();
        for (topic, found) in std::mem::take(&mut self.partitions) {
            let in_use = |topic: &str| known.contains_key(topic);
            let before = checkpoint.record_partitions(&topic, found, bytes_max, in_use);
            if let Some(before) = before
                && before != found
            {
                warn!(
                    pipeline = self.checkpoints.pipeline,
                    topic,
                    before,
                    found,
                    "the topic's number of partitions has changed, so keys now map to different partitions: the order of \
                     events with the same key is not preserved across the change"
                );
            }
        }
        let topic = match &self.topic {
            Some(topic) => topic,
            None => self
                .topic
                .insert(open_topic(producer, self.checkpoints.topic())?),
        };
        self.checkpoints.produce(topic, checkpoint)
    }
}

fn open_topic(producer: &Arc<BaseProducer<Context>>, topic: &str) -> Result<Topic, SinkError> {
    Topic::open(producer, topic).map_err(|code| SinkError::Broken(code.to_string()))
}

#[cfg(test)]
mod tests {
    use rdkafka::config::ClientConfig;
    use rdkafka::mocking::MockCluster;
    use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};

    use super::*;
    use crate::delivery::watermark::Watermark;
    use crate::kafka::context::UndeliveredRecord;
    use crate::kafka::properties::{brokers, transactional};
    use crate::kafka::settings::CheckpointSettings;
    use crate::model::lsn::Lsn;
    use crate::model::window::Window;
    use crate::outbox::headers::Headers;

    const TOPIC: &str = "t";
    const NEVER_MILLIS: &str = "900000";
    const TIMEOUT: Duration = Duration::from_secs(20);

    type Cluster = MockCluster<'static, rdkafka::producer::DefaultProducerContext>;

    /// Creates a sink for a mock broker whose topic has one partition. If the configuration is
    /// transactional, begins a transaction. `configure` overrides all other settings.
    fn sink(configure: impl FnOnce(&mut ClientConfig)) -> (Cluster, KafkaSink, Watermark) {
        let cluster = MockCluster::new(1).expect("mock cluster");
        cluster.create_topic(TOPIC, 1, 1).expect("topic");
        let brokers = ("bootstrap.servers".to_owned(), cluster.bootstrap_servers());
        let mut config = client_config(&[brokers].into(), "test");
        configure(&mut config);
        let window = Window {
            records: 10,
            bytes: 10_000,
        };
        let mut watermark = Watermark::new(window, Lsn::ZERO);
        let context = Context::new("test", Grants::for_config(&config), watermark.deliveries());
        let is_transactional = config.get("transactional.id").is_some();
        let mut sink =
            KafkaSink::with_config(Topics::new(config, None), true, context).expect("sink");
        if is_transactional {
            let initialized = sink.producer.init_transactions(TIMEOUT);
            initialized.expect("a response");
            sink.producer.begin_transaction().expect("a transaction");
        }
        let usable = Prepared::Usable { partitions: 1 };
        sink.prepared(TOPIC, usable).expect("opened");
        watermark.begin(Lsn(1)).expect("begin");
        (cluster, sink, watermark)
    }

    /// Produces one record.
    fn produce_one(sink: &mut KafkaSink, watermark: &mut Watermark, payload: &[u8]) {
        let tag = watermark
            .reserve(1)
            .expect("an open window")
            .expect("a free tag");
        let record = Record {
            topic: TOPIC,
            partition: Some(0),
            timestamp_millis: None,
            key: None,
            payload: Some(payload),
            headers: Headers::default(),
        };
        let before = Instant::now();
        while sink.produce(&record, tag) != Ok(Produced::Taken) {
            // Retry, because librdkafka looks up the topic's partitions in the background.
            assert!(before.elapsed() < TIMEOUT, "not accepted");
            std::thread::yield_now();
        }
    }

    /// Creates a sink with one queued record whose batch lingers indefinitely.
    fn sink_with_record() -> (Cluster, KafkaSink, Watermark) {
        let (cluster, mut sink, mut watermark) = sink(|config| {
            config.set("linger.ms", NEVER_MILLIS);
        });
        produce_one(&mut sink, &mut watermark, b"x");
        (cluster, sink, watermark)
    }

    /// Produces a record that the broker rejects temporarily while a second record is in flight.
    /// The mock broker accepts the second record, as a real broker does if it has no state for the
    /// producer yet.
    async fn reject_first(
        configure: impl FnOnce(&mut ClientConfig),
    ) -> (Cluster, KafkaSink, Watermark) {
        let code = RDKafkaRespErr::RD_KAFKA_RESP_ERR_NOT_LEADER_FOR_PARTITION;
        reject_first_with(code, &[b"second"], configure).await
    }

    async fn reject_first_with(
        code: RDKafkaRespErr,
        following: &[&[u8]],
        configure: impl FnOnce(&mut ClientConfig),
    ) -> (Cluster, KafkaSink, Watermark) {
        const ROUND_TRIP: Duration = Duration::from_millis(400);
        let (cluster, mut sink, mut watermark) = sink(|config| {
            config.set("linger.ms", "0");
            config.set("retry.backoff.ms", "1000");
            configure(config);
        });
        // After this record is delivered, librdkafka can send the following records immediately.
        produce_one(&mut sink, &mut watermark, b"before");
        watermark.empty().await;
        cluster.request_errors(RDKafkaApiKey::Produce, &[code]);
        cluster
            .broker_round_trip_time(1, ROUND_TRIP)
            .expect("a slow broker");
        produce_one(&mut sink, &mut watermark, b"first");
        tokio::time::sleep(ROUND_TRIP / 4).await;
        for payload in following {
            produce_one(&mut sink, &mut watermark, payload);
        }
        let settled = tokio::time::timeout(TIMEOUT, watermark.empty()).await;
        assert!(settled.is_ok(), "neither delivered nor failed");
        (cluster, sink, watermark)
    }

    /// Returns the payloads in the topic, in order.
    fn payloads(cluster: &Cluster) -> Vec<Vec<u8>> {
        use rdkafka::consumer::{BaseConsumer, Consumer};
        use rdkafka::{Message, TopicPartitionList};
        let consumer: BaseConsumer = ClientConfig::new()
            .set("bootstrap.servers", cluster.bootstrap_servers())
            .set("group.id", "test")
            .set("enable.partition.eof", "true")
            .create()
            .expect("consumer");
        let mut from = TopicPartitionList::new();
        from.add_partition_offset(TOPIC, 0, rdkafka::Offset::Beginning)
            .expect("offset");
        consumer.assign(&from).expect("assigned");
        let mut payloads = Vec::new();
        while let Some(Ok(message)) = consumer.poll(TIMEOUT) {
            payloads.extend(message.payload().map(<[u8]>::to_vec));
        }
        payloads
    }

    #[tokio::test]
    async fn treats_an_unacknowledged_record_as_failed() {
        let (_cluster, _sink, watermark) = reject_first(|config| {
            config.set("max.in.flight.requests.per.connection", "5");
        })
        .await;
        let failure = watermark.deliveries().failure().expect("a failure");
        assert!(!failure.permanent);
        let expected = "acknowledged later records for";
        assert!(failure.reason.contains(expected), "{failure:?}");
    }

    /// Without the check for unacknowledged records, librdkafka would commit the transaction, and
    /// the checkpoint would wrongly indicate that Kafka has the record.
    #[tokio::test]
    async fn does_not_commit_a_transaction_with_an_unacknowledged_record() {
        let mut settings = ProducerSettings {
            pipeline: "test".to_owned(),
            slot: "slot".to_owned(),
            properties: Properties::new(),
            create_topics: None,
            credentials: Credentials::default(),
            checkpoints: Some(CheckpointSettings {
                topic: "walpost-checkpoints".to_owned(),
                replication: -1,
            }),
            warns_of_compaction: false,
            constant_topic: None,
            dead_letter_topic: None,
        };
        let (_cluster, mut sink, mut watermark) = sink(|config| {
            settings.properties = [("bootstrap.servers".to_owned(), brokers(config))].into();
            config.set("linger.ms", "0");
            *config = transactional(config.clone(), "test");
        });
        let checkpoints = Checkpoints::for_producer(&settings).expect("exactly-once");
        let producer = Arc::clone(&sink.producer);
        let commit = || transaction::commit(checkpoints.clone(), Arc::clone(&producer));
        produce_one(&mut sink, &mut watermark, b"first");
        watermark.empty().await;
        assert_eq!(commit().await, Ok(()));
        produce_one(&mut sink, &mut watermark, b"second");
        watermark.empty().await;
        producer
            .context()
            .record_unacknowledged(&UndeliveredRecord {
                topic: TOPIC.to_owned(),
                partition: 0,
                reason: String::new(),
                position: None,
                bytes: 0,
                content: 0,
            });
        let refused = commit().await;
        let Err(SinkError::Broken(reason)) = refused else {
            panic!("{refused:?}");
        };
        assert!(
            reason.contains("no broker has acknowledged a record"),
            "{reason}"
        );
    }

    /// The rejected record is resent later, so any following record that was delivered in the
    /// meantime would be out of order. A record that librdkafka has already put into a request is
    /// sent anyway. A real broker rejects that record because of the gap in the sequence numbers,
    /// which the mock broker does not check.
    #[tokio::test]
    async fn does_not_send_records_after_a_permanently_rejected_one() {
        let code = RDKafkaRespErr::RD_KAFKA_RESP_ERR_MSG_SIZE_TOO_LARGE;
        let following = [&b"second"[..], b"third", b"fourth"];
        let (cluster, _sink, watermark) = reject_first_with(code, &following, |config| {
            config.set("batch.num.messages", "1");
        })
        .await;
        // librdkafka can report the failures of later records before the failure of the rejected
        // record.
        let cause = async {
            while !watermark
                .deliveries()
                .failure()
                .is_some_and(|failure| failure.permanent)
            {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let reported = tokio::time::timeout(TIMEOUT, cause).await;
        assert!(reported.is_ok(), "{:?}", watermark.deliveries().failure());
        let found = payloads(&cluster);
        assert!(found.starts_with(&[b"before".to_vec()]), "{found:?}");
        for payload in [&b"first"[..], b"third", b"fourth"] {
            assert!(!found.contains(&payload.to_vec()), "{found:?}");
        }
    }

    #[tokio::test]
    async fn names_supported_compression_types_when_the_broker_rejects_one() {
        for code in [
            RDKafkaRespErr::RD_KAFKA_RESP_ERR_UNSUPPORTED_COMPRESSION_TYPE,
            RDKafkaRespErr::RD_KAFKA_RESP_ERR_UNSUPPORTED_FOR_MESSAGE_FORMAT,
        ] {
            let (_cluster, _sink, watermark) = reject_first_with(code, &[], |_| {}).await;
            let failure = watermark.deliveries().failure().expect("a failure");
            assert!(failure.permanent, "{failure:?}");
            let remedy = "\"compression.type\" = \"gzip\"";
            assert!(failure.reason.contains(remedy), "{failure:?}");
        }
    }

    #[tokio::test]
    async fn fails_permanently_if_brokers_do_not_support_idempotent_producers() {
        let (_cluster, sink, watermark) = sink(|_| {});
        let context = sink.producer.context();
        context.error(RDKafkaErrorCode::Fatal, "Local: Fatal error");
        assert_eq!(watermark.deliveries().failure(), None);
        let reason = "Idempotent producer not supported by any of the 3 connected broker(s)";
        context.error(RDKafkaErrorCode::Fatal, reason);
        let failure = watermark.deliveries().failure().expect("a failure");
        assert!(failure.permanent, "{failure:?}");
        assert!(failure.reason.contains("enable.idempotence"), "{failure:?}");
    }

    #[tokio::test]
    async fn keeps_records_in_order_after_a_temporary_rejection() {
        let (cluster, _sink, watermark) = reject_first(|_| {}).await;
        assert_eq!(watermark.deliveries().failure(), None);
        assert_eq!(payloads(&cluster), [&b"before"[..], b"first", b"second"]);
    }

    #[tokio::test]
    async fn flush_sends_the_batch_immediately_while_traffic_is_low() {
        let (_cluster, mut sink, watermark) = sink_with_record();
        let before = Instant::now();
        while watermark.in_flight().records > 0 {
            assert!(before.elapsed() < TIMEOUT, "not sent");
            // A flush has no effect until the broker connection is established.
            sink.unflushed = true;
            sink.flush(false).expect("flush");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    #[tokio::test]
    async fn flush_keeps_filling_the_batch_while_traffic_is_high() {
        let (_cluster, mut sink, watermark) = sink_with_record();
        sink.flush(true).expect("flush");
        let sent = tokio::time::timeout(Duration::from_millis(500), watermark.empty()).await;
        assert!(sent.is_err(), "a batch was sent before it was full");
    }
}
