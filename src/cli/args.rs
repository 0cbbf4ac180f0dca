//! Flags that several commands share. Each has an environment variable.

use std::fmt;
use std::path::PathBuf;

use clap::Args;

use crate::config::file::{DeliveryName, OutboxName};
use crate::kafka::topics::CreateTopics;
use crate::observe::logging::{self, LogFormat};
use crate::outbox::settings::NullPayload;

/// How to log.
#[derive(Debug, Args)]
pub struct LogArgs {
    /// How log lines look
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
    /// The filter can't be read.
    pub fn start(&self) -> Result<(), String> {
        logging::start(self.log_format, &self.log_level)
    }
}

/// Where the outbox is.
#[derive(Default, Args)]
pub struct ConnectionArgs {
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
    /// Where events are: rows of a table, or in the write-ahead log alone [default: table]
    #[arg(long, env = "WALPOST_OUTBOX", value_enum)]
    pub outbox: Option<OutboxName>,
    /// The outbox table [default: public.outbox]
    #[arg(long, env = "WALPOST_TABLE", value_name = "SCHEMA.TABLE")]
    pub table: Option<String>,
    /// The prefix of events in the log [default: walpost_PIPELINE]
    #[arg(long, env = "WALPOST_PREFIX", value_name = "NAME")]
    pub prefix: Option<String>,
    /// The publication [default: walpost_PIPELINE]
    #[arg(long, env = "WALPOST_PUBLICATION", value_name = "NAME")]
    pub publication: Option<String>,
    /// The replication slot [default: walpost_PIPELINE]
    #[arg(long, env = "WALPOST_SLOT", value_name = "NAME")]
    pub slot: Option<String>,
}

/// How records are made and delivered.
#[derive(Default, Args)]
pub struct RecordArgs {
    /// Kafka's bootstrap servers
    #[arg(long, env = "WALPOST_KAFKA", value_name = "HOST:PORT[,...]")]
    pub kafka: Option<String>,
    /// A property of librdkafka. For secrets use a file or a variable:
    /// WALPOST_KAFKA_SASL_PASSWORD is sasl.password
    #[arg(short = 'X', long, value_name = "NAME=VALUE")]
    pub kafka_property: Vec<String>,
    /// How often a record arrives [default: at-least-once]
    #[arg(long, env = "WALPOST_DELIVERY", value_enum)]
    pub delivery: Option<DeliveryName>,
    /// The same as --delivery exactly-once
    #[arg(long, conflicts_with = "delivery")]
    pub exactly_once: bool,
    /// The topic, a template over columns [default: outbox.event.{aggregatetype}]
    #[arg(long, env = "WALPOST_TOPIC", value_name = "TEMPLATE")]
    pub topic: Option<String>,
    /// The key, a template over columns [default: {aggregateid}]
    #[arg(long, env = "WALPOST_KEY", value_name = "TEMPLATE")]
    pub key: Option<String>,
    /// The column with the value [default: payload]
    #[arg(long, env = "WALPOST_PAYLOAD", value_name = "COLUMN")]
    pub payload: Option<String>,
    /// A header, its value a template over columns; replaces the default id={id}
    #[arg(long, env = "WALPOST_HEADER", value_name = "NAME=TEMPLATE", value_delimiter = ',', value_parser = header)]
    pub header: Vec<(String, String)>,
    /// What a null payload becomes [default: empty]
    #[arg(long, env = "WALPOST_NULL_PAYLOAD", value_enum)]
    pub null_payload: Option<NullPayload>,
    /// Bytes that may be between reading and acknowledged [default: 16MiB]
    #[arg(long, env = "WALPOST_WINDOW_BYTES", value_name = "SIZE")]
    pub window_bytes: Option<String>,
    /// Records that may be between reading and acknowledged [default: 100000]
    #[arg(long, env = "WALPOST_WINDOW_RECORDS", value_name = "COUNT")]
    pub window_records: Option<u64>,
    /// The largest row that is accepted [default: 64MiB]
    #[arg(long, env = "WALPOST_MAX_ROW_BYTES", value_name = "SIZE")]
    pub max_row_bytes: Option<String>,
    /// How long PostgreSQL may be silent before the connection counts as dead [default: 60s]
    #[arg(long, env = "WALPOST_LINK_TIMEOUT", value_name = "DURATION")]
    pub link_timeout: Option<String>,
    /// How long stopping may take [default: 30s]
    #[arg(long, env = "WALPOST_DRAIN_TIMEOUT", value_name = "DURATION")]
    pub drain_timeout: Option<String>,
    /// Create topics that are missing
    #[arg(
        long,
        env = "WALPOST_CREATE_TOPICS",
        value_name = "PARTITIONS[:REPLICATION]"
    )]
    pub create_topics: Option<CreateTopics>,
}

impl fmt::Debug for ConnectionArgs {
    // Connection strings have passwords.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnectionArgs")
            .field("config", &self.config)
            .field("pipeline", &self.pipeline)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for RecordArgs {
    // Kafka's properties have passwords.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecordArgs").finish_non_exhaustive()
    }
}

impl ConnectionArgs {
    /// Some flag here is about one pipeline.
    #[must_use]
    pub fn is_for_one_pipeline(&self) -> bool {
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
    /// Some flag here is about one pipeline.
    #[must_use]
    pub fn is_for_one_pipeline(&self) -> bool {
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
