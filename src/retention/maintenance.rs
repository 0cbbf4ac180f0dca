//! Retention beside a pipeline, over a connection of its own. It never stops delivery.

use std::time::{Duration, Instant};

use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tracing::{debug, info, warn};

use super::{Report, RetentionError};
use crate::model::outage::{Outage, Say};
use crate::model::rounded::Elapsed;
use crate::pipeline::settings::PipelineSettings;
use crate::postgres::catalog::{Catalog, CatalogError};

/// At most this long between two passes; less where the retention is short.
const EVERY: Duration = Duration::from_secs(60);

/// How long a pass may take before its connection is given up.
const LIMIT: Duration = Duration::from_secs(60);

/// Passes at work. They end when this is dropped.
#[derive(Debug)]
pub(crate) struct Maintenance(JoinHandle<()>);

impl Drop for Maintenance {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Starts passes over the pipeline's table on this runtime, where a retention is set.
#[must_use]
pub(crate) fn beside(settings: &PipelineSettings) -> Option<Maintenance> {
    let keep = settings.retention.keep?;
    let every = (keep / 10).clamp(Duration::from_secs(1), EVERY);
    let settings = settings.clone();
    Some(Maintenance(tokio::spawn(async move {
        let mut outage = Outage::default();
        loop {
            tell(&settings.name, &mut outage, pass(&settings).await);
            sleep(every).await;
        }
    })))
}

/// As far as it came, or why it came nowhere.
async fn pass(settings: &PipelineSettings) -> Result<Report, String> {
    let pass = async {
        let catalog = Catalog::open(&settings.postgres).await?;
        super::pass(&catalog, &settings.target, settings.retention, false).await
    };
    match timeout(LIMIT, pass).await {
        Ok(done) => done.map_err(|error: CatalogError| error.to_string()),
        Err(_) => Err(format!("no answer from PostgreSQL within {LIMIT:?}")),
    }
}

fn tell(pipeline: &str, outage: &mut Outage, pass: Result<Report, String>) {
    let troubles: Vec<_> = match pass {
        Ok(report) => {
            for done in report.done {
                info!(pipeline, "maintenance: {done}");
            }
            for wait in report.waits {
                debug!(pipeline, "maintenance: {wait}");
            }
            // A hot standby keeps the same table.
            let mut troubles = report.troubles;
            troubles.retain(|trouble| !matches!(trouble, RetentionError::Claimed(_)));
            troubles.iter().map(ToString::to_string).collect()
        }
        Err(reason) => vec![reason],
    };
    if troubles.is_empty() {
        if let Some(lasted) = outage.ended(Instant::now()) {
            info!(pipeline, elapsed = %Elapsed(lasted), "maintenance succeeds again");
        }
        return;
    }
    let say = outage.failed(Instant::now());
    for trouble in troubles {
        match say {
            Say::Begins => warn!(pipeline, "maintenance failed: {trouble}"),
            Say::Lasts(lasts, _) => {
                warn!(pipeline, elapsed = %Elapsed(lasts), "maintenance still fails: {trouble}")
            }
            Say::Nothing => debug!(pipeline, "maintenance still fails: {trouble}"),
        }
    }
}
