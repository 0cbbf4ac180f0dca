//! `pgoutput` protocol version 1: bytes to messages that borrow from the read buffer.
//!
//! PostgreSQL 18, "54.9. Logical Replication Message Formats". The decoder is total: every length
//! is checked before it is used, leftovers are refused, and an error names the field it is about.

use crate::model::lsn::Lsn;

/// More than any server's NAMEDATALEN, which is 64 unless PostgreSQL is compiled with another one.
const NAME_BYTES_MAX: usize = 1024;
/// `MaxTupleAttributeNumber` of PostgreSQL.
const COLUMNS_MAX: usize = 1664;

/// One message of the output plugin.
#[derive(Debug, PartialEq, Eq)]
pub enum Message<'a> {
    /// A transaction begins; everything up to its [`Message::Commit`] belongs to it.
    Begin(Begin),
    /// The transaction that began last is complete.
    Commit(Commit),
    /// The transaction came to this server from another one.
    Origin {
        /// The commit's LSN on that server.
        commit: Lsn,
        /// The origin's name.
        name: &'a str,
    },
    /// The shape of a table, sent before its first row and whenever it has changed.
    Relation(Relation<'a>),
    /// A type that isn't built in.
    Type {
        /// The type's OID.
        oid: u32,
        /// Its schema; empty for `pg_catalog`.
        namespace: &'a str,
        name: &'a str,
    },
    /// A row was inserted.
    Insert {
        /// OID of the table, as in its [`Relation`].
        relation: u32,
        /// The row.
        new: Tuple<'a>,
    },
    /// A row was updated.
    Update {
        /// OID of the table.
        relation: u32,
        /// The row before, where the replica identity asks for it.
        old: Option<OldTuple<'a>>,
        /// The row after.
        new: Tuple<'a>,
    },
    /// A row was deleted.
    Delete {
        /// OID of the table.
        relation: u32,
        /// The row before.
        old: OldTuple<'a>,
    },
    /// Tables were truncated.
    Truncate {
        /// `CASCADE` was given.
        cascade: bool,
        /// `RESTART IDENTITY` was given.
        restart_identity: bool,
        /// OIDs of the tables.
        relations: Vec<u32>,
    },
    /// `pg_logical_emit_message()` was called.
    Logical {
        /// It belongs to the transaction, and was rolled back with it if that was.
        transactional: bool,
        /// Where it is in WAL.
        lsn: Lsn,
        /// The caller's prefix.
        prefix: &'a str,
        /// The caller's content.
        content: &'a [u8],
    },
}

/// The beginning of a [`Message::Logical`] whose content is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LogicalHead<'a> {
    /// It belongs to the transaction.
    pub transactional: bool,
    /// The caller's prefix and the length of the content; nothing where the prefix is longer than what there
    /// is of the message.
    pub prefix: Option<(&'a str, usize)>,
}

impl<'a> LogicalHead<'a> {
    /// Decodes the beginning of a message.
    ///
    /// # Errors
    /// It is none of [`Message::Logical`].
    pub(crate) fn decode(head: &'a [u8]) -> Result<Self, DecodeError> {
        let (&tag, rest) = head.split_first().ok_or(DecodeError::Empty)?;
        if tag != b'M' {
            return Err(DecodeError::UnknownTag(tag));
        }
        let mut r = Reader { rest };
        let transactional = r.u8("message.flags")? == 1;
        r.lsn("message.lsn")?;
        let prefix = match (r.prefix(), r.u32("message.content")) {
            (Ok(prefix), Ok(len)) => Some((prefix, len as usize)),
            _ => None,
        };
        Ok(Self {
            transactional,
            prefix,
        })
    }
}

/// What was done to a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    Insert,
    Update,
    Delete,
}

/// The beginning of a message about a row whose values are not all there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowHead<'a> {
    /// What was done to the row.
    pub change: Change,
    /// OID of the table.
    pub relation: u32,
    /// The beginning of the tuple.
    tuple: &'a [u8],
}

impl<'a> RowHead<'a> {
    /// Decodes the beginning of a message. `None` if it is not about a row.
    ///
    /// # Errors
    /// The beginning ends before the OID does.
    pub(crate) fn decode(head: &'a [u8]) -> Result<Option<Self>, DecodeError> {
        let (&tag, rest) = head.split_first().ok_or(DecodeError::Empty)?;
        let change = match tag {
            b'I' => Change::Insert,
            b'U' => Change::Update,
            b'D' => Change::Delete,
            _ => return Ok(None),
        };
        let mut r = Reader { rest };
        let relation = r.u32("row.relation")?;
        Ok(Some(Self {
            change,
            relation,
            tuple: r.rest,
        }))
    }

