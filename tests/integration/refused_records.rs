//! Brokers reject some records because of their contents. The error message must contain the
//! broker's reason, and the setting `on_unroutable` must apply.

use std::path::PathBuf;

use crate::support::fixture::Fixture;
use crate::support::records::Record;
use crate::support::walpost::Invocation;

const TABLE: &str = "CREATE TABLE outbox (id text, aggregatetype text, aggregateid text, payload text, at timestamptz)";

in_both_modes! {
    error_for_a_timestamp_too_far_ahead_names_the_broker_setting
    halts_on_a_record_without_a_key_for_a_compacted_topic
    halts_on_a_colliding_topic_name_and_reports_the_existing_topic
    writes_rejected_records_as_dead_letters
}

/// Writes a configuration file for a pipeline that takes timestamps from a column and creates
/// topics.
fn file(fixture: &Fixture, settings: &str) -> PathBuf {
    let mode = match fixture.is_exactly_once() {
        true => "exactly-once",
        false => "at-least-once",
    };
    fixture.file(&format!(
        "timestamp = 'at'\ncreate_topics = {{ partitions = 1, replication = 1 }}\ndelivery = '{mode}'\n{settings}"
    ))
}

/// Inserts `rows`, and asserts that the pipeline halts with a message that contains `texts`.
fn expect_halt(fixture: &Fixture, rows: &str, texts: &[&str]) {
    fixture.db.run(&format!("INSERT INTO outbox VALUES {rows}"));
    let run = Invocation::new(["run", "--config"]).arg(file(fixture, ""));
    run.finish()
        .expect_code(3)
        .expect_mentions(&["halted"])
        .expect_mentions(texts);
}

fn of_topic(records: &[Record], topic: &str) -> Vec<String> {
    let records = records.iter().filter(|record| record.topic == topic);
    records.map(|record| record.text().to_owned()).collect()
}

fn error_for_a_timestamp_too_far_ahead_names_the_broker_setting(exactly_once: bool) {
    let fixture = Fixture::with_table(TABLE).in_mode(exactly_once);
    let aggregate = fixture.aggregate(1);
    fixture.db.run("SET timezone = 'UTC'");
    let ahead = fixture
        .db
        .value("SELECT to_char(date_trunc('second', now() + interval '2 hours'), 'YYYY-MM-DD\"T\"HH24:MI:SS\"Z\"')")
        .unwrap();
    expect_halt(
        &fixture,
        &format!(
            "('1', '{aggregate}', 'k', 'good', now()), ('2', '{aggregate}', 'k', 'ahead', '{ahead}')"
        ),
        &[
            "id 2",
            &ahead,
            "message.timestamp.after.max.ms",
            "walpost skip --to",
        ],
    );
    // In at-least-once mode, Walpost resends the preceding record each time it narrows down which
    // record was rejected.
    let mut delivered = of_topic(&fixture.records(), &format!("outbox.event.{aggregate}"));
    delivered.dedup();
    assert_eq!(delivered, ["good"]);
}

fn halts_on_a_record_without_a_key_for_a_compacted_topic(exactly_once: bool) {
    let fixture = Fixture::with_table(TABLE).in_mode(exactly_once);
    let aggregate = format!("{}-compacted", fixture.name);
    fixture.topic(
        &format!("outbox.event.{aggregate}"),
        1,
        &[("cleanup.policy", "compact")],
    );
    expect_halt(
        &fixture,
        &format!("('1', '{aggregate}', NULL, 'p', now())"),
        &[
            "id 1",
            "compacted",
            "needs a key",
            "without key",
            "walpost skip --to",
        ],
    );
}

fn halts_on_a_colliding_topic_name_and_reports_the_existing_topic(exactly_once: bool) {
    let fixture = Fixture::with_table(TABLE).in_mode(exactly_once);
    let taken = format!("outbox.event.{}.orders", fixture.name);
    fixture.topic(&taken, 1, &[]);
    expect_halt(
        &fixture,
        &format!("('1', '{}_orders', 'k', 'p', now())", fixture.name),
        &[
            &format!("outbox.event.{}_orders", fixture.name),
            "collides",
            &taken,
        ],
    );
}

fn writes_rejected_records_as_dead_letters(exactly_once: bool) {
    let fixture = Fixture::with_table(TABLE).in_mode(exactly_once);
    let aggregate = fixture.aggregate(1);
    let dead = format!("{}.dead", fixture.name);
    fixture.topic(&dead, 1, &[]);
    let compacted = format!("{}-compacted", fixture.name);
    fixture.topic(
        &format!("outbox.event.{compacted}"),
        1,
        &[("cleanup.policy", "compact")],
    );
    fixture.topic(&format!("outbox.event.{}.orders", fixture.name), 1, &[]);
    let settings = format!("on_unroutable = 'dead-letter'\ndead_letter_topic = '{dead}'");
    let walpost = Invocation::new(["run", "--config"])
        .arg(file(&fixture, &settings))
        .start_streaming();
    let name = &fixture.name;
    fixture.db.run(&format!(
        "INSERT INTO outbox VALUES ('1', '{aggregate}', 'k', 'first', now()),
             ('2', '{aggregate}', 'k', 'ahead', now() + interval '2 hours'),
             ('3', '{compacted}', NULL, 'no key', now()),
             ('4', '{name}_orders', 'k', 'collides', now()),
             ('5', '{aggregate}', 'k', 'last', now())"
    ));
    fixture.wait_until_confirmed();
    let records = fixture.records();
    let topic = format!("outbox.event.{aggregate}");
    // In at-least-once mode, Walpost resends the preceding records each time it narrows down which
    // record was rejected.
    let mut delivered = of_topic(&records, &topic);
    delivered.dedup();
    assert_eq!(delivered, ["first", "last"]);
    let letters = records.iter().filter(|record| record.topic == dead);
    let mut letters: Vec<_> = letters
        .map(|letter| (letter.text(), letter.header("walpost-error-message")))
        .collect();
    letters.dedup_by_key(|(payload, _)| *payload);
    for ((payload, message), (expected, part)) in letters.iter().zip([
        ("ahead", "message.timestamp.after.max.ms"),
        ("no key", "needs a key"),
        ("collides", "collides"),
    ]) {
        assert_eq!(*payload, expected);
        assert!(message.contains(part), "{message}");
    }
    assert_eq!(letters.len(), 3);
    walpost.terminate().expect_code(0);
}
