//! For exactly-once delivery, tracks which existing rows have been copied to Kafka.
//!
//! An interrupted copy resumes after the last copied key, with a newer snapshot that also contains
//! the rows committed since the previous snapshot. Therefore, a row received from the stream is
//! already in Kafka if its key belongs to a chunk whose snapshot includes the row's transaction.
//! This module performs no I/O.

use std::cmp::Ordering;

use serde::{Deserialize, Serialize};

use crate::model::lsn::Lsn;

/// The progress of a copy: which of the table's rows are in Kafka.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CopyProgress {
    /// The columns by which the rows are ordered; empty if Walpost can't compare their values.
    pub key: Vec<String>,
    /// Number of copied rows.
    pub rows: u64,
    /// The chunks, ordered by key. Never empty.
    pub chunks: Vec<Chunk>,
}

/// A range of rows that was copied from one snapshot. The range starts after the preceding chunk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Chunk {
    /// The snapshot includes all transactions whose commit record precedes this LSN.
    pub snapshot_lsn: Lsn,
    /// Key of the last row in the chunk; `None` if the chunk extends to the end of the table.
    pub upto: Option<Vec<String>>,
}

/// How to compare the text values of a key column, so that the result matches the server's order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyType {
    /// The values are compared as numbers.
    Integer,
    /// The values are compared byte by byte.
    Bytes,
    /// The values are compared byte by byte. The query that reads the rows must sort them with the
    /// "C" collation, because the server otherwise uses a different order.
    Text,
    /// The values are compared byte by byte, which gives the correct order only if all years have
    /// four digits.
    Time,
}

/// The error returned for a key that can't be compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the row's key can't be compared")]
pub struct KeyError;

impl KeyType {
    /// Returns how to compare columns of this type, or `None` if Walpost can't compare them. The
    /// OIDs are those in `src/include/catalog/pg_type.dat` of PostgreSQL 18.
    #[must_use]
    pub fn from_type_oid(type_oid: u32) -> Option<Self> {
        match type_oid {
            20 | 21 | 23 => Some(Self::Integer),
            17 | 2950 => Some(Self::Bytes),
            25 | 1043 => Some(Self::Text),
            1114 | 1184 => Some(Self::Time),
            _ => None,
        }
    }

    /// Checks that the value can be compared.
    ///
    /// # Errors
    /// Returns an error if the value can't be compared.
    pub fn check(self, text: &[u8]) -> Result<(), KeyError> {
        let is_comparable = match self {
            Self::Integer => integer(text).is_some(),
            Self::Bytes | Self::Text => true,
            // Times with fractional seconds also sort correctly byte by byte, because `.` sorts
            // after `+`, and a longer string sorts after its prefix.
            Self::Time => {
                text.get(4) == Some(&b'-')
                    && text[..4].iter().all(u8::is_ascii_digit)
                    && !text.ends_with(b"BC")
            }
        };
        is_comparable.then_some(()).ok_or(KeyError)
    }

    fn compare(self, a: &[u8], b: &[u8]) -> Result<Ordering, KeyError> {
        self.check(a)?;
        self.check(b)?;
        Ok(match self {
            Self::Integer => integer(a).cmp(&integer(b)),
            Self::Bytes | Self::Text | Self::Time => a.cmp(b),
        })
    }
}

fn integer(text: &[u8]) -> Option<i64> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

