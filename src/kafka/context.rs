//! What becomes of librdkafka's deliveries, errors and log lines.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rdkafka::config::{ClientConfig, RDKafkaLogLevel};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::producer::{DeliveryResult, ProducerContext};
use tracing::{debug, error, info, warn};

use super::credentials::{Credentials, Login};
use super::grants::Grants;
use super::statistics;
use super::token::Tokens;
use crate::delivery::failure::{DeliveryFailure, RefusalCause, RefusedRecord};
use crate::delivery::watermark::{Deliveries, Tag};
use crate::escape::shell_word_on_one_line;
use crate::model::lifecycle::ErrorKind;
use crate::model::outage::{Outage, Say};
use crate::model::rounded::Elapsed;
use crate::sink::needed_limit;

/// So often it is said that brokers refuse us still: after a while the pipeline may halt for it.
const REFUSED: Duration = Duration::from_secs(15);

/// What librdkafka says first of a token that it was not given.
const NO_TOKEN: &str = "Failed to acquire SASL OAUTHBEARER token";

/// What to say of brokers that don't support it.
pub(super) const NEEDS_IDEMPOTENCE: &str = "Walpost produces with enable.idempotence = true, without which a retry can repeat and \
    reorder records: it needs brokers that support that, as Apache Kafka does from 0.11 on";

/// Part of a broker's text about a record without a key for a compacted topic (Kafka's `LogValidator`).
const WITHOUT_KEY: &str = "without key";

/// In what librdkafka says of brokers that don't support what every producer of ours asks for.
const NOT_IDEMPOTENT: &str = "Idempotent producer not supported";

/// Hears of the events of one producer.
pub(crate) struct Context {
    pipeline: String,
    grants: Grants,
    deliveries: Arc<Deliveries>,
    /// All brokers are down. Looked at with the deliveries, so it is apart from the lock.
    down: AtomicBool,
    /// See [`Context::assumed`].
    assumed: AtomicBool,
    /// See [`Context::abandon`].
    abandoned: AtomicBool,
    cluster: Mutex<Outage>,
    /// Failures of single brokers, which can go on while others work.
    broker: Mutex<Outage>,
    /// Why the connection to a broker failed last, since one has answered.
    cause: Mutex<Option<String>>,
    /// Why a broker would not have us, if that is why there is no connection.
    refusal: Mutex<Option<String>>,
    /// Since when they would not, where they would before.
    refused: Mutex<Outage>,
    credentials: Credentials,
    /// What the producer was told last.
    login: Mutex<Option<Login>>,
    /// The topic that may not be a part of our transactions.
    denied: Mutex<Option<String>>,
}

impl Context {
    /// Reports to `deliveries`. `grants` says how the principal gets what it may not do.
    #[must_use]
    pub(crate) fn new(pipeline: &str, grants: Grants, deliveries: Arc<Deliveries>) -> Self {
        // The producer before this one may have found it down.
        let down = AtomicBool::new(deliveries.stats().kafka_was_down());
        Self {
            pipeline: pipeline.to_owned(),
            grants,
            deliveries,
            down,
            assumed: AtomicBool::new(false),
            abandoned: AtomicBool::new(false),
            cluster: Mutex::default(),
            broker: Mutex::default(),
            cause: Mutex::default(),
            refusal: Mutex::default(),
            refused: Mutex::new(Outage::reminding(REFUSED)),
            credentials: Credentials::default(),
            login: Mutex::default(),
            denied: Mutex::default(),
        }
    }

    /// Has the producer, which has this login, prove who we are with `credentials` as they are by then.
    #[must_use]
    pub(super) fn proving(mut self, credentials: Credentials, login: Option<Login>) -> Self {
        self.credentials = credentials;
        self.login = Mutex::new(login);
        self
    }

    /// Where the producer's tokens come from, if it has any.
    pub(super) fn tokens(&self) -> Option<&Tokens> {
        self.credentials.tokens()
    }

    /// There is no token for the producer; it is asked for again.
    pub(super) fn no_token(&self, reason: &str) {
        let is_valid = |tokens: &Tokens| tokens.are_valid();
        match self.tokens().is_some_and(is_valid) {
            // Connections go on until the last one expires.
            true => self.broker_failed(reason),
            false => self.unreachable(reason),
        }
    }

