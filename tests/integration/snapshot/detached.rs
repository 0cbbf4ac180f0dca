//! Partitions that are detached before Walpost has copied their rows.

use std::collections::HashSet;

use super::{
    TABLE, fill, fixture_before_init, fixture_with_older_rows, settle, start_and_copy_some,
};
use crate::support::fixture::Fixture;

in_both_modes! { reports_a_partition_detached_while_it_is_being_copied }

fn partitioned_table() -> String {
    let columns = TABLE.replace("id uuid PRIMARY KEY", "id uuid");
    let partition = |remainder: u32| {
        format!(
            "CREATE TABLE outbox_{remainder} PARTITION OF outbox FOR VALUES WITH (MODULUS 2, REMAINDER {remainder});"
        )
    };
    format!(
        "{columns} PARTITION BY HASH (id); ALTER TABLE outbox ADD PRIMARY KEY (id); {} {}",
        partition(0),
        partition(1)
    )
}

fn detach(fixture: &Fixture<'_>, partition: u32) {
    fixture.db.run(&format!(
        "ALTER TABLE outbox DETACH PARTITION outbox_{partition}"
    ));
}

fn attach(fixture: &Fixture<'_>, partition: u32) {
    fixture.db.run(&format!(
        "ALTER TABLE outbox ATTACH PARTITION outbox_{partition} FOR VALUES WITH (MODULUS 2, REMAINDER {partition})"
    ));
}

/// Starts Walpost, waits until it logs that it can't copy the given partitions, and stops it.
fn start_and_expect(fixture: &Fixture<'_>, partitions: &str) {
    let mut walpost = fixture.run().start();
    walpost.wait_for_log(&format!("partitions=\"{partitions}\""));
    walpost.wait_for_log("streaming");
    settle(fixture, walpost);
}

fn entries(fixture: &Fixture<'_>) -> usize {
    let entries = "SELECT id FROM walpost.journal WHERE action = 'drop slot'";
    fixture.db.rows(entries).len()
}

/// Asserts that the command suggested by `check` sends all rows once the partitions are attached
/// again.
fn expect_replay(fixture: &Fixture<'_>, partitions: &[u32]) {
    let command = "walpost replay --dropped-slots";
    let check = fixture.check().finish().expect_code(3);
    check.expect_mentions(&["reattach these partitions first", command]);
    for partition in partitions {
        attach(fixture, *partition);
    }
    let replay = fixture.replay(&["--dropped-slots", "--yes"]);
    replay.finish().expect_code(0);
    let sent: HashSet<_> = fixture
        .records()
        .iter()
        .map(|record| record.header("id").to_owned())
        .collect();
    assert_eq!(sent.len(), fixture.history().len());
    let check = fixture.check().finish();
    assert!(!check.stdout.contains(command), "{}", check.stdout);
}

/// Creates a fixture with a partition that was detached before the first run.
pub(crate) fn detached_before_first_start() -> Fixture<'static> {
    let fixture = fixture_before_init(&partitioned_table());
    let aggregate = fixture.aggregate(2);
    fill(&fixture, &aggregate, 40);
    fixture.init().finish().expect_code(0);
    detach(&fixture, 0);
    start_and_expect(&fixture, "public.outbox_0");
    fixture
}

#[test]
fn reports_a_partition_detached_before_the_first_run_only_once() {
    let fixture = detached_before_first_start();
    assert!(fixture.records().len() < 40);
    settle(&fixture, fixture.start());
    assert_eq!(entries(&fixture), 1);
    expect_replay(&fixture, &[0]);
}

/// The table itself no longer contains any rows, so the journal records that no copy is needed.
/// Walpost must still report the detached partitions.
#[test]
fn reports_every_partition_of_a_table_whose_partitions_were_all_detached() {
    let fixture = fixture_before_init(&partitioned_table());
    let aggregate = fixture.aggregate(2);
    fill(&fixture, &aggregate, 40);
    fixture.init().finish().expect_code(0);
    detach(&fixture, 0);
    detach(&fixture, 1);
    start_and_expect(&fixture, "public.outbox_0, public.outbox_1");
    assert_eq!(fixture.records().len(), 0);
    expect_replay(&fixture, &[0, 1]);
}

/// Regression test for a problem found by a random walk of `./dev soak --shapes` with seed
/// 114732207607622.
fn reports_a_partition_detached_while_it_is_being_copied(exactly_once: bool) {
    let (fixture, _) = fixture_with_older_rows(&partitioned_table(), 20_000, exactly_once);
    let walpost = start_and_copy_some(&fixture);
    fixture.kill(walpost);
    detach(&fixture, 1);
    start_and_expect(&fixture, "public.outbox_1");
    expect_replay(&fixture, &[1]);
}

#[test]
fn reports_no_missing_events_for_a_partition_that_was_dropped() {
    let fixture = fixture_before_init(&partitioned_table());
    let aggregate = fixture.aggregate(2);
    fill(&fixture, &aggregate, 40);
    fixture.init().finish().expect_code(0);
    detach(&fixture, 0);
    fixture.db.run("DROP TABLE outbox_0");
    settle(&fixture, fixture.start());
    assert_eq!(entries(&fixture), 0);
}
