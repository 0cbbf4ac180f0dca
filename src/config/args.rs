//! Flags that several commands share. Most of them can also be set by environment variables.

use std::fmt;
use std::path::PathBuf;

use clap::Args;

use crate::config::file::{DeliveryName, OutboxName};
use crate::kafka::topics::CreateTopics;
use crate::observe::logging::{self, FlushGuard, LogFormat};
use crate::outbox::settings::NullPayload;
use crate::pipeline::settings::SnapshotMode;
use crate::pipeline::settings::{OnTableError, Undeliverable};
use crate::pipeline::wal_budget::budget::OnMax;

/// Headings for the flags that several commands share.
pub(crate) mod heading {
    pub(crate) const PIPELINES: &str = "Pipelines and database";
    pub(crate) const KAFKA: &str = "Kafka";
    pub(crate) const DELIVERY: &str = "Delivery";
    pub(crate) const RECORDS: &str = "Records";
    pub(crate) const LIMITS: &str = "Limits";
    pub(crate) const RETENTION: &str = "Retention";
    pub(crate) const WAL: &str = "WAL budget";
    pub(crate) const LOG: &str = "Logging";
}

/// Command-line flags that configure logging.
#[derive(Debug, Args)]
#[command(next_help_heading = heading::LOG)]
pub(crate) struct LogArgs {
    /// Format of log lines
    #[arg(
        long,
        env = "WALPOST_LOG_FORMAT",
        global = true,
        value_enum,
        default_value = "auto"
    )]
    log_format: LogFormat,
    /// Lowest level to log (error, warn, info, debug or trace), or a filter in the syntax of
    /// tracing-subscriber
    #[arg(
        long,
        env = "WALPOST_LOG_LEVEL",
        global = true,
        default_value = "info",
        value_name = "LEVEL"
    )]
    log_level: String,
}

impl LogArgs {
    /// Starts logging.
    ///
    /// # Errors
    /// Returns the same errors as [`logging::start`].
    pub(crate) fn start(&self) -> Result<FlushGuard, String> {
        logging::start(self.log_format, &self.log_level)
    }
}

/// Command-line flags that select the database and the outbox.
#[derive(Clone, Default, Args)]
#[command(next_help_heading = heading::PIPELINES)]
pub(crate) struct ConnectionArgs {
    /// Configuration file (walpost.toml)
    #[arg(long, env = "WALPOST_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Use only this pipeline from the file; without a file, the pipeline's name [default: outbox]
    #[arg(
        long,
        env = "WALPOST_PIPELINE",
        value_name = "NAME",
        value_delimiter = ','
    )]
    pub pipeline: Vec<String>,
    /// The database, as a URL or key=value pairs like those of psql. Set the password in
    /// PGPASSWORD or ~/.pgpass, because other users of this machine can see command lines
    #[arg(
        long,
        env = "WALPOST_POSTGRES",
        value_name = "URL",
        hide_env_values = true
    )]
    pub postgres: Option<String>,
    /// Where events are stored: table for rows of a table, or messages for logical decoding
    /// messages in WAL [default: table]
    #[arg(long, env = "WALPOST_OUTBOX", value_enum, hide_possible_values = true)]
    pub outbox: Option<OutboxName>,
    /// The outbox table [default: public.outbox]
    #[arg(long, env = "WALPOST_TABLE", value_name = "SCHEMA.TABLE")]
    pub table: Option<String>,
    /// The prefix of the outbox's logical decoding messages [default: walpost_PIPELINE]
    #[arg(long, env = "WALPOST_PREFIX", value_name = "NAME")]
    pub prefix: Option<String>,
    /// The publication [default: walpost_PIPELINE]
    #[arg(long, env = "WALPOST_PUBLICATION", value_name = "NAME")]
    pub publication: Option<String>,
    /// The replication slot [default: walpost_PIPELINE]
    #[arg(long, env = "WALPOST_SLOT", value_name = "NAME")]
    pub slot: Option<String>,
}

