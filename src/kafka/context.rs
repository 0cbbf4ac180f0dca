//! Handles librdkafka's delivery reports, errors and log lines.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rdkafka::config::{ClientConfig, RDKafkaLogLevel};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::producer::{DeliveryResult, ProducerContext};
use tracing::{debug, error, info, warn};

use super::credentials::{Credentials, Login};
use super::grants::Grants;
use super::token::Tokens;
use super::{other_protocol, statistics};
use crate::delivery::failure::{DeliveryFailure, RefusalCause, RefusedRecord};
use crate::delivery::watermark::{Deliveries, Tag};
use crate::escape::shell_word_on_one_line;
use crate::model::lifecycle::ErrorKind;
use crate::model::outage::{Outage, OutageMessage};
use crate::model::rounded::Elapsed;
use crate::sink::needed_limit;

/// How often an ongoing authentication failure is logged. The interval is short because the failure
/// may eventually halt the pipeline.
const AUTHENTICATION_FAILURE_LOG_INTERVAL: Duration = Duration::from_secs(15);

/// Prefix of librdkafka's error message when a token can't be obtained.
const NO_TOKEN: &str = "Failed to acquire SASL OAUTHBEARER token";
/// Part of the error if a connection is closed, or times out, during the SASL handshake.
const INTERRUPTED_HANDSHAKE: &str = "mechanism handshake failed: Local: ";

/// Error message to report if the brokers don't support idempotent producers.
pub(super) const NEEDS_IDEMPOTENCE: &str = "Walpost produces with enable.idempotence = true, because without it a retry can duplicate \
    and reorder records. The brokers must support this setting; Apache Kafka 0.11 and later do";

/// Part of a broker's error message for a record without a key in a compacted topic (Kafka's
/// `LogValidator`).
const WITHOUT_KEY: &str = "without key";

/// Part of librdkafka's error message when no broker supports idempotent producers.
const NOT_IDEMPOTENT: &str = "Idempotent producer not supported";

/// The reason reported if all brokers are down but librdkafka has reported no error, which is the
/// case if the brokers close each connection without a response.
pub(super) const CONNECTION_CLOSED: &str = "the broker closed the connection without a response; the listener may use a different \
    security.protocol (plaintext, ssl, sasl_plaintext or sasl_ssl)";

/// The handler for the events of one producer.
pub(crate) struct Context {
    pipeline: String,
    grants: Grants,
    deliveries: Arc<Deliveries>,
    /// Whether all brokers are down. The flag is atomic because it is checked for each delivery
    /// report.
    down: AtomicBool,
    /// Whether a broker has ever responded.
    has_responded: AtomicBool,
    /// Whether [`Context::record_unacknowledged`] was called.
    assumed: AtomicBool,
    /// Whether [`Context::abandon`] was called.
    abandoned: AtomicBool,
    cluster: Mutex<Outage>,
    /// Tracks failed connections to individual brokers while other brokers still respond.
    broker: Mutex<Outage>,
    /// The error of the last failed connection to a broker, unless a broker has responded since.
    cause: Mutex<Option<String>>,
    /// The error of the last failed authentication, unless a broker has responded since.
    refusal: Mutex<Option<String>>,
    /// Authentication failures that occur after a broker has accepted the credentials.
    refused: Mutex<Outage>,
    credentials: Credentials,
    /// The user name and password last passed to the producer.
    login: Mutex<Option<Login>>,
    /// The topic that the brokers refused to add to the transaction, if any.
    denied: Mutex<Option<String>>,
}

impl Context {
    /// Creates a context that reports to `deliveries`. `grants` provides the commands that grant
    /// missing permissions.
    #[must_use]
    pub(crate) fn new(pipeline: &str, grants: Grants, deliveries: Arc<Deliveries>) -> Self {
        // If the previous producer could not reach any broker, assume initially that all brokers
        // are still down.
        let down = AtomicBool::new(deliveries.stats().is_kafka_down());
        Self {
            pipeline: pipeline.to_owned(),
            grants,
            deliveries,
            down,
            has_responded: AtomicBool::new(false),
            assumed: AtomicBool::new(false),
            abandoned: AtomicBool::new(false),
            cluster: Mutex::default(),
            broker: Mutex::default(),
            cause: Mutex::default(),
            refusal: Mutex::default(),
            refused: Mutex::new(Outage::reminding(AUTHENTICATION_FAILURE_LOG_INTERVAL)),
            credentials: Credentials::default(),
            login: Mutex::default(),
            denied: Mutex::default(),
        }
    }

