//! `on_oversize` and `on_unroutable`: an event that can't be delivered is sent as a dead letter.

use std::thread;
use std::time::Duration;

use crate::support::event::Outbox;
use crate::support::fixture::Fixture;
use crate::support::load::seed;
use crate::support::lsn::parse_position;
use crate::support::records::Record;
use crate::support::wait::wait_until;
use crate::support::walpost::{Invocation, Walpost};

const TABLE: &str =
    "CREATE TABLE outbox (id int, aggregatetype text, aggregateid text, payload text)";
const OVERSIZE_FLAGS: [&str; 2] = ["--on-oversize", "dead-letter"];
const UNROUTABLE_FLAGS: [&str; 2] = ["--on-unroutable", "dead-letter"];

in_both_modes! {
    writes_an_oversize_event_as_a_dead_letter_without_its_payload
    writes_an_unroutable_event_as_a_dead_letter_with_its_payload
    writes_a_malformed_message_as_a_dead_letter
    keeps_dead_letters_complete_and_in_order_when_killed_under_load
    halts_if_the_dead_letter_topic_is_missing
    truncates_a_dead_letter_that_is_itself_too_large
}

/// Creates a dead-letter topic with three partitions for this test.
fn dead_letter_topic(fixture: &Fixture) -> String {
    let topic = format!("{}.dead", fixture.name);
    fixture.topic(&topic, 3, &[]);
    topic
}

fn start(fixture: &Fixture, topic: &str, flags: &[&str]) -> Walpost {
    fixture.start_with(&[&["--dead-letter-topic", topic], flags].concat())
}

fn ids<'r>(records: &'r [Record], topic: &str) -> Vec<&'r str> {
    let of_topic = records.iter().filter(|record| record.topic == topic);
    of_topic.map(|record| record.header("id")).collect()
}

fn writes_an_oversize_event_as_a_dead_letter_without_its_payload(exactly_once: bool) {
    let fixture = Fixture::with_table(TABLE).in_mode(exactly_once);
    let aggregate = fixture.aggregate(1);
    let topic = dead_letter_topic(&fixture);
    let flags = [&OVERSIZE_FLAGS[..], &["--http", "127.0.0.1:0"]].concat();
    let mut walpost = start(&fixture, &topic, &flags);
    let http = walpost.http();
    fixture.db.run(&format!(
        "INSERT INTO outbox VALUES (1, '{aggregate}', 'k', 'small'),
             (2, '{aggregate}', 'k', repeat('x', 2000000)), (3, '{aggregate}', 'k', 'small')"
    ));
    fixture.db.run(&format!(
        "INSERT INTO outbox VALUES (4, '{aggregate}', 'k', 'small')"
    ));
    let records = fixture.wait_for_records(4);
    fixture.wait_until_confirmed();
    assert_eq!(
        ids(&records, &format!("outbox.event.{aggregate}")),
        ["1", "3", "4"]
    );
    let letter = records.iter().find(|record| record.topic == topic);
    let letter = letter.expect("a dead letter");
    assert_eq!((letter.key(), &letter.payload), ("k", &None));
    for (name, value) in [
        ("id", "2"),
        ("walpost-event-id", "2"),
        ("walpost-error", "oversize"),
        ("walpost-payload-bytes", "2000000"),
        ("walpost-source-table", "public.outbox"),
        ("walpost-source-topic", &format!("outbox.event.{aggregate}")),
        ("walpost-pipeline", &fixture.name),
    ] {
        assert_eq!(letter.header(name), value, "{name}");
    }
    let message = letter.header("walpost-error-message");
    assert!(message.contains("message.max.bytes"), "{message}");
    assert_eq!(parse_position(letter.header("walpost-position")).1, 1);
    let metrics = http.metrics();
    let count = |kind: &str| {
        let mut letters = metrics
            .iter()
            .filter(|(name, _)| name.starts_with("walpost_dead_letters_total"));
        letters
            .find(|(name, _)| name.contains(kind))
            .map(|(_, count)| *count)
    };
    assert_eq!(
        (count("kind=\"oversize\""), count("kind=\"unroutable\"")),
        (Some(1.0), Some(0.0))
    );
    walpost
        .terminate()
        .expect_code(0)
        .expect_mentions(&["dead letter for row with id 2", "oversize_dead_letters=1"]);
    // The delivery checker also reads dead letters, which must be in order and have correct commit
    // positions.
    fixture.check_delivered(&[], fixture.resends(0));
}

