//! The command line, with one module per subcommand.

pub(crate) mod check;
pub(crate) mod checkpoint;
mod consent;
pub(crate) mod exposed;
mod help;
pub(crate) mod import;
pub(crate) mod init;
pub(crate) mod maintain;
mod out;
pub(crate) mod pipeline;
pub(crate) mod replay;
pub(crate) mod run;
pub(crate) mod skip;
pub(crate) mod status;
pub(crate) mod verify;

use std::path::{Path, PathBuf};

use clap::error::ErrorKind;
use clap::{ArgMatches, FromArgMatches, Parser, Subcommand};
use rustix::process::Signal;
use tokio::signal::unix::{SignalKind, signal};
use tracing::{error, warn};

use crate::config::args::LogArgs;
use crate::config::{self, ConfigError, Given, Loaded};
use crate::escape::Escaped;
use crate::kafka::reader::ReadError;
use crate::model::exit::Exit;
use crate::pipeline::recovery::{self, Remedy};
use crate::pipeline::settings::PipelineSettings;
use crate::supervisor;
use crate::trusted_path;

/// Maximum number of pipelines queried concurrently.
const CONCURRENT_QUERIES_MAX: usize = 8;
/// If there are more pipelines than this, the output includes a summary. This is also the maximum
/// number of names that a list shows; any further names are replaced with a count.
const SHORT_LIST_MAX: usize = 3;

/// Examples shown after the program's help.
const EXAMPLES: &str = "\
Examples:
  Print events instead of sending them to Kafka:
    walpost run --init --sink stdout --postgres postgresql://postgres@localhost/shop
  Deliver events to Kafka as configured in a file:
    walpost run --config /etc/walpost/walpost.toml

Documentation: README.md and docs/, which packages install in /usr/share/doc/walpost";

/// Delivers events from a PostgreSQL outbox table to Apache Kafka, in commit order.
#[derive(Debug, Parser)]
#[command(name = "walpost", version, max_term_width = 100, after_help = EXAMPLES)]
pub(crate) struct Cli {
    /// Command-line flags that configure logging.
    #[command(flatten)]
    pub log: LogArgs,
    /// The subcommand.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Create the outbox, role, publication and slot if they don't exist
    ///
    /// With a configuration file, creates the objects of all pipelines, or of those selected with
    /// --pipeline. If there are several pipelines, --postgres is an administrator's connection:
    /// its server and role are used with the database of each pipeline.
    Init(init::InitArgs),
    /// Find problems that would make `run` fail or lose events, with the command that fixes each
    Check(check::CheckArgs),
    /// Show or set the position from which exactly-once delivery resumes
    #[command(subcommand)]
    Checkpoint(checkpoint::CheckpointCommand),
    /// Convert another tool's configuration to walpost.toml
    #[command(subcommand)]
    Import(import::ImportCommand),
    /// Create partitions of the table in advance, and drop delivered partitions that are older than
    /// the retention period
    Maintain(maintain::MaintainArgs),
    /// Deliver the outbox to Kafka until SIGTERM or SIGINT
    Run(run::RunArgs),
    /// List, stop, start or restart the pipelines of a running Walpost, or reload its configuration
    #[command(subcommand)]
    Pipeline(pipeline::PipelineCommand),
    /// Send rows of the outbox table again, after counting them and asking for confirmation
    Replay(replay::ReplayArgs),
    /// Move the slot past events that must not be delivered, after showing them and asking for
    /// confirmation
    Skip(skip::SkipArgs),
    /// Compare the topics with the table to find missing, repeated, misplaced or out-of-order events
    Verify(verify::VerifyArgs),
    /// Show the state, rate, lag and slot of each pipeline
    Status(status::StatusArgs),
    /// Print a shell completion script
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Write a manual page for each command, as included in packages
    #[command(hide = true)]
    Man {
        /// The directory, which must exist
        folder: PathBuf,
    },
}

impl From<&ReadError> for Exit {
    fn from(error: &ReadError) -> Self {
        match error {
            ReadError::Sink(error) => recovery::sink_remedy(error).into(),
            ReadError::Removed { .. } | ReadError::Io(_) => Self::Failed,
        }
    }
}

impl From<Remedy> for Exit {
    /// Returns the exit code for an error with this remedy, for commands that report the error
    /// instead of retrying.
    fn from(remedy: Remedy) -> Self {
        match remedy {
            Remedy::Halt => Self::Halted,
            Remedy::Reconnect | Remedy::RebuildSink | Remedy::StandBy => Self::Failed,
        }
    }
}

/// Runs the command line. Exits the process if the command line is invalid or requests help.
#[must_use]
pub fn main() -> Exit {
    // Initialize OpenSSL before librdkafka does. If librdkafka initialized OpenSSL, OpenSSL would
    // free its data when the process exits. A thread in the middle of a handshake could then crash
    // the process before the exit code is returned.
    openssl::init();
    handle_file_size_signal();
    let read = help::command().try_get_matches().and_then(|matches| {
        let cli = Cli::from_arg_matches(&matches)?;
        Ok((cli, matches))
    });
    match read {
        Ok((cli, matches)) => run(cli, &matches),
        Err(error) => exposed::without_stray_values(error).exit(),
    }
}

