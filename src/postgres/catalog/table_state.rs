//! Maintains the table `walpost.table_state`, which records how the tables that a slot delivers are
//! published. `sql/journal.sql` creates `walpost.table_state`.
//!
//! Rows that are committed while a table is not in the publication are never sent, even if the
//! table is added again later. To detect this, Walpost records the OIDs of the objects that publish
//! the table: its row in `pg_publication_rel`, which gets a different OID if the table is removed
//! and added again; the row that publishes its schema; or the publication, if it is FOR ALL TABLES.
//! If none of these objects still publishes the table, Walpost adds a journal entry, which stays
//! open until a replay with `--dropped-slots`.
//!
//! The record also contains the `catalog_xmin` that the slot had when Walpost last found the table
//! in the publication. Rows inserted by older transactions have been delivered (see
//! [`super::drop_slot`]).

mod accepted_names;
mod replaced;
#[cfg(test)]
mod tests;
mod uncopied;

use std::collections::BTreeSet;
use std::fmt::{Display, Write as _};

use serde_json::json;
use tokio_postgres::SimpleQueryRow;
use tracing::warn;

pub(crate) use self::accepted_names::AcceptedNames;
pub(crate) use self::uncopied::UncopiedTable;
use super::journal::{Action, Entry, LEFT_PUBLICATION};
use super::own_table::{OwnTable, Use};
use super::{Catalog, CatalogError};
use crate::model::dropped_slot::replay_command;
use crate::model::lsn::Lsn;
use crate::postgres::sql::text_literal;
use crate::postgres::table::TableName;
use crate::postgres::target::{OUTBOX_ROW, Outbox, Target};

/// The version of the row format. Rows with a different version are ignored and eventually
/// replaced.
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
    /// The slot's confirmed position when Walpost last found the table in the publication.
    from: Option<Lsn>,
    /// The oldest transaction that might not yet have been delivered when Walpost last found the
    /// table in the publication. `None` if all rows may be missing.
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

/// The OIDs of the catalog rows that make a table part of a publication.
type Memberships = BTreeSet<u32>;

/// The state of a table in the catalog and in `walpost.table_state`, as returned by a single query.
#[derive(Clone, Debug)]
struct TableObservation {
    table: TableName,
    /// The OID of the table, or zero if the table does not exist.
    relation: u32,
    /// The catalog rows that publish the table; empty if it is not published.
    memberships: Memberships,
    /// The transaction that created the oldest catalog row that publishes the table.
    member_xid: Option<u64>,
    stored: Option<StoredTable>,
    slot: SlotProgress,
}

/// The slot's state, which is queried together with the states of the tables.
#[derive(Clone, Copy, Debug, Default)]
struct SlotProgress {
    confirmed: Option<Lsn>,
    catalog_xmin: Option<u64>,
    /// The server's WAL position when the state of the slot was queried.
    end: Lsn,
}

impl SlotProgress {
    /// Returns the SQL assignments that record the slot's current state for a published table. The
    /// assignments change nothing if the slot has not reached the recorded position yet. `prefix`
    /// qualifies the columns of the existing row.
    fn assignments_if_seen(self, prefix: &str) -> String {
        let confirmed = literal(self.confirmed, "pg_lsn");
        let newer = |column: &str, value: String| {
            format!(
                "{column} = CASE WHEN {prefix}seen_lsn > {confirmed} THEN {prefix}{column} ELSE {value} END"
            )
        };
        format!(
            "{}, {}",
            newer("seen_lsn", confirmed.clone()),
            newer("seen_xid", literal(self.catalog_xmin, "text"))
        )
    }
}

#[derive(Clone, Debug)]
struct StoredTable {
    /// The recorded relation's current name, or `None` if the relation no longer exists.
    name: Option<TableName>,
    /// Whether the recorded relation, which may have been renamed, is still in the publication
    /// through one of the recorded catalog rows.
    is_published: bool,
    publication: String,
    relation: u32,
    memberships: Memberships,
    is_out: bool,
    /// The slot's confirmed position when Walpost last found the table in the publication. If
    /// `walpost.add_outbox` added the table, this position stays ahead of the slot until the slot
    /// has sent the existing rows, which the function wrote to WAL.
    seen_lsn: Option<Lsn>,
    seen_xid: Option<u64>,
    out_lsn: Option<Lsn>,
}

