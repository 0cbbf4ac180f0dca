//! Defines marks, which record how far the removal of a partition has progressed. A mark is stored
//! in the last line of the partition's comment, so it exists as long as the partition. This module
//! does no I/O.

use jiff::Timestamp;

use crate::model::lsn::Lsn;

/// The start of Walpost's line in a comment.
const COMMENT_PREFIX: &str = "walpost: ";

/// An upper limit for the length of Walpost's line, in characters.
const LINE_CHARS_MAX: usize = 300;

/// Follows [`COMMENT_PREFIX`] if the mark is for rows of a table without partitions.
const ROWS_PREFIX: &str = "rows before ";

/// How far the removal of a partition has progressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PartitionMark {
    /// The time range has ended, and the rows that the partition contained when it was marked were
    /// committed before this WAL position.
    Closed(Lsn),
    /// The time at which the slots had passed the position in [`Self::Closed`].
    Delivered(Timestamp),
    /// The partition was detached, and all its rows were committed before this WAL position.
    Detached(Lsn),
}

/// Identifies the table that a mark belongs to. Marks from a different cluster, for example in a
/// restored dump, are ignored because their LSNs and OIDs are meaningless.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Origin {
    /// The OID of the outbox table.
    pub table: u32,
    /// The system identifier.
    pub cluster: String,
}

impl Origin {
    /// Returns the text that each mark of this table ends with.
    #[must_use]
    pub(crate) fn suffix(&self) -> String {
        format!(" (table {}, cluster {})", self.table, self.cluster)
    }

    /// Returns the mark in a partition's comment, if it belongs to this table.
    #[must_use]
    pub(crate) fn read(&self, comment: Option<&str>) -> Option<PartitionMark> {
        PartitionMark::read(&self.line(comment)?)
    }

    /// Returns the mark in the comment of a table without partitions, and the time before which
    /// rows are covered by the mark.
    #[must_use]
    pub(crate) fn read_rows_mark(
        &self,
        comment: Option<&str>,
    ) -> Option<(Timestamp, PartitionMark)> {
        let line = self.line(comment)?;
        let (before, mark) = line.strip_prefix(ROWS_PREFIX)?.split_once(' ')?;
        Some((before.parse().ok()?, PartitionMark::read(mark)?))
    }

    /// Returns Walpost's line in a comment, without its fixed prefix and suffix.
    fn line(&self, comment: Option<&str>) -> Option<String> {
        let line = comment?.lines().next_back()?;
        let text = line
            .strip_prefix(COMMENT_PREFIX)?
            .strip_suffix(&self.suffix())?;
        Some(text.to_owned())
    }
}

impl PartitionMark {
    fn read(text: &str) -> Option<Self> {
        let lsn = |text: &str| text.parse().ok();
        if let Some(text) = text.strip_prefix("closed at ") {
            lsn(text).map(Self::Closed)
        } else if let Some(text) = text.strip_prefix("detached at ") {
            lsn(text).map(Self::Detached)
        } else {
            let time = text.strip_prefix("delivered by ")?.parse();
            time.ok().map(Self::Delivered)
        }
    }
}

/// Returns SQL for the end of the comment on the table with OID `oid`. It is long enough to contain
/// Walpost's line. The owner determines the length of a comment, and a comment of many megabytes
/// must not cause the query that reads the comments of all tables to fail.
#[must_use]
pub(crate) fn end_of_comment(oid: &str) -> String {
    format!("right(obj_description({oid}, 'pg_class'), {LINE_CHARS_MAX})")
}

/// Returns SQL for all lines of a table's comment except Walpost's line, each followed by a line
/// feed. `oid` is the table's OID.
#[must_use]
pub(crate) fn other_lines(oid: &str) -> String {
    format!(
        "(SELECT coalesce(string_agg(line || chr(10), '' ORDER BY place), '') \
         FROM string_to_table(obj_description({oid}, 'pg_class'), chr(10)) WITH ORDINALITY AS lines (line, place) \
         WHERE NOT starts_with(line, '{COMMENT_PREFIX}'))"
    )
}

/// A kind of mark, without its position or time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MarkKind {
    /// [`PartitionMark::Closed`]
    Closed,
    /// [`PartitionMark::Delivered`]
    Delivered,
    /// [`PartitionMark::Detached`]
    Detached,
    /// [`PartitionMark::Closed`], for the rows that the table contains when the mark is written.
    RowsClosed,
    /// [`PartitionMark::Delivered`], for the rows that were created before the given time.
    RowsDelivered(Timestamp),
}

