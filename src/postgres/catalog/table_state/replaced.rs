//! Tables that were replaced by another table: a migration renames or drops the outbox, and creates
//! it again.
//!
//! The stream contains what was inserted into either table while it was published. Rows of the
//! former table that had not been copied yet, or that were inserted while it was not published, are
//! not sent by any slot, nor by a replay of the present table.
//!
//! The same is true of tables that inherit from a table with the name of an outbox. Until that table
//! is renamed, `check` and `run` report them. If neither ran before, only the record of the former
//! table leads to them.

use postgres_protocol::escape::escape_literal;
use serde_json::json;
use tracing::warn;

use super::super::drop_slot::REPLACED;
use super::super::journal::{Action, Entry, LEFT_PUBLICATION};
use super::super::{Catalog, CatalogError, SnapshotRecord};
use super::{DATABASE_OID, Finding, SYSTEM_ID, StoredTable, TableLook};
use crate::model::dropped_slot::{replay_command, settle_command};
use crate::model::lsn::Lsn;
use crate::postgres::catalog::own_table::OwnTable;
use crate::postgres::catalog::slot_state;
use crate::postgres::table::TableName;
use crate::postgres::target::{OUTBOX_ROW, Outbox, Target};

/// A table whose rows may be missing, because another table has replaced it, or because it inherits
/// from a table that was renamed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ReplacedTable {
    /// Its present name; `None` if it was dropped.
    name: Option<TableName>,
    /// The table that now has its name. For a child table, the former name of its parent.
    by: TableName,
    publication: String,
    lacks: Lacks,
    /// The end of WAL.
    end: Lsn,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Lacks {
    /// Rows that are older than the slot, and possibly later ones.
    Copy,
    /// Rows that were inserted while the table was not published.
    Publication(MissingRows),
    /// Rows that are recorded as missing under the name that another table has now.
    Replay(MissingRows),
    /// All rows: only the table from which it inherits was published.
    Child { parent: TableName },
}

/// The rows of a table that may be missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MissingRows {
    /// The position after which they were committed; `None` for all rows.
    from: Option<Lsn>,
    /// The first transaction that may be missing; `None` for all rows.
    since: Option<u64>,
}

impl MissingRows {
    /// Returns the rows that are in either set.
    fn union(self, other: Self) -> Self {
        Self {
            from: self.from.min(other.from),
            since: self.since.min(other.since),
        }
    }
}

impl ReplacedTable {
    fn child(look: &TableLook, target: &Target, parent: &TableName, name: TableName) -> Self {
        Self {
            name: Some(name),
            by: look.table.clone(),
            publication: target.publication.clone(),
            lacks: Lacks::Child {
                parent: parent.clone(),
            },
            end: look.slot.end,
        }
    }

