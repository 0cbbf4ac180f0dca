//! Runs maintenance passes alongside a pipeline, on a separate connection. A failed pass never
//! stops delivery.

use std::time::{Duration, Instant};

use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tracing::{debug, info, warn};

use super::{RetentionError, RetentionReport, pass_of_table};
use crate::model::outage::{Outage, OutageMessage};
use crate::model::rounded::Elapsed;
use crate::pipeline::database::open_as_owner;
use crate::pipeline::settings::PipelineSettings;
use crate::postgres::catalog::CatalogError;

/// Maximum interval between two maintenance passes. The interval is shorter if the retention period
/// is short.
const PASS_INTERVAL_MAX: Duration = Duration::from_secs(60);

/// How long a maintenance pass over one table may take before its connection is closed.
const PASS_TIMEOUT: Duration = Duration::from_secs(60);

/// Maximum number of problems that are logged individually. Without a limit, a problem that
/// affects thousands of tables would flood the log.
const LOGGED_PROBLEMS_MAX: usize = 10;

/// A handle to the task that runs maintenance passes. Dropping the handle aborts the task.
#[derive(Debug)]
pub(crate) struct Maintenance(JoinHandle<()>);

impl Drop for Maintenance {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// If a retention period is configured, starts a task on the current runtime that runs maintenance
/// passes over the pipeline's tables.
#[must_use]
pub(crate) fn start(settings: &PipelineSettings) -> Option<Maintenance> {
    let keep = settings.retention.keep?;
    let every = (keep / 10).clamp(Duration::from_secs(1), PASS_INTERVAL_MAX);
    let settings = settings.clone();
    Some(Maintenance(tokio::spawn(async move {
        let mut outage = Outage::default();
        loop {
            log_problems(&settings, &mut outage, pass(&settings).await);
            sleep(every).await;
        }
    })))
}

/// Performs a maintenance pass over all tables. Logs the steps that were completed or have to wait,
/// and returns descriptions of the problems.
async fn pass(settings: &PipelineSettings) -> Vec<String> {
    let opened = async {
        // The slot's position determines which rows count as delivered, so check that the slot
        // belongs to the pipeline.
        let catalog = open_as_owner(settings).await?;
        let tables = super::tables(&catalog, &settings.target).await?;
        Ok((catalog, tables))
    };
    let (mut catalog, tables) = match with_timeout(opened).await {
        Ok(opened) => opened,
        Err(reason) => return vec![reason],
    };
    let mut problems = Vec::new();
    for target in &tables {
        let pass = pass_of_table(&catalog, settings, target, tables.len(), false);
        match with_timeout(pass).await {
            Ok(report) => problems.extend(log_report(&settings.name, report)),
            // Open a new connection, so that a failure or a query that is still running for one
            // table does not affect the next table.
            Err(reason) => {
                problems.push(format!("{}: {reason}", target.outbox));
                catalog = match with_timeout(open_as_owner(settings)).await {
                    Ok(catalog) => catalog,
                    Err(reason) => {
                        problems.push(reason);
                        break;
                    }
                };
            }
        }
    }
    problems
}

async fn with_timeout<T>(
    operation: impl Future<Output = Result<T, CatalogError>>,
) -> Result<T, String> {
    match timeout(PASS_TIMEOUT, operation).await {
        Ok(done) => done.map_err(|error| error.to_string()),
        Err(_) => Err(format!(
            "no response from PostgreSQL within {PASS_TIMEOUT:?}"
        )),
    }
}

/// Logs the steps of a maintenance pass that were completed or have to wait, and returns
/// descriptions of the problems.
fn log_report(pipeline: &str, report: RetentionReport) -> Vec<String> {
    for done in report.done {
        info!(pipeline, "maintenance: {done}");
    }
    for wait in report.waits {
        debug!(pipeline, "maintenance: {wait}");
    }
    // Ignore tables that another Walpost process is maintaining: this is normal if a standby
    // process runs.
    let mut problems = report.problems;
    problems.retain(|problem| !matches!(problem, RetentionError::Claimed(_)));
    problems.iter().map(ToString::to_string).collect()
}

fn log_problems(settings: &PipelineSettings, outage: &mut Outage, mut problems: Vec<String>) {
    let pipeline = &settings.name;
    if problems.is_empty() {
        if let Some(lasted) = outage.end(Instant::now()) {
            info!(pipeline, elapsed = %Elapsed(lasted), "maintenance is succeeding again");
        }
        return;
    }
    let more = problems.len().saturating_sub(LOGGED_PROBLEMS_MAX);
    if more > 0 {
        problems.truncate(LOGGED_PROBLEMS_MAX);
        problems.push(format!(
            "{more} more problems. To print all problems: {}",
            settings.target.commands.print(["maintain", "--dry-run"])
        ));
    }
    let message = outage.failed(Instant::now());
    for problem in problems {
        match message {
            OutageMessage::Started => warn!(pipeline, "maintenance failed: {problem}"),
            OutageMessage::Ongoing(lasts, _) => {
                warn!(pipeline, elapsed = %Elapsed(lasts), "maintenance is still failing: {problem}")
            }
            OutageMessage::Suppressed => {
                debug!(pipeline, "maintenance is still failing: {problem}")
            }
        }
    }
}
