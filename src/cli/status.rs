//! `walpost status`: how the pipelines are, asked of the connector that runs and of the database.

use std::time::Duration;

use bytesize::ByteSize;
use clap::Args;
use serde::Serialize;
use tokio::time::{sleep, timeout};
use tracing::error;

use super::{load, out, runtime};
use crate::config::args::ConnectionArgs;
use crate::config::file::SinkName;
use crate::config::{self, Given};
use crate::escape::Escaped;
use crate::model::exit::Exit;
use crate::model::let_go::LetGo;
use crate::model::lsn::Lsn;
use crate::model::time::unix_micros;
use crate::observe::problem::{self, Problem};
use crate::observe::status::{PipelineStatus, Snapshot, Status};
use crate::observe::watchdog::Lasting;
use crate::observe::{client, http};
use crate::pipeline::settings::PipelineSettings;
use crate::postgres::catalog::{Catalog, CatalogError};

/// How often `--watch` asks again.
const REFRESH: Duration = Duration::from_secs(1);
/// How long the database may take to answer.
const ANSWER: Duration = Duration::from_secs(5);
/// What stands where something is not known.
const UNKNOWN: &str = "-";

/// Flags of `walpost status`.
#[derive(Debug, Args)]
pub struct StatusArgs {
    #[command(flatten)]
    connection: ConnectionArgs,
    /// Where the connector listens: what `run` was given. off asks the database alone [default: 127.0.0.1:9464]
    #[arg(long, env = "WALPOST_HTTP", value_name = "ADDRESS")]
    http: Option<String>,
    /// Ask again every second, until interrupted
    #[arg(long)]
    watch: bool,
    /// One JSON document instead of a table
    #[arg(long)]
    json: bool,
}

/// Everything that was found.
#[derive(Debug, Serialize)]
struct Report {
    /// Nothing is wrong with any pipeline.
    healthy: bool,
    connector: Connector,
    pipelines: Vec<Found>,
}

/// The process that runs, or should.
#[derive(Debug, Serialize)]
struct Connector {
    /// Where it was asked; nowhere, if it does not listen.
    address: Option<String>,
    reachable: bool,
    error: Option<String>,
    version: Option<String>,
    started_at: Option<f64>,
}

/// One pipeline.
#[derive(Debug, Serialize)]
struct Found {
    name: String,
    /// What is wrong with it.
    problems: Vec<String>,
    /// What the connector says.
    connector: Option<PipelineStatus>,
    /// What the database says, if it was asked.
    database: Option<Database>,
}

/// What the database says of a slot.
#[derive(Debug, Serialize)]
struct Database {
    error: Option<String>,
    slot: String,
    server: Option<Lsn>,
    active: Option<bool>,
    confirmed: Option<Lsn>,
    restart: Option<Lsn>,
    wal_status: Option<String>,
    safe_wal_bytes: Option<i64>,
    lag_bytes: Option<u64>,
    kept_bytes: Option<u64>,
    /// What has the slot, if that is no Walpost.
    #[serde(skip)]
    held: Option<String>,
    #[serde(skip)]
    problems: Vec<Problem>,
    /// What was let go and not sent again; not known without a journal that may be read.
    let_go: Option<Vec<LetGo>>,
}

/// Prints how the pipelines are.
#[must_use]
pub fn run(args: &StatusArgs) -> Exit {
    let given = Given {
        connection: &args.connection,
        records: None,
        sink: Some(SinkName::Stdout),
    };
    // Without a word of a database the connector alone is asked.
    let settings = match args.connection.names_database() {
        true => match load(&given) {
            Ok(settings) => settings,
            Err(exit) => return exit,
        },
        false => Vec::new(),
    };
    let address = config::http(args.http.as_deref(), args.connection.config.as_deref());
    let address = match address {
        Ok(address) => Some(address.unwrap_or_else(|| http::DEFAULT.to_owned()))
            .filter(|address| address != http::OFF),
        Err(reason) => {
            error!("{reason}");
            return Exit::Usage;
        }
    };
    if address.is_none() && settings.is_empty() {
        error!(
            "nobody is to be asked: expected --postgres URL or --config FILE, or --http with an address"
        );
        return Exit::Usage;
    }
    let runtime = match runtime() {
        Ok(runtime) => runtime,
        Err(exit) => return exit,
    };
    let exit = runtime.block_on(async {
        loop {
            let report = look(address.as_deref(), &settings, &args.connection.pipeline).await;
            let printed = match args.json {
                true => out::json(&report),
                false => out::lines(&table(&report), args.watch),
            };
            // Nobody reads on when it can't be printed.
            if !args.watch || !printed {
                return match report.healthy {
                    true => Exit::Done,
                    false => Exit::Failed,
                };
            }
            sleep(REFRESH).await;
        }
    });
    runtime.shutdown_background();
    exit
}

