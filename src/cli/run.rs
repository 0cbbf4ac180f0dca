//! `walpost run`

use std::time::Duration;

use clap::Args;

use super::args::{ConnectionArgs, RecordArgs};
use super::{Exit, init, load};
use crate::config::Given;
use crate::config::file::SinkName;
use crate::postgres::provision::Provision;
use crate::supervisor;

/// How long `--init` waits for a lock.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);

/// Flags of `walpost run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    #[command(flatten)]
    connection: ConnectionArgs,
    #[command(flatten)]
    records: RecordArgs,
    /// Where records go [default: kafka]
    #[arg(long, env = "WALPOST_SINK", value_enum)]
    sink: Option<SinkName>,
    /// First make what is missing of table or functions, publication and slot
    #[arg(long)]
    init: bool,
}

/// Runs the pipelines until they are told to stop or can't go on.
#[must_use]
pub fn run(args: &RunArgs) -> Exit {
    let given = Given {
        connection: &args.connection,
        records: Some(&args.records),
        sink: args.sink,
    };
    let pipelines = match load(&given) {
        Ok(pipelines) => pipelines,
        Err(exit) => return exit,
    };
    if args.init {
        for settings in &pipelines {
            let provision = Provision {
                target: settings.target.clone(),
                partitioned: false,
                // It runs as its own role already.
                role: None,
                lock_timeout: LOCK_TIMEOUT,
            };
            if let Err(exit) = init::apply(settings, &provision) {
                return exit;
            }
        }
    }
    supervisor::run(pipelines)
}