fn writes_an_unroutable_event_as_a_dead_letter_with_its_payload(exactly_once: bool) {
    let fixture = Fixture::with_table(
        "CREATE TABLE outbox (id int, aggregatetype text, aggregateid text, payload text, headers json,
             at timestamptz, shard int)",
    )
    .in_mode(exactly_once);
    let aggregate = fixture.aggregate(2);
    let topic = dead_letter_topic(&fixture);
    let mode = if exactly_once {
        "exactly-once"
    } else {
        "at-least-once"
    };
    let walpost = fixture.start_with_file(&format!(
        "on_unroutable = 'dead-letter'\ndead_letter_topic = '{topic}'\ndelivery = '{mode}'\n\
         timestamp = 'at'\npartition = 'shard'"
    ));
    let row = |id: u32, aggregate: &str, headers: &str, at: &str, shard: &str| {
        let values = format!("{id}, {aggregate}, 'k{id}', 'p{id}', {headers}, {at}, {shard}");
        fixture
            .db
            .run(&format!("INSERT INTO outbox VALUES ({values})"));
    };
    let good = format!("'{aggregate}'");
    // The first record for this topic is already invalid: its partition does not exist.
    row(1, &good, "NULL", "NULL", "7");
    row(2, &good, "'{\"a\": \"b\"}'", "'2026-01-01'", "1");
    row(3, "NULL", "NULL", "NULL", "0");
    row(4, "'no topic'", "'{\"a\": \"b\"}'", "NULL", "0");
    row(5, &good, "'[1]'", "NULL", "0");
    row(6, &good, "NULL", "'infinity'", "0");
    row(7, &good, "NULL", "NULL", "-1");
    row(8, &good, "NULL", "NULL", "7");
    row(9, &good, "NULL", "NULL", "1");
    let records = fixture.wait_for_records(9);
    fixture.wait_until_confirmed();
    assert_eq!(
        ids(&records, &format!("outbox.event.{aggregate}")),
        ["2", "9"]
    );
    for (id, message) in [
        ("1", "does not have partition 7"),
        ("3", "the row has no topic"),
        ("4", "is not a valid topic name"),
        ("5", "headers column: the value is not a valid JSON object"),
        ("6", "the timestamp column contains \"infinity\""),
        ("7", "the partition column contains -1"),
        ("8", "does not have partition 7"),
    ] {
        let letter = records.iter().find(|record| record.header("id") == id);
        let letter = letter.unwrap_or_else(|| panic!("{id} is missing"));
        assert_eq!(letter.topic, topic, "{id}");
        assert_eq!(
            (letter.key(), letter.text()),
            (&*format!("k{id}"), &*format!("p{id}"))
        );
        assert_eq!(letter.header("walpost-error"), "unroutable");
        let found = letter.header("walpost-error-message");
        assert!(found.contains(message), "{id}: {found}");
        let names = letter.header_names();
        assert!(!names.contains(&"walpost-payload-bytes"), "{names:?}");
        match id {
            "3" => assert!(!names.contains(&"walpost-source-topic")),
            "4" => assert_eq!(
                letter.header("walpost-source-topic"),
                "outbox.event.no topic"
            ),
            "5" => assert_eq!(letter.header("walpost-source-headers"), "[1]"),
            _ => {}
        }
        assert_eq!(names.contains(&"a"), id == "4", "{names:?}");
    }
    let finished = walpost.terminate().expect_code(0);
    // Only the first dead letter is logged. All further dead letters are only counted.
    assert_eq!(finished.stderr.matches("sent a dead letter for").count(), 1);
    finished.expect_mentions(&["dead letter for row with id 1", "unroutable_dead_letters=7"]);
    fixture.check_delivered(&[], fixture.resends(0));
}

