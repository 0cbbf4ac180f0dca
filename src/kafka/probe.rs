//! A look at the brokers, without producing anything.

use std::time::Duration;

use rdkafka::consumer::{BaseConsumer, Consumer};

use super::properties::{Properties, client_config, describe, leave_producers};
use super::topics::{Lookup, Topics, judge};
use crate::pipeline::sink::SinkError;

const METADATA: Duration = Duration::from_secs(10);

/// What a look at the brokers gave.
#[derive(Debug)]
pub enum BrokerFinding {
    /// No broker answers; the message says what mends it.
    Unreachable(String),
    /// They answer, and no topic was asked for.
    Reachable {
        /// How many there are.
        brokers: usize,
    },
    /// The topic is there.
    Topic {
        /// Its name.
        topic: String,
        /// How many partitions it has.
        partitions: usize,
    },
    /// The topic is not there, or not for us.
    NoTopic(SinkError),
}

/// Asks for the brokers and, if there is one, for `topic`. Creates nothing.
pub async fn look(properties: &Properties, topic: Option<String>) -> BrokerFinding {
    let mut config = leave_producers(client_config(properties, "walpost-check"));
    // A consumer's question does not create the topic.
    config.set("allow.auto.create.topics", "false");
    let brokers = Topics::new(config.clone(), None).brokers();
    let asked = tokio::task::spawn_blocking(move || {
        let consumer: BaseConsumer = config.create()?;
        let metadata = consumer.fetch_metadata(topic.as_deref(), METADATA)?;
        Ok::<_, rdkafka::error::KafkaError>(match topic {
            None => (None, Lookup::Present(metadata.brokers().len())),
            topic => (topic, judge(&metadata)),
        })
    });
    let answer = match asked.await {
        Ok(Ok(answer)) => answer,
        Ok(Err(error)) => {
            return BrokerFinding::Unreachable(format!(
                "no broker at {brokers} answers: {}. Correct bootstrap.servers, or security.protocol, sasl.* and ssl.*",
                describe(&error)
            ));
        }
        Err(error) => return BrokerFinding::Unreachable(error.to_string()),
    };
    match answer {
        (None, Lookup::Present(brokers)) => BrokerFinding::Reachable { brokers },
        (Some(topic), Lookup::Present(partitions)) => BrokerFinding::Topic { topic, partitions },
        (topic, Lookup::Missing) => {
            let topic = topic.unwrap_or_default();
            BrokerFinding::NoTopic(SinkError::TopicMissing { topic, brokers })
        }
        (topic, Lookup::Denied(reason)) => {
            let topic = topic.unwrap_or_default();
            BrokerFinding::NoTopic(SinkError::TopicDenied {
                topic,
                brokers,
                reason,
            })
        }
    }
}
