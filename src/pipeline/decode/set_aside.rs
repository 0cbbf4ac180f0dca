//! Determines which rows are skipped because their table is set aside.
//!
//! A skipped row is still assigned an index in its transaction, so the positions of later rows do
//! not depend on which tables are set aside.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::model::lsn::{Lsn, Position};
use crate::model::set_aside::SetAside;
use crate::outbox::columns::MappingError;
use crate::postgres::catalog::set_aside::TableNote;
use crate::postgres::table::TableName;

/// A pipeline's set-aside tables, and the tables that will be set aside when one of their rows
/// arrives.
#[derive(Default)]
pub(super) struct SetAsideTables {
    /// Whether the settings allow a table to be set aside when an error concerns only that table.
    pub(super) is_enabled: bool,
    entries: Vec<Range>,
    /// The PostgreSQL cluster in which the OIDs in `entries` are valid.
    cluster: String,
    /// This session receives every row whose commit LSN is at or above this LSN. Earlier rows may
    /// have been skipped by previous sessions.
    known_from: Lsn,
    /// For each relation that the stream has described, the indexes of its journal entries in
    /// `entries`. Relations without journal entries are not included.
    relations: HashMap<u32, Vec<usize>>,
    /// Tables whose columns do not match the settings, and the resulting errors.
    unmapped: HashMap<u32, (TableName, MappingError)>,
    /// Number of rows skipped since the last call to [`Self::take_row_count`]. Only one thread
    /// writes this counter, so incrementing it takes only a load and a store.
    rows: AtomicU64,
}

/// The range of rows covered by one journal entry.
struct Range {
    entry: SetAside,
    /// Commit LSN of the last row that this session skipped in the range.
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

    fn last_lsn(&self) -> Lsn {
        Lsn(self.last.load(Ordering::Relaxed))
    }
}

impl SetAsideTables {
    /// Discards the relations that the previous connection described.
    pub(super) fn reconnected(&mut self) {
        self.relations.clear();
        self.unmapped.clear();
    }

    /// Loads the journal entries about set-aside tables before a stream starts. The stream must
    /// contain every row whose commit LSN is at or above `known_from`.
    pub(super) fn load(&mut self, entries: Vec<SetAside>, cluster: String, known_from: Lsn) {
        self.relations.clear();
        self.entries = entries
            .into_iter()
            .map(|entry| Range::new(entry, Lsn::ZERO))
            .collect();
        self.cluster = cluster;
        self.known_from = known_from;
    }

    /// Returns the number of relations that have journal entries or whose columns don't match the
    /// settings.
    pub(super) fn relations(&self) -> usize {
        self.relations.len() + self.unmapped.len()
    }

    /// Looks up the journal entries about a relation that the stream has described. Returns whether
    /// there are any.
    pub(super) fn add_relation(&mut self, relation: u32, table: &TableName) -> bool {
        self.unmapped.remove(&relation);
        self.relations.remove(&relation);
        if self.entries.is_empty() {
            return false;
        }
        let found = self.entries_for(relation, table);
        let is_found = !found.is_empty();
        if is_found {
            self.relations.insert(relation, found);
        }
        is_found
    }

    fn entries_for(&self, relation: u32, table: &TableName) -> Vec<usize> {
        let table = table.to_string();
        let entries = self.entries.iter().enumerate();
        let matching =
            entries.filter(|(_, range)| range.entry.is_about(&table, relation, &self.cluster));
        matching.map(|(index, _)| index).collect()
    }

    /// Stores the error for a table whose columns do not match the settings. The error is reported
    /// only if one of the table's rows arrives.
    pub(super) fn unmapped(&mut self, relation: u32, table: TableName, error: MappingError) {
        self.unmapped.insert(relation, (table, error));
    }

    pub(super) fn mapping_error(&self, relation: u32) -> Option<&MappingError> {
        self.unmapped.get(&relation).map(|(_, error)| error)
    }

    /// Returns whether the journal has entries about the relation, which the stream must have
    /// described.
    pub(super) fn has_entries(&self, relation: u32) -> bool {
        self.relations.contains_key(&relation)
    }

    /// Returns the relation's name if its columns do not match the settings.
    pub(super) fn unmapped_name(&self, relation: u32) -> Option<&TableName> {
        self.unmapped.get(&relation).map(|(name, _)| name)
    }

