//! The records that a replay sends: their content, topic, rate and memory use.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use super::{REPLAY_HEADER, is_replayed, journal, keys_to_stdout, runs};
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, Server};
use crate::support::records::Record;
use crate::support::wait::wait_until;
use crate::support::walpost::{Invocation, word_after};

in_both_modes! { replays_rows_while_the_pipeline_runs }

fn replays_rows_while_the_pipeline_runs(exactly_once: bool) {
    let fixture = Fixture::new().in_mode(exactly_once);
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start();
    for key in ["a", "b", "c"] {
        fixture.insert(&aggregate, key);
    }
    fixture.wait_until_confirmed();
    let done = fixture.replay(&["--all", "--yes"]).finish().expect_code(0);
    done.expect_mentions(&["3 rows of table public.outbox: all", "replayed"]);
    fixture.insert(&aggregate, "d");
    fixture.wait_until_confirmed();
    walpost.terminate().expect_code(0);
    let records = fixture.wait_for_records(7);
    let keys: Vec<_> = records.iter().map(Record::key).collect();
    assert_eq!(keys, ["a", "b", "c", "a", "b", "c", "d"]);
    for (first, again) in records[..3].iter().zip(&records[3..]) {
        assert_eq!(again.header_names(), ["id", REPLAY_HEADER]);
        assert_eq!(again.header("id"), first.header("id"));
        assert_eq!(again.text(), first.text());
    }
    assert!(!is_replayed(&records[6]));
    assert_eq!(runs(&records).len(), 1);
    let entry = |state: &str, sent: &str| [state.to_owned(), sent.to_owned()];
    let mut entries = journal(&fixture);
    // On a busy machine, the replay takes long enough to also write journal entries about its
    // progress. Ignore these entries.
    entries.retain(|[state, _]| state != "going");
    assert_eq!(entries, [entry("begun", "0"), entry("done", "3")]);
}

