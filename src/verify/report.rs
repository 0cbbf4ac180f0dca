//! Defines and formats the findings of a verification.

use std::fmt;
use std::ops::RangeInclusive;

use serde::{Serialize, Serializer};

use crate::model::lsn::{Lsn, Position};

/// The location of a record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct RecordLocation {
    pub topic: String,
    pub partition: i32,
    pub offset: i64,
}

impl fmt::Display for RecordLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}@{}", self.topic, self.partition, self.offset)
    }
}

/// A difference between the table and the topics.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "finding", rename_all = "kebab-case")]
pub(crate) enum Finding {
    /// A row whose event is not in any topic.
    Missing {
        /// The ID of the event.
        id: String,
        /// The topic to which the event belongs.
        topic: String,
    },
    /// A row whose event became a dead letter and was not resent.
    DeadLetter {
        /// The ID of the event.
        id: String,
        /// The topic for dead letters.
        topic: String,
    },
    /// An event that has more records in the topics than rows in the table.
    Repeated {
        /// The ID of the event.
        id: String,
        /// The number of records.
        copies: usize,
        /// The locations of the first few records.
        at: Vec<RecordLocation>,
    },
    /// A record that follows a record of a later commit in the same partition.
    OutOfOrder {
        /// The ID of the event.
        id: String,
        /// The location of the record.
        at: RecordLocation,
        #[serde(serialize_with = "as_text")]
        position: Position,
        /// The highest position among the preceding records in the same partition.
        #[serde(serialize_with = "as_text")]
        behind: Position,
    },
    /// A transaction with missing events.
    Gap {
        commit: Lsn,
        /// The indices of the missing events within the transaction.
        #[serde(serialize_with = "as_ranges")]
        missing: Vec<RangeInclusive<u64>>,
    },
    /// A record whose topic, key or partition does not match its row.
    Misplaced {
        /// The ID of the event.
        id: String,
        /// The location of the record.
        at: RecordLocation,
        /// The topic to which the event belongs.
        topic: String,
        /// The property that does not match: `topic`, `key` or `partition`.
        differs: &'static str,
    },
    /// A row that can't be converted to a record.
    Unroutable {
        row: String,
        /// The reason why the row can't be converted to a record.
        reason: String,
    },
    /// A record whose event is not in the table.
    Unexpected {
        /// The ID of the event, if the record contains one.
        id: Option<String>,
        /// The location of the record.
        at: RecordLocation,
    },
}

fn as_text<S: Serializer>(position: &Position, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(position)
}

fn as_ranges<S: Serializer>(
    ranges: &[RangeInclusive<u64>],
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(ranges.iter().map(|range| [range.start(), range.end()]))
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing { id, topic } => {
                write!(f, "MISSING      {id}: not in topic {topic:?}")
            }
            Self::DeadLetter { id, topic } => {
                write!(f, "DEAD LETTER  {id}: in topic {topic:?}")
            }
            Self::Repeated { id, copies, at } => {
                write!(f, "REPEATED     {id}: {copies} times: ")?;
                for (number, location) in at.iter().enumerate() {
                    let comma = if number == 0 { "" } else { ", " };
                    write!(f, "{comma}{location}")?;
                }
                if at.len() < *copies {
                    f.write_str(" ...")?;
                }
                Ok(())
            }
            Self::OutOfOrder {
                id,
                at,
                position,
                behind,
            } => write!(
                f,
                "OUT OF ORDER {id}: at {at} with position {position}, after {behind}"
            ),
            Self::Gap { commit, missing } => {
                write!(f, "GAP          transaction {commit}: missing event ")?;
                for (number, range) in missing.iter().enumerate() {
                    let comma = if number == 0 { "" } else { ", " };
                    let (start, end) = (range.start(), range.end());
                    match start == end {
                        true => write!(f, "{comma}{start}")?,
                        false => write!(f, "{comma}{start} to {end}")?,
                    }
                }
                Ok(())
            }
            Self::Misplaced {
                id,
                at,
                topic,
                differs,
            } => write!(
                f,
                "MISPLACED    {id}: at {at}, but belongs in topic {topic:?}; its {differs} does not match the row"
            ),
            Self::Unroutable { row, reason } => write!(f, "UNROUTABLE   {row}: {reason}"),
            Self::Unexpected { id, at } => write!(
                f,
                "UNEXPECTED   {}: at {at}, but not in the table",
                id.as_deref().unwrap_or("record without id")
            ),
        }
    }
}

/// The number of rows, records and findings of each kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Counts {
    /// Rows in the table.
    pub rows: u64,
    /// Records in the topics.
    pub records: u64,
    /// Rows whose events are in a topic.
    pub delivered: u64,
    /// Rows whose events are not in any topic, but may still be delivered.
    pub pending: u64,
    /// Rows whose events are not in any topic, but whose records may have expired.
    pub expired: u64,
    /// Rows whose events are not in any topic.
    pub missing: u64,
    /// Rows whose events became dead letters and were not resent.
    pub dead_letters: u64,
    /// Events that have more records in the topics than rows in the table.
    pub repeated: u64,
    /// Records that follow a record of a later commit in the same partition.
    pub out_of_order: u64,
    /// Transactions with missing events.
    pub gaps: u64,
    /// Records whose topic, key or partition does not match their row.
    pub misplaced: u64,
    /// Rows that can't be converted to a record.
    pub unroutable: u64,
    /// Events that are not in the table although they were committed before the table was read.
    pub unexpected: u64,
    /// Events that were committed after the table was read.
    pub newer: u64,
    /// Events that are not in the table, or are outside the selected time range.
    pub outside: u64,
    /// Records that were sent by a replay.
    pub replayed: u64,
    /// Rows without an ID.
    pub without_id: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_findings_as_text_and_json() {
        let location = |offset| RecordLocation {
            topic: "t".to_owned(),
            partition: 1,
            offset,
        };
        let position = |index| Position {
            commit: Lsn(0x16),
            index,
        };
        let id = || "e".to_owned();
        let check = |finding: Finding, text: &str, json: &str| {
            assert_eq!(finding.to_string(), text);
            assert_eq!(serde_json::to_string(&finding).expect("JSON"), json);
        };
        check(
            Finding::Repeated {
                id: id(),
                copies: 3,
                at: vec![location(4), location(5)],
            },
            "REPEATED     e: 3 times: t/1@4, t/1@5 ...",
            r#"{"finding":"repeated","id":"e","copies":3,"at":[{"topic":"t","partition":1,"offset":4},{"topic":"t","partition":1,"offset":5}]}"#,
        );
        check(
            Finding::OutOfOrder {
                id: id(),
                at: location(4),
                position: position(0),
                behind: position(1),
            },
            "OUT OF ORDER e: at t/1@4 with position 00000000/00000016:0000000000, after 00000000/00000016:0000000001",
            r#"{"finding":"out-of-order","id":"e","at":{"topic":"t","partition":1,"offset":4},"position":"00000000/00000016:0000000000","behind":"00000000/00000016:0000000001"}"#,
        );
        check(
            Finding::Gap {
                commit: Lsn(0x16),
                missing: vec![0..=0, 3..=7],
            },
            "GAP          transaction 0/16: missing event 0, 3 to 7",
            r#"{"finding":"gap","commit":"0/16","missing":[[0,0],[3,7]]}"#,
        );
        check(
            Finding::Unexpected {
                id: None,
                at: location(1),
            },
            "UNEXPECTED   record without id: at t/1@1, but not in the table",
            r#"{"finding":"unexpected","id":null,"at":{"topic":"t","partition":1,"offset":1}}"#,
        );
    }
}