    /// Returns the number of rows skipped since the last call.
    pub(super) fn take_row_count(&self) -> u64 {
        self.rows.swap(0, Ordering::Relaxed)
    }

    /// Returns whether the row at position `at` must be skipped.
    #[cold]
    pub(super) fn covers(&self, relation: u32, at: Position) -> bool {
        let entries = self.relations.get(&relation);
        entries.is_some_and(|entries| entries.iter().any(|&index| self.entries[index].covers(at)))
    }

    /// Like [`Self::covers`], but also works for a relation that the stream has not described.
    pub(super) fn covers_table(&self, relation: u32, table: &str, at: Position) -> bool {
        let mut entries = self.entries.iter();
        entries
            .any(|range| range.covers(at) && range.entry.is_about(table, relation, &self.cluster))
    }

    /// Counts a skipped row.
    #[cold]
    pub(super) fn count_row(&self, relation: u32, at: Position) {
        if let Some(entries) = self.relations.get(&relation) {
            self.count_in(entries, at);
        }
    }

    /// Returns whether an older row of this table must be skipped, and counts the row if so. `at`
    /// is the position of the row of `walpost.outbox_row` in which the older row is stored.
    pub(super) fn count_older(&self, relation: u32, table: &TableName, at: Position) -> bool {
        if self.entries.is_empty() {
            return false;
        }
        let entries = self.entries_for(relation, table);
        let is_omitted = entries.iter().any(|&index| self.entries[index].covers(at));
        if is_omitted {
            self.count_in(&entries, at);
        }
        is_omitted
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

    /// Compares `found`, the entries that are now in the journal, with the entries loaded earlier.
    /// If the journal contains a completed replay that this session hasn't processed yet, returns a
    /// [`TableNote`] about the replay, which must then be written to the journal.
    pub(super) fn replay_note(&self, found: &[SetAside]) -> Option<TableNote> {
        let is_open = |entry: &&SetAside| {
            let mut ranges = self.entries.iter();
            entry.until.is_none()
                && ranges.any(|range| range.entry.id == entry.id && range.entry.until.is_none())
        };
        let open = found.iter().filter(is_open);
        let open: Vec<_> = open.filter(|entry| entry.replayed.is_some()).collect();
        let replayed = open.first()?.replayed?;
        let is_of_replay = |entry: &&&SetAside| entry.replayed == Some(replayed);
        let entries: Vec<_> = open
            .iter()
            .filter(is_of_replay)
            .map(|entry| (*entry).clone())
            .collect();
        let before = replayed.before;
        let last = self.last_lsn_of(&entries);
        if before >= self.known_from && last < before {
            return Some(TableNote::Resumed { entries, before });
        }
        let reason = match last < before {
            true => format!(
                "the replay read the table at {before}, but the stream started at {}, so rows that were committed in \
                 between may have been omitted",
                self.known_from
            ),
            false => format!(
                "the replay read the table at {before}, but rows that were committed at or after that position were \
                 omitted, the last of them at {last}"
            ),
        };
        Some(TableNote::Missed {
            entries,
            replayed,
            reason,
        })
    }

    fn last_lsn_of(&self, entries: &[SetAside]) -> Lsn {
        let is_included = |range: &&Range| entries.iter().any(|entry| entry.id == range.entry.id);
        let last = self
            .entries
            .iter()
            .filter(is_included)
            .map(Range::last_lsn)
            .max();
        last.unwrap_or_default()
    }

    /// Applies a change that has been written to the journal. If the table is set aside after this
    /// change, `opened` is the new journal entry.
    pub(super) fn apply(&mut self, note: &TableNote, opened: Option<SetAside>) {
        let (closed, before) = match note {
            TableNote::Begun { .. } => (&[][..], None),
            TableNote::Resumed { entries, before } => (&entries[..], Some(*before)),
            TableNote::Missed {
                entries, replayed, ..
            } => (&entries[..], Some(replayed.before)),
        };
        let last = self.last_lsn_of(closed);
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
                let is_related = |(oid, _): &(&u32, &Vec<usize>)| {
                    self.relations[*oid]
                        .iter()
                        .any(|&index| self.entries[index].entry.id == closed.id)
                };
                related.extend(
                    self.relations
                        .iter()
                        .filter(is_related)
                        .map(|(oid, _)| *oid),
                );
            }
            related.sort_unstable();
            related.dedup();
            for relation in related {
                self.relations.entry(relation).or_default().push(index);
            }
        }
    }
}
