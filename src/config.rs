//! Flags, environment and walpost.toml become settings: validated, with every default filled in.
//!
//! Flags come before environment variables (both arrive through clap), those before the file.

mod answers;
pub(crate) mod args;
pub(crate) mod file;
mod query;
pub(crate) mod retired;
mod trust;
pub(crate) mod values;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use self::answers::{Answers, Own};
use self::args::{ConnectionArgs, RecordArgs};
use crate::kafka::credentials::Credentials;
use crate::kafka::properties::{self, Properties, PropertyError};
use crate::kafka::settings::CheckpointSettings;
use crate::kafka::token_endpoint::{self, Endpoint};
use crate::outbox::headers::POSITION_HEADER;
use crate::outbox::route::is_topic_name;
use crate::outbox::settings::{
    DebeziumHeaders, Expansion, Format, HeadersColumn, OutboxSettings, Route, Topic, Untyped,
};
use crate::outbox::template::{Part, Template};
use crate::pipeline::settings::{
    DeadLetterSettings, Delivery, PipelineSettings, Retention, SinkSettings, SnapshotMode,
    Undeliverable,
};
use crate::pipeline::wal_budget::budget::{OnMax, WalBudget};
use crate::postgres::connect::conninfo::{Conninfo, ConninfoError};
use crate::postgres::table::TableName;
use crate::postgres::table_pattern::TablePatterns;
use crate::postgres::target::{Outbox, Target};
use crate::program::Program;
use crate::supervisor::definitions::{Defined, Definitions, Reading};

use self::file::{
    DeliveryName, File, FileEmptyArray, FileHeaders, FileNull, FilePipeline, Origin, OutboxName,
    SinkName,
};
use self::values::{Bytes, bytes, duration};

/// A configuration that can't be used. Exit code 2.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConfigError {
    /// The file can't be read.
    #[error("configuration file {}: {error}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
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
    /// The file has a program in it, and somebody else could have written that.
    #[error(
        "{whose}: {key}: {place} can be written by others ({found}), who could have programs run with all rights of walpost. \
         Nothing was run. See what is in it, and then: {remedy}"
    )]
    Writable {
        /// What names the program.
        whose: String,
        /// The key.
        key: &'static str,
        /// What others can write.
        place: String,
        /// Its owner and mode.
        found: String,
        /// The command that keeps them from it.
        remedy: String,
    },
    /// A program can't be looked at.
    #[error("{whose}: {key}: {reason}")]
    Program {
        /// What names it.
        whose: String,
        /// The key.
        key: &'static str,
        /// What is wrong.
        reason: String,
    },
    /// An environment variable or flag for Kafka that can't be read.
    #[error("{0}")]
    Flag(String),
}

/// Everything that flags and environment say about pipelines.
pub(crate) struct Given<'a> {
    /// Flags that every command has.
    pub connection: &'a ConnectionArgs,
    /// Flags for making and delivering records, where the command has them.
    pub records: Option<&'a RecordArgs>,
    /// `--sink`, where the command has it.
    pub sink: Option<SinkName>,
    /// The command can be about one of several tables, which `--table` names.
    pub takes_one_of: bool,
}

/// What says that there shall be no control socket.
const OFF: &str = "off";
/// Its name in a folder that is for it.
const CONTROL_FILE: &str = "control.sock";
/// Where it is on a machine with the unit that is shipped.
pub(crate) const CONTROL_BY_SYSTEMD: &str = "/run/walpost/control.sock";

/// The keys that name a program.
const PASSWORD_COMMAND: &str = "password_command";
const TOKEN_COMMAND: &str = "kafka_token_command";

type Env<'e> = &'e dyn Fn(&str) -> Option<String>;

/// Every pipeline that was asked for.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub pipelines: Vec<PipelineSettings>,
    /// What sources of pipelines could not be used, and why. Their pipelines are missing.
    pub failures: Vec<String>,
}

impl From<Reading<Definition>> for Loaded {
    fn from(reading: Reading<Definition>) -> Self {
        let pipelines = reading.defined.into_iter().map(|of| of.settings).collect();
        Self {
            pipelines,
            failures: reading.failures,
        }
    }
}

/// The settings of every pipeline that was asked for.
///
/// # Errors
/// Something can't be used; the message names it.
pub(crate) fn load(
    given: &Given<'_>,
    env: Env<'_>,
    env_vars: impl Iterator<Item = (String, String)>,
) -> Result<Loaded, ConfigError> {
    let mut answers = Answers::default();
    Ok(define(given, env, env_vars.collect(), &mut answers)?.into())
}

/// As [`load`], for who connects to nothing: sources that are databases are among the failures.
///
/// # Errors
/// As [`load`].
pub(crate) fn load_offline(
    given: &Given<'_>,
    env: Env<'_>,
    env_vars: impl Iterator<Item = (String, String)>,
) -> Result<Loaded, ConfigError> {
    let mut answers = Answers::offline();
    Ok(define(given, env, env_vars.collect(), &mut answers)?.into())
}

/// As [`load`], with what is compared when the configuration has changed.
fn define(
    given: &Given<'_>,
    env: Env<'_>,
    env_vars: Vec<(String, String)>,
    answers: &mut Answers,
) -> Result<Reading<Definition>, ConfigError> {
    let path = given.connection.config.as_deref();
    let read = path.map(|path| everything(path, given, env, &env_vars, answers));
    let (file, failures) = read.transpose()?.unzip();
    Ok(Reading {
        defined: of_file(path.zip(file), given, env, env_vars.into_iter())?,
        failures: failures.unwrap_or_default(),
    })
}

