//! `maintain`, and the same beside `run`: partitions ahead, and the retention.

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::budget;
use crate::support::checker::Resends;
use crate::support::event::Outbox;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, MAJORS, Server};
use crate::support::reaper;
use crate::support::scene::Scene;
use crate::support::session::Session;
use crate::support::wait::{stays, wait_until, within_a_day};
use crate::support::walpost::{Finished, Invocation, word_behind};

const COLUMNS: &str =
    "id uuid NOT NULL, aggregatetype text, aggregateid text, type text, payload jsonb,
    created_at timestamptz NOT NULL DEFAULT now(), PRIMARY KEY (id, created_at)";

/// How `init` makes them, and how others do: without it, DETACH ... CONCURRENTLY is used.
const DEFAULT: &str = "CREATE TABLE outbox_default PARTITION OF outbox DEFAULT;";

/// As in src/retention.rs.
const LOCK_TIMEOUT: Duration = Duration::from_millis(200);

/// A scene with an outbox that has one partition, `outbox_old`, whose time is over, and others.
fn aged(server: &'static Server, more: &str) -> Scene<'static> {
    within_a_day();
    let scene = Scene::bare_on(server, Broker::shared());
    scene.db.run(&format!(
        "CREATE TABLE outbox ({COLUMNS}) PARTITION BY RANGE (created_at);
         {more}
         DO $$ DECLARE day timestamptz := date_trunc('day', now(), 'UTC'); BEGIN
             EXECUTE format('CREATE TABLE outbox_old PARTITION OF outbox FOR VALUES FROM (%L) TO (%L)',
                 day - interval '2 days', day - interval '1 day');
             EXECUTE format('CREATE TABLE outbox_new PARTITION OF outbox FOR VALUES FROM (%L) TO (%L)',
                 day - interval '1 day', day + interval '2 days');
         END $$"
    ));
    scene.init().finish().expect_code(0);
    scene
}

/// Inserts from now on go to the partition whose time is over, or no longer.
fn turn_clock_back(scene: &Scene, is_back: bool) {
    let by = if is_back { "2 days" } else { "0" };
    let default = format!("date_trunc('day', now(), 'UTC') - interval '{by}'");
    scene.db.run(&format!(
        "ALTER TABLE outbox ALTER COLUMN created_at SET DEFAULT {default}"
    ));
}

/// Commits an event whose row is in `outbox_old`.
fn insert_old(scene: &Scene, aggregate: &str, key: &str) {
    turn_clock_back(scene, true);
    scene.insert(aggregate, key);
    turn_clock_back(scene, false);
}

fn maintain(scene: &Scene, arguments: &[&str]) -> Finished {
    scene.invoke("maintain").args(arguments).finish()
}

/// Partitions and tables that were some, with what is known of them.
fn tables(scene: &Scene) -> Vec<Vec<Option<String>>> {
    scene.db.rows(
        "SELECT relname, relispartition, obj_description(oid, 'pg_class') FROM pg_class
         WHERE relkind = 'r' AND relname ~ '^outbox' ORDER BY relname",
    )
}

/// Whether the table is there, as a partition or not.
fn is(scene: &Scene, table: &str, partition: bool) -> bool {
    scene.db.is_true(&format!(
        "SELECT EXISTS (SELECT FROM pg_class WHERE relname = '{table}' AND relispartition = {partition})"
    ))
}

fn is_gone(scene: &Scene, table: &str) -> bool {
    !is(scene, table, true) && !is(scene, table, false)
}

/// Runs `maintain` with the shortest retention until `until`.
fn maintain_until(scene: &Scene, what: &str, mut until: impl FnMut() -> bool) {
    wait_until(what, || {
        maintain(scene, &["--retention", "1s"]).expect_code(0);
        until()
    });
}

#[test]
fn partitions_are_made_ahead_like_those_that_are_there() {
    for major in MAJORS {
        within_a_day();
        let scene = Scene::bare_on(Server::shared(major), Broker::shared());
        scene.init().arg("--partitioned").finish().expect_code(0);
        let partitions = "SELECT count(*) FROM pg_inherits WHERE inhparent = 'outbox'::regclass";
        assert_eq!(
            scene.db.number(partitions),
            9,
            "today, seven more and the default"
        );
        maintain(&scene, &[]).expect_code(0);
        assert_eq!(scene.db.number(partitions), 9);
        let finished = maintain(&scene, &["--partitions-ahead", "10"]).expect_code(0);
        assert_eq!(
            finished.stdout.matches(" made for ").count(),
            3,
            "{finished:?}"
        );
        assert_eq!(scene.db.number(partitions), 12);
        // As init makes them: it finds all its own there, and they have all that the others have.
        scene.init().arg("--partitioned").finish().expect_code(0);
        assert_eq!(scene.db.number(partitions), 12);
        let kinds = "SELECT count(DISTINCT (SELECT string_agg(conname::text, ',' ORDER BY conname)
                 FROM pg_constraint WHERE conrelid = inhrelid AND contype = 'c')
                 || (SELECT count(*) FROM pg_index WHERE indrelid = inhrelid)
                 || (SELECT count(*) FROM pg_trigger WHERE tgrelid = inhrelid))
             FROM pg_inherits WHERE inhparent = 'outbox'::regclass";
        assert_eq!(scene.db.number(kinds), 1, "{major}");
        let aggregate = scene.aggregate(1);
        let walpost = scene.start();
        scene.db.run(
            "ALTER TABLE outbox ALTER COLUMN created_at SET DEFAULT now() + interval '10 days'",
        );
        scene.insert(&aggregate, "k");
        scene.settle(walpost, &[], Resends::Never);
        let ahead = "SELECT count(*) FROM outbox WHERE tableoid <> 'outbox_default'::regclass";
        assert_eq!(scene.db.number(ahead), 1, "{major}");
    }
}

