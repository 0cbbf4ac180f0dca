//! `walpost replay`: sends rows of the outbox table again.

use clap::Args;
use jiff::Timestamp;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tracing::{error, info};
use uuid::Uuid;

use super::out::say;
use super::{consent, load_to_ask};
use crate::config::args::{ConnectionArgs, RecordArgs};
use crate::config::file::SinkName;
use crate::config::values;
use crate::config::{Given, GivenSink};
use crate::delivery::watermark::Watermark;
use crate::kafka::producer::KafkaSink;
use crate::model::commands::Commands;
use crate::model::exit::Exit;
use crate::model::lsn::Lsn;
use crate::model::window::Window;
use crate::observe::logging;
use crate::outbox::headers::REPLAY_HEADER;
use crate::pipeline::recovery;
use crate::pipeline::settings::{PipelineSettings, SinkSettings};
use crate::postgres::catalog::copy::CopyError;
use crate::postgres::table::TableName;
use crate::progress::Progress;
use crate::replay::already_delivered::OpenEntries;
use crate::replay::selection::{Aggregate, Bound, Selection};
use crate::replay::{HandOver, ReplayEnd, ReplayError, ReplayPlan};
use crate::sink::Sink;
use crate::sink::stdout::StdoutSink;

/// Flags of `walpost replay`.
#[derive(Debug, Args)]
pub(crate) struct ReplayArgs {
    /// Rows from here: a time, like 2025-11-01T03:00:00Z or 1h (one hour ago), compared with
    /// created_at; an id; or the walpost-position of a record
    #[arg(long, value_name = "TIME|ID|POSITION", value_parser = parse_bound)]
    from: Option<Bound>,
    /// Rows up to and including this time, id or position
    #[arg(long, value_name = "TIME|ID|POSITION", value_parser = parse_bound)]
    to: Option<Bound>,
    /// Rows that meet a condition in SQL. Functions in it run with the rights of the connection's
    /// role, and could drop a slot: it is refused for a superuser
    #[arg(long = "where", value_name = "SQL")]
    condition: Option<String>,
    /// Rows of this aggregate type, or of one aggregate; repeated, of any of them
    #[arg(long, value_name = "TYPE[/ID]")]
    aggregate: Vec<Aggregate>,
    /// The row with this id; repeated, each of them
    #[arg(long, value_name = "ID")]
    id: Vec<String>,
    /// Every row of the table
    #[arg(long, conflicts_with_all = ["from", "to", "condition", "aggregate", "id", "dropped_slots", "set_aside", "resume"])]
    all: bool,
    /// Rows that may be missing in Kafka after slots were dropped; when all are sent, the slots are
    /// no longer reported
    #[arg(long, conflicts_with_all = ["from", "to", "condition", "aggregate", "id"])]
    dropped_slots: bool,
    /// With --dropped-slots: send nothing, and record that all these events were delivered, as
    /// after a planned move for which the pipeline was drained. Without --table, of every table of
    /// the pipeline
    #[arg(long, requires = "dropped_slots", conflicts_with_all = ["rate", "resume"])]
    already_delivered: bool,
    /// Rows of a table that is set aside; when all are sent, the stream delivers the table again
    #[arg(long, conflicts_with_all = ["from", "to", "condition", "aggregate", "id", "dropped_slots"])]
    set_aside: bool,
    /// Count the rows, and send none
    #[arg(long)]
    dry_run: bool,
    /// Send at most this many rows a second
    #[arg(long, value_name = "N/s", value_parser = rate)]
    rate: Option<u32>,
    /// Where records go: kafka, or stdout [default: kafka]
    #[arg(long, env = "WALPOST_SINK", value_enum, hide_possible_values = true)]
    sink: Option<SinkName>,
    /// Resume an interrupted replay. Its --where and --topic have to be given again: what the
    /// journal has of them is compared, and never run
    #[arg(
        long,
        value_name = "RUN-ID",
        value_parser = run_id,
        conflicts_with_all = ["from", "to", "aggregate", "id", "dropped_slots", "set_aside"]
    )]
    resume: Option<Uuid>,
    /// Don't ask
    #[arg(long)]
    yes: bool,
    #[command(flatten)]
    connection: ConnectionArgs,
    #[command(flatten)]
    records: RecordArgs,
}

