//! What librdkafka calls back: deliveries, errors, log lines.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use rdkafka::config::RDKafkaLogLevel;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{BorrowedMessage, Headers, Message};
use rdkafka::producer::{DeliveryResult, ProducerContext};
use tracing::{debug, error, info, warn};

use super::properties::describe;
use crate::observe::outage::{Outage, Say};
use crate::outbox::route::POSITION_HEADER;
use crate::pipeline::watermark::{Deliveries, DeliveryFailure, Tag};

/// The callbacks of one producer.
pub struct Context {
    pipeline: String,
    deliveries: Arc<Deliveries>,
    /// All brokers are down. Looked at for each delivery, so it is apart from the lock.
    down: AtomicBool,
    cluster: Mutex<Outage>,
    /// Failures of single brokers, which can go on while others work.
    broker: Mutex<Outage>,
    /// Why a broker would not have us, if that is why there is no connection.
    refusal: Mutex<Option<String>>,
}

impl Context {
    /// Callbacks that report to `deliveries`.
    #[must_use]
    pub fn new(pipeline: &str, deliveries: Arc<Deliveries>) -> Self {
        Self {
            pipeline: pipeline.to_owned(),
            deliveries,
            down: AtomicBool::new(false),
            cluster: Mutex::default(),
            broker: Mutex::default(),
            refusal: Mutex::default(),
        }
    }

    /// No broker can be reached, since the last time one answered.
    #[must_use]
    pub fn is_down(&self) -> bool {
        self.down.load(Ordering::Relaxed)
    }

    /// Why the last connection was refused for who we are, if it was.
    #[must_use]
    pub fn refusal(&self) -> Option<String> {
        lock(&self.refusal).clone()
    }

    /// A broker has answered.
    pub fn answered(&self) {
        if self.down.swap(false, Ordering::Relaxed)
            && let Some(lasted) = lock(&self.cluster).ended(Instant::now())
        {
            info!(pipeline = self.pipeline, lasted = ?lasted, "Kafka is reachable again");
        }
        lock(&self.broker).ended(Instant::now());
        lock(&self.refusal).take();
    }

    /// No broker has answered.
    pub fn unreachable(&self, reason: &str) {
        self.down.store(true, Ordering::Relaxed);
        let pipeline = &self.pipeline;
        match lock(&self.cluster).failed(Instant::now()) {
            Say::Begins => warn!(pipeline, reason, "Kafka is unreachable; waiting for it"),
            Say::Lasts(lasts, _) => warn!(pipeline, reason, ?lasts, "Kafka is still unreachable"),
            Say::Nothing => debug!(pipeline, reason, "Kafka is unreachable"),
        }
    }

