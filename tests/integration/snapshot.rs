//! Rows that are older than the slot: delivered first, from a snapshot, and the stream goes on from
//! its consistent point.

use std::collections::{HashMap, HashSet};

use crate::init::psql_file;
use crate::support::browser;
use crate::support::checker::{self, Delivered, Resends};
use crate::support::event::Outbox;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, MAJORS, Server};
use crate::support::records::Record;
use crate::support::scene::{Scene, parse_lsn};
use crate::support::session::Session;
use crate::support::wait::wait_until;
use crate::support::walpost::Walpost;

pub(crate) const TABLE: &str =
    "CREATE TABLE outbox (id uuid PRIMARY KEY, aggregatetype text, aggregateid text,
    type text, payload jsonb, created_at timestamptz NOT NULL DEFAULT clock_timestamp())";

/// A scene whose table is older than its slot.
fn cold(create: &str) -> Scene<'static> {
    cold_on(create, MAJOR)
}

fn cold_on(create: &str, major: u32) -> Scene<'static> {
    let scene = Scene::bare_on(Server::shared(major), Broker::shared());
    scene.db.run(create);
    scene
}

/// So many events in one transaction.
fn fill(scene: &Scene<'_>, aggregate: &str, count: usize) {
    let payload = "jsonb_build_object('text', E'a\\tb\\\\c\\n' || n)";
    scene
        .db
        .run(&scene.events().many(aggregate, count, payload));
}

/// What the journal says of the snapshot: the state and the consistent point of each entry.
fn journal(scene: &Scene<'_>) -> Vec<(String, u64)> {
    let entries = scene.db.rows(
        "SELECT detail ->> 'state', to_lsn FROM walpost.journal WHERE action = 'snapshot' ORDER BY id",
    );
    let text = |value: &Option<String>| value.clone().unwrap();
    entries
        .iter()
        .map(|entry| (text(&entry[0]), parse_lsn(&text(&entry[1]))))
        .collect()
}

/// The consistent point of the only snapshot, which is done.
fn snapshot_lsn(scene: &Scene<'_>) -> u64 {
    let entries = journal(scene);
    let [(begun, snapshot_lsn), (done, same)] = &entries[..] else {
        panic!("not one snapshot: {entries:?}");
    };
    assert_eq!((begun.as_str(), done.as_str()), ("begun", "done"));
    assert_eq!(snapshot_lsn, same);
    *snapshot_lsn
}

/// Judges what was delivered, each event once, of a snapshot with this consistent point and the stream behind
/// it. Gives how many of them came from the snapshot.
fn judge(scene: &Scene<'_>, snapshot_lsn: u64) -> usize {
    judge_records(scene, &scene.records(), snapshot_lsn)
}

fn judge_records(scene: &Scene<'_>, records: &[Record], snapshot_lsn: u64) -> usize {
    let history = scene.history();
    let delivered: Vec<Delivered> = records.iter().map(Delivered::from).collect();
    // A record of WAL begins at a multiple of eight, so there is no commit there.
    let (copied, streamed): (Vec<_>, Vec<_>) = delivered
        .into_iter()
        .partition(|record| record.position.0 == snapshot_lsn - 1);
    let ids = |records: &[Delivered]| -> HashSet<String> {
        records.iter().map(|record| record.id.clone()).collect()
    };
    let before: HashSet<String> = history
        .iter()
        .filter(|event| event.end <= snapshot_lsn)
        .map(|event| event.id.clone())
        .collect();
    assert_eq!(ids(&copied), before, "what was committed before the border");
    assert_eq!(copied.len(), before.len(), "each of them once");
    let mut last = HashMap::new();
    for record in copied.iter().chain(&streamed) {
        let after = last.insert(record.place.clone(), (record.offset, record.position));
        assert!(
            record.position.0 != snapshot_lsn - 1
                || after.is_none_or(|(_, at)| at < record.position),
            "rows of the snapshot are in order: {record:?} after {after:?}"
        );
        let behind = after.is_none_or(|(offset, _)| offset < record.offset);
        assert!(
            behind,
            "the snapshot comes first: {record:?} after {after:?}"
        );
    }
    let after: Vec<_> = history
        .into_iter()
        .filter(|event| event.end > snapshot_lsn)
        .collect();
    let verdict = checker::check(&after, &streamed, &[], Resends::Never);
    verdict.unwrap_or_else(|violations| panic!("{violations}"));
    copied.len()
}

