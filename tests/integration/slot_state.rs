//! Positions are recorded before they are confirmed, so that Walpost can always tell that a slot
//! was moved or re-created.

use std::cell::OnceCell;
use std::collections::HashSet;
use std::process::Command;
use std::time::Duration;

use crate::support::checker::Resends;
use crate::support::event::Outbox;
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::lsn::{lsn_text, parse_lsn};
use crate::support::postgres::{MAJOR, Server, StopMode, debian_binaries};
use crate::support::session::Session;
use crate::support::wait::{assert_stays, wait_until};
use crate::support::walpost::Walpost;

for_each_outbox! {
    detects_a_slot_recreated_while_a_standby_waits
    halts_until_the_operator_accepts_a_slot_that_was_recreated_while_unused
    records_each_position_before_confirming_it
}

/// SQL that counts journal entries about slots that have replaced other slots.
const COUNT_GAPS_SQL: &str =
    "SELECT count(*) FROM walpost.journal WHERE detail ->> 'reason' LIKE 'slot %'";

/// Returns the slot's recorded position.
fn written(fixture: &Fixture) -> u64 {
    read_recorded_position(&fixture.db, fixture)
}

/// Like [`written`], but reads the position in the given session.
fn read_recorded_position(session: &Session, fixture: &Fixture) -> u64 {
    let text = session.value(&format!(
        "SELECT confirmed_lsn FROM walpost.slot_state WHERE slot = '{}'",
        fixture.slot()
    ));
    text.map_or(0, |text| parse_lsn(&text))
}

/// Drops the slot, commits ten events, and re-creates the slot.
pub(crate) fn re_create_slot(fixture: &Fixture, aggregate: &str) {
    let slot = fixture.slot();
    fixture.drop_slot();
    for _ in 0..10 {
        fixture.insert(aggregate, "k");
    }
    fixture.db.run(&format!(
        "SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')"
    ));
}

/// Asserts that Walpost halts without delivering more events, and that its message contains the
/// command that resumes delivery.
fn expect_halt(fixture: &Fixture, walpost: Walpost, delivered: usize) {
    walpost.finish().expect_code(3).expect_mentions(&[
        "something else moved it, or dropped and re-created it",
        "walpost skip --to",
        &format!("--pipeline {}", fixture.name),
    ]);
    assert_eq!(fixture.records().len(), delivered);
}

fn detects_a_slot_recreated_while_a_standby_waits(outbox: Outbox) {
    let fixture = Fixture::with_outbox(outbox);
    let aggregate = fixture.aggregate(1);
    let first = fixture.start_and_confirm_one(&aggregate, "k");
    let mut second = fixture.run().start();
    second.wait_for_log("standing by");
    first.freeze();
    second.freeze();
    re_create_slot(&fixture, &aggregate);
    first.kill();
    second.thaw();
    expect_halt(&fixture, second, 1);
}

fn halts_until_the_operator_accepts_a_slot_that_was_recreated_while_unused(outbox: Outbox) {
    let fixture = Fixture::with_outbox(outbox);
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_and_confirm_one(&aggregate, "k");
    walpost.terminate().expect_code(0);
    re_create_slot(&fixture, &aggregate);
    expect_halt(&fixture, fixture.run().start(), 1);
    // `skip` accepts no position other than the slot's own.
    let found = fixture.confirmed();
    fixture
        .skip(&lsn_text(found - 8))
        .arg("--yes")
        .finish()
        .expect_code(2);
    fixture
        .skip(&lsn_text(found))
        .arg("--yes")
        .finish()
        .expect_code(0);
    fixture
        .skip(&lsn_text(found))
        .arg("--yes")
        .finish()
        .expect_code(2);
    assert_eq!(fixture.confirmed(), found);
    let walpost = fixture.start();
    fixture.insert(&aggregate, "k");
    assert_eq!(fixture.wait_for_records(2).len(), 2);
    walpost.terminate().expect_code(0);
}