#[test]
fn partition_that_is_delivered_and_old_is_dropped() {
    for major in [14, 15, 18] {
        for default in ["", DEFAULT] {
            let scene = aged(Server::shared(major), default);
            let aggregate = scene.aggregate(1);
            let walpost = scene.start();
            insert_old(&scene, &aggregate, "old");
            scene.insert(&aggregate, "new");
            scene.wait_until_confirmed();
            // Younger than that: it is only noted as delivered.
            let finished = maintain(&scene, &["--retention", "1h"]).expect_code(0);
            finished.expect_says(&["outbox_old is delivered and kept until"]);
            assert!(is(&scene, "outbox_old", true));
            maintain_until(&scene, "the old partition to go", || {
                is_gone(&scene, "outbox_old")
            });
            assert_eq!(scene.db.number("SELECT count(*) FROM outbox"), 1);
            scene.settle(walpost, &[], Resends::Never);
        }
    }
}

#[test]
fn what_is_not_delivered_is_neither_detached_nor_dropped() {
    let scene = aged(Server::shared(MAJOR), DEFAULT);
    let aggregate = scene.aggregate(1);
    // Before anybody can find the partition empty.
    insert_old(&scene, &aggregate, "old");
    // Its brokers are dead.
    let mut stuck = scene
        .invoke("run")
        .args([
            "--kafka",
            "127.0.0.1:9",
            "--retention",
            "1s",
            "--drain-timeout",
            "1s",
        ])
        .start();
    stuck.wait_for_log("streaming");
    let is_kept = || is(&scene, "outbox_old", true);
    stays("the partition", Duration::from_secs(3), is_kept);
    let finished = maintain(&scene, &["--retention", "1s"]);
    if finished.code == Some(0) {
        finished.expect_says(&["outbox_old waits until slot", &scene.slot()]);
    }
    stuck.terminate().expect_code(0);
    let walpost = scene.start_with(&["--retention", "1s"]);
    wait_until("the partition to go", || is_gone(&scene, "outbox_old"));
    scene.settle(walpost, &[], Resends::Never);
}

/// The partition is detached, and has a row that is not delivered.
fn detached_with_a_late_row() -> Scene<'static> {
    let scene = aged(Server::shared(MAJOR), DEFAULT);
    let aggregate = scene.aggregate(1);
    let walpost = scene.start_and_confirm_one(&aggregate, "first");
    maintain(&scene, &["--retention", "1s"]).expect_code(0);
    walpost.terminate().expect_code(0);
    // After it was found to be delivered, and before it is detached.
    insert_old(&scene, &aggregate, "late");
    maintain_until(&scene, "the partition to be detached", || {
        is(&scene, "outbox_old", false)
    });
    scene
}

#[test]
fn late_row_of_a_partition_is_delivered_before_that_is_dropped() {
    let scene = detached_with_a_late_row();
    let finished = maintain(&scene, &["--retention", "1s"]).expect_code(0);
    finished.expect_says(&["outbox_old waits until slot", &scene.slot()]);
    assert_eq!(scene.db.number("SELECT count(*) FROM outbox_old"), 1);
    let walpost = scene.start();
    scene.wait_until_confirmed();
    maintain(&scene, &["--retention", "1s"]).expect_code(0);
    assert!(is_gone(&scene, "outbox_old"));
    scene.settle(walpost, &[], Resends::Never);
}