    /// `recorded` are the rows that the journal records as missing or set aside under the name of the
    /// table.
    fn find(
        look: &TableLook,
        target: &Target,
        is_copied: bool,
        recorded: Option<MissingRows>,
    ) -> Option<Self> {
        let stored = look.stored.as_ref()?;
        let unpublished = match look.evaluate(&target.publication) {
            // The entry about the present table covers these rows as well.
            Finding::Gap(gap) if !stored.is_published => Some(MissingRows {
                from: gap.from,
                since: gap.since,
            }),
            _ => None,
        };
        let lacks = match (unpublished, recorded) {
            _ if !is_copied => Lacks::Copy,
            _ if stored.name.is_none() => return None,
            (None, None) => return None,
            (Some(rows), None) => Lacks::Publication(rows),
            (None, Some(recorded)) => Lacks::Replay(recorded),
            (Some(rows), Some(recorded)) => Lacks::Replay(rows.union(recorded)),
        };
        Some(Self {
            name: stored.name.clone(),
            by: look.table.clone(),
            publication: target.publication.clone(),
            lacks,
            end: look.slot.end,
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
            None => "one of the same name, which was dropped".to_owned(),
        };
        match &self.lacks {
            Lacks::Child { parent } => format!(
                "table {name} inherits from {parent}, which was {by} before: PostgreSQL has not sent its rows as those of an outbox, \
                 and its events committed before {end} may be missing in Kafka"
            ),
            Lacks::Copy => format!(
                "table {by} has taken the place of {name}, before all older rows of that were copied: its events committed before \
                 {end} may be missing in Kafka"
            ),
            Lacks::Publication(rows) => format!(
                "table {by} has taken the place of {name}, which was not in publication {publication:?} for a while: its events \
                 committed after {} may be missing in Kafka",
                rows.from.unwrap_or_default()
            ),
            Lacks::Replay(rows) => format!(
                "table {by} has taken the place of {name}, before events were sent again that the journal records as missing or set \
                 aside: its events committed after {} may be missing in Kafka",
                rows.from.unwrap_or_default()
            ),
        }
    }

    /// Describes what an operator should do about the events.
    fn remedy(&self, target: &Target) -> String {
        let commands = &target.commands;
        let Some(name) = &self.name else {
            let by = target.outbox.is_several().then(|| self.by.to_string());
            return format!(
                "Rows of a table that was dropped can't be sent again. Say that this is known: {}",
                settle_command(commands, by.as_deref())
            );
        };
        let first = match &target.outbox {
            Outbox::Tables(_) | Outbox::OneOf { .. }
                if !target.outbox.includes(&name.schema, &name.name) =>
            {
                format!("No pattern in tables stands for {name}: add it to tables. ")
            }
            _ => String::new(),
        };
        let send = match self.lacks {
            // A child table does not inherit the primary key.
            Lacks::Child { .. } => "Give the table a primary key if it has none, and send them",
            Lacks::Copy | Lacks::Publication(_) | Lacks::Replay(_) => "Send them again",
        };
        format!(
            "{first}{send}: {}",
            replay_command(commands, Some(&name.to_string()))
        )
    }

    fn entry<'e>(&self, pipeline: &'e str, target: &'e Target, cluster: &str) -> Entry<'e> {
        let (from, since) = match self.lacks {
            Lacks::Copy | Lacks::Child { .. } => (Some(Lsn::ZERO), None),
            Lacks::Publication(rows) | Lacks::Replay(rows) => (rows.from, rows.since),
        };
        let is_child = matches!(self.lacks, Lacks::Child { .. });
        Entry {
            pipeline,
            target,
            action: Action::DropSlot,
            from,
            to: Some(self.end),
            detail: json!({
                "reason": match is_child {
                    true => "it inherits from a table that was renamed",
                    false => "another table has taken its place",
                },
                LEFT_PUBLICATION: target.publication,
                REPLACED: !is_child,
                "table": self.name.as_ref().unwrap_or(&self.by).to_string(),
                // Under another name, it is not the table of the configured outbox.
                "several": self.name.is_some() || target.outbox.is_several(),
                "catalog_xmin": since.map(|id| id.to_string()),
                "system_id": cluster,
            }),
        }
    }
}

impl TableLook {
    /// Returns whether another table was recorded under this name.
    fn is_replaced(&self) -> bool {
        let [schema, name] = OUTBOX_ROW;
        let is_other = |stored: &StoredTable| {
            stored.relation != 0 && self.relation != 0 && stored.relation != self.relation
        };
        self.stored.as_ref().is_some_and(is_other) && !self.table.is(schema, name)
    }
}

impl Catalog {
    /// Returns the tables that were replaced since they were recorded and whose rows may be missing,
    /// and the tables that inherit from them.
    pub(super) async fn replaced_tables<'l>(
        &self,
        target: &Target,
        looks: &'l [TableLook],
    ) -> Result<Vec<(&'l TableLook, Vec<ReplacedTable>)>, CatalogError> {
        let mut found = Vec::new();
        for look in looks.iter().filter(|look| look.is_replaced()) {
            let present = look.stored.as_ref().and_then(|stored| stored.name.as_ref());
            let names = (&look.table, present);
            let is_copied = !self
                .has_open_copy(target, names, look.slot.confirmed)
                .await?;
            let mut tables = self.children_of_recorded(target, look).await?;
            let recorded = self.recorded_as_missing(target, look).await?;
            tables.extend(ReplacedTable::find(look, target, is_copied, recorded));
            if !tables.is_empty() {
                found.push((look, tables));
            }
        }
        Ok(found)
    }

