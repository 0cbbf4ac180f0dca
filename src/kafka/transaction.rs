//! Exactly-once delivery: commits records and a checkpoint in the same Kafka transaction.
//!
//! Calls to librdkafka block, so they run on Tokio's threads for blocking tasks. Transactions are
//! specified in KIP-98, and fencing in KIP-360 and KIP-447.

use std::ffi::CStr;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::admin::{AdminOptions, ResourceSpecifier};
use rdkafka::client::ClientContext;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::error::{KafkaError, KafkaResult, RDKafkaErrorCode as Code};
use rdkafka::message::Message;
use rdkafka::producer::{BaseProducer, Producer};
use rdkafka::{Offset, TopicPartitionList};
use tokio::time::timeout;
use tracing::{debug, warn};

use super::context::Context;
use super::credentials::Credentials;
use super::drop_in_background::DropInBackground;
use super::grants::Grants;
use super::native::{self, NewTopic, Topic};
use super::partition_ends::{self, PartitionEnds};
use super::probe;
use super::properties::{
    client_config, create_with_context, describe, leave_producers, transactional,
};
use super::settings::{CheckpointSettings, ProducerSettings};
use super::topics::{CreatedTopic, Lookup, Refusals, Topics, interpret_metadata};
use crate::delivery::checkpoint::Checkpoint;
use crate::escape::shell_word_on_one_line;
use crate::outbox::Record;
use crate::outbox::headers::Headers;
use crate::sink::SinkError;

/// Timeout for a single call; calls that time out are retried.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// How long to wait for other producers to end an open transaction in the checkpoint topic.
const OPEN_TRANSACTION_TIMEOUT: Duration = Duration::from_secs(120);
const RETRY_DELAY: Duration = Duration::from_millis(100);
/// How often a flush in progress checks whether the sink has been dropped.
const FLUSH_POLL_INTERVAL: Duration = Duration::from_millis(250);
/// How long to wait for a broker to recover, or to receive the metadata of a newly created topic.
const BROKER_RECOVERY_TIMEOUT: Duration = Duration::from_secs(10);
/// Delay after a commit, to let the brokers write the transaction markers. If the next transaction
/// starts earlier, librdkafka delays it by 20 ms.
const MARKER_DELAY: Duration = Duration::from_millis(2);
/// A search for a checkpoint starts with this many offsets at the end of the topic.
const TAIL_OFFSETS: i64 = 256;
/// The total size of the topic names in a checkpoint is limited to this number of bytes or half of
/// the maximum record size, whichever is smaller.
const TOPIC_NAMES_BYTES_MAX: usize = 64 << 10;
const TOPIC_NAMES_RECORD_PARTS: usize = 2;
/// Segment size of the checkpoint topic, in bytes. The size is small because compaction works on
/// whole segments, and only the last of each pipeline's many small checkpoints is needed.
const SEGMENT_BYTES: &CStr = c"16777216";

/// Reads and writes the checkpoints of a pipeline.
#[derive(Clone)]
pub struct Checkpoints {
    /// Name of the pipeline, which is also the key of its checkpoint records.
    pub(super) pipeline: String,
    settings: CheckpointSettings,
    /// Configuration of the producer.
    pub(super) config: ClientConfig,
    pub(super) credentials: Credentials,
}

/// The context of a consumer that reads checkpoints. Errors are logged only at the debug level,
/// because the failing calls also return them.
pub(super) struct Reader;

impl ClientContext for Reader {
    /// Overrides the default method, which would log the expected end of a partition as an error.
    fn error(&self, error: KafkaError, reason: &str) {
        debug!(%error, reason, "error while reading checkpoints");
    }
}

impl ConsumerContext for Reader {}

type Client = DropInBackground<BaseConsumer<Reader>>;

/// The consumers that read the checkpoint topic.
struct Readers {
    /// The consumer that also reads uncommitted records, so that the actual end of the topic is
    /// visible even while a transaction is open.
    any: Client,
    committed: Client,
}

