//! Ensures that a topic exists before its first record is sent. The error for a missing topic shows
//! how to create it.

use std::sync::Arc;
use std::time::Duration;

use rdkafka::admin::AdminClient;
use rdkafka::client::DefaultClientContext;
use rdkafka::config::ClientConfig;
use rdkafka::error::{KafkaError, KafkaResult, RDKafkaErrorCode as Code};
use rdkafka::producer::{BaseProducer, Producer};
use rdkafka::types::RDKafkaRespErr;
use tokio::time::Instant;
use tracing::{debug, info, warn};

use super::certificate;
use super::context::Context;
use super::credentials::Credentials;
use super::drop_in_background::DropInBackground;
use super::grants::Grants;
use super::native::{self, NewTopic, Refusal};
use super::properties::{brokers, create, describe, leave_producers};
use super::unusable::{NAME_NOT_ACCEPTED, NOT_AUTHORIZED, UnusableReason};
use crate::model::time::REFUSED_LOGIN_TIMEOUT;
use crate::sink::{Prepared, SinkError};

/// How long to wait for a topic to appear after Walpost or a broker has started to create it.
const CREATION_TIMEOUT: Duration = Duration::from_secs(5);
/// How often a warning is logged for a topic that is still missing.
const MISSING_TOPIC_LOG_INTERVAL: Duration = Duration::from_secs(60);
/// Maximum number of metadata records for the topics in one request. The controller writes one
/// metadata record for each topic and each partition, and accepts at most 10,000 per request
/// (`MAX_RECORDS_PER_USER_OP`).
const METADATA_RECORDS_PER_REQUEST: usize = 2000;
/// How long authentication may fail before the failure is considered permanent.
const AUTHENTICATION_FAILURE_TIMEOUT: Duration = Duration::from_secs(10);
pub(super) const METADATA_TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout for a request to create topics.
const CREATION_REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
/// Minimum and maximum delay between lookups. The first delays are short, because a topic that was
/// just created usually appears immediately.
pub(super) const LOOKUP_DELAY_MIN: Duration = Duration::from_millis(20);
pub(super) const LOOKUP_DELAY_MAX: Duration = Duration::from_millis(200);

/// How missing topics are created.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(
    deny_unknown_fields,
    expecting = "a table like { partitions = 12, replication = 3 }"
)]
pub struct CreateTopics {
    /// Number of partitions.
    pub partitions: i32,
    /// The replication factor, or -1 for the broker's default.
    #[serde(default = "broker_default")]
    pub replication: i32,
}

fn broker_default() -> i32 {
    -1
}

impl CreateTopics {
    fn new_topic(&self, name: &str) -> NewTopic {
        NewTopic {
            name: name.to_owned(),
            partitions: self.partitions,
            replication: self.replication,
            settings: &[],
        }
    }

    /// Returns how many additional topics can be created with the request for one topic.
    fn max_others(&self) -> usize {
        usize::try_from(self.partitions).map_or(0, |partitions| {
            METADATA_RECORDS_PER_REQUEST / (partitions + 1)
        })
    }
}

impl std::str::FromStr for CreateTopics {
    type Err = String;

    /// Parses `PARTITIONS` or `PARTITIONS:REPLICATION`.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (partitions, replication) = text.split_once(':').unwrap_or((text, "-1"));
        let number = |text: &str| text.parse::<i32>().ok();
        number(partitions)
            .zip(number(replication))
            .map(|(partitions, replication)| Self {
                partitions,
                replication,
            })
            .ok_or_else(|| {
                format!("{text:?}: expected PARTITIONS or PARTITIONS:REPLICATION, like 12:3")
            })
    }
}

/// Looks up topics and, if configured to do so, creates missing topics.
#[derive(Clone)]
pub(crate) struct Topics {
    config: ClientConfig,
    create: Option<CreateTopics>,
    credentials: Credentials,
}

/// A partition that the topic is expected to have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    /// Index of the partition.
    pub(super) partition: usize,
    /// How long the brokers must report that the partition does not exist before Walpost treats it
    /// as nonexistent.
    pub(super) within: Duration,
}

/// The state of a topic, as reported by the cluster.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Lookup {
    /// The topic exists and has this many partitions.
    Present(usize),
    /// The topic does not exist, or its creation is not complete.
    Missing,
    /// Access is denied, or the broker rejects the topic's name. The string is the reason.
    Denied(String),
}

impl Topics {
    /// Creates a lookup for the cluster that `config` connects to.
    #[must_use]
    pub(crate) fn new(config: ClientConfig, create: Option<CreateTopics>) -> Self {
        Self {
            config,
            create,
            credentials: Credentials::default(),
        }
    }