/// Waits until everything is confirmed, and stops it.
pub(crate) fn settle(scene: &Scene<'_>, walpost: Walpost) {
    scene.wait_until_confirmed();
    walpost.terminate().expect_code(0);
}

/// Waits until a snapshot waits for a transaction that is open.
fn wait_until_blocked(scene: &Scene<'_>, by: &Session) {
    let pid = by.number("SELECT pg_backend_pid()");
    wait_until("a snapshot to wait", || {
        scene.db.is_true(&format!(
            "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE backend_type = 'walsender'
             AND datname = current_database() AND pg_blocking_pids(pid) = ARRAY[{pid}])"
        ))
    });
}

/// A transaction that is open, with events in it and in savepoints, of which some are rolled back.
fn open(scene: &Scene<'_>, aggregate: &str) -> Session {
    let session = scene.server.session(&scene.name);
    let one = || scene.insert_sql(aggregate, "open");
    session.run(&format!(
        "BEGIN; {} SAVEPOINT a; {} RELEASE a; SAVEPOINT b; {} ROLLBACK TO b; {}",
        one(),
        one(),
        one(),
        one()
    ));
    session
}

in_both_modes! {
    each_event_is_there_once_with_writers_going_on
    standby_takes_over_amid_the_copy
    told_to_stop_amid_the_copy_it_stops
    postgresql_that_stops_amid_the_copy_stops_in_seconds
}

fn each_event_is_there_once_with_writers_going_on(exactly_once: bool) {
    for major in MAJORS {
        let scene = cold_on(TABLE, major);
        let aggregates = [scene.aggregate(3), scene.aggregate(1)];
        let load = scene.load(&[&aggregates[0], &aggregates[1]]);
        load.wait_for_transactions(100);
        scene.init().finish().expect_code(0);
        load.wait_for_transactions(30);
        let scene = scene.in_mode(exactly_once);
        // The server makes a snapshot in two steps, and waits in each for those that are open.
        let first = open(&scene, &aggregates[0]);
        let mut walpost = scene.run().start();
        wait_until_blocked(&scene, &first);
        let second = open(&scene, &aggregates[0]);
        first.run(&format!(
            "{} COMMIT",
            scene.insert_sql(&aggregates[1], "open")
        ));
        wait_until_blocked(&scene, &second);
        let third = open(&scene, &aggregates[0]);
        second.run("COMMIT");
        walpost.wait_for_log("streaming");
        third.run(&format!(
            "{} COMMIT",
            scene.insert_sql(&aggregates[0], "open")
        ));
        load.wait_for_transactions(100);
        load.stop();
        settle(&scene, walpost);
        let snapshot_lsn = snapshot_lsn(&scene);
        let copied = judge(&scene, snapshot_lsn);
        assert!(copied >= 137, "{major}: only {copied} of the snapshot");
        // Once in its life.
        let before = scene.records().len();
        let mut walpost = scene.start();
        scene.insert(&aggregates[0], "later");
        scene.wait_for_records(before + 1);
        assert_eq!(walpost.logged("snapshot"), 0, "{}", walpost.log());
        assert!(walpost.is_running());
        settle(&scene, walpost);
        assert_eq!(judge(&scene, snapshot_lsn), copied, "{major}");
    }
}

#[test]
fn commits_around_the_consistent_point_are_on_one_side_each() {
    for major in MAJORS {
        let scene = cold_on(TABLE, major);
        let aggregate = scene.aggregate(1);
        scene.insert(&aggregate, "older");
        scene.init().finish().expect_code(0);
        let first = open(&scene, &aggregate);
        let mut walpost = scene.run().start();
        wait_until_blocked(&scene, &first);
        // Its commit is the last before the consistent point, and the next one follows it in WAL.
        first.run("COMMIT");
        walpost.wait_for_log("streaming");
        scene.insert(&aggregate, "newer");
        settle(&scene, walpost);
        assert_eq!(judge(&scene, snapshot_lsn(&scene)), 4, "{major}");
    }
}

