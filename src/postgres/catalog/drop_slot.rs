//! Drops slots, and queries the journal for dropped slots whose events have not been replayed.
//!
//! Before a slot is dropped, a journal entry is written that records the slot's position and the
//! transactions that the slot may not have delivered. If dropping the slot then fails, the entry
//! lists transactions that are not lost. A lost transaction, however, is always recorded in the
//! journal. An entry is open until the journal records that its events have been replayed.
//!
//! # Which rows may be missing
//!
//! The `catalog_xmin` of a slot advances to a transaction ID only once the confirmed position is
//! past the end of every transaction with a lower ID (PostgreSQL 18,
//! `src/backend/replication/logical/snapbuild.c`, `SnapBuildProcessRunningXacts`, and `logical.c`,
//! `LogicalIncreaseXminForSlot`). Therefore rows inserted by transactions with IDs below
//! `catalog_xmin` have been delivered, and all other rows may be missing. The transaction that
//! inserted a row is the row's `xmin`, which remains readable even after the row is frozen. If a
//! row is rewritten together with its table or is moved to another partition, it gets a higher
//! `xmin`. Therefore a replay has no upper bound, and also resends rows that were inserted after
//! the new slot was created.

use std::time::{Duration, Instant};

use serde_json::json;

use crate::model::dropped_slot::DroppedSlot;

use super::journal::{Action, DROPPED_SLOTS, Entry, LEFT_PUBLICATION, Written};
use super::{Catalog, CatalogError, SnapshotRecord, synchronous};
use crate::model::lsn::Lsn;
use crate::postgres::sql::text_literal;
use crate::postgres::table::TableName;
use crate::postgres::target::{Outbox, Target};

/// The key in a journal entry's `detail` that is set if another table has replaced the table that
/// the entry is about.
pub(super) const REPLACED: &str = "replaced";

/// The key in a journal entry's `detail` that is set if only rows of detached partitions are
/// missing.
pub(super) const DETACHED_PARTITIONS: &str = "detached_partitions";

/// The key under which the `detail` of a journal entry lists the OIDs of the table's partitions and
/// child tables, as strings. An entry about detached partitions lists only those partitions.
pub(super) const PARTITIONS: &str = "partitions";

/// How long to wait until the slot is released by a session that has been closed.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(10);
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Maximum number of attempts to drop the slot.
const DROP_ATTEMPTS: u32 = 3;
const DROP_RETRY_DELAY: Duration = Duration::from_secs(1);

/// The number of distinct transaction IDs in the 32-bit form that rows store.
const TRANSACTION_IDS: u64 = 1 << 32;

/// Returns an SQL condition that is true if the journal entry `j` describes a dropped slot whose
/// events have not been replayed.
fn open_condition() -> String {
    format!(
        "j.action = '{}'::text AND NOT EXISTS (SELECT FROM walpost.journal c WHERE c.action = 'replay'::text \
         AND c.id > j.id AND c.detail ->> 'state'::text = 'done'::text AND c.detail -> '{DROPPED_SLOTS}'::text @> to_jsonb(j.id))",
        Action::DropSlot.name()
    )
}

/// Returns an SQL condition that is true if the journal entry `j` is about `target`'s slot. If
/// several tables share the slot, each table has its own entries.
fn slot_condition(target: &Target) -> String {
    let slot = format!("j.slot = {}", text_literal(&target.slot));
    match &target.outbox {
        Outbox::OneOf { table, .. } => format!(
            "({slot} AND (j.detail ->> 'table'::text IS NULL OR j.detail ->> 'table'::text = {}))",
            text_literal(&table.to_string())
        ),
        Outbox::Table(_) | Outbox::Tables(_) | Outbox::Messages { .. } => slot,
    }
}

/// The result of an attempt to drop a slot.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// The slot was dropped.
    Dropped,
    /// Another process uses the slot.
    InUse(i32),
    /// The slot does not have to be dropped or can't be dropped: it no longer exceeds its WAL
    /// budget, was advanced or acquired by another session in the meantime, or no longer exists.
    Changed,
}

/// The position and state of a slot.
pub(super) struct SlotPosition {
    active_pid: Option<i32>,
    confirmed: Lsn,
    restart: Lsn,
    end: Lsn,
    /// `catalog_xmin` as a 64-bit ID, which includes the epoch.
    pub(super) catalog_xmin: Option<i64>,
    pub(super) cluster: String,
}

