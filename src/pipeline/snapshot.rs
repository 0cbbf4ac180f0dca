//! Rows that are older than the slot come first, once in a pipeline's life.
//!
//! A temporary slot says which they are: with it the server makes a snapshot that has what was
//! committed before one LSN, the consistent point, and nothing else. That snapshot is copied, and the
//! pipeline's own slot streams from the consistent point on. It is taken before the copy begins, so that no
//! other instance has it meanwhile, and nothing beyond where it stands is confirmed until the copy
//! is durable.

use std::fmt;
use std::time::Duration;

use tokio::time::{Instant, timeout};
use tracing::{info, warn};

use self::error::SnapshotError;
use super::database::{CatalogQueries, Database, LockedQueries};
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

/// How long the snapshot may wait for one transaction that is open.
const LOCK_TIMEOUT: &str = "30s";

/// Why there is nothing to copy: what is older was delivered when the slot was new.
const STREAMED: &str = "streamed before";

/// What to do about rows that are older than the slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Decision {
    /// Nothing.
    Stream,
    /// Nothing, and to write that down, for this reason.
    Settled(&'static str),
    /// Copy them.
    Copy,
}

/// By what is known of the past, for a slot that is at `confirmed`.
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
        (record, _) if record.is_unbegun() && snapshot_history.has_streamed => {
            Ok(Decision::Settled(STREAMED))
        }
        (SnapshotRecord::NoJournal, Rows::None) => Ok(Decision::Stream),
        (SnapshotRecord::Nothing | SnapshotRecord::Due { .. }, Rows::None) => {
            Ok(Decision::Settled("empty table"))
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

/// What a start does about rows that are older than the slot.
pub(super) enum Planned {
    Nothing,
    /// Nothing, and to record that when it is certain whose slot it is.
    Settled(Settlement),
    /// Copy them.
    Copy(Box<Plan>),
}

/// That the rows of a table that are older than the slot need not be copied.
pub(super) struct Settlement {
    table: Option<String>,
    why: &'static str,
}

/// A copy that is to be made. Its statement is composed when the table is locked.
pub(super) struct Plan {
    table: ObservedTable,
    name: TableName,
    row_filter: Option<String>,
    mapping: Mapping,
    key: Vec<(String, KeyType)>,
    /// What was copied before it was interrupted.
    before: Option<CopyProgress>,
    /// What the journal said when this was planned.
    record: SnapshotRecord,
    /// Where the slot was then.
    confirmed: Lsn,
    /// Rows that are to be expected.
    about: Option<u64>,
}

/// Says what to do about older rows; `delivered` is what exactly-once knows of them, and `recorded` the last position that Walpost
/// may have confirmed of the slot, if that is known.
///
/// # Errors
/// The catalog can't be asked, or there is something that can't be copied.
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
    let confirmed = confirmed_by_us(found, recorded);
    let unfinished = Unfinished::search(target, catalog, &snapshots, confirmed).await?;
    // A checkpoint with events of the stream and none of a copy says that every copy is in Kafka.
    let is_passed = delivered.is_some_and(|known| known.has_delivered && known.copied.is_none());
    let unfinished = unfinished.filter(|_| !is_passed);
    if let Some(unfinished) = &unfinished
        && settings.snapshot == SnapshotMode::Never
        && copied.is_none()
    {
        return Ok(Planned::Settled(unfinished.leave_out(settings)));
    }
    if let Some(unfinished) = unfinished.filter(|found| !found.is_of(table)) {
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
            Some(_) => settled(settings, &snapshots, table, STREAMED),
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
                .and_then(|table| go_on(copied, table));
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
                    // A checkpoint without rows of the copy says that none of them is in Kafka.
                    Some(_) => info!(
                        pipeline, %snapshot_lsn,
                        "the snapshot of an earlier start had delivered nothing and is begun again"
                    ),
                    None => warn!(
                        pipeline, %snapshot_lsn,
                        "the snapshot of an earlier start was not completed: all rows are delivered again from the first on"
                    ),
                }
            }
            let columns = catalog.order_columns(table).await?.into_iter();
            columns
                .map(|column| (column.name, column.type_oid))
                .collect()
        }
    };
    // Only what is to be resumed later has to be remembered.
    let key: Vec<_> = match delivered {
        Some(_) => {
            let kinds = columns.into_iter();
            let kinds = kinds.map(|(name, type_oid)| Some((name, KeyType::of(type_oid)?)));
            kinds.collect::<Option<_>>().unwrap_or_default()
        }
        None => Vec::new(),
    };
    let mapping = settings.mapping_of(table, observed.table.as_ref())?;
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

