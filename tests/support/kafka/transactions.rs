//! The ends of transactions, and brokers that lose them.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use super::super::wait::wait_until;
use super::Broker;
use super::java::{JVM, java};

impl Broker {
    /// Aborts the transactions that are open in the topics, in their order, as kafka-transactions.sh does.
    pub(crate) fn abort_open_transactions(&self, topics: &[String]) {
        let transactions = |arguments: &[&str]| {
            let output = java(&self.folder, &JVM)
                .arg("org.apache.kafka.tools.TransactionsCommand")
                .args(["--bootstrap-server", &self.address()])
                .args(arguments)
                .output()
                .expect("java starts");
            let said = String::from_utf8(output.stdout).unwrap();
            assert!(output.status.success(), "{arguments:?}: {said}");
            said
        };
        for topic in topics {
            for partition in 0..self.partitions(topic) {
                let place = ["--topic", topic, "--partition", &partition.to_string()];
                let producers = transactions(&[&["describe-producers"], &place[..]].concat());
                let columns = producers.lines().map(str::split_whitespace);
                // That of a producer without an open one is None.
                let open = columns
                    .filter_map(|mut line| line.next_back())
                    .filter(|start| start.parse::<u64>().is_ok());
                for start in open {
                    let of_it = ["--start-offset", start];
                    transactions(&[&["abort"], &place[..], &of_it].concat());
                }
            }
        }
    }

    /// Waits until every transaction that there is by now in a topic has its end. A broker
    /// acknowledges a commit before that, and one that is killed meanwhile may lose it: see
    /// [`Broker::has_lost_an_end`].
    pub(crate) fn wait_for_ends(&self, topic: &str) {
        let topic = [topic.to_owned()];
        let written = self.written(&topic);
        wait_until("the transactions to have ended", || {
            let ends = self.ends(&topic);
            written
                .iter()
                .all(|(place, end)| ends.get(place).is_some_and(|found| found >= end))
        });
    }

    /// Whether the broker has lost the end of a transaction: Kafka 4.3 takes partitions that have no leader, while
    /// the coordinator of transactions starts, for deleted, and writes no end of a transaction into them: it stays
    /// open there for ever (KAFKA-20734).
    pub(crate) fn has_lost_an_end(&self) -> bool {
        self.log().lines().any(|line| {
            line.contains("transaction markers for")
                && line.contains("these partitions are likely deleted")
        })
    }

    /// Has a broker that is killed in the middle of transactions judged by `test`, and by another broker where
    /// that one has lost the end of one, as nothing can be said of Walpost then.
    pub(crate) fn with_ends(test: impl Fn(&Broker)) {
        for _ in 0..3 {
            let broker = Self::private();
            let outcome = catch_unwind(AssertUnwindSafe(|| test(&broker)));
            match outcome {
                Ok(()) => return,
                Err(_) if broker.has_lost_an_end() => {}
                Err(reason) => resume_unwind(reason),
            }
        }
        panic!("three brokers have lost the end of a transaction");
    }
}
