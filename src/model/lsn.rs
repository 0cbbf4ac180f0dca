//! Log sequence numbers and the positions of rows.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A location in the WAL, as a byte offset from the start of the WAL.
///
/// Printed and parsed as PostgreSQL's `pg_lsn`: two hexadecimal halves of at most eight digits,
/// separated by a slash (PostgreSQL 18, "8.20. pg_lsn Type").
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lsn(pub u64);

impl Lsn {
    /// The invalid LSN `0/0`, which PostgreSQL never assigns to a WAL record.
    pub const ZERO: Self = Self(0);

    /// Returns the number of bytes of WAL from `earlier` to this LSN, or zero if this LSN precedes
    /// `earlier`.
    #[must_use]
    pub fn bytes_since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

impl fmt::Display for Lsn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:X}/{:X}", self.0 >> 32, self.0 & 0xFFFF_FFFF)
    }
}

/// The error returned if text is not a valid LSN.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not an LSN: expected two hexadecimal numbers separated by a slash, like 16/B374D848"
)]
pub struct ParseLsnError(String);

impl FromStr for Lsn {
    type Err = ParseLsnError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let half = |digits: &str| {
            let plain = !digits.is_empty()
                && digits.len() <= 8
                && digits.bytes().all(|b| b.is_ascii_hexdigit());
            plain
                .then(|| u64::from_str_radix(digits, 16).ok())
                .flatten()
        };
        text.split_once('/')
            .and_then(|(high, low)| Some(Self(half(high)? << 32 | half(low)?)))
            .ok_or_else(|| ParseLsnError(text.to_owned()))
    }
}

impl Serialize for Lsn {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Lsn {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Cow::<str>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// The position of an event's row in the WAL: the commit LSN of the transaction, and the row's index among the row
/// messages of that transaction.
///
/// Printed as `00000000/016B3748:0000000002`. The width is fixed, so that the text sorts in the same order as the positions.
/// The part before the colon can be cast to `pg_lsn`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position {
    /// The LSN of the transaction's commit record.
    pub commit: Lsn,
    /// The zero-based index of the row among all row messages of the transaction.
    pub index: u64,
}

impl Position {
    /// The length of the printed form in bytes.
    pub const TEXT_LEN: usize = 28;

    /// Returns whether the row was copied from the table. The LSN of a copied row is not a multiple of eight, so it
    /// can't be the start of a WAL record.
    #[must_use]
    pub fn is_copied(self) -> bool {
        self.commit.0 % 8 == 7
    }

    /// Returns this position with the commit LSN of `other` if both positions belong to rows copied
    /// from the table. Otherwise, returns this position unchanged. Each copy has its own consistent
    /// point, so positions from different copies can only be compared after this conversion.
    #[must_use]
    pub fn in_copy_of(self, other: Self) -> Self {
        let commit = match self.is_copied() && other.is_copied() {
            true => other.commit,
            false => self.commit,
        };
        Self { commit, ..self }
    }

    /// Returns the position as text, without allocating memory.
    #[must_use]
    pub fn text(self) -> [u8; Self::TEXT_LEN] {
        let mut out = *b"00000000/00000000:0000000000";
        digits::<16>(&mut out[..8], self.commit.0 >> 32);
        digits::<16>(&mut out[9..17], self.commit.0 & 0xFFFF_FFFF);
        digits::<10>(&mut out[18..], self.index);
        out
    }
}

/// Writes a number right-aligned into a field filled with zeros. Stops after the most significant digit, because most
/// numbers are short.
#[expect(clippy::cast_possible_truncation, reason = "a digit is less than BASE")]
fn digits<const BASE: u64>(field: &mut [u8], mut number: u64) {
    const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
    for byte in field.iter_mut().rev() {
        if number == 0 {
            break;
        }
        *byte = DIGITS[(number % BASE) as usize];
        number /= BASE;
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for byte in self.text() {
            write!(f, "{}", char::from(byte))?;
        }
        Ok(())
    }
}

impl Serialize for Position {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Position {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Cow::<str>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// The error returned if text is not a valid position.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a position: expected a position like 00000000/016B3748:0000000002, as in the header walpost-position"
)]
pub struct ParsePositionError(String);

impl FromStr for Position {
    type Err = ParsePositionError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let read = || {
            let (commit, index) = text.split_once(':')?;
            let is_number = !index.is_empty() && index.bytes().all(|b| b.is_ascii_digit());
            Some(Self {
                commit: commit.parse().ok()?,
                index: is_number.then(|| index.parse().ok()).flatten()?,
            })
        };
        read().ok_or_else(|| ParsePositionError(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_and_parses_lsns_like_the_pg_lsn_type() {
        for (lsn, text) in [
            (Lsn(0), "0/0"),
            (Lsn(0x16_B374_D848), "16/B374D848"),
            (Lsn(u64::MAX), "FFFFFFFF/FFFFFFFF"),
        ] {
            assert_eq!(lsn.to_string(), text);
            assert_eq!(text.parse(), Ok(lsn));
        }
        assert_eq!("00000000/016B3748".parse(), Ok(Lsn(0x016B_3748)));
    }

    #[test]
    fn rejects_invalid_lsns() {
        for text in [
            "",
            "/",
            "1",
            "1/",
            "/1",
            "1/2/3",
            "+1/2",
            "1/ 2",
            "123456789/0",
            "g/0",
            "0/é",
        ] {
            assert!(text.parse::<Lsn>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn maps_the_position_of_a_copied_row_to_a_later_copy_of_the_table() {
        let position = |commit, index| Position {
            commit: Lsn(commit),
            index,
        };
        let (earlier, later) = (position(0x1ff, 3), position(0x2ff, 5));
        assert_eq!(earlier.in_copy_of(later), position(0x2ff, 3));
        let streamed = position(0x300, 5);
        assert_eq!(earlier.in_copy_of(streamed), earlier);
        assert_eq!(streamed.in_copy_of(earlier), streamed);
    }

    #[test]
    fn positions_sort_in_the_same_order_as_their_text() {
        let position = |commit, index| Position {
            commit: Lsn(commit),
            index,
        };
        let ordered = [
            position(0, 0),
            position(0, 9),
            position(0, 10),
            position(1, 0),
            position(0xFFFF_FFFF, 3),
            position(0x1_0000_0000, 0),
            position(u64::MAX, 9_999_999_999),
        ];
        for pair in ordered.windows(2) {
            assert!(pair[0] < pair[1]);
            assert!(pair[0].text() < pair[1].text());
        }
        for position in ordered {
            assert_eq!(position.to_string().parse(), Ok(position));
        }
        for text in [
            "",
            "0/1",
            "0/1:",
            "0/1:x",
            "0/1:+1",
            "0/1:1:1",
            ":1",
            "0/1:99999999999999999999",
        ] {
            assert!(text.parse::<Position>().is_err(), "{text:?}");
        }
        assert_eq!(
            position(0x016B_3748, 2).to_string(),
            "00000000/016B3748:0000000002"
        );
    }
}
