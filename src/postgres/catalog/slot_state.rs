//! Stores the positions that Walpost has confirmed for its slots in the table `walpost.slot_state`,
//! which `sql/journal.sql` creates. A position is written to the table before it is confirmed to
//! PostgreSQL. Therefore, if a slot is ahead of the stored position, something other than Walpost
//! moved the slot, or dropped and re-created it.

mod gap;

use serde_json::json;
use tokio_postgres::SimpleQueryRow;
use tracing::warn;

pub(super) use self::gap::FormerSlot;
pub(crate) use self::gap::Gap;
use self::gap::{Copied, FORMER_SLOT, GapTable};

use super::drop_slot::DETACHED_PARTITIONS;
use super::journal::{Action, Entry, LEFT_PUBLICATION};
use super::own_table::{OwnTable, Use};
use super::slot_owner::{DefinedBy, UnknownOwner};
use super::{Catalog, CatalogError, SnapshotRecord};
use crate::model::lsn::Lsn;
use crate::postgres::sql::{lsn_literal, text_literal};
use crate::postgres::table::TableName;
use crate::postgres::table_pattern::TablePatterns;
use crate::postgres::target::{Outbox, Target};

/// The version of the row format. Rows of other versions are ignored.
pub(super) const VERSION: i32 = 1;
/// The SQL condition that selects the rows of `walpost.slot_state` for slots in this database.
pub(super) const IN_THIS_DATABASE: &str =
    "database_oid = (SELECT oid FROM pg_database WHERE datname = current_database())";

/// The SQL assignments that replace the values of a row that depend on the pipeline and on the
/// history of the database.
const SET_HISTORY: &str = "pipeline = excluded.pipeline, version = excluded.version, system_id = excluded.system_id, \
     database_oid = excluded.database_oid, timeline = excluded.timeline, at = excluded.at";

/// A pipeline's slot, and the cluster and timeline in which its LSNs are valid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SlotIdentity {
    pub pipeline: String,
    pub defined_by: DefinedBy,
    /// The outbox and slot of the pipeline.
    pub target: Target,
    /// The cluster's system identifier.
    pub system_id: String,
    pub timeline: u32,
}

/// Whether the first run with a slot delivers the rows that the outbox table already contains.
/// Relevant only for an outbox with a single table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FirstStart {
    /// Delivers the existing rows before streaming.
    CopiesTable,
    /// Does not deliver the existing rows (`snapshot = "never"`).
    StreamsOnly,
}

/// The contents of a slot's row in `walpost.slot_state`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotState {
    /// The position at which `walpost init` created the slot; `None` if the slot was created in
    /// another way.
    pub created: Option<Lsn>,
    /// Whether anything has been read from the slot.
    pub begun: bool,
    /// The highest position that Walpost may have confirmed.
    pub confirmed: Lsn,
}

impl SlotState {
    /// Returns whether `walpost init` created the slot at `confirmed` and nothing has been read
    /// from the slot.
    #[must_use]
    pub(crate) fn is_untouched(self, confirmed: Lsn) -> bool {
        let untouched = Self {
            created: Some(confirmed),
            begun: false,
            confirmed,
        };
        self == untouched
    }
}

/// A slot that is ahead of the last position that Walpost confirmed, for a reason that the journal
/// does not record.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "slot {slot:?} is at {found}, but Walpost confirmed it only up to {confirmed}: something else moved it, or dropped \
     and re-created it. Events committed between {confirmed} and {found} may be missing from Kafka. {resend}; then \
     accept the new position: {skip}"
)]
pub(crate) struct Moved {
    pub slot: String,
    /// The current position of the slot.
    pub found: Lsn,
    /// The last position that Walpost confirmed.
    pub confirmed: Lsn,
    /// How to deliver the events between the two positions.
    pub resend: String,
    /// The command with which an operator accepts the slot's current position.
    pub skip: String,
    /// Whether Walpost has read from the slot.
    pub begun: bool,
}

/// Describes which events may be missing because something other than Walpost has moved or
/// re-created a slot.
#[must_use]
pub(crate) fn describe_move(target: &Target, confirmed: Lsn, found: Lsn) -> String {
    format!(
        "slot {:?} is at {found}, but Walpost confirmed it only up to {confirmed}: something else moved it, or dropped \
         and re-created it. Events committed between {confirmed} and {found} may be missing from Kafka. {}",
        target.slot,
        target.resend()
    )
}