#[test]
fn rows_come_in_the_order_of_their_time_or_of_a_key_that_rises() {
    for (create, order) in [
        (TABLE, "created_at, id"),
        (
            "CREATE TABLE outbox (id uuid DEFAULT gen_random_uuid(), number bigserial PRIMARY KEY, aggregatetype text,
             aggregateid text, type text, payload jsonb, created_at timestamptz NOT NULL DEFAULT now() - random() * '1 day'::interval)",
            "number",
        ),
        (
            "CREATE TABLE outbox (id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload jsonb)",
            "id",
        ),
    ] {
        let scene = cold(create);
        let aggregate = scene.aggregate(1);
        fill(&scene, &aggregate, 300);
        scene.init().finish().expect_code(0);
        settle(&scene, scene.start());
        assert_eq!(judge(&scene, snapshot_lsn(&scene)), 300);
        let expected = scene.db.rows(&format!("SELECT id FROM outbox ORDER BY {order}"));
        let expected: Vec<_> = expected.into_iter().flatten().flatten().collect();
        let records = scene.records();
        let found: Vec<_> = records.iter().map(|record| record.header("id")).collect();
        assert_eq!(found, expected, "{order}");
    }
}

#[test]
fn values_are_those_that_the_stream_would_have() {
    let columns =
        "id uuid DEFAULT gen_random_uuid(), aggregatetype text, aggregateid text, payload bytea,
        headers jsonb, note text, at timestamptz, many int8, part numeric";
    let scene = cold(&format!("CREATE TABLE outbox ({columns})"));
    let topic = scene.name.clone();
    scene.topic(&topic, 1, &[]);
    let insert = format!(
        "INSERT INTO outbox (aggregatetype, aggregateid, payload, headers, note, at, many, part) VALUES
         ('{topic}', E'k\\t1', '\\x00ff5c6e', '{{\"a\": \"b\\\\n\"}}', E'\\\\N \\\\ \\n\\r\\b\\f\\v é', '2020-02-29 12:00:00.5+02', 7, 1.50),
         ('{topic}', '', NULL, NULL, NULL, NULL, NULL, NULL)"
    );
    scene.db.run(&insert);
    scene.init().finish().expect_code(0);
    let flags = [
        "--topic",
        "{aggregatetype}",
        "--header",
        "note={note}",
        "--header",
        "at={at}",
        "--header",
        "many={many}{part}",
    ];
    let walpost = scene.start_with(&flags);
    scene.wait_for_records(2);
    scene.db.run(&insert);
    let records = scene.wait_for_records(4);
    settle(&scene, walpost);
    let shown = |record: &Record| {
        let headers: Vec<_> = record
            .headers
            .iter()
            .filter(|(name, _)| name != "walpost-position")
            .cloned()
            .collect();
        (record.key.clone(), record.payload.clone(), headers)
    };
    for (copied, streamed) in records[..2].iter().zip(&records[2..]) {
        assert_eq!(shown(copied), shown(streamed));
    }
    assert_eq!(records[0].payload.as_deref(), Some(&b"\x00\xff\\n"[..]));
}

