//! A pipeline at a glance: one word for its state, how bad that is, and for each thing that is wrong one
//! reason and one remedy. `walpost status` and the page show this, and judge nothing themselves. Pure.

use serde::{Deserialize, Serialize};

use super::health::NotReady;
use super::problem::{Kind, Problem, Severity};
use super::watchdog::Lasting;
use crate::delivery::stats::LifecycleSnapshot;
use crate::model::commands::Commands;
use crate::model::dropped_slot::DroppedSlot;
use crate::model::lifecycle::State;
use crate::model::set_aside::{SetAside, replay_set_aside};

/// Who knows best whether something is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    Connector,
    /// The database: whoever can ask it himself need not believe the connector.
    Database,
}

/// Something that is wrong.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reason {
    /// How bad that is.
    pub severity: Severity,
    /// Who knows it.
    pub source: Source,
    /// What was found.
    pub what: String,
    /// What comes of it, or what a person can do. May be empty.
    pub remedy: String,
    /// Since when, in seconds since 1970, where that is another time than the state's.
    pub since: Option<f64>,
}

/// A pipeline at a glance.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// The word for it: its state, or `stuck` where it streams and does not get on.
    pub state: String,
    /// How bad it is: as bad as the worst of the reasons.
    pub severity: Severity,
    /// Since when that is its state, in seconds since 1970.
    pub since: f64,
    /// Its place among others, trouble first: the lowest comes first.
    pub rank: u8,
    /// What is wrong, the worst first.
    pub reasons: Vec<Reason>,
}

impl Reason {
    /// Both parts in one line.
    #[must_use]
    pub fn line(&self) -> String {
        match self.remedy.as_str() {
            "" => self.what.clone(),
            remedy => format!("{}. {remedy}", self.what),
        }
    }

