//! Reads the current rows of the outbox table with `COPY ... TO STDOUT`, using bounded memory. The
//! values have the same text format as in the replication stream, so rows are mapped and routed in
//! the same way ([`Mapping`], [`Router`](crate::outbox::route::Router)).
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
//! The caller manages the transaction. The rows are the ones visible in its snapshot, which can be
//! an exported snapshot (`SET TRANSACTION SNAPSHOT`). If a [`RowReader`] is dropped before the last
//! row, the server is still sending the remaining rows, so drop the [`Catalog`] as well to close
//! the connection.
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
    /// The names of the columns to which `mapping` was bound, in the order used for binding.
    pub columns: &'q [String],
    /// The mapping of columns to the parts of an event. Columns that the mapping does not use are
    /// not read.
    pub mapping: &'q Mapping,
    /// The sort order of the rows. The columns of the sort order form the key of each row.
    pub order: &'q RowOrder<'q>,
    /// An SQL condition that selects the rows to read; empty to read all rows.
    pub condition: &'q str,
    /// Maximum accepted length of a row, in bytes.
    pub row_bytes_max: usize,
}

/// An error while reading rows.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CopyError {
    /// The query failed, or the connection was lost.
    #[error(transparent)]
    Catalog(#[from] CatalogError),
    /// The server sent data that is not a row in COPY's text format.
    #[error("failed to decode the output of COPY: {0}")]
    Text(#[from] TextError),
    /// A row is larger than the settings allow.
    #[error(
        "a row of the outbox is {bytes} bytes long, but max_row_bytes is {allowed}. Raise max_row_bytes"
    )]
    RowTooLarge {
        /// The length of the row in COPY's text format.
        bytes: usize,
        /// `max_row_bytes`.
        allowed: usize,
    },
}

/// Reads rows one at a time.
pub(crate) struct RowReader {
    stream: Pin<Box<CopyOutStream>>,
    lines: Lines,
    /// The most recently read line.
    line: Bytes,
    /// For each value that the mapping uses, the index of the value in [`Row`]. These values come
    /// first in each line, followed by the values of the key columns.
    slots: Vec<usize>,
    width: usize,
    row_bytes_max: usize,
}

/// A row returned by [`RowReader::next`].
#[derive(Clone, Copy)]
pub(crate) struct CopiedRow<'r> {
    /// The values of the row, in the form that the mapping expects.
    pub row: Row<'r>,
    values: Values<'r>,
    mapped: usize,
}

impl<'r> CopiedRow<'r> {
    /// Returns the value of the key column at `index`, as text.
    ///
    /// # Panics
    /// Panics if the key has no column at `index`.
    #[must_use]
    pub(crate) fn key(&self, index: usize) -> &'r [u8] {
        // Key columns are NOT NULL.
        self.values.get(self.mapped + index).unwrap_or_default()
    }
}

/// Configures the session to use the same text formats as the replication stream.
///
/// # Errors
/// Returns an error if the query fails.
pub(crate) async fn prepare(client: &Client) -> Result<(), CatalogError> {
    let mut sql = String::new();
    for (name, value) in TEXT_FORMAT_SETTINGS {
        let _ = write!(sql, "SET {name} = {};", escape_literal(value));
    }
    Ok(client.batch_execute(&sql).await?)
}

/// A COPY statement, and the layout of the values in each line.
pub(crate) struct CopyStatement {
    sql: String,
    slots: Vec<usize>,
    width: usize,
    row_bytes_max: usize,
}

impl Query<'_> {
    /// Returns the statement for a table. The table must stay locked until the statement is
    /// planned.
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

    /// Returns the statement and, for each column that the mapping uses, the index of its value in
    /// [`Row`].
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

/// Returns the COPY statement for the given columns. The statement reads only the rows that satisfy
/// every condition in `conditions`.
#[must_use]
pub(crate) fn statement(
    columns: &[String],
    table: &TableName,
    conditions: &[String],
    order: &RowOrder<'_>,
) -> String {
    let columns: Vec<_> = columns.iter().map(|name| escape_identifier(name)).collect();
    // A condition may end with an SQL comment, which the line feed terminates.
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
    /// Converts an error from a SELECT on the table to a [`CatalogError`]. If a privilege is
    /// missing, adds a hint with the statement that grants it.
    pub(crate) fn denied_select(
        &self,
        error: tokio_postgres::Error,
        table: &TableName,
    ) -> CatalogError {
        // The missing privilege may be USAGE on schema walpost, which contains the function that
        // examines the table. In that case, the message ends with the schema's name, in English and
        // in many other languages.
        let is_schema = error.as_db_error().is_some_and(|error| {
            let denied = error.message().split_whitespace().next_back();
            denied == Some("walpost") && table.name != "walpost"
        });
        self.with_grant(error, |role| match is_schema {
            true => format!("GRANT USAGE ON SCHEMA walpost TO {role}"),
            false => format!("GRANT SELECT ON {table} TO {role}"),
        })
    }

    /// Reads the rows that the statement selects. Releases the lock as soon as the server has
    /// planned the statement.
    ///
    /// # Errors
    /// Returns an error if the server rejects the statement.
    pub(crate) async fn copy(
        &self,
        locked: LockedTable,
        statement: CopyStatement,
    ) -> Result<RowReader, CopyError> {
        let table = locked.name().clone();
        // The server responds only after it has planned the statement.
        let planned = self.client().copy_out(&statement.sql);
        let stream = locked.until_planned(planned).await?;
        let stream = stream.map_err(|error| self.denied_select(error, &table))?;
        Ok(RowReader {
            stream: Box::pin(stream),
            lines: Lines::default(),
            line: Bytes::new(),
            width: statement.width,
            slots: statement.slots,
            row_bytes_max: statement.row_bytes_max,
        })
    }
}

impl RowReader {
    /// Returns the next row, or `None` after the last. Cancel safe.
    ///
    /// # Errors
    /// Returns an error if the server aborts the COPY or sends data that is not a row.
    pub(crate) async fn next(&mut self) -> Result<Option<CopiedRow<'_>>, CopyError> {
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
        Ok(Some(CopiedRow {
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
    fn selects_the_mapped_and_key_columns_and_sorts_rows_by_the_key() {
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
            condition: "type='order' -- comment",
            row_bytes_max: 1,
        };
        let (sql, slots) = query.sql(&table);
        assert_eq!(
            sql,
            "COPY (SELECT \"id\", \"payload\", \"aggregateid\", \"aggregatetype\", \"created_at\", \"x\"\"y\" \
             FROM \"public\".\"Out box\" AS walpost_row WHERE (type='order' -- comment\n) ORDER BY \"created_at\", \"x\"\"y\") TO STDOUT"
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
