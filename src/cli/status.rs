//! `walpost status`: shows the state of the pipelines as reported by the running process and the
//! database.

use std::collections::HashSet;
use std::time::Duration;

use bytesize::ByteSize;
use clap::Args;
use futures_util::{StreamExt, stream};
use serde::Serialize;
use tokio::time::{sleep, timeout};
use tracing::error;

use super::out::Screen;
use super::{CONCURRENT_QUERIES_MAX, SHORT_LIST_MAX, load, out, runtime};
use crate::config::args::ConnectionArgs;
use crate::config::file::SinkName;
use crate::config::{self, Given, GivenSink};
use crate::escape::Escaped;
use crate::model::commands::Commands;
use crate::model::dropped_slot::DroppedSlot;
use crate::model::exit::Exit;
use crate::model::last_halt::LastHalt;
use crate::model::lsn::Lsn;
use crate::model::rounded;
use crate::model::set_aside::SetAside;
use crate::model::time::seconds;
use crate::model::time::unix_micros;
use crate::observe::problem::{self, Kind, Problem, Severity};
use crate::observe::status::{PipelineStatus, Reload, Snapshot, Status};
use crate::observe::summary::{self, Reason, Source};
use crate::observe::{client, http};
use crate::pipeline::settings::PipelineSettings;
use crate::postgres::catalog::{Catalog, CatalogError};

/// How often `--watch` refreshes the output.
const REFRESH_INTERVAL: Duration = Duration::from_secs(1);
/// Timeout for database queries.
const QUERY_TIMEOUT: Duration = Duration::from_secs(5);
/// The text that is printed in place of an unknown value.
const UNKNOWN: &str = "-";

/// Flags of `walpost status`.
#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    /// The HTTP address of the running process (its --http), or off to query only the database
    /// [default: 127.0.0.1:9464]
    #[arg(long, env = "WALPOST_HTTP", value_name = "ADDRESS")]
    http: Option<String>,
    /// Refresh every second until interrupted
    #[arg(long)]
    watch: bool,
    /// Print a JSON document instead of a table
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connection: ConnectionArgs,
}

/// The status of all pipelines.
#[derive(Debug, Serialize)]
struct StatusReport {
    /// Whether all pipelines are healthy and the last reload of the configuration succeeded.
    healthy: bool,
    connector: Connector,
    pipelines: Vec<Found>,
    /// Walpost slots that no configured pipeline uses and no process reads. Empty unless all
    /// pipelines of a configuration file are queried.
    unused_slots: Vec<String>,
    /// The current time in seconds since 1970, according to the running process or, if it can't be
    /// reached, to this machine's clock.
    #[serde(skip)]
    now: f64,
}

/// The status of the running process.
#[derive(Debug, Serialize)]
struct Connector {
    /// The HTTP address that was queried, or `None` if HTTP is off.
    address: Option<String>,
    reachable: bool,
    error: Option<String>,
    version: Option<String>,
    started_at: Option<f64>,
    /// The last attempt to reload the configuration.
    reload: Option<Reload>,
}

impl Connector {
    /// If the last reload failed, returns its error and time.
    fn failed_reload(&self) -> Option<(&str, f64)> {
        let reload = self.reload.as_ref()?;
        Some((reload.error.as_deref()?, reload.at))
    }
}

/// The status of one pipeline.
#[derive(Debug, Serialize)]
struct Found {
    name: String,
    /// The pipeline's problems.
    problems: Vec<String>,
    /// The status according to the running process. `None` if the process did not report this
    /// pipeline.
    connector: Option<PipelineStatus>,
    /// The status according to the database. `None` if the database was not queried.
    database: Option<Database>,
}

impl Found {
    fn is_healthy(&self) -> bool {
        let connector = self.connector.as_ref();
        self.problems.is_empty() && connector.is_none_or(|connector| connector.ready)
    }

    /// Returns a sort key that places pipelines with problems first, as on the status page.
    fn rank(&self) -> u8 {
        match (&self.connector, self.problems.is_empty()) {
            (Some(connector), true) => connector.summary.rank,
            // The database may reveal a problem that the running process does not report.
            (Some(connector), false) => connector.summary.rank.min(2),
            (None, true) => u8::MAX,
            (None, false) => 1,
        }
    }
}