/// The reason why no rows were sent, or not all of them.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Replay(#[from] ReplayError),
    #[error("{reason}. To resume it: {command}")]
    CutShort {
        reason: ReplayError,
        command: String,
    },
    #[error(
        "the table stays set aside: {0}. Run the same command again; it sends these rows alone. If rows arrive too fast for \
         that, stop the pipeline meanwhile"
    )]
    StillSetAside(String),
    #[error("signals can't be received: {0}")]
    Signals(std::io::Error),
    #[error("the answer was not the name of pipeline {0:?}: nothing was sent")]
    NotAsked(String),
    #[error(
        "no rows of table {0} are selected. Select some (--from, --to, --aggregate, --id, --where, \
         --dropped-slots), or say --all for every row of it"
    )]
    NoSelection(TableName),
    #[error(
        "replay {run} was begun by role {by_role} at {at}, and this session has another: with --yes nobody would see what it \
         sends. Leave --yes out, look, and agree"
    )]
    OfAnother {
        run: Uuid,
        by_role: String,
        at: String,
    },
}

impl Failure {
    /// Adds the options of this process to the command that the error suggests.
    fn with_commands(self, commands: &Commands) -> Self {
        match self {
            Self::Replay(reason) => Self::Replay(reason.with_commands(commands)),
            Self::CutShort { reason, command } => Self::CutShort {
                reason: reason.with_commands(commands),
                command,
            },
            other => other,
        }
    }
}

/// Sends rows of one pipeline's table again.
#[must_use]
pub(crate) fn run(args: &ReplayArgs) -> Exit {
    let given = Given {
        connection: &args.connection,
        records: Some(&args.records),
        sink: args
            .sink
            .map_or(GivenSink::ForDelivery(None), GivenSink::Instead),
        accepts_single_table: true,
    };
    let (pipelines, runtime) = match load_to_ask(&given) {
        Ok(loaded) => loaded,
        Err(exit) => return exit,
    };
    let [settings] = &pipelines[..] else {
        error!("each pipeline has its own table: choose one with --pipeline");
        return Exit::Usage;
    };
    let done = runtime.block_on(async {
        match args.already_delivered {
            true => settle(settings, args).await,
            false => replay(settings, args).await,
        }
    });
    runtime.shutdown_background();
    match done {
        Ok(ReplayEnd::Complete) => Exit::Done,
        Ok(ReplayEnd::Stopped) => Exit::Failed,
        Err(reason) => {
            let reason = reason.with_commands(&settings.target.commands);
            error!(pipeline = settings.name, "{reason}");
            match reason {
                Failure::NotAsked(_) | Failure::NoSelection(_) | Failure::OfAnother { .. } => {
                    Exit::Usage
                }
                Failure::Signals(_) | Failure::StillSetAside(_) => Exit::Failed,
                Failure::Replay(reason) | Failure::CutShort { reason, .. } => exit(&reason),
            }
        }
    }
}

