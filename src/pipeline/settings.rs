//! The settings of one pipeline, validated and with all defaults filled in.

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
use crate::postgres::catalog::slot_owner::DefinedBy;
use crate::postgres::catalog::slot_state::FirstStart;
use crate::postgres::catalog::{CatalogError, Observed, ObservedTable, Problem};
use crate::postgres::connect::conninfo::Conninfo;
use crate::postgres::table::TableName;
use crate::postgres::target::{Outbox, Target};

/// The settings of one pipeline, which carries events from one slot to one sink.
#[derive(Clone, Debug)]
pub(crate) struct PipelineSettings {
    /// Name of the pipeline. Used in logs, and to derive the default names of its slot and other
    /// objects.
    pub name: String,
    /// Whether the pipeline is defined by an operator or by a row of a query's result. This
    /// determines which slots the pipeline may use.
    pub defined_by: DefinedBy,
    pub postgres: Conninfo,
    /// The outbox, the publication and the slot.
    pub target: Target,
    /// How events are converted to records.
    pub outbox: OutboxSettings,
    /// The destination for records.
    pub sink: SinkSettings,
    /// The delivery guarantee of the pipeline.
    pub delivery: Delivery,
    /// How events that can't be delivered are handled.
    pub dead_letters: DeadLetterSettings,
    /// What to do if an error concerns only one of several tables.
    pub on_table_error: OnTableError,
    /// Whether rows that are older than the slot are delivered.
    pub snapshot: SnapshotMode,
    /// Maximum number of records in flight, that is, read but not yet acknowledged.
    pub window_records: u64,
    /// Maximum total size, in bytes, of the records in flight.
    pub window_bytes: u64,
    /// Maximum size, in bytes, of a message from the server.
    pub row_bytes_max: usize,
    /// How long a connection may be silent before the client or the server considers it dead.
    pub link_timeout: Duration,
    /// Maximum duration of a drain.
    pub drain_timeout: Duration,
    /// How long the outbox table's rows are kept.
    pub retention: Retention,
    pub wal_budget: WalBudget,
}

impl PipelineSettings {
    /// Returns which rows are delivered by the first run with a new slot.
    #[must_use]
    pub(crate) fn first_start(&self) -> FirstStart {
        match self.snapshot {
            SnapshotMode::Initial => FirstStart::CopiesTable,
            SnapshotMode::Never => FirstStart::StreamsOnly,
        }
    }

    /// Describes the pipeline for monitoring.
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

    /// Returns the command that creates a checkpoint at the slot's current position, so that
    /// exactly-once delivery starts there.
    #[must_use]
    pub(crate) fn adopt(&self) -> String {
        self.target.commands.print(["checkpoint", "adopt"])
    }

    /// Logs a warning for each weakness in the Kafka connection's settings that an attacker on the
    /// network could exploit.
    pub(crate) fn log_exposures(&self) {
        for warning in self.sink.warnings() {
            warn!(pipeline = self.name, "Kafka: {warning}");
        }
    }

    /// Returns the topics that are reserved for the pipeline's own use, and the purpose of each
    /// topic.
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

    /// Returns a handle for reading and writing the pipeline's checkpoints, or `None` if it does
    /// not use checkpoints.
    #[must_use]
    pub(crate) fn checkpoints(&self) -> Option<Checkpoints> {
        Checkpoints::for_producer(&self.producer()?)
    }

