//! The names under which the rows of a table are allowed to be published.
//!
//! The owner of a table can rename it, insert rows, and restore its name, even while Walpost is not
//! running, so neither the catalog nor the stream shows whether a name is legitimate. Therefore,
//! `walpost.table_state` records which names were accepted for each OID, in the column
//! `accepted_for`. A name is accepted if `walpost.add_outbox` adds the table under that name, if it
//! is the first name that Walpost records for the table, or if the operator passes it to `init`
//! with `--table`.
//!
//! Accepted names are kept when a table is renamed, because WAL that has yet to be read can contain
//! rows from before the rename. The column is a list, because the name of a table can be reused by
//! another table while rows of the former table are still in WAL.

use std::collections::BTreeMap;

use super::{DATABASE_OID, Refresh, SYSTEM_ID, TableObservation, VERSION, text_array};
use crate::model::lsn::Lsn;
use crate::postgres::catalog::own_table::{OwnTable, Use};
use crate::postgres::catalog::{Catalog, CatalogError};
use crate::postgres::sql::text_literal;
use crate::postgres::table::TableName;
use crate::postgres::target::Target;

/// Maximum number of OIDs for which one name is accepted. A table gets a new OID each time it is
/// re-created. If there are more OIDs, the oldest ones are removed.
const OIDS_MAX: usize = 100;

/// The names under which the rows of a table are allowed to be published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AcceptedNames {
    /// The table's OID.
    pub(crate) oid: u32,
    /// The names recorded for the table, ending with the most recent one. If no name is recorded,
    /// contains the table's current name.
    pub(crate) names: Vec<TableName>,
    /// If no name is recorded for the table, the WAL position at the time when its current name was
    /// queried; otherwise zero.
    pub(crate) unchecked_before: Lsn,
}

/// Returns an SQL expression that appends `oid` to `list`, where both are SQL expressions.
fn append(list: &str, oid: &str) -> String {
    let array = format!("string_to_array({list}, ','::text)");
    format!(
        "concat_ws(','::text, array_to_string(({array})[cardinality({array}) - {}:], ','::text), {oid})",
        OIDS_MAX - 2
    )
}

/// Returns an SQL expression for `ON CONFLICT DO UPDATE` that merges the `accepted_for` lists of
/// the existing row and the new row.
pub(super) fn merge_lists() -> String {
    format!(
        "CASE WHEN NOT (s.version = {VERSION} AND s.system_id = excluded.system_id AND s.database_oid = excluded.database_oid) \
         THEN excluded.accepted_for WHEN excluded.accepted_for IS NULL THEN s.accepted_for ELSE {} END",
        append("s.accepted_for", "excluded.accepted_for")
    )
}

/// Returns a condition that selects the slot's rows in this database. `alias` is the alias of
/// `walpost.table_state` in the query.
fn is_of_slot(target: &Target, alias: &str) -> String {
    format!(
        "{alias}.slot = {} AND {alias}.version = {VERSION} AND {alias}.system_id = {SYSTEM_ID} \
         AND {alias}.database_oid = {DATABASE_OID}",
        text_literal(&target.slot)
    )
}

impl TableObservation {
    /// Returns an SQL expression for the new value of `accepted_for`, whose current value is the
    /// SQL expression `list`. The new value also contains the table's OID, unless one of the slot's
    /// rows already contains it.
    pub(super) fn accepted_for(&self, target: &Target, list: &str) -> String {
        let oid = self.relation;
        format!(
            "CASE WHEN EXISTS (SELECT FROM walpost.table_state a WHERE {} AND '{oid}'::text = ANY (string_to_array(a.accepted_for, ','::text))) \
             THEN {list} ELSE {} END",
            is_of_slot(target, "a"),
            append(list, &format!("'{oid}'::text"))
        )
    }
}

impl Catalog {
    /// Records that the slot delivers rows of a table, even if the table is no longer in the
    /// publication: the slot still sends rows that were committed before the table was removed.
    /// Otherwise, `walpost.add_outbox` would send these rows again.
    ///
    /// # Errors
    /// See [`Catalog::record_tables`].
    pub(crate) async fn record_delivered_table(
        &self,
        pipeline: &str,
        target: &Target,
        table: &AcceptedNames,
    ) -> Result<(), CatalogError> {
        let unusable = self
            .unusable(target, OwnTable::TableState, Use::Write)
            .await?;
        let is_in_outbox = |name: &TableName| target.outbox.includes(&name.schema, &name.name);
        if unusable.is_some() || !table.names.iter().any(is_in_outbox) {
            return Ok(());
        }
        // If the table is in the publication, record how the publication publishes the table.
        self.record_tables(pipeline, target, Refresh::Nothing)
            .await?;
        let oid = table.oid;
        let sql = format!(
            "INSERT INTO walpost.table_state AS s (slot, table_schema, table_name, version, system_id, database_oid, publication, \
             relation, memberships, is_out, seen_lsn, seen_xid, out_lsn, at, accepted_for) \
             SELECT {slot}, n.nspname::text, c.relname::text, {VERSION}, {SYSTEM_ID}, {DATABASE_OID}, {publication}, c.oid, ''::text, \
             true, NULL::pg_lsn, NULL::text, pg_current_wal_lsn(), now(), c.oid::text \
             FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = {oid} \
             AND NOT EXISTS (SELECT FROM walpost.table_state a WHERE {} AND '{oid}'::text = ANY (string_to_array(a.accepted_for, ','::text))) \
             ON CONFLICT (slot, table_schema, table_name) DO UPDATE SET accepted_for = {} \
             WHERE s.version = {VERSION} AND s.system_id = excluded.system_id AND s.database_oid = excluded.database_oid",
            is_of_slot(target, "a"),
            merge_lists(),
            slot = text_literal(&target.slot),
            publication = text_literal(&target.publication),
        );
        self.write_tables(target, &sql).await?;
        Ok(())
    }

