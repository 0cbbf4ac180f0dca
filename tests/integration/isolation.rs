//! When the brokers refuse a batch, the record at fault is found and every other record is
//! delivered.

use std::collections::BTreeSet;

use crate::support::fixture::Fixture;

in_both_modes! {
    refused_record_is_named_alone_and_skipping_it_leaves_out_nothing_else
    refused_record_becomes_a_dead_letter_and_the_rest_is_delivered
    record_of_the_size_of_its_neighbours_that_is_refused_is_named_alone
    batches_over_a_limit_that_was_lowered_since_are_delivered_in_smaller_ones
    batches_stay_within_the_limit_of_the_one_topic
}

const TABLE: &str =
    "CREATE TABLE outbox (id int, aggregatetype text, aggregateid text, payload text)";
const PLAIN: [&str; 2] = ["-X", "compression.type=none"];
const ROWS: usize = 1500;
const LARGE_BYTES: usize = 700;
/// The topic's `max.message.bytes`, which is less than a full batch.
const TOPIC_LIMIT_BYTES: &str = "100000";

/// Commits `ROWS` transactions of one row; `key` and `payload` are SQL expressions of the row's
/// number `i`.
fn commit_each(fixture: &Fixture, aggregate: &str, key: &str, payload: &str) {
    fixture.db.run(&format!(
        "DO $$ BEGIN FOR i IN 1..{ROWS} LOOP
             INSERT INTO outbox VALUES (i, '{aggregate}', {key}, {payload});
             COMMIT;
         END LOOP; END $$"
    ));
}

/// Commits `ROWS` transactions, one of which has a row too large for the topic.
fn large_among_small(exactly_once: bool) -> (Fixture<'static>, String) {
    let fixture = Fixture::with_table(TABLE).in_mode(exactly_once);
    let aggregate = format!("{}-limited", fixture.name);
    let topic = format!("outbox.event.{aggregate}");
    fixture.topic(&topic, 3, &[("max.message.bytes", "500000")]);
    let payload = format!("repeat('x', CASE i WHEN {LARGE_BYTES} THEN 900000 ELSE 200 END)");
    commit_each(&fixture, &aggregate, "'k' || i % 50", &payload);
    (fixture, topic)
}

fn ids(fixture: &Fixture, topic: &str) -> BTreeSet<usize> {
    let records = fixture.records();
    let of_topic = records.iter().filter(|record| record.topic == topic);
    of_topic.map(|r| r.header("id").parse().unwrap()).collect()
}

fn all_but_the_large() -> BTreeSet<usize> {
    (1..=ROWS).filter(|id| *id != LARGE_BYTES).collect()
}

/// Skips to the position given in the log.
fn skip_one(fixture: &Fixture, log: &str) {
    let (_, at) = log.split_once("walpost skip --to ").unwrap();
    let at = at.get(..28).expect("a position");
    let skipped = fixture.skip(at).arg("--yes").finish().expect_code(0);
    skipped.expect_mentions(&["1 event would never be delivered"]);
}

fn refused_record_is_named_alone_and_skipping_it_leaves_out_nothing_else(exactly_once: bool) {
    let (fixture, topic) = large_among_small(exactly_once);
    let halted = fixture
        .run()
        .args(PLAIN)
        .finish()
        .expect_code(3)
        .expect_mentions(&[
            "halted",
            &format!("id {LARGE_BYTES}"),
            "max.message.bytes",
            "walpost skip --to",
        ]);
    // In at-least-once mode, other partitions may already have some of the following records.
    let before: BTreeSet<usize> = (1..LARGE_BYTES).collect();
    let delivered = ids(&fixture, &topic);
    assert!(delivered.is_superset(&before) && !delivered.contains(&LARGE_BYTES));
    assert!(!exactly_once || delivered == before, "{delivered:?}");
    assert_eq!(
        fixture.confirmed(),
        fixture.history()[LARGE_BYTES - 2].end,
        "what is before it is confirmed"
    );
    skip_one(&fixture, &halted.stderr);
    let walpost = fixture.start_with(&PLAIN);
    fixture.wait_until_confirmed();
    walpost.terminate().expect_code(0);
    assert_eq!(ids(&fixture, &topic), all_but_the_large());
}

fn refused_record_becomes_a_dead_letter_and_the_rest_is_delivered(exactly_once: bool) {
    let (fixture, topic) = large_among_small(exactly_once);
    let dead = format!("{}.dead", fixture.name);
    fixture.topic(&dead, 3, &[]);
    let flags = ["--dead-letter-topic", &dead, "--on-oversize", "dead-letter"];
    let walpost = fixture.start_with(&[&PLAIN[..], &flags].concat());
    fixture.wait_until_confirmed();
    walpost.terminate().expect_code(0);
    assert_eq!(ids(&fixture, &topic), all_but_the_large());
    assert_eq!(ids(&fixture, &dead), BTreeSet::from([LARGE_BYTES]));
}

/// A compacted topic refuses records without a key. With one partition, the record shares a batch
/// with others.
fn without_key_among_small(fixture: &Fixture) -> String {
    let aggregate = format!("{}-compacted", fixture.name);
    let topic = format!("outbox.event.{aggregate}");
    fixture.topic(&topic, 1, &[("cleanup.policy", "compact")]);
    let key = format!("nullif(i, {LARGE_BYTES})::text");
    commit_each(fixture, &aggregate, &key, "'x'");
    topic
}

