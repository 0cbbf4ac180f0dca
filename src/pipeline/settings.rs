//! What one pipeline is to do: validated, with every default filled in.

use std::time::Duration;

use tracing::warn;

use super::wal_budget::budget::{OnMax, WalBudget};
use super::wal_budget::error::WalBudgetError;
use crate::delivery::stats::About;
use crate::kafka::credentials::Credentials;
use crate::kafka::properties::{self, Properties};
use crate::kafka::settings::{CheckpointSettings, ProducerSettings};
use crate::kafka::topics::CreateTopics;
use crate::kafka::transaction::Checkpoints;
use crate::outbox::columns::{Mapping, MappingError, TableColumn};
use crate::outbox::reserved_topics::{DEFAULT_DEAD_LETTER_TOPIC, TopicUse};
use crate::outbox::settings::OutboxSettings;
use crate::postgres::catalog::slot_state::FirstStart;
use crate::postgres::catalog::{CatalogError, Observed, ObservedTable, Problem};
use crate::postgres::connect::conninfo::Conninfo;
use crate::postgres::table::TableName;
use crate::postgres::target::{Outbox, Target};

/// One pipeline: from one slot to one sink.
#[derive(Clone, Debug)]
pub(crate) struct PipelineSettings {
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
    /// What becomes of events that can't be delivered.
    pub dead_letters: DeadLetterSettings,
    /// What an error in one of several tables leads to.
    pub on_table_error: OnTableError,
    /// Whether rows that are older than the slot are delivered.
    pub snapshot: SnapshotMode,
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
    /// What is kept of the table.
    pub retention: Retention,
    /// How much WAL the slot may retain.
    pub wal_budget: WalBudget,
}

impl PipelineSettings {
    /// What the first start with a new slot delivers.
    #[must_use]
    pub(crate) fn first_start(&self) -> FirstStart {
        match self.snapshot {
            SnapshotMode::Initial => FirstStart::CopiesTable,
            SnapshotMode::Never => FirstStart::StreamsOnly,
        }
    }

    /// What the pipeline is about, for monitoring.
    #[must_use]
    pub(crate) fn about(&self) -> About {
        About {
            name: self.name.clone(),
            database: self.postgres.describe(),
            outbox: self.target.outbox.to_string(),
            slot: self.target.slot.clone(),
            sink: match &self.sink {
                SinkSettings::Stdout => "standard output".to_owned(),
                SinkSettings::Kafka { properties, .. } => {
                    let brokers = ["bootstrap.servers", "metadata.broker.list"]
                        .iter()
                        .find_map(|name| properties.get(*name));
                    format!("Kafka at {}", brokers.map_or("", String::as_str))
                }
            },
            delivery: match self.delivery {
                Delivery::AtLeastOnce => "at-least-once".to_owned(),
                Delivery::ExactlyOnce(_) => "exactly-once".to_owned(),
            },
            wal_budget_warn_bytes: self.wal_budget.warn_bytes,
            wal_budget_max_bytes: self.wal_budget.max_bytes,
            commands: self.target.commands.clone(),
        }
    }

    /// The command that accepts the slot as it is for exactly-once.
    #[must_use]
    pub(crate) fn adopt(&self) -> String {
        self.target.commands.print(["checkpoint", "adopt"])
    }

    /// Logs what is open to those who share the network with Kafka.
    pub(crate) fn log_exposures(&self) {
        for open in self.sink.warnings() {
            warn!(pipeline = self.name, "Kafka: {open}");
        }
    }

    /// The topics that the pipeline keeps for itself, and what each is for.
    pub(crate) fn own_topics(&self) -> impl Iterator<Item = (&str, TopicUse)> {
        let checkpoints = match &self.delivery {
            Delivery::AtLeastOnce => None,
            Delivery::ExactlyOnce(checkpoints) => {
                Some((checkpoints.topic.as_str(), TopicUse::Checkpoints))
            }
        };
        let dead_letters = (self.dead_letters.topic.as_str(), TopicUse::DeadLetters);
        checkpoints.into_iter().chain([dead_letters])
    }

