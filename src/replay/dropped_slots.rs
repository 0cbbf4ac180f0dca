//! Waits for open transactions to end, and then determines which rows may be missing because slots
//! were dropped.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::ReplayError;
use crate::model::dropped_slot::{DroppedSlot, settle_command};
use crate::model::lsn::Lsn;
use crate::pipeline::settings::PipelineSettings;
use crate::postgres::catalog::{Catalog, CatalogError, Problem, Statement};
use crate::postgres::sql::ToSql;
use crate::postgres::table::TableName;
use crate::retention;

/// How long to wait for open transactions.
const OPEN_TRANSACTION_TIMEOUT: Duration = Duration::from_secs(30);
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Returns the open journal entries about dropped slots, and the SQL condition for rows that may be
/// missing. The condition is empty if all rows may be missing. Every row that the current slot will
/// not deliver is visible in a snapshot taken after this call.
pub(super) async fn rows(
    settings: &PipelineSettings,
    table: &TableName,
    catalog: &Catalog,
) -> Result<(Vec<i64>, String), ReplayError> {
    let target = &settings.target;
    let entries = open_entries(settings, table, catalog).await?;
    if entries.is_empty() {
        return Err(ReplayError::NoDroppedSlots {
            pipeline: settings.name.clone(),
            slot: target.slot.clone(),
        });
    }
    let observed = catalog.observe(target).await?;
    // It is not a problem if the table is no longer in the publication: rows inserted before its
    // removal may still be missing, and rows inserted after its removal are not events.
    let problem = observed
        .problems(target)
        .into_iter()
        .find(|problem| !matches!(problem, Problem::NotPublished { .. }));
    let slot = match (problem, observed.slot) {
        (None, Some(slot)) => slot,
        (Some(Problem::NoTable { .. }), _) => {
            return Err(ReplayError::TableGone {
                table: table.clone(),
                settle: settle_command(
                    &target.commands,
                    target
                        .outbox
                        .is_several()
                        .then(|| table.to_string())
                        .as_deref(),
                ),
            });
        }
        // Without a slot, events that are committed between this replay and the creation of a new
        // slot would be missing.
        (problem, _) => {
            let init = target.init_slot();
            let slot = target.slot.clone();
            return Err(problem.unwrap_or(Problem::NoSlot { slot, init }).into());
        }
    };
    let cluster = catalog.cluster().await?;
    expect_dropped(&entries, &target.slot, slot.confirmed, &cluster)?;
    wait_for_open_transactions(catalog).await?;
    let condition = DroppedSlot::condition(&entries, &cluster);
    for partition in retention::detached_partitions(catalog, table).await? {
        if has_rows(catalog, &partition, &condition).await? {
            let table = table.clone();
            return Err(ReplayError::Detached { table, partition });
        }
    }
    Ok((entries.iter().map(|entry| entry.id).collect(), condition))
}

/// Returns an error if one of the journal entries marks the existing slot to be dropped.
/// `confirmed` is the slot's position.
pub(super) fn expect_dropped(
    entries: &[DroppedSlot],
    slot: &str,
    confirmed: Lsn,
    cluster: &str,
) -> Result<(), ReplayError> {
    match entries.iter().find(|entry| entry.is_at(confirmed, cluster)) {
        Some(entry) => Err(ReplayError::NotDropped {
            slot: slot.to_owned(),
            confirmed,
            entry: entry.id,
        }),
        None => Ok(()),
    }
}

/// Returns the open journal entries about the table. The slot can also have entries about other
/// tables, which it previously delivered.
async fn open_entries(
    settings: &PipelineSettings,
    table: &TableName,
    catalog: &Catalog,
) -> Result<Vec<DroppedSlot>, CatalogError> {
    let mut entries = catalog
        .dropped_slots(&settings.name, &settings.target)
        .await?;
    let table = table.to_string();
    entries.retain(|entry| entry.table.as_ref().is_none_or(|name| *name == table));
    Ok(entries)
}

/// Returns the SQL condition for rows that may be missing according to these journal entries, or
/// `None` if an entry is not open.
pub(super) async fn condition(
    settings: &PipelineSettings,
    catalog: &Catalog,
    entries: &[i64],
) -> Result<Option<String>, ReplayError> {
    let mut open = catalog
        .dropped_slots(&settings.name, &settings.target)
        .await?;
    open.retain(|entry| entries.contains(&entry.id));
    if open.len() != entries.len() {
        return Ok(None);
    }
    let cluster = catalog.cluster().await?;
    Ok(Some(DroppedSlot::condition(&open, &cluster)))
}

/// Waits until all transactions that are currently open in this database have ended. While a
/// transaction is waiting for a synchronous standby, its rows are not visible yet, but its commit
/// record may already precede the start of the slot in the WAL, in which case the slot will not
/// deliver the rows.
pub(super) async fn wait_for_open_transactions(catalog: &Catalog) -> Result<(), ReplayError> {
    const CURRENT_XID: &str = "SELECT pg_current_xact_id()::xid::text";
    const OLDER_TRANSACTIONS_ENDED: &str = "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() \
         AND age(backend_xid) > age($1::text::xid)) AND NOT EXISTS (SELECT FROM pg_prepared_xacts \
         WHERE database = current_database() AND age(transaction) > age($1::text::xid))";
    let query = async |sql, parameters: &[&(dyn ToSql + Sync)]| {
        let row = catalog.client().query_one(sql, parameters).await;
        row.map_err(CatalogError::from)
    };
    let now: String = query(CURRENT_XID, &[])
        .await?
        .try_get(0)
        .map_err(CatalogError::from)?;
    let deadline = Instant::now() + OPEN_TRANSACTION_TIMEOUT;
    loop {
        let ended = query(OLDER_TRANSACTIONS_ENDED, &[&now]).await?;
        if ended.try_get(0).map_err(CatalogError::from)? {
            return Ok(());
        }
        if Instant::now() >= deadline {
            return Err(ReplayError::Open);
        }
        sleep(POLL_INTERVAL).await;
    }
}

pub(super) async fn has_rows(
    catalog: &Catalog,
    table: &TableName,
    condition: &str,
) -> Result<bool, ReplayError> {
    let rows = match condition {
        "" => " LIMIT 1".to_owned(),
        condition => format!(" WHERE {condition} LIMIT 1"),
    };
    let version = catalog.table_version(table).await?;
    let locked = catalog.lock_table(&version, Statement::Select).await?;
    Ok(catalog.select_first(locked, "", &rows).await?.is_some())
}
