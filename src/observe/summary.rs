//! The summary of a pipeline: its state in one word, its severity, and a reason and a remedy for
//! each problem. `walpost status` and the status page display the summary unchanged. This module
//! performs no I/O.

use serde::{Deserialize, Serialize};

use super::health::NotReady;
use super::problem::{Kind, Problem, Severity};
use super::watchdog::Lasting;
use crate::delivery::stats::LifecycleSnapshot;
use crate::model::commands::Commands;
use crate::model::dropped_slot::DroppedSlot;
use crate::model::lifecycle::State;
use crate::model::set_aside::{SetAside, replay_set_aside};

/// Where a client can get the most recent information about a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    Connector,
    /// The database. A client that can connect to the database should query it directly, because
    /// the result that Walpost obtained earlier may be outdated.
    Database,
}

/// A reason why a pipeline is not healthy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reason {
    pub severity: Severity,
    pub source: Source,
    /// A description of the problem.
    pub what: String,
    /// The consequence of the problem, or what the operator can do about it. May be empty.
    pub remedy: String,
    /// When the problem began, in seconds since 1970, or `None` if it began when the pipeline
    /// entered its current state.
    pub since: Option<f64>,
}

/// The summary of a pipeline.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// The name of the state, or `stuck` if the pipeline is streaming but makes no progress.
    pub state: String,
    /// The highest severity among the reasons.
    pub severity: Severity,
    /// When the pipeline entered the state in `state`, in seconds since 1970.
    pub since: f64,
    /// A number for sorting pipelines. Pipelines with more severe problems have lower numbers and
    /// are displayed first.
    pub rank: u8,
    /// The reasons why the pipeline is not healthy, most severe first.
    pub reasons: Vec<Reason>,
}

impl Reason {
    /// Returns the description and the remedy on one line.
    #[must_use]
    pub fn line(&self) -> String {
        match self.remedy.as_str() {
            "" => self.what.clone(),
            remedy => format!("{}. {remedy}", self.what),
        }
    }

    /// Creates a reason from a problem that was just detected.
    #[must_use]
    pub fn from_problem(problem: &Problem) -> Self {
        Self {
            severity: problem.kind.severity(),
            source: match problem.kind.is_from_database() {
                true => Source::Database,
                false => Source::Connector,
            },
            what: problem.what.clone(),
            remedy: problem.remedy.clone(),
            since: None,
        }
    }
}

impl Summary {
    /// Summarizes a pipeline that entered its current state at the time `since`.
    ///
    /// If the pipeline is not ready, `not_ready` contains the reason and the time when the pipeline
    /// became unready. `problems` contains the problems found by the watchdog, `dropped` the
    /// dropped slots whose events have not been replayed, and `set_aside` the tables that are set
    /// aside after an error.
    #[must_use]
    pub fn new(
        commands: &Commands,
        lifecycle: &LifecycleSnapshot,
        since: f64,
        not_ready: Option<(&NotReady, f64)>,
        problems: &[Lasting],
        dropped: &[DroppedSlot],
        set_aside: &[SetAside],
    ) -> Self {
        let is_incomplete = matches!(not_ready, Some((NotReady::Omission(_), _)));
        let is_stuck = lifecycle.state == State::Streaming && not_ready.is_some() && !is_incomplete;
        let mut reasons: Vec<Reason> = Vec::new();
        if let Some((reason, _)) = not_ready {
            reasons.extend(unready(reason, lifecycle, problems));
        }
        for seen in problems {
            // Skip problems that are also the reason why the pipeline is not ready, because this
            // reason has already been added. If the pipeline is stuck, also skip `NoProgress`,
            // because it describes the same situation less precisely.
            let is_covered = seen.problem.kind.explains_unreadiness()
                || is_stuck && seen.problem.kind == Kind::NoProgress;
            if !is_covered {
                let since = Some(seen.since);
                let reason = Reason::from_problem(&seen.problem);
                add(&mut reasons, Reason { since, ..reason });
            }
        }
        add_dropped_slots(&mut reasons, commands, dropped);
        add_set_aside(&mut reasons, commands, set_aside);
        reasons.sort_by_key(|reason| std::cmp::Reverse(reason.severity));
        let worst = reasons.iter().map(|reason| reason.severity).max();
        let severity = worst.unwrap_or_default();
        Self {
            state: match is_stuck {
                true => "stuck".to_owned(),
                false => lifecycle.state.name().replace('_', " "),
            },
            severity,
            since: match not_ready {
                Some((_, since)) if is_stuck => since,
                _ => since,
            },
            rank: match (lifecycle.state, severity) {
                (State::Halted, _) => 0,
                (_, Severity::Critical) => 1,
                (_, Severity::Warning) => 2,
                // The pipeline is not ready although no problem is known, usually because it is
                // stopping.
                _ if not_ready.is_some() => 3,
                (_, Severity::Ok) => 4,
            },
            reasons,
        }
    }
}