    /// Where the pipeline's checkpoints are; nothing where it has none.
    #[must_use]
    pub(crate) fn checkpoints(&self) -> Option<Checkpoints> {
        Checkpoints::of(&self.producer()?)
    }

    /// What the producer is made from; nothing where records go elsewhere than to Kafka.
    #[must_use]
    pub(crate) fn producer(&self) -> Option<ProducerSettings> {
        let SinkSettings::Kafka {
            properties,
            create_topics,
            credentials,
        } = &self.sink
        else {
            return None;
        };
        Some(ProducerSettings {
            pipeline: self.name.clone(),
            slot: self.target.slot.clone(),
            properties: properties.clone(),
            create_topics: *create_topics,
            credentials: credentials.clone(),
            checkpoints: match &self.delivery {
                Delivery::AtLeastOnce => None,
                Delivery::ExactlyOnce(checkpoints) => Some(checkpoints.clone()),
            },
            warns_of_compaction: self.outbox.has_unasked_tombstones(),
            constant_topic: self.outbox.topic.constant().map(str::to_owned),
            dead_letter_topic: self.dead_letter_topic_for_unusable().map(str::to_owned),
        })
    }

    /// The topic for dead letters, if an event whose topic cannot be used becomes a dead letter. A topic that the
    /// configuration names, and not the row, is for the operator to create.
    fn dead_letter_topic_for_unusable(&self) -> Option<&str> {
        let is_row_s = self.outbox.topic.constant().is_none();
        let becomes = self.dead_letters.unroutable == Undeliverable::DeadLetter;
        (is_row_s && becomes).then_some(&*self.dead_letters.topic)
    }

    /// Holds what dropping the slot takes against what was observed, where the settings say
    /// that it may be.
    ///
    /// # Errors
    /// There is no journal to write it down in, or the table has no primary key to send its rows
    /// again by.
    pub(crate) fn check_drop_slot(&self, observed: &Observed) -> Result<(), WalBudgetError> {
        if self.wal_budget.on_max != OnMax::DropSlot {
            return Ok(());
        }
        if !observed.has_journal {
            return Err(CatalogError::NoJournal.into());
        }
        match (&observed.table, self.target.outbox.table()) {
            (Some(found), Some(table)) if !found.has_key => Err(WalBudgetError::NoKey {
                table: table.clone(),
            }),
            _ => Ok(()),
        }
    }

    /// The pipeline runs in spite of the problem, which concerns tables that are set aside when rows of them arrive.
    #[must_use]
    pub(crate) fn tolerates(&self, problem: &Problem) -> bool {
        self.sets_tables_aside() && matches!(problem, Problem::OtherTables { .. })
    }

    /// A table with an error is set aside. A pipeline of one table has no others to continue with.
    #[must_use]
    pub(crate) fn sets_tables_aside(&self) -> bool {
        self.target.outbox.is_several() && self.on_table_error == OnTableError::SetAside
    }

    /// Compares the settings with the columns of the table that was observed, or those of an event in a message. Of several
    /// tables each is to be compared by [`Self::mapping_of`].
    ///
    /// # Errors
    /// A column is missing or of a type that can't serve.
    pub(crate) fn check_columns(&self, observed: &Observed) -> Result<(), MappingError> {
        match &self.target.outbox {
            Outbox::Messages { .. } => Mapping::of_messages(&self.outbox).map(drop),
            Outbox::Table(table) | Outbox::OneOf { table, .. } => {
                self.mapping_of(table, observed.table.as_ref()).map(drop)
            }
            Outbox::Tables(_) => Ok(()),
        }
    }

