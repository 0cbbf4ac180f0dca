//! Checks once a second whether a pipeline makes progress, and logs each problem when it starts,
//! periodically while it persists, and when it ends.
//!
//! This module performs no I/O: it takes the pipeline's state and the time as arguments, and
//! returns the log lines.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use bytesize::ByteSize;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tracing::{info, warn};

use super::health::{self, NotReady};
use super::problem::{self, Kind, Problem};
use crate::delivery::stats::{About, LifecycleSnapshot, Totals};
use crate::model::lifecycle::State;
use crate::model::lsn::Lsn;
use crate::model::outage::{Outage, OutageMessage};
use crate::model::rounded::{self, Elapsed};
use crate::model::time::seconds;
use crate::model::vitals::{OpenTransaction, SlotVitals, TransactionOwner, Vitals};

/// How often an ongoing problem is logged again.
const REMINDER_INTERVAL: Duration = Duration::from_secs(600);
/// A pipeline that has not streamed for this long is reported. This is longer than a server restart
/// usually takes.
const DISCONNECTED_THRESHOLD: Duration = Duration::from_secs(60);
/// How long WAL may be pending, without anything being delivered or confirmed, before a lack of
/// progress is reported. This is long enough for PostgreSQL to decode a transaction of several
/// gigabytes.
const STALL_THRESHOLD: Duration = Duration::from_secs(300);
/// Minimum amount of pending WAL for which a lack of progress is reported; equal to the default
/// size of a WAL segment. Smaller amounts are ignored, because even an idle database writes some
/// WAL.
const PENDING_WAL_BYTES_MIN: u64 = 16 << 20;
/// Query results older than this are considered outdated.
const QUERY_AGE_MAX: Duration = Duration::from_secs(30);
/// A transaction is reported if it has been open for at least this long, and has also reached
/// [`RETAINED_WAL_BYTES_MIN`] or [`TRANSACTION_IDS_MIN`].
const LONG_TRANSACTION_THRESHOLD: Duration = Duration::from_secs(300);
/// Minimum amount of WAL that a long transaction must retain to be reported. Only WAL whose events
/// have already been delivered is counted.
const RETAINED_WAL_BYTES_MIN: u64 = 64 << 20;
/// A long transaction is reported if at least this many transaction IDs have been assigned since
/// the transaction obtained its own ID.
const TRANSACTION_IDS_MIN: i64 = 100_000_000;
/// A transaction that has been open for this long is reported if the WAL that it retains exceeds a
/// quarter of the slot's limit, even if [`LONG_TRANSACTION_THRESHOLD`] has not been reached.
const LONG_TRANSACTION_NEAR_LIMIT_THRESHOLD: Duration = Duration::from_secs(10);

/// The state of a pipeline at one point in time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Facts<'f> {
    pub about: &'f About,
    /// Lifecycle state, which changes rarely.
    pub lifecycle: &'f LifecycleSnapshot,
    pub totals: &'f Totals,
    pub now: Instant,
    /// The current time, in microseconds since 1970.
    pub now_micros: u64,
}

/// A problem and the time when it was first detected.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Lasting {
    #[serde(flatten)]
    pub problem: Problem,
    /// When the problem was first detected, in seconds since 1970.
    pub since: f64,
}

/// A line for the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Line {
    /// The problem has just been detected.
    Started(Problem),
    /// The problem persists. The duration is the time since the problem was first detected.
    Ongoing(Problem, Duration),
    /// The problem has ended. The duration is the time for which it lasted.
    Resolved(Kind, Duration),
}

impl Line {
    pub(crate) fn log(&self, pipeline: &str) {
        match self {
            Self::Started(problem) => {
                let (kind, line) = (problem.kind.name(), problem.line());
                warn!(pipeline, problem = kind, "watchdog: {line}");
            }
            Self::Ongoing(problem, elapsed) => {
                let (kind, line) = (problem.kind.name(), problem.line());
                warn!(pipeline, problem = kind, elapsed = %Elapsed(*elapsed), "watchdog: {line}");
            }
            Self::Resolved(kind, lasted) => {
                let kind = kind.name();
                info!(
                    pipeline,
                    problem = kind,
                    elapsed = %Elapsed(*lasted),
                    "watchdog: {kind} resolved"
                );
            }
        }
    }
}

