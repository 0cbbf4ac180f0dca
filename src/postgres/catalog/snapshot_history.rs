//! What tells whether rows that are older than a slot were delivered, and how to read them.

use tokio_postgres::{Row, SimpleQueryMessage};

use super::journal::{Action, Written};
use super::{Catalog, CatalogError, Statement};
use crate::model::lsn::Lsn;
use crate::postgres::table::{TableName, identifier};
use crate::postgres::target::Target;

/// What is known of a pipeline's past.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotHistory {
    /// What the journal says of it.
    pub record: SnapshotRecord,
    /// The slot has sent transactions, as far as the server's statistics reach back.
    pub has_streamed: bool,
    /// The rows that are in the table.
    pub rows: Rows,
}

/// What the journal says of the snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SnapshotRecord {
    /// There is no journal.
    NoJournal,
    /// Nothing.
    Nothing,
    /// One was begun that has what was committed before this.
    Begun(Lsn),
    /// There is nothing more to do.
    Done,
}

/// The rows that are in the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rows {
    /// None.
    None,
    /// So many, as far as the planner knows.
    About(u64),
    /// There is something, and this role may not read it.
    Denied {
        /// The statement that lets it.
        grant: String,
    },
}

impl SnapshotRecord {
    /// The key in an entry's detail.
    pub const STATE: &'static str = "state";
    /// Its value in [`SnapshotRecord::Begun`].
    pub const BEGUN: &'static str = "begun";
    /// Its value in [`SnapshotRecord::Done`].
    pub const DONE: &'static str = "done";

    /// Of entries in the order in which they were written. What is done stays done: an instance that was
    /// frozen may write later that it begins.
    #[must_use]
    pub fn of(entries: &[Written]) -> Self {
        let mut record = Self::Nothing;
        let of_snapshot = |entry: &&Written| entry.action == Action::Snapshot;
        for entry in entries.iter().filter(of_snapshot) {
            record = match (entry.detail[Self::STATE].as_str(), entry.to) {
                (Some(Self::BEGUN), Some(snapshot_lsn)) => Self::Begun(snapshot_lsn),
                _ => return Self::Done,
            };
        }
        record
    }
}

impl Catalog {
    /// What the journal says of the snapshot.
    ///
    /// # Errors
    /// The server can't be asked, or lets us not read the journal.
    pub async fn snapshot_record(
        &self,
        pipeline: &str,
        target: &Target,
    ) -> Result<SnapshotRecord, CatalogError> {
        match self.journal(pipeline, target).await {
            Ok(entries) => Ok(SnapshotRecord::of(&entries)),
            Err(CatalogError::NoJournal) => Ok(SnapshotRecord::NoJournal),
            Err(error) => Err(error),
        }
    }

    /// What is known of the past of a pipeline whose outbox is `table`.
    ///
    /// # Errors
    /// The server can't be asked.
    pub async fn snapshot_history(
        &self,
        pipeline: &str,
        target: &Target,
        table: &TableName,
    ) -> Result<SnapshotHistory, CatalogError> {
        let record = self.snapshot_record(pipeline, target).await?;
        if record == SnapshotRecord::Done {
            return Ok(SnapshotHistory {
                record,
                has_streamed: true,
                rows: Rows::None,
            });
        }
        Ok(SnapshotHistory {
            record,
            has_streamed: self.has_streamed(&target.slot).await?,
            rows: self.rows(table).await?,
        })
    }

    /// The slot has sent transactions, as far as the server's statistics reach back.
    pub(in crate::postgres) async fn has_streamed(&self, slot: &str) -> Result<bool, CatalogError> {
        let found = self
            .client()
            .query_opt(
                "SELECT total_txns > 0 FROM pg_stat_replication_slots WHERE slot_name = $1",
                &[&slot],
            )
            .await?;
        let found: Option<bool> = found.map(|row| row.try_get(0)).transpose()?.flatten();
        Ok(found.unwrap_or(false))
    }

