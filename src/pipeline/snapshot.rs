//! Before the stream starts, copies the rows that are older than the slot. This happens once in the
//! lifetime of a pipeline.
//!
//! A temporary slot determines which rows are copied. When it is created, the server makes a
//! snapshot that contains exactly the transactions committed before a certain LSN, the consistent
//! point. Walpost copies this snapshot, and then streams from the consistent point with the
//! pipeline's own slot. That slot is acquired before the copy starts, so that no other instance can
//! use it during the copy. Until the copy is durable, no position above the slot's initial position
//! is confirmed.

use std::fmt;
use std::time::Duration;

use tokio::time::{Instant, timeout};
use tracing::{info, warn};

use self::error::SnapshotError;
use super::database::{CatalogQueries, Database, LockedQueries, open_catalog_of_owner};
use super::decode::error::CoreError;
use super::decode::{CopyFrom, Core, Step};
use super::recovery::{self, Remedy};
use super::settings::{Delivery, PipelineSettings, SnapshotMode};
use crate::delivery::chunks::{CopyProgress, KeyType};
use crate::delivery::watermark::OrderError;
use crate::model::lifecycle::SnapshotPhase;
use crate::model::lsn::Lsn;
use crate::outbox::columns::Mapping;
use crate::postgres::catalog::copy;
use crate::postgres::catalog::journal::{Action, Entry};
use crate::postgres::catalog::slot_state::FoundState;
use crate::postgres::catalog::{
    Catalog, CatalogError, Observed, ObservedTable, RowOrder, Rows, SnapshotHistory,
    SnapshotRecord, TableSnapshot,
};
use crate::postgres::replication::{Connection, ConnectionError, CopyOut, Identity};
use crate::postgres::table::TableName;
use crate::postgres::target::{Outbox, Target};
use crate::progress::Progress;
use crate::sink::Sink;

/// Maximum time to wait for any one open transaction when creating the snapshot.
const LOCK_TIMEOUT: &str = "30s";

/// Reason for not copying rows, as recorded in the journal: the slot has been read before, so the
/// older rows were copied or skipped when the slot was new.
const STREAMED_BEFORE: &str = "streamed before";

/// Reason for not copying rows, as recorded in the journal: the table is empty.
const EMPTY_TABLE: &str = "empty table";

/// What to do about rows that are older than the slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Decision {
    /// No rows have to be copied.
    Stream,
    /// No rows have to be copied. Contains the reason, which must be recorded in the journal.
    Settled(&'static str),
    /// The older rows have to be copied.
    Copy,
}

/// Decides whether older rows must be copied, given the pipeline's history and its slot's position,
/// `confirmed`.
fn decide(
    snapshot_history: &SnapshotHistory,
    confirmed: Lsn,
    table: &TableName,
    slot: &str,
) -> Result<Decision, SnapshotError> {
    match (snapshot_history.record, &snapshot_history.rows) {
        (SnapshotRecord::Done, _) => Ok(Decision::Stream),
        (record @ SnapshotRecord::Begun(_), _) if !record.is_open(confirmed) => {
            Ok(Decision::Settled("copied"))
        }
        (SnapshotRecord::NoJournal, _) if snapshot_history.has_streamed => Ok(Decision::Stream),
        (record, _) if record.is_not_started() && snapshot_history.has_streamed => {
            Ok(Decision::Settled(STREAMED_BEFORE))
        }
        (SnapshotRecord::NoJournal, Rows::None) => Ok(Decision::Stream),
        (SnapshotRecord::Nothing | SnapshotRecord::Due { .. }, Rows::None) => {
            Ok(Decision::Settled(EMPTY_TABLE))
        }
        (_, Rows::Denied { grant }) => Err(SnapshotError::Denied {
            table: table.clone(),
            slot: slot.to_owned(),
            grant: grant.clone(),
        }),
        (SnapshotRecord::NoJournal, Rows::About(_)) => Err(SnapshotError::NoJournal {
            table: table.clone(),
            slot: slot.to_owned(),
        }),
        (SnapshotRecord::Begun(_), Rows::None | Rows::About(_))
        | (SnapshotRecord::Nothing | SnapshotRecord::Due { .. }, Rows::About(_)) => {
            Ok(Decision::Copy)
        }
    }
}

/// What the current run does about rows that are older than the slot.
pub(super) enum Planned {
    Nothing,
    /// No rows have to be copied, and a journal entry that states this must be written once the
    /// slot has been acquired.
    Settled(Settlement),
    /// The older rows have to be copied.
    Copy(Box<Plan>),
}