#[test]
fn transaction_that_can_still_insert_into_a_partition_holds_it() {
    let scene = Scene::bare();
    scene.db.run(&format!(
        "CREATE TABLE outbox ({COLUMNS}) PARTITION BY RANGE (created_at);
         DO $$ BEGIN
             EXECUTE format('CREATE TABLE outbox_old PARTITION OF outbox FOR VALUES FROM (%L) TO (%L)',
                 now() - interval '1 hour', now() + interval '1 second');
             EXECUTE format('CREATE TABLE outbox_new PARTITION OF outbox FOR VALUES FROM (%L) TO (%L)',
                 now() + interval '1 second', now() + interval '2 days');
         END $$"
    ));
    scene.init().finish().expect_code(0);
    let aggregate = scene.aggregate(1);
    let slow = scene.server.session(&scene.name);
    slow.run("BEGIN; SELECT 1");
    let began = "SELECT now() < upper FROM (SELECT substring(pg_get_expr(relpartbound, oid)
         FROM 'TO .''([^'']*)')::timestamptz AS upper FROM pg_class WHERE relname = 'outbox_old') AS old";
    assert!(slow.is_true(began), "the test was too slow");
    let walpost = scene.start();
    let pid = slow.value("SELECT pg_backend_pid()").unwrap();
    let mut said = String::new();
    maintain_until(&scene, "the partition to be old", || {
        said = maintain(&scene, &["--retention", "1s"]).stdout;
        said.contains("waits for the end of a transaction")
    });
    assert!(
        said.contains(&format!("pg_terminate_backend({pid})")),
        "{said}"
    );
    slow.run(&scene.insert_sql(&aggregate, "slow"));
    slow.run("COMMIT");
    maintain_until(&scene, "the partition to go", || {
        is_gone(&scene, "outbox_old")
    });
    scene.settle(walpost, &[], Resends::Never);
    assert_eq!(scene.db.number("SELECT count(*) FROM outbox"), 0);
}

/// Tells the writers to stop, also where a test fails beside them.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Inserts one row after another until told to stop, and returns how long the slowest took.
fn write_until(conninfo: &str, statement: &str, stop: &AtomicBool) -> Duration {
    let session = Session::connect(conninfo).unwrap();
    let mut slowest = Duration::ZERO;
    while !stop.load(Ordering::Relaxed) {
        let begin = Instant::now();
        session.run(statement);
        slowest = slowest.max(begin.elapsed());
        thread::sleep(Duration::from_millis(2));
    }
    slowest
}

#[test]
fn writers_wait_no_longer_than_the_lock_timeout() {
    for default in [DEFAULT, ""] {
        let scene = aged(Server::shared(MAJOR), default);
        let aggregate = scene.aggregate(1);
        let walpost = scene.start_and_confirm_one(&aggregate, "first");
        maintain(&scene, &["--retention", "1s"]).expect_code(0);
        let statement = scene.insert_sql(&aggregate, "k");
        let stop = AtomicBool::new(false);
        let (slowest, took) = thread::scope(|scope| {
            let writers =
                [(); 2].map(|()| scope.spawn(|| write_until(&scene.conninfo(), &statement, &stop)));
            let stopped = Stop(&stop);
            // It holds the lock that every writer has, for longer than all tries take.
            let holder = scene.server.session(&scene.name);
            holder.run(&format!("BEGIN; {}", scene.insert_sql(&aggregate, "held")));
            let mut took = Duration::ZERO;
            wait_until("a pass that finds the table in use", || {
                let begin = Instant::now();
                let finished = maintain(&scene, &["--retention", "1s"]);
                took = begin.elapsed();
                match finished.code {
                    Some(0) => false,
                    _ => {
                        finished
                            .expect_code(1)
                            .expect_says(&["in use", "tried 5 times"]);
                        true
                    }
                }
            });
            assert!(is(&scene, "outbox_old", true));
            holder.run("COMMIT");
            maintain_until(&scene, "the partition to go", || {
                is_gone(&scene, "outbox_old")
            });
            drop(stopped);
            let slowest = writers.map(|writer| writer.join().unwrap());
            (slowest.into_iter().max().unwrap(), took)
        });
        eprintln!("slowest insert {slowest:?} while a pass took {took:?}");
        // The rest is for two busy cores.
        assert!(
            slowest < LOCK_TIMEOUT + Duration::from_millis(400),
            "{slowest:?}"
        );
        scene.settle(walpost, &[], Resends::Never);
    }
}

#[test]
fn detaching_that_is_interrupted_is_ended_later() {
    for major in [14, 18] {
        let scene = aged(Server::shared(major), "");
        let aggregate = scene.aggregate(1);
        let walpost = scene.start();
        insert_old(&scene, &aggregate, "old");
        scene.wait_until_confirmed();
        maintain(&scene, &["--retention", "1s"]).expect_code(0);
        let reader = scene.server.session(&scene.name);
        reader.run("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM outbox");
        let pending = "SELECT EXISTS (SELECT FROM pg_inherits WHERE inhdetachpending)";
        wait_until("a detaching that is not ended", || {
            let finished = maintain(&scene, &["--retention", "1s"]);
            assert!(matches!(finished.code, Some(0 | 1)), "{finished:?}");
            scene.db.is_true(pending)
        });
        scene.insert(&aggregate, "meanwhile");
        reader.run("COMMIT");
        maintain_until(&scene, "the partition to go", || {
            is_gone(&scene, "outbox_old")
        });
        scene.settle(walpost, &[], Resends::Never);
    }
}

in_both_modes! {
    size_stays_flat_while_run_keeps_the_table
}

