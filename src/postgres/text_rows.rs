//! The rows of a query that somebody else has written, each value as text.

use std::collections::BTreeMap;
use std::time::Duration;

use bytesize::ByteSize;
use futures_util::TryStreamExt;
use tokio::time::timeout;
use tokio_postgres::{Client, SimpleQueryMessage};

use super::catalog::{Catalog, CatalogError};
use super::connect::conninfo::Conninfo;

/// The most rows that are accepted: each becomes a pipeline, with a thread and a slot of its own.
const ROWS_MAX: usize = 10_000;
/// The most memory that an answer may take, by [`VALUE_BYTES`] and the text of each value and of its column's name.
const ANSWER_BYTES_MAX: usize = 16 << 20;
/// What a value takes in memory besides its text.
const VALUE_BYTES: usize = 64;

/// Values by the names of their columns; `None` is NULL.
pub(crate) type TextRow = BTreeMap<String, Option<String>>;

/// The rows, and what else was seen.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TextRows {
    pub rows: Vec<TextRow>,
    /// Whoever owns what the query reads can have code run as a superuser.
    pub as_superuser: bool,
}

/// There are no rows.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TextRowsError {
    #[error(transparent)]
    Catalog(#[from] CatalogError),
    /// PostgreSQL's own words for it name the table, but not why it isn't found.
    #[error("{0}. Tables are written with their schema here, as in public.shards")]
    NoTable(CatalogError),
    #[error("no answer within {0:?}")]
    Slow(Duration),
    #[error(
        "the query returns more than {0} rows, and each would be a pipeline. Return fewer, with WHERE or LIMIT"
    )]
    TooManyRows(usize),
    #[error(
        "the query returns more than fits into {0} of memory. Return only the columns that the template uses, or fewer rows"
    )]
    TooLarge(ByteSize),
    #[error("two columns of the query are called {0:?}. Give each a name of its own: ... AS name")]
    SameName(String),
}

/// Asks for the rows of a query, in a transaction that writes nothing. As in every session of ours nothing but pg_catalog is in
/// `search_path`.
///
/// # Errors
/// They have not come within `limit`, or not at all.
pub(crate) async fn text_rows(
    conninfo: &Conninfo,
    query: &str,
    limit: Duration,
) -> Result<TextRows, TextRowsError> {
    let asked = async {
        let catalog = Catalog::open(conninfo).await?;
        let client = catalog.client();
        let question = "SELECT current_setting('is_superuser') = 'on'";
        let row = client.query_one(question, &[]).await;
        let as_superuser = row.and_then(|row| row.try_get(0)).map_err(catalog_error)?;
        let begin = format!(
            "BEGIN READ ONLY; SET LOCAL statement_timeout = {}",
            limit.as_millis()
        );
        client.batch_execute(&begin).await.map_err(catalog_error)?;
        let rows = read_rows(client, query).await;
        // An answer that is too long is still being sent: closing the connection ends it.
        if !matches!(
            rows,
            Err(TextRowsError::TooManyRows(_) | TextRowsError::TooLarge(_))
        ) {
            // The server's log is spared a session that ends amid a transaction. Where that fails, the answer says why.
            let _ = client.batch_execute("ROLLBACK").await;
        }
        let rows = rows?;
        Ok(TextRows { rows, as_superuser })
    };
    timeout(limit, asked)
        .await
        .unwrap_or(Err(TextRowsError::Slow(limit)))
}

/// Reads rows as they arrive, so that an answer without end is given up and not kept.
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
        if bytes > ANSWER_BYTES_MAX {
            return Err(TextRowsError::TooLarge(ByteSize::b(
                ANSWER_BYTES_MAX as u64,
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
