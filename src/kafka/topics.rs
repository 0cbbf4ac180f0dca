//! A topic is there before its first record, or its absence is an error that says how to make it.

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

use super::aside::Aside;
use super::context::Context;
use super::credentials::Credentials;
use super::grants::Grants;
use super::native::{self, NewTopic, Refusal};
use super::properties::{brokers, create, describe, leave_producers};
use super::unusable::{NAME_NOT_ACCEPTED, NOT_AUTHORIZED, Reason};
use crate::model::time::REFUSAL_PATIENCE;
use crate::sink::{Prepared, SinkError};

/// How long brokers may take to create a topic, by themselves or when they are asked to.
const CREATION: Duration = Duration::from_secs(5);
/// How often it is told that a topic is waited for.
const TELL: Duration = Duration::from_secs(60);
/// The controller makes a record of each topic and of each partition, and takes 10,000 of a request at
/// most (`MAX_RECORDS_PER_USER_OP`).
const RECORDS_AT_ONCE: usize = 2000;
/// How long a broker may refuse us before it is taken at its word.
const REFUSAL: Duration = Duration::from_secs(10);
pub(super) const METADATA: Duration = Duration::from_secs(5);
/// How long brokers may take to answer a request to create topics.
const CREATION_REQUEST: Duration = Duration::from_secs(60);
/// Between two questions, the first time and later: a topic that was just created is mostly there at once.
pub(super) const PAUSE: Duration = Duration::from_millis(20);
pub(super) const PAUSE_MAX: Duration = Duration::from_millis(200);

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

impl CreateTopics {
    fn new_topic(&self, name: &str) -> NewTopic {
        NewTopic {
            name: name.to_owned(),
            partitions: self.partitions,
            replication: self.replication,
            settings: &[],
        }
    }

    /// How many topics are made with one request beside the first.
    fn at_once(&self) -> usize {
        usize::try_from(self.partitions).map_or(0, |partitions| RECORDS_AT_ONCE / (partitions + 1))
    }
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
pub(crate) struct Topics {
    config: ClientConfig,
    create: Option<CreateTopics>,
    credentials: Credentials,
}

/// A partition that a topic has to have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    /// Its number.
    pub(super) partition: usize,
    /// How long the brokers may say that it is not there until they are believed.
    pub(super) within: Duration,
}