/// An hour's load with partitions of a minute, in fast motion: partitions of half a second.
fn size_stays_flat_while_run_keeps_the_table(exactly_once: bool) {
    let scene = Scene::bare();
    scene.db.run(&format!(
        "CREATE TABLE outbox ({COLUMNS}) PARTITION BY RANGE (created_at); {DEFAULT}
         DO $$ BEGIN
             EXECUTE format('CREATE TABLE outbox_first PARTITION OF outbox FOR VALUES FROM (%L) TO (%L)',
                 date_trunc('second', now()), date_trunc('second', now()) + interval '0.5 seconds');
         END $$"
    ));
    scene.init().finish().expect_code(0);
    let scene = scene.in_mode(exactly_once);
    let aggregate = scene.aggregate(2);
    let ahead = ["--retention", "1s", "--partitions-ahead", "20"];
    maintain(&scene, &ahead).expect_code(0);
    let mut walpost = scene.start_with(&ahead);
    let statement = scene.events().many(&aggregate, 20, "'{}'");
    let stop = AtomicBool::new(false);
    let (mut sizes, mut counts) = (Vec::new(), Vec::new());
    let rows = "SELECT count(*) FROM outbox";
    thread::scope(|scope| {
        let writer = scope.spawn(|| write_until(&scene.conninfo(), &statement, &stop));
        let stopped = Stop(&stop);
        // The first that were written are gone, and from here on it goes on as it will.
        wait_until("the first rows to be written", || scene.db.number(rows) > 0);
        let oldest = scene
            .db
            .value("SELECT min(created_at) FROM outbox")
            .unwrap();
        let is_gone = format!(
            "SELECT min(created_at) > '{oldest}'::timestamptz + interval '1 second' FROM outbox"
        );
        wait_until("the first rows to go", || scene.db.is_true(&is_gone));
        let begin = walpost.logged("dropped");
        for more in [1, 4, 7, 10, 13] {
            walpost.wait_for_logs("dropped", begin + more);
            sizes.push(scene.db.number(
                "SELECT sum(pg_table_size(oid)) FROM pg_class WHERE relname ~ '^outbox' AND relkind = 'r'",
            ));
            counts.push(scene.db.number(rows));
        }
        drop(stopped);
        eprintln!("slowest insert: {:?}", writer.join().unwrap());
    });
    eprintln!("sizes {sizes:?}, rows {counts:?}");
    let work = scene.db.rows(
        "SELECT coalesce(sum(n_tup_del), 0), coalesce(sum(n_dead_tup), 0) FROM pg_stat_user_tables
         WHERE relname ~ '^outbox'",
    );
    assert_eq!(work, [[Some("0".to_owned()), Some("0".to_owned())]]);
    let committed = scene.history().len();
    // All of it is far more than what is there at any time.
    let most = usize::try_from(*counts.iter().max().unwrap()).unwrap();
    assert!(most < committed * 3 / 4, "{counts:?} of {committed}");
    assert!(sizes[4] < 2 * sizes[0], "{sizes:?}");
    assert_eq!(walpost.logged("maintenance fail"), 0, "{}", walpost.log());
    scene.settle(walpost, &[], Resends::Never);
    let strays = "SELECT count(*) FROM outbox_default";
    assert_eq!(scene.db.number(strays), 0, "made in time");
}

#[test]
fn slot_that_was_made_anew_begins_the_retention_anew() {
    let scene = aged(Server::shared(MAJOR), DEFAULT);
    let aggregate = scene.aggregate(1);
    insert_old(&scene, &aggregate, "lost with the slot");
    maintain(&scene, &["--retention", "1h"]).expect_code(0);
    scene.db.run(&format!(
        "SELECT pg_drop_replication_slot('{}')",
        scene.slot()
    ));
    // Without a slot nothing is removed, and partitions are made all the same.
    let before = tables(&scene).len();
    let finished =
        maintain(&scene, &["--retention", "1s", "--partitions-ahead", "9"]).expect_code(3);
    finished.expect_says(&[
        "nothing is removed",
        &scene.slot(),
        "walpost init",
        "made for",
    ]);
    assert!(is(&scene, "outbox_old", true));
    assert!(tables(&scene).len() >= before);
    scene.init().finish().expect_code(0);
    let mut walpost = scene.run().start();
    walpost.wait_for_log("events of a dropped slot were not sent again yet");
    let finished = maintain(&scene, &["--retention", "1h"]).expect_code(3);
    finished.expect_says(&["a slot was dropped", "walpost replay --dropped-slots"]);
    scene
        .replay(&["--dropped-slots", "--yes"])
        .finish()
        .expect_code(0);
    scene.insert(&aggregate, "k");
    scene.wait_for_ids(&scene.history());
    let finished = maintain(&scene, &["--retention", "1h"]).expect_code(0);
    finished.expect_says(&["outbox_old is delivered and kept until"]);
    assert!(is(&scene, "outbox_old", true));
    walpost.terminate().expect_code(0);
}

