//! Checks the slot against its WAL [`budget`](super::budget), and logs messages or drops the slot
//! if necessary.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use bytesize::ByteSize;
use tokio::sync::watch;
use tokio::time::timeout;
use tracing::{debug, error, info, warn};

use super::budget::{Budget, Finding, OnMax, WalBudget};
use super::error::{SlotDropped, WalBudgetError};
use crate::delivery::stats::PipelineStats;
use crate::model::dropped_slot::{DroppedSlot, replay_command};
use crate::model::rounded::Elapsed;
use crate::model::set_aside::SetAside;
use crate::pipeline::database::{CatalogQueries, Database, open_catalog_of_owner};
use crate::pipeline::settings::SnapshotMode;
use crate::pipeline::settings::{Delivery, PipelineSettings};
use crate::postgres::catalog::drop_slot::Outcome;
use crate::postgres::catalog::{CatalogError, Observed, Problem, SlotInUse};
use crate::postgres::target::Target;

/// The slot being monitored, and its WAL budget. Shared by all sessions of a pipeline.
#[derive(Clone)]
pub(crate) struct Watched {
    pipeline: String,
    pub(crate) target: Target,
    limits: WalBudget,
    budget: Arc<Mutex<Budget>>,
    stats: Arc<PipelineStats>,
    sets_tables_aside: bool,
    /// The journal entries about tables that are set aside (not delivered because of an error), as
    /// of the last check.
    set_aside: Arc<watch::Sender<Vec<SetAside>>>,
    /// Whether the slot must be dropped.
    is_over_budget: Arc<watch::Sender<bool>>,
}

impl Watched {
    /// Creates an instance for the slot in `settings`.
    pub(crate) fn new(settings: &PipelineSettings, stats: &Arc<PipelineStats>) -> Self {
        Self {
            pipeline: settings.name.clone(),
            target: settings.target.clone(),
            limits: settings.wal_budget,
            budget: Arc::new(Mutex::new(Budget::new(settings.wal_budget))),
            stats: Arc::clone(stats),
            sets_tables_aside: settings.sets_tables_aside(),
            set_aside: Arc::new(watch::Sender::default()),
            is_over_budget: Arc::new(watch::Sender::default()),
        }
    }

    /// Clears the flag that indicates that the slot must be dropped. Called when a session starts,
    /// because that session has not checked the slot yet.
    pub(crate) fn begin_session(&self) {
        self.is_over_budget.send_replace(false);
    }

    /// Sets the flag that indicates that the slot must be dropped.
    pub(crate) fn mark_over_budget(&self) {
        self.is_over_budget.send_replace(true);
    }

    /// Waits until the slot must be dropped.
    pub(crate) async fn wait_until_over_budget(&self) {
        // `wait_for` fails only if the sender has been dropped, and the sender is a field of
        // `self`.
        let _ = self
            .is_over_budget
            .subscribe()
            .wait_for(|is_over_budget| *is_over_budget)
            .await;
    }

    /// Returns a receiver that is notified of changes to the journal entries about tables that are
    /// set aside (not delivered because of an error).
    pub(crate) fn set_aside(&self) -> watch::Receiver<Vec<SetAside>> {
        self.set_aside.subscribe()
    }

    /// If the publication has a problem that requires halting the pipeline, returns the problem.
    pub(crate) fn publication_problem(&self, observed: &Observed) -> Option<Problem> {
        let is_tolerated = |problem: &Problem| {
            self.sets_tables_aside && matches!(problem, Problem::OtherTables { .. })
        };
        observed
            .publication_problem(&self.target)
            .filter(|problem| !is_tolerated(problem))
            .or_else(|| observed.publisher_problem(&self.target))
    }

    /// Creates an instance that never drops the slot, regardless of the settings. Otherwise the
    /// same as [`Watched::new`].
    pub(crate) fn holding(settings: &PipelineSettings, stats: &Arc<PipelineStats>) -> Self {
        let limits = WalBudget {
            on_max: OnMax::Hold,
            ..settings.wal_budget
        };
        Self {
            limits,
            budget: Arc::new(Mutex::new(Budget::new(limits))),
            ..Self::new(settings, stats)
        }
    }

