//! The main path on every supported version of PostgreSQL.

use crate::support::checker::Resends;
use crate::support::event::Outbox;
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{Server, Stop};

/// Runs init and run, then kills Walpost and restarts Walpost and the server, all under load.
fn main_path(outbox: Outbox, major: u32) {
    let server = Server::private(major, "");
    let fixture = Fixture::with_outbox_on(outbox, &server, Broker::shared());
    go(fixture, Resends::AtMost);
}

fn main_path_exactly_once(major: u32) {
    let server = Server::private(major, "");
    let fixture = Fixture::on_servers(&server, Broker::shared()).exactly_once();
    go(fixture, |_| Resends::Never);
}

/// `resends` returns which repetitions are allowed after a number of interruptions.
fn go(mut fixture: Fixture<'_>, resends: impl Fn(usize) -> Resends) {
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

    // Up to version 16, a server does not save the slot when it shuts down, and afterwards sends
    // again everything confirmed since the last checkpoint.
    let load = fixture.load(&[&aggregates[0], &aggregates[1]]);
    let mut walpost = fixture.start();
    load.wait_for_transactions(40);
    server.stop(Stop::Fast);
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
    main_path_on_14
    main_path_on_15
    main_path_on_16
    main_path_on_17
    main_path_on_18
}

fn main_path_on_14(outbox: Outbox) {
    main_path(outbox, 14);
}

fn main_path_on_15(outbox: Outbox) {
    main_path(outbox, 15);
}

fn main_path_on_16(outbox: Outbox) {
    main_path(outbox, 16);
}

fn main_path_on_17(outbox: Outbox) {
    main_path(outbox, 17);
}

fn main_path_on_18(outbox: Outbox) {
    main_path(outbox, 18);
}

#[test]
fn exactly_once_on_14() {
    main_path_exactly_once(14);
}

#[test]
fn exactly_once_on_15() {
    main_path_exactly_once(15);
}

#[test]
fn exactly_once_on_16() {
    main_path_exactly_once(16);
}

#[test]
fn exactly_once_on_17() {
    main_path_exactly_once(17);
}

#[test]
fn exactly_once_on_18() {
    main_path_exactly_once(18);
}
