//! The state of the simulated servers, and the invariants that are checked.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use super::record_checks;
use crate::delivery::checkpoint::{Checkpoint, Delivered, Switch};
use crate::model::lsn::{Lsn, Position};
use crate::postgres::catalog::SnapshotRecord;

pub(super) const PARTITIONS: usize = 2;
pub(super) const SYSTEM_ID: &str = "7000000000000000001";
pub(super) const DEAD_LETTER_TOPIC: &str = "dead-letters";
/// The simulated `transaction.timeout.ms`. Long enough for the slowest link to transfer the minimum
/// window, but not to transfer all records of a run.
const TRANSACTION_TIMEOUT: Duration = Duration::from_secs(30);

/// A committed transaction in the WAL.
#[derive(Clone, Debug)]
pub(super) struct Transaction {
    pub(super) commit: Lsn,
    pub(super) end: Lsn,
    pub(super) xid: u32,
    /// Commit time. Unique, even across transactions that a failover or a restore has removed.
    pub(super) time: i64,
    pub(super) events: Vec<Event>,
}

/// An event, with its unique ID and the partition it belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Event {
    pub(super) id: u64,
    pub(super) partition: usize,
}

/// Returns whether the event is unroutable because its topic name is invalid.
pub(super) fn is_unroutable(id: u64) -> bool {
    id.is_multiple_of(11)
}

/// Returns whether the event's payload is too large for Kafka.
pub(super) fn is_oversize(id: u64) -> bool {
    id.is_multiple_of(13) && !is_unroutable(id)
}

/// Returns whether the brokers reject the event because of its payload. The rejection is reported
/// only after the record has been sent.
pub(super) fn is_refused(id: u64) -> bool {
    id.is_multiple_of(29) && !is_unroutable(id) && !is_oversize(id)
}

/// The state of the simulated PostgreSQL server.
#[derive(Clone)]
pub(super) struct Database {
    pub(super) timeline: u32,
    pub(super) history: Vec<Switch>,
    pub(super) log: Vec<Transaction>,
    /// End of the WAL.
    pub(super) end: Lsn,
    next_xid: u32,
    pub(super) next_id: u64,
    /// IDs that open transactions have obtained.
    pub(super) open_ids: Vec<u64>,
    next_time: i64,
    /// The LSN at which the slot was first created.
    pub(super) made: Lsn,
    /// The journal entries about the snapshot, each with the LSN at which its WAL record ends.
    pub(super) journal: Vec<(Lsn, SnapshotRecord)>,
    /// Whether the server's statistics show that the slot has sent transactions.
    pub(super) has_sent: bool,
    /// The end of the WAL when the database first recorded that the slot had been read.
    pub(super) begun: Option<Lsn>,
    /// A number that is incremented whenever the server terminates all connections.
    pub(super) incarnation: u64,
    /// The slot's confirmed position in memory.
    pub(super) confirmed: Lsn,
    /// The slot's confirmed position on disk, which survives a crash.
    pub(super) on_disk: Lsn,
    /// The timeline and position recorded in `walpost.slot_state`.
    pub(super) state: Option<(u32, Lsn)>,
    /// The number of the walsender connection that is using the slot.
    pub(super) active: Option<u64>,
    /// The LSN at which the last stream started.
    pub(super) streamed_from: Lsn,
    pub(super) next_connection: u64,
    pub(super) is_up: bool,
    /// Whether the server refuses connections from the role.
    pub(super) refuses: bool,
}

/// A record in a partition.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stored {
    pub(super) id: u64,
    /// The Kafka transaction that the record belongs to. If `None`, the record is always visible.
    transaction: Option<u64>,
}

/// The state of a Kafka transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TransactionState {
    Open,
    Committed,
    Aborted,
}