/// `on_oversize` applies to oversized records only.
fn record_of_the_size_of_its_neighbours_that_is_refused_is_named_alone(exactly_once: bool) {
    let fixture = Fixture::with_table(TABLE).in_mode(exactly_once);
    let topic = without_key_among_small(&fixture);
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
    assert_eq!(ids(&fixture, &topic), all_but_the_large());
    assert_eq!(ids(&fixture, &dead), BTreeSet::new());
}

/// A few hundred records are tried one by one.
#[test]
fn isolates_a_rejected_record_without_waiting_for_more_records() {
    let fixture = Fixture::with_table(TABLE);
    without_key_among_small(&fixture);
    let halted = fixture.run().args(["-X", "linger.ms=2000"]).finish();
    halted
        .expect_code(3)
        .expect_mentions(&["halted", &format!("id {LARGE_BYTES}")]);
}

/// Inserts a backlog of 1 KB rows that do not compress.
fn backlog(fixture: &Fixture, aggregate: &str, from: usize, to: usize) {
    fixture.db.run(&format!(
        "INSERT INTO outbox SELECT i, '{aggregate}', 'k', string_agg(md5(random()::text), '')
         FROM generate_series({from}, {to}) i, generate_series(1, 32) j GROUP BY i ORDER BY i"
    ));
}

/// The limit is queried from the brokers when the topic is looked up.
fn batches_over_a_limit_that_was_lowered_since_are_delivered_in_smaller_ones(exactly_once: bool) {
    let fixture = Fixture::with_table(TABLE).in_mode(exactly_once);
    let aggregate = format!("{}-limited", fixture.name);
    let topic = format!("outbox.event.{aggregate}");
    fixture.topic(&topic, 1, &[]);
    let mut walpost = fixture.start_with(&PLAIN);
    backlog(&fixture, &aggregate, 1, 1);
    fixture.wait_until_confirmed();
    fixture.broker.limit_batches(&topic, TOPIC_LIMIT_BYTES);
    backlog(&fixture, &aggregate, 2, 3000);
    // If a record after the batch is reported first, the next producer queries the limit.
    walpost.wait_for_log("reconnecting");
    fixture.wait_until_confirmed();
    walpost.terminate().expect_code(0);
    assert_eq!(ids(&fixture, &topic), (1..=3000).collect());
}

/// Asserts that Walpost delivered ids 1 to `last` in order, that no batch was refused, and that no
/// producer was abandoned with its records.
fn none_was_refused(fixture: &Fixture, topic: &str, log: &str, last: usize) {
    for trouble in ["refused", "did not accept", "reconnecting"] {
        assert!(!log.contains(trouble), "{log}");
    }
    let records = fixture.records();
    let of_topic = records.iter().filter(|record| record.topic == topic);
    let delivered: Vec<usize> = of_topic.map(|r| r.header("id").parse().unwrap()).collect();
    assert_eq!(delivered, (1..=last).collect::<Vec<_>>());
}

fn batches_stay_within_the_limit_of_the_one_topic(exactly_once: bool) {
    let fixture = Fixture::with_table(TABLE).in_mode(exactly_once);
    let topic = format!("{}.limited", fixture.name);
    fixture.topic(&topic, 1, &[("max.message.bytes", TOPIC_LIMIT_BYTES)]);
    backlog(&fixture, "any", 1, 3000);
    let walpost = fixture.start_with(&[&PLAIN[..], &["--topic", &topic]].concat());
    fixture.wait_until_confirmed();
    let log = walpost.terminate().expect_code(0).stderr;
    none_was_refused(&fixture, &topic, &log, 3000);
}

/// Commits a transaction with rows for one topic, then rows for another one that has a limit;
/// returns both topics.
fn wide_and_limited(fixture: &Fixture) -> [String; 2] {
    let wide = fixture.aggregate(1);
    let aggregate = format!("{}-limited", fixture.name);
    let topics = [&wide, &aggregate].map(|aggregate| format!("outbox.event.{aggregate}"));
    fixture.topic(&topics[1], 1, &[("max.message.bytes", TOPIC_LIMIT_BYTES)]);
    fixture.db.run("BEGIN");
    backlog(fixture, &wide, 1, 3000);
    backlog(fixture, &aggregate, 1, 3000);
    fixture.db.run("COMMIT");
    topics
}

/// Topics are named by rows, so the second topic is found while records for the first are in
/// flight.
#[test]
fn batches_respect_the_limit_of_a_topic_that_is_added_later() {
    let fixture = Fixture::with_table(TABLE);
    let [wide, limited] = wide_and_limited(&fixture);
    // The last batch for the first topic waits this long for more records.
    let walpost = fixture.start_with(&[&PLAIN[..], &["-X", "linger.ms=1000"]].concat());
    fixture.wait_until_confirmed();
    let log = walpost.terminate().expect_code(0).stderr;
    none_was_refused(&fixture, &wide, &log, 3000);
    none_was_refused(&fixture, &limited, &log, 3000);
}

/// As above, but in Kafka transactions: the open transaction is aborted before anything is refused.
#[test]
fn transaction_that_meets_a_topic_with_a_limit_is_made_again_in_smaller_batches() {
    let fixture = Fixture::with_table(TABLE).exactly_once();
    let [wide, limited] = wide_and_limited(&fixture);
    let walpost = fixture.start_with(&PLAIN);
    fixture.wait_until_confirmed();
    let log = walpost.terminate().expect_code(0).stderr;
    assert_eq!(log.matches("reconnecting").count(), 1, "{log}");
    assert!(
        log.contains("accepts batches of at most 100000 bytes (max.message.bytes)"),
        "{log}"
    );
    let log = log.replace("reconnecting", "");
    none_was_refused(&fixture, &wide, &log, 3000);
    none_was_refused(&fixture, &limited, &log, 3000);
}