/// The journal entry that `skip` writes permits the slot to move to the LSN that was passed to
/// `skip`, but to no other position.
#[test]
fn skip_allows_the_slot_to_move_only_to_the_skipped_position() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_and_confirm_one(&aggregate, "k");
    walpost.terminate().expect_code(0);
    re_create_slot(&fixture, &aggregate);
    let found = lsn_text(fixture.confirmed());
    fixture.skip(&found).arg("--yes").finish().expect_code(0);
    re_create_slot(&fixture, &aggregate);
    expect_halt(&fixture, fixture.run().start(), 1);
}

/// A restored dump contains another cluster's journal, whose LSNs do not apply to this slot.
#[test]
fn skip_recorded_by_a_different_cluster_does_not_permit_a_slot_move() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_and_confirm_one(&aggregate, "k");
    walpost.terminate().expect_code(0);
    re_create_slot(&fixture, &aggregate);
    fixture.db.run(&format!(
        "INSERT INTO walpost.journal (pipeline, slot, action, from_lsn, to_lsn, detail) \
         SELECT '{}', '{}', 'skip', '0/1', 'FFFFFFFF/0', detail::jsonb \
         FROM unnest(ARRAY['{{}}', '{{\"system_id\": \"1\"}}']) AS detail",
        fixture.name,
        fixture.slot()
    ));
    expect_halt(&fixture, fixture.run().start(), 1);
}

/// If two instances write their positions, the instance that lags behind must not overwrite the
/// other instance's position.
#[test]
fn recorded_position_never_decreases() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_and_confirm_one(&aggregate, "k");
    walpost.terminate().expect_code(0);
    fixture
        .db
        .run("UPDATE walpost.slot_state SET confirmed_lsn = 'FFFFFFFF/0'");
    let walpost = fixture.start();
    fixture.insert(&aggregate, "k");
    fixture.wait_for_records(2);
    fixture.wait_until_confirmed();
    walpost.terminate().expect_code(0);
    assert_eq!(lsn_text(written(&fixture)), "FFFFFFFF/0");
}

/// The slot exists either because `init` was killed after creating it, or because it was created by
/// hand.
#[test]
fn init_records_missing_events_if_the_slot_state_is_from_a_different_cluster() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_and_confirm_one(&aggregate, "k");
    walpost.terminate().expect_code(0);
    re_create_slot(&fixture, &aggregate);
    fixture
        .db
        .run("UPDATE walpost.slot_state SET system_id = '1'");
    let init = fixture.init().finish().expect_code(0);
    init.expect_mentions(&["may be missing", "walpost replay --dropped-slots"]);
    fixture.init().finish().expect_code(0);
    // Restore the state that `init` leaves if it is killed before it records the new slot.
    fixture
        .db
        .run("UPDATE walpost.slot_state SET system_id = '1'");
    fixture.init().finish().expect_code(0);
    assert_eq!(fixture.db.number(COUNT_GAPS_SQL), 1);
}

#[test]
fn run_records_missing_events_if_the_slot_state_is_from_a_different_timeline() {
    for history in [
        "timeline = timeline + 1",
        "system_id = '1'",
        "database_oid = 1",
    ] {
        let fixture = Fixture::new();
        let aggregate = fixture.aggregate(1);
        let walpost = fixture.start_and_confirm_one(&aggregate, "k");
        walpost.terminate().expect_code(0);
        re_create_slot(&fixture, &aggregate);
        fixture
            .db
            .run(&format!("UPDATE walpost.slot_state SET {history}"));
        fixture
            .check()
            .finish()
            .expect_code(3)
            .expect_mentions(&["a different history of the database", "walpost init"]);
        let mut walpost = fixture.run().start();
        walpost.wait_for_log("may be missing");
        walpost.wait_for_log("streaming");
        fixture
            .check()
            .finish()
            .expect_code(3)
            .expect_mentions(&["walpost replay --dropped-slots"]);
        fixture
            .replay(&["--dropped-slots", "--yes"])
            .finish()
            .expect_code(0);
        fixture.wait_for_ids(&fixture.history());
        fixture.check().finish().expect_code(0);
        walpost.terminate().expect_code(0);
        assert_eq!(fixture.db.number(COUNT_GAPS_SQL), 1, "{history}");
    }
}

