//! Tracks deliveries, which may complete in any order, and determines the LSN that may be
//! confirmed.
//!
//! Each transaction with records has a counter of records in flight. Each delivery decrements the
//! counter; deliveries that are reported together are subtracted in one step. The LSN to confirm is
//! the end of the last transaction for which this counter and the counters of all earlier
//! transactions are zero. Keepalives and transactions without records do not need a counter: they
//! raise the end LSN recorded for the preceding transaction.
//!
//! Only this module can create a [`Confirmed`], so no other module can cause an LSN to be confirmed
//! to PostgreSQL.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use tokio::sync::Notify;

use super::failure::DeliveryFailure;
use super::stats::{PipelineStats, Progress};
use crate::model::lsn::Lsn;
use crate::model::time::unix_micros;
use crate::model::window::Window;

/// An LSN that may be confirmed: all records of all transactions that end at or before this LSN are
/// durable in the sink. Other modules can obtain such an LSN only from [`Watermark::confirmed`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Confirmed(Lsn);

impl Confirmed {
    #[must_use]
    pub fn lsn(self) -> Lsn {
        self.0
    }
}

/// Maximum number of transactions with records that are not durable yet.
const TRANSACTIONS_MAX: usize = 1 << SLOT_BITS;
const SLOT_BITS: u32 = 16;
const COST_MAX: u64 = (1 << (u64::BITS - SLOT_BITS)) - 1;

/// Value that is added to the counter of an open transaction, so that the counter can't reach zero
/// before the commit is received.
const OPEN_TRANSACTION: u64 = 1 << 63;

/// The tag that the sink receives with each record, and returns when the record is delivered. The
/// tag identifies the transaction's counter, and contains the record's size as counted toward
/// `window_bytes`. A tag is a single nonzero word, so that it fits in the pointer that the sink
/// stores for each record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tag(u64);

impl Tag {
    /// Returns the tag as an integer.
    #[must_use]
    pub fn to_word(self) -> u64 {
        self.0
    }

    /// Re-creates the tag from the result of [`Tag::to_word`].
    #[must_use]
    pub fn from_word(word: u64) -> Self {
        Self(word)
    }

    /// Returns the record's size, in bytes, as counted toward `window_bytes`.
    #[must_use]
    pub fn cost(self) -> u64 {
        self.0 >> SLOT_BITS
    }

    #[expect(clippy::cast_possible_truncation, reason = "masked to SLOT_BITS bits")]
    fn slot(self) -> usize {
        (self.0 & (TRANSACTIONS_MAX as u64 - 1)) as usize
    }
}

/// The watermark of a session: tracks which records were sent, and up to which LSN all records are
/// durable.
pub struct Watermark {
    deliveries: Arc<Deliveries>,
    window: Window,
    /// See [`Watermark::set_one_at_a_time`].
    one_at_a_time: bool,
    /// End LSNs of the complete transactions whose records may still be in flight, oldest first.
    /// Each of these transactions has a counter.
    ends: VecDeque<Lsn>,
    /// Index of the oldest transaction's counter.
    head: usize,
    open: Option<OpenTransaction>,
    sent: Window,
    /// The delivered totals, as last read. The sink's threads update the actual totals constantly,
    /// so reading the actual totals for each record would cause frequent cache misses.
    delivered: Window,
    /// The highest LSN received in a keepalive or at the end of a transaction.
    received: Lsn,
    /// End LSN of the last transaction with records on this connection.
    last_records_end: Lsn,
    confirmed: Confirmed,
    /// With exactly-once delivery, the last committed checkpoint covers all transactions up to this
    /// LSN. No higher LSN may be confirmed.
    checkpointed: Option<Lsn>,
    /// With exactly-once delivery, the end LSNs and times of transactions that no checkpoint covers
    /// yet.
    uncovered: VecDeque<(Lsn, Times)>,
    /// Number of complete transactions that contain records.
    transactions: u64,
    /// Commit time of the last transaction with records, in microseconds since 1970.
    last_micros: u64,
    /// Commit time of the most recently started transaction; zero if unknown.
    commit_micros: u64,
    /// Time that was last set with [`Watermark::tick`], in microseconds since 1970.
    now_micros: u64,
}