/// The contents of a journal entry that states that a table's older rows do not have to be copied.
pub(super) struct Settlement {
    table: Option<String>,
    why: &'static str,
}

/// A planned copy. Its `COPY` statement is composed later, while the table is locked.
pub(super) struct Plan {
    table: ObservedTable,
    name: TableName,
    row_filter: Option<String>,
    mapping: Mapping,
    key: Vec<(String, KeyType)>,
    /// Progress of the interrupted copy that this copy resumes; `None` for a new copy.
    before: Option<CopyProgress>,
    /// The journal's record of the snapshot when the copy was planned.
    record: SnapshotRecord,
    /// The slot's position when the copy was planned.
    confirmed: Lsn,
    /// Estimated number of rows that remain to be copied.
    about: Option<u64>,
}

/// Decides whether older rows must be copied, and plans the copy. With exactly-once delivery,
/// `delivered` describes what Kafka already contains, according to the checkpoint. `recorded` is
/// the highest position that Walpost may have confirmed, if one is recorded.
///
/// # Errors
/// Returns an error if a catalog query failed, or if rows must be copied but can't be.
pub(super) async fn plan(
    settings: &PipelineSettings,
    catalog: &impl CatalogQueries,
    observed: &Observed,
    delivered: Option<&Known>,
    recorded: Option<Lsn>,
) -> Result<Planned, SnapshotError> {
    let (pipeline, target) = (&settings.name, &settings.target);
    let table = target.outbox.table();
    let copied = delivered.and_then(|known| known.copied.as_ref());
    let before = copied.filter(|copied| !copied.is_complete());
    let snapshots = table_snapshots(target, catalog).await?;
    let slot = observed.slot.as_ref();
    let found = slot.map_or(Lsn::ZERO, |slot| slot.confirmed);
    let confirmed = position_confirmed_by_walpost(found, recorded);
    let unfinished = Unfinished::search(target, catalog, &snapshots, confirmed).await?;
    // If Kafka contains events from the stream and the checkpoint contains no copy in progress,
    // every copy has been delivered completely.
    let is_passed = delivered.is_some_and(|known| known.has_delivered && known.copied.is_none());
    let unfinished = unfinished.filter(|_| !is_passed);
    if let Some(unfinished) = &unfinished
        && settings.snapshot == SnapshotMode::Never
        && copied.is_none()
    {
        return Ok(Planned::Settled(unfinished.skip_remaining(settings)));
    }
    if let Some(unfinished) = unfinished.filter(|found| !found.is_for(table)) {
        return Err(unfinished.error(settings));
    }
    let Some(table) = table else {
        return Ok(Planned::Nothing);
    };
    if before.is_none() && settings.snapshot == SnapshotMode::Never {
        return Ok(Planned::Nothing);
    }
    if before.is_none() && delivered.is_some_and(|known| known.has_delivered) {
        return Ok(match replaced(&snapshots, table) {
            Some(_) => settled(settings, &snapshots, table, STREAMED_BEFORE),
            None => Planned::Nothing,
        });
    }
    let before = before.cloned();
    let snapshot_history = catalog.snapshot_history(target, table).await?;
    let columns = match &before {
        Some(copied) => {
            info!(
                pipeline,
                rows = copied.rows,
                "resuming interrupted snapshot"
            );
            let resumed = observed
                .table
                .as_ref()
                .and_then(|table| resume_columns(copied, table));
            resumed.ok_or_else(|| SnapshotError::Interrupted {
                table: table.clone(),
                rows: copied.rows,
                adopt: settings.adopt(),
            })?
        }
        None => {
            match decide(&snapshot_history, confirmed, table, &target.slot)? {
                Decision::Stream => return Ok(Planned::Nothing),
                Decision::Settled(why) => return Ok(settled(settings, &snapshots, table, why)),
                Decision::Copy => {}
            }
            if let SnapshotRecord::Begun(snapshot_lsn) = snapshot_history.record {
                match delivered {
                    // The checkpoint contains no copy in progress, so no copied rows are in Kafka.
                    Some(_) => info!(
                        pipeline, %snapshot_lsn,
                        "the snapshot started by an earlier run delivered no rows; starting a new snapshot"
                    ),
                    None => warn!(
                        pipeline, %snapshot_lsn,
                        "the snapshot started by an earlier run was not completed; delivering all rows again"
                    ),
                }
            }
            let columns = catalog.order_columns(table).await?.into_iter();
            columns
                .map(|column| (column.name, column.type_oid))
                .collect()
        }
    };
    // The key columns are needed only to resume an interrupted copy, and resuming requires a
    // checkpoint.
    let key: Vec<_> = match delivered {
        Some(_) => {
            let kinds = columns.into_iter();
            let kinds =
                kinds.map(|(name, type_oid)| Some((name, KeyType::from_type_oid(type_oid)?)));
            kinds.collect::<Option<_>>().unwrap_or_default()
        }
        None => Vec::new(),
    };
    let mapping = settings.mapping_for(table, observed.table.as_ref())?;
    Ok(Planned::Copy(Box::new(Plan {
        table: observed.table.clone().unwrap_or_default(),
        name: table.clone(),
        row_filter: row_filter(table, observed)?,
        mapping,
        key,
        about: match snapshot_history.rows {
            Rows::About(rows) => {
                let gone = before.as_ref().map_or(0, |before| before.rows);
                Some(rows.saturating_sub(gone))
            }
            Rows::None | Rows::Denied { .. } => None,
        },
        before,
        record: snapshot_history.record,
        confirmed: found,
    })))
}

