//! Reads topics between given offsets, as a consumer of committed records. The reader does not join
//! a consumer group and does not commit offsets.

use std::collections::HashMap;
use std::io;
use std::ops::ControlFlow;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rdkafka::client::ClientContext;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};
use rdkafka::message::{BorrowedMessage, Message};
use rdkafka::{Offset, TopicPartitionList};
use tracing::{debug, warn};

use super::credentials::Credentials;
use super::grants::Grants;
use super::native;
use super::partition_ends::{self, PartitionEnds};
use super::probe;
use super::properties::{
    Properties, brokers, client_config, create_with_context, describe, leave_producers,
};
use super::topics::{Lookup, interpret_metadata};
use crate::sink::SinkError;

/// Timeout for a single request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// How long to wait for the next record when more records are expected.
const RECORD_TIMEOUT: Duration = Duration::from_secs(30);
const RETRY_DELAY: Duration = Duration::from_millis(100);
/// How often to check whether the consumers' token is about to expire. Only a token that is about
/// to expire is renewed.
const TOKEN_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// A reader for offset ranges of topics.
pub(crate) struct TopicReader {
    config: ClientConfig,
    consumer: BaseConsumer<SilentContext>,
    /// A second consumer, which also receives uncommitted records.
    uncommitted: BaseConsumer<SilentContext>,
    credentials: Credentials,
    token_state: Mutex<ConsumerTokens>,
}

/// State of the consumers' tokens.
#[derive(Default)]
struct ConsumerTokens {
    /// When Walpost last tried to set a token for both consumers.
    attempted_at: Option<Instant>,
    /// Whether the last attempt failed. Consecutive failures are logged only once.
    has_failed: bool,
}

/// The part of a partition to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub partition: i32,
    /// The first offset to read.
    pub start: i64,
    /// The offset after the last offset to read.
    pub end: i64,
    /// Whether records before the first offset have been removed.
    pub is_cut: bool,
    /// Whether an open transaction hides records after the last offset.
    pub is_hidden: bool,
}

/// An error from reading a topic.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// No broker responds, or the principal may not read the topic.
    #[error(transparent)]
    Sink(#[from] SinkError),
    /// Records were removed while the topic was read.
    #[error(
        "topic {topic:?}: records were removed while the topic was being read, by retention or manually. Run the command again, \
         with a later start time if necessary"
    )]
    Removed { topic: String },
    /// Records could not be stored in a temporary file.
    #[error(
        "failed to use a temporary file: {0}. To use another folder for temporary files, set TMPDIR"
    )]
    Io(#[from] io::Error),
}

/// One record of a topic.
pub(crate) struct ReadRecord<'r>(&'r BorrowedMessage<'r>);

impl<'r> ReadRecord<'r> {
    #[must_use]
    pub(crate) fn topic(&self) -> &'r str {
        self.0.topic()
    }

    #[must_use]
    pub(crate) fn partition(&self) -> i32 {
        self.0.partition()
    }

    #[must_use]
    pub(crate) fn offset(&self) -> i64 {
        self.0.offset()
    }

    #[must_use]
    pub(crate) fn key(&self) -> Option<&'r [u8]> {
        self.0.key()
    }

    /// Returns the record's timestamp in milliseconds since 1970. The topic's settings determine
    /// whether this is the creation time or the append time.
    #[must_use]
    pub(crate) fn timestamp_millis(&self) -> Option<i64> {
        self.0.timestamp().to_millis()
    }

    /// Returns the names and values of the headers, in order. Omits headers whose names are not
    /// UTF-8.
    pub(crate) fn headers(&self) -> impl Iterator<Item = (&'r str, Option<&'r [u8]>)> {
        native::headers(self.0)
    }
}

/// A context that does not log errors as warnings, because each failed call returns its error.
struct SilentContext;

impl ClientContext for SilentContext {
    fn error(&self, error: KafkaError, reason: &str) {
        debug!(%error, reason, "error while reading topics");
    }
}

impl ConsumerContext for SilentContext {}

