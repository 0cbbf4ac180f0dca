//! Durations in human-readable form: two or three digits and a unit. The status page formats
//! durations in the same way.

use std::fmt;
use std::time::Duration;

/// The elapsed time, as it appears in a log line: `66s`, `2min`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Elapsed(pub Duration);

impl fmt::Display for Elapsed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&duration(self.0.as_secs_f64()).replace(' ', ""))
    }
}

/// Formats a duration given in seconds.
#[must_use]
pub(crate) fn duration(seconds: f64) -> String {
    match seconds {
        0.0 => "0 s".to_owned(),
        s if s < 0.000_95 => format!("{:.2} ms", s * 1e3),
        s if s < 0.009_5 => format!("{:.1} ms", s * 1e3),
        s if s < 0.999_5 => format!("{:.0} ms", s * 1e3),
        s if s < 9.95 => format!("{s:.1} s"),
        s => age(s),
    }
}

/// Formats an age given in seconds, without fractions of a second.
#[must_use]
pub(crate) fn age(seconds: f64) -> String {
    match seconds {
        s if s < 119.5 => format!("{s:.0} s"),
        s if s < 7170.0 => format!("{:.0} min", s / 60.0),
        s if s < 35_820.0 => format!("{:.1} h", s / 3600.0),
        s if s < 171_000.0 => format!("{:.0} h", s / 3600.0),
        s => format!("{:.0} days", s / 86_400.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_durations_with_two_or_three_digits_and_a_suitable_unit() {
        for (seconds, expected) in [
            (0.0, "0 s"),
            (0.000_062_5, "0.06 ms"),
            (0.004_21, "4.2 ms"),
            (0.009_6, "10 ms"),
            (0.066_067, "66 ms"),
            (0.999_6, "1.0 s"),
            (9.94, "9.9 s"),
            (9.96, "10 s"),
            (66.067_527, "66 s"),
            (119.6, "2 min"),
            (7169.0, "119 min"),
            (7170.0, "2.0 h"),
            (92_000.0, "26 h"),
            (171_000.0, "2 days"),
        ] {
            assert_eq!(duration(seconds), expected, "{seconds}");
        }
        let elapsed = Elapsed(Duration::from_micros(66_067_527));
        assert_eq!(elapsed.to_string(), "66s");
        assert_eq!(age(0.4), "0 s");
        assert_eq!(age(9.4), "9 s");
        assert_eq!(age(3_700.0), "62 min");
    }
}
