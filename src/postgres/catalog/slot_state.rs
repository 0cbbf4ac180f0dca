//! The positions that Walpost has confirmed for its slots, stored in the table
//! `walpost.slot_state`, which `sql/journal.sql` creates. A position is written to the table before
//! it is confirmed to PostgreSQL. Therefore, a slot beyond the stored position was moved, or
//! dropped and re-created, by something else.

mod gap;

use postgres_protocol::escape::escape_literal;
use serde_json::json;
use tokio_postgres::SimpleQueryRow;
use tracing::warn;

pub(super) use self::gap::FormerSlot;
pub(crate) use self::gap::Gap;
use self::gap::{Copied, FORMER_SLOT, GapTable};

use super::drop_slot::DETACHED_PARTITIONS;
use super::journal::{Action, Entry, LEFT_PUBLICATION};
use super::own_table::{OwnTable, Use};
use super::{Catalog, CatalogError, SnapshotRecord};
use crate::model::lsn::Lsn;
use crate::postgres::table::TableName;
use crate::postgres::table_pattern::TablePatterns;
use crate::postgres::target::{Outbox, Target};

/// Version of the rows' format. Rows of other versions are ignored.
pub(super) const VERSION: i32 = 1;
/// The condition for rows about slots of this database.
pub(super) const OF_DATABASE: &str =
    "database_oid = (SELECT oid FROM pg_database WHERE datname = current_database())";

/// A slot, and the history of the cluster to which its LSNs belong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SlotOf {
    pub pipeline: String,
    /// The outbox and slot of the pipeline.
    pub target: Target,
    /// The cluster's system identifier.
    pub system_id: String,
    pub timeline: u32,
}

/// How the first start with a slot treats the rows that a single table already contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FirstStart {
    /// Delivers them before streaming.
    CopiesTable,
    /// Only streams: `snapshot = "never"`.
    StreamsOnly,
}

/// The contents of a slot's row in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotState {
    /// Where `walpost init` created the slot, or `None` if something else did.
    pub created: Option<Lsn>,
    /// Whether anything has been read from the slot.
    pub begun: bool,
    /// No position after this one has been confirmed.
    pub confirmed: Lsn,
}

impl SlotState {
    /// Returns whether `walpost init` created the slot, it is still at `confirmed`, where it was
    /// created, and nothing has been read from it.
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

/// A slot that is beyond the position that was confirmed, for no recorded reason.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "slot {slot:?} is at {found}, but was confirmed up to {confirmed} only: it was moved or dropped and re-created by \
     someone else. Events committed between {confirmed} and {found} may be missing in Kafka. {resend}; then say that this \
     is known: {skip}"
)]
pub(crate) struct Moved {
    pub slot: String,
    /// The slot's position.
    pub found: Lsn,
    /// The position that was confirmed.
    pub confirmed: Lsn,
    /// How to have the events in between delivered.
    pub resend: String,
    /// The command that accepts the slot's position.
    pub skip: String,
    /// Whether anything was read from the slot before.
    pub begun: bool,
}

/// Describes which events may be missing because something else has moved or re-created a slot.
#[must_use]
pub(crate) fn describe_move(target: &Target, confirmed: Lsn, found: Lsn) -> String {
    format!(
        "slot {:?} is at {found}, but was confirmed up to {confirmed} only: something else has moved or re-created it. Events \
         committed between {confirmed} and {found} may be missing in Kafka. {}",
        target.slot,
        target.resend()
    )
}

/// The table's contents, as available to the current role.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum FoundState {
    /// The table can't be used, for this reason, so moves of the slot by something else are not
    /// detected.
    Unusable(String),
    /// The state of the slot in this history, or `None` if there is no row for it.
    State(Option<SlotState>),
}

impl Catalog {
    /// Examines the table (`sql/examine.sql`) and returns its contents about a slot.
    ///
    /// # Errors
    /// A query fails, or the table is not trusted.
    pub(crate) async fn slot_state(&self, of: &SlotOf) -> Result<FoundState, CatalogError> {
        self.found_state(of, Use::Write).await
    }