/// Nobody has told Walpost: what the new slot stands for is not what was delivered.
#[test]
fn slot_that_another_has_made_anew_removes_nothing_that_was_lost_with_it() {
    let scene = aged(Server::shared(MAJOR), DEFAULT);
    let aggregate = scene.aggregate(1);
    let walpost = scene.start_and_confirm_one(&aggregate, "k");
    walpost.terminate().expect_code(0);
    insert_old(&scene, &aggregate, "lost with the slot");
    let slot = scene.slot();
    scene
        .db
        .run(&format!("SELECT pg_drop_replication_slot('{slot}')"));
    scene.db.run(&format!(
        "SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')"
    ));
    let moved = "moved or dropped and re-created by someone else";
    for _ in 0..3 {
        let finished = maintain(&scene, &["--retention", "1s"]).expect_code(3);
        finished.expect_says(&[
            "what may not be delivered is kept",
            moved,
            "walpost skip --to",
        ]);
        scene.insert(&aggregate, "k");
    }
    assert!(is(&scene, "outbox_old", true));
    scene.check().finish().expect_code(3).expect_says(&[moved]);
}

#[test]
fn slot_of_another_publication_with_the_table_is_waited_for() {
    let scene = aged(Server::shared(MAJOR), DEFAULT);
    let aggregate = scene.aggregate(1);
    let other = format!("other_{}", scene.name);
    scene.db.run(&format!(
        "SELECT pg_create_logical_replication_slot('{other}', 'pgoutput')"
    ));
    let walpost = scene.start_and_confirm_one(&aggregate, "k");
    scene.db.run("CREATE PUBLICATION others FOR ALL TABLES");
    let finished = maintain(&scene, &["--retention", "1s"]).expect_code(0);
    finished.expect_says(&["outbox_old waits until slot", &other]);
    scene
        .db
        .run(&format!("SELECT pg_drop_replication_slot('{other}')"));
    maintain_until(&scene, "the partition to go", || {
        is_gone(&scene, "outbox_old")
    });
    walpost.terminate().expect_code(0);
}

#[test]
fn clock_that_was_ahead_removes_nothing_that_is_not_delivered() {
    let scene = aged(Server::shared(MAJOR), DEFAULT);
    let aggregate = scene.aggregate(1);
    let walpost = scene.start_and_confirm_one(&aggregate, "first");
    maintain(&scene, &["--retention", "1s"]).expect_code(0);
    // What it noted when its clock was ten years ahead.
    let shift = |by: i32| {
        scene.db.run(&format!(
            "DO $$ DECLARE year int := extract(year FROM now()); BEGIN EXECUTE format('COMMENT ON TABLE outbox_old IS %L',
                 replace(obj_description('outbox_old'::regclass, 'pg_class'), 'by ' || year, 'by ' || year + {by})); END $$"
        ));
    };
    shift(10);
    let finished = maintain(&scene, &["--retention", "1h"]).expect_code(0);
    finished.expect_says(&["outbox_old is delivered and kept until"]);
    let year = scene.db.number("SELECT extract(year FROM now())");
    let comment = "SELECT obj_description('outbox_old'::regclass, 'pg_class')";
    let comment = scene.db.value(comment).unwrap();
    assert!(comment.contains(&format!("by {year}")), "{comment}");
    // It goes forward by years once more: what is not confirmed is there still.
    walpost.terminate().expect_code(0);
    insert_old(&scene, &aggregate, "late");
    shift(-10);
    maintain(&scene, &["--retention", "1h"]).expect_code(0);
    assert!(is(&scene, "outbox_old", false));
    assert_eq!(scene.db.number("SELECT count(*) FROM outbox_old"), 1);
    let walpost = scene.start();
    scene.settle(walpost, &[], Resends::Never);
}

#[test]
fn dry_run_says_what_would_be_done_and_changes_nothing() {
    let scene = aged(Server::shared(MAJOR), DEFAULT);
    let before = tables(&scene);
    let finished = maintain(&scene, &["--retention", "1s", "--dry-run"]).expect_code(0);
    finished.expect_says(&[
        "would make partition",
        "would note that the time of",
        "outbox_old",
    ]);
    assert_eq!(tables(&scene), before);
}

#[test]
fn comment_of_a_partition_stays_beside_the_mark() {
    let scene = aged(Server::shared(MAJOR), DEFAULT);
    scene
        .db
        .run("COMMENT ON TABLE outbox_old IS 'For the auditor''s $walpost$ \\ eyes'");
    maintain(&scene, &["--retention", "1h"]).expect_code(0);
    let comment = scene
        .db
        .value("SELECT obj_description('outbox_old'::regclass, 'pg_class')");
    let comment = comment.unwrap();
    let lines: Vec<_> = comment.lines().collect();
    assert_eq!(lines[0], "For the auditor's $walpost$ \\ eyes");
    assert!(lines[1].starts_with("walpost: closed at "), "{comment}");
    assert_eq!(lines.len(), 2);
}

