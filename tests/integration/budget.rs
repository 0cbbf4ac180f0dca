//! The WAL budget: what Walpost does when the slot retains more WAL than allowed, and how the
//! events of a dropped slot are replayed.

use std::collections::HashSet;
use std::fs;
use std::thread;
use std::time::Duration;

use crate::support::checker::Resends;
use crate::support::event::Outbox;
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::load::seed;
use crate::support::lsn::lsn_text;
use crate::support::postgres::{MAJOR, Server};
use crate::support::proxy::ProxyMode;
use crate::support::wait::{assert_stays, poll_until, wait_until};
use crate::support::walpost::{Finished, Invocation, word_after};

in_both_modes! {
    lists_a_dropped_slot_until_its_events_are_replayed
    replays_all_rows_if_the_slot_is_dropped_during_the_snapshot
    replays_events_lost_with_dropped_slots_even_if_killed_under_load
}

/// Flags that set a WAL budget of 1 byte, which every slot exceeds, so Walpost drops the slot
/// immediately.
pub(crate) const DROP_SLOT: [&str; 4] =
    ["--wal-budget-max", "1", "--wal-budget-on-max", "drop-slot"];

const WARN_MESSAGE: &str = "the slot retains more WAL than wal_budget.warn";
const HOLD_MESSAGE: &str = "the slot retains more WAL than wal_budget.max, but is not dropped";
const RECOVERED_MESSAGE: &str = "the slot is within its WAL budget again";

/// Prepares `walpost run` with the fixture's slot and the given brokers.
fn with_brokers(fixture: &Fixture, brokers: &str, arguments: &[&str]) -> Invocation {
    let mode: &[&str] = match fixture.is_exactly_once() {
        true => &["--exactly-once"],
        false => &[],
    };
    fixture
        .invoke("run")
        .args(["--kafka", brokers])
        .args(mode)
        .args(arguments)
}

/// Prepares `walpost run` with the fixture's slot and a broker address at which nothing is
/// listening.
fn without_kafka(fixture: &Fixture, arguments: &[&str]) -> Invocation {
    with_brokers(fixture, "127.0.0.1:9", arguments)
}

/// Runs Walpost until it drops the slot, and returns Walpost's output.
pub(crate) fn drop_slot(fixture: &Fixture) -> Finished {
    let finished = without_kafka(fixture, &DROP_SLOT).finish().expect_code(3);
    assert!(!slot_is_there(fixture));
    finished.expect_mentions(&[
        "was dropped",
        "walpost init",
        "walpost replay --dropped-slots",
    ])
}

fn slot_is_there(fixture: &Fixture) -> bool {
    let slot = fixture.slot();
    fixture.db.is_true(&format!(
        "SELECT EXISTS (SELECT FROM pg_replication_slots WHERE slot_name = '{slot}')"
    ))
}

/// Returns how many journal entries record a dropped slot.
fn entries(fixture: &Fixture) -> i64 {
    let sql = "SELECT count(*) FROM walpost.journal WHERE action = 'drop slot'";
    fixture.db.number(sql)
}

/// Creates a new slot. In exactly-once mode, also adopts a checkpoint for it.
pub(crate) fn new_slot(fixture: &Fixture) {
    fixture.init().finish().expect_code(0);
    if fixture.is_exactly_once() {
        let adopt = fixture.checkpoint("adopt").arg("--yes");
        adopt.finish().expect_code(0);
    }
}

fn ids(fixture: &Fixture) -> HashSet<String> {
    let records = fixture.records();
    records.iter().map(|r| r.header("id").to_owned()).collect()
}

/// Asserts that every event ever committed is in Kafka.
pub(crate) fn expect_everything(fixture: &Fixture) {
    let delivered = ids(fixture);
    for event in fixture.history() {
        assert!(delivered.contains(&event.id), "{} is missing", event.id);
    }
}

fn replayed(fixture: &Fixture) -> usize {
    let records = fixture.records();
    let is_replayed =
        |r: &&crate::support::records::Record| r.header_names().contains(&"walpost-replay");
    records.iter().filter(is_replayed).count()
}

