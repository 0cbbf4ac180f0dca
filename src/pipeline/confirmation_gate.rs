//! Prevents a session from confirming a position to PostgreSQL before that position has been
//! written to the table `walpost.slot_state`.
//!
//! Because `walpost.slot_state` is updated first, the slot's position is never ahead of the
//! position in that table. If the next process to acquire the slot finds that the slot is ahead,
//! something other than Walpost must have advanced the slot, or dropped and re-created it.
//!
//! Each write to `walpost.slot_state` generates WAL, and confirming that WAL requires another
//! write, so the writes would never stop. To break this cycle, new positions are written promptly
//! only while events arrive. Without events, a write waits until enough WAL has accumulated; when
//! activity stops, a few more writes follow at increasing intervals. Other Walpost commands can
//! also request a write; see `Catalog::request_position`.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::delivery::watermark::Confirmed;
use crate::model::lsn::Lsn;
use crate::postgres::catalog::slot_state::SlotIdentity;

/// Minimum interval between writes while events arrive.
const EVENT_INTERVAL: Duration = Duration::from_millis(100);
/// Without events, the position is written each time this much WAL has accumulated.
const IDLE_WAL_BYTES: u64 = 1 << 20;
/// Minimum interval between writes triggered by [`IDLE_WAL_BYTES`].
const IDLE_INTERVAL: Duration = Duration::from_secs(1);
/// After events and heavy WAL traffic stop, the position is written after this delay, then after
/// twice the delay, and so on. One write is not enough, because PostgreSQL removes old WAL only
/// after several confirmations.
const IDLE_BACKOFF_START: Duration = Duration::from_secs(2);
/// Number of writes that follow after activity stops. The delay before the first write is
/// [`IDLE_BACKOFF_START`], and doubles with each further write.
const IDLE_BACKOFF_STEPS: u32 = 8;
/// After activity has stopped and the [`IDLE_BACKOFF_STEPS`] writes that follow are done, the
/// position is written again once this much WAL has accumulated and [`QUIET_INTERVAL`] has passed
/// since the last write.
const QUIET_WAL_BYTES: u64 = 64 << 10;
/// Minimum interval between writes triggered by [`QUIET_WAL_BYTES`].
const QUIET_INTERVAL: Duration = Duration::from_secs(300);
/// How often an ongoing write failure is logged.
const FAILURE_LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Determines which position a session may confirm.
pub(super) struct ConfirmationGate {
    /// Requests for writes to `walpost.slot_state`. If `None`, positions are not written, and every
    /// durable position may be confirmed immediately.
    writing: Option<WriteRequests>,
}

struct WriteRequests {
    wanted: watch::Sender<Lsn>,
    written: watch::Receiver<Lsn>,
    /// The last position that the writer was asked to write, if the write is not yet known to have
    /// finished.
    pending: Option<Confirmed>,
    requested_at: Instant,
    /// The last position known to be written, which is the highest position that may be confirmed.
    confirmable: Confirmed,
    /// Number of writes requested since the last write that was triggered by events or by
    /// [`IDLE_WAL_BYTES`].
    idle_writes: u32,
    /// Notified by [`SlotStateWriter::request`].
    requests: Arc<Notify>,
    /// Whether `walpost verify` is waiting for the durable position to be confirmed.
    is_requested: bool,
}

/// The counterpart of [`ConfirmationGate`] in the task that writes to `walpost.slot_state`:
/// receives the positions to write, and reports which ones have been written.
pub(super) struct SlotStateWriter {
    pub(super) slot: SlotIdentity,
    wanted: watch::Receiver<Lsn>,
    written: watch::Sender<Lsn>,
    /// When a failure was last logged, or `None` if none has been logged since the last successful
    /// write.
    failure_logged_at: Option<Instant>,
    requests: Arc<Notify>,
}

impl ConfirmationGate {
    /// Creates a gate that lets every durable position be confirmed immediately, for use when
    /// positions can't be written to `walpost.slot_state`.
    pub(super) fn always_open() -> Self {
        Self { writing: None }
    }

