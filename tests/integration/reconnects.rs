//! Repeated session failures, and addresses that lead to a different server after a reconnect.

use std::time::{Duration, Instant};

use procfs::process::Process;

use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, MAJORS, Server};
use crate::support::process::free_port;
use crate::support::proxy::{Proxy, ProxyMode};
use crate::support::wait::{WAIT_TIMEOUT, assert_stays, poll_until, wait_until};
use crate::support::walpost::{Invocation, Walpost};

const RECONNECTS: usize = 200;
/// Number of reconnects after which a process has allocated everything it needs.
const WARM_UP_RECONNECTS: usize = 20;

#[test]
fn uses_no_more_resources_after_200_reconnects_under_load() {
    stays_small(false);
}

#[test]
fn uses_no_more_resources_after_200_reconnects_with_kafka_transactions() {
    stays_small(true);
}

in_both_modes! {
    reconnects_promptly_after_repeated_session_terminations
}

/// Nothing is confirmed between the reconnects, so no session makes progress that would reset a
/// backoff.
fn reconnects_promptly_after_repeated_session_terminations(exactly_once: bool) {
    let fixture = Fixture::new().in_mode(exactly_once);
    let mut walpost = fixture.run().start_streaming();
    for count in 1..=9 {
        let ended = Instant::now();
        wait_until("the walsender to end", || fixture.end_walsender());
        walpost.wait_for_logs("streaming", count + 1);
        let lasted = ended.elapsed();
        assert!(lasted < Duration::from_secs(5), "{lasted:?} after {count}");
    }
    walpost.terminate().expect_code(0);
}

/// The resources that a process holds.
#[derive(Clone, Copy, Debug)]
struct Footprint {
    threads: u64,
    descriptors: usize,
    megabytes: u64,
}

impl Footprint {
    fn measure(walpost: &Walpost) -> Self {
        let process = Process::new(i32::try_from(walpost.process_id()).unwrap()).unwrap();
        Self {
            threads: u64::try_from(process.stat().unwrap().num_threads).unwrap(),
            descriptors: process.fd_count().unwrap(),
            megabytes: walpost.resident_bytes() >> 20,
        }
    }

    fn is_close_to(self, before: Self) -> bool {
        self.threads <= before.threads + 6
            && self.descriptors <= before.descriptors + 12
            && self.megabytes <= before.megabytes + 16
    }
}

fn stays_small(exactly_once: bool) {
    let fixture = Fixture::new().in_mode(exactly_once);
    let aggregate = fixture.aggregate(2);
    let load = fixture.load_with_pauses(&[&aggregate], Duration::from_millis(30));
    let mut walpost = fixture.start();
    let mut before = None;
    for count in 1..=RECONNECTS {
        // Wait for a confirmation, which resets the backoff, so that the next connection attempt is
        // not delayed for long.
        let confirmed = fixture.confirmed();
        wait_until("something to be confirmed", || {
            fixture.confirmed() > confirmed
        });
        wait_until("a walsender to end", || fixture.end_walsender());
        walpost.wait_for_logs("streaming", count + 1);
        if count == WARM_UP_RECONNECTS {
            before = Some(Footprint::measure(&walpost));
        }
    }
    load.stop();
    let before = before.unwrap();
    // The last session's tasks may take a moment to end.
    let settled = poll_until(Duration::from_secs(20), || {
        Footprint::measure(&walpost)
            .is_close_to(before)
            .then_some(())
    });
    let after = Footprint::measure(&walpost);
    assert!(
        settled.is_some(),
        "after {WARM_UP_RECONNECTS} reconnects {before:?}, after {RECONNECTS} {after:?}"
    );
    fixture.settle(walpost, &[], fixture.resends(RECONNECTS));
}

/// Settings that make the server end sessions. Older server versions lack some of them.
const TIMEOUTS: [&str; 4] = [
    "statement_timeout",
    "idle_in_transaction_session_timeout",
    "idle_session_timeout",
    "transaction_timeout",
];

