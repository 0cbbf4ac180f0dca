//! Templates and columns bound to the places of their values in a row, and what a row's values give.

use std::ops::Range;

use super::route_error::RouteError;
use super::timestamp::{self, TimestampType};

/// How many different columns one pipeline's settings can name.
///
/// A row's values are laid out in an array of this size on the stack, so that routing a row
/// allocates nothing.
pub const COLUMNS_MAX: usize = 32;

/// The values of the columns that the settings name, by slot; `None` is null.
pub type Row<'a> = [Option<&'a [u8]>; COLUMNS_MAX];

/// Where a value comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Source {
    pub(super) slot: u8,
    /// The text form is hexadecimal and stands for bytes.
    pub(super) bytea: bool,
}

impl Source {
    pub(super) fn of<'a>(self, row: &Row<'a>) -> Option<&'a [u8]> {
        row[usize::from(self.slot)]
    }
}

/// A template whose columns have become slots.
#[derive(Debug)]
pub(super) struct Bound {
    pub(super) pieces: Vec<Piece>,
}

#[derive(Debug)]
pub(super) enum Piece {
    Literal(Box<[u8]>),
    Column(Source),
    /// Written as RFC 3339 has it.
    Time(Source, TimestampType),
}

/// What a template gave, at the end of the scratch space.
pub(super) struct Appended {
    span: Range<usize>,
    columns: usize,
    nulls: usize,
}

impl Appended {
    /// Nothing where one of its columns is null.
    pub(super) fn without_nulls(self) -> Option<Range<usize>> {
        (self.nulls == 0).then_some(self.span)
    }

    /// Nothing where there are columns and all of them are null.
    pub(super) fn or_null(self) -> Option<Range<usize>> {
        (self.columns == 0 || self.nulls < self.columns).then_some(self.span)
    }
}

/// Renders a template at the end of `scratch`; a null column adds nothing to the text.
pub(super) fn append(
    template: &Bound,
    row: &Row<'_>,
    scratch: &mut Vec<u8>,
) -> Result<Appended, RouteError> {
    let start = scratch.len();
    let (mut columns, mut nulls) = (0, 0);
    for piece in &template.pieces {
        match piece {
            Piece::Literal(bytes) => scratch.extend_from_slice(bytes),
            Piece::Column(source) => {
                columns += 1;
                match source.of(row) {
                    None => nulls += 1,
                    Some(text) if source.bytea => {
                        append_bytea(text, scratch)?;
                    }
                    Some(text) => scratch.extend_from_slice(text),
                }
            }
            Piece::Time(source, kind) => {
                columns += 1;
                match source.of(row) {
                    None => nulls += 1,
                    Some(text) => append_time(text, *kind, scratch)?,
                }
            }
        }
    }
    Ok(Appended {
        span: start..scratch.len(),
        columns,
        nulls,
    })
}

#[inline(never)]
fn append_time(text: &[u8], kind: TimestampType, scratch: &mut Vec<u8>) -> Result<(), RouteError> {
    match timestamp::push_rfc3339(text, kind, scratch) {
        true => Ok(()),
        false => Err(RouteError::time(text)),
    }
}

/// The bytes that a bytea value's text form (`\x` and hexadecimal digits) stands for.
pub(super) fn append_bytea(text: &[u8], scratch: &mut Vec<u8>) -> Result<Range<usize>, RouteError> {
    let start = scratch.len();
    let (pairs, odd) = text
        .strip_prefix(b"\\x")
        .ok_or(RouteError::Bytea)?
        .as_chunks::<2>();
    if !odd.is_empty() {
        return Err(RouteError::Bytea);
    }
    scratch.reserve(pairs.len());
    for &[high, low] in pairs {
        let (Some(high), Some(low)) = (hex_digit(high), hex_digit(low)) else {
            return Err(RouteError::Bytea);
        };
        scratch.push(high << 4 | low);
    }
    Ok(start..scratch.len())
}

/// The bytes that hexadecimal digits stand for, in the room for them; nothing where they are none.
pub(super) fn bytes_of_hex<'b>(digits: &[u8], room: &'b mut [u8]) -> Option<&'b [u8]> {
    let (pairs, odd) = digits.as_chunks::<2>();
    let room = room.get_mut(..pairs.len()).filter(|_| odd.is_empty())?;
    for (byte, &[high, low]) in room.iter_mut().zip(pairs) {
        *byte = hex_digit(high)? << 4 | hex_digit(low)?;
    }
    Some(room)
}

fn hex_digit(byte: u8) -> Option<u8> {
    match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        b'A'..=b'F' => Some(byte - b'A' + 10),
        _ => None,
    }
}
