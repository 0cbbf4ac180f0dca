//! `replay`: rows of the table are sent again, as they were sent at first.

use std::collections::HashSet;
use std::fs;
use std::time::{Duration, Instant};

use crate::support::event::Outbox;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, Server};
use crate::support::reaper;
use crate::support::records::Record;
use crate::support::scene::Scene;
use crate::support::session::Session;
use crate::support::wait::wait_until;
use crate::support::walpost::{Finished, Invocation, word_behind};

in_both_modes! { rows_are_sent_again_while_the_pipeline_runs }

const HEADER: &str = "walpost-replay";

/// What the journal says of replays: state and rows.
fn journal(scene: &Scene) -> Vec<[String; 2]> {
    let rows = scene.db.rows(
        "SELECT detail ->> 'state', detail ->> 'sent' FROM walpost.journal WHERE action = 'replay' ORDER BY id",
    );
    let text = |text: Option<String>| text.unwrap();
    rows.into_iter()
        .map(|row| <[Option<String>; 2]>::try_from(row).unwrap().map(text))
        .collect()
}

#[test]
fn rows_are_selected_by_the_positions_of_their_records() {
    let scene = Scene::new();
    // Two topics, in turns.
    let aggregates = [scene.aggregate(2), scene.aggregate(1)];
    for number in 0..6 {
        scene.insert(&aggregates[number % 2], &number.to_string());
    }
    let walpost = scene.start();
    let records = scene.wait_for_records(6);
    scene.wait_until_confirmed();
    walpost.terminate().expect_code(0);
    let position = |key: &str| {
        let record = records.iter().find(|record| record.key() == key).unwrap();
        record.header("walpost-position").to_owned()
    };
    let replay = |arguments: &[&str]| scene.replay(&[&["--yes"], arguments].concat()).finish();
    let (first, last) = (position("1"), position("4"));
    replay(&["--from", &first, "--to", &last]).expect_code(0);
    let records = scene.wait_for_records(10);
    let again: HashSet<_> = records
        .iter()
        .filter(|record| is_replayed(record))
        .map(|record| record.key().to_owned())
        .collect();
    assert_eq!(again, ["1", "2", "3", "4"].map(str::to_owned).into());

    // One that nobody has, and one that can't be looked up.
    let before = journal(&scene).len();
    let nowhere = "FFFFFFFF/FFFFFFFF:0000000001";
    let topics = aggregates
        .each_ref()
        .map(|name| format!("outbox.event.{name}"));
    replay(&["--from", nowhere])
        .expect_code(2)
        .expect_says(&[nowhere, "--from", &topics[0], &topics[1]]);
    replay(&["--to", &last, "--sink", "stdout"])
        .expect_code(2)
        .expect_says(&[&last, "--to", "the sink is stdout"]);
    assert_eq!(journal(&scene).len(), before);
}

/// The ids of runs, of those records that have one.
fn runs(records: &[Record]) -> HashSet<String> {
    let replayed = records.iter().filter(|record| is_replayed(record));
    replayed.map(|r| r.header(HEADER).to_owned()).collect()
}

fn is_replayed(record: &Record) -> bool {
    record.header_names().contains(&HEADER)
}

fn rows_are_sent_again_while_the_pipeline_runs(exactly_once: bool) {
    let scene = Scene::new().in_mode(exactly_once);
    let aggregate = scene.aggregate(1);
    let walpost = scene.start();
    for key in ["a", "b", "c"] {
        scene.insert(&aggregate, key);
    }
    scene.wait_until_confirmed();
    let done = scene.replay(&["--all", "--yes"]).finish().expect_code(0);
    done.expect_says(&["3 rows of table public.outbox: all", "replayed"]);
    scene.insert(&aggregate, "d");
    scene.wait_until_confirmed();
    walpost.terminate().expect_code(0);
    let records = scene.wait_for_records(7);
    let keys: Vec<_> = records.iter().map(Record::key).collect();
    assert_eq!(keys, ["a", "b", "c", "a", "b", "c", "d"]);
    for (first, again) in records[..3].iter().zip(&records[3..]) {
        assert_eq!(again.header_names(), ["id", HEADER]);
        assert_eq!(again.header("id"), first.header("id"));
        assert_eq!(again.text(), first.text());
    }
    assert!(!is_replayed(&records[6]));
    assert_eq!(runs(&records).len(), 1);
    let entry = |state: &str, sent: &str| [state.to_owned(), sent.to_owned()];
    assert_eq!(journal(&scene), [entry("begun", "0"), entry("done", "3")]);
}

