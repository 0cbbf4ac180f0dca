//! Creates, deletes and describes topics.

use std::time::Duration;

use rdkafka::admin::{
    AdminClient, AdminOptions, AlterConfig, NewPartitions, NewTopic, ResourceSpecifier,
    TopicReplication,
};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::types::RDKafkaErrorCode;
use tokio::runtime::Builder;

use super::super::wait::{WAIT_TIMEOUT, wait_for};
use super::Broker;

/// Returns options with a short timeout, for requests that are retried if a frozen broker does not
/// respond.
fn retry_soon() -> AdminOptions {
    const RETRY_TIMEOUT: Option<Duration> = Some(Duration::from_secs(20));
    AdminOptions::new()
        .operation_timeout(RETRY_TIMEOUT)
        .request_timeout(RETRY_TIMEOUT)
}

impl Broker {
    /// Creates a topic. `settings` is the topic's configuration.
    pub(crate) fn create_topic(&self, name: &str, partitions: i32, settings: &[(&str, &str)]) {
        self.create_topics(&[name], partitions, settings);
    }

    /// Creates several topics with a single request. Each of them has the given number of
    /// partitions.
    pub(crate) fn create_topics(&self, names: &[&str], partitions: i32, settings: &[(&str, &str)]) {
        let admin: AdminClient<DefaultClientContext> = self.client().create().unwrap();
        let topics: Vec<_> = names
            .iter()
            .map(|name| {
                let topic = NewTopic::new(name, partitions, self.replication());
                let settings = settings.iter();
                settings.fold(topic, |topic, (key, value)| topic.set(key, value))
            })
            .collect();
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let options = retry_soon();
        let results = wait_for("the broker to create the topics", || {
            let results = runtime.block_on(admin.create_topics(&topics, &options));
            // Retry if there are too few brokers: on a busy machine, heartbeats may arrive late,
            // and the controller then fences the broker.
            results.ok().filter(|results| {
                let too_few = RDKafkaErrorCode::InvalidReplicationFactor;
                !results
                    .iter()
                    .any(|result| matches!(result, Err((_, code)) if *code == too_few))
            })
        });
        for result in results {
            match result {
                Ok(_) | Err((_, RDKafkaErrorCode::TopicAlreadyExists)) => {}
                Err((name, code)) => panic!("could not create the topic {name}: {code}"),
            }
        }
        let client: BaseConsumer = self.client().create().unwrap();
        for name in names {
            wait_for("the topic to have leaders", || {
                let metadata = client
                    .fetch_metadata(Some(name), Duration::from_secs(5))
                    .ok()?;
                let found = metadata.topics()[0].partitions();
                let ready = found.len() == usize::try_from(partitions).unwrap()
                    && found
                        .iter()
                        .all(|partition| partition.error().is_none() && partition.leader() >= 0);
                ready.then_some(())
            });
        }
    }

    /// Deletes a topic and waits until every node has processed the deletion.
    pub(crate) fn delete_topic(&self, name: &str) {
        let admin: AdminClient<DefaultClientContext> = self.client().create().unwrap();
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let options = retry_soon();
        wait_for("the topic to be deleted", || {
            let deleted = runtime
                .block_on(admin.delete_topics(&[name], &options))
                .ok()?;
            matches!(
                deleted[0],
                Err((_, RDKafkaErrorCode::UnknownTopicOrPartition))
            )
            .then_some(())
        });
        // The response comes from the controller. A broker that has not yet processed the deletion
        // still accepts records for the topic, and later deletes them together with the topic.
        for ports in &self.position.nodes {
            let mut node = self.client();
            node.set("bootstrap.servers", format!("127.0.0.1:{}", ports.plain));
            let client: BaseConsumer = node.create().unwrap();
            wait_for("the broker to learn that the topic was deleted", || {
                let metadata = client.fetch_metadata(None, Duration::from_secs(5)).ok()?;
                let mut topics = metadata.topics().iter();
                topics.all(|topic| topic.name() != name).then_some(())
            });
        }
    }

    /// Returns the replication factor that places a replica on every node.
    fn replication(&self) -> TopicReplication<'static> {
        TopicReplication::Fixed(i32::try_from(self.position.nodes.len()).unwrap())
    }

    pub(crate) fn add_partitions(&self, topic: &str, total: usize) {
        let admin: AdminClient<DefaultClientContext> = self.client().create().unwrap();
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let options = retry_soon();
        let wanted = NewPartitions::new(topic, total);
        // If a previous attempt timed out because the broker was frozen, the partitions may already
        // exist.
        wait_for("the partitions to be created", || {
            let request = admin.create_partitions([&wanted], &options);
            let results = runtime.block_on(request).ok()?;
            (results[0].is_ok() || self.partitions(topic) == total).then_some(())
        });
        wait_for("the partitions to be known", || {
            (self.partitions(topic) == total).then_some(())
        });
    }

    /// Returns the number of partitions of a topic. Waits for the topic if necessary, because a new
    /// topic appears in the brokers' metadata with a delay.
    pub(crate) fn partitions(&self, topic: &str) -> usize {
        let client: BaseConsumer = self.client().create().unwrap();
        wait_for("the topic to be known", || {
            let metadata = client
                .fetch_metadata(Some(topic), Duration::from_secs(5))
                .ok()?;
            let partitions = metadata.topics()[0].partitions().len();
            (partitions > 0).then_some(partitions)
        })
    }

    /// Sets the topic's `max.message.bytes`, and removes any other configuration of the topic.
    pub(crate) fn limit_batches(&self, topic: &str, bytes: &str) {
        const MAX_MESSAGE_BYTES: &str = "max.message.bytes";
        let admin: AdminClient<DefaultClientContext> = self.client().create().unwrap();
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let options = AdminOptions::new().request_timeout(Some(WAIT_TIMEOUT));
        let resource = ResourceSpecifier::Topic(topic);
        let wanted = AlterConfig::new(resource).set(MAX_MESSAGE_BYTES, bytes);
        let set = runtime
            .block_on(admin.alter_configs([&wanted], &options))
            .expect("the broker answers");
        set[0].as_ref().expect("a limit");
        wait_for("the limit to be known", || {
            let request = admin.describe_configs([&resource], &options);
            let found = runtime.block_on(request).expect("the broker answers");
            let setting = found[0].as_ref().ok()?.get(MAX_MESSAGE_BYTES)?;
            (setting.value.as_deref() == Some(bytes)).then_some(())
        });
    }
}
