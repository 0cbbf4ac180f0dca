//! The simulated servers' state, and what is asked of them after each step.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use super::judge;
use crate::delivery::checkpoint::{Checkpoint, Delivered, Switch};
use crate::model::lsn::{Lsn, Position};
use crate::postgres::catalog::SnapshotRecord;

pub(super) const PARTITIONS: usize = 2;
pub(super) const SYSTEM_ID: &str = "7000000000000000001";
pub(super) const DEAD_LETTERS: &str = "dead-letters";
/// `transaction.timeout.ms`. In this time the slowest link takes what is always allowed to be in
/// flight, and not the whole of what is written.
const TRANSACTION_TIMEOUT: Duration = Duration::from_secs(30);

/// A committed transaction in WAL.
#[derive(Clone, Debug)]
pub(super) struct Transaction {
    pub(super) commit: Lsn,
    pub(super) end: Lsn,
    pub(super) xid: u32,
    /// When it was committed: no two at the same time, in whatever history.
    pub(super) time: i64,
    pub(super) events: Vec<Event>,
}

/// An event: a number that no other has, and the partition it belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Event {
    pub(super) id: u64,
    pub(super) partition: usize,
}

/// The event has a column that is no topic.
pub(super) fn is_unroutable(id: u64) -> bool {
    id.is_multiple_of(11)
}

/// Kafka does not take the event's payload.
pub(super) fn is_oversize(id: u64) -> bool {
    id.is_multiple_of(13) && !is_unroutable(id)
}

/// The brokers do not take the event's payload, which they say only when they get it.
pub(super) fn is_refused(id: u64) -> bool {
    id.is_multiple_of(29) && !is_unroutable(id) && !is_oversize(id)
}

/// PostgreSQL.
#[derive(Clone)]
pub(super) struct Database {
    pub(super) timeline: u32,
    pub(super) history: Vec<Switch>,
    pub(super) log: Vec<Transaction>,
    /// The end of WAL.
    pub(super) end: Lsn,
    next_xid: u32,
    pub(super) next_id: u64,
    /// Taken by transactions that are open.
    pub(super) open_ids: Vec<u64>,
    next_time: i64,
    /// Where the slot was made at first.
    pub(super) made: Lsn,
    /// What was written into the journal about the snapshot, and where in the log that ends.
    pub(super) journal: Vec<(Lsn, SnapshotRecord)>,
    /// The server's statistics have transactions that the slot has sent.
    pub(super) has_sent: bool,
    /// Where in the log it was recorded that the slot was read.
    pub(super) begun: Option<Lsn>,
    /// Rises when all its connections end.
    pub(super) incarnation: u64,
    /// The slot, as the server knows it, and as it is on its disk.
    pub(super) confirmed: Lsn,
    pub(super) on_disk: Lsn,
    /// The timeline and what was written down of the slot.
    pub(super) state: Option<(u32, Lsn)>,
    /// The walsender that holds the slot.
    pub(super) active: Option<u64>,
    /// Where the last stream began.
    pub(super) streamed_from: Lsn,
    pub(super) next_connection: u64,
    pub(super) is_up: bool,
    /// It does not accept who asks.
    pub(super) refuses: bool,
}

/// A record in a partition.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stored {
    pub(super) id: u64,
    /// The Kafka transaction it is in; none is always visible.
    transaction: Option<u64>,
}

/// What became of a Kafka transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Open,
    Committed,
    Aborted,
}

/// Kafka.
pub(super) struct Cluster {
    pub(super) partitions: [Vec<Stored>; PARTITIONS],
    transactions: BTreeMap<u64, Fate>,
    next_transaction: u64,
    /// When the open transaction got its first record.
    open_since: Option<Instant>,
    /// Behind a slow link, the records a second that come through.
    pub(super) rate: Option<u64>,
    /// Where records are refused, that many at once are too many in a batch.
    pub(super) batch_max: Option<usize>,
    /// Of all batches that were refused, the last row.
    pub(super) refused_until: Option<Position>,
    /// The epoch of the producer that has taken over last.
    pub(super) epoch: u64,
    pub(super) checkpoint: Option<Checkpoint>,
    pub(super) is_up: bool,
}

