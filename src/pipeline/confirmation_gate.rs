//! Keeps a session from confirming a position before it is written to the table
//! `walpost.slot_state`.
//!
//! Because the row is written first, the next process to acquire the slot can detect that something
//! else has moved it, or dropped and re-created it.
//!
//! Each write generates WAL, and confirming that WAL takes another write, and so on indefinitely.
//! Therefore new positions are written promptly only while events flow. Without events, a write
//! waits until enough WAL has accumulated; when activity stops, a few more writes follow at
//! increasing intervals. A write is also made when another command requests it, see
//! `Catalog::request_position`.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::delivery::watermark::Confirmed;
use crate::model::lsn::Lsn;
use crate::postgres::catalog::slot_state::SlotOf;

/// Minimum interval between writes while events flow.
const EVENT_INTERVAL: Duration = Duration::from_millis(100);
/// With no events, the position is written after this much WAL, ...
const IDLE_WAL_BYTES: u64 = 1 << 20;
/// ... but no more often than this.
const IDLE_INTERVAL: Duration = Duration::from_secs(1);
/// When events and heavy WAL traffic stop, the position is written after this delay, then again
/// after twice the delay, and so on: PostgreSQL needs several confirmations before it removes old
/// WAL.
const IDLE_BACKOFF_START: Duration = Duration::from_secs(2);
/// Number of writes with these increasing delays.
const IDLE_BACKOFF_STEPS: u32 = 8;
/// After them, the position is written once this much WAL has accumulated ...
const QUIET_WAL_BYTES: u64 = 64 << 10;
/// ... and this much time has passed since the last write.
const QUIET_INTERVAL: Duration = Duration::from_secs(300);
/// How often an ongoing write failure is logged.
const FAILURE_LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Determines which position a session may confirm.
pub(super) struct ConfirmationGate {
    /// `None` if positions are not written; every durable position may then be confirmed at once.
    writing: Option<WriteRequests>,
}

struct WriteRequests {
    wanted: watch::Sender<Lsn>,
    written: watch::Receiver<Lsn>,
    /// The last position requested, until its write is known to have finished.
    pending: Option<Confirmed>,
    requested_at: Instant,
    /// The last position known to be written, which is the highest that may be confirmed.
    confirmable: Confirmed,
    /// Number of writes requested since the last one for events or [`IDLE_WAL_BYTES`] of WAL.
    idle_writes: u32,
    /// Notified by [`SlotStateWriter::request`].
    requests: Arc<Notify>,
    /// Whether a command waits for the position to be confirmed.
    is_requested: bool,
}

/// The writer's end of the channels.
pub(super) struct SlotStateWriter {
    pub(super) slot: SlotOf,
    wanted: watch::Receiver<Lsn>,
    written: watch::Sender<Lsn>,
    /// When a failure was last logged, or `None` if none has been logged since the last successful
    /// write.
    failure_logged_at: Option<Instant>,
    requests: Arc<Notify>,
}

impl ConfirmationGate {
    /// Creates an instance that allows every durable position to be confirmed, for when positions
    /// can't be written.
    pub(super) fn always_open() -> Self {
        Self { writing: None }
    }

    /// Creates an instance for a slot whose row already contains `confirmed`, and the writer for
    /// later positions.
    pub(super) fn with_writer(
        of: SlotOf,
        confirmed: Confirmed,
        now: Instant,
    ) -> (Self, SlotStateWriter) {
        let (wanted, to_write) = watch::channel(confirmed.lsn());
        let (written, is_written) = watch::channel(confirmed.lsn());
        let requests = Arc::new(Notify::new());
        let writing = WriteRequests {
            wanted,
            written: is_written,
            pending: None,
            requested_at: now,
            confirmable: confirmed,
            // The previous session may have left WAL unconfirmed.
            idle_writes: 0,
            requests: Arc::clone(&requests),
            is_requested: false,
        };
        let writer = SlotStateWriter {
            slot: of,
            wanted: to_write,
            written,
            failure_logged_at: None,
            requests,
        };
        let writing = Some(writing);
        (Self { writing }, writer)
    }

    /// Requests a write of `durable` if one is due, and returns the position that may be confirmed
    /// now. If a write will be due later, also returns when, so that the caller can try again then.
    /// `events` reports whether any events follow the given position.
    pub(super) fn advance(
        &mut self,
        durable: Confirmed,
        events: impl FnOnce(Lsn) -> bool,
        now: Instant,
    ) -> (Confirmed, Option<Instant>) {
        let Some(writing) = &mut self.writing else {
            return (durable, None);
        };
        writing.check_pending();
        if writing.pending.is_some() || durable <= writing.confirmable {
            return (writing.confirmable, None);
        }
        let written = writing.confirmable.lsn();
        let bytes = durable.lsn().bytes_since(written);
        let events = events(written);
        let has_enough_wal = bytes >= IDLE_WAL_BYTES;
        let interval = match () {
            () if events || writing.is_requested => EVENT_INTERVAL,
            () if has_enough_wal => IDLE_INTERVAL,
            () if writing.idle_writes < IDLE_BACKOFF_STEPS => {
                IDLE_BACKOFF_START * (1 << writing.idle_writes)
            }
            () if bytes >= QUIET_WAL_BYTES => QUIET_INTERVAL,
            () => return (writing.confirmable, None),
        };
        let due = writing.requested_at + interval;
        if due > now {
            return (writing.confirmable, Some(due));
        }
        writing.idle_writes = match events || has_enough_wal {
            true => 0,
            false if writing.is_requested => writing.idle_writes,
            false => writing.idle_writes.saturating_add(1),
        };
        writing.request(durable, now);
        (writing.confirmable, None)
    }

