//! Formats numbers.

use crate::stats::Spread;

/// The text shown in place of a missing measurement.
pub(crate) const NOTHING: &str = "–";

/// Rounds a number and formats it with thousands separators, for example 1,234,567.
pub(crate) fn whole(number: f64) -> String {
    let digits = format!("{:.0}", number.abs());
    let mut text = String::from(if number < 0.0 { "-" } else { "" });
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Rounds a number to three significant digits and formats it. More digits would suggest a
/// precision that the measurements don't have.
pub(crate) fn rough(number: f64) -> String {
    if number == 0.0 {
        return "0".to_owned();
    }
    #[expect(clippy::cast_possible_truncation, reason = "a number of digits")]
    let digits = number.abs().log10().floor() as i32;
    let unit = 10_f64.powi((digits - 2).max(0));
    whole((number / unit).round() * unit)
}

/// Formats the median, followed by the minimum and maximum in parentheses if they differ.
pub(crate) fn spread(spread: Option<Spread>, write: impl Fn(f64) -> String) -> String {
    match spread {
        None => NOTHING.to_owned(),
        Some(Spread {
            median,
            least,
            most,
        }) => {
            let (low, high) = (write(least), write(most));
            if low == high {
                write(median)
            } else {
                format!("{} ({low} to {high})", write(median))
            }
        }
    }
}

/// Formats the median without the minimum and maximum.
pub(crate) fn median_only(spread: Option<Spread>, write: impl Fn(f64) -> String) -> String {
    spread.map_or(NOTHING.to_owned(), |spread| write(spread.median))
}

pub(crate) fn two_places(number: f64) -> String {
    format!("{number:.2}")
}

pub(crate) fn one_place(number: f64) -> String {
    format!("{number:.1}")
}