/// Everything.
pub(super) struct World {
    pub(super) dice: fastrand::Rng,
    pub(super) exactly_once: bool,
    /// The outbox has rows that are older than its slot.
    pub(super) has_older: bool,
    /// What was copied of snapshots, in this order.
    pub(super) copies: Vec<Vec<Event>>,
    /// Of each copy, where the last stream had begun by then, and its consistent point.
    pub(super) streams_of_copies: Vec<(Lsn, Lsn)>,
    pub(super) undone: Option<Undone>,
    pub(super) database: Database,
    pub(super) cluster: Cluster,
    /// Events of transactions that a failover has lost.
    pub(super) lost: BTreeSet<u64>,
    /// The database as it was once, and how many copies were begun by then.
    copy: Option<(Database, usize)>,
    pub(super) put_back: Option<PutBack>,
    /// What a rule found broken; the first is what counts.
    pub(super) broken: Option<String>,
}

/// The database was put back to an earlier state, or the slot re-created, and nobody has told.
#[derive(Clone, Copy, Debug)]
pub(super) struct PutBack {
    /// Where the slot stood when it was up again.
    confirmed: Lsn,
    /// Events from this one on are of the other history.
    first_id: u64,
}

/// Copies that a database which was put back knows nothing of, for it had all of an earlier one: they are not
/// resumed, and not begun again.
pub(super) struct Undone {
    pub(super) copies: Range<usize>,
    /// Where its slot stood.
    pub(super) confirmed: Lsn,
}

/// The world, shared by the tasks of one simulation.
#[derive(Clone)]
pub(super) struct Shared {
    world: Arc<Mutex<World>>,
    /// Something has changed that a walsender waits for.
    pub(super) changed: Arc<Notify>,
}

