//! Records how the tables of a slot are published in the table `walpost.table_state`, which
//! `sql/journal.sql` creates.
//!
//! Rows that are committed while a table is not in the publication are never sent, even if the
//! table is added again later. To detect this, Walpost records the objects that publish the table:
//! the OID of its row in `pg_publication_rel`, which another `ALTER PUBLICATION ... ADD TABLE` does
//! not restore, or the OID of the row or publication that includes its schema or all tables. If
//! none of the recorded objects still publishes the table, Walpost adds an entry to the journal. A
//! replay with `--dropped-slots` settles this entry.
//!
//! A row also contains the slot's `catalog_xmin` as of the time when the table was last found
//! published. Rows of older transactions have been delivered (see [`super::drop_slot`]).

mod replaced;
#[cfg(test)]
mod tests;
mod uncopied;

use std::collections::BTreeSet;
use std::fmt::{Display, Write as _};

use postgres_protocol::escape::escape_literal;
use serde_json::json;
use tokio_postgres::SimpleQueryRow;
use tracing::warn;

pub(crate) use self::uncopied::UncopiedTable;
use super::journal::{Action, Entry, LEFT_PUBLICATION};
use super::own_table::{OwnTable, Use};
use super::{Catalog, CatalogError};
use crate::model::dropped_slot::replay_command;
use crate::model::lsn::Lsn;
use crate::postgres::table::TableName;
use crate::postgres::target::{OUTBOX_ROW, Outbox, Target};

/// The version of the row format. Rows of other versions are ignored, and replaced.
pub(super) const VERSION: i32 = 1;

/// SQL expressions for the cluster and database that a row must belong to.
pub(super) const SYSTEM_ID: &str = "(SELECT system_identifier::text FROM pg_control_system())";
pub(super) const DATABASE_OID: &str =
    "(SELECT oid FROM pg_database WHERE datname = current_database())";

/// Events of a table that may be missing because the table was temporarily unpublished.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TableGap {
    pub(crate) table: TableName,
    publication: String,
    /// The slot's confirmed position when the table was last found published.
    from: Option<Lsn>,
    /// The first transaction that may not have been delivered when the table was last found
    /// published. `None` if all rows may be missing.
    since: Option<u64>,
}

impl TableGap {
    /// Describes which events may be missing, and why.
    #[must_use]
    pub(crate) fn describe(&self) -> String {
        let after = match self.from {
            Some(from) => format!(" after {from}"),
            None => String::new(),
        };
        format!(
            "table {} was temporarily missing from publication {:?}: events committed{after} may be missing from Kafka",
            self.table, self.publication
        )
    }
}

/// The objects that publish a table: OIDs of rows in the catalog.
type Memberships = BTreeSet<u32>;

/// The state of a table in the catalog and in `walpost.table_state`, from one query.
#[derive(Clone, Debug)]
struct TableObservation {
    table: TableName,
    /// The OID of the table, or zero if the table does not exist.
    relation: u32,
    /// The objects that publish the table; empty if the table is not published.
    memberships: Memberships,
    /// The transaction that added the oldest of the memberships.
    member_xid: Option<u64>,
    stored: Option<StoredTable>,
    slot: SlotProgress,
}

/// The state of the slot in the same query.
#[derive(Clone, Copy, Debug, Default)]
struct SlotProgress {
    confirmed: Option<Lsn>,
    catalog_xmin: Option<u64>,
    /// The end of WAL.
    end: Lsn,
}

impl SlotProgress {
    /// Returns SQL assignments which record that a table was found published, unless the slot has
    /// not reached the recorded position yet. `prefix` qualifies the columns of the existing row.
    fn assignments_if_seen(self, prefix: &str) -> String {
        let confirmed = literal(self.confirmed);
        let newer = |column: &str, value: String| {
            format!(
                "{column} = CASE WHEN {prefix}seen_lsn > {confirmed} THEN {prefix}{column} ELSE {value} END"
            )
        };
        format!(
            "{}, {}",
            newer("seen_lsn", confirmed.clone()),
            newer("seen_xid", literal(self.catalog_xmin))
        )
    }
}

