//! Deliveries in any order become one contiguous confirmed LSN.
//!
//! Each transaction with records has a counter; a delivery takes one from it, and those that come
//! together are taken together. The LSN to confirm is the end of the last transaction before which,
//! and including which, every counter is at zero. Transactions without records and keepalives need
//! no counter: they lift the end of the transaction before them.
//!
//! Only this module can make a [`Confirmed`], so nothing else can decide what PostgreSQL is told.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use tokio::sync::Notify;

use super::failure::DeliveryFailure;
use super::stats::{PipelineStats, Progress};
use crate::model::lsn::Lsn;
use crate::model::time::unix_micros;
use crate::model::window::Window;

/// An LSN such that every record of every transaction ending at or before it is durable in the
/// sink. Made by [`Watermark::confirmed`] alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Confirmed(Lsn);

impl Confirmed {
    #[must_use]
    pub fn lsn(self) -> Lsn {
        self.0
    }
}

/// Transactions with records that may be between reading and durable.
const TRANSACTIONS_MAX: usize = 1 << SLOT_BITS;
const SLOT_BITS: u32 = 16;
const COST_MAX: u64 = (1 << (u64::BITS - SLOT_BITS)) - 1;

/// While its transaction is open, a counter stands this much higher than the records in flight, so
/// that it can't be at zero before the commit.
const OPEN: u64 = 1 << 63;

/// What a record carries through the sink and back: its transaction's counter and its cost. One
/// word, so that it fits the sink's per-record pointer, and never zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tag(u64);

impl Tag {
    /// The tag as the word it is.
    #[must_use]
    pub fn to_word(self) -> u64 {
        self.0
    }

    /// The tag that [`Tag::to_word`] was taken of.
    #[must_use]
    pub fn from_word(word: u64) -> Self {
        Self(word)
    }

    /// What the record takes of the window, in bytes.
    #[must_use]
    pub fn cost(self) -> u64 {
        self.0 >> SLOT_BITS
    }

    #[expect(clippy::cast_possible_truncation, reason = "masked to SLOT_BITS bits")]
    fn slot(self) -> usize {
        (self.0 & (TRANSACTIONS_MAX as u64 - 1)) as usize
    }
}

/// The reading side: what was sent, and up to where it has become durable.
pub struct Watermark {
    deliveries: Arc<Deliveries>,
    window: Window,
    /// See [`Watermark::one_at_a_time`].
    one_at_a_time: bool,
    /// Ends of the transactions that have a counter and are complete, oldest first.
    ends: VecDeque<Lsn>,
    /// Counter of the oldest transaction.
    head: usize,
    open: Option<OpenTransaction>,
    sent: Window,
    /// What was delivered when last looked at. The sink's threads write the true totals all the
    /// time, so a look at each record would cost a cache miss.
    delivered: Window,
    /// The highest LSN of a keepalive, an empty transaction or a commit.
    received: Lsn,
    /// Of this connection, the end of the last transaction that had records.
    carried: Lsn,
    confirmed: Confirmed,
    /// Exactly-once: what a committed checkpoint covers. Nothing beyond it may be confirmed.
    checkpointed: Option<Lsn>,
    /// Exactly-once: ends and times of transactions that no checkpoint covers yet.
    uncovered: VecDeque<(Lsn, Times)>,
    /// Transactions that had records.
    transactions: u64,
    /// When the last of them was committed, in microseconds since 1970.
    last_micros: u64,
    /// When the transaction was committed that began last; zero where that is not known.
    begun_micros: u64,
    /// The time, as of the last look at the clock.
    now_micros: u64,
}

struct OpenTransaction {
    commit: Lsn,
    records: u64,
}

/// Times of one transaction, in microseconds since 1970; zero where they are not known.
#[derive(Clone, Copy, Debug, Default)]
struct Times {
    committed: u64,
    read: u64,
}

