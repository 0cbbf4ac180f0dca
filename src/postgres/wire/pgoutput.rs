//! Decoder for version 1 of the `pgoutput` protocol. Decoded messages borrow from the read buffer.
//!
//! PostgreSQL 18, "54.9. Logical Replication Message Formats". The decoder never panics, regardless
//! of its input: every length is checked before it is used, trailing bytes are rejected, and errors
//! name the field.

use crate::model::lsn::Lsn;

/// Maximum length of a name. This is much more than NAMEDATALEN, which is 64 unless PostgreSQL was
/// compiled with a different value.
const NAME_BYTES_MAX: usize = 1024;
/// `MaxTupleAttributeNumber` of PostgreSQL.
const COLUMNS_MAX: usize = 1664;

/// A message from the output plugin.
#[derive(Debug, PartialEq, Eq)]
pub enum Message<'a> {
    /// A transaction begins. All messages up to [`Message::Commit`] belong to it.
    Begin(Begin),
    /// The current transaction is complete.
    Commit(Commit),
    /// The transaction was replicated to this server from another server.
    Origin {
        /// The LSN of the commit on the other server.
        commit: Lsn,
        /// The name of the replication origin.
        name: &'a str,
    },
    /// The structure of a table. Sent before the table's first row, and again whenever the
    /// structure has changed.
    Relation(Relation<'a>),
    /// A data type that is not built in. Sent before the first relation that uses it.
    Type {
        /// The type's OID.
        oid: u32,
        /// The type's schema; empty for `pg_catalog`.
        namespace: &'a str,
        name: &'a str,
    },
    /// A row was inserted.
    Insert {
        /// The OID of the table, as in its [`Relation`].
        relation: u32,
        /// The row.
        new: Tuple<'a>,
    },
    /// A row was updated.
    Update {
        /// The OID of the table.
        relation: u32,
        /// The old row, if the table's replica identity requires it.
        old: Option<OldTuple<'a>>,
        /// The new row.
        new: Tuple<'a>,
    },
    /// A row was deleted.
    Delete {
        /// The OID of the table.
        relation: u32,
        /// The old row.
        old: OldTuple<'a>,
    },
    /// Tables were truncated.
    Truncate {
        /// Whether `CASCADE` was specified.
        cascade: bool,
        /// Whether `RESTART IDENTITY` was specified.
        restart_identity: bool,
        /// The OIDs of the tables.
        relations: Vec<u32>,
    },
    /// `pg_logical_emit_message()` was called.
    Logical {
        /// Whether the message is part of the transaction, in which case it is discarded if the
        /// transaction is rolled back.
        transactional: bool,
        /// The LSN of the message.
        lsn: Lsn,
        /// The prefix that was passed to `pg_logical_emit_message`.
        prefix: &'a str,
        /// The content that was passed to `pg_logical_emit_message`.
        content: &'a [u8],
    },
}

/// The beginning of a [`Message::Logical`], without its content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LogicalHead<'a> {
    /// Whether the message is part of the transaction.
    pub transactional: bool,
    /// The message's prefix, and the length of its content. `None` if the available bytes do not
    /// contain both.
    pub prefix: Option<(&'a str, usize)>,
}

impl<'a> LogicalHead<'a> {
    /// Decodes the beginning of a message.
    ///
    /// # Errors
    /// Returns an error if the message is not a [`Message::Logical`].
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

/// The type of a change to a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    Insert,
    Update,
    Delete,
}

/// The beginning of a message about a row. Some of the row's values may be missing or incomplete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowHead<'a> {
    /// The type of the change.
    pub change: Change,
    /// The OID of the table.
    pub relation: u32,
    /// The beginning of the tuple.
    tuple: &'a [u8],
}

impl<'a> RowHead<'a> {
    /// Decodes the beginning of a message. Returns `None` if the message is not about a row.
    ///
    /// # Errors
    /// Returns an error if the bytes do not contain the complete OID.
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

    /// Returns the values of an inserted row, starting with the first column. Stops before the
    /// first value that is incomplete or is not text.
    pub(crate) fn texts(&self) -> Vec<&'a [u8]> {
        let mut texts = Vec::new();
        // Skip 'N' and the number of columns.
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
    /// The LSN of the commit record, which is also in [`Commit::commit`] at the end of the
    /// transaction.
    pub commit: Lsn,
    /// The time of the commit in microseconds since 2000-01-01 00:00 UTC.
    pub time_micros: i64,
    /// The transaction ID.
    pub xid: u32,
}

/// The end of a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Commit {
    /// The LSN of the commit record.
    pub commit: Lsn,
    /// The end of the commit record. This is the position to confirm once the transaction is
    /// durable in Kafka.
    pub end: Lsn,
    /// The time of the commit in microseconds since 2000-01-01 00:00 UTC.
    pub time_micros: i64,
}

