//! The text of a timestamp column to milliseconds.

use super::columns::TimestampType;

/// Milliseconds since 1970-01-01 UTC of a value printed with `DateStyle=ISO`; `None` for what has
/// no such number (`infinity`, years before Christ).
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_postgresql_prints_is_read() {
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
