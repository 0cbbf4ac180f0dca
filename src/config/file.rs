//! The contents of walpost.toml.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::de::{self, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::query::{self, DefiningRow, QuerySource};
use super::syntax::parse;
use super::{ConfigError, Given};
use crate::kafka::properties::is_secret;
use crate::kafka::topics::CreateTopics;
use crate::outbox::settings::{EmptyPayload, Format, HeaderFormat, NullPayload};
use crate::pipeline::settings::SnapshotMode;
use crate::pipeline::settings::{OnTableError, Undeliverable};
use crate::pipeline::wal_budget::budget::OnMax;
use crate::postgres::catalog::slot_owner::DefinedBy;
use crate::postgres::connect::conninfo::Conninfo;
use crate::trusted_path::{self, PathError};

/// The contents of walpost.toml itself, without the pipelines that are defined by its
/// `[[fleet.source]]` tables.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct File {
    /// The HTTP server's address for metrics, health checks and status.
    pub http: Option<String>,
    /// Additional host names that HTTP requests may use.
    #[serde(default)]
    pub http_hosts: Vec<String>,
    /// The path of the socket for `walpost pipeline`.
    pub control: Option<String>,
    /// Sources of additional pipelines, such as directories.
    #[serde(default)]
    pub fleet: FileFleet,
    /// librdkafka properties that apply to all pipelines.
    #[serde(default)]
    pub kafka: BTreeMap<String, Scalar>,
    #[serde(default)]
    pub pipeline: Vec<FilePipeline>,
}

/// Sources of pipelines other than walpost.toml itself.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FileFleet {
    #[serde(default, deserialize_with = "distinct_sources")]
    pub source: Vec<FileSource>,
}

/// A source of additional pipelines: one `[[fleet.source]]` table.
#[derive(Clone, Debug, Deserialize)]
#[serde(try_from = "WrittenSource")]
pub(crate) enum FileSource {
    /// A directory. Each file in it whose name ends in `.toml` defines pipelines.
    Directory(PathBuf),
    /// A database query. Each row of its result defines a pipeline.
    Query(QuerySource),
}

/// Rejects a file with two sources that could define pipelines with the same name. Otherwise, a row
/// of one source could take over a pipeline of the other source, including its credentials and
/// slot.
fn distinct_sources<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<FileSource>, D::Error> {
    let sources = Vec::<FileSource>::deserialize(deserializer)?;
    let mut queries: Vec<&QuerySource> = Vec::new();
    for source in &sources {
        let FileSource::Query(source) = source else {
            continue;
        };
        for other in &queries {
            query::check_distinct(other, source).map_err(de::Error::custom)?;
        }
        queries.push(source);
    }
    Ok(sources)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenSource {
    directory: Option<PathBuf>,
    postgres: Option<String>,
    password_command: Option<Vec<String>>,
    query: Option<String>,
    every: Option<String>,
    template: Option<toml::Table>,
}

impl TryFrom<WrittenSource> for FileSource {
    type Error = String;

    fn try_from(written: WrittenSource) -> Result<Self, String> {
        const EXPECTED: &str =
            "expected either the key directory, or the keys postgres, query and template";
        let has_more = written.password_command.is_some() || written.every.is_some();
        match (
            written.directory,
            written.postgres,
            written.query,
            written.template,
        ) {
            (Some(directory), None, None, None) if !has_more => Ok(Self::Directory(directory)),
            (None, Some(postgres), Some(query), Some(template)) => {
                query::check_template(&template)?;
                Ok(Self::Query(QuerySource {
                    postgres,
                    password_command: written.password_command,
                    query,
                    every: QuerySource::every(written.every.as_deref())?,
                    template,
                }))
            }
            _ => Err(EXPECTED.to_owned()),
        }
    }
}

/// The place where a pipeline is defined.
#[derive(Clone, Debug, Default)]
pub(crate) enum Origin {
    /// The pipeline is defined only by flags and environment variables, not in a file.
    #[default]
    Nowhere,
    /// walpost.toml.
    File(PathBuf),
    /// A file in a source directory.
    Part(PathBuf),
    /// A row of a query's result.
    Row {
        /// The file that contains the query.
        file: PathBuf,
        row: Arc<DefiningRow>,
        /// Text that distinguishes the query from other queries in the same file.
        source: String,
    },
}

impl PartialEq for Origin {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Nowhere, Self::Nowhere) => true,
            (Self::File(path), Self::File(other)) | (Self::Part(path), Self::Part(other)) => {
                path == other
            }
            // When comparing origins, ignore the query and the row's values, so that changing a
            // query does not restart its pipelines.
            (
                Self::Row { file, row, .. },
                Self::Row {
                    file: other,
                    row: other_row,
                    ..
                },
            ) => file == other && Arc::ptr_eq(row, other_row),
            _ => false,
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nowhere => f.write_str("the command line"),
            Self::File(path) | Self::Part(path) => write!(f, "{}", path.display()),
            Self::Row { file, .. } => write!(f, "a query in {}", file.display()),
        }
    }
}