    /// Returns whether the writer has been dropped. If so, no higher position can be confirmed.
    pub(super) fn is_writer_closed(&self) -> bool {
        let writing = self.writing.as_ref();
        writing.is_some_and(|writing| writing.written.has_changed().is_err())
    }

    /// Waits for the pending write to finish, after which a higher position may be confirmed, or for
    /// a request of another command.
    pub(super) async fn wait_for_change(&mut self) {
        let Some(writing) = &mut self.writing else {
            return std::future::pending().await;
        };
        tokio::select! {
            written = writing.written.changed(), if writing.pending.is_some() => {
                if written.is_err() {
                    std::future::pending().await
                }
            }
            () = writing.requests.notified() => writing.is_requested = true,
        }
    }

    /// Returns whether a command waits for the position to be confirmed.
    pub(super) fn is_requested(&self) -> bool {
        self.writing
            .as_ref()
            .is_some_and(|writing| writing.is_requested)
    }

    /// Waits until `durable` is written, and returns the position that may be confirmed. The result
    /// is lower than `durable` only if the writer was dropped before the write finished.
    pub(super) async fn flush(&mut self, durable: Confirmed) -> Confirmed {
        let Some(writing) = &mut self.writing else {
            return durable;
        };
        writing.check_pending();
        if writing.confirmable < durable {
            writing.request(durable, Instant::now());
        }
        while writing.confirmable < durable && writing.written.changed().await.is_ok() {
            writing.check_pending();
        }
        writing.confirmable
    }

    /// Returns the position that may be confirmed without waiting for a write.
    pub(super) fn confirmable(&self, durable: Confirmed) -> Confirmed {
        self.writing
            .as_ref()
            .map_or(durable, |writing| writing.confirmable)
    }
}

impl WriteRequests {
    fn check_pending(&mut self) {
        if let Some(asked) = self.pending
            && *self.written.borrow_and_update() >= asked.lsn()
        {
            self.confirmable = asked;
            self.pending = None;
        }
    }

    fn request(&mut self, durable: Confirmed, now: Instant) {
        self.pending = Some(durable);
        self.requested_at = now;
        self.is_requested = false;
        self.wanted.send_replace(durable.lsn());
    }
}

