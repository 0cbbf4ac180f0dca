//! What a producer of one pipeline is made from.

use super::credentials::Credentials;
use super::properties::Properties;
use super::topics::CreateTopics;

/// What a pipeline's producer is made from.
#[derive(Clone)]
pub struct ProducerSettings {
    /// The pipeline's name.
    pub pipeline: String,
    /// Its slot, which transactions are named after.
    pub slot: String,
    /// librdkafka's properties.
    pub properties: Properties,
    /// How topics that don't exist are made, if they are.
    pub create_topics: Option<CreateTopics>,
    /// Those of the properties that prove who we are.
    pub credentials: Credentials,
    /// Where exactly-once keeps its place; none for at-least-once.
    pub checkpoints: Option<CheckpointSettings>,
    /// Tombstones that nobody has asked for are warned of where a topic is compacted.
    pub warns_of_compaction: bool,
    /// The topic of all records, where it is always the same.
    pub constant_topic: Option<String>,
    /// The topic for dead letters, if an event whose topic cannot be used becomes a dead letter; otherwise such an event
    /// is an error. The topic for dead letters itself must be usable.
    pub dead_letter_topic: Option<String>,
}

/// Where exactly-once keeps its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckpointSettings {
    pub topic: String,
    /// Its number of replicas, if it has to be made; -1 is the broker's default.
    pub replication: i32,
}