#[derive(Clone, Debug)]
struct StoredTable {
    /// The current name of the relation, if the relation exists in this database.
    name: Option<TableName>,
    /// Whether the relation is still published as recorded, even if it was renamed.
    is_published: bool,
    publication: String,
    relation: u32,
    memberships: Memberships,
    is_out: bool,
    /// The slot's confirmed position when the table was last found published. If
    /// `walpost.add_outbox` added the table, this position is ahead of the slot until the slot has
    /// sent the rows that the function wrote.
    seen_lsn: Option<Lsn>,
    seen_xid: Option<u64>,
    out_lsn: Option<Lsn>,
}

/// The result of comparing a table with its record.
#[derive(Clone, Debug, PartialEq, Eq)]
enum TableChange {
    /// The table is neither published nor recorded, or is recorded as not published.
    Nothing,
    /// The table is published as recorded.
    Same,
    /// The table is published but not recorded.
    New,
    /// The table is published in a different way, but was published the whole time.
    Changed,
    /// The table is no longer published. Rows committed before it was removed are still sent.
    Unpublished,
    /// The table is not in the configured publication, but was in the previously configured one.
    NotInNewPublication(TableGap),
    /// The table was temporarily not published.
    Gap(TableGap),
}

impl TableObservation {
    fn evaluate(&self, publication: &str) -> TableChange {
        let is_published = !self.memberships.is_empty();
        let Some(stored) = &self.stored else {
            return match is_published {
                true => TableChange::New,
                false => TableChange::Nothing,
            };
        };
        let [schema, name] = OUTBOX_ROW;
        // Only walpost.add_outbox writes rows to walpost.outbox_row. The function requires this
        // table to be published, and its rows belong to other tables.
        let is_outbox_row = self.table.is(schema, name);
        let is_same_publication = stored.publication == publication;
        if !is_published {
            // The newly configured publication also determines which of the rows that have not been
            // sent yet are sent.
            let is_left = !is_same_publication && !is_outbox_row && self.is_unsent(stored);
            return match stored.is_out {
                _ if is_left => TableChange::NotInNewPublication(TableGap {
                    table: stored.name.clone().unwrap_or_else(|| self.table.clone()),
                    ..self.gap(stored, publication, stored.seen_xid)
                }),
                true => TableChange::Nothing,
                false => TableChange::Unpublished,
            };
        }
        let since = match is_same_publication {
            true => stored.seen_xid,
            // Rows that the slot has not sent yet are decoded using the new publication.
            false => stored.seen_xid.min(self.slot.catalog_xmin),
        };
        let is_kept = is_same_publication && !self.memberships.is_disjoint(&stored.memberships);
        let is_older = since.is_some_and(|since| self.member_xid.is_some_and(|xid| xid < since));
        let has_lost_rows = !is_same_publication && self.has_unsent_older_rows(stored);
        if stored.is_out || has_lost_rows || !(is_kept || is_older) {
            return match is_outbox_row {
                true => TableChange::Changed,
                false => TableChange::Gap(self.gap(stored, publication, since)),
            };
        }
        let is_same = is_same_publication
            && stored.relation == self.relation
            && stored.memberships == self.memberships;
        match is_same {
            true => TableChange::Same,
            false => TableChange::Changed,
        }
    }

    /// Returns whether WAL that the slot has not sent may contain rows of an unpublished table that
    /// the journal does not record.
    fn is_unsent(&self, stored: &StoredTable) -> bool {
        // A row without memberships was written together with a journal entry.
        !stored.is_out || !stored.memberships.is_empty() && stored.out_lsn > self.slot.confirmed
    }

    /// Returns whether the slot has yet to send rows that the table contained when
    /// `walpost.add_outbox` added it. These rows are in WAL as rows of `walpost.outbox_row` for the
    /// publication that was configured when the table was added, and are not sent for a different
    /// publication.
    fn has_unsent_older_rows(&self, stored: &StoredTable) -> bool {
        let is_ahead = |confirmed| stored.seen_lsn.is_some_and(|seen| seen > confirmed);
        self.slot.confirmed.is_some_and(is_ahead)
    }

