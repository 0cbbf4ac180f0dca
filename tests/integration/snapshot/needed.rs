//! Tests when Walpost copies older rows and when it doesn't.

use super::{
    TABLE, check_copied, expect_all, fill, fixture_before_init, fixture_with_older_rows, journal,
    settle, snapshot_lsn,
};
use crate::init::psql_file;
use crate::support::checker::Resends;
use crate::support::event::Outbox;
use crate::support::fixture::Fixture;
use crate::support::wait::wait_until;
use crate::support::walpost_role::WalpostRole;

#[test]
fn does_not_copy_a_table_that_was_empty_when_its_slot_was_created() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    fill(&fixture, &aggregate, 20);
    assert_eq!(journal(&fixture)[0].0, "done");
    let walpost = fixture.start();
    assert_eq!(walpost.logged("snapshot"), 0, "{}", walpost.log());
    let summary = fixture.settle(walpost, &[], Resends::Never);
    assert_eq!(summary.committed, 20);
}

#[test]
fn first_run_records_a_manually_created_slot_for_an_empty_table() {
    let fixture = fixture_before_init(TABLE);
    psql_file(&fixture, "journal.sql");
    fixture.db.run(&format!(
        "CREATE PUBLICATION {0} FOR TABLE outbox WITH (publish = 'insert')",
        fixture.slot()
    ));
    fixture.db.run(&format!(
        "SELECT pg_create_logical_replication_slot('{}', 'pgoutput')",
        fixture.slot()
    ));
    fixture.start().terminate().expect_code(0);
    assert_eq!(journal(&fixture)[0].0, "done");
    let aggregate = fixture.aggregate(1);
    fill(&fixture, &aggregate, 20);
    let summary = fixture.settle(fixture.start(), &[], Resends::Never);
    assert_eq!(summary.committed, 20);
}

#[test]
fn does_not_copy_existing_rows_if_snapshot_is_set_to_never() {
    let fixture = fixture_before_init(TABLE);
    let aggregate = fixture.aggregate(1);
    fill(&fixture, &aggregate, 20);
    fixture
        .init()
        .finish()
        .expect_code(0)
        .expect_mentions(&["older than slot"]);
    let walpost = fixture.start_with(&["--snapshot", "never"]);
    fixture.insert(&aggregate, "newer");
    let records = fixture.wait_for_records(1);
    settle(&fixture, walpost);
    assert_eq!(records.len(), 1);
    assert_eq!(records[0].key(), "newer");
    // A first run with `--snapshot never` skips the older rows, and no later run copies them.
    let walpost = fixture.start();
    fixture.insert(&aggregate, "newer");
    assert_eq!(fixture.wait_for_records(2).len(), 2);
    settle(&fixture, walpost);
    assert_eq!(fixture.records().len(), 2);
    fixture
        .run()
        .arg("--snapshot=always")
        .finish()
        .expect_code(2);
    let log = Fixture::with_outbox(Outbox::Messages);
    let refused = log.run().args(["--snapshot", "initial"]).finish();
    refused
        .expect_code(2)
        .expect_mentions(&["snapshot", "no older rows"]);
}

#[test]
fn copies_existing_rows_separately_for_each_pipeline() {
    let fixture = fixture_before_init(TABLE);
    let aggregate = fixture.aggregate(1);
    fill(&fixture, &aggregate, 20);
    fixture.init().finish().expect_code(0);
    settle(&fixture, fixture.start());
    let other = format!("{}_b", fixture.name);
    let as_other = |word: &str| {
        let conninfo = fixture.conninfo();
        crate::support::walpost::Invocation::new([
            word,
            "--pipeline",
            &other,
            "--postgres",
            &conninfo,
        ])
    };
    as_other("init").arg("--no-role").finish().expect_code(0);
    let walpost = as_other("run").args(["--sink", "stdout"]).start();
    wait_until("the rows", || walpost.output().lines().count() == 20);
    walpost.terminate().expect_code(0);
    assert_eq!(
        fixture.records().len(),
        20,
        "the first pipeline is not affected"
    );
}

#[test]
fn halts_if_existing_rows_must_be_copied_but_the_journal_is_missing() {
    let by_hand = |fixture: &Fixture<'_>| {
        let slot = fixture.slot();
        fixture.db.run(&format!(
            "CREATE PUBLICATION {slot} FOR TABLE outbox WITH (publish = 'insert')"
        ));
        fixture.db.run(&format!(
            "SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')"
        ));
    };
    let fixture = fixture_before_init(TABLE);
    let aggregate = fixture.aggregate(1);
    fill(&fixture, &aggregate, 20);
    by_hand(&fixture);
    let refused = fixture.run().finish().expect_code(3);
    refused.expect_mentions(&[
        "public.outbox",
        "walpost.journal",
        "walpost init",
        "snapshot = \"never\"",
    ]);
    assert!(!fixture.slot_is_active());
    // Follow both remedies that the message suggests.
    let walpost = fixture.start_with(&["--snapshot", "never"]);
    walpost.terminate().expect_code(0);
    fixture.init().finish().expect_code(0);
    settle(&fixture, fixture.start());
    assert_eq!(check_copied(&fixture, snapshot_lsn(&fixture)), 20);
}