impl Origin {
    /// Returns whether the pipeline is defined by an operator or by a row of a query's result.
    pub(super) fn defined_by(&self) -> DefinedBy {
        match self {
            Self::Row { .. } => DefinedBy::Row,
            Self::Nowhere | Self::File(_) | Self::Part(_) => DefinedBy::Operator,
        }
    }

    /// Returns the name of the source that defines the pipeline: a file, a directory or a query. A
    /// source may define several pipelines, and counts as invalid if any of them is invalid.
    pub(super) fn source(&self) -> String {
        match self {
            Self::Part(path) => path.parent().unwrap_or(path).display().to_string(),
            Self::Row { source, .. } => source.clone(),
            other => other.to_string(),
        }
    }
}

/// A file in a source directory. Such a file contains only pipelines.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct PartFile {
    #[serde(default)]
    pipeline: Vec<FilePipeline>,
}

/// A `[[pipeline]]` table. All keys are optional, because flags and defaults supply missing values.
#[derive(Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FilePipeline {
    #[serde(skip)]
    pub origin: Origin,
    pub name: Option<String>,
    pub postgres: Option<String>,
    pub password_command: Option<Vec<String>>,
    pub outbox: Option<OutboxName>,
    pub table: Option<String>,
    pub tables: Option<Vec<String>>,
    pub prefix: Option<String>,
    pub publication: Option<String>,
    pub slot: Option<String>,
    pub sink: Option<SinkName>,
    pub delivery: Option<DeliveryName>,
    pub snapshot: Option<SnapshotMode>,
    pub checkpoint: Option<FileCheckpoint>,
    pub on_oversize: Option<Undeliverable>,
    pub on_unroutable: Option<Undeliverable>,
    pub on_malformed: Option<Undeliverable>,
    pub on_table_error: Option<OnTableError>,
    pub dead_letter_topic: Option<String>,
    pub topic: Option<String>,
    pub route: Option<FileRoute>,
    pub key: Option<String>,
    pub key_format: Option<Format>,
    pub payload: Option<String>,
    pub value_format: Option<Format>,
    pub expand_payload: Option<bool>,
    pub expand_null: Option<FileNull>,
    pub expand_empty_array: Option<FileEmptyArray>,
    pub envelope: Option<Vec<String>>,
    pub null_payload: Option<NullPayload>,
    pub empty_payload: Option<EmptyPayload>,
    pub null_default: Option<bool>,
    pub headers: Option<FileHeaders>,
    pub header_format: Option<HeaderFormat>,
    pub debezium_headers: Option<String>,
    pub tracing_span_context: Option<String>,
    pub headers_column: Option<String>,
    pub timestamp: Option<String>,
    pub partition: Option<String>,
    pub window_bytes: Option<Scalar>,
    pub window_records: Option<u64>,
    pub max_row_bytes: Option<Scalar>,
    pub link_timeout: Option<String>,
    pub drain_timeout: Option<String>,
    pub retention: Option<String>,
    pub partitions_ahead: Option<u32>,
    pub delete_rows: Option<bool>,
    pub wal_budget: Option<FileWalBudget>,
    pub create_topics: Option<CreateTopics>,
    pub kafka: Option<BTreeMap<String, Scalar>>,
    pub kafka_token_command: Option<Vec<String>>,
}

/// The kind of outbox.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum OutboxName {
    /// A table.
    #[default]
    Table,
    /// Logical decoding messages, which `walpost.publish` writes to WAL.
    Messages,
}

/// The name of a sink.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum SinkName {
    /// Apache Kafka.
    #[default]
    Kafka,
    /// Standard output, with one JSON object per line.
    Stdout,
}

/// The delivery guarantee.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum DeliveryName {
    /// Records in flight are delivered again after a crash.
    #[default]
    AtLeastOnce,
    /// Consumers of committed records receive each record once.
    ExactlyOnce,
}

