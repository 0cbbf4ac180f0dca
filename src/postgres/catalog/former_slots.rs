//! Finds slots that Walpost used to read but that no pipeline reads now.

use std::fmt;

use super::own_table::{OwnTable, Use};
use super::slot_state::{FoundState, SlotIdentity, is_dropped_at};
use super::table_state::{DATABASE_OID, SYSTEM_ID, VERSION, grant, text_array};
use super::{Catalog, CatalogError};
use crate::escape::shell_word_on_one_line;
use crate::model::lsn::Lsn;
use crate::postgres::sql::text_literal;
use crate::postgres::table::TableName;
use crate::postgres::target::Target;

/// A slot that Walpost created or read and that no longer exists, although the journal does not
/// record its undelivered events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct VanishedSlot {
    slot: String,
    pipeline: String,
    confirmed: Lsn,
    /// The command that delivers the slot's undelivered events.
    replay: String,
}

impl fmt::Display for VanishedSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            slot,
            pipeline,
            confirmed,
            replay,
        } = self;
        write!(
            f,
            "slot {slot:?} of pipeline {pipeline:?} does not exist, and no configured pipeline uses it: events \
             committed after {confirmed} may be missing from Kafka. If the pipeline was renamed, send the events again: \
             {replay}. If the events are not needed, run sql/teardown.sql of Walpost in this database: psql -v {} \
             -v publication= -f FILE",
            shell_word_on_one_line(&format!("slot={slot}"))
        )
    }
}

impl Catalog {
    /// Returns the slots, other than the current one, that must be checked to determine which rows
    /// of the table have been delivered: the slots of other pipelines, and former slots of this
    /// pipeline. Omits a former slot if the current slot was created at or before the former slot's
    /// last position, or if the journal records the events after that position.
    ///
    /// # Errors
    /// Returns an error if a query fails, or if Walpost's tables are unreadable or are rejected by
    /// `sql/examine.sql`.
    pub(crate) async fn slots_of_table(
        &self,
        pipeline: &str,
        target: &Target,
        table: &TableName,
    ) -> Result<Vec<String>, CatalogError> {
        for own in [OwnTable::TableState, OwnTable::SlotState] {
            if self.unusable(target, own, Use::Read).await?.is_some() {
                return Ok(Vec::new());
            }
        }
        let sql = format!(
            "SELECT slot FROM walpost.table_state WHERE slot <> {} AND (table_schema, table_name) = ({}, {}) \
             AND version = {VERSION} AND system_id = {SYSTEM_ID} AND database_oid = {DATABASE_OID}",
            text_literal(&target.slot),
            text_literal(&table.schema),
            text_literal(&table.name)
        );
        let rows = self
            .run_on_own_table(OwnTable::TableState, target, "", &sql)
            .await
            .map_err(|error| self.with_grant(error, |role| grant(role, "SELECT")))?;
        let current = self.slot_identity(pipeline, target).await?;
        let mut slots = Vec::new();
        for row in &rows {
            let slot = row.get(0).unwrap_or_default();
            if !self.covers_former_slot(&current, slot).await? {
                slots.push(slot.to_owned());
            }
        }
        Ok(slots)
    }

    /// If `slot` is a former slot of the pipeline, returns whether its undelivered events are
    /// accounted for: either the current slot delivers everything after the last position of
    /// `slot`, or the journal records the events in between. Otherwise, returns false.
    async fn covers_former_slot(
        &self,
        current: &SlotIdentity,
        slot: &str,
    ) -> Result<bool, CatalogError> {
        if self.pipeline_of(current, slot).await?.as_deref() != Some(&current.pipeline) {
            return Ok(false);
        }
        let former = SlotIdentity {
            target: Target {
                slot: slot.to_owned(),
                ..current.target.clone()
            },
            ..current.clone()
        };
        let state = async |current: &SlotIdentity| match self.slot_state(current).await? {
            FoundState::State(state) => Ok::<_, CatalogError>(state),
            FoundState::Unusable(_) => Ok(None),
        };
        let Some(former) = state(&former).await? else {
            return Ok(false);
        };
        let created = state(current).await?.and_then(|state| state.created);
        if created.is_some_and(|created| created <= former.confirmed) {
            return Ok(true);
        }
        self.is_accounted_for(current, former.confirmed, Lsn(u64::MAX))
            .await
    }

    /// Returns the pipeline that read the slot most recently.
    async fn pipeline_of(
        &self,
        current: &SlotIdentity,
        slot: &str,
    ) -> Result<Option<String>, CatalogError> {
        let sql = format!(
            "SELECT pipeline FROM walpost.slot_state WHERE slot = {} AND system_id = {} AND database_oid = {DATABASE_OID}",
            text_literal(slot),
            text_literal(&current.system_id)
        );
        let rows = self.run_on_own_table(OwnTable::SlotState, &current.target, "", &sql);
        let rows = rows.await?;
        Ok(rows.first().and_then(|row| row.get(0)).map(str::to_owned))
    }

    /// Returns the slots that Walpost created or read in this database and that no longer exist,
    /// unless the journal records their undelivered events. Excludes the slots in `used` and the
    /// slots of `pipelines`. `target` can be the target of any pipeline that is configured for this
    /// database.
    ///
    /// # Errors
    /// Returns an error if a query fails, or if Walpost's tables are unreadable or are rejected by
    /// `sql/examine.sql`.
    pub(crate) async fn vanished_slots(
        &self,
        target: &Target,
        used: &[String],
        pipelines: &[String],
    ) -> Result<Vec<VanishedSlot>, CatalogError> {
        if self
            .unusable(target, OwnTable::SlotState, Use::Read)
            .await?
            .is_some()
        {
            return Ok(Vec::new());
        }
        let list = |names: &[String]| text_array(names.iter().map(String::as_str));
        let sql = format!(
            "SELECT slot, pipeline, confirmed_lsn FROM walpost.slot_state WHERE system_id = {SYSTEM_ID} \
             AND database_oid = {DATABASE_OID} AND slot <> ALL ({}) AND pipeline <> ALL ({}) \
             AND slot NOT IN (SELECT slot_name::text FROM pg_replication_slots) ORDER BY 1",
            list(used),
            list(pipelines)
        );
        let rows = self
            .run_on_own_table(OwnTable::SlotState, target, "", &sql)
            .await?;
        let mut vanished = Vec::new();
        for row in &rows {
            let confirmed: Lsn = row.get(2).and_then(|lsn| lsn.parse().ok()).ok_or_else(|| {
                CatalogError::Unexpected("walpost.slot_state.confirmed_lsn".to_owned())
            })?;
            let slot = row.get(0).unwrap_or_default().to_owned();
            let condition = format!(
                "j.slot = {} AND {} AND j.detail ->> 'system_id'::text = {SYSTEM_ID}",
                text_literal(&slot),
                is_dropped_at(confirmed)
            );
            if self.entries(target, &condition).await?.is_empty() {
                vanished.push(VanishedSlot {
                    slot,
                    pipeline: row.get(1).unwrap_or_default().to_owned(),
                    confirmed,
                    replay: target.replay_from(),
                });
            }
        }
        Ok(vanished)
    }
}