/// A slot that was synchronized to the new primary is at or before the recorded position, so no
/// events are missing.
#[test]
fn records_no_missing_events_for_a_synchronized_slot_after_a_failover() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_and_confirm_one(&aggregate, "k");
    walpost.terminate().expect_code(0);
    fixture
        .db
        .run("UPDATE walpost.slot_state SET timeline = timeline + 1");
    fixture.init().finish().expect_code(0);
    let walpost = fixture.start();
    fixture.insert(&aggregate, "k");
    fixture.wait_for_records(2);
    walpost.terminate().expect_code(0);
    fixture.check().finish().expect_code(0);
    assert_eq!(fixture.db.number(COUNT_GAPS_SQL), 0);
}

/// Nothing was read from the first slot, and there are no older rows to copy. Nevertheless, an
/// event was committed after the first slot was dropped and before the second was created.
#[test]
fn second_init_before_the_first_run_reports_events_committed_without_a_slot() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    fixture.drop_slot();
    fixture.insert(&aggregate, "k");
    let init = fixture.init().finish().expect_code(0);
    init.expect_mentions(&["may be missing", "walpost replay --dropped-slots"]);
    let walpost = fixture.start();
    fixture
        .replay(&["--dropped-slots", "--yes"])
        .finish()
        .expect_code(0);
    fixture.wait_for_ids(&fixture.history());
    walpost.terminate().expect_code(0);
}

/// The gap before the second slot ends at the position where the second slot starts, so the gap
/// must not include later events.
#[test]
fn reports_the_missing_events_of_each_slot_when_a_slot_is_replaced_twice() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_and_confirm_one(&aggregate, "delivered");
    walpost.terminate().expect_code(0);
    for key in ["before the second", "before the third"] {
        fixture.insert(&aggregate, key);
        fixture.drop_slot();
        let init = fixture.init().finish().expect_code(0);
        init.expect_mentions(&["may be missing", "walpost replay --dropped-slots"]);
        let replay = fixture.replay(&["--dropped-slots", "--yes"]);
        replay.finish().expect_code(0);
        assert!(fixture.records().iter().any(|record| record.key() == key));
    }
    fixture.check().finish().expect_code(0);
}

/// The part of a database to copy.
pub(crate) enum CopyScope {
    Everything,
    Schema,
}

/// Copies the fixture's database to another server, under the same name.
pub(crate) fn copy_database(fixture: &Fixture, to: &Server, copied: CopyScope) {
    to.session("postgres")
        .run(&format!("CREATE DATABASE {}", fixture.name));
    let flags = match copied {
        CopyScope::Everything => "",
        CopyScope::Schema => "--schema-only",
    };
    let script =
        format!("\"$0/pg_dump\" {flags} -d \"$1\" | \"$0/psql\" -q -v ON_ERROR_STOP=1 -d \"$2\"");
    let output = Command::new("sh")
        .args(["-c", &script])
        .arg(debian_binaries(MAJOR))
        .arg(fixture.conninfo())
        .arg(to.conninfo(&fixture.name))
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
}

/// Replays the events that precede the new slot and may be missing. Asserts that no events are
/// reported as missing afterwards.
fn replay_missing_events(fixture: &Fixture) {
    let walpost = fixture.start();
    fixture
        .replay(&["--dropped-slots", "--yes"])
        .finish()
        .expect_code(0);
    wait_until("the row that was not delivered", || {
        let records = fixture.records();
        records.iter().any(|record| record.key() == "not delivered")
    });
    walpost.terminate().expect_code(0);
    fixture.check().finish().expect_code(0);
}