/// Returns the position that Walpost itself has confirmed. `found` is the slot's current position,
/// which may be higher if something else moved or re-created the slot. In that case, `found` does
/// not show whether older rows were copied.
fn position_confirmed_by_walpost(found: Lsn, recorded: Option<Lsn>) -> Lsn {
    recorded.map_or(found, |recorded| found.min(recorded))
}

/// A copy of older rows that is not complete yet. Either an earlier run started the copy, possibly
/// with a different definition of the pipeline, or the slot was created for this table but the copy
/// was never started. The copy must be completed even if the outbox's definition has changed in the
/// meantime.
struct Unfinished {
    table: Option<String>,
    snapshot_lsn: Lsn,
}

impl Unfinished {
    /// Searches for an unfinished copy. If there are several, prefers a copy of a table that is not
    /// the current outbox, because such a copy must be reported as an error.
    async fn search(
        target: &Target,
        catalog: &impl CatalogQueries,
        snapshots: &[TableSnapshot],
        confirmed: Lsn,
    ) -> Result<Option<Self>, CatalogError> {
        let begun = Self::find(snapshots, &target.outbox, confirmed);
        if begun
            .as_ref()
            .is_some_and(|found| !found.is_for(target.outbox.table()))
        {
            return Ok(begun);
        }
        let uncopied = match catalog.uncopied_tables(target, snapshots).await {
            // If walpost.table_state can't be used, continue without it. The reason is logged
            // elsewhere during startup.
            Err(error) if recovery::catalog_remedy(&error) == Remedy::Halt => Vec::new(),
            uncopied => uncopied?,
        };
        let uncopied = uncopied.into_iter().next().map(|found| Self {
            table: Some(found.table.to_string()),
            snapshot_lsn: found.slot_at,
        });
        Ok(uncopied.or(begun))
    }

    fn find(snapshots: &[TableSnapshot], outbox: &Outbox, confirmed: Lsn) -> Option<Self> {
        let open = snapshots.iter().filter_map(|found| match found.record {
            SnapshotRecord::Begun(snapshot_lsn) if found.record.is_open(confirmed) => Some(Self {
                table: found.table.clone(),
                snapshot_lsn,
            }),
            _ => None,
        });
        open.min_by_key(|found| found.is_for(outbox.table()))
    }

    fn is_for(&self, table: Option<&TableName>) -> bool {
        let (ours, found) = (table.map(TableName::to_string), self.table.as_ref());
        ours.is_some_and(|ours| found.is_none_or(|found| *found == ours))
    }

    /// Logs that the copy will not be completed because of `snapshot = "never"`, and returns the
    /// contents of the journal entry to write.
    fn skip_remaining(&self, settings: &PipelineSettings) -> Settlement {
        let pipeline = &settings.name;
        let (table, snapshot_lsn) = (self.table.clone(), self.snapshot_lsn);
        warn!(
            pipeline, table, %snapshot_lsn,
            "the copy of older rows was not complete, and snapshot = \"never\" excludes the remaining rows: rows committed before \
             snapshot_lsn may be missing from Kafka. To send them: {}",
            settings.target.replay_from()
        );
        Settlement {
            table,
            why: "snapshot = \"never\"",
        }
    }