    /// Sets the credentials that clients use. The credentials are reread whenever a client is
    /// created.
    pub(super) fn set_credentials(&mut self, credentials: Credentials) {
        self.credentials = credentials;
    }

    /// Waits until `topic` exists, and returns its current number of partitions. If `wanted`
    /// specifies a partition, also waits for that partition, but not longer than
    /// [`Wanted::within`]. Continues to wait while no broker is reachable, and while a topic is
    /// being created. Missing topics among `others` are created with the same request.
    ///
    /// # Errors
    /// Returns an error if the topic does not exist and can't be created, or if the brokers deny
    /// access.
    pub(crate) async fn prepare(
        self,
        producer: Arc<BaseProducer<Context>>,
        topic: String,
        wanted: Option<Wanted>,
        others: Vec<String>,
    ) -> Result<Prepared, SinkError> {
        let mut absent_since = None;
        let mut missing_since = None;
        let mut creation = Creation::new(others);
        let mut refusals = Refusals::default();
        let mut pause = LOOKUP_DELAY_MIN;
        loop {
            match lookup(&producer, &topic).await {
                Ok(Lookup::Present(partitions)) => {
                    producer.client().context().record_response();
                    let now = Instant::now();
                    let since = now.duration_since(*absent_since.get_or_insert(now));
                    if wanted.is_none_or(|wanted| {
                        wanted.partition < partitions || since >= wanted.within
                    }) {
                        return Ok(Prepared::Usable { partitions });
                    }
                }
                Ok(Lookup::Denied(reason)) => {
                    return Err(self.unusable_error(&topic, UnusableReason::Denied(reason)));
                }
                Ok(Lookup::Missing) => {
                    producer.client().context().record_response();
                    let now = Instant::now();
                    let waited = now.duration_since(*missing_since.get_or_insert(now));
                    match self.create {
                        Some(create) => creation
                            .tend(&self, &topic, create, waited)
                            .await?
                            .map_err(|reason| self.unusable_error(&topic, reason))?,
                        None if waited > CREATION_TIMEOUT => {
                            return Err(self.unusable_error(&topic, UnusableReason::Missing));
                        }
                        None => {}
                    }
                }
                Err(()) => refusals.record_no_response(&producer, &self).await?,
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LOOKUP_DELAY_MAX);
        }
    }

    /// Returns the error for a topic that can't be used.
    pub(super) fn unusable_error(&self, topic: &str, reason: UnusableReason) -> SinkError {
        let topic = topic.to_owned();
        match reason {
            UnusableReason::Missing => SinkError::TopicMissing {
                topic,
                brokers: self.brokers(),
            },
            UnusableReason::NotCreated(reason) => SinkError::TopicNotCreated {
                topic,
                brokers: self.brokers(),
                reason,
            },
            UnusableReason::Denied(reason) => SinkError::TopicDenied {
                grant: Grants::for_config(&self.config).topic(&topic),
                topic,
                reason,
            },
            UnusableReason::CreationDenied(reason) => SinkError::TopicDenied {
                grant: Grants::for_config(&self.config).create(&topic),
                topic,
                reason,
            },
        }
    }

    /// Returns the settings for creating missing topics, or `None` if missing topics are not
    /// created.
    pub(super) fn create(&self) -> Option<CreateTopics> {
        self.create
    }

    /// Returns a copy for a replacement producer, with one Kafka property changed.
    pub(super) fn with_property(&self, name: &str, value: u32) -> Self {
        let mut topics = self.clone();
        topics.credentials.renew(&mut topics.config);
        topics.config.set(name, value.to_string());
        topics
    }

    /// Returns the configuration of the producer.
    pub(super) fn config(&self) -> &ClientConfig {
        &self.config
    }

    /// Returns whether missing topics are created.
    pub(super) fn creates(&self) -> bool {
        self.create.is_some()
    }

    /// Returns the bootstrap servers, for use in messages.
    #[must_use]
    pub(crate) fn brokers(&self) -> String {
        brokers(&self.config)
    }

    /// Creates a client for administrative requests.
    pub(super) async fn admin(
        &self,
    ) -> KafkaResult<DropInBackground<AdminClient<DefaultClientContext>>> {
        let config = leave_producers(self.config.clone());
        let credentials = self.credentials.clone();
        let create_client = move || {
            let mut config = config;
            credentials.renew(&mut config);
            let client: AdminClient<_> = create(&config)?;
            credentials.set_token_or_warn(client.inner());
            Ok(DropInBackground::new(client))
        };
        match self.credentials.tokens() {
            None => create_client(),
            // Obtaining a token may take a while, so do it on a thread for blocking tasks.
            Some(_) => match tokio::task::spawn_blocking(create_client).await {
                Ok(created) => created,
                Err(error) => Err(KafkaError::ClientCreation(error.to_string())),
            },
        }
    }

