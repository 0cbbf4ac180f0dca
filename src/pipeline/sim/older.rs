//! Rows that are older than the slot: the journal, the snapshots that contain the rows, and the
//! rules for the journal and the snapshots.

use super::world::{Event, World};
use crate::delivery::checkpoint::Delivered;
use crate::delivery::chunks::CopyProgress;
use crate::model::lsn::{Lsn, Position};
use crate::postgres::catalog::{Rows, SnapshotRecord};

/// Decides whether the outbox has rows that are older than its slot. The decision is independent of
/// all other random choices.
pub(super) fn draw_older(seed: u64) -> bool {
    fastrand::Rng::with_seed(seed.rotate_left(48)).u8(0..4) == 0
}

/// The rows visible to a transaction that started when the snapshot was created.
pub(super) struct Snapshot {
    /// The snapshot contains the transactions that were committed before this LSN.
    pub(super) snapshot_lsn: Lsn,
    /// The rows, in the order of their IDs.
    rows: Vec<Event>,
}

impl World {
    /// Commits some transactions, and then creates the slot.
    pub(super) fn write_older(&mut self) {
        self.has_older = true;
        for _ in 0..self.dice.usize(1..8) {
            self.commit();
        }
        let database = &mut self.database;
        database.made = database.end;
        database.confirmed = database.end;
        database.on_disk = database.end;
    }

    /// Returns the ID of an event that is committed now. A transaction that commits later than
    /// another one may have the lower ID.
    pub(super) fn next_id(&mut self) -> u64 {
        let open = self.database.open_ids.len();
        if open > 0 && self.chance(20) {
            let which = self.dice.usize(0..open);
            return self.database.open_ids.swap_remove(which);
        }
        self.database.next_id += 1;
        self.database.next_id
    }

    /// Starts a transaction that is assigned an ID and remains open.
    pub(super) fn leave_id_open(&mut self) {
        self.database.next_id += 1;
        let id = self.database.next_id;
        self.database.open_ids.push(id);
    }

    /// Returns the journal's record of the snapshot.
    pub(super) fn record(&self) -> SnapshotRecord {
        let journal = &self.database.journal;
        let done = journal
            .iter()
            .find(|(_, record)| *record == SnapshotRecord::Done);
        let counts = done.or(journal.last());
        counts.map_or(SnapshotRecord::Nothing, |(_, record)| *record)
    }

    /// Returns the rows of the table. If the table was empty when the slot was created, no existing
    /// row is older than the slot.
    pub(super) fn rows(&self) -> Rows {
        let log = self.database.log.iter();
        let count: usize = log.map(|transaction| transaction.events.len()).sum();
        match u64::try_from(count) {
            Ok(count @ 1..) if self.has_older => Rows::About(count),
            _ => Rows::None,
        }
    }

    /// Returns whether the database shows that all older rows were confirmed. Always false if the
    /// database was restored or the slot was re-created.
    pub(super) fn is_copied(&self) -> bool {
        match self.record() {
            _ if self.restored.is_some() => false,
            SnapshotRecord::Done => true,
            SnapshotRecord::Begun(snapshot_lsn) => self.database.confirmed >= snapshot_lsn,
            SnapshotRecord::Due { .. } | SnapshotRecord::Nothing | SnapshotRecord::NoJournal => {
                false
            }
        }
    }

    /// Returns whether exactly-once delivery can detect that the database was restored to a state
    /// in which the WAL ended at `end`. `is_down` states whether no instance is running when the
    /// database is restored. The WAL contains no trace of copied rows. Until an event of the stream
    /// follows them, Walpost can't distinguish WAL that extends past their last consistent point
    /// from the original WAL.
    pub(super) fn is_detectable(&self, end: Lsn, is_down: bool) -> bool {
        if !self.exactly_once || !self.has_older {
            return true;
        }
        let Some(checkpoint) = &self.cluster.checkpoint else {
            return true;
        };
        let copied = checkpoint.snapshot.as_ref();
        let snapshot_lsn = copied.map_or(Lsn::ZERO, CopyProgress::last_snapshot_lsn);
        let omitted_before = match checkpoint.delivered {
            Some(Delivered::Before(lsn)) => lsn,
            _ => Lsn::ZERO,
        };
        (is_down || self.is_copied()) && snapshot_lsn.max(omitted_before) <= end
    }

    /// Adds an entry to the journal, and checks that the entry is correct for the transactions that
    /// were committed before `snapshot_lsn`.
    pub(super) fn write_journal(&mut self, record: SnapshotRecord, snapshot_lsn: Lsn) {
        match record {
            SnapshotRecord::Done if self.has_older => {
                if let Some(event) = self.find_undelivered(snapshot_lsn) {
                    let text = format!(
                        "the copy up to {snapshot_lsn} is recorded as complete, but event {} is not durable",
                        event.id
                    );
                    self.break_rule(text);
                }
            }
            // An instance that was frozen may write this entry late, with a consistent point that
            // all other instances have passed.
            SnapshotRecord::Begun(_)
                if self.is_copied() && snapshot_lsn > self.database.confirmed =>
            {
                let text = format!(
                    "a copy up to {snapshot_lsn} was started after {:?}",
                    self.record()
                );
                self.break_rule(text);
            }
            _ => {}
        }
        self.database.end.0 += 0x20;
        self.database.journal.push((self.database.end, record));
    }

    /// Creates a snapshot of the table.
    pub(super) fn snapshot(&mut self) -> Snapshot {
        // The server writes a WAL record of the open transactions, and the consistent point is
        // after this record.
        self.database.end.0 += 0x30;
        let log = self.database.log.iter();
        let mut rows: Vec<_> = log.flat_map(|t| &t.events).copied().collect();
        rows.sort_unstable_by_key(|event| event.id);
        Snapshot {
            snapshot_lsn: self.database.end,
            rows,
        }
    }

    /// Records a copy of a snapshot, and returns its rows whose IDs are above `after`.
    pub(super) fn copy(&mut self, snapshot: Snapshot, after: u64) -> Vec<Event> {
        if self.is_copied() {
            let text = format!(
                "rows before {} were copied after {:?}",
                snapshot.snapshot_lsn,
                self.record()
            );
            self.break_rule(text);
        }
        let mut rows = snapshot.rows;
        rows.retain(|event| event.id > after);
        self.copies.push(rows.clone());
        let stream = self.database.streamed_from;
        self.streams_of_copies.push((stream, snapshot.snapshot_lsn));
        rows
    }

    /// Checks the position that a record contains against the position of its row in the WAL.
    pub(super) fn check_position(&mut self, id: u64, at: Position) {
        // The WAL has no record at the position of copied rows.
        if !at.commit.0.is_multiple_of(8) {
            return;
        }
        let log = &self.database.log;
        let found = log.binary_search_by_key(&at.commit, |transaction| transaction.commit);
        let index = usize::try_from(at.index).ok();
        let found = found
            .ok()
            .zip(index)
            .and_then(|(number, index)| log[number].events.get(index));
        if found.is_none_or(|event| event.id != id) && !self.lost.contains(&id) {
            self.break_rule(format!("event {id} has the wrong position {at}"));
        }
    }
}
