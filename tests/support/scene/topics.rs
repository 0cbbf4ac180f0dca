//! The topics of the test, and their records.

use std::collections::HashSet;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::super::records::Record;
use super::super::wait::{WAIT_TIMEOUT, poll_until};
use super::Scene;

/// Interval after which records are read again even if the end offsets have not changed.
const REREAD_INTERVAL: Duration = Duration::from_secs(1);

/// The topics of a test.
#[derive(Default)]
pub(super) struct Topics {
    names: Mutex<Vec<String>>,
    /// Topics to which partitions were added.
    moved: Mutex<HashSet<String>>,
}

impl Topics {
    /// Returns whether a key of the topic may be in any of its partitions.
    pub(super) fn may_have_moved(&self, topic: &str) -> bool {
        self.moved.lock().unwrap().contains(topic)
    }
}

impl Scene<'_> {
    /// Creates the topic for an aggregate type that only this test uses, and returns the aggregate
    /// type.
    pub(crate) fn aggregate(&self, partitions: i32) -> String {
        let aggregate = format!("{}.{}", self.name, self.topics().len());
        self.topic(&format!("outbox.event.{aggregate}"), partitions, &[]);
        aggregate
    }

    /// Adds partitions to the aggregate's topic. From then on, records of the same key may be in
    /// different partitions.
    pub(crate) fn add_partitions(&self, aggregate: &str, total: usize) {
        let topic = format!("outbox.event.{aggregate}");
        self.broker.add_partitions(&topic, total);
        self.topics.moved.lock().unwrap().insert(topic);
    }

    pub(crate) fn topic(&self, name: &str, partitions: i32, settings: &[(&str, &str)]) {
        self.broker.create_topic(name, partitions, settings);
        self.expect_topic(name);
    }

    /// Adds a topic that the test does not create itself to the topics of this test.
    pub(crate) fn expect_topic(&self, name: &str) {
        self.topics.names.lock().unwrap().push(name.to_owned());
    }

    pub(crate) fn topics(&self) -> Vec<String> {
        self.topics.names.lock().unwrap().clone()
    }

    /// Returns every record in the topics of this test.
    pub(crate) fn records(&self) -> Vec<Record> {
        self.broker.read(&self.topics())
    }

    /// Waits until the topics contain `count` records, and returns all records.
    pub(crate) fn wait_for_records(&self, count: usize) -> Vec<Record> {
        let found = self.receive_in_time(count);
        let records = self.records();
        assert!(found, "{} records of {count} arrived", records.len());
        records
    }

    /// Returns whether the topics contain `count` committed records within [`WAIT_TIMEOUT`].
    pub(super) fn receive_in_time(&self, count: usize) -> bool {
        let topics = self.topics();
        let mut read = None;
        let found = poll_until(WAIT_TIMEOUT, || {
            let ends = self.broker.ends(&topics);
            // End offsets also count transaction markers.
            let arrived_at_most = usize::try_from(ends.values().sum::<i64>()).unwrap();
            if arrived_at_most < count || !self.exactly_once {
                return (arrived_at_most >= count).then_some(());
            }
            if let Some((before, at)) = &read
                && *before == ends
                && Instant::elapsed(at) < REREAD_INTERVAL
            {
                return None;
            }
            let arrived = self.records().len();
            read = Some((ends, Instant::now()));
            (arrived >= count).then_some(())
        });
        found.is_some()
    }
}
