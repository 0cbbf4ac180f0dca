//! `walpost skip` moves the slot past the events that an operator chose to skip, and no further.

use crate::support::event::{EventWriter, Outbox};
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::lsn::lsn_text;
use crate::support::postgres::{MAJOR, MAJORS, Server};
use crate::support::records::keys;
use crate::support::wait::wait_until;
use crate::support::walpost::{Finished, Invocation, config_file};

for_each_fixture! {
    skips_only_the_transaction_that_halted_the_pipeline
    skips_everything_committed_before_the_lsn_and_delivers_the_rest
}

/// A topic name that Kafka does not allow.
const INVALID_TOPIC: &str = "not a topic";

/// Returns the event's position from the error message of a halted pipeline.
fn position(halted: &Finished) -> String {
    halted
        .stderr
        .split(|c: char| c.is_whitespace())
        .map(|word| word.trim_end_matches(':'))
        .find(|word| word.len() == 28 && word.contains('/'))
        .expect("a position")
        .to_owned()
}

/// Returns the columns `action`, `from_lsn` and `to_lsn` and the number of events from each journal
/// entry. Leaves out entries written by `init`.
fn journal(fixture: &Fixture) -> Vec<Vec<Option<String>>> {
    fixture.db.rows(
        "SELECT action, from_lsn, to_lsn, detail ->> 'events' FROM walpost.journal
         WHERE action <> 'snapshot' ORDER BY id",
    )
}

/// Asserts that a command changes nothing, exits with the given code, and prints each of `texts`.
fn refused(fixture: &Fixture, invocation: Invocation, code: i32, texts: &[&str]) {
    let before = (fixture.confirmed(), journal(fixture));
    invocation.finish().expect_code(code).expect_mentions(texts);
    assert_eq!((fixture.confirmed(), journal(fixture)), before, "{texts:?}");
}

/// Returns SQL that writes an event whose topic name is invalid. Normally, a table created by
/// `init` rejects such events.
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

/// Commits three transactions, of which the second can't be delivered, and runs the pipeline until
/// it halts. Returns the position at which it halted.
fn halt_in_the_middle(fixture: &Fixture) -> String {
    let aggregate = fixture.aggregate(1);
    fixture.insert(&aggregate, "before");
    fixture.db.run(&format!(
        "BEGIN; {} {} COMMIT",
        insert_unroutable_sql(fixture),
        fixture.insert_sql(&aggregate, "same transaction"),
    ));
    fixture.insert(&aggregate, "after");
    let halted = fixture.run().finish().expect_code(3);
    assert_eq!(keys(&fixture.records()), ["before"]);
    position(&halted.expect_mentions(&["halted", INVALID_TOPIC]))
}

fn skips_only_the_transaction_that_halted_the_pipeline(fixture: Fixture) {
    let position = halt_in_the_middle(&fixture);
    let from = lsn_text(fixture.confirmed());
    let dry = || fixture.skip(&position).arg("--dry-run");
    let shown = [
        "2 events would never",
        "can't be converted to a record",
        &position,
    ];
    refused(&fixture, dry(), 0, &shown);
    // Without an answer to the prompt, nothing is skipped.
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
    // By now, the slot has already passed the position that was skipped.
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
    refused(
        &fixture,
        yes("FFFFFF/0"),
        2,
        &["is after the end of the WAL"],
    );
    refused(
        &fixture,
        yes("FFFFFF/0:0"),
        2,
        &["is after the end of the WAL"],
    );
    // No row has this position, because no commit record has this LSN.
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
        &["contains tables, but the outbox uses logical decoding messages"],
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

/// Asserts that `skip` refuses to run while the slot is active, because an active slot may advance
/// by itself.
fn refused_while_active(fixture: &Fixture, to: &str) {
    let ahead = lsn_text(fixture.wal_position());
    for to in [to, &ahead] {
        let finished = fixture.skip(to).arg("--yes").finish().expect_code(1);
        finished.expect_mentions(&["is active for PID", "Stop the walpost run"]);
    }
    assert!(journal(fixture).is_empty());
}

#[test]
fn skips_and_replays_events_on_every_server_version() {
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

/// `skip` is killed after it has moved the checkpoint but before it moves the slot.
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
            skip.output().contains("the rows remain in table")
        });
        // `skip` queries the slot once more before it moves the slot. Block that query by locking
        // the view pg_replication_slots with ALTER VIEW. LOCK TABLE would not work, because it
        // would also lock pg_database, which the view reads and which the server needs for looking
        // up the roles' privileges.
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

/// A standby is read-only, so `skip` can't write to the journal.
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
        // The standby can't create the slot until the primary has logged its running transactions.
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

