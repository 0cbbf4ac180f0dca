//! The first phase of startup: checks the pipeline's requirements. The next phase opens a
//! replication connection.

use std::collections::HashMap;

use tracing::{info, warn};

use super::Startup;
use super::connected::Connected;
use crate::delivery::checkpoint::{Checkpoint, ServerState};
use crate::pipeline::database::{CatalogQueries, Database};
use crate::pipeline::error::PipelineError;
use crate::pipeline::exactly_once::error::ExactlyOnceError;
use crate::pipeline::session::link::{Link, hold_slot};
use crate::pipeline::session::monitor::monitor_until_lost;
use crate::pipeline::settings::Delivery;
use crate::pipeline::snapshot;
use crate::pipeline::wal_budget::slot_monitor;
use crate::postgres::catalog::slot_state::{SlotIdentity, describe_move};
use crate::postgres::catalog::{
    CatalogError, Observed, ObservedTable, SlotInUse, unpublished_warning,
};
use crate::postgres::replication::Identity;
use crate::postgres::table::TableName;
use crate::postgres::target::{Outbox, Target};
use crate::sink::Sink;

/// Returns the publication's tables.
async fn published_tables(
    catalog: &impl CatalogQueries,
    observed: &Observed,
    target: &Target,
) -> Result<Vec<(TableName, ObservedTable)>, CatalogError> {
    match &observed.publication {
        Some(publication) if !publication.tables.is_empty() => {
            catalog
                .tables(&publication.tables, &target.publication)
                .await
        }
        _ => Ok(Vec::new()),
    }
}

/// The result of the first startup phase: the database meets the pipeline's requirements, and the
/// slot is free.
pub(super) struct Checked<C> {
    catalog: C,
    observed: Observed,
}

impl<C: CatalogQueries> Checked<C> {
    pub(super) async fn check<D: Database<Catalog = C>>(
        start: &mut Startup<'_, '_, D>,
    ) -> Result<Self, PipelineError> {
        let (settings, target) = (start.settings, &start.settings.target);
        let catalog = start.database.catalog().await?;
        start.session_state.access.record_catalog_access();
        let observed = catalog.observe(target).await?;
        // Check the slot's owner before writing anything about the slot, and before waiting as a
        // standby instance until the slot is free.
        let unknown = observed.unknown_owner(target);
        start.check_slot_owner(&catalog, unknown).await?;
        let session_state = &mut *start.session_state;
        session_state
            .crashes
            .check(&observed.starts, &target.slot)?;
        let (tolerated, problems): (Vec<_>, Vec<_>) = observed
            .problems(target)
            .into_iter()
            .chain(observed.publisher_problem(target))
            .partition(|problem| settings.tolerates(problem));
        if let Some(problem) = problems.into_iter().next() {
            if observed.publication_problem(target).is_some() {
                start.session_state.record_tables(&catalog).await;
            }
            let dropped = slot_monitor::dropped_slot_error(settings, &catalog, &problem).await;
            return Err(dropped.map_or_else(|| problem.into(), Into::into));
        }
        settings.check_drop_slot(&observed)?;
        if settings.sets_tables_aside() && !observed.has_journal {
            return Err(CatalogError::missing_journal(target).into());
        }
        if !start.session_state.has_reminded {
            slot_monitor::log_dropped_slots(settings, &catalog).await?;
            if let (Outbox::Tables(patterns), Some(publication)) =
                (&target.outbox, &observed.publication)
            {
                let tables = catalog.unpublished(patterns, &publication.tables).await?;
                if let Some(warning) = unpublished_warning(target, &tables) {
                    warn!(pipeline = settings.name, "{warning}");
                }
            }
            if let Some(warning) = observed.encoding_warning() {
                warn!(pipeline = settings.name, "{warning}");
            }
            if let Some(warning) = observed.synchronous_warning() {
                warn!(pipeline = settings.name, "{warning}");
            }
            for problem in tolerated {
                warn!(pipeline = settings.name, "{problem}");
            }
            start.session_state.has_reminded = true;
        }
        let (publication, watched) = (
            &start.session_state.publication,
            &start.session_state.watched,
        );
        publication.compare(&catalog, watched, &observed).await;
        // Check the columns that the table has now. The columns that it had when each row was
        // written are checked later, when the stream describes them.
        settings.check_columns(&observed)?;
        let mut facts = HashMap::new();
        if let Some(table) = &observed.table {
            facts.insert(table.oid, table.facts.clone());
        }
        let mut oids = Vec::new();
        for (name, table) in published_tables(&catalog, &observed, target).await? {
            match settings.mapping_for(&name, Some(&table)) {
                Err(error) if settings.sets_tables_aside() => {
                    warn!(pipeline = settings.name, %error, "the table will be set aside when one of its rows arrives");
                }
                bound => drop(bound?),
            }
            facts.insert(table.oid, table.facts);
            oids.push(table.oid);
        }
        start.core.describe_columns(facts);
        if let Some(pid) = observed.slot.as_ref().and_then(|slot| slot.active_pid) {
            start.session_state.access.record_full_access();
            let slot = target.slot.clone();
            return Err(SlotInUse { slot, pid }.into());
        }
        start.session_state.record_tables(&catalog).await;
        // Read the accepted names only after the tables have been recorded, because recording a new
        // table adds its name to the accepted names.
        if start.core.loads_table_names() {
            let names = catalog.accepted_names(target, &oids).await?;
            start.core.accept_names(names, &target.commands);
        }
        Ok(Self { catalog, observed })
    }