impl Catalog {
    /// Returns the pipeline's dropped slots whose events have not been replayed, oldest first.
    ///
    /// # Errors
    /// Returns an error if the query fails, the journal does not exist, or the role is not allowed
    /// to read it.
    pub(crate) async fn dropped_slots(
        &self,
        pipeline: &str,
        target: &Target,
    ) -> Result<Vec<DroppedSlot>, CatalogError> {
        // A journal entry still belongs to the pipeline if either the slot or the pipeline, but not
        // both, was renamed in the configuration.
        let owner = match target.outbox.table() {
            Some(table) => format!(
                "{} OR (j.pipeline = {} AND j.detail ->> 'table'::text = {})",
                slot_condition(target),
                text_literal(pipeline),
                text_literal(&table.to_string())
            ),
            None if target.outbox.is_several() => format!(
                "{} OR j.pipeline = {}",
                slot_condition(target),
                text_literal(pipeline)
            ),
            None => slot_condition(target),
        };
        self.open_entries(target, &owner).await
    }

    /// Returns the dropped slots whose events have not been replayed, for all pipelines that use
    /// this table or `target`'s slot. If the journal does not exist, the result is empty, because
    /// Walpost drops a slot only after recording it in the journal.
    ///
    /// # Errors
    /// Returns an error if the query fails, or if the role is not allowed to read the journal.
    pub(crate) async fn dropped_slots_of_table(
        &self,
        target: &Target,
        table: &TableName,
    ) -> Result<Vec<DroppedSlot>, CatalogError> {
        let owner = format!(
            "{} OR j.detail ->> 'table'::text = {}",
            slot_condition(&Target {
                outbox: target.outbox.narrow_to(table),
                ..target.clone()
            }),
            text_literal(&table.to_string())
        );
        match self.open_entries(target, &owner).await {
            Err(CatalogError::NoJournal { .. }) => Ok(Vec::new()),
            found => found,
        }
    }

    async fn open_entries(
        &self,
        target: &Target,
        owner: &str,
    ) -> Result<Vec<DroppedSlot>, CatalogError> {
        let condition = format!("({owner}) AND {}", open_condition());
        let entries = self.entries(target, &condition).await?;
        let is_several = target.outbox.is_several();
        let entries = entries.into_iter().map(|entry| {
            let table = entry.detail["table"].as_str().map(str::to_owned);
            let dropped = DroppedSlot::from(entry);
            // A journal entry that was written while the pipeline had only one table contains the
            // table's name, but not the flag `several`.
            let table = dropped.table.clone().or(table.filter(|_| is_several));
            DroppedSlot { table, ..dropped }
        });
        Ok(entries.collect())
    }