    /// The pipeline's name.
    pub(super) fn pipeline(&self) -> &str {
        &self.pipeline
    }

    /// Of a producer in the place of this one's, which has `config`.
    #[must_use]
    pub(super) fn successor(&self, config: &ClientConfig) -> Self {
        let deliveries = Arc::clone(&self.deliveries);
        Self::new(&self.pipeline, self.grants.clone(), deliveries)
            .proving(self.credentials.clone(), Login::of(config))
    }

    /// The login, if it is another one by now than the producer knows.
    pub(super) fn new_login(&self) -> Option<Login> {
        let mut known = lock(&self.login);
        let before = known.as_ref()?;
        let mut config = ClientConfig::new();
        config.set("sasl.username", &before.username);
        config.set("sasl.password", &before.password);
        self.credentials.renew(&mut config);
        let now = Login::of(&config).filter(|now| now != before)?;
        *known = Some(now.clone());
        Some(now)
    }

    /// How the principal gets what it may not do.
    #[must_use]
    pub(crate) fn grants(&self) -> &Grants {
        &self.grants
    }

    /// No broker can be reached, since the last time one answered.
    #[must_use]
    pub(crate) fn is_down(&self) -> bool {
        self.down.load(Ordering::Relaxed)
    }

    /// Nobody waits for the producer any more: calls that are under way on other threads end instead of
    /// being made again, so that the producer goes. Nor does anybody hear of deliveries from here on.
    pub(crate) fn abandon(&self) {
        self.abandoned.store(true, Ordering::SeqCst);
    }

