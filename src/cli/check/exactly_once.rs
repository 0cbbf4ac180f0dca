//! The additional requirements of exactly-once delivery.

use super::findings::{Outcome, Report, outcome_of};
use crate::delivery::checkpoint::HistoryError;
use crate::kafka::examine::Examined;
use crate::kafka::properties::describe;
use crate::pipeline::recovery;
use crate::pipeline::settings::PipelineSettings;
use crate::postgres::catalog::slot_state::FoundState;
use crate::postgres::catalog::{Catalog, CatalogError};

/// The name of these checks.
const EXACTLY_ONCE: &str = "exactly-once";

/// Checks the additional requirements of exactly-once delivery.
pub(super) async fn exactly_once(settings: &PipelineSettings, report: &mut Report<'_>) {
    let Some(checkpoints) = settings.checkpoints() else {
        return;
    };
    let examined = match checkpoints.clone().examine().await {
        Ok(examined) => examined,
        Err(error) => return report.add(EXACTLY_ONCE, Outcome::Unreachable, describe(&error)),
    };
    brokers_for_transactions(&examined, report);
    let found = checkpoints.read_last().await;
    if matches!(found, Ok(None)) && is_untouched(settings).await {
        let message = "there is no checkpoint, and nothing was read from the slot since walpost init has made it: the first start \
             makes one";
        return report.add(EXACTLY_ONCE, Outcome::Ok, message);
    }
    if examined.topic_replicas.is_none() && matches!(found, Ok(None)) {
        let adopt = settings.adopt();
        let message = format!(
            "the topic for checkpoints is missing. Before the first start, create it: {adopt}"
        );
        return report.add(EXACTLY_ONCE, Outcome::Failure, message);
    }
    match found {
        Ok(Some(checkpoint)) => {
            let slot = &settings.target.slot;
            if checkpoint.slot == *slot {
                let message = format!("there is a checkpoint, safe up to {}", checkpoint.safe_lsn);
                report.add(EXACTLY_ONCE, Outcome::Ok, message);
            } else {
                let (found, expected) = (slot.clone(), checkpoint.slot);
                let error = HistoryError::OtherSlot { found, expected };
                report.add(EXACTLY_ONCE, Outcome::Failure, error);
            }
        }
        Ok(None) => report.add(
            EXACTLY_ONCE,
            Outcome::Failure,
            format!(
                "there is no checkpoint. Before the first start: {}",
                settings.adopt()
            ),
        ),
        Err(error) => report.add(
            EXACTLY_ONCE,
            outcome_of(recovery::sink_remedy(&error)),
            error,
        ),
    }
}

/// Returns whether nothing was read from the slot since `walpost init` created it. Returns false if
/// a query fails, which the checks of the database report.
async fn is_untouched(settings: &PipelineSettings) -> bool {
    let asked = async {
        let catalog = Catalog::open(&settings.postgres).await?;
        let of = catalog.slot_of(&settings.name, &settings.target).await?;
        let slot = catalog.slot(&settings.target.slot).await?;
        let state = match catalog.slot_state(&of).await? {
            FoundState::State(state) => state,
            FoundState::Unusable(_) => None,
        };
        Ok::<_, CatalogError>(slot.zip(state))
    };
    let found = asked.await.ok().flatten();
    found.is_some_and(|(slot, state)| state.is_untouched(slot.confirmed))
}

fn brokers_for_transactions(examined: &Examined, report: &mut Report<'_>) {
    let Examined {
        brokers, timeout, ..
    } = *examined;
    if examined.timeout_max.is_some_and(|max| timeout > max) {
        let message = format!(
            "transaction.timeout.ms is {timeout}, and the brokers allow {}: lower it in [kafka], or raise \
             transaction.max.timeout.ms of the brokers",
            examined.timeout_max.unwrap_or_default()
        );
        report.add(EXACTLY_ONCE, Outcome::Failure, message);
    }
    let mut warnings = Vec::new();
    if brokers > 1 && examined.topic_replicas == Some(1) {
        warnings.push(
            "the topic for checkpoints has one replica: if its broker is lost, so is the checkpoint, and walpost \
             halts. Give it more: kafka-reassign-partitions.sh",
        );
    }
    if examined.topic_replicas > Some(1) && examined.topic_min_insync == Some(1) {
        warnings.push(
            "min.insync.replicas of the topic for checkpoints is 1: a checkpoint that one broker alone has can be \
             lost. Set 2: kafka-configs.sh --alter --add-config min.insync.replicas=2",
        );
    }
    if brokers > 1 && examined.state_replicas == Some(1) {
        warnings.push(
            "transaction.state.log.replication.factor of the brokers is 1: if the broker that has a transaction's state \
             is lost, nobody can end it. Set 3, before the first transaction",
        );
    }
    for warning in &warnings {
        report.add(EXACTLY_ONCE, Outcome::Warning, warning);
    }
    if warnings.is_empty() {
        report.add(
            EXACTLY_ONCE,
            Outcome::Ok,
            "the brokers' settings for transactions fit",
        );
    }
}