/// The watchdog's state for one pipeline.
#[derive(Debug, Default)]
pub(crate) struct Watchdog {
    progress: Option<ProgressMark>,
    /// The ID of the oldest open transaction, and when it was first seen.
    oldest: Option<(String, Instant)>,
    open: BTreeMap<Kind, OpenProblem>,
}

/// The pipeline's progress, and the last time at which the pipeline made progress or was idle.
#[derive(Debug)]
struct ProgressMark {
    confirmed: Lsn,
    delivered: u64,
    at: Instant,
}

#[derive(Debug)]
struct OpenProblem {
    problem: Problem,
    since_micros: u64,
    messages: Outage,
}

/// The result of checking for one kind of problem.
enum Verdict {
    Fine,
    Wrong(Problem),
    /// The problem exists, but another component logs it.
    LoggedElsewhere(Problem),
    /// It is currently unknown whether the problem exists, so the result of the previous check is
    /// kept.
    Unknown,
    /// This kind of problem does not apply in the current state of the pipeline, or a different
    /// kind of problem has replaced it.
    NotApplicable,
}

impl Watchdog {
    /// Checks the pipeline, and returns the lines to log. Must be called about once a second.
    pub(crate) fn check(&mut self, facts: &Facts<'_>) -> Vec<Line> {
        let mut lines = Vec::new();
        let (slot, partitions) = (slot(facts), partitions(facts));
        for kind in Kind::ALL {
            let verdict = match kind {
                Kind::NotStreaming => check_streaming(facts),
                Kind::EventLoopStalled => event_loop_stalled(facts),
                Kind::DeliveryStuck => delivery_stuck(facts),
                Kind::NoProgress => self.check_progress(facts),
                Kind::LongTransaction => self.long_transaction(facts),
                Kind::SlotMissing | Kind::SlotLost | Kind::SlotUnreserved | Kind::SlotInDanger => {
                    verdict_for_kind(kind, &slot)
                }
                Kind::PartitionsRunOut => verdict_for_kind(kind, &partitions),
                Kind::RowsLeftOut => rows_left_out(facts),
            };
            lines.extend(self.update_problem(kind, verdict, facts));
        }
        lines
    }

    /// Returns the problems found by the last check.
    #[must_use]
    pub(crate) fn problems(&self) -> Vec<Lasting> {
        let lasting = |open: &OpenProblem| Lasting {
            problem: open.problem.clone(),
            since: seconds(open.since_micros),
        };
        self.open.values().map(lasting).collect()
    }

    fn update_problem(&mut self, kind: Kind, verdict: Verdict, facts: &Facts<'_>) -> Option<Line> {
        let (problem, is_logged) = match verdict {
            Verdict::Unknown => return None,
            Verdict::NotApplicable => {
                self.open.remove(&kind);
                return None;
            }
            Verdict::Fine => {
                let lasted = self.open.remove(&kind)?.messages.end(facts.now)?;
                return Some(Line::Resolved(kind, whole(lasted)));
            }
            Verdict::Wrong(problem) => (problem, false),
            Verdict::LoggedElsewhere(problem) => (problem, true),
        };
        let open = self.open.entry(kind).or_insert_with(|| OpenProblem {
            problem: problem.clone(),
            since_micros: facts.now_micros,
            messages: Outage::reminding(REMINDER_INTERVAL),
        });
        open.problem = problem;
        if is_logged {
            return None;
        }
        let problem = open.problem.clone();
        match open.messages.failed(facts.now) {
            OutageMessage::Started => Some(Line::Started(problem)),
            OutageMessage::Ongoing(elapsed, _) => Some(Line::Ongoing(problem, whole(elapsed))),
            OutageMessage::Suppressed => None,
        }
    }