    /// Returns an error if a slot that is at `found` was moved or re-created by something else,
    /// according to the table and the journal. `found` must have been queried before.
    ///
    /// # Errors
    /// A query fails, the role may not read the table, or the table or journal is not trusted.
    pub(crate) async fn moved(
        &self,
        of: &SlotOf,
        found: Lsn,
    ) -> Result<Option<Moved>, CatalogError> {
        let SlotState {
            confirmed, begun, ..
        } = match self.found_state(of, Use::Read).await? {
            FoundState::State(Some(state)) if state.confirmed < found => state,
            FoundState::State(_) | FoundState::Unusable(_) => return Ok(None),
        };
        if self.is_accounted_for(of, confirmed, found).await? {
            return Ok(None);
        }
        Ok(Some(Moved {
            slot: of.target.slot.clone(),
            found,
            confirmed,
            resend: of.target.resend(),
            skip: of.target.skip(&found.to_string()),
            begun,
        }))
    }

    /// Returns whether the table has a row about the slot in this history.
    ///
    /// # Errors
    /// A query fails, or the table is not trusted.
    pub(super) async fn has_slot_state(&self, of: &SlotOf) -> Result<bool, CatalogError> {
        let found = self.found_state(of, Use::Read).await?;
        Ok(matches!(found, FoundState::State(Some(_))))
    }

    async fn found_state(&self, of: &SlotOf, to: Use) -> Result<FoundState, CatalogError> {
        if let Some(why) = self.unusable(&of.target, OwnTable::SlotState, to).await? {
            return Ok(FoundState::Unusable(why));
        }
        let rows = self.slot_state_rows(of, &of_history(of)).await?;
        let state = rows.first().map(state).transpose()?;
        Ok(FoundState::State(state))
    }

    /// Returns the rows about a slot of this name that satisfy a condition.
    async fn slot_state_rows(
        &self,
        of: &SlotOf,
        condition: &str,
    ) -> Result<Vec<SimpleQueryRow>, CatalogError> {
        let slot = escape_literal(&of.target.slot);
        self.select_slot_states(of, &format!("slot = {slot} AND {condition}"))
            .await
    }

    async fn select_slot_states(
        &self,
        of: &SlotOf,
        condition: &str,
    ) -> Result<Vec<SimpleQueryRow>, CatalogError> {
        let select = format!(
            "SELECT slot, created_lsn, begun, confirmed_lsn, system_id, timeline, {OF_DATABASE} AS is_same_database \
             FROM walpost.slot_state WHERE {condition}"
        );
        self
            .run_on_own_table(OwnTable::SlotState, &of.target, "", &select)
            .await
            .map_err(|error| {
                self.with_grant(error, |role| {
                    format!(
                        "GRANT USAGE ON SCHEMA walpost TO {role}; GRANT SELECT ON walpost.slot_state TO {role}"
                    )
                })
            })
    }

    /// Records that no position after `confirmed` has been confirmed for a slot. When this returns,
    /// the row is on the server's disk. Cancel safe.
    ///
    /// # Errors
    /// The query fails.
    pub(crate) async fn write_slot_state(
        &self,
        of: &SlotOf,
        confirmed: Lsn,
    ) -> Result<(), CatalogError> {
        // If there are two instances, the one that lags must not undo what the other has written.
        let same = "s.version = excluded.version AND s.system_id = excluded.system_id AND s.timeline = excluded.timeline \
             AND s.database_oid = excluded.database_oid";
        self.upsert(
            of,
            None,
            true,
            confirmed,
            &format!(
                "begun = true, confirmed_lsn = CASE WHEN {same} THEN greatest(s.confirmed_lsn, excluded.confirmed_lsn) \
                 ELSE excluded.confirmed_lsn END, created_lsn = CASE WHEN {same} THEN s.created_lsn END"
            ),
        )
        .await
    }

