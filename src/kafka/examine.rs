//! Queries the broker settings that affect exactly-once delivery. Nothing is modified.

use std::time::Duration;

use rdkafka::admin::{AdminOptions, ConfigResource, ResourceSpecifier};
use rdkafka::consumer::Consumer;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};

use super::topics::{Lookup, interpret_metadata};
use super::transaction::Checkpoints;

const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// The broker and topic settings that affect exactly-once delivery.
#[derive(Debug)]
pub struct Examined {
    /// Number of brokers.
    pub brokers: usize,
    /// Number of replicas of the checkpoint topic; `None` if the topic does not exist yet.
    pub topic_replicas: Option<usize>,
    /// `min.insync.replicas` of the checkpoint topic.
    pub topic_min_insync: Option<i64>,
    /// `transaction.state.log.replication.factor`, as returned by one broker.
    pub state_replicas: Option<i64>,
    /// `transaction.max.timeout.ms`, as returned by one broker.
    pub timeout_max: Option<i64>,
    /// The pipeline's `transaction.timeout.ms`.
    pub timeout: i64,
}

impl Checkpoints {
    /// Queries the settings from the brokers.
    ///
    /// # Errors
    /// Returns an error if the brokers don't respond.
    pub async fn examine(self) -> Result<Examined, KafkaError> {
        let checkpoints = self.clone();
        let query = tokio::task::spawn_blocking(move || checkpoints.shape());
        let shape = query
            .await
            .map_err(|_| KafkaError::MetadataFetch(RDKafkaErrorCode::OperationTimedOut))??;
        let admin = self.topics().admin().await?;
        let no_broker = KafkaError::MetadataFetch(RDKafkaErrorCode::BrokerNotAvailable);
        let mut wanted = vec![ResourceSpecifier::Broker(shape.broker.ok_or(no_broker)?)];
        if shape.replicas.is_some() {
            wanted.push(ResourceSpecifier::Topic(self.topic()));
        }
        let options = AdminOptions::new().request_timeout(Some(REQUEST_TIMEOUT));
        let mut found = admin
            .describe_configs(&wanted, &options)
            .await?
            .into_iter()
            .map(Result::ok);
        let broker = found.next().flatten();
        let topic = found.next().flatten();
        Ok(Examined {
            brokers: shape.brokers,
            topic_replicas: shape.replicas,
            topic_min_insync: number(topic.as_ref(), "min.insync.replicas"),
            state_replicas: number(broker.as_ref(), "transaction.state.log.replication.factor"),
            timeout_max: number(broker.as_ref(), "transaction.max.timeout.ms"),
            timeout: self
                .config
                .get("transaction.timeout.ms")
                .and_then(|text| text.parse().ok())
                .unwrap_or_default(),
        })
    }

    fn shape(&self) -> Result<Shape, KafkaError> {
        let consumer = self.query_client()?;
        let metadata = consumer.fetch_metadata(Some(self.topic()), REQUEST_TIMEOUT)?;
        let replicas = match interpret_metadata(&metadata) {
            Lookup::Present(_) => metadata.topics().first().and_then(|topic| {
                let partition = topic.partitions().first()?;
                Some(partition.replicas().len())
            }),
            Lookup::Missing | Lookup::Denied(_) => None,
        };
        Ok(Shape {
            brokers: metadata.brokers().len(),
            broker: metadata.brokers().first().map(|broker| broker.id()),
            replicas,
        })
    }
}

struct Shape {
    brokers: usize,
    /// ID of the broker whose settings are queried.
    broker: Option<i32>,
    replicas: Option<usize>,
}

fn number(resource: Option<&ConfigResource>, name: &str) -> Option<i64> {
    resource?.get(name)?.value.as_ref()?.parse().ok()
}