    /// Queries the slot's state, records it for monitoring, and logs a message if the slot exceeds
    /// its WAL budget. Returns whether the slot must be dropped.
    pub(crate) async fn check_slot(
        &self,
        catalog: &impl CatalogQueries,
    ) -> Result<bool, CatalogError> {
        let vitals = catalog.vitals(&self.pipeline, &self.target).await?;
        let retained = vitals.retained_bytes();
        if let Some(entries) = &vitals.set_aside {
            self.set_aside.send_if_modified(|read| {
                let has_changed = read != entries;
                if has_changed {
                    read.clone_from(entries);
                }
                has_changed
            });
        }
        self.stats.record_database_state(vitals);
        let Some(retained) = retained else {
            return Ok(false);
        };
        let mut budget = self.budget.lock().unwrap_or_else(PoisonError::into_inner);
        let finding = budget.evaluate(retained, Instant::now());
        self.log_finding(retained, finding);
        Ok(finding == Finding::Drop)
    }

    /// Returns the pipeline's name.
    pub(crate) fn pipeline(&self) -> &str {
        &self.pipeline
    }

    /// Returns the pipeline's counters.
    pub(crate) fn stats(&self) -> &PipelineStats {
        &self.stats
    }

    /// Returns the error with which a session ends if the slot must be dropped.
    pub(crate) fn over_budget_error(&self) -> WalBudgetError {
        WalBudgetError::OverBudget {
            slot: self.target.slot.clone(),
            max: ByteSize::b(self.limits.max_bytes.unwrap_or_default()),
        }
    }

    fn log_finding(&self, retained: u64, finding: Finding) {
        let (pipeline, slot) = (&self.pipeline, &self.target.slot);
        let size = |limit: Option<u64>| ByteSize::b(limit.unwrap_or_default());
        let (warn, max) = (size(self.limits.warn_bytes), size(self.limits.max_bytes));
        let retained = ByteSize::b(retained);
        let skip = self.target.skip("POSITION");
        match finding {
            Finding::None | Finding::Drop => {}
            Finding::Warn(lasts) => warn!(
                pipeline, slot, retained = %retained, wal_budget.warn = %warn, elapsed = %Elapsed(lasts),
                "the slot retains more WAL than wal_budget.warn. If events are not being delivered, fix the problem with Kafka. \
                 Otherwise, look for a transaction that has been open for a long time (xact_start in pg_stat_activity)"
            ),
            Finding::Held(lasts) => error!(
                pipeline, slot, retained = %retained, wal_budget.max = %max, elapsed = %Elapsed(lasts),
                "the slot retains more WAL than wal_budget.max, but is not dropped: no events are lost, but the disk may fill up. Fix the \
                 cause. To skip events that can't be delivered: {skip}. To free disk space and send the events again from the table \
                 later, set wal_budget.on_max = \"drop-slot\". To make PostgreSQL limit the retained WAL and invalidate the slot, set \
                 max_slot_wal_keep_size"
            ),
            Finding::BelowMax(lasted) => info!(
                pipeline, slot, retained = %retained, wal_budget.max = %max, elapsed = %Elapsed(lasted),
                "the WAL that the slot retains no longer exceeds wal_budget.max, but still exceeds wal_budget.warn"
            ),
            Finding::Within(lasted) => info!(
                pipeline, slot, retained = %retained, elapsed = %Elapsed(lasted),
                "the slot is within its WAL budget again"
            ),
        }
    }
}