/// Adds a reason unless an earlier reason already describes the same problem.
pub(crate) fn add(reasons: &mut Vec<Reason>, reason: Reason) {
    // Compare only the text before the colon, because the details after it can differ. For example,
    // both the error that halted the pipeline and the watchdog report a lost slot.
    let head = reason.what.split(": ").next().unwrap_or_default();
    if !reasons.iter().any(|other| other.what.contains(head)) {
        reasons.push(reason);
    }
}

/// Returns the reason why the pipeline is not ready, or `None` if the name of the pipeline's state
/// already makes the reason clear.
fn unready(
    not_ready: &NotReady,
    lifecycle: &LifecycleSnapshot,
    problems: &[Lasting],
) -> Option<Reason> {
    let mut problems = problems.iter();
    // If the watchdog has already reported the problem, use the watchdog's remedy, which also
    // states the consequence.
    let lasting = problems.find(|seen| seen.problem.kind.explains_unreadiness());
    let severity = match (lifecycle.state, lasting) {
        (State::Starting | State::Reconnecting, None) => Severity::Warning,
        _ => Severity::Critical,
    };
    Some(Reason {
        severity,
        source: Source::Connector,
        what: not_ready.description()?,
        remedy: match lasting {
            Some(seen) => seen.problem.remedy.clone(),
            None => not_ready.remedy(lifecycle.last_error.as_ref()).to_owned(),
        },
        since: None,
    })
}

/// Adds a reason for each dropped slot whose events have not been replayed.
pub(crate) fn add_dropped_slots(
    reasons: &mut Vec<Reason>,
    commands: &Commands,
    dropped: &[DroppedSlot],
) {
    for entry in dropped {
        let what = entry.describe();
        // If the pipeline halted because of this slot, its error already lists the steps to take
        // before the events can be resent.
        if reasons.iter().any(|other| other.what.contains(&what)) {
            continue;
        }
        reasons.push(Reason {
            severity: Severity::Critical,
            source: Source::Database,
            what: format!("{what} may exist only in the table: {}", entry.cause()),
            remedy: format!("Send them again: {}", entry.replay(commands)),
            since: None,
        });
    }
}

