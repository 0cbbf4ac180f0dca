//! Checks the brokers and the topics, except topics whose names depend on a row's values or its
//! table.

use tokio::sync::Mutex;

use super::findings::{Outcome, Report};
use crate::kafka::limits::{RecordLimit, compaction_warning};
use crate::kafka::probe::{self, BrokerFinding, ProducerFinding};
use crate::kafka::properties::{Properties, unsuitable};
use crate::kafka::topics::CreateTopics;
use crate::pipeline::settings::{PipelineSettings, SinkSettings, Undeliverable};
use crate::postgres::catalog::EventLimit;
use crate::sink::SinkError;

/// Checks the brokers, and returns whether they respond. `largest_event` is the highest size limit
/// that any outbox table sets for events. `producers` caches the results of producer checks.
pub(super) async fn kafka<'s>(
    settings: &'s PipelineSettings,
    largest_event: Option<EventLimit>,
    producers: &Mutex<Vec<(&'s Properties, ProducerFinding)>>,
    report: &mut Report<'_>,
) -> bool {
    let SinkSettings::Kafka {
        properties,
        create_topics,
        credentials,
    } = &settings.sink
    else {
        return false;
    };
    if let Some(unsuitable) = unsuitable(properties) {
        report.add("kafka compression", Outcome::Failure, unsuitable);
    }
    // If the template contains no columns, the template is the name of the only topic. Otherwise,
    // the topics depend on each row's values.
    let topic = settings.outbox.topic.constant().map(str::to_owned);
    let found = probe::probe(properties, credentials, topic).await;
    let is_reachable = !matches!(
        found,
        BrokerFinding::Unreachable(_) | BrokerFinding::Refused(_)
    );
    let creates = create_topics.is_some();
    let is_topic_missing = matches!(found, BrokerFinding::NoTopic { .. });
    if let (Some(create), Some(brokers)) = (create_topics, found.brokers()) {
        replication(create, brokers, report);
    }
    if let Some(limit) = largest_event {
        let topic = match &found {
            BrokerFinding::Topic { topic, limits, .. } => Some((&**topic, limits)),
            _ => None,
        };
        event_size(
            &limit,
            &RecordLimit::new(properties, topic),
            settings,
            report,
        );
    }
    broker_finding("kafka", found, creates, settings, report);
    if is_reachable && !is_topic_missing {
        // Hold the lock during the check, so that pipelines with the same properties wait for its
        // result instead of repeating it.
        let mut producers = producers.lock().await;
        let known = producers.iter().find(|(known, _)| *known == properties);
        let found = match known {
            Some((_, found)) => found.clone(),
            None => {
                let found = probe::producer(properties, credentials).await;
                producers.push((properties, found.clone()));
                found
            }
        };
        drop(producers);
        match found {
            ProducerFinding::Taken => {}
            ProducerFinding::Refused(reason) => {
                report.add("kafka producer", Outcome::Failure, reason);
            }
            ProducerFinding::Unanswered(reason) => {
                report.add("kafka producer", Outcome::Unreachable, reason);
            }
        }
    }
    if is_reachable && settings.dead_letters.is_enabled() {
        let topic = settings.dead_letters.topic.clone();
        let found = probe::probe(properties, credentials, Some(topic)).await;
        match found {
            // Only a warning is reported, because the dead-letter topic is not needed unless a role
            // writes a logical decoding message that is not an event.
            BrokerFinding::NoTopic { error, .. }
                if !creates && !settings.dead_letters.includes_events() =>
            {
                let message = format!(
                    "any role that may write logical decoding messages can halt the pipeline with a message that is not \
                     an event: {error}"
                );
                report.add("dead letters", Outcome::Warning, message);
            }
            found => broker_finding("dead letters", found, creates, settings, report),
        }
    }
    is_reachable
}

/// Reports a replication factor that exceeds the number of brokers. Creating topics would fail,
/// because each replica requires its own broker.
fn replication(create: &CreateTopics, brokers: usize, report: &mut Report<'_>) {
    let replicas = usize::try_from(create.replication).unwrap_or_default();
    if replicas > brokers {
        let message = format!(
            "create_topics requests {replicas} replicas of each topic, but there are only {brokers} broker(s), so no topic can \
             be created: expected a replication of at most {brokers}"
        );
        report.add("kafka topics", Outcome::Failure, message);
    }
}

/// Reports a table that accepts larger events than Kafka does.
fn event_size(
    accepted: &EventLimit,
    record: &RecordLimit,
    settings: &PipelineSettings,
    report: &mut Report<'_>,
) {
    if accepted.bytes <= record.event_bytes() {
        return;
    }
    let result = match settings.dead_letters.oversize {
        Undeliverable::Halt => "an event whose record exceeds the limit halts the pipeline",
        Undeliverable::DeadLetter => {
            "an event whose record exceeds the limit is replaced by a dead letter without the payload"
        }
    };
    let EventLimit { table, bytes } = accepted;
    let message = format!(
        "table {table} accepts events of up to {bytes} bytes (walpost_event_size), but {record}: {result}. Raise \
         Kafka's limits or, as the table's owner, make the table reject larger events: {}",
        accepted.change_to(record.event_bytes())
    );
    report.add("event size", Outcome::Warning, message);
}

fn broker_finding(
    check: &'static str,
    found: BrokerFinding,
    creates: bool,
    settings: &PipelineSettings,
    report: &mut Report<'_>,
) {
    match found {
        BrokerFinding::Unreachable(reason) => report.add(check, Outcome::Unreachable, reason),
        BrokerFinding::Refused(error) => report.add(check, Outcome::Failure, error),
        BrokerFinding::Reachable { brokers } => {
            let message = format!(
                "{brokers} broker(s) reachable; topics and ACLs can be checked only when records are sent"
            );
            report.add(check, Outcome::Ok, message);
        }
        BrokerFinding::Topic {
            topic,
            partitions,
            limits,
        } => {
            let message = format!("topic {topic:?} has {partitions} partition(s){limits}");
            report.add(check, Outcome::Ok, message);
            if let Some(warning) = limits.warning(&topic, settings.row_bytes_max) {
                report.add(check, Outcome::Warning, warning);
            }
            let is_event_topic = settings.outbox.topic.constant() == Some(topic.as_str());
            if is_event_topic && limits.is_compacted && settings.outbox.has_implicit_tombstones() {
                report.add(check, Outcome::Warning, compaction_warning(&topic));
            }
        }
        BrokerFinding::NoTopic {
            error: SinkError::TopicMissing { .. },
            ..
        } if creates => {
            let message = "the topic does not exist and will be created";
            report.add(check, Outcome::Ok, message);
        }
        BrokerFinding::NoTopic { error, .. } => report.add(check, Outcome::Failure, error),
    }
}
