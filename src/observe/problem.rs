//! The problems that a pipeline can have, with messages that an operator can act on. This module
//! performs no I/O.

use std::time::Duration;

use bytesize::ByteSize;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::model::commands::Commands;
use crate::model::vitals::Vitals;

/// A slot is reported as being in danger if less than 1/`DANGER_PARTS` of its WAL limit remains.
const DANGER_PARTS: u64 = 4;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// The severity of a problem. The Prometheus alerts use the same levels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// Nothing is wrong.
    #[default]
    Ok,
    /// The problem is not urgent, or may resolve itself.
    Warning,
    /// Nothing is delivered, or events are about to be lost.
    Critical,
}

/// The kind of a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// No process is reading the slot.
    NotStreaming,
    /// The session's event loop is stalled.
    EventLoopStalled,
    /// Events are in flight, but Kafka does not acknowledge them.
    DeliveryStuck,
    /// WAL is pending, but nothing is delivered or confirmed.
    NoProgress,
    /// A long-running transaction retains WAL whose events have already been delivered.
    LongTransaction,
    /// The slot does not exist.
    SlotMissing,
    /// The WAL that the slot needs has been removed.
    SlotLost,
    /// The WAL that the slot needs may be removed at any time.
    SlotUnreserved,
    /// The slot is close to the limit at which its WAL is removed.
    SlotInDanger,
    /// The time range of the table's last partition ends soon.
    PartitionsRunOut,
    /// The publication was changed while the pipeline was running, and no longer includes all
    /// events.
    RowsLeftOut,
}

impl Kind {
    /// All kinds of problems.
    pub const ALL: [Self; 11] = [
        Self::NotStreaming,
        Self::EventLoopStalled,
        Self::DeliveryStuck,
        Self::NoProgress,
        Self::LongTransaction,
        Self::SlotMissing,
        Self::SlotLost,
        Self::SlotUnreserved,
        Self::SlotInDanger,
        Self::PartitionsRunOut,
        Self::RowsLeftOut,
    ];

    /// Returns the name of this kind of problem in metrics, logs and JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::NotStreaming => "not_streaming",
            Self::EventLoopStalled => "event_loop_stalled",
            Self::DeliveryStuck => "delivery_stuck",
            Self::NoProgress => "no_progress",
            Self::LongTransaction => "long_transaction",
            Self::SlotMissing => "slot_missing",
            Self::SlotLost => "slot_lost",
            Self::SlotUnreserved => "slot_unreserved",
            Self::SlotInDanger => "slot_in_danger",
            Self::PartitionsRunOut => "partitions_run_out",
            Self::RowsLeftOut => "rows_left_out",
        }
    }

    /// Returns the severity of problems of this kind.
    #[must_use]
    pub fn severity(self) -> Severity {
        match self {
            Self::NotStreaming
            | Self::EventLoopStalled
            | Self::DeliveryStuck
            | Self::NoProgress
            | Self::SlotMissing
            | Self::SlotLost
            | Self::SlotUnreserved
            | Self::SlotInDanger
            | Self::RowsLeftOut => Severity::Critical,
            Self::LongTransaction | Self::PartitionsRunOut => Severity::Warning,
        }
    }

    /// Returns whether a pipeline with this kind of problem is also reported as not ready, for the
    /// same reason.
    #[must_use]
    pub fn explains_unreadiness(self) -> bool {
        matches!(
            self,
            Self::NotStreaming | Self::EventLoopStalled | Self::DeliveryStuck
        )
    }

    /// Returns whether this kind of problem is detected only by querying the database.
    #[must_use]
    pub fn is_from_database(self) -> bool {
        matches!(
            self,
            Self::SlotMissing
                | Self::SlotLost
                | Self::SlotUnreserved
                | Self::SlotInDanger
                | Self::PartitionsRunOut
        )
    }
}

/// A problem with a pipeline.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    pub kind: Kind,
    /// A description of the problem.
    pub what: String,
    /// A command or an action that fixes the problem or helps to find its cause.
    pub remedy: String,
}

impl Problem {
    /// Creates a problem from its kind, description and remedy.
    #[must_use]
    pub fn new(kind: Kind, what: String, remedy: impl Into<String>) -> Self {
        let remedy = remedy.into();
        Self { kind, what, remedy }
    }

    /// Returns the description and the remedy on one line.
    #[must_use]
    pub fn line(&self) -> String {
        format!("{}. {}", self.what, self.remedy)
    }
}

/// Checks the slot's state, as read from the database, and returns the problem found, if any.
#[must_use]
pub(crate) fn slot_problem(slot: &str, vitals: &Vitals, commands: &Commands) -> Option<Problem> {
    let Some(found) = &vitals.slot else {
        return Some(Problem::new(
            Kind::SlotMissing,
            format!("slot {slot:?} does not exist"),
            format!("Create it: {}", commands.print(["init"])),
        ));
    };
    match found.wal_status.as_deref() {
        Some("lost") => Some(Problem::new(
            Kind::SlotLost,
            format!("slot {slot:?} is lost: undelivered events exist only in the table"),
            "See docs/operations.md#walpostslotlost",
        )),
        Some("unreserved") => Some(Problem::new(
            Kind::SlotUnreserved,
            format!(
                "slot {slot:?} is unreserved and will be lost at the server's next checkpoint unless Walpost catches up first or \
                 max_slot_wal_keep_size is raised"
            ),
            "If there is enough disk space: ALTER SYSTEM SET max_slot_wal_keep_size = '...'; SELECT pg_catalog.pg_reload_conf()",
        )),
        _ => {
            let (safe, limit) = remaining_wal(vitals)?;
            (safe < limit / DANGER_PARTS).then(|| {
                Problem::new(
                    Kind::SlotInDanger,
                    format!(
                        "slot {slot:?} may retain only {} more WAL (limit: {}); after that, PostgreSQL removes WAL that has not been \
                         delivered",
                        ByteSize::b(safe),
                        ByteSize::b(limit)
                    ),
                    "Fix the cause of the delay. Until then, if there is enough disk space: ALTER SYSTEM SET max_slot_wal_keep_size \
                     = '...'; SELECT pg_catalog.pg_reload_conf()",
                )
            })
        }
    }
}