    /// Whether [`Context::abandon`] was called.
    #[must_use]
    pub(crate) fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::SeqCst)
    }

    /// Why the last connection was refused for who we are, if it was.
    #[must_use]
    pub(crate) fn refusal(&self) -> Option<String> {
        lock(&self.refusal).clone()
    }

    /// Why the connection to a broker failed last, if none has answered since.
    #[must_use]
    pub(super) fn cause(&self) -> Option<String> {
        lock(&self.cause).clone()
    }

    /// The topic that the brokers did not let into a transaction, if they did so.
    #[must_use]
    pub(crate) fn denied(&self) -> Option<String> {
        lock(&self.denied).clone()
    }

    /// A broker has answered.
    pub(crate) fn answered(&self) {
        if self.down.swap(false, Ordering::Relaxed) {
            self.deliveries.stats().kafka_answered();
            if let Some(lasted) = lock(&self.cluster).ended(Instant::now()) {
                info!(pipeline = self.pipeline, elapsed = %Elapsed(lasted), "Kafka is reachable again");
            }
        }
        lock(&self.broker).ended(Instant::now());
        lock(&self.refusal).take();
        lock(&self.cause).take();
        self.credentials.accepted();
        if let Some(lasted) = lock(&self.refused).ended(Instant::now()) {
            info!(pipeline = self.pipeline, elapsed = %Elapsed(lasted), "Kafka accepts the connection again");
        }
    }

    /// No broker has answered.
    pub(crate) fn unreachable(&self, reason: &str) {
        if !self.down.swap(true, Ordering::Relaxed) {
            self.deliveries.stats().kafka_is_down(reason);
        }
        let pipeline = &self.pipeline;
        match lock(&self.cluster).failed(Instant::now()) {
            Say::Begins => warn!(pipeline, reason, "Kafka is unreachable; waiting for it"),
            Say::Lasts(lasts, _) => {
                warn!(pipeline, reason, elapsed = %Elapsed(lasts), "Kafka is still unreachable")
            }
            Say::Nothing => debug!(pipeline, reason, "Kafka is unreachable"),
        }
    }

    /// Records are durable.
    pub(super) fn delivered(&self, tags: impl Iterator<Item = Tag>) {
        if self.deliveries.delivered(tags) > 0 && self.is_down() {
            self.answered();
        }
    }

    /// A record is not, and will not be.
    pub(super) fn refused(&self, code: RDKafkaErrorCode, record: &Refused) {
        let topic = &record.topic;
        // What is left of a transaction that the topic may not be a part of is thrown away.
        let code = match self.denied() {
            Some(denied) if denied == *topic => RDKafkaErrorCode::TopicAuthorizationFailed,
            _ => code,
        };
        self.deliveries.failed_with(DeliveryFailure {
            reason: format!(
                "Kafka did not accept the row at {} as a record for topic {topic:?} partition {}: {}",
                record.position.as_deref().unwrap_or("an unknown position"),
                record.partition,
                self.explain(code, record),
            ),
            permanent: is_permanent(code),
            refused: self.refused_alone(code, record),
            refused_until: None,
        });
    }

    /// What another pass has to know of the record, where it, or another one of its batch, is the reason.
    fn refused_alone(
        &self,
        code: RDKafkaErrorCode,
        record: &Refused,
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

    /// A record is said to be durable, and no broker has said so: librdkafka infers it where one behind
    /// it was accepted. A broker that knows nothing of the producer yet accepts that one without the
    /// other, which it has refused a moment before (librdkafka #4134).
    pub(super) fn assumed(&self, record: &Refused) {
        self.assumed.store(true, Ordering::SeqCst);
        self.deliveries.failed_with(DeliveryFailure {
            reason: format!(
                "Kafka has acknowledged records for topic {:?} partition {} behind the row at {}, and not that row's",
                record.topic,
                record.partition,
                record.position.as_deref().unwrap_or("an unknown position"),
            ),
            permanent: false,
            refused: None,
            refused_until: None,
        });
    }

    /// Some record was only said to be durable.
    pub(super) fn has_assumed(&self) -> bool {
        self.assumed.load(Ordering::SeqCst)
    }

    /// Something is wrong with a broker, or with all of them.
    pub(super) fn error(&self, code: RDKafkaErrorCode, reason: &str) {
        use RDKafkaErrorCode as Code;
        match code {
            Code::AllBrokersDown => match self.cause() {
                Some(cause) => self.unreachable(&format!("{reason}; the last error: {cause}")),
                None => self.unreachable(reason),
            },
            // That was told when the program had failed. It is no refusal: no broker was asked.
            Code::Authentication if reason.contains(NO_TOKEN) => {}
            code if is_refusal(code) => {
                *lock(&self.refusal) = Some(reason.to_owned());
                self.broker_failed(reason);
                self.refused_again(reason);
            }
            // Every record that the producer still has is reported as failed now, the one it is
            // about first; without any, the next one is refused.
            Code::Fatal => {
                warn!(pipeline = self.pipeline, reason, "Kafka producer failed");
                if reason.contains(NOT_IDEMPOTENT) {
                    // The next producer would be told the same.
                    self.deliveries.failed_with(DeliveryFailure {
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

    /// What librdkafka says of itself.
    pub(super) fn statistics(&self, document: &str) {
        if let Some(statistics) = statistics::read(document.as_bytes()) {
            self.deliveries.stats().kafka_says(statistics);
        }
    }

    /// A log line; `level` is syslog's.
    pub(super) fn log(&self, level: i32, facility: &str, message: &str) {
        const ERROR: i32 = 3;
        const WARNING: i32 = 4;
        const INFO: i32 = 6;
        let pipeline = &self.pipeline;
        // Nowhere else librdkafka says which topic it is:
        // Failed to add partition "topic" [0] to transaction: Broker: Topic authorization failed
        if facility == "ADDPARTS" && message.ends_with("authorization failed") {
            *lock(&self.denied) = message.split('"').nth(1).map(str::to_owned);
        }
        match (level, facility) {
            // Those come as errors too, and there they are counted.
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

    /// The broker's reason for a refusal, and how to fix it.
    fn explain(&self, code: RDKafkaErrorCode, record: &Refused) -> String {
        let remedy = self.remedy(code, record);
        match record.reason.trim_end_matches('.') {
            "" => format!("{code}{remedy}"),
            reason => format!("{code}: {reason}{remedy}"),
        }
    }

    /// How to fix a failure.
    fn remedy(&self, code: RDKafkaErrorCode, record: &Refused) -> String {
        use RDKafkaErrorCode as Code;
        let topic = &record.topic;
        let configs = format!(
            "kafka-configs.sh --bootstrap-server {} --alter --entity-type topics --entity-name {topic} --add-config",
            shell_word_on_one_line(self.grants.brokers())
        );
        match code {
            Code::InvalidTimestamp => {
                let found = match timestamp_in(&record.reason) {
                    Some(time) => format!("The record has the timestamp {time}. "),
                    None => String::new(),
                };
                format!(
                    ". {found}Leave timestamp out of the settings, correct the column, or let the topic accept other times: \
                     {configs} message.timestamp.after.max.ms=... (message.timestamp.before.max.ms for times in the past)"
                )
            }
            Code::InvalidRecord if record.reason.contains(WITHOUT_KEY) => format!(
                ". The topic is compacted, so each record needs a key, and the key of this row is null. Give the row a key; or \
                 change the topic: {configs} cleanup.policy=delete"
            ),
            Code::InvalidTopic => ". The brokers keep this topic for themselves, or do not accept its name: correct what gives \
                 the topic of the row"
                .to_owned(),
            Code::MessageSizeTooLarge | Code::MessageBatchTooLarge => format!(
                ". Raise the topic's limit: {configs} max.message.bytes={}",
                needed_limit(record.bytes)
            ),
            Code::TopicAuthorizationFailed | Code::ClusterAuthorizationFailed => {
                let grant = self.grants.topic(topic);
                format!(". Grant the principal what it needs: {grant}")
            }
            Code::UnknownTopic | Code::UnknownTopicOrPartition | Code::UnknownPartition => {
                ". The topic was deleted, or has fewer partitions than before; Walpost looks it up again".to_owned()
            }
            Code::UnsupportedCompressionType | Code::UnsupportedForMessageFormat => {
                ". Compress batches as these brokers accept it, in [kafka]: \"compression.type\" = \"gzip\", or \"none\". Azure \
                 Event Hubs accepts nothing else"
                    .to_owned()
            }
            _ => String::new(),
        }
    }

    /// Brokers that had accepted us do not.
    fn refused_again(&self, reason: &str) {
        if !self.credentials.were_accepted() {
            return;
        }
        let (pipeline, origin) = (&self.pipeline, self.credentials.origin());
        let secret = self.tokens().map_or("password", |_| "token");
        match lock(&self.refused).failed(Instant::now()) {
            Say::Begins => warn!(
                pipeline,
                reason,
                "Kafka refuses the connection that it accepted earlier; trying again. The {secret} comes from {origin}"
            ),
            Say::Lasts(lasts, _) => warn!(
                pipeline,
                reason,
                elapsed = %Elapsed(lasts),
                "Kafka still refuses the connection; trying again. The {secret} comes from {origin}"
            ),
            Say::Nothing => {}
        }
    }

    fn broker_failed(&self, reason: &str) {
        self.deliveries.stats().count(ErrorKind::KafkaBroker);
        *lock(&self.cause) = Some(reason.to_owned());
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

/// A record that was not delivered.
pub(super) struct Refused {
    pub(super) topic: String,
    pub(super) partition: i32,
    /// The broker's text about it; empty if the broker sent none.
    pub(super) reason: String,
    /// The position of its row.
    pub(super) position: Option<String>,
    /// Bytes of its key and its value.
    pub(super) bytes: usize,
    /// See [`failure::content`](crate::delivery::failure::content).
    pub(super) content: u64,
}

/// The timestamp in a broker's text about one that it refuses (Kafka's `LogValidator`). librdkafka does not return that of a
/// record that was not delivered.
fn timestamp_in(reason: &str) -> Option<jiff::Timestamp> {
    let (_, rest) = reason.split_once("Timestamp ")?;
    let millis = rest.split(' ').next()?.parse().ok()?;
    jiff::Timestamp::from_millisecond(millis).ok()
}

/// A broker does not accept who we are, or we not who it is.
pub(super) fn is_refusal(code: RDKafkaErrorCode) -> bool {
    use RDKafkaErrorCode as Code;
    matches!(
        code,
        Code::Authentication | Code::SaslAuthenticationFailed | Code::SSL
    )
}

/// The same record would fail again: a person has to change something. An unknown topic or partition is not permanent: the
/// next producer looks the topic up, and finds out whether it is missing, was created again, or lacks the partition that a
/// row names.
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

/// rdkafka itself tells of events only when a producer is dropped, and throws away what it still
/// has: nobody wants to hear of those records any more.
impl rdkafka::ClientContext for Context {
    fn log(&self, _level: RDKafkaLogLevel, _facility: &str, _message: &str) {}

    fn error(&self, _error: KafkaError, _reason: &str) {}
}

impl ProducerContext for Context {
    type DeliveryOpaque = ();

    fn delivery(&self, _result: &DeliveryResult<'_>, _tag: ()) {}
}
