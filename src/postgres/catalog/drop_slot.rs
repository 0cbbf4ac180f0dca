//! Slots that were dropped: what the journal has of them until it is replayed, and dropping one.
//!
//! An entry of the journal says where the slot stood and which transactions it may not have delivered;
//! it is written before the slot is dropped. Where the drop fails, the entry lists more than was given
//! up, and never less. It is open until a replay that has covered it writes down its end.
//!
//! # Which rows may be missing
//!
//! A slot's `catalog_xmin` rises to a transaction id only when everything below that had ended before
//! a place that is confirmed by then (PostgreSQL 18, `src/backend/replication/logical/snapbuild.c`,
//! `SnapBuildProcessRunningXacts`, and `logical.c`, `LogicalIncreaseXminForSlot`). So rows of
//! transactions below it were delivered, and all others may not have been. The transaction is the
//! row's `xmin`, which stays readable when the row is frozen. A row that is written anew, when the
//! table is rewritten or the row moved, has a later one: so there is no upper bound, and rows that
//! came after the new slot are sent once more.

use std::time::{Duration, Instant};

use postgres_protocol::escape::escape_literal;
use serde_json::json;

use crate::model::dropped_slot::DroppedSlot;

use super::journal::{Action, DROPPED_SLOTS, Entry, LEFT_PUBLICATION, Written};
use super::{Catalog, CatalogError, SnapshotRecord, synchronous};
use crate::model::lsn::Lsn;
use crate::postgres::table::TableName;
use crate::postgres::target::{Outbox, Target};

/// In an entry's detail: another table has taken the place of this one.
pub(super) const REPLACED: &str = "replaced";

/// How long a session that has ended may still have the slot.
const RELEASE: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(100);
/// How often it is tried to drop the slot.
const DROPS: u32 = 3;
const DROP_PAUSE: Duration = Duration::from_secs(1);

/// Transaction ids in rows are of 32 bits.
const IDS: u64 = 1 << 32;

/// The text of the condition that an entry `j` of the journal is of a slot that was dropped and not
/// replayed.
fn open() -> String {
    format!(
        "j.action = '{}' AND NOT EXISTS (SELECT FROM walpost.journal c WHERE c.action = 'replay' \
         AND c.id > j.id AND c.detail ->> 'state' = 'done' AND c.detail -> '{DROPPED_SLOTS}' @> to_jsonb(j.id))",
        Action::DropSlot.name()
    )
}

/// The condition that entry `j` of the journal is about the slot of `target`, in SQL. If several tables share the slot, each table has
/// its own entries.
fn of_slot(target: &Target) -> String {
    let slot = format!("j.slot = {}", escape_literal(&target.slot));
    match &target.outbox {
        Outbox::OneOf { table, .. } => format!(
            "({slot} AND (j.detail ->> 'table' IS NULL OR j.detail ->> 'table' = {}))",
            escape_literal(&table.to_string())
        ),
        Outbox::Table(_) | Outbox::Tables(_) | Outbox::Messages { .. } => slot,
    }
}

/// What came of dropping it.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// The slot is gone.
    Dropped,
    /// Another process has it.
    InUse(i32),
    /// It no longer keeps more than it may, was moved meanwhile, or is not there.
    Changed,
}

/// Where a slot stands.
pub(super) struct SlotPosition {
    active_pid: Option<i32>,
    confirmed: Lsn,
    restart: Lsn,
    end: Lsn,
    /// `catalog_xmin`, with its epoch.
    pub(super) catalog_xmin: Option<i64>,
    pub(super) cluster: String,
}

impl Catalog {
    /// Slots of a pipeline that were dropped and not replayed, in that order.
    ///
    /// # Errors
    /// The server can't be asked, or the journal is not there or may not be read.
    pub(crate) async fn dropped_slots(
        &self,
        pipeline: &str,
        target: &Target,
    ) -> Result<Vec<DroppedSlot>, CatalogError> {
        // A pipeline keeps what went with a dropped slot also under another name, or with a slot of another name.
        let whose = match target.outbox.table() {
            Some(table) => format!(
                "{} OR (j.pipeline = {} AND j.detail ->> 'table' = {})",
                of_slot(target),
                escape_literal(pipeline),
                escape_literal(&table.to_string())
            ),
            None if target.outbox.is_several() => format!(
                "{} OR j.pipeline = {}",
                of_slot(target),
                escape_literal(pipeline)
            ),
            None => of_slot(target),
        };
        self.open_entries(target, &whose).await
    }

    /// Slots of any pipeline with this table or slot that were dropped and not replayed. Without a journal
    /// that is none: they are written there before they are dropped.
    ///
    /// # Errors
    /// The server can't be asked, or the journal may not be read.
    pub(crate) async fn dropped_slots_of_table(
        &self,
        target: &Target,
        table: &TableName,
    ) -> Result<Vec<DroppedSlot>, CatalogError> {
        let whose = format!(
            "{} OR j.detail ->> 'table' = {}",
            of_slot(&Target {
                outbox: target.outbox.one(table),
                ..target.clone()
            }),
            escape_literal(&table.to_string())
        );
        match self.open_entries(target, &whose).await {
            Err(CatalogError::NoJournal) => Ok(Vec::new()),
            found => found,
        }
    }

