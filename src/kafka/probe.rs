//! A look at the brokers, without producing anything.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rdkafka::ClientContext;
use rdkafka::config::{ClientConfig, RDKafkaLogLevel};
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::producer::{BaseProducer, DeliveryResult, Producer, ProducerContext};
use tokio::time::{sleep, timeout};

use super::context::{Context, NEEDS_IDEMPOTENCE};
use super::credentials::Credentials;
use super::grants::Grants;
use super::limits::Limits;
use super::poller::Poller;
use super::properties::{
    Properties, client_config, create, create_with_context, describe, leave_producers,
};
use super::statistics;
use super::topics::{Lookup, Topics, judge};
use crate::delivery::watermark::Watermark;
use crate::model::lsn::Lsn;
use crate::model::window::Window;
use crate::sink::SinkError;

const METADATA: Duration = Duration::from_secs(5);
/// How long brokers may take to assign a producer ID.
const IDENTITY: Duration = Duration::from_secs(5);
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
    /// The topic does not exist, or may not be used.
    NoTopic {
        error: SinkError,
        /// How many brokers there are.
        brokers: usize,
    },
}

impl BrokerFinding {
    /// The number of brokers, if it matters: an existing topic is not created.
    pub(crate) fn brokers(&self) -> Option<usize> {
        match self {
            Self::Reachable { brokers } | Self::NoTopic { brokers, .. } => Some(*brokers),
            Self::Unreachable(_) | Self::Refused(_) | Self::Topic { .. } => None,
        }
    }
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
        let consumer: BaseConsumer = create(&asking)?;
        if let Err(error) = proving.equip(consumer.client()) {
            return Ok(BrokerFinding::Unreachable(error.to_string()));
        }
        let metadata = consumer.fetch_metadata(topic.as_deref(), METADATA)?;
        let brokers = metadata.brokers().len();
        let Some(topic) = topic else {
            return Ok(BrokerFinding::Reachable { brokers });
        };
        Ok::<_, rdkafka::error::KafkaError>(match judge(&metadata) {
            Lookup::Present(partitions) => BrokerFinding::Topic {
                limits: Limits::look_up(consumer.client(), &topic, &producer),
                topic,
                partitions,
            },
            Lookup::Missing => BrokerFinding::NoTopic {
                error: SinkError::TopicMissing {
                    topic,
                    brokers: named,
                },
                brokers,
            },
            Lookup::Denied(reason) => BrokerFinding::NoTopic {
                error: SinkError::TopicDenied {
                    grant: grants.topic(&topic),
                    topic,
                    reason,
                },
                brokers,
            },
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
            // No broker was asked.
            Ok(Err(KafkaError::ClientCreation(reason))) => BrokerFinding::Refused(SinkError::Configuration(reason)),
            Ok(Err(error)) => unreachable(describe(&error)),
            Err(error) => BrokerFinding::Unreachable(error.to_string()),
        },
        trouble = trouble(config, credentials, METADATA) => match trouble {
            Trouble::Refused(reason) => BrokerFinding::Refused(SinkError::Refused { brokers, reason }),
            Trouble::Down(cause) => unreachable(cause.unwrap_or_else(|| "all of them are down".to_owned())),
        },
    }
}

/// Whether the brokers, which answer, take the idempotent producer that Walpost is. Messages say what fixes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ProducerFinding {
    /// They do, or what keeps them from it was said of them before.
    Taken,
    /// They don't.
    Refused(String),
    /// They have not said so in time.
    Unanswered(String),
}

/// Asks the brokers for a producer ID. Writes nothing.
pub(crate) async fn producer(
    properties: &Properties,
    credentials: &Credentials,
) -> ProducerFinding {
    let config = client_config(properties, "walpost-check");
    let credentials = credentials.clone();
    let asked = tokio::task::spawn_blocking(move || identity(config, &credentials, IDENTITY));
    asked.await.unwrap_or(ProducerFinding::Taken)
}

