//! Records come in commit order, whole transactions, and nothing that was not committed.

use crate::support::checker::Resends;
use crate::support::event::{Event, Outbox};
use crate::support::records::Record;
use crate::support::scene::Scene;

const FIRST: &str = "00000000-0000-0000-0000-000000000001";
const SECOND: &str = "00000000-0000-0000-0000-000000000002";
const THIRD: &str = "00000000-0000-0000-0000-000000000003";

for_each_outbox! {
    lower_id_that_commits_last_is_delivered_last
    what_is_rolled_back_is_never_delivered
    prepared_transaction_is_delivered_when_it_is_committed_and_never_when_not
    concurrent_sessions_are_delivered_in_commit_order
    transaction_larger_than_the_window_is_delivered_whole
}

/// A statement that writes an event.
fn event(scene: &Scene, id: &str, aggregate: &str) -> String {
    let event = Event::new(aggregate, "key", "{}");
    scene.events().one(Event {
        id: Some(id),
        ..event
    })
}

fn ids(records: &[Record]) -> Vec<&str> {
    records.iter().map(|record| record.header("id")).collect()
}

fn lower_id_that_commits_last_is_delivered_last(outbox: Outbox) {
    let scene = Scene::of(outbox);
    let aggregate = scene.aggregate(1);
    let walpost = scene.start();
    let slow = scene.server.session(&scene.name);
    slow.run(&format!("BEGIN; {}", event(&scene, FIRST, &aggregate)));
    scene.db.run(&event(&scene, SECOND, &aggregate));
    assert_eq!(ids(&scene.wait_for_records(1)), [SECOND]);
    slow.run("COMMIT");
    scene.wait_for_records(2);
    scene.settle(walpost, &[], Resends::Never);
    assert_eq!(ids(&scene.records()), [SECOND, FIRST]);
}

fn what_is_rolled_back_is_never_delivered(outbox: Outbox) {
    let scene = Scene::of(outbox);
    let aggregate = scene.aggregate(1);
    let walpost = scene.start();
    scene.db.run(&format!(
        "BEGIN; {} ROLLBACK",
        event(&scene, FIRST, &aggregate)
    ));
    scene.db.run(&format!(
        "BEGIN; {} SAVEPOINT a; {} ROLLBACK TO a; SAVEPOINT b; {} RELEASE b; COMMIT",
        event(&scene, FIRST, &aggregate),
        event(&scene, SECOND, &aggregate),
        event(&scene, THIRD, &aggregate),
    ));
    scene.wait_for_records(2);
    scene.settle(walpost, &[], Resends::Never);
    let records = scene.records();
    assert_eq!(ids(&records), [FIRST, THIRD]);
    let positions = records
        .iter()
        .map(|record| record.header("walpost-position"));
    let (commits, indexes): (Vec<_>, Vec<_>) = positions
        .map(|position| position.rsplit_once(':').unwrap())
        .unzip();
    assert_eq!(commits[0], commits[1], "one transaction has one commit LSN");
    assert_eq!(indexes, ["0000000000", "0000000001"]);
}

fn prepared_transaction_is_delivered_when_it_is_committed_and_never_when_not(outbox: Outbox) {
    let scene = Scene::of(outbox);
    let aggregate = scene.aggregate(1);
    let walpost = scene.start();
    let name = &scene.name;
    scene.db.run(&format!(
        "BEGIN; {} PREPARE TRANSACTION '{name}_kept'",
        event(&scene, FIRST, &aggregate)
    ));
    scene.db.run(&format!(
        "BEGIN; {} PREPARE TRANSACTION '{name}_not'",
        event(&scene, SECOND, &aggregate)
    ));
    scene.db.run(&event(&scene, THIRD, &aggregate));
    assert_eq!(ids(&scene.wait_for_records(1)), [THIRD]);
    scene.db.run(&format!("ROLLBACK PREPARED '{name}_not'"));
    scene.db.run(&format!("COMMIT PREPARED '{name}_kept'"));
    scene.wait_for_records(2);
    scene.settle(walpost, &[], Resends::Never);
    assert_eq!(ids(&scene.records()), [THIRD, FIRST]);
}

fn concurrent_sessions_are_delivered_in_commit_order(outbox: Outbox) {
    let scene = Scene::of(outbox);
    let aggregates = [scene.aggregate(3), scene.aggregate(1)];
    let walpost = scene.start();
    let load = scene.load(&[&aggregates[0], &aggregates[1]]);
    load.wait_for_transactions(500);
    load.stop();
    let summary = scene.settle(walpost, &[], Resends::Never);
    assert_eq!(summary.repeated, 0);
    assert!(summary.committed >= 500, "{summary:?}");
}

fn transaction_larger_than_the_window_is_delivered_whole(outbox: Outbox) {
    let scene = Scene::of(outbox);
    let aggregate = scene.aggregate(2);
    let walpost = scene.start_with(&["--window-records", "100", "--window-bytes", "1MiB"]);
    let payload = "jsonb_build_object('n', n)";
    scene
        .db
        .run(&scene.events().many(&aggregate, 20_000, payload));
    let summary = scene.settle(walpost, &[], Resends::Never);
    assert_eq!(summary.committed, 20_000);
}

#[test]
fn delete_and_truncate_are_no_events() {
    let scene = Scene::new();
    let aggregate = scene.aggregate(1);
    let walpost = scene.start();
    scene.db.run(&event(&scene, FIRST, &aggregate));
    scene.db.run("DELETE FROM outbox; TRUNCATE outbox");
    scene.db.run(&event(&scene, SECOND, &aggregate));
    scene.settle(walpost, &[], Resends::Never);
    assert_eq!(ids(&scene.records()), [FIRST, SECOND]);
}

#[test]
fn key_goes_to_the_partition_that_the_java_client_would_choose() {
    // The hashes are those of Apache Kafka's own UtilsTest.testMurmur2.
    const HASHES: [(&str, i32); 5] = [
        ("21", -973_932_308),
        ("foobar", -790_332_482),
        ("a-little-bit-long-string", -985_981_536),
        ("a-little-bit-longer-string", -1_486_304_829),
        ("abc", 479_470_107),
    ];
    let scene = Scene::new();
    let aggregate = scene.aggregate(12);
    let walpost = scene.start();
    HASHES
        .iter()
        .for_each(|(key, _)| scene.insert(&aggregate, key));
    let records = scene.wait_for_records(HASHES.len());
    for (key, hash) in HASHES {
        let record = records
            .iter()
            .find(|record| record.key() == key)
            .expect("a record for the key");
        assert_eq!(record.partition, (hash & i32::MAX) % 12, "{key}");
    }
    walpost.terminate().expect_code(0);
}
