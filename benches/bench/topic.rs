//! The topic of one measurement.

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
use crate::bed::{Bed, STALL};
use crate::support::wait::wait_for;

/// The settings of the topics.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TopicSettings {
    /// The number of topics. Several topics are selected by the aggregate type.
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

/// The topic of a measurement, or its topics, which are deleted when dropped.
pub(crate) struct Topic<'a> {
    bed: &'a Bed,
    /// The topic as configured in a program: with several topics, the template for their names.
    pub(crate) name: String,
    names: Vec<String>,
    partitions: i32,
}

impl<'a> Topic<'a> {
    pub(crate) fn new(bed: &'a Bed, settings: &TopicSettings) -> Self {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let name = format!("bench.{}", NUMBER.fetch_add(1, Ordering::Relaxed));
        let (name, names) = match settings.topics {
            1 => (name.clone(), vec![name]),
            topics => {
                let of = |number| format!("{name}.{}", aggregate_type(number, topics));
                let names = (0..topics).map(of).collect();
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
        // Directly after a topic was created, a broker may not know yet that it is the leader.
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

    /// Returns the number of committed records by reading them, because the offsets of a topic with
    /// transactions also count transaction markers.
    pub(crate) fn committed_records(&self) -> usize {
        let reader = self.bed.broker.reader();
        reader.assign(&self.at(Offset::Beginning)).unwrap();
        let mut open = self.names.len() * usize::try_from(self.partitions).unwrap();
        let mut records = 0;
        while open > 0 {
            match reader.poll(STALL).expect("a record, or the end") {
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
    pub(crate) fn at(&self, offset: Offset) -> TopicPartitionList {
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
    let mut at = TopicPartitionList::new();
    for topic in topics {
        topic.add_to(&mut at);
    }
    at.set_all_offsets(Offset::End).ok()?;
    let observer = &topics.first()?.bed.observer;
    let ends = observer
        .offsets_for_times(at, Duration::from_secs(30))
        .ok()?;
    let ends = ends.elements();
    let mut records: HashMap<&str, usize> = HashMap::new();
    for partition in &ends {
        partition.error().ok()?;
        *records.entry(partition.topic()).or_default() +=
            usize::try_from(partition.offset().to_raw()?).ok()?;
    }
    let of_topic = |topic: &&Topic<'_>| topic.names.iter().map(|name| records[name.as_str()]).sum();
    Some(topics.iter().map(of_topic).collect())
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
