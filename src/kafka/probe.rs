//! A look at the brokers, without producing anything.

use std::sync::Arc;
use std::time::Duration;

use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::producer::{BaseProducer, Producer};
use tokio::time::{sleep, timeout};

use super::context::Context;
use super::credentials::Credentials;
use super::grants::Grants;
use super::limits::Limits;
use super::poller::Poller;
use super::properties::{Properties, client_config, describe, leave_producers};
use super::topics::{Lookup, Topics, judge};
use crate::delivery::watermark::Watermark;
use crate::model::lsn::Lsn;
use crate::model::window::Window;
use crate::sink::SinkError;

const METADATA: Duration = Duration::from_secs(5);
/// How long a refusal may take.
const REFUSAL: Duration = Duration::from_secs(3);
/// So long another broker, or another address of a name, may take to answer when one has not.
const OTHERS: Duration = Duration::from_millis(1500);
const PAUSE: Duration = Duration::from_millis(20);

/// What a look at the brokers gave.
#[derive(Debug)]
pub(crate) enum BrokerFinding {
    /// No broker answers; the message says what fixes it.
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
        /// How large what is sent to it may be.
        limits: Limits,
    },
    /// The topic is not there, or not for us.
    NoTopic(SinkError),
}

/// Asks for the brokers and, if there is one, for `topic`. Creates nothing.
pub(crate) async fn look(
    properties: &Properties,
    credentials: &Credentials,
    topic: Option<String>,
) -> BrokerFinding {
    let producer = client_config(properties, "walpost-check");
    let mut config = leave_producers(producer.clone());
    // A consumer's question does not create the topic.
    config.set("allow.auto.create.topics", "false");
    let brokers = Topics::new(config.clone(), None).brokers();
    let grants = Grants::of(&config);
    let (asking, named, proving) = (config.clone(), brokers.clone(), credentials.clone());
    let asked = tokio::task::spawn_blocking(move || {
        let consumer: BaseConsumer = asking.create()?;
        if let Err(error) = proving.equip(consumer.client()) {
            return Ok(BrokerFinding::Unreachable(error.to_string()));
        }
        let metadata = consumer.fetch_metadata(topic.as_deref(), METADATA)?;
        let Some(topic) = topic else {
            let brokers = metadata.brokers().len();
            return Ok(BrokerFinding::Reachable { brokers });
        };
        Ok::<_, rdkafka::error::KafkaError>(match judge(&metadata) {
            Lookup::Present(partitions) => BrokerFinding::Topic {
                limits: Limits::look_up(consumer.client(), &topic, &producer),
                topic,
                partitions,
            },
            Lookup::Missing => {
                let brokers = named;
                BrokerFinding::NoTopic(SinkError::TopicMissing { topic, brokers })
            }
            Lookup::Denied(reason) => BrokerFinding::NoTopic(SinkError::TopicDenied {
                grant: grants.topic(&topic),
                topic,
                reason,
            }),
        })
    });
    let unreachable = |reason: String| {
        BrokerFinding::Unreachable(format!(
            "no broker at {brokers} answers: {reason}. Correct bootstrap.servers, or security.protocol, sasl.* and ssl.*"
        ))
    };
    tokio::select! {
        biased;
        answer = asked => match answer {
            Ok(Ok(finding)) => finding,
            Ok(Err(error)) => unreachable(describe(&error)),
            Err(error) => BrokerFinding::Unreachable(error.to_string()),
        },
        trouble = trouble(config, credentials, METADATA) => match trouble {
            Trouble::Refused(reason) => BrokerFinding::Refused(SinkError::Refused { brokers, reason }),
            Trouble::Down => unreachable("all of them are down".to_owned()),
        },
    }
}

/// What keeps brokers from answering.
enum Trouble {
    /// They don't accept who we are, or we not who they are.
    Refused(String),
    /// No connection comes about.
    Down,
}

/// Why the brokers don't accept who we are, or we not who they are, if that is why they don't
/// answer.
pub(super) async fn refusal(config: ClientConfig, credentials: &Credentials) -> Option<String> {
    match timeout(REFUSAL, trouble(config, credentials, REFUSAL)).await {
        Ok(Trouble::Refused(reason)) => Some(reason),
        Ok(Trouble::Down) | Err(_) => None,
    }
}

/// Resolves with what keeps brokers from answering, if that is told within `limit`. Only a producer's
/// events tell it.
async fn trouble(config: ClientConfig, credentials: &Credentials, limit: Duration) -> Trouble {
    let nothing = Window {
        records: 1,
        bytes: 1,
    };
    let deliveries = Watermark::new(nothing, Lsn::ZERO).deliveries();
    let context =
        Context::new("check", Grants::of(&config), deliveries).proving(credentials.clone(), None);
    let made: Result<BaseProducer<Context>, _> = config.create_with_context(context);
    let poller = made.ok().and_then(|producer| {
        let producer = Arc::new(producer);
        let poller = Poller::start(Arc::clone(&producer)).ok()?;
        Some((producer, poller))
    });
    let Some((producer, _poller)) = poller else {
        return std::future::pending().await;
    };
    let asking = Arc::clone(&producer);
    let asked = tokio::task::spawn_blocking(move || asking.client().fetch_metadata(None, limit));
    let context = producer.client().context();
    let heard = async {
        while context.refusal().is_none() && !context.is_down() {
            sleep(PAUSE).await;
        }
        sleep(OTHERS).await;
    };
    let answers = tokio::select! {
        answer = asked => matches!(answer, Ok(Ok(_))),
        () = heard => false,
    };
    match context.refusal() {
        _ if answers => std::future::pending().await,
        Some(reason) => Trouble::Refused(reason),
        None if context.is_down() => Trouble::Down,
        None => std::future::pending().await,
    }
}
