//! The WAL budget: reports and actions when the slot retains more WAL than allowed, and how the
//! events of a dropped slot are sent again.

use std::collections::HashSet;
use std::fs;
use std::thread;
use std::time::Duration;

use crate::support::checker::Resends;
use crate::support::event::Outbox;
use crate::support::kafka::Broker;
use crate::support::load::seed;
use crate::support::lsn::lsn_text;
use crate::support::postgres::{MAJOR, Server};
use crate::support::proxy::ProxyMode;
use crate::support::scene::Scene;
use crate::support::wait::{assert_stays, poll_until, wait_until};
use crate::support::walpost::{Finished, Invocation, word_after};

in_both_modes! {
    dropped_slot_is_listed_until_its_events_are_sent_again
    slot_that_is_dropped_amid_the_copy_has_all_rows_sent_again
    killed_at_random_points_under_load_what_went_with_a_dropped_slot_is_sent_again
}

/// A budget of 1 byte, which every slot exceeds.
pub(crate) const DROP_SLOT: [&str; 4] =
    ["--wal-budget-max", "1", "--wal-budget-on-max", "drop-slot"];

const WARN_MESSAGE: &str = "the slot retains more WAL than wal_budget.warn";
const HOLD_MESSAGE: &str = "the slot retains more WAL than wal_budget.max, and it is held";
const RECOVERED_MESSAGE: &str = "the slot is within its WAL budget again";

/// Prepares `walpost run` with the scene's slot and the given brokers.
fn with_brokers(scene: &Scene, brokers: &str, arguments: &[&str]) -> Invocation {
    let mode: &[&str] = match scene.is_exactly_once() {
        true => &["--exactly-once"],
        false => &[],
    };
    scene
        .invoke("run")
        .args(["--kafka", brokers])
        .args(mode)
        .args(arguments)
}

/// Prepares `walpost run` with the scene's slot and without a reachable broker.
fn without_kafka(scene: &Scene, arguments: &[&str]) -> Invocation {
    with_brokers(scene, "127.0.0.1:9", arguments)
}

/// Makes Walpost drop the slot, and returns its output.
pub(crate) fn drop_slot(scene: &Scene) -> Finished {
    let finished = without_kafka(scene, &DROP_SLOT).finish().expect_code(3);
    assert!(!slot_is_there(scene));
    finished.expect_mentions(&[
        "was dropped",
        "walpost init",
        "walpost replay --dropped-slots",
    ])
}

fn slot_is_there(scene: &Scene) -> bool {
    let slot = scene.slot();
    scene.db.is_true(&format!(
        "SELECT EXISTS (SELECT FROM pg_replication_slots WHERE slot_name = '{slot}')"
    ))
}

/// Returns the number of journal entries about dropped slots.
fn entries(scene: &Scene) -> i64 {
    let sql = "SELECT count(*) FROM walpost.journal WHERE action = 'drop slot'";
    scene.db.number(sql)
}

/// Creates a new slot, and adopts a checkpoint for it in exactly-once mode.
pub(crate) fn new_slot(scene: &Scene) {
    scene.init().finish().expect_code(0);
    if scene.is_exactly_once() {
        let adopt = scene.checkpoint("adopt").arg("--yes");
        adopt.finish().expect_code(0);
    }
}

fn ids(scene: &Scene) -> HashSet<String> {
    let records = scene.records();
    records.iter().map(|r| r.header("id").to_owned()).collect()
}

/// Asserts that every event ever committed is in Kafka.
pub(crate) fn expect_everything(scene: &Scene) {
    let delivered = ids(scene);
    for event in scene.history() {
        assert!(delivered.contains(&event.id), "{} is missing", event.id);
    }
}

fn replayed(scene: &Scene) -> usize {
    let records = scene.records();
    let is_replayed =
        |r: &&crate::support::records::Record| r.header_names().contains(&"walpost-replay");
    records.iter().filter(is_replayed).count()
}

/// Confirms a first event, and waits until the slot's catalog_xmin has passed its transaction.
fn deliver_one(scene: &Scene, aggregate: &str) {
    let walpost = scene.start_and_confirm_one(aggregate, "delivered");
    wait_until("catalog_xmin to pass it", || {
        scene.db.run("CHECKPOINT");
        scene.db.is_true(&format!(
            "SELECT catalog_xmin::text::bigint > (SELECT max(xmin::text::bigint) FROM outbox)
             FROM pg_replication_slots WHERE slot_name = '{}'",
            scene.slot()
        ))
    });
    scene.wait_until_confirmed();
    walpost.terminate().expect_code(0);
}

