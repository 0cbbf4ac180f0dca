//! `walpost checkpoint`: shows or sets the position from which exactly-once delivery resumes.

use clap::{Args, Subcommand};
use tracing::{error, info};

use super::out::{self, say};
use super::{consent, load_with_runtime};
use crate::config::args::{ConnectionArgs, RecordArgs};
use crate::config::{Given, GivenSink};
use crate::delivery::checkpoint::{Checkpoint, Delivered, ServerState};
use crate::kafka::producer::KafkaSink;
use crate::model::dropped_slot::replay_command;
use crate::model::exit::Exit;
use crate::model::lsn::Lsn;
use crate::pipeline::database::open_as_owner;
use crate::pipeline::recovery;
use crate::pipeline::settings::PipelineSettings;
use crate::pipeline::snapshot;
use crate::postgres::catalog::slot_state::{SlotIdentity, describe_move};
use crate::postgres::catalog::{Catalog, CatalogError, Problem, SlotInUse};
use crate::postgres::replication::{Connection, ConnectionError};
use crate::sink::{Sink, SinkError};

/// The subcommands of `walpost checkpoint`.
#[derive(Debug, Subcommand)]
pub(crate) enum CheckpointCommand {
    /// Show the last checkpoint and the slot's position
    Show(ShowArgs),
    /// Set a checkpoint at the slot's position: events before it count as delivered, and events
    /// after it will be delivered. Use this before a first run, or when exactly-once delivery can't
    /// resume from the existing checkpoint
    Adopt(AdoptArgs),
}

/// Flags of `walpost checkpoint show`.
#[derive(Debug, Args)]
pub(crate) struct ShowArgs {
    /// Print the checkpoint as stored in Kafka, one JSON document per pipeline
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connection: ConnectionArgs,
    #[command(flatten)]
    records: RecordArgs,
}

/// Flags of `walpost checkpoint adopt`.
#[derive(Debug, Args)]
pub(crate) struct AdoptArgs {
    /// Don't ask for confirmation
    #[arg(long)]
    yes: bool,
    #[command(flatten)]
    connection: ConnectionArgs,
    #[command(flatten)]
    records: RecordArgs,
}

