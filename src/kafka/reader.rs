//! Topics as a consumer of committed records sees them, from one offset to another. No group is
//! joined, and nothing is committed.

use std::collections::HashMap;
use std::io;
use std::ops::ControlFlow;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rdkafka::client::ClientContext;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};
use rdkafka::message::{BorrowedMessage, Headers, Message};
use rdkafka::{Offset, TopicPartitionList};
use tracing::{debug, warn};

use super::credentials::Credentials;
use super::end::{self, Ends};
use super::grants::Grants;
use super::probe;
use super::properties::{
    Properties, brokers, client_config, create_with_context, describe, leave_producers,
};
use super::topics::{Lookup, judge};
use crate::sink::SinkError;

/// How long one question may take.
const ANSWER: Duration = Duration::from_secs(10);
/// How long no record may come, though there are some.
const SILENCE: Duration = Duration::from_secs(30);
const PAUSE: Duration = Duration::from_millis(100);
/// How often they are looked at for a token: the same one until its time is nearly over.
const TOKEN: Duration = Duration::from_secs(1);

/// Reads topics.
pub(crate) struct TopicReader {
    config: ClientConfig,
    consumer: BaseConsumer<Quiet>,
    /// Sees what is behind open transactions too.
    uncommitted: BaseConsumer<Quiet>,
    credentials: Credentials,
    equipped: Mutex<Equipped>,
}

/// The consumers' tokens.
#[derive(Default)]
struct Equipped {
    /// When both consumers were given one last.
    at: Option<Instant>,
    /// There was none then, which is said once.
    has_failed: bool,
}

/// What of a partition there is to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub partition: i32,
    /// The first offset.
    pub start: i64,
    /// The offset behind the last one.
    pub end: i64,
    /// What was before the first one has been removed.
    pub is_cut: bool,
    /// An open transaction hides what is behind the last one.
    pub is_hidden: bool,
}

/// Topics that can't be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The brokers don't let us.
    #[error(transparent)]
    Sink(#[from] SinkError),
    /// Records went away while they were read.
    #[error(
        "topic {topic:?}: records were removed while it was read, for their age or by hand. Do it again, or over a \
         later range of time"
    )]
    Removed { topic: String },
    /// What was read can't be kept.
    #[error("temporary files can't be used: {0}. They are where TMPDIR says")]
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

    /// By the topic's clock, in milliseconds since 1970.
    #[must_use]
    pub(crate) fn timestamp_millis(&self) -> Option<i64> {
        self.0.timestamp().to_millis()
    }

    /// Names and values of the headers, in their order.
    pub(crate) fn headers(&self) -> impl Iterator<Item = (&'r str, Option<&'r [u8]>)> {
        let headers = self.0.headers().into_iter().flat_map(Headers::iter);
        headers.map(|header| (header.key, header.value))
    }
}

/// A consumer whose errors are told with what it was asked.
struct Quiet;

impl ClientContext for Quiet {
    fn error(&self, error: KafkaError, reason: &str) {
        debug!(%error, reason, "while topics are read");
    }
}

impl ConsumerContext for Quiet {}

impl TopicReader {
    /// For the cluster of `properties`; `name` tells the brokers who asks.
    ///
    /// # Errors
    /// librdkafka does not accept the properties.
    pub(crate) fn new(
        properties: &Properties,
        credentials: &Credentials,
        name: &str,
    ) -> Result<Self, SinkError> {
        let config = client_config(properties, name);
        let consumer = |isolation: &str| {
            let mut config = end::read_from_leaders(leave_producers(config.clone()));
            config
                .set("allow.auto.create.topics", "false")
                .set("group.id", name)
                .set("enable.auto.commit", "false")
                .set("enable.partition.eof", "true")
                .set("fetch.wait.max.ms", "10")
                .set("auto.offset.reset", "error")
                // What is read ahead. A small record takes several times its bytes.
                .set("queued.min.messages", "10000")
                .set("queued.max.messages.kbytes", "8192")
                // Where that is reached: until the next look. The default is a second, in which nothing is read.
                .set("fetch.queue.backoff.ms", "5")
                .set("isolation.level", isolation);
            create_with_context(&config, Quiet)
                .map_err(|error| SinkError::Configuration(describe(&error)))
        };
        Ok(Self {
            consumer: consumer("read_committed")?,
            uncommitted: consumer("read_uncommitted")?,
            config,
            credentials: credentials.clone(),
            equipped: Mutex::default(),
        })
    }

    /// Gives the consumers another token now and then: their queues tell nobody that they need one.
    fn equip(&self) {
        if self.credentials.tokens().is_none() {
            return;
        }
        let mut equipped = self.equipped.lock().unwrap_or_else(PoisonError::into_inner);
        if equipped.at.is_some_and(|at| at.elapsed() < TOKEN) {
            return;
        }
        equipped.at = Some(Instant::now());
        let mut consumers = [&self.consumer, &self.uncommitted].into_iter();
        let given = consumers.try_for_each(|consumer| self.credentials.equip(consumer.client()));
        if let Err(error) = &given
            && !equipped.has_failed
        {
            warn!("{error}");
        }
        equipped.has_failed = given.is_err();
    }

