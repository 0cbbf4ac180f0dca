//! An interrupted replay is resumed.

use std::collections::HashSet;

use super::{journal, runs};
use crate::support::scene::Scene;
use crate::support::wait::wait_until;

#[test]
fn killed_and_resumed_it_sends_every_row_and_repeats_a_little() {
    const ROWS: usize = 1500;
    let scene = Scene::new();
    let aggregate = scene.aggregate(2);
    let many = scene.events().insert_many(&aggregate, ROWS, "to_jsonb(n)");
    scene.db.run(&many);
    let replay = scene.replay(&["--all", "--yes", "--rate", "150/s"]).start();
    wait_until("a note in the journal", || journal(&scene).len() >= 3);
    let noted: usize = journal(&scene)[2][1].parse().unwrap();
    assert!((1..ROWS).contains(&noted), "{noted}");
    let run = scene
        .db
        .value("SELECT detail ->> 'run' FROM walpost.journal WHERE action = 'replay' LIMIT 1")
        .unwrap();
    let running = scene.replay(&["--yes", "--resume", &run]).finish();
    running
        .expect_code(1)
        .expect_mentions(&["being sent by another process"]);
    replay.kill();
    let before = scene.records().len();
    assert!(before < ROWS, "it was not cut short");
    // These rows are newer than the run.
    scene.db.run(&many);
    let resumed = scene.replay(&["--yes", "--resume", &run]).finish();
    resumed
        .expect_code(0)
        .expect_mentions(&["that were sent before", "replayed"]);
    let records = scene.records();
    assert_eq!(runs(&records), HashSet::from([run.clone()]));
    let ids: HashSet<_> = records.iter().map(|record| record.header("id")).collect();
    assert_eq!(ids.len(), ROWS, "each row of the run, and no other");
    let repeated = records.len() - ROWS;
    assert!(
        // Some records were in flight.
        repeated <= before - noted.min(before) + 50,
        "{repeated} of {before} repeated"
    );
    assert_eq!(journal(&scene).last().unwrap()[0], "done");
    let complete = scene.replay(&["--yes", "--resume", &run]).finish();
    complete.expect_code(2).expect_mentions(&["is complete"]);
    assert_eq!(scene.records().len(), records.len());
}

#[test]
fn stopped_and_resumed_it_repeats_nothing() {
    const ROWS: usize = 400;
    let scene = Scene::new();
    let aggregate = scene.aggregate(1);
    let many = scene.events().insert_many(&aggregate, ROWS, "to_jsonb(n)");
    scene.db.run(&many);
    let replay = scene.replay(&["--all", "--yes", "--rate", "100"]).start();
    scene.wait_for_records(50);
    let stopped = replay.terminate().expect_code(1);
    let (_, run) = stopped
        .stderr
        .split_once("--resume ")
        .expect("how to go on");
    let run = run.split_whitespace().next().unwrap();
    assert!(scene.records().len() < ROWS);
    scene
        .replay(&["--yes", "--resume", run])
        .finish()
        .expect_code(0);
    let records = scene.records();
    let ids: HashSet<_> = records.iter().map(|record| record.header("id")).collect();
    assert_eq!(ids.len(), ROWS);
    assert_eq!(
        records.len(),
        ROWS,
        "what was acknowledged is not sent again"
    );
}

/// Another process that is sending the same run may finish it while this one waits for the run's
/// lock.
#[test]
fn resumed_while_another_process_ends_it_it_sends_nothing() {
    const ROWS: usize = 400;
    let scene = Scene::new();
    let many = scene
        .events()
        .insert_many(&scene.aggregate(1), ROWS, "to_jsonb(n)");
    scene.db.run(&many);
    let replay = scene.replay(&["--all", "--yes", "--rate", "100"]).start();
    scene.wait_for_records(50);
    replay.terminate().expect_code(1);
    let sent = scene.records().len();
    let run = scene
        .db
        .value("SELECT detail ->> 'run' FROM walpost.journal WHERE action = 'replay' LIMIT 1")
        .unwrap();
    let lock =
        |function: &str| format!("SELECT {function}(hashtextextended('walpost replay {run}', 0))");
    wait_until("the lock of the first process", || {
        scene.db.is_true(&lock("pg_try_advisory_lock"))
    });
    let resumed = scene.replay(&["--yes", "--resume", &run]).start();
    wait_until("the second process to wait for the lock", || {
        scene.db.is_true(
            "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database()
             AND pid <> pg_backend_pid() AND query LIKE '%pg_try_advisory_lock%')",
        )
    });
    scene.db.run(
        "INSERT INTO walpost.journal (pipeline, slot, action, detail)
         SELECT pipeline, slot, action, detail || '{\"state\": \"done\"}' FROM walpost.journal
         WHERE action = 'replay' ORDER BY id DESC LIMIT 1",
    );
    scene.db.run(&lock("pg_advisory_unlock"));
    resumed
        .finish()
        .expect_code(2)
        .expect_mentions(&["is complete"]);
    assert_eq!(scene.records().len(), sent);
}