/// Values are printed as the stream prints them, whatever the session's settings are.
#[test]
fn record_that_is_sent_again_is_the_one_that_was_sent_at_first() {
    let scene = Scene::with_table(
        "CREATE TABLE outbox (id bigint PRIMARY KEY, aggregatetype text, aggregateid text, payload bytea,
             headers jsonb, at timestamptz, day date, gap interval, ratio float8, note text, written timestamptz)",
    );
    let aggregate = scene.aggregate(3);
    scene.db.run(&format!(
        "ALTER DATABASE {} SET datestyle = 'German';
         ALTER DATABASE {0} SET timezone = 'Asia/Tokyo';
         ALTER DATABASE {0} SET bytea_output = 'escape';
         ALTER DATABASE {0} SET intervalstyle = 'iso_8601';
         ALTER DATABASE {0} SET extra_float_digits = 0;
         INSERT INTO outbox VALUES
             (1, '{aggregate}', 'k1', '\\x00ff5c0a', '{{\"a\": \"b\\\\n\", \"n\": 1.50}}', '2025-03-30 01:59:59.123456+02',
                 '2025-12-31', '1 day 02:03:04', 0.1::float8 + 0.2, E'tab\\t newline\\n return\\r back\\\\slash \\b\\f\\v é', '2025-01-01'),
             (2, '{aggregate}', 'k2', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL),
             (3, '{aggregate}', '', '', '{{}}', 'epoch', '-infinity', '-1 mon', 'NaN', '\\N', '2025-01-02');",
        scene.name
    ));
    let settings = "headers = { all = \"{at}|{day}|{gap}|{ratio}|{note}\", id = \"{id}\" }\ntimestamp = \"written\"\n\
                    key = \"{aggregateid}/{id}\"\nnull_payload = \"tombstone\"\n";
    let file = scene.file(settings);
    let mut walpost = Invocation::new(["run", "--config"]).arg(&file).start();
    walpost.wait_for_log("streaming");
    scene.wait_until_confirmed();
    walpost.terminate().expect_code(0);
    let replay = Invocation::new(["replay", "--all", "--yes", "--config"]).arg(&file);
    replay.finish().expect_code(0);
    let records = scene.wait_for_records(6);
    assert_eq!(records.len(), 6);
    let plain = |replayed: bool| {
        let mut plain: Vec<_> = records
            .iter()
            .filter(|record| is_replayed(record) == replayed)
            .map(|record| {
                let mut headers = record.headers.clone();
                headers.retain(|(name, _)| name != HEADER && name != "walpost-position");
                let timestamp = (record.key() != "k2/2").then_some(record.timestamp);
                (
                    record.key.clone(),
                    record.partition,
                    record.payload.clone(),
                    headers,
                    timestamp,
                )
            })
            .collect();
        plain.sort();
        plain
    };
    assert_eq!(plain(true).len(), 3);
    assert_eq!(plain(true), plain(false));
}

/// Runs it, and returns the keys of what it sends to standard output.
fn keys_to_stdout(scene: &Scene, arguments: &[&str]) -> Vec<String> {
    let replay = scene.replay(arguments).args(["--yes", "--sink", "stdout"]);
    keys_of(&replay.finish().expect_code(0))
}

fn keys_of(done: &Finished) -> Vec<String> {
    let lines = done.stdout.lines().filter(|line| line.starts_with('{'));
    lines
        .map(|line| {
            let line: serde_json::Value = serde_json::from_str(line).unwrap();
            line["key"].as_str().unwrap().to_owned()
        })
        .collect()
}

#[test]
fn rows_are_selected_by_time_id_aggregate_and_condition() {
    let scene = Scene::new();
    let id = |number: u32| format!("00000000-0000-7000-8000-00000000000{number}");
    // In another order than that of their ids.
    for (number, aggregate, hour) in [
        (3, "order", 1),
        (1, "order", 2),
        (2, "bill", 3),
        (4, "bill", 4),
    ] {
        scene.db.run(&format!(
            "INSERT INTO outbox (id, aggregatetype, aggregateid, type, payload, created_at)
             VALUES ('{}', '{aggregate}', '{number}', 't', '{{\"n\": {number}}}', '2025-11-01 0{hour}:00+00')",
            id(number)
        ));
    }
    let check = |arguments: &[&str], expected: &[&str]| {
        assert_eq!(keys_to_stdout(&scene, arguments), expected, "{arguments:?}");
    };
    check(&["--all"], &["3", "1", "2", "4"]);
    check(&["--from", "2025-11-01T02:00:00Z"], &["1", "2", "4"]);
    check(&["--from", "2025-11-01 02:00:01+00"], &["2", "4"]);
    check(&["--to", "2025-11-01 03:00+00"], &["3", "1", "2"]);
    check(
        &["--from", "2025-11-01", "--to", "2025-11-01 04:00+02"],
        &["3", "1"],
    );
    check(&["--from", &id(1)], &["1", "2", "4"]);
    check(&["--from", &id(1), "--to", &id(2)], &["1", "2"]);
    check(&["--aggregate", "bill"], &["2", "4"]);
    check(
        &["--aggregate", "bill/4", "--aggregate", "order"],
        &["3", "1", "4"],
    );
    check(&["--id", &id(4), "--id", &id(3)], &["3", "4"]);
    // What is said by several flags is all true of a row, whichever of the aggregates it is of.
    check(
        &[
            "--aggregate",
            "bill/4",
            "--aggregate",
            "order",
            "--id",
            &id(3),
        ],
        &["3"],
    );
    check(
        &[
            "--aggregate",
            "order",
            "--aggregate",
            "bill",
            "--from",
            "2025-11-01T03:00:00Z",
        ],
        &["2", "4"],
    );
    let clerk = Clerk::of(&scene);
    let check_where = |arguments: &[&str], expected: &[&str]| {
        let replay = clerk.replay(arguments);
        let done = replay.args(["--yes", "--sink", "stdout"]).finish();
        assert_eq!(keys_of(&done.expect_code(0)), expected, "{arguments:?}");
    };
    check_where(
        &["--where", "(payload ->> 'n')::int % 2 = 0 -- even"],
        &["2", "4"],
    );
    check_where(
        &["--where", "true OR true", "--aggregate", "order"],
        &["3", "1"],
    );
    check(&["--from", "2030-01-01"], &[]);
    let before = journal(&scene).len();
    let dry = scene.replay(&["--dry-run", "--aggregate", "bill"]).finish();
    dry.expect_code(0).expect_says(&[
        "2 rows of table",
        "aggregatetype = 'bill'",
        "nothing was sent",
    ]);
    let none = scene.replay(&["--from", "2030-01-01"]).finish();
    none.expect_code(0)
        .expect_says(&["there is nothing to send"]);
    assert_eq!(journal(&scene).len(), before);
}

