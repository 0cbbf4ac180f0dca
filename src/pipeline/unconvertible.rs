//! Locates a row that the server can't convert to UTF-8, and the table that contains it. The
//! server's error identifies neither, so the row is read again without conversion.

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

/// How long a server that has released the slot may take to send the reason.
const REASON_TIMEOUT: Duration = Duration::from_secs(1);

/// Returns why the server ended the stream before any of it was read, if the server sends a reason.
/// Discards the data that was received on `connection`.
pub(super) async fn reason_of_end(connection: &mut Connection) -> Option<PipelineError> {
    let mut rows = Rows::default();
    let preview = connection.preview(Lsn(u64::MAX), REASON_TIMEOUT, |data| {
        rows.message(data);
        true
    });
    match timeout(REASON_TIMEOUT, preview).await {
        Ok(Err(error)) if error.is_of_encoding() => {
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

/// Adds the name of the table to an error about such a row. The slot must be free.
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
    // The server may be in the middle of a large transaction and end the stream later.
    let _ = connection.close().await;
    Ok(found)
}

/// Tracks the positions of rows.
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