    /// Returns the names under which rows of the tables with these OIDs are allowed to be
    /// published.
    ///
    /// # Errors
    /// Returns an error if a query fails. If `walpost.table_state` can't be used, returns each
    /// table's current name, as if no names were recorded.
    pub(crate) async fn accepted_names(
        &self,
        target: &Target,
        oids: &[u32],
    ) -> Result<Vec<AcceptedNames>, CatalogError> {
        let mut recorded = self.recorded_names(target, oids).await?;
        let sql = "SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_insert_lsn() END::text, \
                   c.oid, n.nspname, c.relname FROM unnest($1::oid[]) AS wanted (oid) JOIN pg_class c ON c.oid = wanted.oid \
                   JOIN pg_namespace n ON n.oid = c.relnamespace";
        let unrecorded: Vec<_> = oids
            .iter()
            .filter(|oid| !recorded.contains_key(oid))
            .collect();
        let mut found = Vec::with_capacity(oids.len());
        for row in self.client().query(sql, &[&unrecorded]).await? {
            let position: String = row.try_get(0)?;
            let unchecked_before = position.parse();
            found.push(AcceptedNames {
                oid: row.try_get(1)?,
                names: vec![TableName::from_catalog(row.try_get(2)?, row.try_get(3)?)],
                unchecked_before: unchecked_before
                    .map_err(|_| CatalogError::Unexpected("WAL position".to_owned()))?,
            });
        }
        for oid in oids {
            if let Some(names) = recorded.remove(oid) {
                found.push(AcceptedNames {
                    oid: *oid,
                    names,
                    unchecked_before: Lsn::ZERO,
                });
            }
        }
        Ok(found)
    }

    /// Returns the names that `walpost.table_state` contains for the tables with these OIDs.
    /// Returns no names if Walpost's role can't read `walpost.table_state`, or if it has been
    /// tampered with; in both cases, [`Catalog::record_tables`] logs a warning.
    pub(in crate::postgres::catalog) async fn recorded_names(
        &self,
        target: &Target,
        oids: &[u32],
    ) -> Result<BTreeMap<u32, Vec<TableName>>, CatalogError> {
        let mut names: BTreeMap<u32, Vec<TableName>> = BTreeMap::new();
        if oids.is_empty()
            || self
                .unusable(target, OwnTable::TableState, Use::Read)
                .await?
                .is_some()
        {
            return Ok(names);
        }
        let oids: Vec<_> = oids.iter().map(u32::to_string).collect();
        let sql = format!(
            "SELECT l.oid, s.table_schema, s.table_name FROM walpost.table_state s, \
             unnest(string_to_array(s.accepted_for, ','::text)) AS l (oid) WHERE {} AND l.oid = ANY ({}) ORDER BY s.is_out DESC, s.at",
            is_of_slot(target, "s"),
            text_array(oids.iter().map(String::as_str))
        );
        let rows = self.run_on_own_table(OwnTable::TableState, target, "", &sql);
        let rows = match rows.await {
            // SQLSTATE class 42 covers errors such as a missing privilege or a missing column.
            Err(CatalogError::Server(error)) if error.code.starts_with("42") => return Ok(names),
            rows => rows?,
        };
        for row in &rows {
            if let (Some(oid), Some(schema), Some(name)) = (row.get(0), row.get(1), row.get(2)) {
                let unexpected = |_| CatalogError::Unexpected("accepted_for".to_owned());
                let names = names.entry(oid.parse().map_err(unexpected)?).or_default();
                names.push(TableName::from_catalog(schema, name));
            }
        }
        Ok(names)
    }

    /// Records `name` as an accepted name of the table that was last recorded under this name.
    /// Returns false if the name was already accepted.
    ///
    /// # Errors
    /// See [`Catalog::record_tables`].
    pub(crate) async fn accept_name(
        &self,
        target: &Target,
        name: &TableName,
    ) -> Result<bool, CatalogError> {
        let sql = format!(
            "UPDATE walpost.table_state s SET accepted_for = {} WHERE {} AND s.table_schema = {} AND s.table_name = {} \
             AND s.relation <> 0 AND NOT coalesce(s.relation::text = ANY (string_to_array(s.accepted_for, ','::text)), false) RETURNING 1",
            append("s.accepted_for", "s.relation::text"),
            is_of_slot(target, "s"),
            text_literal(&name.schema),
            text_literal(&name.name)
        );
        Ok(!self.write_tables(target, &sql).await?.is_empty())
    }
}
