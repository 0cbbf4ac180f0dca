//! Handles rows that the server can't send. The server's error identifies neither the position nor
//! the table of the row, so the stream is read again from the slot's position. The events that
//! precede the row are confirmed by advancing the slot, because the server aborts the stream.

use std::collections::HashMap;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;
use tracing::debug;

use super::database::{CatalogQueries, Database};
use super::decode::error::CoreError;
use super::error::PipelineError;
use super::order::{Order, drain_ordered};
use super::session::state::SessionState;
use super::settings::PipelineSettings;
use crate::delivery::stats::PipelineStats;
use crate::model::lifecycle::State;
use crate::model::lsn::{Lsn, Position};
use crate::postgres::catalog::CatalogError;
use crate::postgres::replication::{Connection, ConnectionError, UnsendableCause};
use crate::postgres::table::TableName;
use crate::postgres::target::Outbox;
use crate::postgres::wire::frame::Frame;
use crate::postgres::wire::pgoutput::{LogicalHead, Message, RowHead};

/// How long to wait for the server to report why it aborted the stream.
const REASON_TIMEOUT: Duration = Duration::from_secs(1);
/// How long to search for the table of a row that can't be sent. The table is needed only for the
/// error message, so if the server takes longer to decode the transaction, the pipeline halts with
/// a message that does not name the table.
const TABLE_SEARCH_TIMEOUT: Duration = Duration::from_secs(120);

/// Returns the error with which the server aborted the stream before any data was processed, or
/// `None` if the server does not send one. Discards the data received on `connection`.
pub(super) async fn stream_end_error(connection: &mut Connection) -> Option<PipelineError> {
    let mut rows = Rows::default();
    let preview = connection.preview(Lsn(u64::MAX), REASON_TIMEOUT, |frame| {
        rows.read_frame(frame);
        true
    });
    match timeout(REASON_TIMEOUT, preview).await {
        Ok(Err(error @ ConnectionError::Server(_))) => {
            let unsendable = CoreError::unsendable(&error, rows.next);
            Some(unsendable.map_or_else(|| error.into(), PipelineError::from))
        }
        _ => None,
    }
}

/// Advances the slot to the last confirmed position if `error` is about a row that the server can't
/// send. The server has aborted the stream at the row, so the events that precede the row could not
/// be confirmed in the stream, although they have been delivered. If the slot were not advanced,
/// these events would be delivered again after each restart, and `walpost skip` would list them.
/// The slot must be free. The server may have to read a large amount of WAL to advance the slot, so
/// the wait is limited to `drain_timeout`.
pub(super) async fn confirm_preceding_events(
    error: &PipelineError,
    settings: &PipelineSettings,
    database: &impl Database,
    session_state: &SessionState,
) {
    let Some(confirmed) = session_state.confirmed().filter(|_| is_unsendable(error)) else {
        return;
    };
    let to = confirmed.lsn();
    let advance = async {
        let catalog = database.catalog().await?;
        let observed = catalog.observe(&settings.target).await?;
        // The last confirmed position has no meaning on another server, such as a promoted standby.
        let is_same_server = observed.starts.postmaster == session_state.postmaster_start();
        match observed.slot {
            Some(slot) if is_same_server && slot.confirmed < to => {
                catalog
                    .advance(&settings.target.slot, slot.confirmed, to)
                    .await
            }
            _ => Ok::<_, CatalogError>(false),
        }
    };
    match timeout(settings.drain_timeout, advance).await {
        Ok(Ok(_)) => {}
        Ok(Err(error)) => {
            debug!(%error, "failed to advance the slot to the row that can't be sent")
        }
        Err(_) => debug!("timed out while advancing the slot to the row that can't be sent"),
    }
}

/// Returns whether the error is about a row that the server can't send.
pub(super) fn is_unsendable(error: &PipelineError) -> bool {
    matches!(error, PipelineError::Core(CoreError::Unsendable { .. }))
}