    /// Returns the events that may be missing if the table was temporarily unpublished, or was not
    /// in the new publication.
    fn gap(&self, stored: &StoredTable, publication: &str, since: Option<u64>) -> TableGap {
        let is_whole = stored.publication != publication && self.has_unsent_older_rows(stored);
        TableGap {
            table: self.table.clone(),
            publication: publication.to_owned(),
            from: stored.seen_lsn.filter(|_| !is_whole),
            since: since.filter(|_| !is_whole),
        }
    }

    /// Returns the condition that selects the table's row if it has not changed since it was read.
    fn condition(&self, target: &Target, stored: &StoredTable) -> String {
        format!(
            "slot = {} AND table_schema = {} AND table_name = {} AND memberships = '{}' AND is_out = {}",
            escape_literal(&target.slot),
            escape_literal(&self.table.schema),
            escape_literal(&self.table.name),
            format_oids(&stored.memberships),
            stored.is_out
        )
    }

    /// Returns SQL assignments which record that the table is not published.
    fn assignments_if_out(&self) -> String {
        format!("is_out = true, out_lsn = '{}', at = now()", self.slot.end)
    }

    /// Returns SQL assignments that record the current state of the table.
    fn assignments(&self, target: &Target) -> String {
        format!(
            "publication = {}, relation = {}, memberships = '{}', is_out = false, {}, out_lsn = NULL, at = now()",
            escape_literal(&target.publication),
            self.relation,
            format_oids(&self.memberships),
            self.slot.assignments_if_seen("")
        )
    }

    /// Returns the SQL values of a row that records the current state of the table.
    fn values(&self, target: &Target) -> String {
        format!(
            "({}, {}, {}, {VERSION}, {SYSTEM_ID}, {DATABASE_OID}, {}, {}, '{}', false, {}, {}, NULL, now())",
            escape_literal(&target.slot),
            escape_literal(&self.table.schema),
            escape_literal(&self.table.name),
            escape_literal(&target.publication),
            self.relation,
            format_oids(&self.memberships),
            literal(self.slot.confirmed),
            literal(self.slot.catalog_xmin)
        )
    }
}

fn format_oids(memberships: &Memberships) -> String {
    let oids: Vec<_> = memberships.iter().map(u32::to_string).collect();
    oids.join(",")
}

fn literal(value: Option<impl Display>) -> String {
    value.map_or("NULL".to_owned(), |value| format!("'{value}'"))
}

/// Returns an SQL array of text values.
pub(super) fn text_array<'t>(values: impl Iterator<Item = &'t str>) -> String {
    let values: Vec<_> = values.map(escape_literal).collect();
    format!("ARRAY[{}]::text[]", values.join(", "))
}

/// The unchanged tables that a session records in addition to differences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refresh {
    /// All tables that were found unchanged.
    All,
    Nothing,
}

impl Catalog {
    /// Returns descriptions of events of this outbox that may be missing because tables were
    /// temporarily unpublished or were replaced, and that are not recorded in the journal yet. The
    /// result is empty if this can't be determined.
    ///
    /// # Errors
    /// Returns an error if a query fails, or if the table is unreadable or untrusted.
    pub(crate) async fn unrecorded_gaps(
        &self,
        target: &Target,
    ) -> Result<Vec<String>, CatalogError> {
        if self
            .unusable(target, OwnTable::TableState, Use::Read)
            .await?
            .is_some()
        {
            return Ok(Vec::new());
        }
        let observations = self.query_tables(target).await?;
        let gap = |observed: &TableObservation| match observed.evaluate(&target.publication) {
            TableChange::Gap(gap) | TableChange::NotInNewPublication(gap) => Some(gap.describe()),
            _ => None,
        };
        let replaced = self.replaced_tables(target, &observations).await?;
        let replaced = replaced.iter().flat_map(|(_, tables)| tables);
        let replaced = replaced.map(|replaced| replaced.describe());
        Ok(replaced
            .chain(observations.iter().filter_map(gap))
            .collect())
    }

