//! Reads and writes the journal, a table that `sql/journal.sql` creates. The journal records
//! operations that affect a pipeline but can't be inferred from WAL. Entries are added but never
//! changed.
//!
//! A trigger on the table, or a view that replaces the table, would run with Walpost's privileges.
//! Therefore, every statement on the journal runs through `Catalog::run_on_own_table`, which
//! examines the table first.

use std::fmt;
use std::str::FromStr;

use serde_json::Value;
use tokio_postgres::SimpleQueryRow;

use super::own_table::OwnTable;
use super::{Catalog, CatalogError};
use crate::model::lsn::Lsn;
use crate::postgres::sql::{lsn_literal, text_literal};
use crate::postgres::target::Target;

/// The kind of operation that a journal entry records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Rows that are older than the slot were delivered.
    Snapshot,
    /// An operator decided that events will not be delivered.
    Skip,
    /// The slot was dropped, together with its undelivered events.
    DropSlot,
    /// Rows of the table were resent.
    Replay,
    /// Delivery of a table was stopped at a position (the table was set aside), or was resumed.
    SetAside,
}

impl Action {
    const ALL: [Self; 5] = [
        Self::Snapshot,
        Self::Skip,
        Self::DropSlot,
        Self::Replay,
        Self::SetAside,
    ];

    /// Returns the name of the action, as stored in the journal.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Snapshot => "snapshot",
            Self::Skip => "skip",
            Self::DropSlot => "drop slot",
            Self::Replay => "replay",
            Self::SetAside => "set aside",
        }
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Action {
    type Err = CatalogError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let found = Self::ALL.into_iter().find(|action| action.name() == text);
        found.ok_or_else(|| CatalogError::Unexpected(format!("walpost.journal.action: {text:?}")))
    }
}

/// A journal entry to be written.
#[derive(Clone, Debug)]
pub(crate) struct Entry<'e> {
    /// The pipeline that the operation affects.
    pub pipeline: &'e str,
    /// The outbox and slot of the pipeline.
    pub target: &'e Target,
    /// The kind of operation.
    pub action: Action,
    /// The operation affects events after this position.
    pub from: Option<Lsn>,
    /// The operation affects events up to this position.
    pub to: Option<Lsn>,
    /// Details as a JSON object, which never contains payloads.
    pub detail: Value,
}

impl Entry<'_> {
    /// Returns the values of the journal entry as an SQL list.
    fn values(&self) -> String {
        let lsn = |lsn: Option<Lsn>| lsn.map_or("NULL::pg_lsn".to_owned(), lsn_literal);
        let mut detail = self.detail.clone();
        if let Some(detail) = detail.as_object_mut() {
            detail.insert("version".to_owned(), VERSION.into());
        }
        format!(
            "{}, {}, {}, {}, {}, {}::jsonb",
            text_literal(self.pipeline),
            text_literal(&self.target.slot),
            text_literal(self.action.name()),
            lsn(self.from),
            lsn(self.to),
            text_literal(&detail.to_string()),
        )
    }

    /// Returns the beginning of an INSERT statement, to which the caller appends a FROM clause. The
    /// statement adds this entry once for each row that the clause returns.
    pub(super) fn insert_select(&self) -> String {
        format!("{INSERT} SELECT {}", self.values())
    }
}

/// An entry as read from the journal, with the values that the server added.
#[derive(Clone, Debug, PartialEq)]
pub struct Written {
    /// The ID of the journal entry. Later entries have higher IDs.
    pub id: i64,
    /// When the journal entry was written, in the server's text format.
    pub at: String,
    /// The kind of operation.
    pub action: Action,
    /// The operation affects events after this position.
    pub from: Option<Lsn>,
    /// The operation affects events up to this position.
    pub to: Option<Lsn>,
    /// The role that wrote the journal entry.
    pub by_role: String,
    /// Details as a JSON object.
    pub detail: Value,
}

/// The version of the format of journal entries, stored in `detail`. An entry without a version has
/// version 1.
const VERSION: u64 = 1;

/// The key under which the `detail` of a replay entry, and the member `plan` of this `detail`, list
/// the IDs of the journal entries about dropped slots that the replay covers.
pub(crate) const DROPPED_SLOTS: &str = "dropped_slots";