    /// Creates a topic. It is not an error if another instance has created it first.
    ///
    /// # Errors
    /// Returns an error if the brokers reject the request for a reason that is not temporary.
    pub(super) async fn create_topic(&self, new: NewTopic) -> Result<CreatedTopic, SinkError> {
        let topic = new.name.clone();
        let (result, _) = self.create_topics(vec![new]).await?;
        result.map_err(|reason| self.unusable_error(&topic, reason))
    }

    /// Creates topics with one request. Returns the result for the first topic, and a list of the
    /// other topics that the brokers refused to create.
    ///
    /// # Errors
    /// Returns an error if the entire request fails for a reason that is not temporary.
    async fn create_topics(
        &self,
        topics: Vec<NewTopic>,
    ) -> Result<
        (
            Result<CreatedTopic, UnusableReason>,
            Vec<(String, UnusableReason)>,
        ),
        SinkError,
    > {
        let Some(first) = topics.first() else {
            return Ok((Ok(CreatedTopic::Exists), Vec::new()));
        };
        let (topic, partitions) = (first.name.clone(), first.partitions);
        let failed = |code: Option<Code>, reason: String| match code {
            Some(code) if is_temporary(code) => Ok((Ok(CreatedTopic::NotNow(reason)), Vec::new())),
            _ => Err(self.unusable_error(&topic, UnusableReason::NotCreated(reason))),
        };
        let admin = match self.admin().await {
            Ok(admin) => admin,
            Err(error) => return failed(None, describe(&error)),
        };
        debug!(topic, others = topics.len() - 1, "creating topics");
        let request = tokio::task::spawn_blocking(move || {
            native::create_topics(admin.inner(), &topics, CREATION_REQUEST_TIMEOUT)
        });
        let results = match request.await.unwrap_or(Err(Code::OperationTimedOut)) {
            Ok(results) => results,
            Err(code) => return failed(Some(code), code.to_string()),
        };
        // If the response does not contain the first topic, assume that the topic exists: the next
        // lookup shows whether it does.
        let mut first_result = Ok(CreatedTopic::Exists);
        let mut refused = Vec::new();
        for (name, result) in results {
            let outcome = match result {
                Ok(()) => {
                    info!(topic = name, partitions, "topic created");
                    Ok(CreatedTopic::Created)
                }
                Err(refusal) => {
                    debug!(topic = name, reason = %refusal, "topic not created");
                    interpret_refusal(&refusal)
                }
            };
            match outcome {
                outcome if name == topic => first_result = outcome,
                Err(reason) => refused.push((name, reason)),
                Ok(_) => {}
            }
        }
        Ok((first_result, refused))
    }
}

/// Interprets the broker's reason for not creating a topic.
fn interpret_refusal(refusal: &Refusal) -> Result<CreatedTopic, UnusableReason> {
    match refusal.code {
        // Another instance created the topic first.
        Code::TopicAlreadyExists => Ok(CreatedTopic::Exists),
        Code::TopicAuthorizationFailed | Code::ClusterAuthorizationFailed => Err(
            UnusableReason::CreationDenied(format!("the topic could not be created: {refusal}")),
        ),
        code if is_temporary(code) => Ok(CreatedTopic::NotNow(refusal.to_string())),
        _ => Err(UnusableReason::NotCreated(refusal.to_string())),
    }
}

/// The result of a request to create a topic.
pub(super) enum CreatedTopic {
    Created,
    /// The brokers report that the topic already exists.
    Exists,
    /// The brokers can't create the topic at the moment. The string is the reason.
    NotNow(String),
}

/// Returns whether the error is temporary, in which case the broker may accept a later request.
fn is_temporary(code: Code) -> bool {
    matches!(
        code,
        Code::AllBrokersDown
            | Code::BrokerTransportFailure
            | Code::NetworkException
            | Code::NotController
            | Code::OperationTimedOut
            | Code::RequestTimedOut
            | Code::ThrottlingQuotaExceeded
    )
}

/// A topic that is being created.
pub(super) struct Creation {
    /// Additional topics to create with the first request.
    others: Vec<String>,
    /// Topics from `others` that the brokers refuse to create.
    pub(super) refused: Vec<(String, UnusableReason)>,
    requested: Option<(Instant, CreatedTopic)>,
    logged_at: Option<Instant>,
}

impl Creation {
    pub(super) fn new(others: Vec<String>) -> Self {
        Self {
            others,
            refused: Vec::new(),
            requested: None,
            logged_at: None,
        }
    }