#[test]
fn rows_are_sent_to_another_topic() {
    let scene = Scene::new();
    let topic = format!("{}.again", scene.name);
    scene.topic(&topic, 1, &[]);
    scene.insert("order", "k");
    let name = format!("{}\n", scene.name);
    let replay = scene.replay(&["--all", "--topic", &topic]).answer(&name);
    replay
        .finish()
        .expect_code(0)
        .expect_says(&["to be sent to topic", &topic]);
    assert_eq!(scene.wait_for_records(1)[0].key(), "k");
}

#[test]
fn killed_and_resumed_it_sends_every_row_and_repeats_a_little() {
    const ROWS: usize = 1500;
    let scene = Scene::new();
    let aggregate = scene.aggregate(2);
    let many = scene.events().many(&aggregate, ROWS, "to_jsonb(n)");
    scene.db.run(&many);
    let replay = scene.replay(&["--all", "--yes", "--rate", "150/s"]).start();
    wait_until("a note in the journal", || journal(&scene).len() >= 3);
    let noted: usize = journal(&scene)[2][1].parse().unwrap();
    assert!((1..ROWS).contains(&noted), "{noted}");
    let run = scene
        .db
        .value("SELECT detail ->> 'run' FROM walpost.journal WHERE action = 'replay' LIMIT 1")
        .unwrap();
    let running = scene.replay(&["--yes", "--resume", &run]).finish();
    running
        .expect_code(1)
        .expect_says(&["being sent by another process"]);
    replay.kill();
    let before = scene.records().len();
    assert!(before < ROWS, "it was not cut short");
    // They are newer than the run.
    scene.db.run(&many);
    let resumed = scene.replay(&["--yes", "--resume", &run]).finish();
    resumed
        .expect_code(0)
        .expect_says(&["that were sent before", "replayed"]);
    let records = scene.records();
    assert_eq!(runs(&records), HashSet::from([run.clone()]));
    let ids: HashSet<_> = records.iter().map(|record| record.header("id")).collect();
    assert_eq!(ids.len(), ROWS, "each row of the run, and no other");
    let repeated = records.len() - ROWS;
    assert!(
        // Some was on its way.
        repeated <= before - noted.min(before) + 50,
        "{repeated} of {before} repeated"
    );
    assert_eq!(journal(&scene).last().unwrap()[0], "done");
    let complete = scene.replay(&["--yes", "--resume", &run]).finish();
    complete.expect_code(2).expect_says(&["is complete"]);
    assert_eq!(scene.records().len(), records.len());
}

#[test]
fn stopped_and_resumed_it_repeats_nothing() {
    const ROWS: usize = 400;
    let scene = Scene::new();
    let aggregate = scene.aggregate(1);
    let many = scene.events().many(&aggregate, ROWS, "to_jsonb(n)");
    scene.db.run(&many);
    let replay = scene.replay(&["--all", "--yes", "--rate", "100"]).start();
    scene.wait_for_records(50);
    let stopped = replay.terminate().expect_code(1);
    let (_, run) = stopped
        .stderr
        .split_once("--resume ")
        .expect("how to go on");
    let run = run.split_whitespace().next().unwrap();
    assert!(scene.records().len() < ROWS);
    scene
        .replay(&["--yes", "--resume", run])
        .finish()
        .expect_code(0);
    let records = scene.records();
    let ids: HashSet<_> = records.iter().map(|record| record.header("id")).collect();
    assert_eq!(ids.len(), ROWS);
    assert_eq!(
        records.len(),
        ROWS,
        "what was acknowledged is not sent again"
    );
}

