//! The journal: what was done to a pipeline that the write-ahead log can't tell, in a table that
//! `sql/journal.sql` makes. Entries are added, never changed.

use std::fmt;
use std::str::FromStr;

use serde_json::Value;
use tokio_postgres::Row;

use super::catalog::{Catalog, CatalogError};
use super::lsn::Lsn;

/// What was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Rows that are older than the slot were delivered.
    Snapshot,
    /// A person decided that events are not to be delivered.
    Skip,
    /// The slot was given up, and with it what it had not delivered.
    LetGo,
    /// Rows of the table were sent again.
    Replay,
}

impl Action {
    const ALL: [Self; 4] = [Self::Snapshot, Self::Skip, Self::LetGo, Self::Replay];

    /// As the table has it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Snapshot => "snapshot",
            Self::Skip => "skip",
            Self::LetGo => "let go",
            Self::Replay => "replay",
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

/// What is to be written.
#[derive(Clone, Debug)]
pub struct Entry<'e> {
    /// The pipeline it was done to.
    pub pipeline: &'e str,
    /// Its slot.
    pub slot: &'e str,
    /// What was done.
    pub action: Action,
    /// It was done to what is after here,
    pub from: Option<Lsn>,
    /// up to here.
    pub to: Option<Lsn>,
    /// More about it: a JSON object, without payloads.
    pub detail: Value,
}

/// What was written, with what the server added.
#[derive(Clone, Debug, PartialEq)]
pub struct Written {
    /// Rises from entry to entry.
    pub id: i64,
    /// When, as the server prints it.
    pub at: String,
    /// What was done.
    pub action: Action,
    /// It was done to what is after here,
    pub from: Option<Lsn>,
    /// up to here.
    pub to: Option<Lsn>,
    /// Who did it.
    pub by_role: String,
    /// More about it.
    pub detail: Value,
}

/// Read with [`Catalog::entries`].
const COLUMNS: &str = "id, at::text, action, from_lsn::text, to_lsn::text, by_role, detail::text";

impl Catalog {
    /// Adds an entry, and returns its id.
    ///
    /// # Errors
    /// The server can't be asked, or the journal is not there.
    pub async fn write_journal(&self, entry: &Entry<'_>) -> Result<i64, CatalogError> {
        let lsn = |lsn: Option<Lsn>| lsn.map(|lsn| lsn.to_string());
        let written = self
            .client()
            .query_one(
                "INSERT INTO walpost.journal (pipeline, slot, action, from_lsn, to_lsn, detail) \
                 VALUES ($1, $2, $3, $4::text::pg_lsn, $5::text::pg_lsn, $6::text::jsonb) RETURNING id",
                &[
                    &entry.pipeline,
                    &entry.slot,
                    &entry.action.name(),
                    &lsn(entry.from),
                    &lsn(entry.to),
                    &entry.detail.to_string(),
                ],
            )
            .await;
        match written {
            Ok(row) => Ok(row.try_get(0)?),
            Err(error) => Err(self.journal_error(error)),
        }
    }

    /// The entries about a pipeline with a slot, in the order in which they were written.
    ///
    /// # Errors
    /// The server can't be asked, or the journal is not there or has something else in it.
    pub async fn journal(&self, pipeline: &str, slot: &str) -> Result<Vec<Written>, CatalogError> {
        self.entries("j.pipeline = $1 AND j.slot = $2", &[&pipeline, &slot])
            .await
    }

    /// The entries `j` that fulfil a condition, in the order in which they were written.
    pub(super) async fn entries(
        &self,
        condition: &str,
        parameters: &[&(dyn tokio_postgres::types::ToSql + Sync)],
    ) -> Result<Vec<Written>, CatalogError> {
        let sql =
            format!("SELECT {COLUMNS} FROM walpost.journal j WHERE {condition} ORDER BY j.id");
        match self.client().query(&sql, parameters).await {
            Ok(rows) => rows.iter().map(written).collect(),
            Err(error) => Err(self.journal_error(error)),
        }
    }

    /// With the command that mends it, where one would.
    fn journal_error(&self, error: tokio_postgres::Error) -> CatalogError {
        let error = self.with_grant(error, |role| {
            format!(
                "GRANT USAGE ON SCHEMA walpost TO {role}; GRANT SELECT, INSERT (pipeline, slot, action, from_lsn, \
                 to_lsn, detail) ON walpost.journal TO {role}"
            )
        });
        match error {
            // invalid_schema_name, undefined_table
            CatalogError::Server(server) if matches!(&*server.code, "3F000" | "42P01") => {
                CatalogError::NoJournal
            }
            error => error,
        }
    }
}

fn written(row: &Row) -> Result<Written, CatalogError> {
    let lsn = |column: usize| -> Result<Option<Lsn>, CatalogError> {
        let text: Option<String> = row.try_get(column)?;
        let read = text.map(|text| text.parse()).transpose();
        read.map_err(|error| CatalogError::Unexpected(format!("walpost.journal: {error}")))
    };
    Ok(Written {
        id: row.try_get(0)?,
        at: row.try_get(1)?,
        action: row.try_get::<_, &str>(2)?.parse()?,
        from: lsn(3)?,
        to: lsn(4)?,
        by_role: row.try_get(5)?,
        detail: serde_json::from_str(row.try_get(6)?).map_err(|error| {
            CatalogError::Unexpected(format!("walpost.journal.detail: {error}"))
        })?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn actions_are_those_that_the_table_allows() {
        let file = include_str!("../../sql/journal.sql");
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