/// Asks the connector, and the database of each pipeline.
async fn look(address: Option<&str>, settings: &[PipelineSettings], asked: &[String]) -> Report {
    let (connector, status) = ask_connector(address).await;
    let mut said = status.map(|status| status.pipelines).unwrap_or_default();
    let mut pipelines = Vec::new();
    for settings in settings {
        let at = said.iter().position(|of| of.about.name == settings.name);
        let of_connector = at.map(|at| said.remove(at));
        let database = ask_database(settings).await;
        pipelines.push(Found {
            name: settings.name.clone(),
            problems: problems(
                &settings.name,
                &connector,
                of_connector.as_ref(),
                Some(&database),
            ),
            connector: of_connector,
            database: Some(database),
        });
    }
    // Those that this configuration does not have.
    let is_asked = |of: &PipelineStatus| match settings.is_empty() {
        true => asked.is_empty() || asked.contains(&of.about.name),
        false => false,
    };
    for of_connector in said.into_iter().filter(is_asked) {
        let name = &of_connector.about.name;
        pipelines.push(Found {
            name: name.clone(),
            problems: problems(name, &connector, Some(&of_connector), None),
            connector: Some(of_connector),
            database: None,
        });
    }
    Report {
        healthy: !pipelines.is_empty() && pipelines.iter().all(|found| found.problems.is_empty()),
        connector,
        pipelines,
    }
}

async fn ask_connector(address: Option<&str>) -> (Connector, Option<Status>) {
    let mut connector = Connector {
        address: address.map(str::to_owned),
        reachable: false,
        error: None,
        version: None,
        started_at: None,
    };
    let Some(address) = address else {
        return (connector, None);
    };
    match client::status(address).await {
        Ok(status) => {
            connector.reachable = true;
            connector.version = Some(status.version.clone());
            connector.started_at = Some(status.started_at);
            (connector, Some(status))
        }
        Err(error) => {
            connector.error = Some(error.to_string());
            (connector, None)
        }
    }
}

async fn ask_database(settings: &PipelineSettings) -> Database {
    let asked = async {
        let catalog = Catalog::open(&settings.postgres).await?;
        let held = catalog.held_by_other(&settings.target.slot).await?;
        let vitals = catalog.vitals(&settings.name, &settings.target).await?;
        Ok::<_, CatalogError>((vitals, held))
    };
    let ((vitals, held), error) = match timeout(ANSWER, asked).await {
        Ok(Ok(found)) => (found, None),
        Ok(Err(error)) => (Default::default(), Some(error.to_string())),
        Err(_) => (
            Default::default(),
            Some(format!("no answer within {ANSWER:?}")),
        ),
    };
    let name = &settings.target.slot;
    let slot = vitals.slot.clone().unwrap_or_default();
    let mut problems = Vec::new();
    if error.is_none() {
        problems.extend(problem::of_slot(name, &vitals));
        let has_log = matches!(slot.wal_status.as_deref(), Some("reserved" | "extended"));
        if has_log && !slot.active {
            problems.push(problem::unread(name));
        }
        let outbox = settings.target.outbox.to_string();
        problems.extend(problem::of_partitions(&outbox, &vitals, unix_micros()));
    }
    let server = error.is_none().then_some(vitals.end);
    let behind = |from: Option<Lsn>| Some(server?.bytes_since(from?));
    Database {
        slot: name.clone(),
        server,
        // A slot that is there has a status.
        active: slot.wal_status.is_some().then_some(slot.active),
        confirmed: slot.confirmed,
        restart: slot.restart,
        safe_wal_bytes: slot.safe_wal_bytes,
        lag_bytes: behind(slot.confirmed),
        kept_bytes: behind(slot.restart),
        wal_status: slot.wal_status,
        held: held.map(|held| held.to_string()),
        problems,
        let_go: vitals.let_go,
        error,
    }
}

fn problems(
    name: &str,
    connector: &Connector,
    of_connector: Option<&PipelineStatus>,
    database: Option<&Database>,
) -> Vec<String> {
    let mut problems = Vec::new();
    let seen = of_connector.map_or(&[][..], |pipeline| &pipeline.problems);
    match (of_connector, &connector.address) {
        (Some(pipeline), _) => {
            let is_explained = |seen: &Lasting| seen.problem.kind.explains_unreadiness();
            if !seen.iter().any(is_explained) {
                problems.extend(pipeline.not_ready.clone());
            }
        }
        (None, Some(address)) => problems.push(match &connector.error {
            Some(error) => format!("no walpost answers at {address}: {error}"),
            None => format!("the walpost at {address} has no such pipeline"),
        }),
        (None, None) => {}
    }
    // The database knows better, where it was asked.
    let is_news = |seen: &&Lasting| database.is_none() || !seen.problem.kind.is_of_database();
    problems.extend(seen.iter().filter(is_news).map(|seen| seen.problem.line()));
    // The database was asked last.
    let let_go = database
        .and_then(|of| of.let_go.as_ref())
        .or_else(|| of_connector?.let_go.as_ref());
    problems.extend(let_go.into_iter().flatten().map(|entry| {
        format!(
            "a slot was let go: {} may be in the table only; see Troubleshooting in README.md, then walpost replay --let-go \
             --pipeline {name}",
            entry.describe()
        )
    }));
    let Some(database) = database else {
        return problems;
    };
    let error = database.error.iter();
    problems.extend(error.map(|error| format!("the database can't be asked: {error}")));
    problems.extend(database.problems.iter().map(Problem::line));
    if let Some(held) = &database.held
        && !problems.iter().any(|said| said.contains(held))
    {
        problems.push(held.clone());
    }
    problems
}