impl TopicReader {
    /// Creates a reader for the cluster that `properties` connect to. `name` identifies the client
    /// to the brokers.
    ///
    /// # Errors
    /// Returns an error if librdkafka does not accept the properties.
    pub(crate) fn new(
        properties: &Properties,
        credentials: &Credentials,
        name: &str,
    ) -> Result<Self, SinkError> {
        let config = client_config(properties, name);
        let consumer = |isolation: &str| {
            let mut config = partition_ends::read_from_leaders(leave_producers(config.clone()));
            config
                .set("allow.auto.create.topics", "false")
                .set("group.id", name)
                .set("enable.auto.commit", "false")
                .set("enable.partition.eof", "true")
                .set("fetch.wait.max.ms", "10")
                .set("auto.offset.reset", "error")
                // Limit prefetching, because a small record takes several times its size in memory.
                .set("queued.min.messages", "10000")
                .set("queued.max.messages.kbytes", "8192")
                // Delay before prefetching resumes after a limit was reached. With the default of
                // one second, nothing would be fetched for that second.
                .set("fetch.queue.backoff.ms", "5")
                .set("isolation.level", isolation);
            create_with_context(&config, SilentContext)
                .map_err(|error| SinkError::Configuration(describe(&error)))
        };
        Ok(Self {
            consumer: consumer("read_committed")?,
            uncommitted: consumer("read_uncommitted")?,
            config,
            credentials: credentials.clone(),
            token_state: Mutex::default(),
        })
    }

    /// Renews the consumers' tokens if necessary. Must be called regularly, because librdkafka's
    /// requests for a new token are not processed for these consumers.
    fn renew_tokens(&self) {
        if self.credentials.tokens().is_none() {
            return;
        }
        let mut token_state = self
            .token_state
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if token_state
            .attempted_at
            .is_some_and(|at| at.elapsed() < TOKEN_CHECK_INTERVAL)
        {
            return;
        }
        token_state.attempted_at = Some(Instant::now());
        let mut consumers = [&self.consumer, &self.uncommitted].into_iter();
        let result =
            consumers.try_for_each(|consumer| self.credentials.set_token(consumer.client()));
        if let Err(error) = &result
            && !token_state.has_failed
        {
            warn!("{error}");
        }
        token_state.has_failed = result.is_err();
    }

    /// Returns the topic's partitions, or `None` if the topic does not exist.
    ///
    /// # Errors
    /// Returns an error if no broker responds, or if the principal may not describe the topic.
    pub(crate) fn partitions(&self, topic: &str) -> Result<Option<Vec<i32>>, SinkError> {
        self.renew_tokens();
        let metadata = self
            .consumer
            .fetch_metadata(Some(topic), REQUEST_TIMEOUT)
            .map_err(|error| self.broken(topic, &error))?;
        match interpret_metadata(&metadata) {
            Lookup::Missing => Ok(None),
            Lookup::Denied(reason) => Err(self.denied(topic, reason)),
            Lookup::Present(_) => {
                let topic = metadata.topics().first();
                let partitions = topic.map_or(&[][..], |topic| topic.partitions());
                Ok(Some(partitions.iter().map(|found| found.id()).collect()))
            }
        }
    }