#[test]
fn rate_is_kept() {
    let scene = Scene::new();
    scene.db.run(&scene.events().many("a", 60, "to_jsonb(n)"));
    let began = Instant::now();
    assert_eq!(
        keys_to_stdout(&scene, &["--all", "--rate", "30/s"]).len(),
        60
    );
    let took = began.elapsed().as_secs_f64();
    assert!(took > 1.7, "60 rows at 30 a second took {took} s");
}

#[test]
fn memory_is_bounded_however_large_the_table_is_and_however_slow_kafka() {
    const ROWS: usize = 600;
    let broker = Broker::private();
    let scene = Scene::on(Server::shared(MAJOR), &broker);
    let aggregate = scene.aggregate(1);
    let large = scene
        .events()
        .many(&aggregate, ROWS, "to_jsonb(repeat('x', 400000))");
    scene.db.run(&large);
    let mut replay = scene.replay(&["--all", "--yes"]).start();
    scene.wait_for_records(1);
    broker.freeze();
    // From here on it can only fill its window.
    let (mut bytes, mut since) = (0, Instant::now());
    wait_until("a window that is full", || {
        let now = replay.resident_bytes();
        if now > bytes {
            (bytes, since) = (now, Instant::now());
        }
        since.elapsed() > Duration::from_secs(1)
    });
    assert!(replay.is_running());
    // 240 MB in all, a window of 16 MiB, and what librdkafka has on the wire.
    assert!(bytes < 100_000_000, "{bytes} bytes");
    broker.thaw();
    replay.finish().expect_code(0);
    assert_eq!(scene.wait_for_records(ROWS).len(), ROWS);
}

#[test]
fn row_that_can_not_be_sent_is_named_and_what_is_before_it_is_sent() {
    let scene = Scene::new();
    let aggregate = scene.aggregate(1);
    scene.insert(&aggregate, "before");
    scene.insert("not a topic", "bad");
    scene.insert(&aggregate, "behind");
    let bad = scene
        .db
        .value("SELECT id FROM outbox WHERE aggregateid = 'bad'")
        .unwrap();
    let failed = scene.replay(&["--all", "--yes"]).finish().expect_code(3);
    failed.expect_says(&[&bad, "can't be the name of a topic", "--resume"]);
    assert_eq!(scene.wait_for_records(1).len(), 1);
    let missing = scene
        .replay(&["--all", "--yes", "--topic", "nobody.made.this"])
        .finish();
    missing
        .expect_code(3)
        .expect_says(&["nobody.made.this", "does not exist", "--create"]);
}

#[test]
fn row_that_can_not_be_sent_is_a_dead_letter_where_the_settings_say_so() {
    let scene = Scene::new();
    let (aggregate, topic) = (scene.aggregate(1), format!("{}.dead", scene.name));
    scene.insert(&aggregate, "before");
    scene.insert("not a topic", "bad");
    scene.db.run(&format!(
        "INSERT INTO outbox (aggregatetype, aggregateid, type, payload)
         VALUES ('{aggregate}', 'large', 't', to_jsonb(repeat('x', 2000000)))"
    ));
    scene.insert(&aggregate, "behind");
    let unroutable = [
        "--on-unroutable",
        "dead-letter",
        "--dead-letter-topic",
        &topic,
    ];
    let both = [&unroutable[..], &["--on-oversize", "dead-letter"]].concat();
    // Where it lacks its topic, and where it is for failures of the other kind, it is as without it.
    let missing = scene
        .replay(&both)
        .args(["--all", "--yes"])
        .finish()
        .expect_code(3);
    missing.expect_says(&[&format!("topic {topic:?} does not exist"), "--resume"]);
    scene.topic(&topic, 1, &[]);
    let halted = scene
        .replay(&unroutable)
        .args(["--all", "--yes"])
        .finish()
        .expect_code(3);
    let halted = halted.expect_says(&["max.message.bytes", "--resume"]);
    let run = word_behind(&halted.stderr, "--resume ").trim_end();
    let dry_run = scene.replay(&both).args(["--all", "--dry-run"]).finish();
    dry_run.expect_code(0).expect_says(&["4 rows"]);
    let resumed = scene
        .replay(&both)
        .args(["--yes", "--resume", run])
        .finish();
    let resumed = resumed.expect_code(0);
    resumed.expect_says(&["sent as dead letters", "oversize=1", "unroutable=0"]);

    let records = scene.records();
    let of_run = |record: &&Record| {
        record.header_names().contains(&"walpost-replay") && record.header("walpost-replay") == run
    };
    let sent: Vec<_> = records.iter().filter(of_run).collect();
    let keys: HashSet<_> = sent.iter().map(|record| record.key()).collect();
    assert_eq!(keys, HashSet::from(["before", "bad", "large", "behind"]));
    assert_eq!(sent.len(), 4, "each once");
    for (key, error, bytes) in [
        ("bad", "unroutable", None),
        ("large", "oversize", Some("2000002")),
    ] {
        let letter = sent.iter().find(|record| record.key() == key).unwrap();
        assert_eq!(letter.topic, topic);
        assert_eq!(letter.header("walpost-error"), error);
        assert_eq!(letter.header("walpost-source-table"), "public.outbox");
        assert_eq!(letter.payload.is_none(), bytes.is_some());
        if let Some(bytes) = bytes {
            assert_eq!(letter.header("walpost-payload-bytes"), bytes);
        }
        assert!(!letter.header_names().contains(&"walpost-position"));
    }
}

