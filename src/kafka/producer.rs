//! The idempotent producer.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::error::RDKafkaErrorCode;
use rdkafka::producer::{Producer, ThreadedProducer};

use super::context::Context;
use super::native::Topic;
use super::properties::{Properties, client_config, describe};
use super::topics::{CreateTopics, Topics};
use crate::outbox::Record;
use crate::pipeline::sink::{Preparation, Produced, Sink, SinkError};
use crate::pipeline::watermark::{Deliveries, Tag};

/// Kafka as a [`Sink`].
///
/// librdkafka copies key, value and headers when it takes a record, batches them on threads of its
/// own and calls [`Context`] for each delivery.
pub struct KafkaSink {
    producer: ThreadedProducer<Context>,
    topics: Topics,
    /// Those that exist, by name.
    known: HashMap<Box<str>, Topic>,
    asked_at: Instant,
}

/// How often the brokers are asked during an outage whether it has ended.
const ASK: Duration = Duration::from_secs(2);
const ANSWER: Duration = Duration::from_secs(5);

impl KafkaSink {
    /// A producer for the pipeline with this name, which reports to `deliveries`. Connects in the
    /// background.
    ///
    /// # Errors
    /// librdkafka does not accept the properties.
    pub fn new(
        pipeline: &str,
        properties: &Properties,
        create_topics: Option<CreateTopics>,
        deliveries: Arc<Deliveries>,
    ) -> Result<Self, SinkError> {
        let config = client_config(properties, &format!("walpost-{pipeline}"));
        let producer: ThreadedProducer<Context> = config
            .create_with_context(Context::new(pipeline, deliveries))
            .map_err(|error| SinkError::Configuration(describe(&error)))?;
        let topics = Topics::new(config, create_topics);
        Ok(Self {
            producer,
            topics,
            known: HashMap::new(),
            asked_at: Instant::now(),
        })
    }
}

impl Sink for KafkaSink {
    fn produce(&mut self, record: &Record<'_>, tag: Tag) -> Result<Produced, SinkError> {
        let Some(topic) = self.known.get(record.topic) else {
            return Ok(Produced::NewTopic);
        };
        let Err(code) = topic.produce(record, tag) else {
            return Ok(Produced::Taken);
        };
        let topic = record.topic.to_owned();
        match (code, record.partition) {
            (RDKafkaErrorCode::QueueFull, _) => Ok(Produced::Full),
            (RDKafkaErrorCode::MessageSizeTooLarge, _) => Err(SinkError::TooLarge {
                topic,
                bytes: record.key.map_or(0, <[u8]>::len)
                    + record.payload.map_or(0, <[u8]>::len)
                    + record
                        .headers
                        .iter()
                        .map(|(name, value)| name.len() + value.map_or(0, <[u8]>::len))
                        .sum::<usize>(),
            }),
            (RDKafkaErrorCode::UnknownPartition, Some(partition)) => {
                Err(SinkError::NoPartition { topic, partition })
            }
            (RDKafkaErrorCode::UnknownTopic | RDKafkaErrorCode::UnknownTopicOrPartition, _) => {
                self.known.remove(record.topic);
                Ok(Produced::NewTopic)
            }
            _ => Err(SinkError::Broken(code.to_string())),
        }
    }

    fn flush(&mut self) -> Result<(), SinkError> {
        Ok(())
    }

    fn prepare(&mut self, topic: &str) -> Preparation {
        Box::pin(
            self.topics
                .clone()
                .prepare(self.producer.clone(), topic.to_owned()),
        )
    }

    fn prepared(&mut self, topic: &str) -> Result<(), SinkError> {
        let opened = Topic::open(&self.producer, topic)
            .map_err(|code| SinkError::Broken(code.to_string()))?;
        self.known.insert(topic.into(), opened);
        Ok(())
    }

    /// Without records nobody would notice that an outage has ended.
    fn tend(&mut self) {
        if !self.producer.context().is_down() || self.asked_at.elapsed() < ASK {
            return;
        }
        self.asked_at = Instant::now();
        let producer = self.producer.clone();
        let topic = self.known.keys().next().cloned();
        tokio::task::spawn_blocking(move || {
            let client = producer.client();
            match client.fetch_metadata(topic.as_deref(), ANSWER) {
                Ok(_) => client.context().answered(),
                Err(error) => client.context().unreachable(&describe(&error)),
            }
        });
    }
}
