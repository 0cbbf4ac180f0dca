//! Walpost keeps the slot active while Kafka is down, because PostgreSQL may invalidate an inactive
//! slot.

use std::time::Duration;

use crate::support::checker::Resends;
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, Server, StopMode};
use crate::support::proxy::ProxyMode;
use crate::support::wait::{assert_stays, wait_until};
use crate::support::walpost::Walpost;

/// The first PostgreSQL version with `idle_replication_slot_timeout`.
const FIRST_VERSION_WITH_IDLE_TIMEOUT: u32 = 18;
const IDLE_TIMEOUT: &str = "idle_replication_slot_timeout = '2s'\n";

in_both_modes! {
    holds_the_slot_while_kafka_is_unavailable_at_startup
    postgresql_shuts_down_within_seconds_while_startup_waits_for_kafka
    reports_a_slot_invalidated_by_its_idle_timeout
}

/// Asserts that the slot stays active for several times the idle timeout. Forces checkpoints,
/// because PostgreSQL invalidates idle slots only during a checkpoint. The checkpoints also
/// invalidate the idle slot of the test oracle.
fn expect_slot_stays_active(fixture: &Fixture) {
    wait_until("the slot to be acquired", || fixture.slot_is_active());
    assert_stays("held", Duration::from_secs(7), || {
        fixture.db.run("CHECKPOINT");
        fixture.slot_is_active()
    });
}

fn holds_the_slot_while_kafka_is_unavailable_at_startup(exactly_once: bool) {
    let server = Server::private(FIRST_VERSION_WITH_IDLE_TIMEOUT, IDLE_TIMEOUT);
    let broker = Broker::borrowed();
    let kafka = broker.proxy();
    let fixture = Fixture::on_servers(&server, &broker)
        .behind_proxy(&kafka)
        .in_mode(exactly_once);
    let aggregate = fixture.aggregate(1);
    kafka.set_mode(ProxyMode::Refuse);
    for _ in 0..20 {
        fixture.insert(&aggregate, "k");
    }
    let walpost = fixture.run().start();
    expect_slot_stays_active(&fixture);
    kafka.set_mode(ProxyMode::Pass);
    fixture.wait_for_records(20);
    fixture.wait_until_confirmed();
    walpost.terminate().expect_code(0);
    assert_eq!(fixture.records().len(), 20);
}

fn postgresql_shuts_down_within_seconds_while_startup_waits_for_kafka(exactly_once: bool) {
    let server = Server::private(MAJOR, "");
    let broker = Broker::borrowed();
    let kafka = broker.proxy();
    let mut fixture = Fixture::on_servers(&server, &broker)
        .behind_proxy(&kafka)
        .in_mode(exactly_once);
    let aggregate = fixture.aggregate(1);
    kafka.set_mode(ProxyMode::Refuse);
    for _ in 0..20 {
        fixture.insert(&aggregate, "k");
    }
    let mut walpost = fixture.run().start();
    wait_until("the slot to be acquired", || fixture.slot_is_active());
    server.begin_stop(StopMode::Fast);
    assert!(
        server.has_stopped(Duration::from_secs(15)),
        "{}",
        walpost.log()
    );
    server.start();
    kafka.set_mode(ProxyMode::Pass);
    walpost.wait_for_log("connected to PostgreSQL again");
    fixture.reconnect();
    fixture.settle(walpost, &[], Resends::AtMost(1));
}

fn reports_a_slot_invalidated_by_its_idle_timeout(exactly_once: bool) {
    let server = Server::private(FIRST_VERSION_WITH_IDLE_TIMEOUT, IDLE_TIMEOUT);
    let fixture = Fixture::on_servers(&server, Broker::shared()).in_mode(exactly_once);
    wait_until("the slot to be invalidated", || {
        fixture.db.run("CHECKPOINT");
        fixture.db.is_true(&format!(
            "SELECT invalidation_reason = 'idle_timeout' FROM pg_replication_slots WHERE slot_name = '{}'",
            fixture.slot()
        ))
    });
    fixture.run().finish().expect_code(3).expect_mentions(&[
        "halted",
        &fixture.slot(),
        "is lost",
        "ALTER SYSTEM SET idle_replication_slot_timeout = 0",
        "pg_drop_replication_slot",
    ]);
}

/// Normally, once Walpost has streamed from a slot, rows older than the slot count as copied. While
/// Walpost waits for Kafka, it streams from the slot only to keep the slot active, and delivers
/// nothing. In this case, the older rows must still count as not copied.
#[test]
fn copies_rows_older_than_the_slot_after_a_kafka_outage_at_startup() {
    let broker = Broker::borrowed();
    let kafka = broker.proxy();
    let fixture = Fixture::bare_on_servers(Server::shared(MAJOR), &broker).behind_proxy(&kafka);
    fixture.db.run("CREATE TABLE outbox (id uuid, aggregatetype text, aggregateid text, type text, payload jsonb)");
    let aggregate = fixture.aggregate(1);
    for _ in 0..20 {
        fixture.insert(&aggregate, "k");
    }
    fixture.init().finish().expect_code(0);
    let fixture = fixture.exactly_once();
    fixture.insert(&aggregate, "k");
    kafka.set_mode(ProxyMode::Refuse);
    let mut waiting = fixture.run().start();
    assert_stays("waiting", Duration::from_secs(3), || waiting.is_running());
    waiting.kill();
    kafka.set_mode(ProxyMode::Pass);
    let walpost = fixture.start();
    assert_eq!(fixture.wait_for_records(21).len(), 21);
    walpost.terminate().expect_code(0);
}

