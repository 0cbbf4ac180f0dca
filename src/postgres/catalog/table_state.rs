//! How the tables of a slot are published, stored in the table `walpost.table_state`, which
//! `sql/journal.sql` creates.
//!
//! Rows that are committed while a table is not in the publication are never sent, even if it is
//! added again before anyone notices. Therefore, what publishes the table is recorded: the OID of
//! its row in `pg_publication_rel`, which another `ALTER PUBLICATION ... ADD TABLE` does not
//! restore, or the OID of the row or publication that includes its schema or all tables. If none of
//! the recorded OIDs publishes the table any longer, an entry is added to the journal. It is
//! settled by a replay of the events of dropped slots.
//!
//! A row also contains the slot's `catalog_xmin` at that time: rows of older transactions were
//! delivered (see [`super::drop_slot`]).

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

/// Version of the rows' format. Rows of other versions are ignored, and replaced.
pub(super) const VERSION: i32 = 1;

/// The cluster and the database to which a row must belong.
pub(super) const SYSTEM_ID: &str = "(SELECT system_identifier::text FROM pg_control_system())";
pub(super) const DATABASE_OID: &str =
    "(SELECT oid FROM pg_database WHERE datname = current_database())";

/// Events of a table that may be missing because the table was not published for a while.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TableGap {
    pub(crate) table: TableName,
    publication: String,
    /// The position that the slot had confirmed when the table was last found published.
    from: Option<Lsn>,
    /// The first transaction that may not have been delivered by then; if unknown, all rows may be
    /// missing.
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
            "table {} was not in publication {:?} for a while: events committed{after} may be missing in Kafka",
            self.table, self.publication
        )
    }
}

/// The objects that publish a table: OIDs of rows in the catalog.
type Memberships = BTreeSet<u32>;

/// A table as described at one moment by the catalog and by its row in `walpost.table_state`.
#[derive(Clone, Debug)]
struct TableLook {
    table: TableName,
    /// Zero if the table does not exist.
    relation: u32,
    /// Empty if the table is not published.
    memberships: Memberships,
    /// The transaction that added the oldest of the memberships.
    member_xid: Option<u64>,
    stored: Option<StoredTable>,
    slot: SlotPlace,
}

/// The position of the slot at that moment.
#[derive(Clone, Copy, Debug, Default)]
struct SlotPlace {
    confirmed: Option<Lsn>,
    catalog_xmin: Option<u64>,
    /// The end of WAL.
    end: Lsn,
}

impl SlotPlace {
    /// Returns the assignments to the row `prefix` which record that its table was found published
    /// now, unless the slot has not reached the recorded position yet.
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
    /// The present name of the relation, if it exists in this database.
    name: Option<TableName>,
    /// Whether the relation is still published as recorded, whatever its name is.
    is_published: bool,
    publication: String,
    relation: u32,
    memberships: Memberships,
    is_out: bool,
    /// After the slot's position if `walpost.add_outbox` has added the table, until the slot has
    /// sent the rows that the function wrote.
    seen_lsn: Option<Lsn>,
    seen_xid: Option<u64>,
    out_lsn: Option<Lsn>,
}

/// The result of comparing a table with its record.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Finding {
    /// It is neither published nor recorded, or was recorded as not published.
    Nothing,
    /// It is published as before.
    Same,
    /// It is published, and was not recorded.
    New,
    /// It is published in another way, and has been published the whole time.
    Changed,
    /// It is no longer published. Rows committed before that are still decoded as published.
    Out,
    /// It is not in the publication that is now configured, and was in another one.
    Left(TableGap),
    /// It was not published for a while.
    Gap(TableGap),
}