    fn error(self, settings: &PipelineSettings) -> SnapshotError {
        SnapshotError::Unfinished {
            table: self
                .table
                .unwrap_or_else(|| "of an earlier configuration".to_owned()),
            outbox: settings.target.outbox.to_string(),
            snapshot_lsn: self.snapshot_lsn,
            never: match settings.target.outbox.is_several() {
                true => {
                    "restore the pipeline's previous definition with snapshot = \"never\", and keep it until the log contains \"streaming\""
                }
                false => "snapshot = \"never\"",
            },
            adopt: match settings.delivery {
                Delivery::AtLeastOnce => String::new(),
                Delivery::ExactlyOnce(_) => {
                    format!("{}; and then ", settings.adopt())
                }
            },
        }
    }
}

/// Returns the journal entries about the slot's snapshots.
async fn table_snapshots(
    target: &Target,
    catalog: &impl CatalogQueries,
) -> Result<Vec<TableSnapshot>, CatalogError> {
    match catalog.table_snapshots(target).await {
        Err(CatalogError::NoJournal { .. }) => Ok(Vec::new()),
        // If the role lacks the privilege to read the journal, it can't have started a copy.
        Err(CatalogError::Server(error))
            if target.outbox.table().is_none() && error.code == INSUFFICIENT_PRIVILEGE =>
        {
            Ok(Vec::new())
        }
        snapshots => snapshots,
    }
}

/// Returns the table that this slot was used for previously. Returns `None` if the journal already
/// has an entry about `table`.
fn replaced<'s>(snapshots: &'s [TableSnapshot], table: &TableName) -> Option<&'s str> {
    match SnapshotRecord::of_table(snapshots, Some(table)) {
        SnapshotRecord::Nothing => {
            let mut others = snapshots
                .iter()
                .filter(|found| !found.record.is_not_started());
            others.find_map(|found| found.table.as_deref())
        }
        _ => None,
    }
}

fn settled(
    settings: &PipelineSettings,
    snapshots: &[TableSnapshot],
    table: &TableName,
    why: &'static str,
) -> Planned {
    if let Some(before) = replaced(snapshots, table) {
        warn!(
            pipeline = settings.name,
            slot = settings.target.slot,
            "the slot was previously used for table {before}: rows that {table} contained when it replaced {before} are \
             not delivered, unless the outbox already included {table}. To send these rows: {}",
            settings.target.replay_from()
        );
    }
    let table = Some(table.to_string());
    Planned::Settled(Settlement { table, why })
}

/// Returns whether the database alone shows that no rows have to be copied. Used before the
/// checkpoint has been read.
pub(super) async fn has_nothing_to_copy(
    settings: &PipelineSettings,
    catalog: &impl CatalogQueries,
    observed: &Observed,
    recorded: Option<Lsn>,
) -> bool {
    // If an error prevents the decision, a later phase of startup reports the error.
    let decided = decided(settings, catalog, observed, recorded).await;
    decided.is_ok_and(|decided| !matches!(decided, Some((Decision::Copy, _))))
}

/// Decides from the catalog alone whether older rows must be copied. Also returns the approximate
/// number of rows in the table. Returns `None` if the outbox is not a single table, if the settings
/// exclude older rows, or if there is no slot.
async fn decided(
    settings: &PipelineSettings,
    catalog: &impl CatalogQueries,
    observed: &Observed,
    recorded: Option<Lsn>,
) -> Result<Option<(Decision, Rows)>, SnapshotError> {
    let target = &settings.target;
    let (SnapshotMode::Initial, Some(slot)) = (settings.snapshot, &observed.slot) else {
        return Ok(None);
    };
    let table = target.outbox.table();
    let snapshots = table_snapshots(target, catalog).await?;
    let confirmed = position_confirmed_by_walpost(slot.confirmed, recorded);
    let unfinished = Unfinished::search(target, catalog, &snapshots, confirmed).await?;
    if let Some(unfinished) = unfinished.filter(|found| !found.is_for(table)) {
        return Err(unfinished.error(settings));
    }
    let Some(table) = table else {
        return Ok(None);
    };
    let snapshot_history = catalog.snapshot_history(target, table).await?;
    let decision = decide(&snapshot_history, confirmed, table, &target.slot)?;
    Ok(Some((decision, snapshot_history.rows)))
}

/// A prediction of what `walpost run` does about rows that are older than the slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outlook {
    /// `walpost run` would copy approximately this many rows.
    Copies(u64),
    /// `walpost run` would not copy any rows.
    Nothing,
}

impl fmt::Display for Outlook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Copies(rows) => write!(
                f,
                "walpost run will first deliver the rows that were written before the stream starts (about {rows}); with \
                 snapshot = \"never\", it skips these rows"
            ),
            Self::Nothing => f.write_str("no rows older than the slot remain to be delivered"),
        }
    }
}