/// The state of the simulated Kafka cluster.
pub(super) struct Cluster {
    pub(super) partitions: [Vec<Stored>; PARTITIONS],
    transactions: BTreeMap<u64, TransactionState>,
    next_transaction: u64,
    /// When the open transaction received its first record.
    open_since: Option<Instant>,
    /// The number of records per second that a slow link transfers; `None` if the link is fast.
    pub(super) rate: Option<u64>,
    /// Batches with more records than this are rejected, and so are batches that contain a refused
    /// record. If `None`, the brokers reject nothing.
    pub(super) batch_max: Option<usize>,
    /// The highest position of a row in any rejected batch.
    pub(super) refused_until: Option<Position>,
    /// The epoch of the producer that registered most recently.
    pub(super) epoch: u64,
    pub(super) checkpoint: Option<Checkpoint>,
    pub(super) is_up: bool,
}

/// The complete state of a simulation.
pub(super) struct World {
    pub(super) dice: fastrand::Rng,
    pub(super) exactly_once: bool,
    /// Whether the outbox has rows that are older than its slot.
    pub(super) has_older: bool,
    /// The rows of each copy, in the order in which the copies were started.
    pub(super) copies: Vec<Vec<Event>>,
    /// For each copy, the LSN at which the slot's stream started, and the copy's consistent point.
    pub(super) streams_of_copies: Vec<(Lsn, Lsn)>,
    pub(super) undone: Option<UndoneCopies>,
    pub(super) database: Database,
    pub(super) cluster: Cluster,
    /// IDs of events whose transactions were lost in a failover or a restore.
    pub(super) lost: BTreeSet<u64>,
    /// A backup of the database, and how many copies of the table had been started when the backup
    /// was made.
    backup: Option<(Database, usize)>,
    pub(super) restored: Option<RestoredDatabase>,
    /// A description of the first invariant that was violated.
    pub(super) broken: Option<String>,
}

/// Describes a restore of the database to an earlier state, or a re-creation of the slot, that
/// Walpost must detect.
#[derive(Clone, Copy, Debug)]
pub(super) struct RestoredDatabase {
    /// The slot's position after the restore or re-creation.
    confirmed: Lsn,
    /// ID of the first event that was committed after the restore or re-creation.
    first_id: u64,
}

/// Copies that are undone by restoring a backup. The copies were started after the backup was made,
/// but the backup already records an earlier, complete copy. After the restore, the undone copies
/// are therefore neither resumed nor repeated.
pub(super) struct UndoneCopies {
    pub(super) copies: Range<usize>,
    /// The slot's position in the restored database.
    pub(super) confirmed: Lsn,
}

/// The state shared by the tasks of one simulation.
#[derive(Clone)]
pub(super) struct Shared {
    world: Arc<Mutex<World>>,
    /// Notified when a transaction or other WAL is written. Walsenders wait for this.
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
                backup: None,
                restored: None,
                broken: None,
            })),
            changed: Arc::default(),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Decides whether the brokers reject batches, and above which size. Uses a separate random number
