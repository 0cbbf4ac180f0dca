//! `walpost replay`: resends rows of the outbox table.

use clap::Args;
use jiff::Timestamp;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tracing::{error, info};
use uuid::Uuid;

use super::out::say;
use super::{consent, load_with_runtime};
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
use crate::replay::{ReplayEnd, ReplayError, ReplayPlan, SetAsideOutcome};
use crate::sink::Sink;
use crate::sink::stdout::StdoutSink;

/// Flags of `walpost replay`.
#[derive(Debug, Args)]
pub(crate) struct ReplayArgs {
    /// First row to send: a time compared with created_at, such as 2025-11-01T03:00:00Z or 1h (one
    /// hour ago); an id; or the walpost-position of a record
    #[arg(long, value_name = "TIME|ID|POSITION", value_parser = parse_bound)]
    from: Option<Bound>,
    /// Last row to send: a time, an id or a walpost-position, inclusive
    #[arg(long, value_name = "TIME|ID|POSITION", value_parser = parse_bound)]
    to: Option<Bound>,
    /// Only rows that meet this SQL condition. Functions in the condition run with the privileges
    /// of the connection's role and could drop a slot, so superusers can't use this flag
    #[arg(long = "where", value_name = "SQL")]
    condition: Option<String>,
    /// Only rows of this aggregate type, or of this aggregate. Can be repeated to select several
    #[arg(long, value_name = "TYPE[/ID]")]
    aggregate: Vec<Aggregate>,
    /// Only the row with this id. Can be repeated to select several rows
    #[arg(long, value_name = "ID")]
    id: Vec<String>,
    /// Every row of the table
    #[arg(long, conflicts_with_all = ["from", "to", "condition", "aggregate", "id", "dropped_slots", "set_aside", "resume"])]
    all: bool,
    /// Rows that may be missing from Kafka because slots were dropped. After all of these rows have
    /// been sent, the slots are no longer reported
    #[arg(long, conflicts_with_all = ["from", "to", "condition", "aggregate", "id"])]
    dropped_slots: bool,
    /// With --dropped-slots: send nothing, and record that all possibly missing events were
    /// delivered, for example because the pipeline was drained before the database was moved.
    /// Without --table, applies to every table of the pipeline
    #[arg(long, requires = "dropped_slots", conflicts_with_all = ["rate", "resume"])]
    already_delivered: bool,
    /// Rows of a table that is set aside. After all of these rows have been sent, the stream
    /// delivers the table again
    #[arg(long, conflicts_with_all = ["from", "to", "condition", "aggregate", "id", "dropped_slots"])]
    set_aside: bool,
    /// Count the rows without sending them
    #[arg(long)]
    dry_run: bool,
    /// Send at most this many rows per second
    #[arg(long, value_name = "N/s", value_parser = rate)]
    rate: Option<u32>,
    /// Where to write records: kafka or stdout [default: kafka]
    #[arg(long, env = "WALPOST_SINK", value_enum, hide_possible_values = true)]
    sink: Option<SinkName>,
    /// Resume an interrupted replay. Specify its --where and --topic again; Walpost compares them
    /// with the journal, but never runs SQL from the journal
    #[arg(
        long,
        value_name = "RUN-ID",
        value_parser = run_id,
        conflicts_with_all = ["from", "to", "aggregate", "id", "dropped_slots", "set_aside"]
    )]
    resume: Option<Uuid>,
    /// Don't ask for confirmation
    #[arg(long)]
    yes: bool,
    #[command(flatten)]
    connection: ConnectionArgs,
    #[command(flatten)]
    records: RecordArgs,
}

/// An error that kept some or all rows from being sent.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Replay(#[from] ReplayError),
    #[error("{reason}. To resume the replay: {command}")]
    Interrupted {
        reason: ReplayError,
        command: String,
    },
    #[error(
        "the table remains set aside: {0}. Run the same command again to send only the missed rows. If the \
         table receives rows continuously, stop the pipeline while the command runs"
    )]
    StillSetAside(String),
    #[error("failed to install signal handlers: {0}")]
    Signals(std::io::Error),
    #[error("not confirmed: the text entered was not the pipeline name {0:?}. Nothing was sent")]
    NotConfirmed(String),
    #[error(
        "no rows of table {0} are selected. Select rows with --from, --to, --aggregate, --id, --where or \
         --dropped-slots, or select every row with --all"
    )]
    NoSelection(TableName),
    #[error(
        "replay {run} was started by another role, {by_role}, at {at}: --yes would send its rows without review. Run the \
         command without --yes, check the output, and confirm"
    )]
    OtherRole {
        run: Uuid,
        by_role: String,
        at: String,
    },
}

impl Failure {
    /// If the error suggests a command, adds the flags that the command needs to use this process's
    /// configuration.
    fn with_commands(self, commands: &Commands) -> Self {
        match self {
            Self::Replay(reason) => Self::Replay(reason.with_commands(commands)),
            Self::Interrupted { reason, command } => Self::Interrupted {
                reason: reason.with_commands(commands),
                command,
            },
            other => other,
        }
    }
}