/// What Walpost has confirmed of a slot that is at `found`. If something else has moved or re-created the slot, `found` says nothing
/// about the copy of older rows.
fn confirmed_by_us(found: Lsn, recorded: Option<Lsn>) -> Lsn {
    recorded.map_or(found, |recorded| found.min(recorded))
}

/// A copy that an earlier start has begun, perhaps under another definition of the pipeline, or that no start has begun yet for a table
/// that the slot was created for. Whether rows are left to deliver depends on it, and not on what the outbox is now.
struct Unfinished {
    table: Option<String>,
    snapshot_lsn: Lsn,
}

impl Unfinished {
    /// Of several, one that is not of the outbox's table.
    async fn search(
        target: &Target,
        catalog: &impl CatalogQueries,
        snapshots: &[TableSnapshot],
        confirmed: Lsn,
    ) -> Result<Option<Self>, CatalogError> {
        let begun = Self::find(snapshots, &target.outbox, confirmed);
        if begun
            .as_ref()
            .is_some_and(|found| !found.is_of(target.outbox.table()))
        {
            return Ok(begun);
        }
        let uncopied = match catalog.uncopied_tables(target, snapshots).await {
            // A start that cannot use walpost.table_state logs that, and continues without it.
            Err(error) if recovery::of_catalog(&error) == Remedy::Halt => Vec::new(),
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
        open.min_by_key(|found| found.is_of(outbox.table()))
    }

    fn is_of(&self, table: Option<&TableName>) -> bool {
        let (ours, found) = (table.map(TableName::to_string), self.table.as_ref());
        ours.is_some_and(|ours| found.is_none_or(|found| *found == ours))
    }

    /// The copy is not completed because the configuration says so.
    fn leave_out(&self, settings: &PipelineSettings) -> Settlement {
        let pipeline = &settings.name;
        let (table, snapshot_lsn) = (self.table.clone(), self.snapshot_lsn);
        warn!(
            pipeline, table, %snapshot_lsn,
            "the copy of older rows was not complete, and snapshot = \"never\" leaves out the rest: rows committed before \
             snapshot_lsn may be missing in Kafka. To send them: {}",
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
                true => "put it back with snapshot = \"never\" until the log says \"streaming\"",
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

/// The snapshots that the journal has of the slot.
async fn table_snapshots(
    target: &Target,
    catalog: &impl CatalogQueries,
) -> Result<Vec<TableSnapshot>, CatalogError> {
    match catalog.table_snapshots(target).await {
        Err(CatalogError::NoJournal) => Ok(Vec::new()),
        // Without this right no copy was begun either.
        Err(CatalogError::Server(error))
            if target.outbox.table().is_none() && error.code == DENIED =>
        {
            Ok(Vec::new())
        }
        snapshots => snapshots,
    }
}

/// The table whose place the target's table has taken on the slot, if the journal knows nothing of the latter.
fn replaced<'s>(snapshots: &'s [TableSnapshot], table: &TableName) -> Option<&'s str> {
    match SnapshotRecord::of_table(snapshots, Some(table)) {
        SnapshotRecord::Nothing => {
            let mut others = snapshots.iter().filter(|found| !found.record.is_unbegun());
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
            "the slot delivered table {before} before: rows that {table} had when it took its place are not delivered, unless it \
             was one of several tables until then. To send them: {}",
            settings.target.replay_from()
        );
    }
    let table = Some(table.to_string());
    Planned::Settled(Settlement { table, why })
}

/// It is certain, before it is known what Kafka has, that a start has nothing to copy.
pub(super) async fn has_nothing_to_copy(
    settings: &PipelineSettings,
    catalog: &impl CatalogQueries,
    observed: &Observed,
    recorded: Option<Lsn>,
) -> bool {
    // If that can't be decided, the rest of the start reports why.
    let decided = decided(settings, catalog, observed, recorded).await;
    decided.is_ok_and(|decided| !matches!(decided, Some((Decision::Copy, _))))
}

/// What the catalog alone decides about older rows, and the rows that are in the table; nothing where the outbox has
/// none or they are left out.
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
    let confirmed = confirmed_by_us(slot.confirmed, recorded);
    let unfinished = Unfinished::search(target, catalog, &snapshots, confirmed).await?;
    if let Some(unfinished) = unfinished.filter(|found| !found.is_of(table)) {
        return Err(unfinished.error(settings));
    }
    let Some(table) = table else {
        return Ok(None);
    };
    let snapshot_history = catalog.snapshot_history(target, table).await?;
    let decision = decide(&snapshot_history, confirmed, table, &target.slot)?;
    Ok(Some((decision, snapshot_history.rows)))
}

/// What a start would do about rows that are older than the slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outlook {
    /// Deliver about so many.
    Copies(u64),
    /// Nothing more.
    Nothing,
}

