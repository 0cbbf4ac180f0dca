//! Determines which rows may be missing after slots were dropped, once that is possible.

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

/// Returns the open journal entries, and the condition for rows that may be missing, which is empty
/// for all rows. A snapshot taken after this call contains every row that is in no slot.
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
    // The rows of a table that left the publication may be missing too. Its later rows are not
    // events.
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
        // Without a slot, events that are committed until there is one would still be missing.
        (problem, _) => {
            let init = target.init_slot();
            let slot = target.slot.clone();
            return Err(problem.unwrap_or(Problem::NoSlot { slot, init }).into());
        }
    };
    let cluster = catalog.cluster().await?;
    expect_dropped(&entries, &target.slot, slot.confirmed, &cluster)?;
    wait_for_open(catalog).await?;
    let condition = DroppedSlot::condition(&entries, &cluster);
    for partition in retention::taken_off(catalog, table).await? {
        if has_rows(catalog, &partition, &condition).await? {
            let table = table.clone();
            return Err(ReplayError::Detached { table, partition });
        }
    }
    Ok((entries.iter().map(|entry| entry.id).collect(), condition))
}

/// Checks that a slot at `confirmed` is not the one that was to be dropped according to an entry.
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

/// Returns the open entries about the table. The slot may have delivered other tables before.
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

/// Returns the condition for rows that may be missing according to these journal entries, or `None`
/// if one of them is not open.
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

/// Waits until every transaction of this database that is open now has ended. The rows of a
/// transaction are not visible yet if its commit record is in the WAL before the start of the slot,
/// but it waits for a synchronous standby.
pub(super) async fn wait_for_open(catalog: &Catalog) -> Result<(), ReplayError> {
    const CURRENT_XID: &str = "SELECT pg_current_xact_id()::xid::text";
    const OLDER_TRANSACTIONS_ENDED: &str = "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() \
         AND age(backend_xid) > age($1::text::xid)) AND NOT EXISTS (SELECT FROM pg_prepared_xacts \
         WHERE database = current_database() AND age(transaction) > age($1::text::xid))";
    let ask = async |sql, parameters: &[&(dyn ToSql + Sync)]| {
        let row = catalog.client().query_one(sql, parameters).await;
        row.map_err(CatalogError::from)
    };
    let now: String = ask(CURRENT_XID, &[])
        .await?
        .try_get(0)
        .map_err(CatalogError::from)?;
    let until = Instant::now() + OPEN_TRANSACTION_TIMEOUT;
    loop {
        let ended = ask(OLDER_TRANSACTIONS_ENDED, &[&now]).await?;
        if ended.try_get(0).map_err(CatalogError::from)? {
            return Ok(());
        }
        if Instant::now() >= until {
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
