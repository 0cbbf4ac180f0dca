//! Records arrive in commit order, with whole transactions and without anything uncommitted.

use crate::support::checker::Resends;
use crate::support::event::Event;
use crate::support::records::Record;
use crate::support::scene::Scene;
use crate::support::walpost::Walpost;

const FIRST: &str = "00000000-0000-0000-0000-000000000001";
const SECOND: &str = "00000000-0000-0000-0000-000000000002";
const THIRD: &str = "00000000-0000-0000-0000-000000000003";

for_each_scene! {
    lower_id_that_commits_last_is_delivered_last
    what_is_rolled_back_is_never_delivered
    prepared_transaction_is_delivered_when_it_is_committed_and_never_when_not
    concurrent_sessions_are_delivered_in_commit_order
    transaction_larger_than_the_window_is_delivered_whole
    transaction_with_many_savepoints_is_delivered_whole
    transaction_that_is_open_for_long_holds_up_nobody
    adjacent_transactions_with_a_death_between_are_all_delivered
    backlog_of_all_sizes_over_tcp_within_the_host_is_delivered_whole
}

/// Returns a statement that writes an event.
fn event(scene: &Scene, id: &str, aggregate: &str) -> String {
    let event = Event::new(aggregate, "key", "{}");
    scene.events().insert_one(Event {
        id: Some(id),
        ..event
    })
}

fn ids(records: &[Record]) -> Vec<&str> {
    records.iter().map(|record| record.header("id")).collect()
}

fn lower_id_that_commits_last_is_delivered_last(scene: Scene) {
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

fn what_is_rolled_back_is_never_delivered(scene: Scene) {
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

fn prepared_transaction_is_delivered_when_it_is_committed_and_never_when_not(scene: Scene) {
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

fn concurrent_sessions_are_delivered_in_commit_order(scene: Scene) {
    let aggregates = [scene.aggregate(3), scene.aggregate(1)];
    let walpost = scene.start();
    let load = scene.load(&[&aggregates[0], &aggregates[1]]);
    load.wait_for_transactions(500);
    load.stop();
    let summary = scene.settle(walpost, &[], Resends::Never);
    assert_eq!(summary.repeated, 0);
    assert!(summary.committed >= 500, "{summary:?}");
}

fn transaction_larger_than_the_window_is_delivered_whole(scene: Scene) {
    let aggregate = scene.aggregate(2);
    let walpost = scene.start_with(&["--window-records", "100", "--window-bytes", "1MiB"]);
    let payload = "jsonb_build_object('n', n)";
    scene
        .db
        .run(&scene.events().insert_many(&aggregate, 20_000, payload));
    let summary = scene.settle(walpost, &[], Resends::Never);
    assert_eq!(summary.committed, 20_000);
}

/// There are more subtransactions than PostgreSQL keeps in shared memory, and half of them are
/// rolled back.
fn transaction_with_many_savepoints_is_delivered_whole(scene: Scene) {
    const SAVEPOINTS: usize = 10_000;
    let aggregate = scene.aggregate(2);
    let walpost = scene.start_with(&["--window-records", "100"]);
    let before = walpost.resident_bytes();
    let writes = scene.events().insert_one(Event::new(&aggregate, "k", "{}"));
    let (writes, last) = (
        writes.trim_end_matches(';'),
        event(&scene, FIRST, &aggregate),
    );
    let run = match writes.strip_prefix("SELECT") {
        Some(call) => format!("PERFORM {call};"),
        None => format!("{writes};"),
    };
    scene.db.run(&format!(
        "BEGIN;
         DO $$ BEGIN
             FOR n IN 1..{SAVEPOINTS} LOOP
                 BEGIN
                     {run}
                     IF n % 2 = 0 THEN RAISE 'rolled back'; END IF;
                 EXCEPTION WHEN raise_exception THEN NULL;
                 END;
             END LOOP;
         END $$;
         {last}
         COMMIT"
    ));
    let grown = |walpost: &Walpost| walpost.resident_bytes().saturating_sub(before);
    scene.wait_until_confirmed();
    let grown = grown(&walpost);
    assert!(grown < 50 << 20, "grown by {grown} bytes");
    let summary = scene.settle(walpost, &[], Resends::Never);
    assert_eq!(summary.committed, SAVEPOINTS / 2 + 1);
}

/// When the transaction commits, its rows are older than everything confirmed.
fn transaction_that_is_open_for_long_holds_up_nobody(scene: Scene) {
    let aggregate = scene.aggregate(1);
    let long = scene.server.session(&scene.name);
    long.run(&format!("BEGIN; {}", event(&scene, FIRST, &aggregate)));
    let mut deaths = Vec::new();
    for _ in 0..3 {
        let walpost = scene.start();
        let load = scene.load(&[&aggregate]);
        load.wait_for_transactions(20);
        load.stop();
        scene.wait_until_confirmed();
        deaths.push(scene.kill(walpost));
    }
    long.run("COMMIT");
    let walpost = scene.start();
    let resends = scene.resends(deaths.len());
    scene.settle(walpost, &deaths, resends);
}

/// Each transaction begins at the byte at which the previous one ended, so a position that is off
/// by one transaction would skip or repeat one.
fn adjacent_transactions_with_a_death_between_are_all_delivered(scene: Scene) {
    const ROWS_EACH: usize = 20;
    let aggregate = scene.aggregate(1);
    let mut deaths = Vec::new();
    let commit = |count| {
        let event = scene.events().insert_one(Event::new(&aggregate, "k", "{}"));
        scene
            .db
            .run(&format!("BEGIN; {event} COMMIT;").repeat(count));
    };
    for round in 1..=5 {
        commit(ROWS_EACH / 2);
        let walpost = scene.start();
        commit(ROWS_EACH / 2);
        scene.wait_for_records(round * ROWS_EACH - ROWS_EACH / 2);
        deaths.push(scene.kill(walpost));
    }
    let walpost = scene.start();
    let resends = scene.resends(deaths.len());
    let summary = scene.settle(walpost, &deaths, resends);
    assert_eq!(summary.committed, 5 * ROWS_EACH);
}

/// A TCP connection within the host returns little data per read and is read once it is full, even
/// if a row is larger than its buffer.
fn backlog_of_all_sizes_over_tcp_within_the_host_is_delivered_whole(scene: Scene) {
    let aggregate = scene.aggregate(3);
    let write = |count, bytes: usize| {
        let payload = format!("jsonb_build_object('n', n, 'text', repeat('x', {bytes}))");
        scene
            .db
            .run(&scene.events().insert_many(&aggregate, count, &payload));
    };
    write(20_000, 10);
    (0..500).for_each(|_| write(5, 300));
    write(200, 10_000);
    write(20, 400_000);
    write(20_000, 10);
    let over_tcp = scene.server.tcp_conninfo(&scene.name);
    let walpost = scene.with_conninfo(&over_tcp).run().start_streaming();
    scene.wait_until_confirmed();
    // Single rows follow, slowly, while the pipeline is still running.
    (0..20).for_each(|_| write(1, 10));
    let summary = scene.settle(walpost, &[], Resends::Never);
    assert_eq!(summary.committed, 20_000 + 2_500 + 200 + 20 + 20_000 + 20);
    assert_eq!(summary.repeated, 0);
}

#[test]
fn delete_and_truncate_produce_no_events() {
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
fn keys_map_to_the_same_partition_as_in_the_java_client() {
    // The hashes are from Apache Kafka's own UtilsTest.testMurmur2.
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
