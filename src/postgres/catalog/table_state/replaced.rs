//! Detects that a table was replaced by another table with the same name, for example because a
//! migration renamed or dropped the outbox table and then re-created it.
//!
//! The stream contains rows of both tables, but only rows that were inserted while their table was
//! published. Rows of the former table are never sent if they had not been copied yet, or if they
//! were inserted while that table was not published. A replay of the current table does not send
//! these rows either.
//!
//! Rows of tables that inherit from an outbox table can be missing as well. `check` and `run`
//! report such child tables as long as the parent has the outbox's name. If neither command ran
//! before the parent was renamed, the child tables can be found only through the parent's OID in
//! `walpost.table_state`.

use serde_json::json;
use tracing::warn;

use super::super::drop_slot::REPLACED;
use super::super::journal::{Action, Entry, LEFT_PUBLICATION};
use super::super::{Catalog, CatalogError, SnapshotRecord};
use super::{DATABASE_OID, SYSTEM_ID, StoredTable, TableChange, TableObservation};
use crate::model::dropped_slot::{replay_command, settle_command};
use crate::model::lsn::Lsn;
use crate::postgres::catalog::own_table::OwnTable;
use crate::postgres::catalog::slot_state;
use crate::postgres::sql::text_literal;
use crate::postgres::table::TableName;
use crate::postgres::target::{OUTBOX_ROW, Outbox, Target};

/// A table whose rows may be missing because another table has replaced it, or because it inherits
/// from a table that was renamed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ReplacedTable {
    /// The current name of the table; `None` if the table was dropped.
    name: Option<TableName>,
    /// The table's former name, which may now belong to another table. For a child table, the
    /// former name of its parent.
    by: TableName,
    publication: String,
    missing: MissingEvents,
    /// The server's WAL position at the time of the query.
    end: Lsn,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum MissingEvents {
    /// Some or all rows that are older than the slot are missing, because the copy of these rows
    /// was not completed. Newer rows may be missing as well.
    Copy,
    /// Rows that were inserted while the table was not published are missing.
    Publication(MissingRows),
    /// The journal records rows as missing or set aside under the table's former name. A replay of
    /// that name would read a different table, which has the name now.
    Replay(MissingRows),
    /// All rows of a child table are missing, because only its parent was published.
    Child { parent: TableName },
}

/// The range of a table's rows that may be missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MissingRows {
    /// The missing rows were committed after this position; `None` if all rows may be missing.
    from: Option<Lsn>,
    /// The oldest transaction that may have inserted a missing row; `None` if all rows may be
    /// missing.
    since: Option<u64>,
}

impl MissingRows {
    /// Returns a range that includes both ranges.
    fn union(self, other: Self) -> Self {
        Self {
            from: self.from.min(other.from),
            since: self.since.min(other.since),
        }
    }
}

impl ReplacedTable {
    fn child(
        observed: &TableObservation,
        target: &Target,
        parent: &TableName,
        name: TableName,
    ) -> Self {
        Self {
            name: Some(name),
            by: observed.table.clone(),
            publication: target.publication.clone(),
            missing: MissingEvents::Child {
                parent: parent.clone(),
            },
            end: observed.slot.end,
        }
    }

    /// Returns the replaced table if some of its rows may be missing. `recorded` is the range of
    /// rows that the journal records under the table's name as missing or set aside.
    pub(super) fn find(
        observed: &TableObservation,
        target: &Target,
        is_copied: bool,
        recorded: Option<MissingRows>,
    ) -> Option<Self> {
        let stored = observed.stored.as_ref()?;
        let unpublished = match observed.evaluate(&target.publication) {
            // If the former table was published without interruption, none of its rows are missing.
            // Only rows of the current table may be missing.
            TableChange::Gap(gap) if !stored.is_published || stored.is_out => Some(MissingRows {
                from: gap.from,
                since: gap.since,
            }),
            // The current table is not published yet, but the former table is published again.
            // Report the former table without waiting for the current table to be published: the
            // former table may be part of the outbox under its new name, and retention may remove
            // its rows.
            TableChange::Nothing if stored.is_published && stored.is_out => Some(MissingRows {
                from: stored.seen_lsn,
                since: stored.seen_xid,
            }),
            _ => None,
        };
        let missing = match (unpublished, recorded) {
            _ if !is_copied => MissingEvents::Copy,
            _ if stored.name.is_none() => return None,
            (None, None) => return None,
            (Some(rows), None) => MissingEvents::Publication(rows),
            (None, Some(recorded)) => MissingEvents::Replay(recorded),
            (Some(rows), Some(recorded)) => MissingEvents::Replay(rows.union(recorded)),
        };
        Some(Self {
            name: stored.name.clone(),
            by: observed.table.clone(),
            publication: target.publication.clone(),
            missing,
            end: observed.slot.end,
        })
    }

