//! The slot advances while the outbox is idle, but never past an undelivered event.

use std::time::Duration;

use crate::support::checker::Resends;
use crate::support::event::Outbox;
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, Server};
use crate::support::wait::{assert_stays, wait_until};

for_each_outbox! {
    advances_the_slot_while_only_other_tables_are_written_to
    does_not_advance_the_slot_past_an_unacknowledged_event
}

/// Writes two megabytes of WAL that is unrelated to the outbox.
fn write_elsewhere(fixture: &Fixture) {
    fixture.db.run(
        "CREATE TABLE IF NOT EXISTS elsewhere (note text);
         INSERT INTO elsewhere SELECT repeat('x', 200) FROM generate_series(1, 10000)",
    );
}

fn advances_the_slot_while_only_other_tables_are_written_to(outbox: Outbox) {
    let fixture = Fixture::with_outbox(outbox);
    let walpost = fixture.start();
    for _ in 0..3 {
        let before = fixture.confirmed();
        write_elsewhere(&fixture);
        let written = fixture.wal_position();
        wait_until("the slot to follow", || fixture.confirmed() >= written);
        assert!(written > before);
    }
    walpost.terminate().expect_code(0);
}

#[test]
fn advances_the_slot_while_only_another_database_is_written_to() {
    let fixture = Fixture::new();
    let walpost = fixture.start();
    let other = Fixture::bare();
    write_elsewhere(&other);
    let written = fixture.wal_position();
    wait_until("the slot to follow", || fixture.confirmed() >= written);
    walpost.terminate().expect_code(0);
}

fn does_not_advance_the_slot_past_an_unacknowledged_event(outbox: Outbox) {
    let broker = Broker::borrowed();
    let fixture = Fixture::with_outbox_on(outbox, Server::shared(MAJOR), &broker);
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start();
    fixture.insert(&aggregate, "first");
    fixture.wait_for_records(1);
    broker.freeze();
    fixture.insert(&aggregate, "not taken");
    let open = fixture.history().pop().unwrap().end;
    write_elsewhere(&fixture);
    assert_stays("before the event", Duration::from_secs(3), || {
        fixture.confirmed() < open
    });
    broker.thaw();
    fixture.settle(walpost, &[], Resends::Never);
}
