//! Rows of the outbox table as they are now, with `COPY ... TO STDOUT`, in bounded memory: what
//! the stream gives for a row when it is inserted, this gives for a row that is there. So events are
//! mapped and routed in one way ([`Mapping`], [`Router`](crate::outbox::route::Router)).
//!
//! ```text
//! let key = catalog.key(&table).await?.ok_or(...)?;      // what rows are ordered by
//! let mapping = Mapping::bind(&settings.outbox, &table.to_string(), &columns)?;
//! copy::prepare(client).await?;                          // texts as in the stream
//! client.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY").await?;
//! let query = Query { table: &table, columns: &names, mapping: &mapping, key: &key, condition: "", limit: bytes };
//! let mut rows = catalog.copy(&query).await?;
//! while let Some(copied) = rows.next().await? {
//!     router.route(&mapping, &copied.row, ...);          // copied.row is a `Row` of the mapping
//!     copied.key(0);                                     // the first value of the key, to go on behind
//! }
//! ```
//!
//! The transaction is the caller's: rows are as of its snapshot, which can be one that was exported
//! (`SET TRANSACTION SNAPSHOT`). A [`Reader`] that is dropped before its end leaves the connection
//! busy with the rest: drop its [`Catalog`] too.
//!
//! Spec: PostgreSQL 18, "COPY", and 54.2.7 "COPY Operations".

use std::fmt::Write as _;
use std::pin::Pin;

use bytes::Bytes;
use futures_util::StreamExt;
use postgres_protocol::escape::{escape_identifier, escape_literal};
use tokio_postgres::{Client, CopyOutStream};

use super::{Catalog, CatalogError};
use crate::outbox::columns::{COLUMNS_MAX, Mapping, Row};
use crate::postgres::replication::TEXT_FORMS;
use crate::postgres::table::TableName;
use crate::postgres::wire::copy_text::{Lines, TextError, Values};

/// What rows are ordered by, and told apart by: columns that are never null.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key {
    /// Their names, most significant first.
    pub columns: Vec<String>,
    /// For each, the schema that has the operators of its order: not pg_catalog for types of extensions.
    schemas: Vec<String>,
}

const PG_CATALOG: &str = "pg_catalog";

impl Key {
    /// Of columns whose types have their operators in pg_catalog.
    #[cfg(test)]
    pub(crate) fn of(columns: Vec<String>) -> Self {
        let schemas = vec![PG_CATALOG.to_owned(); columns.len()];
        Self { columns, schemas }
    }

    /// The condition for rows whose key compares so with these values: `>` is behind it.
    #[must_use]
    pub fn compared(&self, operator: &str, values: &[String]) -> String {
        let literals: Vec<_> = values.iter().map(|value| escape_literal(value)).collect();
        if self.schemas.iter().all(|schema| schema == PG_CATALOG) {
            return format!(
                "({}) {operator} ({})",
                list(&self.columns),
                literals.join(", ")
            );
        }
        // Of the first columns that differ the first decides.
        let strict = operator.trim_end_matches('=');
        let mut condition = String::new();
        let columns = self.columns.iter().zip(&self.schemas).zip(literals);
        for ((column, schema), literal) in columns.rev() {
            let (column, schema) = (escape_identifier(column), escape_identifier(schema));
            let compared =
                |operator: &str| format!("{column} OPERATOR({schema}.{operator}) {literal}");
            condition = match condition.as_str() {
                "" => compared(operator),
                rest => format!("({} OR {} AND {rest})", compared(strict), compared("=")),
            };
        }
        condition
    }

    /// What stands behind ORDER BY; `direction` is empty, or ` DESC` for the other way round.
    #[must_use]
    pub fn order(&self, direction: &str) -> String {
        let columns = self.columns.iter();
        let columns: Vec<_> = columns
            .map(|name| format!("{}{direction}", escape_identifier(name)))
            .collect();
        columns.join(", ")
    }

    /// The values as texts, for SELECT.
    #[must_use]
    pub fn texts(&self) -> String {
        let columns = self.columns.iter();
        let columns: Vec<_> = columns
            .map(|name| format!("{}::text", escape_identifier(name)))
            .collect();
        columns.join(", ")
    }
}

/// Which rows, and what of them.
#[derive(Clone, Copy, Debug)]
pub struct Query<'q> {
    /// The table.
    pub table: &'q TableName,
    /// Names of its columns: those that `mapping` was bound to, in the same order.
    pub columns: &'q [String],
    /// What they mean. Columns that it does not need are not read.
    pub mapping: &'q Mapping,
    /// The order.
    pub key: &'q Key,
    /// A condition in SQL that rows fulfil; empty for all rows.
    pub condition: &'q str,
    /// The longest row that is accepted, in bytes.
    pub row_bytes_max: usize,
}