/// The state of a slot, according to the database.
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
    retained_bytes: Option<u64>,
    /// A description of the process that is using the slot, if that process is not Walpost.
    #[serde(skip)]
    held: Option<String>,
    #[serde(skip)]
    problems: Vec<Problem>,
    /// The reason why the pipeline last halted. `None` if a process is reading the slot again.
    last_halt: Option<LastHalt>,
    /// Dropped slots whose events have not been resent. `None` if the journal does not exist or
    /// can't be read.
    dropped_slots: Option<Vec<DroppedSlot>>,
    /// Tables that were set aside after an error. Their rows are not being delivered. `None` if the
    /// journal does not exist or can't be read.
    set_aside: Option<Vec<SetAside>>,
}

/// Prints the status of the pipelines.
#[must_use]
pub(crate) fn run(args: &StatusArgs) -> Exit {
    let given = Given {
        connection: &args.connection,
        records: None,
        sink: GivenSink::Instead(SinkName::Stdout),
        accepts_single_table: false,
    };
    // If no database is configured, only the running process is queried.
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
            "nothing to query: expected --postgres URL, --config FILE, or --http with an address"
        );
        return Exit::Usage;
    }
    let runtime = match runtime() {
        Ok(runtime) => runtime,
        Err(exit) => return exit,
    };
    // Unless all pipelines were selected, a slot that seems unused may belong to another pipeline.
    let is_complete = args.connection.config.is_some() && args.connection.pipeline.is_empty();
    let exit = runtime.block_on(async {
        let mut is_first = true;
        loop {
            let mut report =
                query_all(address.as_deref(), &settings, &args.connection.pipeline).await;
            if is_complete {
                report.unused_slots = unused_slots(&settings).await;
            }
            let printed = match (args.json, args.watch) {
                (true, _) => out::json(&report),
                (false, true) => out::frame(&format_report(&report), is_first),
                (false, false) => out::lines(&format_report(&report)),
            };
            is_first = false;
            // Stop if printing fails. Usually, the reason is that the program reading the output
            // has exited.
            if !args.watch || !printed {
                return match report.healthy {
                    true => Exit::Done,
                    false => Exit::Failed,
                };
            }
            sleep(REFRESH_INTERVAL).await;
        }
    });
    runtime.shutdown_background();
    exit
}

/// Queries the running process and each pipeline's database.
async fn query_all(
    address: Option<&str>,
    settings: &[PipelineSettings],
    requested: &[String],
) -> StatusReport {
    let (connector, status) = query_connector(address).await;
    let now = status
        .as_ref()
        .map_or_else(|| seconds(unix_micros()), |status| status.now);
    let mut reported = status.map(|status| status.pipelines).unwrap_or_default();
    let mut pipelines = Vec::new();
    let databases = stream::iter(settings)
        .map(query_database)
        .buffered(CONCURRENT_QUERIES_MAX);
    let databases: Vec<_> = databases.collect().await;
    for (settings, database) in settings.iter().zip(databases) {
        let index = reported
            .iter()
            .position(|status| status.about.name == settings.name);
        let connector_status = index.map(|index| reported.remove(index));
        pipelines.push(Found {
            name: settings.name.clone(),
            problems: problems(
                &settings.target.commands,
                &connector,
                connector_status.as_ref(),
                Some(&database),
            ),
            connector: connector_status,
            database: Some(database),
        });
    }
    // Without a configuration, list the pipelines that the running process reports.
    let is_requested = |status: &PipelineStatus| match settings.is_empty() {
        true => requested.is_empty() || requested.contains(&status.about.name),
        false => false,
    };
    for status in reported.into_iter().filter(is_requested) {
        let name = &status.about.name;
        pipelines.push(Found {
            name: name.clone(),
            problems: problems(
                &Commands::for_pipeline(name),
                &connector,
                Some(&status),
                None,
            ),
            connector: Some(status),
            database: None,
        });
    }
    StatusReport {
        now,
        healthy: !pipelines.is_empty()
            && pipelines.iter().all(Found::is_healthy)
            && connector.failed_reload().is_none(),
        connector,
        pipelines,
        unused_slots: Vec::new(),
    }
}

