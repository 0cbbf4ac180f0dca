//! Formats and parses the removal progress of a partition: the last completed step toward dropping
//! it. Walpost stores the removal progress in the last line of the partition's comment (`COMMENT ON
//! TABLE`), so it exists for as long as the partition does. This module does no I/O.

use jiff::Timestamp;

use crate::model::lsn::Lsn;

/// The start of the comment line in which Walpost stores the removal progress.
const COMMENT_PREFIX: &str = "walpost: ";

/// An upper bound on the length, in characters, of the comment line in which Walpost stores the
/// removal progress.
const LINE_CHARS_MAX: usize = 300;

/// The text that follows [`COMMENT_PREFIX`] in the comment on a table without partitions.
const ROWS_PREFIX: &str = "rows before ";

/// The removal progress of a partition: the last completed step toward dropping it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PartitionMark {
    /// The partition's time range had ended when this step was recorded, and the rows that the
    /// partition contained at the time were committed before this WAL position.
    Closed(Lsn),
    /// By this time, the slots had passed the position that was recorded in [`Self::Closed`].
    Delivered(Timestamp),
    /// The partition was detached, and all its rows were committed before this WAL position.
    Detached(Lsn),
}

/// Identifies the outbox table to which recorded removal progress belongs. Progress that was
/// recorded in a different cluster, such as in a comment from a restored dump, is ignored because
/// its LSNs and OIDs have no meaning in this cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Origin {
    /// The OID of the outbox table.
    pub table: u32,
    /// The system identifier of the database cluster.
    pub cluster: String,
}

impl Origin {
    /// Returns the text that ends every line in which Walpost stores removal progress for this
    /// table.
    #[must_use]
    pub(crate) fn suffix(&self) -> String {
        format!(" (table {}, cluster {})", self.table, self.cluster)
    }

    /// Returns the removal progress in a partition's comment, or `None` if the comment records none
    /// for this table.
    #[must_use]
    pub(crate) fn read(&self, comment: Option<&str>) -> Option<PartitionMark> {
        PartitionMark::read(&self.line(comment)?)
    }

    /// Returns the removal progress in the comment on a table without partitions, and a time. The
    /// progress applies to the rows that were created before this time.
    #[must_use]
    pub(crate) fn read_rows_mark(
        &self,
        comment: Option<&str>,
    ) -> Option<(Timestamp, PartitionMark)> {
        let line = self.line(comment)?;
        let (before, mark) = line.strip_prefix(ROWS_PREFIX)?.split_once(' ')?;
        Some((before.parse().ok()?, PartitionMark::read(mark)?))
    }

    /// Returns the comment line that contains the removal progress, without its fixed prefix and
    /// suffix.
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

/// Returns an SQL expression for the last `LINE_CHARS_MAX` characters of a table's comment, which
/// include the line with the removal progress. `oid` is the table's OID. The rest of the comment is
/// not read: a table's owner can write a comment of many megabytes, and a query that reads the
/// comments of all tables could then fail.
#[must_use]
pub(crate) fn end_of_comment(oid: &str) -> String {
    format!("right(obj_description({oid}, 'pg_class'), {LINE_CHARS_MAX})")
}

/// Returns an SQL expression for the lines of a table's comment that were not written by Walpost,
/// each followed by a line feed. `oid` is the table's OID.
#[must_use]
pub(crate) fn other_lines(oid: &str) -> String {
    format!(
        "(SELECT coalesce(string_agg(line || chr(10), '' ORDER BY place), '') \
         FROM string_to_table(obj_description({oid}, 'pg_class'), chr(10)) WITH ORDINALITY AS lines (line, place) \
         WHERE NOT starts_with(line, '{COMMENT_PREFIX}'))"
    )
}

/// The removal progress to store in a table's comment. The server inserts the WAL position or time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MarkKind {
    /// [`PartitionMark::Closed`]
    Closed,
    /// [`PartitionMark::Delivered`]
    Delivered,
    /// [`PartitionMark::Detached`]
    Detached,
    /// [`PartitionMark::Closed`] for a table without partitions. Applies to the rows that were
    /// created before the comment is written.
    RowsClosed,
    /// [`PartitionMark::Delivered`] for a table without partitions. Applies to the rows that were
    /// created before this time.
    RowsDelivered(Timestamp),
}

impl MarkKind {
    /// Returns the text at the start of the comment line for this step, and an SQL expression for
    /// the text that follows it, which contains the current WAL position, the current time, or
    /// both.
    #[must_use]
    pub(crate) fn parts(self) -> (String, String) {
        // The WAL insert position is after the commit records of all transactions committed so
        // far, including those that have not been flushed to disk.
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
    fn reads_back_the_removal_progress_of_partitions() {
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
    fn reads_back_the_removal_progress_of_table_rows() {
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
        // The removal progress of a table's rows must not be read as that of a partition, and vice
        // versa.
        assert_eq!(origin().read(Some(&closed)), None);
        assert_eq!(read(&comment(MarkKind::Closed, "0/1")), None);
    }

    #[test]
    fn ignores_comment_lines_without_removal_progress() {
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
    fn removal_progress_fits_within_the_maximum_comment_line_length() {
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
    fn ignores_removal_progress_from_a_different_cluster_or_table() {
        let ours = comment(MarkKind::Detached, "0/1");
        for (from, to) in [("7405", "7406"), ("16390", "16391")] {
            assert_eq!(origin().read(Some(&ours.replace(from, to))), None);
        }
    }
}