    async fn open_entries(
        &self,
        target: &Target,
        whose: &str,
    ) -> Result<Vec<DroppedSlot>, CatalogError> {
        let condition = format!("({whose}) AND {}", open());
        let entries = self.entries(target, &condition).await?;
        let is_several = target.outbox.is_several();
        let entries = entries.into_iter().map(|entry| {
            let table = entry.detail["table"].as_str().map(str::to_owned);
            let dropped = DroppedSlot::from(entry);
            // The pipeline can have been about one table then.
            let table = dropped.table.clone().or(table.filter(|_| is_several));
            DroppedSlot { table, ..dropped }
        });
        Ok(entries.collect())
    }

    /// Drops the slot of a pipeline, if nobody has it and it retains more than `max_bytes` of WAL: records that in the
    /// journal, and drops it. `copies` says whether the pipeline delivers rows that are
    /// older than its slot: where it has not yet, all rows may be missing.
    ///
    /// # Errors
    /// The server can't be asked, or refuses. The slot is still there then, and an entry may be
    /// written; another attempt resumes that.
    pub(crate) async fn drop_slot_over_budget(
        &self,
        pipeline: &str,
        target: &Target,
        max_bytes: u64,
        copies: bool,
    ) -> Result<Outcome, CatalogError> {
        let Some(slot_position) = self.released(&target.slot).await? else {
            return Ok(Outcome::Changed);
        };
        if let Some(pid) = slot_position.active_pid {
            return Ok(Outcome::InUse(pid));
        }
        if slot_position.end.bytes_since(slot_position.restart) <= max_bytes {
            return Ok(Outcome::Changed);
        }
        // What is not on the disk when the slot is gone could be lost with the server.
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
        if record.is_unbegun() {
            // Before a new slot the whole table would be copied.
            let why = json!({ SnapshotRecord::STATE: SnapshotRecord::DONE, "table": table, "why": "dropped slot" });
            self.write_journal(&entry(Action::Snapshot, None, why))
                .await?;
        }
        // An attempt before this has written it, and failed to drop the slot.
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
                // As text: programs that read JSON have no such numbers.
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
        let mut tries = 0;
        loop {
            tries += 1;
            match self.drop_slot(&target.slot, slot_position.confirmed).await {
                Ok(true) => return Ok(Outcome::Dropped),
                Ok(false) => return Ok(Outcome::Changed),
                // object_in_use: somebody was quicker
                Err(CatalogError::Server(error)) if error.code == "55006" => {
                    return Ok(Outcome::Changed);
                }
                Err(error) if tries == DROPS => return Err(error),
                Err(_) => tokio::time::sleep(DROP_PAUSE).await,
            }
        }
    }

    /// Where the slot stands once nobody has it, or when that has taken too long.
    async fn released(&self, slot: &str) -> Result<Option<SlotPosition>, CatalogError> {
        let until = Instant::now() + RELEASE;
        loop {
            let slot_position = self.slot_position(slot).await?;
            let is_free = slot_position
                .as_ref()
                .is_none_or(|s| s.active_pid.is_none());
            if is_free || Instant::now() >= until {
                return Ok(slot_position);
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// The system identifier of the server.
    ///
    /// # Errors
    /// The server can't be asked.
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
                     n.next - (n.next - s.catalog_xmin::text::int8) % {IDS}, \
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

    /// Drops the slot, if it stands there and nobody has it.
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
    /// The slot of this cluster that is at `confirmed` is the one that was to be dropped. Another
    /// in its place begins later.
    #[must_use]
    pub fn is_at(&self, confirmed: Lsn, cluster: &str) -> bool {
        !self.left_publication
            && self.cluster.as_deref() == Some(cluster)
            && self.from.is_some_and(|from| confirmed <= from)
    }

    /// The condition in SQL for rows that may be missing after all of `entries`, on this cluster;
    /// empty for all rows.
    #[must_use]
    pub fn condition(entries: &[Self], cluster: &str) -> String {
        let since = entries
            .iter()
            .map(|entry| (entry.since, entry.cluster.as_deref()));
        missing_rows(since, cluster)
    }
}

/// The condition in SQL, on this cluster, for rows of transactions from each of these on, which are of the cluster beside them;
/// empty for all rows.
pub(crate) fn missing_rows<'c>(
    since: impl Iterator<Item = (Option<u64>, Option<&'c str>)>,
    cluster: &str,
) -> String {
    // Transactions have other ids in another cluster, as one that was upgraded or restored is.
    let since = since.map(|(since, of)| since.filter(|_| of == Some(cluster)));
    let Some(since) = since.min().flatten() else {
        return String::new();
    };
    // Counted from there, in the direction in which ids rise: what is older by a whole round of
    // them is sent too. A row that is visible has an id below the end of the snapshot.
    format!(
        "(xmin::text::int8 - {} + {IDS}) % {IDS} < pg_snapshot_xmax(pg_current_snapshot())::text::int8 - {since}",
        since % IDS
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
        }
    }

    #[test]
    fn rows_from_the_earliest_transaction_on_may_be_missing() {
        let late = entry(Some(IDS + 900), "here");
        let early = entry(Some(IDS + 7), "here");
        let condition = DroppedSlot::condition(&[late, early], "here");
        assert!(condition.contains("- 7 + 4294967296)"), "{condition}");
        assert!(condition.ends_with("- 4294967303"), "{condition}");
    }

    #[test]
    fn where_a_transaction_is_not_known_or_not_of_this_cluster_all_rows_may_be() {
        let known = entry(Some(7), "here");
        for unknown in [entry(None, "here"), entry(Some(9), "elsewhere")] {
            assert_eq!(
                DroppedSlot::condition(&[known.clone(), unknown], "here"),
                ""
            );
        }
    }
}
