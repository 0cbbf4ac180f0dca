//! Runs a user-supplied query and returns its rows, with each value as text.

use std::collections::BTreeMap;
use std::time::Duration;

use bytesize::ByteSize;
use futures_util::TryStreamExt;
use tokio::time::timeout;
use tokio_postgres::{Client, SimpleQueryMessage};

use super::catalog::{Catalog, CatalogError};
use super::connect::conninfo::Conninfo;

/// Maximum number of rows. Each row becomes a pipeline that has its own thread and slot.
const ROWS_MAX: usize = 10_000;
/// Maximum size of a result. Each value counts as the length of its text and of its column's name,
/// plus [`VALUE_BYTES`].
const RESULT_BYTES_MAX: usize = 16 << 20;
/// Estimated memory for a value in addition to its text.
const VALUE_BYTES: usize = 64;

/// The values of a row, by column name. A null value is `None`.
pub(crate) type TextRow = BTreeMap<String, Option<String>>;

/// The rows that a query returned, and the privileges with which it ran.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TextRows {
    pub rows: Vec<TextRow>,
    /// Whether the query ran as a superuser. If so, the owners of objects that it reads could run
    /// code as a superuser.
    pub as_superuser: bool,
}

/// The reason why a query did not return usable rows.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TextRowsError {
    #[error(transparent)]
    Catalog(#[from] CatalogError),
    /// The table was not found. Its name must be qualified with the schema, because `search_path`
    /// excludes other schemas. PostgreSQL's message does not mention this.
    #[error("{0}. Qualify the table with its schema, as in public.shards")]
    NoTable(CatalogError),
    #[error("no response within {0:?}")]
    Slow(Duration),
    #[error(
        "the query returns more than {0} rows, and each row would become a pipeline. Return fewer rows, with WHERE or LIMIT"
    )]
    TooManyRows(usize),
    #[error(
        "the query result requires more than {0} of memory. Return only the columns that the template uses, or fewer rows"
    )]
    TooLarge(ByteSize),
    #[error(
        "two columns of the query are named {0:?}. Give each column a different name: ... AS name"
    )]
    SameName(String),
}

/// Runs a query in a read-only transaction and returns its rows. As in all of Walpost's sessions,
/// `search_path` contains only pg_catalog and pg_temp.
///
/// # Errors
/// Returns an error if the query fails or does not finish within `limit`.
pub(crate) async fn text_rows(
    conninfo: &Conninfo,
    query: &str,
    limit: Duration,
) -> Result<TextRows, TextRowsError> {
    let rows = async {
        let catalog = Catalog::open(conninfo).await?;
        let client = catalog.client();
        let superuser_query = "SELECT current_setting('is_superuser') = 'on'";
        let row = client.query_one(superuser_query, &[]).await;
        let as_superuser = row.and_then(|row| row.try_get(0)).map_err(catalog_error)?;
        let begin = format!(
            "BEGIN READ ONLY; SET LOCAL statement_timeout = {}",
            limit.as_millis()
        );
        client.batch_execute(&begin).await.map_err(catalog_error)?;
        let rows = read_rows(client, query).await;
        // If the result is too large, the server is still sending it, and ROLLBACK would have to
        // wait. Closing the connection makes the server stop sending.
        if !matches!(
            rows,
            Err(TextRowsError::TooManyRows(_) | TextRowsError::TooLarge(_))
        ) {
            // Without ROLLBACK, the server would log that the session ended inside a transaction.
            // Errors are ignored: if the connection is lost, reading the rows has already failed.
            let _ = client.batch_execute("ROLLBACK").await;
        }
        let rows = rows?;
        Ok(TextRows { rows, as_superuser })
    };
    timeout(limit, rows)
        .await
        .unwrap_or(Err(TextRowsError::Slow(limit)))
}

/// Reads rows as they arrive and stops at the limits, so that an endless result does not exhaust
/// memory.
async fn read_rows(client: &Client, query: &str) -> Result<Vec<TextRow>, TextRowsError> {
    let stream = client.simple_query_raw(query).await.map_err(query_error)?;
    let mut stream = std::pin::pin!(stream);
    let mut rows = Vec::new();
    let mut bytes = 0;
    while let Some(message) = stream.try_next().await.map_err(query_error)? {
        let SimpleQueryMessage::Row(row) = message else {
            continue;
        };
        if rows.len() == ROWS_MAX {
            return Err(TextRowsError::TooManyRows(ROWS_MAX));
        }
        for (at, column) in row.columns().iter().enumerate() {
            let value = row.try_get(at).map_err(catalog_error)?;
            bytes += VALUE_BYTES + column.name().len() + value.map_or(0, str::len);
        }
        if bytes > RESULT_BYTES_MAX {
            return Err(TextRowsError::TooLarge(ByteSize::b(
                RESULT_BYTES_MAX as u64,
            )));
        }
        rows.push(text_row(&row)?);
    }
    Ok(rows)
}

fn query_error(error: tokio_postgres::Error) -> TextRowsError {
    match catalog_error(error) {
        // undefined_table
        CatalogError::Server(error) if error.code == "42P01" => {
            TextRowsError::NoTable(CatalogError::Server(error))
        }
        error => error.into(),
    }
}

fn catalog_error(error: tokio_postgres::Error) -> CatalogError {
    error.into()
}

fn text_row(row: &tokio_postgres::SimpleQueryRow) -> Result<TextRow, TextRowsError> {
    let mut values = TextRow::new();
    for (at, column) in row.columns().iter().enumerate() {
        let value = row.try_get(at).map_err(catalog_error)?;
        let name = column.name().to_owned();
        if values.insert(name, value.map(str::to_owned)).is_some() {
            return Err(TextRowsError::SameName(column.name().to_owned()));
        }
    }
    Ok(values)
}