    /// Returns the settings for the Kafka producer, or `None` if records are not sent to Kafka.
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
            warns_of_compaction: self.outbox.has_implicit_tombstones(),
            constant_topic: self.outbox.topic.constant().map(str::to_owned),
            dead_letter_topic: self.dead_letter_topic_for_unusable().map(str::to_owned),
        })
    }

    /// Returns the dead-letter topic if an event becomes a dead letter when its topic can't be
    /// used. Returns `None` if the settings don't allow dead letters for such events. Also returns
    /// `None` if all events have the same topic, whose name is fixed in the configuration, because
    /// the operator must then create that topic.
    fn dead_letter_topic_for_unusable(&self) -> Option<&str> {
        let is_chosen_by_row = self.outbox.topic.constant().is_none();
        let sends_dead_letters = self.dead_letters.unroutable == Undeliverable::DeadLetter;
        (is_chosen_by_row && sends_dead_letters).then_some(&*self.dead_letters.topic)
    }

    /// If the settings allow the slot to be dropped, checks that Walpost could record a dropped
    /// slot and resend its events.
    ///
    /// # Errors
    /// Returns an error if the journal, in which a dropped slot must be recorded, does not exist.
    /// Also returns an error if the table has no primary key, which is required to resend its rows.
    pub(crate) fn check_drop_slot(&self, observed: &Observed) -> Result<(), WalBudgetError> {
        if self.wal_budget.on_max != OnMax::DropSlot {
            return Ok(());
        }
        if !observed.has_journal {
            return Err(CatalogError::missing_journal(&self.target).into());
        }
        match (&observed.table, self.target.outbox.table()) {
            (Some(found), Some(table)) if !found.has_key => Err(WalBudgetError::NoKey {
                table: table.clone(),
            }),
            _ => Ok(()),
        }
    }

    /// Returns whether the pipeline may run despite `problem`. This is the case if it concerns only
    /// tables that will be set aside when one of their rows arrives.
    #[must_use]
    pub(crate) fn tolerates(&self, problem: &Problem) -> bool {
        self.sets_tables_aside() && matches!(problem, Problem::OtherTables { .. })
    }

    /// Returns whether a table with an error is set aside. This requires an outbox of several
    /// tables: with a single table, there would be nothing left to deliver.
    #[must_use]
    pub(crate) fn sets_tables_aside(&self) -> bool {
        self.target.outbox.is_several() && self.on_table_error == OnTableError::SetAside
    }

    /// Checks the settings against the columns of the observed table or, if the outbox uses logical
    /// decoding messages, against the columns that the events in these messages have. Does nothing
    /// for an outbox of several tables; call [`Self::mapping_for`] for each table instead.
    ///
    /// # Errors
    /// Returns an error if a column is missing or has an unsupported type.
    pub(crate) fn check_columns(&self, observed: &Observed) -> Result<(), MappingError> {
        match &self.target.outbox {
            Outbox::Messages { .. } => Mapping::for_messages(&self.outbox).map(drop),
            Outbox::Table(table) | Outbox::OneOf { table, .. } => {
                self.mapping_for(table, observed.table.as_ref()).map(drop)
            }
            Outbox::Tables(_) => Ok(()),
        }
    }

    /// Maps the columns of a table according to the settings.
    ///
    /// # Errors
    /// Returns an error if a column is missing or has an unsupported type. If `found` is `None`,
    /// all columns count as missing.
    pub(crate) fn mapping_for(
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
                let index = columns.iter().position(|found| found.name == column)?;
                found.types.get(index).cloned()
            })
        })
    }
}

/// How long the rows of the outbox table are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Retention {
    /// How long a partition is kept after its rows have been delivered; `None` means indefinitely.
    pub keep: Option<Duration>,
    /// Number of partitions to create ahead of the current partition.
    pub ahead: u32,
    /// Whether rows may be deleted if the table is not partitioned.
    pub delete_rows: bool,
}

/// Whether rows that are older than the slot are delivered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum SnapshotMode {
    /// Deliver the rows before the stream starts, once in the lifetime of the pipeline.
    #[default]
    Initial,
    /// Do not deliver the rows.
    Never,
}

/// The delivery guarantee of a pipeline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Delivery {
    /// Each record is delivered at least once; records in flight may be delivered again after a
    /// crash.
    AtLeastOnce,
    /// Each record is delivered exactly once to consumers that read only committed records.
    ExactlyOnce(CheckpointSettings),
}

/// How events that can't be delivered are handled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeadLetterSettings {
    /// What to do with events whose record is too large for the producer or the brokers.
    pub oversize: Undeliverable,
    /// What to do with events that can't be converted to a record.
    pub unroutable: Undeliverable,
    /// What to do with logical decoding messages that have the outbox's prefix but are not valid
    /// events. Does not apply to rows.
    pub malformed: Undeliverable,
    pub topic: String,
}

impl DeadLetterSettings {
    /// Returns whether dead letters may be sent.
    #[must_use]
    pub fn is_enabled(&self) -> bool {
        self.includes_events() || self.malformed == Undeliverable::DeadLetter
    }

    /// Returns whether dead letters may be sent in place of valid events.
    #[must_use]
    pub fn includes_events(&self) -> bool {
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

/// How an event that can't be delivered is handled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Undeliverable {
    /// The pipeline halts.
    #[default]
    Halt,
    /// A dead letter is delivered in place of the event, and the pipeline continues.
    DeadLetter,
}

/// What to do when one of several tables causes an error.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum OnTableError {
    /// The pipeline halts.
    #[default]
    Halt,
    /// The table is set aside: its later rows are recorded for a replay, and the other tables are
    /// delivered.
    SetAside,
}

/// A pipeline's destination for records.
#[derive(Clone)]
pub(crate) enum SinkSettings {
    Kafka {
        /// librdkafka's properties.
        properties: Properties,
        /// How to create missing topics; `None` if they must not be created.
        create_topics: Option<CreateTopics>,
        /// The librdkafka properties that contain the client's credentials.
        credentials: Credentials,
    },
    /// Standard output, with one JSON object per line.
    Stdout,
}

impl SinkSettings {
    /// Describes weaknesses that an attacker on the network could exploit, and how to fix each.
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
    // Shows only the properties' names, because some of the values are passwords.
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