fn writes_a_malformed_message_as_a_dead_letter(exactly_once: bool) {
    let fixture = Fixture::with_outbox(Outbox::Messages).in_mode(exactly_once);
    let aggregate = fixture.aggregate(1);
    let topic = dead_letter_topic(&fixture);
    let prefix = format!("walpost_{}", fixture.name);
    let walpost = start(&fixture, &topic, &UNROUTABLE_FLAGS);
    fixture.insert(&aggregate, "before");
    fixture.db.run(&format!(
        "SELECT pg_logical_emit_message(true, '{prefix}', 'no envelope')"
    ));
    fixture.insert(&aggregate, "after");
    fixture.insert(&format!("missing_{aggregate}"), "key");
    let records = fixture.wait_for_records(4);
    fixture.wait_until_confirmed();
    let (letters, others): (Vec<_>, Vec<_>) =
        records.iter().partition(|record| record.topic == topic);
    let keys: Vec<_> = others.iter().map(|record| record.key()).collect();
    assert_eq!(keys, ["before", "after"]);
    let unreadable = letters.iter().find(|letter| letter.key.is_none());
    let unreadable = unreadable.expect("a letter of the message");
    assert_eq!(unreadable.text(), "no envelope");
    assert_eq!(unreadable.header("walpost-source-prefix"), prefix);
    let message = unreadable.header("walpost-error-message");
    assert!(
        message.contains("the content begins with byte 0x6e"),
        "{message}"
    );
    let unroutable = letters.iter().find(|letter| letter.key.is_some());
    assert_eq!(unroutable.expect("a letter of the event").key(), "key");
    walpost.terminate().expect_code(0);
}

/// Half of the events have no valid topic, and a few are too large to be delivered.
fn keeps_dead_letters_complete_and_in_order_when_killed_under_load(exactly_once: bool) {
    let rounds = 8;
    let fixture = Fixture::new().in_mode(exactly_once);
    fixture.accept_any_name("outbox");
    let mut rng = fastrand::Rng::with_seed(seed());
    let aggregate = fixture.aggregate(2);
    let topic = dead_letter_topic(&fixture);
    // With this limit, the events that the load generates fit into normal records, which have only
    // two headers. Dead letters have more headers, so they fit only if their payloads are
    // truncated.
    let flags = [
        &OVERSIZE_FLAGS[..],
        &UNROUTABLE_FLAGS,
        &["-X", "message.max.bytes=1000"],
    ]
    .concat();
    // The pauses make Walpost send each record in a separate request.
    let load = fixture.load_with_pauses(&[&aggregate, "no topic"], Duration::from_millis(50));
    let large = |fixture: &Fixture| {
        let payload = format!("{{\"large\": \"{}\"}}", "x".repeat(5000));
        let event = crate::support::event::Event::new(&aggregate, "key-1", &payload);
        fixture.db.run(&fixture.events().insert_one(event));
    };
    let mut deaths = Vec::new();
    for round in 0..rounds {
        let walpost = start(&fixture, &topic, &flags);
        large(&fixture);
        if round % 2 == 0 {
            let before = fixture.confirmed();
            wait_until("the slot to move", || fixture.confirmed() > before);
        }
        // Sleep instead of waiting for a condition, because the time of the kill must be random.
        thread::sleep(Duration::from_millis(rng.u64(0..300)));
        deaths.push(fixture.kill(walpost));
    }
    let walpost = start(&fixture, &topic, &flags);
    load.stop();
    large(&fixture);
    let summary = fixture.settle(walpost, &deaths, fixture.resends(rounds));
    assert!(summary.committed > 200, "{summary:?}");
    let records = fixture.records();
    let count_of_kind = |kind: &str| {
        let letters = records.iter().filter(|record| record.topic == topic);
        letters
            .filter(|l| l.header("walpost-error") == kind)
            .count()
    };
    assert!(count_of_kind("oversize") > rounds && count_of_kind("unroutable") > 50);
    if exactly_once {
        assert_eq!(
            (summary.repeated, count_of_kind("oversize")),
            (0, rounds + 1)
        );
    }
}

