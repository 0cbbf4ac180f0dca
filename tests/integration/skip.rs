//! `walpost skip` moves the slot past the events that an operator chose to skip, and past no other
//! events.

use crate::support::event::{EventWriter, Outbox};
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::lsn::lsn_text;
use crate::support::postgres::{MAJOR, MAJORS, Server};
use crate::support::records::keys;
use crate::support::wait::wait_until;
use crate::support::walpost::{Finished, Invocation, config_file};

for_each_fixture! {
    skips_the_transaction_that_halts_and_delivers_those_around_it
    skips_everything_committed_before_the_lsn_and_delivers_the_rest
}

/// A name that is not valid for a topic.
const INVALID_TOPIC: &str = "not a topic";

/// Returns the position in the error of a halted pipeline.
fn position(halted: &Finished) -> String {
    halted
        .stderr
        .split(|c: char| c.is_whitespace())
        .map(|word| word.trim_end_matches(':'))
        .find(|word| word.len() == 28 && word.contains('/'))
        .expect("a position")
        .to_owned()
}

/// Returns the action, from, to and events of the journal's entries, except those of `init`.
fn journal(fixture: &Fixture) -> Vec<Vec<Option<String>>> {
    fixture.db.rows(
        "SELECT action, from_lsn, to_lsn, detail ->> 'events' FROM walpost.journal
         WHERE action <> 'snapshot' ORDER BY id",
    )
}

/// Asserts that a command changes nothing and exits with this code and these texts.
fn refused(fixture: &Fixture, invocation: Invocation, code: i32, texts: &[&str]) {
    let before = (fixture.confirmed(), journal(fixture));
    invocation.finish().expect_code(code).expect_mentions(texts);
    assert_eq!((fixture.confirmed(), journal(fixture)), before, "{texts:?}");
}

/// Returns SQL that writes an event with an invalid topic name, which a table created by `init`
/// would reject.
fn insert_unroutable_sql(fixture: &Fixture) -> String {
    match fixture.events() {
        EventWriter::Messages(prefix) => format!(
            "SELECT pg_logical_emit_message(true, '{prefix}', '\\x01'::bytea || uuid_send(gen_random_uuid())
                 || timestamptz_send(now()) || (SELECT string_agg(int4send(octet_length(part)) || convert_to(part, 'UTF8'), ''
                     ORDER BY n) FROM unnest('{{{INVALID_TOPIC},bad,Happened}}'::text[]) WITH ORDINALITY AS parts (part, n))
                 || '\\xffffffff' || '\\x01' || '{{}}');"
        ),
        _ => {
            fixture.accept_any_name("outbox");
            fixture.insert_sql(INVALID_TOPIC, "bad")
        }
    }
}

/// Commits three transactions, the second of which can't be delivered. Returns the position of the
/// second one.
fn halt_in_the_middle(fixture: &Fixture) -> String {
    let aggregate = fixture.aggregate(1);
    fixture.insert(&aggregate, "before");
    fixture.db.run(&format!(
        "BEGIN; {} {} COMMIT",
        insert_unroutable_sql(fixture),
        fixture.insert_sql(&aggregate, "beside"),
    ));
    fixture.insert(&aggregate, "after");
    let halted = fixture.run().finish().expect_code(3);
    assert_eq!(keys(&fixture.records()), ["before"]);
    position(&halted.expect_mentions(&["halted", INVALID_TOPIC]))
}

fn skips_the_transaction_that_halts_and_delivers_those_around_it(fixture: Fixture) {
    let position = halt_in_the_middle(&fixture);
    let from = lsn_text(fixture.confirmed());
    let dry = || fixture.skip(&position).arg("--dry-run");
    let shown = [
        "2 events would never",
        "can't be converted to a record",
        &position,
    ];
    refused(&fixture, dry(), 0, &shown);
    // The prompt is not answered.
    refused(
        &fixture,
        fixture.skip(&position),
        2,
        &["nothing was changed"],
    );
    refused(
        &fixture,
        fixture.skip(&position).answer("outbox\n"),
        2,
        &["nothing was changed"],
    );
    let name = format!("{}\n", fixture.name);
    let done = fixture
        .skip(&position)
        .answer(&name)
        .finish()
        .expect_code(0);
    done.expect_mentions(&["2 events would never be delivered", "skipped"]);
    let end = lsn_text(fixture.confirmed());
    let written = ["skip", &from, &end, "2"].map(|text| Some(text.to_owned()));
    assert_eq!(journal(&fixture), [written.to_vec()]);
    let history = fixture.history();
    assert_eq!(lsn_text(history[1].end), end, "only the transaction");

    let walpost = fixture.start();
    fixture.wait_for_records(2);
    fixture.wait_until_confirmed();
    walpost.terminate().expect_code(0);
    assert_eq!(keys(&fixture.records()), ["before", "after"]);
    // The slot has already passed the position.
    refused(&fixture, fixture.skip(&position), 2, &["nothing to skip"]);
}