    /// The settings bound to the columns of a table.
    ///
    /// # Errors
    /// A column is missing or of a type that can't serve; all are of one that is not there.
    pub(crate) fn mapping_of(
        &self,
        table: &TableName,
        found: Option<&ObservedTable>,
    ) -> Result<Mapping, MappingError> {
        let none = ObservedTable::default();
        let found = found.unwrap_or(&none);
        let columns = TableColumn::list(&found.columns);
        let shown = table.to_string();
        let bound = Mapping::bind_with(&self.outbox, table.rows(&shown), &columns, &found.facts);
        bound.map_err(|error| {
            error.with_type(|column| {
                let at = columns.iter().position(|found| found.name == column)?;
                found.types.get(at).cloned()
            })
        })
    }
}

/// What is to be kept of the outbox table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Retention {
    /// How long a partition is kept after it was delivered; none is for ever.
    pub keep: Option<Duration>,
    /// How many partitions are made ahead of the one for now.
    pub ahead: u32,
    /// Rows of a table without partitions may be deleted.
    pub delete_rows: bool,
}

/// Whether rows that are older than the slot are delivered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum SnapshotMode {
    /// Before the stream, once in the pipeline's life.
    #[default]
    Initial,
    /// No.
    Never,
}

/// How often a record arrives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Delivery {
    /// Once, and what was in flight again after a crash.
    AtLeastOnce,
    /// Once, for readers of committed records.
    ExactlyOnce(CheckpointSettings),
}

/// What becomes of events that can't be delivered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeadLetterSettings {
    /// Of those whose record is larger than the producer may send.
    pub oversize: Undeliverable,
    /// Of those that no record can be made of.
    pub unroutable: Undeliverable,
    /// Of messages in WAL that have the outbox's prefix and are no events. Of a row there is no such
    /// thing.
    pub malformed: Undeliverable,
    /// The topic for dead letters.
    pub topic: String,
}

impl DeadLetterSettings {
    /// There can be dead letters.
    #[must_use]
    pub fn are_sent(&self) -> bool {
        self.are_of_events() || self.malformed == Undeliverable::DeadLetter
    }

    /// There can be dead letters of events.
    #[must_use]
    pub fn are_of_events(&self) -> bool {
        [self.oversize, self.unroutable].contains(&Undeliverable::DeadLetter)
    }
}

impl Default for DeadLetterSettings {
    fn default() -> Self {
        Self {
            oversize: Undeliverable::default(),
            unroutable: Undeliverable::default(),
            malformed: Undeliverable::default(),
            topic: DEFAULT_DEAD_LETTER_TOPIC.to_owned(),
        }
    }
}

/// What becomes of an event that can't be delivered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Undeliverable {
    /// The pipeline halts.
    #[default]
    Halt,
    /// A dead letter is delivered in its place, and the pipeline goes on.
    DeadLetter,
}

/// What an error in one of several tables leads to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum OnTableError {
    /// The pipeline halts.
    #[default]
    Halt,
    /// The table is set aside: its rows from there on are recorded for a replay, and the other tables are delivered.
    SetAside,
}

/// Where records go.
#[derive(Clone)]
pub(crate) enum SinkSettings {
    /// Kafka.
    Kafka {
        /// librdkafka's properties.
        properties: Properties,
        /// How topics that don't exist are made, if they are.
        create_topics: Option<CreateTopics>,
        /// Those of the properties that prove who we are.
        credentials: Credentials,
    },
    /// Standard output, one JSON object a line.
    Stdout,
}

impl SinkSettings {
    /// What is open to those who share the network, each with its remedy.
    #[must_use]
    pub(crate) fn warnings(&self) -> Vec<String> {
        match self {
            Self::Stdout => Vec::new(),
            Self::Kafka {
                properties,
                credentials,
                ..
            } => {
                let mut warnings = properties::warnings(properties);
                warnings.extend(credentials.warning());
                warnings
            }
        }
    }
}

impl std::fmt::Debug for SinkSettings {
    // Names only: among the values are passwords.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Stdout => f.write_str("Stdout"),
            Self::Kafka {
                properties,
                create_topics,
                ..
            } => f
                .debug_struct("Kafka")
                .field("properties", &properties.keys())
                .field("create_topics", create_topics)
                .finish(),
        }
    }
}
