//! Determines which rows of a table that is set aside may be missing, and whether the stream
//! delivers later rows.
//!
//! A replay sends every row that was committed before a certain LSN. The stream resumes delivery at
//! this LSN if no row with a higher commit LSN was omitted. The pipeline makes this decision,
//! because it keeps track of the rows that it has omitted.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::ReplayError;
use super::dropped_slots::{has_rows, wait_for_open_transactions};
use crate::model::lsn::Lsn;
use crate::model::set_aside::SetAside;
use crate::pipeline::settings::PipelineSettings;
use crate::postgres::catalog::drop_slot::missing_rows;
use crate::postgres::catalog::{Catalog, CatalogError, Problem};
use crate::postgres::table::TableName;
use crate::retention;

/// How long to wait for the pipeline, which reads the journal every few seconds.
const HAND_OVER_TIMEOUT: Duration = Duration::from_secs(20);
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// The state of a set-aside table after a replay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SetAsideOutcome {
    /// The stream has resumed delivery of the table's rows.
    Resumed,
    /// The pipeline has not yet recorded whether it resumes delivery of the table.
    Pending,
    /// The table remains set aside, for the given reason.
    Missed(String),
}

/// Returns the open journal entries about the table, and the SQL condition for rows that may be
/// missing.
pub(super) async fn open_entries(
    settings: &PipelineSettings,
    table: &TableName,
    catalog: &Catalog,
) -> Result<(Vec<i64>, String), ReplayError> {
    let target = &settings.target;
    let entries = entries(settings, table, catalog).await?;
    if entries.is_empty() {
        return Err(ReplayError::NotSetAside {
            table: table.clone(),
            slot: target.slot.clone(),
        });
    }
    let observed = catalog.observe(target).await?;
    let mut problems = observed.problems(target).into_iter();
    if let Some(problem) = problems.find(|problem| !settings.tolerates(problem)) {
        return Err(problem.into());
    }
    if observed.slot.is_none() {
        // Without a slot, events that are committed between this replay and the creation of a new
        // slot would be missing.
        let (slot, init) = (target.slot.clone(), target.init_slot());
        return Err(Problem::NoSlot { slot, init }.into());
    }
    let condition = missing_condition(catalog, &entries).await?;
    Ok((entries.iter().map(|entry| entry.id).collect(), condition))
}

/// Returns an LSN such that every snapshot taken after this call contains all rows with a lower
/// commit LSN.
pub(super) async fn end_lsn(
    table: &TableName,
    catalog: &Catalog,
    condition: &str,
) -> Result<Lsn, ReplayError> {
    let sql = "SELECT pg_current_wal_insert_lsn()";
    let row = catalog.client().query_one(sql, &[]).await;
    let before = row.and_then(|row| row.try_get(0));
    let before = before.map_err(CatalogError::from)?;
    // A transaction's rows become visible only some time after its commit record is written, so
    // wait for transactions that may already have a commit record.
    wait_for_open_transactions(catalog).await?;
    for partition in retention::detached_partitions(catalog, table).await? {
        if has_rows(catalog, &partition, condition).await? {
            let table = table.clone();
            return Err(ReplayError::Detached { table, partition });
        }
    }
    Ok(before)
}

/// Returns the lowest transaction ID whose changes may not be visible in the current transaction's
/// snapshot.
pub(super) async fn snapshot_xmin(reader: &Catalog) -> Result<String, ReplayError> {
    let sql = "SELECT pg_snapshot_xmin(pg_current_snapshot())::text";
    let row = reader.client().query_one(sql, &[]).await;
    let xmin = row.and_then(|row| row.try_get(0));
    Ok(xmin.map_err(CatalogError::from)?)
}

/// Returns the SQL condition for rows that may be missing according to these journal entries, or
/// `None` if an entry is not open.
pub(super) async fn condition(
    settings: &PipelineSettings,
    table: &TableName,
    catalog: &Catalog,
    ids: &[i64],
) -> Result<Option<String>, ReplayError> {
    let mut open = entries(settings, table, catalog).await?;
    open.retain(|entry| ids.contains(&entry.id));
    if open.len() != ids.len() {
        return Ok(None);
    }
    Ok(Some(missing_condition(catalog, &open).await?))
}

/// Waits until the pipeline has recorded whether it resumes delivery of the table after the replay
/// that covers these journal entries.
pub(super) async fn hand_over(
    settings: &PipelineSettings,
    catalog: &Catalog,
    ids: &[i64],
) -> Result<SetAsideOutcome, ReplayError> {
    let deadline = Instant::now() + HAND_OVER_TIMEOUT;
    loop {
        let entries = catalog.set_aside(&settings.target).await?;
        let mut ours = entries.iter().filter(|entry| ids.contains(&entry.id));
        if let Some(closed) = ours.find(|entry| entry.until.is_some()) {
            let is_next = |entry: &&SetAside| {
                entry.until.is_none() && Some(entry.position.commit) == closed.until
            };
            return Ok(match entries.iter().find(is_next) {
                Some(next) => SetAsideOutcome::Missed(next.reason.clone()),
                None => SetAsideOutcome::Resumed,
            });
        }
        let slot = catalog.slot(&settings.target.slot).await?;
        let is_read = slot.is_some_and(|slot| slot.active_pid.is_some());
        if !is_read || Instant::now() >= deadline {
            return Ok(SetAsideOutcome::Pending);
        }
        sleep(POLL_INTERVAL).await;
    }
}

async fn entries(
    settings: &PipelineSettings,
    table: &TableName,
    catalog: &Catalog,
) -> Result<Vec<SetAside>, CatalogError> {
    let relation = catalog.relation(table).await?;
    catalog
        .set_aside_of_table(&settings.target, &table.to_string(), relation)
        .await
}

async fn missing_condition(
    catalog: &Catalog,
    entries: &[SetAside],
) -> Result<String, CatalogError> {
    let cluster = catalog.cluster().await?;
    let since = entries
        .iter()
        .map(|entry| (entry.since, entry.cluster.as_deref()));
    Ok(missing_rows(since, &cluster))
}