    /// The topic's partitions; nothing where there is no such topic.
    ///
    /// # Errors
    /// No broker answers, or we may not know.
    pub(crate) fn partitions(&self, topic: &str) -> Result<Option<Vec<i32>>, SinkError> {
        self.equip();
        let metadata = self
            .consumer
            .fetch_metadata(Some(topic), ANSWER)
            .map_err(|error| self.broken(topic, &error))?;
        match judge(&metadata) {
            Lookup::Missing => Ok(None),
            Lookup::Denied(reason) => Err(self.denied(topic, reason)),
            Lookup::Present(_) => {
                let topic = metadata.topics().first();
                let partitions = topic.map_or(&[][..], |topic| topic.partitions());
                Ok(Some(partitions.iter().map(|found| found.id()).collect()))
            }
        }
    }

    /// What of the topic there is to read now, or was produced at `since` or later, in milliseconds
    /// since 1970. Waits for transactions that are open in it, until `deadline`.
    ///
    /// # Errors
    /// No broker answers, or we may not know.
    pub(crate) fn spans(
        &self,
        topic: &str,
        partitions: &[i32],
        since: Option<i64>,
        deadline: Instant,
    ) -> Result<Vec<Span>, SinkError> {
        let broken = |error: KafkaError| self.broken(topic, &error);
        let marks = |of: &BaseConsumer<Quiet>, partition| {
            self.equip();
            of.fetch_watermarks(topic, partition, ANSWER)
                .map_err(broken)
        };
        let mut spans = Vec::new();
        for &partition in partitions {
            let (low, end) = marks(&self.uncommitted, partition)?;
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
                let (_, committed) = marks(&self.consumer, span.partition)?;
                if committed >= span.end {
                    break;
                }
                if Instant::now() >= deadline {
                    span.end = committed;
                    span.is_hidden = true;
                    break;
                }
                std::thread::sleep(PAUSE);
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
            .offsets_for_times(times, ANSWER)
            .map_err(broken)?;
        for span in &mut spans {
            let found = found.find_partition(topic, span.partition);
            let start = match found.map(|found| found.offset()) {
                Some(Offset::Offset(start)) => start,
                // Nothing is as young as that.
                _ => span.end,
            };
            span.is_cut &= start <= span.start;
            span.start = start.clamp(span.start, span.end.max(span.start));
        }
        Ok(spans)
    }

    /// Reads the spans, of all partitions at once: each in the order of its offsets, until `look` has
    /// seen enough.
    ///
    /// # Errors
    /// The topic can't be read to the spans' ends, or `look` fails.
    pub(crate) fn read(
        &self,
        topic: &str,
        spans: &[Span],
        mut look: impl FnMut(&ReadRecord<'_>) -> io::Result<ControlFlow<()>>,
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
        let mut ends = Ends::of(&self.consumer, topic);
        let mut heard = Instant::now();
        let mut last = KafkaError::MessageConsumption(Code::OperationTimedOut);
        while !open.is_empty() {
            self.equip();
            match self.consumer.poll(PAUSE) {
                Some(Ok(record)) => {
                    heard = Instant::now();
                    // Nothing of the topic before this one.
                    let end = open
                        .get(&record.partition())
                        .filter(|_| record.topic() == topic);
                    let Some(&(_, end)) = end else { continue };
                    ends.record(record.partition());
                    if record.offset() < end && look(&ReadRecord(&record))?.is_break() {
                        break;
                    }
                    if record.offset() + 1 >= end {
                        open.remove(&record.partition());
                    }
                }
                // The last offsets can be the end of a transaction, which is no record.
                Some(Err(KafkaError::PartitionEOF(partition))) => {
                    let Some(&(start, end)) = open.get(&partition) else {
                        continue;
                    };
                    match ends.told(partition, start, end) {
                        Ok(true) => {
                            heard = Instant::now();
                            open.remove(&partition);
                        }
                        Ok(false) => {}
                        Err(error) => last = error,
                    }
                }
                Some(Err(error)) => match error.rdkafka_error_code() {
                    Some(Code::TopicAuthorizationFailed) => {
                        let reason = "the broker does not let it be read".to_owned();
                        return Err(self.denied(topic, reason).into());
                    }
                    Some(Code::AutoOffsetReset | Code::OffsetOutOfRange) => {
                        let topic = topic.to_owned();
                        return Err(ReadError::Removed { topic });
                    }
                    // librdkafka looks for the group's coordinator, which nobody asks anything.
                    Some(Code::GroupAuthorizationFailed) => {}
                    _ => last = error,
                },
                None => {}
            }
            if heard.elapsed() > SILENCE {
                return Err(self.broken(topic, &last).into());
            }
        }
        let nothing = TopicPartitionList::new();
        self.consumer
            .assign(&nothing)
            .map_err(|error| self.broken(topic, &error).into())
    }

    /// A better reason where the brokers don't accept who we are, or we not who they are.
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
            "topic {topic:?} at {brokers} can't be read: {reason}"
        ))
    }

    fn denied(&self, topic: &str, reason: String) -> SinkError {
        SinkError::TopicDenied {
            topic: topic.to_owned(),
            reason,
            grant: Grants::of(&self.config).read(topic),
        }
    }
}