    /// Creates a gate for a slot whose row in `walpost.slot_state` already contains `confirmed`,
    /// together with the [`SlotStateWriter`] for later positions.
    pub(super) fn with_writer(
        slot: SlotIdentity,
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
            // Write even without new events, because the previous session may have left WAL
            // unconfirmed.
            idle_writes: 0,
            requests: Arc::clone(&requests),
            is_requested: false,
        };
        let writer = SlotStateWriter {
            slot,
            wanted: to_write,
            written,
            failure_logged_at: None,
            requests,
        };
        let writing = Some(writing);
        (Self { writing }, writer)
    }

    /// Requests a write of `durable` if one is due, and returns the position that may be confirmed
    /// now. If a write is due only later, also returns the time at which the caller should call
    /// again. `has_events_after` returns whether any events follow the position that is passed to
    /// it.
    pub(super) fn advance(
        &mut self,
        durable: Confirmed,
        has_events_after: impl FnOnce(Lsn) -> bool,
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
        let has_events = has_events_after(written);
        let has_enough_wal = bytes >= IDLE_WAL_BYTES;
        let interval = match () {
            () if has_events || writing.is_requested => EVENT_INTERVAL,
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
        writing.idle_writes = match has_events || has_enough_wal {
            true => 0,
            false if writing.is_requested => writing.idle_writes,
            false => writing.idle_writes.saturating_add(1),
        };
        writing.request(durable, now);
        (writing.confirmable, None)
    }

    /// Returns whether the writer has been dropped, in which case no higher position can be
    /// confirmed.
    pub(super) fn is_writer_closed(&self) -> bool {
        let writing = self.writing.as_ref();
        writing.is_some_and(|writing| writing.written.has_changed().is_err())
    }

    /// Waits until the pending write finishes (so that a higher position may be confirmed) or until
    /// `walpost verify` requests a write.
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

    /// Returns whether `walpost verify` is waiting for the durable position to be confirmed.
    pub(super) fn is_requested(&self) -> bool {
        self.writing
            .as_ref()
            .is_some_and(|writing| writing.is_requested)
    }

    /// Waits until `durable` is written to the table, and returns the position that may be
    /// confirmed. This position is lower than `durable` only if the writer was dropped before the
    /// write finished.
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

    /// Returns the position that may already be confirmed, without requesting a write.
    pub(super) fn confirmable(&self, durable: Confirmed) -> Confirmed {
        self.writing
            .as_ref()
            .map_or(durable, |writing| writing.confirmable)
    }
}

