//! Reads the present rows of the outbox table with `COPY ... TO STDOUT`, in limited memory. The
//! values have the same form as in the stream when the row is inserted, so events are mapped and
//! routed in the same way ([`Mapping`], [`Router`](crate::outbox::route::Router)).
//!
//! ```text
//! let version = catalog.table_version(&table).await?;
//! let mapping = Mapping::bind(&settings.outbox, &table.to_string(), &columns)?;
//! copy::prepare(client).await?;                          // text formats of the stream
//! client.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY").await?;
//! let locked = catalog.lock_table(&version, Statement::Select).await?;
//! let order = locked.row_order(CreatedAt::First).await?;
//! let statement = Query { order: &order, columns: &names, condition: "", .. }.statement(&locked);
//! let mut rows = catalog.copy(locked, statement).await?;
//! while let Some(copied) = rows.next().await? {
//!     router.route(&mapping, &copied.row, ...);          // copied.row is a `Row` of the mapping
//!     copied.key(0);                                     // first value of the key
//! }
//! ```
//!
//! The caller manages the transaction: rows are as of its snapshot, which can be one that was
//! exported (`SET TRANSACTION SNAPSHOT`). A [`Reader`] that is dropped before the last row leaves
//! the connection busy with the rest: drop its [`Catalog`] as well.
//!
//! Spec: PostgreSQL 18, "COPY", and 54.2.7 "COPY Operations".

use std::fmt::Write as _;
use std::pin::Pin;

use bytes::Bytes;
use futures_util::StreamExt;
use postgres_protocol::escape::{escape_identifier, escape_literal};
use tokio_postgres::{Client, CopyOutStream};

use super::table::{RowOrder, from_item};
use super::table_guard::LockedTable;
use super::{Catalog, CatalogError};
use crate::outbox::columns::{COLUMNS_MAX, Mapping, Row};
use crate::postgres::replication::TEXT_FORMAT_SETTINGS;
use crate::postgres::table::TableName;
use crate::postgres::wire::copy_text::{Lines, TextError, Values};

/// The rows and columns to read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Query<'q> {
    /// Names of the table's columns: those to which `mapping` was bound, in the same order.
    pub columns: &'q [String],
    /// The roles of the columns. Columns that it does not need are not read.
    pub mapping: &'q Mapping,
    /// The order of the rows; its columns are the key of a row.
    pub order: &'q RowOrder<'q>,
    /// An SQL condition that the rows satisfy; empty for all rows.
    pub condition: &'q str,
    /// Maximum accepted length of a row, in bytes.
    pub row_bytes_max: usize,
}

/// Why rows can't be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CopyError {
    /// The query failed, or the connection was lost.
    #[error(transparent)]
    Catalog(#[from] CatalogError),
    /// The server sends something other than rows.
    #[error("COPY of the outbox: {0}")]
    Text(#[from] TextError),
    /// A row is larger than the settings allow.
    #[error(
        "a row of the outbox has {bytes} bytes, and max_row_bytes allows {allowed}. Raise max_row_bytes"
    )]
    RowTooLarge {
        /// Its length, as sent by COPY.
        bytes: usize,
        /// `max_row_bytes`.
        allowed: usize,
    },
}

/// The rows, read one at a time.
pub(crate) struct Reader {
    stream: Pin<Box<CopyOutStream>>,
    lines: Lines,
    /// The line that was read last.
    line: Bytes,
    /// The index in a [`Row`] of each of the first values of a line; the remaining values are the
    /// key.
    slots: Vec<usize>,
    width: usize,
    row_bytes_max: usize,
}

/// One row.
#[derive(Clone, Copy)]
pub(crate) struct Copied<'r> {
    /// Its values, in the form that the mapping expects.
    pub row: Row<'r>,
    values: Values<'r>,
    mapped: usize,
}

impl<'r> Copied<'r> {
    /// Returns the value of the key's column at `index`, as text.
    ///
    /// # Panics
    /// If the key has fewer columns.
    #[must_use]
    pub(crate) fn key(&self, index: usize) -> &'r [u8] {
        // Columns of the key are not null.
        self.values.get(self.mapped + index).unwrap_or_default()
    }
}

/// Sets the session's text formats to those of the stream.
///
/// # Errors
/// The query fails.
pub(crate) async fn prepare(client: &Client) -> Result<(), CatalogError> {
    let mut sql = String::new();
    for (name, value) in TEXT_FORMAT_SETTINGS {
        let _ = write!(sql, "SET {name} = {};", escape_literal(value));
    }
    Ok(client.batch_execute(&sql).await?)
}

/// A statement that reads rows, and the layout of its values.
pub(crate) struct CopyStatement {
    sql: String,
    slots: Vec<usize>,
    width: usize,
    row_bytes_max: usize,
}

impl Query<'_> {
    /// Returns the statement, for a table that stays locked until the statement is planned.
    #[must_use]
    pub(crate) fn statement(&self, locked: &LockedTable) -> CopyStatement {
        let (sql, slots) = self.sql(locked.name());
        CopyStatement {
            sql,
            width: slots.len() + self.order.len(),
            slots,
            row_bytes_max: self.row_bytes_max,
        }
    }

    /// Returns the statement and, for each value that the mapping needs, its slot.
    fn sql(&self, table: &TableName) -> (String, Vec<usize>) {
        let (mut slots, mut wanted) = (Vec::new(), Vec::new());
        for (index, name) in self.columns.iter().enumerate() {
            if let Some(slot) = self.mapping.slot(index) {
                slots.push(slot);
                wanted.push(name.clone());
            }
        }
        wanted.extend(self.order.names().map(str::to_owned));
        let condition = Some(self.condition.to_owned()).filter(|condition| !condition.is_empty());
        let sql = statement(&wanted, table, condition.as_slice(), self.order);
        (sql, slots)
    }
}