    /// Returns the existing tables of this outbox that the slot delivered and that are no longer
    /// published. The result is empty if this can't be determined.
    ///
    /// # Errors
    /// See [`Catalog::unrecorded_gaps`].
    pub(crate) async fn left_publication(
        &self,
        target: &Target,
    ) -> Result<Vec<TableName>, CatalogError> {
        if self
            .unusable(target, OwnTable::TableState, Use::Read)
            .await?
            .is_some()
        {
            return Ok(Vec::new());
        }
        let [schema, name] = OUTBOX_ROW;
        let mut observations = self.query_tables(target).await?;
        observations.retain(|observed| {
            let is_left = observed.stored.is_some() && observed.memberships.is_empty();
            is_left && observed.relation != 0 && !observed.table.is(schema, name)
        });
        Ok(observations
            .into_iter()
            .map(|observed| observed.table)
            .collect())
    }

    /// Returns whether a table of this outbox is recorded as not published, or differs from its
    /// record in a way that may have caused events to be omitted.
    ///
    /// # Errors
    /// See [`Catalog::unrecorded_gaps`].
    pub(crate) async fn may_lack_events(
        &self,
        target: &Target,
        table: &TableName,
    ) -> Result<bool, CatalogError> {
        if self
            .unusable(target, OwnTable::TableState, Use::Read)
            .await?
            .is_some()
        {
            return Ok(false);
        }
        let observations = self.query_tables(target).await?;
        let mut matching = observations
            .iter()
            .filter(|observed| observed.table == *table);
        Ok(matching.any(|observed| {
            observed.stored.as_ref().is_some_and(|stored| stored.is_out)
                || matches!(
                    observed.evaluate(&target.publication),
                    TableChange::Unpublished
                        | TableChange::NotInNewPublication(_)
                        | TableChange::Gap(_)
                )
        }))
    }

    /// Compares the tables of the publication with their records, updates the records, and adds
    /// journal entries about tables whose events may be missing. Returns the reason if the records
    /// can't be used.
    ///
    /// # Errors
    /// Returns an error if a query fails, or if Walpost's tables are not trusted or not writable.
    pub(crate) async fn record_tables(
        &self,
        pipeline: &str,
        target: &Target,
        refresh: Refresh,
    ) -> Result<Option<String>, CatalogError> {
        if target.outbox.is_messages() {
            return Ok(None);
        }
        if let Some(reason) = self
            .unusable(target, OwnTable::TableState, Use::Write)
            .await?
        {
            return Ok(Some(reason));
        }
        let observations = self.query_tables(target).await?;
        self.record_replaced_tables(pipeline, target, &observations)
            .await?;
        let (mut new, mut same) = (Vec::new(), Vec::new());
        for observed in &observations {
            match (observed.evaluate(&target.publication), &observed.stored) {
                (TableChange::New, _) => new.push(observed),
                (TableChange::Same, _) => same.push(observed),
                (TableChange::Unpublished, Some(stored)) => {
                    let children = self.children_of_renamed(target, observed).await?;
                    let set = observed.assignments_if_out();
                    let condition = observed.condition(target, stored);
                    self.write_replaced(pipeline, target, &children, (&set, &condition))
                        .await?;
                }
                (TableChange::Changed, Some(stored)) => {
                    let sql = format!(
                        "UPDATE walpost.table_state SET {} WHERE {}",
                        observed.assignments(target),
                        observed.condition(target, stored)
                    );
                    self.write_tables(target, &sql).await?;
                }
                (TableChange::Gap(gap), Some(stored)) => {
                    let gap = self.widen_if_uncopied(target, observed, gap).await?;
                    let set = observed.assignments(target);
                    self.write_table_gap(pipeline, target, observed, stored, (&gap, &set))
                        .await?;
                }
                (TableChange::NotInNewPublication(gap), Some(stored)) => {
                    let gap = self.widen_if_uncopied(target, observed, gap).await?;
                    // If the table is added again, this entry covers everything committed until
                    // now.
                    let set = format!(
                        "{}, memberships = '', seen_lsn = {}, seen_xid = {}",
                        observed.assignments_if_out(),
                        literal(observed.slot.confirmed),
                        literal(observed.slot.catalog_xmin)
                    );
                    self.write_table_gap(pipeline, target, observed, stored, (&gap, &set))
                        .await?;
                }
                _ => {}
            }
        }
        self.insert_tables(target, &new, Overwrite::OtherHistory)
            .await?;
        if refresh == Refresh::All && !same.is_empty() {
            self.refresh_tables(target, &same).await?;
        }
        Ok(None)
    }

