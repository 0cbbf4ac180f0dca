//! Events that are rows of a snapshot: those that were in the table before the stream begins.
//!
//! The snapshot has the rows of the transactions whose commit record is before its consistent point, the
//! stream has the rest. For everything behind the core it is one transaction more, the first:
//! it ends at the consistent point, and its commit record counts as one byte before that, where the log has
//! none, for its records begin at multiples of eight. So its positions come before all of the stream's, and the
//! consistent point is confirmed when all of its records are durable, and not before.

use crate::delivery::chunks::{Chunk, CopyProgress, KeyError, KeyType};
use crate::model::lsn::{Lsn, Position};
use crate::outbox::columns::{COLUMNS_MAX, Mapping, Row};
use crate::pipeline::decode::error::LineError;
use crate::postgres::wire::copy_text::Lines;

/// What is copied, from which snapshot.
pub struct CopyFrom {
    /// The snapshot has the transactions whose commit record is before this.
    pub snapshot_lsn: Lsn,
    /// What the rows mean.
    pub mapping: Mapping,
    /// The columns of the key, which stand in each line behind those that the mapping needs.
    pub key: Vec<(String, KeyType)>,
    /// What was copied from other snapshots before.
    pub before: Option<CopyProgress>,
}

/// The rows of one copy.
pub(crate) struct SnapshotRows {
    from: CopyFrom,
    /// Slots of the columns, in the order in which they are copied.
    slots: Vec<usize>,
    lines: Lines,
    /// Rows that were taken, and the key of the last.
    rows: u64,
    last: Vec<Vec<u8>>,
}

impl SnapshotRows {
    pub(crate) fn new(from: CopyFrom) -> Self {
        let slots = (0..from.mapping.width())
            .filter_map(|column| from.mapping.slot(column))
            .collect();
        Self {
            slots,
            lines: Lines::default(),
            rows: 0,
            last: vec![Vec::new(); from.key.len()],
            from,
        }
    }

    /// Where the stream begins.
    pub(crate) fn snapshot_lsn(&self) -> Lsn {
        let before = self.from.before.as_ref();
        before.map_or(self.from.snapshot_lsn, CopyProgress::first_snapshot_lsn)
    }

    /// The position of the first row that is copied now.
    pub(crate) fn position(&self) -> Position {
        Position {
            commit: Lsn(self.snapshot_lsn().0.saturating_sub(1)),
            index: self.from.before.as_ref().map_or(0, |before| before.rows),
        }
    }

    /// The row of a line of `COPY`, and what it means.
    pub(crate) fn row<'l>(
        &'l mut self,
        line: &'l [u8],
    ) -> Result<(&'l Mapping, Row<'l>), LineError> {
        read(&self.from, &self.slots, line, &mut self.lines)
    }

    /// As [`SnapshotRows::row`], with room for the values beside it.
    pub(crate) fn read<'l>(
        &'l self,
        line: &'l [u8],
        lines: &'l mut Lines,
    ) -> Result<(&'l Mapping, Row<'l>), LineError> {
        read(&self.from, &self.slots, line, lines)
    }

    /// The sink has taken the row of the line that was read last.
    pub(crate) fn taken(&mut self, line: &[u8]) {
        self.rows += 1;
        if self.last.is_empty() {
            return;
        }
        if let Ok(values) = self.lines.read(line, self.slots.len() + self.last.len()) {
            for (index, value) in self.last.iter_mut().enumerate() {
                value.clear();
                value.extend_from_slice(values.get(self.slots.len() + index).unwrap_or_default());
            }
        }
    }

    /// What was copied by now; nothing where that is nothing.
    pub(crate) fn copied(&self) -> Option<CopyProgress> {
        if self.rows == 0 {
            return self.from.before.clone();
        }
        let text = |value: &Vec<u8>| String::from_utf8_lossy(value).into_owned();
        Some(self.with(Some(self.last.iter().map(text).collect())))
    }

    /// What was copied when there is nothing more.
    pub(crate) fn all(&self) -> CopyProgress {
        self.with(None)
    }

    fn with(&self, upto: Option<Vec<String>>) -> CopyProgress {
        let mut copied = self.from.before.clone().unwrap_or_else(|| CopyProgress {
            key: self.from.key.iter().map(|(name, _)| name.clone()).collect(),
            rows: 0,
            chunks: Vec::new(),
        });
        copied.rows += self.rows;
        copied.chunks.push(Chunk {
            snapshot_lsn: self.from.snapshot_lsn,
            upto,
        });
        copied
    }
}

fn read<'l>(
    from: &'l CopyFrom,
    slots: &[usize],
    line: &'l [u8],
    lines: &'l mut Lines,
) -> Result<(&'l Mapping, Row<'l>), LineError> {
    let values = lines.read(line, slots.len() + from.key.len())?;
    let mut row = [None; COLUMNS_MAX];
    for (index, slot) in slots.iter().enumerate() {
        row[*slot] = values.get(index);
    }
    for (index, (_, kind)) in from.key.iter().enumerate() {
        kind.check(values.get(slots.len() + index).ok_or(KeyError)?)?;
    }
    Ok((&from.mapping, row))
}
