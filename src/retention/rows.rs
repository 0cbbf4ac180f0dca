//! Applies the retention period to a table without partitions by deleting its rows in batches.
//! Partitions are preferable, because each deleted row generates WAL and leaves a dead tuple for
//! VACUUM.
//!
//! As with partitions, removal depends on WAL positions. Walpost records the current time and WAL
//! position in the table's comment. Once the slots have passed this position, Walpost replaces it
//! in the comment with the time at which this was noticed. When the retention period has elapsed
//! since that time, Walpost deletes the rows that were created before the first recorded time, and
//! starts again by recording the current time and position. A row is therefore kept for one to two
//! retention periods. A long-running transaction may commit a row that was created before the first
//! recorded time after the slots have passed the recorded position. Therefore, each batch is
//! deleted only after the slots have passed the WAL position that was current when the batch was
//! read.

use std::time::Instant;

use crate::postgres::sql::Client;
use jiff::{SignedDuration, Timestamp};

use super::facts::{self, MaintainedTable};
use super::mark::{MarkKind, PartitionMark};
use super::plan::RemovalWait;
use super::{Pass, RetentionError, SLOT_POLL_INTERVAL, SLOT_TIMEOUT};
use crate::model::lsn::Lsn;
use crate::postgres::catalog::CatalogError;
use crate::postgres::target::Target;

/// Maximum number of rows that are deleted in one transaction.
const BATCH_ROWS: i64 = 5_000;

/// The locations (`ctid`) of rows to delete, and the transactions that inserted them (`xmin`). The
/// transactions are needed because a location can be reused for another row.
struct Batch {
    locations: Vec<String>,
    writers: Vec<String>,
}

/// The result of waiting for the slots to reach a WAL position.
enum SlotWait {
    /// The slots have passed the position.
    Passed,
    /// The slots have not passed the position yet.
    Waiting(RemovalWait),
    /// The slots don't show which rows were delivered, for example because a slot was dropped.
    Unknown,
}

