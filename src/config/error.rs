//! Errors in the configuration.

use std::path::PathBuf;

use crate::kafka::properties::PropertyError;
use crate::postgres::connect::conninfo::ConninfoError;
use crate::trusted_path::PathError;

/// An invalid configuration. The program exits with code 2.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConfigError {
    /// A configuration file can't be read.
    #[error("configuration file {}: {error}", path.display())]
    Unreadable { path: PathBuf, error: PathError },
    /// A configuration file contains an invalid key or value.
    #[error("configuration file {}, line {line}: {reason}", path.display())]
    File {
        path: PathBuf,
        /// The line number, starting at 1.
        line: usize,
        reason: String,
    },
    /// The value of a pipeline's setting is invalid.
    #[error("pipeline {pipeline:?}: {key}: {reason}")]
    Value {
        pipeline: String,
        key: &'static str,
        reason: String,
    },
    /// The connection string is invalid.
    #[error("pipeline {pipeline:?}: postgres: {error}")]
    Postgres {
        pipeline: String,
        error: ConninfoError,
    },
    /// No database is configured.
    #[error(
        "pipeline {0:?}: no database is configured: expected --postgres URL, WALPOST_POSTGRES=URL, postgres = \"URL\" in walpost.toml, or PGHOST or PGDATABASE in the environment"
    )]
    NoPostgres(String),
    /// A Kafka property is invalid.
    #[error("pipeline {pipeline:?}: {error}{origin}")]
    Kafka {
        pipeline: String,
        error: PropertyError,
        /// Where the property was set, if not in the configuration file.
        origin: String,
    },
    /// `--pipeline` names a pipeline that is not in the file.
    #[error("pipeline {name:?} is not in the configuration file, which contains: {found}")]
    NoPipeline {
        /// The requested name.
        name: String,
        /// The names of the pipelines in the file.
        found: String,
    },
    /// Two pipelines use the same name, slot or topic.
    #[error("pipelines {first:?} and {second:?} conflict: {what}")]
    Twice {
        first: String,
        second: String,
        /// Which resource the pipelines share: the name, the slot or a topic.
        what: &'static str,
    },
    /// Two files define pipelines with the same name.
    #[error(
        "pipeline {name:?} is defined in two files, {first} and {second}; each pipeline needs its own name"
    )]
    InTwoFiles {
        name: String,
        first: String,
        second: String,
    },
    /// A query that defines pipelines has no usable result, and no rows from an earlier result can
    /// be used instead.
    #[error("{name}: {reason}")]
    Source { name: String, reason: String },
    /// Flags that apply to a single pipeline are set, but the file defines several pipelines.
    #[error(
        "flags or WALPOST_* variables for a single pipeline are set, but the configuration file defines several: {0}. Select one with --pipeline NAME, or move the values into the file"
    )]
    Several(String),
    /// A configured program does not exist or is not safe to run.
    #[error("{owner}: {key}: {}: {error}", program.display())]
    Program {
        /// The pipeline or source whose configuration names the program.
        owner: String,
        key: &'static str,
        program: PathBuf,
        error: Box<PathError>,
    },
    /// An environment variable or flag for Kafka is invalid.
    #[error("{0}")]
    Flag(String),
}