/// The result of looking up a slot in `walpost.slot_state`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum FoundState {
    /// `walpost.slot_state` can't be used, for the given reason. In this case, Walpost can't detect
    /// whether something other than Walpost moved the slot.
    Unusable(String),
    /// The slot's row for this database in the current cluster and timeline, or `None` if
    /// `walpost.slot_state` has no such row.
    State(Option<SlotState>),
}

impl Catalog {
    /// Examines the table with `sql/examine.sql`, and returns the state of a slot.
    ///
    /// # Errors
    /// Returns an error if a query fails, or if `sql/examine.sql` rejects the table.
    pub(crate) async fn slot_state(
        &self,
        identity: &SlotIdentity,
    ) -> Result<FoundState, CatalogError> {
        self.query_state(identity, Use::Write).await
    }

    /// Returns a [`Moved`] error if the table and the journal show that something other than
    /// Walpost moved or re-created the slot. `found` is the slot's position, which the caller must
    /// query before this call. Otherwise, a position that Walpost confirms after the table was read
    /// could be mistaken for a move.
    ///
    /// # Errors
    /// Returns an error if a query fails, the role is not allowed to read the table, or
    /// `sql/examine.sql` rejects the table or the journal.
    pub(crate) async fn moved(
        &self,
        identity: &SlotIdentity,
        found: Lsn,
    ) -> Result<Option<Moved>, CatalogError> {
        let SlotState {
            confirmed, begun, ..
        } = match self.query_state(identity, Use::Read).await? {
            FoundState::State(Some(state)) if state.confirmed < found => state,
            FoundState::State(_) | FoundState::Unusable(_) => return Ok(None),
        };
        if self.is_accounted_for(identity, confirmed, found).await? {
            return Ok(None);
        }
        Ok(Some(Moved {
            slot: identity.target.slot.clone(),
            found,
            confirmed,
            resend: identity.target.resend(),
            skip: identity.target.skip(&found.to_string()),
            begun,
        }))
    }

    /// Returns whether `walpost.slot_state` has a row for the slot that was written for this
    /// database in the current cluster and timeline.
    ///
    /// # Errors
    /// Returns an error if a query fails, or if `sql/examine.sql` rejects the table.
    pub(super) async fn has_slot_state(
        &self,
        identity: &SlotIdentity,
    ) -> Result<bool, CatalogError> {
        let found = self.query_state(identity, Use::Read).await?;
        Ok(matches!(found, FoundState::State(Some(_))))
    }

    async fn query_state(
        &self,
        identity: &SlotIdentity,
        access: Use,
    ) -> Result<FoundState, CatalogError> {
        if let Some(reason) = self
            .unusable(&identity.target, OwnTable::SlotState, access)
            .await?
        {
            return Ok(FoundState::Unusable(reason));
        }
        let rows = self
            .slot_state_rows(identity, &same_history_condition(identity))
            .await?;
        let state = rows.first().map(parse_slot_state).transpose()?;
        Ok(FoundState::State(state))
    }

    /// Returns the rows of `walpost.slot_state` that have the slot's name and satisfy `condition`.
    async fn slot_state_rows(
        &self,
        identity: &SlotIdentity,
        condition: &str,
    ) -> Result<Vec<SimpleQueryRow>, CatalogError> {
        let slot = text_literal(&identity.target.slot);
        self.select_slot_states(identity, &format!("slot = {slot} AND {condition}"))
            .await
    }

    async fn select_slot_states(
        &self,
        identity: &SlotIdentity,
        condition: &str,
    ) -> Result<Vec<SimpleQueryRow>, CatalogError> {
        let select = format!(
            "SELECT slot, created_lsn, begun, confirmed_lsn, system_id, timeline, {IN_THIS_DATABASE} AS is_same_database \
             FROM walpost.slot_state WHERE {condition}"
        );
        self.run_on_own_table(OwnTable::SlotState, &identity.target, "", &select)
            .await
            .map_err(|error| self.with_slot_state_grant(error))
    }

    /// If `error` reports that the role is not allowed to read `walpost.slot_state`, adds the
    /// statement that grants the privilege.
    pub(super) fn with_slot_state_grant(&self, error: CatalogError) -> CatalogError {
        self.with_grant(error, |role| {
            format!(
                "GRANT USAGE ON SCHEMA walpost TO {role}; GRANT SELECT ON walpost.slot_state TO {role}"
            )
        })
    }

