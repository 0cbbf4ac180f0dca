//! The topic of one measurement.

use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rdkafka::admin::{AdminClient, AdminOptions};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::Consumer;
use rdkafka::{Offset, TopicPartitionList};
use serde::{Deserialize, Serialize};
use tokio::runtime::Builder;

use crate::bed::Bed;
use crate::support::wait::wait_for;

/// How records are put into a topic.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TopicSettings {
    pub(crate) partitions: i32,
    /// librdkafka's `compression.type`; without it, what the program has by default.
    pub(crate) compression: Option<String>,
}

impl Default for TopicSettings {
    fn default() -> Self {
        Self {
            partitions: 3,
            compression: None,
        }
    }
}

/// A topic that goes when dropped.
pub(crate) struct Topic<'a> {
    bed: &'a Bed,
    pub(crate) name: String,
    pub(crate) partitions: i32,
}

impl<'a> Topic<'a> {
    pub(crate) fn new(bed: &'a Bed, partitions: i32) -> Self {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let name = format!("bench.{}", NUMBER.fetch_add(1, Ordering::Relaxed));
        bed.broker.create_topic(&name, partitions, &[]);
        let topic = Self {
            bed,
            name,
            partitions,
        };
        // Right after a topic was made, a broker may not know yet that it leads.
        wait_for("the end offsets of a new topic", || topic.try_records());
        topic
    }

    /// Records in it by now. The broker is asked once, for all partitions.
    pub(crate) fn records(&self) -> usize {
        wait_for("the end offsets", || self.try_records())
    }

    fn try_records(&self) -> Option<usize> {
        let ends = self
            .bed
            .observer
            .offsets_for_times(self.at(Offset::End), Duration::from_secs(30))
            .ok()?;
        let mut records = 0;
        for partition in ends.elements() {
            partition.error().ok()?;
            records += usize::try_from(partition.offset().to_raw()?).ok()?;
        }
        Some(records)
    }

    /// Bytes of its segments on the broker's disk.
    pub(crate) fn bytes(&self) -> u64 {
        let data = self.bed.broker.data();
        let segments = (0..self.partitions).flat_map(|partition| {
            fs::read_dir(data.join(format!("{}-{partition}", self.name))).unwrap()
        });
        segments
            .map(|file| file.unwrap())
            .filter(|file| file.path().extension().is_some_and(|end| end == "log"))
            .map(|file| file.metadata().unwrap().len())
            .sum()
    }

    /// All its partitions, each at that offset.
    pub(crate) fn at(&self, offset: Offset) -> TopicPartitionList {
        let mut list = TopicPartitionList::new();
        list.add_partition_range(&self.name, 0, self.partitions - 1);
        list.set_all_offsets(offset).unwrap();
        list
    }
}

impl Drop for Topic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        let admin: AdminClient<DefaultClientContext> = self.bed.broker.client().create().unwrap();
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let deleted = runtime.block_on(admin.delete_topics(&[&self.name], &AdminOptions::new()));
        deleted.unwrap().remove(0).unwrap();
    }
}