/// Drops a slot that retains more WAL than `wal_budget.max`. Always returns an error: either one
/// that describes the dropped slot, or the reason why it was not dropped.
pub(crate) async fn drop_slot(
    settings: &PipelineSettings,
    database: &impl Database,
    watched: &Watched,
) -> WalBudgetError {
    let (pipeline, target) = (&settings.name, &settings.target);
    let (Some(max), OnMax::DropSlot) = (settings.wal_budget.max_bytes, settings.wal_budget.on_max)
    else {
        return watched.over_budget_error();
    };
    let max_size = ByteSize::b(max);
    warn!(
        pipeline, slot = target.slot, wal_budget.max = %max_size,
        "the slot retains more WAL than wal_budget.max; dropping the slot because wal_budget.on_max is \"drop-slot\""
    );
    let drop_slot = async {
        let catalog = open_catalog_of_owner(settings, database).await?;
        let copies = settings.snapshot == SnapshotMode::Initial;
        let outcome = catalog
            .drop_slot_over_budget(pipeline, target, max, copies)
            .await?;
        if !matches!(outcome, Outcome::Dropped) {
            return Ok((outcome, Vec::new()));
        }
        let entries = catalog.dropped_slots(pipeline, target).await?;
        // Update the status for monitoring, because the process may keep running other pipelines.
        if let Err(error) = watched.check_slot(&catalog).await {
            debug!(%error, "catalog query failed");
        }
        Ok((outcome, entries))
    };
    match timeout(settings.link_timeout, drop_slot).await {
        Ok(Ok((Outcome::Dropped, entries))) => {
            let why = format!("The slot retained more WAL than wal_budget.max ({max_size}). ");
            slot_dropped(settings, &entries, why)
        }
        Ok(Ok((Outcome::InUse(pid), _))) => SlotInUse {
            slot: target.slot.clone(),
            pid,
        }
        .into(),
        Ok(Ok((Outcome::Changed, _))) => watched.over_budget_error(),
        Ok(Err(error)) => WalBudgetError::Catalog(error),
        Err(_) => watched.over_budget_error(),
    }
}

fn slot_dropped(
    settings: &PipelineSettings,
    entries: &[DroppedSlot],
    why: String,
) -> WalBudgetError {
    let described: Vec<_> = entries.iter().map(DroppedSlot::describe).collect();
    WalBudgetError::SlotDropped(Box::new(SlotDropped {
        slot: settings.target.slot.clone(),
        init: settings.target.init_slot(),
        replay: replay_command(&settings.target.commands, None),
        why,
        what: described.join("; "),
        outbox: settings.target.outbox.to_string(),
        adopt: match settings.delivery {
            Delivery::AtLeastOnce => String::new(),
            Delivery::ExactlyOnce(_) => {
                format!("accept its position: {}; ", settings.adopt())
            }
        },
    }))
}

/// If the slot does not exist because Walpost dropped it, returns an error that describes the
/// dropped slot and its missing events. Returns `None` for any other problem.
pub(crate) async fn dropped_slot_error(
    settings: &PipelineSettings,
    catalog: &impl CatalogQueries,
    problem: &Problem,
) -> Option<WalBudgetError> {
    if !matches!(problem, Problem::NoSlot { .. }) {
        return None;
    }
    let entries = catalog
        .dropped_slots(&settings.name, &settings.target)
        .await;
    let mut entries = entries.ok()?;
    entries.retain(|entry| !entry.left_publication);
    if entries.is_empty() {
        return None;
    }
    Some(slot_dropped(settings, &entries, String::new()))
}

/// Logs which dropped slots have events that have not been replayed yet.
///
/// # Errors
/// Returns an error if reading the journal failed and the settings allow the slot to be dropped.
pub(crate) async fn log_dropped_slots(
    settings: &PipelineSettings,
    catalog: &impl CatalogQueries,
) -> Result<(), CatalogError> {
    let (pipeline, target) = (&settings.name, &settings.target);
    if target.outbox.is_messages() {
        return Ok(());
    }
    match catalog.dropped_slots(pipeline, target).await {
        Ok(entries) => {
            for entry in entries {
                warn!(
                    pipeline,
                    "{} have not been sent again yet: {}. Until these events have been sent, rows of {} are not deleted. \
                     Send the events again: {}",
                    match entry.left_publication {
                        true =>
                            "events that were committed while the table was not in the publication",
                        false if entry.detached_partitions => {
                            "events of a partition that was detached (attach it first)"
                        }
                        false => "events of a dropped slot",
                    },
                    entry.describe(),
                    match &entry.table {
                        Some(table) => format!("table {table}"),
                        None => target.outbox.to_string(),
                    },
                    entry.replay(&target.commands)
                );
            }
        }
        Err(error) if settings.wal_budget.on_max == OnMax::DropSlot => return Err(error),
        Err(error) => debug!(pipeline, %error, "failed to look up dropped slots"),
    }
    Ok(())
}