    /// Records `confirmed` as the highest position that may have been confirmed for a slot. The row
    /// is durable when this function returns. Cancel safe.
    ///
    /// # Errors
    /// Returns an error if the query fails, or if the pipeline is defined by a row and the slot now
    /// belongs to another pipeline.
    pub(crate) async fn write_slot_state(
        &self,
        identity: &SlotIdentity,
        confirmed: Lsn,
    ) -> Result<(), CatalogError> {
        // If two instances are running, the instance that lags behind must not overwrite the later
        // position of the other instance.
        let same = "s.version = excluded.version AND s.system_id = excluded.system_id AND s.timeline = excluded.timeline \
             AND s.database_oid = excluded.database_oid";
        self.upsert(
            identity,
            None,
            true,
            confirmed,
            &format!(
                "{SET_HISTORY}, begun = true, confirmed_lsn = CASE WHEN {same} THEN greatest(s.confirmed_lsn, excluded.confirmed_lsn) \
                 ELSE excluded.confirmed_lsn END, created_lsn = CASE WHEN {same} THEN s.created_lsn END"
            ),
        )
        .await
    }

    /// Records a slot that was just created and has not been read.
    ///
    /// # Errors
    /// Returns an error if the query fails.
    pub(crate) async fn write_new_slot_state(
        &self,
        identity: &SlotIdentity,
        created: Lsn,
    ) -> Result<(), CatalogError> {
        let set = format!(
            "{SET_HISTORY}, begun = false, confirmed_lsn = excluded.confirmed_lsn, created_lsn = excluded.created_lsn"
        );
        self.upsert(identity, Some(created), false, created, &set)
            .await
    }

    /// Records that a slot belongs to the pipeline, as requested by an operator. Leaves the
    /// recorded position unchanged.
    ///
    /// # Errors
    /// Returns an error if a query fails.
    pub(crate) async fn take_slot(
        &self,
        pipeline: &str,
        target: &Target,
    ) -> Result<(), CatalogError> {
        let Some(slot) = self.slot(&target.slot).await? else {
            return Ok(());
        };
        let identity = self.slot_identity(pipeline, target).await?;
        let set = "pipeline = excluded.pipeline";
        self.upsert(&identity, None, false, slot.confirmed, set)
            .await
    }

    /// Inserts the slot's row. If the row already exists, updates it with the assignments in `set`.
    async fn upsert(
        &self,
        identity: &SlotIdentity,
        created: Option<Lsn>,
        begun: bool,
        confirmed: Lsn,
        set: &str,
    ) -> Result<(), CatalogError> {
        let created = created.map_or("NULL::pg_lsn".to_owned(), lsn_literal);
        // Waiting for standbys is not necessary: if a standby without this row is promoted, it has
        // a different timeline, on which the row would be ignored.
        let settings = "SET LOCAL synchronous_commit = local; ";
        let condition = match identity.defined_by {
            DefinedBy::Operator => "",
            DefinedBy::Row => " WHERE s.pipeline = excluded.pipeline",
        };
        let sql = format!(
            "INSERT INTO walpost.slot_state AS s \
             (slot, pipeline, version, system_id, database_oid, timeline, created_lsn, begun, confirmed_lsn, at) \
             SELECT {}, {}, {VERSION}, {}, oid, {}, {created}, \
             {begun}, '{confirmed}'::pg_lsn, now() FROM pg_database WHERE datname = current_database() ON CONFLICT (slot) DO UPDATE \
             SET {set}{condition} RETURNING slot",
            text_literal(&identity.target.slot),
            text_literal(&identity.pipeline),
            text_literal(&identity.system_id),
            identity.timeline,
        );
        let rows = self
            .run_on_own_table(OwnTable::SlotState, &identity.target, settings, &sql)
            .await?;
        match rows.is_empty() {
            true => {
                self.check_slot_owner(
                    &identity.pipeline,
                    identity.defined_by,
                    &identity.target,
                    UnknownOwner::Rejected,
                )
                .await
            }
            false => Ok(()),
        }
    }