/// The result of comparing a table with its record in `walpost.table_state`.
#[derive(Clone, Debug, PartialEq, Eq)]
enum TableChange {
    /// The table is not published, and is either recorded as not published or not recorded at all.
    Nothing,
    /// The table is published as recorded.
    Same,
    /// The table is published but not recorded.
    New,
    /// The table is published in a different way than recorded, but none of its events are missing.
    Changed,
    /// The table is no longer published. The slot still sends rows that were committed before the
    /// table was removed from the publication.
    Unpublished,
    /// The table is not in the configured publication, but was in the previously configured one.
    NotInNewPublication(TableGap),
    /// The table is published, but some of its events may be missing, for example because it was
    /// temporarily unpublished.
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
        // Even if walpost.outbox_row was temporarily unpublished, no events are missing: only
        // walpost.add_outbox writes to this table, and the function fails if the table is not
        // published.
        let is_outbox_row = self.table.is(schema, name);
        let is_same_publication = stored.publication == publication;
        if !is_published {
            // The newly configured publication also applies to rows that were written earlier but
            // that the slot has not sent yet.
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
            // The newly configured publication also applies to rows that were written earlier but
            // that the slot has not sent yet.
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

    /// Returns whether this unpublished table may have rows that the slot has not sent yet and that
    /// no journal entry covers.
    fn is_unsent(&self, stored: &StoredTable) -> bool {
        // If the record contains no publication memberships, its last update also added a journal
        // entry.
        !stored.is_out || !stored.memberships.is_empty() && stored.out_lsn > self.slot.confirmed
    }

    /// Returns whether the slot has yet to send rows that the table already contained when
    /// `walpost.add_outbox` added it. The function wrote these rows to WAL as rows of
    /// `walpost.outbox_row`, for the publication configured at that time. The slot does not send
    /// them once a different publication is configured.
    fn has_unsent_older_rows(&self, stored: &StoredTable) -> bool {
        let is_ahead = |confirmed| stored.seen_lsn.is_some_and(|seen| seen > confirmed);
        self.slot.confirmed.is_some_and(is_ahead)
    }

    /// Returns the events that may be missing because the table was temporarily unpublished or is
    /// not in the new publication.
    fn gap(&self, stored: &StoredTable, publication: &str, since: Option<u64>) -> TableGap {
        let is_whole = stored.publication != publication && self.has_unsent_older_rows(stored);
        TableGap {
            table: self.table.clone(),
            publication: publication.to_owned(),
            from: stored.seen_lsn.filter(|_| !is_whole),
            since: since.filter(|_| !is_whole),
        }
    }

    /// Returns an SQL condition that selects the table's row in `walpost.table_state`, provided
    /// that the row has not changed since Walpost read it.
    fn condition(&self, target: &Target, stored: &StoredTable) -> String {
        format!(
            "slot = {} AND table_schema = {} AND table_name = {} AND memberships = '{}'::text AND is_out = {}",
            text_literal(&target.slot),
            text_literal(&self.table.schema),
            text_literal(&self.table.name),
            format_oids(&stored.memberships),
            stored.is_out
        )
    }

    /// Returns the SQL assignments that record the table as not published.
    fn assignments_if_out(&self) -> String {
        format!(
            "is_out = true, out_lsn = '{}'::pg_lsn, at = now()",
            self.slot.end
        )
    }

    /// Returns the SQL assignments that record the table's current state.
    fn assignments(&self, target: &Target) -> String {
        format!(
            "publication = {}, relation = {}, memberships = '{}'::text, is_out = false, {}, out_lsn = NULL, at = now(), accepted_for = {}",
            text_literal(&target.publication),
            self.relation,
            format_oids(&self.memberships),
            self.slot.assignments_if_seen(""),
            self.accepted_for(target, "accepted_for")
        )
    }

    /// Returns the SQL values of a row that records the table's current state.
    fn values(&self, target: &Target) -> String {
        format!(
            "({}, {}, {}, {VERSION}, {SYSTEM_ID}, {DATABASE_OID}, {}, {}, '{}'::text, false, {}, {}, NULL::pg_lsn, now(), {})",
            text_literal(&target.slot),
            text_literal(&self.table.schema),
            text_literal(&self.table.name),
            text_literal(&target.publication),
            self.relation,
            format_oids(&self.memberships),
            literal(self.slot.confirmed, "pg_lsn"),
            literal(self.slot.catalog_xmin, "text"),
            self.accepted_for(target, "NULL")
        )
    }
}

fn format_oids(memberships: &Memberships) -> String {
    let oids: Vec<_> = memberships.iter().map(u32::to_string).collect();
    oids.join(",")
}

fn literal(value: Option<impl Display>, sql_type: &str) -> String {
    value.map_or_else(
        || format!("NULL::{sql_type}"),
        |value| format!("'{value}'::{sql_type}"),
    )
}

/// Returns an SQL array of text values.
pub(super) fn text_array<'t>(values: impl Iterator<Item = &'t str>) -> String {
    let values: Vec<_> = values.map(text_literal).collect();
    format!("ARRAY[{}]::text[]", values.join(", "))
}