/// The key of a flag in the `detail` of a replay entry. The flag is set if nothing was sent because
/// an operator stated that the events had already been delivered.
pub(crate) const ALREADY_DELIVERED: &str = "already_delivered";

/// The key under which the `detail` of a replay entry, and the member `plan` of this `detail`, list
/// the IDs of the journal entries about set-aside tables that the replay covers.
pub(crate) const SET_ASIDE: &str = "set_aside";

/// The key under which the `detail` of an [`Action::DropSlot`] entry stores the publication's name.
/// If the key is present, no slot was dropped. Instead, rows may be missing because the publication
/// did not contain their table.
pub(crate) const LEFT_PUBLICATION: &str = "left_publication";

/// The beginning of the SQL statement that adds journal entries.
const INSERT: &str =
    "INSERT INTO walpost.journal (pipeline, slot, action, from_lsn, to_lsn, detail)";

/// How the IDs of new journal entries are assigned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ids {
    /// The identity column's sequence assigns the IDs.
    FromSequence,
    /// The IDs continue after the last entry's ID. Logical replication copies the journal's rows
    /// but not its sequence, so on a former subscriber the sequence returns IDs that already exist.
    AfterLast,
}

/// Maximum number of attempts to insert entries with [`Ids::AfterLast`]. An attempt fails if
/// another session concurrently inserts entries with the same IDs.
const ID_ATTEMPTS: usize = 5;

/// The columns that [`Catalog::entries`] reads.
const COLUMNS: &str = "id, at, action, from_lsn, to_lsn, by_role, detail";

impl Catalog {
    /// Adds a journal entry, and returns its ID.
    ///
    /// # Errors
    /// Returns an error if the query fails, the journal does not exist, or `sql/examine.sql`
    /// rejects the journal.
    pub(crate) async fn write_journal(&self, entry: &Entry<'_>) -> Result<i64, CatalogError> {
        let ids = self.write_journal_entries(std::slice::from_ref(entry));
        let id = ids.await?.first().copied();
        id.ok_or_else(|| CatalogError::Unexpected("walpost.journal.id: none".to_owned()))
    }

