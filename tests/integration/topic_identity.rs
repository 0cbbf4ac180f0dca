//! A topic is deleted, re-created or replaced by a topic of another cluster while `run` delivers to
//! it.

use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, Server};
use crate::support::scene::Scene;
use crate::support::walpost::Walpost;

in_both_modes! {
    topic_that_is_created_again_is_delivered_to_and_the_loss_is_logged
    topic_that_is_deleted_is_created_where_the_settings_say_so
    topic_that_is_deleted_halts_and_says_so
    pipeline_that_is_stopped_continues_on_another_kafka_cluster
}

/// Starts Walpost, delivers an event and waits until it has recorded the topic's identity.
fn start(scene: &Scene, aggregate: &str, flags: &[&str]) -> Walpost {
    let run = scene
        .run()
        .args(["--log-level", "walpost=debug"])
        .args(flags);
    let mut walpost = run.start_streaming();
    scene.insert(aggregate, "before");
    scene.wait_for_records(1);
    scene.wait_until_confirmed();
    walpost.wait_for_log("known=1");
    walpost
}

fn keys(scene: &Scene) -> Vec<String> {
    let records = scene.records();
    records
        .iter()
        .map(|record| record.key().to_owned())
        .collect()
}

fn topic_that_is_created_again_is_delivered_to_and_the_loss_is_logged(exactly_once: bool) {
    let scene = Scene::new().in_mode(exactly_once);
    let aggregate = scene.aggregate(3);
    let topic = format!("outbox.event.{aggregate}");
    let mut walpost = start(&scene, &aggregate, &[]);
    scene.broker.delete_topic(&topic);
    scene.broker.create_topic(&topic, 1, &[]);
    scene.insert(&aggregate, "after");
    let line = walpost.wait_for_log("was deleted and created again");
    assert!(
        line.contains(&topic) && line.contains("docs/replay.md"),
        "{line}"
    );
    scene.wait_until_confirmed();
    assert_eq!(keys(&scene), ["after"]);
    walpost.terminate().expect_code(0);
}

fn topic_that_is_deleted_is_created_where_the_settings_say_so(exactly_once: bool) {
    let scene = Scene::new().in_mode(exactly_once);
    let aggregate = scene.aggregate(3);
    let topic = format!("outbox.event.{aggregate}");
    let mut walpost = start(&scene, &aggregate, &["--create-topics", "1:1"]);
    scene.broker.delete_topic(&topic);
    scene.insert(&aggregate, "after");
    scene.wait_until_confirmed();
    walpost.wait_for_log("was deleted and created again");
    assert_eq!(keys(&scene), ["after"]);
    walpost.terminate().expect_code(0);
}

fn topic_that_is_deleted_halts_and_says_so(exactly_once: bool) {
    let scene = Scene::new().in_mode(exactly_once);
    let aggregate = scene.aggregate(1);
    let topic = format!("outbox.event.{aggregate}");
    let walpost = start(&scene, &aggregate, &[]);
    scene.broker.delete_topic(&topic);
    scene.insert(&aggregate, "after");
    let finished = walpost.finish().expect_code(3);
    let finished = finished.expect_mentions(&["was deleted", &topic, "does not exist", "--create"]);
    assert!(
        !finished.stderr.contains("partition column"),
        "{}",
        finished.stderr
    );
}

fn pipeline_that_is_stopped_continues_on_another_kafka_cluster(exactly_once: bool) {
    let other = Broker::private();
    let mut scene = Scene::new().in_mode(exactly_once);
    let aggregate = scene.aggregate(1);
    let walpost = scene.start_and_confirm_one(&aggregate, "before");
    walpost.terminate().expect_code(0);
    scene.insert(&aggregate, "between");
    other.create_topic(&format!("outbox.event.{aggregate}"), 1, &[]);
    scene.change_cluster(&other);
    if exactly_once {
        let halted = scene.run().finish().expect_code(3);
        halted.expect_mentions(&["has no checkpoint", "walpost checkpoint adopt"]);
        scene
            .checkpoint("adopt")
            .arg("--yes")
            .finish()
            .expect_code(0);
    }
    let walpost = scene.start();
    scene.insert(&aggregate, "after");
    scene.wait_for_records(2);
    assert_eq!(keys(&scene), ["between", "after"]);
    walpost.terminate().expect_code(0);
}

#[test]
fn another_cluster_at_the_same_address_is_named() {
    let broker = Broker::private();
    let scene = Scene::on_servers(Server::shared(MAJOR), &broker);
    let aggregate = scene.aggregate(1);
    let mut walpost = start(&scene, &aggregate, &[]);
    broker.replace_cluster();
    broker.create_topic(&format!("outbox.event.{aggregate}"), 1, &[]);
    scene.insert(&aggregate, "after");
    let line = walpost.wait_for_log("belong to another Kafka cluster");
    assert!(line.contains("docs/replay.md"), "{line}");
    scene.wait_until_confirmed();
    assert_eq!(keys(&scene), ["after"]);
    walpost.terminate().expect_code(0);
}
