//! A full disk on the broker or on PostgreSQL: no committed event is lost.

use std::time::Duration;

use crate::support::disk::Disk;
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, Server};
use crate::support::under_load::{UnderLoad, settle, wait_for_transactions};
use crate::support::wait::wait_until;

const TRANSACTIONS: usize = 40;

#[test]
fn delivers_everything_after_a_full_broker_disk_gets_space() {
    let disk = Disk::new(256);
    let broker = Broker::on_disk(&disk);
    let streams = UnderLoad::in_both_modes(Server::shared(MAJOR), &broker);
    wait_for_transactions(&streams, TRANSACTIONS);
    disk.fill();
    wait_until("the broker to give up", || !broker.is_running());
    wait_for_transactions(&streams, TRANSACTIONS);
    disk.make_room();
    broker.start();
    wait_for_transactions(&streams, TRANSACTIONS);
    settle(streams, 1);
}

#[test]
fn resumes_after_a_full_wal_disk_gets_space() {
    let disk = Disk::new(256);
    let server = Server::on_disk(&disk, "pg_wal", MAJOR, "");
    let mut streams = UnderLoad::in_both_modes(&server, Broker::shared());
    wait_for_transactions(&streams, TRANSACTIONS);
    disk.fill();
    // There is no space for the next segment.
    let _ = server.session("postgres").try_run("SELECT pg_switch_wal()");
    wait_until("PostgreSQL to find no room", || {
        server.log().contains("PANIC") && server.log().contains("No space left on device")
    });
    // PostgreSQL restarts after each crash until it fails to start.
    assert!(
        server.has_stopped(Duration::from_secs(30)),
        "{}",
        server.log()
    );
    disk.make_room();
    server.start();
    for stream in &mut streams {
        stream.walpost.wait_for_logs("streaming", 2);
        stream.fixture.reconnect();
        stream.wait_for_transactions(TRANSACTIONS);
    }
    settle(streams, 2);
}

/// The walsender spills large transactions to disk during decoding, in the directory that also
/// stores slots.
#[test]
fn walsender_resumes_after_a_full_disk_gets_space() {
    const EVENTS: usize = 20_000;
    let disk = Disk::new(64);
    let server = Server::on_disk(
        &disk,
        "pg_replslot",
        MAJOR,
        "logical_decoding_work_mem = 64kB\n",
    );
    let pairs = [false, true].map(|exactly_once| {
        let fixture = Fixture::on_servers(&server, Broker::shared()).in_mode(exactly_once);
        let aggregate = fixture.aggregate(2);
        let walpost = fixture.start_and_confirm_one(&aggregate, "before");
        (fixture, aggregate, walpost)
    });
    disk.fill();
    for (fixture, aggregate, _) in &pairs {
        fixture
            .db
            .run(&fixture.events().insert_many(aggregate, EVENTS, "'{}'"));
    }
    let pairs = pairs.map(|(fixture, _, mut walpost)| {
        let said = walpost.wait_for_log("reconnecting");
        assert!(said.contains("No space left on device"), "{said}");
        (fixture, walpost)
    });
    disk.make_room();
    for (fixture, mut walpost) in pairs {
        walpost.wait_for_logs("streaming", 2);
        let summary = fixture.settle(walpost, &[], fixture.resends(1));
        assert_eq!(summary.committed, EVENTS + 1);
    }
}