#[test]
fn names_that_need_quotes_are_no_trouble() {
    let scene = Scene::bare();
    scene.db.run(&format!(
        "CREATE SCHEMA \"My 'Shop\"; CREATE TABLE \"My 'Shop\".\"order\" ({COLUMNS}) PARTITION BY RANGE (created_at);
         CREATE TABLE \"My 'Shop\".\"The \"\"old\" PARTITION OF \"My 'Shop\".\"order\"
             FOR VALUES FROM ('2020-01-01') TO ('2020-01-02')"
    ));
    let table = ["--table", "\"My 'Shop\".\"order\""];
    scene.init().args(table).finish().expect_code(0);
    let mut walpost = scene.run().args(table).args(["--retention", "1s"]).start();
    walpost.wait_for_log("streaming");
    wait_until("the partition to go", || is_gone(&scene, "The \"old"));
    let made = "SELECT count(*) FROM pg_class WHERE relname ~ '^order_p20' AND relkind = 'r' AND relispartition";
    assert_eq!(scene.db.number(made), 8);
    walpost.terminate().expect_code(0);
}

#[test]
fn table_that_cannot_be_kept_is_named_with_the_remedy_and_stays_as_it_is() {
    let scene = Scene::new();
    scene.insert("a", "k");
    let before = tables(&scene);
    let finished = maintain(&scene, &["--retention", "1s"]).expect_code(3);
    finished.expect_says(&[
        "public.outbox is not partitioned",
        "walpost init --partitioned",
        "--delete-rows",
    ]);
    assert_eq!(tables(&scene), before);
    assert_eq!(scene.db.number("SELECT count(*) FROM outbox"), 1);

    let by = |how: &str| {
        let scene = Scene::with_table(&format!(
            "CREATE TABLE outbox ({COLUMNS}) PARTITION BY {how}"
        ));
        maintain(&scene, &["--retention", "1s"]).expect_code(3)
    };
    by("HASH (id)").expect_says(&["not partitioned by range of one column"]);
    by("RANGE (id, created_at)").expect_says(&["not partitioned by range of one column"]);
    by("RANGE (created_at)").expect_says(&[
        "no partition with a lower and an upper bound",
        "CREATE TABLE",
    ]);

    let log = Scene::of(Outbox::Messages);
    maintain(&log, &["--retention", "1s"])
        .expect_code(2)
        .expect_says(&["retention", "an outbox of messages"]);
    maintain(&log, &[])
        .expect_code(0)
        .expect_says(&["no partitions"]);
}

/// Runs `maintain` on a table without partitions until `until`.
fn delete_until(scene: &Scene, what: &str, mut until: impl FnMut(&Finished) -> bool) {
    wait_until(what, || {
        let arguments = ["--retention", "1s", "--delete-rows"];
        until(&maintain(scene, &arguments).expect_code(0))
    });
}

#[test]
fn rows_of_a_table_without_partitions_are_deleted_when_they_are_delivered() {
    for major in [14, MAJOR, 18] {
        let scene = Scene::on(Server::shared(major), Broker::shared());
        let aggregate = scene.aggregate(1);
        let rows = || scene.db.number("SELECT count(*) FROM outbox");
        // More than two batches.
        scene
            .db
            .run(&scene.events().many(&aggregate, 12_000, "'{}'"));
        delete_until(&scene, "a slot that is behind", |finished| {
            finished.stdout.contains("waits until slot")
        });
        assert_eq!(rows(), 12_000, "nothing is delivered yet");
        let walpost = scene.start();
        scene.wait_until_confirmed();
        delete_until(&scene, "the rows to be delivered", |finished| {
            finished.stdout.contains("is delivered and kept until")
        });
        walpost.terminate().expect_code(0);
        // One that a late transaction commits, and a new one.
        let late = scene.insert_sql(&aggregate, "late");
        let late = late.replace("payload)", "payload, created_at)");
        let late = late.replace("\"}')", "\"}', now() - interval '1 day')");
        assert!(late.contains("interval"), "{late}");
        scene.db.run(&late);
        scene.insert(&aggregate, "new");
        delete_until(&scene, "the wait for the late row", |finished| {
            finished.stdout.contains("waits until slot")
        });
        assert!(rows() >= 2, "the late one is not delivered");
        let walpost = scene.start();
        scene.wait_until_confirmed();
        let late = "SELECT count(*) FROM outbox WHERE aggregateid = 'late'";
        delete_until(&scene, "all old rows to go", |_| scene.db.number(late) == 0);
        scene.settle(walpost, &[], Resends::Never);
        let kept = "SELECT count(*) FROM outbox WHERE aggregateid = 'new'";
        assert_eq!((rows(), scene.db.number(kept)), (1, 1), "{major}");
    }
}

#[test]
fn rows_without_a_time_are_not_deleted() {
    let scene = Scene::with_table(
        "CREATE TABLE outbox (id uuid, aggregatetype text, aggregateid text, type text, payload jsonb, created_at text)",
    );
    let arguments = ["--retention", "1s", "--delete-rows"];
    let finished = maintain(&scene, &arguments).expect_code(3);
    finished.expect_says(&["public.outbox has no column created_at", "by hand"]);
}