#[test]
fn partitioned_table_is_copied_by_its_root() {
    let scene = Scene::bare();
    let columns = TABLE
        .replace("id uuid PRIMARY KEY", "id uuid")
        .replace("CREATE TABLE outbox", "");
    scene.db.run(&format!(
        "CREATE TABLE outbox {columns} PARTITION BY HASH (id);
         CREATE TABLE outbox_0 PARTITION OF outbox FOR VALUES WITH (MODULUS 2, REMAINDER 0);
         CREATE TABLE outbox_1 PARTITION OF outbox FOR VALUES WITH (MODULUS 2, REMAINDER 1)"
    ));
    let aggregate = scene.aggregate(3);
    fill(&scene, &aggregate, 200);
    scene.init().finish().expect_code(0);
    let walpost = scene.start();
    fill(&scene, &aggregate, 50);
    settle(&scene, walpost);
    assert_eq!(judge(&scene, snapshot_lsn(&scene)), 200);
}

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
        .expect_says(&["older than slot"]);
    let walpost = scene.start_with(&["--snapshot", "never"]);
    scene.insert(&aggregate, "newer");
    let records = scene.wait_for_records(1);
    settle(&scene, walpost);
    assert_eq!(records.len(), 1);
    assert_eq!(records[0].key(), "newer");
    // What was left out once stays out.
    let walpost = scene.start();
    scene.insert(&aggregate, "newer");
    assert_eq!(scene.wait_for_records(2).len(), 2);
    settle(&scene, walpost);
    assert_eq!(scene.records().len(), 2);
    scene.run().arg("--snapshot=always").finish().expect_code(2);
    let log = Scene::of(Outbox::Messages);
    let refused = log.run().args(["--snapshot", "initial"]).finish();
    refused
        .expect_code(2)
        .expect_says(&["snapshot", "no table with older rows"]);
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
fn without_a_journal_nobody_knows_and_it_halts() {
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
    refused.expect_says(&[
        "public.outbox",
        "walpost.journal",
        "walpost init",
        "snapshot = \"never\"",
    ]);
    assert!(!scene.slot_is_active());
    // Both remedies hold.
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
    // As an older Walpost did.
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
    let role = format!("{}_Clerk", scene.name);
    scene
        .invoke("init")
        .args(["--role", &role])
        .finish()
        .expect_code(0);
    scene
        .db
        .run(&format!("REVOKE SELECT ON outbox FROM \"{role}\""));
    let conninfo = scene
        .conninfo()
        .replace("user=postgres", &format!("user={role}"));
    let grant = format!("GRANT SELECT ON public.outbox TO \"{role}\"");
    let refused = scene.run_as(&conninfo).finish().expect_code(3);
    refused.expect_says(&["older than slot", &grant]);
    let check = || {
        let check = scene.invoke_as("check", &conninfo);
        check.args(["--kafka", &scene.broker.address()]).finish()
    };
    check().expect_code(3).expect_says(&["older rows", &grant]);
    scene.db.run(&grant);
    check().expect_says(&["run first delivers the rows that are older", "about"]);
    let mut walpost = scene.run_as(&conninfo).start();
    walpost.wait_for_log("streaming");
    settle(&scene, walpost);
    assert_eq!(judge(&scene, snapshot_lsn(&scene)), 20);
    scene
        .db
        .run(&format!("DROP OWNED BY \"{role}\"; DROP ROLE \"{role}\""));
}

/// A scene with so many older rows.
pub(crate) fn filled(create: &str, rows: usize, exactly_once: bool) -> (Scene<'static>, String) {
    let scene = cold(create);
    let aggregate = scene.aggregate(2);
    fill(&scene, &aggregate, rows);
    scene.init().finish().expect_code(0);
    (scene.in_mode(exactly_once), aggregate)
}

/// Walpost amid the copy of a table with many rows.
pub(crate) fn start_and_copy_some(scene: &Scene<'_>) -> Walpost {
    let before = scene.records().len();
    let mut walpost = scene.run().args(["--window-records", "20"]).start();
    walpost.wait_for_log("copying");
    scene.wait_for_records(before + 100);
    walpost
}

/// All events are there, exactly once where that is the mode.
pub(crate) fn expect_all(scene: &Scene<'_>, count: usize, exactly_once: bool) {
    let records = scene.records();
    let ids: HashSet<_> = records.iter().map(|record| record.header("id")).collect();
    assert_eq!(ids.len(), count);
    assert!(!exactly_once || records.len() == count, "{}", records.len());
}