/// A copied server has the same system identifier and database OIDs as the original. Only one fact
/// shows that the slot state comes from another server: WAL ends before the recorded position.
#[test]
fn reports_undelivered_rows_if_a_dump_is_restored_on_a_copy_of_the_server() {
    let [first, second] = [(); 2].map(|()| Server::private(MAJOR, ""));
    let mut fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    copy_database(&fixture, &first, CopyScope::Everything);
    fixture.fail_over(&first, []);
    first.session("postgres").run("SELECT pg_switch_wal()");
    fixture.init().finish().expect_code(0);
    let walpost = fixture.start_and_confirm_one(&aggregate, "delivered");
    walpost.terminate().expect_code(0);
    fixture.insert(&aggregate, "not delivered");
    copy_database(&fixture, &second, CopyScope::Everything);
    fixture.fail_over(&second, []);
    let init = fixture.init().finish().expect_code(0);
    init.expect_mentions(&["may be missing", "walpost replay --dropped-slots"]);
    replay_missing_events(&fixture);
}

/// After a database is moved by dump and restore, it has undelivered rows but no slot.
#[test]
fn reports_and_replays_undelivered_rows_of_a_restored_dump() {
    for exactly_once in [false, true] {
        // The tests' servers are copies of one cluster, so the two servers differ only in the
        // database's OID.
        let restored = Server::private(MAJOR, "");
        let mut fixture = Fixture::new();
        if exactly_once {
            fixture = fixture.exactly_once();
        }
        let aggregate = fixture.aggregate(1);
        let walpost = fixture.start_and_confirm_one(&aggregate, "delivered");
        walpost.terminate().expect_code(0);
        fixture.insert(&aggregate, "not delivered");
        copy_database(&fixture, &restored, CopyScope::Everything);
        fixture.fail_over(&restored, []);
        let init = fixture.init().finish().expect_code(0);
        init.expect_mentions(&[
            "slot created in another database",
            "may be missing",
            "walpost replay --dropped-slots",
        ]);
        fixture
            .check()
            .finish()
            .expect_code(3)
            .expect_mentions(&["walpost replay --dropped-slots"]);
        if exactly_once {
            fixture.run().finish().expect_code(3);
            let adopt = fixture.checkpoint("adopt").arg("--yes");
            let adopt = adopt.finish().expect_code(0);
            assert!(
                adopt.stdout.contains("walpost replay --dropped-slots"),
                "{adopt:?}"
            );
        }
        let walpost = fixture.start();
        fixture
            .replay(&["--dropped-slots", "--yes"])
            .finish()
            .expect_code(0);
        fixture.insert(&aggregate, "new");
        wait_until("the last event", || {
            fixture.records().iter().any(|record| record.key() == "new")
        });
        walpost.terminate().expect_code(0);
        assert!(
            fixture
                .records()
                .iter()
                .any(|record| record.key() == "not delivered")
        );
        fixture.check().finish().expect_code(0);
    }
}

/// pg_upgrade keeps the OID of the database and the contents of Walpost's tables, but the new
/// cluster has a different system identifier and is on timeline 1.
#[test]
fn reports_and_replays_undelivered_rows_after_pg_upgrade() {
    for exactly_once in [false, true] {
        let (old, upgraded) = (Server::private(MAJOR, ""), OnceCell::new());
        let mut fixture = Fixture::on_servers(&old, Broker::shared()).in_mode(exactly_once);
        let aggregate = fixture.aggregate(1);
        let walpost = fixture.start_and_confirm_one(&aggregate, "delivered");
        walpost.terminate().expect_code(0);
        fixture.insert(&aggregate, "not delivered");
        fixture.fail_over(upgraded.get_or_init(|| old.upgraded()), []);
        let missing = fixture.run().finish().expect_code(3);
        missing.expect_mentions(&["does not exist", "walpost init"]);
        let init = fixture.init().finish().expect_code(0);
        init.expect_mentions(&[
            "slot created on another cluster",
            "walpost replay --dropped-slots",
        ]);
        if exactly_once {
            fixture.run().finish().expect_code(3);
            fixture
                .checkpoint("adopt")
                .arg("--yes")
                .finish()
                .expect_code(0);
        }
        replay_missing_events(&fixture);
    }
}

