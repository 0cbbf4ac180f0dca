//! Two instances of a pipeline: one streams while the other stands by, ready to take over.

use crate::support::checker::Resends;
use crate::support::event::Outbox;
use crate::support::fixture::Fixture;
use crate::support::wait::{assert_stays, wait_until};

use std::time::Duration;

for_each_outbox! {
    second_instance_takes_over_when_the_first_is_killed
    frozen_instance_confirms_nothing_after_another_has_taken_over
}

fn second_instance_takes_over_when_the_first_is_killed(outbox: Outbox) {
    take_over_in_turn(&Fixture::with_outbox(outbox), Resends::AtMost(5));
}

#[test]
fn second_instance_takes_over_in_exactly_once_mode() {
    take_over_in_turn(&Fixture::new().exactly_once(), Resends::Never);
}

fn take_over_in_turn(fixture: &Fixture, resends: Resends) {
    let aggregates = [fixture.aggregate(3), fixture.aggregate(1)];
    let load = fixture.load(&[&aggregates[0], &aggregates[1]]);
    let mut first = fixture.start();
    for _ in 0..5 {
        let mut second = fixture.run().start();
        second.wait_for_log("standing by");
        load.wait_for_transactions(30);
        assert_eq!(second.logged("streaming"), 0, "{}", second.log());
        first.kill();
        second.wait_for_log("streaming");
        load.wait_for_transactions(30);
        first = second;
    }
    load.stop();
    fixture.settle(first, &[], resends);
}

fn frozen_instance_confirms_nothing_after_another_has_taken_over(outbox: Outbox) {
    take_over_from_frozen_instance(&Fixture::with_outbox(outbox), Resends::AtMost(1));
}

/// Freezes the active instance until another one has acquired the slot. When the frozen instance
/// resumes, it must detect that it has lost the slot.
pub(crate) fn take_over_from_frozen_instance(fixture: &Fixture, resends: Resends) {
    let aggregate = fixture.aggregate(1);
    let mut frozen = fixture.start_and_confirm_one(&aggregate, "k");
    frozen.freeze();
    fixture.insert(&aggregate, "k");
    wait_until("the walsender to end", || {
        fixture.end_walsender();
        !fixture.slot_is_active()
    });
    let walpost = fixture.start();
    fixture.wait_for_records(2);
    fixture.wait_until_confirmed();
    let confirmed = fixture.confirmed();
    frozen.thaw();
    frozen.wait_for_log("standing by");
    fixture.insert(&aggregate, "k");
    fixture.wait_for_records(3);
    assert!(fixture.confirmed() >= confirmed);
    frozen.terminate().expect_code(0);
    fixture.settle(walpost, &[], resends);
}

#[test]
fn standby_takes_over_without_repeating_events_when_the_first_instance_stops() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(3);
    let load = fixture.load(&[&aggregate]);
    let first = fixture.start();
    let mut second = fixture.run().start();
    second.wait_for_log("standing by");
    load.wait_for_transactions(50);
    first.terminate().expect_code(0);
    second.wait_for_log("streaming");
    load.wait_for_transactions(50);
    load.stop();
    assert_eq!(fixture.settle(second, &[], Resends::Never).repeated, 0);
}

#[test]
fn standby_logs_its_state_once_and_stops_on_request() {
    let fixture = Fixture::new();
    let first = fixture.start();
    let mut second = fixture.run().start();
    second.wait_for_log("standing by");
    assert_stays("quiet", Duration::from_secs(4), || {
        second.logged("standing by") == 1
    });
    second.terminate().expect_code(0);
    first.terminate().expect_code(0);
}
