//! Reads what a slot would send, without confirming any of it.
//!
//! `pg_logical_slot_peek_binary_changes` would do the same in an SQL session, but row filters of
//! the publication are evaluated in the session that decodes, with the catalogs as they were when a
//! row was written. Checking the current catalogs does not show what they contained then. A
//! walsender has no portal, without which a function can't run a statement that writes. It does
//! call functions, so this is only a second line of defense; the first is to check who owns the
//! publication.

use std::time::Duration;

use tokio::time::timeout;

use super::{Connection, ConnectionError, clock_micros};
use crate::model::lsn::Lsn;
use crate::postgres::wire::frame::{Frame, status_update};

/// How often the server is asked for its progress while it sends nothing.
const REQUEST_INTERVAL: Duration = Duration::from_millis(200);

impl Connection {
    /// Passes the plugin's messages to `take` until it returns false, or the server has sent
    /// everything before `upto`. The connection must already be streaming. The slot's position does
    /// not change.
    ///
    /// # Errors
    /// The server ends the stream, or does not respond for `limit`.
    pub(crate) async fn preview(
        &mut self,
        upto: Lsn,
        limit: Duration,
        mut take: impl FnMut(&[u8]) -> bool,
    ) -> Result<(), ConnectionError> {
        loop {
            let mut must_reply = false;
            while let Some(frame) = self.peek()? {
                let is_over = match frame {
                    Frame::XLogData { data, .. } => !take(data),
                    Frame::Keepalive {
                        wal_end,
                        reply_requested,
                    } => {
                        must_reply |= reply_requested;
                        wal_end >= upto
                    }
                    // Larger than any row can be.
                    Frame::LargeMessage { .. } => false,
                };
                self.consume();
                if is_over {
                    return Ok(());
                }
            }
            if must_reply {
                self.respond(false, limit).await?;
            }
            match timeout(REQUEST_INTERVAL, self.receive()).await {
                Ok(filled) => filled?,
                Err(_) if self.last_heard().elapsed() > limit => {
                    return Err(ConnectionError::Silent(limit));
                }
                Err(_) => self.respond(true, limit).await?,
            }
        }
    }

    /// Sends a status update that confirms nothing, and requests a reply if `reply_requested`.
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