impl WriteRequests {
    fn check_pending(&mut self) {
        if let Some(pending) = self.pending
            && *self.written.borrow_and_update() >= pending.lsn()
        {
            self.confirmable = pending;
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
    /// Waits for a position that needs to be written. Cancel safe: the position is returned again
    /// until it is passed to [`SlotStateWriter::mark_written`].
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

    /// Records that `walpost verify` is waiting for the durable position to be confirmed.
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
            .is_none_or(|logged_at| now >= logged_at + FAILURE_LOG_INTERVAL);
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
    use crate::postgres::catalog::slot_owner::DefinedBy;
    use crate::postgres::target::{Outbox, Target};

    fn durable(lsn: u64) -> Confirmed {
        Watermark::new(Window::default(), Lsn(lsn)).confirmed()
    }

    fn start() -> (ConfirmationGate, SlotStateWriter, Instant) {
        let now = Instant::now();
        let slot = SlotIdentity {
            pipeline: "p".to_owned(),
            defined_by: DefinedBy::Operator,
            target: Target {
                outbox: Outbox::Table("public.outbox".parse().expect("table")),
                publication: "p".to_owned(),
                slot: "s".to_owned(),
                commands: Default::default(),
            },
            system_id: "1".to_owned(),
            timeline: 1,
        };
        let (gate, writer) = ConfirmationGate::with_writer(slot, durable(1000), now);
        (gate, writer, now)
    }

    /// Calls `advance` as if `millis` milliseconds had passed since the gate was created. Returns
    /// the LSN that may be confirmed, and how long after the gate's creation to call again.
    fn advance_at(
        (gate, _, started_at): &mut (ConfirmationGate, SlotStateWriter, Instant),
        durable_lsn: u64,
        has_events: bool,
        millis: u64,
    ) -> (u64, Option<Duration>) {
        let now = *started_at + Duration::from_millis(millis);
        let (confirmable, due) = gate.advance(durable(durable_lsn), |_| has_events, now);
        (confirmable.lsn().0, due.map(|due| due - *started_at))
    }

    #[tokio::test]
    async fn does_not_confirm_the_last_position_if_its_write_fails() {
        let (mut gate, writer, _) = start();
        let last = gate.flush(durable(1100));
        drop(writer);
        assert_eq!(last.await.lsn(), Lsn(1000));
        assert_eq!(gate.confirmable(durable(1100)).lsn(), Lsn(1000));
    }

    #[tokio::test]
    async fn confirms_a_position_only_after_it_is_written() {
        let mut fixture = start();
        assert_eq!(advance_at(&mut fixture, 1000, false, 0), (1000, None));
        assert_eq!(
            advance_at(&mut fixture, 1100, true, 0),
            (1000, Some(EVENT_INTERVAL))
        );
        assert_eq!(advance_at(&mut fixture, 1100, true, 100), (1000, None));
        // More events become durable while the write is in progress.
        assert_eq!(advance_at(&mut fixture, 1200, true, 300), (1000, None));
        assert_eq!(fixture.1.next_request().await, Lsn(1100));
        fixture.1.mark_written(Lsn(1100));
        assert_eq!(advance_at(&mut fixture, 1200, true, 300), (1100, None));
        assert_eq!(fixture.1.next_request().await, Lsn(1200));
        drop(fixture.1);
        assert!(fixture.0.is_writer_closed());
        assert_eq!(fixture.0.flush(durable(1300)).await, durable(1100));
    }

    #[tokio::test]
    async fn backs_off_while_idle_until_enough_wal_is_written() {
        let mut fixture = start();
        assert_eq!(
            advance_at(&mut fixture, 1100, false, 0),
            (1000, Some(IDLE_BACKOFF_START))
        );
        assert_eq!(advance_at(&mut fixture, 1100, true, 100), (1000, None));
        fixture.1.mark_written(Lsn(1100));
        let (mut millis, mut lsn) = (100, 1100);
        for step in 0..IDLE_BACKOFF_STEPS {
            let due = millis + 2000 * (1 << step);
            let expected = Some(Duration::from_millis(due));
            assert_eq!(
                advance_at(&mut fixture, lsn + 8, false, millis),
                (lsn, expected)
            );
            assert_eq!(advance_at(&mut fixture, lsn + 8, false, due), (lsn, None));
            (millis, lsn) = (due, lsn + 8);
            fixture.1.mark_written(Lsn(lsn));
        }
        // The WAL that a write generates is not enough to trigger another write.
        assert_eq!(
            advance_at(&mut fixture, lsn + 300, false, millis * 10),
            (lsn, None)
        );
        let due = Some(Duration::from_millis(millis) + QUIET_INTERVAL);
        assert_eq!(
            advance_at(&mut fixture, lsn + QUIET_WAL_BYTES, false, millis + 1),
            (lsn, due)
        );
        let after_idle_wal = lsn + IDLE_WAL_BYTES;
        assert_eq!(
            advance_at(&mut fixture, after_idle_wal, false, millis + 1000),
            (lsn, None)
        );
        fixture.1.mark_written(Lsn(after_idle_wal));
        let due = Some(Duration::from_millis(millis + 1000) + IDLE_BACKOFF_START);
        assert_eq!(
            advance_at(&mut fixture, after_idle_wal + 8, false, millis + 1001),
            (after_idle_wal, due)
        );
    }

    #[tokio::test]
    async fn writes_a_position_on_request_even_if_little_wal_has_accumulated() {
        let mut fixture = start();
        fixture.0.writing.as_mut().expect("writing").idle_writes = IDLE_BACKOFF_STEPS;
        assert_eq!(advance_at(&mut fixture, 1100, false, 5000), (1000, None));
        assert!(!fixture.0.is_requested());
        fixture.1.request();
        fixture.0.wait_for_change().await;
        assert!(fixture.0.is_requested());
        assert_eq!(advance_at(&mut fixture, 1100, false, 5000), (1000, None));
        assert!(
            !fixture.0.is_requested(),
            "one request must cause only one write"
        );
        assert_eq!(fixture.1.next_request().await, Lsn(1100));
        fixture.1.mark_written(Lsn(1100));
        // The WAL that a write generates does not trigger another write.
        assert_eq!(advance_at(&mut fixture, 1108, false, 60_000), (1100, None));
        // The minimum interval between writes is the same for requested writes as for writes
        // triggered by events.
        fixture.1.request();
        fixture.0.wait_for_change().await;
        let due = Some(Duration::from_millis(5000) + EVENT_INTERVAL);
        assert_eq!(advance_at(&mut fixture, 1108, false, 5001), (1100, due));
    }

    #[tokio::test]
    async fn logs_write_failures_once_a_minute_and_again_after_a_successful_write() {
        let (_gate, mut writer, started_at) = start();
        let at = |seconds| started_at + Duration::from_secs(seconds);
        let logged: Vec<_> = (0..200).filter(|&s| writer.record_failure(at(s))).collect();
        assert_eq!(logged, [0, 60, 120, 180]);
        writer.mark_written(Lsn(1100));
        assert!(writer.record_failure(at(200)));
    }

    #[test]
    fn confirms_every_durable_position_if_no_writer_is_configured() {
        let mut gate = ConfirmationGate::always_open();
        let now = Instant::now();
        let (confirmable, due) = gate.advance(durable(7), |_| true, now);
        assert_eq!((confirmable, due), (durable(7), None));
        assert!(!gate.is_writer_closed());
    }
}