impl SlotStateWriter {
    /// Waits for a position to write. Cancel safe: a request remains outstanding until it is passed
    /// to [`SlotStateWriter::mark_written`].
    pub(super) async fn next_request(&mut self) -> Lsn {
        loop {
            let wanted = *self.wanted.borrow_and_update();
            if wanted > *self.written.borrow() {
                return wanted;
            }
            if self.wanted.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }

    /// Records that a command waits for the position to be confirmed.
    pub(super) fn request(&self) {
        self.requests.notify_one();
    }

    /// Allows every position up to `lsn` to be confirmed.
    pub(super) fn mark_written(&mut self, lsn: Lsn) {
        self.written.send_replace(lsn);
        self.failure_logged_at = None;
    }

    /// Records a failed write, and returns whether the caller should log it.
    pub(super) fn record_failure(&mut self, now: Instant) -> bool {
        let should_log = self
            .failure_logged_at
            .is_none_or(|told| now >= told + FAILURE_LOG_INTERVAL);
        if should_log {
            self.failure_logged_at = Some(now);
        }
        should_log
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::delivery::watermark::Watermark;
    use crate::model::window::Window;
    use crate::postgres::target::{Outbox, Target};

    fn durable(lsn: u64) -> Confirmed {
        Watermark::new(Window::default(), Lsn(lsn)).confirmed()
    }

    fn start() -> (ConfirmationGate, SlotStateWriter, Instant) {
        let now = Instant::now();
        let of = SlotOf {
            pipeline: "p".to_owned(),
            target: Target {
                outbox: Outbox::Table("public.outbox".parse().expect("table")),
                publication: "p".to_owned(),
                slot: "s".to_owned(),
                commands: Default::default(),
            },
            system_id: "1".to_owned(),
            timeline: 1,
        };
        let (confirms, writer) = ConfirmationGate::with_writer(of, durable(1000), now);
        (confirms, writer, now)
    }

    /// Calls `advance` this many milliseconds after the start. Returns the LSN that may be confirmed,
    /// and how long after the start to call again.
    fn advance_at(
        (confirms, _, began): &mut (ConfirmationGate, SlotStateWriter, Instant),
        to: u64,
        events: bool,
        millis: u64,
    ) -> (u64, Option<Duration>) {
        let now = *began + Duration::from_millis(millis);
        let (may, due) = confirms.advance(durable(to), |_| events, now);
        (may.lsn().0, due.map(|due| due - *began))
    }

    #[tokio::test]
    async fn last_position_is_not_confirmed_if_its_write_fails() {
        let (mut confirms, writer, _) = start();
        let last = confirms.flush(durable(1100));
        drop(writer);
        assert_eq!(last.await.lsn(), Lsn(1000));
        assert_eq!(confirms.confirmable(durable(1100)).lsn(), Lsn(1000));
    }

    #[tokio::test]
    async fn nothing_may_be_confirmed_before_it_is_written() {
        let mut all = start();
        assert_eq!(advance_at(&mut all, 1000, false, 0), (1000, None));
        assert_eq!(
            advance_at(&mut all, 1100, true, 0),
            (1000, Some(EVENT_INTERVAL))
        );
        assert_eq!(advance_at(&mut all, 1100, true, 100), (1000, None));
        // More events became durable in the meantime.
        assert_eq!(advance_at(&mut all, 1200, true, 300), (1000, None));
        assert_eq!(all.1.next_request().await, Lsn(1100));
        all.1.mark_written(Lsn(1100));
        assert_eq!(advance_at(&mut all, 1200, true, 300), (1100, None));
        assert_eq!(all.1.next_request().await, Lsn(1200));
        drop(all.1);
        assert!(all.0.is_writer_closed());
        assert_eq!(all.0.flush(durable(1300)).await, durable(1100));
    }

    #[tokio::test]
    async fn log_without_events_is_written_down_where_it_is_worth_that() {
        let mut all = start();
        assert_eq!(
            advance_at(&mut all, 1100, false, 0),
            (1000, Some(IDLE_BACKOFF_START))
        );
        assert_eq!(advance_at(&mut all, 1100, true, 100), (1000, None));
        all.1.mark_written(Lsn(1100));
        let (mut at, mut lsn) = (100, 1100);
        for rest in 0..IDLE_BACKOFF_STEPS {
            let due = at + 2000 * (1 << rest);
            let expected = Some(Duration::from_millis(due));
            assert_eq!(advance_at(&mut all, lsn + 8, false, at), (lsn, expected));
            assert_eq!(advance_at(&mut all, lsn + 8, false, due), (lsn, None));
            (at, lsn) = (due, lsn + 8);
            all.1.mark_written(Lsn(lsn));
        }
        // WAL generated by the write itself does not cause another write.
        assert_eq!(advance_at(&mut all, lsn + 300, false, at * 10), (lsn, None));
        let due = Some(Duration::from_millis(at) + QUIET_INTERVAL);
        assert_eq!(
            advance_at(&mut all, lsn + QUIET_WAL_BYTES, false, at + 1),
            (lsn, due)
        );
        let much = lsn + IDLE_WAL_BYTES;
        assert_eq!(advance_at(&mut all, much, false, at + 1000), (lsn, None));
        all.1.mark_written(Lsn(much));
        let due = Some(Duration::from_millis(at + 1000) + IDLE_BACKOFF_START);
        assert_eq!(
            advance_at(&mut all, much + 8, false, at + 1001),
            (much, due)
        );
    }

    #[tokio::test]
    async fn requested_position_is_written_though_the_log_is_not_worth_it() {
        let mut all = start();
        all.0.writing.as_mut().expect("writing").idle_writes = IDLE_BACKOFF_STEPS;
        assert_eq!(advance_at(&mut all, 1100, false, 5000), (1000, None));
        assert!(!all.0.is_requested());
        all.1.request();
        all.0.wait_for_change().await;
        assert!(all.0.is_requested());
        assert_eq!(advance_at(&mut all, 1100, false, 5000), (1000, None));
        assert!(!all.0.is_requested(), "one request is one write");
        assert_eq!(all.1.next_request().await, Lsn(1100));
        all.1.mark_written(Lsn(1100));
        // The WAL of that write itself.
        assert_eq!(advance_at(&mut all, 1108, false, 60_000), (1100, None));
        // A flood of requests writes as often as events do.
        all.1.request();
        all.0.wait_for_change().await;
        let due = Some(Duration::from_millis(5000) + EVENT_INTERVAL);
        assert_eq!(advance_at(&mut all, 1108, false, 5001), (1100, due));
    }

    #[tokio::test]
    async fn write_failures_are_logged_once_a_minute_and_again_after_a_success() {
        let (_confirms, mut writer, began) = start();
        let at = |seconds| began + Duration::from_secs(seconds);
        let said: Vec<_> = (0..200).filter(|&s| writer.record_failure(at(s))).collect();
        assert_eq!(said, [0, 60, 120, 180]);
        writer.mark_written(Lsn(1100));
        assert!(writer.record_failure(at(200)));
    }

    #[test]
    fn without_a_table_all_that_is_durable_may_be_confirmed() {
        let mut confirms = ConfirmationGate::always_open();
        let now = Instant::now();
        let (may, due) = confirms.advance(durable(7), |_| true, now);
        assert_eq!((may, due), (durable(7), None));
        assert!(!confirms.is_writer_closed());
    }
}