/// Predicts what `walpost run` would do about older rows if it were started now. Returns `None` if
/// the outbox is not a single table, if the settings exclude older rows, or if there is no slot.
///
/// # Errors
/// Returns an error if a catalog query failed, or if older rows would halt the pipeline.
pub(crate) async fn predict_snapshot(
    settings: &PipelineSettings,
    catalog: &Catalog,
    observed: &Observed,
) -> Result<Option<Outlook>, SnapshotError> {
    let of = catalog
        .slot_identity(&settings.name, &settings.target)
        .await?;
    let recorded = match catalog.slot_state(&of).await? {
        FoundState::State(state) => state.map(|state| state.confirmed),
        FoundState::Unusable(_) => None,
    };
    let decided = decided(settings, catalog, observed, recorded).await?;
    Ok(decided.map(|decided| match decided {
        (Decision::Copy, Rows::About(rows)) => Outlook::Copies(rows),
        _ => Outlook::Nothing,
    }))
}

/// The events that Kafka already contains, according to the checkpoint of exactly-once delivery.
pub(super) struct Known {
    /// Whether Kafka contains events from the stream.
    pub(super) has_delivered: bool,
    /// The copied rows that Kafka contains.
    pub(super) copied: Option<CopyProgress>,
}

/// Writes a journal entry stating that no rows have to be copied. A failure to write the entry is
/// only logged, because the next run reaches the same conclusion.
///
/// # Errors
/// Returns an error if Walpost fails to determine, or to record, which partitions were detached
/// before their rows were copied.
pub(super) async fn settle(
    settings: &PipelineSettings,
    catalog: &impl CatalogQueries,
    confirmed: Lsn,
    settlement: Settlement,
) -> Result<(), SnapshotError> {
    let (pipeline, why) = (&settings.name, settlement.why);
    if let Some(table) = settings
        .target
        .outbox
        .table()
        .filter(|_| why == EMPTY_TABLE)
    {
        catalog
            .record_uncopied_partitions(pipeline, &settings.target, table, confirmed)
            .await?;
    }
    info!(
        pipeline,
        why, "no snapshot is needed: no rows older than the slot remain to be delivered"
    );
    let entry = Entry {
        pipeline,
        target: &settings.target,
        action: Action::Snapshot,
        from: None,
        to: Some(confirmed),
        detail: detail(SnapshotRecord::DONE, settlement.table, Some(why)),
    };
    if let Err(error) = catalog.write_journal(&entry).await {
        warn!(pipeline, %error, "failed to record in the journal that no snapshot is needed");
    }
    Ok(())
}

/// Returns the columns by which the interrupted copy ordered its rows, or `None` if the copy can't
/// be resumed in this order.
fn resume_columns(copied: &CopyProgress, table: &ObservedTable) -> Option<Vec<(String, u32)>> {
    let columns = &table.columns;
    let column = |name: &String| {
        let (name, type_oid) = columns.iter().find(|(column, _)| column == name)?;
        KeyType::from_type_oid(*type_oid)?;
        Some((name.clone(), *type_oid))
    };
    let order: Option<Vec<_>> = copied.key.iter().map(column).collect();
    order.filter(|order| !order.is_empty())
}

/// Returns the publication's row filter for the table, if it has one.
fn row_filter(table: &TableName, observed: &Observed) -> Result<Option<String>, SnapshotError> {
    let Some(publication) = &observed.publication else {
        return Ok(None);
    };
    if publication.unsafe_filter.is_some() {
        // The row filter has changed since the session started, and is no longer safe to evaluate.
        // Start over, so that the next session reports the unsafe filter.
        return Err(CatalogError::TableChanged(table.clone()).into());
    }
    if publication.has_locked_filter {
        let reason =
            format!("table {table} is locked, and the publication has a row filter for it");
        return Err(SnapshotError::Waits(reason));
    }
    Ok(publication.row_filter.clone())
}

impl Plan {
    /// Composes the statement that copies the published rows that have not been copied yet. The
    /// statement selects the columns that the mapping and the key require.
    async fn statement(&self, locked: &impl LockedQueries) -> Result<String, SnapshotError> {
        let resumed = self
            .before
            .as_ref()
            .and_then(|before| resume_columns(before, &self.table));
        let order = match resumed {
            Some(columns) => RowOrder::from_columns(locked, columns),
            None => locked.row_order().await?,
        };
        // The rows must be sorted byte by byte, because Walpost also compares keys itself, and can
        // compare them only byte by byte.
        let order = match self.key.is_empty() {
            true => order,
            false => order.by_bytes(),
        };
        let columns = self.table.columns.iter().enumerate();
        let needed = columns
            .filter(|(index, _)| self.mapping.slot(*index).is_some())
            .map(|(_, (name, _))| name);
        let needed = needed.chain(self.key.iter().map(|(name, _)| name));
        let needed: Vec<_> = needed.cloned().collect();
        let before = self.before.as_ref();
        let upto = before.and_then(|before| before.chunks.last()?.upto.as_ref());
        let behind = upto.map(|upto| order.compared(">", upto));
        let conditions: Vec<_> = self.row_filter.iter().cloned().chain(behind).collect();
        Ok(copy::statement(&needed, &self.name, &conditions, &order))
    }
}