    /// Records the pipeline's slot in the journal and drops it, provided that no process uses the
    /// slot and that the slot retains more than `max_bytes` of WAL. `copies` states whether the
    /// pipeline also delivers rows that are older than its slot. If it does, and these rows have
    /// not been copied yet, the entry records that all rows may be missing.
    ///
    /// # Errors
    /// Returns an error if a query fails. In this case, the slot still exists. If the journal entry
    /// was already written, the next attempt reuses it.
    pub(crate) async fn drop_slot_over_budget(
        &self,
        pipeline: &str,
        target: &Target,
        max_bytes: u64,
        copies: bool,
    ) -> Result<Outcome, CatalogError> {
        let Some(slot_position) = self.wait_for_release(&target.slot).await? else {
            return Ok(Outcome::Changed);
        };
        if let Some(pid) = slot_position.active_pid {
            return Ok(Outcome::InUse(pid));
        }
        if slot_position.end.bytes_since(slot_position.restart) <= max_bytes {
            return Ok(Outcome::Changed);
        }
        // The journal entry must also reach the synchronous standbys before the slot is dropped.
        // Otherwise, the entry could be lost together with the server.
        self.client()
            .batch_execute(&synchronous::wait_for_standbys())
            .await?;
        let snapshots = self.table_snapshots(target).await?;
        let record = SnapshotRecord::of_table(&snapshots, target.outbox.table());
        let is_copied = match record {
            SnapshotRecord::Begun(_) => !record.is_open(slot_position.confirmed),
            SnapshotRecord::Nothing | SnapshotRecord::Due { .. } | SnapshotRecord::NoJournal => {
                !copies || self.has_streamed(target).await?
            }
            SnapshotRecord::Done => true,
        };
        let entry = |action, from, detail| Entry {
            pipeline,
            target,
            action,
            from,
            to: Some(slot_position.end),
            detail,
        };
        let table = target.outbox.table().map(TableName::to_string);
        if record.is_not_started() {
            // Record in the journal that the snapshot of the table is complete. Otherwise, the
            // whole table would be copied when a new slot is created.
            let detail = json!({ SnapshotRecord::STATE: SnapshotRecord::DONE, "table": table, "why": "dropped slot" });
            self.write_journal(&entry(Action::Snapshot, None, detail))
                .await?;
        }
        // True if an earlier attempt wrote this entry but failed to drop the slot.
        let is_written = |open: &DroppedSlot| {
            !open.left_publication && open.from == Some(slot_position.confirmed)
        };
        if !self
            .dropped_slots(pipeline, target)
            .await?
            .iter()
            .any(is_written)
        {
            let since = slot_position.catalog_xmin.filter(|_| is_copied);
            let detail = json!({
                "reason": "wal_budget.max",
                "table": table,
                // Stored as text because some JSON parsers can't represent numbers this large.
                "catalog_xmin": since.map(|id| id.to_string()),
                "system_id": slot_position.cluster,
                "restart": slot_position.restart,
                "retained_bytes": slot_position.end.bytes_since(slot_position.restart),
                "max_bytes": max_bytes,
            });
            self.write_journal(&entry(
                Action::DropSlot,
                Some(slot_position.confirmed),
                detail,
            ))
            .await?;
        }
        let mut attempts = 0;
        loop {
            attempts += 1;
            match self.drop_slot(&target.slot, slot_position.confirmed).await {
                Ok(true) => return Ok(Outcome::Dropped),
                Ok(false) => return Ok(Outcome::Changed),
                // object_in_use: another session has acquired the slot.
                Err(CatalogError::Server(error)) if error.code == "55006" => {
                    return Ok(Outcome::Changed);
                }
                Err(error) if attempts == DROP_ATTEMPTS => return Err(error),
                Err(_) => tokio::time::sleep(DROP_RETRY_DELAY).await,
            }
        }
    }