    /// Records a slot that was just created. If a slot with the same name existed before, even on a
    /// different timeline or in a different cluster, adds journal entries for the events that the
    /// earlier slot had not delivered. Events of the outbox table are left out if the pipeline has
    /// not read from any slot of this name yet and its first run will deliver all rows of that
    /// table.
    ///
    /// # Errors
    /// Returns an error if a query fails, or if `sql/examine.sql` rejects one of Walpost's tables.
    pub(crate) async fn record_new_slot(
        &self,
        pipeline: &str,
        target: &Target,
        first_start: FirstStart,
    ) -> Result<(), CatalogError> {
        let Some(slot) = self.slot(&target.slot).await? else {
            return Ok(());
        };
        let created = slot.confirmed;
        let identity = self.slot_identity(pipeline, target).await?;
        if let FoundState::Unusable(why) = self.slot_state(&identity).await? {
            warn!(
                pipeline,
                slot = target.slot,
                "cannot tell whether an earlier slot with this name had delivered everything: {why}"
            );
            return Ok(());
        }
        self.record_replaced_before_new_slot(pipeline, target)
            .await?;
        let gap = match self
            .gap_before(&identity, created, HistoryFilter::All)
            .await?
        {
            None => self.gap_of_added_tables(&identity).await?,
            gap => gap,
        };
        if let Some(gap) = gap
            && let Some(mut gap) = self.uncopied_part(&identity, gap, first_start).await?
        {
            gap.uncopied = self.tables_with_open_copy(target, Some(created)).await?;
            self.write_gap(&identity, &gap, created).await?;
        }
        self.write_new_slot_state(&identity, created).await?;
        self.restart_tables(pipeline, target).await
    }

    /// Adds journal entries for the events that may be missing because the row in
    /// `walpost.slot_state` describes a slot from a different history of the database (for example,
    /// from before a dump was restored), or because the pipeline previously used a different slot.
    /// The next write of the slot state replaces the row.
    ///
    /// # Errors
    /// Returns an error if a query fails, or if `sql/examine.sql` rejects one of Walpost's tables.
    pub(crate) async fn record_gap_of_other_history(
        &self,
        identity: &SlotIdentity,
        found: Lsn,
        first_start: FirstStart,
    ) -> Result<(), CatalogError> {
        let Some(gap) = self
            .gap_of_other_history(identity, found, first_start)
            .await?
        else {
            return Ok(());
        };
        match self.uncopied_part(identity, gap, first_start).await? {
            Some(gap) => self.write_gap(identity, &gap, found).await,
            None => Ok(()),
        }
    }

    /// Removes from `gap` the rows that the pipeline's first run will copy. Returns `None` if no
    /// other rows can be missing.
    async fn uncopied_part(
        &self,
        identity: &SlotIdentity,
        gap: Gap,
        first_start: FirstStart,
    ) -> Result<Option<Gap>, CatalogError> {
        match gap.copied.is_some() || !self.is_copied_at_first_start(identity, first_start).await? {
            true => Ok(Some(gap)),
            false => Ok(gap.without_copied_table()),
        }
    }

    /// Returns the events before `found` that may be missing according to `walpost.slot_state`. The
    /// events may be missing because the slot's row belongs to a different history of the database,
    /// for example from before a restore, or because the pipeline previously used a different slot.
    ///
    /// # Errors
    /// Returns an error if a query fails, or if `sql/examine.sql` rejects one of Walpost's tables.
    pub(crate) async fn gap_of_other_history(
        &self,
        identity: &SlotIdentity,
        found: Lsn,
        first_start: FirstStart,
    ) -> Result<Option<Gap>, CatalogError> {
        let state = match self.query_state(identity, Use::Read).await? {
            FoundState::Unusable(_) => return Ok(None),
            FoundState::State(state) => state,
        };
        match self
            .gap_before(identity, found, HistoryFilter::OtherHistories)
            .await?
        {
            None if state.is_none_or(|state| !state.begun) => {
                self.gap_of_former_slot(identity, found, state, first_start)
                    .await
            }
            gap => Ok(gap),
        }
    }

    /// Returns the slot that the pipeline used before the current slot: the slot that it read most
    /// recently or, if it has read none, the first slot that was created for it.
    async fn former_slot(
        &self,
        identity: &SlotIdentity,
    ) -> Result<Option<FormerSlot>, CatalogError> {
        let condition = format!(
            "pipeline = {} AND slot <> {} AND {} ORDER BY begun DESC, CASE WHEN begun THEN confirmed_lsn END DESC, \
             confirmed_lsn LIMIT 1",
            text_literal(&identity.pipeline),
            text_literal(&identity.target.slot),
            same_history_condition(identity),
        );
        let rows = self.select_slot_states(identity, &condition).await?;
        rows.first().map(parse_former_slot).transpose()
    }

