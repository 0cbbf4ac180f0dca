//! `skip` moves the slot over the events that an operator chose to leave out, and over no others.

use crate::support::event::{Outbox, Writer};
use crate::support::kafka::Broker;
use crate::support::lsn::lsn_text;
use crate::support::postgres::{MAJOR, MAJORS, Server};
use crate::support::records::keys;
use crate::support::scene::Scene;
use crate::support::wait::wait_until;
use crate::support::walpost::{Finished, Invocation, config_file};

for_each_scene! {
    transaction_that_halts_is_skipped_and_what_is_around_it_is_delivered
    what_is_committed_before_the_lsn_is_skipped_and_the_rest_is_delivered
}

/// No topic can have this name.
const NO_TOPIC: &str = "not a topic";

/// Returns the position that a halted pipeline names.
fn position(halted: &Finished) -> String {
    halted
        .stderr
        .split(|c: char| c.is_whitespace())
        .map(|word| word.trim_end_matches(':'))
        .find(|word| word.len() == 28 && word.contains('/'))
        .expect("a position")
        .to_owned()
}

/// Returns the journal's entries except those of init: action, from, to, events.
fn journal(scene: &Scene) -> Vec<Vec<Option<String>>> {
    scene.db.rows(
        "SELECT action, from_lsn, to_lsn, detail ->> 'events' FROM walpost.journal
         WHERE action <> 'snapshot' ORDER BY id",
    )
}

/// Asserts that a command changes nothing and ends with this exit code and these texts.
fn refused(scene: &Scene, invocation: Invocation, code: i32, texts: &[&str]) {
    let before = (scene.confirmed(), journal(scene));
    invocation.finish().expect_code(code).expect_mentions(texts);
    assert_eq!((scene.confirmed(), journal(scene)), before, "{texts:?}");
}

/// Returns SQL that writes an event that no topic can have, which the outbox of `init` would
/// refuse.
fn insert_unroutable_sql(scene: &Scene) -> String {
    match scene.events() {
        Writer::Messages(prefix) => format!(
            "SELECT pg_logical_emit_message(true, '{prefix}', '\\x01'::bytea || uuid_send(gen_random_uuid())
                 || timestamptz_send(now()) || (SELECT string_agg(int4send(octet_length(part)) || convert_to(part, 'UTF8'), ''
                     ORDER BY n) FROM unnest('{{{NO_TOPIC},bad,Happened}}'::text[]) WITH ORDINALITY AS parts (part, n))
                 || '\\xffffffff' || '\\x01' || '{{}}');"
        ),
        _ => {
            scene.accept_any_name("outbox");
            scene.insert_sql(NO_TOPIC, "bad")
        }
    }
}

/// Commits three transactions, of which the second can't be delivered; returns its position.
fn halt_in_the_middle(scene: &Scene) -> String {
    let aggregate = scene.aggregate(1);
    scene.insert(&aggregate, "before");
    scene.db.run(&format!(
        "BEGIN; {} {} COMMIT",
        insert_unroutable_sql(scene),
        scene.insert_sql(&aggregate, "beside"),
    ));
    scene.insert(&aggregate, "after");
    let halted = scene.run().finish().expect_code(3);
    assert_eq!(keys(&scene.records()), ["before"]);
    position(&halted.expect_mentions(&["halted", NO_TOPIC]))
}

fn transaction_that_halts_is_skipped_and_what_is_around_it_is_delivered(scene: Scene) {
    let at = halt_in_the_middle(&scene);
    let from = lsn_text(scene.confirmed());
    let dry = || scene.skip(&at).arg("--dry-run");
    let shown = ["2 events would never", "can't become a record", &at];
    refused(&scene, dry(), 0, &shown);
    // There is no answer to the prompt.
    refused(&scene, scene.skip(&at), 2, &["nothing was changed"]);
    refused(
        &scene,
        scene.skip(&at).answer("outbox\n"),
        2,
        &["nothing was changed"],
    );
    let name = format!("{}\n", scene.name);
    let done = scene.skip(&at).answer(&name).finish().expect_code(0);
    done.expect_mentions(&["2 events would never be delivered", "skipped"]);
    let end = lsn_text(scene.confirmed());
    let written = ["skip", &from, &end, "2"].map(|text| Some(text.to_owned()));
    assert_eq!(journal(&scene), [written.to_vec()]);
    let history = scene.history();
    assert_eq!(
        lsn_text(history[1].end),
        end,
        "the transaction, and no more"
    );

    let walpost = scene.start();
    scene.wait_for_records(2);
    scene.wait_until_confirmed();
    walpost.terminate().expect_code(0);
    assert_eq!(keys(&scene.records()), ["before", "after"]);
    // The slot has already passed the position.
    refused(&scene, scene.skip(&at), 2, &["nothing to skip"]);
}

