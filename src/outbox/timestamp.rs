//! Parses the text of timestamp columns.

use std::io::Write as _;

/// The text format of a timestamp column's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TimestampType {
    /// Milliseconds since 1970-01-01 UTC.
    Millis,
    /// The text output of a `timestamp with time zone` column.
    Zoned,
    /// The text output of a `timestamp without time zone` column, interpreted as UTC.
    Local,
}

/// Converts a value printed with `DateStyle=ISO` to milliseconds since 1970-01-01 UTC. Returns
/// `None` if the value can't be represented (`infinity`, years BC).
pub(super) fn millis(text: &[u8], kind: TimestampType) -> Option<i64> {
    let text = std::str::from_utf8(text).ok()?;
    match kind {
        TimestampType::Millis => text.parse().ok(),
        TimestampType::Zoned => text
            .parse::<jiff::Timestamp>()
            .ok()
            .map(|at| at.as_millisecond()),
        TimestampType::Local => {
            let local: jiff::civil::DateTime = text.parse().ok()?;
            let zoned = local.to_zoned(jiff::tz::TimeZone::UTC).ok()?;
            Some(zoned.timestamp().as_millisecond())
        }
    }
}

/// Converts a timestamp without time zone, interpreted as UTC, to microseconds since 1970-01-01.
pub(super) fn micros_utc(text: &str) -> Option<i64> {
    let local: jiff::civil::DateTime = text.parse().ok()?;
    let zoned = local.to_zoned(jiff::tz::TimeZone::UTC).ok()?;
    Some(zoned.timestamp().as_microsecond())
}

/// Converts a time of day, or the time part of an interval (`12:34:56.789`), to microseconds.
pub(super) fn micros_of_day(text: &str) -> Option<i64> {
    let (hours, rest) = text.split_once(':')?;
    let (minutes, seconds) = rest.split_once(':').unwrap_or((rest, "0"));
    let (seconds, fraction) = seconds.split_once('.').unwrap_or((seconds, ""));
    let number = |text: &str| text.parse::<u32>().ok().map(i64::from);
    let digits = format!("{fraction:0<6}");
    let whole = (number(hours)? * 60 + number(minutes)?) * 60 + number(seconds)?;
    Some(whole * 1_000_000 + number(digits.get(..6)?)?)
}

/// Appends a timestamp in RFC 3339 format, in UTC. Returns false if the timestamp can't be
/// represented.
pub(super) fn push_rfc3339(text: &[u8], kind: TimestampType, out: &mut Vec<u8>) -> bool {
    let Ok(text) = std::str::from_utf8(text) else {
        return false;
    };
    let at = match kind {
        TimestampType::Millis => return false,
        TimestampType::Zoned => text.parse::<jiff::Timestamp>().ok(),
        TimestampType::Local => {
            micros_utc(text).and_then(|micros| jiff::Timestamp::from_microsecond(micros).ok())
        }
    };
    at.is_some_and(|at| write!(out, "{at}").is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_timestamps_as_printed_by_postgresql() {
        let check = |text: &str, kind, expected| {
            assert_eq!(millis(text.as_bytes(), kind), expected, "{text}");
        };
        check("1970-01-01 00:00:01.5+00", TimestampType::Zoned, Some(1500));
        check("1970-01-01 05:30:00+05:30", TimestampType::Zoned, Some(0));
        check(
            "2026-11-21 09:05:00.123456+00",
            TimestampType::Zoned,
            Some(1_795_251_900_123),
        );
        check("1970-01-01 00:00:01.5", TimestampType::Local, Some(1500));
        check(
            "1700000000000",
            TimestampType::Millis,
            Some(1_700_000_000_000),
        );
        check("infinity", TimestampType::Zoned, None);
        check("0044-03-15 00:00:00+00 BC", TimestampType::Zoned, None);
        check("", TimestampType::Millis, None);
    }
}
