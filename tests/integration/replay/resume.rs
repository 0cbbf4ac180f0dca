//! A replay that was interrupted is resumed.

use std::collections::HashSet;

use super::{journal, runs};
use crate::support::scene::Scene;
use crate::support::wait::wait_until;

#[test]
fn killed_and_resumed_it_sends_every_row_and_repeats_a_little() {
    const ROWS: usize = 1500;
    let scene = Scene::new();
    let aggregate = scene.aggregate(2);
    let many = scene.events().many(&aggregate, ROWS, "to_jsonb(n)");
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
        .expect_says(&["being sent by another process"]);
    replay.kill();
    let before = scene.records().len();
    assert!(before < ROWS, "it was not cut short");
    // They are newer than the run.
    scene.db.run(&many);
    let resumed = scene.replay(&["--yes", "--resume", &run]).finish();
    resumed
        .expect_code(0)
        .expect_says(&["that were sent before", "replayed"]);
    let records = scene.records();
    assert_eq!(runs(&records), HashSet::from([run.clone()]));
    let ids: HashSet<_> = records.iter().map(|record| record.header("id")).collect();
    assert_eq!(ids.len(), ROWS, "each row of the run, and no other");
    let repeated = records.len() - ROWS;
    assert!(
        // Some was on its way.
        repeated <= before - noted.min(before) + 50,
        "{repeated} of {before} repeated"
    );
    assert_eq!(journal(&scene).last().unwrap()[0], "done");
    let complete = scene.replay(&["--yes", "--resume", &run]).finish();
    complete.expect_code(2).expect_says(&["is complete"]);
    assert_eq!(scene.records().len(), records.len());
}

#[test]
fn stopped_and_resumed_it_repeats_nothing() {
    const ROWS: usize = 400;
    let scene = Scene::new();
    let aggregate = scene.aggregate(1);
    let many = scene.events().many(&aggregate, ROWS, "to_jsonb(n)");
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
