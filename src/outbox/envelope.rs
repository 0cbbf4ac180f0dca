//! The envelope of an event in a message, version 1: what `walpost.publish` (`sql/publish.sql`) writes
//! with `pg_logical_emit_message`. Pure: bytes to an [`Envelope`] that borrows from them.
//!
//! | Bytes | Field | Contents |
//! |---|---|---|
//! | 1 | version | 1 |
//! | 16 | id | the UUID's bytes |
//! | 8 | created_at | signed, microseconds since 2000-01-01 00:00 UTC: the start of the transaction |
//! | 4 + n | aggregatetype | length n, then text |
//! | 4 + n | aggregateid | length n, then text |
//! | 4 + n | type | length n, then text |
//! | 4 + n | headers | length n, then a JSON object; length -1 and nothing is null |
//! | 1 | payload is there | 1, or 0 for null |
//! | the rest | payload | as it is |
//!
//! Numbers are big-endian and signed, as PostgreSQL's `int4send` and `int8send` write them; text is
//! UTF-8, whatever the database's encoding. The decoder is total: every length is checked before it
//! is used, and an error names the field it is about.

use std::io::Write as _;

use jiff::Timestamp;
use jiff::tz::Offset;
use uuid::Uuid;
use uuid::fmt::Hyphenated;

use super::columns::{COLUMNS_MAX, Mapping, MappingError, Row, TableColumn};
use super::settings::OutboxSettings;

/// The longest envelope that `walpost.publish` writes.
pub(crate) const PUBLISHED_MAX: usize = 16 << 20;

/// The version of the envelope that is read.
pub(crate) const VERSION: u8 = 1;

/// The columns that an event in a message has, with the types of the outbox table that `init` makes.
/// A payload stands as the bytes it is, so that a bytea one needs no decoding.
pub(crate) const COLUMNS: [TableColumn<'static>; 7] = [
    column("id", 2950),
    column("aggregatetype", 25),
    column("aggregateid", 25),
    column("type", 25),
    column("payload", 3802),
    column("headers", 3802),
    column("created_at", 1184),
];

const fn column(name: &'static str, type_oid: u32) -> TableColumn<'static> {
    TableColumn { name, type_oid }
}

/// Where in [`COLUMNS`] the two are that an envelope has in binary form.
const ID: usize = 0;
const CREATED_AT: usize = 6;

impl Mapping {
    /// Finds the columns that `settings` names among those of an event in a message.
    ///
    /// # Errors
    /// A named column is missing or of a type that can't serve.
    pub fn of_messages(settings: &OutboxSettings) -> Result<Self, MappingError> {
        Self::bind_to(settings, None, &COLUMNS, &[])
    }
}

/// One event, borrowed from the message's content.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Envelope<'a> {
    /// The event's id.
    pub id: Uuid,
    /// When its transaction started.
    pub created_at: Timestamp,
    /// The column `aggregatetype`.
    pub aggregatetype: &'a str,
    /// The column `aggregateid`.
    pub aggregateid: &'a str,
    /// The column `type`.
    pub kind: &'a str,
    /// The column `headers`.
    pub headers: Option<&'a [u8]>,
    /// The column `payload`.
    pub payload: Option<&'a [u8]>,
}

/// Room for the texts of the values that an envelope has in binary form.
#[derive(Debug)]
pub(crate) struct Texts {
    id: [u8; Hyphenated::LENGTH],
    created_at: [u8; Self::TIMESTAMP_LEN],
}

impl Texts {
    const TIMESTAMP_LEN: usize = "2026-11-21 09:05:00.123456+00".len();
}

impl Default for Texts {
    fn default() -> Self {
        Self {
            id: [0; Hyphenated::LENGTH],
            created_at: [0; Self::TIMESTAMP_LEN],
        }
    }
}

impl std::fmt::Debug for Envelope<'_> {
    // Lengths only: a payload must not reach a log.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Envelope")
            .field("created_at", &self.created_at)
            .field("payload_bytes", &self.payload.map(<[u8]>::len))
            .finish_non_exhaustive()
    }
}