/// A stream that violates the protocol. Confirming anything after it could lose events.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum OrderError {
    /// A transaction begins inside another one.
    #[error("transaction with commit LSN {0} begins inside the one with commit LSN {1}")]
    Nested(Lsn, Lsn),
    /// A transaction ends that didn't begin, or ends before its commit record.
    #[error("commit at {0} (end {1}) doesn't end the transaction that began")]
    Unmatched(Lsn, Lsn),
    /// A row outside a transaction.
    #[error("row outside a transaction")]
    Stray,
    /// Commits must rise.
    #[error("commit LSN {0} isn't above {1}, which came before it")]
    NotRising(Lsn, Lsn),
}

impl Watermark {
    /// Nothing sent yet, and everything up to `resume` durable: PostgreSQL's own word for it, the
    /// slot's `confirmed_flush_lsn`.
    #[must_use]
    pub fn new(window: Window, resume: Lsn) -> Self {
        Self::observed(window, resume, Arc::default())
    }

    /// As [`Watermark::new`]; what is delivered is written down in `stats`.
    #[must_use]
    pub fn observed(window: Window, resume: Lsn, stats: Arc<PipelineStats>) -> Self {
        stats.allowed(window);
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
            carried: Lsn::ZERO,
            confirmed: Confirmed(resume),
            checkpointed: None,
            uncovered: VecDeque::new(),
            transactions: 0,
            last_micros: 0,
            begun_micros: 0,
            now_micros: 0,
        }
    }

    /// The other side, for the sink.
    #[must_use]
    pub fn deliveries(&self) -> Arc<Deliveries> {
        Arc::clone(&self.deliveries)
    }

    /// A new connection starts at `resume`, the slot's `confirmed_flush_lsn`, and sends again what
    /// ends after it.
    ///
    /// What is in flight keeps its counters, ahead of what is re-sent, but confirms nothing any
    /// more: the server may be another one now, whose log ends before those LSNs.
    pub fn reconnected(&mut self, resume: Lsn) {
        if let Some(open) = self.open.take() {
            self.seal(open.records, Lsn::ZERO, Times::default());
        }
        self.ends.iter_mut().for_each(|end| *end = Lsn::ZERO);
        self.uncovered.clear();
        self.received = resume;
        self.carried = Lsn::ZERO;
        self.confirmed = Confirmed(resume);
    }

    /// A transaction begins whose commit record is at `commit`.
    ///
    /// # Errors
    /// Another is open, or commits don't rise.
    pub fn begin(&mut self, commit: Lsn) -> Result<(), OrderError> {
        // Nothing was received beyond its own commit record.
        self.begin_copy(commit, commit)
    }

    /// A copy begins of what was committed before `snapshot_lsn`, which is where it ends. Its commit record counts as
    /// at `commit`. The stream has not gone on yet, so the consistent point may be where that resumes.
    ///
    /// # Errors
    /// A transaction is open, or the stream resumes beyond the consistent point.
    pub fn begin_copy(&mut self, commit: Lsn, snapshot_lsn: Lsn) -> Result<(), OrderError> {
        if let Some(open) = &self.open {
            return Err(OrderError::Nested(commit, open.commit));
        }
        if snapshot_lsn < self.received {
            return Err(OrderError::NotRising(snapshot_lsn, self.received));
        }
        self.open = Some(OpenTransaction { commit, records: 0 });
        self.begun_micros = 0;
        Ok(())
    }

    /// The next row of a table begins. Rows that are read from a table stand in no log: each is durable by itself, and
    /// its number has the place that an LSN has in a stream. A watermark is of a stream, or from zero on of such rows.
    ///
    /// # Errors
    /// The row before it has not ended.
    pub fn begin_row(&mut self) -> Result<(), OrderError> {
        self.begin(self.received)
    }

    /// That row is complete: its record was taken, or a dead letter.
    ///
    /// # Errors
    /// None has begun.
    pub fn end_row(&mut self) -> Result<(), OrderError> {
        self.commit(self.received, Lsn(self.received.0 + 1))
    }

    /// How many rows are durable, with all before them.
    pub fn durable_rows(&mut self) -> u64 {
        self.confirmed().lsn().0
    }

    /// When the transaction was committed that is open, in microseconds since 1970.
    pub fn committed_at(&mut self, micros: u64) {
        self.begun_micros = micros;
    }

    /// It is now so many microseconds since 1970. To be said before each read.
    pub fn tick(&mut self, now_micros: u64) {
        self.now_micros = now_micros;
    }

    /// Counts one more record, which takes `cost` bytes, as in flight: its tag, or nothing while
    /// the window is full. A record larger than the whole window passes when nothing else is in
    /// flight.
    ///
    /// It is counted before the sink has it, because the sink may deliver it at once; what the
    /// sink then refuses goes to [`Watermark::release`].
    ///
    /// # Errors
    /// No transaction is open.
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

    /// The sink has not taken the record with this tag.
    pub fn release(&mut self, tag: Tag) {
        if let Some(open) = &mut self.open {
            open.records -= 1;
            self.sent.records -= 1;
            self.sent.bytes -= tag.cost();
        }
    }

    /// The open transaction is complete and ends at `end`.
    ///
    /// # Errors
    /// It isn't the one that began.
    pub fn commit(&mut self, commit: Lsn, end: Lsn) -> Result<(), OrderError> {
        let records = match &self.open {
            Some(open) if open.commit == commit && end > commit => open.records,
            _ => return Err(OrderError::Unmatched(commit, end)),
        };
        self.open = None;
        self.received = end;
        if records == 0 {
            self.lift(end);
        } else {
            self.transactions += 1;
            let times = Times {
                committed: self.begun_micros,
                read: self.now_micros,
            };
            self.last_micros = times.committed;
            self.carried = end;
            self.seal(records, end, times);
        }
        Ok(())
    }

    /// The server has nothing to send below `lsn`: a keepalive. Inside a transaction it counts only
    /// if it is before that transaction's commit.
    pub fn idle(&mut self, lsn: Lsn) {
        if lsn > self.received && self.open.as_ref().is_none_or(|open| lsn <= open.commit) {
            self.received = lsn;
            self.lift(lsn);
        }
    }

    /// What may be told to PostgreSQL now. On one connection it never goes back, and it never is
    /// beyond what was received.
    ///
    /// # Panics
    /// The watermark is beyond what was received: a defect that must not reach PostgreSQL.
    pub fn confirmed(&mut self) -> Confirmed {
        while let Some(&end) = self.ends.front() {
            let counter = &self.deliveries.slots.at(self.head).counter;
            if counter.load(Ordering::Acquire) != 0 {
                break;
            }
            counter.store(OPEN, Ordering::Relaxed);
            self.head = (self.head + 1) % TRANSACTIONS_MAX;
            self.ends.pop_front();
            self.confirmed = self.confirmed.max(Confirmed(end));
        }
        if self.ends.is_empty() && self.open.is_none() {
            // No record has a slot: who is quiet stays in the first segment.
            self.head = 0;
        }
        assert!(
            self.confirmed.0 <= self.received,
            "would confirm {}, but only {} was received",
            self.confirmed.0,
            self.received,
        );
        match self.checkpointed {
            Some(lsn) => self.confirmed.min(Confirmed(lsn)),
            None => self.confirmed,
        }
    }

    /// A checkpoint that covers everything up to `lsn` is durable. From the first call on nothing
    /// beyond the last one is confirmed.
    ///
    /// # Panics
    /// It covers less than the one before it: a defect that would repeat events.
    pub fn checkpointed(&mut self, lsn: Lsn) {
        let before = self.checkpointed.replace(lsn);
        assert!(
            before.is_none_or(|before| before <= lsn),
            "a checkpoint up to {lsn} came after one up to {before:?}",
        );
        let mut settled = Settled::of(&self.deliveries.stats);
        while let Some((end, times)) = self.uncovered.front()
            && *end <= lsn
        {
            settled.add(|| *times);
            self.uncovered.pop_front();
        }
    }

    /// As [`Watermark::checkpointed`] where that was called before, unless a later one is durable already.
    pub fn checkpointed_at_least(&mut self, lsn: Lsn) {
        if self.checkpointed.is_some_and(|before| before < lsn) {
            self.checkpointed(lsn);
        }
    }

    /// Totals of what the sink has taken.
    #[must_use]
    pub fn sent(&self) -> Window {
        self.sent
    }

    /// How far it has got, for monitoring; `confirmed` is what [`Watermark::confirmed`] said,
    /// and `waits` whether something waits for the sink.
    #[must_use]
    pub fn progress(&self, confirmed: Confirmed, waits: bool) -> Progress {
        let oldest = match (self.uncovered.front(), &self.open) {
            (Some((_, times)), _) => times.committed,
            (None, _) if !self.ends.is_empty() => {
                self.deliveries.slots.at(self.head).times().committed
            }
            // A row that waits for its topic is not counted as sent yet.
            (None, Some(open)) if open.records > 0 || waits => self.begun_micros,
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

    /// Where it is written down.
    #[must_use]
    pub fn stats(&self) -> &Arc<PipelineStats> {
        &self.deliveries.stats
    }

    /// Transactions that had records.
    #[must_use]
    pub fn transactions(&self) -> u64 {
        self.transactions
    }

    /// The highest LSN that was received on this connection.
    #[must_use]
    pub fn received(&self) -> Lsn {
        self.received
    }

    /// The end of the last transaction that had records, of those received on this connection.
    #[must_use]
    pub fn carried(&self) -> Lsn {
        self.carried
    }

    /// From now on that much may be in flight; what is more by then stays.
    pub fn allow(&mut self, window: Window) {
        self.window = window;
        self.deliveries.stats.allowed(window);
    }

    /// From now on nothing is in flight beside a record, or again what the window allows.
    pub fn one_at_a_time(&mut self, one: bool) {
        self.one_at_a_time = one;
    }

    /// Records and bytes that the sink has and that aren't durable.
    #[must_use]
    pub fn in_flight(&self) -> Window {
        self.sent.minus(self.deliveries.total())
    }

    /// The window has room for one more record, by the last look at what was delivered.
    fn fits(&self, cost: u64) -> bool {
        let in_flight = self.sent.minus(self.delivered);
        in_flight.records == 0
            || !self.one_at_a_time
                && in_flight.records < self.window.records
                && in_flight.bytes.saturating_add(cost) <= self.window.bytes
    }

    /// Resolves when [`Watermark::reserve`] is worth another try, or a delivery has failed. A full
    /// window is waited for until a quarter of it is free, so that many records share the cost of
    /// a sleep and a wake.
    pub async fn room(&self) {
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

    /// Resolves when the sink has nothing left, or a delivery has failed.
    pub async fn empty(&self) {
        self.wait_for(Window {
            records: 0,
            bytes: 0,
        })
        .await;
    }

    async fn wait_for(&self, at_most: Window) {
        // As totals delivered, which is what the other side counts.
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

    /// Gives the counter of the transaction that was open its true value.
    fn seal(&mut self, records: u64, end: Lsn, mut times: Times) {
        if records == 0 {
            return;
        }
        if self.checkpointed.is_some() {
            // It is readable only when a checkpoint covers it.
            if self.uncovered.len() < TRANSACTIONS_MAX {
                self.uncovered.push_back((end, times));
            }
            times.read = 0;
        }
        let slot = (self.head + self.ends.len()) % TRANSACTIONS_MAX;
        let slot = self.deliveries.slots.at(slot);
        slot.timed(times);
        // OPEN - delivered + records - OPEN: what is still in flight.
        let sealed = OPEN - records;
        let before = slot.counter.fetch_sub(sealed, Ordering::AcqRel);
        if before == sealed {
            Settled::of(&self.deliveries.stats).add(|| times);
        }
        self.ends.push_back(end);
    }

    fn lift(&mut self, lsn: Lsn) {
        match self.ends.back_mut() {
            Some(end) => *end = lsn.max(*end),
            None => self.confirmed = self.confirmed.max(Confirmed(lsn)),
        }
    }
}

/// The sink's side: called from its threads.
pub struct Deliveries {
    slots: Slots,
    stats: Arc<PipelineStats>,
    records: AtomicU64,
    bytes: AtomicU64,
    waiter: Waiter,
    failed: AtomicBool,
    failure: Mutex<Option<DeliveryFailure>>,
}

/// Records of one transaction that came in a row.
struct Transaction {
    slot: usize,
    records: u64,
}

impl Deliveries {
    /// The records with these tags are durable; gives how many. Best called with many: what the
    /// reading side looks at is written once.
    pub fn delivered(&self, tags: impl IntoIterator<Item = Tag>) -> u64 {
        let mut delivered = Window::default();
        let mut settled = Settled::of(&self.stats);
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
        self.stats.delivered(records, bytes);
        let total = Window {
            bytes: self.bytes.fetch_add(bytes, Ordering::SeqCst) + bytes,
            records: self.records.fetch_add(records, Ordering::SeqCst) + records,
        };
        self.waiter.wake_if(|enough| enough.is_within(total));
        records
    }

    fn count(&self, of: Option<Transaction>, settled: &mut Settled<'_>) {
        if let Some(Transaction { slot, records }) = of {
            let slot = self.slots.at(slot);
            let before = slot.counter.fetch_sub(records, Ordering::AcqRel);
            if before == records {
                settled.add(|| slot.times());
            }
        }
    }

    /// What is known of the pipeline, for monitoring.
    #[must_use]
    pub fn stats(&self) -> &PipelineStats {
        &self.stats
    }

    /// What was delivered, ever.
    fn total(&self) -> Window {
        // Records first: they are counted last, so the bytes are never behind them.
        let records = self.records.load(Ordering::SeqCst);
        Window {
            records,
            bytes: self.bytes.load(Ordering::SeqCst),
        }
    }

    /// A record is lost to this sink. Its counter never reaches zero, so nothing after it is
    /// confirmed; the pipeline starts again from what was.
    pub fn failed_with(&self, failure: DeliveryFailure) {
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

    /// Some delivery has failed.
    #[must_use]
    pub fn failed(&self) -> bool {
        self.failed.load(Ordering::SeqCst)
    }

    /// The first failure, or the first permanent one.
    #[must_use]
    pub fn failure(&self) -> Option<DeliveryFailure> {
        self.failure
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

/// Of the transactions in flight. A segment is there from the first use of one of its slots on, so that a pipeline that never has
/// many transactions in flight does not pay for [`TRANSACTIONS_MAX`] of them.
#[derive(Default)]
struct Slots([OnceLock<Box<[Slot; SEGMENT]>>; TRANSACTIONS_MAX / SEGMENT]);

const SEGMENT: usize = 1 << 11;

impl Slots {
    #[inline]
    fn at(&self, slot: usize) -> &Slot {
        let segment = &self.0[slot / SEGMENT % self.0.len()];
        let slots = segment.get_or_init(|| Box::new(std::array::from_fn(|_| Slot::default())));
        &slots[slot % SEGMENT]
    }
}

/// What is known of one of them.
struct Slot {
    counter: AtomicU64,
    /// [`Times`] that the reading side writes and the sink's side reads.
    committed: AtomicU64,
    read: AtomicU64,
}

impl Default for Slot {
    fn default() -> Self {
        Self {
            counter: AtomicU64::new(OPEN),
            committed: AtomicU64::default(),
            read: AtomicU64::default(),
        }
    }
}

impl Slot {
    fn timed(&self, times: Times) {
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

/// So many transactions that become durable together count as the first of them. They are neighbours
/// in the log, and looking at each would cost as much as counting its records.
const ALIKE: u64 = 16;

/// Counts how long transactions took that become durable together.
struct Settled<'s> {
    stats: &'s PipelineStats,
    /// Of the first of them.
    times: Times,
    alike: u64,
}

impl<'s> Settled<'s> {
    fn of(stats: &'s PipelineStats) -> Self {
        Self {
            stats,
            times: Times::default(),
            alike: 0,
        }
    }

    /// One is durable, or, with exactly-once, readable.
    fn add(&mut self, times: impl FnOnce() -> Times) {
        if self.alike == 0 {
            self.times = times();
            if self.times.read == 0 {
                return;
            }
        }
        self.alike += 1;
        if self.alike >= ALIKE {
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

/// Wakes one sleeper when its target is reached, and costs one load where nobody sleeps.
///
/// The sleeper arms and then looks at the totals; the other side adds to the totals and then looks
/// whether it is armed. In one total order (`SeqCst`) one of the two sees the other.
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