/// In a blue/green switch, the new server was a logical subscriber of the old one. The new server
/// has the rows in Walpost's tables, but neither the slot nor the current values of sequences.
#[test]
fn reports_and_replays_undelivered_rows_on_a_former_subscriber() {
    let green = Server::with_new_cluster(
        MAJOR,
        "wal_level = logical\nmax_logical_replication_workers = 4\n",
    );
    let mut fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_and_confirm_one(&aggregate, "delivered");
    walpost.terminate().expect_code(0);
    // Write journal entries whose ids the subscriber's sequence will generate again.
    for _ in 0..3 {
        fixture.drop_slot();
        fixture.init().finish().expect_code(0);
    }
    copy_database(&fixture, &green, CopyScope::Schema);
    fixture.db.run("CREATE PUBLICATION green FOR ALL TABLES");
    let subscriber = green.session(&fixture.name);
    subscriber.run(&format!(
        "CREATE SUBSCRIPTION green_{} CONNECTION '{}' PUBLICATION green",
        fixture.name,
        fixture.conninfo()
    ));
    fixture.insert(&aggregate, "not delivered");
    wait_until("the subscriber to have all tables and both rows", || {
        subscriber.is_true("SELECT bool_and(srsubstate = 'r') FROM pg_subscription_rel")
            && subscriber.is_true("SELECT count(*) = 2 FROM outbox")
    });
    subscriber.run(&format!("DROP SUBSCRIPTION green_{}", fixture.name));
    let journal = "SELECT count(*) FROM walpost.journal WHERE detail ->> 'reason' LIKE 'slot %'";
    let before = subscriber.value(journal);
    fixture.fail_over(&green, []);
    let init = fixture.init().finish().expect_code(0);
    init.expect_mentions(&["may be missing", "walpost replay --dropped-slots"]);
    assert_ne!(fixture.db.value(journal), before);
    replay_missing_events(&fixture);
}

/// Re-creating a slot with `walpost init` loses no events, because the journal records the events
/// that were committed while there was no slot.
#[test]
fn init_reports_the_replay_command_for_events_committed_without_a_slot() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_and_confirm_one(&aggregate, "k");
    walpost.terminate().expect_code(0);
    let slot = fixture.slot();
    fixture.db.run(&format!(
        "SELECT pg_catalog.pg_drop_replication_slot('{slot}')"
    ));
    for _ in 0..10 {
        fixture.insert(&aggregate, "k");
    }
    let init = fixture.init().finish().expect_code(0);
    init.expect_mentions(&["may be missing", "walpost replay --dropped-slots"]);
    let mut walpost = fixture.run().start();
    walpost.wait_for_log("events of a dropped slot have not been sent again yet");
    walpost.wait_for_log("streaming");
    fixture
        .replay(&["--dropped-slots", "--yes"])
        .finish()
        .expect_code(0);
    fixture.wait_for_ids(&fixture.history());
    walpost.terminate().expect_code(0);
    // After the gap has been replayed, the pipeline keeps running.
    let walpost = fixture.start();
    fixture.insert(&aggregate, "k");
    fixture.wait_for_ids(&fixture.history());
    walpost.terminate().expect_code(0);
}

