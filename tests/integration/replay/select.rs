//! Rows to replay are selected by position, time, id, aggregate and condition.

use std::collections::HashSet;

use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{BaseProducer, BaseRecord, Producer};

use super::{is_replayed, journal, keys_of, keys_to_stdout, walpost_role};
use crate::support::fixture::Fixture;
use crate::support::wait::WAIT_TIMEOUT;

#[test]
fn selects_rows_to_replay_by_record_position() {
    let fixture = Fixture::new();
    // Write to two topics alternately.
    let aggregates = [fixture.aggregate(2), fixture.aggregate(1)];
    for number in 0..6 {
        fixture.insert(&aggregates[number % 2], &number.to_string());
    }
    let walpost = fixture.start();
    let records = fixture.wait_for_records(6);
    fixture.wait_until_confirmed();
    walpost.terminate().expect_code(0);
    let position = |key: &str| {
        let record = records.iter().find(|record| record.key() == key).unwrap();
        record.header("walpost-position").to_owned()
    };
    let replay = |arguments: &[&str]| fixture.replay(&[&["--yes"], arguments].concat()).finish();
    let (first, last) = (position("1"), position("4"));
    replay(&["--from", &first, "--to", &last]).expect_code(0);
    let records = fixture.wait_for_records(10);
    let again: HashSet<_> = records
        .iter()
        .filter(|record| is_replayed(record))
        .map(|record| record.key().to_owned())
        .collect();
    assert_eq!(again, ["1", "2", "3", "4"].map(str::to_owned).into());

    // Specify a position that no record has, and then a position that can't be looked up because
    // the sink is not Kafka.
    let before = journal(&fixture).len();
    let nowhere = "FFFFFFFF/FFFFFFFF:0000000001";
    let topics = aggregates
        .each_ref()
        .map(|name| format!("outbox.event.{name}"));
    replay(&["--from", nowhere])
        .expect_code(2)
        .expect_mentions(&[nowhere, "--from", &topics[0], &topics[1]]);
    replay(&["--to", &last, "--sink", "stdout"])
        .expect_code(2)
        .expect_mentions(&[&last, "--to", "the sink is stdout"]);
    assert_eq!(journal(&fixture).len(), before);
}

/// Two records have the same position but different ids: one record was forged with the id of a
/// later event. If the replay used the forged record, it would omit the rows before that event.
#[test]
fn rejects_a_position_shared_by_records_with_different_ids() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(2);
    for number in 0..4 {
        fixture.insert(&aggregate, &number.to_string());
    }
    let walpost = fixture.start();
    let records = fixture.wait_for_records(4);
    fixture.wait_until_confirmed();
    walpost.terminate().expect_code(0);
    let find = |key: &str| records.iter().find(|record| record.key() == key).unwrap();
    let (first, last) = (find("0"), find("3"));
    let (position, id) = (first.header("walpost-position"), last.header("id"));
    let producer: BaseProducer = fixture.broker.client().create().unwrap();
    let header = |key, value| Header {
        key,
        value: Some(value),
    };
    let headers = OwnedHeaders::new()
        .insert(header("id", id))
        .insert(header("walpost-position", position));
    let forged = BaseRecord::to(&first.topic)
        .partition(1 - first.partition)
        .key("forged")
        .payload("{}")
        .headers(headers);
    producer.send(forged).map_err(|(error, _)| error).unwrap();
    producer.flush(WAIT_TIMEOUT).expect("a delivered record");

    let before = journal(&fixture).len();
    let found = fixture.replay(&["--yes", "--from", position]).finish();
    found.expect_code(2).expect_mentions(&[
        "--from: records with different ids",
        position,
        first.header("id"),
        id,
        &format!("partition {}", first.partition),
        &format!("partition {}", 1 - first.partition),
    ]);
    assert_eq!(journal(&fixture).len(), before);
    let found = fixture.replay(&["--yes", "--from", first.header("id")]);
    found.finish().expect_code(0);
    fixture.wait_for_records(4 + 1 + 4);
}

#[test]
fn selects_rows_to_replay_by_time_id_aggregate_or_condition() {
    let fixture = Fixture::new();
    let id = |number: u32| format!("00000000-0000-7000-8000-00000000000{number}");
    // The rows' ids are not in the order in which the rows were written.
    for (number, aggregate, hour) in [
        (3, "order", 1),
        (1, "order", 2),
        (2, "bill", 3),
        (4, "bill", 4),
    ] {
        fixture.db.run(&format!(
            "INSERT INTO outbox (id, aggregatetype, aggregateid, type, payload, created_at)
             VALUES ('{}', '{aggregate}', '{number}', 't', '{{\"n\": {number}}}', '2025-11-01 0{hour}:00+00')",
            id(number)
        ));
    }
    let check = |arguments: &[&str], expected: &[&str]| {
        assert_eq!(
            keys_to_stdout(&fixture, arguments),
            expected,
            "{arguments:?}"
        );
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
    // A row is selected only if it matches every flag. If several aggregates are specified, the row
    // must match one of them.
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
    let walpost_role = walpost_role(&fixture);
    let check_where = |arguments: &[&str], expected: &[&str]| {
        let replay = walpost_role.replay(arguments);
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
    let before = journal(&fixture).len();
    let dry = fixture
        .replay(&["--dry-run", "--aggregate", "bill"])
        .finish();
    dry.expect_code(0).expect_mentions(&[
        "2 rows of table",
        "aggregatetype = 'bill'",
        "nothing was sent",
    ]);
    let none = fixture.replay(&["--from", "2030-01-01"]).finish();
    none.expect_code(0)
        .expect_mentions(&["there is nothing to send"]);
    assert_eq!(journal(&fixture).len(), before);
}
