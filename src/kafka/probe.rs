//! Checks the connection to the brokers, without producing any records.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rdkafka::ClientContext;
use rdkafka::config::{ClientConfig, RDKafkaLogLevel};
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::producer::{BaseProducer, DeliveryResult, Producer, ProducerContext};
use tokio::time::{sleep, timeout};

use super::certificate;
use super::context::{CONNECTION_CLOSED, Context, NEEDS_IDEMPOTENCE};
use super::credentials::Credentials;
use super::grants::Grants;
use super::limits::Limits;
use super::poller::Poller;
use super::properties::{
    Properties, client_config, create, create_with_context, describe, leave_producers,
};
use super::statistics;
use super::topics::{Lookup, Topics, interpret_metadata};
use crate::delivery::watermark::Watermark;
use crate::model::lsn::Lsn;
use crate::model::window::Window;
use crate::sink::SinkError;

const METADATA_TIMEOUT: Duration = Duration::from_secs(5);
/// Time limit for the brokers to assign a producer ID.
const PRODUCER_ID_TIMEOUT: Duration = Duration::from_secs(5);
/// Time limit for determining whether authentication fails.
const AUTHENTICATION_TIMEOUT: Duration = Duration::from_secs(10);
/// After a connection has failed, how long to wait for a connection to another broker or to another
/// address of the same host.
const OTHER_BROKERS_TIMEOUT: Duration = Duration::from_millis(1500);
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The result of checking the brokers.
#[derive(Debug)]
pub(crate) enum BrokerFinding {
    /// No broker responds; the message includes the remedy.
    Unreachable(String),
    /// Authentication failed, or librdkafka does not accept the properties.
    Refused(SinkError),
    /// The brokers respond, and the caller did not name a topic.
    Reachable {
        /// Number of brokers.
        brokers: usize,
    },
    /// The topic exists.
    Topic {
        topic: String,
        /// Number of partitions.
        partitions: usize,
        /// Size limits of the topic and the producer.
        limits: Limits,
    },
    /// The topic does not exist, or the principal may not use it.
    NoTopic {
        error: SinkError,
        /// Number of brokers.
        brokers: usize,
    },
}

impl BrokerFinding {
    /// Returns the number of brokers, which limits the replication factor of a new topic. Returns
    /// `None` if the topic exists or the brokers can't be used.
    pub(crate) fn brokers(&self) -> Option<usize> {
        match self {
            Self::Reachable { brokers } | Self::NoTopic { brokers, .. } => Some(*brokers),
            Self::Unreachable(_) | Self::Refused(_) | Self::Topic { .. } => None,
        }
    }
}

