//! Looks up topics for pipelines that turn an event into a dead letter if its topic can't be used.

use std::sync::Arc;
use std::time::Duration;

use rdkafka::error::RDKafkaErrorCode as Code;
use rdkafka::producer::{BaseProducer, Producer};
use tokio::task::spawn_blocking;
use tokio::time::Instant;
use tracing::debug;

use super::context::Context;
use super::native::{self, Description};
use super::topics::{
    Creation, LOOKUP_DELAY_MAX, LOOKUP_DELAY_MIN, METADATA_TIMEOUT, Refusals, Topics,
};
use super::unusable::{NAME_NOT_ACCEPTED, NOT_AUTHORIZED, UnusableReason, UnusableTopics};
use crate::sink::{Prepared, SinkError};

/// Maximum number of topics looked up with one request.
const TOPICS_PER_REQUEST_MAX: usize = 1000;

/// A variant of [`Topics::prepare`] that returns [`Prepared::Unusable`] instead of an error if the
/// topic can't be used.
pub(super) struct TopicLookup {
    topics: Topics,
    producer: Arc<BaseProducer<Context>>,
    unusable: Arc<UnusableTopics>,
}

/// The state of a topic, as reported by the brokers.
enum TopicState {
    Usable,
    /// The topic exists, but can't be used yet.
    NotReady,
    Unusable(UnusableReason),
}

/// A topic that is not usable yet.
struct Pending {
    topic: String,
    /// How long the brokers must consistently report that the topic is unusable before Walpost
    /// treats it as unusable.
    certain_after: Duration,
    /// When the brokers first reported that the topic is unusable.
    since: Option<Instant>,
    creation: Creation,
    has_tried_auto_creation: bool,
}

impl TopicLookup {
    pub(super) fn new(
        topics: Topics,
        producer: Arc<BaseProducer<Context>>,
        unusable: Arc<UnusableTopics>,
    ) -> Self {
        Self {
            topics,
            producer,
            unusable,
        }
    }

    /// Waits until it is certain whether `topic` can be used. The topic is treated as unusable if
    /// all responses over a period of time report an error for it. Timeouts are not taken into
    /// account. The topics in `others` are looked up with the same requests, so that each new topic
    /// does not require a separate wait.
    ///
    /// # Errors
    /// Returns an error if the request failed for a reason that is unrelated to this topic.
    pub(super) async fn prepare(
        self,
        topic: String,
        mut others: Vec<String>,
    ) -> Result<Prepared, SinkError> {
        let now = Instant::now().into_std();
        others.retain(|other| {
            self.unusable.applies_to(other) && self.unusable.reason(other, now).is_none()
        });
        others.truncate(TOPICS_PER_REQUEST_MAX - 1);
        let mut names = others.clone();
        names.push(topic.clone());
        let mut pending = Pending {
            topic,
            certain_after: self.unusable.certain_after(now),
            since: None,
            creation: Creation::new(others),
            has_tried_auto_creation: false,
        };
        let mut refusals = Refusals::default();
        let mut pause = LOOKUP_DELAY_MIN;
        loop {
            match self.describe(&names).await {
                Ok(found) => {
                    self.producer.client().context().record_response();
                    if let Some(prepared) = self.evaluate_response(&mut pending, found).await? {
                        return Ok(prepared);
                    }
                }
                Err(code) if is_no_response(code) => {
                    refusals
                        .record_no_response(&self.producer, &self.topics)
                        .await?
                }
                Err(code) => {
                    debug!(topic = pending.topic, %code, "failed to look up several topics in one request");
                    return self.prepare_topic(pending.topic).await;
                }
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LOOKUP_DELAY_MAX);
        }
    }

    async fn describe(&self, names: &[String]) -> Result<Vec<(String, Description)>, Code> {
        let (producer, names) = (Arc::clone(&self.producer), names.to_vec());
        let described = spawn_blocking(move || {
            native::describe_topics(producer.client(), &names, METADATA_TIMEOUT)
        });
        described.await.unwrap_or(Err(Code::OperationTimedOut))
    }

    /// Evaluates one response. Returns `None` if the brokers must be queried again.
    async fn evaluate_response(
        &self,
        pending: &mut Pending,
        found: Vec<(String, Description)>,
    ) -> Result<Option<Prepared>, SinkError> {
        let topic_result = found.iter().find(|(name, _)| *name == pending.topic);
        let reason = match topic_result.map(|(_, description)| state(description)) {
            Some(TopicState::Usable) => {
                if pending.has_tried_auto_creation {
                    let now = Instant::now().into_std();
                    self.unusable.record_auto_creation(true, now);
                }
                let topic = pending.topic.clone();
                return self.prepare_topic(topic).await.map(Some);
            }
            Some(TopicState::Unusable(reason)) => reason,
            Some(TopicState::NotReady) | None => return Ok(None),
        };
        let now = Instant::now();
        let waited = now.duration_since(*pending.since.get_or_insert(now));
        match (&reason, self.topics.create()) {
            (UnusableReason::Missing, Some(create)) => {
                let (topic, creation) = (&pending.topic, &mut pending.creation);
                let created = creation.tend(&self.topics, topic, create, waited).await?;
                for (name, reason) in std::mem::take(&mut creation.refused) {
                    self.unusable.insert(&name, reason, now.into_std());
                }
                match created {
                    Ok(()) => return Ok(None),
                    Err(reason) => self.unusable.insert(topic, reason, now.into_std()),
                }
            }
            _ if waited >= pending.certain_after => self.store_results(pending, found),
            (UnusableReason::Missing, None) => {
                self.try_auto_creation(pending).await;
                return Ok(None);
            }
            _ => return Ok(None),
        }
        self.unusable.record_wait(waited);
        Ok(Some(Prepared::Unusable))
    }