#[test]
fn exceeded_wal_warning_is_logged_once_and_when_it_ends() {
    let server = Server::private(MAJOR, "");
    let scene = Scene::on_servers(&server, Broker::shared());
    let aggregate = scene.aggregate(1);
    let mut walpost = scene.start_with(&["--wal-budget-warn", "4MiB"]);
    // Everything is delivered, but an open transaction makes the slot retain WAL.
    let open = server.session(&scene.name);
    open.run(&format!("BEGIN; {}", scene.insert_sql(&aggregate, "k")));
    scene.write_other_wal(6);
    scene.wait_until_confirmed();
    walpost.wait_for_log(WARN_MESSAGE);
    open.run("COMMIT");
    wait_until("its end", || {
        scene.db.run("CHECKPOINT");
        walpost.logged(RECOVERED_MESSAGE) > 0
    });
    assert_eq!(walpost.logged(WARN_MESSAGE), 1, "{}", walpost.log());
    assert_eq!(walpost.logged(RECOVERED_MESSAGE), 1, "{}", walpost.log());
    walpost.wait_for_log("pg_stat_activity");
    scene.settle(walpost, &[], Resends::Never);
}

#[test]
fn slot_that_is_held_beyond_the_maximum_has_everything_when_kafka_is_back() {
    let broker = Broker::borrowed();
    let kafka = broker.proxy();
    let scene = Scene::on_servers(Server::shared(MAJOR), &broker).behind_proxy(&kafka);
    let aggregate = scene.aggregate(1);
    let mut walpost = scene.start_with(&["--wal-budget-max", "1MiB"]);
    scene.insert(&aggregate, "k");
    scene.wait_for_records(1);
    kafka.set_mode(ProxyMode::Refuse);
    scene.insert(&aggregate, "k");
    scene.write_other_wal(3);
    let told = walpost.wait_for_log(HOLD_MESSAGE);
    for word in [
        "ERROR",
        "walpost skip",
        "drop-slot",
        "max_slot_wal_keep_size",
    ] {
        assert!(told.contains(word), "{word}: {told}");
    }
    assert!(walpost.is_running());
    assert!(slot_is_there(&scene));
    assert_eq!(entries(&scene), 0);
    kafka.set_mode(ProxyMode::Pass);
    scene.settle(walpost, &[], Resends::AtMost(1));
}

fn dropped_slot_is_listed_until_its_events_are_sent_again(exactly_once: bool) {
    // On a shared server, transactions of other tests would hold back the slot's catalog_xmin.
    let server = Server::private(MAJOR, "");
    let scene = Scene::on_servers(&server, Broker::shared()).in_mode(exactly_once);
    let aggregate = scene.aggregate(1);
    deliver_one(&scene, &aggregate);
    scene.insert(&aggregate, "not delivered");
    let open = scene.server.session(&scene.name);
    open.run(&format!("BEGIN; {}", scene.insert_sql(&aggregate, "open")));
    let confirmed = lsn_text(scene.confirmed());
    let said = drop_slot(&scene).expect_mentions(&[&confirmed, "wal_budget.max"]);
    let entry = scene.db.value(&format!(
        "SELECT id FROM walpost.journal WHERE action = 'drop slot' AND from_lsn = '{confirmed}' AND to_lsn > from_lsn"
    ));
    let entry = format!("entry {}", entry.expect("an entry"));
    let said = said.expect_mentions(&[&entry]);
    assert_eq!(
        said.stderr.contains("walpost checkpoint adopt"),
        exactly_once,
        "{said:?}"
    );

    // Without a slot, every command reports the dropped slot and nothing is sent.
    scene.insert(&aggregate, "between");
    let listed = [
        "was dropped",
        &confirmed,
        &entry,
        "walpost replay --dropped-slots",
    ];
    let status = || scene.invoke("status").args(["--http", "off"]).finish();
    status().expect_code(1).expect_mentions(&listed);
    scene.run().finish().expect_code(3).expect_mentions(&listed);
    scene
        .check()
        .finish()
        .expect_code(3)
        .expect_mentions(&[&entry, "walpost replay --dropped-slots"]);
    let replay = |arguments: &[&str]| {
        let all: Vec<_> = ["--dropped-slots"]
            .iter()
            .chain(arguments)
            .copied()
            .collect();
        scene.replay(&all).finish()
    };
    replay(&["--yes"])
        .expect_code(3)
        .expect_mentions(&["does not exist", "walpost init"]);
    open.run("COMMIT");
    scene.init().finish().expect_code(0);
    if exactly_once {
        let refused = scene.run().finish().expect_code(3);
        refused.expect_mentions(&["walpost checkpoint adopt"]);
        let adopt = scene.checkpoint("adopt").arg("--yes");
        adopt.finish().expect_code(0);
    }

    // With a new slot, delivery continues from that slot and the table is not copied.
    let mut walpost = scene.start_with(&["--http", "127.0.0.1:0"]);
    walpost.wait_for_log("events of a dropped slot were not sent again yet");
    scene.insert(&aggregate, "after");
    scene.wait_for_records(2);
    scene.wait_until_confirmed();
    assert_eq!(scene.records().len(), 2);
    status().expect_code(1).expect_mentions(&listed);
    let http = walpost.http();
    let open_entries = |count: f64| {
        wait_until("the metric", || {
            http.metric("walpost_dropped_slots_unreplayed", &scene.name) == Some(count)
        });
        http.pipeline()["dropped_slots"].as_array().map(Vec::len)
    };
    assert_eq!(open_entries(1.0), Some(1));
    scene.db.run("VACUUM FREEZE outbox");
    let counted = ["4 rows of table public.outbox"];
    replay(&["--dry-run"])
        .expect_code(0)
        .expect_mentions(&counted);
    status().expect_code(1);
    replay(&["--yes"]).expect_code(0).expect_mentions(&counted);
    expect_everything(&scene);
    assert_eq!(replayed(&scene), 4, "what was delivered is left out");
    assert_eq!(open_entries(0.0), Some(0));
    status().expect_code(0);
    replay(&["--yes"])
        .expect_code(2)
        .expect_mentions(&["has no dropped slot"]);
    walpost.terminate().expect_code(0);
    let again = scene.start();
    assert_eq!(again.logged("of a dropped slot were not"), 0);
    again.terminate().expect_code(0);
}