/// Initializing a transactional producer fences the previous one, so only the process that holds
/// the slot may initialize a producer.
#[test]
fn standby_does_not_fence_the_producer_of_the_process_that_holds_the_slot() {
    let fixture = Fixture::new().exactly_once();
    let aggregate = fixture.aggregate(1);
    let first = fixture.start_and_confirm_one(&aggregate, "k");
    let mut second = fixture.run().start();
    second.wait_for_log("standing by");
    for _ in 0..3 {
        fixture.insert(&aggregate, "k");
        fixture.wait_until_confirmed();
    }
    assert_eq!(first.logged("reconnecting"), 0, "{}", first.log());
    second.terminate().expect_code(0);
    assert_eq!(fixture.settle(first, &[], Resends::Never).repeated, 0);
}

/// Starts a process that acts like a program other than Walpost: it reads the slot and confirms
/// WAL, but does not record its positions in the database.
fn start_other_reader(fixture: &Fixture) -> Walpost {
    fixture
        .db
        .run("ALTER TABLE walpost.slot_state RENAME TO hidden");
    let conninfo = format!("{} application_name=pg_recvlogical", fixture.conninfo());
    let other_program = fixture
        .with_conninfo(&conninfo)
        .invoke("run")
        .args(["--sink", "stdout", "--snapshot", "never"])
        .start_streaming();
    fixture
        .db
        .run("ALTER TABLE walpost.hidden RENAME TO slot_state");
    other_program
}

in_both_modes! {
    halts_if_another_program_consumed_events_from_the_slot
}

#[test]
fn reports_not_ready_while_another_program_holds_the_slot() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    let other_program = start_other_reader(&fixture);
    let pid = fixture.db.number(&format!(
        "SELECT active_pid FROM pg_replication_slots WHERE slot_name = '{}'",
        fixture.slot()
    ));
    // Create a role that lacks the privileges to see details of other roles' sessions.
    let role = format!("{}_r", fixture.name);
    fixture.db.run(&format!(
        "CREATE ROLE {role} LOGIN REPLICATION; GRANT SELECT ON outbox TO {role};
         GRANT USAGE ON SCHEMA walpost TO {role}; GRANT SELECT, INSERT ON walpost.journal TO {role}"
    ));
    let conninfo = fixture.conninfo_as(&role);
    let mut walpost = fixture
        .with_conninfo(&conninfo)
        .run()
        .args(["--http", "127.0.0.1:0"])
        .start();
    let http = walpost.http();
    let held = format!("is in use by PID {pid}, which does not appear to be Walpost");
    let command = format!("pg_catalog.pg_terminate_backend({pid})");
    let name = "application_name \"pg_recvlogical\", role \"postgres\"";
    let line = walpost.wait_for_log(&held);
    for text in ["WARN", "reconnecting", name, &command] {
        assert!(line.contains(text), "{text} in {line}");
    }
    assert_eq!(walpost.logged("standing by"), 0);
    let ready = http.get("/readyz");
    assert_eq!(ready.code, 503, "{ready:?}");
    assert!(ready.body.contains(&held), "{ready:?}");
    let status = |address: &str| fixture.invoke("status").args(["--http", address]).finish();
    for address in [http.address(), "off"] {
        status(address)
            .expect_code(1)
            .expect_mentions(&[&held, name, &command]);
    }
    let check = fixture.check().finish().expect_code(3);
    check.expect_mentions(&["FAILED", &held]);

    other_program.terminate().expect_code(0);
    walpost.wait_for_log("streaming");
    fixture.insert(&aggregate, "k");
    fixture.settle(walpost, &[], fixture.resends(0));
    fixture
        .db
        .run(&format!("DROP OWNED BY {role}; DROP ROLE {role}"));
}

/// Events that another instance of the pipeline confirmed have been delivered. Events that another
/// program confirmed may be lost.
fn halts_if_another_program_consumed_events_from_the_slot(exactly_once: bool) {
    let fixture = Fixture::new().in_mode(exactly_once);
    let aggregate = fixture.aggregate(1);
    let mut walpost = fixture.start_and_confirm_one(&aggregate, "before");
    walpost.freeze();
    wait_until("a walsender to end", || fixture.end_walsender());
    wait_until("the slot to be free", || !fixture.slot_is_active());
    let other_program = start_other_reader(&fixture);
    fixture.insert(&aggregate, "read by something else");
    fixture.wait_until_confirmed();
    walpost.thaw();
    walpost.wait_for_log("which does not appear to be Walpost");
    other_program.terminate().expect_code(0);
    let expected = match exactly_once {
        true => "something else moved the slot, or dropped and re-created it",
        false => "something else moved it, or dropped and re-created it",
    };
    walpost
        .finish()
        .expect_code(3)
        .expect_mentions(&["halted", expected]);
    assert_eq!(fixture.records().len(), 1);
}