    fn check_progress(&mut self, facts: &Facts<'_>) -> Verdict {
        let &Facts { totals, now, .. } = facts;
        if let Some(verdict) = without_stream(facts.lifecycle.state) {
            self.progress = None;
            return verdict;
        }
        let mark = self.progress.get_or_insert(ProgressMark {
            confirmed: totals.confirmed,
            delivered: totals.delivered,
            at: now,
        });
        if mark.confirmed != totals.confirmed || mark.delivered != totals.delivered {
            (mark.confirmed, mark.delivered) = (totals.confirmed, totals.delivered);
            mark.at = now;
            return Verdict::Fine;
        }
        let Some((vitals, slot)) = recent_vitals(facts) else {
            return Verdict::Unknown;
        };
        let confirmed = totals.confirmed.max(slot.confirmed.unwrap_or_default());
        let lag = vitals.end.bytes_since(confirmed);
        if lag < PENDING_WAL_BYTES_MIN {
            mark.at = now;
            return Verdict::Fine;
        }
        let elapsed = now.duration_since(mark.at);
        if health::is_stuck(totals) || health::is_hung(totals) || elapsed < STALL_THRESHOLD {
            // If delivery is stuck or the event loop is stalled, a more specific problem is
            // reported instead of a lack of progress.
            return Verdict::Unknown;
        }
        Verdict::Wrong(Problem::new(
            Kind::NoProgress,
            format!(
                "nothing has been delivered or confirmed for {}, although {} of WAL is waiting after {confirmed}",
                rounded::age(elapsed.as_secs_f64()),
                ByteSize::b(lag)
            ),
            format!(
                "PostgreSQL may be decoding a large transaction, which needs no action, or its walsender may be stuck. To find out: \
                 SET search_path = pg_catalog; SELECT pid, backend_start, wait_event FROM pg_stat_activity WHERE pid = (SELECT \
                 active_pid FROM pg_replication_slots WHERE slot_name = '{}'). To restart the stream without losing events: SELECT \
                 pg_catalog.pg_terminate_backend(pid)",
                facts.about.slot
            ),
        ))
    }

    fn long_transaction(&mut self, facts: &Facts<'_>) -> Verdict {
        if let Some(verdict) = without_stream(facts.lifecycle.state) {
            self.oldest = None;
            return verdict;
        }
        let Some((vitals, slot)) = recent_vitals(facts) else {
            return Verdict::Unknown;
        };
        let Some(oldest) = &vitals.oldest_open else {
            self.oldest = None;
            return Verdict::Fine;
        };
        if self
            .oldest
            .as_ref()
            .is_none_or(|(xid, _)| *xid != oldest.xid)
        {
            self.oldest = Some((oldest.xid.clone(), facts.now));
        }
        let first_seen = self.oldest.as_ref().map(|(_, first_seen)| *first_seen);
        let observed = first_seen.map_or(Duration::ZERO, |at| facts.now.duration_since(at));
        let began = oldest.began_micros.map(|began| {
            let micros = facts.now_micros.saturating_sub(began);
            Duration::from_micros(micros)
        });
        let open = began.unwrap_or_default().max(observed);
        let retained = match (slot.confirmed, slot.restart) {
            (Some(confirmed), Some(restart)) => confirmed.bytes_since(restart),
            _ => 0,
        };
        let remaining = problem::remaining_wal(vitals);
        let is_near_limit = remaining.is_some_and(|(_, limit)| retained > limit / 4);
        let is_long = open >= LONG_TRANSACTION_THRESHOLD
            && (retained >= RETAINED_WAL_BYTES_MIN || oldest.age >= TRANSACTION_IDS_MIN)
            || open >= LONG_TRANSACTION_NEAR_LIMIT_THRESHOLD && is_near_limit;
        match is_long {
            true => Verdict::Wrong(long_transaction(oldest, open, retained)),
            false => Verdict::Fine,
        }
    }
}

/// Rounds down to whole seconds.
fn whole(duration: Duration) -> Duration {
    Duration::from_secs(duration.as_secs())
}