fn detail(state: &str, table: Option<String>, why: Option<&str>) -> serde_json::Value {
    serde_json::json!({ SnapshotRecord::STATE: state, "table": table, "why": why })
}

fn entry<'s>(settings: &'s PipelineSettings, snapshot_lsn: Lsn, state: &str) -> Entry<'s> {
    let table = settings.target.outbox.table().map(ToString::to_string);
    Entry {
        pipeline: &settings.name,
        target: &settings.target,
        action: Action::Snapshot,
        from: None,
        to: Some(snapshot_lsn),
        detail: detail(state, table, None),
    }
}

/// Writes a journal entry stating that a copy of the table is starting, and which partitions the
/// table has.
async fn write_begun(
    settings: &PipelineSettings,
    catalog: &impl CatalogQueries,
    table: &TableName,
    snapshot_lsn: Lsn,
) -> Result<(), CatalogError> {
    let scope = catalog.copy_scope(table).await?;
    let mut entry = entry(settings, snapshot_lsn, SnapshotRecord::BEGUN);
    scope.add_to(&mut entry.detail);
    catalog.write_journal(&entry).await
}

/// A snapshot that has been created but not copied yet.
pub(super) struct Snapshot {
    plan: Box<Plan>,
    connection: Connection,
    /// The consistent point: the snapshot contains the transactions whose commit record precedes
    /// this LSN.
    snapshot_lsn: Lsn,
}

