//! The topic is deleted, re-created, limited, or has more partitions.

use super::definition::TOPIC;
use super::walk::Walk;

/// Smaller than any batch of Walpost, and larger than the 78 bytes of the marker that ends a transaction: Kafka 4.3 does not retry a
/// marker that exceeds the limit, so the transaction would stay open for good.
const TOO_SMALL: &str = "100";

impl Walk<'_> {
    pub(super) fn change_topic(&mut self) {
        let topic = self.topic();
        match self.dice.u32(..4) {
            0 => self.recreate_topic(),
            1 => {
                let total = self.scene.broker.partitions(&topic) + 1;
                self.scene.add_partitions(&self.aggregate, total);
                self.note(format!("topic {topic}: {total} partitions"));
            }
            2 => {
                self.scene.broker.limit_batches(&topic, TOO_SMALL);
                self.note(format!("topic {topic}: max.message.bytes {TOO_SMALL}"));
            }
            _ => self.restore_topic(),
        }
    }

    fn topic(&self) -> String {
        format!("{TOPIC}{}", self.aggregate)
    }

    pub(super) fn restore_topic(&mut self) {
        let topic = self.topic();
        self.scene.broker.limit_batches(&topic, "1048588");
        self.note(format!("topic {topic}: restored"));
    }

    /// What was delivered goes with the topic. Walpost could have delivered more until the topic was gone, so it does not run.
    fn recreate_topic(&mut self) {
        let is_running = self.walpost.is_some();
        self.stop();
        self.count_records();
        let topic = self.topic();
        self.scene.broker.delete_topic(&topic);
        self.scene.broker.create_topic(&topic, 2, &[]);
        self.note(format!("topic {topic}: deleted and created again"));
        if is_running {
            self.start_run(None);
        }
    }

    /// Adds the records of the topic to those that were seen before it was deleted.
    pub(super) fn count_records(&mut self) {
        // A process that was killed leaves a transaction open, which hides what follows.
        for topic in self.scene.topics() {
            self.scene.broker.wait_for_ends(&topic);
        }
        for record in self.scene.records() {
            let is_replay = record.header_names().contains(&"walpost-replay");
            let times = self.times.entry(record.header("id").to_owned());
            *times.or_default() += u32::from(!is_replay);
        }
    }
}