/// Delivers one event, and waits until the slot's catalog_xmin has passed the event's transaction.
fn deliver_one(fixture: &Fixture, aggregate: &str) {
    let walpost = fixture.start_and_confirm_one(aggregate, "delivered");
    wait_until("catalog_xmin to pass it", || {
        fixture.db.run("CHECKPOINT");
        fixture.db.is_true(&format!(
            "SELECT catalog_xmin::text::bigint > (SELECT max(xmin::text::bigint) FROM outbox)
             FROM pg_replication_slots WHERE slot_name = '{}'",
            fixture.slot()
        ))
    });
    fixture.wait_until_confirmed();
    walpost.terminate().expect_code(0);
}

#[test]
fn logs_the_wal_warning_once_and_its_resolution_once() {
    let server = Server::private(MAJOR, "");
    let fixture = Fixture::on_servers(&server, Broker::shared());
    let aggregate = fixture.aggregate(1);
    let mut walpost = fixture.start_with(&["--wal-budget-warn", "4MiB"]);
    // Everything has been delivered, but an open transaction makes the slot retain WAL.
    let open = server.session(&fixture.name);
    open.run(&format!("BEGIN; {}", fixture.insert_sql(&aggregate, "k")));
    fixture.write_other_wal(6);
    fixture.wait_until_confirmed();
    walpost.wait_for_log(WARN_MESSAGE);
    open.run("COMMIT");
    wait_until("the end of the warning", || {
        fixture.db.run("CHECKPOINT");
        walpost.logged(RECOVERED_MESSAGE) > 0
    });
    assert_eq!(walpost.logged(WARN_MESSAGE), 1, "{}", walpost.log());
    assert_eq!(walpost.logged(RECOVERED_MESSAGE), 1, "{}", walpost.log());
    walpost.wait_for_log("pg_stat_activity");
    fixture.settle(walpost, &[], Resends::Never);
}

#[test]
fn keeps_the_slot_if_the_wal_maximum_is_exceeded_and_loses_no_event() {
    let broker = Broker::borrowed();
    let kafka = broker.proxy();
    let fixture = Fixture::on_servers(Server::shared(MAJOR), &broker).behind_proxy(&kafka);
    let aggregate = fixture.aggregate(1);
    let mut walpost = fixture.start_with(&["--wal-budget-max", "1MiB"]);
    fixture.insert(&aggregate, "k");
    fixture.wait_for_records(1);
    kafka.set_mode(ProxyMode::Refuse);
    fixture.insert(&aggregate, "k");
    fixture.write_other_wal(3);
    let line = walpost.wait_for_log(HOLD_MESSAGE);
    for word in [
        "ERROR",
        "walpost skip",
        "drop-slot",
        "max_slot_wal_keep_size",
    ] {
        assert!(line.contains(word), "{word}: {line}");
    }
    assert!(walpost.is_running());
    assert!(slot_is_there(&fixture));
    assert_eq!(entries(&fixture), 0);
    kafka.set_mode(ProxyMode::Pass);
    fixture.settle(walpost, &[], Resends::AtMost(1));
}