impl Snapshot {
    /// Creates a snapshot on the server identified by `identity`. The snapshot exists only as long
    /// as its connection.
    pub(super) async fn make(
        settings: &PipelineSettings,
        database: &impl Database,
        catalog: &impl CatalogQueries,
        identity: &Identity,
        mut plan: Box<Plan>,
    ) -> Result<Self, SnapshotError> {
        let pipeline = &settings.name;
        let (limit, row_bytes) = (settings.link_timeout, settings.row_bytes_max);
        let mut connection = database.connect(limit, row_bytes).await?;
        let found = connection.identify().await?;
        if (&found.system_id, found.timeline) != (&identity.system_id, identity.timeline) {
            return Err(SnapshotError::OtherServer);
        }
        info!(
            pipeline,
            "starting a snapshot of the table; waiting for currently open transactions to end"
        );
        connection
            .query(&format!("SET lock_timeout = '{LOCK_TIMEOUT}'"))
            .await?;
        connection
            .query("BEGIN TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
            .await?;
        let name = format!("walpost_snapshot_{:016x}", fastrand::u64(..));
        let create =
            format!("CREATE_REPLICATION_SLOT \"{name}\" TEMPORARY LOGICAL pgoutput USE_SNAPSHOT");
        let made = connection
            .query(&create)
            .await
            .map_err(|error| match error {
                ConnectionError::Server(error) if error.code == LOCK_NOT_AVAILABLE => {
                    SnapshotError::Waits(error.to_string())
                }
                error => error.into(),
            })?;
        let snapshot_lsn = made.get(1).cloned().flatten();
        let snapshot_lsn = snapshot_lsn
            .and_then(|text| text.parse().ok())
            .ok_or_else(|| {
                ConnectionError::Protocol(format!("CREATE_REPLICATION_SLOT answered with {made:?}"))
            })?;
        // Write the journal entry before the slot is acquired. Once it is acquired, the server's
        // statistics show that the slot has been read, and without an entry, the next run would
        // conclude that nothing has to be copied. An existing entry is not enough if something else
        // has moved the slot past the position in that entry.
        if !plan.record.is_open(plan.confirmed) && plan.before.is_none() {
            let record = catalog.snapshot_record(&settings.target).await?;
            if record != plan.record {
                return Err(SnapshotError::Outrun);
            }
            write_begun(settings, catalog, &plan.name, snapshot_lsn).await?;
            plan.record = SnapshotRecord::Begun(snapshot_lsn);
        }
        Ok(Self {
            plan,
            connection,
            snapshot_lsn,
        })
    }

    /// Returns the LSN at which the stream must start: the consistent point of the copy's first
    /// snapshot.
    pub(super) fn stream_from(&self) -> Lsn {
        let before = self.plan.before.as_ref();
        before.map_or(self.snapshot_lsn, CopyProgress::first_snapshot_lsn)
    }

    /// Starts the copy. The pipeline's slot must have been acquired; `confirmed` is its position.
    pub(super) async fn copy(
        mut self,
        settings: &PipelineSettings,
        catalog: &impl CatalogQueries,
        confirmed: Lsn,
        core: &mut Core,
    ) -> Result<Copying, SnapshotError> {
        let (pipeline, target) = (&settings.name, &settings.target);
        let record = catalog.snapshot_record(target).await?;
        let stream_from = self.stream_from();
        if is_superseded(self.plan.record, record, confirmed, stream_from) {
            return Err(SnapshotError::Outrun);
        }
        if self.plan.before.is_none() && record != SnapshotRecord::Begun(self.snapshot_lsn) {
            write_begun(settings, catalog, &self.plan.name, self.snapshot_lsn).await?;
        }
        // Locking fails if the table's partitions have changed since the copy was planned.
        catalog
            .record_uncopied_partitions(pipeline, target, &self.plan.name, confirmed)
            .await?;
        let locked = catalog.lock_table(&self.plan.table.version).await;
        let locked = locked.map_err(|error| error.with_commands(&target.commands))?;
        // The publication's row filter may have changed since the copy was planned. From now on, it
        // can't change, because the table is locked.
        let observed = catalog.observe(target).await?;
        if row_filter(&self.plan.name, &observed)? != self.plan.row_filter {
            return Err(CatalogError::TableChanged(self.plan.name).into());
        }
        let statement = self.plan.statement(&locked).await?;
        // `copy_out` waits for the server's response, which arrives once the server has planned the
        // statement.
        let process = self.connection.server_process().await?;
        let planned = self.connection.copy_out(&statement);
        locked.until_planned_by(&process, planned).await??;
        let Plan {
            mapping,
            key,
            before,
            about,
            ..
        } = *self.plan;
        core.begin_snapshot(CopyFrom {
            snapshot_lsn: self.snapshot_lsn,
            mapping,
            key,
            before,
        })
        .map_err(CoreError::from)?;
        let stats = core.delivery.watermark.stats();
        stats.record_snapshot_phase(SnapshotPhase::Copying, about);
        info!(
            pipeline, snapshot_lsn = %self.snapshot_lsn, rows = about, host = self.connection.host,
            "snapshot started: copying the rows that were written before the stream started"
        );
        Ok(Copying {
            connection: Some(self.connection),
            snapshot_lsn: stream_from,
            resumed: confirmed,
            progress: Some(Progress::new("rows copied", about)),
            progressed: None,
            rows: 0,
            counted: 0,
        })
    }
}

/// Returns whether another instance has used the slot since the copy was planned. In that case,
/// either the journal has a new entry about the snapshot, or the slot's position is past the point
/// at which the stream must start.
fn is_superseded(
    planned: SnapshotRecord,
    record: SnapshotRecord,
    confirmed: Lsn,
    stream_from: Lsn,
) -> bool {
    record != planned || confirmed > stream_from
}

const LOCK_NOT_AVAILABLE: &str = "55P03";
/// SQLSTATE insufficient_privilege.
const INSUFFICIENT_PRIVILEGE: &str = "42501";

/// A copy that is still in progress, or whose rows are not all durable yet.
pub(super) struct Copying {
    /// The connection that the rows are read from; `None` once all rows have been read.
    connection: Option<Connection>,
    snapshot_lsn: Lsn,
    /// The slot's position when the copy started.
    resumed: Lsn,
    progress: Option<Progress>,
    /// The number of rows read when the copy last made progress, and the time of that progress.
    progressed: Option<(u64, Instant)>,
    /// Number of rows that have been read. `counted` is how many of them have been added to the
    /// counters.
    rows: u64,
    counted: u64,
}

/// Number of rows between updates of the counters and the progress display.
const PROGRESS_ROWS: u64 = 1024;

/// The result of trying to read a row.
pub(super) enum Read {
    /// A row was processed.
    Row,
    /// No row has arrived yet.
    Nothing,
    /// All rows have been read.
    End,
    /// The limit on records in flight has been reached, or the sink's queue is full.
    Full,
    /// The sink has to prepare this topic first.
    NewTopic(String),
}

/// Waits until more of the copy's data has been received. Never completes if no copy is in
/// progress.
pub(super) async fn receive_copied(copying: &mut Option<Copying>) -> Result<(), ConnectionError> {
    match copying
        .as_mut()
        .and_then(|copying| copying.connection.as_mut())
    {
        Some(connection) => connection.receive().await,
        None => std::future::pending().await,
    }
}

impl Copying {
    /// Returns whether rows remain to be read.
    pub(super) fn reads(&self) -> bool {
        self.connection.is_some()
    }

