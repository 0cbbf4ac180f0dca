//! Topics that are missing are created, many with one request.

use crate::support::scene::Scene;
use crate::support::walpost::{Invocation, Walpost};

for_each_scene! {
    many_new_topics_are_created_together
}

in_both_modes! {
    many_new_topics_of_a_snapshot_are_created_together
}

const TOPICS: usize = 200;
/// Topics that are created together take fewer requests than that, and fewer Kafka transactions. One by one it would be one each; but
/// some are looked for before all of the rows were read, and more where processors are scarce.
const SOME: usize = TOPICS / 2;

/// Says when it asks for topics to be created.
fn run(scene: &Scene) -> Invocation {
    let run = scene.run().args(["--create-topics", "1:1"]);
    run.args(["--log-level", "walpost=debug"])
}

/// One event for each of many topics that are not there, in one transaction.
fn insert(scene: &Scene) -> Vec<String> {
    let aggregates = (0..TOPICS).map(|number| format!("{}.{number}", scene.name));
    let aggregates: Vec<_> = aggregates.collect();
    let rows: Vec<_> = aggregates
        .iter()
        .map(|aggregate| scene.insert_sql(aggregate, "k"))
        .collect();
    scene.db.run(&format!("BEGIN; {}; COMMIT", rows.join("; ")));
    let topics = aggregates.iter();
    topics
        .map(|aggregate| format!("outbox.event.{aggregate}"))
        .collect()
}

/// Each has its one record, and was not created alone.
fn judge(scene: &Scene, walpost: Walpost, topics: &[String]) {
    scene.wait_until_confirmed();
    let requests = walpost.logged("creating topics");
    assert!((1..SOME).contains(&requests), "{requests} requests");
    walpost.terminate().expect_code(0);
    let ends = scene.broker.ends(topics);
    assert_eq!(ends.len(), TOPICS);
    // A transaction has a record of its own at its end.
    let expected = if scene.is_exactly_once() { 2 } else { 1 };
    for (place, end) in ends {
        assert_eq!(end, expected, "{place:?}");
    }
    if scene.is_exactly_once() {
        // Topics that are waited for one after the other are no quiet times.
        let checkpoints = scene.checkpoints().len();
        assert!(checkpoints < SOME, "{checkpoints} checkpoints");
    }
}

fn many_new_topics_are_created_together(scene: Scene<'static>) {
    let walpost = run(&scene).start_streaming();
    let topics = insert(&scene);
    judge(&scene, walpost, &topics);
}

fn many_new_topics_of_a_snapshot_are_created_together(exactly_once: bool) {
    let scene = Scene::bare();
    scene.db.run(
        "CREATE TABLE outbox (id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload jsonb)",
    );
    let topics = insert(&scene);
    scene.init().finish().expect_code(0);
    let scene = scene.in_mode(exactly_once);
    let mut walpost = run(&scene).start();
    walpost.wait_for_log("snapshot delivered");
    judge(&scene, walpost, &topics);
}
