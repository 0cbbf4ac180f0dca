//! A pipeline is switched to a different slot before the former slot has delivered all of its
//! events.

use std::path::Path;

use crate::init::try_psql_with;
use crate::support::fixture::Fixture;
use crate::support::wait::wait_until;
use crate::support::walpost::{Finished, Invocation};

const PARTITIONED: &str = "CREATE TABLE outbox (id uuid NOT NULL, aggregatetype text NOT NULL, aggregateid text NOT NULL, \
     type text NOT NULL, payload jsonb, created_at timestamptz NOT NULL DEFAULT now(), PRIMARY KEY (id, created_at)) \
     PARTITION BY RANGE (created_at); \
     CREATE TABLE outbox_now PARTITION OF outbox FOR VALUES FROM (MINVALUE) TO ('9000-01-01'); \
     CREATE TABLE outbox_later PARTITION OF outbox FOR VALUES FROM ('9000-01-01') TO (MAXVALUE)";

/// Delivers one event. Then inserts a second one, with the key "between", that is not delivered.
fn leave_event_undelivered(fixture: &mut Fixture<'_>) -> String {
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_and_confirm_one(&aggregate, "before");
    walpost.terminate().expect_code(0);
    fixture.insert(&aggregate, "between");
    aggregate
}

/// Configures a different slot and runs `init`, which creates it.
fn use_next_slot(fixture: &mut Fixture<'_>, more: &str) -> Finished {
    let settings = format!("slot = \"{}_2\"\n{more}", fixture.slot());
    fixture.use_settings(&settings);
    fixture.init().finish().expect_code(0)
}

fn command(fixture: &Fixture<'_>) -> String {
    format!("walpost replay --dropped-slots --pipeline {}", fixture.name)
}

fn has_delivered(fixture: &Fixture<'_>, key: &str) -> bool {
    fixture.records().iter().any(|record| record.key() == key)
}

/// Asserts that both `check` and `run` report the undelivered events, before and after `run` has
/// recorded these events in the journal.
fn expect_gap(fixture: &Fixture<'_>, command: &str) {
    let check = fixture.check().finish().expect_code(3);
    check.expect_mentions(&["the pipeline previously used a different slot"]);
    let mut walpost = fixture.run().start();
    walpost.wait_for_log(command);
    walpost.wait_for_log("streaming");
    walpost.terminate().expect_code(0);
    fixture
        .check()
        .finish()
        .expect_code(3)
        .expect_mentions(&[command]);
}

#[test]
fn reports_events_that_neither_the_former_slot_nor_the_new_one_delivered() {
    let mut fixture = Fixture::new();
    leave_event_undelivered(&mut fixture);
    use_next_slot(&mut fixture, "snapshot = \"never\"\n");
    let command = command(&fixture);
    expect_gap(&fixture, &command);
    assert!(!has_delivered(&fixture, "between"));
    let replay = fixture.replay(&["--dropped-slots", "--yes"]);
    replay.finish().expect_code(0);
    assert!(has_delivered(&fixture, "between"));
    fixture.check().finish().expect_code(0);
}

/// Nothing was ever read from the former slot, so no position of it was confirmed. Found by
/// `./dev soak --shapes` with seed 390551700811244.
#[test]
fn reports_events_lost_because_the_former_slot_was_never_read() {
    let mut fixture = Fixture::new();
    fixture.init().finish().expect_code(0);
    fixture.insert(&fixture.aggregate(1), "between");
    fixture.drop_slot();
    let former = fixture.slot();
    fixture.use_settings(&format!("slot = \"{former}_2\"\nsnapshot = \"never\"\n"));
    fixture.db.run(&format!(
        "SELECT pg_create_logical_replication_slot('{former}_2', 'pgoutput')"
    ));
    let command = command(&fixture);
    expect_gap(&fixture, &command);
    let replay = fixture.replay(&["--dropped-slots", "--yes"]);
    replay.finish().expect_code(0);
    assert!(has_delivered(&fixture, "between"));
    fixture.check().finish().expect_code(0);
}

