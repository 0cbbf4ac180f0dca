//! Detects whether the whole cluster has been replaced, or a topic has been deleted or re-created,
//! since a pipeline last delivered to the topic.
//!
//! A topic that is deleted and re-created keeps its name but gets a new ID. Records continue to be
//! delivered to the topic, so only comparing the IDs reveals that its earlier records are lost.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rdkafka::error::RDKafkaErrorCode as Code;
use rdkafka::producer::{BaseProducer, Producer};
use tracing::{debug, warn};

use super::context::Context;
use super::native::{self, Description, TopicId};

/// How often the current IDs of the topics in use are compared with the recorded IDs.
pub(super) const COMPARE_INTERVAL: Duration = Duration::from_secs(10);
/// How often the IDs of new topics are looked up until they are known.
pub(super) const LOOKUP_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum number of lookups for the ID of one topic. Without a limit, lookups would never end with
/// brokers older than Kafka 2.8, which have no topic IDs.
const MAX_LOOKUPS: u32 = 10;
/// Maximum number of stored IDs. Rows can name any topic, but only existing topics are stored.
const TOPICS_MAX: usize = 10_000;
/// Maximum number of topics looked up with one request.
const TOPICS_PER_REQUEST_MAX: usize = 1000;
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// The IDs of the cluster and its topics. Clones share their state, so the state outlives
/// individual producers.
#[derive(Clone, Default)]
pub struct SeenTopics(Arc<Mutex<Seen>>);

#[derive(Default)]
struct Seen {
    cluster: Option<String>,
    topics: HashMap<Box<str>, SeenTopic>,
}

struct SeenTopic {
    id: TopicId,
    is_missing: bool,
}

/// A change since the topic or cluster was last seen.
#[derive(Debug, PartialEq, Eq)]
enum Change {
    OtherCluster { before: String, now: String },
    Deleted { topic: String },
    CreatedAgain { topic: String },
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OtherCluster { before, now } => write!(
                f,
                "the brokers belong to a different Kafka cluster than before: {now:?}, expected {before:?}. The topics of this \
                 cluster do not contain the records that were delivered earlier"
            ),
            Self::Deleted { topic } => {
                write!(f, "topic {topic:?} was deleted, and its records are lost")
            }
            Self::CreatedAgain { topic } => write!(
                f,
                "topic {topic:?} was deleted and re-created, and its earlier records are lost"
            ),
        }
    }
}

impl SeenTopics {
    /// Returns whether the topic's ID has been recorded.
    pub(super) fn contains(&self, topic: &str) -> bool {
        self.lock().topics.contains_key(topic)
    }

    /// Looks up these topics, and logs what has changed since they were last seen. Blocks until the
    /// brokers respond or the request times out.
    pub(super) fn compare(&self, producer: &BaseProducer<Context>, topics: &[String]) {
        let pipeline = producer.context().pipeline();
        let mut found = Vec::new();
        for names in topics.chunks(TOPICS_PER_REQUEST_MAX) {
            match native::describe_topics(producer.client(), names, REQUEST_TIMEOUT) {
                Ok(descriptions) => found.extend(descriptions),
                // A failed lookup does not affect delivery, and the next comparison detects the
                // same changes.
                Err(code) => debug!(pipeline, reason = %code, "failed to look up topics"),
            }
        }
        let cluster = match self.has_changed(&found) {
            // The last metadata response may be from before the cluster was replaced, because
            // librdkafka does not query the metadata when it reconnects.
            true => {
                let cluster = native::query_cluster_id(producer.client(), REQUEST_TIMEOUT);
                if cluster.is_none() {
                    // Record nothing, so that the next comparison detects the same changes.
                    return;
                }
                cluster
            }
            false => native::cluster_id(producer.client()),
        };
        let mut changes: Vec<_> = cluster
            .and_then(|cluster| self.record_cluster(cluster))
            .into_iter()
            .collect();
        changes.extend(
            found
                .into_iter()
                .filter_map(|(topic, description)| self.record_topic(topic, &description)),
        );
        for change in changes {
            warn!(
                pipeline,
                "{change}. Events that are still in the outbox table can be sent again: see docs/replay.md"
            );
        }
        debug!(
            pipeline,
            topics = topics.len(),
            known = topics.iter().filter(|topic| self.contains(topic)).count(),
            "compared topics"
        );
    }

    /// Returns whether any of the topics was deleted or re-created since it was last seen.
    fn has_changed(&self, found: &[(String, Description)]) -> bool {
        let seen = self.lock();
        found.iter().any(|(topic, description)| {
            let Some(before) = seen.topics.get(topic.as_str()) else {
                return false;
            };
            match description {
                Ok(facts) => facts.id.is_some_and(|id| id != before.id),
                Err(Code::UnknownTopic | Code::UnknownTopicOrPartition) => !before.is_missing,
                Err(_) => false,
            }
        })
    }

    /// Records the cluster ID. Returns a change if a different ID was recorded before.
    fn record_cluster(&self, now: String) -> Option<Change> {
        let mut seen = self.lock();
        let before = seen.cluster.replace(now.clone())?;
        if before == now {
            return None;
        }
        // A different cluster has different topics, so don't report each topic.
        seen.topics.clear();
        Some(Change::OtherCluster { before, now })
    }