/// Resends rows of one pipeline's table.
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
    let (pipelines, runtime) = match load_with_runtime(&given) {
        Ok(loaded) => loaded,
        Err(exit) => return exit,
    };
    let [settings] = &pipelines[..] else {
        error!(
            "several pipelines are configured, each with its own table. Select one with --pipeline"
        );
        return Exit::Usage;
    };
    let done = runtime.block_on(async {
        match args.already_delivered {
            true => record_delivered(settings, args).await,
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
                Failure::NotConfirmed(_) | Failure::NoSelection(_) | Failure::OtherRole { .. } => {
                    Exit::Usage
                }
                Failure::Signals(_) | Failure::StillSetAside(_) => Exit::Failed,
                Failure::Replay(reason) | Failure::Interrupted { reason, .. } => exit(&reason),
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
        | ReplayError::AmbiguousPosition { .. }
        | ReplayError::Wrong { .. }
        | ReplayError::NoRun { .. }
        | ReplayError::NoDroppedSlots { .. }
        | ReplayError::NotSetAside { .. }
        | ReplayError::Complete(_)
        | ReplayError::Closed(_)
        | ReplayError::TooPrivileged { .. }
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
        "{name}: rows will be sent to topic {}, with the header {REPLAY_HEADER}={}",
        plan.topic(),
        plan.run
    );
    if let Some(previous) = &plan.begun {
        let remark = if previous.is_ours {
            ""
        } else {
            " (this session uses another role)"
        };
        say!(
            "{name}: started by role {}{remark}, at {}",
            previous.by_role,
            previous.at
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
    if let (true, Some(previous)) = (
        args.yes,
        plan.begun.as_ref().filter(|previous| !previous.is_ours),
    ) {
        return Err(Failure::OtherRole {
            run: plan.run,
            by_role: previous.by_role.clone(),
            at: previous.at.clone(),
        });
    }
    if !args.yes && !consent::is_given(name).await {
        return Err(Failure::NotConfirmed(name.clone()));
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
            // The producer is not transactional, because a second producer with the pipeline's
            // transactional ID would fence the pipeline's own producer.
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

/// Asks for confirmation, and writes a journal entry stating that the events reported as possibly
/// missing were delivered.
async fn record_delivered(
    settings: &PipelineSettings,
    args: &ReplayArgs,
) -> Result<ReplayEnd, Failure> {
    let name = &settings.name;
    let entries = OpenEntries::find(settings).await?;
    for line in entries.describe() {
        say!("{name}: {line}");
    }
    say!(
        "{name}: nothing will be sent: from now on, these events count as delivered, and retention may remove them"
    );
    if args.dry_run {
        say!("{name}: nothing was recorded");
        return Ok(ReplayEnd::Complete);
    }
    if !args.yes && !consent::is_given(name).await {
        return Err(Failure::NotConfirmed(name.clone()));
    }
    let id = entries.settle().await?;
    info!(
        pipeline = name,
        journal = id,
        "events recorded as delivered"
    );
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
    let advance = |rows| progress.advance(rows);
    let ended = plan
        .send(&mut sink, watermark, rate, &mut stop, advance)
        .await;
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
                "stopped. To resume the replay: {}", plan.resume_command()
            );
            Ok(ReplayEnd::Stopped)
        }
        Err(reason) => {
            let command = plan.resume_command();
            Err(Failure::Interrupted { reason, command })
        }
    }
}

/// Waits for a limited time until the pipeline has recorded whether the stream resumes delivering a
/// table that was set aside. Must be called after all rows of the table have been sent. Returns an
/// error if the pipeline has recorded that the table remains set aside, but not if the pipeline has
/// recorded nothing.
async fn hand_over(plan: &ReplayPlan<'_>, name: &str) -> Result<ReplayEnd, Failure> {
    match plan.hand_over().await? {
        SetAsideOutcome::Resumed => {
            say!("{name}: the stream has resumed delivering the table's events");
            Ok(ReplayEnd::Complete)
        }
        SetAsideOutcome::Pending => {
            say!(
                "{name}: the stream will resume delivering the table's events once walpost run is running"
            );
            Ok(ReplayEnd::Complete)
        }
        SetAsideOutcome::Missed(reason) => Err(Failure::StillSetAside(reason)),
    }
}

/// Parses one end of the range of rows. A duration, such as `1h`, is subtracted from the current
/// time.
fn parse_bound(text: &str) -> Result<Bound, String> {
    match values::parse_duration(text) {
        Ok(_) => {
            values::parse_time(text, Timestamp::now()).map(|time| Bound::Time(time.to_string()))
        }
        Err(_) => text.parse(),
    }
}

/// Returns a receiver whose value becomes true at the first SIGTERM or SIGINT. A second signal
/// terminates the process.
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
        format!("{error}; expected the run ID that was logged when the replay started")
    })
}

fn rate(text: &str) -> Result<u32, String> {
    let number = text.strip_suffix("/s").unwrap_or(text);
    match number.parse() {
        Ok(rate) if rate > 0 => Ok(rate),
        _ => Err("expected a number of rows per second, like 500/s".to_owned()),
    }
}