/// Bytes that are no envelope of this version. Never holds what they say.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum EnvelopeError {
    /// Nothing at all.
    #[error("it is empty, and an envelope was expected")]
    Empty,
    /// Another version, or something else altogether.
    #[error(
        "it begins with byte {0:#04x}, and {VERSION:#04x}, the version of the envelope, was expected. \
         If walpost.publish of a newer Walpost wrote it, run that Walpost"
    )]
    Version(u8),
    /// It was not read at all.
    #[error(
        "it has {0} bytes: more than max_row_bytes, and more than the {PUBLISHED_MAX} that walpost.publish writes at most"
    )]
    Large(usize),
    /// The envelope ends inside the field.
    #[error("its envelope ends inside {0}")]
    Short(&'static str),
    /// The field's value is not one it can have.
    #[error("its envelope has an unexpected value in {0}: {1}")]
    Unexpected(&'static str, i64),
    /// The field is not UTF-8.
    #[error("its envelope has text that is not UTF-8 in {0}")]
    NotUtf8(&'static str),
}

impl<'a> Envelope<'a> {
    /// Decodes the content of one message.
    ///
    /// # Errors
    /// Any bytes that are not an envelope of this version; the error names the field.
    pub(crate) fn decode(content: &'a [u8]) -> Result<Self, EnvelopeError> {
        match content.split_first() {
            None => Err(EnvelopeError::Empty),
            Some((&VERSION, rest)) => Reader { rest }.envelope(),
            Some((&other, _)) => Err(EnvelopeError::Version(other)),
        }
    }

    /// Puts the values that `mapping`, made by [`Mapping::of_messages`], needs into their slots, as
    /// PostgreSQL would print them. Allocates nothing.
    #[must_use]
    pub(crate) fn row<'t>(&self, mapping: &Mapping, texts: &'t mut Texts) -> Row<'t>
    where
        'a: 't,
    {
        let mut row = [None; COLUMNS_MAX];
        let values = [
            None,
            Some(self.aggregatetype.as_bytes()),
            Some(self.aggregateid.as_bytes()),
            Some(self.kind.as_bytes()),
            self.payload,
            self.headers,
            None,
        ];
        for (index, value) in values.into_iter().enumerate() {
            if let Some(slot) = mapping.slot(index) {
                row[slot] = value;
            }
        }
        if let Some(slot) = mapping.slot(ID) {
            row[slot] = Some(self.id.hyphenated().encode_lower(&mut texts.id).as_bytes());
        }
        if let Some(slot) = mapping.slot(CREATED_AT) {
            row[slot] = Some(print(self.created_at, &mut texts.created_at));
        }
        row
    }
}

/// The form of timestamptz with `DateStyle=ISO` and `TimeZone=UTC`.
fn print(at: Timestamp, text: &mut [u8; Texts::TIMESTAMP_LEN]) -> &[u8] {
    let local = Offset::UTC.to_datetime(at);
    let (date, time) = (local.date(), local.time());
    let mut rest = &mut text[..];
    // It fits: years have four digits, as `Reader::timestamp` sees to.
    let _ = write!(
        rest,
        "{:04}-{:02}-{:02} {:02}:{:02}:{:02}",
        date.year(),
        date.month(),
        date.day(),
        time.hour(),
        time.minute(),
        time.second()
    );
    let (mut fraction, mut digits) = (time.subsec_nanosecond() / 1000, 6);
    while fraction != 0 && fraction % 10 == 0 {
        (fraction, digits) = (fraction / 10, digits - 1);
    }
    if fraction != 0 {
        let _ = write!(rest, ".{fraction:0digits$}");
    }
    let _ = rest.write(b"+00");
    let left = rest.len();
    &text[..Texts::TIMESTAMP_LEN - left]
}

struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn envelope(mut self) -> Result<Envelope<'a>, EnvelopeError> {
        Ok(Envelope {
            id: Uuid::from_bytes(self.array("id")?),
            created_at: self.timestamp("created_at")?,
            aggregatetype: self.text("aggregatetype")?,
            aggregateid: self.text("aggregateid")?,
            kind: self.text("type")?,
            headers: self.nullable("headers")?,
            payload: self.payload()?,
        })
    }

    fn array<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], EnvelopeError> {
        let (head, rest) = self
            .rest
            .split_first_chunk()
            .ok_or(EnvelopeError::Short(field))?;
        self.rest = rest;
        Ok(*head)
    }

    /// A time of the years 1 to 9999: any that `now()` gives.
    fn timestamp(&mut self, field: &'static str) -> Result<Timestamp, EnvelopeError> {
        const FROM_1970: i64 = 946_684_800_000_000;
        const YEAR_1: i64 = -62_135_596_800_000_000;
        let micros = i64::from_be_bytes(self.array(field)?);
        micros
            .checked_add(FROM_1970)
            .filter(|&micros| micros >= YEAR_1)
            .and_then(|micros| Timestamp::from_microsecond(micros).ok())
            .ok_or(EnvelopeError::Unexpected(field, micros))
    }

    fn text(&mut self, field: &'static str) -> Result<&'a str, EnvelopeError> {
        let bytes = self
            .nullable(field)?
            .ok_or(EnvelopeError::Unexpected(field, -1))?;
        std::str::from_utf8(bytes).map_err(|_| EnvelopeError::NotUtf8(field))
    }

    /// Bytes preceded by their length, or -1.
    fn nullable(&mut self, field: &'static str) -> Result<Option<&'a [u8]>, EnvelopeError> {
        let len = i32::from_be_bytes(self.array(field)?);
        if len == -1 {
            return Ok(None);
        }
        let len =
            usize::try_from(len).map_err(|_| EnvelopeError::Unexpected(field, i64::from(len)))?;
        let (bytes, rest) = self
            .rest
            .split_at_checked(len)
            .ok_or(EnvelopeError::Short(field))?;
        self.rest = rest;
        Ok(Some(bytes))
    }

    fn payload(mut self) -> Result<Option<&'a [u8]>, EnvelopeError> {
        match self.array("payload")? {
            [1] => Ok(Some(self.rest)),
            [0] if self.rest.is_empty() => Ok(None),
            [0] => Err(EnvelopeError::Unexpected("payload", 0)),
            [flag] => Err(EnvelopeError::Unexpected("payload", i64::from(flag))),
        }
    }
}

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
#[cfg(test)]
mod tests;