fn lists_a_dropped_slot_until_its_events_are_replayed(exactly_once: bool) {
    // Uses a private server: on a shared one, transactions of other tests would hold back the
    // slot's catalog_xmin.
    let server = Server::private(MAJOR, "");
    let fixture = Fixture::on_servers(&server, Broker::shared()).in_mode(exactly_once);
    let aggregate = fixture.aggregate(1);
    deliver_one(&fixture, &aggregate);
    fixture.insert(&aggregate, "not delivered");
    let open = fixture.server.session(&fixture.name);
    open.run(&format!(
        "BEGIN; {}",
        fixture.insert_sql(&aggregate, "open")
    ));
    let confirmed = lsn_text(fixture.confirmed());
    let output = drop_slot(&fixture).expect_mentions(&[&confirmed, "wal_budget.max"]);
    let entry = fixture.db.value(&format!(
        "SELECT id FROM walpost.journal WHERE action = 'drop slot' AND from_lsn = '{confirmed}' AND to_lsn > from_lsn"
    ));
    let entry = format!("entry {}", entry.expect("an entry"));
    let output = output.expect_mentions(&[&entry]);
    assert_eq!(
        output.stderr.contains("walpost checkpoint adopt"),
        exactly_once,
        "{output:?}"
    );

    // While there is no slot, every command reports the dropped slot, and nothing is sent.
    fixture.insert(&aggregate, "between");
    let listed = [
        "was dropped",
        &confirmed,
        &entry,
        "walpost replay --dropped-slots",
    ];
    let status = || fixture.invoke("status").args(["--http", "off"]).finish();
    status().expect_code(1).expect_mentions(&listed);
    fixture
        .run()
        .finish()
        .expect_code(3)
        .expect_mentions(&listed);
    fixture
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
        fixture.replay(&all).finish()
    };
    replay(&["--yes"])
        .expect_code(3)
        .expect_mentions(&["does not exist", "walpost init"]);
    open.run("COMMIT");
    fixture.init().finish().expect_code(0);
    if exactly_once {
        let refused = fixture.run().finish().expect_code(3);
        refused.expect_mentions(&["walpost checkpoint adopt"]);
        let adopt = fixture.checkpoint("adopt").arg("--yes");
        adopt.finish().expect_code(0);
    }

    // After a new slot has been created, delivery starts at the slot's position, without copying
    // the table first.
    let mut walpost = fixture.start_with(&["--http", "127.0.0.1:0"]);
    walpost.wait_for_log("events of a dropped slot have not been sent again yet");
    fixture.insert(&aggregate, "after");
    fixture.wait_for_records(2);
    fixture.wait_until_confirmed();
    assert_eq!(fixture.records().len(), 2);
    status().expect_code(1).expect_mentions(&listed);
    let http = walpost.http();
    let open_entries = |count: f64| {
        wait_until("the metric", || {
            http.metric("walpost_dropped_slots_unreplayed", &fixture.name) == Some(count)
        });
        http.pipeline()["dropped_slots"].as_array().map(Vec::len)
    };
    assert_eq!(open_entries(1.0), Some(1));
    fixture.db.run("VACUUM FREEZE outbox");
    let counted = ["4 rows of table public.outbox"];
    replay(&["--dry-run"])
        .expect_code(0)
        .expect_mentions(&counted);
    status().expect_code(1);
    replay(&["--yes"]).expect_code(0).expect_mentions(&counted);
    expect_everything(&fixture);
    assert_eq!(replayed(&fixture), 4, "delivered events are not replayed");
    assert_eq!(open_entries(0.0), Some(0));
    status().expect_code(0);
    replay(&["--yes"])
        .expect_code(2)
        .expect_mentions(&["has no dropped slot"]);
    walpost.terminate().expect_code(0);
    let again = fixture.start();
    assert_eq!(again.logged("have not been sent again yet"), 0);
    again.terminate().expect_code(0);
}

fn replays_all_rows_if_the_slot_is_dropped_during_the_snapshot(exactly_once: bool) {
    let fixture = Fixture::bare();
    fixture.db.run(
        "CREATE TABLE outbox (id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload jsonb)",
    );
    let aggregate = fixture.aggregate(1);
    for key in ["a", "b", "c"] {
        fixture.insert(&aggregate, key);
    }
    fixture.init().finish().expect_code(0);
    let fixture = fixture.in_mode(exactly_once);
    // The slot is dropped while no broker is reachable. By then, at-least-once mode has started to
    // copy the rows that are older than the slot. In exactly-once mode, no copy has started,
    // because Walpost must read the checkpoint first.
    drop_slot(&fixture);
    new_slot(&fixture);
    let walpost = fixture.start();
    fixture.insert(&aggregate, "after");
    fixture.wait_for_records(1);
    fixture.wait_until_confirmed();
    assert_eq!(fixture.records().len(), 1);
    let done = fixture
        .replay(&["--dropped-slots", "--yes"])
        .finish()
        .expect_code(0);
    done.expect_mentions(&["4 rows of table public.outbox: all"]);
    expect_everything(&fixture);
    walpost.terminate().expect_code(0);
}