    /// Describes which events may be missing, and why.
    pub(super) fn describe(&self) -> String {
        let Self {
            by,
            publication,
            end,
            ..
        } = self;
        let name = match &self.name {
            Some(name) => format!("{name}"),
            None => format!("the dropped table {by}"),
        };
        match &self.missing {
            MissingEvents::Child { parent } => format!(
                "table {name} inherits from {parent}, which was previously named {by}: PostgreSQL did not send the rows \
                 of {name} as outbox rows, so its events committed before {end} may be missing from Kafka"
            ),
            MissingEvents::Copy => format!(
                "table {by} has replaced {name}, whose older rows had not all been copied: events of the replaced table \
                 committed before {end} may be missing from Kafka"
            ),
            MissingEvents::Publication(rows) => format!(
                "table {by} has replaced {name}, which was temporarily missing from publication {publication:?}: events \
                 of the replaced table committed after {} may be missing from Kafka",
                rows.from.unwrap_or_default()
            ),
            MissingEvents::Replay(rows) => format!(
                "table {by} has replaced {name} before the events that the journal records as missing or set aside were \
                 sent again: events of the replaced table committed after {} may be missing from Kafka",
                rows.from.unwrap_or_default()
            ),
        }
    }

    /// Describes how an operator can deliver the events that may be missing.
    fn remedy(&self, target: &Target) -> String {
        let commands = &target.commands;
        let Some(name) = &self.name else {
            let by = target.outbox.is_several().then(|| self.by.to_string());
            return format!(
                "Rows of a dropped table can't be sent again. To acknowledge this: {}",
                settle_command(commands, by.as_deref())
            );
        };
        let first = match &target.outbox {
            Outbox::Tables(_) | Outbox::OneOf { .. }
                if !target.outbox.includes(&name.schema, &name.name) =>
            {
                format!(
                    "No pattern in the tables setting matches {name}: add the table to this setting. "
                )
            }
            _ => String::new(),
        };
        let replay = replay_command(commands, Some(&name.to_string()));
        match self.missing {
            // Child tables do not inherit the primary key, which a replay requires.
            MissingEvents::Child { .. } => format!(
                "{first}Add a primary key to the table if it has none, then send these events: {replay}"
            ),
            MissingEvents::Copy | MissingEvents::Publication(_) | MissingEvents::Replay(_) => {
                format!("{first}Send these events again: {replay}")
            }
        }
    }

    fn entry<'e>(&self, pipeline: &'e str, target: &'e Target, cluster: &str) -> Entry<'e> {
        let (from, since) = match self.missing {
            MissingEvents::Copy | MissingEvents::Child { .. } => (Some(Lsn::ZERO), None),
            MissingEvents::Publication(rows) | MissingEvents::Replay(rows) => {
                (rows.from, rows.since)
            }
        };
        let is_child = matches!(self.missing, MissingEvents::Child { .. });
        Entry {
            pipeline,
            target,
            action: Action::DropSlot,
            from,
            to: Some(self.end),
            detail: json!({
                "reason": match is_child {
                    true => "the table inherits from a table that was renamed",
                    false => "the table was replaced by another table",
                },
                LEFT_PUBLICATION: target.publication,
                REPLACED: !is_child,
                "table": self.name.as_ref().unwrap_or(&self.by).to_string(),
                // If the table still exists, it has a different name now, which the replay command
                // must specify.
                "several": self.name.is_some() || target.outbox.is_several(),
                "catalog_xmin": since.map(|id| id.to_string()),
                "system_id": cluster,
            }),
        }
    }
}

impl TableObservation {
    /// Returns whether a different table was recorded under this table's name.
    fn is_replaced(&self) -> bool {
        let [schema, name] = OUTBOX_ROW;
        let is_other = |stored: &StoredTable| {
            stored.relation != 0 && self.relation != 0 && stored.relation != self.relation
        };
        self.stored.as_ref().is_some_and(is_other) && !self.table.is(schema, name)
    }
}

