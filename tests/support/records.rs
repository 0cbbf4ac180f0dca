//! Reads records as a consumer would: all records of a topic, from the first offset to the last.

use std::collections::HashMap;
use std::time::Duration;

use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::KafkaError;
use rdkafka::message::{Headers, Message};
use rdkafka::{Offset, TopicPartitionList};

use super::kafka::Broker;
use super::wait::{WAIT_TIMEOUT, wait_for};

/// The name of a topic and the number of one of its partitions.
pub(crate) type TopicPartition = (String, i32);

/// A record as received by a consumer.
#[derive(Clone, Debug)]
pub(crate) struct Record {
    pub(crate) topic: String,
    pub(crate) partition: i32,
    pub(crate) offset: i64,
    /// Milliseconds since 1970-01-01.
    pub(crate) timestamp: i64,
    pub(crate) key: Option<Vec<u8>>,
    /// The payload, or `None` for a tombstone.
    pub(crate) payload: Option<Vec<u8>>,
    pub(crate) headers: Vec<(String, Option<Vec<u8>>)>,
}

impl Record {
    /// Returns the key as text.
    pub(crate) fn key(&self) -> &str {
        str::from_utf8(self.key.as_deref().expect("a key")).expect("a key in UTF-8")
    }

    /// Returns the payload as text.
    pub(crate) fn text(&self) -> &str {
        str::from_utf8(self.payload.as_deref().expect("a payload")).expect("a payload in UTF-8")
    }

    /// Returns the value of a header as text. Panics unless the record has exactly one header with
    /// this name, and that header has a value.
    pub(crate) fn header(&self, name: &str) -> &str {
        let mut found = self.headers.iter().filter(|(key, _)| key == name);
        let (_, value) = found
            .next()
            .unwrap_or_else(|| panic!("no header {name}: {self:?}"));
        assert!(
            found.next().is_none(),
            "the record has the header {name} twice: {self:?}"
        );
        str::from_utf8(value.as_deref().expect("a header with a value")).expect("a header in UTF-8")
    }

    /// Returns the names of the headers, in order.
    pub(crate) fn header_names(&self) -> Vec<&str> {
        self.headers.iter().map(|(name, _)| name.as_str()).collect()
    }

    /// Returns the partition that contains the record.
    pub(crate) fn topic_partition(&self) -> TopicPartition {
        (self.topic.clone(), self.partition)
    }
}

pub(crate) fn keys(records: &[Record]) -> Vec<String> {
    records
        .iter()
        .map(|record| record.key().to_owned())
        .collect()
}

impl Broker {
    /// Returns all committed records of the topics, ordered by topic, partition and offset.
    pub(crate) fn read(&self, topics: &[String]) -> Vec<Record> {
        let mut records: Vec<_> = self.with_reader(|consumer| {
            let records = topics.iter().map(|topic| read_topic(consumer, topic));
            records.flatten().collect()
        });
        records.sort_by(|a, b| {
            (&a.topic, a.partition, a.offset).cmp(&(&b.topic, b.partition, b.offset))
        });
        records
    }

    /// Returns the offset after the last committed record of each partition. Transaction markers
    /// count as records.
    pub(crate) fn ends(&self, topics: &[String]) -> HashMap<TopicPartition, i64> {
        self.with_reader(|consumer| end_offsets(consumer, topics))
    }

    /// Like [`Broker::ends`], but includes uncommitted records. Kafka acknowledges a transaction's
    /// commit before [`Broker::ends`] counts the transaction's records. On a busy machine, the
    /// delay can be long.
    pub(crate) fn written_offset(&self, topics: &[String]) -> HashMap<TopicPartition, i64> {
        let mut config = self.client();
        config.set("isolation.level", "read_uncommitted");
        end_offsets(&config.create().unwrap(), topics)
    }

    /// Returns the number of records in the topics. The result is correct only if there were no
    /// transactions, because their markers are counted too.
    pub(crate) fn count(&self, topics: &[String]) -> usize {
        usize::try_from(self.ends(topics).values().sum::<i64>()).unwrap()
    }