    /// Records which rows of replaced tables may be missing. Must run before the record of the slot
    /// is overwritten, because the result depends on this record.
    ///
    /// # Errors
    /// See [`Catalog::record_tables`].
    pub(super) async fn record_replaced_before_new_slot(
        &self,
        pipeline: &str,
        target: &Target,
    ) -> Result<(), CatalogError> {
        let unusable = self
            .unusable(target, OwnTable::TableState, Use::Write)
            .await?;
        if target.outbox.is_messages() || unusable.is_some() {
            return Ok(());
        }
        let observations = self.query_tables(target).await?;
        self.record_replaced_tables(pipeline, target, &observations)
            .await
    }

    /// Records how the tables are published for a slot that was just created. Earlier records are
    /// discarded. If a table that is not published is added later, all its events may be missing.
    ///
    /// # Errors
    /// See [`Catalog::record_tables`].
    pub(super) async fn restart_tables(
        &self,
        pipeline: &str,
        target: &Target,
    ) -> Result<(), CatalogError> {
        if target.outbox.is_messages()
            || self
                .unusable(target, OwnTable::TableState, Use::Write)
                .await?
                .is_some()
        {
            return Ok(());
        }
        let observations = self.query_tables(target).await?;
        let (published, others): (Vec<_>, Vec<_>) = observations
            .iter()
            .partition(|observed| !observed.memberships.is_empty());
        self.insert_tables(target, &published, Overwrite::All)
            .await?;
        for observed in others {
            let Some(stored) = &observed.stored else {
                continue;
            };
            // Rows committed before the slot existed were delivered, or are in a gap after the
            // former slot.
            let set = format!(
                "is_out = true, seen_xid = NULL, out_lsn = {}, at = now()",
                literal(observed.slot.confirmed)
            );
            let children = self.children_of_renamed(target, observed).await?;
            let condition = observed.condition(target, stored);
            self.write_replaced(pipeline, target, &children, (&set, &condition))
                .await?;
        }
        Ok(())
    }

    /// Returns the tables of this outbox that are published or recorded, all from one query.
    async fn query_tables(&self, target: &Target) -> Result<Vec<TableObservation>, CatalogError> {
        let version = self.version().await?;
        let mut wanted = Vec::new();
        match &target.outbox {
            Outbox::Messages { .. } => return Ok(Vec::new()),
            Outbox::Table(table) => wanted.push(table.clone()),
            Outbox::Tables(patterns) | Outbox::OneOf { of: patterns, .. } => {
                let all = Target {
                    outbox: Outbox::Tables(patterns.clone()),
                    ..target.clone()
                };
                let publication = self.publication(&all, version).await?;
                wanted.extend(publication.into_iter().flat_map(|found| found.tables));
                let [schema, name] = OUTBOX_ROW;
                wanted.push(TableName::from_catalog(schema, name));
            }
        }
        let rows = self
            .run_on_own_table(
                OwnTable::TableState,
                target,
                "",
                &query(target, &wanted, version),
            )
            .await
            .map_err(|error| self.with_grant(error, |role| grant(role, "SELECT")))?;
        let mut observations = Vec::with_capacity(rows.len());
        for row in &rows {
            let observed = parse_table(row)?;
            // The record may be from an earlier configuration of the pipeline.
            if wanted.contains(&observed.table)
                || target
                    .outbox
                    .includes(&observed.table.schema, &observed.table.name)
            {
                observations.push(observed);
            }
        }
        Ok(observations)
    }

    pub(super) async fn write_tables(
        &self,
        target: &Target,
        sql: &str,
    ) -> Result<Vec<SimpleQueryRow>, CatalogError> {
        let written = self.run_on_own_table(OwnTable::TableState, target, "", sql);
        written.await.map_err(|error| {
            self.with_grant(error, |role| {
                format!(
                    "{}; GRANT SELECT, INSERT (pipeline, slot, action, from_lsn, to_lsn, detail) ON walpost.journal TO {role}",
                    grant(role, "SELECT, INSERT, UPDATE")
                )
            })
        })
    }