    /// Records the response for a topic. Returns the change since the topic was last seen, or
    /// `None` if nothing has changed.
    fn record_topic(&self, topic: String, description: &Description) -> Option<Change> {
        let mut seen = self.lock();
        let before = seen.topics.get_mut(topic.as_str());
        let id = match description {
            Ok(facts) => facts.id?,
            Err(Code::UnknownTopic | Code::UnknownTopicOrPartition) => {
                let was_missing = std::mem::replace(&mut before?.is_missing, true);
                return (!was_missing).then_some(Change::Deleted { topic });
            }
            Err(_) => return None,
        };
        let Some(before) = before else {
            if seen.topics.len() < TOPICS_MAX {
                let found = SeenTopic {
                    id,
                    is_missing: false,
                };
                seen.topics.insert(topic.into(), found);
            }
            return None;
        };
        before.is_missing = false;
        let is_same = std::mem::replace(&mut before.id, id) == id;
        (!is_same).then_some(Change::CreatedAgain { topic })
    }

    fn lock(&self) -> MutexGuard<'_, Seen> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Topics whose IDs are not known yet. The lookup of a new topic may fail, because the broker that
/// responds may not have received the topic's metadata yet.
#[derive(Default)]
pub(super) struct NewTopics {
    /// The topics' names, each with the number of times that the topic has been looked up.
    topics: Vec<(String, u32)>,
}

impl NewTopics {
    pub(super) fn add(&mut self, topic: &str) {
        self.topics.push((topic.to_owned(), 0));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.topics.is_empty()
    }

    /// Returns the topics to look up now. Removes topics that have been seen, and topics that have
    /// been looked up [`MAX_LOOKUPS`] times.
    pub(super) fn next_lookups(&mut self, seen: &SeenTopics) -> Vec<String> {
        self.topics
            .retain(|(topic, lookups)| *lookups < MAX_LOOKUPS && !seen.contains(topic));
        let looked_up = self.topics.iter_mut().map(|(topic, lookups)| {
            *lookups += 1;
            topic.clone()
        });
        looked_up.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kafka::native::TopicFacts;

    fn with_id(id: i64) -> Description {
        let id = Some(TopicId(id, id));
        Ok(TopicFacts { partitions: 1, id })
    }

    #[test]
    fn reports_each_change_to_a_topic_once() {
        let seen = SeenTopics::default();
        let record = |description: &Description| seen.record_topic("t".to_owned(), description);
        let topic = || "t".to_owned();
        assert_eq!(record(&Err(Code::UnknownTopicOrPartition)), None);
        assert_eq!(record(&with_id(1)), None);
        assert_eq!(record(&with_id(1)), None);
        let missing = Err(Code::UnknownTopicOrPartition);
        assert_eq!(record(&missing), Some(Change::Deleted { topic: topic() }));
        assert_eq!(record(&missing), None);
        let again = Some(Change::CreatedAgain { topic: topic() });
        assert_eq!(record(&with_id(2)), again);
        assert_eq!(record(&with_id(2)), None);
        // Brokers that have just started may not have the metadata of all topics yet.
        assert_eq!(record(&Err(Code::LeaderNotAvailable)), None);
        assert_eq!(record(&with_id(2)), None);
    }

    #[test]
    fn reports_a_cluster_change_once_instead_of_once_per_topic() {
        let seen = SeenTopics::default();
        assert_eq!(seen.record_cluster("a".to_owned()), None);
        assert_eq!(seen.record_topic("t".to_owned(), &with_id(1)), None);
        let change = seen.record_cluster("b".to_owned());
        assert!(
            matches!(change, Some(Change::OtherCluster { .. })),
            "{change:?}"
        );
        assert_eq!(seen.record_cluster("b".to_owned()), None);
        assert_eq!(seen.record_topic("t".to_owned(), &with_id(2)), None);
    }

    #[test]
    fn looks_up_a_new_topic_until_it_is_known_or_a_limit_is_reached() {
        let (seen, mut new) = (SeenTopics::default(), NewTopics::default());
        new.add("found");
        new.add("without an id");
        assert_eq!(new.next_lookups(&seen), ["found", "without an id"]);
        let unknown = Err(Code::UnknownTopicOrPartition);
        assert_eq!(seen.record_topic("found".to_owned(), &unknown), None);
        assert_eq!(new.next_lookups(&seen), ["found", "without an id"]);
        assert_eq!(seen.record_topic("found".to_owned(), &with_id(1)), None);
        for _ in 2..MAX_LOOKUPS {
            // Adding a topic does not reset the number of lookups of other topics.
            new.add("found");
            assert_eq!(new.next_lookups(&seen), ["without an id"]);
        }
        assert_eq!(new.next_lookups(&seen), Vec::<String>::new());
        assert!(new.is_empty());
    }

    #[test]
    fn limits_the_number_of_stored_topics() {
        let seen = SeenTopics::default();
        for number in 0..TOPICS_MAX + 10 {
            assert_eq!(seen.record_topic(number.to_string(), &with_id(1)), None);
        }
        assert_eq!(seen.lock().topics.len(), TOPICS_MAX);
    }
}
