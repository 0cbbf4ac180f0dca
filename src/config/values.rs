//! Parses sizes, durations and times, and defines the key names that several modules use.

use std::time::Duration;

/// Keys whose values are programs to run.
pub(super) const PASSWORD_COMMAND: &str = "password_command";
pub(super) const TOKEN_COMMAND: &str = "kafka_token_command";

/// The prefix of environment variables that set librdkafka properties.
pub(super) const KAFKA_VARIABLE_PREFIX: &str = "WALPOST_KAFKA_";

/// Returns the name of the environment variable that sets a librdkafka property.
pub(super) fn variable_for(property: &str) -> String {
    let name = property.to_uppercase().replace('.', "_");
    format!("{KAFKA_VARIABLE_PREFIX}{name}")
}

/// A number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bytes(pub u64);

/// Parses a size: a number of bytes, or a number with a unit (`16MiB`, `900kB`).
///
/// # Errors
/// Returns an error that describes the expected format.
pub(crate) fn parse_size(text: &str) -> Result<Bytes, String> {
    text.parse::<bytesize::ByteSize>()
        .map(|size| Bytes(size.as_u64()))
        .map_err(|_| {
            format!("{text:?} is not a size: expected bytes, or a number with a unit, like 16MiB")
        })
}

/// Parses a duration with a unit (`500ms`, `30s`, `1m30s`, `7d`, `2 weeks`). A day has 24 hours.
///
/// # Errors
/// Returns an error that describes the expected format if the text is not a duration, or if it
/// contains a unit whose length varies, such as a month.
pub(crate) fn parse_duration(text: &str) -> Result<Duration, String> {
    text.parse::<jiff::Span>()
        .and_then(|span| span.to_duration(jiff::SpanRelativeTo::days_are_24_hours()))
        .ok()
        .and_then(|duration| duration.try_into().ok())
        .ok_or_else(|| {
            format!(
                "{text:?} is not a duration: expected a number with a unit, like 500ms, 30s, 12h or 7d"
            )
        })
}

/// Parses a time with an offset from UTC (`2026-11-21T09:05:00Z`), a date with an optional time in
/// UTC (`2026-11-21`, `2026-11-21 09:05`), or a time before `now`, given as a duration (`24h`).
///
/// # Errors
/// Returns an error that describes the expected formats.
pub(crate) fn parse_time(text: &str, now: jiff::Timestamp) -> Result<jiff::Timestamp, String> {
    let zoned = || text.parse::<jiff::Timestamp>().ok();
    let utc = || {
        let local: jiff::civil::DateTime = text.parse().ok()?;
        let zoned = local.to_zoned(jiff::tz::TimeZone::UTC).ok()?;
        Some(zoned.timestamp())
    };
    let before = || {
        let age = text.strip_suffix(" ago").unwrap_or(text);
        now.checked_sub(parse_duration(age).ok()?).ok()
    };
    zoned().or_else(utc).or_else(before).ok_or_else(|| {
        format!(
            "{text:?} is not a time: expected a time like 2026-11-21T09:05:00Z, a date like 2026-11-21 (UTC), or a duration like 24h (24 hours ago)"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_sizes_with_and_without_units() {
        assert_eq!(parse_size("1000"), Ok(Bytes(1000)));
        assert_eq!(parse_size("16MiB"), Ok(Bytes(16 << 20)));
        assert_eq!(parse_size("900kB"), Ok(Bytes(900_000)));
        for text in ["", "MiB", "-1", "16 potatoes"] {
            assert!(parse_size(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn parses_durations_with_units() {
        assert_eq!(parse_duration("30s"), Ok(Duration::from_secs(30)));
        assert_eq!(parse_duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(parse_duration("1m 30s"), Ok(Duration::from_secs(90)));
        assert_eq!(parse_duration("7d"), Ok(Duration::from_hours(7 * 24)));
        assert_eq!(parse_duration("1w"), parse_duration("7 days"));
        for text in ["", "30", "-1s", "1 month", "soon"] {
            assert!(parse_duration(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn parses_absolute_times_and_durations_relative_to_now() {
        let now: jiff::Timestamp = "2026-11-21T12:00:00Z".parse().expect("a time");
        let check = |text: &str, expected: &str| {
            let found = parse_time(text, now).map(|time| time.to_string());
            assert_eq!(found.as_deref(), Ok(expected), "{text}");
        };
        check("2026-11-21T09:05:00+02:00", "2026-11-21T07:05:00Z");
        check("2026-11-21T09:05:00.5Z", "2026-11-21T09:05:00.5Z");
        check("2026-11-21 09:05", "2026-11-21T09:05:00Z");
        check("2026-11-21", "2026-11-21T00:00:00Z");
        check("24h", "2026-11-20T12:00:00Z");
        check("1w", "2026-11-14T12:00:00Z");
        check("1h ago", "2026-11-21T11:00:00Z");
        for text in ["", "soon", "2026-13-01", "12", "24 potatoes"] {
            assert!(parse_time(text, now).is_err(), "{text:?}");
        }
    }
}
