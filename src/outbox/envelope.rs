//! Version 1 of the envelope in which an event is sent as a logical decoding message.
//! `walpost.publish` (`sql/publish.sql`) writes the envelope with `pg_logical_emit_message`. This
//! module only decodes envelopes. The resulting [`Envelope`] borrows from the encoded bytes.
//!
//! | Bytes | Field | Contents |
//! |---|---|---|
//! | 1 | version | 1 |
//! | 16 | id | the UUID's bytes |
//! | 8 | created_at | signed, microseconds since 2000-01-01 00:00 UTC: the start of the transaction |
//! | 4 + n | aggregatetype | length n, then text |
//! | 4 + n | aggregateid | length n, then text |
//! | 4 + n | type | length n, then text |
//! | 4 + n | headers | length n, then a JSON object; length -1 and no bytes for null |
//! | 1 | has payload | 1, or 0 for null |
//! | the rest | payload | unchanged bytes |
//!
//! Numbers are big-endian and signed, as written by PostgreSQL's `int4send` and `int8send`. Text is
//! UTF-8, regardless of the database's encoding. The decoder accepts arbitrary bytes without
//! panicking: every length is checked before it is used, and errors name the field.

use std::io::Write as _;

use jiff::Timestamp;
use jiff::tz::Offset;
use uuid::Uuid;
use uuid::fmt::Hyphenated;

use super::columns::{COLUMNS_MAX, Mapping, MappingError, Row, TableColumn};
use super::settings::OutboxSettings;

/// Maximum length of an envelope that `walpost.publish` writes.
pub(crate) const PUBLISHED_BYTES_MAX: usize = 16 << 20;

/// The supported version of the envelope.
pub(crate) const VERSION: u8 = 1;

/// The columns of an event sent as a logical decoding message, with the same types as in the outbox
/// table that `walpost init` creates. The payload is passed on as raw bytes, so a bytea payload is
/// not decoded.
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

/// The indices in [`COLUMNS`] of the two columns whose values are binary in an envelope.
const ID: usize = 0;
const CREATED_AT: usize = 6;

impl Mapping {
    /// Binds the columns in `settings` to the columns of an event sent as a logical decoding
    /// message.
    ///
    /// # Errors
    /// Returns an error if a configured column does not exist or has an unsuitable type.
    pub fn for_messages(settings: &OutboxSettings) -> Result<Self, MappingError> {
        Self::bind_to(settings, None, &COLUMNS, &[])
    }
}

/// An event, whose fields borrow from the message's content.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Envelope<'a> {
    pub id: Uuid,
    /// The start of the event's transaction.
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

/// Buffers for the text of the values that are binary in an envelope.
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
    // Shows only the length of the payload, because payloads must not be logged.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Envelope")
            .field("created_at", &self.created_at)
            .field("payload_bytes", &self.payload.map(<[u8]>::len))
            .finish_non_exhaustive()
    }
}

/// The error returned if bytes are not an envelope of this version. The error never contains the
/// bytes.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum EnvelopeError {
    /// The content is empty.
    #[error("the content is empty; expected an envelope")]
    Empty,
    /// The envelope has an unsupported version, or the content is not an envelope.
    #[error(
        "the content begins with byte {0:#04x}; expected {VERSION:#04x}, the version of the envelope. If the message was written \
         by the walpost.publish function of a newer version of Walpost, upgrade Walpost"
    )]
    Version(u8),
    /// The content was too large to be read.
    #[error(
        "the content is {0} bytes long: more than max_row_bytes, and more than walpost.publish ever writes \
         ({PUBLISHED_BYTES_MAX})"
    )]
    Large(usize),
    /// The envelope ends before the end of the field.
    #[error("the envelope ends within field {0}")]
    Short(&'static str),
    /// The field has an invalid value.
    #[error("the envelope has an unexpected value in field {0}: {1}")]
    Unexpected(&'static str, i64),
    /// The field is not UTF-8.
    #[error("the envelope has text that is not UTF-8 in field {0}")]
    NotUtf8(&'static str),
}

impl<'a> Envelope<'a> {
    /// Decodes the content of a message.
    ///
    /// # Errors
    /// Returns an error that names the field if the bytes are not an envelope of this version.
    pub(crate) fn decode(content: &'a [u8]) -> Result<Self, EnvelopeError> {
        match content.split_first() {
            None => Err(EnvelopeError::Empty),
            Some((&VERSION, rest)) => Reader { rest }.envelope(),
            Some((&other, _)) => Err(EnvelopeError::Version(other)),
        }
    }

    /// Returns a row with the values that `mapping` needs, in PostgreSQL's text format. `mapping`
    /// must have been created by [`Mapping::for_messages`]. Does not allocate.
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

/// Formats a timestamptz in the same way as PostgreSQL with `DateStyle=ISO` and `TimeZone=UTC`.
fn print(at: Timestamp, text: &mut [u8; Texts::TIMESTAMP_LEN]) -> &[u8] {
    let local = Offset::UTC.to_datetime(at);
    let (date, time) = (local.date(), local.time());
    let mut rest = &mut text[..];
    // The text always fits, because `Reader::timestamp` accepts only four-digit years.
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

    /// Reads a time in the years 1 to 9999, which includes every result of `now()`.
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

    /// Reads bytes preceded by their length. A length of -1 means null.
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