fn skips_everything_committed_before_the_lsn_and_delivers_the_rest(fixture: Fixture) {
    let aggregate = fixture.aggregate(1);
    for key in ["first", "second", "third"] {
        fixture.insert(&aggregate, key);
    }
    let end = lsn_text(fixture.history()[1].end);
    let done = fixture.skip(&end).arg("--yes").finish().expect_code(0);
    let topic = format!("2 for topic outbox.event.{aggregate}");
    done.expect_mentions(&["2 events would never be delivered", &topic]);
    let walpost = fixture.start();
    fixture.wait_for_records(1);
    fixture.wait_until_confirmed();
    walpost.terminate().expect_code(0);
    assert_eq!(keys(&fixture.records()), ["third"]);
}

#[test]
fn rejects_positions_that_cannot_be_skipped_and_changes_nothing() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    fixture.insert(&aggregate, "k");
    fixture.insert(&aggregate, "k");
    let yes = |to: &str| fixture.skip(to).arg("--yes");
    for text in ["", "1", "x/y", "0/1:", "0/1:x", "123456789/0", "-1/0"] {
        refused(&fixture, yes(text), 2, &["expected", "--to"]);
    }
    let slot = fixture.slot();
    refused(&fixture, yes("0/1"), 2, &["nothing to skip", &slot]);
    refused(&fixture, yes("0/1:0"), 2, &["nothing to skip", &slot]);
    refused(
        &fixture,
        yes(&lsn_text(fixture.confirmed())),
        2,
        &["nothing to skip"],
    );
    refused(&fixture, yes("FFFFFF/0"), 2, &["is after the end of WAL"]);
    refused(&fixture, yes("FFFFFF/0:0"), 2, &["is after the end of WAL"]);
    // No row has this position: the LSN is not that of a commit record, or the transaction has
    // fewer rows.
    let end = fixture.history()[0].end;
    refused(
        &fixture,
        yes(&format!("{}:0", lsn_text(end - 1))),
        2,
        &["walpost-position"],
    );
    let position = {
        let walpost = fixture.invoke("run").args(["--sink", "stdout"]).start();
        fixture.wait_until_confirmed();
        let line = walpost.terminate().expect_code(0).stdout;
        let line: serde_json::Value = serde_json::from_str(line.lines().next().unwrap()).unwrap();
        line["headers"]["walpost-position"]
            .as_str()
            .unwrap()
            .to_owned()
    };
    refused(&fixture, yes(&position), 2, &["nothing to skip"]);
    fixture.insert(&aggregate, "k");
    let end = lsn_text(fixture.history()[2].end);
    let oracle = format!("oracle_{}", fixture.name);
    let other = |arguments: [&str; 2]| yes(&end).args(arguments);
    refused(&fixture, other(["--slot", &oracle]), 3, &["test_decoding"]);
    refused(
        &fixture,
        other(["--slot", "nowhere"]),
        3,
        &["nowhere", "walpost init"],
    );
    let log = ["--outbox", "messages"];
    refused(
        &fixture,
        other(log),
        3,
        &["contains tables, but the outbox uses logical messages"],
    );
    refused(
        &fixture,
        other(["--delivery", "exactly-once"]),
        3,
        &["has no checkpoint"],
    );
    refused(
        &fixture,
        other(["--table", "public.other"]),
        3,
        &["public.other"],
    );

    let walpost = fixture.start();
    wait_until("the slot to be acquired", || fixture.slot_is_active());
    refused_while_active(&fixture, &end);
    walpost.terminate().expect_code(0);
    fixture.insert(&aggregate, "k");
    let end = lsn_text(fixture.history()[3].end);
    fixture
        .db
        .run("ALTER TABLE walpost.journal RENAME TO diary");
    let confirmed = fixture.confirmed();
    let finished = fixture.skip(&end).arg("--yes").finish().expect_code(3);
    finished.expect_mentions(&["walpost.journal does not exist", "walpost init"]);
    assert_eq!(fixture.confirmed(), confirmed);
}

