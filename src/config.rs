//! Turns flags, environment variables and walpost.toml into validated settings with all defaults
//! filled in.
//!
//! Flags take precedence over environment variables (both are parsed by clap), which take
//! precedence over the file.

pub(crate) mod args;
mod commands;
mod error;
mod exclusive;
pub(crate) mod file;
mod kafka;
mod pipeline;
mod query;
mod query_results;
mod reader;
mod records;
mod reserved;
mod row_values;
mod selection;
mod syntax;
mod target;
mod trust;
pub(crate) mod values;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};

use self::args::{ConnectionArgs, RecordArgs};
pub(crate) use self::error::ConfigError;
use self::exclusive::ExclusiveResource;
use self::file::{File, FilePipeline, SinkName};
use self::kafka::kafka_properties;
use self::pipeline::settings;
use self::query_results::QueryResults;
use self::reserved::NamedTopics;
use self::selection::{choose, names};
use crate::kafka::credentials::Credentials;
use crate::outbox::reserved_topics::ReservedTopics;
use crate::pipeline::settings::PipelineSettings;
use crate::postgres::catalog::slot_owner::DefinedBy;
use crate::postgres::connect::conninfo::Conninfo;
use crate::supervisor::definitions::{Defined, Definitions, Reading};

/// The flags and environment variables of a command from which the settings of pipelines are
/// loaded.
pub(crate) struct Given<'a> {
    /// The flags for the database connection, which all commands accept.
    pub connection: &'a ConnectionArgs,
    /// The flags that configure records and their delivery. `None` if the command does not accept
    /// them.
    pub records: Option<&'a RecordArgs>,
    pub sink: GivenSink,
    /// Whether the command accepts `--table`, which selects one of several tables.
    pub accepts_single_table: bool,
}

/// Specifies which sink a command uses.
#[derive(Clone, Copy)]
pub(crate) enum GivenSink {
    /// The command delivers events or checks their delivery. It uses this sink or, if `None`, the
    /// sink in the configuration file. The sink must support the pipeline's delivery mode.
    ForDelivery(Option<SinkName>),
    /// The command does not deliver events. It uses this sink instead of the sink in the
    /// configuration file, regardless of the pipeline's delivery mode.
    Instead(SinkName),
}

/// The value of the `control` setting that disables the control socket.
const OFF: &str = "off";
/// The file name of the control socket in the service's runtime directory.
const CONTROL_FILE: &str = "control.sock";
/// The path of the control socket on a machine that uses the provided systemd unit.
pub(crate) const CONTROL_BY_SYSTEMD: &str = "/run/walpost/control.sock";

type Env<'e> = &'e dyn Fn(&str) -> Option<String>;

/// The selected pipelines.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub pipelines: Vec<PipelineSettings>,
    /// Errors from pipeline sources that could not be used. The pipelines of these sources are
    /// missing from `pipelines`.
    pub failures: Vec<String>,
}

impl From<Reading<Definition>> for Loaded {
    fn from(reading: Reading<Definition>) -> Self {
        let defined = reading.defined.into_iter();
        let pipelines = defined.map(|defined| defined.settings).collect();
        Self {
            pipelines,
            failures: reading.failures,
        }
    }
}

/// Returns the settings of all selected pipelines.
///
/// # Errors
/// Returns an error that names the invalid setting.
pub(crate) fn load(
    given: &Given<'_>,
    env: Env<'_>,
    env_vars: impl Iterator<Item = (String, String)>,
) -> Result<Loaded, ConfigError> {
    let mut answers = QueryResults::default();
    Ok(define(given, env, env_vars.collect(), &mut answers)?.into())
}

/// Like [`load`], but does not connect to any server. A source of pipelines that requires a
/// database query is reported as failed.
///
/// # Errors
/// Returns the same errors as [`load`].
pub(crate) fn load_offline(
    given: &Given<'_>,
    env: Env<'_>,
    env_vars: impl Iterator<Item = (String, String)>,
) -> Result<Loaded, ConfigError> {
    let mut answers = QueryResults::offline();
    Ok(define(given, env, env_vars.collect(), &mut answers)?.into())
}

/// Like [`load`], but also returns the pipelines' definitions, so that a reload can determine which
/// pipelines changed.
fn define(
    given: &Given<'_>,
    env: Env<'_>,
    env_vars: Vec<(String, String)>,
    answers: &mut QueryResults,
) -> Result<Reading<Definition>, ConfigError> {
    let path = given.connection.config.as_deref();
    let read = path.map(|path| read_sources(path, given, env, &env_vars, answers));
    let (file, failures) = read.transpose()?.unzip();
    Ok(Reading {
        defined: load_file(path.zip(file), given, env, env_vars.into_iter())?,
        failures: failures.unwrap_or_default(),
    })
}