/// Walpost is killed while it delivers events, drops the slot and replays events. The writers never
/// pause.
fn replays_events_lost_with_dropped_slots_even_if_killed_under_load(exactly_once: bool) {
    let fixture = Fixture::new().in_mode(exactly_once);
    let mut rng = fastrand::Rng::with_seed(seed());
    // Sleep instead of waiting for a condition, because the time of the kill must be random.
    let mut lives_for = |millis| Duration::from_millis(rng.u64(0..millis));
    let aggregate = fixture.aggregate(2);
    let load = fixture.load(&[&aggregate]);
    for _ in 0..3 {
        let walpost = fixture.start();
        let before = fixture.confirmed();
        wait_until("the slot to move", || fixture.confirmed() > before);
        thread::sleep(lives_for(300));
        fixture.kill(walpost);
        while slot_is_there(&fixture) {
            let going = without_kafka(&fixture, &DROP_SLOT).start();
            // Stop waiting as soon as the slot has been dropped.
            poll_until(lives_for(3000), || (!slot_is_there(&fixture)).then_some(()));
            going.kill();
        }
        thread::sleep(lives_for(300));
        new_slot(&fixture);
    }
    assert!(entries(&fixture) >= 3);
    let walpost = fixture.start();
    let replay =
        |arguments: &[&str]| fixture.replay(&[&["--dropped-slots", "--yes"], arguments].concat());
    let slow = replay(&["--rate", "100/s"]).start();
    thread::sleep(lives_for(3000));
    slow.kill();
    replay(&[]).finish().expect_code(0);
    load.stop();
    fixture.wait_until_confirmed();
    walpost.terminate().expect_code(0);
    expect_everything(&fixture);
    replay(&[])
        .finish()
        .expect_code(2)
        .expect_mentions(&["has no dropped slot"]);
}

/// In exactly-once mode, a second session holds the slot while Walpost waits for a new producer.
/// Walpost must also end this session before it can drop the slot.
#[test]
fn drops_the_slot_in_exactly_once_mode_while_brokers_are_unavailable() {
    let broker = Broker::borrowed();
    let kafka = broker.proxy();
    let server = Server::private(MAJOR, "");
    let fixture = Fixture::on_servers(&server, &broker)
        .behind_proxy(&kafka)
        .exactly_once();
    let aggregate = fixture.aggregate(1);
    deliver_one(&fixture, &aggregate);
    let file = fixture.file(
        "delivery = \"exactly-once\"\nwal_budget = { max = \"20MiB\", on_max = \"drop-slot\" }\n",
    );
    let walpost = Invocation::new(["run", "--config"])
        .arg(file)
        .start_streaming();
    fixture.insert(&aggregate, "k");
    fixture.wait_for_records(2);
    kafka.set_mode(ProxyMode::Refuse);
    fixture.insert(&aggregate, "k");
    fixture.write_other_wal(25);
    walpost
        .finish()
        .expect_code(3)
        .expect_mentions(&["was dropped"]);
    assert!(!slot_is_there(&fixture));
    assert_eq!(entries(&fixture), 1);
    kafka.set_mode(ProxyMode::Pass);
    new_slot(&fixture);
    let walpost = fixture.start();
    fixture
        .replay(&["--dropped-slots", "--yes"])
        .finish()
        .expect_code(0);
    expect_everything(&fixture);
    walpost.terminate().expect_code(0);
}

#[test]
fn does_not_drop_a_slot_held_by_another_instance() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_and_confirm_one(&aggregate, "k");
    let mut second = without_kafka(&fixture, &DROP_SLOT).start();
    second.wait_for_log("standing by");
    assert_stays("the slot", Duration::from_secs(7), || {
        fixture.slot_is_active()
    });
    assert_eq!(entries(&fixture), 0);
    assert!(second.is_running());
    second.terminate().expect_code(0);
    fixture.settle(walpost, &[], Resends::Never);
}

#[test]
fn replays_events_of_two_dropped_slots_together_and_resumes_after_a_kill() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    for round in 0..2 {
        for _ in 0..20 {
            fixture.insert(&aggregate, &format!("round {round}"));
        }
        drop_slot(&fixture);
        fixture.init().finish().expect_code(0);
    }
    assert_eq!(entries(&fixture), 2);
    // Rewriting the table gives its rows a new xmin, so the replay can't select rows by their
    // transaction.
    fixture
        .db
        .run("ALTER TABLE outbox ALTER COLUMN aggregateid TYPE varchar(200)");
    let mut replay = fixture
        .replay(&["--dropped-slots", "--yes", "--rate", "10/s"])
        .start();
    let line = replay.wait_for_log("replaying");
    let run = word_after(&line, "run=").to_owned();
    wait_until("a note of how far it is", || {
        fixture.db.is_true(
            "SELECT EXISTS (SELECT FROM walpost.journal WHERE detail ->> 'state' = 'going')",
        )
    });
    replay.kill();
    let open = || fixture.invoke("status").args(["--http", "off"]).finish();
    open().expect_code(1).expect_mentions(&["was dropped"]);
    let resume = fixture
        .replay(&["--resume", &run, "--yes"])
        .finish()
        .expect_code(0);
    resume.expect_mentions(&["replayed"]);
    expect_everything(&fixture);
    assert!(!open().stdout.contains("was dropped"));
    assert!(
        fixture.records().len() < 60,
        "the replay did not start again"
    );
}

