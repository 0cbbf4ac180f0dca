//! Runs `verify` on an idle server.

use super::{advance_slot, insert_rows, verify_with};
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, Server};
use crate::support::wait::wait_until;

/// Waits until Walpost has advanced the idle slot `moves` times. By then, the interval between
/// advances, which doubles each time, exceeds the `--wait` timeout of `verify`.
fn wait_until_idle(fixture: &Fixture<'_>, moves: u32) {
    let mut confirmed = fixture.confirmed();
    for _ in 0..moves {
        wait_until("the slot to move by itself", || {
            let before = std::mem::replace(&mut confirmed, fixture.confirmed());
            confirmed > before
        });
    }
}

in_both_modes! { verify_does_not_time_out_waiting_for_an_idle_slot_to_advance }

fn verify_does_not_time_out_waiting_for_an_idle_slot_to_advance(exactly_once: bool) {
    let server = Server::private(MAJOR, "");
    let fixture = Fixture::on_servers(&server, Broker::shared()).in_mode(exactly_once);
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_and_confirm_one(&aggregate, "a");
    wait_until_idle(&fixture, if exactly_once { 2 } else { 3 });
    for _ in 0..2 {
        let verdict = verify_with(&fixture, &["--wait", "5s"]);
        assert_eq!(verdict.counts(), "rows 1, records 1, delivered 1");
        assert_eq!(verdict.notes(), "[]");
    }
    walpost.terminate().expect_code(0);
}

#[test]
fn reports_a_lost_row_as_missing_on_an_idle_server() {
    let server = Server::private(MAJOR, "");
    let fixture = Fixture::on_servers(&server, Broker::shared());
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_and_confirm_one(&aggregate, "a");
    walpost.terminate().expect_code(0);
    insert_rows(&fixture, &aggregate, &["lost"]);
    advance_slot(&fixture);
    let walpost = fixture.start();
    wait_until_idle(&fixture, 3);
    let verdict = verify_with(&fixture, &["--wait", "5s"]);
    assert_eq!(
        verdict.counts(),
        "rows 2, records 1, delivered 1, missing 1"
    );
    walpost.terminate().expect_code(0);
}
