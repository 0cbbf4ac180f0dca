//! Flags that several commands share. Each has an environment variable.

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

/// The flags for logging.
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
    /// error, warn, info, debug, trace, or a filter of the crate tracing
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
    /// Same as [`logging::start`].
    pub(crate) fn start(&self) -> Result<FlushGuard, String> {
        logging::start(self.log_format, &self.log_level)
    }
}

/// The flags for the database and the outbox.
#[derive(Clone, Default, Args)]
#[command(next_help_heading = heading::PIPELINES)]
pub(crate) struct ConnectionArgs {
    /// Configuration file (walpost.toml)
    #[arg(long, env = "WALPOST_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Only this pipeline of the file; without a file, the pipeline's name [default: outbox]
    #[arg(
        long,
        env = "WALPOST_PIPELINE",
        value_name = "NAME",
        value_delimiter = ','
    )]
    pub pipeline: Vec<String>,
    /// The database: a URL or key=value pairs, as for psql. Give a password with PGPASSWORD or
    /// ~/.pgpass, not here, where other users of this machine can see it
    #[arg(
        long,
        env = "WALPOST_POSTGRES",
        value_name = "URL",
        hide_env_values = true
    )]
    pub postgres: Option<String>,
    /// Where events are: table, for its rows, or messages, for logical decoding messages in WAL
    /// [default: table]
    #[arg(long, env = "WALPOST_OUTBOX", value_enum, hide_possible_values = true)]
    pub outbox: Option<OutboxName>,
    /// The outbox table [default: public.outbox]
    #[arg(long, env = "WALPOST_TABLE", value_name = "SCHEMA.TABLE")]
    pub table: Option<String>,
    /// The prefix of the messages [default: walpost_PIPELINE]
    #[arg(long, env = "WALPOST_PREFIX", value_name = "NAME")]
    pub prefix: Option<String>,
    /// The publication [default: walpost_PIPELINE]
    #[arg(long, env = "WALPOST_PUBLICATION", value_name = "NAME")]
    pub publication: Option<String>,
    /// The replication slot [default: walpost_PIPELINE]
    #[arg(long, env = "WALPOST_SLOT", value_name = "NAME")]
    pub slot: Option<String>,
}