/// Asserts that a command has sent and written down nothing.
fn refused(scene: &Scene, invocation: Invocation, code: i32, texts: &[&str]) -> Finished {
    let finished = invocation.finish().expect_code(code).expect_says(texts);
    assert!(journal(scene).is_empty(), "{texts:?}");
    assert!(scene.records().is_empty(), "{texts:?}");
    finished
}

#[test]
fn what_can_not_be_sent_again_is_refused_and_nothing_is_sent() {
    let scene = Scene::new();
    let aggregate = scene.aggregate(1);
    scene.insert(&aggregate, "k");
    scene.db.run(
        "CREATE TABLE diary (at int);
         CREATE FUNCTION write() RETURNS boolean LANGUAGE sql AS 'INSERT INTO public.diary VALUES (1) RETURNING true';
         CREATE TABLE bare (id int, aggregateid text, payload text);
         CREATE TABLE keyed (number int PRIMARY KEY, aggregateid text, payload text)",
    );
    let yes = |arguments: &[&str]| scene.replay(arguments).arg("--yes");
    let check = |arguments: &[&str], code: i32, texts: &[&str]| {
        refused(&scene, yes(arguments), code, texts);
    };
    // Nobody is there to ask, or somebody says something else.
    refused(
        &scene,
        scene.replay(&["--all"]),
        2,
        &["1 row of table", "nothing was sent"],
    );
    refused(
        &scene,
        scene.replay(&["--all"]).answer("no\n"),
        2,
        &["nothing was sent"],
    );
    check(
        &[],
        2,
        &["nothing says which rows of table", "--from", "--all"],
    );
    check(&["--all", "--id", "1"], 2, &["--all", "--id"]);
    check(&["--from", ""], 2, &["--from", "expected a time"]);
    let yesterday = [
        "--from",
        "\"yesterday\"",
        "a time like",
        "a position like",
        "type uuid",
    ];
    check(&["--from", "yesterday"], 2, &yesterday);
    check(&["--from", "2025-13-41"], 2, &["--from", "2025-13-41"]);
    check(&["--to", "not-a-uuid"], 2, &["--to", "uuid"]);
    let nobody = "00000000-0000-0000-0000-000000000000";
    check(
        &["--from", nobody],
        2,
        &["has no row with id", nobody, "--from"],
    );
    check(&["--id", "not-a-uuid"], 2, &["uuid"]);
    check(&["--aggregate", "/1"], 2, &["--aggregate", "expected TYPE"]);
    {
        let clerk = Clerk::of(&scene);
        let check_where = |condition: &str, code: i32, texts: &[&str]| {
            let replay = clerk.replay(&["--yes", "--where", condition]);
            refused(&scene, replay, code, texts);
        };
        check_where("nothing = 1", 2, &["nothing", "does not exist"]);
        check_where("true); DROP TABLE outbox; --", 2, &["42601"]);
        check_where("public.write()", 3, &["read-only transaction"]);
    }
    assert_eq!(scene.db.number("SELECT count(*) FROM diary"), 0);
    for rate in ["0", "-1", "x", "1.5/s", "10/m"] {
        check(
            &[&format!("--rate={rate}")],
            2,
            &["--rate", "expected a number"],
        );
    }
    check(&["--resume", "x"], 2, &["--resume"]);
    check(
        &["--resume", nobody, "--id", "1"],
        2,
        &["cannot be used with"],
    );
    check(&["--resume", nobody], 2, &["has no replay", nobody]);
    check(
        &["--all", "--table", "public.nowhere"],
        3,
        &["public.nowhere", "does not exist"],
    );
    let topic = ["--topic", "t", "--table"];
    let other = |table: &'static str, more: &[&'static str]| [&topic[..], &[table], more].concat();
    check(
        &other("bare", &["--all"]),
        2,
        &["public.bare", "no primary key"],
    );
    let aggregate = ["--header", "n={number}", "--aggregate", "order"];
    check(
        &other("keyed", &aggregate),
        2,
        &["aggregatetype", "--where"],
    );
    let since = ["--header", "n={number}", "--from", "2025-01-01"];
    check(&other("keyed", &since), 2, &["created_at", "--where"]);
    let log = ["--outbox", "messages"];
    check(&log, 2, &["no table to send events again from"]);

    let role = format!("{}_reader", scene.name);
    scene.db.run(&format!("CREATE ROLE {role} LOGIN"));
    let conninfo = scene
        .conninfo()
        .replace("user=postgres", &format!("user={role}"));
    let as_role = || {
        let replay = scene
            .invoke_as("replay", &conninfo)
            .args(["--all", "--yes"]);
        replay.args(["--kafka", &scene.broker.address()])
    };
    let said = format!(
        "SELECT, INSERT (pipeline, slot, action, from_lsn, to_lsn, detail) ON walpost.journal TO {role}"
    );
    refused(&scene, as_role(), 3, &[&said]);
    scene.db.run(&format!(
        "GRANT {said}; GRANT USAGE ON SCHEMA walpost TO {role}; REVOKE SELECT ON outbox FROM PUBLIC"
    ));
    refused(
        &scene,
        as_role(),
        3,
        &[&format!("GRANT SELECT ON public.outbox TO {role}")],
    );
    scene
        .db
        .run(&format!("DROP OWNED BY {role}; DROP ROLE {role}"));
}

