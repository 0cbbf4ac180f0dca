//! Events that are read from a snapshot: rows that the table already contains when the stream
//! starts.
//!
//! The snapshot contains the rows of transactions whose commit record precedes its consistent
//! point, and the stream contains the rows of all later transactions. All code downstream of the
//! core treats the snapshot as an additional transaction before the stream. This transaction ends
//! at the consistent point, and its commit record is assumed to be one byte earlier. No real record
//! has that LSN, because WAL records start at multiples of eight. As a result, the positions of
//! copied rows sort before all positions of the stream, and the consistent point is confirmed only
//! when all records of the snapshot are durable.

use crate::delivery::chunks::{Chunk, CopyProgress, KeyError, KeyType};
use crate::model::lsn::{Lsn, Position};
use crate::outbox::columns::{COLUMNS_MAX, Mapping, Row};
use crate::pipeline::decode::error::LineError;
use crate::postgres::wire::copy_text::Lines;

/// A snapshot to copy, and the columns of its rows.
pub struct CopyFrom {
    /// The consistent point: the snapshot contains the transactions whose commit record precedes
    /// this LSN.
    pub snapshot_lsn: Lsn,
    /// How the rows' columns are mapped to events.
    pub mapping: Mapping,
    /// The key columns by which the copied rows are ordered. In each line of `COPY` output, these
    /// columns follow the columns of the mapping.
    pub key: Vec<(String, KeyType)>,
    /// Progress of the interrupted copy that this snapshot resumes; `None` for a new copy.
    pub before: Option<CopyProgress>,
}

/// The rows of one snapshot.
pub(crate) struct SnapshotRows {
    from: CopyFrom,
    /// The index in [`Row`] of each column, in the order in which the columns are copied.
    slots: Vec<usize>,
    lines: Lines,
    /// Number of rows that the sink has accepted.
    rows: u64,
    /// The key of the last row that the sink has accepted.
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

    /// Returns the LSN at which the stream starts.
    pub(crate) fn snapshot_lsn(&self) -> Lsn {
        let before = self.from.before.as_ref();
        before.map_or(self.from.snapshot_lsn, CopyProgress::first_snapshot_lsn)
    }

    /// Returns the position of the first row of this copy.
    pub(crate) fn position(&self) -> Position {
        Position {
            commit: Lsn(self.snapshot_lsn().0.saturating_sub(1)),
            index: self.from.before.as_ref().map_or(0, |before| before.rows),
        }
    }

    /// Parses a line of `COPY` output. Returns the row and its mapping.
    pub(crate) fn row<'l>(
        &'l mut self,
        line: &'l [u8],
    ) -> Result<(&'l Mapping, Row<'l>), LineError> {
        read(&self.from, &self.slots, line, &mut self.lines)
    }

    /// Like [`SnapshotRows::row`], but stores the values in `lines` instead of in `self`.
    pub(crate) fn read<'l>(
        &'l self,
        line: &'l [u8],
        lines: &'l mut Lines,
    ) -> Result<(&'l Mapping, Row<'l>), LineError> {
        read(&self.from, &self.slots, line, lines)
    }

    /// Marks the row in `line` as accepted by the sink. `line` must be the most recently read line.
    pub(crate) fn mark_accepted(&mut self, line: &[u8]) {
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

    /// Returns the progress of the copy, or `None` if no rows have been copied.
    pub(crate) fn copied(&self) -> Option<CopyProgress> {
        if self.rows == 0 {
            return self.from.before.clone();
        }
        let text = |value: &Vec<u8>| String::from_utf8_lossy(value).into_owned();
        Some(self.progress_upto(Some(self.last.iter().map(text).collect())))
    }

    /// Returns the progress to record once all rows have been copied.
    pub(crate) fn completed(&self) -> CopyProgress {
        self.progress_upto(None)
    }

    fn progress_upto(&self, upto: Option<Vec<String>>) -> CopyProgress {
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