impl Shared {
    pub(super) fn new(seed: u64, exactly_once: bool) -> Self {
        let start = Lsn(0x1000);
        Self {
            world: Arc::new(Mutex::new(World {
                dice: fastrand::Rng::with_seed(seed),
                exactly_once,
                has_older: false,
                copies: Vec::new(),
                streams_of_copies: Vec::new(),
                undone: None,
                database: Database {
                    timeline: 1,
                    history: Vec::new(),
                    log: Vec::new(),
                    end: start,
                    next_xid: 700,
                    next_id: 1,
                    open_ids: Vec::new(),
                    next_time: 1,
                    made: start,
                    journal: Vec::new(),
                    has_sent: false,
                    begun: None,
                    incarnation: 0,
                    confirmed: start,
                    on_disk: start,
                    state: None,
                    active: None,
                    streamed_from: Lsn::ZERO,
                    next_connection: 1,
                    is_up: true,
                    refuses: false,
                },
                cluster: Cluster {
                    partitions: Default::default(),
                    transactions: BTreeMap::new(),
                    next_transaction: 1,
                    open_since: None,
                    rate: None,
                    batch_max: draw_batch_max(seed),
                    refused_until: None,
                    epoch: 0,
                    checkpoint: None,
                    is_up: true,
                },
                lost: BTreeSet::new(),
                copy: None,
                put_back: None,
                broken: None,
            })),
            changed: Arc::default(),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Apart from all other draws.
fn draw_batch_max(seed: u64) -> Option<usize> {
    let mut dice = fastrand::Rng::with_seed(seed.rotate_left(32));
    (dice.u8(0..8) == 0).then(|| dice.usize(1..20))
}

impl Database {
    fn end_connections(&mut self) {
        self.active = None;
        self.incarnation += 1;
    }
}

impl World {
    pub(super) fn chance(&mut self, percent: u8) -> bool {
        self.dice.u8(0..100) < percent
    }

    pub(super) fn break_rule(&mut self, what: String) {
        self.broken.get_or_insert(what);
    }

    /// Commits a transaction.
    pub(super) fn commit(&mut self) {
        let count = match self.dice.u8(0..10) {
            0 => 0,
            1..8 => self.dice.usize(1..5),
            // Cut in two they would get through.
            _ if self.cluster.rate.is_some() => self.dice.usize(100..400),
            _ => self.dice.usize(5..40),
        };
        if self.has_older && self.chance(20) {
            self.leave_id_open();
        }
        let events = (0..count)
            .map(|_| Event {
                id: self.take_id(),
                partition: self.dice.usize(0..PARTITIONS),
            })
            .collect();
        let database = &mut self.database;
        // Commit records of neighbours touch each other now and then.
        let gap = self.dice.u64(0..3) * 8;
        let commit = Lsn(database.end.0 + gap);
        let end = Lsn(commit.0 + 0x20);
        database.next_xid += 1;
        database.next_time += 1;
        database.end = end;
        database.log.push(Transaction {
            commit,
            end,
            xid: database.next_xid,
            time: database.next_time,
            events,
        });
    }

    /// Writes log that is nobody's event.
    pub(super) fn write_other_log(&mut self) {
        self.database.end.0 += self.dice.u64(1..20) * 8;
    }

    /// The server crashes: what it knew of the slot is what is on its disk, and statistics are lost.
    pub(super) fn crash_database(&mut self) {
        self.database.confirmed = self.database.on_disk;
        self.database.end_connections();
        self.database.has_sent = false;
    }

    /// A standby is promoted that has the log up to some place, but all that the slot on it knows.
    pub(super) fn fail_over(&mut self) {
        // One that had not come as far as an earlier failover would be another history.
        let since = self
            .database
            .history
            .last()
            .map_or(Lsn::ZERO, |last| last.at)
            .max(self.database.made);
        let log = &self.database.log;
        let may_go = log.iter().rev().take_while(|t| t.commit >= since).count();
        let keep = log.len() - self.dice.usize(0..4).min(may_go);
        let database = &mut self.database;
        let at = match database.log.get(keep) {
            Some(first_lost) => first_lost.commit,
            None => database.end,
        };
        for transaction in database.log.drain(keep..) {
            self.lost
                .extend(transaction.events.iter().map(|event| event.id));
        }
        database.history.push(Switch {
            timeline: database.timeline,
            at,
        });
        database.timeline += 1;
        database.end = at;
        database.confirmed = database.confirmed.min(at);
        database.on_disk = database.on_disk.min(database.confirmed);
        database.journal.retain(|(end, _)| *end <= at);
        database.begun = database.begun.filter(|end| *end <= at);
        database.has_sent = false;
        database.end_connections();
    }

    /// Keeps the database as it is, to be put back.
    pub(super) fn keep_copy(&mut self) {
        self.copy = Some((self.database.clone(), self.copies.len()));
    }

    /// Puts the copy back, if there is one: the same timeline, and transactions that were committed since
    /// never were. Some others are before anybody connects. Where the slot is made again it is behind them.
    pub(super) fn put_back(&mut self, dice: &mut fastrand::Rng, is_remade: bool, is_down: bool) {
        let Some((copy, begun)) = self.copy.take() else {
            return;
        };
        if !self.can_be_told(copy.end, is_down) {
            return;
        }
        let old = std::mem::replace(&mut self.database, copy);
        let database = &mut self.database;
        database.next_id = old.next_id;
        database.next_time = old.next_time;
        database.next_connection = old.next_connection;
        // The old history may have committed them.
        database.open_ids.clear();
        database.confirmed = database.on_disk;
        database.incarnation = old.incarnation;
        database.end_connections();
        if self.is_copied() {
            self.undone = Some(Undone {
                copies: begun..self.copies.len(),
                confirmed: self.database.confirmed,
            });
        }
        let first_id = old.next_id + 1;
        let ids = |log: &[Transaction]| -> BTreeSet<u64> {
            let events = log.iter().flat_map(|transaction| &transaction.events);
            events.map(|event| event.id).collect()
        };
        let kept = ids(&self.database.log);
        self.lost.extend(ids(&old.log).difference(&kept));
        // Also what a failover had lost since.
        self.lost.retain(|id| !kept.contains(id));
        for _ in 0..dice.usize(0..30) {
            self.commit();
        }
        let (published, safe) = match &self.cluster.checkpoint {
            Some(checkpoint) => {
                let last = match &checkpoint.delivered {
                    Some(Delivered::UpTo(last)) => last.commit_lsn,
                    _ => Lsn::ZERO,
                };
                (last, checkpoint.safe_lsn)
            }
            None => (Lsn::ZERO, Lsn::ZERO),
        };
        if is_remade {
            // A slot at a place where Walpost may have confirmed it with nothing to deliver can't be told
            // from one that it did confirm there.
            if self.database.end > published && self.database.end <= safe {
                self.database.end = Lsn(safe.0 + 8);
            }
            self.database.confirmed = self.database.end;
            self.database.on_disk = self.database.end;
        }
        if dice.bool() {
            self.database.end = self.database.end.max(Lsn(safe.0 + dice.u64(1..40) * 8));
        }
        for _ in 0..dice.usize(0..10) {
            self.commit();
        }
        self.put_back = Some(PutBack {
            confirmed: self.database.confirmed,
            first_id,
        });
    }

    /// Somebody drops the slot while Walpost does not run, or stands by, and makes it again. What was committed
    /// meanwhile is in no stream. Where Walpost has never written down how far it was, nobody can know.
    pub(super) fn make_slot_anew(&mut self, dice: &mut fastrand::Rng) {
        let database = &self.database;
        let known = database
            .state
            .filter(|(timeline, _)| *timeline == database.timeline);
        let Some((_, written)) = known else { return };
        let first_id = self.database.next_id + 1;
        for _ in 0..dice.usize(1..5) {
            self.commit();
        }
        let database = &mut self.database;
        // At an end of the log that was confirmed there is nothing to be told.
        database.end = database.end.max(Lsn(written.0 + 8));
        database.confirmed = database.end;
        database.on_disk = database.end;
        database.active = None;
        database.has_sent = false;
        self.put_back = Some(PutBack {
            confirmed: self.database.confirmed,
            first_id,
        });
    }

    /// Walpost has halted since then: nothing of it was delivered or confirmed.
    pub(super) fn judge_halt(&mut self) {
        let Some(put_back) = self.put_back else {
            return;
        };
        let confirmed = self.database.confirmed;
        if confirmed != put_back.confirmed {
            let text = format!("it halted, and {confirmed} was confirmed: {put_back:?}");
            self.break_rule(text);
        }
        if let Some(id) = self.visible().range(put_back.first_id..).next() {
            let text = format!("it halted, and event {id} was delivered: {put_back:?}");
            self.break_rule(text);
        }
    }

    /// A client says what is durable.
    pub(super) fn confirm(&mut self, connection: u64, lsn: Lsn, sent: Lsn) {
        if self.database.active != Some(connection) || lsn == Lsn::ZERO {
            return;
        }
        if lsn > sent {
            self.break_rule(format!("{lsn} was confirmed, and {sent} sent"));
        }
        // What the slot was made at is nobody's claim.
        if lsn > self.database.confirmed {
            if let Some(event) = self.lacking(lsn) {
                let text = format!("{lsn} was confirmed, and event {} is not durable", event.id);
                self.break_rule(text);
            }
            self.database.confirmed = lsn;
        }
        if self.chance(30) {
            self.database.on_disk = self.database.confirmed;
        }
    }

    /// An event of what ends at or before `lsn` that nobody can read.
    pub(super) fn lacking(&self, lsn: Lsn) -> Option<Event> {
        let visible = self.visible();
        let log = self.database.log.iter();
        let mut events = log
            .filter(|transaction| transaction.end <= lsn)
            .flat_map(|transaction| &transaction.events);
        events.find(|event| !visible.contains(&event.id)).copied()
    }

    /// The ids of records that a reader of committed records can see.
    fn visible(&self) -> BTreeSet<u64> {
        let all = self.cluster.partitions.iter().flatten();
        all.filter(|stored| self.cluster.is_visible(stored))
            .map(|stored| stored.id)
            .collect()
    }

    /// Everything that was committed is delivered and confirmed. Log without events need not be.
    pub(super) fn is_settled(&self) -> bool {
        let visible = self.visible();
        let log = &self.database.log;
        let last = log
            .iter()
            .rfind(|transaction| !transaction.events.is_empty());
        let mut events = log.iter().flat_map(|t| &t.events);
        events.all(|event| visible.contains(&event.id))
            && last.is_none_or(|last| self.database.confirmed >= last.end)
    }

    /// Judges what is in Kafka.
    pub(super) fn judge(&mut self) {
        for partition in 0..PARTITIONS {
            if let Err(what) = self.judge_partition(partition) {
                self.break_rule(format!("partition {partition}: {what}"));
            }
        }
    }

    fn judge_partition(&self, partition: usize) -> Result<(), String> {
        let events = self.database.log.iter().flat_map(|t| &t.events);
        let expected: Vec<u64> = events
            .filter(|event| event.partition == partition)
            .map(|event| event.id)
            .collect();
        let found: Vec<u64> = self.cluster.partitions[partition]
            .iter()
            .filter(|stored| self.cluster.is_visible(stored))
            .map(|stored| stored.id)
            .filter(|id| !self.lost.contains(id))
            .collect();
        let of = |rows: &Vec<Event>| {
            let mut rows = rows.clone();
            rows.retain(|event| event.partition == partition && !self.lost.contains(&event.id));
            rows.iter().map(|event| event.id).collect()
        };
        let copies: Vec<Vec<u64>> = self.copies.iter().map(of).collect();
        if self.exactly_once {
            return judge::judge_each_once(&found, &expected, &copies);
        }
        let undone = self.undone.as_ref().map(|undone| {
            let log = self.database.log.iter();
            let before = log.take_while(|transaction| transaction.commit < undone.confirmed);
            let events = before.flat_map(|transaction| &transaction.events);
            let count = events.filter(|event| event.partition == partition).count();
            (undone.copies.clone(), count)
        });
        judge::judge_repeats(&found, &expected, copies, undone)
    }
}

impl Cluster {
    fn is_visible(&self, stored: &Stored) -> bool {
        match stored.transaction {
            None => true,
            Some(number) => self.transactions.get(&number) == Some(&Fate::Committed),
        }
    }

    /// A producer takes over: whatever an earlier one left open is aborted.
    pub(super) fn take_over(&mut self) -> u64 {
        self.epoch += 1;
        self.abort_open();
        self.epoch
    }

    /// Opens a transaction.
    pub(super) fn begin(&mut self) -> u64 {
        let number = self.next_transaction;
        self.next_transaction += 1;
        self.transactions.insert(number, Fate::Open);
        self.open_since = None;
        number
    }

    /// Aborts the transaction that is open, if it is for too long.
    pub(super) fn give_up_late(&mut self) -> bool {
        let is_late = self
            .open_since
            .is_some_and(|since| since.elapsed() > TRANSACTION_TIMEOUT);
        if is_late {
            self.abort_open();
        }
        is_late
    }

    fn abort_open(&mut self) {
        for fate in self.transactions.values_mut() {
            if *fate == Fate::Open {
                *fate = Fate::Aborted;
            }
        }
        self.open_since = None;
    }

    /// Ends one, if it is open still.
    pub(super) fn end(&mut self, number: u64, checkpoint: Option<Checkpoint>) -> bool {
        match self.transactions.get_mut(&number) {
            Some(fate @ Fate::Open) => {
                *fate = match checkpoint {
                    Some(checkpoint) => {
                        self.checkpoint = Some(checkpoint);
                        Fate::Committed
                    }
                    None => Fate::Aborted,
                };
                true
            }
            _ => false,
        }
    }

    pub(super) fn append(&mut self, partition: usize, id: u64, transaction: Option<u64>) {
        if transaction.is_some() {
            self.open_since.get_or_insert_with(Instant::now);
        }
        self.partitions[partition].push(Stored { id, transaction });
    }
}
