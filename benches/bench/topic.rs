//! Creates and queries the topics of one measurement.

use std::collections::HashMap;
use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rdkafka::admin::{AdminClient, AdminOptions};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::Consumer;
use rdkafka::error::KafkaError;
use rdkafka::{Offset, TopicPartitionList};
use serde::{Deserialize, Serialize};
use tokio::runtime::Builder;

use crate::backlog::aggregate_type;
use crate::bed::{STALL_TIMEOUT, TestBed};
use crate::support::wait::wait_for;

/// The settings of the topics.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TopicSettings {
    /// The number of topics. If there are several, the aggregate type determines the topic.
    pub(crate) topics: usize,
    /// The number of partitions of each topic.
    pub(crate) partitions: i32,
    /// librdkafka's `compression.type`, or `None` for the program's default.
    pub(crate) compression: Option<String>,
}

impl Default for TopicSettings {
    fn default() -> Self {
        Self {
            topics: 1,
            partitions: 3,
            compression: None,
        }
    }
}

/// The topic or topics of a measurement. They are deleted when this value is dropped.
pub(crate) struct Topic<'a> {
    bed: &'a TestBed,
    /// The topic to configure in a program: with several topics, the template for their names.
    pub(crate) name: String,
    names: Vec<String>,
    partitions: i32,
}

impl<'a> Topic<'a> {
    pub(crate) fn new(bed: &'a TestBed, settings: &TopicSettings) -> Self {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let name = format!("bench.{}", NUMBER.fetch_add(1, Ordering::Relaxed));
        let (name, names) = match settings.topics {
            1 => (name.clone(), vec![name]),
            topics => {
                let topic_name = |number| format!("{name}.{}", aggregate_type(number, topics));
                let names = (0..topics).map(topic_name).collect();
                (format!("{name}.{{aggregatetype}}"), names)
            }
        };
        let topic = Self {
            bed,
            name,
            names,
            partitions: settings.partitions,
        };
        bed.broker
            .create_topics(&topic.names(), topic.partitions, &[]);
        // Directly after the topic was created, offset queries may fail, because the broker may not
        // yet have become the leader.
        wait_for("the end offsets of a new topic", || try_records(&[&topic]));
        topic
    }

    fn names(&self) -> Vec<&str> {
        self.names.iter().map(String::as_str).collect()
    }

    /// Returns the current number of records.
    pub(crate) fn records(&self) -> usize {
        records(&[self]).iter().sum()
    }

    /// Reads and counts the committed records. With transactions, offsets can't be used to count
    /// records, because transaction markers also have offsets.
    pub(crate) fn committed_records(&self) -> usize {
        let reader = self.bed.broker.reader();
        reader
            .assign(&self.partitions_at(Offset::Beginning))
            .unwrap();
        let mut open = self.names.len() * usize::try_from(self.partitions).unwrap();
        let mut records = 0;
        while open > 0 {
            match reader
                .poll(STALL_TIMEOUT)
                .expect("a record, or the end of a partition")
            {
                Ok(_) => records += 1,
                Err(KafkaError::PartitionEOF(_)) => open -= 1,
                Err(error) => panic!("{}: {error}", self.name),
            }
        }
        records
    }

    /// Returns the size of the topic's segments on the broker's disk, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        let data = self.bed.broker.data();
        let folders = self.names.iter().flat_map(|name| {
            (0..self.partitions).map(move |partition| format!("{name}-{partition}"))
        });
        folders
            .flat_map(|folder| fs::read_dir(data.join(folder)).unwrap())
            .map(|file| file.unwrap())
            .filter(|file| file.path().extension().is_some_and(|end| end == "log"))
            .map(|file| file.metadata().unwrap().len())
            .sum()
    }

    fn add_to(&self, list: &mut TopicPartitionList) {
        for name in &self.names {
            list.add_partition_range(name, 0, self.partitions - 1);
        }
    }

    /// Returns all partitions, each with the given offset.
    pub(crate) fn partitions_at(&self, offset: Offset) -> TopicPartitionList {
        let mut list = TopicPartitionList::new();
        self.add_to(&mut list);
        list.set_all_offsets(offset).unwrap();
        list
    }
}

/// Returns the current number of records in each topic. Sends one query for all partitions of all
/// topics.
pub(crate) fn records(topics: &[&Topic<'_>]) -> Vec<usize> {
    wait_for("the end offsets", || try_records(topics))
}

fn try_records(topics: &[&Topic<'_>]) -> Option<Vec<usize>> {
    let mut partitions = TopicPartitionList::new();
    for topic in topics {
        topic.add_to(&mut partitions);
    }
    partitions.set_all_offsets(Offset::End).ok()?;
    let observer = &topics.first()?.bed.observer;
    let ends = observer
        .offsets_for_times(partitions, Duration::from_secs(30))
        .ok()?;
    let ends = ends.elements();
    let mut records: HashMap<&str, usize> = HashMap::new();
    for partition in &ends {
        partition.error().ok()?;
        *records.entry(partition.topic()).or_default() +=
            usize::try_from(partition.offset().to_raw()?).ok()?;
    }
    let topic_records =
        |topic: &&Topic<'_>| topic.names.iter().map(|name| records[name.as_str()]).sum();
    Some(topics.iter().map(topic_records).collect())
}

impl Drop for Topic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        let admin: AdminClient<DefaultClientContext> = self.bed.broker.client().create().unwrap();
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let deleted = runtime.block_on(admin.delete_topics(&self.names(), &AdminOptions::new()));
        for topic in deleted.unwrap() {
            topic.unwrap();
        }
    }
}