impl Checkpoints {
    /// Returns the pipeline's [`Checkpoints`], or `None` if the pipeline does not use checkpoints.
    pub fn for_producer(producer: &ProducerSettings) -> Option<Self> {
        let settings = producer.checkpoints.clone()?;
        let name = &producer.pipeline;
        let mut config = client_config(&producer.properties, &format!("walpost-{name}"));
        producer.credentials.renew(&mut config);
        let id = format!("walpost-{name}-{}", producer.slot);
        Some(Self {
            pipeline: name.clone(),
            settings,
            config: transactional(config, &id),
            credentials: producer.credentials.clone(),
        })
    }

    /// Returns the maximum total size of the topic names in a checkpoint, in bytes, to be passed to
    /// [`Checkpoint::record_partitions`].
    pub(super) fn partitions_bytes_max(&self) -> usize {
        let largest = self.config.get("message.max.bytes");
        let largest = largest.and_then(|bytes| bytes.trim().parse::<usize>().ok());
        let part = largest.map(|bytes| bytes / TOPIC_NAMES_RECORD_PARTS);
        part.map_or(TOPIC_NAMES_BYTES_MAX, |part| {
            part.min(TOPIC_NAMES_BYTES_MAX)
        })
    }

    pub(super) fn topic(&self) -> &str {
        &self.settings.topic
    }

    /// Returns the last checkpoint, without fencing other producers.
    ///
    /// # Errors
    /// Returns an error if the topic can't be read, or if the last record is not a valid
    /// checkpoint.
    pub async fn read_last(self) -> Result<Option<Checkpoint>, SinkError> {
        let config = leave_producers(self.config.clone());
        let (brokers, credentials) = (self.topics().brokers(), self.credentials.clone());
        let found = blocking(move || match self.lookup()? {
            Some((Lookup::Missing, _)) => Ok(None),
            Some((Lookup::Denied(reason), _)) => Err(self.denied(reason)),
            Some((Lookup::Present(_), any)) => self.read(Some(self.readers(any)?), &|| false),
            None => self.read(None, &|| false),
        })
        .await;
        match found {
            Err(SinkError::Broken(reason)) => {
                Err(match probe::refusal(config, &credentials).await {
                    Some(reason) => SinkError::Refused { brokers, reason },
                    None => SinkError::Broken(reason),
                })
            }
            found => found,
        }
    }

    /// Fences every earlier producer of the pipeline, begins a transaction, and returns the last
    /// committed checkpoint.
    pub(super) async fn take_over(
        self,
        producer: Arc<BaseProducer<Context>>,
    ) -> Result<Option<Checkpoint>, SinkError> {
        // Fencing, examining the topic and connecting the readers all require waiting for the
        // brokers, so these steps run concurrently.
        let fencing = Arc::clone(&producer);
        let mut fenced = pin!(blocking(move || {
            // Wait until the producer is connected. Otherwise, librdkafka would retry only after
            // half a second.
            native::wait_for_broker(&fencing, CALL_TIMEOUT);
            init(&fencing)?;
            begin_transaction(&fencing)
        }));
        let any = self.find_topic(&producer).await?;
        let connecting = self.clone();
        let readers = blocking(move || connecting.readers(any));
        self.check_policy_in_time().await?;
        let mut readers = Some(readers.await?);
        match timeout(CALL_TIMEOUT, &mut fenced).await {
            Ok(fenced) => fenced?,
            Err(_) => {
                // While the consumers are unused, their events are not processed, so the consumers
                // can't recover from an outage or a password change. Discard the consumers: `read`
                // creates new ones.
                readers = None;
                fenced.await?;
            }
        }
        // Read the checkpoint only after fencing: until then, an earlier producer could commit
        // another checkpoint.
        blocking(move || self.read(readers, &|| producer.context().is_abandoned())).await
    }

    /// Adds the checkpoint to the open transaction.
    pub(super) fn produce(&self, to: &Topic, checkpoint: &Checkpoint) -> Result<(), SinkError> {
        let text = checkpoint.encode();
        let record = Record {
            topic: self.topic(),
            partition: Some(0),
            timestamp_millis: None,
            key: Some(self.pipeline.as_bytes()),
            payload: Some(&text),
            headers: Headers::default(),
        };
        to.produce(&record, None)
            .map_err(|code| SinkError::Broken(format!("failed to queue the checkpoint: {code}")))
    }