impl fmt::Display for Outlook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Copies(rows) => write!(
                f,
                "run first delivers the rows that are older than the stream, about {rows}; with snapshot = \"never\" it does not"
            ),
            Self::Nothing => {
                f.write_str("no rows that are older than the slot are left to deliver")
            }
        }
    }
}

/// What a start would do about older rows now; nothing where the outbox has none or they are left out.
///
/// # Errors
/// The catalog can't be asked, or a start would halt.
pub(crate) async fn outlook(
    settings: &PipelineSettings,
    catalog: &Catalog,
    observed: &Observed,
) -> Result<Option<Outlook>, SnapshotError> {
    let of = catalog.slot_of(&settings.name, &settings.target).await?;
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

/// What exactly-once knows of what Kafka has.
pub(super) struct Known {
    /// Something of the stream.
    pub(super) has_delivered: bool,
    /// Something of older rows.
    pub(super) copied: Option<CopyProgress>,
}

/// Writes down that there is nothing to copy. What is not written is found out in the same way at
/// the next start.
pub(super) async fn settle(
    settings: &PipelineSettings,
    catalog: &impl CatalogQueries,
    confirmed: Lsn,
    settlement: Settlement,
) {
    let (pipeline, why) = (&settings.name, settlement.why);
    info!(
        pipeline,
        why, "no snapshot is needed: no rows that are older than the slot are left to deliver"
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
}

/// The columns by which rows were copied; nothing if the copy can't be continued in this order.
fn go_on(copied: &CopyProgress, table: &ObservedTable) -> Option<Vec<(String, u32)>> {
    let columns = &table.columns;
    let column = |name: &String| {
        let (name, type_oid) = columns.iter().find(|(column, _)| column == name)?;
        KeyType::of(*type_oid)?;
        Some((name.clone(), *type_oid))
    };
    let order: Option<Vec<_>> = copied.key.iter().map(column).collect();
    order.filter(|order| !order.is_empty())
}

/// The row filter that the publication has for the table.
fn row_filter(table: &TableName, observed: &Observed) -> Result<Option<String>, SnapshotError> {
    let Some(publication) = &observed.publication else {
        return Ok(None);
    };
    if publication.unsafe_filter.is_some() {
        // It was safe when the session started; the next one says which filter it is.
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
    /// Reads the columns that the mapping and the key need, of the rows that are published and were not copied before.
    async fn statement(&self, locked: &impl LockedQueries) -> Result<String, SnapshotError> {
        let resumed = self
            .before
            .as_ref()
            .and_then(|before| go_on(before, &self.table));
        let order = match resumed {
            Some(columns) => RowOrder::by(locked, columns),
            None => locked.row_order().await?,
        };
        // Where keys are compared here too, it has to be by their bytes.
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

/// A snapshot that was made and is not copied yet.
pub(super) struct Snapshot {
    plan: Box<Plan>,
    connection: Connection,
    /// It has the transactions whose commit record is before this.
    snapshot_lsn: Lsn,
}

impl Snapshot {
    /// Makes it, on the server that `identity` is of. It is there as long as its connection.
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
            "starting a snapshot of the table; waiting for the transactions that are open now"
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
        // As soon as the slot is taken the server counts what that sends, and the next start would take a
        // slot that has sent something, and of which nothing is written, for one with a life behind it.
        // An entry that the slot has passed, because something else moved it, says nothing about this copy.
        if !plan.record.is_open(plan.confirmed) && plan.before.is_none() {
            let record = catalog.snapshot_record(&settings.target).await?;
            if record != plan.record {
                return Err(SnapshotError::Outrun);
            }
            let entry = entry(settings, snapshot_lsn, SnapshotRecord::BEGUN);
            catalog.write_journal(&entry).await?;
            plan.record = SnapshotRecord::Begun(snapshot_lsn);
        }
        Ok(Self {
            plan,
            connection,
            snapshot_lsn,
        })
    }

    /// Where the stream begins: at the consistent point of the first chunk of the copy.
    pub(super) fn stream_from(&self) -> Lsn {
        let before = self.plan.before.as_ref();
        before.map_or(self.snapshot_lsn, CopyProgress::first_snapshot_lsn)
    }

    /// Begins to copy it, now that the pipeline's slot is ours and is at `confirmed`.
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
        if is_outrun(self.plan.record, record, confirmed, stream_from) {
            return Err(SnapshotError::Outrun);
        }
        if self.plan.before.is_none() && record != SnapshotRecord::Begun(self.snapshot_lsn) {
            let entry = entry(settings, self.snapshot_lsn, SnapshotRecord::BEGUN);
            catalog.write_journal(&entry).await?;
        }
        let locked = catalog.lock_table(&self.plan.table.version).await?;
        // The publication can have changed alone. With the table locked, its filter stays as it is.
        let observed = catalog.look(target).await?;
        if row_filter(&self.plan.name, &observed)? != self.plan.row_filter {
            return Err(CatalogError::TableChanged(self.plan.name).into());
        }
        let statement = self.plan.statement(&locked).await?;
        // The server answers after planning.
        self.connection.copy_out(&statement).await?;
        drop(locked);
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
        stats.snapshot_entered(SnapshotPhase::Copying, about);
        info!(
            pipeline, snapshot_lsn = %self.snapshot_lsn, rows = about, host = self.connection.host,
            "snapshot started: copying the rows that are older than the stream"
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

/// Another instance has had the slot since the snapshot was planned: the journal says something else
/// than it did then, or the slot is confirmed beyond where the stream is to begin.
fn is_outrun(
    planned: SnapshotRecord,
    record: SnapshotRecord,
    confirmed: Lsn,
    stream_from: Lsn,
) -> bool {
    record != planned || confirmed > stream_from
}

const LOCK_NOT_AVAILABLE: &str = "55P03";
/// insufficient_privilege
const DENIED: &str = "42501";

/// A snapshot that is copied, or was and is not durable yet.
pub(super) struct Copying {
    /// None when all rows were read.
    connection: Option<Connection>,
    snapshot_lsn: Lsn,
    /// Where the slot stood when it began.
    resumed: Lsn,
    progress: Option<Progress>,
    /// How many rows there were when it last made progress, and when that was.
    progressed: Option<(u64, Instant)>,
    /// Rows that were read, and those of them that the progress has counted.
    rows: u64,
    counted: u64,
}

/// Rows that are read between two looks at the clock.
const BATCH: u64 = 1024;

/// What came of an attempt to read a row.
pub(super) enum Read {
    /// A row was taken.
    Row,
    /// None is there yet.
    Nothing,
    /// There are no more.
    End,
    /// The sink is full.
    Full,
    /// The sink has to prepare this topic.
    NewTopic(String),
}

/// Resolves when more of the copy was received; never without one.
pub(super) async fn fill(copying: &mut Option<Copying>) -> Result<(), ConnectionError> {
    match copying
        .as_mut()
        .and_then(|copying| copying.connection.as_mut())
    {
        Some(connection) => connection.fill().await,
        None => std::future::pending().await,
    }
}

impl Copying {
    /// Rows are still to come.
    pub(super) fn reads(&self) -> bool {
        self.connection.is_some()
    }

    /// A row was read within the last `limit`: the sink accepts more.
    pub(super) fn progresses(&mut self, now: Instant, limit: Duration) -> bool {
        match self.progressed {
            Some((rows, since)) if rows == self.rows => now < since + limit,
            _ => {
                self.progressed = Some((self.rows, now));
                true
            }
        }
    }

    /// Takes the next row, if it is there.
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
                self.count(core);
                Ok(Read::Nothing)
            }
            Some(CopyOut::Row(line)) => match core.snapshot_row(line, sink)? {
                Step::Done | Step::Answer => {
                    connection.consume();
                    self.rows += 1;
                    if self.rows - self.counted >= BATCH {
                        self.count(core);
                    }
                    Ok(Read::Row)
                }
                Step::Full => Ok(Read::Full),
                Step::NewTopic(topic) => Ok(Read::NewTopic(topic)),
                // Those of the stream alone are.
                Step::NewTable(_) | Step::SetAside(_) => {
                    Err(CoreError::from(OrderError::Stray).into())
                }
            },
            Some(CopyOut::End) => {
                core.end_snapshot().map_err(CoreError::from)?;
                self.count(core);
                let stats = core.delivery.watermark.stats();
                stats.snapshot_entered(SnapshotPhase::Delivering, None);
                // With it go the temporary slot and the snapshot.
                self.connection = None;
                if let Some(progress) = self.progress.take() {
                    progress.finish();
                }
                Ok(Read::End)
            }
        }
    }

    /// The topics of the rows that have come.
    pub(super) fn topics_ahead(&self, core: &Core) -> Vec<String> {
        match &self.connection {
            Some(connection) => core.snapshot_topics_ahead(connection.buffered()),
            None => Vec::new(),
        }
    }

    fn count(&mut self, core: &Core) {
        let more = self.rows - self.counted;
        self.counted = self.rows;
        core.delivery.watermark.stats().copied(more);
        if let Some(progress) = &mut self.progress {
            progress.advance(more);
        }
    }

    /// All rows were read, and `confirmed` says that they are durable. Where the slot stood before says nothing
    /// of them, and after a failover to a standby that had nothing behind that, it is the consistent point.
    pub(super) fn is_durable(&self, confirmed: Lsn) -> bool {
        !self.reads() && confirmed >= self.snapshot_lsn && confirmed > self.resumed
    }

    /// Writes down that it is done. Without that the next start finds out by what was confirmed.
    pub(super) async fn note(&self, settings: &PipelineSettings, database: &impl Database) {
        let pipeline = &settings.name;
        info!(pipeline, rows = self.rows, snapshot_lsn = %self.snapshot_lsn, "snapshot delivered");
        let entry = entry(settings, self.snapshot_lsn, SnapshotRecord::DONE);
        let record = async { database.catalog().await?.write_journal(&entry).await };
        match timeout(NOTE, record).await {
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

/// How long the journal's last entry may take: the stream waits meanwhile.
const NOTE: Duration = Duration::from_secs(5);

pub(crate) mod error;
pub(crate) mod pace;
#[cfg(test)]
mod tests;