struct OpenTransaction {
    commit: Lsn,
    records: u64,
}

/// The times at which one transaction was committed and read, in microseconds since 1970; zero if
/// unknown.
#[derive(Clone, Copy, Debug, Default)]
struct Times {
    committed: u64,
    read: u64,
}

/// A violation of the replication protocol. If the violation were ignored, confirming a later
/// position could lose events.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum OrderError {
    /// A transaction begins inside another transaction.
    #[error("a transaction with commit LSN {0} begins inside the transaction with commit LSN {1}")]
    Nested(Lsn, Lsn),
    /// A commit does not match the open transaction, or the transaction's end does not follow its
    /// commit record.
    #[error("the commit at {0} (end {1}) does not match the open transaction")]
    Unmatched(Lsn, Lsn),
    /// A row was received outside a transaction.
    #[error("received a row outside a transaction")]
    Stray,
    /// A commit LSN is lower than an LSN that was already received.
    #[error("commit LSN {0} is lower than the preceding LSN {1}")]
    NotRising(Lsn, Lsn),
}

impl Watermark {
    /// Creates a watermark for a stream that starts at `resume`, the slot's `confirmed_flush_lsn`.
    /// All transactions that end at or before this LSN are durable.
    #[must_use]
    pub fn new(window: Window, resume: Lsn) -> Self {
        Self::observed(window, resume, Arc::default())
    }

    /// Like [`Watermark::new`], but records deliveries in `stats`.
    #[must_use]
    pub fn observed(window: Window, resume: Lsn, stats: Arc<PipelineStats>) -> Self {
        stats.record_window(window);
        Self {
            deliveries: Arc::new(Deliveries {
                slots: Slots::default(),
                stats,
                records: AtomicU64::new(0),
                bytes: AtomicU64::new(0),
                waiter: Waiter::default(),
                failed: AtomicBool::new(false),
                failure: Mutex::new(None),
            }),
            window,
            one_at_a_time: false,
            ends: VecDeque::new(),
            head: 0,
            open: None,
            sent: Window::default(),
            delivered: Window::default(),
            received: resume,
            last_records_end: Lsn::ZERO,
            confirmed: Confirmed(resume),
            checkpointed: None,
            uncovered: VecDeque::new(),
            transactions: 0,
            last_micros: 0,
            commit_micros: 0,
            now_micros: 0,
        }
    }

    /// Returns the object through which the sink reports deliveries to this watermark.
    #[must_use]
    pub fn deliveries(&self) -> Arc<Deliveries> {
        Arc::clone(&self.deliveries)
    }

    /// Continues on a new connection, which starts at `resume`, the slot's `confirmed_flush_lsn`.
    /// The server resends transactions that end after this LSN.
    ///
    /// Records in flight keep their counters, which precede the counters of the resent
    /// transactions. However, delivering these records does not raise the confirmed LSN: the new
    /// connection may be to a different server, whose WAL may end before the LSNs of these records.
    pub fn reconnected(&mut self, resume: Lsn) {
        if let Some(open) = self.open.take() {
            self.seal(open.records, Lsn::ZERO, Times::default());
        }
        self.ends.iter_mut().for_each(|end| *end = Lsn::ZERO);
        self.uncovered.clear();
        self.received = resume;
        self.last_records_end = Lsn::ZERO;
        self.confirmed = Confirmed(resume);
    }

    /// Begins a transaction whose commit record is at `commit`.
    ///
    /// # Errors
    /// Returns an error if another transaction is open, or `commit` is lower than an LSN that was
    /// already received.
    pub fn begin(&mut self, commit: Lsn) -> Result<(), OrderError> {
        // Passing `commit` for both LSNs makes `begin_copy` reject a commit record that precedes
        // the highest LSN received so far.
        self.begin_copy(commit, commit)
    }

