//! The copy of older rows is interrupted.

use std::collections::HashSet;

use super::{
    TABLE, check_copied, check_copied_records, expect_all, fill, fixture_before_init,
    fixture_with_older_rows, journal, open_transaction, settle, start_and_copy_some,
    wait_until_blocked, wait_until_copied,
};
use crate::support::checker::{self, DeliveredRecord, Resends};
use crate::support::event::Outbox;
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, Server};
use crate::support::records::Record;

in_both_modes! {
    standby_takes_over_during_a_snapshot
    stops_on_request_during_a_snapshot
    postgresql_shuts_down_within_seconds_during_a_snapshot
}

#[test]
fn at_least_once_mode_restarts_a_snapshot_after_a_kill() {
    let (fixture, aggregate) = fixture_with_older_rows(TABLE, 20_000, false);
    let stands = fixture.confirmed();
    let walpost = start_and_copy_some(&fixture);
    fill(&fixture, &aggregate, 10);
    let death = fixture.kill(walpost);
    assert_eq!(
        death.confirmed, stands,
        "no position is confirmed before all rows are copied"
    );
    let ends: i64 = death.ends.values().sum();
    assert!(ends < 20_000, "Walpost must be killed during the copy");
    let to = fixture
        .db
        .value("SELECT pg_current_wal_flush_lsn()")
        .unwrap();
    let refused = fixture.skip(&to).arg("--yes").finish().expect_code(3);
    refused.expect_mentions(&["not all rows that are older than slot"]);
    assert_eq!(fixture.confirmed(), stands);
    let mut walpost = fixture.start();
    walpost.wait_for_log("not completed");
    fill(&fixture, &aggregate, 10);
    settle(&fixture, walpost);
    let entries = journal(&fixture);
    let states: Vec<_> = entries.iter().map(|(state, _)| state.as_str()).collect();
    assert_eq!(states, ["begun", "begun", "done"]);
    let (again, records): (Vec<_>, Vec<_>) = fixture
        .records()
        .into_iter()
        .partition(|record| record.offset >= death.ends[&record.topic_partition()]);
    assert_eq!(check_copied_records(&fixture, &again, entries[2].1), 20_010);
    let first: Vec<DeliveredRecord> = records.iter().map(DeliveredRecord::from).collect();
    assert!(
        first
            .iter()
            .all(|record| record.position.0 == entries[0].1 - 1)
    );
}

/// While the server creates a snapshot, the slot is not in use, so another instance may deliver the
/// older rows in the meantime.
#[test]
fn does_not_repeat_a_snapshot_completed_by_another_instance() {
    let fixture = fixture_before_init(TABLE);
    let aggregate = fixture.aggregate(1);
    fill(&fixture, &aggregate, 20);
    fixture.init().finish().expect_code(0);
    let blocker = open_transaction(&fixture, &aggregate);
    let mut walpost = fixture.run().start();
    wait_until_blocked(&fixture, &blocker);
    // Write the journal entry that another instance would write after completing the copy.
    let slot = fixture.slot();
    fixture.db.run(&format!(
        "INSERT INTO walpost.journal (pipeline, slot, action, to_lsn, detail)
         SELECT '{0}', '{slot}', 'snapshot', confirmed_flush_lsn, '{{\"state\": \"done\"}}'
         FROM pg_replication_slots WHERE slot_name = '{slot}'",
        fixture.name
    ));
    blocker.run("ROLLBACK");
    walpost.wait_for_log("another instance has changed the journal's record of the snapshot");
    walpost.wait_for_log("streaming");
    fixture.insert(&aggregate, "newer");
    settle(&fixture, walpost);
    let records = fixture.records();
    let keys: Vec<_> = records.iter().map(Record::key).collect();
    assert_eq!(keys, ["newer"]);
    assert_eq!(journal(&fixture).len(), 1);
}