/// Returns the last query results if they are recent and the slot exists.
fn recent_vitals<'f>(facts: &Facts<'f>) -> Option<(&'f Vitals, &'f SlotVitals)> {
    let (vitals, queried_at) = facts.lifecycle.database.as_ref()?;
    let age = Duration::from_micros(facts.now_micros.saturating_sub(*queried_at));
    (age <= QUERY_AGE_MAX).then_some((vitals, vitals.slot.as_ref()?))
}

/// Returns the verdict for a pipeline that is not streaming, or `None` if it is streaming.
fn without_stream(state: State) -> Option<Verdict> {
    match state {
        State::Streaming => None,
        State::StandingBy | State::Halted => Some(Verdict::NotApplicable),
        State::Starting | State::Reconnecting | State::Draining | State::Stopped => {
            Some(Verdict::Unknown)
        }
    }
}

fn check_streaming(facts: &Facts<'_>) -> Verdict {
    let state = facts.lifecycle.state;
    let micros = facts
        .now_micros
        .saturating_sub(facts.lifecycle.since_micros);
    let elapsed = Duration::from_micros(micros);
    match state {
        State::Streaming => return Verdict::Fine,
        State::StandingBy => return Verdict::NotApplicable,
        State::Draining | State::Stopped => return Verdict::Unknown,
        State::Starting | State::Reconnecting | State::Halted
            if elapsed < DISCONNECTED_THRESHOLD =>
        {
            return Verdict::Unknown;
        }
        State::Starting | State::Reconnecting | State::Halted => {}
    }
    let error = facts.lifecycle.last_error.as_ref();
    let reason = NotReady::State(state, error.map(|error| error.message.clone()));
    let remedy = reason.remedy(error);
    let slot = &facts.about.slot;
    Verdict::Wrong(Problem::new(
        Kind::NotStreaming,
        format!(
            "slot {slot:?} has not been read for {}: {reason}",
            rounded::age(elapsed.as_secs_f64())
        ),
        format!("{remedy}. Meanwhile, PostgreSQL retains WAL for the slot: monitor its disk space"),
    ))
}

fn event_loop_stalled(facts: &Facts<'_>) -> Verdict {
    let totals = facts.totals;
    match facts.lifecycle.state {
        State::Streaming if health::is_hung(totals) => Verdict::Wrong(unready(
            Kind::EventLoopStalled,
            &NotReady::EventLoopStalled(totals.since_last_iteration),
        )),
        // Only the event loop changes the state, so the loop is running again. If the loop still
        // counted as stalled while the pipeline reconnects, systemd would kill the process because
        // of an unreachable server.
        State::Streaming | State::Starting | State::Reconnecting => Verdict::Fine,
        State::StandingBy | State::Halted | State::Draining | State::Stopped => {
            Verdict::NotApplicable
        }
    }
}

fn delivery_stuck(facts: &Facts<'_>) -> Verdict {
    let (lifecycle, totals) = (facts.lifecycle, facts.totals);
    if let Some(verdict) = without_stream(lifecycle.state) {
        return verdict;
    }
    if !health::is_stuck(totals) {
        return Verdict::Fine;
    }
    let stuck = |reason: &NotReady| unready(Kind::DeliveryStuck, reason);
    match &lifecycle.kafka_down {
        // The producer already logs that Kafka is unreachable.
        Some(reason) => Verdict::LoggedElsewhere(stuck(&NotReady::KafkaDown(
            reason.clone(),
            totals.in_flight,
        ))),
        None => Verdict::Wrong(stuck(&NotReady::Stuck(
            totals.in_flight,
            totals.since_last_progress,
        ))),
    }
}

fn rows_left_out(facts: &Facts<'_>) -> Verdict {
    let lifecycle = facts.lifecycle;
    match (without_stream(lifecycle.state), &lifecycle.left_out) {
        (Some(verdict), _) => verdict,
        (None, None) => Verdict::Fine,
        (None, Some(left)) => Verdict::Wrong(Problem::new(
            Kind::RowsLeftOut,
            left.what.clone(),
            left.remedy.clone(),
        )),
    }
}