    /// Begins a copy of the rows that were committed before `snapshot_lsn`. The copy is treated as
    /// a transaction with its commit record at `commit` and its end at `snapshot_lsn`. The stream
    /// has not started yet, so `snapshot_lsn` may be equal to the LSN at which the stream resumes.
    ///
    /// # Errors
    /// Returns an error if a transaction is open, or if the stream resumes after `snapshot_lsn`.
    pub fn begin_copy(&mut self, commit: Lsn, snapshot_lsn: Lsn) -> Result<(), OrderError> {
        if let Some(open) = &self.open {
            return Err(OrderError::Nested(commit, open.commit));
        }
        if snapshot_lsn < self.received {
            return Err(OrderError::NotRising(snapshot_lsn, self.received));
        }
        self.open = Some(OpenTransaction { commit, records: 0 });
        self.commit_micros = 0;
        Ok(())
    }

    /// Starts tracking the next row of a table that is read directly. Such a row has no LSN, so it
    /// is treated as a transaction, with the row's number in place of an LSN. A watermark tracks
    /// either a stream or the rows of a table, which are numbered from zero.
    ///
    /// # Errors
    /// Returns an error if [`Watermark::end_row`] has not been called for the preceding row.
    pub fn begin_row(&mut self) -> Result<(), OrderError> {
        self.begin(self.received)
    }

    /// Marks the current row as complete. Must be called after the row's record, or a dead letter
    /// that replaces the record, was passed to the sink.
    ///
    /// # Errors
    /// Returns an error if there is no current row.
    pub fn end_row(&mut self) -> Result<(), OrderError> {
        self.commit(self.received, Lsn(self.received.0 + 1))
    }

    /// Returns the number of consecutive durable rows, starting with the first row.
    pub fn durable_rows(&mut self) -> u64 {
        self.confirmed().lsn().0
    }

    /// Sets the commit time of the open transaction, in microseconds since 1970.
    pub fn set_commit_time(&mut self, micros: u64) {
        self.commit_micros = micros;
    }

    /// Sets the current time, in microseconds since 1970. Must be called before each read.
    pub fn tick(&mut self, now_micros: u64) {
        self.now_micros = now_micros;
    }

    /// Counts a record as in flight and returns its tag, or `None` if the window is full or too
    /// many transactions are in flight. `cost` is the record's size, in bytes, as counted toward
    /// `window_bytes`. A record that is larger than the whole window is allowed if no other records
    /// are in flight.
    ///
    /// Must be called before the record is passed to the sink, because the sink may deliver the
    /// record immediately. If the sink does not accept the record, call [`Watermark::release`].
    ///
    /// # Errors
    /// Returns an error if no transaction is open.
    pub fn reserve(&mut self, cost: u64) -> Result<Option<Tag>, OrderError> {
        if self.ends.len() == TRANSACTIONS_MAX {
            self.confirmed();
        }
        if !self.fits(cost) {
            self.delivered = self.deliveries.total();
        }
        let fits = self.fits(cost);
        let open = self.open.as_mut().ok_or(OrderError::Stray)?;
        if self.ends.len() == TRANSACTIONS_MAX || !fits {
            return Ok(None);
        }
        let slot = (self.head + self.ends.len()) % TRANSACTIONS_MAX;
        let tag = Tag(cost.clamp(1, COST_MAX) << SLOT_BITS | slot as u64);
        open.records += 1;
        self.sent.records += 1;
        self.sent.bytes += tag.cost();
        Ok(Some(tag))
    }

    /// Undoes [`Watermark::reserve`] for a record that the sink did not accept.
    pub fn release(&mut self, tag: Tag) {
        if let Some(open) = &mut self.open {
            open.records -= 1;
            self.sent.records -= 1;
            self.sent.bytes -= tag.cost();
        }
    }

    /// Ends the open transaction at `end`.
    ///
    /// # Errors
    /// Returns an error if `commit` is not the commit LSN of the open transaction, or if `end` is
    /// not after `commit`.
    pub fn commit(&mut self, commit: Lsn, end: Lsn) -> Result<(), OrderError> {
        let records = match &self.open {
            Some(open) if open.commit == commit && end > commit => open.records,
            _ => return Err(OrderError::Unmatched(commit, end)),
        };
        self.open = None;
        self.received = end;
        if records == 0 {
            self.raise_end(end);
        } else {
            self.transactions += 1;
            let times = Times {
                committed: self.commit_micros,
                read: self.now_micros,
            };
            self.last_micros = times.committed;
            self.last_records_end = end;
            self.seal(records, end, times);
        }
        Ok(())
    }

