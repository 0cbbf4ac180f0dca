//! What is wrong with a configuration.

use std::path::PathBuf;

use crate::kafka::properties::PropertyError;
use crate::postgres::connect::conninfo::ConninfoError;
use crate::trusted_path::PathError;

/// A configuration that can't be used. Exit code 2.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConfigError {
    /// The file can't be read.
    #[error("configuration file {}: {error}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        error: PathError,
    },
    /// The file is not what it should be.
    #[error("configuration file {}, line {line}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Where, counted from 1.
        line: usize,
        /// What is wrong.
        reason: String,
    },
    /// A value can't be used.
    #[error("pipeline {pipeline:?}: {key}: {reason}")]
    Value {
        /// The pipeline.
        pipeline: String,
        /// The key.
        key: &'static str,
        /// What is wrong.
        reason: String,
    },
    /// The database is not named rightly.
    #[error("pipeline {pipeline:?}: postgres: {error}")]
    Postgres {
        /// The pipeline.
        pipeline: String,
        /// What is wrong.
        error: ConninfoError,
    },
    /// No database is named.
    #[error(
        "pipeline {0:?}: no database is named: expected --postgres URL, WALPOST_POSTGRES=URL, postgres = \"URL\" in walpost.toml, or PGHOST or PGDATABASE in the environment"
    )]
    NoPostgres(String),
    /// Kafka's properties can't be used.
    #[error("pipeline {pipeline:?}: {error}{origin}")]
    Kafka {
        /// The pipeline.
        pipeline: String,
        /// What is wrong.
        error: PropertyError,
        /// Where the property comes from, if that isn't plain.
        origin: String,
    },
    /// `--pipeline` names one that is not in the file.
    #[error("pipeline {name:?} is not in the configuration file, which has: {found}")]
    NoPipeline {
        /// What was asked for.
        name: String,
        /// What there is.
        found: String,
    },
    /// Two pipelines have the same name or slot.
    #[error("pipelines {first:?} and {second:?} have the same {what}; each needs its own")]
    Twice {
        /// One.
        first: String,
        /// The other.
        second: String,
        /// What they share.
        what: &'static str,
    },
    /// Two files have a pipeline of the same name.
    #[error("pipeline {name:?} is in two files, {first} and {second}; each needs its own name")]
    InTwoFiles {
        /// The name.
        name: String,
        /// One file.
        first: String,
        /// The other.
        second: String,
    },
    /// A source of pipelines can't be used, and nothing stands for it from before.
    #[error("{name}: {reason}")]
    Source {
        /// The source.
        name: String,
        /// What is wrong.
        reason: String,
    },
    /// A flag for one pipeline, and several pipelines.
    #[error(
        "flags or WALPOST_* variables for one pipeline are given, but the configuration file has several: {0}. Choose one with --pipeline NAME, or put the values into the file"
    )]
    Several(String),
    /// A program is missing, or must not be run.
    #[error("{owner}: {key}: {}: {error}", program.display())]
    Program {
        /// What names the program.
        owner: String,
        /// The key.
        key: &'static str,
        /// The program.
        program: PathBuf,
        /// What is wrong with it.
        error: Box<PathError>,
    },
    /// An environment variable or flag for Kafka that can't be read.
    #[error("{0}")]
    Flag(String),
}
