//! Whether older rows have to be copied.

use super::{TABLE, cold, expect_all, fill, filled, journal, judge, settle, snapshot_lsn};
use crate::init::psql_file;
use crate::support::checker::Resends;
use crate::support::event::Outbox;
use crate::support::scene::Scene;
use crate::support::wait::wait_until;
use crate::support::walpost_role::WalpostRole;

#[test]
fn table_that_was_empty_when_its_slot_was_made_is_not_copied() {
    let scene = Scene::new();
    let aggregate = scene.aggregate(1);
    fill(&scene, &aggregate, 20);
    assert_eq!(journal(&scene)[0].0, "done");
    let walpost = scene.start();
    assert_eq!(walpost.logged("snapshot"), 0, "{}", walpost.log());
    let summary = scene.settle(walpost, &[], Resends::Never);
    assert_eq!(summary.committed, 20);
}

#[test]
fn slot_made_by_hand_over_an_empty_table_is_noted_at_the_first_start() {
    let scene = cold(TABLE);
    psql_file(&scene, "journal.sql");
    scene.db.run(&format!(
        "CREATE PUBLICATION {0} FOR TABLE outbox WITH (publish = 'insert')",
        scene.slot()
    ));
    scene.db.run(&format!(
        "SELECT pg_create_logical_replication_slot('{}', 'pgoutput')",
        scene.slot()
    ));
    scene.start().terminate().expect_code(0);
    assert_eq!(journal(&scene)[0].0, "done");
    let aggregate = scene.aggregate(1);
    fill(&scene, &aggregate, 20);
    let summary = scene.settle(scene.start(), &[], Resends::Never);
    assert_eq!(summary.committed, 20);
}

#[test]
fn never_leaves_older_rows_out() {
    let scene = cold(TABLE);
    let aggregate = scene.aggregate(1);
    fill(&scene, &aggregate, 20);
    scene
        .init()
        .finish()
        .expect_code(0)
        .expect_mentions(&["older than slot"]);
    let walpost = scene.start_with(&["--snapshot", "never"]);
    scene.insert(&aggregate, "newer");
    let records = scene.wait_for_records(1);
    settle(&scene, walpost);
    assert_eq!(records.len(), 1);
    assert_eq!(records[0].key(), "newer");
    // Rows that were left out once are never copied.
    let walpost = scene.start();
    scene.insert(&aggregate, "newer");
    assert_eq!(scene.wait_for_records(2).len(), 2);
    settle(&scene, walpost);
    assert_eq!(scene.records().len(), 2);
    scene.run().arg("--snapshot=always").finish().expect_code(2);
    let log = Scene::with_outbox(Outbox::Messages);
    let refused = log.run().args(["--snapshot", "initial"]).finish();
    refused
        .expect_code(2)
        .expect_mentions(&["snapshot", "no table with older rows"]);
}

#[test]
fn every_pipeline_has_its_own() {
    let scene = cold(TABLE);
    let aggregate = scene.aggregate(1);
    fill(&scene, &aggregate, 20);
    scene.init().finish().expect_code(0);
    settle(&scene, scene.start());
    let other = format!("{}_b", scene.name);
    let as_other = |word: &str| {
        let conninfo = scene.conninfo();
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
    assert_eq!(scene.records().len(), 20, "the first has no part in it");
}

#[test]
fn halts_without_a_journal() {
    let by_hand = |scene: &Scene<'_>| {
        let slot = scene.slot();
        scene.db.run(&format!(
            "CREATE PUBLICATION {slot} FOR TABLE outbox WITH (publish = 'insert')"
        ));
        scene.db.run(&format!(
            "SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')"
        ));
    };
    let scene = cold(TABLE);
    let aggregate = scene.aggregate(1);
    fill(&scene, &aggregate, 20);
    by_hand(&scene);
    let refused = scene.run().finish().expect_code(3);
    refused.expect_mentions(&[
        "public.outbox",
        "walpost.journal",
        "walpost init",
        "snapshot = \"never\"",
    ]);
    assert!(!scene.slot_is_active());
    // Both remedies work.
    let walpost = scene.start_with(&["--snapshot", "never"]);
    walpost.terminate().expect_code(0);
    scene.init().finish().expect_code(0);
    settle(&scene, scene.start());
    assert_eq!(judge(&scene, snapshot_lsn(&scene)), 20);
}