    fn broker_failed(&self, reason: &str) {
        let pipeline = &self.pipeline;
        match lock(&self.broker).failed(Instant::now()) {
            Say::Begins => warn!(pipeline, reason, "Kafka broker connection failed"),
            Say::Lasts(_, failures) => {
                warn!(
                    pipeline,
                    reason, failures, "Kafka broker connections still fail"
                );
            }
            Say::Nothing => debug!(pipeline, reason, "Kafka broker connection failed"),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

// A tag travels in the pointer that librdkafka carries for each record.
const _: () = assert!(usize::BITS == u64::BITS, "Walpost needs a 64-bit platform");

impl ProducerContext for Context {
    type DeliveryOpaque = usize;

    fn delivery(&self, result: &DeliveryResult<'_>, tag: usize) {
        match result {
            Ok(_) => {
                self.deliveries.delivered(Tag::from_word(tag as u64));
                if self.is_down() {
                    self.answered();
                }
            }
            Err((error, message)) => {
                let code = error.rdkafka_error_code();
                self.deliveries.failed_with(DeliveryFailure {
                    reason: format!(
                        "Kafka did not accept the row at {} as a record for topic {:?} partition {}: {}{}",
                        position(message),
                        message.topic(),
                        message.partition(),
                        describe(error),
                        code.map_or(String::new(), |code| remedy(code, message.topic())),
                    ),
                    permanent: code.is_some_and(is_permanent),
                });
            }
        }
    }
}

/// The row's position, from the record's own header.
fn position(message: &BorrowedMessage<'_>) -> String {
    let headers = message.headers();
    let value =
        headers.and_then(|headers| headers.iter().find(|h| h.key == POSITION_HEADER)?.value);
    value.map_or_else(
        || "an unknown position".to_owned(),
        |text| String::from_utf8_lossy(text).into_owned(),
    )
}

/// What a person can do about a failure.
fn remedy(code: RDKafkaErrorCode, topic: &str) -> String {
    use RDKafkaErrorCode as Code;
    match code {
        Code::MessageSizeTooLarge => format!(
            ". Raise the topic's limit: kafka-configs.sh --alter --entity-type topics \
             --entity-name {topic} --add-config max.message.bytes=..."
        ),
        Code::TopicAuthorizationFailed | Code::ClusterAuthorizationFailed => {
            format!(". Grant the principal WRITE and DESCRIBE on topic {topic}")
        }
        Code::UnknownTopic | Code::UnknownTopicOrPartition => format!(
            ". Create the topic: kafka-topics.sh --create --topic {topic} --partitions 12 \
             --replication-factor 3"
        ),
        Code::UnknownPartition => {
            ". Add partitions to the topic, or correct what writes the partition column".to_owned()
        }
        _ => String::new(),
    }
}

/// The same record would fail again: a person has to change something.
fn is_permanent(code: RDKafkaErrorCode) -> bool {
    use RDKafkaErrorCode as Code;
    matches!(
        code,
        Code::MessageSizeTooLarge
            | Code::InvalidMessage
            | Code::InvalidMessageSize
            | Code::InvalidRecord
            | Code::InvalidTimestamp
            | Code::PolicyViolation
            | Code::TopicAuthorizationFailed
            | Code::ClusterAuthorizationFailed
            | Code::SaslAuthenticationFailed
            | Code::UnsupportedCompressionType
            | Code::UnsupportedForMessageFormat
            | Code::UnknownTopic
            | Code::UnknownTopicOrPartition
            | Code::UnknownPartition
    )
}

impl rdkafka::ClientContext for Context {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        let pipeline = &self.pipeline;
        match (level, facility) {
            // Those come as errors too, and there they are counted.
            (_, "FAIL" | "ERROR" | "FATAL") => debug!(pipeline, facility, "librdkafka: {message}"),
            (
                RDKafkaLogLevel::Emerg
                | RDKafkaLogLevel::Alert
                | RDKafkaLogLevel::Critical
                | RDKafkaLogLevel::Error,
                _,
            ) => error!(pipeline, facility, "librdkafka: {message}"),
            (RDKafkaLogLevel::Warning, "CONFWARN")
                if message.contains("enable.gapless.guarantee") =>
            {
                debug!(pipeline, facility, "librdkafka: {message}");
            }
            (RDKafkaLogLevel::Warning, _) => warn!(pipeline, facility, "librdkafka: {message}"),
            (RDKafkaLogLevel::Notice | RDKafkaLogLevel::Info, _) => {
                info!(pipeline, facility, "librdkafka: {message}");
            }
            (RDKafkaLogLevel::Debug, _) => debug!(pipeline, facility, "librdkafka: {message}"),
        }
    }

    fn error(&self, error: KafkaError, reason: &str) {
        use RDKafkaErrorCode as Code;
        match error.rdkafka_error_code() {
            Some(Code::AllBrokersDown) => self.unreachable(reason),
            Some(Code::Authentication | Code::SaslAuthenticationFailed | Code::SSL) => {
                *lock(&self.refusal) = Some(reason.to_owned());
                self.broker_failed(reason);
            }
            // Every record that the producer still has is reported as failed now, the one it is
            // about first; without any, the next one is refused.
            Some(Code::Fatal) => {
                warn!(
                    pipeline = self.pipeline,
                    reason, "Kafka producer can't go on"
                );
            }
            _ => self.broker_failed(reason),
        }
    }
}