impl TableLook {
    fn evaluate(&self, publication: &str) -> Finding {
        let is_published = !self.memberships.is_empty();
        let Some(stored) = &self.stored else {
            return match is_published {
                true => Finding::New,
                false => Finding::Nothing,
            };
        };
        let [schema, name] = OUTBOX_ROW;
        // Rows of that table are written only by walpost.add_outbox, which requires that it is
        // published, and they belong to other tables.
        let is_outbox_row = self.table.is(schema, name);
        let is_same_publication = stored.publication == publication;
        if !is_published {
            // The publication that is now configured also determines which of the rows not sent yet
            // are sent.
            let is_left = !is_same_publication && !is_outbox_row && self.is_unsent(stored);
            return match stored.is_out {
                _ if is_left => Finding::Left(TableGap {
                    table: stored.name.clone().unwrap_or_else(|| self.table.clone()),
                    ..self.gap(stored, publication, stored.seen_xid)
                }),
                true => Finding::Nothing,
                false => Finding::Out,
            };
        }
        let since = match is_same_publication {
            true => stored.seen_xid,
            // Rows that the slot has not sent yet are decoded with the new publication.
            false => stored.seen_xid.min(self.slot.catalog_xmin),
        };
        let is_kept = is_same_publication && !self.memberships.is_disjoint(&stored.memberships);
        let is_older = since.is_some_and(|since| self.member_xid.is_some_and(|xid| xid < since));
        let has_lost_rows = !is_same_publication && self.has_unsent_older_rows(stored);
        if stored.is_out || has_lost_rows || !(is_kept || is_older) {
            return match is_outbox_row {
                true => Finding::Changed,
                false => Finding::Gap(self.gap(stored, publication, since)),
            };
        }
        let is_same = is_same_publication
            && stored.relation == self.relation
            && stored.memberships == self.memberships;
        match is_same {
            true => Finding::Same,
            false => Finding::Changed,
        }
    }

    /// Returns whether rows of a table that is not published may be in WAL that the slot has not
    /// sent, without an entry about them in the journal.
    fn is_unsent(&self, stored: &StoredTable) -> bool {
        // A row without memberships was written together with such an entry.
        !stored.is_out || !stored.memberships.is_empty() && stored.out_lsn > self.slot.confirmed
    }

    /// Returns whether the slot has not sent all rows that the table had when `walpost.add_outbox`
    /// added it. They are in WAL as rows of `walpost.outbox_row` for the publication of that time,
    /// and are not sent for any other.
    fn has_unsent_older_rows(&self, stored: &StoredTable) -> bool {
        let is_ahead = |confirmed| stored.seen_lsn.is_some_and(|seen| seen > confirmed);
        self.slot.confirmed.is_some_and(is_ahead)
    }

    /// Returns the events that may be missing if the table is not published for a while, or was not
    /// in the publication before.
    fn gap(&self, stored: &StoredTable, publication: &str, since: Option<u64>) -> TableGap {
        let is_whole = stored.publication != publication && self.has_unsent_older_rows(stored);
        TableGap {
            table: self.table.clone(),
            publication: publication.to_owned(),
            from: stored.seen_lsn.filter(|_| !is_whole),
            since: since.filter(|_| !is_whole),
        }
    }

    /// Returns the condition for the row as it was read.
    fn condition(&self, target: &Target, stored: &StoredTable) -> String {
        format!(
            "slot = {} AND table_schema = {} AND table_name = {} AND memberships = '{}' AND is_out = {}",
            escape_literal(&target.slot),
            escape_literal(&self.table.schema),
            escape_literal(&self.table.name),
            list(&stored.memberships),
            stored.is_out
        )
    }

    /// Returns the assignments to a row that describes the table as not published.
    fn assignments_if_out(&self) -> String {
        format!("is_out = true, out_lsn = '{}', at = now()", self.slot.end)
    }

    /// Returns the assignments to a row that describes the table as it is now.
    fn assignments(&self, target: &Target) -> String {
        format!(
            "publication = {}, relation = {}, memberships = '{}', is_out = false, {}, out_lsn = NULL, at = now()",
            escape_literal(&target.publication),
            self.relation,
            list(&self.memberships),
            self.slot.assignments_if_seen("")
        )
    }

    /// Returns the values of such a row.
    fn values(&self, target: &Target) -> String {
        format!(
            "({}, {}, {}, {VERSION}, {SYSTEM_ID}, {DATABASE_OID}, {}, {}, '{}', false, {}, {}, NULL, now())",
            escape_literal(&target.slot),
            escape_literal(&self.table.schema),
            escape_literal(&self.table.name),
            escape_literal(&target.publication),
            self.relation,
            list(&self.memberships),
            literal(self.slot.confirmed),
            literal(self.slot.catalog_xmin)
        )
    }
}