    /// Waits until the topic exists, creating it if necessary, and returns the client that found
    /// the topic.
    async fn find_topic(&self, producer: &Arc<BaseProducer<Context>>) -> Result<Client, SinkError> {
        let topics = self.topics();
        let mut was_requested = false;
        let mut refusals = Refusals::default();
        let (partitions, client) = loop {
            let checkpoints = self.clone();
            match blocking(move || checkpoints.lookup()).await? {
                Some((Lookup::Present(partitions), client)) => {
                    self.credentials.record_accepted();
                    break (partitions, client);
                }
                Some((Lookup::Denied(reason), _)) => return Err(self.denied(reason)),
                Some((Lookup::Missing, _)) if !was_requested => {
                    let created = self.create_topic(&topics).await?;
                    was_requested = !matches!(created, CreatedTopic::NotNow(_));
                    tokio::time::sleep(RETRY_DELAY).await;
                }
                Some((Lookup::Missing, _)) => tokio::time::sleep(RETRY_DELAY).await,
                None => {
                    // Send a request with the producer. The reason for a failure is reported only
                    // in events of the producer, not of the query client.
                    let producer_clone = Arc::clone(producer);
                    blocking(move || {
                        let _ = producer_clone.client().fetch_metadata(None, CALL_TIMEOUT);
                        Ok(())
                    })
                    .await?;
                    refusals.record_no_response(producer, &topics).await?;
                }
            }
        };
        if partitions != 1 {
            return Err(SinkError::CheckpointTopic {
                topic: self.topic().to_owned(),
                found: format!("the topic has {partitions} partitions instead of 1"),
                remedy: "specify another topic in the checkpoint setting".to_owned(),
            });
        }
        Ok(client)
    }

    /// Checks that the topic is compacted. Retries for a while, because a broker may not have
    /// received the topic's metadata yet.
    async fn check_policy_in_time(&self) -> Result<(), SinkError> {
        let topics = self.topics();
        let started_at = Instant::now();
        loop {
            match self.check_policy(&topics).await {
                Err(SinkError::Broken(_)) if started_at.elapsed() < BROKER_RECOVERY_TIMEOUT => {
                    tokio::time::sleep(RETRY_DELAY).await;
                }
                result => return result,
            }
        }
    }

    /// Looks up the topic, and returns the result and the client that was used, or `None` if no
    /// broker responds.
    fn lookup(&self) -> Result<Option<(Lookup, Client)>, SinkError> {
        let client = self.query_client().map_err(creation_error)?;
        let metadata = client.fetch_metadata(Some(self.topic()), CALL_TIMEOUT);
        let found = metadata.ok().map(|metadata| interpret_metadata(&metadata));
        Ok(found.map(|found| (found, client)))
    }

    /// Returns the error for missing permissions on the topic.
    fn denied(&self, reason: String) -> SinkError {
        SinkError::TopicDenied {
            topic: self.topic().to_owned(),
            reason,
            grant: Grants::for_config(&self.config).checkpoints(self.topic()),
        }
    }

    /// Creates a client for queries. Unlike a producer's metadata requests, this client's requests
    /// do not create the topic.
    pub(super) fn query_client(&self) -> KafkaResult<Client> {
        self.client("read_uncommitted", |_| {})
    }

    /// Creates [`Readers`] from the connected client `any` and a new consumer that reads only
    /// committed records.
    fn readers(&self, any: Client) -> Result<Readers, SinkError> {
        let committed = self.client("read_committed", |config| {
            // librdkafka assigns partitions only to a consumer that has a group. The query client
            // does not need partitions, so it is created without a group, and librdkafka does not
            // look up a group coordinator for it.
            config.set("group.id", format!("walpost-{}", self.pipeline));
        });
        let committed = committed.map_err(creation_error)?;
        // Connect the client and find the partition's leader now. If a later query had to do both,
        // it would take half a second longer.
        let _ = committed.fetch_metadata(Some(self.topic()), CALL_TIMEOUT);
        Ok(Readers { any, committed })
    }

    fn client(
        &self,
        isolation: &str,
        configure: impl FnOnce(&mut ClientConfig),
    ) -> KafkaResult<Client> {
        let mut config = leave_producers(self.config.clone());
        self.credentials.renew(&mut config);
        let mut config = partition_ends::read_from_leaders(config);
        config
            .set("allow.auto.create.topics", "false")
            .set("enable.auto.commit", "false")
            .set("enable.partition.eof", "true")
            // At the end of the topic, the broker returns an empty response, but only after this
            // timeout.
            .set("fetch.wait.max.ms", "10")
            .set("auto.offset.reset", "error")
            .set("isolation.level", isolation);
        configure(&mut config);
        let client: BaseConsumer<Reader> = create_with_context(&config, Reader)?;
        self.credentials.set_token_or_warn(client.client());
        Ok(DropInBackground::new(client))
    }

