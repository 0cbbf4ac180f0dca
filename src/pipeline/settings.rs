//! What one pipeline is to do: validated, with every default filled in.

use std::time::Duration;

use crate::kafka::properties::Properties;
use crate::kafka::topics::CreateTopics;
use crate::outbox::columns::{Mapping, MappingError, TableColumn};
use crate::outbox::settings::OutboxSettings;
use crate::postgres::catalog::Observed;
use crate::postgres::conninfo::Conninfo;
use crate::postgres::target::{Outbox, Target};

/// One pipeline: from one slot to one sink.
#[derive(Clone, Debug)]
pub struct PipelineSettings {
    /// Its name, in logs and in the defaults of other names.
    pub name: String,
    /// The database.
    pub postgres: Conninfo,
    /// Outbox, publication and slot.
    pub target: Target,
    /// How records are made of events.
    pub outbox: OutboxSettings,
    /// Where records go.
    pub sink: SinkSettings,
    /// How often each of them arrives.
    pub delivery: Delivery,
    /// Records that may be between reading and acknowledged.
    pub window_records: u64,
    /// Bytes that may be between reading and acknowledged.
    pub window_bytes: u64,
    /// The largest message of the server that is accepted, in bytes.
    pub row_bytes_max: usize,
    /// How long a connection may be silent before it is taken for dead, on both sides.
    pub link_timeout: Duration,
    /// How long a drain may take.
    pub drain_timeout: Duration,
}

impl PipelineSettings {
    /// Holds the settings against the columns of the table that was observed, or those of an event
    /// in the log.
    ///
    /// # Errors
    /// A column is missing or of a type that can't serve.
    pub fn check_columns(&self, observed: &Observed) -> Result<(), MappingError> {
        let Outbox::Table(table) = &self.target.outbox else {
            return Mapping::of_log(&self.outbox).map(drop);
        };
        let columns: Vec<_> = observed
            .table
            .iter()
            .flat_map(|table| &table.columns)
            .map(|(name, type_oid)| TableColumn {
                name,
                type_oid: *type_oid,
            })
            .collect();
        Mapping::bind(&self.outbox, &table.to_string(), &columns).map(drop)
    }
}

/// How often a record arrives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// Once, and what was in flight again after a crash.
    AtLeastOnce,
    /// Once, for readers of committed records.
    ExactlyOnce(CheckpointSettings),
}

/// Where exactly-once keeps its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckpointSettings {
    /// The topic.
    pub topic: String,
    /// Its number of replicas, if it has to be made; -1 is the broker's default.
    pub replication: i32,
}

/// Where records go.
#[derive(Clone, PartialEq, Eq)]
pub enum SinkSettings {
    /// Kafka.
    Kafka {
        /// librdkafka's properties.
        properties: Properties,
        /// How topics that don't exist are made, if they are.
        create_topics: Option<CreateTopics>,
    },
    /// Standard output, one JSON object a line.
    Stdout,
}

impl std::fmt::Debug for SinkSettings {
    // Names only: among the values are passwords.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Stdout => f.write_str("Stdout"),
            Self::Kafka {
                properties,
                create_topics,
            } => f
                .debug_struct("Kafka")
                .field("properties", &properties.keys())
                .field("create_topics", create_topics)
                .finish(),
        }
    }
}