/// Reads the configuration file and all of its sources of pipelines. Returns the file with the
/// pipelines of all sources added to it, and the errors of sources that could not be used.
fn read_sources(
    path: &Path,
    given: &Given<'_>,
    env: Env<'_>,
    env_vars: &[(String, String)],
    answers: &mut QueryResults,
) -> Result<(File, Vec<String>), ConfigError> {
    let files = file::read_all(path)?;
    for (path, file) in &files {
        if let Some(exposed) = file::exposed(path, file) {
            tracing::warn!("{exposed}");
        }
    }
    for (_, file) in &files {
        trust::check(file)?;
    }
    let mut files = files.into_iter().map(|(_, file)| file);
    let mut all = files.next().unwrap_or_default();
    all.pipeline.extend(files.flat_map(|part| part.pipeline));
    let from_env = kafka_properties(env_vars.iter().cloned());
    let in_files = NamedTopics::from_files(&all);
    let validate = |pipeline: &FilePipeline| {
        let settings = settings(
            pipeline.clone(),
            Some(path),
            &all.kafka,
            &from_env,
            given,
            env,
        );
        let settings = settings.map_err(|error| error.to_string())?;
        match in_files.conflict(&settings) {
            None => Ok(exclusive_resources(&settings)),
            Some(reason) => Err(reason),
        }
    };
    let taken: HashSet<_> = match all.queries().next() {
        // Skip invalid pipelines here; their errors are reported later, when their settings are
        // loaded.
        Some(_) => all.pipeline.iter().flat_map(&validate).flatten().collect(),
        None => HashSet::new(),
    };
    let (found, failures) = answers.read(path, &all, env, &validate, &taken)?;
    all.pipeline.extend(found);
    Ok((all, failures))
}

/// Returns the pipeline's name, its slot, and its own topics. Other pipelines must not use the name
/// or the slot, and may use the topics only for the same purpose.
fn exclusive_resources(settings: &PipelineSettings) -> Vec<ExclusiveResource> {
    let topics = settings
        .own_topics()
        .map(|(name, usage)| ExclusiveResource::Topic {
            name: name.to_owned(),
            usage,
        });
    let slot = ExclusiveResource::Slot {
        slot: settings.target.slot.clone(),
        database: settings.postgres.describe(),
    };
    [ExclusiveResource::Name(settings.name.clone()), slot]
        .into_iter()
        .chain(topics)
        .collect()
}

/// A reader for the definitions of pipelines in flags, environment variables and files. Each read
/// picks up changes made since the previous read.
pub(crate) struct Configured {
    connection: ConnectionArgs,
    records: RecordArgs,
    sink: Option<SinkName>,
    env: fn(&str) -> Option<String>,
    env_vars: fn() -> Vec<(String, String)>,
    answers: QueryResults,
}

impl Configured {
    /// Creates a reader for the pipelines that are defined by the given flags and environment
    /// variables, or by the configuration file that they name.
    pub(crate) fn new(
        connection: ConnectionArgs,
        records: RecordArgs,
        sink: Option<SinkName>,
        env: fn(&str) -> Option<String>,
        env_vars: fn() -> Vec<(String, String)>,
    ) -> Self {
        Self {
            connection,
            records,
            sink,
            env,
            env_vars,
            answers: QueryResults::default(),
        }
    }
}

impl Definitions for Configured {
    type Definition = Definition;

    fn read(&mut self) -> Result<Reading<Definition>, String> {
        let given = Given {
            connection: &self.connection,
            records: Some(&self.records),
            sink: GivenSink::ForDelivery(self.sink),
            accepts_single_table: false,
        };
        define(&given, &self.env, (self.env_vars)(), &mut self.answers)
            .map_err(|error| error.to_string())
    }

    fn have_changed(&mut self) -> bool {
        self.answers.have_changed(&self.env)
    }

    fn places(&self) -> Vec<PathBuf> {
        let Some(path) = &self.connection.config else {
            return Vec::new();
        };
        // If the file can't be read, the directories that it names are unknown, so watch only the
        // file.
        let directories =
            file::read(path).map_or_else(|_| Vec::new(), |file| file.directories(path));
        std::iter::once(path.clone()).chain(directories).collect()
    }
}

/// A pipeline's definition in the files, which is compared on reload. Excludes passwords, because
/// these are read again for each connection.
#[derive(PartialEq)]
pub(crate) struct Definition {
    pipeline: FilePipeline,
    postgres: Vec<(String, String)>,
    kafka: BTreeMap<String, file::Scalar>,
    /// The reserved topics to which the pipeline's rows could be routed. These include topics that
    /// other pipelines use for checkpoints or dead letters.
    reserved: ReservedTopics,
}

