//! Runs retention alongside a pipeline, over its own connection. It never stops delivery.

use std::time::{Duration, Instant};

use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tracing::{debug, info, warn};

use super::{RetentionError, RetentionReport, pass_of_table};
use crate::model::outage::{Outage, OutageMessage};
use crate::model::rounded::Elapsed;
use crate::pipeline::settings::PipelineSettings;
use crate::postgres::catalog::{Catalog, CatalogError};

/// Maximum interval between two passes. The interval is smaller if the retention is short.
const PASS_INTERVAL_MAX: Duration = Duration::from_secs(60);

/// How long the pass over one table may take before its connection is closed.
const PASS_TIMEOUT: Duration = Duration::from_secs(60);

/// Maximum number of problems that are logged with a line each, because thousands of tables can
/// have the same problem.
const LOGGED_PROBLEMS_MAX: usize = 10;

/// Running passes, which end when this is dropped.
#[derive(Debug)]
pub(crate) struct Maintenance(JoinHandle<()>);

impl Drop for Maintenance {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Starts passes over the pipeline's tables on the current runtime, if a retention is configured.
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

/// Performs a pass, logs what was done and what it waits for, and returns the problems.
async fn pass(settings: &PipelineSettings) -> Vec<String> {
    let opened = async {
        let catalog = Catalog::open(&settings.postgres).await?;
        let tables = super::tables(&catalog, &settings.target).await?;
        Ok((catalog, tables))
    };
    let (mut catalog, tables) = match in_time(opened).await {
        Ok(opened) => opened,
        Err(reason) => return vec![reason],
    };
    let mut troubles = Vec::new();
    for target in &tables {
        let pass = pass_of_table(&catalog, settings, target, tables.len(), false);
        match in_time(pass).await {
            Ok(report) => troubles.extend(log_report(&settings.name, report)),
            // A problem with one table, or a connection that is still busy with it, does not affect
            // the next table.
            Err(reason) => {
                troubles.push(format!("{}: {reason}", target.outbox));
                catalog = match in_time(Catalog::open(&settings.postgres)).await {
                    Ok(catalog) => catalog,
                    Err(reason) => {
                        troubles.push(reason);
                        break;
                    }
                };
            }
        }
    }
    troubles
}

async fn in_time<T>(asked: impl Future<Output = Result<T, CatalogError>>) -> Result<T, String> {
    match timeout(PASS_TIMEOUT, asked).await {
        Ok(done) => done.map_err(|error| error.to_string()),
        Err(_) => Err(format!("no answer from PostgreSQL within {PASS_TIMEOUT:?}")),
    }
}

/// Logs the result of a pass, and returns the problems.
fn log_report(pipeline: &str, report: RetentionReport) -> Vec<String> {
    for done in report.done {
        info!(pipeline, "maintenance: {done}");
    }
    for wait in report.waits {
        debug!(pipeline, "maintenance: {wait}");
    }
    // A hot standby maintains the same table.
    let mut troubles = report.problems;
    troubles.retain(|trouble| !matches!(trouble, RetentionError::Claimed(_)));
    troubles.iter().map(ToString::to_string).collect()
}

fn log_problems(settings: &PipelineSettings, outage: &mut Outage, mut troubles: Vec<String>) {
    let pipeline = &settings.name;
    if troubles.is_empty() {
        if let Some(lasted) = outage.end(Instant::now()) {
            info!(pipeline, elapsed = %Elapsed(lasted), "maintenance succeeds again");
        }
        return;
    }
    let more = troubles.len().saturating_sub(LOGGED_PROBLEMS_MAX);
    if more > 0 {
        troubles.truncate(LOGGED_PROBLEMS_MAX);
        troubles.push(format!(
            "{more} more. To have all printed: {}",
            settings.target.commands.print(["maintain", "--dry-run"])
        ));
    }
    let say = outage.failed(Instant::now());
    for trouble in troubles {
        match say {
            OutageMessage::Started => warn!(pipeline, "maintenance failed: {trouble}"),
            OutageMessage::Ongoing(lasts, _) => {
                warn!(pipeline, elapsed = %Elapsed(lasts), "maintenance still fails: {trouble}")
            }
            OutageMessage::Suppressed => debug!(pipeline, "maintenance still fails: {trouble}"),
        }
    }
}
