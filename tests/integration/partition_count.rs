//! Partitions are added to a topic: keys move to other partitions, and no record is lost or
//! repeated.

use crate::support::fixture::Fixture;
use crate::support::wait::wait_until;
use crate::support::walpost::Walpost;

in_both_modes! {
    delivers_to_partitions_added_while_walpost_was_stopped
    delivers_to_partitions_added_while_walpost_runs
    delivers_a_row_for_a_partition_added_while_walpost_runs
    delivers_rows_for_added_partitions_and_writes_dead_letters_for_nonexistent_ones
    halts_on_a_row_for_a_partition_that_does_not_exist
}

const TABLE: &str =
    "CREATE TABLE outbox (id int, aggregatetype text, aggregateid text, payload text, shard int)";

/// A warning that is logged at startup in exactly-once mode, because the checkpoint contains the
/// previous number of partitions.
const CHANGE_WARNING: &str = "the topic's number of partitions has changed";

fn delivers_to_partitions_added_while_walpost_was_stopped(exactly_once: bool) {
    let fixture = Fixture::new().in_mode(exactly_once);
    let aggregate = fixture.aggregate(1);
    let load = fixture.load(&[&aggregate]);
    let walpost = fixture.start();
    load.wait_for_transactions(40);
    walpost.terminate().expect_code(0);
    fixture.add_partitions(&aggregate, 4);
    let mut walpost = fixture.start();
    load.wait_for_transactions(40);
    load.stop();
    if exactly_once {
        let line = walpost.wait_for_log(CHANGE_WARNING);
        for part in ["WARN", "before=1", "found=4", &aggregate] {
            assert!(line.contains(part), "{part} in {line}");
        }
    }
    fixture.settle(walpost, &[], fixture.resends(0));
    assert!(partitions_in_use(&fixture) > 1);
}

fn delivers_to_partitions_added_while_walpost_runs(exactly_once: bool) {
    let fixture = Fixture::new().in_mode(exactly_once);
    let aggregate = fixture.aggregate(1);
    let load = fixture.load(&[&aggregate]);
    // Kafka does not notify clients of new partitions. By default, clients refresh their metadata
    // every five minutes.
    let walpost = fixture.start_with(&["-X", "topic.metadata.refresh.interval.ms=500"]);
    load.wait_for_transactions(40);
    fixture.add_partitions(&aggregate, 4);
    wait_until("the other rows to be used", || {
        partitions_in_use(&fixture) > 1
    });
    load.stop();
    walpost.terminate().expect_code(0);
    let mut walpost = fixture.start();
    fixture.insert(&aggregate, "k");
    if exactly_once {
        walpost.wait_for_log(CHANGE_WARNING);
    }
    fixture.settle(walpost, &[], fixture.resends(0));
}

/// Starts Walpost, configured to take the partition from the column `shard`, and delivers one row
/// to a topic with four partitions.
fn start_with_shards(fixture: &Fixture, settings: &str) -> (Walpost, String) {
    let aggregate = fixture.aggregate(4);
    let mode = match fixture.is_exactly_once() {
        true => "exactly-once",
        false => "at-least-once",
    };
    let walpost = fixture.start_with_file(&format!(
        "partition = 'shard'\ndelivery = '{mode}'\n{settings}"
    ));
    insert(fixture, &aggregate, "1", "0");
    fixture.wait_for_records(1);
    (walpost, aggregate)
}

/// Commits one row for each id in a single transaction.
fn insert(fixture: &Fixture, aggregate: &str, ids: &str, shard: &str) {
    fixture.db.run(&format!(
        "INSERT INTO outbox SELECT id, '{aggregate}', 'k', 'p', {shard} FROM unnest(ARRAY[{ids}]) id"
    ));
}

/// Returns the ids of the records in a partition.
fn ids(fixture: &Fixture, aggregate: &str, partition: i32) -> Vec<String> {
    let topic = format!("outbox.event.{aggregate}");
    let records = fixture.records();
    let ours = records
        .iter()
        .filter(|record| record.topic == topic && record.partition == partition);
    ours.map(|record| record.header("id").to_owned()).collect()
}

fn delivers_a_row_for_a_partition_added_while_walpost_runs(exactly_once: bool) {
    let fixture = Fixture::with_table(TABLE).in_mode(exactly_once);
    let (walpost, aggregate) = start_with_shards(&fixture, "");
    fixture.add_partitions(&aggregate, 12);
    insert(&fixture, &aggregate, "2, 3", "8");
    insert(&fixture, &aggregate, "4", "11");
    fixture.wait_for_records(4);
    assert_eq!(ids(&fixture, &aggregate, 8), ["2", "3"]);
    assert_eq!(ids(&fixture, &aggregate, 11), ["4"]);
    fixture.settle(walpost, &[], fixture.resends(0));
}

fn delivers_rows_for_added_partitions_and_writes_dead_letters_for_nonexistent_ones(
    exactly_once: bool,
) {
    let fixture = Fixture::with_table(TABLE).in_mode(exactly_once);
    let letters = format!("{}.dead", fixture.name);
    fixture.topic(&letters, 3, &[]);
    let (walpost, aggregate) = start_with_shards(
        &fixture,
        &format!("on_unroutable = 'dead-letter'\ndead_letter_topic = '{letters}'"),
    );
    insert(&fixture, &aggregate, "2", "8");
    fixture.wait_for_records(2);
    fixture.add_partitions(&aggregate, 12);
    insert(&fixture, &aggregate, "3", "11");
    // The batch would not be delivered before the timeout if Walpost queried the brokers for every
    // row.
    let many = (1000..1500).map(|id| id.to_string()).collect::<Vec<_>>();
    insert(&fixture, &aggregate, &many.join(", "), "20");
    insert(&fixture, &aggregate, "4", "11");
    let records = fixture.wait_for_records(504);
    assert_eq!(ids(&fixture, &aggregate, 11), ["3", "4"]);
    let of_letters = records.iter().filter(|record| record.topic == letters);
    for letter in of_letters {
        let (id, output) = (letter.header("id"), letter.header("walpost-error-message"));
        let partition = if id == "2" { 8 } else { 20 };
        assert!(
            output.contains(&format!("does not have partition {partition}")),
            "{id}: {output}"
        );
    }
    fixture.settle(walpost, &[], fixture.resends(0));
}

fn halts_on_a_row_for_a_partition_that_does_not_exist(exactly_once: bool) {
    let fixture = Fixture::with_table(TABLE).in_mode(exactly_once);
    let (walpost, aggregate) = start_with_shards(&fixture, "");
    fixture.add_partitions(&aggregate, 6);
    insert(&fixture, &aggregate, "2", "6");
    walpost
        .finish()
        .expect_code(3)
        .expect_mentions(&["halted", "does not have partition 6"]);
    let event = fixture.history().pop().unwrap();
    assert!(
        fixture.confirmed() < event.end,
        "the event is not confirmed"
    );
}

fn partitions_in_use(fixture: &Fixture) -> usize {
    let ends = fixture.broker.ends(&fixture.topics());
    ends.values().filter(|end| **end > 0).count()
}