#[test]
fn events_in_messages_alone_can_not_be_sent_again() {
    let scene = Scene::of(Outbox::Messages);
    let finished = scene.replay(&["--all", "--yes"]).finish().expect_code(2);
    finished.expect_says(&["no table to send events again from", "publish them again"]);
}

#[test]
fn pipeline_has_to_be_named_among_several() {
    let scene = Scene::new();
    let file = reaper::folder("config").join("walpost.toml");
    let text = format!(
        "[kafka]\n\"bootstrap.servers\" = \"127.0.0.1:9\"\n[[pipeline]]\nname = \"a\"\npostgres = \"{0}\"\n\
         [[pipeline]]\nname = \"b\"\npostgres = \"{0}\"\n",
        scene.conninfo()
    );
    fs::write(&file, text).unwrap();
    let replay = Invocation::new(["replay", "--all", "--yes", "--config"]).arg(file);
    refused(&scene, replay, 2, &["--pipeline"]);
}

/// A role of `walpost init`, which may add to the journal and is no superuser.
struct Clerk<'s> {
    scene: &'s Scene<'static>,
    role: String,
}

impl<'s> Clerk<'s> {
    fn of(scene: &'s Scene<'static>) -> Self {
        let role = format!("{}_clerk", scene.name);
        let init = scene.invoke("init").args(["--role", &role]);
        init.finish().expect_code(0);
        Self { scene, role }
    }

    fn conninfo(&self) -> String {
        let user = format!("user={}", self.role);
        self.scene.conninfo().replace("user=postgres", &user)
    }

    fn replay(&self, arguments: &[&str]) -> Invocation {
        self.scene
            .invoke_as("replay", &self.conninfo())
            .args(["--kafka", &self.scene.broker.address()])
            .args(arguments)
    }

    /// Adds an entry about a replay to the journal.
    fn writes(&self, detail: &serde_json::Value) {
        let session = Session::connect(&self.conninfo()).unwrap();
        session.run(&entry(self.scene, detail));
    }
}

impl Drop for Clerk<'_> {
    fn drop(&mut self) {
        let role = &self.role;
        let drop = format!("DROP OWNED BY \"{role}\"; DROP ROLE \"{role}\"");
        let _ = self.scene.db.try_run(&drop);
    }
}

/// The statement that adds an entry about a replay to the journal.
fn entry(scene: &Scene, detail: &serde_json::Value) -> String {
    let (name, slot) = (&scene.name, scene.slot());
    let detail = detail.to_string().replace('\'', "''");
    format!(
        "INSERT INTO walpost.journal (pipeline, slot, action, detail) VALUES ('{name}', '{slot}', 'replay', '{detail}')"
    )
}

const RUN: &str = "5d8ac1b4-5b5c-4a5f-9a62-7f2b4f6a7c11";
const TOPIC: &str = "outbox.event.{aggregatetype}";

/// What an entry says that a replay begins with, about rows that fulfil `condition`.
fn begun(condition: &str, topic: &str) -> serde_json::Value {
    serde_json::json!({
        "run": RUN, "state": "begun", "sent": 0,
        "plan": {
            "table": "public.outbox", "condition": condition, "order": ["created_at", "id"],
            "until": null, "topic": topic, "rows": 1
        }
    })
}

/// A slot that somebody else needs, and the condition in SQL that drops it.
fn victim(scene: &Scene) -> (String, String) {
    let slot = format!("{}_victim", scene.name);
    scene.db.run(&format!(
        "SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')"
    ));
    let condition = format!(
        "(SELECT count(pg_drop_replication_slot(slot_name)) FROM pg_replication_slots WHERE slot_name = '{slot}') >= 0"
    );
    (slot, condition)
}

fn is_there(scene: &Scene, slot: &str) -> bool {
    scene.db.is_true(&format!(
        "SELECT EXISTS (SELECT FROM pg_replication_slots WHERE slot_name = '{slot}')"
    ))
}

