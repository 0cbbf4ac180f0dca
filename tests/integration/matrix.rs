//! Basic operation on every supported version of PostgreSQL.

use crate::support::checker::Resends;
use crate::support::event::Outbox;
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{Server, StopMode};

/// Under load, runs `init` and `run`, kills Walpost, and restarts both Walpost and the server.
fn main_path(outbox: Outbox, major: u32) {
    let server = Server::private(major, "");
    let fixture = Fixture::with_outbox_on(outbox, &server, Broker::shared());
    run_under_load(fixture, Resends::AtMost);
}

fn main_path_exactly_once(major: u32) {
    let server = Server::private(major, "");
    let fixture = Fixture::on_servers(&server, Broker::shared()).exactly_once();
    run_under_load(fixture, |_| Resends::Never);
}

/// Runs the steps of the test. `resends` returns how many records may be resent after the given
/// number of interruptions.
fn run_under_load(mut fixture: Fixture<'_>, resends: impl Fn(usize) -> Resends) {
    let server = fixture.server;
    let aggregates = [fixture.aggregate(3), fixture.aggregate(1)];
    fixture.check().finish().expect_code(0);
    let load = fixture.load(&[&aggregates[0], &aggregates[1]]);
    let mut deaths = Vec::new();
    for _ in 0..3 {
        let walpost = fixture.start();
        load.wait_for_transactions(40);
        deaths.push(fixture.kill(walpost));
    }
    let walpost = fixture.start();
    load.stop();
    fixture.settle(walpost, &deaths, resends(deaths.len()));

    // Up to PostgreSQL 16, a server does not save a slot's confirmed position when it shuts down.
    // After a restart, it resends everything that was confirmed after the position that it last
    // saved.
    let load = fixture.load(&[&aggregates[0], &aggregates[1]]);
    let mut walpost = fixture.start();
    load.wait_for_transactions(40);
    server.stop(StopMode::Fast);
    server.start();
    walpost.wait_for_logs("streaming", 2);
    load.wait_for_transactions(40);
    load.stop();
    fixture.reconnect();
    fixture.settle(walpost, &[], resends(deaths.len() + 1));

    let walpost = fixture.start();
    fixture.insert(&aggregates[0], "after all");
    fixture.settle(walpost, &[], resends(deaths.len() + 1));
}

for_each_outbox! {
    delivers_at_least_once_on_postgresql_14
    delivers_at_least_once_on_postgresql_15
    delivers_at_least_once_on_postgresql_16
    delivers_at_least_once_on_postgresql_17
    delivers_at_least_once_on_postgresql_18
}

fn delivers_at_least_once_on_postgresql_14(outbox: Outbox) {
    main_path(outbox, 14);
}

fn delivers_at_least_once_on_postgresql_15(outbox: Outbox) {
    main_path(outbox, 15);
}

fn delivers_at_least_once_on_postgresql_16(outbox: Outbox) {
    main_path(outbox, 16);
}

fn delivers_at_least_once_on_postgresql_17(outbox: Outbox) {
    main_path(outbox, 17);
}

fn delivers_at_least_once_on_postgresql_18(outbox: Outbox) {
    main_path(outbox, 18);
}

#[test]
fn delivers_exactly_once_on_postgresql_14() {
    main_path_exactly_once(14);
}

#[test]
fn delivers_exactly_once_on_postgresql_15() {
    main_path_exactly_once(15);
}

#[test]
fn delivers_exactly_once_on_postgresql_16() {
    main_path_exactly_once(16);
}

#[test]
fn delivers_exactly_once_on_postgresql_17() {
    main_path_exactly_once(17);
}

#[test]
fn delivers_exactly_once_on_postgresql_18() {
    main_path_exactly_once(18);
}