/// After a failover to a standby without the slot, the row in walpost.slot_state belongs to a
/// different timeline. After a dump is restored, it belongs to a different cluster or database.
#[test]
fn replays_all_events_if_init_creates_the_slot_on_a_different_timeline() {
    for history in [
        "timeline = timeline + 1",
        "system_id = '1'",
        "database_oid = 1",
    ] {
        let fixture = Fixture::new();
        let aggregate = fixture.aggregate(1);
        let walpost = fixture.start_and_confirm_one(&aggregate, "k");
        walpost.terminate().expect_code(0);
        fixture.drop_slot();
        for _ in 0..10 {
            fixture.insert(&aggregate, "k");
        }
        fixture
            .db
            .run(&format!("UPDATE walpost.slot_state SET {history}"));
        let init = fixture.init().finish().expect_code(0);
        init.expect_mentions(&["may be missing", "walpost replay --dropped-slots"]);
        let check = fixture.check().finish().expect_code(3);
        assert!(
            check.stdout.contains("walpost replay --dropped-slots"),
            "{history}: {}",
            check.stdout
        );
        fixture
            .replay(&["--dropped-slots", "--yes"])
            .finish()
            .expect_code(0);
        fixture.wait_for_ids(&fixture.history());
        let ids: HashSet<_> = fixture
            .records()
            .iter()
            .map(|record| record.header("id").to_owned())
            .collect();
        assert_eq!(ids.len(), 11, "{history}");
        // If no events are missing when a slot is created, no gap is reported.
        let check = fixture.check().finish().expect_code(0);
        assert!(!check.stdout.contains("dropped-slots"), "{}", check.stdout);
    }
}

#[test]
fn init_reports_messages_lost_with_a_recreated_slot() {
    let fixture = Fixture::with_outbox(Outbox::Messages);
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_and_confirm_one(&aggregate, "k");
    walpost.terminate().expect_code(0);
    fixture.drop_slot();
    fixture.insert(&aggregate, "k");
    let init = fixture.init().finish().expect_code(0);
    init.expect_mentions(&["may be missing", "publish them again"]);
    let entries =
        "SELECT count(*) FROM walpost.journal WHERE detail ->> 'reason' = 'slot re-created'";
    assert_eq!(fixture.db.number(entries), 1);
}

fn records_each_position_before_confirming_it(outbox: Outbox) {
    let fixture = Fixture::with_outbox(outbox);
    let aggregate = fixture.aggregate(2);
    let load = fixture.load(&[&aggregate]);
    let mut deaths = Vec::new();
    for _ in 0..3 {
        let walpost = fixture.start();
        let before = fixture.confirmed();
        for _ in 0..20 {
            let confirmed = fixture.confirmed();
            assert!(written(&fixture) >= confirmed);
        }
        wait_until("the slot to move", || fixture.confirmed() > before);
        deaths.push(fixture.kill(walpost));
        assert!(written(&fixture) >= fixture.confirmed());
    }
    let walpost = fixture.start();
    // While the position can't be recorded, Walpost keeps delivering events but confirms none.
    let locker = fixture.server.session(&fixture.name);
    locker.run("BEGIN; LOCK TABLE walpost.slot_state IN ACCESS EXCLUSIVE MODE");
    let recorded = read_recorded_position(&locker, &fixture);
    let records = fixture.records().len();
    wait_until("more events", || fixture.records().len() > records + 50);
    assert_stays("unconfirmed", Duration::from_secs(1), || {
        fixture.confirmed() <= recorded
    });
    locker.run("COMMIT");
    load.stop();
    fixture.settle(walpost, &deaths, Resends::AtMost(3));
}

/// A pipeline generates little WAL itself, and none while it is idle. On a shared server, the WAL
/// of other tests would make the pipeline record new positions.
#[test]
fn idle_pipeline_does_not_update_its_slot_state() {
    let server = Server::private(MAJOR, "");
    let fixture = Fixture::on_servers(&server, Broker::shared());
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_and_confirm_one(&aggregate, "k");
    let recorded = || {
        fixture.db.value(&format!(
            "SELECT at FROM walpost.slot_state WHERE slot = '{}'",
            fixture.slot()
        ))
    };
    let mut before = recorded();
    wait_until("the slot state to stop changing", || {
        std::thread::sleep(Duration::from_secs(3));
        std::mem::replace(&mut before, recorded()) == recorded()
    });
    walpost.terminate().expect_code(0);
}

