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
    /// Debezium's connector for PostgreSQL with the outbox event router, of Kafka Connect or
    /// Debezium Server
    ///
    /// Prints a walpost.toml, with the commands for the switch-over at its end. What became of each
    /// property is on standard error; exit code 3 if something of it needs a person.
    Debezium(DebeziumArgs),
}

/// Flags of `walpost import debezium`.
#[derive(Debug, Args)]
pub(crate) struct DebeziumArgs {
    /// The connector's JSON, or Debezium Server's application.properties; - is standard input
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// The properties of the Kafka Connect worker, for converters and brokers that the connector
    /// leaves to it
    #[arg(long, value_name = "FILE")]
    worker: Option<PathBuf>,
    /// Write walpost.toml there instead of to standard output. A file that is there already is left
    /// as it is
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// A larger file can't be a configuration.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// Imports the configuration and prints the result.
#[must_use]
pub(crate) fn run(command: &ImportCommand) -> Exit {
    let ImportCommand::Debezium(args) = command;
    match imported(args) {
        Ok(imported) => {
            print_findings(&imported.findings);
            match imported.findings.iter().any(|finding| finding.needs_person) {
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
        // Strings are quoted for TOML, and comments were escaped.
        None => out::script(&imported.toml),
    }
    Ok(imported)
}

fn read(path: &Path) -> Result<String, String> {
    let opened: Result<Box<dyn Read>, _> = match path == Path::new("-") {
        true => Ok(Box::new(io::stdin())),
        #[expect(
            clippy::disallowed_methods,
            reason = "it is converted for a person to read, and not used"
        )]
        false => fs::File::open(path).map(|file| Box::new(file) as Box<dyn Read>),
    };
    let mut bytes = Vec::new();
    let taken = opened.and_then(|file| file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes));
    taken.map_err(|error| format!("{} can't be read: {error}", path.display()))?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(format!(
            "{} has more than {FILE_BYTES_MAX} bytes; expected the configuration of one connector",
            path.display()
        ));
    }
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        format!(
            "{}: byte {at} is not UTF-8; save the file in UTF-8",
            path.display()
        )
    })
}

/// Writes a new file, and never overwrites an existing one.
fn write(path: &Path, toml: &str) -> Result<(), String> {
    let file = OpenOptions::new().write(true).create_new(true).open(path);
    let written = file.and_then(|mut file| file.write_all(toml.as_bytes()));
    written.map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => format!(
            "--output {}: the file exists already, and none is overwritten. Name another, or remove it",
            path.display()
        ),
        _ => file_error::explained(&format!("--output {}", path.display()), &error).to_string(),
    })
}

/// Prints the findings for the user who migrates.
fn print_findings(findings: &[Finding]) {
    for group in Group::ALL {
        let mut of_group = findings
            .iter()
            .filter(|finding| finding.group == group)
            .peekable();
        if of_group.peek().is_none() {
            continue;
        }
        out::aside(group.heading());
        for Finding {
            property,
            says,
            needs_person,
            ..
        } in of_group
        {
            let mark = if *needs_person { "TO DO  " } else { "       " };
            out::aside(&format!("  {mark}{property}: {says}"));
        }
    }
    let to_do = findings
        .iter()
        .filter(|finding| finding.needs_person)
        .count();
    out::aside(&match to_do {
        0 => "Nothing of it needs a person. The commands for the switch-over are at the end of the file".to_owned(),
        to_do => format!("{to_do} marked TO DO need a person before the switch-over, whose commands are at the end of the file"),
    });
}

#[cfg(test)]
mod tests;