/// What the cluster says of a topic.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Lookup {
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
    pub(crate) fn new(config: ClientConfig, create: Option<CreateTopics>) -> Self {
        Self {
            config,
            create,
            credentials: Credentials::default(),
        }
    }

    /// Has its clients prove who we are with `credentials` as they are by then.
    pub(super) fn prove(&mut self, credentials: Credentials) {
        self.credentials = credentials;
    }

    /// Resolves when `topic` is there, with its number of partitions, which the brokers are asked for now; or
    /// when one that is `wanted` stays away. Waits for as long as no broker can be reached, and for a topic that is to
    /// be created. With it `others` are, as far as they are missing.
    ///
    /// # Errors
    /// The topic is missing and stays so, or the brokers refuse us.
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
        let mut pause = PAUSE;
        loop {
            match lookup(&producer, &topic).await {
                Ok(Lookup::Present(partitions)) => {
                    producer.client().context().answered();
                    let now = Instant::now();
                    let since = now.duration_since(*absent_since.get_or_insert(now));
                    if wanted.is_none_or(|wanted| {
                        wanted.partition < partitions || since >= wanted.within
                    }) {
                        return Ok(Prepared::Usable { partitions });
                    }
                }
                Ok(Lookup::Denied(reason)) => {
                    return Err(self.unusable_error(&topic, Reason::Denied(reason)));
                }
                Ok(Lookup::Missing) => {
                    producer.client().context().answered();
                    let now = Instant::now();
                    let waited = now.duration_since(*missing_since.get_or_insert(now));
                    match self.create {
                        Some(create) => creation
                            .tend(&self, &topic, create, waited)
                            .await?
                            .map_err(|reason| self.unusable_error(&topic, reason))?,
                        None if waited > CREATION => {
                            return Err(self.unusable_error(&topic, Reason::Missing));
                        }
                        None => {}
                    }
                }
                Err(()) => refusals.note(&producer, &self)?,
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    /// The error for a topic that cannot be used.
    pub(super) fn unusable_error(&self, topic: &str, reason: Reason) -> SinkError {
        let topic = topic.to_owned();
        match reason {
            Reason::Missing => SinkError::TopicMissing {
                topic,
                brokers: self.brokers(),
            },
            Reason::NotCreated(reason) => SinkError::TopicNotCreated {
                topic,
                brokers: self.brokers(),
                reason,
            },
            Reason::Denied(reason) => SinkError::TopicDenied {
                grant: Grants::of(&self.config).topic(&topic),
                topic,
                reason,
            },
            Reason::CreationDenied(reason) => SinkError::TopicDenied {
                grant: Grants::of(&self.config).create(&topic),
                topic,
                reason,
            },
        }
    }

    /// How missing topics are created, if they are.
    pub(super) fn create(&self) -> Option<CreateTopics> {
        self.create
    }

    /// The same for a producer in the place of theirs, with another property.
    pub(super) fn with(&self, name: &str, value: u32) -> Self {
        let mut topics = self.clone();
        topics.credentials.renew(&mut topics.config);
        topics.config.set(name, value.to_string());
        topics
    }

    /// The configuration of the producer.
    pub(super) fn config(&self) -> &ClientConfig {
        &self.config
    }

    /// Topics that are missing are created.
    pub(super) fn creates(&self) -> bool {
        self.create.is_some()
    }

    /// The brokers' addresses, for messages.
    #[must_use]
    pub(crate) fn brokers(&self) -> String {
        brokers(&self.config)
    }

    /// A client for what is no record.
    pub(super) async fn admin(&self) -> KafkaResult<Aside<AdminClient<DefaultClientContext>>> {
        let config = leave_producers(self.config.clone());
        let credentials = self.credentials.clone();
        let make = move || {
            let mut config = config;
            credentials.renew(&mut config);
            let client: AdminClient<_> = create(&config)?;
            credentials.equip_or_warn(client.inner());
            Ok(Aside::new(client))
        };
        match self.credentials.tokens() {
            None => make(),
            // The program that prints one takes its time.
            Some(_) => match tokio::task::spawn_blocking(make).await {
                Ok(made) => made,
                Err(error) => Err(KafkaError::ClientCreation(error.to_string())),
            },
        }
    }

    /// Makes a topic. That another instance was faster is no failure.
    ///
    /// # Errors
    /// The brokers do not make it, and would not later.
    pub(super) async fn make(&self, new: NewTopic) -> Result<Made, SinkError> {
        let topic = new.name.clone();
        let (made, _) = self.make_several(vec![new]).await?;
        made.map_err(|reason| self.unusable_error(&topic, reason))
    }

    /// Creates topics with one request: returns the result for the first, and those of the others that the brokers refuse
    /// to create.
    ///
    /// # Errors
    /// The request failed as a whole, and would fail later.
    async fn make_several(
        &self,
        topics: Vec<NewTopic>,
    ) -> Result<(Result<Made, Reason>, Vec<(String, Reason)>), SinkError> {
        let Some(first) = topics.first() else {
            return Ok((Ok(Made::Exists), Vec::new()));
        };
        let (topic, partitions) = (first.name.clone(), first.partitions);
        let failed = |code: Option<Code>, reason: String| match code {
            Some(code) if is_of_the_moment(code) => Ok((Ok(Made::NotNow(reason)), Vec::new())),
            _ => Err(self.unusable_error(&topic, Reason::NotCreated(reason))),
        };
        let admin = match self.admin().await {
            Ok(admin) => admin,
            Err(error) => return failed(None, describe(&error)),
        };
        debug!(topic, others = topics.len() - 1, "creating topics");
        let asked = tokio::task::spawn_blocking(move || {
            native::create_topics(admin.inner(), &topics, CREATION_REQUEST)
        });
        let answers = match asked.await.unwrap_or(Err(Code::OperationTimedOut)) {
            Ok(answers) => answers,
            Err(code) => return failed(Some(code), code.to_string()),
        };
        // Where the answer has no result for it, another lookup shows what has become of the topic.
        let mut of_topic = Ok(Made::Exists);
        let mut refused = Vec::new();
        for (name, answer) in answers {
            let made = match answer {
                Ok(()) => {
                    info!(topic = name, partitions, "topic created");
                    Ok(Made::Created)
                }
                Err(refusal) => {
                    debug!(topic = name, reason = %refusal, "topic not created");
                    made_despite(&refusal)
                }
            };
            match made {
                made if name == topic => of_topic = made,
                Err(reason) => refused.push((name, reason)),
                Ok(_) => {}
            }
        }
        Ok((of_topic, refused))
    }
}

/// What it means that the brokers answer a request to create a topic with this refusal.
fn made_despite(refusal: &Refusal) -> Result<Made, Reason> {
    match refusal.code {
        // Another instance was faster.
        Code::TopicAlreadyExists => Ok(Made::Exists),
        Code::TopicAuthorizationFailed | Code::ClusterAuthorizationFailed => Err(
            Reason::CreationDenied(format!("it could not be created: {refusal}")),
        ),
        code if is_of_the_moment(code) => Ok(Made::NotNow(refusal.to_string())),
        _ => Err(Reason::NotCreated(refusal.to_string())),
    }
}

/// What came of asking the brokers for a topic.
pub(super) enum Made {
    Created,
    /// The brokers say that it is there already.
    Exists,
    /// They can't make it at the moment, and why.
    NotNow(String),
}

/// A broker that answers so may make the topic later.
fn is_of_the_moment(code: Code) -> bool {
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

/// A topic that is made and not there yet.
pub(super) struct Creation {
    /// Those that are made with it, at the first attempt.
    others: Vec<String>,
    /// Those of the others that the brokers refuse to make.
    pub(super) refused: Vec<(String, Reason)>,
    asked: Option<(Instant, Made)>,
    told: Option<Instant>,
}

impl Creation {
    pub(super) fn new(others: Vec<String>) -> Self {
        Self {
            others,
            refused: Vec::new(),
            asked: None,
            told: None,
        }
    }

    /// The topic is missing for so long: has it made, now and then, for one that was there may have been
    /// deleted. The inner result is the brokers' refusal to make this topic.
    ///
    /// # Errors
    /// The request to make it fails.
    pub(super) async fn tend(
        &mut self,
        topics: &Topics,
        topic: &str,
        create: CreateTopics,
        missing: Duration,
    ) -> Result<Result<(), Reason>, SinkError> {
        let is_due = match &self.asked {
            None | Some((_, Made::NotNow(_))) => true,
            Some((at, _)) => at.elapsed() > CREATION,
        };
        if is_due {
            let others = std::mem::take(&mut self.others);
            let others = others.iter().take(create.at_once());
            let mut all = vec![create.new_topic(topic)];
            all.extend(others.map(|name| create.new_topic(name)));
            let is_alone = all.len() == 1;
            let made = match topics.make_several(all).await {
                // It may be for the others' sake.
                Err(error) if !is_alone => Made::NotNow(error.to_string()),
                made => {
                    let (made, refused) = made?;
                    self.refused = refused;
                    match made {
                        Ok(made) => made,
                        Err(reason) => return Ok(Err(reason)),
                    }
                }
            };
            self.asked = Some((Instant::now(), made));
        }
        if missing > CREATION && self.told.is_none_or(|told| told.elapsed() > TELL) {
            self.told = Some(Instant::now());
            let reason = match &self.asked {
                Some((_, Made::NotNow(reason))) => reason,
                _ => "the brokers say that it exists, and their metadata does not show it",
            };
            warn!(
                topic,
                reason,
                elapsed = format_args!("{}s", missing.as_secs()),
                "waiting for a topic to exist"
            );
        }
        Ok(Ok(()))
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
        let tried = self.since.get_or_insert_with(Instant::now).elapsed();
        let (patience, reason) = match topics.credentials.were_accepted() {
            false => (REFUSAL, reason),
            true => (
                REFUSAL_PATIENCE,
                format!(
                    "{reason}. It had accepted Walpost's credentials, and was retried for {} s since",
                    tried.as_secs()
                ),
            ),
        };
        if tried > patience {
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
pub(crate) fn judge(metadata: &rdkafka::metadata::Metadata) -> Lookup {
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