    /// Adds journal entries in one transaction, and returns their IDs. All entries must have the
    /// same slot and action.
    ///
    /// # Errors
    /// See [`Catalog::write_journal`].
    pub(super) async fn write_journal_entries(
        &self,
        entries: &[Entry<'_>],
    ) -> Result<Vec<i64>, CatalogError> {
        let mut inserted = self.insert(entries, Ids::FromSequence);
        for _ in 0..ID_ATTEMPTS {
            match inserted.await {
                // unique_violation
                Err(CatalogError::Server(error)) if error.code == "23505" => {
                    inserted = self.insert(entries, Ids::AfterLast);
                }
                written => return written,
            }
        }
        inserted.await
    }

    async fn insert(&self, entries: &[Entry<'_>], ids: Ids) -> Result<Vec<i64>, CatalogError> {
        let Some(target) = entries.first().map(|entry| entry.target) else {
            return Ok(Vec::new());
        };
        let values: Vec<_> = entries
            .iter()
            .map(|entry| format!("({})", entry.values()))
            .collect();
        let values = values.join(", ");
        let insert = match ids {
            Ids::FromSequence => format!("{INSERT} VALUES {values} RETURNING id"),
            Ids::AfterLast => format!(
                "INSERT INTO walpost.journal (id, pipeline, slot, action, from_lsn, to_lsn, detail) OVERRIDING SYSTEM VALUE \
                 SELECT last.id + row_number() OVER (), pipeline, slot, action, from_lsn, to_lsn, detail \
                 FROM (SELECT coalesce(max(id), 0) AS id FROM walpost.journal) AS last, \
                 (VALUES {values}) AS entry (pipeline, slot, action, from_lsn, to_lsn, detail) RETURNING id"
            ),
        };
        let rows = self.run_on_journal(target, &insert).await?;
        let id = |row: &SimpleQueryRow| row.get(0)?.parse().ok();
        let ids: Option<Vec<i64>> = rows.iter().map(id).collect();
        ids.ok_or_else(|| CatalogError::Unexpected("walpost.journal.id: none".to_owned()))
    }

    /// Returns the journal entries about a pipeline and its slot, oldest first.
    ///
    /// # Errors
    /// Returns an error if the query fails, or if the journal does not exist, is rejected by
    /// `sql/examine.sql` or contains an unexpected value.
    pub(crate) async fn journal(
        &self,
        pipeline: &str,
        target: &Target,
    ) -> Result<Vec<Written>, CatalogError> {
        let (pipeline, slot) = (text_literal(pipeline), text_literal(&target.slot));
        let condition = format!("j.pipeline = {pipeline} AND j.slot = {slot}");
        self.entries(target, &condition).await
    }

    /// Returns the journal entries that satisfy an SQL condition on the alias `j`, oldest first.
    pub(crate) async fn entries(
        &self,
        target: &Target,
        condition: &str,
    ) -> Result<Vec<Written>, CatalogError> {
        let sql =
            format!("SELECT {COLUMNS} FROM walpost.journal j WHERE {condition} ORDER BY j.id");
        let rows = self.run_on_journal(target, &sql).await?;
        rows.iter().map(parse_entry).collect()
    }

    async fn run_on_journal(
        &self,
        target: &Target,
        statement: &str,
    ) -> Result<Vec<SimpleQueryRow>, CatalogError> {
        let rows = self.run_on_own_table(OwnTable::Journal, target, "", statement);
        rows.await
            .map_err(|error| self.journal_error(target, error))
    }

    /// If a statement on the journal failed because the journal does not exist or because a
    /// privilege is missing, adds the remedy to the error.
    fn journal_error(&self, target: &Target, error: CatalogError) -> CatalogError {
        let error = self.with_grant(error, |role| {
            format!(
                "GRANT USAGE ON SCHEMA walpost TO {role}; GRANT SELECT, INSERT (pipeline, slot, action, from_lsn, \
                 to_lsn, detail) ON walpost.journal TO {role}"
            )
        });
        match error {
            // invalid_schema_name, undefined_table
            CatalogError::Server(server) if matches!(&*server.code, "3F000" | "42P01") => {
                CatalogError::missing_journal(target)
            }
            error => error,
        }
    }
}

fn parse_entry(row: &SimpleQueryRow) -> Result<Written, CatalogError> {
    let unexpected = |column: &str, error: &dyn fmt::Display| {
        CatalogError::Unexpected(format!("walpost.journal.{column}: {error}"))
    };
    let text = |column: &str| {
        let text = row.try_get(column)?;
        text.ok_or_else(|| unexpected(column, &"null"))
    };
    let lsn = |column: &str| -> Result<Option<Lsn>, CatalogError> {
        let read = row.try_get(column)?.map(str::parse).transpose();
        read.map_err(|error| unexpected(column, &error))
    };
    let id = text("id")?
        .parse()
        .map_err(|error| unexpected("id", &error))?;
    let detail: Value =
        serde_json::from_str(text("detail")?).map_err(|error| unexpected("detail", &error))?;
    let version = detail.get("version").map_or(Some(1), Value::as_u64);
    if version.is_none_or(|version| version > VERSION) {
        return Err(CatalogError::NewerJournal {
            id,
            version: detail["version"].to_string(),
            newest: VERSION,
        });
    }
    Ok(Written {
        id,
        at: text("at")?.to_owned(),
        action: text("action")?.parse()?,
        from: lsn("from_lsn")?,
        to: lsn("to_lsn")?,
        by_role: text("by_role")?.to_owned(),
        detail,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn action_names_match_the_check_constraint_of_the_journal() {
        let file = include_str!("../../../sql/journal.sql");
        let (_, rest) = file.split_once("CHECK (action IN (").expect("a CHECK");
        let (list, _) = rest.split_once("))").expect("its end");
        let allowed: Vec<_> = list
            .split(", ")
            .map(|text| text.trim_matches('\''))
            .collect();
        assert_eq!(allowed, Action::ALL.map(Action::name));
        for action in Action::ALL {
            assert_eq!(
                action.name().parse::<Action>().expect("one of them"),
                action
            );
        }
        assert!("drop".parse::<Action>().is_err());
    }
}