fn list(memberships: &Memberships) -> String {
    let oids: Vec<_> = memberships.iter().map(u32::to_string).collect();
    oids.join(",")
}

fn literal(value: Option<impl Display>) -> String {
    value.map_or("NULL".to_owned(), |value| format!("'{value}'"))
}

/// Returns an array of texts, in SQL.
pub(super) fn texts<'t>(values: impl Iterator<Item = &'t str>) -> String {
    let values: Vec<_> = values.map(escape_literal).collect();
    format!("ARRAY[{}]::text[]", values.join(", "))
}

/// What a session records in addition to differences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refresh {
    /// That the tables were found as recorded.
    All,
    Nothing,
}

impl Catalog {
    /// Returns descriptions of events of this outbox that may be missing because tables were not
    /// published for a while or were replaced, as far as this has not been recorded yet. Empty if
    /// this can't be determined.
    ///
    /// # Errors
    /// A query fails, or the table is not readable or not trusted.
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
        let looks = self.query_tables(target).await?;
        let gap = |look: &TableLook| match look.evaluate(&target.publication) {
            Finding::Gap(gap) | Finding::Left(gap) => Some(gap.describe()),
            _ => None,
        };
        let replaced = self.replaced_tables(target, &looks).await?;
        let replaced = replaced.iter().flat_map(|(_, tables)| tables);
        let replaced = replaced.map(|replaced| replaced.describe());
        Ok(replaced.chain(looks.iter().filter_map(gap)).collect())
    }

    /// Returns the tables of this outbox that exist, were delivered by this slot, and are no longer
    /// published. Empty if this can't be determined.
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
        let mut looks = self.query_tables(target).await?;
        looks.retain(|look| {
            let is_left = look.stored.is_some() && look.memberships.is_empty();
            is_left && look.relation != 0 && !look.table.is(schema, name)
        });
        Ok(looks.into_iter().map(|look| look.table).collect())
    }

    /// Returns whether a table of this outbox is recorded as not published, or differs from its
    /// record in a way that may leave out events.
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
        let looks = self.query_tables(target).await?;
        let mut of_table = looks.iter().filter(|look| look.table == *table);
        Ok(of_table.any(|look| {
            look.stored.as_ref().is_some_and(|stored| stored.is_out)
                || matches!(
                    look.evaluate(&target.publication),
                    Finding::Out | Finding::Left(_) | Finding::Gap(_)
                )
        }))
    }

    /// Compares the tables of the publication with their records, records what has changed, and
    /// adds journal entries about tables that may lack events. If that is impossible, returns why.
    ///
    /// # Errors
    /// A query fails, or Walpost's tables are not trusted or not writable.
    pub(crate) async fn record_tables(
        &self,
        pipeline: &str,
        target: &Target,
        refresh: Refresh,
    ) -> Result<Option<String>, CatalogError> {
        if target.outbox.is_messages() {
            return Ok(None);
        }
        if let Some(why) = self
            .unusable(target, OwnTable::TableState, Use::Write)
            .await?
        {
            return Ok(Some(why));
        }
        let looks = self.query_tables(target).await?;
        self.record_replaced_tables(pipeline, target, &looks)
            .await?;
        let (mut new, mut same) = (Vec::new(), Vec::new());
        for look in &looks {
            match (look.evaluate(&target.publication), &look.stored) {
                (Finding::New, _) => new.push(look),
                (Finding::Same, _) => same.push(look),
                (Finding::Out, Some(stored)) => {
                    let children = self.children_of_renamed(target, look).await?;
                    let set = look.assignments_if_out();
                    let condition = look.condition(target, stored);
                    self.write_replaced(pipeline, target, &children, (&set, &condition))
                        .await?;
                }
                (Finding::Changed, Some(stored)) => {
                    let sql = format!(
                        "UPDATE walpost.table_state SET {} WHERE {}",
                        look.assignments(target),
                        look.condition(target, stored)
                    );
                    self.write_tables(target, &sql).await?;
                }
                (Finding::Gap(gap), Some(stored)) => {
                    let gap = self.widened(target, look, gap).await?;
                    let set = look.assignments(target);
                    self.write_table_gap(pipeline, target, look, stored, (&gap, &set))
                        .await?;
                }
                (Finding::Left(gap), Some(stored)) => {
                    let gap = self.widened(target, look, gap).await?;
                    // If the table is added again, everything committed until now has its entry.
                    let set = format!(
                        "{}, memberships = '', seen_lsn = {}, seen_xid = {}",
                        look.assignments_if_out(),
                        literal(look.slot.confirmed),
                        literal(look.slot.catalog_xmin)
                    );
                    self.write_table_gap(pipeline, target, look, stored, (&gap, &set))
                        .await?;
                }
                _ => {}
            }
        }
        self.insert_tables(target, &new, Existing::OfOtherHistory)
            .await?;
        if refresh == Refresh::All && !same.is_empty() {
            self.refresh_tables(target, &same).await?;
        }
        Ok(None)
    }

    /// Records which rows of replaced tables may be missing. Must run before the record of the slot
    /// is replaced, because the result depends on that record.
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
        let looks = self.query_tables(target).await?;
        self.record_replaced_tables(pipeline, target, &looks).await
    }

    /// Records how the tables are published for a slot that was just created; nothing is known
    /// about the time before. Tables that are not published may lack all their events if they are
    /// added later.
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
        let looks = self.query_tables(target).await?;
        let (published, others): (Vec<_>, Vec<_>) =
            looks.iter().partition(|look| !look.memberships.is_empty());
        self.insert_tables(target, &published, Existing::Any)
            .await?;
        for look in others {
            let Some(stored) = &look.stored else { continue };
            // What was committed before the slot exists is in a gap of the former one, or was delivered.
            let set = format!(
                "is_out = true, seen_xid = NULL, out_lsn = {}, at = now()",
                literal(look.slot.confirmed)
            );
            let children = self.children_of_renamed(target, look).await?;
            let condition = look.condition(target, stored);
            self.write_replaced(pipeline, target, &children, (&set, &condition))
                .await?;
        }
        Ok(())
    }

    /// Returns the tables of this outbox that are published or recorded, all as of one moment.
    async fn query_tables(&self, target: &Target) -> Result<Vec<TableLook>, CatalogError> {
        let version = self.version().await?;
        let mut wanted = Vec::new();
        match &target.outbox {
            Outbox::Messages { .. } => return Ok(Vec::new()),
            Outbox::Table(table) => wanted.push(table.clone()),
            Outbox::Tables(of) | Outbox::OneOf { of, .. } => {
                let all = Target {
                    outbox: Outbox::Tables(of.clone()),
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
        let mut looks = Vec::with_capacity(rows.len());
        for row in &rows {
            let look = parse_table(row)?;
            // The record may be from an earlier configuration of the pipeline.
            if wanted.contains(&look.table)
                || target.outbox.includes(&look.table.schema, &look.table.name)
            {
                looks.push(look);
            }
        }
        Ok(looks)
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
        looks: &[&TableLook],
        existing: Existing,
    ) -> Result<(), CatalogError> {
        if looks.is_empty() {
            return Ok(());
        }
        let values: Vec<_> = looks.iter().map(|look| look.values(target)).collect();
        let mut sql = format!(
            "INSERT INTO walpost.table_state AS s (slot, table_schema, table_name, version, system_id, database_oid, publication, \
             relation, memberships, is_out, seen_lsn, seen_xid, out_lsn, at) VALUES {} \
             ON CONFLICT (slot, table_schema, table_name) DO UPDATE SET version = excluded.version, \
             system_id = excluded.system_id, database_oid = excluded.database_oid, publication = excluded.publication, \
             relation = excluded.relation, memberships = excluded.memberships, is_out = excluded.is_out, \
             seen_lsn = excluded.seen_lsn, seen_xid = excluded.seen_xid, out_lsn = excluded.out_lsn, at = excluded.at",
            values.join(", ")
        );
        if existing == Existing::OfOtherHistory {
            let _ = write!(
                sql,
                " WHERE NOT (s.version = {VERSION} AND s.system_id = excluded.system_id \
                 AND s.database_oid = excluded.database_oid)"
            );
        }
        self.write_tables(target, &sql).await?;
        Ok(())
    }

    /// Records that tables were found published as before.
    async fn refresh_tables(
        &self,
        target: &Target,
        looks: &[&TableLook],
    ) -> Result<(), CatalogError> {
        let memberships: Vec<_> = looks.iter().map(|look| list(&look.memberships)).collect();
        let slot = looks.first().map_or(SlotPlace::default(), |look| look.slot);
        let sql = format!(
            "UPDATE walpost.table_state s SET {}, at = now() FROM unnest({}, {}, {}) \
             AS same (schema, name, memberships) WHERE s.slot = {} AND s.table_schema = same.schema AND s.table_name = same.name \
             AND s.memberships = same.memberships AND NOT s.is_out",
            slot.assignments_if_seen("s."),
            texts(looks.iter().map(|look| look.table.schema.as_str())),
            texts(looks.iter().map(|look| look.table.name.as_str())),
            texts(memberships.iter().map(String::as_str)),
            escape_literal(&target.slot)
        );
        self.write_tables(target, &sql).await?;
        Ok(())
    }

    /// Updates the record of a table and adds journal entries in one statement, so that both happen
    /// or neither, and only one of two instances does it. Returns the IDs of the entries; empty if
    /// no record meets the condition.
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

    /// Adds a gap to the journal and records how the table is published now.
    async fn write_table_gap(
        &self,
        pipeline: &str,
        target: &Target,
        look: &TableLook,
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
            to: Some(look.slot.end),
            detail: json!({
                "reason": "table was not in the publication",
                LEFT_PUBLICATION: target.publication,
                "table": table,
                "several": is_several,
                "catalog_xmin": gap.since.map(|id| id.to_string()),
                "system_id": self.cluster().await?,
            }),
        };
        let condition = look.condition(target, stored);
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
                "{}. Send them again: {}",
                gap.describe(),
                replay_command(&target.commands, is_several.then_some(&table))
            );
        }
        Ok(())
    }
}

