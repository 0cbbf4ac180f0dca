//! Checks the additional requirements for exactly-once delivery.

use super::findings::{Outcome, Report, outcome_of};
use crate::delivery::checkpoint::HistoryError;
use crate::kafka::examine::Examined;
use crate::kafka::properties::describe;
use crate::pipeline::recovery;
use crate::pipeline::settings::PipelineSettings;
use crate::postgres::catalog::slot_state::FoundState;
use crate::postgres::catalog::{Catalog, CatalogError};

/// The name of the check in findings about exactly-once delivery.
const EXACTLY_ONCE: &str = "exactly-once";

/// Checks the additional requirements for exactly-once delivery.
pub(super) async fn exactly_once(settings: &PipelineSettings, report: &mut Report<'_>) {
    let Some(checkpoints) = settings.checkpoints() else {
        return;
    };
    let examined = match checkpoints.clone().examine().await {
        Ok(examined) => examined,
        Err(error) => return report.add(EXACTLY_ONCE, Outcome::Unreachable, describe(&error)),
    };
    transaction_settings(&examined, report);
    let found = checkpoints.read_last().await;
    if matches!(found, Ok(None)) && is_unread(settings).await {
        let message = "there is no checkpoint yet; the first run will create one, because the slot has not been read since \
             walpost init created it";
        return report.add(EXACTLY_ONCE, Outcome::Ok, message);
    }
    if examined.topic_replicas.is_none() && matches!(found, Ok(None)) {
        let adopt = settings.adopt();
        let message = format!(
            "the checkpoint topic does not exist. Before the first run, create the topic and a checkpoint: {adopt}"
        );
        return report.add(EXACTLY_ONCE, Outcome::Failure, message);
    }
    match found {
        Ok(Some(checkpoint)) => {
            let slot = &settings.target.slot;
            if checkpoint.slot == *slot {
                let message = format!(
                    "a checkpoint exists and covers events up to {}",
                    checkpoint.safe_lsn
                );
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
                "there is no checkpoint. Before the first run, set one: {}",
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

/// Returns true if the slot has not been read since `walpost init` created it. Returns false if a
/// query fails, because the database checks report the error.
async fn is_unread(settings: &PipelineSettings) -> bool {
    let query = async {
        let catalog = Catalog::open(&settings.postgres).await?;
        let identity = catalog
            .slot_identity(&settings.name, &settings.target)
            .await?;
        let slot = catalog.slot(&settings.target.slot).await?;
        let state = match catalog.slot_state(&identity).await? {
            FoundState::State(state) => state,
            FoundState::Unusable(_) => None,
        };
        Ok::<_, CatalogError>(slot.zip(state))
    };
    let found = query.await.ok().flatten();
    found.is_some_and(|(slot, state)| state.is_untouched(slot.confirmed))
}

/// Reports settings of the brokers and the checkpoint topic that are unsuitable for transactions.
fn transaction_settings(examined: &Examined, report: &mut Report<'_>) {
    let Examined {
        brokers, timeout, ..
    } = *examined;
    if examined.timeout_max.is_some_and(|max| timeout > max) {
        let message = format!(
            "transaction.timeout.ms is {timeout}, but the brokers allow at most {}. Lower transaction.timeout.ms in [kafka], or \
             raise the brokers' transaction.max.timeout.ms",
            examined.timeout_max.unwrap_or_default()
        );
        report.add(EXACTLY_ONCE, Outcome::Failure, message);
    }
    let mut warnings = Vec::new();
    if brokers > 1 && examined.topic_replicas == Some(1) {
        warnings.push(
            "the checkpoint topic has only one replica: if the broker that stores this replica is lost, the checkpoint \
             is lost too, and Walpost halts. Add replicas: kafka-reassign-partitions.sh",
        );
    }
    if examined.topic_replicas > Some(1) && examined.topic_min_insync == Some(1) {
        warnings.push(
            "min.insync.replicas of the checkpoint topic is 1, so a checkpoint may be stored on only one broker, and \
             can be lost with it. Set min.insync.replicas to 2: kafka-configs.sh --alter --add-config \
             min.insync.replicas=2",
        );
    }
    if brokers > 1 && examined.state_replicas == Some(1) {
        warnings.push(
            "the brokers' transaction.state.log.replication.factor is 1: if the broker that stores the state of a transaction \
             is lost, the transaction can't be completed or aborted. Set the factor to 3 before the first transaction",
        );
    }
    for warning in &warnings {
        report.add(EXACTLY_ONCE, Outcome::Warning, warning);
    }
    if warnings.is_empty() {
        report.add(
            EXACTLY_ONCE,
            Outcome::Ok,
            "the brokers' settings are suitable for transactions",
        );
    }
}
