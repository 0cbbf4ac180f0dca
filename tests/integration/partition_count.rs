//! Partitions are added to a topic: keys move to other partitions, and no record is lost or
//! repeated.

use crate::support::scene::Scene;
use crate::support::wait::wait_until;
use crate::support::walpost::Walpost;

in_both_modes! {
    partitions_added_while_it_is_away
    partitions_added_while_it_runs
    row_names_a_partition_that_was_added_while_it_runs
    row_names_a_partition_that_was_added_and_others_become_dead_letters
    row_names_a_partition_that_is_not_there
}

const TABLE: &str =
    "CREATE TABLE outbox (id int, aggregatetype text, aggregateid text, payload text, shard int)";

/// Logged at the start in exactly-once mode, where the checkpoint contains the previous number.
const CHANGE_WARNING: &str = "the topic's number of partitions has changed";

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
        let said = walpost.wait_for_log(CHANGE_WARNING);
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
    // Kafka does not notify clients of new partitions; by default they query the metadata every
    // five minutes.
    let walpost = scene.start_with(&["-X", "topic.metadata.refresh.interval.ms=500"]);
    load.wait_for_transactions(40);
    scene.add_partitions(&aggregate, 4);
    wait_until("the others to be used", || partitions_in_use(&scene) > 1);
    load.stop();
    walpost.terminate().expect_code(0);
    let mut walpost = scene.start();
    scene.insert(&aggregate, "k");
    if exactly_once {
        walpost.wait_for_log(CHANGE_WARNING);
    }
    scene.settle(walpost, &[], scene.resends(0));
}

/// Starts Walpost with the column `shard` as the partition, and delivers one row to a topic with
/// four partitions.
fn start_with_shards(scene: &Scene, settings: &str) -> (Walpost, String) {
    let aggregate = scene.aggregate(4);
    let mode = match scene.is_exactly_once() {
        true => "exactly-once",
        false => "at-least-once",
    };
    let walpost = scene.start_with_file(&format!(
        "partition = 'shard'\ndelivery = '{mode}'\n{settings}"
    ));
    insert(scene, &aggregate, "1", "0");
    scene.wait_for_records(1);
    (walpost, aggregate)
}

/// Commits a row for each of the ids in one transaction.
fn insert(scene: &Scene, aggregate: &str, ids: &str, shard: &str) {
    scene.db.run(&format!(
        "INSERT INTO outbox SELECT id, '{aggregate}', 'k', 'p', {shard} FROM unnest(ARRAY[{ids}]) id"
    ));
}

/// Returns the ids of a partition's records.
fn ids(scene: &Scene, aggregate: &str, partition: i32) -> Vec<String> {
    let topic = format!("outbox.event.{aggregate}");
    let records = scene.records();
    let ours = records
        .iter()
        .filter(|record| record.topic == topic && record.partition == partition);
    ours.map(|record| record.header("id").to_owned()).collect()
}

fn row_names_a_partition_that_was_added_while_it_runs(exactly_once: bool) {
    let scene = Scene::with_table(TABLE).in_mode(exactly_once);
    let (walpost, aggregate) = start_with_shards(&scene, "");
    scene.add_partitions(&aggregate, 12);
    insert(&scene, &aggregate, "2, 3", "8");
    insert(&scene, &aggregate, "4", "11");
    scene.wait_for_records(4);
    assert_eq!(ids(&scene, &aggregate, 8), ["2", "3"]);
    assert_eq!(ids(&scene, &aggregate, 11), ["4"]);
    scene.settle(walpost, &[], scene.resends(0));
}

fn row_names_a_partition_that_was_added_and_others_become_dead_letters(exactly_once: bool) {
    let scene = Scene::with_table(TABLE).in_mode(exactly_once);
    let letters = format!("{}.dead", scene.name);
    scene.topic(&letters, 3, &[]);
    let (walpost, aggregate) = start_with_shards(
        &scene,
        &format!("on_unroutable = 'dead-letter'\ndead_letter_topic = '{letters}'"),
    );
    insert(&scene, &aggregate, "2", "8");
    scene.wait_for_records(2);
    scene.add_partitions(&aggregate, 12);
    insert(&scene, &aggregate, "3", "11");
    // If Walpost queried the brokers for each of these rows, they would not be delivered before the
    // timeout.
    let many = (1000..1500).map(|id| id.to_string()).collect::<Vec<_>>();
    insert(&scene, &aggregate, &many.join(", "), "20");
    insert(&scene, &aggregate, "4", "11");
    let records = scene.wait_for_records(504);
    assert_eq!(ids(&scene, &aggregate, 11), ["3", "4"]);
    let of_letters = records.iter().filter(|record| record.topic == letters);
    for letter in of_letters {
        let (id, said) = (letter.header("id"), letter.header("walpost-error-message"));
        let partition = if id == "2" { 8 } else { 20 };
        assert!(
            said.contains(&format!("has no partition {partition}")),
            "{id}: {said}"
        );
    }
    scene.settle(walpost, &[], scene.resends(0));
}

fn row_names_a_partition_that_is_not_there(exactly_once: bool) {
    let scene = Scene::with_table(TABLE).in_mode(exactly_once);
    let (walpost, aggregate) = start_with_shards(&scene, "");
    scene.add_partitions(&aggregate, 6);
    insert(&scene, &aggregate, "2", "6");
    walpost
        .finish()
        .expect_code(3)
        .expect_mentions(&["halted", "has no partition 6"]);
    let event = scene.history().pop().unwrap();
    assert!(
        scene.confirmed() < event.end,
        "the event is still to be sent"
    );
}

fn partitions_in_use(scene: &Scene) -> usize {
    let ends = scene.broker.ends(&scene.topics());
    ends.values().filter(|end| **end > 0).count()
}
