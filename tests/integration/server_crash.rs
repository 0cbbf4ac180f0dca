//! A PostgreSQL process crashes while it reads the slot, so the server terminates all its other
//! processes.

use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, Server, StopMode};
use crate::support::process::signal;
use crate::support::session::Session;
use crate::support::wait::wait_for;
use crate::support::walpost::Walpost;

/// Returns the PID of the walsender, if one exists and the server accepts connections.
fn walsender(server: &Server) -> Option<u32> {
    let session = Session::connect(&server.conninfo("postgres")).ok()?;
    let sql = "SELECT active_pid FROM pg_replication_slots WHERE active_pid IS NOT NULL";
    session.try_rows(sql).ok()?.pop()?.pop()??.parse().ok()
}

/// Crashes the walsender whenever it starts to read the slot, as a bug in the server would. Stops
/// after `times` crashes or when Walpost has exited, and returns the number of crashes.
fn crash(server: &Server, walpost: &mut Walpost, times: usize) -> usize {
    for crashes in 0..times {
        let found = wait_for("a walsender, or the end of Walpost", || {
            match walpost.is_running() {
                true => walsender(server).map(Some),
                false => Some(None),
            }
        });
        let Some(pid) = found else {
            return crashes;
        };
        signal(pid, "SEGV");
        wait_for("the end of the walsender", || {
            (walsender(server) != Some(pid)).then_some(())
        });
    }
    times
}

#[test]
fn halts_if_the_server_crashes_repeatedly_at_the_same_position() {
    let server = Server::private(MAJOR, "");
    let mut fixture = Fixture::on_servers(&server, Broker::shared());
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_and_confirm_one(&aggregate, "k");
    walpost.terminate().expect_code(0);
    // Insert so many rows that decoding them takes longer than killing the walsender.
    fixture.db.run(
        "CREATE TABLE other (n int, t text);
         INSERT INTO other SELECT n, repeat('x', 500) FROM generate_series(1, 600000) AS n",
    );
    let mut walpost = fixture.run().start();
    let crashes = crash(&server, &mut walpost, 12);
    let halted = walpost.finish().expect_code(3);
    assert!((3..12).contains(&crashes), "{crashes}");
    halted.expect_mentions(&["has crashed 3 times", "pg_replication_slot_advance"]);
    fixture.reconnect();
    fixture.insert(&aggregate, "l");
    let walpost = fixture.start();
    fixture.wait_for_records(2);
    walpost.terminate().expect_code(0);
}

#[test]
fn server_restarts_do_not_count_as_crashes() {
    let server = Server::private(MAJOR, "");
    let mut fixture = Fixture::on_servers(&server, Broker::shared());
    let aggregate = fixture.aggregate(1);
    let mut walpost = fixture.start_and_confirm_one(&aggregate, "k");
    for count in 0..4 {
        walpost.wait_for_logs("streaming", count + 1);
        server.stop(StopMode::Immediate);
        server.start();
    }
    fixture.reconnect();
    fixture.insert(&aggregate, "l");
    fixture.wait_for_records(2);
    walpost.terminate().expect_code(0);
}
