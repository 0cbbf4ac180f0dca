//! A look at the brokers, without producing anything.

use std::sync::Arc;
use std::time::Duration;

use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::producer::{BaseProducer, Producer};

use super::context::Context;
use super::grants::Grants;
use super::poller::Poller;
use super::properties::{Properties, client_config, describe, leave_producers};
use super::topics::{Lookup, Topics, judge};
use crate::pipeline::sink::SinkError;
use crate::pipeline::watermark::{Watermark, Window};
use crate::postgres::lsn::Lsn;

const METADATA: Duration = Duration::from_secs(10);
/// How long a refusal may take.
const REFUSAL: Duration = Duration::from_secs(3);

/// What a look at the brokers gave.
#[derive(Debug)]
pub enum BrokerFinding {
    /// No broker answers; the message says what mends it.
    Unreachable(String),
    /// They answer, and don't accept who we are, or we not who they are.
    Refused(SinkError),
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
    let grants = Grants::of(&config);
    let asking = config.clone();
    let asked = tokio::task::spawn_blocking(move || {
        let consumer: BaseConsumer = asking.create()?;
        let metadata = consumer.fetch_metadata(topic.as_deref(), METADATA)?;
        Ok::<_, rdkafka::error::KafkaError>(match topic {
            None => (None, Lookup::Present(metadata.brokers().len())),
            topic => (topic, judge(&metadata)),
        })
    });
    let answer = match asked.await {
        Ok(Ok(answer)) => answer,
        Ok(Err(error)) => {
            if let Some(reason) = refusal(config).await {
                return BrokerFinding::Refused(SinkError::Refused { brokers, reason });
            }
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
                grant: grants.topic(&topic),
                topic,
                reason,
            })
        }
    }
}

/// Why the brokers don't accept who we are, or we not who they are, if that is why they don't
/// answer. Only a producer's events tell that.
pub(super) async fn refusal(config: ClientConfig) -> Option<String> {
    let nothing = Window {
        records: 1,
        bytes: 1,
    };
    let deliveries = Watermark::new(nothing, Lsn::ZERO).deliveries();
    let context = Context::new("check", Grants::of(&config), deliveries);
    let producer: BaseProducer<Context> = config.create_with_context(context).ok()?;
    let producer = Arc::new(producer);
    let poller = Poller::start(Arc::clone(&producer)).ok()?;
    let asking = Arc::clone(&producer);
    let asked = move || asking.client().fetch_metadata(None, REFUSAL).is_err();
    let failed = tokio::task::spawn_blocking(asked).await.ok()?;
    drop(poller);
    producer.client().context().refusal().filter(|_| failed)
}