#[test]
fn logs_a_missing_slot_state_table_once_and_continues_delivery() {
    let fixture = Fixture::new();
    fixture.db.run("DROP TABLE walpost.slot_state");
    let aggregate = fixture.aggregate(1);
    let mut walpost = fixture.start_and_confirm_one(&aggregate, "k");
    walpost.wait_for_log("walpost.slot_state does not exist");
    fixture.end_walsender();
    fixture.insert(&aggregate, "k");
    fixture.wait_for_records(2);
    assert_eq!(walpost.logged("walpost.slot_state does not exist"), 1);
    walpost.terminate().expect_code(0);
    fixture
        .check()
        .finish()
        .expect_mentions(&["walpost.slot_state does not exist"]);
    // The table walpost.slot_state can be missing because an older version of Walpost did not
    // create it. `init` must create the table, and the slot must not be treated as moved.
    fixture.init().finish().expect_code(0);
    let walpost = fixture.start();
    fixture.insert(&aggregate, "k");
    fixture.wait_for_records(3);
    walpost.terminate().expect_code(0);
    assert!(written(&fixture) >= fixture.confirmed());
}

/// Another session holds a lock on the row in walpost.slot_state while its transaction is idle.
#[test]
fn locked_slot_state_row_delays_confirmation_and_is_reported() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    let mut walpost = fixture.start_and_confirm_one(&aggregate, "k");
    let other = fixture.server.session(&fixture.name);
    other.run("BEGIN; SELECT FROM walpost.slot_state FOR UPDATE");
    fixture.insert(&aggregate, "k");
    let event = fixture.history().pop().unwrap().end;
    fixture.wait_for_records(2);
    walpost.wait_for_log("failed to record the delivered position in walpost.slot_state");
    assert!(fixture.confirmed() < event);
    other.run("COMMIT");
    fixture.wait_until_confirmed();
    assert_eq!(walpost.logged("reconnecting"), 0, "{}", walpost.log());
    walpost.terminate().expect_code(0);
}

/// Hosting providers set `default_transaction_read_only` when WAL retained by a slot has almost
/// filled the disk.
#[test]
fn delivers_and_confirms_in_a_database_that_is_read_only_by_default() {
    for exactly_once in [false, true] {
        let fixture = Fixture::new().in_mode(exactly_once);
        let aggregate = fixture.aggregate(1);
        fixture.insert(&aggregate, "k");
        fixture.db.run(&format!(
            "ALTER DATABASE {} SET default_transaction_read_only = on",
            fixture.name
        ));
        let walpost = fixture.start();
        fixture.insert(&aggregate, "k");
        fixture.wait_for_records(2);
        fixture.wait_until_confirmed();
        walpost.terminate().expect_code(0);
    }
}

/// Walpost must ignore a row of walpost.slot_state that was written on a different cluster,
/// database or timeline.
#[test]
fn ignores_slot_state_from_a_different_cluster_database_or_timeline() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_and_confirm_one(&aggregate, "k");
    walpost.terminate().expect_code(0);
    for (count, other) in [
        (2, "system_id = '1'"),
        (3, "database_oid = 1"),
        (4, "timeline = 77"),
        (5, "version = 77"),
    ] {
        fixture.db.run(&format!(
            "UPDATE walpost.slot_state SET confirmed_lsn = '0/1', {other}"
        ));
        let walpost = fixture.start();
        fixture.insert(&aggregate, "k");
        fixture.wait_for_records(count);
        walpost.terminate().expect_code(0);
        assert!(written(&fixture) >= fixture.confirmed());
    }
    fixture
        .db
        .run("UPDATE walpost.slot_state SET confirmed_lsn = '0/0'");
    fixture.run().finish().expect_code(3);
}

/// No checkpoint has to be adopted if no event can have been delivered.
#[test]
fn exactly_once_mode_starts_without_a_checkpoint_on_a_slot_created_by_init() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(2);
    fixture.insert(&aggregate, "k");
    let mut walpost = fixture.run().arg("--exactly-once").start();
    walpost.wait_for_log("first run since walpost init created the slot");
    fixture.wait_for_records(1);
    fixture.wait_until_confirmed();
    walpost.kill();
    let walpost = fixture.run().arg("--exactly-once").start();
    fixture.insert(&aggregate, "k");
    fixture.wait_for_records(2);
    fixture.wait_until_confirmed();
    walpost.terminate().expect_code(0);
    fixture.check_delivered(&[], Resends::Never);
}