/// Command-line flags that configure records and their delivery.
#[derive(Clone, Default, Args)]
pub(crate) struct RecordArgs {
    /// Kafka's bootstrap servers
    #[arg(long, env = "WALPOST_KAFKA", value_name = "HOST:PORT[,...]", help_heading = heading::KAFKA)]
    pub kafka: Option<String>,
    /// A librdkafka property. For secrets, use a file or an environment variable:
    /// WALPOST_KAFKA_SASL_PASSWORD sets sasl.password
    #[arg(short = 'X', long, value_name = "NAME=VALUE", help_heading = heading::KAFKA)]
    pub kafka_property: Vec<String>,
    /// Allow librdkafka properties to load libraries and run commands. The configuration file has
    /// no key for this setting
    #[arg(
        long,
        env = "WALPOST_ALLOW_CODE_IN_KAFKA_PROPERTIES",
        value_parser = clap::builder::FalseyValueParser::new(),
        help_heading = heading::KAFKA,
        hide_short_help = true
    )]
    pub allow_code_in_kafka_properties: bool,
    /// Create missing topics with this number of partitions and this replication factor
    #[arg(
        long,
        env = "WALPOST_CREATE_TOPICS",
        value_name = "PARTITIONS[:REPLICATION]",
        help_heading = heading::KAFKA
    )]
    pub create_topics: Option<CreateTopics>,
    /// Delivery guarantee: at-least-once, or exactly-once [default: at-least-once]
    #[arg(
        long,
        env = "WALPOST_DELIVERY",
        value_enum,
        help_heading = heading::DELIVERY,
        hide_possible_values = true
    )]
    pub delivery: Option<DeliveryName>,
    /// Equivalent to --delivery exactly-once
    #[arg(long, conflicts_with = "delivery", help_heading = heading::DELIVERY)]
    pub exactly_once: bool,
    /// What to do with an event that is too large for Kafka: halt or dead-letter [default: halt]
    #[arg(
        long,
        env = "WALPOST_ON_OVERSIZE",
        value_enum,
        help_heading = heading::DELIVERY,
        hide_possible_values = true
    )]
    pub on_oversize: Option<Undeliverable>,
    /// What to do with an event that can't be converted to a record, for example because it has no topic:
    /// halt or dead-letter [default: halt]
    #[arg(
        long,
        env = "WALPOST_ON_UNROUTABLE",
        value_enum,
        help_heading = heading::DELIVERY,
        hide_possible_values = true
    )]
    pub on_unroutable: Option<Undeliverable>,
    /// What to do with a logical decoding message that has the outbox's prefix but is not an
    /// event: halt or dead-letter [default: dead-letter]
    #[arg(
        long,
        env = "WALPOST_ON_MALFORMED",
        value_enum,
        help_heading = heading::DELIVERY,
        hide_short_help = true,
        hide_possible_values = true
    )]
    pub on_malformed: Option<Undeliverable>,
    /// What to do after an error in one of several tables: halt, or set-aside, which continues to
    /// deliver the other tables [default: halt]
    #[arg(
        long,
        env = "WALPOST_ON_TABLE_ERROR",
        value_enum,
        help_heading = heading::DELIVERY,
        hide_short_help = true,
        hide_possible_values = true
    )]
    pub on_table_error: Option<OnTableError>,
    /// The topic for dead letters [default: walpost-dead-letters]
    #[arg(
        long,
        env = "WALPOST_DEAD_LETTER_TOPIC",
        value_name = "TOPIC",
        help_heading = heading::DELIVERY
    )]
    pub dead_letter_topic: Option<String>,
    /// Whether to deliver rows that are older than the slot once, before newer rows: initial or
    /// never [default: initial]
    #[arg(
        long,
        env = "WALPOST_SNAPSHOT",
        value_enum,
        help_heading = heading::DELIVERY,
        hide_possible_values = true
    )]
    pub snapshot: Option<SnapshotMode>,
    /// Template for the topic, with columns in braces [default: outbox.event.{aggregatetype}]
    #[arg(long, env = "WALPOST_TOPIC", value_name = "TEMPLATE", help_heading = heading::RECORDS)]
    pub topic: Option<String>,
    /// Template for the key, with columns in braces [default: {aggregateid}]
    #[arg(long, env = "WALPOST_KEY", value_name = "TEMPLATE", help_heading = heading::RECORDS)]
    pub key: Option<String>,
    /// The column that contains the record's value [default: payload]
    #[arg(long, env = "WALPOST_PAYLOAD", value_name = "COLUMN", help_heading = heading::RECORDS)]
    pub payload: Option<String>,
    /// A header and the template for its value, with columns in braces; replaces the default
    /// id={id}
    #[arg(
        long,
        env = "WALPOST_HEADER",
        value_name = "NAME=TEMPLATE",
        value_delimiter = ',',
        value_parser = header,
        help_heading = heading::RECORDS
    )]
    pub header: Vec<(String, String)>,
    /// The record value for a null payload: empty or tombstone [default: tombstone]
    #[arg(
        long,
        env = "WALPOST_NULL_PAYLOAD",
        value_enum,
        help_heading = heading::RECORDS,
        hide_possible_values = true
    )]
    pub null_payload: Option<NullPayload>,
    /// Maximum size of events in flight, which were read but not yet acknowledged by Kafka
    /// [default: 8MiB]
    #[arg(
        long,
        env = "WALPOST_WINDOW_BYTES",
        value_name = "SIZE",
        help_heading = heading::LIMITS,
        hide_short_help = true
    )]
    pub window_bytes: Option<String>,
    /// Maximum number of records in flight, which were read but not yet acknowledged by Kafka
    /// [default: 100000]
    #[arg(
        long,
        env = "WALPOST_WINDOW_RECORDS",
        value_name = "COUNT",
        help_heading = heading::LIMITS,
        hide_short_help = true
    )]
    pub window_records: Option<u64>,
    /// Maximum size of a row [default: 64MiB]
    #[arg(
        long,
        env = "WALPOST_MAX_ROW_BYTES",
        value_name = "SIZE",
        help_heading = heading::LIMITS,
        hide_short_help = true
    )]
    pub max_row_bytes: Option<String>,
    /// Close the connection if nothing arrives from PostgreSQL for this long [default: 60s]
    #[arg(
        long,
        env = "WALPOST_LINK_TIMEOUT",
        value_name = "DURATION",
        help_heading = heading::LIMITS,
        hide_short_help = true
    )]
    pub link_timeout: Option<String>,
    /// Maximum time to drain when stopping [default: 30s]
    #[arg(
        long,
        env = "WALPOST_DRAIN_TIMEOUT",
        value_name = "DURATION",
        help_heading = heading::LIMITS,
        hide_short_help = true
    )]
    pub drain_timeout: Option<String>,
    /// Command-line flags that configure how long the table's rows are kept.
    #[command(flatten)]
    pub retention: RetentionArgs,
    /// Command-line flags that configure the slot's WAL budget.
    #[command(flatten)]
    pub wal_budget: WalBudgetArgs,
}