fn slot_that_is_dropped_amid_the_copy_has_all_rows_sent_again(exactly_once: bool) {
    let scene = Scene::bare();
    scene.db.run(
        "CREATE TABLE outbox (id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload jsonb)",
    );
    let aggregate = scene.aggregate(1);
    for key in ["a", "b", "c"] {
        scene.insert(&aggregate, key);
    }
    scene.init().finish().expect_code(0);
    let scene = scene.in_mode(exactly_once);
    // The slot is dropped while no broker is reachable. In at-least-once mode, the copy of the rows
    // has started by then. In exactly-once mode it has not, because it requires the checkpoint.
    drop_slot(&scene);
    new_slot(&scene);
    let walpost = scene.start();
    scene.insert(&aggregate, "after");
    scene.wait_for_records(1);
    scene.wait_until_confirmed();
    assert_eq!(scene.records().len(), 1);
    let done = scene
        .replay(&["--dropped-slots", "--yes"])
        .finish()
        .expect_code(0);
    done.expect_mentions(&["4 rows of table public.outbox: all"]);
    expect_everything(&scene);
    walpost.terminate().expect_code(0);
}

/// Walpost is killed while it delivers, while it drops the slot and while it sends events again.
/// The writers never stop.
fn killed_at_random_points_under_load_what_went_with_a_dropped_slot_is_sent_again(
    exactly_once: bool,
) {
    let scene = Scene::new().in_mode(exactly_once);
    let mut dice = fastrand::Rng::with_seed(seed());
    // Sleep instead of waiting for a condition, because the time of the kill must be random.
    let mut lives_for = |millis| Duration::from_millis(dice.u64(0..millis));
    let aggregate = scene.aggregate(2);
    let load = scene.load(&[&aggregate]);
    for _ in 0..3 {
        let walpost = scene.start();
        let before = scene.confirmed();
        wait_until("the slot to move", || scene.confirmed() > before);
        thread::sleep(lives_for(300));
        scene.kill(walpost);
        while slot_is_there(&scene) {
            let going = without_kafka(&scene, &DROP_SLOT).start();
            // Kill Walpost earlier if the slot has been dropped.
            poll_until(lives_for(3000), || (!slot_is_there(&scene)).then_some(()));
            going.kill();
        }
        thread::sleep(lives_for(300));
        new_slot(&scene);
    }
    assert!(entries(&scene) >= 3);
    let walpost = scene.start();
    let replay =
        |arguments: &[&str]| scene.replay(&[&["--dropped-slots", "--yes"], arguments].concat());
    let slow = replay(&["--rate", "100/s"]).start();
    thread::sleep(lives_for(3000));
    slow.kill();
    replay(&[]).finish().expect_code(0);
    load.stop();
    scene.wait_until_confirmed();
    walpost.terminate().expect_code(0);
    expect_everything(&scene);
    replay(&[])
        .finish()
        .expect_code(2)
        .expect_mentions(&["has no dropped slot"]);
}

