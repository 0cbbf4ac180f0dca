//! The binary: parses the command line and ends with its exit code.

use std::process::ExitCode;

use clap::Parser;

/// Also for librdkafka, whose `malloc` this replaces when the binary is linked. It allocates each
/// record on one thread and frees it on another, which the system's allocator is slow at.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    ExitCode::from(walpost::cli::run(walpost::cli::Cli::parse()).code())
}
