//! `walpost skip`: shows what [`skip`](crate::skip) would skip, asks for confirmation, and runs it.

use clap::Args;
use tracing::error;

use super::out::say;
use super::{consent, load_to_ask};
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
    /// Skip what is committed before this LSN; or the transaction of this position, and what is
    /// before it
    #[arg(long, value_name = "LSN|POSITION")]
    to: SkipTarget,
    /// Show what would be skipped, and change nothing
    #[arg(long)]
    dry_run: bool,
    /// Don't ask
    #[arg(long)]
    yes: bool,
    #[command(flatten)]
    connection: ConnectionArgs,
    #[command(flatten)]
    records: RecordArgs,
}

/// The reason why nothing was skipped.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Skip(#[from] SkipError),
    #[error("the answer was not the name of pipeline {0:?}: nothing was changed")]
    NotAsked(String),
}

/// Moves the slot of one pipeline.
#[must_use]
pub(crate) fn run(args: &SkipArgs) -> Exit {
    let given = Given {
        connection: &args.connection,
        records: Some(&args.records),
        sink: GivenSink::ForDelivery(None),
        accepts_single_table: false,
    };
    let (pipelines, runtime) = match load_to_ask(&given) {
        Ok(loaded) => loaded,
        Err(exit) => return exit,
    };
    let [settings] = &pipelines[..] else {
        error!("each pipeline has its own slot: choose one with --pipeline");
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
        SkipError::Copying { .. } => Exit::Halted,
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
        return Err(Failure::NotAsked(name.clone()));
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
            "{name}: slot {} is at {to}, and Walpost has confirmed it up to {confirmed}: what was committed between is \
             left out where it was not delivered, and nobody can say what that is",
            settings.target.slot
        );
        return;
    }
    say!(
        "{name}: slot {} is at {confirmed}, to be moved to {to}: {} would never be delivered",
        settings.target.slot,
        counted(found.events - found.dealt_with, "event"),
    );
    if found.dealt_with > 0 {
        say!(
            "{name}: {} more were dealt with before, as the checkpoint says",
            found.dealt_with
        );
    }
    for (topic, count) in &found.topics {
        match topic.as_str() {
            "" => say!("{name}:   {count} for further topics"),
            topic => say!("{name}:   {count} for topic {topic}"),
        }
    }
    if found.unroutable > 0 {
        say!("{name}:   {} that can't become a record", found.unroutable);
    }
    for event in &found.first {
        say!("{name}:   {event}");
    }
    let shown = found.first.len() as u64;
    if found.events > shown {
        say!("{name}:   and {} more", found.events - shown);
    }
    if let Some((_, checkpoint)) = checkpoint {
        say!(
            "{name}: the checkpoint moves with it: {}",
            super::checkpoint::describe(checkpoint)
        );
    }
    match &settings.target.outbox {
        Outbox::Tables(tables) => {
            say!("{name}: the rows stay in their tables, {tables}, where replay --table finds them")
        }
        Outbox::Table(table) | Outbox::OneOf { table, .. } => {
            say!("{name}: the rows stay in table {table}, where walpost replay finds them")
        }
        Outbox::Messages { .. } => say!("{name}: there is no table that keeps them"),
    }
}

fn counted(count: u64, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}
