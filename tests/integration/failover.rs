//! A PostgreSQL standby is promoted. Its slots are copies of the primary's slots, which slot
//! synchronization (PostgreSQL 17 and later) keeps up to date.

use std::collections::HashSet;

use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::lsn::{parse_lsn, parse_position};
use crate::support::postgres::{Server, StopMode};
use crate::support::under_load::{UnderLoad, settle};
use crate::support::wait::{WAIT_TIMEOUT, poll_until, wait_until};

const TRANSACTIONS: usize = 40;

/// The physical slot from which the standby streams.
const STANDBY: &str = "standby";

/// The setting on the primary that makes logical walsenders wait until the standby has received the
/// WAL.
const WAIT_FOR_STANDBY: &str = "synchronized_standby_slots = 'standby'\n";

const STANDBY_SETTINGS: &str = "hot_standby_feedback = on
sync_replication_slots = on
synchronized_standby_slots = ''
";

/// Creates a fixture for each mode, with slots that can be synchronized to the standby.
fn fixtures(primary: &Server) -> [Fixture<'_>; 2] {
    let fixtures = [(); 2].map(|()| Fixture::on_servers(primary, Broker::shared()));
    for fixture in &fixtures {
        let follows = format!(
            "SELECT failover FROM pg_replication_slots WHERE slot_name = '{}'",
            fixture.slot()
        );
        assert_eq!(fixture.db.value(&follows).as_deref(), Some("t"));
    }
    // A standby can copy a slot only if the standby still has all the WAL and catalog rows that the
    // slot needs. Until Walpost reads from the slots that `walpost init` created, these slots need
    // the WAL that `init` wrote after creating them. A new slot would also need everything that the
    // existing slots need, so drop the existing slots first.
    primary
        .session("postgres")
        .run("SELECT pg_catalog.pg_drop_replication_slot(slot_name) FROM pg_replication_slots");
    // If the rows of the dropped slots remained in walpost.slot_state, Walpost would report that
    // another program had moved the new slots. Without the rows, Walpost assumes that `init`
    // created the new slots. Delete the rows before creating the slots, because the standby does
    // not copy a slot that is older than the transaction that deletes the rows.
    for fixture in &fixtures {
        fixture.db.run("DELETE FROM walpost.slot_state");
    }
    for fixture in &fixtures {
        let oracle = format!("oracle_{}", fixture.name);
        for (slot, plugin) in [(fixture.slot(), "pgoutput"), (oracle, "test_decoding")] {
            fixture.db.run(&format!(
                "SELECT pg_create_logical_replication_slot('{slot}', '{plugin}', failover => true)"
            ));
        }
    }
    let [at_least_once, exactly_once] = fixtures;
    [at_least_once, exactly_once.exactly_once()]
}

/// Waits until all slots have been synchronized to the standby.
fn wait_for_slots(standby: &Server) {
    let session = standby.session("postgres");
    let synced = "SELECT count(*) FROM pg_replication_slots WHERE synced AND NOT temporary";
    let found = poll_until(WAIT_TIMEOUT, || (session.number(synced) == 4).then_some(()));
    assert!(
        found.is_some(),
        "no slots on the standby:\n{}",
        standby.log()
    );
}

/// Waits until the slots exist on the standby, then starts a pipeline in each mode on the primary.
fn start<'a>(
    primary: &'a Server,
    standby: &Server,
    fixtures: [Fixture<'a>; 2],
) -> [UnderLoad<'a>; 2] {
    wait_for_slots(standby);
    fixtures.map(|mut fixture| {
        fixture.reconnect();
        let conninfo = format!(
            "host={},{} port={},{} user=postgres dbname={} target_session_attrs=read-write",
            primary.socket.display(),
            standby.socket.display(),
            primary.port,
            standby.port,
            fixture.name
        );
        let stream = UnderLoad::start(fixture, &conninfo, &[], &[]);
        stream.wait_for_transactions(TRANSACTIONS);
        stream
    })
}

/// Connects the fixtures to the standby, which has become the primary.
fn resume_on_standby<'a>(
    streams: &mut [UnderLoad<'a>; 2],
    standby: &'a Server,
    lost: [HashSet<String>; 2],
) {
    for (stream, lost) in streams.iter_mut().zip(lost) {
        stream.fixture.fail_over(standby, lost);
        stream.start_load();
    }
    for stream in streams {
        stream.walpost.wait_for_logs("streaming", 2);
        stream.wait_for_transactions(TRANSACTIONS);
    }
}

/// Promotes the standby and checks that it has every event that Walpost delivered, no matter how
/// the primary stopped.
fn promote_and_check(major: u32, end: StopMode) {
    let primary = Server::private(major, WAIT_FOR_STANDBY);
    let fixtures = fixtures(&primary);
    let standby = primary.standby(STANDBY, STANDBY_SETTINGS);
    let mut streams = start(&primary, &standby, fixtures);
    primary.stop(end);
    streams.iter_mut().for_each(UnderLoad::stop_load);
    standby.promote();
    resume_on_standby(&mut streams, &standby, Default::default());
    for stream in &streams {
        assert_eq!(
            stream.walpost.logged("did not have the last transactions"),
            0
        );
    }
    settle(streams, 1);
}

#[test]
fn continues_after_promotion_of_an_up_to_date_standby() {
    promote_and_check(18, StopMode::Fast);
}

