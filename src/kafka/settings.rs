//! Settings for creating a pipeline's producer.

use super::credentials::Credentials;
use super::properties::Properties;
use super::topics::CreateTopics;

/// Settings for creating a pipeline's producer.
#[derive(Clone)]
pub struct ProducerSettings {
    /// Name of the pipeline.
    pub pipeline: String,
    /// The pipeline's slot, which is part of the transactional ID.
    pub slot: String,
    /// librdkafka properties.
    pub properties: Properties,
    /// How missing topics are created; `None` if they are not created.
    pub create_topics: Option<CreateTopics>,
    /// Source of the properties that authenticate the producer.
    pub credentials: Credentials,
    /// Settings of the checkpoint topic for exactly-once delivery; `None` for at-least-once.
    pub checkpoints: Option<CheckpointSettings>,
    /// Whether to log a warning if a topic is compacted and the user has not configured tombstones.
    pub warns_of_compaction: bool,
    /// The topic to which all records are sent; `None` if different rows can have different topics.
    pub constant_topic: Option<String>,
    /// The topic for dead letters that replace events whose topic can't be used. If `None`, these
    /// events cause an error instead. The dead letter topic itself must be usable.
    pub dead_letter_topic: Option<String>,
}

/// Settings of the topic in which exactly-once delivery stores checkpoints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckpointSettings {
    pub topic: String,
    /// Replication factor used to create the topic; -1 selects the broker's default.
    pub replication: i32,
}