/// Adds the name of the table to an error about a row that the server can't send, unless finding
/// the table takes too long or the pipeline is asked to drain. The slot must be free.
pub(super) async fn with_table(
    mut error: PipelineError,
    settings: &PipelineSettings,
    database: &impl Database,
    stats: &PipelineStats,
    orders: &mut watch::Receiver<Order>,
) -> PipelineError {
    let PipelineError::Core(CoreError::Unsendable {
        at, table, cause, ..
    }) = &mut error
    else {
        return error;
    };
    // The server decodes the transaction again, which can take minutes. Leave the Streaming state,
    // in which the watchdog expects the event loop to run.
    stats.entered(State::Reconnecting);
    let find_table = find_table(settings, database, *at, *cause);
    tokio::select! {
        biased;
        () = drain_ordered(orders) => {}
        found = timeout(TABLE_SEARCH_TIMEOUT, find_table) => match found {
            Ok(Ok(found)) => *table = found,
            Ok(Err(error)) => debug!(%error, "failed to find the table of a row that can't be sent"),
            Err(_) => debug!("timed out while searching for the table of a row that can't be sent"),
        },
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
    let read = connection.preview(upto, limit, |frame| match rows.read_frame(frame) {
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
    // Ignore errors from closing the connection: in the middle of a large transaction, the server
    // may take too long to end the stream.
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
    /// Processes a message. If the message has a position (because it is a row or a transactional
    /// logical decoding message), returns this position and, for a row, the table's name. A message
    /// that exceeds the size limit also has a position.
    fn read_frame(&mut self, frame: &Frame<'_>) -> Option<(Position, Option<String>)> {
        match *frame {
            Frame::XLogData { data, .. } => self.read_message(&Message::decode(data).ok()?),
            Frame::LargeMessage { head, .. } => match RowHead::decode(head).ok()? {
                Some(row) => self.advance(Some(row.relation)),
                None if LogicalHead::decode(head).ok()?.transactional => self.advance(None),
                None => None,
            },
            Frame::Keepalive { .. } => None,
        }
    }

    fn read_message(&mut self, message: &Message<'_>) -> Option<(Position, Option<String>)> {
        match *message {
            Message::Begin(begin) => {
                let commit = begin.commit;
                self.next = Some(Position { commit, index: 0 });
                None
            }
            Message::Commit(_) => {
                self.next = None;
                None
            }
            Message::Relation(ref relation) => {
                let name = TableName::from_catalog(relation.namespace, relation.name).to_string();
                self.described = Some(name.clone());
                self.tables.insert(relation.oid, name);
                None
            }
            Message::Insert { relation, .. }
            | Message::Update { relation, .. }
            | Message::Delete { relation, .. } => self.advance(Some(relation)),
            Message::Logical {
                transactional: true,
                ..
            } => self.advance(None),
            _ => None,
        }
    }

    /// Returns the position of the next row or logical decoding message, and the name of the table
    /// with the OID `relation`.
    fn advance(&mut self, relation: Option<u32>) -> Option<(Position, Option<String>)> {
        self.described = None;
        let next = self.next.as_mut()?;
        let at = *next;
        next.index += 1;
        let table = relation.and_then(|relation| self.tables.get(&relation).cloned());
        Some((at, table))
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use tokio::time::Instant;

    use super::*;
    use crate::pipeline::sim;
    use crate::postgres::catalog::Catalog;

    /// A database that accepts no connection and does not reject it either.
    #[derive(Clone)]
    struct SilentDatabase;

    impl Database for SilentDatabase {
        type Catalog = Catalog;

        async fn catalog(&self) -> Result<Catalog, CatalogError> {
            pending().await
        }

        async fn connect(&self, _: Duration, _: usize) -> Result<Connection, ConnectionError> {
            pending().await
        }
    }

    /// Searches for the table of a row in a database that does not respond, after `order` was sent
    /// to the pipeline. Returns how long the search took.
    async fn search_silent_database(order: Order) -> Duration {
        let settings = sim::settings(false, false, &mut fastrand::Rng::with_seed(1));
        let stats = PipelineStats::default();
        stats.entered(State::Streaming);
        let (_sender, mut orders) = watch::channel(order);
        let error = CoreError::Unsendable {
            at: Position {
                commit: Lsn(100),
                index: 0,
            },
            table: None,
            cause: UnsendableCause::Size,
            error: "out of memory".to_owned(),
        };
        let started_at = Instant::now();
        let found = with_table(
            error.into(),
            &settings,
            &SilentDatabase,
            &stats,
            &mut orders,
        )
        .await;
        assert!(is_unsendable(&found), "{found}");
        // While the state is Streaming, the watchdog would consider the event loop stalled.
        assert_eq!(stats.lifecycle_snapshot().state, State::Reconnecting);
        started_at.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn search_for_a_table_ends_at_its_time_limit_or_when_the_pipeline_must_drain() {
        assert_eq!(search_silent_database(Order::Drain).await, Duration::ZERO);
        let elapsed = search_silent_database(Order::Run).await;
        assert!(
            (TABLE_SEARCH_TIMEOUT..TABLE_SEARCH_TIMEOUT + Duration::from_secs(1))
                .contains(&elapsed),
            "{elapsed:?}"
        );
    }

    /// The beginnings of messages that exceed the size limit, one for each type of message that has
    /// a position: an insert, an update, a delete and a transactional logical decoding message.
    const LARGE: [&[u8]; 4] = [
        b"I\0\0\0\x07N",
        b"U\0\0\0\x07N",
        b"D\0\0\0\x07K",
        b"M\x01\0\0\0\0\0\0\0\x10walpost\0\x7f\0\0\0",
    ];
    const NONTRANSACTIONAL: &[u8] = b"M\0\0\0\0\0\0\0\0\x10walpost\0\x7f\0\0\0";

    fn large(head: &[u8]) -> Frame<'_> {
        let (bytes, max) = (1 << 30, 1 << 20);
        Frame::LargeMessage { head, bytes, max }
    }

    #[test]
    fn counts_messages_that_exceed_the_size_limit() {
        let mut begin = b"B".to_vec();
        begin.extend(100_u64.to_be_bytes());
        begin.extend([0; 12]);
        let small = |data| Frame::XLogData {
            start: Lsn::ZERO,
            wal_end: Lsn::ZERO,
            data,
        };
        let mut rows = Rows::default();
        assert_eq!(rows.read_frame(&large(LARGE[0])), None);
        assert_eq!(rows.read_frame(&small(&begin)), None);
        rows.tables.insert(7, "public.outbox".to_owned());
        let table = Some("public.outbox".to_owned());
        let tables = [table.clone(), table.clone(), table.clone(), None];
        for ((index, head), table) in (0..).zip(LARGE).zip(tables) {
            let commit = Lsn(100);
            let at = Position { commit, index };
            assert_eq!(rows.read_frame(&large(head)), Some((at, table)));
        }
        assert_eq!(rows.read_frame(&large(NONTRANSACTIONAL)), None);
        let row = rows.read_frame(&small(b"I\0\0\0\x07N\0\0"));
        let (commit, index) = (Lsn(100), 4);
        assert_eq!(row, Some((Position { commit, index }, table)));
    }
}
