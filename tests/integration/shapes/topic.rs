//! The topic is deleted and re-created, or it gets a lower size limit or more partitions.

use super::definition::TOPIC_PREFIX;
use super::walk::Walk;

/// A size limit that is lower than the size of any of Walpost's batches, but higher than the 78
/// bytes of the marker that ends a transaction. Kafka 4.3 does not retry a marker that exceeds the
/// limit, so the transaction would stay open indefinitely.
const TOO_SMALL_BYTES: &str = "100";

impl Walk<'_> {
    pub(super) fn change_topic(&mut self) {
        let topic = self.topic();
        match self.rng.u32(..4) {
            0 => self.recreate_topic(),
            1 => {
                let total = self.fixture.broker.partitions(&topic) + 1;
                self.fixture.add_partitions(&self.aggregate, total);
                self.log_step(format!("topic {topic}: {total} partitions"));
            }
            2 => {
                self.fixture.broker.limit_batches(&topic, TOO_SMALL_BYTES);
                self.log_step(format!(
                    "topic {topic}: max.message.bytes {TOO_SMALL_BYTES}"
                ));
            }
            _ => self.restore_topic(),
        }
    }

    fn topic(&self) -> String {
        format!("{TOPIC_PREFIX}{}", self.aggregate)
    }

    pub(super) fn restore_topic(&mut self) {
        let topic = self.topic();
        self.fixture.broker.limit_batches(&topic, "1048588");
        self.log_step(format!("topic {topic}: restored"));
    }

    /// Re-creates the topic, which deletes its records. Stops Walpost first. Otherwise, Walpost
    /// could deliver records after the existing records are counted and before the topic is
    /// deleted.
    fn recreate_topic(&mut self) {
        let is_running = self.walpost.is_some();
        self.stop();
        self.count_records();
        let topic = self.topic();
        self.fixture.broker.delete_topic(&topic);
        self.fixture.broker.create_topic(&topic, 2, &[]);
        self.log_step(format!("topic {topic}: deleted and created again"));
        if is_running {
            self.start_run(None);
        }
    }

    /// Counts how often each event occurs in the topics, and adds these numbers to the counts of
    /// earlier deliveries.
    pub(super) fn count_records(&mut self) {
        // A killed process leaves its transaction open. Wait until that transaction has ended,
        // because records that follow it can't be read before then.
        for topic in self.fixture.topics() {
            self.fixture.broker.wait_for_markers(&topic);
        }
        for record in self.fixture.records() {
            let is_replay = record.header_names().contains(&"walpost-replay");
            let times = self.times.entry(record.header("id").to_owned());
            *times.or_default() += u32::from(!is_replay);
        }
    }
}
