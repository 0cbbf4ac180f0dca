//! Reads the changes that a slot would send, without confirming them.
//!
//! In an SQL session, `pg_logical_slot_peek_binary_changes` would return the same changes. However,
//! the session that decodes changes also evaluates the publication's row filters, as the filters
//! were defined when each row was written. The current catalogs do not contain these former
//! definitions. A function that a row filter calls can't run a statement that writes in a
//! walsender, because a walsender does not have a portal. The function still runs, so a walsender
//! is only the second line of defense. The first line of defense is to check who owns the
//! publication.

use std::time::Duration;

use tokio::time::timeout;

use super::{Connection, ConnectionError, clock_micros};
use crate::model::lsn::Lsn;
use crate::postgres::wire::frame::{Frame, status_update};

/// How often to request a reply while the server sends nothing. The reply reports the server's
/// progress.
const REQUEST_INTERVAL: Duration = Duration::from_millis(200);

impl Connection {
    /// Passes the output plugin's messages to `visit` until `visit` returns false or the server has
    /// sent everything before `upto`. If a message exceeds the connection's size limit, only its
    /// beginning is passed, as [`Frame::LargeMessage`]. The connection must already be streaming.
    /// Does not change the slot's position.
    ///
    /// # Errors
    /// Returns an error if the server aborts the stream or does not respond for `limit`.
    pub(crate) async fn preview(
        &mut self,
        upto: Lsn,
        limit: Duration,
        mut visit: impl FnMut(&Frame<'_>) -> bool,
    ) -> Result<(), ConnectionError> {
        loop {
            let mut must_reply = false;
            while let Some(frame) = self.peek()? {
                let is_finished = match frame {
                    Frame::XLogData { .. } | Frame::LargeMessage { .. } => !visit(&frame),
                    Frame::Keepalive {
                        wal_end,
                        reply_requested,
                    } => {
                        must_reply |= reply_requested;
                        wal_end >= upto
                    }
                };
                self.consume();
                if is_finished {
                    return Ok(());
                }
            }
            if must_reply {
                self.respond(false, limit).await?;
            }
            match timeout(REQUEST_INTERVAL, self.receive()).await {
                Ok(filled) => filled?,
                Err(_) if self.last_received_at().elapsed() > limit => {
                    return Err(ConnectionError::Silent(limit));
                }
                Err(_) => self.respond(true, limit).await?,
            }
        }
    }

    /// Sends a status update that does not confirm a position, and requests a reply if
    /// `reply_requested` is true.
    async fn respond(
        &mut self,
        reply_requested: bool,
        limit: Duration,
    ) -> Result<(), ConnectionError> {
        let update = status_update(Lsn::ZERO, clock_micros(), reply_requested);
        match timeout(limit, self.write(&update)).await {
            Ok(written) => written,
            Err(_) => Err(ConnectionError::Silent(limit)),
        }
    }
}