/// The pipeline was renamed as well, and its slot was dropped before anything was read from it.
/// Found by `./dev soak --shapes` with seed 207086988709707.
#[test]
fn check_reports_a_missing_slot_that_was_never_read() {
    let mut fixture = Fixture::new();
    fixture.init().finish().expect_code(0);
    fixture.drop_slot();
    let former = fixture.slot();
    fixture
        .db
        .run("UPDATE walpost.slot_state SET pipeline = 'renamed'");
    fixture.use_settings(&format!("slot = \"{former}_2\"\n"));
    fixture.init().finish().expect_code(0);
    // Omit --pipeline, because with this flag, `check` would ignore the slots of other pipelines.
    let file = fixture.file(&format!("slot = \"{former}_2\"\n"));
    let check = Invocation::new(["check", "--config"]).arg(file).finish();
    check.expect_mentions(&["of pipeline \"renamed\" does not exist", &former]);
}

/// No checkpoint names the former slot, because the first run with the new slot writes the first
/// checkpoint. Found by `./dev soak --shapes` with seed 25202613687550.
#[test]
fn first_run_in_exactly_once_mode_reports_events_that_the_former_slot_did_not_deliver() {
    let mut fixture = Fixture::new();
    leave_event_undelivered(&mut fixture);
    use_next_slot(
        &mut fixture,
        "snapshot = \"never\"\ndelivery = \"exactly-once\"\n",
    );
    let command = command(&fixture);
    expect_gap(&fixture, &command);
    let replay = fixture.replay(&["--dropped-slots", "--yes"]);
    replay.finish().expect_code(0);
    assert!(has_delivered(&fixture, "between"));
    // Once a checkpoint exists, the undelivered events are not recorded again.
    let mut walpost = fixture.run().start();
    walpost.wait_for_log("streaming");
    assert_eq!(walpost.logged("may be missing"), 0, "{}", walpost.log());
    walpost.terminate().expect_code(0);
    fixture.check().finish().expect_code(0);
}

#[test]
fn reports_undelivered_events_in_a_partition_detached_before_the_snapshot() {
    let mut fixture = Fixture::with_table(PARTITIONED);
    leave_event_undelivered(&mut fixture);
    fixture
        .db
        .run("ALTER TABLE outbox DETACH PARTITION outbox_now");
    use_next_slot(&mut fixture, "");
    let command = command(&fixture);
    expect_gap(&fixture, &command);
    fixture.db.run(
        "ALTER TABLE outbox ATTACH PARTITION outbox_now FOR VALUES FROM (MINVALUE) TO ('9000-01-01')",
    );
    let replay = fixture.replay(&["--dropped-slots", "--yes"]);
    replay.finish().expect_code(0);
    assert!(has_delivered(&fixture, "between"));
    fixture.check().finish().expect_code(0);
}

/// A replay reads only attached partitions, and events are no longer reported as missing after the
/// replay has finished. Therefore, a detached partition must be attached before the replay.
#[test]
fn check_says_to_attach_a_detached_partition_before_replaying_its_rows() {
    let mut fixture = Fixture::with_table(PARTITIONED);
    leave_event_undelivered(&mut fixture);
    fixture
        .db
        .run("ALTER TABLE outbox DETACH PARTITION outbox_now");
    use_next_slot(&mut fixture, "");
    let command = command(&fixture);
    expect_gap(&fixture, &command);
    let check = fixture.check().finish().expect_code(3);
    check.expect_mentions(&["attach it first"]);
    let mut walpost = fixture.run().start();
    walpost.wait_for_log("attach it first");
    walpost.terminate().expect_code(0);
}

/// A row in another partition gives the snapshot something to copy.
#[test]
fn reports_a_detached_partition_even_if_another_partition_was_copied() {
    let mut fixture = Fixture::with_table(PARTITIONED);
    let aggregate = leave_event_undelivered(&mut fixture);
    fixture
        .db
        .run("ALTER TABLE outbox DETACH PARTITION outbox_now");
    let event = fixture.insert_sql(&aggregate, "copied");
    let event = event.replace("payload)", "payload, created_at)");
    let event = event.replace("\"}')", "\"}', '9000-01-02')");
    fixture.db.run(&event);
    use_next_slot(&mut fixture, "");
    let command = command(&fixture);
    expect_gap(&fixture, &command);
    assert!(has_delivered(&fixture, "copied"));
}

#[test]
fn reports_undelivered_events_of_a_table_that_was_replaced() {
    let mut fixture = Fixture::new();
    leave_event_undelivered(&mut fixture);
    let publication = fixture.slot();
    fixture.db.run(&format!(
        "ALTER PUBLICATION {publication} DROP TABLE outbox; ALTER TABLE outbox RENAME TO former; \
         CREATE TABLE outbox (LIKE former INCLUDING ALL); ALTER PUBLICATION {publication} ADD TABLE outbox"
    ));
    use_next_slot(&mut fixture, "");
    let command = format!(
        "walpost replay --dropped-slots --table public.former --pipeline {}",
        fixture.name
    );
    expect_gap(&fixture, &command);
    let replay = fixture.replay(&["--dropped-slots", "--table", "public.former", "--yes"]);
    replay.finish().expect_code(0);
    assert!(has_delivered(&fixture, "between"));
    let check = fixture.check().finish();
    assert!(!check.stdout.contains(&command), "{}", check.stdout);
}