    /// Sets the producer's current login, and the credentials from which Walpost reads the login
    /// again when necessary.
    #[must_use]
    pub(super) fn with_credentials(
        mut self,
        credentials: Credentials,
        login: Option<Login>,
    ) -> Self {
        self.credentials = credentials;
        self.login = Mutex::new(login);
        self
    }

    /// Disables logging of outages, for a caller that reports them itself.
    #[must_use]
    pub(super) fn without_outage_log(mut self) -> Self {
        self.cluster = Mutex::new(Outage::silent());
        self.broker = Mutex::new(Outage::silent());
        self
    }

    /// Returns the source of the producer's tokens, if the producer uses tokens.
    pub(super) fn tokens(&self) -> Option<&Tokens> {
        self.credentials.tokens()
    }

    /// Handles a failure to obtain a token; librdkafka will request another token later.
    pub(super) fn record_no_token(&self, reason: &str) {
        let is_valid = |tokens: &Tokens| tokens.is_last_valid();
        match self.tokens().is_some_and(is_valid) {
            // Existing connections remain open until the most recently obtained token expires.
            true => self.broker_failed(reason),
            false => self.record_unreachable(reason),
        }
    }

    pub(super) fn pipeline(&self) -> &str {
        &self.pipeline
    }

    /// Creates the context for a new producer, which is configured with `config` and replaces the
    /// producer of this context.
    #[must_use]
    pub(super) fn successor(&self, config: &ClientConfig) -> Self {
        let deliveries = Arc::clone(&self.deliveries);
        Self::new(&self.pipeline, self.grants.clone(), deliveries)
            .with_credentials(self.credentials.clone(), Login::for_config(config))
    }

    /// Returns the current login if it differs from the login last passed to the producer.
    pub(super) fn new_login(&self) -> Option<Login> {
        let mut known = lock(&self.login);
        let before = known.as_ref()?;
        let mut config = ClientConfig::new();
        config.set("sasl.username", &before.username);
        config.set("sasl.password", &before.password);
        self.credentials.renew(&mut config);
        let now = Login::for_config(&config).filter(|now| now != before)?;
        *known = Some(now.clone());
        Some(now)
    }

    /// Returns the commands that grant permissions to the principal.
    #[must_use]
    pub(crate) fn grants(&self) -> &Grants {
        &self.grants
    }

    /// Returns whether all brokers are unreachable.
    #[must_use]
    pub(crate) fn is_down(&self) -> bool {
        self.down.load(Ordering::Relaxed)
    }

    /// Marks the producer as no longer needed: its delivery reports are ignored, and calls in
    /// progress on other threads fail instead of being retried, so that the producer can be
    /// dropped.
    pub(crate) fn abandon(&self) {
        self.abandoned.store(true, Ordering::SeqCst);
    }