/// An active slot also advances by itself.
fn refused_while_active(fixture: &Fixture, to: &str) {
    let ahead = lsn_text(fixture.wal_position());
    for to in [to, &ahead] {
        let finished = fixture.skip(to).arg("--yes").finish().expect_code(1);
        finished.expect_mentions(&["is active for PID", "Stop the walpost run"]);
    }
    assert!(journal(fixture).is_empty());
}

#[test]
fn skips_and_replays_on_every_server_version() {
    for major in MAJORS {
        let fixture = Fixture::on_servers(Server::shared(major), Broker::shared());
        fixture.insert("order", "first");
        fixture.insert("order", "second");
        let end = fixture.history()[0].end;
        let skip = fixture.skip(&lsn_text(end)).arg("--yes").finish();
        skip.expect_code(0)
            .expect_mentions(&["1 event would never be delivered"]);
        assert_eq!(fixture.confirmed(), end, "{major}");
        let replay = fixture
            .replay(&["--all", "--yes", "--sink", "stdout"])
            .finish();
        let sent = replay.expect_code(0).stdout;
        let sent = sent.lines().filter(|line| line.starts_with('{')).count();
        assert_eq!(sent, 2, "{major}");
    }
}

#[test]
fn requires_a_pipeline_name_if_several_are_defined() {
    let fixture = Fixture::new();
    let postgres = fixture.conninfo();
    let text = format!(
        "[kafka]\n\"bootstrap.servers\" = \"127.0.0.1:9\"\n[[pipeline]]\nname = \"a\"\npostgres = \"{postgres}\"\n\
         [[pipeline]]\nname = \"b\"\npostgres = \"{postgres}\"\n"
    );
    let file = config_file(text);
    let skip = Invocation::new(["skip", "--to", "0/1", "--config"]).arg(file);
    refused(&fixture, skip, 2, &["--pipeline"]);
}

/// `skip` is killed after it has moved the checkpoint and before it moves the slot.
#[test]
fn resumes_a_skip_that_was_killed_before_it_moved_the_slot() {
    for goes_on_with_skip in [true, false] {
        let server = Server::private(MAJOR, "");
        let fixture =
            Fixture::with_outbox_on(Outbox::Table, &server, Broker::shared()).exactly_once();
        let position = halt_in_the_middle(&fixture);
        let confirmed = fixture.confirmed();
        let mut skip = fixture.skip(&position).with_input().start();
        wait_until("the question", || {
            skip.output().contains("the rows stay in table")
        });
        // `skip` queries the slot again before it moves the slot, and this query waits for the lock
        // below. LOCK TABLE would also lock pg_database, which the view reads and which is needed
        // to look up the privileges of roles.
        let other = server.session(&fixture.name);
        other.run(
            "SET allow_system_table_mods = on; BEGIN;
             ALTER VIEW pg_replication_slots SET (security_barrier = false)",
        );
        skip.answer(&format!("{}\n", fixture.name));
        wait_until("the checkpoint to move", || fixture.safe_lsn() > confirmed);
        skip.kill();
        other.run("ROLLBACK");
        assert_eq!(fixture.confirmed(), confirmed);
        assert_eq!(journal(&fixture).len(), 1, "the skip was recorded before");
        if goes_on_with_skip {
            fixture.skip(&position).arg("--yes").finish().expect_code(0);
            assert_eq!(journal(&fixture).len(), 1, "the skip is not recorded again");
            assert_eq!(fixture.confirmed(), fixture.safe_lsn());
        }
        let walpost = fixture.start();
        fixture.wait_for_records(2);
        fixture.wait_until_confirmed();
        walpost.terminate().expect_code(0);
        assert_eq!(keys(&fixture.records()), ["before", "after"]);
    }
}