/// Rows whose text is longer than the 1 GB that PostgreSQL can send. Each entry contains the
/// server's major version, the type of the payload, and SQL expressions for the key and the
/// payload. PostgreSQL fails to append a `jsonb` value to the message, and to convert a `bytea`
/// value to text. In PostgreSQL 17, another function reports the second error.
const UNSENDABLE: [(u32, &str, &str, &str); 3] = [
    (14, "bytea", "'too large'", LARGE_BYTEA),
    (
        15,
        "jsonb",
        "repeat('k', 830000000)",
        "to_jsonb(repeat(chr(10), 130000000))",
    ),
    (18, "bytea", "'too large'", LARGE_BYTEA),
];
const LARGE_BYTEA: &str = "convert_to(repeat('a', 540000000), 'UTF8')";

#[test]
fn reports_and_skips_a_row_larger_than_1_gb() {
    for (major, payload, large_key, large_payload) in UNSENDABLE {
        let fixture =
            Fixture::bare_with(Outbox::Table, Server::shared(major), Broker::shared(), "");
        fixture.db.run(&format!(
            "CREATE TABLE outbox (id int, aggregatetype text, aggregateid text, payload {payload})"
        ));
        fixture.init().finish().expect_code(0);
        let aggregate = fixture.aggregate(1);
        let insert = |key: &str, payload: &str| {
            fixture.db.run(&format!(
                "INSERT INTO outbox VALUES (1, '{aggregate}', {key}, {payload})"
            ));
        };
        insert("'before'", "'{}'");
        fixture.db.run("BEGIN");
        insert("'same transaction'", "'{}'");
        insert(large_key, large_payload);
        insert("'unsent'", "'{}'");
        fixture.db.run("COMMIT");
        insert("'after'", "'{}'");
        let end = fixture
            .db
            .value("SELECT pg_current_wal_flush_lsn()")
            .expect("an LSN");
        let halted = fixture.run().finish().expect_code(3);
        let halted = halted.expect_mentions(&["halted", "more than 1 GB of text", "skip --to"]);
        let position = position(&halted);
        assert!(position.ends_with(":0000000001"), "{major}: {position}");
        // Walpost can't list the events after the row that is too large, so it must not skip any
        // later transactions.
        let answer = format!("{}\n", fixture.name);
        let refused = fixture.skip(&end).answer(&answer).finish().expect_code(3);
        refused.expect_mentions(&["can't list the events after it", &position]);
        let skipped = fixture.skip(&position).answer(&answer).finish();
        skipped.expect_code(0).expect_mentions(&[
            "events that can't be converted to a record: 1",
            "any later events in the transaction are not listed",
        ]);
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

/// Values that PostgreSQL accepts but can't convert to text. Each entry contains the server's major
/// version, the type, and statements that assign such a value to the variable `v`.
const UNCONVERTIBLE: [(u32, &str, &str); 2] = [
    (
        14,
        "interval",
        "v := interval '2000000000 hours' + interval '500000000 hours';",
    ),
    (
        18,
        "tsquery[]",
        "v := ARRAY['a'::tsquery]; FOR n IN 1..19000 LOOP v[1] := tsquery_not(v[1]); END LOOP;",
    ),
];

#[test]
fn reports_and_skips_a_row_with_a_value_that_postgresql_cannot_convert_to_text() {
    for (major, column, statements) in UNCONVERTIBLE {
        let fixture =
            Fixture::bare_with(Outbox::Table, Server::shared(major), Broker::shared(), "");
        fixture.db.run(&format!(
            "CREATE TABLE outbox (id int, aggregatetype text, aggregateid text, payload text, v {column})"
        ));
        fixture.init().finish().expect_code(0);
        let fixture = fixture.in_mode(major == 18);
        let aggregate = fixture.aggregate(1);
        let insert = |key: &str, v: &str| {
            format!("INSERT INTO outbox VALUES (1, '{aggregate}', '{key}', '', {v})")
        };
        fixture.db.run(&insert("before", "NULL"));
        fixture.db.run(&format!(
            "DO $$ DECLARE v {column}; BEGIN {statements} {}; END $$",
            insert("bad", "v")
        ));
        fixture.db.run(&insert("after", "NULL"));
        let halted = fixture.run().finish().expect_code(3);
        let halted = halted.expect_mentions(&["halted", "can't be converted to text", "skip --to"]);
        // The server usually aborts the stream while Walpost is still checking which process uses
        // the slot. After that, the server can't process a status update. Nevertheless, Walpost
        // delivers the first event and confirms it.
        assert_eq!(keys(&fixture.records()), ["before"]);
        fixture.run().finish().expect_code(3);
        assert_eq!(keys(&fixture.records()), ["before"]);
        let answer = format!("{}\n", fixture.name);
        let skip = fixture.skip(&position(&halted)).answer(&answer).finish();
        skip.expect_code(0)
            .expect_mentions(&["events that can't be converted to a record: 1", "skipped"]);
        let walpost = fixture.start();
        wait_until("the event after the skipped transaction", || {
            keys(&fixture.records()).iter().any(|key| key == "after")
        });
        walpost.terminate().expect_code(0);
        assert_eq!(keys(&fixture.records()), ["before", "after"]);
    }
}