/// Makes a write that exceeds the file size limit fail with an error. By default, SIGXFSZ would
/// terminate the process without a message. The signal is handled rather than ignored, because
/// child processes inherit ignored signals.
fn handle_file_size_signal() {
    // Installing the handler requires a runtime, but the handler remains after the runtime is
    // dropped.
    if let Ok(runtime) = supervisor::runtime() {
        let _entered = runtime.enter();
        let _ = signal(SignalKind::from_raw(Signal::XFSZ.as_raw()));
    }
}

fn run(cli: Cli, matches: &ArgMatches) -> Exit {
    let _flushed = cli.log.start().unwrap_or_else(|reason| {
        // Report the error the way clap does, because logging isn't available yet.
        help::command()
            .error(ErrorKind::InvalidValue, Escaped(reason))
            .exit()
    });
    for exposed in exposed::passwords(matches) {
        warn!("{exposed}");
    }
    out::checked(match cli.command {
        Command::Init(args) => init::run(&args),
        Command::Check(args) => check::run(&args),
        Command::Checkpoint(command) => checkpoint::run(command),
        Command::Import(command) => import::run(&command),
        Command::Maintain(args) => maintain::run(&args),
        Command::Pipeline(command) => pipeline::run(&command),
        Command::Run(args) => run::run(&args),
        Command::Replay(args) => replay::run(&args),
        Command::Skip(args) => skip::run(&args),
        Command::Verify(args) => verify::run(&args),
        Command::Status(args) => status::run(&args),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut help::command(), "walpost", &mut script);
            out::script(&String::from_utf8_lossy(&script));
            Exit::Done
        }
        Command::Man { folder } => write_manual(&folder),
    })
}

fn write_manual(folder: &Path) -> Exit {
    // If other users can write to the directory, they could have created symbolic links in it.
    let written = trusted_path::check_private_folder(folder)
        .map_err(|error| error.to_string())
        .and_then(|()| {
            clap_mangen::generate_to(help::command(), folder).map_err(|error| error.to_string())
        });
    match written {
        Ok(()) => Exit::Done,
        Err(reason) => {
            error!(
                "failed to write manual pages to {}: {reason}",
                folder.display()
            );
            Exit::Failed
        }
    }
}

/// Loads the settings from flags, environment variables and the configuration file. Logs the error
/// if this fails.
fn load(given: &Given<'_>) -> Result<Vec<PipelineSettings>, Exit> {
    log_loaded(config::load(given, &variable, variables())).map(log_missing)
}

/// Like [`load`], but for commands that create the pipelines' database objects.
fn load_to_administer(given: &Given<'_>) -> Result<Vec<PipelineSettings>, Exit> {
    log_loaded(config::load_to_administer(given, &variable, variables())).map(log_missing)
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

fn variables() -> impl Iterator<Item = (String, String)> {
    // Skip variables whose names or values are not valid Unicode, because Walpost does not use such
    // variables.
    std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
}

/// Logs the error if loading failed. Otherwise, warns about insecure settings of the loaded
/// pipelines.
fn log_loaded(loaded: Result<Loaded, ConfigError>) -> Result<Loaded, Exit> {
    let loaded = loaded.map_err(|reason| {
        error!("{reason}");
        Exit::Usage
    })?;
    let pipelines = &loaded.pipelines;
    pipelines.iter().for_each(PipelineSettings::log_exposures);
    Ok(loaded)
}

/// Returns the loaded pipelines. Logs an error for each source of pipelines that failed to load.
fn log_missing(
    Loaded {
        pipelines,
        failures,
    }: Loaded,
) -> Vec<PipelineSettings> {
    for failure in failures {
        error!("pipelines are missing: {failure}");
    }
    pipelines
}

/// Like [`load`], but also creates a runtime in which to run queries.
fn load_with_runtime(
    given: &Given<'_>,
) -> Result<(Vec<PipelineSettings>, tokio::runtime::Runtime), Exit> {
    Ok((load(given)?, runtime()?))
}

/// Creates a command's asynchronous runtime. Logs the error if this fails.
pub(crate) fn runtime() -> Result<tokio::runtime::Runtime, Exit> {
    supervisor::runtime().map_err(|reason| {
        error!("failed to start the asynchronous runtime: {reason}");
        Exit::Failed
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_definition_is_valid() {
        help::command().debug_assert();
    }

    #[test]
    fn debug_output_of_a_command_line_contains_no_password() {
        let flags = [
            "--postgres=host=h user=u password=hunter2",
            "-Xsasl.password=hunter2",
        ];
        for command in [
            ["check"].as_slice(),
            &["run"],
            &["verify"],
            &["checkpoint", "adopt"],
            &["replay"],
            &["skip", "--to", "0/1"],
        ] {
            let words = ["walpost"].iter().chain(command).chain(&flags);
            let cli = Cli::try_parse_from(words).expect("parses");
            assert!(!format!("{cli:?}").contains("hunter2"), "{command:?}");
        }
        let cli = Cli::try_parse_from(["walpost", "init", flags[0]]).expect("parses");
        assert!(!format!("{cli:?}").contains("hunter2"));
    }
}
