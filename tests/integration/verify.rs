//! Tests `verify`, which compares the rows in the table with the records in the topics.

use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{BaseProducer, BaseRecord, Producer};
use serde_json::Value;

use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::records::Record;
use crate::support::wait::{WAIT_TIMEOUT, wait_until};
use crate::support::walpost::Finished;

mod clean;
mod idle;
mod limits;
mod misdelivered;
mod missing;
mod refused;

/// The output of `verify --json`, which covers a single pipeline.
struct VerifyResult {
    ok: bool,
    pipeline: Value,
}

impl VerifyResult {
    fn parse(finished: &Finished) -> Self {
        let document: Value = serde_json::from_str(&finished.stdout).expect("one JSON document");
        let pipeline = document["pipelines"][0].clone();
        assert_eq!(document["ok"], pipeline["ok"], "{document}");
        Self {
            ok: pipeline["ok"].as_bool().expect("a truth value"),
            pipeline,
        }
    }

    /// Returns all nonzero counts, for example `rows 3, delivered 2, missing 1`.
    fn counts(&self) -> String {
        let counts = self.pipeline["counts"].as_object().expect("counts");
        let nonzero = counts.iter().filter(|(_, count)| **count != 0);
        let nonzero = nonzero.map(|(what, count)| format!("{what} {count}"));
        nonzero.collect::<Vec<_>>().join(", ")
    }

    fn findings(&self) -> Vec<Value> {
        self.pipeline["findings"]
            .as_array()
            .expect("a list")
            .clone()
    }

    fn notes(&self) -> String {
        self.pipeline["notes"].to_string()
    }
}

/// Runs `verify` and asserts that its exit code matches its result.
fn verify_with(fixture: &Fixture<'_>, arguments: &[&str]) -> VerifyResult {
    let finished = fixture.verify().arg("--json").args(arguments).finish();
    let verdict = VerifyResult::parse(&finished);
    finished.expect_code(i32::from(!verdict.ok));
    verdict
}

fn verify(fixture: &Fixture<'_>) -> VerifyResult {
    verify_with(fixture, &[])
}

/// A record that the test produces itself, in place of Walpost.
#[derive(Clone)]
struct ForgedRecord<'f> {
    topic: String,
    key: &'f str,
    headers: Vec<(&'f str, String)>,
    /// Milliseconds since 1970-01-01.
    timestamp: Option<i64>,
}

impl<'f> ForgedRecord<'f> {
    fn new(aggregate: &str, key: &'f str, id: &str) -> Self {
        Self {
            topic: format!("outbox.event.{aggregate}"),
            key,
            headers: vec![("id", id.to_owned())],
            timestamp: None,
        }
    }

    /// Sets the record's position: the commit LSN and the event's index in its transaction.
    fn at(mut self, commit: u64, index: u32) -> Self {
        let (high, low) = (commit >> 32, commit & u64::from(u32::MAX));
        let position = format!("{high:08X}/{low:08X}:{index:010}");
        self.headers.push(("walpost-position", position));
        self
    }

    fn with(mut self, header: &'f str, value: &str) -> Self {
        self.headers.push((header, value.to_owned()));
        self
    }

    /// Queues the record in the producer, for the topic's first partition.
    fn send(&self, producer: &BaseProducer) {
        let headers = self
            .headers
            .iter()
            .fold(OwnedHeaders::new(), |all, (key, value)| {
                all.insert(Header {
                    key,
                    value: Some(value),
                })
            });
        let mut record = BaseRecord::to(&self.topic)
            .partition(0)
            .key(self.key)
            .payload("{}")
            .headers(headers);
        record.timestamp = self.timestamp;
        producer.send(record).map_err(|(error, _)| error).unwrap();
    }

    fn produce(&self, broker: &Broker) {
        let producer: BaseProducer = broker.client().create().unwrap();
        self.send(&producer);
        producer.flush(WAIT_TIMEOUT).expect("the broker takes it");
    }
}

/// Produces a duplicate of the record.
fn produce_copy(fixture: &Fixture<'_>, record: &Record) {
    let aggregate = record.topic.strip_prefix("outbox.event.").unwrap();
    let mut again = ForgedRecord::new(aggregate, record.key(), record.header("id"));
    let position = record.header("walpost-position").to_owned();
    again.headers.push(("walpost-position", position));
    again.produce(fixture.broker);
}

/// Commits rows in one transaction, and returns their ids in order.
fn insert_rows(fixture: &Fixture<'_>, aggregate: &str, keys: &[&str]) -> Vec<String> {
    let rows: String = keys
        .iter()
        .map(|key| fixture.insert_sql(aggregate, key))
        .collect();
    fixture.db.run(&format!("BEGIN; {rows} COMMIT"));
    let ids = keys.iter().map(|key| {
        let query = format!("SELECT id FROM outbox WHERE aggregateid = '{key}'");
        fixture.db.value(&query).expect("a row")
    });
    ids.collect()
}

/// Moves the slot past everything committed so far, so that undelivered events are lost.
pub(crate) fn advance_slot(fixture: &Fixture<'_>) {
    let slot = fixture.slot();
    wait_until("the slot to be free", || !fixture.slot_is_active());
    fixture.db.run(&format!(
        "SELECT pg_catalog.pg_replication_slot_advance('{slot}', pg_current_wal_lsn())"
    ));
    // Discard the recorded position. Otherwise, Walpost would detect that the slot was moved.
    fixture.db.run("DELETE FROM walpost.slot_state");
}
