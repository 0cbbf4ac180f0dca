//! Missing topics are created, many of them with a single request.

use crate::support::fixture::Fixture;
use crate::support::walpost::{Invocation, Walpost};

for_each_fixture! {
    creates_many_new_topics_in_batches
}

in_both_modes! {
    creates_topics_for_a_snapshot_in_batches
}

const TOPICS: usize = 200;
/// Upper limit for the number of requests, and for the number of Kafka transactions, if topics are
/// created together. If each topic were created separately, each would need its own request and its
/// own transaction. Even with batching, some topics are looked up before all rows have been read,
/// especially on machines with few processors.
const LOOKUPS_MAX: usize = TOPICS / 2;

/// Returns a command that logs every request to create topics.
fn run(fixture: &Fixture) -> Invocation {
    let run = fixture.run().args(["--create-topics", "1:1"]);
    run.args(["--log-level", "walpost=debug"])
}

/// Writes one event for each of many missing topics, all in one transaction, and returns the
/// topics.
fn insert(fixture: &Fixture) -> Vec<String> {
    let aggregates = (0..TOPICS).map(|number| format!("{}.{number}", fixture.name));
    let aggregates: Vec<_> = aggregates.collect();
    let rows: Vec<_> = aggregates
        .iter()
        .map(|aggregate| fixture.insert_sql(aggregate, "k"))
        .collect();
    fixture
        .db
        .run(&format!("BEGIN; {}; COMMIT", rows.join("; ")));
    let topics = aggregates.iter();
    topics
        .map(|aggregate| format!("outbox.event.{aggregate}"))
        .collect()
}

/// Asserts that each topic contains one record, and that topics were created together rather than
/// one by one.
fn check_topics(fixture: &Fixture, walpost: Walpost, topics: &[String]) {
    fixture.wait_until_confirmed();
    let requests = walpost.logged("creating topics");
    assert!((1..LOOKUPS_MAX).contains(&requests), "{requests} requests");
    walpost.terminate().expect_code(0);
    let ends = fixture.broker.ends(topics);
    assert_eq!(ends.len(), TOPICS);
    // In exactly-once mode, a marker record follows the event, because each Kafka transaction ends
    // with a marker.
    let expected = if fixture.is_exactly_once() { 2 } else { 1 };
    for (place, end) in ends {
        assert_eq!(end, expected, "{place:?}");
    }
    if fixture.is_exactly_once() {
        // Time spent waiting for topics must not count as idle time, which would end the Kafka
        // transaction early.
        let checkpoints = fixture.checkpoints().len();
        assert!(checkpoints < LOOKUPS_MAX, "{checkpoints} checkpoints");
    }
}

fn creates_many_new_topics_in_batches(fixture: Fixture<'static>) {
    let walpost = run(&fixture).start_streaming();
    let topics = insert(&fixture);
    check_topics(&fixture, walpost, &topics);
}

fn creates_topics_for_a_snapshot_in_batches(exactly_once: bool) {
    let fixture = Fixture::bare();
    fixture.db.run(
        "CREATE TABLE outbox (id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload jsonb)",
    );
    let topics = insert(&fixture);
    fixture.init().finish().expect_code(0);
    let fixture = fixture.in_mode(exactly_once);
    let mut walpost = run(&fixture).start();
    walpost.wait_for_log("snapshot delivered");
    check_topics(&fixture, walpost, &topics);
}
