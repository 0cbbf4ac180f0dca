//! The broker's or PostgreSQL's disk is full. No committed event is lost.

use std::time::Duration;

use crate::support::disk::Disk;
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, Server};
use crate::support::under_load::{UnderLoad, settle, wait_for_transactions};
use crate::support::wait::wait_until;

const TRANSACTIONS: usize = 40;

#[test]
fn delivers_everything_after_space_is_freed_on_a_full_broker_disk() {
    let disk = Disk::new(256);
    let broker = Broker::on_disk(&disk);
    let streams = UnderLoad::in_both_modes(Server::shared(MAJOR), &broker);
    wait_for_transactions(&streams, TRANSACTIONS);
    disk.fill();
    wait_until("the broker to exit", || !broker.is_running());
    wait_for_transactions(&streams, TRANSACTIONS);
    disk.free_space();
    broker.start();
    wait_for_transactions(&streams, TRANSACTIONS);
    settle(streams, 1);
}

#[test]
fn resumes_after_space_is_freed_on_a_full_wal_disk() {
    let disk = Disk::new(256);
    let server = Server::on_disk(&disk, "pg_wal", MAJOR, "");
    let mut streams = UnderLoad::in_both_modes(&server, Broker::shared());
    wait_for_transactions(&streams, TRANSACTIONS);
    disk.fill();
    // Forces PostgreSQL to start a new WAL segment, for which the disk has no space.
    let _ = server.session("postgres").try_run("SELECT pg_switch_wal()");
    wait_until("PostgreSQL to find no room", || {
        server.log().contains("PANIC") && server.log().contains("No space left on device")
    });
    // After the crash, PostgreSQL tries to restart, but fails for lack of disk space.
    assert!(
        server.has_stopped(Duration::from_secs(30)),
        "{}",
        server.log()
    );
    disk.free_space();
    server.start();
    for stream in &mut streams {
        stream.walpost.wait_for_logs("streaming", 2);
        stream.fixture.reconnect();
        stream.wait_for_transactions(TRANSACTIONS);
    }
    settle(streams, 2);
}

/// While decoding a large transaction, the walsender spills it to disk, in the directory that also
/// contains the slots.
#[test]
fn resumes_after_space_is_freed_on_a_full_disk_with_walsender_spill_files() {
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
        let line = walpost.wait_for_log("reconnecting");
        assert!(line.contains("No space left on device"), "{line}");
        (fixture, walpost)
    });
    disk.free_space();
    for (fixture, mut walpost) in pairs {
        walpost.wait_for_logs("streaming", 2);
        let summary = fixture.settle(walpost, &[], fixture.resends(1));
        assert_eq!(summary.committed, EVENTS + 1);
    }
}
