//! A full disk under the broker and under PostgreSQL: nothing that was committed is lost.

use std::time::Duration;

use crate::support::disk::Disk;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, Server};
use crate::support::under_load::{UnderLoad, settle};
use crate::support::wait::wait_until;

const SOME: usize = 40;

#[test]
fn broker_with_a_full_disk_that_gets_room_has_everything() {
    let disk = Disk::new(256);
    let broker = Broker::on_disk(&disk);
    let streams = UnderLoad::in_both_modes(Server::shared(MAJOR), &broker);
    streams
        .iter()
        .for_each(|stream| stream.wait_for_transactions(SOME));
    disk.fill();
    wait_until("the broker to give up", || !broker.is_running());
    streams
        .iter()
        .for_each(|stream| stream.wait_for_transactions(SOME));
    disk.make_room();
    broker.start();
    streams
        .iter()
        .for_each(|stream| stream.wait_for_transactions(SOME));
    settle(streams, 1);
}

#[test]
fn postgresql_with_a_full_disk_that_gets_room_goes_on() {
    let disk = Disk::new(256);
    let server = Server::with_log_on(&disk, MAJOR, "");
    let mut streams = UnderLoad::in_both_modes(&server, Broker::shared());
    streams
        .iter()
        .for_each(|stream| stream.wait_for_transactions(SOME));
    disk.fill();
    // The next segment finds no room.
    let _ = server.session("postgres").try_run("SELECT pg_switch_wal()");
    wait_until("PostgreSQL to find no room", || {
        server.log().contains("PANIC") && server.log().contains("No space left on device")
    });
    // It tries again after each crash, until it can't start.
    assert!(
        server.has_stopped(Duration::from_secs(30)),
        "{}",
        server.log()
    );
    disk.make_room();
    server.start();
    for stream in &mut streams {
        stream.walpost.wait_for_logs("streaming", 2);
        stream.scene.reconnect();
        stream.wait_for_transactions(SOME);
    }
    settle(streams, 2);
}