fn what_is_committed_before_the_lsn_is_skipped_and_the_rest_is_delivered(scene: Scene) {
    let aggregate = scene.aggregate(1);
    for key in ["first", "second", "third"] {
        scene.insert(&aggregate, key);
    }
    let end = lsn_text(scene.history()[1].end);
    let done = scene.skip(&end).arg("--yes").finish().expect_code(0);
    let topic = format!("2 for topic outbox.event.{aggregate}");
    done.expect_mentions(&["2 events would never be delivered", &topic]);
    let walpost = scene.start();
    scene.wait_for_records(1);
    scene.wait_until_confirmed();
    walpost.terminate().expect_code(0);
    assert_eq!(keys(&scene.records()), ["third"]);
}

#[test]
fn rejects_positions_that_can_not_be_skipped_and_changes_nothing() {
    let scene = Scene::new();
    let aggregate = scene.aggregate(1);
    scene.insert(&aggregate, "k");
    scene.insert(&aggregate, "k");
    let yes = |to: &str| scene.skip(to).arg("--yes");
    for text in ["", "1", "x/y", "0/1:", "0/1:x", "123456789/0", "-1/0"] {
        refused(&scene, yes(text), 2, &["expected", "--to"]);
    }
    let slot = scene.slot();
    refused(&scene, yes("0/1"), 2, &["nothing to skip", &slot]);
    refused(&scene, yes("0/1:0"), 2, &["nothing to skip", &slot]);
    refused(
        &scene,
        yes(&lsn_text(scene.confirmed())),
        2,
        &["nothing to skip"],
    );
    refused(&scene, yes("FFFFFF/0"), 2, &["WAL ends at"]);
    refused(&scene, yes("FFFFFF/0:0"), 2, &["WAL ends at"]);
    // Not the position of a row: there is no commit record at that LSN, or the transaction has
    // fewer rows.
    let end = scene.history()[0].end;
    refused(
        &scene,
        yes(&format!("{}:0", lsn_text(end - 1))),
        2,
        &["walpost-position"],
    );
    let at = {
        let walpost = scene.invoke("run").args(["--sink", "stdout"]).start();
        scene.wait_until_confirmed();
        let line = walpost.terminate().expect_code(0).stdout;
        let line: serde_json::Value = serde_json::from_str(line.lines().next().unwrap()).unwrap();
        line["headers"]["walpost-position"]
            .as_str()
            .unwrap()
            .to_owned()
    };
    refused(&scene, yes(&at), 2, &["nothing to skip"]);
    scene.insert(&aggregate, "k");
    let end = lsn_text(scene.history()[2].end);
    let oracle = format!("oracle_{}", scene.name);
    let other = |arguments: [&str; 2]| yes(&end).args(arguments);
    refused(&scene, other(["--slot", &oracle]), 3, &["test_decoding"]);
    refused(
        &scene,
        other(["--slot", "nowhere"]),
        3,
        &["nowhere", "walpost init"],
    );
    let log = ["--outbox", "messages"];
    refused(
        &scene,
        other(log),
        3,
        &["contains tables, though the outbox is of messages"],
    );
    refused(
        &scene,
        other(["--delivery", "exactly-once"]),
        3,
        &["has no checkpoint"],
    );
    refused(
        &scene,
        other(["--table", "public.other"]),
        3,
        &["public.other"],
    );

    let walpost = scene.start();
    wait_until("the slot to be taken", || scene.slot_is_active());
    refused_while_active(&scene, &end);
    walpost.terminate().expect_code(0);
    scene.insert(&aggregate, "k");
    let end = lsn_text(scene.history()[3].end);
    scene.db.run("ALTER TABLE walpost.journal RENAME TO diary");
    let confirmed = scene.confirmed();
    let finished = scene.skip(&end).arg("--yes").finish().expect_code(3);
    finished.expect_mentions(&["walpost.journal does not exist", "walpost init"]);
    assert_eq!(scene.confirmed(), confirmed);
}

/// An active slot also moves by itself.
fn refused_while_active(scene: &Scene, to: &str) {
    let ahead = lsn_text(scene.wal_position());
    for to in [to, &ahead] {
        let finished = scene.skip(to).arg("--yes").finish().expect_code(1);
        finished.expect_mentions(&["is active for PID", "stop the walpost run"]);
    }
    assert!(journal(scene).is_empty());
}