/// generator, so that this decision does not affect the other random choices for the same seed.
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
            // Create more events than a slow link can transfer in a single Kafka transaction before
            // the transaction times out.
            _ if self.cluster.rate.is_some() => self.dice.usize(100..400),
            _ => self.dice.usize(5..40),
        };
        if self.has_older && self.chance(20) {
            self.leave_id_open();
        }
        let events = (0..count)
            .map(|_| Event {
                id: self.next_id(),
                partition: self.dice.usize(0..PARTITIONS),
            })
            .collect();
        let database = &mut self.database;
        // Sometimes, there is no gap between adjacent transactions.
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

    /// Writes WAL that contains no events.
    pub(super) fn write_other_wal(&mut self) {
        self.database.end.0 += self.dice.u64(1..20) * 8;
    }

    /// Crashes the server. The slot falls back to its position on disk, and statistics are lost.
    pub(super) fn crash_database(&mut self) {
        self.database.confirmed = self.database.on_disk;
        self.database.end_connections();
        self.database.has_sent = false;
    }

    /// Promotes a standby that has received the WAL up to a random position. If the slot's position
    /// is higher, it is lowered to the end of that WAL.
    pub(super) fn fail_over(&mut self) {
        // A standby that is promoted has received at least the WAL up to the last failover, because
        // it follows the timeline that began with this failover.
        let since = self
            .database
            .history
            .last()
            .map_or(Lsn::ZERO, |last| last.at)
            .max(self.database.made);
        let log = &self.database.log;
        let removable = log.iter().rev().take_while(|t| t.commit >= since).count();
        let keep = log.len() - self.dice.usize(0..4).min(removable);
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

    pub(super) fn back_up(&mut self) {
        self.backup = Some((self.database.clone(), self.copies.len()));
    }

    /// Restores the backup, if one was made. The timeline stays the same, but transactions that
    /// were committed since the backup no longer exist. Some new transactions are committed before
    /// any instance connects. If the slot is re-created, the re-creation happens after these
    /// transactions.
    pub(super) fn restore_earlier_state(
        &mut self,
        dice: &mut fastrand::Rng,
        recreates_slot: bool,
        is_down: bool,
    ) {
        let Some((copy, begun)) = self.backup.take() else {
            return;
        };
        if !self.is_detectable(copy.end, is_down) {
            return;
        }
        let old = std::mem::replace(&mut self.database, copy);
        let database = &mut self.database;
        database.next_id = old.next_id;
        database.next_time = old.next_time;
        database.next_connection = old.next_connection;
        // Don't reuse the IDs of transactions that were open when the backup was made: they may
        // have been committed since.
        database.open_ids.clear();
        database.confirmed = database.on_disk;
        database.incarnation = old.incarnation;
        database.end_connections();
        if self.is_copied() {
            self.undone = Some(UndoneCopies {
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
        // Events that a failover removed after the backup was made exist again after the restore.
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
        if recreates_slot {
            // Walpost can't detect that a slot was re-created if the new slot's position is one
            // that Walpost may have confirmed, so move the slot past such positions.
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
        self.restored = Some(RestoredDatabase {
            confirmed: self.database.confirmed,
            first_id,
        });
    }

    /// Drops and re-creates the slot while Walpost is not running or is frozen. Transactions that
    /// are committed in between are never sent. Does nothing if Walpost has not recorded a position
    /// on this timeline, because it could not detect the replacement.
    pub(super) fn recreate_slot(&mut self, dice: &mut fastrand::Rng) {
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
        // Walpost can't detect that a slot was re-created if the new slot's position is one that
        // Walpost has confirmed.
        database.end = database.end.max(Lsn(written.0 + 8));
        database.confirmed = database.end;
        database.on_disk = database.end;
        database.active = None;
        database.has_sent = false;
        self.restored = Some(RestoredDatabase {
            confirmed: self.database.confirmed,
            first_id,
        });
    }

    /// Checks that Walpost halted before it delivered an event or confirmed a position that follows
    /// the restore of the database or the re-creation of the slot.
    pub(super) fn check_halt(&mut self) {
        let Some(restored) = self.restored else {
            return;
        };
        let confirmed = self.database.confirmed;
        if confirmed != restored.confirmed {
            let text = format!("Walpost halted, but {confirmed} was confirmed: {restored:?}");
            self.break_rule(text);
        }
        if let Some(id) = self.visible().range(restored.first_id..).next() {
            let text = format!("Walpost halted, but event {id} was delivered: {restored:?}");
            self.break_rule(text);
        }
    }

    /// Processes a client's status update.
    pub(super) fn confirm(&mut self, connection: u64, lsn: Lsn, sent: Lsn) {
        if self.database.active != Some(connection) || lsn == Lsn::ZERO {
            return;
        }
        if lsn > sent {
            self.break_rule(format!(
                "the client confirmed {lsn}, but only WAL up to {sent} was sent"
            ));
        }
        // Check only positions above the current one. The slot may have been created at its current
        // position without any earlier event having been delivered.
        if lsn > self.database.confirmed {
            if let Some(event) = self.find_undelivered(lsn) {
                let text = format!(
                    "the client confirmed {lsn}, but event {} is not durable",
                    event.id
                );
                self.break_rule(text);
            }
            self.database.confirmed = lsn;
        }
        if self.chance(30) {
            self.database.on_disk = self.database.confirmed;
        }
    }

    /// Returns an event whose transaction ends at or before `lsn` but which consumers can't see
    /// yet, if there is one.
    pub(super) fn find_undelivered(&self, lsn: Lsn) -> Option<Event> {
        let visible = self.visible();
        let log = self.database.log.iter();
        let mut events = log
            .filter(|transaction| transaction.end <= lsn)
            .flat_map(|transaction| &transaction.events);
        events.find(|event| !visible.contains(&event.id)).copied()
    }

    /// Returns the IDs of records that are visible to a consumer with
    /// `isolation.level=read_committed`.
    fn visible(&self) -> BTreeSet<u64> {
        let all = self.cluster.partitions.iter().flatten();
        all.filter(|stored| self.cluster.is_visible(stored))
            .map(|stored| stored.id)
            .collect()
    }

    /// Returns whether all committed events have been delivered and confirmed. WAL without events
    /// need not be confirmed.
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

    /// Checks that each partition contains the right records in the right order.
    pub(super) fn check_records(&mut self) {
        for partition in 0..PARTITIONS {
            if let Err(what) = self.check_partition(partition) {
                self.break_rule(format!("partition {partition}: {what}"));
            }
        }
    }

    fn check_partition(&self, partition: usize) -> Result<(), String> {
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
        let ids = |rows: &Vec<Event>| {
            let mut rows = rows.clone();
            rows.retain(|event| event.partition == partition && !self.lost.contains(&event.id));
            rows.iter().map(|event| event.id).collect()
        };
        let copies: Vec<Vec<u64>> = self.copies.iter().map(ids).collect();
        if self.exactly_once {
            return record_checks::check_exactly_once(&found, &expected, &copies);
        }
        let undone = self.undone.as_ref().map(|undone| {
            let log = self.database.log.iter();
            let before = log.take_while(|transaction| transaction.commit < undone.confirmed);
            let events = before.flat_map(|transaction| &transaction.events);
            let count = events.filter(|event| event.partition == partition).count();
            (undone.copies.clone(), count)
        });
        record_checks::check_at_least_once(&found, &expected, copies, undone)
    }
}

impl Cluster {
    fn is_visible(&self, stored: &Stored) -> bool {
        match stored.transaction {
            None => true,
            Some(number) => self.transactions.get(&number) == Some(&TransactionState::Committed),
        }
    }

    /// Registers a new producer, which aborts any open transaction and fences the previous
    /// producer. Returns the new producer's epoch.
    pub(super) fn take_over(&mut self) -> u64 {
        self.epoch += 1;
        self.abort_open();
        self.epoch
    }

    /// Opens a transaction, and returns its number.
    pub(super) fn begin(&mut self) -> u64 {
        let number = self.next_transaction;
        self.next_transaction += 1;
        self.transactions.insert(number, TransactionState::Open);
        self.open_since = None;
        number
    }

    /// Aborts the open transaction if it has exceeded [`TRANSACTION_TIMEOUT`], and returns whether
    /// it did.
    pub(super) fn abort_if_expired(&mut self) -> bool {
        let is_late = self
            .open_since
            .is_some_and(|since| since.elapsed() > TRANSACTION_TIMEOUT);
        if is_late {
            self.abort_open();
        }
        is_late
    }

    fn abort_open(&mut self) {
        for state in self.transactions.values_mut() {
            if *state == TransactionState::Open {
                *state = TransactionState::Aborted;
            }
        }
        self.open_since = None;
    }

    /// Ends a transaction: commits it together with `checkpoint` if that is `Some`, and aborts it
    /// otherwise. Returns whether the transaction was still open.
    pub(super) fn end_transaction(&mut self, number: u64, checkpoint: Option<Checkpoint>) -> bool {
        match self.transactions.get_mut(&number) {
            Some(state @ TransactionState::Open) => {
                *state = match checkpoint {
                    Some(checkpoint) => {
                        self.checkpoint = Some(checkpoint);
                        TransactionState::Committed
                    }
                    None => TransactionState::Aborted,
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