/// Returns a problem if the outbox table has no partition that begins in the future, and its last
/// partition ends within a day.
#[must_use]
pub(crate) fn partitions_problem(
    outbox: &str,
    vitals: &Vitals,
    now_micros: u64,
    commands: &Commands,
) -> Option<Problem> {
    let end = vitals.partitions_end?;
    let left = Duration::from_micros(end.at_micros.saturating_sub(now_micros));
    if end.ahead > 0 || left >= DAY {
        return None;
    }
    let at = i64::try_from(end.at_micros).unwrap_or(i64::MAX);
    let at = Timestamp::from_microsecond(at).unwrap_or_default();
    let what = match end.has_default {
        true => format!(
            "the last partition of {outbox} ends at {at:.0}: later rows will be inserted into the default partition"
        ),
        false => format!(
            "the last partition of {outbox} ends at {at:.0}: there is no default partition, so inserting later rows will fail"
        ),
    };
    Some(Problem::new(
        Kind::PartitionsRunOut,
        what,
        format!(
            "Create more partitions: {}, or specify the retention setting, so that walpost run creates them",
            commands.print(["maintain"])
        ),
    ))
}

/// Creates the problem that is reported if no process is reading the slot, according to the
/// database.
#[must_use]
pub(crate) fn unread(slot: &str) -> Problem {
    Problem::new(
        Kind::NotStreaming,
        format!(
            "no process is reading slot {slot:?}, and the WAL that the slot retains will fill the disk"
        ),
        "Start Walpost or, if it is already running, check its log",
    )
}

/// Returns how many more bytes of WAL may be retained for the slot, and the total limit. Returns
/// `None` if WAL retention is unlimited.
#[must_use]
pub(crate) fn remaining_wal(vitals: &Vitals) -> Option<(u64, u64)> {
    let safe = u64::try_from(vitals.slot.as_ref()?.safe_wal_bytes?).unwrap_or_default();
    Some((safe, safe + vitals.retained_bytes()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::lsn::Lsn;
    use crate::model::vitals::{PartitionsEnd, SlotVitals};

    fn slot_problem_kind(wal_status: &str, safe_wal_bytes: Option<i64>) -> Option<Kind> {
        let slot = SlotVitals {
            wal_status: Some(wal_status.to_owned()),
            safe_wal_bytes,
            restart: Some(Lsn(1_000)),
            ..SlotVitals::default()
        };
        let vitals = Vitals {
            end: Lsn(4_000),
            slot: Some(slot),
            ..Vitals::default()
        };
        slot_problem("s", &vitals, &Commands::default()).map(|problem| problem.kind)
    }

    #[test]
    fn reports_a_slot_with_less_than_a_quarter_of_its_wal_limit_left() {
        assert_eq!(slot_problem_kind("reserved", None), None);
        assert_eq!(slot_problem_kind("extended", Some(1_000)), None);
        assert_eq!(
            slot_problem_kind("extended", Some(900)),
            Some(Kind::SlotInDanger)
        );
        assert_eq!(
            slot_problem_kind("reserved", Some(-5)),
            Some(Kind::SlotInDanger)
        );
        assert_eq!(
            slot_problem_kind("unreserved", Some(-5)),
            Some(Kind::SlotUnreserved)
        );
        assert_eq!(slot_problem_kind("lost", None), Some(Kind::SlotLost));
        let problem =
            slot_problem("s", &Vitals::default(), &Commands::default()).expect("a problem");
        assert_eq!(
            problem.line(),
            "slot \"s\" does not exist. Create it: walpost init",
            "{problem:?}"
        );
    }

    #[test]
    fn reports_when_the_last_partition_ends_within_a_day() {
        let now = 1_000_000_000_000_000;
        let line = |hours: u64, ahead, has_default| {
            let vitals = Vitals {
                partitions_end: Some(PartitionsEnd {
                    at_micros: now + hours * 3_600_000_000,
                    ahead,
                    has_default,
                }),
                ..Vitals::default()
            };
            partitions_problem("table public.outbox", &vitals, now, &Commands::default())
                .map(|problem| problem.line())
        };
        assert_eq!(
            line(24, 0, true),
            None,
            "the last partition ends more than a day from now"
        );
        assert_eq!(line(2, 1, true), None, "another partition follows");
        let text = line(23, 0, true).expect("a problem");
        for part in [
            "the last partition of table public.outbox ends at 2001-09-10T00:46:40Z",
            "default partition",
            "walpost maintain",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
        let text = line(0, 0, false).expect("a problem");
        assert!(text.contains("inserting later rows will fail"), "{text}");
        assert_eq!(
            partitions_problem("t", &Vitals::default(), now, &Commands::default()),
            None
        );
    }

    #[test]
    fn serializes_problem_kinds_by_name() {
        for kind in Kind::ALL {
            assert_eq!(serde_json::json!(kind), kind.name());
        }
    }
}