#[test]
fn values_that_are_none_are_refused() {
    for arguments in [
        ["--retention", "soon"],
        ["--retention", "0s"],
        ["--partitions-ahead", "0"],
        ["--partitions-ahead", "many"],
    ] {
        Invocation::new(["maintain", "--postgres", "host=/nowhere user=u dbname=x"])
            .args(arguments)
            .finish()
            .expect_code(2)
            .expect_says(&[arguments[0]
                .trim_start_matches("--")
                .split('-')
                .next()
                .unwrap()]);
    }
    Invocation::new(["maintain", "--postgres", "host=/nowhere user=u dbname=x"])
        .finish()
        .expect_code(1)
        .expect_says(&["/nowhere"]);
}

#[test]
fn partition_that_cannot_be_made_is_named_with_the_remedy() {
    let scene = aged(Server::shared(MAJOR), DEFAULT);
    let aggregate = scene.aggregate(1);
    scene
        .db
        .run("ALTER TABLE outbox ALTER COLUMN created_at SET DEFAULT now() + interval '3 days'");
    scene.insert(&aggregate, "k");
    turn_clock_back(&scene, false);
    let finished = maintain(&scene, &[]).expect_code(3);
    finished.expect_says(&[
        "default partition public.outbox_default has rows",
        "docs/retention.md#",
        "made for",
    ]);
    // The others were made, and nothing is left of that one.
    assert_eq!(
        scene.db.number("SELECT count(*) FROM pg_class WHERE relkind = 'r' AND relname ~ '_p20' AND NOT relispartition"),
        0
    );
    scene.db.run("DELETE FROM outbox");
    let name = maintain(&scene, &["--dry-run"]).expect_code(0).stdout;
    let name = word_behind(&name, "public.");
    scene.db.run(&format!("CREATE TABLE {name} ()"));
    let finished = maintain(&scene, &[]).expect_code(3);
    finished.expect_says(&[
        "something else of that name",
        &format!("ALTER TABLE public.{name} RENAME TO"),
    ]);
}

#[test]
fn role_without_the_rights_is_told_the_statement_that_grants_them() {
    let scene = Scene::bare();
    scene.init().arg("--partitioned").finish().expect_code(0);
    let (owner, role) = (
        format!("{}_owner", scene.name),
        format!("{}-Clerk", scene.name),
    );
    scene.db.run(&format!(
        "CREATE ROLE {owner}; CREATE ROLE \"{role}\" LOGIN REPLICATION;
         GRANT USAGE ON SCHEMA walpost TO \"{role}\"; GRANT SELECT ON walpost.journal TO \"{role}\""
    ));
    let maintain_for_superuser = scene
        .invoke_as(
            "maintain",
            &scene
                .conninfo()
                .replace("user=postgres", &format!("user={role}")),
        )
        .args(["--retention", "1h"])
        .finish()
        .expect_code(3)
        .expect_says(&["belongs to postgres, a superuser", "OWNER TO"]);
    assert!(
        !maintain_for_superuser.stderr.contains("GRANT postgres"),
        "{maintain_for_superuser:?}"
    );
    let owned = scene.db.rows(&format!(
        "SELECT format('ALTER TABLE %s OWNER TO {owner}', relid) FROM pg_partition_tree('outbox')"
    ));
    owned
        .iter()
        .for_each(|row| scene.db.run(row[0].as_deref().unwrap()));
    let conninfo = scene
        .conninfo()
        .replace("user=postgres", &format!("user={role}"));
    let maintain = || {
        scene
            .invoke_as("maintain", &conninfo)
            .args(["--retention", "1h", "--partitions-ahead", "9"])
            .finish()
    };
    let check = |says: &[&str]| {
        scene
            .invoke_as("check", &conninfo)
            .args(["--kafka", &scene.broker.address(), "--retention", "1h"])
            .finish()
            .expect_code(0)
            .expect_says(says);
    };
    let grant = format!("GRANT {owner} TO \"{role}\"");
    maintain().expect_code(3).expect_says(&[&grant]);
    check(&["WARNING", "retention", &grant]);
    scene.db.run(&grant);
    let grant = format!("GRANT CREATE ON SCHEMA public TO \"{role}\"");
    maintain().expect_code(3).expect_says(&[&grant]);
    check(&["WARNING", &grant]);
    scene.db.run(&format!(
        "{grant}; GRANT CREATE ON SCHEMA public TO {owner}"
    ));
    // What is delivered is not known without.
    let grant = format!("GRANT SELECT ON walpost.slot_state TO \"{role}\"");
    maintain().expect_code(3).expect_says(&[&grant, "made for"]);
    check(&["WARNING", &grant]);
    scene.db.run(&grant);
    maintain().expect_code(0);
    check(&["retention: what is delivered and old enough can be removed"]);
    let foreign = scene.db.number(&format!(
        "SELECT count(*) FROM pg_partition_tree('outbox') JOIN pg_class c ON c.oid = relid
         WHERE pg_get_userbyid(relowner) <> '{owner}'"
    ));
    assert_eq!(
        foreign, 0,
        "new partitions belong to the owner of the table"
    );
    // And run goes on without the rights.
    scene.db.run(&format!("REVOKE {owner} FROM \"{role}\""));
    let aggregate = scene.aggregate(1);
    let mut walpost = scene.run_as(&conninfo).args(["--retention", "1s"]).start();
    walpost.wait_for_log("maintenance failed");
    scene.insert(&aggregate, "k");
    scene.settle(walpost, &[], Resends::Never);
    scene.db.run(&format!(
        "DROP OWNED BY {owner}, \"{role}\" CASCADE; DROP ROLE {owner}, \"{role}\""
    ));
}