    async fn insert_tables(
        &self,
        target: &Target,
        observations: &[&TableObservation],
        overwrite: Overwrite,
    ) -> Result<(), CatalogError> {
        if observations.is_empty() {
            return Ok(());
        }
        let values: Vec<_> = observations
            .iter()
            .map(|observed| observed.values(target))
            .collect();
        let mut sql = format!(
            "INSERT INTO walpost.table_state AS s (slot, table_schema, table_name, version, system_id, database_oid, publication, \
             relation, memberships, is_out, seen_lsn, seen_xid, out_lsn, at) VALUES {} \
             ON CONFLICT (slot, table_schema, table_name) DO UPDATE SET version = excluded.version, \
             system_id = excluded.system_id, database_oid = excluded.database_oid, publication = excluded.publication, \
             relation = excluded.relation, memberships = excluded.memberships, is_out = excluded.is_out, \
             seen_lsn = excluded.seen_lsn, seen_xid = excluded.seen_xid, out_lsn = excluded.out_lsn, at = excluded.at",
            values.join(", ")
        );
        if overwrite == Overwrite::OtherHistory {
            let _ = write!(
                sql,
                " WHERE NOT (s.version = {VERSION} AND s.system_id = excluded.system_id \
                 AND s.database_oid = excluded.database_oid)"
            );
        }
        self.write_tables(target, &sql).await?;
        Ok(())
    }

    /// Records that tables were found published as recorded.
    async fn refresh_tables(
        &self,
        target: &Target,
        observations: &[&TableObservation],
    ) -> Result<(), CatalogError> {
        let memberships: Vec<_> = observations
            .iter()
            .map(|observed| format_oids(&observed.memberships))
            .collect();
        let slot = observations
            .first()
            .map_or(SlotProgress::default(), |observed| observed.slot);
        let sql = format!(
            "UPDATE walpost.table_state s SET {}, at = now() FROM unnest({}, {}, {}) \
             AS same (schema, name, memberships) WHERE s.slot = {} AND s.table_schema = same.schema AND s.table_name = same.name \
             AND s.memberships = same.memberships AND NOT s.is_out",
            slot.assignments_if_seen("s."),
            text_array(
                observations
                    .iter()
                    .map(|observed| observed.table.schema.as_str())
            ),
            text_array(
                observations
                    .iter()
                    .map(|observed| observed.table.name.as_str())
            ),
            text_array(memberships.iter().map(String::as_str)),
            escape_literal(&target.slot)
        );
        self.write_tables(target, &sql).await?;
        Ok(())
    }

    /// Updates the record of a table and adds journal entries in one statement, so that both
    /// changes are atomic and only one of two instances makes them. Returns the IDs of the entries,
    /// which are empty if no record satisfies the condition.
    async fn update_with_entries(
        &self,
        target: &Target,
        assignments: &str,
        condition: &str,
        entries: &[Entry<'_>],
    ) -> Result<Vec<String>, CatalogError> {
        let update = format!("UPDATE walpost.table_state SET {assignments} WHERE {condition}");
        if entries.is_empty() {
            self.write_tables(target, &update).await?;
            return Ok(Vec::new());
        }
        let mut sql = format!("WITH changed AS ({update} RETURNING 1)");
        for (n, entry) in entries.iter().enumerate() {
            let insert = entry.insert_select();
            let _ = write!(sql, ", entry_{n} AS ({insert} FROM changed RETURNING id)");
        }
        let ids = (0..entries.len()).map(|n| format!("SELECT {n} AS n, id FROM entry_{n}"));
        let ids: Vec<_> = ids.collect();
        let _ = write!(sql, " {} ORDER BY n", ids.join(" UNION ALL "));
        let written = self.write_tables(target, &sql).await?;
        let ids = written.iter().map(|row| row.get("id").unwrap_or_default());
        Ok(ids.map(str::to_owned).collect())
    }

    /// Adds a gap to the journal and updates the record of the table.
    async fn write_table_gap(
        &self,
        pipeline: &str,
        target: &Target,
        observed: &TableObservation,
        stored: &StoredTable,
        (gap, assignments): (&TableGap, &str),
    ) -> Result<(), CatalogError> {
        let is_several = target.outbox.is_several();
        let table = gap.table.to_string();
        let entry = Entry {
            pipeline,
            target,
            action: Action::DropSlot,
            from: gap.from,
            to: Some(observed.slot.end),
            detail: json!({
                "reason": "table was not in the publication",
                LEFT_PUBLICATION: target.publication,
                "table": table,
                "several": is_several,
                "catalog_xmin": gap.since.map(|id| id.to_string()),
                "system_id": self.cluster().await?,
            }),
        };
        let condition = observed.condition(target, stored);
        let ids = self
            .update_with_entries(
                target,
                assignments,
                &condition,
                std::slice::from_ref(&entry),
            )
            .await?;
        if let Some(journal) = ids.first() {
            warn!(
                pipeline,
                slot = target.slot,
                journal,
                "{}. Send these events again: {}",
                gap.describe(),
                replay_command(&target.commands, is_several.then_some(&table))
            );
        }
        Ok(())
    }
}

/// The existing rows that are overwritten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Overwrite {
    All,
    /// Only rows from a different cluster, database or version.
    OtherHistory,
}