    /// Returns the part of each partition that can be read now. If `since`, a time in milliseconds
    /// since 1970, is given, the part starts at the first record produced at that time or later.
    /// Waits until `deadline` for open transactions to end.
    ///
    /// # Errors
    /// Returns an error if no broker responds, or if the principal may not read the topic.
    pub(crate) fn spans(
        &self,
        topic: &str,
        partitions: &[i32],
        since: Option<i64>,
        deadline: Instant,
    ) -> Result<Vec<Span>, SinkError> {
        let broken = |error: KafkaError| self.broken(topic, &error);
        let watermarks = |consumer: &BaseConsumer<SilentContext>, partition| {
            self.renew_tokens();
            consumer
                .fetch_watermarks(topic, partition, REQUEST_TIMEOUT)
                .map_err(broken)
        };
        let mut spans = Vec::new();
        for &partition in partitions {
            let (low, end) = watermarks(&self.uncommitted, partition)?;
            spans.push(Span {
                partition,
                start: low,
                end,
                is_cut: low > 0,
                is_hidden: false,
            });
        }
        for span in &mut spans {
            loop {
                let (_, committed) = watermarks(&self.consumer, span.partition)?;
                if committed >= span.end {
                    break;
                }
                if Instant::now() >= deadline {
                    span.end = committed;
                    span.is_hidden = true;
                    break;
                }
                std::thread::sleep(RETRY_DELAY);
            }
        }
        let Some(since) = since else {
            return Ok(spans);
        };
        let mut times = TopicPartitionList::new();
        for span in &spans {
            times
                .add_partition_offset(topic, span.partition, Offset::Offset(since))
                .map_err(broken)?;
        }
        let found = self
            .consumer
            .offsets_for_times(times, REQUEST_TIMEOUT)
            .map_err(broken)?;
        for span in &mut spans {
            let found = found.find_partition(topic, span.partition);
            let start = match found.map(|found| found.offset()) {
                Some(Offset::Offset(start)) => start,
                // All records of the partition are older than `since`.
                _ => span.end,
            };
            span.is_cut &= start <= span.start;
            span.start = start.clamp(span.start, span.end.max(span.start));
        }
        Ok(spans)
    }