    /// Records that a slot was just created and that nothing has been read from it.
    ///
    /// # Errors
    /// The query fails.
    pub(crate) async fn write_new_slot_state(
        &self,
        of: &SlotOf,
        created: Lsn,
    ) -> Result<(), CatalogError> {
        let set = "begun = false, confirmed_lsn = excluded.confirmed_lsn, created_lsn = excluded.created_lsn";
        self.upsert(of, Some(created), false, created, set).await
    }

    async fn upsert(
        &self,
        of: &SlotOf,
        created: Option<Lsn>,
        begun: bool,
        confirmed: Lsn,
        set: &str,
    ) -> Result<(), CatalogError> {
        let created = created.map_or("NULL".to_owned(), |lsn| format!("'{lsn}'"));
        // It is safe not to wait for standbys: a standby that is promoted without the row has
        // another timeline.
        let settings = "SET LOCAL synchronous_commit = local; ";
        let sql = format!(
            "INSERT INTO walpost.slot_state AS s \
             (slot, pipeline, version, system_id, database_oid, timeline, created_lsn, begun, confirmed_lsn, at) \
             SELECT {}, {}, {VERSION}, {}, oid, {}, {created}, \
             {begun}, '{confirmed}', now() FROM pg_database WHERE datname = current_database() ON CONFLICT (slot) DO UPDATE \
             SET pipeline = excluded.pipeline, version = excluded.version, system_id = excluded.system_id, \
             database_oid = excluded.database_oid, timeline = excluded.timeline, at = excluded.at, {set}",
            escape_literal(&of.target.slot),
            escape_literal(&of.pipeline),
            escape_literal(&of.system_id),
            of.timeline,
        );
        self.run_on_own_table(OwnTable::SlotState, &of.target, settings, &sql)
            .await?;
        Ok(())
    }

    /// Records a slot that was just created. If there was another slot of its name, in any history,
    /// entries for the events that it had not delivered are added to the journal, unless the first
    /// start is still to come, which delivers the rows that exist by then.
    ///
    /// # Errors
    /// A query fails, or Walpost's tables are not trusted.
    pub(crate) async fn slot_was_made(
        &self,
        pipeline: &str,
        target: &Target,
        first_start: FirstStart,
    ) -> Result<(), CatalogError> {
        let Some(slot) = self.slot(&target.slot).await? else {
            return Ok(());
        };
        let created = slot.confirmed;
        let of = self.slot_of(pipeline, target).await?;
        if let FoundState::Unusable(why) = self.slot_state(&of).await? {
            warn!(
                pipeline,
                slot = target.slot,
                "cannot tell whether an earlier slot of this name had delivered everything: {why}"
            );
            return Ok(());
        }
        self.record_replaced_before_new_slot(pipeline, target)
            .await?;
        let gap = match self.gap_before(&of, created, States::All).await? {
            None => self.gap_of_tables(&of).await?,
            gap => gap,
        };
        if let Some(gap) = gap
            && let Some(mut gap) = self.not_copied(&of, gap, first_start).await?
        {
            gap.uncopied = self.tables_with_open_copy(target, Some(created)).await?;
            self.write_gap(&of, &gap, created).await?;
        }
        self.write_new_slot_state(&of, created).await?;
        self.restart_tables(pipeline, target).await
    }

    /// Adds journal entries for events that may be missing if `walpost.slot_state` describes a slot
    /// of this name in another history of the database: on another timeline, or before a dump was
    /// restored. The next write of the state replaces that row.
    ///
    /// # Errors
    /// A query fails, or Walpost's tables are not trusted.
    pub(crate) async fn record_gap_of_other_history(
        &self,
        of: &SlotOf,
        found: Lsn,
        first_start: FirstStart,
    ) -> Result<(), CatalogError> {
        let Some(gap) = self.gap_of_other_history(of, found, first_start).await? else {
            return Ok(());
        };
        match self.not_copied(of, gap, first_start).await? {
            Some(gap) => self.write_gap(of, &gap, found).await,
            None => Ok(()),
        }
    }