    /// The values of an inserted row that are there from its first column on, if they are texts.
    pub(crate) fn texts(&self) -> Vec<&'a [u8]> {
        let mut texts = Vec::new();
        // 'N', and the number of columns.
        let [b'N', _, _, rest @ ..] = self.tuple else {
            return texts;
        };
        let mut rest = rest;
        while let [b't', a, b, c, d, after @ ..] = rest
            && let Some((text, after)) =
                after.split_at_checked(u32::from_be_bytes([*a, *b, *c, *d]) as usize)
        {
            texts.push(text);
            rest = after;
        }
        texts
    }
}

/// The start of a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Begin {
    /// LSN of the commit record: the same as [`Commit::commit`] at the other end.
    pub commit: Lsn,
    /// Time of the commit, in microseconds since 2000-01-01 00:00 UTC.
    pub time_micros: i64,
    /// The transaction's id.
    pub xid: u32,
}

/// The end of a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Commit {
    /// LSN of the commit record.
    pub commit: Lsn,
    /// The end of the commit record: what to confirm once the transaction is durable.
    pub end: Lsn,
    /// Time of the commit, in microseconds since 2000-01-01 00:00 UTC.
    pub time_micros: i64,
}

/// The shape of a table.
#[derive(Debug, PartialEq, Eq)]
pub struct Relation<'a> {
    /// OID of the table; of the root where the publication publishes via the root.
    pub oid: u32,
    /// Its schema; empty for `pg_catalog`.
    pub namespace: &'a str,
    pub name: &'a str,
    /// `pg_class.relreplident`.
    pub replica_identity: u8,
    /// Its columns, in the order of a [`Tuple`]'s values.
    pub columns: Vec<Column<'a>>,
}

/// A column of a [`Relation`].
#[derive(Debug, PartialEq, Eq)]
pub struct Column<'a> {
    /// It is part of the replica identity.
    pub key: bool,
    pub name: &'a str,
    pub type_oid: u32,
    /// `pg_attribute.atttypmod`.
    pub type_modifier: i32,
}

/// The row before an update or a delete.
#[derive(Debug, PartialEq, Eq)]
pub enum OldTuple<'a> {
    /// `K`: the columns of the replica identity only.
    Key(Tuple<'a>),
    /// `O`: all columns.
    Full(Tuple<'a>),
}

/// The values of a row, checked when the message was decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuple<'a> {
    count: u16,
    values: &'a [u8],
}

/// One value of a [`Tuple`].
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Value<'a> {
    /// `n`
    Null,
    /// `u`: stored out of line and not changed, so not sent.
    UnchangedToast,
    /// `t`: the type's text form, in UTF-8.
    Text(&'a [u8]),
    /// `b`: the type's binary form.
    Binary(&'a [u8]),
}

impl std::fmt::Debug for Value<'_> {
    // Lengths only: a row's content must not reach a log.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Null => write!(f, "Null"),
            Self::UnchangedToast => write!(f, "UnchangedToast"),
            Self::Text(bytes) => write!(f, "Text({} bytes)", bytes.len()),
            Self::Binary(bytes) => write!(f, "Binary({} bytes)", bytes.len()),
        }
    }
}