/// Returns the statement that reads these columns of the rows that satisfy all conditions.
#[must_use]
pub(crate) fn statement(
    columns: &[String],
    table: &TableName,
    conditions: &[String],
    order: &RowOrder<'_>,
) -> String {
    let columns: Vec<_> = columns.iter().map(|name| escape_identifier(name)).collect();
    // The line feed ends a comment at the end of a condition.
    let conditions: Vec<_> = conditions.iter().map(|sql| format!("({sql}\n)")).collect();
    let filter = match conditions.is_empty() {
        true => String::new(),
        false => format!(" WHERE {}", conditions.join(" AND ")),
    };
    let order = match order.is_empty() {
        true => String::new(),
        false => format!(" ORDER BY {}", order.sql("")),
    };
    let columns = columns.join(", ");
    format!(
        "COPY (SELECT {columns} FROM {}{filter}{order}) TO STDOUT",
        from_item(table)
    )
}

impl Catalog {
    /// Converts the error of a SELECT from the table; if the privilege is missing, adds the
    /// statement that grants it.
    pub(crate) fn denied_select(
        &self,
        error: tokio_postgres::Error,
        table: &TableName,
    ) -> CatalogError {
        // The function that examines the table is in schema walpost. In English and many other
        // languages, the message ends with the schema's name.
        let is_schema = error.as_db_error().is_some_and(|error| {
            let denied = error.message().split_whitespace().next_back();
            denied == Some("walpost") && table.name != "walpost"
        });
        self.with_grant(error, |role| match is_schema {
            true => format!("GRANT USAGE ON SCHEMA walpost TO {role}"),
            false => format!("GRANT SELECT ON {table} TO {role}"),
        })
    }

    /// Reads the rows that the statement selects. The lock is released when the statement is
    /// planned.
    ///
    /// # Errors
    /// The server rejects the statement.
    pub(crate) async fn copy(
        &self,
        locked: LockedTable,
        statement: CopyStatement,
    ) -> Result<Reader, CopyError> {
        // The server replies after planning.
        let stream = self.client().copy_out(&statement.sql).await;
        let stream = stream.map_err(|error| self.denied_select(error, locked.name()))?;
        drop(locked);
        Ok(Reader {
            stream: Box::pin(stream),
            lines: Lines::default(),
            line: Bytes::new(),
            width: statement.width,
            slots: statement.slots,
            row_bytes_max: statement.row_bytes_max,
        })
    }
}

impl Reader {
    /// Returns the next row, or `None` after the last. Cancel safe.
    ///
    /// # Errors
    /// The server aborts the copy, or sends something that is not a row.
    pub(crate) async fn next(&mut self) -> Result<Option<Copied<'_>>, CopyError> {
        let Some(line) = self.stream.next().await else {
            return Ok(None);
        };
        self.line = line.map_err(CatalogError::from)?;
        let bytes = self.line.len();
        if bytes > self.row_bytes_max {
            let allowed = self.row_bytes_max;
            return Err(CopyError::RowTooLarge { bytes, allowed });
        }
        let values = self.lines.read(&self.line, self.width)?;
        let mut row = [None; COLUMNS_MAX];
        for (index, slot) in self.slots.iter().enumerate() {
            row[*slot] = values.get(index);
        }
        Ok(Some(Copied {
            row,
            values,
            mapped: self.slots.len(),
        }))
    }
}

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outbox::columns::TableColumn;
    use crate::outbox::settings::OutboxSettings;

    #[test]
    fn reads_only_what_is_needed_in_order() {
        let names = [
            "id",
            "type",
            "payload",
            "aggregateid",
            "aggregatetype",
            "x\"y",
        ]
        .map(str::to_owned)
        .to_vec();
        let columns: Vec<_> = names
            .iter()
            .map(|name| TableColumn { name, type_oid: 25 })
            .collect();
        let mapping = Mapping::bind(&OutboxSettings::default(), "t", &columns).expect("binds");
        let order = RowOrder::from_columns(
            &(),
            [("created_at".to_owned(), 1184), ("x\"y".to_owned(), 25)],
        );
        let table = "public.\"Out box\"".parse().expect("a table");
        let query = Query {
            columns: &names,
            mapping: &mapping,
            order: &order,
            condition: "type = 'a' -- why",
            row_bytes_max: 1,
        };
        let (sql, slots) = query.sql(&table);
        assert_eq!(
            sql,
            "COPY (SELECT \"id\", \"payload\", \"aggregateid\", \"aggregatetype\", \"created_at\", \"x\"\"y\" \
             FROM \"public\".\"Out box\" AS walpost_row WHERE (type = 'a' -- why\n) ORDER BY \"created_at\", \"x\"\"y\") TO STDOUT"
        );
        let expected: Vec<_> = [0, 2, 3, 4].map(|index| mapping.slot(index)).to_vec();
        assert_eq!(slots.into_iter().map(Some).collect::<Vec<_>>(), expected);
        let all = Query {
            condition: "",
            ..query
        };
        assert!(!all.sql(&table).0.contains("WHERE"));
    }
}