    /// The rows that are in the table.
    ///
    /// # Errors
    /// The server can't be asked.
    pub async fn rows(&self, table: &TableName) -> Result<Rows, CatalogError> {
        let quoted = table.quoted();
        let found = self
            .client()
            .query_one(
                "SELECT (SELECT coalesce(sum(pg_relation_size(part)), 0) FROM (SELECT $1::text::regclass AS part \
                 UNION SELECT relid FROM pg_partition_tree($1::text::regclass)) AS parts) = 0, \
                 has_schema_privilege($2, 'USAGE') AND has_table_privilege($1::text::regclass, 'SELECT'), \
                 current_user::text",
                &[&quoted, &table.schema],
            )
            .await?;
        let (no_size, may_read): (bool, bool) = (found.try_get(0)?, found.try_get(1)?);
        if no_size {
            return Ok(Rows::None);
        }
        if !may_read {
            let role = identifier(found.try_get(2)?);
            let schema = identifier(&table.schema);
            return Ok(Rows::Denied {
                grant: format!(
                    "GRANT USAGE ON SCHEMA {schema} TO {role}; GRANT SELECT ON {table} TO {role}"
                ),
            });
        }
        self.examine_table(table, Statement::Select).await?;
        if !self.is_there(&format!("FROM {quoted}"), &[]).await? {
            return Ok(Rows::None);
        }
        let plan = format!("EXPLAIN (FORMAT JSON) SELECT FROM {quoted}");
        let answer = self.client().simple_query(&plan).await?;
        let text: String = answer
            .iter()
            .filter_map(|message| match message {
                SimpleQueryMessage::Row(row) => row.get(0),
                _ => None,
            })
            .collect();
        let plan: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
        let about = plan[0]["Plan"]["Plan Rows"].as_f64().unwrap_or(1.0);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "an estimate"
        )]
        Ok(Rows::About(about as u64))
    }

    /// The columns by which rows are put in order: of the primary key, with a time before it where
    /// the key says nothing of that.
    ///
    /// # Errors
    /// The server can't be asked.
    pub async fn order(&self, table: &TableName) -> Result<Vec<KeyColumn>, CatalogError> {
        const COLUMN: &str = "a.attname::text, a.atttypid, \
             coalesce(pg_get_expr(d.adbin, d.adrelid), '') LIKE '%uuidv7(%'";
        let quoted = table.quoted();
        let key = self
            .client()
            .query(
                &format!(
                    "SELECT {COLUMN} FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid \
                     AND a.attnum = ANY (i.indkey) LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum \
                     WHERE i.indrelid = $1::text::regclass AND i.indisprimary \
                     ORDER BY array_position(i.indkey::int2[], a.attnum)"
                ),
                &[&quoted],
            )
            .await?;
        let time = self
            .client()
            .query_opt(
                &format!(
                    "SELECT {COLUMN} FROM pg_attribute a LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid \
                     AND d.adnum = a.attnum WHERE a.attrelid = $1::text::regclass AND a.attname = 'created_at' \
                     AND a.attnotnull AND NOT a.attisdropped AND a.atttypid IN ($2, $3)"
                ),
                &[&quoted, &oid::TIMESTAMP, &oid::TIMESTAMPTZ],
            )
            .await?;
        let mut columns: Vec<KeyColumn> = key.iter().map(key_column).collect::<Result<_, _>>()?;
        let rises = columns.first().is_some_and(|first| first.rises);
        if let (false, Some(time)) = (rises, time) {
            let time = key_column(&time)?;
            columns.retain(|column| column.name != time.name);
            columns.insert(0, time);
        }
        Ok(columns)
    }
}

/// One of the columns by which rows are put in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyColumn {
    /// Its name.
    pub name: String,
    /// Its type.
    pub type_oid: u32,
    /// What is inserted later has a higher one, more or less.
    rises: bool,
}

impl KeyColumn {
    /// One that rows are in order of already.
    #[must_use]
    pub fn new(name: &str, type_oid: u32) -> Self {
        Self {
            name: name.to_owned(),
            type_oid,
            rises: false,
        }
    }
}

/// OIDs of built-in types: PostgreSQL 18, `src/include/catalog/pg_type.dat`.
mod oid {
    pub(super) const INT8: u32 = 20;
    pub(super) const INT2: u32 = 21;
    pub(super) const INT4: u32 = 23;
    pub(super) const TIMESTAMP: u32 = 1114;
    pub(super) const TIMESTAMPTZ: u32 = 1184;
}

fn key_column(row: &Row) -> Result<KeyColumn, CatalogError> {
    let type_oid = row.try_get(1)?;
    let integer = matches!(type_oid, oid::INT2 | oid::INT4 | oid::INT8);
    Ok(KeyColumn {
        name: row.try_get(0)?,
        type_oid,
        rises: integer || row.try_get(2)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(action: Action, state: &str, to: u64) -> Written {
        Written {
            id: 1,
            at: String::new(),
            action,
            from: None,
            to: Some(Lsn(to)),
            by_role: String::new(),
            detail: serde_json::json!({ "state": state }),
        }
    }

    #[test]
    fn the_last_entry_about_a_snapshot_counts_until_one_says_that_it_is_done() {
        let begun = entry(Action::Snapshot, SnapshotRecord::BEGUN, 7);
        let done = entry(Action::Snapshot, SnapshotRecord::DONE, 7);
        let skip = entry(Action::Skip, "", 9);
        assert_eq!(SnapshotRecord::of(&[]), SnapshotRecord::Nothing);
        assert_eq!(
            SnapshotRecord::of(std::slice::from_ref(&skip)),
            SnapshotRecord::Nothing
        );
        assert_eq!(
            SnapshotRecord::of(std::slice::from_ref(&begun)),
            SnapshotRecord::Begun(Lsn(7))
        );
        assert_eq!(
            SnapshotRecord::of(&[begun.clone(), skip]),
            SnapshotRecord::Begun(Lsn(7))
        );
        let again = entry(Action::Snapshot, SnapshotRecord::BEGUN, 8);
        assert_eq!(
            SnapshotRecord::of(&[begun.clone(), again]),
            SnapshotRecord::Begun(Lsn(8))
        );
        assert_eq!(
            SnapshotRecord::of(&[begun.clone(), done.clone()]),
            SnapshotRecord::Done
        );
        assert_eq!(SnapshotRecord::of(&[done, begun]), SnapshotRecord::Done);
    }
}
