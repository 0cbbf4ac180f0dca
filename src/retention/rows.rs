//! Retention of a table without partitions, whose rows are deleted in batches. Partitions are
//! preferable, because each deleted row costs a dead tuple, its vacuum, and WAL.
//!
//! As with partitions, positions in the WAL are decisive. The table is marked with the current time
//! and WAL position: older rows form one generation. Once the slots have passed that position, the
//! time is added to the mark. When the retention since then has elapsed, the rows that were created
//! before the first time are deleted, and the next generation starts, so a row is kept for one to
//! two times the retention. A transaction can commit such a row late. Therefore the WAL position is
//! queried again after a batch was read, and the slots have to pass that position before the batch
//! is deleted.

use std::time::Instant;

use crate::postgres::sql::Client;
use jiff::{SignedDuration, Timestamp};

use super::facts::{self, Maintained};
use super::mark::{MarkKind, PartitionMark};
use super::plan::RemovalWait;
use super::{Pass, RetentionError, SLOT_POLL_INTERVAL, SLOT_TIMEOUT};
use crate::model::lsn::Lsn;
use crate::postgres::catalog::CatalogError;
use crate::postgres::target::Target;

/// Number of rows that are deleted in one transaction.
const BATCH_ROWS: i64 = 5_000;

/// Locations of rows, and the transactions that wrote them, because a location can be reused for
/// another row.
struct Batch {
    places: Vec<String>,
    writers: Vec<String>,
}

/// The result of waiting for the slots.
enum SlotWait {
    /// The slots have passed the position.
    Passed,
    /// The slots have not passed the position.
    For(RemovalWait),
    /// No slot shows what was delivered.
    Unknown,
}

impl Pass<'_> {
    /// Progresses as far as possible with the generation recorded in the table's comment.
    pub(crate) async fn rows(
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
        let until = Instant::now() + self.patience;
        loop {
            let table = self.outbox.name.clone();
            let (now, comment) = facts::generation(self.client, self.outbox).await?;
            let Some((slot, confirmed)) = self.slowest(target).await? else {
                return Ok(());
            };
            let kind = match self.outbox.origin.read_generation(comment.as_deref()) {
                Some((_, PartitionMark::Closed(needed))) if needed > confirmed => {
                    self.report.waits = vec![RemovalWait::Slot {
                        table,
                        slot,
                        confirmed,
                        needed,
                    }];
                    if dry_run || Instant::now() >= until {
                        return Ok(());
                    }
                    tokio::time::sleep(SLOT_POLL_INTERVAL).await;
                    continue;
                }
                Some((before, PartitionMark::Closed(_))) => MarkKind::RowsDelivered(before),
                // The clock went backwards, so the recorded time does not count.
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
                        let would = format!("would delete rows of {table} from before {before}");
                        self.report.done.push(would);
                        return Ok(());
                    }
                    if !self.delete(target, before).await? {
                        return Ok(());
                    }
                    MarkKind::RowsClosed
                }
                None | Some(_) => MarkKind::RowsClosed,
            };
            if dry_run {
                let would = format!("would note how far the rows of {table} are delivered");
                self.report.done.push(would);
                return Ok(());
            }
            let sql = self.mark_sql(&table, kind);
            if !self.run(&table, &sql).await? {
                return Ok(());
            }
        }
    }

    /// Deletes the rows that were created before that time. Returns false if some have to be kept
    /// for now.
    async fn delete(&mut self, target: &Target, before: Timestamp) -> Result<bool, CatalogError> {
        let table = self.outbox.name.clone();
        let mut deleted = 0;
        let (is_done, waits) = loop {
            if !self.begin_locked().await? {
                break (false, None);
            }
            let batch = read(self.client, self.outbox, before).await?;
            self.commit().await?;
            if batch.places.is_empty() {
                break (true, None);
            }
            let needed = facts::position(self.client).await?;
            match self.wait_for(target, needed).await? {
                SlotWait::Passed => {}
                SlotWait::For(wait) => break (false, Some(wait)),
                SlotWait::Unknown => break (false, None),
            }
            if !self.begin_locked().await? {
                break (false, None);
            }
            let gone = delete(self.client, self.outbox, &batch).await?;
            self.commit().await?;
            deleted += gone;
            if gone == 0 {
                // Another session has locked them.
                break (false, Some(RemovalWait::Rows(table.clone())));
            }
        };
        if deleted > 0 {
            let done = format!("{deleted} rows of {table} from before {before} deleted");
            self.report.done.push(done);
        }
        self.report.waits = Vec::from_iter(waits);
        Ok(is_done)
    }

    /// Waits for a while until the slots have passed a position. Returns whether they have.
    async fn wait_for(&mut self, target: &Target, needed: Lsn) -> Result<SlotWait, CatalogError> {
        let until = Instant::now() + SLOT_TIMEOUT;
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
            if Instant::now() >= until {
                return Ok(SlotWait::For(wait));
            }
            tokio::time::sleep(SLOT_POLL_INTERVAL).await;
        }
    }
}

async fn read(
    client: &Client,
    outbox: &Maintained,
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
        places: Vec::with_capacity(rows.len()),
        writers: Vec::with_capacity(rows.len()),
    };
    for row in &rows {
        batch.places.push(row.try_get(0)?);
        batch.writers.push(row.try_get(1)?);
    }
    Ok(batch)
}

/// Deletes the rows that are still at the same location, and returns their number. Rows that
/// another session has locked are kept.
async fn delete(client: &Client, outbox: &Maintained, batch: &Batch) -> Result<u64, CatalogError> {
    let table = outbox.name.quoted();
    let deleted = client
        .execute(
            &format!(
                "DELETE FROM ONLY {table} AS d WHERE d.ctid = ANY (ARRAY(SELECT t.ctid FROM ONLY {table} AS t \
                 WHERE t.ctid = ANY ($1::text[]::tid[]) \
                 AND (t.ctid::text, t.xmin::text) IN (SELECT * FROM unnest($1::text[], $2::text[])) \
                 FOR UPDATE SKIP LOCKED))"
            ),
            &[&batch.places, &batch.writers],
        )
        .await?;
    Ok(deleted)
}