/// Returns the Walpost slots that no pipeline uses, in the databases of all pipelines. Skips
/// databases that don't respond, because the status of their pipelines already contains the error.
async fn unused_slots(pipelines: &[PipelineSettings]) -> Vec<String> {
    let used: Vec<_> = pipelines
        .iter()
        .map(|settings| settings.target.slot.clone())
        .collect();
    let mut databases = HashSet::new();
    let mut unused = Vec::new();
    for settings in pipelines {
        if !databases.insert(settings.postgres.describe()) {
            continue;
        }
        let query = async {
            let catalog = Catalog::open(&settings.postgres).await?;
            catalog.unused_slots(&settings.target, &used).await
        };
        if let Ok(Ok(found)) = timeout(QUERY_TIMEOUT, query).await {
            unused.extend(found.iter().map(ToString::to_string));
        }
    }
    unused
}

async fn query_connector(address: Option<&str>) -> (Connector, Option<Status>) {
    let mut connector = Connector {
        address: address.map(str::to_owned),
        reachable: false,
        error: None,
        version: None,
        started_at: None,
        reload: None,
    };
    let Some(address) = address else {
        return (connector, None);
    };
    match client::status(address).await {
        Ok(status) => {
            connector.reachable = true;
            connector.version = Some(status.version.clone());
            connector.started_at = Some(status.started_at);
            connector.reload.clone_from(&status.reload);
            (connector, Some(status))
        }
        Err(error) => {
            connector.error = Some(error.to_string());
            (connector, None)
        }
    }
}

async fn query_database(settings: &PipelineSettings) -> Database {
    let query = async {
        let catalog = Catalog::open(&settings.postgres).await?;
        let held = catalog.held_by_other(&settings.target.slot).await?;
        let vitals = catalog.vitals(&settings.name, &settings.target).await?;
        let is_read = vitals.slot.as_ref().is_some_and(|slot| slot.active);
        let last_halt = match is_read {
            true => None,
            // If this query fails, still show the rest of the status.
            false => catalog.last_halt(&settings.target).await.ok().flatten(),
        };
        Ok::<_, CatalogError>((vitals, held, last_halt))
    };
    let ((vitals, held, last_halt), error) = match timeout(QUERY_TIMEOUT, query).await {
        Ok(Ok(found)) => (found, None),
        Ok(Err(error)) => (Default::default(), Some(error.to_string())),
        Err(_) => (
            Default::default(),
            Some(format!("no response within {QUERY_TIMEOUT:?}")),
        ),
    };
    let name = &settings.target.slot;
    let slot = vitals.slot.clone().unwrap_or_default();
    let commands = &settings.target.commands;
    let mut problems = Vec::new();
    if error.is_none() {
        problems.extend(problem::slot_problem(name, &vitals, commands));
        let has_wal = matches!(slot.wal_status.as_deref(), Some("reserved" | "extended"));
        if has_wal && !slot.active {
            problems.push(problem::unread(name));
        }
        let outbox = settings.target.outbox.to_string();
        problems.extend(problem::partitions_problem(
            &outbox,
            &vitals,
            unix_micros(),
            commands,
        ));
    }
    let server = error.is_none().then_some(vitals.end);
    let bytes_since = |from: Option<Lsn>| Some(server?.bytes_since(from?));
    Database {
        slot: name.clone(),
        server,
        // `wal_status` is `None` if the slot does not exist.
        active: slot.wal_status.is_some().then_some(slot.active),
        confirmed: slot.confirmed,
        restart: slot.restart,
        safe_wal_bytes: slot.safe_wal_bytes,
        lag_bytes: bytes_since(slot.confirmed),
        retained_bytes: bytes_since(slot.restart),
        wal_status: slot.wal_status,
        held: held.map(|held| held.to_string()),
        problems,
        last_halt,
        dropped_slots: vitals.dropped_slots,
        set_aside: vitals.set_aside,
        error,
    }
}