fn standby_takes_over_during_a_snapshot(exactly_once: bool) {
    let (fixture, _) = fixture_with_older_rows(TABLE, 20_000, exactly_once);
    let walpost = start_and_copy_some(&fixture);
    let mut second = fixture.run().start();
    second.wait_for_log("standing by");
    fixture.kill(walpost);
    second.wait_for_log(match exactly_once {
        true => "resuming interrupted snapshot",
        false => "not completed",
    });
    second.wait_for_log("streaming");
    settle(&fixture, second);
    expect_all(&fixture, 20_000, exactly_once);
}

fn stops_on_request_during_a_snapshot(exactly_once: bool) {
    let (fixture, _) = fixture_with_older_rows(TABLE, 20_000, exactly_once);
    let stands = fixture.confirmed();
    start_and_copy_some(&fixture).terminate().expect_code(0);
    assert!(fixture.records().len() < 20_000);
    assert_eq!(fixture.confirmed(), stands);
    settle(&fixture, fixture.start());
    expect_all(&fixture, 20_000, exactly_once);
}

fn postgresql_shuts_down_within_seconds_during_a_snapshot(exactly_once: bool) {
    use crate::support::postgres::StopMode;
    let server = Server::private(MAJOR, "");
    let fixture = Fixture::bare_on_servers(&server, Broker::shared());
    fixture.db.run(TABLE);
    let aggregate = fixture.aggregate(1);
    fill(&fixture, &aggregate, 20_000);
    fixture.init().finish().expect_code(0);
    let mut fixture = fixture.in_mode(exactly_once);
    let mut walpost = start_and_copy_some(&fixture);
    server.begin_stop(StopMode::Fast);
    assert!(server.has_stopped(std::time::Duration::from_secs(15)));
    server.start();
    fixture.reconnect();
    walpost.wait_for_logs("copying", 2);
    wait_until_copied(&fixture, &walpost);
    settle(&fixture, walpost);
    expect_all(&fixture, 20_000, exactly_once);
}

#[test]
fn exactly_once_mode_resumes_an_interrupted_snapshot_after_the_last_delivered_row() {
    let columns = "aggregatetype text, aggregateid text, type text, payload jsonb";
    for key in [
        "id uuid PRIMARY KEY".to_owned(),
        "id text PRIMARY KEY".to_owned(),
        "id uuid, number bigint PRIMARY KEY DEFAULT random() * 1e15 - 5e14".to_owned(),
        "id uuid, created_at timestamptz NOT NULL DEFAULT '2020-01-01'::timestamptz + (random() * 5)::int * '0.1 s'::interval,
         PRIMARY KEY (id, created_at)"
            .to_owned(),
    ] {
        let create = format!("CREATE TABLE outbox ({key}, {columns})");
        let (fixture, aggregate) = fixture_with_older_rows(&create, 15_000, true);
        kill_and_resume(&fixture, &aggregate, &key);
    }
}

/// Walpost compares keys byte by byte, whatever the database's collation.
#[test]
fn resumes_a_snapshot_ordered_by_a_text_key_in_a_database_with_an_icu_collation() {
    let options = "ENCODING utf8 LOCALE_PROVIDER icu ICU_LOCALE 'en-US'";
    let fixture = Fixture::bare_with(
        Outbox::Table,
        Server::shared(MAJOR),
        Broker::shared(),
        options,
    );
    assert!(fixture.db.is_true("SELECT 'a' < 'B' AND 'b' < 'C'"));
    // The keys contain both uppercase and lowercase letters, so their byte order differs from the
    // order of the collation.
    let key = "id uuid, place text PRIMARY KEY DEFAULT translate(md5(random()::text), 'abc123', 'BZyqQx')";
    fixture.db.run(&format!(
        "CREATE TABLE outbox ({key}, aggregatetype text, aggregateid text, type text, payload jsonb)"
    ));
    let aggregate = fixture.aggregate(2);
    fill(&fixture, &aggregate, 15_000);
    fixture.init().finish().expect_code(0);
    kill_and_resume(&fixture.exactly_once(), &aggregate, key);
}