pub(super) fn grant(role: &str, rights: &str) -> String {
    format!(
        "GRANT USAGE ON SCHEMA walpost TO {role}; GRANT {rights} ON walpost.table_state TO {role}"
    )
}

/// Returns a query, for a server of this version, that selects the tables that are in `wanted` or
/// recorded.
fn query(target: &Target, wanted: &[TableName], version: i32) -> String {
    // Publications can contain schemas since PostgreSQL 15.
    let of_schemas = match version >= 150_000 {
        true => {
            "UNION ALL SELECT l.relation, s.oid, s.xmin FROM lineage l JOIN pg_class c ON c.oid = l.oid \
             JOIN pg_publication_namespace s ON s.pnnspid = c.relnamespace JOIN published p ON p.oid = s.pnpubid "
        }
        false => "",
    };
    // The state of the slot is not part of the snapshot, and may be more recent. Transactions that
    // end after the snapshot have IDs of at least `oldest`.
    let full = |xid: &str| format!("(n.next - (n.next - {xid}::text::int8) % 4294967296)");
    format!(
        "WITH RECURSIVE published AS (SELECT oid, puballtables, xmin FROM pg_publication WHERE pubname = {publication} AND pubinsert), \
         stored AS (SELECT * FROM walpost.table_state WHERE slot = {slot} AND version = {VERSION} AND system_id = {SYSTEM_ID} \
         AND database_oid = {DATABASE_OID}), \
         wanted (schema, name) AS (SELECT * FROM unnest({schemas}, {names}) UNION SELECT table_schema, table_name FROM stored), \
         found AS (SELECT w.schema, w.name, c.oid FROM wanted w JOIN pg_namespace s ON s.nspname = w.schema::name \
         JOIN pg_class c ON c.relnamespace = s.oid AND c.relname = w.name::name), \
         lineage (relation, oid) AS (SELECT oid, oid FROM found UNION SELECT l.relation, i.inhparent FROM lineage l \
         JOIN pg_class c ON c.oid = l.oid AND c.relispartition JOIN pg_inherits i ON i.inhrelid = c.oid), \
         member (relation, oid, xid) AS (SELECT l.relation, r.oid, r.xmin FROM lineage l JOIN pg_publication_rel r ON r.prrelid = l.oid \
         JOIN published p ON p.oid = r.prpubid {of_schemas}\
         UNION ALL SELECT l.relation, p.oid, p.xmin FROM lineage l JOIN published p ON p.puballtables) \
         SELECT w.schema, w.name, coalesce(f.oid, 0) AS relation, m.memberships, m.xid AS member_xid, \
         present.schema AS present_schema, present.name AS present_name, \
         EXISTS (SELECT FROM published p LEFT JOIN pg_publication_rel r ON r.prpubid = p.oid AND r.prrelid = s.relation \
         WHERE coalesce(r.oid, CASE WHEN p.puballtables THEN p.oid END)::text = ANY (string_to_array(s.memberships, ','))) \
         AS stored_is_published, \
         s.publication, s.relation AS stored_relation, s.memberships AS stored_memberships, s.is_out, s.seen_lsn, s.seen_xid, s.out_lsn, \
         pg_current_wal_lsn() AS wal_end, r.confirmed_flush_lsn AS confirmed, \
         CASE WHEN r.catalog_xmin IS NOT NULL THEN least(n.oldest, {catalog_xmin}) END AS catalog_xmin \
         FROM wanted w CROSS JOIN (SELECT pg_snapshot_xmax(s)::text::int8 AS next, pg_snapshot_xmin(s)::text::int8 AS oldest \
         FROM pg_current_snapshot() AS s) n \
         LEFT JOIN found f ON f.schema = w.schema AND f.name = w.name \
         LEFT JOIN LATERAL (SELECT string_agg(member.oid::text, ',') AS memberships, min({member_xid}) AS xid \
         FROM member WHERE member.relation = f.oid) m ON true \
         LEFT JOIN stored s ON s.table_schema = w.schema AND s.table_name = w.name \
         LEFT JOIN (SELECT c.oid, n.nspname AS schema, c.relname AS name FROM pg_class c \
         JOIN pg_namespace n ON n.oid = c.relnamespace) present ON present.oid = s.relation \
         LEFT JOIN pg_replication_slots r ON r.slot_name = {slot}::name",
        publication = escape_literal(&target.publication),
        slot = escape_literal(&target.slot),
        schemas = text_array(wanted.iter().map(|table| table.schema.as_str())),
        names = text_array(wanted.iter().map(|table| table.name.as_str())),
        catalog_xmin = full("r.catalog_xmin"),
        member_xid = full("member.xid"),
    )
}

