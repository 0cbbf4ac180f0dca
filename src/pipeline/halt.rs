//! Records a halt in the database, so that `walpost status` can show it even on another machine or
//! after the process has exited.

use std::time::Duration;

use tokio::time::timeout;
use tracing::warn;

use super::database::Database;
use super::settings::PipelineSettings;
use crate::model::last_halt::LastHalt;

/// How long to wait for the database to record the halt.
const RECORD_TIMEOUT: Duration = Duration::from_secs(3);

/// Records why the pipeline halts. If the database does not respond, or the role lacks the required
/// privilege, logs a warning instead.
pub(crate) async fn record_halt(settings: &PipelineSettings, reason: &str) {
    let halt = LastHalt::now(reason);
    let recorded = async {
        let catalog = settings.postgres.catalog().await?;
        let PipelineSettings {
            name,
            defined_by,
            target,
            ..
        } = settings;
        catalog.record_halt(name, *defined_by, target, &halt).await
    };
    let why = match timeout(RECORD_TIMEOUT, recorded).await {
        Ok(Ok(None)) => return,
        Ok(Ok(Some(why))) => why,
        Ok(Err(error)) => error.to_string(),
        Err(_) => format!("no response within {RECORD_TIMEOUT:?}"),
    };
    // No warning is needed if the pipeline halted because the database is unreachable: `reason`
    // then already contains the error message `why`.
    if reason.contains(&why) {
        return;
    }
    warn!(
        pipeline = settings.name,
        "failed to record the halt in walpost.slot_state, so walpost status shows the reason only while this process runs: {why}"
    );
}
