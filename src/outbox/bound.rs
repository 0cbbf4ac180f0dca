//! Templates and columns that have been bound to a table, that is, resolved to the locations of
//! their values in a row. This module also expands templates for a row.

use std::ops::Range;

use super::route_error::RouteError;
use super::timestamp::{self, TimestampType};

/// Maximum number of distinct columns in the settings of one pipeline.
///
/// The values of a row are stored in an array of this size on the stack, so that routing a row does
/// not allocate.
pub const COLUMNS_MAX: usize = 32;

/// The values of those columns of a row that the settings refer to. Each column's index in this
/// array is assigned when the settings are bound to a table. `None` represents null.
pub type Row<'a> = [Option<&'a [u8]>; COLUMNS_MAX];

/// The location of a column's value in a [`Row`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Source {
    pub(super) slot: u8,
    /// Whether the value is a bytea, whose text form is hexadecimal.
    pub(super) bytea: bool,
}

impl Source {
    pub(super) fn value_in<'a>(self, row: &Row<'a>) -> Option<&'a [u8]> {
        row[usize::from(self.slot)]
    }
}

/// A template in which the names of columns have been replaced with the indices of their values in
/// a [`Row`].
#[derive(Debug)]
pub(super) struct Bound {
    pub(super) pieces: Vec<Piece>,
}

#[derive(Debug)]
pub(super) enum Piece {
    Literal(Box<[u8]>),
    Column(Source),
    /// A time, written in RFC 3339 format.
    Time(Source, TimestampType),
}

/// The result of expanding a template: its range in the scratch space, the number of columns in the
/// template, and the number of these columns that are null.
pub(super) struct Appended {
    span: Range<usize>,
    columns: usize,
    nulls: usize,
}

impl Appended {
    /// Returns the text, or `None` if one of the columns is null.
    pub(super) fn without_nulls(self) -> Option<Range<usize>> {
        (self.nulls == 0).then_some(self.span)
    }

    /// Returns the text, or `None` if the template contains columns and all of them are null.
    pub(super) fn or_null(self) -> Option<Range<usize>> {
        (self.columns == 0 || self.nulls < self.columns).then_some(self.span)
    }
}

/// Appends the expansion of a template to `scratch`. Null columns are omitted.
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
                match source.value_in(row) {
                    None => nulls += 1,
                    Some(text) if source.bytea => {
                        append_bytea(text, scratch)?;
                    }
                    Some(text) => scratch.extend_from_slice(text),
                }
            }
            Piece::Time(source, kind) => {
                columns += 1;
                match source.value_in(row) {
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

/// Appends the bytes that a bytea value's text form (`\x` and hexadecimal digits) represents.
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

/// Decodes hexadecimal digits into the start of `room` and returns the decoded bytes. Returns
/// `None` if a character is not a hexadecimal digit, if the number of digits is odd, or if `room`
/// is too small.
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
