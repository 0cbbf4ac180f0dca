//! Produces records directly, without Walpost.

use std::time::Duration;

use rdkafka::producer::{BaseProducer, BaseRecord, Producer};

use super::super::wait::WAIT_TIMEOUT;
use super::Broker;

impl Broker {
    /// Produces a record to the first partition of a topic.
    pub(crate) fn produce(&self, topic: &str, key: &str, payload: &str) {
        let producer: BaseProducer = self.client().create().unwrap();
        let record = BaseRecord::to(topic).partition(0).key(key).payload(payload);
        producer.send(record).map_err(|(error, _)| error).unwrap();
        producer
            .flush(WAIT_TIMEOUT)
            .expect("the broker acknowledges the record");
    }

    /// Produces `count` records with the same key to the first partition of a topic.
    pub(crate) fn produce_many(&self, topic: &str, key: &str, count: usize) {
        let producer: BaseProducer = self.client().create().unwrap();
        for _ in 0..count {
            let record = BaseRecord::to(topic).partition(0).key(key).payload("");
            producer.send(record).map_err(|(error, _)| error).unwrap();
        }
        producer
            .flush(WAIT_TIMEOUT)
            .expect("the broker acknowledges the records");
    }

    /// Produces a record to the first partition of a topic, in a transaction that is left open. The
    /// broker aborts it after the timeout `lasts`.
    pub(crate) fn open_transaction(&self, topic: &str, key: &str, lasts: Duration) {
        let mut config = self.client();
        config
            .set("transactional.id", key)
            .set("transaction.timeout.ms", lasts.as_millis().to_string());
        let producer: BaseProducer = config.create().unwrap();
        producer.init_transactions(WAIT_TIMEOUT).unwrap();
        producer.begin_transaction().unwrap();
        let record = BaseRecord::to(topic).partition(0).key(key).payload("");
        producer.send(record).map_err(|(error, _)| error).unwrap();
        producer
            .flush(WAIT_TIMEOUT)
            .expect("the broker acknowledges the record");
        // Don't drop the producer, because that would end the transaction.
        std::mem::forget(producer);
    }
}