/// An error that prevents a checkpoint from being shown or set.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Catalog(#[from] CatalogError),
    #[error(transparent)]
    Connection(#[from] ConnectionError),
    #[error(transparent)]
    Problem(#[from] Problem),
    #[error(transparent)]
    SlotInUse(#[from] SlotInUse),
    #[error(transparent)]
    Sink(#[from] SinkError),
    #[error("not confirmed: the text entered was not the pipeline name {0:?}. Nothing was changed")]
    NotConfirmed(String),
}

/// Shows or sets checkpoints.
#[must_use]
pub(crate) fn run(command: CheckpointCommand) -> Exit {
    let (connection, mut records, action) = match command {
        CheckpointCommand::Show(args) => {
            let action = Action::Show { json: args.json };
            (args.connection, args.records, action)
        }
        CheckpointCommand::Adopt(args) => {
            let action = Action::Adopt { yes: args.yes };
            (args.connection, args.records, action)
        }
    };
    // Only exactly-once delivery uses checkpoints.
    records.exactly_once = true;
    let given = Given {
        connection: &connection,
        records: Some(&records),
        sink: GivenSink::ForDelivery(None),
        accepts_single_table: false,
    };
    let (pipelines, runtime) = match load_with_runtime(&given) {
        Ok(loaded) => loaded,
        Err(exit) => return exit,
    };
    let mut exit = Exit::Done;
    for settings in &pipelines {
        let done = runtime.block_on(async {
            match action {
                Action::Show { json } => show_checkpoint(settings, json).await,
                Action::Adopt { yes } => adopt(settings, yes).await,
            }
        });
        let Err(reason) = done else { continue };
        error!(pipeline = settings.name, "{reason}");
        exit = match reason {
            Failure::NotConfirmed(_) => Exit::Usage,
            Failure::Catalog(error) => recovery::catalog_remedy(&error).into(),
            Failure::Connection(error) => recovery::connection_remedy(&error).into(),
            Failure::Problem(problem) => recovery::problem_remedy(&problem).into(),
            // A retry may succeed, because the slot is released when the process that uses it
            // exits.
            Failure::SlotInUse(_) => Exit::Failed,
            Failure::Sink(error) => recovery::sink_remedy(&error).into(),
        };
    }
    runtime.shutdown_background();
    exit
}

#[derive(Clone, Copy)]
enum Action {
    Show { json: bool },
    Adopt { yes: bool },
}

async fn show_checkpoint(settings: &PipelineSettings, json: bool) -> Result<(), Failure> {
    let found = match settings.checkpoints() {
        Some(checkpoints) => checkpoints.read_last().await?,
        None => None,
    };
    let name = &settings.name;
    if json {
        let text = found.as_ref().map(Checkpoint::encode);
        let text = text.unwrap_or_else(|| b"null".to_vec());
        out::json_text(&String::from_utf8_lossy(&text));
        return Ok(());
    }
    match found {
        None => say!("{name}: no checkpoint"),
        Some(checkpoint) => say!("{name}: {}", describe(&checkpoint)),
    }
    let (server, _) = query_server(settings).await?;
    say!(
        "{name}: slot {} confirmed up to {}; cluster {}, timeline {}",
        server.slot,
        server.confirmed,
        server.system_id,
        server.timeline
    );
    Ok(())
}

pub(super) fn describe(checkpoint: &Checkpoint) -> String {
    let delivered = match &checkpoint.delivered {
        None => "no events delivered since the checkpoint was set".to_owned(),
        Some(Delivered::UpTo(last)) => format!(
            "last event {} at {}",
            last.event_id.as_deref().unwrap_or("without ID"),
            last.position()
        ),
        Some(Delivered::Before(lsn)) => {
            format!("transactions committed before {lsn} were delivered")
        }
    };
    let copied = match &checkpoint.snapshot {
        Some(copied) if !copied.is_complete() => {
            format!(
                "; the snapshot has copied {} older rows so far",
                copied.rows
            )
        }
        _ => String::new(),
    };
    format!(
        "epoch {}, covers events up to {}, {delivered}{copied}; slot {}, cluster {}, timeline {}",
        checkpoint.epoch,
        checkpoint.safe_lsn,
        checkpoint.slot,
        checkpoint.system_id,
        checkpoint.timeline
    )
}

/// Queries the state of the server and slot, and the PID of the process that is using the slot.
async fn query_server(settings: &PipelineSettings) -> Result<(ServerState, Option<i32>), Failure> {
    let target = &settings.target;
    let catalog = open_as_owner(settings).await?;
    let slot = catalog.observe(target).await?.slot;
    let slot = slot.ok_or_else(|| Problem::NoSlot {
        slot: target.slot.clone(),
        init: target.init_slot(),
    })?;
    let (limit, row_bytes) = (settings.link_timeout, settings.row_bytes_max);
    let mut connection = Connection::open(&settings.postgres, limit, row_bytes).await?;
    let identity = connection.identify().await?;
    let server = ServerState {
        system_id: identity.system_id,
        timeline: identity.timeline,
        history: Vec::new(),
        slot: target.slot.clone(),
        confirmed: slot.confirmed,
        flushed: identity.flushed,
    };
    Ok((server, slot.active_pid))
}

async fn adopt(settings: &PipelineSettings, yes: bool) -> Result<(), Failure> {
    let name = &settings.name;
    let (server, active) = query_server(settings).await?;
    if let Some(pid) = active {
        let slot = server.slot;
        return Err(SlotInUse { slot, pid }.into());
    }
    let Some(producer) = settings.producer() else {
        return Ok(());
    };
    let mut sink = KafkaSink::for_checkpoint(&producer)?;
    let found = match sink.take_over().await {
        Ok(found) => found,
        Err(error @ SinkError::Checkpoint { .. }) => {
            say!("{name}: {error}");
            None
        }
        Err(error) => return Err(error.into()),
    };
    match &found {
        None => say!("{name}: no checkpoint"),
        Some(found) => say!("{name}: {}", describe(found)),
    }
    say!(
        "{name}: new checkpoint: events up to {}, the position of slot {}, will count as delivered; cluster {}, timeline {}",
        server.confirmed,
        server.slot,
        server.system_id,
        server.timeline
    );
    let catalog = open_as_owner(settings).await?;
    let observed = catalog.observe(&settings.target).await?;
    match snapshot::predict_snapshot(settings, &catalog, &observed).await {
        Ok(Some(older)) => say!("{name}: {older}"),
        Ok(None) => {}
        // Only print the error; when the pipeline starts, it will halt with the same error.
        Err(error) => say!("{name}: {error}"),
    }
    let slot = catalog.slot_identity(name, &settings.target).await?;
    print_gaps(settings, &catalog, &slot, server.confirmed).await?;
    if !yes && !consent::is_given(name).await {
        return Err(Failure::NotConfirmed(name.clone()));
    }
    // Record now which events may be missing, because this is determined from the recorded state of
    // the previous slot. When the pipeline starts with this checkpoint, it overwrites that state.
    catalog
        .record_gap_of_other_history(&slot, server.confirmed, settings.first_start())
        .await?;
    let epoch = found.map_or(1, |found| found.next_epoch());
    let mut checkpoint = Checkpoint::first(epoch, &server);
    sink.commit(&mut checkpoint).await?;
    info!(pipeline = name, epoch, safe = %checkpoint.safe_lsn, "checkpoint set");
    Ok(())
}

/// Prints which events may be missing from Kafka because no slot delivered them, and the command
/// that resends them.
async fn print_gaps(
    settings: &PipelineSettings,
    catalog: &Catalog,
    slot: &SlotIdentity,
    confirmed: Lsn,
) -> Result<(), Failure> {
    let name = &settings.name;
    if let Some(moved) = catalog.moved(slot, confirmed).await? {
        let moved = describe_move(&settings.target, moved.confirmed, moved.found);
        say!("{name}: {moved}");
    }
    let gap = catalog.gap_of_other_history(slot, confirmed, settings.first_start());
    if let Some(gap) = gap.await? {
        let resend = match settings.target.outbox.is_messages() {
            true => settings.target.resend(),
            false => {
                let replay = replay_command(&settings.target.commands, None);
                format!("After the checkpoint is set, send the missing events again: {replay}")
            }
        };
        say!("{name}: {}. {resend}", gap.describe(confirmed));
    }
    let open = match catalog.dropped_slots(name, &settings.target).await {
        Err(CatalogError::NoJournal { .. }) => Vec::new(),
        open => open?,
    };
    for entry in open {
        let resend = match settings.target.outbox.is_messages() {
            true => settings.target.resend(),
            false => format!(
                "Send the missing events again: {}",
                entry.replay(&settings.target.commands)
            ),
        };
        say!("{name}: {} may be missing. {resend}", entry.describe());
    }
    Ok(())
}