/// A replay formats values as the stream does, regardless of the session's settings.
#[test]
fn replayed_record_equals_the_original_record() {
    let fixture = Fixture::with_table(
        "CREATE TABLE outbox (id bigint PRIMARY KEY, aggregatetype text, aggregateid text, payload bytea,
             headers jsonb, at timestamptz, day date, gap interval, ratio float8, note text, written timestamptz)",
    );
    let aggregate = fixture.aggregate(3);
    fixture.db.run(&format!(
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
        fixture.name
    ));
    let settings = "headers = { all = \"{at}|{day}|{gap}|{ratio}|{note}\", id = \"{id}\" }\ntimestamp = \"written\"\n\
                    key = \"{aggregateid}/{id}\"\nnull_payload = \"tombstone\"\n";
    let file = fixture.file(settings);
    let walpost = Invocation::new(["run", "--config"])
        .arg(&file)
        .start_streaming();
    fixture.wait_until_confirmed();
    walpost.terminate().expect_code(0);
    let replay = Invocation::new(["replay", "--all", "--yes", "--config"]).arg(&file);
    replay.finish().expect_code(0);
    let records = fixture.wait_for_records(6);
    assert_eq!(records.len(), 6);
    let plain = |replayed: bool| {
        let mut plain: Vec<_> = records
            .iter()
            .filter(|record| is_replayed(record) == replayed)
            .map(|record| {
                let mut headers = record.headers.clone();
                headers.retain(|(name, _)| name != REPLAY_HEADER && name != "walpost-position");
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

#[test]
fn replays_rows_to_a_different_topic() {
    let fixture = Fixture::new();
    let topic = format!("{}.again", fixture.name);
    fixture.topic(&topic, 1, &[]);
    fixture.insert("order", "k");
    let name = format!("{}\n", fixture.name);
    let replay = fixture.replay(&["--all", "--topic", &topic]).answer(&name);
    replay
        .finish()
        .expect_code(0)
        .expect_mentions(&["rows will be sent to topic", &topic]);
    assert_eq!(fixture.wait_for_records(1)[0].key(), "k");
}

#[test]
fn replay_respects_the_rate_limit() {
    let fixture = Fixture::new();
    fixture
        .db
        .run(&fixture.events().insert_many("a", 60, "to_jsonb(n)"));
    let started = Instant::now();
    assert_eq!(
        keys_to_stdout(&fixture, &["--all", "--rate", "30/s"]).len(),
        60
    );
    let duration = started.elapsed().as_secs_f64();
    assert!(duration > 1.7, "60 rows at 30 a second took {duration} s");
}

#[test]
fn memory_stays_bounded_for_a_large_table_and_slow_kafka() {
    const ROWS: usize = 600;
    let broker = Broker::borrowed();
    let fixture = Fixture::on_servers(Server::shared(MAJOR), &broker);
    let aggregate = fixture.aggregate(1);
    let large = fixture
        .events()
        .insert_many(&aggregate, ROWS, "to_jsonb(repeat('x', 400000))");
    fixture.db.run(&large);
    let mut replay = fixture.replay(&["--all", "--yes"]).start();
    fixture.wait_for_records(1);
    broker.freeze();
    // While the broker is frozen, the replay reads rows only until its window is full.
    let (mut bytes, mut since) = (0, Instant::now());
    wait_until("a window that is full", || {
        let now = replay.resident_bytes();
        if now > bytes {
            (bytes, since) = (now, Instant::now());
        }
        since.elapsed() > Duration::from_secs(1)
    });
    assert!(replay.is_running());
    // The table contains 240 MB, but the window is only 8 MiB. The limit of 100 MB leaves room for
    // the requests that librdkafka has in flight.
    assert!(bytes < 100_000_000, "{bytes} bytes");
    broker.thaw();
    replay.finish().expect_code(0);
    assert_eq!(fixture.wait_for_records(ROWS).len(), ROWS);
}

#[test]
fn reports_an_undeliverable_row_and_sends_the_preceding_ones() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    fixture.insert(&aggregate, "before");
    fixture.accept_any_name("outbox");
    fixture.insert("not a topic", "bad");
    fixture.insert(&aggregate, "behind");
    let bad = fixture
        .db
        .value("SELECT id FROM outbox WHERE aggregateid = 'bad'")
        .unwrap();
    let failed = fixture.replay(&["--all", "--yes"]).finish().expect_code(3);
    failed.expect_mentions(&[&bad, "is not a valid topic name", "--resume"]);
    assert_eq!(fixture.wait_for_records(1).len(), 1);
    let missing = fixture
        .replay(&["--all", "--yes", "--topic", "nobody.made.this"])
        .finish();
    missing
        .expect_code(3)
        .expect_mentions(&["nobody.made.this", "does not exist", "--create"]);
}

#[test]
fn writes_an_undeliverable_row_as_a_dead_letter_if_configured() {
    let fixture = Fixture::new();
    let (aggregate, topic) = (fixture.aggregate(1), format!("{}.dead", fixture.name));
    fixture.insert(&aggregate, "before");
    fixture.accept_any_name("outbox");
    fixture.insert("not a topic", "bad");
    fixture.accept_any_size("outbox");
    fixture.db.run(&format!(
        "INSERT INTO outbox (aggregatetype, aggregateid, type, payload)
         VALUES ('{aggregate}', 'large', 't', to_jsonb(repeat('x', 2000000)))"
    ));
    fixture.insert(&aggregate, "behind");
    let unroutable = [
        "--on-unroutable",
        "dead-letter",
        "--dead-letter-topic",
        &topic,
    ];
    let both = [&unroutable[..], &["--on-oversize", "dead-letter"]].concat();
    // If the dead-letter topic is missing, or dead letters are enabled only for another kind of
    // failure, the replay stops at the row that can't be delivered.
    let missing = fixture
        .replay(&both)
        .args(["--all", "--yes"])
        .finish()
        .expect_code(3);
    missing.expect_mentions(&[&format!("topic {topic:?} does not exist"), "--resume"]);
    fixture.topic(&topic, 1, &[]);
    let halted = fixture
        .replay(&unroutable)
        .args(["--all", "--yes"])
        .finish()
        .expect_code(3);
    let halted = halted.expect_mentions(&["max.message.bytes", "--resume"]);
    let run = word_after(&halted.stderr, "--resume ").trim_end();
    let dry_run = fixture.replay(&both).args(["--all", "--dry-run"]).finish();
    dry_run.expect_code(0).expect_mentions(&["4 rows"]);
    let resumed = fixture
        .replay(&both)
        .args(["--yes", "--resume", run])
        .finish();
    let resumed = resumed.expect_code(0);
    resumed.expect_mentions(&["sent as dead letters", "oversize=1", "unroutable=0"]);

    let records = fixture.records();
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