#[test]
fn slot_that_has_streamed_has_its_life_behind_it() {
    let scene = cold(TABLE);
    let aggregate = scene.aggregate(1);
    fill(&scene, &aggregate, 20);
    let slot = scene.slot();
    scene.db.run(&format!(
        "CREATE PUBLICATION {slot} FOR TABLE outbox WITH (publish = 'insert')"
    ));
    scene.db.run(&format!(
        "SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')"
    ));
    let walpost = scene.start_with(&["--snapshot", "never"]);
    scene.insert(&aggregate, "newer");
    scene.wait_for_records(1);
    settle(&scene, walpost);
    let stream_one_more = |count: usize| {
        let walpost = scene.start();
        scene.insert(&aggregate, "newer");
        assert_eq!(scene.wait_for_records(count).len(), count);
        settle(&scene, walpost);
    };
    stream_one_more(2);
    scene.init().finish().expect_code(0);
    assert_eq!(journal(&scene)[0].0, "done");
    stream_one_more(3);
}

#[test]
fn right_that_lacks_is_named() {
    let scene = cold(TABLE);
    let aggregate = scene.aggregate(1);
    fill(&scene, &aggregate, 20);
    let walpost_role = WalpostRole::new(&scene, format!("{}_Clerk", scene.name));
    let role = &walpost_role.role;
    scene
        .db
        .run(&format!("REVOKE SELECT ON outbox FROM \"{role}\""));
    let grant = format!("GRANT SELECT ON public.outbox TO \"{role}\"");
    let refused = walpost_role.command(&["run"]).finish().expect_code(3);
    refused.expect_mentions(&["older than slot", &grant]);
    let check = || walpost_role.command(&["check"]).finish();
    check()
        .expect_code(3)
        .expect_mentions(&["older rows", &grant]);
    scene.db.run(&grant);
    check().expect_mentions(&["run first delivers the rows that are older", "about"]);
    let walpost = walpost_role.command(&["run"]).start_streaming();
    settle(&scene, walpost);
    assert_eq!(judge(&scene, snapshot_lsn(&scene)), 20);
}

/// Otherwise the slot would count as read, and no start would copy the rows.
#[test]
fn skip_is_refused_before_older_rows_are_copied() {
    let (scene, _) = filled(TABLE, 20, false);
    let confirmed = scene.confirmed();
    let to = scene.db.value("SELECT pg_current_wal_flush_lsn()").unwrap();
    let refused = scene.skip(&to).arg("--yes").finish().expect_code(3);
    refused.expect_mentions(&["not all delivered yet"]);
    assert_eq!(scene.confirmed(), confirmed);
    settle(&scene, scene.start());
    expect_all(&scene, 20, true);
}

/// The slot was not recorded by `walpost init`.
#[test]
fn copy_that_psql_has_found_due_halts_a_definition_with_several_tables() {
    let mut scene = cold(TABLE);
    let aggregate = scene.aggregate(1);
    fill(&scene, &aggregate, 20);
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
        psql_file(&scene, file);
    }
    let due = "SELECT count(*) FROM walpost.journal WHERE detail ->> 'state' = 'due'";
    assert_eq!(scene.db.number(due), 1);
    scene.use_settings("tables = ['public.outbox']\n");
    scene.init().finish().expect_code(0);
    let says = ["the copy of the older rows of table public.outbox is not complete"];
    scene.check().finish().expect_code(3).expect_mentions(&says);
    scene.run().finish().expect_code(3).expect_mentions(&says);
}