#[test]
fn at_least_once_that_is_killed_begins_again() {
    let (scene, aggregate) = filled(TABLE, 20_000, false);
    let stands = scene.confirmed();
    let walpost = start_and_copy_some(&scene);
    fill(&scene, &aggregate, 10);
    let death = scene.kill(walpost);
    assert_eq!(
        death.confirmed, stands,
        "nothing is confirmed before all is copied"
    );
    let ends: i64 = death.ends.values().sum();
    assert!(ends < 20_000, "the test has to kill it amid the copy");
    let to = scene.db.value("SELECT pg_current_wal_flush_lsn()").unwrap();
    let skip = scene
        .invoke("skip")
        .args(["--kafka", &scene.broker.address()]);
    let refused = skip.args(["--to", &to, "--yes"]).finish().expect_code(3);
    refused.expect_says(&["not all delivered yet"]);
    assert_eq!(scene.confirmed(), stands);
    let mut walpost = scene.start();
    walpost.wait_for_log("not completed");
    fill(&scene, &aggregate, 10);
    settle(&scene, walpost);
    let entries = journal(&scene);
    let states: Vec<_> = entries.iter().map(|(state, _)| state.as_str()).collect();
    assert_eq!(states, ["begun", "begun", "done"]);
    let (again, records): (Vec<_>, Vec<_>) = scene
        .records()
        .into_iter()
        .partition(|record| record.offset >= death.ends[&record.place()]);
    assert_eq!(judge_records(&scene, &again, entries[2].1), 20_010);
    let first: Vec<Delivered> = records.iter().map(Delivered::from).collect();
    assert!(
        first
            .iter()
            .all(|record| record.position.0 == entries[0].1 - 1)
    );
}

/// The slot is free while a snapshot is made, and another instance may have delivered the older rows
/// meanwhile.
#[test]
fn copy_that_another_instance_has_made_meanwhile_is_not_made_again() {
    let scene = cold(TABLE);
    let aggregate = scene.aggregate(1);
    fill(&scene, &aggregate, 20);
    scene.init().finish().expect_code(0);
    let open = open(&scene, &aggregate);
    let mut walpost = scene.run().start();
    wait_until_blocked(&scene, &open);
    // What the other one writes when it is done.
    let slot = scene.slot();
    scene.db.run(&format!(
        "INSERT INTO walpost.journal (pipeline, slot, action, to_lsn, detail)
         SELECT '{0}', '{slot}', 'snapshot', confirmed_flush_lsn, '{{\"state\": \"done\"}}'
         FROM pg_replication_slots WHERE slot_name = '{slot}'",
        scene.name
    ));
    open.run("ROLLBACK");
    walpost.wait_for_log("another instance has written about the snapshot");
    walpost.wait_for_log("streaming");
    scene.insert(&aggregate, "newer");
    settle(&scene, walpost);
    let records = scene.records();
    let keys: Vec<_> = records.iter().map(Record::key).collect();
    assert_eq!(keys, ["newer"]);
    assert_eq!(journal(&scene).len(), 1);
}

fn standby_takes_over_amid_the_copy(exactly_once: bool) {
    let (scene, _) = filled(TABLE, 20_000, exactly_once);
    let walpost = start_and_copy_some(&scene);
    let mut second = scene.run().start();
    second.wait_for_log("standing by");
    scene.kill(walpost);
    second.wait_for_log(match exactly_once {
        true => "resuming interrupted snapshot",
        false => "not completed",
    });
    second.wait_for_log("streaming");
    settle(&scene, second);
    expect_all(&scene, 20_000, exactly_once);
}

fn told_to_stop_amid_the_copy_it_stops(exactly_once: bool) {
    let (scene, _) = filled(TABLE, 20_000, exactly_once);
    let stands = scene.confirmed();
    start_and_copy_some(&scene).terminate().expect_code(0);
    assert!(scene.records().len() < 20_000);
    assert_eq!(scene.confirmed(), stands);
    settle(&scene, scene.start());
    expect_all(&scene, 20_000, exactly_once);
}

fn postgresql_that_stops_amid_the_copy_stops_in_seconds(exactly_once: bool) {
    use crate::support::postgres::Stop;
    let server = Server::private(MAJOR, "");
    let scene = Scene::bare_on(&server, Broker::shared());
    scene.db.run(TABLE);
    let aggregate = scene.aggregate(1);
    fill(&scene, &aggregate, 20_000);
    scene.init().finish().expect_code(0);
    let mut scene = scene.in_mode(exactly_once);
    let mut walpost = start_and_copy_some(&scene);
    server.begin_stop(Stop::Fast);
    assert!(server.has_stopped(std::time::Duration::from_secs(15)));
    server.start();
    scene.reconnect();
    walpost.wait_for_logs("copying", 2);
    walpost.wait_for_log("streaming");
    settle(&scene, walpost);
    expect_all(&scene, 20_000, exactly_once);
}