fn exit(reason: &ReplayError) -> Exit {
    match reason {
        ReplayError::NoTable(_)
        | ReplayError::Several(_)
        | ReplayError::NoKey(_)
        | ReplayError::NoColumn { .. }
        | ReplayError::NoRow { .. }
        | ReplayError::NoBound { .. }
        | ReplayError::NoRecord { .. }
        | ReplayError::Wrong { .. }
        | ReplayError::NoRun { .. }
        | ReplayError::NoDroppedSlots { .. }
        | ReplayError::NotSetAside { .. }
        | ReplayError::Complete(_)
        | ReplayError::Closed(_)
        | ReplayError::Mighty { .. }
        | ReplayError::Parameters
        | ReplayError::OtherCondition { .. }
        | ReplayError::OtherTopic { .. }
        | ReplayError::OtherKey { .. } => Exit::Usage,
        ReplayError::Running { .. }
        | ReplayError::EntriesLocked { .. }
        | ReplayError::NotDropped { .. }
        | ReplayError::Open
        | ReplayError::Order(_) => Exit::Failed,
        ReplayError::Entry { .. }
        | ReplayError::Detached { .. }
        | ReplayError::TableGone { .. }
        | ReplayError::Problem(_)
        | ReplayError::Mapping(_)
        | ReplayError::Route { .. }
        | ReplayError::Copy(CopyError::Text(_) | CopyError::RowTooLarge { .. }) => Exit::Halted,
        ReplayError::Catalog(error) | ReplayError::Copy(CopyError::Catalog(error)) => {
            recovery::catalog_remedy(error).into()
        }
        ReplayError::Sink(error) | ReplayError::Produce { error, .. } => {
            recovery::sink_remedy(error).into()
        }
        ReplayError::DeadLetter { error, .. } => recovery::sink_remedy(error).into(),
        ReplayError::Topics(error) => error.into(),
        ReplayError::Delivery(failure) if failure.permanent => Exit::Halted,
        ReplayError::Delivery(_) => Exit::Failed,
    }
}

async fn replay(settings: &PipelineSettings, args: &ReplayArgs) -> Result<ReplayEnd, Failure> {
    let name = &settings.name;
    let plan = match args.resume {
        Some(run) => ReplayPlan::resume(settings, run, args.condition.as_deref()).await?,
        None if args.set_aside => ReplayPlan::for_set_aside(settings).await?,
        None if args.dropped_slots => ReplayPlan::for_dropped_slots(settings).await?,
        None => {
            let selection = Selection {
                from: args.from.clone(),
                to: args.to.clone(),
                condition: args.condition.clone(),
                aggregates: args.aggregate.clone(),
                ids: args.id.clone(),
            };
            if let Some(table) = settings.target.outbox.table()
                && selection == Selection::default()
                && !args.all
            {
                return Err(Failure::NoSelection(table.clone()));
            }
            ReplayPlan::new(settings, &selection).await?
        }
    };
    say!("{name}: {}", plan.describe());
    say!(
        "{name}: to be sent to topic {}, with the header {REPLAY_HEADER}={}",
        plan.topic(),
        plan.run
    );
    if let Some(begun) = &plan.begun {
        let whose = if begun.is_ours {
            ""
        } else {
            ", which is not the role of this session"
        };
        say!(
            "{name}: begun by role {}{whose}, at {}",
            begun.by_role,
            begun.at
        );
    }
    if args.dry_run {
        say!("{name}: nothing was sent");
        return Ok(ReplayEnd::Complete);
    }
    if plan.rows == 0 && args.resume.is_none() && !plan.closes() {
        say!("{name}: there is nothing to send");
        return Ok(ReplayEnd::Complete);
    }
    if let (true, Some(begun)) = (args.yes, plan.begun.as_ref().filter(|begun| !begun.is_ours)) {
        return Err(Failure::OfAnother {
            run: plan.run,
            by_role: begun.by_role.clone(),
            at: begun.at.clone(),
        });
    }
    if !args.yes && !consent::is_given(name).await {
        return Err(Failure::NotAsked(name.clone()));
    }
    let window = Window {
        records: settings.window_records,
        bytes: settings.window_bytes,
    };
    let watermark = Watermark::new(window, Lsn::ZERO);
    let deliveries = watermark.deliveries();
    match &settings.sink {
        SinkSettings::Stdout => {
            let sink = StdoutSink::new(deliveries).map_err(ReplayError::from)?;
            send(&plan, name, args.rate, sink, watermark).await
        }
        SinkSettings::Kafka {
            properties,
            create_topics,
            credentials,
        } => {
            // A separate producer, because the pipeline's own producer would be fenced.
            let sink = KafkaSink::new(
                name,
                properties,
                *create_topics,
                None,
                credentials,
                deliveries,
            );
            let sink = sink.map_err(ReplayError::from)?;
            send(&plan, name, args.rate, sink, watermark).await
        }
    }
}

