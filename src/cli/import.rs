//! `walpost import`: converts the configuration of another tool to walpost.toml.

use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use tracing::error;

use super::out;
use crate::file_error;
use crate::import::report::{Finding, Group};
use crate::import::{self, Imported};
use crate::model::exit::Exit;

/// The subcommands of `walpost import`, one for each supported tool.
#[derive(Debug, Subcommand)]
pub(crate) enum ImportCommand {
    /// Convert the configuration of Debezium's PostgreSQL connector with the outbox event router,
    /// for Kafka Connect or Debezium Server
    ///
    /// Prints a walpost.toml that ends with the commands for the switch-over. A report on each
    /// property is printed to standard error. The exit code is 3 if the report contains items that
    /// you must handle yourself.
    Debezium(DebeziumArgs),
}

/// Flags of `walpost import debezium`.
#[derive(Debug, Args)]
pub(crate) struct DebeziumArgs {
    /// The connector's JSON file, or Debezium Server's application.properties; - for standard input
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// The properties file of the Kafka Connect worker, for converters and brokers that the
    /// connector does not configure
    #[arg(long, value_name = "FILE")]
    worker: Option<PathBuf>,
    /// Write walpost.toml to this file instead of standard output. An existing file is not
    /// overwritten
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Maximum size of a configuration file to import.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// Imports the configuration and prints the result.
#[must_use]
pub(crate) fn run(command: &ImportCommand) -> Exit {
    let ImportCommand::Debezium(args) = command;
    match imported(args) {
        Ok(imported) => {
            print_findings(&imported.findings);
            match imported.findings.iter().any(|finding| finding.needs_action) {
                true => Exit::Halted,
                false => Exit::Done,
            }
        }
        Err(reason) => {
            error!("{reason}");
            Exit::Usage
        }
    }
}

fn imported(args: &DebeziumArgs) -> Result<Imported, String> {
    let worker = args.worker.as_deref().map(read).transpose()?;
    let given = read(&args.file)?;
    let imported = import::debezium(&given, worker.as_deref())
        .map_err(|reason| format!("{} can't be imported: {reason}", args.file.display()))?;
    match &args.output {
        Some(path) => write(path, &imported.toml)?,
        // No further escaping is needed: strings are quoted as TOML, and comments are already
        // escaped.
        None => out::script(&imported.toml),
    }
    Ok(imported)
}

fn read(path: &Path) -> Result<String, String> {
    let opened: Result<Box<dyn Read>, _> = match path == Path::new("-") {
        true => Ok(Box::new(io::stdin())),
        #[expect(
            clippy::disallowed_methods,
            reason = "import only converts the file, and never runs a program that the file names"
        )]
        false => fs::File::open(path).map(|file| Box::new(file) as Box<dyn Read>),
    };
    let mut bytes = Vec::new();
    let read = opened.and_then(|file| file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes));
    read.map_err(|error| format!("failed to read {}: {error}", path.display()))?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(format!(
            "{} is larger than {FILE_BYTES_MAX} bytes; expected the configuration of one connector",
            path.display()
        ));
    }
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        format!(
            "{}: byte {at} is not valid UTF-8; save the file in UTF-8",
            path.display()
        )
    })
}

/// Writes a new file. Never overwrites an existing file.
fn write(path: &Path, toml: &str) -> Result<(), String> {
    #[expect(
        clippy::disallowed_methods,
        reason = "`create_new` never opens an existing file, and `run` checks the file before using it"
    )]
    let file = OpenOptions::new().write(true).create_new(true).open(path);
    let written = file.and_then(|mut file| file.write_all(toml.as_bytes()));
    written.map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => format!(
            "--output {}: the file already exists and will not be overwritten. Choose another file, or remove this one",
            path.display()
        ),
        _ => file_error::explained(&format!("--output {}", path.display()), &error).to_string(),
    })
}

/// Prints the findings to standard error, so that standard output contains only the converted
/// configuration.
fn print_findings(findings: &[Finding]) {
    for group in Group::ALL {
        let mut in_group = findings
            .iter()
            .filter(|finding| finding.group == group)
            .peekable();
        if in_group.peek().is_none() {
            continue;
        }
        out::aside(group.heading());
        for Finding {
            property,
            message,
            needs_action,
            ..
        } in in_group
        {
            let mark = if *needs_action { "TO DO  " } else { "       " };
            out::aside(&format!("  {mark}{property}: {message}"));
        }
    }
    let to_do = findings
        .iter()
        .filter(|finding| finding.needs_action)
        .count();
    out::aside(&match to_do {
        0 => "No items require action. The file ends with the commands for the switch-over".to_owned(),
        1 => "1 item marked TO DO requires action before the switch-over. The file ends with the commands for the switch-over".to_owned(),
        to_do => format!(
            "{to_do} items marked TO DO require action before the switch-over. The file ends with the commands for the switch-over"
        ),
    });
}

#[cfg(test)]
mod tests;