/// The structure of a table.
#[derive(Debug, PartialEq, Eq)]
pub struct Relation<'a> {
    /// The OID of the table, or of the root of its partition tree if the publication publishes via
    /// the root.
    pub oid: u32,
    /// The table's schema; empty for `pg_catalog`.
    pub namespace: &'a str,
    pub name: &'a str,
    /// `pg_class.relreplident`.
    pub replica_identity: u8,
    /// The table's columns, in the order of the values in a [`Tuple`].
    pub columns: Vec<Column<'a>>,
}

/// A column of a [`Relation`].
#[derive(Debug, PartialEq, Eq)]
pub struct Column<'a> {
    /// Whether the column is part of the replica identity.
    pub key: bool,
    pub name: &'a str,
    pub type_oid: u32,
    /// `pg_attribute.atttypmod`.
    pub type_modifier: i32,
}

/// The row as it was before an update or delete.
#[derive(Debug, PartialEq, Eq)]
pub enum OldTuple<'a> {
    /// `K`: only the columns of the replica identity.
    Key(Tuple<'a>),
    /// `O`: all columns.
    Full(Tuple<'a>),
}

/// The values of a row. They were validated when the message was decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuple<'a> {
    count: u16,
    values: &'a [u8],
}

/// One value of a [`Tuple`].
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Value<'a> {
    /// `n`: null.
    Null,
    /// `u`: a value that is stored out of line (TOASTed) and did not change, so it is not sent.
    UnchangedToast,
    /// `t`: a value in its type's text format, usually UTF-8.
    Text(&'a [u8]),
    /// `b`: a value in its type's binary format.
    Binary(&'a [u8]),
}

impl std::fmt::Debug for Value<'_> {
    // Prints only lengths, because the contents of rows must not be logged.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Null => write!(f, "Null"),
            Self::UnchangedToast => write!(f, "UnchangedToast"),
            Self::Text(bytes) => write!(f, "Text({} bytes)", bytes.len()),
            Self::Binary(bytes) => write!(f, "Binary({} bytes)", bytes.len()),
        }
    }
}

/// The reason why bytes are not a message of protocol version 1.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The message is empty.
    #[error("pgoutput message is empty")]
    Empty,
    /// No message starts with this byte.
    #[error(
        "pgoutput message begins with byte {0:#04x}, which is not a message type of protocol version 1"
    )]
    UnknownTag(u8),
    /// The message ends inside the field.
    #[error("pgoutput {0}: short")]
    Short(&'static str),
    /// The protocol does not allow this value in the field.
    #[error("pgoutput {0}: unexpected value {1}")]
    Unexpected(&'static str, i64),
    /// The field is not UTF-8.
    #[error("pgoutput {0}: not UTF-8")]
    NotUtf8(&'static str),
    /// A name is longer, or a table has more columns, than PostgreSQL allows.
    #[error("pgoutput {0}: length {1}, expected at most {2}")]
    TooMany(&'static str, usize, usize),
    /// The message continues after its last field.
    #[error("pgoutput {0}: {1} unexpected bytes at the end")]
    Leftover(&'static str, usize),
}

impl<'a> Message<'a> {
    /// Decodes one complete message.
    ///
    /// # Errors
    /// Returns an error that names the field if the bytes are not exactly one message.
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
    /// Returns the number of values in the row.
    #[must_use]
    pub fn len(&self) -> usize {
        usize::from(self.count)
    }

    /// Returns the values, in the order of the relation's columns.
    pub fn values(&self) -> impl Iterator<Item = Value<'a>> + use<'a> {
        let mut r = Reader { rest: self.values };
        // All values were already decoded once when the tuple was decoded, so decoding can't fail
        // here.
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

    /// Reads the name of a catalog object. The length is limited, because names are kept in memory
    /// for the lifetime of the connection.
    fn name(&mut self, field: &'static str) -> Result<&'a str, DecodeError> {
        let name = self.string(field)?;
        match name.len() <= NAME_BYTES_MAX {
            true => Ok(name),
            false => Err(DecodeError::TooMany(field, name.len(), NAME_BYTES_MAX)),
        }
    }

    /// Reads the prefix of a logical decoding message. Any role can write messages, and in a
    /// database with the encoding SQL_ASCII, the prefix may be invalid UTF-8. Such a message can't
    /// belong to an outbox, and must not stop the stream.
    fn prefix(&mut self) -> Result<&'a str, DecodeError> {
        match self.string("message.prefix") {
            Err(DecodeError::NotUtf8(_)) => Ok("\u{fffd}"),
            prefix => prefix,
        }
    }

    /// Reads bytes that are preceded by their length, which is a signed 32-bit integer.
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