    /// Returns the events between the last position of the pipeline's former slot and `found`,
    /// where the currently configured slot starts. The former slot may still exist, but Walpost no
    /// longer reads it. If the first run copies a single table, the result covers only rows that
    /// this copy does not include.
    async fn gap_of_former_slot(
        &self,
        identity: &SlotIdentity,
        found: Lsn,
        state: Option<SlotState>,
        first_start: FirstStart,
    ) -> Result<Option<Gap>, CatalogError> {
        let Some(former) = self.former_slot(identity).await? else {
            return Ok(None);
        };
        let confirmed = former.confirmed;
        if confirmed >= found || self.is_accounted_for(identity, confirmed, found).await? {
            return Ok(None);
        }
        let mut gap = Gap {
            from: Some(confirmed),
            reason: FORMER_SLOT,
            former: Some(former),
            copied: None,
            uncopied: Vec::new(),
        };
        if let Outbox::Table(table) = &identity.target.outbox
            && first_start == FirstStart::CopiesTable
            // `Done` means that the table was copied earlier, or that it was empty when `walpost
            // init` created the slot.
            && (state.is_some() || self.snapshot_record(&identity.target).await? != SnapshotRecord::Done)
        {
            let is_partitioned = self.is_partitioned(table).await?;
            gap.copied = Some(match is_partitioned {
                true => Copied::Partitions,
                false => Copied::Table,
            });
            if self.gap_tables(identity, &gap).await?.is_empty() {
                return Ok(None);
            }
        }
        Ok(Some(gap))
    }

    /// Returns `true` if nothing has been read from the slot yet and the first run will deliver all
    /// rows of the table.
    async fn is_copied_at_first_start(
        &self,
        identity: &SlotIdentity,
        first_start: FirstStart,
    ) -> Result<bool, CatalogError> {
        Ok(matches!(identity.target.outbox, Outbox::Table(_))
            && first_start == FirstStart::CopiesTable
            && self.slot_state_rows(identity, "begun").await?.is_empty()
            && self
                .snapshot_record(&identity.target)
                .await?
                .is_not_started())
    }

    /// Returns the events that may be missing because tables were added to the publication before
    /// the creation of the pipeline's first slot was complete. No slot sends the rows that these
    /// tables already contained at that time. `sql/slot.sql` fails if the publication contains such
    /// tables, but a table can still be added while the slot is being created.
    async fn gap_of_added_tables(
        &self,
        identity: &SlotIdentity,
    ) -> Result<Option<Gap>, CatalogError> {
        let (Outbox::Tables(patterns) | Outbox::OneOf { of: patterns, .. }) =
            &identity.target.outbox
        else {
            return Ok(None);
        };
        if !self.slot_state_rows(identity, "true").await?.is_empty() {
            return Ok(None);
        }
        // Events that a former slot did not deliver are recorded separately, by `walpost run`.
        if self.former_slot(identity).await?.is_some() {
            return Ok(None);
        }
        let (published, _) = self.published_outboxes(&identity.target, patterns).await?;
        Ok((!published.is_empty()).then_some(Gap {
            from: None,
            former: None,
            copied: None,
            uncopied: Vec::new(),
            reason: "tables were added before slot creation was complete",
        }))
    }

