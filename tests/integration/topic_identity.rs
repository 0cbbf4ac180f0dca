//! While `run` delivers to a topic, the topic is deleted, re-created, or replaced by a topic on
//! another cluster.

use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, Server};
use crate::support::walpost::Walpost;

in_both_modes! {
    delivers_to_a_recreated_topic_and_logs_that_it_was_deleted
    recreates_a_deleted_topic_if_configured
    halts_and_reports_a_deleted_topic
    stopped_pipeline_continues_when_restarted_with_another_kafka_cluster
}

/// Starts Walpost, delivers an event, and waits until Walpost has recorded the topic's identity.
fn start(fixture: &Fixture, aggregate: &str, flags: &[&str]) -> Walpost {
    let run = fixture
        .run()
        .args(["--log-level", "walpost=debug"])
        .args(flags);
    let mut walpost = run.start_streaming();
    fixture.insert(aggregate, "before");
    fixture.wait_for_records(1);
    fixture.wait_until_confirmed();
    walpost.wait_for_log("known=1");
    walpost
}

fn keys(fixture: &Fixture) -> Vec<String> {
    let records = fixture.records();
    records
        .iter()
        .map(|record| record.key().to_owned())
        .collect()
}

fn delivers_to_a_recreated_topic_and_logs_that_it_was_deleted(exactly_once: bool) {
    let fixture = Fixture::new().in_mode(exactly_once);
    let aggregate = fixture.aggregate(3);
    let topic = format!("outbox.event.{aggregate}");
    let mut walpost = start(&fixture, &aggregate, &[]);
    fixture.broker.delete_topic(&topic);
    fixture.broker.create_topic(&topic, 1, &[]);
    fixture.insert(&aggregate, "after");
    let line = walpost.wait_for_log("was deleted and re-created");
    assert!(
        line.contains(&topic) && line.contains("docs/replay.md"),
        "{line}"
    );
    fixture.wait_until_confirmed();
    assert_eq!(keys(&fixture), ["after"]);
    walpost.terminate().expect_code(0);
}

fn recreates_a_deleted_topic_if_configured(exactly_once: bool) {
    let fixture = Fixture::new().in_mode(exactly_once);
    let aggregate = fixture.aggregate(3);
    let topic = format!("outbox.event.{aggregate}");
    let mut walpost = start(&fixture, &aggregate, &["--create-topics", "1:1"]);
    fixture.broker.delete_topic(&topic);
    fixture.insert(&aggregate, "after");
    fixture.wait_until_confirmed();
    walpost.wait_for_log("was deleted and re-created");
    assert_eq!(keys(&fixture), ["after"]);
    walpost.terminate().expect_code(0);
}

fn halts_and_reports_a_deleted_topic(exactly_once: bool) {
    let fixture = Fixture::new().in_mode(exactly_once);
    let aggregate = fixture.aggregate(1);
    let topic = format!("outbox.event.{aggregate}");
    let walpost = start(&fixture, &aggregate, &[]);
    fixture.broker.delete_topic(&topic);
    fixture.insert(&aggregate, "after");
    let finished = walpost.finish().expect_code(3);
    let finished = finished.expect_mentions(&["was deleted", &topic, "does not exist", "--create"]);
    assert!(
        !finished.stderr.contains("partition column"),
        "{}",
        finished.stderr
    );
}

fn stopped_pipeline_continues_when_restarted_with_another_kafka_cluster(exactly_once: bool) {
    let other = Broker::private();
    let mut fixture = Fixture::new().in_mode(exactly_once);
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_and_confirm_one(&aggregate, "before");
    walpost.terminate().expect_code(0);
    fixture.insert(&aggregate, "between");
    other.create_topic(&format!("outbox.event.{aggregate}"), 1, &[]);
    fixture.change_cluster(&other);
    if exactly_once {
        let halted = fixture.run().finish().expect_code(3);
        halted.expect_mentions(&["has no checkpoint", "walpost checkpoint adopt"]);
        fixture
            .checkpoint("adopt")
            .arg("--yes")
            .finish()
            .expect_code(0);
    }
    let walpost = fixture.start();
    fixture.insert(&aggregate, "after");
    fixture.wait_for_records(2);
    assert_eq!(keys(&fixture), ["between", "after"]);
    walpost.terminate().expect_code(0);
}

#[test]
fn reports_a_different_kafka_cluster_at_the_same_address() {
    let broker = Broker::private();
    let fixture = Fixture::on_servers(Server::shared(MAJOR), &broker);
    let aggregate = fixture.aggregate(1);
    let mut walpost = start(&fixture, &aggregate, &[]);
    broker.replace_cluster();
    broker.create_topic(&format!("outbox.event.{aggregate}"), 1, &[]);
    fixture.insert(&aggregate, "after");
    let line = walpost.wait_for_log("belong to a different Kafka cluster");
    assert!(line.contains("docs/replay.md"), "{line}");
    fixture.wait_until_confirmed();
    assert_eq!(keys(&fixture), ["after"]);
    walpost.terminate().expect_code(0);
}