    /// Sends a request to create the topic, unless an earlier request succeeded less than
    /// [`CREATION_TIMEOUT`] ago. After this time, the topic may have been deleted, so the request
    /// is sent again. `missing` is how long the topic has been missing. The inner `Err` contains
    /// the brokers' reason for refusing to create the topic.
    ///
    /// # Errors
    /// Returns an error if the entire request fails for a reason that is not temporary.
    pub(super) async fn tend(
        &mut self,
        topics: &Topics,
        topic: &str,
        create: CreateTopics,
        missing: Duration,
    ) -> Result<Result<(), UnusableReason>, SinkError> {
        let is_due = match &self.requested {
            None | Some((_, CreatedTopic::NotNow(_))) => true,
            Some((at, _)) => at.elapsed() > CREATION_TIMEOUT,
        };
        if is_due {
            let others = std::mem::take(&mut self.others);
            let others = others.iter().take(create.max_others());
            let mut all = vec![create.new_topic(topic)];
            all.extend(others.map(|name| create.new_topic(name)));
            let is_alone = all.len() == 1;
            let result = match topics.create_topics(all).await {
                // The additional topics may have caused the failure, so the next request does not
                // contain them.
                Err(error) if !is_alone => CreatedTopic::NotNow(error.to_string()),
                result => {
                    let (result, refused) = result?;
                    self.refused = refused;
                    match result {
                        Ok(result) => result,
                        Err(reason) => return Ok(Err(reason)),
                    }
                }
            };
            self.requested = Some((Instant::now(), result));
        }
        if missing > CREATION_TIMEOUT
            && self
                .logged_at
                .is_none_or(|logged_at| logged_at.elapsed() > MISSING_TOPIC_LOG_INTERVAL)
        {
            self.logged_at = Some(Instant::now());
            let reason = match &self.requested {
                Some((_, CreatedTopic::NotNow(reason))) => reason,
                _ => {
                    "the brokers report that the topic exists, but the topic is missing from their metadata"
                }
            };
            warn!(
                topic,
                reason,
                elapsed = format_args!("{}s", missing.as_secs()),
                "waiting for a topic to appear in the brokers' metadata"
            );
        }
        Ok(Ok(()))
    }
}

/// Tracks how long authentication has been failing.
#[derive(Default)]
pub(super) struct Refusals {
    since: Option<Instant>,
}

impl Refusals {
    /// Handles a timeout: no broker has responded to a request from `producer`.
    ///
    /// # Errors
    /// Returns an error if authentication has been failing for so long that the failure is
    /// considered permanent.
    pub(super) async fn record_no_response(
        &mut self,
        producer: &BaseProducer<Context>,
        topics: &Topics,
    ) -> Result<(), SinkError> {
        let Some(reason) = producer.client().context().refusal() else {
            self.since = None;
            return Ok(());
        };
        let elapsed = self.since.get_or_insert_with(Instant::now).elapsed();
        let (timeout, reason) = match topics.credentials.were_accepted() {
            false => (AUTHENTICATION_FAILURE_TIMEOUT, reason),
            true => (
                REFUSED_LOGIN_TIMEOUT,
                format!(
                    "{reason}. Kafka accepted Walpost's credentials earlier, but has been rejecting them for {} s",
                    elapsed.as_secs()
                ),
            ),
        };
        if elapsed > timeout {
            return Err(SinkError::Refused {
                brokers: topics.brokers(),
                reason: certificate::explain(&topics.config, reason).await,
            });
        }
        Ok(())
    }
}

/// Looks up `topic` in the cluster. Returns `Err` if no broker responds.
async fn lookup(producer: &Arc<BaseProducer<Context>>, topic: &str) -> Result<Lookup, ()> {
    let (producer, topic) = (producer.clone(), topic.to_owned());
    let metadata = tokio::task::spawn_blocking(move || {
        let metadata = producer
            .client()
            .fetch_metadata(Some(&topic), METADATA_TIMEOUT)?;
        Ok::<_, rdkafka::error::KafkaError>(interpret_metadata(&metadata))
    });
    match metadata.await {
        Ok(Ok(lookup)) => Ok(lookup),
        Ok(Err(_)) | Err(_) => Err(()),
    }
}

/// Interprets the response to a metadata request for a single topic.
#[must_use]
pub(crate) fn interpret_metadata(metadata: &rdkafka::metadata::Metadata) -> Lookup {
    let Some(topic) = metadata.topics().first() else {
        return Lookup::Missing;
    };
    match topic.error() {
        None if topic.partitions().is_empty() => Lookup::Missing,
        None => Lookup::Present(topic.partitions().len()),
        Some(RDKafkaRespErr::RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED) => {
            Lookup::Denied(NOT_AUTHORIZED.to_owned())
        }
        Some(RDKafkaRespErr::RD_KAFKA_RESP_ERR_TOPIC_EXCEPTION) => {
            Lookup::Denied(NAME_NOT_ACCEPTED.to_owned())
        }
        Some(_) => Lookup::Missing,
    }
}
