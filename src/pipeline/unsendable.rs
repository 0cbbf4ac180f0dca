//! Finds the position and the table of a row that the server can't send. The server's error
//! identifies neither, so the stream is read again from the slot's position.

use std::collections::HashMap;

use tracing::debug;

use super::database::Database;
use super::decode::error::CoreError;
use super::error::PipelineError;
use super::settings::PipelineSettings;
use crate::model::lsn::{Lsn, Position};
use crate::postgres::replication::{ConnectionError, UnsendableCause};
use crate::postgres::table::TableName;
use crate::postgres::target::Outbox;
use crate::postgres::wire::pgoutput::Message;

/// Adds the name of the table to an error about a row that the server can't send. The slot must be
/// free.
pub(super) async fn with_table(
    mut error: PipelineError,
    settings: &PipelineSettings,
    database: &impl Database,
) -> PipelineError {
    if let PipelineError::Core(CoreError::Unsendable {
        at, table, cause, ..
    }) = &mut error
    {
        match find_table(settings, database, *at, *cause).await {
            Ok(found) => *table = found,
            Err(error) => debug!(%error, "failed to find the table of a row that can't be sent"),
        }
    }
    error
}

/// Returns the table of the row at `sought`. A row that can't be converted to UTF-8 is read without
/// conversion. A row that is too large can't be read at all: its table is known only if the server
/// describes the table immediately before the row.
async fn find_table(
    settings: &PipelineSettings,
    database: &impl Database,
    sought: Position,
    cause: UnsendableCause,
) -> Result<Option<String>, ConnectionError> {
    let (target, limit) = (&settings.target, settings.link_timeout);
    let mut connection = database.connect(limit, settings.row_bytes_max).await?;
    if cause == UnsendableCause::Encoding {
        connection.disable_conversion().await?;
    }
    let messages = matches!(target.outbox, Outbox::Messages { .. });
    connection
        .start(&target.slot, Lsn::ZERO, &target.publication, messages)
        .await?;
    let mut rows = Rows::default();
    let mut found = None;
    let upto = Lsn(sought.commit.0 + 1);
    let read = connection.preview(upto, limit, |data| match rows.message(data) {
        Some((at, table)) if at == sought => {
            found = table;
            false
        }
        _ => rows.next.is_none_or(|next| next <= sought),
    });
    match read.await {
        Err(error) if error.unsendable_cause().is_none() => return Err(error),
        Err(_) if rows.next == Some(sought) => found = rows.described,
        Ok(()) | Err(_) => {}
    }
    // Ignore errors: in the middle of a large transaction, the server may take too long to end the
    // stream.
    let _ = connection.close().await;
    Ok(found)
}

/// Tracks the positions of the rows in a stream.
#[derive(Default)]
struct Rows {
    tables: HashMap<u32, String>,
    /// The position that the next row will have; `None` outside a transaction.
    next: Option<Position>,
    /// The table that the server has described since the last row, if any.
    described: Option<String>,
}

impl Rows {
    /// Processes a message. If it has a position (because it is a row or a transactional logical
    /// decoding message), returns that position and, for a row, the table's name.
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
                let name = TableName::from_catalog(relation.namespace, relation.name).to_string();
                self.described = Some(name.clone());
                self.tables.insert(relation.oid, name);
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
        self.described = None;
        let next = self.next.as_mut()?;
        let at = *next;
        next.index += 1;
        let table = relation.and_then(|relation| self.tables.get(&relation).cloned());
        Some((at, table))
    }
}