    /// Reads the given offset ranges and calls `visit` for each record. The partitions are read
    /// concurrently, each in offset order. Stops early if `visit` returns `Break`.
    ///
    /// # Errors
    /// Returns an error if not all ranges can be read to their ends, or if `visit` fails.
    pub(crate) fn read(
        &self,
        topic: &str,
        spans: &[Span],
        visit: impl FnMut(&ReadRecord<'_>) -> io::Result<ControlFlow<()>>,
    ) -> Result<(), ReadError> {
        self.read_within(RECORD_TIMEOUT, topic, spans, visit)
    }

    /// Like [`Self::read`], but with the given timeout, which applies to each wait for a record in
    /// the ranges.
    fn read_within(
        &self,
        record_timeout: Duration,
        topic: &str,
        spans: &[Span],
        mut visit: impl FnMut(&ReadRecord<'_>) -> io::Result<ControlFlow<()>>,
    ) -> Result<(), ReadError> {
        let mut open: HashMap<i32, (i64, i64)> = spans
            .iter()
            .filter(|span| span.start < span.end)
            .map(|span| (span.partition, (span.start, span.end)))
            .collect();
        let mut list = TopicPartitionList::new();
        for span in spans.iter().filter(|span| span.start < span.end) {
            list.add_partition_offset(topic, span.partition, Offset::Offset(span.start))
                .map_err(|error| self.broken(topic, &error))?;
        }
        self.consumer
            .assign(&list)
            .map_err(|error| self.broken(topic, &error))?;
        let mut ends = PartitionEnds::new(&self.consumer, topic);
        let mut last_progress = Instant::now();
        let mut last_error = KafkaError::MessageConsumption(Code::OperationTimedOut);
        while !open.is_empty() {
            // Check the timeout even if records arrive, because the records may belong to other
            // ranges.
            if last_progress.elapsed() > record_timeout {
                return Err(self.broken(topic, &last_error).into());
            }
            self.renew_tokens();
            match self.consumer.poll(RETRY_DELAY) {
                Some(Ok(record)) => {
                    // Skip records that are not in the ranges. The consumer may still return
                    // records of a topic that was read earlier, and new records of partitions that
                    // have already been read to the end.
                    let end = open
                        .get(&record.partition())
                        .filter(|_| record.topic() == topic);
                    let Some(&(_, end)) = end else { continue };
                    ends.record(record.partition());
                    if record.offset() < end && visit(&ReadRecord(&record))?.is_break() {
                        break;
                    }
                    if record.offset() + 1 >= end {
                        open.remove(&record.partition());
                    }
                    last_progress = Instant::now();
                }
                // The last offset may belong to a transaction marker, which is not returned as a
                // record.
                Some(Err(KafkaError::PartitionEOF(partition))) => {
                    let Some(&(start, end)) = open.get(&partition) else {
                        continue;
                    };
                    match ends.handle_reported_end(partition, start, end) {
                        Ok(true) => {
                            last_progress = Instant::now();
                            open.remove(&partition);
                        }
                        Ok(false) => {}
                        Err(error) => last_error = error,
                    }
                }
                Some(Err(error)) => match error.rdkafka_error_code() {
                    Some(Code::TopicAuthorizationFailed) => {
                        let reason = "the principal is not authorized to read the topic".to_owned();
                        return Err(self.denied(topic, reason).into());
                    }
                    Some(Code::AutoOffsetReset | Code::OffsetOutOfRange) => {
                        let topic = topic.to_owned();
                        return Err(ReadError::Removed { topic });
                    }
                    // Ignore this error, which occurs because librdkafka looks up the coordinator
                    // of a group that Walpost does not use.
                    Some(Code::GroupAuthorizationFailed) => {}
                    _ => last_error = error,
                },
                None => {}
            }
        }
        let nothing = TopicPartitionList::new();
        self.consumer
            .assign(&nothing)
            .map_err(|error| self.broken(topic, &error).into())
    }

    /// Returns a more specific error if authentication failed.
    pub(crate) async fn explain(&self, error: ReadError) -> ReadError {
        let ReadError::Sink(SinkError::Broken(_)) = &error else {
            return error;
        };
        let config = leave_producers(self.config.clone());
        match probe::refusal(config, &self.credentials).await {
            Some(reason) => ReadError::Sink(SinkError::Refused {
                brokers: brokers(&self.config),
                reason,
            }),
            None => error,
        }
    }

    fn broken(&self, topic: &str, error: &KafkaError) -> SinkError {
        let (brokers, reason) = (brokers(&self.config), describe(error));
        SinkError::Broken(format!(
            "failed to read topic {topic:?} at {brokers}: {reason}"
        ))
    }

    fn denied(&self, topic: &str, reason: String) -> SinkError {
        SinkError::TopicDenied {
            topic: topic.to_owned(),
            reason,
            grant: Grants::for_config(&self.config).read(topic),
        }
    }
}

#[cfg(test)]
mod tests {
    use rdkafka::mocking::MockCluster;
    use rdkafka::producer::{BaseProducer, BaseRecord, DefaultProducerContext, Producer};

    use super::*;

    const TOPIC: &str = "t";
    const TIMEOUT: Duration = Duration::from_secs(3);

    /// Records keep arriving in one partition, but the other partition can't be read.
    #[test]
    fn times_out_on_a_partition_without_progress_while_another_partition_receives_records() {
        let cluster: MockCluster<'static, DefaultProducerContext> =
            MockCluster::new(2).expect("a mock cluster");
        cluster.create_topic(TOPIC, 2, 1).expect("a topic");
        for partition in 0..2 {
            cluster
                .partition_leader(TOPIC, partition, Some(partition + 1))
                .expect("a leader");
        }
        let servers = cluster.bootstrap_servers();
        let properties: Properties = [("bootstrap.servers".to_owned(), servers)].into();
        let config = client_config(&properties, "producer");
        let producer: BaseProducer =
            create_with_context(&config, DefaultProducerContext).expect("a producer");
        let produce = |partition| {
            let record = BaseRecord::to(TOPIC).partition(partition).key("k");
            let sent = producer.send(record.payload("v"));
            sent.map_err(|(error, _)| error).expect("queued");
            producer.flush(TIMEOUT).expect("delivered");
        };
        (0..2).for_each(produce);
        cluster.broker_down(2).expect("a broker");
        let reader =
            TopicReader::new(&properties, &Credentials::default(), "test").expect("a reader");
        let span = |partition| Span {
            partition,
            start: 0,
            end: 1,
            is_cut: false,
            is_hidden: false,
        };
        std::thread::scope(|scope| {
            let read = scope.spawn(|| {
                reader.read_within(TIMEOUT, TOPIC, &[span(0), span(1)], |_| {
                    Ok(ControlFlow::Continue(()))
                })
            });
            let start = Instant::now();
            while !read.is_finished() && start.elapsed() < 10 * TIMEOUT {
                produce(0);
            }
            assert!(read.is_finished(), "still reading");
            assert!(read.join().expect("no panic").is_err());
        });
    }
}
