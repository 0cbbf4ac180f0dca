//! Logs: to standard error, human-readable or JSON.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

use super::progress::BesideBars;

/// How log lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// For people, coloured on a terminal.
    #[default]
    Auto,
    /// For people, never coloured.
    Text,
    /// One JSON object a line.
    Json,
}

/// Starts logging for the whole program. `filter` is a level or a filter of the crate `tracing`.
///
/// # Errors
/// The filter can't be read.
pub fn start(format: LogFormat, filter: &str) -> Result<(), String> {
    let filter = EnvFilter::try_new(filter).map_err(|error| {
        format!("--log-level {filter:?}: {error}; expected error, warn, info, debug or trace")
    })?;
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(|| BesideBars)
        .with_target(false);
    match format {
        LogFormat::Json => builder.json().flatten_event(true).init(),
        LogFormat::Text => builder.with_ansi(false).init(),
        LogFormat::Auto => builder.with_ansi(std::io::stderr().is_terminal()).init(),
    }
    Ok(())
}