/// Determines which unchanged tables have their rows in `walpost.table_state` updated. The rows of
/// changed tables are updated in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refresh {
    /// All unchanged tables.
    All,
    Nothing,
}

impl Catalog {
    /// Describes the events of this outbox that may be missing because a table was temporarily
    /// unpublished or was replaced, and for which the journal has no entry yet. Returns an empty
    /// list if this can't be determined.
    ///
    /// # Errors
    /// Returns an error if a query fails, or if `walpost.table_state` is unreadable or is rejected
    /// by `sql/examine.sql`.
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

    /// Returns the outbox's recorded tables that still exist but are no longer published. Returns
    /// an empty list if this can't be determined.
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

    /// Returns whether events of `table` may be missing because the table is recorded as not
    /// published, is no longer published, or was temporarily unpublished. Returns false if this
    /// can't be determined.
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

    /// Compares the publication's tables with their rows in `walpost.table_state`, updates these
    /// rows, and adds journal entries about tables whose events may be missing. If
    /// `walpost.table_state` can't be used, returns the reason.
    ///
    /// # Errors
    /// Returns an error if a query fails, or if Walpost's tables are not writable or are rejected
    /// by `sql/examine.sql`.
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
                    // The new entry covers everything committed until now. If the table is added
                    // again, the next entry must cover only later commits.
                    let set = format!(
                        "{}, memberships = ''::text, seen_lsn = {}, seen_xid = {}",
                        observed.assignments_if_out(),
                        literal(observed.slot.confirmed, "pg_lsn"),
                        literal(observed.slot.catalog_xmin, "text")
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

    /// Records which rows of replaced tables may be missing. Must be called before the slot's row
    /// in `walpost.slot_state` is overwritten, because the result depends on that row.
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

    /// Records how the tables are published for a slot that was just created, and discards earlier
    /// records. If a table that is not published now is added later, all of its events may be
    /// missing.
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
            // Rows committed before the slot existed either have been delivered or were recorded as
            // missing for the former slot.
            let set = format!(
                "is_out = true, seen_xid = NULL, out_lsn = {}, at = now()",
                literal(observed.slot.confirmed, "pg_lsn")
            );
            let children = self.children_of_renamed(target, observed).await?;
            let condition = observed.condition(target, stored);
            self.write_replaced(pipeline, target, &children, (&set, &condition))
                .await?;
        }
        Ok(())
    }

    /// Returns the outbox's tables that are published or recorded, using a single query for all of
    /// them.
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
            // Ignore records of tables that belonged to the outbox only in an earlier
            // configuration.
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
             relation, memberships, is_out, seen_lsn, seen_xid, out_lsn, at, accepted_for) VALUES {} \
             ON CONFLICT (slot, table_schema, table_name) DO UPDATE SET version = excluded.version, \
             system_id = excluded.system_id, database_oid = excluded.database_oid, publication = excluded.publication, \
             relation = excluded.relation, memberships = excluded.memberships, is_out = excluded.is_out, \
             seen_lsn = excluded.seen_lsn, seen_xid = excluded.seen_xid, out_lsn = excluded.out_lsn, at = excluded.at, \
             accepted_for = {}",
            values.join(", "),
            accepted_names::merge_lists()
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

    /// Updates the rows in `walpost.table_state` of tables that are still published in the same
    /// way.
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
            text_literal(&target.slot)
        );
        self.write_tables(target, &sql).await?;
        Ok(())
    }

    /// Updates a table's record and adds journal entries in one statement. The change is therefore
    /// atomic, and if two instances attempt it at the same time, only one succeeds. Returns the IDs
    /// of the entries. If no record satisfies the condition, adds no entries and returns no IDs.
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

    /// Records a table's possibly missing events in the journal, and updates the table's record.
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