    /// Records a keepalive, with which the server indicates that it has no more data to send below
    /// `lsn`. Inside a transaction, a keepalive is ignored if `lsn` is after the transaction's
    /// commit record.
    pub fn record_keepalive(&mut self, lsn: Lsn) {
        if lsn > self.received && self.open.as_ref().is_none_or(|open| lsn <= open.commit) {
            self.received = lsn;
            self.raise_end(lsn);
        }
    }

    /// Returns the LSN that may be confirmed to PostgreSQL now. Within a connection, this LSN never
    /// decreases, and never exceeds the highest LSN received.
    ///
    /// # Panics
    /// Panics if the LSN exceeds the highest LSN received. This would be a bug, and confirming the
    /// LSN to PostgreSQL could lose events.
    pub fn confirmed(&mut self) -> Confirmed {
        while let Some(&end) = self.ends.front() {
            let counter = &self.deliveries.slots.slot_at(self.head).counter;
            if counter.load(Ordering::Acquire) != 0 {
                break;
            }
            counter.store(OPEN_TRANSACTION, Ordering::Relaxed);
            self.head = (self.head + 1) % TRANSACTIONS_MAX;
            self.ends.pop_front();
            self.confirmed = self.confirmed.max(Confirmed(end));
        }
        if self.ends.is_empty() && self.open.is_none() {
            // No counter is in use, so start again with the first counter. As a result, only the
            // first segment is ever allocated if traffic is low.
            self.head = 0;
        }
        assert!(
            self.confirmed.0 <= self.received,
            "tried to confirm WAL up to {}, but WAL was received only up to {}",
            self.confirmed.0,
            self.received,
        );
        match self.checkpointed {
            Some(lsn) => self.confirmed.min(Confirmed(lsn)),
            None => self.confirmed,
        }
    }

    /// Records a durable checkpoint that covers all transactions up to `lsn`. After the first call,
    /// no LSN higher than the LSN of the last checkpoint is confirmed.
    ///
    /// # Panics
    /// Panics if `lsn` is lower than the preceding checkpoint's LSN. This would be a bug, and
    /// events would be delivered twice.
    pub fn record_checkpoint(&mut self, lsn: Lsn) {
        let before = self.checkpointed.replace(lsn);
        assert!(
            before.is_none_or(|before| before <= lsn),
            "the checkpoint moved backwards: found {lsn}, expected at least {before:?}",
        );
        let mut settled = Settled::new(&self.deliveries.stats);
        while let Some((end, times)) = self.uncovered.front()
            && *end <= lsn
        {
            settled.add(|| *times);
            self.uncovered.pop_front();
        }
    }

    /// Like [`Watermark::record_checkpoint`], but has no effect unless a checkpoint with a lower
    /// LSN was recorded before.
    pub fn raise_checkpoint(&mut self, lsn: Lsn) {
        if self.checkpointed.is_some_and(|before| before < lsn) {
            self.record_checkpoint(lsn);
        }
    }

    /// Returns the totals of the records that the sink has accepted.
    #[must_use]
    pub fn sent(&self) -> Window {
        self.sent
    }

    /// Returns the current progress, for monitoring. `confirmed` is the result of
    /// [`Watermark::confirmed`], and `waits` indicates whether the session is waiting for the sink.
    #[must_use]
    pub fn progress(&self, confirmed: Confirmed, waits: bool) -> Progress {
        let oldest = match (self.uncovered.front(), &self.open) {
            (Some((_, times)), _) => times.committed,
            (None, _) if !self.ends.is_empty() => {
                self.deliveries.slots.slot_at(self.head).times().committed
            }
            // A record is not counted until its topic is available. If the transaction has no
            // earlier records, `open.records` is zero even though the session is waiting.
            (None, Some(open)) if open.records > 0 || waits => self.commit_micros,
            (None, _) => 0,
        };
        Progress {
            taken: self.sent,
            transactions: self.transactions,
            received: self.received,
            confirmed: confirmed.lsn(),
            oldest_micros: oldest,
            last_micros: self.last_micros,
            waits,
        }
    }