    /// Returns whether [`Context::abandon`] was called.
    #[must_use]
    pub(crate) fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::SeqCst)
    }

    /// Returns the error of the last failed authentication, unless a broker has responded since.
    #[must_use]
    pub(crate) fn refusal(&self) -> Option<String> {
        lock(&self.refusal).clone()
    }

    /// Returns the error of the last failed connection to a broker, unless a broker has responded
    /// since.
    #[must_use]
    pub(super) fn cause(&self) -> Option<String> {
        lock(&self.cause).clone()
    }

    /// Returns the topic that the brokers refused to add to a transaction, if any.
    #[must_use]
    pub(crate) fn denied(&self) -> Option<String> {
        lock(&self.denied).clone()
    }

    /// Marks Kafka as reachable, after a broker has responded.
    pub(crate) fn record_response(&self) {
        self.has_responded.store(true, Ordering::Relaxed);
        if self.down.swap(false, Ordering::Relaxed) {
            self.deliveries.stats().record_kafka_response();
            if let Some(lasted) = lock(&self.cluster).end(Instant::now()) {
                info!(pipeline = self.pipeline, elapsed = %Elapsed(lasted), "Kafka is reachable again");
            }
        }
        lock(&self.broker).end(Instant::now());
        lock(&self.refusal).take();
        lock(&self.cause).take();
        self.credentials.record_accepted();
        if let Some(lasted) = lock(&self.refused).end(Instant::now()) {
            info!(pipeline = self.pipeline, elapsed = %Elapsed(lasted), "Kafka accepts the credentials again");
        }
    }

    /// Marks Kafka as unreachable, because no broker responds.
    pub(crate) fn record_unreachable(&self, reason: &str) {
        if !self.down.swap(true, Ordering::Relaxed) {
            self.deliveries.stats().record_kafka_outage(reason);
        }
        let pipeline = &self.pipeline;
        match lock(&self.cluster).failed(Instant::now()) {
            OutageMessage::Started => {
                warn!(
                    pipeline,
                    reason, "Kafka is unreachable; waiting until it is reachable"
                )
            }
            OutageMessage::Ongoing(elapsed, _) => {
                warn!(pipeline, reason, elapsed = %Elapsed(elapsed), "Kafka is still unreachable")
            }
            OutageMessage::Suppressed => debug!(pipeline, reason, "Kafka is unreachable"),
        }
    }

    /// Reports the records with these tags as durable.
    pub(super) fn record_deliveries(&self, tags: impl Iterator<Item = Tag>) {
        if self.deliveries.delivered(tags) > 0 && self.is_down() {
            self.record_response();
        }
    }

    /// Reports a record that could not be delivered.
    pub(super) fn record_rejection(&self, code: RDKafkaErrorCode, record: &UndeliveredRecord) {
        let topic = &record.topic;
        // If the brokers refused to add this topic to the transaction, librdkafka purges the
        // topic's records with a different error code. Report the original error instead.
        let code = match self.denied() {
            Some(denied) if denied == *topic => RDKafkaErrorCode::TopicAuthorizationFailed,
            _ => code,
        };
        self.deliveries.report_failure(DeliveryFailure {
            reason: format!(
                "Kafka did not accept the row at {} as a record for topic {topic:?} partition {}: {}",
                record.position.as_deref().unwrap_or("an unknown position"),
                record.partition,
                self.explain(code, record),
            ),
            permanent: is_permanent(code),
            refused: self.rejected_record(code, record),
            refused_until: None,
        });
    }

    /// If the error was caused by this record or by another record in its batch, returns the
    /// details needed to recognize this record in the next attempt.
    fn rejected_record(
        &self,
        code: RDKafkaErrorCode,
        record: &UndeliveredRecord,
    ) -> Option<Box<RefusedRecord>> {
        use RDKafkaErrorCode as Code;
        let cause = match code {
            Code::MessageSizeTooLarge | Code::MessageBatchTooLarge => RefusalCause::Size,
            Code::InvalidTimestamp => RefusalCause::Timestamp,
            Code::InvalidMessage
            | Code::InvalidMessageSize
            | Code::InvalidRecord
            | Code::InvalidTopic
            | Code::PolicyViolation => RefusalCause::Other,
            _ => return None,
        };
        Some(Box::new(RefusedRecord {
            at: record.position.as_deref()?.parse().ok()?,
            topic: record.topic.clone(),
            bytes: record.bytes,
            content: record.content,
            cause,
            reason: self.explain(code, record),
        }))
    }

    /// Handles a record that librdkafka reports as durable although no broker has acknowledged it.
    ///
    /// librdkafka infers that the record is durable because a later record was accepted. However, a
    /// broker that has no state for the producer yet accepts the later record even if it has just
    /// rejected the earlier record (librdkafka #4134).
    pub(super) fn record_unacknowledged(&self, record: &UndeliveredRecord) {
        self.assumed.store(true, Ordering::SeqCst);
        self.deliveries.report_failure(DeliveryFailure {
            reason: format!(
                "Kafka acknowledged later records for topic {:?} partition {}, but not the record of the row at {}",
                record.topic,
                record.partition,
                record.position.as_deref().unwrap_or("an unknown position"),
            ),
            permanent: false,
            refused: None,
            refused_until: None,
        });
    }

    /// Returns whether [`Context::record_unacknowledged`] was called.
    pub(super) fn has_unacknowledged(&self) -> bool {
        self.assumed.load(Ordering::SeqCst)
    }

    /// Handles an error that concerns a single broker, all brokers, or the producer.
    pub(super) fn error(&self, code: RDKafkaErrorCode, reason: &str) {
        use RDKafkaErrorCode as Code;
        match code {
            Code::AllBrokersDown => match self.cause() {
                Some(cause) => self.record_unreachable(&format!("{reason}; last error: {cause}")),
                None if self.has_responded.load(Ordering::Relaxed) => {
                    self.record_unreachable(reason)
                }
                None => self.record_unreachable(&format!("{reason}: {CONNECTION_CLOSED}")),
            },
            // This error means that no token could be obtained, which has already been reported. It
            // is not an authentication failure, because no broker was contacted.
            Code::Authentication if reason.contains(NO_TOKEN) => {}
            code if is_refusal(code, reason) => {
                *lock(&self.refusal) = Some(reason.to_owned());
                self.broker_failed(reason);
                self.log_rejected_credentials(reason);
            }
            // librdkafka now reports every queued record as failed, starting with the record that
            // caused the error. If no records are queued, the next call to produce a record fails.
            Code::Fatal => {
                warn!(pipeline = self.pipeline, reason, "Kafka producer failed");
                if reason.contains(NOT_IDEMPOTENT) {
                    // A new producer would fail in the same way.
                    self.deliveries.report_failure(DeliveryFailure {
                        reason: format!("Kafka: {reason}. {NEEDS_IDEMPOTENCE}"),
                        permanent: true,
                        refused: None,
                        refused_until: None,
                    });
                }
            }
            _ => self.broker_failed(reason),
        }
    }

    /// Records librdkafka's statistics.
    pub(super) fn statistics(&self, document: &str) {
        if let Some(statistics) = statistics::read(document.as_bytes()) {
            self.deliveries.stats().record_kafka_statistics(statistics);
        }
    }

    /// Forwards a line from librdkafka's log to Walpost's log; `level` is a syslog severity.
    pub(super) fn log(&self, level: i32, facility: &str, message: &str) {
        const ERROR: i32 = 3;
        const WARNING: i32 = 4;
        const INFO: i32 = 6;
        let pipeline = &self.pipeline;
        // librdkafka names the topic only in this log line: `Failed to add partition "topic" [0] to
        // transaction: Broker: Topic authorization failed`.
        if facility == "ADDPARTS" && message.ends_with("authorization failed") {
            *lock(&self.denied) = message.split('"').nth(1).map(str::to_owned);
        }
        match (level, facility) {
            // librdkafka also reports these lines as errors, which are logged and counted
            // elsewhere.
            (_, "FAIL" | "ERROR" | "FATAL") => debug!(pipeline, facility, "librdkafka: {message}"),
            (..=ERROR, _) => error!(pipeline, facility, "librdkafka: {message}"),
            (WARNING, "CONFWARN") if message.contains("enable.gapless.guarantee") => {
                debug!(pipeline, facility, "librdkafka: {message}");
            }
            (WARNING, _) => warn!(pipeline, facility, "librdkafka: {message}"),
            (..=INFO, _) => info!(pipeline, facility, "librdkafka: {message}"),
            _ => debug!(pipeline, facility, "librdkafka: {message}"),
        }
    }

    /// Returns the broker's reason for rejecting the record, followed by how to fix it.
    fn explain(&self, code: RDKafkaErrorCode, record: &UndeliveredRecord) -> String {
        let remedy = self.remedy(code, record);
        let reason = match record.reason.trim_end_matches('.') {
            "" => code.to_string(),
            reason => format!("{code}: {reason}"),
        };
        match remedy.is_empty() {
            true => reason,
            false => format!("{reason}. {remedy}"),
        }
    }

    /// Returns how to fix the failure, or an empty string if no fix is known.
    fn remedy(&self, code: RDKafkaErrorCode, record: &UndeliveredRecord) -> String {
        use RDKafkaErrorCode as Code;
        let topic = &record.topic;
        let configs = format!(
            "kafka-configs.sh --bootstrap-server {} --alter --entity-type topics --entity-name {topic} --add-config",
            shell_word_on_one_line(self.grants.brokers())
        );
        match code {
            Code::InvalidTimestamp => {
                let found = match timestamp_in(&record.reason) {
                    Some(time) => format!("The record's timestamp is {time}. "),
                    None => String::new(),
                };
                format!(
                    "{found}Correct the column, remove the timestamp setting, or change the range of times that the topic \
                     accepts: {configs} message.timestamp.after.max.ms=... (message.timestamp.before.max.ms for times in the \
                     past)"
                )
            }
            Code::InvalidRecord if record.reason.contains(WITHOUT_KEY) => format!(
                "The topic is compacted, so each record needs a key, but the key of this row is null. Give the row a key, or \
                 change the topic: {configs} cleanup.policy=delete"
            ),
            Code::InvalidTopic => "The topic is reserved for the brokers, or its name is not valid. Correct the topic in the \
                 configuration or in the row"
                .to_owned(),
            Code::MessageSizeTooLarge | Code::MessageBatchTooLarge => format!(
                "Raise the topic's limit: {configs} max.message.bytes={}",
                needed_limit(record.bytes)
            ),
            Code::TopicAuthorizationFailed | Code::ClusterAuthorizationFailed => {
                let grant = self.grants.topic(topic);
                format!("Grant the principal the required permission: {grant}")
            }
            Code::UnknownTopic | Code::UnknownTopicOrPartition | Code::UnknownPartition => {
                "The topic was deleted, or has fewer partitions than before; Walpost will look up the topic again".to_owned()
            }
            Code::UnsupportedCompressionType | Code::UnsupportedForMessageFormat => {
                "In [kafka], set a compression type that these brokers support: \"compression.type\" = \"gzip\", or \"none\". \
                 Azure Event Hubs supports no other type"
                    .to_owned()
            }
            _ => String::new(),
        }
    }

    /// Logs that brokers reject credentials that they previously accepted.
    fn log_rejected_credentials(&self, reason: &str) {
        if !self.credentials.were_accepted() {
            return;
        }
        let (pipeline, origin) = (&self.pipeline, self.credentials.origin());
        let secret = self.tokens().map_or("password", |_| "token");
        match lock(&self.refused).failed(Instant::now()) {
            OutageMessage::Started => warn!(
                pipeline,
                reason,
                "Kafka rejects credentials that it accepted earlier; retrying. The {secret} comes from {origin}"
            ),
            OutageMessage::Ongoing(elapsed, _) => warn!(
                pipeline,
                reason,
                elapsed = %Elapsed(elapsed),
                "Kafka still rejects the credentials; retrying. The {secret} comes from {origin}"
            ),
            OutageMessage::Suppressed => {}
        }
    }

    fn broker_failed(&self, reason: &str) {
        let reason = &*other_protocol::explain(reason);
        self.deliveries.stats().count(ErrorKind::KafkaBroker);
        *lock(&self.cause) = Some(reason.to_owned());
        let pipeline = &self.pipeline;
        match lock(&self.broker).failed(Instant::now()) {
            OutageMessage::Started => warn!(pipeline, reason, "Kafka broker connection failed"),
            OutageMessage::Ongoing(_, failures) => {
                warn!(
                    pipeline,
                    reason, failures, "Connections to Kafka brokers are still failing"
                );
            }
            OutageMessage::Suppressed => debug!(pipeline, reason, "Kafka broker connection failed"),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

// A tag is stored in the opaque pointer that librdkafka keeps for each record, so a pointer must
// have 64 bits.
const _: () = assert!(usize::BITS == u64::BITS, "Walpost needs a 64-bit platform");

/// A record that was not delivered.
pub(super) struct UndeliveredRecord {
    pub(super) topic: String,
    pub(super) partition: i32,
    /// The broker's error message; empty if the broker sent none.
    pub(super) reason: String,
    /// The WAL position of the record's row.
    pub(super) position: Option<String>,
    /// Size of the key and the value, in bytes.
    pub(super) bytes: usize,
    /// See [`failure::content`](crate::delivery::failure::content).
    pub(super) content: u64,
}

/// Extracts the record's timestamp from a broker's error message (Kafka's `LogValidator`).
/// librdkafka does not return the timestamp of a record that was not delivered.
fn timestamp_in(reason: &str) -> Option<jiff::Timestamp> {
    let (_, rest) = reason.split_once("Timestamp ")?;
    let millis = rest.split(' ').next()?.parse().ok()?;
    jiff::Timestamp::from_millisecond(millis).ok()
}

/// Returns whether the error means that authentication failed: the broker rejected the credentials,
/// or librdkafka rejected the broker's certificate.
///
/// librdkafka 2.12 uses the same code if the broker closes the connection during the SASL
/// handshake, for example because it is shutting down; then, the reason contains a local error
/// (`rd_kafka_broker_handle_SaslHandshake`).
pub(super) fn is_refusal(code: RDKafkaErrorCode, reason: &str) -> bool {
    use RDKafkaErrorCode as Code;
    matches!(
        code,
        Code::Authentication | Code::SaslAuthenticationFailed | Code::SSL
    ) && !reason.contains(INTERRUPTED_HANDSHAKE)
}

/// Returns whether the same record would fail again unless an operator intervenes.
///
/// An unknown topic or partition is not a permanent error: the next producer looks up the topic,
/// and thereby determines whether it is missing, was re-created, or lacks the partition that a row
/// names.
fn is_permanent(code: RDKafkaErrorCode) -> bool {
    use RDKafkaErrorCode as Code;
    matches!(
        code,
        Code::MessageSizeTooLarge
            | Code::MessageBatchTooLarge
            | Code::InvalidMessage
            | Code::InvalidMessageSize
            | Code::InvalidRecord
            | Code::InvalidTimestamp
            | Code::InvalidTopic
            | Code::PolicyViolation
            | Code::TopicAuthorizationFailed
            | Code::ClusterAuthorizationFailed
            | Code::UnsupportedCompressionType
            | Code::UnsupportedForMessageFormat
    )
}

/// rdkafka calls these methods only while a producer is being dropped, for the events that are
/// still queued. The events are ignored because the records no longer matter.
impl rdkafka::ClientContext for Context {
    fn log(&self, _level: RDKafkaLogLevel, _facility: &str, _message: &str) {}

    fn error(&self, _error: KafkaError, _reason: &str) {}
}

impl ProducerContext for Context {
    type DeliveryOpaque = ();

    fn delivery(&self, _result: &DeliveryResult<'_>, _tag: ()) {}
}

#[cfg(test)]
mod tests {
    use RDKafkaErrorCode as Code;

    use super::*;

    #[test]
    fn closed_connection_during_the_sasl_handshake_is_not_a_refusal() {
        let closed = "sasl_plaintext://kafka1:9092/1: SASL PLAIN mechanism handshake failed: Local: Broker transport failure: \
                      broker's supported mechanisms: (n/a) (after 0ms in state DOWN)";
        assert!(!is_refusal(Code::Authentication, closed));
        let unsupported = "sasl_plaintext://kafka1:9092/1: SASL PLAIN mechanism handshake failed: Broker: Unsupported SASL \
                           mechanism: broker's supported mechanisms: SCRAM-SHA-512";
        assert!(is_refusal(Code::Authentication, unsupported));
    }
}
