//! Records how far the removal of a partition has progressed. This mark is stored in the last line
//! of the partition's comment, so it exists exactly as long as the partition. Pure.

use jiff::Timestamp;

use crate::model::lsn::Lsn;

/// The start of Walpost's line.
const COMMENT_PREFIX: &str = "walpost: ";

/// Longer than any line of Walpost, in characters.
const LINE_CHARS_MAX: usize = 300;

/// Follows the start if the mark concerns rows of a table without partitions.
const ROWS_PREFIX: &str = "rows before ";

/// How far the removal of a partition has progressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PartitionMark {
    /// The time range has ended, and the rows that the partition contained then were committed
    /// before this WAL position.
    Closed(Lsn),
    /// The slots had passed that position at this time.
    Delivered(Timestamp),
    /// The partition was detached, and all its rows were committed before this WAL position.
    Detached(Lsn),
}

/// The table that a mark concerns. LSNs and OIDs of another cluster, for example in a dump, have no
/// meaning here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Origin {
    /// OID of the outbox table.
    pub table: u32,
    /// The system identifier.
    pub cluster: String,
}

impl Origin {
    /// Returns the end of each line about this table.
    #[must_use]
    pub(crate) fn suffix(&self) -> String {
        format!(" (table {}, cluster {})", self.table, self.cluster)
    }

    /// Returns the mark in a partition's comment, if it concerns this table.
    #[must_use]
    pub(crate) fn read(&self, comment: Option<&str>) -> Option<PartitionMark> {
        PartitionMark::read(&self.line(comment)?)
    }

    /// Returns the mark in the table's own comment, and the time before which rows are concerned.
    #[must_use]
    pub(crate) fn read_generation(
        &self,
        comment: Option<&str>,
    ) -> Option<(Timestamp, PartitionMark)> {
        let line = self.line(comment)?;
        let (before, mark) = line.strip_prefix(ROWS_PREFIX)?.split_once(' ')?;
        Some((before.parse().ok()?, PartitionMark::read(mark)?))
    }

    /// Returns Walpost's line, without its fixed start and end.
    fn line(&self, comment: Option<&str>) -> Option<String> {
        let line = comment?.lines().next_back()?;
        let what = line
            .strip_prefix(COMMENT_PREFIX)?
            .strip_suffix(&self.suffix())?;
        Some(what.to_owned())
    }
}

impl PartitionMark {
    fn read(what: &str) -> Option<Self> {
        let lsn = |text: &str| text.parse().ok();
        if let Some(text) = what.strip_prefix("closed at ") {
            lsn(text).map(Self::Closed)
        } else if let Some(text) = what.strip_prefix("detached at ") {
            lsn(text).map(Self::Detached)
        } else {
            let time = what.strip_prefix("delivered by ")?.parse();
            time.ok().map(Self::Delivered)
        }
    }
}

/// Returns SQL for the end of the comment on the table with OID `oid`, longer than any line of
/// Walpost. The owner determines the length of a comment, and one with megabytes must not fail the
/// query that reads the comments of all tables.
#[must_use]
pub(crate) fn end_of_comment(oid: &str) -> String {
    format!("right(obj_description({oid}, 'pg_class'), {LINE_CHARS_MAX})")
}

/// Returns SQL for the lines of the comment on a table that are not Walpost's, each with its line
/// feed. `oid` is the table's OID.
#[must_use]
pub(crate) fn other_lines(oid: &str) -> String {
    format!(
        "(SELECT coalesce(string_agg(line || chr(10), '' ORDER BY place), '') \
         FROM string_to_table(obj_description({oid}, 'pg_class'), chr(10)) WITH ORDINALITY AS lines (line, place) \
         WHERE NOT starts_with(line, '{COMMENT_PREFIX}'))"
    )
}

/// A kind of mark, before its position or time is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MarkKind {
    /// [`PartitionMark::Closed`]
    Closed,
    /// [`PartitionMark::Delivered`]
    Delivered,
    /// [`PartitionMark::Detached`]
    Detached,
    /// [`PartitionMark::Closed`], for the rows of a table that exist at that moment.
    RowsClosed,
    /// [`PartitionMark::Delivered`], for the rows before that time.
    RowsDelivered(Timestamp),
}

impl MarkKind {
    /// Returns the start of a line of this kind, and the SQL expression for the rest: the current
    /// position or time.
    #[must_use]
    pub(crate) fn parts(self) -> (String, String) {
        // Everything committed by now is in the WAL before this position, whether flushed or not.
        let lsn = "pg_current_wal_insert_lsn()::text";
        let now = "to_char(now() AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"')";
        let (what, expression) = match self {
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
        (format!("{COMMENT_PREFIX}{what}"), expression)
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
    fn reads_back_what_was_written() {
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
    fn a_generation_of_rows_is_read_again() {
        let (before, at) = ("2025-11-22T01:02:03Z", "2025-11-22T01:02:04Z");
        let [before_time, at_time] = [before, at].map(|text| text.parse().expect("a time"));
        let read = |text: &str| origin().read_generation(Some(text));
        let closed = comment(MarkKind::RowsClosed, &format!("{before} closed at 0/1"));
        assert_eq!(
            read(&closed),
            Some((before_time, PartitionMark::Closed(Lsn(1))))
        );
        let delivered = comment(MarkKind::RowsDelivered(before_time), at);
        let expected = Some((before_time, PartitionMark::Delivered(at_time)));
        assert_eq!(read(&delivered), expected);
        // A mark for rows of a table is not one for a partition, and vice versa.
        assert_eq!(origin().read(Some(&closed)), None);
        assert_eq!(read(&comment(MarkKind::Closed, "0/1")), None);
    }

    #[test]
    fn lines_of_others_are_not_marks() {
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
    fn no_line_of_ours_is_longer_than_what_is_read_of_a_comment() {
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
    fn a_mark_of_another_cluster_or_table_is_none() {
        let ours = comment(MarkKind::Detached, "0/1");
        for (from, to) in [("7405", "7406"), ("16390", "16391")] {
            assert_eq!(origin().read(Some(&ours.replace(from, to))), None);
        }
    }
}