#[test]
fn publishes_no_commits_that_the_promoted_standby_lacks() {
    promote_and_check(17, StopMode::Immediate);
}

/// Returns the ids of all committed events.
fn ids(stream: &UnderLoad) -> HashSet<String> {
    let history = stream.fixture.history();
    history.into_iter().map(|event| event.id).collect()
}

/// The primary did not wait for the standby, so Walpost has delivered events that the new primary
/// does not have.
#[test]
fn detects_a_promoted_standby_that_lacks_published_events() {
    let primary = Server::private(18, "");
    let fixtures = fixtures(&primary);
    let standby = primary.standby(STANDBY, STANDBY_SETTINGS);
    let mut streams = start(&primary, &standby, fixtures);
    let session = standby.session("postgres");
    session.run("ALTER SYSTEM SET primary_conninfo = ''");
    session.run("SELECT pg_catalog.pg_reload_conf()");
    wait_until("the standby to stay behind", || {
        session.number("SELECT count(*) FROM pg_stat_wal_receiver") == 0
    });
    for stream in &mut streams {
        stream.wait_for_transactions(TRANSACTIONS);
        stream.stop_load();
        stream.fixture.wait_until_confirmed();
    }
    let before = streams.each_ref().map(ids);
    primary.stop(StopMode::Immediate);
    standby.promote();
    for stream in &mut streams {
        stream.fixture.fail_over(&standby, []);
    }
    let after = streams.each_ref().map(ids);
    let lost = [&before[0] - &after[0], &before[1] - &after[1]];
    assert!(
        lost.iter().all(|lost| lost.len() >= TRANSACTIONS),
        "{lost:?}"
    );
    let phantoms = lost[1].clone();
    resume_on_standby(&mut streams, &standby, lost);

    let [at_least_once, exactly_once] = &mut streams;
    let output = at_least_once
        .walpost
        .wait_for_log("PostgreSQL has a new timeline");
    assert!(output.contains("WARN"), "{output}");
    let output = exactly_once
        .walpost
        .wait_for_log("did not have the last transactions");
    assert!(
        output.contains("ERROR") && output.contains("epoch=2"),
        "{output}"
    );
    let value = |name: &str| {
        let (_, rest) = output.split_once(&format!("{name}=")).expect(name);
        rest.split([' ', '"']).next().unwrap().to_owned()
    };
    let (from, to) = (parse_lsn(&value("from")), parse_position(&value("to")));
    let records = exactly_once.fixture.records();
    let positions: Vec<_> = records
        .iter()
        .filter(|record| phantoms.contains(record.header("id")))
        .map(|record| parse_position(record.header("walpost-position")))
        .collect();
    assert_eq!(
        positions.len(),
        phantoms.len(),
        "each event was published once"
    );
    assert!(positions.iter().all(|(commit, _)| *commit >= from));
    assert_eq!(positions.iter().max(), Some(&to));
    settle(streams, 1);
}

/// A virtual IP address or a host name may already point to the standby before it is promoted.
#[test]
fn waits_until_a_standby_is_promoted() {
    let primary = Server::private(18, "");
    let fixtures = fixtures(&primary);
    let standby = primary.standby(STANDBY, STANDBY_SETTINGS);
    wait_for_slots(&standby);
    let mut fixtures = fixtures;
    let mut running = Vec::new();
    for fixture in &mut fixtures {
        fixture.reconnect();
        let synchronized = format!("synchronized_standby_slots = '{STANDBY}'");
        fixture
            .check()
            .finish()
            .expect_mentions(&["WARNING", &synchronized]);
        let aggregate = fixture.aggregate(1);
        fixture.insert(&aggregate, "before");
        let mut walpost = fixture
            .with_conninfo(&standby.conninfo(&fixture.name))
            .run()
            .start();
        walpost.wait_for_log(
            "is a copy of the primary's slot; waiting for the standby to be promoted",
        );
        running.push((aggregate, walpost));
    }
    primary.stop(StopMode::Fast);
    standby.promote();
    for (fixture, (aggregate, mut walpost)) in fixtures.iter_mut().zip(running) {
        fixture.fail_over(&standby, []);
        walpost.wait_for_log("streaming");
        fixture.insert(&aggregate, "after");
        let records = fixture.wait_for_records(2);
        let keys: Vec<_> = records.iter().map(|record| record.key()).collect();
        assert_eq!(keys, ["before", "after"]);
        walpost.terminate().expect_code(0);
    }
}

#[test]
fn halts_on_a_standby_without_the_slot_only_after_promotion() {
    let primary = Server::private(15, "");
    let fixture = Fixture::on_servers(&primary, Broker::shared());
    let standby = primary.standby(STANDBY, "");
    let mut walpost = fixture
        .with_conninfo(&standby.conninfo(&fixture.name))
        .run()
        .start();
    walpost.wait_for_log("does not exist on this server; waiting for the standby to be promoted");
    fixture
        .with_conninfo(&standby.conninfo(&fixture.name))
        .check()
        .finish()
        .expect_mentions(&["UNREACHABLE", "standby in recovery"]);
    primary.stop(StopMode::Fast);
    standby.promote();
    let halted = walpost.finish().expect_code(3);
    halted.expect_mentions(&["does not exist", "walpost init"]);
}