#[test]
fn exactly_once_that_is_killed_goes_on_behind_the_last_row() {
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
        let (scene, aggregate) = filled(&create, 15_000, true);
        // Rows that come meanwhile have keys among those that were copied, and among those to come.
        for _ in 0..2 {
            let walpost = start_and_copy_some(&scene);
            fill(&scene, &aggregate, 300);
            scene.kill(walpost);
            fill(&scene, &aggregate, 300);
        }
        let mut walpost = scene.run().start();
        walpost.wait_for_log("resuming interrupted snapshot");
        fill(&scene, &aggregate, 300);
        walpost.wait_for_log("streaming");
        fill(&scene, &aggregate, 300);
        settle(&scene, walpost);
        let entries = journal(&scene);
        let states: Vec<_> = entries.iter().map(|(state, _)| state.as_str()).collect();
        assert_eq!(states, ["begun", "done"], "{key}");
        let snapshot_lsn = entries[0].1;

        let (history, records) = (scene.history(), scene.records());
        let delivered: Vec<Delivered> = records.iter().map(Delivered::from).collect();
        assert_eq!(delivered.len(), history.len(), "{key}");
        let (copied, streamed): (Vec<_>, Vec<_>) = delivered
            .into_iter()
            .partition(|record| record.position.0 == snapshot_lsn - 1);
        for pair in copied.windows(2).filter(|pair| pair[0].place == pair[1].place) {
            assert!(pair[0].position < pair[1].position, "{key}: {pair:?}");
        }
        let of_copy: HashSet<_> = copied.iter().map(|record| &record.id).collect();
        let newer = history.iter().filter(|event| event.end > snapshot_lsn);
        let newer = newer.filter(|event| of_copy.contains(&event.id)).count();
        assert!(newer > 100, "{key}: later snapshots had only {newer} rows more");
        let rest: Vec<_> = history
            .iter()
            .filter(|event| !of_copy.contains(&event.id))
            .cloned()
            .collect();
        assert!(rest.len() > 300, "{key}: the stream had only {}", rest.len());
        let verdict = checker::check(&rest, &streamed, &[], Resends::Never);
        verdict.unwrap_or_else(|violations| panic!("{key}: {violations}"));

        // What was left out stays left out, and what comes is delivered.
        let walpost = scene.start();
        fill(&scene, &aggregate, 10);
        settle(&scene, walpost);
        expect_all(&scene, history.len() + 10, true);
    }
}

#[test]
fn stream_that_breaks_between_two_consistent_points_leaves_out_what_was_copied() {
    let create = "CREATE TABLE outbox (id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload jsonb)";
    let (scene, aggregate) = filled(create, 15_000, true);
    let walpost = start_and_copy_some(&scene);
    scene.kill(walpost);
    fill(&scene, &aggregate, 15_000);
    let mut walpost = scene.run().args(["--window-records", "20"]).start();
    walpost.wait_for_log("streaming");
    // Broken as often as there is time for.
    for _ in 0..5 {
        let before = scene.records().len();
        if before < 30_000 {
            scene.wait_for_records(before + 1);
        }
        scene.kill(walpost);
        walpost = scene.run().args(["--window-records", "20"]).start();
        walpost.wait_for_log("streaming");
    }
    fill(&scene, &aggregate, 10);
    settle(&scene, walpost);
    expect_all(&scene, 30_010, true);
}

#[test]
fn exactly_once_halts_where_it_can_not_go_on() {
    let create = "CREATE TABLE outbox (id uuid, number numeric PRIMARY KEY DEFAULT random(), aggregatetype text,
        aggregateid text, type text, payload jsonb)";
    let (scene, _) = filled(create, 20_000, true);
    let walpost = start_and_copy_some(&scene);
    scene.kill(walpost);
    let found = scene.records().len();
    let halted = scene.run().finish().expect_code(3);
    halted.expect_says(&["was interrupted after", "walpost checkpoint adopt"]);
    scene
        .checkpoint("show")
        .finish()
        .expect_says(&["older rows copied so far"]);
    assert_eq!(scene.records().len(), found);
    let adopted = scene
        .checkpoint("adopt")
        .arg("--yes")
        .finish()
        .expect_code(0);
    adopted.expect_says(&["first delivers the rows that are older"]);
    settle(&scene, scene.start());
    let records = scene.records();
    assert_eq!(records.len(), found + 20_000);
}