    /// Stores the reasons why topics can't be used, according to the last response.
    fn store_results(&self, pending: &Pending, found: Vec<(String, Description)>) {
        let now = Instant::now().into_std();
        if pending.has_tried_auto_creation {
            self.unusable.record_auto_creation(false, now);
        }
        let (mut topic_reason, mut other_reasons) = (None, Vec::new());
        for (name, description) in found {
            match state(&description) {
                TopicState::Unusable(reason) if name == pending.topic => {
                    topic_reason = Some(reason);
                }
                // Don't treat a missing topic in `others` as unusable if Walpost creates missing
                // topics: the topic is created before its first record is sent.
                TopicState::Unusable(UnusableReason::Missing) if self.topics.creates() => {}
                TopicState::Unusable(reason) => other_reasons.push((name, reason)),
                TopicState::Usable | TopicState::NotReady => {}
            }
        }
        for (name, reason) in other_reasons {
            self.unusable.insert(&name, reason, now);
        }
        // Insert `pending.topic` last, so that inserting the other topics can't evict it.
        if let Some(reason) = topic_reason {
            self.unusable.insert(&pending.topic, reason, now);
        }
    }

    /// Requests the topic's metadata in the same way as a producer, so that brokers with automatic
    /// topic creation create the topic. Uses a separate client, because a client remembers the name
    /// of each topic whose metadata it has requested.
    async fn try_auto_creation(&self, pending: &mut Pending) {
        let now = Instant::now().into_std();
        if pending.has_tried_auto_creation || !self.unusable.tries_auto_creation(now) {
            return;
        }
        pending.has_tried_auto_creation = true;
        let Ok(admin) = self.topics.admin().await else {
            return;
        };
        let topic = pending.topic.clone();
        let request = spawn_blocking(move || {
            // Ignore the result: the next lookup shows whether the topic was created.
            let _ = admin.inner().fetch_metadata(Some(&topic), METADATA_TIMEOUT);
        });
        let _ = request.await;
    }

    /// Prepares a topic that exists according to the last lookup.
    async fn prepare_topic(&self, topic: String) -> Result<Prepared, SinkError> {
        let (topics, producer) = (self.topics.clone(), Arc::clone(&self.producer));
        let prepared = topics
            .prepare(producer, topic.clone(), None, Vec::new())
            .await;
        // If the topic has been deleted since the lookup, or is no longer accessible, treat it as
        // unusable.
        let reason = match prepared {
            Err(SinkError::TopicMissing { .. }) => UnusableReason::Missing,
            Err(SinkError::TopicDenied { reason, .. }) => UnusableReason::Denied(reason),
            Err(SinkError::TopicNotCreated { reason, .. }) => UnusableReason::NotCreated(reason),
            prepared => return prepared,
        };
        let now = Instant::now().into_std();
        self.unusable.insert(&topic, reason, now);
        Ok(Prepared::Unusable)
    }
}

fn state(description: &Description) -> TopicState {
    let denied = |reason: &str| TopicState::Unusable(UnusableReason::Denied(reason.to_owned()));
    match description {
        Ok(facts) if facts.partitions == 0 => TopicState::NotReady,
        Ok(_) => TopicState::Usable,
        Err(Code::UnknownTopicOrPartition | Code::UnknownTopic) => {
            TopicState::Unusable(UnusableReason::Missing)
        }
        Err(Code::TopicAuthorizationFailed) => denied(NOT_AUTHORIZED),
        Err(Code::InvalidTopic) => denied(NAME_NOT_ACCEPTED),
        Err(_) => TopicState::NotReady,
    }
}

/// Returns whether the error code means that no broker responded in time.
fn is_no_response(code: Code) -> bool {
    matches!(
        code,
        Code::AllBrokersDown
            | Code::Authentication
            | Code::BrokerTransportFailure
            | Code::OperationTimedOut
            | Code::RequestTimedOut
            | Code::WaitingForCoordinator
            | Code::NetworkException
            | Code::Resolve
            | Code::SSL
            | Code::SaslAuthenticationFailed
    )
}