#[test]
fn two_that_keep_the_same_table_do_not_meet() {
    let scene = aged(Server::shared(MAJOR), DEFAULT);
    let other = scene.server.session(&scene.name);
    other.rows(
        "SELECT pg_advisory_lock(x'77616c70'::int, 'outbox'::regclass::oid::int8::bit(32)::int)",
    );
    let finished = maintain(&scene, &["--retention", "1s"]).expect_code(1);
    finished.expect_says(&["another walpost is at work"]);
    // One of them beside a standby is no trouble.
    let walpost = scene.start_with(&["--retention", "1s"]);
    stays("quiet", Duration::from_secs(2), || {
        walpost.logged("maintenance") == 0
    });
    walpost.terminate().expect_code(0);
}

#[test]
fn retention_of_the_file_is_used_beside_exactly_once() {
    let scene = aged(Server::shared(MAJOR), DEFAULT);
    let file = reaper::folder("config").join("walpost.toml");
    let text = format!(
        "[[pipeline]]\nname = \"{}\"\npostgres = \"{}\"\ndelivery = \"exactly-once\"\nretention = \"1h\"\npartitions_ahead = 3\n",
        scene.name,
        scene.conninfo()
    );
    fs::write(&file, text).unwrap();
    let command = |words: &[&str]| Invocation::new(words).arg("--config").arg(&file).finish();
    let finished = command(&["maintain", "--dry-run"]).expect_code(0);
    assert_eq!(
        finished.stdout.matches("would make").count(),
        3,
        "{finished:?}"
    );
    // The database alone is asked, so the mode is no matter to init either.
    command(&["init", "--no-role"]).expect_code(0);
}

/// The most important of all: as far as a new slot can tell, everything is delivered.
#[test]
fn what_went_with_a_dropped_slot_is_kept_until_it_is_sent_again() {
    let scene = aged(Server::shared(MAJOR), DEFAULT);
    let aggregate = scene.aggregate(1);
    insert_old(&scene, &aggregate, "dropped");
    budget::drop_slot(&scene);
    budget::new_slot(&scene);
    let mut walpost = scene.start_with(&["--retention", "1s"]);
    scene.insert(&aggregate, "new");
    scene.wait_until_confirmed();
    let is_kept = || is(&scene, "outbox_old", true);
    stays("the partition", Duration::from_secs(5), is_kept);
    let said = [
        "nothing of table public.outbox is removed",
        "walpost replay --dropped-slots",
    ];
    walpost.wait_for_log(said[0]);
    walpost.terminate().expect_code(0);
    maintain(&scene, &["--retention", "1s"])
        .expect_code(3)
        .expect_says(&said);
    let replay = scene.replay(&["--dropped-slots", "--yes"]);
    replay.finish().expect_code(0);
    let walpost = scene.start_with(&["--retention", "1s"]);
    wait_until("the partition to go", || is_gone(&scene, "outbox_old"));
    walpost.terminate().expect_code(0);
    budget::expect_everything(&scene);
}

#[test]
fn rows_of_a_dropped_slot_are_kept_until_they_are_sent_again() {
    let scene = Scene::new();
    let aggregate = scene.aggregate(1);
    scene.insert(&aggregate, "dropped");
    budget::drop_slot(&scene);
    budget::new_slot(&scene);
    let walpost = scene.start();
    let pass = || maintain(&scene, &["--retention", "1s", "--delete-rows"]);
    let rows = || scene.db.number("SELECT count(*) FROM outbox");
    stays("the row", Duration::from_secs(4), || {
        pass().expect_code(3);
        rows() == 1
    });
    let replay = scene.replay(&["--dropped-slots", "--yes"]);
    replay.finish().expect_code(0);
    wait_until("the row to be deleted", || {
        pass().expect_code(0);
        rows() == 0
    });
    walpost.terminate().expect_code(0);
    budget::expect_everything(&scene);
}

#[test]
fn table_that_was_a_partition_and_has_rows_of_a_dropped_slot_is_named() {
    let scene = detached_with_a_late_row();
    budget::drop_slot(&scene);
    budget::new_slot(&scene);
    let replay = || scene.replay(&["--dropped-slots", "--yes"]).finish();
    replay()
        .expect_code(3)
        .expect_says(&["outbox_old was a partition of", "ATTACH PARTITION"]);
    scene.db.run(
        "DO $$ DECLARE day timestamptz := date_trunc('day', now(), 'UTC'); BEGIN
             EXECUTE format('ALTER TABLE outbox ATTACH PARTITION outbox_old FOR VALUES FROM (%L) TO (%L)',
                 day - interval '2 days', day - interval '1 day');
         END $$",
    );
    replay().expect_code(0);
    budget::expect_everything(&scene);
}
