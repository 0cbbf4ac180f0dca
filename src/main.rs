//! The binary: parses the command line and ends with its exit code.

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    ExitCode::from(walpost::cli::run(walpost::cli::Cli::parse()).code())
}
