//! Values with units.

use std::time::Duration;

/// A number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes(pub u64);

/// Reads a size: bytes, or a number with a unit (`16MiB`, `900kB`).
///
/// # Errors
/// It is no size; the message says what was expected.
pub fn bytes(text: &str) -> Result<Bytes, String> {
    text.parse::<bytesize::ByteSize>()
        .map(|size| Bytes(size.as_u64()))
        .map_err(|_| {
            format!("{text:?} is not a size: expected bytes, or a number with a unit, like 16MiB")
        })
}

/// Reads a duration with a unit (`30s`, `500ms`, `1m30s`).
///
/// # Errors
/// It is no duration; the message says what was expected.
pub fn duration(text: &str) -> Result<Duration, String> {
    text.parse::<jiff::SignedDuration>()
        .ok()
        .and_then(|duration| duration.try_into().ok())
        .ok_or_else(|| {
            format!("{text:?} is not a duration: expected a number with a unit, like 30s or 500ms")
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units_or_are_bytes() {
        assert_eq!(bytes("1000"), Ok(Bytes(1000)));
        assert_eq!(bytes("16MiB"), Ok(Bytes(16 << 20)));
        assert_eq!(bytes("900kB"), Ok(Bytes(900_000)));
        for text in ["", "MiB", "-1", "16 potatoes"] {
            assert!(bytes(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn durations_have_units() {
        assert_eq!(duration("30s"), Ok(Duration::from_secs(30)));
        assert_eq!(duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(duration("1m 30s"), Ok(Duration::from_secs(90)));
        for text in ["", "30", "-1s", "soon"] {
            assert!(duration(text).is_err(), "{text:?}");
        }
    }
}