impl CopyProgress {
    /// Returns whether all rows have been copied.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.chunks.last().is_some_and(|chunk| chunk.upto.is_none())
    }

    /// Returns the LSN of the first snapshot. The stream starts at this LSN.
    #[must_use]
    pub fn first_snapshot_lsn(&self) -> Lsn {
        self.chunks
            .first()
            .map_or(Lsn::ZERO, |chunk| chunk.snapshot_lsn)
    }

    /// Returns the LSN of the last snapshot. Transactions with a commit record at or after this LSN
    /// contain no copied rows.
    #[must_use]
    pub fn last_snapshot_lsn(&self) -> Lsn {
        let snapshot_lsns = self.chunks.iter().map(|chunk| chunk.snapshot_lsn);
        snapshot_lsns.max().unwrap_or(Lsn::ZERO)
    }

    /// Lowers each snapshot's LSN to at most `at`, the LSN at which the previous timeline ended.
    /// After `at`, the new timeline contains different transactions.
    #[must_use]
    pub fn truncated_at(mut self, at: Lsn) -> Self {
        for chunk in &mut self.chunks {
            chunk.snapshot_lsn = chunk.snapshot_lsn.min(at);
        }
        self
    }

    /// Returns whether the copy contains the row with this key, given the LSN of the commit record
    /// of the row's transaction. `key` contains each column's value and type.
    ///
    /// # Errors
    /// Returns an error if the key can't be compared.
    pub fn contains(&self, commit: Lsn, key: &[(&[u8], KeyType)]) -> Result<bool, KeyError> {
        for chunk in &self.chunks {
            let Some(upto) = &chunk.upto else {
                return Ok(commit < chunk.snapshot_lsn);
            };
            if upto.len() != key.len() {
                return Err(KeyError);
            }
            let mut order = Ordering::Equal;
            for ((value, kind), bound) in key.iter().zip(upto) {
                order = kind.compare(value, bound.as_bytes())?;
                if order != Ordering::Equal {
                    break;
                }
            }
            if order != Ordering::Greater {
                return Ok(commit < chunk.snapshot_lsn);
            }
        }
        Ok(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(snapshot_lsn: u64, upto: Option<&[&str]>) -> Chunk {
        Chunk {
            snapshot_lsn: Lsn(snapshot_lsn),
            upto: upto.map(|key| key.iter().map(|text| (*text).to_owned()).collect()),
        }
    }

    fn copied(chunks: &[Chunk]) -> CopyProgress {
        CopyProgress {
            key: vec!["n".to_owned(), "id".to_owned()],
            rows: 0,
            chunks: chunks.to_vec(),
        }
    }

    #[test]
    fn recognizes_copied_rows_by_their_key_and_the_snapshot_of_their_chunk() {
        let three = [
            chunk(100, Some(&["9", "b"])),
            chunk(200, Some(&["10", "a"])),
            chunk(300, None),
        ];
        let copied = copied(&three);
        let check = |commit, n: &str, id: &str, expected| {
            let key = [
                (n.as_bytes(), KeyType::Integer),
                (id.as_bytes(), KeyType::Bytes),
            ];
            assert_eq!(
                copied.contains(Lsn(commit), &key),
                Ok(expected),
                "{commit} {n} {id}"
            );
        };
        for (n, id, snapshot_lsn) in [
            ("-1", "z", 100),
            ("9", "a", 100),
            ("9", "b", 100),
            ("9", "c", 200),
            ("10", "a", 200),
            ("10", "b", 300),
            ("11", "", 300),
        ] {
            check(snapshot_lsn - 1, n, id, true);
            check(snapshot_lsn, n, id, false);
        }
        assert!(copied.is_complete());
        assert_eq!(
            (copied.first_snapshot_lsn(), copied.last_snapshot_lsn()),
            (Lsn(100), Lsn(300))
        );
        let truncated = copied.clone().truncated_at(Lsn(150));
        let snapshot_lsns: Vec<_> = truncated
            .chunks
            .iter()
            .map(|chunk| chunk.snapshot_lsn.0)
            .collect();
        assert_eq!(snapshot_lsns, [100, 150, 150]);
    }

    #[test]
    fn does_not_treat_rows_that_an_unfinished_copy_has_not_reached_as_copied() {
        let copied = copied(&[chunk(100, Some(&["9", "b"]))]);
        assert!(!copied.is_complete());
        let key = |n: &'static str| {
            [
                (n.as_bytes(), KeyType::Integer),
                (b"a".as_slice(), KeyType::Bytes),
            ]
        };
        assert_eq!(copied.contains(Lsn(1), &key("10")), Ok(false));
        assert_eq!(copied.contains(Lsn(1), &key("9")), Ok(true));
        assert_eq!(copied.contains(Lsn(1), &key("x")), Err(KeyError));
        assert_eq!(copied.contains(Lsn(1), &key("9")[..1]), Err(KeyError));
    }

    #[test]
    fn compares_values_according_to_their_column_type() {
        let check = |name, types: &[u32], kind| {
            for type_oid in types {
                assert_eq!(
                    KeyType::from_type_oid(*type_oid),
                    kind,
                    "{name}: {type_oid}"
                );
            }
        };
        check("int2, int4, int8", &[21, 23, 20], Some(KeyType::Integer));
        check("bytea, uuid", &[17, 2950], Some(KeyType::Bytes));
        check("text, varchar", &[25, 1043], Some(KeyType::Text));
        check("timestamp, timestamptz", &[1114, 1184], Some(KeyType::Time));
        check("numeric, float8, jsonb", &[1700, 701, 3802], None);
    }

    #[test]
    fn compares_times_as_text() {
        let ordered = [
            "2026-11-22 01:02:03+00",
            "2026-11-22 01:02:03.000001+00",
            "2026-11-22 01:02:03.4+00",
            "2026-11-22 01:02:03.45+00",
            "2026-11-22 01:02:03.5+00",
            "2026-11-22 01:02:04+00",
        ];
        for pair in ordered.windows(2) {
            let less = KeyType::Time.compare(pair[0].as_bytes(), pair[1].as_bytes());
            assert_eq!(less, Ok(Ordering::Less), "{pair:?}");
            let local = |text: &str| text.trim_end_matches("+00").to_owned();
            let less = KeyType::Time.compare(local(pair[0]).as_bytes(), local(pair[1]).as_bytes());
            assert_eq!(less, Ok(Ordering::Less), "{pair:?}");
        }
        for text in [
            "infinity",
            "-infinity",
            "10000-01-01 00:00:00",
            "0044-03-15 00:00:00 BC",
            "",
        ] {
            assert_eq!(
                KeyType::Time.check(text.as_bytes()),
                Err(KeyError),
                "{text}"
            );
        }
    }
}