    /// Returns the statistics in which deliveries are recorded.
    #[must_use]
    pub fn stats(&self) -> &Arc<PipelineStats> {
        &self.deliveries.stats
    }

    /// Returns the number of complete transactions that contain records.
    #[must_use]
    pub fn transactions(&self) -> u64 {
        self.transactions
    }

    /// Returns the highest LSN received on this connection.
    #[must_use]
    pub fn received(&self) -> Lsn {
        self.received
    }

    /// Returns the end LSN of the last transaction with records that was received on this
    /// connection.
    #[must_use]
    pub fn last_records_end(&self) -> Lsn {
        self.last_records_end
    }

    /// Sets the limits for records in flight. Records that are already in flight are not affected,
    /// even if they exceed the new limits.
    pub fn set_window(&mut self, window: Window) {
        self.window = window;
        self.deliveries.stats.record_window(window);
    }

    /// Sets whether only one record may be in flight at a time.
    pub fn set_one_at_a_time(&mut self, one: bool) {
        self.one_at_a_time = one;
    }

    /// Returns the number and size of the records that the sink has accepted but that are not
    /// durable.
    #[must_use]
    pub fn in_flight(&self) -> Window {
        self.sent.minus(self.deliveries.total())
    }

    /// Returns whether the window has space for another record. The result is based on the totals
    /// in `self.delivered`, which may be out of date.
    fn fits(&self, cost: u64) -> bool {
        let in_flight = self.sent.minus(self.delivered);
        in_flight.records == 0
            || !self.one_at_a_time
                && in_flight.records < self.window.records
                && in_flight.bytes.saturating_add(cost) <= self.window.bytes
    }

    /// Waits until [`Watermark::reserve`] may succeed or a delivery fails. If the window is full,
    /// waits until a quarter of the window is free, so that the task is not woken for each record.
    pub async fn wait_for_space(&self) {
        if self.one_at_a_time {
            return self.empty().await;
        }
        let in_flight = self.in_flight();
        let three_quarters = |all: u64| all - all / 4;
        let some_progress = in_flight.records.saturating_sub(1);
        self.wait_for(Window {
            records: three_quarters(self.window.records).min(some_progress),
            bytes: three_quarters(self.window.bytes),
        })
        .await;
    }

    /// Waits until no records are in flight or a delivery fails.
    pub async fn empty(&self) {
        self.wait_for(Window {
            records: 0,
            bytes: 0,
        })
        .await;
    }

    async fn wait_for(&self, at_most: Window) {
        // The sink counts delivered records, not records in flight, so convert the limit to the
        // delivered totals at which to stop waiting.
        let enough = Window {
            records: self.sent.records.saturating_sub(at_most.records),
            bytes: self.sent.bytes.saturating_sub(at_most.bytes),
        };
        loop {
            let woken = self.deliveries.waiter.arm(enough);
            if self.deliveries.failed() || enough.is_within(self.deliveries.total()) {
                return;
            }
            woken.await;
        }
    }

    /// After a transaction has ended, sets its counter to the number of its records that are still
    /// in flight.
    fn seal(&mut self, records: u64, end: Lsn, mut times: Times) {
        if records == 0 {
            return;
        }
        if self.checkpointed.is_some() {
            // Consumers can't read the transaction until a checkpoint covers it, so its durations
            // are recorded when that checkpoint is committed.
            if self.uncovered.len() < TRANSACTIONS_MAX {
                self.uncovered.push_back((end, times));
            }
            times.read = 0;
        }
        let slot = (self.head + self.ends.len()) % TRANSACTIONS_MAX;
        let slot = self.deliveries.slots.slot_at(slot);
        slot.set_times(times);
        // The counter becomes OPEN - delivered + records - OPEN: the number of records still in
        // flight.
        let sealed = OPEN_TRANSACTION - records;
        let before = slot.counter.fetch_sub(sealed, Ordering::AcqRel);
        if before == sealed {
            Settled::new(&self.deliveries.stats).add(|| times);
        }
        self.ends.push_back(end);
    }