#[test]
fn exactly_once_mode_requires_a_checkpoint_if_events_may_have_been_delivered() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_and_confirm_one(&aggregate, "k");
    walpost.terminate().expect_code(0);
    let run = fixture.run().arg("--exactly-once").finish();
    run.expect_code(3)
        .expect_mentions(&["walpost checkpoint adopt"]);
    // Events may also have been delivered if the slot was moved after its creation.
    let fixture = Fixture::new();
    fixture.insert(&fixture.aggregate(1), "k");
    fixture.db.run(&format!(
        "SELECT pg_catalog.pg_replication_slot_advance('{}', pg_current_wal_lsn())",
        fixture.slot()
    ));
    let run = fixture.run().arg("--exactly-once").finish();
    run.expect_code(3)
        .expect_mentions(&["walpost checkpoint adopt"]);
}

/// Even if the first process confirmed no position, the next process must detect that data was read
/// from a slot that no longer exists.
#[test]
fn detects_a_slot_recreated_before_anything_was_confirmed() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    fixture.start().kill();
    re_create_slot(&fixture, &aggregate);
    expect_halt(&fixture, fixture.run().start(), 0);
}

/// The table was empty when `init` ran, so the first run copies no rows.
#[test]
fn halts_if_the_slot_was_recreated_before_a_first_run_without_a_snapshot() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    re_create_slot(&fixture, &aggregate);
    expect_halt(&fixture, fixture.run().start(), 0);
}

/// Without a checkpoint, no event can be in Kafka, however the first run ended.
#[test]
fn first_run_in_exactly_once_mode_starts_over_if_killed_before_its_first_checkpoint() {
    let run = |fixture: &Fixture| fixture.run().arg("--exactly-once").start();
    let server = Server::private(MAJOR, "");
    let mut fixture = Fixture::on_servers(&server, Broker::shared());
    // Use a private server: its WAL contains nothing to confirm, so no checkpoint is written until
    // there is an event.
    let started = |fixture: &Fixture| {
        fixture
            .db
            .is_true("SELECT bool_or(begun) FROM walpost.slot_state")
    };
    for kills in 1..3 {
        let mut walpost = run(&fixture);
        walpost.wait_for_log("streaming");
        walpost.kill();
        assert!(
            !started(&fixture),
            "{kills}: the first checkpoint must be missing"
        );
    }
    let mut walpost = run(&fixture);
    walpost.wait_for_log("streaming");
    fixture.end_walsender();
    walpost.wait_for_logs("streaming", 2);
    server.stop(StopMode::Immediate);
    server.start();
    fixture.reconnect();
    walpost.wait_for_logs("streaming", 3);
    let aggregate = fixture.aggregate(1);
    fixture.insert(&aggregate, "k");
    fixture.wait_for_records(1);
    fixture.wait_until_confirmed();
    assert!(started(&fixture));
    walpost.kill();
    let walpost = run(&fixture);
    fixture.insert(&aggregate, "k");
    fixture.wait_for_records(2);
    fixture.wait_until_confirmed();
    walpost.terminate().expect_code(0);
    fixture.check_delivered(&[], Resends::Never);
}

/// If Walpost is killed before it writes the first checkpoint, it repeats the copy of the rows that
/// are older than the slot.
#[test]
fn first_snapshot_in_exactly_once_mode_starts_over_if_killed_before_a_checkpoint() {
    let fixture = crate::snapshot::fixture_with_older_rows(crate::snapshot::TABLE, 1000, false).0;
    let mut walpost = fixture.run().arg("--exactly-once").start();
    walpost.wait_for_log("starting a snapshot");
    walpost.kill();
    let mut walpost = fixture.run().arg("--exactly-once").start();
    walpost.wait_for_log("snapshot delivered");
    fixture.wait_until_confirmed();
    walpost.terminate().expect_code(0);
    crate::snapshot::expect_all(&fixture, 1000, true);
}