fn unready(kind: Kind, reason: &NotReady) -> Problem {
    Problem::new(kind, reason.to_string(), reason.remedy(None))
}

/// Returns the results of the last database query. Returns an error with a verdict if there are no
/// results, or if the pipeline's current state does not permit their use.
fn database<'f>(facts: &Facts<'f>) -> Result<&'f Vitals, Verdict> {
    match facts.lifecycle.state {
        State::StandingBy => return Err(Verdict::NotApplicable),
        State::Draining => return Err(Verdict::Unknown),
        State::Starting
        | State::Streaming
        | State::Reconnecting
        | State::Halted
        | State::Stopped => {}
    }
    let database = facts.lifecycle.database.as_ref();
    database.map(|(vitals, _)| vitals).ok_or(Verdict::Unknown)
}

fn slot(facts: &Facts<'_>) -> Result<Option<Problem>, Verdict> {
    let vitals = database(facts)?;
    Ok(problem::slot_problem(
        &facts.about.slot,
        vitals,
        &facts.about.commands,
    ))
}

fn partitions(facts: &Facts<'_>) -> Result<Option<Problem>, Verdict> {
    let vitals = database(facts)?;
    let outbox = &facts.about.outbox;
    let commands = &facts.about.commands;
    Ok(problem::partitions_problem(
        outbox,
        vitals,
        facts.now_micros,
        commands,
    ))
}

fn verdict_for_kind(kind: Kind, found: &Result<Option<Problem>, Verdict>) -> Verdict {
    match found {
        Ok(None) => Verdict::Fine,
        Ok(Some(problem)) if problem.kind == kind => Verdict::Wrong(problem.clone()),
        // A different kind of problem has replaced this kind, so this kind must not be logged as
        // resolved.
        Ok(Some(_)) | Err(Verdict::NotApplicable) => Verdict::NotApplicable,
        Err(_) => Verdict::Unknown,
    }
}

fn long_transaction(oldest: &OpenTransaction, open: Duration, retained: u64) -> Problem {
    let or_empty = |name: &Option<String>| name.clone().unwrap_or_default();
    let (role, database) = (or_empty(&oldest.role), or_empty(&oldest.database));
    let began = oldest.began_micros.and_then(|began| {
        let began = i64::try_from(began).ok()?;
        Timestamp::from_microsecond(began).ok()
    });
    let since = match began {
        Some(began) => format!("since {began:.0}"),
        // PostgreSQL may hide the start time of another role's transaction. In this case, the
        // transaction may have been open longer than the watchdog has observed it.
        None => format!("for at least {}", rounded::age(open.as_secs_f64())),
    };
    let (who, remedy) = match &oldest.whose {
        TransactionOwner::Session(pid) => (
            format!("PID {pid}"),
            format!(
                "Ask the owner of the transaction to end it, or roll the transaction back: SELECT \
                 pg_catalog.pg_terminate_backend({pid})"
            ),
        ),
        TransactionOwner::Prepared(name) => {
            let quoted = name.replace('\'', "''");
            // With standard_conforming_strings = off, a backslash would escape the quote that
            // follows.
            let quoted = match quoted.contains('\\') {
                true => format!("E'{}'", quoted.replace('\\', r"\\")),
                false => format!("'{quoted}'"),
            };
            (
                format!("prepared transaction {name:?}"),
                format!(
                    "In database {database:?}, run: COMMIT PREPARED {quoted}, or ROLLBACK PREPARED {quoted}"
                ),
            )
        }
    };
    Problem::new(
        Kind::LongTransaction,
        format!(
            "a transaction has been open {since} ({who}, role {role:?}, database {database:?}): because of it, the slot retains {} \
             of WAL that has already been delivered, and dead catalog rows from {} transactions",
            ByteSize::b(retained),
            oldest.age
        ),
        remedy,
    )
}

#[cfg(test)]
mod tests;