    fn raise_end(&mut self, lsn: Lsn) {
        match self.ends.back_mut() {
            Some(end) => *end = lsn.max(*end),
            None => self.confirmed = self.confirmed.max(Confirmed(lsn)),
        }
    }
}

/// The object through which the sink's threads report deliveries to a [`Watermark`].
pub struct Deliveries {
    slots: Slots,
    stats: Arc<PipelineStats>,
    records: AtomicU64,
    bytes: AtomicU64,
    waiter: Waiter,
    failed: AtomicBool,
    failure: Mutex<Option<DeliveryFailure>>,
}

/// A number of consecutive delivered records that belong to the same transaction.
struct Transaction {
    slot: usize,
    records: u64,
}

impl Deliveries {
    /// Counts the records with these tags as durable, and returns their number. Callers should pass
    /// many tags at once, because the state that is shared with the session is updated once per
    /// call.
    pub fn delivered(&self, tags: impl IntoIterator<Item = Tag>) -> u64 {
        let mut delivered = Window::default();
        let mut settled = Settled::new(&self.stats);
        let mut transaction: Option<Transaction> = None;
        for tag in tags {
            delivered.records += 1;
            delivered.bytes += tag.cost();
            match &mut transaction {
                Some(same) if same.slot == tag.slot() => same.records += 1,
                other => {
                    let before = other.replace(Transaction {
                        slot: tag.slot(),
                        records: 1,
                    });
                    self.count(before, &mut settled);
                }
            }
        }
        self.count(transaction, &mut settled);
        drop(settled);
        if delivered.records == 0 {
            return 0;
        }
        let Window { bytes, records } = delivered;
        self.stats.add_delivered(records, bytes);
        let total = Window {
            bytes: self.bytes.fetch_add(bytes, Ordering::SeqCst) + bytes,
            records: self.records.fetch_add(records, Ordering::SeqCst) + records,
        };
        self.waiter.wake_if(|enough| enough.is_within(total));
        records
    }

    fn count(&self, transaction: Option<Transaction>, settled: &mut Settled<'_>) {
        if let Some(Transaction { slot, records }) = transaction {
            let slot = self.slots.slot_at(slot);
            let before = slot.counter.fetch_sub(records, Ordering::AcqRel);
            if before == records {
                settled.add(|| slot.times());
            }
        }
    }

    /// Returns the pipeline's statistics, for monitoring.
    #[must_use]
    pub fn stats(&self) -> &PipelineStats {
        &self.stats
    }

    /// Returns the totals of all records delivered so far.
    fn total(&self) -> Window {
        // Load the number of records first. It is updated after the number of bytes, so the number
        // of bytes loaded afterwards includes at least these records.
        let records = self.records.load(Ordering::SeqCst);
        Window {
            records,
            bytes: self.bytes.load(Ordering::SeqCst),
        }
    }

    /// Reports that the sink has failed to deliver a record. The counter of the record's
    /// transaction never reaches zero, so no later LSN is confirmed. The pipeline restarts from the
    /// confirmed LSN.
    pub fn report_failure(&self, failure: DeliveryFailure) {
        {
            let mut first = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
            if let (Some(first), Some(also)) = (&mut *first, &failure.refused)
                && first.refused.is_some()
            {
                first.refused_until = first.refused_until.max(Some(also.at));
            }
            if first
                .as_ref()
                .is_none_or(|first| failure.permanent && !first.permanent)
            {
                *first = Some(failure);
            }
        }
        self.failed.store(true, Ordering::SeqCst);
        self.waiter.wake_if(|_| true);
    }

    /// Returns whether a delivery has failed.
    #[must_use]
    pub fn failed(&self) -> bool {
        self.failed.load(Ordering::SeqCst)
    }