/// Rows can't be read.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// The server refuses, or is gone.
    #[error(transparent)]
    Catalog(#[from] CatalogError),
    /// It sends something else than rows.
    #[error("COPY of the outbox: {0}")]
    Text(#[from] TextError),
    /// A row is larger than the settings allow.
    #[error(
        "a row of the outbox has {bytes} bytes, and max_row_bytes allows {allowed}. Raise max_row_bytes"
    )]
    RowTooLarge {
        /// As COPY sends it.
        bytes: usize,
        /// `max_row_bytes`
        allowed: usize,
    },
}

/// The rows, one after the other.
pub struct Reader {
    stream: Pin<Box<CopyOutStream>>,
    lines: Lines,
    /// The line that was read last.
    line: Bytes,
    /// For each of the first values of a line, where it belongs in a [`Row`]; the rest is the key.
    slots: Vec<usize>,
    width: usize,
    row_bytes_max: usize,
}

/// One row.
#[derive(Clone, Copy)]
pub struct Copied<'r> {
    /// Its values, as the mapping wants them.
    pub row: Row<'r>,
    /// How long it was on the wire.
    pub bytes: usize,
    values: Values<'r>,
    mapped: usize,
}

impl<'r> Copied<'r> {
    /// The value of the key's column at `index`, as text.
    ///
    /// # Panics
    /// The key has fewer columns.
    #[must_use]
    pub fn key(&self, index: usize) -> &'r [u8] {
        // Its columns are not null.
        self.values.get(self.mapped + index).unwrap_or_default()
    }
}

/// Makes the session's texts those of the stream.
///
/// # Errors
/// The server can't be asked.
pub async fn prepare(client: &Client) -> Result<(), CatalogError> {
    let mut sql = String::new();
    for (name, value) in TEXT_FORMS {
        let _ = write!(sql, "SET {name} = {};", escape_literal(value));
    }
    Ok(client.batch_execute(&sql).await?)
}

impl Query<'_> {
    /// The statement, and for each value that the mapping needs its slot.
    fn sql(&self) -> (String, Vec<usize>) {
        let (mut slots, mut wanted) = (Vec::new(), Vec::new());
        for (index, name) in self.columns.iter().enumerate() {
            if let Some(slot) = self.mapping.slot(index) {
                slots.push(slot);
                wanted.push(name.clone());
            }
        }
        wanted.extend_from_slice(&self.key.columns);
        let condition = match self.condition {
            "" => String::new(),
            // A comment at its end ends with the line.
            condition => format!(" WHERE ({condition}\n)"),
        };
        let sql = format!(
            "COPY (SELECT {} FROM {}{condition} ORDER BY {}) TO STDOUT",
            list(&wanted),
            self.table.quoted(),
            self.key.order("")
        );
        (sql, slots)
    }
}

/// Names as SQL has them.
fn list(names: &[String]) -> String {
    let names: Vec<_> = names.iter().map(|name| escape_identifier(name)).collect();
    names.join(", ")
}