/// In exactly-once mode, a second session holds the slot while Walpost waits for a new producer. It
/// must release the slot too.
#[test]
fn exactly_once_that_has_lost_its_brokers_lets_go() {
    let broker = Broker::borrowed();
    let kafka = broker.proxy();
    let server = Server::private(MAJOR, "");
    let scene = Scene::on_servers(&server, &broker)
        .behind_proxy(&kafka)
        .exactly_once();
    let aggregate = scene.aggregate(1);
    deliver_one(&scene, &aggregate);
    let file = scene.file(
        "delivery = \"exactly-once\"\nwal_budget = { max = \"20MiB\", on_max = \"drop-slot\" }\n",
    );
    let walpost = Invocation::new(["run", "--config"])
        .arg(file)
        .start_streaming();
    scene.insert(&aggregate, "k");
    scene.wait_for_records(2);
    kafka.set_mode(ProxyMode::Refuse);
    scene.insert(&aggregate, "k");
    scene.write_other_wal(25);
    walpost
        .finish()
        .expect_code(3)
        .expect_mentions(&["was dropped"]);
    assert!(!slot_is_there(&scene));
    assert_eq!(entries(&scene), 1);
    kafka.set_mode(ProxyMode::Pass);
    new_slot(&scene);
    let walpost = scene.start();
    scene
        .replay(&["--dropped-slots", "--yes"])
        .finish()
        .expect_code(0);
    expect_everything(&scene);
    walpost.terminate().expect_code(0);
}

#[test]
fn slot_that_another_instance_has_is_not_dropped() {
    let scene = Scene::new();
    let aggregate = scene.aggregate(1);
    let walpost = scene.start_and_confirm_one(&aggregate, "k");
    let mut second = without_kafka(&scene, &DROP_SLOT).start();
    second.wait_for_log("standing by");
    assert_stays("the slot", Duration::from_secs(7), || {
        scene.slot_is_active()
    });
    assert_eq!(entries(&scene), 0);
    assert!(second.is_running());
    second.terminate().expect_code(0);
    scene.settle(walpost, &[], Resends::Never);
}

#[test]
fn replays_two_dropped_slots_at_once_and_resumes_after_a_kill() {
    let scene = Scene::new();
    let aggregate = scene.aggregate(1);
    for round in 0..2 {
        for _ in 0..20 {
            scene.insert(&aggregate, &format!("round {round}"));
        }
        drop_slot(&scene);
        scene.init().finish().expect_code(0);
    }
    assert_eq!(entries(&scene), 2);
    // Rewriting the table changes the xmin of its rows.
    scene
        .db
        .run("ALTER TABLE outbox ALTER COLUMN aggregateid TYPE varchar(200)");
    let mut replay = scene
        .replay(&["--dropped-slots", "--yes", "--rate", "10/s"])
        .start();
    let said = replay.wait_for_log("replaying");
    let run = word_after(&said, "run=").to_owned();
    wait_until("a note of how far it is", || {
        scene.db.is_true(
            "SELECT EXISTS (SELECT FROM walpost.journal WHERE detail ->> 'state' = 'going')",
        )
    });
    replay.kill();
    let open = || scene.invoke("status").args(["--http", "off"]).finish();
    open().expect_code(1).expect_mentions(&["was dropped"]);
    let resume = scene
        .replay(&["--resume", &run, "--yes"])
        .finish()
        .expect_code(0);
    resume.expect_mentions(&["replayed"]);
    expect_everything(&scene);
    assert!(!open().stdout.contains("was dropped"));
    assert!(scene.records().len() < 60, "it did not begin again");
}

/// The journal entry is written before the slot is dropped. This test simulates a failure between
/// the two.
#[test]
fn recorded_slot_that_was_not_dropped_is_neither_replayed_nor_recorded_twice() {
    let scene = Scene::new();
    let aggregate = scene.aggregate(1);
    scene.insert(&aggregate, "k");
    scene.db.run(&format!(
        "INSERT INTO walpost.journal (pipeline, slot, action, from_lsn, to_lsn, detail)
         SELECT '{}', slot_name, 'drop slot', confirmed_flush_lsn, pg_current_wal_lsn(), jsonb_build_object(
             'table', 'public.outbox', 'catalog_xmin', catalog_xmin::text, 'system_id', system_identifier::text)
         FROM pg_replication_slots, pg_control_system() WHERE slot_name = '{}'",
        scene.name,
        scene.slot()
    ));
    let replay = || scene.replay(&["--dropped-slots", "--yes"]).finish();
    replay()
        .expect_code(1)
        .expect_mentions(&["it still exists", "start walpost"]);
    assert_eq!(entries(&scene), 1);
    drop_slot(&scene);
    assert_eq!(entries(&scene), 1);
    new_slot(&scene);
    replay().expect_code(0);
    expect_everything(&scene);
}