    /// Returns a [`Topics`] value for looking up topics in the cluster.
    pub(super) fn topics(&self) -> Topics {
        let mut topics = Topics::new(self.config.clone(), None);
        topics.set_credentials(self.credentials.clone());
        topics
    }

    async fn create_topic(&self, topics: &Topics) -> Result<CreatedTopic, SinkError> {
        let new = NewTopic {
            name: self.topic().to_owned(),
            partitions: 1,
            replication: self.settings.replication,
            settings: &[
                (c"cleanup.policy", c"compact"),
                (c"segment.bytes", SEGMENT_BYTES),
            ],
        };
        topics.create_topic(new).await
    }

    async fn check_policy(&self, topics: &Topics) -> Result<(), SinkError> {
        const POLICY: &str = "cleanup.policy";
        let options = AdminOptions::new().request_timeout(Some(CALL_TIMEOUT));
        let topic = ResourceSpecifier::Topic(self.topic());
        let unknown = |reason: String| {
            SinkError::Broken(format!(
                "failed to look up the settings of topic {:?}: {reason}",
                self.topic()
            ))
        };
        let admin = topics.admin().await;
        let admin = admin.map_err(|error| unknown(describe(&error)))?;
        let started_at = Instant::now();
        let policy = loop {
            let found = admin
                .describe_configs([&topic], &options)
                .await
                .map_err(|error| unknown(describe(&error)))?
                .into_iter()
                .next()
                .ok_or_else(|| unknown("the response is empty".to_owned()))?
                .map_err(|code| unknown(code.to_string()))?;
            let policy = found.get(POLICY).and_then(|entry| entry.value.clone());
            match policy {
                Some(policy) => break policy,
                // The response has no entries if the principal is not allowed to see the topic's
                // settings, or if the queried broker has not received the metadata of a new topic
                // yet.
                None if started_at.elapsed() < BROKER_RECOVERY_TIMEOUT => {
                    tokio::time::sleep(RETRY_DELAY).await
                }
                None => {
                    let reason = format!("the brokers did not return the topic's {POLICY}");
                    return Err(self.denied(reason));
                }
            }
        };
        if policy == "compact" {
            return Ok(());
        }
        Err(SinkError::CheckpointTopic {
            topic: self.topic().to_owned(),
            found: format!("the topic's {POLICY} is {policy} instead of compact"),
            remedy: format!(
                "kafka-configs.sh --bootstrap-server {} --alter --entity-type topics --entity-name {} --add-config \
                 {POLICY}=compact",
                shell_word_on_one_line(&topics.brokers()),
                self.topic()
            ),
        })
    }

    /// Returns the last committed checkpoint of the pipeline. Creates readers if none were passed.
    /// If the readers fail, retries with new readers for a while, unless `is_abandoned` returns
    /// true.
    fn read(
        &self,
        mut readers: Option<Readers>,
        is_abandoned: &dyn Fn() -> bool,
    ) -> Result<Option<Checkpoint>, SinkError> {
        let started_at = Instant::now();
        loop {
            let readers = match readers.take() {
                Some(readers) => readers,
                None => self.readers(self.query_client().map_err(creation_error)?)?,
            };
            match self.read_once(&readers, is_abandoned) {
                Err(SinkError::Broken(_))
                    if started_at.elapsed() < BROKER_RECOVERY_TIMEOUT && !is_abandoned() =>
                {
                    std::thread::sleep(RETRY_DELAY);
                }
                result => return result,
            }
        }
    }

