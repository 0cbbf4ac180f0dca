//! `walpost skip`: shows the events to skip, asks for confirmation, and skips them. See
//! [`skip`](crate::skip) for the implementation.

use clap::Args;
use tracing::error;

use super::out::say;
use super::{consent, load_with_runtime};
use crate::config::args::{ConnectionArgs, RecordArgs};
use crate::config::{Given, GivenSink};
use crate::model::exit::Exit;
use crate::pipeline::recovery;
use crate::pipeline::settings::PipelineSettings;
use crate::postgres::target::Outbox;
use crate::skip::{Skip, SkipError, SkipPlan, SkipTarget};

/// Flags of `walpost skip`.
#[derive(Debug, Args)]
pub(crate) struct SkipArgs {
    /// Skip events committed before this LSN; or the transaction at this position, and the events
    /// before that transaction
    #[arg(long, value_name = "LSN|POSITION")]
    to: SkipTarget,
    /// Show which events would be skipped, without skipping them
    #[arg(long)]
    dry_run: bool,
    /// Don't ask for confirmation
    #[arg(long)]
    yes: bool,
    #[command(flatten)]
    connection: ConnectionArgs,
    #[command(flatten)]
    records: RecordArgs,
}

/// An error that kept events from being skipped.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Skip(#[from] SkipError),
    #[error("not confirmed: the text entered was not the pipeline name {0:?}. Nothing was changed")]
    NotConfirmed(String),
}

/// Shows which events would be skipped and, once confirmed, advances one pipeline's slot past them.
#[must_use]
pub(crate) fn run(args: &SkipArgs) -> Exit {
    let given = Given {
        connection: &args.connection,
        records: Some(&args.records),
        sink: GivenSink::ForDelivery(None),
        accepts_single_table: false,
    };
    let (pipelines, runtime) = match load_with_runtime(&given) {
        Ok(loaded) => loaded,
        Err(exit) => return exit,
    };
    let [settings] = &pipelines[..] else {
        error!(
            "several pipelines are configured, each with its own slot. Select one with --pipeline"
        );
        return Exit::Usage;
    };
    let done = runtime.block_on(skip(settings, args));
    runtime.shutdown_background();
    let Err(reason) = done else { return Exit::Done };
    error!(pipeline = settings.name, "{reason}");
    let Failure::Skip(reason) = reason else {
        return Exit::Usage;
    };
    match reason {
        SkipError::Behind { .. } | SkipError::Beyond { .. } => Exit::Usage,
        SkipError::NoSuchRow { .. } => Exit::Usage,
        SkipError::Copying { .. } | SkipError::UnsendableRow { .. } => Exit::Halted,
        SkipError::Active { .. } | SkipError::Moved { .. } => Exit::Failed,
        SkipError::Catalog(error) => recovery::catalog_remedy(&error).into(),
        SkipError::Connection(error) => recovery::connection_remedy(&error).into(),
        SkipError::Problem(problem) => recovery::problem_remedy(&problem).into(),
        SkipError::Mapping(_) => Exit::Halted,
        SkipError::ExactlyOnce(error) => recovery::exactly_once_remedy(&error).into(),
        SkipError::Sink(error) => recovery::sink_remedy(&error).into(),
    }
}

async fn skip(settings: &PipelineSettings, args: &SkipArgs) -> Result<(), Failure> {
    let name = &settings.name;
    let skip = Skip::to(settings, args.to).await?;
    print_plan(settings, &skip.plan);
    if args.dry_run {
        say!("{name}: nothing was changed");
        return Ok(());
    }
    if !args.yes && !consent::is_given(name).await {
        return Err(Failure::NotConfirmed(name.clone()));
    }
    Ok(skip.run().await?)
}

fn print_plan(settings: &PipelineSettings, plan: &SkipPlan) {
    let name = &settings.name;
    let SkipPlan {
        confirmed,
        to,
        found,
        checkpoint,
        is_moved,
        ..
    } = plan;
    if *is_moved {
        say!(
            "{name}: slot {} is at {to}, but Walpost confirmed it only up to {confirmed}: undelivered events committed \
             between these positions will be skipped, and Walpost can't list them",
            settings.target.slot
        );
        return;
    }
    say!(
        "{name}: slot {} is at {confirmed} and would be moved to {to}: {} would never be delivered",
        settings.target.slot,
        counted(found.events - found.dealt_with, "event"),
    );
    if found.dealt_with > 0 {
        say!(
            "{name}: according to the checkpoint, {} more events were already delivered or skipped",
            found.dealt_with
        );
    }
    for (topic, count) in &found.topics {
        match topic.as_str() {
            "" => say!("{name}:   {count} for other topics"),
            topic => say!("{name}:   {count} for topic {topic}"),
        }
    }
    if found.unroutable > 0 {
        say!(
            "{name}:   events that can't be converted to a record: {}",
            found.unroutable
        );
    }
    for event in &found.first {
        say!("{name}:   {event}");
    }
    let shown = found.first.len() as u64;
    if found.events > shown {
        say!("{name}:   and {} more", found.events - shown);
    }
    if let Some(at) = found.unsendable {
        say!(
            "{name}: PostgreSQL can't send the row at {at}, so any later events in the transaction are not listed"
        );
    }
    if let Some((_, checkpoint)) = checkpoint {
        say!(
            "{name}: the checkpoint would be moved too: {}",
            super::checkpoint::describe(checkpoint)
        );
    }
    match &settings.target.outbox {
        Outbox::Tables(tables) => {
            say!(
                "{name}: the rows remain in their tables ({tables}), and replay --table can send them"
            )
        }
        Outbox::Table(table) | Outbox::OneOf { table, .. } => {
            say!("{name}: the rows remain in table {table}, and walpost replay can send them")
        }
        Outbox::Messages { .. } => say!("{name}: no table contains the skipped events"),
    }
}

fn counted(count: u64, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}
