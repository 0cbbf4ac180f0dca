//! What is known of a partition so far, kept in the last line of its comment: it lasts as long as the
//! partition, and goes with it. Pure.

use jiff::Timestamp;

use crate::model::lsn::Lsn;

/// What a line of ours begins with.
const START: &str = "walpost: ";

/// More characters than a line of ours has.
const LINE_CHARS_MAX: usize = 300;

/// What follows where it is about rows of a table without partitions.
const ROWS: &str = "rows before ";

/// What is known of a partition so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mark {
    /// Its time is over, and what it had then was committed before this place in WAL.
    Closed(Lsn),
    /// The slots had passed that place at this time.
    Delivered(Timestamp),
    /// It was detached, and whatever it has was committed before this place.
    Detached(Lsn),
}

/// What a mark is about. LSNs and OIDs of another cluster, say of a dump, mean nothing here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Origin {
    /// OID of the outbox table.
    pub table: u32,
    /// The system identifier.
    pub cluster: String,
}

impl Origin {
    /// What each line of ours about this table ends with.
    #[must_use]
    pub(crate) fn suffix(&self) -> String {
        format!(" (table {}, cluster {})", self.table, self.cluster)
    }

    /// The mark in a partition's comment, if it is one of this table.
    #[must_use]
    pub(crate) fn read(&self, comment: Option<&str>) -> Option<Mark> {
        Mark::read(&self.line(comment)?)
    }

    /// The mark in the table's own comment, and the time before which rows are meant.
    #[must_use]
    pub(crate) fn read_generation(&self, comment: Option<&str>) -> Option<(Timestamp, Mark)> {
        let line = self.line(comment)?;
        let (before, mark) = line.strip_prefix(ROWS)?.split_once(' ')?;
        Some((before.parse().ok()?, Mark::read(mark)?))
    }

    /// Our line, without what each begins and ends with.
    fn line(&self, comment: Option<&str>) -> Option<String> {
        let line = comment?.lines().next_back()?;
        let what = line.strip_prefix(START)?.strip_suffix(&self.suffix())?;
        Some(what.to_owned())
    }
}

impl Mark {
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

/// SQL for the end of the comment on a table, which `oid` names: more than a line of ours can have. The owner chooses how long a
/// comment is, and one of megabytes must not fail the query that has those of all tables.
#[must_use]
pub(crate) fn end_of_comment(oid: &str) -> String {
    format!("right(obj_description({oid}, 'pg_class'), {LINE_CHARS_MAX})")
}

/// SQL for the lines of the comment on a table that are not ours, each with its end. `oid` names the table.
#[must_use]
pub(crate) fn other_lines(oid: &str) -> String {
    format!(
        "(SELECT coalesce(string_agg(line || chr(10), '' ORDER BY place), '') \
         FROM string_to_table(obj_description({oid}, 'pg_class'), chr(10)) WITH ORDINALITY AS lines (line, place) \
         WHERE NOT starts_with(line, '{START}'))"
    )
}

/// A kind of mark, before its place or time is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MarkKind {
    /// [`Mark::Closed`]
    Closed,
    /// [`Mark::Delivered`]
    Delivered,
    /// [`Mark::Detached`]
    Detached,
    /// [`Mark::Closed`], of the rows of a table before the moment.
    RowsClosed,
    /// [`Mark::Delivered`], of the rows before that time.
    RowsDelivered(Timestamp),
}

impl MarkKind {
    /// What a line of this kind begins with, and the SQL expression for what comes next: the place
    /// or time of the moment.
    #[must_use]
    pub(crate) fn parts(self) -> (String, String) {
        // All that is committed by now is in WAL before this place, flushed or not.
        let lsn = "pg_current_wal_insert_lsn()::text";
        let now = "to_char(now() AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"')";
        let (what, expression) = match self {
            Self::Closed => ("closed at ".to_owned(), lsn.to_owned()),
            Self::Detached => ("detached at ".to_owned(), lsn.to_owned()),
            Self::Delivered => ("delivered by ".to_owned(), now.to_owned()),
            Self::RowsClosed => (ROWS.to_owned(), format!("{now} || ' closed at ' || {lsn}")),
            Self::RowsDelivered(before) => {
                (format!("{ROWS}{before} delivered by "), now.to_owned())
            }
        };
        (format!("{START}{what}"), expression)
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
    fn what_is_written_is_read_again() {
        let read = |text: &str| origin().read(Some(text));
        let lsn = Lsn(0x16B_3748);
        assert_eq!(
            read(&comment(MarkKind::Closed, "0/16B3748")),
            Some(Mark::Closed(lsn))
        );
        assert_eq!(
            read(&comment(MarkKind::Detached, "0/16B3748")),
            Some(Mark::Detached(lsn))
        );
        let time = "2025-11-22T01:02:03.000004Z";
        assert_eq!(
            read(&comment(MarkKind::Delivered, time)),
            Some(Mark::Delivered(time.parse().expect("a time")))
        );
    }

    #[test]
    fn a_generation_of_rows_is_read_again() {
        let (before, at) = ("2025-11-22T01:02:03Z", "2025-11-22T01:02:04Z");
        let [before_time, at_time] = [before, at].map(|text| text.parse().expect("a time"));
        let read = |text: &str| origin().read_generation(Some(text));
        let closed = comment(MarkKind::RowsClosed, &format!("{before} closed at 0/1"));
        assert_eq!(read(&closed), Some((before_time, Mark::Closed(Lsn(1)))));
        let delivered = comment(MarkKind::RowsDelivered(before_time), at);
        let expected = Some((before_time, Mark::Delivered(at_time)));
        assert_eq!(read(&delivered), expected);
        // That of a table is none of a partition, and the other way round.
        assert_eq!(origin().read(Some(&closed)), None);
        assert_eq!(read(&comment(MarkKind::Closed, "0/1")), None);
    }

    #[test]
    fn lines_of_others_are_no_marks() {
        let ours = comment(MarkKind::Closed, "0/1");
        let both = format!("Kept for the auditors\n{ours}");
        assert_eq!(origin().read(Some(&both)), Some(Mark::Closed(Lsn(1))));
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