/// Which existing rows of `walpost.table_state` to overwrite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Overwrite {
    All,
    /// Only rows that describe a different cluster or database, or that have a different version.
    OtherHistory,
}

pub(super) fn grant(role: &str, rights: &str) -> String {
    format!(
        "GRANT USAGE ON SCHEMA walpost TO {role}; GRANT {rights} ON walpost.table_state TO {role}"
    )
}

/// Returns a query that selects the tables that are in `wanted` or have a row in
/// `walpost.table_state`. `version` is the server's version.
fn query(target: &Target, wanted: &[TableName], version: i32) -> String {
    // Since PostgreSQL 15, publications can contain schemas.
    let of_schemas = match version >= 150_000 {
        true => {
            "UNION ALL SELECT l.relation, s.oid, s.xmin FROM lineage l JOIN pg_class c ON c.oid = l.oid \
             JOIN pg_publication_namespace s ON s.pnnspid = c.relnamespace JOIN published p ON p.oid = s.pnpubid "
        }
        false => "",
    };
    // The slot's state is not read from the snapshot and may be more recent, so the slot's
    // `catalog_xmin` is capped at `oldest`. Every transaction that ends after the snapshot was
    // taken has at least this ID.
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
         WHERE coalesce(r.oid, CASE WHEN p.puballtables THEN p.oid END)::text = ANY (string_to_array(s.memberships, ','::text))) \
         AS stored_is_published, \
         s.publication, s.relation AS stored_relation, s.memberships AS stored_memberships, s.is_out, s.seen_lsn, s.seen_xid, s.out_lsn, \
         pg_current_wal_lsn() AS wal_end, r.confirmed_flush_lsn AS confirmed, \
         CASE WHEN r.catalog_xmin IS NOT NULL THEN least(n.oldest, {catalog_xmin}) END AS catalog_xmin \
         FROM wanted w CROSS JOIN (SELECT pg_snapshot_xmax(s)::text::int8 AS next, pg_snapshot_xmin(s)::text::int8 AS oldest \
         FROM pg_current_snapshot() AS s) n \
         LEFT JOIN found f ON f.schema = w.schema AND f.name = w.name \
         LEFT JOIN LATERAL (SELECT string_agg(member.oid::text, ','::text) AS memberships, min({member_xid}) AS xid \
         FROM member WHERE member.relation = f.oid) m ON true \
         LEFT JOIN stored s ON s.table_schema = w.schema AND s.table_name = w.name \
         LEFT JOIN (SELECT c.oid, n.nspname AS schema, c.relname AS name FROM pg_class c \
         JOIN pg_namespace n ON n.oid = c.relnamespace) present ON present.oid = s.relation \
         LEFT JOIN pg_replication_slots r ON r.slot_name = {slot}::name",
        publication = text_literal(&target.publication),
        slot = text_literal(&target.slot),
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