    /// Returns the part of a gap that the first start with the slot does not copy.
    async fn not_copied(
        &self,
        of: &SlotOf,
        gap: Gap,
        first_start: FirstStart,
    ) -> Result<Option<Gap>, CatalogError> {
        match gap.copied.is_some() || !self.is_copied_at_first_start(of, first_start).await? {
            true => Ok(Some(gap)),
            false => Ok(gap.without_copied_table()),
        }
    }

    /// Returns the events that may be missing before `found`, according to a row of another history
    /// or of the pipeline's previous slot.
    ///
    /// # Errors
    /// A query fails, or Walpost's tables are not trusted.
    pub(crate) async fn gap_of_other_history(
        &self,
        of: &SlotOf,
        found: Lsn,
        first_start: FirstStart,
    ) -> Result<Option<Gap>, CatalogError> {
        let state = match self.found_state(of, Use::Read).await? {
            FoundState::Unusable(_) => return Ok(None),
            FoundState::State(state) => state,
        };
        match self.gap_before(of, found, States::OfOtherHistory).await? {
            None if state.is_none_or(|state| !state.begun) => {
                self.gap_of_former_slot(of, found, state, first_start).await
            }
            gap => Ok(gap),
        }
    }

    /// Returns the slot that the pipeline read most recently before this one.
    async fn former_slot(&self, of: &SlotOf) -> Result<Option<FormerSlot>, CatalogError> {
        let condition = format!(
            "pipeline = {} AND slot <> {} AND begun AND {} ORDER BY confirmed_lsn DESC LIMIT 1",
            escape_literal(&of.pipeline),
            escape_literal(&of.target.slot),
            of_history(of),
        );
        let rows = self.select_slot_states(of, &condition).await?;
        rows.first().map(former).transpose()
    }

    /// Returns the events between the last position of the pipeline's former slot and `found`,
    /// where the slot that is now configured starts. The former slot may still exist, but nothing
    /// reads it. If the first start with a slot copies the rows of a single table, the gap consists
    /// of what can't be copied.
    async fn gap_of_former_slot(
        &self,
        of: &SlotOf,
        found: Lsn,
        state: Option<SlotState>,
        first_start: FirstStart,
    ) -> Result<Option<Gap>, CatalogError> {
        let Some(former) = self.former_slot(of).await? else {
            return Ok(None);
        };
        let confirmed = former.confirmed;
        if confirmed >= found || self.is_accounted_for(of, confirmed, found).await? {
            return Ok(None);
        }
        let mut gap = Gap {
            from: Some(confirmed),
            reason: FORMER_SLOT,
            former: Some(former),
            copied: None,
            uncopied: Vec::new(),
        };
        if let Outbox::Table(table) = &of.target.outbox
            && first_start == FirstStart::CopiesTable
            // An entry indicates that the table was copied before, or that it was empty when
            // walpost init created the slot.
            && (state.is_some() || self.snapshot_record(&of.target).await? != SnapshotRecord::Done)
        {
            let is_partitioned = self.is_partitioned(table).await?;
            gap.copied = Some(match is_partitioned {
                true => Copied::Partitions,
                false => Copied::Table,
            });
            if self.gap_tables(of, &gap).await?.is_empty() {
                return Ok(None);
            }
        }
        Ok(Some(gap))
    }

    /// Returns whether nothing has been read from the slot yet and the first start will deliver all
    /// rows of the table.
    async fn is_copied_at_first_start(
        &self,
        of: &SlotOf,
        first_start: FirstStart,
    ) -> Result<bool, CatalogError> {
        Ok(matches!(of.target.outbox, Outbox::Table(_))
            && first_start == FirstStart::CopiesTable
            && self.slot_state_rows(of, "begun").await?.is_empty()
            && self.snapshot_record(&of.target).await?.is_unbegun())
    }