    /// Returns the events that an earlier slot with this name may not have delivered according to
    /// its row in `walpost.slot_state`. Ignores rows that `filter` excludes. `found` is the current
    /// slot's position. If `filter` is [`HistoryFilter::All`], the slot must have just been created
    /// at this position.
    async fn gap_before(
        &self,
        identity: &SlotIdentity,
        found: Lsn,
        filter: HistoryFilter,
    ) -> Result<Option<Gap>, CatalogError> {
        let condition = match filter {
            HistoryFilter::All => "true".to_owned(),
            HistoryFilter::OtherHistories => {
                format!(
                    "version = {VERSION} AND NOT ({})",
                    same_history_condition(identity)
                )
            }
        };
        let rows = self.slot_state_rows(identity, &condition).await?;
        let Some(row) = rows.first() else {
            return Ok(None);
        };
        let is_same_cluster = row.try_get("system_id")? == Some(&*identity.system_id);
        let is_same_database = row.try_get("is_same_database")? == Some("t");
        let former = parse_former_slot(row)?;
        let before = former.confirmed;
        // In WAL, a row of `walpost.slot_state` follows the position that the row contains.
        // Therefore, a server that has the row also has the WAL up to this position, on every
        // timeline. If the slot was nevertheless created at an earlier position, the row must have
        // been restored on a copy of the server that lacks this WAL.
        let is_restored = filter == HistoryFilter::All && before > found;
        if !is_same_cluster || !is_same_database || is_restored {
            // The LSNs in the row can't be compared with the LSNs of the current slot.
            return Ok(Some(Gap {
                from: None,
                former: Some(former),
                copied: None,
                uncopied: Vec::new(),
                reason: match is_same_cluster && !is_same_database {
                    true => "slot created in another database",
                    false => "slot created on another cluster",
                },
            }));
        }
        if before >= found || self.is_accounted_for(identity, before, found).await? {
            return Ok(None);
        }
        let is_same_timeline = row.try_get("timeline")? == Some(&*identity.timeline.to_string());
        Ok(Some(Gap {
            from: Some(before),
            former: Some(former),
            copied: None,
            uncopied: Vec::new(),
            reason: match is_same_timeline {
                true => "slot re-created",
                false => "slot created on another timeline",
            },
        }))
    }

    /// Records in the journal that the events in `gap` are missing. Adds one entry for each table,
    /// because tables are replayed individually. Skips entries that an earlier attempt already
    /// wrote.
    async fn write_gap(
        &self,
        identity: &SlotIdentity,
        gap: &Gap,
        found: Lsn,
    ) -> Result<(), CatalogError> {
        let (pipeline, target) = (&identity.pipeline, &identity.target);
        let mut tables = self.gap_tables(identity, gap).await?;
        if let (true, Some(Copied::Table), Some(outbox)) =
            (tables.is_empty(), gap.copied, target.outbox.table())
        {
            warn!(pipeline, "{}", gap.describe_copied(outbox));
        }
        self.record_unpublished_tables(identity, gap, &tables, found)
            .await?;
        for open in self.dropped_slots(pipeline, target).await? {
            if !open.left_publication && open.to == Some(found) {
                let key = |table: &GapTable| table.name.clone().filter(|_| table.is_named);
                tables.retain(|table| key(table) != open.table || table.from(gap) != open.from);
            }
        }
        let entries: Vec<_> = tables
            .iter()
            .map(|table| Entry {
                pipeline,
                target,
                action: Action::DropSlot,
                from: table.from(gap),
                to: Some(found),
                detail: json!({
                    "reason": gap.reason,
                    "table": table.name,
                    "several": table.is_named,
                    DETACHED_PARTITIONS: gap.copied == Some(Copied::Partitions) && !table.is_named,
                    "system_id": identity.system_id,
                }),
            })
            .collect();
        let ids = self.write_journal_entries(&entries).await?;
        for (table, id) in tables.iter().zip(ids) {
            let remedy = table.remedy(target, gap);
            warn!(
                pipeline,
                slot = target.slot,
                journal = id,
                "{}. {remedy}",
                gap.describe_after(table.from(gap), found)
            );
        }
        Ok(())
    }

    /// Returns the tables whose events may be missing according to `gap`: the outbox tables, unless
    /// they are copied; other published tables, one of which may be the renamed outbox table; and
    /// tables that the former slot delivered and that are no longer published.
    async fn gap_tables(
        &self,
        identity: &SlotIdentity,
        gap: &Gap,
    ) -> Result<Vec<GapTable>, CatalogError> {
        let target = &identity.target;
        let is_several = target.outbox.is_several();
        let outbox = match gap.copied {
            Some(Copied::Table) => Vec::new(),
            Some(Copied::Partitions) | None => self.outbox_tables(target).await?,
        };
        let mut tables: Vec<_> = outbox
            .into_iter()
            .map(|name| GapTable {
                name,
                is_named: is_several,
                is_published: true,
            })
            .collect();
        if let Outbox::Table(table) = &target.outbox {
            tables.extend(self.other_published_tables(target, table).await?);
        }
        if let Some(former) = gap.former.as_ref().filter(|_| !target.outbox.is_messages()) {
            let mut left = self.left_tables(target, former).await?;
            left.retain(|left| {
                let is_own = matches!(&target.outbox, Outbox::Table(table) if table == left);
                let left = left.to_string();
                !is_own
                    && tables
                        .iter()
                        .all(|table| table.name.as_ref() != Some(&left))
            });
            tables.extend(left.into_iter().map(|table| GapTable {
                name: Some(table.to_string()),
                is_named: true,
                is_published: false,
            }));
        }
        Ok(tables)
    }