    /// Opens the connection that will stream. With exactly-once delivery, first fences the
    /// pipeline's other producers and reads the checkpoint, which requires Kafka to be reachable.
    pub(super) async fn connect<D: Database<Catalog = C>>(
        mut self,
        start: &mut Startup<'_, '_, D>,
        sink: &mut impl Sink,
    ) -> Result<Connected<C>, PipelineError> {
        let settings = start.settings;
        let mut early_link = None;
        let found = match &settings.delivery {
            Delivery::AtLeastOnce => None,
            Delivery::ExactlyOnce(checkpoint) => {
                // If the last attempt to start found rows to copy, the slot can't be acquired this
                // early, because the copy determines the position at which the stream must start.
                if !start.session_state.copies {
                    early_link = self.take_slot_if_nothing_is_copied(start).await?;
                }
                // `take_over` fences the producer of the slot's previous owner. After that, the
                // previous owner can't produce any more records, so the last checkpoint is final.
                let confirmed = start.core.delivery.watermark.confirmed();
                let found = tokio::select! {
                    found = sink.take_over() => found?,
                    // `take_over` waits while Kafka is unavailable, so keep monitoring the slot.
                    error = monitor_until_lost(&mut self.catalog, &start.session_state.watched) => return Err(error.into()),
                    error = hold_slot(&mut early_link, confirmed, settings.link_timeout) => return Err(error.into()),
                };
                Some(found.ok_or_else(|| ExactlyOnceError::NoCheckpoint {
                    adopt: settings.adopt(),
                    pipeline: settings.name.clone(),
                    topic: checkpoint.topic.clone(),
                    slot: settings.target.slot.clone(),
                    moved: String::new(),
                }))
            }
        };
        let mut link = match early_link {
            Some(link) => link,
            None => start.link(&self.catalog).await?,
        };
        link.connection.pause();
        let slot_identity = start.session_state.record_server(settings, &link.identity);
        let checkpoint = match found {
            Some(Err(mut missing)) => {
                match self
                    .first_checkpoint(start, &slot_identity, &link.identity)
                    .await?
                {
                    Some(first) => Some(first),
                    None => {
                        if let ExactlyOnceError::NoCheckpoint { moved, .. } = &mut missing {
                            *moved = self.describe_move(start, &slot_identity).await?;
                        }
                        return Err(missing.into());
                    }
                }
            }
            found => found.transpose()?,
        };
        Ok(Connected {
            catalog: self.catalog,
            observed: self.observed,
            link,
            slot_identity,
            checkpoint,
        })
    }

    /// Acquires the slot if the catalog alone shows that no older rows have to be copied. If a copy
    /// might be needed, does not acquire the slot, because the copy may require the stream to start
    /// at a different position.
    async fn take_slot_if_nothing_is_copied<D: Database<Catalog = C>>(
        &self,
        start: &mut Startup<'_, '_, D>,
    ) -> Result<Option<Link>, PipelineError> {
        let settings = start.settings;
        let link = start.link(&self.catalog).await?;
        let slot_identity = start.session_state.record_server(settings, &link.identity);
        let recorded = start
            .slot_state(&self.catalog, &slot_identity)
            .await?
            .flatten();
        let recorded = recorded.map(|state| state.confirmed);
        if !snapshot::has_nothing_to_copy(settings, &self.catalog, &self.observed, recorded).await {
            return Ok(None);
        }
        let (link, _) = start.take_slot(link, &self.catalog, None).await?;
        Ok(Some(link))
    }

    /// Returns a sentence about events that may be missing because something other than Walpost
    /// moved the slot. Empty if the slot was not moved.
    async fn describe_move<D: Database<Catalog = C>>(
        &self,
        start: &mut Startup<'_, '_, D>,
        slot_identity: &SlotIdentity,
    ) -> Result<String, CatalogError> {
        let state = start
            .slot_state(&self.catalog, slot_identity)
            .await?
            .flatten();
        let (Some(slot), Some(state)) = (&self.observed.slot, state) else {
            return Ok(String::new());
        };
        let (confirmed, found) = (state.confirmed, slot.confirmed);
        if confirmed >= found
            || self
                .catalog
                .is_accounted_for(slot_identity, confirmed, found)
                .await?
        {
            return Ok(String::new());
        }
        Ok(format!(
            ". But {}",
            describe_move(&slot_identity.target, confirmed, found)
        ))
    }

    /// Returns the initial checkpoint if this is the pipeline's first run, or `None` if the
    /// pipeline may have run before. A run is the first if `walpost init` created the slot and
    /// nothing has read the slot since.
    async fn first_checkpoint<D: Database<Catalog = C>>(
        &self,
        start: &mut Startup<'_, '_, D>,
        slot_identity: &SlotIdentity,
        identity: &Identity,
    ) -> Result<Option<Checkpoint>, CatalogError> {
        let Some(slot) = &self.observed.slot else {
            return Ok(None);
        };
        let state = start
            .slot_state(&self.catalog, slot_identity)
            .await?
            .flatten();
        if !state.is_some_and(|state| state.is_untouched(slot.confirmed)) {
            return Ok(None);
        }
        info!(
            pipeline = slot_identity.pipeline,
            slot = slot_identity.target.slot,
            from = %slot.confirmed,
            "first run since walpost init created the slot: none of its events are in Kafka"
        );
        // Record now which events of a previous slot may be missing from Kafka. This can't be
        // determined after `walpost.slot_state` marks the current slot as read.
        self.catalog
            .record_gap_of_other_history(
                slot_identity,
                slot.confirmed,
                start.settings.first_start(),
            )
            .await?;
        let server = ServerState {
            system_id: slot_identity.system_id.clone(),
            timeline: slot_identity.timeline,
            history: Vec::new(),
            slot: slot_identity.target.slot.clone(),
            confirmed: slot.confirmed,
            flushed: identity.flushed,
        };
        Ok(Some(Checkpoint::first(1, &server)))
    }
}
