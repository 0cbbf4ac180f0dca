//! Determines whether a pipeline is ready, that is, whether it streams and makes progress. This
//! module performs no I/O.

use std::fmt;
use std::time::Duration;

use crate::delivery::stats::{LifecycleSnapshot, Totals};
use crate::model::lifecycle::{ErrorKind, Failure, KAFKA_DOWN_REMEDY, Omission, Outage, State};
use crate::model::rounded;

/// How long events may be in flight, without any of them becoming durable, before the pipeline
/// counts as not ready.
const DELIVERY_STALL_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the session's event loop may go without an iteration. The loop normally iterates at
/// least every ten seconds.
const EVENT_LOOP_STALL_TIMEOUT: Duration = Duration::from_secs(60);

/// The reason why a pipeline is not ready.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotReady {
    /// The pipeline is in a state other than streaming.
    State(State, Option<String>),
    /// No broker is reachable.
    KafkaDown(String, u64),
    /// Events are in flight, but none becomes durable.
    Stuck(u64, Duration),
    /// The session's event loop is stalled.
    EventLoopStalled(Duration),
    /// The publication omits events.
    Omission(Omission),
}

impl fmt::Display for NotReady {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::State(state, reason) => {
                f.write_str(match state {
                    State::Starting => "starting: streaming has not begun yet",
                    State::Streaming => "streaming",
                    State::StandingBy => "standing by",
                    State::Reconnecting => "reconnecting",
                    State::Draining => "stopping",
                    State::Halted => "halted",
                    State::Stopped => "stopped",
                })?;
                match reason {
                    Some(reason) => write!(f, ": {reason}"),
                    None => Ok(()),
                }
            }
            Self::KafkaDown(reason, 0) => {
                write!(f, "Kafka is unreachable (no events are waiting): {reason}")
            }
            Self::KafkaDown(reason, 1) => {
                write!(f, "Kafka is unreachable (1 event is waiting): {reason}")
            }
            Self::KafkaDown(reason, waiting) => {
                write!(
                    f,
                    "Kafka is unreachable ({waiting} events are waiting): {reason}"
                )
            }
            Self::Stuck(0, since) => write!(
                f,
                "Kafka has not responded for {}: no events are in flight, but a topic lookup or the commit of a checkpoint is pending",
                rounded::age(since.as_secs_f64())
            ),
            Self::Stuck(waiting, since) => write!(
                f,
                "{waiting} events are in flight, but Kafka has not acknowledged any for {}",
                rounded::age(since.as_secs_f64())
            ),
            Self::EventLoopStalled(since) => {
                let since = rounded::age(since.as_secs_f64());
                write!(f, "event loop stalled for {since}")
            }
            Self::Omission(left) => f.write_str(&left.what),
        }
    }
}

impl NotReady {
    /// Returns a description of the problem, to be displayed next to the state. Returns `None` if
    /// the state needs no further explanation.
    #[must_use]
    pub fn description(&self) -> Option<String> {
        match self {
            Self::State(State::Starting, None) => Some("streaming has not begun yet".to_owned()),
            Self::State(_, reason) => reason.clone(),
            Self::KafkaDown(..)
            | Self::Stuck(..)
            | Self::EventLoopStalled(_)
            | Self::Omission(_) => Some(self.to_string()),
        }
    }

    /// Returns the action that the operator can take. `error` is the pipeline's most recent error.
    #[must_use]
    pub fn remedy<'e>(&'e self, error: Option<&'e Failure>) -> &'e str {
        match self {
            Self::State(..) => error.map_or("See the log for details", |e| &e.remedy),
            Self::KafkaDown(..) => KAFKA_DOWN_REMEDY,
            Self::Stuck(..) => {
                "Check whether the brokers respond, and whether partitions have fewer in-sync replicas than \
                 min.insync.replicas: kafka-topics.sh --describe --under-min-isr-partitions"
            }
            Self::EventLoopStalled(_) => {
                "Restart Walpost (no events are lost), and report this problem with a copy of the log"
            }
            Self::Omission(left) => &left.remedy,
        }
    }
}

