//! Creates the topics for a measurement and counts the records in them.

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

/// The topics to create, and how records sent to them are compressed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TopicSettings {
    /// The number of topics. If there are several topics, the aggregate type determines a record's
    /// topic.
    pub(crate) topics: usize,
    /// The number of partitions of each topic.
    pub(crate) partitions: i32,
    /// A value for librdkafka's `compression.type`, or `None` for the program's default.
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

/// The topics of one measurement, usually a single topic. The topics are deleted when this value is
/// dropped.
pub(crate) struct Topic<'a> {
    bed: &'a TestBed,
    /// The topic setting of the measured program: the name of the topic, or a template if there are
    /// several topics.
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
        // Immediately after a topic is created, offset queries may fail, because its partitions may
        // not have a leader yet.
        wait_for("the end offsets of a new topic", || try_records(&[&topic]));
        topic
    }

    fn names(&self) -> Vec<&str> {
        self.names.iter().map(String::as_str).collect()
    }

    /// Returns the current number of records in all topics.
    pub(crate) fn records(&self) -> usize {
        records(&[self]).iter().sum()
    }

    /// Counts the committed records by reading them. Records that were written in transactions
    /// can't be counted by their offsets, because transaction markers have offsets too.
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

    /// Returns the total size of the topics' segments on the broker's disk, in bytes.
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

    /// Returns a list of all partitions, each with the given offset.
    pub(crate) fn partitions_at(&self, offset: Offset) -> TopicPartitionList {
        let mut list = TopicPartitionList::new();
        self.add_to(&mut list);
        list.set_all_offsets(offset).unwrap();
        list
    }
}

/// Returns the current number of records for each of `topics`. Queries the offsets of all
/// partitions at once.
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
