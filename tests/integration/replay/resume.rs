//! An interrupted replay is resumed.

use std::collections::HashSet;

use super::{journal, runs};
use crate::support::fixture::Fixture;
use crate::support::wait::wait_until;

#[test]
fn replay_resumed_after_a_kill_sends_every_row_and_repeats_few() {
    const ROWS: usize = 1500;
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(2);
    let many = fixture
        .events()
        .insert_many(&aggregate, ROWS, "to_jsonb(n)");
    fixture.db.run(&many);
    let replay = fixture
        .replay(&["--all", "--yes", "--rate", "150/s"])
        .start();
    wait_until("a note in the journal", || journal(&fixture).len() >= 3);
    let noted: usize = journal(&fixture)[2][1].parse().unwrap();
    assert!((1..ROWS).contains(&noted), "{noted}");
    let run = fixture
        .db
        .value("SELECT detail ->> 'run' FROM walpost.journal WHERE action = 'replay' LIMIT 1")
        .unwrap();
    let running = fixture.replay(&["--yes", "--resume", &run]).finish();
    running
        .expect_code(1)
        .expect_mentions(&["another process is running replay"]);
    replay.kill();
    let before = fixture.records().len();
    assert!(before < ROWS, "the replay was not interrupted");
    // Resuming the replay must not send rows that are newer than the replay.
    fixture.db.run(&many);
    let resumed = fixture.replay(&["--yes", "--resume", &run]).finish();
    resumed
        .expect_code(0)
        .expect_mentions(&["already sent", "replayed"]);
    let records = fixture.records();
    assert_eq!(runs(&records), HashSet::from([run.clone()]));
    let ids: HashSet<_> = records.iter().map(|record| record.header("id")).collect();
    assert_eq!(ids.len(), ROWS, "each row of the replay, and no other row");
    let repeated = records.len() - ROWS;
    assert!(
        // Records in flight when the process was killed may be sent twice.
        repeated <= before - noted.min(before) + 50,
        "{repeated} of {before} repeated"
    );
    assert_eq!(journal(&fixture).last().unwrap()[0], "done");
    let complete = fixture.replay(&["--yes", "--resume", &run]).finish();
    complete.expect_code(2).expect_mentions(&["is complete"]);
    assert_eq!(fixture.records().len(), records.len());
}

#[test]
fn replay_resumed_after_a_graceful_stop_repeats_no_row() {
    const ROWS: usize = 400;
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    let many = fixture
        .events()
        .insert_many(&aggregate, ROWS, "to_jsonb(n)");
    fixture.db.run(&many);
    let replay = fixture.replay(&["--all", "--yes", "--rate", "100"]).start();
    fixture.wait_for_records(50);
    let stopped = replay.terminate().expect_code(1);
    let (_, run) = stopped
        .stderr
        .split_once("--resume ")
        .expect("how to go on");
    let run = run.split_whitespace().next().unwrap();
    assert!(fixture.records().len() < ROWS);
    fixture
        .replay(&["--yes", "--resume", run])
        .finish()
        .expect_code(0);
    let records = fixture.records();
    let ids: HashSet<_> = records.iter().map(|record| record.header("id")).collect();
    assert_eq!(ids.len(), ROWS);
    assert_eq!(records.len(), ROWS, "acknowledged rows are not sent again");
}

/// If two processes resume the same replay, one of them waits for the lock on the replay, and the
/// other may complete the replay in the meantime.
#[test]
fn sends_nothing_if_another_process_finishes_the_replay_first() {
    const ROWS: usize = 400;
    let fixture = Fixture::new();
    let many = fixture
        .events()
        .insert_many(&fixture.aggregate(1), ROWS, "to_jsonb(n)");
    fixture.db.run(&many);
    let replay = fixture.replay(&["--all", "--yes", "--rate", "100"]).start();
    fixture.wait_for_records(50);
    replay.terminate().expect_code(1);
    let sent = fixture.records().len();
    let run = fixture
        .db
        .value("SELECT detail ->> 'run' FROM walpost.journal WHERE action = 'replay' LIMIT 1")
        .unwrap();
    let lock =
        |function: &str| format!("SELECT {function}(hashtextextended('walpost replay {run}', 0))");
    wait_until("the lock of the first process", || {
        fixture.db.is_true(&lock("pg_try_advisory_lock"))
    });
    let resumed = fixture.replay(&["--yes", "--resume", &run]).start();
    wait_until("the second process to wait for the lock", || {
        fixture.db.is_true(
            "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database()
             AND pid <> pg_backend_pid() AND query LIKE '%pg_try_advisory_lock%')",
        )
    });
    fixture.db.run(
        "INSERT INTO walpost.journal (pipeline, slot, action, detail)
         SELECT pipeline, slot, action, detail || '{\"state\": \"done\"}' FROM walpost.journal
         WHERE action = 'replay' ORDER BY id DESC LIMIT 1",
    );
    fixture.db.run(&lock("pg_advisory_unlock"));
    resumed
        .finish()
        .expect_code(2)
        .expect_mentions(&["is complete"]);
    assert_eq!(fixture.records().len(), sent);
}