    /// Returns the published tables other than the outbox table. The result may include the former
    /// outbox table, if that table was renamed and another table was given its name.
    async fn other_published_tables(
        &self,
        target: &Target,
        outbox: &TableName,
    ) -> Result<Vec<GapTable>, CatalogError> {
        let version = self.version().await?;
        let mut others = self.published_tables(&target.publication, version).await?;
        // A publication FOR ALL TABLES also contains Walpost's own tables.
        others.retain(|found| found.name != *outbox && found.name.schema != "walpost");
        let others = others.into_iter().map(|found| GapTable {
            name: Some(found.name.to_string()),
            is_named: true,
            is_published: true,
        });
        Ok(others.collect())
    }

    /// Records which of the tables in `tables` are not published. `found` is the slot's position.
    async fn record_unpublished_tables(
        &self,
        identity: &SlotIdentity,
        gap: &Gap,
        tables: &[GapTable],
        found: Lsn,
    ) -> Result<(), CatalogError> {
        let Some(former) = &gap.former else {
            return Ok(());
        };
        let left = tables.iter().filter(|table| !table.is_published);
        let left: Vec<TableName> = left
            .filter_map(|table| table.name.as_ref()?.parse().ok())
            .collect();
        self.record_left_tables(&identity.target, former, &left, found)
            .await
    }

    /// Returns whether a table exists and is partitioned.
    async fn is_partitioned(&self, table: &TableName) -> Result<bool, CatalogError> {
        const SQL: &str = "SELECT c.relkind = 'p' FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
             WHERE n.nspname = $1 AND c.relname = $2";
        let found = self
            .client()
            .query_opt(SQL, &[&table.schema, &table.name])
            .await?;
        Ok(found.map(|row| row.try_get(0)).transpose()? == Some(true))
    }

    /// Returns the tables of an outbox, or a single `None` if the outbox uses logical messages,
    /// which are not stored in a table. Includes published tables that match no pattern, because a
    /// table may have been renamed since its rows were written. If the publication is missing or
    /// empty, returns all tables that match a pattern.
    async fn outbox_tables(&self, target: &Target) -> Result<Vec<Option<String>>, CatalogError> {
        let patterns = match &target.outbox {
            Outbox::Table(table) => return Ok(vec![Some(table.to_string())]),
            Outbox::Messages { .. } => return Ok(vec![None]),
            Outbox::Tables(patterns) | Outbox::OneOf { of: patterns, .. } => patterns,
        };
        let (mut tables, others) = self.published_outboxes(target, patterns).await?;
        if tables.is_empty() {
            tables = self.unpublished(patterns, &[]).await?;
        }
        let tables = tables.iter().map(TableName::to_string);
        Ok(tables.chain(others).map(Some).collect())
    }

    /// Returns the publication's tables as two lists: the tables that match the patterns of the
    /// outbox, and all other tables.
    async fn published_outboxes(
        &self,
        target: &Target,
        patterns: &TablePatterns,
    ) -> Result<(Vec<TableName>, Vec<String>), CatalogError> {
        let all = Target {
            outbox: Outbox::Tables(patterns.clone()),
            ..target.clone()
        };
        let publication = self.publication(&all, self.version().await?).await?;
        Ok(publication.map_or_else(Default::default, |publication| {
            (publication.tables, publication.other_tables)
        }))
    }

