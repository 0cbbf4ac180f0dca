//! If a slot is dropped before it has delivered all events, retention keeps the remaining events
//! until they are replayed.

use std::time::Duration;

use super::{
    DEFAULT, fixture_with_late_row_in_detached_partition, fixture_with_old_partition, insert_old,
    is, is_gone, maintain,
};
use crate::budget;
use crate::support::fixture::Fixture;
use crate::support::postgres::{MAJOR, Server};
use crate::support::wait::{assert_stays, wait_until};

/// The position of the new slot alone suggests that all events have been delivered.
#[test]
fn keeps_a_partition_until_rows_that_a_dropped_slot_did_not_deliver_are_replayed() {
    let fixture = fixture_with_old_partition(Server::shared(MAJOR), DEFAULT);
    let aggregate = fixture.aggregate(1);
    insert_old(&fixture, &aggregate, "dropped");
    budget::drop_slot(&fixture);
    budget::new_slot(&fixture);
    let mut walpost = fixture.start_with(&["--retention", "1s"]);
    fixture.insert(&aggregate, "new");
    fixture.wait_until_confirmed();
    let is_kept = || is(&fixture, "outbox_old", true);
    assert_stays("the partition", Duration::from_secs(5), is_kept);
    let output = [
        "nothing is removed from table public.outbox",
        "walpost replay --dropped-slots",
    ];
    walpost.wait_for_log(output[0]);
    walpost.terminate().expect_code(0);
    maintain(&fixture, &["--retention", "1s"])
        .expect_code(3)
        .expect_mentions(&output);
    let replay = fixture.replay(&["--dropped-slots", "--yes"]);
    replay.finish().expect_code(0);
    let walpost = fixture.start_with(&["--retention", "1s"]);
    wait_until("the partition to be dropped", || {
        is_gone(&fixture, "outbox_old")
    });
    walpost.terminate().expect_code(0);
    budget::expect_everything(&fixture);
}

#[test]
fn keeps_rows_that_a_dropped_slot_did_not_deliver_until_they_are_replayed() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    fixture.insert(&aggregate, "dropped");
    budget::drop_slot(&fixture);
    budget::new_slot(&fixture);
    let walpost = fixture.start();
    let pass = || maintain(&fixture, &["--retention", "1s", "--delete-rows"]);
    let rows = || fixture.db.number("SELECT count(*) FROM outbox");
    assert_stays("the row", Duration::from_secs(4), || {
        pass().expect_code(3);
        rows() == 1
    });
    let replay = fixture.replay(&["--dropped-slots", "--yes"]);
    replay.finish().expect_code(0);
    wait_until("the row to be deleted", || {
        pass().expect_code(0);
        rows() == 0
    });
    walpost.terminate().expect_code(0);
    budget::expect_everything(&fixture);
}

#[test]
fn replay_reports_a_detached_partition_with_rows_that_a_dropped_slot_did_not_deliver() {
    let fixture = fixture_with_late_row_in_detached_partition();
    budget::drop_slot(&fixture);
    budget::new_slot(&fixture);
    let replay = || fixture.replay(&["--dropped-slots", "--yes"]).finish();
    replay()
        .expect_code(3)
        .expect_mentions(&["outbox_old was a partition of", "ATTACH PARTITION"]);
    fixture.db.run(
        "DO $$ DECLARE day timestamptz := date_trunc('day', now(), 'UTC'); BEGIN
             EXECUTE format('ALTER TABLE outbox ATTACH PARTITION outbox_old FOR VALUES FROM (%L) TO (%L)',
                 day - interval '2 days', day - interval '1 day');
         END $$",
    );
    replay().expect_code(0);
    budget::expect_everything(&fixture);
}

/// The position of the slot alone suggests that all events have been delivered.
#[test]
fn keeps_rows_of_an_unpublished_table_until_they_are_replayed() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_and_confirm_one(&aggregate, "before");
    walpost.terminate().expect_code(0);
    let slot = fixture.slot();
    let pass = || maintain(&fixture, &["--retention", "1s", "--delete-rows"]);
    let rows = || fixture.db.number("SELECT count(*) FROM outbox");
    fixture
        .db
        .run(&format!("ALTER PUBLICATION {slot} DROP TABLE outbox"));
    fixture.insert(&aggregate, "between");
    fixture
        .db
        .run(&format!("ALTER PUBLICATION {slot} ADD TABLE outbox"));
    let is_kept = |expected: &str| {
        assert_stays("the row", Duration::from_secs(4), || {
            pass().expect_code(3).expect_mentions(&[expected]);
            rows() == 2
        });
    };
    is_kept("is not in the publication, or was temporarily missing from it");
    let walpost = fixture.start();
    fixture.wait_until_confirmed();
    is_kept("the table was temporarily missing from the publication");
    let replay = fixture.replay(&["--dropped-slots", "--yes"]);
    replay.finish().expect_code(0);
    wait_until("the rows to be deleted", || {
        pass().expect_code(0);
        rows() == 0
    });
    walpost.terminate().expect_code(0);
}
