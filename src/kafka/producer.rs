//! The idempotent producer.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use rdkafka::error::RDKafkaErrorCode;
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{BaseRecord, Producer, ThreadedProducer};
use std::sync::Arc;

use super::context::Context;
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
    known: HashSet<Box<str>>,
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
            known: HashSet::new(),
            asked_at: Instant::now(),
        })
    }
}

impl Sink for KafkaSink {
    fn produce(&mut self, record: &Record<'_>, tag: Tag) -> Result<Produced, SinkError> {
        if !self.known.contains(record.topic) {
            return Ok(Produced::NewTopic);
        }
        let headers = record.headers.iter().fold(
            OwnedHeaders::new_with_capacity(record.headers.len()),
            |headers, (key, value)| headers.insert(Header { key, value }),
        );
        #[expect(
            clippy::cast_possible_truncation,
            reason = "usize has 64 bits: see Context"
        )]
        let sent = self.producer.send(BaseRecord {
            topic: record.topic,
            partition: record.partition,
            payload: record.payload,
            key: record.key,
            timestamp: record.timestamp_millis,
            headers: Some(headers),
            delivery_opaque: tag.to_word() as usize,
        });
        let Err((error, _)) = sent else {
            return Ok(Produced::Taken);
        };
        let topic = record.topic.to_owned();
        match (error.rdkafka_error_code(), record.partition) {
            (Some(RDKafkaErrorCode::QueueFull), _) => Ok(Produced::Full),
            (Some(RDKafkaErrorCode::MessageSizeTooLarge), _) => Err(SinkError::TooLarge {
                topic,
                bytes: record.key.map_or(0, <[u8]>::len)
                    + record.payload.map_or(0, <[u8]>::len)
                    + record
                        .headers
                        .iter()
                        .map(|(name, value)| name.len() + value.map_or(0, <[u8]>::len))
                        .sum::<usize>(),
            }),
            (Some(RDKafkaErrorCode::UnknownPartition), Some(partition)) => {
                Err(SinkError::NoPartition { topic, partition })
            }
            (
                Some(RDKafkaErrorCode::UnknownTopic | RDKafkaErrorCode::UnknownTopicOrPartition),
                _,
            ) => {
                self.known.remove(record.topic);
                Ok(Produced::NewTopic)
            }
            _ => Err(SinkError::Broken(describe(&error))),
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

    fn prepared(&mut self, topic: &str) {
        self.known.insert(topic.into());
    }

    /// Without records nobody would notice that an outage has ended.
    fn tend(&mut self) {
        if !self.producer.context().is_down() || self.asked_at.elapsed() < ASK {
            return;
        }
        self.asked_at = Instant::now();
        let producer = self.producer.clone();
        let topic = self.known.iter().next().cloned();
        tokio::task::spawn_blocking(move || {
            let client = producer.client();
            match client.fetch_metadata(topic.as_deref(), ANSWER) {
                Ok(_) => client.context().answered(),
                Err(error) => client.context().unreachable(&describe(&error)),
            }
        });
    }
}