const TITLES: [&str; 11] = [
    "PIPELINE",
    "STATE",
    "EVENTS/S",
    "LAG",
    "BEHIND",
    "IN FLIGHT",
    "P99",
    "CONFIRMED",
    "SLOT",
    "KEPT",
    "SAFE",
];

/// Lines to be printed.
fn table(report: &Report) -> Vec<String> {
    let mut rows = vec![TITLES.map(str::to_owned)];
    let shown = |cell: String| Escaped(cell).to_string();
    rows.extend(report.pipelines.iter().map(|found| row(found).map(shown)));
    let mut widths = [0; TITLES.len()];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.chars().count().max(*width);
        }
    }
    let mut lines = Vec::new();
    for row in &rows {
        let cells = row.iter().zip(widths);
        let line: Vec<_> = cells
            .map(|(cell, width)| format!("{cell:width$}"))
            .collect();
        lines.push(line.join("  ").trim_end().to_owned());
    }
    for found in &report.pipelines {
        let snapshot = found.connector.as_ref().and_then(|of| of.snapshot);
        if let Some(snapshot) = snapshot.filter(Snapshot::lasts) {
            let (phase, rows) = (snapshot.phase.name(), snapshot.rows);
            let of = snapshot.expected.map(|rows| format!(" of about {rows}"));
            let of = of.unwrap_or_default();
            lines.push(format!(
                "{}: snapshot: {phase}, {rows}{of} rows read",
                found.name
            ));
        }
        for problem in &found.problems {
            lines.push(format!("{}: {problem}", found.name));
        }
        let error = found
            .connector
            .as_ref()
            .and_then(|of| of.last_error.as_ref());
        let is_news = |remedy: &str| !found.problems.iter().any(|line| line.contains(remedy));
        if let Some(error) = error
            && !found.problems.is_empty()
            && is_news(&error.remedy)
        {
            lines.push(format!("{}: {}", found.name, error.remedy));
        }
    }
    if report.pipelines.is_empty() {
        lines.push(match &report.connector.error {
            Some(error) => format!(
                "no walpost answers at {}: {error}",
                report.connector.address.as_deref().unwrap_or(UNKNOWN)
            ),
            None => "there is no such pipeline".to_owned(),
        });
    }
    lines
}

fn row(found: &Found) -> [String; TITLES.len()] {
    let (connector, database) = (found.connector.as_ref(), found.database.as_ref());
    let shown = |known: Option<String>| known.unwrap_or_else(|| UNKNOWN.to_owned());
    let health = connector.and_then(|of| of.slot_health.as_ref());
    // The database was asked last.
    let lag = database
        .and_then(|of| of.lag_bytes)
        .or_else(|| connector?.lag.bytes);
    let kept = database
        .and_then(|of| of.kept_bytes)
        .or_else(|| connector?.lag.kept_bytes);
    let confirmed = connector
        .and_then(|of| of.positions.confirmed)
        .or_else(|| database?.confirmed);
    let wal_status = database
        .and_then(|of| of.wal_status.clone())
        .or_else(|| health?.wal_status.clone());
    let safe = database
        .and_then(|of| of.safe_wal_bytes)
        .or_else(|| health?.safe_wal_bytes);
    let state = connector.map(|of| of.state.name().replace('_', " "));
    let of_slot = || match database?.active? {
        true => Some("in use".to_owned()),
        false => Some("not read".to_owned()),
    };
    [
        found.name.clone(),
        shown(state.or_else(of_slot)),
        shown(connector.map(|of| format!("{:.0}", of.recent.events_per_second))),
        shown(lag.map(bytes)),
        shown(connector.and_then(|of| of.lag.seconds).map(duration)),
        shown(connector.map(|of| of.events.in_flight.to_string())),
        shown(
            connector
                .and_then(|of| of.recent.commit_to_delivery_p99)
                .map(duration),
        ),
        shown(confirmed.map(|lsn| lsn.to_string())),
        shown(wal_status),
        shown(kept.map(bytes)),
        shown(safe.map(|safe| bytes(u64::try_from(safe).unwrap_or_default()))),
    ]
}

fn bytes(number: u64) -> String {
    ByteSize::b(number).to_string()
}

fn duration(seconds: f64) -> String {
    match seconds {
        0.0 => "0 s".to_owned(),
        s if s < 0.001 => format!("{:.1} ms", s * 1e3),
        s if s < 1.0 => format!("{:.0} ms", s * 1e3),
        s if s < 120.0 => format!("{s:.1} s"),
        s if s < 7200.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}
