//! A topic is there before its first record, or its absence is an error that says how to make it.

use std::sync::Arc;
use std::time::Duration;

use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::config::ClientConfig;
use rdkafka::error::{KafkaResult, RDKafkaErrorCode as Code};
use rdkafka::producer::{BaseProducer, Producer};
use rdkafka::types::RDKafkaRespErr;
use tokio::time::Instant;
use tracing::info;

use super::context::Context;
use super::grants::Grants;
use super::properties::{brokers, describe, leave_producers};
use crate::pipeline::sink::SinkError;

/// How long a broker that creates topics by itself may take for it.
const CREATION: Duration = Duration::from_secs(5);
/// How long a broker may refuse us before it is taken at its word.
const REFUSAL: Duration = Duration::from_secs(10);
const METADATA: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(200);

/// How topics that don't exist are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CreateTopics {
    /// Number of partitions.
    pub partitions: i32,
    /// Number of replicas; without it, the broker's default.
    #[serde(default = "broker_default")]
    pub replication: i32,
}

fn broker_default() -> i32 {
    -1
}

impl std::str::FromStr for CreateTopics {
    type Err = String;

    /// Reads `PARTITIONS` or `PARTITIONS:REPLICATION`.
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

/// Looks topics up, and makes them where the configuration says so.
#[derive(Clone)]
pub struct Topics {
    config: ClientConfig,
    create: Option<CreateTopics>,
}

/// What the cluster says of a topic.
#[derive(Debug, PartialEq, Eq)]
pub enum Lookup {
    /// It has so many partitions.
    Present(usize),
    /// It isn't there, or not yet.
    Missing,
    /// We may not know.
    Denied(String),
}

impl Topics {
    /// For the cluster that `config` names.
    #[must_use]
    pub fn new(config: ClientConfig, create: Option<CreateTopics>) -> Self {
        Self { config, create }
    }

    /// Resolves when `topic` is there. Waits for as long as no broker can be reached.
    ///
    /// # Errors
    /// The topic is missing and stays so, or the brokers refuse us.
    pub async fn prepare(
        self,
        producer: Arc<BaseProducer<Context>>,
        topic: String,
    ) -> Result<usize, SinkError> {
        let mut missing_since = None;
        let mut refusals = Refusals::default();
        loop {
            match lookup(&producer, &topic).await {
                Ok(Lookup::Present(partitions)) => {
                    producer.client().context().answered();
                    return Ok(partitions);
                }
                Ok(Lookup::Denied(reason)) => {
                    let grant = Grants::of(&self.config).topic(&topic);
                    return Err(SinkError::TopicDenied {
                        topic,
                        reason,
                        grant,
                    });
                }
                Ok(Lookup::Missing) => {
                    producer.client().context().answered();
                    match (missing_since, self.create) {
                        (None, Some(create)) => self.create(&topic, create).await?,
                        (Some(since), _) if Instant::now().duration_since(since) > CREATION => {
                            return Err(SinkError::TopicMissing {
                                topic,
                                brokers: self.brokers(),
                            });
                        }
                        _ => {}
                    }
                    missing_since.get_or_insert_with(Instant::now);
                }
                Err(()) => refusals.note(&producer, &self)?,
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// The brokers' addresses, for messages.
    #[must_use]
    pub fn brokers(&self) -> String {
        brokers(&self.config)
    }

    async fn create(&self, topic: &str, create: CreateTopics) -> Result<(), SinkError> {
        let replication = TopicReplication::Fixed(create.replication);
        self.make(&NewTopic::new(topic, create.partitions, replication))
            .await
    }

    /// A client for what is no record.
    pub(super) fn admin(&self) -> KafkaResult<AdminClient<DefaultClientContext>> {
        leave_producers(self.config.clone()).create()
    }

    /// Makes a topic. That another instance was faster is no failure.
    pub(super) async fn make(&self, new: &NewTopic<'_>) -> Result<(), SinkError> {
        let (topic, partitions) = (new.name, new.num_partitions);
        let failed = |reason: String| SinkError::TopicNotCreated {
            topic: topic.to_owned(),
            brokers: self.brokers(),
            reason,
        };
        let admin = self.admin().map_err(|error| failed(describe(&error)))?;
        let options = AdminOptions::new().operation_timeout(Some(METADATA));
        let answer = admin
            .create_topics([new], &options)
            .await
            .map_err(|error| failed(describe(&error)))?;
        match answer.into_iter().next() {
            Some(Ok(_)) => {
                info!(topic, partitions, "topic created");
                Ok(())
            }
            // Another instance was faster.
            None | Some(Err((_, Code::TopicAlreadyExists))) => Ok(()),
            Some(Err((
                _,
                code @ (Code::TopicAuthorizationFailed | Code::ClusterAuthorizationFailed),
            ))) => Err(SinkError::TopicDenied {
                topic: topic.to_owned(),
                reason: format!("it could not be created: {code}"),
                grant: Grants::of(&self.config).create(topic),
            }),
            Some(Err((_, code))) => Err(failed(code.to_string())),
        }
    }
}

/// Since when the brokers don't accept who we are, or we not who they are.
#[derive(Default)]
pub(super) struct Refusals {
    since: Option<Instant>,
}

impl Refusals {
    /// No broker has answered `producer`.
    ///
    /// # Errors
    /// It has been refused for too long to be an accident.
    pub(super) fn note(
        &mut self,
        producer: &BaseProducer<Context>,
        topics: &Topics,
    ) -> Result<(), SinkError> {
        let Some(reason) = producer.client().context().refusal() else {
            self.since = None;
            return Ok(());
        };
        if self.since.get_or_insert_with(Instant::now).elapsed() > REFUSAL {
            return Err(SinkError::Refused {
                brokers: topics.brokers(),
                reason,
            });
        }
        Ok(())
    }
}

/// Asks the cluster for `topic`; `Err` where no broker answers.
async fn lookup(producer: &Arc<BaseProducer<Context>>, topic: &str) -> Result<Lookup, ()> {
    let (producer, topic) = (producer.clone(), topic.to_owned());
    let metadata = tokio::task::spawn_blocking(move || {
        let metadata = producer.client().fetch_metadata(Some(&topic), METADATA)?;
        Ok::<_, rdkafka::error::KafkaError>(judge(&metadata))
    });
    match metadata.await {
        Ok(Ok(lookup)) => Ok(lookup),
        Ok(Err(_)) | Err(_) => Err(()),
    }
}

/// Reads the answer for the one topic that was asked for.
#[must_use]
pub fn judge(metadata: &rdkafka::metadata::Metadata) -> Lookup {
    let Some(topic) = metadata.topics().first() else {
        return Lookup::Missing;
    };
    match topic.error() {
        None if topic.partitions().is_empty() => Lookup::Missing,
        None => Lookup::Present(topic.partitions().len()),
        Some(RDKafkaRespErr::RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED) => {
            Lookup::Denied("the broker denies access to it".to_owned())
        }
        Some(RDKafkaRespErr::RD_KAFKA_RESP_ERR_TOPIC_EXCEPTION) => {
            Lookup::Denied("the broker does not accept the name".to_owned())
        }
        Some(_) => Lookup::Missing,
    }
}
