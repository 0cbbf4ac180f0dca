//! Waits for transaction markers, and detects brokers that have lost one.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use super::super::wait::wait_until;
use super::Broker;
use super::java::{JVM_OPTIONS, java};

impl Broker {
    /// Aborts all open transactions in the topics, one topic after another, in the same way as
    /// kafka-transactions.sh.
    pub(crate) fn abort_open_transactions(&self, topics: &[String]) {
        let transactions = |arguments: &[&str]| {
            let output = java(&self.folder, &JVM_OPTIONS)
                .arg("org.apache.kafka.tools.TransactionsCommand")
                .args(["--bootstrap-server", &self.address()])
                .args(arguments)
                .output()
                .expect("java starts");
            let text = String::from_utf8(output.stdout).unwrap();
            assert!(output.status.success(), "{arguments:?}: {text}");
            text
        };
        for topic in topics {
            for partition in 0..self.partitions(topic) {
                let partition_arguments = ["--topic", topic, "--partition", &partition.to_string()];
                let producers =
                    transactions(&[&["describe-producers"], &partition_arguments[..]].concat());
                let columns = producers.lines().map(str::split_whitespace);
                // The last column is `None` if the producer has no open transaction.
                let open = columns
                    .filter_map(|mut line| line.next_back())
                    .filter(|start| start.parse::<u64>().is_ok());
                for start in open {
                    let offset_arguments = ["--start-offset", start];
                    transactions(
                        &[&["abort"], &partition_arguments[..], &offset_arguments].concat(),
                    );
                }
            }
        }
    }

    /// Waits until every transaction that has written to the topic so far has ended. A broker
    /// acknowledges a commit before it writes the marker. If it is killed between these two steps,
    /// it may lose the marker; see [`Broker::has_lost_a_marker`].
    pub(crate) fn wait_for_markers(&self, topic: &str) {
        let topic = [topic.to_owned()];
        let written = self.written_offset(&topic);
        wait_until("the transactions to have ended", || {
            let ends = self.ends(&topic);
            written
                .iter()
                .all(|(partition, end)| ends.get(partition).is_some_and(|found| found >= end))
        });
    }

    /// Returns whether the broker has lost a transaction marker. If a partition has no leader while
    /// the transaction coordinator starts, Kafka 4.3 assumes that the partition was deleted and
    /// writes no marker to it. The transaction then remains open indefinitely (KAFKA-20734).
    pub(crate) fn has_lost_a_marker(&self) -> bool {
        self.log().lines().any(|line| {
            line.contains("transaction markers for")
                && line.contains("these partitions are likely deleted")
        })
    }

    /// Runs `test`, which kills a broker during transactions. If the test fails and the broker has
    /// lost a transaction marker, runs it again with another broker, because such a failure does
    /// not indicate a bug in Walpost.
    pub(crate) fn with_markers(test: impl Fn(&Broker)) {
        for _ in 0..3 {
            let broker = Self::private();
            let outcome = catch_unwind(AssertUnwindSafe(|| test(&broker)));
            match outcome {
                Ok(()) => return,
                Err(_) if broker.has_lost_a_marker() => {}
                Err(reason) => resume_unwind(reason),
            }
        }
        panic!("three brokers have lost a transaction marker");
    }
}