#[test]
fn database_timeouts_do_not_end_sessions_during_a_kafka_outage() {
    for major in MAJORS {
        let fixture = Fixture::on_servers(Server::shared(major), Broker::shared());
        let aggregate = fixture.aggregate(1);
        // Write more data than all buffers between the server and Walpost can hold, so that the
        // walsender blocks in the middle of the transaction.
        let payload = "jsonb_build_object('text', repeat('x', 2000))";
        fixture
            .db
            .run(&fixture.events().insert_many(&aggregate, 10_000, payload));
        let names = TIMEOUTS.map(|name| format!("'{name}'")).join(", ");
        let known = fixture.db.rows(&format!(
            "SELECT name FROM pg_settings WHERE name IN ({names})"
        ));
        for name in known.iter().flatten().flatten() {
            let database = &fixture.name;
            fixture
                .db
                .run(&format!("ALTER DATABASE {database} SET {name} = '1s'"));
        }
        let address = fixture.broker.address();
        let (_, port) = address.rsplit_once(':').unwrap();
        let proxy = Proxy::start(free_port(), port.parse().unwrap());
        proxy.set_mode(ProxyMode::Swallow);
        let mut walpost = fixture
            .invoke("run")
            .args(["--kafka", &format!("127.0.0.1:{}", proxy.port())])
            .start_streaming();
        let sessions = || {
            fixture.db.rows(
                "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() \
                 AND backend_type <> 'autovacuum worker' ORDER BY pid",
            )
        };
        let before = sessions();
        assert_stays("the same sessions", Duration::from_secs(3), || {
            walpost.is_running() && sessions() == before
        });
        proxy.set_mode(ProxyMode::Pass);
        fixture.wait_for_records(10_000);
        assert_eq!(walpost.logged("reconnecting"), 0, "PostgreSQL {major}");
        walpost.terminate().expect_code(0);
    }
}

/// Between two connections, the address is moved to another server. The state of the slot on the
/// first server must not be applied to the second server.
#[test]
fn confirms_only_delivered_events_if_the_server_address_is_reassigned_to_another_server() {
    let (old, new) = (Server::private(MAJOR, ""), Server::private(MAJOR, ""));
    // The old server's slot is ahead of all WAL on the new server.
    for _ in 0..3 {
        old.session("postgres")
            .run("SELECT pg_switch_wal(); CREATE TABLE t (); DROP TABLE t");
    }
    let fixture = Fixture::on_servers(&old, Broker::shared());
    let aggregate = fixture.aggregate(1);
    new.session("postgres")
        .run(&format!("CREATE DATABASE {}", fixture.name));
    let new_conninfo = new.conninfo(&fixture.name);
    Invocation::new(["init", "--pipeline", &fixture.name, "--no-role"])
        .args(["--postgres", &new_conninfo])
        .finish()
        .expect_code(0);
    let session = new.session(&fixture.name);
    session.run(&fixture.insert_sql(&aggregate, "k"));
    let confirmed = || {
        session.number(&format!(
            "SELECT (confirmed_flush_lsn - '0/0')::bigint FROM pg_replication_slots WHERE slot_name = '{}'",
            fixture.slot()
        ))
    };
    let end = session.number("SELECT (pg_current_wal_lsn() - '0/0')::bigint");
    assert!(fixture.confirmed() > u64::try_from(end).unwrap());
    let proxy = Proxy::start(free_port(), old.port);
    proxy.move_after(1, new.port);
    let walpost = fixture
        .with_conninfo(&proxy.conninfo(&fixture.name))
        .run()
        .start_streaming();
    fixture.wait_for_records(1);
    let reached = poll_until(WAIT_TIMEOUT, || (confirmed() >= end).then_some(()));
    assert!(reached.is_some(), "confirmed up to {:X}", confirmed());
    let written = session.number("SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint");
    assert!(
        confirmed() <= written,
        "confirmed {:X}, but the server has written {written:X}",
        confirmed()
    );
    assert!(walpost.logged("different servers") > 0);
    walpost.terminate().expect_code(0);
}