impl Catalog {
    /// Returns the tables that have been replaced since they were recorded in `walpost.table_state`
    /// and whose rows may be missing. Also returns the tables that inherit from replaced tables.
    pub(super) async fn replaced_tables<'l>(
        &self,
        target: &Target,
        observations: &'l [TableObservation],
    ) -> Result<Vec<(&'l TableObservation, Vec<ReplacedTable>)>, CatalogError> {
        let mut found = Vec::new();
        for observed in observations
            .iter()
            .filter(|observed| observed.is_replaced())
        {
            let current = observed
                .stored
                .as_ref()
                .and_then(|stored| stored.name.as_ref());
            let names = (&observed.table, current);
            let is_copied = !self
                .has_open_copy(target, names, observed.slot.confirmed)
                .await?;
            let mut tables = self.children_of_recorded(target, observed).await?;
            let recorded = self.recorded_as_missing(target, observed).await?;
            tables.extend(ReplacedTable::find(observed, target, is_copied, recorded));
            if !tables.is_empty() {
                found.push((observed, tables));
            }
        }
        Ok(found)
    }

    /// Returns the range of rows that the journal records as missing or set aside under the table's
    /// former name, and that have not been resent.
    async fn recorded_as_missing(
        &self,
        target: &Target,
        observed: &TableObservation,
    ) -> Result<Option<MissingRows>, CatalogError> {
        let name = observed.table.to_string();
        let cluster = self.cluster().await?;
        // Transaction IDs of different clusters can't be compared.
        let rows = |from, since: Option<u64>, origin: Option<&String>| MissingRows {
            from,
            since: since.filter(|_| origin == Some(&cluster)),
        };
        let mut open = self.dropped_slots_of_table(target, &observed.table).await?;
        open.retain(|entry| entry.table.as_ref().is_none_or(|table| *table == name));
        let missing = open
            .iter()
            .map(|entry| rows(entry.from, entry.since, entry.cluster.as_ref()));
        let relation = observed.stored.as_ref().map_or(0, |stored| stored.relation);
        let mut aside = self.set_aside_of_table(target, &name, relation).await?;
        // Keep only the journal entries about the former table. These entries contain the former
        // name, but a replay of that name would read the current table.
        aside.retain(|entry| entry.table == name && entry.relation == relation);
        let aside = aside.iter().map(|entry| {
            rows(
                Some(entry.position.commit),
                entry.since,
                entry.cluster.as_ref(),
            )
        });
        Ok(missing.chain(aside).reduce(MissingRows::union))
    }

    /// If a published table has been renamed, returns the non-empty tables that inherit from it.
    /// Returns no tables if another table now has the former name.
    pub(super) async fn children_of_renamed(
        &self,
        target: &Target,
        observed: &TableObservation,
    ) -> Result<Vec<ReplacedTable>, CatalogError> {
        let is_known = observed.stored.as_ref().is_none_or(|stored| stored.is_out);
        match is_known || observed.is_replaced() {
            true => Ok(Vec::new()),
            false => self.children_of_recorded(target, observed).await,
        }
    }

    /// If the recorded table has been renamed, returns the non-empty tables that inherit from it.
    async fn children_of_recorded(
        &self,
        target: &Target,
        observed: &TableObservation,
    ) -> Result<Vec<ReplacedTable>, CatalogError> {
        let stored = observed.stored.as_ref();
        let current = stored.and_then(|stored| stored.name.as_ref());
        let Some(parent) = current.filter(|name| **name != observed.table) else {
            return Ok(Vec::new());
        };
        let mut children = Vec::new();
        for hidden in self.hidden_rows(std::slice::from_ref(parent)).await? {
            let table = hidden.into_table();
            // A child table that is itself an outbox table has a row in `walpost.table_state`.
            if !target.outbox.includes(&table.schema, &table.name)
                && self.has_storage(&table).await?
            {
                children.push(ReplacedTable::child(observed, target, parent, table));
            }
        }
        Ok(children)
    }

    /// Adds journal entries for the replaced tables whose rows may be missing. The statement that
    /// adds an entry also records the OID of the current table, so that the entry is added only
    /// once.
    pub(super) async fn record_replaced_tables(
        &self,
        pipeline: &str,
        target: &Target,
        observations: &[TableObservation],
    ) -> Result<(), CatalogError> {
        for (observed, tables) in self.replaced_tables(target, observations).await? {
            let Some(stored) = &observed.stored else {
                continue;
            };
            let assignments = format!("relation = {}", observed.relation);
            let condition = observed.condition(target, stored);
            let condition = format!("{condition} AND relation = {}", stored.relation);
            self.write_replaced(pipeline, target, &tables, (&assignments, &condition))
                .await?;
        }
        Ok(())
    }

    /// Updates the outbox table's record, and adds a journal entry for each of `tables`.
    pub(super) async fn write_replaced(
        &self,
        pipeline: &str,
        target: &Target,
        tables: &[ReplacedTable],
        (assignments, condition): (&str, &str),
    ) -> Result<(), CatalogError> {
        let cluster = self.cluster().await?;
        let entries: Vec<_> = tables
            .iter()
            .map(|table| table.entry(pipeline, target, &cluster))
            .collect();
        let ids = self
            .update_with_entries(target, assignments, condition, &entries)
            .await?;
        for (table, journal) in tables.iter().zip(ids) {
            warn!(
                pipeline,
                slot = target.slot,
                journal,
                "{}. {}",
                table.describe(),
                table.remedy(target)
            );
        }
        Ok(())
    }

    /// Returns whether the table has rows that are older than the slot and have not been copied
    /// yet. `found` is the slot's position, and `recorded` is the table's name in the journal. Also
    /// takes the position in `walpost.slot_state` into account, because something other than
    /// Walpost may have moved the slot.
    async fn has_open_copy(
        &self,
        target: &Target,
        (recorded, current): (&TableName, Option<&TableName>),
        found: Option<Lsn>,
    ) -> Result<bool, CatalogError> {
        let open = self.tables_with_open_copy(target, found).await?;
        let mut names = [Some(recorded), current].into_iter().flatten();
        Ok(names.any(|name| open.contains(&name.to_string())))
    }

    /// Returns the tables with rows that are older than the slot and have not been copied yet. The
    /// result can contain a table's current name or the name that the journal records for it.
    pub(in crate::postgres::catalog) async fn tables_with_open_copy(
        &self,
        target: &Target,
        found: Option<Lsn>,
    ) -> Result<Vec<String>, CatalogError> {
        if target.outbox.is_messages() {
            return Ok(Vec::new());
        }
        let snapshots = match self.table_snapshots(target).await {
            Err(CatalogError::NoJournal { .. }) => return Ok(Vec::new()),
            snapshots => snapshots?,
        };
        let recorded = self.recorded_position(target).await?;
        let confirmed = recorded.into_iter().chain(found).min();
        let own = target.outbox.table();
        let mut open = Vec::new();
        for found in &snapshots {
            let is_begun = matches!(found.record, SnapshotRecord::Begun(_));
            if is_begun && confirmed.is_none_or(|confirmed| found.record.is_open(confirmed)) {
                let table = found.table.clone();
                open.extend(table.or_else(|| own.map(TableName::to_string)));
            }
        }
        if let Some(own) = own
            && SnapshotRecord::of_table(&snapshots, Some(own)).is_not_started()
            && !self.has_streamed(target).await?
        {
            open.push(own.to_string());
        }
        let due = self.due_copies(target, &snapshots).await?;
        open.extend(due.iter().map(|due| due.name().to_string()));
        Ok(open)
    }

    /// Returns the last position that Walpost may have confirmed for the slot, regardless of the
    /// timeline.
    async fn recorded_position(&self, target: &Target) -> Result<Option<Lsn>, CatalogError> {
        self.slot_state_position(target, "confirmed_lsn").await
    }

    /// Returns the position in the given column of the slot's row in `walpost.slot_state`,
    /// regardless of the timeline.
    pub(super) async fn slot_state_position(
        &self,
        target: &Target,
        column: &'static str,
    ) -> Result<Option<Lsn>, CatalogError> {
        let sql = format!(
            "SELECT {column} FROM walpost.slot_state WHERE slot = {} AND version = {} AND system_id = {SYSTEM_ID} \
             AND database_oid = {DATABASE_OID}",
            text_literal(&target.slot),
            slot_state::VERSION
        );
        let rows = self.run_on_own_table(OwnTable::SlotState, target, "", &sql);
        let rows = rows.await?;
        let position = rows.first().and_then(|row| row.get(0)).map(str::parse);
        position
            .transpose()
            .map_err(|_| CatalogError::Unexpected(format!("walpost.slot_state.{column}")))
    }
}