/// The file with the pipelines of its sources, and which sources could not be used.
fn everything(
    path: &Path,
    given: &Given<'_>,
    env: Env<'_>,
    env_vars: &[(String, String)],
    answers: &mut Answers,
) -> Result<(File, Vec<String>), ConfigError> {
    let files = file::read_all(path)?;
    for (path, file) in &files {
        if let Some(exposed) = file::exposed(path, file) {
            tracing::warn!("{exposed}");
        }
    }
    for (path, file) in &files {
        trust::check(path, file)?;
    }
    let mut files = files.into_iter().map(|(_, file)| file);
    let mut all = files.next().unwrap_or_default();
    all.pipeline.extend(files.flat_map(|part| part.pipeline));
    let from_env = kafka_properties(env_vars.iter().cloned());
    let judge = |pipeline: &FilePipeline| {
        let settings = settings(
            pipeline.clone(),
            Some(path),
            &all.kafka,
            &from_env,
            given,
            env,
        );
        settings
            .map(|of| own(&of))
            .map_err(|error| error.to_string())
    };
    let taken: HashSet<_> = match all.queries().next() {
        // What is wrong with them is found by who reads them.
        Some(_) => all.pipeline.iter().flat_map(&judge).flatten().collect(),
        None => HashSet::new(),
    };
    let (found, failures) = answers.read(path, &all, env, &judge, taken)?;
    all.pipeline.extend(found);
    Ok((all, failures))
}

/// What no other pipeline may have.
fn own(settings: &PipelineSettings) -> [Own; 2] {
    [
        Own::Name(settings.name.clone()),
        Own::Slot {
            slot: settings.target.slot.clone(),
            database: settings.postgres.describe(),
        },
    ]
}

/// The pipelines that flags, environment and files define, however often they are read.
pub(crate) struct Configured {
    connection: ConnectionArgs,
    records: RecordArgs,
    sink: Option<SinkName>,
    env: fn(&str) -> Option<String>,
    env_vars: fn() -> Vec<(String, String)>,
    answers: Answers,
}

impl Configured {
    /// Those of these flags, and of these variables.
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
            answers: Answers::default(),
        }
    }
}

impl Definitions for Configured {
    type Definition = Definition;

    fn read(&mut self) -> Result<Reading<Definition>, String> {
        let given = Given {
            connection: &self.connection,
            records: Some(&self.records),
            sink: self.sink,
            takes_one_of: false,
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
        // What can't be read has no sources, until it has changed.
        let directories = file::read(path).map_or_else(|_| Vec::new(), |of| of.directories(path));
        std::iter::once(path.clone()).chain(directories).collect()
    }
}

/// What the files say of a pipeline, but for passwords: whoever connects reads those again.
#[derive(PartialEq)]
pub(crate) struct Definition {
    pipeline: FilePipeline,
    postgres: Vec<(String, String)>,
    kafka: BTreeMap<String, file::Scalar>,
}

impl Definition {
    fn of(pipeline: &FilePipeline, kafka: &BTreeMap<String, file::Scalar>) -> Self {
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
        }
    }
}

/// As [`load`], for who makes what the pipelines need. With several pipelines of a file, `--postgres` is the
/// connection of an administrator: it says the server and who asks, and each pipeline its own database.
///
/// # Errors
/// Something can't be used; the message names it.
pub(crate) fn load_to_administer(
    given: &Given<'_>,
    env: Env<'_>,
    env_vars: impl Iterator<Item = (String, String)>,
) -> Result<Loaded, ConfigError> {
    let connection = given.connection;
    let (Some(path), Some(url)) = (&connection.config, &connection.postgres) else {
        return load(given, env, env_vars);
    };
    let own = ConnectionArgs {
        postgres: None,
        ..connection.clone()
    };
    let own = Given {
        connection: &own,
        ..*given
    };
    let env_vars: Vec<_> = env_vars.collect();
    let (file, failures) = everything(path, &own, env, &env_vars, &mut Answers::default())?;
    let asked = &connection.pipeline;
    let is_asked = |of: &&FilePipeline| asked.is_empty() || asked.iter().any(|it| it == of.name());
    let are_several = file.pipeline.iter().filter(is_asked).count() > 1;
    let given = if are_several { &own } else { given };
    let defined = of_file(Some((path, file)), given, env, env_vars.into_iter())?;
    let mut pipelines: Vec<_> = defined.into_iter().map(|of| of.settings).collect();
    if !are_several {
        return Ok(Loaded {
            pipelines,
            failures,
        });
    }
    on_one_server(&pipelines)?;
    let administrator = Conninfo::parse(url, env)
        .map_err(|error| ConfigError::Flag(format!("--postgres: {error}")))?;
    for settings in &mut pipelines {
        settings.postgres = administrator.to_database_of(&settings.postgres);
    }
    each_its_own(&pipelines.iter().collect::<Vec<_>>())?;
    Ok(Loaded {
        pipelines,
        failures,
    })
}

/// The connection of an administrator is to one server: what another server's pipelines need would be made there.
fn on_one_server(pipelines: &[PipelineSettings]) -> Result<(), ConfigError> {
    let [first, others @ ..] = pipelines else {
        return Ok(());
    };
    let here = first.postgres.servers();
    for other in others {
        let there = other.postgres.servers();
        if there != here {
            return Err(ConfigError::Flag(format!(
                "pipelines {:?} and {:?} are on different servers ({here} and {there}), and --postgres names one: choose those \
                 of one server with --pipeline",
                first.name, other.name
            )));
        }
    }
    Ok(())
}

/// Where metrics, health and status are shown: as the flag or its variable says, or else the file; none
/// where nobody says.
///
/// # Errors
/// The file can't be used.
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

/// The further names by which it may be asked: as the flag or its variable says, or else the file.
///
/// # Errors
/// The file can't be used.
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

/// Where `walpost pipeline` is answered: as the flag or its variable says, or else the file, or else in the folder that systemd
/// has made for this; nowhere where nobody says.
///
/// # Errors
/// The file can't be used.
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
                path => file::beside(file, Path::new(path)),
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