impl Definition {
    fn new(pipeline: &FilePipeline, kafka: &BTreeMap<String, file::Scalar>) -> Self {
        let postgres = pipeline.postgres.as_deref().unwrap_or_default();
        let kafka = kafka.iter().chain(pipeline.kafka.iter().flatten());
        Self {
            postgres: Conninfo::without_passwords(postgres),
            kafka: kafka
                .filter(|(name, _)| !Credentials::have(name))
                .map(|(name, value)| (name.clone(), value.clone()))
                .collect(),
            pipeline: FilePipeline {
                postgres: None,
                kafka: None,
                ..pipeline.clone()
            },
            reserved: ReservedTopics::default(),
        }
    }
}

/// Like [`load`], but for commands that create the pipelines' database objects. If the file defines
/// several pipelines, `--postgres` is an administrator's connection, which supplies the server and
/// the role. Each pipeline supplies its own database.
///
/// # Errors
/// Returns an error that names the invalid setting.
pub(crate) fn load_to_administer(
    given: &Given<'_>,
    env: Env<'_>,
    env_vars: impl Iterator<Item = (String, String)>,
) -> Result<Loaded, ConfigError> {
    let connection = given.connection;
    let (Some(path), Some(url)) = (&connection.config, &connection.postgres) else {
        return load(given, env, env_vars);
    };
    let without_url = ConnectionArgs {
        postgres: None,
        ..connection.clone()
    };
    let without_url = Given {
        connection: &without_url,
        ..*given
    };
    let env_vars: Vec<_> = env_vars.collect();
    let mut results = QueryResults::default();
    let (file, failures) = read_sources(path, &without_url, env, &env_vars, &mut results)?;
    let requested = &connection.pipeline;
    let is_requested = |pipeline: &&FilePipeline| {
        requested.is_empty() || requested.iter().any(|name| name == pipeline.name())
    };
    let are_several = file.pipeline.iter().filter(is_requested).count() > 1;
    let given = if are_several { &without_url } else { given };
    let defined = load_file(Some((path, file)), given, env, env_vars.into_iter())?;
    let defined = defined.into_iter();
    let mut pipelines: Vec<_> = defined.map(|defined| defined.settings).collect();
    if !are_several {
        return Ok(Loaded {
            pipelines,
            failures,
        });
    }
    check_same_server(&pipelines)?;
    let administrator = Conninfo::parse(url, env)
        .map_err(|error| ConfigError::Flag(format!("--postgres: {error}")))?;
    for settings in &mut pipelines {
        settings.postgres = administrator.with_database_of(&settings.postgres);
    }
    check_exclusive_resources(&pipelines.iter().collect::<Vec<_>>())?;
    Ok(Loaded {
        pipelines,
        failures,
    })
}

/// Checks that all pipelines use the same server. With an administrator's connection, the objects
/// of all pipelines are created on the server of that connection.
fn check_same_server(pipelines: &[PipelineSettings]) -> Result<(), ConfigError> {
    let [first, others @ ..] = pipelines else {
        return Ok(());
    };
    let here = first.postgres.servers();
    for other in others {
        let there = other.postgres.servers();
        if there != here {
            return Err(ConfigError::Flag(format!(
                "pipelines {:?} and {:?} are on different servers ({here} and {there}), but --postgres specifies only one. \
                 Select pipelines on the same server with --pipeline",
                first.name, other.name
            )));
        }
    }
    Ok(())
}

/// Returns the address for metrics, health checks and status. The flag takes precedence over its
/// environment variable, which takes precedence over the file. Returns `None` if the address is not
/// set.
///
/// # Errors
/// Returns an error if the file can't be read or is invalid.
pub(crate) fn http(
    given: Option<&str>,
    file: Option<&Path>,
) -> Result<Option<String>, ConfigError> {
    if let Some(given) = given {
        return Ok(Some(given.to_owned()));
    }
    let file = file.map(file::read).transpose()?;
    Ok(file.and_then(|file| file.http))
}

/// Returns the additional host names that HTTP requests may use. The flag takes precedence over its
/// environment variable, which takes precedence over the file.
///
/// # Errors
/// Returns an error if the file can't be read or is invalid.
pub(crate) fn http_hosts(
    given: &[String],
    file: Option<&Path>,
) -> Result<Vec<String>, ConfigError> {
    if !given.is_empty() {
        return Ok(given.to_vec());
    }
    let file = file.map(file::read).transpose()?;
    Ok(file.map(|file| file.http_hosts).unwrap_or_default())
}