    fn read_once(
        &self,
        readers: &Readers,
        is_abandoned: &dyn Fn() -> bool,
    ) -> Result<Option<Checkpoint>, SinkError> {
        let broken = |error: KafkaError| {
            let reason = format!("failed to read checkpoints: {}", describe(&error));
            match error.rdkafka_error_code() {
                Some(Code::TopicAuthorizationFailed) => self.denied(reason),
                _ => SinkError::Broken(format!("topic {:?}: {reason}", self.topic())),
            }
        };
        let Readers { any, committed } = readers;
        let (low, end) = any
            .fetch_watermarks(self.topic(), 0, CALL_TIMEOUT)
            .map_err(broken)?;
        // Records after the start of an open transaction are hidden. If another pipeline has a
        // transaction open, the hidden records may include this pipeline's last checkpoint.
        let started_at = Instant::now();
        let mut is_logged = false;
        while committed
            .fetch_watermarks(self.topic(), 0, CALL_TIMEOUT)
            .map_err(broken)?
            .1
            < end
        {
            if is_abandoned() {
                return Err(abandoned());
            }
            let (pipeline, topic, waited) = (&self.pipeline, self.topic(), started_at.elapsed());
            if waited > OPEN_TRANSACTION_TIMEOUT {
                return Err(SinkError::Broken(format!(
                    "a transaction in topic {topic:?} has been open for more than {OPEN_TRANSACTION_TIMEOUT:?}. To find \
                     out whether the transaction is hanging, run: kafka-transactions.sh --bootstrap-server {} \
                     find-hanging --topic {topic}. If the command lists the transaction, abort it in its other topics \
                     first, and in this topic last",
                    shell_word_on_one_line(&self.topics().brokers())
                )));
            }
            if waited > BROKER_RECOVERY_TIMEOUT && !std::mem::replace(&mut is_logged, true) {
                warn!(
                    pipeline,
                    topic,
                    "an open transaction in the topic hides the last checkpoint; waiting for the transaction to end"
                );
            }
            std::thread::sleep(RETRY_DELAY);
        }
        let mut tail = TAIL_OFFSETS;
        loop {
            let from = low.max(end.saturating_sub(tail));
            if let Some(found) = self.last_since(committed, from, end).map_err(broken)? {
                let (offset, text) = found;
                return Checkpoint::decode(&text).map(Some).map_err(|error| {
                    SinkError::Checkpoint {
                        pipeline: self.pipeline.clone(),
                        place: format!("topic {:?}, offset {offset}", self.topic()),
                        error,
                    }
                });
            }
            if from == low {
                return Ok(None);
            }
            tail = tail.saturating_mul(16);
        }
    }

    /// Returns the offset and payload of the last record that has the pipeline's key, among the
    /// offsets from `from` (inclusive) to `end` (exclusive).
    fn last_since(
        &self,
        consumer: &BaseConsumer<Reader>,
        from: i64,
        end: i64,
    ) -> Result<Option<(i64, Vec<u8>)>, KafkaError> {
        let mut found = None;
        if from >= end {
            return Ok(found);
        }
        let mut list = TopicPartitionList::new();
        list.add_partition_offset(self.topic(), 0, Offset::Offset(from))?;
        consumer.assign(&list)?;
        let mut ends = PartitionEnds::new(consumer, self.topic());
        let mut last = Instant::now();
        loop {
            match consumer.poll(CALL_TIMEOUT) {
                // Ignore this error: librdkafka looks up the group's coordinator even though the
                // group is not used.
                Some(Err(KafkaError::MessageConsumption(Code::GroupAuthorizationFailed)))
                    if last.elapsed() < CALL_TIMEOUT =>
                {
                    continue;
                }
                Some(Ok(record)) if record.offset() >= end => break,
                Some(Ok(record)) if record.key() == Some(self.pipeline.as_bytes()) => {
                    found = record
                        .payload()
                        .map(|text| (record.offset(), text.to_vec()));
                }
                Some(Err(KafkaError::PartitionEOF(partition))) => {
                    if ends.handle_reported_end(partition, from, end)? {
                        break;
                    }
                    // A broker that lacks some of the records will soon catch up, or another leader
                    // will replace it.
                    if last.elapsed() > CALL_TIMEOUT {
                        return Err(KafkaError::MessageConsumption(Code::OperationTimedOut));
                    }
                    continue;
                }
                Some(Ok(_)) => {}
                Some(Err(error)) => return Err(error),
                None => {
                    return Err(KafkaError::MessageConsumption(Code::OperationTimedOut));
                }
            }
            last = Instant::now();
            ends.record(0);
        }
        Ok(found)
    }
}