/// The flags for records and their delivery.
#[derive(Clone, Default, Args)]
pub(crate) struct RecordArgs {
    /// Kafka's bootstrap servers
    #[arg(long, env = "WALPOST_KAFKA", value_name = "HOST:PORT[,...]", help_heading = heading::KAFKA)]
    pub kafka: Option<String>,
    /// A property of librdkafka. For secrets use a file or a variable:
    /// WALPOST_KAFKA_SASL_PASSWORD is sasl.password
    #[arg(short = 'X', long, value_name = "NAME=VALUE", help_heading = heading::KAFKA)]
    pub kafka_property: Vec<String>,
    /// Let properties of librdkafka load libraries and run commands. There is no key for it in the
    /// file
    #[arg(
        long,
        env = "WALPOST_ALLOW_CODE_IN_KAFKA_PROPERTIES",
        value_parser = clap::builder::FalseyValueParser::new(),
        help_heading = heading::KAFKA,
        hide_short_help = true
    )]
    pub allow_code_in_kafka_properties: bool,
    /// Create topics that are missing, with this many partitions and replicas
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
    /// The same as --delivery exactly-once
    #[arg(long, conflicts_with = "delivery", help_heading = heading::DELIVERY)]
    pub exactly_once: bool,
    /// What happens to an event that is larger than Kafka accepts: halt, or dead-letter [default:
    /// halt]
    #[arg(
        long,
        env = "WALPOST_ON_OVERSIZE",
        value_enum,
        help_heading = heading::DELIVERY,
        hide_possible_values = true
    )]
    pub on_oversize: Option<Undeliverable>,
    /// What happens to an event that can't become a record, as without a topic: halt, or
    /// dead-letter [default: halt]
    #[arg(
        long,
        env = "WALPOST_ON_UNROUTABLE",
        value_enum,
        help_heading = heading::DELIVERY,
        hide_possible_values = true
    )]
    pub on_unroutable: Option<Undeliverable>,
    /// What happens to a message that has the outbox's prefix and is not an event:
    /// halt, or dead-letter [default: dead-letter]
    #[arg(
        long,
        env = "WALPOST_ON_MALFORMED",
        value_enum,
        help_heading = heading::DELIVERY,
        hide_short_help = true,
        hide_possible_values = true
    )]
    pub on_malformed: Option<Undeliverable>,
    /// What an error in one of several tables leads to: halt, or set-aside, which delivers the
    /// others [default: halt]
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
    /// Whether to deliver rows that are older than the slot, once and before the stream: initial,
    /// or never [default: initial]
    #[arg(
        long,
        env = "WALPOST_SNAPSHOT",
        value_enum,
        help_heading = heading::DELIVERY,
        hide_possible_values = true
    )]
    pub snapshot: Option<SnapshotMode>,
    /// The topic, a template over columns [default: outbox.event.{aggregatetype}]
    #[arg(long, env = "WALPOST_TOPIC", value_name = "TEMPLATE", help_heading = heading::RECORDS)]
    pub topic: Option<String>,
    /// The key, a template over columns [default: {aggregateid}]
    #[arg(long, env = "WALPOST_KEY", value_name = "TEMPLATE", help_heading = heading::RECORDS)]
    pub key: Option<String>,
    /// The column with the value [default: payload]
    #[arg(long, env = "WALPOST_PAYLOAD", value_name = "COLUMN", help_heading = heading::RECORDS)]
    pub payload: Option<String>,
    /// A header, its value a template over columns; replaces the default id={id}
    #[arg(
        long,
        env = "WALPOST_HEADER",
        value_name = "NAME=TEMPLATE",
        value_delimiter = ',',
        value_parser = header,
        help_heading = heading::RECORDS
    )]
    pub header: Vec<(String, String)>,
    /// What a null payload becomes: empty, or tombstone [default: tombstone]
    #[arg(
        long,
        env = "WALPOST_NULL_PAYLOAD",
        value_enum,
        help_heading = heading::RECORDS,
        hide_possible_values = true
    )]
    pub null_payload: Option<NullPayload>,
    /// Bytes that may be in flight: read, and not acknowledged by Kafka yet [default: 8MiB]
    #[arg(
        long,
        env = "WALPOST_WINDOW_BYTES",
        value_name = "SIZE",
        help_heading = heading::LIMITS,
        hide_short_help = true
    )]
    pub window_bytes: Option<String>,
    /// Records that may be in flight: read, and not acknowledged by Kafka yet [default: 100000]
    #[arg(
        long,
        env = "WALPOST_WINDOW_RECORDS",
        value_name = "COUNT",
        help_heading = heading::LIMITS,
        hide_short_help = true
    )]
    pub window_records: Option<u64>,
    /// The largest row that is accepted [default: 64MiB]
    #[arg(
        long,
        env = "WALPOST_MAX_ROW_BYTES",
        value_name = "SIZE",
        help_heading = heading::LIMITS,
        hide_short_help = true
    )]
    pub max_row_bytes: Option<String>,
    /// How long PostgreSQL may be silent before the connection counts as dead [default: 60s]
    #[arg(
        long,
        env = "WALPOST_LINK_TIMEOUT",
        value_name = "DURATION",
        help_heading = heading::LIMITS,
        hide_short_help = true
    )]
    pub link_timeout: Option<String>,
    /// How long stopping may take [default: 30s]
    #[arg(
        long,
        env = "WALPOST_DRAIN_TIMEOUT",
        value_name = "DURATION",
        help_heading = heading::LIMITS,
        hide_short_help = true
    )]
    pub drain_timeout: Option<String>,
    /// The flags for the retention of the table.
    #[command(flatten)]
    pub retention: RetentionArgs,
    /// The flags for the WAL budget of the slot.
    #[command(flatten)]
    pub wal_budget: WalBudgetArgs,
}

/// The flags for the retention of the table.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = heading::RETENTION)]
pub(crate) struct RetentionArgs {
    /// How long a partition of the table is kept after it was delivered. Without it, for ever
    #[arg(long, env = "WALPOST_RETENTION", value_name = "DURATION")]
    pub retention: Option<String>,
    /// How many partitions of the table are created in advance [default: 7]
    #[arg(long, env = "WALPOST_PARTITIONS_AHEAD", value_name = "COUNT")]
    pub partitions_ahead: Option<u32>,
    /// Delete rows of a table that has no partitions
    #[arg(
        long,
        env = "WALPOST_DELETE_ROWS",
        value_parser = clap::builder::FalseyValueParser::new()
    )]
    pub delete_rows: bool,
}

/// The flags for the WAL budget of the slot.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = heading::WAL)]
pub(crate) struct WalBudgetArgs {
    /// Warn when the slot retains more WAL than this. Without it, never
    #[arg(long, env = "WALPOST_WAL_BUDGET_WARN", value_name = "SIZE")]
    pub wal_budget_warn: Option<String>,
    /// The most WAL that the slot should retain. Without it, there is no limit
    #[arg(long, env = "WALPOST_WAL_BUDGET_MAX", value_name = "SIZE")]
    pub wal_budget_max: Option<String>,
    /// What to do when it retains more: hold the slot, or drop-slot to save the database's disk
    /// [default: hold]
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
    // Connection strings may contain passwords.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnectionArgs")
            .field("config", &self.config)
            .field("pipeline", &self.pipeline)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for RecordArgs {
    // Kafka properties may contain passwords.
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

    /// Returns whether any of these flags concerns a single pipeline.
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
    /// Returns whether any of these flags concerns a single pipeline.
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