    /// Returns the first permanent failure, or the first failure if no failure is permanent.
    #[must_use]
    pub fn failure(&self) -> Option<DeliveryFailure> {
        self.failure
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

/// The counters of the transactions in flight. A segment is allocated when one of its counters is
/// used for the first time, so that a pipeline with few transactions in flight does not require
/// memory for [`TRANSACTIONS_MAX`] transactions.
#[derive(Default)]
struct Slots(
    [OnceLock<Box<[Slot; SEGMENT_TRANSACTIONS]>>; TRANSACTIONS_MAX / SEGMENT_TRANSACTIONS],
);

const SEGMENT_TRANSACTIONS: usize = 1 << 11;

impl Slots {
    #[inline]
    fn slot_at(&self, slot: usize) -> &Slot {
        let segment = &self.0[slot / SEGMENT_TRANSACTIONS % self.0.len()];
        let slots = segment.get_or_init(|| Box::new(std::array::from_fn(|_| Slot::default())));
        &slots[slot % SEGMENT_TRANSACTIONS]
    }
}

/// State of one transaction in flight.
struct Slot {
    counter: AtomicU64,
    /// The [`Times`] of the transaction, which the session writes and the sink's threads read.
    committed: AtomicU64,
    read: AtomicU64,
}

impl Default for Slot {
    fn default() -> Self {
        Self {
            counter: AtomicU64::new(OPEN_TRANSACTION),
            committed: AtomicU64::default(),
            read: AtomicU64::default(),
        }
    }
}

impl Slot {
    fn set_times(&self, times: Times) {
        self.committed.store(times.committed, Ordering::Relaxed);
        self.read.store(times.read, Ordering::Relaxed);
    }

    fn times(&self) -> Times {
        Times {
            committed: self.committed.load(Ordering::Relaxed),
            read: self.read.load(Ordering::Relaxed),
        }
    }
}

/// Maximum number of consecutive transactions that share one pair of times when they become durable
/// together. The durations of all of them are computed from the commit time and the read time of
/// the first transaction. Reading the times of each transaction would take as long as counting its
/// records.
const SHARED_TIMES_MAX: u64 = 16;

/// Records the durations of transactions that become durable together.
struct Settled<'s> {
    stats: &'s PipelineStats,
    /// The commit time and the read time of the first of these transactions.
    times: Times,
    alike: u64,
}

impl<'s> Settled<'s> {
    fn new(stats: &'s PipelineStats) -> Self {
        Self {
            stats,
            times: Times::default(),
            alike: 0,
        }
    }

    /// Counts a transaction that has become durable or, with exactly-once delivery, visible to
    /// consumers.
    fn add(&mut self, times: impl FnOnce() -> Times) {
        if self.alike == 0 {
            self.times = times();
            if self.times.read == 0 {
                return;
            }
        }
        self.alike += 1;
        if self.alike >= SHARED_TIMES_MAX {
            self.write();
        }
    }

    fn write(&mut self) {
        let Times { committed, read } = self.times;
        let (now, alike) = (unix_micros(), std::mem::take(&mut self.alike));
        let delivery = &self.stats.delivery;
        delivery.record_alike(now.saturating_sub(read), alike);
        if committed > 0 {
            let since = now.saturating_sub(committed);
            self.stats.commit_to_delivery.record_alike(since, alike);
        }
    }
}

impl Drop for Settled<'_> {
    fn drop(&mut self) {
        if self.alike > 0 {
            self.write();
        }
    }
}

/// Wakes one waiting task when the delivered totals reach the task's target. If no task is waiting,
/// the check costs only one atomic load.
///
/// The task arms the waiter and then reads the totals. The sink's threads update the totals and
/// then check whether the waiter is armed. All these operations are in a single total order
/// (`SeqCst`), so at least one of the two threads sees the other thread's write.
#[derive(Default)]
struct Waiter {
    armed: AtomicBool,
    records: AtomicU64,
    bytes: AtomicU64,
    notify: Notify,
}

impl Waiter {
    fn arm(&self, enough: Window) -> impl Future<Output = ()> {
        self.records.store(enough.records, Ordering::Relaxed);
        self.bytes.store(enough.bytes, Ordering::Relaxed);
        self.armed.store(true, Ordering::SeqCst);
        self.notify.notified()
    }

    fn wake_if(&self, reached: impl Fn(Window) -> bool) {
        if !self.armed.load(Ordering::SeqCst) {
            return;
        }
        let enough = Window {
            records: self.records.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
        };
        if reached(enough) && self.armed.swap(false, Ordering::SeqCst) {
            self.notify.notify_one();
        }
    }
}

#[cfg(test)]
mod tests;