/// Checkpoint settings for exactly-once delivery.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(
    deny_unknown_fields,
    expecting = "a table like { topic = \"TOPIC\", replication = 3 }"
)]
pub(crate) struct FileCheckpoint {
    pub topic: Option<String>,
    pub replication: Option<i32>,
}

/// The value of `route`, which derives the topic from a column with a regular expression.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(
    deny_unknown_fields,
    expecting = "a table like { column = \"COLUMN\", regex = \"REGEX\", replacement = \"TEXT\" }"
)]
pub(crate) struct FileRoute {
    pub column: String,
    pub regex: String,
    pub replacement: String,
}

/// How null members in an expanded payload are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum FileNull {
    Ignore,
    OptionalBytes,
}

/// How empty arrays in an expanded payload are written. `optional-bytes` is accepted as an alias,
/// because `expand_null` has a value of that name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum FileEmptyArray {
    Ignore,
    #[serde(alias = "optional-bytes")]
    OptionalString,
}

/// The names of headers and the templates for their values. Headers given as a TOML table are
/// sorted by name; those given as an array of pairs keep their order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FileHeaders(pub Vec<(String, String)>);

impl<'de> Deserialize<'de> for FileHeaders {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct HeadersVisitor;

        impl<'de> Visitor<'de> for HeadersVisitor {
            type Value = FileHeaders;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(
                    "a table of names and templates, or an array of pairs [\"NAME\", \"TEMPLATE\"]",
                )
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<FileHeaders, A::Error> {
                let mut headers = BTreeMap::new();
                while let Some((name, template)) = map.next_entry()? {
                    headers.insert(name, template);
                }
                Ok(FileHeaders(headers.into_iter().collect()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<FileHeaders, A::Error> {
                let mut headers = Vec::new();
                while let Some(pair) = seq.next_element()? {
                    headers.push(pair);
                }
                Ok(FileHeaders(headers))
            }
        }

        deserializer.deserialize_any(HeadersVisitor)
    }
}

/// The slot's WAL budget.
#[derive(Clone, Default, PartialEq, Deserialize)]
#[serde(
    deny_unknown_fields,
    expecting = "a table like { warn = \"10GiB\", max = \"40GiB\" }"
)]
pub(crate) struct FileWalBudget {
    pub warn: Option<Scalar>,
    pub max: Option<Scalar>,
    pub on_max: Option<OnMax>,
}

/// A string, number or boolean. Each of these values is passed to librdkafka as text.
#[derive(Clone, PartialEq)]
pub(crate) enum Scalar {
    /// A quoted string.
    Text(String),
    /// An integer.
    Integer(i64),
    /// `true` or `false`.
    Boolean(bool),
}

impl<'de> Deserialize<'de> for Scalar {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ScalarVisitor;

        impl<'de> Visitor<'de> for ScalarVisitor {
            type Value = Scalar;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a quoted string, an integer, true or false")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Scalar, E> {
                Ok(Scalar::Text(text.to_owned()))
            }

            fn visit_i64<E: de::Error>(self, number: i64) -> Result<Scalar, E> {
                Ok(Scalar::Integer(number))
            }

            fn visit_bool<E: de::Error>(self, truth: bool) -> Result<Scalar, E> {
                Ok(Scalar::Boolean(truth))
            }

            // librdkafka property names contain dots. In TOML, an unquoted key with a dot defines a
            // table.
            fn visit_map<A: MapAccess<'de>>(self, _: A) -> Result<Scalar, A::Error> {
                Err(de::Error::custom(
                    "found a table, expected a quoted string, an integer, true or false. Put a name that contains dots \
                     in quotes: \"bootstrap.servers\" = \"...\"",
                ))
            }
        }

        deserializer.deserialize_any(ScalarVisitor)
    }
}

impl fmt::Display for Scalar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(text) => f.write_str(text),
            Self::Integer(number) => write!(f, "{number}"),
            Self::Boolean(truth) => write!(f, "{truth}"),
        }
    }
}

impl fmt::Debug for Scalar {
    // Omit the value, because it may be a password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("...")
    }
}

impl fmt::Debug for FilePipeline {
    // Omit the connection string, because it may contain a password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FilePipeline")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

impl FilePipeline {
    /// Creates a pipeline from a template into which a row's values have been inserted.
    ///
    /// # Errors
    /// Returns an error if a key or value is invalid.
    pub(super) fn from_template(filled: toml::Table) -> Result<Self, String> {
        serde_path_to_error::deserialize(toml::Value::Table(filled)).map_err(|error| {
            let path = error.path().to_string();
            format!("template: {path}: {}", error.into_inner().message())
        })
    }