#[test]
fn copies_no_rows_if_the_slot_has_streamed_before() {
    let fixture = fixture_before_init(TABLE);
    let aggregate = fixture.aggregate(1);
    fill(&fixture, &aggregate, 20);
    let slot = fixture.slot();
    fixture.db.run(&format!(
        "CREATE PUBLICATION {slot} FOR TABLE outbox WITH (publish = 'insert')"
    ));
    fixture.db.run(&format!(
        "SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')"
    ));
    let walpost = fixture.start_with(&["--snapshot", "never"]);
    fixture.insert(&aggregate, "newer");
    fixture.wait_for_records(1);
    settle(&fixture, walpost);
    let stream_one_more = |count: usize| {
        let walpost = fixture.start();
        fixture.insert(&aggregate, "newer");
        assert_eq!(fixture.wait_for_records(count).len(), count);
        settle(&fixture, walpost);
    };
    stream_one_more(2);
    fixture.init().finish().expect_code(0);
    assert_eq!(journal(&fixture)[0].0, "done");
    stream_one_more(3);
}

#[test]
fn reports_a_missing_privilege_for_the_snapshot() {
    let fixture = fixture_before_init(TABLE);
    let aggregate = fixture.aggregate(1);
    fill(&fixture, &aggregate, 20);
    let walpost_role = WalpostRole::new(&fixture, format!("{}_Clerk", fixture.name));
    let role = &walpost_role.role;
    fixture
        .db
        .run(&format!("REVOKE SELECT ON outbox FROM \"{role}\""));
    let grant = format!("GRANT SELECT ON public.outbox TO \"{role}\"");
    let refused = walpost_role.command(&["run"]).finish().expect_code(3);
    refused.expect_mentions(&["older than slot", &grant]);
    let check = || walpost_role.command(&["check"]).finish();
    check()
        .expect_code(3)
        .expect_mentions(&["older rows", &grant]);
    fixture.db.run(&grant);
    check().expect_mentions(&[
        "walpost run will first deliver the rows that were written before the stream starts",
        "about",
    ]);
    let walpost = walpost_role.command(&["run"]).start_streaming();
    settle(&fixture, walpost);
    assert_eq!(check_copied(&fixture, snapshot_lsn(&fixture)), 20);
}

/// `skip` must refuse to run before the existing rows are copied. Otherwise, Walpost would treat
/// the slot as already read, and no later run would copy the rows.
#[test]
fn rejects_a_skip_before_existing_rows_are_copied() {
    let (fixture, _) = fixture_with_older_rows(TABLE, 20, false);
    let confirmed = fixture.confirmed();
    let to = fixture
        .db
        .value("SELECT pg_current_wal_flush_lsn()")
        .unwrap();
    let refused = fixture.skip(&to).arg("--yes").finish().expect_code(3);
    refused.expect_mentions(&["not all rows that are older than slot"]);
    assert_eq!(fixture.confirmed(), confirmed);
    settle(&fixture, fixture.start());
    expect_all(&fixture, 20, true);
}

/// An operator ran the SQL files with psql instead of `walpost init`.
#[test]
fn halts_if_a_snapshot_is_pending_when_the_pipeline_switches_to_several_tables() {
    let mut fixture = fixture_before_init(TABLE);
    let aggregate = fixture.aggregate(1);
    fill(&fixture, &aggregate, 20);
    for file in [
        "guard.sql",
        "outbox.sql",
        "journal.sql",
        "role.sql",
        "publication.sql",
        "slot.sql",
        "snapshot.sql",
        "snapshot.sql",
    ] {
        psql_file(&fixture, file);
    }
    let due = "SELECT count(*) FROM walpost.journal WHERE detail ->> 'state' = 'due'";
    assert_eq!(fixture.db.number(due), 1);
    fixture.use_settings("tables = ['public.outbox']\n");
    fixture.init().finish().expect_code(0);
    let expected = ["the copy of the older rows of table public.outbox is not complete"];
    fixture
        .check()
        .finish()
        .expect_code(3)
        .expect_mentions(&expected);
    fixture
        .run()
        .finish()
        .expect_code(3)
        .expect_mentions(&expected);
}
