//! The WAL budget: how much WAL the slot may retain on the server's disk, and the reaction when the
//! slot retains more.
//!
//! Retained WAL is counted from `restart_lsn`, because all WAL from there on occupies disk space,
//! whether it is retained for unconfirmed events or for an open transaction.
//!
//! This module performs no I/O, and receives the current time as an argument.

use std::time::{Duration, Instant};

use crate::model::outage::{Outage, OutageMessage};

/// How much WAL the slot may retain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct WalBudget {
    /// If the slot retains more bytes than this, a warning is logged.
    pub warn_bytes: Option<u64>,
    /// If the slot retains more bytes than this, `on_max` determines the reaction.
    pub max_bytes: Option<u64>,
    /// The reaction when the slot retains more than `max_bytes`.
    pub on_max: OnMax,
}

/// The reaction when the slot retains more WAL than allowed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum OnMax {
    /// The slot is kept, and an error is logged.
    #[default]
    Hold,
    /// The slot is dropped, and the journal records which events were not delivered.
    DropSlot,
}

/// Tracks how long the slot has exceeded each limit, and which messages were logged about that.
#[derive(Debug, Default)]
pub(crate) struct Budget {
    limits: WalBudget,
    warned: Outage,
    held: Outage,
}

/// The message to log or the action to take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Finding {
    None,
    /// The slot has exceeded `warn_bytes` for this long.
    Warn(Duration),
    /// The slot has exceeded `max_bytes` for this long, and is kept.
    Held(Duration),
    /// The slot exceeded `max_bytes` for this long, and now exceeds only `warn_bytes`.
    BelowMax(Duration),
    /// The slot exceeded the budget for this long, and is within the budget again.
    Within(Duration),
    /// The slot exceeds `max_bytes` and must be dropped.
    Drop,
}

impl Budget {
    /// Creates a budget with these limits.
    #[must_use]
    pub(crate) fn new(limits: WalBudget) -> Self {
        Self {
            limits,
            ..Self::default()
        }
    }

    /// Evaluates the amount of WAL that the slot retains.
    pub(crate) fn evaluate(&mut self, retained_bytes: u64, now: Instant) -> Finding {
        let exceeds = |limit: Option<u64>| limit.is_some_and(|limit| retained_bytes > limit);
        if exceeds(self.limits.max_bytes) {
            if self.limits.on_max == OnMax::DropSlot {
                return Finding::Drop;
            }
            // The outage for `warn_bytes` continues, but is not logged separately.
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

/// Records that the limit is still exceeded, and returns for how long if a message is due.
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
    fn reports_nothing_without_limits() {
        assert_eq!(findings(WalBudget::default(), &[(0, u64::MAX)]), []);
    }

    #[test]
    fn logs_a_warning_at_the_start_every_minute_and_at_the_end() {
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
    fn reports_only_the_maximum_when_it_is_exceeded() {
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
        // Without `warn_bytes`, the end is logged for the maximum.
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
    fn requests_a_drop_each_time_the_maximum_is_exceeded() {
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