/// The settings of every pipeline that was asked for, of the file if there is one.
fn of_file(
    read: Option<(&Path, File)>,
    given: &Given<'_>,
    env: Env<'_>,
    env_vars: impl Iterator<Item = (String, String)>,
) -> Result<Vec<Defined<Definition>>, ConfigError> {
    let path = read.as_ref().map(|(path, _)| *path);
    let file = read.map(|(_, file)| file).unwrap_or_default();
    let kafka = file.kafka.clone();
    let env_vars: Vec<_> = env_vars.collect();
    let mut variables = env_vars.iter().map(|(name, _)| name);
    if let Some(reason) = variables.find_map(|name| retired::variable(name)) {
        return Err(ConfigError::Flag(reason));
    }
    let from_env = kafka_properties(env_vars.into_iter());
    let chosen = choose(file, &given.connection.pipeline, path.is_some())?;
    if chosen.len() > 1 && given.is_for_one_pipeline() {
        return Err(ConfigError::Several(names(&chosen)));
    }
    each_in_one_file(&chosen)?;
    let defined: Vec<_> = chosen
        .into_iter()
        .map(|pipeline| {
            Ok(Defined {
                source: pipeline.origin.source(),
                definition: Definition::of(&pipeline, &kafka),
                settings: settings(pipeline, path, &kafka, &from_env, given, env)?,
            })
        })
        .collect::<Result<_, ConfigError>>()?;
    let all: Vec<_> = defined.iter().map(|of| &of.settings).collect();
    each_its_own(&all)?;
    Ok(defined)
}

impl Given<'_> {
    fn is_for_one_pipeline(&self) -> bool {
        self.connection.is_for_one_pipeline()
            || self.records.is_some_and(RecordArgs::is_for_one_pipeline)
    }
}

fn names(pipelines: &[FilePipeline]) -> String {
    let names: Vec<_> = pipelines.iter().map(FilePipeline::name).collect();
    names.join(", ")
}

/// The pipelines of the file that were asked for; without a file, one with nothing but a name.
fn choose(file: File, asked: &[String], from_file: bool) -> Result<Vec<FilePipeline>, ConfigError> {
    let has_sources = !file.fleet.source.is_empty();
    let pipelines = file.pipeline;
    if pipelines.is_empty() && !from_file {
        let unnamed = || vec![FilePipeline::default()];
        let named = |name: &String| FilePipeline {
            name: Some(name.clone()),
            ..FilePipeline::default()
        };
        return Ok(match asked {
            [] => unnamed(),
            asked => asked.iter().map(named).collect(),
        });
    }
    for name in asked {
        if !pipelines.iter().any(|pipeline| pipeline.name() == name) {
            let (name, found) = (name.clone(), names(&pipelines));
            return Err(ConfigError::NoPipeline { name, found });
        }
    }
    if asked.is_empty() {
        return Ok(if pipelines.is_empty() && !has_sources {
            vec![FilePipeline::default()]
        } else {
            pipelines
        });
    }
    Ok(pipelines
        .into_iter()
        .filter(|pipeline| asked.iter().any(|name| name == pipeline.name()))
        .collect())
}

fn each_in_one_file(pipelines: &[FilePipeline]) -> Result<(), ConfigError> {
    for (at, second) in pipelines.iter().enumerate() {
        let is_other =
            |first: &&FilePipeline| first.name() == second.name() && first.origin != second.origin;
        if let Some(first) = pipelines[..at].iter().find(is_other) {
            return Err(ConfigError::InTwoFiles {
                name: second.name().to_owned(),
                first: first.origin.to_string(),
                second: second.origin.to_string(),
            });
        }
    }
    Ok(())
}

fn each_its_own(settings: &[&PipelineSettings]) -> Result<(), ConfigError> {
    let mut taken: HashMap<Own, &str> = HashMap::new();
    for second in settings {
        for own in own(second) {
            let what = own.what();
            if let Some(first) = taken.insert(own, &second.name) {
                let (first, second) = (first.to_owned(), second.name.clone());
                return Err(ConfigError::Twice {
                    first,
                    second,
                    what,
                });
            }
        }
    }
    Ok(())
}

/// What the variables for librdkafka's properties begin with.
const KAFKA_VARIABLES: &str = "WALPOST_KAFKA_";

/// Properties from variables: `WALPOST_KAFKA_SASL_PASSWORD` is `sasl.password`.
fn kafka_properties(vars: impl Iterator<Item = (String, String)>) -> Properties {
    vars.filter_map(|(name, value)| {
        let name = name.strip_prefix(KAFKA_VARIABLES)?;
        Some((name.to_lowercase().replace('_', "."), value))
    })
    .collect()
}

/// Takes what was given first, and says which key a value that can't be used belongs to.
struct Reader {
    pipeline: String,
}

impl Reader {
    fn error(&self, key: &'static str, reason: impl ToString) -> ConfigError {
        ConfigError::Value {
            pipeline: self.pipeline.clone(),
            key,
            reason: reason.to_string(),
        }
    }

    fn parse<T>(
        &self,
        key: &'static str,
        given: Option<&String>,
        parse: impl Fn(&str) -> Result<T, String>,
    ) -> Result<Option<T>, ConfigError> {
        given
            .map(|text| parse(text).map_err(|reason| self.error(key, reason)))
            .transpose()
    }

