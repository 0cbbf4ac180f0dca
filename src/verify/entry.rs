//! Encodes rows and records for temporary storage.

use std::io;

use bytes::{Buf, BufMut};

use crate::model::lsn::{Lsn, Position};

/// A row of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Row {
    /// The index of the row's topic in the list of topics.
    pub(super) topic: u32,
    /// The partition, if a column specifies it.
    pub(super) partition: Option<i32>,
    /// The hash of the key.
    pub(super) key: u64,
    /// The time of the row in milliseconds since 1970, if the table contains it.
    pub(super) created: Option<i64>,
}

/// A record in a topic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Record {
    /// The number of the partition that contains the record.
    pub(super) place: u32,
    /// The offset in the partition.
    pub(super) offset: i64,
    /// The hash of the key.
    pub(super) key: u64,
    /// The position in the WAL, if the record contains it.
    pub(super) position: Option<Position>,
    /// Whether the record was sent by a replay.
    pub(super) is_replay: bool,
    /// The index of the record among all records, in the order in which they were read.
    pub(super) number: u64,
}

/// A row or a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EntryKind {
    Row(Row),
    Record(Record),
}

/// A row or a record, with the ID of the event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry<'e> {
    pub(super) kind: EntryKind,
    pub(super) id: &'e [u8],
}

const ROW: u8 = 0;
const RECORD: u8 = 1;
/// Represents an unknown time or partition. This value never occurs as an actual time or partition.
const UNKNOWN: i64 = i64::MIN;

impl<'e> Entry<'e> {
    /// Replaces the contents of `into` with the encoded entry.
    pub(super) fn encode(&self, into: &mut Vec<u8>) {
        into.clear();
        match &self.kind {
            EntryKind::Row(row) => {
                into.put_u8(ROW);
                into.put_u32(row.topic);
                into.put_i64(row.partition.map_or(UNKNOWN, i64::from));
                into.put_u64(row.key);
                into.put_i64(row.created.unwrap_or(UNKNOWN));
            }
            EntryKind::Record(record) => {
                into.put_u8(RECORD);
                into.put_u32(record.place);
                into.put_i64(record.offset);
                into.put_u64(record.key);
                into.put_u8(u8::from(record.is_replay));
                into.put_u64(record.number);
                into.put_u8(u8::from(record.position.is_some()));
                let position = record.position.unwrap_or_default();
                into.put_u64(position.commit.0);
                into.put_u64(position.index);
            }
        }
        into.extend_from_slice(self.id);
    }

    /// Decodes the result of [`Entry::encode`].
    pub(super) fn decode(mut bytes: &'e [u8]) -> io::Result<Self> {
        let kind = match bytes.try_get_u8()? {
            ROW => EntryKind::Row(Row {
                topic: bytes.try_get_u32()?,
                partition: i32::try_from(bytes.try_get_i64()?).ok(),
                key: bytes.try_get_u64()?,
                created: Some(bytes.try_get_i64()?).filter(|&created| created != UNKNOWN),
            }),
            _ => EntryKind::Record(Record {
                place: bytes.try_get_u32()?,
                offset: bytes.try_get_i64()?,
                key: bytes.try_get_u64()?,
                is_replay: bytes.try_get_u8()? != 0,
                number: bytes.try_get_u64()?,
                position: {
                    let is_known = bytes.try_get_u8()? != 0;
                    let position = Position {
                        commit: Lsn(bytes.try_get_u64()?),
                        index: bytes.try_get_u64()?,
                    };
                    is_known.then_some(position)
                },
            }),
        };
        Ok(Self { kind, id: bytes })
    }
}

/// An event's position, which is needed to find gaps in transactions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Indexed {
    pub(super) position: Position,
    /// Whether the event is in the table.
    pub(super) is_known: bool,
}

impl Indexed {
    pub(super) fn encode(self) -> [u8; 17] {
        let mut out = [0; 17];
        let mut into = &mut out[..];
        into.put_u64(self.position.commit.0);
        into.put_u64(self.position.index);
        into.put_u8(u8::from(self.is_known));
        out
    }

    pub(super) fn decode(mut bytes: &[u8]) -> io::Result<Self> {
        Ok(Self {
            position: Position {
                commit: Lsn(bytes.try_get_u64()?),
                index: bytes.try_get_u64()?,
            },
            is_known: bytes.try_get_u8()? != 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decoding_an_encoded_entry_returns_the_original() {
        let row = |partition, created| {
            EntryKind::Row(Row {
                topic: 7,
                partition,
                key: 1 << 63,
                created,
            })
        };
        let record = |position, is_replay| {
            EntryKind::Record(Record {
                place: 3,
                offset: 1 << 40,
                key: 5,
                position,
                is_replay,
                number: 9,
            })
        };
        let position = Position {
            commit: Lsn(1 << 50),
            index: 4,
        };
        let mut bytes = vec![1, 2, 3];
        for kind in [
            row(None, None),
            row(Some(0), Some(-1)),
            record(None, true),
            record(Some(position), false),
        ] {
            for id in [&b""[..], b"an id"] {
                let entry = Entry { kind, id };
                entry.encode(&mut bytes);
                assert_eq!(Entry::decode(&bytes).expect("an entry"), entry);
            }
        }
        assert!(Entry::decode(&bytes[..20]).is_err());
        let indexed = Indexed {
            position,
            is_known: true,
        };
        assert_eq!(
            Indexed::decode(&indexed.encode()).expect("an indexed event"),
            indexed
        );
    }
}