/// Kills Walpost twice during the copy of 15,000 rows while rows are being added. Asserts that each
/// row is delivered once and in order.
fn kill_and_resume(fixture: &Fixture, aggregate: &str, key: &str) {
    // Some of the added rows have keys in the range that has been copied, others in the remaining
    // range.
    for _ in 0..2 {
        let walpost = start_and_copy_some(fixture);
        fill(fixture, aggregate, 300);
        fixture.kill(walpost);
        fill(fixture, aggregate, 300);
    }
    let mut walpost = fixture.run().start();
    walpost.wait_for_log("resuming interrupted snapshot");
    fill(fixture, aggregate, 300);
    walpost.wait_for_log("streaming");
    fill(fixture, aggregate, 300);
    settle(fixture, walpost);
    let entries = journal(fixture);
    let states: Vec<_> = entries.iter().map(|(state, _)| state.as_str()).collect();
    assert_eq!(states, ["begun", "done"], "{key}");
    let snapshot_lsn = entries[0].1;

    let (history, records) = (fixture.history(), fixture.records());
    let delivered: Vec<DeliveredRecord> = records.iter().map(DeliveredRecord::from).collect();
    assert_eq!(delivered.len(), history.len(), "{key}");
    let (copied, streamed): (Vec<_>, Vec<_>) = delivered
        .into_iter()
        .partition(|record| record.position.0 == snapshot_lsn - 1);
    for pair in copied
        .windows(2)
        .filter(|pair| pair[0].topic_partition == pair[1].topic_partition)
    {
        assert!(pair[0].position < pair[1].position, "{key}: {pair:?}");
    }
    let of_copy: HashSet<_> = copied.iter().map(|record| &record.id).collect();
    let newer = history.iter().filter(|event| event.end > snapshot_lsn);
    let newer = newer.filter(|event| of_copy.contains(&event.id)).count();
    assert!(
        newer > 100,
        "{key}: later snapshots had only {newer} rows more"
    );
    let rest: Vec<_> = history
        .iter()
        .filter(|event| !of_copy.contains(&event.id))
        .cloned()
        .collect();
    assert!(
        rest.len() > 300,
        "{key}: the stream had only {}",
        rest.len()
    );
    let verdict = checker::check(&rest, &streamed, &[], Resends::Never);
    verdict.unwrap_or_else(|violations| panic!("{key}: {violations}"));

    // Walpost did not send the copied rows again from the stream. After a restart, it must not send
    // them either, but it must deliver new rows.
    let walpost = fixture.start();
    fill(fixture, aggregate, 10);
    settle(fixture, walpost);
    expect_all(fixture, history.len() + 10, true);
}

#[test]
fn does_not_resend_copied_rows_after_a_disconnect_between_chunks() {
    let create = "CREATE TABLE outbox (id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload jsonb)";
    let (fixture, aggregate) = fixture_with_older_rows(create, 3_000, true);
    let walpost = start_and_copy_some(&fixture);
    fixture.kill(walpost);
    fill(&fixture, &aggregate, 3_000);
    let mut walpost = fixture.run().args(["--window-records", "20"]).start();
    wait_until_copied(&fixture, &walpost);
    // Interrupt the stream several times while rows remain to be delivered.
    for _ in 0..5 {
        let before = fixture.records().len();
        if before < 6_000 {
            fixture.wait_for_records(before + 1);
        }
        fixture.kill(walpost);
        walpost = fixture.run().args(["--window-records", "20"]).start();
        walpost.wait_for_log("streaming");
    }
    fill(&fixture, &aggregate, 10);
    settle(&fixture, walpost);
    expect_all(&fixture, 6_010, true);
}