    /// Returns the pipeline's slot, together with the server's system identifier and current
    /// timeline.
    ///
    /// # Errors
    /// Returns an error if the query fails.
    pub(crate) async fn slot_identity(
        &self,
        pipeline: &str,
        target: &Target,
    ) -> Result<SlotIdentity, CatalogError> {
        // The control file is not used on a primary, because after a promotion it contains the old
        // timeline until the next checkpoint.
        let row = self
            .client()
            .query_one(
                "SELECT system_identifier::text, \
                 CASE WHEN pg_is_in_recovery() THEN (SELECT timeline_id FROM pg_control_checkpoint()) \
                 ELSE ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::int8 END FROM pg_control_system()",
                &[],
            )
            .await?;
        let timeline: i64 = row.try_get(1)?;
        Ok(SlotIdentity {
            pipeline: pipeline.to_owned(),
            // Each command that writes the slot's row first checks whether the pipeline is allowed
            // to use the slot. The statement that writes the row therefore does not check the
            // slot's owner again.
            defined_by: DefinedBy::Operator,
            target: target.clone(),
            system_id: row.try_get(0)?,
            timeline: u32::try_from(timeline)
                .map_err(|error| CatalogError::Unexpected(format!("a timeline: {error}")))?,
        })
    }

    /// Returns whether the journal explains why a slot is at `found` although the last position
    /// that Walpost confirmed is `confirmed`: either an operator skipped the events in between, or
    /// these events were lost when the previous slot was dropped. Ignores entries about unpublished
    /// tables, and entries from a different cluster, which a restored dump can contain.
    ///
    /// # Errors
    /// Returns an error if a query fails, or if the journal is rejected by `sql/examine.sql` or
    /// contains an unexpected value.
    pub(crate) async fn is_accounted_for(
        &self,
        identity: &SlotIdentity,
        confirmed: Lsn,
        found: Lsn,
    ) -> Result<bool, CatalogError> {
        let condition = format!(
            "j.slot = {} AND j.detail ->> 'system_id'::text = {} AND ({} OR j.action = '{}'::text AND j.from_lsn <= '{confirmed}'::pg_lsn \
             AND j.to_lsn >= '{found}'::pg_lsn)",
            text_literal(&identity.target.slot),
            text_literal(&identity.system_id),
            is_dropped_at(confirmed),
            Action::Skip.name(),
        );
        match self.entries(&identity.target, &condition).await {
            Ok(entries) => Ok(!entries.is_empty()),
            Err(CatalogError::NoJournal { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// Returns the condition that selects journal entries about a slot that was dropped at `confirmed`
/// without delivering the WAL after that position. An entry that ends at `confirmed` is about an
/// earlier slot and is not selected.
pub(super) fn is_dropped_at(confirmed: Lsn) -> String {
    format!(
        "(j.action = '{}'::text AND NOT j.detail ? '{LEFT_PUBLICATION}'::text AND j.from_lsn <= '{confirmed}'::pg_lsn \
         AND (j.to_lsn > '{confirmed}'::pg_lsn OR j.from_lsn = '{confirmed}'::pg_lsn))",
        Action::DropSlot.name()
    )
}

/// A filter on rows of `walpost.slot_state`, based on whether they belong to the current history of
/// the database (see [`same_history_condition`]).
#[derive(Clone, Copy, PartialEq, Eq)]
enum HistoryFilter {
    All,
    OtherHistories,
}

/// Returns the condition that selects the rows of `walpost.slot_state` that belong to the current
/// history of the database: rows that were written for this database in the current cluster and
/// timeline.
fn same_history_condition(identity: &SlotIdentity) -> String {
    format!(
        "version = {VERSION} AND system_id = {} AND timeline = {} AND {IN_THIS_DATABASE}",
        text_literal(&identity.system_id),
        identity.timeline,
    )
}

fn parse_former_slot(row: &SimpleQueryRow) -> Result<FormerSlot, CatalogError> {
    Ok(FormerSlot {
        slot: row.try_get("slot")?.unwrap_or_default().to_owned(),
        confirmed: parse_slot_state(row)?.confirmed,
    })
}

fn parse_slot_state(row: &SimpleQueryRow) -> Result<SlotState, CatalogError> {
    let unexpected =
        |column: &str| CatalogError::Unexpected(format!("walpost.slot_state.{column}"));
    let lsn = |column: &str| -> Result<Option<Lsn>, CatalogError> {
        let read = row.try_get(column)?.map(str::parse).transpose();
        read.map_err(|_| unexpected(column))
    };
    Ok(SlotState {
        created: lsn("created_lsn")?,
        begun: row.try_get("begun")? == Some("t"),
        confirmed: lsn("confirmed_lsn")?.ok_or_else(|| unexpected("confirmed_lsn"))?,
    })
}
