//! If the brokers reject a batch, Walpost finds the record that caused the rejection and delivers
//! all the others.

use std::collections::BTreeSet;

use crate::support::fixture::Fixture;

in_both_modes! {
    reports_and_skips_the_rejected_record_without_affecting_other_records
    writes_a_rejected_record_as_a_dead_letter_and_delivers_the_others
    reports_only_the_rejected_record_among_records_of_equal_size
    delivers_smaller_batches_after_a_topic_limit_is_lowered
    keeps_batches_within_the_size_limit_of_the_configured_topic
}

const TABLE: &str =
    "CREATE TABLE outbox (id int, aggregatetype text, aggregateid text, payload text)";
const NO_COMPRESSION: [&str; 2] = ["-X", "compression.type=none"];
const ROWS: usize = 1500;
const LARGE_BYTES: usize = 700;
/// The topic's `max.message.bytes`, which is smaller than a full batch.
const TOPIC_LIMIT_BYTES: &str = "100000";

/// Commits `ROWS` transactions of one row each. `key` and `payload` are SQL expressions in which
/// `i` is the row's number.
fn commit_rows(fixture: &Fixture, aggregate: &str, key: &str, payload: &str) {
    fixture.db.run(&format!(
        "DO $$ BEGIN FOR i IN 1..{ROWS} LOOP
             INSERT INTO outbox VALUES (i, '{aggregate}', {key}, {payload});
             COMMIT;
         END LOOP; END $$"
    ));
}

/// Commits `ROWS` transactions of one row each, one of which is too large for the topic.
fn fixture_with_large_row(exactly_once: bool) -> (Fixture<'static>, String) {
    let fixture = Fixture::with_table(TABLE).in_mode(exactly_once);
    let aggregate = format!("{}-limited", fixture.name);
    let topic = format!("outbox.event.{aggregate}");
    fixture.topic(&topic, 3, &[("max.message.bytes", "500000")]);
    let payload = format!("repeat('x', CASE i WHEN {LARGE_BYTES} THEN 900000 ELSE 200 END)");
    commit_rows(&fixture, &aggregate, "'k' || i % 50", &payload);
    (fixture, topic)
}

fn ids(fixture: &Fixture, topic: &str) -> BTreeSet<usize> {
    let records = fixture.records();
    let of_topic = records.iter().filter(|record| record.topic == topic);
    of_topic.map(|r| r.header("id").parse().unwrap()).collect()
}

fn ids_except_large() -> BTreeSet<usize> {
    (1..=ROWS).filter(|id| *id != LARGE_BYTES).collect()
}

/// Runs the `walpost skip` command that the log contains.
fn skip_one(fixture: &Fixture, log: &str) {
    let (_, at) = log.split_once("walpost skip --to ").unwrap();
    let at = at.get(..28).expect("a position");
    let skipped = fixture.skip(at).arg("--yes").finish().expect_code(0);
    skipped.expect_mentions(&["1 event would never be delivered"]);
}

fn reports_and_skips_the_rejected_record_without_affecting_other_records(exactly_once: bool) {
    let (fixture, topic) = fixture_with_large_row(exactly_once);
    let halted = fixture
        .run()
        .args(NO_COMPRESSION)
        .finish()
        .expect_code(3)
        .expect_mentions(&[
            "halted",
            &format!("id {LARGE_BYTES}"),
            "max.message.bytes",
            "walpost skip --to",
        ]);
    // In at-least-once mode, some of the records after the rejected one may already have been
    // written to other partitions.
    let before: BTreeSet<usize> = (1..LARGE_BYTES).collect();
    let delivered = ids(&fixture, &topic);
    assert!(delivered.is_superset(&before) && !delivered.contains(&LARGE_BYTES));
    assert!(!exactly_once || delivered == before, "{delivered:?}");
    assert_eq!(
        fixture.confirmed(),
        fixture.history()[LARGE_BYTES - 2].end,
        "the preceding events are confirmed"
    );
    skip_one(&fixture, &halted.stderr);
    let walpost = fixture.start_with(&NO_COMPRESSION);
    fixture.wait_until_confirmed();
    walpost.terminate().expect_code(0);
    assert_eq!(ids(&fixture, &topic), ids_except_large());
}