/// Walpost writes the journal entry before it drops the slot. This test creates the state after a
/// crash between these two steps.
#[test]
fn ignores_a_journal_entry_for_a_slot_that_was_not_dropped() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    fixture.insert(&aggregate, "k");
    fixture.db.run(&format!(
        "INSERT INTO walpost.journal (pipeline, slot, action, from_lsn, to_lsn, detail)
         SELECT '{}', slot_name, 'drop slot', confirmed_flush_lsn, pg_current_wal_lsn(), jsonb_build_object(
             'table', 'public.outbox', 'catalog_xmin', catalog_xmin::text, 'system_id', system_identifier::text)
         FROM pg_replication_slots, pg_control_system() WHERE slot_name = '{}'",
        fixture.name,
        fixture.slot()
    ));
    let replay = || fixture.replay(&["--dropped-slots", "--yes"]).finish();
    replay()
        .expect_code(1)
        .expect_mentions(&["still exists (confirmed up to", "Start walpost"]);
    assert_eq!(entries(&fixture), 1);
    drop_slot(&fixture);
    assert_eq!(entries(&fixture), 1);
    new_slot(&fixture);
    replay().expect_code(0);
    expect_everything(&fixture);
}

/// While a transaction waits for a synchronous standby to confirm its commit, its rows are not
/// visible yet, although WAL already contains the commit record. An open transaction has the same
/// effect, so this test uses one.
#[test]
fn replay_waits_for_open_transactions() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    fixture.insert(&aggregate, "k");
    drop_slot(&fixture);
    new_slot(&fixture);
    let open = fixture.server.session(&fixture.name);
    open.run(&format!("BEGIN; {}", fixture.insert_sql(&aggregate, "k")));
    let mut replay = fixture.replay(&["--dropped-slots", "--dry-run"]).start();
    assert_stays("waiting", Duration::from_secs(2), || replay.is_running());
    open.run("COMMIT");
    let done = replay.finish().expect_code(0);
    done.expect_mentions(&["2 rows of table public.outbox"]);
}

#[test]
fn rejects_invalid_wal_budget_settings() {
    let fixture = Fixture::new();
    let refused = |arguments: &[&str], texts: &[&str]| {
        let run = without_kafka(&fixture, arguments);
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
        &["wal_budget.on_max", "without wal_budget.max"],
    );
    refused(
        &["--wal-budget-on-max", "drop"],
        &["possible values: hold, drop-slot"],
    );
    let of_messages = [&DROP_SLOT[..], &["--outbox", "messages"]].concat();
    refused(
        &of_messages,
        &[
            "wal_budget.on_max",
            "an outbox that uses logical decoding messages",
        ],
    );
    let file = fixture.file("wal_budget = { max = \"1GiB\", at = \"drop-slot\" }\n");
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
    let replay = |arguments: &[&str]| fixture.replay(arguments).finish();
    replay(&["--dropped-slots", "--id", "1"]).expect_code(2);
    replay(&["--dropped-slots", "--yes"])
        .expect_code(2)
        .expect_mentions(&["has no dropped slot"]);

    // Walpost does not drop the slot if the undelivered events could not be replayed later.
    let refused = |words: &[&str]| {
        let check = fixture.check().args(DROP_SLOT).finish();
        for finished in [check, without_kafka(&fixture, &DROP_SLOT).finish()] {
            finished.expect_code(3).expect_mentions(words);
        }
    };
    fixture
        .db
        .run("ALTER TABLE outbox DROP CONSTRAINT outbox_pkey");
    refused(&["has no primary key", "wal_budget.on_max"]);
    fixture
        .db
        .run("ALTER TABLE outbox ADD PRIMARY KEY (id); DROP TABLE walpost.journal");
    refused(&["walpost.journal does not exist", "walpost init"]);
    assert!(slot_is_there(&fixture));
}

#[test]
fn keeps_the_slot_and_warns_when_a_message_outbox_exceeds_its_wal_budget() {
    let fixture = Fixture::with_outbox(Outbox::Messages);
    let mut walpost = without_kafka(&fixture, &["--wal-budget-max", "1"]).start();
    walpost.wait_for_log(HOLD_MESSAGE);
    assert!(slot_is_there(&fixture));
    walpost.terminate().expect_code(0);
}