/// Commits the open transaction with everything produced so far, and begins the next one.
pub(super) async fn commit(
    checkpoints: Checkpoints,
    producer: Arc<BaseProducer<Context>>,
) -> Result<(), SinkError> {
    let committed = blocking(move || {
        // Flush first, because rdkafka's commit discards delivery reports that have not arrived.
        while !native::flush(&producer, FLUSH_POLL_INTERVAL) {
            // The flush never finishes if the sink was dropped, because the poller thread no longer
            // processes delivery reports.
            if producer.context().is_abandoned() {
                return Err(abandoned());
            }
        }
        // Return an error here, because librdkafka would commit the transaction even if a record
        // without an acknowledgment was lost.
        if producer.context().has_unacknowledged() {
            let reason = "no broker has acknowledged a record of the transaction".to_owned();
            return Err(SinkError::Broken(reason));
        }
        retry(
            &producer,
            || producer.commit_transaction(CALL_TIMEOUT),
            "commit_transaction",
        )?;
        std::thread::sleep(MARKER_DELAY);
        begin_transaction(&producer)
    })
    .await;
    match committed {
        Err(SinkError::TopicDenied { topic, reason, .. }) if topic == checkpoints.topic() => {
            Err(checkpoints.denied(reason))
        }
        committed => committed,
    }
}

/// Converts the error that librdkafka returns if it can't create a client from the properties.
#[expect(clippy::needless_pass_by_value, reason = "passed to map_err")]
fn creation_error(error: KafkaError) -> SinkError {
    SinkError::Configuration(describe(&error))
}

fn init(producer: &BaseProducer<Context>) -> Result<(), SinkError> {
    retry(
        producer,
        || producer.init_transactions(CALL_TIMEOUT),
        "init_transactions",
    )
}

fn begin_transaction(producer: &BaseProducer<Context>) -> Result<(), SinkError> {
    retry(
        producer,
        || producer.begin_transaction(),
        "begin_transaction",
    )
}

/// Returns the error for a librdkafka call that can't be completed because the pipeline's session
/// has ended. The pipeline's next producer fences this producer, which aborts the open transaction.
fn abandoned() -> SinkError {
    SinkError::Broken("the session ended before the Kafka transaction was committed".to_owned())
}

/// Retries the call until it succeeds or fails permanently, or until the producer is abandoned.
fn retry(
    producer: &BaseProducer<Context>,
    call: impl Fn() -> Result<(), KafkaError>,
    name: &str,
) -> Result<(), SinkError> {
    loop {
        if producer.context().is_abandoned() {
            return Err(abandoned());
        }
        let error = match call() {
            Ok(()) => return Ok(()),
            Err(KafkaError::Transaction(error)) => error,
            Err(KafkaError::Flush(_)) => continue,
            Err(error) => {
                return Err(SinkError::Broken(format!("{name}: {}", describe(&error))));
            }
        };
        if error.is_retriable() {
            continue;
        }
        let reason = format!("{name}: {}", error.string());
        let context = producer.client().context();
        let grants = context.grants();
        return Err(match error.code() {
            Code::TopicAuthorizationFailed => match context.denied() {
                Some(topic) => SinkError::TopicDenied {
                    grant: grants.topic(&topic),
                    topic,
                    reason,
                },
                None => SinkError::Broken(reason),
            },
            Code::Fenced | Code::ProducerFenced | Code::InvalidProducerEpoch => {
                SinkError::Fenced(reason)
            }
            Code::TransactionalIdAuthorizationFailed | Code::ClusterAuthorizationFailed => {
                let grant = grants.transactions();
                SinkError::TransactionDenied { reason, grant }
            }
            Code::InvalidTransactionTimeout => SinkError::Configuration(format!(
                "{reason}. Lower transaction.timeout.ms, or raise the brokers' transaction.max.timeout.ms"
            )),
            _ => SinkError::Broken(reason),
        });
    }
}

/// Starts the call immediately, on one of Tokio's threads for blocking tasks.
fn blocking<T: Send + 'static>(
    call: impl FnOnce() -> Result<T, SinkError> + Send + 'static,
) -> impl Future<Output = Result<T, SinkError>> {
    let called = tokio::task::spawn_blocking(call);
    async {
        match called.await {
            Ok(result) => result,
            Err(error) => Err(SinkError::Broken(error.to_string())),
        }
    }
}