/// How existing rows are treated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Existing {
    /// They are replaced.
    Any,
    /// They are replaced if they belong to another cluster, database or version.
    OfOtherHistory,
}

pub(super) fn grant(role: &str, rights: &str) -> String {
    format!(
        "GRANT USAGE ON SCHEMA walpost TO {role}; GRANT {rights} ON walpost.table_state TO {role}"
    )
}

/// Returns the query for the tables that are `wanted` or recorded, for a server of this version.
fn query(target: &Target, wanted: &[TableName], version: i32) -> String {
    // Publications can contain schemas since PostgreSQL 15.
    let of_schemas = match version >= 150_000 {
        true => {
            "UNION ALL SELECT l.relation, s.oid, s.xmin FROM lineage l JOIN pg_class c ON c.oid = l.oid \
             JOIN pg_publication_namespace s ON s.pnnspid = c.relnamespace JOIN published p ON p.oid = s.pnpubid "
        }
        false => "",
    };
    // The slot is not read at the moment of the snapshot. Transactions that end after that moment
    // have IDs of at least `oldest`.
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
        schemas = texts(wanted.iter().map(|table| table.schema.as_str())),
        names = texts(wanted.iter().map(|table| table.name.as_str())),
        catalog_xmin = full("r.catalog_xmin"),
        member_xid = full("member.xid"),
    )
}

fn parse_table(row: &SimpleQueryRow) -> Result<TableLook, CatalogError> {
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
    Ok(TableLook {
        table: TableName::from_catalog(needed("schema")?, needed("name")?),
        relation: parse(text("relation")?, || unexpected("relation"))?.unwrap_or_default(),
        memberships: memberships("memberships")?,
        member_xid: parse(text("member_xid")?, || unexpected("xmin"))?,
        stored,
        slot: SlotPlace {
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