/// Returns why the pipeline is not ready, or `None` if the pipeline is ready.
///
/// A standby instance is reported as ready, because it can take over at any time. In a rolling
/// update, the new instance must become ready before the old instance, which is using the slot, is
/// stopped.
#[must_use]
pub(crate) fn why_not_ready(lifecycle: &LifecycleSnapshot, totals: &Totals) -> Option<NotReady> {
    match lifecycle.state {
        State::StandingBy => return None,
        State::Streaming => {}
        state @ (State::Starting | State::Reconnecting | State::Halted) => {
            let error = lifecycle.last_error.as_ref();
            return Some(NotReady::State(
                state,
                error.map(|error| error.message.clone()),
            ));
        }
        state @ (State::Draining | State::Stopped) => return Some(NotReady::State(state, None)),
    }
    if let Some(reason) = &lifecycle.kafka_down {
        // If no events are in flight, a row may still be waiting for its topic's metadata, and
        // therefore for Kafka.
        let waiting = totals.in_flight.max(u64::from(totals.waits));
        return Some(NotReady::KafkaDown(reason.clone(), waiting));
    }
    if is_stuck(totals) {
        return Some(NotReady::Stuck(
            totals.in_flight,
            totals.since_last_progress,
        ));
    }
    if is_hung(totals) {
        return Some(NotReady::EventLoopStalled(totals.since_last_iteration));
    }
    lifecycle.left_out.clone().map(NotReady::Omission)
}

/// Returns when the pipeline became unready for `reason`, in microseconds since 1970.
#[must_use]
pub(crate) fn not_ready_since(
    reason: &NotReady,
    lifecycle: &LifecycleSnapshot,
    now_micros: u64,
) -> u64 {
    let before = |ago: &Duration| {
        let ago = u64::try_from(ago.as_micros()).unwrap_or(u64::MAX);
        now_micros.saturating_sub(ago)
    };
    match reason {
        NotReady::State(..) => lifecycle.since_micros,
        NotReady::KafkaDown(..) => {
            let is_ongoing = |outage: &&Outage| {
                outage.kind == ErrorKind::KafkaBroker && outage.ended_micros.is_none()
            };
            let outage = lifecycle.outages.iter().find(is_ongoing);
            outage.map_or(lifecycle.since_micros, |outage| outage.began_micros)
        }
        NotReady::Stuck(_, ago) | NotReady::EventLoopStalled(ago) => before(ago),
        NotReady::Omission(left) => left.since_micros,
    }
}

/// Returns whether events have been in flight for too long without any of them becoming durable.
#[must_use]
pub(crate) fn is_stuck(totals: &Totals) -> bool {
    totals.waits && totals.since_last_progress >= DELIVERY_STALL_TIMEOUT
}

/// Returns whether the session of a streaming pipeline has been stalled for too long.
#[must_use]
pub(crate) fn is_hung(totals: &Totals) -> bool {
    totals.since_last_iteration >= EVENT_LOOP_STALL_TIMEOUT
}