fn problems(
    commands: &Commands,
    connector: &Connector,
    status: Option<&PipelineStatus>,
    database: Option<&Database>,
) -> Vec<String> {
    let mut reasons: Vec<Reason> = Vec::new();
    let critical = |what: String| Reason {
        severity: Severity::Critical,
        source: Source::Connector,
        what,
        remedy: String::new(),
        since: None,
    };
    // If the database was queried successfully, the query results take precedence over the status
    // that the running process reported.
    let queried = database.filter(|database| database.error.is_none());
    match (status, &connector.address) {
        (Some(pipeline), _) => {
            let is_current =
                |reason: &&Reason| queried.is_none() || reason.source == Source::Connector;
            reasons.extend(pipeline.summary.reasons.iter().filter(is_current).cloned());
        }
        (None, Some(address)) => reasons.push(critical(match &connector.error {
            Some(error) => format!("no response from Walpost at {address}: {error}"),
            None => format!("the Walpost process at {address} has no pipeline with this name"),
        })),
        (None, None) => {}
    }
    if let Some(database) = queried {
        // If a running process reports the pipeline, its current state is known, so the reason for
        // its last halt is not shown.
        if let (None, Some(halt)) = (status, &database.last_halt) {
            reasons.push(Reason {
                source: Source::Database,
                remedy: "Follow the instructions in the error message, then start Walpost"
                    .to_owned(),
                ..critical(halt.describe())
            });
        }
        for problem in &database.problems {
            // If the process reports that the pipeline is not ready, there is no need to add that
            // the slot is not being read.
            let is_reported = problem.kind == Kind::NotStreaming
                && status.is_some_and(|pipeline| !pipeline.ready);
            if !is_reported {
                summary::add(&mut reasons, Reason::from_problem(problem));
            }
        }
        // If this role can't read the journal, use the entries that the running process reported.
        let dropped = database.dropped_slots.as_ref();
        let dropped = dropped.or_else(|| status?.dropped_slots.as_ref());
        summary::add_dropped_slots(&mut reasons, commands, dropped.map_or(&[], Vec::as_slice));
        let set_aside = database.set_aside.as_ref();
        let set_aside = set_aside.or_else(|| status?.set_aside.as_ref());
        summary::add_set_aside(&mut reasons, commands, set_aside.map_or(&[], Vec::as_slice));
        if let Some(held) = &database.held {
            summary::add(&mut reasons, critical(held.clone()));
        }
    }
    if let Some(error) = database.and_then(|database| database.error.as_ref()) {
        reasons.push(critical(format!("catalog query failed: {error}")));
    }
    reasons.iter().map(Reason::line).collect()
}

const TITLES: [&str; 12] = [
    "PIPELINE",
    "STATE",
    "FOR",
    "LAG",
    "DELIVERY P99",
    "EVENTS/S",
    "RETAINED WAL",
    "SAFE WAL SIZE",
    "WAL STATUS",
    "LAG BYTES",
    "IN FLIGHT",
    "CONFIRMED",
];
/// The columns that contain numbers, and are therefore right-aligned.
const IS_NUMBER: [bool; TITLES.len()] = [
    false, false, true, true, true, true, true, true, false, true, true, true,
];

/// Formats the status of all pipelines for display.
fn format_report(report: &StatusReport) -> Screen {
    let mut pipelines: Vec<_> = report.pipelines.iter().collect();
    pipelines.sort_by_key(|found| found.rank());
    let mut lines = Vec::new();
    if pipelines.len() > SHORT_LIST_MAX {
        lines.push(summary(&pipelines));
    }
    lines.extend(table(&pipelines, report.now));
    Screen {
        table: lines,
        notes: notes(&pipelines, report),
    }
}

/// Formats the number of pipelines in each state.
fn summary(pipelines: &[&Found]) -> String {
    let mut states: Vec<(String, usize)> = Vec::new();
    for found in pipelines {
        let state = state(found).unwrap_or_else(|| "unknown".to_owned());
        match states.iter_mut().find(|(known, _)| *known == state) {
            Some((_, count)) => *count += 1,
            None => states.push((state, 1)),
        }
    }
    let counts: Vec<_> = states
        .iter()
        .map(|(state, count)| format!("{count} {state}"))
        .collect();
    let unhealthy = pipelines.iter().filter(|found| !found.is_healthy()).count();
    let health = match unhealthy {
        0 => "all healthy".to_owned(),
        unhealthy => format!("{unhealthy} with problems"),
    };
    let line = format!(
        "{} pipelines, {health}: {}",
        pipelines.len(),
        counts.join(", ")
    );
    Escaped(line).to_string()
}

/// Returns the pipeline's state as reported by the running process. If there is no report, returns
/// the slot's state according to the database.
fn state(found: &Found) -> Option<String> {
    let slot_state = || match found.database.as_ref()?.active? {
        true => Some("in use".to_owned()),
        false => Some("not read".to_owned()),
    };
    let connector = found.connector.as_ref();
    let reported = connector.map(|status| status.summary.state.clone());
    reported.or_else(slot_state)
}