/// If a commit waits for a standby, the rows of its transaction are not visible although the commit
/// is in WAL. The open transaction here has the same effect.
#[test]
fn transactions_that_are_open_are_waited_for_before_rows_are_sent_again() {
    let scene = Scene::new();
    let aggregate = scene.aggregate(1);
    scene.insert(&aggregate, "k");
    drop_slot(&scene);
    new_slot(&scene);
    let open = scene.server.session(&scene.name);
    open.run(&format!("BEGIN; {}", scene.insert_sql(&aggregate, "k")));
    let mut replay = scene.replay(&["--dropped-slots", "--dry-run"]).start();
    assert_stays("waiting", Duration::from_secs(2), || replay.is_running());
    open.run("COMMIT");
    let done = replay.finish().expect_code(0);
    done.expect_mentions(&["2 rows of table public.outbox"]);
}

#[test]
fn rejects_impossible_settings() {
    let scene = Scene::new();
    let refused = |arguments: &[&str], texts: &[&str]| {
        let run = without_kafka(&scene, arguments);
        run.finish().expect_code(2).expect_mentions(texts);
    };
    refused(
        &["--wal-budget-warn", "much"],
        &["wal_budget.warn", "is not a size"],
    );
    refused(
        &["--wal-budget-max", "0"],
        &["wal_budget.max", "more than 0"],
    );
    refused(
        &["--wal-budget-warn", "2GiB", "--wal-budget-max", "1GiB"],
        &["wal_budget.warn", "more than wal_budget.max"],
    );
    refused(
        &["--wal-budget-on-max", "drop-slot"],
        &["wal_budget.on_max", "no wal_budget.max"],
    );
    refused(
        &["--wal-budget-on-max", "drop"],
        &["possible values: hold, drop-slot"],
    );
    let of_messages = [&DROP_SLOT[..], &["--outbox", "messages"]].concat();
    refused(
        &of_messages,
        &["wal_budget.on_max", "an outbox of messages"],
    );
    let file = scene.file("wal_budget = { max = \"1GiB\", at = \"drop-slot\" }\n");
    let run = |file| Invocation::new(["run", "--config"]).arg(file).finish();
    run(file.clone())
        .expect_code(2)
        .expect_mentions(&["unknown field `at`"]);
    let text = fs::read_to_string(&file)
        .unwrap()
        .replace("at =", "on_max =");
    fs::write(&file, text.replace("drop-slot", "drop")).unwrap();
    run(file)
        .expect_code(2)
        .expect_mentions(&["wal_budget.on_max", "drop-slot"]);
    let replay = |arguments: &[&str]| scene.replay(arguments).finish();
    replay(&["--dropped-slots", "--id", "1"]).expect_code(2);
    replay(&["--dropped-slots", "--yes"])
        .expect_code(2)
        .expect_mentions(&["has no dropped slot"]);

    // Dropping the slot is refused if the events could not be sent again later.
    let refused = |words: &[&str]| {
        let check = scene.check().args(DROP_SLOT).finish();
        for finished in [check, without_kafka(&scene, &DROP_SLOT).finish()] {
            finished.expect_code(3).expect_mentions(words);
        }
    };
    scene
        .db
        .run("ALTER TABLE outbox DROP CONSTRAINT outbox_pkey");
    refused(&["has no primary key", "wal_budget.on_max"]);
    scene
        .db
        .run("ALTER TABLE outbox ADD PRIMARY KEY (id); DROP TABLE walpost.journal");
    refused(&["walpost.journal does not exist", "walpost init"]);
    assert!(slot_is_there(&scene));
}

#[test]
fn outbox_of_messages_is_warned_of_and_held() {
    let scene = Scene::with_outbox(Outbox::Messages);
    let mut walpost = without_kafka(&scene, &["--wal-budget-max", "1"]).start();
    walpost.wait_for_log(HOLD_MESSAGE);
    assert!(slot_is_there(&scene));
    walpost.terminate().expect_code(0);
}