    /// As a problem that was just found.
    #[must_use]
    pub fn of(problem: &Problem) -> Self {
        Self {
            severity: problem.kind.severity(),
            source: match problem.kind.is_of_database() {
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
    /// Of a pipeline that is in its state since `since`, and not ready for that reason, if it is not;
    /// `problems` is what the watchdog finds, `dropped` the slots that were dropped and not replayed, `set_aside` the tables that
    /// are set aside.
    #[must_use]
    pub fn of(
        commands: &Commands,
        lifecycle: &LifecycleSnapshot,
        since: f64,
        not_ready: Option<(&NotReady, f64)>,
        problems: &[Lasting],
        dropped: &[DroppedSlot],
        set_aside: &[SetAside],
    ) -> Self {
        let is_incomplete = matches!(not_ready, Some((NotReady::LeftOut(_), _)));
        let is_stuck = lifecycle.state == State::Streaming && not_ready.is_some() && !is_incomplete;
        let mut reasons: Vec<Reason> = Vec::new();
        if let Some((why, _)) = not_ready {
            reasons.extend(unready(why, lifecycle, problems));
        }
        for seen in problems {
            // The reason above is that one, in other words; or says more than nothing getting on.
            let is_told = seen.problem.kind.explains_unreadiness()
                || is_stuck && seen.problem.kind == Kind::NoProgress;
            if !is_told {
                let since = Some(seen.since);
                let reason = Reason::of(&seen.problem);
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
                // Not ready, and nothing is wrong: it was told to stop.
                _ if not_ready.is_some() => 3,
                (_, Severity::Ok) => 4,
            },
            reasons,
        }
    }
}

/// Adds what no other reason says already.
pub(crate) fn add(reasons: &mut Vec<Reason>, reason: Reason) {
    // What follows a colon is particulars: that a slot is lost is said by the error that halted the
    // pipeline too, with others.
    let head = reason.what.split(": ").next().unwrap_or_default();
    if !reasons.iter().any(|told| told.what.contains(head)) {
        reasons.push(reason);
    }
}

/// Why it is not ready, unless the word for its state says all of it.
fn unready(why: &NotReady, lifecycle: &LifecycleSnapshot, problems: &[Lasting]) -> Option<Reason> {
    let mut problems = problems.iter();
    // It is there when it has lasted for a while, and tells what comes of that.
    let lasting = problems.find(|seen| seen.problem.kind.explains_unreadiness());
    let severity = match (lifecycle.state, lasting) {
        (State::Starting | State::Reconnecting, None) => Severity::Warning,
        _ => Severity::Critical,
    };
    Some(Reason {
        severity,
        source: Source::Connector,
        what: why.what()?,
        remedy: match lasting {
            Some(seen) => seen.problem.remedy.clone(),
            None => why.remedy(lifecycle.last_error.as_ref()).to_owned(),
        },
        since: None,
    })
}

/// Adds what went with slots that were dropped, and was not sent again.
pub(crate) fn add_dropped_slots(
    reasons: &mut Vec<Reason>,
    commands: &Commands,
    dropped: &[DroppedSlot],
) {
    for entry in dropped {
        let what = entry.describe();
        // The error that halted the pipeline names it, and says what to do before it is sent again.
        if reasons.iter().any(|told| told.what.contains(&what)) {
            continue;
        }
        reasons.push(Reason {
            severity: Severity::Critical,
            source: Source::Database,
            what: format!("{what} may be in the table only: {}", entry.cause()),
            remedy: format!("Send them again: {}", entry.replay(commands)),
            since: None,
        });
    }
}

/// Adds the tables that are set aside.
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
            "Fix the cause, then send its rows: {}",
            replay_set_aside(commands, &entry.table)
        ),
        since: None,
    }));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::lifecycle::{ErrorKind, Failure};

    const LOST: &str = "replication slot \"s\" is lost: the server has removed it. Drop it";

    fn of(
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
                format!("help with {}", kind.name()),
            ),
            since: 7.0,
        };
        let problems: Vec<_> = problems.iter().map(lasting).collect();
        let not_ready = not_ready.map(|why| (why, 5.0));
        Summary::of(
            &Commands::of_pipeline("p"),
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
    fn what_streams_and_does_not_get_on_is_stuck_since_then() {
        let summary = of(State::Streaming, None, &[], &[]);
        assert_eq!((summary.state.as_str(), summary.since), ("streaming", 1.0));
        assert_eq!((summary.severity, summary.rank), (Severity::Ok, 4));
        let why = NotReady::KafkaDown("2/2 brokers are down".to_owned(), 3);
        let problems = [
            (Kind::NoProgress, "nothing moves"),
            (Kind::LongTransaction, "PID 1 waits"),
        ];
        let summary = of(State::Streaming, Some(&why), &problems, &[]);
        assert_eq!((summary.state.as_str(), summary.since), ("stuck", 5.0));
        assert_eq!((summary.severity, summary.rank), (Severity::Critical, 1));
        let told = lines(&summary);
        assert_eq!(told.len(), 2, "{told:?}");
        assert!(
            told[0].contains("3 events wait: 2/2 brokers are down. Walpost continues"),
            "{told:?}"
        );
        assert_eq!(told[1], "PID 1 waits. help with long_transaction");
        assert_eq!(of(State::StandingBy, None, &[], &[]).state, "standing by");
    }

    #[test]
    fn each_reason_is_told_once_with_one_remedy() {
        let why = halted();
        let soon = of(State::Halted, Some(&why), &[], &[]);
        assert_eq!(lines(&soon), [format!("{LOST}. Walpost has halted")]);
        // The watchdog has it in other words, and a problem of the slot is what the error is about.
        let problems = [
            (
                Kind::NotStreaming,
                "slot \"s\" is not read for 61 s: halted: why",
            ),
            (
                Kind::SlotLost,
                "slot \"s\" is lost: events are in the table only",
            ),
        ];
        let later = of(State::Halted, Some(&why), &problems, &[]);
        assert_eq!(lines(&later), [format!("{LOST}. help with not_streaming")]);
        assert_eq!((later.severity, later.rank), (Severity::Critical, 0));
        // What nobody has told is told.
        let missing = [(Kind::SlotMissing, "slot \"s\" does not exist")];
        let told = lines(&of(State::Halted, Some(&why), &missing, &[]));
        assert_eq!(
            told[1..],
            ["slot \"s\" does not exist. help with slot_missing"]
        );
    }

    #[test]
    fn worst_comes_first_and_each_dropped_slot_is_told() {
        let problems = [(Kind::PartitionsRunOut, "the last partition ends")];
        let summary = of(State::Streaming, None, &problems, &[dropped(3), dropped(4)]);
        let told = lines(&summary);
        assert_eq!(told.len(), 3, "{told:?}");
        for (line, entry) in told.iter().zip(["entry 3", "entry 4"]) {
            assert!(
                line.contains(entry) && line.contains("replay --dropped-slots --pipeline p"),
                "{line}"
            );
        }
        assert_eq!(summary.rank, 1);
        assert_eq!(of(State::Streaming, None, &problems, &[]).rank, 2);
    }

    #[test]
    fn short_absence_is_a_warning_and_being_told_to_stop_is_nothing() {
        let why = NotReady::State(State::Reconnecting, Some("refused".to_owned()));
        let soon = of(State::Reconnecting, Some(&why), &[], &[]);
        assert_eq!((soon.severity, soon.rank), (Severity::Warning, 2));
        let lasts = [(Kind::NotStreaming, "slot \"s\" is not read for 61 s: why")];
        let later = of(State::Reconnecting, Some(&why), &lasts, &[]);
        assert_eq!((later.severity, later.rank), (Severity::Critical, 1));
        let why = NotReady::State(State::Draining, None);
        let draining = of(State::Draining, Some(&why), &[], &[]);
        assert_eq!((draining.severity, draining.rank), (Severity::Ok, 3));
        assert_eq!(draining.reasons, []);
    }
}