    /// Returns the name of the pipeline.
    #[must_use]
    pub(crate) fn name(&self) -> &str {
        self.name.as_deref().unwrap_or("outbox")
    }
}

impl Given<'_> {
    /// Overrides the file's values with the values of flags and environment variables.
    pub(super) fn overlay(&self, file: &mut FilePipeline) {
        fn overlay<T: Clone>(file: &mut Option<T>, given: Option<&T>) {
            if let Some(given) = given {
                *file = Some(given.clone());
            }
        }
        let connection = self.connection;
        overlay(&mut file.postgres, connection.postgres.as_ref());
        overlay(&mut file.outbox, connection.outbox.as_ref());
        if file.tables.is_none() {
            overlay(&mut file.table, connection.table.as_ref());
        }
        overlay(&mut file.prefix, connection.prefix.as_ref());
        overlay(&mut file.publication, connection.publication.as_ref());
        overlay(&mut file.slot, connection.slot.as_ref());
        let Some(records) = self.records else { return };
        overlay(&mut file.delivery, records.delivery.as_ref());
        overlay(&mut file.snapshot, records.snapshot.as_ref());
        if records.exactly_once {
            file.delivery = Some(DeliveryName::ExactlyOnce);
        }
        overlay(&mut file.on_oversize, records.on_oversize.as_ref());
        overlay(&mut file.on_unroutable, records.on_unroutable.as_ref());
        overlay(&mut file.on_malformed, records.on_malformed.as_ref());
        overlay(&mut file.on_table_error, records.on_table_error.as_ref());
        overlay(
            &mut file.dead_letter_topic,
            records.dead_letter_topic.as_ref(),
        );
        overlay(&mut file.topic, records.topic.as_ref());
        overlay(&mut file.key, records.key.as_ref());
        overlay(&mut file.payload, records.payload.as_ref());
        overlay(&mut file.null_payload, records.null_payload.as_ref());
        overlay(
            &mut file.window_bytes,
            records.window_bytes.clone().map(Scalar::Text).as_ref(),
        );
        overlay(&mut file.window_records, records.window_records.as_ref());
        overlay(
            &mut file.max_row_bytes,
            records.max_row_bytes.clone().map(Scalar::Text).as_ref(),
        );
        overlay(&mut file.link_timeout, records.link_timeout.as_ref());
        overlay(&mut file.drain_timeout, records.drain_timeout.as_ref());
        overlay(&mut file.create_topics, records.create_topics.as_ref());
        let retention = &records.retention;
        overlay(&mut file.retention, retention.retention.as_ref());
        overlay(
            &mut file.partitions_ahead,
            retention.partitions_ahead.as_ref(),
        );
        if retention.delete_rows {
            file.delete_rows = Some(true);
        }
        let given = &records.wal_budget;
        if given.is_given() {
            let wal_budget = file.wal_budget.get_or_insert_default();
            let size = |given: &Option<String>| given.clone().map(Scalar::Text);
            overlay(&mut wal_budget.warn, size(&given.wal_budget_warn).as_ref());
            overlay(&mut wal_budget.max, size(&given.wal_budget_max).as_ref());
            overlay(&mut wal_budget.on_max, given.wal_budget_on_max.as_ref());
        }
        if !records.header.is_empty() {
            let headers: BTreeMap<_, _> = records.header.iter().cloned().collect();
            file.headers = Some(FileHeaders(headers.into_iter().collect()));
        }
    }
}

/// Reads the file, but not the sources that it names.
///
/// # Errors
/// Returns an error if the file can't be read, or contains an invalid key or value.
pub(crate) fn read(path: &Path) -> Result<File, ConfigError> {
    let mut file: File = read_as(path, parse)?;
    for pipeline in &mut file.pipeline {
        pipeline.origin = Origin::File(path.to_owned());
    }
    Ok(file)
}

/// Reads the file, followed by the files in its source directories in order of their names.
///
/// # Errors
/// Returns the same errors as [`read`], and an error if a directory can't be read.
pub(crate) fn read_all(path: &Path) -> Result<Vec<(PathBuf, File)>, ConfigError> {
    let file = read(path)?;
    let mut parts = Vec::new();
    for directory in file.directories(path) {
        for part in files_in(&directory)? {
            let mut pipeline = read_part(&part)?;
            for pipeline in &mut pipeline {
                pipeline.origin = Origin::Part(part.clone());
            }
            let file = File {
                pipeline,
                ..File::default()
            };
            parts.push((part, file));
        }
    }
    Ok(std::iter::once((path.to_owned(), file))
        .chain(parts)
        .collect())
}