/// Adds a reason for each table that is set aside after an error.
pub(crate) fn add_set_aside(
    reasons: &mut Vec<Reason>,
    commands: &Commands,
    set_aside: &[SetAside],
) {
    reasons.extend(set_aside.iter().map(|entry| Reason {
        severity: Severity::Critical,
        source: Source::Database,
        what: format!("{}: {}", entry.describe(), entry.reason),
        remedy: format!(
            "Fix the cause, then send the rows of the table: {}",
            replay_set_aside(commands, &entry.table)
        ),
        since: None,
    }));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::lifecycle::{ErrorKind, Failure};

    const LOST: &str =
        "replication slot \"s\" is lost: the server has invalidated it. Drop and re-create it";

    fn summarize(
        state: State,
        not_ready: Option<&NotReady>,
        problems: &[(Kind, &str)],
        dropped: &[DroppedSlot],
    ) -> Summary {
        let lifecycle = LifecycleSnapshot {
            state,
            last_error: Some(Failure {
                at_micros: 0,
                kind: ErrorKind::History,
                message: LOST.to_owned(),
                remedy: "Walpost has halted".to_owned(),
            }),
            ..LifecycleSnapshot::default()
        };
        let lasting = |(kind, what): &(Kind, &str)| Lasting {
            problem: Problem::new(
                *kind,
                (*what).to_owned(),
                format!("See the remedy for {}", kind.name()),
            ),
            since: 7.0,
        };
        let problems: Vec<_> = problems.iter().map(lasting).collect();
        let not_ready = not_ready.map(|reason| (reason, 5.0));
        Summary::new(
            &Commands::for_pipeline("p"),
            &lifecycle,
            1.0,
            not_ready,
            &problems,
            dropped,
            &[],
        )
    }

    fn lines(summary: &Summary) -> Vec<String> {
        summary.reasons.iter().map(Reason::line).collect()
    }

    fn halted() -> NotReady {
        NotReady::State(State::Halted, Some(LOST.to_owned()))
    }

    fn dropped(id: i64) -> DroppedSlot {
        serde_json::from_value(
            serde_json::json!({"id": id, "at": "today", "from": "0/A", "to": null}),
        )
        .expect("an entry")
    }

    #[test]
    fn reports_a_streaming_pipeline_without_progress_as_stuck() {
        let summary = summarize(State::Streaming, None, &[], &[]);
        assert_eq!((summary.state.as_str(), summary.since), ("streaming", 1.0));
        assert_eq!((summary.severity, summary.rank), (Severity::Ok, 4));
        let not_ready = NotReady::KafkaDown("2/2 brokers are down".to_owned(), 3);
        let problems = [
            (Kind::NoProgress, "no events are delivered"),
            (Kind::LongTransaction, "a transaction is open"),
        ];
        let summary = summarize(State::Streaming, Some(&not_ready), &problems, &[]);
        assert_eq!((summary.state.as_str(), summary.since), ("stuck", 5.0));
        assert_eq!((summary.severity, summary.rank), (Severity::Critical, 1));
        let reported = lines(&summary);
        assert_eq!(reported.len(), 2, "{reported:?}");
        assert!(
            reported[0].contains("Kafka is unreachable (3 events are waiting): 2/2 brokers are down. Start the brokers"),
            "{reported:?}"
        );
        assert_eq!(
            reported[1],
            "a transaction is open. See the remedy for long_transaction"
        );
        assert_eq!(
            summarize(State::StandingBy, None, &[], &[]).state,
            "standing by"
        );
    }

    #[test]
    fn merges_reports_of_the_same_problem_and_keeps_one_remedy() {
        let not_ready = halted();
        let soon = summarize(State::Halted, Some(&not_ready), &[], &[]);
        assert_eq!(lines(&soon), [format!("{LOST}. Walpost has halted")]);
        // The watchdog reports that the pipeline is not streaming and that the slot is lost. The
        // error that halted the pipeline already covers both problems.
        let problems = [
            (
                Kind::NotStreaming,
                "slot \"s\" has not been read for 61 s: the pipeline has halted",
            ),
            (
                Kind::SlotLost,
                "slot \"s\" is lost: undelivered events exist only in the table",
            ),
        ];
        let later = summarize(State::Halted, Some(&not_ready), &problems, &[]);
        assert_eq!(
            lines(&later),
            [format!("{LOST}. See the remedy for not_streaming")]
        );
        assert_eq!((later.severity, later.rank), (Severity::Critical, 0));
        // A problem that no other reason describes is listed separately.
        let missing = [(Kind::SlotMissing, "slot \"s\" does not exist")];
        let reported = lines(&summarize(State::Halted, Some(&not_ready), &missing, &[]));
        assert_eq!(
            reported[1..],
            ["slot \"s\" does not exist. See the remedy for slot_missing"]
        );
    }

    #[test]
    fn lists_the_worst_problem_first_and_includes_every_dropped_slot() {
        let problems = [(Kind::PartitionsRunOut, "the last partition ends")];
        let summary = summarize(State::Streaming, None, &problems, &[dropped(3), dropped(4)]);
        let reported = lines(&summary);
        assert_eq!(reported.len(), 3, "{reported:?}");
        for (line, entry) in reported.iter().zip(["entry 3", "entry 4"]) {
            assert!(
                line.contains(entry) && line.contains("replay --dropped-slots --pipeline p"),
                "{line}"
            );
        }
        assert_eq!(summary.rank, 1);
        assert_eq!(summarize(State::Streaming, None, &problems, &[]).rank, 2);
    }

    #[test]
    fn reports_a_short_disconnect_as_a_warning_and_does_not_report_a_requested_stop() {
        let not_ready = NotReady::State(State::Reconnecting, Some("refused".to_owned()));
        let soon = summarize(State::Reconnecting, Some(&not_ready), &[], &[]);
        assert_eq!((soon.severity, soon.rank), (Severity::Warning, 2));
        let problems = [(
            Kind::NotStreaming,
            "slot \"s\" has not been read for 61 s: connection refused",
        )];
        let later = summarize(State::Reconnecting, Some(&not_ready), &problems, &[]);
        assert_eq!((later.severity, later.rank), (Severity::Critical, 1));
        let not_ready = NotReady::State(State::Draining, None);
        let draining = summarize(State::Draining, Some(&not_ready), &[], &[]);
        assert_eq!((draining.severity, draining.rank), (Severity::Ok, 3));
        assert_eq!(draining.reasons, []);
    }
}