fn halts_if_the_dead_letter_topic_is_missing(exactly_once: bool) {
    let fixture = Fixture::with_table(TABLE).in_mode(exactly_once);
    let aggregate = fixture.aggregate(1);
    let topic = format!("{}.dead", fixture.name);
    let flags = [&["--dead-letter-topic", &topic], &UNROUTABLE_FLAGS[..]].concat();
    let checked = fixture.check().args(&flags).finish().expect_code(3).stdout;
    assert!(
        checked.contains("--create --topic") && checked.contains(&topic),
        "{checked}"
    );
    fixture.db.run(&format!(
        "INSERT INTO outbox VALUES (1, '{aggregate}', 'k', ''), (2, NULL, 'k', '')"
    ));
    let row = fixture.history()[1].end;
    fixture
        .run()
        .args(&flags)
        .finish()
        .expect_code(3)
        .expect_mentions(&[
            "halted",
            &format!("topic {topic:?} does not exist"),
            "kafka-topics.sh",
        ]);
    assert!(fixture.confirmed() < row);
    let walpost = fixture.start_with(&[&flags[..], &["--create-topics", "2:1"]].concat());
    fixture.wait_until_confirmed();
    fixture.expect_topic(&topic);
    assert_eq!(ids(&fixture.records(), &topic), ["2"]);
    walpost.terminate().expect_code(0);
    let checked = fixture.check().args(&flags).finish().stdout;
    assert!(
        checked.contains(&format!("topic {topic:?} has 2 partition")),
        "{checked}"
    );
}

/// The key alone is larger than any record that Kafka accepts, so even the dead letter has to be
/// truncated.
fn truncates_a_dead_letter_that_is_itself_too_large(exactly_once: bool) {
    let fixture = Fixture::with_table(TABLE).in_mode(exactly_once);
    let aggregate = fixture.aggregate(1);
    let topic = dead_letter_topic(&fixture);
    fixture.db.run(&format!(
        "INSERT INTO outbox VALUES (1, '{aggregate}', 'k', ''), (77, '{aggregate}', repeat('k', 1200000), 'p'),
             (100, '{aggregate}', 'k', '')"
    ));
    let walpost = start(
        &fixture,
        &topic,
        &[OVERSIZE_FLAGS, UNROUTABLE_FLAGS].concat(),
    );
    fixture.wait_until_confirmed();
    let records = fixture.wait_for_records(3);
    let letter = records.iter().find(|record| record.topic == topic);
    let letter = letter.expect("a dead letter");
    assert_eq!((letter.key(), &letter.payload), (&*"k".repeat(1024), &None));
    assert_eq!(letter.header("walpost-truncated"), r#"{"key":1200000}"#);
    assert_eq!(letter.header("walpost-event-id"), "77");
    assert_eq!(
        ids(&records, &format!("outbox.event.{aggregate}")),
        ["1", "100"]
    );
    walpost.terminate().expect_code(0);
}

#[test]
fn writes_dead_letters_to_standard_output_with_their_topic() {
    let fixture = Fixture::with_table(TABLE);
    let walpost = fixture.start_with(&[&["--sink", "stdout"], &UNROUTABLE_FLAGS[..]].concat());
    fixture
        .db
        .run("INSERT INTO outbox VALUES (1, NULL, 'k', 'p')");
    fixture.wait_until_confirmed();
    let output = walpost.terminate().expect_code(0).stdout;
    let line: serde_json::Value = serde_json::from_str(output.trim()).unwrap();
    assert_eq!(line["topic"], "walpost-dead-letters");
    assert_eq!((&line["key"], &line["value"]), (&"k".into(), &"p".into()));
}

#[test]
fn rejects_invalid_dead_letter_settings_without_connecting() {
    let refused = |flags: &[&str], texts: &[&str]| {
        Invocation::new([
            "run",
            "--postgres",
            "host=/nowhere user=u",
            "--kafka",
            "localhost:1",
        ])
        .args(flags)
        .finish()
        .expect_code(2)
        .expect_mentions(texts);
    };
    refused(&["--on-oversize", "drop"], &["drop", "halt, dead-letter"]);
    refused(&["--on-unroutable", "skip"], &["skip", "halt, dead-letter"]);
    let topic = |name| [&UNROUTABLE_FLAGS[..], &["--dead-letter-topic", name]].concat();
    refused(
        &topic("no topic"),
        &["dead_letter_topic", "1 to 249 characters"],
    );
    refused(
        &["--dead-letter-topic", "dead"],
        &["dead_letter_topic", "Set on_oversize or on_unroutable"],
    );
    refused(
        &[&topic("events")[..], &["--topic", "events"]].concat(),
        &["dead_letter_topic", "already used for events"],
    );
    refused(
        &[&OVERSIZE_FLAGS[..], &["--outbox", "messages"]].concat(),
        &["on_oversize", "message.max.bytes"],
    );
}