/// Reads the pipelines that are defined in one file of a source directory.
///
/// # Errors
/// Returns the same errors as [`read`].
pub(super) fn read_part(path: &Path) -> Result<Vec<FilePipeline>, ConfigError> {
    Ok(read_as(path, parse::<PartFile>)?.pipeline)
}

/// Resolves a path that occurs in a configuration file relative to that file's directory.
pub(super) fn resolve_path(file: &Path, path: &Path) -> PathBuf {
    file.parent().unwrap_or(Path::new("")).join(path)
}

/// Returns the files in a directory that define pipelines. Ignores hidden files, because these may
/// be an editor's temporary files.
fn files_in(directory: &Path) -> Result<Vec<PathBuf>, ConfigError> {
    let unreadable = |error: PathError| ConfigError::Unreadable {
        path: directory.to_owned(),
        error,
    };
    trusted_path::check_folder(directory).map_err(unreadable)?;
    let mut files = Vec::new();
    #[expect(clippy::disallowed_methods, reason = "the folder was checked")]
    let entries = std::fs::read_dir(directory).map_err(|error| unreadable(error.into()))?;
    for entry in entries {
        let path = entry.map_err(|error| unreadable(error.into()))?.path();
        let is_hidden = path
            .file_name()
            .is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
        if !is_hidden && path.extension().is_some_and(|suffix| suffix == "toml") {
            files.push(path);
        }
    }
    files.sort_unstable();
    Ok(files)
}

fn read_as<T>(
    path: &Path,
    parse: impl Fn(&str) -> Result<T, (usize, String)>,
) -> Result<T, ConfigError> {
    let unreadable = |error: PathError| ConfigError::Unreadable {
        path: path.to_owned(),
        error,
    };
    let bytes = trusted_path::read(path).map_err(unreadable)?;
    let text = String::from_utf8(bytes).map_err(|error| {
        let error = io::Error::new(io::ErrorKind::InvalidData, error.utf8_error());
        unreadable(error.into())
    })?;
    parse(&text).map_err(|(line, reason)| ConfigError::File {
        path: path.to_owned(),
        line,
        reason,
    })
}

/// Returns a warning if the file contains passwords and other users can read it.
pub(super) fn exposed(path: &Path, file: &File) -> Option<String> {
    let secrets = file.secrets();
    if secrets.is_empty() {
        return None;
    }
    let (mode, remedy) = trusted_path::exposure(path)?;
    Some(format!(
        "configuration file {} has mode {mode:04o}, so other users can read the passwords in it ({}). Run: {remedy}",
        path.display(),
        secrets.join(", "),
    ))
}

impl File {
    /// Returns the paths of all source directories.
    pub(super) fn directories(&self, path: &Path) -> Vec<PathBuf> {
        let directories = self.fleet.source.iter().filter_map(|source| match source {
            FileSource::Directory(directory) => Some(resolve_path(path, directory)),
            FileSource::Query(_) => None,
        });
        directories.collect()
    }

    /// Returns all sources that are database queries.
    pub(super) fn queries(&self) -> impl Iterator<Item = &QuerySource> {
        self.fleet.source.iter().filter_map(|source| match source {
            FileSource::Directory(_) => None,
            FileSource::Query(source) => Some(source),
        })
    }

    /// Returns descriptions of the keys whose values are, or contain, passwords.
    fn secrets(&self) -> Vec<String> {
        let mut found = Vec::new();
        for source in self.queries() {
            found.extend(source.secrets());
        }
        let mut add = |place: &str, kafka: &BTreeMap<String, Scalar>| {
            let names = kafka.keys().filter(|name| is_secret(name));
            found.extend(names.map(|name| format!("{name} in {place}")));
        };
        add("[kafka]", &self.kafka);
        for pipeline in &self.pipeline {
            let place = format!("pipeline {:?}", pipeline.name());
            if let Some(kafka) = &pipeline.kafka {
                add(&place, kafka);
            }
        }
        for pipeline in &self.pipeline {
            let postgres = pipeline.postgres.as_deref().unwrap_or_default();
            if Conninfo::contains_password(postgres) {
                found.push(format!("postgres of pipeline {:?}", pipeline.name()));
            }
        }
        found
    }
}