/// Returns the age of the oldest event that was read but is not durable. If the pipeline is not
/// streaming, the result is at least the time since it stopped streaming. Returns `None` if another
/// instance is using the slot.
#[must_use]
pub(crate) fn lag_micros(
    lifecycle: &LifecycleSnapshot,
    totals: &Totals,
    now_micros: u64,
) -> Option<u64> {
    let oldest =
        (totals.oldest_micros > 0).then(|| now_micros.saturating_sub(totals.oldest_micros));
    let silence = match lifecycle.state {
        State::StandingBy => return None,
        State::Streaming | State::Draining => 0,
        State::Starting | State::Reconnecting | State::Halted | State::Stopped => {
            now_micros.saturating_sub(lifecycle.since_micros)
        }
    };
    Some(oldest.unwrap_or_default().max(silence))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::lifecycle::Failure;

    fn streaming() -> (LifecycleSnapshot, Totals) {
        let lifecycle = LifecycleSnapshot {
            state: State::Streaming,
            since_micros: 1_000_000,
            ..LifecycleSnapshot::default()
        };
        (lifecycle, Totals::default())
    }

    fn describe(lifecycle: &LifecycleSnapshot, totals: &Totals) -> String {
        why_not_ready(lifecycle, totals)
            .map_or_else(|| "ready".to_owned(), |reason| reason.to_string())
    }

    #[test]
    fn reports_streaming_and_standby_pipelines_as_ready() {
        let (mut lifecycle, mut totals) = streaming();
        assert_eq!(describe(&lifecycle, &totals), "ready");
        totals.since_last_progress = Duration::from_secs(3600);
        assert_eq!(describe(&lifecycle, &totals), "ready", "idle");
        totals.waits = true;
        totals.since_last_progress = Duration::from_secs(9);
        assert_eq!(describe(&lifecycle, &totals), "ready", "short wait");
        lifecycle.left_out = Some(Omission {
            since_micros: 5,
            what: "the publication lacks a table".to_owned(),
            remedy: "Add it".to_owned(),
        });
        totals.waits = false;
        let reason = why_not_ready(&lifecycle, &totals).expect("a reason");
        assert_eq!(reason.to_string(), "the publication lacks a table");
        assert_eq!(reason.remedy(None), "Add it");
        assert_eq!(not_ready_since(&reason, &lifecycle, 9), 5);
        lifecycle.state = State::StandingBy;
        totals.since_last_progress = Duration::from_secs(3600);
        assert_eq!(describe(&lifecycle, &totals), "ready");
    }

    #[test]
    fn reports_why_a_stalled_pipeline_is_not_ready() {
        let (mut lifecycle, mut totals) = streaming();
        totals.in_flight = 7;
        totals.waits = true;
        totals.since_last_progress = Duration::from_secs(12);
        assert!(describe(&lifecycle, &totals).contains("7 events are in flight"));
        // A pipeline without events in flight may still be waiting for a checkpoint to be
        // committed.
        let idle = Totals {
            in_flight: 0,
            ..totals
        };
        let text = describe(&lifecycle, &idle);
        assert!(!text.contains("0 events"), "{text}");
        assert!(text.contains("commit of a checkpoint"), "{text}");
        // At the time of the check, the pipeline has been streaming for 99 s.
        let since = |lifecycle: &LifecycleSnapshot, totals: &Totals| {
            let reason = why_not_ready(lifecycle, totals).expect("a reason");
            not_ready_since(&reason, lifecycle, 100_000_000)
        };
        assert_eq!(since(&lifecycle, &totals), 88_000_000);
        lifecycle.kafka_down = Some("2/2 brokers are down".to_owned());
        let outage = |began_micros, ended_micros| Outage {
            kind: ErrorKind::KafkaBroker,
            reason: String::new(),
            began_micros,
            ended_micros,
            attempts: 1,
        };
        lifecycle.outages = vec![
            outage(70_000_000, None),
            outage(20_000_000, Some(30_000_000)),
        ];
        assert!(describe(&lifecycle, &totals).contains("2/2 brokers are down"));
        assert_eq!(since(&lifecycle, &totals), 70_000_000);
        let (mut lifecycle, mut totals) = streaming();
        totals.since_last_iteration = Duration::from_secs(61);
        assert!(describe(&lifecycle, &totals).contains("61 s"));
        assert_eq!(since(&lifecycle, &totals), 39_000_000);
        lifecycle.state = State::Halted;
        assert_eq!(since(&lifecycle, &totals), 1_000_000);
    }

    #[test]
    fn reports_why_a_pipeline_that_does_not_stream_is_not_ready() {
        let (mut lifecycle, totals) = streaming();
        lifecycle.last_error = Some(Failure {
            at_micros: 0,
            kind: ErrorKind::Setup,
            message: "connection refused".to_owned(),
            remedy: String::new(),
        });
        for (state, expected) in [
            (
                State::Starting,
                "starting: streaming has not begun yet: connection refused",
            ),
            (State::Reconnecting, "reconnecting: connection refused"),
            (State::Halted, "halted: connection refused"),
            (State::Draining, "stopping"),
            (State::Stopped, "stopped"),
        ] {
            lifecycle.state = state;
            assert_eq!(describe(&lifecycle, &totals), expected);
        }
    }

    #[test]
    fn measures_lag_from_the_oldest_undelivered_event_or_from_the_disconnect() {
        let (mut lifecycle, mut totals) = streaming();
        let now = 10_000_000;
        assert_eq!(lag_micros(&lifecycle, &totals, now), Some(0));
        totals.oldest_micros = 7_000_000;
        assert_eq!(lag_micros(&lifecycle, &totals, now), Some(3_000_000));
        lifecycle.state = State::Reconnecting;
        assert_eq!(lag_micros(&lifecycle, &totals, now), Some(9_000_000));
        lifecycle.state = State::StandingBy;
        assert_eq!(lag_micros(&lifecycle, &totals, now), None);
    }
}