impl MarkKind {
    /// Returns the start of a mark of this kind, and the SQL expression for its value: the current
    /// position or time.
    #[must_use]
    pub(crate) fn parts(self) -> (String, String) {
        // All transactions that have been committed so far precede this position in WAL, whether or
        // not they have been flushed.
        let lsn = "pg_current_wal_insert_lsn()::text";
        let now = "to_char(now() AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"')";
        let (text, expression) = match self {
            Self::Closed => ("closed at ".to_owned(), lsn.to_owned()),
            Self::Detached => ("detached at ".to_owned(), lsn.to_owned()),
            Self::Delivered => ("delivered by ".to_owned(), now.to_owned()),
            Self::RowsClosed => (
                ROWS_PREFIX.to_owned(),
                format!("{now} || ' closed at ' || {lsn}"),
            ),
            Self::RowsDelivered(before) => (
                format!("{ROWS_PREFIX}{before} delivered by "),
                now.to_owned(),
            ),
        };
        (format!("{COMMENT_PREFIX}{text}"), expression)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin() -> Origin {
        Origin {
            table: 16390,
            cluster: "7405".to_owned(),
        }
    }

    fn comment(kind: MarkKind, value: &str) -> String {
        let (start, _) = kind.parts();
        format!("{start}{value}{}", origin().suffix())
    }

    #[test]
    fn reads_partition_marks_in_the_written_format() {
        let read = |text: &str| origin().read(Some(text));
        let lsn = Lsn(0x16B_3748);
        assert_eq!(
            read(&comment(MarkKind::Closed, "0/16B3748")),
            Some(PartitionMark::Closed(lsn))
        );
        assert_eq!(
            read(&comment(MarkKind::Detached, "0/16B3748")),
            Some(PartitionMark::Detached(lsn))
        );
        let time = "2025-11-22T01:02:03.000004Z";
        assert_eq!(
            read(&comment(MarkKind::Delivered, time)),
            Some(PartitionMark::Delivered(time.parse().expect("a time")))
        );
    }

    #[test]
    fn reads_row_marks_in_the_written_format() {
        let (before, at) = ("2025-11-22T01:02:03Z", "2025-11-22T01:02:04Z");
        let [before_time, at_time] = [before, at].map(|text| text.parse().expect("a time"));
        let read = |text: &str| origin().read_rows_mark(Some(text));
        let closed = comment(MarkKind::RowsClosed, &format!("{before} closed at 0/1"));
        assert_eq!(
            read(&closed),
            Some((before_time, PartitionMark::Closed(Lsn(1))))
        );
        let delivered = comment(MarkKind::RowsDelivered(before_time), at);
        let expected = Some((before_time, PartitionMark::Delivered(at_time)));
        assert_eq!(read(&delivered), expected);
        // A mark for rows of a table is not a mark for a partition, and vice versa.
        assert_eq!(origin().read(Some(&closed)), None);
        assert_eq!(read(&comment(MarkKind::Closed, "0/1")), None);
    }

    #[test]
    fn ignores_comment_lines_that_are_not_marks() {
        let ours = comment(MarkKind::Closed, "0/1");
        let both = format!("Kept for the auditors\n{ours}");
        assert_eq!(
            origin().read(Some(&both)),
            Some(PartitionMark::Closed(Lsn(1)))
        );
        for text in ["", "walpost: closed at 0/1", "closed", "walpost: gone"] {
            assert_eq!(origin().read(Some(text)), None, "{text:?}");
        }
    }

    #[test]
    fn marks_fit_into_the_part_of_a_comment_that_is_read() {
        let origin = Origin {
            table: u32::MAX,
            cluster: u64::MAX.to_string(),
        };
        let time = "2025-11-22T01:02:03.123456789Z";
        let before = time.parse().expect("a time");
        for kind in [MarkKind::RowsDelivered(before), MarkKind::RowsClosed] {
            let (start, _) = kind.parts();
            let line = format!(
                "{start}{time} closed at FFFFFFFF/FFFFFFFF{}",
                origin.suffix()
            );
            assert!(line.len() < LINE_CHARS_MAX, "{line}");
        }
    }

    #[test]
    fn ignores_marks_of_a_different_cluster_or_table() {
        let ours = comment(MarkKind::Detached, "0/1");
        for (from, to) in [("7405", "7406"), ("16390", "16391")] {
            assert_eq!(origin().read(Some(&ours.replace(from, to))), None);
        }
    }
}
