//! The WAL budget: how much WAL the slot may retain on the server's disk, and what happens if it
//! retains more.
//!
//! Retained WAL is measured from the slot's `restart_lsn`. All WAL after that position takes up
//! disk space, whether it is retained because of unconfirmed events or because of an open
//! transaction.
//!
//! This module performs no I/O, and takes the current time as an argument.

use std::time::{Duration, Instant};

use crate::model::outage::{Outage, OutageMessage};

/// Limits on how much WAL the slot may retain, and what happens if they are exceeded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct WalBudget {
    /// A warning is logged if the slot retains more bytes than this.
    pub warn_bytes: Option<u64>,
    /// If the slot retains more bytes than this, `on_max` determines what happens.
    pub max_bytes: Option<u64>,
    /// The action to take if the slot retains more than `max_bytes`.
    pub on_max: OnMax,
}

/// The action to take if the slot retains more WAL than `wal_budget.max`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum OnMax {
    /// The slot is kept, and an error is logged.
    #[default]
    Hold,
    /// The slot is dropped, and the journal records which events were not delivered.
    DropSlot,
}

/// Tracks how long the slot has exceeded each limit, and when this was last logged.
#[derive(Debug, Default)]
pub(crate) struct Budget {
    limits: WalBudget,
    warned: Outage,
    held: Outage,
}

/// The result of evaluating the budget: a message to log, or an action to take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Finding {
    None,
    /// The slot has exceeded `warn_bytes` for this long.
    Warn(Duration),
    /// The slot has exceeded `max_bytes` for this long, but is kept.
    Held(Duration),
    /// The slot exceeded `max_bytes` for this long, but now exceeds only `warn_bytes`.
    BelowMax(Duration),
    /// The slot exceeded a limit for this long, but is within the budget again.
    Within(Duration),
    /// The slot exceeds `max_bytes` and must be dropped.
    Drop,
}

impl Budget {
    /// Creates a budget that has not been exceeded yet.
    #[must_use]
    pub(crate) fn new(limits: WalBudget) -> Self {
        Self {
            limits,
            ..Self::default()
        }
    }

    /// Checks the amount of WAL that the slot retains against the limits.
    pub(crate) fn evaluate(&mut self, retained_bytes: u64, now: Instant) -> Finding {
        let exceeds = |limit: Option<u64>| limit.is_some_and(|limit| retained_bytes > limit);
        if exceeds(self.limits.max_bytes) {
            if self.limits.on_max == OnMax::DropSlot {
                return Finding::Drop;
            }
            // `warn_bytes` is exceeded as well, but no separate message is logged.
            return log_elapsed(&mut self.held, now).map_or(Finding::None, Finding::Held);
        }
        let held = self.held.end(now);
        if exceeds(self.limits.warn_bytes) {
            let warn = log_elapsed(&mut self.warned, now).map_or(Finding::None, Finding::Warn);
            return held.map_or(warn, Finding::BelowMax);
        }
        let warned = self.warned.end(now);
        warned.max(held).map_or(Finding::None, Finding::Within)
    }
}

/// Records that a limit is exceeded. If a message about it is due, returns how long the limit has
/// been exceeded.
fn log_elapsed(outage: &mut Outage, now: Instant) -> Option<Duration> {
    match outage.failed(now) {
        OutageMessage::Started => Some(Duration::ZERO),
        OutageMessage::Ongoing(lasts, _) => Some(lasts),
        OutageMessage::Suppressed => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(limits: WalBudget, retained: &[(u64, u64)]) -> Vec<(u64, Finding)> {
        let start = Instant::now();
        let mut budget = Budget::new(limits);
        let mut found = Vec::new();
        for (second, retained) in retained {
            let finding = budget.evaluate(*retained, start + Duration::from_secs(*second));
            if finding != Finding::None {
                found.push((*second, finding));
            }
        }
        found
    }

    #[test]
    fn reports_nothing_if_no_wal_limits_are_configured() {
        assert_eq!(findings(WalBudget::default(), &[(0, u64::MAX)]), []);
    }

    #[test]
    fn reports_an_exceeded_wal_budget_once_a_minute_and_when_it_is_no_longer_exceeded() {
        let limits = WalBudget {
            warn_bytes: Some(10),
            ..WalBudget::default()
        };
        let seconds = Duration::from_secs;
        assert_eq!(
            findings(
                limits,
                &[(0, 10), (5, 11), (10, 99), (70, 12), (75, 10), (80, 3)]
            ),
            [
                (5, Finding::Warn(seconds(0))),
                (70, Finding::Warn(seconds(65))),
                (75, Finding::Within(seconds(70))),
            ]
        );
    }

    #[test]
    fn reports_the_wal_maximum_instead_of_the_warning_limit_when_both_are_exceeded() {
        let limits = WalBudget {
            warn_bytes: Some(10),
            max_bytes: Some(20),
            on_max: OnMax::Hold,
        };
        let seconds = Duration::from_secs;
        assert_eq!(
            findings(
                limits,
                &[
                    (0, 15),
                    (5, 21),
                    (10, 22),
                    (64, 30),
                    (66, 30),
                    (70, 20),
                    (75, 15),
                    (80, 1)
                ]
            ),
            [
                (0, Finding::Warn(seconds(0))),
                (5, Finding::Held(seconds(0))),
                (66, Finding::Held(seconds(61))),
                (70, Finding::BelowMax(seconds(65))),
                (80, Finding::Within(seconds(80))),
            ]
        );
        // Without `warn_bytes`, the slot is within its budget as soon as it no longer exceeds
        // `max_bytes`.
        let alone = WalBudget {
            warn_bytes: None,
            ..limits
        };
        assert_eq!(
            findings(alone, &[(0, 21), (5, 20)]),
            [
                (0, Finding::Held(seconds(0))),
                (5, Finding::Within(seconds(5)))
            ]
        );
    }

    #[test]
    fn requests_a_slot_drop_each_time_the_wal_maximum_is_exceeded() {
        let limits = WalBudget {
            warn_bytes: None,
            max_bytes: Some(20),
            on_max: OnMax::DropSlot,
        };
        assert_eq!(
            findings(limits, &[(0, 20), (5, 21), (10, 22)]),
            [(5, Finding::Drop), (10, Finding::Drop)]
        );
    }
}