fn parse_table(row: &SimpleQueryRow) -> Result<TableObservation, CatalogError> {
    let unexpected =
        |column: &str| CatalogError::Unexpected(format!("walpost.table_state: {column}"));
    let text = |column: &str| -> Result<Option<&str>, CatalogError> { Ok(row.try_get(column)?) };
    let needed = |column: &str| text(column)?.ok_or_else(|| unexpected(column));
    let memberships = |column: &str| -> Result<Memberships, CatalogError> {
        let oids = text(column)?.unwrap_or_default().split(',');
        let oids = oids.filter(|oid| !oid.is_empty()).map(str::parse);
        oids.collect::<Result<_, _>>()
            .map_err(|_| unexpected(column))
    };
    let stored = match text("publication")? {
        None => None,
        Some(publication) => Some(StoredTable {
            name: match (text("present_schema")?, text("present_name")?) {
                (Some(schema), Some(name)) => Some(TableName::from_catalog(schema, name)),
                _ => None,
            },
            is_published: text("stored_is_published")? == Some("t"),
            publication: publication.to_owned(),
            relation: parse(text("stored_relation")?, || unexpected("relation"))?
                .unwrap_or_default(),
            memberships: memberships("stored_memberships")?,
            is_out: text("is_out")? == Some("t"),
            seen_lsn: parse(text("seen_lsn")?, || unexpected("seen_lsn"))?,
            seen_xid: parse(text("seen_xid")?, || unexpected("seen_xid"))?,
            out_lsn: parse(text("out_lsn")?, || unexpected("out_lsn"))?,
        }),
    };
    Ok(TableObservation {
        table: TableName::from_catalog(needed("schema")?, needed("name")?),
        relation: parse(text("relation")?, || unexpected("relation"))?.unwrap_or_default(),
        memberships: memberships("memberships")?,
        member_xid: parse(text("member_xid")?, || unexpected("xmin"))?,
        stored,
        slot: SlotProgress {
            confirmed: parse(text("confirmed")?, || unexpected("confirmed"))?,
            catalog_xmin: parse(text("catalog_xmin")?, || unexpected("catalog_xmin"))?,
            end: parse(text("wal_end")?, || unexpected("wal_end"))?.unwrap_or_default(),
        },
    })
}

fn parse<T: std::str::FromStr>(
    text: Option<&str>,
    unexpected: impl Fn() -> CatalogError,
) -> Result<Option<T>, CatalogError> {
    text.map(str::parse).transpose().map_err(|_| unexpected())
}