/// Records that events which may be missing were delivered.
async fn settle(settings: &PipelineSettings, args: &ReplayArgs) -> Result<ReplayEnd, Failure> {
    let name = &settings.name;
    let open = OpenEntries::find(settings).await?;
    for line in open.describe() {
        say!("{name}: {line}");
    }
    say!(
        "{name}: nothing is sent: these events count as delivered from then on, and retention may remove them"
    );
    if args.dry_run {
        say!("{name}: nothing was recorded");
        return Ok(ReplayEnd::Complete);
    }
    if !args.yes && !consent::is_given(name).await {
        return Err(Failure::NotAsked(name.clone()));
    }
    let id = open.settle().await?;
    info!(pipeline = name, journal = id, "settled without sending");
    Ok(ReplayEnd::Complete)
}

async fn send(
    plan: &ReplayPlan<'_>,
    name: &str,
    rate: Option<u32>,
    mut sink: impl Sink,
    watermark: Watermark,
) -> Result<ReplayEnd, Failure> {
    let run = plan.run;
    let mut stop = stop_at_signals().map_err(Failure::Signals)?;
    info!(pipeline = name, %run, rows = plan.rows, "replaying");
    let mut progress = Progress::new("rows sent again", Some(plan.rows));
    let told = |rows| progress.advance(rows);
    let ended = plan.send(&mut sink, watermark, rate, &mut stop, told).await;
    let rows = progress.done();
    match ended {
        Ok(ReplayEnd::Complete) => {
            progress.finish();
            info!(pipeline = name, %run, rows, "replayed");
            match plan.is_for_set_aside_table() {
                true => hand_over(plan, name).await,
                false => Ok(ReplayEnd::Complete),
            }
        }
        Ok(ReplayEnd::Stopped) => {
            drop(progress);
            info!(
                pipeline = name, %run, rows,
                "stopped. To resume it: {}", plan.resumption()
            );
            Ok(ReplayEnd::Stopped)
        }
        Err(reason) => {
            let command = plan.resumption();
            Err(Failure::CutShort { reason, command })
        }
    }
}

/// Waits until the pipeline has handled a table whose rows were all sent.
async fn hand_over(plan: &ReplayPlan<'_>, name: &str) -> Result<ReplayEnd, Failure> {
    match plan.hand_over().await? {
        HandOver::Resumed => {
            say!("{name}: the table is delivered from the stream again");
            Ok(ReplayEnd::Complete)
        }
        HandOver::Pending => {
            say!("{name}: the stream delivers the table again when walpost run is at work");
            Ok(ReplayEnd::Complete)
        }
        HandOver::Missed(reason) => Err(Failure::StillSetAside(reason)),
    }
}

/// Parses one end of a range. A duration means that long ago.
fn parse_bound(text: &str) -> Result<Bound, String> {
    match values::duration(text) {
        Ok(_) => values::moment(text, Timestamp::now()).map(|at| Bound::Time(at.to_string())),
        Err(_) => text.parse(),
    }
}

/// Returns a receiver that becomes true at the first SIGTERM or SIGINT. The second signal ends the
/// process.
fn stop_at_signals() -> std::io::Result<watch::Receiver<bool>> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let (sender, receiver) = watch::channel(false);
    tokio::spawn(async move {
        loop {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            if sender.send_replace(true) {
                logging::flush();
                std::process::exit(i32::from(Exit::Failed.code()));
            }
        }
    });
    Ok(receiver)
}

fn run_id(text: &str) -> Result<Uuid, String> {
    let read = text.parse();
    read.map_err(|error: uuid::Error| {
        format!("{error}; expected the id that the replay was logged with")
    })
}

fn rate(text: &str) -> Result<u32, String> {
    let number = text.strip_suffix("/s").unwrap_or(text);
    match number.parse() {
        Ok(rate) if rate > 0 => Ok(rate),
        _ => Err("expected a number of rows a second, like 500/s".to_owned()),
    }
}