/// Has a producer ask for its identity, for so long at most.
fn identity(
    mut config: ClientConfig,
    credentials: &Credentials,
    within: Duration,
) -> ProducerFinding {
    config.set("statistics.interval.ms", "50");
    let grants = Grants::of(&config);
    let made: Result<BaseProducer<Identity>, _> = create_with_context(&config, Identity::default());
    // What is wrong with the properties or the token was said of the brokers.
    let Ok(producer) = made else {
        return ProducerFinding::Taken;
    };
    if credentials.equip(producer.client()).is_err() {
        return ProducerFinding::Taken;
    }
    let began = Instant::now();
    while began.elapsed() < within {
        if producer.context().0.load(Ordering::Relaxed) {
            return ProducerFinding::Taken;
        }
        producer.poll(PAUSE);
        if let Some((code, reason)) = producer.client().fatal_error() {
            let remedy = match code {
                RDKafkaErrorCode::ClusterAuthorizationFailed => format!(
                    "The principal may write to no topic. Give it Write, and with brokers before 2.8 IdempotentWrite on the cluster \
                     as well: {}",
                    grants.topic("TOPIC")
                ),
                _ => NEEDS_IDEMPOTENCE.to_owned(),
            };
            return ProducerFinding::Refused(format!(
                "the brokers refuse a producer with enable.idempotence = true: {reason}. {remedy}"
            ));
        }
    }
    ProducerFinding::Unanswered(format!(
        "the brokers have not assigned a producer ID, which enable.idempotence = true requires, within {within:?}: until they do, \
         nothing is delivered. Their logs say why, at InitProducerId; a controller that is not available is one reason. Run walpost \
         check again"
    ))
}

/// Hears that the producer has its identity.
#[derive(Default)]
struct Identity(AtomicBool);

impl ClientContext for Identity {
    fn stats_raw(&self, document: &[u8]) {
        if statistics::is_identified(document) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    // What it would say of the brokers was said of them.
    fn log(&self, _level: RDKafkaLogLevel, _facility: &str, _message: &str) {}

    fn error(&self, _error: KafkaError, _reason: &str) {}
}

impl ProducerContext for Identity {
    type DeliveryOpaque = ();

    fn delivery(&self, _result: &DeliveryResult<'_>, _opaque: ()) {}
}

/// What keeps brokers from answering.
enum Trouble {
    /// They don't accept who we are, or we not who they are.
    Refused(String),
    /// No connection comes about, for the reason that a broker's connection failed last.
    Down(Option<String>),
}

/// Why the brokers don't accept who we are, or we not who they are, if that is why they don't
/// answer.
pub(super) async fn refusal(config: ClientConfig, credentials: &Credentials) -> Option<String> {
    match timeout(REFUSAL, trouble(config, credentials, REFUSAL)).await {
        Ok(Trouble::Refused(reason)) => Some(reason),
        Ok(Trouble::Down(_)) | Err(_) => None,
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
    let made: Result<BaseProducer<Context>, _> = create_with_context(&config, context);
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
        None if context.is_down() => Trouble::Down(context.cause()),
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use rdkafka::mocking::MockCluster;
    use rdkafka::producer::DefaultProducerContext;
    use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};

    use super::*;

    /// What is said of brokers that were prepared so.
    fn said(
        prepare: impl FnOnce(&MockCluster<'static, DefaultProducerContext>),
    ) -> ProducerFinding {
        let cluster = MockCluster::new(1).expect("a mock cluster");
        prepare(&cluster);
        let properties = [("bootstrap.servers".to_owned(), cluster.bootstrap_servers())];
        let config = client_config(&properties.into(), "walpost-check");
        identity(config, &Credentials::default(), Duration::from_secs(2))
    }

    fn refused(prepare: impl FnOnce(&MockCluster<'static, DefaultProducerContext>)) -> String {
        match said(prepare) {
            ProducerFinding::Refused(reason) => reason,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn brokers_that_refuse_an_idempotent_producer_are_named_with_what_fixes_it() {
        use RDKafkaRespErr::{
            RD_KAFKA_RESP_ERR_CLUSTER_AUTHORIZATION_FAILED as DENIED,
            RD_KAFKA_RESP_ERR_COORDINATOR_LOAD_IN_PROGRESS as BUSY,
        };
        let question = RDKafkaApiKey::InitProducerId;
        let denied = refused(|cluster| cluster.request_errors(question, &[DENIED]));
        for text in [
            "enable.idempotence = true",
            "Cluster authorization failed",
            "--operation Write --topic TOPIC",
        ] {
            assert!(denied.contains(text), "{text} in {denied}");
        }
        let old = refused(|cluster| {
            cluster
                .apiversion(question, None, None)
                .expect("no such question");
        });
        for text in ["Idempotent producer not supported", "from 0.11 on"] {
            assert!(old.contains(text), "{text} in {old}");
        }
        // What passes is no refusal.
        assert_eq!(said(|_| {}), ProducerFinding::Taken);
        let busy = |times| said(|cluster| cluster.request_errors(question, &vec![BUSY; times]));
        assert_eq!(busy(1), ProducerFinding::Taken);
        // Nor is what does not pass, but it is no consent either.
        match busy(1_000) {
            ProducerFinding::Unanswered(reason) => assert!(reason.contains("2s"), "{reason}"),
            other => panic!("{other:?}"),
        }
    }
}
