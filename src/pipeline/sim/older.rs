//! Simulates rows that are older than the slot, the snapshots that contain them, and the journal.
//! Also checks that Walpost uses the journal and the snapshots correctly.

use super::world::{Event, World};
use crate::delivery::checkpoint::Delivered;
use crate::delivery::chunks::CopyProgress;
use crate::model::lsn::{Lsn, Position};
use crate::postgres::catalog::{Rows, SnapshotRecord};

/// Decides whether the outbox has rows that are older than its slot. Uses a separate random number
/// generator, so that this decision does not affect the other random choices for the same seed.
pub(super) fn draw_older(seed: u64) -> bool {
    fastrand::Rng::with_seed(seed.rotate_left(48)).u8(0..4) == 0
}

/// The table's rows at the time when the snapshot was created.
pub(super) struct Snapshot {
    /// The consistent point: the snapshot contains the transactions that were committed before this
    /// LSN.
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

    /// Returns the ID for an event in a transaction that commits now. As in a real database, a
    /// transaction may have obtained its ID early, and commit after others with higher IDs.
    pub(super) fn next_id(&mut self) -> u64 {
        let open = self.database.open_ids.len();
        if open > 0 && self.chance(20) {
            let which = self.dice.usize(0..open);
            return self.database.open_ids.swap_remove(which);
        }
        self.database.next_id += 1;
        self.database.next_id
    }

    /// Starts a transaction that obtains an ID and stays open.
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

    /// Returns whether the table has rows, and how many. If the table was empty when the slot was
    /// created, returns [`Rows::None`], because none of the rows are older than the slot.
    pub(super) fn rows(&self) -> Rows {
        let log = self.database.log.iter();
        let count: usize = log.map(|transaction| transaction.events.len()).sum();
        match u64::try_from(count) {
            Ok(count @ 1..) if self.has_older => Rows::About(count),
            _ => Rows::None,
        }
    }

    /// Returns whether the database shows that the copy of older rows was delivered and confirmed.
    /// Always false if the database was restored or the slot was re-created.
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
    /// in which the WAL ended at `end`. `is_down` indicates that no instance is running during the
    /// restore. Detection is not possible right after a copy, because copied rows leave no trace in
    /// the WAL. Until the stream delivers another event, Walpost can't distinguish any WAL that
    /// extends past the last consistent point from the original WAL.
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

    /// Adds an entry to the journal, and checks that it is correct for a copy of the transactions
    /// that were committed before `snapshot_lsn`.
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
            // An instance that was frozen may write this entry late. This is harmless if the
            // consistent point in the entry has already been confirmed.
            SnapshotRecord::Begun(_)
                if self.is_copied() && snapshot_lsn > self.database.confirmed =>
            {
                let text = format!(
                    "a copy up to {snapshot_lsn} was started although the journal contains {:?}",
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
        // The server writes a WAL record that lists the open transactions. The consistent point is
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

    /// Starts a copy of the snapshot, and returns the snapshot's rows with IDs above `after`.
    pub(super) fn copy(&mut self, snapshot: Snapshot, after: u64) -> Vec<Event> {
        if self.is_copied() {
            let text = format!(
                "rows before {} were copied although the journal contains {:?}",
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

    /// Checks that the position in a record's header is the position of its row in the WAL.
    pub(super) fn check_position(&mut self, id: u64, at: Position) {
        // The positions of copied rows are artificial, so the WAL contains no record there.
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