    fn read<T>(&self, key: &'static str, given: Option<&String>) -> Result<Option<T>, ConfigError>
    where
        T: std::str::FromStr,
        T::Err: ToString,
    {
        self.parse(key, given, |text| {
            text.parse().map_err(|error: T::Err| error.to_string())
        })
    }
}

fn settings(
    mut file: FilePipeline,
    path: Option<&Path>,
    kafka: &BTreeMap<String, file::Scalar>,
    from_env: &Properties,
    given: &Given<'_>,
    env: Env<'_>,
) -> Result<PipelineSettings, ConfigError> {
    let name = file.name().to_owned();
    let reader = Reader {
        pipeline: name.clone(),
    };
    let is_legal = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'_';
    if name.is_empty() || name.len() > 48 || !name.bytes().all(is_legal) {
        return Err(reader.error("name", "expected 1 to 48 characters of a-z, 0-9 and _"));
    }
    given.overlay(&mut file);
    let mut postgres = postgres(&name, file.postgres.as_deref(), env)?;
    if let Some(path) = path
        && file.postgres.is_some()
        && given.connection.postgres.is_none()
    {
        postgres = kept(postgres, path, &file.origin, &name);
    }
    // Whoever names another connection on the command line has its password too.
    if let Some(argv) = &file.password_command
        && given.connection.postgres.is_none()
    {
        let error = |reason: String| reader.error(PASSWORD_COMMAND, reason);
        let program = Program::new(argv).map_err(error)?;
        let place = format!("{PASSWORD_COMMAND} of pipeline {name:?}");
        let with = postgres.with_password_command(program, &place);
        postgres = with.map_err(|reason| error(reason.to_owned()))?;
    }
    let target = target(&reader, &file, given)?;
    let outbox = outbox(&reader, &file)?;
    let default_timeout = Duration::from_secs(60);
    let link_timeout = reader.parse("link_timeout", file.link_timeout.as_ref(), duration)?;
    let link_timeout = link_timeout.unwrap_or(default_timeout);
    if link_timeout < Duration::from_secs(1) {
        return Err(reader.error("link_timeout", "expected at least 1s"));
    }
    let drain_timeout = reader.parse("drain_timeout", file.drain_timeout.as_ref(), duration)?;
    let size = |key, given: &Option<file::Scalar>, default| {
        let given = given.as_ref().map(ToString::to_string);
        Ok::<_, ConfigError>(
            reader
                .parse(key, given.as_ref(), bytes)?
                .unwrap_or(Bytes(default))
                .0,
        )
    };
    let window_bytes = size("window_bytes", &file.window_bytes, 8 << 20)?;
    let row_bytes_max = size("max_row_bytes", &file.max_row_bytes, 64 << 20)?;
    // PostgreSQL's own limit for a message.
    let row_bytes_max = usize::try_from(row_bytes_max.min(1 << 30)).unwrap_or(1 << 30);
    let window_records = file.window_records.unwrap_or(100_000);
    if window_records == 0 || window_bytes == 0 || row_bytes_max < 1024 {
        let reason = "window_records and window_bytes must be above 0, max_row_bytes at least 1KiB";
        return Err(reader.error("window", reason));
    }
    let delivery = delivery(&reader, &file)?;
    let dead_letters = dead_letters(&reader, &file, &target, &outbox.topic, &delivery)?;
    let retention = retention(&reader, &file, &target.outbox)?;
    let wal_budget = wal_budget(&reader, &file, &target.outbox)?;
    let sink = match given.sink.or(file.sink).unwrap_or_default() {
        SinkName::Stdout if delivery != Delivery::AtLeastOnce => {
            let reason = "exactly-once needs Kafka's transactions, and the sink is stdout";
            return Err(reader.error("delivery", reason));
        }
        SinkName::Stdout => SinkSettings::Stdout,
        SinkName::Kafka => sink(&reader, &file, path, kafka, from_env, given)?,
    };
    Ok(PipelineSettings {
        name,
        postgres,
        target,
        outbox,
        sink,
        delivery,
        dead_letters,
        snapshot: file.snapshot.unwrap_or_default(),
        window_records,
        window_bytes,
        row_bytes_max,
        link_timeout,
        drain_timeout: drain_timeout.unwrap_or(Duration::from_secs(30)),
        retention,
        wal_budget,
    })
}

fn retention(
    reader: &Reader,
    file: &FilePipeline,
    outbox: &Outbox,
) -> Result<Retention, ConfigError> {
    let is_given = file.retention.is_some() || file.partitions_ahead.is_some();
    if is_given && outbox.is_messages() {
        let reason =
            "an outbox of messages has no rows to keep; leave it out, with partitions_ahead";
        return Err(reader.error("retention", reason));
    }
    let keep = reader.parse("retention", file.retention.as_ref(), duration)?;
    if keep.is_some_and(|keep| keep < Duration::from_secs(1)) {
        return Err(reader.error("retention", "expected at least 1s"));
    }
    let ahead = file.partitions_ahead.unwrap_or(7);
    if !(1..=1000).contains(&ahead) {
        return Err(reader.error("partitions_ahead", "expected 1 to 1000"));
    }
    Ok(Retention {
        keep,
        ahead,
        delete_rows: file.delete_rows.unwrap_or_default(),
    })
}

fn wal_budget(
    reader: &Reader,
    file: &FilePipeline,
    outbox: &Outbox,
) -> Result<WalBudget, ConfigError> {
    let given = file.wal_budget.clone().unwrap_or_default();
    let size = |key, given: Option<file::Scalar>| {
        let given = given.map(|given| given.to_string());
        let size = reader.parse(key, given.as_ref(), bytes)?;
        match size {
            Some(Bytes(0)) => Err(reader.error(key, "expected more than 0 bytes")),
            size => Ok(size.map(|Bytes(size)| size)),
        }
    };
    let budget = WalBudget {
        warn_bytes: size("wal_budget.warn", given.warn)?,
        max_bytes: size("wal_budget.max", given.max)?,
        on_max: given.on_max.unwrap_or_default(),
    };
    if let (Some(warn), Some(max)) = (budget.warn_bytes, budget.max_bytes)
        && warn > max
    {
        let reason =
            format!("{warn} bytes are more than wal_budget.max, {max} bytes: expected less");
        return Err(reader.error("wal_budget.warn", reason));
    }
    if given.on_max.is_some() && budget.max_bytes.is_none() {
        let reason = "there is no wal_budget.max to reach; set one, or leave it out";
        return Err(reader.error("wal_budget.on_max", reason));
    }
    if budget.on_max == OnMax::DropSlot && outbox.table().is_none() {
        let reason = match outbox.is_messages() {
            true => {
                "an outbox of messages has no table to send events again from; leave it at hold"
            }
            false => "it is for an outbox that is one table; leave it at hold",
        };
        return Err(reader.error("wal_budget.on_max", reason));
    }
    Ok(budget)
}

fn delivery(reader: &Reader, file: &FilePipeline) -> Result<Delivery, ConfigError> {
    let checkpoint = file.checkpoint.clone().unwrap_or_default();
    if file.delivery.unwrap_or_default() == DeliveryName::AtLeastOnce {
        return Ok(Delivery::AtLeastOnce);
    }
    let topic = checkpoint
        .topic
        .unwrap_or_else(|| "walpost-checkpoints".to_owned());
    legal_topic(&topic).map_err(|reason| reader.error("checkpoint", reason))?;
    let replication = checkpoint.replication.unwrap_or(-1);
    if replication == 0 || replication < -1 {
        return Err(reader.error("checkpoint", "expected at least 1 replica"));
    }
    Ok(Delivery::ExactlyOnce(CheckpointSettings {
        topic,
        replication,
    }))
}

fn dead_letters(
    reader: &Reader,
    file: &FilePipeline,
    target: &Target,
    events: &Topic,
    delivery: &Delivery,
) -> Result<DeadLetterSettings, ConfigError> {
    const TOPIC: &str = "dead_letter_topic";
    let default = DeadLetterSettings::default();
    let settings = DeadLetterSettings {
        oversize: file.on_oversize.unwrap_or_default(),
        unroutable: file.on_unroutable.unwrap_or_default(),
        malformed: match target.outbox.is_messages() {
            // Of a row there is no such thing: what is given is for other pipelines of the file.
            false => Undeliverable::Halt,
            // Whoever can connect can write one, unless that was revoked.
            true => file.on_malformed.unwrap_or(Undeliverable::DeadLetter),
        },
        topic: file.dead_letter_topic.clone().unwrap_or(default.topic),
    };
    if !settings.are_sent() {
        if file.dead_letter_topic.is_some() {
            let reason = "nothing would be sent there; set on_oversize or on_unroutable to dead-letter, or leave it out";
            return Err(reader.error(TOPIC, reason));
        }
        return Ok(settings);
    }
    let topic = &settings.topic;
    legal_topic(topic).map_err(|reason| reader.error(TOPIC, reason))?;
    if events.constant() == Some(topic) {
        let reason = format!("topic {topic:?} is that of the events; name another");
        return Err(reader.error(TOPIC, reason));
    }
    if matches!(delivery, Delivery::ExactlyOnce(checkpoint) if checkpoint.topic == *topic) {
        let reason = format!("topic {topic:?} is that of the checkpoints; name another");
        return Err(reader.error(TOPIC, reason));
    }
    if target.outbox.is_messages() && settings.oversize == Undeliverable::DeadLetter {
        let reason = "the payload is left out of what is too large, and an outbox of messages stores it nowhere else; \
                      leave it at halt, and raise message.max.bytes";
        return Err(reader.error("on_oversize", reason));
    }
    Ok(settings)
}

fn legal_topic(topic: &str) -> Result<(), String> {
    match is_topic_name(topic) {
        true => Ok(()),
        false => Err(format!(
            "topic {topic:?}: expected 1 to 249 characters of a-z A-Z 0-9 . _ -"
        )),
    }
}

fn postgres(name: &str, url: Option<&str>, env: Env<'_>) -> Result<Conninfo, ConfigError> {
    let from_env = ["PGHOST", "PGHOSTADDR", "PGDATABASE"]
        .iter()
        .any(|name| env(name).is_some());
    let url = match url {
        Some(url) => url,
        None if from_env => "",
        None => return Err(ConfigError::NoPostgres(name.to_owned())),
    };
    Conninfo::parse(url, env).map_err(|error| ConfigError::Postgres {
        pipeline: name.to_owned(),
        error,
    })
}

/// The connection string, whose password may change in the file that it comes from.
fn kept(postgres: Conninfo, path: &Path, origin: &Origin, pipeline: &str) -> Conninfo {
    let place = format!("postgres of pipeline {pipeline:?} in {origin}");
    let (path, origin) = (path.to_owned(), origin.clone());
    let pipeline = pipeline.to_owned();
    postgres.kept_in(&place, move || {
        let again = read_again(&path, &origin, &pipeline);
        let (_, now) = again.map_err(|error| error.to_string())?;
        let env = |name: &str| std::env::var(name).ok();
        self::postgres(&pipeline, now.postgres.as_deref(), &env).map_err(|error| error.to_string())
    })
}

/// The properties of Kafka that the file has for all by now, and the pipeline, which is defined at `origin`; nowhere where no file
/// names it.
fn read_again(
    path: &Path,
    origin: &Origin,
    pipeline: &str,
) -> Result<(BTreeMap<String, file::Scalar>, FilePipeline), ConfigError> {
    let mut file = file::read(path)?;
    let kafka = std::mem::take(&mut file.kafka);
    match origin {
        Origin::Nowhere | Origin::File(_) => {}
        Origin::Part(part) => file.pipeline = file::read_part(part)?,
        Origin::Row { rows, .. } => {
            let row = rows.get(pipeline).unwrap_or_default();
            let filled = file.queries().filter_map(|source| source.fill(&row).ok());
            file.pipeline = filled.flat_map(FilePipeline::of_template).collect();
        }
    }
    let is_unnamed =
        file.pipeline.is_empty() && matches!(origin, Origin::Nowhere | Origin::File(_));
    let asked: &[String] = match is_unnamed {
        true => &[],
        false => &[pipeline.to_owned()],
    };
    let chosen = choose(file, asked, true)?;
    let found = chosen.into_iter().next();
    Ok((kafka, found.unwrap_or_default()))
}

fn target(reader: &Reader, file: &FilePipeline, given: &Given<'_>) -> Result<Target, ConfigError> {
    let default = format!("walpost_{}", reader.pipeline);
    let slot = file.slot.clone().unwrap_or_else(|| default.clone());
    let is_legal = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'_';
    if slot.is_empty() || slot.len() > 63 || !slot.bytes().all(is_legal) {
        let reason = format!("{slot:?}: expected 1 to 63 characters of a-z, 0-9 and _");
        return Err(reader.error("slot", reason));
    }
    let publication = file.publication.clone().unwrap_or_else(|| default.clone());
    if publication.is_empty() || publication.len() > 63 {
        return Err(reader.error("publication", "expected a name of 1 to 63 bytes"));
    }
    let outbox = match file.outbox.unwrap_or_default() {
        OutboxName::Table => match &file.tables {
            None => Outbox::Table(table(reader, file)?),
            Some(patterns) => {
                let tables = tables(reader, file, patterns)?;
                match given.connection.table.as_ref() {
                    None => Outbox::Tables(tables),
                    Some(one) => one_of(reader, tables, one, given.takes_one_of)?,
                }
            }
        },
        OutboxName::Messages if file.snapshot == Some(SnapshotMode::Initial) => {
            let reason = "an outbox of messages has no table with older rows; leave it out";
            return Err(reader.error("snapshot", reason));
        }
        OutboxName::Messages => Outbox::Messages {
            prefix: prefix(reader, file, default)?,
        },
    };
    Ok(Target {
        outbox,
        publication,
        slot,
    })
}

fn no_prefix(reader: &Reader, file: &FilePipeline) -> Result<(), ConfigError> {
    if file.prefix.is_none() {
        return Ok(());
    }
    let reason = "a prefix is for an outbox of messages, and this one is a table; leave it out, or set outbox to messages";
    Err(reader.error("prefix", reason))
}

/// Several tables that share a slot.
fn tables(
    reader: &Reader,
    file: &FilePipeline,
    patterns: &[String],
) -> Result<TablePatterns, ConfigError> {
    no_prefix(reader, file)?;
    if file.table.is_some() {
        let reason = "table and tables both say where events are. Leave one of them out";
        return Err(reader.error("tables", reason));
    }
    if file.snapshot.is_some() {
        let reason =
            "rows that a table has are delivered when it is added to the others. Leave it out";
        return Err(reader.error("snapshot", reason));
    }
    TablePatterns::new(patterns).map_err(|error| reader.error("tables", error))
}

/// One of the tables, for a command that is about one.
fn one_of(
    reader: &Reader,
    of: TablePatterns,
    one: &String,
    is_taken: bool,
) -> Result<Outbox, ConfigError> {
    if !is_taken {
        let reason = "--table or WALPOST_TABLE names one of several tables, and this command is about all of them. Leave it out";
        return Err(reader.error("tables", reason));
    }
    let table: Option<TableName> = reader.read("table", Some(one))?;
    match table {
        Some(table) if of.matches(&table.schema, &table.name) => Ok(Outbox::OneOf { table, of }),
        _ => {
            let reason = format!(
                "{one} is none of the outbox's tables, {of}. Name one of them, or add a pattern to tables"
            );
            Err(reader.error("table", reason))
        }
    }
}

fn table(reader: &Reader, file: &FilePipeline) -> Result<TableName, ConfigError> {
    no_prefix(reader, file)?;
    let table = reader.read("table", file.table.as_ref())?;
    Ok(table.unwrap_or_else(|| TableName {
        schema: "public".to_owned(),
        name: "outbox".to_owned(),
    }))
}

fn prefix(reader: &Reader, file: &FilePipeline, default: String) -> Result<String, ConfigError> {
    let given = [
        ("table", file.table.is_some()),
        ("tables", file.tables.is_some()),
    ];
    if let Some((key, _)) = given.into_iter().find(|(_, is_given)| *is_given) {
        let reason = "an outbox of messages has no table; leave it out, or set outbox to table";
        return Err(reader.error(key, reason));
    }
    let prefix = file.prefix.clone().unwrap_or(default);
    let is_legal = |c: u8| c.is_ascii_alphanumeric() || matches!(c, b'.' | b'_' | b'-');
    if prefix.is_empty() || prefix.len() > 63 || !prefix.bytes().all(is_legal) {
        let reason = format!("{prefix:?}: expected 1 to 63 characters of a-z A-Z 0-9 . _ -");
        return Err(reader.error("prefix", reason));
    }
    Ok(prefix)
}

fn outbox(reader: &Reader, file: &FilePipeline) -> Result<OutboxSettings, ConfigError> {
    let default = OutboxSettings::default();
    let headers = match &file.headers {
        None => default.headers,
        Some(FileHeaders(given)) => given
            .iter()
            .map(|(name, template)| {
                if name.is_empty() || name.contains('\0') || name == POSITION_HEADER {
                    let reason = format!("{name:?} can't be the name of a header of yours");
                    return Err(reader.error("headers", reason));
                }
                let template = template
                    .parse()
                    .map_err(|error| reader.error("headers", error))?;
                Ok((name.clone(), template))
            })
            .collect::<Result<_, _>>()?,
    };
    let value_format = file.value_format.unwrap_or_default();
    let expand_payload = expansion(reader, file)?;
    let envelope = envelope(reader, file)?;
    if value_format == Format::Bytes && (expand_payload.is_some() || !envelope.is_empty()) {
        let reason = "\"bytes\" writes the column's bytes as they are, and expand_payload and envelope make an object of it. \
                      Set it to \"json\" or \"json-schema\", or leave these two out";
        return Err(reader.error("value_format", reason));
    }
    Ok(OutboxSettings {
        topic: topic(reader, file)?.unwrap_or(default.topic),
        key: reader
            .read("key", file.key.as_ref())?
            .unwrap_or(default.key),
        key_format: file.key_format.unwrap_or_default(),
        payload: file.payload.clone().unwrap_or(default.payload),
        value_format,
        expand_payload,
        envelope,
        null_payload: file.null_payload.unwrap_or_default(),
        empty_payload: file.empty_payload.unwrap_or_default(),
        null_default: file.null_default.unwrap_or_default(),
        headers,
        header_format: file.header_format.unwrap_or_default(),
        debezium_headers: file.debezium_headers.clone().map(|logical_name| {
            let run = uuid::Builder::from_random_bytes(fastrand::u128(..).to_be_bytes());
            DebeziumHeaders {
                logical_name,
                run_id: run.into_uuid().to_string(),
            }
        }),
        tracing_span_context: file.tracing_span_context.clone(),
        headers_column: match file.headers_column.as_deref() {
            None => HeadersColumn::IfPresent,
            Some("") => HeadersColumn::Off,
            Some(name) => HeadersColumn::Named(name.to_owned()),
        },
        timestamp: file.timestamp.clone(),
        partition: file.partition.clone(),
    })
}

fn topic(reader: &Reader, file: &FilePipeline) -> Result<Option<Topic>, ConfigError> {
    let Some(route) = &file.route else {
        let template: Option<Template> = reader.read("topic", file.topic.as_ref())?;
        let has_time = |part: &Part| matches!(part, Part::Time(_));
        if template.iter().flat_map(Template::parts).any(has_time) {
            let reason = "a time of RFC 3339 has colons, which the name of a topic can't have. Take :rfc3339 out";
            return Err(reader.error("topic", reason));
        }
        return Ok(template.map(Topic::Template));
    };
    if file.topic.is_some() {
        let reason = "topic and route both say where records go. Leave one of them out";
        return Err(reader.error("route", reason));
    }
    let route = Route::new(&route.column, &route.regex, &route.replacement);
    let route = route.map_err(|reason| reader.error("route", reason))?;
    Ok(Some(Topic::Route(route)))
}

fn expansion(reader: &Reader, file: &FilePipeline) -> Result<Option<Expansion>, ConfigError> {
    if file.expand_payload == Some(true) {
        let kept = |is_kept| {
            if is_kept {
                Untyped::Keep
            } else {
                Untyped::Ignore
            }
        };
        return Ok(Some(Expansion {
            nulls: kept(file.expand_null == Some(FileNull::OptionalBytes)),
            empty_arrays: kept(file.expand_empty_array == Some(FileEmptyArray::OptionalString)),
        }));
    }
    let given = [
        ("expand_null", file.expand_null.is_some()),
        ("expand_empty_array", file.expand_empty_array.is_some()),
    ];
    match given.into_iter().find(|(_, is_given)| *is_given) {
        Some((key, _)) => {
            let reason = "it is about members of an expanded payload. Set expand_payload = true, or leave it out";
            Err(reader.error(key, reason))
        }
        None => Ok(None),
    }
}

/// Columns and their names in the envelope.
fn envelope(reader: &Reader, file: &FilePipeline) -> Result<Vec<(String, String)>, ConfigError> {
    let mut members: Vec<(String, String)> = Vec::new();
    for given in file.envelope.iter().flatten() {
        let (column, name) = given.split_once(':').unwrap_or((given, given));
        if column.is_empty() || name.is_empty() {
            let reason = format!("{given:?}: expected \"COLUMN\" or \"COLUMN:NAME\"");
            return Err(reader.error("envelope", reason));
        }
        if name == "payload" || members.iter().any(|(_, other)| other == name) {
            let reason = format!(
                "{given:?}: the object has a member {name:?} already. Give this one another name: \"{column}:NAME\""
            );
            return Err(reader.error("envelope", reason));
        }
        members.push((column.to_owned(), name.to_owned()));
    }
    Ok(members)
}

fn sink(
    reader: &Reader,
    file: &FilePipeline,
    path: Option<&Path>,
    kafka: &BTreeMap<String, file::Scalar>,
    from_env: &Properties,
    given: &Given<'_>,
) -> Result<SinkSettings, ConfigError> {
    let mut over = from_env.clone();
    if let Some(records) = given.records {
        if let Some(brokers) = &records.kafka {
            over.insert("bootstrap.servers".to_owned(), brokers.clone());
        }
        for property in &records.kafka_property {
            let (name, value) = property.split_once('=').ok_or_else(|| {
                // What follows the name can be a password.
                let is_name = |c: &char| c.is_ascii_alphanumeric() || ".-_".contains(*c);
                let name: String = property.chars().take_while(is_name).collect();
                ConfigError::Flag(format!("--kafka-property {name:?}: expected NAME=VALUE"))
            })?;
            over.insert(name.trim().to_owned(), value.to_owned());
        }
    }
    let mut properties = properties_of_file(kafka, file);
    properties.extend(over.clone());
    let program = token_command(reader, file, &properties)?;
    let endpoint = match token_endpoint::is_named(&properties) {
        true => Some(endpoint(
            reader,
            path,
            &file.origin,
            &over,
            &mut properties,
        )?),
        false => None,
    };
    // Whoever may write the file need not be whoever may run programs as Walpost.
    let may_run_code = given
        .records
        .is_some_and(|records| records.allow_code_in_kafka_properties);
    let checked = match may_run_code {
        true => properties::check_with_code(&properties),
        false => properties::check(&properties),
    };
    checked.map_err(|error| {
        let text = error.to_string();
        let variable = from_env.keys().find(|name| text.contains(*name));
        ConfigError::Kafka {
            pipeline: reader.pipeline.clone(),
            error,
            origin: variable.map_or_else(String::new, |name| {
                let variable = name.to_uppercase().replace('.', "_");
                format!(". It comes from the environment variable {KAFKA_VARIABLES}{variable}")
            }),
        }
    })?;
    if let Some(create) = &file.create_topics
        && (create.partitions < 1 || create.replication == 0 || create.replication < -1)
    {
        return Err(reader.error(
            "create_topics",
            "expected at least 1 partition and 1 replica",
        ));
    }
    let credentials = match (program, endpoint) {
        (Some(program), _) => {
            let (pipeline, path) = (&reader.pipeline, program.path());
            let origin = format!("{TOKEN_COMMAND} of pipeline {pipeline:?}: {path}");
            Credentials::of_program(origin, program)
        }
        (None, Some(endpoint)) => Credentials::of_endpoint(endpoint),
        (None, None) => credentials(path, &file.origin, &reader.pipeline, over),
    };
    Ok(SinkSettings::Kafka {
        properties,
        create_topics: file.create_topics,
        credentials,
    })
}

/// The program that prints tokens for SASL/OAUTHBEARER: there is one if, and only if, that is the mechanism.
fn token_command(
    reader: &Reader,
    file: &FilePipeline,
    properties: &Properties,
) -> Result<Option<Program>, ConfigError> {
    let error = |reason: String| reader.error(TOKEN_COMMAND, reason);
    let property = |names: &[&str]| {
        let mut found = names.iter().filter_map(|name| properties.get(*name));
        found.next().map_or("", |value| value.trim())
    };
    let mechanism = property(&["sasl.mechanisms", "sasl.mechanism"]);
    let protocol = property(&["security.protocol"]).to_ascii_lowercase();
    let is_used = mechanism == "OAUTHBEARER" && protocol.starts_with("sasl_");
    let is_fetched = token_endpoint::is_named(properties);
    let unused = || {
        format!(
            "tokens are for SASL/OAUTHBEARER, and sasl.mechanisms is {mechanism:?} with security.protocol {protocol:?}. Set \
             \"sasl.mechanisms\" = \"OAUTHBEARER\" and \"security.protocol\" = \"sasl_ssl\"; or leave it out"
        )
    };
    if is_fetched && !is_used {
        return Err(reader.error(token_endpoint::METHOD, unused()));
    }
    let Some(argv) = &file.kafka_token_command else {
        // For tests, librdkafka has another way.
        let is_given =
            is_fetched || properties.contains_key("enable.sasl.oauthbearer.unsecure.jwt");
        if is_used && !is_given {
            return Err(error(
                "sasl.mechanisms is OAUTHBEARER, and nothing gives a token: name a program that prints one, as \
                 [\"/usr/bin/...\", \"...\"], or set \"sasl.oauthbearer.method\" = \"oidc\" in [kafka] for a token endpoint"
                    .to_owned(),
            ));
        }
        return Ok(None);
    };
    if is_fetched {
        return Err(error(
            "sasl.oauthbearer.method is oidc, with which tokens come from a token endpoint. Leave one of the two out".to_owned(),
        ));
    }
    if !is_used {
        return Err(error(unused()));
    }
    Program::new(argv).map(Some).map_err(error)
}

/// The token endpoint that the properties name, which lose what is about it. The client's secret is read again for each token,
/// unless it is given `over` the file.
fn endpoint(
    reader: &Reader,
    path: Option<&Path>,
    origin: &Origin,
    over: &Properties,
    properties: &mut Properties,
) -> Result<Endpoint, ConfigError> {
    let secret = |of: &Properties| {
        let mut found = token_endpoint::SECRETS
            .iter()
            .filter_map(|name| of.get(*name));
        found.next().cloned()
    };
    let fixed = match path {
        Some(_) => secret(over),
        None => secret(properties),
    };
    let (path, origin) = (path.map(Path::to_owned), origin.clone());
    let pipeline = reader.pipeline.clone();
    let read_secret = move || match (&fixed, &path) {
        (None, Some(path)) => {
            let again = read_again(path, &origin, &pipeline);
            let (kafka, now) = again.map_err(|error| error.to_string())?;
            Ok(secret(&properties_of_file(&kafka, &now)))
        }
        (fixed, _) => Ok(fixed.clone()),
    };
    let taken = Endpoint::take(properties, read_secret);
    taken.map_err(|reason| reader.error("kafka", reason))
}

/// Properties that the file has for a pipeline.
fn properties_of_file(
    kafka: &BTreeMap<String, file::Scalar>,
    pipeline: &FilePipeline,
) -> Properties {
    let own = pipeline.kafka.iter().flatten();
    kafka
        .iter()
        .chain(own)
        .map(|(name, value)| (name.clone(), value.to_string()))
        .collect()
}

/// What proves to the brokers who we are, which may change in the file. What is given `over` that stays.
fn credentials(
    path: Option<&Path>,
    origin: &Origin,
    pipeline: &str,
    over: Properties,
) -> Credentials {
    let path = match path {
        Some(path) if !over.contains_key("sasl.password") => path.to_owned(),
        _ => {
            return Credentials::fixed(format!(
                "-X sasl.password or the environment variable {KAFKA_VARIABLES}SASL_PASSWORD, which are read at the start only"
            ));
        }
    };
    let place = format!("\"sasl.password\" in {}", path.display());
    let (origin, pipeline) = (origin.clone(), pipeline.to_owned());
    Credentials::kept(place, move || {
        let again = read_again(&path, &origin, &pipeline);
        let (kafka, now) = again.map_err(|error| error.to_string())?;
        let mut now = properties_of_file(&kafka, &now);
        now.extend(over.clone());
        Ok(now)
    })
}

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
#[cfg(test)]
mod tests;