    /// Returns the rows that the journal records as missing, or as set aside, for the recorded table
    /// under its former name, and that were not sent again.
    async fn recorded_as_missing(
        &self,
        target: &Target,
        look: &TableLook,
    ) -> Result<Option<MissingRows>, CatalogError> {
        let name = look.table.to_string();
        let cluster = self.cluster().await?;
        // Transactions have different IDs in another cluster.
        let rows = |from, since: Option<u64>, of: Option<&String>| MissingRows {
            from,
            since: since.filter(|_| of == Some(&cluster)),
        };
        let mut open = self.dropped_slots_of_table(target, &look.table).await?;
        open.retain(|entry| entry.table.as_ref().is_none_or(|of| *of == name));
        let missing = open
            .iter()
            .map(|entry| rows(entry.from, entry.since, entry.cluster.as_ref()));
        let relation = look.stored.as_ref().map_or(0, |stored| stored.relation);
        let mut aside = self.set_aside_of_table(target, &name, relation).await?;
        // A replay of the table reads the one that has the name.
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

    /// Returns the tables with rows that inherit from a table that was published and then renamed,
    /// if no other table has its former name.
    pub(super) async fn children_of_renamed(
        &self,
        target: &Target,
        look: &TableLook,
    ) -> Result<Vec<ReplacedTable>, CatalogError> {
        let is_known = look.stored.as_ref().is_none_or(|stored| stored.is_out);
        match is_known || look.is_replaced() {
            true => Ok(Vec::new()),
            false => self.children_of_recorded(target, look).await,
        }
    }

    /// Returns the tables with rows that inherit from the recorded table, if the recorded table now
    /// has another name.
    async fn children_of_recorded(
        &self,
        target: &Target,
        look: &TableLook,
    ) -> Result<Vec<ReplacedTable>, CatalogError> {
        let stored = look.stored.as_ref();
        let present = stored.and_then(|stored| stored.name.as_ref());
        let Some(parent) = present.filter(|name| **name != look.table) else {
            return Ok(Vec::new());
        };
        let mut children = Vec::new();
        for hidden in self.hidden_rows(std::slice::from_ref(parent)).await? {
            let table = hidden.into_table();
            // A table that is itself an outbox has its own record.
            if !target.outbox.includes(&table.schema, &table.name)
                && self.has_storage(&table).await?
            {
                children.push(ReplacedTable::child(look, target, parent, table));
            }
        }
        Ok(children)
    }

    /// Adds journal entries for rows of replaced tables that may be missing. The same statement
    /// records that the present table was seen, so that each entry is added only once.
    pub(super) async fn record_replaced_tables(
        &self,
        pipeline: &str,
        target: &Target,
        looks: &[TableLook],
    ) -> Result<(), CatalogError> {
        for (look, tables) in self.replaced_tables(target, looks).await? {
            let Some(stored) = &look.stored else { continue };
            let assignments = format!("relation = {}", look.relation);
            let condition = look.condition(target, stored);
            let condition = format!("{condition} AND relation = {}", stored.relation);
            self.write_replaced(pipeline, target, &tables, (&assignments, &condition))
                .await?;
        }
        Ok(())
    }

    /// Updates the record of the outbox table, and adds a journal entry for each of these tables.
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

    /// Returns whether rows of the table that are older than the slot, which is at `found`, are
    /// still to be copied, as far as the database shows. The journal names the table as `recorded`.
    /// If something else has moved the slot, its position says nothing about the copy.
    async fn has_open_copy(
        &self,
        target: &Target,
        (recorded, present): (&TableName, Option<&TableName>),
        found: Option<Lsn>,
    ) -> Result<bool, CatalogError> {
        let open = self.tables_with_open_copy(target, found).await?;
        let mut names = [Some(recorded), present].into_iter().flatten();
        Ok(names.any(|name| open.contains(&name.to_string())))
    }

    /// Returns the tables whose older rows are still to be copied, under the names in the journal
    /// or their present names.
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
            && SnapshotRecord::of_table(&snapshots, Some(own)).is_unbegun()
            && !self.has_streamed(target).await?
        {
            open.push(own.to_string());
        }
        let due = self.due_copies(target, &snapshots).await?;
        open.extend(due.iter().map(|due| due.name().to_string()));
        Ok(open)
    }

    /// Returns the last position that Walpost may have confirmed for the slot, on any timeline of
    /// this database.
    async fn recorded_position(&self, target: &Target) -> Result<Option<Lsn>, CatalogError> {
        self.slot_state_position(target, "confirmed_lsn").await
    }

    /// Returns the position in this column of the slot's row in `walpost.slot_state`, on any
    /// timeline of this database.
    pub(super) async fn slot_state_position(
        &self,
        target: &Target,
        column: &'static str,
    ) -> Result<Option<Lsn>, CatalogError> {
        let sql = format!(
            "SELECT {column} FROM walpost.slot_state WHERE slot = {} AND version = {} AND system_id = {SYSTEM_ID} \
             AND database_oid = {DATABASE_OID}",
            escape_literal(&target.slot),
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