#[test]
fn confirmed_but_not_written_down_is_done() {
    let scene = cold(TABLE);
    let aggregate = scene.aggregate(1);
    fill(&scene, &aggregate, 20);
    scene.init().finish().expect_code(0);
    settle(&scene, scene.start());
    // As after a death between the two.
    scene
        .db
        .run("DELETE FROM walpost.journal WHERE detail ->> 'state' = 'done'");
    let walpost = scene.start();
    scene.insert(&aggregate, "newer");
    assert_eq!(scene.wait_for_records(21).len(), 21);
    settle(&scene, walpost);
    let entries = journal(&scene);
    assert_eq!(entries[1].0, "done");
    assert_eq!(judge(&scene, entries[0].1), 20);
}

#[test]
fn memory_is_bounded_whatever_the_table_has() {
    let scene = cold(TABLE);
    let aggregate = scene.aggregate(1);
    let payload = "jsonb_build_object('text', repeat('x', 2000))";
    scene
        .db
        .run(&scene.events().many(&aggregate, 60_000, payload));
    scene.init().finish().expect_code(0);
    let mut walpost = scene.run().args(["--window-bytes", "1MiB"]).start();
    walpost.wait_for_log("copying");
    let mut most = 0;
    wait_until("the copy", || {
        most = most.max(walpost.resident_bytes());
        walpost.logged("streaming") > 0
    });
    settle(&scene, walpost);
    assert!(most < 64 << 20, "{most} bytes for a table of 120 MB");
    assert_eq!(judge(&scene, snapshot_lsn(&scene)), 60_000);
}

#[test]
fn progress_is_in_metrics_status_and_the_table_of_status() {
    const ROWS: usize = 40_000;
    let broker = Broker::private();
    let scene = Scene::bare_on(Server::shared(MAJOR), &broker);
    scene.db.run(TABLE);
    let aggregate = scene.aggregate(1);
    fill(&scene, &aggregate, ROWS);
    scene.db.run("ANALYZE outbox");
    scene.init().finish().expect_code(0);
    // A few at a time take some seconds for all.
    let few = ["--window-records", "20", "--http", "127.0.0.1:0"];
    let mut walpost = scene.run().args(few).start();
    let http = walpost.http();
    let metric = |name: &str| http.metric(name, &scene.name);
    let is_in = |phase: &str| {
        let series = format!(
            "walpost_snapshot_phase{{pipeline=\"{}\",phase=\"{phase}\"}}",
            scene.name
        );
        http.metrics().get(&series).copied() == Some(1.0)
    };
    wait_until("some rows", || {
        metric("walpost_snapshot_rows_total") > Some(0.0)
    });
    broker.freeze();
    assert!(is_in("copying"), "{}", http.get("/metrics").body);
    assert_eq!(metric("walpost_snapshot_rows_expected"), Some(ROWS as f64));
    let rows = metric("walpost_snapshot_rows_total").unwrap();
    assert!(rows < ROWS as f64, "{rows}");
    let snapshot = &http.pipeline()["snapshot"];
    assert_eq!(snapshot["phase"], "copying", "{snapshot}");
    assert!(snapshot["rows"].as_f64() >= Some(rows), "{snapshot}");
    let shown = scene
        .invoke("status")
        .args(["--http", http.address()])
        .finish();
    let line = format!("of about {ROWS} rows read");
    assert!(shown.stdout.contains(&line), "{shown:?}");
    let page = browser::document(&format!("http://{}/", http.address()));
    let line = "of about 40,000 rows read";
    assert!(page.contains(line), "{page}");
    broker.thaw();
    wait_until("the end", || is_in("done"));
    assert_eq!(metric("walpost_snapshot_rows_total"), Some(ROWS as f64));
    assert_eq!(http.pipeline()["snapshot"]["rows"], ROWS);
    let shown = scene
        .invoke("status")
        .args(["--http", http.address()])
        .finish()
        .expect_code(0);
    assert!(!shown.stdout.contains("rows read"), "{shown:?}");
    walpost.terminate().expect_code(0);
}