    /// Calls `read` with a consumer to which no partitions are assigned. Consumers of the shared
    /// broker are reused, because each new one costs two threads, three connections, and 100 ms
    /// when it is dropped. Consumers of other brokers are not reused: their connections may break,
    /// and they would then behave differently from a new consumer.
    pub(super) fn with_reader<T>(&self, read: impl FnOnce(&BaseConsumer) -> T) -> T {
        let kept = self.readers.lock().unwrap().pop();
        let consumer = kept.unwrap_or_else(|| self.reader());
        let found = read(&consumer);
        if self.is_shared() {
            consumer.unassign().unwrap();
            self.readers.lock().unwrap().push(consumer);
        }
        found
    }

    /// Creates a consumer to which no partitions are assigned.
    pub(crate) fn reader(&self) -> BaseConsumer {
        self.client()
            .set("group.id", "tests")
            .set("enable.auto.commit", "false")
            .set("isolation.level", "read_committed")
            .set("enable.partition.eof", "true")
            .set("fetch.wait.max.ms", "10")
            .set("fetch.message.max.bytes", "33554432")
            .set("receive.message.max.bytes", "134217728")
            .set("fetch.max.bytes", "67108864")
            .create()
            .unwrap()
    }
}

/// Returns the committed records of one topic up to its current end, partition by partition.
fn read_topic(consumer: &BaseConsumer, topic: &String) -> Vec<Record> {
    let ends = end_offsets(consumer, std::slice::from_ref(topic));
    let mut remaining: HashMap<i32, i64> = ends
        .into_iter()
        .map(|((_, partition), end)| (partition, end))
        .filter(|(_, end)| *end > 0)
        .collect();
    let ends = remaining.clone();
    let mut assignment = TopicPartitionList::new();
    for partition in remaining.keys() {
        assignment
            .add_partition_offset(topic, *partition, Offset::Offset(0))
            .unwrap();
    }
    consumer.assign(&assignment).unwrap();
    let mut records = Vec::new();
    while !remaining.is_empty() {
        let message = consumer.poll(WAIT_TIMEOUT).expect("the remaining records");
        match message {
            // The last offset may belong to a transaction marker, which is not returned as a
            // record.
            Err(KafkaError::PartitionEOF(partition)) => {
                remaining.remove(&partition);
            }
            message => {
                let record = to_record(&message.expect("a record"));
                let end = ends[&record.partition];
                if record.offset + 1 >= end {
                    remaining.remove(&record.partition);
                }
                if record.offset < end {
                    records.push(record);
                }
            }
        }
    }
    records
}

fn end_offsets(consumer: &BaseConsumer, topics: &[String]) -> HashMap<TopicPartition, i64> {
    const TIMEOUT: Duration = Duration::from_secs(30);
    let mut requested = TopicPartitionList::new();
    for topic in topics {
        let metadata = consumer
            .fetch_metadata(Some(topic), TIMEOUT)
            .expect("the broker answers");
        for partition in metadata.topics()[0].partitions() {
            requested
                .add_partition_offset(topic, partition.id(), Offset::End)
                .unwrap();
        }
    }
    if requested.count() == 0 {
        return HashMap::new();
    }
    // Request all offsets at once, because tests do this often and querying partitions one by one
    // takes two requests per partition. Retry, because a broker may not have become the leader of a
    // newly created partition yet.
    wait_for("offsets", || {
        let ends = consumer
            .offsets_for_times(requested.clone(), TIMEOUT)
            .ok()?;
        let ends = ends.elements().into_iter().map(|end| {
            let place = (end.topic().to_owned(), end.partition());
            match (end.error(), end.offset()) {
                (Ok(()), Offset::Offset(offset)) => Some((place, offset)),
                _ => None,
            }
        });
        ends.collect()
    })
}

fn to_record(message: &impl Message<Headers = rdkafka::message::BorrowedHeaders>) -> Record {
    let headers = message.headers().map_or_else(Vec::new, |headers| {
        headers
            .iter()
            .map(|header| (header.key.to_owned(), header.value.map(<[u8]>::to_vec)))
            .collect()
    });
    Record {
        topic: message.topic().to_owned(),
        partition: message.partition(),
        offset: message.offset(),
        timestamp: message.timestamp().to_millis().unwrap_or(-1),
        key: message.key().map(<[u8]>::to_vec),
        payload: message.payload().map(<[u8]>::to_vec),
        headers,
    }
}