impl Catalog {
    /// What rows of the table can be ordered by: the time of their transaction, where there is a
    /// column `created_at` for it, and the primary key; nothing without a primary key.
    ///
    /// # Errors
    /// The server can't be asked.
    pub async fn key(&self, table: &TableName) -> Result<Option<Key>, CatalogError> {
        let rows = self
            .client()
            .query(
                "SELECT a.attname::text, coalesce((SELECT o.nspname::text FROM pg_opclass p \
                 JOIN pg_am m ON m.oid = p.opcmethod AND m.amname = 'btree' \
                 JOIN pg_amop s ON s.amopfamily = p.opcfamily AND s.amoplefttype = p.opcintype \
                 AND s.amoprighttype = p.opcintype AND s.amopstrategy = 5 \
                 JOIN pg_operator g ON g.oid = s.amopopr JOIN pg_namespace o ON o.oid = g.oprnamespace \
                 WHERE p.opcdefault AND p.opcintype = coalesce((SELECT nullif(typbasetype, 0) FROM pg_type t \
                 WHERE t.oid = a.atttypid), a.atttypid)), 'pg_catalog') FROM pg_class c \
                 JOIN pg_namespace n ON n.oid = c.relnamespace \
                 JOIN pg_index i ON i.indrelid = c.oid AND i.indisprimary \
                 CROSS JOIN LATERAL unnest(i.indkey) WITH ORDINALITY AS k (number, place) \
                 JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = k.number \
                 WHERE n.nspname = $1 AND c.relname = $2 ORDER BY k.place",
                &[&table.schema, &table.name],
            )
            .await?;
        let (mut columns, mut schemas) = (Vec::new(), Vec::new());
        for row in &rows {
            columns.push(row.try_get::<_, String>(0)?);
            schemas.push(row.try_get::<_, String>(1)?);
        }
        if columns.is_empty() {
            return Ok(None);
        }
        let created_at = self
            .is_there(
                "FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
                 JOIN pg_attribute a ON a.attrelid = c.oid \
                 WHERE n.nspname = $1 AND c.relname = $2 AND a.attname = 'created_at' AND a.attnotnull \
                 AND a.atttypid IN ('timestamptz'::regtype, 'timestamp'::regtype)",
                &[&table.schema, &table.name],
            )
            .await?;
        if created_at {
            if let Some(at) = columns.iter().position(|column| column == "created_at") {
                columns.remove(at);
                schemas.remove(at);
            }
            columns.insert(0, "created_at".to_owned());
            schemas.insert(0, PG_CATALOG.to_owned());
        }
        Ok(Some(Key { columns, schemas }))
    }

    /// The error of a SELECT from the table, with the statement that fixes it if we lack the right.
    pub fn denied_select(&self, error: tokio_postgres::Error, table: &TableName) -> CatalogError {
        self.with_grant(error, |role| format!("GRANT SELECT ON {table} TO {role}"))
    }

    /// Reads the rows that `query` asks for.
    ///
    /// # Errors
    /// The server refuses.
    pub async fn copy(&self, query: &Query<'_>) -> Result<Reader, CopyError> {
        let (sql, slots) = query.sql();
        let stream = self.client().copy_out(&sql).await;
        let stream = stream.map_err(|error| self.denied_select(error, query.table))?;
        Ok(Reader {
            stream: Box::pin(stream),
            lines: Lines::default(),
            line: Bytes::new(),
            width: slots.len() + query.key.columns.len(),
            slots,
            row_bytes_max: query.row_bytes_max,
        })
    }
}

impl Reader {
    /// The next row; nothing behind the last. Cancel safe.
    ///
    /// # Errors
    /// The server breaks off, or sends what is no row.
    pub async fn next(&mut self) -> Result<Option<Copied<'_>>, CopyError> {
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
            bytes,
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
    fn what_is_needed_is_read_in_order_and_no_more() {
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
        let key = Key::of(vec!["created_at".to_owned(), "x\"y".to_owned()]);
        let table = "public.\"Out box\"".parse().expect("a table");
        let query = Query {
            table: &table,
            columns: &names,
            mapping: &mapping,
            key: &key,
            condition: "type = 'a' -- why",
            row_bytes_max: 1,
        };
        let (sql, slots) = query.sql();
        assert_eq!(
            sql,
            "COPY (SELECT \"id\", \"payload\", \"aggregateid\", \"aggregatetype\", \"created_at\", \"x\"\"y\" \
             FROM \"public\".\"Out box\" WHERE (type = 'a' -- why\n) ORDER BY \"created_at\", \"x\"\"y\") TO STDOUT"
        );
        let expected: Vec<_> = [0, 2, 3, 4].map(|index| mapping.slot(index)).to_vec();
        assert_eq!(slots.into_iter().map(Some).collect::<Vec<_>>(), expected);
        let all = Query {
            condition: "",
            ..query
        };
        assert!(!all.sql().0.contains("WHERE"));
        assert_eq!(
            key.compared(
                ">",
                &["2025-01-01 00:00:00+00".to_owned(), "it's".to_owned()]
            ),
            "(\"created_at\", \"x\"\"y\") > ('2025-01-01 00:00:00+00', 'it''s')"
        );
    }

    #[test]
    fn keys_of_other_types_are_compared_by_their_own_operators() {
        let key = Key {
            columns: vec!["t".to_owned(), "id".to_owned()],
            schemas: vec!["pg_catalog".to_owned(), "My".to_owned()],
        };
        assert_eq!(
            key.compared(">=", &["1".to_owned(), "a".to_owned()]),
            "(\"t\" OPERATOR(\"pg_catalog\".>) '1' OR \"t\" OPERATOR(\"pg_catalog\".=) '1' AND \"id\" OPERATOR(\"My\".>=) 'a')"
        );
    }
}
