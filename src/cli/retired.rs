//! Usage errors that name the flag or value in the place of one that an earlier version had.

use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue};

use crate::config::retired;

/// The error, with what to write instead of a flag or value that was retired.
pub(super) fn named(mut error: clap::Error) -> clap::Error {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    let known = match error.get(ContextKind::ValidValue) {
        Some(ContextValue::Strings(values)) => values.as_slice(),
        _ => &[],
    };
    let of_value = text(ContextKind::InvalidValue)
        .and_then(|old| retired::value(old, known.iter().map(String::as_str)));
    let of_flag = || text(ContextKind::InvalidArg).and_then(retired::flag);
    if let Some(reason) = of_value.or_else(of_flag) {
        // What is only spelled like it says the contrary.
        error.remove(ContextKind::SuggestedArg);
        error.remove(ContextKind::SuggestedValue);
        let tips = vec![StyledStr::from(reason)];
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(tips));
    }
    error
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::cli::Cli;

    #[test]
    fn a_retired_flag_or_value_is_answered_with_the_one_in_its_place() {
        for (words, expected) in [
            (
                &["run", "--lag-max", "1GiB"][..],
                "unknown flag --lag-max: it is called --wal-budget-max now",
            ),
            (
                &["check", "--lag-at-max=hold"],
                "unknown flag --lag-at-max: it is called --wal-budget-on-max now",
            ),
            (
                &["replay", "--let-go"],
                "unknown flag --let-go: it is called --dropped-slots now",
            ),
            (
                &["run", "--outbox", "log"],
                "unknown value \"log\": it is called \"messages\" now",
            ),
            (
                &["run", "--wal-budget-on-max", "let-go"],
                "unknown value \"let-go\": it is called \"drop-slot\" now",
            ),
        ] {
            let words = ["walpost"].iter().chain(words);
            let error = Cli::command()
                .try_get_matches_from(words)
                .expect_err("refused");
            assert_eq!(error.exit_code(), 2);
            let shown = named(error).to_string();
            assert!(shown.contains(expected), "{shown}");
            assert!(!shown.contains("similar"), "{shown}");
        }
    }
}