#[test]
fn condition_that_the_journal_has_is_never_run() {
    let scene = Scene::new();
    let clerk = Clerk::of(&scene);
    let aggregate = scene.aggregate(1);
    scene.insert(&aggregate, "k");
    let (slot, condition) = victim(&scene);
    clerk.writes(&begun(&condition, TOPIC));
    let entries = journal(&scene).len();
    let resume = ["--resume", RUN];
    for invocation in [
        scene.replay(&resume).arg("--yes"),
        scene.replay(&resume).answer(&format!("{}\n", scene.name)),
        scene.replay(&resume).arg("--dry-run"),
        clerk.replay(&resume).arg("--yes"),
        clerk
            .replay(&resume)
            .args(["--yes", "--where", "another = 1"]),
        // It is a superuser's session.
        scene.replay(&resume).args(["--yes", "--where", &condition]),
    ] {
        let finished = invocation.finish();
        assert!(is_there(&scene, &slot), "{finished:?}");
        finished.expect_code(2);
    }
    let refused = scene.replay(&resume).arg("--yes").finish();
    refused.expect_code(2).expect_says(&[
        &clerk.role,
        "pg_drop_replication_slot(slot_name)",
        &format!("--resume {RUN} --where"),
    ]);
    assert_eq!(journal(&scene).len(), entries);
    assert!(scene.records().is_empty());
    scene
        .db
        .run(&format!("SELECT pg_drop_replication_slot('{slot}')"));
}

#[test]
fn condition_is_not_run_in_a_session_that_is_or_can_become_a_superuser() {
    let scene = Scene::new();
    let clerk = Clerk::of(&scene);
    let aggregate = scene.aggregate(1);
    scene.insert(&aggregate, "k");
    let (slot, condition) = victim(&scene);
    // Whoever made the function runs what a person's condition calls.
    scene.db.run(&format!(
        "CREATE FUNCTION is_due() RETURNS boolean LANGUAGE sql AS $$ SELECT {condition} $$;
         ALTER FUNCTION is_due() OWNER TO {}",
        clerk.role
    ));
    let due = ["--where", "public.is_due()", "--yes"];
    let refused = |invocation: Invocation, texts: &[&str]| {
        let finished = invocation.finish();
        assert!(is_there(&scene, &slot), "{finished:?}");
        finished.expect_code(2).expect_says(texts);
    };
    refused(
        scene.replay(&due),
        &["--where", "role postgres", "walpost run"],
    );
    refused(scene.replay(&due).arg("--dry-run"), &["role postgres"]);
    let masked = format!("{} options='-c role={}'", scene.conninfo(), clerk.role);
    let replay = |conninfo: &str| {
        let replay = scene.invoke_as("replay", conninfo).args(due);
        replay.args(["--kafka", &scene.broker.address()])
    };
    refused(replay(&masked), &["role postgres"]);
    for right in ["postgres", "pg_execute_server_program"] {
        scene.db.run(&format!("GRANT {right} TO {}", clerk.role));
        refused(replay(&clerk.conninfo()), &[&clerk.role, right]);
        scene.db.run(&format!("REVOKE {right} FROM {}", clerk.role));
    }
    let sent = clerk.replay(&["--where", "aggregateid = 'k'", "--yes"]);
    sent.finish().expect_code(0).expect_says(&["replayed"]);
    assert_eq!(scene.wait_for_records(1).len(), 1);
    scene
        .db
        .run(&format!("SELECT pg_drop_replication_slot('{slot}')"));
}

#[test]
fn condition_can_not_leave_its_place() {
    let scene = Scene::new();
    let clerk = Clerk::of(&scene);
    let aggregate = scene.aggregate(1);
    scene.insert(&aggregate, "one");
    scene.insert(&aggregate, "two");
    let one = "SELECT id::text FROM outbox WHERE aggregateid = 'one'";
    let one = scene.db.value(one).unwrap();
    for condition in [
        "false) OR (true",
        "true) UNION SELECT 2 WHERE (true",
        "true) ORDER BY (1",
        "true\n) --",
        "true) /*",
        "true); DROP TABLE outbox; --",
        "true; DROP TABLE outbox",
        "true] = ARRAY[true",
        "true, false",
        "SELECT true",
        "id = $1",
        "'",
        "$$",
        "/*",
        "",
        "--",
    ] {
        let replay = clerk.replay(&["--yes", "--id", &one, "--where", condition]);
        let finished = replay.finish();
        assert!(scene.records().is_empty(), "{condition:?}: {finished:?}");
        finished.expect_code(2).expect_says(&["--where"]);
    }
    assert!(journal(&scene).is_empty());
    // What only looks so.
    let harmless = "aggregateid <> ')' AND '\n(' <> $x$)]$x$ /* ) */ AND (ARRAY[true])[1] -- )";
    let replay = clerk.replay(&["--yes", "--id", &one, "--where", harmless]);
    replay.finish().expect_code(0);
    assert_eq!(scene.wait_for_records(1).len(), 1);
}