    /// Waits for at most [`RELEASE_TIMEOUT`] until no session uses the slot, and returns the slot's
    /// position.
    async fn wait_for_release(&self, slot: &str) -> Result<Option<SlotPosition>, CatalogError> {
        let deadline = Instant::now() + RELEASE_TIMEOUT;
        loop {
            let slot_position = self.slot_position(slot).await?;
            let is_free = slot_position
                .as_ref()
                .is_none_or(|s| s.active_pid.is_none());
            if is_free || Instant::now() >= deadline {
                return Ok(slot_position);
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Returns the server's system identifier.
    ///
    /// # Errors
    /// Returns an error if the query fails.
    pub(crate) async fn cluster(&self) -> Result<String, CatalogError> {
        let sql = "SELECT system_identifier::text FROM pg_control_system()";
        Ok(self.client().query_one(sql, &[]).await?.try_get(0)?)
    }

    pub(super) async fn slot_position(
        &self,
        slot: &str,
    ) -> Result<Option<SlotPosition>, CatalogError> {
        let found = self
            .client()
            .query_opt(
                &format!(
                    "SELECT s.active_pid, s.confirmed_flush_lsn, s.restart_lsn, pg_current_wal_lsn(), \
                     n.next - (n.next - s.catalog_xmin::text::int8) % {TRANSACTION_IDS}, \
                     (SELECT system_identifier::text FROM pg_control_system()) FROM pg_replication_slots s \
                     CROSS JOIN (SELECT pg_snapshot_xmax(pg_current_snapshot())::text::int8 AS next) n \
                     WHERE s.slot_name = $1 AND s.confirmed_flush_lsn IS NOT NULL AND s.restart_lsn IS NOT NULL"
                ),
                &[&slot],
            )
            .await?;
        let Some(row) = found else { return Ok(None) };
        Ok(Some(SlotPosition {
            active_pid: row.try_get(0)?,
            confirmed: row.try_get(1)?,
            restart: row.try_get(2)?,
            end: row.try_get(3)?,
            catalog_xmin: row.try_get(4)?,
            cluster: row.try_get(5)?,
        }))
    }

    /// Drops the slot if its position is `confirmed` and no session uses it. Returns whether the
    /// slot was dropped.
    async fn drop_slot(&self, slot: &str, confirmed: Lsn) -> Result<bool, CatalogError> {
        let dropped = self
            .client()
            .query_opt(
                "SELECT pg_catalog.pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = $1 \
                 AND NOT active AND confirmed_flush_lsn = $2",
                &[&slot, &confirmed],
            )
            .await?;
        Ok(dropped.is_some())
    }
}

impl DroppedSlot {
    /// Returns whether this entry describes the slot that exists now in `cluster`, at position
    /// `confirmed`. If the recorded slot was dropped and replaced by a new slot, the position of
    /// the new slot is higher than the recorded position.
    #[must_use]
    pub fn is_at(&self, confirmed: Lsn, cluster: &str) -> bool {
        !self.left_publication
            && self.cluster.as_deref() == Some(cluster)
            && self.from.is_some_and(|from| confirmed <= from)
    }

    /// Returns an SQL condition that selects the rows in this cluster that may be missing according
    /// to `entries`. The condition is empty if all rows may be missing.
    #[must_use]
    pub fn condition(entries: &[Self], cluster: &str) -> String {
        let since = entries
            .iter()
            .map(|entry| (entry.since, entry.cluster.as_deref()));
        missing_rows(since, cluster)
    }
}

/// Returns an SQL condition that selects the rows that were inserted by the earliest of the given
/// transactions or by a later transaction. Each item of `since` consists of a transaction ID and
/// the cluster that assigned it. If a transaction is unknown or was assigned by another cluster,
/// the condition is empty and selects all rows.
pub(crate) fn missing_rows<'c>(
    since: impl Iterator<Item = (Option<u64>, Option<&'c str>)>,
    cluster: &str,
) -> String {
    // Transaction IDs of different clusters can't be compared. For example, a database that was
    // upgraded or restored from a dump is in a different cluster.
    let since = since.map(|(since, origin)| since.filter(|_| origin == Some(cluster)));
    let Some(since) = since.min().flatten() else {
        return String::new();
    };
    // A row contains only the lower 32 bits of a transaction ID. IDs are therefore compared by
    // their distance from `since`, modulo 2^32, which also selects rows that are older by a
    // multiple of 2^32 transactions. The snapshot's xmax serves as the upper bound, because every
    // visible row has a lower `xmin`.
    format!(
        "(xmin::text::int8 - {} + {TRANSACTION_IDS}) % {TRANSACTION_IDS} < pg_snapshot_xmax(pg_current_snapshot())::text::int8 - {since}",
        since % TRANSACTION_IDS
    )
}

impl From<Written> for DroppedSlot {
    fn from(entry: Written) -> Self {
        let text = |key: &str| entry.detail[key].as_str().map(str::to_owned);
        Self {
            since: text("catalog_xmin").and_then(|id| id.parse().ok()),
            cluster: text("system_id"),
            table: text("table").filter(|_| entry.detail["several"] == true),
            left_publication: entry.detail.get(LEFT_PUBLICATION).is_some(),
            is_replaced: entry.detail[REPLACED] == true,
            detached_partitions: entry.detail[DETACHED_PARTITIONS] == true,
            uncopied_partitions: entry.detail[PARTITIONS].is_array(),
            id: entry.id,
            at: entry.at,
            from: entry.from,
            to: entry.to,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(since: Option<u64>, cluster: &str) -> DroppedSlot {
        DroppedSlot {
            id: 1,
            at: String::new(),
            from: None,
            to: None,
            since,
            cluster: Some(cluster.to_owned()),
            table: None,
            left_publication: false,
            is_replaced: false,
            detached_partitions: false,
            uncopied_partitions: false,
        }
    }

    #[test]
    fn selects_rows_inserted_since_the_earliest_recorded_transaction() {
        let late = entry(Some(TRANSACTION_IDS + 900), "here");
        let early = entry(Some(TRANSACTION_IDS + 7), "here");
        let condition = DroppedSlot::condition(&[late, early], "here");
        assert!(condition.contains("- 7 + 4294967296)"), "{condition}");
        assert!(condition.ends_with("- 4294967303"), "{condition}");
    }

    #[test]
    fn selects_all_rows_if_a_transaction_is_unknown_or_from_a_different_cluster() {
        let known = entry(Some(7), "here");
        for unknown in [entry(None, "here"), entry(Some(9), "elsewhere")] {
            assert_eq!(
                DroppedSlot::condition(&[known.clone(), unknown], "here"),
                ""
            );
        }
    }
}