impl Pass<'_> {
    /// Deletes the rows for which the table's comment records that the retention period has ended,
    /// or performs as many of the preceding steps as are possible now.
    pub(crate) async fn delete_rows(
        &mut self,
        target: &Target,
        keep: SignedDuration,
        dry_run: bool,
    ) -> Result<(), CatalogError> {
        if !self.outbox.has_time {
            let table = self.outbox.name.clone();
            self.report.problems.push(RetentionError::NoTime(table));
            return Ok(());
        }
        let deadline = Instant::now() + self.slot_timeout;
        loop {
            let table = self.outbox.name.clone();
            let (now, comment) = facts::query_rows_mark(self.client, self.outbox).await?;
            let Some((slot, confirmed)) = self.slowest(target).await? else {
                return Ok(());
            };
            let kind = match self.outbox.origin.read_rows_mark(comment.as_deref()) {
                Some((_, PartitionMark::Closed(needed))) if needed > confirmed => {
                    self.report.waits = vec![RemovalWait::Slot {
                        table,
                        slot,
                        confirmed,
                        needed,
                    }];
                    if dry_run || Instant::now() >= deadline {
                        return Ok(());
                    }
                    tokio::time::sleep(SLOT_POLL_INTERVAL).await;
                    continue;
                }
                Some((before, PartitionMark::Closed(_))) => MarkKind::RowsDelivered(before),
                // The recorded time is in the future, because the server's clock was set back.
                // Record the current time instead.
                Some((before, PartitionMark::Delivered(at))) if at > now => {
                    MarkKind::RowsDelivered(before)
                }
                Some((before, PartitionMark::Delivered(at))) => {
                    let end = at.checked_add(keep).unwrap_or(Timestamp::MAX);
                    if end > now {
                        self.report.waits = vec![RemovalWait::Age { table, until: end }];
                        return Ok(());
                    }
                    if dry_run {
                        let would = format!("would delete rows of {table} created before {before}");
                        self.report.done.push(would);
                        return Ok(());
                    }
                    if !self.delete_created_before(target, before).await? {
                        return Ok(());
                    }
                    MarkKind::RowsClosed
                }
                None | Some(_) => MarkKind::RowsClosed,
            };
            if dry_run {
                let would = format!("would record the delivery progress of the rows of {table}");
                self.report.done.push(would);
                return Ok(());
            }
            let sql = self.mark_sql(&table, kind);
            if !self.run(&table, &sql).await? {
                return Ok(());
            }
        }
    }

    /// Deletes rows that were created before the given time, in batches. Returns false if some of
    /// the rows could not be deleted in this pass.
    async fn delete_created_before(
        &mut self,
        target: &Target,
        before: Timestamp,
    ) -> Result<bool, CatalogError> {
        let table = self.outbox.name.clone();
        let mut deleted = 0;
        let (is_done, waits) = loop {
            if !self.begin_locked().await? {
                break (false, None);
            }
            let batch = read_batch(self.client, self.outbox, before).await?;
            self.commit().await?;
            if batch.locations.is_empty() {
                break (true, None);
            }
            let needed = facts::position(self.client).await?;
            match self.wait_for_slots(target, needed).await? {
                SlotWait::Passed => {}
                SlotWait::Waiting(wait) => break (false, Some(wait)),
                SlotWait::Unknown => break (false, None),
            }
            if !self.begin_locked().await? {
                break (false, None);
            }
            let batch_deleted = delete_batch(self.client, self.outbox, &batch).await?;
            self.commit().await?;
            deleted += batch_deleted;
            if batch_deleted == 0 {
                // The remaining rows are locked by another session.
                break (false, Some(RemovalWait::Rows(table.clone())));
            }
        };
        if deleted > 0 {
            let done = format!("deleted {deleted} rows of {table} created before {before}");
            self.report.done.push(done);
        }
        self.report.waits = Vec::from_iter(waits);
        Ok(is_done)
    }

    /// Waits up to [`SLOT_TIMEOUT`] until the slots have passed a position.
    async fn wait_for_slots(
        &mut self,
        target: &Target,
        needed: Lsn,
    ) -> Result<SlotWait, CatalogError> {
        let deadline = Instant::now() + SLOT_TIMEOUT;
        loop {
            let table = self.outbox.name.clone();
            let wait = match self.slowest(target).await? {
                Some((_, confirmed)) if confirmed >= needed => return Ok(SlotWait::Passed),
                Some((slot, confirmed)) => RemovalWait::Slot {
                    table,
                    slot,
                    confirmed,
                    needed,
                },
                None => return Ok(SlotWait::Unknown),
            };
            if Instant::now() >= deadline {
                return Ok(SlotWait::Waiting(wait));
            }
            tokio::time::sleep(SLOT_POLL_INTERVAL).await;
        }
    }
}

async fn read_batch(
    client: &Client,
    outbox: &MaintainedTable,
    before: Timestamp,
) -> Result<Batch, CatalogError> {
    let table = outbox.name.quoted();
    let rows = client
        .query(
            &format!(
                "SELECT t.ctid::text, t.xmin::text FROM ONLY {table} AS t WHERE t.created_at < $1::text::timestamptz LIMIT {BATCH_ROWS}"
            ),
            &[&before.to_string()],
        )
        .await?;
    let mut batch = Batch {
        locations: Vec::with_capacity(rows.len()),
        writers: Vec::with_capacity(rows.len()),
    };
    for row in &rows {
        batch.locations.push(row.try_get(0)?);
        batch.writers.push(row.try_get(1)?);
    }
    Ok(batch)
}

/// Deletes the rows in the batch that are still at the same location. Skips rows that another
/// session has locked. Returns the number of deleted rows.
async fn delete_batch(
    client: &Client,
    outbox: &MaintainedTable,
    batch: &Batch,
) -> Result<u64, CatalogError> {
    let table = outbox.name.quoted();
    let deleted = client
        .execute(
            &format!(
                "DELETE FROM ONLY {table} AS d WHERE d.ctid = ANY (ARRAY(SELECT t.ctid FROM ONLY {table} AS t \
                 WHERE t.ctid = ANY ($1::text[]::tid[]) \
                 AND (t.ctid::text, t.xmin::text) IN (SELECT * FROM unnest($1::text[], $2::text[])) \
                 FOR UPDATE SKIP LOCKED))"
            ),
            &[&batch.locations, &batch.writers],
        )
        .await?;
    Ok(deleted)
}