#[test]
fn exactly_once_mode_halts_if_a_snapshot_cannot_be_resumed() {
    let create = "CREATE TABLE outbox (id uuid, number numeric PRIMARY KEY DEFAULT random(), aggregatetype text,
        aggregateid text, type text, payload jsonb)";
    let (fixture, _) = fixture_with_older_rows(create, 20_000, true);
    let walpost = start_and_copy_some(&fixture);
    fixture.kill(walpost);
    let halted = fixture.run().finish().expect_code(3);
    halted.expect_mentions(&["was interrupted after", "walpost checkpoint adopt"]);
    // Count the records only after the halt, because a commit that was in progress when the process
    // was killed may have completed in the meantime.
    let found = fixture.records().len();
    fixture.run().finish().expect_code(3);
    fixture
        .checkpoint("show")
        .finish()
        .expect_mentions(&["older rows so far"]);
    assert_eq!(fixture.records().len(), found);
    let adopted = fixture
        .checkpoint("adopt")
        .arg("--yes")
        .finish()
        .expect_code(0);
    adopted.expect_mentions(&["first deliver the rows that were written before the stream starts"]);
    settle(&fixture, fixture.start());
    let records = fixture.records();
    assert_eq!(records.len(), found + 20_000);
}

#[test]
fn treats_a_fully_confirmed_snapshot_as_done_even_if_its_end_was_not_recorded() {
    let fixture = fixture_before_init(TABLE);
    let aggregate = fixture.aggregate(1);
    fill(&fixture, &aggregate, 20);
    fixture.init().finish().expect_code(0);
    settle(&fixture, fixture.start());
    // Restore the state that remains if the process is killed after it confirms the position but
    // before it records that the snapshot is done.
    fixture
        .db
        .run("DELETE FROM walpost.journal WHERE detail ->> 'state' = 'done'");
    let walpost = fixture.start();
    fixture.insert(&aggregate, "newer");
    assert_eq!(fixture.wait_for_records(21).len(), 21);
    settle(&fixture, walpost);
    let entries = journal(&fixture);
    assert_eq!(entries[1].0, "done");
    assert_eq!(check_copied(&fixture, entries[0].1), 20);
}

/// Found by a random walk of `./dev soak --shapes`. If another program has moved the slot, a
/// position after the consistent point does not prove that the copy is complete.
#[test]
fn restarts_the_snapshot_if_the_slot_was_moved_past_its_consistent_point() {
    let (fixture, aggregate) = fixture_with_older_rows(TABLE, 20_000, false);
    let walpost = start_and_copy_some(&fixture);
    let death = fixture.kill(walpost);
    let ends: i64 = death.ends.values().sum();
    assert!(ends < 20_000, "Walpost must be killed during the copy");
    fill(&fixture, &aggregate, 10);
    let slot = fixture.slot();
    fixture.db.run(&format!(
        "SELECT pg_catalog.pg_replication_slot_advance('{slot}', pg_current_wal_lsn())"
    ));
    let mut walpost = fixture.run().start();
    walpost.wait_for_log("not completed");
    walpost.wait_for_log("streaming");
    settle(&fixture, walpost);
    let records = fixture.records();
    let delivered: HashSet<_> = records.iter().map(|record| record.header("id")).collect();
    let history = fixture.history();
    let missing = history
        .iter()
        .filter(|event| !delivered.contains(event.id.as_str()));
    assert_eq!(missing.count(), 0);
}

/// Found by a random walk of `./dev soak --shapes` with seed 237496483707855. An adopted checkpoint
/// does not record how far the copy has progressed.
#[test]
fn restarts_the_snapshot_if_a_checkpoint_was_adopted_after_its_consistent_point() {
    let (fixture, aggregate) = fixture_with_older_rows(TABLE, 20_000, true);
    let walpost = start_and_copy_some(&fixture);
    let death = fixture.kill(walpost);
    let ends: i64 = death.ends.values().sum();
    assert!(ends < 20_000, "Walpost must be killed during the copy");
    fill(&fixture, &aggregate, 10);
    let slot = fixture.slot();
    fixture.db.run(&format!(
        "SELECT pg_catalog.pg_replication_slot_advance('{slot}', pg_current_wal_lsn())"
    ));
    fixture.run().finish().expect_code(3);
    let adopted = fixture.checkpoint("adopt").arg("--yes").finish();
    adopted.expect_mentions(&["first deliver the rows that were written before the stream starts"]);
    let mut walpost = fixture.run().start();
    walpost.wait_for_log("copying");
    walpost.wait_for_log("streaming");
    settle(&fixture, walpost);
    let records = fixture.records();
    let delivered: HashSet<_> = records.iter().map(|record| record.header("id")).collect();
    let history = fixture.history();
    let missing = history
        .iter()
        .filter(|event| !delivered.contains(event.id.as_str()));
    assert_eq!(missing.count(), 0);
}