/// Returns the path of the socket for `walpost pipeline`. The flag takes precedence over its
/// environment variable, which takes precedence over the file. If the path is not set, the socket
/// is in the runtime directory that systemd created for the service. Returns `None` if there is no
/// such directory or the socket is disabled.
///
/// # Errors
/// Returns an error if the file can't be read or is invalid.
pub(crate) fn control(
    given: Option<&Path>,
    file: Option<&Path>,
    env: Env<'_>,
) -> Result<Option<PathBuf>, ConfigError> {
    let named = match (given, file) {
        (Some(given), _) => Some(given.to_owned()),
        (None, None) => None,
        (None, Some(file)) => {
            let named = file::read(file)?.control;
            named.map(|named| match named.as_str() {
                OFF => PathBuf::from(OFF),
                path => file::resolve_path(file, Path::new(path)),
            })
        }
    };
    let by_systemd = || {
        let folders = env("RUNTIME_DIRECTORY")?;
        let first = folders.split(':').next().filter(|path| !path.is_empty())?;
        Some(Path::new(first).join(CONTROL_FILE))
    };
    Ok(named
        .or_else(by_systemd)
        .filter(|path| path != Path::new(OFF)))
}

/// Returns the settings of the selected pipelines. Without a file, flags and variables define the
/// pipelines.
fn load_file(
    read: Option<(&Path, File)>,
    given: &Given<'_>,
    env: Env<'_>,
    env_vars: impl Iterator<Item = (String, String)>,
) -> Result<Vec<Defined<Definition>>, ConfigError> {
    let path = read.as_ref().map(|(path, _)| *path);
    let file = read.map(|(_, file)| file).unwrap_or_default();
    let kafka = file.kafka.clone();
    let from_env = kafka_properties(env_vars);
    let named = NamedTopics::from_files(&file);
    let chosen = choose(file, &given.connection.pipeline, path.is_some())?;
    if chosen.len() > 1 && given.is_for_one_pipeline() {
        return Err(ConfigError::Several(names(&chosen)));
    }
    check_unique_files(&chosen)?;
    let mut defined: Vec<_> = chosen
        .into_iter()
        .map(|pipeline| {
            Ok(Defined {
                source: pipeline.origin.source(),
                definition: Definition::new(&pipeline, &kafka),
                settings: settings(pipeline, path, &kafka, &from_env, given, env)?,
            })
        })
        .collect::<Result<_, ConfigError>>()?;
    let all: Vec<_> = defined.iter().map(|defined| &defined.settings).collect();
    check_exclusive_resources(&all)?;
    reserved::reserve(&named, &mut defined)?;
    Ok(defined)
}

impl Given<'_> {
    fn is_for_one_pipeline(&self) -> bool {
        self.connection.is_for_one_pipeline()
            || self.records.is_some_and(RecordArgs::is_for_one_pipeline)
    }
}

/// Checks that no two files define pipelines with the same name.
fn check_unique_files(pipelines: &[FilePipeline]) -> Result<(), ConfigError> {
    for (index, second) in pipelines.iter().enumerate() {
        let is_other =
            |first: &&FilePipeline| first.name() == second.name() && first.origin != second.origin;
        if let Some(first) = pipelines[..index].iter().find(is_other) {
            return Err(ConfigError::InTwoFiles {
                name: second.name().to_owned(),
                first: first.origin.to_string(),
                second: second.origin.to_string(),
            });
        }
    }
    Ok(())
}

/// Checks that no two pipelines share an exclusive resource. Pipelines that are defined by rows may
/// specify the same slot: walpost.slot_state in the slot's database determines which of them may
/// use it.
fn check_exclusive_resources(settings: &[&PipelineSettings]) -> Result<(), ConfigError> {
    let mut taken: HashMap<ExclusiveResource, &PipelineSettings> = HashMap::new();
    for second in settings {
        for resource in exclusive_resources(second) {
            let may_share = |first: &PipelineSettings| {
                let definers = [first.defined_by, second.defined_by];
                resource.is_slot() && definers == [DefinedBy::Row; 2]
            };
            let excluded = resource.excluded();
            let first = excluded.iter().find_map(|other| taken.get(other));
            if let Some(first) = first.filter(|first| !may_share(first)) {
                return Err(ConfigError::Twice {
                    first: first.name.clone(),
                    second: second.name.clone(),
                    what: resource.description(),
                });
            }
            taken.insert(resource, second);
        }
    }
    Ok(())
}

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
#[cfg(test)]
mod tests;