#[test]
fn entry_of_another_role_changes_nothing_about_a_replay() {
    let scene = Scene::new();
    let clerk = Clerk::of(&scene);
    let aggregate = scene.aggregate(1);
    scene.insert(&aggregate, "k");
    let stolen = format!("{}.stolen", scene.name);
    scene.topic(&stolen, 1, &[]);
    scene.db.run(&entry(&scene, &begun("", TOPIC)));
    clerk.writes(&begun("", &stolen));
    clerk.writes(&serde_json::json!({ "run": RUN, "state": "done", "sent": 1 }));
    let resumed = scene.replay(&["--yes", "--resume", RUN]).finish();
    resumed
        .expect_code(0)
        .expect_says(&["replayed", &clerk.role, "left aside"]);
    let records = scene.wait_for_records(1);
    assert_eq!(records[0].topic, format!("outbox.event.{aggregate}"));
}

#[test]
fn replay_that_another_role_began_is_shown_and_not_resumed_unasked() {
    let scene = Scene::new();
    let clerk = Clerk::of(&scene);
    let aggregate = scene.aggregate(1);
    scene.insert(&aggregate, "k");
    clerk.writes(&begun("", TOPIC));
    let resume = ["--resume", RUN];
    let refused = scene.replay(&resume).arg("--yes").finish().expect_code(2);
    refused.expect_says(&[&clerk.role, "--yes"]);
    assert!(scene.records().is_empty());
    let asked = scene.replay(&resume).answer(&format!("{}\n", scene.name));
    asked.finish().expect_code(0).expect_says(&[&clerk.role]);
    assert_eq!(scene.wait_for_records(1).len(), 1);
}

#[test]
fn what_the_journal_has_of_a_replay_is_compared_with_the_settings_and_the_table() {
    let scene = Scene::new();
    let aggregate = scene.aggregate(1);
    scene.insert(&aggregate, "k");
    let stolen = format!("{}.stolen", scene.name);
    scene.topic(&stolen, 1, &[]);
    scene.db.run(&entry(&scene, &begun("", &stolen)));
    let resume = ["--yes", "--resume", RUN];
    let refused = scene.replay(&resume).finish().expect_code(2);
    let told = format!("--topic '{stolen}'");
    refused.expect_says(&[&stolen, TOPIC, &told]);
    assert!(scene.records().is_empty());
    let given = scene.replay(&resume).args(["--topic", &stolen]).finish();
    given.expect_code(0);
    assert_eq!(scene.wait_for_records(1)[0].topic, stolen);

    let broken = |change: &dyn Fn(&mut serde_json::Value), texts: &[&str]| {
        scene.db.run("DELETE FROM walpost.journal");
        let mut detail = begun("", TOPIC);
        change(&mut detail["plan"]);
        scene.db.run(&entry(&scene, &detail));
        let refused = scene.replay(&resume).finish();
        assert_eq!(scene.records().len(), 1, "{refused:?}");
        refused.expect_says(texts);
    };
    // It would end the list of what went with a dropped slot.
    broken(
        &|plan| plan["dropped_slots"] = serde_json::json!([1]),
        &["dropped slots", "begin a new one"],
    );
    broken(
        &|plan| plan["until"] = serde_json::json!(["2030-01-01"]),
        &["until", "created_at, id"],
    );
    broken(
        &|plan| plan["order"] = serde_json::json!(["id"]),
        &["was ordered by id"],
    );
    broken(
        &|plan| plan["selected"] = serde_json::json!({ "unheard_of": 1 }),
        &["unheard_of"],
    );
}

#[test]
fn replay_with_a_condition_goes_on_when_the_condition_is_given_again() {
    let scene = Scene::new();
    let clerk = Clerk::of(&scene);
    let aggregate = scene.aggregate(1);
    scene.insert(&aggregate, "before");
    scene.insert("not a topic", "bad");
    scene.insert(&aggregate, "behind");
    scene.insert(&aggregate, "other");
    let condition = "aggregateid <> 'other'";
    let failed = clerk.replay(&["--yes", "--where", condition]).finish();
    let failed = failed.expect_code(3).expect_says(&["can't be the name"]);
    let run = word_behind(&failed.stderr, "--resume ").trim_end();
    let again = r"--where 'aggregateid <> '\''other'\'''";
    assert!(failed.stderr.contains(again), "{}", failed.stderr);
    scene.db.run("DELETE FROM outbox WHERE aggregateid = 'bad'");
    let resume = ["--yes", "--resume", run];
    let without = clerk.replay(&resume).finish().expect_code(2);
    without.expect_says(&[condition, again]);
    let other = clerk.replay(&resume).args(["--where", "true"]).finish();
    other.expect_code(2).expect_says(&[condition, again]);
    let same = clerk.replay(&resume).args(["--where", condition]).finish();
    same.expect_code(0)
        .expect_says(&["1 row of table", "behind the 1"]);
    let records = scene.wait_for_records(2);
    let keys: Vec<_> = records.iter().map(Record::key).collect();
    assert_eq!(keys, ["before", "behind"]);
}