/// Command-line flags that configure how long the table's rows are kept.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = heading::RETENTION)]
pub(crate) struct RetentionArgs {
    /// How long to keep a partition of the table after its rows were delivered. Without this flag,
    /// partitions are kept indefinitely
    #[arg(long, env = "WALPOST_RETENTION", value_name = "DURATION")]
    pub retention: Option<String>,
    /// Number of partitions of the table to create in advance [default: 7]
    #[arg(long, env = "WALPOST_PARTITIONS_AHEAD", value_name = "COUNT")]
    pub partitions_ahead: Option<u32>,
    /// Apply the retention to a table without partitions by deleting its rows
    #[arg(
        long,
        env = "WALPOST_DELETE_ROWS",
        value_parser = clap::builder::FalseyValueParser::new()
    )]
    pub delete_rows: bool,
}

/// Command-line flags that configure the slot's WAL budget.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = heading::WAL)]
pub(crate) struct WalBudgetArgs {
    /// Warn when the slot retains more WAL than this. Without this flag, Walpost never warns
    #[arg(long, env = "WALPOST_WAL_BUDGET_WARN", value_name = "SIZE")]
    pub wal_budget_warn: Option<String>,
    /// The most WAL that the slot should retain. Without this flag, there is no limit
    #[arg(long, env = "WALPOST_WAL_BUDGET_MAX", value_name = "SIZE")]
    pub wal_budget_max: Option<String>,
    /// What to do when the slot retains more than the maximum: hold (keep the slot), or drop-slot
    /// to prevent the database's disk from filling up [default: hold]
    #[arg(long, env = "WALPOST_WAL_BUDGET_ON_MAX", value_enum)]
    pub wal_budget_on_max: Option<OnMax>,
}

impl WalBudgetArgs {
    /// Returns whether any of these flags is set.
    #[must_use]
    pub(crate) fn is_given(&self) -> bool {
        self.wal_budget_warn.is_some()
            || self.wal_budget_max.is_some()
            || self.wal_budget_on_max.is_some()
    }
}

impl fmt::Debug for ConnectionArgs {
    // Omit the connection string, because it may contain a password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnectionArgs")
            .field("config", &self.config)
            .field("pipeline", &self.pipeline)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for RecordArgs {
    // Omit the Kafka properties, because they may contain passwords.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecordArgs").finish_non_exhaustive()
    }
}

impl ConnectionArgs {
    /// Returns whether a database is configured, by these flags or in the environment.
    #[must_use]
    pub(crate) fn names_database(&self) -> bool {
        let from_env = |name: &&str| std::env::var_os(name).is_some();
        self.config.is_some()
            || self.postgres.is_some()
            || ["PGHOST", "PGHOSTADDR", "PGDATABASE"].iter().any(from_env)
    }

    /// Returns whether any flag is set that applies to only one pipeline.
    #[must_use]
    pub(crate) fn is_for_one_pipeline(&self) -> bool {
        self.outbox.is_some()
            || [
                &self.postgres,
                &self.table,
                &self.prefix,
                &self.publication,
                &self.slot,
            ]
            .iter()
            .any(|flag| flag.is_some())
    }
}

impl RecordArgs {
    /// Returns whether any flag is set that applies to only one pipeline.
    #[must_use]
    pub(crate) fn is_for_one_pipeline(&self) -> bool {
        self.topic.is_some()
            || self.key.is_some()
            || self.payload.is_some()
            || !self.header.is_empty()
            || self.null_payload.is_some()
            || self.create_topics.is_some()
    }
}

fn header(text: &str) -> Result<(String, String), String> {
    text.split_once('=')
        .map(|(name, template)| (name.to_owned(), template.to_owned()))
        .ok_or_else(|| "expected NAME=TEMPLATE, like type={type}".to_owned())
}