/// Bytes that are no message of protocol version 1.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The message is empty.
    #[error("pgoutput message is empty")]
    Empty,
    /// No message begins with this byte.
    #[error(
        "pgoutput message begins with byte {0:#04x}, which is no message of protocol version 1"
    )]
    UnknownTag(u8),
    /// The message ends inside the field.
    #[error("pgoutput {0}: short")]
    Short(&'static str),
    /// The field's value is not one the protocol has.
    #[error("pgoutput {0}: unexpected value {1}")]
    Unexpected(&'static str, i64),
    /// The field is not UTF-8.
    #[error("pgoutput {0}: not UTF-8")]
    NotUtf8(&'static str),
    /// A name is longer, or a table has more columns, than PostgreSQL allows.
    #[error("pgoutput {0}: {1}, expected at most {2}")]
    TooMany(&'static str, usize, usize),
    /// The message goes on after its last field.
    #[error("pgoutput {0}: {1} bytes left over")]
    Leftover(&'static str, usize),
}

impl<'a> Message<'a> {
    /// Decodes one whole message.
    ///
    /// # Errors
    /// Any bytes that are not exactly one message; the error names the field.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, DecodeError> {
        let (&tag, rest) = bytes.split_first().ok_or(DecodeError::Empty)?;
        let mut r = Reader { rest };
        let (message, name) = match tag {
            b'B' => (Self::Begin(r.begin()?), "begin"),
            b'C' => (Self::Commit(r.commit()?), "commit"),
            b'O' => {
                let commit = r.lsn("origin.commit_lsn")?;
                (
                    Self::Origin {
                        commit,
                        name: r.string("origin.name")?,
                    },
                    "origin",
                )
            }
            b'R' => (Self::Relation(r.relation()?), "relation"),
            b'Y' => {
                let oid = r.u32("type.oid")?;
                let namespace = r.string("type.namespace")?;
                (
                    Self::Type {
                        oid,
                        namespace,
                        name: r.string("type.name")?,
                    },
                    "type",
                )
            }
            b'I' => (r.insert()?, "insert"),
            b'U' => (r.update()?, "update"),
            b'D' => (r.delete()?, "delete"),
            b'T' => (r.truncate()?, "truncate"),
            b'M' => (r.logical()?, "message"),
            other => return Err(DecodeError::UnknownTag(other)),
        };
        match r.rest.len() {
            0 => Ok(message),
            left => Err(DecodeError::Leftover(name, left)),
        }
    }
}

impl<'a> Tuple<'a> {
    /// How many values the row has.
    #[must_use]
    pub fn len(&self) -> usize {
        usize::from(self.count)
    }

    /// The values in the order of the relation's columns.
    pub fn values(&self) -> impl Iterator<Item = Value<'a>> + use<'a> {
        let mut r = Reader { rest: self.values };
        // The tuple was walked to its end when it was decoded, so no value can fail here.
        (0..self.count).map_while(move |_| r.value().ok())
    }
}

struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn array<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], DecodeError> {
        let (head, rest) = self
            .rest
            .split_first_chunk()
            .ok_or(DecodeError::Short(field))?;
        self.rest = rest;
        Ok(*head)
    }

    fn u8(&mut self, field: &'static str) -> Result<u8, DecodeError> {
        self.array::<1>(field).map(|[byte]| byte)
    }

    fn u16(&mut self, field: &'static str) -> Result<u16, DecodeError> {
        self.array(field).map(u16::from_be_bytes)
    }

    fn u32(&mut self, field: &'static str) -> Result<u32, DecodeError> {
        self.array(field).map(u32::from_be_bytes)
    }

    fn i32(&mut self, field: &'static str) -> Result<i32, DecodeError> {
        self.array(field).map(i32::from_be_bytes)
    }

    fn i64(&mut self, field: &'static str) -> Result<i64, DecodeError> {
        self.array(field).map(i64::from_be_bytes)
    }

    fn lsn(&mut self, field: &'static str) -> Result<Lsn, DecodeError> {
        self.array(field)
            .map(|bytes| Lsn(u64::from_be_bytes(bytes)))
    }

    fn string(&mut self, field: &'static str) -> Result<&'a str, DecodeError> {
        let end = self
            .rest
            .iter()
            .position(|&b| b == 0)
            .ok_or(DecodeError::Short(field))?;
        let (text, rest) = self.rest.split_at(end);
        self.rest = &rest[1..];
        std::str::from_utf8(text).map_err(|_| DecodeError::NotUtf8(field))
    }

    /// A name in the catalog. It is kept for as long as the connection lasts, so it may not have any length.
    fn name(&mut self, field: &'static str) -> Result<&'a str, DecodeError> {
        let name = self.string(field)?;
        match name.len() <= NAME_BYTES_MAX {
            true => Ok(name),
            false => Err(DecodeError::TooMany(field, name.len(), NAME_BYTES_MAX)),
        }
    }

    /// The prefix of a message. Any role can write one, also one that is not UTF-8 if the database has the encoding SQL_ASCII. It
    /// is no prefix of an outbox then, and must not stop the stream.
    fn prefix(&mut self) -> Result<&'a str, DecodeError> {
        match self.string("message.prefix") {
            Err(DecodeError::NotUtf8(_)) => Ok("\u{fffd}"),
            prefix => prefix,
        }
    }

    /// Bytes preceded by their length as a signed 32-bit integer.
    fn sized(&mut self, field: &'static str) -> Result<&'a [u8], DecodeError> {
        let len = self.i32(field)?;
        let len =
            usize::try_from(len).map_err(|_| DecodeError::Unexpected(field, i64::from(len)))?;
        let (bytes, rest) = self
            .rest
            .split_at_checked(len)
            .ok_or(DecodeError::Short(field))?;
        self.rest = rest;
        Ok(bytes)
    }

    fn begin(&mut self) -> Result<Begin, DecodeError> {
        Ok(Begin {
            commit: self.lsn("begin.final_lsn")?,
            time_micros: self.i64("begin.commit_time")?,
            xid: self.u32("begin.xid")?,
        })
    }

    fn commit(&mut self) -> Result<Commit, DecodeError> {
        match self.u8("commit.flags")? {
            0 => {}
            flags => return Err(DecodeError::Unexpected("commit.flags", i64::from(flags))),
        }
        Ok(Commit {
            commit: self.lsn("commit.commit_lsn")?,
            end: self.lsn("commit.end_lsn")?,
            time_micros: self.i64("commit.commit_time")?,
        })
    }

    fn relation(&mut self) -> Result<Relation<'a>, DecodeError> {
        let oid = self.u32("relation.oid")?;
        let namespace = self.name("relation.namespace")?;
        let name = self.name("relation.name")?;
        let replica_identity = self.u8("relation.replica_identity")?;
        let count = usize::from(self.u16("relation.columns")?);
        if count > COLUMNS_MAX {
            return Err(DecodeError::TooMany("relation.columns", count, COLUMNS_MAX));
        }
        let mut columns = Vec::new();
        for _ in 0..count {
            columns.push(Column {
                key: self.u8("relation.column.flags")? & 1 == 1,
                name: self.name("relation.column.name")?,
                type_oid: self.u32("relation.column.type")?,
                type_modifier: self.i32("relation.column.type_modifier")?,
            });
        }
        Ok(Relation {
            oid,
            namespace,
            name,
            replica_identity,
            columns,
        })
    }

    fn insert(&mut self) -> Result<Message<'a>, DecodeError> {
        let relation = self.u32("insert.relation")?;
        self.new_tuple_tag("insert.new")?;
        Ok(Message::Insert {
            relation,
            new: self.tuple("insert.new")?,
        })
    }

    fn update(&mut self) -> Result<Message<'a>, DecodeError> {
        let relation = self.u32("update.relation")?;
        let old = match self.rest.first() {
            Some(b'K' | b'O') => Some(self.old_tuple("update.old")?),
            _ => None,
        };
        self.new_tuple_tag("update.new")?;
        Ok(Message::Update {
            relation,
            old,
            new: self.tuple("update.new")?,
        })
    }

    fn delete(&mut self) -> Result<Message<'a>, DecodeError> {
        let relation = self.u32("delete.relation")?;
        Ok(Message::Delete {
            relation,
            old: self.old_tuple("delete.old")?,
        })
    }

    fn truncate(&mut self) -> Result<Message<'a>, DecodeError> {
        let count = self.i32("truncate.relations")?;
        if count < 0 {
            return Err(DecodeError::Unexpected(
                "truncate.relations",
                i64::from(count),
            ));
        }
        let options = self.u8("truncate.options")?;
        if options > 3 {
            return Err(DecodeError::Unexpected(
                "truncate.options",
                i64::from(options),
            ));
        }
        let mut relations = Vec::new();
        for _ in 0..count {
            relations.push(self.u32("truncate.relation")?);
        }
        Ok(Message::Truncate {
            cascade: options & 1 != 0,
            restart_identity: options & 2 != 0,
            relations,
        })
    }

    fn logical(&mut self) -> Result<Message<'a>, DecodeError> {
        let transactional = match self.u8("message.flags")? {
            0 => false,
            1 => true,
            flags => return Err(DecodeError::Unexpected("message.flags", i64::from(flags))),
        };
        Ok(Message::Logical {
            transactional,
            lsn: self.lsn("message.lsn")?,
            prefix: self.prefix()?,
            content: self.sized("message.content")?,
        })
    }

    fn new_tuple_tag(&mut self, field: &'static str) -> Result<(), DecodeError> {
        match self.u8(field)? {
            b'N' => Ok(()),
            other => Err(DecodeError::Unexpected(field, i64::from(other))),
        }
    }

    fn old_tuple(&mut self, field: &'static str) -> Result<OldTuple<'a>, DecodeError> {
        match self.u8(field)? {
            b'K' => self.tuple(field).map(OldTuple::Key),
            b'O' => self.tuple(field).map(OldTuple::Full),
            other => Err(DecodeError::Unexpected(field, i64::from(other))),
        }
    }

    fn tuple(&mut self, field: &'static str) -> Result<Tuple<'a>, DecodeError> {
        let count = self.u16(field)?;
        let whole = self.rest;
        for _ in 0..count {
            self.value()?;
        }
        Ok(Tuple {
            count,
            values: &whole[..whole.len() - self.rest.len()],
        })
    }

    fn value(&mut self) -> Result<Value<'a>, DecodeError> {
        match self.u8("tuple.kind")? {
            b'n' => Ok(Value::Null),
            b'u' => Ok(Value::UnchangedToast),
            b't' => self.sized("tuple.text").map(Value::Text),
            b'b' => self.sized("tuple.binary").map(Value::Binary),
            other => Err(DecodeError::Unexpected("tuple.kind", i64::from(other))),
        }
    }
}

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
#[cfg(test)]
mod tests;
