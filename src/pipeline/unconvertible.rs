//! Locates a row that the server can't convert to UTF-8, and the table that contains the row. The
//! server's error identifies neither the row nor the table, so the row is read again without
//! conversion.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::timeout;
use tracing::debug;

use super::database::Database;
use super::decode::error::CoreError;
use super::error::PipelineError;
use super::settings::PipelineSettings;
use crate::model::lsn::{Lsn, Position};
use crate::postgres::replication::{Connection, ConnectionError};
use crate::postgres::table::TableName;
use crate::postgres::target::Outbox;
use crate::postgres::wire::pgoutput::Message;

/// How long to wait for the server to report why it ended the stream.
const REASON_TIMEOUT: Duration = Duration::from_secs(1);

/// Returns the error with which the server ended the stream before any data was processed, or
/// `None` if the server does not send one. Discards the data received on `connection`.
pub(super) async fn stream_end_error(connection: &mut Connection) -> Option<PipelineError> {
    let mut rows = Rows::default();
    let preview = connection.preview(Lsn(u64::MAX), REASON_TIMEOUT, |data| {
        rows.message(data);
        true
    });
    match timeout(REASON_TIMEOUT, preview).await {
        Ok(Err(error)) if error.is_encoding_error() => {
            let error = CoreError::Unconvertible {
                at: rows.next.unwrap_or_default().to_string(),
                table: None,
                error: error.to_string(),
            };
            Some(error.into())
        }
        Ok(Err(error @ ConnectionError::Server(_))) => Some(error.into()),
        _ => None,
    }
}

/// Adds the name of the table to an error about a row that can't be converted. The slot must be
/// free.
pub(super) async fn with_table(
    error: PipelineError,
    settings: &PipelineSettings,
    database: &impl Database,
) -> PipelineError {
    let (at, error) = match error {
        PipelineError::Core(CoreError::Unconvertible { at, error, .. }) => (at, error),
        error => return error,
    };
    let table = match at.parse() {
        Ok(position) => find_table(settings, database, position).await,
        Err(_) => Ok(None),
    };
    if let Err(error) = &table {
        debug!(%error, "failed to find the table of a row that can't be converted");
    }
    let table = table.ok().flatten();
    CoreError::Unconvertible { at, table, error }.into()
}

async fn find_table(
    settings: &PipelineSettings,
    database: &impl Database,
    sought: Position,
) -> Result<Option<String>, ConnectionError> {
    let (target, limit) = (&settings.target, settings.link_timeout);
    let mut connection = database.connect(limit, settings.row_bytes_max).await?;
    connection.disable_conversion().await?;
    let messages = matches!(target.outbox, Outbox::Messages { .. });
    connection
        .start(&target.slot, Lsn::ZERO, &target.publication, messages)
        .await?;
    let mut rows = Rows::default();
    let mut found = None;
    let upto = Lsn(sought.commit.0 + 1);
    connection
        .preview(upto, limit, |data| match rows.message(data) {
            Some((at, table)) if at == sought => {
                found = table;
                false
            }
            _ => rows.next.is_none_or(|next| next <= sought),
        })
        .await?;
    // Errors are ignored, because the server may end the stream only after a large transaction.
    let _ = connection.close().await;
    Ok(found)
}

/// Tracks the positions of the rows in a stream.
#[derive(Default)]
struct Rows {
    tables: HashMap<u32, String>,
    /// The position of the next row; `None` outside a transaction.
    next: Option<Position>,
}

impl Rows {
    /// Processes a message. If it is a row, or a transactional logical decoding message, returns
    /// its position and, for a row, its table.
    fn message(&mut self, data: &[u8]) -> Option<(Position, Option<String>)> {
        let relation = match Message::decode(data).ok()? {
            Message::Begin(begin) => {
                let commit = begin.commit;
                self.next = Some(Position { commit, index: 0 });
                return None;
            }
            Message::Commit(_) => {
                self.next = None;
                return None;
            }
            Message::Relation(relation) => {
                let name = TableName::from_catalog(relation.namespace, relation.name);
                self.tables.insert(relation.oid, name.to_string());
                return None;
            }
            Message::Insert { relation, .. }
            | Message::Update { relation, .. }
            | Message::Delete { relation, .. } => Some(relation),
            Message::Logical {
                transactional: true,
                ..
            } => None,
            _ => return None,
        };
        let next = self.next.as_mut()?;
        let at = *next;
        next.index += 1;
        let table = relation.and_then(|relation| self.tables.get(&relation).cloned());
        Some((at, table))
    }
}