/// Queries the brokers and, if given, `topic`. The topic is not created.
pub(crate) async fn probe(
    properties: &Properties,
    credentials: &Credentials,
    topic: Option<String>,
) -> BrokerFinding {
    let producer = client_config(properties, "walpost-check");
    let mut config = leave_producers(producer.clone());
    // With this setting, a consumer's metadata request does not create the topic.
    config.set("allow.auto.create.topics", "false");
    let brokers = Topics::new(config.clone(), None).brokers();
    let grants = Grants::for_config(&config);
    let (query_config, bootstrap) = (config.clone(), brokers.clone());
    let query_credentials = credentials.clone();
    let query = tokio::task::spawn_blocking(move || {
        let consumer: BaseConsumer = create(&query_config)?;
        if let Err(error) = query_credentials.set_token(consumer.client()) {
            return Ok(BrokerFinding::Unreachable(error.to_string()));
        }
        let metadata = consumer.fetch_metadata(topic.as_deref(), METADATA_TIMEOUT)?;
        let brokers = metadata.brokers().len();
        let Some(topic) = topic else {
            return Ok(BrokerFinding::Reachable { brokers });
        };
        Ok::<_, rdkafka::error::KafkaError>(match interpret_metadata(&metadata) {
            Lookup::Present(partitions) => BrokerFinding::Topic {
                limits: Limits::query(consumer.client(), &topic, &producer),
                topic,
                partitions,
            },
            Lookup::Missing => BrokerFinding::NoTopic {
                error: SinkError::TopicMissing {
                    topic,
                    brokers: bootstrap,
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
            "no broker at {brokers} responds: {reason}. Correct bootstrap.servers, or security.protocol, sasl.* and ssl.*"
        ))
    };
    tokio::select! {
        biased;
        answer = query => match answer {
            Ok(Ok(finding)) => finding,
            // The client could not be created, so no broker was contacted.
            Ok(Err(KafkaError::ClientCreation(reason))) => BrokerFinding::Refused(SinkError::Configuration(reason)),
            Ok(Err(error)) if error.rdkafka_error_code() == Some(RDKafkaErrorCode::BrokerTransportFailure) => {
                unreachable(CONNECTION_CLOSED.to_owned())
            }
            Ok(Err(error)) => unreachable(describe(&error)),
            Err(error) => BrokerFinding::Unreachable(error.to_string()),
        },
        failure = find_cause(config, credentials, METADATA_TIMEOUT) => match failure {
            ConnectionFailure::Refused(reason) => BrokerFinding::Refused(SinkError::Refused { brokers, reason }),
            ConnectionFailure::Down(cause) => unreachable(cause.unwrap_or_else(|| CONNECTION_CLOSED.to_owned())),
        },
    }
}

/// The result of checking whether the brokers accept an idempotent producer. Messages include the
/// remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ProducerFinding {
    /// The brokers accept the producer, or [`probe`] has already reported why no client can
    /// connect.
    Taken,
    /// The brokers reject the producer.
    Refused(String),
    /// The brokers did not respond in time.
    Unanswered(String),
}

/// Requests a producer ID from the brokers. Does not produce records.
pub(crate) async fn producer(
    properties: &Properties,
    credentials: &Credentials,
) -> ProducerFinding {
    let config = client_config(properties, "walpost-check");
    let credentials = credentials.clone();
    let request = tokio::task::spawn_blocking(move || {
        request_producer_id(config, &credentials, PRODUCER_ID_TIMEOUT)
    });
    request.await.unwrap_or(ProducerFinding::Taken)
}

/// Creates a producer and waits up to `within` for its producer ID.
fn request_producer_id(
    mut config: ClientConfig,
    credentials: &Credentials,
    within: Duration,
) -> ProducerFinding {
    config.set("statistics.interval.ms", "50");
    let grants = Grants::for_config(&config);
    let created: Result<BaseProducer<IdentityContext>, _> =
        create_with_context(&config, IdentityContext::default());
    // Problems with the properties or the token have already been reported by `probe`.
    let Ok(producer) = created else {
        return ProducerFinding::Taken;
    };
    if credentials.set_token(producer.client()).is_err() {
        return ProducerFinding::Taken;
    }
    let started_at = Instant::now();
    while started_at.elapsed() < within {
        if producer.context().0.load(Ordering::Relaxed) {
            return ProducerFinding::Taken;
        }
        producer.poll(POLL_INTERVAL);
        if let Some((code, reason)) = producer.client().fatal_error() {
            let remedy = match code {
                RDKafkaErrorCode::ClusterAuthorizationFailed => format!(
                    "The principal is not authorized to write to any topic. Grant it Write and, for brokers before 2.8, also \
                     IdempotentWrite on the cluster: {}",
                    grants.topic("TOPIC")
                ),
                _ => NEEDS_IDEMPOTENCE.to_owned(),
            };
            return ProducerFinding::Refused(format!(
                "the brokers reject a producer with enable.idempotence = true: {reason}. {remedy}"
            ));
        }
    }
    ProducerFinding::Unanswered(format!(
        "the brokers did not assign a producer ID within {within:?}. enable.idempotence = true requires one, and nothing is \
         delivered without it. Look for InitProducerId in the broker logs; one possible cause is an unavailable controller. Then \
         run walpost check again"
    ))
}

/// A context that records whether the producer has received a producer ID.
#[derive(Default)]
struct IdentityContext(AtomicBool);

impl ClientContext for IdentityContext {
    fn stats_raw(&self, document: &[u8]) {
        if statistics::is_identified(document) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    // Log lines and errors are ignored, because `probe` reports the same errors.
    fn log(&self, _level: RDKafkaLogLevel, _facility: &str, _message: &str) {}

    fn error(&self, _error: KafkaError, _reason: &str) {}
}

impl ProducerContext for IdentityContext {
    type DeliveryOpaque = ();

    fn delivery(&self, _result: &DeliveryResult<'_>, _opaque: ()) {}
}

/// The reason why brokers don't respond.
enum ConnectionFailure {
    /// Authentication failed.
    Refused(String),
    /// No connection can be established. Contains the error of the last broker connection that
    /// failed.
    Down(Option<String>),
}

/// If the brokers don't respond because authentication failed, returns the reason for the failure.
pub(super) async fn refusal(config: ClientConfig, credentials: &Credentials) -> Option<String> {
    match timeout(
        AUTHENTICATION_TIMEOUT,
        find_cause(config, credentials, AUTHENTICATION_TIMEOUT),
    )
    .await
    {
        Ok(ConnectionFailure::Refused(reason)) => Some(reason),
        Ok(ConnectionFailure::Down(_)) | Err(_) => None,
    }
}

/// Determines why brokers don't respond; the metadata request times out after `limit`. Never
/// resolves if a broker responds or no reason is found. Uses a producer, because only a producer's
/// events contain the reason.
async fn find_cause(
    config: ClientConfig,
    credentials: &Credentials,
    limit: Duration,
) -> ConnectionFailure {
    let nothing = Window {
        records: 1,
        bytes: 1,
    };
    let deliveries = Watermark::new(nothing, Lsn::ZERO).deliveries();
    let context = Context::new("check", Grants::for_config(&config), deliveries)
        .with_credentials(credentials.clone(), None)
        .without_outage_log();
    let created: Result<BaseProducer<Context>, _> = create_with_context(&config, context);
    let poller = created.ok().and_then(|producer| {
        let producer = Arc::new(producer);
        let poller = Poller::start(Arc::clone(&producer)).ok()?;
        Some((producer, poller))
    });
    let Some((producer, _poller)) = poller else {
        return std::future::pending().await;
    };
    let query_producer = Arc::clone(&producer);
    let query =
        tokio::task::spawn_blocking(move || query_producer.client().fetch_metadata(None, limit));
    let context = producer.client().context();
    let failed = async {
        while context.refusal().is_none() && !context.is_down() {
            sleep(POLL_INTERVAL).await;
        }
        sleep(OTHER_BROKERS_TIMEOUT).await;
    };
    let has_response = tokio::select! {
        response = query => matches!(response, Ok(Ok(_))),
        () = failed => false,
    };
    match context.refusal() {
        _ if has_response => std::future::pending().await,
        Some(reason) => ConnectionFailure::Refused(certificate::explain(&config, reason).await),
        None if context.is_down() => ConnectionFailure::Down(context.cause()),
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use rdkafka::mocking::MockCluster;
    use rdkafka::producer::DefaultProducerContext;
    use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};

    use super::*;

    /// Requests a producer ID from a mock cluster that `prepare` has configured, and returns the
    /// result.
    fn mock_finding(
        prepare: impl FnOnce(&MockCluster<'static, DefaultProducerContext>),
    ) -> ProducerFinding {
        let cluster = MockCluster::new(1).expect("a mock cluster");
        prepare(&cluster);
        let properties = [("bootstrap.servers".to_owned(), cluster.bootstrap_servers())];
        let config = client_config(&properties.into(), "walpost-check");
        request_producer_id(config, &Credentials::default(), Duration::from_secs(2))
    }

    fn refused(prepare: impl FnOnce(&MockCluster<'static, DefaultProducerContext>)) -> String {
        match mock_finding(prepare) {
            ProducerFinding::Refused(reason) => reason,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn suggests_a_fix_if_brokers_reject_an_idempotent_producer() {
        use RDKafkaRespErr::{
            RD_KAFKA_RESP_ERR_CLUSTER_AUTHORIZATION_FAILED as DENIED,
            RD_KAFKA_RESP_ERR_COORDINATOR_LOAD_IN_PROGRESS as BUSY,
        };
        let request = RDKafkaApiKey::InitProducerId;
        let denied = refused(|cluster| cluster.request_errors(request, &[DENIED]));
        for text in [
            "enable.idempotence = true",
            "Cluster authorization failed",
            "--operation Write --topic TOPIC",
        ] {
            assert!(denied.contains(text), "{text} in {denied}");
        }
        let old = refused(|cluster| {
            cluster
                .apiversion(request, None, None)
                .expect("an unsupported request");
        });
        for text in ["Idempotent producer not supported", "Kafka 0.11 and later"] {
            assert!(old.contains(text), "{text} in {old}");
        }
        // A temporary error is not a rejection.
        assert_eq!(mock_finding(|_| {}), ProducerFinding::Taken);
        let busy =
            |times| mock_finding(|cluster| cluster.request_errors(request, &vec![BUSY; times]));
        assert_eq!(busy(1), ProducerFinding::Taken);
        // A retriable error that persists does not show whether the brokers accept the producer.
        match busy(1_000) {
            ProducerFinding::Unanswered(reason) => assert!(reason.contains("2s"), "{reason}"),
            other => panic!("{other:?}"),
        }
    }
}