/// Found by a random walk of `./dev soak --shapes` with seed 96064689526093. If there is no
/// checkpoint, events may be missing, which is reported only by `checkpoint adopt` and by the error
/// that halts the pipeline.
#[test]
fn halt_message_and_checkpoint_adopt_command_report_events_skipped_by_a_moved_slot() {
    let mut fixture = fixture_before_init(TABLE);
    let aggregate = fixture.aggregate(1);
    fixture.init().finish().expect_code(0);
    fixture.insert(&aggregate, "passed");
    let slot = fixture.slot();
    fixture.db.run(&format!(
        "SELECT pg_replication_slot_advance('{slot}', pg_current_wal_lsn())"
    ));
    // Enable exactly-once mode only now, so that no checkpoint exists.
    fixture.use_settings("delivery = 'exactly-once'\n");
    let expected = [
        "something else moved it, or dropped and re-created it",
        "may be missing from Kafka",
    ];
    let halted = fixture.run().finish().expect_code(3);
    let halted = halted.expect_mentions(&["no checkpoint", "walpost checkpoint adopt"]);
    halted.expect_mentions(&expected);
    let adopted = fixture.checkpoint("adopt").arg("--yes").finish();
    adopted.expect_code(0).expect_mentions(&expected);
    let mut walpost = fixture.start();
    walpost.wait_for_log("streaming");
    fixture.insert(&aggregate, "newer");
    fixture.wait_for_records(1);
    settle(&fixture, walpost);
    let again = fixture
        .checkpoint("adopt")
        .arg("--yes")
        .finish()
        .expect_code(0);
    assert!(!again.stdout.contains(expected[0]), "{}", again.stdout);
    let records = fixture.records();
    let keys: Vec<_> = records.iter().map(Record::key).collect();
    assert_eq!(keys, ["newer"]);
}

/// Found by a random walk of `./dev soak --shapes` with seed 143468592285765. By the time Walpost
/// detects that the checkpoint belongs to a different slot, the server has already sent data from
/// the new slot.
#[test]
fn still_takes_a_snapshot_after_a_run_halted_on_a_checkpoint_for_a_different_slot() {
    let (mut fixture, aggregate) = fixture_with_older_rows(TABLE, 20, true);
    settle(&fixture, fixture.start());
    fill(&fixture, &aggregate, 10);
    let other = format!("slot = '{}_other'\n", fixture.slot());
    fixture.use_settings(&other);
    fixture.init().finish().expect_code(0);
    fill(&fixture, &aggregate, 5);
    fixture
        .run()
        .finish()
        .expect_code(3)
        .expect_mentions(&["the checkpoint belongs to slot"]);
    fixture.init().finish().expect_code(0);
    let adopted = fixture
        .checkpoint("adopt")
        .arg("--yes")
        .finish()
        .expect_code(0);
    adopted.expect_mentions(&["first deliver the rows that were written before the stream starts"]);
    let mut walpost = fixture.run().start();
    walpost.wait_for_log("snapshot delivered");
    walpost.terminate().expect_code(0);
    let records = fixture.records();
    let ids: HashSet<_> = records.iter().map(|record| record.header("id")).collect();
    assert_eq!(ids.len(), 35);
}