    /// Returns whether the sink has accepted a row within the last `limit`.
    pub(super) fn progresses(&mut self, now: Instant, limit: Duration) -> bool {
        match self.progressed {
            Some((rows, since)) if rows == self.rows => now < since + limit,
            _ => {
                self.progressed = Some((self.rows, now));
                true
            }
        }
    }

    /// Processes the next row if it has been received.
    pub(super) fn row(
        &mut self,
        core: &mut Core,
        sink: &mut impl Sink,
    ) -> Result<Read, SnapshotError> {
        let Some(connection) = &mut self.connection else {
            return Ok(Read::Nothing);
        };
        let row = connection
            .peek_row()
            .map_err(|error| core.unread::<SnapshotError>(error))?;
        match row {
            None => {
                self.count_rows(core);
                Ok(Read::Nothing)
            }
            Some(CopyOut::Row(line)) => match core.snapshot_row(line, sink)? {
                Step::Done | Step::Answer => {
                    connection.consume();
                    self.rows += 1;
                    if self.rows - self.counted >= PROGRESS_ROWS {
                        self.count_rows(core);
                    }
                    Ok(Read::Row)
                }
                Step::Full => Ok(Read::Full),
                Step::NewTopic(topic) => Ok(Read::NewTopic(topic)),
                // `NewTable` and `SetAside` occur only in the stream, not in a copy.
                Step::NewTable(_) | Step::SetAside(_) => {
                    Err(CoreError::from(OrderError::Stray).into())
                }
            },
            Some(CopyOut::End) => {
                core.end_snapshot().map_err(CoreError::from)?;
                self.count_rows(core);
                let stats = core.delivery.watermark.stats();
                stats.record_snapshot_phase(SnapshotPhase::Delivering, None);
                // Close the connection, which drops the temporary slot and the snapshot.
                self.connection = None;
                if let Some(progress) = self.progress.take() {
                    progress.finish();
                }
                Ok(Read::End)
            }
        }
    }

    /// Returns the topics of the rows that have been received but not processed.
    pub(super) fn topics_ahead(&self, core: &Core) -> Vec<String> {
        match &self.connection {
            Some(connection) => core.snapshot_topics_ahead(connection.buffered()),
            None => Vec::new(),
        }
    }

    fn count_rows(&mut self, core: &Core) {
        let more = self.rows - self.counted;
        self.counted = self.rows;
        core.delivery.watermark.stats().add_copied_rows(more);
        if let Some(progress) = &mut self.progress {
            progress.advance(more);
        }
    }

    /// Returns `true` if all rows have been read and `confirmed` shows that they are durable. To
    /// show this, `confirmed` must have advanced since the copy started: if a standby without later
    /// WAL was promoted, the slot was already at the consistent point when the copy started.
    pub(super) fn is_durable(&self, confirmed: Lsn) -> bool {
        !self.reads() && confirmed >= self.snapshot_lsn && confirmed > self.resumed
    }

    /// Writes a journal entry stating that the copy is complete. A failure is only logged, because
    /// the next run can infer from the confirmed position that the copy is complete.
    pub(super) async fn record_completion(
        &self,
        settings: &PipelineSettings,
        database: &impl Database,
    ) {
        let pipeline = &settings.name;
        info!(pipeline, rows = self.rows, snapshot_lsn = %self.snapshot_lsn, "snapshot delivered");
        let entry = entry(settings, self.snapshot_lsn, SnapshotRecord::DONE);
        let record = async {
            let catalog = open_catalog_of_owner(settings, database).await?;
            catalog.write_journal(&entry).await
        };
        match timeout(JOURNAL_TIMEOUT, record).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                warn!(pipeline, %error, "failed to record in the journal that the snapshot is complete")
            }
            Err(_) => warn!(
                pipeline,
                "timed out recording in the journal that the snapshot is complete"
            ),
        }
    }
}

/// Timeout for writing the final journal entry. Kept short, because the stream has to wait until
/// the entry has been written.
const JOURNAL_TIMEOUT: Duration = Duration::from_secs(5);

pub(crate) mod error;
pub(crate) mod pace;
#[cfg(test)]
mod tests;
