//! Somebody adds partitions to a topic: keys move, and nothing is lost or repeated.

use crate::support::scene::Scene;
use crate::support::wait::wait_until;

in_both_modes! {
    partitions_added_while_it_is_away
    partitions_added_while_it_runs
}

/// What exactly-once says when it starts: its checkpoint knows how many there were.
const SAID: &str = "the topic's number of partitions has changed";

fn partitions_added_while_it_is_away(exactly_once: bool) {
    let scene = Scene::new().in_mode(exactly_once);
    let aggregate = scene.aggregate(1);
    let load = scene.load(&[&aggregate]);
    let walpost = scene.start();
    load.wait_for_transactions(40);
    walpost.terminate().expect_code(0);
    scene.add_partitions(&aggregate, 4);
    let mut walpost = scene.start();
    load.wait_for_transactions(40);
    load.stop();
    if exactly_once {
        let said = walpost.wait_for_log(SAID);
        for part in ["WARN", "before=1", "found=4", &aggregate] {
            assert!(said.contains(part), "{part} in {said}");
        }
    }
    scene.settle(walpost, &[], scene.resends(0));
    assert!(partitions_in_use(&scene) > 1);
}

fn partitions_added_while_it_runs(exactly_once: bool) {
    let scene = Scene::new().in_mode(exactly_once);
    let aggregate = scene.aggregate(1);
    let load = scene.load(&[&aggregate]);
    // Kafka does not tell its clients: they ask, every five minutes.
    let walpost = scene.start_with(&["-X", "topic.metadata.refresh.interval.ms=500"]);
    load.wait_for_transactions(40);
    scene.add_partitions(&aggregate, 4);
    wait_until("the others to be used", || partitions_in_use(&scene) > 1);
    load.stop();
    walpost.terminate().expect_code(0);
    let mut walpost = scene.start();
    scene.insert(&aggregate, "k");
    if exactly_once {
        walpost.wait_for_log(SAID);
    }
    scene.settle(walpost, &[], scene.resends(0));
}

fn partitions_in_use(scene: &Scene) -> usize {
    let ends = scene.broker.ends(&scene.topics());
    ends.values().filter(|end| **end > 0).count()
}
