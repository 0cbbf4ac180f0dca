//! `walpost maintain`: creates partitions in advance, and drops partitions that are older than the
//! retention period.

use clap::Args;
use tracing::{error, warn};

use super::load_with_runtime;
use super::out::say;
use crate::config::args::{ConnectionArgs, RecordArgs, RetentionArgs};
use crate::config::file::SinkName;
use crate::config::{Given, GivenSink};
use crate::model::exit::Exit;
use crate::pipeline::database::open_as_owner;
use crate::pipeline::recovery::{self, Remedy};
use crate::pipeline::settings::PipelineSettings;
use crate::postgres::catalog::CatalogError;
use crate::retention;
use crate::retention::{RetentionError, RetentionReport};

/// Flags of `walpost maintain`.
#[derive(Debug, Args)]
pub(crate) struct MaintainArgs {
    /// Show the changes that would be made, without making them
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    retention: RetentionArgs,
    #[command(flatten)]
    connection: ConnectionArgs,
}

/// Runs one maintenance pass for each pipeline.
#[must_use]
pub(crate) fn run(args: &MaintainArgs) -> Exit {
    let records = RecordArgs {
        retention: args.retention.clone(),
        ..RecordArgs::default()
    };
    let given = Given {
        connection: &args.connection,
        records: Some(&records),
        sink: GivenSink::Instead(SinkName::Stdout),
        accepts_single_table: true,
    };
    let (pipelines, runtime) = match load_with_runtime(&given) {
        Ok(loaded) => loaded,
        Err(exit) => return exit,
    };
    let mut exit = Exit::Done;
    for settings in &pipelines {
        let ended = match runtime.block_on(pass(settings, args.dry_run)) {
            Ok(report) => print_report(settings, &report),
            Err(reason) => {
                error!(pipeline = settings.name, "{reason}");
                recovery::catalog_remedy(&reason).into()
            }
        };
        exit = exit.and(ended);
    }
    exit
}

async fn pass(settings: &PipelineSettings, dry_run: bool) -> Result<RetentionReport, CatalogError> {
    // The slot's position determines which rows count as delivered, so check that the slot
    // belongs to the pipeline.
    let catalog = open_as_owner(settings).await?;
    retention::pass(&catalog, settings, dry_run).await
}

/// Prints the changes that a maintenance pass made.
fn print_report(settings: &PipelineSettings, report: &RetentionReport) -> Exit {
    let name = &settings.name;
    let target = &settings.target;
    if report.tables == 0 && !target.outbox.is_messages() {
        let (outbox, publication) = (&target.outbox, &target.publication);
        say!(
            "{name}: publication {publication:?} does not contain any of the outbox's tables yet ({outbox})"
        );
    }
    for done in &report.done {
        say!("{name}: {done}");
    }
    for wait in &report.waits {
        say!("{name}: {wait}");
    }
    if target.outbox.is_messages() {
        say!("{name}: an outbox that uses logical decoding messages has no partitions");
    } else if settings.retention.keep.is_none() {
        say!(
            "{name}: nothing is removed: set --retention, or retention in walpost.toml, to remove delivered rows"
        );
    }
    let mut exit = Exit::Done;
    for problem in &report.problems {
        if is_temporary(problem) {
            warn!(pipeline = name, "{problem}");
            exit = if exit == Exit::Done {
                Exit::Failed
            } else {
                exit
            };
        } else {
            error!(pipeline = name, "{problem}");
            exit = Exit::Halted;
        }
    }
    exit
}

/// Returns whether the error is temporary, in which case another attempt may succeed.
fn is_temporary(error: &RetentionError) -> bool {
    match error {
        RetentionError::Busy { .. } | RetentionError::Claimed(_) => true,
        RetentionError::Catalog(error) => recovery::catalog_remedy(error) != Remedy::Halt,
        _ => false,
    }
}