fn table(pipelines: &[&Found], now: f64) -> Vec<String> {
    let mut rows = vec![TITLES.map(str::to_owned)];
    let escaped = |cell: String| Escaped(cell).to_string();
    rows.extend(pipelines.iter().map(|found| row(found, now).map(escaped)));
    let mut widths = [0; TITLES.len()];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.chars().count().max(*width);
        }
    }
    let line = |row: &[String; TITLES.len()]| {
        let cells = row.iter().zip(widths).zip(IS_NUMBER);
        let cells: Vec<_> = cells
            .map(|((cell, width), is_number)| match is_number {
                true => format!("{cell:>width$}"),
                false => format!("{cell:width$}"),
            })
            .collect();
        cells.join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

fn notes(pipelines: &[&Found], report: &StatusReport) -> Vec<String> {
    let mut notes = Vec::new();
    if let Some((error, at)) = report.connector.failed_reload() {
        let age = rounded::age((report.now - at).max(0.0));
        notes.push(format!(
            "configuration: the reload {age} ago failed, and the pipelines are still running with the previous \
             configuration: {error}. Correct the configuration, and reload it"
        ));
    }
    for found in pipelines {
        let connector = found.connector.as_ref();
        let snapshot = connector.and_then(|status| status.snapshot);
        if let Some(snapshot) = snapshot.filter(Snapshot::lasts) {
            let (phase, rows) = (snapshot.phase.name(), snapshot.rows);
            let total = snapshot.expected.map(|rows| format!(" of about {rows}"));
            let total = total.unwrap_or_default();
            notes.push(format!(
                "{}: snapshot: {phase}, {rows}{total} rows read",
                found.name
            ));
        }
        notes.extend(found.connector.as_ref().and_then(dead_letters));
        let problems = found.problems.iter();
        notes.extend(problems.map(|problem| format!("{}: {problem}", found.name)));
    }
    notes.extend(report.unused_slots.iter().cloned());
    if pipelines.is_empty() {
        notes.push(match &report.connector.error {
            Some(error) => format!(
                "no response from Walpost at {}: {error}",
                report.connector.address.as_deref().unwrap_or(UNKNOWN)
            ),
            None => "no pipeline with this name was found".to_owned(),
        });
    }
    notes
}

/// Returns the number of dead letters, and a description of the last one.
fn dead_letters(status: &PipelineStatus) -> Option<String> {
    let last = status.last_dead_letter.as_ref()?;
    let count = match status.dead_letters.total() {
        1 => "1 dead letter".to_owned(),
        count => format!("{count} dead letters"),
    };
    Some(format!(
        "{}: {count} in topic {:?} since the process started; the last one is for the event at {}: {}",
        status.about.name, last.topic, last.position, last.reason
    ))
}

fn row(found: &Found, now: f64) -> [String; TITLES.len()] {
    let (connector, database) = (found.connector.as_ref(), found.database.as_ref());
    let shown = |known: Option<String>| known.unwrap_or_else(|| UNKNOWN.to_owned());
    let health = connector.and_then(|status| status.slot_health.as_ref());
    // Prefer the values from the database, which are more recent.
    let lag = database
        .and_then(|database| database.lag_bytes)
        .or_else(|| connector?.lag.bytes);
    let retained = database
        .and_then(|database| database.retained_bytes)
        .or_else(|| connector?.lag.retained_bytes);
    let confirmed = connector
        .and_then(|status| status.positions.confirmed)
        .or_else(|| database?.confirmed);
    let wal_status = database
        .and_then(|database| database.wal_status.clone())
        .or_else(|| health?.wal_status.clone());
    let safe = database
        .and_then(|database| database.safe_wal_bytes)
        .or_else(|| health?.safe_wal_bytes);
    let elapsed = connector.map(|status| rounded::age((now - status.summary.since).max(0.0)));
    [
        found.name.clone(),
        shown(state(found)),
        shown(elapsed),
        shown(
            connector
                .and_then(|status| status.lag.seconds)
                .map(rounded::duration),
        ),
        shown(
            connector
                .and_then(|status| status.recent.commit_to_delivery_p99)
                .map(rounded::duration),
        ),
        shown(connector.map(|status| format!("{:.0}", status.recent.events_per_second))),
        shown(retained.map(bytes)),
        shown(safe.map(|safe| bytes(u64::try_from(safe).unwrap_or_default()))),
        shown(wal_status),
        shown(lag.map(bytes)),
        shown(connector.map(|status| status.events.in_flight.to_string())),
        shown(confirmed.map(|lsn| lsn.to_string())),
    ]
}

fn bytes(number: u64) -> String {
    ByteSize::b(number).to_string()
}
