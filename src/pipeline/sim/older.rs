//! Rows that are older than the slot: the journal, the snapshots that have them, and what is asked of both.

use super::world::{Event, World};
use crate::delivery::checkpoint::Delivered;
use crate::delivery::chunks::CopyProgress;
use crate::model::lsn::{Lsn, Position};
use crate::postgres::catalog::{Rows, SnapshotRecord};

/// Whether the outbox has rows from before its slot; apart from all other draws.
pub(super) fn draw_older(seed: u64) -> bool {
    fastrand::Rng::with_seed(seed.rotate_left(48)).u8(0..4) == 0
}

/// What a transaction of the server sees that began when it was made.
pub(super) struct Snapshot {
    /// It has what was committed before this.
    pub(super) snapshot_lsn: Lsn,
    /// In the order of their ids.
    rows: Vec<Event>,
}

impl World {
    /// Commits some transactions, and makes the slot behind them.
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

    /// The id of an event that is committed now. Of two transactions the one that commits last may have
    /// taken the lower one.
    pub(super) fn take_id(&mut self) -> u64 {
        let open = self.database.open_ids.len();
        if open > 0 && self.chance(20) {
            let which = self.dice.usize(0..open);
            return self.database.open_ids.swap_remove(which);
        }
        self.database.next_id += 1;
        self.database.next_id
    }

    /// A transaction takes an id, and goes on.
    pub(super) fn leave_id_open(&mut self) {
        self.database.next_id += 1;
        let id = self.database.next_id;
        self.database.open_ids.push(id);
    }

    /// What the journal says of the snapshot.
    pub(super) fn record(&self) -> SnapshotRecord {
        let journal = &self.database.journal;
        let done = journal
            .iter()
            .find(|(_, record)| *record == SnapshotRecord::Done);
        let counts = done.or(journal.last());
        counts.map_or(SnapshotRecord::Nothing, |(_, record)| *record)
    }

    /// Rows of the table; where there were none when the slot was made, what is there came later.
    pub(super) fn rows(&self) -> Rows {
        let log = self.database.log.iter();
        let count: usize = log.map(|transaction| transaction.events.len()).sum();
        match u64::try_from(count) {
            Ok(count @ 1..) if self.has_older => Rows::About(count),
            _ => Rows::None,
        }
    }

    /// All older rows were confirmed, and everybody can know. That says nothing of a slot that somebody has
    /// re-created.
    pub(super) fn is_copied(&self) -> bool {
        match self.record() {
            _ if self.put_back.is_some() => false,
            SnapshotRecord::Done => true,
            SnapshotRecord::Begun(snapshot_lsn) => self.database.confirmed >= snapshot_lsn,
            SnapshotRecord::Due { .. } | SnapshotRecord::Nothing | SnapshotRecord::NoJournal => {
                false
            }
        }
    }

    /// Exactly once can tell that the log was put back to where it ended at `end`, while nobody runs if it
    /// `is_down`. Copied rows have left no trace in WAL: until an event of the stream is behind them, one
    /// that has outgrown their last consistent point may be the same.
    pub(super) fn can_be_told(&self, end: Lsn, is_down: bool) -> bool {
        if !self.exactly_once || !self.has_older {
            return true;
        }
        let Some(checkpoint) = &self.cluster.checkpoint else {
            return true;
        };
        let copied = checkpoint.snapshot.as_ref();
        let snapshot_lsn = copied.map_or(Lsn::ZERO, CopyProgress::last_snapshot_lsn);
        let left_out = match checkpoint.delivered {
            Some(Delivered::Before(lsn)) => lsn,
            _ => Lsn::ZERO,
        };
        (is_down || self.is_copied()) && snapshot_lsn.max(left_out) <= end
    }

    /// Somebody writes into the journal what is true of what was committed before `snapshot_lsn`.
    pub(super) fn write_journal(&mut self, record: SnapshotRecord, snapshot_lsn: Lsn) {
        match record {
            SnapshotRecord::Done if self.has_older => {
                if let Some(event) = self.lacking(snapshot_lsn) {
                    let text = format!(
                        "the copy up to {snapshot_lsn} is noted as done, and event {} is not durable",
                        event.id
                    );
                    self.break_rule(text);
                }
            }
            // An instance that was frozen may be late, with a consistent point that everybody is past.
            SnapshotRecord::Begun(_)
                if self.is_copied() && snapshot_lsn > self.database.confirmed =>
            {
                let text = format!(
                    "a copy up to {snapshot_lsn} is begun after {:?}",
                    self.record()
                );
                self.break_rule(text);
            }
            _ => {}
        }
        self.database.end.0 += 0x20;
        self.database.journal.push((self.database.end, record));
    }

    /// Makes a snapshot of the table.
    pub(super) fn snapshot(&mut self) -> Snapshot {
        // The server logs what transactions are open, and the consistent point is behind that.
        self.database.end.0 += 0x30;
        let log = self.database.log.iter();
        let mut rows: Vec<_> = log.flat_map(|t| &t.events).copied().collect();
        rows.sort_unstable_by_key(|event| event.id);
        Snapshot {
            snapshot_lsn: self.database.end,
            rows,
        }
    }

    /// The rows of a snapshot whose ids are above `after`, which are copied now.
    pub(super) fn copy(&mut self, snapshot: Snapshot, after: u64) -> Vec<Event> {
        if self.is_copied() {
            let text = format!(
                "rows before {} are copied after {:?}",
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

    /// A record says where its row is in WAL.
    pub(super) fn check_position(&mut self, id: u64, at: Position) {
        // WAL has no record where copied rows are.
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
            self.break_rule(format!("event {id} is said to be at {at}"));
        }
    }
}