#[test]
fn every_version_of_the_server_can_skip_and_replay() {
    for major in MAJORS {
        let scene = Scene::on_servers(Server::shared(major), Broker::shared());
        scene.insert("order", "first");
        scene.insert("order", "second");
        let end = scene.history()[0].end;
        let skip = scene.skip(&lsn_text(end)).arg("--yes").finish();
        skip.expect_code(0)
            .expect_mentions(&["1 event would never be delivered"]);
        assert_eq!(scene.confirmed(), end, "{major}");
        let replay = scene
            .replay(&["--all", "--yes", "--sink", "stdout"])
            .finish();
        let sent = replay.expect_code(0).stdout;
        let sent = sent.lines().filter(|line| line.starts_with('{')).count();
        assert_eq!(sent, 2, "{major}");
    }
}

#[test]
fn pipeline_has_to_be_named_among_several() {
    let scene = Scene::new();
    let postgres = scene.conninfo();
    let text = format!(
        "[kafka]\n\"bootstrap.servers\" = \"127.0.0.1:9\"\n[[pipeline]]\nname = \"a\"\npostgres = \"{postgres}\"\n\
         [[pipeline]]\nname = \"b\"\npostgres = \"{postgres}\"\n"
    );
    let file = config_file(text);
    let skip = Invocation::new(["skip", "--to", "0/1", "--config"]).arg(file);
    refused(&scene, skip, 2, &["--pipeline"]);
}

/// `skip` is killed after the checkpoint has moved, and before the slot has.
#[test]
fn killed_before_the_slot_moves_it_is_resumed() {
    for goes_on_with_skip in [true, false] {
        let server = Server::private(MAJOR, "");
        let scene = Scene::with_outbox_on(Outbox::Table, &server, Broker::shared()).exactly_once();
        let at = halt_in_the_middle(&scene);
        let confirmed = scene.confirmed();
        let mut skip = scene.skip(&at).with_input().start();
        wait_until("the question", || {
            skip.output().contains("the rows stay in table")
        });
        // `skip` queries the slot once more before it moves it, and waits for this lock. LOCK TABLE
        // would also lock pg_database, which the view reads and which is needed to look up the
        // rights of roles.
        let other = server.session(&scene.name);
        other.run(
            "SET allow_system_table_mods = on; BEGIN;
             ALTER VIEW pg_replication_slots SET (security_barrier = false)",
        );
        skip.answer(&format!("{}\n", scene.name));
        wait_until("the checkpoint to move", || scene.safe_lsn() > confirmed);
        skip.kill();
        other.run("ROLLBACK");
        assert_eq!(scene.confirmed(), confirmed);
        assert_eq!(journal(&scene).len(), 1, "it was written down before");
        if goes_on_with_skip {
            scene.skip(&at).arg("--yes").finish().expect_code(0);
            assert_eq!(journal(&scene).len(), 1, "and is not written down again");
            assert_eq!(scene.confirmed(), scene.safe_lsn());
        }
        let walpost = scene.start();
        scene.wait_for_records(2);
        scene.wait_until_confirmed();
        walpost.terminate().expect_code(0);
        assert_eq!(keys(&scene.records()), ["before", "after"]);
    }
}

/// A standby is read-only, so the journal has no entry for this skip.
#[test]
fn transaction_is_skipped_on_a_standby_that_has_the_slot() {
    let primary = Server::private(17, "");
    let scene = Scene::on_servers(&primary, Broker::shared());
    let aggregate = scene.aggregate(1);
    let standby = primary.standby("standby", "hot_standby_feedback = on\n");
    let mut scene = scene;
    scene.reconnect();
    let (slot, name) = (scene.slot(), scene.name.clone());
    let create = format!("SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')");
    std::thread::scope(|scope| {
        // The standby creates the slot once the primary has logged its running transactions.
        let creating = scope.spawn(|| standby.session(&name).run(&create));
        wait_until("the standby to have the slot", || {
            scene.db.run("SELECT pg_log_standby_snapshot()");
            creating.is_finished()
        });
    });
    scene.accept_any_name("outbox");
    scene.insert(NO_TOPIC, "k");
    scene.insert(&aggregate, "after");
    let end = scene.db.value("SELECT pg_current_wal_lsn()").unwrap();
    let session = standby.session("postgres");
    wait_until("the standby to have replayed it", || {
        let replayed = format!("SELECT (pg_last_wal_replay_lsn() >= '{end}')::int");
        session.number(&replayed) == 1
    });
    scene.fail_over(&standby, []);
    let run = || scene.run().args(["--snapshot", "never"]);
    let halted = run().finish().expect_code(3).expect_mentions(&["halted"]);
    let skipped = scene.skip(&position(&halted)).arg("--yes").finish();
    skipped
        .expect_code(0)
        .expect_mentions(&["1 event", "standby in recovery"]);
    let walpost = run().start_streaming();
    assert_eq!(keys(&scene.wait_for_records(1)), ["after"]);
    walpost.terminate().expect_code(0);
}