#[test]
fn does_not_report_events_as_missing_if_the_first_run_copies_them() {
    for delivery in ["at-least-once", "exactly-once"] {
        let mut fixture = Fixture::new();
        leave_event_undelivered(&mut fixture);
        use_next_slot(&mut fixture, &format!("delivery = \"{delivery}\"\n"));
        let mut walpost = fixture.run().start();
        walpost.wait_for_log("streaming");
        fixture.wait_for_records(3);
        assert_eq!(walpost.logged("may be missing"), 0, "{}", walpost.log());
        walpost.terminate().expect_code(0);
        assert!(has_delivered(&fixture, "between"));
        fixture.check().finish().expect_code(0);
    }
}

/// The current slot was created after the row was committed, so its position does not indicate
/// whether the row was delivered.
#[test]
fn retention_keeps_rows_that_the_former_slot_did_not_deliver() {
    let mut fixture = Fixture::new();
    leave_event_undelivered(&mut fixture);
    use_next_slot(&mut fixture, "snapshot = \"never\"\n");
    let kept = "SELECT EXISTS (SELECT FROM outbox WHERE aggregateid = 'between')";
    let maintain = || {
        let maintain = fixture.invoke("maintain");
        maintain
            .args(["--retention", "1s", "--delete-rows"])
            .finish()
    };
    for _ in 0..3 {
        let finished = maintain().expect_code(3);
        finished.expect_mentions(&["the pipeline previously used a different slot"]);
        fixture.write_other_wal(1);
    }
    let mut walpost = fixture.run().start();
    walpost.wait_for_log("streaming");
    walpost.terminate().expect_code(0);
    let finished = maintain().expect_code(3);
    finished.expect_mentions(&["walpost replay --dropped-slots"]);
    assert!(fixture.db.is_true(kept));
}

/// The pipeline was also renamed, so only the table shows that the former slot belonged to this
/// pipeline.
#[test]
fn retention_keeps_rows_needed_by_the_former_slot_of_a_renamed_pipeline() {
    let mut fixture = Fixture::new();
    let aggregate = leave_event_undelivered(&mut fixture);
    fixture
        .db
        .run("UPDATE walpost.slot_state SET pipeline = 'former'");
    use_next_slot(&mut fixture, "snapshot = \"never\"\n");
    let walpost = fixture.start();
    fixture.insert(&aggregate, "new");
    fixture.wait_for_records(2);
    walpost.terminate().expect_code(0);
    let waits = format!("is kept until slot {:?}", fixture.slot());
    wait_until("retention to wait for the former slot", || {
        fixture.write_other_wal(1);
        let maintain = fixture.invoke("maintain");
        let maintain = maintain.args(["--retention", "1s", "--delete-rows"]);
        maintain.finish().expect_code(0).stdout.contains(&waits)
    });
    let kept = "SELECT EXISTS (SELECT FROM outbox WHERE aggregateid = 'between')";
    assert!(fixture.db.is_true(kept));
    fixture.drop_slot();
    let former = fixture.slot();
    let file = fixture.file(&format!("slot = \"{former}_2\"\n"));
    let check = || Invocation::new(["check", "--config"]).arg(&file).finish();
    let vanished = "of pipeline \"former\" does not exist, and no configured pipeline uses it";
    let remedy = format!("psql -v 'slot={former}' -v publication= -f FILE");
    check().expect_mentions(&[vanished, "sql/teardown.sql", &remedy]);

    // Following the remedy removes what Walpost has recorded about the slot. The publication must
    // remain, because the renamed pipeline still uses it.
    let teardown = Path::new(env!("CARGO_MANIFEST_DIR")).join("sql/teardown.sql");
    let variables = [("slot", former.as_str()), ("publication", "")];
    let output = try_psql_with(&fixture, &fixture.conninfo(), &teardown, &variables);
    assert!(output.status.success(), "{output:?}");
    assert!(!check().mentions(vanished));
    let published = "SELECT count(*) FROM pg_publication";
    assert_eq!(fixture.db.number(published), 1);
}
