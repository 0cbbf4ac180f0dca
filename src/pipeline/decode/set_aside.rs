//! Tables that are set aside: which of their rows are left out.
//!
//! A row that is left out has its index in the transaction like any other, so positions stay the same.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::model::lsn::{Lsn, Position};
use crate::model::set_aside::SetAside;
use crate::outbox::columns::MappingError;
use crate::postgres::catalog::set_aside::TableNote;
use crate::postgres::table::TableName;

/// The tables of a pipeline that are set aside, or may be.
#[derive(Default)]
pub(super) struct SetAsideTables {
    /// An error that concerns one table sets it aside.
    pub(super) is_enabled: bool,
    entries: Vec<Range>,
    /// The cluster that OIDs belong to.
    cluster: String,
    /// Rows that were left out before this session began have a lower commit LSN.
    known_from: Lsn,
    /// Relations of the stream with entries, and which these are.
    relations: HashMap<u32, Vec<usize>>,
    /// Tables that the settings do not fit.
    unmapped: HashMap<u32, (TableName, MappingError)>,
    /// Rows that were left out since this was read; written by one thread.
    rows: AtomicU64,
}

/// The rows that one entry covers.
struct Range {
    entry: SetAside,
    /// The commit LSN of the last row that was left out in this session.
    last: AtomicU64,
}

impl Range {
    fn new(entry: SetAside, last: Lsn) -> Self {
        Self {
            entry,
            last: AtomicU64::new(last.0),
        }
    }

    fn covers(&self, at: Position) -> bool {
        let entry = &self.entry;
        entry.position <= at && entry.until.is_none_or(|until| at.commit < until)
    }

    fn last(&self) -> Lsn {
        Lsn(self.last.load(Ordering::Relaxed))
    }
}

impl SetAsideTables {
    /// Forgets what the connection before has described.
    pub(super) fn reconnected(&mut self) {
        self.relations.clear();
        self.unmapped.clear();
    }

    /// Takes the entries of the journal for a stream that has every row whose commit LSN is at or after `known_from`.
    pub(super) fn load(&mut self, entries: Vec<SetAside>, cluster: String, known_from: Lsn) {
        self.relations.clear();
        self.entries = entries
            .into_iter()
            .map(|entry| Range::new(entry, Lsn::ZERO))
            .collect();
        self.cluster = cluster;
        self.known_from = known_from;
    }

    /// How many relations of the stream are known here.
    pub(super) fn relations(&self) -> usize {
        self.relations.len() + self.unmapped.len()
    }

    /// The stream has described a relation. True if there are entries about it.
    pub(super) fn relate(&mut self, relation: u32, table: &TableName) -> bool {
        self.unmapped.remove(&relation);
        self.relations.remove(&relation);
        if self.entries.is_empty() {
            return false;
        }
        let found = self.of(relation, table);
        let is_found = !found.is_empty();
        if is_found {
            self.relations.insert(relation, found);
        }
        is_found
    }

    fn of(&self, relation: u32, table: &TableName) -> Vec<usize> {
        let table = table.to_string();
        let entries = self.entries.iter().enumerate();
        let of = entries.filter(|(_, range)| range.entry.is_of(&table, relation, &self.cluster));
        of.map(|(index, _)| index).collect()
    }

    /// The settings do not fit the table. If a row of it arrives, that is an error.
    pub(super) fn unmapped(&mut self, relation: u32, table: TableName, error: MappingError) {
        self.unmapped.insert(relation, (table, error));
    }

    pub(super) fn mapping_error(&self, relation: u32) -> Option<&MappingError> {
        self.unmapped.get(&relation).map(|(_, error)| error)
    }

    /// There are entries about the relation.
    pub(super) fn has(&self, relation: u32) -> bool {
        self.relations.contains_key(&relation)
    }

    /// The name of a table that the settings do not fit.
    pub(super) fn unmapped_name(&self, relation: u32) -> Option<&TableName> {
        self.unmapped.get(&relation).map(|(name, _)| name)
    }

    /// How many rows were left out since the last call.
    pub(super) fn take_rows(&self) -> u64 {
        self.rows.swap(0, Ordering::Relaxed)
    }

    /// The row at this position is left out.
    #[cold]
    pub(super) fn covers(&self, relation: u32, at: Position) -> bool {
        let entries = self.relations.get(&relation);
        entries.is_some_and(|entries| entries.iter().any(|&index| self.entries[index].covers(at)))
    }