fn writes_a_rejected_record_as_a_dead_letter_and_delivers_the_others(exactly_once: bool) {
    let (fixture, topic) = fixture_with_large_row(exactly_once);
    let dead = format!("{}.dead", fixture.name);
    fixture.topic(&dead, 3, &[]);
    let flags = ["--dead-letter-topic", &dead, "--on-oversize", "dead-letter"];
    let walpost = fixture.start_with(&[&NO_COMPRESSION[..], &flags].concat());
    fixture.wait_until_confirmed();
    walpost.terminate().expect_code(0);
    assert_eq!(ids(&fixture, &topic), ids_except_large());
    assert_eq!(ids(&fixture, &dead), BTreeSet::from([LARGE_BYTES]));
}

/// Commits rows to a compacted topic, which rejects the only row without a key. The topic has a
/// single partition, so that the rejected record is in a batch with others.
fn commit_row_without_key(fixture: &Fixture) -> String {
    let aggregate = format!("{}-compacted", fixture.name);
    let topic = format!("outbox.event.{aggregate}");
    fixture.topic(&topic, 1, &[("cleanup.policy", "compact")]);
    let key = format!("nullif(i, {LARGE_BYTES})::text");
    commit_rows(fixture, &aggregate, &key, "'x'");
    topic
}

/// Kafka rejects the record for a reason other than its size, so `on_oversize` does not apply to
/// it.
fn reports_only_the_rejected_record_among_records_of_equal_size(exactly_once: bool) {
    let fixture = Fixture::with_table(TABLE).in_mode(exactly_once);
    let topic = commit_row_without_key(&fixture);
    let dead = format!("{}.dead", fixture.name);
    fixture.topic(&dead, 1, &[]);
    let flags = ["--dead-letter-topic", &dead, "--on-oversize", "dead-letter"];
    let halted = fixture.run().args(flags).finish().expect_code(3);
    let halted =
        halted.expect_mentions(&["halted", &format!("id {LARGE_BYTES}"), "walpost skip --to"]);
    let before: BTreeSet<usize> = (1..LARGE_BYTES).collect();
    assert_eq!(ids(&fixture, &topic), before);
    assert_eq!(fixture.confirmed(), fixture.history()[LARGE_BYTES - 2].end);
    skip_one(&fixture, &halted.stderr);
    let walpost = fixture.start();
    fixture.wait_until_confirmed();
    walpost.terminate().expect_code(0);
    assert_eq!(ids(&fixture, &topic), ids_except_large());
    assert_eq!(ids(&fixture, &dead), BTreeSet::new());
}

/// To find the rejected record, Walpost sends a few hundred records one at a time. These records
/// must not wait for linger.ms.
#[test]
fn isolates_a_rejected_record_without_waiting_for_more_records() {
    let fixture = Fixture::with_table(TABLE);
    commit_row_without_key(&fixture);
    let halted = fixture.run().args(["-X", "linger.ms=2000"]).finish();
    halted
        .expect_code(3)
        .expect_mentions(&["halted", &format!("id {LARGE_BYTES}")]);
}

/// Inserts a backlog of incompressible 1 KB rows.
fn insert_backlog(fixture: &Fixture, aggregate: &str, from: usize, to: usize) {
    fixture.db.run(&format!(
        "INSERT INTO outbox SELECT i, '{aggregate}', 'k', string_agg(md5(random()::text), '')
         FROM generate_series({from}, {to}) i, generate_series(1, 32) j GROUP BY i ORDER BY i"
    ));
}

/// The topic's `max.message.bytes` is lowered after Walpost has queried this setting.
fn delivers_smaller_batches_after_a_topic_limit_is_lowered(exactly_once: bool) {
    let fixture = Fixture::with_table(TABLE).in_mode(exactly_once);
    let aggregate = format!("{}-limited", fixture.name);
    let topic = format!("outbox.event.{aggregate}");
    fixture.topic(&topic, 1, &[]);
    let mut walpost = fixture.start_with(&NO_COMPRESSION);
    insert_backlog(&fixture, &aggregate, 1, 1);
    fixture.wait_until_confirmed();
    fixture.broker.limit_batches(&topic, TOPIC_LIMIT_BYTES);
    insert_backlog(&fixture, &aggregate, 2, 3000);
    // If librdkafka first reports the failure of a record that is not in the rejected batch,
    // Walpost does not query the topic's size limit until it creates the next producer.
    walpost.wait_for_log("reconnecting");
    fixture.wait_until_confirmed();
    walpost.terminate().expect_code(0);
    assert_eq!(ids(&fixture, &topic), (1..=3000).collect());
}