    /// Returns the gap of rows that tables already contained when they were added, if that was
    /// before the slot existed and there was no other slot. `sql/slot.sql` rejects such tables, but
    /// a table can be added until the slot is complete.
    async fn gap_of_tables(&self, of: &SlotOf) -> Result<Option<Gap>, CatalogError> {
        let (Outbox::Tables(patterns) | Outbox::OneOf { of: patterns, .. }) = &of.target.outbox
        else {
            return Ok(None);
        };
        if !self.slot_state_rows(of, "true").await?.is_empty() {
            return Ok(None);
        }
        // Events that the former slot has not delivered are a separate gap, which `run` records.
        if self.former_slot(of).await?.is_some() {
            return Ok(None);
        }
        let (published, _) = self.published_outboxes(&of.target, patterns).await?;
        Ok((!published.is_empty()).then_some(Gap {
            from: None,
            former: None,
            copied: None,
            uncopied: Vec::new(),
            reason: "tables added before the slot was complete",
        }))
    }

    /// Returns the events that a slot of this name may not have delivered, according to its row if
    /// that is one of `states`. The slot is at `found`; if rows of all histories count, it was just
    /// created there.
    async fn gap_before(
        &self,
        of: &SlotOf,
        found: Lsn,
        states: States,
    ) -> Result<Option<Gap>, CatalogError> {
        let condition = match states {
            States::All => "true".to_owned(),
            States::OfOtherHistory => {
                format!("version = {VERSION} AND NOT ({})", of_history(of))
            }
        };
        let rows = self.slot_state_rows(of, &condition).await?;
        let Some(row) = rows.first() else {
            return Ok(None);
        };
        let is_same_cluster = row.try_get("system_id")? == Some(&*of.system_id);
        let is_same_database = row.try_get("is_same_database")? == Some("t");
        let former = former(row)?;
        let before = former.confirmed;
        // A row is written after the WAL that it describes, so a server that has the row also has
        // that WAL, on every timeline. If a slot is created before that position, the server was
        // copied before the row was restored there.
        let is_restored = states == States::All && before > found;
        if !is_same_cluster || !is_same_database || is_restored {
            // The LSNs of the row are unrelated to this slot.
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
        if before >= found || self.is_accounted_for(of, before, found).await? {
            return Ok(None);
        }
        let is_same_timeline = row.try_get("timeline")? == Some(&*of.timeline.to_string());
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

    /// Adds the gap to the journal, with one entry per table, because tables are replayed
    /// individually. Entries written by an earlier attempt are not repeated.
    async fn write_gap(&self, of: &SlotOf, gap: &Gap, found: Lsn) -> Result<(), CatalogError> {
        let (pipeline, target) = (&of.pipeline, &of.target);
        let mut tables = self.gap_tables(of, gap).await?;
        if let (true, Some(Copied::Table), Some(outbox)) =
            (tables.is_empty(), gap.copied, target.outbox.table())
        {
            warn!(pipeline, "{}", gap.describe_copied(outbox));
        }
        self.remember_left_tables(of, gap, &tables, found).await?;
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
                    "system_id": of.system_id,
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

    /// Returns the tables that a gap affects: those of the outbox, unless they are copied, and
    /// those of the former slot that are not published now.
    async fn gap_tables(&self, of: &SlotOf, gap: &Gap) -> Result<Vec<GapTable>, CatalogError> {
        let target = &of.target;
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
            tables.extend(self.others_published(target, table).await?);
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

    /// Returns the tables other than the outbox that are in the publication: one of them may have
    /// been the outbox, under the name that another table has now.
    async fn others_published(
        &self,
        target: &Target,
        outbox: &TableName,
    ) -> Result<Vec<GapTable>, CatalogError> {
        let version = self.version().await?;
        let mut others = self.published_tables(&target.publication, version).await?;
        // A publication of all tables also contains Walpost's own.
        others.retain(|found| found.name != *outbox && found.name.schema != "walpost");
        let others = others.into_iter().map(|found| GapTable {
            name: Some(found.name.to_string()),
            is_named: true,
            is_published: true,
        });
        Ok(others.collect())
    }

    /// Records for the slot, which is at `found`, that some tables of the gap are not published.
    async fn remember_left_tables(
        &self,
        of: &SlotOf,
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
        self.record_left_tables(&of.target, former, &left, found)
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

    /// Returns the tables of an outbox; `None` stands for messages, which are in no table. Includes
    /// published tables that match no pattern, because a table may have been renamed since its rows
    /// were written. If the publication is missing or empty, returns the tables that match.
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

    /// Returns the tables of the publication that match the patterns, and those that do not.
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

    /// Returns the slot, with the history of the server that this connection is to.
    ///
    /// # Errors
    /// The query fails.
    pub(crate) async fn slot_of(
        &self,
        pipeline: &str,
        target: &Target,
    ) -> Result<SlotOf, CatalogError> {
        // The control file contains the timeline of the last checkpoint, which a promotion does not
        // wait for.
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
        Ok(SlotOf {
            pipeline: pipeline.to_owned(),
            target: target.clone(),
            system_id: row.try_get(0)?,
            timeline: u32::try_from(timeline)
                .map_err(|error| CatalogError::Unexpected(format!("a timeline: {error}")))?,
        })
    }

    /// Returns whether the journal explains why a slot is at `found`, after `confirmed`: the WAL in
    /// between was skipped, or given up with the previous slot. Entries about a table that was not
    /// published don't count, nor do those of another cluster, which a restored dump can contain.
    ///
    /// # Errors
    /// A query fails, or the journal is not trusted or contains something unexpected.
    pub(crate) async fn is_accounted_for(
        &self,
        of: &SlotOf,
        confirmed: Lsn,
        found: Lsn,
    ) -> Result<bool, CatalogError> {
        let condition = format!(
            "j.slot = {} AND j.detail ->> 'system_id' = {} AND ({} OR j.action = '{}' AND j.from_lsn <= '{confirmed}' \
             AND j.to_lsn >= '{found}')",
            escape_literal(&of.target.slot),
            escape_literal(&of.system_id),
            is_given_up_at(confirmed),
            Action::Skip.name(),
        );
        match self.entries(&of.target, &condition).await {
            Ok(entries) => Ok(!entries.is_empty()),
            Err(CatalogError::NoJournal { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// Returns the condition for journal entries by which the WAL after `confirmed` was given up with
/// the slot. An entry that ends at `confirmed` is about an earlier slot.
pub(super) fn is_given_up_at(confirmed: Lsn) -> String {
    format!(
        "(j.action = '{}' AND NOT j.detail ? '{LEFT_PUBLICATION}' AND j.from_lsn <= '{confirmed}' \
         AND (j.to_lsn > '{confirmed}' OR j.from_lsn = '{confirmed}'))",
        Action::DropSlot.name()
    )
}

/// Selects rows of `walpost.slot_state` about slots of one name.
#[derive(Clone, Copy, PartialEq, Eq)]
enum States {
    All,
    OfOtherHistory,
}

/// Returns the condition for rows of walpost.slot_state that belong to this history.
fn of_history(of: &SlotOf) -> String {
    format!(
        "version = {VERSION} AND system_id = {} AND timeline = {} AND {OF_DATABASE}",
        escape_literal(&of.system_id),
        of.timeline,
    )
}

fn former(row: &SimpleQueryRow) -> Result<FormerSlot, CatalogError> {
    Ok(FormerSlot {
        slot: row.try_get("slot")?.unwrap_or_default().to_owned(),
        confirmed: state(row)?.confirmed,
    })
}

fn state(row: &SimpleQueryRow) -> Result<SlotState, CatalogError> {
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