    /// A row of this table at this position is to be left out.
    pub(super) fn covers_table(&self, relation: u32, table: &str, at: Position) -> bool {
        let mut entries = self.entries.iter();
        entries.any(|range| range.covers(at) && range.entry.is_of(table, relation, &self.cluster))
    }

    /// Counts a row that is left out.
    #[cold]
    pub(super) fn count(&self, relation: u32, at: Position) {
        if let Some(entries) = self.relations.get(&relation) {
            self.count_in(entries, at);
        }
    }

    /// Counts an older row of this table if it is left out, and returns whether it is.
    pub(super) fn count_older(&self, relation: u32, table: &TableName, at: Position) -> bool {
        if self.entries.is_empty() {
            return false;
        }
        let entries = self.of(relation, table);
        let is_left_out = entries.iter().any(|&index| self.entries[index].covers(at));
        if is_left_out {
            self.count_in(&entries, at);
        }
        is_left_out
    }

    fn count_in(&self, entries: &[usize], at: Position) {
        for &index in entries {
            let range = &self.entries[index];
            if range.covers(at) {
                range.last.store(at.commit.0, Ordering::Relaxed);
            }
        }
        let rows = self.rows.load(Ordering::Relaxed);
        self.rows.store(rows + 1, Ordering::Relaxed);
    }

    /// What follows from entries as the journal has them by now: of the first replay that is complete and has no consequence
    /// yet.
    pub(super) fn hand_over(&self, found: &[SetAside]) -> Option<TableNote> {
        let is_open = |entry: &&SetAside| {
            let mut ranges = self.entries.iter();
            entry.until.is_none()
                && ranges.any(|range| range.entry.id == entry.id && range.entry.until.is_none())
        };
        let open = found.iter().filter(is_open);
        let open: Vec<_> = open.filter(|entry| entry.replayed.is_some()).collect();
        let replayed = open.first()?.replayed?;
        let of_replay = |entry: &&&SetAside| entry.replayed == Some(replayed);
        let entries: Vec<_> = open
            .iter()
            .filter(of_replay)
            .map(|entry| (*entry).clone())
            .collect();
        let before = replayed.before;
        let last = self.last_of(&entries);
        if before >= self.known_from && last < before {
            return Some(TableNote::Resumed { entries, before });
        }
        let reason = match last < before {
            true => format!(
                "rows committed from {before} on, where the replay has read the table, may have been left out before the stream \
                 began at {}",
                self.known_from
            ),
            false => format!(
                "rows were committed at {before} or later, after the replay has read the table, and left out: the last at {last}"
            ),
        };
        Some(TableNote::Missed {
            entries,
            replayed,
            reason,
        })
    }

    fn last_of(&self, entries: &[SetAside]) -> Lsn {
        let is_one = |range: &&Range| entries.iter().any(|entry| entry.id == range.entry.id);
        let last = self.entries.iter().filter(is_one).map(Range::last).max();
        last.unwrap_or_default()
    }

    /// The journal has the note; it has opened the entry `opened`, if it has opened one.
    pub(super) fn apply(&mut self, note: &TableNote, opened: Option<SetAside>) {
        let (closed, before) = match note {
            TableNote::Begun { .. } => (&[][..], None),
            TableNote::Resumed { entries, before } => (&entries[..], Some(*before)),
            TableNote::Missed {
                entries, replayed, ..
            } => (&entries[..], Some(replayed.before)),
        };
        let last = self.last_of(closed);
        for range in &mut self.entries {
            if closed.iter().any(|entry| entry.id == range.entry.id) {
                range.entry.until = before;
            }
        }
        if let Some(entry) = opened {
            let relation = entry.relation;
            let index = self.entries.len();
            self.entries.push(Range::new(entry, last));
            let mut related = vec![relation];
            for closed in closed {
                let of = |(oid, _): &(&u32, &Vec<usize>)| {
                    self.relations[*oid]
                        .iter()
                        .any(|&index| self.entries[index].entry.id == closed.id)
                };
                related.extend(self.relations.iter().filter(of).map(|(oid, _)| *oid));
            }
            related.sort_unstable();
            related.dedup();
            for relation in related {
                self.relations.entry(relation).or_default().push(index);
            }
        }
    }
}
