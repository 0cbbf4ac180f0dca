//! Names that earlier versions had. None of them is accepted; each is answered with the name that took its place.

/// What a name is the name of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A key of walpost.toml.
    Key,
    /// A value of a key, of its flag and of its variable.
    Value,
    Flag,
    /// An environment variable.
    Variable,
}

/// Every retired name: its kind, the name, and the one in its place.
const NAMES: &[(Kind, &str, &str)] = &[
    (Kind::Key, "lag", "wal_budget"),
    (Kind::Key, "at_max", "on_max"),
    (Kind::Value, "log", "messages"),
    (Kind::Value, "let-go", "drop-slot"),
    (Kind::Flag, "--lag-warn", "--wal-budget-warn"),
    (Kind::Flag, "--lag-max", "--wal-budget-max"),
    (Kind::Flag, "--lag-at-max", "--wal-budget-on-max"),
    (Kind::Flag, "--let-go", "--dropped-slots"),
    (
        Kind::Variable,
        "WALPOST_LAG_WARN",
        "WALPOST_WAL_BUDGET_WARN",
    ),
    (Kind::Variable, "WALPOST_LAG_MAX", "WALPOST_WAL_BUDGET_MAX"),
    (
        Kind::Variable,
        "WALPOST_LAG_AT_MAX",
        "WALPOST_WAL_BUDGET_ON_MAX",
    ),
];

fn successor(kind: Kind, old: &str) -> Option<&'static str> {
    let mut names = NAMES.iter();
    let found = names.find(|(known, name, _)| *known == kind && *name == old);
    found.map(|(_, _, new)| *new)
}

/// What to say of a key that is not known in a place where those of `known` are; nothing if it was never one there.
pub(super) fn key<'k>(old: &str, known: impl IntoIterator<Item = &'k str>) -> Option<String> {
    let new = successor(Kind::Key, old).filter(|new| known.into_iter().any(|known| known == *new));
    new.map(|new| format!("unknown key {old}: it is called {new} now"))
}

/// What to say of a value in a place that takes those of `known`; nothing if it was never one there.
pub(crate) fn value<'k>(old: &str, known: impl IntoIterator<Item = &'k str>) -> Option<String> {
    let new =
        successor(Kind::Value, old).filter(|new| known.into_iter().any(|known| known == *new));
    new.map(|new| format!("unknown value {old:?}: it is called {new:?} now"))
}

/// What to say of a flag that is not known; nothing if it was never one.
pub(crate) fn flag(old: &str) -> Option<String> {
    successor(Kind::Flag, old).map(|new| format!("unknown flag {old}: it is called {new} now"))
}

/// What to say of a variable that would be ignored in silence; nothing if it was never read.
pub(super) fn variable(old: &str) -> Option<String> {
    successor(Kind::Variable, old)
        .map(|new| format!("unknown environment variable {old}: it is called {new} now"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_retired_name_is_answered_with_the_one_in_its_place() {
        let known = ["outbox", "wal_budget"];
        assert_eq!(
            key("lag", known).as_deref(),
            Some("unknown key lag: it is called wal_budget now")
        );
        assert_eq!(key("lag", ["topic", "replication"]), None, "another table");
        assert_eq!(key("lags", known), None);
        assert_eq!(
            value("let-go", ["hold", "drop-slot"]).as_deref(),
            Some("unknown value \"let-go\": it is called \"drop-slot\" now")
        );
        assert_eq!(value("log", ["kafka", "stdout"]), None, "of another key");
        assert_eq!(
            flag("--let-go").as_deref(),
            Some("unknown flag --let-go: it is called --dropped-slots now")
        );
        assert_eq!(
            variable("WALPOST_LAG_MAX").as_deref(),
            Some(
                "unknown environment variable WALPOST_LAG_MAX: it is called WALPOST_WAL_BUDGET_MAX now"
            )
        );
        assert_eq!(variable("WALPOST_LAG"), None);
    }
}