/// Asserts that Walpost delivered the ids 1 to `last` in order. Also asserts that no batch was
/// rejected, and that no producer was abandoned with records in flight.
fn expect_no_rejection(fixture: &Fixture, topic: &str, log: &str, last: usize) {
    for trouble in ["rejected", "did not accept", "reconnecting"] {
        assert!(!log.contains(trouble), "{log}");
    }
    let records = fixture.records();
    let of_topic = records.iter().filter(|record| record.topic == topic);
    let delivered: Vec<usize> = of_topic.map(|r| r.header("id").parse().unwrap()).collect();
    assert_eq!(delivered, (1..=last).collect::<Vec<_>>());
}

fn keeps_batches_within_the_size_limit_of_the_configured_topic(exactly_once: bool) {
    let fixture = Fixture::with_table(TABLE).in_mode(exactly_once);
    let topic = format!("{}.limited", fixture.name);
    fixture.topic(&topic, 1, &[("max.message.bytes", TOPIC_LIMIT_BYTES)]);
    insert_backlog(&fixture, "any", 1, 3000);
    let walpost = fixture.start_with(&[&NO_COMPRESSION[..], &["--topic", &topic]].concat());
    fixture.wait_until_confirmed();
    let log = walpost.terminate().expect_code(0).stderr;
    expect_no_rejection(&fixture, &topic, &log, 3000);
}

/// Commits a transaction with rows for one topic, followed by rows for a second topic, which has a
/// lower `max.message.bytes`. Returns the names of both topics.
fn commit_for_wide_and_limited_topics(fixture: &Fixture) -> [String; 2] {
    let wide = fixture.aggregate(1);
    let aggregate = format!("{}-limited", fixture.name);
    let topics = [&wide, &aggregate].map(|aggregate| format!("outbox.event.{aggregate}"));
    fixture.topic(&topics[1], 1, &[("max.message.bytes", TOPIC_LIMIT_BYTES)]);
    fixture.db.run("BEGIN");
    insert_backlog(fixture, &wide, 1, 3000);
    insert_backlog(fixture, &aggregate, 1, 3000);
    fixture.db.run("COMMIT");
    topics
}

/// Each row determines its own topic, so Walpost discovers the second topic while records for the
/// first one are in flight.
#[test]
fn keeps_batches_within_the_size_limit_of_a_topic_discovered_while_streaming() {
    let fixture = Fixture::with_table(TABLE);
    let [wide, limited] = commit_for_wide_and_limited_topics(&fixture);
    // `linger.ms` is the time that librdkafka waits for more records before it sends the last batch
    // to the first topic.
    let walpost = fixture.start_with(&[&NO_COMPRESSION[..], &["-X", "linger.ms=1000"]].concat());
    fixture.wait_until_confirmed();
    let log = walpost.terminate().expect_code(0).stderr;
    expect_no_rejection(&fixture, &wide, &log, 3000);
    expect_no_rejection(&fixture, &limited, &log, 3000);
}

/// In exactly-once mode, the open Kafka transaction is aborted before any record is rejected.
#[test]
fn retries_a_transaction_in_smaller_batches_if_a_topic_has_a_lower_limit() {
    let fixture = Fixture::with_table(TABLE).exactly_once();
    let [wide, limited] = commit_for_wide_and_limited_topics(&fixture);
    let walpost = fixture.start_with(&NO_COMPRESSION);
    fixture.wait_until_confirmed();
    let log = walpost.terminate().expect_code(0).stderr;
    assert_eq!(log.matches("reconnecting").count(), 1, "{log}");
    assert!(
        log.contains("accepts batches of at most 100000 bytes (max.message.bytes)"),
        "{log}"
    );
    let log = log.replace("reconnecting", "");
    expect_no_rejection(&fixture, &wide, &log, 3000);
    expect_no_rejection(&fixture, &limited, &log, 3000);
}