/// A standby is read-only, so the journal has no entry for this skip.
#[test]
fn skips_a_transaction_on_a_standby_that_has_the_slot() {
    let primary = Server::private(17, "");
    let fixture = Fixture::on_servers(&primary, Broker::shared());
    let aggregate = fixture.aggregate(1);
    let standby = primary.standby("standby", "hot_standby_feedback = on\n");
    let mut fixture = fixture;
    fixture.reconnect();
    let (slot, name) = (fixture.slot(), fixture.name.clone());
    let create = format!("SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')");
    std::thread::scope(|scope| {
        // The standby creates the slot after the primary has logged its running transactions.
        let creating = scope.spawn(|| standby.session(&name).run(&create));
        wait_until("the standby to have the slot", || {
            fixture.db.run("SELECT pg_log_standby_snapshot()");
            creating.is_finished()
        });
    });
    fixture.accept_any_name("outbox");
    fixture.insert(INVALID_TOPIC, "k");
    fixture.insert(&aggregate, "after");
    let end = fixture.db.value("SELECT pg_current_wal_lsn()").unwrap();
    let session = standby.session("postgres");
    wait_until("the standby to have replayed the commit", || {
        let replayed = format!("SELECT (pg_last_wal_replay_lsn() >= '{end}')::int");
        session.number(&replayed) == 1
    });
    fixture.fail_over(&standby, []);
    let run = || fixture.run().args(["--snapshot", "never"]);
    let halted = run().finish().expect_code(3).expect_mentions(&["halted"]);
    let skipped = fixture.skip(&position(&halted)).arg("--yes").finish();
    skipped
        .expect_code(0)
        .expect_mentions(&["1 event", "standby in recovery"]);
    let walpost = run().start_streaming();
    assert_eq!(keys(&fixture.wait_for_records(1)), ["after"]);
    walpost.terminate().expect_code(0);
}

/// Two values whose text exceeds the 1 GB that PostgreSQL can send: the types, and the expressions.
/// The first one fails when its text is added to the message, the second one when its text is
/// created.
const UNSENDABLE: [(&str, &str); 2] = [
    ("jsonb", "to_jsonb(repeat(chr(1), 180000000))"),
    ("bytea", "convert_to(repeat('a', 600000000), 'UTF8')"),
];

#[test]
fn reports_a_row_larger_than_1_gb_and_can_skip_it() {
    for (major, (payload, too_large)) in MAJORS.into_iter().zip(UNSENDABLE.into_iter().cycle()) {
        let fixture =
            Fixture::bare_with(Outbox::Table, Server::shared(major), Broker::shared(), "");
        fixture.db.run(&format!(
            "CREATE TABLE outbox (id int, aggregatetype text, aggregateid text, payload {payload})"
        ));
        fixture.init().finish().expect_code(0);
        let aggregate = fixture.aggregate(1);
        let insert = |key: &str, value: &str| {
            fixture.db.run(&format!(
                "INSERT INTO outbox VALUES (1, '{aggregate}', '{key}', {value})"
            ));
        };
        let small = match payload {
            "jsonb" => "'{}'",
            _ => "'a'",
        };
        insert("before", small);
        fixture.db.run("BEGIN");
        insert("beside", small);
        insert("too large", too_large);
        insert("unsent", small);
        fixture.db.run("COMMIT");
        insert("after", small);
        let end = fixture
            .db
            .value("SELECT pg_current_wal_flush_lsn()")
            .expect("an LSN");
        let halted = fixture.run().finish().expect_code(3);
        let halted = halted.expect_mentions(&["halted", "more than 1 GB of text", "skip --to"]);
        let position = position(halted);
        assert!(position.ends_with(":0000000001"), "{major}: {position}");
        // The events after the row are unknown, so none of them may be skipped.
        let refused = fixture.skip(&end).answer(&format!("{}\n", fixture.name));
        let refused = refused.finish().expect_code(3);
        refused.expect_mentions(&["can't list the events after it", &position]);
        let skipped = fixture
            .skip(&position)
            .answer(&format!("{}\n", fixture.name));
        let skipped = skipped.finish().expect_code(0);
        assert!(
            skipped.stdout.contains("may contain events after"),
            "{}",
            skipped.stdout
        );
        let walpost = fixture.start();
        wait_until("the event after the skipped transaction", || {
            keys(&fixture.records()).iter().any(|key| key == "after")
        });
        walpost.terminate().expect_code(0);
        let keys = keys(&fixture.records());
        let sent = |wanted: &str| keys.iter().any(|key| key == wanted);
        assert!(
            sent("before") && !sent("too large") && !sent("unsent"),
            "{keys:?}"
        );
    }
}
